"""Test values and gradients of the contrastive loss against the fp64 formula and F.cross_entropy of the scores."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lik_ops
from lik_ops import reference
from lik_ops.core.arguments import score_dtype
from lik_ops.families.loss import ops as loss_ops
from lik_ops.ops.fast_path import eager

from ...support.common import INTERPRETING, PLACES, Problem, assert_near, build, thin_out
from ...support.stack import kept_for_backward

ROOT = Path(__file__).parents[3]
at_places = pytest.mark.parametrize("place", PLACES, ids=str)
SMALL = Problem(values="normal", Nq=3, Nd=4, Lq=5, Ld=9)
EVERYTHING = {"q_mask": "holes", "d_mask": "holes", "weight": True}
PROBLEMS = [
    SMALL,
    replace(SMALL, layout="candidates", normalize=True, **EVERYTHING),
    replace(SMALL, Nq=4, Nd=7, Lq=40, Ld=50, d=20, **EVERYTHING),
    replace(SMALL, layout="candidates", Nq=2, Ld=33, d=130, q_mask="empty_some", d_mask="integer"),
    replace(SMALL, Nq=7, Nd=2, d=130, normalize=True, strides="sliced", weight=True),
    replace(SMALL, Ld=16, strides="transposed", d_mask="empty_some"),
    replace(SMALL, layout="candidates", d_mask="empty_some", **{"q_mask": "prefix"}),
]


class ForwardCallCounter(TorchDispatchMode):
    """Mode that counts calls of the forward operator."""

    losses = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.losses += func is torch.ops.lik.maxsim_cross_entropy_fwd.default
        return func(*args, **(kwargs or {}))


def draw_problem(p, device):
    """Return the tensors of a problem and labels, one of which is ignored."""
    labels = torch.randint(0, p.Nd, (p.Nq,), generator=torch.Generator().manual_seed(p.seed))
    labels[-1] = -100
    return build(p, device), labels.to(device)


def loss_of(function, x, labels, normalize, **options):
    return function(x.Q, x.D, labels, x.q_mask, x.d_mask, q_weight=x.q_weight, normalize=normalize, **options)


def formula(Q, D, labels, q_mask=None, d_mask=None, *, temperature, q_weight=None, normalize=False, **options):
    """Compute the loss from scores. On a GPU, torch would multiply by the reciprocal of a Python number."""
    scores = lik_ops.maxsim(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize)
    return F.cross_entropy(scores / torch.full_like(scores, temperature), labels.long(), **options)


def step(function, x, labels, normalize=False, upstream=None, more=(), **options):
    """Return the loss and the gradients of all leaves."""
    leaves = [t.detach().requires_grad_() for t in x.leaves()]
    y = replace(x, Q=leaves[0], D=leaves[1], q_weight=leaves[2] if len(leaves) > 2 else None)
    loss = loss_of(function, y, labels, normalize, **options)
    grads = torch.autograd.grad(loss, [*leaves, *more], None if upstream is None else upstream.to(loss))
    return loss.detach(), grads


@at_places
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_losses_and_gradients_match_reference(place, number):
    for dtype in place.some_dtypes(number):
        p = replace(PROBLEMS[number], dtype=dtype)
        x, labels = draw_problem(p, place.device)
        upstream = torch.randn(p.Nq)
        options = {"temperature": 0.7, "reduction": "none", "upstream": upstream}
        with place.use():
            losses, grads = step(lik_ops.maxsim_cross_entropy, x, labels, p.normalize, **options)
        expected, expected_grads = step(reference.maxsim_cross_entropy, x.to64(), labels, p.normalize, **options)
        assert losses.dtype == score_dtype(dtype) and losses[-1] == 0
        assert_near(losses, expected, score_dtype(dtype))
        for leaf, g, e in zip(x.leaves(), grads, expected_grads, strict=True):
            assert g.dtype == leaf.dtype
            assert_near(g, e, dtype)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 2])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@at_places
def test_loss_matches_cross_entropy_of_scores(place, reduction, ignore_index, index_dtype):
    x, labels = draw_problem(replace(SMALL, Nq=6, weight=True, normalize=True), place.device)
    labels = labels.clamp(0).to(index_dtype)
    options = {"temperature": 0.02, "reduction": reduction, "ignore_index": ignore_index}
    options["upstream"] = torch.randn(6 if reduction == "none" else ())
    with place.use():
        loss, grads = step(lik_ops.maxsim_cross_entropy, x, labels, True, **options)
        expected, expected_grads = step(formula, x, labels, True, **options)
    torch.testing.assert_close(loss, expected)
    for g, e in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-5 * float(e.abs().max()))


@at_places
@pytest.mark.parametrize("temperature", [1.5, 0.75])
def test_small_losses_of_large_scores_are_not_rounded_away(place, temperature):
    """Near scores of 1,000, a log-sum-exp in one fp32 number is exact to 6e-5, and probabilities near 1 to 6e-8."""
    x = build(replace(SMALL, Nq=8, Nd=8, Lq=32, Ld=32), place.device)
    x.D = F.normalize(x.D, dim=-1).mul(64).round() / 64  # scores are exact
    x.Q = x.D.clone()
    x.Q[..., 0], x.D[..., 0] = 5, 5
    labels = torch.arange(8, device=place.device)
    options = {"temperature": temperature, "upstream": torch.ones(8), "reduction": "none"}
    with place.use():
        losses, grads = step(lik_ops.maxsim_cross_entropy, x, labels, **options)
    expected, expected_grads = step(reference.maxsim_cross_entropy, x.to64(), labels, **options)
    assert (1e-6 if temperature > 1 else 1e-12) < float(expected.min()) < float(expected.max()) < 1e-3
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=0)
    for g, e in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(g.double(), e, rtol=0, atol=1e-4 * float(e.abs().max()))


@pytest.mark.parametrize("layout", ["cross", "candidates"])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradcheck(layout, normalize):
    p = replace(SMALL, layout=layout, dtype=torch.float64, d=4, poison=False, **EVERYTHING)
    x, labels = draw_problem(p, "cpu")
    x.d_mask[..., 0] = True

    def function(Q, D, w, temperature):
        given = {"temperature": temperature, "q_weight": w, "normalize": normalize}
        return lik_ops.maxsim_cross_entropy(Q, D, labels, x.q_mask, x.d_mask, **given)

    leaves = [*x.leaves(), torch.tensor(0.4, dtype=torch.float64)]
    leaves = [t.detach().requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=INTERPRETING)


@at_places
@pytest.mark.parametrize("weight", [False, True])
def test_learned_temperature_matches_reference(place, weight):
    x, labels = draw_problem(replace(SMALL, weight=weight, q_mask="holes", d_mask="prefix", seed=2), place.device)
    tau = torch.tensor(0.3, device=place.device, requires_grad=True)
    tau64 = tau.detach().double().requires_grad_()
    with place.use():
        loss, grads = step(lik_ops.maxsim_cross_entropy, x, labels, True, temperature=tau, more=(tau,))
        same = loss_of(lik_ops.maxsim_cross_entropy, x, labels, True, temperature=0.3)
    expected = step(reference.maxsim_cross_entropy, x.to64(), labels, True, temperature=tau64, more=(tau64,))
    torch.testing.assert_close(loss, same)
    for g, e in zip((loss, *grads), (expected[0], *expected[1]), strict=True):
        assert_near(g, e, torch.float32)


@at_places
@pytest.mark.parametrize(
    ("weight", "value"), thin_out(itertools.product((False, True), (-1.0, -0.0, 0.0, float("-inf"), float("nan"))), 3)
)
def test_invalid_learned_temperature_gives_nan(place, weight, value):
    x, labels = draw_problem(replace(SMALL, weight=weight, seed=2), place.device)
    tau = torch.tensor(value, device=place.device, requires_grad=True)
    with place.use():
        loss, grads = step(lik_ops.maxsim_cross_entropy, x, labels, True, temperature=tau, more=(tau,))
    assert loss.isnan() and grads[-1].isnan()


@at_places
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_a_loss_does_not_depend_on_its_batch(place, number):
    for dtype in place.some_dtypes(number):
        p = replace(PROBLEMS[number], dtype=dtype)
        x, labels = draw_problem(p, place.device)
        own = p.layout == "candidates"
        with place.use():
            tensors = [
                x.Q.contiguous(),
                x.D.contiguous(),
                *(None if m is None else m != 0 for m in (x.q_mask, x.d_mask)),
            ]
            given = *tensors, x.q_weight, labels
            whole = torch.ops.lik.maxsim_cross_entropy_fwd(*given, 0.3, -100, p.normalize)
            for i in range(p.Nq):
                alone = [t if t is None or (n in (1, 3) and not own) else t[i : i + 1] for n, t in enumerate(given)]
                for one, all_ in zip(
                    torch.ops.lik.maxsim_cross_entropy_fwd(*alone, 0.3, -100, p.normalize), whole, strict=True
                ):
                    torch.testing.assert_close(one[0], all_[i], rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(INTERPRETING, reason="too many documents for the interpreter; what it adds is plain torch")
@at_places
@pytest.mark.parametrize("documents", [101, 5003])
def test_losses_over_many_documents_do_not_depend_on_batch(place, documents):
    """The order depends neither on the other queries nor on the address of a row."""
    with place.use():
        for dtype in place.dtypes:
            Q, D = (torch.randn(n, 2, 8).to(place.device, dtype) for n in (9, documents))
            given = Q, D, None, None, None, torch.arange(9, device=place.device)
            whole = torch.ops.lik.maxsim_cross_entropy_fwd(*given, 0.1, -100, False)
            for i in range(9):
                alone = Q[i : i + 1], *given[1:5], given[5][i : i + 1]
                for one, all_ in zip(
                    torch.ops.lik.maxsim_cross_entropy_fwd(*alone, 0.1, -100, False), whole, strict=True
                ):
                    assert torch.equal(one[0], all_[i])


@at_places
@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_parts_do_not_change_losses_or_gradients(place, layout, monkeypatch):
    """Parts of any size give equal bits: no gradient is a sum over parts. Unneeded gradients are not computed."""
    p = replace(SMALL, layout=layout, Nq=5, Nd=6, **EVERYTHING)
    x, labels = draw_problem(p, place.device)
    with place.use():
        expected, expected_grads = step(lik_ops.maxsim_cross_entropy, x, labels, True, temperature=0.3)
        for size in (1, 150, 400):
            monkeypatch.setattr(loss_ops, "_MAX_SCORE_BYTES", size)
            monkeypatch.setattr(loss_ops, "_MAX_PART_BYTES", size)
            eager.clear_call_caches()
            loss, grads = step(lik_ops.maxsim_cross_entropy, x, labels, True, temperature=0.3)
            assert torch.equal(loss, expected)
            for g, e in zip(grads, expected_grads, strict=True):
                assert torch.equal(g, e)
        masks = x.q_mask, x.d_mask
        given = x.Q, x.D, *masks, x.q_weight, labels
        losses, lse = torch.ops.lik.maxsim_cross_entropy_fwd(*given, 0.3, -100, True)
        args = torch.ones_like(losses) / 4, *given, lse, 0.3, -100, True
        for n, e in enumerate(expected_grads):
            found = torch.ops.lik.maxsim_cross_entropy_bwd(*args, [m == n for m in range(3)])
            assert torch.equal(found[n], e)
            assert all(g.shape == (0,) for m, g in enumerate(found) if m != n)


@at_places
@pytest.mark.parametrize(
    ("layout", "reduction"), thin_out(itertools.product(("cross", "candidates"), ("mean", "sum", "none")), 3)
)
def test_fast_path_equals_the_operators(place, layout, reduction):
    """Test with and without labels. Under a mode that must see the operators, the operators are called."""
    p = replace(SMALL, layout=layout, Nq=4, Nd=6, **{**EVERYTHING, "d_mask": "integer"})
    x, labels = draw_problem(p, place.device)
    options = {"temperature": 0.3, "reduction": reduction}
    options["upstream"] = torch.randn(4 if reduction == "none" else ())
    with place.use():
        for given in (labels, None):
            for _ in range(3):
                found, grads = step(lik_ops.maxsim_cross_entropy, x, given, True, **options)
            with ForwardCallCounter() as watching:
                expected, expected_grads = step(lik_ops.maxsim_cross_entropy, x, given, True, **options)
            assert watching.losses == 1
            assert torch.equal(found, expected)
            assert all(torch.equal(g, e) for g, e in zip(grads, expected_grads, strict=True))


@at_places
def test_query_larger_than_a_part_has_the_same_gradients(place, monkeypatch):
    x, labels = build(replace(SMALL, Nq=1), place.device), torch.tensor([2], device=place.device)
    with place.use():
        _, expected = step(lik_ops.maxsim_cross_entropy, x, labels)
        monkeypatch.setattr(loss_ops, "_MAX_PART_BYTES", 1)
        eager.clear_call_caches()
        _, grads = step(lik_ops.maxsim_cross_entropy, x, labels)
    assert all(torch.equal(g, e) and g.any() for g, e in zip(grads, expected, strict=True))


@at_places
def test_out_of_range_labels_give_nan(place):
    """The loss of the query and results that include it are NaN, or an error with checks. Ignored labels are valid."""
    x = build(replace(SMALL, Nq=4), place.device)
    labels = torch.tensor([1, 4, -1, -100], device=place.device)
    with place.use():
        losses, (of_Q, of_D) = step(lik_ops.maxsim_cross_entropy, x, labels, reduction="none", upstream=torch.ones(4))
        right, _ = step(lik_ops.maxsim_cross_entropy, x, labels.clamp(0, 3), reduction="none", upstream=torch.ones(4))
        assert losses.isnan().tolist() == [False, True, True, False]
        assert torch.equal(losses[[0, 3]], torch.stack([right[0], torch.zeros_like(right[0])]))
        assert of_Q.isnan().any(2).all(1).tolist() == [False, True, True, False] and bool(of_D.isnan().any())
        assert not of_Q[3].any()
        message = r"maxsim_cross_entropy: labels: expected a document, 0 <= j < 4, or -100, got 4 at \[1\]"
        with lik_ops.checks(), pytest.raises(ValueError, match=message):
            lik_ops.maxsim_cross_entropy(x.Q, x.D, labels)


@at_places
@pytest.mark.parametrize(
    ("learned", "reduction"), thin_out(itertools.product((False, True), ("mean", "sum", "none")), 3)
)
def test_int32_labels_equal_int64_for_large_ignore_index(place, learned, reduction):
    """torch compares int32 labels modulo 2^32. The result must equal int64 labels, which match nothing here."""
    x = build(replace(SMALL, Nq=4), place.device)
    labels = torch.tensor([1, 0, 3, 2], device=place.device)
    tau = torch.tensor(0.5, device=place.device) if learned else 0.5
    upstream = torch.ones(4 if reduction == "none" else ())
    for ignore_index in (2**32, -(2**63), 2**40, 2**32 + 1):
        options = {"ignore_index": ignore_index, "reduction": reduction, "temperature": tau, "upstream": upstream}
        for function in (lik_ops.maxsim_cross_entropy, reference.maxsim_cross_entropy):
            with place.use():
                found, grads = step(function, x, labels.int(), **options)
                expected, expected_grads = step(function, x, labels, **options)
            assert torch.equal(found, expected)
            assert all(torch.equal(g, e) for g, e in zip(grads, expected_grads, strict=True))
    with lik_ops.checks(), pytest.raises(ValueError, match=r"or 4294967300, got 4 at \[0\]"):
        lik_ops.maxsim_cross_entropy(x.Q, x.D, labels.int() + 3, ignore_index=2**32 + 4)


@at_places
def test_ignored_query_does_not_affect_loss_or_gradients(place):
    x, labels = draw_problem(SMALL, place.device)
    x.Q[-1] = 1e38
    with place.use():
        loss, (of_Q, of_D) = step(lik_ops.maxsim_cross_entropy, x, labels)
        rest = replace(x, Q=x.Q[:-1])
        expected, (of_rest, of_documents) = step(lik_ops.maxsim_cross_entropy, rest, labels[:-1])
    assert torch.equal(loss, expected) and torch.equal(of_Q[:-1], of_rest) and not of_Q[-1].any()
    torch.testing.assert_close(of_D, of_documents)


@at_places
def test_non_finite_scores_affect_only_their_queries(place):
    """Empty negatives add nothing, an empty positive gives an infinite loss, and NaN affects only its queries."""
    x = build(replace(SMALL, Nq=4), place.device)
    x.d_mask = torch.ones(4, 9, dtype=torch.bool, device=place.device)
    x.d_mask[2] = False
    x.D[2] = torch.nan
    labels = torch.arange(4, device=place.device)
    options = {"reduction": "none", "temperature": 0.5, "upstream": torch.ones(4)}
    with place.use():
        losses, (of_Q, of_D) = step(lik_ops.maxsim_cross_entropy, x, labels, **options)
        expected, expected_grads = step(formula, x, labels, **options)
        torch.testing.assert_close(losses, expected)
        assert losses[2] == torch.inf and bool(losses[[0, 1, 3]].isfinite().all()) and not of_D[2].any()
        for g, e in zip((of_Q, of_D), expected_grads, strict=True):
            torch.testing.assert_close(g, e)
        x.Q[1, 0, 0] = torch.nan
        losses, (of_Q, _) = step(lik_ops.maxsim_cross_entropy, x, labels, **options)
        assert losses.isnan().tolist() == [False, True, False, False]
        assert of_Q.isnan().flatten(1).any(1).tolist() == [False, True, False, False]
        x.d_mask[:] = False
        losses, grads = step(lik_ops.maxsim_cross_entropy, x, labels, **options)
        assert bool(losses.isnan().all()) and not any(g.any() for g in grads)


@at_places
@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_empty_inputs_have_zero_gradients(place, layout):
    for Nq, K, Lq, Ld in ((2, 3, 4, 0), (2, 3, 0, 5), (2, 0, 4, 5), (0, 3, 4, 5), (0, 0, 4, 5)):
        Q = torch.randn(Nq, Lq, 8, device=place.device, requires_grad=True)
        D = torch.randn(*((K,) if layout == "cross" else (Nq, K)), Ld, 8, device=place.device, requires_grad=True)
        labels = torch.zeros(Nq, dtype=torch.int64, device=place.device)
        with place.use():
            losses = lik_ops.maxsim_cross_entropy(Q, D, labels, reduction="none")
            mean = lik_ops.maxsim_cross_entropy(Q, D, labels)
            if Nq and not Lq:
                torch.testing.assert_close(losses, torch.full_like(losses, 3).log())
            else:  # no document, or documents without tokens; the mean over no queries
                assert losses.shape == (Nq,) and bool(losses.isnan().all()) and bool(mean.isnan())
            grads = torch.autograd.grad(mean, (Q, D))
        assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, (Q, D), strict=True))
    every = torch.full((3,), -100, device=place.device)
    with place.use():
        loss = lik_ops.maxsim_cross_entropy(torch.randn(3, 4, 8), torch.randn(3, 4, 8), every.cpu())
    assert bool(loss.isnan())  # equals F.cross_entropy of ignored queries only


def test_default_labels_are_the_first_documents():
    Q, D = torch.randn(3, 4, 8), torch.randn(5, 6, 8)
    found = lik_ops.maxsim_cross_entropy(Q, D, temperature=0.5)
    assert torch.equal(found, lik_ops.maxsim_cross_entropy(Q, D, torch.arange(3), temperature=0.5))
    D = torch.randn(3, 2, 6, 8)
    expected = lik_ops.maxsim_cross_entropy(Q, D, torch.zeros(3, dtype=torch.int32))
    assert torch.equal(lik_ops.maxsim_cross_entropy(Q, D), expected)


@pytest.mark.parametrize("few", [True, False])
def test_only_small_steps_save_scores_and_argmax(few, monkeypatch):
    """A small step keeps its scores and argmax, and both kinds of steps have the same gradients."""
    Q, D = torch.randn(8, 4, 16, requires_grad=True), torch.randn(300, 10, 16, requires_grad=True)
    if not few:
        monkeypatch.setattr(loss_ops, "_MAX_PART_BYTES", 8 * 300 * 8)
    eager.clear_call_caches()
    loss, kept = kept_for_backward(lik_ops.maxsim_cross_entropy, Q, D)
    others = [t for t in kept if not any(t.data_ptr() == x.data_ptr() for x in (Q, D))]
    # The sum includes the labels and the divisor of the mean.
    assert sum(t.numel() for t in others) == 8 * 3 + 1 + (8 * 300 * (4 + 1) if few else 0)
    first, again = (torch.autograd.grad(loss, (Q, D), retain_graph=True) for _ in range(2))
    recomputed = torch.ops.lik.maxsim_cross_entropy_fwd(Q, D, None, None, None, torch.arange(8), 1.0, -100, False)
    expected = torch.autograd.grad(recomputed[0].sum() / torch.tensor(8), (Q, D))
    for found in (first, again):
        assert all(torch.equal(g, e) for g, e in zip(found, expected, strict=True))


MEMORY = """
import sys, torch, lik_ops
import torch.nn.functional as F

def step(n):
    Q, D = torch.randn(n, 1, 2, requires_grad=True), torch.randn(n, 1, 2, requires_grad=True)
    labels = torch.arange(n)
    if sys.argv[1] == "fused":
        lik_ops.maxsim_cross_entropy(Q, D, labels).backward()
    else:
        F.cross_entropy(lik_ops.maxsim(Q, D), labels).backward()

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

step(64)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is that of what follows
before = peak()
step(3072)
print((peak() - before) // 1024)
"""


def _measure_peak_growth_mib(way):
    run = subprocess.run([sys.executable, "-c", MEMORY, way], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return int(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETING or sys.platform != "linux", reason="of the portable backend, as Linux tells it")
def test_portable_loss_peaks_below_64_mib():
    """With 3,072 queries and documents, scores need 36 MiB, which torch copies, and the argmax needs 18 MiB."""
    assert _measure_peak_growth_mib("fused") < 64
    assert _measure_peak_growth_mib("scores") > 96


WRONG = [
    ({"labels": [0, 1]}, TypeError, "labels: expected a Tensor, got list"),
    ({"labels": torch.zeros(2)}, TypeError, "labels: expected int32 or int64"),
    ({"labels": torch.zeros(3, dtype=torch.long)}, ValueError, r"labels: expected \[Nq\], .*, got \[3\]"),
    ({"labels": torch.zeros(2, dtype=torch.long, device="meta")}, ValueError, "labels: expected the device of Q"),
    ({"D": torch.randn(1, 3, 8)}, ValueError, r"labels: expected \[Nq\] where there are fewer documents"),
    ({"D": torch.randn(3, 8)}, ValueError, r"Q, D: expected \[Nq, Lq, d\]"),
    ({"Q": torch.randn(4, 8)}, ValueError, r"Q, D: expected \[Nq, Lq, d\]"),
    ({"temperature": 0}, ValueError, "temperature: expected a finite number above 0"),
    ({"temperature": torch.ones(2)}, ValueError, "temperature"),
    ({"ignore_index": None}, TypeError, "ignore_index: expected an int"),
    ({"reduction": "max"}, ValueError, "reduction: expected one of mean, sum, none"),
    ({"normalize": 1}, TypeError, "normalize"),
    ({"q_weight": torch.ones(2, 4).half()}, TypeError, "q_weight"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG)
def test_errors_name_the_argument(given, error, message):
    arguments = {"Q": torch.randn(2, 4, 8), "D": torch.randn(5, 3, 8)} | given
    with pytest.raises(error, match=f"maxsim_cross_entropy: {message}"):
        lik_ops.maxsim_cross_entropy(**arguments)
