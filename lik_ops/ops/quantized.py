"""The family of quantised documents: ``lik::maxsim_quantized_fwd``, the forward of the ragged family for them."""

from typing import Any

import torch
from torch import Tensor

from .. import backends
from .._ops import add_op_namespace_prefix
from ..arguments import check_choice, check_tensor
from ..formats import FORMATS
from ..segments import Ragged, Stored
from . import values
from .custom import custom_op
from .documented import document_bodies
from .family import check_forward, fake_forward
from .stack import batching_ragged, functional

_SCHEMA = (
    "(Tensor Q, Tensor data, Tensor scale, Tensor? minimum, str format, Tensor cu_seqlens_q, Tensor d_offsets,"
    " Tensor d_lengths, Tensor? pairs, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize,"
    " ScalarType? argmax_dtype, SymInt max_seqlen_q) -> (Tensor, Tensor)"
)
_FWD = add_op_namespace_prefix("maxsim_quantized_fwd")


def tokens_like(Q: Tensor, shape: Any) -> Tensor:
    """A tensor that has the metadata of tokens of the dtype of Q, and the memory of one number."""
    return Q.new_empty(()).expand(shape)


def _taken(args: tuple) -> tuple[Ragged, Stored]:
    """The arguments before the options, with a stand-in for D."""
    Q, data, scale, minimum, format = args[:5]
    return Ragged(Q, tokens_like(Q, (data.shape[0], Q.shape[-1])), *args[5:12]), Stored(data, scale, minimum, format)


def _check(r: Ragged, stored: Stored, argmax_dtype: Any, max_seqlen_q: Any) -> None:
    check_forward(_FWD, r, argmax_dtype, "auto")
    check_choice(_FWD, "format", stored.format, tuple(FORMATS))
    kept = FORMATS[stored.format]
    expected = -(-r.Q.shape[-1] // kept.each)
    if stored.data.dtype != kept.bytes:
        raise TypeError(f"{_FWD}: data: expected {kept.bytes} for {stored.format}, got {stored.data.dtype}")
    torch._check_value(
        stored.data.dim() == 2 and stored.data.shape[1] == expected,
        lambda: f"{_FWD}: data: expected [Td, {expected}] for d = {r.Q.shape[-1]}, got {list(stored.data.shape)}",
    )
    for name, x in (("scale", stored.scale), ("minimum", stored.minimum)):
        check_tensor(_FWD, name, x, or_none=name == "minimum" and stored.format != "uint8")
        if x is None:
            continue
        if name == "minimum" and stored.format != "uint8":
            raise TypeError(f"{_FWD}: minimum: expected None for {stored.format}, got a Tensor")
        fits = x.dim() == 1 and (x.shape[0] == 1 or x.shape[0] == stored.data.shape[0])
        if x.dtype != torch.float32 or not fits:
            raise ValueError(f"{_FWD}: {name}: expected fp32 [Td] or [1], got {x.dtype} {list(x.shape)}")
    for name, x in (("data", stored.data), ("scale", stored.scale), ("minimum", stored.minimum)):
        if x is not None and x.device != r.Q.device:
            raise ValueError(f"{_FWD}: {name}: expected the device of Q, {r.Q.device}, got {x.device}")


@custom_op(add_op_namespace_prefix("maxsim_quantized_fwd"), _SCHEMA)
def maxsim_quantized_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Scores and winners of quantised documents: of ``data * scale``, with `minimum` added where the format has one.

    `data` is ``[Td, d]`` as `format` keeps it, FP8 as bytes; `scale` and `minimum` are fp32 ``[Td]`` or ``[1]``. All
    else is as for ``lik::maxsim_ragged_fwd``. There is no gradient.
    """
    (r, stored), (normalize, argmax_dtype, max_seqlen_q) = _taken(args), args[12:]
    _check(r, stored, argmax_dtype, max_seqlen_q)
    values.check_ragged(_FWD, r, max_seqlen_q)
    functional.reject_forward_ad(r.Q, r.q_weight)
    backend = backends.select(r.Q.device, r.Q.dtype)
    return backend.forward_quantized(r, stored, normalize, argmax_dtype, max_seqlen_q)


@maxsim_quantized_fwd.register_fake
def _(*args):
    (r, stored), (_, argmax_dtype, max_seqlen_q) = _taken(args), args[12:]
    _check(r, stored, argmax_dtype, max_seqlen_q)
    return fake_forward(r, r.argmax_shape(max_seqlen_q), argmax_dtype)


def _no_backward(ctx, *grads):
    raise NotImplementedError(f"{_FWD} has no gradient: score the tokens of Quantized.dequantize()")


maxsim_quantized_fwd.register_autograd(_no_backward)
maxsim_quantized_fwd.register_vmap(batching_ragged.quantized)
document_bodies(maxsim_quantized_fwd)
