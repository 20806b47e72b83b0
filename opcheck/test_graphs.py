"""What the graph stack sees: schemas, exported programs, compiled graphs; as snapshots, so that a change is a decision.

Rewrite the snapshots with ``EXPECTTEST_ACCEPT=1 pytest opcheck/test_graphs.py``.
"""

import io

import expecttest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter
from torch.export import Dim

import lik_ops


class Retriever(torch.nn.Module):
    """A projection, MaxSim and a top-k: what people export."""

    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(16, 8, bias=False)

    def forward(self, Q, D, d_mask):
        scores = torch.ops.lik.maxsim(self.projection(Q), D, None, d_mask, normalize=True)
        best, indices = scores.topk(2, dim=1)
        return best, indices


class Scores(torch.nn.Module):
    def forward(self, Q, D):
        return torch.ops.lik.maxsim(Q, D)


def _targets(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def _retriever_inputs(Nq=3, Nd=5, Lq=4, Ld=6):
    return torch.randn(Nq, Lq, 16), torch.randn(Nd, Ld, 8), torch.rand(Nd, Ld) > 0.2


_DYNAMIC = {
    "Q": {0: Dim("Nq"), 1: Dim("Lq")},
    "D": {0: Dim("Nd"), 1: Dim("Ld")},
    "d_mask": {0: Dim("Nd"), 1: Dim("Ld")},
}


class Snapshots(expecttest.TestCase):
    maxDiff = None

    def test_schemas(self):
        names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("lik::"))
        schemas = [str(getattr(torch.ops.lik, n.split("::")[1]).default._schema) for n in names]
        self.assertExpectedInline(
            "\n".join(schemas),
            """\
lik::maxsim(Tensor Q, Tensor D, Tensor? q_mask=None, Tensor? d_mask=None, *, Tensor? q_weight=None, bool normalize=False, str backward="auto", bool recompute=False) -> Tensor
lik::maxsim_bwd_lowmem(Tensor grad_scores, Tensor Q, Tensor D, Tensor argmax, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, bool[3] needs) -> (Tensor, Tensor, Tensor)
lik::maxsim_bwd_unified(Tensor grad_scores, Tensor Q, Tensor D, Tensor argmax, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, bool[3] needs) -> (Tensor, Tensor, Tensor)
lik::maxsim_fwd(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, ScalarType? argmax_dtype, str backward) -> (Tensor, Tensor)""",
        )

    def test_export_keeps_maxsim_as_one_node(self):
        program = torch.export.export(Scores(), (torch.randn(3, 4, 8), torch.randn(5, 6, 8)))
        self.assertExpectedInline(
            program.graph_module.code.strip(),
            """\
def forward(self, q, d):
    maxsim = torch.ops.lik.maxsim.default(q, d);  q = d = None
    return (maxsim,)""",
        )

    def test_decomposed_export(self):
        program = torch.export.export(Scores(), (torch.randn(3, 4, 8), torch.randn(5, 6, 8)))
        self.assertExpectedInline(
            program.run_decompositions().graph_module.code.strip(),
            """\
def forward(self, q, d):
    maxsim_fwd = torch.ops.lik.maxsim_fwd.default(q, d, None, None, None, False, None, 'auto');  q = d = None
    getitem = maxsim_fwd[0];  maxsim_fwd = None
    return (getitem,)""",
        )

    def test_compiled_training_graphs(self):
        backend = AotEagerAndRecordGraphs()

        def step(Q, D, w):
            return torch.ops.lik.maxsim(Q, D, q_weight=w, normalize=True).logsumexp(1).sum()

        Q, D = torch.randn(3, 4, 8, requires_grad=True), torch.randn(5, 6, 8, requires_grad=True)
        torch.compile(step, backend=backend, fullgraph=True)(Q, D, torch.rand(3, 4)).backward()
        targets = {
            "dynamo": _targets(backend.graphs[0].graph),
            "forward": [t for t in _targets(backend.fw_graphs[0].graph) if t.startswith("lik")],
            "backward": [t for t in _targets(backend.bw_graphs[0].graph) if t.startswith("lik")],
        }
        self.assertExpectedInline(
            "\n".join(f"{k}: {', '.join(v)}" for k, v in targets.items()),
            """\
dynamo: lik.maxsim
forward: lik.maxsim_fwd.default
backward: lik.maxsim_bwd_lowmem.default""",
        )

    def test_error_messages(self):
        Q, D = torch.randn(2, 3, 4), torch.randn(5, 6, 4)
        calls = {
            "rank": lambda: lik_ops.maxsim(Q[None], D),
            "features": lambda: lik_ops.maxsim(Q, D[..., :3]),
            "dtype": lambda: lik_ops.maxsim(Q, D.half()),
            "integers": lambda: lik_ops.maxsim(Q.int(), D.int()),
            "device": lambda: lik_ops.maxsim(Q, D.to("meta")),
            "candidates": lambda: lik_ops.maxsim(Q, D[None]),
            "flat candidates": lambda: lik_ops.maxsim(Q[0], D[None]),
            "mask shape": lambda: lik_ops.maxsim(Q, D, torch.ones(1, 3, dtype=torch.bool)),
            "mask dtype": lambda: lik_ops.maxsim(Q, D, None, torch.ones(5, 6)),
            "weight dtype": lambda: lik_ops.maxsim(Q, D, q_weight=torch.ones(2, 3, dtype=torch.float64)),
            "backward": lambda: lik_ops.maxsim(Q, D, backward="fast"),
            "pairs": lambda: lik_ops.maxsim_pairs(Q, D),
            "no features": lambda: lik_ops.maxsim(Q[..., :0], D[..., :0]),
        }
        lines = []
        for name, call in calls.items():
            with self.assertRaises((ValueError, TypeError)) as raised:
                call()
            lines.append(f"{name}: {type(raised.exception).__name__}: {raised.exception}")
        self.assertExpectedInline(
            "\n".join(lines),
            """\
rank: ValueError: maxsim: Q: expected [Lq, d] or [Nq, Lq, d], got [1, 2, 3, 4]
features: ValueError: maxsim: D: expected d = 4 as in Q [2, 3, 4], got [5, 6, 3]
dtype: TypeError: maxsim: D: expected the dtype of Q, torch.float32, got torch.float16
integers: TypeError: maxsim: Q: expected float16, bfloat16, float32 or float64, got torch.int32
device: ValueError: maxsim: D: expected the device of Q, cpu, got meta
candidates: ValueError: maxsim: D: expected Nq = 2 candidate lists, got [1, 5, 6, 4]
flat candidates: ValueError: maxsim: Q: expected [Nq, Lq, d] beside D [Nq, K, Ld, d], got [3, 4]
mask shape: ValueError: maxsim: q_mask: expected shape [2, 3] to match Q [2, 3, 4], got [1, 3]
mask dtype: TypeError: maxsim: d_mask: expected bool (True = keep) or an integer dtype, got torch.float32
weight dtype: TypeError: maxsim: q_weight: expected torch.float32 for torch.float32 inputs, got torch.float64
backward: ValueError: maxsim: backward: expected one of auto, lowmem, unified, got 'fast'
pairs: ValueError: maxsim_pairs: D: expected B = 2 documents, got [5, 6, 4]
no features: ValueError: maxsim: Q: expected d >= 1, got [2, 3, 0]""",
        )


def _assert_same(program, module, inputs) -> None:
    expected, actual = module(*inputs), program(*inputs)
    for e, a in zip(expected, actual, strict=True):
        assert torch.equal(e, a)


def test_export_with_every_size_dynamic_saves_and_loads():
    module = Retriever()
    for strict in (False, True):
        program = torch.export.export(module, _retriever_inputs(), dynamic_shapes=_DYNAMIC, strict=strict)
        assert "lik.maxsim.default" in _targets(program.graph)
        assert "lik.maxsim_fwd.default" in _targets(program.run_decompositions().graph)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        loaded = torch.export.load(buffer)
        assert "lik.maxsim.default" in _targets(loaded.graph)
        for sizes in ((3, 5, 4, 6), (2, 9, 31, 70), (7, 2, 1, 1), (2, 40_000, 2, 3), (2, 2, 3, 40_000)):
            _assert_same(loaded.module(), module, _retriever_inputs(*sizes))


def test_export_of_training_mode_stays_dynamic_in_Ld():
    """With gradients the winners are kept: their dtype must not tie an export to short documents."""

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8))

        def forward(self, Q, D):
            return torch.ops.lik.maxsim(Q * self.scale, D)

    module = Loss()
    shapes = {"Q": {0: Dim.AUTO}, "D": {0: Dim.AUTO, 1: Dim.AUTO}}
    program = torch.export.export(module, (torch.randn(3, 4, 8), torch.randn(5, 6, 8)), dynamic_shapes=shapes)
    opened = program.run_decompositions()
    Q, D = torch.randn(2, 4, 8), torch.randn(2, 33_000, 8)
    assert torch.equal(opened.module()(Q, D), module(Q, D))


def test_draft_export_finds_nothing_to_report():
    """Every optional argument is given: torch's draft export takes an absent one for a mutated one (2.13)."""

    class Everything(torch.nn.Module):
        def forward(self, Q, D, q_mask, d_mask, q_weight):
            return torch.ops.lik.maxsim(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=True)

    Q, D, d_mask = _retriever_inputs()
    inputs = (Q[..., :8], D, torch.rand(Q.shape[:2]) > 0.2, d_mask, torch.rand(Q.shape[:2]))
    query, document = {0: Dim("Nq"), 1: Dim("Lq")}, {0: Dim("Nd"), 1: Dim("Ld")}
    shapes = {"Q": query, "D": document, "q_mask": query, "d_mask": document, "q_weight": query}
    program = torch.export.draft_export(Everything(), inputs, dynamic_shapes=shapes)
    assert not program._report.failures


def test_compile_fullgraph_dynamic_matches_eager():
    compiled = torch.compile(Retriever().eval(), fullgraph=True, dynamic=True)
    module = compiled._orig_mod
    for sizes in ((3, 5, 4, 6), (2, 9, 31, 70), (7, 2, 8, 3)):
        inputs = _retriever_inputs(*sizes)
        torch.testing.assert_close(tuple(compiled(*inputs)), tuple(module(*inputs)))


def test_compile_does_not_recompile_for_new_sizes():
    counter = CompileCounter()
    compiled = torch.compile(lambda Q, D: lik_ops.maxsim(Q, D), backend=counter, fullgraph=True, dynamic=True)
    for Nq, Nd, Lq, Ld in ((3, 5, 4, 6), (2, 9, 31, 70), (7, 2, 8, 3), (4, 4, 4, 4), (2, 2, 100, 2)):
        compiled(torch.randn(Nq, Lq, 8), torch.randn(Nd, Ld, 8))
    assert counter.frame_count <= 2  # sizes that happen to be equal may be told apart once


def test_compiled_gradients_match_eager():
    def step(Q, D, w, mask):
        return lik_ops.maxsim(Q, D, mask, q_weight=w, normalize=True).logsumexp(1).sum()

    Q, D, w = torch.randn(3, 4, 8), torch.randn(5, 6, 8), torch.rand(3, 4)
    mask = torch.rand(3, 4) > 0.2
    leaves = [t.requires_grad_() for t in (Q, D, w)]
    eager = torch.autograd.grad(step(*leaves, mask), leaves)
    for dynamic in (False, True):
        compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
        for a, e in zip(torch.autograd.grad(compiled(*leaves, mask), leaves), eager, strict=True):
            torch.testing.assert_close(a, e)


def test_symbolic_tracing_keeps_the_operator():
    traced = torch.fx.symbolic_trace(Scores())
    assert torch.ops.lik.maxsim in [node.target for node in traced.graph.nodes]


def test_fake_and_meta_tensors_give_shapes_without_computing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        scores, argmax = lik_ops.maxsim_with_argmax(torch.empty(2, 3, 8), torch.empty(2, 7, 5, 8))
        assert scores.shape == (2, 7) and argmax.shape == (2, 7, 3) and argmax.dtype == torch.int64
    Q, D = torch.empty(10_000, 32, 128, device="meta"), torch.empty(10_000, 300, 128, device="meta")
    assert lik_ops.maxsim(Q, D).shape == (10_000, 10_000)


def test_no_grad_keeps_no_winners():
    """Without gradients nothing but the scores is computed: the graph asks for no argmax."""
    from torch.fx.experimental.proxy_tensor import make_fx

    Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    for grad, expected in ((False, "None"), (True, "torch.int16")):
        graph = make_fx(lambda q, d: torch.ops.lik.maxsim(q, d))(Q.requires_grad_(grad), D).graph
        (node,) = (n for n in graph.nodes if str(n.target) == "lik.maxsim_fwd.default")
        assert str(node.args[6]) == expected
