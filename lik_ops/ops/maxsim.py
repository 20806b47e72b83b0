"""The MaxSim family: ``lik::maxsim``, ``lik::maxsim_fwd``, ``lik::maxsim_bwd_lowmem`` and ``lik::maxsim_bwd_unified``.

``lik::maxsim`` is composite. It validates its arguments, and exported graphs show it. The other three are opaque custom
operators. Their bodies select a backend at run time from the real sizes, so eager and compiled code run the same
kernel. An eager call without modes, transforms or subclasses goes from `_composite` straight to the backend (`eager`).
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
from .registration.autograd import record
from .registration.custom import custom_op, set_docstring
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


def _find_forward_call(args: tuple) -> DenseCall:
    """Return the decisions about a call of `maxsim_fwd`, which are made once for each dispatch key."""
    call = lookup_once(_FWD, (), (*args[5:], make_metadata_key(*args[:5])), _make_forward_call, args)
    functional.reject_forward_ad(args[0], args[1], args[4])
    return call


def _record_forward(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs of `maxsim_fwd`, and record a gradient that bypasses the dispatcher if possible."""
    return record(args[0], args[1], args[4], _find_forward_call(args), args[:5])


@custom_op(add_op_namespace_prefix("maxsim_fwd"), _FWD_SCHEMA, record_body=_record_forward)
def maxsim_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the scores of dense tensors and, if requested, the argmax of each query token.

    The arguments, in the order of the schema:

    - ``Q``: query tokens ``[Nq, Lq, d]`` in fp16, bf16, fp32 or fp64.
    - ``D``: document tokens ``[Nd, Ld, d]``, or candidates ``[Nq, K, Ld, d]``, with the dtype and device of ``Q``.
    - ``q_mask``, ``d_mask``: bool (True = keep), the shapes of ``Q`` and ``D`` without d, or None.
    - ``q_weight``: fp32 (fp64 for fp64) ``[Nq, Lq]``, or None.
    - ``normalize``: whether to L2-normalize every token.
    - ``argmax_dtype``: int16, int32 or int64, or None for no argmax.
    - ``backward``: ``"auto"``, ``"lowmem"`` or ``"unified"``. It selects the operator that computes the gradients.

    Returns:
        ``(scores, argmax)``. The scores are fp32 (fp64 for fp64) ``[Nq, Nd]``, or ``[Nq, K]`` for candidates. The
        argmax is ``[Nd, Nq, Lq]``, or ``[Nq, K, Lq]`` for candidates. It is a token index within the document, or -1
        for a masked query token and for a document that keeps no token. Without `argmax_dtype` it has size [0].
    """
    return _find_forward_call(args).forward(args[:5])


def _make_forward_call(args: tuple) -> DenseCall:
    """Validate the arguments and return the call that computes them."""
    tensors, (normalize, argmax_dtype, backward) = DenseArgs(*args[:5]), args[5:]
    check_forward(_FWD, tensors, argmax_dtype, backward)
    backend = backends.select_backend(tensors.Q.device, tensors.Q.dtype)
    return DenseCall(tensors, backend, normalize, backward, argmax_dtype, True, True)


@maxsim_fwd.register_fake
def _(*args):
    tensors, (_, argmax_dtype, backward) = DenseArgs(*args[:5]), args[5:]
    check_forward(_FWD, tensors, argmax_dtype, backward)
    return fake_forward(tensors, argmax_dtype)


def _unpack_backward_args(op: str, args: tuple) -> tuple[DenseArgs, Sequence[bool]]:
    """Return the validated tensors of a backward, and `needs`. An argmax of size [0] requests recomputation."""
    grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, _, needs = args
    tensors = DenseArgs(Q, D, q_mask, d_mask, q_weight)
    tensors.check(op)
    check_gradient(op, grad_scores, tensors, argmax, needs[2], recomputes=True)
    return tensors, needs


def _compute_gradients(op: str, args: tuple) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the operator `op`."""
    grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs = args
    options = normalize, *needs, make_metadata_key(Q, D, q_mask, d_mask, q_weight)
    run = lookup_once(op, (grad_scores, argmax), options, _make_backward_call, op, args)
    functional.reject_forward_ad(grad_scores, Q, D, q_weight)
    saved_argmax = argmax if argmax.dim() != 1 else None
    return run(grad_scores, Q, D, saved_argmax, q_mask, d_mask, q_weight, normalize, needs)


def _make_backward_call(op: str, args: tuple) -> Callable[..., tuple]:
    """Validate the arguments and return the function that computes the gradients."""
    Q = _unpack_backward_args(op, args)[0].Q
    return plan_backward(op.rpartition("_")[2], backends.select_backend(Q.device, Q.dtype))


@custom_op(add_op_namespace_prefix("maxsim_bwd_lowmem"), _BWD_SCHEMA)
def maxsim_bwd_lowmem(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of Q, D and q_weight without atomics, bitwise reproducible.

    One program computes each output element and sums in a fixed order. The arguments, in the order of the schema:

    - ``grad_scores``: the gradient of the scores, with their shape and dtype.
    - ``Q``, ``D``, ``q_mask``, ``d_mask``, ``q_weight``, ``normalize``: the arguments of `maxsim_fwd`.
    - ``argmax``: the argmax that `maxsim_fwd` returned. An argmax of size [0] is recomputed in parts that fit a
      constant workspace.
    - ``needs``: whether the gradients of Q, D and q_weight are needed.

    Returns:
        The gradients of Q, D and q_weight, each with the dtype of its input, or with size [0] if not needed.
    """
    return _compute_gradients(_LOWMEM, args)


@custom_op(add_op_namespace_prefix("maxsim_bwd_unified"), _BWD_SCHEMA, (torch.Tag.nondeterministic_bitwise,))
def maxsim_bwd_unified(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `maxsim_bwd_lowmem` from one pass over the argmax. On a GPU it uses fp32 atomic adds.

    The arguments and results are described at `maxsim_bwd_lowmem`. The result on a GPU is not bitwise reproducible.
    """
    return _compute_gradients(_UNIFIED, args)


def _fake_gradients(op: str, *args: Any) -> tuple[Tensor, ...]:
    """Return empty gradients of the operator `op` with the right shapes and dtypes."""
    return fake_gradient(*_unpack_backward_args(op, args))


def _call_backward(grad_scores, tensors, argmax, options, needs):
    Q, D, *per_token = tensors
    normalize, _, backward = options
    return choose_backward(backward)(grad_scores, Q, D, argmax, *per_token, normalize, needs)


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
    """Return late-interaction scores ``score[i, j] = sum_s q_weight[i, s] * max_t <Q[i, s], D[j, t]>``.

    This is the operator form of `lik_ops.maxsim`, which describes every argument. It is differentiable in Q, D and
    `q_weight`.

    Args:
        Q: query tokens ``[Nq, Lq, d]``, or ``[Lq, d]`` for a single query.
        D: document tokens ``[Nd, Ld, d]``, ``[Ld, d]`` for a single document, or candidates ``[Nq, K, Ld, d]``.
        q_mask: query tokens to keep, the shape of Q without d, bool or integers read as ``!= 0``.
        d_mask: document tokens to keep, the shape of D without d, bool or integers read as ``!= 0``.
        q_weight: a weight for each query token, the shape of Q without d, fp32 (fp64 for fp64).
        normalize: whether to L2-normalize every token.
        backward: ``"auto"``, ``"lowmem"`` or ``"unified"``.
        recompute: whether the backward computes the argmax again instead of saving it.

    Returns:
        Scores ``[Nq, Nd]``, or ``[Nq, K]`` for candidates, in fp32 (fp64 for fp64). A 2-D Q or D drops its axis.
    """
    scores = eager.try_maxsim(Q, D, q_mask, d_mask, q_weight, normalize, backward, recompute)
    if scores is not None:
        return scores
    tensors = Q, D, q_mask, d_mask, q_weight
    return call_dispatched("maxsim", lik.maxsim_fwd, tensors, normalize, backward, recompute)[0]


def call_dispatched(
    op: str,
    forward: Callable,
    inputs: tuple[Any, ...],
    normalize: bool,
    backward: str,
    recompute: bool = False,
    with_argmax: bool = False,
) -> list[Tensor]:
    """Validate, cast and score dense arguments through the dispatcher, which modes, transforms and subclasses see.

    Args:
        op: the public function that error messages name.
        forward: ``maxsim_fwd``, or a function with the same arguments that calls it.
        inputs: Q, D, q_mask, d_mask and q_weight of `lik_ops.maxsim`.
        normalize: whether to L2-normalize every token.
        backward: ``"auto"``, ``"lowmem"`` or ``"unified"``.
        recompute: whether the backward computes the argmax again.
        with_argmax: whether to return the argmax.

    Returns:
        ``[scores]``, or ``[scores, argmax]`` with the argmax as int64 ``[Nq, Nd, Lq]``.
    """
    Q, D, q_mask, d_mask, q_weight = inputs
    sharding.register_if_needed()
    Q, D, q_weight = autocast.cast_to_autocast(Q, D, q_weight)
    check_dense(op, Q, D, q_mask, d_mask, q_weight, backward)
    functional.reject_forward_ad(Q, D, q_weight)
    argmax_dtype = torch.int32 if with_argmax else None
    if not with_argmax and not recompute and functional.is_recording_gradients(Q, D, q_weight):
        argmax_dtype = choose_argmax_dtype(D.shape[-2])
    tensors = add_batch_axes(Q, D, as_bool(q_mask), as_bool(d_mask), q_weight)
    scores, argmax = forward(*tensors, normalize, argmax_dtype, backward)
    results = [scores]
    if with_argmax:
        results.append((argmax if D.dim() == 4 else argmax.transpose(0, 1)).long())
    if D.dim() == 2:
        results = [x.squeeze(1) for x in results]
    return [x.squeeze(0) for x in results] if Q.dim() == 2 else results


_LIBRARY = torch.library.Library(lik.name, "FRAGMENT")
_LIBRARY.define(_MAXSIM_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("maxsim", _composite, "CompositeImplicitAutograd")
# Without this kernel, vmap would run the samples one by one instead of tracing into the composite.
_LIBRARY.impl("maxsim", _composite, "FuncTorchBatched")
set_docstring("maxsim", _composite.__doc__ or "")
