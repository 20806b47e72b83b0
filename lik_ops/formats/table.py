"""How formats keep document tokens in fewer bytes, and what the tokens then count as.

A format keeps each feature as a small number `q` and, for a token, a document or all of them, a `scale` in fp32: the
token counts as ``q * scale`` (for ``"uint8"``, ``q * scale + minimum``). The formulas are those of symmetric and affine
quantisation (Jacob et al., 2018, section 2), the extremes of the FP8 formats those of Micikevicius et al. (2022).

Residual codes (ColBERTv2: Santhanam et al., 2022, section 3.3) keep a token as the number of a centroid and a bucket of
1, 2, 4 or 8 bits for each feature: it counts as ``(centroids[code] + weights[bucket]) * scale``. The first feature of a
byte is in its highest bits, and `weights` are in the order of what bits say: `residual` has the orders of the codecs.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

Query: TypeAlias = Literal["half", "int8"]
FormatName: TypeAlias = Literal["int8", "uint8", "fp8_e4m3", "fp8_e5m2", "binary"]
Residual: TypeAlias = Literal["residual1", "residual2", "residual4", "residual8"]
_MAX_ROWS_BYTES = 32 << 20  # of numbers that are worked on at a time
PerToken = TypeVar("PerToken", Tensor, "Tensor | None")
DecodedFeatures: TypeAlias = tuple[Tensor, float]  # numbers ``[n, d]`` of any dtype, and what they are multiplied by


def _max_abs(x: Tensor) -> Tensor:
    return x.abs().amax(-1)


def _mean_abs(x: Tensor) -> Tensor:
    return x.abs().mean(-1)


def _pack_signs(x: Tensor, inverse: Tensor) -> Tensor:
    """Which features of ``[n, d]`` are above 0 as bytes ``[n, ceil(d / 8)]``, the first feature in the lowest bit."""
    bits = torch.nn.functional.pad(x > 0, (0, -x.shape[-1] % 8)).unflatten(-1, (-(-x.shape[-1] // 8), 8))
    weights = 1 << torch.arange(8, dtype=torch.int32, device=x.device)
    return (bits * weights).sum(-1).to(torch.uint8)


def _unpack_signs(data: Tensor, d: int) -> DecodedFeatures:
    """Of `_pack_signs`."""
    bits = (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=data.device)) & 1
    return bits.flatten(-2)[..., :d].to(torch.int8).mul_(2).sub_(1), 1.0


def convert_fp8(data: Tensor, format: str) -> DecodedFeatures:
    """FP8 numbers in fp16, and what they have to be multiplied by. Bits are moved: a CPU converts FP8 one by one."""
    bits = data.view(torch.int8).to(torch.int16)
    if format == "fp8_e5m2":  # the upper half of fp16
        return (bits << 8).view(torch.float16), 1.0
    # Sign, exponent and mantissa where fp16 has them, but for what exponents begin with: 2^8.
    bits = (bits << 7).bitwise_and_(~0x4000)
    nan = (bits + 0x80).bitwise_and_(0x4000)  # of the largest magnitude, which is NaN, the exponent's first bit
    return bits.bitwise_or_(nan).view(torch.float16), 256.0


def _decode_fp8(format: str, data: Tensor, d: int) -> DecodedFeatures:
    return convert_fp8(data, format) if data.device.type == "cpu" else (data.view(FORMATS[format].dtype), 1.0)


class Format(NamedTuple):
    """How features are kept: all that a format says of itself, but the device code that `kernel` names."""

    dtype: torch.dtype
    largest: float  # number
    each: int = 1  # features that an element holds
    nbits: int = 0  # of a bucket, of residual codes
    affine: bool = False  # numbers count from the minimum of a token; else from 0, in both directions
    kernel: Any = "number"  # `Config.STORED`, how kernels read it: a name, or a function that loads a tile of numbers
    size: Callable[[Tensor], Tensor] = _max_abs  # of tokens ``[n, d]``, which a scale makes `find_largest` of
    encode: Callable[[Tensor, Tensor], Tensor] | None = None  # tokens, and scales' inverses, to elements; None: rounds
    decode: Callable[[Tensor, int], DecodedFeatures] | None = (
        None  # elements to `DecodedFeatures` of d features; None: as they are
    )

    @property
    def bytes(self) -> torch.dtype:
        """As which operators take them: few operations of torch know FP8."""
        return torch.uint8 if self.dtype.is_floating_point else self.dtype


FORMATS: dict[str, Format] = {
    "int8": Format(torch.int8, 127, kernel="int8"),
    "uint8": Format(torch.uint8, 255, affine=True),
    "fp8_e4m3": Format(torch.float8_e4m3fn, 448, kernel="e4m3", decode=partial(_decode_fp8, "fp8_e4m3")),
    "fp8_e5m2": Format(torch.float8_e5m2, 57344, kernel="e5m2", decode=partial(_decode_fp8, "fp8_e5m2")),
    "binary": Format(torch.uint8, 1, 8, kernel="bits", size=_mean_abs, encode=_pack_signs, decode=_unpack_signs),
}
RESIDUAL_FORMATS: dict[str, Format] = {
    f"residual{n}": Format(torch.uint8, 2**n - 1, 8 // n, n, kernel=f"codes{n}") for n in (1, 2, 4, 8)
}
ALL_FORMATS: Mapping[str, Format] = ChainMap(
    RESIDUAL_FORMATS, FORMATS
)  # in the order of `FORMATS`, then `RESIDUAL_FORMATS`
INT8_QUERIES = "int8_int8"  # to operators: "int8" documents, beside which queries may be rounded to int8 too
_QUERY_FORMATS = {INT8_QUERIES: FORMATS["int8"]._replace(kernel=INT8_QUERIES)}
OPERAND_FORMATS: Mapping[str, Format] = ChainMap(_QUERY_FORMATS, RESIDUAL_FORMATS, FORMATS)  # what operators take


class EncodedTokens(NamedTuple):
    """Document tokens as a format keeps them."""

    data: Tensor  # [Td, ...], or with more axes before it is `flat`
    scale: Tensor  # [Td] or [1], fp32; before, the shape of tokens, with sizes of 1 where it is one for all
    minimum: Tensor | None  # the same
    format: str
    codes: Tensor | None = None  # of residual codes: [Td], int32 or int64
    centroids: Tensor | None = None  # [C, d]
    weights: Tensor | None = None  # [2^nbits], fp32

    def flat(self) -> EncodedTokens:
        """As operators take it, with one axis for all tokens."""
        tokens, codes = self.data.shape[:-1], self.codes

        def per_token(x: Tensor | None) -> Any:
            if x is None or x.numel() == 1:
                return x if x is None else x.reshape(1)
            return x.expand(tokens).reshape(-1)

        flat = self.data.flatten(0, -2), per_token(self.scale), per_token(self.minimum)
        return EncodedTokens(*flat, self.format, None if codes is None else codes.reshape(-1), *self[5:])

    def decoded(self, rows: Tensor | slice, d: int, out: Tensor | None = None) -> Tensor:
        """Some tokens ``[n, d]`` in fp32 as they count, NaN of a code that is no centroid's; in `out` if given."""
        data, scale = self.data[rows], select_rows(self.scale, rows)
        if self.codes is None or self.centroids is None or self.weights is None:
            return decode_tokens(data, scale, select_rows(self.minimum, rows), self.format, d, out=out)
        codes, nbits = self.codes[rows], RESIDUAL_FORMATS[self.format].nbits
        inside = (codes >= 0) & (codes < len(self.centroids))
        x = lookup_bucket_weights(data, self.weights, nbits)[:, :d]
        if len(self.centroids):
            x = x.add_(self.centroids.index_select(0, torch.where(inside, codes, 0)))
        return torch.mul(x, torch.where(inside, scale, torch.nan).unsqueeze(-1), out=out)


def compute_extremes(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Of each token what its minimum and its scale follow from, NaN where it has NaN or an infinity."""
    if x.shape[-1] == 0 or not x.numel():
        return x.new_zeros(len(x)), x.new_zeros(len(x))
    kept = FORMATS[format]
    low, high = torch.aminmax(x, dim=-1) if kept.affine else (x.new_zeros(len(x)), kept.size(x))
    finite = low.isfinite() & high.isfinite()
    return torch.where(finite, low, torch.nan).float(), torch.where(finite, high, torch.nan).float()


def compute_scales(low: Tensor, high: Tensor, format: str) -> Tensor:
    """The scales of tokens, or of what shares one, from their `compute_extremes`."""
    # In fp64, which rounds to the bits of an fp32 division: every device has the same scales, compiled too, though
    # a GPU multiplies by the inverse of a number, and Inductor's divisions in fp32 are off in the last bits there.
    scales = ((high - low).double() / FORMATS[format].largest).float()
    # A scale that is too small for its inverse to be a number keeps nothing.
    return torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)


def encode_tokens(x: Tensor, scale: Tensor, minimum: Tensor | None, format: str) -> Tensor:
    """Tokens ``x [n, d]`` in fp32 or fp64 as `format` keeps them, with scales ``[n]`` or ``[1]``."""
    kept = FORMATS[format]
    # 0 for NaN: its scale says so. In fp64 as in `compute_scales`.
    inverse = torch.where(scale > 0, 1 / scale.double(), 0).float().unsqueeze(-1)
    if kept.encode is not None:
        return kept.encode(x, inverse)
    x = (x if minimum is None else x - minimum.unsqueeze(-1)) * inverse
    x = x.nan_to_num(0)
    x = x if kept.dtype.is_floating_point else x.round()
    x = x.clamp(0 if kept.affine else -kept.largest, kept.largest)
    return (x.float() if kept.dtype.is_floating_point else x).to(kept.dtype)


def decode_tokens(
    data: Tensor, scale: Tensor, minimum: Tensor | None, format: str, d: int, out: Tensor | None = None
) -> Tensor:
    """Tokens ``[n, d]`` in fp32 as they count, of scales ``[n]`` or ``[1]``; numbers of 8 bits may come as bytes.

    They are written to `out`, if there is one.
    """
    kept = OPERAND_FORMATS[format]
    numbers, times = (data.view(kept.dtype), 1.0) if kept.decode is None else kept.decode(data, d)
    x = numbers.float() if out is None else out.copy_(numbers)
    if times != 1:
        x = x.mul_(times)
    x = x.mul_(scale.unsqueeze(-1))
    return x if minimum is None else x.add_(minimum.unsqueeze(-1))


def lookup_bucket_weights(data: Tensor, weights: Tensor, nbits: int) -> Tensor:
    """Of bytes ``[n, b]`` the weights of their buckets ``[n, 8 / nbits * b]``."""
    of_bytes = weights[unpack_slots(torch.arange(256, device=data.device), nbits)]  # [256, 8 / nbits]
    return of_bytes.index_select(0, data.reshape(-1).int()).view(len(data), -1)


def unpack_slots(numbers: Tensor, nbits: int) -> Tensor:
    """What the slots of bytes ``[...]`` hold, from the highest bits on: ``[..., 8 / nbits]``."""
    shifts = torch.arange(8 - nbits, -1, -nbits, dtype=numbers.dtype, device=numbers.device)
    return (numbers.unsqueeze(-1) >> shifts) & (2**nbits - 1)


def select_rows(x: PerToken, rows: Tensor | slice) -> PerToken:
    """What has a value for each token, of some; all of what has one for all, and None of None."""
    return x if x is None or x.shape[0] == 1 else x[rows]


def split_rows(rows: int, width: int) -> Iterator[slice]:
    """Slices of rows, of which `width` numbers of 4 bytes take little memory."""
    step = max(1, _MAX_ROWS_BYTES // max(4 * width, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))
