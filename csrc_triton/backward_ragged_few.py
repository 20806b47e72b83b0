"""The gradient of packed documents of which few rows win: zeros, and the few that won over them."""

import triton
import triton.language as tl

from .arguments import Sizes, Walk
from .backward import norm_sums, through_norm
from .backward_few import fill_with_zeros, sums_of_few
from .backward_ragged import (
    bounds_of,
    most_rows,
    once,
    packed_row_pointers,
    places,
    step_items,
    step_rows,
    step_winners,
    store_rows,
    sum_of_rows,
)
from .common import load_rows, wide


@triton.jit
def _slots(walk, up, TILE: tl.constexpr, C: tl.constexpr):
    """Which tokens of a tile win anything, how many of them there are, and how many before each."""
    won = tl.zeros((TILE,), tl.int32)
    for n0 in range(walk.lo, walk.hi, C.BM // C.SLOT):
        items = step_items(walk, n0, C.BM, C.SLOT, C)
        for s0 in tl.range(0, most_rows(walk, items), C.SLOT, num_stages=1):
            token, query = step_winners(walk, items, s0, up, C.BM, C.SLOT)
            place = places(items, token, query, up, TILE)
            won += tl.histogram(tl.maximum(place, 0), TILE, mask=place >= 0)
    won = (won > 0).to(tl.int32)
    return won, tl.sum(won, axis=0), tl.cumsum(won, axis=0) - won


@triton.jit
def _sum_many(walk, norms, up, Q, D, grad_D, sizes, d, TILE: tl.constexpr, C: tl.constexpr):
    """Write zeros, and over them the sums of the tokens of a tile that win, BN at a time, of however many rows."""
    TWICE: tl.constexpr = C.NORMALIZE and not C.ONE_CHUNK
    won, count, slots = _slots(walk, up, TILE, C)
    fill_with_zeros(grad_D + walk.t0 * d, tl.minimum(sizes.Ld - walk.t0, TILE).to(tl.int32) * d)
    tl.debug_barrier()  # the zeros are written by other threads than the sums
    base = D.ptr + walk.t0 * D.stride_l
    for u0 in tl.range(0, count, C.BN, num_stages=1):
        part = Walk(walk.items, walk.count, walk.lo, walk.hi, walk.t0, walk.r0, walk.r1, slots, u0, None)
        here = (slots[None, :] == (u0 + tl.arange(0, C.BN))[:, None]) & (won > 0)[None, :]
        t = tl.max(tl.where(here, tl.arange(0, TILE)[None, :], -1), axis=1)
        dot = tl.full((C.BN,), 0, tl.float32)
        squares = tl.full((C.BN,), 0, tl.float32)
        live = tl.full((C.BN,), 0, tl.int32)
        if TWICE:
            for c0 in range(0, d, C.BD):
                G, columns = sum_of_rows(part, norms, up, Q, c0, d, C)
                _, more_dot, more_squares, more_live = norm_sums(G, base, t, t >= 0, columns, D, d, C)
                dot += more_dot
                squares += more_squares
                live = live | more_live
        for c0 in range(0, d, C.BD):
            G, columns = sum_of_rows(part, norms, up, Q, c0, d, C)
            if C.NORMALIZE:
                x, more_dot, more_squares, more_live = norm_sums(G, base, t, t >= 0, columns, D, d, C)
                if not TWICE:
                    dot = more_dot
                    squares = more_squares
                    live = more_live
                G = through_norm(G, x, live, squares, dot)
            store_rows(G, grad_D, tl.where(t >= 0, walk.t0 + t, sizes.Ld), sizes.Ld, columns, d)


@triton.jit
def _sum_one_step(walk, items, norms, up, Q, D, grad_D, sizes, d, TILE: tl.constexpr, C: tl.constexpr):
    """The same where `items` are all, with one step's rows: of those with the same winner the first writes the sum."""
    token, query = step_winners(walk, items, 0, up, C.BM, C.SLOT)
    row, place, c = step_rows(walk, items, 0, token, query, norms, up, Q, C.BM, C.SLOT, TILE, C)
    n = tl.arange(0, C.BM)
    first = tl.min(tl.where(place[:, None] == place[None, :], n[:, None], C.BM), axis=0)
    first, c = once(tl.where(place >= 0, first, -1)), once(c)
    fill_with_zeros(grad_D + walk.t0 * d, tl.minimum(sizes.Ld - walk.t0, TILE).to(tl.int32) * d)
    tl.debug_barrier()  # the zeros are written by other threads than the sums
    base = D.ptr + walk.t0 * D.stride_l
    for c0 in range(0, d, C.BD):
        columns = c0 + tl.arange(0, C.BD)
        x = load_rows(packed_row_pointers(Q, row, C), place >= 0, columns, d, Q.stride_d, C.WIDE)
        for n0 in tl.range(0, C.BM, C.BN, num_stages=1):
            match = first[None, :] == (n0 + tl.arange(0, C.BN))[:, None]
            t = tl.max(tl.where(match, place[None, :], -1), axis=1)
            G = sums_of_few(match, c, x, C)
            if C.NORMALIZE:
                y, dot, squares, live = norm_sums(G, base, t, t >= 0, columns, D, d, C)
                G = through_norm(G, y, live, squares, dot)
            store_rows(G, grad_D, tl.where(t >= 0, walk.t0 + t, sizes.Ld), sizes.Ld, columns, d)


@triton.jit(do_not_specialize=["Nq", "K", "Tq", "Td"])
def maxsim_grad_few_packed_documents(
    Q, D, up, sorted_items, starts, norms, grad_D, Nq, K, Tq, Td, d,
    TILE: tl.constexpr, ONE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """grad_D [Td, d] of TILE rows of D a program, of which few win: zeros, and the sums of those that do over them.

    Most tiles meet the rows of one step, of configuration ONE (None: none does), which need not be counted before. The
    rest is as in `maxsim_grad_packed_documents`.
    """
    sizes = Sizes(Nq, K, Tq, Td)
    lo, hi, r0, r1 = bounds_of(starts, up, sizes, C)
    walk = Walk(sorted_items, up.count, lo, hi, wide(tl.program_id(0)) * TILE, r0, r1, None, None, None)
    if ONE is None:
        _sum_many(walk, norms, up, Q, D, grad_D, sizes, d, TILE, C)
    else:
        items = step_items(walk, lo, ONE.BM, ONE.SLOT, ONE)
        if (tl.max(items.stop - items.begin, axis=0) <= ONE.SLOT) & (hi - lo <= ONE.BM // ONE.SLOT):
            _sum_one_step(walk, items, norms, up, Q, D, grad_D, sizes, d, TILE, ONE)
        else:
            _sum_many(walk, norms, up, Q, D, grad_D, sizes, d, TILE, C)
