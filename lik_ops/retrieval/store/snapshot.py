"""A snapshot of a corpus: all documents that were committed at one moment, even if a writer appends meanwhile."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ...core.arguments import short_repr
from ...core.segments import make_segment_rows
from ...formats.quantized import Quantized
from .layout import TensorSpec, Tokens, as_scorable, compute_offsets
from .manifest import Manifest
from .reading import ShardFile

_MAX_PIECES = 1024  # shards of a range that are read in place; the rows of more shards are copied


class Snapshot:
    """The shards of a manifest, which never change.

    Tensors of a snapshot must not be given to callers of the library, because callers may write to them.
    """

    def __init__(self, path: Path, manifest: Manifest, before: Snapshot | None = None, verify: bool = False) -> None:
        """Open the corpus at `path`.

        Shards that are also in `before` are not checked again.
        """
        self.path, self.manifest = path, manifest
        if manifest.codec is not None:
            manifest.codec.check(manifest.format, manifest.d)
        kept: list[ShardFile] = []
        if before is not None and manifest.shards[: len(before.shards)] == before.manifest.shards:
            kept = before.shards
        added = [ShardFile(path, shard, manifest) for shard in manifest.shards[len(kept) :]]
        for shard in added:
            shard.check(verify)
        self.shards: list[ShardFile] = [*kept, *added]

    @cached_property
    def starts(self) -> list[int]:
        """The first document of each shard, and the number of documents."""
        return [0, *accumulate(shard.documents for shard in self.manifest.shards)]

    def __len__(self) -> int:
        return self.starts[-1]

    @cached_property
    def lengths(self) -> Tensor:
        """int64 ``[N]``, the number of tokens of each document."""
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(shard.lengths for shard in self.shards)])

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int64 ``[N + 1]``, the bounds of the documents in all tokens."""
        return compute_offsets(self.lengths)

    @cached_property
    def ids(self) -> list[str] | list[int] | None:
        """The id of each document, or None if documents were appended without ids."""
        if not self.manifest.has_ids:
            return None
        found: list = []
        for shard in self.shards:
            found += _decode_ids(shard)
        return found

    def _places(self, begin: int, end: int) -> Iterator[tuple[int, dict[bool, slice]]]:
        """Yield each shard of the documents ``[begin, end)`` and its rows, of tokens (True) and documents (False)."""
        for i in range(bisect_right(self.starts, begin) - 1, bisect_left(self.starts, end) if begin < end else 0):
            first, last = self.starts[i : i + 2]
            a, b = max(begin, first), min(end, last)
            of_tokens = slice(*(int(self.cu_seqlens[j] - self.cu_seqlens[first]) for j in (a, b)))
            yield i, {True: of_tokens, False: slice(a - first, b - first)}

    def _copy_rows(self, places: list[tuple[int, dict[bool, slice]]], of: dict[str, TensorSpec]) -> dict[str, Tensor]:
        """Copy rows of some tensors of several shards, in order, to memory.

        One shard at a time is read.
        """
        rows = {which: sum(at[which].stop - at[which].start for _, at in places) for which in (True, False)}
        found, done = (
            {name: _allocate_empty(kept, rows[kept.of_tokens]) for name, kept in of.items()},
            {True: 0, False: 0},
        )
        for i, at in places:
            for name, x in _slice_tensors(self.shards[i].tensors(), at, of).items():
                begin = done[of[name].of_tokens]
                found[name][begin : begin + len(x)] = x
            done = {which: done[which] + at[which].stop - at[which].start for which in done}
        return found

    def pieces(self, begin: int, end: int) -> tuple[list[Tokens], Tensor]:
        """Return the tokens of the documents ``[begin, end)`` as mapped pieces, and their offsets.

        Args:
            begin: the first document.
            end: one past the last document.

        Returns:
            ``(pieces, offsets)``. Offsets are ``[end - begin + 1]`` and begin with 0.
        """
        layout = self.manifest.layout
        places = list(self._places(begin, end))
        if 0 < len(places) <= _MAX_PIECES:
            parts = [_slice_tensors(self.shards[i].tensors(), rows, layout.scored) for i, rows in places]
        else:
            parts = [self._copy_rows(places, layout.scored)]
        return [layout.tokens(part) for part in parts], self._offsets(begin, end)

    def documents(self, begin: int, end: int) -> tuple[Tensor | Quantized, Tensor]:
        """Return the documents ``[begin, end)`` in memory that the caller owns.

        A range within one shard is mapped again. Other ranges are copied.

        Args:
            begin: the first document.
            end: one past the last document.

        Returns:
            ``(packed, cu_seqlens)``: a tensor or a `Quantized`, and the bounds.
        """
        places, layout = list(self._places(begin, end)), self.manifest.layout
        if len(places) == 1:
            ((i, rows),) = places
            found = _slice_tensors(self.shards[i].map().tensors, rows, layout.tensors)
        else:
            found = self._copy_rows(places, layout.tensors)
        cu_seqlens = self._offsets(begin, end)
        tokens = as_scorable(layout.tokens(found), layout.dtype, cu_seqlens)
        if isinstance(tokens, Quantized):  # the codec is shared
            tokens = replace(tokens, codec=deepcopy(tokens.codec))
        return tokens, cu_seqlens

    def copy_document(self, index: int) -> Tensor:
        """Return the tokens ``[L, d]`` of one document, dequantized.

        A negative index counts from the end.

        Args:
            index: the index of the document.

        Returns:
            A copy of the tokens.

        Raises:
            IndexError: there is no such document.
        """
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"Corpus: index: expected an index of {len(self)} documents, got {short_repr(index)}")
        (tokens,), cu_seqlens = self.pieces(at, at + 1)
        return tokens.clone() if isinstance(tokens, Tensor) else tokens.quantized(cu_seqlens).dequantize()

    def gather_documents(self, chosen: Tensor, pinned: bool = False) -> tuple[Tokens, Tensor]:
        """Return the tokens of the documents ``chosen [n]``, packed, and their bounds ``[n + 1]``.

        Args:
            chosen: ascending indices of documents, int64 on the CPU.
            pinned: allocate pinned memory.

        Returns:
            ``(tokens, cu_seqlens)``.
        """
        rows, cu_seqlens = make_segment_rows(self.cu_seqlens[chosen], self.lengths[chosen])
        starts = torch.tensor(self.starts, device="cpu")
        first = torch.searchsorted(chosen, starts)
        # For tokens (True) and documents (False): the chosen rows, the first chosen row of each shard, and the first
        # row of each shard in the corpus.
        wanted = {True: (rows, cu_seqlens[first], self.cu_seqlens[starts]), False: (chosen, first, starts)}
        scored = self.manifest.layout.scored
        found = {name: _allocate_empty(kept, len(wanted[kept.of_tokens][0]), pinned) for name, kept in scored.items()}
        for i in first.diff().nonzero().flatten().tolist():
            tensors = self.shards[i].tensors()
            for name, kept in scored.items():
                at, bounds, origins = wanted[kept.of_tokens]
                part = slice(int(bounds[i]), int(bounds[i + 1]))
                if part.start < part.stop:
                    torch.index_select(tensors[name], 0, at[part] - origins[i], out=found[name][part])
        return self.manifest.layout.tokens(found), cu_seqlens

    def _offsets(self, begin: int, end: int) -> Tensor:
        """Return the bounds of the documents ``[begin, end)``, which begin with 0."""
        return self.cu_seqlens[begin : end + 1] - self.cu_seqlens[begin]


def _allocate_empty(kept: TensorSpec, rows: int, pinned: bool = False) -> Tensor:
    return torch.empty((rows, *kept.sizes), dtype=kept.dtype, device="cpu", pin_memory=pinned)


def _slice_tensors(tensors: dict[str, Tensor], rows: dict[bool, slice], of: dict[str, TensorSpec]) -> dict[str, Tensor]:
    """Return rows of some tensors of a shard as views."""
    return {name: tensors[name][rows[kept.of_tokens]] for name, kept in of.items()}


def _decode_ids(shard: ShardFile) -> list:
    """Return the ids of a shard."""
    count, text = shard.shard.documents, shard.read_ids()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shard.at}: the shard is corrupt: ids: {error}") from error
    if not isinstance(found, list) or len(found) != count or not is_id_list(found):
        raise ValueError(f"{shard.at}: the shard is corrupt: ids: expected a list of {count} strings or integers")
    return found


def is_id_list(x: list) -> bool:
    """Return whether the items are all strings or all integers."""
    return all(type(each) is str for each in x) or all(type(each) is int for each in x)
