"""Snapshots of exported programs and compiled graphs, so that every change is a decision.

Rewrite the snapshots with ``EXPECTTEST_ACCEPT=1 pytest opcheck/tests/test_graphs.py``.
"""

import io

import expecttest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.export import Dim

import lik_ops


class Retriever(torch.nn.Module):
    """A projection, MaxSim and a top-k, a typical module to export."""

    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(16, 8, bias=False)

    def forward(self, Q, D, d_mask):
        """Return the best scores and their documents."""
        scores = torch.ops.lik.maxsim(self.projection(Q), D, None, d_mask, normalize=True)
        best, indices = scores.topk(2, dim=1)
        return best, indices


class Scores(torch.nn.Module):
    """A module that only computes MaxSim."""

    def forward(self, Q, D):
        """Return the scores."""
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
    """Tests that compare text with expected text in this file."""

    maxDiff = None

    def test_export_keeps_maxsim_as_one_node(self):
        """Check that an exported program has one node."""
        program = torch.export.export(Scores(), (torch.randn(3, 4, 8), torch.randn(5, 6, 8)))
        self.assertExpectedInline(
            program.graph_module.code.strip(),
            """\
def forward(self, q, d):
    maxsim = torch.ops.lik.maxsim.default(q, d);  q = d = None
    return (maxsim,)""",
        )

    def test_decomposed_export(self):
        """Check that decomposition gives `lik::maxsim_fwd`."""
        program = torch.export.export(Scores(), (torch.randn(3, 4, 8), torch.randn(5, 6, 8)))
        self.assertExpectedInline(
            program.run_decompositions().graph_module.code.strip(),
            """\
def forward(self, q, d):
    maxsim_fwd = torch.ops.lik.maxsim_fwd.default(q, d, None, None, None, False, None, 'auto');  q = d = None
    getitem = maxsim_fwd[0];  maxsim_fwd = None
    return (getitem,)""",
        )

    def test_retriever_graphs(self):
        """Check the graphs of a module with other operators and dynamic sizes."""
        program = torch.export.export(Retriever(), _retriever_inputs(), dynamic_shapes=_DYNAMIC)
        self.assertExpectedInline(
            program.graph_module.code.strip(),
            """\
def forward(self, p_projection_weight, q, d, d_mask):
    linear = torch.ops.aten.linear.default(q, p_projection_weight);  q = p_projection_weight = None
    maxsim = torch.ops.lik.maxsim.default(linear, d, None, d_mask, normalize = True);  linear = d = d_mask = None
    topk = torch.ops.aten.topk.default(maxsim, 2, 1);  maxsim = None
    getitem = topk[0]
    getitem_1 = topk[1];  topk = None
    return (getitem, getitem_1)""",
        )
        with torch.no_grad():
            opened = program.run_decompositions()
        # Only targets are compared, because versions of torch number the nodes differently.
        self.assertExpectedInline(
            "\n".join(_targets(opened.graph)),
            """\
aten.sym_size.int
aten.sym_size.int
aten.permute.default
<built-in function mul>
aten.view.default
aten.mm.default
aten.view.default
lik.maxsim_fwd.default
<built-in function getitem>
aten.topk.default
<built-in function getitem>
<built-in function getitem>""",
        )

    def test_compiled_training_step_graphs(self):
        """Check the graphs from Dynamo and AOTAutograd."""
        backend = AotEagerAndRecordGraphs()

        def step(Q, D, d_mask, w):
            return lik_ops.maxsim(Q, D, None, d_mask, q_weight=w, normalize=True).sum()

        Q, D, d_mask = _retriever_inputs()
        args = Q[..., :8].contiguous().requires_grad_(), D.requires_grad_(), d_mask, torch.rand(3, 4)
        torch.compile(step, backend=backend, fullgraph=True)(*args).backward()
        graphs = (*backend.graphs, *backend.fw_graphs, *backend.bw_graphs)
        dynamo, forward, backward = (graph.code.strip() for graph in graphs)
        self.assertExpectedInline(
            dynamo,
            """\
def forward(self, L_Q_ : torch.Tensor, L_D_ : torch.Tensor, L_d_mask_ : torch.Tensor, L_w_ : torch.Tensor):
    l_q_ = L_Q_
    l_d_ = L_D_
    l_d_mask_ = L_d_mask_
    l_w_ = L_w_
    maxsim = torch.ops.lik.maxsim(l_q_, l_d_, None, l_d_mask_, q_weight = l_w_, normalize = True, backward = 'auto', recompute = False);  l_q_ = l_d_ = l_d_mask_ = l_w_ = None
    sum_1 = maxsim.sum();  maxsim = None
    return (sum_1,)""",
        )
        self.assertExpectedInline(
            forward,
            """\
def forward(self, primals_1, primals_2, primals_3, primals_4):
    maxsim_fwd = torch.ops.lik.maxsim_fwd.default(primals_1, primals_2, None, primals_3, primals_4, True, torch.int16, 'auto')
    getitem = maxsim_fwd[0]
    getitem_1 = maxsim_fwd[1];  maxsim_fwd = None
    sum_1 = torch.ops.aten.sum.default(getitem);  getitem = None
    return (sum_1, primals_1, primals_2, primals_3, primals_4, getitem_1)""",
        )
        self.assertExpectedInline(
            backward,
            """\
def forward(self, primals_1, primals_2, primals_3, primals_4, getitem_1, tangents_1):
    expand = torch.ops.aten.expand.default(tangents_1, [3, 5]);  tangents_1 = None
    maxsim_bwd_lowmem = torch.ops.lik.maxsim_bwd_lowmem.default(expand, primals_1, primals_2, getitem_1, None, primals_3, primals_4, True, [True, True, False]);  expand = primals_1 = primals_2 = getitem_1 = primals_3 = primals_4 = None
    getitem_2 = maxsim_bwd_lowmem[0]
    getitem_3 = maxsim_bwd_lowmem[1];  maxsim_bwd_lowmem = None
    return (getitem_2, getitem_3, None, None)""",
        )

    def test_error_messages(self):
        """Check the errors of wrong arguments."""
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
flat candidates: ValueError: maxsim: Q: expected [Nq, Lq, d] for D [Nq, K, Ld, d], got [3, 4]
mask shape: ValueError: maxsim: q_mask: expected shape [2, 3] to match Q [2, 3, 4], got [1, 3]
mask dtype: TypeError: maxsim: d_mask: expected bool (True = keep) or an integer dtype, got torch.float32: for a mask of ones and zeros pass d_mask != 0
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
    """Check that a saved program gives equal bits for other sizes."""
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
    """Check that the argmax dtype of a program with gradients does not restrict it to short documents."""

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
    """Check draft export with every optional argument, because in torch 2.13 it reports an absent one as mutated."""

    class Everything(torch.nn.Module):
        def forward(self, Q, D, q_mask, d_mask, q_weight):
            return torch.ops.lik.maxsim(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=True)

    Q, D, d_mask = _retriever_inputs()
    inputs = (Q[..., :8], D, torch.rand(Q.shape[:2]) > 0.2, d_mask, torch.rand(Q.shape[:2]))
    query, document = {0: Dim("Nq"), 1: Dim("Lq")}, {0: Dim("Nd"), 1: Dim("Ld")}
    shapes = {"Q": query, "D": document, "q_mask": query, "d_mask": document, "q_weight": query}
    program = torch.export.draft_export(Everything(), inputs, dynamic_shapes=shapes)
    assert not program._report.failures


def test_fake_and_meta_tensors_give_shapes_without_computing():
    """Check shapes from fake and meta tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        scores, argmax = lik_ops.maxsim_with_argmax(torch.empty(2, 3, 8), torch.empty(2, 7, 5, 8))
        assert scores.shape == (2, 7) and argmax.shape == (2, 7, 3) and argmax.dtype == torch.int64
    Q, D = torch.empty(10_000, 32, 128, device="meta"), torch.empty(10_000, 300, 128, device="meta")
    assert lik_ops.maxsim(Q, D).shape == (10_000, 10_000)


def test_traced_graph_has_argmax_only_with_gradients():
    """Check that a graph without gradients computes no argmax."""
    from torch.fx.experimental.proxy_tensor import make_fx

    Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    for grad, expected in ((False, "None"), (True, "torch.int16")):
        graph = make_fx(lambda q, d: torch.ops.lik.maxsim(q, d))(Q.requires_grad_(grad), D).graph
        (node,) = (n for n in graph.nodes if str(n.target) == "lik.maxsim_fwd.default")
        assert str(node.args[6]) == expected
