"""Test the gradient of packed documents against fp64, from bucketed argmax lists and from dense tiles."""

import itertools

import pytest
import torch

from ...support.common import INTERPRETING

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.core.segments import PackedArgs
from lik_ops.csrc_triton.backward.documents.packed import BUCKET_ROW_LIMIT, MAX_BUCKETS
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
    list_few_winners_too,
    problem,
    won,
)

__all__ = ["list_few_winners_too"]
pytestmark = pytest.mark.parametrize("place", PLACES, ids=str)
BLOCK = 64 if INTERPRETING else 4096  # maximum query rows listed by one program
ONE_BLOCK = (3, 0, 35, 2)
BLOCKS = (3, 0, BLOCK, 2, BLOCK)
PATHS = {"listed": 16 * 2**20, "walked": 0}  # byte limit of the lists

slow_in_interpreter = [pytest.mark.slow] if INTERPRETING else []


def cross(place, dtype, queries, documents, tokens, **fields):
    """Return a cross product problem of documents at [(first row, length), ..] in `tokens` rows."""
    p = problem(place, "cross", dtype, queries=queries, documents=(tokens,), **fields)
    at = torch.tensor(documents, device=place.device)
    meetings = [(i, j, (i, j)) for i in range(len(queries)) for j in range(len(documents))]
    return Problem(p.r._replace(d_offsets=at[:, 0], d_lengths=at[:, 1]), meetings)


def check(p, dtype, normalize=False):
    scores, argmax = won(p, normalize)
    upstream = torch.randn(scores.shape, device=scores.device)
    found = gradients(p, upstream, argmax, normalize, (False, True, False))[1]
    assert gradient_error(p, found, upstream, normalize) < GRADIENT_TOLERANCE[dtype], dtype


# One covers all others; some are nested, equal, of one token, or empty; one is at the end of all rows.
OVERLAPPING = [(0, 90), (3, 20), (3, 7), (40, 50), (89, 1), (5, 0), (60, 20), (3, 20), (3, 20), (0, 90), (90, 0)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("queries", [ONE_BLOCK, BLOCKS], ids=["one block", "blocks"])
def test_gradient_of_overlapping_documents(place, queries, path, monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_MAX_BUCKET_BYTES", PATHS[path])
    launched = kernels_launched(monkeypatch)
    for dtype in half_or_fp32(place)[-1:] if INTERPRETING and queries is BLOCKS else half_or_fp32(place):
        check(cross(place, dtype, queries, OVERLAPPING, 90), dtype)
    assert (cuda_ragged_backward.maxsim_list_packed_argmax in launched) == (path == "listed")


@pytest.mark.parametrize(
    ("overlap", "pieces"), [(0, 1), (3, 2), *(pytest.param(*x, marks=slow_in_interpreter) for x in ((3, 1), (64, 2)))]
)
def test_argmax_lists_are_chunked_by_byte_limit(place, overlap, pieces, monkeypatch):
    """The remaining tiles, which have too many documents, read the argmax of all rows."""
    monkeypatch.setattr(cuda_ragged_backward, "_MAX_BUCKET_BYTES", 4 * 5 * (sum(ONE_BLOCK) + MAX_BUCKETS.value + 1))
    monkeypatch.setattr(cuda_ragged_backward, "_BUCKET_OVERLAP_DOCUMENTS", overlap)
    monkeypatch.setattr(cuda_ragged_backward._PackedGradientCall, "_pieces", lambda *_: pieces)
    documents = [*OVERLAPPING, *((n, 9) for n in range(90, 180, 15)), (186, 13), (199, 1)]
    monkeypatch.setenv("LIK_OPS_REHEARSAL", "0")
    launched = kernels_launched(monkeypatch)
    check(cross(place, torch.float32, ONE_BLOCK, documents, 210), torch.float32)
    chunks = launched.count(cuda_ragged_backward.maxsim_list_packed_argmax)
    assert chunks == -(-len(documents) // 4)
    assert launched.count(cuda_ragged_backward.maxsim_grad_packed_documents) == chunks + 1


def test_few_query_rows_do_not_use_argmax_lists(place, monkeypatch):
    p = cross(place, torch.float32, ONE_BLOCK, [(0, 9)], 9)
    for rows, listed in ((sum(ONE_BLOCK), True), (sum(ONE_BLOCK) + 1, False)):
        monkeypatch.setattr(cuda_ragged_backward, "_MIN_BUCKETED_ROWS", rows)
        launched = kernels_launched(monkeypatch)
        check(p, torch.float32)
        assert (cuda_ragged_backward.maxsim_list_packed_argmax in launched) == listed


@pytest.mark.parametrize("path", PATHS)
def test_normalized_rows_of_many_features(place, path, monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_MAX_BUCKET_BYTES", PATHS[path])
    check(cross(place, torch.float16, (3, 0, 9), [(0, 40), (3, 20), (5, 0)], 40, d=200), torch.float16, True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scale", [1e-3, 1e2])
def test_gradients_of_fp16_keep_their_precision_at_any_scale(place, scale, path, monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_MAX_BUCKET_BYTES", PATHS[path])
    p = cross(place, torch.float16, ONE_BLOCK, OVERLAPPING[:4], 90, options=False)
    scores, argmax = won(p, False)
    upstream = scale * torch.randn(scores.shape, device=scores.device)
    found = gradients(p, upstream, argmax, needs=(False, True, False))[1]
    # Subnormal gradients hold fewer digits.
    assert gradient_error(p, found, upstream, False) < (2e-3 if scale < 1 else 5e-4)


@pytest.mark.parametrize(
    "length", [1008, 1009, *(pytest.param(n, marks=slow_in_interpreter) for n in (1007, 2016, 2017, 2100, 17000))]
)
def test_documents_longer_than_buckets_of_one_tile(place, length):
    """Their entries belong to several tiles, and the documents begin anywhere in a bucket."""
    p = cross(place, torch.float32, (2, 17), [(0, 20), (11, length), (length, 11)], length + 11, options=False)
    check(p, torch.float32)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("path", PATHS)
def test_invalid_argmax_values_are_ignored(place, path, pieces, monkeypatch):
    """Argmax values are beyond their document, in the next one, or negative, and some rows belong to no query."""
    monkeypatch.setattr(cuda_ragged_backward, "_MAX_BUCKET_BYTES", PATHS[path])
    monkeypatch.setattr(cuda_ragged_backward._PackedGradientCall, "_pieces", lambda *_: pieces)
    p = cross(place, torch.float32, BLOCKS, [(0, 20), (20, 30), (47, 3), (4, 0)], 60, options=False)
    cu = p.r.cu_seqlens_q.clone()
    cu[0] = 2  # two rows outside every query
    p = Problem(p.r._replace(cu_seqlens_q=cu), p.meetings)
    scores, argmax = won(p, False)
    upstream = torch.randn(scores.shape, device=scores.device)
    argmax[:3, ::5] = -1
    clean = gradients(p, upstream, argmax, needs=(False, True, False))[1]
    for wrong in (20 + 30, 31, 2**31 - 1, -2, -(2**31)):
        argmax[:3, ::5] = wrong
        argmax[:, :2] = 1
        argmax[3] = 1  # of the empty document
        assert torch.equal(gradients(p, upstream, argmax, needs=(False, True, False))[1], clean), wrong


def test_tokens_without_argmax_get_zero_deterministically(place):
    p = cross(place, torch.float16, BLOCKS, [(33, 40), (-1, 9), (80, 30), (60, 20)], 100, options=False)
    scores, argmax = won(Problem(p.r, []), False)
    argmax[0], argmax[3] = 7, 2
    upstream = torch.randn(scores.shape, device=scores.device)
    first = gradients(p, upstream, argmax, needs=(False, True, False))[1]
    assert first.any(1).nonzero().flatten().tolist() == [40, 62]
    assert torch.equal(gradients(p, upstream, argmax, needs=(False, True, False))[1], first)


def test_lists_are_sorted_by_bucket_and_row(place):
    documents = [(0, 20), (7, 1500), (1400, 107), (30, 0)]
    p = cross(place, torch.float32, BLOCKS, documents, 1507, options=False)
    Tq = p.r.Q.shape[0]
    argmax = torch.stack([torch.randint(-1, max(n, 1), (Tq,), device=place.device) for _, n in documents]).int()
    c = PackedArgs.from_tensors(p.r, Tq)
    grad_scores = torch.zeros(c.scores_shape(), device=place.device)
    packed = cuda_ragged_backward._PackedGradientCall(grad_scores, c.for_kernel(), argmax, False, None)
    call, lookup = packed.call, packed.lookup
    launch = backward_configs.configure_packed_documents(call.kind, rows=None, flat=True, shared=False, listed=True)
    listing = packed._configure_buckets(launch)
    blocks, rows = listing.blocks, listing.rows
    assert blocks > 1 and rows <= BLOCK
    up = call.up._replace(query=lookup.query, items=lookup.items, count=len(documents))
    lists = listing.lists(place.device)
    grid = (len(documents) * blocks,)
    call.run(cuda_ragged_backward.maxsim_list_packed_argmax, grid, (up, lists), listing.launch)
    entries = lists.entries.view(-1, blocks, rows).tolist()
    starts, tile = lists.starts.view(-1, blocks, MAX_BUCKETS.value + 1).tolist(), launch.config.BN
    for n, (first, length) in enumerate(documents):
        width = tile
        while width * (MAX_BUCKETS.value - 1) < length:
            width *= 2
        used = -(-(first % width + length) // width) if length else 0
        for block in range(blocks):
            won_at = argmax[n, block * rows : (block + 1) * rows]
            of = torch.where(won_at < 0, -1, won_at + first).tolist() if length else []
            expected = [
                [r * BUCKET_ROW_LIMIT.value + at % width for r, at in enumerate(of) if at >= first and at // width == b]
                for b in range(first // width, first // width + used)
            ]
            bounds = starts[n][block][: used + 1]
            assert [entries[n][block][a:b] for a, b in itertools.pairwise(bounds)] == expected
            assert bounds[0] == 0 and bounds[-1] == sum(map(len, expected))
