"""Test the decisions of the regression gates, and that the slower copies of their proof are slower."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU benchmarks import triton")

from benchmarks.gate import (
    checkouts,
    count,
    device,
    host,
    proof,
    simulate,
    verdicts,
)
from benchmarks.report import before

NAME = "no grad, lik_ops.maxsim"


def test_slower_and_removed_rows_are_refused():
    old = {"equal": 100.0, "slower": 100.0, "at the limit": 100.0, "faster": 100.0, "gone": 100.0}
    new = {"equal": 100.0, "slower": 103.1, "at the limit": 103.0, "faster": 96.0, "added": 5.0}
    rows = verdicts.compare(old, new)
    assert {row.name: row.verdict for row in rows if row.verdict} == {
        "slower": "slower",
        "faster": "faster",
        "added": "added",
        "gone": "removed",
    }
    assert verdicts.refused(rows) == ["slower", "gone"]
    table = verdicts.format_table(rows, "ms", 4).splitlines()
    assert table[0].split() == ["row", "old,", "ms", "new,", "ms", "ratio"]
    assert table[-1].split() == ["slower", "100.0000", "103.1000", "1.0310", "slower"]


def test_the_count_of_a_row_is_the_smallest_of_its_blocks(tmp_path):
    for n, total in enumerate([4400, 4000, 4100, 320, 640, 960]):
        (tmp_path / f"dump.{n + 1}").write_text(f"events: Ir\nsummary: 7\n\ntotals: {total}\n")
    rows = [{"kind": "no grad", "name": "a", "calls": 40}, {"kind": "training", "name": "b", "calls": 320}]
    assert count.BLOCKS == 3 and host.read_dumps(tmp_path, rows) == {"no grad, a": 100, "training, b": 1}
    (tmp_path / "dump.1").write_text("totals: 0\n")
    with pytest.raises(SystemExit, match="counted no instructions"):
        host.read_dumps(tmp_path, rows)


class HostGateRun:
    """Replacement for `host.instructions`: the counts of each folder, one after the other."""

    def __init__(self, monkeypatch, tmp_path, recorded, new, old=(), version="2.0"):
        self.left = {"new": list(new), "old": list(old)}
        record = {"records": [{"name": NAME, "instructions": recorded}], "settings": {"counted_with": {"torch": "2.0"}}}
        (tmp_path / "record.json").write_text(json.dumps(record))
        (tmp_path / "old").mkdir()
        monkeypatch.setattr(host, "RECORD", tmp_path / "record.json")
        monkeypatch.setattr(host, "versions", lambda: {"torch": version})
        monkeypatch.setattr(host, "instructions", lambda folder, only: {NAME: self.left[folder.name].pop(0)})
        monkeypatch.setattr(checkouts, "last_commit_of", lambda path: str(tmp_path / "old"))
        self.status = host.main(["--new", str(tmp_path / "new")])


def test_equal_counts_pass_without_counting_the_commit_of_the_record(monkeypatch, tmp_path):
    counted = HostGateRun(monkeypatch, tmp_path, 1000, new=[1020])
    assert counted.status == 0 and counted.left == {"new": [], "old": []}


def test_slower_path_is_refused_after_a_local_recount(monkeypatch, tmp_path, capsys):
    counted = HostGateRun(monkeypatch, tmp_path, 1000, new=[1500, 1490], old=[1000])
    assert counted.status == 1 and counted.left == {"new": [], "old": []}
    assert f"REFUSED: 1 of 1 rows: {NAME}" in capsys.readouterr().out


def test_higher_counts_in_both_checkouts_pass(monkeypatch, tmp_path):
    counted = HostGateRun(monkeypatch, tmp_path, 1000, new=[1100], old=[1095])
    assert counted.status == 0 and counted.left == {"new": [], "old": []}


@pytest.mark.parametrize(("new", "status"), [([900], 0), ([1000, 1000], 1)])
def test_version_mismatch_recounts_the_recorded_commit(monkeypatch, tmp_path, new, status):
    """The record would accept both counts, but the older code needs 900 instructions with these versions."""
    assert HostGateRun(monkeypatch, tmp_path, 1000, new=new, old=[900], version="2.1").status == status


def test_committed_record_has_plausible_counts():
    counts, counted_with = host.read_record()
    assert NAME in counts and len(counts) > 20 and set(counted_with) == {"python", "valgrind", "torch", "triton"}
    assert all(n > 1000 for n in counts.values())


def commit(repository: Path, text: str) -> str:
    (repository / "file").write_text(text)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    checkouts.git("add", "file", root=repository)
    checkouts.git(*author, "commit", "--quiet", "-m", text, root=repository)
    return checkouts.git("rev-parse", "HEAD", root=repository)


def test_a_base_is_a_folder_or_a_commit(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    checkouts.git("init", "--quiet", root=repository)
    first, second = commit(repository, "first"), commit(repository, "second")
    with checkouts.checked_out(repository) as folder:
        assert folder == repository.resolve()
    with checkouts.checked_out("HEAD~1", root=repository) as folder:
        assert (folder / "file").read_text() == "first" and checkouts.git("rev-parse", "HEAD", root=folder) == first
    assert not folder.exists() and len(checkouts.git("worktree", "list", root=repository).splitlines()) == 1
    assert checkouts.last_commit_of(repository / "file", root=repository) == second
    with pytest.raises(SystemExit, match="unknown"), checkouts.checked_out("unknown", root=repository):
        pass
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{repository}", tmp_path / "shallow"], check=True)
    with pytest.raises(SystemExit, match="shallow"):
        checkouts.last_commit_of(tmp_path / "shallow" / "file", root=tmp_path / "shallow")


def turns(ms: float, bits: str = "a") -> list[dict]:
    return [{"ms": ms * noise, "bits": bits} for noise in (1.1, 1, 0.9)]


def test_device_verdicts_use_medians_and_detect_failures():
    row = device.comparison_of("row", (turns(2), turns(2.1, "b")))
    assert row.ratio == pytest.approx(1.05) and row.verdict == "slower" and row.note == "other bits"
    failed = [{"failed": "no memory"}, *turns(1)]
    assert device.comparison_of("row", (turns(2), failed)).verdict == "removed"
    assert device.comparison_of("row", (failed, turns(2))).verdict == "added"
    assert device.conclude([device.comparison_of("row", (turns(2), turns(2.05)))], []) == 0


@pytest.mark.parametrize(("rows", "left"), [([], []), ([("row", (turns(2), turns(2)))], ["another row"])])
def test_rows_without_a_measurement_are_refused(rows, left, capsys):
    assert device.conclude([device.comparison_of(*row) for row in rows], left) == 1
    assert "REFUSED: no" in capsys.readouterr().out


def test_only_suspicious_rows_are_measured_again():
    class Checkout:
        def __init__(self, times):
            self.times = times
            self.measured = []

        def row(self, n):
            self.measured.append(n)
            times = self.times[n]
            return {"ms": times.pop(0) if len(times) > 1 else times[0], "bits": ""}

    old, new = Checkout({0: [1.0], 1: [1.0], 2: [1.0]}), Checkout({0: [1.01], 1: [1.04, 1.0], 2: [1.04]})
    found, left = device.measure_rows((old, new), [0, 1, 2], 1, float("inf"))
    assert new.measured == [0, 1, 2, 1, 2, 1, 2, 2, 2] and not left
    rows = [device.comparison_of(str(n), both) for n, both in found.items()]
    assert verdicts.refused(rows) == ["2"]
    assert device.measure_rows((old, new), [0], 1, float("-inf")) == ({}, [device.name_of(0)])


@pytest.mark.parametrize(("ms", "status"), [(1.02, 0), (1.05, 1)])
def test_the_device_gate_measures_both_checkouts_and_writes_every_turn(monkeypatch, tmp_path, ms, status):
    class Checkout:
        def __init__(self, folder, rounds):
            self.ms = ms if folder.name == "new" else 1.0
            self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            made.append(self.process)

        def compilers(self, rows):
            return []

        def row(self, n):
            return {"ms": self.ms, "bits": ""}

    made: list[subprocess.Popen] = []
    monkeypatch.setattr(before, "Checkout", Checkout)
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        folder.mkdir()
    options = ["--only", "^forward, pages", "--new", str(folders[1]), "--out", str(tmp_path / "gate.json")]
    assert device.main([str(folders[0]), *options]) == status
    records = json.loads((tmp_path / "gate.json").read_text())["records"]
    assert {record["name"] for record in records} >= {"forward, pages 64x64", "forward, pages 1x1k"}
    assert {x["ms"] for record in records for x in record["new"]} == {ms}
    assert len(records[0]["new"]) == 3 * (1 + device.AGAIN) and all(process.poll() is not None for process in made)


def test_noise_keeps_false_refusals_low_and_detects_5_percent():
    """Shares of 100 runs. Of 2,000 runs, `python -m benchmarks.gate.simulate` prints the same up to 1 %."""
    rates = simulate.rates(100)
    assert rates["equal kernels refused"] <= 0.01
    assert rates["5 % in one row refused"] >= 0.98


EXPLAIN = "-m lik_ops.info --explain --arch sm_90 --nq 64 --nd 10000 --lq 32 --ld 180"


def test_the_slower_copies_have_the_loop_and_start_fewer_programs(tmp_path):
    for folder in ("lik_ops", "csrc_triton", "opcheck"):
        shutil.copytree(checkouts.ROOT / folder, tmp_path / folder, symlinks=True)
    iterations = proof.slow_python(tmp_path)
    assert f"range({iterations})" in (tmp_path / "lik_ops/api/score.py").read_text()
    proof.slow_kernel(tmp_path, 5)
    command, environment = [sys.executable, *EXPLAIN.split()], {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert "dense.py), grid (121,)" in done.stdout, done.stderr  # 128 of an unchanged checkout
    with pytest.raises(SystemExit, match="0 places"):
        proof.slow_kernel(tmp_path, 5)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("valgrind"), reason="the host gate counts instructions with Valgrind")
def test_three_microseconds_of_python_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["proof.py", "host"])
    assert proof.main() == 0
