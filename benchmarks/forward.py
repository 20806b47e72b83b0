"""How fast is the forward on this GPU, beside eager torch, late-interaction-kernels and flash-maxsim?

    python benchmarks/forward.py [--only rerank] [--rounds 30] [--out FILE]

Medians of calls with the L2 cache flushed by reading (a flush that writes leaves dirty lines, whose write-back the next
call pays). The ceilings, a bf16 matrix product and a plain read, are measured in the same run; ``floor`` is the
larger of operations and bytes over them. Every contender is checked against fp32 before it is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import common
import torch
import triton
import triton.language as tl
from torch import Tensor

import lik_ops
from lik_ops import reference

FLUSH_BYTES = 512 * 2**20
EAGER_LIMIT = 16 * 2**30  # bytes of similarities that eager einsum may hold


@dataclass(frozen=True)
class Case:
    name: str
    Nq: int
    Nd: int
    Lq: int
    Ld: int
    d: int = 128
    argmax: bool = False
    candidates: bool = False
    goal_ms: float | None = None
    dtype: str = "bfloat16"

    @property
    def documents(self) -> int:
        return self.Nd * (self.Nq if self.candidates else 1)

    @property
    def operations(self) -> int:
        return 2 * self.Nq * self.Nd * self.Lq * self.Ld * self.d

    @property
    def bytes(self) -> int:
        size = getattr(torch, self.dtype).itemsize
        scores = 4 * self.Nq * self.Nd + (2 * self.Nq * self.Nd * self.Lq if self.argmax else 0)
        return size * self.d * (self.Nq * self.Lq + self.documents * self.Ld) + scores


CASES = (
    Case("rerank 1k", 1, 1000, 32, 300, goal_ms=0.021),
    Case("rerank 1k long", 1, 1000, 32, 1024, goal_ms=0.062),
    Case("rerank 100k", 1, 100_000, 32, 180, goal_ms=1.03),
    Case("rerank Lq 128", 1, 1000, 128, 1024, goal_ms=0.066),
    Case("pages 1x1k", 1, 1000, 1024, 1024, goal_ms=0.32),
    Case("pages 64x64", 64, 64, 1024, 1024, goal_ms=1.28),
    Case("serve 16x1k", 16, 1000, 32, 300, goal_ms=0.062),
    Case("serve 64x10k", 64, 10_000, 32, 180, goal_ms=1.25),
    Case("fat d 768", 1, 1000, 128, 1024, d=768, goal_ms=0.41),
    Case("in-batch 256", 256, 256, 32, 300, argmax=True, goal_ms=0.25),
    Case("candidates 256x16", 256, 16, 32, 1024, candidates=True),
    Case("fp32 64x64", 64, 64, 32, 300, dtype="float32"),
    Case("tiny 8x8", 8, 8, 32, 64),
)


@triton.jit
def _read(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + offsets, mask=offsets < n, other=0))
    if total == 123456789:  # keeps the loads; hardly ever true
        tl.store(out, total)


class Timer:
    """Medians of single calls on a flushed L2 cache."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.buffer = torch.randint(0, 7, (FLUSH_BYTES // 4,), dtype=torch.int32, device="cuda")
        self.out = torch.zeros(1, dtype=torch.int32, device="cuda")

    def read(self, x: Tensor) -> None:
        _read[(triton.cdiv(x.numel(), 8192),)](x, self.out, x.numel(), BLOCK=8192, num_warps=8)

    def __call__(self, function: Callable[[], object]) -> float:
        """Milliseconds."""
        for _ in range(3):
            function()
        events = []
        for _ in range(self.rounds):
            self.read(self.buffer)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events)


def ceilings(timer: Timer) -> dict[str, float]:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = timer(lambda: a @ b)
    big = torch.randint(0, 7, (2**30,), dtype=torch.int32, device="cuda")
    read = timer(lambda: timer.read(big))
    return {"tflops": 2 * 8192**3 / matmul / 1e9, "gbs": big.numel() * 4 / read / 1e6}


def eager(Q: Tensor, D: Tensor) -> Tensor:
    """What one writes without a library: every similarity in memory, in the inputs' dtype."""
    return torch.einsum("isd,ijtd->ijst" if D.dim() == 4 else "isd,jtd->ijst", Q, D).amax(-1).float().sum(-1)


def contenders(case: Case, Q: Tensor, D: Tensor) -> dict[str, Callable[[], object]]:
    """Each returns scores [Nq, Nd], or a tuple that begins with them."""
    found: dict[str, Callable[[], object]] = {"lik_ops": lambda: lik_ops.maxsim(Q, D)}
    if case.argmax:
        found["lik_ops"] = lambda: torch.ops.lik.maxsim_fwd(Q, D, None, None, None, False, torch.int16, "auto")
    if case.operations // case.d // 2 * Q.element_size() < EAGER_LIMIT:
        found["eager"] = lambda: eager(Q, D)
    try:
        from late_interaction_kernels.forward import maxsim_forward

        if D.numel() >= 2**31:  # reads outside its tensors there, which ends the process's CUDA context
            raise ImportError
        found["late-interaction-kernels"] = lambda: maxsim_forward(Q, D, save_argmax=case.argmax)
    except ImportError:
        pass
    try:
        import flash_maxsim

        if case.argmax:  # its argmax is saved by the training entry point alone
            leaf = Q.clone().requires_grad_()
            found["flash-maxsim"] = lambda: flash_maxsim.flash_maxsim_batched_train(leaf, D)
        elif case.Nq == 1 and not case.candidates:
            found["flash-maxsim"] = lambda: flash_maxsim.flash_maxsim(Q[0], D)[None]
        else:
            found["flash-maxsim"] = lambda: flash_maxsim.flash_maxsim_batched(Q, D, shared_docs=not case.candidates)
    except ImportError:
        pass
    return found


def error_of(case: Case, Q: Tensor, D: Tensor, scores: Tensor) -> float:
    """Relative error beside fp64, on the last queries and documents: what goes wrong first beyond 2^31 elements."""
    q, k = slice(-4, None), slice(-64, None)
    D = D[q, k] if case.candidates else D[k]
    expected = reference.maxsim(Q[q].double(), D.double())
    return float((scores[q, k].double() - expected).norm() / expected.norm())


def measure(case: Case, timer: Timer, ceiling: dict[str, float]) -> dict:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device="cuda", dtype=getattr(torch, case.dtype))
        return x.div_(x.norm(dim=-1, keepdim=True))

    Q = draw(case.Nq, case.Lq, case.d)
    D = draw(*((case.Nq, case.Nd) if case.candidates else (case.Nd,)), case.Ld, case.d)
    floor = max(case.operations / ceiling["tflops"] / 1e9, case.bytes / ceiling["gbs"] / 1e6)
    record: dict = {"case": asdict(case), "floor_ms": floor, "contenders": {}}
    for name, function in contenders(case, Q, D).items():
        try:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = function()
            scores = out[0] if isinstance(out, tuple) else out
            assert isinstance(scores, Tensor)
            peak = torch.cuda.max_memory_allocated() - before
            error = error_of(case, Q, D, scores.detach())
            del out, scores
            ms = timer(function)
        except Exception as failure:
            record["contenders"][name] = {"failed": f"{type(failure).__name__}: {failure}"[:200]}
            continue
        record["contenders"][name] = {
            "ms": ms,
            "tflops": case.operations / ms / 1e9,
            "gbs": case.bytes / ms / 1e6,
            "of_floor": floor / ms,
            "peak_mb": peak / 2**20,
            "error": error,
        }
    return record


def host_microseconds(rounds: int = 500) -> dict[str, float]:
    """Host time of a tiny call, gradients off: the kernels run behind the host."""
    Q, D = (torch.randn(8, n, 64, device="cuda", dtype=torch.bfloat16) for n in (32, 64))
    found = contenders(Case("host", 8, 8, 32, 64, d=64), Q, D)
    found["torch.ops.lik.maxsim"] = lambda: torch.ops.lik.maxsim(Q, D)
    result = {}
    for name, function in found.items():
        try:
            for _ in range(20):
                function()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(rounds):
                function()
            result[name] = (time.perf_counter() - start) / rounds * 1e6
            torch.cuda.synchronize()
        except Exception as failure:
            print(f"{name}: {type(failure).__name__}: {failure}")
    return result


def report(record: dict) -> None:
    case = record["case"]
    shape = f"{case['Nq']} x {case['Nd']}, Lq {case['Lq']}, Ld {case['Ld']}, d {case['d']}, {case['dtype']}"
    goal = f", goal {case['goal_ms']}" if case["goal_ms"] else ""
    print(f"{case['name']} ({shape}): floor {record['floor_ms']:.4f} ms{goal}")
    for name, r in record["contenders"].items():
        if "failed" in r:
            print(f"  {name:26} failed: {r['failed']}")
            continue
        print(
            f"  {name:26} {r['ms']:8.4f} ms  {r['tflops']:6.0f} TFLOP/s  {r['gbs']:5.0f} GB/s  "
            f"{r['of_floor']:.2f} of floor  {r['peak_mb']:8.1f} MB  error {r['error']:.0e}",
            flush=True,
        )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each contender (default 30)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="where to write (default benchmarks/results/forward.json)")
    args = parser.parse_args()
    timer = Timer(args.rounds)
    ceiling = ceilings(timer)
    print(f"ceilings: {ceiling['tflops']:.0f} TFLOP/s, {ceiling['gbs']:.0f} GB/s")
    records = []
    for case in CASES:
        if args.only in case.name:
            records.append(measure(case, timer, ceiling))
            report(records[-1])
            torch.cuda.empty_cache()
    host = host_microseconds()
    print("host us:", ", ".join(f"{name} {us:.1f}" for name, us in host.items()))
    peers = ("late-interaction-kernels", "flash-maxsim")
    print("wrote", common.write("forward", records, *peers, path=args.out, ceilings=ceiling, host_us=host))


if __name__ == "__main__":
    main()
