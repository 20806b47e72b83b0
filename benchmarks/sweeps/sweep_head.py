"""Find the fastest tile of the fused hidden-state kernel by timing alternatives to the built-in table.

    python -m benchmarks.sweeps.sweep_head [--only "1 x 1000"] [--rounds 15] [--workers 8 | --compiled] [--out FILE]

Worker processes compile all alternatives first. Each must give the bits of unfused scores with the table's tile.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

import lik_ops
from lik_ops.families.head import configs as head_configs
from lik_ops.gpu.runtime.arguments import architecture

from ..operators.head import (
    CASES,
    Head,
    Inputs,
    unfused,
)
from ..support import common, gpu


class Tile(NamedTuple):
    """Tokens, hidden features per step, warps and stages of a program, and programs per SM."""

    BN: int
    BK: int
    warps: int
    stages: int
    programs: int = 1
    registers: int | None = None

    def __str__(self) -> str:
        limit = f", {self.registers} registers" if self.registers else ""
        return f"{self.BN} x {self.BK}, {self.warps} warps, {self.stages} stages, {self.programs} a processor{limit}"


TILES = (
    Tile(256, 64, 8, 4),
    Tile(256, 64, 8, 3),
    Tile(256, 32, 8, 9),
    Tile(256, 64, 16, 4),
    Tile(256, 128, 8, 2),
    Tile(128, 64, 4, 3, 2),
    Tile(128, 64, 8, 3, 2, 128),
    Tile(128, 128, 8, 3),
    Tile(128, 64, 8, 6),
)
NARROW = (Tile(256, 64, 16, 5), Tile(256, 32, 8, 10), Tile(128, 64, 4, 4, 2))  # d <= 64


def tiles_of(case: Head) -> tuple[Tile, ...]:
    return (*TILES, *NARROW) if case.d <= 64 else TILES


def cases(only: str) -> list[Head]:
    """Return the cases that are fused on an H100 or H200."""
    return [
        case
        for case in CASES
        if case.what == "scores"
        and case.Nq * case.Lq <= head_configs.MAX_QUERY_ROWS
        and case.Nd >= 264
        and only in case.name
    ]


@contextmanager
def forced(tile: Tile | None) -> Iterator[None]:
    """Run fused calls with this tile, or with the table's tile."""
    made = head_configs.configure_scores

    def launch(arch, *args):
        found = made(arch, *args)
        assert tile is not None
        config = found.config._replace(BN=tile.BN, BK=tile.BK)
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "max_registers": tile.registers}
        return replace(found, config=config, walkers=tile.programs * arch.processors, **options)

    if tile is None:
        yield
    else:
        with mock.patch.object(head_configs, "configure_scores", launch):
            yield


def score(x: Inputs) -> torch.Tensor:
    return lik_ops.maxsim_from_hidden(*x.tensors, d_mask=x.d_mask)


def compile_one(job: tuple[Head, Tile]) -> str:
    """Compile for a few documents, because kernels do not depend on sizes.

    Returns:
        The error, or an empty string.
    """
    case, tile = job
    arch = architecture(torch.device("cuda"))
    try:
        with torch.no_grad(), forced(tile):
            score(Inputs(replace(case, Nd=4 * arch.processors, Ld=head_configs.MIN_DOCUMENT_TOKENS)))
        torch.cuda.synchronize()
    except Exception as failure:
        return gpu.reason(failure)
    return ""


def compile_all(chosen: list[Head], workers: int) -> dict[tuple[str, Tile | None], str]:
    """Compile all tiles of all cases and return the errors by case and tile."""
    jobs = [(case, tile) for case in chosen for tile in tiles_of(case)]
    # Widths share a kernel.
    kernels = {(case.Nq, case.Lq, case.d, case.mask, tile): (case, tile) for case, tile in jobs}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        failed = dict(zip(kernels, pool.map(compile_one, kernels.values()), strict=True))
    return {(case.name, tile): failed[case.Nq, case.Lq, case.d, case.mask, tile] for case, tile in jobs}


def measure(case: Head, timer: gpu.Timer, failed: dict[tuple[str, Tile | None], str]) -> dict:
    x, functions = Inputs(case), {}
    expected, bits = unfused(x), x.H.view(torch.int32)
    tried: dict[str, dict] = {}
    for tile in (None, *tiles_of(case)):
        name = "table" if tile is None else str(tile)

        def call(tile=tile):
            with forced(tile):
                return score(x)

        try:
            if reason := failed.get((case.name, tile)):
                raise RuntimeError(reason)
            tried[name] = {"same_bits": torch.equal(call(), expected)}
            functions[name] = call
        except RuntimeError as failure:
            tried[name] = {"failed": gpu.reason(failure)}
    functions["read"] = lambda: timer.read(bits)
    for name, ms in timer.compare(functions).items():
        tried.setdefault(name, {})["ms"] = ms
    return {"case": asdict(case), "tried": tried}


def print_table(records: list[dict]) -> None:
    names = dict.fromkeys(name for r in records for name in r["tried"])
    for n, r in enumerate(records):
        print(f"{chr(97 + n)}: {r['case']['name']}")
    print(f"{'':52}" + "".join(f"{chr(97 + n):>8}" for n in range(len(records))))
    for name in names:
        found = [r["tried"].get(name, {}) for r in records]
        cells = [f"{t['ms']:8.4f}" if "ms" in t else f"{'failed' if 'failed' in t else '':>8}" for t in found]
        other = " OTHER BITS" if any(not t.get("same_bits", True) for t in found) else ""
        print(f"{name:52}{''.join(cells)}{other}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=15, help="timed calls per tile (default 15)")
    parser.add_argument("--workers", type=int, default=8, help="compiler processes (default 8)")
    parser.add_argument("--compiled", action="store_true", help="skip compiling because an earlier run did it")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/sweep_head.json)")
    args = parser.parse_args()
    chosen = cases(args.only)
    failed = {} if args.compiled else compile_all(chosen, args.workers)
    timer, records = gpu.Timer(args.rounds), []
    for case in chosen:
        records.append(measure(case, timer, failed))
        torch.cuda.empty_cache()
    print_table(records)
    print("wrote", common.write("sweep_head", records, path=args.out))


if __name__ == "__main__":
    main()
