"""Test that `lik_ops.retrieve` and `lik::maxsim_topk` are exact, with a fixed order and equal bits for any chunks."""

import itertools
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import lik_ops
from lik_ops import reference
from lik_ops.ops import topk
from lik_ops.portable import backend as portable
from lik_ops.portable.forward import topk as portable_topk

from ..portable.test_portable import peak_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROOT = Path(__file__).resolve().parents[2]


def ranked(scores, k):
    """Return scores and indices in the documented order, one query and one comparison at a time."""

    def key(column, score):
        value = score.item()
        return (0, 0.0, column) if math.isnan(value) else (1, -value, column)

    order = [[j for _, j in sorted((key(j, s), j) for j, s in enumerate(row))][:k] for row in scores]
    indices = torch.tensor(order, dtype=torch.int64).reshape(len(scores), min(k, scores.shape[1])).to(scores.device)
    return scores.gather(1, indices), indices


def bits(x):
    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def assert_same(found, expected):
    """Assert equal indices and equal bits, including the sign of zeros and the payload of NaN."""
    assert torch.equal(found[1], expected[1])
    assert found[0].dtype == expected[0].dtype and torch.equal(bits(found[0]), bits(expected[0]))


def draw(Nq, Nd, Lq, Ld, d, dtype=torch.float32, device="cpu", integers=False):
    def make(*shape):
        x = torch.randint(-2, 3, shape).float() if integers else torch.randn(shape)
        return x.to(device, dtype)

    return make(Nq, Lq, d), make(Nd, Ld, d)


def packed(D, lengths):
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return torch.cat([D.new_empty(0, D.shape[2]), *(x[:n] for x, n in zip(D, lengths, strict=True))]), cu_seqlens


problems = st.fixed_dictionaries(
    {
        "Nq": st.integers(0, 4),
        "Nd": st.integers(0, 40),
        "Lq": st.sampled_from((1, 3, 5, 32, 40)),
        "Ld": st.sampled_from((0, 1, 4, 9, 30)),
        "d": st.sampled_from((1, 3, 8, 17, 64)),
        "dtype": st.sampled_from((torch.float32, torch.float16, torch.bfloat16, torch.float64)),
        "integers": st.booleans(),
    }
)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=max(settings.default.max_examples // 2, 1))
@given(problem=problems, k=st.integers(0, 45), chunk=st.integers(1, 45), options=st.booleans(), seed=st.integers(0, 99))
def test_results_match_sorted_maxsim_for_any_chunk(device, problem, k, chunk, options, seed):
    torch.manual_seed(seed)
    Q, D = draw(**problem, device=device)
    kwargs = {}
    if options:
        kwargs = {
            "q_mask": (torch.rand(Q.shape[:2]) > 0.3).to(device),
            "d_mask": (torch.rand(D.shape[:2]) > 0.6).int().to(device),
            "q_weight": torch.randn(Q.shape[:2], dtype=torch.float64).to(device, topk.score_dtype(Q.dtype)),
            "normalize": True,
        }
    expected = ranked(lik_ops.maxsim(Q, D, **kwargs), k)
    for size in (chunk, None, 1):
        found = lik_ops.retrieve(Q, D, k, chunk=size, **kwargs)
        assert found[0].shape == (Q.shape[0], min(k, D.shape[0])) and found[1].dtype == torch.int64
        assert_same(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=max(settings.default.max_examples // 2, 1))
@given(
    problem=problems,
    k=st.integers(0, 45),
    chunk=st.integers(1, 45),
    masked=st.booleans(),
    data=st.data(),
    host=st.booleans(),
)
def test_packed_documents(device, problem, k, chunk, masked, data, host):
    torch.manual_seed(problem["Nd"])
    Q, D = draw(**problem, device=device)
    each = st.integers(0, D.shape[1])
    lengths = data.draw(st.lists(each, min_size=len(D), max_size=len(D)))
    tokens, cu_seqlens = packed(D, lengths)
    kept = (torch.arange(D.shape[1]) < torch.tensor(lengths, dtype=torch.int64).view(-1, 1)).to(device)
    q_mask = (torch.rand(Q.shape[:2]) > 0.3).to(device) if masked else None
    expected = ranked(lik_ops.maxsim(Q, D, q_mask, kept), k)
    cu_seqlens = cu_seqlens if host else cu_seqlens.to(device)
    for size in (chunk, None):
        assert_same(lik_ops.retrieve(Q, tokens, k, chunk=size, q_mask=q_mask, cu_seqlens_d=cu_seqlens), expected)


SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 5e-324, -5e-324, 1e-45, -1e-45, 3.4e38)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(values=st.lists(st.sampled_from(SPECIAL), max_size=30), k=st.integers(0, 30), cut=st.integers(0, 30))
def test_select_and_merge_order_special_values(device, dtype, values, k, cut):
    scores = torch.tensor([values, values[::-1]], dtype=dtype, device=device)
    expected = ranked(scores, k)
    assert_same(topk.select_first(scores, k), expected)
    cut = min(cut, len(values))
    left, right = topk.select_first(scores[:, :cut], k), topk.select_first(scores[:, cut:], k)
    assert_same(topk.merge_parts([left, (right[0], right[1] + cut)], k), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(n=st.integers(0, 3000), k=st.integers(0, 12), kinds=st.integers(1, 7), seed=st.integers(0, 99))
def test_blockwise_selection_matches_full_sort(device, dtype, n, k, kinds, seed):
    torch.manual_seed(seed)
    special = torch.tensor([float("nan"), float("-inf"), -0.0, 0.0, 1.0, float("inf")], dtype=dtype)
    values = torch.cat([torch.randn(1, dtype=dtype), special])[:kinds]
    scores = torch.where(torch.rand(3, n) < 0.5, values[torch.randint(kinds, (3, n))], torch.randn(3, n).to(dtype))
    scores = scores.to(device)
    found, expected = portable_topk.best(scores, k), portable_topk.select_columns(scores, k)
    assert_same(found, (scores.gather(1, expected), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_k", [1, 10, 200])
@pytest.mark.parametrize("Nq", [1, 100])
def test_chunks_are_as_large_as_the_workspace_allows(monkeypatch, Nq, top_k, dtype):
    """The memory of a chunk is measured. A few more documents would exceed the workspace by the same formula."""
    monkeypatch.setattr(topk, "WORKSPACE_BYTES", 1 << 24)
    Q = torch.empty(Nq, 1, 1, dtype=dtype)
    chunk = topk.count_fitting_documents(Q, top_k, 1 << 40)
    count = partial(portable_topk.estimate_bytes, top_k=top_k, itemsize=dtype.itemsize)
    assert Nq * count(chunk) <= 1 << 24 < Nq * count(chunk + 10)
    scores = torch.randn(Nq, chunk, dtype=dtype)
    assert peak_bytes(lambda: topk.select_first(scores, top_k)) + scores.nbytes <= 1 << 24
    assert topk.count_fitting_documents(Q, top_k, chunk // 2) == chunk // 2


@pytest.mark.parametrize("packed", [False, True])
def test_documents_are_split_at_max_read_bytes_for_many_query_rows(monkeypatch, packed):
    """There are more query rows than one program handles, so 300 documents are scored in three parts."""
    D = torch.randn(300, 4, 8)
    documents, cu_seqlens_d = (D.flatten(0, 1), torch.arange(301) * 4) if packed else (D, None)
    counts = []
    first = topk.select_first
    monkeypatch.setattr(topk, "select_first", lambda scores, k: counts.append(scores.shape[1]) or first(scores, k))

    def search(Lq: int) -> topk.ScoresAndIndices:
        counts.clear()
        Q = torch.randn(2, Lq, 8, generator=torch.Generator().manual_seed(0))
        return lik_ops.retrieve(Q, documents, 10, cu_seqlens_d=cu_seqlens_d)

    expected = search(129)
    assert counts == [300]
    monkeypatch.setattr(topk, "MAX_READ_BYTES", D.nbytes // 3)
    assert_same(search(129), expected)
    assert counts == [100, 100, 100]
    search(128)
    assert counts == [300]


@pytest.mark.parametrize("device", DEVICES)
def test_nan_comes_first_and_documents_without_tokens_last(device):
    D = torch.ones(6, 2, 4, device=device)
    D[3, 1, 0] = math.nan
    d_mask = torch.ones(6, 2, dtype=torch.bool, device=device)
    d_mask[1] = d_mask[4] = False
    for chunk in (None, 1, 4):
        scores, indices = lik_ops.retrieve(torch.ones(3, 4, device=device), D, 9, d_mask=d_mask, chunk=chunk)
        assert indices.tolist() == [3, 0, 2, 5, 1, 4]
        assert scores[0].isnan() and scores[1:].tolist() == [12.0, 12.0, 12.0, -math.inf, -math.inf]


@pytest.mark.parametrize("device", DEVICES)
def test_a_query_without_tokens_finds_the_first_documents(device):
    Q, D = draw(2, 9, 3, 4, 8, device=device)
    q_mask = torch.zeros(2, 3, dtype=torch.bool, device=device)
    scores, indices = lik_ops.retrieve(Q, D, 4, q_mask=q_mask, chunk=2)
    assert not scores.any() and indices.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_two_dimensional_query_drops_its_axis(device):
    Q, D = draw(1, 9, 3, 4, 8, device=device)
    weight, q_mask = torch.rand(1, 3, device=device), torch.tensor([[True, False, True]], device=device)
    whole = lik_ops.retrieve(Q, D, 4, q_mask=q_mask, q_weight=weight)
    flat = lik_ops.retrieve(Q[0], D, 4, q_mask=q_mask[0], q_weight=weight[0])
    assert flat[0].shape == (4,)
    assert_same(flat, (whole[0][0], whole[1][0]))
    assert_same(lik_ops.retrieve(Q[0], D, 4, q_mask=q_mask[0], q_weight=weight[0], progress=True), flat)


def test_wrong_offsets_score_nan():
    Q, D = torch.ones(1, 2, 4), torch.ones(5, 4)
    cu_seqlens = torch.tensor([0, 2, -1, 3, 9, 4, 5])  # documents 1 to 4: descending, from -1, out of range, descending
    scores, indices = lik_ops.retrieve(Q, D, 6, cu_seqlens_d=cu_seqlens)
    assert (
        indices.tolist() == [[1, 2, 3, 4, 0, 5]] and scores.isnan().sum() == 4 and scores[0, 4:].tolist() == [8.0, 8.0]
    )
    assert lik_ops.retrieve(Q, D[:0], 2, cu_seqlens_d=torch.tensor([0, 0]))[0].tolist() == [[-math.inf]]


def test_scores_have_no_gradient():
    Q, D = draw(2, 9, 3, 4, 8)
    scores, _ = lik_ops.retrieve(Q.requires_grad_(), D.requires_grad_(), 3)
    assert not scores.requires_grad
    scores, _ = torch.ops.lik.maxsim_topk(Q, D, None, None, None, None, False, 3, None)
    with pytest.raises(NotImplementedError, match="no gradient"):
        scores.sum().backward()


def test_chunk_size_is_bounded_by_workspace_and_top_k(monkeypatch):
    """With a small workspace chunks are small, and the peak is one chunk instead of ``[Nq, Nd]``."""
    sizes = []
    inner = portable.best
    monkeypatch.setattr(
        portable, "best", lambda scores, *rest: (sizes.append(scores.shape[1]), inner(scores, *rest))[1]
    )
    monkeypatch.setattr(topk, "WORKSPACE_BYTES", 1 << 12)
    Q, D = draw(4, 500, 2, 3, 8)
    expected = ranked(lik_ops.maxsim(Q, D), 5)
    assert_same(lik_ops.retrieve(Q, D, 5), expected)
    assert max(sizes) == (1 << 12) // (4 * portable_topk.BYTES_PER_SCORE[4]) and len(sizes) > 20
    tokens, cu_seqlens = packed(D, [3] * 500)
    assert_same(lik_ops.retrieve(Q, tokens, 5, cu_seqlens_d=cu_seqlens), expected)
    sizes.clear()
    assert_same(lik_ops.retrieve(Q, D, 100), ranked(lik_ops.maxsim(Q, D), 100))
    assert max(sizes) == 200, "a chunk is no smaller than what is kept, and merging sees two of these"


BAD = {
    "Q": (dict(Q=3), TypeError, "retrieve: Q: expected a Tensor"),
    "d": (dict(Q=torch.zeros(2, 3, 7)), ValueError, "D: expected d = 7"),
    "dtype": (dict(Q=torch.zeros(2, 3, 8).half()), TypeError, "D: expected the dtype of Q"),
    "D rank": (dict(D=torch.zeros(2, 5, 4, 8)), ValueError, r"retrieve: D: expected \[Nd, Ld, d\]"),
    "D flat": (dict(D=torch.zeros(5, 8)), ValueError, "with cu_seqlens_d"),
    "D type": (
        dict(D="documents"),
        TypeError,
        "D: expected a Tensor, a list of Tensors, a numpy.ndarray or a Corpus, got str",
    ),
    "top_k": (dict(top_k=-1), ValueError, "top_k: expected 0 or more, got -1"),
    "top_k type": (dict(top_k=2.0), TypeError, "top_k: expected an int, got float"),
    "chunk": (dict(chunk=0), ValueError, "chunk: expected 1 or more, got 0"),
    "chunk type": (dict(chunk=True), TypeError, "chunk: expected an int, got bool"),
    "q_mask": (dict(q_mask=torch.ones(2, 4, dtype=torch.bool)), ValueError, "q_mask: expected shape"),
    "d_mask": (dict(d_mask=torch.ones(9, 5, dtype=torch.bool)), ValueError, "d_mask: expected shape"),
    "cu rank": (dict(cu_seqlens_d=torch.tensor([0, 1])), ValueError, r"D: expected \[Td, d\] with cu_seqlens_d"),
    "cu dtype": (dict(D=torch.zeros(5, 8), cu_seqlens_d=torch.zeros(2)), TypeError, "cu_seqlens_d: expected int32"),
    "cu shape": (
        dict(D=torch.zeros(5, 8), cu_seqlens_d=torch.zeros(0, dtype=torch.int32)),
        ValueError,
        r"cu_seqlens_d: expected \[Nd \+ 1\], got \[0\]",
    ),
    "cu type": (dict(D=torch.zeros(5, 8), cu_seqlens_d=[0, 5]), TypeError, "cu_seqlens_d: expected a Tensor"),
    "packed mask": (
        dict(D=torch.zeros(5, 8), cu_seqlens_d=torch.tensor([0, 5]), d_mask=torch.ones(5, dtype=torch.bool)),
        ValueError,
        "d_mask: expected None next to cu_seqlens_d",
    ),
    "streamed offsets": (
        dict(D=torch.zeros(5, 8), cu_seqlens_d=torch.tensor([0, 6]), progress=True),
        ValueError,
        r"cu_seqlens_d: expected ascending rows of D \[5, 8\], got 6 at \[1\]",
    ),
    "streamed mask": (
        dict(d_mask=torch.ones(10, 4, dtype=torch.bool), progress=True),
        ValueError,
        "d_mask: expected shape",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_wrong_argument(case):
    arguments, error, message = BAD[case]
    Q, D = draw(2, 9, 3, 4, 8)
    with pytest.raises(error, match=message):
        lik_ops.retrieve(**{"Q": Q, "D": D, "top_k": 3, **arguments})


# the graph stack


class Retriever(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(16, 8, bias=False)

    def forward(self, Q, D, d_mask):
        return lik_ops.retrieve(self.projection(Q), D, 3, d_mask=d_mask, normalize=True)


def _retriever_inputs(Nq=3, Nd=7, Lq=4, Ld=6):
    return torch.randn(Nq, Lq, 16), torch.randn(Nd, Ld, 8), torch.rand(Nd, Ld) > 0.3


def test_export_is_one_operator_for_dynamic_sizes():
    Dim = torch.export.Dim
    axes = {0: Dim("Nd", min=3), 1: Dim("Ld")}
    shapes = {"Q": {0: Dim("Nq"), 1: Dim("Lq")}, "D": axes, "d_mask": axes}
    model = Retriever()
    for strict in (False, True):
        program = torch.export.export(model, _retriever_inputs(), dynamic_shapes=shapes, strict=strict)
        for each in (program, program.run_decompositions()):
            assert [str(n.target) for n in each.graph.nodes if "lik" in str(n.target)] == ["lik.maxsim_topk.default"]
            for sizes in ((3, 7, 4, 6), (2, 20, 5, 9), (5, 4, 7, 3)):
                x = _retriever_inputs(*sizes)
                assert_same(each.module()(*x), model(*x))


def test_compiles_fullgraph_for_dynamic_sizes():
    torch._dynamo.reset()
    model = Retriever()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for sizes in ((3, 7, 4, 6), (2, 20, 5, 9), (5, 2, 7, 3)):
        x = _retriever_inputs(*sizes)
        found = compiled(*x)
        assert not found[0].requires_grad
        assert_same(found, model(*x))


def test_vmap_over_queries_and_over_corpora():
    Q, D = torch.randn(3, 2, 4, 8), torch.randn(3, 9, 5, 8)
    retrieve = partial(lik_ops.retrieve, top_k=4)
    one = torch.vmap(retrieve, in_dims=(0, None))(Q, D[0])
    both = torch.vmap(retrieve)(Q, D)
    for i in range(3):
        assert_same((one[0][i], one[1][i]), retrieve(Q[i], D[0]))
        assert_same((both[0][i], both[1][i]), retrieve(Q[i], D[i]))


def test_flops_and_autocast():
    Q, D = draw(2, 9, 3, 4, 8)
    tokens, cu_seqlens = packed(D, [4] * 8 + [2])
    for args, expected in (((Q, D), 2 * 2 * 9 * 3 * 4 * 8), ((Q, tokens), 2 * 2 * 3 * 34 * 8)):
        with FlopCounterMode(display=False) as counter:
            lik_ops.retrieve(*args, 3, cu_seqlens_d=None if args[1].dim() == 3 else cu_seqlens)
        assert counter.get_total_flops() == expected
    with torch.autocast("cpu", torch.bfloat16):
        found = lik_ops.retrieve(Q, D, 3)
        assert_same(lik_ops.retrieve(Q, D.half().numpy(), 3), lik_ops.retrieve(Q, D.half(), 3))
    assert_same(found, lik_ops.retrieve(Q.bfloat16(), D.bfloat16(), 3))


def test_importing_lik_ops_imports_no_extra(tmp_path):
    code = """
import os, sys, torch
before = set(sys.modules)
import lik_ops
found = {name.split(".")[0] for name in set(sys.modules) - before}
assert not found & {"safetensors", "tqdm"}, found
assert not [name for name in set(sys.modules) - before if name.startswith("torch.distributed")]
assert "lik_ops.distributed" not in sys.modules
assert lik_ops.distributed is sys.modules["lik_ops.distributed"]
assert not hasattr(lik_ops, "nothing")
sys.modules["safetensors"] = sys.modules["tqdm"] = None
Q, D = torch.randn(2, 3, 8), torch.randn(9, 4, 8)
lik_ops.retrieve(Q, D, 3, progress=True)
try:
    lik_ops.Corpus.create(sys.argv[1] + "/corpus", 8, torch.float32)
except ModuleNotFoundError as error:
    assert "pip install '.[retrieval]'" in str(error)
    print("named")
assert not os.listdir(sys.argv[1])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.strip() == "named", run.stderr


@pytest.mark.gpu
def test_gpu_retrieval_does_not_synchronize(monkeypatch):
    Q, D = draw(3, 5000, 4, 6, 8, torch.float16, "cuda")
    lik_ops.retrieve(Q, D, 5)
    tokens, cu_seqlens = packed(D.cpu(), [i % 7 for i in range(5000)])
    tokens = tokens.cuda()
    lik_ops.retrieve(Q, tokens, 5, cu_seqlens_d=cu_seqlens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lik_ops.retrieve(Q, D, 5, chunk=100)
        monkeypatch.setattr(topk, "WORKSPACE_BYTES", 1 << 12)
        lik_ops.retrieve(Q, D, 5)
        lik_ops.retrieve(Q, tokens, 5, cu_seqlens_d=cu_seqlens)  # offsets on the CPU
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_graph_replay_matches_eager():
    Q, D = draw(3, 5000, 4, 6, 8, torch.float16, "cuda")
    expected = lik_ops.retrieve(Q, D, 5, chunk=999)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = lik_ops.retrieve(Q, D, 5, chunk=999)
    graph.replay()
    assert_same(found, expected)


def test_results_match_the_reference():
    Q, D = draw(3, 40, 5, 9, 16, torch.float64)
    scores, indices = lik_ops.retrieve(Q, D, 7, chunk=6)
    expected = reference.maxsim(Q, D).sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(scores, expected.values[:, :7])
    assert torch.equal(indices, expected.indices[:, :7])
