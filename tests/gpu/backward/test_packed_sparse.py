"""Test the gradient of packed documents with few argmax rows against fp64."""

import pytest
import torch

from ...support.common import INTERPRETING

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.csrc_triton.backward.documents.packed_sparse import (
    MAX_PAIRS_PER_DOCUMENT,
    maxsim_grad_disjoint_documents,
    maxsim_grad_shared_tiles,
)
from lik_ops.gpu.backward import packed as cuda_ragged_backward
from lik_ops.gpu.tuning import backward_configs

from ..forward.test_packed_kernels import (
    GRADIENT_TOLERANCE,
    PLACES,
    Problem,
    gradient_error,
    gradients,
    half_or_fp32,
    kernels_launched,
    problem,
    won,
)

pytestmark = pytest.mark.parametrize("place", PLACES, ids=str)
# Lengths in tiles (of 32 rows in the interpreter, else 256): below one, one, several, two that share one.
TILES = (2.5, 1.0, 1.25, 0.25, 0.0, 3.0)


TILE = 32 if INTERPRETING else 256


def lookups(place, dtype, rows, met, documents=None, **options):
    """Return a problem of queries of `rows` tokens and pairs [(query, document), ..].

    Documents follow each other, or are at `documents` [(first row, length), ..], in tiles.
    """
    lengths = TILES if documents is None else [first + length for first, length in documents]
    tokens = tuple(int(n * TILE) for n in lengths)
    if documents is not None:
        tokens = (max(tokens), *[0] * (len(documents) - 1))
    p = problem(place, "pairs", dtype, queries=rows, documents=tokens, **options)
    r = p.r._replace(pairs=torch.tensor(met, device=place.device))
    if documents is not None:
        first, length = (torch.tensor([int(x[n] * TILE) for x in documents], device=place.device) for n in (0, 1))
        r = r._replace(d_offsets=first, d_lengths=length)
    return Problem(r, [(i, j, n) for n, (i, j) in enumerate(met)])


EACH = [(0, 0), (1, 1), (2, 2), (3, 3), (0, 4), (2, 5)]
SOME_OFTEN = [*EACH, (1, 0), (2, 0), (3, 0), (0, 0), (1, 3), (1, 3)]
CASES = {
    "short queries": ((14, 9, 16, 3), EACH, {}),
    "no options": ((14, 9, 16, 3), EACH, {"options": False}),
    "queries of many lengths": ((14, 50, 6, 3), SOME_OFTEN, {}),
    "some documents are met often": ((14, 9, 16, 3), SOME_OFTEN, {}),
    "many features": ((14, 9, 16, 3), SOME_OFTEN, {"d": 300}),
    "features that are no multiple of 16": ((14, 9, 16, 3), EACH, {"d": 20}),
}


# The interpreter needs seconds for each.
NORMALIZED = ("short queries", "some documents are met often", "many features")
WHICH = [(case, normalize) for case in CASES for normalize in (False, True) if case in NORMALIZED or not normalize]


@pytest.mark.parametrize("case, normalize", WHICH)
def test_gradients_match_fp64_reference(place, case, normalize, monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_MIN_SPARSE_RATIO", 0)
    launched = kernels_launched(monkeypatch)
    rows, met, options = CASES[case]
    for dtype in half_or_fp32(place)[-1:] if INTERPRETING else half_or_fp32(place):
        p = lookups(place, dtype, rows, met, **options)
        p.r.D[: len(p.r.D) // 8] *= 4  # tokens that are the argmax of most rows
        scores, argmax = won(p, normalize)
        upstream = torch.randn(scores.shape, device=scores.device)
        found = gradients(p, upstream, argmax, normalize)[1]
        assert gradient_error(p, found, upstream, normalize) < GRADIENT_TOLERANCE[dtype], dtype
        assert torch.equal(found, gradients(p, upstream, argmax, normalize)[1])
    assert maxsim_grad_shared_tiles in launched


def shared_tiles(monkeypatch):
    """Return the marks argument of each launch of the kernel that lists shared tiles. Nothing is rehearsed."""
    monkeypatch.setenv("LIK_OPS_REHEARSAL", "0")
    marks, launch = [], cuda_ragged_backward.launcher.launch

    def watched(kernel, grid, args, options):
        if kernel is maxsim_grad_disjoint_documents:
            marks.append(args[3].marks)
        return launch(kernel, grid, args, options)

    monkeypatch.setattr(cuda_ragged_backward.launcher, "launch", watched)
    return marks


def read_listed_tiles(marks, tiles):
    count = int(marks[0])
    found = marks[1 + tiles : 1 + tiles + count].tolist()
    assert marks[1 : 1 + tiles].nonzero().flatten().tolist() == sorted(found)
    return set(found)


MANY = [(0, 0)] * (MAX_PAIRS_PER_DOCUMENT.value + 1)
# Documents in tiles, pairs that score them, and the tiles that are shared.
SHARED = {
    "disjoint": ([(0, 1), (1, 0.5), (3, 1)], [(0, 0), (1, 1), (2, 2), (1, 0)], set()),
    "overlap": ([(0, 1.5), (1.25, 1), (3, 1)], [(0, 0), (1, 1), (2, 2)], {0, 1, 2}),
    "one inside another": ([(0, 3), (1.25, 0.5), (3, 1)], [(0, 0), (1, 1), (2, 2)], {0, 1, 2}),
    "the same first row": ([(1, 0.5), (1, 1.5), (0, 1)], [(0, 0), (1, 1), (2, 2), (3, 1)], {1, 2}),
    "almost as many as are too many": ([(0, 0.5), (2, 1)], [*MANY[1:], (2, 1)], set()),
    "too many items": ([(0, 0.5), (2, 1)], [*MANY, (2, 1)], {0}),
    "far too many items": ([(0, 0.5), (2, 1), (0, 2.5)], [*MANY * 3, (2, 1)] + [(1, 2)] * 2, {0, 1, 2}),
    "documents that nobody meets": ([(0, 1), (0.5, 2), (3, 1)], [(0, 0), (1, 2)], set()),
}


@pytest.mark.parametrize("case", SHARED)
def test_tiles_shared_by_documents_are_listed(place, case, monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_MIN_SPARSE_RATIO", 0)
    marks = shared_tiles(monkeypatch)
    documents, met, together = SHARED[case]
    p = lookups(place, torch.float16, (3, 7, 14, 2), met, documents)
    p.r.D[: len(p.r.D) // 8] *= 4
    scores, argmax = won(p, False)
    upstream = torch.randn(scores.shape, device=scores.device)
    found = gradients(p, upstream, argmax)[1]
    assert gradient_error(p, found, upstream, False) < GRADIENT_TOLERANCE[torch.float16]
    assert torch.equal(found, gradients(p, upstream, argmax)[1])
    tiles = -(-len(p.r.D) // TILE)
    assert [read_listed_tiles(m, tiles) for m in marks] == [together] * 2


@pytest.mark.parametrize("too_many", [False, True])
def test_documents_of_long_queries_are_not_summed_as_disjoint(place, too_many, monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_MIN_SPARSE_RATIO", 0)
    marks = shared_tiles(monkeypatch)
    rows = backward_configs.MAX_DISJOINT_ROWS + too_many, 3
    p = lookups(place, torch.float16, rows, [(0, 0), (1, 1)], [(0, 2), (3, 1)])
    scores, argmax = won(p, False)
    upstream = torch.randn(scores.shape, device=scores.device)
    found = gradients(p, upstream, argmax)[1]
    assert gradient_error(p, found, upstream, False) < GRADIENT_TOLERANCE[torch.float16]
    assert read_listed_tiles(marks[0], 4) == ({0, 1} if too_many else set())


def test_sorting_pairs_with_torch_gives_equal_gradients(place, monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_MIN_SPARSE_RATIO", 0)
    p = lookups(place, torch.float16, (14, 9, 16, 3), SOME_OFTEN)
    scores, argmax = won(p, False)
    upstream = torch.randn(scores.shape, device=scores.device)
    expected = gradients(p, upstream, argmax)[1]
    monkeypatch.setattr(cuda_ragged_backward, "_MAX_RANKED_PAIRS", 0)
    assert torch.equal(gradients(p, upstream, argmax)[1], expected)


@pytest.mark.parametrize("where", ["Q", "upstream"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_nan_and_inf_reach_only_argmax_tokens(place, where, dtype, monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_MIN_SPARSE_RATIO", 0)
    p = lookups(place, dtype, (14, 9, 16, 3), [(0, 0), (1, 0), (2, 2), (3, 4)], options=False)
    scores, argmax = won(p, False)
    upstream = torch.randn(scores.shape, device=scores.device)
    clean = gradients(p, upstream, argmax)[1]
    Q, bad = p.r.Q.clone(), upstream.clone()
    if where == "Q":
        Q[3, 1], Q[5, 0] = float("inf"), float("nan")  # of the first query
        rows = [3, 5]
    else:
        bad[0] = float("inf")
        rows = list(range(14))
    found = gradients(Problem(p.r._replace(Q=Q), p.meetings), bad, argmax)[1]
    reached = torch.zeros(clean.shape[0], dtype=torch.bool, device=clean.device)
    reached[argmax[0, rows].long()] = True
    assert (found[reached].isfinite().all(1) == 0).all()
    torch.testing.assert_close(found[~reached], clean[~reached])


def test_infinite_weight_reaches_only_its_argmax_token(place, monkeypatch):
    """The two pairs share all their other tokens."""
    monkeypatch.setattr(cuda_ragged_backward, "_MIN_SPARSE_RATIO", 0)
    rows, d = 14, 500
    p = lookups(place, torch.float16, (rows, rows), [(0, 0), (1, 0)], [(0, 1)], d=d)
    weight = torch.rand(2 * rows, device=place.device) + 1
    weight[0] = float("inf")
    p = Problem(p.r._replace(q_mask=None, d_mask=None, q_weight=weight, Q=torch.randn_like(p.r.Q)), p.meetings)
    argmax = torch.stack([torch.arange(rows), torch.arange(rows).clamp(min=1)]).int().to(place.device)
    upstream = torch.rand(2, device=place.device)
    found = gradients(p, upstream, argmax)[1]
    rows_of = p.r.Q.float().view(2, rows, d) * (upstream[:, None] * weight.view(2, rows))[..., None]
    assert not found[0].isfinite().any()
    torch.testing.assert_close(found[2:rows], (rows_of[0] + rows_of[1])[2:].half(), rtol=2**-10, atol=1e-6)
