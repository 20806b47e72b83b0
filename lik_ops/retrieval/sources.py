"""Sources of documents that are not on the device: each kind reads a range of documents to the CPU."""

from __future__ import annotations

import itertools
import os
import sys
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api.packing import is_sequences, pack_side
from ..core.arguments import DTYPES, check_has_values, check_mask, check_strided, check_tensor, describe_non_tensor
from ..core.segments import compute_offsets, make_segment_rows
from ..ops import topk
from ..ops.checks import values
from ..ops.stack import autocast
from .arguments import check_unmasked
from .store.layout import StorageLayout, Tokens, join_pieces
from .store.snapshot import Snapshot

# Leaves room for the alignment of the tensors, because pinned memory is allocated in powers of two.
_MAX_PART_BYTES = (256 << 20) - 4096
_CPU_PART_BYTES = 32 << 20  # bytes; a part on the CPU is a view, or is larger than any CPU cache


class DocumentPart(NamedTuple):
    """A range of documents."""

    D: Tokens  # [n, Ld, d], or packed [T, d]
    d_mask: Tensor | None = None  # [n, Ld]
    cu_seqlens: Tensor | None = None  # [n + 1] if packed, on the CPU
    more_pieces: tuple[Tokens, ...] = ()  # the rows after D, if they are in several files

    def join_pieces(self) -> DocumentPart:
        """Return the part with D in one piece."""
        if not self.more_pieces:
            return self
        return self._replace(D=join_pieces([self.D, *self.more_pieces], torch.cat), more_pieces=())


def choose_part_bytes(device: torch.device) -> int:
    """Return the bytes of documents that are copied at a time. A GPU holds two such parts."""
    return _CPU_PART_BYTES if device.type != "cuda" else min(topk.choose_workspace_bytes(device), _MAX_PART_BYTES)


def _slice_rows(D: Any, begin: int, end: int) -> Tensor:
    """Return rows of a tensor as a view, or rows of an array as a copy, because an array may be read-only."""
    if isinstance(D, Tensor):
        return D[begin:end]
    import numpy as np

    return torch.from_numpy(np.array(D[begin:end], order="C"))


def gather_documents(D: Any, offsets: Tensor | None, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return some documents of a tensor or an array as a copy, and the bounds of packed ones, which have `offsets`."""
    rows, cu_seqlens = chosen, None
    if offsets is not None:
        rows, cu_seqlens = make_segment_rows(offsets[chosen], offsets.diff()[chosen])
    if isinstance(D, Tensor):
        return D.index_select(0, rows), cu_seqlens  # copies whole rows; `D[rows]` copies element by element
    return torch.from_numpy(D[rows.numpy()]), cu_seqlens


def split_by_tokens(offsets: Tensor, parts: int) -> list[int]:
    """Return the bounds ``[parts + 1]`` of contiguous ranges of documents with about the same number of tokens."""
    documents, total = offsets.shape[0] - 1, offsets[-1] - offsets[0]
    targets = offsets[0] + total * torch.arange(1, parts, device=offsets.device) // parts
    return [0, *torch.searchsorted(offsets, targets.to(offsets.dtype)).clamp_(max=documents).tolist(), documents]


class DocumentSource:
    """Documents that can be read one range at a time. Subclasses implement `read` and `gather`.

    Args:
        shape: the shape of all documents: ``[Nd, Ld, d]``, or packed ``[Td, d]``.
        dtype: the dtype of the tokens.
        document_bytes: the bytes of a document that must be copied to a device, without the bytes of packed tokens.
        token_bytes: the bytes of a packed token that must be copied to a device.
        offsets: the bounds ``[Nd + 1]`` of packed documents on the CPU, or None.
        d_mask: the mask of dense documents, or None.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        document_bytes: int,
        token_bytes: int = 0,
        offsets: Tensor | None = None,
        d_mask: Tensor | None = None,
    ) -> None:
        self.shape, self.dtype, self.offsets, self.d_mask = shape, dtype, offsets, d_mask
        self.document_bytes, self.token_bytes = document_bytes, token_bytes

    def __len__(self) -> int:
        return self.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    def ranges(self, begin: int, end: int, chunk: int | None, budget: int) -> list[tuple[int, int]]:
        """Split ``[begin, end)`` into ranges of `chunk` documents, or of about `budget` bytes if `chunk` is None."""
        if chunk is None and self.offsets is None:
            chunk = max(budget // max(self.document_bytes, 1), 1)
        if chunk is not None:
            return [(b, min(b + chunk, end)) for b in range(begin, end, chunk)]
        assert self.offsets is not None
        ranges, ends = [], self.offsets * self.token_bytes
        ends += torch.arange(len(ends), device="cpu") * self.document_bytes
        while begin < end:
            last = int(torch.searchsorted(ends, ends[begin] + budget, right=True)) - 1
            bounds = (begin, min(max(last, begin + 1), end))
            ranges.append(bounds)
            begin = bounds[1]
        return ranges

    def split(self, parts: int) -> list[tuple[int, int]]:
        """Split all documents into `parts` contiguous ranges with about the same number of tokens."""
        if self.offsets is None:
            return list(itertools.pairwise(len(self) * i // parts for i in range(parts + 1)))
        return list(itertools.pairwise(split_by_tokens(self.offsets, parts)))

    def nbytes(self, begin: int, end: int) -> int:
        """Return the bytes of a range that must be copied to a device."""
        tokens = 0 if self.offsets is None else int(self.offsets[end] - self.offsets[begin])
        return tokens * self.token_bytes + (end - begin) * self.document_bytes

    def read(self, begin: int, end: int) -> DocumentPart:
        """Read the documents of a range on the CPU. Mapped memory is not copied."""
        raise NotImplementedError

    def gather(self, chosen: Tensor) -> DocumentPart:
        """Read the tokens of the documents ``chosen [n]``, ascending int64 indices, on the CPU as a copy."""
        raise NotImplementedError

    def select(self, chosen: Tensor) -> DocumentSource:
        """Return a source of the documents ``chosen [n]``, ascending int64 indices on the CPU."""
        return _SelectedSource(self, chosen)


class _SelectedSource(DocumentSource):
    """Some documents of a source."""

    def __init__(self, source: DocumentSource, chosen: Tensor) -> None:
        self.source, self.chosen = source, chosen
        offsets = None if source.offsets is None else compute_offsets(source.offsets.diff()[chosen])
        # The copies of parts run on a second stream, which does not wait for a mask that is selected later.
        d_mask = None if source.d_mask is None else source.d_mask[chosen.to(source.d_mask.device)]
        shape = (len(chosen) if offsets is None else int(offsets[-1]), *source.shape[1:])
        super().__init__(shape, source.dtype, source.document_bytes, source.token_bytes, offsets, d_mask)

    def read(self, begin: int, end: int) -> DocumentPart:
        """Read the documents of a range, in place if they are next to each other in the source."""
        chosen = self.chosen[begin:end]
        count = len(chosen)
        if count == 0 or int(chosen[-1]) - int(chosen[0]) == count - 1:
            first = int(chosen[0]) if count else 0
            part = self.source.read(first, first + count)
        else:
            part = self.source.gather(chosen)
        return part._replace(d_mask=None if self.d_mask is None else self.d_mask[begin:end])


class _TensorSource(DocumentSource):
    """Documents of a tensor or an array: dense ``[Nd, Ld, d]``, or packed ``[Td, d]`` with offsets."""

    def __init__(self, D: Any, d_mask: Tensor | None, offsets: Tensor | None) -> None:
        self.D, dtype = D, _slice_rows(D, 0, 0).dtype
        row_bytes = prod(D.shape[1:]) * dtype.itemsize
        if d_mask is not None:
            row_bytes += D.shape[1] * d_mask.element_size()
        document_bytes, token_bytes = (row_bytes, 0) if offsets is None else (0, row_bytes)
        super().__init__(tuple(D.shape), dtype, document_bytes, token_bytes, offsets, d_mask)

    def read(self, begin: int, end: int) -> DocumentPart:
        if self.offsets is None:
            d_mask = None if self.d_mask is None else self.d_mask[begin:end]
            return DocumentPart(_slice_rows(self.D, begin, end), d_mask)
        offsets = self.offsets[begin : end + 1]
        return DocumentPart(_slice_rows(self.D, int(offsets[0]), int(offsets[-1])), None, offsets - offsets[0])

    def gather(self, chosen: Tensor) -> DocumentPart:
        D, cu_seqlens = gather_documents(self.D, self.offsets, chosen)
        return DocumentPart(D, None, cu_seqlens)


class PackedSource(DocumentSource):
    """Packed documents in a storage layout."""

    offsets: Tensor

    def __init__(self, offsets: Tensor, tokens: int, layout: StorageLayout) -> None:
        super().__init__((tokens, layout.d), layout.dtype, layout.nbytes(False), layout.nbytes(True), offsets)


class _CorpusSource(PackedSource):
    """A snapshot of a `Corpus`."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        super().__init__(snapshot.cu_seqlens, int(snapshot.cu_seqlens[-1]), snapshot.manifest.layout)

    def read(self, begin: int, end: int) -> DocumentPart:
        (D, *more_pieces), cu_seqlens = self.snapshot.pieces(begin, end)
        return DocumentPart(D, None, cu_seqlens, tuple(more_pieces))

    def gather(self, chosen: Tensor) -> DocumentPart:
        D, cu_seqlens = self.snapshot.gather_documents(chosen)
        return DocumentPart(D, None, cu_seqlens)


def prepare_queries(
    op: str, Q: Any, shape: tuple[int, ...], dtype: torch.dtype, q_weight: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return Q, a placeholder for documents and `q_weight`, in the dtype of the autocast region.

    The placeholder has the given shape without the memory. Raise TypeError if Q is not a Tensor, or has another dtype
    than the documents.
    """
    if not isinstance(Q, Tensor):
        raise TypeError(f"{op}: Q: expected a Tensor, got {describe_non_tensor(Q)}")
    check_strided(op, "Q", Q)
    Q, placeholder, q_weight = autocast.cast_to_autocast(Q, torch.empty((), dtype=dtype, device=Q.device), q_weight)
    check_dtype(op, Q, placeholder.dtype)
    return Q, placeholder.expand(shape), q_weight


def check_dtype(op: str, Q: Any, dtype: torch.dtype) -> None:
    """Raise TypeError if Q has another dtype than the documents. The message says how to convert Q."""
    if isinstance(Q, Tensor) and Q.dtype != dtype and Q.dtype in DTYPES and dtype in DTYPES:
        raise TypeError(f"{op}: D: expected the dtype of Q, {Q.dtype}, got {dtype}: convert the queries, Q.to({dtype})")


def open_source(op: str, D: Any, d_mask: Tensor | None, cu_seqlens_d: Tensor | None) -> DocumentSource:
    """Return the source that reads `D`, a tensor on the CPU, an array or a `Corpus`.

    Raise TypeError if `D` cannot be read, and ValueError if the arguments do not fit together.
    """
    if isinstance(snapshot := getattr(D, "_snapshot", None), Snapshot):
        for name, x in (("d_mask", d_mask), ("cu_seqlens_d", cu_seqlens_d)):
            if x is not None:
                raise ValueError(f"{op}: {name}: expected None with a Corpus, got {type(x).__name__}")
        return _CorpusSource(snapshot)
    for name, x in (("d_mask", d_mask), ("cu_seqlens_d", cu_seqlens_d)):
        check_tensor(op, name, x, or_none=True)
        if x is not None:
            check_strided(op, name, x)
            check_has_values(op, name, x)
    _check_readable(op, D)
    shape = list(D.shape)
    if len(shape) != (3 if cu_seqlens_d is None else 2):
        raise ValueError(f"{op}: D: expected [Nd, Ld, d], or [Td, d] with cu_seqlens_d, got {shape}")
    if cu_seqlens_d is not None:
        if d_mask is not None:
            raise ValueError(f"{op}: d_mask: expected None next to cu_seqlens_d (pack the tokens to keep), got a mask")
        topk.check_document_offsets(op, cu_seqlens_d, cu_seqlens_d.device)
        offsets = cu_seqlens_d.cpu().long()
        values.check_cu_seqlens(op, "cu_seqlens_d", offsets, "D", D, must_cover=values.needs_value_checks(offsets))
        return _TensorSource(D, None, offsets)
    if d_mask is not None:
        like_mask = torch.empty((), device=d_mask.device).expand(shape)
        check_mask(op, "d_mask", d_mask, "D", like_mask)
    return _TensorSource(D, d_mask, None)


def pack_documents(op: str, D: Any, d_mask: Any, cu_seqlens_d: Any, Q: Any = None) -> tuple[Any, Any]:
    """Return D and `cu_seqlens_d`, packed if D is a list or nested tensor. Q gives an empty list its d and dtype."""
    if not is_sequences(D):
        return D, cu_seqlens_d
    side = pack_side(op, "D", D, d_mask, cu_seqlens_d, Q)
    return side.tokens, side.cu_seqlens


def _check_readable(op: str, D: Any) -> None:
    """Raise unless D is a tensor on the CPU, or an array that torch can read."""
    if isinstance(D, Tensor):
        check_strided(op, "D", D)
        if D.device.type != "cpu":
            raise ValueError(f"{op}: D: expected the device of Q, or cpu, got {D.device}")
        return
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(D, numpy.ndarray):
        expected = "a Tensor, a list of Tensors, a numpy.ndarray or a Corpus"
        hint = ": open a corpus with lik_ops.Corpus.open" if isinstance(D, (str, os.PathLike)) else ""
        raise TypeError(f"{op}: D: expected {expected}, got {describe_non_tensor(D)}{hint}")
    check_unmasked(op, "D", D)
    if D.dtype not in (numpy.float16, numpy.float32, numpy.float64):  # excludes the other byte order
        raise TypeError(f"{op}: D: expected float16, float32 or float64, got an array of {D.dtype}")
