"""Scores of documents by the centroids of their tokens alone: the first stages of a search of residual codes."""

import triton
import triton.language as tl

from ..common.primitives import sum_in_order
from ..common.segments import locate_document_segment


@triton.jit(do_not_specialize=["Nq", "K", "Td", "count"])
def maxsim_code_scores(
    table, weight, probed, codes, segments, scores, Nq, K, Td, count, ROWS: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Of queries and K documents ``sum_s weight[query, s] max_t table[query, code_t, s]``, fp32 ``[Nq, K]``; a pair a
    program.

    `table` is fp32 ``[Nq, count, ROWS]``, `weight` ``[Nq, ROWS]``. Of documents without a code that `probed`
    ``[Nq, count]`` has the score is -inf, if it is not None. Codes of -1 are passed over; others that are no centroid's
    make the score infinite, and so do documents outside `codes`: what they score is told by who looks closer.
    """
    pid = tl.program_id(0).to(tl.int64)
    query, k = pid % Nq, pid // Nq
    begin, length, valid = locate_document_segment(segments, k, k >= 0, Td)
    best = tl.full((BN, ROWS), float("-inf"), tl.float32)
    hits = tl.full((BN,), 0, tl.int32)
    strange = tl.full((BN,), 0, tl.int32)
    for t0 in range(0, length, BN):
        t = t0 + tl.arange(0, BN)
        code = tl.load(codes + begin + t, mask=t < length, other=-1)
        ok = (code >= 0) & (code < count)
        strange = strange | ((code != -1) & (ok == 0)).to(tl.int32)
        row = query * count + tl.where(ok, code, 0).to(tl.int64)
        x = tl.load(table + row[:, None] * ROWS + tl.arange(0, ROWS)[None, :], mask=ok[:, None], other=float("-inf"))
        best = tl.maximum(best, x)
        if probed is not None:
            hits = hits | tl.load(probed + row, mask=ok, other=0).to(tl.int32)
        else:
            hits = hits | ok.to(tl.int32)
    terms = tl.load(weight + query * ROWS + tl.arange(0, ROWS)) * tl.max(best, axis=0)
    score = tl.sum(sum_in_order(terms, 1, ROWS), axis=0)
    score = tl.where(tl.max(hits, axis=0) > 0, score, float("-inf"))
    odd = (valid == 0) | (tl.max(strange, axis=0) > 0)
    tl.store(scores + query * K + k, tl.where(odd, float("inf"), score))
