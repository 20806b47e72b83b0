"""Test that a process without compilation does not import `torch._dynamo`, which costs seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import functools, sys, tempfile
import lik_ops

draw = functools.partial(torch.randn, device=DEVICE)
Q, D, C = draw(2, 3, 8, requires_grad=True), draw(4, 5, 8, requires_grad=True), draw(2, 2, 5, 8)
one_each = draw(2, 5, 8)
w = torch.ones(2, 3, device=DEVICE)
q_mask, d_mask = torch.ones_like(w, dtype=torch.bool), torch.ones(4, 5, dtype=torch.bool, device=DEVICE)
PQ, cu_q = lik_ops.pack([draw(3, 8), draw(2, 8)])
PD, cu_d = lik_ops.pack([draw(n, 8) for n in (5, 1, 4)])
PQ.requires_grad_()
offsets, lengths = cu_d[:-1].expand(2, 3).contiguous(), cu_d.diff().expand(2, 3).contiguous()
numbers = [[0, 1], [1, 2]], [3, 1], [[5, 2], [0, 4]]
pairs, n_q, n_d = (torch.tensor(x, device=DEVICE) for x in numbers)
cut = {"cu_seqlens_q": cu_q, "cu_seqlens_d": cu_d}
CODEC = lik_ops.ResidualCodec(*(x.to(DEVICE) for x in (torch.eye(8), torch.tensor([-0.1, 0.1]), torch.zeros(1))))
listed = {"cu_seqlens_q": cu_q}


def checked():
    with lik_ops.checks():
        lik_ops.maxsim_varlen(PQ, PD, cu_q, cu_d)


def quiet():
    with lik_ops.norm_warning(False):
        lik_ops.maxsim_varlen(PQ, PD, cu_q, cu_d)


def chosen():
    with lik_ops.use_backend("portable"):
        lik_ops.maxsim_varlen(PQ, PD, cu_q, cu_d)


def searched():
    with tempfile.TemporaryDirectory() as directory:
        corpus = lik_ops.Corpus.create(directory + "/corpus", d=8, dtype=torch.float32)
        corpus.append([draw(n, 8) for n in (3, 0, 7)])
        lik_ops.retrieve(Q.detach(), corpus, 2)
        lik_ops.retrieve(Q.detach(), corpus.quantize(directory + "/small"), 2)


def indexed():
    codes = lik_ops.quantize(PD.detach(), lik_ops.ResidualCodec.train(PD.detach(), 2))
    with tempfile.TemporaryDirectory() as directory:
        lik_ops.write_index(directory, lik_ops.Index(codes, cu_d))
        return lik_ops.retrieve(Q.detach().cpu(), lik_ops.read_index(directory), 2)[0]


CALLS = {
    "maxsim": lambda: lik_ops.maxsim(Q, D, q_mask, d_mask, q_weight=w),
    "maxsim, recompute": lambda: lik_ops.maxsim(Q, D, recompute=True, backward="unified"),
    "torch.ops.lik.maxsim": lambda: torch.ops.lik.maxsim(Q, D),
    "a list": lambda: lik_ops.maxsim(Q, [draw(5, 8), draw(2, 8)]),
    "maxsim_with_argmax": lambda: lik_ops.maxsim_with_argmax(Q, D)[0],
    "maxsim_pairs": lambda: lik_ops.maxsim_pairs(Q, one_each),
    "maxsim_varlen": lambda: lik_ops.maxsim_varlen(PQ, PD, cu_q, cu_d),
    "maxsim_varlen_with_argmax": lambda: lik_ops.maxsim_varlen_with_argmax(PQ, PD, cu_q, cu_d)[0],
    "maxsim_candidates_varlen": lambda: lik_ops.maxsim_candidates_varlen(PQ, PD, offsets, lengths, **listed),
    "maxsim_candidates_varlen_with_argmax": lambda: lik_ops.maxsim_candidates_varlen_with_argmax(
        PQ, PD, offsets, lengths, **listed
    )[0],
    "maxsim_pair_list": lambda: lik_ops.maxsim_pair_list(PQ, PD, pairs, max_seqlen_q=3, **cut),
    "maxsim_pair_list_with_argmax": lambda: lik_ops.maxsim_pair_list_with_argmax(
        PQ, PD, pairs, max_seqlen_q=3, **cut
    )[0],
    "maxsim_padded": lambda: lik_ops.maxsim_padded(Q, C, n_q, n_d),
    "maxsim_padded_with_argmax": lambda: lik_ops.maxsim_padded_with_argmax(Q, C, n_q, n_d)[0],
    "retrieve": lambda: lik_ops.retrieve(Q.detach(), D.detach(), 2)[0],
    "retrieve, packed": lambda: lik_ops.retrieve(Q.detach(), PD, 2, cu_seqlens_d=cu_d)[0],
    "torch.ops.lik.maxsim_topk": lambda: torch.ops.lik.maxsim_topk(
        Q.detach(), D.detach(), None, None, None, None, False, 2, None
    )[0],
    "retrieve, lowest": lambda: lik_ops.retrieve(Q.detach(), D.detach(), 2, largest=False)[0],
    "plaid_approx_score": lambda: lik_ops.plaid_approx_score(Q.detach(), lik_ops.quantize(D.detach(), CODEC)),
    "maxsim_streamed": lambda: lik_ops.maxsim_streamed(Q.detach(), D.detach()),
    "maxsim_token_topk": lambda: lik_ops.maxsim_token_topk(Q, D, 2),
    "maxsim_from_hidden": lambda: lik_ops.maxsim_from_hidden(Q, D, torch.eye(8, device=DEVICE)),
    "maxsim_xtr": lambda: lik_ops.maxsim_xtr(Q, D, 2),
    "maxsim_cross_entropy": lambda: lik_ops.maxsim_cross_entropy(Q, D, n_q * 0),
    "maxsim_soft": lambda: lik_ops.maxsim_soft(Q, D, 0.1),
    "pool_tokens": lambda: lik_ops.pool_tokens(D, 2)[0],
    "chamfer_distance": lambda: lik_ops.chamfer_distance(Q, Q + 1),
    "similarity_map": lambda: lik_ops.similarity_map(Q[0], D[0]),
    "MaxSimScorer": lambda: lik_ops.MaxSimScorer()(Q, D),
    "warmup": lambda: lik_ops.warmup(DEVICE, torch.float32, 8, 3, training=True, ragged=True),
    "checks": checked,
    "norm_warning": quiet,
    "use_backend": chosen,
    "Corpus and retrieve": searched,
    "lengths_to_mask": lambda: lik_ops.lengths_to_mask(n_q, 3),
    "pack_padded": lambda: lik_ops.pack_padded(Q, C, n_q, n_d)[0],
    "unpack": lambda: lik_ops.unpack(PD, cu_d)[0],
    "quantize": lambda: lik_ops.maxsim(Q.detach(), lik_ops.quantize(D)),
    "Quantized": lambda: lik_ops.Quantized(D.detach().char(), D[..., 0].detach(), "int8", 8, D.dtype).dequantize(),
    "indexes": indexed,
    "retrieve, two stages": lambda: lik_ops.retrieve(Q.detach(), D.detach(), 2, coarse=lik_ops.quantize(D))[0],
    "reference": lambda: lik_ops.reference.maxsim(Q, D),
}
for name, call in CALLS.items():
    for number in range(CALLS_OF_EACH):
        before = set(sys.modules)
        scores = call()
        if isinstance(scores, torch.Tensor) and scores.requires_grad:
            scores.nan_to_num(neginf=0).sum().backward()
        new = sorted(set(sys.modules) - before)
        if HEAVY & set(sys.modules):
            sys.exit(f"call {number} of {name} imports {HEAVY & set(sys.modules)}")
        if number and new:
            sys.exit(f"call {number} of {name} imports {new}")
"""
# Runs after these calls, in the same process. Dynamo inspects every frame while the operator runs.
LATER = """
print("called", flush=True)
Q, D, cu = torch.randn(3, 8), torch.randn(5, 8), torch.tensor([0, 3])
arguments = Q, D, cu, torch.tensor([0]), torch.tensor([5]), *[None] * 4, False, None, 3, "auto"
expected = torch.ops.lik.maxsim_ragged_fwd(*arguments)[0]
graphs = []


def backend(module, _):
    graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
    return module


@torch._dynamo.disable(recursive=False)
def left_alone(x):
    return torch.ops.lik.maxsim_ragged_fwd(*arguments)[0] if x.sum() < 0 else x


x = -torch.ones(1)
for _ in range(2):
    found = torch.compile(lambda x: left_alone(x * 2) + 1, backend=backend)(x)
    assert torch.equal(found, expected + 1)
assert len(graphs) == 2 and not any("lik" in str(graph) for graph in graphs), graphs
print("compiled")
"""
PREAMBLE = """
import sys
import torch

HEAVY, CALLS_OF_EACH, DEVICE = {"torch._dynamo", "sympy", "torch.distributed.fsdp"}, 4, "cpu"
"""
# Host code of sm_90 without launches, for the host part of a GPU call. Results are arbitrary, so calls that read
# results on the host are excluded.
STUBBED = """
from benchmarks.calls import without_gpu

without_gpu.install()
"""
KEPT = """
for name in ("Corpus and retrieve", "indexes", "plaid_approx_score", "retrieve, two stages", "warmup"):
    del CALLS[name]
"""


def start_calls(preamble: str, kept: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    script = SCRIPT.replace("for name, call in CALLS.items():", kept + "for name, call in CALLS.items():")
    return subprocess.run([sys.executable, "-c", preamble + script + after], cwd=ROOT, capture_output=True, text=True)


def run_calls(preamble: str, kept: str = "") -> None:
    run = start_calls(preamble, kept)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.fixture(scope="module")
def portable_calls() -> subprocess.CompletedProcess[str]:
    """Return a process that made all calls, and then compiled."""
    return start_calls(PREAMBLE, after=LATER)


def test_no_call_imports_dynamo_and_later_calls_import_nothing(portable_calls):
    assert "called" in portable_calls.stdout.split(), portable_calls.stderr[-2000:]
    import lik_ops

    for name in lik_ops.__all__:
        assert name in ("export", "__version__") or f"lik_ops.{name}" in SCRIPT, f"{name} is not called"


def test_no_call_of_the_triton_backend_imports_dynamo():
    """The second call of a dispatch key is captured, and the third is replayed."""
    pytest.importorskip("triton", reason="only the Triton backend records calls")
    run_calls(PREAMBLE + STUBBED, KEPT)


@pytest.mark.gpu
def test_no_call_on_a_gpu_imports_dynamo():
    run_calls(PREAMBLE.replace('"cpu"', '"cuda"'))


def test_dynamo_imported_later_does_not_trace_operator_bodies(portable_calls):
    """The call runs while Dynamo inspects every frame, and Dynamo must find no operator body to compile."""
    assert portable_calls.returncode == 0, portable_calls.stderr[-2000:]
    assert portable_calls.stdout.split() == ["called", "compiled"]
