"""`Corpus`: packed documents on disk, in safetensors shards that a manifest lists.

Files that a killed writer leaves behind are not in the manifest. No reader sees them, and the next writer removes them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ...api.inputs import Tokens
from ...core.arguments import check_dtype, check_flag, short_repr
from ...families.pooling.api import pool_tokens
from ...formats.quantized import Quantized
from ...formats.residual import ResidualCodec
from ...formats.table import FormatName, Residual
from ...ops.topk import SearchArgs
from .. import _rerank, arguments
from ..argmax import find_argmax
from . import append as appending
from . import change, files
from .convert import Pooling, convert
from .layout import Scale, check_format
from .manifest import MANIFEST, Manifest
from .snapshot import Snapshot

_LARGEST_D = 1 << 31


class Corpus:
    """Token embeddings of documents in a directory, appended in shards and read by memory-mapping.

    `Corpus.create` and `Corpus.open` make instances. The class needs ``safetensors`` and ``numpy``. `append`, `update`,
    `delete` and `compact` change the corpus. A change is committed when the function returns. Committed documents
    survive a crash of the process or the machine during later writes. One process may write at a time, and any number
    may read. The lock ends with its process, on systems that have ``fcntl``. Each call and each iteration sees the
    documents that were committed when the corpus was opened or when this object last changed it.

    Documents are numbered from 0 in the order of their appends, without gaps: documents after a deleted one move up. To
    name documents across changes, append them with ids. ``len(corpus)`` is the number of documents, ``corpus[i]`` is
    one document, and ``for document in corpus`` iterates over all of them. Tensors that a caller gets never share
    memory with the corpus. Writing to them changes neither the files nor later reads and scores.

    Attributes:
        path: the directory.
        d: the number of features of a token.
        dtype: the dtype of the embeddings as they were appended.
        format: the storage format: ``"int8"``, ``"uint8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"binary"``, ``"rq4"``,
            ``"rq2"``, ``"rq1"``, or for residual codes ``"residual1"`` to ``"residual8"`` by the number of bits. None
            stores the embeddings unchanged.
        scale: whether each ``"token"`` or each ``"document"`` has its own scale in the format, or None.
        lengths: int64 ``[N]``, the number of tokens of each document.
        cu_seqlens: int64 ``[N + 1]``, the first token of each document in the corpus, and the number of all tokens.

    Example:
        >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float16)
        >>> corpus.append([torch.randn(n, 128).half() for n in (3, 0, 7)], ids=["a", "b", "c"])
        >>> # Read the documents 1 and 2.
        >>> packed, cu_seqlens = lik_ops.Corpus.open("corpus").documents(1, 3)
        >>> packed.shape, cu_seqlens.tolist()
        (torch.Size([7, 128]), [0, 0, 7])
        >>> corpus[-1].shape, [x.shape[0] for x in corpus]
        (torch.Size([7, 128]), [3, 0, 7])
    """

    path: Path

    def __init__(self, path: Path, snapshot: Snapshot) -> None:
        self.path = path
        self._snapshot = snapshot  # replaced as a whole; each reader reads it once

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        d: int,
        dtype: torch.dtype,
        format: FormatName | ResidualCodec | None = None,
        scale: Scale = "token",
    ) -> Corpus:
        """Create an empty corpus in a new or empty directory.

        Args:
            path: the directory. It is created if it does not exist.
            d: the number of features of a token.
            dtype: the dtype of the tokens that are appended, and of the queries.
            format: the storage format of `lik_ops.quantize`: ``"int8"``, ``"uint8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``,
                ``"binary"``, ``"rq4"``, ``"rq2"`` or ``"rq1"``. A `ResidualCodec` stores residual codes. None stores
                tokens unchanged.
            scale: one scale for each ``"token"`` or each ``"document"`` in a format. Residual codes have one for each
                token.

        Returns:
            The empty corpus.

        Raises:
            FileExistsError: the directory is not empty.
            ModuleNotFoundError: safetensors or numpy is not installed.
            TypeError: `dtype` is not float16, bfloat16, float32 or float64, or an argument has the wrong type.
            ValueError: `d` is below 1 or differs from the codec, or `format` or `scale` is unknown.
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
            writer.remove_leftovers()  # from a call that was killed
            files.check_empty(path, writer)
            with writer.reserve_file(0 if manifest.codec is None else None) as (directory, name):
                if manifest.codec is not None:
                    manifest = replace(manifest, codec=files.write_codec(directory, name, manifest.codec))
                files.write_manifest(directory, manifest)
        return cls(path, Snapshot(path, manifest))

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = False) -> Corpus:
        """Open the corpus in a directory.

        Opening checks the manifest and the names of its shards. The size and the content of a shard are checked on its
        first read.

        Args:
            path: the directory.
            verify: check the content and the checksum of each shard now.

        Returns:
            The corpus.

        Raises:
            FileNotFoundError: there is no corpus.
            ModuleNotFoundError: safetensors or numpy is not installed.
            TypeError: an argument has the wrong type.
            ValueError: the manifest is truncated or corrupt, or a shard is missing. With `verify`, also if a shard is
                truncated or corrupt. The message has its path.
        """
        path = _as_path("Corpus.open", path)
        check_flag("Corpus.open", "verify", verify)
        files.import_safetensors("Corpus.open")
        return cls(path, Snapshot.open_current(path, verify))

    @property
    def d(self) -> int:
        """The number of features of a token."""
        return self._snapshot.manifest.d

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embeddings as they were appended."""
        return self._snapshot.manifest.dtype

    @property
    def format(self) -> FormatName | Residual | None:
        """The storage format, or None if embeddings are stored unchanged."""
        return self._snapshot.manifest.format

    @property
    def scale(self) -> Scale | None:
        """``"token"`` or ``"document"``: each has its own scale in the format. None without a format."""
        return self._snapshot.manifest.scale

    @property
    def codec(self) -> ResidualCodec | None:
        """A copy of the codec of residual codes, on the CPU. None for other formats."""
        codec_file = self._snapshot.manifest.codec
        return None if codec_file is None else deepcopy(codec_file.codec)

    @property
    def lengths(self) -> Tensor:
        """int64 ``[N]``, the number of tokens of each document, as a copy."""
        return self._snapshot.lengths.clone()

    @property
    def cu_seqlens(self) -> Tensor:
        """int64 ``[N + 1]``, the bounds of the documents in all tokens, as a copy."""
        return self._snapshot.cu_seqlens.clone()

    @property
    def ids(self) -> list[str] | list[int] | None:
        """A list of the id of each document, as a copy. None if documents were appended without ids."""
        ids = self._snapshot.ids
        return None if ids is None else ids.copy()

    def __len__(self) -> int:
        return len(self._snapshot)

    def __repr__(self) -> str:
        tokens = sum(shard.tokens_left for shard in self._snapshot.manifest.shards)
        return f"Corpus({str(self.path)!r}, {len(self)} documents, {tokens} tokens, {self._snapshot.manifest.layout})"

    def documents(self, begin: int = 0, end: int | None = None) -> tuple[Tensor | Quantized, Tensor]:
        """Return the documents ``[begin, end)`` as packed tokens.

        Args:
            begin: the first document.
            end: one past the last document. None is the end of the corpus.

        Returns:
            ``(packed, cu_seqlens)`` on the CPU. `packed` is the tokens ``[T, d]``, or a `Quantized` if the corpus has a
            format. `cu_seqlens` is int64 ``[end - begin + 1]``, the first row of each document in `packed`. A range
            within one shard is a view of memory that is mapped only for the caller. Its pages are read when they are
            used.

        Raises:
            TypeError: `begin` or `end` is not an integer.
            ValueError: the range is not ``0 <= begin <= end <= len(corpus)``, or a shard was damaged since it was
                opened.
        """
        op, snapshot = "Corpus.documents", self._snapshot
        begin = arguments.as_index(op, "begin", begin)
        end = len(snapshot) if end is None else arguments.as_index(op, "end", end)
        if not 0 <= begin <= end <= len(snapshot):
            actual = f"{short_repr(begin)}, {short_repr(end)}"
            raise ValueError(f"{op}: begin, end: expected 0 <= begin <= end <= {len(snapshot)}, got {actual}")
        return snapshot.documents(begin, end)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int] | Tensor) -> list[Tensor]: ...

    def __getitem__(self, index: Any) -> Tensor | list[Tensor]:
        """Return the tokens ``[L, d]`` of a document, or a list of such tensors for a slice or several indices.

        Tensors are copies on the CPU. A corpus with a format returns dequantized tokens in its dtype. Negative indices
        count from the end.

        Args:
            index: an integer, a slice, or integers ``[n]`` in a list, tensor or array.

        Returns:
            A tensor, or a list of tensors.

        Raises:
            IndexError: there is no document at an index.
            TypeError: `index` has another type.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float32)
            >>> corpus.append([torch.randn(n + 1, 128) for n in range(100)])
            >>> corpus[3].shape, len(corpus[-10:]), [x.shape[0] for x in corpus[[5, 0, 5]]]
            (torch.Size([4, 128]), 10, [6, 1, 6])
        """
        snapshot = self._snapshot
        if isinstance(index, slice):
            positions: Sequence[int] = range(len(snapshot))[index]
        elif hasattr(index, "__len__") and not (isinstance(index, Tensor) and index.dim() == 0):
            indices = arguments.as_integers("Corpus", "index", index)
            if indices.dim() != 1:
                raise TypeError(f"Corpus: index: expected an int, a slice or [n] integers, got {list(indices.shape)}")
            positions = indices.tolist()
        else:
            return snapshot.copy_document(arguments.as_index("Corpus", "index", index))
        return [snapshot.copy_document(i) for i in positions]

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the tokens of all documents, with at most one document in memory."""
        snapshot = self._snapshot
        return (snapshot.copy_document(i) for i in range(len(snapshot)))

    def score(
        self,
        Q: Tokens,
        indices: Tensor | Sequence[int] | Sequence[Sequence[int]],
        *,
        q_mask: Tensor | None = None,
        q_weight: Tensor | None = None,
        normalize: bool = False,
    ) -> Tensor:
        """Compute the `lik_ops.maxsim` scores of queries and documents that are given by their index.

        Only the listed documents are read, each of them once. On a GPU they are loaded in parts of up to 256 MiB. The
        scores are differentiable in Q and `q_weight`. Autograd then keeps all parts.

        Args:
            Q: query token embeddings ``[Nq, Lq, d]`` of the corpus's dtype, or ``[Lq, d]`` for one query.
            indices: integers ``[Nq, K]``, the documents of each query, or ``[K]``, the documents of all queries. -1
                means no document.
            q_mask: query tokens to keep, as in `lik_ops.maxsim`.
            q_weight: the weight of each query token, as in `lik_ops.maxsim`.
            normalize: L2-normalize every token first.

        Returns:
            Scores ``[Nq, K]`` in the order of `indices`, on the device of Q, in fp32 (fp64 for fp64 inputs). The score
            of index -1 is ``-inf``. A 2-D Q drops the first axis. The bits are the same as in `lik_ops.retrieve`.

        Raises:
            TypeError: a dtype or type is wrong.
            ValueError: a rank, size or device is wrong, or there is no document at an index.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float32)
            >>> corpus.append([torch.randn(n + 1, 128) for n in range(100)])
            >>> Q, candidates = torch.randn(2, 32, 128, requires_grad=True), torch.randint(100, (2, 50))
            >>> # Distill the scores of a teacher.
            >>> teacher = torch.randn(2, 50).softmax(1)
            >>> student = corpus.score(Q, candidates).log_softmax(1)
            >>> torch.nn.functional.kl_div(student, teacher, reduction="batchmean").backward()
        """
        return _rerank.score_indices("Corpus.score", self._snapshot, Q, indices, q_mask, q_weight, normalize)

    @overload
    def rerank(
        self,
        Q: Tokens,
        indices: Tensor | Sequence[int] | Sequence[Sequence[int]],
        top_k: int | None = None,
        *,
        q_mask: Tensor | None = None,
        q_weight: Tensor | None = None,
        normalize: bool = False,
        subset: Tensor | Sequence | None = None,
        return_argmax: Literal[False] = False,
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def rerank(
        self,
        Q: Tokens,
        indices: Tensor | Sequence[int] | Sequence[Sequence[int]],
        top_k: int | None = None,
        *,
        q_mask: Tensor | None = None,
        q_weight: Tensor | None = None,
        normalize: bool = False,
        subset: Tensor | Sequence | None = None,
        return_argmax: Literal[True],
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def rerank(
        self,
        Q: Tokens,
        indices: Tensor | Sequence[int] | Sequence[Sequence[int]],
        top_k: int | None = None,
        *,
        q_mask: Tensor | None = None,
        q_weight: Tensor | None = None,
        normalize: bool = False,
        subset: Tensor | Sequence | None = None,
        return_argmax: bool = False,
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        """Return the `top_k` best of the given documents by `lik_ops.maxsim`, in the order of `retrieve`.

        This function is for inference: the scores do not require gradients. `score` returns the scores in the order of
        `indices`.

        Args:
            Q: query token embeddings, as in `score`.
            indices: integers ``[Nq, K]``, the candidates of each query, or ``[K]``, the candidates of all queries. -1
                means no document.
            top_k: the number of documents to return for each query. None, or a number above K, returns all of them.
            q_mask: query tokens to keep, as in `lik_ops.maxsim`.
            q_weight: the weight of each query token, as in `lik_ops.maxsim`.
            normalize: L2-normalize every token first.
            subset: the documents that may be returned, as in `lik_ops.retrieve`. Other candidates are not read and are
                replaced by -1.
            return_argmax: also return the document token that matched each query token.

        Returns:
            ``(scores, indices)``, both ``[Nq, min(top_k, K)]``, in the order of `lik_ops.retrieve`. Entries with index
            -1 have score ``-inf`` and come last. With `return_argmax`, the third value is int64 ``[Nq, k, Lq]``, as in
            `lik_ops.retrieve`.

        Raises:
            TypeError: a dtype or type is wrong.
            ValueError: a rank, size or device is wrong, or there is no document at an index.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float32)
            >>> corpus.append([torch.randn(n + 1, 128) for n in range(100)])
            >>> Q, candidates = torch.randn(2, 32, 128), torch.randint(100, (2, 50))
            >>> # Keep the best 10 of the 50 candidates of each query.
            >>> scores, indices = corpus.rerank(Q, candidates, top_k=10)
            >>> scores.shape, indices.shape
            (torch.Size([2, 10]), torch.Size([2, 10]))
        """
        op, snapshot = "Corpus.rerank", self._snapshot
        check_flag(op, "return_argmax", return_argmax)
        Q, _, q_mask, _, _, q_weight = arguments.convert_search(op, Q, None, q_mask, None, None, q_weight)
        results = _rerank.rerank_indices(op, snapshot, Q, indices, top_k, q_mask, q_weight, normalize, subset)
        if not return_argmax:
            return results
        search = Q, Corpus(self.path, snapshot), q_mask, None, None, q_weight, normalize, 0, None
        return (*results, find_argmax(op, SearchArgs._make(search), results[1]))

    def append(
        self,
        documents: Sequence[Tensor] | Tensor | Quantized,
        ids: appending.Ids | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> None:
        """Commit documents as one shard, which is on the disk when this function returns.

        Args:
            documents: a list of ``[L_i, d]`` tensors of the corpus's dtype on any device, or all documents packed
                ``[T, d]`` with `lengths`. A corpus with a format quantizes each document with `lik_ops.quantize` on the
                CPU. It also accepts a packed `Quantized` of its format, with `lengths`.
            ids: one string or one integer for each document, of one type in all appends. Either all appends have ids
                or none has. Ids are not checked for duplicates.
            lengths: integers ``[n]`` that sum to T, if `documents` is packed.

        Raises:
            OSError: an error of the disk, with a path. Nothing was committed, unless the error came after the new
                manifest was in place. Opening the corpus shows which.
            RuntimeError: another process or thread is writing.
            TypeError: a dtype or type is wrong, or ids have another type than those before.
            ValueError: a size is wrong, ids are missing or unexpected, or the corpus is corrupt. See `open`.
        """
        op, snapshot = "Corpus.append", self._snapshot
        layout = snapshot.manifest.layout
        packed, counts = appending.pack_documents(op, layout, documents, lengths)
        encoded = appending.encode_ids(op, ids, len(counts))
        tensors = layout.encode(op, packed, counts)
        with self._lock_for_change(snapshot) as (writer, manifest):
            if len(counts):
                if ids is not None and manifest.shards:
                    snapshot = Snapshot(self.path, manifest, snapshot)
                    appending.check_id_type(op, ids, snapshot.id_type(0))
                manifest = appending.commit_shard(op, writer, manifest, tensors, counts, encoded)
            self._snapshot = Snapshot(self.path, manifest, snapshot)

    def delete(self, ids: appending.Ids) -> None:
        """Delete the documents that have these ids. They do not appear in any later result.

        The manifest marks them as deleted, in one commit. `compact` returns their space on the disk. Later documents
        move up, so indices change. An object that was opened before still shows the deleted documents.

        Args:
            ids: strings or integers, as given to `append`. All documents that share an id are deleted.

        Raises:
            OSError: an error of the disk, with a path, as in `append`.
            RuntimeError: another process or thread is writing.
            TypeError: the ids are not a list of all str or all int.
            ValueError: no document has one of the ids, or documents were appended without ids. Nothing was deleted.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float16)
            >>> corpus.append([torch.randn(n, 128).half() for n in (3, 0, 7)], ids=["a", "b", "c"])
            >>> corpus.delete(["a"])
            >>> corpus.ids, corpus.lengths.tolist()
            (['b', 'c'], [0, 7])
        """
        op, snapshot, id_list = "Corpus.delete", self._snapshot, appending.check_ids("Corpus.delete", ids)
        with self._lock_for_change(snapshot) as (writer, manifest):
            snapshot = Snapshot(self.path, manifest, snapshot)
            if id_list:
                manifest = change.mark_deleted(op, snapshot, id_list)
                change.commit_manifest(writer, manifest)
            self._snapshot = Snapshot(self.path, manifest, snapshot)

    def update(
        self,
        ids: appending.Ids,
        documents: Sequence[Tensor] | Tensor | Quantized,
        *,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> None:
        """Replace the documents that have these ids, in one commit.

        No reader sees a corpus with both versions of a document, or with neither. The new documents are at the end, in
        the given order.

        Args:
            ids: the ids of the documents, each once. All documents that share an id are replaced by one.
            documents: the new documents, one for each id, as in `append`.
            lengths: integers ``[n]`` that sum to T, if `documents` is packed.

        Raises:
            OSError: an error of the disk, with a path, as in `append`.
            RuntimeError: another process or thread is writing.
            TypeError: a dtype or type is wrong.
            ValueError: a size is wrong, an id is given twice, or no document has one of the ids. Nothing was changed.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float16)
            >>> corpus.append([torch.randn(n, 128).half() for n in (3, 0, 7)], ids=["a", "b", "c"])
            >>> corpus.update(["b"], [torch.randn(5, 128).half()])
            >>> corpus.ids, corpus.lengths.tolist()
            (['a', 'c', 'b'], [3, 7, 5])
        """
        op, snapshot, id_list = "Corpus.update", self._snapshot, appending.check_ids("Corpus.update", ids)
        if len(set(id_list)) < len(id_list):
            duplicate = next(x for x, count in Counter(id_list).items() if count > 1)
            raise ValueError(f"{op}: ids: expected each id once, got {short_repr(duplicate)} several times")
        layout = snapshot.manifest.layout
        packed, counts = appending.pack_documents(op, layout, documents, lengths)
        encoded = appending.encode_ids(op, id_list, len(counts))
        tensors = layout.encode(op, packed, counts)
        with self._lock_for_change(snapshot) as (writer, manifest):
            snapshot = Snapshot(self.path, manifest, snapshot)
            if id_list:
                manifest = change.mark_deleted(op, snapshot, id_list)
                manifest = appending.commit_shard(op, writer, manifest, tensors, counts, encoded)
            self._snapshot = Snapshot(self.path, manifest, snapshot)

    def compact(self) -> None:
        """Return the space of deleted documents, and merge small shards.

        Shards with deleted documents are written again without them. Neighbors that together have up to 256 MiB become
        one shard. Indices, ids and the bits of tokens do not change. Each new shard is one commit, so the disk needs
        space for one more shard, and a call that was interrupted continues where it stopped.

        The files of replaced shards are removed. An object that was opened before continues to read the shards that it
        has mapped. Reading another removed shard is a ``ValueError`` that says to open the corpus again.

        Raises:
            OSError: an error of the disk, with a path. Shards that were committed stay.
            RuntimeError: another process or thread is writing.
            ValueError: the corpus is corrupt. See `open`.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float16)
            >>> for name in ("a", "b", "c"):
            ...     corpus.append([torch.randn(7, 128).half()], ids=[name])
            >>> corpus.delete(["b"])
            >>> corpus.compact()
            >>> corpus.ids, len(list(corpus.path.glob("*.safetensors")))
            (['a', 'c'], 1)
        """
        op, snapshot = "Corpus.compact", self._snapshot
        with self._lock_for_change(snapshot) as (writer, manifest):
            snapshot = Snapshot(self.path, manifest, snapshot)
            try:
                manifest = change.compact(op, writer, snapshot)
            except BaseException:
                self._snapshot = Snapshot.open_current(self.path)  # some shards may have been replaced
                raise
            self._snapshot = Snapshot(self.path, manifest, snapshot)

    @contextmanager
    def _lock_for_change(self, before: Snapshot) -> Iterator[tuple[files.Writer, Manifest]]:
        """Hold the lock, and yield its holder and the current manifest."""
        with files.lock_corpus(self.path) as writer:
            manifest = Manifest.read(self.path, before.manifest)  # another process may have written since
            if manifest.layout != before.manifest.layout:
                raise ValueError(f"{self.path}: expected a corpus of {before.manifest.layout}: it was created again")
            yield writer, manifest

    def quantize(
        self, path: str | os.PathLike[str], format: FormatName | ResidualCodec = "int8", scale: Scale = "token"
    ) -> Corpus:
        """Convert the corpus to a smaller format in another directory, one shard at a time.

        Shards are read, quantized and committed one at a time. A second call with the same arguments continues after an
        interruption, or adds documents that were appended to this corpus since. A complete conversion is only opened.
        To decide whether `path` has the first documents of this corpus, the call compares d, dtype, lengths and ids. It
        also compares the codes and scales of the first and the last document that has tokens. This corpus does not
        change.

        Args:
            path: a directory that is new, is empty, or has the result of an earlier call.
            format: the storage format, as in `create`. See `lik_ops.quantize` for sizes and errors.
            scale: ``"token"`` or ``"document"``, as in `create`.

        Returns:
            The corpus at `path`.

        Raises:
            FileExistsError: the directory has other files.
            OSError: an error of the disk, with a path. Committed shards stay.
            RuntimeError: another process or thread is writing there.
            TypeError: an argument has the wrong type.
            ValueError: `format` or `scale` is wrong, this corpus has a format, or the corpus at `path` is not a
                conversion of the first documents of this one.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float16)
            >>> corpus.append([torch.randn(n, 128).half() for n in (3, 0, 7)], ids=["a", "b", "c"])
            >>> # The new corpus has the same documents and ids.
            >>> small = corpus.quantize("small", "int8")
            >>> small.format, small.ids, small.documents(0, 3)[0]
            ('int8', ['a', 'b', 'c'], Quantized([10, 128], format='int8', device='cpu'))
        """
        check_format("Corpus.quantize", format, scale)
        return self._convert("Corpus.quantize", path, format, scale)

    def pool(
        self,
        path: str | os.PathLike[str],
        factor: float,
        *,
        method: str = "hierarchical",
        metric: str = "cosine",
        num_protected: int = 1,
        normalize: bool = False,
    ) -> Corpus:
        """Pool the documents with `lik_ops.pool_tokens` into a corpus in another directory, one shard at a time.

        A second call with the same arguments continues after an interruption, or adds documents that were appended to
        this corpus since. A complete result is only opened. To decide whether `path` has the first documents of this
        corpus, the call compares d, dtype and ids. It also compares the number of tokens and the protected tokens of
        the first and the last document that has tokens. The options are not stored, so use the same ones again.
        This corpus does not change.

        Args:
            path: a directory that is new, is empty, or has the result of an earlier call.
            factor: the number of tokens per cluster, as in `lik_ops.pool_tokens`.
            method: ``"hierarchical"``, ``"kmeans"`` or ``"sequential"``.
            metric: the distances of the hierarchical method, ``"cosine"`` or ``"rows"``.
            num_protected: the number of tokens at the start of each document that are kept.
            normalize: whether to L2-normalize the pooled tokens.

        Returns:
            The corpus at `path`, without a format.

        Raises:
            FileExistsError: the directory has other files.
            OSError: an error of the disk, with a path. Committed shards stay.
            RuntimeError: another process or thread is writing there.
            TypeError: an argument has the wrong type.
            ValueError: an option is wrong, a token is not finite, this corpus has a format, or the corpus at `path` has
                other documents.

        Example:
            >>> corpus = lik_ops.Corpus.create("corpus", d=128, dtype=torch.float32)
            >>> corpus.append([torch.nn.functional.normalize(torch.randn(n, 128), dim=-1) for n in (9, 0, 5)])
            >>> corpus.pool("pooled", 2).lengths.tolist()
            [5, 0, 3]
        """

        def pool(tokens: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
            options: Any = {"method": method, "metric": metric, "num_protected": num_protected, "normalize": normalize}
            return pool_tokens(tokens, factor, cu_seqlens_d=cu_seqlens, **options)

        with torch.device("cpu"):  # not the default device
            pool(torch.zeros((0, self.d), dtype=self.dtype), torch.zeros(1, dtype=torch.int64))  # checks the options
        return self._convert("Corpus.pool", path, None, "token", Pooling(pool, num_protected))

    def _convert(self, op: str, path: Any, format: Any, scale: Scale, pooling: Pooling | None = None) -> Corpus:
        """Append documents to the corpus at `path` until it has all of this one. Create it if it does not exist."""
        source, path = self._snapshot, _as_path(op, path)
        if self.format is not None:
            raise ValueError(f"{op}: expected a corpus of unquantized tokens, got one in {self.format}: {self.path}")
        layout = Manifest.new(op, self.d, self.dtype, format, scale).layout
        if not (path / MANIFEST).exists():
            Corpus.create(path, self.d, self.dtype, format, scale)
        return Corpus(path, convert(op, source, path, layout, pooling))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "manifest": self._snapshot.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._snapshot = Snapshot(self.path, state["manifest"])


def _as_path(op: str, path: Any) -> Path:
    """Return `path` as an absolute path. Raise TypeError unless it is a str or `os.PathLike` of str."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise TypeError(f"{op}: path: expected a str or os.PathLike, got {type(path).__name__}")
    return Path(path).absolute()  # the working directory may change
