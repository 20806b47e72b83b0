"""Test the token poolers of sentence-transformers and colpali-engine inside `enable`."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch
from torch.nn.functional import normalize

from lik_ops.integrations import _pooling, colpali
from lik_ops.integrations import sentence_transformers as st

from .test_integrations_hosts import host

close = torch.testing.assert_close
POOLING = "sentence_transformers.multi_vector_encoder.modules.token_pooling"
LENGTHS = (31, 2, 64, 17, 90)


def draw(*lengths, dtype=torch.float32, norm=1.0):
    g = torch.Generator().manual_seed(3)
    topics = torch.randn(6, 16, generator=g)
    each = [topics[torch.randint(0, 6, (n,), generator=g)] + torch.randn(n, 16, generator=g) for n in lengths]
    return [(norm * normalize(x, dim=-1)).to(dtype) for x in each]


def sort_tokens(tokens):
    """Return the tokens of a document in an order that no numbering of clusters changes."""
    return tokens[(tokens.detach().double() @ torch.linspace(1, 2, tokens.shape[-1]).double()).argsort()]


def assert_same_clusters(found, expected, **tolerance):
    assert [len(x) for x in found] == [len(x) for x in expected]
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and x.untyped_storage().nbytes() == x.nbytes
        close(sort_tokens(x), sort_tokens(y), **tolerance)


OPTIONS = [{}, {"num_protected_tokens": 0}, {"normalize_embeddings": False}, {"num_protected_tokens": 3}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("factor", [2, 2.5])
def test_pooling_matches_sentence_transformers(options, factor):
    module = host(POOLING)
    pooling, documents = module.HierarchicalTokenPooling(factor, **options), draw(*LENGTHS, 1, 0)
    before = [vars(module.BaseTokenPooling)[name] for name in ("pool", "forward")]
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor([len(x) for x in documents])[:, None]

    def run():
        made = pooling.forward({"token_embeddings": padded.clone(), "attention_mask": mask}, task="document")
        rows = [x[m] for x, m in zip(made["token_embeddings"], made["attention_mask"], strict=True)]
        dense = pooling.pool(padded, attention_mask=mask, padding_side="left")
        return pooling.pool(documents), [*rows], dense

    expected = run()
    with st.enable() as routing:
        assert routing.not_reached == ()
        found = run()
        assert routing.calls == {"pool": 2, "forward": 1}
        assert pooling.pool(documents, task="query") is documents and pooling.pool([]) == []
        with pytest.raises(ValueError, match="must be 3D"):
            pooling.pool(documents[0])
        assert routing.calls == {"pool": 2, "forward": 1}
    assert_same_clusters(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for x, y in zip((*found[1], *found[2]), (*expected[1], *expected[2]), strict=True):
        close(sort_tokens(x), sort_tokens(y), rtol=1e-5, atol=1e-6)
    assert [vars(module.BaseTokenPooling)[name] for name in ("pool", "forward")] == before
    assert "pool_one" not in vars(pooling)


def test_pooling_gradients_match_sentence_transformers():
    pooling = host(POOLING).HierarchicalTokenPooling(3)
    documents = [x.requires_grad_() for x in draw(40, 23)]
    weight = torch.linspace(-1, 1, 16)

    def grads():
        return torch.autograd.grad(sum((x @ weight).sin().sum() for x in pooling.pool(documents)), documents)

    expected = grads()
    with st.enable() as routing:
        close(grads(), expected, rtol=1e-5, atol=1e-6)
        assert routing.calls == {"pool": 1}


def test_unsupported_pooling_is_left_to_sentence_transformers(caplog):
    """Long tokens have clamped distances, and subclasses have a method of their own. Neither is counted."""
    module = host(POOLING)

    class Halved(module.HierarchicalTokenPooling):
        def pool_one(self, embedding, **kwargs):
            return embedding[::2]

    documents, long = draw(*LENGTHS), draw(*LENGTHS, norm=2.0)
    pooling, expected = module.HierarchicalTokenPooling(2), module.HierarchicalTokenPooling(2).pool(long)
    mixed = [documents[0], documents[1].double()]
    of_mixed = pooling.pool(mixed)
    caplog.set_level(logging.DEBUG, logger="lik_ops")
    with st.enable() as routing:
        assert all(torch.equal(x, y) for x, y in zip(pooling.pool(long), expected, strict=True))
        assert "the host pools the documents: expected tokens of norm 1" in caplog.text
        assert all(torch.equal(x, y) for x, y in zip(pooling.pool(mixed), of_mixed, strict=True))
        assert "expected one dtype, device and d" in caplog.text
        assert all(torch.equal(x, y[::2]) for x, y in zip(Halved(2).pool(documents), documents, strict=True))
        kept = module.HierarchicalTokenPooling(1).pool(documents)
        close(kept, documents)
        assert not routing.calls


@pytest.mark.filterwarnings("ignore:.*uncondensed distance matrix")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_matches_colpali(dtype, caplog):
    module = host("colpali_engine.compression.token_pooling")
    pooler, documents = module.HierarchicalTokenPooler(), draw(*LENGTHS, dtype=dtype)
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_side="left")

    def run():
        dense = pooler.pool_embeddings(padded, padding=True, padding_side="left", pool_factor=3)
        return pooler.pool_embeddings(documents, pool_factor=3, num_workers=2), dense

    expected, mapped = run(), pooler.pool_embeddings(documents, return_dict=True, pool_factor=3)
    before, tolerance = vars(module.BaseTokenPooler)["pool_embeddings"], 1e-5 if dtype == torch.float32 else 1e-2
    with colpali.enable() as routing:
        assert routing.not_reached == ()
        found = run()
        assert routing.calls == {"pool_embeddings": 2}
        again = pooler.pool_embeddings(documents, return_dict=True, pool_factor=3)
        assert [x.keys() for x in again.cluster_id_to_indices] == [x.keys() for x in mapped.cluster_id_to_indices]
        assert len(pooler.pool_embeddings(documents, pool_factor=1)) == len(documents)
        caplog.set_level(logging.DEBUG, logger="lik_ops")
        with pytest.raises(ValueError, match="more than one token"):
            pooler.pool_embeddings(draw(1, 5), pool_factor=2)
        assert "expected documents of at least 2 tokens" in caplog.text
        with pytest.raises(TypeError):
            pooler.pool_embeddings(documents)
        assert pooler.pool_embeddings([], pool_factor=2).pooled_embeddings == []
        assert routing.calls == {"pool_embeddings": 2}
    assert_same_clusters(found[0], expected[0], rtol=tolerance, atol=tolerance)
    for x, y in zip(found[1], expected[1], strict=True):
        close(sort_tokens(x), sort_tokens(y), rtol=tolerance, atol=tolerance)
    assert vars(module.BaseTokenPooler)["pool_embeddings"] is before and not vars(pooler)


# stand-ins, without the hosts


class _BasePooling:
    def pool(self, documents):
        return [self.pool_one(x) for x in documents]

    def forward(self, features):
        features["pooled"] = self.pool(features["documents"])
        return features


class _HierarchicalPooling(_BasePooling):
    pool_factor, num_protected_tokens, normalize_embeddings = 2, 0, False

    def pool_one(self, document):
        return -document


def test_call_is_pooled_in_one_run_or_left_to_the_host(monkeypatch):
    names = {"BaseTokenPooling": _BasePooling, "HierarchicalTokenPooling": _HierarchicalPooling}
    module = types.ModuleType(POOLING)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, POOLING, module)
    pooling, documents = _HierarchicalPooling(), draw(9, 4)
    expected = _pooling.pool_each(documents, 2, num_protected=0, normalize=False)
    assert [len(x) for x in expected] == [4, 2] and st._accepts_pooling(pooling, documents)
    close(st._pool_documents(_BasePooling.pool, pooling, documents), expected)
    features = {"documents": documents}
    assert st._pool_documents(_BasePooling.forward, pooling, features) is features
    close(features["pooled"], expected)
    for refused in ([], draw(9, norm=2.0), [documents[0], documents[1].double()], [x.int() for x in documents]):
        assert st._pool_documents(_BasePooling.pool, pooling, refused) is NotImplemented
    for factor in (1, True, float("inf"), "2", None):
        pooling.pool_factor = factor
        assert not st._accepts_pooling(pooling, documents)


class _ListPooler:
    def pool_embeddings(self, embeddings, log, **named):
        log.append(len(embeddings))
        return self._pool_embeddings_impl(embeddings, **named)[0] if embeddings else []


def test_a_list_is_pooled_in_one_run_or_left_to_the_host():
    theirs, log, documents = _ListPooler.pool_embeddings, [], draw(9, 4)
    found = colpali._pool_embeddings(theirs, _ListPooler(), documents, log, pool_factor=2, num_workers=None)
    close(found, _pooling.pool_each(documents, 2, metric="rows", num_protected=0, normalize=True))
    assert log == [2]
    for refused in ([], draw(9, norm=2.0), draw(1, 5), [x.requires_grad_() for x in draw(9)]):
        assert colpali._pool_embeddings(theirs, _ListPooler(), refused, log, pool_factor=2) is NotImplemented
