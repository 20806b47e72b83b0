"""What the choice of a configuration is made of: architectures, launches, and what all tables ask.

The choices are in `forward_configs`, `gluon_configs` and `backward_configs`: static, so that no call ever benchmarks
anything. Every configuration is correct for every shape; they find one that is fast and fits the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ...csrc_triton.common.arguments import KernelConfig
from .forward_table import TileRule


@dataclass(frozen=True)
class Architecture:
    """What the choice depends on: the shared memory that one program may take, and the kind of matrix unit."""

    name: str  # "sm_90", "gfx942"
    shared_memory_bytes: int  # bytes
    threads_per_warp: int = 32
    registers: int | None = None  # of a thread, where ptxas must be told its limit or spills to run more warps
    measured: tuple[TileRule, ...] = field(
        default=(), compare=False
    )  # of a table made by `lik_ops.tune`: they come first
    processors: int = field(default=1, compare=False)  # multiprocessors of a device
    gpu: str = field(default="", compare=False)  # its name

    @property
    def unit(self) -> str:
        """The matrix unit, by which tiles are chosen."""
        if self.is_amd:
            return "mfma"
        return {"sm_90": "wgmma", "interpreter": "interpreter"}.get(self.name, "mma")

    @property
    def has_descriptors(self) -> bool:
        """Whether documents are read by Hopper's tensor memory access unit. Later ones have it too: not measured."""
        return self.name in ("sm_90", "interpreter")

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("sm_80", 163 * 1024, registers=255),
        Architecture("sm_86", 99 * 1024, registers=255),
        Architecture("sm_89", 99 * 1024, registers=255),
        Architecture("sm_90", 227 * 1024),
        Architecture("sm_100", 227 * 1024, registers=255),
        Architecture("sm_120", 99 * 1024, registers=255),
        Architecture("gfx942", 64 * 1024, threads_per_warp=64),
    )
}

# Runs every program in numpy, custom reductions element by element: small tiles, on the code path of sm_90.
INTERPRETER = Architecture("interpreter", 2**31)


class KernelKey(NamedTuple):
    """What every choice hangs on, beside sizes that differ from kernel to kernel."""

    arch: Architecture
    dtype: torch.dtype
    d: int
    candidates: bool
    normalize: bool
    wide: int

    @property
    def half(self) -> bool:
        return self.dtype != torch.float32

    @property
    def has_vector_loads(self) -> bool:
        return supports_vector_loads(self.d, self.wide)

    def config(self, BM: int, BN: int, BD: int, **more: Any) -> KernelConfig:
        """A kernel's configuration. Its products are of sums, in fp32, unless `more` says otherwise."""
        usual = {"ROWS_PER_QUERY": 1, "LANES": 1, "PRECISION": choose_precision(torch.float32, self.arch, False)}
        own = {"CANDIDATES": self.candidates, "NORMALIZE": self.normalize, "WIDE_OFFSETS": self.wide}
        return KernelConfig(BM=BM, BN=BN, BD=BD, SINGLE_STEP=self.d <= BD, **{**usual, **own, **more})


@dataclass(frozen=True)
class LaunchConfig:
    """A kernel's compile-time configuration with its warps and pipeline stages."""

    config: KernelConfig
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # None: ptxas decides, which on some targets spills a few to run more warps
    walkers: int = 0  # programs that the device runs at a time, where each walks from document to document

    def options(self, arch: Architecture) -> dict[str, int]:
        """Triton's launch options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers and not arch.is_amd:
            options["maxnreg"] = self.max_registers
        return options

    def tile(self) -> str:
        """What a program scores at a time, for people."""
        c = self.config
        return f"{c.BM} rows x {c.BN} tokens x {c.BD} features, {self.num_warps} warps, {self.num_stages} stages"

    def make_non_persistent(self) -> LaunchConfig:
        """The same with a program for each document: for what a walk cannot do."""
        return replace(self, config=self.config._replace(PERSISTENT=False), walkers=0)

    def programs(self, Nq: int, K: int) -> int:
        """How many programs score K documents, of each query for candidates."""
        row_tiles = Nq if self.config.CANDIDATES else cdiv(Nq * self.config.ROWS_PER_QUERY, self.config.BM)
        if not self.config.PERSISTENT:
            return row_tiles * K
        # As many as run at a time; if many row tiles would not share those evenly, several times as many.
        waves = 1 if 16 * row_tiles <= self.walkers else 4
        return row_tiles * min(K, max(1, waves * self.walkers // max(row_tiles, 1)))


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def choose_precision(dtype: torch.dtype, arch: Architecture, allow_tf32: bool) -> str:
    """How tl.dot multiplies fp32 operands: as fp32 unless the user allowed TF32 in torch; half types ignore it."""
    if arch.is_amd:
        return "ieee"
    return "tf32" if allow_tf32 and dtype == torch.float32 else "tf32x3"


def supports_vector_loads(d: int, wide: int) -> bool:
    """Whether a kernel knows that rows begin at multiples of 16 features: it loads several of them at a time.

    Else each feature takes an address of its own, in registers: steps must be smaller.
    """
    return d % 16 == 0 and wide < 2
