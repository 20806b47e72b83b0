"""`ResidualCodec`: encode a token as its nearest centroid and a few bits for the residual of each feature.

The codec is from ColBERTv2 (Santhanam et al., 2022, section 3.3), as stored by ColBERT, fast-plaid and next-plaid. A
decoded token is ``centroids[code] + weights[bucket]``, normalized. The code is the centroid with the largest dot
product. A bucket is the interval between `cutoffs` that holds the residual of a feature. All features share one table.
`formats.table` decodes tokens.
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
_EPS = 1e-12  # the default of torch.nn.functional.normalize
_MAX_HELD_OUT_TOKENS = 50_000  # at most; buckets are trained on one token in 20
_TOKENS_PER_CENTROID = 256  # at most so many tokens for each centroid are used by k-means
_QUERY_ROWS = 64  # rows that are scored as one query to find their centroids


@dataclass(frozen=True, eq=False, repr=False)
class ResidualCodec:
    """Centroids and buckets that encode and decode residual codes.

    ``lik_ops.quantize(D, codec)`` encodes tokens. `Quantized.of_codes` wraps existing codes.

    Args:
        centroids: ``[C, d]``, fp16, bf16 or fp32.
        weights: fp32 ``[2^nbits]``, the value that each bucket adds to a feature. `nbits` is 1, 2, 4 or 8.
        cutoffs: fp32 ``[2^nbits - 1]``, ascending. The bucket of a residual is the number of cutoffs below it. If None,
            the codec can only decode.
        bit_order: order of the buckets in a byte. ``"plaid"`` (ColBERT, fast-plaid, next-plaid) has the first feature
            in the highest bits, with the lowest bit of each bucket first. ``"big"`` (WARP) has the first feature in the
            highest bits, with the highest bit of each bucket first. ``"little"`` has the first feature in the lowest
            bits, with the lowest bit of a bucket lowest.
        normalize: decode to ``x / max(||x||, 1e-12)`` with ``x = centroids[code] + weights[bucket]``, else to x.

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
    table: Tensor = field(init=False)  # weights indexed by the bits of `kept` bytes

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
            if x.device != (device := self.centroids.device):
                raise ValueError(f"{op}: {name}: expected the device of centroids, {device}, got {x.device}")
        if self.centroids.dim() != 2 or self.centroids.shape[1] < 1:
            raise ValueError(f"{op}: centroids: expected [C, d], got {format_shape(self.centroids)}")
        if weights.dim() != 1 or len(weights) not in (2, 4, 16, 256):
            raise ValueError(f"{op}: weights: expected [2], [4], [16] or [256], got {format_shape(weights)}")
        if self.cutoffs is not None and self.cutoffs.shape != (len(weights) - 1,):
            raise ValueError(f"{op}: cutoffs: expected [{len(weights) - 1}], got {format_shape(self.cutoffs)}")
        check_choice(op, "bit_order", self.bit_order, get_args(BitOrder))
        check_flag(op, "normalize", self.normalize)
        order = torch.arange(len(weights), device=weights.device)
        if self.bit_order != "big":  # bytes of "little" are stored with their bits reversed, like "plaid"
            order = reverse_bits(order, self.nbits)
        object.__setattr__(self, "table", weights[order])

    @property
    def nbits(self) -> int:
        """Return the number of bits of a bucket."""
        return len(self.weights).bit_length() - 1

    @property
    def d(self) -> int:
        """Return the number of features of a token."""
        return self.centroids.shape[1]

    @property
    def width(self) -> int:
        """Return the number of residual bytes of a token."""
        return -(-self.d * self.nbits // 8)

    @property
    def format(self) -> Residual:
        """Return the name of the format of documents that this codec encodes."""
        name: Any = f"residual{self.nbits}"
        return name

    def __repr__(self) -> str:
        return f"ResidualCodec({len(self.centroids)} centroids, d={self.d}, nbits={self.nbits})"

    def tensors(self) -> dict[str, Tensor]:
        """Return centroids, weights and cutoffs by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {name: x for name, x in values.items() if isinstance(x, Tensor)}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ResidualCodec:
        """Copy the codec to another device.

        Args:
            device: the target device.
            non_blocking: see ``torch.Tensor.to``.

        Returns:
            A `ResidualCodec` on `device`.
        """
        tensors: dict[str, Any] = {name: x.to(device, non_blocking=non_blocking) for name, x in self.tensors().items()}
        return replace(self, **tensors)

    def encode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Encode tokens as codes and residuals.

        Args:
            tokens: ``[..., d]``, fp16, bf16, fp32 or fp64, on the device of the codec.

        Returns:
            int32 codes ``[...]``, and uint8 residuals ``[..., ceil(d nbits / 8)]`` in the bit order of the codec.

        Raises:
            TypeError: a dtype or type is wrong.
            ValueError: a shape or device is wrong, or the codec has no cutoffs.
        """
        op = "ResidualCodec.encode"
        self._check_tokens(op, tokens)
        if self.cutoffs is None or not len(self.centroids):
            missing_field = "cutoffs" if self.cutoffs is None else "centroids"
            raise ValueError(f"{op}: expected a codec with {missing_field}, but this codec has none")
        rows, shape = tokens.flatten(0, -2), tokens.shape[:-1]
        codes = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
        residuals = torch.empty((len(rows), self.width), dtype=torch.uint8, device=rows.device)
        centroids = self.centroids.float()
        for part in split_rows(len(rows), self.d):
            x = rows[part].float().nan_to_num(0)
            codes[part] = nearest = _find_nearest(x, centroids)
            delta = x - centroids[nearest]
            # A residual that equals a cutoff is below it.
            residuals[part] = self._pack_buckets(torch.bucketize(delta, self.cutoffs))
        return codes.view(shape), residuals.view(*shape, self.width)

    def decode(self, codes: Tensor, residuals: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Decode codes and residuals to tokens, with NaN for a code that is not a centroid.

        Args:
            codes: ``[..., L]``, int32 or int64.
            residuals: uint8 ``[..., ceil(d nbits / 8)]``, in the bit order of the codec.
            dtype: dtype of the tokens; None for the dtype of the centroids.

        Returns:
            Tokens ``[..., d]``, computed in fp32 and rounded once.

        Raises:
            TypeError: a dtype or type is wrong.
            ValueError: a shape or device is wrong.
        """
        op, dtype = "ResidualCodec.decode", self.centroids.dtype if dtype is None else dtype
        self.check_codes(op, codes, residuals)
        check_dtype(op, "dtype", dtype)
        tokens = self._stored(codes, residuals)
        out = torch.empty((len(tokens.data), self.d), dtype=dtype, device=codes.device)
        for part in split_rows(len(out), self.d):
            x = tokens.decode(part, self.d)
            out[part] = x * _compute_inverse_norms(x).unsqueeze(-1) if self.normalize else x
        return out.view(*codes.shape, self.d)

    def scales(self, codes: Tensor, residuals: Tensor) -> Tensor:
        """Compute the scales of tokens, which are their inverse norms.

        Args:
            codes: ``[..., L]``, int32 or int64.
            residuals: uint8 ``[..., ceil(d nbits / 8)]``, in the bit order of the codec.

        Returns:
            fp32 scales in the shape of `codes`. Without `normalize`, ones of shape ``[1, ..., 1]``.

        Raises:
            TypeError: a dtype or type is wrong.
            ValueError: a shape or device is wrong.
        """
        self.check_codes("ResidualCodec.scales", codes, residuals)
        if not self.normalize:
            return torch.ones((1,) * codes.dim(), dtype=torch.float32, device=codes.device)
        tokens = self._stored(codes, residuals)
        out = torch.empty(len(tokens.data), dtype=torch.float32, device=codes.device)
        for part in split_rows(len(out), self.d):
            out[part] = _compute_inverse_norms(tokens.decode(part, self.d)).detach()
        return out.view(codes.shape)

    def to_table_bit_order(self, residuals: Tensor) -> Tensor:
        """Return residuals in the bit order of `formats.table`, with the bits of ``"little"`` bytes reversed."""
        if self.bit_order != "little":
            return residuals
        return reverse_bits(torch.arange(256, device=residuals.device), 8).to(torch.uint8)[residuals.int()]

    def check_codes(self, op: str, codes: Any, residuals: Any) -> None:
        """Raise TypeError or ValueError, naming the argument, unless both are codes and residuals of this codec."""
        for name, x in (("codes", codes), ("residuals", residuals)):
            check_tensor(op, name, x)
            check_strided(op, name, x)
            if x.device != (device := self.centroids.device):
                raise ValueError(f"{op}: {name}: expected the device of the codec, {device}, got {x.device}")
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
        """Raise TypeError or ValueError unless `tokens` are tokens of this codec."""
        check_floats(op, "tokens", tokens)
        if tokens.dim() < 2 or tokens.shape[-1] != self.d:
            raise ValueError(f"{op}: tokens: expected [..., {self.d}], got {format_shape(tokens)}")
        if tokens.device != (device := self.centroids.device):
            raise ValueError(f"{op}: tokens: expected the device of the codec, {device}, got {tokens.device}")

    def _stored(self, codes: Tensor, residuals: Tensor) -> EncodedTokens:
        """Return codes and residuals as `EncodedTokens` with a scale of 1."""
        data, scale = self.to_table_bit_order(residuals).flatten(0, -2), self.weights.new_ones(1)
        return EncodedTokens(data, scale, None, self.format, codes.reshape(-1), self.centroids, self.table)

    def _pack_buckets(self, buckets: Tensor) -> Tensor:
        """Pack buckets ``[n, d]`` into bytes in the bit order of the codec."""
        per_byte = RESIDUAL_FORMATS[self.format].features_per_element
        buckets = F.pad(buckets, (0, -self.d % per_byte)).unflatten(-1, (self.width, per_byte))
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
        """Train a codec on tokens with spherical k-means and residual buckets of equal counts.

        One token in 20, at most 50,000, is held out from k-means. The cutoffs are the quantiles ``i / 2^nbits`` of the
        residuals of these tokens. The weights are the quantiles ``(i + 1/2) / 2^nbits``. Tokens with NaN or infinity
        are left out.

        Args:
            tokens: ``[..., d]``, of unit norm; fp16, bf16, fp32 or fp64.
            nbits: 1, 2, 4 or 8.
            n_centroids: number of centroids, at most the number of tokens. None selects ColBERT's choice, the largest
                power of two up to ``16 sqrt(T)`` for T tokens.
            bit_order: bit order of the codec.
            iterations: iterations of k-means.
            seed: random seed. On a CPU equal seeds give equal codecs.

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
        for name, count, minimum in (("nbits", nbits, 1), ("iterations", iterations, 1), ("seed", seed, -(2**63))):
            check_count(op, name, count, minimum)
        if nbits not in (1, 2, 4, 8):
            raise ValueError(f"{op}: nbits: expected 1, 2, 4 or 8, got {short_repr(nbits)}")
        if n_centroids is not None:
            check_count(op, "n_centroids", n_centroids, 1)
        rows = tokens.detach().flatten(0, -2)
        rows = rows[rows.isfinite().all(-1)]
        if not len(rows):
            raise ValueError(f"{op}: tokens: expected at least one finite token, got none in {format_shape(tokens)}")
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(rows), generator=generator, device="cpu").to(rows.device)
        held_out_rows = rows[order[: min(_MAX_HELD_OUT_TOKENS, max(1, len(rows) // 20))]].float()
        train_order = order[len(held_out_rows) :] if len(rows) > len(held_out_rows) else order
        count = n_centroids or 1 << max(0, (int(16 * len(rows) ** 0.5)).bit_length() - 1)
        centroids = _train_centroids(
            rows[train_order[: _TOKENS_PER_CENTROID * count]].float(),
            min(count, len(train_order)),
            iterations,
            generator,
        )
        rounded_centroids = centroids.half().float()
        residuals = torch.cat(
            [
                held_out_rows[p] - rounded_centroids[_find_nearest(held_out_rows[p], rounded_centroids)]
                for p in split_rows(len(held_out_rows), held_out_rows.shape[1])
            ]
        )
        n = 2**nbits
        levels = torch.arange(1, 2 * n, dtype=torch.float64, device="cpu") / (2 * n)
        quantiles = _compute_quantiles(residuals.flatten(), levels)
        return cls(centroids.half(), quantiles[0::2].clone(), quantiles[1::2].clone(), bit_order)


def _compute_inverse_norms(x: Tensor) -> Tensor:
    """Return ``1 / max(||x||, 1e-12)`` along the last axis."""
    return 1 / torch.linalg.vector_norm(x, dim=-1).clamp_min(_EPS)


def reverse_bits(x: Tensor, nbits: int) -> Tensor:
    """Reverse the order of the lowest `nbits` bits of integers."""
    out = torch.zeros_like(x)
    for bit in range(nbits):
        out |= ((x >> bit) & 1) << (nbits - 1 - bit)
    return out


def _find_nearest(rows: Tensor, centroids: Tensor) -> Tensor:
    """Return the centroid with the largest dot product for each row, the argmax of MaxSim over one document."""
    aligned_rows = len(rows) // _QUERY_ROWS * _QUERY_ROWS
    queries = rows[:aligned_rows].view(-1, _QUERY_ROWS, rows.shape[1]), rows[aligned_rows:].unsqueeze(0)
    nearest = [
        lik.maxsim_fwd(Q, centroids.unsqueeze(0), None, None, None, False, torch.int32, "auto")[1].flatten()
        for Q in queries
    ]
    return torch.cat(nearest)


def _train_centroids(rows: Tensor, count: int, iterations: int, generator: torch.Generator) -> Tensor:
    """Train unit centroids, each the direction of the sum of the rows that are nearest to it by dot product."""
    centroids = F.normalize(rows[:count], dim=-1)  # the rows are in random order
    for _ in range(iterations):
        sums, members = torch.zeros_like(centroids), rows.new_zeros(count)
        for part in split_rows(len(rows), rows.shape[1]):
            nearest = _find_nearest(rows[part], centroids)
            sums.index_add_(0, nearest, rows[part])
            members += torch.bincount(nearest, minlength=count)
        # A centroid without rows restarts at a random row.
        random_rows = rows[torch.randint(len(rows), (count,), generator=generator, device="cpu").to(rows.device)]
        centroids = F.normalize(torch.where((members > 0).unsqueeze(-1), sums, random_rows), dim=-1)
    return centroids


def _compute_quantiles(x: Tensor, q: Tensor) -> Tensor:
    """Compute quantiles like `torch.quantile`, which accepts at most 2^24 values."""
    values = x.sort().values
    at = q.to(x.device) * (len(values) - 1)
    low = at.floor().long()
    return torch.lerp(values[low], values[(low + 1).clamp_max(len(values) - 1)], (at - low).to(values.dtype))
