"""The gradient of packed documents of which few rows win: zeros, and the few that won over them."""

import triton
import triton.language as tl

from .arguments import Sizes, Walk
from .backward_few import fill_with_zeros
from .backward_ragged import (
    bounds_of,
    most_rows,
    places,
    step_items,
    step_winners,
    store_rows,
    sum_of_rows,
    through_tile_norm,
    tile_norms,
)
from .common import wide


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


@triton.jit(do_not_specialize=["Nq", "K", "Tq", "Td"])
def maxsim_grad_few_packed_documents(
    Q, D, up, items, starts, norms, grad_D, Nq, K, Tq, Td, d, TILE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """grad_D [Td, d] of TILE rows of D a program, of which few win: zeros, and the sums of those that do over them.

    BN of them are summed at a time. The rest is as in `maxsim_grad_packed_documents`.
    """
    sizes = Sizes(Nq, K, Tq, Td)
    TWICE: tl.constexpr = C.NORMALIZE and not C.ONE_CHUNK
    lo, hi, r0, r1 = bounds_of(starts, up, sizes, C)
    walk = Walk(items, up.count, lo, hi, wide(tl.program_id(0)) * TILE, r0, r1, None, None, None)
    won, count, slots = _slots(walk, up, TILE, C)
    rows = tl.minimum(sizes.Ld - walk.t0, TILE).to(tl.int32)
    fill_with_zeros(grad_D + walk.t0 * d, rows * d)
    tl.debug_barrier()  # the zeros are written by other threads than the sums
    base = D.ptr + walk.t0 * D.stride_l
    for u0 in tl.range(0, count, C.BN, num_stages=1):
        part = Walk(walk.items, walk.count, walk.lo, walk.hi, walk.t0, walk.r0, walk.r1, slots, u0, None)
        here = (slots[None, :] == (u0 + tl.arange(0, C.BN))[:, None]) & (won > 0)[None, :]
        t = tl.max(tl.where(here, tl.arange(0, TILE)[None, :], -1), axis=1)
        sums = tile_norms(part, norms, up, Q, base, t, t >= 0, d, D, d, TWICE, C)
        for c0 in range(0, d, C.BD):
            G, columns = sum_of_rows(part, norms, up, Q, c0, d, C)
            if C.NORMALIZE:
                G = through_tile_norm(G, columns, sums, base, t, t >= 0, D, d, C)
            store_rows(G, grad_D, tl.where(t >= 0, walk.t0 + t, sizes.Ld), sizes.Ld, columns, d)
