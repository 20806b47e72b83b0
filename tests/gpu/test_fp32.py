"""Test that fp32 inputs are multiplied as fp32: the terms of a similarity bound its error, for any range."""

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import lik_ops
from lik_ops import reference

from ..support.common import INTERPRETING, PLACES, override_setting

N, d = (40, 128) if not INTERPRETING else (2, 20)
LONG = 150 if not INTERPRETING else 22
EPSILON = 2.0**-24


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def _powers(low: int, high: int, *shape: int) -> Tensor:
    return 2.0 ** torch.randint(low, high + 1, shape).float()


VALUES = {
    "normal": lambda n: _normal(n, d),
    "near the limit of fp16": lambda n: _normal(n, d) * 65504,
    "below the limit of fp16": lambda n: _normal(n, d) * 2.0**-24,
    "rows of different size": lambda n: _normal(n, d) * _powers(-45, 45, n, 1),
    "wide rows": lambda n: _normal(n, d) * _powers(-14, 14, n, d),
    "wider rows": lambda n: _normal(n, d) * _powers(-40, 20, n, d),
    "large and subnormal": lambda n: torch.where(torch.rand(n, d) > 0.5, _normal(n, d) * 2.0**50, 2.0**-130),
    "mostly zeros": lambda n: _normal(n, d) * (torch.rand(n, d) > 0.9),
    "every bit of the significand": lambda n: torch.nextafter(_powers(-6, 6, n, d), torch.tensor(0.0)),
}


PAIRS = [(q, x) for q in VALUES for x in VALUES if not INTERPRETING or q == x or (q, x) == ("normal", "wide rows")]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(("queries", "documents"), PAIRS)
def test_error_is_bounded_by_the_terms_of_a_similarity(place, queries, documents):
    """``|error| <= 2 d epsilon sum_k |q_k x_k|``, twice the bound of any fp32 sum. The mean error is far smaller."""
    Q, D = VALUES[queries](N).to(place.device)[:, None], VALUES[documents](LONG).to(place.device)
    expected = Q[:, 0].double() @ D.double().T
    size = Q[:, 0].double().abs() @ D.double().abs().T
    with place.use():
        scores = lik_ops.maxsim(Q, D[:, None])
    error = (scores.double() - expected).abs()
    assert bool((error <= 2 * d * EPSILON * size + 2.0**-126).all()), float((error / size).nan_to_num().max())
    assert float((error / size)[size > 2.0**-100].nan_to_num().mean()) < 4 * EPSILON
    with place.use():
        highest, argmax = lik_ops.maxsim_with_argmax(Q, D[None])
    bound = 2 * d * EPSILON * size.amax(1) + 2.0**-126
    assert bool(((highest[:, 0].double() - expected.amax(1)).abs() <= bound).all())
    won = expected.gather(1, argmax[:, 0])[:, 0]
    assert bool(((won - expected.amax(1)).abs() <= 2 * bound).all())


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(("queries", "documents"), PAIRS)
def test_error_of_normalized_rows_is_bounded_by_the_terms_of_a_similarity(place, queries, documents):
    """Inverse norms multiply the similarities of split rows and of rows that fp16 terms cannot represent."""
    Q, D = VALUES[queries](N).to(place.device)[:, None], VALUES[documents](LONG).to(place.device)
    q, x = (y / y.norm(dim=-1, keepdim=True).clamp(min=1e-12) for y in (Q[:, 0].double(), D.double()))
    expected, size = q @ x.T, q.abs() @ x.abs().T
    with place.use():
        scores = lik_ops.maxsim(Q, D[:, None], normalize=True)
        highest, argmax = lik_ops.maxsim_with_argmax(Q, D[None], normalize=True)
    assert bool(((scores.double() - expected).abs() <= 3 * d * EPSILON * size + 2.0**-126).all())
    bound = 3 * d * EPSILON * size.amax(1) + 2.0**-126
    assert bool(((highest[:, 0].double() - expected.amax(1)).abs() <= bound).all())
    won = expected.gather(1, argmax[:, 0])[:, 0]
    assert bool(((won - expected.amax(1)).abs() <= 2 * bound).all())


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**60])
def test_cancellation(place, scale):
    """Terms that cancel leave the exact sum of the fp32 numbers, up to the rounding of the terms."""
    half = torch.randn(N, d // 2) * scale
    Q = torch.cat([half, half], 1).to(place.device)[:, None]
    x = torch.randn(LONG, d // 2)
    D = torch.cat([x, -x * (1 + 2.0**-12)], 1).to(place.device)
    expected = Q[:, 0].double() @ D.double().T
    size = Q[:, 0].double().abs() @ D.double().abs().T
    with place.use():
        scores = lik_ops.maxsim(Q, D[:, None])
    assert bool(((scores.double() - expected).abs() <= 2 * d * EPSILON * size).all())


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("with_argmax", [False, True])
def test_infinities_and_nan_match_fp64_products(place, with_argmax):
    values = torch.tensor([0.0, 1.0, -2.5, 1e-30, 1e-44, math.inf, -math.inf, math.nan])
    values = values[[0, 1, 4, 5, 7]] if INTERPRETING else values
    pairs = torch.cartesian_prod(values, values)
    Q, D = torch.zeros(len(pairs), 1, 16), torch.zeros(len(pairs), 1, 16)
    Q[:, 0, [3, 9]], D[:, 0, [3, 9]] = pairs, pairs.flip(1)
    expected = Q[:, 0].double() @ D[:, 0].double().T
    Q, D = Q.to(place.device), D.to(place.device)
    with place.use():
        scores = lik_ops.maxsim_with_argmax(Q, D)[0] if with_argmax else lik_ops.maxsim(Q, D)
    scores = scores.cpu()
    assert torch.equal(scores.isnan(), expected.isnan())
    infinite = expected.isinf()
    assert torch.equal(scores[infinite].double(), expected[infinite])
    finite = expected.isfinite()
    torch.testing.assert_close(scores[finite].double(), expected[finite], rtol=1e-6, atol=1e-37)


def _odd(token: Tensor) -> Tensor:
    """Return the token with a feature too small to share the scale of the others. The queries are zero there."""
    token = token.clone()
    token[..., -1] = 1e-30
    return token


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("odd", [(3,), (20,), (3, 20), (0, LONG - 1), tuple(range(LONG)), ()])
def test_ties_between_tokens_that_are_multiplied_differently(place, odd):
    Q = torch.ones(2, 3, 8)
    Q[..., -1] = 0
    D = torch.zeros(2, LONG, 8)
    D[:, [3, 20]] = 1
    D[:, :, -1] = 0
    D[:, list(odd)] = _odd(D[:, list(odd)])
    with place.use():
        scores, argmax = lik_ops.maxsim_with_argmax(Q.to(place.device), D.to(place.device))
    assert scores.tolist() == [[21.0, 21.0], [21.0, 21.0]]
    assert (argmax == 3).all()


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_special_rows_do_not_change_other_scores(place, normalize):
    """Odd tokens in masked positions, other documents, or other queries do not change the bits of a score."""
    Q, D = torch.randn(4, 5, 24), torch.randn(3, LONG, 24)
    d_mask = torch.rand(3, LONG) > 0.3
    d_mask[:, 7] = True
    with place.use():
        Q, D, d_mask = Q.to(place.device), D.to(place.device), d_mask.to(place.device)
        expected = lik_ops.maxsim(Q, D, None, d_mask, normalize=normalize)
        poisoned = torch.where(d_mask[..., None], D, torch.tensor(math.inf, device=D.device))
        poisoned = torch.where(
            (torch.arange(LONG, device=D.device) % 3 == 0)[:, None] & ~d_mask[..., None], 1e-30, poisoned
        )
        assert torch.equal(lik_ops.maxsim(Q, poisoned, None, d_mask, normalize=normalize), expected)
        Q[2, 1], D[1, 7] = _odd(Q[2, 1]), _odd(D[1, 7])
        scores = lik_ops.maxsim(Q, D, None, d_mask, normalize=normalize)
        for i in range(4):
            for j in range(3):
                alone = lik_ops.maxsim(Q[i : i + 1], D[j : j + 1], None, d_mask[j : j + 1], normalize=normalize)
                assert torch.equal(alone[0, 0], scores[i, j])
                if i != 2 and j != 1:
                    assert torch.equal(scores[i, j], expected[i, j])
    oracle = reference.maxsim(Q.double(), D.double(), None, d_mask, normalize=normalize)
    torch.testing.assert_close(scores.double(), oracle, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("with_argmax", [False, True])
def test_one_query_or_many_give_equal_bits(with_argmax):
    """One query splits tokens in its programs. 64 queries split them first, in parts for this many documents."""
    Q, D = torch.randn(64, 32, 128, device="cuda"), torch.randn(150, 300, 128, device="cuda")
    D[100, 299], D[3, 7] = _odd(D[100, 299]), math.inf
    d_mask = torch.rand(150, 300, device="cuda") > 0.3
    score = lik_ops.maxsim_with_argmax if with_argmax else lambda *a: (lik_ops.maxsim(*a),)
    many = score(Q, D, None, d_mask)
    for i in (0, 63):
        for one, all_ in zip(score(Q[i : i + 1], D, None, d_mask), many, strict=True):
            assert torch.equal(one[0], all_[i])


SETTINGS = """
import lik_ops, torch
from torch.backends.cuda import matmul
from lik_ops.gpu.runtime.arguments import is_tf32_allowed
Q = torch.ones(2, 3, 4)

def check(expected):
    assert is_tf32_allowed(torch.float32) is expected and not is_tf32_allowed(torch.float16)
    lik_ops.maxsim(Q, Q)

check(False)
matmul.allow_tf32 = True
check(True)
torch.set_float32_matmul_precision("highest")
check(False)
torch.set_float32_matmul_precision("high")
check(True)
matmul.fp32_precision = "ieee"
check(False)
matmul.fp32_precision = "tf32"
check(True)
matmul.fp32_precision = "none"
check(False)
torch.backends.fp32_precision = "tf32"
check(True)
"""


@pytest.mark.skipif(INTERPRETING, reason="the same settings")
def test_torch_settings_that_allow_tf32():
    """Run in a separate process, because torch refuses its older settings after a newer one was used."""
    subprocess.run([sys.executable, "-c", SETTINGS], check=True)


TF32_PLACES = PLACES if INTERPRETING else PLACES[1:]  # the portable backend multiplies with torch, on a CPU in fp32


@pytest.mark.parametrize("place", TF32_PLACES, ids=str)
def test_tf32_is_used_only_if_torch_allows_it(place):
    Q, D = (torch.randn(n, 8, 64, device=place.device) for n in (2, 3))
    expected = reference.maxsim(Q.double(), D.double())

    def error():
        with place.use():
            return float((lik_ops.maxsim(Q, D).double() - expected).norm() / expected.norm())

    assert error() < 1e-6
    for setting in (torch.backends.cuda.matmul, torch.backends):
        with override_setting(setting, "fp32_precision", "tf32"):
            assert 1e-5 < error() < 1e-2
    assert error() < 1e-6


@pytest.mark.parametrize("place", TF32_PLACES, ids=str)
@pytest.mark.parametrize("features", [64, 300])
@pytest.mark.parametrize("layout", ["cross", "candidates", "normalize", "winners", "varlen"])
def test_tf32_rounds_to_nearest(place, features, layout):
    """All features have one sign, so truncation would reduce every similarity, by 2^-11 on average."""
    Q, D = (torch.rand(n, L, features, device=place.device) + 1 for n, L in ((3, 8), (5, 40)))
    bounds = torch.arange(6, device=place.device) * 40
    calls = {
        "cross": lambda: lik_ops.maxsim(Q, D),
        "candidates": lambda: lik_ops.maxsim(Q, D.expand(3, 5, 40, features)),
        "normalize": lambda: lik_ops.maxsim(Q, D, normalize=True),
        "winners": lambda: lik_ops.maxsim_with_argmax(Q, D)[0],
        "varlen": lambda: lik_ops.maxsim_varlen(Q, D.flatten(0, 1), None, bounds),
    }
    expected = reference.maxsim(Q.double(), D.double(), normalize=layout == "normalize")
    with place.use(), override_setting(torch.backends.cuda.matmul, "fp32_precision", "tf32"):
        error = (calls[layout]().double() - expected) / expected
    assert 1e-6 < float(error.abs().max()) < 2.0**-11
    assert abs(float(error.mean())) < 2.0**-15


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 320])
def test_tf32_error_is_comparable_to_torch(d):
    """Tokens have unit length, and an einsum with the same setting has a similar error."""
    tokens = (torch.randn(*n, d, device="cuda") for n in ((16, 32), (200, 300)))
    Q, D = (torch.nn.functional.normalize(x, dim=-1) for x in tokens)

    def einsum(Q, D):
        return torch.einsum("qsd,ktd->qkst", Q, D).amax(-1).sum(-1)

    expected = einsum(Q.double(), D.double())
    with override_setting(torch.backends.cuda.matmul, "fp32_precision", "tf32"):
        ours, theirs = (((f(Q, D).double() - expected) / expected) for f in (lik_ops.maxsim, einsum))
    for norm in (lambda x: float(x.abs().max()), lambda x: float(x.square().mean().sqrt())):
        assert 1e-6 < norm(ours) <= 1.2 * norm(theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("q_mask", "d_mask", "q_weight")], ids=["plain", "options"])
@pytest.mark.parametrize(("Nd", "Ld"), [(200, 70), (200, 128), (200, 300), (9, 700)])
@pytest.mark.parametrize("Lq", [20, 64, 100])
@pytest.mark.parametrize("d", [160, 320])
def test_tf32_bits_do_not_depend_on_the_tile(d, Lq, Nd, Ld, options):
    """Many queries and documents have larger tiles than one of each. Few long documents are split."""
    Q, D = (torch.randn(n, L, d, device="cuda") for n, L in ((16, Lq), (Nd, Ld)))
    x = {"q_mask": torch.rand(16, Lq, device="cuda") > 0.3, "d_mask": torch.rand(Nd, Ld, device="cuda") > 0.3}
    x["q_weight"] = torch.rand(16, Lq, device="cuda")
    x = {name: x[name] for name in options}

    def part(i, k):
        return {name: t[k : k + 1] if name == "d_mask" else t[i : i + 1] for name, t in x.items()}

    with override_setting(torch.backends.cuda.matmul, "fp32_precision", "tf32"):
        scores, with_argmax = lik_ops.maxsim(Q, D, **x), lik_ops.maxsim_with_argmax(Q, D, **x)[0]
        assert torch.equal(scores, with_argmax)
        for i, k in ((0, 0), (7, Nd * 2 // 3), (15, Nd - 1)):
            assert torch.equal(scores[i, k], lik_ops.maxsim(Q[i : i + 1], D[k : k + 1], **part(i, k))[0, 0])


@pytest.mark.parametrize("place", TF32_PLACES, ids=str)
def test_tf32_keeps_nan_and_infinity(place):
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7F800000], dtype=torch.int32).view(torch.float32)  # NaN, inf
    D = torch.ones(5, 1, 16)
    D[:4, 0, 0] = odd
    D[4] = torch.finfo(torch.float32).max / 64  # rounds up, to a finite number
    with place.use(), override_setting(torch.backends.cuda.matmul, "fp32_precision", "tf32"):
        scores = lik_ops.maxsim(torch.ones(1, 1, 16, device=place.device), D.to(place.device))[0]
    assert bool(scores[:3].isnan().all()) and float(scores[3]) == math.inf and bool(scores[4].isfinite())
