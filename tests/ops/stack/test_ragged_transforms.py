"""Test ragged operators under `torch.vmap`, batched gradients, and torch's FLOP counter."""

import itertools
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import lik_ops
from lik_ops.ops.stack import batching

from ...support.common import Calls
from ...support.ragged import DEVICES, KINDS, build, same_bits

# torch warns if it loops over an operator without a batching rule.
pytestmark = pytest.mark.filterwarnings("error:.*batching rule.*")

B, Nq, Nd, Tq, Td, d = 3, 3, 4, 9, 14, 8
LONGEST = 6
NAMES = ("Q", "D", "cu_seqlens_q", "d_offsets", "d_lengths", "pairs", "q_mask", "d_mask", "q_weight")
ALL = (True, True, True)
fwd, bwd = torch.ops.lik.maxsim_ragged_fwd, torch.ops.lik.maxsim_ragged_bwd


def each_geometry(kind):
    """Return segments of three samples, with tokens outside queries, invalid segments, and descending bounds."""
    ends = torch.tensor([[0, 2, 2, 8], [1, 4, 10, 9], [3, 5, 1, 3]])
    offsets = torch.tensor([[0, 3, 12, 5], [13, 0, -1, 2], [1, 1, 4, 6]])
    lengths = torch.tensor([[3, 0, 3, 4], [1, 5, 2, -2], [13, 14, 6, 1]])
    if kind == "candidates":
        chosen = torch.tensor([[0, 1], [3, 2], [2, 0]])
        offsets, lengths = offsets[:, chosen], lengths[:, chosen]
    if kind != "pairs":
        return ends, offsets, lengths, None
    pairs = [[0, 0], [2, 3], [1, 1], [0, 0], [2, 0]], [[0, 1], [3, 0], [0, 4], [2, 1], [0, 3]]
    return ends, offsets, lengths, torch.tensor([*pairs, [[0, 0], [2, 2], [-1, 0], [0, -1], [2, 3]]])


def arguments(kind, batched, device="cpu"):
    """Return the operator's tensors, with a leading sample axis for the `batched` ones, and the in_dims."""
    generator = torch.Generator().manual_seed(0)
    Q, D, weight = (torch.randn(B, *s, generator=generator) for s in ((Tq, d), (Td, d), (Tq,)))
    masks = [torch.rand(B, n, generator=generator) > 0.2 for n in (Tq, Td)]
    tensors = [x if x is None else x.to(device) for x in (Q, D, *each_geometry(kind), *masks, weight)]
    args = [x if x is None or i in batched else x[0] for i, x in enumerate(tensors)]
    return args, tuple(0 if i in batched else None for i in range(9))


def subsets(kind, count):
    """Return each tensor alone, each with Q and with D, all tensors, and some other subsets."""
    there = [i for i in range(9) if kind == "pairs" or NAMES[i] != "pairs"]
    found = [(i,) for i in there] + [c for c in itertools.combinations(there, 2) if c[0] < 2] + [tuple(there)]
    rng = random.Random(0)
    return found + [tuple(i for i in there if rng.random() < 0.5) or (0,) for _ in range(count)]


def one_by_one(function, args, in_dims):
    each = [function(*(a if i is None else a[b] for a, i in zip(args, in_dims, strict=True))) for b in range(B)]
    return tuple(torch.stack(outputs) for outputs in zip(*each, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_any_tensors_is_one_call_with_the_same_bits(kind, device):
    """Samples share some tensors and differ in others, including lengths, indices, and argmax."""
    for batched in subsets(kind, 20):
        args, in_dims = arguments(kind, batched, device)
        for argmax_dtype in (None, torch.int32):

            def call(*tensors, argmax_dtype=argmax_dtype):
                return fwd(*tensors, True, argmax_dtype, LONGEST, "auto")

            with Calls() as calls:
                actual = torch.vmap(call, in_dims)(*args)
            assert calls.names == ["maxsim_ragged_fwd"], [NAMES[i] for i in batched]
            for a, e in zip(actual, one_by_one(call, args, in_dims), strict=True):
                same_bits(a, e)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_quantized_documents_has_the_same_bits(kind, device):
    """Samples that share the document tokens run in one call, and other samples run one by one."""

    def call(*tensors):
        return torch.ops.lik.maxsim_quantized_fwd(
            *tensors[:4], "uint8", *(None,) * 3, *tensors[4:], True, torch.int32, LONGEST
        )

    for batched in subsets(kind, 3):
        args, in_dims = arguments(kind, batched, device)
        D = lik_ops.quantize(args[1], "uint8")
        args, in_dims = (args[0], D.data, D.scale, D.minimum, *args[2:]), (in_dims[0], *in_dims[1:2] * 3, *in_dims[2:])
        with Calls() as calls:
            actual = torch.vmap(call, in_dims)(*args)
        shares = not {"D", "d_mask"} & {NAMES[i] for i in batched}
        assert len(calls.names) == (1 if shares else B), [NAMES[i] for i in batched]
        for a, e in zip(actual, one_by_one(call, args, in_dims), strict=True):
            same_bits(a, e)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_vmapped_backwards(kind, device):
    """Upstream gradients differ for each sample, or all samples share one."""
    for batched in subsets(kind, 10):
        args, in_dims = arguments(kind, batched, device)
        scores, argmax = torch.vmap(lambda *t: fwd(*t, True, torch.int16, LONGEST, "auto"), in_dims)(*args)
        upstream = torch.randn_like(scores)
        for needs, shared in ((ALL, False), (ALL, True), ((True, False, False), False), ((False, True, False), False)):

            def call(g, *rest, needs=needs):
                *tensors, winners = rest
                return bwd(g, *tensors, winners, True, False, needs)

            g, dim = (upstream[0], None) if shared else (upstream, 0)
            dims = dim, *in_dims, 0
            with Calls() as calls:
                actual = torch.vmap(call, dims)(g, *args, argmax)
            assert calls.names == ["maxsim_ragged_bwd"]
            for a, e in zip(actual, one_by_one(call, (g, *args, argmax), dims), strict=True):
                torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_vmap_of_the_functions(device):
    Q, D = torch.randn(3, 9, 8, device=device), torch.randn(12, 8, device=device)
    cu_q, cu_d = (torch.tensor(x, device=device) for x in ([0, 4, 9], [0, 5, 5, 12]))
    chosen = torch.tensor([[1, 2], [0, 0], [1, 1]], device=device)
    calls = (
        lambda q: lik_ops.maxsim_varlen(q, D, cu_q, cu_d),
        lambda q: lik_ops.maxsim_pair_list(q, D, chosen, cu_seqlens_q=cu_q, cu_seqlens_d=cu_d),
    )
    for call in calls:
        assert torch.equal(torch.vmap(call)(Q), torch.stack([call(q) for q in Q]))


def test_a_batch_that_copies_too_much_is_computed_one_by_one(monkeypatch):
    calls = []
    real = batching._VmapBatch.run_samples
    monkeypatch.setattr(batching._VmapBatch, "run_samples", lambda *a: calls.append(1) or real(*a))
    monkeypatch.setattr(batching, "MAX_COPIED_BYTES", 100)

    def call(*tensors):
        return fwd(*tensors, False, torch.int32, LONGEST, "auto")

    for kind, batched in (("cross", (0, 1)), ("cross", (0, 6, 8)), ("candidates", (0, 4)), ("pairs", (5,))):
        args, in_dims = arguments(kind, batched)  # nothing to copy
        torch.vmap(call, in_dims)(*args)
    assert not calls
    for kind, batched in (("cross", (6,)), ("cross", (7,)), ("candidates", (1,)), ("pairs", (8,))):
        args, in_dims = arguments(kind, batched)
        for a, e in zip(torch.vmap(call, in_dims)(*args), one_by_one(call, args, in_dims), strict=True):
            same_bits(a, e)
        assert calls.pop() and not calls


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batches_and_nested_vmap(kind):
    args, in_dims = arguments(kind, (0, 2))

    def call(*tensors):
        return fwd(*tensors, False, torch.int32, LONGEST, "auto")

    none = [x if dim is None else x[:0] for x, dim in zip(args, in_dims, strict=True)]
    samples = one_by_one(call, args, in_dims)
    assert [x.shape for x in torch.vmap(call, in_dims)(*none)] == [(0, *x.shape[1:]) for x in samples]
    D = torch.randn(2, Td, d)
    both = torch.vmap(lambda x: torch.vmap(call, in_dims)(args[0], x, *args[2:]))(D)
    for i in range(2):
        for a, e in zip(both, one_by_one(call, (args[0], D[i], *args[2:]), in_dims), strict=True):
            same_bits(a[i], e)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_batched_upstream_gradients(kind, device):
    """`torch.autograd.functional.jacobian(vectorize=True)` does this, and torch runs the samples one by one there."""
    b = build((3, 1, 4), (5, 2, 6, 1), kind, d, torch.float32, device, options=False)
    leaves = [b.Q.requires_grad_(), b.D.requires_grad_()]
    scores = b.call()[0]
    upstream = torch.randn(B, *scores.shape, device=device)
    actual = torch.autograd.grad(scores, leaves, upstream, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(scores, leaves, u, retain_graph=True) for u in upstream]
    for a, e in zip(actual, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(e))


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


Q_LENGTHS, D_LENGTHS = (3, 0, 4), (5, 2, 0, 6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_flops_count_only_scored_token_pairs(kind, device):
    b = build(Q_LENGTHS, D_LENGTHS, kind, d, torch.float32, device, options=False)
    met = [(Q_LENGTHS[i], D_LENGTHS[j]) for _, i, j in b.cells()]
    assert flops(b.call) == sum(2 * d * q * x for q, x in met)
    for leaves, products in (((b.Q,), 1), ((b.D,), 1), ((b.Q, b.D), 2)):
        for x in leaves:
            x.requires_grad_()
        scores = b.call()[0]
        counted = flops(lambda scores=scores, leaves=leaves: torch.autograd.grad(scores.nansum(), leaves))
        assert counted == sum(products * 2 * d * q for q, _ in met)
        for x in leaves:
            x.requires_grad_(False)


def test_flops_of_packed_documents_match_dense_documents():
    Q, D, cu = torch.randn(2, 3, d), torch.randn(4, 5, d), torch.arange(5) * 5
    dense = flops(lambda: lik_ops.maxsim(Q, D))
    assert flops(lambda: lik_ops.maxsim_varlen(Q, D.flatten(0, 1), None, cu)) == dense
    pairs = torch.tensor([[0, 1], [1, 3], [0, 1]])
    assert flops(lambda: lik_ops.maxsim_pair_list(Q, D, pairs)) == 3 * dense // 8


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_segments_count_no_flops(kind):
    """Segments, indices, and queries with a NaN score count no FLOPs."""
    (Q, D, ends, offsets, lengths, pairs, *_), _ = arguments(kind, range(9))
    for sample in range(B):
        geometry = [x if x is None else x[sample] for x in (ends, offsets, lengths, pairs)]
        tensors = (Q[sample], D[sample], *geometry, None, None, None)
        counted = flops(lambda tensors=tensors: fwd(*tensors, False, None, 4, "auto"))
        cu = geometry[0].tolist()
        queries = [b - a if 0 <= a <= b <= Tq else 0 for a, b in itertools.pairwise(cu)]
        documents = geometry[2].clone()
        documents[(geometry[1] < 0) | (geometry[2] < 0) | (geometry[1] + geometry[2] > Td)] = 0
        if kind == "cross":
            expected = sum(queries) * int(documents.sum())
        elif kind == "candidates":
            expected = sum(q * int(own.sum()) for q, own in zip(queries, documents, strict=True))
        else:
            inside = [(i, j) for i, j in geometry[3].tolist() if 0 <= i < Nq and 0 <= j < Nd]
            expected = sum(queries[i] * int(documents[j]) for i, j in inside if queries[i] <= 4)
        assert counted == 2 * d * expected


@pytest.mark.parametrize("kind", KINDS)
def test_flops_of_fake_tensors_are_the_maximum(kind):
    """Fake tensors have no values. The maximum is exact if every document is scored against every query."""
    b = build(Q_LENGTHS, D_LENGTHS, kind, d, torch.float32, options=False)
    tokens, document_tokens, longest = sum(Q_LENGTHS), sum(D_LENGTHS), max(Q_LENGTHS)
    rows = {"cross": tokens * 4, "candidates": tokens * 5, "pairs": 20 * longest}[kind]
    real, tensors = flops(b.call), b.ragged()
    with FakeTensorMode() as mode:
        fakes = [x if x is None else mode.from_tensor(x) for x in tensors]
        call = lambda: fwd(*fakes, False, torch.int32, longest, "auto")  # noqa: E731
        products = tokens * document_tokens if kind == "cross" else rows * document_tokens
        assert flops(call) == 2 * d * products >= real
        scores, argmax = call()
        counted = flops(lambda: bwd(scores, *fakes, argmax, False, False, [True, True, False]))
        assert counted == 2 * 2 * d * rows
