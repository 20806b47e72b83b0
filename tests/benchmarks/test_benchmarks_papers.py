"""Test the benchmark of the published tables: no row is lost, contenders agree with fp64, and runs resume."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lik_ops

pytest.importorskip("triton", reason="the GPU benchmarks import triton")

from benchmarks.papers import (
    __main__ as program,
)
from benchmarks.papers import (
    dense,
    estimate,
    measure,
    others,
    plan,
    problem,
    rows,
    stored,
)
from benchmarks.support import common

ROWS = list(rows.every_row())
UNITS = program.units()
PRECISE = 1e-5  # of fp32 on a CPU
QUANTIZED = (plan.OURS_INT8, plan.OURS_INT8_DOCUMENT, plan.OURS_FP8, plan.DEQUANTIZED)


def distinct_contenders() -> list[tuple[plan.Spec, str]]:
    """Return the first spec of each kind, set of parts, and contender."""
    found = {}
    for unit in UNITS:
        for name in unit.names:
            found.setdefault((unit.spec.kind, unit.spec.parts, unit.spec.case.normalize, name), (unit.spec, name))
    return list(found.values())


OWN = [(spec, name) for spec, name in distinct_contenders() if not problem.is_peer(name)]
PEERS = [(spec, name) for spec, name in distinct_contenders() if name.startswith((plan.LATE, plan.FLASH))]


def id_of(value):
    return value.kind if isinstance(value, plan.Spec) else value


def in_fp32(spec: plan.Spec) -> plan.Spec:
    """Return the spec in the size of a test and in fp32, so that no argmax moves by rounding."""
    small = program.shrink(spec)
    return small if spec.kind == "residual" else replace(small, case=replace(small.case, dtype="float32"))


# Rows


def test_every_row_has_a_measurement_or_a_reason():
    assert len(ROWS) == 227 and len(rows.load()) == 39
    assert {table.id for table in rows.load()} == {*plan.TABLES, *plan.NOT_RUN}
    reasons = {row.name: spec for row in ROWS if isinstance(spec := plan.spec_of(row), str)}
    assert {name.rpartition("/")[0] for name in reasons} == set(plan.NOT_RUN) and all(map(len, reasons.values()))
    measured = [name for unit in UNITS if not unit.name.endswith("compiled") for name in unit.rows]
    assert sorted([*measured, *reasons]) == sorted(row.name for row in ROWS)


def test_unknown_row_raises():
    table = replace(ROWS[0].table, id="S99")
    with pytest.raises(KeyError):
        plan.spec_of(rows.PaperRow(table, 0))


@pytest.mark.parametrize("table", rows.load(), ids=lambda table: table.id)
def test_every_column_is_shown_or_has_a_reason(table):
    of = plan.plan_of(table.id)
    if isinstance(of, str):
        return
    used = {*of.shape, *of.not_measured}
    for quantity in of.quantities:
        used |= set(quantity.columns.values())
        for row in (rows.PaperRow(table, n) for n in quantity.rows or range(len(table.rows))):
            spec = of.build(row)
            known = {*spec.contenders, *spec.compiled}
            assert {quantity.ours, *quantity.only} <= known
            part, _, clock = quantity.measure.rpartition(" ")
            if spec.parts and part:
                assert part in spec.parts and (clock == "peak" or clock in spec.clocks), quantity.measure
            if not spec.compiled and table.id != "Fig1+Tab5+23":
                assert set(quantity.columns) <= known
    assert used == set(table.columns)


def test_measurement_names_are_unique_and_compiled_ones_last():
    assert len({unit.name for unit in UNITS}) == len(UNITS)
    kinds = [unit.name.endswith("compiled") for unit in UNITS]
    assert kinds == sorted(kinds) and UNITS[0].name == "S1/0"
    shared = next(unit for unit in UNITS if unit.name == "Tab1+4+21 H100/4")
    assert shared.rows == ("Tab1+4+21 H100/4", "Tab1+4+21 A100/4", "AppB/0")


def test_estimates_are_positive_and_detect_memory_limits():
    assert all(unit.seconds > 0 for unit in UNITS if unit.spec.kind != "analytic")
    largest = next(unit.spec for unit in UNITS if unit.name == "Fig1+Tab5+23/12")
    assert estimate.fits(largest, plan.OURS) and not estimate.fits(largest, plan.EAGER)
    assert estimate.memory_bytes(largest, (plan.OURS,)) == pytest.approx(39.3e9, rel=0.01)


def test_list_option_prints_every_row_and_the_totals(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["papers", "--list"])
    program.main()
    out = capsys.readouterr().out
    assert all(unit.name in out for unit in UNITS) and all(f"{table}/0" in out for table in plan.NOT_RUN)
    assert f"{len(UNITS)} measurements of 210 rows" in out and "110 s with --first" in out


def test_parallel_compilations_have_distinct_tuning_keys():
    chosen = program.to_compile(UNITS)
    specs = [next(unit.spec for unit in UNITS if unit.name == name) for name in chosen]
    assert len({estimate.tuning_key(spec) for spec in specs}) == len(specs) <= program.COMPILED_AT_ONCE
    assert estimate.has_long_argmax(specs[0]) and not estimate.has_long_argmax(specs[-1])


# Contenders


@pytest.mark.parametrize(("spec", "name"), OWN, ids=id_of)
def test_contenders_agree_with_fp64(spec, name, monkeypatch):
    if name.startswith("compiled"):
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    spec = in_fp32(spec)
    made, entry = measure.prepare(measure.KINDS[spec.kind](spec, "cpu"), name)
    if spec.kind == "residual" and name == plan.FAST_PLAID:
        assert made is None and entry == {"skipped": "not installed"}
        return
    assert made is not None, entry
    limit = 2e-2 if name in QUANTIZED else PRECISE
    assert all(error < limit for error in entry["errors"].values()), entry
    assert entry["errors"] or spec.kind == "analytic"
    for part in spec.parts:
        assert f"{part} peak" in entry["values"]


def test_every_compiled_contender_is_compiled_in_its_mode(monkeypatch):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: modes.append(options.get("mode")) or function)
    names = dict.fromkeys(name for unit in UNITS if unit.name.endswith("compiled") for name in unit.names)
    for name in names:
        spec = next(unit.spec for unit in UNITS if unit.name.endswith("compiled") and name in unit.names)
        spec = program.shrink(spec)
        measure.KINDS[spec.kind](spec, "cpu").contender(name)
    assert dict(zip(names, modes, strict=True)) == {**dense.COMPILED_MODES, plan.COMPILED_CDIST: None}


def test_a_wrong_contender_is_not_timed(monkeypatch):
    right = common.eager
    monkeypatch.setattr(common, "eager", lambda *args, **options: right(*args, **options) * 1.1)
    spec = program.shrink(UNITS[0].spec)
    record = measure.measure(spec, (plan.OURS, plan.EAGER_FP32), None, 2, "cpu")
    assert record["contenders"][plan.EAGER_FP32]["failed"].startswith("wrong: relative error 1.0e-01")
    assert record["contenders"][plan.OURS]["values"]["forward cold"]["n"] == 2


def test_out_of_memory_contender_does_not_end_the_row(monkeypatch):
    def exhausted(*args):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(dense, "eager_fp32", exhausted)
    spec = program.shrink(UNITS[0].spec)
    record = measure.measure(spec, (plan.OURS, plan.EAGER_FP32, plan.LATE), None, 2, "cpu")
    assert record["contenders"][plan.EAGER_FP32] == {"failed": measure.OUT_OF_MEMORY}
    assert record["contenders"][plan.LATE] == {"skipped": problem.NEEDS_GPU}
    assert "forward warm" in record["contenders"][plan.OURS]["values"]


def test_out_of_memory_part_times_contenders_separately():
    def sample(calls, clock):
        if len(calls) > 1 or "b" in calls:
            raise torch.OutOfMemoryError("no")
        return {name: [1.0, 2.0, 3.0] for name in calls}

    made = problem.PaperContender({"step": lambda: lambda: None}, dict)
    entries = {name: {"values": {}} for name in "abc"}
    measure.time_part(dict.fromkeys("abc", made), "step", "cold", sample, entries)
    spread = {"median": 2.0, "q1": 1.5, "q3": 2.5, "n": 3}
    assert entries["a"] == entries["c"] == {"values": {"step cold": spread}}
    assert entries["b"]["failed"] == measure.OUT_OF_MEMORY


def test_context_managers_restore_environment_and_tf32(monkeypatch):
    monkeypatch.setenv("PAPERS_A", "before")
    with problem.environment_of(PAPERS_A="x", PAPERS_B="y"):
        assert importlib.import_module("os").environ["PAPERS_A"] == "x"
    assert "PAPERS_B" not in importlib.import_module("os").environ
    before = torch.backends.cuda.matmul.allow_tf32
    with problem.products_in(not before):
        assert torch.backends.cuda.matmul.allow_tf32 is not before
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_chunks_and_mini_batches_cover_all_pairs():
    x = common.Inputs(common.Case("x", 40, 70, 5, 7, d=16, dtype="float32", what="step"))
    assert torch.allclose(dense.eager_chunked(32, x.Q, x.D), common.eager(x.Q, x.D))
    whole = torch.autograd.grad(
        common.eager(q := x.Q.requires_grad_(), d := x.D.requires_grad_(), winners=True)[0], (q, d), x.grad_scores
    )
    parts = dense.mini_batch_step(dense.eager_training, x, x.grad_scores)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("row", [row for row in ROWS if row.table.id == "Tab12"], ids=lambda row: row.name)
def test_drawn_lengths_have_the_published_fill(row):
    lengths = stored.draw_lengths(row["distribution"], 20_000, row["max_Ld"], "cpu")
    assert float(lengths.float().mean()) / row["max_Ld"] == pytest.approx(row["fill"], abs=0.02)
    assert lengths.min() >= 10 and lengths.max() <= row["max_Ld"]


def test_analytic_figures_match_published_figures():
    for row in (row for row in ROWS if row.table.id in ("Tab22", "Tab24")):
        spec = plan.spec_of(row)
        naive, flash = (others.Formulas(spec, "cpu").contender(name).values for name in (plan.EAGER, plan.FLASH))
        if row.table.id == "Tab22":
            assert naive["traffic"] == pytest.approx(row["naive_GB"], rel=0.01)
            assert flash["traffic"] == pytest.approx(row["flash_GB"], rel=0.01)
        else:
            assert f"{naive['S']:.1f} GB" == row["S"] and flash["argmax"] == pytest.approx(row["winners_MB"], rel=0.01)


def test_corpus_larger_than_host_memory_is_rejected(monkeypatch):
    monkeypatch.setattr(others, "host_bytes", lambda: 2**30)
    spec = next(unit.spec for unit in UNITS if unit.name == "Tab9/3")
    record = measure.measure(spec, spec.contenders, None, 2, "cpu")
    assert record["failed"].startswith("MemoryError: needs 197 GB of host memory") and not record["contenders"]


def test_host_memory_is_the_minimum_of_machine_and_container(tmp_path):
    for name, text in {
        "proc/meminfo": "MemTotal:  9 kB\nMemAvailable:   1000000 kB\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "5\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert others.host_bytes(tmp_path) == 1_024_000_000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("4096\n")
    assert others.host_bytes(tmp_path) == 4091
    assert others.host_bytes() > 0


# Peers, with their kernels replaced by lik_ops


def score_all_queries(a):
    return lik_ops.maxsim(a["Q"], a["D"], normalize=a.get("normalize", False))


def score_one_query(a):
    lengths = a.get("doc_lengths")
    mask = None if lengths is None else lik_ops.lengths_to_mask(lengths, a["D"].shape[1])
    return lik_ops.maxsim(a["Q"][None], a["D"], None, mask)[0]


def score_int8_query(a):
    D = a["D_int8"].float() * a["d_scales"].float().reshape(*a["D_int8"].shape[:2], -1)
    Q = a["Q_int8"].float() * a["q_scales"].float().reshape(len(a["Q_int8"]), -1)
    return lik_ops.maxsim(Q[None], D)[0]


def chamfer_of(a):
    return lik_ops.chamfer_distance(a["P"][None], a["Q"][None])[0]


STANDINS = {
    ("late_interaction_kernels", "maxsim"): score_all_queries,
    ("late_interaction_kernels", "maxsim_varlen"): lambda a: lik_ops.maxsim_varlen(
        a["Q_packed"], a["D_packed"], a["cu_seqlens_q"], a["cu_seqlens_d"]
    ),
    ("late_interaction_kernels.fused_head", "maxsim_from_hidden"): lambda a: lik_ops.maxsim_from_hidden(
        a["Q"], a["H_d"], a["W"], a["b"], d_mask=a["d_mask"], normalize=a["normalize"]
    ),
    ("late_interaction_kernels.fp8", "maxsim_inference_fp8"): lambda a: lik_ops.maxsim(
        a["Q"].float() * a["scale_Q"][..., None], a["D"].float() * a["scale_D"][..., None]
    ),
    ("late_interaction_kernels.plaid", "maxsim_residual_varlen"): lambda a: torch.rand(
        len(a["Q"]), len(a["cu_seqlens_d"]) - 1
    ),
    ("flash_maxsim", "flash_maxsim"): score_one_query,
    ("flash_maxsim", "flash_maxsim_batched"): score_all_queries,
    ("flash_maxsim", "flash_maxsim_batched_train"): score_all_queries,
    ("flash_maxsim", "flash_maxsim_packed"): lambda a: lik_ops.maxsim_varlen(
        a["Q"][None], a["D_packed"], cu_seqlens_d=a["cu_seqlens_d"]
    )[0],
    ("flash_maxsim", "flash_chamfer"): chamfer_of,
    ("flash_maxsim", "flash_chamfer_invgrid_train"): chamfer_of,
    ("flash_maxsim.flash_maxsim_quant", "flash_maxsim_int8x8"): score_int8_query,
    ("flash_maxsim.flash_maxsim_exp", "flash_maxsim_streamed"): lambda a: lik_ops.maxsim(a["Q"][None], a["D_cpu"])[0],
}


@pytest.fixture
def standins(monkeypatch):
    """Replace the peers' kernels by lik_ops behind their own signatures."""
    for module in ("late_interaction_kernels", "flash_maxsim"):
        pytest.importorskip(module, reason=f"the peer {module} is not installed")
    used = set()

    def bound(key, function, standin):
        signature = inspect.signature(function)

        def call(*args, **options):
            used.add(key)
            arguments = signature.bind(*args, **options)
            arguments.apply_defaults()
            return standin(arguments.arguments)

        return call

    for key, standin in STANDINS.items():
        module = importlib.import_module(key[0])
        monkeypatch.setattr(module, key[1], bound(key, getattr(module, key[1]), standin))
    return used


def test_peer_calls_match_their_signatures(standins):
    for spec, name in PEERS:
        spec = in_fp32(spec)
        of = measure.KINDS[spec.kind](spec, "cpu")
        made = of.make(name)
        if isinstance(made, str):
            assert (spec.kind, made) == ("chamfer", "no gradients, or not this metric"), (spec, name)
            continue
        for make in made.parts.values():
            make()()
        errors = made.check()
        assert all(error < 5e-2 for key, error in errors.items() if key.startswith("error")), (spec, name, errors)
    assert standins == set(STANDINS)


def test_fast_plaid_searches_an_index_of_all_documents(monkeypatch):
    found = {}

    def searched(command, **options):
        folder = Path(command[command.index("--peer") + 1])
        found["index"], found["queries"] = lik_ops.read_index(folder / "index"), torch.load(folder / "queries.pt")
        (folder / "found.json").write_text(json.dumps({"fast-plaid, 8 probes, 4096 kept": {"ms1": 2.5}}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(common, "_version", lambda package: "1.7")
    monkeypatch.setattr(stored.subprocess, "run", searched)
    of = stored.ResidualDocuments(program.shrink(next(u.spec for u in UNITS if u.spec.kind == "residual")), "cpu")
    assert of.contender(plan.FAST_PLAID).values == {"search wall": 2.5}
    assert len(found["index"]) == len(of.lengths) and found["queries"].shape == of.Q.shape
    monkeypatch.setattr(
        stored.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 3, "", "a\nb\n")
    )
    assert of.contender(plan.FAST_PLAID) == "status 3: b"


# Runs


@pytest.fixture
def run(tmp_path, monkeypatch):
    out = tmp_path / "papers.json"
    monkeypatch.setattr(common, "environment", lambda *packages: {"gpus": [], "commit": "0" * 40, "versions": {}})

    def call(only, seconds="0"):
        arguments = ["--device", "cpu", "--rounds", "2", "--only", only, "--seconds", seconds, "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["papers", *arguments])
        program.main()
        return json.loads(out.read_text())

    return call


def test_a_run_continues_where_its_file_ended(run, capsys, monkeypatch, tmp_path):
    only = "S1/0,S1/6,Tab12/0,Tab24"
    monkeypatch.setattr(program.Unit, "seconds", property(lambda unit: 1.0))
    names = [record["case"]["name"] for record in run(only)["records"]]
    assert names == ["S1/0"] and "4 measurements are left" in capsys.readouterr().out
    first = run(only)["records"]
    assert [record["case"]["name"] for record in first] == ["S1/0", "S1/6"]
    document = run(only, "100")
    assert document["records"][:2] == first and len(document["records"]) == 5
    assert "All measurements have a result." in capsys.readouterr().out
    again = run(only, "100")
    assert again["records"] == document["records"]
    results = program.Results(tmp_path / "out.json", {})
    results.records = {"S1/0": document["records"][0], "S1/6": {**document["records"][1], "started": 1}}
    first, second = (program.Unit(name, None, (), ()) for name in ("S1/0", "S1/6"))
    assert results.start(first) == {}, "a finished row is measured again in full"
    assert results.start(second) == document["records"][1]["contenders"]
    assert all(record["rows"] and "started" not in record for record in again["records"])
    values = again["records"][0]["contenders"][plan.OURS]["values"]
    assert values["forward cold"]["n"] == 2 and values["forward cold"]["q1"] <= values["forward cold"]["q3"]


def test_rows_are_divided_among_gpus_and_merged(tmp_path):
    parts = program.divide(UNITS, 4)
    assert sorted(unit.name for part in parts for unit in part) == sorted(unit.name for unit in UNITS)
    sums = [sum(unit.seconds for unit in part) for part in parts]
    assert max(sums) - min(sums) <= max(unit.seconds for unit in UNITS)
    out = tmp_path / "papers.json"
    command = [sys.executable, "-m", "benchmarks.papers", "--device", "cpu", "--rounds", "1", "--gpus", "2"]
    command += ["--only", "S1/0,S1/6,Tab12/0", "--out", str(out)]
    left = {"case": {"name": "Tab12/0"}, "rows": [], "contenders": {}}  # of a process that was killed
    out.with_suffix(".gpu1.json").write_text(json.dumps({"records": [left], "settings": {}}))
    subprocess.run(command, cwd=common.RESULTS.parents[1], check=True, capture_output=True)
    document = json.loads(out.read_text())
    records = {record["case"]["name"]: record for record in document["records"]}
    assert sorted(records) == ["S1/0", "S1/6", "Tab12/0"] and records["Tab12/0"] == left
    assert records["S1/0"]["contenders"][plan.OURS]["values"] and document["settings"]["gpus"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["papers.json"]


def test_a_failing_row_is_recorded_and_the_next_one_runs(run, monkeypatch):
    def fails(*args):
        raise RuntimeError("broken row")

    monkeypatch.setitem(measure.KINDS, "ragged", fails)
    records = run("Tab12/0,Tab24/0", "100")["records"]
    assert records[0]["failed"] == "RuntimeError: broken row" and "failed" not in records[1]


def test_row_that_kills_the_program_has_limited_retries(run, monkeypatch):
    def killed(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "measure", killed)
    for n in range(1, program.ATTEMPTS + 1):
        with pytest.raises(KeyboardInterrupt):
            run("Tab24/0")
        (record,) = json.loads(Path(sys.argv[-1]).read_text())["records"]
        assert record["started"] == n and record["failed"] == "the program ended during this row"
    assert run("Tab24/0")["records"] == [record]


def test_device_breaking_contender_is_skipped_after_restart(run, monkeypatch):
    restarts, broken = [], {"now": False}
    right = dense.eager_fp32

    def breaks(*args):
        broken["now"] = True
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(dense, "eager_fp32", breaks)
    monkeypatch.setattr(measure, "is_broken", lambda: broken["now"])
    monkeypatch.setattr(program, "start_again", restarts.append)
    (record,) = run("S1/0")["records"]
    assert len(restarts) == 1 and record["started"] == 1
    failed = record["contenders"][plan.EAGER_FP32]
    assert failed == {"failed": "RuntimeError: illegal memory access", "broke_device": True}
    broken["now"] = False
    monkeypatch.setattr(dense, "eager_fp32", right)
    (record,) = run("S1/0")["records"]
    assert record["contenders"][plan.EAGER_FP32] == failed and "started" not in record
    assert "forward warm" in record["contenders"][plan.OURS]["values"]
