"""Conversion of a corpus: documents are quantized or pooled into another corpus, shard by shard, and can be resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.segments import compute_offsets
from . import files
from .append import commit_shard, encode_ids
from .layout import StorageLayout, join_pieces
from .manifest import Manifest
from .snapshot import Snapshot


class Pooling(NamedTuple):
    """The change of documents by `lik_ops.pool_tokens`."""

    pool: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # packed tokens and bounds to pooled tokens and bounds
    num_protected: int

    def agrees(self, expected: Tensor, actual: Tensor) -> bool:
        """Return whether two results for one document agree in the parts that no tie of distances changes."""
        prefix = slice(self.num_protected)
        return expected.shape == actual.shape and torch.equal(expected[prefix], actual[prefix])


def convert(op: str, source: Snapshot, path: Path, layout: StorageLayout, pooling: Pooling | None = None) -> Snapshot:
    """Append the documents of `source` that the corpus at `path` lacks, in this layout.

    With `pooling`, the documents are pooled first. Return a snapshot of the corpus at `path`.

    Raises:
        RuntimeError: another process or thread is writing there.
        ValueError: the corpus at `path` does not begin with the documents of `source` in that layout.
    """
    snapshot = Snapshot.open_current(path)
    _check_prefix(op, source, snapshot, layout, pooling)
    if len(snapshot) == len(source):
        return snapshot
    with files.lock_corpus(path) as writer:
        manifest = Manifest.read(path, snapshot.manifest)
        if manifest != snapshot.manifest:  # another process may have written meanwhile
            snapshot = Snapshot(path, manifest)
            _check_prefix(op, source, snapshot, layout, pooling)
        begin, ids = len(snapshot), source.ids
        for end in source.starts:
            if end <= begin:
                continue
            lengths, pieces = source.lengths[begin:end], source.pieces(begin, end)[0]
            tokens = pieces[0] if len(pieces) == 1 else join_pieces(pieces, torch.cat)
            assert isinstance(tokens, Tensor)  # unquantized
            if pooling is not None:
                tokens, bounds = pooling.pool(tokens, compute_offsets(lengths))
                lengths = bounds.diff()
            tensors = manifest.layout.encode(op, tokens, lengths)
            encoded = encode_ids(op, None if ids is None else ids[begin:end], end - begin)
            manifest, begin = commit_shard(op, writer, manifest, tensors, lengths, encoded), end
    return Snapshot(path, manifest, snapshot)


def _check_prefix(
    op: str, source: Snapshot, converted: Snapshot, layout: StorageLayout, pooling: Pooling | None
) -> None:
    """Raise unless `converted` is a conversion of the first documents of `source`."""
    if (actual := converted.manifest.layout) != layout:
        raise ValueError(f"{op}: path: expected a corpus of {layout}, got one of {actual} in {converted.path}")
    count = len(converted)
    if count > len(source):
        raise ValueError(f"{op}: path: expected {len(source)} documents or fewer, got {count} in {converted.path}")
    expected = source.lengths[:count]
    is_same = (
        torch.equal(converted.lengths, expected) if pooling is None else bool((converted.lengths <= expected).all())
    )
    if is_same and count:
        ids = source.ids
        is_same = converted.ids == (None if ids is None else ids[:count])
    if is_same and converted.lengths.any():
        # Equal lengths do not prove equal documents, so the first and the last document with tokens are compared.
        ends = converted.lengths.nonzero().flatten()[[0, -1]]
        is_same = all(_has_same_tokens(source, converted, at, pooling) for at in ends.tolist())
    if not is_same:
        raise ValueError(f"{op}: path: expected the first documents of {source.path}, got others in {converted.path}")


def _has_same_tokens(source: Snapshot, converted: Snapshot, index: int, pooling: Pooling | None) -> bool:
    """Return whether a document of `source` has the same codes and scales, or pooled tokens, in `converted`."""
    layout = converted.manifest.layout
    (tokens,), cu_seqlens = source.pieces(index, index + 1)
    (target_tokens,), _ = converted.pieces(index, index + 1)
    assert isinstance(tokens, Tensor)
    if pooling is not None:
        return isinstance(target_tokens, Tensor) and pooling.agrees(pooling.pool(tokens, cu_seqlens)[0], target_tokens)
    assert not isinstance(target_tokens, Tensor)
    expected = layout.encode("", tokens, cu_seqlens.diff())
    return all(_is_same(expected[name], x) for name, x in target_tokens.tensors.items())


def _is_same(expected: Tensor, actual: Tensor) -> bool:
    """Return whether codes are equal, and scales up to the rounding of a sum that another CPU adds in another order."""
    if expected.dtype != torch.float32:
        return torch.equal(expected, actual)
    return torch.allclose(expected, actual, rtol=1e-5, atol=0, equal_nan=True)
