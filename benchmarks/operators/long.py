"""Measure the scoring of few long documents on this GPU, compared with a plain read of them.

    python -m benchmarks.operators.long [--only "Lq 128"] [--rounds 20] [--seconds 150] [--out FILE]

Times are median device times, each call on a flushed L2 cache. ``read`` is the time of a kernel that only reads the
documents, a lower bound for calls of few microseconds. ``uncut`` is the same kernel without splits. Both must have the
same bits. The goal is 0.8 of the rate of `read`.

Peers are tuned for each row, and no peer starts after the time is up. Rows with Lq 128 are taken from the papers'
tables of long documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import lik_ops
from lik_ops.gpu.forward.generic import make_generic_plan

from ..support import common, contenders, gpu
from ..support.common import (
    Case,
    Inputs,
)
from ..support.runs import (
    Run,
)

SHARE = 0.8  # goal, as a share of the rate of a read
TOLERANCE = 1e-2
SECONDS = 10  # limit of a peer's first call


@dataclass(frozen=True)
class Long(Case):
    """A case of few documents. If `packed`, their lengths are known only on the device."""

    packed: bool = False


CASES = (
    *(Long(f"1 x {n} of {L}", 1, n, 32, L) for L in (8192, 65536) for n in (1, 4, 16, 64)),
    *(Long(f"Lq 128, 1 x {n} of {L}", 1, n, 128, L) for L in (2048, 4096, 8192, 16384) for n in (16, 64)),
    *(Long(f"winners, 1 x {n} of 65536", 1, n, 32, 65536, what="winners") for n in (1, 64)),
    *(Long(f"packed, 1 x {n} of 65536", 1, n, 32, 65536, packed=True) for n in (1, 64)),
    Long("normalize, 1 x 16 of 65536", 1, 16, 32, 65536, normalize=True),
    Long("holes, 1 x 16 of 65536", 1, 16, 32, 65536, mask="holes"),
)


def calls(case: Long, x: Inputs) -> dict[str, Callable[[], Tensor | tuple[Tensor, ...]]]:
    """Return the lik_ops calls, which give scores or a tuple that starts with them."""
    Q, D, options = x.Q, x.D, x.options
    argmax_dtype = torch.int32 if case.what == "winners" else None
    plan = make_generic_plan(Q, D, x.normalize, argmax_dtype)
    tensors = Q, D, x.q_mask, x.d_mask, x.q_weight
    found: dict[str, Callable[[], Tensor | tuple[Tensor, ...]]] = {
        "uncut": lambda: plan.forward(plan.scores_shape, tensors)[0]
    }
    if argmax_dtype is None:
        found["lik_ops"] = lambda: lik_ops.maxsim(Q, D, **options)
    else:
        found["lik_ops"] = lambda: torch.ops.lik.maxsim_fwd(Q, D, *tensors[2:], x.normalize, argmax_dtype, "auto")
    if case.packed:
        tokens, bounds = D.flatten(0, 1), torch.arange(case.Nd + 1, device=D.device) * case.Ld
        rows = torch.tensor([0, case.Lq], device=D.device)
        found["lik_ops"] = lambda: lik_ops.maxsim_varlen(Q[0], tokens, rows, bounds)
    return found


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def measure(case: Long, timer: gpu.Timer, until: float) -> dict:
    x, results = Inputs(case, "cuda"), {}
    functions: dict[str, Callable[[], object]] = dict(calls(case, x))
    ours, uncut = (_first(functions[name]()) for name in ("lik_ops", "uncut"))
    if not torch.equal(ours, uncut):
        raise AssertionError(f"{case.name}: scores of split documents are others")
    error = common.error_of(x, ours)
    if not error < TOLERANCE:
        raise AssertionError(f"{case.name}: relative error {error}")
    results["lik_ops"] = {"error": error, "peak_mb": gpu.peak_bytes(functions["lik_ops"]) / 2**20}
    peers = contenders.forward(case, x)
    contenders.forget_tuning()  # it is from another shape
    for name, peer in peers.items():
        if name not in contenders.PEERS or case.packed or case.what == "winners":
            continue
        if isinstance(peer, str) or time.monotonic() > until:
            results[name] = {"skipped": peer if isinstance(peer, str) else "no time left"}
            continue
        try:
            gpu.first_call(peer, SECONDS)
            functions[name] = peer
        except (gpu.TooSlowError, RuntimeError, TypeError, ValueError) as failure:
            results[name] = {"failed": gpu.reason(failure)}
    bits = x.D.view(torch.int32)
    functions["read"] = lambda: timer.read(bits)
    for name, ms in timer.compare(functions).items():
        results.setdefault(name, {})["ms"] = ms
    return {"case": asdict(case), "share": results["read"]["ms"] / results["lik_ops"]["ms"], "results": results}


def main() -> None:
    run = Run("long", __doc__, *contenders.PEERS, rounds=20)
    run.parser.add_argument("--seconds", type=float, default=150, help="start no peer after this time (default 150)")
    args = run.parser.parse_args()
    timer, until = gpu.Timer(args.rounds), time.monotonic() + args.first + args.seconds
    ceilings = gpu.ceilings(timer)
    print(f"read {ceilings['gbs']:.0f} GB/s, an empty kernel {ceilings['empty_ms']:.4f} ms")
    with torch.no_grad():
        for case in run.asked(((case.name, case) for case in CASES), args):
            record = run.keep(measure(case, timer, until), args, ceilings=ceilings, goal=SHARE)
            times = [f"{name} {r['ms']:.4f}" for name, r in record["results"].items() if "ms" in r]
            print(f"{case.name:28} {', '.join(times)} ms; {record['share']:.2f} of the read rate", flush=True)


if __name__ == "__main__":
    main()
