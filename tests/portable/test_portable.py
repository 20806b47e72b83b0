"""Test guarantees of the portable backend beyond the contract of all backends.

The tests cover scores, argmax, and gradients against the fp64 reference, batch invariance of bits, and memory.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lik_ops import reference
from lik_ops.portable import backend as portable
from lik_ops.portable.backward import dense as portable_backward
from lik_ops.portable.blocks import MAX_ROWS, MIN_ROWS, SHARED_ROWS
from lik_ops.portable.forward import scores as portable_scores
from lik_ops.portable.forward.scores import reduce_maxima

MiB = 1 << 20
WORKSPACE = 32 * MiB
NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BACKWARDS = (portable.backward_lowmem, portable.backward_unified)
# Nq, Nd (or K), Lq, Ld, d: lengths around the slice limits, odd lengths, several panels, several tiles.
SHORT = ((1, 1, 1, 1, 1), (3, 5, 7, 10, 16), (5, 9, 1, 1, 8), (2, 3, 32, MIN_ROWS - 1, 33), (2, 3, 33, MIN_ROWS, 128))
LONG = ((7, 2, 64, 65, 96), (2, 2, 129, 300, 7), (1, 3, 300, MAX_ROWS + 1, 12), (4, 2, 5, 2 * MAX_ROWS + 77, 3))
SHAPES = (*SHORT, (1, 7, 31, SHARED_ROWS, 48), *LONG)


def get_compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def integers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return small integers, whose similarities are exact in every dtype and often equal."""
    return torch.randint(-2, 3, shape).to(dtype)


class Problem:
    """Arguments of one call in the layouts of `lik_ops.backends`, with masked tokens poisoned."""

    def __init__(
        self, shape, layout="cross", dtype=torch.float32, masks=False, weight=False, normalize=False, exact=False
    ):
        Nq, Nd, Lq, Ld, d = shape
        draw = integers if exact else lambda size, dtype: torch.randn(size, dtype=torch.float64).to(dtype)
        self.Q = draw((Nq, Lq, d), dtype)
        self.D = draw((Nd, Ld, d) if layout == "cross" else (Nq, Nd, Ld, d), dtype)
        self.layout, self.normalize = layout, normalize
        self.q_mask = torch.rand(self.Q.shape[:-1]) < 0.7 if masks else None
        self.d_mask = torch.rand(self.D.shape[:-1]) < 0.6 if masks else None
        self.q_weight = torch.randn(Nq, Lq, dtype=get_compute_dtype(dtype)) if weight else None
        if masks:
            if Ld:
                self.d_mask.view(-1, Ld)[::3] = False
            self.Q[~self.q_mask], self.D[~self.d_mask] = NAN, INF
            self.D[..., : Ld // 2, :][~self.d_mask[..., : Ld // 2]] = NAN
            if weight:
                self.q_weight[~self.q_mask] = NAN

    def tensors(self):
        return self.Q, self.D, self.q_mask, self.d_mask, self.q_weight

    def forward(self, argmax_dtype=torch.int32):
        return portable.forward(*self.tensors(), self.normalize, argmax_dtype)

    def query_major(self, argmax: Tensor) -> Tensor:
        return argmax.permute(1, 0, 2) if self.layout == "cross" else argmax

    def backward(self, function, grad_scores, argmax, needs=(True, True, True)):
        Q, D, q_mask, d_mask, q_weight = self.tensors()
        return function(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, self.normalize, list(needs))

    def oracle(self):
        Q, D, q_mask, d_mask, q_weight = self.tensors()
        q_weight = None if q_weight is None else q_weight.double()
        return reference.maxsim_with_argmax(
            Q.double(), D.double(), q_mask, d_mask, q_weight=q_weight, normalize=self.normalize
        )

    def oracle_gradients(self, grad_scores: Tensor, argmax: Tensor):
        """Return fp64 gradients for the given argmax."""
        Q, D = self.Q.double().requires_grad_(), self.D.double().requires_grad_()
        weight = torch.ones(self.Q.shape[:2]).double() if self.q_weight is None else self.q_weight.double()
        weight.requires_grad_()
        scores = reference.maxsim_at(Q, D, self.query_major(argmax), q_weight=weight, normalize=self.normalize)
        return torch.autograd.grad(scores, (Q, D, weight), grad_scores.double(), materialize_grads=True)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def same_bits(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["cross", "candidates"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_values_give_exact_scores_and_first_argmax(shape, layout, dtype):
    for masks, weight in itertools.product((False, True), (False, True)):
        p = Problem(shape, layout, dtype, masks=masks, weight=weight, exact=True)
        scores, argmax = p.forward()
        expected, winner = p.oracle()
        assert scores.dtype == get_compute_dtype(dtype)
        close(scores, expected, 1e-5 if weight else 0)
        same_bits(p.query_major(argmax).long(), winner)
        same_bits(p.forward(None)[0], scores)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_scores_are_as_exact_as_their_dtype(layout, dtype, normalize):
    for shape in SHAPES:
        p = Problem(shape, layout, dtype, masks=True, normalize=normalize)
        close(p.forward(None)[0], p.oracle()[0], 1e-11 if dtype == torch.float64 else 1e-4)


def test_normalization_clamps_tiny_norms_like_torch():
    p = Problem((2, 3, 5, 40, 6), normalize=True, dtype=torch.float64)
    p.Q[0, 0], p.Q[0, 1], p.D[1] = 0, 1e-14, 1e-13 * p.D[1]
    scores, argmax = p.forward()
    close(scores, p.oracle()[0], 1e-12)
    g = torch.randn(2, 3, dtype=torch.float64)
    for function in BACKWARDS:
        for actual, expected in zip(p.backward(function, g, argmax), p.oracle_gradients(g, argmax), strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("argmax_dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_argmax_has_requested_dtype_and_is_not_modified(argmax_dtype):
    p = Problem((3, 4, 5, 30, 8))
    argmax = p.forward(argmax_dtype)[1]
    assert argmax.dtype == argmax_dtype and argmax.shape == (4, 3, 5)
    kept = argmax.clone()
    for function in BACKWARDS:
        p.backward(function, torch.ones(3, 4), argmax)
        same_bits(argmax, kept)
    assert p.forward(None)[1].shape == (0,)


@pytest.mark.parametrize("layout", ["cross", "candidates"])
@pytest.mark.parametrize("zero", range(4))
def test_no_queries_documents_or_tokens(zero, layout):
    shape = [3, 4, 5, 6, 8]
    shape[zero] = 0
    for masks in (False, True):
        p = Problem(tuple(shape), layout, masks=masks, weight=True)
        scores, argmax = p.forward()
        expected, winner = p.oracle()
        same_bits(scores, expected.float())
        same_bits(p.query_major(argmax).long(), winner)
        for function in BACKWARDS:
            gradients = p.backward(function, torch.full_like(scores, NAN), argmax)
            for gradient, like in zip(gradients, (p.Q, p.D, p.q_weight), strict=True):
                same_bits(gradient, torch.zeros_like(like))


@pytest.mark.parametrize("Ld", [5, 30, 300, 2 * MAX_ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nan_and_infinite_similarities(Ld, dtype):
    p = Problem((4, 6, 35, Ld, 4), dtype=dtype)
    p.D[0, [Ld // 2, Ld - 1]] = NAN  # the first of two
    p.Q[1, 3] = NAN
    p.Q[2], p.D[1] = 1, -INF  # nothing but -inf
    p.Q[3], p.D[2, Ld // 3], p.D[3, Ld - 2] = 1, INF, -INF
    scores, argmax = p.forward()
    expected, winner = p.oracle()
    close(scores, expected, 1e-4)
    same_bits(p.query_major(argmax).long()[:, :, :3], winner[:, :, :3])
    assert argmax[0, 0].eq(Ld // 2).all() and argmax[2, 3].eq(Ld // 3).all()
    p.d_mask = torch.ones(6, Ld, dtype=torch.bool)
    p.d_mask[:, : Ld // 4] = False
    scores, argmax = p.forward()
    close(scores, p.oracle()[0], 1e-4)
    assert argmax[1, 2].eq(Ld // 4).all()  # all -inf: the first kept token


def test_argmax_is_the_first_maximum():
    for rows, tokens, columns in ((64, 64, 32), (64, 7, 32), (300, 300, 64), (33, 33, 96)):
        for special in (None, NAN, INF, -INF):
            S = torch.randint(-3, 3, (3, rows, columns)).float()
            if special is not None:
                S[torch.rand(S.shape) < 0.1] = special
                S[1] = special
            value, index = reduce_maxima(S, tokens)
            groups = S[:, : rows // tokens * tokens].unflatten(1, (-1, tokens))
            same_bits(value, groups.amax(2))
            same_bits(index, groups.max(2).indices)


# Batch invariance of bits.

SHARED = ((7, 1, 16), (1, 10, 128), (32, 23, 48), (3, 5, 1))
INVARIANCE = (*SHARED, (32, 300, 128), (33, 24, 100), (40, 77, 768), (130, 1100, 8), (64, 25, 7))


@pytest.mark.parametrize("single", [False, True], ids=["sums", "single tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("Lq, Ld, d", INVARIANCE)
def test_bits_do_not_depend_on_the_batch(Lq, Ld, d, dtype, single):
    """A single token maximum is also batch invariant. A sum could round a difference away."""
    Nq, Nd = 7, 23
    p = Problem((Nq, Nd, Lq, Ld, d), dtype=dtype)
    if single:
        p.q_mask = torch.zeros(Nq, Lq, dtype=torch.bool)
        p.q_mask[range(Nq), [-1 - i % Lq for i in range(Nq)]] = True
    scores, argmax = p.forward()

    def score(D, queries=slice(None)):
        q_mask = None if p.q_mask is None else p.q_mask[queries]
        scores, argmax = portable.forward(p.Q[queries], D, q_mask, None, None, False, torch.int32)
        same_bits(portable.forward(p.Q[queries], D, q_mask, None, None, False, None)[0], scores)
        return scores, argmax

    queries, documents = torch.randperm(Nq), torch.randperm(Nd)
    permuted, permuted_argmax = score(p.D[documents], queries)
    same_bits(permuted, scores[queries][:, documents])
    same_bits(permuted_argmax, argmax[documents][:, queries])
    for first, last in ((0, 1), (0, 2), (1, 4), (5, 23), (22, 23)):
        same_bits(score(p.D[first:last])[0], scores[:, first:last])
        same_bits(score(p.D[first:last], slice(3, 4))[0], scores[3:4, first:last])
        same_bits(score(p.D[first:last], slice(6, None))[1], argmax[first:last, 6:])
    same_bits(score(p.D.expand(2, -1, -1, -1).flatten(0, 1))[0], scores.repeat(1, 2))
    # The same pairs as candidates, few and many for each query.
    for K in (1, 2, 5, Nd):
        candidates = torch.stack([torch.randperm(Nd)[:K] for _ in range(Nq)])
        got, got_argmax = score(p.D[candidates])
        same_bits(got, scores.gather(1, candidates))
        same_bits(got_argmax, argmax.permute(1, 0, 2).gather(1, candidates[..., None].expand(-1, -1, Lq)))


def test_bits_do_not_depend_on_other_documents_or_masks():
    p = Problem((3, 50, 20, 40, 64), normalize=True)
    scores = p.forward(None)[0]
    p.D[:25], p.D[26:] = NAN, INF
    same_bits(p.forward(None)[0][:, 25], scores[:, 25])
    p.d_mask = torch.rand(50, 40) < 0.5
    p.d_mask[25] = True
    same_bits(p.forward(None)[0][:, 25], scores[:, 25])


@pytest.mark.parametrize("Lq, Ld, d", [(32, 300, 128), (5, 9, 16)])
def test_bits_do_not_depend_on_strides(Lq, Ld, d):
    p = Problem((6, 40, Lq, Ld, d), masks=True, weight=True, normalize=True)
    scores, argmax = p.forward()
    g = torch.randn(40, 6).t()
    gradients = p.backward(portable.backward_lowmem, g, argmax)
    p.Q = p.Q.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    p.D = torch.cat([p.D, p.D], -1)[..., :d]
    p.d_mask = p.d_mask.t().contiguous().t()
    p.q_mask = torch.stack([p.q_mask] * 2, -1)[..., 0]
    strided = p.forward()
    same_bits(strided[0], scores)
    same_bits(strided[1], argmax)
    for actual, expected in zip(p.backward(portable.backward_lowmem, g.contiguous(), argmax), gradients, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("Ld", [10, 33, 300, MAX_ROWS + 100])
def test_equal_tokens_tie(Ld, dtype):
    p = Problem((4, 6, 33, Ld, 50), dtype=dtype)
    half = Ld // 2
    p.D[:, Ld - half :] = p.D[:, :half]
    argmax = p.forward()[1]
    assert argmax.lt(Ld - half).all()


# Devices other than the CPU. Reading a value would wait for the device.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_forward_and_backward_run_on_meta_tensors(layout, dtype):
    """Meta tensors have no values, so reading one raises an error."""
    for masks, normalize in itertools.product((False, True), (False, True)):
        p = Problem((5, 7, 20, 40, 16), layout, dtype, masks=masks, weight=masks, normalize=normalize)
        for name, value in vars(p).items():
            if isinstance(value, Tensor):
                setattr(p, name, value.to("meta"))
        scores, argmax = p.forward(torch.int16)
        assert scores.shape == (5, 7) and argmax.dtype == torch.int16
        for function in BACKWARDS:
            gradients = p.backward(function, torch.empty_like(scores), argmax)
            assert [x.shape for x in gradients] == [p.Q.shape, p.D.shape, p.Q.shape[:2]]


@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_results_do_not_depend_on_host_reads(layout, monkeypatch):
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.float64)):
        p = Problem(shape, layout, dtype, masks=True, weight=True, normalize=True)
        scores, argmax = p.forward()
        g = torch.randn_like(scores)
        expected = [p.backward(function, g, argmax) for function in BACKWARDS]
        with monkeypatch.context() as patch:
            for module in (portable_scores, portable_backward):
                patch.setattr(module, "is_host_readable", lambda x: False)
            blind, blind_argmax = p.forward()
            actual = [p.backward(function, g, argmax) for function in BACKWARDS]
        same_bits(blind, scores)
        same_bits(blind_argmax, argmax)
        for x, y in zip(itertools.chain(*actual), itertools.chain(*expected), strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


# Gradients.


@pytest.mark.parametrize("function", BACKWARDS)
@pytest.mark.parametrize("layout", ["cross", "candidates"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_match_autograd_of_the_reference(dtype, layout, function):
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for shape, plain, normalize in itertools.product(SHAPES, (True, False), (False, True)):
        p = Problem(shape, layout, dtype, masks=not plain, weight=not plain, normalize=normalize)
        scores, argmax = p.forward()
        g = torch.randn_like(scores)
        expected = p.oracle_gradients(g, argmax)
        # A pair without an argmax has no gradient, for any upstream value.
        g = torch.where(p.query_major(argmax).ge(0).any(-1), g, NAN)
        actual = p.backward(function, g, argmax)
        assert [x.dtype for x in actual] == [dtype, dtype, get_compute_dtype(dtype)]
        for name, x, y in zip("QDw", actual, expected, strict=True):
            scale = max(1.0, y.abs().max().item())  # sums of many terms of either sign
            close(x / scale, y / scale, tolerance if name != "w" else min(tolerance, 1e-5))


@pytest.mark.parametrize("function", BACKWARDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_gradients_are_the_fp32_gradients_rounded_once(dtype, function):
    for layout, normalize, masks in itertools.product(("cross", "candidates"), (False, True), (False, True)):
        p = Problem((40, 6, 32, 20, 64), layout, dtype, masks=masks, normalize=normalize)
        _, argmax = p.forward()
        for scale in (1e-9, 1.0, 1e5) if dtype == torch.bfloat16 else (1.0,):
            g = scale * torch.randn(40, 6)
            half = p.backward(function, g, argmax)
            wide = Problem.__new__(Problem)
            wide.__dict__.update(p.__dict__, Q=p.Q.float(), D=p.D.float())
            for x, y in zip(half[:2], wide.backward(function, g, argmax)[:2], strict=True):
                # fp32 sums may use another order, so results may rarely differ by one unit in the last place.
                same = x == y.to(dtype)
                assert same.float().mean() > 0.99
                torch.testing.assert_close(x, y.to(dtype), atol=0, rtol=torch.finfo(dtype).eps)


def test_lowmem_gradients_are_reproducible_and_zero_without_argmax():
    p = Problem((30, 40, 32, 70, 32), masks=True, weight=True)
    _, argmax = p.forward(torch.int16)
    g = torch.randn(30, 40)
    first = p.backward(portable.backward_lowmem, g, argmax)
    for _ in range(3):
        for x, y in zip(p.backward(portable.backward_lowmem, g, argmax), first, strict=True):
            assert torch.equal(x.view(torch.int32), y.view(torch.int32))
    grad_D = first[1]
    won = torch.zeros(40, 71, dtype=torch.bool)
    won.scatter_(1, argmax.flatten(1).long() % 71, True)  # -1 is written to the extra column
    assert grad_D[~won[:, :70]].eq(0).all() and grad_D[won[:, :70]].ne(0).any(-1).all()
    assert first[0][~p.q_mask].eq(0).all() and first[2][~p.q_mask].eq(0).all()


@pytest.mark.parametrize("function", BACKWARDS)
@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_only_requested_gradients_are_computed(layout, function):
    p = Problem((3, 4, 5, 60, 8), layout, masks=True, weight=True, normalize=True)
    scores, argmax = p.forward()
    g = torch.randn_like(scores)
    everything = p.backward(function, g, argmax)
    for needs in itertools.product((False, True), repeat=3):
        for needed, x, y in zip(needs, p.backward(function, g, argmax, needs), everything, strict=True):
            same_bits(x, y if needed else y.new_empty(0))


def test_upstream_gradients_may_be_expanded_and_extreme():
    p = Problem((3, 4, 5, 60, 8))
    _, argmax = p.forward()
    for value in (1e-30, 1e30):
        g = torch.tensor(value).expand(3, 4)
        for function in BACKWARDS:
            for x, y in zip(p.backward(function, g, argmax), p.oracle_gradients(g, argmax), strict=True):
                torch.testing.assert_close(x.double() / value, y / value, atol=1e-5, rtol=1e-5)


# Memory.


def peak_bytes(function) -> int:
    """Return the peak allocation while `function` runs, outputs included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function()
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    del result
    assert peak > 0
    return peak


def test_the_peak_is_measured():
    assert 12 * MiB <= peak_bytes(lambda: torch.empty(8 * MiB, dtype=torch.uint8).add(1)[: 4 * MiB].clone()) < 21 * MiB


# Long and wide queries, many short documents, pairs, long documents, wide tokens, everything small.
LARGE_SHAPES = (
    pytest.param("cross", (1, 2, 8192, 40, 4096), marks=pytest.mark.slow),
    ("cross", (500, 2000, 4, 3, 2)),
    ("cross", (3, 4000, 32, 40, 16)),
    ("candidates", (3000, 1, 32, 40, 16)),
    ("candidates", (300, 3, 300, 20, 64)),
    ("cross", (2, 3, 20, 20000, 128)),
    ("cross", (2, 2, 40, 50, 65536)),
    pytest.param("candidates", (2, 2, 40, 70, 65536), marks=pytest.mark.slow),
    ("cross", (1, 2, 100000, 2, 8)),
)


@pytest.mark.parametrize("layout, shape", LARGE_SHAPES, ids=str)
def test_the_workspace_is_bounded(layout, shape):
    for dtype, extras in ((torch.bfloat16, True), (torch.float32, False)):
        p = Problem(shape, layout, dtype)
        if extras:
            p.d_mask, p.q_mask = torch.rand(p.D.shape[:-1]) < 0.9, torch.rand(p.Q.shape[:-1]) < 0.9
            p.normalize, p.q_weight = True, torch.rand(p.Q.shape[:-1])
        scores, argmax = p.forward()
        outputs = scores.nbytes + argmax.nbytes
        assert peak_bytes(p.forward) < outputs + WORKSPACE
        g = torch.randn_like(scores)
        gradients = p.backward(portable.backward_lowmem, g, argmax)
        outputs = sum(x.nbytes for x in gradients)
        assert peak_bytes(lambda p=p, g=g, a=argmax: p.backward(portable.backward_lowmem, g, a)) < outputs + WORKSPACE


def test_training_step_memory_is_bounded():
    p = Problem((256, 256, 32, 300, 128))

    def step():
        scores, argmax = p.forward(torch.int16)
        return p.backward(portable.backward_lowmem, torch.ones_like(scores), argmax, (True, True, False))

    needed = p.Q.nbytes + p.D.nbytes + 2 * 256 * 256 * 32
    assert peak_bytes(step) < 1.3 * needed + WORKSPACE


def test_10_gigabytes_of_similarities_are_never_allocated():
    Nq, Nd, Lq, Ld, d = 160, 250, 64, 1000, 2
    assert 4 * Nq * Nd * Lq * Ld > 10e9
    p = Problem((Nq, Nd, Lq, Ld, d))
    assert peak_bytes(lambda: p.forward(None)) < 4 * Nq * Nd + WORKSPACE
    p.Q, p.D = p.Q[:2], p.D[:2]
    close(p.forward(None)[0], p.oracle()[0], 1e-4)


def test_a_frozen_side_costs_nothing():
    p = Problem((4, 600, 32, 300, 64))
    scores, argmax = p.forward(torch.int16)
    g = torch.randn_like(scores)
    assert p.D.nbytes > 40 * MiB
    for function in BACKWARDS:
        assert peak_bytes(lambda f=function: p.backward(f, g, argmax, (True, False, True))) < WORKSPACE
