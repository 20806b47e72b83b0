"""The short way of an eager ragged call, as `eager` for dense ones: past the operators, to the backend's plan.

Kernels take what callers have: nothing is made of it before the launch. What is not as it has to be, and whatever the
plans cannot do, is left to the long way and its errors.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..arguments import BACKWARDS, DTYPES, INDEX_DTYPES, argmax_dtype_for, score_dtype
from ..segments import Cut
from ..settings import checks_values, requested_backend, use_backend
from . import eager
from .gradients import is_unified

_log = logging.getLogger("lik_ops")
_is_memory, _nobody_watches, _is_grad_enabled = eager.is_memory, eager.nobody_watches, torch.is_grad_enabled
_calls = eager.memory()


class _Call:
    """What is found out once about calls with arguments of one description."""

    __slots__ = ("backend", "backward", "choice", "differentiable", "normalize", "plan")

    def __init__(
        self, backend: ModuleType, c: Cut, normalize: bool, argmax_dtype: Any, backward: str, differentiable: bool
    ) -> None:
        self.differentiable = differentiable
        self.backend, self.choice = backend, requested_backend()
        self.plan: Any = backend.ragged_plan(c, normalize, argmax_dtype)
        self.normalize, self.backward = normalize, backward
        _log.debug("ragged %s beside %s goes straight to %s", list(c.Q.shape), list(c.D.shape), backend.__name__)


class _MaxSimRagged(torch.autograd.Function):
    """`lik::maxsim_ragged_fwd` with its gradient, without the dispatcher between them where nothing needs it."""

    @staticmethod
    def forward(ctx, Q, D, q_weight, call, c):
        scores, argmax = call.plan.forward(c)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.sizes = call, c.sizes
        ctx.save_for_backward(*c.tensors, argmax)
        if argmax is not None:
            ctx.mark_non_differentiable(argmax)
        return scores, argmax

    @staticmethod
    def backward(ctx, grad_scores, grad_argmax):
        needs = list(ctx.needs_input_grad[:3])
        if grad_scores is None or not any(needs):
            return (None,) * 5
        call, (*tensors, argmax) = ctx.call, ctx.saved_tensors
        c = Cut(*tensors, *ctx.sizes)
        unified = is_unified(call.backward)
        # An eager backward runs on another thread for CUDA tensors, where a `use_backend` block is not seen.
        with use_backend(call.choice):
            if argmax is None:
                plan = call.backend.ragged_plan(c, call.normalize, argmax_dtype_for(c.Td))
                _, argmax = plan.forward(c)
            if eager.backward_is_short(grad_scores, c.Q, c.D):
                grads = call.backend.backward_cut(grad_scores, c, argmax, call.normalize, needs, unified)
            else:
                op = torch.ops.lik.maxsim_ragged_bwd
                grads = op(grad_scores, *c.ragged(), argmax, call.normalize, unified, needs)
        leaves: Any = c.Q, c.D, c.q_weight
        return *(g.view(x.shape) if need else None for g, x, need in zip(grads, leaves, needs, strict=True)), None, None


def _sizes(Q: Tensor, D: Tensor, indices: tuple, per_token: tuple, max_seqlen_q: Any) -> tuple | None:
    """The sizes of a `Cut`, or None where they do not fit together.

    Of every call: the leading sizes of tensors and `max_seqlen_q`, which its description leaves out, come from here.
    """
    if Q is None or D is None:
        return None
    cu_seqlens_q, offsets, lengths, _, q_lengths = indices
    q_shape, d_shape = Q.shape, D.shape
    if cu_seqlens_q is None:
        if len(q_shape) != 3:
            return None
        queries, most, _ = q_shape
        Tq = queries * most
    else:
        bounds = cu_seqlens_q.shape
        if len(q_shape) != 2 or len(bounds) != 1 or bounds[0] < 1:
            return None
        queries, Tq = bounds[0] - 1, q_shape[0]
        most = Tq
    if max_seqlen_q is not None:
        if type(max_seqlen_q) is not int or max_seqlen_q < 0:
            return None
        most = min(most, max_seqlen_q)  # no query has more tokens
    q_mask, d_mask, q_weight = per_token
    if (
        (q_mask is not None and q_mask.shape != q_shape[:-1])
        or (d_mask is not None and d_mask.shape != d_shape[:-1])
        or (q_weight is not None and q_weight.shape != q_shape[:-1])
    ):
        return None
    if lengths is not None:
        columns, Td = _listed(queries, q_shape, d_shape, offsets, lengths.shape, q_lengths)
        return None if columns is None else (queries, columns, True, Tq, Td, most)
    if q_lengths is not None:
        return None
    if offsets is None:
        return (queries, d_shape[0], False, Tq, d_shape[0] * d_shape[1], most) if len(d_shape) == 3 else None
    bounds = offsets.shape
    if len(d_shape) != 2 or len(bounds) != 1 or bounds[0] < 1:
        return None
    return queries, bounds[0] - 1, False, Tq, d_shape[0], most


def _listed(queries: int, q_shape: tuple, d_shape: tuple, offsets: Any, listed: tuple, q_lengths: Any) -> tuple:
    """Candidates of each query, whose lengths have the shape `listed`, and the rows of D; None where that is wrong."""
    if len(listed) != 2 or listed[0] != queries:
        return None, None
    if offsets is not None:
        fits = len(d_shape) == 2 and offsets.shape == listed
        return (listed[1], d_shape[0]) if fits else (None, None)
    # Padded queries and documents.
    fits = len(d_shape) == 4 and d_shape[:2] == listed and q_lengths is not None and q_lengths.shape == q_shape[:1]
    return (listed[1], listed[0] * listed[1] * d_shape[2]) if fits else (None, None)


def _is_even(x: Tensor, rows: int) -> bool:
    """Whether tokens, or what there is one of for each, whose last `rows` axes are those of a token, lie evenly."""
    shape, stride = x.shape[: x.dim() - rows], x.stride()
    return all(stride[n] == stride[n + 1] * shape[n + 1] for n in range(len(shape) - 1))


def _new_call(c: Cut, options: tuple, argmax_dtype: Any, is_bounded: bool) -> _Call | None:
    """What is found out about calls like this one, whose sizes fit; None where something is unusual or wrong.

    It serves calls with other leading sizes, so nothing may be concluded from those.
    """
    Q, D, device = c.Q, c.D, c.Q.device
    normalize, backward, recompute, with_argmax = options
    ordinary = (
        all(isinstance(x, bool) for x in (normalize, recompute, with_argmax))
        and backward in BACKWARDS
        and Q.dtype in DTYPES
        and D.dtype == Q.dtype
        and D.shape[-1] == Q.shape[-1] >= 1
        and all(x is None or x.device == device for x in c.tensors)
        and all(x is None or (x.dtype in INDEX_DTYPES and x.is_contiguous()) for x in c.indices)
        and (c.pairs is None or (c.pairs.shape[1:] == (2,) and not c.candidates))
        and (c.q_lengths is None or c.cu_seqlens_q is None)
        and all(m is None or m.dtype == torch.bool for m in (c.q_mask, c.d_mask))
        and (c.q_weight is None or c.q_weight.dtype == score_dtype(Q.dtype))
        and all(_is_even(x, 1) for x in (Q, D))
        and all(x is None or _is_even(x, 0) for x in c.per_token)
    )
    if not ordinary:
        return None
    differentiable = _is_grad_enabled() and any(x is not None and x.requires_grad for x in (Q, D, c.q_weight))
    keeps = with_argmax or (differentiable and not recompute)
    if keeps and c.pairs is not None and c.cu_seqlens_q is not None and not is_bounded:
        return None  # winners of how many tokens cannot be known
    if differentiable and c.q_lengths is not None:
        return None
    backend = backends.select(Q.device, Q.dtype)
    if not hasattr(backend, "ragged_plan"):
        return None
    return _Call(backend, c, normalize, argmax_dtype if keeps else None, backward, differentiable)


def _described_but_sizes(per_token: tuple, indices: tuple) -> list | None:
    """`eager.described` without leading sizes: ragged calls seldom have the same ones twice, and take the same plan.

    Indices are read as contiguous ones or not at all; which they are hangs on the leading size too. Of two axes or one
    nothing is cut from the shape: a slice takes as long as all the rest.
    """
    found: list = []
    records = _is_grad_enabled()
    for x in per_token:
        if x is None:
            found.append(None)
        elif _is_memory(x):
            shape = x.shape
            n = len(shape)
            others = shape[1] if n == 2 else -1 if n == 1 else shape[1:]
            found += others, x.stride(), x.dtype, x.get_device(), records and x.requires_grad
        else:
            return None
    for x in indices:
        if x is None:
            found.append(None)
        elif _is_memory(x):
            shape = x.shape
            n = len(shape)
            found += -1 if n == 1 else shape[1] if n == 2 else shape[1:], x.is_contiguous(), x.dtype, x.get_device()
        else:
            return None
    return found


def maxsim(
    Q: Any,
    D: Any,
    cu_seqlens_q: Any = None,
    offsets: Any = None,
    lengths: Any = None,
    pairs: Any = None,
    q_lengths: Any = None,
    q_mask: Any = None,
    d_mask: Any = None,
    q_weight: Any = None,
    *,
    normalize: Any = False,
    backward: Any = "auto",
    recompute: bool = False,
    max_seqlen_q: Any = None,
    with_argmax: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """Scores and, if asked, winners as those of ``lik::maxsim_ragged_fwd``; None where the call takes the long way.

    The tensors are those of `Cut`; padded ones, with `q_lengths`, have no gradients here.
    """
    if checks_values() or not _nobody_watches():
        return None
    indices, per_token = (cu_seqlens_q, offsets, lengths, pairs, q_lengths), (q_mask, d_mask, q_weight)
    options = normalize, backward, recompute, with_argmax
    description, others = _described_but_sizes((Q, D, *per_token), indices), eager.described(options)
    if description is None or others is None:
        return None
    sizes = _sizes(Q, D, indices, per_token, max_seqlen_q)
    if sizes is None:
        return None
    c, is_bounded = Cut(Q, D, *indices, *per_token, *sizes), max_seqlen_q is not None
    argmax_dtype = argmax_dtype_for(c.Td)
    tf32 = Q.dtype is torch.float32 and eager.fp32_precision() == "tf32"
    key = (*description, *others, is_bounded, argmax_dtype, tf32, requested_backend())
    call = _calls.get(key, key)
    if call is key:
        call = eager.remember(_calls, key, _new_call(c, options, argmax_dtype, is_bounded))
    if call is None or (call.differentiable and eager.is_below_autograd()):  # the long way
        return None
    if call.differentiable:
        scores, argmax = _MaxSimRagged.apply(Q, D, q_weight, call, c)
    else:
        scores, argmax = call.plan.forward(c)
    return scores, argmax if with_argmax else None
