"""Test that integers of thousands of digits, which Python refuses to print, raise an error that names the argument."""

import itertools

import pytest
import torch

import lik_ops
from lik_ops import Corpus

LARGE = 10**5000
Q, D = torch.randn(2, 4, 8), torch.randn(5, 6, 8)
TOKENS, BOUNDS = torch.nn.functional.normalize(torch.randn(50, 8), dim=-1), torch.tensor([0, 20, 50])
CODES = lik_ops.quantize(TOKENS, lik_ops.ResidualCodec.train(TOKENS, n_centroids=4))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")
    found = Corpus.create(tmp_path_factory.mktemp("corpus"), 8, torch.float32)
    found.append([torch.randn(3, 8)] * 4)
    return found


OF_CORPORA = {
    "d": lambda c, n: Corpus.create(c.path / "new", n, torch.float32),
    "ids": lambda c, n: c.append([torch.randn(1, 8)] * 2, ids=[1, n]),
    "lengths": lambda c, n: c.append(torch.randn(1, 8), lengths=[n]),
    "index": lambda c, n: c[n],
    "index: ": lambda c, n: c[[n]],
    "begin, end": lambda c, n: c.documents(n),
    "begin, end: ": lambda c, n: c.documents(0, n),
    "indices": lambda c, n: c.score(Q, [n]),
    "top_k": lambda c, n: c.rerank(Q, [0], n),
}
OF_TENSORS = {
    "top_k": lambda n: lik_ops.retrieve(Q, D, n),
    "top_k: ": lambda n: lik_ops.maxsim_token_topk(Q, D, n),
    "top_k: expected": lambda n: lik_ops.maxsim_xtr(Q, D, n),
    "chunk": lambda n: lik_ops.retrieve(Q, D, 1, chunk=n),
    "chunk: ": lambda n: lik_ops.maxsim_streamed(Q, D, chunk=n),
    "n_probe": lambda n: lik_ops.retrieve(Q, D, 1, n_probe=n),
    "n_candidates": lambda n: lik_ops.retrieve(Q, CODES, 1, n_candidates=n, cu_seqlens_d=BOUNDS),
    "n_candidates: ": lambda n: lik_ops.retrieve(Q, D, 1, coarse=lik_ops.quantize(D), n_candidates=n),
    "n_centroids": lambda n: lik_ops.ResidualCodec.train(TOKENS, n_centroids=n),
    "nbits": lambda n: lik_ops.ResidualCodec.train(TOKENS, nbits=n),
    "d": lambda n: lik_ops.Quantized(torch.zeros(2, 3, 8).char(), torch.ones(2, 3), "int8", n, torch.float32),
    "L": lambda n: lik_ops.lengths_to_mask(torch.tensor([1, 2]), n),
    "temperature": lambda n: lik_ops.maxsim_soft(Q, D, n),
    "temperature: ": lambda n: lik_ops.maxsim_cross_entropy(Q, D[:2], temperature=n),
    "ignore_index": lambda n: lik_ops.maxsim_cross_entropy(Q, D[:2], ignore_index=n),
}


def assert_error_names(name, call):
    with pytest.raises((ValueError, TypeError, IndexError), match=name.rstrip(": ")) as raised:
        call()
    assert "Exceeds the limit" not in str(raised.value) and len(str(raised.value)) < 300


@pytest.mark.parametrize(("name", "sign"), itertools.product(OF_CORPORA, (1, -1)))
def test_corpus_error_names_the_large_integer_argument(name, sign, corpus):
    assert_error_names(name, lambda: OF_CORPORA[name](corpus, sign * LARGE))
    assert len(corpus) == 4


@pytest.mark.parametrize(("name", "sign"), itertools.product(OF_TENSORS, (1, -1)))
def test_error_names_the_large_integer_argument(name, sign):
    assert_error_names(name, lambda: OF_TENSORS[name](sign * LARGE))


def test_longest_ids_are_read_back(corpus, tmp_path):
    found = Corpus.create(tmp_path, 8, torch.float32)
    ids = [10**4299, 1 - 10**4300]
    found.append([torch.randn(1, 8)] * 2, ids=ids)
    assert Corpus.open(tmp_path).ids == ids
