"""Plans of forward calls that `maxsim_forward` computes, launched with little host time; also for other kernels."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ...core.arguments import lifted
from ...core.segments import Dense
from ...csrc_triton.common.arguments import Output
from ...csrc_triton.forward.generic import dense as forward_kernels
from .. import choose
from ..runtime import launcher
from ..runtime.arguments import architecture, checked_grid, descriptor, documents_of, queries_of
from ..tuning import architectures
from .plans import DensePlan

_log = logging.getLogger("lik_ops")


class PlainPlan(DensePlan):
    """A call of the plain kernel, which takes tensors that begin anywhere and compiles with every Triton."""

    def __init__(self, choice: choose.Plain, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.launch, self.reads_tiles = choice.launch, choice.reads_tiles
        self.options = choice.launch.options(choice.arch)
        Nq, K, Lq, _ = self.sizes
        self.is_trivial = Nq * K == 0 or Lq == 0
        if not self.is_trivial:
            checked_grid(self.launch.programs(Nq, K))
            _log.debug("maxsim_forward on %s for %s: %s", choice.arch.name, self.sizes, choice.launch)

    def _score(self, x: Dense, scores: Tensor, argmax: Tensor | None) -> None:
        if self.is_trivial:
            scores.zero_()
            return
        launch = self.launch
        tiles = descriptor(x.D, launch.config) if self.reads_tiles else None
        if tiles is None and launch.config.WALK:  # D begins where no descriptor can
            launch = launch.visiting()
        queries, documents = queries_of(x.Q, x.q_mask, x.q_weight), documents_of(x.D, x.d_mask)
        args = (queries, documents, tiles, Output(scores, argmax), None, self.sizes, self.d, launch.config)
        grid = checked_grid(launch.programs(self.sizes.Nq, self.sizes.K))
        launcher.launch(forward_kernels.maxsim_forward, grid, args, self.options)


def plain_plan(
    Q: Tensor,
    D: Tensor,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
    arch: architectures.Architecture | None = None,
) -> PlainPlan:
    """The plain kernel's plan of a call, whichever is chosen; `arch` is given to try other tiles than the device's."""
    choice = choose.plain(Q, D, normalize, argmax_dtype is not None, arch or architecture(Q.device))
    return PlainPlan(choice, Q, D, argmax_dtype)


class GluonPlan(DensePlan):
    """A call that the plain kernel takes where a Gluon kernel cannot read the tensors or does not compile."""

    instead = "maxsim_forward"
    normalize = False

    def scores(self, *call: Any) -> Tensor:
        return self._tried(*call)

    def _faster(self, *call: Any) -> Tensor | None:
        return super().scores(*call) if self._readable(call[1], call[2]) else None

    def _plain(self, shape: tuple[int, ...], *tensors: Any) -> Tensor:
        *given, argmax = tensors
        x = lifted(*given)
        return plain_plan(*x[:2], self.normalize, self.argmax_dtype).scores(shape, *x, argmax)

    def _readable(self, Q: Tensor, D: Tensor) -> bool:
        """Whether they begin where the memory access unit can read them."""
        return D.data_ptr() % 16 == 0
