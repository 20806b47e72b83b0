"""The short way of an eager call: straight to the backend where no dispatcher, mode or transform would see the call.

What it returns, raises and saves for the backward is what the operators would. Arguments are checked once for each
description of them (`metadata`); later calls of the same description only look it up.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import backends
from .._backend_choice import requested_backend, use_backend
from .._layout import argmax_dtype_for, as_bool, check, lifted, metadata
from . import autocast

_log = logging.getLogger("lik_ops")
_MOST_CALLS = 4096
_INCLUDED, _EXCLUDED = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
_KEYS, _Key = torch._C._dispatch_keys, torch._C.DispatchKey
# Names looked up at every call are bound here: a tiny call takes less time than fifty attributes.
_Tensor, _Parameter, _fp32 = torch.Tensor, torch.nn.Parameter, torch.float32
_function_modes, _profiling = torch._C._len_torch_function_stack, torch.autograd._profiler_enabled
_autocasting = autocast.is_anywhere
_is_grad_enabled, _matmul = torch.is_grad_enabled, torch.backends.cuda.matmul


# Dispatch keys that every call gets while nothing is going on: modes, transforms and tracing add others. And one of
# those that are taken away below autograd, where nothing may be recorded.
_USUAL_ADDED = [torch._C.DispatchKeySet(key).raw_repr() for key in (_Key.BackendSelect, _Key.ADInplaceOrView)]
_UNUSUAL_ADDED = ~(_USUAL_ADDED[0] | _USUAL_ADDED[1])
_AUTOGRAD = torch._C.DispatchKeySet(_Key.AutogradOther).raw_repr()
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


def nobody_sees(*tensors: Tensor | None) -> bool:
    """Whether a call with these arguments, which wants no gradient, may go past the dispatcher."""
    return nobody_watches() and all(t is None or is_memory(t) for t in tensors)


class _Call:
    """What is found out once about calls with arguments of one description."""

    __slots__ = ("argmax_dtype", "backend", "choice", "converts", "d_flat", "normalize", "plan", "q_flat", "shape")

    def __init__(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        normalize: bool,
        argmax_dtype: torch.dtype | None,
    ) -> None:
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


_calls: dict[tuple, Any] = {}  # of ragged calls too


def known(key: tuple, otherwise: Any) -> Any:
    """What was found out about calls of this description, or `otherwise`."""
    return _calls.get(key, otherwise)


def remember(key: tuple, call: Any) -> Any:
    """`call`, which is what there is to know about calls of this description."""
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[key] = call
    return call


class _operators:
    """The operators by the names of a backend's functions; an `argmax` of None is their ``[0]``."""

    @staticmethod
    def backward_lowmem(grad_scores: Tensor, Q: Tensor, D: Tensor, argmax: Tensor | None, *rest: Any) -> tuple:
        argmax = Q.new_empty(0, dtype=torch.int32) if argmax is None else argmax
        return torch.ops.lik.maxsim_bwd_lowmem(grad_scores, Q, D, argmax, *rest)

    @staticmethod
    def backward_unified(grad_scores: Tensor, Q: Tensor, D: Tensor, argmax: Tensor | None, *rest: Any) -> tuple:
        argmax = Q.new_empty(0, dtype=torch.int32) if argmax is None else argmax
        return torch.ops.lik.maxsim_bwd_unified(grad_scores, Q, D, argmax, *rest)


class _MaxSim(torch.autograd.Function):
    """`lik::maxsim` with its gradient, without the dispatcher between them where nothing needs it."""

    @staticmethod
    def forward(ctx, Q, D, q_weight, call, q_mask, d_mask, backward):
        scores, argmax = call.forward(Q, D, q_mask, d_mask, q_weight)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.unified = call, backward == "unified"
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
            ops = call.backend if backward_is_short(grad_scores, Q, D) else _operators
            run = ops.backward_unified if ctx.unified else ops.backward_lowmem
            grads = run(grad_scores, Q3, D3, argmax, *options, call.normalize, needs)
        shaped = (g.view(x.shape) if need else None for g, x, need in zip(grads, (Q, D, q_weight), needs, strict=True))
        return (*shaped, None, None, None, None)


def maxsim(
    Q: Any,
    D: Any,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Any,
    normalize: bool,
    backward: str,
    recompute: bool,
) -> Tensor | None:
    """The scores of `lik::maxsim`, or None where the call has to take the dispatcher.

    Raises:
        TypeError, ValueError: as `lik::maxsim`.
    """
    if not (
        (normalize is True or normalize is False)
        and (recompute is True or recompute is False)
        and type(backward) is str
        and nobody_watches()
        and is_memory(Q)
        and is_memory(D)
        and (q_mask is None or is_memory(q_mask))
        and (d_mask is None or is_memory(d_mask))
        and (q_weight is None or is_memory(q_weight))
    ):
        return None
    differentiable = _is_grad_enabled() and (
        Q.requires_grad or D.requires_grad or (q_weight is not None and q_weight.requires_grad)
    )
    if differentiable and is_below_autograd():
        return None
    tf32 = Q.dtype is _fp32 and _matmul.fp32_precision == "tf32"
    keeps = differentiable and not recompute
    key = (metadata(Q, D, q_mask, d_mask, q_weight), normalize, backward, keeps, tf32, requested_backend())
    call = _calls.get(key)
    if call is None:
        check("maxsim", Q, D, q_mask, d_mask, q_weight, backward)
        argmax_dtype = argmax_dtype_for(D.shape[-2]) if keeps else None
        call = remember(key, _Call(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype))
    if call.converts:
        q_mask, d_mask = as_bool(q_mask), as_bool(d_mask)
    if differentiable:
        return _MaxSim.apply(Q, D, q_weight, call, q_mask, d_mask, backward)
    if call.plan is not None:
        return call.plan.scores(call.shape, Q, D, q_mask, d_mask, q_weight, None)
    return call.forward(Q, D, q_mask, d_mask, q_weight)[0]


def forget() -> None:
    """Drop what was found out about calls, as when a table of configurations was changed."""
    _calls.clear()
    backends.forget()
