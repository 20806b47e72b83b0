"""Which tiles the kernels of `head` take: see `configs`. Those of both follow from d, so that tokens have one set of
bits."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from ..csrc_triton.arguments import HeadConfig
from .configs import Architecture, loads_vectors, next_power_of_2, precision

MOST_FEATURES = 256  # of a token, which a program holds in fp32
MOST_ROWS = 128  # of queries, beside a tile of tokens
FEWEST_TOKENS = 64  # of a document: each that a tile meets takes a reduction of its own


@dataclass(frozen=True)
class HeadLaunch:
    """A configuration with its warps and pipeline stages."""

    config: HeadConfig
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def options(self, arch: Architecture) -> dict[str, int]:
        """Triton's launch options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers and not arch.is_amd:
            options["maxnreg"] = self.max_registers
        return options

    def tile(self) -> str:
        """What a program makes at a time, for people."""
        c = self.config
        return f"{c.BN} tokens x {c.BD} features, {c.BK} of a step, {self.num_warps} warps, {self.num_stages} stages"


@functools.lru_cache(maxsize=1024)
def tokens(arch: Architecture, dtype: torch.dtype, d: int, width: int, normalize: bool, wide: int, tf32: bool):
    """The tile of tokens. Each reads all weights, from the L2 cache: large ones, as registers hold them."""
    half, vectors = dtype != torch.float32, loads_vectors(width, wide)
    BD = max(next_power_of_2(d), 16)
    BN, BK, warps, stages = 128, 64, 8, 3
    if arch.unit == "interpreter":
        BN, BK = 32, 32
    elif not half:
        BN, BK, stages = 64, 32, 2
        if BD > 128:
            BK = 16
    elif arch.unit == "wgmma":
        BN, stages = (256 if BD <= 128 else 128), 4
    elif arch.unit == "mfma":
        BN, BK, stages = 64, 32, 1
    else:
        BN, BK = (128 if BD <= 128 else 64), 32
    if not vectors and arch.unit != "interpreter":
        BN, BK, stages = 64, 32 if half else 16, 2
    products = precision(dtype, arch, tf32)
    config = HeadConfig(BN, BD, BK, 16, 1, normalize, wide, products, ONE_LOOP=arch.unit in ("wgmma", "interpreter"))
    return HeadLaunch(config, warps, stages, arch.registers)


@functools.lru_cache(maxsize=1024)
def scores(
    arch: Architecture, dtype: torch.dtype, Nq: int, Lq: int, d: int, width: int, normalize: bool, wide: int
) -> HeadLaunch:
    """The tile in which few query rows are scored: that of tokens, with room for the rows."""
    found = tokens(arch, dtype, d, width, normalize, wide, False)
    slot = next_power_of_2(max(Lq, 1))
    rows = max(next_power_of_2(Nq * slot), 16)
    stages = found.num_stages - 1 if rows > 64 and found.num_stages > 2 else found.num_stages
    return replace(found, config=found.config._replace(BM=rows, SLOT=slot), num_stages=stages)


def is_fused(dtype: torch.dtype, Nq: int, Nd: int, Lq: int, Ld: int, d: int, winners: bool) -> bool:
    """Whether tokens are scored where they are made: where all query rows stand beside a tile of them, of half types.

    Its scores have the bits of the other way, so the sizes of a batch may decide.
    """
    slot = next_power_of_2(max(Lq, 1))
    few = Nq * slot <= MOST_ROWS and d <= MOST_FEATURES
    rows_fit = 0 < Nd * Ld < 2**31 - 2 * MOST_FEATURES
    return dtype != torch.float32 and few and rows_fit and Ld >= FEWEST_TOKENS and not winners
