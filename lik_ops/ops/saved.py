"""Training with documents saved as int8: ``lik::maxsim_fwd_int8``, ``lik::maxsim_bwd_int8``.

The forward equals ``lik::maxsim_fwd`` and reads the original documents. Autograd saves int8 documents and a scale for
each token instead of the originals. For fp16 and bf16 this is half the bytes, once no other reference holds the
documents. The gradient of Q uses dequantized tokens. The gradient of D needs only Q and the argmax, so it is exact.
With `normalize` it also passes through the norms, and these are the norms of the dequantized tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from .._ops import add_op_namespace_prefix
from .._ops import ops as lik
from ..core.segments import DenseArgs
from .quantized import make_tokens_like
from .registration.custom import custom_op
from .registration.family import (
    check_forward,
    check_gradient,
    check_shape,
    fake_forward,
    fake_gradient,
    lookup_backend,
    lookup_once,
    make_raising_double_backward,
    register_autograd,
)
from .registration.gradients import plan_backward
from .stack import batching, functional

_FWD_SCHEMA = (
    "(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, ScalarType argmax_dtype,"
    " str backward) -> (Tensor, Tensor, Tensor, Tensor)"
)
_BWD_SCHEMA = (
    "(Tensor grad_scores, Tensor Q, Tensor data, Tensor scale, Tensor argmax, Tensor? q_mask, Tensor? q_weight,"
    " bool normalize, bool unified, bool[3] needs) -> (Tensor, Tensor, Tensor)"
)
_FWD, _BWD = map(add_op_namespace_prefix, ("maxsim_fwd_int8", "maxsim_bwd_int8"))


@custom_op(add_op_namespace_prefix("maxsim_fwd_int8"), _FWD_SCHEMA)
def maxsim_fwd_int8(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the scores and the argmax of `maxsim_fwd`, and an int8 copy of D for the backward.

    The arguments are described at ``lik::maxsim_fwd``, but `argmax_dtype` must not be None.

    Returns:
        ``(scores, argmax, data, scale)``. ``data`` is int8 with the shape of D. ``scale`` is fp32 with the shape of D
        without d.
    """
    tensors, (normalize, argmax_dtype, backward) = DenseArgs(*args[:5]), args[5:]
    backend = lookup_backend(_FWD, args, (), tensors.Q, check_forward, _FWD, tensors, argmax_dtype, backward)
    functional.reject_forward_ad(tensors.Q, tensors.D, tensors.q_weight)
    return *backend.forward(*tensors, normalize, argmax_dtype), *backend.keep_int8(tensors.D)


@maxsim_fwd_int8.register_fake
def _(*args):
    tensors, (_, argmax_dtype, backward) = DenseArgs(*args[:5]), args[5:]
    check_forward(_FWD, tensors, argmax_dtype, backward)
    data, scale = (
        tensors.Q.new_empty(shape, dtype=dtype)
        for shape, dtype in ((tensors.D.shape, torch.int8), (tensors.D.shape[:-1], torch.float32))
    )
    return *fake_forward(tensors, argmax_dtype), data, scale


def _unpack_backward_args(args: tuple) -> DenseArgs:
    """Return the validated tensors of a backward, with a placeholder for D."""
    grad_scores, Q, data, scale, argmax, q_mask, q_weight, _, _, needs = args
    if data.dtype != torch.int8:
        raise TypeError(f"{_BWD}: data: expected torch.int8, got {data.dtype}")
    if scale.dtype != torch.float32:
        raise TypeError(f"{_BWD}: scale: expected torch.float32, got {scale.dtype}")
    tensors = DenseArgs(Q, make_tokens_like(Q, data.shape), q_mask, None, q_weight)
    tensors.check(_BWD)
    check_gradient(_BWD, grad_scores, tensors, argmax, needs[2])
    for name, x, shape in (("data", data, data.shape), ("scale", scale, data.shape[:-1])):
        check_shape(_BWD, name, x, shape, Q.device)
    return tensors


@custom_op(add_op_namespace_prefix("maxsim_bwd_int8"), _BWD_SCHEMA, (torch.Tag.nondeterministic_bitwise,))
def maxsim_bwd_int8(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of Q, D and q_weight from documents that were saved as int8.

    The arguments, in the order of the schema:

    - ``grad_scores``: the gradient of the scores, with their shape and dtype.
    - ``Q``, ``q_mask``, ``q_weight``, ``normalize``: the arguments of `maxsim_fwd_int8`.
    - ``data``, ``scale``, ``argmax``: results of `maxsim_fwd_int8`.
    - ``unified``: False sums each gradient in a fixed order without atomics. True uses atomic adds on a GPU.
    - ``needs``: whether the gradients of Q, D and q_weight are needed.

    Returns:
        The gradients of Q, D and q_weight. The first two have the dtype of Q. A gradient that is not needed has size
        [0].
    """
    grad_scores, Q, data, scale, argmax, q_mask, q_weight, normalize, _, needs = args
    run = lookup_once(_BWD, args[:-1], tuple(needs), _select_backward, args)
    functional.reject_forward_ad(grad_scores, Q, q_weight)
    return run(grad_scores, Q, data, argmax, q_mask, None, q_weight, normalize, list(needs), scale)


def _select_backward(args: tuple) -> Callable[..., tuple]:
    """Validate the arguments and return the function that computes the gradients."""
    Q = _unpack_backward_args(args).Q
    return plan_backward("unified" if args[-2] else "lowmem", backends.select_backend(Q.device, Q.dtype))


@maxsim_bwd_int8.register_fake
def _(*args):
    return fake_gradient(_unpack_backward_args(args), args[-1])


def _select_saved(inputs: Sequence, output: Sequence) -> tuple:
    Q, _, q_mask, _, q_weight = inputs
    return Q, *output[2:], q_mask, q_weight, output[1]


def _call_backward(grad_scores, tensors, argmax, options, needs):
    Q, data, scale, q_mask, q_weight = tensors
    normalize, _, backward = options
    unified = backward == "unified"
    return lik.maxsim_bwd_int8(grad_scores, Q, data, scale, argmax, q_mask, q_weight, normalize, unified, needs)


register_autograd(maxsim_fwd_int8, DenseArgs, _call_backward, _select_saved)
maxsim_bwd_int8.register_autograd(make_raising_double_backward("maxsim_fwd_int8"))
batching.register_loop(maxsim_fwd_int8, maxsim_bwd_int8)


def forward_saving_int8(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the results of `lik::maxsim_fwd` for its arguments. Autograd saves the documents as int8.

    Raises:
        NotImplementedError: a `torch.func` transform would differentiate the call.
    """
    if args[6] is None:  # no gradient is needed
        return lik.maxsim_fwd(*args)
    functional.reject_transforms("MaxSim with save='int8'", functional.is_differentiating)
    return lik.maxsim_fwd_int8(*args)[:2]
