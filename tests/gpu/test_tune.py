"""Test tile tables: their file format, their effect, and how `lik_ops.tune` selects entries."""

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import triton

import lik_ops
from lik_ops import info, tune, tuning
from lik_ops.gpu.runtime import arguments as cuda_arguments
from lik_ops.gpu.tuning import forward_configs, measured_tables
from lik_ops.gpu.tuning.architectures import ARCHITECTURES, INTERPRETER, KernelKey
from lik_ops.gpu.tuning.forward_table import TileConfig, TileRule

from ..support.common import INTERPRETING

SM_90, SM_80 = ARCHITECTURES["sm_90"], ARCHITECTURES["sm_80"]
HALF, FP32 = torch.bfloat16, torch.float32
TILES = (
    TileConfig(32, 128, 128, 8, 2, tokens_first=True, documents=100),
    TileConfig(64, 64, 128, 4, 3, 128, walkers=264),
)
RULE = TileRule(
    units=("wgmma",), dtypes=(HALF,), d=128, Lq=32, normalize=False, wide=0, value=TILES, above_d=64, above_Lq=16
)
TABLE = measured_tables.TileTable("NVIDIA H200", "sm_90", {"torch": "2.11.0"}, (RULE,), [{"ms": 0.5}])


@pytest.fixture
def use_table(monkeypatch, tmp_path):
    """Return a function that points `LIK_OPS_TABLE` to a file with the given text and clears all caches."""

    def forget():
        for cached in (measured_tables.load_table, measured_tables._warn_mismatch, cuda_arguments.architecture):
            cached.cache_clear()

    def use(text):
        path = tmp_path / "table.json"
        path.write_text(text)
        monkeypatch.setenv("LIK_OPS_TABLE", str(path))
        forget()
        return path

    yield use
    monkeypatch.undo()
    forget()


def _chosen(arch, Nq=1, Lq=32, d=128, documents=1000, dtype=HALF, normalize=False, wide=0):
    kind = KernelKey(arch, dtype, d, False, normalize, wide)
    return forward_configs.configure_forward(kind, Nq, Lq, tf32=False, documents=documents)


def test_round_trip():
    assert measured_tables.parse_table(measured_tables.to_json(TABLE), "here") == TABLE
    assert measured_tables.parse_table(measured_tables.to_json(TABLE), "here").measured == TABLE.measured


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 2, "here: expected a table of format 1"),
        (("gpu",), 3, "here: gpu: expected a name, got 3"),
        (("extra",), 3, "here: expected the members"),
        (("forward",), {}, r"here: forward: expected a list, got \{\}"),
        (("forward", 0, "dtypes"), ["int8"], r"here: rule 0: dtypes: expected some of .*, got \['int8'\]"),
        (("forward", 0, "dtypes"), ["float32"], "here: rule 0: dtypes: expected half types on sm_90"),
        (("forward", 0, "d"), [128, 64], r"here: rule 0: d: expected \[least, most\], got \[128, 64\]"),
        (("forward", 0, "d"), [65, 79], r"here: rule 0: d: expected a range that holds a multiple of 16"),
        (("forward", 0, "Lq"), 32, r"here: rule 0: Lq: expected \[least, most\], got 32"),
        (("forward", 0, "Lq"), [1, 128], "here: rule 0: rows of the last tile for Lq 128: expected 256, got 64"),
        (("forward", 0, "tiles"), [], "here: rule 0: tiles: expected a list of tiles"),
        (("forward", 0, "tiles", 0, "rows"), 48, "tile 0: rows: expected a power of two of at least 16, got 48"),
        (("forward", 0, "tiles", 0, "warps"), True, "tile 0: warps: expected a power of two of at least 1, got True"),
        (("forward", 0, "tiles", 0, "rows"), 128, "here: rule 0: tiles: expected ascending rows and documents"),
        (("forward", 0, "tiles", 1, "documents"), 5, "documents of the last tile: expected null, got 5"),
        (("forward", 0, "tiles", 1, "registers"), "many", "tile 1: registers: expected null or a number, got 'many'"),
        (("forward", 0, "tiles", 1, "tokens_first"), 1, "tile 1: tokens_first: expected true or false, got 1"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(path, value, message):
    record = json.loads(measured_tables.to_json(TABLE))
    target = record
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        measured_tables.parse_table(json.dumps(record), "here")


def test_files_that_are_no_tables(use_table, monkeypatch):
    path = use_table("{")
    with pytest.raises(ValueError, match=re.escape(f"LIK_OPS_TABLE={path}: expected JSON")):
        measured_tables.load_table()
    monkeypatch.setenv("LIK_OPS_TABLE", str(path / "none"))
    measured_tables.load_table.cache_clear()
    with pytest.raises(ValueError, match="LIK_OPS_TABLE: expected a file that can be read"):
        measured_tables.load_table()


def test_a_table_changes_the_tile_of_what_it_covers(use_table, caplog):
    use_table(measured_tables.to_json(TABLE))
    with caplog.at_level(logging.DEBUG, logger="lik_ops"):
        arch = measured_tables.add_measured_rules(SM_90)
    assert "1 rules for sm_90 measured on NVIDIA H200 (torch 2.11.0)" in caplog.text
    assert arch == SM_90  # other properties of the architecture are unchanged
    few, many, packed = _chosen(arch, documents=100), _chosen(arch, documents=101), _chosen(arch, Nq=100)
    assert (few.config.BM, few.config.BN, few.num_warps) == (32, 128, 8)
    assert many == packed and (many.config.BM, many.options(arch)["maxnreg"]) == (64, 128)
    for others in ({"Lq": 16}, {"Lq": 33}, {"d": 64}, {"dtype": torch.float16}, {"normalize": True}, {"wide": 1}):
        assert _chosen(arch, **others) == _chosen(SM_90, **others), others
    assert _chosen(arch, d=120) == _chosen(SM_90, d=120)  # features loaded one by one use the tiles of wide offsets


def test_it_is_read_once(use_table):
    path = use_table(measured_tables.to_json(TABLE))
    assert measured_tables.load_table() == TABLE
    path.write_text("{")
    assert measured_tables.load_table() == TABLE


def test_a_table_for_another_gpu_is_not_used_and_says_so_once(use_table, caplog):
    use_table(measured_tables.to_json(TABLE))
    with caplog.at_level(logging.WARNING, logger="lik_ops"):
        assert (
            measured_tables.add_measured_rules(SM_80).measured == ()
            and measured_tables.add_measured_rules(SM_80).measured == ()
        )
    assert [r.getMessage() for r in caplog.records] == ["LIK_OPS_TABLE is for sm_90: not used on sm_80"]


def test_without_the_variable_there_is_no_table(use_table, monkeypatch):
    use_table("{")
    monkeypatch.delenv("LIK_OPS_TABLE")
    assert measured_tables.load_table() is None and measured_tables.add_measured_rules(SM_90) is SM_90


def test_info_names_the_table(use_table, capsys, monkeypatch):
    path = use_table(measured_tables.to_json(TABLE))
    info.main([])
    assert f"table    {path}: 1 rules for sm_90 measured on NVIDIA H200" in capsys.readouterr().out
    use_table("{")
    info.main([])
    assert "table    error: LIK_OPS_TABLE" in capsys.readouterr().out
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with lik_ops.use_backend("triton"):
        info.main([])
    assert "float16   error: LIK_OPS_TABLE" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["0", "-1", "x"])
def test_info_asks_for_sizes(wrong, capsys):
    with pytest.raises(SystemExit):
        info.main(["--ld", wrong])
    assert "argument --ld: " in capsys.readouterr().err


class Device:
    """Stand-in for a GPU: times by tile, tiles that fail, and tiles that give other bits."""

    def __init__(self, times, fails=(), other_bits=(), fails_masked=()):
        self.ms, self.fails, self.other_bits, self.fails_masked = times, fails, other_bits, fails_masked
        self.running = None

    def plan_of(self, arch, x, argmax=False):
        tile = arch.measured[0].value[0] if arch.measured else None
        if tile in self.fails or (x.q_mask is not None and tile in self.fails_masked):
            raise RuntimeError("out of resources: shared memory")
        return tile, x

    def run(self, plan, x):
        self.running = plan
        scores = tuning.reference.maxsim(x.Q.double(), x.D.double(), x.q_mask, x.d_mask, q_weight=x.q_weight).float()
        return scores + (1.0 if plan[0] in self.other_bits else 0), torch.zeros(0)

    def timer(self, function):
        function()
        tile, x = self.running
        return self.ms(tile, x.Q.shape[0] * x.Q.shape[1], x.D.shape[0])


def _tuner(monkeypatch, device, arch=SM_80):
    monkeypatch.setattr(tuning, "make_plan", device.plan_of)
    monkeypatch.setattr(tuning, "run_plan", device.run)
    monkeypatch.setattr(tuning.Tuner, "accepts", tuning.Tuner.accepts)
    monkeypatch.setattr(tuning, "is_close_to_reference", lambda scores, x: True)
    said = []
    return tuning.Tuner(arch, torch.device("cpu"), 4, device.timer, say=said.append), said


REGIME = tuning.TuningRegime(HALF, 16, 32, 8, few=3, many=20, rows=256)


def test_the_fastest_tiles_that_are_right_are_chosen(monkeypatch):
    tiles = {rows: tuning.list_candidate_tiles(SM_80, REGIME, rows, 4) for rows in (32, 64, 128, 256)}
    wrong, failing, masked, good = (t for t in tiles[128] if t.warps == 4 and t.tokens == 64 and not t.tokens_first)
    few, small = tiles[32][0], tiles[32][1]

    def ms(tile, rows, documents):
        if rows <= 32 and tile.rows == 32:
            return {few: 1.0 if documents <= 3 else 4.0, small: 2.0}.get(tile, 5.0)
        order = {wrong: 1.0, failing: 1.1, masked: 1.2, good: 3.0}
        return order.get(tile, 9.0)

    device = Device(ms, fails=(failing,), other_bits=(wrong,), fails_masked=(masked,))
    tuner, said = _tuner(monkeypatch, device)
    rule = tuner.rule(REGIME)
    assert rule.value == (few._replace(documents=10), small, good)
    assert (rule.above_Lq, rule.Lq, rule.above_d, rule.d) == (16, 32, 8, 16)
    table = measured_tables.TileTable("GPU", "sm_80", {}, (rule,), tuner.measured)
    assert measured_tables.parse_table(measured_tables.to_json(table), "here") == table
    reasons = {record["refused"] for record in tuner.measured if "refused" in record}
    assert reasons == {"other bits than the built-in tile", "RuntimeError: out of resources: shared memory"}
    assert any(str(masked) in line for line in said)


def test_no_rule_where_nothing_is_right(monkeypatch):
    tuner, said = _tuner(monkeypatch, Device(lambda *_: 1.0))
    tuner.problem = lambda *_: "other bits than the built-in tile"
    assert tuner.rule(REGIME) is None
    assert said[-1].endswith("no tile is right, the built-in ones stay")


@pytest.mark.parametrize("Lq", [1, 20, 32, 128, 256, 300, 1024])
@pytest.mark.parametrize("d", [16, 64, 128, 768])
def test_rules_of_candidates_are_tables(Lq, d):
    """A file with any winner is readable."""
    for arch in (SM_90, SM_80, ARCHITECTURES["gfx942"]):
        regime = tuning.TuningRegime(HALF, d, Lq, 300, 100, 1000, 1024)
        most = tuning.find_built_in_tiles(arch, regime)[-1].rows
        sizes = [most] if Lq > most else [rows for rows in (32, 64, 128, 256) if rows >= Lq]
        for rows in sizes:
            tiles = tuning.list_candidate_tiles(arch, regime, rows, 132)
            assert tiles and len(set(tiles)) == len(tiles)
            for tile in tiles:
                rule = tuning.make_rule(regime, arch, [tile])
                table = measured_tables.TileTable("GPU", arch.name, {}, (rule,))
                assert measured_tables.parse_table(measured_tables.to_json(table), "here") == table
                assert forward_configs.select_tiles(replace(arch, measured=(rule,)), HALF, Lq, d, False, 0) == (tile,)


def test_arguments_that_cannot_be_measured():
    def check(arch, **changes):
        tuning.check_options(
            tuning.argparse.Namespace(**{"d": [128], "lq": [32], "dtype": ["bfloat16"], **changes}), arch
        )

    check(SM_90)
    check(SM_80, dtype=["float32"])
    for message, changes in (
        ("--lq: expected positive", {"lq": [0]}),
        ("--d: expected multiples of 16", {"d": [100]}),
        ("float32 is not tuned on sm_90", {"dtype": ["float32"]}),
    ):
        with pytest.raises(ValueError, match=message):
            check(SM_90, **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_without_a_gpu_it_says_so(capsys, tmp_path):
    with pytest.raises(SystemExit):
        tune.main(["--out", str(tmp_path / "table.json")])
    assert "no CUDA or ROCm GPU here" in capsys.readouterr().err


@pytest.mark.skipif(not INTERPRETING, reason="runs the kernels in Triton's interpreter: see test_interpreter.py")
@pytest.mark.parametrize("Lq", [3, 40])
def test_tiles_that_the_tool_takes_give_the_same_bits(Lq):
    most = 32
    regime = tuning.TuningRegime(torch.float16, 16, Lq, 18, 2, 3, 64)
    tuner = tuning.Tuner(INTERPRETER, torch.device("cpu"), 1, lambda function: 1.0)
    x = tuning.make_inputs(regime, 2, 2, torch.device("cpu"))
    tiles = [TileConfig(most, 16, 16, 4, 2)]
    if Lq <= 16:
        tiles = [
            TileConfig(most, 32, 16, 4, 2, walkers=2),
            TileConfig(16, 16, 16, 4, 1, tokens_first=True),
            TileConfig(64, 16, 16, 4, 1),
        ]
    for tile in tiles:
        assert tuner.problem(regime, tile, x) is None, tile
    if Lq <= 16:
        assert tuner.accepts(regime, tiles[1])
    if Lq > most:  # a smaller tile cuts the sum over query tokens differently, so no table may have it
        cut = tuning.make_rule(regime, INTERPRETER, [TileConfig(16, 16, 32, 4, 1)])
        with pytest.raises(ValueError, match="rows of the last tile"):
            measured_tables.parse_table(
                measured_tables.to_json(measured_tables.TileTable("", "interpreter", {}, (cut,))), "here"
            )


def test_a_directory_that_is_not_there_is_named_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuning, "tune", lambda args, arch: pytest.fail("measured"))
    with pytest.raises(SystemExit):
        tune.main(["--out", str(tmp_path / "none" / "table.json")])
    assert "argument --out: no directory" in capsys.readouterr().err


SCORES = """
import sys, torch, lik_ops
generator = torch.Generator().manual_seed(0)
Q, D = (torch.randn(*shape, generator=generator).bfloat16().cuda() for shape in ((9, 32, 128), (500, 300, 128)))
mask = torch.rand(500, 300, generator=generator).cuda() > 0.2
scores = [lik_ops.maxsim(Q[:n], D[:m], d_mask=None if k is None else k[:m])
          for n in (1, 2, 9) for m in (7, 500) for k in (None, mask)]
torch.save(scores, sys.argv[1])
"""


@pytest.mark.gpu
def test_a_table_made_here_gives_the_same_scores(tmp_path):
    path = tmp_path / "table.json"
    subprocess.run([sys.executable, "-m", "lik_ops.tune", "--quick", "--out", str(path)], check=True)
    scores = []
    for name, value in (("with", str(path)), ("without", "")):
        environment = os.environ | {"LIK_OPS_TABLE": value}
        out = str(tmp_path / name)
        subprocess.run([sys.executable, "-c", SCORES, out], env=environment, check=True)
        scores.append(torch.load(out))
    assert measured_tables.parse_table(path.read_text(), "here").rules
    assert all(map(torch.equal, *scores))
