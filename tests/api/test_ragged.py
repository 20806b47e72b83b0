"""Test packed, candidate, pair-list, and padded layouts against the reference of each pair alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lik_ops
from lik_ops import reference
from lik_ops.core.segments import RaggedArgs
from lik_ops.portable import layout as portable_layout
from lik_ops.portable.backward import packed as packed_backward
from lik_ops.portable.forward import packed

from ..portable.test_portable import WORKSPACE, peak_bytes
from ..support.ragged import (
    DEVICES,
    INF,
    KINDS,
    LENGTHS,
    NAN,
    TOLERANCE,
    Batch,
    build,
    dtypes_of,
    same_bits,
    winners_of,
)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


lengths = st.lists(st.sampled_from((0, 0, 1, 1, 2, 3, 5, 8, 23, 24, 33, 64, 100)), max_size=6)
giant = st.sampled_from((0, 129, 300, 1100))


# Values.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(q_lengths=lengths, d_lengths=lengths, long=giant, options=st.booleans(), d=st.sampled_from((1, 3, 16, 40)))
def test_scores_and_argmax_match_the_reference_of_each_pair(kind, device, q_lengths, d_lengths, long, options, d):
    if long:
        d_lengths = [*d_lengths[:3], long, *d_lengths[3:]]
    for dtype in dtypes_of(device):
        b = build(q_lengths, d_lengths, kind, d, dtype, device, options)
        scores, argmax = b.call()
        tokens = b.clean()
        assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        same_bits(b.call(None)[0], scores)
        expected, won = torch.zeros_like(scores), torch.full_like(argmax, -1)
        for index, i, j in b.cells():
            score, winners = b.alone(i, j, *tokens)
            expected[index] = score
            winners_of(b, won, index, i).copy_(winners)
        same_bits(scores, expected)
        same_bits(argmax, won)


@pytest.mark.parametrize("kind", KINDS)
def test_normalized_scores_match_the_fp64_reference(kind, device):
    for dtype in dtypes_of(device):
        b = build(*LENGTHS, kind, 24, dtype, device, normalize=True, exact=False)
        scores = b.call()[0]
        tokens = b.clean()
        for index, i, j in b.cells():
            expected = b.alone(i, j, *tokens)[0]
            tolerance = 1e-11 if dtype == torch.float64 else 2e-5
            torch.testing.assert_close(scores[index].double(), expected, rtol=tolerance, atol=tolerance)


def test_packed_and_dense_inputs_match_maxsim(device):
    b = build((4, 4, 4), (6, 6, 6, 6, 6), "cross", 8, torch.float32, device, options=False)
    Q, D = b.Q.view(3, 4, 8), b.D.view(5, 6, 8)
    w = torch.rand(3, 4, device=device)
    expected = lik_ops.maxsim(Q, D, q_weight=w, normalize=True)
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(5)).to(device, torch.int32)
    offsets, lengths = (x.expand(3, -1).int() for x in (b.cu_d[:-1], b.cu_d.diff()))

    def close(scores, like=expected):
        torch.testing.assert_close(scores, like, rtol=1e-5, atol=1e-5)

    for q, cu_q, v in ((Q, None, w), (b.Q, b.cu_q.int(), w.flatten())):
        options = {"q_weight": v, "normalize": True}
        close(lik_ops.maxsim_candidates_varlen(q, b.D, offsets, lengths, cu_seqlens_q=cu_q, **options))
        for x, cu_d in ((D, None), (b.D, b.cu_d)):
            close(lik_ops.maxsim_varlen(q, x, cu_q, cu_d, **options))
            scores = lik_ops.maxsim_pair_list(q, x, pairs, cu_seqlens_q=cu_q, cu_seqlens_d=cu_d, **options)
            close(scores, expected.flatten())
    q_mask, d_mask = torch.rand(3, 4, device=device) < 0.5, torch.randint(0, 3, (5, 6), device=device)
    d_mask[:, 0] = 1
    expected = lik_ops.maxsim(Q, D, q_mask, d_mask)
    close(lik_ops.maxsim_pair_list(Q, D, pairs, q_mask, d_mask), expected.flatten())
    scores = lik_ops.maxsim_pair_list(b.Q, D, pairs, q_mask.flatten(), d_mask, cu_seqlens_q=b.cu_q, max_seqlen_q=9)
    close(scores, expected.flatten())


def test_padded_scores_use_only_tokens_within_lengths(device):
    Q, D = torch.randn(3, 5, 8, device=device), torch.randn(3, 4, 7, 8, device=device)
    q_lengths = torch.tensor([5, 0, 2], device=device)
    d_lengths = torch.tensor([[7, 0, 1, 3], [7, 0, 8, -1], [2, -3, 9, 7]], device=device, dtype=torch.int32)
    Q[2, 2:], D[0, 2, 1:] = NAN, INF
    D[2, 2, 6] = NAN
    Q.requires_grad_(), D.requires_grad_()
    w = torch.rand(3, 5, device=device, requires_grad=True)
    scores = lik_ops.maxsim_padded(Q, D, q_lengths, d_lengths, q_weight=w)
    for i, c in torch.cartesian_prod(torch.arange(3), torch.arange(4)).tolist():
        n, length = int(q_lengths[i]), int(d_lengths[i, c])
        if not 0 <= length <= 7:
            assert scores[i, c].isnan()
            continue
        expected = reference.maxsim(Q[i, :n].double(), D[i, c, :length].double(), q_weight=w[i, :n].double())
        torch.testing.assert_close(scores[i, c].double(), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        same = torch.equal if device == "cpu" else torch.allclose
        assert same(lik_ops.maxsim_padded(Q, D, q_lengths, d_lengths, q_weight=w).nan_to_num(), scores.nan_to_num())
    gradients = torch.autograd.grad(scores, (Q, D, w), torch.ones_like(scores))
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0][2, 2:].eq(0).all() and gradients[1][2, 1].eq(0).all() and gradients[1][2, 2].eq(0).all()
    scores = lik_ops.maxsim_padded(Q, D, torch.tensor([5, 6, -1], device=device), d_lengths.clamp(0, 7))
    assert scores[1:].isnan().all() and scores[0].isnan().logical_not().all()


# Bits.


def forms(q_lengths, d_lengths, b: Batch) -> dict[str, Tensor]:
    """Return the scores ``[Nq, Nd]`` of one batch in the ragged and dense layouts, by name."""
    Q, D = (
        torch.nn.utils.rnn.pad_sequence(lik_ops.unpack(*x), batch_first=True) for x in ((b.Q, b.cu_q), (b.D, b.cu_d))
    )
    w = torch.nn.utils.rnn.pad_sequence(lik_ops.unpack(b.weight, b.cu_q), batch_first=True)
    (Nq, Lq), (Nd, Ld) = Q.shape[:2], D.shape[:2]
    ql, dl = torch.tensor(q_lengths), torch.tensor(d_lengths)
    q_mask, d_mask = lik_ops.lengths_to_mask(ql, Lq), lik_ops.lengths_to_mask(dl, Ld)
    Q[~q_mask], D[~d_mask], w[~q_mask] = NAN, NAN, NAN
    pairs = torch.cartesian_prod(torch.arange(Nq), torch.arange(Nd))
    each = {"normalize": b.normalize}
    packed = {**each, "q_weight": b.weight}
    candidates, wider = D.expand(Nq, -1, -1, -1), torch.full((Nq, 37), NAN)
    return {
        "packed": lik_ops.maxsim_varlen(b.Q, b.D, b.cu_q, b.cu_d, **packed),
        "candidates": lik_ops.maxsim_candidates_varlen(
            b.Q, b.D, b.offsets.expand(Nq, -1), b.lengths.expand(Nq, -1), cu_seqlens_q=b.cu_q, **packed
        ),
        "pair list": lik_ops.maxsim_pair_list(b.Q, b.D, pairs, cu_seqlens_q=b.cu_q, cu_seqlens_d=b.cu_d, **packed).view(
            Nq, Nd
        ),
        "padded, expanded": lik_ops.maxsim_padded(Q, candidates, ql, dl.expand(Nq, -1), q_weight=w, **each),
        "padded": lik_ops.maxsim_padded(Q, candidates.contiguous(), ql, dl.expand(Nq, -1), q_weight=w, **each),
        "masked": lik_ops.maxsim(Q, D, q_mask, d_mask, q_weight=w, **each),
        "more padding": lik_ops.maxsim(
            torch.cat([Q, Q.new_full((Nq, 37, Q.shape[2]), NAN)], 1),
            D,
            torch.cat([q_mask, wider > 0], 1),
            d_mask,
            q_weight=torch.cat([w, wider.to(w)], 1),
            **each,
        ),
    }


@settings(max_examples=12)
@given(
    q_lengths=st.lists(st.sampled_from((0, 1, 2, 5, 31, 32, 33, 65)), min_size=1, max_size=5),
    d_lengths=st.lists(st.sampled_from((0, 1, 2, 7, 23, 24, 31, 65)), min_size=1, max_size=8),
    long=st.sampled_from((0, 0, 300, 1500)),
    d=st.sampled_from((1, 8, 33, 128)),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
    normalize=st.booleans(),
)
def test_scores_have_the_same_bits_in_every_layout(q_lengths, d_lengths, long, d, dtype, normalize):
    """The dense call of one pair also gives these bits, because padding and packing change nothing on a CPU."""
    d_lengths = [*d_lengths, long] if long else d_lengths
    b = build(q_lengths, d_lengths, "cross", d, dtype, options=False, normalize=normalize, exact=False)
    b.weight = torch.randn(b.Q.shape[0], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    found = forms(q_lengths, d_lengths, b)
    queries, documents, weights = (lik_ops.unpack(*x) for x in ((b.Q, b.cu_q), (b.D, b.cu_d), (b.weight, b.cu_q)))
    for i, (query, weight) in enumerate(zip(queries, weights, strict=True)):
        for j, document in enumerate(documents):
            alone = lik_ops.maxsim(query, document, q_weight=weight, normalize=normalize)
            for name, scores in found.items():
                assert torch.equal(scores[i, j], alone), name


def test_layouts_have_the_same_bits_across_several_blocks():
    """The call spans several blocks of queries, documents, and candidates of a query."""
    short = [n % 9 for n in range(packed.MIN_OWN_BLOCK_ITEMS + 20)]
    for q_lengths, d_lengths in (((32, 5) * 8, range(1, 140)), ((900, 3), (2000, 1, 30) * 3), ((5, 0, 9), short)):
        b = build(tuple(q_lengths), tuple(d_lengths), "cross", 8, options=False, exact=False)
        b.weight = torch.randn(b.Q.shape[0])
        found = forms(tuple(q_lengths), tuple(d_lengths), b)
        for scores in found.values():
            assert torch.equal(scores, found["masked"])


# Gradients.


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_match_the_fp64_formulas_at_the_argmax(kind, normalize, device):
    """Candidates and pairs repeat documents and queries, and their gradients add up."""
    for dtype in dtypes_of(device):
        for options, backward in ((False, "auto"), (True, "auto"), (True, "unified")):
            b = build(*LENGTHS, kind, 12, dtype, device, options, normalize, exact=False)
            leaves = [t.requires_grad_() for t in b.leaves()]
            longest = max(LENGTHS[0])
            args = *b.ragged(), normalize, torch.int32, longest, backward
            scores, argmax = torch.ops.lik.maxsim_ragged_fwd(*args)
            g = torch.randn_like(scores)
            upstream = g.clone()
            clean = [t.requires_grad_() for t in b.clean() if t is not None]
            Q, D, weight = (*clean, None)[:3]
            terms = []
            for index, i, j in b.cells():
                q = slice(b.cu_q[i], b.cu_q[i + 1])
                won = winners_of(b, argmax, index, i)[None, None]
                v = None if weight is None else weight[None, q]
                x = D[b.cu_d[j] : b.cu_d[j + 1]][None]
                score = reference.maxsim_at(Q[None, q], x, won, q_weight=v, normalize=normalize)
                terms.append(g[index].double() * score.sum())
                if not won.ge(0).any():
                    upstream[index] = NAN  # no gradient flows here, whatever the upstream value
            expected = torch.autograd.grad(sum(terms), clean)
            actual = torch.autograd.grad(scores, leaves, upstream)
            for leaf, a, e in zip(leaves, actual, expected, strict=True):
                assert a.dtype == leaf.dtype
                tolerance = TOLERANCE[leaf.dtype] * max(1.0, float(e.abs().max()))
                torch.testing.assert_close(a.double(), e, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    b = build((3, 0, 2), (4, 1, 0, 3), kind, 3, torch.float64, exact=False, normalize=True, options=False)
    weight = torch.randn(b.Q.shape[0], dtype=torch.float64, requires_grad=True)

    def scores(Q, D, w):
        found = b.call(Q=Q, D=D, q_weight=w)[0]
        return torch.where(found.isfinite(), found, 0)

    assert torch.autograd.gradcheck(scores, (b.Q.requires_grad_(), b.D.requires_grad_(), weight))


@pytest.mark.parametrize("dtype, normalize", [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_large_batches_match_the_dense_call(kind, dtype, normalize, device):
    """The call has more tokens, documents, and argmax values than one block."""
    count, Lq, Ld = 90, 32, 350
    if normalize and device == "cuda":
        pytest.skip("rounding may move a winner: of two kernels, only exact similarities have the same")
    b = build((Lq,) * 70, (Ld,) * count, kind, 64, dtype, device, False, normalize, exact=not normalize)
    Q, D = (t.requires_grad_() for t in (b.Q, b.D))
    dense = lik_ops.maxsim(Q.view(70, Lq, 64), D.view(count, Ld, 64), normalize=normalize)
    if kind == "candidates":
        dense = dense.gather(1, b.chosen)
    if kind == "pairs":
        b.chosen = torch.stack([torch.randint(0, n, (3000,)) for n in (70, count)], 1).to(device)
        dense = dense[tuple(b.chosen.T)]
    scores, _ = b.call(torch.int16)
    same_bits(scores, dense)
    g = torch.randn_like(scores)
    expected = torch.autograd.grad(dense, (Q, D), g)
    for a, e in zip(torch.autograd.grad(scores, (Q, D), g), expected, strict=True):
        tolerance = TOLERANCE[dtype] * float(e.abs().max())
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance)


def test_requested_gradients_match_with_recomputed_argmax(device):
    b = build(*LENGTHS, "cross", 8, torch.float32, device, exact=False)
    for leaf in b.leaves():
        b.Q, b.D, b.weight = (t.detach().requires_grad_(t.data_ptr() == leaf.data_ptr()) for t in b.leaves())
        leaf = next(t for t in b.leaves() if t.requires_grad)
        kept, again = (
            torch.autograd.grad(b.call(dtype)[0], leaf, torch.ones(5, 6, device=device))
            for dtype in (torch.int16, None)
        )
        torch.testing.assert_close(kept, again)
    tensors = b.ragged()
    scores, argmax = b.call()
    grads = torch.ops.lik.maxsim_ragged_bwd(scores.detach(), *tensors, argmax, False, False, [False, True, False])
    assert [x.numel() for x in grads] == [0, b.D.numel(), 0]


def test_gradients_are_reproducible_and_zero_for_masked_rows():
    b = build((32,) * 30, tuple(range(0, 90, 2)), "cross", 16, exact=False)
    scores, argmax = b.call()
    g = torch.randn_like(scores)
    first, second = (
        torch.ops.lik.maxsim_ragged_bwd(g, *b.ragged(), argmax, False, False, [True, True, True]) for _ in range(2)
    )
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)
    assert first[0][~b.q_mask].eq(0).all() and first[1][~b.d_mask].eq(0).all() and first[2][~b.q_mask].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_zero_without_queries_or_documents(kind, device):
    """Test calls without queries or without documents, and packed rows outside every segment."""
    nothing, some = torch.tensor([2], device=device), torch.tensor([0, 2, 5], device=device)
    for cu_q, cu_d in ((nothing, some), (some, nothing), (nothing, nothing)):
        b = build((5,), (5,), kind, 4, torch.float32, device)
        b.cu_q, b.cu_d = cu_q, cu_d
        b.chosen = torch.zeros(cu_q.numel() - 1, 3 * (cu_d.numel() > 1), dtype=torch.int64, device=device)
        if kind == "pairs":
            b.chosen = torch.tensor([[0, 0], [1, 1], [-1, 2]], device=device)
        leaves = [t.requires_grad_() for t in b.leaves()]
        scores = b.call()[0]
        assert scores.isnan().all()
        for gradient in torch.autograd.grad(scores, leaves, torch.ones_like(scores)):
            assert gradient.eq(0).all()


def test_rows_outside_segments_are_never_read(device):
    """Packed tensors may hold more rows than the sequences. Rows between segments must not be read."""
    Q, D = (torch.full((20, 4), NAN, device=device) for _ in range(2))
    Q[3:8], D[2:6], D[9:12] = (torch.randn(n, 4, device=device) for n in (5, 4, 3))
    Q.requires_grad_(), D.requires_grad_()
    cu_q = torch.tensor([3, 5, 8], device=device)
    offsets = torch.tensor([[2, 9, 4], [9, 3, 20]], device=device)
    lengths = torch.tensor([[4, 3, 2], [3, 2, 0]], device=device)
    scores = lik_ops.maxsim_candidates_varlen(Q, D, offsets, lengths, cu_seqlens_q=cu_q, normalize=True)
    for i, k in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        x = D[int(offsets[i, k]) :][: int(lengths[i, k])]
        expected = reference.maxsim(Q[cu_q[i] : cu_q[i + 1]].double(), x.double(), normalize=True)
        torch.testing.assert_close(scores[i, k].double(), expected, rtol=1e-5, atol=1e-5)
    grad_Q, grad_D = torch.autograd.grad(scores, (Q, D), torch.ones_like(scores))
    assert grad_Q.isfinite().all() and grad_D.isfinite().all()
    assert grad_Q[8:].eq(0).all() and grad_D[6:9].eq(0).all() and grad_D[12:].eq(0).all()


# Invalid input.

BIG = 2**31 - 1
BAD = {
    "query segment reversed": {"cu_seqlens_q": [0, 3, 2, 43, 44, 51]},
    "query segment negative": {"cu_seqlens_q": [-1, 3, 3, 43, 44, 51]},
    "query segment beyond the end": {"cu_seqlens_q": [0, 3, 3, 43, 44, 52]},
    "offset negative": {"d_offsets": [-1, 5, 5, 6, 76, 78]},
    "offset beyond the end": {"d_offsets": [0, 5, 5, 6, 110, 78]},
    "length negative": {"d_lengths": [5, 0, 1, -70, 2, 31]},
    "length beyond the end": {"d_lengths": [5, 0, 1, 70, 2, 32]},
    "sum beyond int32": {"d_offsets": [0, 5, 5, BIG, 76, 78], "d_lengths": [5, 0, 1, BIG, 2, 31]},
    "length of all bits": {"d_lengths": [5, 0, 1, 70, -BIG - 1, 31]},
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_invalid_segments_score_nan_and_leave_others_unchanged(kind, bad, device):
    b = build(*LENGTHS, kind, 8, torch.float32, device, exact=False)
    if kind == "candidates":
        b.chosen = torch.arange(6, device=device).expand(5, -1)
    leaves = [t.requires_grad_() for t in b.leaves()]
    changes = {name: torch.tensor(x, device=device, dtype=torch.int32) for name, x in BAD[bad].items()}
    good_cu, good_at, good_length = b.cu_q.tolist(), b.cu_d[:-1].tolist(), b.cu_d.diff().tolist()
    new_cu = BAD[bad].get("cu_seqlens_q", good_cu)
    new_at, new_length = BAD[bad].get("d_offsets", good_at), BAD[bad].get("d_lengths", good_length)
    for name in ("d_offsets", "d_lengths"):
        if kind == "candidates" and name in changes:
            changes[name] = changes[name].expand(5, -1)
    expected = b.call()[0].detach()
    scores, argmax = b.call(**changes)
    untouched = torch.zeros_like(scores, dtype=torch.bool)
    for index, i, j in b.cells():
        a, e = new_cu[i : i + 2]
        query_ok, at, n = 0 <= a <= e <= 51, new_at[j], new_length[j]
        if not (query_ok and at >= 0 and n >= 0 and at + n <= 109):
            assert scores[index].isnan(), index
            if query_ok:
                assert winners_of(b, argmax, index, i).eq(-1).all()
        elif (a, e, at, n) == (*good_cu[i : i + 2], good_at[j], good_length[j]):
            untouched[index] = True
    assert untouched.any() and not untouched.all()
    exact = {"rtol": 0, "atol": 0} if device == "cpu" else {}
    torch.testing.assert_close(scores[untouched], expected[untouched], **exact)
    gradients = torch.autograd.grad(scores, leaves, torch.ones_like(scores))
    assert all(g.isfinite().all() for g in gradients)


def test_invalid_pairs_score_nan(device):
    b = build(*LENGTHS, "pairs", 8, torch.float32, device, exact=False)
    bad = [[5, 0], [-1, 0], [0, 6], [0, -1], [BIG, BIG], [-BIG - 1, 2]]
    b.chosen = torch.tensor([[0, 3], *bad, [2, 5]], device=device, dtype=torch.int32)
    leaves = [t.requires_grad_() for t in b.leaves()]
    scores, argmax = b.call()
    assert scores.isnan().tolist() == [False] + [True] * 6 + [False]
    assert argmax[1:7].eq(-1).all()
    gradients = torch.autograd.grad(scores, leaves, torch.ones_like(scores))
    b.chosen = b.chosen[[0, 7]]
    for a, e in zip(gradients, torch.autograd.grad(b.call()[0], leaves, torch.ones(2, device=device)), strict=True):
        torch.testing.assert_close(a, e)
    b.Q, b.D = (torch.randn_like(t) for t in (b.Q, b.D))
    for Q, D, cu in ((b.Q, b.D[:0], b.cu_q), (b.Q[:0], b.D, b.cu_q[:1])):
        scores = lik_ops.maxsim_pair_list(
            Q, D, b.chosen, cu_seqlens_q=cu, cu_seqlens_d=b.cu_d[:1] if D.numel() == 0 else b.cu_d, max_seqlen_q=40
        )
        assert scores.isnan().all()
    scores = lik_ops.maxsim_pair_list(b.Q, b.D, b.chosen, cu_seqlens_q=b.cu_q, cu_seqlens_d=b.cu_d, max_seqlen_q=39)
    assert scores.isnan().tolist() == [False, True]  # the second query has 40 tokens


def test_out_of_range_argmax_contributes_no_gradient(device):
    """Argmax values beyond their document, which no forward writes, contribute no gradient."""
    b = build((2, 3), (4, 2), "cross", 4, torch.float32, device, options=False)
    argmax = torch.tensor([[4, 99, 3, -7, 0], [2, 32767, 1, 0, 5]], device=device, dtype=torch.int16)
    g = torch.ones(2, 2, device=device)
    grad_Q, grad_D, _ = torch.ops.lik.maxsim_ragged_bwd(g, *b.ragged(), argmax, False, False, [True, True, False])
    expected = torch.zeros_like(b.D)
    for row, token in ((3, 2), (0, 4), (5, 2), (4, 3)):
        expected[row] += b.Q[token]
    torch.testing.assert_close(grad_D, expected)
    torch.testing.assert_close(grad_Q, torch.stack([b.D[0] * 0, b.D[0] * 0, b.D[3] + b.D[5], b.D[4], b.D[0]]))


# No value decides a launch, and workspace memory is bounded.


@pytest.mark.parametrize("kind", KINDS)
def test_results_match_if_values_are_not_host_readable(kind, monkeypatch):
    for options in (False, True):
        b = build((3, 0, 9, 1), (5, 0, 30, 2), kind, 8, torch.float64, options=options, exact=False)
        b.cu_q[-1] += 1  # points outside the tensor
        scores, argmax = b.call()
        g = torch.randn_like(scores)
        grads = torch.ops.lik.maxsim_ragged_bwd(g, *b.ragged(), argmax, False, False, [True, True, options])
        with monkeypatch.context() as patch:
            patch.setattr(portable_layout, "is_host_readable", lambda x: False)
            blind, blind_argmax = b.call()
            again = torch.ops.lik.maxsim_ragged_bwd(g, *b.ragged(), argmax, False, False, [True, True, options])
        torch.testing.assert_close(blind, scores, equal_nan=True)
        same_bits(blind_argmax, argmax)
        for x, y in zip(again, grads, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_portable_backend_reads_no_values_of_meta_tensors(kind):
    """Meta tensors have no values, so reading one raises an error."""
    from lik_ops.portable import backend as portable

    tensors = RaggedArgs(*(t.to("meta") if isinstance(t, Tensor) else t for t in build(*LENGTHS, kind).ragged()))
    scores, argmax = portable.forward_ragged(tensors, True, torch.int16, 40)
    fakes = torch.ops.lik.maxsim_ragged_fwd(*tensors, True, torch.int16, 40, "auto")
    assert [(x.shape, x.dtype) for x in (scores, argmax)] == [(x.shape, x.dtype) for x in fakes]
    grads = portable.backward_ragged(torch.empty_like(scores), tensors, argmax, True, [True] * 3, False)
    assert [x.shape for x in grads] == [tensors.Q.shape, tensors.D.shape, tensors.Q.shape[:1]]


@pytest.mark.parametrize("kind", KINDS)
def test_workspace_is_bounded(kind):
    """One giant document is batched with tiny ones. Padding all documents to the longest would need gigabytes."""
    d_lengths = (40000, *[3, 9, 0, 30] * 300)
    b = build((32, 1, 300, 8) * 4, d_lengths, kind, 32, torch.bfloat16, exact=False)
    if kind == "pairs":
        b.chosen = torch.stack([torch.randint(0, n, (5000,)) for n in (16, len(d_lengths))], 1)
    if kind == "candidates":
        b.chosen = torch.randint(0, len(d_lengths), (16, 500))
    inputs = [getattr(b, name) for name in ("offsets", "lengths")]
    tensors = b.ragged()._replace(d_offsets=inputs[0], d_lengths=inputs[1])
    scores, argmax = torch.ops.lik.maxsim_ragged_fwd(*tensors, True, torch.int32, 300, "auto")

    def forward():
        return torch.ops.lik.maxsim_ragged_fwd(*tensors, True, torch.int32, 300, "auto")

    def backward():
        return torch.ops.lik.maxsim_ragged_bwd(scores, *tensors, argmax, True, False, [True, True, True])

    assert peak_bytes(forward) < scores.nbytes + argmax.nbytes + WORKSPACE
    assert peak_bytes(backward) < b.Q.nbytes + b.D.nbytes + b.weight.nbytes + WORKSPACE
    assert packed_backward.MAX_TABLE_BYTES < WORKSPACE


@pytest.mark.gpu
def test_no_host_synchronization():
    b = build(*LENGTHS, "pairs", 64, torch.bfloat16, "cuda", options=False, exact=False)
    Q, D = b.Q.requires_grad_(), b.D.requires_grad_()
    padded = torch.randn(2, 4, 8, device="cuda"), torch.randn(2, 3, 9, 8, device="cuda")
    q_lengths, d_lengths = torch.tensor([4, 2], device="cuda"), torch.full((2, 3), 5, device="cuda")

    def step():
        scores = lik_ops.maxsim_varlen(Q, D, b.cu_q, b.cu_d)
        torch.autograd.grad(scores, (Q, D), torch.ones_like(scores))
        scores = lik_ops.maxsim_pair_list(
            Q, D, b.chosen, cu_seqlens_q=b.cu_q, cu_seqlens_d=b.cu_d, max_seqlen_q=40, backward="unified"
        )
        torch.autograd.grad(scores, (Q, D), torch.ones_like(scores))
        lik_ops.maxsim_padded(*padded, q_lengths, d_lengths)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
