"""What a reader sees of a corpus: all that had been committed at one moment, whoever appends meanwhile."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ..segments import rows_of
from .manifest import Manifest
from .storage import Opened, open_shard


class Snapshot:
    """The shards of a manifest, opened; nothing in it changes, and its tensors are not for callers, who may write."""

    def __init__(self, path: Path, manifest: Manifest, before: Snapshot | None = None, verify: bool = False) -> None:
        """Of the corpus at `path`. Shards that are in `before` as well are not opened, or looked at, again."""
        self.path, self.manifest = path, manifest
        kept = [] if before is None else before.shards
        if before is None or manifest.shards[: len(kept)] != before.manifest.shards:
            kept = []
        opened = [open_shard(path, shard, manifest, verify) for shard in manifest.shards[len(kept) :]]
        self.shards: list[Opened] = [*kept, *opened]

    @cached_property
    def starts(self) -> list[int]:
        """Where the documents of each shard begin, and their number."""
        return [0, *accumulate(shard.documents for shard in self.manifest.shards)]

    def __len__(self) -> int:
        return self.starts[-1]

    @cached_property
    def lengths(self) -> Tensor:
        """int64 ``[N]``."""
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(shard.lengths for shard in self.shards)])

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int64 ``[N + 1]``."""
        return offsets(self.lengths)

    @cached_property
    def for_callers(self) -> tuple[Tensor, Tensor]:
        """`lengths` and `cu_seqlens` once more."""
        return self.lengths.clone(), self.cu_seqlens.clone()

    @cached_property
    def ids(self) -> list[str] | list[int] | None:
        """The id of each document; None if they were appended without any."""
        if not self.manifest.has_ids:
            return None
        found: list = []
        for shard in self.shards:
            found += _decoded(shard)
        return found

    def _places(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Where the documents ``[begin, end)`` lie: ``(shard, first row, last row + 1)``."""
        for i in range(bisect_right(self.starts, begin) - 1, bisect_left(self.starts, end) if begin < end else 0):
            first, last = self.starts[i : i + 2]
            a, b = (int(self.cu_seqlens[j] - self.cu_seqlens[first]) for j in (max(begin, first), min(end, last)))
            yield i, a, b

    def pieces(self, begin: int, end: int) -> tuple[list[Tensor], Tensor]:
        """The tokens of the documents ``[begin, end)``, where shards have them mapped, and their offsets."""
        parts = [self.shards[i].tokens[a:b] for i, a, b in self._places(begin, end)]
        return parts or [self._rows(0)], self._offsets(begin, end)

    def documents(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """`pieces` as one tensor, which is the caller's: mapped anew if it is of one shard, else copied."""
        places = list(self._places(begin, end))
        if len(places) == 1:
            ((i, a, b),) = places
            return open_shard(self.path, self.manifest.shards[i], self.manifest).tokens[a:b], self._offsets(begin, end)
        return torch.cat([self._rows(0), *(self.shards[i].tokens[a:b] for i, a, b in places)]), self._offsets(
            begin, end
        )

    def copy_of(self, index: int) -> Tensor:
        """The tokens ``[L, d]`` of one document, counted from the end if below 0."""
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"Corpus: index: expected that of one of {len(self)} documents, got {index}")
        ((i, a, b),) = self._places(at, at + 1)
        return self.shards[i].tokens[a:b].clone()

    def gathered(self, chosen: Tensor, pinned: bool = False) -> tuple[Tensor, Tensor]:
        """The tokens of the documents ``chosen [n]``, ascending, behind one another; where each begins ``[n + 1]``."""
        rows, cu_seqlens = rows_of(self.cu_seqlens[chosen], self.lengths[chosen])
        packed = self._rows(len(rows), pinned)
        starts = torch.tensor(self.starts, device="cpu")
        bounds = cu_seqlens[torch.searchsorted(chosen, starts)].tolist()
        origins = self.cu_seqlens[starts].tolist()
        for i, shard in enumerate(self.shards):
            part = slice(bounds[i], bounds[i + 1])
            if part.start < part.stop:
                torch.index_select(shard.tokens, 0, rows[part] - origins[i], out=packed[part])
        return packed, cu_seqlens

    def _rows(self, count: int, pinned: bool = False) -> Tensor:
        shape, dtype = (count, self.manifest.d), self.manifest.dtype
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)

    def _offsets(self, begin: int, end: int) -> Tensor:
        return self.cu_seqlens[begin : end + 1] - self.cu_seqlens[begin]


def offsets(lengths: Tensor) -> Tensor:
    """Where each of packed documents begins and the last one ends, of their int64 lengths."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _decoded(shard: Opened) -> list:
    assert shard.ids is not None
    count = shard.lengths.shape[0]
    try:
        found = json.loads(shard.ids.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shard.at}: the shard is corrupt: ids: {error}") from error
    if not isinstance(found, list) or len(found) != count or not are_ids(found):
        raise ValueError(f"{shard.at}: the shard is corrupt: ids: expected a list of {count} strings or integers")
    return found


def are_ids(x: list) -> bool:
    """Whether they are all strings, or all integers."""
    return all(type(each) is str for each in x) or all(type(each) is int for each in x)
