"""The forward half of the Triton backend: which kernel a call takes, and its launch with little host time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arguments import metadata
from ..csrc_triton import forward as forward_kernels
from ..csrc_triton.arguments import Documents, Queries
from . import configs, launcher
from .arguments import (
    allow_tf32,
    architecture,
    checked_grid,
    current_device,
    describable,
    descriptor,
    on_device,
    owned_strides,
    sizes,
    strides_of,
    wide_of,
)

_log = logging.getLogger("lik_ops")
_MOST_PLANS = 4096
_MOST_TILES = 64  # tensor descriptors that a plan keeps
# None where torch was built without CUDA and ROCm.
raw_stream: Callable = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]
# What inductor's code calls, microseconds quicker than torch.empty; it fills no memory for deterministic algorithms.
empty_cuda = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)


class Plan:
    """A forward call of given metadata: what follows from that alone is worked out once."""

    def __init__(self, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        self.device, self.sizes, self.d, self.argmax_dtype = Q.device, sizes(Q, D), Q.shape[-1], argmax_dtype
        Nq, K, Lq, _ = self.sizes
        self.scores_shape = (Nq, K)
        self.argmax_shape = (Nq, K, Lq) if D.dim() == 4 else (K, Nq, Lq)

    def new_argmax(self) -> Tensor:
        """Winners to be filled by `scores`, of size [0] if none are asked for."""
        if self.argmax_dtype is None:
            return torch.empty(0, dtype=torch.int32, device=self.device)
        return torch.empty(self.argmax_shape, dtype=self.argmax_dtype, device=self.device)

    launch: configs.Launch
    kernel: Any = forward_kernels.maxsim_forward

    def tile(self) -> str:
        """What a program of `kernel` scores at a time, for people."""
        c, launch = self.launch.config, self.launch
        return f"{c.BM} rows x {c.BN} tokens x {c.BD} features, {launch.num_warps} warps, {launch.num_stages} stages"

    def new_scores(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Scores to be filled, as `shape` and as [Nq, K]: a view, which autograd would keep callers from writing to."""
        scores = torch.empty(shape, dtype=torch.float32, device=self.device)
        return scores, scores.view(self.scores_shape)

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
        raise NotImplementedError


class ForwardPlan(Plan):
    """What a forward call needs and what follows from the metadata of its arguments alone: worked out once for each.

    Made from arguments with all their axes; called also with the 2-D tensors that these axes were added to. `arch` is
    given to try other tiles than the device's.
    """

    def __init__(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        normalize: bool,
        argmax_dtype: torch.dtype | None,
        arch: configs.Architecture | None = None,
    ) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.index, self.arch, candidates = Q.device.index, arch or architecture(Q.device), D.dim() == 4
        Nq, K, Lq, _ = self.sizes
        self.is_trivial = Nq * K == 0 or Lq == 0
        # Once known: what launches tensors that begin at multiples of 16 bytes.
        self.bound: launcher.Bound | None = None
        self.direct: Callable | None = None
        if self.is_trivial:
            return
        launch = configs.forward(
            self.arch,
            Q.dtype,
            Nq,
            Lq,
            self.d,
            candidates=candidates,
            normalize=normalize,
            wide=wide_of(Q, D),
            tf32=allow_tf32(),
            documents=K * (Nq if candidates else 1),
            argmax=argmax_dtype is not None,
        )
        self.reads_tiles = self.arch.has_descriptors and describable(D, launch.config)
        if argmax_dtype is not None or not self.reads_tiles:
            launch = launch.visiting()
        self.launch, self.config, self.options = launch, launch.config, launch.options(self.arch)
        self.grid = (*checked_grid(launch.programs(Nq, K)), 1, 1)
        self.query_strides = Q.stride(), strides_of(q_mask), strides_of(q_weight)
        self.document_strides = owned_strides(D, candidates), owned_strides(d_mask, candidates)
        self.tiles: dict[int, tuple] = {}
        self.score_strides = (K, 1)
        self.constants = (None, *self.sizes, self.d, self.config)
        self.has_per_token = not (q_mask is None and d_mask is None and q_weight is None)
        queries, documents = self._grouped(None, None, None, None, None)
        self.query_rest, self.document_rest = queries[1:], documents[1:]
        _log.debug("maxsim_forward on %s for %s: %s", self.arch.name, self.sizes, launch)

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
        if empty_cuda is None or torch.are_deterministic_algorithms_enabled():
            scores = torch.empty(shape, dtype=torch.float32, device=self.device)
        else:
            scores = empty_cuda(shape, self.score_strides[-len(shape) :] if shape else (), torch.float32)
        tiles = (self.tiles.get(d) or self._new_tiles(D, d)) if self.reads_tiles else (None,)
        args = (queries, documents, *tiles, scores.data_ptr(), winners or None, *self.constants)
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
        args = (*groups, tiles, scores, argmax, None, *self.sizes, self.d, config)
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


def plain_scores(
    plan: Plan,
    shape: tuple[int, ...],
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    argmax: Tensor | None,
) -> Tensor:
    """What `plan`, of another kernel, would give: the plain kernel takes tensors that begin anywhere."""
    plain = ForwardPlan(Q, D, q_mask, d_mask, q_weight, False, plan.argmax_dtype)
    return plain.scores(shape, Q, D, q_mask, d_mask, q_weight, argmax)


_plans: dict[tuple, Plan] = {}


def forward_plan(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
) -> Plan:
    """The plan for validated arguments that have all their axes."""
    tf32 = Q.dtype == torch.float32 and allow_tf32()
    key = (*metadata(Q, D, q_mask, d_mask, q_weight), normalize, argmax_dtype, tf32)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = new_plan(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype)
    return plan


def new_plan(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
    arch: configs.Architecture | None = None,
) -> Plan:
    """A plan for validated arguments that have all their axes; given `arch`, as if they were on such a device.

    Nothing but the tensors' metadata is read.
    """
    plan: Plan | None
    if not normalize:
        from . import rows as cuda_rows  # they are built upon this module
        from . import specialized as cuda_specialized

        if d_mask is None:
            plan = cuda_specialized.specialized_plan(Q, D, q_mask, q_weight, argmax_dtype, arch)
        else:
            plan = cuda_rows.masked_plan(Q, D, argmax_dtype, arch)
        if plan is not None:
            return plan
    if Q.dtype == torch.float32 and not normalize:
        from .split import split_plan

        plan = split_plan(Q, D, argmax_dtype, arch)
        if plan is not None:
            return plan
    return ForwardPlan(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype, arch)


def forward(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Scores [Nq, Nd] or [Nq, K] in fp32, and the winners (an empty tensor if `argmax_dtype` is None)."""
    plan = forward_plan(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype)
    argmax = plan.new_argmax()
    wanted = None if argmax_dtype is None else argmax
    return plan.scores(plan.scores_shape, Q, D, q_mask, d_mask, q_weight, wanted), argmax


def forget() -> None:
    """Drop what was worked out from the table of configurations."""
    _plans.clear()
