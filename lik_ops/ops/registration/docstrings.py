"""Docstrings of operators for ``help(torch.ops.lik.maxsim)``, which torch does not provide."""

from __future__ import annotations

import inspect
from typing import Any

from ..._ops import ops as lik


def set_docstring(name: str, text: str) -> None:
    """Set the docstring of an operator and of its overload to its schema and `text`."""
    packet: Any = getattr(lik, name)
    packet.__doc__ = packet.default.__doc__ = f"{packet.default._schema}\n\n{inspect.cleandoc(text)}"
