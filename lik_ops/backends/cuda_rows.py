"""Forward calls by way of row maxima: sm_90, many query rows, documents of any length or with masks.

Query rows are packed, so that no tile holds rows of no query, and documents end where they end. Their maxima lie in a
workspace, from which a second kernel adds them up, for a chunk of documents at a time.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from .._layout import lifted
from ..csrc_triton import row_sums
from ..csrc_triton.arguments import Cuts, Queries, Sizes, Spans
from . import configs, launcher
from .configs import RowMaxima
from .cuda_arguments import architecture, on_device, queries_of
from .cuda_forward import ForwardPlan, Plan
from .cuda_specialized import kernels, processors

_log = logging.getLogger("lik_ops")
_WORKSPACE = 32 * 2**20  # bytes of maxima
_WORDS = 8  # of a step of `maxsim_kept_words`


def readable(tokens: Tensor) -> bool:
    """Whether the memory access unit can read rows ``[Td, d]``, if they begin at a multiple of 16 bytes."""
    rows, d = tokens.shape
    return tokens.is_contiguous() and 0 < rows < 2**31 and d * tokens.element_size() % 16 == 0


def choose(tokens: Tensor, rows: int, K: int, Lq: int, argmax: bool) -> RowMaxima | None:
    """The choice for document tokens ``[Td, d]``, None where another kernel serves better or alone."""
    if tokens.device.type != "cuda" or not readable(tokens):
        return None
    arch, count = architecture(tokens.device), processors(tokens.device)
    found = configs.row_maxima(arch, tokens.dtype, rows, K, Lq, tokens.shape[1], argmax=argmax, processors=count)
    return None if found is None or kernels() is None else found


def score_rows(
    choice: RowMaxima,
    queries: Queries,
    shape: tuple[int, int],
    tokens: Tensor,
    spans: Spans,
    cuts: Cuts,
    sizes: Sizes,
    scores: Tensor,
    argmax: Tensor | None,
) -> None:
    """Fill scores ``[Nq, K]`` and winners ``[K, rows]``. Of each document there are `spans` and `cuts`.

    Args:
        shape: how query rows lie, ``(n, L)`` of them in n groups.
        tokens: the rows of D, ``[Td, d]``, from a multiple of 16 bytes on.
        sizes: queries, documents, tokens of a query (of all, where `cuts` cuts them), tokens of a document.
    """
    rows, (Nq, K, Lq, Ld) = shape[0] * shape[1], sizes
    chunk = max(1, min(K, _WORKSPACE // (4 * rows)))
    chunk = chunk if chunk in (1, K) else chunk // 16 * 16 or chunk
    maxima = torch.empty((chunk, rows), dtype=torch.float32, device=tokens.device)
    for k in range(0, K, chunk):
        count, part = min(chunk, K - k), slice(k, k + chunk)
        of_part = Spans(*(t if t is None or isinstance(t, int) else t[part] for t in spans))
        rest = tokens if spans.offsets is not None else tokens[k * Ld :]
        winners = None if argmax is None else argmax[part]
        _maxima(choice, queries, rest, of_part, maxima, winners, (shape[0], count, shape[1], Ld))
        cut = Cuts(cuts.lengths[part], None if cuts.offsets is None else cuts.offsets[part], cuts.cu_seqlens_q)
        slot, side, documents, levels = choice.sums
        grid = (configs.cdiv(Nq, side) * configs.cdiv(count, documents),)
        numbers = Nq, count, Lq, rest.shape[0], rows, K
        args = (maxima, scores[:, k:], queries, cut, *numbers, slot, side, documents, levels)
        launcher.launch(row_sums.maxsim_row_sums, grid, args, {"num_warps": 4})
    _log.debug("maxsim_row_maxima for %s rows, %s: %s", rows, sizes, choice)


def _maxima(
    choice: RowMaxima,
    queries: Queries,
    tokens: Tensor,
    spans: Spans,
    maxima: Tensor,
    argmax: Tensor | None,
    sizes: tuple[int, int, int, int],
) -> None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    gluon, C = kernels(), choice.config
    assert gluon is not None
    block = [C.BN, C.BD]
    layout = gluon.specialized.tile_layout(block, str(tokens.dtype).removeprefix("torch."))
    described = TensorDescriptor(tokens, list(tokens.shape), [tokens.shape[1], 1], block, layout)
    args = (queries, described, spans, maxima, argmax, *sizes, *tokens.shape, C)
    launcher.launch(gluon.rows.maxsim_row_maxima, (choice.programs,), args, {"num_warps": 4})


class MaskedPlan(Plan):
    """Dense documents with masks: which tokens count is found first, in bits and as the length that holds them all."""

    def __init__(self, choice: RowMaxima, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.choice = choice

    def scores(
        self,
        shape: tuple[int, ...],
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        argmax: Tensor | None,
    ) -> Tensor:
        """The scores as `shape`, which differs from [Nq, K] in axes of size 1 only; winners go to `argmax`."""
        Nq, K, Lq, Ld = self.sizes
        Q, D, q_mask, d_mask, q_weight = lifted(Q, D, q_mask, d_mask, q_weight)
        if D.data_ptr() % 16:
            plain = ForwardPlan(Q, D, q_mask, d_mask, q_weight, False, self.argmax_dtype)
            return plain.scores(shape, Q, D, q_mask, d_mask, q_weight, argmax)
        assert d_mask is not None
        stride = configs.cdiv(Ld, 64)
        words = torch.empty((K, stride), dtype=torch.int64, device=self.device)
        lengths = torch.empty(K, dtype=torch.int32, device=self.device)
        scores = torch.empty((Nq, K), dtype=torch.float32, device=self.device)
        with on_device(self.device):
            args = (d_mask, words, lengths, Ld, *d_mask.stride(), stride, _WORDS)
            launcher.launch(row_sums.maxsim_kept_words, (K,), args, {"num_warps": 4})
            queries, tokens = queries_of(Q, q_mask, q_weight), D.view(-1, self.d)
            spans, cuts = Spans(lengths, None, words, stride), Cuts(lengths, None, None)
            score_rows(self.choice, queries, (Nq, Lq), tokens, spans, cuts, self.sizes, scores, argmax)
        return scores.view(shape)


def masked_plan(Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> MaskedPlan | None:
    """The plan of a call whose documents have masks, None where another kernel serves better or alone."""
    if D.dim() != 3 or D.numel() == 0 or Q.numel() == 0 or not D.is_contiguous():
        return None
    choice = choose(D.view(-1, D.shape[2]), Q.shape[0] * Q.shape[1], D.shape[0], Q.shape[1], argmax_dtype is not None)
    return None if choice is None else MaskedPlan(choice, Q, D, argmax_dtype)
