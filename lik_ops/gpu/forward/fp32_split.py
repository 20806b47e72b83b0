"""Plan of an fp32 forward call that splits tokens once into a workspace, instead of once in each program.

The workspace has a constant size and stays in the L2 cache. Documents use it in chunks. The results have the same bits
as the results of `GenericPlan`.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...core.segments import DenseArgs
from ...csrc_triton.common import fp32 as fp32_kernels
from ...csrc_triton.common.arguments import OutputArgs, TermArgs
from ...csrc_triton.forward.generic.kernel import maxsim_forward
from .. import generic_choices
from ..generic_choices import GenericChoice
from ..runtime import launcher
from ..runtime.arguments import check_grid, make_document_args, make_query_args
from ..tuning import architectures
from .plans import DensePlan

_log = logging.getLogger("lik_ops")
_SPLIT_BLOCK_ROWS = 32  # rows of a program of `split_tokens`


class Fp32SplitPlan(DensePlan):
    """A call that splits the queries, then splits and scores as many documents at a time as the workspace holds."""

    def __init__(self, choice: GenericChoice, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.launch, self.config = choice.launch, choice.launch.config
        self.options = choice.launch.options(choice.arch)
        Nq, K, _, Ld = self.sizes
        chunk = generic_choices.get_split_workspace_rows(self.config) // Ld
        # With a multiple of 16, every chunk of scores, argmax, and mask is aligned.
        self.chunk = chunk if chunk < 16 else chunk // 16 * 16
        check_grid(self.launch.programs(Nq, min(self.chunk, K)))
        _log.debug("maxsim_forward on split tokens for %s: %s", self.sizes, self.launch)

    def _score(self, x: DenseArgs, scores: Tensor, argmax: Tensor | None) -> None:
        Nq, K, Lq, Ld = self.sizes
        queries, query_scales = self._workspace(Nq * Lq)
        documents, document_scales = self._workspace(min(self.chunk, K) * Ld)
        C = self.config
        tiles = TensorDescriptor(documents, list(documents.shape), [C.BD, 1], [C.BN, C.BD])
        terms = TermArgs(queries, query_scales, document_scales, *(len(t) for t in (query_scales, document_scales)))
        self._split(x.Q, queries, query_scales)
        for k in range(0, K, self.chunk):
            part = slice(k, k + self.chunk)
            chunk, kept = x.D[part], None if x.d_mask is None else x.d_mask[part]
            self._split(chunk, documents, document_scales)
            groups = make_query_args(x.Q, x.q_mask, x.q_weight), make_document_args(chunk, kept)
            argmax_found = None if argmax is None else argmax[part]
            args = (*groups, tiles, OutputArgs(scores[0, k:], argmax_found), terms, self.sizes, self.d, C)
            grid = (self.launch.programs(Nq, chunk.shape[0]),)
            launcher.launch(maxsim_forward, grid, args, self.options)

    def _workspace(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return memory for the rows `hi` followed by the rows `lo`, and for the scales."""
        return (
            torch.empty((2 * rows, self.config.BD), dtype=torch.float16, device=self.device),
            torch.empty(rows, dtype=torch.float32, device=self.device),
        )

    def _split(self, X: Tensor, terms: Tensor, scales: Tensor) -> None:
        """Launch the split of fp32 rows."""
        rows, L = X.shape[0] * X.shape[1], X.shape[1]
        config, grid = self.config._replace(BM=_SPLIT_BLOCK_ROWS), (architectures.cdiv(rows, _SPLIT_BLOCK_ROWS),)
        args = (make_document_args(X, None), terms, scales, rows, L, len(scales), self.d, config)
        launcher.launch(fp32_kernels.split_tokens, grid, args, {"num_warps": 4})
