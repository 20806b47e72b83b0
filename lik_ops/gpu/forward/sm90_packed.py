"""Forward calls by row maxima: sm_90, many query rows, documents of any length or with masks.

Query rows are packed without padding, and documents end at their own length. The row maxima are stored in a workspace,
and a second kernel sums them, for a chunk of documents at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.segments import DenseArgs, PackedArgs
from ...csrc_triton.common.arguments import MaskPatchArgs, QueryArgs, RowMaximaOutputArgs, SegmentArgs
from ...csrc_triton.forward.generic import row_sums
from ..runtime import gluon, launcher
from ..runtime.arguments import make_query_args, use_device
from ..tuning import architectures, sm90_configs
from ..tuning.sm90_configs import RowMaximaChoice
from .sm90_dense import GluonPlan

_log = logging.getLogger("lik_ops")
# Shares of a workspace of 32 MiB. It holds either maxima and masks of one bit for each token, or copies of kept tokens,
# their 4-byte positions, and maxima. A token has at least 16 bytes.
_MAX_MAXIMA_BYTES, _MAX_MASK_BYTES = 24 * 2**20, 8 * 2**20
_MAX_TOKEN_BYTES, _MAX_COPY_MAXIMA_BYTES = 20 * 2**20, 7 * 2**20
_PATCH_STEP_TILES = 8  # tiles of a step of `maxsim_patches`
_COPY_BLOCK_TOKENS = 64  # tokens of a program of `maxsim_kept_tokens`
# Query rows from which on the time saved on masked tokens exceeds the cost of copying.
_MIN_COPY_ROWS = 8192
# Minimum (row tile, document) pairs of a program with copies, unless one chunk holds all documents.
_MIN_COPY_PAIRS = 4
_COVER_BLOCK_ROWS = 128
_ARGMAX_BLOCK_ROWS = 1024


class RowMaximaArgs(NamedTuple):
    """The arguments of the row maxima kernel.

    They are ``(n, L)`` query rows in n groups, and document tokens as rows with at least 16-byte alignment.
    """

    queries: QueryArgs
    groups: tuple[int, int]
    tokens: Tensor  # [Td, d]
    segments: SegmentArgs
    counts: tuple[int, int]  # queries, documents
    patches: MaskPatchArgs | None = None  # for documents with a mask

    def part(self, k: int, count: int) -> RowMaximaArgs:
        """Return the arguments of `count` documents from the k-th document on."""
        segments, tokens = self.segments, self.tokens
        if segments.offsets is None:
            tokens = tokens[k * segments.d_each :]
        offsets, lengths = (None if t is None else t[k:] for t in (segments.offsets, segments.lengths))
        segments = segments._replace(offsets=offsets, lengths=lengths)
        patches = self.patches
        if patches is not None:
            patches = MaskPatchArgs(tokens, patches.bits[k:], patches.sources[k:])
        return RowMaximaArgs(self.queries, self.groups, tokens, segments, (self.counts[0], count), patches)


def score_rows(choice: RowMaximaChoice, rows: RowMaximaArgs, scores: Tensor, argmax: Tensor | None, space: int) -> None:
    """Fill scores ``[queries, documents]`` and argmax ``[documents, n * L]``.

    Unless the kernel sums the maxima itself, they use a workspace of `space` bytes, for a chunk of documents at a time.
    """
    if choice.config.SUM_ROWS:
        _launch_row_maxima(choice, rows, RowMaximaOutputArgs(None, scores, scores.stride(0), argmax))
    else:
        _sum_maxima(choice, rows, scores, argmax, space)
    _log.debug("maxsim_row_maxima_sm90 for %s rows, %s: %s", rows.groups, rows.counts, choice)


def _sum_maxima(
    choice: RowMaximaChoice, rows: RowMaximaArgs, scores: Tensor, argmax: Tensor | None, space: int
) -> None:
    """Fill the scores by a launch for the maxima and a launch for their sums."""
    count, (queries, K) = rows.groups[0] * rows.groups[1], rows.counts
    chunk = max(1, min(K, space // (4 * count)))
    chunk = chunk if chunk in (1, K) else chunk // 16 * 16 or chunk
    maxima = torch.empty((chunk, count), dtype=torch.float32, device=scores.device)
    _, side, documents, _ = choice.sums
    for k in range(0, K, chunk):
        part = rows if chunk == K else rows.part(k, min(chunk, K - k))
        _launch_row_maxima(
            choice, part, RowMaximaOutputArgs(maxima, None, None, argmax if argmax is None else argmax[k : k + chunk])
        )
        sizes = part.groups[0], part.counts[1], part.groups[1], part.tokens.shape[0]
        args = maxima, None, scores[:, k:], part.queries, part.segments, queries, scores.stride(0), *sizes
        grid = (architectures.cdiv(queries, side) * architectures.cdiv(part.counts[1], documents),)
        launcher.launch(row_sums.maxsim_row_sums, grid, (*args, *choice.sums, None), {"num_warps": 4})


def _launch_row_maxima(choice: RowMaximaChoice, rows: RowMaximaArgs, outputs: RowMaximaOutputArgs) -> None:
    """Launch `maxsim_row_maxima_sm90`."""
    C, tokens = choice.config, rows.tokens
    describe_tokens = gluon.make_descriptor_factory((C.BN, C.BD), tokens.dtype)
    descriptor = describe_tokens(tokens, list(tokens.shape), [tokens.shape[1], 1])
    tiles = None if rows.patches is None else rows.patches.bits.shape[2]
    sizes = rows.groups[0], rows.counts[1], rows.groups[1]
    args = (rows.queries, descriptor, rows.segments, rows.patches, tiles, outputs, *sizes, *tokens.shape, C)
    launcher.launch(gluon.require_kernels().packed.maxsim_row_maxima_sm90, (choice.programs,), args, {"num_warps": 4})


def forward_row_maxima(
    choice: RowMaximaChoice, c: PackedArgs, queries: QueryArgs, segments: SegmentArgs, argmax_dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """Return the scores ``[Nq, Nd]`` of a cross product of packed tokens, and the argmax ``[Nd, Tq]``.

    The argmax is absent if `argmax_dtype` is None.
    """
    scores = torch.empty(c.scores_shape(), dtype=torch.float32, device=c.Q.device)
    argmax = None
    with use_device(c.Q.device):
        if argmax_dtype is not None:
            argmax = torch.empty(c.argmax_shape(), dtype=argmax_dtype, device=c.Q.device)
            queries = _mask_gaps(c, queries)
        tokens = c.D.view(c.Td, c.D.shape[-1])
        groups = (1, c.Tq)
        if choice.config.SUM_ROWS:
            groups, queries = (c.queries, c.Q.shape[1]), _view_as_dense(queries, c.Q.shape[1])
        rows = RowMaximaArgs(queries, groups, tokens, segments, (c.queries, c.columns))
        score_rows(choice, rows, scores, argmax, _MAX_MAXIMA_BYTES)
    return (scores,) if argmax is None else (scores, argmax)


def _view_as_dense(queries: QueryArgs, Lq: int) -> QueryArgs:
    """Return packed rows as queries of Lq rows each."""

    def each(stride: int | None) -> int | None:
        return None if stride is None else Lq * stride

    mask, weight = each(queries.mask_stride_l), each(queries.weight_stride_l)
    return queries._replace(stride_n=Lq * queries.stride_l, mask_stride_n=mask, weight_stride_n=weight)


def _mask_gaps(c: PackedArgs, queries: QueryArgs) -> QueryArgs:
    """Return `queries` with a mask that excludes rows of no query, which have no argmax."""
    if c.has_no_gaps:
        return queries
    mask = torch.zeros(c.Tq, dtype=torch.bool, device=c.Q.device)
    stride = 1 if queries.mask is None else queries.mask_stride_l  # 0 of an expanded mask
    args = c.cu_seqlens_q, queries.mask, mask, c.Tq, stride, _COVER_BLOCK_ROWS
    launcher.launch(row_sums.maxsim_covered_rows, (c.queries,), args, {"num_warps": 4})
    return queries._replace(mask=mask, mask_stride_n=0, mask_stride_l=1)


class MaskedPlan(GluonPlan):
    """Dense documents with masks, a chunk of documents at a time.

    For many query rows, the kept tokens are copied to a workspace. For fewer rows, the kernel reads each document from
    its first kept token to the last, and overwrites the masked tokens between them in shared memory.
    """

    def __init__(self, choice: RowMaximaChoice, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.choice = choice
        self.tiles = architectures.cdiv(self.sizes.Ld, choice.config.BN)
        self.score_part, self.chunk = self._choose(D)
        _log.debug("masks of %s: %s, %d documents at a time", self.sizes, self.score_part.__name__, self.chunk)

    def _choose(self, D: Tensor) -> tuple[Callable[..., None], int]:
        """Return the method that scores documents, and the number of documents at a time."""
        Nq, K, Lq, Ld = self.sizes
        chunk = _MAX_TOKEN_BYTES // (Ld * self.d * D.element_size())
        row_tiles = Nq * Lq // sm90_configs.SM90_TILE_ROWS
        fills = chunk >= K or row_tiles * chunk >= _MIN_COPY_PAIRS * self.choice.programs
        fits = self.choice.config.SUM_ROWS or 4 * Nq * Lq <= _MAX_COPY_MAXIMA_BYTES
        if Nq * Lq >= _MIN_COPY_ROWS and fills and fits:
            return self._score_by_copies, chunk
        return self._score_by_patches, max(1, _MAX_MASK_BYTES // (8 * self.tiles))

    def _score(self, x: DenseArgs, scores: Tensor, argmax: Tensor | None) -> None:
        assert x.d_mask is not None
        queries = make_query_args(x.Q, x.q_mask, x.q_weight)
        for k in range(0, self.sizes.K, self.chunk):
            part = slice(k, k + self.chunk)
            part_argmax = None if argmax is None else argmax[part]
            self.score_part(queries, x.D[part], x.d_mask[part], scores[:, part], part_argmax)

    def _rows(self, queries: QueryArgs, tokens: Tensor, lengths: Tensor) -> RowMaximaArgs:
        """Return the kernel arguments for some documents."""
        Nq, _, Lq, Ld = self.sizes
        segments = SegmentArgs(None, None, lengths, None, None, Lq, Ld)
        return RowMaximaArgs(queries, (Nq, Lq), tokens.view(-1, self.d), segments, (Nq, tokens.shape[0]))

    def _score_by_patches(
        self, queries: QueryArgs, D: Tensor, d_mask: Tensor, scores: Tensor, argmax: Tensor | None
    ) -> None:
        """Score documents whose masked tokens are overwritten in shared memory."""
        K, Ld, _ = D.shape
        bits = torch.empty((K, self.choice.config.BN // 32, self.tiles), dtype=torch.int32, device=self.device)
        sources, lengths = torch.empty((2, K), dtype=torch.int32, device=self.device)
        sizes = Ld, *d_mask.stride(), self.tiles, _PATCH_STEP_TILES, self.choice.config.BN
        launcher.launch(row_sums.maxsim_patches, (K,), (d_mask, bits, sources, lengths, *sizes), {"num_warps": 1})
        rows = self._rows(queries, D, lengths)
        rows = rows._replace(patches=MaskPatchArgs(rows.tokens, bits, sources))
        score_rows(self.choice, rows, scores, argmax, _MAX_MAXIMA_BYTES)

    def _score_by_copies(
        self, queries: QueryArgs, D: Tensor, d_mask: Tensor, scores: Tensor, argmax: Tensor | None
    ) -> None:
        """Score copies of the kept tokens."""
        K, Ld, d = D.shape
        tokens = torch.empty_like(D)
        lengths = torch.empty(K, dtype=torch.int32, device=self.device)
        positions = None if argmax is None else torch.empty((K, Ld), dtype=torch.int32, device=self.device)
        sizes = Ld, *d_mask.stride(), d, _COPY_BLOCK_TOKENS, architectures.next_power_of_2(d)
        args = (d_mask, D, tokens, positions, lengths, *sizes)
        grid = (K * architectures.cdiv(Ld, _COPY_BLOCK_TOKENS),)
        launcher.launch(row_sums.maxsim_kept_tokens, grid, args, {"num_warps": 4})
        score_rows(self.choice, self._rows(queries, tokens, lengths), scores, argmax, _MAX_COPY_MAXIMA_BYTES)
        if argmax is not None:
            rows = argmax.numel() // K
            grid = (K * architectures.cdiv(rows, _ARGMAX_BLOCK_ROWS),)
            args = (argmax, positions, Ld, rows, _ARGMAX_BLOCK_ROWS)
            launcher.launch(row_sums.maxsim_argmax_in_place, grid, args, {"num_warps": 4})
