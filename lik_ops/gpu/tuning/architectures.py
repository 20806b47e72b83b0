"""Common parts of all configuration tables: architectures, launch configurations, and kernel keys.

The tables are in `forward_configs`, `sm90_configs`, and `backward_configs`. They are static, so no
call benchmarks anything. Every configuration is correct for every shape. The tables select one that is fast and fits
the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch

from ...csrc_triton.common.arguments import KernelConfig

# SMs of the H100 and H200 on which the tables were measured. Counts of programs in tables and launches are multiples of
# it on every GPU. Some of them split sums, so a gradient has the same bits on all GPUs of an architecture.
MEASURED_SMS = 132

# Values of `Architecture.unit` with the code path of sm_90.
SM90_UNITS = ("wgmma", "interpreter")


@dataclass(frozen=True)
class Architecture:
    """Properties of a GPU that the choice depends on, mainly shared memory and the type of tensor core."""

    name: str  # "sm_90", "gfx942"
    shared_memory_bytes: int  # maximum for one program
    threads_per_warp: int = 32
    # Register limit of a thread. Without the limit, ptxas spills on some targets to run more warps.
    registers: int | None = None
    processors: int = field(default=1, compare=False)  # SMs of the device
    gpu: str = field(default="", compare=False)  # name of the device

    @property
    def unit(self) -> str:
        """Return the tensor core type, which selects the tiles."""
        if self.is_amd:
            return "mfma"
        return {"sm_90": "wgmma", "interpreter": "interpreter"}.get(self.name, "mma")

    @property
    def has_sm90_path(self) -> bool:
        """Return whether kernels have the code path of sm_90, as they also have in the interpreter."""
        return self.unit in SM90_UNITS

    @property
    def has_descriptors(self) -> bool:
        """Return whether documents are read by Hopper's TMA.

        Later architectures have TMA too, but were not measured.
        """
        return self.has_sm90_path

    @property
    def lanes(self) -> int:
        """Return `KernelConfig.LANES`: the threads that share a row of an accumulator."""
        return 4 if self.has_sm90_path else 1

    @property
    def is_amd(self) -> bool:
        """Return whether this is an AMD GPU."""
        return self.name.startswith("gfx")


# Targets that are compiled ahead of time, with the SMs of their largest usual GPU. A device states its own number.
ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("sm_80", 163 * 1024, registers=255, processors=108),
        Architecture("sm_86", 99 * 1024, registers=255, processors=84),
        Architecture("sm_89", 99 * 1024, registers=255, processors=142),
        Architecture("sm_90", 227 * 1024, processors=132),
        Architecture("sm_100", 227 * 1024, registers=255, processors=148),
        Architecture("sm_120", 99 * 1024, registers=255, processors=188),
        Architecture("gfx942", 64 * 1024, threads_per_warp=64, processors=304),
    )
}

# The interpreter runs programs in NumPy, and custom reductions element by element. It therefore has small tiles, on the
# code path of sm_90.
INTERPRETER = Architecture("interpreter", 2**31)


class KernelKey(NamedTuple):
    """The properties of a call that every choice depends on, besides sizes that differ between kernels."""

    arch: Architecture
    dtype: torch.dtype
    d: int
    candidates: bool
    normalize: bool
    wide: int

    @property
    def half(self) -> bool:
        """Return whether the dtype is a half-precision dtype."""
        return self.dtype != torch.float32

    @property
    def has_vector_loads(self) -> bool:
        """Return `supports_vector_loads` for this call."""
        return supports_vector_loads(self.d, self.wide)

    def config(self, BM: int, BN: int, BD: int, **more: Any) -> KernelConfig:
        """Return a kernel configuration with products of fp32 sums unless `more` overrides `PRECISION`."""
        options: dict[str, Any] = {"PRECISION": choose_precision(torch.float32, self.arch, False)} | more
        options |= {"CANDIDATES": self.candidates, "NORMALIZE": self.normalize, "WIDE_OFFSETS": self.wide}
        return KernelConfig(BM=BM, BN=BN, BD=BD, SINGLE_STEP=self.d <= BD, **options)


@dataclass(frozen=True)
class LaunchConfig:
    """A kernel's constexpr configuration with its number of warps and pipeline stages."""

    config: KernelConfig
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # None: ptxas decides, and on some targets spills a few to run more warps
    walkers: int = 0  # programs that the device runs at a time, if programs are persistent

    def options(self, arch: Architecture) -> dict[str, int]:
        """Return Triton's launch options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers and not arch.is_amd:
            options["maxnreg"] = self.max_registers
        return options

    def tile(self) -> str:
        """Describe the tile of a program as text."""
        c = self.config
        return f"{c.BM} rows x {c.BN} tokens x {c.BD} features, {self.num_warps} warps, {self.num_stages} stages"

    def change(self, **values: Any) -> Self:
        """Return this configuration with other values of its own fields and of the fields of `config`."""
        own_fields = {
            name: values.pop(name) for name in ("num_warps", "num_stages", "max_registers", "walkers") if name in values
        }
        return replace(self, config=self.config._replace(**values), **own_fields)

    def make_non_persistent(self) -> Self:
        """Return this configuration with one program for each document, for calls that cannot be persistent."""
        return self.change(PERSISTENT=False, walkers=0)

    def programs(self, Nq: int, K: int) -> int:
        """Return the number of programs that score K documents, or K candidates of each query."""
        row_tiles = Nq if self.config.CANDIDATES else cdiv(Nq * self.config.ROWS_PER_QUERY, self.config.BM)
        if not self.config.PERSISTENT:
            return row_tiles * K
        # The number that runs at a time, or a multiple if the row tiles would share the programs unevenly.
        waves = 1 if 16 * row_tiles <= self.walkers else 4
        return row_tiles * min(K, max(1, waves * self.walkers // max(row_tiles, 1)))


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """Return `a / b` rounded up."""
    return -(-a // b)


def choose_precision(dtype: torch.dtype, arch: Architecture, allow_tf32: bool) -> str:
    """Return the precision of tl.dot with fp32 operands: fp32 unless the user allowed TF32 in PyTorch.

    Half-precision operands ignore the precision.
    """
    if arch.is_amd:
        return "ieee"
    return "tf32" if allow_tf32 and dtype == torch.float32 else "tf32x3"


def supports_vector_loads(d: int, wide: int) -> bool:
    """Return whether a kernel knows that rows start at multiples of 16 features, so that it can use vector loads.

    Without vector loads each feature needs an address of its own in registers, so steps must be smaller.
    """
    return d % 16 == 0 and wide < 2
