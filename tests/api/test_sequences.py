"""Test lists of tensors and nested tensors in place of padded tensors. They are packed once and score the same."""

from __future__ import annotations

import re

import pytest
import torch

import lik_ops

from ..support.ragged import DEVICES, INF, same_bits

d = 8
Q_LENGTHS, D_LENGTHS = (3, 1, 0, 7), (5, 0, 2, 40, 1)
FORMS = ("list", "tuple", "jagged", "strided", "holes")


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def draw(lengths, device="cpu", shape=(d,), dtype=torch.float32, grad=True):
    return [torch.randn(n, *shape, device=device, dtype=dtype).requires_grad_(grad) for n in lengths]


def jagged(tensors):
    return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)


def with_holes(tensors):
    """Return a jagged tensor with NaN rows between its sequences."""
    filler = tensors[0].new_full((2, *tensors[0].shape[1:]), float("nan"))
    values = torch.cat([part for x in tensors for part in (x, filler)])
    lengths = torch.tensor([x.shape[0] for x in tensors], device=values.device)
    offsets = torch.nn.functional.pad((lengths + 2).cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths=lengths)


def as_form(form, tensors):
    if form == "strided":
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.strided)
    return {"list": list, "tuple": tuple, "jagged": jagged, "holes": with_holes}[form](tensors)


def padded(tensors):
    mask = lik_ops.lengths_to_mask(torch.tensor([x.shape[0] for x in tensors]), max(x.shape[0] for x in tensors))
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), mask.to(tensors[0].device)


def close(actual, expected, device):
    """Assert equal values, bit for bit on a CPU."""
    tolerance = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(actual, expected, **tolerance, equal_nan=True)


def gradients(scores, leaves, retain_graph=True):
    weights = torch.arange(1.0, scores.numel() + 1, device=scores.device).view(scores.shape)
    found = torch.where(scores.isfinite(), scores, 0)
    return torch.autograd.grad((found * weights).sum(), leaves, retain_graph=retain_graph)


@pytest.mark.parametrize("d_form", [*FORMS, "dense", "one"])
@pytest.mark.parametrize("q_form", [*FORMS, "dense", "one"])
@pytest.mark.filterwarnings("ignore:.*[Nn]ested tensor:UserWarning")
def test_scores_argmax_and_gradients_match_padded_tokens(q_form, d_form, device):
    if {q_form, d_form} <= {"dense", "one"}:
        pytest.skip("neither side has lengths")
    q_lengths = {"dense": (4, 4, 4), "one": (6,)}.get(q_form, Q_LENGTHS)
    d_lengths = {"dense": (9, 9), "one": (9,)}.get(d_form, D_LENGTHS)
    queries, documents = draw(q_lengths, device), draw(d_lengths, device)

    def side(form, tensors):
        return torch.stack(tensors) if form == "dense" else tensors[0] if form == "one" else as_form(form, tensors)

    (Q, q_mask), (D, d_mask) = padded(queries), padded(documents)
    Q, q_mask = (Q[0], None) if q_form == "one" else (Q, q_mask)
    D, d_mask = (D[0], None) if d_form == "one" else (D, d_mask)
    scores, argmax = lik_ops.maxsim_with_argmax(side(q_form, queries), side(d_form, documents), normalize=True)
    expected, winners = lik_ops.maxsim_with_argmax(Q, D, q_mask, d_mask, normalize=True)
    close(scores, expected, device)
    close(lik_ops.maxsim(side(q_form, queries), side(d_form, documents), normalize=True), expected, device)
    for again in ({"recompute": True}, {"backward": "unified"}):
        actual = lik_ops.maxsim(side(q_form, queries), side(d_form, documents), normalize=True, **again)
        found = zip(
            gradients(actual, queries + documents),
            gradients(lik_ops.maxsim(Q, D, q_mask, d_mask, normalize=True), queries + documents),
            strict=True,
        )
        for a, e in found:
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
    if isinstance(argmax, torch.Tensor) and not argmax.is_nested:
        assert torch.equal(argmax, winners)
        return
    assert isinstance(argmax, list) != (q_form == "jagged")
    for i, found in enumerate(argmax.unbind() if q_form == "jagged" else argmax):
        assert torch.equal(found, winners[i][..., : q_lengths[i]])


@pytest.mark.parametrize("form", ["list", "jagged"])
def test_packed_functions_accept_lists_and_nested_tensors(form, device):
    queries, documents = draw(Q_LENGTHS, device, grad=False), draw(D_LENGTHS, device, grad=False)
    Q, D = as_form(form, queries), as_form(form, documents)
    (packed_q, cu_q), (packed_d, cu_d) = lik_ops.pack(queries), lik_ops.pack(documents)
    pairs = torch.tensor([[0, 1], [3, 3], [2, 0]], device=device)
    offsets, lengths = (x.expand(4, -1) for x in (cu_d[:-1], cu_d.diff()))
    expected = lik_ops.maxsim_varlen(packed_q, packed_d, cu_q, cu_d)
    same_bits(lik_ops.maxsim_varlen(Q, D), expected)
    same_bits(lik_ops.maxsim_varlen(Q, packed_d, cu_seqlens_d=cu_d), expected)
    same_bits(lik_ops.maxsim_varlen(packed_q, D, cu_q), expected)
    same_bits(lik_ops.maxsim_candidates_varlen(Q, packed_d, offsets, lengths), expected)
    same_bits(lik_ops.maxsim_pair_list(Q, D, pairs), expected[tuple(pairs.T)])
    same_bits(lik_ops.maxsim_pairs(Q, as_form(form, documents[:4])), expected[:, :4].diagonal())
    same_bits(lik_ops.MaxSimScorer()(Q, D), expected)


def test_pairs_of_sequences_have_gradients_without_max_seqlen_q(device):
    for form in ("list", "jagged"):
        queries, documents = draw((3, 1, 7), device), draw((5, 2, 4), device)
        w = draw((3, 1, 7), device, shape=())
        scores = lik_ops.maxsim_pairs(as_form(form, queries), as_form(form, documents), q_weight=lik_ops.pack(w)[0])
        alone = [lik_ops.maxsim(*one[:2], q_weight=one[2]) for one in zip(queries, documents, w, strict=True)]
        torch.testing.assert_close(scores, torch.stack(alone))
        leaves = queries + documents + w
        for a, e in zip(gradients(scores, leaves), gradients(torch.stack(alone), leaves), strict=True):
            torch.testing.assert_close(a, e)
    assert lik_ops.maxsim_pair_list(queries, documents, torch.tensor([[0, 1]], device=device)).requires_grad
    dense = lik_ops.maxsim_pairs(queries, torch.stack([documents[0]] * 3))
    same_bits(dense, lik_ops.maxsim(queries, documents[0]))


def test_list_packed_and_nested_weights_match_padded_weights(device):
    queries, documents, weights = draw(Q_LENGTHS, device), draw(D_LENGTHS, device), draw(Q_LENGTHS, device, shape=())
    (Q, q_mask), (D, d_mask), (w, _) = padded(queries), padded(documents), padded(weights)
    expected = lik_ops.maxsim(Q, D, q_mask, d_mask, q_weight=w)
    values, offsets = lik_ops.pack(queries)
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    nested_weights = torch.nested.nested_tensor_from_jagged(lik_ops.pack(weights)[0], offsets)
    for q, v in ((queries, weights), (queries, lik_ops.pack(weights)[0]), (nested, nested_weights)):
        scores = lik_ops.maxsim(q, documents, q_weight=v)
        close(scores, expected, device)
        for a, e in zip(gradients(scores, weights), gradients(expected, weights), strict=True):
            torch.testing.assert_close(a, e)


def test_masks_are_accepted_for_dense_inputs_only(device):
    queries, documents = draw(Q_LENGTHS, device), draw(D_LENGTHS, device)
    Q = torch.randn(2, 5, d, device=device)
    q_mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0]], device=device)
    Q[q_mask == 0] = INF
    D, d_mask = padded(documents)
    close(lik_ops.maxsim(Q, documents, q_mask), lik_ops.maxsim(Q, D, q_mask, d_mask), device)
    close(lik_ops.maxsim(Q[0], documents, q_mask[0]), lik_ops.maxsim(Q[0], D, q_mask[0], d_mask), device)
    close(lik_ops.maxsim(queries, D, None, d_mask), lik_ops.maxsim(queries, documents), device)
    for call, name in (
        (lambda: lik_ops.maxsim(queries, documents, q_mask), "q_mask"),
        (lambda: lik_ops.maxsim(Q, documents, None, d_mask), "d_mask"),
        (lambda: lik_ops.maxsim_pairs(jagged(queries), jagged(queries), q_mask), "q_mask"),
        (lambda: lik_ops.maxsim_pair_list(queries, D, q_mask, q_mask), "q_mask"),
    ):
        with pytest.raises(ValueError, match=rf"^maxsim\w*: {name}: expected None with a list or nested tensor"):
            call()


def test_jagged_values_are_not_copied():
    values, offsets = torch.randn(6, d), torch.tensor([0, 2, 6], dtype=torch.int32)
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    packed, cu_seqlens = lik_ops.pack(nested)
    assert packed.data_ptr() == values.data_ptr() and cu_seqlens.data_ptr() == offsets.data_ptr()
    expected = lik_ops.maxsim_varlen(values, values, offsets, offsets)
    same_bits(lik_ops.maxsim(nested, nested), expected)


def test_pack_accepts_per_token_tensors_of_any_rank():
    weights = draw((2, 0, 3), shape=())
    packed, cu_seqlens = lik_ops.pack(weights)
    assert packed.shape == (5,) and cu_seqlens.tolist() == [0, 2, 2, 5]
    assert lik_ops.pack(draw((2, 3), shape=(4, 5)))[0].shape == (5, 4, 5)
    assert lik_ops.pack(torch.randn(3, 2, d))[1].tolist() == [0, 2, 4, 6]
    assert lik_ops.pack(x for x in weights)[0].shape == (5,)


@pytest.mark.parametrize("kind", ("dense", "list", "jagged", "strided"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_empty_lists_return_empty_scores(kind, dtype, device):
    Q = torch.randn(2, 3, d, device=device, dtype=dtype, requires_grad=True)
    other = Q if kind == "dense" else as_form(kind, list(Q.unbind()))
    expected = lik_ops.maxsim(Q, Q[:0])
    at = torch.zeros(0, 2, dtype=torch.long, device=device)
    for actual, shape in (
        (lik_ops.maxsim(other, []), (2, 0)),
        (lik_ops.maxsim_varlen(other, ()), (2, 0)),
        (lik_ops.maxsim_with_argmax(other, [])[0], (2, 0)),
        (lik_ops.maxsim([], other), (0, 2)),
        (lik_ops.maxsim([], other, q_weight=[], normalize=True), (0, 2)),
        (lik_ops.maxsim_varlen_with_argmax([], other)[0], (0, 2)),
        (lik_ops.maxsim_candidates_varlen([], Q.flatten(0, 1), at, at), (0, 2)),
        (lik_ops.maxsim_pair_list([], other, at), (0,)),
        (lik_ops.maxsim_pairs([], Q[:0]), (0,)),
    ):
        assert actual.shape == shape
        assert (actual.dtype, actual.device) == (expected.dtype, expected.device)
    assert lik_ops.maxsim_with_argmax([], other)[1] == []
    assert lik_ops.maxsim_with_argmax(list(Q), [])[1][1].shape == (0, 3)
    assert lik_ops.maxsim_with_argmax(Q, [])[1].shape == (2, 0, 3)
    (gradient,) = torch.autograd.grad(lik_ops.maxsim(other, []).sum(), Q)
    assert gradient.shape == Q.shape and not gradient.any()


@pytest.mark.parametrize("form", FORMS)
def test_single_query_drops_the_query_axis(form, device):
    documents = draw(D_LENGTHS, device, grad=False)
    Q = torch.randn(5, d, device=device)
    weight = torch.rand(5, device=device)
    D = as_form(form, documents)
    expected, winners = lik_ops.maxsim_with_argmax(Q, documents, q_weight=weight)
    for actual in (
        lik_ops.maxsim_varlen(Q, D, q_weight=weight),
        lik_ops.maxsim_varlen(Q, *lik_ops.pack(documents)[:1], None, lik_ops.pack(documents)[1], q_weight=weight),
        lik_ops.maxsim_varlen_with_argmax(Q, D, q_weight=weight)[0],
    ):
        close(actual, expected, device)
    assert torch.equal(lik_ops.maxsim_varlen_with_argmax(Q, D, q_weight=weight)[1], winners)


def test_single_query_accepts_1d_candidates(device):
    store, cu_seqlens = lik_ops.pack(draw(D_LENGTHS, device, grad=False))
    Q = torch.randn(5, d, device=device, requires_grad=True)
    offsets, lengths = cu_seqlens[[4, 0, 2]], cu_seqlens.diff()[[4, 0, 2]]
    expected = lik_ops.maxsim_candidates_varlen_with_argmax(Q[None], store, offsets[None], lengths[None])
    actual = lik_ops.maxsim_candidates_varlen_with_argmax(Q, store, offsets, lengths)
    same_bits(actual[0], expected[0][0])
    assert torch.equal(actual[1], expected[1][0])
    same_bits(lik_ops.maxsim_candidates_varlen(Q, store, offsets, lengths), expected[0][0])
    (gradient,), (wanted,) = (torch.autograd.grad(x[0].sum(), Q) for x in (actual, expected))
    same_bits(gradient, wanted)
    with pytest.raises(ValueError, match=re.escape("doc_offsets: expected [K], got [1, 3]")):
        lik_ops.maxsim_candidates_varlen(Q, store, offsets[None], lengths[None])
    with lik_ops.checks(), pytest.raises(ValueError, match=re.escape("got 99 at [1]")):
        lik_ops.maxsim_candidates_varlen(Q, store, offsets.index_fill(0, torch.tensor([1], device=device), 99), lengths)


@pytest.mark.parametrize("form", ("dense", "packed", *FORMS))
def test_huge_max_seqlen_q_gives_the_same_scores(form, device):
    sequences = draw((5, 5, 5), device)
    Q, cu_seqlens = lik_ops.pack(sequences) if form == "packed" else (None, None)
    if Q is None:
        Q = torch.stack(sequences) if form == "dense" else as_form(form, sequences)
    D, pairs = torch.randn(4, 6, d, device=device), torch.tensor([[0, 1], [2, 3]], device=device)

    def call(function, bound):
        return function(Q, D, pairs, cu_seqlens_q=cu_seqlens, max_seqlen_q=bound)

    expected, absurd = (call(lik_ops.maxsim_pair_list, bound) for bound in (5, 2**62))
    same_bits(absurd, expected)
    for actual, wanted in zip(gradients(absurd, sequences), gradients(expected, sequences), strict=True):
        same_bits(actual, wanted)
    (_, narrow), (_, wide) = (call(lik_ops.maxsim_pair_list_with_argmax, bound) for bound in (5, 40))
    assert wide.shape == (2, 40) and (wide[:, 5:] == -1).all()
    assert torch.equal(wide[:, :5], narrow)


def test_errors_name_the_invalid_argument():
    q, x = draw(Q_LENGTHS, grad=False), draw(D_LENGTHS, grad=False)
    cu = torch.tensor([0, 3])
    nested, other = jagged(q), jagged(draw(Q_LENGTHS, shape=(), grad=False))
    for call, error, message in (
        (lambda: lik_ops.maxsim([], []), ValueError, "maxsim: Q: expected at least one tensor, got none"),
        (lambda: lik_ops.maxsim_pairs(q, []), ValueError, "maxsim_pairs: D: expected B = 4 documents, got 0"),
        (lambda: lik_ops.maxsim([], x, q_weight=[x[0]]), ValueError, "q_weight: expected the lengths [] of Q, got"),
        (lambda: lik_ops.maxsim(q, [*x, x[0][0]]), ValueError, "maxsim: D[5]: expected [L, 8], got [8]"),
        (lambda: lik_ops.maxsim(q, [x[0], x[0][:, 1:]]), ValueError, "maxsim: D[1]: expected [L, 8], got [5, 7]"),
        (lambda: lik_ops.maxsim(q, [t[:, 1:] for t in x]), ValueError, "maxsim: D[0]: expected d = 8"),
        (lambda: lik_ops.maxsim(q, [x[0], x[1].half()]), TypeError, "maxsim: D[1]: expected the dtype of the first"),
        (lambda: lik_ops.maxsim(q, [t.half() for t in x]), TypeError, "maxsim: D: expected the dtype of Q"),
        (lambda: lik_ops.maxsim([t.int() for t in q], x), TypeError, "maxsim: Q: expected float16, bfloat16"),
        (lambda: lik_ops.maxsim(q, [x[0], x[1].to("meta")]), ValueError, "maxsim: D[1]: expected the device"),
        (lambda: lik_ops.maxsim(q, [t.to("meta") for t in x]), ValueError, "maxsim: D: expected the device of Q"),
        (lambda: lik_ops.maxsim(q, [x[0], None]), TypeError, "maxsim: D[1]: expected a Tensor, got NoneType"),
        (lambda: lik_ops.maxsim(q, [x, x]), TypeError, "maxsim: D[0]: expected a Tensor, got list"),
        (lambda: lik_ops.maxsim(q, [x[0], nested]), TypeError, "maxsim: D[1]: expected a dense (strided) tensor"),
        (
            lambda: lik_ops.maxsim([t[:, 0] for t in q], x),
            ValueError,
            "maxsim: Q: expected a list of [L, d], got one of [L]",
        ),
        (lambda: lik_ops.maxsim(q, torch.randn(4, 2, 3, d)), ValueError, "maxsim: D: expected [Ld, d] or [Nd, Ld, d]"),
        (lambda: lik_ops.maxsim(q, "text"), TypeError, "maxsim: D: expected a Tensor, got str"),
        (lambda: lik_ops.maxsim(nested.transpose(1, 2), x), ValueError, "maxsim: Q: expected a nested tensor [N, L"),
        (lambda: lik_ops.maxsim_varlen(q, x, cu), ValueError, "maxsim_varlen: cu_seqlens_q: expected None with"),
        (lambda: lik_ops.maxsim_varlen(q, x, None, cu), ValueError, "maxsim_varlen: cu_seqlens_d: expected None"),
        (lambda: lik_ops.maxsim(q, x, q_weight=[t[1:, 0] for t in q]), ValueError, "expected the lengths [3, 1, 0, 7]"),
        (lambda: lik_ops.maxsim(nested, x, q_weight=other), ValueError, "q_weight: expected the offsets of Q, got"),
        (
            lambda: lik_ops.maxsim(q, x, q_weight=torch.rand(10)),
            ValueError,
            "maxsim: q_weight: expected a list like Q, or packed [Tq] = [11]",
        ),
        (lambda: lik_ops.maxsim_pairs(q, x), ValueError, "maxsim_pairs: D: expected B = 4 documents, got 5"),
        (lambda: lik_ops.maxsim_candidates_varlen(q, x, cu, cu), TypeError, "D: expected a Tensor, got list"),
        (lambda: lik_ops.maxsim_padded(q, x, cu, cu), TypeError, "maxsim_padded: Q: expected a Tensor, got list"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            call()
    with pytest.raises(ValueError, match="backward: expected one of"):
        lik_ops.maxsim(q, x, backward="quick")
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda t: lik_ops.maxsim([t], x[:1]).sum())(q[0])


def test_autocast_casts_lists_and_nested_tensors():
    q, x = draw(Q_LENGTHS, grad=False), draw(D_LENGTHS, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        scores = lik_ops.maxsim(q, jagged(x))
    same_bits(scores, lik_ops.maxsim([t.bfloat16() for t in q], [t.bfloat16() for t in x]))


@pytest.mark.parametrize("form", ["list", "tuple", "jagged"])
def test_autocast_casts_lists_with_quantized_documents(form):
    queries, D = draw(Q_LENGTHS, grad=False), lik_ops.quantize(torch.randn(5, 6, d))
    expected = lik_ops.maxsim([x.bfloat16() for x in queries], D)
    assert not torch.equal(expected, lik_ops.maxsim(queries, D))
    weights = [torch.rand(n).bfloat16().float() for n in Q_LENGTHS]
    weighted = lik_ops.maxsim([x.bfloat16() for x in queries], D, q_weight=weights)
    with torch.autocast("cpu", torch.bfloat16):
        same_bits(lik_ops.maxsim(as_form(form, queries), D), expected)
        same_bits(lik_ops.maxsim_with_argmax(as_form(form, queries), D)[0], expected)
        same_bits(lik_ops.maxsim(as_form(form, queries), D, q_weight=torch.cat(weights).bfloat16()), weighted)


@pytest.mark.parametrize("form", ["list", "jagged"])
def test_compiled_scores_and_gradients_match_eager(form):
    torch.compiler.reset()
    compiled = torch.compile(lambda q, x: lik_ops.maxsim(q, x, normalize=True), backend="aot_eager", fullgraph=True)
    for q_lengths, d_lengths in ((Q_LENGTHS, D_LENGTHS), ((2, 2, 9, 5), (1, 6, 0, 3, 3))):
        queries, documents = draw(q_lengths), draw(d_lengths)
        Q, D = as_form(form, queries), as_form(form, documents)
        scores = compiled(Q, D)
        same_bits(scores, lik_ops.maxsim(Q, D, normalize=True))
        for a, e in zip(
            gradients(scores, queries + documents, False),
            gradients(lik_ops.maxsim(queries, documents, normalize=True), queries + documents),
            strict=True,
        ):
            torch.testing.assert_close(a, e)


@pytest.mark.gpu
def test_no_host_synchronization():
    queries, documents = draw(Q_LENGTHS, "cuda"), draw(D_LENGTHS, "cuda")
    nested = jagged(queries)

    def step():
        for q in (queries, nested):
            scores = lik_ops.maxsim(q, documents)
            torch.autograd.grad(scores, queries + documents, torch.zeros_like(scores))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
