"""Who has to see a call: modes, transforms, tracers, profilers, subclasses. And what is seen of a call's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..stack import autocast

_INCLUDED, _EXCLUDED = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
_KEYS, _Key = torch._C._dispatch_keys, torch._C.DispatchKey
# The C function below the method, which takes a third less time.
_bits = getattr(torch._C.DispatchKeySet.raw_repr, "__func__", torch._C.DispatchKeySet.raw_repr)
# Names that every call looks up are bound here: a tiny call takes less time than fifty attributes.
_Tensor, _Parameter, _dtype = torch.Tensor, torch.nn.Parameter, torch.dtype
function_modes, profiling = torch._C._len_torch_function_stack, torch.autograd._profiler_enabled
_autocasting = autocast.is_anywhere
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_grad_enabled = torch.is_grad_enabled
# The C function below `torch.backends.cuda.matmul.fp32_precision`, which takes half a microsecond.
fp32_precision: Callable[[], str] = (
    partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
    if hasattr(torch._C, "_get_fp32_precision_getter")
    else lambda: torch.backends.cuda.matmul.fp32_precision
)

# Dispatch keys that every call gets while nothing is going on: modes, transforms and tracing add others.
_USUAL_ADDED = [torch._C.DispatchKeySet(key).raw_repr() for key in (_Key.BackendSelect, _Key.ADInplaceOrView)]
_UNUSUAL_ADDED = ~(_USUAL_ADDED[0] | _USUAL_ADDED[1])
# One of the keys that are taken away below autograd, where nothing may be recorded.
_AUTOGRAD = torch._C.DispatchKeySet(_Key.AutogradOther).raw_repr()
_usual_keys: set[int] = set()  # of the dispatch keys of tensors that are only memory on a device
_OPTIONS = {type(None), bool, str, torch.dtype}
_devices_known: set[torch.device] = set()


def _is_newly_known(t: Tensor) -> bool:
    """Learn the dispatch keys of ordinary tensors on a device where some backend reads memory: are those of `t`?"""
    device = t.device
    if device in _devices_known or device.type not in ("cpu", "cuda"):
        return False
    for mode in (False, True):
        with torch.inference_mode(mode):
            made = torch.empty(0, device=device)
        if type(made) is not _Tensor or _is_wrapped(made):
            return False  # by a mode or transform that goes on: a later call learns
        _usual_keys.add(_bits(_KEYS(made)))
    _devices_known.add(device)
    return _bits(_KEYS(t)) in _usual_keys


def is_memory(t: Tensor) -> bool:
    """Whether `t` is an ordinary tensor: no subclass, transform's wrapper, negated view, fake or functional tensor."""
    kind = type(t)
    if kind is not _Tensor and kind is not _Parameter:
        return False
    return _bits(_KEYS(t)) in _usual_keys or _is_newly_known(t)


def nobody_watches() -> bool:
    """Whether neither modes, transforms, tracing, autocast, forward-mode AD nor a profiler have to see the call."""
    return (
        not _bits(_INCLUDED()) & _UNUSUAL_ADDED
        and not function_modes()
        and not _autocasting()
        and forward_ad._current_level < 0
        and not profiling()
    )


def is_below_autograd() -> bool:
    """Whether the call comes from below autograd, where nothing may be recorded."""
    return bool(_bits(_EXCLUDED()) & _AUTOGRAD)


def backward_is_short(*tensors: Tensor) -> bool:
    """Whether a backward of the short way may go past the dispatcher.

    Not with a graph of the backward, whose operator raises for second derivatives.
    """
    short = not torch.compiler.is_dynamo_compiling() and not torch.is_grad_enabled()
    return short and nobody_watches() and all(map(is_memory, tensors))


def described(tensors: Sequence, options: Sequence) -> list | None:
    """All that decides how a call is checked and computed but the values in its tensors; None if that cannot be said.

    Of every argument, whatever it is for: of a tensor its shape, strides, dtype, device and whether a gradient of it is
    recorded, of an option itself. There is no description of a tensor that is not `is_memory`, nor of options of other
    types than `_OPTIONS`: values that are equal and not the same type, as 1 and True, have to be told apart.
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
        if _bits(_KEYS(x)) not in _usual_keys and not _is_newly_known(x):
            return None
        found += x.shape, x.stride(), x.dtype, x.get_device(), records and x.requires_grad
    for x in options:
        if type(x) not in _OPTIONS:
            return None
    found += options
    return found


def described_below(arguments: Sequence) -> list:
    """`described` of what an operator's body is given: the dispatcher has made sure of types, and let nobody but memory
    through. Whether a gradient is recorded is no matter there."""
    found: list = []
    for x in arguments:
        if x is None or x is True or x is False or not isinstance(x, _Tensor):
            found.append(x)
        else:
            found += x.shape, x.stride(), x.dtype, x.get_device()
    return found


def described_but_rows(per_token: tuple, indices: tuple, options: tuple) -> list | None:
    """`described` of tensors or None, without their leading sizes, which differ from one ragged call to the next.

    Indices are read as contiguous ones or not at all; which they are hangs on the leading size too. Of three axes or
    fewer nothing is cut from the shape: a slice takes as long as all the rest.
    """
    found: list = []
    records = _is_grad_enabled()
    for x in per_token:
        if x is None:
            found.append(None)
            continue
        if not is_memory(x):
            return None
        shape = x.shape
        n = len(shape)
        width = shape[1] if n == 2 else (shape[1], shape[2]) if n == 3 else shape[1:] if n else -1
        found += width, x.stride(), x.dtype, x.get_device(), records and x.requires_grad
    for x in indices:
        if x is None:
            found.append(None)
            continue
        if type(x) is not _Tensor or (_bits(_KEYS(x)) not in _usual_keys and not _is_newly_known(x)):
            return None
        n = x.dim()
        found += -1 if n == 1 else x.shape[1] if n == 2 else x.shape, x.dtype, x.get_device(), x.is_contiguous()
    others = described((), options)
    return None if others is None else found + others


def nobody_sees(*tensors: Tensor | None) -> bool:
    """Whether a call with these arguments, which wants no gradient, may go past the dispatcher."""
    return nobody_watches() and all(t is None or is_memory(t) for t in tensors)
