"""Test that the sweeps patch names that exist, and that a patch changes the configuration. Timing needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU benchmarks import triton")

from benchmarks.sweeps import sweep, tables
from lik_ops.csrc_triton.common.arguments import SizeArgs
from lik_ops.gpu.tuning import architectures, sm90_configs

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("name", tables.SWEEPS)
def test_patches_name_existing_entries(name):
    found = tables.SWEEPS[name]
    patches = [p for case in found.cases().values() for p in found.alternatives(case).values()]
    assert patches and all(patches)
    for entry in {entry for p in patches for entry in p}:
        owner, attribute, present = sweep.resolve(entry)
        assert getattr(owner, attribute) is present


def test_an_alternative_replaces_the_choice_of_the_table():
    call = architectures.ARCHITECTURES["sm_90"], SizeArgs(1, 1000, 32, 300), 128

    def choose():
        found = sm90_configs.configure_sm90(*call, normalize=True, argmax=False)
        return found.config.BN, found.config.STAGES

    table = choose()
    with sweep.forced(tables.few_tiles(("normalize", 1, 1000, 300))["128 x 2"]):
        assert choose() == (128, 2) != table
    assert choose() == table


@pytest.mark.parametrize("name", ["few", "pairs"])
def test_recorded_cases_are_cases_of_the_sweep(name):
    recorded = json.loads((RESULTS / f"sweep_{name}.json").read_text())["records"]
    cases = tables.SWEEPS[name].cases()
    assert recorded and all(record["case"]["name"] in cases for record in recorded)
