"""Estimate how often the device gate refuses equal kernels, and misses slower ones: no GPU needed.

    python -m benchmarks.gate.simulate [--runs 1000]

Each measurement of a row gets a ratio that ``benchmarks/results/before.json`` recorded for two checkouts with nearly
the same kernels, or its inverse. All turns of a measurement share the ratio, although turns differ in reality, so the
median over turns removes no noise here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import statistics

from ..support import common
from . import device, verdicts


def recorded_ratios() -> list[float]:
    """Return the recorded ratios of device times around their median, and their inverses."""
    records = json.loads((common.RESULTS / "before.json").read_text())["records"]
    ratios = [record["ms"]["ratio"] for record in records if "ms" in record and record["turns"] == 3]
    typical = statistics.median(ratios)
    return [x for ratio in ratios for x in (ratio / typical, typical / ratio)]


class NoisyCheckout:
    """Stand-in for a `Checkout` of ``before.py`` whose rows cost 1 ms times noise, and some more than that."""

    def __init__(self, noise: list[float], turns: int, random_: random.Random, slower: dict[int, float]) -> None:
        self.noise, self.turns, self.random, self.slower = noise, turns, random_, slower
        self.calls = 0

    def row(self, n: int) -> dict:
        if self.calls % self.turns == 0:
            self.factor = self.random.choice(self.noise)
        self.calls += 1
        return {"ms": self.factor * self.slower.get(n, 1.0), "bits": ""}


def is_refused(seed: int, rows: int, slower: dict[int, float], turns: int = 3) -> bool:
    """Return whether one simulated run of the gate refuses."""
    random_ = random.Random(seed)
    noise = recorded_ratios()
    pair = NoisyCheckout([1.0], turns, random_, {}), NoisyCheckout(noise, turns, random_, slower)
    with contextlib.redirect_stdout(io.StringIO()):
        found, left = device.measure_rows(pair, list(range(rows)), turns, float("inf"))
    assert not left
    return bool(verdicts.refused(device.comparison_of(str(n), both) for n, both in found.items()))


def rates(runs: int) -> dict[str, float]:
    """Return the shares of runs that refuse, with equal kernels and with one row 5 % slower."""
    from ..report import before

    rows = len(before.ROWS)
    return {
        "equal kernels refused": statistics.mean(is_refused(seed, rows, {}) for seed in range(runs)),
        "5 % in one row refused": statistics.mean(is_refused(seed, rows, {seed % rows: 1.05}) for seed in range(runs)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="simulated runs (default 1000)")
    for what, rate in rates(parser.parse_args().runs).items():
        print(f"{what}: {rate:.2%} of runs")


if __name__ == "__main__":
    main()
