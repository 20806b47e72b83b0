"""Which tile sizes are fastest for the forward on this GPU? Times alternatives to the table of `backends/configs.py`.

    python benchmarks/sweep.py [--only rerank] [--out FILE]

Every alternative is checked to give the very bits of the table's choice before it is timed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import common
import contenders
import torch
from common import Case, Inputs
from forward import CASES
from gpu import Timer

from lik_ops.backends import configs
from lik_ops.backends.configs import Launch
from lik_ops.ops import eager

ROWS, TOKENS, WARPS, STAGES = (64, 128, 256), (64, 128), (4, 8), (2, 3, 4)


def alternatives(case: Case) -> Iterator[tuple[int, int, int, int]]:
    rows = case.Nq * case.Lq if not case.candidates else case.Lq
    for BM, BN, warps, stages in itertools.product(ROWS, TOKENS, WARPS, STAGES):
        useful = BM == 64 or 2 * rows >= BM
        if useful and 16 <= BM // warps <= 32:
            yield BM, BN, warps, stages


@contextmanager
def forced(BM: int, BN: int, warps: int, stages: int) -> Iterator[None]:
    table: Callable[..., Launch] = configs.forward

    def choose(*args, **kwargs) -> Launch:
        launch = table(*args, **kwargs)
        config = launch.config._replace(BM=BM, BN=BN, SLOT=min(launch.config.SLOT, BM))
        return replace(launch, config=config, num_warps=warps, num_stages=stages)

    with mock.patch.object(configs, "forward", choose):
        eager.forget()
        yield
    eager.forget()


def measure(case: Case, timer: Timer) -> dict:
    function = contenders.forward(case, Inputs(case, "cuda"))["lik_ops"]
    assert not isinstance(function, str)

    def scores() -> torch.Tensor:
        out = function()
        return out[0] if isinstance(out, tuple) else out  # type: ignore[return-value]

    expected = scores()
    tried = [{"choice": "table", "ms": timer(function), "same_bits": True}]
    for choice in alternatives(case):
        with forced(*choice):
            try:
                same = torch.equal(scores(), expected)
                tried.append({"choice": choice, "ms": timer(function), "same_bits": same})
            except Exception as failure:
                tried.append({"choice": choice, "failed": f"{type(failure).__name__}"})
    return {"case": asdict(case), "tried": tried}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="where to write (default benchmarks/results/sweep.json)")
    args = parser.parse_args()
    timer, records = Timer(9), []
    for case in CASES:
        if args.only not in case.name or case.dtype != "bfloat16":
            continue
        records.append(measure(case, timer))
        ranked = sorted((t for t in records[-1]["tried"] if "ms" in t), key=lambda t: t["ms"])
        print(case.name, f"table {records[-1]['tried'][0]['ms']:.4f};", end=" ")
        print("; ".join(f"{t['choice']} {t['ms']:.4f}{'' if t['same_bits'] else ' OTHER BITS'}" for t in ranked[:6]))
        torch.cuda.empty_cache()
    print("wrote", common.write("sweep", records, path=args.out))


if __name__ == "__main__":
    main()
