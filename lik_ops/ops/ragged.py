"""The ragged family: ``lik::maxsim_ragged_fwd`` and ``lik::maxsim_ragged_bwd`` over packed tokens.

One forward serves three layouts: a cross product, candidates of each query, and a list of pairs. Both are opaque custom
operators, and their bodies select a backend at run time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from .._ops import add_op_namespace_prefix
from .._ops import ops as lik
from ..core.arguments import choose_argmax_dtype, require
from ..core.segments import PackedArgs, RaggedArgs, check_ragged_tensors
from .checks import values
from .registration.custom import custom_op
from .registration.family import (
    check_forward_options,
    check_gradient,
    fake_forward,
    fake_gradient,
    lookup_backend,
    lookup_once,
    make_raising_double_backward,
    register_autograd,
)
from .stack import batching_ragged, functional

_TENSORS = (
    "Tensor Q, Tensor D, Tensor? cu_seqlens_q, Tensor? d_offsets, Tensor? d_lengths, Tensor? pairs, Tensor? q_mask,"
    " Tensor? d_mask, Tensor? q_weight"
)
_FWD_SCHEMA = (
    f"({_TENSORS}, bool normalize, ScalarType? argmax_dtype, SymInt max_seqlen_q, str backward) -> (Tensor, Tensor)"
)
_BWD_SCHEMA = (
    f"(Tensor grad_scores, {_TENSORS}, Tensor argmax, bool normalize, bool unified, bool[3] needs)"
    " -> (Tensor, Tensor, Tensor)"
)
_FWD, _BWD = map(add_op_namespace_prefix, ("maxsim_ragged_fwd", "maxsim_ragged_bwd"))


def _check_forward(tensors: Sequence, argmax_dtype: Any, max_seqlen_q: Any, backward: str) -> None:
    """Raise ValueError or TypeError, naming the argument, unless all arguments fit together."""
    check_ragged_tensors(_FWD, tensors)
    check_forward_options(_FWD, tensors[1], argmax_dtype, backward)
    require(max_seqlen_q >= 0, lambda: f"{_FWD}: max_seqlen_q: expected 0 or more, got {max_seqlen_q}")


@custom_op(add_op_namespace_prefix("maxsim_ragged_fwd"), _FWD_SCHEMA)
def maxsim_ragged_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the scores of packed tensors and, if requested, the argmax of each query token.

    The arguments, in the order of the schema:

    - ``Q``: query tokens ``[Tq, d]``, or ``[Nq, Lq, d]`` without ``cu_seqlens_q``.
    - ``D``: document tokens ``[Td, d]``, or ``[Nd, Ld, d]`` without ``d_offsets``, with the dtype and device of ``Q``.
    - ``cu_seqlens_q``: int32 or int64 ``[Nq + 1]``, the first row of each query and the end of the last one, or None.
    - ``d_offsets``, ``d_lengths``: the first row and the number of rows of each document, int32 or int64. Their shape
      is ``[Nd]`` for a cross product and for pairs, and ``[Nq, K]`` for candidates. Without ``d_lengths``,
      ``d_offsets`` is ``[Nd + 1]``, the first row of each document and the end of the last one. Both may be None.
    - ``pairs``: int32 or int64 ``[P, 2]``, (query, document) indices, or None.
    - ``q_mask``, ``d_mask``: bool (True = keep), the shapes of ``Q`` and ``D`` without d, or None.
    - ``q_weight``: fp32 (fp64 for fp64), the shape of ``Q`` without d, or None.
    - ``normalize``: whether to L2-normalize every token.
    - ``argmax_dtype``: int16, int32 or int64, or None for no argmax. Without an argmax the backward computes it again.
    - ``max_seqlen_q``: an upper bound of the query lengths. With ``pairs``, a longer query scores NaN.
    - ``backward``: ``"auto"``, ``"lowmem"`` or ``"unified"``.

    A segment or index that is negative or reaches outside its tensor scores NaN.

    Returns:
        ``(scores, argmax)``. The scores are fp32 (fp64 for fp64) ``[Nq, Nd]``, ``[Nq, K]`` or ``[P]``. The argmax is
        ``[Nd, Tq]``, ``[K, Tq]`` or ``[P, max_seqlen_q]``. It is a token index within the document, or -1 if there is
        none. Without `argmax_dtype` it has size [0].
    """
    tensors, options = args[:9], args[9:]
    run = lookup_once(_FWD, tensors, options, _make_forward, tensors, *options)
    values.check_ragged(_FWD, tensors, options[2])
    functional.reject_forward_ad(args[0], args[1], args[8])
    return run(tensors)


def _make_forward(
    tensors: Sequence, normalize: bool, argmax_dtype: Any, max_seqlen_q: int, backward: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Validate the arguments and return the function that computes them."""
    _check_forward(tensors, argmax_dtype, max_seqlen_q, backward)
    backend = backends.select_backend(tensors[0].device, tensors[0].dtype)
    if hasattr(backend, "ragged_plan"):
        packed_args = PackedArgs.from_tensors(tensors, max_seqlen_q)
        c, sizes = packed_args.for_kernel(), packed_args.sizes
        run = backend.ragged_plan(c, normalize, argmax_dtype).forward_ragged
        if all(x is y for x, y in zip(packed_args.tensors, c.tensors, strict=True)):
            return lambda tensors: run(PackedArgs._make((*tensors[:6], None, *tensors[6:], *sizes)))
        return lambda tensors: run(PackedArgs.from_tensors(tensors, max_seqlen_q).for_kernel())
    return lambda tensors: backend.forward_ragged(tensors, normalize, argmax_dtype, max_seqlen_q)


@maxsim_ragged_fwd.register_fake
def _(*args):
    tensors, (_, argmax_dtype, max_seqlen_q, backward) = args[:9], args[9:]
    _check_forward(tensors, argmax_dtype, max_seqlen_q, backward)
    return fake_forward(PackedArgs.from_tensors(tensors, max_seqlen_q), argmax_dtype)


def _check_gradient(grad_scores: Tensor, tensors: Sequence, argmax: Tensor, needs: Any) -> None:
    """Raise ValueError or TypeError, naming the argument, unless all arguments of the backward fit together."""
    check_ragged_tensors(_BWD, tensors)
    c = PackedArgs.from_tensors(tensors, argmax.shape[-1] if argmax.dim() else 0)
    check_gradient(_BWD, grad_scores, c, argmax, needs[2])


@custom_op(add_op_namespace_prefix("maxsim_ragged_bwd"), _BWD_SCHEMA, (torch.Tag.nondeterministic_bitwise,))
def maxsim_ragged_bwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of Q, D and q_weight for packed tensors.

    The arguments, in the order of the schema:

    - ``grad_scores``: the gradient of the scores, with their shape and dtype.
    - ``Q`` to ``q_weight`` and ``normalize``: the arguments of `maxsim_ragged_fwd`.
    - ``argmax``: the argmax that `maxsim_ragged_fwd` returned.
    - ``unified``: False sums each gradient in a fixed order without atomics. True may use atomic adds on a GPU.
    - ``needs``: whether the gradients of Q, D and q_weight are needed.

    Returns:
        The gradients of Q, D and q_weight, each with the dtype of its input, or with size [0] if not needed.
    """
    grad_scores, tensors, (argmax, normalize, unified, needs) = args[0], args[1:10], args[10:]
    check_args = grad_scores, tensors, argmax, needs
    backend = lookup_backend(_BWD, args[:11], tuple(needs), args[1], _check_gradient, *check_args)
    functional.reject_forward_ad(grad_scores, args[1], args[2], args[9])
    return backend.backward_ragged(grad_scores, tensors, argmax, normalize, list(needs), unified)


@maxsim_ragged_bwd.register_fake
def _(*args):
    grad_scores, tensors, (argmax, _, _, needs) = args[0], args[1:10], args[10:]
    _check_gradient(grad_scores, tensors, argmax, needs)
    return fake_gradient(PackedArgs.from_tensors(tensors, argmax.shape[-1]), needs)


def _call_backward(grad_scores, tensors, argmax, options, needs):
    normalize, argmax_dtype, max_seqlen_q, backward = options
    if argmax_dtype is None:  # the forward saved no argmax
        dtype = choose_argmax_dtype(PackedArgs.from_tensors(tensors, max_seqlen_q).Td)
        argmax = lik.maxsim_ragged_fwd(*tensors, normalize, dtype, max_seqlen_q, "auto")[1]
    return lik.maxsim_ragged_bwd(grad_scores, *tensors, argmax, normalize, backward == "unified", needs)


register_autograd(maxsim_ragged_fwd, RaggedArgs, _call_backward)
maxsim_ragged_bwd.register_autograd(make_raising_double_backward("maxsim_ragged_fwd"))
maxsim_ragged_fwd.register_vmap(batching_ragged.vmap_ragged_forward)
maxsim_ragged_bwd.register_vmap(batching_ragged.vmap_ragged_backward)
