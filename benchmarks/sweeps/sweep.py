"""Find the fastest tile sizes of the forward on this GPU by timing alternatives to the built-in table.

    python -m benchmarks.sweeps.sweep [--only rerank] [--out FILE]

Every alternative must give exactly the bits of the table's choice before timing. Two lower bounds are measured too:
an empty kernel and a plain read of the same documents.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch
import triton

from lik_ops.gpu.tuning import forward_configs, sm90_configs
from lik_ops.gpu.tuning.forward_table import TileConfig
from lik_ops.ops.fast_path import eager

from ..operators.forward import (
    CASES,
)
from ..support import common, contenders
from ..support.common import (
    Case,
    Inputs,
)
from ..support.gpu import (
    Timer,
)

ROWS, TOKENS, WARPS, STAGES = (16, 32, 64, 128, 256), (64, 128), (4, 8), (1, 2, 3, 4, 5)
WALKERS = (0, 264, 396, 528)


@triton.jit
def _empty():
    pass


def alternatives(case: Case) -> Iterator[TileConfig]:
    """Yield tiles whose first dimension gives each warp 16 or 32 rows and that are at least half full."""
    rows = case.Lq * (1 if case.candidates else case.Nq)
    for tokens_first, BM, BN, warps, stages in itertools.product((False, True), ROWS, TOKENS, WARPS, STAGES):
        first = BN if tokens_first else BM
        least = 16 if tokens_first else 64
        if (least == BM or 2 * rows >= BM) and first >= 64 and 16 <= first // warps <= 32:
            for walkers in WALKERS:
                yield TileConfig(BM, BN, 128, warps, stages, tokens_first=tokens_first, walkers=walkers)


@contextmanager
def forced(tile: TileConfig) -> Iterator[None]:
    """Run `maxsim_forward` with this tile, even if the specialized kernel would be chosen."""
    table = mock.patch.object(forward_configs, "select_tiles", lambda *_: (tile,))
    with table, mock.patch.object(sm90_configs, "configure_sm90", lambda *_, **__: None):
        eager.clear_call_caches()
        yield
    eager.clear_call_caches()


def measure(case: Case, timer: Timer) -> dict:
    x = Inputs(case, "cuda")
    function = contenders.forward(case, x)["lik_ops"]
    assert not isinstance(function, str)

    def scores() -> torch.Tensor:
        out = function()
        return out[0] if isinstance(out, tuple) else out  # type: ignore[return-value]

    expected = scores()
    tried = [
        {"choice": "empty kernel", "ms": timer(lambda: _empty[(case.documents,)]()), "same_bits": True},
        {"choice": "plain read", "ms": timer(lambda: timer.read(x.D.view(torch.int32).view(-1))), "same_bits": True},
        {"choice": "table", "ms": timer(function), "same_bits": True},
    ]
    for tile in alternatives(case):
        with forced(tile):
            try:
                same = torch.equal(scores(), expected)
                tried.append({"choice": tile._asdict(), "ms": timer(function), "same_bits": same})
            except Exception as failure:
                tried.append({"choice": tile._asdict(), "failed": f"{type(failure).__name__}"})
    return {"case": asdict(case), "tried": tried}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/sweep.json)")
    args = parser.parse_args()
    timer, records = Timer(9), []
    for case in CASES:
        if args.only not in case.name or case.dtype != "bfloat16":
            continue
        records.append(measure(case, timer))
        print(case.name)
        for t in sorted((t for t in records[-1]["tried"] if "ms" in t), key=lambda t: t["ms"])[:10]:
            choice = t["choice"] if isinstance(t["choice"], str) else TileConfig(**t["choice"])
            print(f"  {t['ms']:.4f} {choice}{'' if t['same_bits'] else ' OTHER BITS'}")
        torch.cuda.empty_cache()
    print("wrote", common.write("sweep", records, path=args.out))


if __name__ == "__main__":
    main()
