"""Test that invalid calls of the ragged functions raise errors or return NaN on every device: see `fuzz_ragged`."""

from __future__ import annotations

import random

import pytest
import torch

import lik_ops

from ..support import fuzz_ragged

SCALES = [
    pytest.param("cpu", 300),
    pytest.param("cpu", 10_000, marks=pytest.mark.slow),
    pytest.param("cuda", 300, marks=pytest.mark.gpu),
]


@pytest.mark.filterwarnings("ignore:.*[Nn]ested tensor:UserWarning")
@pytest.mark.parametrize("device, calls", SCALES)
def test_invalid_calls_raise_or_score_nan(device, calls):
    outcomes = fuzz_ragged.run(calls, device, seed=calls)
    assert outcomes.total() == calls
    for outcome in ("right", "error", "nan", "winners"):
        assert outcomes[outcome] > calls // 20, outcomes


@pytest.mark.parametrize("wrong", ["scores", "gradients", "an error", "another error"])
def test_fuzz_check_detects_broken_functions(wrong, monkeypatch):
    original = lik_ops.maxsim_padded

    def broken(Q, D, *args, **options):
        if wrong == "an error":
            raise ValueError("maxsim_padded: doc_lengths: expected others")
        if wrong == "another error":
            raise IndexError("maxsim_padded: doc_lengths: expected others")
        scores = original(Q, D, *args, **options)
        return scores.nan_to_num(nan=0.0) if wrong == "scores" else scores + (Q.sum() - Q.sum().detach())

    Q, D = torch.ones(1, 2, 4), torch.ones(1, 2, 3, 4)
    lengths = {"query_lengths": torch.tensor([2]), "doc_lengths": torch.tensor([[-1, 3]])}
    call = fuzz_ragged.Call("maxsim_padded", {"Q": Q, "D": D, **lengths, "q_weight": None}, [])
    assert fuzz_ragged.check(call, True, "cpu", True) == "nan"
    monkeypatch.setattr(lik_ops, "maxsim_padded", broken)
    with pytest.raises(IndexError if wrong == "another error" else AssertionError):
        fuzz_ragged.check(call, True, "cpu", True)


def test_fuzz_calls_are_reproducible_from_their_seed():
    first, second = (str(fuzz_ragged.bad_call(random.Random("3, 14"))[0]) for _ in range(2))
    assert first == second
