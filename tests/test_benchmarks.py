"""The benchmarks' arithmetic, tables and pictures. What they time needs a GPU and is not run here."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import lik_ops

pytest.importorskip("triton", reason="the GPU benchmarks import triton")
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import before  # noqa: E402
import common  # noqa: E402
import contenders  # noqa: E402
import cpu  # noqa: E402
import cross_entropy  # noqa: E402
import fidelity  # noqa: E402
import forward  # noqa: E402
import gpu  # noqa: E402
import hosts  # noqa: E402
import quantized  # noqa: E402
import ragged  # noqa: E402
import ragged_cases  # noqa: E402
import ragged_contenders  # noqa: E402
import retrieve  # noqa: E402
import retrieve_gpus  # noqa: E402
import tables  # noqa: E402
import training  # noqa: E402

VARIANTS = list(itertools.product(("", "prefix", "holes"), (False, True), (False, True), (False, True)))


def small(mask="", normalize=False, weighted=False, candidates=False, **more) -> common.Case:
    options = {"mask": mask, "normalize": normalize, "weighted": weighted, "candidates": candidates}
    return common.Case("small", 6, 70, 7, 11, d=16, **{"dtype": "float32", **options, **more})


# cases


def test_work_of_a_case():
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


def test_a_wrong_last_document_is_seen():
    x = common.Inputs(small())
    scores = common.eager(x.Q, x.D)
    scores[-1, -1] *= 1.1
    assert common.error_of(x, scores) > 1e-4
    scores[-1, -1] = float("nan")
    assert not common.error_of(x, scores) < forward.TOLERANCE


# gradients


@pytest.mark.parametrize(("mask", "normalize", "weighted", "candidates"), VARIANTS)
def test_gradients_are_checked_at_the_full_shape(mask, normalize, weighted, candidates):
    case = small(mask, normalize, weighted, candidates)
    x = common.Inputs(case)
    for name, score in contenders.training(case, x).items():
        if not isinstance(score, str) and name not in contenders.PEERS:
            assert max(training.errors_of(x, score).values()) < 1e-5


def test_wrong_gradients_are_seen():
    case = small()
    x = common.Inputs(case)
    score = contenders.training(case, x)["lik_ops lowmem"]
    assert training.errors_of(x, lambda Q, D: score(Q, 1.1 * D))["error_Q"] > 0.05
    leaking = training.errors_of(x, lambda Q, D: score(Q, D) + 1e-3 * D.sum())
    assert leaking["error_D"] == float("inf")


def test_bytes_that_a_step_needs():
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
def test_a_slow_first_call_ends():
    def swallowing() -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    with pytest.raises(gpu.TooSlowError, match="not ready within 0 s"), gpu.time_limit(0.05):
        swallowing()


# ragged lengths


def ragged_case(layout: str, mean_q: float = 1.0, what: str = "scores", dtype: str = "float32") -> ragged_cases.Case:
    more = {"candidates": {"K": 5}, "pairs": {"P": 90}}.get(layout, {})
    return ragged_cases.Case("small", 6, 40, 9, 24, d=16, dtype=dtype, mean_q=mean_q, what=what, **more)


RAGGED = list(itertools.product(("cross", "candidates", "pairs"), (1.0, 0.6)))


@pytest.mark.parametrize("most", [32, 300, 1024])
def test_lengths_have_the_mean_that_is_said(most):
    lengths = ragged_cases.draw_lengths(50_000, most, 0.3, torch.Generator().manual_seed(0))
    assert lengths.min() >= 1
    assert lengths.max() == most
    assert lengths.double().mean() / most == pytest.approx(0.3, abs=0.005)
    again = ragged_cases.draw_lengths(50_000, most, 0.3, torch.Generator().manual_seed(0))
    assert torch.equal(lengths, again)


def test_names_of_ragged_cases_and_of_searches_are_unique():
    names = [case.name for case in (*ragged.CASES, *ragged.MASKED)]
    assert len(set(names)) == len(names)
    assert len(set(retrieve.PLAN)) == len(retrieve.PLAN)


@pytest.mark.parametrize(("layout", "mean_q"), RAGGED)
def test_work_of_kept_tokens(layout, mean_q):
    x = ragged_cases.Inputs(ragged_case(layout, mean_q))
    each = [int(x.q_lengths[i] * x.d_lengths[j]) for i, j in x.met.tolist()]
    assert x.operations == 2 * 16 * sum(each)
    met = [set(side.tolist()) for side in x.met.unbind(1)]
    tokens = sum(int(x.q_lengths[i]) for i in met[0]) + sum(int(x.d_lengths[j]) for j in met[1])
    assert x.bytes == 4 * (16 * tokens + len(each))
    dense = ragged_contenders.dense_mean(x)
    assert dense.score(*dense.tokens).shape == x.shape
    assert x.dense_operations == 2 * 16 * len(each) * dense.tokens[0].shape[-2] * dense.tokens[1].shape[-2]
    assert x.operations / x.dense_operations == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize(("layout", "mean_q"), RAGGED)
def test_ragged_contenders_agree_with_the_reference(layout, mean_q):
    for what in ("scores", "step"):
        x = ragged_cases.Inputs(ragged_case(layout, mean_q, what))
        found = {n: c for n, c in ragged_contenders.contenders(x).items() if not isinstance(c, str)}
        for name in (ragged_contenders.PACKED, ragged_contenders.PADDED, ragged_contenders.EAGER):
            score, tokens = found[name]
            assert ragged_cases.error_of(x, score(*tokens)) < 1e-6
            assert max(ragged_cases.errors_of(x, score, tokens).values()) < 1e-5


@pytest.mark.parametrize(("layout", "mean_q"), RAGGED)
def test_wrong_ragged_results_are_seen(layout, mean_q):
    x = ragged_cases.Inputs(ragged_case(layout, mean_q, "step"))
    score, tokens = ragged_contenders.contenders(x)[ragged_contenders.PACKED]
    scores = score(*tokens)
    scores.view(-1)[-1] *= 1.1
    assert ragged_cases.error_of(x, scores) > 1e-4
    assert ragged_cases.errors_of(x, lambda Q, D: score(Q, 1.1 * D), tokens)["error_D"] > 0.05
    leaking = ragged_cases.errors_of(x, lambda Q, D: score(Q, D) + 0.1 * D.sum(), tokens)
    assert leaking["error_D"] > 0.05


class Clock:
    """In place of `gpu.Timer`: the first function takes a millisecond, each of the others one more."""

    def compare(self, functions):
        return {name: (function(), float(i))[1] for i, (name, function) in enumerate(functions.items(), 1)}


CEILING = {"tflops": 1e-3, "gbs": 1.0}


def test_a_ragged_record(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("broken\nin two lines")

    monkeypatch.setattr(ragged_contenders, "_late", lambda x: broken)
    monkeypatch.setattr(ragged_contenders, "_flash", lambda x: "why not")
    monkeypatch.setattr(ragged_contenders, "_flash_padded", lambda x: lambda Q, D: Q.new_zeros(x.shape))
    record = ragged.measure(ragged_case("cross", 0.6), Clock(), CEILING, time.monotonic() + 60, "cpu")
    entries = record["contenders"]
    assert entries["late-interaction-kernels packed"] == {"failed": "RuntimeError: broken"}
    assert entries["flash-maxsim packed"] == {"skipped": "why not"}
    assert entries["flash-maxsim padded"]["failed"].startswith("wrong")
    assert [entries[n]["ms"] for n in ("lik_ops", "lik_ops padded", "padded eager")] == [1, 2, 3]
    assert record["ratio_to_ours"] == {"lik_ops padded": 2, "padded eager": 3}
    dense = record["dense_mean"]
    assert record["ratio_to_dense"] == pytest.approx(dense["operations"] / (4 * record["operations"]))
    assert record["floor_ms"] == max(record["operations"] / 1e6, record["bytes"] / 1e6)
    late = ragged.measure(ragged_case("pairs"), Clock(), CEILING, time.monotonic() - 1, "cpu")
    assert late["contenders"]["lik_ops"] == {"skipped": "no time left"}
    assert "ratio_to_dense" not in late


@pytest.mark.parametrize("what", ["scores", "step"])
def test_a_record_of_masks(what):
    record = ragged.measure_masked(small(what=what), Clock(), "cpu")
    assert record["ratio_to_unmasked"] == {"holes": 2, "prefix": 3}
    assert all(r["exact"] for r in record["contenders"].values())


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


def test_a_corpus_does_not_depend_on_its_size(monkeypatch):
    monkeypatch.setattr(retrieve, "PART", 8)
    D = retrieve.draw(20, "cpu")
    assert torch.equal(D[:11], retrieve.draw(11, "cpu"))
    assert not torch.equal(D[:8], D[8:16])
    assert D.float().norm(dim=-1).sub(1).abs().max() < 0.01


def test_records_of_searches(monkeypatch):
    """What is found is checked; a contender that fails leaves its reason, and one that is wrong is not timed."""
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
    """Every figure of a case is there, and that of a queue of calls is the time of one of them.

    Of two clocks the one that the record divides counts searches, three milliseconds each.
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
    """In a process of its own: launches do nothing in it from then on."""
    out = tmp_path / "found.json"
    options = ["--without-gpu", "--only", "no grad", "--rounds", "60", "--out", str(out)]
    command = [sys.executable, str(BENCHMARKS / "host.py"), *options]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "failed" not in run.stdout, run.stdout + run.stderr[-2000:]
    names = {record["name"] for record in json.loads(out.read_text())["records"]}
    assert {"lik_ops.maxsim", "lik::maxsim_fwd"} <= names and "eager einsum" not in names


# losses of hosts


class PlainLoss(torch.nn.Module):
    """What the losses of hosts have in common."""

    def __init__(self, model, score, chunk):
        super().__init__()
        self.model, self.score = model, score

    def forward(self, features):
        (Q, q_mask), (D, d_mask) = (self.model(side).values() for side in features)
        scores = self.score(Q, D[:, None], queries_mask=q_mask.bool(), documents_mask=d_mask[:, None].bool())
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(Q)))


def measured(case):
    return hosts.measure(hosts.cut(case), Clock().compare, time.monotonic() + 60, "cpu")


def test_a_record_of_a_loss(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("broken\nin two lines")

    host = hosts.Host(hosts.eager, hosts.st.colbert_scores, PlainLoss)
    monkeypatch.setattr(hosts, "why_not", lambda name: "")
    monkeypatch.setitem(hosts.HOSTS, "PyLate", (hosts.pylate, lambda: host))
    case = hosts.Case("", 8, 8, 8, 8, host="PyLate", dtype="float32")
    record = measured(case)
    entries = record["contenders"]
    assert [(r["ms"], r["scoring_ms"]) for r in entries.values()] == [(1, 1), (2, 2), (3, 3)]
    assert all(r[f"error_{key}"] < 1e-5 for r in entries.values() for key in ("loss", "Q", "D"))
    assert max(record["difference"].values()) < 1e-5
    monkeypatch.setitem(hosts.HOSTS, "PyLate", (hosts.pylate, lambda: host._replace(ours=broken)))
    record = measured(case)
    assert record["contenders"]["lik_ops"] == {"failed": "RuntimeError: broken"}
    assert record["difference"] == {} and record["contenders"]["eager"]["ms"] == 2


def test_a_host_that_cannot_be_measured(monkeypatch):
    monkeypatch.setattr(common, "_version", lambda name: None)
    assert measured(hosts.CASES[0])["skipped"] == "sentence-transformers is not installed"
    monkeypatch.setattr(common, "_version", lambda name: "1.2")
    assert measured(hosts.CASES[4])["skipped"] == "pylate 1.2 is older than 1.5.1"


@pytest.mark.parametrize("case", hosts.CASES, ids=lambda case: case.name)
def test_losses_of_the_hosts(case):
    """In fp64 the host's scoring gives the gradients that lik_ops gives, in the dtype of the tokens."""
    if why := hosts.why_not(case.host):
        pytest.skip(why)
    ours = measured(case)["contenders"]["lik_ops"]
    assert max(ours[f"error_{key}"] for key in ("loss", "Q", "D")) < 1e-5


# tables


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_documents_show_the_committed_results(name):
    text = (tables.ROOT / name).read_text()
    assert tables.rewritten(text) == text, "run make figures"


def test_every_block_is_in_a_document():
    text = "".join((tables.ROOT / name).read_text() for name in tables.DOCUMENTS)
    for name in tables.BLOCKS:
        assert f"<!-- {name}: " in text


def test_a_stale_block_is_rewritten(tmp_path):
    document = "before\n<!-- cpu: generated -->\nstale 1.23\n<!-- /cpu -->\nafter\n"
    text = tables.rewritten(document)
    assert "stale" not in text
    assert text.startswith("before\n<!-- cpu: generated -->\n")
    assert text.endswith("<!-- /cpu -->\nafter\n")
    assert tables.rewritten(text) == text


def test_another_precision_is_not_compared():
    ours, exact = {"ms": 3.0, "exact": True}, {"ms": 2.0, "exact": True}
    contenders = {"lik_ops": ours, "eager": exact, "half": {"ms": 1.0, "exact": False}, "gone": {"failed": "why"}}
    assert tables.best_peer({"contenders": contenders}) == ("eager", 2.0)
    assert tables.best_peer({"contenders": {"lik_ops": ours}}) is None
    assert tables.cell(contenders["half"], best=2.0) == "1.0000 *"
    assert tables.cell(exact, best=2.0) == "**2.0000**"
    assert tables.cell(contenders["gone"], best=2.0) == "-"


def written(directory: Path, name: str, records: list[dict], **settings) -> None:
    versions = {"torch": "2.11.0", "late-interaction-kernels": "0.4.5"}
    env = {"gpus": ["NVIDIA H200"], "versions": versions, "commit": "0123456789", "cpu": "", "threads": 1}
    document = {"environment": env, "settings": settings, "records": records}
    (directory / f"{name}.json").write_text(json.dumps(document))


def test_tables_of_what_is_not_measured(tmp_path):
    assert tables.ragged(tmp_path) == "Not measured yet (`benchmarks/ragged.py`)."
    assert tables.retrieve(tmp_path) == "Not measured yet (`benchmarks/retrieve.py`)."
    assert tables.hosts(tmp_path) == "Not measured yet (`benchmarks/hosts.py`)."


def test_table_of_ragged_results(tmp_path):
    case = dataclasses.asdict(ragged.CASES[0])
    entries = {
        "lik_ops": {"ms": 0.02, "exact": True, "peak_mb": 3.4, "host_us": 51.0},
        "lik_ops padded": {"ms": 0.03, "exact": True},
        "padded eager": {"ms": 0.05, "exact": False},
        "flash-maxsim packed": {"failed": "why"},
    }
    record = {
        "case": case,
        "contenders": entries,
        "dense_mean": {"ms": 0.016},
        "ratio_to_dense": 1.234,
        "of_floor": 0.5,
    }
    masks = {"no mask": {"ms": 0.02}, "holes": {"ms": 0.03}}
    masked = {"case": dataclasses.asdict(ragged.MASKED[0]), "contenders": masks, "ratio_to_unmasked": {"holes": 1.5}}
    gone = {"case": case, "contenders": {}, "failed": "no time left"}
    written(tmp_path, "ragged", [masked, record, gone])
    lines = tables.ragged(tmp_path).splitlines()
    assert lines[0].startswith("NVIDIA H200, torch 2.11.0, late-interaction-kernels 0.4.5, commit 0123456.")
    row = (
        "| rerank 1k | 1 x 1000, 32, 300, 128 | 0.0200 | 0.0160 | 1.23 | 0.50 | 1.50x | - | - | - | 2.50x * | 3 | 51 |"
    )
    assert [line for line in lines if line.startswith("| rerank")] == [row]
    assert lines[-1] == "| masked rerank 1k | 1 x 1000, 32, 300, 128 | 0.0200 | 1.50 | - |"


def test_table_of_searches(tmp_path):
    resident = retrieve.new_record("resident", 1, 1_000_000) | {"floor_ms": 10.5, "read_ms": 10.6}
    ours = {"ms": 10.7, "of_floor": 0.9813, "of_sustained": 0.7421, "of_read": 0.9907, "exact": True}
    resident["contenders"] = {"lik_ops": ours, "eager": {"ms": 21.4, "exact": False}, "flash-maxsim": {"failed": "why"}}
    streamed = retrieve.new_record("streamed", 16, 170_000) | {"floor_ms": 150.0}
    streamed["contenders"] = {
        "lik_ops pinned": {"ms": 160.0, "of_floor": 0.9375},
        "lik_ops pageable": {"failed": "why"},
    }
    gone = {"case": {"name": "disk 1", "kind": "disk"}, "contenders": {}, "failed": "no time left"}
    written(tmp_path, "retrieve", [resident, streamed, gone])
    lines = tables.retrieve(tmp_path).splitlines()
    assert lines[-3:] == [
        "| on the GPU | 1 | 1,000,000 | 10.50 | 10.70 | 0.981 | 0.742 | 0.991 | 0.97 | - | - | 2.00x * |",
        "| pinned | 16 | 170,000 | 150.00 | 160.00 | 0.938 | - | - | 0.9 | - | - | - |",
        "| pageable | 16 | 170,000 | 150.00 | - | - | - | - |  | - | - | - |",
    ]
    record = retrieve.new_record("gpus", 64, 1_000_000)
    record["contenders"] = {"lik_ops": {"ms": 65.0, "one_ms": 120.0, "efficiency": 0.923}}
    failed = {"case": {"name": "gpus 1"}, "contenders": {"lik_ops": {"failed": "wrong"}}}
    whole = record | {"parts": {"local_ms": [60.5, 61.25], "agree_ms": [0.06, 0.05], "merge_ms": [0.1, 0.125]}}
    whole["contenders"] = {"lik_ops": record["contenders"]["lik_ops"] | {"sustained_efficiency": 0.981}}
    written(tmp_path, "retrieve_gpus", [record, whole, failed], gpus=2)
    text = tables.retrieve(tmp_path)
    assert text.startswith("\n".join(lines))
    assert text.splitlines()[-2:] == [
        "| 64 | 1,000,000 | 120.00 | 65.00 | - | - | - | 0.92 | - |",
        "| 64 | 1,000,000 | 120.00 | 65.00 | 61.25 | 0.06 | 0.12 | 0.92 | 0.98 |",
    ]
    assert "2 GPUs" in text


def test_table_of_losses(tmp_path):
    theirs = {"ms": 40.0, "peak_mb": 900.4, "scoring_ms": 39.0, "scoring_peak_mb": 800, "error_Q": 0.2, "error_D": 0.3}
    ours = {"ms": 10.0, "peak_mb": 90.0, "scoring_ms": 9.5, "scoring_peak_mb": 80, "error_Q": 1e-9, "error_D": 0.0}
    case = dataclasses.asdict(hosts.CASES[3])
    whole = {"case": case, "contenders": {"sentence-transformers": theirs, "lik_ops": ours, "eager": {"failed": "why"}}}
    gone = {"case": case, "contenders": {}, "skipped": "why"}
    written(tmp_path, "hosts", [whole, gone])
    row = "| cached | sentence-transformers | 256 x 256, 128, 2048, 128 by 32 |"
    assert tables.hosts(tmp_path).splitlines()[-2:] == [
        f"{row} 40.00 (900) | 10.00 (90) | - | 39.00 (800) | 9.50 (80) | 4.00x | 2e-01 / 1e-09 | 3e-01 / 0e+00 |",
        f"{row} - | - | - | - | - | - | - / - | - / - |",
    ]


# quantised documents


def test_fidelity_of_scores():
    exact = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    assert fidelity.compared(exact, exact) == {"error": 0, "spearman": 1, "recall10": 1, "recall100": 1}
    assert fidelity.compared(-exact, exact)["spearman"] == pytest.approx(-1)
    assert fidelity.compared(exact + torch.tensor([[0, 0, 0.5, 0, 0]]), exact)["error"] == 0.1
    assert fidelity.recall(exact.flip(1), exact, 2) == 0
    assert fidelity.recall(exact.roll(1, 1), exact, 2) == 0.5


def test_a_record_of_fidelity(monkeypatch):
    """Formats are told apart, and one query finds what it asks for."""
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


def test_a_record_of_formats(monkeypatch):
    monkeypatch.setattr(quantized, "_peers", lambda x: {"peer": lambda: x.Q.new_zeros(len(x.Q), len(x.D))})
    row = quantized.Row(small(), {"int8": 1.0})
    record = quantized.measure(row, Clock(), "cpu")
    assert list(record["ms"]) == ["full", *quantized.FORMATS, "peer"]
    assert list(quantized.measure(row, Clock(), "cpu", own=True)["ms"]) == ["full", *quantized.FORMATS]
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


def test_tables_of_formats(tmp_path):
    assert tables.formats(tmp_path) == "Not measured yet (`benchmarks/quantized.py`)."
    assert tables.fidelity(tmp_path) == "Not measured yet (`benchmarks/fidelity.py`)."
    each = {"error": 1e-3, "spearman": 0.99986, "recall10": 1.0, "recall100": 0.99}
    ms = {"full": 0.5, "int8": 0.25, "flash-maxsim int8 x int8": 0.75, "flash-maxsim int8 x half": 1.0}
    whole = {"case": dataclasses.asdict(quantized.ROWS[0].case), "ms": ms, "quality": dict.fromkeys(ms, each)}
    found = {"case": {"name": "search topics 100000", "tokens": "topics", "documents": 100_000}}
    found |= {"ms": {"full": 1.0, "int8": 0.5, "both": 0.6}, "rescored": 0.00123, "recall": 0.9}
    written(tmp_path, "quantized", [whole, found, {"case": {"name": "search random 9"}, "failed": "why"}])
    text = tables.formats(tmp_path).splitlines()
    row = "| 1 x 1000, 32, 300, 128 |"
    assert f"{row} 0.5000 | 0.2500 | - | - | - | - | - | - | 0.7500 (flash-maxsim int8 x int8) |" in text
    assert f"{row} 1e-03, 0.9999 | 1e-03, 0.9999 | - | - | - | - | - | - | 1e-03, 0.9999 |" in text
    assert text[-1] == "| topics | 100,000 | 1.00 | 0.50 | 0.60 | - | - | 0.123% | 0.90 |"
    record = {
        "case": {"name": "hashed"},
        "formats": {"full": {"bytes": 256, "mrr": 0.5}, "int8": {"bytes": 132, **each}},
    }
    written(tmp_path, "fidelity", [record], queries=300)
    assert tables.fidelity(tmp_path).splitlines()[-2:] == [
        "| the demo's encoder | full | 256 | 0.500 | - | - | - | - |",
        "| the demo's encoder | int8 | 132 | - | 1.0e-03 | 0.9999 | 1.000 | 0.990 |",
    ]


# pictures


@pytest.fixture(scope="module")
def plot():
    pytest.importorskip("matplotlib", reason='pictures: pip install ".[docs]"')
    import plot

    return plot


def texts(path: Path) -> str:
    return "\n".join(t.text for t in ET.parse(path).iter("{http://www.w3.org/2000/svg}text") if t.text)


def test_pictures_show_the_results(plot, tmp_path):
    document = tables.load("forward")
    path = plot.roofline(out=tmp_path)
    shown = texts(path)
    for record in plot.drawn(document):
        assert record["case"]["name"] in shown
    assert f"{document['settings']['ceilings']['tflops']:.0f} TFLOP/s" in shown
    assert "lik_ops" in shown
    ratios = texts(plot.speed(out=tmp_path))
    for record in document["records"]:
        if (peer := tables.best_peer(record)) and "lik_ops" in tables.timed(record):
            assert f"{peer[1] / record['contenders']['lik_ops']['ms']:.2f}" in ratios
            assert record["case"]["name"] in ratios


def test_pictures_follow_dark_mode(plot, tmp_path):
    svg = plot.roofline(out=tmp_path).read_text()
    ET.fromstring(svg)
    for light, dark in plot.DARK.items():
        assert f": {light}" in svg.partition("@media")[0]
        assert f'[style*="fill: {light}"]{{fill:{dark} !important}}' in svg.partition("prefers-color-scheme: dark")[2]


def test_pictures_are_of_the_committed_results(plot, tmp_path):
    for name in ("forward-roofline.svg", "forward-speed.svg"):
        assert plot.digest() in (plot.IMAGES / name).read_text(), "run make figures"
    shutil.copy(tables.RESULTS / "forward.json", tmp_path)
    document = json.loads((tmp_path / "forward.json").read_text())
    document["settings"]["ceilings"]["tflops"] += 1
    (tmp_path / "forward.json").write_text(json.dumps(document))
    assert plot.digest(tmp_path) != plot.digest()


def test_cases_of_equal_intensity_stand_apart(plot):
    xs = list(plot.spread([32.0, 32.0, 32.1, 128.0]))
    assert xs == sorted(xs)
    assert min(b / a for a, b in itertools.pairwise(xs)) > 1.1
    assert xs[1] == pytest.approx(32)
    assert xs[3] == 128


# before


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


def test_what_two_checkouts_time_has_bits_that_can_be_compared():
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
