"""Dispatch state and keys: modes, transforms, tracers, profilers and subclasses that must see a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..stack import autocast

_INCLUDED, _EXCLUDED = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
_KEYS, _Key = torch._C._dispatch_keys, torch._C.DispatchKey
# The C function of the method, which costs a third less time.
_get_key_bits = getattr(torch._C.DispatchKeySet.raw_repr, "__func__", torch._C.DispatchKeySet.raw_repr)
# Names that every call looks up are bound here, because fifty attribute lookups cost more time than a tiny call.
_Tensor, _Parameter, _dtype = torch.Tensor, torch.nn.Parameter, torch.dtype
count_function_modes, is_profiling = torch._C._len_torch_function_stack, torch.autograd._profiler_enabled
_is_autocasting = autocast.is_enabled_anywhere
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_grad_enabled = torch.is_grad_enabled
# The C function of `torch.backends.cuda.matmul.fp32_precision`, because the property costs half a microsecond.
get_fp32_precision: Callable[[], str] = (
    partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
    if hasattr(torch._C, "_get_fp32_precision_getter")
    else lambda: torch.backends.cuda.matmul.fp32_precision
)

# Dispatch keys that every ordinary call includes. Modes, transforms and tracing add others.
_USUAL_ADDED = [torch._C.DispatchKeySet(key).raw_repr() for key in (_Key.BackendSelect, _Key.ADInplaceOrView)]
_UNUSUAL_ADDED = ~(_USUAL_ADDED[0] | _USUAL_ADDED[1])
# One of the keys that are excluded below autograd, where no gradient may be recorded.
_AUTOGRAD = torch._C.DispatchKeySet(_Key.AutogradOther).raw_repr()
_usual_keys: set[int] = set()  # dispatch key bits of ordinary tensors
_OPTION_TYPES = {type(None), bool, str, torch.dtype}
_known_devices: set[torch.device] = set()


def _learn_dispatch_keys(t: Tensor) -> bool:
    """Learn the dispatch keys of ordinary tensors on the device of `t`, and return whether `t` has them."""
    device = t.device
    if device in _known_devices or device.type not in ("cpu", "cuda"):
        return False
    for mode in (False, True):
        with torch.inference_mode(mode):
            made = torch.empty(0, device=device)
        if type(made) is not _Tensor or _is_wrapped(made):
            return False  # a mode or transform is active, so a later call learns
        _usual_keys.add(_get_key_bits(_KEYS(made)))
    _known_devices.add(device)
    return _get_key_bits(_KEYS(t)) in _usual_keys


def is_ordinary_tensor(t: Tensor) -> bool:
    """Return whether `t` is an ordinary tensor: no subclass, wrapper of a transform, negated view or fake tensor."""
    kind = type(t)
    if kind is not _Tensor and kind is not _Parameter:
        return False
    return _get_key_bits(_KEYS(t)) in _usual_keys or _learn_dispatch_keys(t)


def is_dispatch_idle() -> bool:
    """Return whether no mode, transform, tracer, autocast, forward-mode AD or profiler must see the call."""
    return (
        not _get_key_bits(_INCLUDED()) & _UNUSUAL_ADDED
        and not count_function_modes()
        and not _is_autocasting()
        and forward_ad._current_level < 0
        and not is_profiling()
    )


def is_below_autograd() -> bool:
    """Return whether the call comes from below autograd, where no gradient may be recorded."""
    return bool(_get_key_bits(_EXCLUDED()) & _AUTOGRAD)


def is_backward_direct(*tensors: Tensor) -> bool:
    """Return whether a backward of the eager shortcut may bypass the dispatcher.

    It may not with a graph of the backward, because the operator raises for second derivatives.
    """
    short = not torch.compiler.is_dynamo_compiling() and not torch.is_grad_enabled()
    return short and is_dispatch_idle() and all(map(is_ordinary_tensor, tensors))


def make_call_key(tensors: Sequence, options: Sequence) -> list | None:
    """Return the dispatch key of a call, or None if an argument is unusual.

    The key determines how a call is validated and computed, except for tensor values. A tensor contributes its shape,
    strides, dtype, device and whether its gradient is recorded. An option contributes itself. There is no key for a
    tensor that is not `is_ordinary_tensor`, and none for options of types outside `_OPTION_TYPES`. Equal values of
    other types, such as 1 and True, must not share a key.
    """
    found: list = []
    records = _is_grad_enabled()
    for x in tensors:
        if x is None:
            found.append(None)
            continue
        kind = type(x)
        if kind is not _Tensor and kind is not _Parameter:
            return None
        if _get_key_bits(_KEYS(x)) not in _usual_keys and not _learn_dispatch_keys(x):
            return None
        found += x.shape, x.stride(), x.dtype, x.get_device(), records and x.requires_grad
    for x in options:
        if type(x) not in _OPTION_TYPES:
            return None
    found += options
    return found


def make_operator_key(arguments: Sequence) -> list:
    """Return the `make_call_key` of the arguments of an operator's body.

    The dispatcher has validated the types and passes only plain tensors. Recorded gradients do not matter there.
    """
    found: list = []
    for x in arguments:
        if x is None or x is True or x is False or not isinstance(x, _Tensor):
            found.append(x)
        else:
            found += x.shape, x.stride(), x.dtype, x.get_device()
    return found


def make_rowless_key(per_token: tuple, indices: tuple, options: tuple) -> list | None:
    """Return the `make_call_key` of a ragged call without leading sizes, which differ from one ragged call to the next.

    Kernels need contiguous indices, and contiguity may depend on the leading size, so it is part of the key. For three
    axes or fewer the shape is not sliced, because a slice costs as much time as all other work.
    """
    found: list = []
    records = _is_grad_enabled()
    for x in per_token:
        if x is None:
            found.append(None)
            continue
        if not is_ordinary_tensor(x):
            return None
        shape = x.shape
        n = len(shape)
        width = shape[1] if n == 2 else (shape[1], shape[2]) if n == 3 else shape[1:] if n else -1
        found += width, x.stride(), x.dtype, x.get_device(), records and x.requires_grad
    for x in indices:
        if x is None:
            found.append(None)
            continue
        if type(x) is not _Tensor or (_get_key_bits(_KEYS(x)) not in _usual_keys and not _learn_dispatch_keys(x)):
            return None
        n = x.dim()
        found += -1 if n == 1 else x.shape[1] if n == 2 else x.shape, x.dtype, x.get_device(), x.is_contiguous()
    others = make_call_key((), options)
    return None if others is None else found + others


def is_call_direct(*tensors: Tensor | None) -> bool:
    """Return whether a call with these arguments that needs no gradient may bypass the dispatcher."""
    return is_dispatch_idle() and all(t is None or is_ordinary_tensor(t) for t in tensors)
