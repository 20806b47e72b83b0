"""What a call may be told from outside: environment variables, and context managers that win over them.

``LIK_OPS_BACKEND`` and `use_backend` say who computes, ``LIK_OPS_CHECKS`` and `checks` whether values are looked at.
``LIK_OPS_NORM_WARNING`` and `norm_warning` say whether tokens that look unnormalized cause a warning.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

BACKENDS = ("auto", "triton", "portable")
BACKEND_VARIABLE, CHECKS_VARIABLE, NORM_VARIABLE = "LIK_OPS_BACKEND", "LIK_OPS_CHECKS", "LIK_OPS_NORM_WARNING"

# Below os.environ, whose own look-up takes most of a microsecond of every call.
_environment = getattr(os.environ, "_data", None)
_encode = getattr(os.environ, "encodekey", str)
_backend_key, _checks_key = _encode(BACKEND_VARIABLE), _encode(CHECKS_VARIABLE)

_backend: ContextVar[str | None] = ContextVar("lik_ops_backend", default=None)
_checks: ContextVar[bool | None] = ContextVar("lik_ops_checks", default=None)
_norm_warning: ContextVar[bool | None] = ContextVar("lik_ops_norm_warning", default=None)


def _check_backend_name(name: str, source: str) -> str:
    expected = f"{source}: expected one of {', '.join(BACKENDS)}, got"
    if not isinstance(name, str):
        raise TypeError(f"{expected} {type(name).__name__}")
    if name not in BACKENDS:
        raise ValueError(f"{expected} {reprlib.repr(name)}")
    return name


def get_requested_backend() -> str:
    """The backend asked for now: that of the innermost `use_backend`, else ``LIK_OPS_BACKEND``, else ``"auto"``."""
    chosen = _backend.get()
    if chosen is not None:
        return chosen
    if _environment is not None and _backend_key not in _environment:
        return "auto"
    return _check_backend_name(os.environ.get(BACKEND_VARIABLE) or "auto", BACKEND_VARIABLE)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose the backend of every lik_ops call made inside the ``with`` block, in this thread or task.

    `maxsim_xtr`, `maxsim_token_topk` and `similarity_map` have no kernels: they are plain torch whatever is chosen.

    An eager backward pass uses the backend of its forward. A compiled one on CUDA runs in autograd's own threads, which
    do not see the block: there ``LIK_OPS_BACKEND`` decides.

    Args:
        name: ``"auto"`` (Triton where it can run, else portable), ``"triton"`` (an error where it cannot run) or
            ``"portable"`` (plain torch).

    Raises:
        TypeError: `name` is no string.
        ValueError: `name` is none of these.

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
    """Whether values are looked at now: as the innermost `checks` says, else ``LIK_OPS_CHECKS``, else not."""
    chosen = _checks.get()
    if chosen is not None:
        return chosen
    if _environment is not None and _checks_key not in _environment:
        return False
    value = os.environ.get(CHECKS_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{CHECKS_VARIABLE}: expected 0 or 1, got {value!r}")
    return value == "1"


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
    """Look at the values of cu_seqlens, offsets, lengths and pairs in every call made inside the ``with`` block.

    Without it only types, shapes, dtypes and devices are checked, on every device alike: a segment, offset, length or
    index that reaches outside its tensor gives NaN for its scores. With it, it is a ValueError that names the argument
    and its first entry that is wrong. Looking waits for a GPU at every call, and cannot be captured in a CUDA graph: it
    is for finding mistakes. ``LIK_OPS_CHECKS=1`` does the same for a whole process. Values that each sample of a
    `vmap` has its own of are not looked at. Offsets that do not cover all rows of a packed tensor are an error too:
    they are usually lengths.

    Args:
        enabled: whether to look; False inside a block that looks, or beside ``LIK_OPS_CHECKS=1``, does not.

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
    """Return whether tokens may cause a warning: as the innermost `norm_warning` says, else the variable, else True."""
    chosen = _norm_warning.get()
    if chosen is not None:
        return chosen
    value = os.environ.get(NORM_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{NORM_VARIABLE}: expected 0 or 1, got {value!r}")
    return value != "0"


@contextmanager
def norm_warning(enabled: bool = True) -> Iterator[None]:
    """Turn the warning for tokens that look unnormalized on or off inside the ``with`` block.

    Late-interaction models are trained with tokens of norm 1. A scoring function without ``normalize=True`` warns once
    per process if most of a few tokens of Q or D have another norm: it reads them on the CPU, where reading waits for
    nothing, or under `checks`. ``LIK_OPS_NORM_WARNING=0`` turns the warning off for a whole process.

    Args:
        enabled: False turns the warning off.

    Raises:
        TypeError: `enabled` is not a bool.

    Example:
        >>> with lik_ops.norm_warning(False):
        ...     scores = lik_ops.maxsim(torch.randn(2, 32, 128), torch.randn(5, 300, 128))
    """
    with _set_enabled("norm_warning", _norm_warning, enabled):
        yield
