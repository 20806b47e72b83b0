"""Changes of a corpus other than appends: documents that are marked as deleted, and shards that are written again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import torch

from ...core.arguments import short_repr
from . import files
from .append import commit_shard, encode_ids
from .manifest import Manifest, ShardEntry, Tombstones
from .snapshot import Snapshot

# Shards up to this size are merged. A merge holds them in memory, and so did the appends of larger shards.
MERGED_BYTES = 256 << 20


def commit_manifest(writer: files.Writer, manifest: Manifest) -> None:
    """Write a manifest that lists the same shards."""
    with writer.reserve_file(len(manifest.shards)) as (directory, _):
        files.write_manifest(directory, manifest)


def mark_deleted(op: str, snapshot: Snapshot, ids: list) -> Manifest:
    """Return the manifest without all documents that have one of these ids. It is not written yet.

    Raises:
        ValueError: no document has one of the ids, or documents have no ids.
    """
    manifest = snapshot.manifest
    if ids and manifest.shards and not manifest.has_ids:
        raise ValueError(f"{op}: ids: expected a corpus whose documents have ids, got one without: {snapshot.path}")
    missing, shards = dict.fromkeys(ids), []
    id_set = set(missing)
    for i, shard in enumerate(manifest.shards if ids else ()):
        shard_ids = snapshot.shard_ids(i)
        positions = [at for at, x in enumerate(shard_ids) if x in id_set]
        if positions:
            for at in positions:
                missing.pop(shard_ids[at], None)
            deleted = torch.zeros(shard.documents, dtype=torch.bool, device="cpu")
            if shard.deleted is not None:
                deleted |= shard.deleted.mask(shard.documents)
            deleted[snapshot.shard_rows(i, torch.tensor(positions, device="cpu"))] = True
            shard = shard._replace(deleted=Tombstones.from_mask(deleted, snapshot.shard_file(i).lengths))
        shards.append(shard)
    if missing:
        first, *more = missing
        suffix = f" and {len(more)} more" if more else ""
        raise ValueError(f"{op}: ids: expected ids of documents in the corpus, got {short_repr(first)}{suffix}")
    return replace(manifest, shards=tuple(shards)) if ids else manifest


def compact(op: str, writer: files.Writer, snapshot: Snapshot) -> Manifest:
    """Write the documents of shards with deleted documents, and of small shards, to new shards.

    After the commit of each new shard, the files that it replaces are removed. Committed shards stay after an error.

    Returns:
        The new manifest, which is on the disk.
    """
    manifest, layout, position = snapshot.manifest, snapshot.manifest.layout, 0
    writer.remove_leftovers()  # even if there is nothing to write
    lengths = snapshot.lengths  # read before any file is removed
    for begin, end in list(_group_shards(snapshot)):
        if end - begin == 1 and manifest.shards[position].deleted is None:
            position += 1
            continue
        for i in range(begin, end):
            snapshot.shard_file(i).verify()  # a damaged shard must not get a new checksum
        documents = torch.arange(snapshot.starts[begin], snapshot.starts[end], device="cpu")
        ids = [x for i in range(begin, end) for x in snapshot.shard_ids(i)] if manifest.has_ids else None
        tensors, encoded = snapshot.copy_rows(documents, layout.tensors), encode_ids(op, ids, len(documents))
        shard_slice = slice(position, position + end - begin)
        manifest = commit_shard(op, writer, manifest, tensors, lengths[documents], encoded, shard_slice)
        position += int(len(documents) > 0)
    return manifest


def _group_shards(snapshot: Snapshot) -> Iterator[tuple[int, int]]:
    """Yield ranges of shards whose documents fit one shard of `MERGED_BYTES`. A larger shard has its own range.

    The ids of a range have one type. Earlier releases appended ids of both types to one corpus.
    """
    manifest = snapshot.manifest
    begin, ends = 0, [0, *accumulate(_count_bytes(manifest, shard) for shard in manifest.shards)]
    for end in range(1, len(ends)):
        is_full = end == len(manifest.shards) or ends[end + 1] - ends[begin] > MERGED_BYTES
        if is_full or snapshot.id_type(end) is not snapshot.id_type(begin):
            yield begin, end
            begin = end


def _count_bytes(manifest: Manifest, shard: ShardEntry) -> int:
    """Return the bytes of the documents of a shard that are not deleted, without their ids."""
    layout = manifest.layout
    return shard.tokens_left * layout.nbytes(True) + shard.documents_left * (layout.nbytes(False) + files.LENGTH_BYTES)
