"""Test arrays, lists and nested tensors in functions that pad them, against calls with padded tensors."""

import warnings

import numpy as np
import pytest
import torch

import lik_ops

from .test_sequences import D_LENGTHS, Q_LENGTHS, as_form, d, draw, padded

W, BIAS = torch.randn(d, d), torch.randn(d)
FUNCTIONS = {
    "maxsim_soft": lambda Q, D, *masks, **rest: lik_ops.maxsim_soft(Q, D, 0.1, *masks, **rest),
    "maxsim_cross_entropy": lambda Q, D, *masks, **rest: lik_ops.maxsim_cross_entropy(Q, D, None, *masks, **rest),
    "maxsim_token_topk": lambda Q, D, *masks, **rest: lik_ops.maxsim_token_topk(
        Q, D, 3, *masks, reduction="mean", **rest
    ),
    "maxsim_xtr": lambda Q, D, *masks, **rest: lik_ops.maxsim_xtr(Q, D, 5, *masks, **rest),
    "maxsim_from_hidden": lambda Q, D, *masks, **rest: lik_ops.maxsim_from_hidden(Q, D, W, BIAS, *masks, **rest),
    "similarity_map": lambda Q, D, *masks, **rest: lik_ops.similarity_map(Q, D, *masks),
}
SEARCHES = {
    "retrieve": lambda Q, D, *masks, **rest: lik_ops.retrieve(Q, D, 2, q_mask=masks[0], **rest)[0],
    "maxsim_streamed": lambda Q, D, *masks, **rest: lik_ops.maxsim_streamed(Q, D, q_mask=masks[0], **rest),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def same(a, b):
    assert a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def sequences(function):
    """Return queries and documents with their weights; maps need as many of both."""
    documents = draw(D_LENGTHS[: len(Q_LENGTHS)] if function is FUNCTIONS["similarity_map"] else D_LENGTHS)
    return draw(Q_LENGTHS), documents, draw(Q_LENGTHS, shape=())


@every_function
@pytest.mark.parametrize("form", ["list", "tuple", "jagged", "strided", "holes"])
def test_scores_and_gradients_match_padded_calls_bitwise(function, form):
    queries, documents, weights = sequences(function)
    (Q, q_mask), (D, d_mask), (weight, _) = map(padded, (queries, documents, weights))
    leaves = [queries[0], queries[3], documents[0], documents[3], weights[0]]
    forms = as_form(form, queries), as_form(form, documents)
    found = function(*forms, q_weight=as_form(form, weights) if form in ("list", "tuple") else torch.cat(weights))
    expected = function(Q, D, q_mask, d_mask, q_weight=weight)
    same(found, expected)
    grads = [
        torch.autograd.grad(torch.where(x.isfinite(), x, 0).sum(), leaves, allow_unused=True) for x in (found, expected)
    ]
    for a, b in zip(*grads, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    one_side = function(as_form(form, queries), D, None, d_mask), function(Q, as_form(form, documents), q_mask)
    for a in one_side:
        same(a, function(Q, D, q_mask, d_mask))


@every_function
def test_equal_length_lists_match_dense_and_reject_masks(function):
    Q, D = torch.randn(3, 4, d), torch.randn(3, 5, d)
    same(function(list(Q), list(D)), function(Q, D))
    with pytest.raises(ValueError, match=r"q_mask: expected None with a list or nested tensor Q"):
        function(list(Q), D, torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"d_mask: expected None with a list or nested tensor [DH]"):
        function(Q, list(D), None, torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"[DH]\[1\]: expected a Tensor, got int"):
        function(Q, [D[0], 1])


@pytest.mark.parametrize("name", [*FUNCTIONS, *SEARCHES, "maxsim", "maxsim_with_argmax", "maxsim_pairs"])
def test_numpy_arrays_score_like_tensors(name):
    function = {
        **FUNCTIONS,
        **SEARCHES,
        "maxsim": lik_ops.maxsim,
        "maxsim_with_argmax": lambda *args, **rest: lik_ops.maxsim_with_argmax(*args, **rest)[0],
        "maxsim_pairs": lik_ops.maxsim_pairs,
    }[name]
    Q, D, weight = torch.randn(4, 3, d), torch.randn(4, 5, d), torch.rand(4, 3)
    q_mask, d_mask = torch.rand(4, 3) > 0.4, torch.rand(4, 5) > 0.4
    rest = {} if name == "similarity_map" else {"q_weight": weight}
    arrays = [x.numpy() for x in (Q, D, q_mask, d_mask)]
    expected = function(Q, D, q_mask, d_mask, **rest)
    same(function(*arrays, **{key: x.numpy() for key, x in rest.items()}), expected)
    same(function(Q, D, *arrays[2:], **rest), expected)
    queries, documents = draw(Q_LENGTHS, grad=False), draw(Q_LENGTHS, grad=False)
    if name != "maxsim_pairs":
        queries, documents = queries[:2], documents[2:]
    lists = [[x.numpy() for x in side] for side in (queries, documents)]
    same(function(*lists, None, None), function(queries, documents, None, None))
    if name in ("retrieve", "maxsim"):
        (Q, q_mask), arrays = padded(queries), lists[0]
        same(function(arrays, D, None, None), function(Q, D, q_mask, None))


def test_numpy_arrays_share_memory_when_possible():
    from lik_ops.core.arrays import share_arrays

    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    shared, items, other = share_arrays("maxsim", Q=x, D=[x, x[1:]], q_mask="text")
    assert shared.data_ptr() == items[0].data_ptr() == x.ctypes.data and other == "text"
    fixed = x.copy()
    fixed.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for y in (fixed, x[::-1], x.astype(">f4"), fixed[:, ::2]):
            (copied,) = share_arrays("maxsim", Q=y)
            assert np.array_equal(copied.numpy(), y)
    with pytest.raises(TypeError, match="maxsim: Q: expected an array of numbers, got <U1"):
        lik_ops.maxsim(np.array(["a"]), x)
    with pytest.raises(TypeError, match="maxsim: D: expected a Tensor, got MaskedArray"):
        lik_ops.maxsim(torch.zeros(1, 2, 3), np.ma.masked_array(np.ones((1, 2, 3))))


def test_corpus_accepts_numpy_queries(tmp_path):
    pytest.importorskip("safetensors", reason="corpora are files of it")
    corpus = lik_ops.Corpus.create(tmp_path / "corpus", d=d, dtype=torch.float32)
    corpus.append(draw(D_LENGTHS, grad=False))
    queries = draw(Q_LENGTHS, grad=False)
    Q, q_mask = padded(queries)
    arrays = [x.numpy() for x in queries]
    same(corpus.score(arrays, [0, 3]), corpus.score(Q, [0, 3], q_mask=q_mask))
    for call in (
        lambda Q, **rest: corpus.rerank(Q, [0, 3, 1], 2, return_argmax=True, **rest),
        lambda Q, **rest: lik_ops.retrieve(Q, corpus, 2, return_argmax=True, **rest),
    ):
        for a, b in zip(call(arrays), call(Q, q_mask=q_mask), strict=True):
            assert torch.equal(a, b)
