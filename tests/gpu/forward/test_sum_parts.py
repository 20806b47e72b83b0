"""Test the launch that sums the parts of long queries: a tree of some parts, then the trees in order."""

import pytest
import torch

from ...support.common import CUDA, INTERPRETER, INTERPRETING

pytest.importorskip("triton", reason="this is a kernel in Triton")
from lik_ops.csrc_triton.forward.generic import row_sums
from lik_ops.gpu.runtime import launcher
from lik_ops.gpu.runtime.arguments import use_device
from lik_ops.gpu.tuning import architectures

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
BLOCK = 256


def run_sum_parts(partial, parts, tree, stride):
    """Return scores [Nq, K] with row stride `stride`."""
    Nq, K = len(partial) // parts, partial.shape[1]
    scores = torch.full((Nq, stride), float("nan"), device=partial.device)
    with use_device(partial.device):
        args = partial, scores, stride, K, parts, tree, BLOCK
        launcher.launch(row_sums.maxsim_sum_parts, (Nq * architectures.cdiv(K, BLOCK),), args, {"num_warps": 4})
    assert scores[:, K:].isnan().all()
    return scores[:, :K]


def sum_tree(leaves):
    """Return the tree sum of a list of tensors."""
    while len(leaves) > 1:
        leaves = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("tree", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8, 17])
def test_parts_are_summed_in_tree_order(parts, tree, place):
    torch.manual_seed(parts)
    Nq, K = 3, 300
    partial = torch.randn(Nq * parts, K, device=place.device) * 10 ** torch.randn(Nq * parts, 1, device=place.device)
    partial[0, 7], partial[-1, 9] = float("nan"), -float("inf")
    leaves = [*partial.view(Nq, parts, K).unbind(1), *[torch.zeros_like(partial[:Nq])] * (-parts % tree)]
    trees = [sum_tree(leaves[n : n + tree]) for n in range(0, len(leaves), tree)]
    expected = trees[0]
    for more in trees[1:]:
        expected = expected + more
    torch.testing.assert_close(run_sum_parts(partial, parts, tree, K + 5), expected, rtol=0, atol=0, equal_nan=True)
