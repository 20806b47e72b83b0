"""Test MaxSim in standard ONNX with onnxruntime."""

import pytest
import torch

import lik_ops

from .test_export import FUNCTIONS, SIZES, Model, arguments, dynamic

ONNX_LAYOUTS = ["cross", "candidates", "flat_q", "flat_d", "flat", "pairs"]


@pytest.mark.parametrize("layout", ONNX_LAYOUTS)
@pytest.mark.parametrize("normalize", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_onnx_is_standard_and_scores_the_same(layout, normalize):
    pytest.importorskip("onnxscript", reason='pip install ".[onnx]"')
    runtime = pytest.importorskip("onnxruntime", reason='pip install ".[onnx]"')
    model = Model(FUNCTIONS[layout], normalize=normalize)
    example = arguments(layout)
    program = torch.onnx.export(
        model,
        example,
        dynamo=True,
        dynamic_shapes=dynamic(layout),
        custom_translation_table=lik_ops.export.onnx_translations(),
        verbose=False,
    )
    graph = program.model_proto
    assert {node.domain for node in graph.graph.node} == {""} and not graph.functions
    session = runtime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    for sizes in SIZES:
        x = arguments(layout, sizes)
        (found,) = session.run(None, {n: t.numpy() for n, t in zip(names, x, strict=True)})
        torch.testing.assert_close(torch.from_numpy(found), model(*x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_onnx_of_other_dtypes_and_integer_masks(dtype):
    pytest.importorskip("onnxscript", reason='pip install ".[onnx]"')
    runtime = pytest.importorskip("onnxruntime", reason='pip install ".[onnx]"')

    class Plain(torch.nn.Module):
        def forward(self, Q, D, d_mask):
            return lik_ops.maxsim(Q, D, None, d_mask)

    Q, D, _, d_mask, _ = arguments("cross", dtype=dtype)
    Q, d_mask = Q.nan_to_num(), d_mask.int() * 2
    table = lik_ops.export.onnx_translations()
    program = torch.onnx.export(Plain(), (Q, D, d_mask), dynamo=True, custom_translation_table=table, verbose=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = {i.name: t.numpy() for i, t in zip(session.get_inputs(), (Q, D, d_mask), strict=True)}
    torch.testing.assert_close(torch.from_numpy(session.run(None, inputs)[0]), lik_ops.maxsim(Q, D, None, d_mask))


@pytest.mark.filterwarnings("ignore")
def test_onnx_propagates_nan_at_every_position():
    """The NaN is at each position of a document, and also behind a mask, where it must be ignored."""
    pytest.importorskip("onnxscript", reason='pip install ".[onnx]"')
    runtime = pytest.importorskip("onnxruntime", reason='pip install ".[onnx]"')

    class Plain(torch.nn.Module):
        def forward(self, Q, D, d_mask):
            return lik_ops.maxsim(Q, D, None, d_mask)

    Q, D = torch.randn(2, 5, 8), torch.randn(38, 37, 8)
    tokens = torch.arange(37)
    D[tokens, tokens] = float("nan")
    d_mask = torch.ones(38, 37, dtype=torch.bool)
    d_mask[tokens[::3], tokens[::3]] = False
    table = lik_ops.export.onnx_translations()
    program = torch.onnx.export(Plain(), (Q, D, d_mask), dynamo=True, custom_translation_table=table, verbose=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = {i.name: t.numpy() for i, t in zip(session.get_inputs(), (Q, D, d_mask), strict=True)}
    found = torch.from_numpy(session.run(None, inputs)[0])
    torch.testing.assert_close(found, lik_ops.maxsim(Q, D, None, d_mask), rtol=1e-5, atol=1e-5, equal_nan=True)
