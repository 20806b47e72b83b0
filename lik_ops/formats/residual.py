"""`ResidualCodec`: tokens as the nearest of many centroids, and a few bits of what each feature is off by.

The codec is that of ColBERTv2 (Santhanam et al., 2022, section 3.3) as ColBERT, fast-plaid and next-plaid keep it on
disk: a token is normalised ``centroids[code] + weights[bucket]``, its code that of the centroid with the largest
product, its buckets those of the residual between `cutoffs`, one table for all features. `formats` decodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .._ops import ops as lik
from ..core.arguments import (
    DTYPES,
    check_choice,
    check_count,
    check_dtype,
    check_flag,
    check_floats,
    check_has_values,
    check_strided,
    check_tensor,
    format_shape,
    short_repr,
)
from .table import RESIDUAL_FORMATS, EncodedTokens, Residual, split_rows

BitOrder: TypeAlias = Literal["plaid", "big", "little"]
_EPS = 1e-12  # of torch.nn.functional.normalize
_MAX_HELD_OUT_TOKENS = 50_000  # tokens that buckets are taken from, at most, and one in 20
_TOKENS_PER_CENTROID = 256  # tokens for each centroid that k-means looks at, at most
_QUERY_ROWS = 64  # rows that look for their centroid as one query


@dataclass(frozen=True, eq=False, repr=False)
class ResidualCodec:
    """Centroids and buckets: what residual codes are read and written with.

    ``lik_ops.quantize(D, codec)`` makes documents of tokens, `Quantized.of_codes` of codes that exist.

    Args:
        centroids: ``[C, d]``, fp16, bf16 or fp32.
        weights: fp32 ``[2^nbits]``, what each bucket adds to a feature; 1, 2, 4 or 8 bits.
        cutoffs: fp32 ``[2^nbits - 1]``, ascending: a residual is in the bucket above all cutoffs below it. None: the
            codec only decodes.
        bit_order: how the buckets of a byte lie. ``"plaid"``, of ColBERT, fast-plaid and next-plaid: the first feature
            in the highest bits, each bucket from its lowest bit on. ``"big"``, of WARP: the same from the highest on.
            ``"little"``: the first feature in the lowest bits, the lowest bit of a bucket lowest.
        normalize: tokens count as ``x / max(||x||, 1e-12)`` of ``x = centroids[code] + weights[bucket]``, else as x.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a shape, device or option is wrong.

    Example:
        >>> tokens = torch.nn.functional.normalize(torch.randn(2000, 64), dim=-1)
        >>> codec = lik_ops.ResidualCodec.train(tokens, nbits=2, n_centroids=64)
        >>> codes, residuals = codec.encode(tokens)
        >>> codes.shape, residuals.shape, codec.decode(codes, residuals).shape
        (torch.Size([2000]), torch.Size([2000, 16]), torch.Size([2000, 64]))
    """

    centroids: Tensor
    weights: Tensor
    cutoffs: Tensor | None = None
    bit_order: BitOrder = "plaid"
    normalize: bool = True
    table: Tensor = field(init=False)  # the weights in the order of what the bits of `kept` bytes say

    def __post_init__(self) -> None:
        op, weights = "ResidualCodec", self.weights
        for name in ("centroids", "weights", "cutoffs"):
            x = getattr(self, name)
            check_tensor(op, name, x, or_none=name == "cutoffs")
            if x is None:
                continue
            check_strided(op, name, x)
            dtypes = (torch.float32,) if name != "centroids" else DTYPES[:3]
            if x.dtype not in dtypes:
                raise TypeError(f"{op}: {name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")
            if x.device != self.centroids.device:
                raise ValueError(
                    f"{op}: {name}: expected the device of centroids, {self.centroids.device}, got {x.device}"
                )
        if self.centroids.dim() != 2 or self.centroids.shape[1] < 1:
            raise ValueError(f"{op}: centroids: expected [C, d], got {format_shape(self.centroids)}")
        if weights.dim() != 1 or len(weights) not in (2, 4, 16, 256):
            raise ValueError(f"{op}: weights: expected [2], [4], [16] or [256], got {format_shape(weights)}")
        if self.cutoffs is not None and self.cutoffs.shape != (len(weights) - 1,):
            raise ValueError(f"{op}: cutoffs: expected [{len(weights) - 1}], got {format_shape(self.cutoffs)}")
        check_choice(op, "bit_order", self.bit_order, get_args(BitOrder))
        check_flag(op, "normalize", self.normalize)
        order = torch.arange(len(weights), device=weights.device)
        if self.bit_order != "big":  # bytes of "little" are kept with their bits reversed, as those of "plaid"
            order = reverse_bits(order, self.nbits)
        object.__setattr__(self, "table", weights[order])

    @property
    def nbits(self) -> int:
        """Of a bucket."""
        return len(self.weights).bit_length() - 1

    @property
    def d(self) -> int:
        return self.centroids.shape[1]

    @property
    def width(self) -> int:
        """Bytes of the residuals of a token."""
        return -(-self.d * self.nbits // 8)

    @property
    def format(self) -> Residual:
        """Of documents that this codec makes."""
        found: Any = f"residual{self.nbits}"
        return found

    def __repr__(self) -> str:
        return f"ResidualCodec({len(self.centroids)} centroids, d={self.d}, nbits={self.nbits})"

    def tensors(self) -> dict[str, Tensor]:
        """Centroids, weights and cutoffs by their names."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {name: x for name, x in found.items() if isinstance(x, Tensor)}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ResidualCodec:
        """The same on another device."""
        moved: dict[str, Any] = {name: x.to(device, non_blocking=non_blocking) for name, x in self.tensors().items()}
        return replace(self, **moved)

    def encode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and residuals of tokens.

        Args:
            tokens: ``[..., d]``, fp16, bf16, fp32 or fp64, on the device of the codec.

        Returns:
            int32 codes ``[...]``, and residuals in the bit order of the codec, uint8 ``[..., ceil(d nbits / 8)]``.

        Raises:
            TypeError: a dtype or type is wrong.
            ValueError: a shape or device is wrong, or the codec has no cutoffs.
        """
        op = "ResidualCodec.encode"
        self._check_tokens(op, tokens)
        if self.cutoffs is None or not len(self.centroids):
            missing = "cutoffs" if self.cutoffs is None else "centroids"
            raise ValueError(f"{op}: expected a codec with {missing}, which this one has not")
        rows, shape = tokens.flatten(0, -2), tokens.shape[:-1]
        codes = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
        residuals = torch.empty((len(rows), self.width), dtype=torch.uint8, device=rows.device)
        centroids = self.centroids.float()
        for part in split_rows(len(rows), self.d):
            x = rows[part].float().nan_to_num(0)
            codes[part] = nearest = _find_nearest(x, centroids)
            off = x - centroids[nearest]
            residuals[part] = self._pack_buckets(
                torch.bucketize(off, self.cutoffs)
            )  # one that equals a cutoff is below it
        return codes.view(shape), residuals.view(*shape, self.width)

    def decode(self, codes: Tensor, residuals: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Tokens of their codes and residuals; NaN where a code is no centroid's.

        Args:
            codes: ``[..., L]``, int32 or int64.
            residuals: uint8 ``[..., ceil(d nbits / 8)]``, in the bit order of the codec.
            dtype: of the tokens; None for that of the centroids.

        Returns:
            Tokens ``[..., d]``, computed in fp32 and rounded once.

        Raises:
            TypeError: a dtype or type is wrong.
            ValueError: a shape or device is wrong.
        """
        op, dtype = "ResidualCodec.decode", self.centroids.dtype if dtype is None else dtype
        self.check_codes(op, codes, residuals)
        check_dtype(op, "dtype", dtype)
        stored = self._stored(codes, residuals)
        out = torch.empty((len(stored.data), self.d), dtype=dtype, device=codes.device)
        for part in split_rows(len(out), self.d):
            x = stored.decoded(part, self.d)
            out[part] = x * _compute_inverse_norms(x).unsqueeze(-1) if self.normalize else x
        return out.view(*codes.shape, self.d)

    def scales(self, codes: Tensor, residuals: Tensor) -> Tensor:
        """What tokens are multiplied by: inverse norms, fp32 of the shape of the codes; ones of sizes 1 without.

        Raises:
            TypeError: a dtype or type is wrong.
            ValueError: a shape or device is wrong.
        """
        self.check_codes("ResidualCodec.scales", codes, residuals)
        if not self.normalize:
            return torch.ones((1,) * codes.dim(), dtype=torch.float32, device=codes.device)
        stored = self._stored(codes, residuals)
        out = torch.empty(len(stored.data), dtype=torch.float32, device=codes.device)
        for part in split_rows(len(out), self.d):
            out[part] = _compute_inverse_norms(stored.decoded(part, self.d)).detach()
        return out.view(codes.shape)

    def kept(self, residuals: Tensor) -> Tensor:
        """Residuals as `formats` reads them, those of ``"little"`` with the bits of each byte reversed."""
        if self.bit_order != "little":
            return residuals
        return reverse_bits(torch.arange(256, device=residuals.device), 8).to(torch.uint8)[residuals.int()]

    def check_codes(self, op: str, codes: Any, residuals: Any) -> None:
        """Raise TypeError or ValueError, naming the argument, unless they are codes and residuals of this codec."""
        for name, x in (("codes", codes), ("residuals", residuals)):
            check_tensor(op, name, x)
            check_strided(op, name, x)
            if x.device != self.centroids.device:
                raise ValueError(
                    f"{op}: {name}: expected the device of the codec, {self.centroids.device}, got {x.device}"
                )
        if codes.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: codes: expected int32 or int64, got {codes.dtype}")
        if codes.dim() < 1:
            raise ValueError(f"{op}: codes: expected [..., L], got []")
        if residuals.dtype != torch.uint8:
            raise TypeError(f"{op}: residuals: expected uint8, got {residuals.dtype}")
        expected = [*codes.shape, self.width]
        if list(residuals.shape) != expected:
            raise ValueError(f"{op}: residuals: expected {expected}, got {format_shape(residuals)}")

    def _check_tokens(self, op: str, tokens: Any) -> None:
        check_floats(op, "tokens", tokens)
        if tokens.dim() < 2 or tokens.shape[-1] != self.d:
            raise ValueError(f"{op}: tokens: expected [..., {self.d}], got {format_shape(tokens)}")
        if tokens.device != self.centroids.device:
            expected = self.centroids.device
            raise ValueError(f"{op}: tokens: expected the device of the codec, {expected}, got {tokens.device}")

    def _stored(self, codes: Tensor, residuals: Tensor) -> EncodedTokens:
        data, scale = self.kept(residuals).flatten(0, -2), self.weights.new_ones(1)
        return EncodedTokens(data, scale, None, self.format, codes.reshape(-1), self.centroids, self.table)

    def _pack_buckets(self, buckets: Tensor) -> Tensor:
        """Buckets ``[n, d]`` as bytes in the bit order of the codec."""
        each = RESIDUAL_FORMATS[self.format].each
        buckets = F.pad(buckets, (0, -self.d % each)).unflatten(-1, (self.width, each))
        if self.bit_order == "plaid":
            buckets = reverse_bits(buckets, self.nbits)
        shifts = torch.arange(0, 8, self.nbits, device=buckets.device)
        shifts = shifts if self.bit_order == "little" else shifts.flip(0)
        return (buckets << shifts).sum(-1).to(torch.uint8)

    @classmethod
    def train(
        cls,
        tokens: Tensor,
        nbits: int = 4,
        n_centroids: int | None = None,
        *,
        bit_order: BitOrder = "plaid",
        iterations: int = 10,
        seed: int = 0,
    ) -> ResidualCodec:
        """A codec for tokens like these: spherical k-means, and buckets of equal counts of held-out residuals.

        Cutoffs are the quantiles ``i / 2^nbits`` of the residuals of one token in 20, at most 50,000, which k-means
        does not see; weights those of ``(i + 1/2) / 2^nbits``. Tokens with NaN or infinities are left out.

        Args:
            tokens: ``[..., d]``, of unit norm; fp16, bf16, fp32 or fp64.
            nbits: 1, 2, 4 or 8.
            n_centroids: None for ColBERT's, the power of two below ``16 sqrt(T)`` of T tokens. No more than tokens.
            bit_order: as of the codec.
            iterations: of k-means.
            seed: of what is random. On a CPU equal seeds give equal codecs.

        Returns:
            A codec with fp16 centroids of unit norm, on the device of the tokens.

        Raises:
            TypeError: a dtype or type is wrong.
            ValueError: a shape or option is wrong, or no token is finite.
        """
        op = "ResidualCodec.train"
        check_floats(op, "tokens", tokens)
        check_has_values(op, "tokens", tokens)
        if tokens.dim() < 2 or tokens.shape[-1] < 1:
            raise ValueError(f"{op}: tokens: expected [..., d], got {format_shape(tokens)}")
        for name, count, least in (("nbits", nbits, 1), ("iterations", iterations, 1), ("seed", seed, -(2**63))):
            check_count(op, name, count, least)
        if nbits not in (1, 2, 4, 8):
            raise ValueError(f"{op}: nbits: expected 1, 2, 4 or 8, got {short_repr(nbits)}")
        if n_centroids is not None:
            check_count(op, "n_centroids", n_centroids, 1)
        rows = tokens.detach().flatten(0, -2)
        rows = rows[rows.isfinite().all(-1)]
        if not len(rows):
            raise ValueError(f"{op}: tokens: expected finite ones, got none of {format_shape(tokens)}")
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(rows), generator=generator, device="cpu").to(rows.device)
        held = rows[order[: min(_MAX_HELD_OUT_TOKENS, max(1, len(rows) // 20))]].float()
        seen = order[len(held) :] if len(rows) > len(held) else order
        count = n_centroids or 1 << max(0, (int(16 * len(rows) ** 0.5)).bit_length() - 1)
        centroids = _train_centroids(
            rows[seen[: _TOKENS_PER_CENTROID * count]].float(), min(count, len(seen)), iterations, generator
        )
        kept = centroids.half().float()
        residuals = torch.cat(
            [held[p] - kept[_find_nearest(held[p], kept)] for p in split_rows(len(held), held.shape[1])]
        )
        n = 2**nbits
        at = torch.arange(1, 2 * n, dtype=torch.float64, device="cpu") / (2 * n)
        quantiles = _compute_quantiles(residuals.flatten(), at)
        return cls(centroids.half(), quantiles[0::2].clone(), quantiles[1::2].clone(), bit_order)


def _compute_inverse_norms(x: Tensor) -> Tensor:
    return 1 / torch.linalg.vector_norm(x, dim=-1).clamp_min(_EPS)


def reverse_bits(x: Tensor, nbits: int) -> Tensor:
    """Integers with their lowest `nbits` bits in the other order."""
    found = torch.zeros_like(x)
    for bit in range(nbits):
        found |= ((x >> bit) & 1) << (nbits - 1 - bit)
    return found


def _find_nearest(rows: Tensor, centroids: Tensor) -> Tensor:
    """The centroid that each row has the largest product with: the winner among the tokens of one document."""
    whole = len(rows) // _QUERY_ROWS * _QUERY_ROWS
    queries = rows[:whole].view(-1, _QUERY_ROWS, rows.shape[1]), rows[whole:].unsqueeze(0)
    found = [
        lik.maxsim_fwd(Q, centroids.unsqueeze(0), None, None, None, False, torch.int32, "auto")[1].flatten()
        for Q in queries
    ]
    return torch.cat(found)


def _train_centroids(rows: Tensor, count: int, iterations: int, generator: torch.Generator) -> Tensor:
    """Unit centroids: each the direction of the sum of the rows that it has the largest product with."""
    centroids = F.normalize(rows[:count], dim=-1)  # of rows in random order
    for _ in range(iterations):
        sums, members = torch.zeros_like(centroids), rows.new_zeros(count)
        for part in split_rows(len(rows), rows.shape[1]):
            nearest = _find_nearest(rows[part], centroids)
            sums.index_add_(0, nearest, rows[part])
            members += torch.bincount(nearest, minlength=count)
        # One that no row is near to begins again where another row is.
        others = rows[torch.randint(len(rows), (count,), generator=generator, device="cpu").to(rows.device)]
        centroids = F.normalize(torch.where((members > 0).unsqueeze(-1), sums, others), dim=-1)
    return centroids


def _compute_quantiles(x: Tensor, q: Tensor) -> Tensor:
    """As `torch.quantile`, which takes no more than 2^24 values."""
    values = x.sort().values
    at = q.to(x.device) * (len(values) - 1)
    low = at.floor().long()
    return torch.lerp(values[low], values[(low + 1).clamp_max(len(values) - 1)], (at - low).to(values.dtype))
