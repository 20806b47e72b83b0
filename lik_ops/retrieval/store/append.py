"""Appending to a corpus: the documents as tensors of a shard, and the commit of the shard."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...core.arguments import check_strided, describe_non_tensor, short_repr
from ...formats.quantized import Quantized
from .. import arguments
from . import files
from .codecs import is_same_codec
from .layout import StorageLayout
from .manifest import Manifest
from .reading import is_id_list

Ids: TypeAlias = Sequence[str] | Sequence[int]


def commit_shard(
    op: str,
    writer: files.Writer,
    manifest: Manifest,
    tensors: dict[str, Tensor],
    counts: Tensor,
    ids: bytes | None,
    replaced: slice | None = None,
) -> Manifest:
    """Write one shard and the manifest that contains it, and return the manifest. Both are on the disk then.

    The shard replaces the shards `replaced`, whose files are removed after the commit. None appends. Without documents,
    only the manifest is written. `counts` is int64 ``[n]``, the number of tokens of each document.

    Raises:
        ValueError: ids are missing or unexpected.
    """
    if manifest.shards and manifest.has_ids != (ids is not None):
        expected = f"{len(counts)} of them, as before" if manifest.has_ids else "None, as before"
        raise ValueError(f"{op}: ids: expected {expected}, got {'None' if ids is None else 'some'}")
    tensors = {**tensors, files.LENGTHS: counts}
    if ids is not None:
        tensors[files.IDS] = torch.frombuffer(bytearray(ids), dtype=torch.uint8)
    shards, shard_slice = list(manifest.shards), slice(len(manifest.shards), None) if replaced is None else replaced
    with writer.reserve_file(shard_slice.start, [shard.file for shard in shards[shard_slice]]) as (directory, name):
        shards[shard_slice] = [files.write_shard(directory, name, tensors)] if len(counts) else []
        manifest = replace(manifest, has_ids=ids is not None, shards=tuple(shards))
        files.write_manifest(directory, manifest)
    return manifest


def pack_documents(op: str, layout: StorageLayout, documents: Any, lengths: Any) -> tuple[Tensor | Quantized, Tensor]:
    """Return the documents of `Corpus.append` packed on the CPU, and the length of each as int64 ``[n]``.

    Raise TypeError or ValueError, naming the argument, unless they fit the layout.
    """
    if isinstance(documents, Quantized):
        _check_quantized(op, layout, documents)
        counts = _check_lengths(op, lengths, len(documents))
        for name in ("error", "norm"):
            x = getattr(documents, name)
            if x is None or x.shape != counts.shape:
                actual = "None" if x is None else list(x.shape)
                raise ValueError(
                    f"{op}: documents: expected the {name} of {len(counts)} documents, as `quantize` finds it with"
                    f" cu_seqlens_d, got {actual}"
                )
        documents = documents.to("cpu")
        tensors: dict[str, Any] = {name: x.resolve_neg() for name, x in documents.tensors().items()}
        return replace(documents, **tensors), counts
    if isinstance(documents, Tensor) and not documents.is_nested:
        _check_tokens(op, layout, "documents", documents)
        return documents.detach().cpu().resolve_neg().contiguous(), _check_lengths(op, lengths, documents.shape[0])
    if lengths is not None:
        raise ValueError(f"{op}: lengths: expected None with a list of documents")
    if isinstance(documents, Tensor):
        documents = documents.unbind()
    documents = _as_list(op, "documents", "tensors", documents)
    for i, document in enumerate(documents):
        _check_tokens(op, layout, f"documents[{i}]", document)
    empty = torch.empty(0, layout.d, dtype=layout.dtype, device="cpu")
    counts = torch.tensor([document.shape[0] for document in documents], dtype=torch.int64, device="cpu")
    return torch.cat([empty, *(document.detach().cpu() for document in documents)]), counts


def _check_lengths(op: str, lengths: Any, tokens: int) -> Tensor:
    """Return the lengths of packed documents as int64, after checking their sum."""
    if lengths is None:
        raise ValueError(f"{op}: lengths: expected the length of each document in the packed tensor, got None")
    counts = arguments.as_integers(op, "lengths", lengths)
    if counts.dim() != 1 or not files.has_total(counts, tokens):
        raise ValueError(
            f"{op}: lengths: expected [n], not negative, that add up to {tokens} tokens,"
            f" got {list(counts.shape)} that add up to {sum(counts.flatten().tolist())}"
        )
    return counts


def _check_tokens(op: str, layout: StorageLayout, name: str, x: Any) -> None:
    """Raise unless `x` is a tensor of tokens that fits the layout."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name}: expected a Tensor, got {describe_non_tensor(x)}")
    check_strided(op, name, x)
    if x.dtype != layout.dtype:
        raise TypeError(f"{op}: {name}: expected {layout.dtype}, got {x.dtype}: convert it with .to({layout.dtype})")
    if x.dim() != 2 or x.shape[1] != layout.d:
        raise ValueError(f"{op}: {name}: expected [L, {layout.d}], got {list(x.shape)}")
    if x.is_meta:
        raise ValueError(f"{op}: {name}: expected embeddings, got a meta tensor")


def _check_quantized(op: str, layout: StorageLayout, x: Quantized) -> None:
    """Raise unless quantized documents fit the layout."""
    if layout.format is None:
        raise TypeError(f"{op}: documents: expected tensors of {layout.dtype}, as in the corpus, got a Quantized")
    if (x.format, x.dtype) != (layout.format, layout.dtype):
        expected = f"{layout.format} of {layout.dtype}"
        raise TypeError(f"{op}: documents: expected {expected}, as in the corpus, got {x.format} of {x.dtype}")
    if layout.codec is not None and not (x.codec is not None and is_same_codec(x.codec, layout.codec.codec)):
        raise ValueError(f"{op}: documents: expected codes of the codec of the corpus, got codes of another codec")
    if x.dim() != 2 or x.d != layout.d:
        raise ValueError(f"{op}: documents: expected packed ones [T, {layout.d}], got {list(x.shape)}")
    if x.device.type == "meta":
        raise ValueError(f"{op}: documents: expected embeddings, got meta tensors")


def _as_list(op: str, name: str, item_kind: str, x: Any) -> list:
    """Return the items of an iterable. Strings, mappings and sets raise TypeError."""
    try:
        if not isinstance(x, (str, bytes, Set, Mapping)):
            x = iter(x)
    except TypeError:
        pass
    if not isinstance(x, Iterator):
        raise TypeError(f"{op}: {name}: expected a list of {item_kind}, got {type(x).__name__}")
    return list(x)


def encode_ids(op: str, ids: Any, count: int) -> bytes | None:
    """Return the ids of `count` documents in the encoding of shards, which is JSON in UTF-8, or None.

    Raises:
        TypeError: the ids are not all str or all int.
        ValueError: there are not `count` ids, or an integer is too large.
    """
    if ids is None:
        return None
    ids = check_ids(op, ids)
    if len(ids) != count:
        raise ValueError(f"{op}: ids: expected {count}, one for each document, got {len(ids)}")
    try:
        return json.dumps(ids, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except ValueError:
        # JSON integers are decimal, and Python neither prints nor reads longer ones.
        largest = short_repr(max((x for x in ids if isinstance(x, int)), key=abs))
        expected = f"integers of at most {sys.get_int_max_str_digits()} digits"
        raise ValueError(f"{op}: ids: expected {expected}, got {largest}") from None


def check_id_type(op: str, ids: Any, expected: type | None) -> None:
    """Raise TypeError unless ids, which `encode_ids` accepted, have the type of ids that were appended before."""
    if expected is not None and type(ids[0]) is not expected:
        raise TypeError(f"{op}: ids: expected {expected.__name__}, as before, got {type(ids[0]).__name__}")


def check_ids(op: str, ids: Any) -> list:
    """Return ids as a list. Raise TypeError unless they are all str or all int."""
    ids = _as_list(op, "ids", "str or int", ids)
    if not is_id_list(ids):
        kinds = sorted({type(x).__name__ for x in ids})
        raise TypeError(f"{op}: ids: expected str or int, all alike, got {', '.join(kinds)}")
    return ids
