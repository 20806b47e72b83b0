"""The forward as a graph of ordinary operators: one `while_loop` over blocks of bounded size, every size symbolic.

What packages and other compilers take in place of the opaque operator. A step multiplies a block of query tokens with a
block of document tokens. Sizes of a block follow the inputs' up to fixed bounds, so memory beyond inputs and outputs is
bounded too. Nothing is written in place: compilers decide where results live.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.arguments import clamp_to_at_most_one
from ...core.segments import DenseArgs
from ..blocks import NORM_EPS

MAX_QUERY_TOKENS, MAX_DOCUMENT_TOKENS = 128, 1024  # of a step at most
NEG_INF, NO_TOKEN = float("-inf"), 2**62


class _LoopState(NamedTuple):
    """What a step leaves to the next."""

    n: Tensor  # how many steps were done
    best: Tensor  # [queries of a block, tokens, documents], over the tiles of the documents so far
    sums: Tensor  # [queries of a block, documents], over the parts of the queries so far
    scores: Tensor  # [Nq, K]
    where: Tensor | None  # as best: the first token that has it
    argmax: Tensor | None  # [Nq, K, Lq]


def _ceil_div(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def _choose_block_size(size: Any, most: Any) -> Any:
    """How many of `size` a step takes. Of a symbolic size at least two, some of them twice if need be: tracers guard
    on whether an axis is 1."""
    if isinstance(size, int) and isinstance(most, int):
        return max(1, min(size, most))
    return torch.sym_max(torch.sym_min(size, most), 2)


class _LoopSizes:
    """Sizes of a step, and how many steps there are."""

    def __init__(self, Q: Tensor, D: Tensor) -> None:
        self.candidates = D.dim() == 4
        self.Nq, self.Lq = Q.shape[:2]
        self.K, self.Ld = D.shape[-3], D.shape[-2]
        self.query_tokens = _choose_block_size(self.Lq, MAX_QUERY_TOKENS)
        single = self.candidates or (isinstance(self.Nq, int) and self.Nq == 1)
        self.queries = 1 if single else _choose_block_size(self.Nq, MAX_QUERY_TOKENS // self.query_tokens)
        self.document_tokens = _choose_block_size(self.Ld, MAX_DOCUMENT_TOKENS)
        self.documents = _choose_block_size(self.K, MAX_DOCUMENT_TOKENS // self.document_tokens)
        # From the innermost loop outwards.
        self.counts = (
            _ceil_div(self.Ld, self.document_tokens),
            _ceil_div(self.Lq, self.query_tokens),
            _ceil_div(self.K, self.documents),
            _ceil_div(self.Nq, self.queries),
        )

    @property
    def steps(self) -> Any:
        tiles, parts, groups, units = self.counts
        return tiles * parts * groups * units


class _LoopTensors(NamedTuple):
    """Sizes as tensors, for the steps of the loop.

    A tracer takes every size for 1 or more, and may read a size from a stride, which is 1 where the size is 0. Step
    counts therefore come from outside of the loop, where sizes are those of the inputs: no step runs on empty inputs.
    """

    steps: Tensor
    tiles: Tensor
    parts: Tensor
    groups: Tensor
    Nq: Tensor
    Lq: Tensor
    K: Tensor
    Ld: Tensor
    queries: Tensor  # the indices of a block, [QB]
    query_tokens: Tensor  # [SB]
    documents: Tensor  # [DB]
    document_tokens: Tensor  # [TB]


def _make_loop_tensors(blocks: _LoopSizes, device: torch.device) -> _LoopTensors:
    tiles, parts, groups, _ = blocks.counts
    numbers = blocks.steps, tiles, parts, groups, blocks.Nq, blocks.Lq, blocks.K, blocks.Ld
    sizes = blocks.queries, blocks.query_tokens, blocks.documents, blocks.document_tokens
    return _LoopTensors(
        *(torch.full((), number, dtype=torch.int64, device=device) for number in numbers),
        *(torch.arange(size, device=device) for size in sizes),
    )


def _make_block_indices(block: Tensor, within: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of a block, those beyond the end repeating the last, and which are not beyond."""
    index = block * within.shape[0] + within
    return torch.minimum(index, total - 1), index < total


def _gather_rows(X: Tensor, index: tuple[Tensor, ...], normalize: bool, dtype: torch.dtype) -> Tensor:
    x = X[index].to(dtype)
    if normalize:
        x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(NORM_EPS)
    return x


def _score_block(carried: _LoopState, plan: _LoopTensors, x: DenseArgs, normalize: bool) -> _LoopState:
    """One block of query tokens against one of document tokens."""
    candidates, dtype = x.D.dim() == 4, carried.scores.dtype
    QB, SB, DB, TB = (within.shape[0] for within in plan[-4:])
    tile, rest = carried.n % plan.tiles, carried.n // plan.tiles
    part, rest = rest % plan.parts, rest // plan.parts
    group, unit = rest % plan.groups, rest // plan.groups
    i, _ = _make_block_indices(unit, plan.queries, plan.Nq)
    s, s_ok = _make_block_indices(part, plan.query_tokens, plan.Lq)
    j, _ = _make_block_indices(group, plan.documents, plan.K)
    t, _ = _make_block_indices(tile, plan.document_tokens, plan.Ld)
    of_query = (i[:, None], s[None])
    of_document = (i[:, None], j[:, None], t[None]) if candidates else (j[:, None], t[None])
    q, y = _gather_rows(x.Q, of_query, normalize, dtype), _gather_rows(x.D, of_document, normalize, dtype)
    S = (q.reshape(QB * SB, -1) @ y.reshape(DB * TB, -1).mT).view(QB, SB, DB, TB)
    kept = None if x.d_mask is None else x.d_mask[of_document]
    if kept is not None:
        S = torch.where(kept, S, NEG_INF)
    value = S.amax(-1)
    before = torch.where(tile == 0, NEG_INF, carried.best)
    best = torch.maximum(before, value)
    keep = s_ok.expand(QB, SB) if x.q_mask is None else s_ok & x.q_mask[of_query]
    terms = best
    if x.q_weight is not None:
        terms = terms * x.q_weight[of_query].to(dtype)[..., None]
    terms = torch.where(keep[..., None], terms, 0)
    sums = torch.where(part == 0, 0, carried.sums)
    sums = torch.where(tile == plan.tiles - 1, sums + terms.sum(1), sums)
    scores = carried.scores.index_put((i[:, None], j[None]), sums)
    where, argmax = None, None
    if carried.where is not None and carried.argmax is not None:
        where = _update_argmax(S, kept, value, before, t, torch.where(tile == 0, NO_TOKEN, carried.where))
        won = torch.where(where != NO_TOKEN, where, -1)
        if x.q_mask is not None:
            won = torch.where(x.q_mask[of_query][..., None], won, -1)
        won = won.transpose(1, 2).to(carried.argmax.dtype)
        argmax = carried.argmax.index_put((i[:, None, None], j[None, :, None], s[None, None]), won)
    return _LoopState(carried.n + 1, best, sums, scores, where, argmax)


def _update_argmax(S: Tensor, kept: Tensor | None, value: Tensor, before: Tensor, t: Tensor, where: Tensor) -> Tensor:
    """The first kept tokens with the largest similarity so far, NaN the largest; NO_TOKEN where none is kept."""
    hit = S.eq(value[..., None]) | S.isnan()
    if kept is not None:
        hit = hit & kept
    first = torch.where(hit, t, NO_TOKEN).amin(-1)
    is_new = (value > before) | (value.isnan() & ~before.isnan()) | (where == NO_TOKEN)
    return torch.where(is_new, first, where)


def _make_initial_state(x: DenseArgs, blocks: _LoopSizes, argmax_dtype: torch.dtype | None) -> _LoopState:
    device = x.Q.device
    dtype = torch.float64 if x.Q.dtype == torch.float64 else torch.float32
    block = (blocks.queries, blocks.query_tokens, blocks.documents)
    where, argmax = None, None
    if argmax_dtype is not None:
        where = torch.zeros(block, dtype=torch.int64, device=device)
        argmax = torch.full((blocks.Nq, blocks.K, blocks.Lq), -1, dtype=argmax_dtype, device=device)
    return _LoopState(
        torch.zeros((), dtype=torch.int64, device=device),
        torch.full(block, NEG_INF, dtype=dtype, device=device),
        torch.zeros((blocks.queries, blocks.documents), dtype=dtype, device=device),
        torch.zeros((blocks.Nq, blocks.K), dtype=dtype, device=device),
        where,
        argmax,
    )


def forward_blocked(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Scores ``[Nq, Nd]`` (``[Nq, K]``) and winners ``[Nd, Nq, Lq]`` (``[Nq, K, Lq]``), None if `argmax_dtype` is.

    Arguments have all their axes, masks are bool.
    """
    from torch._higher_order_ops.while_loop import while_loop_op  # `torch.while_loop` would start a compiler of its own

    given = DenseArgs(Q, D, q_mask, d_mask, q_weight)
    blocks = _LoopSizes(Q, D)
    start, plan = _make_initial_state(given, blocks, argmax_dtype), _make_loop_tensors(blocks, Q.device)
    carried, present = [t for t in start if t is not None], [*plan, *(t for t in given if t is not None)]

    def unpacked(tensors: tuple[Tensor, ...]) -> tuple[_LoopState, _LoopTensors, DenseArgs]:
        found = iter(tensors)
        return (
            _LoopState(*(None if t is None else next(found) for t in start)),  # type: ignore[arg-type]
            _LoopTensors(*(next(found) for _ in plan)),
            DenseArgs(*(None if t is None else next(found) for t in given)),  # type: ignore[arg-type]
        )

    def goes_on(*tensors: Tensor) -> Tensor:
        state, sizes, _ = unpacked(tensors)
        return state.n < sizes.steps

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t for t in _score_block(*unpacked(tensors), normalize) if t is not None)

    end, *_ = unpacked((*while_loop_op(goes_on, step, tuple(carried), tuple(present)), *present))  # type: ignore[arg-type]
    return _fill_empty_documents(end, given)


def select_topk(scores: Tensor, top_k: Any) -> tuple[Tensor, Tensor]:
    """The `top_k` best of ``scores [Nq, Nd]`` (all, if fewer) and their columns.

    In the order of `ops.topk`, which is that of a stable sort: NaN first, equal ones by column.
    """
    count = torch.sym_min(top_k, scores.shape[1])
    if top_k == 1 and not isinstance(scores.shape[1], int):
        # The column of padding is for code of the module that reads the best score of an empty corpus.
        count = clamp_to_at_most_one(scores.shape[1])
        scores = F.pad(scores, (0, 1), value=NEG_INF)
    values, columns = torch.sort(scores, dim=1, descending=True, stable=True)
    # An index, not a slice: that would guard on which of the two is less.
    kept = torch.arange(count, device=scores.device)
    return values[:, kept], columns[:, kept]


def _fill_empty_documents(end: _LoopState, x: DenseArgs) -> tuple[Tensor, Tensor | None]:
    """``-inf`` for documents that keep no token, 0 where the query keeps none either."""
    device = x.Q.device
    queries = torch.ones(x.Q.shape[:2], dtype=torch.bool, device=device) if x.q_mask is None else x.q_mask
    kept = torch.ones(x.D.shape[:-1], dtype=torch.bool, device=device) if x.d_mask is None else x.d_mask
    any_kept = kept.any(-1) if x.D.dim() == 4 else kept.any(-1)[None]
    scores = torch.where(any_kept, end.scores, torch.where(queries.any(-1)[:, None], NEG_INF, 0.0).to(end.scores.dtype))
    if end.argmax is None:
        return scores, None
    return scores, end.argmax if x.D.dim() == 4 else end.argmax.transpose(0, 1).contiguous()
