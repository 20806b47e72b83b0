"""Test that the top-k kernel has the bits of plain torch for all kinds and numbers of scores."""

import math

import pytest
import torch
from torch import Tensor

import lik_ops
from lik_ops.gpu.forward import topk as cuda_topk
from lik_ops.ops.topk import WARMUP_COLUMNS, merge_messages
from lik_ops.portable.forward import topk as portable_topk

from ...support.common import INTERPRETING

KINDS = ("normal", "special", "equal", "falling", "few")


def draw_scores(kind: str, rows: int, n: int) -> Tensor:
    """Return scores. The kind "special" has 0.0, -0.0, and NaN with several bit patterns."""
    if kind == "equal":
        return torch.full((rows, n), -1.5)
    if kind == "falling":
        return -torch.arange(n).float().expand(rows, -1) * 1e-3
    scores = torch.randn(rows, n)
    if kind == "few":
        return scores.mul(2).round()
    if kind == "special":
        nans = torch.tensor([0x7FC00001, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
        values = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38])
        values = torch.cat([values, values, nans])
        scores = torch.where(torch.rand(rows, n) < 0.7, values[torch.randint(len(values), (rows, n))], scores)
    return scores


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0].view(torch.int32), expected[0].view(torch.int32))


class Launches(list):
    """List of the block size and the grid of each launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        launch = cuda_topk.launcher.launch

        def counted(kernel, grid, args, options):
            self.append((args[-2], grid[0]))
            return launch(kernel, grid, args, options)

        monkeypatch.setattr(cuda_topk.launcher, "launch", counted)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 1, 1), (3, 5, 9), (2, 100, 100), (2, 1024, 100), (2, 1025, 7), (1, 8192, 256), (2, 8193, 1), (3, 20_011, 100)],
)
def test_bits_match_torch_on_gpu(kind, rows, n, k):
    check_best(kind, rows, n, k, "cuda")


@pytest.mark.gpu
def test_million_scores_match_torch_on_gpu():
    for kind in KINDS:
        check_best(kind, 2, 1_000_003, 100, "cuda")


def check_best(kind: str, rows: int, n: int, k: int, device: str) -> None:
    scores = draw_scores(kind, rows, n).to(device)
    assert_same(cuda_topk.best(scores, k), portable_topk.best(scores, k))
    indices = torch.arange(n, device=device).mul(3).add(1 << 33).expand(rows, -1)
    assert_same(cuda_topk.best(scores, k, indices), portable_topk.best(scores, k, indices))
    wide = draw_scores(kind, rows, n + 3).to(device)[:, 2:-1]
    assert_same(cuda_topk.best(wide, k), portable_topk.best(wide, k))


def check_parts(kind: str, parts: int, rows: int, width: int, k: int, device: str) -> None:
    scores = draw_scores(kind, parts * rows, width).to(device).view(parts, rows, width)
    scores = scores.nan_to_num(1.0, 9.0, -9.0).sort(dim=2, descending=True).values
    indices = torch.arange(parts * width, device=device).view(parts, 1, width).expand(-1, rows, -1)
    received = torch.stack([scores.view(torch.int32).long(), indices], dim=1)
    expected = portable_topk.best(scores.transpose(0, 1).flatten(1), k)
    assert_same(cuda_topk.best_of_parts(received, k), expected)
    assert_same(portable_topk.best_of_parts(received, k), expected)


@pytest.mark.skipif(not INTERPRETING, reason="through test_interpreter.py, or TRITON_INTERPRET=1")
class TestInterpreted:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        monkeypatch.setattr(cuda_topk, "BLOCK_SCORES", 256)
        monkeypatch.setattr(cuda_topk, "SMALL_BLOCK_SCORES", 64)
        monkeypatch.setattr(cuda_topk, "_WARPS", {256: 4, 64: 4})

    @pytest.mark.parametrize("kind", KINDS)
    def test_bits_match_torch(self, kind):
        sizes = (1, 1, 1), (2, 5, 9), (2, 64, 10), (2, 65, 65), (1, 256, 7), (3, 1300, 40), (1, 700, 130)
        for rows, n, k in sizes[:: 1 if kind == "special" else 3]:
            check_best(kind, rows, n, k, "cpu")

    def test_large_inputs_are_reduced_in_levels(self, monkeypatch):
        launches = Launches(monkeypatch)
        scores = draw_scores("normal", 1, 5000)
        assert_same(cuda_topk.best(scores, 20), portable_topk.best(scores, 20))
        assert launches == [(256, 20), (256, 2), (64, 1)]

    @pytest.mark.parametrize("kind", KINDS)
    def test_best_of_parts_matches_torch(self, kind, monkeypatch):
        launches = Launches(monkeypatch)
        for count, sizes in enumerate(((1, 1, 1, 1), (2, 3, 10, 10), (4, 2, 50, 50), (3, 1, 7, 30))):
            check_parts(kind, *sizes, "cpu")
            assert len(launches) == count + 1
        check_parts(kind, 3, 1, 100, 30, "cpu")  # more than a block

    def test_kernel_is_used_only_if_selected_and_supported(self, monkeypatch):
        """The kernel runs unless torch was selected. fp64 and a k beyond the registers use torch."""
        launches, scores = Launches(monkeypatch), draw_scores("special", 2, 300)
        for backend, count in (("triton", 2), ("portable", 0)):
            launches.clear()
            with lik_ops.use_backend(backend):
                assert_same(lik_ops.ops.topk.select_first(scores, 5), portable_topk.best(scores, 5))
            assert len(launches) == count
        launches.clear()
        for few, k in ((scores.double(), 5), (scores, 257), (scores[:0], 5), (scores[:, :0], 5), (scores, 0)):
            found, expected = cuda_topk.best(few, k), portable_topk.best(few, k)
            assert torch.equal(found[1], expected[1]) and found[0].shape == expected[0].shape
        assert not launches


def kernels(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> set[tuple]:
    """Return the arguments that are compiled into the kernels for the best k of n scores."""
    found = set()

    def launch(kernel, grid, args, options):
        X, _, _, _, *constants = args
        found.add((X.indices is None, *constants))

    monkeypatch.setattr(cuda_topk.launcher, "launch", launch)
    cuda_topk.best(torch.empty(1, n), k)
    return found


@pytest.mark.parametrize("k", [1, 10, 100, 129, 256])
def test_warmup_covers_every_kernel_of_a_search(k, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    warmed = set().union(*(kernels(n, k, monkeypatch) for n in WARMUP_COLUMNS))
    for n in (1, 1023, 1024, 1025, 8191, 8192, 8193, 16_385, 90_000, 700_000, 2_500_000, 3_999_999):
        assert kernels(n, k, monkeypatch) <= warmed
    assert len(warmed) > 3


@pytest.mark.parametrize("k", [1, 10, 200])
def test_warmup_covers_kernel_that_merges_process_results(k, monkeypatch):
    merging, launches = [], []
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(cuda_topk.launcher, "launch", lambda kernel, grid, args, options: launches.append(args[4:]))
    monkeypatch.setattr(lik_ops.ops.topk.backends, "select_backend", lambda *_: cuda_topk)
    lik_ops.ops.topk.warm_up(torch.device("cpu"), torch.float32, k)
    warmed = set(launches)
    for processes, rows in ((2, 1), (2, 3), (4, 1), (8, 2)):
        launches.clear()
        received = torch.zeros(processes, 2, rows, k, dtype=torch.int64)
        lik_ops.ops.topk.merge_messages(received, [k] * processes, k, torch.float32)
        merging += launches
    assert len(merging) == 4 and set(merging) <= warmed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("counts", [[3, 3], [3, 1, 2], [0, 3], [0, 0]])
def test_merge_of_parts_with_different_lengths(counts, dtype):
    """Elements past the end of a shorter part are ignored."""
    width, integers = max(counts), torch.int64 if dtype == torch.float64 else torch.int32
    received = torch.full((len(counts), 2, 2, width), -1)
    each, first = [], 0
    for part, count in enumerate(counts):
        scores = torch.randn(2, count, dtype=dtype).round().sort(dim=1, descending=True).values
        received[part, 0, :, :count] = scores.view(integers).long()
        received[part, 1, :, :count] = torch.arange(first, first + count)
        each.append(scores)
        first += count
    found, expected = merge_messages(received, counts, 4, dtype), portable_topk.best(torch.cat(each, 1), 4)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0].view(integers), expected[0].view(integers))
