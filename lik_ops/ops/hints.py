"""One-time warnings about values that look like a mistake, on the CPU, where reading a value waits for nothing."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

from ..arguments import LOOKS_LIKE_LENGTHS, shape_of
from . import values
from .watchers import is_memory, nobody_watches

_given: set[str] = set()  # warnings that this process had


def may_read(*tensors: Tensor) -> bool:
    """Return whether the values of these tensors may be read: of eager tensors in host memory that nobody watches."""
    if torch.compiler.is_compiling() or not nobody_watches():
        return False
    return all(x.device.type == "cpu" and is_memory(x) for x in tensors)


def warn_once(kind: str, message: str) -> None:
    """Warn at the line that called lik_ops, unless this process had a warning of this kind."""
    _given.add(kind)
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("lik_ops", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def look_at_offsets(op: str, name: str, cu_seqlens: Tensor, of_name: str, of: Tensor, whole: bool) -> None:
    """Under `lik_ops.checks` raise for wrong offsets, else hint at lengths in their place if they are `whole`."""
    if values.looks(cu_seqlens):
        values.check_cu_seqlens(op, name, cu_seqlens, of_name, of, whole)
    elif whole:
        hint_at_lengths(op, name, cu_seqlens, of_name, of)


def hint_at_lengths(op: str, name: str, cu_seqlens: Tensor, of_name: str, of: Tensor) -> None:
    """Warn if offsets do not cover a packed tensor, but add up to its rows: then they are certainly its lengths."""
    if not may_read(cu_seqlens) or "lengths" in _given:
        return
    ends = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if ends != (0, of.shape[0]) and int(cu_seqlens.sum()) == of.shape[0]:
        warn_once(
            "lengths",
            f"{op}: {name}: expected offsets, from 0 to {of.shape[0]} to cover all rows of {of_name} {shape_of(of)},"
            f" got {ends[0]} to {ends[1]}: {LOOKS_LIKE_LENGTHS}. Under lik_ops.checks() this is an error. Only the"
            " first such call of a process warns.",
        )
