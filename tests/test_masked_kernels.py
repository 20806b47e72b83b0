"""What goes before and after row maxima of documents with masks: which of their tokens count."""

import pytest
import torch

from .support import CUDA, INTERPRETER, INTERPRETING

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.backends import configs, launcher
from lik_ops.csrc_triton import row_sums

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("place", PLACES, ids=str)


def test_the_bias_of_a_mask(place):
    """0.0 of tiles of which all tokens count; else -0.0, which is told from it, or -inf. And the length of them all."""
    K, Ld, BN, tiles, step = 5, 37, 8, 5, 2
    mask = torch.rand(Ld, K, generator=torch.Generator().manual_seed(0)).T > 0.3
    mask[0], mask[1], mask[2, 8:24], mask[3, 16:] = True, False, True, False
    expected = torch.full((K, tiles * BN), -float("inf"))
    expected[:, :Ld][mask] = -0.0
    expected.view(K, tiles, BN)[torch.nn.functional.pad(mask, (0, 3)).view(K, tiles, BN).all(-1)] = 0.0
    bias = torch.full((K, tiles * BN), float("nan"), device=place.device)
    lengths = torch.full((K,), -1, dtype=torch.int32, device=place.device)
    given = mask.to(place.device)
    args = (given, bias, lengths, Ld, *given.stride(), bias.stride(0), step, BN)
    launcher.launch(row_sums.maxsim_mask_bias, (K,), args, {"num_warps": 4})
    assert torch.equal(bias.cpu().view(torch.int32), expected.view(torch.int32))
    assert lengths.tolist() == [int(row.nonzero().max()) + 1 if row.any() else 0 for row in mask]


@pytest.mark.parametrize("d", [8, 24])
def test_tokens_that_count_are_copied_in_their_order(place, d):
    K, Ld, rows, step = 4, 71, 5, 2
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(K, Ld, generator=generator) > 0.4
    mask[1], mask[2] = False, True
    D = torch.randn(K, Ld, d, generator=generator).half()
    tokens = torch.full((K, Ld, d), float("nan"), dtype=D.dtype, device=place.device)
    places = torch.full((K, Ld), -7, dtype=torch.int32, device=place.device)
    lengths = torch.full((K,), -1, dtype=torch.int32, device=place.device)
    given = mask.T.contiguous().T.to(place.device), D.to(place.device)
    args = (*given, tokens, places, lengths, Ld, *given[0].stride(), d, step, configs.next_power_of_2(d))
    launcher.launch(row_sums.maxsim_kept_tokens, (K * configs.cdiv(Ld, step),), args, {"num_warps": 4})
    assert lengths.tolist() == mask.sum(1).tolist()
    for k in range(K):
        kept = mask[k].nonzero().flatten()
        assert torch.equal(tokens[k, : len(kept)].cpu(), D[k][kept])
        assert places[k, : len(kept)].tolist() == kept.tolist()
        assert tokens[k, len(kept) :].isnan().all()
    argmax = torch.stack([torch.arange(rows) % max(int(n), 1) for n in lengths]).short().to(place.device)
    argmax[1] = -1
    winners = argmax.clone()
    launcher.launch(row_sums.maxsim_winners_in_place, (K * 2,), (winners, places, Ld, rows, 4), {"num_warps": 4})
    for k in range(K):
        assert winners[k].tolist() == ([-1] * rows if k == 1 else places[k][argmax[k].long()].tolist())
