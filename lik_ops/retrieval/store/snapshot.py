"""A snapshot of a corpus: all documents that were committed at one moment, even if a writer changes it meanwhile."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.arguments import short_repr
from ...core.segments import compute_offsets, make_segment_rows
from ...formats.quantized import Quantized
from .layout import TensorSpec, Tokens, as_scorable
from .manifest import Manifest
from .reading import ShardFile

_MAX_PIECES = 1024  # pieces of a range that are read in place; the rows of more pieces are copied


class _LiveRows(NamedTuple):
    """The documents of a shard that are not deleted, in order."""

    rows: Tensor  # int64 [n], their rows in the shard
    lengths: Tensor  # int64 [n], their tokens
    firsts: Tensor  # int64 [n], their first tokens in the shard


class Snapshot:
    """The shards of a manifest, which never change, without the documents that the manifest marks as deleted.

    Documents are numbered without gaps. Tensors of a snapshot must not be given to callers of the library, because
    callers may write to them.
    """

    def __init__(self, path: Path, manifest: Manifest, before: Snapshot | None = None, verify: bool = False) -> None:
        """Open the corpus at `path`.

        Shards that are also in `before` are not checked again. The names of other shards are looked up. With `verify`,
        their files are read.
        """
        self.path, self.manifest = path, manifest
        if manifest.codec is not None:
            manifest.codec.check(manifest.format, manifest.d)
        self._files: list[ShardFile | None] = [None] * len(manifest.shards)
        count = 0 if before is None else len(before._files)
        new_shards: Sequence[int] = range(count, len(manifest.shards))
        if before is not None and manifest.shards[:count] == before.manifest.shards:
            self._files[:count] = before._files
        elif before is not None:
            shards = [shard.without_tombstones() for shard in before.manifest.shards]
            files_by_shard = dict(zip(shards, before._files, strict=True))
            shards = [shard.without_tombstones() for shard in manifest.shards]
            self._files = [files_by_shard.get(shard) for shard in shards]
            new_shards = [i for i, shard in enumerate(shards) if shard not in files_by_shard]
        self._live: dict[int, _LiveRows | None] = {}
        if verify:
            for i in new_shards:
                self.shard_file(i).verify()
            _ = self.lengths
        else:
            self._find_files(new_shards)

    def _find_files(self, added: Sequence[int]) -> None:
        """Raise ValueError, with its path, if the file of one of these shards is missing."""
        names = {self.manifest.shards[i].file: i for i in added}
        missing = set(names)
        if len(names) > 1:
            with suppress(OSError):  # a directory whose files may be read, but not listed
                missing.difference_update(os.listdir(self.path))
        # A list of the directory may lack files while others are renamed, so their names are looked up.
        for name in missing:
            self.shard_file(names[name]).check_exists()

    def shard_file(self, i: int) -> ShardFile:
        """Return shard `i` as readers see it."""
        file = self._files[i]
        if file is None:
            file = self._files[i] = ShardFile(self.path, self.manifest.shards[i].without_tombstones(), self.manifest)
        return file

    @classmethod
    def open_current(cls, path: Path, verify: bool = False) -> Snapshot:
        """Open the corpus at `path` as it is now, even if a writer removes shards between two reads."""
        manifest = Manifest.read(path)
        while True:
            try:
                return cls(path, manifest, verify=verify)
            except ValueError:
                previous, manifest = manifest, Manifest.read(path, manifest)
                if manifest == previous:
                    raise

    @cached_property
    def starts(self) -> list[int]:
        """The first document of each shard, and the number of documents."""
        return [0, *accumulate(shard.documents_left for shard in self.manifest.shards)]

    def __len__(self) -> int:
        return self.starts[-1]

    def _live_rows(self, i: int) -> _LiveRows | None:
        """Return the documents of a shard that are not deleted, or None if no document of the shard is deleted."""
        if i not in self._live:
            deleted, file = self.manifest.shards[i].deleted, self.shard_file(i)
            live_rows = None
            if deleted is not None:
                mask, lengths = deleted.mask(file.shard.documents), file.lengths
                if int(lengths[mask].sum()) != deleted.tokens:
                    raise ValueError(f"{file.at}: the shard is corrupt: expected {deleted.tokens} deleted tokens")
                rows = (~mask).nonzero().flatten()
                live_rows = _LiveRows(rows, lengths[rows], compute_offsets(lengths)[rows])
            self._live[i] = live_rows
        return self._live[i]

    @cached_property
    def lengths(self) -> Tensor:
        """int64 ``[N]``, the number of tokens of each document."""
        parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for i in range(len(self._files)):
            live_rows = self._live_rows(i)
            parts.append(self.shard_file(i).lengths if live_rows is None else live_rows.lengths)
        return torch.cat(parts)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int64 ``[N + 1]``, the bounds of the documents in all tokens."""
        return compute_offsets(self.lengths)

    @cached_property
    def ids(self) -> list[str] | list[int] | None:
        """The id of each document, or None if documents were appended without ids."""
        if not self.manifest.has_ids:
            return None
        return [x for i in range(len(self._files)) for x in self.shard_ids(i)]

    def id_type(self, i: int) -> type | None:
        """Return the type of the ids of a shard, or None without ids."""
        return type(self.shard_file(i).ids[0]) if self.manifest.has_ids else None

    def shard_ids(self, i: int) -> list:
        """Return the ids of the documents of a shard that are not deleted."""
        ids, live_rows = self.shard_file(i).ids, self._live_rows(i)
        return ids if live_rows is None else [ids[row] for row in live_rows.rows.tolist()]

    def shard_rows(self, i: int, documents: Tensor) -> Tensor:
        """Return the rows in shard `i` of documents, which count from the first document of the shard."""
        live_rows = self._live_rows(i)
        return documents if live_rows is None else live_rows.rows[documents]

    def _iterate_runs(self, begin: int, end: int) -> Iterator[tuple[int, dict[bool, slice]]]:
        """Yield each run of rows that has documents of ``[begin, end)``: its shard, and its rows.

        There are rows of tokens (True) and of documents (False). Deleted documents divide a shard into several runs.
        """
        for i in range(bisect_right(self.starts, begin) - 1, bisect_left(self.starts, end) if begin < end else 0):
            first, last = self.starts[i : i + 2]
            a, b = max(begin, first), min(end, last)
            live_rows = self._live_rows(i)
            if live_rows is None:
                token_rows = slice(*(int(self.cu_seqlens[j] - self.cu_seqlens[first]) for j in (a, b)))
                yield i, {True: token_rows, False: slice(a - first, b - first)}
                continue
            rows, lengths, firsts = (x[a - first : b - first] for x in live_rows)
            breaks = ((rows.diff() != 1).nonzero().flatten() + 1).tolist()
            for c, e in pairwise([0, *breaks, len(rows)] if len(rows) else []):
                token_rows = slice(int(firsts[c]), int(firsts[e - 1] + lengths[e - 1]))
                yield i, {True: token_rows, False: slice(int(rows[c]), int(rows[e - 1]) + 1)}

    def pieces(self, begin: int, end: int) -> tuple[list[Tokens], Tensor]:
        """Return the tokens of the documents ``[begin, end)`` as mapped pieces, and their bounds, from 0 on."""
        layout = self.manifest.layout
        ranges = list(islice(self._iterate_runs(begin, end), _MAX_PIECES + 1))
        if 0 < len(ranges) <= _MAX_PIECES:
            parts = [_slice_tensors(self.shard_file(i).tensors(), rows, layout.scored_tensors) for i, rows in ranges]
        else:
            parts = [self.copy_rows(torch.arange(begin, end, device="cpu"), layout.scored_tensors)]
        return [layout.tokens(part) for part in parts], self._offsets(begin, end)

    def documents(self, begin: int, end: int) -> tuple[Tensor | Quantized, Tensor]:
        """Return the documents ``[begin, end)`` in memory that the caller owns, packed, and their bounds.

        A range within one shard is mapped again. Other ranges are copied.
        """
        ranges, layout = list(islice(self._iterate_runs(begin, end), 2)), self.manifest.layout
        if len(ranges) == 1:
            ((i, rows),) = ranges
            tensors = _slice_tensors(self.shard_file(i).map().tensors, rows, layout.tensors)
        else:
            tensors = self.copy_rows(torch.arange(begin, end, device="cpu"), layout.tensors)
        cu_seqlens = self._offsets(begin, end)
        tokens = as_scorable(layout.tokens(tensors), layout.dtype, cu_seqlens)
        if isinstance(tokens, Quantized):  # the codec is shared
            tokens = replace(tokens, codec=deepcopy(tokens.codec))
        return tokens, cu_seqlens

    def copy_document(self, index: int) -> Tensor:
        """Return a copy of the tokens ``[L, d]`` of one document, dequantized.

        A negative index counts from the end. IndexError is raised if there is no such document.
        """
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"Corpus: index: expected an index of {len(self)} documents, got {short_repr(index)}")
        (tokens,), cu_seqlens = self.pieces(at, at + 1)
        return tokens.clone() if isinstance(tokens, Tensor) else tokens.to_quantized(cu_seqlens).dequantize()

    def gather_documents(self, chosen: Tensor, pinned: bool = False) -> tuple[Tokens, Tensor]:
        """Return the tokens of the documents ``chosen [n]``, packed, and their bounds ``[n + 1]``.

        `chosen` is ascending, int64 on the CPU.
        """
        layout = self.manifest.layout
        tensors = self.copy_rows(chosen, layout.scored_tensors, pinned)
        return layout.tokens(tensors), compute_offsets(self.lengths[chosen])

    def copy_rows(self, chosen: Tensor, specs: dict[str, TensorSpec], pinned: bool = False) -> dict[str, Tensor]:
        """Copy the rows of some documents to memory, in the order of the documents, one shard at a time.

        `chosen` has ascending indices, int64 on the CPU. `specs` are the tensors to copy, by name.
        """
        bounds = torch.searchsorted(chosen, torch.tensor(self.starts, device="cpu")).tolist()
        offsets = compute_offsets(self.lengths[chosen])
        counts = {True: int(offsets[-1]), False: len(chosen)}
        copies = {
            name: torch.empty((counts[spec.of_tokens], *spec.sizes), dtype=spec.dtype, device="cpu", pin_memory=pinned)
            for name, spec in specs.items()
        }
        for i, (a, b) in enumerate(pairwise(bounds)):
            if a == b:
                continue
            documents, positions, live_rows = chosen[a:b], chosen[a:b] - self.starts[i], self._live_rows(i)
            if live_rows is None:
                firsts = self.cu_seqlens[documents] - self.cu_seqlens[self.starts[i]]
            else:
                firsts = live_rows.firsts[positions]
            rows = {False: self.shard_rows(i, positions), True: make_segment_rows(firsts, self.lengths[documents])[0]}
            targets = {False: slice(a, b), True: slice(int(offsets[a]), int(offsets[b]))}
            tensors = self.shard_file(i).tensors()
            for name, spec in specs.items():
                if len(rows[spec.of_tokens]):
                    out = copies[name][targets[spec.of_tokens]]
                    torch.index_select(tensors[name], 0, rows[spec.of_tokens], out=out)
        return copies

    def _offsets(self, begin: int, end: int) -> Tensor:
        """Return the bounds of the documents ``[begin, end)``, which begin with 0."""
        return self.cu_seqlens[begin : end + 1] - self.cu_seqlens[begin]


def _slice_tensors(
    tensors: dict[str, Tensor], rows: dict[bool, slice], specs: dict[str, TensorSpec]
) -> dict[str, Tensor]:
    """Return rows of some tensors of a shard as views."""
    return {name: tensors[name][rows[spec.of_tokens]] for name, spec in specs.items()}
