"""Recognition of the last call of a function, in less time than the computation of a dispatch key."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_, itemgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from .watchers import count_function_modes, get_fp32_precision, is_profiling

# The guards of torch.compile, a private class. Without it, every call computes its dispatch key.
_Guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
_MIN_REPEATS = 3  # equal calls before a guard is created, so that calls that always differ create none


class _GuardedCall:
    """The decisions about a past call, and the guards that recognize an equal call.

    The guards of torch compare the tensor metadata of `watchers.make_call_key`. They also compare dispatch keys,
    including the keys that modes, transforms, autocast and tracing add. This detects a call that the dispatcher must
    see.
    """

    __slots__ = ("absent", "check", "found", "is_cuda", "options", "precision", "present", "records")

    def __init__(self, check: Callable[..., bool], found: Any, tensors: tuple, options: tuple) -> None:
        self.check, self.found, self.options = check, found, options
        # Settings that affect these tensors, else None.
        self.precision = get_fp32_precision() if tensors[0].dtype is torch.float32 else None
        self.records = torch.is_grad_enabled() if any(x is not None and x.requires_grad for x in tensors) else None
        self.present = itemgetter(*[n for n, x in enumerate(tensors) if x is not None])
        self.absent = [n for n, x in enumerate(tensors) if x is None]
        self.is_cuda = tensors[0].is_cuda

    def fits(self, tensors: tuple, options: tuple) -> bool:
        """Return whether the call is equal to the past call."""
        for n in self.absent:
            if tensors[n] is not None:
                return False
        if count_function_modes() or forward_ad._current_level >= 0 or is_profiling():
            return False
        present = self.present(tensors)
        try:
            # The guards abort the process for tensors without strides, such as nested tensors and some devices.
            for x in present:
                if x.is_nested or not (x.is_cuda if self.is_cuda else x.is_cpu):
                    return False
        except (AttributeError, ValueError):  # not a tensor; a Proxy of torch.fx has no truth value
            return False
        return (
            self.check(*present)
            and all(map(is_, options, self.options))
            and (self.records is None or self.records is torch.is_grad_enabled())
            and (self.precision is None or self.precision == get_fp32_precision())
        )


class RecentCall:
    """The last call of one function.

    All calls have the same number of tensors and options. A tensor may be None, but Q and another tensor are present.
    Options are compared by identity, which suffices for True, dtypes and string literals.
    """

    __slots__ = ("_known", "_last", "_times", "ignores_rows")

    def __init__(self, ignores_rows: bool = False) -> None:
        """Create an empty record. With `ignores_rows`, tensors may have any leading size."""
        self.ignores_rows = ignores_rows
        self.forget()

    def forget(self) -> None:
        """Forget the last call."""
        self._known: _GuardedCall | None = None
        self._last: Any = None
        self._times = 0

    def find(self, tensors: tuple, options: tuple) -> Any:
        """Return the decisions for a call equal to the last one, else None."""
        known = self._known
        if known is None:
            return None
        if known.fits(tensors, options):
            return known.found
        self._known, self._times = None, 0
        return None

    def note_result(self, found: Any, tensors: tuple, options: tuple) -> None:
        """Note that `found` serves all calls with the dispatch key of this one."""
        if found is not self._last:
            self._last, self._times = found, 1
            return
        self._times += 1
        if self._times == _MIN_REPEATS and _Guards is not None:
            self._known = self._make_guard(found, tensors, options)

    def _make_guard(self, found: Any, tensors: tuple, options: tuple) -> _GuardedCall | None:
        """Return the guards for a call, or None if this version of torch does not support them."""
        given = [x for x in tensors if x is not None]
        sizes: list[list[int | None]] = [list(x.shape) for x in given]
        if self.ignores_rows:
            sizes = [[None, *shape[1:]] for shape in sizes]
        strides = [list(x.stride()) for x in given]
        try:
            check = _Guards(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
            return _GuardedCall(check, found, tensors, options) if check(*given) else None
        except (TypeError, SystemError):  # another version of torch has other arguments
            return None
