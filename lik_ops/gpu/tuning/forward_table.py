"""Table of forward tiles: `FORWARD_RULES` lists the tiles of `maxsim_forward` for each tensor core type."""

from __future__ import annotations

from typing import NamedTuple

import torch

UNLIMITED = 2**62
HALF_DTYPES, _FP32_DTYPES = (torch.float16, torch.bfloat16), (torch.float32,)
# With so many documents, most of the 132 SMs of an H200 have two programs or fewer.
_MAX_FEW_DOCUMENTS = 330


class TileConfig(NamedTuple):
    """Query rows, document tokens, and features of a step of `maxsim_forward`, with its launch parameters."""

    rows: int
    tokens: int
    features: int
    warps: int
    stages: int
    registers: int | None = None
    tokens_first: bool = False
    documents: int = UNLIMITED  # maximum number of documents that the tile serves
    walkers: int = 0  # persistent programs, see `LaunchConfig`


class TileRule(NamedTuple):
    """Upper limits of a call, and the tiles for it in ascending order of rows and documents.

    All tiles of a rule give the same bits. The first tile that holds all rows and documents is selected, or else the
    last tile. The rows of the last tile are the maximum that a query is summed over at once. The rule depends on
    neither Nq nor Nd.
    """

    unit: str
    dtypes: tuple[torch.dtype, ...]
    d: int
    Lq: int
    normalize: bool
    wide: int
    tiles: tuple[TileConfig, ...]
    above_d: int = 0  # exclusive lower limit of d
    above_Lq: int = 0  # exclusive lower limit of Lq

    def covers(self, dtype: torch.dtype, Lq: int, d: int, normalize: bool, wide: int) -> bool:
        """Return whether the rule applies to a call."""
        fits = self.above_d < d <= self.d and self.above_Lq < Lq <= self.Lq
        return fits and dtype in self.dtypes and normalize <= self.normalize and wide <= self.wide


# The first rule that covers a call applies. Reasons for the tiles:
# - The first operand of wgmma has at least 64 rows. Up to 32 query rows are therefore the second operand.
# - Few programs need deep pipelines to keep the memory busy. With many programs, eight programs with one stage each
#   share an SM.
# - With many query rows, a persistent program reads them once, not once for each document. There are as many persistent
#   programs as an H200 runs at a time.
# - Two programs with 256 rows and 128 registers share an SM. A query longer than a tile needs more registers.
# - Beyond 128 features the query rows are read again for every token tile, so the tiles are larger.
# - With mma the accumulators leave fewer registers. A kernel that needs many registers has smaller steps.
# - Splitting fp32 rows costs registers too. ptxas spills with 256 rows, or with 32 rows as the second operand.
# - Rules for wide = 2 serve all rows that are loaded feature by feature. Their differences avoid spills.
# - The last tile of half-precision dtypes without `normalize` has 256 rows, because the sm_90 kernel also cuts its sums
#   by 256 rows.
# fmt: off
FORWARD_RULES = (
    #    unit   dtypes d     Lq    normalize wide    rows tokens features warps stages registers
    TileRule("wgmma", HALF_DTYPES, 128, 256, False, 1, (
        TileConfig(32, 64, 128, 4, 4, tokens_first=True, documents=_MAX_FEW_DOCUMENTS),
        TileConfig(32, 64, 128, 4, 1, tokens_first=True),
        TileConfig(64, 64, 128, 4, 4, documents=_MAX_FEW_DOCUMENTS),
        TileConfig(64, 64, 128, 4, 2, walkers=528),
        TileConfig(128, 64, 128, 4, 4, walkers=264),
        TileConfig(256, 64, 128, 8, 3, 128, walkers=264),
    )),
    TileRule("wgmma", HALF_DTYPES, 128, 128, False, 2, (
        TileConfig(32, 64, 128, 4, 4, tokens_first=True, documents=_MAX_FEW_DOCUMENTS),
        TileConfig(32, 64, 128, 4, 1, tokens_first=True),
        TileConfig(64, 64, 128, 4, 4, documents=_MAX_FEW_DOCUMENTS),
        TileConfig(64, 64, 128, 4, 2, walkers=528),
        TileConfig(128, 64, 128, 4, 4, walkers=264),
        TileConfig(256, 64, 128, 8, 2, 255, walkers=132),
    )),
    TileRule("wgmma", HALF_DTYPES, 128, UNLIMITED, False, 1, (TileConfig(256, 64, 128, 8, 3),)),
    TileRule("wgmma", HALF_DTYPES, 128, UNLIMITED, False, 2, (TileConfig(256, 64, 32, 8, 2, 255),)),
    TileRule("wgmma", HALF_DTYPES, 128, 256, True, 1, (
        TileConfig(32, 64, 128, 4, 3, tokens_first=True, documents=_MAX_FEW_DOCUMENTS),
        TileConfig(32, 64, 128, 4, 2, tokens_first=True),
        TileConfig(64, 64, 128, 4, 3),
        TileConfig(128, 64, 128, 8, 3, walkers=264),
        TileConfig(256, 64, 128, 8, 3),
    )),
    TileRule("wgmma", HALF_DTYPES, 128, UNLIMITED, True, 1, (TileConfig(256, 64, 128, 8, 3),)),
    TileRule("wgmma", HALF_DTYPES, UNLIMITED, UNLIMITED, False, 1, (
        TileConfig(32, 64, 128, 4, 4, tokens_first=True),
        TileConfig(64, 64, 128, 4, 4, documents=_MAX_FEW_DOCUMENTS),
        TileConfig(64, 128, 128, 4, 2),
        TileConfig(128, 128, 128, 8, 3),
    )),
    TileRule("wgmma", HALF_DTYPES, UNLIMITED, UNLIMITED, True, 1, (
        TileConfig(32, 64, 128, 4, 3, tokens_first=True),
        TileConfig(64, 64, 128, 4, 2),
        TileConfig(128, 64, 128, 8, 2),
    )),
    TileRule("wgmma", HALF_DTYPES, UNLIMITED, UNLIMITED, True, 2, (TileConfig(64, 64, 64, 8, 1),)),
    TileRule("wgmma", _FP32_DTYPES, 128, UNLIMITED, False, 1, (
        TileConfig(64, 64, 128, 4, 1), TileConfig(128, 64, 128, 8, 2),
    )),
    TileRule("wgmma", _FP32_DTYPES, UNLIMITED, UNLIMITED, True, 1, (TileConfig(64, 64, 32, 4, 2),)),
    TileRule("wgmma", _FP32_DTYPES, UNLIMITED, UNLIMITED, True, 2, (TileConfig(64, 64, 16, 4, 2),)),
    TileRule("mma", HALF_DTYPES, 128, UNLIMITED, False, 0, (
        TileConfig(64, 64, 128, 4, 3), TileConfig(128, 64, 128, 8, 3),
    )),
    TileRule("mma", HALF_DTYPES, UNLIMITED, UNLIMITED, True, 1, (
        TileConfig(64, 64, 64, 8, 2), TileConfig(128, 64, 64, 8, 2),
    )),
    TileRule("mma", HALF_DTYPES, UNLIMITED, UNLIMITED, True, 2, (TileConfig(64, 64, 32, 8, 2),)),
    TileRule("mma", _FP32_DTYPES, UNLIMITED, UNLIMITED, True, 0, (TileConfig(64, 32, 32, 4, 2),)),
    TileRule("mma", _FP32_DTYPES, UNLIMITED, UNLIMITED, True, 2, (TileConfig(64, 32, 16, 4, 2),)),
    TileRule("mfma", HALF_DTYPES, UNLIMITED, UNLIMITED, True, 1, (TileConfig(64, 64, 128, 4, 1),)),
    TileRule("mfma", HALF_DTYPES, UNLIMITED, UNLIMITED, True, 2, (TileConfig(64, 64, 64, 4, 1),)),
    TileRule("mfma", _FP32_DTYPES, UNLIMITED, UNLIMITED, True, 2, (TileConfig(64, 64, 32, 4, 1),)),
    TileRule("interpreter", HALF_DTYPES, UNLIMITED, UNLIMITED, True, 2, (
        TileConfig(16, 16, 128, 4, 1, tokens_first=True),
        TileConfig(32, 16, 128, 4, 1, walkers=1),
    )),
    TileRule("interpreter", _FP32_DTYPES, 128, UNLIMITED, False, 2, (
        TileConfig(16, 16, 128, 4, 1, tokens_first=True),
        TileConfig(32, 16, 128, 4, 1),
    )),
    TileRule("interpreter", _FP32_DTYPES, UNLIMITED, UNLIMITED, True, 2, (
        TileConfig(16, 16, 32, 4, 1, tokens_first=True),
        TileConfig(32, 16, 32, 4, 1, walkers=1),
    )),
)
# fmt: on
