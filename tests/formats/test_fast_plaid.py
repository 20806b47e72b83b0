"""Test fast-plaid against `lik_ops.write_index` and `lik_ops.read_index`, if fast-plaid is installed.

fast-plaid needs the torch that its wheel was built for. Version 1.7.0 has a wheel for torch 2.11 and Python 3.11.
"""

import pytest
import torch
from torch.nn.functional import normalize

import lik_ops

from ..support.residual import NBITS

search = pytest.importorskip("fast_plaid.search", reason="fast-plaid: pip install fast-plaid", exc_type=ImportError)
D, CENTROIDS = 128, 64


def documents(count=200):
    """Return packed clustered tokens with their offsets, and queries."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 60, (count,), generator=generator)
    centers = normalize(torch.randn(CENTROIDS, D, generator=generator), dim=-1)
    which = torch.randint(CENTROIDS, (int(lengths.sum()),), generator=generator)
    tokens = centers[which] + 0.5 * torch.randn(len(which), D, generator=generator) / D**0.5
    Q = normalize(torch.randn(6, 8, D, generator=generator), dim=-1)
    return normalize(tokens, dim=-1), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), Q


def open_fast_plaid(path):
    return search.FastPlaid(index=str(path), device="cpu")


def check_same(found, Q, index):
    """Check that each document was found with its score, in our order except for near ties."""
    scores = lik_ops.maxsim(Q, index)
    best, indices = lik_ops.retrieve(Q, index, len(index))
    for i, ranked in enumerate(found):
        theirs = torch.tensor([score for _, score in ranked])
        order = torch.tensor([document for document, _ in ranked])
        assert sorted(order.tolist()) == list(range(len(index)))
        torch.testing.assert_close(theirs, scores[i, order], rtol=0, atol=1e-3)
        gap = best[i].diff().abs() > 2e-3
        apart = torch.cat([gap, gap.new_ones(1)]) & torch.cat([gap.new_ones(1), gap])
        assert torch.equal(order[apart], indices[i][apart]) and apart.sum() > len(index) // 4


@pytest.mark.parametrize("of_corpus", [False, True])
@pytest.mark.parametrize("nbits", NBITS)
def test_fast_plaid_searches_written_index(tmp_path, nbits, of_corpus):
    tokens, bounds, Q = documents()
    codec = lik_ops.ResidualCodec.train(tokens, nbits, CENTROIDS)
    index = lik_ops.Index(lik_ops.quantize(tokens, codec), bounds)
    if of_corpus:
        corpus = lik_ops.Corpus.create(tmp_path / "corpus", D, torch.float32, codec)
        corpus.append(list(tokens.split(bounds.diff().tolist())))
        index = lik_ops.Index(*corpus.documents())
    lik_ops.write_index(tmp_path / "index", index)
    theirs = open_fast_plaid(tmp_path / "index")
    options = {"n_full_scores": 10_000, "n_ivf_probe": CENTROIDS, "show_progress": False}
    check_same(theirs.search(Q, top_k=len(index), **options), Q, index)
    decoded = index.decode(torch.float32)[0].split(bounds.diff().tolist())
    for document, found in zip((0, 7, 199), theirs.get_embeddings([0, 7, 199]), strict=True):
        torch.testing.assert_close(found.float(), decoded[document], rtol=0, atol=1e-3)
    theirs.close()
    again = lik_ops.read_index(tmp_path / "index")  # opening it changes nothing
    assert torch.equal(lik_ops.maxsim(Q, again), lik_ops.maxsim(Q, index))


@pytest.mark.parametrize("nbits", NBITS)
def test_read_index_written_by_fast_plaid(tmp_path, nbits):
    tokens, bounds, Q = documents()
    theirs = open_fast_plaid(tmp_path / "index")
    each = tokens.split(bounds.diff().tolist())
    theirs.create(list(each), nbits=nbits)
    index = lik_ops.read_index(tmp_path / "index")
    assert torch.equal(index.cu_seqlens, bounds) and index.documents.codec.nbits == nbits
    options = {"n_full_scores": 10_000, "n_ivf_probe": len(index.documents.codec.centroids), "show_progress": False}
    check_same(theirs.search(Q, top_k=len(index), **options), Q, index)
    theirs.close()


def test_fast_plaid_appends_to_written_index(tmp_path):
    tokens, bounds, Q = documents()
    codec = lik_ops.ResidualCodec.train(tokens, 4, CENTROIDS)
    lik_ops.write_index(tmp_path / "index", lik_ops.Index(lik_ops.quantize(tokens, codec), bounds))
    before = lik_ops.maxsim(Q, lik_ops.read_index(tmp_path / "index"))
    theirs = open_fast_plaid(tmp_path / "index")
    theirs.update(list(tokens.flip(0).split(bounds.diff().tolist()))[:50])
    theirs.close()
    index = lik_ops.read_index(tmp_path / "index")
    assert len(index) == 250
    assert torch.equal(lik_ops.maxsim(Q, index)[:, :200], before)
