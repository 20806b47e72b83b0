"""Table of forward tiles: `FORWARD_RULES` lists the tiles of `maxsim_forward` for each tensor core type."""

from __future__ import annotations

from typing import NamedTuple

from .architectures import MEASURED_SMS
from .tables import FP32_DTYPES, HALF_DTYPES, UNLIMITED, TableRow

# With so many documents, most SMs of an H200 have two programs or fewer.
_FEW_DOCUMENTS = 5 * MEASURED_SMS // 2


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


TileRule = TableRow[tuple[TileConfig, ...]]
# The value of a rule lists tiles in ascending order of rows and documents. All tiles of a rule give the same bits. The
# first tile that holds all rows and documents is selected, or else the last tile. The rows of the last tile are the
# maximum that a query is summed over at once. The rule depends on neither Nq nor Nd. Reasons for the tiles:
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
FORWARD_RULES: tuple[TileRule, ...] = (
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, Lq=256, normalize=False, wide=1, value=(
        TileConfig(rows=32, tokens=64, features=128, warps=4, stages=4, tokens_first=True, documents=_FEW_DOCUMENTS),
        TileConfig(rows=32, tokens=64, features=128, warps=4, stages=1, tokens_first=True),
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=4, documents=_FEW_DOCUMENTS),
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=2, walkers=4 * MEASURED_SMS),
        TileConfig(rows=128, tokens=64, features=128, warps=4, stages=4, walkers=2 * MEASURED_SMS),
        TileConfig(rows=256, tokens=64, features=128, warps=8, stages=3, registers=128, walkers=2 * MEASURED_SMS),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, Lq=128, normalize=False, value=(
        TileConfig(rows=32, tokens=64, features=128, warps=4, stages=4, tokens_first=True, documents=_FEW_DOCUMENTS),
        TileConfig(rows=32, tokens=64, features=128, warps=4, stages=1, tokens_first=True),
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=4, documents=_FEW_DOCUMENTS),
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=2, walkers=4 * MEASURED_SMS),
        TileConfig(rows=128, tokens=64, features=128, warps=4, stages=4, walkers=2 * MEASURED_SMS),
        TileConfig(rows=256, tokens=64, features=128, warps=8, stages=2, registers=255, walkers=MEASURED_SMS),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, normalize=False, wide=1, value=(
        TileConfig(rows=256, tokens=64, features=128, warps=8, stages=3),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, normalize=False, value=(
        TileConfig(rows=256, tokens=64, features=32, warps=8, stages=2, registers=255),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, Lq=256, wide=1, value=(
        TileConfig(rows=32, tokens=64, features=128, warps=4, stages=3, tokens_first=True, documents=_FEW_DOCUMENTS),
        TileConfig(rows=32, tokens=64, features=128, warps=4, stages=2, tokens_first=True),
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=3),
        TileConfig(rows=128, tokens=64, features=128, warps=8, stages=3, walkers=2 * MEASURED_SMS),
        TileConfig(rows=256, tokens=64, features=128, warps=8, stages=3),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, d=128, wide=1, value=(
        TileConfig(rows=256, tokens=64, features=128, warps=8, stages=3),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, normalize=False, wide=1, value=(
        TileConfig(rows=32, tokens=64, features=128, warps=4, stages=4, tokens_first=True),
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=4, documents=_FEW_DOCUMENTS),
        TileConfig(rows=64, tokens=128, features=128, warps=4, stages=2),
        TileConfig(rows=128, tokens=128, features=128, warps=8, stages=3),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, wide=1, value=(
        TileConfig(rows=32, tokens=64, features=128, warps=4, stages=3, tokens_first=True),
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=2),
        TileConfig(rows=128, tokens=64, features=128, warps=8, stages=2),
    )),
    TableRow(units=("wgmma",), dtypes=HALF_DTYPES, value=(
        TileConfig(rows=64, tokens=64, features=64, warps=8, stages=1),
    )),
    TableRow(units=("wgmma",), dtypes=FP32_DTYPES, d=128, normalize=False, wide=1, value=(
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=1),
        TileConfig(rows=128, tokens=64, features=128, warps=8, stages=2),
    )),
    TableRow(units=("wgmma",), dtypes=FP32_DTYPES, wide=1, value=(
        TileConfig(rows=64, tokens=64, features=32, warps=4, stages=2),
    )),
    TableRow(units=("wgmma",), dtypes=FP32_DTYPES, value=(
        TileConfig(rows=64, tokens=64, features=16, warps=4, stages=2),
    )),
    TableRow(units=("mma",), dtypes=HALF_DTYPES, d=128, normalize=False, wide=0, value=(
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=3),
        TileConfig(rows=128, tokens=64, features=128, warps=8, stages=3),
    )),
    TableRow(units=("mma",), dtypes=HALF_DTYPES, wide=1, value=(
        TileConfig(rows=64, tokens=64, features=64, warps=8, stages=2),
        TileConfig(rows=128, tokens=64, features=64, warps=8, stages=2),
    )),
    TableRow(units=("mma",), dtypes=HALF_DTYPES, value=(
        TileConfig(rows=64, tokens=64, features=32, warps=8, stages=2),
    )),
    TableRow(units=("mma",), dtypes=FP32_DTYPES, wide=0, value=(
        TileConfig(rows=64, tokens=32, features=32, warps=4, stages=2),
    )),
    TableRow(units=("mma",), dtypes=FP32_DTYPES, value=(
        TileConfig(rows=64, tokens=32, features=16, warps=4, stages=2),
    )),
    TableRow(units=("mfma",), dtypes=HALF_DTYPES, wide=1, value=(
        TileConfig(rows=64, tokens=64, features=128, warps=4, stages=1),
    )),
    TableRow(units=("mfma",), dtypes=HALF_DTYPES, value=(
        TileConfig(rows=64, tokens=64, features=64, warps=4, stages=1),
    )),
    TableRow(units=("mfma",), dtypes=FP32_DTYPES, value=(
        TileConfig(rows=64, tokens=64, features=32, warps=4, stages=1),
    )),
    TableRow(units=("interpreter",), dtypes=HALF_DTYPES, value=(
        TileConfig(rows=16, tokens=16, features=128, warps=4, stages=1, tokens_first=True),
        TileConfig(rows=32, tokens=16, features=128, warps=4, stages=1, walkers=1),
    )),
    TableRow(units=("interpreter",), dtypes=FP32_DTYPES, d=128, normalize=False, value=(
        TileConfig(rows=16, tokens=16, features=128, warps=4, stages=1, tokens_first=True),
        TileConfig(rows=32, tokens=16, features=128, warps=4, stages=1),
    )),
    TableRow(units=("interpreter",), dtypes=FP32_DTYPES, value=(
        TileConfig(rows=16, tokens=16, features=32, warps=4, stages=1, tokens_first=True),
        TileConfig(rows=32, tokens=16, features=32, warps=4, stages=1, walkers=1),
    )),
)
# fmt: on
