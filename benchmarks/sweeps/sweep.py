"""Find the fastest configuration of a kernel on this GPU by timing alternatives to the built-in tables.

    python -m benchmarks.sweeps.sweep forward [--only rerank] [--rounds 15] [--first 60] [--out FILE]

`tables.SWEEPS` lists the sweeps with their cases and alternatives. An alternative replaces table entries or functions
of `lik_ops` while it runs. Times are median device times, each call on a flushed L2 cache. Before timing, each
alternative is compared with the result of the table. ``same_bits`` says whether the bits are equal, and ``error`` is
the relative error. An alternative of an exact sweep must have the same bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from lik_ops.ops.fast_path import eager

from ..support import common, gpu
from ..support.runs import Run
from .tables import SWEEPS, Patches, Sweep


def resolve(name: str) -> tuple[Any, str, Any]:
    """Return the module of a patched name, the attribute, and its present value."""
    module, attribute = name.rsplit(".", 1)
    owner = importlib.import_module(f"lik_ops.{module}")
    return owner, attribute, getattr(owner, attribute)


def clear_caches(patches: Patches) -> None:
    """Clear the caches of calls, and the caches of functions in patched modules."""
    eager.clear_call_caches()
    for name in patches:
        for function in vars(resolve(name)[0]).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


@contextmanager
def forced(patches: Patches) -> Iterator[None]:
    """Run calls with patched configurations."""
    clear_caches(patches)
    with ExitStack() as stack:
        for name, replace in patches.items():
            owner, attribute, present = resolve(name)
            stack.enter_context(mock.patch.object(owner, attribute, replace(present)))
        yield
    clear_caches(patches)


def measure(sweep: Sweep, case: Any, timer: gpu.Timer) -> dict[str, dict]:
    """Return the results of the table and of each alternative by name."""
    call = sweep.call(case)
    expected = call()
    tried: dict[str, dict] = {}
    for name, patches in {"table": {}, **sweep.alternatives(case)}.items():
        with forced(patches):
            try:
                found = call()
                tried[name] = {"same_bits": torch.equal(found, expected)}
                tried[name] |= {"error": common.relative_error(found, expected), "ms": timer(call)}
            except Exception as failure:  # too much shared memory or too many registers
                tried[name] = {"failed": gpu.reason(failure)}
    return tried


def print_results(name: str, tried: dict[str, dict]) -> None:
    """Print the alternatives of a case, the fastest first."""
    print(name)
    for choice, found in sorted(tried.items(), key=lambda item: item[1].get("ms", float("inf"))):
        bits = "" if found.get("same_bits", True) else f" OTHER BITS, error {found['error']:.0e}"
        print(f"  {found['ms']:.4f} {choice}{bits}" if "ms" in found else f"  failed {choice}: {found['failed']}")


@torch.no_grad()
def main() -> None:
    run = Run("sweep", __doc__, rounds=15)
    run.parser.add_argument("sweep", choices=SWEEPS)
    args = run.parser.parse_args()
    run.name, sweep, timer = f"sweep_{args.sweep}", SWEEPS[args.sweep], gpu.Timer(args.rounds)
    for name, case in run.asked(((name, (name, case)) for name, case in sweep.cases().items()), args):
        tried = run.keep({"case": {"name": name}, "tried": measure(sweep, case, timer)}, args)["tried"]
        print_results(name, tried)
        other = [choice for choice, found in tried.items() if not found.get("same_bits", True)]
        if sweep.exact and other:
            raise AssertionError(f"{name}: other bits with {', '.join(other)}")


if __name__ == "__main__":
    main()
