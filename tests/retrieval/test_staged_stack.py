"""Test staged search under torch's compilers and transforms, and ``lik::maxsim_topk_codes`` alone."""

import io

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.nn.functional import normalize

import lik_ops
from lik_ops import Index, quantize
from lik_ops.ops import topk, topk_codes

from ..support.residual import random_codec

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
every_device = pytest.mark.parametrize("device", ["cpu", GPU])
STAGES = ({"n_candidates": 8}, {"n_probe": 2})
both_layouts = pytest.mark.parametrize("packed", [False, True])
of_stages = pytest.mark.parametrize("stages", STAGES, ids=str)
topk_of_codes = torch.ops.lik.maxsim_topk_codes


class Search(torch.nn.Module):
    """Module that retrieves five documents for each query, like exported modules of users."""

    def __init__(self, packed, stages, device="cpu"):
        super().__init__()
        tokens = normalize(torch.randn(200, 16), dim=-1)
        codec = random_codec(16, 2, n_centroids=12)
        documents = quantize(tokens, codec) if packed else quantize(tokens.view(40, 5, 16), codec)
        documents = Index(documents, torch.arange(0, 201, 5)) if packed else documents
        self.documents, self.stages = documents.to(device), stages

    def forward(self, Q):
        return lik_ops.retrieve(Q, self.documents, 5, **self.stages)


def queries(*sizes, device="cpu"):
    return normalize(torch.randn(*sizes, 16), dim=-1).to(device)


def operators(program):
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    targets = [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return sorted(target for target in targets if target.startswith("lik."))


def check_same(found, expected):
    assert len(found) == len(expected) == 2
    for a, e in zip(found, expected, strict=True):
        assert torch.equal(a, e)


@every_device
@of_stages
@both_layouts
def test_exported_search_is_two_operators_for_dynamic_sizes(packed, stages, device):
    """Two operators serve any queries, also after save and load. Strict mode varies over layouts and stages."""
    module, strict = Search(packed, stages, device), packed == (stages == STAGES[0])
    dynamic = {"Q": {0: Dim("Nq"), 1: Dim("Lq")}}
    program = torch.export.export(module, (queries(3, 4, device=device),), dynamic_shapes=dynamic, strict=strict)
    expected = ["lik.maxsim_quantized_fwd.default", "lik.maxsim_topk_codes.default"]
    assert operators(program) == operators(program.run_decompositions()) == expected
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for sizes in ((3, 4), (1, 4), (7, 9), (2, 40)):
        Q = queries(*sizes, device=device)
        check_same(loaded(Q), module(Q))


@every_device
@pytest.mark.parametrize(
    ("packed", "stages"),
    [
        (False, STAGES[0]),
        (True, STAGES[1]),
        pytest.param(True, STAGES[0], marks=pytest.mark.slow),
        pytest.param(False, STAGES[1], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_search_matches_eager(packed, stages, device):
    torch.compiler.reset()
    module = Search(packed, stages, device)
    # One of these runs all of Inductor, which costs a dozen seconds on a CPU.
    whole = device == "cuda" or (packed and stages == STAGES[0])
    compiled = torch.compile(module, backend="inductor" if whole else "aot_eager", fullgraph=True, dynamic=True)
    for sizes in ((3, 4), (7, 9), (2, 40)):
        Q = queries(*sizes, device=device)
        check_same(compiled(Q), module(Q))
    torch.compiler.reset()


@both_layouts
def test_search_of_fake_cuda_tensors_infers_shapes_and_dtypes(packed):
    """Non-strict export does this to a module on a GPU: shapes are computed, and no kernel is requested."""
    module = Search(packed, STAGES[1])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        documents = module.documents.documents if packed else module.documents
        names = ("data", "scale", "codes")
        fakes = {name: mode.from_tensor(getattr(documents, name)).to("cuda") for name in names}
        codec = documents.codec.to("cuda")
        made = lik_ops.Quantized(
            fakes["data"], fakes["scale"], documents.format, 16, documents.dtype, codes=fakes["codes"], codec=codec
        )
        module.documents = Index(made, torch.arange(0, 201, 5, device="cuda")) if packed else made
        scores, indices = module(torch.randn(3, 4, 16, device="cuda"))
    assert scores.shape == indices.shape == (3, 5) and scores.device.type == "cuda"
    assert (scores.dtype, indices.dtype) == (torch.float32, torch.int64)


def arguments(packed, queries=7, documents=23):
    """Return all tensors of the operator, with an invalid code and documents without tokens."""
    Q, centroids = torch.randn(queries, 5, 16), torch.randn(9, 16)
    q_mask, q_weight = torch.rand(queries, 5) > 0.3, torch.randn(queries, 5)
    if not packed:
        d_mask = torch.rand(documents, 6) > 0.4
        d_mask[3] = False
        codes = torch.randint(9, (documents, 6), dtype=torch.int32)
        codes[11, 2], d_mask[11, 2] = 9, True
        return Q, codes, centroids, q_mask, d_mask, None, q_weight
    cu_seqlens = torch.randint(5, (documents,)).cumsum(0)
    codes = torch.randint(9, (int(cu_seqlens[-1]),))
    codes[20] = 77
    return Q, codes, centroids, q_mask, None, torch.cat([torch.zeros(1).long(), cu_seqlens]), q_weight


@both_layouts
@pytest.mark.parametrize("n_probe", [None, 2])
def test_part_sizes_do_not_change_results(monkeypatch, packed, n_probe):
    given = arguments(packed)
    whole = topk_of_codes(*given, True, 6, n_probe)
    assert whole[0].isinf().any() and whole[0].isfinite().any()
    for of_table, of_documents in ((1, 6), (4 * 9 * 5 * 3, 7), (1 << 20, 22)):
        monkeypatch.setattr(topk_codes, "_MAX_TABLE_BYTES", of_table)
        monkeypatch.setattr(topk, "count_fitting_documents", lambda *_, count=of_documents: count)
        check_same(topk_of_codes(*given, True, 6, n_probe), whole)


@every_device
@pytest.mark.parametrize("normalize_queries", [False, True])
@pytest.mark.parametrize(("tokens", "n_centroids", "d"), [(1, 64, 64), (2, 5, 8), (4, 300, 128), (32, 4096, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_results_do_not_depend_on_neighboring_queries(device, normalize_queries, tokens, n_centroids, d, dtype):
    """Scores do not depend on neighboring queries, although BLAS selects a kernel by the number of rows."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(n_centroids, (50, 6), generator=generator).to(device)
    Q, centroids = (torch.randn(n, d, generator=generator).to(device, dtype) for n in (20 * tokens, n_centroids))
    Q = Q.view(20, tokens, d)
    options = (None, None, None, None, normalize_queries, 10, 2)
    scores, indices = topk_of_codes(Q, codes, centroids, *options)
    for some in (slice(1), slice(2), slice(7), slice(1, 4), slice(3, 20)):
        check_same(topk_of_codes(Q[some], codes, centroids, *options), (scores[some], indices[some]))


@both_layouts
def test_vmap(packed):
    given = arguments(packed)
    many = torch.randn(3, *given[0].shape)
    found = torch.vmap(lambda Q: topk_of_codes(Q, *given[1:], False, 4, 3))(many)
    each = [topk_of_codes(Q, *given[1:], False, 4, 3) for Q in many]
    check_same(found, [torch.stack(x) for x in zip(*each, strict=True)])


@both_layouts
def test_autocast_does_not_change_the_operator(packed):
    given = arguments(packed)
    for normalize_queries in (False, True):
        expected = topk_of_codes(*given, normalize_queries, 6, 2)
        with torch.autocast("cpu", torch.bfloat16):
            check_same(topk_of_codes(*given, normalize_queries, 6, 2), expected)


@both_layouts
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_search_under_autocast_matches_cast_queries(packed, weights):
    """With all documents as candidates, scores equal the scores of queries in the autocast dtype."""
    documents, Q, q_weight = Search(packed, {}).documents, queries(3, 4), torch.rand(3, 4).to(weights)
    scores = lik_ops.maxsim(Q.bfloat16(), documents, q_weight=q_weight.float())
    expected = scores.sort(dim=1, descending=True, stable=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = lik_ops.retrieve(Q, documents, 40, q_weight=q_weight, n_candidates=40)
        inside = lik_ops.maxsim(Q, documents, q_weight=q_weight)
    check_same(found, expected)
    assert torch.equal(found[0], inside.gather(1, found[1]))


@every_device
def test_query_with_nan_scores_nan_and_others_are_unchanged(device):
    """The NaN does not change the results of other queries, and masked tokens may hold any value."""
    module = Search(False, {"n_probe": 1, "n_candidates": 8}, device)
    Q = queries(3, 4, device=device)
    expected = module(Q)
    broken = Q.clone()
    broken[1, 2, 5] = torch.nan
    scores, indices = module(broken)
    assert scores[1].isnan().all() and (indices[1] >= 0).all()
    for i in (0, 2):
        check_same((scores[i], indices[i]), (expected[0][i], expected[1][i]))
    q_mask = torch.ones(3, 4, dtype=torch.bool, device=device)
    q_mask[1, 2] = False
    search = {"top_k": 5, "q_mask": q_mask, **module.stages}
    check_same(lik_ops.retrieve(broken, module.documents, **search), lik_ops.retrieve(Q, module.documents, **search))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_query_with_infinity_matches_search_without_stages(value):
    """All documents are scored, as without stages."""
    module, Q = Search(False, {}), queries(3, 4)
    Q[1, 2, 3:5] = value
    expected = module(Q)
    for stages in ({"n_candidates": 40}, {"n_probe": 1, "n_candidates": 40}):
        scores, indices = lik_ops.retrieve(Q, module.documents, 5, **stages)
        assert torch.equal(indices[1], expected[1][1])
        torch.testing.assert_close(scores[1], expected[0][1], rtol=0, atol=0, equal_nan=True)
    weight = torch.ones(3, 4)
    weight[1, 2] = value
    found = lik_ops.retrieve(queries(3, 4), module.documents, 5, q_weight=weight, n_candidates=40)
    assert (found[1] >= 0).all()


def test_bad_input_names_the_argument():
    names = ("Q", "codes", "centroids", "q_mask", "d_mask", "cu_seqlens_d", "q_weight", "normalize", "top_k", "n_probe")
    dense, packed = (dict(zip(names, (*arguments(x), False, 3, 2), strict=True)) for x in (False, True))
    for wrong, error, message in (
        ({"codes": dense["codes"].float()}, TypeError, "codes: expected int32 or int64"),
        ({"codes": dense["codes"][0]}, ValueError, r"codes: expected \[Nd, Ld\]"),
        ({"codes": dense["codes"].to("meta")}, ValueError, "codes: expected the device of Q"),
        ({"centroids": dense["centroids"].double()}, TypeError, "centroids: expected float16"),
        ({"centroids": dense["centroids"][:, :3]}, ValueError, r"centroids: expected \[C, 16\]"),
        ({"q_mask": dense["q_mask"].int()}, TypeError, "q_mask: expected bool"),
        ({"d_mask": dense["d_mask"][1:]}, ValueError, "d_mask: expected shape"),
        ({"cu_seqlens_d": packed["cu_seqlens_d"]}, ValueError, r"codes: expected .* or \[Td\] with cu_seqlens_d"),
        ({**packed, "d_mask": packed["codes"] > 0}, ValueError, "d_mask: expected None next to cu_seqlens_d"),
        ({"q_weight": dense["q_weight"][1:]}, ValueError, "q_weight: expected shape"),
        ({"n_probe": 0}, ValueError, "n_probe: expected 1 or more, got 0"),
        ({"top_k": -1}, ValueError, "top_k: expected 0 or more, got -1"),
    ):
        with pytest.raises(error, match=f"lik::maxsim_topk_codes: {message}"):
            topk_of_codes(**(dense | wrong))
