"""Record the function calls of lik_ops for docs/architecture.md, and write the page: ``python -m tests.paths``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
INSIDE = str(ROOT / "lik_ops"), str(ROOT / "csrc_triton")


class Call:
    """Function of lik_ops that was called, and its callees."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[Call] = []

    @property
    def computes(self) -> bool:
        sizes = self.name.endswith(("bytes_of", "looks_at_blocks"))
        return self.name.startswith(("csrc_triton/", "portable/")) and not sizes

    def lines(self, depth: int = 0) -> list[str]:
        """Return the indented calls that lead to a kernel or to the first function in portable/."""
        below = [] if self.computes else [line for call in self.calls for line in call.lines(depth + 1)]
        if not below and not self.computes:
            return []
        return [f"{'  ' * depth}{self.name}", *dict.fromkeys(below)]


class Recorder:
    """Profile function for `sys.setprofile`."""

    def __init__(self) -> None:
        self.stack = [Call("")]

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not frame.f_code.co_filename.startswith(INSIDE) or event not in ("call", "return"):
            return
        name = frame.f_code.co_qualname  # of Python 3.11 and later
        if "<" in name.rsplit(".", 1)[-1] or frame.f_code.co_filename.endswith("portable/pace.py"):  # a wrapper
            return
        if event == "call":
            path = Path(frame.f_code.co_filename).relative_to(ROOT).as_posix().removeprefix("lik_ops/")
            self.stack[-1].calls.append(Call(f"{path}: {name}"))
            self.stack.append(self.stack[-1].calls[-1])
        elif len(self.stack) > 1:
            self.stack.pop()


def recorded(call: Callable[[], Any]) -> list[str]:
    """Return the calls of the second run, because the first run compiles and creates plans."""
    call()
    recorder = Recorder()
    sys.setprofile(recorder)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [line for call in recorder.stack[0].calls for line in call.lines()]


def ways() -> Iterator[tuple[str, list[str]]]:
    import torch

    import lik_ops

    Q, D = torch.randn(2, 3, 16), torch.randn(4, 5, 16)
    packed, cu_seqlens = lik_ops.pack([torch.randn(n, 16) for n in (5, 1, 4)])
    compiled = torch.compile(lik_ops.maxsim, fullgraph=True, backend="aot_eager")
    yield "maxsim", recorded(lambda: lik_ops.maxsim(Q, D))
    yield "maxsim_varlen", recorded(lambda: lik_ops.maxsim_varlen(Q, packed, None, cu_seqlens))
    small = lik_ops.quantize(D, "int8")
    yield "quantized maxsim", recorded(lambda: lik_ops.maxsim(Q, small))
    yield "compiled maxsim", recorded(lambda: compiled(Q, D))
    yield "retrieve", recorded(lambda: lik_ops.retrieve(Q, D, 2))
    leaves = Q.clone().requires_grad_(), D.clone().requires_grad_()
    total = lik_ops.maxsim(*leaves).sum()
    yield "gradient", recorded(lambda: torch.autograd.grad(total, leaves, retain_graph=True))


SCRIPT = """
import os, torch
from lik_ops.ops.fast_path import eager
from tests.support import interpreting
from tests.paths import ways
interpreting.patch()
for backend in ("portable", "triton"):
    os.environ["LIK_OPS_BACKEND"] = backend
    eager.clear_call_caches()
    torch.compiler.reset()
    for name, lines in ways():
        print("==", f"{name}, {backend}", *lines, sep="\\n")
"""


def blocks() -> dict[str, str]:
    """Return the blocks that the page shows between its markers, by name."""
    found = {}
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    for part in done.stdout.split("==\n")[1:]:
        name, *lines = part.splitlines()
        found[name] = "\n".join(lines)
    return found


def page() -> str:
    """Return the expected text of docs/architecture.md."""
    found = blocks()

    def block(match: re.Match) -> str:
        return f"<!-- way: {match[1]} -->\n```text\n{found[match[1]]}\n```\n"

    return re.sub(r"<!-- way: (.*?) -->\n```text\n.*?```\n", block, PAGE.read_text(), flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(page())
