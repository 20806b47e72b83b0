"""MaxSim of hidden states: ``lik::maxsim_from_hidden_fwd``, ``lik::maxsim_from_hidden_bwd``.

Document tokens are ``normalize(H W^T + b)``, computed by the kernel that scores them. The forward saves only the
argmax, and the backward recomputes the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..._ops import add_op_namespace_prefix
from ..._ops import ops as lik
from ...core.arguments import (
    check_dense_batched,
    check_dtype_and_device,
    check_mask,
    check_same_size,
    check_strided,
    check_tensor,
    check_tokens,
    check_weight,
    format_shape,
)
from ...ops.registration.custom import custom_op
from ...ops.registration.family import (
    check_argmax_dtype,
    check_gradient,
    check_gradient_exists,
    fake_forward,
    lookup_backend,
    make_raising_double_backward,
    register_autograd,
)
from ...ops.stack import batching, functional
from .portable import HiddenArgs

_FWD_SCHEMA = (
    "(Tensor Q, Tensor H, Tensor W, Tensor? b, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize,"
    " ScalarType? argmax_dtype) -> (Tensor, Tensor)"
)
_BWD_SCHEMA = (
    "(Tensor grad_scores, Tensor Q, Tensor H, Tensor W, Tensor? b, Tensor argmax, Tensor? q_mask, Tensor? d_mask,"
    " Tensor? q_weight, bool normalize, bool[5] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_FWD, _BWD = map(add_op_namespace_prefix, ("maxsim_from_hidden_fwd", "maxsim_from_hidden_bwd"))


def check_hidden_args(op: str, x: HiddenArgs) -> None:
    """Raise ValueError or TypeError, naming the argument, unless all fit together. Q and H may be 2-D."""
    Q, H, W, b = x[:4]
    check_tokens(op, Q, Q, ("[Lq, d]", "[Nq, Lq, d]"), ("[Lq, d]", "[Nq, Lq, d]"))
    ranks = {"H": ((2, 3), "[Ld, d_model] or [Nd, Ld, d_model]"), "W": ((2,), "[d, d_model]"), "b": ((1,), "[d]")}
    for name, t in (("H", H), ("W", W), ("b", b)):
        check_tensor(op, name, t, or_none=name == "b")
        if t is None:
            continue
        check_strided(op, name, t)
        rank, shape_text = ranks[name]
        if t.dim() not in rank:
            raise ValueError(f"{op}: {name}: expected {shape_text}, got {format_shape(t)}")
        check_dtype_and_device(op, name, t, "Q", Q)
    if isinstance(H.shape[-1], int) and H.shape[-1] < 1:
        raise ValueError(f"{op}: H: expected d_model >= 1, got {format_shape(H)}")
    d, width = Q.shape[-1], H.shape[-1]
    check_same_size(W.shape[0], d, lambda: f"{op}: W: expected [{d}, {width}], d as in Q, got {format_shape(W)}")
    check_same_size(
        W.shape[1], width, lambda: f"{op}: W: expected [{d}, {width}], d_model as in H, got {format_shape(W)}"
    )
    if b is not None:
        check_same_size(b.shape[0], d, lambda: f"{op}: b: expected [{d}], d as in Q, got {format_shape(b)}")
    check_mask(op, "q_mask", x.q_mask, "Q", Q)
    check_mask(op, "d_mask", x.d_mask, "H", H)
    check_weight(op, x.q_weight, Q)


def _check_batched_args(op: str, x: HiddenArgs) -> None:
    """Raise ValueError or TypeError unless Q and H are 3-D, masks are bool, and `check_hidden_args` accepts all."""
    check_hidden_args(op, x)
    if x.Q.dim() != 3 or x.H.dim() != 3:
        expected = "[Nq, Lq, d] and [Nd, Ld, d_model]"
        raise ValueError(f"{op}: Q, H: expected {expected}, got {format_shape(x.Q)} and {format_shape(x.H)}")
    check_dense_batched(op, x.Q, x.Q, x.q_mask, x.d_mask)


def _check_forward(x: HiddenArgs, argmax_dtype: Any) -> None:
    """Raise ValueError or TypeError, naming the argument, unless the forward accepts these arguments."""
    _check_batched_args(_FWD, x)
    check_argmax_dtype(_FWD, argmax_dtype, x.H.shape[1])


@custom_op(add_op_namespace_prefix("maxsim_from_hidden_fwd"), _FWD_SCHEMA)
def maxsim_from_hidden_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the scores of documents given as hidden states and, if requested, the argmax of each query token.

    `lik_ops.maxsim_from_hidden` describes the computation. The arguments, in the order of the schema:

    - ``Q``: query tokens ``[Nq, Lq, d]``.
    - ``H``: hidden states of document tokens ``[Nd, Ld, d_model]``.
    - ``W``, ``b``: the projection ``[d, d_model]`` and its bias ``[d]``, or None. All tensors have the dtype of ``Q``.
    - ``q_mask``, ``d_mask``: bool (True = keep) ``[Nq, Lq]`` and ``[Nd, Ld]``, or None.
    - ``q_weight``: fp32 (fp64 for fp64) ``[Nq, Lq]``, or None.
    - ``normalize``: whether to L2-normalize the projected document tokens.
    - ``argmax_dtype``: int16, int32 or int64, or None for no argmax.

    Returns:
        ``(scores, argmax)``: fp32 (fp64 for fp64) ``[Nq, Nd]``, and ``[Nd, Nq, Lq]`` as in ``lik::maxsim_fwd``.
    """
    x, (normalize, argmax_dtype) = HiddenArgs(*args[:7]), args[7:]
    backend = lookup_backend(_FWD, x, (argmax_dtype,), x.Q, _check_forward, x, argmax_dtype)
    functional.reject_forward_ad(x.Q, x.H, x.W, x.b, x.q_weight)
    return backend.forward_head(x, normalize, argmax_dtype)


@maxsim_from_hidden_fwd.register_fake
def _(*args):
    x, argmax_dtype = HiddenArgs(*args[:7]), args[8]
    _check_forward(x, argmax_dtype)
    return fake_forward(x, argmax_dtype)


def _unpack_backward_args(args: tuple) -> tuple[HiddenArgs, Sequence[bool]]:
    """Return the tensors of a backward, and `needs`."""
    *tensors, _, needs = args
    _, Q, H, W, b, _, *per_token = tensors
    return HiddenArgs(Q, H, W, b, *per_token), needs


def _check_backward(args: tuple) -> None:
    """Raise ValueError or TypeError, naming the argument, unless the backward accepts these arguments."""
    (x, needs), grad_scores, argmax = _unpack_backward_args(args), args[0], args[5]
    _check_batched_args(_BWD, x)
    check_gradient(_BWD, grad_scores, x, argmax, needs[4], recomputes=True)
    check_gradient_exists(_BWD, "b", x.b, needs[3])


@custom_op(add_op_namespace_prefix("maxsim_from_hidden_bwd"), _BWD_SCHEMA)
def maxsim_from_hidden_bwd(*args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of Q, H, W, b and q_weight without atomics.

    The backward allocates the document tokens ``[Nd, Ld, d]``. With few query rows it copies the hidden states of the
    tokens that are an argmax instead. The arguments, in the order of the schema:

    - ``grad_scores``: the gradient of the scores, with their shape and dtype.
    - ``Q``, ``H``, ``W``, ``b``, ``q_mask``, ``d_mask``, ``q_weight``, ``normalize``: the arguments of
      `maxsim_from_hidden_fwd`.
    - ``argmax``: the argmax that `maxsim_from_hidden_fwd` returned. An argmax of size [0] is recomputed.
    - ``needs``: whether the gradients of Q, H, W, b and q_weight are needed.

    Returns:
        The five gradients, each with the dtype of its input, or with size [0] if not needed.
    """
    (x, needs), grad_scores, argmax, normalize = _unpack_backward_args(args), args[0], args[5], args[9]
    backend = lookup_backend(_BWD, args[:9], tuple(needs), x.Q, _check_backward, args)
    functional.reject_forward_ad(grad_scores, x.Q, x.H, x.W, x.b, x.q_weight)
    saved_argmax = argmax if argmax.dim() != 1 else None
    return backend.backward_head(grad_scores, x, saved_argmax, normalize, list(needs))


@maxsim_from_hidden_bwd.register_fake
def _(*args):
    _check_backward(args)
    x, needs = _unpack_backward_args(args)
    return tuple(x.new_gradients(needs))


def _call_backward(grad_scores, tensors, argmax, options, needs):
    Q, H, W, b, *per_token = tensors
    return lik.maxsim_from_hidden_bwd(grad_scores, Q, H, W, b, argmax, *per_token, options[0], needs)


register_autograd(maxsim_from_hidden_fwd, HiddenArgs, _call_backward, differentiable=(0, 1, 2, 3, 6))
maxsim_from_hidden_bwd.register_autograd(make_raising_double_backward("maxsim_from_hidden"))
batching.register_loop(maxsim_from_hidden_fwd, maxsim_from_hidden_bwd)
