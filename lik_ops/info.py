"""``python -m lik_ops.info``: print versions, devices, and the backend and kernel of a call on each device."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from . import __version__, backends, explain, maxsim
from .core.arguments import get_first_sentence
from .core.settings import (
    BACKEND_VARIABLE,
    CAPTURE_VARIABLE,
    KERNEL_VARIABLE,
    REHEARSAL_VARIABLE,
    get_forced_kernel,
    get_requested_backend,
    is_capturing,
    is_rehearsing,
)
from .formats.table import FORMATS
from .portable import backend as portable

if TYPE_CHECKING:
    from .gpu.tuning.architectures import Architecture

_DOCUMENTS, _TOKENS = 1000, 300  # default shape of the documents in the report
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _get_version(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe_devices() -> list[tuple[torch.device, str]]:
    """Return all devices with their names."""
    threads = torch.get_num_threads()
    devices = [(torch.device("cpu"), f"{platform.machine()}, {threads} thread{'' if threads == 1 else 's'}")]
    if torch.cuda.is_available():
        devices += [(torch.device("cuda", i), torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    return devices


def describe_choice(
    device: torch.device,
    dtype: torch.dtype,
    Nq: int,
    Lq: int,
    d: int,
    int8: bool = False,
    Nd: int = _DOCUMENTS,
    Ld: int = _TOKENS,
) -> str:
    """Return the backend, and for Triton the kernel and its tile, that would score documents of a shape.

    Documents have the dtype of Q, or are quantized to int8.
    """
    try:
        backend = backends.select_backend(device, dtype)
    except (RuntimeError, ValueError) as error:  # LIK_OPS_BACKEND
        return f"error: {error}"
    if backend is portable:
        return f"portable: {_explain_portable(device, dtype)}"
    from .gpu import backend as cuda
    from .gpu.runtime import launcher

    describe = describe_int8_kernel if int8 else describe_kernel
    kernel = describe(cuda.architecture(device), dtype, Nq, Nd, Lq, Ld, d)
    return f"triton {kernel}; launched {launcher.describe_launch_path()}"


def _explain_portable(device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why the portable backend computes on `device`."""
    if get_requested_backend() == "portable":
        return f"{BACKEND_VARIABLE} or lik_ops.use_backend says so"
    if device.type == "cpu":
        return "Triton kernels need a GPU"
    return backends.explain_no_triton(device, dtype) or "unknown"


def describe_gpus() -> str:
    """Return the number of GPUs that torch finds, or the reason why it finds none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return f"{count} ({'ROCm ' + torch.version.hip if torch.version.hip else 'CUDA ' + str(torch.version.cuda)})"
    try:
        torch.cuda.init()
        reason = "torch finds no device"
    except (AssertionError, RuntimeError) as error:
        reason = get_first_sentence(error)
    hidden = {name: os.environ[name] for name in _VISIBLE if name in os.environ}
    return f"none: {reason}" + "".join(f", {name}={value}" for name, value in hidden.items())


def describe_kernel(arch: Architecture, dtype: torch.dtype, Nq: int, Nd: int, Lq: int, Ld: int, d: int) -> str:
    """Return the kernel and tile that score contiguous tensors of these sizes without masks and argmax."""
    from .gpu import choose

    Q, D = (torch.empty((n, length, d), dtype=dtype, device="meta") for n, length in ((Nq, Lq), (Nd, Ld)))
    choice = choose.choose_dense(Q, D, None, False, None, arch)
    return f"{choice.kernel} on {arch.name}: {choice.tile()}"


def describe_int8_kernel(arch: Architecture, dtype: torch.dtype, Nq: int, Nd: int, Lq: int, Ld: int, d: int) -> str:
    """Return the kernel and tile that score contiguous int8 documents of these sizes with a scale for each token."""
    from .gpu import choose

    Q = torch.empty((Nq, Lq, d), dtype=dtype, device="meta")
    data, scale = torch.empty((Nd, Ld, d), dtype=torch.int8, device="meta"), torch.empty((Nd, Ld), device="meta")
    choice = choose.choose_int8(Q, data, scale, 2, arch)
    if isinstance(choice, str):
        return f"maxsim_forward_packed on {arch.name}"
    return f"{choice.kernel} on {arch.name}: {choice.tile()}"


def describe_triton() -> str:
    """Return the version of Triton, and whether it is newer than the tested versions."""
    version = _get_version("triton")
    if find_spec("triton") is None:
        return version
    from .gpu import triton_versions

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report prints it
        is_tested = triton_versions.is_tested_version()
    return (
        version if is_tested else f"{version}: newer than {triton_versions.format_newest()}, so plain kernels compute"
    )


def describe_fallbacks() -> list[str]:
    """Return the messages about kernels that did not compile in this process."""
    launcher = sys.modules.get(f"{__package__}.gpu.runtime.launcher")
    return [] if launcher is None else list(launcher.fallback_messages.values())


def _compile_choice(device: torch.device, dtype: torch.dtype, Nq: int, Lq: int, d: int, Nd: int, Ld: int) -> None:
    """Score the call of `describe_choice`, so that a kernel that does not compile is reported."""
    Q, D = (torch.zeros((n, L, d), dtype=dtype, device=device) for n, L in ((Nq, Lq), (Nd, Ld)))
    with torch.no_grad():
        maxsim(Q, D)


def _parse_size(text: str) -> int:
    """Return a size of 1 or more, or raise ArgumentTypeError."""
    size = int(text)
    if size < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {size}")
    return size


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a call for ``--explain``."""
    group = parser.add_argument_group("explanation of a call")
    group.add_argument("--explain", action="store_true", help="print the plan of one call, and why other rules said no")
    group.add_argument("--layout", choices=explain.LAYOUTS, default="cross", help="layout of the call (default cross)")
    names = [str(dtype).removeprefix("torch.") for dtype in _DTYPES[:3]]
    group.add_argument("--dtype", choices=names, default="bfloat16", help="dtype of the tokens (default bfloat16)")
    group.add_argument("--q-mask", action="store_true", help="with a query mask")
    group.add_argument("--d-mask", action="store_true", help="with a document mask")
    group.add_argument("--normalize", action="store_true", help="tokens are normalized")
    group.add_argument("--argmax", action="store_true", help="with argmax")
    group.add_argument("--gradients", choices=explain.METHODS, default="", help="also the backward, by this method")
    group.add_argument("--quantized", metavar="FORMAT", default="", help="format of quantized documents, such as int8")
    group.add_argument("--soft", action="store_true", help="soft MaxSim")
    group.add_argument("--pairs", type=_parse_size, default=512, help="length of the pair list (default 512)")
    group.add_argument("--arch", help="architecture such as sm_90 (default: of the GPU). It needs no GPU")
    group.add_argument("--processors", type=_parse_size, default=132, help="SMs of --arch (default 132)")


def _explain(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Print the explanation of the call that the options describe."""
    if find_spec("triton") is None:
        parser.error("--explain: triton is not installed")
    from .gpu.runtime.arguments import architecture
    from .gpu.tuning.architectures import ARCHITECTURES

    if args.arch is None and not torch.cuda.is_available():
        parser.error("--explain: torch finds no GPU, so --arch is needed")
    if args.arch is not None and args.arch not in ARCHITECTURES:
        parser.error(f"--arch: expected one of {', '.join(ARCHITECTURES)}, got {args.arch!r}")
    if (args.quantized or args.soft) and args.layout != "cross":
        parser.error("--quantized and --soft: only --layout cross")
    if args.quantized and (args.quantized not in FORMATS or args.gradients):
        parser.error(f"--quantized: expected one of {', '.join(FORMATS)} without --gradients, got {args.quantized!r}")
    if args.arch is None:
        arch = architecture(torch.device("cuda", torch.cuda.current_device()))
    else:
        arch = replace(ARCHITECTURES[args.arch], processors=args.processors)
    sizes = args.nq, args.nd, args.lq, args.ld, args.d
    options = args.q_mask, args.d_mask, args.normalize, args.argmax, args.gradients, args.quantized, args.soft
    call = explain.CallDescription(args.layout, getattr(torch, args.dtype), *sizes, *options, args.pairs)
    try:
        print(f"on {arch.name}, {arch.processors} SMs, {KERNEL_VARIABLE}={get_forced_kernel()}: {call}")
        for line in explain.explain_call(call, arch).lines():
            print(line)
    except ValueError as error:  # LIK_OPS_KERNEL, or an option that a format does not support
        print(f"error: {error}")


def _describe_switch(read: Callable[[], object]) -> str:
    """Return the value of a setting, or the error of its variable."""
    try:
        return str(read())
    except ValueError as error:
        return f"error: {error}"


def main(argv: list[str] | None = None) -> None:
    """Print the report, or with ``--explain`` the plan of a call that the options describe."""
    parser = argparse.ArgumentParser(prog="python -m lik_ops.info", description=__doc__)
    parser.add_argument("--nq", type=_parse_size, default=256, help="number of queries (default 256)")
    parser.add_argument("--d", type=_parse_size, default=128, help="features of a token (default 128)")
    parser.add_argument("--lq", type=_parse_size, default=32, help="tokens of a query (default 32)")
    parser.add_argument("--nd", type=_parse_size, default=_DOCUMENTS, help="number of documents (default 1000)")
    parser.add_argument("--ld", type=_parse_size, default=_TOKENS, help="tokens of a document (default 300)")
    parser.add_argument("--compile", action="store_true", help="compile and run these kernels, and report failures")
    _add_explain_options(parser)
    args = parser.parse_args(argv)
    if args.explain:
        return _explain(parser, args)
    sizes = args.nq, args.lq, args.d
    print(f"lik_ops  {__version__}")
    print(f"python   {platform.python_version()} on {platform.system()}")
    print(f"torch    {torch.__version__}")
    print(f"triton   {describe_triton()}")
    print(f"gpus     {describe_gpus()}")
    print(f"backend  {_describe_switch(get_requested_backend)} ({BACKEND_VARIABLE} or lik_ops.use_backend)")
    print(f"kernel   {_describe_switch(get_forced_kernel)} ({KERNEL_VARIABLE})")
    print(f"capture  {_describe_switch(is_capturing)} ({CAPTURE_VARIABLE})")
    print(f"rehearse {_describe_switch(is_rehearsing)} ({REHEARSAL_VARIABLE})")
    for device, name in _describe_devices():
        print(f"{device}: {name}")
        for dtype in _DTYPES:
            text = describe_choice(device, dtype, *sizes, Nd=args.nd, Ld=args.ld)
            print(f"  {str(dtype).removeprefix('torch.'):9} {text}")
            if args.compile and not text.startswith("error"):
                _compile_choice(device, dtype, *sizes, args.nd, args.ld)
        print(f"  {'int8':9} {describe_choice(device, torch.bfloat16, *sizes, int8=True, Nd=args.nd, Ld=args.ld)}")
    for text in describe_fallbacks():
        print(f"fallback {text}")


if __name__ == "__main__":
    main()
