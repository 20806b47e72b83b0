"""Plans of forward calls that `maxsim_forward` computes, launched with little host time; also for other kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import lifted
from ..csrc_triton import forward as forward_kernels
from ..csrc_triton.arguments import Documents, Output, Queries
from . import choose, configs, launcher
from .arguments import architecture, checked_grid, current_device, descriptor, on_device, owned_strides, strides_of
from .memory import current_maker, raw_stream
from .plans import DensePlan

_log = logging.getLogger("lik_ops")
_MOST_TILES = 64  # tensor descriptors that a plan keeps


class PlainPlan(DensePlan):
    """A call of the plain kernel, which takes tensors that begin anywhere and compiles with every Triton."""

    kernel = forward_kernels.maxsim_forward

    def __init__(
        self,
        choice: choose.Plain,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        argmax_dtype: torch.dtype | None,
    ) -> None:
        super().__init__(Q, D, argmax_dtype)
        Nq, K, Lq, _ = self.sizes
        self.is_trivial = Nq * K == 0 or Lq == 0
        # Once known: what launches tensors that begin at multiples of 16 bytes.
        self.bound: launcher.Bound | None = None
        self.direct: Callable | None = None
        if self.is_trivial:
            return
        self.launch, self.reads_tiles, candidates = choice.launch, choice.reads_tiles, D.dim() == 4
        self.config, self.options = choice.launch.config, choice.launch.options(choice.arch)
        self.grid = (*checked_grid(choice.launch.programs(Nq, K)), 1, 1)
        self.query_strides = Q.stride(), strides_of(q_mask), strides_of(q_weight)
        self.document_strides = owned_strides(D, candidates), owned_strides(d_mask, candidates)
        self.tiles: dict[int, tuple] = {}
        self.constants = None, self.sizes, self.d, self.config
        self.has_per_token = not (q_mask is None and d_mask is None and q_weight is None)
        queries, documents = self._grouped(None, None, None, None, None)
        self.query_rest, self.document_rest = queries[1:], documents[1:]
        _log.debug("maxsim_forward on %s for %s: %s", choice.arch.name, self.sizes, choice.launch)

    forward = DensePlan._in_full  # one launch, which `scores` makes as quickly as a replay, from its second time on

    def scores_of(self, shape: tuple[int, ...], given: Sequence[Tensor | None]) -> Tensor:
        return self.scores(shape, *given, None)

    def scores(self, shape: tuple[int, ...], *tensors: Any) -> Tensor:
        Q, D, q_mask, d_mask, q_weight, argmax = tensors
        direct = self.direct
        if direct is None or current_device() != self.index or launcher.hooks_set():
            return self._scores_by_launcher(shape, Q, D, q_mask, d_mask, q_weight, argmax)
        q, d, winners = Q.data_ptr(), D.data_ptr(), 0 if argmax is None else argmax.data_ptr()
        if self.has_per_token:
            per_token = [0 if t is None else t.data_ptr() for t in (q_mask, d_mask, q_weight)]
            q_kept, d_kept, weight = per_token
            aligned = not (q | d | winners | q_kept | d_kept | weight) & 15
            queries, documents = self._grouped(q, d, q_kept, d_kept, weight)
        else:
            aligned = not (q | d | winners) & 15
            queries, documents = (q, *self.query_rest), (d, *self.document_rest)
        if not aligned:
            return self._scores_by_launcher(shape, Q, D, q_mask, d_mask, q_weight, argmax)
        scores = current_maker(self.device)(shape, self.score_strides[len(shape)], torch.float32)
        tiles = (self.tiles.get(d) or self._new_tiles(D, d)) if self.reads_tiles else (None,)
        args = (queries, documents, *tiles, (scores.data_ptr(), winners or None), *self.constants)
        direct(*self.grid, raw_stream(self.index), args)
        return scores

    def _scores_by_launcher(
        self,
        shape: tuple[int, ...],
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        argmax: Tensor | None,
    ) -> Tensor:
        if self.is_trivial:
            return torch.zeros(shape, dtype=torch.float32, device=self.device)
        scores = torch.empty(shape, dtype=torch.float32, device=self.device)
        queries, documents = self._grouped(Q, D, q_mask, d_mask, q_weight)
        groups = Queries._make(queries), Documents._make(documents)
        tiles = descriptor(D, self.config) if self.reads_tiles else None
        grid, config = self.grid, self.config
        if tiles is None and config.WALK:  # D begins where no descriptor can
            launch = self.launch.visiting()
            grid, config = (*checked_grid(launch.programs(*self.scores_shape)), 1, 1), launch.config
        args = (*groups, tiles, Output(scores, argmax), None, self.sizes, self.d, config)
        with on_device(self.device):
            bound = launcher.launch(self.kernel, grid, args, self.options)
        aligned = all(t is None or t.data_ptr() % 16 == 0 for t in (Q, D, q_mask, d_mask, q_weight, argmax))
        if aligned and bound is not None and bound.direct is not None:
            self.bound, self.direct = bound, bound.direct
        return scores

    def _grouped(self, q, d, q_mask, d_mask, weight) -> tuple[tuple, tuple]:
        """Tensors or pointers grouped with their strides, in the order of `Queries` and `Documents`."""
        (a, b, c), (e, f) = self.query_strides, self.document_strides
        return (q, *a, q_mask, *b, weight, *c), (d, *e, d_mask, *f)

    def _new_tiles(self, D: Tensor, pointer: int) -> tuple:
        """The descriptor of `D` as the kernel takes it: it depends on nothing but the plan and where D begins."""
        if len(self.tiles) >= _MOST_TILES:
            self.tiles.clear()
        assert self.bound is not None
        found = self.tiles[pointer] = self.bound.encoded(0, descriptor(D, self.config))
        return found


def plain_plan(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
    arch: configs.Architecture | None = None,
) -> PlainPlan:
    """The plain kernel's plan of a call, whichever is chosen; `arch` is given to try other tiles than the device's."""
    choice = choose.plain(Q, D, normalize, argmax_dtype is not None, arch or architecture(Q.device))
    return PlainPlan(choice, Q, D, q_mask, d_mask, q_weight, argmax_dtype)


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
        return plain_plan(*x, self.normalize, self.argmax_dtype).scores(shape, *x, argmax)

    def _readable(self, Q: Tensor, D: Tensor) -> bool:
        """Whether they begin where the memory access unit can read them."""
        return D.data_ptr() % 16 == 0
