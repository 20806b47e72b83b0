"""Forward calls by way of row maxima: sm_90, many query rows, documents of any length or with masks.

Query rows are packed, so that no tile holds rows of no query, and documents end where they end. Their maxima lie in a
workspace, from which a second kernel adds them up, for a chunk of documents at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.segments import Cut, Dense
from ...csrc_triton.common.arguments import Found, Patches, Queries, Segments
from ...csrc_triton.forward.generic import row_sums
from ..runtime import gluon, launcher
from ..runtime.arguments import on_device, queries_of
from ..tuning import architectures, sm90_configs
from ..tuning.sm90_configs import RowMaxima
from .generic import GluonPlan

_log = logging.getLogger("lik_ops")
# Of a workspace of 32 MiB: for maxima and what masks become, a bit a token; or documents without what masks leave out,
# of 16 bytes or more a token, the 4 bytes that say which it is, and maxima.
_MAXIMA_BYTES, _BITS_BYTES = 24 * 2**20, 8 * 2**20
_TOKEN_BYTES, _OTHER_MAXIMA_BYTES = 20 * 2**20, 7 * 2**20
_PATCHED_TILES = 8  # of a step of `maxsim_patches`
_KEPT_TOKENS = 64  # of a program of `maxsim_kept_tokens`
_KEPT_ROWS = 8192  # query rows for which copying tokens is soon made good by what is not scored
_KEPT_PAIRS = 4  # of a row tile and a document, that a program then has at least, or all
_COVERED_BLOCK = 128
_WINNERS_BLOCK = 1024


class Rows(NamedTuple):
    """What is scored: query rows, ``(n, L)`` of them in n groups, and document tokens as rows from 16 bytes on."""

    queries: Queries
    groups: tuple[int, int]
    tokens: Tensor  # [Td, d]
    segments: Segments
    counts: tuple[int, int]  # queries, documents
    patches: Patches | None = None  # of a mask

    def part(self, k: int, count: int) -> Rows:
        """`count` documents from the k-th on."""
        segments, tokens = self.segments, self.tokens
        if segments.offsets is None:
            tokens = tokens[k * segments.d_each :]
        offsets, lengths = (None if t is None else t[k:] for t in (segments.offsets, segments.lengths))
        segments = segments._replace(offsets=offsets, lengths=lengths)
        patches = self.patches
        if patches is not None:
            patches = Patches(tokens, patches.bits[k:], patches.sources[k:])
        return Rows(self.queries, self.groups, tokens, segments, (self.counts[0], count), patches)


def score_rows(choice: RowMaxima, rows: Rows, scores: Tensor, argmax: Tensor | None, space: int) -> None:
    """Fill scores ``[queries, documents]`` and winners ``[documents, n * L]``; by way of maxima in `space` bytes, a
    chunk of documents at a time, unless the kernel sums them itself."""
    if choice.config.SUMS:
        _launch(choice, rows, Found(None, scores, scores.stride(0), argmax))
    else:
        _sum_maxima(choice, rows, scores, argmax, space)
    _log.debug("maxsim_row_maxima for %s rows, %s: %s", rows.groups, rows.counts, choice)


def _sum_maxima(choice: RowMaxima, rows: Rows, scores: Tensor, argmax: Tensor | None, space: int) -> None:
    count, (queries, K) = rows.groups[0] * rows.groups[1], rows.counts
    chunk = max(1, min(K, space // (4 * count)))
    chunk = chunk if chunk in (1, K) else chunk // 16 * 16 or chunk
    maxima = torch.empty((chunk, count), dtype=torch.float32, device=scores.device)
    _, side, documents, _ = choice.sums
    for k in range(0, K, chunk):
        part = rows if chunk == K else rows.part(k, min(chunk, K - k))
        _launch(choice, part, Found(maxima, None, None, argmax if argmax is None else argmax[k : k + chunk]))
        sizes = part.groups[0], part.counts[1], part.groups[1], part.tokens.shape[0]
        args = maxima, None, scores[:, k:], part.queries, part.segments, queries, scores.stride(0), *sizes
        grid = (architectures.cdiv(queries, side) * architectures.cdiv(part.counts[1], documents),)
        launcher.launch(row_sums.maxsim_row_sums, grid, (*args, *choice.sums, None), {"num_warps": 4})


def _launch(choice: RowMaxima, rows: Rows, found: Found) -> None:
    C, tokens = choice.config, rows.tokens
    described = gluon.tiles((C.BN, C.BD), tokens.dtype).of(tokens, list(tokens.shape), [tokens.shape[1], 1])
    tiles = None if rows.patches is None else rows.patches.bits.shape[2]
    sizes = rows.groups[0], rows.counts[1], rows.groups[1]
    args = (rows.queries, described, rows.segments, rows.patches, tiles, found, *sizes, *tokens.shape, C)
    launcher.launch(gluon.found().rows.maxsim_row_maxima, (choice.programs,), args, {"num_warps": 4})


def forward_packed(
    choice: RowMaxima, c: Cut, queries: Queries, segments: Segments, argmax_dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """Scores ``[Nq, Nd]`` and, unless `argmax_dtype` is None, winners ``[Nd, Tq]`` of the cross product of packed
    tokens."""
    scores = torch.empty(c.scores_shape(), dtype=torch.float32, device=c.Q.device)
    argmax = None
    with on_device(c.Q.device):
        if argmax_dtype is not None:
            argmax = torch.empty(c.argmax_shape(), dtype=argmax_dtype, device=c.Q.device)
            queries = _covered(c, queries)
        tokens = c.D.view(c.Td, c.D.shape[-1])
        groups = (1, c.Tq)
        if choice.config.SUMS:
            groups, queries = (c.queries, c.Q.shape[1]), _dense(queries, c.Q.shape[1])
        rows = Rows(queries, groups, tokens, segments, (c.queries, c.columns))
        score_rows(choice, rows, scores, argmax, _MAXIMA_BYTES)
    return (scores,) if argmax is None else (scores, argmax)


def _dense(queries: Queries, Lq: int) -> Queries:
    """Packed rows as those of queries of Lq rows each."""

    def each(stride: int | None) -> int | None:
        return None if stride is None else Lq * stride

    mask, weight = each(queries.mask_stride_l), each(queries.weight_stride_l)
    return queries._replace(stride_n=Lq * queries.stride_l, mask_stride_n=mask, weight_stride_n=weight)


def _covered(c: Cut, queries: Queries) -> Queries:
    """`queries` with a mask without rows of no query, which win nothing."""
    if c.covered:
        return queries
    covered = torch.zeros(c.Tq, dtype=torch.bool, device=c.Q.device)
    stride = 1 if queries.mask is None else queries.mask_stride_l  # 0 of an expanded mask
    args = c.cu_seqlens_q, queries.mask, covered, c.Tq, stride, _COVERED_BLOCK
    launcher.launch(row_sums.maxsim_covered_rows, (c.queries,), args, {"num_warps": 4})
    return queries._replace(mask=covered, mask_stride_n=0, mask_stride_l=1)


class MaskedPlan(GluonPlan):
    """Dense documents with masks, a chunk of them at a time.

    For many query rows, the tokens that count are copied to a workspace. For fewer, the kernel reads each document from
    its first token that counts to the last, and overwrites, where it has copied them to, those between that do not.
    """

    def __init__(self, choice: RowMaxima, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.choice = choice
        self.tiles = architectures.cdiv(self.sizes.Ld, choice.config.BN)
        self.score_part, self.chunk = self._choose(D)
        _log.debug("masks of %s: %s, %d documents at a time", self.sizes, self.score_part.__name__, self.chunk)

    def _choose(self, D: Tensor) -> tuple[Callable[..., None], int]:
        """How documents are scored, and how many of them at a time."""
        Nq, K, Lq, Ld = self.sizes
        chunk = _TOKEN_BYTES // (Ld * self.d * D.element_size())
        row_tiles = Nq * Lq // sm90_configs.SPECIALIZED_ROWS
        fills = chunk >= K or row_tiles * chunk >= _KEPT_PAIRS * self.choice.programs
        fits = self.choice.config.SUMS or 4 * Nq * Lq <= _OTHER_MAXIMA_BYTES
        if Nq * Lq >= _KEPT_ROWS and fills and fits:
            return self._by_copies, chunk
        return self._by_patches, max(1, _BITS_BYTES // (8 * self.tiles))

    def _score(self, x: Dense, scores: Tensor, argmax: Tensor | None) -> None:
        assert x.d_mask is not None
        queries = queries_of(x.Q, x.q_mask, x.q_weight)
        for k in range(0, self.sizes.K, self.chunk):
            part = slice(k, k + self.chunk)
            winners = None if argmax is None else argmax[part]
            self.score_part(queries, x.D[part], x.d_mask[part], scores[:, part], winners)

    def _rows(self, queries: Queries, tokens: Tensor, lengths: Tensor) -> Rows:
        Nq, _, Lq, Ld = self.sizes
        segments = Segments(None, None, lengths, None, None, Lq, Ld)
        return Rows(queries, (Nq, Lq), tokens.view(-1, self.d), segments, (Nq, tokens.shape[0]))

    def _by_patches(self, queries: Queries, D: Tensor, d_mask: Tensor, scores: Tensor, argmax: Tensor | None) -> None:
        K, Ld, _ = D.shape
        bits = torch.empty((K, self.choice.config.BN // 32, self.tiles), dtype=torch.int32, device=self.device)
        sources, lengths = torch.empty((2, K), dtype=torch.int32, device=self.device)
        args = (d_mask, bits, sources, lengths, Ld, *d_mask.stride(), self.tiles, _PATCHED_TILES, self.choice.config.BN)
        launcher.launch(row_sums.maxsim_patches, (K,), args, {"num_warps": 1})
        rows = self._rows(queries, D, lengths)
        rows = rows._replace(patches=Patches(rows.tokens, bits, sources))
        score_rows(self.choice, rows, scores, argmax, _MAXIMA_BYTES)

    def _by_copies(self, queries: Queries, D: Tensor, d_mask: Tensor, scores: Tensor, argmax: Tensor | None) -> None:
        K, Ld, d = D.shape
        tokens = torch.empty_like(D)
        lengths = torch.empty(K, dtype=torch.int32, device=self.device)
        places = None if argmax is None else torch.empty((K, Ld), dtype=torch.int32, device=self.device)
        args = (
            d_mask,
            D,
            tokens,
            places,
            lengths,
            Ld,
            *d_mask.stride(),
            d,
            _KEPT_TOKENS,
            architectures.next_power_of_2(d),
        )
        grid = (K * architectures.cdiv(Ld, _KEPT_TOKENS),)
        launcher.launch(row_sums.maxsim_kept_tokens, grid, args, {"num_warps": 4})
        score_rows(self.choice, self._rows(queries, tokens, lengths), scores, argmax, _OTHER_MAXIMA_BYTES)
        if argmax is not None:
            rows = argmax.numel() // K
            grid = (K * architectures.cdiv(rows, _WINNERS_BLOCK),)
            args = (argmax, places, Ld, rows, _WINNERS_BLOCK)
            launcher.launch(row_sums.maxsim_winners_in_place, grid, args, {"num_warps": 4})
