"""Test that cached knowledge of one call never serves another, by changing each argument of every function.

After a valid call, a changed call must end as it does with empty caches: with the same bits or the same error. The
valid call must then end as before, on the same path. Arguments come from signatures, so a new argument needs its own
changes.
"""

import inspect

import numpy as np
import pytest
import torch

import lik_ops
from lik_ops import backends
from lik_ops.ops.fast_path import eager

from ...support.common import INTERPRETER, INTERPRETING, PORTABLE
from .test_eager import Wrapped

pytest.importorskip("triton", reason="ragged calls take the short way to the Triton backend alone")
from lik_ops.gpu import backend as cuda
from lik_ops.gpu.forward import packed as cuda_ragged
from lik_ops.gpu.runtime import capture, launcher, memory

PLACE = INTERPRETER if INTERPRETING else PORTABLE
# The interpreter needs 0.1 s for a call, so it runs one of this many changes for few functions, a different one each
# time.
SAMPLED, EVERY = ["maxsim_candidates_varlen", "maxsim_pair_list of dense", "maxsim_varlen"], 83
OPERATORS = ("maxsim", "maxsim_fwd", "maxsim_ragged_fwd")


class Text(str):
    """String subclass that is equal to a str and has its hash."""


class Number(int):
    """Integer subclass that is equal to an int and has its hash."""


def values(grad):
    """Return an argument of every name, for two queries and three documents."""
    found = {name: torch.randn(shape) for name, shape in {"Q": (2, 3, 8), "D": (3, 5, 8), "w": (2, 3)}.items()}
    found |= {"candidates": torch.randn(2, 2, 5, 8), "one_each": torch.randn(2, 5, 8)}
    found |= {"packed_q": torch.randn(5, 8), "packed_d": torch.randn(10, 8), "packed_w": torch.randn(5)}
    for x in found.values() if grad else ():
        x.requires_grad_()
    found |= {"cu_q": torch.tensor([0, 3, 5]), "cu_d": torch.tensor([0, 5, 6, 10])}
    found |= {"offsets": torch.tensor([[0, 6], [5, 0]]), "lengths": torch.tensor([[5, 4], [1, 5]])}
    found |= {"d_offsets": torch.tensor([0, 5, 6]), "d_lengths": torch.tensor([5, 1, 4])}
    found |= {"pairs": torch.tensor([[0, 1], [1, 2], [1, 0]])}
    found |= {"n_q": torch.tensor([3, 1]), "n_d": torch.tensor([[5, 2], [3, 4]])}
    for name, shape in {"q_mask": (2, 3), "d_mask": (3, 5), "c_mask": (2, 2, 5), "one_mask": (2, 5)}.items():
        found[name] = torch.ones(shape, dtype=torch.bool)
        found[name][..., 1] = False
    found |= {"packed_q_mask": torch.ones(5, dtype=torch.bool), "packed_d_mask": torch.ones(10, dtype=torch.bool)}
    return found


OPTIONS = {"normalize": False, "backward": "auto"}
PER_TOKEN = {"q_mask": "q_mask", "d_mask": "d_mask", "q_weight": "w"}
DENSE = {"Q": "Q", "D": "D", **PER_TOKEN}
CUTS = {"Q": "packed_q", "D": "packed_d", "cu_seqlens_q": "cu_q", "cu_seqlens_d": "cu_d", "q_weight": "packed_w"}
CANDIDATES = {"Q": "packed_q", "D": "packed_d", "doc_offsets": "offsets", "doc_lengths": "lengths"}
CANDIDATES |= {"cu_seqlens_q": "cu_q", "q_weight": "packed_w"}
PAIRS = {**CUTS, "pairs": "pairs", "q_mask": "packed_q_mask", "d_mask": "packed_d_mask"}
PADDED = {"Q": "Q", "D": "candidates", "query_lengths": "n_q", "doc_lengths": "n_d", "q_weight": "w"}
RECOMPUTE = {**OPTIONS, "recompute": False}
SAVE = {**RECOMPUTE, "save": None}
# A valid call of each function: arguments by the names in `values`, options, and the tensors that may be omitted.
VALID = {
    "maxsim": (DENSE, SAVE),
    "maxsim of candidates": ({**DENSE, "D": "candidates", "d_mask": "c_mask"}, SAVE),
    "maxsim_with_argmax": (DENSE, RECOMPUTE),
    "maxsim_pairs": ({**DENSE, "D": "one_each", "d_mask": "one_mask"}, SAVE),
    "maxsim_varlen": (CUTS, OPTIONS),
    "maxsim_varlen_with_argmax": (CUTS, OPTIONS),
    "maxsim_candidates_varlen": (CANDIDATES, OPTIONS),
    "maxsim_candidates_varlen_with_argmax": (CANDIDATES, OPTIONS),
    "maxsim_pair_list": (PAIRS, {**OPTIONS, "max_seqlen_q": 3}),
    "maxsim_pair_list of dense": (
        {**DENSE, "pairs": "pairs"},
        {**OPTIONS, "max_seqlen_q": None, "cu_seqlens_q": None, "cu_seqlens_d": None},
    ),
    "maxsim_pair_list_with_argmax": (PAIRS, {**OPTIONS, "max_seqlen_q": 3}),
    "maxsim_padded": (PADDED, OPTIONS),
    "maxsim_padded_with_argmax": (PADDED, OPTIONS),
    "torch.ops.lik.maxsim": (DENSE, RECOMPUTE),
    "torch.ops.lik.maxsim_fwd": (DENSE, {**OPTIONS, "argmax_dtype": torch.int32}),
    "torch.ops.lik.maxsim_ragged_fwd": (
        {"Q": "packed_q", "D": "packed_d", "cu_seqlens_q": "cu_q", "d_offsets": "d_offsets", "d_lengths": "d_lengths"}
        | {"pairs": "pairs", "q_mask": "packed_q_mask", "d_mask": "packed_d_mask", "q_weight": "packed_w"},
        {**OPTIONS, "argmax_dtype": torch.int32, "max_seqlen_q": 3},
    ),
}
LEFT_OUT = ("q_mask", "d_mask", "q_weight")
# The fast path of each function. Raw operators have none, and ragged operators only have plans.
DENSE_WAY = {"maxsim", "maxsim of candidates", "maxsim_pairs", "torch.ops.lik.maxsim"}
BARE_WAY = {"maxsim_with_argmax", "maxsim_padded_with_argmax"}  # without gradients
RAGGED_WAY = {name for name in VALID if "_varlen" in name or "_pair_list" in name} | {"maxsim_padded"}


def function_of(name):
    """Return the function and the names of its arguments."""
    name = name.split(" of ")[0]
    if name.startswith("torch.ops.lik."):
        operator = getattr(torch.ops.lik, name.removeprefix("torch.ops.lik."))
        return operator, [argument.name for argument in operator.default._schema.arguments]
    function = getattr(lik_ops, name)
    return function, list(inspect.signature(function).parameters)


def call_of(name, bare):
    """Return the function and its valid call. With `bare`, omit masks, weights, and gradients."""
    function, names = function_of(name)
    tensors, options = VALID[name]
    x = values(grad=not bare)
    call = {key: None if bare and key in LEFT_OUT else x[value] for key, value in tensors.items()} | options
    assert set(call) == set(names), f"{name}: no valid value for {set(names) ^ set(call)}"
    return function, {key: call[key] for key in names}, {key: x[value] for key, value in tensors.items()}


def strided(x):
    """Return equal values with a stride of two elements."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2]
    return wide.copy_(x.detach())


def changed_tensors(x):
    plain = x.detach().clone()
    yield from ((f"axis {n} shorter", plain.narrow(n, 0, plain.shape[n] - 1)) for n in range(x.dim()))
    yield from ((f"axis {n} longer", torch.cat([plain, plain.narrow(n, 0, 1)], n)) for n in range(x.dim()))
    yield from ((f"axis {n} of one", plain.narrow(n, 0, 1)) for n in range(x.dim()))
    yield from ((f"axis {n} of none", plain.narrow(n, 0, 0)) for n in range(x.dim()))
    yield "an axis more", plain[None]
    yield "an axis less", plain[0]
    yield "flat", plain.flatten()
    yield "no axis", plain.flatten()[0]
    yield "turned", plain.mT.contiguous().mT if x.dim() > 1 else plain.flip(0)
    yield "every other value", strided(x)
    yield "one row, every other value", strided(x)[:1]
    yield "expanded", plain[:1].expand(x.shape)
    yield "begins elsewhere", torch.cat([plain.flatten()[:1], plain.flatten()])[1:].view(x.shape)
    yield "negated view", torch._neg_view(plain) if plain.dtype is not torch.bool else plain.logical_not()
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool):
        if dtype is not x.dtype:
            yield f"{dtype}", plain.to(dtype)
    yield "elsewhere", plain.to("meta")
    yield "a subclass", plain.as_subclass(Wrapped)
    yield "sparse", plain.to_sparse()
    yield "in a list", [plain]
    yield "an array", plain.numpy()
    yield "others", plain.flip(0)
    if plain.is_floating_point():
        yield "with gradients" if not x.requires_grad else "without", plain.requires_grad_(not x.requires_grad)
        yield "a parameter", torch.nn.Parameter(x.detach().clone())


def changes_of(value, given):
    """Yield other values for an argument as (description, value). `given` replaces an argument that is None."""
    if isinstance(value, torch.Tensor):
        yield from changed_tensors(value)
    elif value is None:
        if given is not None:
            yield "given", given
        yield from (("a tensor", torch.zeros(3)), ("indices", torch.tensor([0, 2, 3])))
    elif isinstance(value, bool):
        yield from (("the other", not value), ("1", 1), ("0", 0), ("1.0", 1.0), ("np.bool", np.bool_(value)))
        yield "a tensor", torch.tensor(value)
    elif isinstance(value, str):
        yield from ((name, name) for name in ("lowmem", "unified", "fast", "AUTO", ""))
        yield from (("a subclass", Text(value)), ("bytes", value.encode()), ("in a list", [value]))
        yield "an unhashable dict", {value: value}
    elif isinstance(value, int):
        yield from (("more", value + 1), ("less", value - 1), ("0", 0), ("-1", -1), ("as a float", float(value)))
        yield from (("True", True), ("a subclass", Number(value)), ("np.int64", np.int64(value)), ("huge", 2**70))
        yield "a tensor", torch.tensor(value)
    elif isinstance(value, torch.dtype):
        yield from ((f"{dtype}", dtype) for dtype in (torch.int16, torch.int64, torch.uint8, torch.float32))
    else:
        raise AssertionError(f"no changes for a {type(value).__name__}")
    if value is not None:
        yield "None", None
    yield from (("3", 3), ("True", True), ("a str", "auto"), ("a float", 0.5))


def outcome(function, call):
    """Return the bits of the results and gradients of a call, or its error."""
    try:
        results = function(**call)
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        scores = results[0]
        if scores.requires_grad:
            leaves = [t for t in call.values() if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
            results += torch.autograd.grad(scores.nan_to_num(neginf=0).sum(), leaves, allow_unused=True)
    except Exception as error:
        return type(error), str(error)
    return [None if t is None else (type(t), t.dtype, t.shape, t.requires_grad, _bits(t)) for t in results]


def _bits(t):
    return str(t.layout) if t.layout != torch.strided or t.device.type == "meta" else t.detach().numpy().tobytes()


@pytest.fixture
def ways(monkeypatch):
    """Record for each call whether a fast path was used."""
    taken = []
    for name in ("try_maxsim", "try_maxsim_with_argmax", "try_maxsim_ragged"):
        real = getattr(eager, name)

        def spy(*args, real=real, **options):
            found = real(*args, **options)
            taken.append(found is not None)
            return found

        monkeypatch.setattr(eager, name, spy)
    return taken


def test_valid_calls_cover_every_scoring_function():
    # `maxsim_streamed` calls two of these part by part. The others always use their operators, or their own plans.
    others = {"maxsim_streamed", "maxsim_soft", "maxsim_xtr", "maxsim_token_topk", "maxsim_cross_entropy"}
    others.add("maxsim_from_hidden")
    scoring = {name for name in lik_ops.__all__ if name.startswith("maxsim")} - others
    scoring |= {f"torch.ops.lik.{name}" for name in OPERATORS}
    assert {name.split(" of ")[0] for name in VALID} == scoring


class Launches:
    """Stand-in for the launches of a GPU. It records the arguments of the C function below Triton."""

    def __init__(self):
        self.found = []
        self.arguments = {}

    def bind(self, kernel, args, options):
        return Bound(self, (kernel.__name__, sorted(options.items()))), launcher.describe_args(kernel, args)[1]

    def named(self, x):
        """Return a pointer into an argument by its name, another pointer as new, and an absent tensor as 0."""
        if isinstance(x, (tuple, list)):
            return [self.named(y) for y in x]
        if not isinstance(x, int) or x < 2**40:
            return 0 if x is None else x
        for name, t in self.arguments.items():
            if isinstance(t, torch.Tensor) and 0 <= x - t.untyped_storage().data_ptr() < t.untyped_storage().nbytes():
                return name, x - t.untyped_storage().data_ptr()
        return "new", x % 16


class Bound:
    """Stand-in for a compiled kernel."""

    def __init__(self, launches, kernel):
        self.launches, self.kernel = launches, kernel

    def direct(self, x, y, z, stream, args):
        self.launches.found.append((self.kernel, (x, y, z), self.launches.named(args)))

    def launch(self, grid, args, values):
        values = [self.encoded(0, v)[0] if launcher.is_descriptor(v) else v for v in values]
        self.direct(*(*grid, 1, 1)[:3], 0, values)

    def encoded(self, n, descriptor):
        return (("descriptor", descriptor.base.data_ptr(), *descriptor.shape, *descriptor.block_shape),)


def flat(values):
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from flat(value)
        else:
            yield value


def compare(name, bare, ways, is_short, called, stride=1):
    """Change each argument of the valid call and compare. `called` returns the outcome of a call."""
    function, valid, given = call_of(name, bare)

    def is_as_ever():
        ways.clear()
        found = called(function, valid)
        assert any(ways) == is_short, f"{name}: the short way is{' not' * is_short} taken"
        return found

    eager.clear_call_caches()
    expected = is_as_ever()
    assert isinstance(expected, list), expected
    every = [(key, *change) for key, value in valid.items() for change in changes_of(value, given.get(key))]
    for argument, change, other in every[len(name) % stride :: stride]:
        call, what = {**valid, argument: other}, f"{name}: {argument}: {change}"
        for _ in range(2):
            called(function, valid)
        warm = [called(function, call), called(function, call)]
        assert is_as_ever() == expected, what
        eager.clear_call_caches()
        cold = called(function, call)
        assert warm == [cold, cold], what
        assert is_as_ever() == expected, f"{what}, first of all"


@pytest.mark.parametrize("bare", [True] if INTERPRETING else [True, False])
@pytest.mark.parametrize("name", SAMPLED if INTERPRETING else sorted(DENSE_WAY | {"maxsim_with_argmax"}))
def test_cached_calls_do_not_serve_changed_arguments(name, bare, ways):
    with PLACE.use():
        is_short = name in DENSE_WAY or INTERPRETING or (bare and name in BARE_WAY)
        compare(name, bare, ways, is_short, outcome, EVERY if INTERPRETING else 1)


def test_pairs_of_wrong_shape_raise_after_valid_calls():
    function, valid, _ = call_of("maxsim_pair_list of dense", True)
    with PLACE.use():
        expected = function(**valid)
        for pairs in (valid["pairs"].repeat(1, 2)[:, :3], valid["pairs"].flatten(), valid["pairs"][0, 0]):
            for _ in range(2):
                with pytest.raises(ValueError, match=r"maxsim_pair_list: pairs: expected \[P, 2\]"):
                    function(**{**valid, "pairs": pairs})
        assert torch.equal(function(**valid), expected)


@pytest.mark.skipif(INTERPRETING, reason="stands for a GPU's launches")
@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("name", VALID)
def test_cached_launches_do_not_serve_changed_arguments(name, bare, ways, monkeypatch):
    """Plans and direct launches of the Triton backend must not serve other arguments either."""
    launches = Launches()
    monkeypatch.setattr(launcher, "get_compiled_kernel", launches.bind)
    monkeypatch.setattr(
        backends, "select_backend", lambda device, dtype: backends.portable if dtype.itemsize == 8 else cuda
    )
    monkeypatch.setattr(memory, "allocate_cuda", None)
    for module in (capture, cuda_ragged):
        monkeypatch.setattr(module, "current_device", lambda: None)
        monkeypatch.setattr(module, "raw_stream", lambda index: 0)

    def launched(function, call):
        launches.found.clear()
        launches.arguments = call
        try:
            results = function(**call)
        except Exception as error:
            return type(error), str(error)
        results = [results] if isinstance(results, torch.Tensor) else results
        kinds = [(t.dtype, t.shape, t.requires_grad) for t in results]
        return [*kinds, *(list(flat(launch)) for launch in launches.found)]

    is_short = name in DENSE_WAY | RAGGED_WAY or (name == "maxsim_padded" and not bare) or (bare and name in BARE_WAY)
    compare(name, bare, ways, is_short, launched)
    eager.clear_call_caches()
