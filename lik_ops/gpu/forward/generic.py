"""Plans of forward calls for the generic kernel `maxsim_forward`, and the base class of the Gluon plans."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ...core.arguments import add_batch_axes
from ...core.segments import DenseArgs
from ...csrc_triton.common.arguments import OutputArgs
from ...csrc_triton.forward.generic.kernel import maxsim_forward
from .. import generic_choices
from ..generic_choices import GenericChoice
from ..runtime import launcher
from ..runtime.arguments import architecture, check_grid, make_descriptor, make_document_args, make_query_args
from ..tuning import architectures
from .plans import DensePlan

_log = logging.getLogger("lik_ops")


class GenericPlan(DensePlan):
    """A call of the generic kernel, which supports tensors of any alignment and compiles with every Triton."""

    def __init__(self, choice: GenericChoice, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
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
        if tiles is None and launch.config.PERSISTENT:  # D is not aligned for a descriptor
            launch = launch.make_non_persistent()
        queries, documents = make_query_args(x.Q, x.q_mask, x.q_weight), make_document_args(x.D, x.d_mask)
        args = (queries, documents, tiles, OutputArgs(scores, argmax), self.sizes, self.d, launch.config)
        grid = check_grid(launch.programs(self.sizes.Nq, self.sizes.K))
        launcher.launch(maxsim_forward, grid, args, self.options)


def make_generic_plan(
    Q: Tensor,
    D: Tensor,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
    arch: architectures.Architecture | None = None,
) -> GenericPlan:
    """Return a plan of the generic kernel for a call, whichever kernel is chosen.

    Args:
        Q: query tokens.
        D: document tokens.
        normalize: whether tokens are normalized.
        argmax_dtype: dtype of the argmax, or None without an argmax.
        arch: architecture whose tiles are used, or None for the architecture of the device of Q.
    """
    choice = generic_choices.choose_generic(Q, D, normalize, argmax_dtype is not None, arch or architecture(Q.device))
    return GenericPlan(choice, Q, D, argmax_dtype)


class GluonPlan(DensePlan):
    """A call of a Gluon kernel that falls back to the generic kernel for unsupported tensors or compile errors."""

    instead = "maxsim_forward"
    normalize = False

    def scores(self, *call: Any) -> Tensor:
        """Return the scores, computed by the generic kernel if the Gluon kernel fails."""
        return self._run_with_fallback(*call)

    def _run_fast(self, *call: Any) -> Tensor | None:
        return super().scores(*call) if self._supports_tensors(call[1], call[2]) else None

    def _run_generic(self, shape: tuple[int, ...], *tensors: Any) -> Tensor:
        *given, argmax = tensors
        x = add_batch_axes(*given)
        return make_generic_plan(*x[:2], self.normalize, self.argmax_dtype).scores(shape, *x, argmax)

    def _supports_tensors(self, Q: Tensor, D: Tensor) -> bool:
        """Return whether the tensors have the alignment that TMA needs."""
        return D.data_ptr() % 16 == 0
