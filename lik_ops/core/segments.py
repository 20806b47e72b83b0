"""Argument records: `DenseArgs` for dense operators, `PackedArgs` and `RaggedArgs` for ragged operators and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import (
    check_cu_seqlens,
    check_dense,
    check_dense_batched,
    check_indices,
    check_per_token,
    check_tokens,
    describe_type,
)

Shape = tuple[Any, ...]  # sizes may be symbolic


class DenseArgs(NamedTuple):
    """Tensors of the dense operators, with all their axes."""

    Q: Tensor  # [Nq, Lq, d]
    D: Tensor  # [Nd, Ld, d] (cross product) or [Nq, K, Ld, d] (candidates)
    q_mask: Tensor | None  # the shape of Q without d, bool
    d_mask: Tensor | None  # the shape of D without d, bool
    q_weight: Tensor | None  # the shape of Q without d, fp32 (fp64 for fp64)

    def check(self, op: str) -> None:
        """Raise ValueError or TypeError, naming the argument, unless all fit together. Messages begin with `op`."""
        check_dense(op, *self)
        check_dense_batched(op, self.Q, self.D, self.q_mask, self.d_mask)

    def scores_shape(self) -> Shape:
        """Return the shape of the scores, ``(Nq, Nd)`` or ``(Nq, K)``."""
        return self.Q.shape[0], self.D.shape[-3]

    def argmax_shape(self) -> Shape:
        """Return the shape of the argmax, ``(Nd, Nq, Lq)``, or ``(Nq, K, Lq)`` for candidates.

        In this order the forward and both backwards access the argmax sequentially.
        """
        (queries, columns), Lq = self.scores_shape(), self.Q.shape[1]
        return (queries, columns, Lq) if self.D.dim() == 4 else (columns, queries, Lq)


class RaggedArgs(NamedTuple):
    """A ragged call in which all tokens are packed and every segment has an explicit offset and length.

    Code that cannot read the other forms of `PackedArgs` uses this one. A segment, offset, length or index that is
    negative or reaches outside its tensor makes its scores NaN. Documents may overlap and repeat. Queries may not. If
    descending offsets make queries overlap, argmax and gradients are undefined.

    Scores are ``[Nq, Nd]``, ``[Nq, K]`` for candidates (2-D offsets), or ``[P]`` for pairs. The argmax is relative to
    its document, and its shape is ``[Nd, Tq]``, ``[K, Tq]`` or ``[P, max_seqlen_q]``.
    """

    Q: Tensor  # [Tq, d]
    D: Tensor  # [Td, d]
    cu_seqlens_q: Tensor  # [Nq + 1], int32 or int64
    d_offsets: Tensor  # [Nd] (cross product, pair list) or [Nq, K] (candidates): the first row of a document
    d_lengths: Tensor  # the same shape
    pairs: Tensor | None  # [P, 2] (query, document) indices, int32 or int64; None: cross product or candidates
    q_mask: Tensor | None  # [Tq] bool
    d_mask: Tensor | None  # [Td] bool
    q_weight: Tensor | None  # [Tq] fp32 (fp64 for fp64)

    @classmethod
    def from_tensors(cls, tensors: Sequence) -> RaggedArgs:
        """Return the packed form of `PackedArgs.operator_tensors`. Offsets become offsets and lengths.

        Each tensor may have leading batch axes.
        """
        Q, D, cu_seqlens_q, offsets, lengths, pairs, q_mask, d_mask, q_weight = tensors
        if cu_seqlens_q is None:
            cu_seqlens_q, Q = make_dense_offsets(Q.shape[-3], Q.shape[-2], Q.device), Q.flatten(-3, -2)
            q_mask, q_weight = [None if x is None else x.flatten(-2, -1) for x in (q_mask, q_weight)]
        if offsets is None:
            offsets, D = make_dense_offsets(D.shape[-3], D.shape[-2], D.device), D.flatten(-3, -2)
            d_mask = None if d_mask is None else d_mask.flatten(-2, -1)
        if lengths is None:
            offsets, lengths = offsets[..., :-1], offsets[..., 1:] - offsets[..., :-1]
        return cls(Q, D, cu_seqlens_q, offsets, lengths, pairs, q_mask, d_mask, q_weight)

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def columns(self) -> int:
        """Number of documents, or candidates of each query."""
        return self.d_offsets.shape[-1]

    @property
    def candidates(self) -> bool:
        """Return whether each query has its own documents."""
        return self.d_offsets.dim() == 2


class PackedArgs(NamedTuple):
    """Arguments of a ragged operator or kernel: the caller's tensors, without any operation applied, and their sizes.

    - If `lengths` is None, `offsets` is ``[Nd + 1]``, the first row of each document and the end of the last one.
    - If `cu_seqlens_q` is None, Q is dense ``[Nq, Lq, d]``. Then `q_lengths`, if given, limits the tokens of each
      query.
    - If `offsets` is None, D is dense ``[Nd, Ld, d]`` or ``[Nq, K, Ld, d]``. Then `lengths`, if given, limits the
      tokens of each document.

    The rows of a dense tensor are evenly spaced, and so are the rows of its mask and weights.
    """

    Q: Tensor
    D: Tensor
    cu_seqlens_q: Tensor | None
    offsets: Tensor | None
    lengths: Tensor | None
    pairs: Tensor | None
    q_lengths: Tensor | None
    q_mask: Tensor | None
    d_mask: Tensor | None
    q_weight: Tensor | None
    queries: int
    columns: int  # documents, or candidates of each query
    candidates: bool
    Tq: int
    Td: int
    max_seqlen_q: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The ten tensors of the call, each may be None."""
        return self[:10]

    @property
    def indices(self) -> tuple[Tensor | None, ...]:
        """Integer tensors, or None."""
        return self[2:7]

    @property
    def per_token(self) -> tuple[Tensor | None, ...]:
        """Masks and weights, or None."""
        return self[7:10]

    @property
    def sizes(self) -> tuple:
        """Sizes and flags, which are not tensors."""
        return self[10:]

    def metadata(self, *others: Tensor | None) -> tuple:
        """Return a key of everything except values and addresses that determines how the call is computed.

        `others` are further tensors of the call.
        """
        layouts = [None if x is None else (x.shape, x.stride(), x.dtype) for x in (*self.tensors, *others)]
        return self.Q.get_device(), *self.sizes, *layouts

    @property
    def has_no_gaps(self) -> bool:
        """Return whether every row of Q is known to belong to a query. Offsets may leave gaps."""
        return self.cu_seqlens_q is None and self.q_lengths is None

    @property
    def q_each(self) -> int | None:
        """Rows of each query if Q is dense, else None."""
        return self.Q.shape[1] if self.cu_seqlens_q is None else None

    @property
    def d_each(self) -> int | None:
        """Rows of each document if D is dense, else None."""
        return self.D.shape[-2] if self.offsets is None else None

    @property
    def items(self) -> int:
        """Number of documents, candidates of all queries, or pairs."""
        if self.pairs is not None:
            return self.pairs.shape[0]
        return self.queries * self.columns if self.candidates else self.columns

    @classmethod
    def from_tensors(cls, tensors: Sequence, max_seqlen_q: Any) -> PackedArgs:
        """Return the arguments of a ragged operator with their sizes. `check_ragged_tensors` accepts the tensors."""
        Q, D, cu_seqlens_q, offsets, lengths, pairs, *per_token = tensors
        if cu_seqlens_q is None:
            queries, Tq = Q.shape[0], Q.shape[0] * Q.shape[1]
        else:
            queries, Tq = cu_seqlens_q.shape[0] - 1, Q.shape[0]
        if offsets is None:
            columns, Td = D.shape[0], D.shape[0] * D.shape[1]
        else:
            columns, Td = offsets.shape[-1] - (1 if lengths is None else 0), D.shape[0]
        candidates = offsets is not None and offsets.dim() == 2
        indices = cu_seqlens_q, offsets, lengths, pairs, None
        sizes = queries, columns, candidates, Tq, Td, max_seqlen_q
        return cls._make((Q, D, *indices, *per_token, *sizes))

    def for_kernel(self) -> PackedArgs:
        """Return arguments that a kernel can read: contiguous indices, and evenly spaced rows."""
        tokens = [x if has_even_rows(x, 1) else x.contiguous() for x in self[:2]]
        indices = [x if x is None or x.is_contiguous() else x.contiguous() for x in self.indices]
        per_token = [x if x is None or has_even_rows(x, 0) else x.contiguous() for x in self.per_token]
        return PackedArgs._make((*tokens, *indices, *per_token, *self.sizes))

    @property
    def operator_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors of a ragged operator, which do not include `q_lengths`."""
        return *self[:6], *self.per_token

    def ragged(self) -> RaggedArgs:
        """Return the same call with packed tokens, without `q_lengths`. This runs small torch operations."""
        return RaggedArgs.from_tensors(self.operator_tensors)

    def scores_shape(self) -> Shape:
        """Return the shape of the scores."""
        return (self.queries, self.columns) if self.pairs is None else (self.pairs.shape[0],)

    def argmax_shape(self) -> Shape:
        """Return the shape of the argmax."""
        return (self.columns, self.Tq) if self.pairs is None else (self.pairs.shape[0], self.max_seqlen_q)


def check_ragged_tensors(op: str, tensors: Sequence) -> None:
    """Raise ValueError or TypeError, naming the argument, unless `tensors` are valid inputs of a ragged operator."""
    Q, D, cu_seqlens_q, d_offsets, d_lengths, pairs, q_mask, d_mask, q_weight = tensors
    q_shape = "[Tq, d]" if cu_seqlens_q is not None else "[Nq, Lq, d] without cu_seqlens_q"
    d_shape = "[Td, d]" if d_offsets is not None else "[Nd, Ld, d] without d_offsets"
    check_tokens(op, Q, D, (q_shape,), (d_shape,))
    if cu_seqlens_q is not None:
        check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, Q.device)
    _check_document_segments(op, Q, cu_seqlens_q, d_offsets, d_lengths, pairs)
    if pairs is not None:
        check_indices(op, "pairs", pairs, (None, 2), "[P, 2]", Q.device)
    check_per_token(op, Q, D, q_mask, d_mask, q_weight, (torch.bool,))


def _check_document_segments(op: str, Q: Tensor, cu_seqlens_q: Any, d_offsets: Any, d_lengths: Any, pairs: Any) -> None:
    """Raise ValueError or TypeError unless the offsets and lengths of documents fit together."""
    if d_offsets is None:
        if d_lengths is not None:
            raise ValueError(f"{op}: d_lengths: expected None without d_offsets, got {describe_type(d_lengths)}")
        return
    if d_lengths is None:
        check_cu_seqlens(op, "d_offsets", d_offsets, Q.device, "[Nd + 1] without d_lengths")
        return
    expected: Shape
    if pairs is None and isinstance(d_offsets, Tensor) and d_offsets.dim() == 2:
        queries = Q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        expected, shape_text = (queries, None), "[Nq, K]"
    else:
        expected, shape_text = (None,), "[Nd]" if pairs is not None else "[Nd] or [Nq, K]"
    check_indices(op, "d_offsets", d_offsets, expected, shape_text, Q.device)
    check_indices(op, "d_lengths", d_lengths, d_offsets.shape, "the shape of d_offsets", Q.device)


def has_even_rows(x: Tensor, features: int) -> bool:
    """Return whether all leading axes could be one axis with a constant stride.

    `features` is the number of trailing axes to exclude, 1 for tokens and 0 for masks and weights.
    """
    shape, stride = x.shape[: x.dim() - features], x.stride()
    return all(stride[n] == stride[n + 1] * shape[n + 1] for n in range(len(shape) - 1))


def compute_offsets(lengths: Tensor) -> Tensor:
    """Return the offsets ``[n + 1]`` of sequences with these integer lengths, in int64."""
    return F.pad(lengths.flatten().cumsum(0, dtype=torch.int64), (1, 0))


def make_segment_rows(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of some segments, concatenated, and the offset of each segment in them ``[n + 1]``, in int64."""
    bounds = compute_offsets(length)
    shift = (start - bounds[:-1]).repeat_interleave(length)
    return torch.arange(shift.shape[0], device=start.device) + shift, bounds


def make_dense_offsets(count, length, device: torch.device) -> Tensor:
    """Return the offsets of dense sequences once they are packed, ``[count + 1]``."""
    if isinstance(count, int) and isinstance(length, int) and length > 0:
        return torch.arange(0, count * length + 1, length, device=device)
    return torch.arange(count + 1, device=device) * length
