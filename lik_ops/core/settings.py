"""Settings of a call: environment variables, and context managers that override them.

``LIK_OPS_BACKEND`` and `use_backend` select the backend. ``LIK_OPS_CHECKS`` and `checks` turn checks of values on.
``LIK_OPS_NORM_WARNING`` and `norm_warning` turn the warning for tokens that look unnormalized on or off.
``LIK_OPS_CAPTURE``, ``LIK_OPS_KERNEL`` and ``LIK_OPS_REHEARSAL`` are for debugging. The first two are read once,
because plans depend on them.
"""

from __future__ import annotations

import functools
import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

BACKENDS = ("auto", "triton", "portable")
# The generic kernels serve every call. The sm_90 kernels serve the calls that `lik_ops.gpu.supports` describes.
KERNELS = ("auto", "generic", "sm90")
BACKEND_VARIABLE, CHECKS_VARIABLE, NORM_VARIABLE = "LIK_OPS_BACKEND", "LIK_OPS_CHECKS", "LIK_OPS_NORM_WARNING"
CAPTURE_VARIABLE, KERNEL_VARIABLE, REHEARSAL_VARIABLE = "LIK_OPS_CAPTURE", "LIK_OPS_KERNEL", "LIK_OPS_REHEARSAL"

# The dictionary behind os.environ. A lookup in os.environ itself costs most of a microsecond in every call.
_environment = getattr(os.environ, "_data", None)
_encode = getattr(os.environ, "encodekey", str)
_backend_key, _checks_key = _encode(BACKEND_VARIABLE), _encode(CHECKS_VARIABLE)

_backend: ContextVar[str | None] = ContextVar("lik_ops_backend", default=None)
_checks: ContextVar[bool | None] = ContextVar("lik_ops_checks", default=None)
_norm_warning: ContextVar[bool | None] = ContextVar("lik_ops_norm_warning", default=None)


def _check_backend_name(name: str, source: str) -> str:
    """Return `name`, or raise TypeError or ValueError, naming `source`, unless it is a backend."""
    expected = f"{source}: expected one of {', '.join(BACKENDS)}, got"
    if not isinstance(name, str):
        raise TypeError(f"{expected} {type(name).__name__}")
    if name not in BACKENDS:
        raise ValueError(f"{expected} {reprlib.repr(name)}")
    return name


def get_requested_backend() -> str:
    """Return the backend of the innermost `use_backend`, else of ``LIK_OPS_BACKEND``, else ``"auto"``."""
    backend = _backend.get()
    if backend is not None:
        return backend
    if _environment is not None and _backend_key not in _environment:
        return "auto"
    return _check_backend_name(os.environ.get(BACKEND_VARIABLE) or "auto", BACKEND_VARIABLE)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Select the backend of every lik_ops call inside the ``with`` block, in this thread or task.

    `maxsim_xtr`, `maxsim_token_topk` and `similarity_map` have no kernels and always run in plain PyTorch.

    An eager backward pass uses the backend of its forward. A compiled backward on CUDA runs in threads of autograd,
    which do not see the block. ``LIK_OPS_BACKEND`` selects its backend.

    Args:
        name: ``"auto"`` (Triton if it can run, else portable), ``"triton"`` (an error if it cannot run) or
            ``"portable"`` (plain PyTorch).

    Raises:
        TypeError: `name` is not a string.
        ValueError: `name` is not one of these.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(5, 300, 128)
        >>> with lik_ops.use_backend("portable"):
        ...     scores = lik_ops.maxsim(Q, D, normalize=True)
    """
    token = _backend.set(_check_backend_name(name, "use_backend: name"))
    try:
        yield
    finally:
        _backend.reset(token)


def is_checking_values() -> bool:
    """Return whether values are checked: the innermost `checks`, else ``LIK_OPS_CHECKS``, else False."""
    is_enabled = _checks.get()
    if is_enabled is not None:
        return is_enabled
    if _environment is not None and _checks_key not in _environment:
        return False
    return _read_flag(CHECKS_VARIABLE, False)


def _read_flag(variable: str, default: bool) -> bool:
    """Return whether an environment variable is 1 and not 0, or `default` if it is unset or empty."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable}: expected 0 or 1, got {value!r}")
    return value == "1" if value else default


@functools.cache
def is_capturing() -> bool:
    """Return whether the launches of repeated calls are captured: ``LIK_OPS_CAPTURE``, else True. Read once."""
    return _read_flag(CAPTURE_VARIABLE, True)


def is_rehearsing() -> bool:
    """Return whether a call that lacks a compiled kernel is rehearsed: ``LIK_OPS_REHEARSAL``, else True."""
    return _read_flag(REHEARSAL_VARIABLE, True)


@functools.cache
def get_forced_kernel() -> str:
    """Return the kernel family that ``LIK_OPS_KERNEL`` forces, or ``"auto"``. Read once.

    Raises:
        ValueError: the variable has another value.
    """
    value = os.environ.get(KERNEL_VARIABLE) or "auto"
    if value not in KERNELS:
        raise ValueError(f"{KERNEL_VARIABLE}: expected one of {', '.join(KERNELS)}, got {reprlib.repr(value)}")
    return value


def require_unforced(reason: str) -> None:
    """Raise ValueError with the reason why no sm_90 kernel serves a call, if ``LIK_OPS_KERNEL=sm90`` forces one."""
    if get_forced_kernel() == "sm90":
        raise ValueError(f"lik_ops: {KERNEL_VARIABLE}=sm90 cannot serve this call: {reason}")


@contextmanager
def _set_enabled(op: str, variable: ContextVar, enabled: bool) -> Iterator[None]:
    """Set a variable to True or False inside the ``with`` block of the function `op`."""
    if not isinstance(enabled, bool):
        raise TypeError(f"{op}: enabled: expected a bool, got {type(enabled).__name__}")
    token = variable.set(enabled)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def checks(enabled: bool = True) -> Iterator[None]:
    """Check the values of cu_seqlens, offsets, lengths and pairs in every call inside the ``with`` block.

    Without it, calls check only types, shapes, dtypes and devices, on every device. A segment, offset, length or index
    that reaches outside its tensor then makes its scores NaN. With it, such an entry raises a ValueError that names the
    argument and the first wrong entry. Offsets that do not cover all rows of a packed tensor are an error too, because
    they are usually lengths.

    The checks synchronize with the GPU in every call and cannot be captured in a CUDA graph, so use them to find
    mistakes. ``LIK_OPS_CHECKS=1`` turns them on for a whole process. Values that differ between the samples of a `vmap`
    are not checked.

    Args:
        enabled: whether to check. False turns the checks off inside another block and under ``LIK_OPS_CHECKS=1``.

    Raises:
        TypeError: `enabled` is not a bool.

    Example:
        >>> Q, D = torch.randn(3, 8), torch.randn(5, 8)
        >>> with lik_ops.checks():
        ...     lik_ops.maxsim_varlen(Q, D, torch.tensor([0, 3]), torch.tensor([0, 4, 6]), normalize=True)
        Traceback (most recent call last):
        ValueError: maxsim_varlen: cu_seqlens_d: expected ascending rows of D [5, 8], got 6 at [2]
    """
    with _set_enabled("checks", _checks, enabled):
        yield


def is_warning_of_norms() -> bool:
    """Return whether tokens may cause a warning: the innermost `norm_warning`, else the variable, else True."""
    is_enabled = _norm_warning.get()
    if is_enabled is not None:
        return is_enabled
    return _read_flag(NORM_VARIABLE, True)


@contextmanager
def norm_warning(enabled: bool = True) -> Iterator[None]:
    """Turn the warning for tokens that look unnormalized on or off inside the ``with`` block.

    Late-interaction models are trained with tokens of norm 1. A scoring function without ``normalize=True`` warns once
    per process if most of the first few tokens of Q or D have another norm. It reads tokens only on the CPU, where
    reading does not wait for a device, or under `checks`. ``LIK_OPS_NORM_WARNING=0`` turns the warning off for a whole
    process.

    Args:
        enabled: whether to warn.

    Raises:
        TypeError: `enabled` is not a bool.

    Example:
        >>> with lik_ops.norm_warning(False):
        ...     scores = lik_ops.maxsim(torch.randn(2, 32, 128), torch.randn(5, 300, 128))
    """
    with _set_enabled("norm_warning", _norm_warning, enabled):
        yield
