"""`benchmarks/retrieval/retrieve.py --gpus`: distributed search with one process per GPU, compared with one GPU alone.

The search is `lik_ops.distributed.retrieve`. The time of one GPU is measured on all GPUs at once: each rank searches
the whole corpus, and the median of the ranks is used. A GPU that just worked is slower than one that has waited, and
here no GPU has waited. ``sustained`` is the time per call of several calls without a sync between them, as in a server
with searches in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import lik_ops
from lik_ops.distributed.agreement import Agreement, all_gather
from lik_ops.distributed.gathering import merge_best

from ..support import common, gpu

QUERIES = (1, 64, 16, 256)
PART_ROUNDS = 7
IN_FLIGHT, SUSTAINED_ROUNDS = 8, 3
SUSTAINED_MS = 500  # work of one GPU, with at least two calls
SECONDS = 3  # limit of each kind of rounds of a case
TIMEOUT = timedelta(seconds=120)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def efficiency(one_ms: float, all_ms: float, gpus: int) -> float:
    """Return the parallel efficiency. It is 1 if `gpus` GPUs need 1 / `gpus` of the time of one."""
    return one_ms / (gpus * all_ms)


def parts_of(Q: Tensor, D: Tensor, k: int) -> dict[str, Callable[[], object]]:
    """Return the parts of a call: this rank's search, the agreement at the start and the merge at the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    begin, end = len(D) * rank // world, len(D) * (rank + 1) // world
    best = lik_ops.retrieve(Q, D[begin:end], k)
    documents = [len(D) * (i + 1) // world - len(D) * i // world for i in range(world)]
    return {
        "local": lambda: lik_ops.retrieve(Q, D[begin:end], k),
        "agree": lambda: Agreement("benchmark", None, (Q,), {"top_k": k}, [0] * 9, None).wait(),
        "merge": lambda: merge_best(best, begin, documents, k, None),
    }


def of_each_rank(times: list[float], device: torch.device) -> list[float]:
    """Return the median over rounds of each rank."""
    mine = torch.tensor([statistics.median(times)], device=device)
    all_ranks = mine.new_empty(dist.get_world_size())
    all_gather(all_ranks, mine, None)
    return all_ranks.tolist()


def in_flight(function: Callable[[], object], calls: int) -> Callable[[], None]:
    """Return a function that makes `calls` calls without waiting for any of them."""

    def queue() -> None:
        for _ in range(calls):
            function()

    return queue


def in_turn(
    functions: dict[str, Callable[[], object]], rounds: int, seconds: float, device: torch.device
) -> dict[str, list[float]]:
    """Return milliseconds of each function over up to `rounds` rounds, with all ranks starting together.

    All ranks run the same number of rounds, at least two. Rank 0 decides by its clock whether another round follows.
    """
    from . import retrieve  # it imports this module

    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.monotonic() + seconds
    for done in range(rounds):
        goes_on = torch.tensor(int(done < 2 or time.monotonic() < end), device=device)
        dist.broadcast(goes_on, 0)
        if not goes_on.item():
            break
        for name, function in functions.items():
            dist.barrier()
            times[name].append(retrieve.seconds_of(function) * 1e3)
    return times


def measure_parts(Q: Tensor, D: Tensor, k: int, rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of each part on each rank, with all ranks starting together.

    ``launch`` is the host time of a whole call until it returns. The host waits only for the agreement.
    """
    from . import retrieve  # it imports this module

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


def figures(times: dict[str, list[float]], device: torch.device) -> dict[str, float]:
    """Return the time of all GPUs (rank 0), the time of one (median of the ranks), and the efficiency."""
    one_ms = statistics.median(of_each_rank(times["one"], device))
    all_ms = of_each_rank(times["all"], device)[0]
    return {"ms": all_ms, "one_ms": one_ms, "efficiency": efficiency(one_ms, all_ms, dist.get_world_size())}


def measure(Q: Tensor, D: Tensor, rounds: int, seconds: float) -> dict:
    """Return the record of one case. Times of all GPUs are rank 0's, until the result is there.

    `parts` show where the time goes on each rank. A call should cost the slowest ``local`` plus ``merge``. On GPUs,
    ``agree`` should cost nothing, because it overlaps with the search.
    """
    from . import retrieve  # it imports this module

    world, k = dist.get_world_size(), min(retrieve.TOP_K, len(D))
    calls: dict[str, Callable[[], object]] = {
        "one": lambda: lik_ops.retrieve(Q, D, k),
        "all": lambda: lik_ops.distributed.retrieve(Q, D, k, progress=False),
    }
    same = torch.tensor(int(retrieve.same_bits(calls["all"](), calls["one"]())), device=Q.device)  # type: ignore[arg-type]
    dist.all_reduce(same, dist.ReduceOp.MIN)
    times = in_turn(calls, rounds, seconds, Q.device)
    found = figures(times, Q.device)
    count = max(2, min(IN_FLIGHT, int(SUSTAINED_MS / found["one_ms"])))
    queues = {name: in_flight(call, count) for name, call in calls.items()}
    sustained = in_turn(queues, min(rounds, SUSTAINED_ROUNDS), seconds, Q.device)
    each_call = {name: [ms / count for ms in queue] for name, queue in sustained.items()}
    parts = {f"{name}_ms": each for name, each in measure_parts(Q, D, k, min(rounds, PART_ROUNDS)).items()}
    found |= {f"sustained_{name}": value for name, value in figures(each_call, Q.device).items()}
    entry: dict = {"failed": "wrong: not the bits of one GPU"}
    if same.item():
        entry = {**found, "best_ms": min(times["all"]), "exact": True}
        entry["beside_local_ms"] = entry["ms"] - max(parts["local_ms"])
    record = retrieve.new_record("gpus", len(Q), len(D), k)
    return record | {"gpus": world, "rounds": len(times["all"]), "parts": parts, "contenders": {"lik_ops": entry}}


def worker(rank: int, world: int, port: int, args: argparse.Namespace, path: str) -> None:
    from . import retrieve

    start = time.monotonic()
    device = "cpu" if args.device == "cpu" else f"cuda:{rank}"
    if args.device != "cpu":
        torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    # Use both backends, because the host sends the first message of a search. All processes are on one machine.
    backend = "gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        D = retrieve.draw(args.documents, device)
        records: list[dict] = []
        for Nq in QUERIES:
            left = torch.tensor(args.seconds - (time.monotonic() - start), device=device)
            dist.broadcast(left, 0)  # else ranks might disagree
            if left.item() <= 0:
                records.append({"case": {"name": f"gpus {Nq}", "kind": "gpus"}, "contenders": {}, "failed": "no time"})
            else:
                with torch.no_grad():
                    budget = min(left.item() / 2, SECONDS)
                    records.append(measure(retrieve.draw_queries(Nq, device), D, args.rounds, budget))
            if rank == 0:
                last = records[-1]
                print(last["case"]["name"], last["contenders"], last.get("parts", ""), flush=True)
                Path(path).write_text(json.dumps(records))
    finally:
        dist.destroy_process_group()


def run(args: argparse.Namespace) -> None:
    """Run all cases and write the results to the file, even if a process fails."""
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
