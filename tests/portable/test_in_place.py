"""Test that the portable backend reads documents in place, with the bits of a copy and without its memory."""

import pytest
import torch

from lik_ops.portable import blocks as portable_blocks
from lik_ops.portable.blocks import supports_in_place_reads

from ..support.ragged import same_bits
from .test_portable import MiB, Problem, peak_bytes

pytestmark = pytest.mark.skipif(not supports_in_place_reads(), reason="documents are copied on this machine")

# Several blocks of documents with a small last block; several tiles, panels, and queries; short documents; candidates.
SHAPES = (
    ("cross", (1, 75, 32, 300, 128)),
    ("cross", (3, 24, 130, 1100, 8)),
    ("cross", (5, 30, 7, 300, 100)),
    ("cross", (2, 3000, 5, 3, 16)),
    ("cross", (1, 3000, 300, 2, 8)),
    ("cross", (1, 5, 33, 40, 128)),
    ("cross", (1, 30, 20000, 30, 8)),
    ("cross", (1, 26, 9000, 30, 8)),
    ("candidates", (3, 30, 20, 50, 17)),
    ("candidates", (9, 7, 32, 40, 48)),
    ("candidates", (40, 1, 32, 40, 48)),
)


def forward_with_copies(p: Problem, monkeypatch, **options):
    with monkeypatch.context() as patch:
        patch.setattr(portable_blocks, "supports_in_place_reads", lambda: False)
        return p.forward(**options)


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("layout, shape", SHAPES, ids=str)
def test_bits_match_copied_documents(layout, shape, masks, monkeypatch):
    p = Problem(shape, layout, masks=masks, weight=masks)
    expected, winner = forward_with_copies(p, monkeypatch)
    D = p.D
    wide = torch.cat([D, D], -1)[..., : shape[-1]]
    apart = torch.stack([D, D], 1)[:, 0]
    unaligned = torch.cat([D.new_zeros(1), D.flatten()])[1:].view(D.shape)
    turned = D.mT.contiguous().mT
    for p.D in (D, wide, apart, unaligned, turned):
        same_bits(p.forward(None)[0], expected)
        scores, argmax = p.forward()
        same_bits(scores, expected)
        same_bits(argmax, winner)


@pytest.mark.parametrize("Ld", [10, 300])
def test_expanded_documents(Ld, monkeypatch):
    p = Problem((2, 40, 32, Ld, 16))
    for D in (p.D[:1].expand(40, -1, -1), p.D[:, :1].expand(-1, Ld, -1), p.D[:1, :1].expand(40, Ld, -1)):
        p.D = D
        same_bits(p.forward(None)[0], forward_with_copies(p, monkeypatch, argmax_dtype=None)[0])


def test_nan_and_infinite_similarities_across_documents():
    p = Problem((2, 50, 32, 300, 8))
    p.D[3, [7, 200]], p.D[4] = float("nan"), -float("inf")
    p.Q[1] = 1
    scores = p.forward(None)[0]
    torch.testing.assert_close(scores.double(), p.oracle()[0], atol=1e-4, rtol=1e-4, equal_nan=True)
    assert scores[:, 3].isnan().all() and scores[1, 4] == -float("inf")


def test_no_document_is_copied():
    p = Problem((1, 200, 32, 300, 128))
    assert p.D.nbytes > 25 * MiB
    assert peak_bytes(lambda: p.forward(None)) < 4 * MiB
