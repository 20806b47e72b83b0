"""Test `torch.compile` of every function and operator: no graph break, eager bits, few compilations, no stale code."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.compiler import config

import lik_ops
from lik_ops.ops.stack import compile_cache

from ...support.stack import Compilations

ROOT = Path(__file__).resolve().parents[3]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Without CUDA graphs, reduce-overhead is the default mode.
WAYS = [
    ("default", "cpu"),
    pytest.param("reduce-overhead", "cpu", marks=pytest.mark.slow),
    *(pytest.param(mode, "cuda", marks=pytest.mark.gpu) for mode in ("default", "reduce-overhead")),
]
TUNED = [
    pytest.param("max-autotune", "cpu", marks=pytest.mark.slow),
    pytest.param("max-autotune", "cuda", marks=[pytest.mark.gpu, pytest.mark.slow]),
]


def raw_forward(Q, D, q_mask, d_mask, q_weight):
    return torch.ops.lik.maxsim_fwd(Q, D, q_mask, d_mask, q_weight, True, torch.int32, "auto")


FUNCTIONS = {
    "maxsim": lambda *a: lik_ops.maxsim(*a[:4], q_weight=a[4], normalize=True),
    "maxsim recompute": lambda *a: lik_ops.maxsim(*a[:4], q_weight=a[4], recompute=True),
    "maxsim unified": lambda *a: lik_ops.maxsim(*a[:4], q_weight=a[4], backward="unified"),
    "pairs": lambda *a: lik_ops.maxsim_pairs(*a[:4], q_weight=a[4]),
    "winners": lambda *a: lik_ops.maxsim_with_argmax(*a[:4], q_weight=a[4]),
    "scorer": lik_ops.MaxSimScorer(normalize=True),
    "operator": lambda *a: torch.ops.lik.maxsim(*a[:4], q_weight=a[4]),
    "forward": raw_forward,
}


def arguments(name, sizes=(3, 5, 4, 6), d=8, device="cpu", candidates=False):
    Nq, K, Lq, Ld = sizes
    Q = torch.randn(Nq, Lq, d, device=device)
    D = torch.randn(*((Nq,) if name == "pairs" else (Nq, K) if candidates else (K,)), Ld, d, device=device)
    q_mask, d_mask = (torch.rand(t.shape[:-1], device=device) > 0.2 for t in (Q, D))
    return Q, D, q_mask, d_mask, torch.rand(Nq, Lq, device=device)


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize(("mode", "device"), WAYS + TUNED)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_calls_match_eager_bitwise(name, mode, device):
    """Equal bits mean equal kernels, in every mode, with dynamic sizes and without a graph break."""
    function = FUNCTIONS[name]
    compiled = torch.compile(function, mode=mode, dynamic=True, fullgraph=True)
    for sizes in ((3, 5, 4, 6), (2, 9, 31, 70)):
        args = arguments(name, sizes, device=device)
        for actual, expected in zip(outputs(compiled(*args)), outputs(function(*args)), strict=True):
            assert torch.equal(actual, expected)


def _quantized(D, format):
    found = lik_ops.quantize(D, format)
    return found.data, found.scale, found.dequantize() if found.minimum is None else found.minimum


def _loss(Q, D, reduction):
    return lik_ops.maxsim_cross_entropy(Q[:, None], D[:, None], normalize=True, reduction=reduction)


# Functions of `[777, 16]` and `[780, 16]`, and whether compiled code has the bits of eager. Inductor uses another order
# of sums, and on a GPU it adds to a product before rounding. docs/pytorch.md has the list.
REDUCTIONS = {
    "losses": (partial(_loss, reduction="none"), True),
    "sum of losses": (partial(_loss, reduction="sum"), False),
    "mean of losses": (partial(_loss, reduction="mean"), False),
    "similarities": (lik_ops.similarity_map, True),
    "normalized similarities": (partial(lik_ops.similarity_map, normalize=True), False),
    "Chamfer": (lambda Q, D: lik_ops.chamfer_distance(Q[:, :3], D[:, :3]), False),
    "Chamfer operator": (
        lambda Q, D: torch.ops.lik.chamfer_fwd(Q[None, :, :3], D[None, :, :3], None, None, "sqeuclidean")[::2],
        True,
    ),
    "soft": (lambda Q, D: lik_ops.maxsim_soft(Q, D.view(60, 13, 16), 0.1), True),
    "XTR": (lambda Q, D: lik_ops.maxsim_xtr(Q.view(111, 7, 16), D.view(60, 13, 16), 20), True),
    "token top-k": (lambda Q, D: lik_ops.maxsim_token_topk(Q, D.view(60, 13, 16), 3, reduction="mean"), True),
    **{format: (lambda _, D, f=format: _quantized(D, f), True) for format in ("int8", "uint8", "fp8_e4m3", "fp8_e5m2")},
    "uint8 dequantized": (lambda _, D: lik_ops.quantize(D, "uint8").dequantize(), False),
    "binary": (lambda _, D: _quantized(D, "binary"), False),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "fp8_e5m2" else ()) for name in REDUCTIONS]
)
def test_only_torch_sums_may_differ_from_eager_bits(name, device):
    function, is_equal = REDUCTIONS[name]
    args = torch.randn(777, 16, device=device), torch.randn(780, 16, device=device)
    for actual, expected in zip(
        outputs(torch.compile(function, fullgraph=True)(*args)), outputs(function(*args)), strict=True
    ):
        if is_equal:
            assert torch.equal(actual.float(), expected.float())
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("mode", "device"), WAYS + TUNED)
@pytest.mark.parametrize("name", ["maxsim", "maxsim recompute", "pairs", "winners"])
def test_compiled_gradients_match_eager_bitwise(name, mode, device):
    args = arguments(name, device=device)
    leaves = [args[i].requires_grad_() for i in (0, 1, 4)]

    def step(*args):
        scores = outputs(FUNCTIONS[name](*args))[0]
        return torch.where(scores.isfinite(), scores, 0).sum()

    compiled = torch.compile(step, mode=mode, dynamic=True, fullgraph=True)
    torch.compiler.cudagraph_mark_step_begin()
    actual = torch.autograd.grad(compiled(*args), leaves)
    expected = torch.autograd.grad(step(*args), leaves)
    for of, a, e in zip(("Q", "D", "q_weight"), actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0, msg=lambda m, of=of: f"gradient of {of}: {m}")


@pytest.mark.parametrize("candidates", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [True, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        *("maxsim", "pairs", "winners"),
        # The check `recompiles` of opcheck has their operators.
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("maxsim recompute", "scorer", "forward")),
    ],
)
def test_one_dynamic_compilation_serves_all_sizes(name, dynamic, candidates):
    """With ``dynamic=None`` torch treats the first sizes as static and compiles for any size when the second arrive."""
    compilations = Compilations()
    compiled = torch.compile(FUNCTIONS[name], backend=compilations, fullgraph=True, dynamic=dynamic)
    for sizes in ((3, 5, 4, 6), (2, 9, 31, 70), (7, 2, 8, 3), (4, 4, 4, 4), (2, 3, 100, 2), (5, 33, 2, 257)):
        compiled(*arguments(name, sizes, candidates=candidates and name != "pairs"))
    assert compilations.count == (1 if dynamic else 2)
    for axis in range(4):
        for size in (1, 0):
            before = compilations.count
            for _ in range(2):
                sizes = tuple(size if i == axis else n for i, n in enumerate((3, 5, 4, 6)))
                compiled(*arguments(name, sizes, candidates=candidates and name != "pairs"))
            assert compilations.count <= before + 1, f"axis {axis} of size {size}"


def test_compiled_guards_exclude_python_helpers():
    """Each name that is looked up while a call is traced is looked up again at every compiled call."""
    compiled = torch.compile(lambda Q, D: lik_ops.maxsim(Q, D), backend="eager", fullgraph=True)
    compiled(torch.randn(2, 3, 8), torch.randn(4, 5, 8))
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(compiled._torchdynamo_orig_callable)
    names = set(re.findall(r"accessed_by=\w*GuardAccessor\('?(\w+)", str(entry.guard_manager)))
    assert {"lik", "maxsim"} <= names
    assert not names & {"eager", "arguments", "check_types", "check_options", "is_sequences", "Quantized", "Index"}


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.project = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 8, bias=False)

    def forward(self, queries, documents):
        Q, D = (self.project(torch.tanh(self.tokens(ids))) for ids in (queries, documents))
        return lik_ops.maxsim(Q, D, queries > 0, documents > 0, normalize=True)


@pytest.mark.parametrize(("mode", "device"), WAYS)
def test_compiled_encoder_gradients_match_eager(device, mode):
    model = Encoder().to(device)
    queries, documents = torch.randint(0, 50, (4, 5), device=device), torch.randint(0, 50, (4, 9), device=device)
    queries[:, 0] = documents[:, 0] = 7

    def loss(model):
        return torch.nn.functional.cross_entropy(model(queries, documents) * 3, torch.arange(4, device=device))

    expected = torch.autograd.grad(loss(model), list(model.parameters()))
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        actual = torch.autograd.grad(loss(compiled), list(model.parameters()))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-6)


def test_pointwise_work_around_the_operator_is_fused():
    """One kernel runs before the operator and one after it, for any number of pointwise operators."""

    def around(Q, D):
        Q = (Q.tanh() * 2 + 1).sigmoid()
        return (torch.ops.lik.maxsim(Q, D) / 3 - 1).tanh().exp()

    Q, D = torch.randn(3, 4, 8), torch.randn(5, 6, 8)
    _, (code,) = run_and_get_code(torch.compile(around, fullgraph=True), Q, D)
    assert code.count("= async_compile.cpp") == 2
    assert code.count("torch.ops.lik.maxsim_fwd.default(") == 1


@pytest.mark.gpu
def test_reduce_overhead_records_cuda_graphs():
    """The operators neither split the graph nor prevent its capture."""
    from torch._dynamo.utils import counters

    counters.clear()
    Q, D = torch.randn(3, 4, 8, device="cuda"), torch.randn(5, 6, 8, device="cuda")
    compiled = torch.compile(FUNCTIONS["maxsim"], mode="reduce-overhead", fullgraph=True)
    args = Q, D, torch.ones(3, 4, dtype=torch.bool, device="cuda"), None, torch.ones(3, 4, device="cuda")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*args).clone()
    assert torch.equal(out, FUNCTIONS["maxsim"](*args))
    assert counters["inductor"]["cudagraph_skips"] == 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.compiler.cudagraph_mark_step_begin()
        compiled(*args)
    assert any("GraphLaunch" in event.name for event in profile.events())


STEP = """
import torch, lik_ops
Q = torch.ones(2, 3, 4, requires_grad=True)
loss = torch.compile(lambda q, d: lik_ops.maxsim(q, d).sum(), fullgraph=True)(Q, torch.ones(5, 6, 4))
loss.backward()
from torch._dynamo.utils import counters
print(float(loss.detach()), float(Q.grad[0, 0, 0]), counters["aot_autograd"]["autograd_cache_hit"])
"""


def copied_package(destination: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "csrc_triton", "opcheck")
    shutil.copytree(ROOT / "lik_ops", destination / "lik_ops", ignore=ignore)
    shutil.copytree(ROOT / "csrc_triton", destination / "lik_ops" / "csrc_triton")
    return destination / "lik_ops" / "ops" / "maxsim.py"


def run_step(directory: Path) -> list[float]:
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_FORCE_DISABLE_CACHES"}
    environment |= {"PYTHONPATH": str(directory), "TORCHINDUCTOR_CACHE_DIR": str(directory / "cache")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", STEP]
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return [float(x) for x in result.stdout.split()]


@pytest.mark.slow
def test_an_edited_backward_is_not_served_from_the_cache(tmp_path):
    """Processes share a cache directory. Between them the backward is edited, then the composite body.

    Without `compile_cache.tag_cache_key` the third process trains with the first one's backward (torch 2.13).
    """
    source = copied_package(tmp_path)
    assert run_step(tmp_path) == [2 * 5 * 3 * 4, 5, 0]
    assert run_step(tmp_path) == [2 * 5 * 3 * 4, 5, 1]  # nothing changed: the cache serves
    text = source.read_text()
    edited = text.replace("choose_backward(backward)(grad_scores,", "choose_backward(backward)(grad_scores * 2,")
    assert edited != text
    source.write_text(edited)
    assert run_step(tmp_path) == [2 * 5 * 3 * 4, 10, 0]
    body = edited.replace("results = [scores]", "results = [scores * 3]")
    assert body != edited
    source.write_text(body)
    assert run_step(tmp_path) == [3 * 2 * 5 * 3 * 4, 30, 0]


def test_cache_key_tag_is_added_once_and_keeps_the_old_tag():
    digest = compile_cache.hash_sources()
    assert config.cache_key_tag == f"lik_ops={digest}" and len(digest) == 16  # the import of lik_ops added it
    with config.patch(cache_key_tag="mine"):  # monkeypatch would hide the option at the end
        for _ in range(2):
            compile_cache.tag_cache_key()
            assert config.cache_key_tag == f"mine;lik_ops={digest}"
