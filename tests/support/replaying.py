"""Replay launches in Triton's interpreter, where no kernel is compiled.

Use with ``TRITON_INTERPRET=1 pytest -p tests.support.replaying``.

A replay on a GPU passes pointers instead of tensors to a compiled kernel. This module turns them back into tensors.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lik_ops.gpu import triton_versions
from lik_ops.gpu.runtime import capture, launcher


class Replayed:
    """Counter of replayed launches."""

    count = 0


replayed = Replayed()


class Interpreted:
    """Stand-in for a compiled kernel that knows the metadata of the captured tensors, but not their addresses."""

    def __init__(self, kernel: Any, args: tuple, options: dict) -> None:
        self.kernel, self.options = kernel, triton_versions.add_compile_options(options)
        self.kinds = [type(x) for x in args]
        self.known = [[_get_metadata(y) for y in x] if _is_group(x) else _get_metadata(x) for x in args]

    def encoded(self, n: int, descriptor: Any) -> tuple:
        return (descriptor,)

    def direct(self, x: int, y: int, z: int, stream: int, values: list) -> None:
        replayed.count += 1
        args = []
        for kind, known, value in zip(self.kinds, self.known, values, strict=True):
            if isinstance(value, list):
                given = [_restore_tensor(k, v) for k, v in zip(known, value, strict=True)]
                args.append(kind._make(given) if hasattr(kind, "_make") else kind(given))
            else:
                args.append(_restore_tensor(known, value))
        self.kernel[x, y, z](*args, **self.options)


def _is_group(x: Any) -> bool:
    return isinstance(x, tuple) and any(isinstance(y, Tensor) for y in x)


def _get_metadata(x: Any) -> Any:
    return (x.dtype, x.shape, x.stride()) if isinstance(x, Tensor) else None


def _restore_tensor(known: Any, value: Any) -> Any:
    """Return a tensor at an address if a tensor was captured there, else the value."""
    if known is None:
        return value
    dtype, shape, strides = known
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * (reach * dtype.itemsize)).from_address(value)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def launch(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
    """Run a kernel in the interpreter, and report the launch to a capture in progress."""
    if launcher.thread_state.active_recorder is not None:
        values = [list(x) if _is_group(x) else x for x in args]
        launcher.thread_state.active_recorder.record_launch(Interpreted(kernel, args, options), grid, args, values)
    with _disable_current_modes():  # the interpreter copies tensors
        kernel[grid](*args, **triton_versions.add_compile_options(options))


def current_device() -> None:
    """Return the current device of CPU tensors."""


def raw_stream(index: None) -> int:
    """Return the default stream."""
    return 0


def pytest_configure(config: Any) -> None:
    launcher.launch = launch
    capture.current_device, capture.raw_stream = current_device, raw_stream


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{replayed.count} launches were replayed")
