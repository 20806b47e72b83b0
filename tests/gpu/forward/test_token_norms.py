"""Test the launch that precomputes inverse token norms."""

import pytest
import torch

from ...support.common import CUDA, INTERPRETER, INTERPRETING

pytest.importorskip("triton", reason="this is a kernel in Triton")
from lik_ops.csrc_triton.common import token_norms
from lik_ops.gpu.runtime import launcher
from lik_ops.gpu.runtime.arguments import make_document_args, make_query_args, make_size_args, use_device
from lik_ops.gpu.tuning import architectures

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
BN = 64


def run_tile_norms(Q, D, BD, d_mask=None, normalize=True):
    """Return the norms of documents and queries, written to buffers of NaN."""
    tiles = architectures.cdiv(D.shape[1], BN)
    documents = torch.full((len(D), tiles, BN), float("nan"), device=D.device)
    queries = torch.full(Q.shape[:2], float("nan"), device=D.device)
    args = (
        make_query_args(Q, None, None),
        make_document_args(D, d_mask),
        queries if normalize else None,
        documents,
        make_size_args(Q, D),
        D.shape[-1],
        BN,
        BD,
    )
    args = *args, normalize, D.shape[1] < BN
    with use_device(D.device):
        grid = (len(D) * tiles + len(Q) * architectures.cdiv(Q.shape[1], BN),)
        launcher.launch(token_norms.maxsim_tile_norms, grid, args, {"num_warps": 4})
    return documents, queries


def inverse(x):
    return 1 / torch.linalg.vector_norm(x.double(), dim=-1).clamp_min(1e-12)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(
    ("Nq", "Lq", "Nd", "Ld", "d", "BD"),
    [(3, 32, 5, 64, 128, 128), (2, 130, 4, 150, 48, 64), (1, 1, 3, 129, 320, 128), (2, 7, 4, 20, 160, 128)],
)
def test_inverse_norms_of_every_token(Nq, Lq, Nd, Ld, d, BD, place):
    torch.manual_seed(0)
    Q = torch.randn(Nq, Lq, 2 * d, dtype=torch.float16, device=place.device)[..., :d]
    D = torch.randn(Nd, Ld, d, dtype=torch.float16, device=place.device) * 9
    D[1, 3], Q[0, 0] = 0, 0
    D[2, 5, 7] = float("inf")
    documents, queries = run_tile_norms(Q, D, BD)
    for n in range(documents.shape[1]):
        first = max(min(n * BN, Ld - BN), 0)  # the last tile ends where the document ends
        expected = inverse(D[:, first : first + BN])
        torch.testing.assert_close(documents[:, n, :Ld].double(), expected, rtol=3e-7, atol=0)
    assert not documents.isnan().any()
    torch.testing.assert_close(queries.double(), inverse(Q), rtol=3e-7, atol=0)
    assert documents[1, 0, 3].item() == pytest.approx(1e12) and documents[2, 0, 5] == 0
    alone, _ = run_tile_norms(Q[:1], D[1:2], BD)
    assert torch.equal(alone[0], documents[1])  # the bits do not depend on the batch


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("Ld", [20, 64, 150])
def test_norms_of_masked_tokens_are_minus_one(Ld, normalize, place):
    torch.manual_seed(0)
    Q, D = torch.randn(2, 5, 16, device=place.device), torch.randn(4, Ld, 16, device=place.device)
    mask = (torch.rand(Ld, 4) < 0.6).T.to(place.device)
    mask[1], mask[2] = False, True
    norms = inverse(D) if normalize else torch.ones(4, Ld, dtype=torch.float64, device=D.device)
    expected = torch.where(mask, norms, -1.0)
    documents, queries = run_tile_norms(Q, D, 64, mask, normalize)
    for n in range(documents.shape[1]):
        first = max(min(n * BN, Ld - BN), 0)
        torch.testing.assert_close(documents[:, n, :Ld].double(), expected[:, first : first + BN], rtol=3e-7, atol=0)
    assert (documents[..., Ld:] == -1).all()
    assert bool(queries.isnan().all()) is not normalize
