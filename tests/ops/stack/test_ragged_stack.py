"""Test ragged functions with the rest of torch: invalid calls, fakes, compile, export, transforms, and packing."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.export import Dim
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lik_ops
from lik_ops.ops.stack import sharding

from ...support.common import Calls
from ...support.ragged import DEVICES, build, same_bits
from ...support.stack import Compilations
from .test_stack import Wrapper

Nq, Nd, d = 3, 4, 8


def arguments(q_lengths=(3, 1, 7), d_lengths=(5, 2, 8, 1), device="cpu", grad=False):
    """Return packed Q, D, cu_seqlens_q, cu_seqlens_d, and weights."""
    b = build(q_lengths, d_lengths, "cross", d, torch.float32, device, options=False, exact=False)
    weight = torch.rand(b.Q.shape[0], device=device)
    return b.Q.requires_grad_(grad), b.D.requires_grad_(grad), b.cu_q, b.cu_d, weight.requires_grad_(grad)


def varlen(Q, D, cu_q, cu_d, w):
    return lik_ops.maxsim_varlen(Q, D, cu_q, cu_d, q_weight=w, normalize=True)


def candidates(Q, D, cu_q, cu_d, w):
    offsets, lengths = (x[None, :3].expand(cu_q.shape[0] - 1, -1) for x in (cu_d[:-1], cu_d[1:] - cu_d[:-1]))
    return lik_ops.maxsim_candidates_varlen(Q, D, offsets, lengths, cu_seqlens_q=cu_q, q_weight=w, backward="unified")


def pair_list(Q, D, cu_q, cu_d, w):
    pairs = torch.tensor([[1, 0], [0, 2], [2, 1], [1, 0]], device=Q.device)
    return lik_ops.maxsim_pair_list(Q, D, pairs, cu_seqlens_q=cu_q, cu_seqlens_d=cu_d, q_weight=w, max_seqlen_q=32)


def dense_pair_list(Q, D, cu_q, cu_d, w):
    pairs = torch.tensor([[0, 0], [1, 1]], device=Q.device, dtype=torch.int32)
    Q, D = Q[:6].unflatten(0, (2, 3)), D[:12].unflatten(0, (3, 4))
    return lik_ops.maxsim_pair_list(
        Q, D, pairs, D.new_ones(2, 3, dtype=torch.bool), q_weight=w[:6].unflatten(0, (2, 3))
    )


def padded(Q, D, cu_q, cu_d, w):
    Q, D = Q[:6].unflatten(0, (2, 3)), D[:12].unflatten(0, (2, 3, 2))
    lengths = torch.tensor([[2, 1, 0], [1, 2, 3]], device=Q.device)
    return lik_ops.maxsim_padded(Q, D, lengths[:, 0], lengths, q_weight=w[:6].unflatten(0, (2, 3)))


FUNCTIONS = {f.__name__: f for f in (varlen, candidates, pair_list, dense_pair_list, padded)}


def finite(scores):
    return torch.where(scores.isfinite(), scores, 0).sum()


# Invalid calls.

Q3, D3, D4 = torch.randn(Nq, 5, d), torch.randn(Nd, 6, d), torch.randn(Nq, 2, 6, d)
Q2, D2, CU_Q, CU_D, W = (t.detach() for t in arguments())
PAIRS, AT = torch.zeros(5, 2, dtype=torch.int64), torch.zeros(Nq, 2, dtype=torch.int32)
LENGTHS_Q, LENGTHS_D = torch.ones(Nq, dtype=torch.int64), torch.ones(Nq, 2, dtype=torch.int64)
CALLS = {
    "maxsim_varlen": (
        lik_ops.maxsim_varlen,
        {"Q": Q2, "D": D2, "cu_seqlens_q": CU_Q, "cu_seqlens_d": CU_D, "q_weight": W},
    ),
    "maxsim_candidates_varlen": (
        lik_ops.maxsim_candidates_varlen,
        {"Q": Q2, "D": D2, "doc_offsets": AT, "doc_lengths": AT, "cu_seqlens_q": CU_Q, "q_weight": W},
    ),
    "maxsim_pair_list": (
        lik_ops.maxsim_pair_list,
        {
            **{"Q": Q2, "D": D2, "pairs": PAIRS, "q_mask": W > 0, "d_mask": D2[:, 0] > 0},
            **{"cu_seqlens_q": CU_Q, "cu_seqlens_d": CU_D, "q_weight": W},
        },
    ),
    "maxsim_padded": (
        lik_ops.maxsim_padded,
        {"Q": Q3, "D": D4, "query_lengths": LENGTHS_Q, "doc_lengths": LENGTHS_D, "q_weight": torch.ones(Nq, 5)},
    ),
}
CHANGES = {
    "dtype": (lambda t: t.to(torch.complex64), TypeError),
    "rank": (lambda t: t[..., None], ValueError),
    "less rank": (lambda t: t[0], ValueError),
    "size": (lambda t: torch.cat([t, t[..., :1]], -1), ValueError),
    "device": (lambda t: t.to("meta"), ValueError),
    "type": (lambda t: t.tolist(), TypeError),
    "layout": (lambda t: t.to_sparse(), (TypeError, ValueError)),
}
ANY_SIZE = {("maxsim_varlen", "cu_seqlens_q"), ("maxsim_varlen", "cu_seqlens_d"), ("maxsim_pair_list", "cu_seqlens_q")}
ANY_SIZE |= {("maxsim_pair_list", "cu_seqlens_d")}
BAD_CALLS = [
    (op, name, change)
    for op, (_, given_) in CALLS.items()
    for name in given_
    for change in CHANGES
    if not (change == "size" and (op, name) in ANY_SIZE)
]


@pytest.mark.parametrize("op, name, change", BAD_CALLS)
def test_errors_name_the_invalid_argument(op, name, change):
    function, given_ = CALLS[op]
    function(**given_)
    make, error = CHANGES[change]
    # An argument that constrains others may be reported through them: another d, device, or number of queries.
    related = {
        "Q": "Q|D|q_weight|query_lengths",
        "D": "Q|D|d_mask|doc_lengths",
        "cu_seqlens_q": "cu_seqlens_q|doc_offsets",
    }
    related["doc_offsets"] = "doc_offsets|doc_lengths"
    # For a list, the error names the first element.
    with pytest.raises(error, match=rf"^{op}: ({related.get(name, name)})(\[0\])?: expected .*(got|found)"):
        function(**{**given_, name: make(given_[name])})


@pytest.mark.parametrize("op", CALLS)
def test_invalid_options_and_dtypes_raise(op):
    function, given_ = CALLS[op]
    with pytest.raises(ValueError, match=f"{op}: backward: expected one of"):
        function(**given_, backward="fast")
    with pytest.raises(TypeError, match=f"{op}: q_weight: expected torch.float32"):
        function(**{**given_, "q_weight": given_["q_weight"].double()})
    with pytest.raises(ValueError, match=f"{op}: Q: expected d >= 1"):
        function(**{**given_, "Q": given_["Q"][..., :0], "D": given_["D"][..., :0]})
    with pytest.raises(TypeError, match=f"{op}: D: expected the dtype of Q"):
        function(**{**given_, "D": given_["D"].half()})


def test_invalid_packed_and_dense_shapes_raise():
    for call, message in (
        (
            lambda: lik_ops.maxsim_varlen(Q3[None], D2, None, CU_D),
            "maxsim_varlen: Q: expected [Lq, d] or [Nq, Lq, d], or [Tq",
        ),
        (lambda: lik_ops.maxsim_varlen(Q3, D2, CU_Q, CU_D), "maxsim_varlen: Q: expected [Tq, d]"),
        (lambda: lik_ops.maxsim_varlen(Q2, D2, CU_Q, None), "maxsim_varlen: D: expected [Nd, Ld, d]"),
        (lambda: lik_ops.maxsim_varlen(Q2, D2, CU_Q[:0], CU_D), "maxsim_varlen: cu_seqlens_q: expected [N + 1]"),
        (lambda: lik_ops.maxsim_varlen(Q2, D2, CU_Q, CU_D[:0]), "maxsim_varlen: cu_seqlens_d: expected [N + 1]"),
        (lambda: lik_ops.maxsim_candidates_varlen(Q2, D3, AT, AT, cu_seqlens_q=CU_Q), "D: expected [Td, d]"),
        (lambda: lik_ops.maxsim_pair_list(Q3, D3, PAIRS[:, :1]), "maxsim_pair_list: pairs: expected [P, 2]"),
        (lambda: lik_ops.maxsim_pair_list(Q3, D3, PAIRS, max_seqlen_q=-1), "max_seqlen_q: expected 0 or more"),
        (lambda: lik_ops.maxsim_padded(Q3, D3, LENGTHS_Q, LENGTHS_D), "D: expected [B, C, Ld, d]"),
        (lambda: lik_ops.maxsim_padded(Q3, D4[:2], LENGTHS_Q, LENGTHS_D), "maxsim_padded: D: expected B = 3 lists"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_raw_operators_validate_their_arguments():
    fwd, bwd = torch.ops.lik.maxsim_ragged_fwd, torch.ops.lik.maxsim_ragged_bwd
    tensors = Q2, D2, CU_Q, CU_D[:-1], CU_D.diff(), None, None, None, None
    scores, argmax = fwd(*tensors, False, torch.int16, 7, "auto")
    for call, error, message in (
        (lambda: fwd(*tensors, False, torch.int8, 4, "auto"), TypeError, "argmax_dtype"),
        (lambda: fwd(*tensors, False, None, -1, "auto"), ValueError, "max_seqlen_q"),
        (lambda: fwd(*tensors, False, None, 4, "quick"), ValueError, "backward"),
        (lambda: fwd(*tensors[:6], W, *tensors[7:], False, None, 4, "auto"), TypeError, "q_mask"),
        (lambda: fwd(Q2, D2, CU_Q, AT[:2], AT[:2], *tensors[5:], False, None, 4, "auto"), ValueError, "d_offsets"),
        (lambda: fwd(Q2, D2, CU_Q, AT, AT, PAIRS, *tensors[6:], False, None, 4, "auto"), ValueError, "d_offsets"),
        (lambda: bwd(scores[:2], *tensors, argmax, False, False, [True] * 3), ValueError, "grad_scores"),
        (lambda: bwd(scores.double(), *tensors, argmax, False, False, [True, True, False]), TypeError, "grad_scores"),
        (lambda: bwd(scores, *tensors, argmax[:, 1:], False, False, [True, True, False]), ValueError, "argmax"),
        (lambda: bwd(scores, *tensors, argmax[0], False, False, [True, True, False]), ValueError, "argmax"),
        (lambda: bwd(scores, *tensors, argmax.float(), False, False, [True, True, False]), TypeError, "argmax"),
        (lambda: bwd(scores, *tensors, argmax, False, False, [True] * 3), ValueError, "needs"),
    ):
        with pytest.raises(error, match=f"lik::maxsim_ragged_(fwd|bwd): {message}: "):
            call()
    long = torch.zeros(40_000, d)
    with pytest.raises(ValueError, match="int16 cannot index 40000"):
        fwd(Q2, long, *tensors[2:], False, torch.int16, 7, "auto")


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=25)
@given(
    data=st.data(),
    kind=st.sampled_from(("cross", "candidates", "pairs")),
    dtype=st.sampled_from((torch.int32, torch.int64)),
)
def test_any_segments_score_their_tokens_or_nan(device, data, kind, dtype):
    """For any integers, cells inside the tensors score their tokens, other cells are NaN, and gradients are finite."""
    Tq, Td = 9, 20

    def integers(n, low, high):
        return data.draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    cu, at, length = integers(4, -2, Tq + 2), integers(6, -2, Td + 2), integers(6, -2, 9)
    Q, D = (torch.randint(-2, 3, (n, 4), device=device).float().requires_grad_() for n in (Tq, Td))
    tensors = [torch.tensor(x, device=device, dtype=dtype) for x in (cu, at, length)]
    pairs, cells = None, [((i, j), i, j) for i in range(3) for j in range(6)]
    if kind == "candidates":
        tensors[1:] = (x.view(3, 2) for x in tensors[1:])
        cells = [((j // 2, j % 2), j // 2, j) for j in range(6)]
    if kind == "pairs":
        flat = integers(10, -1, 6)
        pairs = torch.tensor(flat, device=device, dtype=dtype).view(5, 2)
        cells = [((p,), *flat[2 * p : 2 * p + 2]) for p in range(5)]
    args = Q, D, *tensors, pairs, None, None, None, False, torch.int16, Tq, "auto"
    scores, _ = torch.ops.lik.maxsim_ragged_fwd(*args)
    for index, i, j in cells:
        ok = 0 <= i < 3 and 0 <= j < 6 and 0 <= cu[i] <= cu[i + 1] <= Tq
        if ok and at[j] >= 0 and length[j] >= 0 and at[j] + length[j] <= Td:
            expected = lik_ops.reference.maxsim(Q[cu[i] : cu[i + 1]], D[at[j] : at[j] + length[j]])
            same_bits(scores[index], expected)
        else:
            assert scores[index].isnan()
    grads = torch.autograd.grad(scores, (Q, D), torch.ones_like(scores))
    assert all(g.isfinite().all() for g in grads)


# Graphs.


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_scores_and_gradients_match_eager(name, device):
    function, compilations = FUNCTIONS[name], Compilations()
    counted = torch.compile(function, backend=compilations, fullgraph=True, dynamic=True)
    compiled = torch.compile(lambda *a: finite(function(*a)), backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in (((3, 1, 7), (5, 2, 8, 1)), ((2, 9, 0, 30), (1, 40, 6, 0, 3, 11))):
        args = arguments(*lengths, device=device, grad=True)
        same_bits(counted(*args), function(*args))
        leaves = args[0], args[1], args[4]
        actual = torch.autograd.grad(compiled(*args), leaves)
        expected = torch.autograd.grad(finite(function(*args)), leaves)
        for a, e in zip(actual, expected, strict=True):
            # On a GPU, compiled and eager calls sum in different orders, with some roundings of the largest sum.
            torch.testing.assert_close(a, e, rtol=0, atol=0 if device == "cpu" else 1e-6 * max(1, e.abs().max().item()))
    assert compilations.count == 1


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_accept_other_lengths(strict):
    class Module(torch.nn.Module):
        def forward(self, Q, D, cu_q, cu_d, w):
            return varlen(Q, D, cu_q, cu_d, w), candidates(Q, D, cu_q, cu_d, w), pair_list(Q, D, cu_q, cu_d, w)

    tokens, document_tokens, queries = Dim("Tq"), Dim("Td"), Dim("cu_q", min=3)
    shapes = ({0: tokens}, {0: document_tokens}, {0: queries}, {0: Dim("cu_d", min=4)}, {0: tokens})
    program = torch.export.export(Module(), arguments(), dynamic_shapes=shapes, strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("lik.maxsim_ragged_fwd.default") == 3
    for lengths in (((3, 1, 7), (5, 2, 8, 1)), ((2, 9, 0, 30), (1, 40, 6, 0, 3, 11)), ((5, 0, 1, 1, 1), (0, 0, 300))):
        args = arguments(*lengths)
        for actual, expected in zip(program.module()(*args), Module()(*args), strict=True):
            same_bits(actual, expected)


def test_packaging_packed_tokens_raises(tmp_path):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return varlen(*args)

    with pytest.raises(NotImplementedError, match=r"expected dense tensors and masks, found lik\.maxsim_ragged_fwd"):
        lik_ops.export.package(Module(), arguments(), str(tmp_path / "scorer.pt2"))


def test_fake_results_have_the_real_shapes_and_dtypes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    args = arguments(grad=True)
    for name, function in FUNCTIONS.items():
        real = function(*args)
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fakes = [mode.from_tensor(t) for t in args]
            scores = function(*fakes)
            assert (scores.shape, scores.dtype, scores.requires_grad) == (real.shape, real.dtype, True), name
            grads = torch.autograd.grad(finite(scores), (fakes[0], fakes[1], fakes[4]))
            assert [g.shape for g in grads] == [args[0].shape, args[1].shape, args[4].shape]


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_and_gpu_training_need_max_seqlen_q(device):
    Q, D, cu_q, cu_d, _ = arguments(device=device, grad=True)
    pairs = torch.tensor([[0, 1], [2, 3]], device=device)

    def call(bound=None):
        return lik_ops.maxsim_pair_list(Q, D, pairs, cu_seqlens_q=cu_q, cu_seqlens_d=cu_d, max_seqlen_q=bound)

    with torch.no_grad():
        torch.testing.assert_close(call(), call(7))
    if device == "cpu":
        same_bits(call(), call(100))
        with pytest.raises(Exception, match="max_seqlen_q: expected a bound"):
            torch.compile(call, backend="eager", fullgraph=True)()
    else:
        with pytest.raises(ValueError, match="max_seqlen_q: expected a bound"):
            call()


def test_unsupported_derivatives_raise():
    Q, D, cu_q, cu_d, _ = arguments(grad=True)
    (grad,) = torch.autograd.grad(finite(lik_ops.maxsim_varlen(Q, D, cu_q, cu_d)), Q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        grad.sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(Q.detach(), torch.ones_like(Q))
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            lik_ops.maxsim_varlen(dual, D, cu_q, cu_d)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda q: lik_ops.maxsim_varlen(q, D, cu_q, cu_d).sum())(Q)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_casts_inputs_to_its_dtype(device):
    Q, D, cu_q, cu_d, w = arguments(device=device)
    with torch.autocast(device, torch.bfloat16):
        scores = varlen(Q, D.bfloat16(), cu_q, cu_d, w.bfloat16())
    expected = varlen(Q.bfloat16(), D.bfloat16(), cu_q, cu_d, w.bfloat16().float())
    torch.testing.assert_close(scores, expected)


def test_profiles_and_subclasses_see_the_operators():
    Q, D, cu_q, cu_d, w = arguments(grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        finite(varlen(Q, D, cu_q, cu_d, w)).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"lik::maxsim_ragged_fwd", "lik::maxsim_ragged_bwd"} <= names
    Wrapper.seen = ()
    wrapped = varlen(Wrapper(Q.detach()), Wrapper(D.detach()), cu_q, cu_d, w.detach())
    assert type(wrapped) is Wrapper
    same_bits(wrapped.inner, varlen(Q, D, cu_q, cu_d, w).detach())
    assert [name for name in Wrapper.seen if name.startswith("lik")] == ["lik.maxsim_ragged_fwd.default"]


@pytest.mark.parametrize("device", DEVICES)
def test_threads(device):
    args = arguments(device=device, grad=True)
    leaves = args[0], args[1], args[4]

    def step(_=None):
        scores = varlen(*args)
        return [scores.detach(), *torch.autograd.grad(finite(scores).sum(), leaves)]

    expected = step()
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(step, range(80)):
            for a, e in zip(found, expected, strict=True):
                same_bits(a, e)


def test_a_checkpoint_policy_can_keep_the_scores():
    Q, D, cu_q, cu_d, w = arguments(grad=True)

    def policy(ctx, op, *args, **kwargs):
        keep = op == torch.ops.lik.maxsim_ragged_fwd.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, x):
        return finite(varlen(q.sin(), x, cu_q, cu_d, w)).sum()

    expected = torch.autograd.grad(block(Q, D), (Q, D))
    for options, times in (({}, 2), ({"context_fn": lambda: create_selective_checkpoint_contexts(policy)}, 1)):
        with Calls() as calls:
            grads = torch.autograd.grad(checkpoint(block, Q, D, use_reentrant=False, **options), (Q, D))
        assert calls.names.count("maxsim_ragged_fwd") == times
        for a, e in zip(grads, expected, strict=True):
            same_bits(a, e)


# Helpers.


@settings(max_examples=20)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_pack_and_unpack_round_trip(lengths):
    sequences = [torch.randn(n, 3, requires_grad=True) for n in lengths]
    packed, cu_seqlens = lik_ops.pack(sequences)
    assert cu_seqlens.dtype == torch.int64 and cu_seqlens.diff().tolist() == lengths
    for x, y in zip(lik_ops.unpack(packed, cu_seqlens.int()), sequences, strict=True):
        same_bits(x, y)
    packed.sum().backward()
    assert all(x.grad.eq(1).all() for x in sequences)
    mask = lik_ops.lengths_to_mask(torch.tensor(lengths), 9)
    assert mask.sum(1).tolist() == lengths and mask.shape == (len(lengths), 9)
    padded_ = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    same_bits(padded_[mask[:, : padded_.shape[1]]], packed)


def test_pack_and_unpack_errors_name_the_argument():
    x = torch.randn(2, 3)
    for call, error, message in (
        (lambda: lik_ops.pack([]), ValueError, "pack: sequences: expected at least one"),
        (lambda: lik_ops.pack([x, x[0]]), ValueError, r"pack: sequences\[1\]: expected \[L, 3\], got \[3\]"),
        (lambda: lik_ops.pack([x, x[:, :2]]), ValueError, r"pack: sequences\[1\]"),
        (lambda: lik_ops.pack([x, x.double()]), TypeError, r"pack: sequences\[1\]: expected the dtype"),
        (lambda: lik_ops.pack([x, x.to("meta")]), ValueError, r"pack: sequences\[1\]: expected the device"),
        (lambda: lik_ops.pack([[1.0]]), TypeError, r"pack: sequences\[0\]: expected a Tensor, got list"),
        (lambda: lik_ops.pack(x.sum()), TypeError, r"pack: sequences: expected a list of tensors .* got a tensor \[\]"),
        (lambda: lik_ops.pack(np.array("x")), TypeError, "pack: sequences: expected a list of tensors .* got ndarray$"),
        (lambda: lik_ops.unpack(x, torch.tensor([0, 3])), ValueError, "unpack: cu_seqlens: expected ascending"),
        (lambda: lik_ops.unpack(x, torch.tensor([0, 2, 1])), ValueError, "unpack: cu_seqlens"),
        (lambda: lik_ops.unpack(x, torch.tensor([-1, 2])), ValueError, "unpack: cu_seqlens"),
        (lambda: lik_ops.unpack(x, torch.tensor([0.0, 2])), TypeError, "unpack: cu_seqlens"),
        (lambda: lik_ops.unpack([1], torch.tensor([0, 2])), TypeError, "unpack: packed"),
        (lambda: lik_ops.unpack(x.sum(), torch.tensor([0, 2])), ValueError, "unpack: packed"),
        (lambda: lik_ops.lengths_to_mask(x, 3), TypeError, "lengths_to_mask: lengths: expected int32 or int64"),
        (lambda: lik_ops.lengths_to_mask([1], 3), TypeError, "lengths_to_mask: lengths"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_register_if_needed_is_marked_as_a_constant_result():
    assert vars(sharding.register_if_needed) == vars(torch.compiler.assume_constant_result(lambda: None))
