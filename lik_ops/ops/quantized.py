"""The family of quantised documents: ``lik::maxsim_quantized_fwd``, the forward of the ragged family for them."""

from typing import Any

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from ..core.arguments import DTYPES, INDEX_DTYPES, check_choice, check_tensor, describe_type, require
from ..core.segments import RaggedArgs
from ..formats.table import OPERAND_FORMATS, EncodedTokens, Format
from .checks import values
from .registration.custom import custom_op
from .registration.family import check_forward, fake_forward, lookup_backend, make_raising_backward
from .stack import batching_ragged, functional

_SCHEMA = (
    "(Tensor Q, Tensor data, Tensor scale, Tensor? minimum, str format, Tensor? codes, Tensor? centroids,"
    " Tensor? weights, Tensor cu_seqlens_q, Tensor d_offsets, Tensor d_lengths, Tensor? pairs, Tensor? q_mask,"
    " Tensor? d_mask, Tensor? q_weight, bool normalize, ScalarType? argmax_dtype, SymInt max_seqlen_q)"
    " -> (Tensor, Tensor)"
)
_ENCODED_SLICE, _FIRST_OPTION = slice(1, 8), 15  # where the operands of documents are, and what is no tensor begins
_FWD = add_op_namespace_prefix("maxsim_quantized_fwd")


def make_tokens_like(Q: Tensor, shape: Any) -> Tensor:
    """A tensor that has the metadata of tokens of the dtype of Q, and the memory of one number."""
    return Q.new_empty(()).expand(shape)


def _unpack_args(args: tuple) -> tuple[RaggedArgs, EncodedTokens]:
    """The arguments before the options, with a stand-in for D."""
    Q, stored = args[0], EncodedTokens(*args[_ENCODED_SLICE])
    D = make_tokens_like(Q, (stored.data.shape[0], Q.shape[-1]))
    return RaggedArgs(Q, D, *args[_ENCODED_SLICE.stop : _FIRST_OPTION]), stored


def _check_forward_args(r: RaggedArgs, stored: EncodedTokens, argmax_dtype: Any) -> None:
    check_forward(_FWD, r, argmax_dtype, "auto")
    check_choice(_FWD, "format", stored.format, tuple(OPERAND_FORMATS))
    kept = OPERAND_FORMATS[stored.format]
    expected = -(-r.Q.shape[-1] // kept.each)
    if stored.data.dtype != kept.bytes:
        raise TypeError(f"{_FWD}: data: expected {kept.bytes} for {stored.format}, got {stored.data.dtype}")
    require(
        stored.data.dim() == 2 and stored.data.shape[1] == expected,
        lambda: f"{_FWD}: data: expected [Td, {expected}] for d = {r.Q.shape[-1]}, got {list(stored.data.shape)}",
    )
    for name, x in (("scale", stored.scale), ("minimum", stored.minimum)):
        check_tensor(_FWD, name, x, or_none=name == "minimum" and not kept.affine)
        if x is None:
            continue
        if name == "minimum" and not kept.affine:
            raise TypeError(f"{_FWD}: minimum: expected None for {stored.format}, got a Tensor")
        fits = x.dim() == 1 and (x.shape[0] == 1 or x.shape[0] == stored.data.shape[0])
        if x.dtype != torch.float32 or not fits:
            raise ValueError(f"{_FWD}: {name}: expected fp32 [Td] or [1], got {x.dtype} {list(x.shape)}")
    _check_code_tensors(stored, kept, r.Q.shape[-1])
    for name, x in stored._asdict().items():
        if isinstance(x, Tensor) and x.device != r.Q.device:
            raise ValueError(f"{_FWD}: {name}: expected the device of Q, {r.Q.device}, got {x.device}")


def _check_code_tensors(stored: EncodedTokens, kept: Format, d: Any) -> None:
    """What residual codes alone have."""
    dtypes = {"codes": INDEX_DTYPES, "centroids": DTYPES[:3], "weights": (torch.float32,)}
    shapes = {"codes": (stored.data.shape[0],), "centroids": (None, d), "weights": (2**kept.nbits,)}
    for name, of in dtypes.items():
        x = getattr(stored, name)
        if not kept.nbits:
            if x is not None:
                raise TypeError(f"{_FWD}: {name}: expected None for {stored.format}, got {describe_type(x)}")
            continue
        check_tensor(_FWD, name, x)
        expected = shapes[name]
        if x.dtype not in of:
            raise TypeError(f"{_FWD}: {name}: expected {' or '.join(map(str, of))}, got {x.dtype}")
        fits = x.dim() == len(expected) and all(n is None or n == m for n, m in zip(expected, x.shape, strict=True))
        if not fits:
            raise ValueError(f"{_FWD}: {name}: expected {list(expected)}, got {list(x.shape)}")


@custom_op(add_op_namespace_prefix("maxsim_quantized_fwd"), _SCHEMA)
def maxsim_quantized_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Scores and winners of quantised documents: of ``data * scale``, with `minimum` added where the format has one.

    `data` is ``[Td, d]`` as `format` keeps it, FP8 as bytes; `scale` and `minimum` are fp32 ``[Td]`` or ``[1]``.
    Residual codes count as ``(centroids[codes] + weights[data]) * scale``: int32 or int64 `codes` ``[Td]``, `centroids`
    ``[C, d]`` in fp16, bf16 or fp32, fp32 `weights` by what the bits of a bucket say, the first feature of a byte in
    its highest. Other formats have None of these. ``"int8_int8"`` is ``"int8"`` beside whose documents a GPU may round
    queries to int8. All else is as for ``lik::maxsim_ragged_fwd``. There is no gradient.
    """
    (r, stored), (normalize, argmax_dtype, max_seqlen_q) = _unpack_args(args), args[_FIRST_OPTION:]
    given, options = args[:_FIRST_OPTION], args[_FIRST_OPTION:]
    backend = lookup_backend(_FWD, given, options, r.Q, _check_forward_args, r, stored, argmax_dtype)
    values.check_ragged(_FWD, r, max_seqlen_q)
    functional.reject_forward_ad(r.Q, r.q_weight)
    return backend.forward_quantized(r, stored, normalize, argmax_dtype, max_seqlen_q)


@maxsim_quantized_fwd.register_fake
def _(*args):
    (r, stored), (_, argmax_dtype, max_seqlen_q) = _unpack_args(args), args[_FIRST_OPTION:]
    _check_forward_args(r, stored, argmax_dtype)
    return fake_forward(r, r.argmax_shape(max_seqlen_q), argmax_dtype)


maxsim_quantized_fwd.register_autograd(
    make_raising_backward("maxsim_quantized_fwd", "score the tokens of Quantized.dequantize()")
)
maxsim_quantized_fwd.register_vmap(batching_ragged.vmap_quantized_forward)
