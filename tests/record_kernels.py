"""Record which kernels lik_ops launches and what they compile to, and compare two records to verify a refactoring.

    python -m tests.record_kernels launches before.json
    python -m tests.record_kernels launches --compare before.json
    python -m pytest -p tests.record_kernels --record-kernels before.jsonl -n 2 \\
        tests/*/test_aot*.py tests/*/*/test_aot*.py
    python -m tests.record_kernels compiled before.jsonl after.jsonl

``launches`` runs random calls of every layout for 8 architectures on CPU tensors. Launches do nothing. The record of a
launch has the grid, the options, and all arguments: configurations as plain values, and shape, strides, and dtype of
each tensor. Names of classes, fields, modules, and kernels are omitted, so a rename leaves no difference.

``compiled`` hashes the assembly of every kernel that the ahead-of-time tests compile, without symbol names, comments,
and line tables. The hashes are compared as a multiset, so tests may move or change their names.

`tests.record_bits` records results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_BYTES = 32 * 2**20  # limit for the tokens of a call
_SMALL_SM_90 = 78  # a second sm_90 device, with fewer SMs


def plain(x: Any) -> Any:
    """Return a value without names and addresses, as numbers, strings, and lists."""
    if isinstance(x, Tensor):
        return ["tensor", list(x.shape), list(x.stride()), str(x.dtype)]
    if hasattr(x, "base") and hasattr(x, "block_shape"):
        return ["descriptor", list(x.shape), list(x.strides), list(x.block_shape), plain(x.base)]
    if isinstance(x, (list, tuple)):
        return [plain(y) for y in x]
    if isinstance(x, dict):
        return sorted([str(key), plain(value)] for key, value in x.items())
    if is_dataclass(x) and not isinstance(x, type):
        return [plain(getattr(x, f.name)) for f in fields(x)]
    return x if isinstance(x, (bool, int, float, str, type(None))) else str(type(x).__name__)


class Launches:
    """Stand-in for the compiled kernels of a device that records launches."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def install(self) -> Callable[[Any], None]:
        """Route CPU tensors to the host code of a GPU, and return a function that selects its architecture."""
        from benchmarks.calls import without_gpu
        from lik_ops.gpu.runtime import launcher
        from lik_ops.ops.fast_path import eager

        found, chosen = self.found, [None]

        class Recorded(without_gpu.Bound):
            """Kernel that is never compiled. It has no direct launch, so no call is replayed."""

            def __init__(self, options: dict[str, Any]) -> None:
                super().__init__()
                self.direct, self.options = None, options

            def launch(self, grid: tuple[int, ...], args: tuple, values: list) -> None:
                found.append([list(grid), plain(self.options), plain(args)])

        def bind(kernel: Any, args: tuple, options: dict[str, Any]) -> tuple[Any, list]:
            return Recorded(options), launcher.describe_args(kernel, args)[1]

        def choose(architecture: Any) -> None:
            eager.clear_call_caches()
            chosen[0] = architecture

        without_gpu.install(lambda device: chosen[0], bind)
        return choose


def architectures() -> Iterator[tuple[str, Any]]:
    from lik_ops.gpu.tuning.architectures import ARCHITECTURES

    yield from ARCHITECTURES.items()
    yield "sm_90, few SMs", replace(ARCHITECTURES["sm_90"], processors=_SMALL_SM_90)


def random_calls(seed: int, count: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names and calls of every layout, option, and gradient, with both special and ordinary sizes."""
    import lik_ops

    draw = random.Random(seed)
    lengths = (1, 2, 8, 20, 31, 32, 33, 64, 100, 128, 129, 180, 256, 300, 512, 1024, 2048, 3000)
    made = 0
    while made < count:
        Nq, Nd = draw.choice((1, 1, 2, 3, 4, 8, 16, 32, 64, 256)), draw.choice((1, 2, 4, 8, 64, 100, 200, 1000, 4096))
        Lq, Ld, d = (
            draw.choice(lengths),
            draw.choice(lengths),
            draw.choice((8, 48, 64, 96, 100, 128, 128, 256, 320, 768)),
        )
        dtype, layout = draw.choice(_DTYPES), draw.choice(("cross", "cross", "candidates", "packed", "listed", "pairs"))
        what = draw.choice(("scores", "scores", "argmax", "step", "int8", "fp8_e4m3", "binary", "soft", "soft step"))
        normalize, masked, backward = draw.random() < 0.3, draw.random() < 0.3, draw.choice(("lowmem", "unified"))
        documents = Nd * (Nq if layout == "candidates" else 1)
        if max(Nq * Lq, documents * Ld) * d * dtype.itemsize > _MOST_BYTES or Nq * documents * Lq * 4 > _MOST_BYTES:
            continue
        if what not in ("scores", "argmax", "step") and layout != "cross":
            continue
        made += 1
        name = f"{layout} {what} {Nq} x {Nd}, {Lq}/{Ld}, d {d}, {dtype}, {normalize}, {masked}, {backward}"
        Q = torch.empty(Nq, Lq, d, dtype=dtype)
        D = torch.empty(*((Nq,) if layout == "candidates" else ()), Nd, Ld, d, dtype=dtype)
        options: dict[str, Any] = {"normalize": normalize}
        if masked and layout in ("cross", "candidates"):
            options |= {"q_mask": torch.ones(Nq, Lq, dtype=torch.bool), "d_mask": torch.ones(D.shape[:-1]).bool()}
        yield name, _call(lik_ops, layout, what, Q, D, options, backward)


def _call(lik_ops: Any, layout: str, what: str, Q: Tensor, D: Tensor, options: dict, backward: str) -> Callable:
    Nq, Nd, Lq, Ld = len(Q), D.shape[-3], Q.shape[1], D.shape[-2]
    if what == "step":
        Q, D, options = Q.requires_grad_(), D.requires_grad_(), {**options, "backward": backward}
    if what.startswith("soft"):
        if "step" in what:
            Q, D = Q.requires_grad_(), D.requires_grad_()
        return lambda: _finish(lik_ops.maxsim_soft(Q, D, 0.1, **options), what)
    if what in ("int8", "fp8_e4m3", "binary"):
        each = -(-D.shape[-1] // 8) if what == "binary" else D.shape[-1]
        kinds = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "binary": torch.uint8}
        data = torch.empty(*D.shape[:-1], each, dtype=kinds[what])
        stored = lik_ops.Quantized(data, torch.empty(D.shape[:-1]), what, D.shape[-1], D.dtype)
        return lambda: lik_ops.maxsim(Q, stored, **options)
    suffix = "_with_argmax" if what == "argmax" else ""
    if layout in ("cross", "candidates"):
        return lambda: _finish(getattr(lik_ops, f"maxsim{suffix}")(Q, D, **options), what)
    Q, D = Q.flatten(0, 1), D.flatten(0, 1)
    cu_q, cu_d = (torch.arange(n + 1, dtype=torch.int32) * length for n, length in ((Nq, Lq), (Nd, Ld)))
    if layout == "packed":
        return lambda: _finish(getattr(lik_ops, f"maxsim_varlen{suffix}")(Q, D, cu_q, cu_d, **options), what)
    if layout == "listed":
        offsets, lengths = (x[:-1].expand(Nq, Nd).contiguous() for x in (cu_d, cu_d.diff().repeat(2)[: Nd + 1]))
        function = getattr(lik_ops, f"maxsim_candidates_varlen{suffix}")
        return lambda: _finish(function(Q, D, offsets, lengths, cu_seqlens_q=cu_q, **options), what)
    pairs = torch.zeros(min(Nq * Nd, 512), 2, dtype=torch.int64)
    function = getattr(lik_ops, f"maxsim_pair_list{suffix}")
    bounds = {"cu_seqlens_q": cu_q, "cu_seqlens_d": cu_d, "max_seqlen_q": Lq}
    return lambda: _finish(function(Q, D, pairs, **bounds, **options), what)


def _finish(result: Any, what: str) -> None:
    if "step" in what:
        result.sum().backward()


def record_launches(count: int, seed: int) -> dict[str, str]:
    """Return a digest of the launches of each call, by architecture and call."""
    launches, records = Launches(), {}
    choose = launches.install()
    for name, arch in architectures():
        choose(arch)
        for number, (call_name, call) in enumerate(random_calls(seed, count)):
            launches.found.clear()
            try:
                call()
            except (NotImplementedError, ValueError) as error:
                launches.found.append(f"{type(error).__name__}: {error}")
            text = json.dumps(launches.found)
            records[f"{name}: {number} {call_name}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return records


# Comments, line tables, debug information, and names in PTX and AMD's assembly, which depend on names in the sources.
_DROPPED = re.compile(
    r"//.*|^\s*[#;].*|^(\$L__|\.L)tmp\d+:|^\s*\.(loc|file|cfi\w*|ident|asciz|string|byte|b8|b32|b64)\b.*", re.MULTILINE
)
_DEBUG = re.compile(r"\.section\s+\"?\.debug_.*?(?=^\s*\.section|\Z)", re.MULTILINE | re.DOTALL)
_SYMBOL = re.compile(r"\b[A-Za-z_.$][\w.$]*(?:maxsim|chamfer|global_smem|_param_)[\w.$]*|\bmaxsim\w*|\$L__\w+|\.L\w+")


def stripped(assembly: str) -> str:
    """Return assembly without names and lines of the sources. Symbols are numbered in order of appearance."""
    text = _DROPPED.sub("", _DEBUG.sub("", assembly))
    numbers: dict[str, str] = {}
    text = _SYMBOL.sub(lambda found: numbers.setdefault(found[0], f"@{len(numbers)}"), text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--record-kernels", type=Path, help="append a hash of each kernel that is compiled to this file")


def pytest_configure(config: Any) -> None:
    path = config.getoption("--record-kernels", default=None)
    if path is None:
        return
    from .support import machine_code

    compile_as_launched = machine_code.compile_as_launched

    def recorded(source: Any, target: Any, *args: Any) -> Any:
        compiled = compile_as_launched(source, target, *args)
        assembly = compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"]
        digest = hashlib.sha256(stripped(assembly).encode()).hexdigest()[:16]
        record = {"kernel": source.fn.__name__, "target": f"{target.backend} {target.arch}", "hash": digest}
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
        return compiled

    machine_code.compile_as_launched = recorded


def read_compiled(path: Path) -> Counter:
    return Counter((r["target"], r["hash"]) for r in map(json.loads, path.read_text().splitlines()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    launches = commands.add_parser("launches", help="record or compare the launches of random calls")
    launches.add_argument("file", type=Path)
    launches.add_argument("--compare", action="store_true", help="with the file, instead of writing it")
    launches.add_argument("--calls", type=int, default=5000, help="on each architecture (default 5000)")
    launches.add_argument("--seed", type=int, default=0)
    compiled = commands.add_parser("compiled", help="compare the assembly of two runs of the ahead-of-time tests")
    compiled.add_argument("before", type=Path)
    compiled.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "compiled":
        before, after = read_compiled(args.before), read_compiled(args.after)
        gone, new = before - after, after - before
        print(f"{before.total()} kernels before, {after.total()} after: {gone.total()} are gone, {new.total()} are new")
        return int(bool(gone or new))
    found = record_launches(args.calls, args.seed)
    if not args.compare:
        args.file.write_text(json.dumps(found, indent=0))
        print(f"{len(found)} calls")
        return 0
    before = json.loads(args.file.read_text())
    changed = sorted(name for name in before.keys() | found.keys() if before.get(name) != found.get(name))
    print("\n".join(changed[:40]))
    print(f"{len(changed)} of {len(before)} calls differ")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
