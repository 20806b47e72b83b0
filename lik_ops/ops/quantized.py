"""The family of quantized documents: ``lik::maxsim_quantized_fwd``, a packed forward that dequantizes in the kernel."""

from typing import Any

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from ..core.arguments import DTYPES, INDEX_DTYPES, check_choice, check_tensor, describe_type, require
from ..core.segments import PackedArgs, check_ragged_tensors
from ..formats.table import OPERAND_FORMATS, EncodedTokens, Format
from .checks import values
from .registration.custom import custom_op
from .registration.family import check_forward_options, fake_forward, lookup_backend, make_raising_backward
from .stack import batching_ragged, functional

_SCHEMA = (
    "(Tensor Q, Tensor data, Tensor scale, Tensor? minimum, str format, Tensor? codes, Tensor? centroids,"
    " Tensor? weights, Tensor? cu_seqlens_q, Tensor? d_offsets, Tensor? d_lengths, Tensor? pairs, Tensor? q_mask,"
    " Tensor? d_mask, Tensor? q_weight, bool normalize, ScalarType? argmax_dtype, SymInt max_seqlen_q)"
    " -> (Tensor, Tensor)"
)
# Positions in the schema: the operands that encode the documents, and the first argument after the tensors.
_ENCODED_SLICE, _FIRST_OPTION = slice(1, 8), 15
_FWD = add_op_namespace_prefix("maxsim_quantized_fwd")


def make_tokens_like(Q: Tensor, shape: Any) -> Tensor:
    """Return a placeholder of `shape` with the dtype and device of Q that allocates a single element."""
    return Q.new_empty(()).expand(shape)


def _unpack_args(args: tuple) -> tuple[tuple, EncodedTokens]:
    """Return the tensors of the ragged call, with a placeholder for D, and the encoded tokens with one token axis."""
    Q, data = args[:2]
    stored = EncodedTokens(data.flatten(0, -2), *args[2 : _ENCODED_SLICE.stop])
    D = make_tokens_like(Q, (*data.shape[:-1], Q.shape[-1]))
    return (Q, D, *args[_ENCODED_SLICE.stop : _FIRST_OPTION]), stored


def _check_forward_args(tensors: tuple, stored: EncodedTokens, argmax_dtype: Any) -> None:
    """Raise ValueError or TypeError, naming the argument, unless all arguments fit together."""
    check_ragged_tensors(_FWD, tensors)
    check_forward_options(_FWD, tensors[1], argmax_dtype, "auto")
    _check_encoded_tokens(tensors[0], stored)


def _check_encoded_tokens(Q: Tensor, stored: EncodedTokens) -> None:
    """Raise ValueError or TypeError, naming the argument, unless the encoded documents fit Q."""
    check_choice(_FWD, "format", stored.format, tuple(OPERAND_FORMATS))
    kept = OPERAND_FORMATS[stored.format]
    expected = -(-Q.shape[-1] // kept.each)
    if stored.data.dtype != kept.bytes:
        raise TypeError(f"{_FWD}: data: expected {kept.bytes} for {stored.format}, got {stored.data.dtype}")
    require(
        stored.data.shape[1] == expected,
        lambda: f"{_FWD}: data: expected [Td, {expected}] for d = {Q.shape[-1]}, got {list(stored.data.shape)}",
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
    _check_code_tensors(stored, kept, Q.shape[-1])
    for name, x in stored._asdict().items():
        if isinstance(x, Tensor) and x.device != Q.device:
            raise ValueError(f"{_FWD}: {name}: expected the device of Q, {Q.device}, got {x.device}")


def _check_code_tensors(stored: EncodedTokens, kept: Format, d: Any) -> None:
    """Raise ValueError or TypeError unless the tensors of residual codes fit `kept`, and are None for other formats."""
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
    """Return the scores of quantized, packed documents and, if requested, the argmax of each query token.

    Documents are dequantized in the kernel. There is no gradient. The arguments, in the order of the schema:

    - ``Q``: query tokens ``[Tq, d]``, or ``[Nq, Lq, d]`` without ``cu_seqlens_q``.
    - ``data``: encoded tokens ``[Td, n]``, or ``[Nd, Ld, n]`` without ``d_offsets``, where n is d, or fewer if `format`
      packs several features into a byte. FP8 values are passed as uint8.
    - ``scale``, ``minimum``: fp32 ``[Td]`` or ``[1]``. ``minimum`` is None unless the format has one.
    - ``format``: the name of the format. With ``"int8_int8"`` documents are int8, and a GPU may round queries to int8.
    - ``codes``, ``centroids``, ``weights``: int32 or int64 ``[Td]``, fp16, bf16 or fp32 ``[C, d]``, and fp32
      ``[2 ** nbits]``. They are None unless the format is a residual format.
    - all others: the arguments of ``lik::maxsim_ragged_fwd``.

    A token is dequantized to ``data * scale``, plus ``minimum`` if the format has one. Residual codes are dequantized
    to ``(centroids[codes] + weights[data]) * scale``. The bits of a bucket index ``weights``, and the first feature of
    a byte is in its highest bits.

    Returns:
        ``(scores, argmax)`` with the shapes and dtypes of ``lik::maxsim_ragged_fwd``.
    """
    (tensors, stored), (normalize, argmax_dtype, max_seqlen_q) = _unpack_args(args), args[_FIRST_OPTION:]
    given, options = args[:_FIRST_OPTION], args[_FIRST_OPTION:]
    backend = lookup_backend(_FWD, given, options, args[0], _check_forward_args, tensors, stored, argmax_dtype)
    values.check_ragged(_FWD, tensors, max_seqlen_q)
    functional.reject_forward_ad(args[0], tensors[8])
    return backend.forward_quantized(tensors, stored, normalize, argmax_dtype, max_seqlen_q)


@maxsim_quantized_fwd.register_fake
def _(*args):
    (tensors, stored), (_, argmax_dtype, max_seqlen_q) = _unpack_args(args), args[_FIRST_OPTION:]
    _check_forward_args(tensors, stored, argmax_dtype)
    c = PackedArgs.of(tensors, max_seqlen_q)
    return fake_forward(c, c.argmax_shape(), argmax_dtype)


maxsim_quantized_fwd.register_autograd(
    make_raising_backward("maxsim_quantized_fwd", "score the tokens of Quantized.dequantize()")
)
maxsim_quantized_fwd.register_vmap(batching_ragged.vmap_quantized_forward)
