"""Test query gradients over many documents, which are sums over parts of the documents."""

import pytest
import torch

from ...support.common import (
    CUDA,
    INTERPRETER,
    INTERPRETING,
    Problem,
    assert_gradients,
    build,
    expected_gradients,
    run,
    score,
)

pytest.importorskip("triton", reason="these are kernels in Triton")
import lik_ops
from lik_ops.gpu import backend
from lik_ops.gpu.backward import call

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
on_places = pytest.mark.parametrize("place", PLACES, ids=str)


@pytest.fixture(autouse=True)
def few_documents_of_a_part(monkeypatch):
    """Let small problems have several parts, each of its own program."""
    monkeypatch.setattr(call, "_MIN_DOCUMENTS", 9)
    monkeypatch.setattr(call, "_PART_DOCUMENTS", 3)
    monkeypatch.setattr(call, "_FULL_SM", 10**6)
    backend.forget()
    yield
    backend.forget()


def gradients(p, x, upstream, **options):
    leaves = [t.detach().requires_grad_() for t in x.leaves()]
    inputs = type(x)(leaves[0], leaves[1], x.q_mask, x.d_mask, leaves[2] if len(leaves) > 2 else None)
    return torch.autograd.grad(score(p, inputs, backward="lowmem", **options), leaves, upstream)


@on_places
@pytest.mark.parametrize("layout", ["cross", "candidates"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("d", [16, 300])
def test_gradients_match_formulas(place, layout, normalize, d):
    """The last part has fewer documents, and masks leave some query tokens without an argmax."""
    for dtype in place.some_dtypes(normalize + (d > 16)):
        if dtype == torch.float64:
            continue  # no kernels
        p = Problem(layout, 2, 11, 9, 5, d, dtype, "holes", "holes", True, normalize, "normal")
        x = build(p, place.device)
        with place.use():
            scores, argmax = run(p, x)
            upstream = torch.randn_like(scores)
            found = gradients(p, x, upstream)
        assert_gradients(p, x, list(found), expected_gradients(p, x, argmax, upstream))


@on_places
def test_parts_change_only_the_order_of_the_sum(place, monkeypatch):
    p = Problem("cross", 2, 40, 9, 5, 16, torch.float32, values="normal")
    x = build(p, place.device)
    upstream = torch.randn(2, 40, device=place.device)
    with place.use():
        split = gradients(p, x, upstream)
        monkeypatch.setattr(call, "_MIN_DOCUMENTS", 1000)
        backend.forget()
        whole = gradients(p, x, upstream)
    assert not torch.equal(split[0], whole[0]) and torch.equal(split[1], whole[1])
    torch.testing.assert_close(split[0], whole[0], rtol=1e-5, atol=1e-5)


@on_places
@pytest.mark.parametrize("layout", ["cross", "candidates"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("d", [16, 300])
def test_added_and_stored_parts_have_the_same_bits(place, monkeypatch, layout, normalize, d):
    for dtype in place.some_dtypes(normalize + (d > 16)):
        if dtype == torch.float64:
            continue  # no kernels
        p = Problem(layout, 2, 13, 9, 5, d, dtype, "holes", "holes", True, normalize, "normal")
        x = build(p, place.device)
        upstream = torch.randn(2, 13, device=place.device)
        found = []
        with place.use():
            for full in (0, 10**6):
                monkeypatch.setattr(call, "_FULL_SM", full)
                backend.forget()
                found.append(gradients(p, x, upstream))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@on_places
@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_bits_depend_neither_on_other_queries_nor_on_recompute(place, layout):
    p = Problem(layout, 3, 11, 9, 5, 16, torch.float32, "holes", "holes", True, True, "normal")
    x = build(p, place.device)
    upstream = torch.randn(3, 11, device=place.device)
    with place.use():
        whole = gradients(p, x, upstream)
        assert all(torch.equal(a, b) for a, b in zip(whole, gradients(p, x, upstream, recompute=True), strict=True))
        owner = slice(None) if layout == "cross" else slice(1, 2)
        y = type(x)(x.Q[1:2], x.D[owner], x.q_mask[1:2], x.d_mask[owner], x.q_weight[1:2])
        alone = gradients(Problem(**{**p.__dict__, "Nq": 1}), y, upstream[1:2])
    assert torch.equal(alone[0], whole[0][1:2]) and torch.equal(alone[2], whole[2][1:2])


@on_places
def test_tokens_without_an_argmax_in_a_part_are_not_read(place):
    """All documents of the first part are masked and hold NaN."""
    Q, D = torch.randn(2, 9, 16, device=place.device), torch.randn(11, 5, 16, device=place.device)
    mask = torch.ones(11, 5, dtype=torch.bool, device=place.device)
    mask[:4], D[:4] = False, torch.nan
    Q.requires_grad_()
    with place.use():
        scores = lik_ops.maxsim(Q, D, None, mask, backward="lowmem")
        (grad,) = torch.autograd.grad(scores[:, 4:].sum(), Q)
        (expected,) = torch.autograd.grad(lik_ops.maxsim(Q, D[4:], backward="lowmem").sum(), Q)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)


@on_places
def test_documents_that_are_kept_as_int8(place):
    Q, D = torch.randn(2, 9, 16, device=place.device), torch.randn(11, 5, 16, device=place.device)
    Q.requires_grad_()
    with place.use():
        (found,) = torch.autograd.grad(lik_ops.maxsim(Q, D, save="int8", backward="lowmem").sum(), Q)
        (expected,) = torch.autograd.grad(lik_ops.maxsim(Q, D, backward="lowmem").sum(), Q)
    assert float((found - expected).norm() / expected.norm()) < 1e-2


@on_places
def test_chunks_of_rows_share_the_memory_of_the_sums(place, monkeypatch):
    """Each chunk of row tiles is summed on its own, with the same bits."""
    p = Problem("cross", 3, 11, 20, 5, 16, torch.float32, "holes", "holes", True, True, "normal")
    x = build(p, place.device)
    upstream = torch.randn(3, 11, device=place.device)
    with place.use():
        whole = gradients(p, x, upstream)
        monkeypatch.setattr(call, "_MAX_SUM_BYTES", 2 * 8 * 4 * 16 * 4)
        backend.forget()
        chunks = gradients(p, x, upstream)
    assert all(torch.equal(a, b) for a, b in zip(whole, chunks, strict=True))


@on_places
def test_replayed_calls_have_the_bits_of_first_calls(place, monkeypatch):
    """Sums and outputs of later chunks are parts of other tensors."""
    monkeypatch.setattr(call, "_MAX_SUM_BYTES", 3 * 2 * 9 * 16 * 4)
    p = Problem("cross", 3, 11, 9, 5, 16, torch.float32, weight=True, normalize=True, values="normal")
    with place.use():
        for seed in range(4):
            x = build(Problem(**{**p.__dict__, "seed": seed}), place.device)
            upstream = torch.randn(3, 11, device=place.device)
            found = gradients(p, x, upstream)
        backend.forget()
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(p, x, upstream), strict=True))


def test_few_documents_have_no_parts(monkeypatch):
    monkeypatch.undo()
    least = call._MIN_DOCUMENTS

    def split(K):
        up, queries = call.UpstreamArgs(None, 0, 0, None, 1, K, 2, 1), call.QueryArgs(torch.empty(1, 2, 4), *[None] * 9)
        return call.GradientCall(queries, None, up, False, False, 0)._split_documents()

    assert split(least - 1) is None
    for K in (least, 1000, 10**6 + 1):
        count, share = split(K)
        assert 2 <= count <= call._MAX_PARTS
        assert (count - 1) * share < K <= count * share
