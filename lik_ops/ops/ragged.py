"""The ragged family: ``lik::maxsim_ragged_fwd`` and ``lik::maxsim_ragged_bwd`` over packed tokens.

One forward for three layouts: every query against every document, each query against its own candidates, and a list of
pairs. Opaque custom ops, whose bodies pick a backend at run time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import backends
from ..arguments import BACKWARDS, argmax_dtype_for, check_choice, score_dtype
from ..segments import Ragged
from ..settings import requested_backend, use_backend
from .custom import custom_op
from .documented import document_bodies
from .ragged_arguments import ARGMAX_DTYPES, argmax_sizes, check_ragged, score_sizes
from .ragged_values import check_ragged as check_ragged_values
from .stack import batching_ragged, flops, functional

_TENSORS = (
    "Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor d_offsets, Tensor d_lengths, Tensor? pairs, Tensor? q_mask,"
    " Tensor? d_mask, Tensor? q_weight"
)
_FWD_SCHEMA = (
    f"({_TENSORS}, bool normalize, ScalarType? argmax_dtype, SymInt max_seqlen_q, str backward) -> (Tensor, Tensor)"
)
_BWD_SCHEMA = (
    f"(Tensor grad_scores, {_TENSORS}, Tensor argmax, bool normalize, bool unified, bool[3] needs)"
    " -> (Tensor, Tensor, Tensor)"
)
_FWD, _BWD = "lik::maxsim_ragged_fwd", "lik::maxsim_ragged_bwd"


def _check_fwd(tensors: Ragged, argmax_dtype, max_seqlen_q, backward) -> None:
    check_ragged(_FWD, *tensors)
    check_choice(_FWD, "backward", backward, BACKWARDS)
    if argmax_dtype not in ARGMAX_DTYPES:
        raise TypeError(f"{_FWD}: argmax_dtype: expected None, int16, int32 or int64, got {argmax_dtype}")
    tokens = tensors.D.shape[0]
    if argmax_dtype == torch.int16 and isinstance(tokens, int) and tokens > 32768:
        raise ValueError(f"{_FWD}: argmax_dtype: int16 cannot index {tokens} document tokens")
    torch._check_value(max_seqlen_q >= 0, lambda: f"{_FWD}: max_seqlen_q: expected 0 or more, got {max_seqlen_q}")


@custom_op(_FWD, _FWD_SCHEMA)
def maxsim_ragged_fwd(
    Q: Tensor,
    D: Tensor,
    cu_seqlens_q: Tensor,
    d_offsets: Tensor,
    d_lengths: Tensor,
    pairs: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
    max_seqlen_q: int,
    backward: str,
) -> tuple[Tensor, Tensor]:
    """Scores ``[Nq, Nd]``, ``[Nq, K]`` or ``[P]`` and, unless `argmax_dtype` is None, each query token's winner.

    The winners are ``[Nd, Tq]`` (cross product), ``[K, Tq]`` (candidates, 2-D `d_offsets`) or ``[P, max_seqlen_q]``
    (`pairs`), relative to their document, -1 where there is none. A pair whose query is longer than `max_seqlen_q`
    scores NaN; the other layouts take it for a bound that may be too large. `backward` names how gradients are summed;
    without winners kept, it finds them again.
    """
    tensors = Ragged(Q, D, cu_seqlens_q, d_offsets, d_lengths, pairs, q_mask, d_mask, q_weight)
    _check_fwd(tensors, argmax_dtype, max_seqlen_q, backward)
    check_ragged_values(_FWD, *tensors[:6], max_seqlen_q)
    functional.reject_forward_ad(Q, D, q_weight)
    return backends.select(Q.device, Q.dtype).forward_ragged(tensors, normalize, argmax_dtype, max_seqlen_q)


@maxsim_ragged_fwd.register_fake
def _(
    Q,
    D,
    cu_seqlens_q,
    d_offsets,
    d_lengths,
    pairs,
    q_mask,
    d_mask,
    q_weight,
    normalize,
    argmax_dtype,
    max_seqlen_q,
    backward,
):
    tensors = Ragged(Q, D, cu_seqlens_q, d_offsets, d_lengths, pairs, q_mask, d_mask, q_weight)
    _check_fwd(tensors, argmax_dtype, max_seqlen_q, backward)
    scores = Q.new_empty(score_sizes(cu_seqlens_q, d_offsets, pairs), dtype=score_dtype(Q.dtype))
    if argmax_dtype is None:
        return scores, Q.new_empty(0, dtype=torch.int32)
    return scores, Q.new_empty(argmax_sizes(Q, d_offsets, pairs, max_seqlen_q), dtype=argmax_dtype)


def _check_sizes(name: str, t: Tensor, expected: Sequence, device: torch.device) -> None:
    same = t.dim() == len(expected)
    for found, size in zip(t.shape, expected, strict=False):
        same = same and found == size
    torch._check_value(same, lambda: f"{_BWD}: {name}: expected {list(expected)}, got {list(t.shape)}")
    if t.device != device:
        raise ValueError(f"{_BWD}: {name}: expected the device of Q, {device}, got {t.device}")


def _check_bwd(grad_scores: Tensor, tensors: Ragged, argmax: Tensor, needs: Sequence[bool]) -> None:
    check_ragged(_BWD, *tensors)
    Q, d_offsets, pairs = tensors.Q, tensors.d_offsets, tensors.pairs
    _check_sizes("grad_scores", grad_scores, score_sizes(tensors.cu_seqlens_q, d_offsets, pairs), Q.device)
    if argmax.dim() != 2:
        raise ValueError(f"{_BWD}: argmax: expected the winners of {_FWD}, 2-D, got {list(argmax.shape)}")
    _check_sizes("argmax", argmax, argmax_sizes(Q, d_offsets, pairs, argmax.shape[1]), Q.device)
    if grad_scores.dtype != score_dtype(Q.dtype):
        raise TypeError(f"{_BWD}: grad_scores: expected {score_dtype(Q.dtype)}, got {grad_scores.dtype}")
    if argmax.dtype not in ARGMAX_DTYPES:
        raise TypeError(f"{_BWD}: argmax: expected int16, int32 or int64, got {argmax.dtype}")
    if needs[2] and tensors.q_weight is None:
        raise ValueError(f"{_BWD}: needs: a gradient of q_weight was asked for, and q_weight is None")


@custom_op(_BWD, _BWD_SCHEMA, (torch.Tag.nondeterministic_bitwise,))
def maxsim_ragged_bwd(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    cu_seqlens_q: Tensor,
    d_offsets: Tensor,
    d_lengths: Tensor,
    pairs: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    argmax: Tensor,
    normalize: bool,
    unified: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, D and q_weight; those that `needs` does not ask for come back with size [0].

    Without `unified` each is summed by its owner in a fixed order; with it a GPU may add atomically.
    """
    tensors = Ragged(Q, D, cu_seqlens_q, d_offsets, d_lengths, pairs, q_mask, d_mask, q_weight)
    _check_bwd(grad_scores, tensors, argmax, needs)
    functional.reject_forward_ad(grad_scores, Q, D, q_weight)
    backend = backends.select(Q.device, Q.dtype)
    return backend.backward_ragged(grad_scores, tensors, argmax, normalize, list(needs), unified)


@maxsim_ragged_bwd.register_fake
def _(
    grad_scores,
    Q,
    D,
    cu_seqlens_q,
    d_offsets,
    d_lengths,
    pairs,
    q_mask,
    d_mask,
    q_weight,
    argmax,
    normalize,
    unified,
    needs,
):
    tensors = Ragged(Q, D, cu_seqlens_q, d_offsets, d_lengths, pairs, q_mask, d_mask, q_weight)
    _check_bwd(grad_scores, tensors, argmax, needs)
    shapes, dtypes = (Q.shape, D.shape, Q.shape[:1]), (Q.dtype, D.dtype, score_dtype(Q.dtype))
    return tuple(
        Q.new_empty(shape if need else (0,), dtype=dtype)
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
    )


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.normalize, argmax_dtype, ctx.max_seqlen_q, backward = inputs
    ctx.set_materialize_grads(False)
    ctx.unified, ctx.has_winners = backward == "unified", argmax_dtype is not None
    # An eager backward runs on another thread for CUDA tensors, where a `use_backend` block is not seen.
    ctx.backend = requested_backend()
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx, grad_scores, grad_argmax):
    wanted = (0, 1, 8)  # Q, D and q_weight
    needs = [ctx.needs_input_grad[i] for i in wanted]
    results: list[Tensor | None] = [None] * 13
    if grad_scores is None or not any(needs):
        return tuple(results)
    *tensors, argmax = ctx.saved_tensors
    with use_backend(ctx.backend):
        if not ctx.has_winners:
            dtype, size = argmax_dtype_for(tensors[1].shape[0]), ctx.max_seqlen_q
            argmax = torch.ops.lik.maxsim_ragged_fwd(*tensors, ctx.normalize, dtype, size, "auto")[1]
        grads = torch.ops.lik.maxsim_ragged_bwd(grad_scores, *tensors, argmax, ctx.normalize, ctx.unified, needs)
    for i, need, grad in zip(wanted, needs, grads, strict=True):
        results[i] = grad if need else None
    return tuple(results)


maxsim_ragged_fwd.register_autograd(_backward, setup_context=_setup_context)


def _no_double_backward(ctx, *grads):
    raise NotImplementedError(
        "lik::maxsim_ragged_fwd has no double backward: compute second derivatives with lik_ops.reference.maxsim"
    )


maxsim_ragged_bwd.register_autograd(_no_double_backward)

maxsim_ragged_fwd.register_vmap(batching_ragged.forward)
maxsim_ragged_bwd.register_vmap(batching_ragged.backward)
flops.register_ragged()
document_bodies(maxsim_ragged_fwd, maxsim_ragged_bwd)
