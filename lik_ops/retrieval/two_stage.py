"""`retrieve` in two stages: quantized documents bound the scores, and only possible results are scored in full.

A maximum changes by no more than its arguments. If no token of a document has an L2 error above `error`, then
``|max_t <q, x_t> - max_t <q, x'_t>| <= ||q|| * error``. The error of a score is at most the sum of this bound over the
query tokens. Rounding of either score adds to the bound, and so does the cast of tokens in an autocast region. A coarse
score therefore gives an interval. A document is not among the k best if its upper end is below the lower ends of k
other documents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import inputs
from ..core.arguments import (
    as_bool,
    check_count,
    check_dense,
    check_dtype,
    check_floats,
    check_strided,
    check_tensor,
    describe_non_tensor,
)
from ..formats.quantize import DocumentBounds
from ..formats.quantized import Quantized, make_placeholder
from ..formats.table import ALL_FORMATS
from ..ops import topk
from ..ops.quantized import make_tokens_like
from ..ops.stack import autocast
from ..ops.topk import ScoresAndIndices, SearchArgs
from . import _rerank, sources
from .arguments import add_query_axis, drop_query_axis
from .staged import retrieve_staged
from .subset import name_results, pad_results, resolve_subset, score_chosen, search_chosen

_OP = "retrieve"
_MAX_COARSE_BYTES = 64 << 20  # coarse scores and the ends of their intervals


class TwoStage(NamedTuple):
    """The result of `lik_ops.retrieve` with ``coarse=``."""

    scores: Tensor  # [Nq, k]
    indices: Tensor  # [Nq, k]
    rescored: Tensor  # [Nq], int64: number of documents scored in full
    proven: Tensor  # [Nq], int64: number of results that are certain to be among the k best of all


class _ScoreIntervals(NamedTuple):
    """Coarse scores ``[n, Nd]`` of some queries, and lower and upper bounds of the full scores in fp64."""

    scores: Tensor
    lower: Tensor
    upper: Tensor


def retrieve_quantized(
    s: SearchArgs, n_probe: Any = None, n_candidates: Any = None, must_cover: bool = True, subset: Any = None
) -> ScoresAndIndices:
    """Run `retrieve` on quantized documents, by their own scores.

    `must_cover` says whether `cu_seqlens_d` must cover D, as in `topk.check_search_args`.
    """
    D: Quantized = s.D
    check_floats(_OP, "Q", s.Q)  # before the placeholder, which torch cannot make for some dtypes
    placeholder = make_placeholder(D)
    query_placeholder = placeholder.new_empty(()).expand(1, 1, D.d)
    topk.check_search_args(_OP, s._replace(Q=query_placeholder, D=placeholder, q_mask=None, q_weight=None), must_cover)
    document_placeholder = make_tokens_like(s.Q, D.shape)
    document_placeholder = document_placeholder if s.cu_seqlens_d is None else document_placeholder.unsqueeze(0)
    if n_probe is None and n_candidates is None:
        check_dense(_OP, s.Q, document_placeholder, None, None, None)
        for name, x in (("q_mask", s.q_mask), ("q_weight", s.q_weight)):
            check_tensor(_OP, name, x, or_none=True)
        return search_quantized(s) if subset is None else _search_quantized_subset(s, subset)
    Q, _, q_weight = autocast.cast_to_autocast(s.Q, s.Q, s.q_weight)
    s = s._replace(Q=Q, q_weight=q_weight)
    check_dense(_OP, Q, make_tokens_like(Q, document_placeholder.shape), s.q_mask, None, q_weight)
    if s.Q.device != D.device:
        raise ValueError(f"{_OP}: Q: expected the device of D, {D.device}, got {s.Q.device}")
    search = add_query_axis(s._replace(q_mask=as_bool(s.q_mask)))
    indices, width = None, s.documents
    if subset is not None:
        indices, width = resolve_subset(_OP, subset, s.Q, s.documents, D.device)
    results = retrieve_staged(_OP, search, n_probe, n_candidates, indices)
    return drop_query_axis(s.Q, pad_results(results, min(s.top_k, width)))


def _search_quantized_subset(s: SearchArgs, subset: Any) -> ScoresAndIndices:
    """Run `retrieve_quantized` on a subset of the documents, without stages."""
    Q, options = s.Q, dict[str, Any]({"q_mask": s.q_mask, "q_weight": s.q_weight, "normalize": s.normalize})
    indices, width = resolve_subset(_OP, subset, s.Q, s.documents, s.D.device)
    if s.cu_seqlens_d is not None:
        options["cu_seqlens_d"] = s.cu_seqlens_d.new_zeros(1, device=s.D.device)
    # Checks and casts the queries as a search of all documents does.
    g = inputs.prepare_args(_OP, Q, s.D[:0], lifts="Q", must_cover_d=False, **options)
    s = s._replace(Q=g.Q, q_mask=g.q_mask, q_weight=g.q_weight)
    return drop_query_axis(Q, pad_results(search_chosen(_OP, s, indices), min(s.top_k, width)))


def search_quantized(s: SearchArgs) -> ScoresAndIndices:
    """Run `retrieve_quantized` on checked arguments, without stages."""
    D: Quantized = s.D
    Q, s = s.Q, add_query_axis(s)
    count = s.documents
    step, best = s.chunk or max(1, _MAX_COARSE_BYTES // (4 * max(len(s.Q), 1))), []
    for begin in range(0, max(count, 1), step):
        end = min(begin + step, count)
        scores = _score_coarse(s, D, begin, end)
        values, indices = topk.select_first(scores, s.top_k)
        best.append((values, indices + begin))
    return drop_query_axis(Q, topk.merge_parts(best, s.top_k))


def retrieve_two_stage(s: SearchArgs, coarse: Any, n_candidates: Any, subset: Any = None) -> TwoStage:
    """Run `retrieve` with ``coarse=`` on a tensor of documents or a corpus."""
    s = _open_corpus(s, coarse)
    Q, q_weight = _check_and_cast(s, coarse, n_candidates)
    s = add_query_axis(s._replace(Q=Q, q_mask=as_bool(s.q_mask), q_weight=q_weight))
    indices, width = (None, 0) if subset is None else _resolve_checked_subset(subset, Q, s.documents)
    count = s.documents if indices is None else indices.shape[-1]
    step = max(1, _MAX_COARSE_BYTES // (20 * max(count, 1))) if indices is None or indices.dim() == 1 else 1
    blocks = []
    for begin in range(0, max(len(s.Q), 1), step):
        query_slice = slice(begin, begin + step)
        block_mask, block_weight = (None if x is None else x[query_slice] for x in (s.q_mask, s.q_weight))
        documents = indices if indices is None or indices.dim() == 1 else indices[query_slice].flatten()
        documents = documents if documents is None else documents[documents >= 0]
        block = _search_block(
            s._replace(Q=s.Q[query_slice], q_mask=block_mask, q_weight=block_weight), coarse, n_candidates, documents
        )
        if documents is not None:
            best = pad_results(name_results(block[:2], documents), min(s.top_k, width))
            block = TwoStage(*best, *block[2:])
        blocks.append(block)
    result = blocks[0] if len(blocks) == 1 else TwoStage(*(torch.cat(x) for x in zip(*blocks, strict=True)))
    return drop_query_axis(Q, result)


def _resolve_checked_subset(subset: Any, Q: Tensor, count: int) -> tuple[Tensor, int]:
    """Return the chosen documents and the width of a subset, after checking its indices on any device."""
    indices, width = resolve_subset(_OP, subset, Q, count, Q.device)
    if bool((indices >= count).any()):
        raise ValueError(f"{_OP}: subset: expected indices of {count} documents, or -1, got {int(indices.max())}")
    return indices, width


def _search_block(s: SearchArgs, coarse: Quantized, n_candidates: int | None, subset: Tensor | None) -> TwoStage:
    """Return the best documents of some queries, among the documents ``subset [n]`` if it is not None.

    The indices count from the first of these documents.
    """
    count = s.documents if subset is None else len(subset)
    k = min(s.top_k, count)
    if subset is None:
        coarse_scores = _score_coarse(s, coarse, 0, count)
    else:
        d_mask = None if s.d_mask is None else s.d_mask.to(s.Q.device)
        coarse_scores = score_chosen(_OP, s._replace(D=coarse, d_mask=d_mask), subset)
    intervals = _compute_intervals(s, coarse, coarse_scores, subset)
    if n_candidates is None:
        is_candidate = _select_possible(intervals, k)
    else:
        is_candidate = _select_best(intervals, max(n_candidates, k))
    documents, n_rescored = _list_documents(is_candidate)
    document_indices = documents if subset is None else name_results((intervals.scores, documents), subset)[1]
    scores = _score_full(s, document_indices).masked_fill_(documents < 0, -torch.inf)
    values, indices = topk.select_candidates(scores, documents, k)
    n_proven = torch.full_like(n_rescored, k)
    if n_candidates is not None and k < count:
        max_upper = intervals.upper.masked_fill(is_candidate, -torch.inf).amax(1, keepdim=True)
        is_certain = (values > max_upper) | (values.isnan() & (max_upper < torch.inf))
        # Documents that score -inf are ordered by index, together with documents that were not chosen.
        first_skipped = (~is_candidate).int().argmax(1, keepdim=True)
        first_skipped.masked_fill_(is_candidate.all(1, keepdim=True), count)
        n_proven = (is_certain | ((max_upper == -torch.inf) & (indices < first_skipped))).sum(1)
    return TwoStage(values, indices, n_rescored, n_proven)


def _open_corpus(s: SearchArgs, coarse: Any) -> SearchArgs:
    """Return the search with a snapshot in place of a corpus. Raise unless the documents can have a coarse stage."""
    from .store.corpus import Corpus

    if not isinstance(s.D, (Tensor, Corpus)) or (isinstance(s.D, Tensor) and s.D.is_nested):
        raise TypeError(f"{_OP}: D: expected a Tensor or a Corpus with coarse, got {describe_non_tensor(s.D)}")
    if isinstance(coarse, Corpus):
        raise TypeError(f"{_OP}: coarse: expected a Quantized, as `documents` of a Corpus with a format, got a Corpus")
    if isinstance(s.D, Corpus):
        if s.cu_seqlens_d is not None:
            raise ValueError(f"{_OP}: cu_seqlens_d: expected None with a Corpus, got {type(s.cu_seqlens_d).__name__}")
        if s.D.format is not None:  # `error` bounds the distance of `coarse` from the original tokens
            raise TypeError(f"{_OP}: D: expected unquantized tokens with coarse, got a Corpus in {s.D.format}")
        snapshot = s.D._snapshot  # read once, because another process may append meanwhile
        return s._replace(D=snapshot, cu_seqlens_d=snapshot.cu_seqlens)
    return s


def _check_and_cast(s: SearchArgs, coarse: Any, n_candidates: Any) -> tuple[Tensor, Tensor | None]:
    """Return queries and weights in the dtype of the autocast region."""
    if not isinstance(coarse, Quantized):
        raise TypeError(f"{_OP}: coarse: expected a Quantized, got {type(coarse).__name__}")
    if n_candidates is not None:
        check_count(_OP, "n_candidates", n_candidates, 1)
    shape, dtype, device = _get_metadata(s.D)
    check_floats(_OP, "Q", s.Q)
    check_dtype(_OP, "D", dtype)
    Q, placeholder, q_weight = sources.prepare_queries(_OP, s.Q, shape, dtype, s.q_weight)
    # Queries and documents may be on two devices, so each side is checked against a placeholder for the other.
    query_placeholder = torch.empty((), dtype=Q.dtype, device=device).expand(Q.shape)
    topk.check_search_args(
        _OP,
        s._replace(Q=query_placeholder, D=make_tokens_like(query_placeholder, shape), q_mask=None, q_weight=None),
    )
    check_dense(_OP, Q, placeholder if s.cu_seqlens_d is None else placeholder.unsqueeze(0), s.q_mask, None, q_weight)
    if device.type == "meta" or Q.is_meta:
        raise ValueError(f"{_OP}: {'Q' if Q.is_meta else 'D'}: expected values, got a meta tensor")
    if s.normalize:
        raise ValueError(f"{_OP}: normalize: expected False with coarse (normalize tokens before quantizing), got True")
    if coarse.device != Q.device:
        raise ValueError(f"{_OP}: coarse: expected the device of Q, {Q.device}, got {coarse.device}")
    count, expected = s._replace(D=coarse).documents, s.documents
    if coarse.d != shape[-1] or count != expected or coarse.dim() == 4:
        raise ValueError(
            f"{_OP}: coarse: expected {expected} documents of d = {shape[-1]} as in D, got {count} of d = {coarse.d}"
        )
    if coarse.query == "binary":
        raise ValueError(f"{_OP}: coarse: expected query 'half' or 'int8', because signs bound no score, got 'binary'")
    if coarse.error is None or coarse.norm is None or coarse.error.shape != (count,):
        raise ValueError(f"{_OP}: coarse: expected the errors of {count} documents, as `quantize` finds them")
    return Q, q_weight


def _get_metadata(D: Any) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """Return the shape, dtype and device of documents, which are a tensor or a snapshot of a corpus."""
    if isinstance(D, Tensor):
        check_strided(_OP, "D", D)
        return tuple(D.shape), D.dtype, D.device
    return (int(D.cu_seqlens[-1]), D.manifest.d), D.manifest.dtype, torch.device("cpu")


def _score_coarse(s: SearchArgs, D: Quantized, begin: int, end: int) -> Tensor:
    """Return the scores ``[Nq, end - begin]`` of quantized documents."""
    options: Any = {"q_mask": s.q_mask, "q_weight": s.q_weight, "normalize": s.normalize, "must_cover_d": False}
    if s.cu_seqlens_d is not None:
        options["cu_seqlens_d"] = s.cu_seqlens_d[begin : end + 1].to(s.Q.device, non_blocking=True)
    elif (begin, end) != (0, len(D)):
        D = D[begin:end]
    if s.d_mask is not None:
        options["d_mask"] = s.d_mask[begin:end].to(s.Q.device)
    return inputs.score_varlen(inputs.prepare_args(_OP, s.Q, D, **options))[0]


def _compute_intervals(
    s: SearchArgs, coarse: Quantized, scores: Tensor, subset: Tensor | None = None
) -> _ScoreIntervals:
    """Return bounds of the full scores, of all documents or of the documents ``subset [n]``.

    Documents and queries with NaN or infinities have infinite bounds.
    """
    assert coarse.error is not None and coarse.norm is not None
    lengths = torch.linalg.vector_norm(s.Q.double(), dim=-1)
    _, Lq, d = s.Q.shape
    if ALL_FORMATS[coarse.format].rotated:  # rotated features may be subnormal
        lengths = lengths + d**0.5 * torch.finfo(s.Q.dtype).smallest_normal
    if s.q_weight is not None:
        lengths = lengths * s.q_weight.abs()
    if s.q_mask is not None:
        lengths = lengths.masked_fill(~s.q_mask, 0)
    rounding = 2 * (d + Lq + 16) * _bound_roundoff(s.Q)
    relative_error = rounding + _bound_operand_error(s.Q, coarse)
    error, norm = coarse.error.double(), coarse.norm.double()
    if _get_metadata(s.D)[1] != s.Q.dtype:
        cast_error = _bound_cast_error(norm, d, s.Q.dtype)
        error, norm = error + cast_error, norm + cast_error
    error_bounds = torch.add(error * (1 + relative_error), norm, alpha=relative_error)
    if (operand_norms := _bound_operand_norms(s, coarse)) is not None:
        error_bounds = error_bounds + rounding * operand_norms
    error_bounds = error_bounds if subset is None else error_bounds[subset]
    centers, lengths = scores.double(), lengths.sum(1, keepdim=True)
    lower, upper = (torch.addcmul(centers, lengths, error_bounds, value=sign) for sign in (-1, 1))
    inf = torch.inf
    return _ScoreIntervals(scores, lower.nan_to_num_(-inf, -inf, -inf), upper.nan_to_num_(inf, inf, -inf))


def _bound_cast_error(norm: Tensor, d: int, dtype: torch.dtype) -> Tensor:
    """Return a bound on the L2 error of tokens with at most these norms when cast to `dtype`, or inf on overflow."""
    info = torch.finfo(dtype)
    bound = info.eps / 2 * (norm + d**0.5 * info.smallest_normal)
    return bound.masked_fill(~(norm <= info.max), torch.inf)  # also for NaN


def _bound_operand_error(Q: Tensor, coarse: Quantized) -> float:
    """Return the relative L2 error of one operand of a product on a GPU."""
    if coarse.query == "int8":  # query rows are rounded to 1/254 of their largest feature, and |x|_1 <= sqrt(d) |x|_2
        return coarse.d**0.5 / 253
    if coarse.query == "fp8":  # query features are rounded to 4 bits, and sums to 14 bits
        return 1 / 16 + 1 / 64 + coarse.d**0.5 / 2**17
    # Rotated queries are rounded to their dtype, and query rows of int8 terms to 1/64,516 of their largest feature.
    is_rotated = ALL_FORMATS[coarse.format].rotated
    if is_rotated or coarse.format in ("int8", "binary"):
        return coarse.d**0.5 / 64_000 + (torch.finfo(Q.dtype).eps if is_rotated else 0.0)
    halves = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}  # tokens of residual codes are rounded to the dtype of Q
    return halves.get(Q.dtype, 0.0) if coarse.codes is not None else 0.0


def _bound_operand_norms(s: SearchArgs, coarse: Quantized) -> Tensor | None:
    """Return bounds on the L2 norms of the multiplied operands of documents, or None if the tokens bound them.

    The operands are larger than the dequantized tokens for "uint8", because numbers and minima cancel in the sum. For
    residual codes, a GPU rounds the bucket weights to fp16 if queries have half precision. The bound is scaled to cover
    this rounding.
    """
    if coarse.codec is not None:
        is_half = s.Q.dtype in (torch.float16, torch.bfloat16)
        max_weight = coarse.codec.weights.abs().amax().double() * (
            2.0**-9 / (2 * _bound_roundoff(s.Q)) if is_half else 0.0
        )
        norms = coarse.d**0.5 * max_weight * coarse.scale.double().abs()
    elif coarse.minimum is None:
        return None
    else:
        norms = coarse.d**0.5 * (255 * coarse.scale.double().abs() + coarse.minimum.double().abs())
    norms = norms.nan_to_num(0)  # NaN: the scores are NaN anyway
    if norms.numel() == 1:
        return norms.reshape(())
    if s.cu_seqlens_d is not None:
        offsets = s.cu_seqlens_d.to(norms.device)
        if 0 in (len(norms), len(offsets) - 1):
            return norms.new_zeros(len(offsets) - 1)
        # Descending offsets make documents share tokens. All documents then use the largest bound.
        is_ascending = (offsets.diff() >= 0).all()
        return torch.where(is_ascending, DocumentBounds(offsets, len(norms)).reduce_tokens(norms, "amax"), norms.amax())
    return norms.amax(1) if norms.shape[1] else norms.new_zeros(len(norms))


def _bound_roundoff(Q: Tensor) -> float:
    """Return the relative error of one operation of a score, with a margin for other orders of a sum."""
    if Q.dtype == torch.float64:
        return 2.0**-51
    # Read for each backend, because the global setting raises after a newer setting was used.
    backends: Any = torch.backends  # the type stubs are incomplete
    matmul = backends.cuda.matmul, backends.mkldnn.matmul
    if Q.dtype == torch.float32 and any(x.fp32_precision not in ("ieee", "none") for x in matmul):
        return 2.0**-8
    return 2.0**-21


def _select_possible(rough: _ScoreIntervals, k: int) -> Tensor:
    """Return a mask ``[n, Nd]`` of the documents that may be among the `k` best."""
    if k == 0:
        return torch.zeros_like(rough.upper, dtype=torch.bool)
    return rough.upper >= rough.lower.topk(k, dim=1).values[:, -1:]


def _select_best(rough: _ScoreIntervals, n: int) -> Tensor:
    """Return a mask ``[n, Nd]`` of the `n` documents with the best coarse scores."""
    mask = torch.zeros_like(rough.upper, dtype=torch.bool)
    return mask.scatter_(1, topk.select_first(rough.scores, n)[1], True)


def _list_documents(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen documents of each query, ascending and padded with -1, and their number."""
    counts = chosen.sum(1)
    query, document = chosen.nonzero(as_tuple=True)
    if len(chosen) == 1:
        return document.unsqueeze(0), counts
    width = int(counts.max()) if counts.numel() else chosen.shape[1]  # without queries, any width is valid
    offsets = counts.cumsum(0) - counts
    column = torch.arange(len(document), device=document.device) - offsets[query]
    documents = document.new_full((len(chosen), width), -1)
    documents[query, column] = document
    return documents, counts


def _score_full(s: SearchArgs, documents: Tensor) -> Tensor:
    """Return the full scores ``[n, K]`` of documents given by index, with -1 for none."""
    D, Q = s.D, s.Q
    if not isinstance(D, Tensor):
        g = inputs.ScoringArgs(_OP, Q, Q.new_empty((0, Q.shape[-1])), q_mask=s.q_mask, q_weight=s.q_weight)
        return _rerank.score_stored(g, D, documents.cpu())
    if D.device != Q.device or D.dtype != Q.dtype:  # copy and cast only the documents that are needed
        indices, inverse = documents.clamp(min=0).to(D.device).unique(return_inverse=True)
        offsets = None if s.cu_seqlens_d is None else s.cu_seqlens_d.to(D.device).long()
        D, cu_seqlens = sources.gather_documents(D, offsets, indices)
        d_mask = None if s.d_mask is None else s.d_mask[indices].to(Q.device)
        s = s._replace(D=D.to(Q.device, Q.dtype), d_mask=d_mask, cu_seqlens_d=cu_seqlens)
        documents = torch.where(documents < 0, -1, inverse.to(Q.device))
    return score_chosen(_OP, s, documents)
