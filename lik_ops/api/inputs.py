"""Argument preparation and scoring that the public functions share, for dense, packed and quantized tokens."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .._ops import ops as lik
from ..core.arguments import (
    as_bool,
    check_count,
    check_cu_seqlens,
    check_fits_memory,
    check_floats,
    check_indices,
    check_mask,
    check_options,
    check_per_token,
    check_same_size,
    choose_argmax_dtype,
    describe_non_tensor,
    describe_type,
    format_shape,
)
from ..core.segments import PackedArgs
from ..formats.index import Index
from ..formats.quantized import Quantized, make_placeholder
from ..ops.checks import hints, values
from ..ops.fast_path import eager
from ..ops.fast_path.eager import needs_gradients
from ..ops.fast_path.watchers import is_ordinary_tensor
from ..ops.quantized import make_tokens_like
from ..ops.stack import autocast, functional, sharding
from .packing import PackedSequences, check_sides, is_sequences, pack_side, pack_weights

# Tensors, nested ones included, arrays, or lists of them.
Tokens: TypeAlias = Union[Tensor, "np.ndarray", Sequence[Tensor], Sequence["np.ndarray"]]
if TYPE_CHECKING:
    import numpy as np

ArgmaxOutput: TypeAlias = Tensor | list[Tensor]  # a list for a list of queries


class ScoringArgs(NamedTuple):
    """The checked arguments that all layouts share, with lists and nested tensors already packed."""

    op: str
    Q: Tensor
    D: Tensor
    cu_seqlens_q: Tensor | None = None  # None: dense
    cu_seqlens_d: Tensor | None = None
    q_mask: Tensor | None = None
    d_mask: Tensor | None = None
    q_weight: Tensor | None = None
    normalize: bool = False
    backward: str = "auto"
    recompute: bool = False
    with_argmax: bool = False
    queries: PackedSequences | None = None  # if they were a list or nested tensor
    quantized: Quantized | None = None  # the documents, if D is a placeholder without memory
    has_candidates: bool = False  # each query has its own candidates, packed in order
    q_flat: bool = False  # Q was 2-D, so the results have no query axis
    d_flat: bool = False
    refused: bool = False  # the fast path cannot run this call

    @property
    def query_length_bound(self) -> Any:
        """An upper bound on the tokens of a query that needs no device sync."""
        return self.Q.shape[1 if self.cu_seqlens_q is None else 0]

    def packed(
        self,
        offsets: Tensor | None,
        lengths: Tensor | None = None,
        pairs: Tensor | None = None,
        max_seqlen_q: Any = None,
    ) -> PackedArgs:
        """Return the arguments of the operator for documents at `offsets` or for `pairs`."""
        tensors = self.Q, self.D, self.cu_seqlens_q, offsets, lengths, pairs, self.q_mask, self.d_mask, self.q_weight
        return sharding.make_packed_args(tensors, self.query_length_bound if max_seqlen_q is None else max_seqlen_q)


def prepare_args(
    op: str,
    Q: Any,
    D: Any,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    q_weight: Any = None,
    normalize: bool = False,
    backward: str = "auto",
    recompute: bool = False,
    with_argmax: bool = False,
    d_shape: str | None = None,
    lifts: str = "",
    packs: str = "",
    refused: bool = False,
    must_cover_d: bool = True,
) -> ScoringArgs:
    """Pack lists and nested tensors, and check the arguments that all layouts share.

    Masks, weights and options are as in `lik_ops.maxsim`, and the bounds as in `lik_ops.maxsim_varlen`.

    - `d_shape`: the expected shape of D, if it does not follow from `cu_seqlens_d`.
    - `lifts`: the sides, out of "QD", that may be 2-D without `cu_seqlens`: a single query or document.
    - `packs`: the sides, out of "QD", that the function accepts packed with `cu_seqlens`. Only for messages.
    - `refused`: `eager.try_maxsim_ragged` has refused these arguments. It is tried again only if they change here.
    - `must_cover_d`: whether `cu_seqlens_d` must cover D. False for a slice of the caller's bounds.
    """
    check_options(op, normalize, backward, recompute)
    sharding.register_if_needed()
    if isinstance(D, Index):
        D, cu_seqlens_d = unpack_index(op, D, cu_seqlens_d)
    quantized, has_candidates = D if isinstance(D, Quantized) else None, False
    if quantized is not None:
        D = _make_placeholder(op, Q, quantized)
        has_candidates = D.dim() == 4
        if has_candidates:
            _check_candidate_lists(op, Q, D)
            check_mask(op, "d_mask", d_mask, "D", D)
            D, d_mask = D.flatten(0, 1), None if d_mask is None else d_mask.flatten(0, 1)
    original_args = Q, D, cu_seqlens_q, cu_seqlens_d, q_mask, d_mask, q_weight
    q_flat = "Q" in lifts and cu_seqlens_q is None and _is_single(Q)
    d_flat = "D" in lifts and cu_seqlens_d is None and _is_single(D)
    if q_flat:
        Q, q_mask, q_weight = (_add_batch_axis(x) for x in (Q, q_mask, q_weight))
    if d_flat:
        D, d_mask = _add_batch_axis(D), _add_batch_axis(d_mask)
    queries = None
    if is_sequences(Q):
        queries = pack_side(op, "Q", Q, q_mask, cu_seqlens_q, D)
        Q, cu_seqlens_q = queries.tokens, queries.cu_seqlens
        q_weight = pack_weights(op, q_weight, queries)
    if is_sequences(D) and d_shape is None:
        documents = pack_side(op, "D", D, d_mask, cu_seqlens_d, Q)
        D, cu_seqlens_d = documents.tokens, documents.cu_seqlens
    Q, D, q_weight = _cast_to_autocast(Q, D, q_weight, quantized is not None)
    check_sides(op, Q, D, cu_seqlens_q, cu_seqlens_d, d_shape, lifts, packs)
    check_per_token(op, Q, D, q_mask, d_mask, q_weight)
    hints.inspect_tokens(op, Q, D, q_mask, d_mask, normalize or quantized is not None)
    for side, offsets, x, must_cover in (("q", cu_seqlens_q, Q, True), ("d", cu_seqlens_d, D, must_cover_d)):
        if offsets is not None:
            check_cu_seqlens(op, f"cu_seqlens_{side}", offsets, x.device)
            hints.inspect_offsets(op, f"cu_seqlens_{side}", offsets, side.upper(), x, must_cover)
    tensors = Q, D, cu_seqlens_q, cu_seqlens_d, as_bool(q_mask), as_bool(d_mask), q_weight
    is_same_call = refused and all(map(operator.is_, tensors, original_args))
    refused = quantized is not None or torch.compiler.is_dynamo_compiling() or is_same_call
    options = normalize, backward, recompute, with_argmax
    return ScoringArgs(op, *tensors, *options, queries, quantized, has_candidates, q_flat, d_flat, refused)


def _cast_to_autocast(Q: Tensor, D: Tensor, q_weight: Any, stands_in: bool) -> tuple[Tensor, Tensor, Any]:
    """Return Q, D and `q_weight` in the dtype of the autocast region. A placeholder D follows the dtype of Q."""
    if not stands_in:
        return autocast.cast_to_autocast(Q, D, q_weight)
    Q, _, q_weight = autocast.cast_to_autocast(Q, Q, q_weight)
    return Q, D if D.dtype == Q.dtype else make_tokens_like(Q, D.shape), q_weight


def _check_candidate_lists(op: str, Q: Any, D: Tensor) -> None:
    """Raise unless there are as many queries as candidate lists."""
    # A nested tensor of the strided layout has no shape. It is checked when it is unpacked.
    count = len(Q) if isinstance(Q, (list, tuple)) else Q.size(0) if Q.is_nested or Q.dim() == 3 else None
    if count is None:
        raise ValueError(f"{op}: Q: expected [Nq, Lq, d] with D [Nq, K, Ld, d], got {format_shape(Q)}")
    check_same_size(D.shape[0], count, lambda: f"{op}: D: expected Nq = {count} candidate lists, got {format_shape(D)}")


def unpack_index(op: str, D: Index, cu_seqlens_d: Any) -> tuple[Quantized, Tensor]:
    """Return the quantized documents of an index and their ``cu_seqlens``. Raise if `cu_seqlens_d` is also given."""
    if cu_seqlens_d is not None:
        raise ValueError(f"{op}: cu_seqlens_d: expected None with an Index, got {describe_type(cu_seqlens_d)}")
    return D.documents, D.cu_seqlens


def replace_documents(g: ScoringArgs, D: Tensor | Quantized) -> ScoringArgs:
    """Return checked arguments with other documents in place of D."""
    if isinstance(D, Tensor):
        return g._replace(D=D)
    return g._replace(D=make_tokens_like(g.Q, D.shape), quantized=D, refused=True)


def _make_placeholder(op: str, Q: Any, quantized: Quantized) -> Tensor:
    """Return a placeholder for quantized documents, in the dtype that they had before quantization."""
    if not isinstance(Q, (list, tuple, Tensor)):
        raise TypeError(f"{op}: Q: expected a Tensor or a list of tensors, got {describe_non_tensor(Q)}")
    if isinstance(Q, Tensor) and not Q.is_nested:
        check_floats(op, "Q", Q)  # torch makes no placeholder for some layouts and dtypes of Q
    query = next(iter(Q), None) if isinstance(Q, (list, tuple)) else Q
    if isinstance(query, Tensor) and quantized.device != query.device:
        raise ValueError(f"{op}: D: expected the device of Q, {query.device}, got {quantized.device}")
    return make_placeholder(quantized)


def _is_single(x: Any) -> bool:
    """Return whether `x` is a strided 2-D tensor: one query or one document."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested and x.dim() == 2


def _add_batch_axis(x: Any) -> Any:
    """Return `x` with a leading axis if it is a strided tensor, else unchanged."""
    return x.unsqueeze(0) if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested else x


def _try_eager(
    g: ScoringArgs,
    offsets: Tensor | None,
    lengths: Tensor | None = None,
    pairs: Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """Return ``(scores, argmax)`` from the fast path, or None if the call must use the operator."""
    if g.quantized is not None:
        indices, per_token = (g.cu_seqlens_q, offsets, lengths, pairs, None), (g.q_mask, g.d_mask, g.q_weight)
        settings = g.quantized.d, g.normalize, g.backward, g.recompute
        keywords: dict[str, Any] = {"max_seqlen_q": max_seqlen_q, "with_argmax": g.with_argmax}
        return eager.try_maxsim_quantized(g.quantized.to_encoded(), g.Q, indices, per_token, settings, **keywords)
    if g.refused:
        return None
    tensors = g.Q, g.D, g.cu_seqlens_q, offsets, lengths, pairs, None, g.q_mask, g.d_mask, g.q_weight
    options: dict[str, Any] = {"normalize": g.normalize, "backward": g.backward, "recompute": g.recompute}
    return eager.try_maxsim_ragged(*tensors, **options, max_seqlen_q=max_seqlen_q, with_argmax=g.with_argmax)


def score_varlen(g: ScoringArgs) -> tuple[Tensor, Any]:
    """Return the scores and the argmax of every query and every document, or of its own candidates for 4-D documents.

    Scores are ``[Nq, Nd]``, or ``[Nq, K]`` for quantized candidates ``[Nq, K, Ld, d]``. The argmax has the form of the
    queries, or is None if it was not requested.
    """
    if g.has_candidates:
        assert g.quantized is not None
        r, shape = g.packed(None).ragged(), g.quantized.shape[:2]
        r = r._replace(d_offsets=r.d_offsets.view(shape), d_lengths=r.d_lengths.view(shape))
        return _restore_axes(g, *_call_operator(g, PackedArgs.from_tensors(r, g.query_length_bound)))
    return _restore_axes(g, *score_documents(g, g.cu_seqlens_d))


def score_candidates(g: ScoringArgs, offsets: Tensor, lengths: Tensor) -> tuple[Tensor, Any]:
    """Return the scores ``[Nq, K]`` and the argmax of each query and its own candidates in the packed store D.

    `offsets` and `lengths` are ``[Nq, K]``, or ``[K]`` for a single query: the first row and the number of rows of each
    candidate. They are checked here. The argmax has the form of the queries, or is None if it was not requested.
    """
    segments = offsets, lengths
    if g.q_flat:
        _check_candidates(g, offsets, lengths, (None,), "[K]")
        offsets, lengths = offsets.unsqueeze(0), lengths.unsqueeze(0)
    queries = g.Q.shape[0] if g.cu_seqlens_q is None else g.cu_seqlens_q.shape[0] - 1
    if g.quantized is not None:  # the fast path checks other calls, once for each description
        _check_candidates(g, offsets, lengths, (queries, None), "[Nq, K]")
    has_segments = offsets is not None and lengths is not None
    if has_segments and (results := _try_eager(g, offsets, lengths)) is not None:
        return _restore_axes(g, *results)
    if g.quantized is None:
        _check_candidates(g, offsets, lengths, (queries, None), "[Nq, K]")
    if values.needs_value_checks(offsets, lengths):
        values.check_segments(g.op, ("doc_offsets", "doc_lengths"), *segments, "D", g.D)
    return _restore_axes(g, *_call_operator(g, g.packed(offsets, lengths)))


def score_documents(
    g: ScoringArgs, offsets: Tensor | None, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the scores ``[Nq, K]`` and the argmax of the operator, with `offsets` and `lengths` as in `PackedArgs`."""
    results = _try_eager(g, offsets, lengths)
    return _call_operator(g, g.packed(offsets, lengths)) if results is None else results


def _check_candidates(g: ScoringArgs, offsets: Tensor, lengths: Tensor, expected: tuple, spelled: str) -> None:
    """Raise unless `offsets` and `lengths` are integers of the expected shape on the device of Q."""
    check_indices(g.op, "doc_offsets", offsets, expected, spelled, g.Q.device)
    check_indices(g.op, "doc_lengths", lengths, offsets.shape, "the shape of doc_offsets", g.Q.device)


def score_pair_list(g: ScoringArgs, pairs: Tensor, max_seqlen_q: int | None = None) -> tuple[Tensor, Any]:
    """Return the scores ``[P]`` and the argmax ``[P, max_seqlen_q]`` of ``pairs [P, 2]``.

    The argmax is None if it was not requested. ValueError is raised if `max_seqlen_q` is required and not given.
    """
    check_indices(g.op, "pairs", pairs, (None, 2), "[P, 2]", g.Q.device)
    if max_seqlen_q is not None:
        check_count(g.op, "max_seqlen_q", max_seqlen_q)
        check_fits_memory(g.op, "max_seqlen_q", (pairs.shape[0], max_seqlen_q) if g.with_argmax else ())
    elif g.queries is not None and g.queries.lengths is not None:
        max_seqlen_q = max(g.queries.lengths, default=0)
    padding, bound = 0, g.query_length_bound
    if not torch.compiler.is_dynamo_compiling() and isinstance(bound, int) and isinstance(max_seqlen_q, int):
        # No query has more tokens than all queries together, so larger bounds are cut and padded at the end. A traced
        # size would add a guard.
        padding = max(max_seqlen_q - bound, 0)
        max_seqlen_q -= padding
    scores, argmax = _score_pairs(g, pairs, max_seqlen_q)
    return scores, F.pad(argmax, (0, padding), value=-1) if argmax is not None and padding else argmax


def _score_pairs(g: ScoringArgs, pairs: Tensor, max_seqlen_q: int | None) -> tuple[Tensor, Tensor | None]:
    """Return scores and argmax of a pair list, from the fast path or the operator."""
    if (results := _try_eager(g, g.cu_seqlens_d, pairs=pairs, max_seqlen_q=max_seqlen_q)) is not None:
        return results
    if g.cu_seqlens_q is not None and max_seqlen_q is None:
        max_seqlen_q = _bound_query_length(g, g.cu_seqlens_q)
    c = g.packed(g.cu_seqlens_d, pairs=pairs, max_seqlen_q=max_seqlen_q)
    if values.needs_value_checks(pairs, c.cu_seqlens_q):
        values.check_pairs(g.op, pairs, c.queries, c.columns)
        values.check_max_seqlen(g.op, c.ragged().cu_seqlens_q, pairs, c.max_seqlen_q)
    return _call_operator(g, c)


def _bound_query_length(g: ScoringArgs, cu_seqlens_q: Tensor) -> int:
    """Return the tokens of the longest query, or an upper bound if a sync is not allowed and a bound costs nothing."""
    is_readable = not torch.compiler.is_compiling() and g.Q.device.type == "cpu" and is_ordinary_tensor(cu_seqlens_q)
    if is_readable:
        lengths = cu_seqlens_q.long().diff()
        return min(max(0, int(lengths.max())), g.Q.shape[0]) if lengths.numel() else 0
    if g.with_argmax or needs_gradients(g.Q, g.D, g.q_weight):
        raise ValueError(
            f"{g.op}: max_seqlen_q: expected a bound on the tokens of a query, which packed queries with gradients or"
            f" argmax need on {g.Q.device.type} and in compiled code, got None"
        )
    return g.Q.shape[0]


def _call_operator(g: ScoringArgs, c: PackedArgs) -> tuple[Tensor, Tensor | None]:
    """Return scores and argmax from the ragged operator, or from the quantized operator for quantized documents."""
    if g.quantized is not None:
        return _call_quantized_operator(g, g.quantized, c)
    return call_ragged_operator(c, g.normalize, g.backward, recompute=g.recompute, with_argmax=g.with_argmax)


def _call_quantized_operator(g: ScoringArgs, D: Quantized, c: PackedArgs) -> tuple[Tensor, Tensor | None]:
    """Return scores and argmax of ``lik::maxsim_quantized_fwd``. Raise if a gradient of the documents is needed."""
    _reject_unsupported_transforms(c.Q, c.q_weight)
    encoded_tokens = D.to_flat_encoded()
    if needs_gradients(*encoded_tokens[:3], *encoded_tokens[4:]):
        raise NotImplementedError(
            f"{g.op}: D: quantized documents have no gradient, but a tensor of D requires one: detach it, or score"
            " D.dequantize()"
        )
    sharding.register_if_needed()
    needs_argmax = g.with_argmax or (needs_gradients(c.Q, c.q_weight) and not g.recompute)
    dtype = choose_argmax_dtype(c.Td) if needs_argmax else None
    if c.offsets is None:
        data = encoded_tokens.data
        encoded_tokens = encoded_tokens._replace(data=data.view(*c.D.shape[:-1], data.shape[1]))
    Q, _, *tensors = c.operator_tensors
    scores, argmax = lik.maxsim_quantized_fwd(Q, *encoded_tokens, *tensors, g.normalize, dtype, c.max_seqlen_q)
    return scores, argmax if g.with_argmax else None


def _reject_unsupported_transforms(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError if ``torch.func`` or forward-mode AD would differentiate these tensors."""
    if not torch.compiler.is_dynamo_compiling() and functional.is_differentiating():
        raise NotImplementedError(
            "torch.func cannot differentiate MaxSim of packed tokens, pair lists and quantized documents: take"
            " gradients with torch.autograd, or pad and call lik_ops.maxsim"
        )
    functional.reject_forward_ad(*tensors)


def call_ragged_operator(
    c: PackedArgs,
    normalize: bool,
    backward: str,
    *,
    recompute: bool = False,
    with_argmax: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return scores and argmax of ``lik::maxsim_ragged_fwd``, after rejecting unsupported transforms.

    The argmax is None if it was not requested.
    """
    _reject_unsupported_transforms(c.Q, c.D, c.q_weight)
    sharding.register_if_needed()
    needs_argmax = with_argmax or (needs_gradients(c.Q, c.D, c.q_weight) and not recompute)
    argmax_dtype = choose_argmax_dtype(c.Td) if needs_argmax else None
    scores, argmax = lik.maxsim_ragged_fwd(*c.operator_tensors, normalize, argmax_dtype, c.max_seqlen_q, backward)
    return scores, argmax if with_argmax else None


def _restore_axes(g: ScoringArgs, scores: Tensor, argmax: Tensor | None) -> tuple[Tensor, ArgmaxOutput | None]:
    """Return the results without the axes that a single query or document does not have."""
    scores = scores.squeeze(1) if g.d_flat else scores
    output_argmax = None if argmax is None else _reshape_argmax(g, argmax, g.d_flat)
    if not g.q_flat:
        return scores, output_argmax
    return scores.squeeze(0), output_argmax.squeeze(0) if isinstance(output_argmax, Tensor) else None


def _reshape_argmax(g: ScoringArgs, argmax: Tensor, of_one: bool) -> ArgmaxOutput:
    """Return the argmax ``[Nd, Tq]`` or ``[K, Tq]`` in the form of the queries.

    The form is ``[Nq, Nd, Lq]`` for dense queries, a list of ``[Nd, L_i]`` for a list, a jagged tensor for a jagged
    tensor, and ``[Tq, Nd]`` for packed queries. `of_one` drops the axis of the only document.
    """
    argmax = argmax[0].long() if of_one else argmax.long()
    if g.queries is not None and g.queries.lengths is not None:
        return list(argmax.split(g.queries.lengths, dim=-1))
    if g.queries is not None:
        rows = argmax if of_one else argmax.t()
        nested = torch.nested.nested_tensor_from_jagged(rows, g.queries.cu_seqlens)
        return nested if of_one else nested.transpose(1, 2)
    if g.cu_seqlens_q is not None:
        return argmax.t()
    argmax = argmax.unflatten(-1, g.Q.shape[:2])
    return argmax if of_one else argmax.transpose(0, 1)


def score_aligned_pairs(g: ScoringArgs) -> Tensor:
    """Return the scores ``[B]`` of query i and document i, computed as one candidate for each query."""
    c = g.packed(g.cu_seqlens_d)
    r = c.ragged()
    if r.columns != r.queries:
        raise ValueError(f"{g.op}: D: expected B = {r.queries} documents, got {r.columns}")
    r = r._replace(d_offsets=r.d_offsets.unsqueeze(1), d_lengths=r.d_lengths.unsqueeze(1))
    g = g._replace(Q=r.Q, D=r.D, cu_seqlens_q=r.cu_seqlens_q, q_mask=r.q_mask, d_mask=r.d_mask, q_weight=r.q_weight)
    results = _try_eager(g, r.d_offsets, r.d_lengths)
    return (_call_operator(g, PackedArgs.from_tensors(r, c.max_seqlen_q)) if results is None else results)[0].squeeze(1)
