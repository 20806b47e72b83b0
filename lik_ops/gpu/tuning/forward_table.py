"""The table of forward tiles: `FORWARD_RULES`, whose rules say which ones `maxsim_forward` takes on which matrix
unit."""

from __future__ import annotations

from typing import NamedTuple

import torch

UNLIMITED = 2**62
HALF_DTYPES, _FP32_DTYPES = (torch.float16, torch.bfloat16), (torch.float32,)
_MAX_FEW_DOCUMENTS = 330  # documents that leave most of the 132 multiprocessors of an H200 with two programs or less


class TileConfig(NamedTuple):
    """Query rows, document tokens and features of a step of `maxsim_forward`, with how it is run."""

    rows: int
    tokens: int
    features: int
    warps: int
    stages: int
    registers: int | None = None
    tokens_first: bool = False
    documents: int = UNLIMITED  # serves at most so many
    walkers: int = 0  # see Launch


class TileRule(NamedTuple):
    """What a kernel is asked for at most, and its tiles by ascending rows and documents.

    Of the tiles, which give the same bits, the first that holds all rows and documents is taken, or the last. The last
    one's rows are the most that a query is summed over at once. The rule depends on neither Nq nor Nd.
    """

    unit: str
    dtypes: tuple[torch.dtype, ...]
    d: int
    Lq: int
    normalize: bool
    wide: int
    tiles: tuple[TileConfig, ...]
    above_d: int = 0  # what a rule is asked for at least, exclusive
    above_Lq: int = 0

    def covers(self, dtype: torch.dtype, Lq: int, d: int, normalize: bool, wide: int) -> bool:
        fits = self.above_d < d <= self.d and self.above_Lq < Lq <= self.Lq
        return fits and dtype in self.dtypes and normalize <= self.normalize and wide <= self.wide


# The first rule that covers a call holds.
# wgmma takes 64 or more of what stands first: up to 32 rows stand second. Few programs need deep pipelines to keep the
# memory busy; of many, eight with one stage each share a multiprocessor. Where rows are many, a program that walks
# reads them once, not once for each document; as many walk as an H200 runs at a time. 256 rows with 128 registers share
# a multiprocessor by two; a query longer than a tile needs more. Beyond 128 features the rows are read again for every
# tile of tokens: larger ones. On mma the accumulators leave fewer registers: smaller steps where a kernel needs many.
# Splitting fp32 rows takes registers too: with 256 rows, or with 32 as second, ptxas spills.
# Rules for wide = 2 serve all rows that are loaded feature by feature: what they change cures spills. The last tile of
# half types without `normalize` keeps its 256 rows, by which the specialised kernel cuts its sums too.
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
