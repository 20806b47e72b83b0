"""Score documents by the centroids of their tokens alone, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.segments import make_segment_rows
from ..blocks import sum_pairwise

SKIPPED_CODE = -(2**31)  # of masked tokens. All other codes are the user's.
_MAX_GATHERED_BYTES = 32 << 20  # gathered from the table at a time


def code_scores(
    table: Tensor, weight: Tensor, probed: Tensor | None, codes: Tensor, offsets: Tensor, lengths: Tensor
) -> Tensor:
    """Compute ``sum_s weight[query, s] max_t table[query, code_t, s]``.

    Args:
        table: similarity of each query token and centroid, fp32 ``[Nq, C, Lq]``.
        weight: fp32 ``[Nq, Lq]``.
        probed: bool ``[Nq, C]``. Documents without one of these codes score ``-inf``. None probes all centroids.
        codes: codes of all tokens. `SKIPPED_CODE` is skipped. Any other code that is not a centroid makes the score
            infinite.
        offsets: start of each document in `codes`, ``[Nd]``.
        lengths: length of each document, ``[Nd]``. A document that reaches outside `codes` scores infinity.

    Returns:
        fp32 scores ``[Nq, Nd]``.
    """
    Nq, count, Lq = table.shape
    scores = table.new_full((Nq, len(offsets)), torch.inf)
    is_valid = (offsets >= 0) & (lengths >= 0) & (offsets <= len(codes) - lengths)
    documents = is_valid.nonzero().flatten()
    offsets, lengths = offsets[documents].long(), lengths[documents].long()
    # One row for each code: products with all query tokens, and the queries that probe it. The last row stands for a
    # skipped token.
    rows = torch.cat([table.transpose(0, 1).reshape(count, Nq * Lq), table.new_full((1, Nq * Lq), -torch.inf)])
    hits = table.new_zeros((count + 1, Nq))
    hits[:count] = 1 if probed is None else probed.t().float()
    ends = lengths.cumsum(0)
    begin, max_tokens = 0, max(1, _MAX_GATHERED_BYTES // max(4 * Nq * Lq, 1))
    while begin < len(documents):
        offset = ends[begin] - lengths[begin]
        end = max(begin + 1, int(torch.searchsorted(ends, offset + max_tokens, right=True)))
        at, _ = make_segment_rows(offsets[begin:end], lengths[begin:end])
        token_codes, counts = codes[at].long(), lengths[begin:end]
        is_centroid = (token_codes >= 0) & (token_codes < count)
        has_invalid_code = (
            _max_by_segment((~is_centroid & (token_codes != SKIPPED_CODE)).float().unsqueeze(1), counts)[:, 0] > 0
        )
        token_codes = torch.where(is_centroid, token_codes, count)
        best, is_hit = (
            _max_by_segment(rows[token_codes], counts).view(end - begin, Nq, Lq),
            _max_by_segment(hits[token_codes], counts) > 0,
        )
        part_scores = torch.where(is_hit, sum_pairwise(weight * best), -torch.inf)
        scores[:, documents[begin:end]] = part_scores.masked_fill(has_invalid_code.unsqueeze(1), torch.inf).t()
        begin = end
    return scores


def _max_by_segment(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the maxima of the rows of each segment, -inf for an empty segment."""
    return torch.segment_reduce(x, "max", lengths=lengths, axis=0, unsafe=True, initial=-torch.inf)
