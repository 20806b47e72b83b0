"""The quantization formats of document tokens, and their encoders and decoders.

A format stores each feature as a small number `q`, and a `scale` for each token, document or tensor. The token
dequantizes to ``q * scale`` (for ``"uint8"``, ``q * scale + minimum``). The formulas are symmetric and affine
quantization (Jacob et al., 2018, section 2). The extremes of the FP8 formats are from Micikevicius et al. (2022).

Rotated formats store the numbers of ``x R`` for a fixed rotation R (`formats.rotation`), as odd numbers of 1, 2 or 4
bits. Kernels multiply the numbers by rotated queries. A scale has the least squared error of its token.

Residual codes (ColBERTv2: Santhanam et al., 2022, section 3.3) store a token as a centroid index and a bucket of 1, 2,
4 or 8 bits for each feature. The token dequantizes to ``(centroids[code] + weights[bucket]) * scale``. The first
feature of a byte is in its highest bits, and `weights` is indexed by these bits. `formats.residual` handles the bit
orders of codecs.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from .rotation import rotate

Query: TypeAlias = Literal["half", "int8", "fp8", "binary"]
FormatName: TypeAlias = Literal["int8", "uint8", "fp8_e4m3", "fp8_e5m2", "binary", "rq4", "rq2", "rq1"]
Residual: TypeAlias = Literal["residual1", "residual2", "residual4", "residual8"]
_MAX_ROWS_BYTES = 32 << 20  # size of the rows that are processed at a time
PerToken = TypeVar("PerToken", Tensor, "Tensor | None")
DecodedFeatures: TypeAlias = tuple[Tensor, float]  # numbers ``[n, d]`` of any dtype, and their common factor


def _max_abs(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row."""
    return x.abs().amax(-1)


def _mean_abs(x: Tensor) -> Tensor:
    """Return the mean magnitude of each row."""
    return x.abs().mean(-1)


# Candidates around the best scale of Gaussian features, in standard deviations, by bits.
_STEPS = {1: (1.0,), 2: (0.5,), 4: (0.14, 0.155, 0.17)}


def _encode_odd(nbits: int, x: Tensor, inverse: Tensor) -> Tensor:
    """Return the codes of the odd numbers of `nbits` bits that are nearest to ``x * inverse``."""
    if nbits == 1:
        return (x > 0).to(torch.uint8)
    half = 2 ** (nbits - 1)
    return (x * inverse / 2).nan_to_num(0).ceil().clamp(1 - half, half).add_(half - 1).to(torch.uint8)


def _decode_odd(nbits: int, codes: Tensor) -> Tensor:
    """Return the odd numbers of codes as int8, such as -3, -1, 1 and 3 for 2 bits."""
    return codes.to(torch.int8).mul_(2).sub_(2**nbits - 1)


def _fit_scale(nbits: int, x: Tensor) -> Tensor:
    """Return the scale with the least squared error of each row, for odd numbers of `nbits` bits."""
    sigma = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64) * x.shape[-1] ** -0.5
    best, best_gain = torch.zeros_like(sigma), torch.full_like(sigma, -1)
    for step in _STEPS[nbits]:
        q = _decode_odd(nbits, _encode_odd(nbits, x, (1 / (step * sigma)).to(x.dtype).unsqueeze(-1))).to(x.dtype)
        product, square = (torch.linalg.vecdot(y, q).double() for y in (x, q))
        gain = product.square() / square  # the reduction of the squared error
        best, best_gain = torch.where(gain > best_gain, product / square, best), torch.maximum(gain, best_gain)
    return torch.where(sigma.isfinite(), best, sigma)


def _pack_odd(nbits: int, x: Tensor, inverse: Tensor) -> Tensor:
    """Pack the codes of ``[n, d]`` into bytes ``[n, ceil(d nbits / 8)]`` with the first feature in the lowest bits."""
    per_byte, codes = 8 // nbits, _encode_odd(nbits, x, inverse)
    codes = torch.nn.functional.pad(codes, (0, -x.shape[-1] % per_byte)).unflatten(
        -1, (-(-x.shape[-1] // per_byte), per_byte)
    )
    weights = 1 << torch.arange(0, 8, nbits, dtype=torch.int32, device=x.device)
    return (codes * weights).sum(-1).to(torch.uint8)


def _unpack_odd(nbits: int, data: Tensor, d: int) -> DecodedFeatures:
    """Return the odd numbers that `_pack_odd` packed."""
    shifts = torch.arange(0, 8, nbits, dtype=torch.uint8, device=data.device)
    codes = (data.unsqueeze(-1) >> shifts) & (2**nbits - 1)
    return _decode_odd(nbits, codes.flatten(-2)[..., :d]), 1.0


def convert_fp8(data: Tensor, format: str) -> DecodedFeatures:
    """Convert FP8 numbers, or their bytes, to fp16 and the factor that restores them.

    The bits are shifted, because a CPU converts FP8 one number at a time.
    """
    bits = data.view(torch.int8).to(torch.int16)
    if format == "fp8_e5m2":  # the upper half of fp16
        return (bits << 8).view(torch.float16), 1.0
    # Sign, exponent and mantissa move to their places in fp16. The exponent bias differs by 8, hence the factor 2^8.
    bits = (bits << 7).bitwise_and_(~0x4000)
    nan = (bits + 0x80).bitwise_and_(0x4000)  # set the top exponent bit of the largest magnitude, which is NaN
    return bits.bitwise_or_(nan).view(torch.float16), 256.0


def _decode_fp8(format: str, data: Tensor, d: int) -> DecodedFeatures:
    """Return FP8 numbers as `DecodedFeatures`, converted only on a CPU."""
    return convert_fp8(data, format) if data.device.type == "cpu" else (data.view(FORMATS[format].dtype), 1.0)


class Format(NamedTuple):
    """A storage format of features: everything except the device code that `kernel` selects."""

    dtype: torch.dtype
    largest: float  # largest stored number
    features_per_element: int = 1
    nbits: int = 0  # bits of a bucket, for residual codes
    rotated: bool = False  # numbers of rotated tokens
    scale: torch.dtype = torch.float32  # dtype of the scales
    affine: bool = False  # numbers are offsets from the minimum; else symmetric about 0
    # `KernelConfig.ENCODING`: a name, or a function that loads a tile of numbers. For "e4m3" and "e5m2", GPUs with FP8
    # use "fp8" instead, and "fp8_fp8" for "e4m3_fp8" (`gpu/forward/quantized.py`).
    kernel: Any = "number"
    size: Callable[[Tensor], Tensor] = _max_abs  # size of tokens ``[n, d]`` that the scale maps to `largest`
    # Encodes tokens, given the inverse scales. None rounds to the nearest number.
    encode: Callable[[Tensor, Tensor], Tensor] | None = None
    # Decodes elements to `DecodedFeatures` of d features. None uses the elements as they are.
    decode: Callable[[Tensor, int], DecodedFeatures] | None = None

    @property
    def bytes(self) -> torch.dtype:
        """Return the dtype that operators accept for `data`, because few torch operations support FP8."""
        return torch.uint8 if self.dtype.is_floating_point else self.dtype


def _make_odd(nbits: int, **options: Any) -> Format:
    """Return a format of odd numbers of `nbits` bits."""
    pack, unpack, size = (partial(f, nbits) for f in (_pack_odd, _unpack_odd, _fit_scale))
    defaults = {"size": size, "encode": pack, "decode": unpack, "kernel": f"bits{nbits}_rotated"}
    return Format(torch.uint8, 1, 8 // nbits, **defaults | options)


FORMATS: dict[str, Format] = {
    "int8": Format(torch.int8, 127, kernel="int8"),
    "uint8": Format(torch.uint8, 255, affine=True),
    "fp8_e4m3": Format(torch.float8_e4m3fn, 448, kernel="e4m3", decode=partial(_decode_fp8, "fp8_e4m3")),
    "fp8_e5m2": Format(torch.float8_e5m2, 57344, kernel="e5m2", decode=partial(_decode_fp8, "fp8_e5m2")),
    "binary": _make_odd(1, size=_mean_abs, kernel="bits1_half"),
    # bf16 scales have the range of fp32, and are more precise than the numbers.
    **{f"rq{n}": _make_odd(n, rotated=True, scale=torch.bfloat16) for n in (4, 2, 1)},
}
RESIDUAL_FORMATS: dict[str, Format] = {
    f"residual{n}": Format(torch.uint8, 2**n - 1, 8 // n, n, kernel=f"codes{n}") for n in (1, 2, 4, 8)
}
# Iterates over `FORMATS`, then `RESIDUAL_FORMATS`.
ALL_FORMATS: Mapping[str, Format] = ChainMap(RESIDUAL_FORMATS, FORMATS)
# Precisions of query rows that a format allows besides "half".
_QUERIES: dict[str, tuple[Query, ...]] = {"int8": ("int8",), "fp8_e4m3": ("fp8",), "binary": ("int8", "binary")}
# The operators' names of documents with queries that may also be rounded to int8 or FP8, or that are signs.
INT8_QUERIES, BINARY_INT8_QUERIES, FP8_QUERIES = "int8_int8", "binary_int8", "fp8_e4m3_fp8"
BINARY_QUERIES = "binary_binary"
_QUERY_FORMATS = {
    INT8_QUERIES: FORMATS["int8"]._replace(kernel=INT8_QUERIES),
    BINARY_INT8_QUERIES: FORMATS["binary"]._replace(kernel="bits1_int8"),
    FP8_QUERIES: FORMATS["fp8_e4m3"]._replace(kernel="e4m3_fp8"),
    BINARY_QUERIES: FORMATS["binary"]._replace(kernel="bits1_binary"),
}
OPERAND_FORMATS: Mapping[str, Format] = ChainMap(_QUERY_FORMATS, RESIDUAL_FORMATS, FORMATS)  # accepted by operators


def list_queries(format: Any) -> tuple[Query, ...]:
    """Return the values of `Quantized.query` that a format allows."""
    return ("half", *_QUERIES.get(format, ()))


class EncodedTokens(NamedTuple):
    """Document tokens as stored by a format."""

    data: Tensor  # [Td, ...], or with more token axes before `flat`
    scale: Tensor  # [Td] or [1]; before `flat` the shape of the tokens, with size 1 on shared axes
    minimum: Tensor | None  # the shape of `scale`
    format: str
    codes: Tensor | None = None  # for residual codes: [Td], int32 or int64
    centroids: Tensor | None = None  # [C, d]
    weights: Tensor | None = None  # [2^nbits], fp32

    def flatten(self) -> EncodedTokens:
        """Return the tokens with a single token axis, the layout that operators accept."""
        tokens, codes = self.data.shape[:-1], self.codes

        def per_token(x: Tensor | None) -> Any:
            if x is None or x.numel() == 1:
                return x if x is None else x.reshape(1)
            return x.expand(tokens).reshape(-1)

        flat = self.data.flatten(0, -2), per_token(self.scale), per_token(self.minimum)
        return EncodedTokens(*flat, self.format, None if codes is None else codes.reshape(-1), *self[5:])

    def decode(self, rows: Tensor | slice, d: int, out: Tensor | None = None) -> Tensor:
        """Dequantize some tokens to fp32 ``[n, d]``, still rotated for a rotated format.

        A token whose code is not a centroid is NaN.
        """
        data, scale = self.data[rows], select_rows(self.scale, rows)
        if self.codes is None or self.centroids is None or self.weights is None:
            return decode_tokens(data, scale, select_rows(self.minimum, rows), self.format, d, out=out)
        codes, nbits = self.codes[rows], RESIDUAL_FORMATS[self.format].nbits
        is_valid = (codes >= 0) & (codes < len(self.centroids))
        x = lookup_bucket_weights(data, self.weights, nbits)[:, :d]
        if len(self.centroids):
            x = x.add_(self.centroids.index_select(0, torch.where(is_valid, codes, 0)))
        return torch.mul(x, torch.where(is_valid, scale, torch.nan).unsqueeze(-1), out=out)

    def transform_queries(self, Q: Tensor, inverse: bool = False) -> Tensor:
        """Return query tokens ``[..., d]`` as these documents are multiplied by them, or apply the inverse.

        They are rotated for a rotated format. For binary queries, a feature becomes 1 if it is above 0, else -1, or
        stays NaN. The inverse of this rounding returns its input.
        """
        if self.format == BINARY_QUERIES and not inverse:
            return torch.where(Q > 0, 1.0, torch.where(Q == Q, -1.0, torch.nan)).to(Q.dtype)
        return rotate(Q, inverse) if OPERAND_FORMATS[self.format].rotated else Q


def compute_extremes(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Compute the values ``low`` and ``high`` that determine the minimum and the scale of each token, fp32 ``[n]``.

    They are NaN for a token with NaN or infinity. ``low`` is 0 unless the format is affine. `x` are tokens ``[n, d]``,
    fp32 or fp64, rotated for a rotated format.
    """
    if not x.numel():
        return x.new_zeros(len(x)), x.new_zeros(len(x))
    spec = FORMATS[format]
    low, high = torch.aminmax(x, dim=-1) if spec.affine else (x.new_zeros(len(x)), spec.size(x))
    is_finite = low.isfinite() & high.isfinite()
    return torch.where(is_finite, low, torch.nan).float(), torch.where(is_finite, high, torch.nan).float()


def compute_scales(low: Tensor, high: Tensor, format: str) -> Tensor:
    """Compute scales from the results of `compute_extremes`, reduced over the tokens that share a scale."""
    # An fp64 division rounds to the bits of a correct fp32 division, so scales are equal on every device and in
    # compiled code. In fp32, a GPU multiplies by the inverse of a number, and Inductor's divisions are off in the last
    # bits.
    scales = ((high - low).double() / FORMATS[format].largest).float()
    # A scale whose inverse overflows becomes 0, and so do its tokens.
    return torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales).to(FORMATS[format].scale)


def encode_tokens(x: Tensor, scale: Tensor, minimum: Tensor | None, format: str) -> Tensor:
    """Encode tokens in a format of `FORMATS`, which may pack several features into a byte.

    Args:
        x: tokens ``[n, d]``, fp32 or fp64, rotated for a rotated format.
        scale: ``[n]`` or ``[1]`` in the dtype of the format's scales.
        minimum: fp32 ``[n]`` or ``[1]`` for affine formats, else None.
        format: a name of `FORMATS`.
    """
    spec = FORMATS[format]
    # A token with a NaN scale stores 0. The division is in fp64, see `compute_scales`.
    inverse = torch.where(scale > 0, 1 / scale.double(), 0).float().unsqueeze(-1)
    if spec.encode is not None:
        return spec.encode(x, inverse)
    x = (x if minimum is None else x - minimum.unsqueeze(-1)) * inverse
    x = x.nan_to_num(0)
    x = x if spec.dtype.is_floating_point else x.round()
    x = x.clamp(0 if spec.affine else -spec.largest, spec.largest)
    return (x.float() if spec.dtype.is_floating_point else x).to(spec.dtype)


def decode_tokens(
    data: Tensor, scale: Tensor, minimum: Tensor | None, format: str, d: int, out: Tensor | None = None
) -> Tensor:
    """Dequantize tokens ``[n, ...]`` to fp32 ``[n, d]``, written to `out` if given.

    FP8 data may be bytes. `scale` and `minimum` are as in `encode_tokens`. `format` is a name of `OPERAND_FORMATS`,
    except the residual formats.
    """
    spec = OPERAND_FORMATS[format]
    numbers, factor = (data.view(spec.dtype), 1.0) if spec.decode is None else spec.decode(data, d)
    x = numbers.float() if out is None else out.copy_(numbers)
    if factor != 1:
        x = x.mul_(factor)
    x = x.mul_(scale.unsqueeze(-1))
    return x if minimum is None else x.add_(minimum.unsqueeze(-1))


def lookup_bucket_weights(data: Tensor, weights: Tensor, nbits: int) -> Tensor:
    """Look up the weights ``[n, 8 / nbits * b]`` of the buckets in bytes ``[n, b]``."""
    table = weights[unpack_slots(torch.arange(256, device=data.device), nbits)]  # [256, 8 / nbits]
    return table.index_select(0, data.reshape(-1).int()).view(len(data), -1)


def unpack_slots(numbers: Tensor, nbits: int) -> Tensor:
    """Unpack bytes ``[...]`` into fields of `nbits` bits, highest bits first: ``[..., 8 / nbits]``."""
    shifts = torch.arange(8 - nbits, -1, -nbits, dtype=numbers.dtype, device=numbers.device)
    return (numbers.unsqueeze(-1) >> shifts) & (2**nbits - 1)


def select_rows(x: PerToken, rows: Tensor | slice) -> PerToken:
    """Select rows of a per-token value, and return None or a value shared by all tokens unchanged."""
    return x if x is None or x.shape[0] == 1 else x[rows]


def split_rows(rows: int, width: int) -> Iterator[slice]:
    """Yield slices of `rows` such that `width` 4-byte numbers for each row fit `_MAX_ROWS_BYTES`."""
    step = max(1, _MAX_ROWS_BYTES // max(4 * width, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))
