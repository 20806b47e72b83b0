"""Plans of forward calls that a Gluon kernel computes: sm_90, many query rows, no document mask, no normalising.

`maxsim_forward_specialized` has up to 128 features, `maxsim_forward_wide` more.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..arguments import lifted
from ..csrc_triton.arguments import Specialization
from . import configs, launcher, triton_versions
from .arguments import architecture, describable, describable_queries, on_device, queries_of, sizes
from .forward import Plan, forward_plan, plain_scores

_log = logging.getLogger("lik_ops")
_WORKSPACE = 32 * 2**20  # bytes
_SUM_BLOCK = 256


class Kernels(NamedTuple):
    """The modules of the Gluon kernels."""

    specialized: ModuleType
    wide: ModuleType
    rows: ModuleType


@functools.cache
def kernels() -> Kernels | None:
    """The Gluon kernels, or None with a triton that has not the Gluon they are written in, or a newer one."""
    if not triton_versions.is_known():
        return None
    try:
        from ..csrc_triton import forward_rows, forward_specialized, forward_wide
    except (ImportError, AttributeError) as error:
        _log.debug("no specialised forward: triton %s: %r", triton.__version__, error)
        return None
    return Kernels(forward_specialized, forward_wide, forward_rows)


class SpecializedPlan(Plan):
    """Row tiles hold 256 query tokens, of as many queries as fit; a longer query is scored in parts of 128 tokens.

    The parts' scores lie in a workspace, from which a second launch adds them, for a chunk of documents at a time.
    """

    def __init__(
        self, choice: configs.Specialized, gluon: Kernels, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None
    ) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.choice, self.element = choice, str(Q.dtype).removeprefix("torch.")
        self.sum_kernel = gluon.specialized.maxsim_sum_parts
        self._choose(gluon)
        self.constants = (*self.sizes, self.d, choice.parts, choice.config)
        self.chunk = max(
            1, _WORKSPACE // (4 * self.sizes.Nq * choice.parts)
        )  # documents whose parts' scores fit the workspace
        _log.debug("%s for %s: %s", self.kernel.__name__, self.sizes, choice)

    def _choose(self, gluon: Kernels) -> None:
        """Set the kernel, and the block of documents and its layout in shared memory."""
        assert isinstance(self.choice.config, Specialization)
        self.kernel = gluon.specialized.maxsim_forward_specialized
        self.block = [self.choice.config.BN, self.choice.config.BD]
        self.layout = gluon.specialized.tile_layout(self.block, self.element)

    def tile(self) -> str:
        config = self.choice.config
        rows = configs.SPECIALIZED_ROWS if isinstance(config, Specialization) else configs.WIDE_ROWS
        return f"{rows} rows x {config.BN} tokens, {config.STAGES} stages, {self.choice.programs} programs"

    def _readable(self, Q: Tensor, D: Tensor) -> bool:
        """Whether they begin where the memory access unit can read them."""
        return D.data_ptr() % 16 == 0

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
        Q, D, q_mask, _, q_weight = lifted(Q, D, q_mask, None, q_weight)
        if not self._readable(Q, D):
            return plain_scores(self, shape, Q, D, q_mask, None, q_weight, argmax)
        try:
            scores, found = self.new_scores(shape)
            self._score(Q, D, q_mask, q_weight, found, argmax)
            return scores
        except launcher.DoesNotCompile as error:
            launcher.fall_back(error, "maxsim_forward")
        return plain_scores(self, shape, Q, D, q_mask, None, q_weight, argmax)

    def _score(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        q_weight: Tensor | None,
        scores: Tensor,
        argmax: Tensor | None,
    ) -> None:
        K = self.sizes.K
        if self.choice.parts > 1 and self.chunk < K:
            for k in range(0, K, self.chunk):
                part = slice(k, k + self.chunk)
                winners = None if argmax is None else argmax[part]
                plan = forward_plan(Q, D[part], q_mask, None, q_weight, False, self.argmax_dtype)
                scores[:, part] = plan.scores(plan.scores_shape, Q, D[part], q_mask, None, q_weight, winners)
        else:
            with on_device(self.device):
                self._launch(Q, D, q_mask, q_weight, scores, argmax)

    def _launch(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        q_weight: Tensor | None,
        scores: Tensor,
        argmax: Tensor | None,
    ) -> None:
        Nq, K, _, _ = self.sizes
        parts = self.choice.parts
        sums = scores if parts == 1 else torch.empty((Nq * parts, K), dtype=torch.float32, device=self.device)
        args = (queries_of(Q, q_mask, q_weight), *self._tensors(Q, D, sums, argmax), *self.constants)
        launcher.launch(self.kernel, (self.choice.programs,), args, {"num_warps": 4})
        if parts > 1:
            grid = (configs.cdiv(K, _SUM_BLOCK), Nq)
            launcher.launch(self.sum_kernel, grid, (sums, scores, K, parts, _SUM_BLOCK), {"num_warps": 4})

    def _tensors(self, Q: Tensor, D: Tensor, sums: Tensor, argmax: Tensor | None) -> tuple:
        """What the kernel takes between the queries and the sizes."""
        return (self._documents(D), sums, argmax)

    def _documents(self, D: Tensor) -> object:
        """All document tokens as rows, in blocks."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(D, [D.numel() // self.d, self.d], [self.d, 1], self.block, self.layout)


class WidePlan(SpecializedPlan):
    """Row tiles hold 128 query tokens, of as many queries as fit; a longer query is scored in parts of 64 tokens."""

    def _choose(self, gluon: Kernels) -> None:
        config = self.choice.config
        features = gluon.wide.FEATURES.value
        self.kernel = gluon.wide.maxsim_forward_wide
        self.block, self.rows = [config.BN, features], [configs.WIDE_ROWS // 2 // config.SLOT, config.SLOT, features]
        self.layout = gluon.specialized.tile_layout(self.block, self.element)
        self.query_layout = gluon.specialized.tile_layout(self.rows, self.element)

    def _readable(self, Q: Tensor, D: Tensor) -> bool:
        return (Q.data_ptr() | D.data_ptr()) % 16 == 0

    def _tensors(self, Q: Tensor, D: Tensor, sums: Tensor, argmax: Tensor | None) -> tuple:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        rows = TensorDescriptor(Q, list(Q.shape), list(Q.stride()), self.rows, self.query_layout)
        return (rows, self._documents(D), sums)


def specialized_plan(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    q_weight: Tensor | None,
    argmax_dtype: torch.dtype | None,
    arch: configs.Architecture | None = None,
) -> SpecializedPlan | None:
    """The plan of a call that the specialised kernel computes, None if another does."""
    arch = arch or architecture(Q.device)
    if D.dim() != 3 or D.numel() == 0 or Q.numel() == 0:
        return None
    choice = configs.specialized(
        arch,
        Q.dtype,
        *sizes(Q, D),
        Q.shape[-1],
        argmax=argmax_dtype is not None,
        processors=arch.processors,
    )
    if choice is None or not describable(D, choice.config):
        return None
    gluon = kernels()
    if gluon is None:
        return None
    if isinstance(choice.config, Specialization):
        return SpecializedPlan(choice, gluon, Q, D, argmax_dtype)
    return WidePlan(choice, gluon, Q, D, argmax_dtype) if describable_queries(Q) else None
