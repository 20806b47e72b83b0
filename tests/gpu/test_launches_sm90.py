"""Test host code of sm_90 on a CPU: which kernels a call launches, and that later similar calls launch the same.

Launches do nothing. Plans and captures of earlier calls must not change the launches.
"""

import random
import sys
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

import lik_ops
from lik_ops import backends
from lik_ops.ops.fast_path import eager

from ..support.common import INTERPRETING

pytest.importorskip("triton", reason="these are launches of Triton's kernels")
if INTERPRETING:
    pytest.skip("stands for a GPU's launches", allow_module_level=True)

from lik_ops.gpu import backend
from lik_ops.gpu.forward import packed as packed_forward
from lik_ops.gpu.runtime import gluon, launcher
from lik_ops.gpu.tuning import architectures

from .test_capture import Bound, encode_descriptor, flat
from .test_capture import log as launches  # noqa: F401  # a fixture

if gluon.load_kernels() is None:
    pytest.skip("this Triton is too new for the Gluon kernels", allow_module_level=True)

SM_90 = replace(architectures.ARCHITECTURES["sm_90"], processors=132)
Nq, Lq, Nd, Ld, d = 16, 32, 300, 180, 128
RING, RAGGED, TERMS = "maxsim_forward_sm90", "maxsim_forward_packed", "maxsim_query_terms"


class Described(Bound):
    """Compiled kernel that logs its description."""

    __slots__ = ("description",)

    def direct(self, x, y, z, stream, values):
        self.log.append((self.kernel.__name__, (x, y, z), values, self.description))

    def launch(self, grid, args, values):
        self.direct(*(*grid, 1, 1)[:3], 0, values)


@pytest.fixture
def log(launches, monkeypatch):  # noqa: F811
    def bind(kernel, args, options):
        bound = Described(kernel, launches)
        bound.description, values = launcher.describe_args(kernel, args)
        return bound, values

    monkeypatch.setattr(launcher, "get_compiled_kernel", bind)
    for name, module in list(sys.modules.items()):
        if name.startswith(("lik_ops.gpu.", "lik_ops.families.")) and hasattr(module, "architecture"):
            monkeypatch.setattr(module, "architecture", lambda device: SM_90)
    monkeypatch.setattr(packed_forward, "current_device", lambda: None)
    monkeypatch.setattr(packed_forward, "raw_stream", lambda index: 0)
    monkeypatch.setattr(backends, "select_backend", lambda device, dtype: backend)
    eager.clear_call_caches()
    yield launches
    eager.clear_call_caches()


def normalize_launches(log, given):
    """Return kernels, grids, arguments, and descriptions of the logged launches.

    Pointers are named by their tensor, or "memory" for tensors that the call allocated.
    """
    spans = [(x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in given]

    def named(value):
        if value is None or not isinstance(value, int) or value < 2**32:
            return value or 0  # either is passed as nothing
        found = [(n, value - begin) for n, (begin, end) in enumerate(spans) if begin <= value < end]
        return found[0] if found else "memory"

    return [
        (name, grid, [named(v) for v in flat(map(encode_descriptor, values))], of) for name, grid, values, of in log
    ]


def quantized_call(format, scale, rows=Nq, length=Lq, query="half", **options):
    Q, D, *_ = drawn()
    made = lik_ops.quantize(D.float(), format, scale, query=query)
    return partial(lik_ops.maxsim, Q.view(-1, length, d)[:rows], made, **options), (Q, made.data, made.scale)


@cache
def _values():
    g = torch.Generator().manual_seed(0)
    Q, D = (torch.randn(*shape, generator=g).bfloat16() for shape in ((Nq, Lq, d), (Nd, Ld, d)))
    return Q, D, torch.rand(Nq, Lq, generator=g) > 0.3, torch.rand(Nd, Ld, generator=g) > 0.3


def drawn():
    return [x.clone() for x in _values()]


def step(**options):
    Q, D, *_ = drawn()
    Q.requires_grad_(), D.requires_grad_()
    function = options.pop("function", lik_ops.maxsim)
    return lambda: torch.autograd.grad(function(Q, D, **options).sum(), (Q, D)), (Q, D)


def one(rows=slice(None), step=1):
    Q, D, *_ = drawn()
    return partial(lik_ops.maxsim, Q[rows], D[::step]), (Q, D)


def hidden(rows, trains=False):
    Q, H, _, d_mask = drawn()
    Q, W, H = Q[:rows], H[0, :64], H[:60].clone() if trains else H
    given = (
        Q[..., :64].contiguous(),
        H.requires_grad_(trains),
        W.contiguous().requires_grad_(trains),
        W[:, 0].contiguous(),
    )
    score = partial(lik_ops.maxsim_from_hidden, *given, d_mask=None if trains else d_mask)
    return (lambda: torch.autograd.grad(score().sum(), given[1:3])) if trains else score, (*given, d_mask)


def few_long(function=lik_ops.maxsim, **options):
    Q, D, *_ = drawn()
    D = D.view(-1, d)[:8192].view(2, 4096, d)
    return partial(function, Q[:1], D, **options), (Q, D)


def masked(normalize):
    Q, D, q_mask, d_mask = drawn()
    return partial(lik_ops.maxsim, Q, D, q_mask, d_mask, normalize=normalize), (Q, D, q_mask, d_mask)


CALLS = {
    "many rows": (one, [RING]),
    "few rows": (partial(one, slice(0, 1)), ["maxsim_forward"]),
    "few long documents": (few_long, [RAGGED, "maxsim_row_sums"]),
    "every second document": (partial(one, step=2), ["maxsim_forward"]),
    "masks": (partial(masked, False), ["maxsim_patches", "maxsim_row_maxima_sm90"]),
    "masks, normalized": (partial(masked, True), ["maxsim_forward"]),
    "int8, a scale a token": (partial(quantized_call, "int8", "token"), [RING]),
    "int8, a scale a document": (partial(quantized_call, "int8", "document"), [RING]),
    "int8, one scale": (partial(quantized_call, "int8", "tensor"), [RING]),
    "int8, few rows": (partial(quantized_call, "int8", "token", 1), [RING]),
    "int8, long queries": (partial(quantized_call, "int8", "token", length=128), [RING, "maxsim_sum_parts"]),
    "int8, normalized": (
        partial(quantized_call, "int8", "token", normalize=True),
        ["maxsim_unit_counts", TERMS, RAGGED],
    ),
    "uint8": (partial(quantized_call, "uint8", "token"), [RAGGED]),
    "bits": (partial(quantized_call, "binary", "document"), [RING]),
    "bits, normalized": (
        partial(quantized_call, "binary", "token", normalize=True),
        ["maxsim_unit_counts", TERMS, RAGGED],
    ),
    "step": (step, [RING, "maxsim_list_argmax", "maxsim_grad_documents", "maxsim_grad_queries"]),
    "step, atomics": (
        partial(step, backward="unified"),
        [RING, "maxsim_scatter", "maxsim_finish", "maxsim_finish"],
    ),
    "step, int8 kept": (
        partial(step, save="int8"),
        [RING, "maxsim_keep_int8", "maxsim_list_argmax", "maxsim_grad_documents", "maxsim_grad_queries"],
    ),
    "soft step": (
        partial(step, function=lik_ops.maxsim_soft, temperature=0.5),
        ["maxsim_forward_soft", "maxsim_soft_rows", "maxsim_finish", "maxsim_soft_tokens"],
    ),
    "soft, few long documents": (
        partial(few_long, lik_ops.maxsim_soft, temperature=0.5),
        ["maxsim_forward_soft", "maxsim_soft_splits"],
    ),
    "hidden states, few rows": (partial(hidden, 3), ["maxsim_forward_head"]),
    "hidden states, many rows": (
        partial(hidden, Nq),
        ["maxsim_head_tokens", "maxsim_patches", "maxsim_row_maxima_sm90"],
    ),
    "hidden states, step": (
        partial(hidden, Nq, trains=True),
        ["maxsim_head_tokens", RING, "maxsim_head_tokens", "maxsim_grad_documents", "maxsim_head_slopes"],
    ),
    "loss step": (
        partial(step, function=lik_ops.maxsim_cross_entropy, temperature=0.5),
        [
            RING,
            "maxsim_label_losses",
            "maxsim_count_labels",
            "maxsim_label_gradients",
            "maxsim_list_argmax",
            "maxsim_grad_documents",
            "maxsim_grad_queries",
        ],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_later_calls_repeat_the_first_launches(name, log):
    (call, given), kernels = CALLS[name][0](), CALLS[name][1]
    found = []
    for _ in range(4):
        log.clear()
        call()
        found.append(normalize_launches(log, given))
    assert [kernel for kernel, *_ in found[0]] == kernels
    for later in found[1:]:
        assert later == found[0]


def test_binary_queries_launch_the_same_for_any_strides(log):
    """Signs have strides of their own, in the first call, which makes the plan, and in later ones."""
    Q, D, *_ = drawn()
    made, found = lik_ops.quantize(D.float(), "binary", "document", query="binary"), []
    for queries in (Q, torch.stack([Q, -Q], 2)[:, :, 0]):
        for _ in range(4):
            log.clear()
            lik_ops.maxsim(queries, made)
            found.append(normalize_launches(log, (Q, made.data, made.scale)))
    assert found[0][0][0] == RING and all(later == found[0] for later in found)


@pytest.mark.parametrize("rows", [1, Nq])
@pytest.mark.parametrize(
    ("format", "query"),
    [("fp8_e4m3", "fp8"), ("binary", "half"), ("binary", "int8"), ("binary", "binary"), ("rq1", "half")],
)
def test_dense_binary_and_fp8_documents_launch_one_kernel(format, query, rows, log):
    """Few queries of rotated documents are rotated first, by a launch. PyTorch rotates many."""
    call, _ = quantized_call(format, "token", rows, query=query)
    expected = ["maxsim_rotate_queries", RING] if format == "rq1" and rows == 1 else [RING]
    for _ in range(3):
        log.clear()
        call()
        assert [kernel for kernel, *_ in log] == expected


def test_calls_launch_with_their_own_tensors(log):
    """The calls have one key, with other masks, strides, weights, and documents. Later calls have other keys."""
    made = [masked(False) for _ in range(4)]
    given = [x for _, tensors in made for x in tensors]
    for n, (call, tensors) in enumerate(made):
        log.clear()
        call()
        values = normalize_launches(log, given)[1][2]
        assert {value[0] // len(tensors) for value in values if isinstance(value, tuple)} == {n}


def elsewhere(x, how):
    """Return `x` with other strides, or at another address."""
    if how == "odd":
        return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    if how == "wide":
        return torch.empty(*x.shape[:-1], x.shape[-1] + 16, dtype=x.dtype)[..., : x.shape[-1]].copy_(x)
    if how == "steps":
        return torch.empty(2 * len(x), *x.shape[1:], dtype=x.dtype)[::2].copy_(x)
    if how == "columns":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x[:1].expand(x.shape) if how == "shared" else x


def random_call(r, kind, places):
    """Return a call of few sizes and its tensors, which have any layout.

    If `places` is ["odd"], only addresses differ, and all calls are of one kind.
    """
    alike = places == ["odd"]

    def drawn(*shape, dtype=torch.float32):
        return elsewhere(torch.ones(shape, dtype=dtype), r.choice(["plain"] * 4 * len(places) + places))

    def maybe(x):
        return x if alike or r.random() < 0.5 else None

    dtype = torch.bfloat16 if alike else r.choice([torch.bfloat16, torch.float32])
    Q, D = drawn(Nq, Lq, 64, dtype=dtype), drawn(140, 70, 64, dtype=dtype)
    q_mask, d_mask = (maybe(drawn(*x.shape[:2], dtype=torch.bool)) for x in (Q, D))
    weight, normalize = maybe(drawn(Nq, Lq)), not alike and r.random() < 0.3
    upstream, winners = drawn(Nq, 140), drawn(140, Nq, Lq, dtype=torch.int16 if alike else torch.int32)
    data, scale = drawn(140, 70, 64, dtype=torch.int8), drawn(140, 1 if alike else r.choice([1, 70]))
    labels, lse = drawn(Nq, 2, dtype=torch.int32)[:, 1], drawn(Nq, 2)
    tensors = Q, D, q_mask, d_mask, weight, upstream, winners, data, scale, labels, lse
    given = [x for x in tensors if x is not None]
    options = q_mask, d_mask, weight, normalize
    needs = [alike or r.random() < 0.7, alike or r.random() < 0.7, weight is not None]
    backward = torch.ops.lik.maxsim_bwd_lowmem if alike else torch.ops.lik.maxsim_bwd_unified
    scale_each = scale.expand(140, 70)
    calls = (
        lambda: lik_ops.maxsim(Q, D, q_mask, d_mask, q_weight=weight, normalize=normalize),
        lambda: torch.ops.lik.maxsim_fwd(Q, D, *options, torch.int16, "auto"),
        lambda: backward(upstream, Q, D, winners, *options, needs),
        lambda: torch.ops.lik.maxsim_bwd_int8(
            upstream, Q, data, scale_each, winners, q_mask, weight, normalize, False, needs
        ),
        lambda: lik_ops.maxsim(Q, lik_ops.Quantized(data, scale, "int8", 64, dtype), q_mask, q_weight=weight),
        lambda: lik_ops.maxsim_cross_entropy(Q, D, labels, q_mask, d_mask, q_weight=weight, normalize=normalize),
        lambda: torch.ops.lik.maxsim_cross_entropy_bwd(
            upstream[:, 0], Q, D, q_mask, d_mask, weight, labels, lse, 0.5, -100, normalize, needs
        ),
    )
    return calls[kind], given


PLACES = ["odd", "wide", "steps", "columns", "shared"]


@pytest.mark.parametrize("places", [PLACES, ["odd"]], ids=["anywhere", "begin elsewhere"])
@pytest.mark.parametrize("kind", range(7))
def test_cached_launches_match_first_calls_for_any_layout(kind, places, log):
    """The calls launch what they would launch first, whatever was cached for other calls."""
    r = random.Random(kind)
    made = [random_call(r, kind, places) for _ in range(120)]

    def of(n):
        log.clear()
        made[n][0]()
        return normalize_launches(log, made[n][1])

    warm = [[of(n) for n in range(len(made))] for _ in range(3)]
    for n in range(len(made)):
        eager.clear_call_caches()
        alone = of(n)
        assert all(found[n] == alone for found in warm), n
