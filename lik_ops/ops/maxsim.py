"""The MaxSim family: ``lik::maxsim`` over ``lik::maxsim_fwd``, ``lik::maxsim_bwd_lowmem``, ``lik::maxsim_bwd_unified``.

`maxsim` is composite: what users call, see in exported graphs, and what validates. The other three are opaque custom
ops whose bodies pick a backend at run time from the real sizes, so eager and compiled code run the same kernel. An
eager call that nothing watches goes from `maxsim` straight to the backend (`eager`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..arguments import argmax_dtype_for, as_bool, check, check_lifted, lifted, score_dtype
from ..settings import requested_backend, use_backend
from . import eager
from .custom import custom_op
from .documented import document, document_bodies
from .stack import autocast, batching, flops, functional, sharding

_FWD_SCHEMA = (
    "(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, ScalarType? argmax_dtype,"
    " str backward) -> (Tensor, Tensor)"
)
_BWD_SCHEMA = (
    "(Tensor grad_scores, Tensor Q, Tensor D, Tensor argmax, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight,"
    " bool normalize, bool[3] needs) -> (Tensor, Tensor, Tensor)"
)
_MAXSIM_SCHEMA = (
    "maxsim(Tensor Q, Tensor D, Tensor? q_mask=None, Tensor? d_mask=None, *, Tensor? q_weight=None,"
    ' bool normalize=False, str backward="auto", bool recompute=False) -> Tensor'
)
_ARGMAX_DTYPES = (None, torch.int16, torch.int32, torch.int64)


def _check_fwd(op, Q, D, q_mask, d_mask, q_weight, argmax_dtype, backward) -> None:
    check(op, Q, D, q_mask, d_mask, q_weight, backward)
    check_lifted(op, Q, D, q_mask, d_mask)
    if argmax_dtype not in _ARGMAX_DTYPES:
        raise TypeError(f"{op}: argmax_dtype: expected None, int16, int32 or int64, got {argmax_dtype}")
    if argmax_dtype == torch.int16 and isinstance(D.shape[-2], int) and D.shape[-2] > 32768:
        raise ValueError(f"{op}: argmax_dtype: int16 cannot index Ld = {D.shape[-2]} document tokens")


def _argmax_shape(Q: Tensor, D: Tensor) -> tuple:
    """Document-major for the cross product, so that forward and both backwards read and write it in order."""
    if D.dim() == 4:
        return (Q.shape[0], D.shape[1], Q.shape[1])
    return (D.shape[0], Q.shape[0], Q.shape[1])


@custom_op("lik::maxsim_fwd", _FWD_SCHEMA)
def maxsim_fwd(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
    backward: str,
) -> tuple[Tensor, Tensor]:
    """Scores ``[Nq, Nd]`` (``[Nq, K]``) and, unless `argmax_dtype` is None, each query token's winner.

    The winners are ``[Nd, Nq, Lq]`` (cross product) or ``[Nq, K, Lq]`` (candidates), relative to their document, -1
    where there is none. `backward` names the op that its gradient runs.
    """
    _check_fwd("lik::maxsim_fwd", Q, D, q_mask, d_mask, q_weight, argmax_dtype, backward)
    functional.reject_forward_ad(Q, D, q_weight)
    return backends.select(Q.device, Q.dtype).forward(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype)


@maxsim_fwd.register_fake
def _(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype, backward):
    _check_fwd("lik::maxsim_fwd", Q, D, q_mask, d_mask, q_weight, argmax_dtype, backward)
    scores = Q.new_empty((Q.shape[0], D.shape[1] if D.dim() == 4 else D.shape[0]), dtype=score_dtype(Q.dtype))
    if argmax_dtype is None:
        return scores, Q.new_empty(0, dtype=torch.int32)
    return scores, Q.new_empty(_argmax_shape(Q, D), dtype=argmax_dtype)


def _check_bwd(op, grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, needs) -> None:
    check(op, Q, D, q_mask, d_mask, q_weight)
    check_lifted(op, Q, D, q_mask, d_mask)
    expected_scores = [Q.shape[0], D.shape[1] if D.dim() == 4 else D.shape[0]]
    expected_argmax = list(_argmax_shape(Q, D))
    if argmax.dim() == 1 and argmax.shape[0] == 0:
        expected_argmax = [0]
    for name, t, expected in (("grad_scores", grad_scores, expected_scores), ("argmax", argmax, expected_argmax)):
        same = t.dim() == len(expected)
        for a, b in zip(t.shape, expected, strict=False):
            same = same and a == b
        said = partial("{}: {}: expected {}, got {}".format, op, name, expected, list(t.shape))
        torch._check_value(same, said)
        if t.device != Q.device:
            raise ValueError(f"{op}: {name}: expected the device of Q, {Q.device}, got {t.device}")
    if grad_scores.dtype != score_dtype(Q.dtype):
        raise TypeError(f"{op}: grad_scores: expected {score_dtype(Q.dtype)}, got {grad_scores.dtype}")
    if argmax.dtype not in _ARGMAX_DTYPES:
        raise TypeError(f"{op}: argmax: expected int16, int32 or int64, got {argmax.dtype}")
    if needs[2] and q_weight is None:
        raise ValueError(f"{op}: needs: a gradient of q_weight was asked for, and q_weight is None")


def _given(argmax: Tensor) -> Tensor | None:
    """None for the ``[0]`` that stands for winners to be found again."""
    return None if argmax.dim() == 1 else argmax


def _fake_bwd(op):
    def fake(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs):
        _check_bwd(op, grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, needs)
        shapes = (Q.shape, D.shape, Q.shape[:2])
        dtypes = (Q.dtype, D.dtype, score_dtype(Q.dtype))
        return tuple(
            Q.new_empty(shape if need else (0,), dtype=dtype)
            for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
        )

    return fake


@custom_op("lik::maxsim_bwd_lowmem", _BWD_SCHEMA)
def maxsim_bwd_lowmem(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, D and q_weight, each summed by its owner: no atomics, bitwise reproducible.

    `needs` says which of the three are wanted; the others come back with size [0]. Given an `argmax` of size [0] it
    finds the winners again, in parts that need no more memory than a constant.
    """
    _check_bwd("lik::maxsim_bwd_lowmem", grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, needs)
    functional.reject_forward_ad(grad_scores, Q, D, q_weight)
    backend = backends.select(Q.device, Q.dtype)
    return backend.backward_lowmem(grad_scores, Q, D, _given(argmax), q_mask, d_mask, q_weight, normalize, list(needs))


@custom_op("lik::maxsim_bwd_unified", _BWD_SCHEMA, (torch.Tag.nondeterministic_bitwise,))
def maxsim_bwd_unified(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `maxsim_bwd_lowmem` in one pass over the winners; on a GPU through fp32 atomic adds."""
    _check_bwd("lik::maxsim_bwd_unified", grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, needs)
    functional.reject_forward_ad(grad_scores, Q, D, q_weight)
    backend = backends.select(Q.device, Q.dtype)
    return backend.backward_unified(grad_scores, Q, D, _given(argmax), q_mask, d_mask, q_weight, normalize, list(needs))


maxsim_bwd_lowmem.register_fake(_fake_bwd("lik::maxsim_bwd_lowmem"))
maxsim_bwd_unified.register_fake(_fake_bwd("lik::maxsim_bwd_unified"))


def _setup_context(ctx, inputs, output) -> None:
    Q, D, q_mask, d_mask, q_weight, normalize, _, backward = inputs
    ctx.set_materialize_grads(False)
    ctx.normalize = normalize
    ctx.op = torch.ops.lik.maxsim_bwd_unified if backward == "unified" else torch.ops.lik.maxsim_bwd_lowmem
    # An eager backward runs on another thread for CUDA tensors, where a `use_backend` block is not seen.
    ctx.backend = requested_backend()
    ctx.save_for_backward(Q, D, output[1], q_mask, d_mask, q_weight)


def _backward(ctx, grad_scores, grad_argmax):
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 4)]
    if grad_scores is None or not any(needs):
        return (None,) * 8
    Q, D, argmax, q_mask, d_mask, q_weight = ctx.saved_tensors
    with use_backend(ctx.backend):
        grads = ctx.op(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, ctx.normalize, needs)
    grad_Q, grad_D, grad_q_weight = (g if need else None for g, need in zip(grads, needs, strict=True))
    return grad_Q, grad_D, None, None, grad_q_weight, None, None, None


maxsim_fwd.register_autograd(_backward, setup_context=_setup_context)


def _no_double_backward(ctx, *grads):
    raise NotImplementedError(
        "lik::maxsim has no double backward: compute second derivatives with lik_ops.reference.maxsim"
    )


maxsim_bwd_lowmem.register_autograd(_no_double_backward)
maxsim_bwd_unified.register_autograd(_no_double_backward)

maxsim_fwd.register_vmap(batching.forward)
maxsim_bwd_lowmem.register_vmap(partial(batching.backward, maxsim_bwd_lowmem))
maxsim_bwd_unified.register_vmap(partial(batching.backward, maxsim_bwd_unified))

flops.register()
document_bodies(maxsim_fwd, maxsim_bwd_lowmem, maxsim_bwd_unified)


def _composite(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    backward: str = "auto",
    recompute: bool = False,
) -> Tensor:
    """Late-interaction scores ``score[i, j] = sum_s q_weight[i, s] * max_t <Q[i, s], D[j, t]>``: `lik_ops.maxsim`.

    ``[Nq, Nd]`` of Q ``[Nq, Lq, d]`` and D ``[Nd, Ld, d]``, ``[Nq, K]`` of candidates ``[Nq, K, Ld, d]``; 2-D Q or D
    drop their axis. Differentiable in Q, D and `q_weight`. `lik_ops.maxsim` says what each argument is.
    """
    scores = eager.maxsim(Q, D, q_mask, d_mask, q_weight, normalize, backward, recompute)
    if scores is not None:
        return scores
    if functional.is_differentiating():
        raise NotImplementedError(
            "torch.func cannot differentiate torch.ops.lik.maxsim, nor any MaxSim inside torch.compile: call"
            " lik_ops.maxsim outside compiled code, or take gradients with torch.autograd"
        )
    return watched(torch.ops.lik.maxsim_fwd, Q, D, q_mask, d_mask, q_weight, normalize, backward, recompute)


def watched(
    forward: Callable,
    Q: Any,
    D: Any,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Any,
    normalize: bool,
    backward: str,
    recompute: bool,
) -> Tensor:
    """`lik::maxsim` where modes, transforms and subclasses see it; `forward` is ``maxsim_fwd`` or leads there."""
    sharding.register_if_needed()
    Q, D, q_weight = autocast.to_region(Q, D, q_weight)
    check("maxsim", Q, D, q_mask, d_mask, q_weight, backward)
    functional.reject_forward_ad(Q, D, q_weight)
    differentiable = functional.is_differentiating() or any(t is not None and t.requires_grad for t in (Q, D, q_weight))
    keeps = differentiable and not recompute and torch.is_grad_enabled()
    scores, _ = forward(
        *lifted(Q, D, as_bool(q_mask), as_bool(d_mask), q_weight),
        normalize,
        argmax_dtype_for(D.shape[-2]) if keeps else None,
        backward,
    )
    scores = scores.squeeze(1) if D.dim() == 2 else scores
    return scores.squeeze(0) if Q.dim() == 2 else scores


_LIBRARY = torch.library.Library("lik", "FRAGMENT")
_LIBRARY.define(_MAXSIM_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("maxsim", _composite, "CompositeImplicitAutograd")
_LIBRARY.impl("maxsim", _composite, "FuncTorchBatched")  # else vmap would loop over it instead of opening it
document("maxsim", _composite.__doc__ or "")
