"""What differs between versions of Triton: compile options, direct launches, and which versions are known."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import triton

NEWEST_TESTED = (3, 9)  # tested; Gluon, in which the fastest kernels are written, may change with each release


@functools.cache
def get_triton_release() -> tuple[int, int]:
    """Major and minor number of the installed Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def format_newest() -> str:
    return ".".join(map(str, NEWEST_TESTED))


@functools.cache
def is_tested_version() -> bool:
    """Whether the installed Triton was tested; warns once if it is newer."""
    if get_triton_release() <= NEWEST_TESTED:
        return True
    warnings.warn(
        f"lik_ops: triton {triton.__version__} is newer than {format_newest()}, the newest that was tested:"
        " plain Triton kernels compute, more slowly, and Triton launches them",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


@functools.cache
def _get_common_options() -> dict[str, Any]:
    # Said, not left to Triton's default, which is about to change: bits hang on it.
    options: dict[str, Any] = {"enable_fp_fusion": True}
    if get_triton_release() >= (3, 9) and torch.version.hip is None:
        # Triton asks for level 2 because of a fault of older versions of ptxas; that of CUDA 13.4 spills then.
        options["ptx_options"] = " ".join(filter(None, (triton.knobs.nvidia.ptxas_options, "--regAllocOptLevel=4")))
    return options


def add_compile_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a launch with those that every kernel is compiled with."""
    return {**_get_common_options(), **options}


def _raw_3_6(launcher: Any) -> Any:
    """The C function, from below what encodes descriptors anew at each launch."""
    launch = launcher.launch
    return launch if inspect.isbuiltin(launch) else inspect.getclosurevars(launch).nonlocals["launcher"]


def _direct_3_6(compiled: Any) -> Callable:
    launcher, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    raw, cooperative, pdl = _raw_3_6(launcher), launcher.launch_cooperative_grid, launcher.launch_pdl

    def direct(x: int, y: int, z: int, stream: int, args: tuple) -> None:
        raw(x, y, z, stream, function, cooperative, pdl, None, None, packed, None, None, None, *args)

    return direct


def _direct_3_7(compiled: Any) -> Callable:
    launcher, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    flags = launcher.launch_cooperative_grid, launcher.launch_pdl
    types = launcher.arg_annotations, launcher.kernel_signature
    raw = triton.runtime.driver.active.utils.launch
    middle = (*flags, packed, None, None, None, None, None, *types)  # no hooks, no scratch memory

    def direct(x: int, y: int, z: int, stream: int, args: tuple) -> None:
        raw(x, y, z, stream, function, *middle, args)

    return direct


def _encoder_3_6() -> Callable:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg


def _encoder_3_8() -> Callable:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return lambda descriptor, metadata: make_tensordesc_arg(descriptor, metadata, None)


# Of each version: what makes a direct launch of a compiled kernel, and what encodes a tensor descriptor for it.
DIRECT_LAUNCHERS: dict[tuple[int, int], tuple[Callable[[Any], Callable], Callable[[], Callable]]] = {
    (3, 6): (_direct_3_6, _encoder_3_6),
    (3, 7): (_direct_3_7, _encoder_3_6),
    (3, 8): (_direct_3_7, _encoder_3_8),
    (3, 9): (_direct_3_7, _encoder_3_8),
}


def launches_directly() -> bool:
    """Whether it is known how to launch past Triton's own launcher."""
    return torch.version.hip is None and get_triton_release() in DIRECT_LAUNCHERS


def needs_launch_work(launcher: Any) -> bool:
    """Whether Triton does something at each launch of a kernel: allocates memory for it, or watches what it does."""
    scratch = launcher.global_scratch_size or launcher.profile_scratch_size
    return bool(scratch or getattr(launcher, "gsan_enabled", False))
