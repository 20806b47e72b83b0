"""Warnings and log lines about values that look like a mistake.

Values are read only if this does not wait for a device, on the CPU, or under `lik_ops.checks`. Dense functions inspect
the first call with each dispatch key, and other functions their first calls. A repeated call costs nothing.
"""

from __future__ import annotations

import logging
import sys
import warnings

import torch
from torch import Tensor

from ...core.arguments import LOOKS_LIKE_LENGTHS, format_shape
from ...core.settings import is_warning_of_norms
from ..fast_path.watchers import is_dispatch_idle, is_ordinary_tensor
from . import values

_log = logging.getLogger("lik_ops")
_MAX_INSPECTED_CALLS = 16  # inspected calls of each function
_MAX_INSPECTED_TOKENS = 64  # inspected tokens of each tensor
_inspected_calls: dict[str, int] = {}  # number of inspected calls by function
_issued_warnings: set[str] = set()  # kinds of warnings that this process has issued


def is_readable(*tensors: Tensor) -> bool:
    """Return whether these are ordinary tensors in host memory whose values may be read, without modes or tracers."""
    if torch.compiler.is_compiling() or not is_dispatch_idle():
        return False
    return all(x.device.type == "cpu" and is_ordinary_tensor(x) for x in tensors)


def warn_once(kind: str, message: str) -> None:
    """Warn at the line that called lik_ops, and store the kind. Callers skip the kinds in `_issued_warnings`."""
    _issued_warnings.add(kind)
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("lik_ops", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def inspect_offsets(op: str, name: str, cu_seqlens: Tensor, packed_name: str, packed: Tensor, must_cover: bool) -> None:
    """Under `lik_ops.checks` raise for wrong offsets. Otherwise warn of lengths if `must_cover`."""
    if values.needs_value_checks(cu_seqlens):
        values.check_cu_seqlens(op, name, cu_seqlens, packed_name, packed, must_cover)
    elif must_cover:
        warn_of_lengths(op, name, cu_seqlens, packed_name, packed)


def warn_of_lengths(op: str, name: str, cu_seqlens: Tensor, packed_name: str, packed: Tensor) -> None:
    """Warn if offsets do not cover a packed tensor but sum to its number of rows, because these are lengths."""
    if not is_readable(cu_seqlens) or "lengths" in _issued_warnings:
        return
    ends = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if ends != (0, packed.shape[0]) and int(cu_seqlens.sum()) == packed.shape[0]:
        warn_once(
            "lengths",
            f"{op}: {name}: expected offsets, from 0 to {packed.shape[0]} to cover all rows of {packed_name}"
            f" {format_shape(packed)}, got {ends[0]} to {ends[1]}: {LOOKS_LIKE_LENGTHS}. Under lik_ops.checks() this is"
            " an error. Only the first such call of a process warns.",
        )


def inspect_tokens(
    op: str, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, normalize: bool
) -> None:
    """Warn once per process about tokens that look unnormalized, and log calls in which every score is -inf."""
    if torch.compiler.is_compiling():  # first, because the counter would become a guard, and each eager call recompile
        return
    count = _inspected_calls.get(op, 0)
    tensors = [x for x in (Q, D, q_mask, d_mask) if x is not None]
    if count >= _MAX_INSPECTED_CALLS or not (
        is_readable(*tensors) or (values.needs_value_checks(*tensors) and all(map(is_ordinary_tensor, tensors)))
    ):
        return
    _inspected_calls[op] = count + 1
    if Q.dim() == D.dim() == 2:
        _log.info("%s: one score of one query %s and one document %s", op, format_shape(Q), format_shape(D))
    if _has_no_kept_document(Q, D, q_mask, d_mask):
        text = f"D {format_shape(D)}" if d_mask is None else f"d_mask {format_shape(d_mask)}, where True keeps a token"
        _log.info("%s: every score is -inf: no document keeps a token of %s", op, text)
    if normalize or "norms" in _issued_warnings or not is_warning_of_norms():
        return
    for name, x, mask in (("Q", Q, q_mask), ("D", D, d_mask)):
        if (norm := _find_unusual_norm(x, mask)) is not None:
            warn_once(
                "norms",
                f"{op}: {name}: expected tokens of norm 1 as late-interaction models are trained with, got norms around"
                f" {norm:.3g}. Pass normalize=True, or turn this warning off with LIK_OPS_NORM_WARNING=0 or"
                " `with lik_ops.norm_warning(False):`. Only the first such call of a process warns.",
            )
            return


def _has_no_kept_document(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> bool:
    """Return whether scores exist and all of them are -inf because no document keeps a token."""
    if 0 in Q.shape[:-1] or 0 in D.shape[:-2]:
        return False
    is_empty = D.shape[-2] == 0 or (d_mask is not None and not bool((d_mask != 0).any()))
    return is_empty and (q_mask is None or bool((q_mask != 0).any(-1).all()))


@torch.no_grad()
def _find_unusual_norm(x: Tensor, mask: Tensor | None) -> float | None:
    """Return the median norm of the first tokens if most of them have a norm far from 1. Zeros are padding."""
    while x.dim() > 2 and x.shape[0]:
        x, mask = x[0], None if mask is None else mask[0]
    rows = x[:_MAX_INSPECTED_TOKENS]
    if x.dim() != 2 or rows.numel() == 0:
        return None
    norms = torch.linalg.vector_norm(rows.float(), dim=-1)
    norms = norms[(norms > 0) & norms.isfinite() & (True if mask is None else mask[:_MAX_INSPECTED_TOKENS] != 0)]
    is_unusual = (norms - 1).abs() > 0.1
    return float(norms.median()) if 2 * int(is_unusual.sum()) > len(norms) else None
