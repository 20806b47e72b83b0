"""`Corpus`: packed documents on disk, as safetensors shards and a manifest that names the ones that count.

What a writer leaves behind when it is killed is not in the manifest, so no reader sees it, and the next one removes it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._layout import DTYPES
from . import storage
from .storage import Manifest, Shard

Ids = Sequence[str] | Sequence[int]


class Corpus:
    """Token embeddings of documents in a directory, appended a shard at a time and read by memory-mapping.

    Made by `Corpus.create` and `Corpus.open`; needs ``pip install lik-ops[retrieval]``. What was committed, that is,
    what `append` has returned for, survives a crash of the process or the machine while more is written. One process
    may append at a time (a lock that ends with its process, on systems that have ``fcntl``); any number may read, each
    sees what had been committed when it opened the corpus.

    Attributes:
        path: the directory.
        d: features of a token.
        dtype: of the embeddings.
        lengths: int64 ``[N]``, the number of tokens of each document.
        cu_seqlens: int64 ``[N + 1]``, where each document begins in all tokens of the corpus, and their number.

    Example:
        >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float16)
        >>> corpus.append([torch.randn(n, 128).half() for n in (3, 0, 7)], ids=["a", "b", "c"])
        >>> packed, cu_seqlens = lik_ops.Corpus.open("corpus").documents(1, 3)
        >>> packed.shape, cu_seqlens.tolist()
        (torch.Size([7, 128]), [0, 0, 7])
    """

    path: Path
    lengths: Tensor
    cu_seqlens: Tensor

    def __init__(self, path: Path, manifest: Manifest, *, verify: bool = False) -> None:
        self.path = path
        self._load(manifest, verify)

    @classmethod
    def create(cls, path: str | os.PathLike[str], d: int, dtype: torch.dtype) -> Corpus:
        """Make an empty corpus in a directory, which is made too if it does not exist.

        Raises:
            FileExistsError: there is a corpus already.
            TypeError: `dtype` is not float16, bfloat16, float32 or float64.
            ValueError: `d` is below 1.
        """
        if isinstance(d, bool) or not isinstance(d, int):
            raise TypeError(f"Corpus.create: d: expected an int, got {type(d).__name__}")
        if d < 1:
            raise ValueError(f"Corpus.create: d: expected 1 or more, got {d}")
        if dtype not in DTYPES:
            raise TypeError(f"Corpus.create: dtype: expected float16, bfloat16, float32 or float64, got {dtype}")
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        with storage.locked(path):
            if (path / storage.MANIFEST).exists():
                raise FileExistsError(f"Corpus.create: path: expected no corpus there, found {path / storage.MANIFEST}")
            manifest = Manifest(d=d, dtype=dtype)
            manifest.write(path)
        return cls(path, manifest)

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = False) -> Corpus:
        """Open the corpus in a directory. Shards are checked for their size; with `verify`, read and checked whole.

        Raises:
            FileNotFoundError: there is no corpus.
            ValueError: the manifest or a shard is truncated, corrupt or missing; the message has its path.
        """
        path = Path(path)
        return cls(path, Manifest.read(path), verify=verify)

    def _load(self, manifest: Manifest, verify: bool) -> None:
        manifest.check_shards(self.path, verify)
        self._manifest = manifest
        opened = getattr(self, "_opened", {})
        self._opened: dict[str, Any] = {x.file: opened[x.file] for x in manifest.shards if x.file in opened}
        self._ids: list[str] | list[int] | None = None
        lengths = [self._file(shard).get_tensor(storage.LENGTHS) for shard in manifest.shards]
        self.lengths = torch.cat(lengths) if lengths else torch.empty(0, dtype=torch.int64)
        self.cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        self._starts = [0, *accumulate(shard.documents for shard in manifest.shards)]

    @property
    def d(self) -> int:
        return self._manifest.d

    @property
    def dtype(self) -> torch.dtype:
        return self._manifest.dtype

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def __repr__(self) -> str:
        tokens = int(self.cu_seqlens[-1])
        return f"Corpus({str(self.path)!r}, {len(self)} documents, {tokens} tokens, d={self.d}, {self.dtype})"

    @property
    def ids(self) -> list[str] | list[int] | None:
        """The id of each document; None if they were appended without any."""
        if self._manifest.has_ids and self._ids is None:
            found: list = []
            for shard in self._manifest.shards:
                found += json.loads(self._file(shard).get_tensor(storage.IDS).numpy().tobytes())
            self._ids = found
        return self._ids

    def documents(self, begin: int = 0, end: int | None = None) -> tuple[Tensor, Tensor]:
        """The documents ``[begin, end)``, to the last one if `end` is None.

        Returns:
            ``(packed, cu_seqlens)``: their tokens ``[T, d]`` on the CPU and int64 ``[end - begin + 1]``, where each of
            them begins in `packed`. A range within one shard is a view of mapped memory, of which pages are read when
            they are used; writing to it does not change the corpus.

        Raises:
            ValueError: not ``0 <= begin <= end <= len(corpus)``.
        """
        end = len(self) if end is None else end
        if not 0 <= begin <= end <= len(self):
            raise ValueError(
                f"Corpus.documents: begin, end: expected 0 <= begin <= end <= {len(self)}, got {begin}, {end}"
            )
        parts, cu_seqlens = self._pieces(begin, end)
        return parts[0] if len(parts) == 1 else torch.cat(parts), cu_seqlens

    def _pieces(self, begin: int, end: int) -> tuple[list[Tensor], Tensor]:
        """`documents`, with the tokens where each shard has them."""
        offsets = self.cu_seqlens[begin : end + 1]
        parts = []
        for shard, first, last in zip(self._manifest.shards, self._starts[:-1], self._starts[1:], strict=True):
            if first < end and begin < last:
                origin = int(self.cu_seqlens[first])
                a, b = (int(self.cu_seqlens[i]) - origin for i in (max(begin, first), min(end, last)))
                parts.append(self._file(shard).get_slice(storage.TOKENS)[a:b])
        return parts or [torch.empty(0, self.d, dtype=self.dtype)], offsets - offsets[0]

    def append(
        self,
        documents: Sequence[Tensor] | Tensor,
        ids: Ids | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> None:
        """Commit documents as one shard: when this returns, they are on the disk.

        Args:
            documents: a list of ``[L_i, d]`` tensors of the corpus's dtype, on any device; or all of them packed,
                ``[T, d]``, with `lengths`.
            ids: a string each, or an integer each; in all appends or in none. They are not compared with each other.
            lengths: integers ``[n]`` that add up to T, where `documents` is packed.

        Raises:
            OSError: of the disk; whether the documents are in the corpus is then seen by opening it.
            RuntimeError: another process, or another thread, is appending.
            TypeError: a dtype or type is wrong.
            ValueError: a size is wrong, or ids are missing or unexpected; or the corpus is corrupt, see `open`.
        """
        packed, counts = self._packed(documents, lengths)
        encoded = _encoded_ids(ids, len(counts))
        with storage.locked(self.path):
            manifest = Manifest.read(self.path)  # another process may have appended since
            if (manifest.d, manifest.dtype) != (self.d, self.dtype):
                raise ValueError(f"{self.path}: expected a corpus of d={self.d}, {self.dtype}: it was made anew")
            if len(counts):
                if manifest.shards and manifest.has_ids != (encoded is not None):
                    expected = f"{len(counts)} of them, as before" if manifest.has_ids else "None, as before"
                    raise ValueError(
                        f"Corpus.append: ids: expected {expected}, got {'None' if ids is None else 'some'}"
                    )
                storage.remove_leftovers(self.path, manifest)
                shard = self._write_shard(packed, counts, encoded, len(manifest.shards))
                manifest.shards.append(shard)
                manifest.has_ids = encoded is not None
                manifest.write(self.path)
        self._load(manifest, verify=False)

    def _packed(self, documents: Any, lengths: Any) -> tuple[Tensor, Tensor]:
        """The documents' tokens ``[T, d]`` on the CPU, and the length of each."""
        op = "Corpus.append"
        if isinstance(documents, Tensor):
            if lengths is None:
                raise ValueError(f"{op}: lengths: expected the length of each document in the packed tensor, got None")
            counts = torch.as_tensor(lengths).detach().cpu()
            if counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
                if counts.numel():
                    raise TypeError(f"{op}: lengths: expected integers, got {counts.dtype}")
                counts = counts.long()
            counts = counts.long()
            self._check_tokens("documents", documents)
            if counts.dim() != 1 or bool((counts < 0).any()) or int(counts.sum()) != documents.shape[0]:
                raise ValueError(
                    f"{op}: lengths: expected [n], not negative, that add up to {documents.shape[0]} tokens,"
                    f" got {list(counts.shape)} that add up to {int(counts.sum())}"
                )
            return documents.detach().cpu().contiguous(), counts
        if lengths is not None:
            raise ValueError(f"{op}: lengths: expected None beside a list of documents")
        documents = list(documents)
        for i, document in enumerate(documents):
            self._check_tokens(f"documents[{i}]", document)
        empty = torch.empty(0, self.d, dtype=self.dtype)
        counts = torch.tensor([document.shape[0] for document in documents], dtype=torch.int64)
        return torch.cat([empty, *(document.detach().cpu() for document in documents)]), counts

    def _check_tokens(self, name: str, x: Any) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"Corpus.append: {name}: expected a Tensor, got {type(x).__name__}")
        if x.dtype != self.dtype:
            raise TypeError(f"Corpus.append: {name}: expected {self.dtype}, got {x.dtype}")
        if x.dim() != 2 or x.shape[1] != self.d:
            raise ValueError(f"Corpus.append: {name}: expected [L, {self.d}], got {list(x.shape)}")

    def _write_shard(self, packed: Tensor, counts: Tensor, encoded: bytes | None, number: int) -> Shard:
        tensors = {storage.TOKENS: packed, storage.LENGTHS: counts}
        if encoded is not None:
            tensors[storage.IDS] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        # A name of its own: a reader may still have a shard open that was removed and is written anew.
        name = f"{storage.SHARD_PREFIX}{number:06d}-{secrets.token_hex(4)}{storage.SHARD_SUFFIX}"
        nbytes, checksum = storage.write_tensors(self.path / name, tensors)
        return Shard(name, nbytes, checksum, len(counts), packed.shape[0])

    def _file(self, shard: Shard) -> Any:
        if shard.file not in self._opened:
            self._opened[shard.file] = storage.open_shard(self.path, shard, self._manifest)
        return self._opened[shard.file]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "manifest": self._manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["manifest"])  # type: ignore[misc]


def _encoded_ids(ids: Any, count: int) -> bytes | None:
    if ids is None:
        return None
    ids = list(ids)
    if len(ids) != count:
        raise ValueError(f"Corpus.append: ids: expected {count}, one for each document, got {len(ids)}")
    if not (all(type(x) is str for x in ids) or all(type(x) is int for x in ids)):
        raise TypeError("Corpus.append: ids: expected str or int, all alike")
    return json.dumps(ids, ensure_ascii=False).encode("utf-8", "surrogatepass")
