"""`Corpus`: packed documents on disk, as safetensors shards and a manifest that names the ones that count.

What a writer leaves behind when it is killed is not in the manifest, so no reader sees it, and the next one removes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from ..arguments import DTYPES, check_flag, check_strided
from . import _rerank, arguments, storage
from .manifest import MANIFEST, Manifest
from .snapshot import Snapshot, are_ids

Ids = Sequence[str] | Sequence[int]
_LARGEST_D = 1 << 31


class Corpus:
    """Token embeddings of documents in a directory, appended a shard at a time and read by memory-mapping.

    Made by `Corpus.create` and `Corpus.open`; needs ``safetensors`` and ``numpy``. What was committed, that is, what
    `append` has returned for, survives a crash of the process or the machine while more is written. One process may
    append at a time (a lock that ends with its process, on systems that have ``fcntl``); any number may read. Each call
    sees what had been committed when the corpus was opened, or when `append` returned last; so does each iteration.

    ``len(corpus)`` is the number of documents, ``corpus[i]`` one of them, ``for document in corpus`` all, one by one.
    No tensor that a caller gets is memory of the corpus: writing to it changes neither its files nor what is read and
    scored later.

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
        >>> corpus[-1].shape, [x.shape[0] for x in corpus]
        (torch.Size([7, 128]), [3, 0, 7])
    """

    path: Path

    def __init__(self, path: Path, snapshot: Snapshot) -> None:
        self.path = path
        self._snapshot = snapshot  # replaced as a whole: whoever reads takes it once

    @classmethod
    def create(cls, path: str | os.PathLike[str], d: int, dtype: torch.dtype) -> Corpus:
        """Make an empty corpus in a directory that is empty, or does not exist and is made.

        Raises:
            FileExistsError: the directory is not empty.
            ModuleNotFoundError: safetensors or numpy is not installed.
            TypeError: `dtype` is not float16, bfloat16, float32 or float64, or an argument is of another type.
            ValueError: `d` is below 1.
        """
        op = "Corpus.create"
        path, d = _path(op, path), arguments.index(op, "d", d)
        if not 1 <= d < _LARGEST_D:
            raise ValueError(f"{op}: d: expected 1 or more, below 2^31, got {d}")
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            found = dtype if isinstance(dtype, torch.dtype) else type(dtype).__name__
            raise TypeError(f"{op}: dtype: expected float16, bfloat16, float32 or float64, got {found}")
        storage.safetensors()
        path.mkdir(parents=True, exist_ok=True)
        if not (path / storage.LOCK).exists():
            _check_empty(path)
        with storage.locked(path) as writer:
            writer.remove_leftovers()  # of a call that was killed
            _check_empty(path, writer)
            manifest = Manifest(d, dtype)
            with writer.writing(0) as (directory, _):
                storage.write_manifest(directory, manifest)
        return cls(path, Snapshot(path, manifest))

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = False) -> Corpus:
        """Open the corpus in a directory. Shards are checked for their size; with `verify`, read and checked whole.

        Raises:
            FileNotFoundError: there is no corpus.
            ModuleNotFoundError: safetensors or numpy is not installed.
            TypeError: an argument is of another type.
            ValueError: the manifest or a shard is truncated, corrupt or missing; the message has its path.
        """
        path = _path("Corpus.open", path)
        check_flag("Corpus.open", "verify", verify)
        storage.safetensors()
        return cls(path, Snapshot(path, Manifest.read(path), verify=verify))

    @property
    def d(self) -> int:
        return self._snapshot.manifest.d

    @property
    def dtype(self) -> torch.dtype:
        return self._snapshot.manifest.dtype

    @property
    def lengths(self) -> Tensor:
        return self._snapshot.for_callers[0]

    @property
    def cu_seqlens(self) -> Tensor:
        return self._snapshot.for_callers[1]

    @property
    def ids(self) -> list[str] | list[int] | None:
        """The id of each document; None if they were appended without any."""
        return self._snapshot.ids

    def __len__(self) -> int:
        return len(self._snapshot)

    def __repr__(self) -> str:
        tokens = sum(shard.tokens for shard in self._snapshot.manifest.shards)
        return f"Corpus({str(self.path)!r}, {len(self)} documents, {tokens} tokens, d={self.d}, {self.dtype})"

    def documents(self, begin: int = 0, end: int | None = None) -> tuple[Tensor, Tensor]:
        """The documents ``[begin, end)``, to the last one if `end` is None.

        Returns:
            ``(packed, cu_seqlens)``: their tokens ``[T, d]`` on the CPU and int64 ``[end - begin + 1]``, where each of
            them begins in `packed`. A range within one shard is a view of memory mapped for the caller alone, of which
            pages are read when they are used.

        Raises:
            TypeError: `begin` or `end` is no integer.
            ValueError: not ``0 <= begin <= end <= len(corpus)``; or the shard was damaged since it was opened.
        """
        op, snapshot = "Corpus.documents", self._snapshot
        begin = arguments.index(op, "begin", begin)
        end = len(snapshot) if end is None else arguments.index(op, "end", end)
        if not 0 <= begin <= end <= len(snapshot):
            raise ValueError(f"{op}: begin, end: expected 0 <= begin <= end <= {len(snapshot)}, got {begin}, {end}")
        return snapshot.documents(begin, end)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int] | Tensor) -> list[Tensor]: ...

    def __getitem__(self, index: Any) -> Tensor | list[Tensor]:
        """The tokens ``[L, d]`` of a document, or a list of those of a slice or of several indices.

        Copies, on the CPU. Indices below 0 count from the end.

        Args:
            index: an integer, a slice, or ``[n]`` integers as a list, tensor or array.

        Raises:
            IndexError: an index is not that of a document.
            TypeError: `index` is something else.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float32)
            >>> corpus.append([torch.randn(n + 1, 128) for n in range(100)])
            >>> corpus[3].shape, len(corpus[-10:]), [x.shape[0] for x in corpus[[5, 0, 5]]]
            (torch.Size([4, 128]), 10, [6, 1, 6])
        """
        snapshot = self._snapshot
        if isinstance(index, slice):
            chosen: Sequence[int] = range(len(snapshot))[index]
        elif hasattr(index, "__len__") and not (isinstance(index, Tensor) and index.dim() == 0):
            found = arguments.integers("Corpus", "index", index)
            if found.dim() != 1:
                raise TypeError(f"Corpus: index: expected an int, a slice or [n] integers, got {list(found.shape)}")
            chosen = found.tolist()
        else:
            return snapshot.copy_of(arguments.index("Corpus", "index", index))
        return [snapshot.copy_of(i) for i in chosen]

    def __iter__(self) -> Iterator[Tensor]:
        """A copy of the tokens ``[L, d]`` of each document; no more than one of them is in memory."""
        snapshot = self._snapshot
        return (snapshot.copy_of(i) for i in range(len(snapshot)))

    def score(
        self,
        Q: Tensor,
        indices: Tensor | Sequence[int] | Sequence[Sequence[int]],
        *,
        q_mask: Tensor | None = None,
        q_weight: Tensor | None = None,
        normalize: bool = False,
    ) -> Tensor:
        """The `lik_ops.maxsim` scores of queries and documents that are given by their index.

        Each document is read once, those of no query never; on a GPU they are there in parts of up to 256 MiB.
        Differentiable in Q and `q_weight`, for which all parts are kept.

        Args:
            Q: query token embeddings ``[Nq, Lq, d]`` of the corpus's dtype, or ``[Lq, d]`` for one query.
            indices: integers ``[Nq, K]``, the documents of each query; or ``[K]``, those of all. -1 is no document.
            q_mask, q_weight, normalize: as in `lik_ops.maxsim`.

        Returns:
            Scores ``[Nq, K]`` in the order of `indices`, on the device of Q; fp32 (fp64 for fp64). ``-inf`` where the
            index is -1. A 2-D Q drops the first axis. They have the bits of `lik_ops.retrieve`.

        Raises:
            TypeError: a dtype or type is wrong.
            ValueError: a rank, size or device is wrong, or an index is not that of a document.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float32)
            >>> corpus.append([torch.randn(n + 1, 128) for n in range(100)])
            >>> Q, candidates = torch.randn(2, 32, 128, requires_grad=True), torch.randint(100, (2, 50))
            >>> teacher = torch.randn(2, 50).softmax(1)
            >>> student = corpus.score(Q, candidates).log_softmax(1)
            >>> torch.nn.functional.kl_div(student, teacher, reduction="batchmean").backward()
        """
        return _rerank.score("Corpus.score", self._snapshot, Q, indices, q_mask, q_weight, normalize)

    def rerank(
        self,
        Q: Tensor,
        indices: Tensor | Sequence[int] | Sequence[Sequence[int]],
        top_k: int | None = None,
        *,
        q_mask: Tensor | None = None,
        q_weight: Tensor | None = None,
        normalize: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The `top_k` best of the documents that a first stage found, by `lik_ops.maxsim`, in the order of `retrieve`.

        For inference: nothing requires gradients. `score` gives the scores in the order of `indices`.

        Args:
            Q, q_mask, q_weight, normalize: as in `score`.
            indices: integers ``[Nq, K]``, the candidates of each query; or ``[K]``, those of all. -1 is no document.
            top_k: how many to return of each query; None, or more than K, is all of them.

        Returns:
            ``(scores, indices)``, both ``[Nq, min(top_k, K)]``, as `lik_ops.retrieve` returns them, the best first;
            where the index is -1, ``-inf``, at the end.

        Raises:
            TypeError, ValueError: as `score`.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float32)
            >>> corpus.append([torch.randn(n + 1, 128) for n in range(100)])
            >>> Q, candidates = torch.randn(2, 32, 128), torch.randint(100, (2, 50))
            >>> scores, indices = corpus.rerank(Q, candidates, top_k=10)
            >>> scores.shape, indices.shape
            (torch.Size([2, 10]), torch.Size([2, 10]))
        """
        return _rerank.rerank("Corpus.rerank", self._snapshot, Q, indices, top_k, q_mask, q_weight, normalize)

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
            OSError: of the disk, with a path. Nothing was committed, unless the error came after the new manifest was
                in its place; opening the corpus shows it.
            RuntimeError: another process, or another thread, is appending.
            TypeError: a dtype or type is wrong.
            ValueError: a size is wrong, or ids are missing or unexpected; or the corpus is corrupt, see `open`.
        """
        packed, counts = self._packed(documents, lengths)
        encoded = _encoded_ids(ids, len(counts))
        before = self._snapshot
        with storage.locked(self.path) as writer:
            manifest = Manifest.read(self.path, before.manifest)  # another process may have appended since
            if (manifest.d, manifest.dtype) != (self.d, self.dtype):
                raise ValueError(f"{self.path}: expected a corpus of d={self.d}, {self.dtype}: it was made anew")
            if len(counts):
                manifest = self._committed(writer, manifest, packed, counts, encoded)
            self._snapshot = Snapshot(self.path, manifest, before)

    def _committed(
        self, writer: storage.Writer, manifest: Manifest, packed: Tensor, counts: Tensor, encoded: bytes | None
    ) -> Manifest:
        """The manifest with one shard more, once both are on the disk."""
        if manifest.shards and manifest.has_ids != (encoded is not None):
            expected = f"{len(counts)} of them, as before" if manifest.has_ids else "None, as before"
            found = "None" if encoded is None else "some"
            raise ValueError(f"Corpus.append: ids: expected {expected}, got {found}")
        tensors = {storage.TOKENS: packed, storage.LENGTHS: counts}
        if encoded is not None:
            tensors[storage.IDS] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        with writer.writing(len(manifest.shards)) as (directory, name):
            shard = storage.write_shard(directory, name, tensors)
            manifest = replace(manifest, has_ids=encoded is not None, shards=(*manifest.shards, shard))
            storage.write_manifest(directory, manifest)
        return manifest

    def _packed(self, documents: Any, lengths: Any) -> tuple[Tensor, Tensor]:
        """The documents' tokens ``[T, d]`` on the CPU, and the length of each."""
        op = "Corpus.append"
        if isinstance(documents, Tensor) and not documents.is_nested:
            self._check_tokens("documents", documents)
            if lengths is None:
                raise ValueError(f"{op}: lengths: expected the length of each document in the packed tensor, got None")
            counts = arguments.integers(op, "lengths", lengths)
            if counts.dim() != 1 or not storage.add_up_to(counts, tokens := documents.shape[0]):
                raise ValueError(
                    f"{op}: lengths: expected [n], not negative, that add up to {tokens} tokens,"
                    f" got {list(counts.shape)} that add up to {sum(counts.flatten().tolist())}"
                )
            return documents.detach().cpu().contiguous(), counts
        if lengths is not None:
            raise ValueError(f"{op}: lengths: expected None beside a list of documents")
        if isinstance(documents, Tensor):
            documents = documents.unbind()
        documents = _listed(op, "documents", "tensors", documents)
        for i, document in enumerate(documents):
            self._check_tokens(f"documents[{i}]", document)
        empty = torch.empty(0, self.d, dtype=self.dtype, device="cpu")
        counts = torch.tensor([document.shape[0] for document in documents], dtype=torch.int64, device="cpu")
        return torch.cat([empty, *(document.detach().cpu() for document in documents)]), counts

    def _check_tokens(self, name: str, x: Any) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"Corpus.append: {name}: expected a Tensor, got {type(x).__name__}")
        check_strided("Corpus.append", name, x)
        if x.dtype != self.dtype:
            raise TypeError(
                f"Corpus.append: {name}: expected {self.dtype}, got {x.dtype}: convert it with .to({self.dtype})"
            )
        if x.dim() != 2 or x.shape[1] != self.d:
            raise ValueError(f"Corpus.append: {name}: expected [L, {self.d}], got {list(x.shape)}")
        if x.is_meta:
            raise ValueError(f"Corpus.append: {name}: expected embeddings, got a meta tensor")

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "manifest": self._snapshot.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._snapshot = Snapshot(self.path, state["manifest"])


def _path(op: str, path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise TypeError(f"{op}: path: expected a str or os.PathLike, got {type(path).__name__}")
    return Path(path)


def _check_empty(path: Path, writer: storage.Writer | None = None) -> None:
    """Nothing is in the directory, or, for who holds the lock, its file alone, which nobody has written to."""
    op = "Corpus.create: path"
    if (path / MANIFEST).exists():
        raise FileExistsError(f"{op}: expected no corpus there, found {path / MANIFEST}")
    ours = {storage.LOCK} if writer is not None and not writer.has_entry() else set()
    if names := sorted(set(os.listdir(path)) - ours):
        raise FileExistsError(f"{op}: expected an empty directory, found {path / names[0]}")


def _listed(op: str, name: str, of: str, x: Any) -> list:
    """What an iterable gives, but for strings, which are one thing and not many, and what has no order."""
    try:
        if not isinstance(x, (str, bytes, Set, Mapping)):
            x = iter(x)
    except TypeError:
        pass
    if not isinstance(x, Iterator):
        raise TypeError(f"{op}: {name}: expected a list of {of}, got {type(x).__name__}")
    return list(x)


def _encoded_ids(ids: Any, count: int) -> bytes | None:
    if ids is None:
        return None
    ids = _listed("Corpus.append", "ids", "str or int", ids)
    if len(ids) != count:
        raise ValueError(f"Corpus.append: ids: expected {count}, one for each document, got {len(ids)}")
    if not are_ids(ids):
        kinds = sorted({type(x).__name__ for x in ids})
        raise TypeError(f"Corpus.append: ids: expected str or int, all alike, got {', '.join(kinds)}")
    return json.dumps(ids, ensure_ascii=False).encode("utf-8", "surrogatepass")
