"""Find the fastest tile for few query rows by timing alternatives to the built-in table.

    python -m benchmarks.sweeps.sweep_few [--only fp8] [--rounds 15] [--first 60] [--out FILE]

Times are median device times, each call on a flushed L2 cache, for one tile after the other. Each tile must give the
bits of the table's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

import lik_ops
from lik_ops.gpu.tuning import sm90_configs
from lik_ops.ops.fast_path import eager

from ..support import gpu
from ..support.common import (
    Case,
    Inputs,
)
from ..support.runs import (
    Run,
)

TILES = ((64, 1), (64, 2), (64, 3), (64, 4), (64, 6), (64, 10), (128, 1), (128, 2), (128, 3))  # tokens and stages
SHAPES = ((1, 1000, 300), (2, 1000, 300), (4, 1000, 300), (1, 1000, 1024), (1, 100_000, 180))  # Nq, Nd, Ld
Call = Callable[[], object]


class Few(NamedTuple):
    """A call of few query rows: the document format and the requested result."""

    kept: str
    Nq: int
    Nd: int
    Ld: int

    @property
    def name(self) -> str:
        return f"{self.kept}, {self.Nq} x {self.Nd}, Ld {self.Ld}"

    def call(self) -> Call:
        dtype = "float32" if self.kept == "fp32" else "bfloat16"
        x = Inputs(Case(self.name, self.Nq, self.Nd, 32, self.Ld, dtype=dtype), "cuda")
        if self.kept == "normalize":
            return lambda: lik_ops.maxsim(x.Q, x.D, normalize=True)
        if self.kept == "winners":
            return lambda: torch.cat([t.flatten().float() for t in lik_ops.maxsim_with_argmax(x.Q, x.D)])
        if self.kept == "fp32":
            return lambda: lik_ops.maxsim(x.Q, x.D)
        format, *scale = self.kept.split()
        D = lik_ops.quantize(x.D, format, *scale)
        return lambda: lik_ops.maxsim(x.Q, D)


# The document format or the requested result, and the counts of 32-token queries that are few rows for it.
KEPT = {"normalize": 4, "winners": 1, "fp32": 1, "fp8_e4m3": 4, "int8 token": 2, "int8 document": 2}
ROWS = tuple(
    Few(kept, *shape)
    for kept, most in KEPT.items()
    for shape in SHAPES
    if shape[0] <= most and (kept != "fp32" or shape[1] <= 1000)
)


@contextmanager
def forced(tile: tuple[int, int] | None) -> Iterator[None]:
    """Run calls of few rows with this tile, or with the table's tile."""
    eager.clear_call_caches()
    tables = sm90_configs.SMALL_M_TILES
    with mock.patch.dict(tables, {} if tile is None else dict.fromkeys(tables, (sm90_configs.Sm90Tile(*tile),))):
        yield
    eager.clear_call_caches()


def measure(row: Few, timer: gpu.Timer) -> dict:
    call, tried = row.call(), dict[str, dict]()
    expected = call()
    assert isinstance(expected, Tensor)
    for tile in (None, *TILES):
        with forced(tile):
            try:
                same = torch.equal(call(), expected)  # type: ignore[arg-type]
                found: dict = {"same_bits": same, "ms": timer.compare({"call": call})["call"]}
            except Exception as failure:  # too much shared memory or too many registers
                found = {"failed": gpu.reason(failure)}
        tried["table" if tile is None else f"{tile[0]} x {tile[1]}"] = found
    return {"case": {**row._asdict(), "name": row.name}, "tried": tried}


@torch.no_grad()
def main() -> None:
    run = Run("sweep_few", __doc__, rounds=15)
    args = run.parser.parse_args()
    timer = gpu.Timer(args.rounds)
    for row in run.asked(((row.name, row) for row in ROWS), args):
        tried = run.keep(measure(row, timer), args)["tried"]
        cells = (f"{tile} {found.get('ms', float('nan')):.4f}" for tile, found in tried.items())
        print(f"{row.name:32} {', '.join(cells)}", flush=True)
        if other := [tile for tile, found in tried.items() if not found.get("same_bits", True)]:
            raise AssertionError(f"{row.name}: other bits with {', '.join(other)}")


if __name__ == "__main__":
    main()
