"""Launches of a soft MaxSim backward, or of its part for some queries or documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...csrc_triton.backward.arguments import SoftUpstreamArgs
from ...csrc_triton.soft.backward import maxsim_soft_documents
from ...gpu.runtime import launcher
from ...gpu.runtime.arguments import (
    architecture,
    check_grid,
    choose_offset_width,
    has_even_stride,
    is_tf32_allowed,
    make_document_args,
    make_query_args,
    make_size_args,
    supports_descriptor,
)
from ...gpu.tuning.architectures import KernelKey, LaunchConfig, cdiv
from . import configs as soft_configs

Temperature = Tensor | float


class SoftCall(NamedTuple):
    """A backward call, or its part for some queries."""

    grad_scores: Tensor
    Q: Tensor
    D: Tensor
    lse: Tensor
    q_mask: Tensor | None
    d_mask: Tensor | None
    q_weight: Tensor | None
    temperature: Temperature
    normalize: bool

    @property
    def candidates(self) -> bool:
        """Return whether each query has its own documents."""
        return self.D.dim() == 4

    def part(self, own: slice) -> SoftCall:
        """Return the call for a slice of queries and of their candidates."""
        lse, D, d_mask = self.lse[:, own], self.D, self.d_mask
        if self.candidates:
            lse, D, d_mask = self.lse[own], D[own], None if d_mask is None else d_mask[own]
        q_mask, q_weight = (None if x is None else x[own] for x in (self.q_mask, self.q_weight))
        return SoftCall(self.grad_scores[own], self.Q[own], D, lse, q_mask, d_mask, q_weight, *self[7:])

    def select_documents(self, own: slice) -> SoftCall:
        """Return the call for a slice of documents of the cross product."""
        d_mask = None if self.d_mask is None else self.d_mask[own]
        return self._replace(grad_scores=self.grad_scores[:, own], D=self.D[own], lse=self.lse[own], d_mask=d_mask)

    def launch(self) -> LaunchConfig:
        """Return the launch configuration."""
        Q, wide = self.Q, choose_offset_width(self.Q, self.D)
        flat = self.candidates or has_even_stride(Q)
        kind = KernelKey(architecture(Q.device), Q.dtype, Q.shape[-1], self.candidates, self.normalize, wide)
        return soft_configs.configure_soft_backward(kind, tf32=is_tf32_allowed(Q.dtype), flat=flat)

    def tiles(self, of_queries: bool) -> TensorDescriptor | None:
        """Return a TMA descriptor of the other side of a product, or None if TMA cannot read it.

        TMA reads whole rows, and no row may be masked. Document tokens have an axis for documents, so that TMA fills
        zeros after the end of a document.
        """
        x, config = (self.Q if of_queries else self.D), self.launch().config
        masked = self.q_mask if of_queries else self.d_mask
        readable = supports_descriptor(x) and x.data_ptr() % 16 == 0 and config.SINGLE_STEP and masked is None
        if not (architecture(x.device).has_descriptors and readable) or (of_queries and self.candidates):
            return None
        *_, L, d = x.shape
        if of_queries:
            return TensorDescriptor(x, [x.numel() // d, d], [d, 1], [config.BN, config.BD])
        return TensorDescriptor(x, [x.numel() // (L * d), L, d], [L * d, d, 1], [1, config.BN, config.BD])

    def upstream(self) -> SoftUpstreamArgs:
        """Return the upstream gradient and the sizes as a kernel argument."""
        strides = (*self.lse.stride()[:2],) if self.candidates else (0, self.lse.stride(0))
        g = self.grad_scores
        return SoftUpstreamArgs._make((g, *g.stride(), self.lse, *strides, *make_size_args(self.Q, self.D)))

    def groups(self, of_queries: bool) -> tuple:
        """Return the leading arguments of both kernels.

        `of_queries` says whether queries are the other side of the product.
        """
        queries = make_query_args(self.Q, self.q_mask, self.q_weight)
        return (
            queries,
            make_document_args(self.D, self.d_mask),
            self.tiles(of_queries),
            self.upstream(),
            self.temperature,
        )

    def run(self, kernel: Callable, grid: tuple[int, ...], *args: object) -> None:
        """Launch a kernel of the backward."""
        launch = self.launch()
        options = launch.options(architecture(self.Q.device))
        grid = (*check_grid(grid[0]), grid[1], cdiv(self.Q.shape[-1], launch.config.BD))
        groups = self.groups(kernel is maxsim_soft_documents)
        launcher.launch(kernel, grid, (*groups, *args, self.Q.shape[-1], launch.config), options)

    @property
    def has_document_sums(self) -> bool:
        """Return whether gradients of documents are sums first.

        Another kernel then applies the Jacobian of the norms.
        """
        return self.normalize and not self.launch().config.SINGLE_STEP

    def count_owner_programs(self, rows_each: int, groups: int) -> int:
        """Return the number of programs that own the rows of groups."""
        return groups * cdiv(rows_each, self.launch().config.BM)
