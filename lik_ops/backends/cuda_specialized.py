"""The plan of a forward call that `maxsim_forward_specialized` computes: sm_90, many query rows, no document mask."""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from .._layout import lift
from ..csrc_triton.arguments import Queries
from . import configs, launcher
from .cuda import ForwardPlan, architecture, describable, forward_plan, sizes

_log = logging.getLogger("lik_ops")
_WORKSPACE = 32 * 2**20  # bytes
_SUM_BLOCK = 256


@functools.cache
def kernels() -> ModuleType | None:
    """The Gluon kernels, or None with a triton that has not the Gluon they are written in."""
    try:
        from ..csrc_triton import forward_specialized
    except (ImportError, AttributeError) as error:
        _log.debug("no specialised forward: triton %s: %r", triton.__version__, error)
        return None
    return forward_specialized


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class SpecializedPlan(ForwardPlan):
    """Row tiles hold 256 query tokens, of as many queries as fit; a longer query is scored in parts of 128 tokens.

    The parts' scores lie in a workspace, from which a second launch adds them, for a chunk of documents at a time.
    """

    groups = (Queries,)

    def __init__(
        self,
        choice: configs.Specialized,
        gluon: ModuleType,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        normalize: bool,
        argmax_dtype: torch.dtype | None,
    ) -> None:
        args = Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype
        super().__init__(*args)
        self.plain = ForwardPlan(*args)  # for documents that do not begin at a multiple of 16 bytes
        self.choice, self.kernel, self.sum_kernel = choice, gluon.maxsim_forward_specialized, gluon.maxsim_sum_parts
        self.config, self.options = choice.config, {"num_warps": 4}
        self.grid = (choice.programs, 1, 1)
        self.constants = (*self.sizes, self.d, choice.parts, choice.config)
        self.block = [choice.config.BN, choice.config.BD]
        self.layout = gluon.tile_layout(self.block, str(Q.dtype).removeprefix("torch."))
        _log.debug("maxsim_forward_specialized for %s: %s", self.sizes, choice)

    def _descriptor(self, D: Tensor) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(D, [D.numel() // self.d, self.d], [self.d, 1], self.block, self.layout)

    def _grouped(self, q, d, q_mask, d_mask, weight) -> tuple[tuple, ...]:
        return super()._grouped(q, d, q_mask, d_mask, weight)[:1]

    def _launch(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        scores: Tensor,
        argmax: Tensor | None,
    ) -> None:
        inputs = Q, D, q_mask, d_mask, q_weight
        Nq, K, _, _ = self.sizes
        if D.data_ptr() % 16:
            self.plain._launch(*inputs, scores, argmax)
        elif self.choice.parts == 1:
            super()._launch(*inputs, scores, argmax)
        elif Nq * self.choice.parts * K * 4 <= _WORKSPACE or K == 1:
            partial = torch.empty((Nq * self.choice.parts, K), dtype=torch.float32, device=self.device)
            super()._launch(*inputs, partial, argmax)
            grid = (configs.cdiv(K, _SUM_BLOCK), Nq, 1)
            args = (partial, scores, K, self.choice.parts, _SUM_BLOCK)
            launcher.launch(self.sum_kernel, grid, args, {"num_warps": 4})
        else:
            self._launch_in_chunks(*inputs, scores, argmax)

    def _launch_in_chunks(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        scores: Tensor,
        argmax: Tensor | None,
    ) -> None:
        Nq, K, _, _ = self.sizes
        if Q.dim() == 2:
            Q, q_mask, q_weight = Q.unsqueeze(0), lift(q_mask, True), lift(q_weight, True)
        chunk = max(1, _WORKSPACE // (Nq * self.choice.parts * 4))
        for k in range(0, K, chunk):
            part = slice(k, k + chunk)
            inputs = Q, D[part], q_mask, d_mask, q_weight
            plan = forward_plan(*inputs, False, self.argmax_dtype)
            winners = None if argmax is None else argmax[part]
            scores.view(Nq, K)[:, part] = plan.scores(plan.scores_shape, *inputs, winners)


def specialized_plan(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
) -> SpecializedPlan | None:
    """The plan of a call that the specialised kernel computes, None if another does."""
    args = Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype
    if D.dim() != 3 or D.numel() == 0 or Q.numel() == 0:
        return None
    choice = configs.specialized(
        architecture(Q.device),
        Q.dtype,
        *sizes(Q, D),
        Q.shape[-1],
        argmax=argmax_dtype is not None,
        processors=_processors(Q.device),
    )
    gluon = kernels()
    if choice is None or gluon is None or not describable(D, choice.config):
        return None
    return SpecializedPlan(choice, gluon, *args)
