"""Shared parts of the behavior tests: places to run, random problems, and the comparison with the fp64 oracle."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lik_ops
from lik_ops import reference

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Place:
    """A device and the backend that computes on it."""

    name: str
    device: str
    backend: str
    dtypes: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        return self.name

    def use(self) -> contextlib.AbstractContextManager:
        """Return a context in which the backend of this place is selected."""
        return lik_ops.use_backend(self.backend)

    def some_dtypes(self, n: int) -> tuple[torch.dtype, ...]:
        """Return all dtypes, or one alternating dtype in the interpreter, which needs minutes instead of seconds."""
        return (self.dtypes[n % len(self.dtypes)],) if self.backend == "triton" else self.dtypes


PORTABLE = Place("portable", "cpu", "portable", (torch.float32, torch.float16, torch.bfloat16, torch.float64))
# Triton's interpreter multiplies bf16 wrongly. It has no fp64 because the kernels have none.
INTERPRETER = Place("interpreter", "cpu", "triton", (torch.float32, torch.float16))
CUDA = Place("cuda", "cuda", "auto", (torch.bfloat16, torch.float16, torch.float32, torch.float64))
PLACES = [INTERPRETER] if INTERPRETING else [PORTABLE, pytest.param(CUDA, marks=pytest.mark.gpu)]
PLACE_IDS = str


@contextlib.contextmanager
def override_setting(owner: object, name: str, value: object) -> Iterator[None]:
    """Change a setting of torch. pytest's `monkeypatch` cannot restore the attributes of `torch.backends`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def thin_out(cases: Iterable, divisor: int, *, applies: bool = INTERPRETING) -> list:
    """Return the cases as parameters of a test. A random 1 / `divisor` of them are fast tests, if it `applies`.

    The interpreter and the compilers need seconds for some cases. A GPU runs all cases, and so does `make test-all`.
    """
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    fast = random.Random(0).sample(range(len(cases)), len(cases) // divisor if applies else len(cases))
    return [pytest.param(*case, marks=[] if n in fast else pytest.mark.slow) for n, case in enumerate(cases)]


@dataclass(frozen=True)
class Problem:
    """One call of `lik_ops.maxsim`, drawn from a seed."""

    layout: str = "cross"  # "cross", "candidates", "pairs", or "flat_q", "flat_d", "flat" (2-D Q, D or both)
    Nq: int = 3
    Nd: int = 4  # documents, or candidates of each query
    Lq: int = 5
    Ld: int = 9
    d: int = 16
    dtype: torch.dtype = torch.float32
    q_mask: str = "none"  # "none", "holes", "prefix", "empty_some", "integer"
    d_mask: str = "none"
    weight: bool = False
    normalize: bool = False
    values: str = "integer"  # "integer" (exact, with many ties), "normal", "negative" (every similarity below 0)
    strides: str = "contiguous"  # "contiguous", "transposed", "sliced", "expanded"
    poison: bool = True  # masked tokens hold NaN and inf
    seed: int = 0

    @property
    def exact(self) -> bool:
        """Return whether every similarity and score is exactly representable."""
        return self.values != "normal" and not self.normalize


@dataclass
class Inputs:
    """Tensors of one call."""

    Q: Tensor
    D: Tensor
    q_mask: Tensor | None
    d_mask: Tensor | None
    q_weight: Tensor | None

    def leaves(self) -> list[Tensor]:
        """Return the tensors that may have a gradient."""
        return [t for t in (self.Q, self.D, self.q_weight) if t is not None]

    def to64(self) -> Inputs:
        """Return the problem for the oracle: fp64 and dense, with masked tokens zeroed so that autograd sees no NaN."""
        Q, D = self.Q.detach().double(), self.D.detach().double()
        Q = Q if self.q_mask is None else torch.where((self.q_mask != 0)[..., None], Q, 0)
        D = D if self.d_mask is None else torch.where((self.d_mask != 0)[..., None], D, 0)
        weight = None if self.q_weight is None else self.q_weight.detach().double()
        if weight is not None and self.q_mask is not None:
            weight = torch.where(self.q_mask != 0, weight, 0)
        return Inputs(Q, D, self.q_mask, self.d_mask, weight)


def _values(p: Problem, shape: tuple[int, ...], generator: torch.Generator, sign: int) -> Tensor:
    if p.values == "normal":
        x = torch.randn(shape, generator=generator)
    elif p.values == "negative":
        x = sign * torch.randint(1, 4, shape, generator=generator).float()
    else:
        x = torch.randint(-2, 3, shape, generator=generator).float()
    return x.to(p.dtype)


def _mask(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "prefix":
        lengths = torch.randint(0, shape[-1] + 1, shape[:-1], generator=generator)
        return torch.arange(shape[-1]) < lengths[..., None]
    mask = torch.rand(shape, generator=generator) > 0.4
    if kind == "empty_some" and mask.numel():
        mask.view(-1, shape[-1])[::2] = False
    if kind == "integer":
        return mask.to(torch.int32) * torch.randint(1, 257, shape, generator=generator)
    return mask


def _poison_masked_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x
    x = x.clone()
    masked = x[mask == 0]
    masked[:] = float("nan")
    masked[::3] = float("inf")
    masked[1::3] = float("-inf")
    x[mask == 0] = masked
    return x


def _change_strides(x: Tensor, kind: str) -> Tensor:
    """Return equal values with other strides."""
    if kind == "transposed":
        return x.transpose(0, -2).contiguous().transpose(0, -2)
    if kind == "sliced":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 7.0, dtype=x.dtype, device=x.device)
        wide[..., : 2 * x.shape[-1] : 2] = x
        return wide[..., : 2 * x.shape[-1] : 2]
    return x


def build(p: Problem, device: str) -> Inputs:
    """Draw the tensors of a problem, without requires_grad."""
    generator = torch.Generator().manual_seed(p.seed)
    q_shape = (p.Lq, p.d) if p.layout in ("flat_q", "flat") else (p.Nq, p.Lq, p.d)
    d_shape = {
        "candidates": (p.Nq, p.Nd, p.Ld, p.d),
        "pairs": (p.Nq, p.Ld, p.d),
        "flat_d": (p.Ld, p.d),
        "flat": (p.Ld, p.d),
    }.get(p.layout, (p.Nd, p.Ld, p.d))
    Q, D = _values(p, q_shape, generator, 1), _values(p, d_shape, generator, -1)
    q_mask, d_mask = _mask(p.q_mask, q_shape[:-1], generator), _mask(p.d_mask, d_shape[:-1], generator)
    weight = None
    if p.weight:
        weight = torch.randint(-2, 4, q_shape[:-1], generator=generator).to(
            torch.float64 if p.dtype == torch.float64 else torch.float32
        )
    if p.strides == "expanded":
        D = D[:1].expand(d_shape)
        d_mask = None if d_mask is None else d_mask[:1].expand(d_shape[:-1])
    if p.poison:
        Q, weight = _poison_masked_tokens(Q, q_mask), None if weight is None else _poison_masked_tokens(weight, q_mask)
        if p.strides == "expanded" and d_mask is not None:
            D = _poison_masked_tokens(D[:1], d_mask[:1]).expand(d_shape)
        else:
            D = _poison_masked_tokens(D, d_mask)
    Q = Q.to(device)
    D = D.to(device) if p.strides != "expanded" else D[:1].to(device).expand(d_shape)
    move = [None if t is None else t.to(device) for t in (q_mask, d_mask, weight)]
    return Inputs(_change_strides(Q, p.strides), _change_strides(D, p.strides), *move)


def run(p: Problem, x: Inputs, **options) -> tuple[Tensor, Tensor]:
    """Return scores and argmax of the operators, shaped [Nq, Nd, ...] as in the public functions."""
    if p.layout == "pairs":
        d_mask = None if x.d_mask is None else x.d_mask[:, None]
        scores, argmax = lik_ops.maxsim_with_argmax(
            x.Q, x.D[:, None], x.q_mask, d_mask, q_weight=x.q_weight, normalize=p.normalize, **options
        )
        return scores[:, 0], argmax[:, 0]
    return lik_ops.maxsim_with_argmax(
        x.Q, x.D, x.q_mask, x.d_mask, q_weight=x.q_weight, normalize=p.normalize, **options
    )


def score(p: Problem, x: Inputs, **options) -> Tensor:
    """Return only the scores, from the public function of the layout."""
    function = lik_ops.maxsim_pairs if p.layout == "pairs" else lik_ops.maxsim
    return function(x.Q, x.D, x.q_mask, x.d_mask, q_weight=x.q_weight, normalize=p.normalize, **options)


def oracle(p: Problem, x: Inputs) -> tuple[Tensor, Tensor]:
    """Return the fp64 reference scores and argmax."""
    y = x.to64()
    if p.layout == "pairs":
        d_mask = None if y.d_mask is None else y.d_mask[:, None]
        scores, argmax = reference.maxsim_with_argmax(
            y.Q, y.D[:, None], y.q_mask, d_mask, q_weight=y.q_weight, normalize=p.normalize
        )
        return scores[:, 0], argmax[:, 0]
    return reference.maxsim_with_argmax(y.Q, y.D, y.q_mask, y.d_mask, q_weight=y.q_weight, normalize=p.normalize)


def scale_of(p: Problem, x: Inputs) -> float:
    """Return a bound on the terms that a score sums, which scales rounding errors."""
    y = x.to64()
    if y.Q.numel() == 0 or y.D.numel() == 0:
        return 1.0
    largest = 1.0 if p.normalize else float(y.Q.norm(dim=-1).max() * y.D.norm(dim=-1).max())
    weight = 1.0 if y.q_weight is None else float(y.q_weight.abs().max())
    return max(largest * max(weight, 1.0) * max(p.Lq, 1), 1e-30)


def rounding(p: Problem) -> float:
    """Return the relative rounding error of an fp32 (fp64) dot product of d terms and a sum of Lq of them."""
    unit = 2.0**-52 if p.dtype == torch.float64 else 2.0**-23
    return unit * (4 + (p.d + p.Lq) ** 0.5)


def assert_scores(p: Problem, x: Inputs, scores: Tensor) -> None:
    """Assert that scores are within the rounding error of the oracle."""
    expected, _ = oracle(p, x)
    assert scores.shape == expected.shape
    assert scores.dtype == (torch.float64 if p.dtype == torch.float64 else torch.float32)
    assert scores.is_contiguous()
    finite = torch.isfinite(expected)
    torch.testing.assert_close(
        scores[~finite].double(), expected[~finite], rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{p}: {m}"
    )
    error = (scores[finite].double() - expected[finite]).abs()
    bound = 0.0 if p.exact else rounding(p) * scale_of(p, x)
    assert error.numel() == 0 or float(error.max()) <= bound, f"{p}: worst error {float(error.max())}, bound {bound}"


# For scores and gradients, relative to the largest of them.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-5, torch.float64: 1e-12}


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, least: float = 1.0) -> None:
    """Assert equal infinities and NaN, and an error relative to the largest number, or to `least` if larger."""
    assert found.shape == expected.shape
    found, expected = found.double().cpu(), expected.double().cpu()
    finite = expected.isfinite()
    largest = max(least, float(expected[finite].abs().max())) if bool(finite.any()) else least
    for those, atol in ((~finite, 0.0), (finite, TOLERANCE[dtype] * largest)):
        torch.testing.assert_close(
            found[those], expected[those], rtol=0, atol=atol, equal_nan=True, msg=lambda m: f"{dtype}: {m}"
        )


def assert_winners(p: Problem, x: Inputs, argmax: Tensor) -> None:
    """Assert the first argmax for exact similarities, else a token whose similarity is within rounding of the best."""
    _, expected = oracle(p, x)
    assert argmax.shape == expected.shape and argmax.dtype == torch.int64
    if p.exact:
        assert torch.equal(argmax, expected), f"{p}: {argmax} is not {expected}"
        return
    assert torch.equal(argmax < 0, expected < 0), f"{p}: winners where there are none, or none where there are"
    at, best = (reference_similarity(p, x, index) for index in (argmax, expected))
    gap = float((best - at).abs().max()) if at.numel() else 0.0
    bound = rounding(p) * scale_of(p, x)
    assert gap <= bound, f"{p}: a winner is {gap} below the best, bound {bound}"


def lifted(p: Problem, x: Inputs, argmax: Tensor) -> tuple[Inputs, Tensor]:
    """Return the problem with all axes: Q [Nq, Lq, d], D [Nd, Ld, d] or [Nq, K, Ld, d], argmax [Nq, Nd, Lq]."""
    if p.layout == "pairs":
        return replace(x, D=x.D[:, None], d_mask=None if x.d_mask is None else x.d_mask[:, None]), argmax[:, None]
    q_flat, d_flat = x.Q.dim() == 2, x.D.dim() == 2

    def lift(t: Tensor | None, flat: bool) -> Tensor | None:
        return t[None] if flat and t is not None else t

    y = Inputs(lift(x.Q, q_flat), lift(x.D, d_flat), lift(x.q_mask, q_flat), lift(x.d_mask, d_flat), None)
    y.q_weight = lift(x.q_weight, q_flat)
    argmax = argmax.unsqueeze(-2) if d_flat else argmax
    return y, (argmax.unsqueeze(0) if q_flat else argmax)


def reference_similarity(p: Problem, x: Inputs, argmax: Tensor) -> Tensor:
    """Return <Q[i, s], D[j, argmax]> in fp64, by `maxsim_at` with every query token as a separate query."""
    y, argmax = lifted(p, x.to64(), argmax)
    Nq, Lq, d = y.Q.shape
    tokens = y.Q.reshape(Nq * Lq, 1, d)
    argmax = argmax.transpose(1, 2).reshape(Nq * Lq, argmax.shape[1], 1)
    D = y.D if y.D.dim() == 3 else y.D.repeat_interleave(Lq, dim=0)
    return reference.maxsim_at(tokens, D, argmax, normalize=p.normalize)


@dataclass
class Gradient:
    """Expected fp64 gradient, the scale of its rounding errors, and the sums of the absolute values of its terms.

    The last one is 0 where no gradient flows, but not where terms cancel.
    """

    value: Tensor
    scale: float
    flow: Tensor


def expected_gradients(p: Problem, x: Inputs, argmax: Tensor, upstream: Tensor) -> list[Gradient]:
    """Return gradients of Q, D, and the weight at the operator's argmax.

    The scale is the largest element before the projection of `normalize`, which cancels the component along the token.
    """
    y = x.to64()
    unsigned = Inputs(y.Q.abs(), y.D.abs(), y.q_mask, y.d_mask, None if y.q_weight is None else y.q_weight.abs())
    unsigned_leaves = [t.requires_grad_() for t in unsigned.leaves()]
    flows = _gradients_at(replace(p, normalize=False), unsigned, unsigned_leaves, argmax, upstream.abs())
    leaves = [t.requires_grad_() for t in y.leaves()]
    expected = _gradients_at(p, y, leaves, argmax, upstream)
    scales = expected
    if p.normalize:
        z = replace(y, Q=y.Q / _norms(y.Q), D=y.D / _norms(y.D))
        scales = _gradients_at(replace(p, normalize=False), z, leaves, argmax, upstream)
    each = zip(expected, scales, flows, strict=True)
    return [Gradient(e, float(s.abs().max()) if s.numel() else 0.0, flow) for e, s, flow in each]


def _norms(t: Tensor) -> Tensor:
    return t.detach().norm(dim=-1, keepdim=True).clamp_min(1e-12)


def _gradients_at(p: Problem, y: Inputs, leaves: list[Tensor], argmax: Tensor, upstream: Tensor) -> list[Tensor]:
    z, index = lifted(p, y, argmax)
    scores = reference.maxsim_at(z.Q, z.D, index, q_weight=z.q_weight, normalize=p.normalize)
    upstream = upstream.detach().double().reshape(scores.shape)
    won = (index >= 0).any(-1)
    # Zero-size problems leave some inputs out of the graph, so their gradient is zero.
    grads = torch.autograd.grad(scores, leaves, torch.where(won, upstream, 0), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True)]


def gradient_tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance relative to the largest element. The fp32 (fp64) sum is rounded once to its dtype."""
    return {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-5, torch.float64: 1e-12}[dtype]


def assert_gradients(p: Problem, x: Inputs, actual: list[Tensor], expected: list[Gradient]) -> None:
    """Assert that gradients are within the tolerance of the expected ones, and zero where no gradient flows."""
    for leaf, a, e in zip(x.leaves(), actual, expected, strict=True):
        assert a.dtype == leaf.dtype and a.shape == leaf.shape
        if e.value.numel() == 0:
            continue
        error = (a.double() - e.value).abs()
        assert torch.isfinite(a).all(), f"{p}: a gradient is not finite"
        bound = gradient_tolerance(leaf.dtype) * e.scale
        assert float(error.max()) <= bound, f"{p}: worst gradient error {float(error.max())}, bound {bound}"
        assert p.normalize or bool((a[e.flow == 0] == 0).all()), f"{p}: gradient where nothing won"


class Calls(TorchDispatchMode):
    """Mode that counts the calls that reach an operator below all transforms."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lik":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))
