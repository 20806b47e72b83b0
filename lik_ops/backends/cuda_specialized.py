"""The plan of a forward call that `maxsim_forward_specialized` computes: sm_90, many query rows, no document mask."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch
import triton
from torch import Tensor

from .._layout import lifted
from . import configs, launcher
from .cuda_arguments import architecture, describable, on_device, queries_of, sizes
from .cuda_forward import ForwardPlan, Plan, forward_plan

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


class SpecializedPlan(Plan):
    """Row tiles hold 256 query tokens, of as many queries as fit; a longer query is scored in parts of 128 tokens.

    The parts' scores lie in a workspace, from which a second launch adds them, for a chunk of documents at a time.
    """

    def __init__(
        self, choice: configs.Specialized, gluon: ModuleType, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None
    ) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.choice = choice
        self.kernel, self.sum_kernel = gluon.maxsim_forward_specialized, gluon.maxsim_sum_parts
        self.block = [choice.config.BN, choice.config.BD]
        self.layout = gluon.tile_layout(self.block, str(Q.dtype).removeprefix("torch."))
        self.constants = (*self.sizes, self.d, choice.parts, choice.config)
        self.chunk = max(
            1, _WORKSPACE // (4 * self.sizes.Nq * choice.parts)
        )  # documents whose parts' scores fit the workspace
        _log.debug("maxsim_forward_specialized for %s: %s", self.sizes, choice)

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
        Nq, K, _, _ = self.sizes
        Q, D, q_mask, _, q_weight = lifted(Q, D, q_mask, None, q_weight)
        if D.data_ptr() % 16:  # the memory access unit cannot read it
            plain = ForwardPlan(Q, D, q_mask, None, q_weight, False, self.argmax_dtype)
            return plain.scores(shape, Q, D, q_mask, None, q_weight, argmax)
        scores = torch.empty((Nq, K), dtype=torch.float32, device=self.device)
        if self.choice.parts > 1 and self.chunk < K:
            for k in range(0, K, self.chunk):
                part = slice(k, k + self.chunk)
                winners = None if argmax is None else argmax[part]
                plan = forward_plan(Q, D[part], q_mask, None, q_weight, False, self.argmax_dtype)
                scores[:, part] = plan.scores(plan.scores_shape, Q, D[part], q_mask, None, q_weight, winners)
        else:
            with on_device(self.device):
                self._launch(Q, D, q_mask, q_weight, scores, argmax)
        return scores.view(shape)

    def _launch(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        q_weight: Tensor | None,
        scores: Tensor,
        argmax: Tensor | None,
    ) -> None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        Nq, K, _, _ = self.sizes
        parts = self.choice.parts
        sums = scores if parts == 1 else torch.empty((Nq * parts, K), dtype=torch.float32, device=self.device)
        tiles = TensorDescriptor(D, [D.numel() // self.d, self.d], [self.d, 1], self.block, self.layout)
        args = (queries_of(Q, q_mask, q_weight), tiles, sums, argmax, *self.constants)
        launcher.launch(self.kernel, (self.choice.programs,), args, {"num_warps": 4})
        if parts > 1:
            grid = (configs.cdiv(K, _SUM_BLOCK), Nq)
            launcher.launch(self.sum_kernel, grid, (sums, scores, K, parts, _SUM_BLOCK), {"num_warps": 4})


def specialized_plan(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, q_weight: Tensor | None, argmax_dtype: torch.dtype | None
) -> SpecializedPlan | None:
    """The plan of a call that the specialised kernel computes, None if another does."""
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
    if choice is None or not describable(D, choice.config):
        return None
    gluon = kernels()
    if gluon is None:
        return None
    return SpecializedPlan(choice, gluon, Q, D, argmax_dtype)
