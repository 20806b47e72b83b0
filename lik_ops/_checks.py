"""Whether calls look at the values of their indices: the environment variable ``LIK_OPS_CHECKS`` and `checks`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ENVIRONMENT_VARIABLE = "LIK_OPS_CHECKS"
_VALUES = {"": False, "0": False, "1": True}

# Below os.environ, whose own look-up takes most of a microsecond of every call.
_environment = getattr(os.environ, "_data", None)
_encoded_name = os.environ.encodekey(ENVIRONMENT_VARIABLE) if hasattr(os.environ, "encodekey") else ENVIRONMENT_VARIABLE

_override: ContextVar[bool | None] = ContextVar("lik_ops_checks", default=None)


def checks_values() -> bool:
    """Whether values are looked at now: as the innermost `checks` says, else ``LIK_OPS_CHECKS``, else not."""
    override = _override.get()
    if override is not None:
        return override
    if _environment is not None and _encoded_name not in _environment:
        return False
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if value not in _VALUES:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}: expected 0 or 1, got {value!r}")
    return _VALUES[value]


@contextmanager
def checks(enabled: bool = True) -> Iterator[None]:
    """Look at the values of cu_seqlens, offsets, lengths and pairs in every call made inside the ``with`` block.

    Without it only types, shapes, dtypes and devices are checked, on every device alike: a segment, offset, length or
    index that reaches outside its tensor gives NaN for its scores. With it, it is a ValueError that names the argument
    and its first entry that is wrong. Looking waits for a GPU at every call, and cannot be captured in a CUDA graph: it
    is for finding mistakes. ``LIK_OPS_CHECKS=1`` does the same for a whole process.

    Args:
        enabled: whether to look; False inside a block that looks, or beside ``LIK_OPS_CHECKS=1``, does not.

    Raises:
        TypeError: `enabled` is not a bool.

    Example:
        >>> Q, D = torch.randn(3, 8), torch.randn(5, 8)
        >>> with lik_ops.checks():
        ...     lik_ops.maxsim_varlen(Q, D, torch.tensor([0, 3]), torch.tensor([0, 4, 6]))
        Traceback (most recent call last):
        ValueError: maxsim_varlen: cu_seqlens_d: expected ascending rows of D [5, 8], got 6 at [2]
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"checks: enabled: expected a bool, got {type(enabled).__name__}")
    token = _override.set(enabled)
    try:
        yield
    finally:
        _override.reset(token)
