"""Count the instructions of host code under Callgrind. `benchmarks/gate/host.py` starts this file as a program.

    valgrind --tool=callgrind ... python benchmarks/gate/count.py FOLDER [REGEX]

The rows of ``python -m benchmarks.calls.host --without-gpu`` that call lik_ops are counted, with the benchmarks and the
lik_ops of FOLDER. REGEX selects rows by "kind, name". Each row prints its kind, name and number of calls as JSON, and
writes a dump of Callgrind for each of its `BLOCKS`.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable

BLOCKS = 3
CALLS = 40
# Rows that repeat 40 or 64 shapes run whole periods. A shape is captured at its second call, so they warm up longer.
PERIOD_CALLS = 320
PERIODIC = ("in turn", "views of", "two int8 shapes")
# Peers, and the cost of PyTorch alone. The step of an encoder is mostly matrix products.
OTHERS = ("einsum", "late-interaction", "flash-maxsim", "nothing", "encoder", "one thread")

Function = Callable[[], object]


def calls_of(name: str) -> int:
    return PERIOD_CALLS if any(word in name for word in PERIODIC) else CALLS


def make_rows(only: str) -> list[tuple[str, str, bool, Function]]:
    """Return kind, name, whether gradients are recorded, and the call of each row."""
    import torch

    from benchmarks.calls import host, without_gpu

    without_gpu.install()
    torch.manual_seed(0)
    Q, D = (torch.randn(8, n, 64, dtype=torch.bfloat16) for n in (32, 64))
    rows = []
    for kind, make in (("no grad", host.scoring), ("training", host.training), ("compiled", host.compiled)):
        gradients = kind != "no grad"
        with torch.set_grad_enabled(gradients):
            functions = make(Q, D)
        for name, function in functions.items():
            if re.search(only, f"{kind}, {name}") and not any(other in name for other in OTHERS):
                rows.append((kind, name, gradients, function))
    return rows


def main() -> None:
    sys.path[0] = sys.argv[1]
    import torch

    warnings.simplefilter("ignore")
    rows = make_rows(sys.argv[2] if len(sys.argv) > 2 else "")
    for _, name, gradients, function in rows:
        with torch.set_grad_enabled(gradients):
            for _ in range(calls_of(name)):
                function()
    gc.collect()
    gc.disable()
    # Everything above runs without instrumentation, which is 10 times faster.
    command = ["callgrind_control", "--instr=on", str(os.getpid())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for kind, name, gradients, function in rows:
        with torch.set_grad_enabled(gradients):
            calls = calls_of(name)
            for _ in range(BLOCKS):
                function()
                torch._C._valgrind_toggle()  # type: ignore[attr-defined]
                for _ in range(calls):
                    function()
                torch._C._valgrind_toggle_and_dump_stats()  # type: ignore[attr-defined]
        print(json.dumps({"kind": kind, "name": name, "calls": calls}), flush=True)


if __name__ == "__main__":
    main()
