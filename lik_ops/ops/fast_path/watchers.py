"""Dispatch state and keys: modes, transforms, tracers, profilers and subclasses that must see a call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...core.settings import get_requested_backend
from ..stack import autocast

_INCLUDED, _EXCLUDED = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
_KEYS, _Key = torch._C._dispatch_keys, torch._C.DispatchKey
# The C function of the method, which costs a third less time.
_get_key_bits = getattr(torch._C.DispatchKeySet.raw_repr, "__func__", torch._C.DispatchKeySet.raw_repr)
# Names that every call looks up are bound here, because fifty attribute lookups cost more time than a tiny call.
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
count_function_modes, is_profiling = torch._C._len_torch_function_stack, torch.autograd._profiler_enabled
_is_autocasting = autocast.is_enabled_anywhere
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_grad_enabled, _fp32 = torch.is_grad_enabled, torch.float32
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
            probe = torch.empty(0, device=device)
        if type(probe) is not _Tensor or _is_wrapped(probe):
            return False  # a mode or transform is active, so a later call learns
        _usual_keys.add(_get_key_bits(_KEYS(probe)))
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


def make_call_key(name: Hashable, tensors: Sequence, options: Sequence) -> tuple | None:
    """Return the key of a call in the plan cache, or None if the dispatcher must see the call.

    The key determines how a call is validated and computed, except for tensor values. A tensor contributes its shape,
    strides, dtype, device and whether its gradient is recorded. An option contributes itself. Settings contribute the
    requested backend and, for fp32, the precision of products. There is no key for a tensor that is not
    `is_ordinary_tensor`, and none for options of types outside `_OPTION_TYPES`. Equal values of other types, such as 1
    and True, must not share a key.
    """
    if not is_dispatch_idle():
        return None
    for x in options:
        if type(x) not in _OPTION_TYPES:
            return None
    key = [name, get_requested_backend(), *options]
    records = _is_grad_enabled()
    for x in tensors:
        if x is None:
            key.append(None)
            continue
        kind = type(x)
        if kind is not _Tensor and kind is not _Parameter:
            return None
        if _get_key_bits(_KEYS(x)) not in _usual_keys and not _learn_dispatch_keys(x):
            return None
        key += x.shape, x.stride(), x.dtype, x.get_device(), records and x.requires_grad
    Q = tensors[0]
    if Q is not None and Q.dtype is _fp32:
        key.append(get_fp32_precision())
    return tuple(key)


def make_dense_key(name: str, tensors: tuple, options: tuple[bool, str, bool]) -> tuple | None:
    """Return a key as `make_call_key` does, for Q, D, q_mask, d_mask and q_weight.

    The case without masks and weights is written out, which saves a fifth of the time.
    """
    Q, D, q_mask, d_mask, q_weight = tensors
    if not (q_mask is None and d_mask is None and q_weight is None and type(Q) is type(D) is _Tensor):
        return make_call_key(name, tensors, options)
    usual_keys, (normalize, backward, recompute) = _usual_keys, options
    if (
        not is_dispatch_idle()
        or (_get_key_bits(_KEYS(Q)) not in usual_keys and not _learn_dispatch_keys(Q))
        or _get_key_bits(_KEYS(D)) not in usual_keys
        or not (type(normalize) is type(recompute) is bool and type(backward) is str)
    ):
        return make_call_key(name, tensors, options)
    dtype, records = Q.dtype, _is_grad_enabled()
    precision = get_fp32_precision() if dtype is _fp32 else None
    return (
        (name, get_requested_backend(), precision, normalize, backward, recompute),
        (dtype, Q.shape, Q.stride(), Q.get_device(), records and Q.requires_grad),
        (D.dtype, D.shape, D.stride(), D.get_device(), records and D.requires_grad),
    )


def make_operator_key(arguments: Sequence) -> list:
    """Return the `make_call_key` of the arguments of an operator's body.

    The dispatcher has validated the types and passes only plain tensors. Recorded gradients do not matter there.
    """
    parts: list = []
    for x in arguments:
        if x is None or x is True or x is False or not isinstance(x, _Tensor):
            parts.append(x)
        else:
            parts += x.shape, x.stride(), x.dtype, x.get_device()
    return parts


def make_rowless_key(name: Hashable, tensors: tuple, options: tuple) -> tuple | None:
    """Return the `make_call_key` of a packed call without leading sizes, which differ from one packed call to the next.

    `name` may include values of other types that the call depends on. `tensors` are those of a `PackedArgs`, followed
    by further tensors with one row for each token.

    The strides of an index and its other sizes determine whether it `is_contiguous_index`. For three axes or fewer the
    shape of a tensor of tokens is not sliced, because a slice costs as much time as all other work.
    """
    if not is_dispatch_idle():
        return None
    for x in options:
        if type(x) not in _OPTION_TYPES:
            return None
    Q, D, *indices = tensors[:7]
    key = [name, get_requested_backend(), *options]
    records = _is_grad_enabled()
    for x in indices:
        if x is None:
            key.append(None)
            continue
        if type(x) is not _Tensor or (_get_key_bits(_KEYS(x)) not in _usual_keys and not _learn_dispatch_keys(x)):
            return None
        strides = x.stride()
        key += strides, strides if len(strides) == 1 else x.shape[1:], x.dtype, x.get_device()
    for x in (Q, D, *tensors[7:]):
        if x is None:
            key.append(None)
            continue
        kind = type(x)
        if kind is not _Tensor and kind is not _Parameter:
            return None
        if _get_key_bits(_KEYS(x)) not in _usual_keys and not _learn_dispatch_keys(x):
            return None
        shape = x.shape
        n = len(shape)
        width = shape[1] if n == 2 else (shape[1], shape[2]) if n == 3 else shape[1:] if n else -1
        key += width, x.stride(), x.dtype, x.get_device(), records and x.requires_grad
    if Q is not None and Q.dtype is _fp32:
        key.append(get_fp32_precision())
    return tuple(key)


def is_call_direct(*tensors: Tensor | None) -> bool:
    """Return whether a call with these arguments that needs no gradient may bypass the dispatcher."""
    return is_dispatch_idle() and all(t is None or is_ordinary_tensor(t) for t in tensors)
