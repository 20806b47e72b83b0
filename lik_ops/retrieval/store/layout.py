"""The storage layout of a corpus: tokens in their own dtype, or in a format of `lik_ops.quantize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from ...core.arguments import check_choice
from ...core.segments import compute_offsets
from ...formats.quantize import quantize
from ...formats.quantized import Quantized
from ...formats.residual import ResidualCodec
from ...formats.table import ALL_FORMATS, FORMATS, FormatName, Residual
from .codecs import CodecFile

Scale: TypeAlias = Literal["token", "document"]
TOKENS = "tokens"
_SCALES = ("scale", "minimum")


class TensorSpec(NamedTuple):
    """A tensor of a shard, with one row for each token or for each document."""

    of_tokens: bool
    sizes: tuple[int, ...]  # the shape of a row
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of a row."""
        return prod(self.sizes) * self.dtype.itemsize


class EncodedDocuments(NamedTuple):
    """Packed documents in a quantized format, as shards store them."""

    layout: StorageLayout
    tensors: dict[str, Tensor]  # some tensors of the layout

    def to_quantized(self, cu_seqlens: Tensor) -> Quantized:
        """Return the documents with these bounds, with one scale for each token, without waiting for the device."""
        layout, tensors = self.layout, dict[str, Any](self.tensors)
        assert layout.format is not None
        data = tensors["data"]
        if layout.scale == "document":
            lengths = cu_seqlens.to(data.device, non_blocking=True).diff()
            for name in _SCALES:
                if name in tensors:
                    tensors[name] = tensors[name].repeat_interleave(lengths, output_size=len(data))
        tensors["data"] = data.view(ALL_FORMATS[layout.format].dtype)
        if layout.codec is not None:
            tensors["codec"] = layout.codec.copy_to(data.device)
        return Quantized(**tensors, format=layout.format, d=layout.d, dtype=layout.dtype)


Tokens: TypeAlias = Tensor | EncodedDocuments


def join_pieces(pieces: Sequence[Tokens], join: Callable[[list[Tensor]], Tensor]) -> Tokens:
    """Return pieces, all tensors or all encoded, as one. `join` concatenates tensors."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return join([x for x in pieces if isinstance(x, Tensor)])
    numbers = [x for x in pieces if isinstance(x, EncodedDocuments)]
    return first._replace(tensors={name: join([x.tensors[name] for x in numbers]) for name in first.tensors})


def as_scorable(tokens: Tokens, dtype: torch.dtype, cu_seqlens: Tensor | None) -> Tensor | Quantized:
    """Return tokens in a form that scoring functions accept as D for queries of `dtype`."""
    if isinstance(tokens, Tensor):
        return tokens.to(dtype)
    assert cu_seqlens is not None
    return tokens.to_quantized(cu_seqlens)


@dataclass(frozen=True)
class StorageLayout:
    """The stored form of tokens ``[T, d]`` of `dtype`: the tokens, or codes in a format with scales."""

    d: int
    dtype: torch.dtype
    format: FormatName | Residual | None = None
    scale: Scale | None = None
    codec: CodecFile | None = None  # for residual codes

    def __str__(self) -> str:
        suffix = "" if self.format is None else f", {self.format} with a scale for each {self.scale}"
        if self.codec is not None:
            suffix = f", {self.format} of {len(self.codec.codec.centroids)} centroids"
        return f"d={self.d}, {self.dtype}{suffix}"

    @cached_property
    def scored_tensors(self) -> dict[str, TensorSpec]:
        """The tensors that scores depend on."""
        if self.format is None:
            return {TOKENS: TensorSpec(True, (self.d,), self.dtype)}
        spec, is_per_token = ALL_FORMATS[self.format], self.scale == "token"
        data = TensorSpec(True, (-(-self.d // spec.features_per_element),), spec.bytes)
        specs = {"data": data, "scale": TensorSpec(is_per_token, (), spec.scale)}
        if self.codec is not None:
            specs["codes"] = TensorSpec(True, (), torch.int32)
        return specs | ({"minimum": TensorSpec(is_per_token, (), torch.float32)} if spec.affine else {})

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """All tensors of a shard except its lengths and ids."""
        spec = TensorSpec(False, (), torch.float32)
        return self.scored_tensors | ({} if self.format is None else {"error": spec, "norm": spec})

    def nbytes(self, of_tokens: bool) -> int:
        """Return the bytes of the tensors that scores depend on, for each token or for each document."""
        return sum(x.nbytes for x in self.scored_tensors.values() if x.of_tokens == of_tokens)

    def tokens(self, tensors: dict[str, Tensor]) -> Tokens:
        """Return the tokens that are stored in these tensors."""
        return tensors[TOKENS] if self.format is None else EncodedDocuments(self, tensors)

    def encode(self, op: str, packed: Tensor | Quantized, lengths: Tensor) -> dict[str, Tensor]:
        """Encode packed documents on the CPU, or documents in the format of this layout, as the tensors of a shard.

        `lengths` is int64 ``[n]``, the number of tokens of each document.

        Raises:
            ValueError: documents in the format do not have one scale for each document, as this layout requires.
        """
        if isinstance(packed, Tensor):
            if self.format is None:
                return {TOKENS: packed}
            assert self.scale is not None
            format: Any = self.format if self.codec is None else self.codec.codec
            packed = quantize(packed, format, self.scale, cu_seqlens_d=compute_offsets(lengths))
        tensors = packed.tensors()
        if self.codec is not None:
            codes, count = tensors["codes"], len(self.codec.codec.centroids)
            tensors["codes"] = torch.where((codes >= 0) & (codes < count), codes, -1).int()
        for name, x in zip(_SCALES, packed.per_token(), strict=True):
            if x is not None:
                tensors[name] = self._select_scales(op, x.expand(packed.data.shape[0]), lengths)
        # Cloned, because safetensors rejects tensors that share memory.
        tensors = {
            name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items() if name != "data"
        }
        return {"data": packed.data.contiguous().view(self.scored_tensors["data"].dtype), **tensors}

    def _select_scales(self, op: str, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the stored scales, out of the scales of all tokens.

        These are all scales, or one for each document, which is arbitrary for a document without tokens.
        """
        if self.scale == "token":
            return x
        first = torch.cat([x, x.new_zeros(1)])[compute_offsets(lengths)[:-1]]
        if not torch.equal(*(y.contiguous().view(torch.uint8) for y in (first.repeat_interleave(lengths), x))):
            raise ValueError(f"{op}: documents: expected one scale for each document, got several in one")
        return first


def check_format(op: str, format: Any, scale: Any, or_none: bool = False) -> None:
    """Raise TypeError or ValueError, naming the argument, unless a corpus can store tokens in this format."""
    if isinstance(format, ResidualCodec):
        check_choice(op, "scale", scale, ("token",))
    elif format is not None or not or_none:
        check_choice(op, "format", format, tuple(FORMATS))
    if isinstance(scale, str) and scale == "tensor":
        raise ValueError(f"{op}: scale: expected 'token' or 'document', got 'tensor': shards have no scale in common")
    check_choice(op, "scale", scale, get_args(Scale))
    if format is None and scale != "token":
        raise ValueError(f"{op}: scale: expected 'token' without a format, got {scale!r}")
