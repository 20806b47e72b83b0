"""Which tile sizes each kernel takes: a static table, so that no call ever benchmarks anything.

Every configuration is correct for every shape; the table chooses one that is fast and fits the device. The choice
depends on Lq, d, dtype and architecture, so a score has the same bits whatever batch it is computed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..csrc_triton.arguments import Config


@dataclass(frozen=True)
class Architecture:
    """What the choice depends on: the shared memory that one program may take, and the kind of matrix unit."""

    name: str  # "sm_90", "gfx942"
    shared_memory: int  # bytes
    wavefront: int = 32

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
        Architecture("sm_80", 163 * 1024),
        Architecture("sm_86", 99 * 1024),
        Architecture("sm_89", 99 * 1024),
        Architecture("sm_90", 227 * 1024),
        Architecture("sm_100", 227 * 1024),
        Architecture("sm_120", 99 * 1024),
        Architecture("gfx942", 64 * 1024, wavefront=64),
    )
}

# Runs every program in numpy, custom reductions element by element: small tiles, on the code path of sm_90.
INTERPRETER = Architecture("interpreter", 2**31)


@dataclass(frozen=True)
class Launch:
    """A kernel's compile-time configuration with its warps and pipeline stages."""

    config: Config
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # None: ptxas decides, which on some targets spills a few to run more warps

    def options(self, arch: Architecture) -> dict[str, int]:
        """Triton's launch options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers and not arch.is_amd:
            options["maxnreg"] = self.max_registers
        return options


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def precision(dtype: torch.dtype, arch: Architecture, allow_tf32: bool) -> str:
    """How tl.dot multiplies fp32 operands: as fp32 unless the user allowed TF32 in torch; half types ignore it."""
    if arch.is_amd:
        return "ieee"
    return "tf32" if allow_tf32 and dtype == torch.float32 else "tf32x3"


def forward(
    arch: Architecture,
    dtype: torch.dtype,
    Nq: int,
    Lq: int,
    d: int,
    *,
    candidates: bool,
    normalize: bool,
    wide: int,
    tf32: bool,
) -> Launch:
    """Row tiles hold whole queries, each in a slot of the next power of two; at least 64 rows, as wgmma needs.

    Nq only picks a smaller tile where few rows would leave a large one empty. That changes no bits: the slot, in which
    a query is summed, does not depend on it, and every tile is made of the same matrix instructions.
    """
    half = dtype != torch.float32
    wgmma = arch.name in ("sm_90", INTERPRETER.name)
    # Elsewhere than on wgmma the accumulators leave fewer registers: smaller steps where a kernel needs many.
    crowded = not (wgmma or arch.is_amd) and (d > 128 or normalize or wide > 0)
    least, most, BN = 64, 128, 64
    if half:
        BD = 64 if crowded else 128
    else:
        BD = 16 if crowded and wide else 32
        most, BN = 64, 64 if wgmma or arch.is_amd else 32
    BD = min(max(next_power_of_2(d), 16), BD)
    if arch == INTERPRETER:
        least, most, BN = 16, 32, 16
    elif arch.is_amd:
        most = 64
    elif wgmma and half and d <= BD:
        most = 256
    elif wgmma and half and normalize:
        most = 64
    elif wgmma and half:
        BN = 128  # the query rows are read again for every tile of tokens: fewer, larger tiles
    slot = min(next_power_of_2(max(Lq, 1)), most)
    rows = slot if candidates else min(Nq * slot, most)
    BM = max(least, next_power_of_2(rows))
    config = Config(
        BM=BM,
        BN=BN,
        BD=BD,
        SLOT=slot,
        LANES=4 if wgmma else 1,
        CANDIDATES=candidates,
        ONE_CHUNK=d <= BD,
        NORMALIZE=normalize,
        WIDE=wide,
        PRECISION=precision(dtype, arch, tf32),
    )
    plain = wgmma and BM == 256 and not normalize and Lq <= BM  # a longer query needs more than 128
    # Few rows wait for memory: more programs at a time serve better than a deeper pipeline.
    deep = half and not crowded and not (wgmma and BM == 64)
    num_stages = 1 if arch.is_amd else 3 if deep else 2
    return Launch(
        config,
        num_warps=8 if BM > 64 or (half and crowded) else 4,
        num_stages=num_stages,
        # 128 let two programs of 256 threads share a multiprocessor.
        max_registers=255 if arch.name == "sm_100" else 128 if plain else None,
    )


def gather(dtype: torch.dtype, d: int, *, candidates: bool, normalize: bool, wide: int) -> Launch:
    """Kernels that read whole rows: BM tokens of a query, and the winners of BN documents at a time."""
    BD = max(next_power_of_2(d), 16) if d <= 256 else 128
    # Every thread holds its share of the rows of a step: as many as registers allow, for the loads in flight.
    rows = 128 if dtype != torch.float32 else 32 if normalize else 64
    config = Config(
        BM=8,
        BN=max(rows * min(128, BD) // BD // 8, 1),
        BD=BD,
        SLOT=1,
        LANES=1,
        CANDIDATES=candidates,
        ONE_CHUNK=d <= BD,
        NORMALIZE=normalize,
        WIDE=wide,
        PRECISION="ieee",
    )
    return Launch(config, num_warps=4, num_stages=2, max_registers=128)


def scatter(dtype: torch.dtype, d: int, *, candidates: bool, normalize: bool, wide: int) -> Launch:
    """`maxsim_scatter`, whose products are as large as a step's rows: fewer documents at a time."""
    launch = gather(dtype, d, candidates=candidates, normalize=normalize, wide=wide)
    config = launch.config
    return Launch(config._replace(BN=max(config.BN // 4, 1)), num_warps=4, num_stages=2, max_registers=128)


FEW_ROWS = 128  # query rows of a document that one program holds
LIST_ROWS = 2**20  # query rows of a document beyond which the winners are not listed


def grad_documents(
    arch: Architecture,
    dtype: torch.dtype,
    d: int,
    *,
    candidates: bool,
    normalize: bool,
    wide: int,
    flat: bool,
    pieces: bool,
) -> Launch:
    """The one-hot product of BN tokens and the rows they won, BM rows a step; `pieces`: of a list that is cut."""
    half = dtype != torch.float32
    BD = min(max(next_power_of_2(d), 16), 128)
    wgmma = arch.name in ("sm_90", INTERPRETER.name)
    BM, BN = (64 if wgmma else 32, 16) if half else (16, 64)
    if arch == INTERPRETER:
        BM, BN = 16, 16
    config = Config(
        BM=BM,
        BN=BN,
        BD=BD,
        SLOT=1,
        LANES=4 if wgmma else 1,
        CANDIDATES=candidates,
        ONE_CHUNK=d <= BD,
        NORMALIZE=normalize,
        WIDE=wide,
        PRECISION=precision(torch.float32, arch, False),
        FLAT=flat,
    )
    if half:
        # 168 let three programs share a multiprocessor.
        plain = wgmma and dtype == torch.bfloat16 and flat and d <= BD and not (normalize or pieces)
        stages = 1 if arch.is_amd else 3
        return Launch(config, num_warps=4, num_stages=stages, max_registers=168 if plain else 255)
    return Launch(config, num_warps=8, num_stages=1, max_registers=255)


def few_rows(
    arch: Architecture, dtype: torch.dtype, rows: int, d: int, *, candidates: bool, normalize: bool, wide: int
) -> Launch:
    """The one-hot product of BN tokens and all the rows that their document meets."""
    half = dtype != torch.float32
    BD = min(max(next_power_of_2(d), 16), 128)
    config = Config(
        BM=max(next_power_of_2(rows), 16),
        BN=64 if arch.name == "sm_90" else 32 if half and rows <= 64 and arch != INTERPRETER else 16,
        BD=BD,
        SLOT=1,
        LANES=1,
        CANDIDATES=candidates,
        ONE_CHUNK=d <= BD,
        NORMALIZE=normalize,
        WIDE=wide,
        PRECISION=precision(torch.float32, arch, False),
    )
    return Launch(config, num_warps=8 if rows > 64 or not half else 4, num_stages=1)


def lists(arch: Architecture, documents: Launch, rows: int) -> Launch:
    """The lists of winners that feed `documents`, in blocks of BM query rows."""
    most = 64 if arch == INTERPRETER else 1024
    BM = min(max(next_power_of_2(rows), 16), most)
    config = documents.config._replace(BM=BM, SLOT=min(BM, 16 if arch == INTERPRETER else 128))
    return Launch(config, num_warps=8 if BM >= 2048 and not arch.is_amd else 4, num_stages=1)
