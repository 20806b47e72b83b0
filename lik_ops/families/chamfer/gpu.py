"""Nearest points by Triton kernels.

One pass over the distances serves both clouds. A second kernel searches the few points that each point's key
identifies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...csrc_triton.chamfer.exact import chamfer_nearest, chamfer_select, chamfer_slopes
from ...csrc_triton.chamfer.products import chamfer_products, chamfer_terms
from ...csrc_triton.common.arguments import ChamferConfig, PointArgs, PointTermArgs
from ...gpu.backward.dense import backward_lowmem
from ...gpu.runtime import launcher
from ...gpu.runtime.arguments import architecture, check_grid, choose_row_offset_width, get_feature_reach, use_device
from ...gpu.tuning.architectures import INTERPRETER, Architecture, LaunchConfig, cdiv, next_power_of_2
from ...gpu.tuning.backward_configs import THREE_CTA_REGISTERS
from ...gpu.tuning.tables import FP32_DTYPES, TableRow, select_row
from .portable import MIN_PRODUCT_FEATURES, Nearest, sum_point_gradients

# Larger than every other key: an infinite distance to point -1.
_EMPTY_KEY = (0x7F800000 << 32) | 0xFFFFFFFF
_INT32_MAX = 2**31 - 1
_MAX_UNROLLED_COORDINATES = 4  # coordinates that are held in registers
# Steps of a part. A low limit keeps the second search short if several points are equally near.
_MAX_PART_STEPS = 32
_MAX_TERM_BYTES = 14 * 2**20  # terms of one cloud
_TERM_ROW_MULTIPLE = 256  # the rows of the terms of a cloud are a multiple of this
NEAREST_PROGRAMS, PRODUCT_PROGRAMS = 3, 2  # programs that an SM runs at a time
_LANES, _RUN, _GROUP = 4, 2, 16  # layout of tensor core rows: see `chamfer_products`


class KeyLayout(NamedTuple):
    """The points of the other cloud that a key identifies.

    A key names one class of a part of `size` points. The classes of a part alternate in runs of `run` points, and there
    are `kinds` classes.
    """

    size: int
    kinds: int
    run: int


# (points of P, points of the other cloud, coordinates) of a step of `chamfer_products`.
_PRODUCTS_TABLE = (
    TableRow(units=("interpreter",), value=(32, 16, 16)),
    TableRow(units=("wgmma",), d=128, value=(128, 64, 128)),
    TableRow(units=("wgmma",), value=(128, 64, 64)),
    TableRow(units=("mma",), dtypes=FP32_DTYPES, value=(64, 32, 64)),  # with 64 points ptxas spills on sm_80
    TableRow(value=(64, 64, 64)),
)


def _make_launch(config: ChamferConfig, warps: int, registers: int | None) -> LaunchConfig:
    """Return the launch of a kernel without pipeline stages."""
    return LaunchConfig(config, num_warps=warps, num_stages=1, max_registers=registers)  # type: ignore[arg-type]


def configure_nearest(arch: Architecture, d: int, metric: str, wide: int) -> LaunchConfig:
    """Return the launch of `chamfer_nearest`."""
    BM, BN = (16, 16) if arch == INTERPRETER else (32, 128)
    BD = d if d <= _MAX_UNROLLED_COORDINATES else 8
    config = ChamferConfig(BM=BM, BN=BN, BD=BD, METRIC=metric, WIDE_OFFSETS=wide)
    return _make_launch(config, 4, THREE_CTA_REGISTERS if arch.name == "sm_90" else arch.registers)


def configure_products(arch: Architecture, dtype: torch.dtype, d: int, wide: int) -> LaunchConfig:
    """Return the launch of `chamfer_products`."""
    BM, BN, BD = select_row(_PRODUCTS_TABLE, arch, dtype, 1, d, False, wide)
    BD = min(BD, max(16, next_power_of_2(d)))
    metric = "sqeuclidean"
    config = ChamferConfig(
        BM=BM, BN=BN, BD=BD, METRIC=metric, WIDE_OFFSETS=wide, SPLIT_FP32=dtype == torch.float32, SINGLE_STEP=d <= BD
    )
    return _make_launch(config, 4, 255)


def configure_terms(arch: Architecture, products: LaunchConfig) -> LaunchConfig:
    """Return the launch of `chamfer_terms`, which writes the rows for `chamfer_products`."""
    return products.change(BM=16, max_registers=arch.registers)


def configure_selection(arch: Architecture, d: int, metric: str, wide: int, side: KeyLayout) -> LaunchConfig:
    """Return the launch of `chamfer_select`."""
    BM, BN, BD = (1, 64, d) if d <= _MAX_UNROLLED_COORDINATES else (1, 16, min(next_power_of_2(d), 128))
    if arch == INTERPRETER:
        BM, BN = 64, 16
    config = ChamferConfig(
        BM=BM, BN=BN, BD=BD, METRIC=metric, WIDE_OFFSETS=wide, KEY_CLASSES=side.kinds, CLASS_RUN=side.run
    )
    return _make_launch(config, 1, arch.registers)


@functools.lru_cache(maxsize=256)
def choose_part_count(tiles: int, steps: int, slots: int, min_parts: int, start: int) -> int:
    """Return the number of parts of a cloud for the programs of all row tiles.

    The result minimizes the steps of a GPU that runs `slots` programs at a time.

    Args:
        tiles: number of row tiles.
        steps: number of steps of the whole cloud.
        slots: number of programs that run at a time.
        min_parts: minimum number of parts.
        start: startup cost of a program, in steps.
    """
    choices = {min(max(waves * slots // max(tiles, 1), min_parts, 1), max(steps, 1)) for waves in range(1, 9)}
    return min(choices, key=lambda parts: (cdiv(tiles * parts, slots) * (cdiv(steps, parts) + start), parts))


def _make_point_args(X: Tensor, lengths: Tensor | None) -> PointArgs:
    """Return a cloud as a kernel argument."""
    return PointArgs._make((X, *X.stride(), X.shape[1], lengths))


class _ChamferCall(NamedTuple):
    """Two clouds as kernel arguments, and the keys of their points."""

    p: PointArgs
    r: PointArgs
    keys: list[Tensor]
    metric: str
    wide: int

    @property
    def arch(self) -> Architecture:
        """Return the architecture of the tensors' device."""
        return architecture(self.p.ptr.device)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the batch size, the numbers of points of both clouds, and the number of coordinates."""
        B, N, d = self.p.ptr.shape
        return B, N, self.r.count, d

    def run(self, kernel, programs: int, args: tuple, launch: LaunchConfig) -> None:
        """Launch a kernel with `args` and the configuration of `launch`."""
        launcher.launch(kernel, check_grid(programs), (*args, launch.config), launch.options(self.arch))

    def lower_by_distances(self) -> tuple[KeyLayout, KeyLayout]:
        """Lower the keys to the minimum over all distances, and return the key layouts of P and R."""
        B, N, M, d = self.sizes
        launch = configure_nearest(self.arch, d, self.metric, self.wide)
        BM, step = launch.config.BM, 2 * launch.config.BN
        tiles, steps = B * cdiv(N, BM), cdiv(M, step)
        parts = choose_part_count(
            tiles, steps, NEAREST_PROGRAMS * self.arch.processors, cdiv(steps, _MAX_PART_STEPS), 4
        )
        part = cdiv(steps, parts) * step
        args = self.p, self.r, *self.keys, part, d
        self.run(chamfer_nearest, tiles * cdiv(M, part), args, launch)
        return KeyLayout(part, launch.config.BN, 1), KeyLayout(BM, 1, 1)

    def lower_by_products(self) -> tuple[KeyLayout, KeyLayout]:
        """Lower the keys by inner products, and return the key layouts of P and R.

        The points are processed in parts whose terms fit the workspace.
        """
        B, N, M, d = self.sizes
        launch = configure_products(self.arch, self.p.ptr.dtype, d, self.wide)
        width = cdiv(d, launch.config.BD) * launch.config.BD
        room = _MAX_TERM_BYTES // (4 * width) // _TERM_ROW_MULTIPLE * _TERM_ROW_MULTIPLE
        room = max(room, _TERM_ROW_MULTIPLE)
        batches = max(1, room // (cdiv(max(N, M), _TERM_ROW_MULTIPLE) * _TERM_ROW_MULTIPLE))
        for b in range(0, B, batches):
            clouds = min(batches, B - b)
            for n in range(0, N, room):
                p = self._terms(self.p, launch, b, clouds, n, min(room, N - n), width)
                for m in range(0, M, room):
                    r = self._terms(self.r, launch, b, clouds, m, min(room, M - m), width)
                    self._launch_products(launch, p, r, clouds)
        return KeyLayout(launch.config.BN, _LANES, _RUN), KeyLayout(_GROUP, 1, 1)

    def _terms(
        self, X: PointArgs, launch: LaunchConfig, batch: int, clouds: int, first: int, count: int, width: int
    ) -> PointTermArgs:
        """Return the terms of `count` points from `first` on, for some clouds."""
        cloud_rows = cdiv(count, _TERM_ROW_MULTIPLE) * _TERM_ROW_MULTIPLE
        rows, is_split = clouds * cloud_rows, X.ptr.dtype == torch.float32
        dtype = torch.float16 if is_split else X.ptr.dtype
        terms = torch.empty(((1 + is_split) * rows, width), dtype=dtype, device=X.ptr.device)
        norms, scales = torch.empty((2, rows), dtype=torch.float32, device=X.ptr.device)
        term_args = PointTermArgs(terms, norms, scales, rows, width, cloud_rows, batch, first)
        term_launch = configure_terms(self.arch, launch)
        self.run(chamfer_terms, cdiv(rows, term_launch.config.BM), (X, term_args, rows, X.ptr.shape[2]), term_launch)
        return term_args

    def _launch_products(self, launch: LaunchConfig, p: PointTermArgs, r: PointTermArgs, clouds: int) -> None:
        """Launch `chamfer_products` for some points of both clouds."""
        C = launch.config
        tiles, steps = clouds * (p.cloud_rows // C.BM), r.cloud_rows // C.BN
        steps = cdiv(steps, choose_part_count(tiles, steps, PRODUCT_PROGRAMS * self.arch.processors, 1, 2))
        descriptors = [None, None]
        if self.arch.has_descriptors:
            descriptors = [
                TensorDescriptor(x.rows, list(x.rows.shape), [x.width, 1], [rows, C.BD])
                for x, rows in ((p, C.BM), (r, C.BN))
            ]
        args = self.p, self.r, p, r, *descriptors, *self.keys, steps
        self.run(chamfer_products, tiles * cdiv(r.cloud_rows, steps * C.BN), args, launch)

    def select_nearest(self, sides: tuple[KeyLayout, KeyLayout]) -> Nearest:
        """Return the distances and nearest points that the keys identify."""
        d, results = self.sizes[3], []
        for x, y, keys, side in zip((self.p, self.r), (self.r, self.p), self.keys, sides, strict=True):
            launch = configure_selection(self.arch, d, self.metric, self.wide, side)
            distances = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
            nearest = torch.empty(keys.shape, dtype=torch.int32, device=keys.device)
            if keys.numel():
                args = x, y, keys, distances, nearest, keys.numel(), side.size, d
                self.run(chamfer_select, cdiv(keys.numel(), launch.config.BM), args, launch)
            results += [distances, nearest]
        return tuple(results)  # type: ignore[return-value]


def forward_chamfer(P: Tensor, R: Tensor, p_lengths: Tensor | None, r_lengths: Tensor | None, metric: str) -> Nearest:
    """Return the results of `lik::chamfer_fwd`."""
    for name, X in (("P", P), ("R", R)):
        if X.shape[1] > _INT32_MAX - 1024:
            raise ValueError(f"chamfer_fwd: {name}: expected at most {_INT32_MAX - 1024} points, got {X.shape[1]}")
    (B, N, d), M = P.shape, R.shape[1]
    p, r = (_make_point_args(X, None if n is None else n.contiguous()) for X, n in ((P, p_lengths), (R, r_lengths)))
    keys = [torch.full((B, n), _EMPTY_KEY, dtype=torch.int64, device=P.device) for n in (N, M)]
    call = _ChamferCall(p, r, keys, metric, choose_row_offset_width(get_feature_reach(P, R)))
    with use_device(P.device):
        sides = KeyLayout(1, 1, 1), KeyLayout(1, 1, 1)
        if B * N * M:
            sides = (
                call.lower_by_products()
                if metric == "sqeuclidean" and d >= MIN_PRODUCT_FEATURES
                else call.lower_by_distances()
            )
        return call.select_nearest(sides)


def configure_slopes(arch: Architecture, d: int, metric: str) -> LaunchConfig:
    """Return the launch of `chamfer_slopes`."""
    BD = min(next_power_of_2(d), 64)
    return _make_launch(ChamferConfig(BM=1024 // BD, BN=1, BD=BD, METRIC=metric), 4, arch.registers)


def _compute_slopes(grad: Tensor, X: Tensor, Y: Tensor, nearest: Tensor, metric: str) -> Tensor:
    """Return the gradient of the points of X, given the gradient of their distances, in fp32."""
    B, N, d = X.shape
    slopes = torch.empty((B, N, d), dtype=torch.float32, device=X.device)
    arch = architecture(X.device)
    launch = configure_slopes(arch, d, metric)
    if B * N:
        x, y = _make_point_args(X, None), _make_point_args(Y, None)
        args = x, y, grad, *grad.stride(), nearest.contiguous(), slopes, B * N, d, launch.config
        grid = check_grid(cdiv(B * N, launch.config.BM))
        launcher.launch(chamfer_slopes, grid, args, launch.options(arch))
    return slopes


def backward_chamfer(tensors: Sequence, metric: str, needs: list[bool]) -> tuple[Tensor, Tensor]:
    """Return the results of `lik::chamfer_bwd` for its tensors."""
    with use_device(tensors[2].device):
        return sum_point_gradients(tensors, metric, needs, _compute_slopes, backward_lowmem)
