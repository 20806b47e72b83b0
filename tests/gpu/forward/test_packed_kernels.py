"""Test the ragged kernels: scores bit for bit against the dense kernels, and gradients against fp64."""

import dataclasses
import functools
import itertools

import pytest
import torch

import lik_ops
from lik_ops import reference
from lik_ops.core.plan_cache import plans
from lik_ops.core.segments import PackedArgs, RaggedArgs

from ...support.common import CUDA, INTERPRETER, INTERPRETING

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.gpu.backward import packed as cuda_ragged_backward
from lik_ops.gpu.forward import packed as cuda_ragged
from lik_ops.gpu.tuning import forward_configs

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("place", PLACES, ids=str)

MODES = ("cross", "candidates", "pairs")
# The interpreter computes an argmax one element at a time.
QUERIES, DOCUMENTS = ((3, 0, 35, 2), (5, 0, 20, 1)) if INTERPRETING else ((3, 1, 0, 20, 70, 33), (5, 0, 1, 40, 170, 2))


def half_or_fp32(place):
    return [dtype for dtype in place.dtypes if dtype != torch.float64]


def bounds(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0)


@dataclasses.dataclass
class Problem:
    """Packed tensors and the scored pairs as (query, document, position among the scores)."""

    r: RaggedArgs
    meetings: list

    def cut(self, i, j):
        """Return Q, D, q_mask, d_mask, and q_weight of one query and one document."""
        r = self.r
        first, last = (int(n) for n in r.cu_seqlens_q[i : i + 2])
        begin, length = int(r.d_offsets.view(-1)[j]), int(r.d_lengths.view(-1)[j])
        rows, tokens = slice(first, last), slice(begin, begin + length)
        q_mask, q_weight = (None if t is None else t[rows] for t in (r.q_mask, r.q_weight))
        return r.Q[rows], r.D[tokens], q_mask, None if r.d_mask is None else r.d_mask[tokens], q_weight

    def winners(self, argmax, i, at):
        first, last = (int(n) for n in self.r.cu_seqlens_q[i : i + 2])
        return argmax[at, : last - first] if self.r.pairs is not None else argmax[at[1], first:last]


def problem(place, mode, dtype, d=16, options=True, queries=QUERIES, documents=DOCUMENTS, values="normal"):
    device = place.device
    rows, tokens = sum(queries), sum(documents)
    if values == "normal":
        Q, D = torch.randn(rows, d).to(device, dtype), torch.randn(tokens, d).to(device, dtype)
    else:  # exact, with many ties
        Q, D = (torch.randint(-2, 3, (n, d)).to(device, dtype) for n in (rows, tokens))
    q_mask, d_mask = ((torch.rand(n) > 0.3).to(device) if options else None for n in (rows, tokens))
    weight = torch.randn(rows).to(device) if options else None
    if options:  # masked tokens never matter
        Q[~q_mask], D[~d_mask] = float("nan"), float("inf")
    cu_q, cu_d = bounds(queries, device), bounds(documents, device)
    offsets, lengths, pairs = cu_d[:-1], cu_d[1:] - cu_d[:-1], None
    if mode == "cross":
        meetings = [(i, j, (i, j)) for i in range(len(queries)) for j in range(len(documents))]
    elif mode == "candidates":
        chosen = torch.randint(len(documents), (len(queries), 3), device=device)
        offsets, lengths = offsets[chosen], lengths[chosen]
        meetings = [(i, 3 * i + k, (i, k)) for i in range(len(queries)) for k in range(3)]
    else:
        pairs = torch.stack([torch.randint(len(n), (17,)) for n in (queries, documents)], 1).to(device)
        meetings = [(i, j, n) for n, (i, j) in enumerate(pairs.tolist())]
    return Problem(RaggedArgs(Q, D, cu_q, offsets, lengths, pairs, q_mask, d_mask, weight), meetings)


def forward(p, normalize=False, argmax_dtype=torch.int32):
    most = int(p.r.cu_seqlens_q.diff().max()) if p.r.pairs is not None else 0
    return cuda_ragged.forward_ragged(p.r, normalize, argmax_dtype, most)


def padded(tensors, fill):
    """Return the tensors padded with `fill`, which no result may depend on, and their mask."""
    whole = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)
    lengths = torch.tensor([t.shape[0] for t in tensors], device=whole.device)
    return whole, torch.arange(whole.shape[1], device=whole.device) < lengths[:, None]


def assert_dense_bits(place, p, normalize=False, winners=not INTERPRETING):
    """Assert the bits of one dense call of padded queries, each with its single padded document."""
    scores, _ = forward(p, normalize, None)
    Q, D, q_mask, d_mask, weight = zip(*(p.cut(i, j) for i, j, _ in p.meetings), strict=True)
    (Q, q_kept), (D, d_kept) = padded(Q, float("nan")), padded(D, float("inf"))
    if p.r.q_mask is not None:
        q_kept, d_kept = padded(q_mask, False)[0], padded(d_mask, False)[0]
    weight = None if p.r.q_weight is None else padded(weight, 3.0)[0]
    args = Q, D[:, None], q_kept, d_kept[:, None]
    with place.use():
        expected = lik_ops.maxsim(*args, q_weight=weight, normalize=normalize)
        first = lik_ops.maxsim_with_argmax(*args, q_weight=weight, normalize=normalize)[1] if winners else None
    for n, (i, j, at) in enumerate(p.meetings):
        assert torch.equal(scores[at], expected[n, 0]), (i, j)
    if first is None:
        return
    again, argmax = forward(p, normalize)
    assert torch.equal(again, scores)
    for n, (i, j, at) in enumerate(p.meetings):
        found = p.winners(argmax, i, at).long()
        assert torch.equal(found, first[n, 0, : found.shape[0]]), (i, j)


slow_in_interpreter = [pytest.mark.slow] if INTERPRETING else []


@pytest.mark.parametrize("values", ["normal", pytest.param("integer", marks=slow_in_interpreter)])
@pytest.mark.parametrize("options", [True, pytest.param(False, marks=slow_in_interpreter)])
@pytest.mark.parametrize("mode", MODES)
def test_scores_have_the_bits_of_dense_calls(place, mode, options, values):
    for dtype in half_or_fp32(place):
        assert_dense_bits(place, problem(place, mode, dtype, options=options, values=values))


@pytest.mark.parametrize("mode", MODES)
def test_argmax_is_the_first_of_equal_tokens(place, mode):
    p = problem(place, mode, torch.float16, queries=(3, 0, 5), documents=(5, 0, 20), values="integer")
    assert_dense_bits(place, p, winners=True)


@pytest.mark.parametrize(
    ("d", "normalize"),
    [(16, True), (200, False), *(pytest.param(*x, marks=slow_in_interpreter) for x in ((7, False), (200, True)))],
)
def test_scores_have_the_bits_of_dense_calls_for_other_d(place, d, normalize):
    for dtype in half_or_fp32(place)[-1:] if INTERPRETING else half_or_fp32(place):
        assert_dense_bits(place, problem(place, "cross", dtype, d=d), normalize)


@pytest.mark.parametrize("slot", [4, *(pytest.param(slot, marks=slow_in_interpreter) for slot in (2, 8))])
def test_rows_per_query_do_not_change_the_bits(place, slot, monkeypatch, request):
    """The mean length determines the rows per query, and actual lengths differ from the mean."""
    monkeypatch.setattr(forward_configs, "MIN_ROWS_PER_QUERY", slot)
    plans.clear()
    request.addfinalizer(plans.clear)
    queries = (1, 2, 3, 5, 7, 12, 17, 31, 33, 41, *[0] * 70)
    assert sum(queries) / len(queries) < slot + 1
    assert_dense_bits(place, problem(place, "cross", torch.float16, queries=queries, documents=(7,)))


@pytest.mark.parametrize("format", [None, "int8", "uint8", "fp8_e4m3", "rq4"])
@pytest.mark.parametrize("Lq", [1, 3])
def test_few_tokens_of_dense_queries_have_the_bits_of_packed_queries(place, Lq, format):
    """Tiles hold more dense queries of few tokens than packed queries, whose lengths vary."""
    Q, D = torch.randn(9, Lq, 32).half().to(place.device), torch.randn(40, 32).half().to(place.device)
    bounds = torch.tensor([0, 7, 7, 40], device=place.device)
    documents = D if format is None else lik_ops.quantize(D, format)
    rows = torch.arange(0, 9 * Lq + 1, Lq, device=place.device)
    with place.use():
        dense = lik_ops.maxsim_varlen(Q, documents, None, bounds)
        assert torch.equal(dense, lik_ops.maxsim_varlen(Q.flatten(0, 1), documents, rows, bounds))
        if format is None:
            assert torch.equal(dense[:, 2], lik_ops.maxsim(Q, D[None, 7:])[:, 0])


def test_one_long_query_and_document_among_short_ones(place):
    long_query, long_document = (40, 70) if INTERPRETING else (1000, 5000)
    p = problem(place, "cross", torch.float16, queries=(1, long_query, 2), documents=(1, long_document, 2, 0))
    assert_dense_bits(place, p)


def test_int16_argmax_matches_int32(place):
    p = problem(place, "cross", torch.float16, queries=(3, 7), documents=(5, 9))
    assert torch.equal(forward(p, argmax_dtype=torch.int16)[1].int(), forward(p)[1])


def test_out_of_range_bounds_and_pairs_score_nan(place):
    """Test offsets, lengths, bounds, and pairs that are negative or exceed the tensors."""
    good = problem(place, "cross", torch.float16, queries=(3, 1, 0, 4, 2, 5), documents=(5, 0, 1, 4, 7, 2))
    scores, argmax = forward(good)
    offsets, lengths, cu = (t.clone() for t in (good.r.d_offsets, good.r.d_lengths, good.r.cu_seqlens_q))
    tokens, rows = good.r.D.shape[0], good.r.Q.shape[0]
    offsets[0], lengths[1], offsets[2], lengths[3], lengths[4] = -1, -1, tokens, tokens, 2**40
    bad = good.r._replace(d_offsets=offsets, d_lengths=lengths)
    found, winners = cuda_ragged.forward_ragged(bad, False, torch.int32, 0)
    assert found[:, :5].isnan().all() and torch.equal(found[:, 5], scores[:, 5])
    assert (winners[:5] == -1).all() and torch.equal(winners[5], argmax[5])
    cu[2], cu[4] = -3, rows + 1  # of queries 1 and 2, 3 and 4
    found, winners = cuda_ragged.forward_ragged(bad._replace(cu_seqlens_q=cu), False, torch.int32, 0)
    assert found[1:5].isnan().all() and torch.equal(found[[0, 5], 5], scores[[0, 5], 5])
    cu[2:5] = torch.tensor([2**63 - 1, -(2**63), 8])  # in 64 bits the second is one more than the first
    found, winners = cuda_ragged.forward_ragged(bad._replace(cu_seqlens_q=cu), False, torch.int32, 0)
    assert found[1:4].isnan().all() and torch.equal(found[[0, 5], 5], scores[[0, 5], 5])
    pairs = torch.tensor([[0, 0], [-1, 0], [0, 6], [6, 0], [0, -1], [5, 3]], device=place.device)
    found, winners = cuda_ragged.forward_ragged(good.r._replace(pairs=pairs), False, torch.int32, 5)
    assert found[1:5].isnan().all() and torch.equal(found[[0, 5]], torch.stack([scores[0, 0], scores[5, 3]]))
    assert (winners[1:5] == -1).all() and (winners[5] >= 0).any()
    found, few = cuda_ragged.forward_ragged(good.r._replace(pairs=pairs), False, torch.int32, 4)
    assert (few[5] == -1).all() and found[5].isnan(), "winners that do not fit"
    assert torch.equal(few[0], winners[0, :4]) and torch.equal(found[0], scores[0, 0])


def test_nothing_to_score(place):
    p = problem(place, "cross", torch.float16)
    for r in (
        p.r._replace(d_offsets=p.r.d_offsets[:0], d_lengths=p.r.d_lengths[:0]),
        p.r._replace(cu_seqlens_q=p.r.cu_seqlens_q[:1]),
    ):
        scores, argmax = cuda_ragged.forward_ragged(r, False, torch.int32, 0)
        assert scores.numel() == argmax[:, :0].numel() == 0
        grads = cuda_ragged_backward.backward_ragged(scores, r, argmax, False, [True] * 3, False)
        assert [g.shape for g in grads] == [r.Q.shape, r.D.shape, r.Q.shape[:1]]
        assert not any(g.any() for g in grads)


@pytest.fixture(autouse=True)
def list_few_winners_too(monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_MIN_BUCKETED_ROWS", 0)


def kernels_launched(monkeypatch):
    """Return a list to which every later backward kernel launch is appended."""
    launched, launch = [], cuda_ragged_backward.launcher.launch
    monkeypatch.setattr(
        cuda_ragged_backward.launcher, "launch", lambda kernel, *args: (launched.append(kernel), launch(kernel, *args))
    )
    return launched


def won(p, normalize):
    """Return the argmax of the reference."""
    most = int(p.r.cu_seqlens_q.diff().max()) if p.r.pairs is not None else 0
    c = PackedArgs.from_tensors(p.r, most)
    argmax = torch.full(c.argmax_shape(), -1, dtype=torch.int32, device=p.r.Q.device)
    for i, j, at in p.meetings:
        q, d, q_mask, d_mask, _ = p.cut(i, j)
        q, d = (x if m is None else torch.where(m[:, None], x, 0) for x, m in ((q, q_mask), (d, d_mask)))
        _, found = reference.maxsim_with_argmax(q.double(), d.double(), q_mask, d_mask, normalize=normalize)
        p.winners(argmax, i, at).copy_(found)
    return torch.zeros(c.scores_shape(), device=argmax.device), argmax


def gradients(p, upstream, argmax, normalize=False, needs=(True, True, True), unified=False):
    return cuda_ragged_backward.backward_ragged(upstream, p.r, argmax, normalize, list(needs), unified)


def expected_gradients(p, upstream, normalize):
    r = p.r
    Q = (r.Q if r.q_mask is None else torch.where(r.q_mask[:, None], r.Q, 0)).double().requires_grad_()
    D = (r.D if r.d_mask is None else torch.where(r.d_mask[:, None], r.D, 0)).double().requires_grad_()
    weight = torch.ones_like(Q[:, 0]) if r.q_weight is None else r.q_weight.double()
    leaves = [Q, D, weight.detach().requires_grad_()]
    exact = dataclasses.replace(p, r=r._replace(Q=Q, D=D, q_weight=leaves[2]))
    loss = torch.zeros((), dtype=torch.float64, device=Q.device)
    for i, j, at in p.meetings:
        q, d, q_mask, d_mask, w = exact.cut(i, j)
        score = reference.maxsim(q, d, q_mask, d_mask, q_weight=w, normalize=normalize)
        if score.isfinite():
            loss = loss + score * upstream[at].double()
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_match_fp64_reference(place, mode, options, unified):
    kinds = [(16, False), (16, True), (200, False)]
    if INTERPRETING:  # one after the other, because each needs seconds there
        kinds = [kinds[(MODES.index(mode) + options + unified) % 3]]
    for dtype in half_or_fp32(place):
        for d, normalize in kinds:
            p = problem(place, mode, dtype, d=d, options=options)
            scores, argmax = won(p, normalize)
            upstream = torch.randn(scores.shape, device=scores.device)
            needs = (True, True, options)
            found = gradients(p, upstream, argmax, normalize, needs, unified)
            for need, g, e in zip(needs, found, expected_gradients(p, upstream, normalize), strict=True):
                if need:
                    tolerance = GRADIENT_TOLERANCE[dtype]
                    assert float((g.double() - e).norm()) <= tolerance * float(e.norm()), (dtype, d, normalize)


@pytest.mark.parametrize("mode", MODES)
def test_only_requested_gradients_are_computed(place, mode):
    p = problem(place, mode, torch.float32)
    scores, argmax = won(p, False)
    upstream = torch.randn(scores.shape, device=scores.device)
    whole = gradients(p, upstream, argmax)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        for need, found, expected in zip(needs, gradients(p, upstream, argmax, False, needs), whole, strict=True):
            assert torch.equal(found, expected) if need else found.shape == (0,)


@pytest.mark.parametrize("mode", MODES)
def test_lowmem_is_deterministic_and_unified_raises(place, mode):
    p = problem(place, mode, torch.float16)
    scores, argmax = won(p, False)
    upstream = torch.randn(scores.shape, device=scores.device)
    first = gradients(p, upstream, argmax)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(p, upstream, argmax), first, strict=True))
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="deterministic"):
        gradients(p, upstream, argmax, unified=True)


def test_rows_outside_queries_and_documents_get_zero_gradients(place):
    p = problem(place, "cross", torch.float16, options=False)
    r = p.r._replace(cu_seqlens_q=p.r.cu_seqlens_q[1:4], d_offsets=p.r.d_offsets[2:3], d_lengths=p.r.d_lengths[2:3])
    inner = Problem(r, [(i, 0, (i, 0)) for i in range(2)])
    scores, argmax = won(inner, False)
    grad_Q, grad_D, _ = gradients(inner, torch.ones_like(scores), argmax, needs=(True, True, False))
    used = slice(int(r.cu_seqlens_q[0]), int(r.cu_seqlens_q[-1]))
    assert grad_Q[used].any(1).all() and not grad_Q[: used.start].any() and not grad_Q[used.stop :].any()
    begin, end = int(r.d_offsets[0]), int(r.d_offsets[0] + r.d_lengths[0])
    assert grad_D[begin:end].any() and not grad_D[:begin].any() and not grad_D[end:].any()


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_dense_sides_match_packed_rows(place, mode, unified):
    """An eager call keeps dense sides for its backward."""
    p = problem(place, mode, torch.float32, queries=(5, 5, 5, 5), documents=(9, 9, 9))
    scores, argmax = won(p, True)
    upstream = torch.randn(scores.shape, device=scores.device)
    expected = gradients(p, upstream, argmax, True, unified=unified)
    whole = PackedArgs.from_tensors(p.r, 5)
    Q, D = whole.Q.view(4, 5, -1), whole.D.view(3, 9, -1)
    cuts = [whole._replace(Q=Q, cu_seqlens_q=None)]
    if mode != "candidates":  # candidates name documents
        cuts += [whole._replace(D=D, offsets=None, lengths=None)]
        cuts += [whole._replace(Q=Q, D=D, cu_seqlens_q=None, offsets=None, lengths=None)]
    close = functools.partial(torch.testing.assert_close, **({} if unified else {"rtol": 0, "atol": 0}))
    for cut in cuts:
        found = cuda_ragged_backward.backward_cut(upstream, cut, argmax, True, [True] * 3, unified)
        assert [x.shape for x in found] == [cut.Q.shape, cut.D.shape, cut.Q.shape[:-1]]
        for x, y in zip(found, expected, strict=True):
            close(x.view(y.shape), y)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_without_queries_or_documents_are_zero(place, mode):
    """With packed rows but no query or no document, there is no segment to search."""
    for queries, documents in (((), DOCUMENTS), (QUERIES, ())):
        p = problem(place, mode, torch.float32)
        r = p.r._replace(cu_seqlens_q=p.r.cu_seqlens_q[: len(queries) + 1])
        columns = len(documents)
        shape = (len(queries), columns) if mode == "candidates" else (columns,)
        r = r._replace(d_offsets=r.d_offsets.new_zeros(shape), d_lengths=r.d_lengths.new_zeros(shape))
        c = PackedArgs.from_tensors(r, 5)
        argmax = torch.zeros(c.argmax_shape(), dtype=torch.int32, device=place.device)
        upstream = torch.ones(c.scores_shape(), device=place.device)
        for gradient in cuda_ragged_backward.backward_ragged(upstream, r, argmax, False, [True] * 3, False):
            assert gradient.eq(0).all()


@pytest.mark.parametrize("mode", MODES)
def test_argmax_outside_every_query_is_ignored(place, mode):
    """The argmax of another call may name rows outside Q, or score gradients outside their tensor."""
    p = problem(place, mode, torch.float32, options=False)
    scores, argmax = won(p, False)
    upstream, needs = torch.randn_like(scores), (True, True, False)
    rows = torch.cat([p.r.Q, torch.full_like(p.r.Q[:4], float("nan"))])
    r = p.r._replace(
        Q=rows, pairs=None if p.r.pairs is None else torch.cat([p.r.pairs, p.r.pairs.new_tensor([[-1, 0]])])
    )
    if mode == "pairs":
        upstream = torch.cat([upstream, upstream[:1]])
        argmax = torch.cat([argmax, torch.zeros_like(argmax[:1])])
    else:
        argmax = torch.cat([argmax, torch.zeros_like(argmax[:, :4])], 1)
    longer = Problem(r, p.meetings)
    grad_Q, grad_D, _ = gradients(longer, upstream, argmax, needs=needs)
    first = slice(0, p.r.Q.shape[0])
    expected = gradients(p, upstream[: scores.shape[0]], won(p, False)[1], needs=needs)
    torch.testing.assert_close(grad_Q[first], expected[0])
    torch.testing.assert_close(grad_D, expected[1])
    assert not grad_Q[first.stop :].any()


@pytest.mark.parametrize("bounds", [[0, 2, 2, 5], [3, 5, 0, 3], [1, 4, -1, 4, 7], [6, 2, 3, 3, 99, 5], [-1, 0]])
def test_row_to_query_lookup_follows_bounds(place, bounds):
    """Bounds leave gaps, descend, or exceed the rows, as they do in a batch of samples."""
    Q, cu = torch.zeros(7, 4, device=place.device), torch.tensor(bounds, device=place.device)
    none = torch.zeros(0, dtype=torch.int64, device=place.device)
    expected = [-1] * 7
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if 0 <= begin < end <= 7:
            expected[begin:end] = [i] * (end - begin)
    cut = PackedArgs.from_tensors(RaggedArgs(Q, Q, cu, none, none, None, None, None, None), 7)
    assert cuda_ragged_backward.PairLookup(cut, 7, (1, 1)).query.tolist() == expected


HALF_ULP = 2**-8  # of bf16: the token with most argmax rows is most of the norm, and its rounding does not average out
GRADIENT_TOLERANCE = {torch.bfloat16: HALF_ULP, torch.float16: 5e-4, torch.float32: 1e-6}
FEW = {"all at once": 10**9, "those that win": 0}


def gradient_error(p, found, upstream, normalize):
    """Return the error of the document gradient relative to its norm."""
    expected = expected_gradients(p, upstream, normalize)[1]
    return float((found.double() - expected).norm()) / float(expected.norm())


@pytest.mark.parametrize("few", FEW.values(), ids=FEW)
@pytest.mark.parametrize("mode", MODES[1:])
def test_gradient_of_overlapping_documents(place, mode, few, monkeypatch):
    """One document covers all others, some are nested or share a first row, and one is in most pairs."""
    monkeypatch.setattr(cuda_ragged_backward, "_MIN_SPARSE_RATIO", few)
    for dtype in half_or_fp32(place)[-1:] if INTERPRETING else half_or_fp32(place):
        p = problem(place, "pairs", dtype, documents=(90,))
        at = torch.tensor([[0, 90], [3, 20], [3, 7], [40, 50], [89, 1], [5, 0], [60, 20]], device=place.device)
        met = torch.tensor([(i * j) % 7 if i else 1 for i in range(4) for j in range(6)], device=place.device)
        queries = torch.arange(24, device=place.device) // 6
        if mode == "pairs":
            r = p.r._replace(d_offsets=at[:, 0], d_lengths=at[:, 1], pairs=torch.stack([queries, met], 1))
            meetings = [(i, j, n) for n, (i, j) in enumerate(r.pairs.tolist())]
        else:
            r = p.r._replace(d_offsets=at[met, 0].view(4, 6), d_lengths=at[met, 1].view(4, 6), pairs=None)
            meetings = [(i, 6 * i + k, (i, k)) for i in range(4) for k in range(6)]
        p = Problem(r, meetings)
        scores, argmax = won(p, False)
        upstream = torch.randn(scores.shape, device=scores.device)
        assert gradient_error(p, gradients(p, upstream, argmax)[1], upstream, False) < GRADIENT_TOLERANCE[dtype], dtype


@pytest.mark.parametrize("mode", MODES)
def test_gradients_summed_in_pieces_match_fp64_reference(place, mode, monkeypatch):
    """Few rows of D must not leave a GPU with few programs."""
    monkeypatch.setattr(cuda_ragged_backward, "_MIN_SPLIT_ROWS", 8)
    monkeypatch.setattr(cuda_ragged_backward, "_MIN_SPLIT_PAIRS", 2)
    launched = kernels_launched(monkeypatch)
    for d, normalize in ((16, False), (200, True)):
        p = problem(place, mode, torch.float32, d=d)
        scores, argmax = won(p, normalize)
        upstream = torch.randn(scores.shape, device=scores.device)
        assert gradient_error(p, gradients(p, upstream, argmax, normalize)[1], upstream, normalize) < 1e-6
    assert cuda_ragged_backward.maxsim_join_packed_pieces in launched


@pytest.mark.parametrize("few", FEW.values(), ids=FEW)
def test_gradients_keep_their_precision_at_any_scale(place, few, monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_MIN_SPARSE_RATIO", few)
    for dtype in half_or_fp32(place):
        p = problem(place, "candidates", dtype, options=False)
        scores, argmax = won(p, False)
        for scale in (1e-3, 1.0, 1e2) if dtype == torch.float16 else (1e-9, 1.0, 1e5):
            upstream = scale * torch.randn(scores.shape, device=scores.device)
            # Subnormal gradients of fp16 hold fewer digits.
            tolerance = {torch.bfloat16: HALF_ULP, torch.float16: 2e-3 if scale < 1 else 5e-4, torch.float32: 1e-6}[
                dtype
            ]
            assert gradient_error(p, gradients(p, upstream, argmax)[1], upstream, False) < tolerance, (dtype, scale)


@pytest.mark.parametrize("few", FEW.values(), ids=FEW)
@pytest.mark.parametrize("mode", MODES)
def test_nonfinite_row_reaches_only_its_argmax_tokens(place, mode, few, monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_MIN_SPARSE_RATIO", few)
    if mode == "cross":  # if lists exceed the limit, the kernel reads all argmax values
        monkeypatch.setattr(cuda_ragged_backward, "_MAX_BUCKET_BYTES", few)
    p = problem(place, mode, torch.float16, options=False, queries=(3, 0, 5), documents=(5, 0, 20))
    scores, argmax = won(p, False)
    upstream = torch.randn(scores.shape, device=scores.device)
    clean = gradients(p, upstream, argmax)[1]
    Q = p.r.Q.clone()
    Q[4, 0], Q[6, 1] = float("inf"), float("nan")  # of the last query
    found = gradients(Problem(p.r._replace(Q=Q), p.meetings), upstream, argmax)[1]
    reached = torch.zeros(clean.shape[0], dtype=torch.bool, device=clean.device)
    for i, j, at in p.meetings:
        if i == 2:
            tokens = p.winners(argmax, i, at)[[1, 3]]
            reached[int(p.r.d_offsets.view(-1)[j]) + tokens[tokens >= 0]] = True
    assert reached.any() and (found[reached].isfinite().all(1) == 0).all()
    torch.testing.assert_close(found[~reached], clean[~reached])


@pytest.mark.parametrize("most", [0, 8192], ids=["sorted by torch", "compared with each other"])
def test_items_are_sorted_and_found_by_tile(place, most, monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_MAX_RANKED_PAIRS", most)
    count, rows, tile = 300, 500, 64
    first = torch.randint(0, rows // 8, (count,), device=place.device) * 8
    first[::7] = rows  # no argmax is possible there
    length = torch.randint(0, 40, (count,), device=place.device).minimum(rows - first)
    length[5] = rows - first[5]
    items = torch.stack([first, length, *(torch.arange(count, device=place.device) + n for n in range(5))])
    found, reach = cuda_ragged_backward.sort_pairs(items, 0, True)
    expected = items[:, torch.sort(first, stable=True).indices]
    assert torch.equal(found, expected)
    assert torch.equal(reach, (expected[0] + expected[1]).cummax(0).values)
    tiles = -(-rows // tile)
    starts = cuda_ragged_backward.compute_starts(found[0], reach, tiles + 1, tile, rows).view(2, -1)
    for t in range(tiles):
        met = (found[0] < min((t + 1) * tile, rows)) & (found[0] + found[1] > t * tile)
        lo, hi = int(starts[1, t]), int(starts[0, t + 1])
        assert not met[:lo].any() and not met[hi:].any() and hi <= count
        assert lo == int((reach <= t * tile).sum())


@pytest.mark.parametrize(
    ("Nq", "Lq", "normalize"), [(1, 9, False), (3, 20, True), (2, 70 if INTERPRETING else 300, False)]
)
def test_persistent_programs_skip_empty_documents(place, Nq, Lq, normalize, monkeypatch):
    """Persistent programs give the bits of one program for each document, empty or not, inside D or not."""
    K, Td, d = (90 if INTERPRETING else 40_000), 200, 24
    draw = torch.Generator().manual_seed(Lq)
    lengths = torch.randint(0, 12, (K,), generator=draw) * (torch.rand(K, generator=draw) < 0.2)
    offsets = torch.randint(0, Td - 12, (K,), generator=draw)
    lengths[K // 3 :] = 0
    offsets[::17] = Td + 1
    q_mask = torch.rand(Nq, Lq, generator=draw) < 0.6
    q_mask[-1] = False
    launches = []
    make = cuda_ragged._CompiledTile
    monkeypatch.setattr(cuda_ragged, "_CompiledTile", lambda x, *args: launches.append(x) or make(x, *args))
    for dtype in half_or_fp32(place):
        tensors = *(torch.randn(*n, d, generator=draw).to(dtype) for n in ((Nq, Lq), (Td,))), offsets, lengths, q_mask
        Q, D, at, count, keep = (x.to(place.device) for x in tensors)
        c = PackedArgs(Q, D, None, at, count, None, None, keep, None, None, Nq, K, False, Nq * Lq, Td, Lq)
        results = []
        with place.use():
            for least in (2**31, 0):
                monkeypatch.setattr(cuda_ragged, "_MIN_EMPTY_DOCUMENTS", least)
                results.append(cuda_ragged.PackedPlan(c, normalize, None, "")._run_generic(c)[0].cpu())
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
        assert bool(results[0][:, ::17].isnan().all()) and bool((results[0][-1] == 0).any())
        assert Nq == 1 or bool((results[0][0] == -torch.inf).any())
    assert [launch.config.PERSISTENT for launch in launches[::2]] == [False] * (len(launches) // 2)
    is_measured = cuda_ragged.architecture(torch.device(place.device)).unit in ("wgmma", "interpreter")
    assert all(launch.config.PERSISTENT or launch.config.FP32_TERMS for launch in launches[1::2]) or not is_measured
    assert any(launch.config.PERSISTENT for launch in launches) is is_measured
