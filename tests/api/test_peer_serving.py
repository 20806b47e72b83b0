"""Test serving behaviors that other MaxSim libraries get wrong or pin in their tests: see `test_peer_behaviors`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.functional import normalize as normalized

import lik_ops
from lik_ops import reference
from lik_ops.portable.forward import packed

from ..portable.test_portable import peak_bytes
from ..support.ragged import DEVICES, INF, NAN
from .test_peer_behaviors import entry_points

MiB = 1 << 20


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def draw(device, *shapes, dtype=torch.float32):
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


# Defects: PyTorch and serving.


def test_defect_fake_tensor_calls_do_not_break_eager_calls():
    """A call under FakeTensorMode breaks later calls of a peer."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    Q, D = draw("cpu", (2, 3, 8), (4, 5, 8))
    with FakeTensorMode() as mode:
        entry_points(mode.from_tensor(Q), mode.from_tensor(D))
    for scores in entry_points(Q, D).values():
        torch.testing.assert_close(scores, reference.maxsim(Q, D))


@pytest.mark.parametrize("name", ["maxsim", "maxsim_varlen", "maxsim_with_argmax"])
def test_defect_inference_calls_compile_without_graph_break(name):
    torch.compiler.reset()
    Q, D = draw("cpu", (1, 3, 8), (2, 5, 8))
    function = getattr(lik_ops, name)
    with torch.no_grad():
        compiled = torch.compile(lambda q, x: function(q, x), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(Q, D), function(Q, D), rtol=0, atol=0)


def test_defect_import_creates_no_cuda_context():
    code = "import torch, lik_ops; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_defect_scores_have_the_same_bits_in_every_batch(device):
    """Peers switch kernels near 500 pairs, which changes the bits."""
    Q, D = draw(device, (1, 32, 16), (700, 20, 16))
    for name, scores in entry_points(Q, D).items():
        for count in (1, 499, 501):
            assert torch.equal(entry_points(Q, D[:count])[name], scores[:, :count]), (name, count)


@pytest.mark.gpu
def test_defect_ragged_calls_capture_in_a_cuda_graph():
    """Peers copy lengths to the host at every call."""
    Q, D = draw("cuda", (6, 16), (20, 16))
    cu_q, cu_d = (torch.tensor(x, device="cuda") for x in ([0, 2, 6], [0, 5, 5, 20]))
    pairs = torch.tensor([[0, 2], [1, 0]], device="cuda")

    def step():
        scores = lik_ops.maxsim_varlen(Q, D, cu_q, cu_d)
        return scores, lik_ops.maxsim_pair_list(Q, D, pairs, cu_seqlens_q=cu_q, cu_seqlens_d=cu_d)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for x in found:
        x.zero_()
    graph.replay()
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["cross", "pairs"])
def test_defect_varlen_costs_the_sum_of_lengths(kind, monkeypatch):
    """Peers loop to the longest document or the next power of two. One long document would cost 50 times as much."""
    computed = []
    original = packed.run_forward

    def run(layout, normalize):
        computed.append(layout.pairs.numel() * layout.Q.shape[2] * layout.D.shape[2])
        return original(layout, normalize)

    monkeypatch.setattr(packed, "run_forward", run)
    lengths = torch.tensor([4000, *(n % 37 + 1 for n in range(400))])
    Q, D = draw("cpu", (4, 32, 128), (int(lengths.sum()), 128))
    cu_d = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    if kind == "cross":
        lik_ops.maxsim_varlen(Q, D, None, cu_d)
    else:
        pairs = torch.cartesian_prod(torch.arange(4), torch.arange(401))
        lik_ops.maxsim_pair_list(Q, D, pairs, cu_seqlens_d=cu_d)
    least = Q.shape[0] * Q.shape[1] * int(lengths.sum())
    assert least <= sum(computed) < 1.5 * least


def test_defect_no_hidden_copies():
    """Peers copy bf16 and strided corpora, and corpora with d = 96."""
    wide = torch.randn(400_000, 192).bfloat16()
    Q, D = torch.randn(1, 4, 96).bfloat16(), wide[:, :96]
    cu_d = torch.arange(0, 400_001, 100)
    assert D.numel() * 2 > 70 * MiB
    for call in (
        lambda: lik_ops.maxsim_varlen(Q, D, None, cu_d),
        lambda: lik_ops.maxsim_candidates_varlen(Q, D, cu_d[None, :-1], cu_d.diff()[None]),
        lambda: lik_ops.maxsim(Q, D.unflatten(0, (4000, 100))),
        lambda: lik_ops.maxsim(Q, torch.nested.nested_tensor_from_jagged(D, cu_d)),
    ):
        assert peak_bytes(call) < 33 * MiB


# Behaviors that a peer's own tests pin.


@pytest.mark.parametrize(
    "dtype, rtol", [(torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 3e-2)], ids=["fp32", "fp16", "bf16"]
)
def test_pinned_scores_are_fp32_and_close_to_the_reference(dtype, rtol, device):
    tokens = draw(device, (3, 7, 24), (4, 33, 24))
    expected = reference.maxsim(*tokens)
    for name, scores in entry_points(*(t.to(dtype) for t in tokens)).items():
        assert scores.dtype == torch.float32 and scores.device == tokens[0].device, name
        torch.testing.assert_close(scores, expected, rtol=rtol, atol=10 * rtol)


def test_pinned_nan_query_tokens_affect_only_their_query(device):
    """The peer's scores are -inf. Here they are NaN, as in PyTorch, and the backward through NaN stays non-finite."""
    Q, D = draw(device, (3, 4, 8), (2, 5, 8))
    Q[1, 2, 3] = NAN
    D.requires_grad_()
    for name, scores in entry_points(Q, D).items():
        assert scores.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2], name
        (grad,) = torch.autograd.grad(scores[1].sum(), D)
        assert not grad.isfinite().all(), name


def test_pinned_infinities_score_infinity(device):
    Q, D = torch.ones(2, 3, 4, device=device), torch.ones(2, 5, 4, device=device)
    D[1, 2, 0] = INF
    for name, scores in entry_points(Q, D).items():
        assert scores.tolist() == [[12.0, INF]] * 2, name


def test_pinned_argmax_is_the_first_of_identical_tokens(device):
    Q, D = torch.ones(2, 3, 4, device=device), torch.ones(2, 70, 4, device=device)
    assert lik_ops.maxsim_with_argmax(Q, D)[1].eq(0).all()
    assert lik_ops.maxsim_varlen_with_argmax(Q, D)[1].eq(0).all()
    lengths = torch.tensor([2, 3], device=device), torch.full((2, 1), 70, device=device)
    argmax = lik_ops.maxsim_padded_with_argmax(Q, D[:, None], *lengths)[1]
    assert argmax.tolist() == [[[0, 0, -1]], [[0, 0, 0]]]  # the peer's argmax is 0 for padding


def test_pinned_argmax_matches_torch(device):
    Q, D = draw(device, (3, 4, 8), (5, 40, 8))
    expected = torch.einsum("isd,jtd->ijst", Q.double(), D.double()).argmax(-1)
    assert torch.equal(lik_ops.maxsim_with_argmax(Q, D)[1], expected)
    assert torch.equal(lik_ops.maxsim_varlen_with_argmax(Q, D)[1], expected)


def test_pinned_garbage_past_the_lengths_changes_nothing(device):
    Q, D = draw(device, (2, 6, 8), (2, 3, 9, 8))
    lengths = torch.tensor([6, 2], device=device), torch.tensor([[9, 1, 0], [3, 4, 9]], device=device)
    expected = lik_ops.maxsim_padded(Q, D, *lengths)
    rest = [~lik_ops.lengths_to_mask(n, x.shape[-2]) for n, x in zip(lengths, (Q, D), strict=True)]
    for garbage in (1e4, -1e4, NAN):
        Q[rest[0]], D[rest[1]] = garbage, garbage
        torch.testing.assert_close(lik_ops.maxsim_padded(Q, D, *lengths), expected, rtol=0, atol=0)


def test_pinned_pair_list_with_shared_ids_matches_reference(device):
    q_lengths, d_lengths = (1, 1024, 7, 80), (1, 333, 1024, 16, 64)
    queries, documents = ([torch.randn(n, 8, device=device) for n in lengths] for lengths in (q_lengths, d_lengths))
    pairs = [[0, 0], [1, 2], [1, 2], [3, 2], [0, 2], [2, 0], [1, 1]]
    scores = lik_ops.maxsim_pair_list(queries, documents, torch.tensor(pairs, device=device))
    expected = [reference.maxsim(queries[i].double(), documents[j].double()) for i, j in pairs]
    torch.testing.assert_close(scores.double(), torch.stack(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("Ld", [1, 16, 17, 32, 33, 48, 64, 65])
def test_pinned_scores_are_exact_around_tile_sizes(Ld, device):
    """Lq, B, and C are 1, and d is 8, 24, and 96."""
    for d in (8, 24, 96):
        Q, D = torch.randint(-2, 3, (1, 1, d), device=device), torch.randint(-2, 3, (1, Ld, d), device=device)
        expected = reference.maxsim(Q.float(), D.float())
        for name, scores in entry_points(Q.float(), D.float()).items():
            assert torch.equal(scores, expected), (name, d)


def test_pinned_no_pairs_give_no_scores(device):
    """An empty segment raises an error in the peer and scores -inf here."""
    Q, D = draw(device, (2, 3, 8), (4, 5, 8))
    scores = lik_ops.maxsim_pair_list(Q, D, torch.empty(0, 2, dtype=torch.int64, device=device))
    assert scores.shape == (0,) and scores.dtype == torch.float32
    assert lik_ops.maxsim(Q, [D[0, :0]]).eq(-INF).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pinned_gradients_match_reference_autograd(dtype, device):
    """Upstream gradients are random or zero. Zeros give exact zeros, and gradients have the dtype of their input."""
    Q, D = (torch.randint(-2, 3, shape, device=device).to(dtype) for shape in ((3, 7, 16), (4, 33, 16)))
    leaves = [Q.requires_grad_(), D.requires_grad_()]
    upstream = torch.randn(3, 4, device=device)
    twins = [t.detach().float().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(reference.maxsim(*twins), twins, upstream)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 6e-2}[dtype]
    for name, scores in entry_points(*leaves).items():
        found = torch.autograd.grad(scores, leaves, upstream, retain_graph=True)
        for g, e in zip(found, expected, strict=True):
            assert g.dtype == dtype, name
            torch.testing.assert_close(g.float(), e, rtol=tolerance, atol=tolerance)
        assert all(g.eq(0).all() for g in torch.autograd.grad(scores, leaves, torch.zeros_like(scores))), name


@pytest.mark.parametrize("name", ["maxsim", "maxsim_varlen", "lists"])
def test_pinned_contrastive_loss_falls_like_the_reference(name, device):
    """The loss falls by a factor above 1.3 in 50 steps, and 200 steps leak no memory."""
    start = [torch.randn(8, length, 16, device=device) for length in (6, 20)]
    labels = torch.arange(8, device=device)

    def curve(function, steps=50):
        Q, D = (t.clone().requires_grad_() for t in start)
        optimizer = torch.optim.SGD([Q, D], lr=1.0)
        losses = []
        for _ in range(steps):
            loss = cross_entropy(function(normalized(Q, dim=-1), normalized(D, dim=-1)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    function = (lambda q, x: lik_ops.maxsim(list(q), list(x))) if name == "lists" else getattr(lik_ops, name)
    losses = curve(function)
    assert losses[0] > 1.3 * losses[-1]
    torch.testing.assert_close(losses, curve(reference.maxsim), rtol=1e-2, atol=1e-3)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        curve(function, 200)
        assert torch.cuda.memory_allocated() - before < 20 * MiB


def test_pinned_autocast(device):
    Q, D = draw(device, (3, 7, 16), (4, 33, 16))
    expected = entry_points(Q.bfloat16(), D.bfloat16())
    with torch.autocast(device, torch.bfloat16):
        found = entry_points(Q, D)
    for name, scores in found.items():
        torch.testing.assert_close(scores, expected[name], rtol=1e-3, atol=1e-3)


NAMED = [
    ("Q", lambda Q, D, cu, pairs: (Q[0], D, cu, pairs), "rank"),
    ("D", lambda Q, D, cu, pairs: (Q, D[:, :7], cu, pairs), "d"),
    ("D", lambda Q, D, cu, pairs: (Q, D.half(), cu, pairs), "dtype"),
    ("D", lambda Q, D, cu, pairs: (Q, D.to("meta"), cu, pairs), "device"),
    ("Q", lambda Q, D, cu, pairs: (Q[:, :0], D[:, :0], cu, pairs), "d of 0"),
    ("cu_seqlens_q", lambda Q, D, cu, pairs: (Q, D, cu.float(), pairs), "no integers"),
    ("cu_seqlens_q", lambda Q, D, cu, pairs: (Q, D, cu.flip(0), pairs), "decreasing offsets"),
    ("cu_seqlens_q", lambda Q, D, cu, pairs: (Q, D, cu + 1, pairs), "offsets beyond the tokens"),
    ("cu_seqlens_q", lambda Q, D, cu, pairs: (Q, D, cu - 1, pairs), "negative offsets"),
    ("pairs", lambda Q, D, cu, pairs: (Q, D, cu, pairs + 2), "query ids"),
    ("pairs", lambda Q, D, cu, pairs: (Q, D, cu, pairs - 1), "negative ids"),
]


@pytest.mark.parametrize("name, change, what", NAMED, ids=[what for *_, what in NAMED])
def test_pinned_errors_name_their_argument(name, change, what, device):
    """Offsets that omit rows at either end raise an error in the peer. Here these rows belong to no segment."""
    Q, D = draw(device, (6, 8), (9, 8))
    cu, cu_d = torch.tensor([0, 2, 6], device=device), torch.tensor([0, 4, 9], device=device)
    pairs = torch.tensor([[0, 1], [1, 0]], device=device)

    def call(Q, D, cu_q, pairs, **options):
        return lik_ops.maxsim_pair_list(Q, D, pairs, cu_seqlens_q=cu_q, cu_seqlens_d=cu_d, **options)

    with lik_ops.checks():
        call(Q, D, cu, pairs)
        with pytest.raises((TypeError, ValueError), match=f"^maxsim_pair_list: {name}: expected"):
            call(*change(Q, D, cu, pairs))
        with pytest.raises(ValueError, match=r"^maxsim_pair_list: max_seqlen_q: expected a bound"):
            call(Q, D, cu, pairs, max_seqlen_q=3)
