"""Test the scores of the adapters without their hosts: masks, empty documents, dtypes, and shapes."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, mse_loss

import lik_ops
from lik_ops import reference
from lik_ops.integrations import colpali, pylate
from lik_ops.integrations import sentence_transformers as st

ROOT = Path(__file__).parents[2]
LENGTHS = (3, 1, 5, 2)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
close = torch.testing.assert_close


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    torch.manual_seed(0)
    return request.param


def ragged(device: str, lengths=LENGTHS, d: int = 8) -> list[Tensor]:
    return [torch.randn(n, d, device=device) for n in lengths]


def padded(items: list[Tensor]) -> tuple[Tensor, Tensor]:
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(t), device=t.device) for t in items], batch_first=True)
    return torch.nn.utils.rnn.pad_sequence(items, batch_first=True), mask.bool()


def one_by_one(Q: list[Tensor], D: list[Tensor]) -> Tensor:
    return torch.stack([torch.stack([(q @ d.T).amax(-1).sum() for d in D]) for q in Q])


# Cross products of each adapter: (function, score of an empty document).
CROSS = {
    "sentence_transformers": (st.maxsim, -1e9),
    "pylate": (pylate.colbert_scores, 0.0),
}
EVERY = pytest.mark.parametrize("host", CROSS)


@EVERY
def test_padding_does_not_affect_scores(host, device):
    """Lists, and tensors padded on either side with masks, score like each pair alone."""
    score, _ = CROSS[host]
    Q, D = ragged(device, (4, 2, 3)), [-t.abs() for t in ragged(device)]  # padding would win against negative maxima
    Q = [t.abs() for t in Q]
    expected = one_by_one(Q, D)
    (q, q_mask), (d, d_mask) = padded(Q), padded(D)
    close(score(Q, D), expected)
    close(score(q, d, q_mask, d_mask), expected)
    close(score(q, d, q_mask.float(), d_mask.float()), expected)
    close(score(q.flip(1), d.flip(1), q_mask.flip(1), d_mask.flip(1)), expected)
    close(score(q, D, q_mask), expected)
    close(score(Q, d, None, d_mask.long()), expected)
    close(score(Q, D, None, d_mask), expected)


@EVERY
def test_masks_with_holes_match_reference(host, device):
    score, _ = CROSS[host]
    Q, D = torch.randn(3, 4, 8, device=device), torch.randn(5, 6, 8, device=device)
    q_mask, d_mask = torch.rand(3, 4, device=device) > 0.4, torch.rand(5, 6, device=device) > 0.4
    d_mask[:, 2] = True
    close(score(Q, D, q_mask, d_mask), reference.maxsim(Q, D, q_mask, d_mask))


@EVERY
def test_masked_token_values_are_ignored(host, device):
    score, _ = CROSS[host]
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(2, 4, 8, device=device)
    d_mask = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]], device=device).bool()
    poisoned = D.masked_fill(~d_mask.unsqueeze(-1), torch.nan)
    close(score(Q, poisoned, None, d_mask), score(Q, D, None, d_mask))


@EVERY
def test_documents_without_tokens_get_the_empty_score(host, device):
    """Empty documents are masked, in a list, or of width 0. Scores equal the host's, and losses are finite."""
    score, empty = CROSS[host]
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(3, 4, 8, device=device, requires_grad=True)
    d_mask = torch.tensor([True, False, True], device=device).unsqueeze(1).expand(3, 4)
    scores = score(Q, D, None, d_mask)
    close(scores[:, 1], torch.full_like(scores[:, 1], empty))
    assert (
        cross_entropy(scores, torch.zeros(2, dtype=torch.long, device=device)) + mse_loss(scores, 0 * scores)
    ).isfinite()
    scores.sum().backward()
    assert D.grad.isfinite().all() and not D.grad[1].any() and D.grad[0].any()
    found = score(Q, [D[0].detach(), D.detach()[1, :0], D[2].detach()])
    close(found, scores.detach())
    assert (score(Q, D[:, :0].detach()) == empty).all()
    masked = score(Q, D, torch.zeros(2, 3, dtype=torch.bool, device=device), d_mask)
    close(masked, torch.tensor([0.0, empty, 0.0], device=device).expand(2, 3))


@EVERY
@pytest.mark.parametrize(
    "documents", [[[], []], [torch.tensor([]), torch.zeros(0, 8)[:, :0]]], ids=["lists", "tensors"]
)
def test_lists_of_empty_documents_get_the_empty_score(host, documents):
    score, empty = CROSS[host]
    pairwise = st.maxsim_pairwise if host == "sentence_transformers" else pylate.colbert_scores_pairwise
    Q = torch.randn(2, 3, 8)
    for queries in (Q, list(Q)):
        assert (score(queries, documents) == empty).all() and score(queries, documents).shape == (2, 2)
        assert (pairwise(queries, documents) == empty).all()
    assert (score(documents, Q) == 0).all()
    assert (score(Q, documents, None, torch.ones(2, 0)) == empty).all()


@EVERY
def test_numeric_query_mask_weights_tokens(host, device):
    score, _ = CROSS[host]
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(4, 5, 8, device=device)
    weight = torch.rand(2, 3, device=device, requires_grad=True)
    scores = score(Q, D, weight)
    close(scores, reference.maxsim(Q, D, q_weight=weight))
    (grad,) = torch.autograd.grad(scores.sum(), weight)
    assert grad.any()


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_are_fp32(host, device, dtype):
    """Sums of half-precision maxima remain distinct."""
    score, _ = CROSS[host]
    Q, D = torch.rand(1, 32, 16, device=device).to(dtype), torch.rand(500, 8, 16, device=device).to(dtype)
    scores = score(Q, D)
    assert scores.dtype == torch.float32
    assert len(scores.unique()) > 2 * len(scores.to(torch.bfloat16).unique())


def test_scores_of_fp64_are_fp64():
    Q, D = torch.randn(3, 2, 8).double(), torch.randn(3, 2, 8).double()
    expected, mask = reference.maxsim(Q, D), torch.ones(3, 2, dtype=torch.bool)
    lists = list(Q), list(D)
    for scores in (
        st.maxsim(Q, D),
        st.maxsim(*lists),
        st.maxsim(Q, D, mask, mask),
        2 * st.mean_maxsim(Q, D),
        st.colbert_scores(Q, D[:, None]),
        st.colbert_kd_scores(Q, D.expand(3, 3, 2, 8)),
        pylate.colbert_scores(Q, D),
        colpali.maxsim_inbatch(Q, D),
    ):
        close(scores, expected, rtol=1e-12, atol=1e-12)
    for scores in (st.maxsim_pairwise(Q, D), st.colbert_scores_pairwise(*lists), pylate.colbert_scores_pairwise(Q, D)):
        close(scores, expected.diagonal(), rtol=1e-12, atol=1e-12)
    for score in (st.xtr_scores, pylate.xtr_scores):
        assert score(Q, D[:, None]).dtype == torch.float64


@EVERY
def test_arrays_lists_and_integers(host):
    numpy = pytest.importorskip("numpy", reason="arrays are numpy's")
    score, _ = CROSS[host]
    Q, D = [torch.randint(-9, 9, (n, 4)) for n in (2, 3)], [torch.randint(-9, 9, (n, 4)) for n in LENGTHS]
    expected = one_by_one(Q, D).float()
    arrays = [t.numpy().astype(numpy.int8) for t in D]
    arrays[0].flags.writeable = False
    arrays[1] = arrays[1][::-1]
    close(score(Q, arrays), expected)
    close(score([t.tolist() for t in Q], arrays), expected)
    close(score(torch.stack([Q[0], Q[0]]).numpy(), arrays), expected[[0, 0]])


@EVERY
def test_gradients_match_reference(host, device):
    score, _ = CROSS[host]
    Q, D = torch.randn(3, 4, 8, device=device), torch.randn(4, 5, 8, device=device)
    d_mask = torch.rand(4, 5, device=device) > 0.3
    d_mask[:, 0] = True
    upstream = torch.randn(3, 4, device=device)
    grads = []
    for function in (score, reference.maxsim):
        q, d = Q.clone().requires_grad_(), D.clone().requires_grad_()
        function(q, d, None, d_mask).backward(upstream)
        grads.append((q.grad, d.grad))
    close(*grads)


XTR = {  # scorers for the batch and for each query, what they count, and the score of an empty document
    "sentence_transformers": (st.XTRScores, st.XTRKDScores, "retrieved", -1e9),
    "pylate": (pylate.XTRScores, pylate.XTRKDScores, "positive", 0.0),
}


@pytest.mark.parametrize("host", XTR)
@pytest.mark.parametrize("top_k", [1, 7, 1000])
def test_xtr_scores_equal_maxsim_xtr(host, top_k, device):
    every, own, normalizer, empty = XTR[host]
    Q, D = torch.randn(3, 4, 8, device=device), torch.randn(3, 2, 5, 8, device=device)
    q_mask, d_mask = torch.rand(3, 4, device=device) > 0.3, torch.rand(3, 2, 5, device=device) > 0.3
    q_mask[:, 0] = d_mask[..., 0] = True
    d_mask[1, 1] = False
    flat, keep, weight = D.flatten(0, 1), d_mask.flatten(0, 1), torch.rand(3, 4, device=device) * q_mask
    score = partial(lik_ops.maxsim_xtr, Q, flat, top_k, normalizer=normalizer)
    for mask, expected in (
        (None, score(None, keep)),
        (q_mask, score(q_mask, keep)),
        (q_mask.long(), score(q_mask, keep)),
        (weight, score(q_mask, keep, q_weight=weight)),
    ):
        expected[:, 3] = empty
        found = every(top_k)(Q, D, mask, d_mask)
        close(found, expected, rtol=0, atol=0)
        pairs = torch.stack([expected[i, 2 * i : 2 * i + 2] for i in range(3)])
        close(own(top_k)(Q, D, mask, d_mask), pairs, rtol=0, atol=0)
        if host == "sentence_transformers":
            ones = st.xtr_scores_pairwise(Q, D[:, 0], mask, d_mask[:, 0], top_k)
            close(ones, own(top_k)(Q, D[:, :1], mask, d_mask[:, :1])[:, 0], rtol=0, atol=0)
    close(every(top_k)(list(Q), list(D)), score(), rtol=0, atol=0)


@pytest.mark.parametrize("host", XTR)
def test_xtr_gradients_match_reference(host, device):
    every, own, normalizer, _ = XTR[host]
    Q = torch.randn(3, 4, 8, device=device, requires_grad=True)
    D = torch.randn(3, 2, 5, 8, device=device, requires_grad=True)
    upstream = torch.randn(3, 6, device=device)
    expected = reference.maxsim_xtr(Q, D.flatten(0, 1), 7, normalizer=normalizer)
    close(*(torch.autograd.grad(x, (Q, D), upstream) for x in (every(7)(Q, D), expected)))
    pairs = own(7)(Q, D)
    assert pairs.shape == (3, 2) and torch.autograd.grad(pairs.sum(), Q)[0].any()


@pytest.mark.parametrize("score", [pylate.xtr_kd_scores, st.xtr_kd_scores, st.xtr_scores_pairwise])
@pytest.mark.parametrize("groups", [2, 4])
def test_xtr_groups_must_match_the_queries(score, groups):
    Q, D = torch.randn(3, 3, 8), torch.randn(groups, 1, 5, 8)
    with pytest.raises(ValueError, match=rf"documents: expected 3 groups, one for each query, got {groups}"):
        score(Q, D[:, 0] if score is st.xtr_scores_pairwise else D)
    with pytest.raises(ValueError, match=rf"documents: expected 1 groups, one for each query, got {groups}"):
        score(Q[0], D)
    close(score(Q[0], D[:1]).flatten(), score(Q[:1], D[:1]).flatten())


def test_xtr_scorers_store_their_options():
    assert st.XTRScores(9, chunk_elements=4).get_config_dict() == {"top_k": 9, "chunk_elements": 4}
    assert st.XTRKDScores().top_k == pylate.xtr_scores.k == pylate.xtr_kd_scores.k == 256
    scorer = pylate.XTRScores(9, 4)
    assert (scorer.k, scorer.document_chunk_size) == (9, 4)


def test_st_xtr_rows_of_zeros_are_padding(device):
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(2, 2, 4, 8, device=device)
    Q[1, 2], D[0, 1, 2:], D[1, 0] = 0, 0, 0
    expected = st.xtr_scores(Q, D, Q.any(-1), D.any(-1), top_k=5)
    close(st.xtr_scores(Q, D, top_k=5), expected)
    assert (expected[:, 2] == -1e9).all()


LOSS_SCORES = {"sentence_transformers": st.colbert_scores, "pylate": pylate.ColBERTScores()}


@pytest.mark.parametrize("host", LOSS_SCORES)
def test_group_columns_are_ordered_by_group(host, device):
    """Column ``g * N + n`` is document n of group g. Groups of other ranks may outnumber the queries."""
    score = LOSS_SCORES[host]
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(6, 2, 5, 8, device=device)
    d_mask = torch.rand(6, 2, 5, device=device) > 0.3
    d_mask[..., 0] = True
    scores = score(Q, D, queries_mask=None, documents_mask=d_mask)
    assert scores.shape == (2, 12)
    for g in range(6):
        for n in range(2):
            close(scores[:, g * 2 + n], reference.maxsim(Q, D[g, n], None, d_mask[g, n]))


@pytest.mark.parametrize("host", LOSS_SCORES)
def test_chunked_gradients_match_full_gradients(host, device):
    """GradCache computes scores and gradients for some queries at a time, and gradients of documents add up."""
    score = LOSS_SCORES[host]
    Q = torch.randn(6, 3, 8, device=device, requires_grad=True)
    D = torch.randn(6, 2, 5, 8, device=device, requires_grad=True)
    labels = torch.arange(6, device=device) * 2
    loss = cross_entropy(score(Q, D), labels)
    whole = torch.autograd.grad(loss, (Q, D))
    total = 0.0
    for begin in range(0, 6, 4):
        rows = slice(begin, begin + 4)
        part = cross_entropy(score(Q[rows], D), labels[rows], reduction="sum") / 6
        part.backward()
        total += part.detach()
    close(total, loss.detach())
    close((Q.grad, D.grad), whole)


@pytest.mark.parametrize(
    "score", [st.colbert_kd_scores, pylate.colbert_kd_scores], ids=["sentence_transformers", "pylate"]
)
def test_kd_scores_match_reference(score, device):
    Q, D = torch.randn(3, 4, 8, device=device), torch.randn(3, 2, 5, 8, device=device)
    d_mask = torch.rand(3, 2, 5, device=device) > 0.3
    d_mask[..., 0] = True
    d_mask[1, 1] = False
    empty = -1e9 if score is st.colbert_kd_scores else 0.0
    expected = reference.maxsim(Q, D, None, d_mask).nan_to_num(neginf=empty)
    close(score(Q, D, None, d_mask), expected)
    close(score(list(Q), list(D), documents_mask=d_mask), expected)


@pytest.mark.parametrize("score", [st.maxsim_pairwise, st.colbert_scores_pairwise, pylate.colbert_scores_pairwise])
def test_pairwise_scores_are_the_diagonal(score, device):
    Q, D = ragged(device, (2, 4, 1, 3)), ragged(device)
    expected = one_by_one(Q, D).diagonal()
    close(score(Q, D), expected)
    if score is not pylate.colbert_scores_pairwise:
        (q, q_mask), (d, d_mask) = padded(Q), padded(D)
        close(score(q, d, q_mask, d_mask), expected)
        close(score(Q, D, length_normalize=True), expected / torch.tensor([2, 4, 1, 3], device=device))
        with pytest.raises(ValueError, match="expected 3 documents"):
            score(Q[:3], D)


WRONG_EMBEDDINGS = {  # an item of a list, and the expected error
    "none": (None, TypeError, "expected [L, d] numbers, got NoneType"),
    "words": ("ab", TypeError, "expected [L, d] numbers, got str"),
    "rows of several lengths": ([[1.0, 2.0], [1.0]], ValueError, "expected [L, d], got rows of 1 to 2 numbers"),
    "complex": (
        torch.ones(4, 8, dtype=torch.complex64),
        TypeError,
        "expected [L, d] real numbers, got torch.complex64",
    ),
    "another d": (torch.ones(4, 4), ValueError, "got [4, 4]"),
    "another rank": (torch.ones(1, 4, 8), ValueError, "got [1, 4, 8]"),
}
TAKE_LISTS = {  # functions of queries and documents, and their argument names
    "st.maxsim": (st.maxsim, "a", "b"),
    "st.maxsim_pairwise": (st.maxsim_pairwise, "a", "b"),
    "st.colbert_scores": (st.colbert_scores, "queries", "documents"),
    "st.colbert_scores_pairwise": (st.colbert_scores_pairwise, "queries", "documents"),
    "st.colbert_kd_scores": (st.colbert_kd_scores, "queries", "documents"),
    "st.xtr_scores": (st.xtr_scores, "queries", "documents"),
    "st.xtr_kd_scores": (st.xtr_kd_scores, "queries", "documents"),
    "st.xtr_scores_pairwise": (st.xtr_scores_pairwise, "queries", "documents"),
    "pylate.colbert_scores": (pylate.colbert_scores, "queries", "documents"),
    "pylate.colbert_scores_pairwise": (pylate.colbert_scores_pairwise, "queries", "documents"),
    "pylate.colbert_kd_scores": (pylate.colbert_kd_scores, "queries", "documents"),
    "pylate.ColBERTScores": (pylate.ColBERTScores(), "queries", "documents"),
    "pylate.XTRScores": (pylate.XTRScores(), "queries", "documents"),
    "pylate.XTRKDScores": (pylate.XTRKDScores(), "queries", "documents"),
    "colpali.score_multi_vector": (colpali.score_multi_vector, "qs", "ps"),
    "colpali.maxsim_inbatch": (colpali.maxsim_inbatch, "queries", "documents"),
}


@pytest.mark.parametrize("wrong", WRONG_EMBEDDINGS)
@pytest.mark.parametrize("name", TAKE_LISTS)
def test_errors_name_the_item_of_a_list(name, wrong):
    (score, queries, documents), (item, error, message) = TAKE_LISTS[name], WRONG_EMBEDDINGS[wrong]
    tokens = torch.ones(4, 8)
    groups = not (name.endswith(("maxsim", "multi_vector", "inbatch", "pairwise")) or name == "pylate.colbert_scores")
    right = [torch.ones(2, 4, 8)] * 2 if groups else [tokens] * 2
    if wrong != "another rank" or not groups:
        with pytest.raises(error, match=rf"^{documents}\[1\]: .*{re.escape(message)}"):
            score([tokens] * 2, [right[0], item])
    with pytest.raises(error, match=rf"^{queries}\[1\]: .*{re.escape(message)}"):
        score([tokens, item], right)


@pytest.mark.parametrize("name", TAKE_LISTS)
def test_errors_name_embeddings_that_are_none(name):
    score, queries, documents = TAKE_LISTS[name]
    for named, given in ((queries, (None, torch.ones(2, 2, 4, 8))), (documents, (torch.ones(2, 4, 8), None))):
        with pytest.raises(
            TypeError, match=f"^{named}: expected a tensor, an array or a list of numbers, got NoneType"
        ):
            score(*given)


TAKE_MASKS = {  # the shape of the documents of each function
    **dict.fromkeys((st.colbert_scores, st.colbert_kd_scores, st.xtr_scores, st.xtr_kd_scores), (2, 2, 5, 4)),
    **dict.fromkeys(
        (pylate.ColBERTScores(), pylate.colbert_kd_scores, pylate.XTRScores(), pylate.XTRKDScores()), (2, 2, 5, 4)
    ),
    **dict.fromkeys((pylate.colbert_scores, st.colbert_scores_pairwise, st.xtr_scores_pairwise), (2, 5, 4)),
}


@pytest.mark.parametrize("score", TAKE_MASKS)
def test_masks_of_other_shapes_are_rejected(score):
    """One row for all items is accepted, as in the hosts."""
    Q, D = torch.randn(2, 3, 4), torch.randn(TAKE_MASKS[score])
    for shape in ((), (3,), (2,), (2, 1), (2, 7), (1, 7), (3, 3), (2, 3, 1)):
        for dtype in (torch.bool, torch.float32):
            with pytest.raises(
                ValueError, match=rf"^queries_mask: expected \[2, 3\].*got {re.escape(str(list(shape)))}"
            ):
                score(Q, D, torch.ones(shape, dtype=dtype))
    for shape in ((), (5,), (2, 1), (5, 5), (3, 5), (2, 2, 1), (2, 2, 7), (2, 1, 7), (2, 5, 1), (2, 2, 5, 1)):
        with pytest.raises(ValueError, match=r"^documents_mask: expected "):
            score(Q, D, None, torch.ones(shape))
    if D.dim() == 4:
        with pytest.raises(ValueError, match=r"^documents_mask: expected \[2, 2, 5\].*got \[2, 5\]"):
            score(Q, D, None, torch.ones(2, 5))
    q_mask, d_mask = torch.tensor([[1.0, 0.0, 1.0]]), torch.ones(1, *D.shape[1:-1])
    close(score(Q, D, q_mask, d_mask), score(Q, D, q_mask.expand(2, 3), d_mask.expand(D.shape[:-1])))


# sentence-transformers only.


def test_st_rows_of_zeros_are_padding(device):
    Q, D = ragged(device, (4, 2)), [-t.abs() for t in ragged(device)]
    expected = one_by_one(Q, D)
    close(st.maxsim(padded(Q)[0], padded(D)[0]), expected)
    close(st.mean_maxsim(padded(Q)[0], padded(D)[0]), expected / torch.tensor([[4], [2]], device=device))
    zeros = torch.zeros(1, 3, 8, device=device)
    assert (st.maxsim(padded(Q)[0], zeros) == -1e9).all()
    all_kept = torch.ones(1, 3, device=device)
    close(st.maxsim(padded(Q)[0], zeros, None, all_kept), torch.zeros(2, 1, device=device))


def test_st_one_query_and_one_document(device):
    Q, D = torch.randn(3, 8, device=device), torch.randn(5, 8, device=device)
    mask = torch.tensor([1, 0, 1, 0, 0], device=device)
    expected = (Q @ D[mask.bool()].T).amax(-1).sum().view(1, 1)
    close(st.maxsim(Q, D, b_mask=mask), expected)
    close(st.maxsim_pairwise(Q, D, b_mask=mask), expected[0])


def test_st_empty_lists_give_empty_scores(device):
    D = ragged(device)
    assert st.maxsim([], D).shape == (0, 4) and st.maxsim(D, []).shape == (4, 0)
    assert st.maxsim_pairwise([], []).shape == (0,)
    assert st.maxsim(D, []).device.type == device


@pytest.mark.parametrize("score", [st.maxsim, st.maxsim_pairwise])
def test_st_chunks_do_not_change_scores(score, device):
    Q, D = ragged(device), ragged(device, (9, 1, 4, 30))
    q, (d, d_mask) = Q, padded(D)
    expected = score(Q, D)
    for chunk in (1, 40, 10_000):
        close(score(q, D, chunk_elements=chunk), expected, rtol=0, atol=0)
        close(score(q, D, b_mask=d_mask, chunk_elements=chunk), expected)
    close(score(q, d, chunk_elements=8, device=device), expected)


def test_st_mismatched_masks_raise():
    Q, D = torch.randn(2, 3, 8), torch.randn(3, 5, 8)
    for score in (st.maxsim, partial(st.maxsim_pairwise, torch.randn(3, 3, 8))):
        arguments = (Q, D) if score is st.maxsim else (D,)
        with pytest.raises(ValueError, match=r"b_mask: expected \[3, 5\].*got \[3, 4\]"):
            score(*arguments, b_mask=torch.ones(3, 4))
    with pytest.raises(ValueError, match="a_mask"):
        st.maxsim(Q, D, torch.ones(3, 3))
    with pytest.raises(TypeError, match=r"a_mask: expected a tensor.*got str"):
        st.maxsim(Q, D, "11")
    close(st.maxsim(Q, D, torch.ones(1, 3)), st.maxsim(Q, D))  # one row for all


def test_st_lists_of_masks():
    Q, D = torch.randn(2, 3, 8), ragged("cpu")
    masks = [torch.tensor([1.0, 0.0, 1.0]), torch.ones(1), torch.tensor([0.0, 1, 1, 1, 0]), torch.ones(2)]
    kept = [t[m.bool()] for t, m in zip(D, masks, strict=True)]
    close(st.maxsim(Q, D, b_mask=masks), st.maxsim(Q, kept))


@pytest.mark.gpu
def test_st_scores_are_on_the_device_of_documents():
    Q, D = torch.randn(2, 3, 8), ragged("cpu")
    expected = st.maxsim(Q, D)
    found = st.maxsim(Q.cuda(), D, device="cuda")
    assert found.device.type == "cpu"
    close(found, expected, rtol=1e-5, atol=1e-5)
    assert st.maxsim(Q, [t.cuda() for t in D]).device.type == "cuda"
    assert st.maxsim(Q.cuda(), D).device.type == "cpu"


def test_st_functions_keep_their_public_names():
    """The host writes the names into model cards."""
    for name in st.__all__:
        if name != "Routing":
            assert getattr(st, name).__name__ == name


# colpali-engine only.


def test_colpali_zero_rows_are_scored_as_tokens(device):
    Q, D = torch.rand(2, 3, 8, device=device), -torch.rand(2, 4, 8, device=device)
    D[0, 1] = 0
    scores = colpali.maxsim_inbatch(Q, D)
    close(scores, torch.einsum("qsd,ntd->qnst", Q, D).amax(-1).sum(-1))
    assert (scores[:, 0] == 0).all()
    close(colpali.maxsim_kd(Q, D.expand(2, 2, 4, 8)), scores)


def test_colpali_scores_can_be_modified_in_place(device):
    Q = torch.randn(3, 4, 8, device=device, requires_grad=True)
    D = torch.randn(3, 5, 8, device=device, requires_grad=True)
    scores = colpali.maxsim_inbatch(Q, D)
    expected = torch.autograd.grad(2 * scores.sum(), (Q, D), retain_graph=True)
    scores[scores > -torch.inf] *= 2
    close(torch.autograd.grad(scores.sum(), (Q, D)), expected)
    scores = colpali.maxsim_inbatch(Q, D).detach()
    top = scores.topk(2, dim=1).values
    assert torch.isin(scores.diagonal()[scores.argmax(1) == torch.arange(3, device=device)], top[:, 0]).all()


@pytest.mark.parametrize("batch_size", [1, 3, 128])
def test_colpali_page_scores_match_single_pairs(batch_size, device):
    Q, D = ragged(device, (4, 2, 3)), ragged(device)
    scores = colpali.score_multi_vector(Q, D, batch_size, device=device)
    assert scores.device.type == "cpu" and scores.dtype == torch.float32
    close(scores, one_by_one(Q, D).cpu())
    close(colpali.score_multi_vector(torch.stack([Q[0]] * 2), D, batch_size, device), one_by_one([Q[0]] * 2, D).cpu())
    for name in ("qs", "ps"):
        with pytest.raises(ValueError, match=name):
            colpali.score_multi_vector(*((Q, []) if name == "ps" else ([], D)))
        with pytest.raises(ValueError, match=rf"{name}: expected \[N, L, d\] or a list of \[L, d\], got \[4, 8\]"):
            colpali.score_multi_vector(*((Q, Q[0]) if name == "ps" else (Q[0], D)))
    for batch_size in (0, -1):
        with pytest.raises(ValueError, match=f"score_multi_vector: batch_size: expected 1 or more, got {batch_size}"):
            colpali.score_multi_vector(Q, D, batch_size)


# All adapters.


def test_pylate_backends_by_name():
    Q, D = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    close(pylate.colbert_scores(Q, D, backend="lik"), pylate.colbert_scores(Q, D))
    with pytest.raises(ValueError, match="backend: expected None, 'auto' or 'lik', got 'torch'"):
        pylate.colbert_scores(Q, D, backend="torch")


CALLS = {
    "st.maxsim": lambda Q, D, m: st.maxsim(Q, D, None, m),
    "st.maxsim, zero rows": lambda Q, D, m: st.maxsim(Q, D, length_normalize=True),
    "st.maxsim_pairwise": lambda Q, D, m: st.maxsim_pairwise(Q, D, m[:, :3], m),
    "st.maxsim, lists": lambda Q, D, m: st.mean_maxsim(list(Q), list(D)),
    "st.colbert_scores": lambda Q, D, m: st.colbert_scores(Q, D.unsqueeze(1), None, m.unsqueeze(1)),
    "st.colbert_kd_scores": lambda Q, D, m: st.colbert_kd_scores(Q, D.unsqueeze(1), None, m.unsqueeze(1)),
    "pylate.colbert_scores": lambda Q, D, m: pylate.colbert_scores(Q, D, m[:, :3].float(), m),
    "pylate.colbert_scores_pairwise": lambda Q, D, m: pylate.colbert_scores_pairwise(list(Q), list(D)),
    "pylate.ColBERTScores": lambda Q, D, m: pylate.ColBERTScores()(Q, D.unsqueeze(1), None, m.unsqueeze(1)),
    "st.XTRScores": lambda Q, D, m: st.XTRScores(7)(Q, D.unsqueeze(1), None, m.unsqueeze(1)),
    "st.XTRKDScores": lambda Q, D, m: st.XTRKDScores(7)(Q, D.unsqueeze(1), m[:, :3], m.unsqueeze(1)),
    "pylate.XTRScores": lambda Q, D, m: pylate.XTRScores(7)(Q, D.unsqueeze(1), m[:, :3].float(), m.unsqueeze(1)),
    "colpali.maxsim_inbatch": lambda Q, D, m: colpali.maxsim_inbatch(Q, D),
}


@pytest.mark.parametrize("name", CALLS)
def test_adapters_read_no_tensor_values(name):
    """Tensors without values pass through. Reading a value would raise an error."""
    Q, D, mask = (
        torch.randn(4, 3, 8, requires_grad=True),
        torch.randn(4, 5, 8, requires_grad=True),
        torch.ones(4, 5).bool(),
    )
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (Q, D, mask)]
        scores = CALLS[name](*fakes)
        scores.sum().backward()
    assert scores.shape == CALLS[name](Q, D, mask).shape


@pytest.mark.parametrize("name", [name for name in CALLS if "list" not in name and "pairwise" not in name])
def test_adapters_compile_without_graph_breaks(name):
    torch.compiler.reset()
    Q, D, mask = torch.randn(4, 3, 8), torch.randn(4, 5, 8), torch.rand(4, 5) > 0.3
    compiled = torch.compile(CALLS[name], backend="eager", fullgraph=True)
    close(compiled(Q, D, mask), CALLS[name](Q, D, mask))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_adapters_do_not_synchronize(name):
    Q, D, mask = (
        torch.randn(4, 3, 8, device="cuda"),
        torch.randn(4, 5, 8, device="cuda"),
        torch.ones(4, 5, device="cuda").bool(),
    )
    CALLS[name](Q, D, mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        CALLS[name](Q, D, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_adapters_import_no_host():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['sentence_transformers', 'pylate', 'colpali_engine', 'numpy']));"
        "import lik_ops; assert not any('integrations' in name for name in sys.modules);"
        "from lik_ops.integrations import colpali, pylate, sentence_transformers"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_everything_public_is_documented():
    for adapter in (st, pylate, colpali):
        for name in adapter.__all__:
            assert inspect.getdoc(getattr(adapter, name)), f"{adapter.__name__}.{name}"
