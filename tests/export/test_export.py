"""Test exported programs, and packages that do not need lik_ops."""

import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch.export import Dim
from torch.utils import cpp_extension

import lik_ops
from lik_ops.portable.forward import blocked

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).parents[1] / "data"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Model(torch.nn.Module):
    """Module that passes every argument of a public function. Ranks select the flat layouts."""

    def __init__(self, function=lik_ops.maxsim, **options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, Q, D, q_mask, d_mask, q_weight):
        return self.function(Q, D, q_mask, d_mask, q_weight=q_weight, **self.options)


def search(Q, D, q_mask, d_mask, q_weight, top_k=3, **options):
    return lik_ops.retrieve(Q, D, top_k, q_mask=q_mask, d_mask=d_mask, q_weight=q_weight, **options)


def search_one(*args, **options):
    return search(*args, top_k=1, **options)


FUNCTIONS = {
    "cross": lik_ops.maxsim,
    "candidates": lik_ops.maxsim,
    "flat_q": lik_ops.maxsim,
    "flat_d": lik_ops.maxsim,
    "flat": lik_ops.maxsim,
    "raw": torch.ops.lik.maxsim,
    "pairs": lik_ops.maxsim_pairs,
    "winners": lik_ops.maxsim_with_argmax,
    "candidate winners": lik_ops.maxsim_with_argmax,
    "search": search,
    "search one": search_one,
}


def arguments(layout, sizes=(3, 5, 4, 6), d=8, dtype=torch.float32, device="cpu"):
    Nq, K, Lq, Ld = sizes
    q_shape = (Lq, d) if layout in ("flat_q", "flat") else (Nq, Lq, d)
    d_shape = (K, Ld, d)
    if layout.startswith("candidate"):
        d_shape = (Nq, K, Ld, d)
    elif layout in ("flat_d", "flat"):
        d_shape = (Ld, d)
    elif layout == "pairs":
        d_shape = (Nq, Ld, d)
    generator = torch.Generator().manual_seed(sum(sizes))
    Q, D = (torch.randn(s, generator=generator).to(dtype) for s in (q_shape, d_shape))
    masks = [torch.rand(t.shape[:-1], generator=generator) > 0.3 for t in (Q, D)]
    if masks[1].dim() > 1 and masks[1].numel():
        masks[1][..., 0, :] = False  # a document without kept tokens
    for t, mask in zip((Q, D), masks, strict=True):
        t[~mask] = float("nan")
    weight = torch.randn(q_shape[:-1], generator=generator).to(torch.promote_types(dtype, torch.float32))
    return tuple(t.to(device) for t in (Q, D, *masks, weight))


def dynamic(layout):
    """Return dynamic shapes for every size of the layout: Nq, K, Lq, Ld."""
    Nq, K, Lq, Ld = Dim("Nq"), Dim("K"), Dim("Lq"), Dim("Ld")
    query = {0: Lq} if layout in ("flat_q", "flat") else {0: Nq, 1: Lq}
    document = {0: K, 1: Ld}
    if layout.startswith("candidate"):
        document = {0: Nq, 1: K, 2: Ld}
    elif layout in ("flat_d", "flat"):
        document = {0: Ld}
    elif layout == "pairs":
        document = {0: Nq, 1: Ld}
    return {"Q": query, "D": document, "q_mask": query, "d_mask": document, "q_weight": query}


def assert_same(actual, expected, exact=True):
    actual = actual if isinstance(actual, (tuple, list)) else (actual,)
    expected = expected if isinstance(expected, (tuple, list)) else (expected,)
    for a, e in zip(actual, expected, strict=True):
        if exact:
            assert torch.equal(a, e)
        else:
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


AXES = [axes for n in (1, 2, 4) for axes in itertools.combinations(range(4), n)]
SIZES = ((3, 5, 4, 6), (2, 9, 31, 70), (7, 2, 1, 1), (4, 4, 4, 4))


def targets(program):
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", [layout for layout in FUNCTIONS if not layout.startswith("search")])
def test_every_layout_exports_with_every_size_dynamic(layout, strict):
    model = Model(FUNCTIONS[layout], normalize=True)
    program = torch.export.export(model, arguments(layout), dynamic_shapes=dynamic(layout), strict=strict)
    node = "lik.maxsim_fwd.default" if "winners" in layout else "lik.maxsim.default"
    assert [t for t in targets(program) if t.startswith("lik")] == [node]
    opened = program.run_decompositions()
    assert [t for t in targets(opened) if t.startswith("lik")] == ["lik.maxsim_fwd.default"]
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for sizes in SIZES:
        assert_same(loaded(*arguments(layout, sizes)), model(*arguments(layout, sizes)))


def test_a_graph_pass_finds_and_replaces_the_operator():
    """Symbolic tracing records the call, and a pass can rewrite the exported node."""

    class Scores(torch.nn.Module):
        def forward(self, Q, D):
            return torch.ops.lik.maxsim(Q, D) + 1

    Q, D = arguments("cross")[:2]
    Q, D = Q.nan_to_num(), D.nan_to_num()
    for module in (torch.fx.symbolic_trace(Scores()), torch.export.export(Scores(), (Q, D)).module()):
        matched = torch.fx.replace_pattern(
            module, lambda q, x: torch.ops.lik.maxsim.default(q, x), lambda q, x: torch.ops.lik.maxsim.default(-q, x)
        )
        if not matched:  # symbolic tracing records the packet, not its overload
            for node in module.graph.find_nodes(op="call_function", target=torch.ops.lik.maxsim):
                with module.graph.inserting_before(node):
                    node.update_arg(0, module.graph.call_function(torch.neg, (node.args[0],)))
                matched = [node]
            module.recompile()
        assert len(matched) == 1
        assert torch.equal(module(Q, D), Scores()(-Q, D))


def test_a_program_saved_by_an_earlier_version_scores():
    """The program was saved by 0.1.0 with torch 2.13, so schemas and the meaning of scores must stay compatible."""
    if torch.__version__ < "2.13":
        pytest.skip("torch loads programs of its own version and earlier ones")
    program = torch.export.load(DATA / "scorer-0.1.0.pt2")
    assert "lik.maxsim.default" in targets(program)
    model = Model(normalize=True)
    for sizes in SIZES:
        assert_same(program.module()(*arguments("cross", sizes)), model(*arguments("cross", sizes)))


EDGES = (
    (3, 4, 5, 9),
    (2, 3, 7, 25),
    (5, 1, 1, 1),
    (0, 3, 2, 2),
    (2, 0, 2, 2),
    (2, 2, 0, 2),
    (2, 2, 3, 0),
    (9, 7, 2, 3),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["cross", "candidates"])
@pytest.mark.parametrize("normalize", [False, True])
def test_blocked_forward_matches_the_operator(layout, normalize, device, monkeypatch):
    """Test sizes around the block size, on integers with many ties and NaN behind the masks."""
    monkeypatch.setattr(blocked, "MAX_QUERY_TOKENS", 6)
    monkeypatch.setattr(blocked, "MAX_DOCUMENT_TOKENS", 10)
    for sizes in EDGES:
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            Q, D, q_mask, d_mask, w = arguments(layout, sizes, dtype=dtype, device=device)
            Q, D = Q.mul(2).round(), D.mul(2).round()
            for options in ((q_mask, d_mask, w), (None, d_mask, None), (q_mask, None, None), (None, None, w)):
                q = Q if options[0] is not None else Q.nan_to_num()
                x = D if options[1] is not None else D.nan_to_num()
                args = (q, x, *options, normalize)
                scores, argmax = blocked.forward_blocked(*args, torch.int32)
                expected = torch.ops.lik.maxsim_fwd(*args, torch.int32, "auto")
                torch.testing.assert_close(scores, expected[0], rtol=1e-5, atol=1e-4)
                if not normalize:  # ties need exact values
                    assert torch.equal(argmax, expected[1]), (sizes, options)
                assert_same(blocked.forward_blocked(*args, None)[0], scores)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_blocked_forward_handles_non_finite_like_the_operator(value, monkeypatch):
    monkeypatch.setattr(blocked, "MAX_DOCUMENT_TOKENS", 4)
    Q, D = torch.ones(2, 3, 4), torch.ones(3, 9, 4)
    D[1, 6], D[2] = value, value
    args = (Q, D, None, None, None, False)
    for a, e in zip(
        blocked.forward_blocked(*args, torch.int32), torch.ops.lik.maxsim_fwd(*args, torch.int32, "auto"), strict=True
    ):
        assert torch.equal(a.nan_to_num(7.0), e.nan_to_num(7.0))


def test_opened_programs_have_no_lik_operator_and_stay_dynamic():
    program = torch.export.export(Model(), arguments("cross"), dynamic_shapes=dynamic("cross"))
    opened = lik_ops.export.open_operators(program)
    assert not any("lik" in t for t in targets(opened))
    assert "while_loop" in targets(opened)
    for sizes in (*SIZES, (2, 3, 200, 1100)):
        assert_same(opened.module()(*arguments("cross", sizes)), Model()(*arguments("cross", sizes)), exact=False)


@pytest.mark.parametrize("layout", ["search", "search one"])
def test_opened_programs_match_retrieve(layout):
    """The order is equal, including ties and NaN, for `top_k` below and above the number of documents."""
    search, example = FUNCTIONS[layout], arguments(layout)
    program = torch.export.export(Model(search), example, dynamic_shapes=dynamic(layout))
    assert "lik.maxsim_topk.default" in targets(program)
    opened = lik_ops.export.open_operators(program)
    assert not any("lik" in t for t in targets(opened))
    for sizes in ((4, 40, 3, 5), (2, 3, 4, 4), (3, 2, 4, 4), (2, 1, 70, 31), (2, 0, 3, 3)):
        Q, D, q_mask, d_mask, weight = arguments("search", sizes)
        Q, D, weight = Q.round(), D.round(), weight.round()  # ties
        D[1:2] = float("nan")
        args = (Q, D, q_mask, d_mask, weight)
        assert_same(
            tuple(x.nan_to_num(7.0) for x in opened.module()(*args)), tuple(x.nan_to_num(7.0) for x in search(*args))
        )


EMPTY = [tuple(0 if i in axes else n for i, n in enumerate((3, 5, 4, 6))) for axes in AXES]


EMPTY_LAYOUTS = ["cross", "candidates", "flat_d", "winners", "candidate winners"]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, torch.float32) for layout in ("cross", "candidates", "winners")),
        ("winners", torch.float16),
        *(pytest.param(x, torch.float32, marks=pytest.mark.slow) for x in ("flat_d", "candidate winners")),
        *(pytest.param(x, torch.float16, marks=pytest.mark.slow) for x in EMPTY_LAYOUTS if x != "winners"),
    ],
)
def test_programs_accept_empty_inputs(layout, dtype):
    """Tracers assume every size is at least 1, and may read a size from a stride.

    The sizes of a graph do not depend on the dtype, so most layouts have one dtype here.
    """
    model = Model(FUNCTIONS[layout], normalize=True)

    def integer_masks(sizes):
        Q, D, q_mask, d_mask, weight = arguments(layout, sizes, dtype=dtype)
        return Q, D, q_mask.long(), d_mask.long(), weight

    program = torch.export.export(model, integer_masks((3, 5, 4, 6)), dynamic_shapes=dynamic(layout))
    opened = lik_ops.export.open_operators(program)
    for sizes in EMPTY:
        args = integer_masks(sizes)
        assert_same(program.module()(*args), model(*args))
        assert_same(opened.module()(*args), model(*args), exact=False)


def token_means(Q, D, q_mask):
    return lik_ops.maxsim_token_topk(Q, D, 2, q_mask, reduction="mean")


def chamfer(Q, D, q_mask):
    return lik_ops.chamfer_distance(Q, D[: Q.shape[0]])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("function", [token_means, chamfer])
def test_exported_means_of_empty_inputs_match_eager(function, strict):
    class Mean(torch.nn.Module):
        def forward(self, Q, D, q_mask):
            return function(Q, D, q_mask)

    tokens = {"Q": {1: Dim("Lq")}, "D": {1: Dim("Ld")}, "q_mask": {1: Dim("Lq")}}
    program = torch.export.export(Mean(), arguments("cross")[:3], dynamic_shapes=tokens, strict=strict).module()
    for Lq in (0, 1, 2, 4):
        for Ld in (0, 1, 2, 6):
            args = [x.nan_to_num() for x in arguments("cross", (3, 5, Lq, Ld))[:3]]
            assert torch.equal(program(*args), function(*args)), (Lq, Ld)


def test_open_operators_rejects_packed_retrieval():
    class Search(torch.nn.Module):
        def forward(self, Q, D, cu_seqlens_d):
            return lik_ops.retrieve(Q, D, 3, cu_seqlens_d=cu_seqlens_d)

    program = torch.export.export(Search(), (torch.randn(2, 4, 8), torch.randn(9, 8), torch.tensor([0, 4, 9])))
    expected = r"expected padded documents and d_mask in place of cu_seqlens_d, found lik\.maxsim_topk\.default"
    with pytest.raises(NotImplementedError, match=expected):
        lik_ops.export.open_operators(program)


def test_open_operators_handles_cond_branches():
    """Operators in branches are opened if possible, and the others are refused there too."""

    class Branches(torch.nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, Q, D):
            return torch.cond(Q.sum() > 0, lambda q, x: self.function(q, x), lambda q, x: self.function(-q, x), (Q, D))

    def packed(Q, D):
        offsets = torch.arange(3) * 2
        return lik_ops.maxsim_varlen(Q, D.flatten(0, 1), None, offsets)

    Q, D = torch.randn(2, 4, 8), torch.randn(3, 5, 8)
    opened = lik_ops.export.open_operators(torch.export.export(Branches(lik_ops.maxsim), (Q, D)))
    assert "lik." not in str([m.graph for m in opened.graph_module.modules() if hasattr(m, "graph")])
    for q in (Q, -Q):
        assert_same(opened.module()(q, D), Branches(lik_ops.maxsim)(q, D), exact=False)
    with pytest.raises(NotImplementedError, match=r"found lik\.maxsim_ragged_fwd"):
        lik_ops.export.open_operators(torch.export.export(Branches(packed), (Q, D)))


def test_open_operators_error_names_unsupported_operator():
    """The check also covers later additions to the library. Here it refuses the operator of GPU packages."""
    packaged = pytest.importorskip("lik_ops.ops.packaged", reason="it needs Triton")

    class Packaged(torch.nn.Module):
        def forward(self, Q, D):
            return packaged.maxsim_packaged(Q, D, None, None, None, False)

    program = torch.export.export(Packaged(), (torch.randn(2, 4, 8), torch.randn(3, 5, 8)))
    with pytest.raises(NotImplementedError, match=r"expected functions of lik_ops.*, found lik\.maxsim_packaged"):
        lik_ops.export.open_operators(program)


@pytest.mark.slow
def test_package_from_torch_alone_needs_lik_ops(tmp_path):
    """`docs/pytorch.md` describes the error of a process without lik_ops, and that importing lik_ops fixes it."""
    path, example = str(tmp_path / "plain.pt2"), tuple(t.nan_to_num() for t in arguments("cross")[:2])
    program = torch.export.export(lik_ops.MaxSimScorer(), example)
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    assert_same(torch._inductor.aoti_load_package(path)(*example), lik_ops.maxsim(*example))
    result = load_elsewhere(tmp_path, path, [example])
    assert result.returncode != 0
    (line,) = [x for x in result.stderr.splitlines() if x.startswith("RuntimeError: ")]
    quoted = re.search(r"`(RuntimeError: .*?)`", (ROOT / "docs" / "pytorch.md").read_text()).group(1)
    assert line.startswith(quoted)


def test_open_operators_rejects_programs_with_gradients():
    class Gradient(torch.nn.Module):
        def forward(self, g, Q, D, argmax):
            return torch.ops.lik.maxsim_bwd_lowmem(g, Q, D, argmax, None, None, None, False, [True, False, False])[0]

    Q, D, *_ = (t.nan_to_num() for t in arguments("cross"))
    scores, argmax = torch.ops.lik.maxsim_fwd(Q, D, None, None, None, False, torch.int32, "auto")
    program = torch.export.export(Gradient(), (scores, Q, D, argmax))
    with pytest.raises(NotImplementedError, match="expected scoring only, found lik"):
        lik_ops.export.open_operators(program)


def test_package_path_must_end_in_pt2():
    with pytest.raises(ValueError, match=r"path: expected a name that ends in \.pt2, got 'scorer\.so'"):
        lik_ops.export.package(Model(), arguments("cross"), "scorer.so")


LOADER = """
import json, resource, sys
sys.modules["lik_ops"] = None
import torch
package, inputs, outputs = sys.argv[1:]
torch.set_num_threads(1)
model = torch._inductor.aoti_load_package(package)
examples = torch.load(inputs)
found = [model(*each) for each in examples[:-1]]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found.append(model(*examples[-1]))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
torch.save(found, outputs)
print(json.dumps({"grown": grown * 1024, "modules": [m for m in sys.modules if m.split(".")[0] == "lik_ops"]}))
"""


KERNEL = "maxsim_packaged"


def check_contents(path, kernel):
    """Check that generated code calls neither Python nor our operators. `kernel` requires a launch and machine code."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    sources = {name: content.decode() for name, content in held.items() if name.endswith(".cpp")}
    assert sources, f"no generated code among {sorted(held)}"
    for name, source in sources.items():
        found = [
            line.strip() for line in source.splitlines() if "proxy_executor_call_function" in line or "lik::" in line
        ]
        assert not found, f"{name} calls back: {found[:5]}"
    if not kernel:
        return
    launches = [line.strip() for source in sources.values() for line in source.splitlines() if "launchKernel(" in line]
    assert any(KERNEL in line for line in launches), f"no launch of {KERNEL}, only of {launches}"
    # The library code also contains the kernel name, so only machine code files are checked.
    binaries = [name for name in held if name.endswith((".cubin", ".hsaco"))]
    assert any(KERNEL.encode() in held[name] for name in binaries), f"no binary of {KERNEL} among {sorted(held)}"


def load_elsewhere(tmp_path, path, examples):
    """Score `examples` with the package at `path` in a process where lik_ops cannot be imported."""
    torch.save(examples, tmp_path / "inputs")
    command = [sys.executable, "-X", "faulthandler", "-c", LOADER]
    command += [path, str(tmp_path / "inputs"), str(tmp_path / "outputs")]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=_bare())


def torch_alone_fails(tmp_path, device):
    """Return whether a package without our code also fails to load.

    Loading fails if the compiler links each package with its own C++ library. Two such packages in one process crash.
    """

    class Double(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    example = (torch.ones(3, device=device),)
    path = str(tmp_path / "double.pt2")
    torch._inductor.aoti_compile_and_package(torch.export.export(Double(), example), package_path=path)
    return load_elsewhere(tmp_path, path, [example]).returncode != 0


def check_package(tmp_path, layout, device, dtype=torch.float32, **options):
    """Package the model, load it without lik_ops, and compare scores and the memory of a large call."""
    model, path = Model(FUNCTIONS[layout], **options), str(tmp_path / "scorer.pt2")
    example = arguments(layout, dtype=dtype, device=device)
    # Most of the compiled code calls the kernels and need not be fast.
    configs = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    found = lik_ops.export.package(model, example, path, dynamic_shapes=dynamic(layout), inductor_configs=configs)
    assert found == path
    check_contents(path, kernel=device == "cuda" and dtype != torch.float64 and "winners" not in layout)
    large = (64, 2000, 32, 100) if not layout.startswith("candidate") else (64, 100, 32, 100)
    all_sizes = (*SIZES, *EMPTY, (2, 3, 200, 1100), large)
    examples = [arguments(layout, sizes, dtype=dtype, device=device) for sizes in all_sizes]
    result = load_elsewhere(tmp_path, path, examples)
    if result.returncode < 0 and torch_alone_fails(tmp_path, device):
        pytest.skip("packages of torch alone do not load here either: how its compiler links them")
    assert result.returncode == 0, f"the loading process ended with {result.returncode}:\n{result.stderr}"
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["modules"] == ["lik_ops"], "the None that makes importing it fail"
    for sizes, found, each in zip(all_sizes, torch.load(tmp_path / "outputs"), examples, strict=True):
        expected = model(*each)
        if isinstance(expected, tuple):
            assert_same(found[1], expected[1])
            found, expected = found[0], expected[0]
        finite = expected[expected.isfinite()]
        scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        where = f"scores of Nq, K, Lq, Ld = {sizes}: "
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * scale, msg=lambda m, where=where: where + m)
    if device == "cpu" and layout == "cross":  # the similarities would need 1.6 GB
        assert report["grown"] < 64 << 20


def _bare():
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


@pytest.mark.parametrize("device", DEVICES)
def test_a_package_scores_without_lik_ops(tmp_path, device):
    check_package(tmp_path, "cross", device, normalize=True)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("candidates", torch.float32),
        ("flat_q", torch.bfloat16),
        ("flat", torch.float64),
        ("pairs", torch.float16),
        ("winners", torch.float32),
        ("search", torch.float32),
        ("search one", torch.float32),
    ],
)
def test_packages_of_other_layouts_and_dtypes(tmp_path, layout, dtype, device):
    check_package(tmp_path, layout, device, dtype)


def run_example(*options):
    script = ROOT / "examples" / "export_retriever.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_example_scores_in_a_bare_process():
    run_example()


TOOLKIT = {
    "nvcc": ("bin/nvcc",),
    "cuda_runtime.h": ("include/cuda_runtime.h", "targets/*/include/cuda_runtime.h"),
    "libcudart.so": ("lib*/libcudart.so", "lib/*/libcudart.so", "targets/*/lib/libcudart.so"),
}


def find_missing_toolkit_parts(home):
    """Return the parts that CMake needs from a CUDA toolkit and that `home`, for example pip's packages, lacks."""
    return [name for name, places in TOOLKIT.items() if not any(any(home.glob(place)) for place in places)]


def test_toolkit_without_libcudart_is_incomplete(tmp_path):
    """The packages of pip only have libcudart.so.13."""
    for name in ("bin/nvcc", "include/cuda_runtime.h", "lib/libcudart.so.13"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_missing_toolkit_parts(tmp_path) == ["libcudart.so"]
    (tmp_path / "lib" / "libcudart.so").touch()
    assert find_missing_toolkit_parts(tmp_path) == []


def why_not_cpp():
    """Return why CMake cannot build a program against this torch, or an empty string."""
    if shutil.which("cmake") is None:
        return "no cmake"
    if not any(shutil.which(name) for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name):
        return "no C++ compiler"
    if torch.version.cuda is None:
        return ""
    home = cpp_extension.CUDA_HOME
    missing = list(TOOLKIT) if home is None else find_missing_toolkit_parts(Path(home))
    return f"find_package(Torch) of a CUDA build needs the CUDA toolkit's {', '.join(missing)}" if missing else ""


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not_cpp()), reason=why_not_cpp() or "none")
def test_the_example_scores_in_a_cpp_program():
    """Build the program, run it on three sets of sizes, and compare it with the eager module."""
    printed = run_example("--cpp").splitlines()
    assert [line for line in printed if line.startswith("scores [")] == [
        f"scores [{n}, 5] on cpu" for n in (3, 1, 7)
    ], "the C++ program's own lines"
