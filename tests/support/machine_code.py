"""Compile without the target GPU, and read registers and spills from the machine code."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from lik_ops.gpu.triton_versions import add_compile_options
from lik_ops.gpu.tuning.architectures import Architecture


def target(arch: Architecture) -> GPUTarget:
    """Return Triton's compilation target for an architecture."""
    if arch.is_amd:
        return GPUTarget("hip", arch.name, arch.threads_per_warp)
    return GPUTarget("cuda", int(arch.name.removeprefix("sm_")), arch.threads_per_warp)


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?);")
_SPILL = re.compile(r"\b(?:LDL|STL)\b")


def disassembled(cubin: bytes) -> tuple[int, list[tuple[int, str]]]:
    """Return the registers per thread, and the machine code as addresses with instructions."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = str(tool) if tool.exists() else shutil.which("cuobjdump")
    assert path is not None, "Triton's wheel carries cuobjdump; neither it nor another was found"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        arguments = [path, "-res-usage", "-sass", file.name]
        report = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    registers = int(re.search(r"REG:(\d+)", report).group(1))  # type: ignore[union-attr]
    return registers, [(int(address, 16), text) for address, text in _INSTRUCTION.findall(report)]


def cuda_resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers per thread, and the number of instructions that access local memory (spills).

    The stack size is no substitute, because a 64-bit division is a call that uses 8 bytes of stack.
    """
    registers, code = disassembled(cubin)
    return registers, sum(bool(_SPILL.search(text)) for _, text in code)


def repeated_spills(cubin: bytes, products: bool = False) -> tuple[int, int]:
    """Return the registers, and the spills inside loops, of a warp-specialized kernel.

    Spills outside loops run once per program. Instructions that set the register count are in no loop. Without this
    rule, the dispatch of warps to their roles would look like one.

    Args:
        products: Count only inner loops with products, and no loops over documents.
    """
    registers, code = disassembled(cubin)
    jumps = [(int(found.group(1), 16), at) for at, text in code if (found := re.search(r"\bBRA.* 0x([0-9a-f]+)", text))]
    once = [at for at, text in code if "USETMAXREG" in text]
    loops = [(to, at) for to, at in jumps if to < at and not any(to <= n <= at for n in once)]
    if products:
        multiply = [at for at, text in code if "GMMA" in text]
        loops = [(to, end) for to, end in loops if any(to <= at <= end for at in multiply)]
        loops = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    assert loops
    repeated = (any(to <= at <= end for to, end in loops) for at, text in code if _SPILL.search(text))
    return registers, sum(repeated)


def unused_barriers(ttgir: str) -> list[str]:
    """Return the barriers in shared memory that a kernel initializes and never uses.

    Triton gives their memory to other buffers without `mbarrier.inval`. On an H100 the contents of these buffers then
    changed.
    """
    found = []
    for name in re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<\d+x1xi64", ttgir):
        indexed = re.findall(rf"(%\w+) = ttg\.memdesc_index {name}\[", ttgir)
        uses = re.findall(rf"^.*(?:{'|'.join([name, *indexed])})\b.*$", ttgir, re.MULTILINE)
        if all(re.search(r"ttg\.local_alloc|ttg\.memdesc_index|ttng\.init_barrier", use) for use in uses):
            found.append(name)
    return found


def compile_as_launched(source: ASTSource, target: GPUTarget, options: dict[str, int] | None = None) -> CompiledKernel:
    """Compile a kernel as `launcher` does, by default with four warps, which most kernels use."""
    return triton.compile(source, target=target, options=add_compile_options(options or {"num_warps": 4}))


def compile_sm90(source: ASTSource, options: dict[str, int] | None = None) -> tuple[CompiledKernel, str]:
    """Compile a kernel for sm_90, and return it with the report of ptxas.

    Triton's disk cache has no reports, so it is not read.
    """
    report = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(report):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        kernel = compile_as_launched(source, GPUTarget("cuda", 90, 32), options)
    return kernel, report.getvalue()
