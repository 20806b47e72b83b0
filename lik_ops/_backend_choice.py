"""Which backend a call uses: the environment variable ``LIK_OPS_BACKEND`` and the context manager `use_backend`."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

BACKENDS = ("auto", "triton", "portable")
ENVIRONMENT_VARIABLE = "LIK_OPS_BACKEND"

# Below os.environ, whose own look-up takes most of a microsecond of every call.
_environment = getattr(os.environ, "_data", None)
_encoded_name = os.environ.encodekey(ENVIRONMENT_VARIABLE) if hasattr(os.environ, "encodekey") else ENVIRONMENT_VARIABLE

_override: ContextVar[str | None] = ContextVar("lik_ops_backend", default=None)


def _checked(name: str, source: str) -> str:
    expected = f"{source}: expected one of {', '.join(BACKENDS)}, got"
    if not isinstance(name, str):
        raise TypeError(f"{expected} {type(name).__name__}")
    if name not in BACKENDS:
        raise ValueError(f"{expected} {reprlib.repr(name)}")
    return name


def requested_backend() -> str:
    """The backend asked for now: that of the innermost `use_backend`, else ``LIK_OPS_BACKEND``, else ``"auto"``."""
    override = _override.get()
    if override is not None:
        return override
    if _environment is not None and _encoded_name not in _environment:
        return "auto"
    return _checked(os.environ.get(ENVIRONMENT_VARIABLE) or "auto", ENVIRONMENT_VARIABLE)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose the backend of every lik_ops call made inside the ``with`` block, in this thread or task.

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
        ...     scores = lik_ops.maxsim(Q, D)
    """
    token = _override.set(_checked(name, "use_backend: name"))
    try:
        yield
    finally:
        _override.reset(token)
