"""Test documents outside the device, which are read part by part and copied while others are scored."""

import itertools
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lik_ops
from lik_ops.ops import topk
from lik_ops.retrieval import copying, shards, sources
from lik_ops.retrieval.store.layout import StorageLayout

from ..portable.test_portable import peak_bytes
from .test_retrieve import DEVICES, assert_same, draw, packed, ranked


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["tensor", "pinned", "array", "memmap", "packed", "packed array"])
@pytest.mark.parametrize("chunk", [None, 1, 7, 100])
def test_streamed_documents_match_resident_scores(device, kind, chunk, tmp_path, monkeypatch):
    if kind == "pinned" and device == "cpu":
        pytest.skip("pinned memory needs a GPU")
    Q, D = draw(3, 50, 4, 6, 8, torch.float16, integers=True)
    d_mask = torch.rand(50, 6) > 0.3
    options = {"d_mask": d_mask}
    expected = ranked(lik_ops.maxsim(Q.to(device), D.to(device), None, d_mask.to(device)), 11)
    where = D
    if kind == "pinned":
        where = D.pin_memory()
    elif kind == "array":
        where = D.numpy()
    elif kind == "memmap":
        np.save(tmp_path / "D.npy", D.numpy())
        where = np.load(tmp_path / "D.npy", mmap_mode="r")
        assert isinstance(where, np.memmap)
    elif kind.startswith("packed"):
        where, cu_seqlens = packed(D, [i % 7 for i in range(50)])
        options = {"cu_seqlens_d": cu_seqlens}
        kept = torch.arange(6) < (torch.arange(50) % 7)[:, None]
        expected = ranked(lik_ops.maxsim(Q.to(device), D.to(device), None, kept.to(device)), 11)
        where = where.numpy() if kind == "packed array" else where
    monkeypatch.setattr(sources, "choose_part_bytes", lambda device: 2000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = lik_ops.retrieve(Q.to(device), where, 11, chunk=chunk, progress=kind == "tensor", **options)
    assert found[0].device.type == device
    assert_same(found, expected)


@pytest.mark.parametrize("kind", ["array", "packed"])
def test_empty_source_returns_empty_results_and_checks_dtype(kind):
    Q = torch.randn(2, 3, 8)
    D, options = np.zeros((0, 4, 8), np.float32), {}
    if kind == "packed":
        D, options = np.zeros((0, 8), np.float32), {"cu_seqlens_d": torch.zeros(1, dtype=torch.int32)}
    scores, indices = lik_ops.retrieve(Q, D, 5, **options)
    assert scores.shape == indices.shape == (2, 0)
    with pytest.raises(TypeError, match="dtype of Q"):
        lik_ops.retrieve(Q.half(), D, 5, **options)


@given(lengths=st.lists(st.integers(0, 9), max_size=30), budget=st.integers(1, 400), parts=st.integers(1, 5))
def test_ranges_cover_every_document_once_and_keep_to_the_budget(lengths, budget, parts):
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    source = sources.PackedSource(offsets, sum(lengths), StorageLayout(5, torch.float16))
    ranges = source.ranges(0, len(lengths), None, budget)
    assert [i for a, b in ranges for i in range(a, b)] == list(range(len(lengths)))
    assert all(source.nbytes(a, b) <= max(budget, 10) or b - a == 1 for a, b in ranges)
    split = source.split(parts)
    assert len(split) == parts
    assert [i for a, b in split for i in range(a, b)] == list(range(len(lengths)))
    assert all(source.nbytes(a, b) <= 10 * (sum(lengths) / parts + 1 + max(lengths)) for a, b in split if b > a)


@given(offsets=st.lists(st.integers(-9, 99), min_size=1, max_size=20), parts=st.integers(1, 5), rising=st.booleans())
def test_resident_target_splits_valid_host_offsets_by_tokens(offsets, parts, rising):
    cu_seqlens = torch.tensor(sorted(offsets) if rising else offsets, dtype=torch.int32)
    split = shards.ResidentTarget("retrieve", torch.empty(99, 8), None, cu_seqlens).split(parts)
    assert len(split) == parts
    assert [i for a, b in split for i in range(a, b)] == list(range(len(offsets) - 1)), "each document once, in order"
    if rising:
        assert split == sources.PackedSource(cu_seqlens.long(), 99, StorageLayout(5, torch.float16)).split(parts)
    by_number = shards.ResidentTarget("retrieve", torch.empty(7, 3, 8), None, None).split(2)
    assert by_number == [(0, 3), (3, 7)]


class Recording(copying.CopyLanes):
    """Stand-in for copy streams that logs requests and copies as late as possible, at the wait."""

    def __init__(self):
        self.log, self.pending = [], {}

    def wait_for_staging(self, slot):
        self.log.append(("staging", slot))
        self.run(slot)

    def copy(self, slot, pairs):
        self.log.append(("copy", slot))
        self.pending[slot] = pairs

    def wait_for_copy(self, slot):
        self.log.append(("wait", slot))
        self.run(slot)

    def run(self, slot):
        for target, source in self.pending.pop(slot, ()):
            target.copy_(source)

    def scored(self, slot):
        self.log.append(("scored", slot))

    def close(self):
        self.log.append(("close", None))


def test_slots_alternate_and_are_rewritten_only_after_scoring():
    lanes = Recording()
    parts = [sources.DocumentPart(torch.full((2, 3, 5), float(i)), torch.full((2, 3), bool(i % 2))) for i in range(5)]
    nbytes = parts[0].D.numel() * 4 + 6
    buffer = copying.DoubleBuffer(torch.device("cpu"), nbytes, lanes)
    found = []
    for part in buffer.copy(iter(parts)):
        found.append((part.D.clone(), part.d_mask.clone()))
        assert any(part.D.data_ptr() == slot.data_ptr() for slot in buffer.slots)
    for (D, d_mask), part in zip(found, parts, strict=True):
        assert torch.equal(D, part.D) and torch.equal(d_mask, part.d_mask)
    log = [event for event in lanes.log if event[0] != "staging"]
    copy, wait, scored = ([i for i, event in enumerate(log) if event[0] == kind] for kind in ("copy", "wait", "scored"))
    assert [log[i][1] for i in copy] == [log[i][1] for i in wait] == [0, 1, 0, 1, 0]
    assert all(copy[i + 1] < wait[i] for i in range(4)), "the next copy is under way before a part is handed out"
    assert all(scored[i] < copy[i + 2] for i in range(3)), "a slot is written again after it was scored"
    assert log[-1] == ("close", None)


def test_copy_lanes_close_after_a_failed_part():
    def parts():
        yield sources.DocumentPart(torch.zeros(1, 1, 1))
        raise OSError("disk")

    lanes = Recording()
    with pytest.raises(OSError, match="disk"):
        list(copying.DoubleBuffer(torch.device("cpu"), 4, lanes).copy(parts()))
    assert lanes.log[-1] == ("close", None)


def test_double_buffered_search_matches_maxsim(monkeypatch):
    """Run the whole path of another device, simulated by a CPU."""
    lanes = []

    def on_device(parts, device, nbytes):
        lanes.append(Recording())
        return copying.DoubleBuffer(device, nbytes, lanes[-1]).copy(parts)

    monkeypatch.setattr("lik_ops.retrieval._streamed.iterate_on_device", on_device)
    Q, D = draw(3, 50, 4, 6, 8)
    d_mask = torch.rand(50, 6) > 0.3
    expected = ranked(lik_ops.maxsim(Q, D, None, d_mask), 11)
    assert_same(lik_ops.retrieve(Q, D.numpy(), 11, chunk=7, d_mask=d_mask), expected)
    tokens, cu_seqlens = packed(D, [i % 7 for i in range(50)])
    kept = torch.arange(6) < (torch.arange(50) % 7)[:, None]
    found = lik_ops.retrieve(Q, tokens.numpy(), 11, chunk=3, cu_seqlens_d=cu_seqlens)
    assert_same(found, ranked(lik_ops.maxsim(Q, D, None, kept), 11))
    assert [len([e for e in x.log if e[0] == "copy"]) for x in lanes] == [8, 17]


def test_progress_is_shown_only_on_request(capsys, monkeypatch):
    pytest.importorskip("tqdm", reason="pip install lik-ops[retrieval]")
    Q, D = draw(2, 20, 3, 4, 8)
    lik_ops.retrieve(Q, D.numpy(), 3, chunk=5)
    assert capsys.readouterr().err == "", "stderr is no terminal"
    lik_ops.retrieve(Q, D, 3, chunk=5, progress=True)
    assert "20.0/20.0" in capsys.readouterr().err
    highest = lik_ops.retrieve(Q, D, 20, largest=False, progress=True)
    assert "20.0/20.0" in capsys.readouterr().err
    assert_same(highest, lik_ops.retrieve(Q, D, 20, largest=False))
    assert torch.equal(lik_ops.maxsim_streamed(Q, D, chunk=3, progress=True), lik_ops.maxsim(Q, D))
    assert "20.0/20.0" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    lik_ops.retrieve(Q, D, 3, progress=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("place", [torch.Tensor.contiguous, torch.Tensor.numpy], ids=["tensor", "array"])
def test_lowest_scores_need_bounded_memory(place):
    """All scores would take 61 MiB."""
    Q, D = torch.randn(1000, 1, 8), torch.randn(16_000, 1, 8)
    found = lik_ops.retrieve(Q, place(D), 10, largest=False)
    assert torch.equal(found[1][7], lik_ops.maxsim(Q[7], D).argsort(stable=True)[:10])
    assert peak_bytes(lambda: lik_ops.retrieve(Q, place(D), 10, largest=False)) < 2 * topk.WORKSPACE_BYTES


@pytest.mark.gpu
def test_documents_larger_than_slots_match_resident_search():
    """Copies and scoring overlap over many parts. Previous contents of a slot must not be visible."""
    generator = torch.Generator().manual_seed(1)
    D = torch.randn(20_000, 60, 128, generator=generator).half()
    Q = torch.randn(8, 32, 128, generator=generator).half().cuda()
    expected = lik_ops.retrieve(Q, D.cuda(), 50)
    for where in (D, D.pin_memory(), D.numpy()):
        for chunk in (None, 333, 1000):
            assert_same(lik_ops.retrieve(Q, where, 50, chunk=chunk), expected)
