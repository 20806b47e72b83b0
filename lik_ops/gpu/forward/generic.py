"""Plans of forward calls that `maxsim_forward` computes, launched with little host time; also for other kernels."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ...core.arguments import add_batch_axes
from ...core.segments import DenseArgs
from ...csrc_triton.common.arguments import OutputArgs
from ...csrc_triton.forward.generic import dense as forward_kernels
from .. import choose
from ..runtime import launcher
from ..runtime.arguments import architecture, check_grid, make_descriptor, make_document_args, make_query_args
from ..tuning import architectures
from .plans import DensePlan

_log = logging.getLogger("lik_ops")


class GenericPlan(DensePlan):
    """A call of the plain kernel, which takes tensors that begin anywhere and compiles with every Triton."""

    def __init__(self, choice: choose.GenericChoice, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.launch, self.uses_descriptor = choice.launch, choice.uses_descriptor
        self.options = choice.launch.options(choice.arch)
        Nq, K, Lq, _ = self.sizes
        self.is_trivial = Nq * K == 0 or Lq == 0
        if not self.is_trivial:
            check_grid(self.launch.programs(Nq, K))
            _log.debug("maxsim_forward on %s for %s: %s", choice.arch.name, self.sizes, choice.launch)

    def _score(self, x: DenseArgs, scores: Tensor, argmax: Tensor | None) -> None:
        if self.is_trivial:
            scores.zero_()
            return
        launch = self.launch
        tiles = make_descriptor(x.D, launch.config) if self.uses_descriptor else None
        if tiles is None and launch.config.PERSISTENT:  # D begins where no descriptor can
            launch = launch.make_non_persistent()
        queries, documents = make_query_args(x.Q, x.q_mask, x.q_weight), make_document_args(x.D, x.d_mask)
        args = (queries, documents, tiles, OutputArgs(scores, argmax), None, self.sizes, self.d, launch.config)
        grid = check_grid(launch.programs(self.sizes.Nq, self.sizes.K))
        launcher.launch(forward_kernels.maxsim_forward, grid, args, self.options)


def make_generic_plan(
    Q: Tensor,
    D: Tensor,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
    arch: architectures.Architecture | None = None,
) -> GenericPlan:
    """The plain kernel's plan of a call, whichever is chosen; `arch` is given to try other tiles than the device's."""
    choice = choose.choose_generic(Q, D, normalize, argmax_dtype is not None, arch or architecture(Q.device))
    return GenericPlan(choice, Q, D, argmax_dtype)


class GluonPlan(DensePlan):
    """A call that the plain kernel takes where a Gluon kernel cannot read the tensors or does not compile."""

    instead = "maxsim_forward"
    normalize = False

    def scores(self, *call: Any) -> Tensor:
        return self._run_with_fallback(*call)

    def _run_fast(self, *call: Any) -> Tensor | None:
        return super().scores(*call) if self._supports_tensors(call[1], call[2]) else None

    def _run_generic(self, shape: tuple[int, ...], *tensors: Any) -> Tensor:
        *given, argmax = tensors
        x = add_batch_axes(*given)
        return make_generic_plan(*x[:2], self.normalize, self.argmax_dtype).scores(shape, *x, argmax)

    def _supports_tensors(self, Q: Tensor, D: Tensor) -> bool:
        """Whether they begin where the memory access unit can read them."""
        return D.data_ptr() % 16 == 0
