"""Test the arithmetic and the records of the benchmarks. The timed code needs a GPU and is not run here."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import lik_ops

pytest.importorskip("triton", reason="the GPU benchmarks import triton")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

from benchmarks.calls import (  # noqa: E402
    cpu,
    hosts,
)
from benchmarks.operators import (  # noqa: E402
    cross_entropy,
    forward,
    quantized,
    training,
)
from benchmarks.report import add, before  # noqa: E402
from benchmarks.retrieval import (  # noqa: E402
    fidelity,
    retrieve,
    retrieve_gpus,
)
from benchmarks.support import (  # noqa: E402
    common,
    contenders,
    gpu,
    ragged_cases,
    runs,
)

VARIANTS = list(itertools.product(("", "prefix", "holes"), (False, True), (False, True), (False, True)))


def small(mask="", normalize=False, weighted=False, candidates=False, **more) -> common.Case:
    options = {"mask": mask, "normalize": normalize, "weighted": weighted, "candidates": candidates}
    return common.Case("small", 6, 70, 7, 11, d=16, **{"dtype": "float32", **options, **more})


class Clock:
    """Replacement for `gpu.Timer`: the first function costs one millisecond, and each later function one more."""

    def compare(self, functions):
        return {name: (function(), float(i))[1] for i, (name, function) in enumerate(functions.items(), 1)}


# cases


def test_operations_and_bytes_of_a_case():
    case = common.Case("rerank", 1, 1000, 32, 300)
    assert case.operations == 2 * 1000 * 32 * 300 * 128
    assert case.bytes == 2 * 128 * (32 + 1000 * 300) + 4 * 1000
    case = common.Case(
        "", 2, 3, 4, 5, d=6, dtype="float32", what="winners", mask="holes", weighted=True, candidates=True
    )
    assert case.documents == 6
    assert case.bytes == 4 * 6 * (8 + 30) + (8 + 30) + 4 * 8 + 4 * 6 + 2 * 2 * 3 * 4
    assert case.similarities == 4 * 2 * 3 * 4 * 5


@pytest.mark.parametrize("module", [forward, training, cpu, hosts], ids=lambda module: module.__name__)
def test_names_are_unique(module):
    names = [case.name for case in module.CASES]
    assert len(set(names)) == len(names)
    assert all(isinstance(case, common.Case) for case in module.CASES)


@pytest.mark.parametrize(("mask", "normalize", "weighted", "candidates"), VARIANTS)
def test_eager_and_ours_agree_with_the_reference(mask, normalize, weighted, candidates):
    case = small(mask, normalize, weighted, candidates)
    x = common.Inputs(case)
    scores, argmax = common.eager(x.Q, x.D, **x.options, winners=True)
    assert argmax.shape == (6, 70, 7)
    assert torch.equal(scores, common.eager(x.Q, x.D, **x.options))
    assert common.error_of(x, scores) < 1e-6
    assert common.error_of(x, contenders.forward(case, x)["lik_ops"]()) < 1e-6
    winners = small(mask, normalize, weighted, candidates, what="winners")
    assert torch.equal(contenders.forward(winners, x)["lik_ops"]()[0], contenders.forward(case, x)["lik_ops"]())


def test_wrong_last_document_is_detected():
    x = common.Inputs(small())
    scores = common.eager(x.Q, x.D)
    scores[-1, -1] *= 1.1
    assert common.error_of(x, scores) > 1e-4
    scores[-1, -1] = float("nan")
    assert not common.error_of(x, scores) < forward.TOLERANCE


# gradients


@pytest.mark.parametrize(("mask", "normalize", "weighted", "candidates"), VARIANTS)
def test_training_contenders_have_small_gradient_errors(mask, normalize, weighted, candidates):
    case = small(mask, normalize, weighted, candidates)
    x = common.Inputs(case)
    for name, score in contenders.training(case, x).items():
        if not isinstance(score, str) and name not in contenders.PEERS:
            assert max(training.errors_of(x, score).values()) < 1e-5


def test_wrong_gradients_are_detected():
    case = small()
    x = common.Inputs(case)
    score = contenders.training(case, x)["lik_ops lowmem"]
    assert training.errors_of(x, lambda Q, D: score(Q, 1.1 * D))["error_Q"] > 0.05
    leaking = training.errors_of(x, lambda Q, D: score(Q, D) + 1e-3 * D.sum())
    assert leaking["error_D"] == float("inf")


def test_own_bytes_of_a_training_step():
    case = training.Case("", 2, 3, 4, 5, d=6, dtype="float32")
    assert case.own_bytes == 4 * 6 * (2 * 4 + 3 * 5) + 2 * 2 * 3 * 4 + 4 * 2 * 3


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarm signal")
def test_losses_are_measured_and_checked(capsys):
    case = dataclasses.replace(cross_entropy.CASES[0], Nq=4, Nd=4, Lq=3, Ld=5, d=8, dtype="float32")
    record = cross_entropy.measure(case, lambda functions: dict.fromkeys(functions, 1.0), "cpu")
    cross_entropy.report(record)
    assert "lik_ops" in capsys.readouterr().out
    for name in (cross_entropy.FUSED, "recomputed", "scores"):
        assert max(record["results"][name]["errors"]) < 1e-6
    found = cross_entropy.steps(case, x := common.Inputs(case))[cross_entropy.FUSED]()
    assert max(cross_entropy.errors_of(case, x, tuple(1.1 * g for g in found))) > cross_entropy.TOLERANCE


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarm signal")
def test_slow_first_call_raises_too_slow_error():
    def swallowing() -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    with pytest.raises(gpu.TooSlowError, match="not ready within 0 s"), gpu.time_limit(0.05):
        swallowing()


# searches


def test_agreement_with_true_scores():
    reference = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])

    def of(scores: list[float], indices: list[int]) -> dict[str, float]:
        return retrieve.agreement((torch.tensor([scores]), torch.tensor([indices])), reference)

    assert of([5, 4], [0, 1]) == {"error": 0, "loss": 0, "recall": 1}
    assert of([5, 4], [1, 0])["error"] == 0.25
    assert of([5, 3], [0, 2]) == {"error": 0, "loss": 0.25, "recall": 0.5}
    check = retrieve.check_scores(reference, [0])
    assert check((torch.tensor([[5.0, 4.0]]), torch.tensor([[0, 1]])))["exact"]
    for scores, indices in (([5, 5], [0, 0]), ([5, float("nan")], [0, 1]), ([5, 3], [0, 2])):
        assert check((torch.tensor([scores]).float(), torch.tensor([indices])))["failed"].startswith("wrong")


def test_corpus_prefix_does_not_depend_on_its_size(monkeypatch):
    monkeypatch.setattr(retrieve, "PART", 8)
    D = retrieve.draw(20, "cpu")
    assert torch.equal(D[:11], retrieve.draw(11, "cpu"))
    assert not torch.equal(D[:8], D[8:16])
    assert D.float().norm(dim=-1).sub(1).abs().max() < 0.01


def test_records_of_searches(monkeypatch):
    """Results are checked. A failing contender records its reason, and a contender with a wrong result is not timed."""
    for name, size in (("PEER_CHUNK", 7), ("TOP_K", 5), ("LQ", 4), ("LD", 12), ("DIMENSION", 16)):
        monkeypatch.setattr(retrieve, name, size)
    monkeypatch.setattr(retrieve, "_late", lambda Q, D, k: lambda: 1 / 0)
    monkeypatch.setattr(
        retrieve, "_flash", lambda Q, D, k: lambda: (torch.zeros(len(Q), k), torch.zeros(len(Q), k).long())
    )
    Q, D = retrieve.draw_queries(2, "cpu"), retrieve.draw(20, "cpu")
    end = time.monotonic() + 60
    record = retrieve.resident(Q, D, {"tflops": 1.0, "gbs": 1.0}, lambda: time.sleep(0.01), 2, end)
    entries = record["contenders"]
    assert entries["lik_ops"]["exact"] and entries["lik_ops"]["recall"] == 1 and entries["lik_ops"]["rounds"] == 2
    assert entries["lik_ops"]["of_read"] == record["read_ms"] / entries["lik_ops"]["ms"]
    assert record["read_ms"] > 10
    assert "sustained_ms" not in record
    assert entries["late-interaction-kernels"] == {"failed": "ZeroDivisionError: division by zero"}
    assert entries["flash-maxsim"]["failed"].startswith("wrong")
    assert not entries["eager"]["exact"]
    assert record["operations"] == 2 * 2 * 4 * 20 * 12 * 16
    expected = retrieve.lik_ops.retrieve(Q, D, 5)
    host = {"pinned": D, "pageable": D.clone()}
    entries = retrieve.streamed(Q, host, expected, 1.0, 2, end)["contenders"]
    assert entries["lik_ops pinned"]["exact"] and entries["lik_ops pageable"]["exact"]
    wrong = retrieve.streamed(Q, host, (expected[0], expected[1] + 1), 1.0, 2, end)["contenders"]
    assert wrong["lik_ops pinned"]["failed"].startswith("wrong")
    assert retrieve.on_disk(Q, D, expected, 1.0, 2, end)["contenders"]["lik_ops Corpus"]["exact"]


def test_a_record_of_subsets(monkeypatch):
    """Results have the bits of a search of these documents, and their time is compared with a full search."""
    for name, size in (("TOP_K", 5), ("LQ", 4), ("LD", 12), ("DIMENSION", 16)):
        monkeypatch.setattr(retrieve, name, size)
    Q, D = retrieve.draw_queries(2, "cpu"), retrieve.draw(200, "cpu")
    end, ceiling = time.monotonic() + 60, {"tflops": 1.0, "gbs": 1.0}
    record = retrieve.subset(Q, D, ceiling, 2, end)
    named = {f"lik_ops {name}{given}" for name in ("scattered", "range") for given in ("", ", indices")}
    assert record["case"]["Nd"] == 20 and set(record["contenders"]) == named
    for ours in record["contenders"].values():
        assert ours["exact"] and ours["share_of_full"] == ours["ms"] / record["full_ms"]
    search = retrieve.lik_ops.retrieve
    monkeypatch.setattr(retrieve.lik_ops, "retrieve", lambda *args, subset=None: search(*args))
    entries = retrieve.subset(Q, D, ceiling, 2, end)["contenders"]
    assert all(ours["failed"].startswith("wrong: not the bits") for ours in entries.values())


def test_products_have_the_operations_of_the_case(monkeypatch):
    for name, size in (("PRODUCT", 16), ("TOP_K", 5), ("LQ", 4), ("LD", 12), ("DIMENSION", 16)):
        monkeypatch.setattr(retrieve, name, size)
    for operations in (1000, 2 * 16**3, 21 * 2 * 16**3, 100_000):
        products = retrieve.Products(operations, "cpu")
        products()
        assert products.count * products.share * 2 * 16**3 == pytest.approx(operations)
        assert operations < 2 * 16**3 or 0.8 < products.share < 1.2
    assert torch.equal(products.out, products.a @ products.b.T)
    monkeypatch.setattr(retrieve, "others", lambda Q, D, k: {"gone": "why"})
    Q, D = retrieve.draw_queries(16, "cpu"), retrieve.draw(20, "cpu")
    record = retrieve.resident(Q, D, {"tflops": 1.0, "gbs": 1.0}, None, 2, time.monotonic() + 60)
    assert set(record["contenders"]) == {"lik_ops", "gone"}
    ours = record["contenders"]["lik_ops"]
    assert ours["of_sustained"] == record["sustained_ms"] / ours["ms"]


def test_a_search_without_time_still_writes(monkeypatch, tmp_path):
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["retrieve.py", "--device", "cpu", "--seconds", "0", "--out", str(out)])
    retrieve.main()
    records = json.loads(out.read_text())["records"]
    assert [r["case"]["name"] for r in records] == [f"{kind} {n}" for kind, n in retrieve.PLAN]
    assert all("no time left" in r["failed"] for r in records)


def test_efficiency():
    assert retrieve_gpus.efficiency(10, 5, 2) == 1
    assert retrieve_gpus.efficiency(10, 10, 4) == 0.25


def test_records_of_several_gpus(monkeypatch, tmp_path):
    """Every figure of a case is recorded, and the time of a queue of calls is divided by the number of calls.

    Of the two clocks, the record divides the one that counts searches, at three milliseconds each.
    """
    searches = 0

    def counted(search):
        def call(*args, **kwargs):
            nonlocal searches
            searches += 1
            return search(*args, **kwargs)

        return call

    def seconds_of(function):
        before = searches
        function()
        return 3e-3 * (searches - before)

    monkeypatch.setattr(lik_ops, "retrieve", counted(lik_ops.retrieve))
    monkeypatch.setattr(lik_ops.distributed, "retrieve", counted(lik_ops.distributed.retrieve))
    monkeypatch.setattr(retrieve, "seconds_of", seconds_of)
    for name, size in (("TOP_K", 5), ("LQ", 4), ("LD", 12), ("DIMENSION", 16)):
        monkeypatch.setattr(retrieve, name, size)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        Q, D = retrieve.draw_queries(2, "cpu"), retrieve.draw(2000, "cpu")
        record = retrieve_gpus.measure(Q, D, 3, 5)
    finally:
        torch.distributed.destroy_process_group()
    ours = record["contenders"]["lik_ops"]
    assert ours["exact"] and record["rounds"] == 3
    for prefix in ("", "sustained_"):
        one, every = ours[f"{prefix}one_ms"], ours[f"{prefix}ms"]
        assert ours[f"{prefix}efficiency"] == retrieve_gpus.efficiency(one, every, 1)
    assert [ours[name] for name in ("one_ms", "ms", "sustained_one_ms", "sustained_ms")] == pytest.approx([3.0] * 4)
    assert set(record["parts"]) == {"local_ms", "agree_ms", "merge_ms", "launch_ms"}
    assert record["parts"]["local_ms"] == pytest.approx([3.0]) and record["parts"]["merge_ms"] == [0.0]


# host time


def test_host_time_without_a_gpu(tmp_path):
    """Run in a separate process, because launches stay disabled in it afterwards."""
    out = tmp_path / "found.json"
    options = ["--without-gpu", "--only", "no grad", "--rounds", "60", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.calls.host", *options]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "failed" not in run.stdout, run.stdout + run.stderr[-2000:]
    names = {record["name"] for record in json.loads(out.read_text())["records"]}
    assert {"lik_ops.maxsim", "lik::maxsim_fwd"} <= names and "eager einsum" not in names


# losses of hosts


class PlainLoss(torch.nn.Module):
    """Common part of the losses of all hosts."""

    def __init__(self, model, score, chunk):
        super().__init__()
        self.model, self.score = model, score

    def forward(self, features):
        (Q, q_mask), (D, d_mask) = (self.model(side).values() for side in features)
        scores = self.score(Q, D[:, None], queries_mask=q_mask.bool(), documents_mask=d_mask[:, None].bool())
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(Q)))


def measure_small_case(case):
    return hosts.measure(hosts.cut(case), Clock().compare, time.monotonic() + 60, "cpu")


def test_a_record_of_a_loss(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("broken\nin two lines")

    host = hosts.Host(hosts.eager, hosts.st.colbert_scores, PlainLoss)
    monkeypatch.setattr(hosts, "why_not", lambda name: "")
    monkeypatch.setitem(hosts.HOSTS, "PyLate", (hosts.pylate, lambda: host))
    case = hosts.Case("", 8, 8, 8, 8, host="PyLate", dtype="float32")
    record = measure_small_case(case)
    entries = record["contenders"]
    assert [(r["ms"], r["scoring_ms"]) for r in entries.values()] == [(1, 1), (2, 2), (3, 3)]
    assert all(r[f"error_{key}"] < 1e-5 for r in entries.values() for key in ("loss", "Q", "D"))
    assert max(record["difference"].values()) < 1e-5
    monkeypatch.setitem(hosts.HOSTS, "PyLate", (hosts.pylate, lambda: host._replace(ours=broken)))
    record = measure_small_case(case)
    assert record["contenders"]["lik_ops"] == {"failed": "RuntimeError: broken"}
    assert record["difference"] == {} and record["contenders"]["eager"]["ms"] == 2


def test_unusable_host_is_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr(common, "_version", lambda name: None)
    assert measure_small_case(hosts.CASES[0])["skipped"] == "sentence-transformers is not installed"
    monkeypatch.setattr(common, "_version", lambda name: "1.2")
    assert measure_small_case(hosts.CASES[4])["skipped"] == "pylate 1.2 is older than 1.5.1"


@pytest.mark.parametrize("case", hosts.CASES, ids=lambda case: case.name)
def test_losses_of_the_hosts(case):
    """In fp64, the host's scoring gives the same gradients as lik_ops, in the dtype of the tokens."""
    if why := hosts.why_not(case.host):
        pytest.skip(why)
    ours = measure_small_case(case)["contenders"]["lik_ops"]
    assert max(ours[f"error_{key}"] for key in ("loss", "Q", "D")) < 1e-5


# quantized documents


def test_fidelity_of_scores():
    exact = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    assert fidelity.compared(exact, exact) == {"error": 0, "spearman": 1, "recall10": 1, "recall100": 1}
    assert fidelity.compared(-exact, exact)["spearman"] == pytest.approx(-1)
    assert fidelity.compared(exact + torch.tensor([[0, 0, 0.5, 0, 0]]), exact)["error"] == 0.1
    assert fidelity.recall(exact.flip(1), exact, 2) == 0
    assert fidelity.recall(exact.roll(1, 1), exact, 2) == 0.5


def test_a_record_of_fidelity(monkeypatch):
    """The record distinguishes formats, and a known query finds its document."""
    for name, size in (("LQ", 4), ("LD", 6), ("DIMENSION", 16), ("RANDOM_DOCUMENTS", 30), ("RANDOM_QUERIES", 5)):
        monkeypatch.setattr(fidelity, name, size)
    tokens = fidelity.random_tokens()
    found = fidelity.measure("random", tokens)["formats"]
    assert set(found) == {fidelity.FULL, *fidelity.FORMATS}
    assert 0 < found["int8"]["error"] < 0.01 < found["binary"]["error"]
    assert found["binary"]["spearman"] < found["fp8_e5m2"]["spearman"] <= found["int8"]["spearman"] <= 1
    pytest.importorskip("bm25s", reason="the examples: pip install '.[demo]'")
    asked = tokens._replace(Q=tokens.D.view(30, 6, 16)[:5, :4].contiguous(), known=True)
    assert fidelity.measure("random", asked)["formats"]["int8"]["mrr"] == 1


def test_a_record_of_formats(monkeypatch, capsys):
    monkeypatch.setattr(quantized, "_peers", lambda x: {"peer": lambda: x.Q.new_zeros(len(x.Q), len(x.D))})
    row = quantized.Row(small(), {"int8": 1.0})
    record = quantized.measure(row, Clock(), "cpu")
    assert list(record["ms"]) == ["full", *quantized.FORMATS, "peer"]
    assert list(quantized.measure(row, Clock(), "cpu", own=True)["ms"]) == ["full", *quantized.FORMATS]
    assert list(record["quantize_ms"]) == [x for x in quantized.FORMATS if " x " not in x]
    pooled = quantized.Row(small(), formats=quantized.POOLED)
    assert list(quantized.measure(pooled, Clock(), "cpu")["ms"]) == ["full", "rq2"]
    quantized.report(record | {"ms": {"int8": 2.0, "rq4": 3.0}}, {})
    assert "3.0000 ms, 1.50 of int8, goal 1.3; " in capsys.readouterr().out
    assert record["quality"]["full"]["error"] < 1e-6 < record["quality"]["int8"]["error"] < 0.02
    assert record["bytes"]["int8"] < record["bytes"]["full"]


@pytest.mark.parametrize("tokens", ["topics", "random"])
def test_a_record_of_two_stages(monkeypatch, tokens):
    for name, size in (("LQ", 4), ("LD", 12), ("DIMENSION", 16), ("PART", 32)):
        monkeypatch.setattr(retrieve, name, size)
    record = quantized.search(quantized.Found(tokens, 100), 2, "cpu", time.monotonic() + 60)
    assert set(record["ms"]) == {"full", "int8", "both", "full on the host", "both, full on the host"}
    assert 0 < record["rescored"] <= 1 and 0 < record["recall"] <= 1
    assert record["case"]["name"] == f"search {tokens} 100"


def test_formats_without_a_gpu_or_time_still_write(monkeypatch, tmp_path):
    for seconds in (0, 60):
        out, command = tmp_path / f"{seconds}.json", ["quantized.py", "--device", "cpu", "--seconds", str(seconds)]
        monkeypatch.setattr(sys, "argv", [*command, "--only", "quantized", "--out", str(out)])
        quantized.main()
        records = json.loads(out.read_text())["records"]
        assert [r["case"]["name"] for r in records] == [row.case.name for row in quantized.ROWS]
        assert all(r["failed"].startswith("TimeoutError") for r in records)


# before


def test_peers_of_an_older_run_keep_their_commit():
    def run(commit, **ms):
        record = {"case": {"name": "row"}, "ms": ms, "quality": {name: {} for name in ms}}
        return {"benchmark": "quantized", "environment": {"commit": commit, "gpus": ["GPU"]}, "records": [record]}

    peer = "flash-maxsim int8 x int8"
    once = add.joined(run("a", full=1.0, **{peer: 2.0}), run("b", full=0.5))
    (record,) = add.joined(once, run("c", full=0.25))["records"]
    assert record["ms"] == {"full": 0.25, peer: 2.0} and record["peers_commit"] == "a" and peer in record["quality"]
    (record,) = add.joined(once, run("c", **{peer: 1.0}))["records"]
    assert record["ms"] == {peer: 1.0} and "peers_commit" not in record


def test_rows_of_two_checkouts_are_joined():
    case = small()
    old, new = ([{"ms": ms, "host_us": 9.0, "bits": "a"} for ms in x] for x in ((1.0, 3.0, 2.0), (2.0, 2.02, 9.0)))
    found = before.joined("forward", case, old, new)
    assert found["ms"] == {"old": 2.0, "new": 2.02, "ratio": 1.01} and found["host_us"]["ratio"] == 1 and found["same"]
    assert before.verdict([found]) == []
    slower = before.joined("forward", case, old, [{**x, "ms": 2.1} for x in new])
    other = before.joined("forward", case, old, [*new[:2], {**new[2], "bits": "b"}])
    failed = before.joined("forward", case, old, [{"failed": "why"}])
    assert failed["failed"] == "why"
    assert before.verdict([slower, found, other, failed]) == ["forward, small"] * 3
    assert before.is_slower(before.joined("forward", case, old, [{**x, "host_us": 9.5} for x in new]))


def test_option_and_format_rows_equal_direct_calls():
    case = small(normalize=True)
    x = common.Inputs(case, "cpu")
    assert torch.equal(before.call_of("options", case, "cpu")(), lik_ops.maxsim(x.Q, x.D, normalize=True))
    stored = lik_ops.quantize(x.D, "int8", query="int8")
    assert torch.equal(before.call_of("quantized int8 x int8", case, "cpu")(), lik_ops.maxsim(x.Q, stored))
    kinds = {kind for kind, _ in before.ROWS}
    assert kinds > {"forward", "training", "ragged", "options", "quantized int8", "retrieve"}


def test_rows_that_seem_slower_are_measured_again(monkeypatch, tmp_path):
    class Checkout:
        def __init__(self, folder, rounds):
            self.times = [1.0] if folder.name == "old" else [1.1, 1.0, 1.0]

        def compilers(self, rows):
            return []

        def row(self, n):
            return {"ms": self.times.pop(0) if len(self.times) > 1 else self.times[0], "bits": "a"}

        def commit(self):
            return "old"

    monkeypatch.setattr(before, "Checkout", Checkout)
    options = ["--only", "tiny 8x100", "--turns", "1", "--out", str(tmp_path / "before.json")]
    monkeypatch.setattr(sys, "argv", ["before.py", "old", *options])
    before.main()
    (record,) = json.loads((tmp_path / "before.json").read_text())["records"]
    assert record["turns"] == 3 and record["ms"]["ratio"] == 1


def test_tiny_rows_are_small_cases():
    small = {case.name for _, case in before.ROWS if before.is_small(case)}
    assert {case.name for _, case in before.TINY} <= small and not small & {"pages 64x64", "pairs 4096", "in-batch 64"}


def test_digests_of_checkout_rows_are_deterministic():
    rows = [
        ("forward", small()),
        ("forward", small(what="winners")),
        ("training", training.Case("t", 3, 4, 5, 6, d=16)),
    ]
    rows += [("retrieve", common.Case("r", 2, 120, 4, 6, d=16)), ("ragged", ragged_cases.Case("g", 4, 6, 8, 20))]
    for kind, case in rows:
        with torch.set_grad_enabled(kind == "training"):
            first, again = (before.digest(before.call_of(kind, case, "cpu")()) for _ in range(2))
        assert first == again
    assert before.digest(torch.zeros(3)) != before.digest(torch.tensor([0.0, -0.0, 0.0]))


def test_every_row_is_compiled_and_slow_ones_are_stopped(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "at = {name: sys.argv[sys.argv.index(name, n) + 1] for name, n in (('--only', 1), ('--first', 3))}\n"
        "pathlib.Path(sys.argv[1], at['--only']).write_text(at['--first'])\n"
        "time.sleep(60 if at['--only'] == 'slow' else 0)\n"
    )
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, str(script), str(tmp_path), "--first", "9"])
    start = time.monotonic()
    runs.compile_first(("one", "two", "slow"), 5)
    assert time.monotonic() - start < 30
    found = {path.name: path.read_text() for path in tmp_path.iterdir() if path != script}
    assert found == {"one": "0", "two": "0", "slow": "0"}


def test_run_writes_each_record_immediately(tmp_path, monkeypatch):
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["script.py", "--only", "b", "--out", str(out)])
    run = runs.Run("some", "What it does.", rounds=7)
    args = run.parser.parse_args()
    for n, row in enumerate(run.asked((("a", 1), ("b", 2), ("ab", 3)), args)):
        run.keep({"row": row}, args, more=1)
        document = json.loads(out.read_text())
        assert [r["row"] for r in document["records"]] == [2, 3][: n + 1]
        assert document["settings"] == {"rounds": 7, "more": 1}
