"""The MaxSim family: ``lik::maxsim`` over ``lik::maxsim_fwd``, ``lik::maxsim_bwd_lowmem``, ``lik::maxsim_bwd_unified``.

`try_maxsim` is composite: what users call, see in exported graphs, and what validates. The other three are opaque
custom ops whose bodies pick a backend at run time from the real sizes, so eager and compiled code run the same kernel.
An eager call that nothing watches goes from `try_maxsim` straight to the backend (`eager`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import backends
from .._ops import add_op_namespace_prefix
from .._ops import ops as lik
from ..core.arguments import add_batch_axes, as_bool, check_dense, choose_argmax_dtype, make_metadata_key
from ..core.segments import DenseArgs
from .fast_path import eager
from .fast_path.eager_calls import DenseCall
from .registration.custom import custom_op
from .registration.docstrings import set_docstring
from .registration.family import (
    check_forward,
    check_gradient,
    fake_forward,
    fake_gradient,
    lookup_once,
    make_raising_double_backward,
    register_autograd,
)
from .registration.gradients import choose_backward, plan_backward
from .stack import autocast, batching, functional, sharding

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
_FWD, _LOWMEM, _UNIFIED = map(add_op_namespace_prefix, ("maxsim_fwd", "maxsim_bwd_lowmem", "maxsim_bwd_unified"))


@custom_op(add_op_namespace_prefix("maxsim_fwd"), _FWD_SCHEMA)
def maxsim_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Scores ``[Nq, Nd]`` (``[Nq, K]``) and, unless `argmax_dtype` is None, each query token's winner.

    The winners are ``[Nd, Nq, Lq]`` (cross product) or ``[Nq, K, Lq]`` (candidates), relative to their document, -1
    where there is none. `vmap_backward` names the op that its gradient runs.
    """
    call = lookup_once(_FWD, (), (*args[5:], make_metadata_key(*args[:5])), _make_forward_call, args)
    functional.reject_forward_ad(args[0], args[1], args[4])
    return call.forward(args[:5])


def _make_forward_call(args: tuple) -> DenseCall:
    tensors, (normalize, argmax_dtype, backward) = DenseArgs(*args[:5]), args[5:]
    check_forward(_FWD, tensors, argmax_dtype, backward)
    backend = backends.select_backend(tensors.Q.device, tensors.Q.dtype)
    return DenseCall(tensors, backend, normalize, backward, argmax_dtype, False, returned=True)


@maxsim_fwd.register_fake
def _(*args):
    tensors, (_, argmax_dtype, backward) = DenseArgs(*args[:5]), args[5:]
    check_forward(_FWD, tensors, argmax_dtype, backward)
    return fake_forward(tensors, tensors.argmax_shape(), argmax_dtype)


def _unpack_backward_args(op: str, args: tuple) -> tuple[DenseArgs, Sequence[bool]]:
    """The tensors of a backward, checked, and `needs`. An argmax ``[0]`` stands for winners to be found again."""
    grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, _, needs = args
    tensors = DenseArgs(Q, D, q_mask, d_mask, q_weight)
    check_gradient(op, grad_scores, tensors, argmax, tensors.argmax_shape() if argmax.dim() != 1 else (0,), needs)
    return tensors, needs


def _compute_gradients(op: str, args: tuple) -> tuple[Tensor, Tensor, Tensor]:
    grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs = args
    options = normalize, *needs, make_metadata_key(Q, D, q_mask, d_mask, q_weight)
    run = lookup_once(op, (grad_scores, argmax), options, _make_backward_call, op, args)
    functional.reject_forward_ad(grad_scores, Q, D, q_weight)
    argmax_found = argmax if argmax.dim() != 1 else None
    return run(grad_scores, Q, D, argmax_found, q_mask, d_mask, q_weight, normalize, needs)


def _make_backward_call(op: str, args: tuple) -> Callable[..., tuple]:
    Q = _unpack_backward_args(op, args)[0].Q
    return plan_backward(op.rpartition("_")[2], backends.select_backend(Q.device, Q.dtype))


@custom_op(add_op_namespace_prefix("maxsim_bwd_lowmem"), _BWD_SCHEMA)
def maxsim_bwd_lowmem(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, D and q_weight, each summed by its owner: no atomics, bitwise reproducible.

    `needs` says which of the three are wanted; the others come back with size [0]. Given an `argmax` of size [0] it
    finds the winners again, in parts that need no more memory than a constant.
    """
    return _compute_gradients(_LOWMEM, args)


@custom_op(add_op_namespace_prefix("maxsim_bwd_unified"), _BWD_SCHEMA, (torch.Tag.nondeterministic_bitwise,))
def maxsim_bwd_unified(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `maxsim_bwd_lowmem` in one pass over the winners; on a GPU through fp32 atomic adds."""
    return _compute_gradients(_UNIFIED, args)


def _fake_gradients(op: str, *args: Any) -> tuple[Tensor, ...]:
    return fake_gradient(*_unpack_backward_args(op, args))


def _call_backward(grad_scores, tensors, argmax, options, needs):
    Q, D, *rest = tensors
    normalize, _, backward = options
    return choose_backward(backward)(grad_scores, Q, D, argmax, *rest, normalize, needs)


register_autograd(maxsim_fwd, DenseArgs, _call_backward)
maxsim_fwd.register_vmap(batching.vmap_forward)
for _name, _op in ((_LOWMEM, maxsim_bwd_lowmem), (_UNIFIED, maxsim_bwd_unified)):
    _op.register_fake(partial(_fake_gradients, _name))
    _op.register_autograd(make_raising_double_backward("maxsim"))
    _op.register_vmap(partial(batching.vmap_backward, _op))


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
    """Late-interaction scores ``score[i, j] = sum_s q_weight[i, s] * max_t <Q[i, s], D[j, t]>``: `lik_ops.try_maxsim`.

    ``[Nq, Nd]`` of Q ``[Nq, Lq, d]`` and D ``[Nd, Ld, d]``, ``[Nq, K]`` of candidates ``[Nq, K, Ld, d]``; 2-D Q or D
    drop their axis. Differentiable in Q, D and `q_weight`. `lik_ops.try_maxsim` says what each argument is.
    """
    scores = eager.try_maxsim(Q, D, q_mask, d_mask, q_weight, normalize, backward, recompute)
    if scores is not None:
        return scores
    if functional.is_differentiating():
        raise NotImplementedError(
            f"torch.func cannot differentiate torch.ops.{lik.name}.maxsim, nor any MaxSim inside torch.compile: call"
            " lik_ops.maxsim outside compiled code, or take gradients with torch.autograd"
        )
    given = Q, D, q_mask, d_mask, q_weight
    return call_dispatched("maxsim", lik.maxsim_fwd, given, normalize, backward, recompute)[0]


def call_dispatched(
    op: str,
    forward: Callable,
    given: tuple[Any, ...],
    normalize: bool,
    backward: str,
    recompute: bool = False,
    with_argmax: bool = False,
) -> list[Tensor]:
    """Scores and, if asked, int64 winners ``[Nq, Nd, Lq]``, where modes, transforms and subclasses see the call.

    Args:
        forward: ``maxsim_fwd`` or what leads there.
        given: Q, D, q_mask, d_mask and q_weight of `lik_ops.try_maxsim`.
    """
    Q, D, q_mask, d_mask, q_weight = given
    sharding.register_if_needed()
    Q, D, q_weight = autocast.cast_to_autocast(Q, D, q_weight)
    check_dense(op, Q, D, q_mask, d_mask, q_weight, backward)
    functional.reject_forward_ad(Q, D, q_weight)
    argmax_dtype = torch.int32 if with_argmax else None
    if not with_argmax and not recompute and functional.is_recording_gradients(Q, D, q_weight):
        argmax_dtype = choose_argmax_dtype(D.shape[-2])
    tensors = add_batch_axes(Q, D, as_bool(q_mask), as_bool(d_mask), q_weight)
    scores, argmax = forward(*tensors, normalize, argmax_dtype, backward)
    found = [scores]
    if with_argmax:
        found.append((argmax if D.dim() == 4 else argmax.transpose(0, 1)).long())
    if D.dim() == 2:
        found = [x.squeeze(1) for x in found]
    return [x.squeeze(0) for x in found] if Q.dim() == 2 else found


_LIBRARY = torch.library.Library(lik.name, "FRAGMENT")
_LIBRARY.define(_MAXSIM_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("maxsim", _composite, "CompositeImplicitAutograd")
_LIBRARY.impl("maxsim", _composite, "FuncTorchBatched")  # else vmap would loop over it instead of opening it
set_docstring("maxsim", _composite.__doc__ or "")
