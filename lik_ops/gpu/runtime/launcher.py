"""Launch of compiled kernels with little host time and without a new compilation for each size.

Triton's own ``kernel[grid](...)`` costs tens of microseconds for many grouped arguments. It also compiles a kernel
again whenever an integer becomes 1 or a multiple of 16. Here the first launch compiles through Triton for a description
of the arguments. Later launches that fit the description call the compiled kernel.

A compiled kernel depends on these properties of its arguments:

- tensor: the dtype, and whether the pointer is a multiple of 16 bytes.
- single integer, unless marked ``do_not_specialize``: whether it is 1 or a multiple of 16, as in Triton.
- integers of a group (a named tuple): their widths. Also whether all fields in `VECTOR_STRIDES` are multiples of 16, so
  that loads can be vectorized, and whether each field in `UNIT_STRIDES` is 1.
- constexpr arguments and None: the value.
- tensor descriptor: dtype, block, and layout.

A group of tensors begins with a tensor or None. Other tuples are groups of integers, and constexpr arguments.

The direct launch needs private parts of Triton, which differ between versions. It is used for the versions in
`triton_versions.DIRECT_LAUNCHERS` on NVIDIA GPUs, unless a launch hook is set, as profilers do. Otherwise Triton
launches the compiled kernel. If that does not fit either, and in the interpreter, ``kernel[grid](...)`` launches it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from ...core.settings import is_rehearsing
from ...csrc_triton.common.arguments import UNIT_STRIDES, VECTOR_STRIDES
from .. import triton_versions

_log = logging.getLogger("lik_ops")
_INT32_MAX = 2**31 - 1
_MAX_DESCRIPTORS = 256  # cached for each kernel
_runtime, _compilation = triton.knobs.runtime, triton.knobs.compilation


class _ThreadState(threading.local):
    """State of a thread.

    It holds the active `capture.RecordingMode`, whether the thread has a CUDA context, the function that is called
    instead of launching, and the `rehearsal` of `run_first`.
    """

    active_recorder: Any = None
    dry_run: Callable | None = None
    has_context = False
    rehearsal: Callable | None = None


thread_state = _ThreadState()


def ensure_cuda_context() -> None:
    """Give this thread a CUDA context.

    Triton needs a context to encode descriptors. An autograd thread that has launched nothing yet has none.
    """
    if not thread_state.has_context:
        if torch.cuda.is_available():
            torch.cuda.Event().record()
        thread_state.has_context = True


def has_launch_hooks() -> bool:
    """Return whether a recorder or a launch hook, such as a profiler's, observes each launch."""
    if thread_state.active_recorder is not None:
        return True
    enter_hook, exit_hook = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    try:
        return bool(enter_hook.calls or exit_hook.calls)
    except AttributeError:  # a hook is None or a function instead of a chain of hooks
        return any(hook is not None and getattr(hook, "calls", True) for hook in (enter_hook, exit_hook))


@functools.cache
def _find_stride_fields(group: type) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the positions of the fields that `VECTOR_STRIDES` and `UNIT_STRIDES` name for a group class.

    A group without a class has none.
    """
    names: tuple[str, ...] = getattr(group, "_fields", ())
    vector, unit = (tuple(names.index(n) for n in table.get(group, ())) for table in (VECTOR_STRIDES, UNIT_STRIDES))
    return vector, unit


# Keyed by the id of the kernel, which the value keeps alive.
_parameters: dict[int, tuple[JITFunction, list[tuple[bool, bool]]]] = {}


def _get_parameters(kernel: JITFunction) -> list[tuple[bool, bool]]:
    """Return for each kernel parameter whether it is a constexpr and whether its integers are specialized."""
    entry = _parameters.get(id(kernel))
    if entry is None:
        flags = [(p.is_constexpr, not p.do_not_specialize) for p in kernel.params]
        entry = _parameters[id(kernel)] = kernel, flags
    return entry[1]


def is_descriptor(x: object) -> bool:
    """Return whether an argument is a tensor descriptor."""
    return hasattr(x, "block_shape")


def _has_vector_strides(group: tuple, positions: tuple[int, ...]) -> bool:
    """Return whether the fields of a group at these positions are all multiples of 16."""
    stride_bits = 0
    for n in positions:
        stride_bits |= group[n] or 0
    return stride_bits & 15 == 0


def describe_args(kernel: JITFunction, args: tuple) -> tuple[tuple, list]:
    """Return the description of `args` that selects a compiled kernel, and `args` with pointers for tensors.

    Each part of the description begins with an entry that determines how many entries follow. Different arguments
    therefore never have the same description.

    Args:
        kernel: the kernel.
        args: all of its arguments, in order.
    """
    description: list = []
    values: list = []
    for x, (is_constexpr, is_specialized) in zip(args, _get_parameters(kernel), strict=True):
        kind = type(x)
        if is_constexpr:
            description.append((kind, x))  # equal constants of different types, such as 1 and True, give different code
            values.append(x)
        elif kind is int:
            description.append(x > _INT32_MAX)
            if is_specialized:
                description += (x == 1, x & 15 == 0)
            values.append(x)
        elif x is None:
            description.append(None)
            values.append(None)
        elif isinstance(x, Tensor):
            pointer = x.data_ptr()
            description += (x.dtype, pointer & 15 == 0)
            values.append(pointer)
        elif isinstance(x, tuple):
            description.append(kind)
            values.append(_describe_group(x, kind, description))
        else:
            if is_descriptor(x):
                description += (kind, x.base.dtype, tuple(x.block_shape), getattr(x, "layout", None), x.padding)
            else:
                description.append(kind)
            values.append(x)
    return tuple(description), values


def _describe_group(group: tuple, kind: type, description: list) -> list:
    """Extend `description` by a group's members, and return the members with pointers for tensors."""
    values: list = []
    integer_bits = 0
    for y in group:
        if type(y) is int:
            integer_bits |= y
            description.append(int)
            values.append(y)
            continue
        if y is None:
            description.append(None)
            values.append(None)
        elif isinstance(y, Tensor):
            pointer = y.data_ptr()
            description += (y.dtype, pointer & 15 == 0)
            values.append(pointer)
        else:
            description.append((type(y), y))
            values.append(y)
    vector, unit = _find_stride_fields(kind)
    if not 0 <= integer_bits <= _INT32_MAX:  # some integer needs 64 bits: record which one
        description.append(tuple([type(y) is int and y > _INT32_MAX for y in group]))
    description.append(_has_vector_strides(group, vector))
    description += [group[n] == 1 for n in unit]
    return values


def _make_representative_group(group: tuple) -> tuple:
    """Return a group that Triton specializes in the same way as `describe_args`."""
    vectors, unit = _find_stride_fields(type(group))
    vector = _has_vector_strides(group, vectors)

    def representative(n: int, x: Any) -> Any:
        if not isinstance(x, int) or (x == 1 and n in unit):
            return x
        remainder = 0 if vector and n in vectors else 1
        return (_INT32_MAX + 1 if x > _INT32_MAX else 16) + remainder

    return type(group)(*(representative(n, x) for n, x in enumerate(group)))


def _make_representatives(kernel: JITFunction, args: tuple) -> list:
    """Return `args` with other integers of the same description.

    The kernel that Triton compiles for the result fits every call of this description.
    """
    return [
        _make_representative_group(x) if isinstance(x, tuple) and not constant else x
        for x, (constant, _) in zip(args, _get_parameters(kernel), strict=True)
    ]


class KernelCompileError(RuntimeError):
    """A kernel that Triton cannot compile.

    Nothing was launched. If another kernel can compute the same result, it does.
    """

    def __init__(self, kernel: str, reason: str) -> None:
        super().__init__(f"lik_ops: {kernel} does not compile with triton {triton.__version__}: {reason}")
        self.kernel = kernel


def warn_fallback(error: KernelCompileError, instead: str) -> None:
    """Warn, once for each kernel, that `instead` computes the result of a kernel that does not compile."""
    if error.kernel not in fallback_messages:
        fallback_messages[error.kernel] = f"{error}; {instead} computes instead, more slowly"
        warnings.warn(fallback_messages[error.kernel], RuntimeWarning, stacklevel=3)


fallback_messages: dict[str, str] = {}  # warnings issued, by kernel


# Triton 3.6 builds a Python extension module for each launch function, and all have one name. If Python loads a file of
# this name again, it changes the newest module in place, which another thread may be about to read.
_load_lock = threading.Lock()


class CompiledKernel:
    """A kernel compiled for arguments of one description on one device.

    `direct` is None if only Triton's own launch fits. Otherwise ``direct(x, y, z, stream, values)`` launches the
    kernel. `values` has pointers in place of tensors, and the items of `encoded` in place of each descriptor.
    """

    __slots__ = ("_descriptor_metadata", "_encode", "_encoded", "compiled", "device", "direct")

    def __init__(self, compiled: Any, device: int) -> None:
        self.compiled, self.device = compiled, device
        self.direct: Callable | None = None
        self._encoded: dict[tuple, tuple] = {}
        self._descriptor_metadata: list = []
        if triton_versions.launches_directly():
            try:
                with _load_lock:
                    self._prepare_direct_launch()
            except (AttributeError, ImportError, KeyError) as error:
                _log.warning("triton %s is not as expected, launches are slower: %r", triton.__version__, error)

    def _prepare_direct_launch(self) -> None:
        if triton_versions.needs_launch_work(self.compiled.run):  # loads the kernel
            return
        make_direct, encoder = triton_versions.DIRECT_LAUNCHERS[triton_versions.get_triton_release()]
        self._encode = encoder()
        self._descriptor_metadata = getattr(self.compiled.metadata, "tensordesc_meta", None) or []
        self.direct = make_direct(self.compiled)

    def encoded(self, n: int, descriptor: Any) -> tuple:
        """Return the n-th descriptor in the encoding of the kernel.

        The encoding holds a pointer, a shape, and strides, but no memory. It serves every later tensor at the same
        address.
        """
        key = (n, descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides)
        encoding = self._encoded.get(key)
        if encoding is None:
            ensure_cuda_context()
            if len(self._encoded) >= _MAX_DESCRIPTORS:
                self._encoded.clear()
            encoding = self._encoded[key] = tuple(self._encode(descriptor, self._descriptor_metadata[n]))
        return encoding

    def launch(self, grid: tuple[int, ...], args: tuple, values: list) -> None:
        """Launch on the current stream with `args` and with `values`, their form returned by `describe_args`."""
        x, y, z = grid = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        if self.direct is None or has_launch_hooks():
            self.compiled[grid](*args)
            return
        if self._descriptor_metadata:
            values = self._expand_descriptors(values)
        self.direct(x, y, z, torch._C._cuda_getCurrentRawStream(self.device), values)

    def _expand_descriptors(self, values: list) -> list:
        flat: list = []
        n = 0
        for x in values:
            if is_descriptor(x):
                flat += self.encoded(n, x)
                n += 1
            else:
                flat.append(x)
        return flat


_compiled_kernels: dict[tuple, CompiledKernel] = {}  # by kernel and description
_compile_failures: dict[tuple, str] = {}  # by description: the reason


def _get_compile_state() -> tuple:
    """Return the state, besides arguments and options, that makes Triton compile a kernel again."""
    return torch._C._cuda_getDevice(), _runtime.debug, _compilation.instrumentation_mode


def get_compiled_kernel(
    kernel: JITFunction, args: tuple, options: dict[str, Any]
) -> tuple[CompiledKernel | None, list]:
    """Return the compiled kernel for `args` on the current device, and `args` with pointers for tensors.

    The kernel is compiled if necessary. It is None if Triton returns no kernel, for example if a hook compiles it
    instead.

    Args:
        kernel: the kernel to compile.
        args: all of its arguments, in order.
        options: launch options.

    Raises:
        KernelCompileError: Triton cannot compile the kernel. Nothing was launched.
    """
    key, values = _make_kernel_key(kernel, args, options)
    bound = _compiled_kernels.get(key)
    if bound is None:
        _compile_rehearsed()
        bound = _compiled_kernels.get(key) or _compile_kernel(kernel, args, options, key)
    return bound, values


def _make_kernel_key(kernel: JITFunction, args: tuple, options: dict[str, Any]) -> tuple[tuple, list]:
    """Return the key of a compiled kernel, and `args` with pointers for tensors."""
    description, values = describe_args(kernel, args)
    return (id(kernel), *_get_compile_state(), *options.items(), *description), values


def _compile_kernel(kernel: JITFunction, args: tuple, options: dict[str, Any], key: tuple) -> CompiledKernel | None:
    if key in _compile_failures:
        raise KernelCompileError(kernel.__name__, _compile_failures[key])
    compile_options = triton_versions.add_compile_options(options)
    try:
        triton_versions.fix_cache_key(kernel)
        compiled = kernel.warmup(*_make_representatives(kernel, args), grid=(1, 1, 1), **compile_options)
        if not hasattr(compiled, "_init_handles"):  # None, or compilation has not finished
            return None
        bound = _compiled_kernels[key] = CompiledKernel(compiled, torch._C._cuda_getDevice())
    except Exception as error:  # compiler passes, ptxas, and the driver raise many types
        lines = str(error).strip().splitlines() or [""]
        _compile_failures[key] = f"{type(error).__name__}: {lines[-1]}"
        raise KernelCompileError(kernel.__name__, _compile_failures[key]) from error
    _log.debug("compiled %s, launched %s", kernel.__name__, "directly" if bound.direct else "by Triton")
    return bound


@contextlib.contextmanager
def collect_launches() -> Iterator[list[tuple]]:
    """Collect the launches of this thread as (kernel, grid, args, options) instead of making them.

    The arguments have no memory, so workspaces are freed when the call itself would free them.
    """
    launches: list[tuple] = []
    state, saved_state = thread_state, (thread_state.dry_run, thread_state.active_recorder)

    def collect(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        """Add a launch."""
        launches.append((kernel, grid, tuple(map(_drop_memory, args)), options))

    # With a recorder, every launch goes through `launch`, and no call is captured or replayed.
    state.dry_run, state.active_recorder = collect, launches
    try:
        yield launches
    finally:
        state.dry_run, state.active_recorder = saved_state


def run_first(rehearsal: Callable[[], Any], function: Callable, *arguments: Any) -> Any:
    """Return ``function(*arguments)``, and compile its kernels in parallel.

    If a kernel is missing, `rehearsal` runs once without launches, and all kernels that it would launch are compiled at
    the same time. A launch that is not in the rehearsal compiles its kernel alone. ``LIK_OPS_REHEARSAL=0`` turns the
    rehearsal off.

    Args:
        rehearsal: repeats the call, and may go on with calls that follow it, such as the backward.
        function: the function to run, usually for the first time with these sizes.
        *arguments: arguments of `function`.
    """
    state = thread_state
    if state.dry_run is not None or state.rehearsal is not None:  # an outer call's rehearsal includes this call
        return function(*arguments)
    state.rehearsal = rehearsal
    try:
        return function(*arguments)
    finally:
        state.rehearsal = None


def _compile_rehearsed() -> None:
    """Compile the kernels of the present rehearsal, if there is one."""
    rehearsal, thread_state.rehearsal = thread_state.rehearsal, None
    if rehearsal is None or thread_state.active_recorder is not None or not is_rehearsing():
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    try:
        with collect_launches() as launches:
            rehearsal()
    except Exception as error:  # for example no memory for a rehearsal; an error of the call itself is raised again
        _log.debug("kernels are compiled one by one: %r", error)
        return
    compile_in_parallel(find_missing_kernels(launches))


def find_missing_kernels(launches: list[tuple]) -> dict[tuple, tuple]:
    """Return the arguments of `_compile_kernel` by key, for kernels of collected launches that are not compiled yet."""
    missing_kernels: dict[tuple, tuple] = {}
    for kernel, _, args, options in launches:
        if isinstance(kernel, JITFunction):
            key, _ = _make_kernel_key(kernel, args, options)
            if key not in _compiled_kernels and key not in _compile_failures:
                missing_kernels[key] = kernel, args, options, key
    return missing_kernels


def _drop_memory(x: Any) -> Any:
    """Return an argument with the same description, but without memory if all its pointers are aligned."""
    if isinstance(x, Tensor):
        return x.new_empty(0, device="meta") if x.data_ptr() & 15 == 0 else x
    if is_descriptor(x):
        return dataclasses.replace(x, base=_drop_memory(x.base))
    if isinstance(x, tuple) and hasattr(x, "_make"):
        return type(x)._make(map(_drop_memory, x))
    return x


def compile_in_parallel(missing: dict[tuple, tuple]) -> None:
    """Compile the result of `find_missing_kernels` for the current device in threads, and wait for all of them.

    Triton's compiler holds the GIL only while it reads the source, a quarter of the time. A kernel that does not
    compile raises when it is launched.
    """
    if not missing:
        return
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def compile_one(job: tuple) -> None:
        if device is not None:
            torch.cuda.set_device(device)
            ensure_cuda_context()
        with contextlib.suppress(KernelCompileError):
            _compile_kernel(*job)

    # Triton saves and restores the filters of warnings, which is not safe in threads. This block restores them.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, missing.values()))


def launch(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> CompiledKernel | None:
    """Run ``kernel[grid](*args, **options)`` on the current device and stream.

    Args:
        kernel: the kernel to launch.
        grid: one to three grid sizes.
        args: all arguments of the kernel, in order.
        options: launch options.

    Returns:
        The launched kernel, for callers that launch it again, or None if Triton looked it up itself.

    Raises:
        KernelCompileError: Triton cannot compile the kernel. Nothing was launched.
    """
    if thread_state.dry_run is not None:
        thread_state.dry_run(kernel, grid, args, options)
        return None
    if isinstance(kernel, JITFunction):
        ensure_cuda_context()
        bound, values = get_compiled_kernel(kernel, args, options)
        if thread_state.active_recorder is not None:
            thread_state.active_recorder.record_launch(bound, grid, args, values)
        if bound is not None:
            bound.launch(grid, args, values)
            return bound
    elif thread_state.active_recorder is not None:
        thread_state.active_recorder.record_launch(None, grid, args, [])
    kernel[grid](*args, **triton_versions.add_compile_options(options))
    return None


def describe_launch_path() -> str:
    """Describe as text how kernels are launched on this machine."""
    if triton.knobs.runtime.interpret:
        return "in Triton's interpreter"
    if not triton_versions.launches_directly():
        return f"by triton {triton.__version__}"
    return f"directly (triton {triton.__version__})" if not has_launch_hooks() else "by Triton, as launch hooks are set"
