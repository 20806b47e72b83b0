"""``lik::maxsim_topk_codes``: the best documents of each query, with document tokens replaced by their centroids.

These are the first stages of PLAID (Santhanam et al., 2022). The products of query tokens and centroids are computed
once. Each query token probes its nearest centroids. A document with a token of a probed centroid is scored by looking
up its codes in the products. Queries and documents are processed in parts, so neither all products nor ``[Nq, Nd]``
exist at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from .._ops import add_op_namespace_prefix
from .._ops import ops as lik
from ..core.arguments import (
    DTYPES,
    INDEX_DTYPES,
    as_bool,
    check_count,
    check_device,
    check_tensor,
    require,
)
from ..portable.blocks import compute_row_norms, multiply_by_rows
from ..portable.forward.code_scores import SKIPPED_CODE
from . import topk
from .fast_path.watchers import is_call_direct
from .quantized import make_tokens_like
from .registration.custom import custom_op
from .registration.family import make_raising_backward
from .stack import batching
from .topk import ScoresAndIndices, SearchArgs, reject_derivatives

_SCHEMA = (
    "(Tensor Q, Tensor codes, Tensor centroids, Tensor? q_mask, Tensor? d_mask, Tensor? cu_seqlens_d,"
    " Tensor? q_weight, bool normalize, SymInt top_k, SymInt? n_probe) -> (Tensor, Tensor)"
)
_NAME = add_op_namespace_prefix("maxsim_topk_codes")
_MAX_TABLE_BYTES = 24 << 20  # products of query tokens and centroids that exist at a time


class CodeSearchArgs(NamedTuple):
    """Arguments of `lik::maxsim_topk_codes`, in the order of its schema."""

    Q: Tensor  # [Nq, Lq, d]
    codes: Tensor  # [Nd, Ld], or [Td] with cu_seqlens_d
    centroids: Tensor  # [C, d]
    q_mask: Tensor | None
    d_mask: Tensor | None  # [Nd, Ld]
    cu_seqlens_d: Tensor | None  # [Nd + 1]
    q_weight: Tensor | None
    normalize: bool
    top_k: int
    n_probe: int | None  # nearest centroids that each query token probes; None: all

    @property
    def documents(self) -> Any:
        """Number of documents."""
        return self.codes.shape[0] if self.cu_seqlens_d is None else self.cu_seqlens_d.shape[0] - 1

    def of_queries(self, some: slice) -> CodeSearchArgs:
        """Return the arguments of some queries."""
        q_mask, q_weight = (None if x is None else x[some] for x in (self.q_mask, self.q_weight))
        return self._replace(Q=self.Q[some], q_mask=q_mask, q_weight=q_weight)

    def slice_documents(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes, and the offsets and lengths of documents `begin` to `end` in them.

        The code of a masked token is `SKIPPED_CODE`.
        """
        if self.cu_seqlens_d is not None:
            bounds = self.cu_seqlens_d[begin : end + 1].long()
            return self.codes, bounds[:-1], bounds.diff()
        codes, length = self.codes[begin:end], self.codes.shape[1]
        if self.d_mask is not None:
            codes = torch.where(self.d_mask[begin:end], codes, SKIPPED_CODE)
        offsets = torch.arange(end - begin, device=codes.device) * length
        return codes.flatten(), offsets, torch.full_like(offsets, length)

    def select_documents(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes, and the offsets and lengths of documents ``chosen [n]``, as `slice_documents` does."""
        if self.cu_seqlens_d is not None:
            return self.codes, *topk.locate_documents(chosen, self.documents, 0, self.cu_seqlens_d)
        length = self.codes.shape[1]
        _, lengths = topk.locate_documents(chosen, self.documents, length, None)
        index = torch.where(lengths == length, chosen, 0)
        codes = self.codes[index] if self.documents else self.codes.new_empty((len(chosen), length))
        if self.d_mask is not None and self.documents:
            codes = torch.where(self.d_mask[index], codes, SKIPPED_CODE)
        return codes.flatten(), torch.arange(len(chosen), device=codes.device) * length, lengths


def _check_operator_args(s: CodeSearchArgs) -> None:
    """Raise ValueError or TypeError, naming the argument, unless all arguments fit together."""
    check_tensor(_NAME, "codes", s.codes)
    check_tensor(_NAME, "centroids", s.centroids)
    if s.codes.dtype not in INDEX_DTYPES:
        raise TypeError(f"{_NAME}: codes: expected int32 or int64, got {s.codes.dtype}")
    if s.centroids.dtype not in DTYPES[:3]:
        raise TypeError(f"{_NAME}: centroids: expected float16, bfloat16 or float32, got {s.centroids.dtype}")
    check_tensor(_NAME, "Q", s.Q)
    for name, x in (("codes", s.codes), ("centroids", s.centroids)):
        check_device(_NAME, name, x, s.Q.device)
    if s.codes.dim() != (2 if s.cu_seqlens_d is None else 1):
        raise ValueError(f"{_NAME}: codes: expected [Nd, Ld], or [Td] with cu_seqlens_d, got {list(s.codes.shape)}")
    require(
        s.centroids.dim() == 2 and s.centroids.shape[1] == s.Q.shape[-1],
        lambda: f"{_NAME}: centroids: expected [C, {s.Q.shape[-1]}], as Q has, got {list(s.centroids.shape)}",
    )
    D = make_tokens_like(s.Q, (*s.codes.shape, s.Q.shape[-1]))
    search_args = SearchArgs(s.Q, D, s.q_mask, s.d_mask, s.cu_seqlens_d, s.q_weight, s.normalize, s.top_k, None)
    topk.check_operator_args(_NAME, search_args)
    if s.n_probe is not None:
        check_count(_NAME, "n_probe", s.n_probe, 1)


def _run_search(s: CodeSearchArgs, chosen: Tensor | None = None) -> ScoresAndIndices:
    """Search all documents, or the chosen ones, for some queries at a time, so that products fit `_MAX_TABLE_BYTES`.

    Queries with their own documents, ``chosen [Nq, K]``, are searched one at a time.
    """
    if s.cu_seqlens_d is not None:
        s = s._replace(codes=s.codes.contiguous(), cu_seqlens_d=s.cu_seqlens_d.to(s.Q.device, non_blocking=True))
    is_shared = chosen is None or chosen.dim() == 1
    step = max(1, _MAX_TABLE_BYTES // max(4 * s.centroids.shape[0] * s.Q.shape[1], 1)) if is_shared else 1
    parts = [slice(begin, begin + step) for begin in range(0, max(len(s.Q), 1), step)]
    documents = [chosen if chosen is None or is_shared else chosen[part].flatten() for part in parts]
    results = [_search_queries(s.of_queries(part), some) for part, some in zip(parts, documents, strict=True)]
    return results[0] if len(results) == 1 else (torch.cat([x[0] for x in results]), torch.cat([x[1] for x in results]))


def _search_queries(s: CodeSearchArgs, chosen: Tensor | None) -> ScoresAndIndices:
    """Return the best of all documents, or of ``chosen [K]``, for queries whose products fit `_MAX_TABLE_BYTES`."""
    backend, documents = backends.select_backend(s.Q.device, s.Q.dtype), s.documents if chosen is None else len(chosen)
    (table, weight, probe_mask), is_nonfinite = _make_score_table(s)
    empty = s.Q.new_empty((s.Q.shape[0], 0), dtype=torch.float32)
    best, chunk = (empty, empty.long()), topk.count_fitting_documents(s.Q, s.top_k, documents)
    for begin in range(0, documents, chunk):
        end = min(begin + chunk, documents)
        document_codes = s.slice_documents(begin, end) if chosen is None else s.select_documents(chosen[begin:end])
        scores = backend.code_scores(table, weight, probe_mask, *document_codes).masked_fill_(is_nonfinite, torch.inf)
        if chosen is not None:
            scores.masked_fill_(chosen[begin:end] < 0, -torch.inf)
        top_scores, columns = topk.select_first(scores, s.top_k)
        if begin:
            top_scores, columns = topk.merge_parts([best, (top_scores, columns.add_(begin))], s.top_k)
        best = top_scores, columns
    return best if chosen is None else (best[0], chosen[best[1]])


@torch.no_grad()
def search_chosen(s: CodeSearchArgs, chosen: Tensor) -> ScoresAndIndices:
    """Search some documents as `maxsim_topk_codes` does. The arguments are validated.

    The indices `chosen` are int64 ``[K]``, or ``[Nq, K]`` for each query, ascending, with -1 for none at the end. The
    results are ``[Nq, min(top_k, K)]``, with -1 and ``-inf`` for missing documents.
    """
    return _run_search(s._replace(q_mask=as_bool(s.q_mask), d_mask=as_bool(s.d_mask)), chosen)


def _make_score_table(s: CodeSearchArgs) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the query operands of `code_scores`, and which queries ``[n, 1]`` have a NaN or infinite value.

    The operands are the products of query tokens and centroids (fp32 ``[n, C, Lq]``), the weights, and the probed
    centroids.
    """
    keep = torch.ones(s.Q.shape[:2], dtype=torch.bool, device=s.Q.device) if s.q_mask is None else s.q_mask
    # Masked rows may hold NaN. The tensor is made contiguous, because the order of sums depends on strides.
    Q = torch.where(keep.unsqueeze(-1), s.Q, 0).contiguous()
    if s.normalize:  # unlike torch.nn.functional.normalize, with bits that do not depend on the number of rows
        Q = Q.float()
        Q = Q / compute_row_norms(Q)
    Q = Q.to(s.centroids.dtype)
    products = multiply_by_rows(Q.flatten(0, 1), s.centroids.contiguous().t()).unflatten(0, Q.shape[:2]).float()
    probe_mask = None
    if s.n_probe is not None and s.n_probe < s.centroids.shape[0]:
        nearest = products.topk(s.n_probe, dim=2).indices
        probe_mask = torch.zeros(products.shape, dtype=torch.bool, device=Q.device)
        probe_mask = (probe_mask.scatter_(2, nearest, True) & keep.unsqueeze(-1)).any(1)
    weight = keep.float() if s.q_weight is None else torch.where(keep, s.q_weight.float(), 0)
    is_nonfinite = ((Q * 0).sum((1, 2)) + (weight * 0).sum(1)).isnan().unsqueeze(1)
    return (products.transpose(1, 2), weight.contiguous(), probe_mask), is_nonfinite


@custom_op(add_op_namespace_prefix("maxsim_topk_codes"), _SCHEMA)
def maxsim_topk_codes(*args: Any) -> ScoresAndIndices:
    """Return the best ``min(top_k, Nd)`` documents of each query, scored by their codes alone.

    The score is ``sum_s q_weight[i, s] * max_t <Q[i, s], centroids[codes[j, t]]>`` in fp32. There is no gradient. The
    arguments, in the order of the schema:

    - ``Q``: query tokens ``[Nq, Lq, d]``.
    - ``codes``: int32 or int64 ``[Nd, Ld]``, or packed ``[Td]`` with ``cu_seqlens_d``.
    - ``centroids``: ``[C, d]`` in fp16, bf16 or fp32.
    - ``q_mask``, ``d_mask``: bool (True = keep) ``[Nq, Lq]`` and ``[Nd, Ld]``, or None.
    - ``cu_seqlens_d``: int32 or int64 ``[Nd + 1]``, the offsets of packed documents, or None.
    - ``q_weight``: fp32 (fp64 for fp64) ``[Nq, Lq]``, or None.
    - ``normalize``: whether to L2-normalize the query tokens.
    - ``top_k``: the number of documents to return for each query.
    - ``n_probe``: the number of nearest centroids that each query token probes. None probes all centroids.

    Returns:
        ``(scores, indices)``, fp32 and int64 ``[Nq, min(top_k, Nd)]``, best first. Equal scores are ordered by
        document. A document without tokens, or without a token of a probed centroid, scores ``-inf``. Documents that
        need an exact score are infinite and come first. These are documents with an invalid code. If the tokens or
        weights of a query are NaN or infinite in the dtype of the centroids, these are all documents.
    """
    s = CodeSearchArgs(*args)
    _check_operator_args(s)
    reject_derivatives(_NAME, s.Q, s.centroids, s.q_weight)
    return _run_search(s)


@maxsim_topk_codes.register_fake
def _(*args):
    s = CodeSearchArgs(*args)
    _check_operator_args(s)
    shape = (s.Q.shape[0], torch.sym_min(s.top_k, s.documents))
    return s.Q.new_empty(shape, dtype=torch.float32), s.Q.new_empty(shape, dtype=torch.int64)


maxsim_topk_codes.register_autograd(
    make_raising_backward("maxsim_topk_codes", "score the documents that it returns after Quantized.dequantize()")
)
batching.register_loop(maxsim_topk_codes)


def search_best(s: CodeSearchArgs) -> ScoresAndIndices:
    """Call `lik::maxsim_topk_codes` for validated arguments, with masks of any dtype."""
    s = s._replace(q_mask=as_bool(s.q_mask), d_mask=as_bool(s.d_mask))
    if not torch.compiler.is_dynamo_compiling() and is_call_direct(*s[:7]):
        return _run_search(s)
    return lik.maxsim_topk_codes(*s)
