"""The short way of an eager call: straight to the backend where no dispatcher, mode or transform would see the call.

What it returns, raises and saves for the backward is what the operators would. What is found out about a call is kept
by a description of its arguments; later calls of the same description only look it up. `maxsim` takes dense arguments,
`maxsim_ragged` takes those of a `Cut`: kernels read what callers have, and no operation runs before the launch.
`maxsim_cross_entropy` makes labels where none are given, and reduces losses by torch.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...core.arguments import BACKWARDS, DTYPES, INDEX_DTYPES, argmax_dtype_for, as_bool, check, score_dtype
from ...core.segments import Cut
from ...core.settings import checks_values, requested_backend, use_backend
from ...families.loss.ops import Labelled, LossCall, check_call, default_labels
from ...formats.table import Stored
from ..checks import hints
from ..registration import family
from .cuts import has_even_rows, is_packed, sizes_of
from .eager_calls import CutCall, DenseCall
from .recent import Recent
from .watchers import described, described_but_rows, fp32_precision, is_below_autograd, is_memory, nobody_watches

_MOST_CALLS = 4096
_KINDS = (Tensor, Tensor, *[Tensor | None] * 3, bool, str, bool)  # of the arguments of `maxsim`, past what is unusual
_fp32, _is_grad_enabled, _is_compiling = torch.float32, torch.is_grad_enabled, torch.compiler.is_dynamo_compiling
_SEEN = contextlib.nullcontext()  # in place of a block, which takes a microsecond
_calls: dict[tuple, Any] = {}  # what was found out, by description; None where the call takes the long way
_recent = {"maxsim": Recent(), "maxsim_with_argmax": Recent(), "ragged": Recent(True), "quantized": Recent(True)}


class _MaxSim(torch.autograd.Function):
    """A forward with its gradient, without the dispatcher between them where nothing needs it."""

    @staticmethod
    def forward(ctx, Q, D, q_weight, call, given):
        scores, *kept = call.forward(given)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.sizes = call, given[call.tensors :]
        ctx.save_for_backward(*given[: call.tensors], *kept)
        if not call.with_argmax:
            return scores
        ctx.mark_non_differentiable(*kept)
        return scores, *kept

    @staticmethod
    def backward(ctx, grad_scores, grad_argmax=None):
        needs = list(ctx.needs_input_grad[:3])
        if grad_scores is None or not any(needs):
            return (None,) * 5
        call, saved = ctx.call, ctx.saved_tensors
        tensors, kept = saved[: call.tensors], saved[call.tensors :]
        # An eager backward runs on another thread for CUDA tensors, where a `use_backend` block is not seen.
        with _SEEN if requested_backend() == call.choice else use_backend(call.choice):
            grads = call.gradients(grad_scores, (*tensors, *ctx.sizes), needs, *kept)
        leaves = tensors[0], tensors[1], tensors[-1]
        return *(_shaped(g, x) if need else None for g, x, need in zip(grads, leaves, needs, strict=True)), None, None


def _shaped(gradient: Tensor, leaf: Tensor) -> Tensor:
    """That of a 2-D `leaf` has one more axis."""
    return gradient if gradient.dim() == leaf.dim() else gradient.view(leaf.shape)


def _remember(key: tuple, call: Any) -> Any:
    """Keep what there is to know about calls of a description."""
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[key] = call
    return call


def maxsim(
    Q: Any, D: Any, q_mask: Any, d_mask: Any, q_weight: Any, normalize: Any, backward: Any, recompute: Any
) -> Tensor | None:
    """The scores of dense arguments, those of `lik::maxsim`, or None where the call has to take the dispatcher.

    Raises:
        TypeError, ValueError: as `lik::maxsim`.
    """
    given = Q, D, q_mask, d_mask, q_weight
    call = _found_call("maxsim", given, (normalize, backward, recompute))
    if call is None:
        return None
    if call.converts:
        given = _converted(given)
    if call.differentiable:
        return None if is_below_autograd() else _MaxSim.apply(Q, D, q_weight, call, given)
    return call.forward(given)[0]


def maxsim_with_argmax(given: tuple, options: tuple) -> tuple[Tensor, Tensor] | None:
    """The scores and int64 winners ``[Nq, Nd, Lq]`` of `maxsim`'s arguments; None as there, and where gradients of the
    scores are wanted: callers may write to winners, which a backward would read."""
    call = _found_call("maxsim_with_argmax", given, options)
    if call is None:
        return None
    scores, argmax = call.forward(_converted(given) if call.converts else given)
    return scores, call.as_returned(argmax, given[1].dim() == 4)


def _converted(given: tuple) -> tuple:
    Q, D, q_mask, d_mask, q_weight = given
    return Q, D, as_bool(q_mask), as_bool(d_mask), q_weight


def _found_call(name: str, given: tuple, options: tuple) -> Any:
    """What there is to know about a call of dense arguments; None where it has to take the dispatcher."""
    if _is_compiling():
        return None
    recent, choice = _recent[name], requested_backend()
    call = recent.find(given, (*options, choice))
    if call is not None:
        return call
    description = described(given, options) if nobody_watches() else None
    if description is None:
        return None
    tf32 = description[2] is _fp32 and fp32_precision() == "tf32"  # the dtype of Q, if it is a tensor
    description += name, tf32, choice
    key = tuple(description)
    call = _calls.get(key, key)
    if call is not key:
        if call is not None:
            recent.saw(call, given, (*options, choice))
        return call
    if not all(isinstance(x, kind) for x, kind in zip((*given, *options), _KINDS, strict=True)):
        return None  # left to the operator
    return _remember(key, _new_call(name, *given, *options))


def _new_call(name: str, *arguments: Any) -> DenseCall | None:
    """What is found out about calls like this one; None where they take the long way."""
    given, (normalize, backward, recompute) = arguments[:5], arguments[5:]
    Q, D, q_mask, d_mask, q_weight = given
    check(name, Q, D, q_mask, d_mask, q_weight, backward)
    hints.look_at_tokens(name, Q, D, q_mask, d_mask, normalize)
    differentiable = wants_gradients(Q, D, q_weight)
    argmax_dtype = argmax_dtype_for(D.shape[-2]) if differentiable and not recompute else None
    if name == "maxsim_with_argmax":
        if differentiable:
            return None
        argmax_dtype = torch.int64
    backend = backends.select(Q.device, Q.dtype)
    return DenseCall(given, backend, normalize, backward, argmax_dtype, differentiable)


def wants_gradients(*tensors: Tensor | None) -> bool:
    return _is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def maxsim_cross_entropy(*arguments: Any) -> Tensor | None:
    """`lik_ops.maxsim_cross_entropy` at a temperature that is a number; None where the call has to take the operator.

    Args:
        arguments: Q, D, labels, q_mask, d_mask, q_weight, temperature, normalize, ignore_index and reduction.

    Raises:
        TypeError, ValueError: as there.
    """
    if _is_compiling() or checks_values() or not nobody_watches():
        return None
    Q, D, labels, q_mask, d_mask, q_weight, temperature, normalize, ignore_index, reduction = arguments
    if type(temperature) not in (int, float) or not 0 < temperature <= sys.float_info.max:
        return None
    if type(ignore_index) is not int or not -(2**63) <= ignore_index < 2**63:
        return None
    given = Q, D, q_mask, d_mask, q_weight, labels, normalize, reduction
    description = described(given[:6], given[6:])
    if description is None:
        return None
    key = ("maxsim_cross_entropy", fp32_precision(), requested_backend(), *description)
    call = _calls.get(key) or _remember(key, _new_loss_call(given))
    if call.differentiable and is_below_autograd():
        return None
    if labels is None:
        labels = default_labels(Q, D)
    tensors = Q, D, as_bool(q_mask), as_bool(d_mask), labels, q_weight
    found = *tensors, float(temperature), ignore_index
    return _MaxSim.apply(Q, D, q_weight, call, found) if call.differentiable else call.forward(found)[0]


def _new_loss_call(given: tuple) -> LossCall:
    """What is found out about calls like this one."""
    *tensors, normalize, reduction = given
    check_call("maxsim_cross_entropy", tuple(tensors), normalize, reduction)
    x = Labelled(*tensors)
    hints.look_at_tokens("maxsim_cross_entropy", *x[:4], normalize)
    backend = backends.select(x.Q.device, x.Q.dtype)
    return LossCall(x, backend, normalize, reduction, wants_gradients(x.Q, x.D, x.q_weight))


def _new_cut_call(c: Cut, options: tuple, argmax_dtype: Any) -> CutCall | None:
    """What is found out about calls like this one, whose sizes fit; None where something is unusual or wrong.

    It serves calls with other leading sizes, so nothing may be concluded from those.
    """
    Q, D, device = c.Q, c.D, c.Q.device
    normalize, backward, recompute, with_argmax, is_bounded, _ = options
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
        and all(has_even_rows(x, 1) for x in (Q, D))
        and all(x is None or has_even_rows(x, 0) for x in c.per_token)
    )
    if not ordinary:
        return None
    differentiable = wants_gradients(Q, D, c.q_weight)
    keeps = with_argmax or (differentiable and not recompute)
    if keeps and c.pairs is not None and c.cu_seqlens_q is not None and not is_bounded:
        return None  # nobody knows for how many tokens a pair has winners
    if differentiable and c.q_lengths is not None:
        return None
    backend = backends.select(Q.device, Q.dtype)
    if not hasattr(backend, "ragged_plan"):
        return None
    return CutCall(c, backend, normalize, backward, argmax_dtype if keeps else None, differentiable, with_argmax)


def maxsim_ragged(
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
    """Scores and, if asked, winners as of ``lik::maxsim_ragged_fwd``; None where the call has to take the operator.

    The tensors are those of `Cut`; padded ones, with `q_lengths`, have no gradients here.
    """
    if _is_compiling() or checks_values():
        return None
    indices, per_token = (cu_seqlens_q, offsets, lengths, pairs, q_lengths), (q_mask, d_mask, q_weight)
    given, is_bounded = (Q, D, *indices, *per_token), max_seqlen_q is not None
    options = normalize, backward, recompute, with_argmax, is_bounded, requested_backend()
    call = _recent["ragged"].find(given, options)
    description = None
    if call is None:
        description = described_but_rows((Q, D, *per_token), indices, options) if nobody_watches() else None
        if description is None:
            return None
    sizes = sizes_of(Q, D, indices, per_token, max_seqlen_q)
    if sizes is None:
        return None
    c = Cut(*given, *sizes)
    if description is not None:
        call = _cut_call(c, options, description)
    if call is None or (call.differentiable and is_below_autograd()):  # the long way
        return None
    if not call.differentiable:
        return call.plan.forward(c)
    found = _MaxSim.apply(Q, D, q_weight, call, c)
    return found if with_argmax else (found, None)


def _cut_call(c: Cut, options: tuple, description: list) -> Any:
    """What there is to know about a call; None where it takes the long way."""
    argmax_dtype = argmax_dtype_for(c.Td)
    description += argmax_dtype, c.Q.dtype is _fp32 and fp32_precision() == "tf32"
    key = tuple(description)
    call = _calls.get(key, key)
    if call is key:
        return _remember(key, _new_cut_call(c, options, argmax_dtype))
    # Not with winners, whose dtype hangs on the number of rows; nor with indices that are contiguous as one row is.
    if call is not None and call.argmax_dtype is None and all(map(is_packed, c.indices)):
        _recent["ragged"].saw(call, c.tensors, options)
    return call


def maxsim_quantized(
    stored: Stored,
    Q: Tensor,
    indices: tuple,
    per_token: tuple,
    options: tuple,
    *,
    max_seqlen_q: int | None,
    with_argmax: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """Scores and, if asked, winners as of ``lik::maxsim_quantized_fwd``, of arguments that were checked; None where the
    call has to take the operator.

    `indices` and `per_token` are those of `Cut`, `options` the features of a token, `normalize`, `backward` and
    `recompute`. Without winners, also of pairs whose queries may have any length.
    """
    if _is_compiling() or checks_values() or not nobody_watches():
        return None
    data, tensors = stored.data, [x for x in (Q, *indices, *per_token, *stored) if isinstance(x, Tensor)]
    sizes = sizes_of(Q, data, indices, per_token, max_seqlen_q)
    q_weight, bounded = per_token[2], max_seqlen_q is not None or indices[3] is None or indices[0] is None
    if sizes is None or not (bounded or not with_argmax) or wants_gradients(Q, q_weight):
        return None
    is_ordinary = (
        all(is_memory(x) for x in tensors)
        and all(x is None or x.is_contiguous() for x in indices)
        and all(has_even_rows(x, 1) for x in (Q, data))
        and all(x is None or has_even_rows(x, 0) for x in per_token)
    )
    backend = backends.select(Q.device, Q.dtype)
    if not (is_ordinary and hasattr(backend, "forward_quantized_cut")):
        return None
    c = Cut(Q, data, *indices, *per_token, *sizes)
    if not with_argmax and max_seqlen_q is None and all(map(is_packed, indices)):
        _remember_quantized(stored, c, options, backend)
    return backend.forward_quantized_cut(c, stored, options[1], argmax_dtype_for(c.Td) if with_argmax else None)


def _quantized_key(tensors: tuple, options: tuple) -> tuple | None:
    """The key in `_calls` of a call with quantized documents, or None if the call has to take the operator."""
    if not nobody_watches():
        return None
    Q, data, *indices, q_mask, d_mask, q_weight = tensors[:10]
    description = described_but_rows((Q, data, q_mask, d_mask, q_weight, *tensors[10:]), tuple(indices), options[1:])
    return None if description is None else ("quantized", options[0], *description)


def _remember_quantized(stored: Stored, c: Cut, options: tuple, backend: Any) -> None:
    tensors = *c.tensors, stored.scale, stored.minimum, *stored[4:]
    key = _quantized_key(tensors, (*options, stored.format, requested_backend()))
    if key is not None and key not in _calls:
        _remember(key, (backend,))


def quantized_again(stored: Stored, Q: Any, indices: tuple, per_token: tuple, options: tuple) -> Tensor | None:
    """Return the scores if `maxsim_quantized` has made a call of the same description before, else None.

    The arguments need no checks of their own.
    """
    if _is_compiling() or checks_values():
        return None
    tensors = Q, stored.data, *indices, *per_token, stored.scale, stored.minimum, *stored[4:]
    options, recent = (*options, stored.format, requested_backend()), _recent["quantized"]
    found = recent.find(tensors, options)
    if found is None:
        key = _quantized_key(tensors, options)
        found = None if key is None else _calls.get(key)
        # `recent` ignores leading sizes, so it recognizes only indices that are contiguous at every leading size.
        if found is not None and all(map(is_packed, indices)):
            recent.saw(found, tensors, options)
    sizes = None if found is None else sizes_of(Q, stored.data, indices, per_token, None)
    if sizes is None:
        return None
    c = Cut(*tensors[:10], *sizes)
    return found[0].forward_quantized_cut(c, stored, options[1], None)[0]


def forget() -> None:
    """Drop what was found out about calls, as when a table of configurations was changed."""
    _calls.clear()
    for recent in _recent.values():
        recent.forget()
    family.forget()
    backends.forget()
