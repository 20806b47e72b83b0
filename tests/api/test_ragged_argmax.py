"""Test the argmax of ragged layouts in the shapes that the public functions return."""

from __future__ import annotations

import pytest
import torch

import lik_ops

from ..support.ragged import DEVICES, KINDS, LENGTHS, NAN, build, same_bits


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def unpack_argmax(argmax, cu_seqlens):
    return [x.t() for x in lik_ops.unpack(argmax, cu_seqlens)]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_argmax_matches_the_reference_of_each_pair(kind, device):
    b = build(*LENGTHS, kind, 8, torch.float32, device)
    Q, D, w = b.Q.requires_grad_(), b.D.requires_grad_(), b.weight
    masks = {"q_mask": b.q_mask, "d_mask": b.d_mask} if kind == "pairs" else {}
    if not masks:
        b = build(*LENGTHS, kind, 8, torch.float32, device, options=False)
        Q, D, w = b.Q.requires_grad_(), b.D.requires_grad_(), None
    if kind == "cross":
        arguments = Q, D, b.cu_q, b.cu_d
        plain, function, options = lik_ops.maxsim_varlen, lik_ops.maxsim_varlen_with_argmax, {}
    elif kind == "candidates":
        arguments, options = (Q, D, b.offsets, b.lengths), {"cu_seqlens_q": b.cu_q}
        plain, function = lik_ops.maxsim_candidates_varlen, lik_ops.maxsim_candidates_varlen_with_argmax
    else:
        arguments, options = (Q, D, b.chosen), {"cu_seqlens_q": b.cu_q, "cu_seqlens_d": b.cu_d, "max_seqlen_q": 45}
        plain, function = lik_ops.maxsim_pair_list, lik_ops.maxsim_pair_list_with_argmax
    scores, argmax = function(*arguments, **options, **masks, q_weight=w)
    same_bits(scores, plain(*arguments, **options, **masks, q_weight=w))
    assert argmax.dtype == torch.int64
    assert argmax.shape == ((len(b.chosen), 45) if kind == "pairs" else (Q.shape[0], b.lengths.shape[-1]))
    by_query = argmax if kind == "pairs" else unpack_argmax(argmax, b.cu_q)
    tokens = b.clean()
    for index, i, j in b.cells():
        found = by_query[index[0]] if kind == "pairs" else by_query[i][index[1]]
        expected = b.alone(i, j, *tokens)[1]
        assert torch.equal(found[: expected.numel()], expected) and found[expected.numel() :].eq(-1).all()
    weights = torch.randn_like(scores)
    leaves = (Q, D)
    gradients = (
        torch.autograd.grad(f, leaves, weights) for f in (scores, plain(*arguments, **options, **masks, q_weight=w))
    )
    for a, e in zip(*gradients, strict=True):
        torch.testing.assert_close(a, e)


def test_dense_argmax_matches_maxsim_with_argmax(device):
    Q, D = torch.randn(3, 4, 8, device=device), torch.randn(5, 6, 8, device=device)
    scores, argmax = lik_ops.maxsim_with_argmax(Q, D)
    found = lik_ops.maxsim_varlen_with_argmax(Q, D)
    torch.testing.assert_close(found[0], scores)
    assert torch.equal(found[1], argmax)
    at = torch.arange(0, 30, 6, device=device).expand(3, -1)
    found = lik_ops.maxsim_candidates_varlen_with_argmax(Q, D.view(30, 8), at, torch.full_like(at, 6))
    torch.testing.assert_close(found[0], scores)
    assert torch.equal(found[1], argmax)
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(5)).to(device)
    found = lik_ops.maxsim_pair_list_with_argmax(Q, D, pairs)
    assert torch.equal(found[1].view(3, 5, 4), argmax)
    assert torch.equal(lik_ops.maxsim_pair_list_with_argmax(list(Q), list(D), pairs)[1], found[1])


def test_padded_argmax_matches_tokens_within_lengths(device):
    Q, D = torch.randn(3, 5, 8, device=device), torch.randn(3, 4, 7, 8, device=device)
    q_lengths = torch.tensor([5, 0, 2], device=device)
    d_lengths = torch.tensor([[7, 0, 1, 3], [7, 0, 8, -1], [2, -3, 9, 7]], device=device)
    Q[2, 2:], D[0, 2, 1:] = NAN, NAN
    scores, argmax = lik_ops.maxsim_padded_with_argmax(Q, D, q_lengths, d_lengths, normalize=True)
    torch.testing.assert_close(
        scores, lik_ops.maxsim_padded(Q, D, q_lengths, d_lengths, normalize=True), equal_nan=True
    )
    for i, c in torch.cartesian_prod(torch.arange(3), torch.arange(4)).tolist():
        n, length = int(q_lengths[i]), int(d_lengths[i, c])
        expected = torch.full((5,), -1, device=device)
        if 0 < length <= 7:
            expected[:n] = lik_ops.maxsim_with_argmax(Q[i, :n], D[i, c, :length], normalize=True)[1]
        assert torch.equal(argmax[i, c], expected)


def test_argmax_is_minus_one_where_scores_are_nan(device):
    Q, D = torch.randn(6, 8, device=device), torch.randn(9, 8, device=device)
    cu_q, cu_d = torch.tensor([0, 2, 7], device=device), torch.tensor([0, 4, 10], device=device)
    scores, argmax = lik_ops.maxsim_varlen_with_argmax(Q, D, cu_q, cu_d)
    assert scores.isnan().tolist() == [[False, True], [True, True]]
    assert argmax[:2, 0].ge(0).all() and argmax[2:].eq(-1).all() and argmax[:, 1].eq(-1).all()
    pairs = torch.tensor([[0, 0], [0, 1], [1, 0], [2, 0], [0, -1]], device=device)
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_d": cu_d, "max_seqlen_q": 3}
    scores, argmax = lik_ops.maxsim_pair_list_with_argmax(Q, D, pairs, **options)
    assert scores.isnan().tolist() == [False, True, True, True, True]
    assert argmax[1:].eq(-1).all() and argmax[0].ge(0).tolist() == [True, True, False]


@pytest.mark.gpu
def test_argmax_of_packed_queries_needs_max_seqlen_q_on_gpu():
    b = build((3, 2), (4, 5), "pairs", 8, device="cuda", options=False)
    with pytest.raises(ValueError, match="maxsim_pair_list_with_argmax: max_seqlen_q: expected a bound"):
        lik_ops.maxsim_pair_list_with_argmax(b.Q, b.D, b.chosen, cu_seqlens_q=b.cu_q, cu_seqlens_d=b.cu_d)


@pytest.mark.parametrize("name", ["varlen", "candidates_varlen", "pair_list", "padded"])
def test_errors_name_the_function_called(name):
    function = getattr(lik_ops, f"maxsim_{name}_with_argmax")
    arguments = (torch.zeros(1),) * (0 if name == "varlen" else 1 if name == "pair_list" else 2)
    with pytest.raises(TypeError, match=f"^maxsim_{name}_with_argmax: Q: expected a Tensor, got int"):
        function(1, torch.randn(2, 3, 4), *arguments)


@pytest.mark.parametrize("name", ["varlen", "pair_list"])
def test_compiled_scores_and_argmax_match_eager(name):
    b = build(*LENGTHS, "pairs", 8, options=False)

    def call(Q, D, cu_q, cu_d, pairs):
        if name == "varlen":
            return lik_ops.maxsim_varlen_with_argmax(Q, D, cu_q, cu_d)
        cu_seqlens = {"cu_seqlens_q": cu_q, "cu_seqlens_d": cu_d}
        return lik_ops.maxsim_pair_list_with_argmax(Q, D, pairs, **cu_seqlens, max_seqlen_q=40)

    arguments = b.Q, b.D, b.cu_q, b.cu_d, b.chosen
    for a, e in zip(torch.compile(call, backend="eager", fullgraph=True)(*arguments), call(*arguments), strict=True):
        same_bits(a, e)
