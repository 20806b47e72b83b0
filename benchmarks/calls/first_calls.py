"""Measure the first calls of a fresh process: each function five times in a separate process.

    python -m benchmarks.calls.first_calls [--calls 5] [--out FILE]

Each process runs twice. The first run fills Triton's compile cache and includes the compile time. The second run has a
warm cache. Times are seconds per call including synchronization, after torch and lik_ops are imported and the tensors
exist. ``imported`` is the number of modules that each call imported. The file is rewritten after each function.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..support import common

SCRIPT = """
import functools, json, sys, time
import torch, lik_ops

def draw(*shape, grad=False):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)

def step(function, *tensors):
    function(*tensors).sum().backward()

Q, D = draw(16, 32, 128), draw(200, 300, 128)
A, B = draw(16, 32, 128, grad=True), draw(200, 300, 128, grad=True)
PQ, PD = Q.flatten(0, 1), D.flatten(0, 1)
cu_q, cu_d = (torch.arange(n + 1, device="cuda", dtype=torch.int32) * length for n, length in ((16, 32), (200, 300)))
mask = torch.rand(200, 300, device="cuda") < 0.7
small, labels = B[:16], torch.arange(16, device="cuda")
name, count = sys.argv[1], int(sys.argv[2])
CALLS = {
    "maxsim": lambda: lik_ops.maxsim(Q, D),
    "maxsim, mask": lambda: lik_ops.maxsim(Q, D, None, mask),
    "maxsim, normalize": lambda: lik_ops.maxsim(Q, D, normalize=True),
    "maxsim, fp32": lambda Q=Q.float(), D=D.float(): lik_ops.maxsim(Q, D),
    "maxsim, list": lambda: lik_ops.maxsim(Q, list(D[:20])),
    "maxsim, int8": lambda D=lik_ops.quantize(D): lik_ops.maxsim(Q, D),
    "maxsim_with_argmax": lambda: lik_ops.maxsim_with_argmax(Q, D),
    "maxsim, step": lambda: step(lik_ops.maxsim, A, B),
    "maxsim_varlen": lambda: lik_ops.maxsim_varlen(PQ, PD, cu_q, cu_d),
    "maxsim_varlen, step": lambda: step(lik_ops.maxsim_varlen, A.flatten(0, 1), B.flatten(0, 1), cu_q, cu_d),
    "maxsim_cross_entropy, step": lambda: step(lik_ops.maxsim_cross_entropy, A, small, labels),
    "maxsim_soft, step": lambda: step(functools.partial(lik_ops.maxsim_soft, temperature=0.1), A, B),
    "maxsim_token_topk": lambda: lik_ops.maxsim_token_topk(Q, D, 2),
    "maxsim_xtr": lambda: lik_ops.maxsim_xtr(Q, D, 8),
    "maxsim_from_hidden": lambda W=draw(128, 128): lik_ops.maxsim_from_hidden(Q, D, W),
    "chamfer_distance": lambda Q=Q.float(), D=D[:16].float(): lik_ops.chamfer_distance(Q, D),
    "retrieve": lambda: lik_ops.retrieve(Q, D, 10),
}
if name == "names":
    print(json.dumps(list(CALLS)))
    sys.exit()
torch.cuda.synchronize()
seconds, imported = [], []
for _ in range(count):
    before, start = len(sys.modules), time.perf_counter()
    CALLS[name]()
    torch.cuda.synchronize()
    seconds.append(round(time.perf_counter() - start, 4))
    imported.append(len(sys.modules) - before)
print(json.dumps({"seconds": seconds, "imported": imported}))
"""


def run(name: str, calls: int) -> dict | list:
    command = [sys.executable, "-c", SCRIPT, name, str(calls)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr[-500:]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=5, help="calls per function (default 5)")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/first_calls.json)")
    args = parser.parse_args()
    names = run("names", 0)
    with ThreadPoolExecutor(8) as pool:
        cold = dict(zip(names, pool.map(lambda name: run(name, args.calls), names), strict=True))
    records = []
    for name in names:
        found = run(name, args.calls)
        records.append({"case": {"name": name}, **found, "cold_in_parallel": cold[name]})
        print(f"{name:28} {found}", flush=True)
        path = common.write("first_calls", records, path=args.out, calls=args.calls)
    print("wrote", path)


if __name__ == "__main__":
    main()
