"""The forward as a graph of standard operators: one `while_loop` over blocks of bounded size, with symbolic sizes.

Packages and other compilers use it in place of the opaque operator. A step multiplies a block of query tokens with a
block of document tokens. Block sizes follow the sizes of the inputs up to fixed bounds, so the memory in addition to
inputs and outputs is bounded. Nothing is written in place, because compilers decide where results are stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.arguments import clamp_to_at_most_one
from ...core.segments import DenseArgs
from ..blocks import NORM_EPS

MAX_QUERY_TOKENS, MAX_DOCUMENT_TOKENS = 128, 1024  # tokens of one step
NEG_INF, NO_TOKEN = float("-inf"), 2**62


class _LoopState(NamedTuple):
    """The state that a step passes to the next step."""

    n: Tensor  # number of completed steps
    best: Tensor  # [queries of a block, tokens, documents], maxima over the document tiles so far
    sums: Tensor  # [queries of a block, documents], sums over the query parts so far
    scores: Tensor  # [Nq, K]
    where: Tensor | None  # the shape of best: the first token with the maximum
    argmax: Tensor | None  # [Nq, K, Lq]


def _ceil_div(a: Any, b: Any) -> Any:
    """Return ``a / b`` rounded up."""
    return (a + b - 1) // b


def _choose_block_size(size: Any, max_size: Any) -> Any:
    """Return the block size for an axis of `size` elements, at most `max_size`.

    A symbolic size gives at least two, and a step may then process an element twice. Tracers would add a guard on
    whether the axis is 1.
    """
    if isinstance(size, int) and isinstance(max_size, int):
        return max(1, min(size, max_size))
    return torch.sym_max(torch.sym_min(size, max_size), 2)


class _LoopSizes:
    """The sizes of a step, and the number of steps."""

    def __init__(self, Q: Tensor, D: Tensor) -> None:
        self.candidates = D.dim() == 4
        self.Nq, self.Lq = Q.shape[:2]
        self.K, self.Ld = D.shape[-3], D.shape[-2]
        self.query_tokens = _choose_block_size(self.Lq, MAX_QUERY_TOKENS)
        is_single = self.candidates or (isinstance(self.Nq, int) and self.Nq == 1)
        self.queries = 1 if is_single else _choose_block_size(self.Nq, MAX_QUERY_TOKENS // self.query_tokens)
        self.document_tokens = _choose_block_size(self.Ld, MAX_DOCUMENT_TOKENS)
        self.documents = _choose_block_size(self.K, MAX_DOCUMENT_TOKENS // self.document_tokens)
        # From the innermost to the outermost loop.
        self.counts = (
            _ceil_div(self.Ld, self.document_tokens),
            _ceil_div(self.Lq, self.query_tokens),
            _ceil_div(self.K, self.documents),
            _ceil_div(self.Nq, self.queries),
        )

    @property
    def steps(self) -> Any:
        """Return the total number of steps."""
        tiles, parts, groups, units = self.counts
        return tiles * parts * groups * units


class _LoopTensors(NamedTuple):
    """The sizes as tensors, for the steps of the loop.

    A tracer assumes that every size is at least 1. It may read a size from a stride, which is 1 if the size is 0. Step
    counts are therefore computed outside the loop from the sizes of the inputs, and no step runs on empty inputs.
    """

    steps: Tensor
    tiles: Tensor
    parts: Tensor
    groups: Tensor
    Nq: Tensor
    Lq: Tensor
    K: Tensor
    Ld: Tensor
    queries: Tensor  # indices within a block, [QB]
    query_tokens: Tensor  # [SB]
    documents: Tensor  # [DB]
    document_tokens: Tensor  # [TB]


def _make_loop_tensors(blocks: _LoopSizes, device: torch.device) -> _LoopTensors:
    """Build `_LoopTensors` on a device."""
    tiles, parts, groups, _ = blocks.counts
    numbers = blocks.steps, tiles, parts, groups, blocks.Nq, blocks.Lq, blocks.K, blocks.Ld
    sizes = blocks.queries, blocks.query_tokens, blocks.documents, blocks.document_tokens
    return _LoopTensors(
        *(torch.full((), number, dtype=torch.int64, device=device) for number in numbers),
        *(torch.arange(size, device=device) for size in sizes),
    )


def _make_block_indices(block: Tensor, within: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of a block, with those past the end clamped to the last, and a mask of those within."""
    index = block * within.shape[0] + within
    return torch.minimum(index, total - 1), index < total


def _gather_rows(X: Tensor, index: tuple[Tensor, ...], normalize: bool, dtype: torch.dtype) -> Tensor:
    """Gather tokens, convert them to `dtype`, and normalize them if `normalize` is set."""
    x = X[index].to(dtype)
    if normalize:
        x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(NORM_EPS)
    return x


def _score_block(carried: _LoopState, plan: _LoopTensors, x: DenseArgs, normalize: bool) -> _LoopState:
    """Run one step: score a block of query tokens against a block of document tokens."""
    candidates, dtype = x.D.dim() == 4, carried.scores.dtype
    QB, SB, DB, TB = (block.shape[0] for block in plan[-4:])
    tile, remainder = carried.n % plan.tiles, carried.n // plan.tiles
    part, remainder = remainder % plan.parts, remainder // plan.parts
    group, unit = remainder % plan.groups, remainder // plan.groups
    i, _ = _make_block_indices(unit, plan.queries, plan.Nq)
    s, s_ok = _make_block_indices(part, plan.query_tokens, plan.Lq)
    j, _ = _make_block_indices(group, plan.documents, plan.K)
    t, _ = _make_block_indices(tile, plan.document_tokens, plan.Ld)
    query_index = (i[:, None], s[None])
    document_index = (i[:, None], j[:, None], t[None]) if candidates else (j[:, None], t[None])
    q, y = _gather_rows(x.Q, query_index, normalize, dtype), _gather_rows(x.D, document_index, normalize, dtype)
    S = (q.reshape(QB * SB, -1) @ y.reshape(DB * TB, -1).mT).view(QB, SB, DB, TB)
    is_kept = None if x.d_mask is None else x.d_mask[document_index]
    if is_kept is not None:
        S = torch.where(is_kept, S, NEG_INF)
    value = S.amax(-1)
    previous = torch.where(tile == 0, NEG_INF, carried.best)
    best = torch.maximum(previous, value)
    keep = s_ok.expand(QB, SB) if x.q_mask is None else s_ok & x.q_mask[query_index]
    terms = best
    if x.q_weight is not None:
        terms = terms * x.q_weight[query_index].to(dtype)[..., None]
    terms = torch.where(keep[..., None], terms, 0)
    sums = torch.where(part == 0, 0, carried.sums)
    sums = torch.where(tile == plan.tiles - 1, sums + terms.sum(1), sums)
    scores = carried.scores.index_put((i[:, None], j[None]), sums)
    first_tokens, argmax = None, None
    if carried.where is not None and carried.argmax is not None:
        first_tokens = _update_argmax(S, is_kept, value, previous, t, torch.where(tile == 0, NO_TOKEN, carried.where))
        block_argmax = torch.where(first_tokens != NO_TOKEN, first_tokens, -1)
        if x.q_mask is not None:
            block_argmax = torch.where(x.q_mask[query_index][..., None], block_argmax, -1)
        block_argmax = block_argmax.transpose(1, 2).to(carried.argmax.dtype)
        argmax = carried.argmax.index_put((i[:, None, None], j[None, :, None], s[None, None]), block_argmax)
    return _LoopState(carried.n + 1, best, sums, scores, first_tokens, argmax)


def _update_argmax(
    S: Tensor, is_kept: Tensor | None, value: Tensor, before: Tensor, t: Tensor, where: Tensor
) -> Tensor:
    """Return the first kept token with the largest similarity so far (NaN is largest), NO_TOKEN if none is kept."""
    hit = S.eq(value[..., None]) | S.isnan()
    if is_kept is not None:
        hit = hit & is_kept
    first = torch.where(hit, t, NO_TOKEN).amin(-1)
    is_new = (value > before) | (value.isnan() & ~before.isnan()) | (where == NO_TOKEN)
    return torch.where(is_new, first, where)


def _make_initial_state(x: DenseArgs, blocks: _LoopSizes, argmax_dtype: torch.dtype | None) -> _LoopState:
    """Build the state before the first step."""
    device = x.Q.device
    dtype = torch.float64 if x.Q.dtype == torch.float64 else torch.float32
    block = (blocks.queries, blocks.query_tokens, blocks.documents)
    first_tokens, argmax = None, None
    if argmax_dtype is not None:
        first_tokens = torch.zeros(block, dtype=torch.int64, device=device)
        argmax = torch.full((blocks.Nq, blocks.K, blocks.Lq), -1, dtype=argmax_dtype, device=device)
    return _LoopState(
        torch.zeros((), dtype=torch.int64, device=device),
        torch.full(block, NEG_INF, dtype=dtype, device=device),
        torch.zeros((blocks.queries, blocks.documents), dtype=dtype, device=device),
        torch.zeros((blocks.Nq, blocks.K), dtype=dtype, device=device),
        first_tokens,
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
    """Return the scores and the argmax, or None, of `lik::maxsim_fwd`, with a `while_loop` of standard operators."""
    # `torch.while_loop` would start another compiler.
    from torch._higher_order_ops.while_loop import while_loop_op

    args = DenseArgs(Q, D, q_mask, d_mask, q_weight)
    blocks = _LoopSizes(Q, D)
    start, plan = _make_initial_state(args, blocks, argmax_dtype), _make_loop_tensors(blocks, Q.device)
    loop_tensors, constant_tensors = [t for t in start if t is not None], [*plan, *(t for t in args if t is not None)]

    def unpack(tensors: tuple[Tensor, ...]) -> tuple[_LoopState, _LoopTensors, DenseArgs]:
        """Rebuild the records from the flat tensors of the loop."""
        iterator = iter(tensors)
        return (
            _LoopState(*(None if t is None else next(iterator) for t in start)),  # type: ignore[arg-type]
            _LoopTensors(*(next(iterator) for _ in plan)),
            DenseArgs(*(None if t is None else next(iterator) for t in args)),  # type: ignore[arg-type]
        )

    def has_steps_left(*tensors: Tensor) -> Tensor:
        state, sizes, _ = unpack(tensors)
        return state.n < sizes.steps

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t for t in _score_block(*unpack(tensors), normalize) if t is not None)

    tensors = while_loop_op(has_steps_left, step, tuple(loop_tensors), tuple(constant_tensors))  # type: ignore[arg-type]
    end, *_ = unpack((*tensors, *constant_tensors))
    return _fill_empty_documents(end, args)


def select_topk(scores: Tensor, top_k: Any) -> tuple[Tensor, Tensor]:
    """Return the `top_k` best of ``scores [Nq, Nd]`` (all, if there are fewer) and their columns.

    The order is the one of `ops.topk` and of a stable sort. NaN comes first, and equal scores are ordered by column.
    """
    count = torch.sym_min(top_k, scores.shape[1])
    if top_k == 1 and not isinstance(scores.shape[1], int):
        # The padding column serves a module that reads the best score of an empty corpus.
        count = clamp_to_at_most_one(scores.shape[1])
        scores = F.pad(scores, (0, 1), value=NEG_INF)
    values, columns = torch.sort(scores, dim=1, descending=True, stable=True)
    # A slice would add a guard on which of top_k and the number of columns is smaller, an index does not.
    ranks = torch.arange(count, device=scores.device)
    return values[:, ranks], columns[:, ranks]


def _fill_empty_documents(end: _LoopState, x: DenseArgs) -> tuple[Tensor, Tensor | None]:
    """Set scores of documents without a kept token to ``-inf``, or to 0 if the query keeps no token either."""
    device = x.Q.device
    q_mask = torch.ones(x.Q.shape[:2], dtype=torch.bool, device=device) if x.q_mask is None else x.q_mask
    d_mask = torch.ones(x.D.shape[:-1], dtype=torch.bool, device=device) if x.d_mask is None else x.d_mask
    has_tokens = d_mask.any(-1) if x.D.dim() == 4 else d_mask.any(-1)[None]
    scores = torch.where(
        has_tokens, end.scores, torch.where(q_mask.any(-1)[:, None], NEG_INF, 0.0).to(end.scores.dtype)
    )
    if end.argmax is None:
        return scores, None
    return scores, end.argmax if x.D.dim() == 4 else end.argmax.transpose(0, 1).contiguous()
