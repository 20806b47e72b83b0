"""The family of quantized documents: ``lik::maxsim_quantized_fwd`` and ``lik::maxsim_quantized_bwd``.

Both are packed operators that dequantize tokens in the kernel. The backward only reads the tokens that are an argmax.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .._ops import ops as lik
from ..core.arguments import (
    DTYPES,
    INDEX_DTYPES,
    check_choice,
    check_device,
    check_tensor,
    choose_argmax_dtype,
    describe_type,
    require,
)
from ..core.segments import PackedArgs, check_ragged_tensors
from ..formats.table import OPERAND_FORMATS, EncodedTokens, Format
from .checks import values
from .registration.custom import custom_op
from .registration.family import (
    check_argmax_dtype,
    check_gradient,
    fake_forward,
    fake_gradient,
    lookup_backend,
    make_raising_double_backward,
    register_autograd,
)
from .stack import batching, batching_ragged, functional

_TENSORS = (
    "Tensor Q, Tensor data, Tensor scale, Tensor? minimum, str format, Tensor? codes, Tensor? centroids,"
    " Tensor? weights, Tensor? cu_seqlens_q, Tensor? d_offsets, Tensor? d_lengths, Tensor? pairs, Tensor? q_mask,"
    " Tensor? d_mask, Tensor? q_weight"
)
_FWD_SCHEMA = f"({_TENSORS}, bool normalize, ScalarType? argmax_dtype, SymInt max_seqlen_q) -> (Tensor, Tensor)"
_BWD_SCHEMA = f"(Tensor grad_scores, {_TENSORS}, Tensor argmax, bool normalize, bool[2] needs) -> (Tensor, Tensor)"
_FWD, _BWD = map(add_op_namespace_prefix, ("maxsim_quantized_fwd", "maxsim_quantized_bwd"))


class QuantizedOperatorArgs(NamedTuple):
    """The tensors of the quantized operators, and the format of the documents."""

    Q: Tensor
    data: Tensor
    scale: Tensor
    minimum: Tensor | None
    format: str
    codes: Tensor | None
    centroids: Tensor | None
    weights: Tensor | None
    cu_seqlens_q: Tensor | None
    d_offsets: Tensor | None
    d_lengths: Tensor | None
    pairs: Tensor | None
    q_mask: Tensor | None
    d_mask: Tensor | None
    q_weight: Tensor | None


# Positions in the schema: the operands that encode the documents, and the first argument after the tensors.
_ENCODED_SLICE, _FIRST_OPTION = slice(1, 8), len(QuantizedOperatorArgs._fields)


def make_tokens_like(Q: Tensor, shape: Any) -> Tensor:
    """Return a placeholder of `shape` with the dtype and device of Q that allocates a single element."""
    return Q.new_empty(()).expand(shape)


def _unpack_args(args: tuple) -> tuple[tuple, EncodedTokens]:
    """Return the tensors of the ragged call, with a placeholder for D, and the encoded tokens with one token axis."""
    Q, data = args[:2]
    encoded_tokens = EncodedTokens(data.flatten(0, -2), *args[2 : _ENCODED_SLICE.stop])
    D = make_tokens_like(Q, (*data.shape[:-1], Q.shape[-1]))
    return (Q, D, *args[_ENCODED_SLICE.stop : _FIRST_OPTION]), encoded_tokens


def _check_forward_args(tensors: tuple, stored: EncodedTokens, argmax_dtype: Any) -> None:
    """Raise ValueError or TypeError, naming the argument, unless all arguments fit together."""
    check_ragged_tensors(_FWD, tensors)
    check_argmax_dtype(_FWD, argmax_dtype, tensors[1].shape[-2])
    _check_encoded_tokens(_FWD, tensors[0], stored)


def _check_backward_args(
    grad_scores: Tensor, tensors: tuple, stored: EncodedTokens, argmax: Tensor, needs: Sequence[bool]
) -> None:
    """Raise ValueError or TypeError, naming the argument, unless all arguments of the backward fit together."""
    check_ragged_tensors(_BWD, tensors)
    _check_encoded_tokens(_BWD, tensors[0], stored)
    c = PackedArgs.from_tensors(tensors, argmax.shape[-1] if argmax.dim() else 0)
    check_gradient(_BWD, grad_scores, c, argmax, needs[1])


def _check_encoded_tokens(op: str, Q: Tensor, stored: EncodedTokens) -> None:
    """Raise ValueError or TypeError, naming the argument, unless the encoded documents fit Q."""
    check_choice(op, "format", stored.format, tuple(OPERAND_FORMATS))
    operand_format = OPERAND_FORMATS[stored.format]
    expected = -(-Q.shape[-1] // operand_format.features_per_element)
    if stored.data.dtype != operand_format.bytes:
        raise TypeError(f"{op}: data: expected {operand_format.bytes} for {stored.format}, got {stored.data.dtype}")
    require(
        stored.data.shape[1] == expected,
        lambda: f"{op}: data: expected [Td, {expected}] for d = {Q.shape[-1]}, got {list(stored.data.shape)}",
    )
    for name, x in (("scale", stored.scale), ("minimum", stored.minimum)):
        check_tensor(op, name, x, or_none=name == "minimum" and not operand_format.affine)
        if x is None:
            continue
        if name == "minimum" and not operand_format.affine:
            raise TypeError(f"{op}: minimum: expected None for {stored.format}, got a Tensor")
        fits = x.dim() == 1 and (x.shape[0] == 1 or x.shape[0] == stored.data.shape[0])
        dtype = operand_format.scale if name == "scale" else torch.float32
        if x.dtype != dtype or not fits:
            raise ValueError(f"{op}: {name}: expected {dtype} [Td] or [1], got {x.dtype} {list(x.shape)}")
    _check_code_tensors(op, stored, operand_format, Q.shape[-1])
    for name, x in stored._asdict().items():
        if isinstance(x, Tensor):
            check_device(op, name, x, Q.device)


def _check_code_tensors(op: str, stored: EncodedTokens, operand_format: Format, d: Any) -> None:
    """Raise unless the tensors of residual codes fit `operand_format`, and are None for other formats."""
    dtypes = {"codes": INDEX_DTYPES, "centroids": DTYPES[:3], "weights": (torch.float32,)}
    shapes = {"codes": (stored.data.shape[0],), "centroids": (None, d), "weights": (2**operand_format.nbits,)}
    for name, allowed_dtypes in dtypes.items():
        x = getattr(stored, name)
        if not operand_format.nbits:
            if x is not None:
                raise TypeError(f"{op}: {name}: expected None for {stored.format}, got {describe_type(x)}")
            continue
        check_tensor(op, name, x)
        expected = shapes[name]
        if x.dtype not in allowed_dtypes:
            raise TypeError(f"{op}: {name}: expected {' or '.join(map(str, allowed_dtypes))}, got {x.dtype}")
        fits = x.dim() == len(expected) and all(n is None or n == m for n, m in zip(expected, x.shape, strict=True))
        if not fits:
            raise ValueError(f"{op}: {name}: expected {list(expected)}, got {list(x.shape)}")


@custom_op(add_op_namespace_prefix("maxsim_quantized_fwd"), _FWD_SCHEMA)
def maxsim_quantized_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the scores of quantized, packed documents and, if requested, the argmax of each query token.

    Documents are dequantized in the kernel. ``Q`` and ``q_weight`` have gradients, documents have none. The arguments,
    in the order of the schema:

    - ``Q``: query tokens ``[Tq, d]``, or ``[Nq, Lq, d]`` without ``cu_seqlens_q``.
    - ``data``: encoded tokens ``[Td, n]``, or ``[Nd, Ld, n]`` without ``d_offsets``, where n is d, or fewer if `format`
      packs several features into a byte. FP8 values are passed as uint8.
    - ``scale``, ``minimum``: fp32 ``[Td]`` or ``[1]``. The scales of rotated formats are bf16. ``minimum`` is None
      unless the format has one.
    - ``format``: the name of the format. With ``"int8_int8"`` documents are int8, and a GPU may round queries to int8.
    - ``codes``, ``centroids``, ``weights``: int32 or int64 ``[Td]``, fp16, bf16 or fp32 ``[C, d]``, and fp32
      ``[2 ** nbits]``. They are None unless the format is a residual format.
    - all others: the arguments of ``lik::maxsim_ragged_fwd``.

    A token is dequantized to ``data * scale``, plus ``minimum`` if the format has one. For a rotated format, these are
    the features of rotated tokens. Q is not rotated. Residual codes are dequantized to
    ``(centroids[codes] + weights[data]) * scale``. The bits of a bucket index ``weights``, and the first feature of a
    byte is in its highest bits.

    Returns:
        ``(scores, argmax)`` with the shapes and dtypes of ``lik::maxsim_ragged_fwd``.
    """
    (tensors, encoded_tokens), (normalize, argmax_dtype, max_seqlen_q) = _unpack_args(args), args[_FIRST_OPTION:]
    check_args = tensors, encoded_tokens, argmax_dtype
    operands, options = args[:_FIRST_OPTION], args[_FIRST_OPTION:]
    backend = lookup_backend(_FWD, operands, options, args[0], _check_forward_args, *check_args)
    values.check_ragged(_FWD, tensors, max_seqlen_q)
    functional.reject_forward_ad(args[0], tensors[8])
    return backend.forward_quantized(tensors, encoded_tokens, normalize, argmax_dtype, max_seqlen_q)


@maxsim_quantized_fwd.register_fake
def _(*args):
    (tensors, encoded_tokens), (_, argmax_dtype, max_seqlen_q) = _unpack_args(args), args[_FIRST_OPTION:]
    _check_forward_args(tensors, encoded_tokens, argmax_dtype)
    return fake_forward(PackedArgs.from_tensors(tensors, max_seqlen_q), argmax_dtype)


@custom_op(add_op_namespace_prefix("maxsim_quantized_bwd"), _BWD_SCHEMA)
def maxsim_quantized_bwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of Q and q_weight for quantized documents, each summed in a fixed order.

    Only the document tokens that are an argmax are read and dequantized. The arguments, in the order of the schema:

    - ``grad_scores``: the gradient of the scores, with their shape and dtype.
    - ``Q`` to ``q_weight`` and ``normalize``: the arguments of `maxsim_quantized_fwd`.
    - ``argmax``: the argmax that `maxsim_quantized_fwd` returned.
    - ``needs``: whether the gradients of Q and q_weight are needed.

    Returns:
        The gradients of Q and q_weight, each with the dtype of its input, or with size [0] if not needed.
    """
    grad_scores, (argmax, normalize, needs) = args[0], args[_FIRST_OPTION + 1 :]
    tensors, encoded_tokens = _unpack_args(args[1 : _FIRST_OPTION + 1])
    check_args = grad_scores, tensors, encoded_tokens, argmax, needs
    backend = lookup_backend(_BWD, args[:-1], tuple(needs), args[1], _check_backward_args, *check_args)
    functional.reject_forward_ad(grad_scores, args[1], tensors[8])
    return backend.backward_quantized(grad_scores, tensors, encoded_tokens, argmax, normalize, list(needs))


@maxsim_quantized_bwd.register_fake
def _(*args):
    grad_scores, (argmax, _, needs) = args[0], args[_FIRST_OPTION + 1 :]
    tensors, encoded_tokens = _unpack_args(args[1 : _FIRST_OPTION + 1])
    _check_backward_args(grad_scores, tensors, encoded_tokens, argmax, needs)
    return fake_gradient(PackedArgs.from_tensors(tensors, argmax.shape[-1]), [needs[0], False, needs[1]])[::2]


def _call_backward(grad_scores, tensors, argmax, options, needs):
    normalize, argmax_dtype, max_seqlen_q = options
    if argmax_dtype is None:  # the forward saved no argmax
        dtype = choose_argmax_dtype(PackedArgs.from_tensors(_unpack_args(tuple(tensors))[0], max_seqlen_q).Td)
        argmax = lik.maxsim_quantized_fwd(*tensors, normalize, dtype, max_seqlen_q)[1]
    return lik.maxsim_quantized_bwd(grad_scores, *tensors, argmax, normalize, needs)


register_autograd(maxsim_quantized_fwd, QuantizedOperatorArgs, _call_backward, differentiable=(0, _FIRST_OPTION - 1))
maxsim_quantized_bwd.register_autograd(make_raising_double_backward("maxsim_quantized_fwd"))
maxsim_quantized_fwd.register_vmap(batching_ragged.vmap_quantized_forward)
batching.register_loop(maxsim_quantized_bwd)
