"""`benchmarks/retrieve.py --gpus`: `lik_ops.distributed.retrieve`, a process for each GPU, beside one GPU alone."""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import common
import gpu
import torch
import torch.distributed as dist
from torch import Tensor

import lik_ops
from lik_ops._agreement import Agreement, all_gather
from lik_ops._gathering import merged

QUERIES = (1, 64, 16, 256)
PART_ROUNDS = 7
TIMEOUT = timedelta(seconds=120)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def efficiency(one_ms: float, all_ms: float, gpus: int) -> float:
    """1 where `gpus` of them take that part of the time of one."""
    return one_ms / (gpus * all_ms)


def parts_of(Q: Tensor, D: Tensor, k: int) -> dict[str, Callable[[], object]]:
    """The parts of a call, each on its own: this rank's search, what the ranks agree on first, what they send last."""
    rank, world = dist.get_rank(), dist.get_world_size()
    begin, end = len(D) * rank // world, len(D) * (rank + 1) // world
    best = lik_ops.retrieve(Q, D[begin:end], k)
    documents = [len(D) * (i + 1) // world - len(D) * i // world for i in range(world)]
    return {
        "local": lambda: lik_ops.retrieve(Q, D[begin:end], k),
        "agree": lambda: Agreement("benchmark", None, (Q,), {"top_k": k}, [0] * 9, None).wait(),
        "merge": lambda: merged(best, begin, documents, k, None),
    }


def of_each_rank(times: list[float], device: torch.device) -> list[float]:
    """The median of each rank's rounds."""
    mine = torch.tensor([statistics.median(times)], device=device)
    all_ranks = mine.new_empty(dist.get_world_size())
    all_gather(all_ranks, mine, None)
    return all_ranks.tolist()


def measure_parts(Q: Tensor, D: Tensor, k: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each part, of each rank; all ranks begin together.

    ``launch`` is a whole call up to where it returns: the time of the host, which waits for the agreement alone.
    """
    import retrieve  # it imports this module

    found: dict[str, list[float]] = {}
    for name, function in parts_of(Q, D, k).items():
        times = []
        for _ in range(rounds + 1):  # the first one compiles
            dist.barrier()
            times.append(retrieve.seconds_of(function) * 1e3)
        found[name] = of_each_rank(times[1:], Q.device)
    launches = []
    for _ in range(rounds):
        dist.barrier()
        gpu.synchronize()
        start = time.perf_counter()
        lik_ops.distributed.retrieve(Q, D, k, progress=False)
        launches.append((time.perf_counter() - start) * 1e3)
        gpu.synchronize()
    found["launch"] = of_each_rank(launches, Q.device)
    return found


def measure(Q: Tensor, D: Tensor, rounds: int, seconds: float) -> dict:
    """A record of one case: on rank 0 what it is told by its own clock, which ends when the result is there.

    As many rounds on all ranks, though they are not told the time: rank 0 says whether one more follows. `parts`, of
    each rank, say where the time goes: the call should take that of the slowest ``local`` and of ``merge``, and on GPUs
    none of ``agree``, which happens during the search.
    """
    import retrieve  # it imports this module

    rank, world, k = dist.get_rank(), dist.get_world_size(), min(retrieve.TOP_K, len(D))
    expected = lik_ops.retrieve(Q, D, k)
    found = lik_ops.distributed.retrieve(Q, D, k, progress=False)
    same = torch.tensor(int(retrieve.same_bits(found, expected)), device=Q.device)
    dist.all_reduce(same, dist.ReduceOp.MIN)
    alone: list[float] = []
    together: list[float] = []
    end = time.monotonic() + seconds
    for _ in range(rounds):
        goes_on = torch.tensor(int(len(alone) < 2 or time.monotonic() < end), device=Q.device)
        dist.broadcast(goes_on, 0)
        if not goes_on.item():
            break
        if rank == 0:
            alone.append(retrieve.seconds_of(lambda: lik_ops.retrieve(Q, D, k)) * 1e3)
        else:
            alone.append(0.0)
        dist.barrier()
        seconds_all = retrieve.seconds_of(lambda: lik_ops.distributed.retrieve(Q, D, k, progress=False))
        together.append(seconds_all * 1e3)
    parts = {f"{name}_ms": each for name, each in measure_parts(Q, D, k, min(rounds, PART_ROUNDS)).items()}
    one_ms, all_ms = statistics.median(alone), statistics.median(together)
    entry: dict = {"failed": "wrong: not the bits of one GPU"}
    if same.item():
        scaling = efficiency(one_ms, all_ms, world)
        entry = {"ms": all_ms, "best_ms": min(together), "one_ms": one_ms, "efficiency": scaling, "exact": True}
        entry["beside_local_ms"] = all_ms - max(parts["local_ms"])
    record = retrieve.new_record("gpus", len(Q), len(D), k)
    return record | {"gpus": world, "rounds": len(together), "parts": parts, "contenders": {"lik_ops": entry}}


def worker(rank: int, world: int, port: int, args: argparse.Namespace, path: str) -> None:
    import retrieve

    start = time.monotonic()
    device = "cpu" if args.device == "cpu" else f"cuda:{rank}"
    if args.device != "cpu":
        torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    backend = "gloo" if args.device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        D = retrieve.draw(args.documents, device)
        records: list[dict] = []
        for Nq in QUERIES:
            left = torch.tensor(args.seconds - (time.monotonic() - start), device=device)
            dist.broadcast(left, 0)  # or ranks might disagree
            if left.item() <= 0:
                records.append({"case": {"name": f"gpus {Nq}", "kind": "gpus"}, "contenders": {}, "failed": "no time"})
            else:
                with torch.no_grad():
                    budget = min(left.item(), retrieve.CASE_SECONDS)
                    records.append(measure(retrieve.draw_queries(Nq, device), D, args.rounds, budget))
            if rank == 0:
                last = records[-1]
                print(last["case"]["name"], last["contenders"], last.get("parts", ""), flush=True)
                Path(path).write_text(json.dumps(records))
    finally:
        dist.destroy_process_group()


def run(args: argparse.Namespace) -> None:
    """All cases, and the file with what came of them, also where a process fails."""
    world = 2 if args.device == "cpu" else torch.cuda.device_count()
    if world < 2:
        raise SystemExit(f"--gpus: expected several GPUs, found {world}")
    start, error = time.monotonic(), None
    with tempfile.TemporaryDirectory() as directory:
        records = Path(directory) / "records.json"
        records.write_text("[]")
        try:
            torch.multiprocessing.spawn(worker, (world, free_port(), args, str(records)), nprocs=world)
        except Exception as failure:
            error = gpu.reason(failure)
            print(failure)
        settings = {"rounds": args.rounds, "gpus": world, "seconds": time.monotonic() - start, "error": error}
        print("wrote", common.write("retrieve_gpus", json.loads(records.read_text()), path=args.out, **settings))
