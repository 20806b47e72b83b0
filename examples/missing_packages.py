"""Say which extra of lik_ops an example needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def explain_missing(packages: str) -> Iterator[None]:
    """End the program with a hint if an import in this context fails.

    Args:
        packages: The argument of pip install, in a checkout of lik_ops.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or str(error)).split(".")[0]
        raise SystemExit(f"{name} is not installed: pip install {packages}") from None
