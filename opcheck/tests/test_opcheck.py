"""Tests of `lik_ops.opcheck`: the checks pass for every operator, and each check finds the fault it is made for."""

import pytest
import torch

import lik_ops
from lik_ops.opcheck import __main__ as command
from lik_ops.opcheck import checks, graphs, report
from lik_ops.opcheck.samples.inputs import OperatorCase
from lik_ops.opcheck.samples.table import OPERATORS, list_registered

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _selections():
    """Yield checks and selections of samples.

    Most GPU selections have one dtype, because compiling the kernels of a dtype needs minutes.
    """
    for check in checks.CHECKS:
        yield pytest.param(check, checks.Selection("cpu"), id=f"{check}-cpu")
        each = (None,) if check in checks.OF_ALL_DTYPES else [(dtype,) for dtype in checks.GPU_DTYPES]
        for dtypes in each:
            name = str(dtypes[0]).removeprefix("torch.") if dtypes else "all"
            selection = checks.Selection("cuda", dtypes=dtypes)
            yield pytest.param(check, selection, id=f"{check}-cuda-{name}", marks=pytest.mark.gpu)


of_every_operator = pytest.mark.parametrize("op", OPERATORS)


@pytest.mark.parametrize(("check", "of"), [*_selections()])
@of_every_operator
def test_some_samples_of_every_operator(op, check, of):
    """Run every check on some samples.

    `torch.library.opcheck` is slow and depends little on the dtype. It runs on every 11th sample, and the samples are
    divided among the dtypes. Every 5th sample includes all formats of quantized documents and precisions of queries.
    """
    if check != "opcheck":
        assert checks.CHECKS[check](op, OPERATORS[op], of._replace(every=5)) > 0
        return
    dtypes = of.dtypes or checks.choose_dtypes(of.device)
    parts = [of._replace(every=11 * len(dtypes), dtypes=(x,), first=11 * n) for n, x in enumerate(dtypes)]
    assert sum(checks.CHECKS[check](op, OPERATORS[op], part) for part in parts) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("check", "of"), [*_selections()])
@of_every_operator
def test_every_sample(op, check, of):
    """Run every check on all samples."""
    assert checks.CHECKS[check](op, OPERATORS[op], of) > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", graphs.SNAPSHOTS)
def test_snapshots(name, device):
    """Compare the snapshots of graphs."""
    graphs.check_snapshot(name, device)


def test_every_operator_has_samples():
    """Check that the table is complete."""
    assert list_registered() == set(OPERATORS)


class Wrong:
    """The library of an operator that breaks one rule."""

    def __init__(self):
        self.library = torch.library.Library("lik", "FRAGMENT")
        self.library.define("wrong(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask) -> Tensor")

    def register(self, function, fake):
        """Register the CPU and Meta kernels of the operator."""
        self.library.impl("wrong", function, "CPU")
        self.library.impl("wrong", fake, "Meta")


@pytest.fixture
def wrong():
    """Provide `Wrong`, and remove its operator after the test."""
    holder = Wrong()
    yield holder
    holder.library._destroy()


def _scores(Q, D, q_mask, d_mask):
    return lik_ops.maxsim(Q, D, q_mask, d_mask)


def _samples(dtype, device):
    for sample in OPERATORS["maxsim"].samples(dtype, device):
        if "options" not in sample.name and len(sample.args) == 4:
            yield checks.Sample(sample.name, tuple(None if a is None else a.detach() for a in sample.args), {})


def _wrong_operator():
    return OperatorCase(_samples, OPERATORS["maxsim"].reference, OPERATORS["maxsim"].sized)


def _fake(Q, D, q_mask, d_mask):
    return Q.new_empty((Q.shape[0], D.shape[-3]), dtype=torch.float64 if Q.dtype == torch.float64 else torch.float32)


FAULTS = {
    "values": (lambda *a: _scores(*a) * 1.01, _fake, "differs from the reference"),
    "meta": (_scores, lambda *a: _fake(*a).to(torch.float16), "on meta tensors"),
    "strides": (lambda Q, *a: _scores(Q.contiguous().mul_(1 + (Q.stride(-1) != 1)), *a), _fake, "another result"),
    "opcheck": (_scores, lambda *a: _fake(*a).new_empty(7), ""),
    "gradients": (_scores, _fake, "expected NotImplementedError|does not require grad"),
    "recompiles": (_scores, lambda Q, *a: _fake(Q, *a).new_empty((int(Q.shape[0]), a[0].shape[-3])), "compilation"),
}


@pytest.mark.parametrize("check", FAULTS)
def test_each_check_detects_its_fault(check, wrong):
    """Check that each check finds its fault."""
    function, fake, message = FAULTS[check]
    wrong.register(function, fake)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        checks.CHECKS[check]("wrong", _wrong_operator(), checks.Selection("cpu", 5))
    with pytest.raises(AssertionError, match="wrong"):
        checks.check_table()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda Q, D, *a: _scores(Q, D.mul_(2), *a), "an input was written"),
        (lambda Q, D, *a: Q[:, 0, :1], "shares memory"),
    ],
    ids=["written", "returned"],
)
def test_strides_check_detects_mutated_and_returned_inputs(wrong, function, message):
    """Check that mutated and returned inputs are found."""
    wrong.register(function, _fake)
    with pytest.raises(AssertionError, match=message):
        checks.CHECKS["strides"]("wrong", _wrong_operator(), checks.Selection("cpu"))


def test_changed_snapshot_raises(monkeypatch):
    """Check that a changed snapshot raises."""
    make, expected = graphs.SNAPSHOTS["exported"]
    monkeypatch.setitem(graphs.SNAPSHOTS, "exported", (make, expected + "\nlik.maxsim"))
    with pytest.raises(AssertionError, match="expected"):
        graphs.check_snapshot("exported", "cpu")


def test_command_output_and_exit_codes(monkeypatch, capsys):
    """Check the output and exit code of the command."""

    def fine(name, op, of):
        return 3

    def broken(name, op, of):
        raise AssertionError("as it happens")

    monkeypatch.setattr(checks, "CHECKS", {"fine": fine})
    monkeypatch.setattr(graphs, "SNAPSHOTS", {})
    assert command.main(["--op", "maxsim"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == list(report.HEADER) and lines[-1] == "all passed"
    assert [line.split()[:3] for line in lines[2:4]] == [
        ["all", "table", str(len(OPERATORS))],
        ["maxsim", "fine", "3"],
    ]
    monkeypatch.setitem(checks.CHECKS, "broken", broken)
    assert command.main(["--op", "maxsim", "--op", "maxsim_fwd"]) == 1
    out = capsys.readouterr().out
    assert "as it happens" in out and out.endswith("2 failed\n")
    for bad in (["--device", "nowhere"], ["--every", "0"], ["--jobs", "0"], ["--op", "other"]):
        with pytest.raises(SystemExit) as stop:
            command.main(bad)
        assert stop.value.code == 2


def test_one_and_two_processes_give_the_same_results(monkeypatch):
    """Compare the results of one and two processes, on checks that compile nothing.

    One of the checks has all dtypes at once.
    """
    monkeypatch.setattr(checks, "CHECKS", {name: checks.CHECKS[name] for name in ("meta", "values", "strides")})
    monkeypatch.setattr(checks, "OF_ALL_DTYPES", ("meta",))
    monkeypatch.setattr(graphs, "SNAPSHOTS", {"schemas": graphs.SNAPSHOTS["schemas"]})
    alone, shared = (
        {r[:2]: (r.cases, r.outcome) for r in report.run_checks("cpu", ["maxsim_fwd"], 40, n)} for n in (1, 2)
    )
    assert shared == alone and len(alone) == 1 + len(checks.CHECKS) + len(graphs.SNAPSHOTS)
    assert "FAIL" not in {outcome for _, outcome in alone.values()}
    parts = [report.CheckResult("op", "check", 2, 1.5, error) for error in (None, "first", "second")]
    joined = report._join_results(parts)
    assert (joined.cases, joined.seconds, joined.error) == (6, 4.5, "first\nsecond") and joined.outcome == "FAIL"
