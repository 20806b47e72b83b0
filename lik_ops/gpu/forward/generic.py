"""Plans of forward calls for the generic kernel `maxsim_forward`."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

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
