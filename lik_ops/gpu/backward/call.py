"""Kernel arguments of a backward call, and the launches for query rows and for atomic sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...csrc_triton.backward.arguments import RowSumArgs, UpstreamArgs
from ...csrc_triton.backward.queries import maxsim_grad_queries, maxsim_grad_query_parts
from ...csrc_triton.backward.rounding import maxsim_round_rows
from ...csrc_triton.backward.unified import maxsim_finish, maxsim_scatter
from ...csrc_triton.common.arguments import CodecDequantArgs, DequantArgs, DocumentArgs, QueryArgs
from ...csrc_triton.common.token_norms import maxsim_row_norms
from ...portable.blocks import split_to_fit
from ..runtime import launcher
from ..runtime.arguments import architecture, check_grid, make_document_args
from ..tuning import backward_configs
from ..tuning.architectures import Architecture, KernelKey, LaunchConfig, cdiv

_TARGET_SCATTER_PROGRAMS = 4096  # fills any GPU several times
# Rounding a document token reads and writes 6 bytes per feature, and saves 2 for each query row that reads it.
_MIN_READS_PER_TOKEN = 4
_MAX_ROUNDED_BYTES = 128 * 2**20  # rounded documents
_INT32_MAX = 2**31 - 1
# Query gradients over many documents are summed in parts, so that few query rows have many programs.
_MIN_DOCUMENTS, _PART_DOCUMENTS, _MAX_PARTS = 384, 128, 64
# From this number of programs of an SM on, each adds all parts itself. Four have all registers.
_FULL_SM = 4
_MAX_SUM_BYTES = 32 * 2**20  # sums of some queries


class GradientCall(NamedTuple):
    """The kernel arguments of a backward call.

    A packed layout is one query of all rows.
    """

    queries: QueryArgs
    documents: DocumentArgs
    up: UpstreamArgs
    candidates: bool
    normalize: bool
    wide: int
    packed: bool = False
    counts: DequantArgs | CodecDequantArgs | None = None  # of encoded documents
    encoding: Any = ""  # `KernelConfig.ENCODING`
    tf32: bool = False  # whether tokens are fp32 and PyTorch allows TF32
    all_documents: int | None = None  # number of documents of the whole call if this call is a part of it

    @property
    def d(self) -> int:
        """Return the number of features."""
        return self.queries.ptr.shape[-1]

    @property
    def arch(self) -> Architecture:
        """Return the architecture of the tensors' device."""
        return architecture(self.queries.ptr.device)

    @property
    def groups(self) -> tuple[QueryArgs, DocumentArgs, UpstreamArgs]:
        """Return the leading arguments of most kernels."""
        return self.queries, self.documents, self.up

    @property
    def flat(self) -> bool:
        """Return whether all query rows are evenly spaced and 32 bits address each element."""
        Q, rows = self.queries, self.up.Nq * self.up.Lq
        reach = rows * abs(Q.stride_l) + self.d * abs(Q.stride_d)
        return (self.up.Nq == 1 or Q.stride_n == self.up.Lq * Q.stride_l) and reach <= _INT32_MAX

    @property
    def kind(self) -> KernelKey:
        """Return the key of the configuration tables."""
        return KernelKey(self.arch, self.queries.ptr.dtype, self.d, self.candidates, self.normalize, self.wide)

    def run(self, kernel, grid: tuple[int, ...], args: tuple, launch: LaunchConfig) -> None:
        """Launch a kernel with `args` and the configuration of `launch`."""
        launcher.launch(kernel, grid, (*args, launch.config), launch.options(self.arch))

    def row_tiles(self, launch: LaunchConfig) -> int:
        """Return the number of row tiles of all queries."""
        return self.up.Nq * cdiv(self.up.Lq, launch.config.BM)

    def write_query_gradients(self, grad_Q: Tensor | None, grad_weight: Tensor | None) -> None:
        """Launch the gradients of the queries and of their weights, each unless it is None."""
        if grad_Q is None and grad_weight is None:
            return
        call, kind = self, self.kind
        if rounded := self._should_round_documents():
            call, kind = self._round_documents(), kind._replace(dtype=torch.float16)
        scaled = self.up.scale is not None
        launch = backward_configs.configure_query_gradients(
            kind, ragged=self.packed, scaled=scaled, rounded=rounded, encoding=self.encoding
        )
        if (split := self._split_documents()) is not None:
            call._sum_in_parts(*split, grad_Q, grad_weight, launch)
        else:
            args = (*call.groups, self.counts, grad_Q, grad_weight, self.d)
            self.run(maxsim_grad_queries, check_grid(self.row_tiles(launch)), args, launch)

    def _sum_in_parts(
        self, count: int, share: int, grad_Q: Tensor | None, grad_weight: Tensor | None, launch: LaunchConfig
    ) -> None:
        """Write the gradients of the queries from sums over `count` parts of `share` documents, for some at a time."""
        Q, (Nq, Lq, d), C = self.queries, self.queries.ptr.shape, launch.config
        steps = cdiv(d, C.BD)
        of_program = count if self.row_tiles(launch) * steps >= _FULL_SM * self.arch.processors else 1
        stored = count // of_program
        for part in split_to_fit(Nq, 4 * stored * Lq * d, _MAX_SUM_BYTES):
            rows, weight = Q.ptr[part], None if Q.weight is None else Q.weight[part]
            sums = torch.empty((stored, len(rows), 1, Lq, d), dtype=torch.float32, device=rows.device)
            grid = *check_grid(len(rows) * cdiv(Lq, C.BM)), stored, steps
            self.run(maxsim_grad_query_parts, grid, (*self.groups, sums, share, of_program, part.start, d), launch)
            call = self._replace(queries=Q._replace(weight=weight))
            grad, grad_of_weight = (None if x is None else x[part] for x in (grad_Q, grad_weight))
            X = make_document_args(rows[:, None], None)
            call.write_gradients(X, sums if stored > 1 else sums[0], grad, grad_of_weight, self.wide, True)

    def _split_documents(self) -> tuple[int, int] | None:
        """Return the number of parts of the documents of a query gradient, and the documents of each part.

        Return None if documents are few or packed, or if the sums of a query would need too much memory. The number of
        queries does not matter, so that a gradient has the same bits however the queries are split.
        """
        K = self.up.K
        if self.packed or K < _MIN_DOCUMENTS:
            return None
        count = min(K // _PART_DOCUMENTS, _MAX_PARTS, _MAX_SUM_BYTES // (4 * self.up.Lq * self.d))
        if count < 2:
            return None
        share = cdiv(K, count)
        return cdiv(K, share), share

    def _should_round_documents(self) -> bool:
        """Return whether the query gradient takes less time with rounded documents, and these need little memory."""
        if not self.tf32 or self.candidates or self.packed:
            return False
        up = self.up
        is_read_often = up.Nq * up.Lq >= _MIN_READS_PER_TOKEN * up.Ld
        return is_read_often and 2 * up.K * up.Ld * self.d <= _MAX_ROUNDED_BYTES

    def _round_documents(self) -> GradientCall:
        """Return the call with documents rounded to fp16, and their scales."""
        D, scale = self._round_rows(self.documents, None, self.up.K, self.up.Ld, 1)
        return self._replace(documents=make_document_args(D, None), up=self.up._replace(scale=scale))

    def round_queries(self) -> GradientCall:
        """Return the call with query rows rounded to fp16, and their scales as norms, for sums over query rows."""
        Q, up = self.queries, self.up
        rounded, scale = self._round_rows(make_document_args(Q.ptr, None), up.norms, up.Nq, up.Lq, 1)
        rows = Q._replace(ptr=rounded, stride_n=up.Lq * self.d, stride_l=self.d, stride_d=1)
        return self._replace(queries=rows, up=up._replace(norms=scale))

    def split_queries(self) -> GradientCall:
        """Return the call with the fp16 terms of query rows, and their scales as norms, for exact sums over rows."""
        up = self.up
        terms, scale = self._round_rows(make_document_args(self.queries.ptr, None), up.norms, up.Nq, up.Lq, 2)
        return self._replace(up=up._replace(norms=scale, terms=terms))

    def _round_rows(self, X: DocumentArgs, norms: Tensor | None, K: int, L: int, terms: int) -> tuple[Tensor, Tensor]:
        """Return rows `[K, L, terms * d]` in fp16, and their scales `[K, L]`, times `norms`."""
        rounded = X.ptr.new_empty((K, L, terms * self.d), dtype=torch.float16)
        scales = X.ptr.new_empty((K, L))
        launch = backward_configs.configure_rounding(self.kind, terms)
        grid = check_grid(cdiv(K * L, launch.config.BM))
        self.run(maxsim_round_rows, grid, (X, norms, rounded, scales, K * L, L, self.d), launch)
        return rounded, scales

    def add_norms(self) -> GradientCall:
        """Return the call with ``1 / ||q||`` of all query rows if tokens are normalized."""
        if not self.normalize:
            return self
        up = self.up
        norms = self.queries.ptr.new_empty((up.Nq, up.Lq), dtype=torch.float32)
        launch = backward_configs.configure_gather(self.kind)
        args = self.queries, norms, up.Lq, self.d
        self.run(maxsim_row_norms, check_grid(self.row_tiles(launch)), args, launch)
        return self._replace(up=up._replace(norms=norms))

    def scatter(self, sum_Q: Tensor | None, sum_D: Tensor | None) -> None:
        """Add gradients to zeroed fp32 sums.

        A program processes a share of the documents. For packed documents it processes all documents of its rows.
        """
        launch = backward_configs.configure_scatter(self.kind, ragged=self.packed)
        tiles, K = self.row_tiles(launch), self.up.K
        if self.packed:
            share, shares = self.up.count, 1
        else:
            share = max(cdiv(K * tiles, _TARGET_SCATTER_PROGRAMS), min(K, launch.config.BN))
            shares = cdiv(K, share)
        args = *self.groups, sum_Q, sum_D, self.d, share
        self.run(maxsim_scatter, (*check_grid(tiles), shares), args, launch)

    def write_gradients(
        self, X: DocumentArgs, sums: Tensor, grad: Tensor | None, grad_weight: Tensor | None, wide: int, weighted: bool
    ) -> None:
        """Write the gradient of the rows X from their sums.

        Args:
            X: the rows.
            sums: fp32 sums ``[N, K, L, d]``, or ``[parts, N, K, L, d]``.
            grad: output for the gradient, or None.
            grad_weight: output for the gradient of the weights, or None.
            wide: `KernelConfig.WIDE_OFFSETS` of X.
            weighted: whether the rows are queries, which have weights.
        """
        N, K, L, d = sums.shape[-4:]
        queries = self.queries
        if not weighted:
            queries = queries._replace(weight=None, weight_stride_n=None, weight_stride_l=None)
        launch = backward_configs.configure_gather(self.kind._replace(d=d, candidates=False, wide=wide))
        grid = check_grid(N * K * cdiv(L, launch.config.BM))
        parts = (len(sums), sums.stride(0)) if sums.dim() == 5 else (None, None)
        row_sums = RowSumArgs(sums, K, L, None if weighted else self.up.scale, *parts)
        self.run(maxsim_finish, grid, (X, queries, row_sums, grad, grad_weight, d), launch)
