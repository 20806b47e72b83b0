"""Test the similarity map, which holds all similarities of a query and a document."""

from __future__ import annotations

import re

import pytest
import torch

import lik_ops
from lik_ops import reference

from ..support.ragged import DEVICES, INF, NAN


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
def test_map_matches_similarities_and_its_maxima_sum_to_score(device, dtype, normalize):
    Q, D = (torch.randn(n, 16, device=device).to(dtype) for n in (5, 9))
    q_mask, d_mask = torch.arange(5, device=device) != 2, (torch.arange(9, device=device) % 4 != 1).int()
    Q[2], D[1], D[5] = NAN, INF, NAN
    S = lik_ops.similarity_map(Q, D, q_mask, d_mask, normalize=normalize)
    assert S.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and S.shape == (5, 9)
    assert torch.equal(S == -INF, ~(q_mask[:, None] & (d_mask != 0)))
    tokens = [x.double() for x in (Q, D)]
    if normalize:
        tokens = [torch.nn.functional.normalize(x, dim=-1) for x in tokens]
    expected = reference.similarities(tokens[0][None], tokens[1][None])[0, 0]
    kept = S != -INF
    torch.testing.assert_close(S[kept].double(), expected[kept], rtol=1e-5, atol=1e-5)
    scores, argmax = lik_ops.maxsim_with_argmax(Q, D, q_mask, d_mask, normalize=normalize)
    torch.testing.assert_close(S.amax(-1)[q_mask].sum(), scores)
    assert torch.equal(S.argmax(-1)[q_mask], argmax[q_mask])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_changes_nothing(device, normalize):
    mask = torch.arange(9, device=device) != 4
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        Q, D = (torch.randn(n, 16, device=device).to(dtype) for n in (5, 9))
        expected = lik_ops.similarity_map(Q, D, None, mask, normalize=normalize)
        with torch.autocast(device, torch.bfloat16):
            found = lik_ops.similarity_map(Q, D, None, mask, normalize=normalize)
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_leading_axes_broadcast():
    Q, D = torch.randn(3, 4, 8), torch.randn(3, 6, 8)
    q_mask, d_mask = torch.rand(3, 4) < 0.7, torch.rand(3, 6) < 0.7
    maps = lik_ops.similarity_map(Q, D, q_mask, d_mask)
    assert maps.shape == (3, 4, 6)
    one = lik_ops.similarity_map(Q[0], D, q_mask[0], d_mask)
    cross = lik_ops.similarity_map(Q[:, None], D, q_mask[:, None], d_mask)
    assert one.shape == (3, 4, 6) and cross.shape == (3, 3, 4, 6)
    for i in range(3):
        torch.testing.assert_close(maps[i], lik_ops.similarity_map(Q[i], D[i], q_mask[i], d_mask[i]))
        torch.testing.assert_close(one[i], lik_ops.similarity_map(Q[0], D[i], q_mask[0], d_mask[i]))
        torch.testing.assert_close(cross[i], lik_ops.similarity_map(Q[i], D, q_mask[i], d_mask))
    assert lik_ops.similarity_map(Q[:, :0], D).shape == (3, 0, 6)


def test_gradients_reach_no_masked_token():
    Q, D = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8)
    D[2] = NAN
    D.requires_grad_()
    S = lik_ops.similarity_map(Q, D, None, torch.arange(6) != 2, normalize=True)
    grad_Q, grad_D = torch.autograd.grad(S[S.isfinite()].sum(), (Q, D))
    assert grad_Q.isfinite().all() and grad_D.isfinite().all() and grad_D[2].eq(0).all()


def test_errors_name_the_invalid_argument():
    Q, D = torch.randn(3, 4, 8), torch.randn(3, 6, 8)
    for args, error, message in (
        ((None, D), TypeError, "Q: expected a Tensor, got NoneType"),
        ((Q, [D]), ValueError, "D: expected a list of [L, d], got one of [L, 6, 8]"),
        ((Q, D[0, 0]), ValueError, "D: expected [..., L, d], got [8]"),
        ((Q.int(), D.int()), TypeError, "Q: expected float16, bfloat16, float32 or float64, got torch.int32"),
        ((Q, D.half()), TypeError, "D: expected the dtype of Q"),
        ((Q, D.to("meta")), ValueError, "D: expected the device of Q"),
        ((Q, D[..., :7]), ValueError, "D: expected d = 8 as in Q [3, 4, 8], got [3, 6, 7]"),
        ((Q, D[:2]), ValueError, "D: expected leading axes that go with Q [3, 4, 8], got [2, 6, 8]"),
        ((Q, D.to_sparse()), TypeError, "D: expected a dense (strided) tensor"),
        ((Q, D, torch.ones(4)), ValueError, "q_mask: expected shape [3, 4] to match Q [3, 4, 8], got [4]"),
        ((Q, D, None, torch.ones(3, 6)), TypeError, "d_mask: expected bool (True = keep) or an integer dtype"),
    ):
        with pytest.raises(error, match=f"similarity_map: {re.escape(message)}"):
            lik_ops.similarity_map(*args)
