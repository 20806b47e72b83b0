"""Test the launches before and after row maxima of masked documents, which handle kept tokens."""

import pytest
import torch

from ...support.common import CUDA, INTERPRETER, INTERPRETING

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.csrc_triton.forward.generic import row_sums
from lik_ops.gpu.runtime import launcher
from lik_ops.gpu.tuning import architectures

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("place", PLACES, ids=str)


@pytest.mark.parametrize("Ld", [7, 64, 150, 200])
def test_patches_mark_masked_tokens_of_each_tile(place, Ld):
    """Check the bits of masked tokens in tiles of 64, from the first kept token of a document to the last one.

    The last tile ends at the last kept token.
    """
    K, BN, step = 6, 64, 2
    mask = torch.rand(Ld, K, generator=torch.Generator().manual_seed(0)).T > 0.3
    mask[0], mask[1], mask[2, : Ld // 2], mask[3, Ld // 3 :] = True, False, False, False
    tiles = architectures.cdiv(Ld, BN)
    bits = torch.full((K, 2, tiles), -1, dtype=torch.int32, device=place.device)
    sources, lengths = torch.full((2, K), -1, dtype=torch.int32, device=place.device)
    given = mask.to(place.device)
    args = (given, bits, sources, lengths, Ld, *given.stride(), tiles, step, BN)
    launcher.launch(row_sums.maxsim_patches, (K,), args, {"num_warps": 1})
    words = bits.cpu().long() & 0xFFFFFFFF
    for k, row in enumerate(mask):
        kept = row.nonzero().flatten().tolist() or [0]
        length = kept[-1] + 1 - kept[0] if row.any() else 0
        assert (sources[k], lengths[k]) == (kept[0], length)
        for n in range(max(architectures.cdiv(length, BN), 1)):
            start = kept[0] + min(n * BN, max(length - BN, 0))
            absent = [not (t < kept[0] + length and row[t]) for t in range(start, start + BN)]
            assert [bool(words[k, t // 32, n] >> t % 32 & 1) for t in range(BN)] == absent


@pytest.mark.parametrize("d", [8, 24])
def test_kept_tokens_are_copied_in_order_and_argmax_mapped_back(place, d):
    K, Ld, rows, step = 4, 71, 5, 2
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(K, Ld, generator=generator) > 0.4
    mask[1], mask[2] = False, True
    D = torch.randn(K, Ld, d, generator=generator).half()
    tokens = torch.full((K, Ld, d), float("nan"), dtype=D.dtype, device=place.device)
    places = torch.full((K, Ld), -7, dtype=torch.int32, device=place.device)
    lengths = torch.full((K,), -1, dtype=torch.int32, device=place.device)
    given = mask.T.contiguous().T.to(place.device), D.to(place.device)
    args = (*given, tokens, places, lengths, Ld, *given[0].stride(), d, step, architectures.next_power_of_2(d))
    launcher.launch(row_sums.maxsim_kept_tokens, (K * architectures.cdiv(Ld, step),), args, {"num_warps": 4})
    assert lengths.tolist() == mask.sum(1).tolist()
    for k in range(K):
        kept = mask[k].nonzero().flatten()
        assert torch.equal(tokens[k, : len(kept)].cpu(), D[k][kept])
        assert places[k, : len(kept)].tolist() == kept.tolist()
        assert tokens[k, len(kept) :].isnan().all()
    argmax = torch.stack([torch.arange(rows) % max(int(n), 1) for n in lengths]).short().to(place.device)
    argmax[1] = -1
    winners = argmax.clone()
    launcher.launch(row_sums.maxsim_argmax_in_place, (K * 2,), (winners, places, Ld, rows, 4), {"num_warps": 4})
    for k in range(K):
        assert winners[k].tolist() == ([-1] * rows if k == 1 else places[k][argmax[k].long()].tolist())
