"""Test warnings and log lines about suspicious values: their cause, their frequency, and how to turn them off."""

import logging
import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

import lik_ops
from lik_ops.ops.checks import hints
from lik_ops.ops.fast_path import eager

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Reset the state of warnings and call caches to the state of a fresh process."""
    monkeypatch.setattr(hints, "_issued_warnings", set())
    monkeypatch.setattr(hints, "_inspected_calls", {})
    monkeypatch.delenv("LIK_OPS_NORM_WARNING", raising=False)
    eager.clear_call_caches()


def tokens(*shape, scale=1.0, device="cpu"):
    return scale * F.normalize(torch.randn(*shape, device=device), dim=-1)


def packed(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


CALLS = {
    "maxsim": lambda Q, D, **o: lik_ops.maxsim(Q, D, **o),
    "maxsim_pairs": lambda Q, D, **o: lik_ops.maxsim_pairs(Q, D[: len(Q)], **o),
    "maxsim_with_argmax": lambda Q, D, **o: lik_ops.maxsim_with_argmax(Q, D, **o),
    "maxsim of lists": lambda Q, D, **o: lik_ops.maxsim(list(Q), list(D), **o),
    "maxsim_varlen": lambda Q, D, **o: lik_ops.maxsim_varlen(Q, D.flatten(0, 1), None, packed([9] * 5), **o),
    "maxsim_soft": lambda Q, D, **o: lik_ops.maxsim_soft(Q, D, 0.1, **o),
    "maxsim_cross_entropy": lambda Q, D, **o: lik_ops.maxsim_cross_entropy(Q, D, **o),
    "retrieve": lambda Q, D, **o: lik_ops.retrieve(Q, D, 2, **o),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("side", ["Q", "D"])
def test_tokens_that_look_unnormalized_warn_once(name, side):
    Q, D = tokens(3, 4, 16, scale=3.0 if side == "Q" else 1.0), tokens(5, 9, 16, scale=3.0 if side == "D" else 1.0)
    with pytest.warns(UserWarning, match=f"{side}: expected tokens of norm 1 .* got norms around 3. Pass") as found:
        CALLS[name](Q, D)
    assert [x.filename for x in found] == [__file__]
    assert "or `with lik_ops.norm_warning(False):`." in str(found[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in CALLS.values():
            call(Q, D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", CALLS)
def test_no_norm_warning_if_normalized_or_disabled(name, dtype, monkeypatch):
    Q, D = tokens(3, 4, 16).to(dtype), tokens(5, 9, 16).to(dtype)
    D[:, 5:] = 0  # padding
    D[0, 0] *= 5  # one token
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CALLS[name](Q, D)
        CALLS[name](3 * Q, D, normalize=True)
        with lik_ops.norm_warning(False):
            CALLS[name](3 * Q[1:], D)
        monkeypatch.setenv("LIK_OPS_NORM_WARNING", "0")
        CALLS[name](3 * Q[2:], D)
        lik_ops.maxsim(Q, lik_ops.quantize(3 * D.float()), normalize=False) if dtype == torch.float32 else None
    monkeypatch.setenv("LIK_OPS_NORM_WARNING", "no")
    with pytest.raises(ValueError, match="LIK_OPS_NORM_WARNING: expected 0 or 1, got 'no'"):
        CALLS[name](3 * torch.cat([Q, Q]), torch.cat([D, D]))


def test_norm_warning_ignores_masked_tokens():
    Q, D = tokens(2, 4, 16), tokens(3, 9, 16)
    D[:, 2:] *= 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lik_ops.maxsim(Q, D, d_mask=torch.arange(9).expand(3, 9) < 2)
    with pytest.raises(TypeError, match="norm_warning: enabled: expected a bool, got int"):
        lik_ops.norm_warning(1).__enter__()


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_gpu_tokens_are_inspected_only_under_checks(device):
    Q, D = tokens(2, 4, 16, scale=2.0, device=device), tokens(3, 9, 16, device=device)
    if device == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lik_ops.maxsim(Q, D)
    with lik_ops.checks(), pytest.warns(UserWarning, match="Q: expected tokens of norm 1"):
        lik_ops.maxsim(Q, D[:2])


def test_repeated_call_is_not_inspected_again(monkeypatch):
    Q, D = tokens(2, 4, 16), tokens(3, 9, 16)
    lik_ops.maxsim(Q, D)
    monkeypatch.setattr(hints, "inspect_tokens", lambda *_: pytest.fail("a known description was read again"))
    for _ in range(5):
        lik_ops.maxsim(Q, D)
        lik_ops.maxsim(Q + 1, D)


def test_number_of_inspected_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(hints, "_find_unusual_norm", lambda *_: seen.append(1))
    seen = []
    for n in range(1, 100):
        lik_ops.maxsim_varlen(tokens(1, 2, 4), tokens(n, 4), None, packed([n]))
    assert len(seen) == 2 * hints._MAX_INSPECTED_CALLS


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"maxsim of lists", "maxsim_varlen", "retrieve"}))
def test_inverted_mask_is_logged(name, caplog):
    Q, D = tokens(3, 4, 16), tokens(5, 9, 16)
    d_mask = torch.ones(5, 9, dtype=torch.bool)
    documents = slice(0, 3) if name == "maxsim_pairs" else slice(None)
    with caplog.at_level(logging.INFO, "lik_ops"):
        CALLS[name](Q, D, d_mask=d_mask[documents])
        assert not [r for r in caplog.records if r.levelno == logging.INFO]
        CALLS[name](Q.double(), D.double(), d_mask=~d_mask[documents])
    (record,) = [r for r in caplog.records if r.levelno == logging.INFO]
    assert "every score is -inf: no document keeps a token of d_mask" in record.getMessage()


def test_compiled_code_has_no_graph_break():
    Q, D = tokens(2, 4, 16), tokens(3, 9, 16)
    for call in (lik_ops.maxsim, lambda Q, D: lik_ops.maxsim_soft(Q, D, 0.1), lik_ops.maxsim_cross_entropy):
        expected = call(Q, D)
        assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(Q, D), expected)


def test_single_query_and_document_are_logged(caplog):
    with caplog.at_level(logging.INFO, "lik_ops"):
        lik_ops.maxsim(tokens(4, 16), tokens(6, 16))
    assert "maxsim: one score of one query [4, 16] and one document [6, 16]" in caplog.text


def test_environment_variable_disables_the_norm_warning():
    """The variable turns the warning off first, because a process warns only once."""
    code = """
import os, sys, torch, lik_ops
for value in "01":
    os.environ["LIK_OPS_NORM_WARNING"] = value
    lik_ops.maxsim(torch.randn(2, 3 + int(value), 8), torch.randn(2, 3, 8))
    print(f"end of {value}", file=sys.stderr)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    off, on, _ = re.split(r"^end of \d$", run.stderr, flags=re.M)
    assert "expected tokens of norm 1" not in off and "expected tokens of norm 1" in on
