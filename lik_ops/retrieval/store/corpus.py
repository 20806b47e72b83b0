"""`Corpus`: packed documents on disk, as safetensors shards and a manifest that names the ones that count.

What a writer leaves behind when it is killed is not in the manifest, so no reader sees it, and the next one removes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from ...core.arguments import check_dtype, check_flag, short_repr
from ...formats.quantized import Quantized
from ...formats.residual import ResidualCodec
from ...formats.table import FormatName, Residual
from .. import _rerank, arguments
from . import append as appending
from . import files
from .convert import convert
from .layout import Scale, check_format
from .manifest import MANIFEST, Manifest
from .snapshot import Snapshot

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
        dtype: of the embeddings as they were appended.
        format: in which they are kept, ``"int8"``, ``"uint8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"binary"`` or, by
            their bits, ``"residual1"`` to ``"residual8"``; None is as they are.
        scale: what has a scale of its own in that format, each ``"token"`` or each ``"document"``; or None.
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
    def create(
        cls,
        path: str | os.PathLike[str],
        d: int,
        dtype: torch.dtype,
        format: FormatName | ResidualCodec | None = None,
        scale: Scale = "token",
    ) -> Corpus:
        """Make an empty corpus in a directory that is empty, or does not exist and is made.

        Args:
            path: the directory.
            d: features of a token.
            dtype: of the tokens that are appended, and of the queries.
            format: keep tokens as `lik_ops.quantize` does, in ``"int8"``, ``"uint8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``
                or ``"binary"``, or as the residual codes of a `ResidualCodec`; None keeps them as they are.
            scale: of a format, one for each ``"token"`` or each ``"document"``; residual codes have one for each token.

        Raises:
            FileExistsError: the directory is not empty.
            ModuleNotFoundError: safetensors or numpy is not installed.
            TypeError: `dtype` is not float16, bfloat16, float32 or float64, or an argument is of another type.
            ValueError: `d` is below 1 or not that of the codec, or `format` or `scale` is not one of these.
        """
        op = "Corpus.create"
        path, d = _as_path(op, path), arguments.as_index(op, "d", d)
        if not 1 <= d < _LARGEST_D:
            raise ValueError(f"{op}: d: expected 1 or more, below 2^31, got {short_repr(d)}")
        check_dtype(op, "dtype", dtype)
        check_format(op, format, scale, or_none=True)
        files.import_safetensors(op)
        manifest = Manifest.new(op, d, dtype, format, scale)
        path.mkdir(parents=True, exist_ok=True)
        lock = path / files.LOCK_FILE
        if lock.is_symlink() or not lock.exists():
            files.check_empty(path)
        with files.lock_corpus(path) as writer:
            writer.remove_leftovers()  # of a call that was killed
            files.check_empty(path, writer)
            with writer.writing(0 if manifest.codec is None else None) as (directory, name):
                if manifest.codec is not None:
                    manifest = replace(manifest, codec=files.write_codec(directory, name, manifest.codec))
                files.write_manifest(directory, manifest)
        return cls(path, Snapshot(path, manifest))

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = False) -> Corpus:
        """Open the corpus in a directory.

        Shards are checked for their size. Their content is checked on the first read, or here with `verify`, which also
        compares checksums.

        Raises:
            FileNotFoundError: there is no corpus.
            ModuleNotFoundError: safetensors or numpy is not installed.
            TypeError: an argument is of another type.
            ValueError: the manifest or a shard is truncated, corrupt or missing; the message has its path.
        """
        path = _as_path("Corpus.open", path)
        check_flag("Corpus.open", "verify", verify)
        files.import_safetensors("Corpus.open")
        return cls(path, Snapshot(path, Manifest.read(path), verify=verify))

    @property
    def d(self) -> int:
        return self._snapshot.manifest.d

    @property
    def dtype(self) -> torch.dtype:
        return self._snapshot.manifest.dtype

    @property
    def format(self) -> FormatName | Residual | None:
        return self._snapshot.manifest.format

    @property
    def scale(self) -> Scale | None:
        return self._snapshot.manifest.scale

    @property
    def codec(self) -> ResidualCodec | None:
        """Of residual codes what they are read with, on the CPU: a copy."""
        found = self._snapshot.manifest.codec
        return None if found is None else deepcopy(found.codec)

    @property
    def lengths(self) -> Tensor:
        return self._snapshot.lengths.clone()

    @property
    def cu_seqlens(self) -> Tensor:
        return self._snapshot.cu_seqlens.clone()

    @property
    def ids(self) -> list[str] | list[int] | None:
        """The id of each document, in a list for the caller; None if they were appended without any."""
        ids = self._snapshot.ids
        return None if ids is None else ids.copy()

    def __len__(self) -> int:
        return len(self._snapshot)

    def __repr__(self) -> str:
        tokens = sum(shard.tokens for shard in self._snapshot.manifest.shards)
        return f"Corpus({str(self.path)!r}, {len(self)} documents, {tokens} tokens, {self._snapshot.manifest.layout})"

    def documents(self, begin: int = 0, end: int | None = None) -> tuple[Tensor | Quantized, Tensor]:
        """The documents ``[begin, end)``, to the last one if `end` is None.

        Returns:
            ``(packed, cu_seqlens)``: their tokens ``[T, d]`` on the CPU, a `Quantized` if the corpus has a format, and
            int64 ``[end - begin + 1]``, where each of them begins in `pack_documents`. A range within one shard is a
            view of memory mapped for the caller alone, of which pages are read when they are used.

        Raises:
            TypeError: `begin` or `end` is no integer.
            ValueError: not ``0 <= begin <= end <= len(corpus)``; or the shard was damaged since it was opened.
        """
        op, snapshot = "Corpus.documents", self._snapshot
        begin = arguments.as_index(op, "begin", begin)
        end = len(snapshot) if end is None else arguments.as_index(op, "end", end)
        if not 0 <= begin <= end <= len(snapshot):
            found = f"{short_repr(begin)}, {short_repr(end)}"
            raise ValueError(f"{op}: begin, end: expected 0 <= begin <= end <= {len(snapshot)}, got {found}")
        return snapshot.documents(begin, end)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int] | Tensor) -> list[Tensor]: ...

    def __getitem__(self, index: Any) -> Tensor | list[Tensor]:
        """The tokens ``[L, d]`` of a document, or a list of those of a slice or of several indices.

        Copies, on the CPU; of a corpus with a format tokens as they count, in its dtype. Indices below 0 count from
        the end.

        Args:
            index: an integer, a slice, or ``[n]`` integers as a list, tensor or array.

        Raises:
            IndexError: an index is not that of a document.
            TypeError: `as_index` is something else.

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
            found = arguments.as_integers("Corpus", "index", index)
            if found.dim() != 1:
                raise TypeError(f"Corpus: index: expected an int, a slice or [n] integers, got {list(found.shape)}")
            chosen = found.tolist()
        else:
            return snapshot.copy_document(arguments.as_index("Corpus", "index", index))
        return [snapshot.copy_document(i) for i in chosen]

    def __iter__(self) -> Iterator[Tensor]:
        """What ``corpus[i]`` gives, of each document; no more than one of them is in memory."""
        snapshot = self._snapshot
        return (snapshot.copy_document(i) for i in range(len(snapshot)))

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
        Differentiable in Q and `q_weight`, for which all parts are kept, unless the corpus has a format.

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
            NotImplementedError: Q or `q_weight` requires gradients and the corpus has a format.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float32)
            >>> corpus.append([torch.randn(n + 1, 128) for n in range(100)])
            >>> Q, candidates = torch.randn(2, 32, 128, requires_grad=True), torch.randint(100, (2, 50))
            >>> teacher = torch.randn(2, 50).softmax(1)
            >>> student = corpus.score(Q, candidates).log_softmax(1)
            >>> torch.nn.functional.kl_div(student, teacher, reduction="batchmean").backward()
        """
        return _rerank.score_indices("Corpus.score", self._snapshot, Q, indices, q_mask, q_weight, normalize)

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

        For inference: nothing requires gradients. `score_indices` gives the scores in the order of `indices`.

        Args:
            Q, q_mask, q_weight, normalize: as in `score_indices`.
            indices: integers ``[Nq, K]``, the candidates of each query; or ``[K]``, those of all. -1 is no document.
            top_k: how many to return of each query; None, or more than K, is all of them.

        Returns:
            ``(scores, indices)``, both ``[Nq, min(top_k, K)]``, as `lik_ops.retrieve` returns them, the best first;
            where the index is -1, ``-inf``, at the end.

        Raises:
            TypeError, ValueError: as `score_indices`.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float32)
            >>> corpus.append([torch.randn(n + 1, 128) for n in range(100)])
            >>> Q, candidates = torch.randn(2, 32, 128), torch.randint(100, (2, 50))
            >>> scores, indices = corpus.rerank(Q, candidates, top_k=10)
            >>> scores.shape, indices.shape
            (torch.Size([2, 10]), torch.Size([2, 10]))
        """
        return _rerank.rerank_indices("Corpus.rerank", self._snapshot, Q, indices, top_k, q_mask, q_weight, normalize)

    def append(
        self,
        documents: Sequence[Tensor] | Tensor | Quantized,
        ids: appending.Ids | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> None:
        """Commit documents as one shard: when this returns, they are on the disk.

        Args:
            documents: a list of ``[L_i, d]`` tensors of the corpus's dtype, on any device; or all of them packed,
                ``[T, d]``, with `lengths`. A corpus with a format quantises them, each as `lik_ops.quantize` does on
                the CPU, or takes a packed `Quantized` of its format, with `lengths`.
            ids: a string each, or an integer each; in all appends or in none. They are not compared with each other.
            lengths: integers ``[n]`` that add up to T, where `documents` is packed.

        Raises:
            OSError: of the disk, with a path. Nothing was committed, unless the error came after the new manifest was
                in its place; opening the corpus shows it.
            RuntimeError: another process, or another thread, is appending.
            TypeError: a dtype or type is wrong.
            ValueError: a size is wrong, or ids are missing or unexpected; or the corpus is corrupt, see `open`.
        """
        op, before = "Corpus.append", self._snapshot
        layout = before.manifest.layout
        packed, counts = appending.pack_documents(op, layout, documents, lengths)
        encoded = appending.encode_ids(op, ids, len(counts))
        tensors = layout.encoded(op, packed, counts)
        with files.lock_corpus(self.path) as writer:
            manifest = Manifest.read(self.path, before.manifest)  # another process may have appended since
            if manifest.layout != layout:
                raise ValueError(f"{self.path}: expected a corpus of {layout}: it was made anew")
            if len(counts):
                manifest = appending.commit_shard(op, writer, manifest, tensors, counts, encoded)
            self._snapshot = Snapshot(self.path, manifest, before)

    def quantize(
        self, path: str | os.PathLike[str], format: FormatName | ResidualCodec = "int8", scale: Scale = "token"
    ) -> Corpus:
        """The same documents in fewer bytes, in another directory: a shard is read, quantised and committed at a time.

        Called again with the same arguments it goes on where it was killed, or where this corpus ended then; what is
        complete is opened as it is. Whether `path` has the first documents of this corpus is told by d, dtype, lengths
        and ids, and by the numbers of the first and the last that has tokens. This corpus does not change.

        Args:
            path: a directory that is empty, or does not exist and is made, or has what an earlier call wrote.
            format, scale: as in `create`; for the dtypes' sizes and what a score may be off by, see `lik_ops.quantize`.

        Returns:
            The corpus at `path`.

        Raises:
            FileExistsError: the directory has something else in it.
            OSError: of the disk, with a path. What was committed stays.
            RuntimeError: another process, or another thread, is writing there.
            TypeError: an argument is of another type.
            ValueError: `format` or `scale` is wrong, this corpus has a format, or that at `path` is no beginning of it.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float16)
            >>> corpus.append([torch.randn(n, 128).half() for n in (3, 0, 7)], ids=["a", "b", "c"])
            >>> small = corpus.quantize("small", "int8")
            >>> small.format, small.ids, small.documents(0, 3)[0]
            ('int8', ['a', 'b', 'c'], Quantized([10, 128], format='int8', device='cpu'))
        """
        op, source = "Corpus.quantize", self._snapshot
        path = _as_path(op, path)
        check_format(op, format, scale)
        if self.format is not None:
            raise ValueError(f"{op}: expected a corpus of tokens as they were, got one in {self.format}: {self.path}")
        target = Manifest.new(op, self.d, self.dtype, format, scale)
        if not (path / MANIFEST).exists():
            Corpus.create(path, self.d, self.dtype, format, scale)
        return Corpus(path, convert(op, source, path, target))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "manifest": self._snapshot.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._snapshot = Snapshot(self.path, state["manifest"])


def _as_path(op: str, path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise TypeError(f"{op}: path: expected a str or os.PathLike, got {type(path).__name__}")
    return Path(path).absolute()  # the working directory may change
