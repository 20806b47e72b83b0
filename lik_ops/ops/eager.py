"""The short way of an eager call: straight to the backend where no dispatcher, mode or transform would see the call.

What it returns, raises and saves for the backward is what the operators would. Arguments are checked once for each
description of all of them; later calls of the same description only look it up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import backends
from ..arguments import argmax_dtype_for, as_bool, check, lifted
from ..settings import requested_backend, use_backend
from .gradients import gradient
from .stack import autocast

_log = logging.getLogger("lik_ops")
_MOST_CALLS = 4096
_INCLUDED, _EXCLUDED = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
_KEYS, _Key = torch._C._dispatch_keys, torch._C.DispatchKey
# Names looked up at every call are bound here: a tiny call takes less time than fifty attributes.
_Tensor, _Parameter, _fp32 = torch.Tensor, torch.nn.Parameter, torch.float32
_function_modes, _profiling = torch._C._len_torch_function_stack, torch.autograd._profiler_enabled
_autocasting = autocast.is_anywhere
_is_grad_enabled = torch.is_grad_enabled
_KINDS = (Tensor, Tensor, *[Tensor | None] * 3, bool, str, bool)  # of the arguments of `maxsim`, past what is unusual

# Dispatch keys that every call gets while nothing is going on: modes, transforms and tracing add others. And one of
# those that are taken away below autograd, where nothing may be recorded.
_USUAL_ADDED = [torch._C.DispatchKeySet(key).raw_repr() for key in (_Key.BackendSelect, _Key.ADInplaceOrView)]
_UNUSUAL_ADDED = ~(_USUAL_ADDED[0] | _USUAL_ADDED[1])
_AUTOGRAD = torch._C.DispatchKeySet(_Key.AutogradOther).raw_repr()
# The C function below `torch.backends.cuda.matmul.fp32_precision`, which takes half a microsecond.
fp32_precision: Callable[[], str] = (
    partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
    if hasattr(torch._C, "_get_fp32_precision_getter")
    else lambda: torch.backends.cuda.matmul.fp32_precision
)
_usual_keys: set[int] = set()  # of the dispatch keys of tensors that are only memory on a device
_devices_known: set[torch.device] = set()


def _is_newly_known(t: Tensor) -> bool:
    """Learn the dispatch keys of ordinary tensors on a device where some backend reads memory: are those of `t`?"""
    device = t.device
    if device in _devices_known or device.type not in ("cpu", "cuda"):
        return False
    _devices_known.add(device)
    for mode in (False, True):
        with torch.inference_mode(mode):
            _usual_keys.add(_KEYS(torch.empty(0, device=device)).raw_repr())
    return _KEYS(t).raw_repr() in _usual_keys


def is_memory(t: Tensor) -> bool:
    """Whether `t` is an ordinary tensor: no subclass, transform's wrapper, negated view, fake or functional tensor."""
    kind = type(t)
    if kind is not _Tensor and kind is not _Parameter:
        return False
    return _KEYS(t).raw_repr() in _usual_keys or _is_newly_known(t)


def nobody_watches() -> bool:
    """Whether neither modes, transforms, tracing, autocast, forward-mode AD nor a profiler have to see the call."""
    return (
        not _INCLUDED().raw_repr() & _UNUSUAL_ADDED
        and not _function_modes()
        and not _autocasting()
        and forward_ad._current_level < 0
        and not _profiling()
    )


def is_below_autograd() -> bool:
    """Whether the call comes from below autograd, where nothing may be recorded."""
    return bool(_EXCLUDED().raw_repr() & _AUTOGRAD)


def backward_is_short(*tensors: Tensor) -> bool:
    """Whether a backward of the short way may go past the dispatcher.

    Not with a graph of the backward, whose operator raises for second derivatives.
    """
    short = not torch.compiler.is_dynamo_compiling() and not torch.is_grad_enabled()
    return short and nobody_watches() and all(is_memory(t) for t in tensors)


def described(arguments: tuple) -> list | None:
    """All that decides how a call is checked and computed but the values in its tensors; None if that cannot be said.

    Of every argument, whatever it is for: of a tensor its shape, strides, dtype, device and whether a gradient of it is
    recorded, of None, True, False and a str itself. Values that are equal and not the same type, as 1 and True, are
    told apart: there is no description of other types, subclasses included, nor of a tensor that is not `is_memory`.
    """
    found: list = []
    records = _is_grad_enabled()
    for x in arguments:
        if x is None or x is True or x is False:
            found.append(x)
            continue
        kind = type(x)
        if kind is _Tensor or kind is _Parameter:
            if _KEYS(x).raw_repr() not in _usual_keys and not _is_newly_known(x):
                return None
            found += x.shape, x.stride(), x.dtype, x.get_device(), records and x.requires_grad
        elif kind is str:
            found.append(x)
        else:
            return None
    return found


def nobody_sees(*tensors: Tensor | None) -> bool:
    """Whether a call with these arguments, which wants no gradient, may go past the dispatcher."""
    return nobody_watches() and all(t is None or is_memory(t) for t in tensors)


class _Call:
    """What is found out once about calls with arguments of one description."""

    __slots__ = (
        "argmax_dtype",
        "backend",
        "choice",
        "converts",
        "d_flat",
        "differentiable",
        "normalize",
        "plan",
        "q_flat",
        "shape",
    )

    def __init__(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        normalize: bool,
        argmax_dtype: torch.dtype | None,
        differentiable: bool,
    ) -> None:
        self.differentiable = differentiable
        self.backend: ModuleType = backends.select(Q.device, Q.dtype)
        self.choice = requested_backend()
        self.q_flat, self.d_flat = Q.dim() == 2, D.dim() == 2
        self.normalize, self.argmax_dtype = normalize, argmax_dtype
        self.converts = any(m is not None and m.dtype != torch.bool for m in (q_mask, d_mask))
        self.shape = (() if self.q_flat else (Q.shape[0],)) + (() if self.d_flat else (D.shape[-3],))
        self.plan: Any = None
        if hasattr(self.backend, "forward_plan"):
            args = lifted(Q, D, as_bool(q_mask), as_bool(d_mask), q_weight)
            self.plan = self.backend.forward_plan(*args, normalize, argmax_dtype)
        _log.debug("maxsim: %s beside %s goes straight to %s", list(Q.shape), list(D.shape), self.backend.__name__)

    def forward(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Scores and, unless `argmax_dtype` is None, winners (with all their axes). Masks are bool."""
        argmax_dtype = self.argmax_dtype
        if self.plan is not None:
            argmax = None if argmax_dtype is None else self.plan.new_argmax()
            return self.plan.scores(self.shape, Q, D, q_mask, d_mask, q_weight, argmax), argmax
        args = lifted(Q, D, q_mask, d_mask, q_weight)
        scores, argmax = self.backend.forward(*args, self.normalize, argmax_dtype)
        for axis, is_flat in ((1, self.d_flat), (0, self.q_flat)):
            if is_flat:
                scores.squeeze_(axis)  # in place: autograd lets nobody write to a view that a Function returns
        return scores, None if argmax_dtype is None else argmax


_memories: list[dict[tuple, Any]] = []


def memory() -> dict[tuple, Any]:
    """A place for what was found out about calls, by the description of them: `forget` empties it."""
    _memories.append({})
    return _memories[-1]


def remember(calls: dict[tuple, Any], key: tuple, call: Any) -> Any:
    """`call`, which is what there is to know about calls of this description."""
    if len(calls) >= _MOST_CALLS:
        calls.clear()
    calls[key] = call
    return call


_calls = memory()


class _MaxSim(torch.autograd.Function):
    """`lik::maxsim` with its gradient, without the dispatcher between them where nothing needs it."""

    @staticmethod
    def forward(ctx, Q, D, q_weight, call, q_mask, d_mask, backward):
        scores, argmax = call.forward(Q, D, q_mask, d_mask, q_weight)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.backward = call, backward
        ctx.save_for_backward(Q, D, q_weight, q_mask, d_mask, argmax)
        return scores

    @staticmethod
    def backward(ctx, grad_scores):
        if grad_scores is None:
            return (None,) * 7
        call, needs = ctx.call, list(ctx.needs_input_grad[:3])
        Q, D, q_weight, q_mask, d_mask, argmax = ctx.saved_tensors
        Q3, D3, *options = lifted(Q, D, q_mask, d_mask, q_weight)
        if call.q_flat:
            grad_scores = grad_scores.unsqueeze(0)
        if call.d_flat:
            grad_scores = grad_scores.unsqueeze(1)
        # An eager backward runs on another thread for CUDA tensors, where a `use_backend` block is not seen.
        with use_backend(call.choice):
            is_short = backward_is_short(grad_scores, Q, D)
            if not is_short and argmax is None:
                argmax = Q.new_empty(0, dtype=torch.int32)
            run = gradient(ctx.backward, call.backend if is_short else None)
            grads = run(grad_scores, Q3, D3, argmax, *options, call.normalize, needs)
        shaped = (g.view(x.shape) if need else None for g, x, need in zip(grads, (Q, D, q_weight), needs, strict=True))
        return (*shaped, None, None, None, None)


def maxsim(*arguments: Any) -> Tensor | None:
    """The scores of `lik::maxsim`, or None where the call has to take the dispatcher.

    Args:
        arguments: all of `lik::maxsim`, in the order of its schema.

    Raises:
        TypeError, ValueError: as `lik::maxsim`.
    """
    description = described(arguments) if nobody_watches() else None
    if description is None:
        return None
    tf32 = description[2] is _fp32 and fp32_precision() == "tf32"  # the dtype of Q, if it is a tensor
    description += tf32, requested_backend()
    key = tuple(description)
    call = _calls.get(key)
    if call is None:
        call = _new_call(*arguments)
        if call is None:
            return None
        remember(_calls, key, call)
    Q, D, q_mask, d_mask, q_weight, _, backward, _ = arguments
    if call.converts:
        q_mask, d_mask = as_bool(q_mask), as_bool(d_mask)
    if call.differentiable:
        return None if is_below_autograd() else _MaxSim.apply(Q, D, q_weight, call, q_mask, d_mask, backward)
    if call.plan is not None:
        return call.plan.scores(call.shape, Q, D, q_mask, d_mask, q_weight, None)
    return call.forward(Q, D, q_mask, d_mask, q_weight)[0]


def _new_call(*arguments: Any) -> _Call | None:
    """What is found out about calls like this one; None where a type is wrong, which is left to the operator."""
    if not all(isinstance(x, kind) for x, kind in zip(arguments, _KINDS, strict=True)):
        return None
    Q, D, q_mask, d_mask, q_weight, normalize, backward, recompute = arguments
    check("maxsim", Q, D, q_mask, d_mask, q_weight, backward)
    differentiable = _is_grad_enabled() and any(t is not None and t.requires_grad for t in (Q, D, q_weight))
    argmax_dtype = argmax_dtype_for(D.shape[-2]) if differentiable and not recompute else None
    return _Call(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype, differentiable)


def forget() -> None:
    """Drop what was found out about calls, as when a table of configurations was changed."""
    for calls in _memories:
        calls.clear()
    backends.forget()
