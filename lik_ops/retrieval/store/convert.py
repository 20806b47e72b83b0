"""A corpus in fewer bytes: its documents quantised into another one, a shard at a time, on from where that ends."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from . import files
from .append import commit_shard, encode_ids
from .manifest import Manifest
from .snapshot import Snapshot


def convert(op: str, source: Snapshot, path: Path, target: Manifest) -> Snapshot:
    """Append to the corpus at `path` the documents of `source` that it lacks, in the format of `target`.

    Raises:
        RuntimeError: another process, or another thread, is writing there.
        ValueError: the corpus at `path` does not begin as `source` does, in that format.
    """
    made = Snapshot(path, Manifest.read(path))
    _check_prefix(op, source, made, target)
    if len(made) == len(source):
        return made
    with files.lock_corpus(path) as writer:
        manifest = Manifest.read(path, made.manifest)
        if manifest != made.manifest:  # another process may have written meanwhile
            made = Snapshot(path, manifest)
            _check_prefix(op, source, made, target)
        begin, ids = len(made), source.ids
        for end in source.starts:
            if end <= begin:
                continue
            lengths, (tokens, *_) = source.lengths[begin:end], source.pieces(begin, end)[0]
            assert isinstance(tokens, Tensor)  # one shard, which is not quantised
            tensors = manifest.layout.encoded(op, tokens, lengths)
            encoded = encode_ids(op, None if ids is None else ids[begin:end], end - begin)
            manifest, begin = commit_shard(op, writer, manifest, tensors, lengths, encoded), end
    return Snapshot(path, manifest, made)


def _check_prefix(op: str, source: Snapshot, made: Snapshot, target: Manifest) -> None:
    """Raise unless what there is of a conversion is one of the first documents of `source`."""
    if made.manifest.layout != target.layout:
        found = made.manifest.layout
        raise ValueError(f"{op}: path: expected a corpus of {target.layout}, got one of {found} in {made.path}")
    count = len(made)
    if count > len(source):
        raise ValueError(f"{op}: path: expected {len(source)} documents or fewer, got {count} in {made.path}")
    same = torch.equal(made.lengths, source.lengths[:count])
    if same and count:
        ids = source.ids
        same = made.ids == (None if ids is None else ids[:count])
    if same and made.lengths.any():
        # Documents of the same lengths may be others: the first tokens and the last ones are looked at.
        ends = made.lengths.nonzero().flatten()[[0, -1]]
        same = all(_has_same_codes(source, made, at) for at in ends.tolist())
    if not same:
        raise ValueError(f"{op}: path: expected the first documents of {source.path}, got others in {made.path}")


def _has_same_codes(source: Snapshot, made: Snapshot, index: int) -> bool:
    """Whether a document is what it is quantised to."""
    layout = made.manifest.layout
    (tokens,), cu_seqlens = source.pieces(index, index + 1)
    (found,), _ = made.pieces(index, index + 1)
    assert isinstance(tokens, Tensor) and not isinstance(found, Tensor)
    expected = layout.encoded("", tokens, cu_seqlens.diff())
    return all(torch.equal(expected[name], found.tensors[name]) for name in ("data", "codes") if name in expected)
