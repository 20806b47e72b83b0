"""Differences between Triton versions: compile options, direct launches, and the tested versions."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import triton
from triton.runtime.jit import JITCallable

# The fastest kernels are written in Gluon, which may change with each release.
NEWEST_TESTED = (3, 9)


@functools.cache
def get_triton_release() -> tuple[int, int]:
    """Return the major and minor version of the installed Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def format_newest() -> str:
    """Return the newest tested Triton version as text."""
    return ".".join(map(str, NEWEST_TESTED))


@functools.cache
def is_tested_version() -> bool:
    """Return whether the installed Triton was tested, and warn once if it is newer."""
    if get_triton_release() <= NEWEST_TESTED:
        return True
    warnings.warn(
        f"lik_ops: triton {triton.__version__} is newer than {format_newest()}, the newest tested version:"
        " generic Triton kernels run instead, more slowly, and Triton launches them",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


@functools.cache
def _get_common_options() -> dict[str, Any]:
    """Return the compile options of all kernels."""
    # Explicit, because the bits of results depend on this option and Triton's default is about to change.
    options: dict[str, Any] = {"enable_fp_fusion": True}
    if get_triton_release() >= (3, 9) and torch.version.hip is None:
        # Triton asks for level 2 because of a bug in older versions of ptxas. The ptxas of CUDA 13.4 spills at level 2.
        options["ptx_options"] = " ".join(filter(None, (triton.knobs.nvidia.ptxas_options, "--regAllocOptLevel=4")))
    return options


def add_compile_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the launch options with the compile options of all kernels added."""
    # Without debugging, Triton builds the checks of integer additions and products only to drop them again.
    return {**_get_common_options(), "sanitize_overflow": triton.knobs.runtime.debug, **options}


_cache_key_lock = threading.RLock()
_with_fixed_key: set[int] = set()  # ids of functions, which live as long as their modules


def fix_cache_key(function: JITCallable) -> None:
    """Compute the keys of all functions that a kernel calls before the kernel's own key.

    The key selects a compiled kernel on disk. Before Triton 3.8, it contains the constants of a called function only if
    that function already has a key. Kernels would have other keys in another order of calls, and compile again.
    """
    with _cache_key_lock:
        if get_triton_release() >= (3, 8) or id(function) in _with_fixed_key:
            return
        _with_fixed_key.add(id(function))
        for callee in _find_called_functions(function):
            fix_cache_key(callee)
        _ = function.cache_key


def _find_called_functions(function: JITCallable) -> list[JITCallable]:
    """Return the functions of Triton and Gluon that the source of a function names."""
    names, codes = set[str](), [function.fn.__code__]
    while codes:
        code = codes.pop()
        names |= {*code.co_names, *code.co_freevars}
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    scope = function.get_capture_scope()
    values = [scope[name] for name in sorted(names) if name in scope]
    methods = [method for value in values for method in getattr(value, "hash_attrs", ())]
    return [value for value in (*values, *methods) if isinstance(value, JITCallable)]


def _raw_3_6(launcher: Any) -> Any:
    """Return the C launch function below the wrapper that encodes descriptors at each launch."""
    launch = launcher.launch
    return launch if inspect.isbuiltin(launch) else inspect.getclosurevars(launch).nonlocals["launcher"]


def _direct_3_6(compiled: Any) -> Callable:
    """Return a function that launches a compiled kernel of Triton 3.6 directly."""
    launcher, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    raw, cooperative, pdl = _raw_3_6(launcher), launcher.launch_cooperative_grid, launcher.launch_pdl

    def direct(x: int, y: int, z: int, stream: int, args: tuple) -> None:
        raw(x, y, z, stream, function, cooperative, pdl, None, None, packed, None, None, None, *args)

    return direct


def _direct_3_7(compiled: Any) -> Callable:
    """Return a function that launches a compiled kernel of Triton 3.7 or newer directly."""
    launcher, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    flags = launcher.launch_cooperative_grid, launcher.launch_pdl
    types = launcher.arg_annotations, launcher.kernel_signature
    raw = triton.runtime.driver.active.utils.launch
    middle = (*flags, packed, None, None, None, None, None, *types)  # no hooks, no scratch memory

    def direct(x: int, y: int, z: int, stream: int, args: tuple) -> None:
        raw(x, y, z, stream, function, *middle, args)

    return direct


def _encoder_3_6() -> Callable:
    """Return the function that encodes a tensor descriptor in Triton 3.6 and 3.7."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg


def _encoder_3_8() -> Callable:
    """Return the function that encodes a tensor descriptor in Triton 3.8 or newer."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return lambda descriptor, metadata: make_tensordesc_arg(descriptor, metadata, None)


# For each version: a factory of direct launch functions, and a factory of descriptor encoders.
DIRECT_LAUNCHERS: dict[tuple[int, int], tuple[Callable[[Any], Callable], Callable[[], Callable]]] = {
    (3, 6): (_direct_3_6, _encoder_3_6),
    (3, 7): (_direct_3_7, _encoder_3_6),
    (3, 8): (_direct_3_7, _encoder_3_8),
    (3, 9): (_direct_3_7, _encoder_3_8),
}


def launches_directly() -> bool:
    """Return whether kernels can be launched without Triton's launcher in this version."""
    return torch.version.hip is None and get_triton_release() in DIRECT_LAUNCHERS


def needs_launch_work(launcher: Any) -> bool:
    """Return whether Triton allocates scratch memory or instruments the kernel at each launch."""
    scratch = launcher.global_scratch_size or launcher.profile_scratch_size
    return bool(scratch or getattr(launcher, "gsan_enabled", False))
