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
_ROWS_BYTES = 32 << 20  # of numbers that are worked on at a time
PerToken = TypeVar("PerToken", Tensor, "Tensor | None")
Numbers: TypeAlias = tuple[Tensor, float]  # numbers ``[n, d]`` of any dtype, and what they are multiplied by


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1)


def _mean(x: Tensor) -> Tensor:
    return x.abs().mean(-1)


def _packed_bits(x: Tensor, inverse: Tensor) -> Tensor:
    """Which features of ``[n, d]`` are above 0 as bytes ``[n, ceil(d / 8)]``, the first feature in the lowest bit."""
    bits = torch.nn.functional.pad(x > 0, (0, -x.shape[-1] % 8)).unflatten(-1, (-(-x.shape[-1] // 8), 8))
    weights = 1 << torch.arange(8, dtype=torch.int32, device=x.device)
    return (bits * weights).sum(-1).to(torch.uint8)


def _signs(data: Tensor, d: int) -> Numbers:
    """Of `_packed_bits`."""
    bits = (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=data.device)) & 1
    return bits.flatten(-2)[..., :d].to(torch.int8).mul_(2).sub_(1), 1.0


def fp8_numbers(data: Tensor, format: str) -> Numbers:
    """FP8 numbers in fp16, and what they have to be multiplied by. Bits are moved: a CPU converts FP8 one by one."""
    bits = data.view(torch.int8).to(torch.int16)
    if format == "fp8_e5m2":  # the upper half of fp16
        return (bits << 8).view(torch.float16), 1.0
    # Sign, exponent and mantissa where fp16 has them, but for what exponents begin with: 2^8.
    bits = (bits << 7).bitwise_and_(~0x4000)
    nan = (bits + 0x80).bitwise_and_(0x4000)  # of the largest magnitude, which is NaN, the exponent's first bit
    return bits.bitwise_or_(nan).view(torch.float16), 256.0


def _decoded_fp8(format: str, data: Tensor, d: int) -> Numbers:
    return fp8_numbers(data, format) if data.device.type == "cpu" else (data.view(FORMATS[format].dtype), 1.0)


class Format(NamedTuple):
    """How features are kept: all that a format says of itself, but the device code that `kernel` names."""

    dtype: torch.dtype
    largest: float  # number
    each: int = 1  # features that an element holds
    nbits: int = 0  # of a bucket, of residual codes
    affine: bool = False  # numbers count from the minimum of a token; else from 0, in both directions
    kernel: Any = "number"  # `Config.STORED`, how kernels read it: a name, or a function that loads a tile of numbers
    size: Callable[[Tensor], Tensor] = _largest  # of tokens ``[n, d]``, which a scale makes `largest` of
    encode: Callable[[Tensor, Tensor], Tensor] | None = None  # tokens, and scales' inverses, to elements; None: rounds
    decode: Callable[[Tensor, int], Numbers] | None = None  # elements to `Numbers` of d features; None: as they are

    @property
    def bytes(self) -> torch.dtype:
        """As which operators take them: few operations of torch know FP8."""
        return torch.uint8 if self.dtype.is_floating_point else self.dtype


FORMATS: dict[str, Format] = {
    "int8": Format(torch.int8, 127, kernel="int8"),
    "uint8": Format(torch.uint8, 255, affine=True),
    "fp8_e4m3": Format(torch.float8_e4m3fn, 448, kernel="e4m3", decode=partial(_decoded_fp8, "fp8_e4m3")),
    "fp8_e5m2": Format(torch.float8_e5m2, 57344, kernel="e5m2", decode=partial(_decoded_fp8, "fp8_e5m2")),
    "binary": Format(torch.uint8, 1, 8, kernel="bits", size=_mean, encode=_packed_bits, decode=_signs),
}
RESIDUAL: dict[str, Format] = {
    f"residual{n}": Format(torch.uint8, 2**n - 1, 8 // n, n, kernel=f"codes{n}") for n in (1, 2, 4, 8)
}
ALL: Mapping[str, Format] = ChainMap(RESIDUAL, FORMATS)  # in the order of `FORMATS`, then `RESIDUAL`
INT8_QUERIES = "int8_int8"  # to operators: "int8" documents, beside which queries may be rounded to int8 too
_OF_QUERIES = {INT8_QUERIES: FORMATS["int8"]._replace(kernel=INT8_QUERIES)}
OPERANDS: Mapping[str, Format] = ChainMap(_OF_QUERIES, RESIDUAL, FORMATS)  # what operators take


class Stored(NamedTuple):
    """Document tokens as a format keeps them."""

    data: Tensor  # [Td, ...], or with more axes before it is `flat`
    scale: Tensor  # [Td] or [1], fp32; before, the shape of tokens, with sizes of 1 where it is one for all
    minimum: Tensor | None  # the same
    format: str
    codes: Tensor | None = None  # of residual codes: [Td], int32 or int64
    centroids: Tensor | None = None  # [C, d]
    weights: Tensor | None = None  # [2^nbits], fp32

    def flat(self) -> Stored:
        """As operators take it, with one axis for all tokens."""
        tokens, codes = self.data.shape[:-1], self.codes

        def per_token(x: Tensor | None) -> Any:
            if x is None or x.numel() == 1:
                return x if x is None else x.reshape(1)
            return x.expand(tokens).reshape(-1)

        flat = self.data.flatten(0, -2), per_token(self.scale), per_token(self.minimum)
        return Stored(*flat, self.format, None if codes is None else codes.reshape(-1), *self[5:])

    def decoded(self, rows: Tensor | slice, d: int, out: Tensor | None = None) -> Tensor:
        """Some tokens ``[n, d]`` in fp32 as they count, NaN of a code that is no centroid's; in `out` if given."""
        data, scale = self.data[rows], part_of(self.scale, rows)
        if self.codes is None or self.centroids is None or self.weights is None:
            return decoded(data, scale, part_of(self.minimum, rows), self.format, d, out=out)
        codes, nbits = self.codes[rows], RESIDUAL[self.format].nbits
        inside = (codes >= 0) & (codes < len(self.centroids))
        x = bucket_weights(data, self.weights, nbits)[:, :d]
        if len(self.centroids):
            x = x.add_(self.centroids.index_select(0, torch.where(inside, codes, 0)))
        return torch.mul(x, torch.where(inside, scale, torch.nan).unsqueeze(-1), out=out)


def extremes(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Of each token what its minimum and its scale follow from, NaN where it has NaN or an infinity."""
    if x.shape[-1] == 0 or not x.numel():
        return x.new_zeros(len(x)), x.new_zeros(len(x))
    kept = FORMATS[format]
    low, high = torch.aminmax(x, dim=-1) if kept.affine else (x.new_zeros(len(x)), kept.size(x))
    finite = low.isfinite() & high.isfinite()
    return torch.where(finite, low, torch.nan).float(), torch.where(finite, high, torch.nan).float()


def scales_of(low: Tensor, high: Tensor, format: str) -> Tensor:
    """The scales of tokens, or of what shares one, from their `extremes`."""
    # In fp64, which rounds to the bits of an fp32 division: every device has the same scales, compiled too, though
    # a GPU multiplies by the inverse of a number, and Inductor's divisions in fp32 are off in the last bits there.
    scales = ((high - low).double() / FORMATS[format].largest).float()
    # A scale that is too small for its inverse to be a number keeps nothing.
    return torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)


def encoded(x: Tensor, scale: Tensor, minimum: Tensor | None, format: str) -> Tensor:
    """Tokens ``x [n, d]`` in fp32 or fp64 as `format` keeps them, with scales ``[n]`` or ``[1]``."""
    kept = FORMATS[format]
    # 0 for NaN: its scale says so. In fp64 as in `scales_of`.
    inverse = torch.where(scale > 0, 1 / scale.double(), 0).float().unsqueeze(-1)
    if kept.encode is not None:
        return kept.encode(x, inverse)
    x = (x if minimum is None else x - minimum.unsqueeze(-1)) * inverse
    x = x.nan_to_num(0)
    x = x if kept.dtype.is_floating_point else x.round()
    x = x.clamp(0 if kept.affine else -kept.largest, kept.largest)
    return (x.float() if kept.dtype.is_floating_point else x).to(kept.dtype)


def decoded(
    data: Tensor, scale: Tensor, minimum: Tensor | None, format: str, d: int, out: Tensor | None = None
) -> Tensor:
    """Tokens ``[n, d]`` in fp32 as they count, of scales ``[n]`` or ``[1]``; numbers of 8 bits may come as bytes.

    They are written to `out`, if there is one.
    """
    kept = OPERANDS[format]
    numbers, times = (data.view(kept.dtype), 1.0) if kept.decode is None else kept.decode(data, d)
    x = numbers.float() if out is None else out.copy_(numbers)
    if times != 1:
        x = x.mul_(times)
    x = x.mul_(scale.unsqueeze(-1))
    return x if minimum is None else x.add_(minimum.unsqueeze(-1))


def bucket_weights(data: Tensor, weights: Tensor, nbits: int) -> Tensor:
    """Of bytes ``[n, b]`` the weights of their buckets ``[n, 8 / nbits * b]``."""
    of_bytes = weights[slots(torch.arange(256, device=data.device), nbits)]  # [256, 8 / nbits]
    return of_bytes.index_select(0, data.reshape(-1).int()).view(len(data), -1)


def slots(numbers: Tensor, nbits: int) -> Tensor:
    """What the slots of bytes ``[...]`` hold, from the highest bits on: ``[..., 8 / nbits]``."""
    shifts = torch.arange(8 - nbits, -1, -nbits, dtype=numbers.dtype, device=numbers.device)
    return (numbers.unsqueeze(-1) >> shifts) & (2**nbits - 1)


def part_of(x: PerToken, rows: Tensor | slice) -> PerToken:
    """What has a value for each token, of some; all of what has one for all, and None of None."""
    return x if x is None or x.shape[0] == 1 else x[rows]


def parts(rows: int, width: int) -> Iterator[slice]:
    """Slices of rows, of which `width` numbers of 4 bytes take little memory."""
    step = max(1, _ROWS_BYTES // max(4 * width, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))
