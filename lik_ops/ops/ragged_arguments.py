"""The arguments of the ragged operators and functions: what they may be, and the errors when they are not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import (
    DTYPES,
    MASK_DTYPES,
    check_per_token,
    check_strided,
    check_tensor,
    same_size,
    score_dtype,
    shape_of,
)
from .stack import sharding

INDEX_DTYPES = (torch.int32, torch.int64)
ARGMAX_DTYPES = (None, torch.int16, torch.int32, torch.int64)


def check_tokens(op: str, Q: Tensor, D: Tensor, q_shape: str, d_shape: str) -> None:
    """Q and D are embeddings of the rank that `q_shape` and `d_shape` spell, alike in dtype, device and d."""
    sharding.register_if_needed()  # every function looks at its tokens before it calls an operator
    for name, t, shape in (("Q", Q, q_shape), ("D", D, d_shape)):
        check_tensor(op, name, t)
        check_strided(op, name, t)
        if t.dim() != shape.count(",") + 1:
            raise ValueError(f"{op}: {name}: expected {shape}, got {shape_of(t)}")
        if t.dtype not in DTYPES:
            raise TypeError(f"{op}: {name}: expected float16, bfloat16, float32 or float64, got {t.dtype}")
    if D.dtype != Q.dtype:
        raise TypeError(f"{op}: D: expected the dtype of Q, {Q.dtype}, got {D.dtype}")
    if D.device != Q.device:
        raise ValueError(f"{op}: D: expected the device of Q, {Q.device}, got {D.device}")
    same_size(D.shape[-1], Q.shape[-1], lambda: f"{op}: D: expected d = {Q.shape[-1]} as in Q, got {shape_of(D)}")
    if isinstance(Q.shape[-1], int) and Q.shape[-1] < 1:
        raise ValueError(f"{op}: Q: expected d >= 1, got {shape_of(Q)}")


def check_indices(op: str, name: str, x: Tensor, expected: Sequence, spelled: str, device: torch.device) -> None:
    """An int32 or int64 tensor of the sizes `expected`, None for any."""
    check_tensor(op, name, x)
    if x.dtype not in INDEX_DTYPES:
        raise TypeError(f"{op}: {name}: expected int32 or int64, got {x.dtype}")
    check_strided(op, name, x)

    def message() -> str:
        return f"{op}: {name}: expected {spelled}, got {shape_of(x)}"

    if x.dim() != len(expected):
        raise ValueError(message())
    for found, size in zip(x.shape, expected, strict=True):
        if size is not None:
            same_size(found, size, message)
    if x.device != device:
        raise ValueError(f"{op}: {name}: expected the device of Q, {device}, got {x.device}")


def check_cu_seqlens(op: str, name: str, cu_seqlens: Tensor, device: torch.device) -> None:
    """Where packed sequences begin and end: ``[N + 1]``."""
    check_indices(op, name, cu_seqlens, (None,), "[N + 1]", device)
    if isinstance(cu_seqlens.shape[0], int) and cu_seqlens.shape[0] < 1:
        raise ValueError(f"{op}: {name}: expected [N + 1], got {shape_of(cu_seqlens)}")


def check_values(op: str, name: str, x: Tensor | None, of_name: str, of: Tensor, dtypes: Sequence) -> None:
    """A mask or weight has the shape of its tensor without d, its device and one of `dtypes`."""
    check_per_token(op, name, x, of_name, of)
    if x is None:
        return
    if x.dtype not in dtypes:
        names = "bool (True = keep) or an integer dtype" if dtypes is MASK_DTYPES else " or ".join(map(str, dtypes))
        raise TypeError(f"{op}: {name}: expected {names}, got {x.dtype}")


def check_ragged(
    op: str,
    Q: Tensor,
    D: Tensor,
    cu_seqlens_q: Tensor,
    d_offsets: Tensor,
    d_lengths: Tensor,
    pairs: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
) -> None:
    """What the operators ask of their tensors."""
    check_tokens(op, Q, D, "[Tq, d]", "[Td, d]")
    check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, Q.device)
    expected: tuple
    if pairs is None and isinstance(d_offsets, Tensor) and d_offsets.dim() == 2:
        expected, spelled = (cu_seqlens_q.shape[0] - 1, None), "[Nq, K]"
    else:
        expected, spelled = (None,), "[Nd]" if pairs is not None else "[Nd] or [Nq, K]"
    check_indices(op, "d_offsets", d_offsets, expected, spelled, Q.device)
    check_indices(op, "d_lengths", d_lengths, d_offsets.shape, "the shape of d_offsets", Q.device)
    if pairs is not None:
        check_indices(op, "pairs", pairs, (None, 2), "[P, 2]", Q.device)
    check_values(op, "q_mask", q_mask, "Q", Q, (torch.bool,))
    check_values(op, "d_mask", d_mask, "D", D, (torch.bool,))
    check_values(op, "q_weight", q_weight, "Q", Q, (score_dtype(Q.dtype),))


def score_sizes(cu_seqlens_q: Tensor, d_offsets: Tensor, pairs: Tensor | None) -> tuple:
    """``(Nq, Nd)``, ``(Nq, K)`` or ``(P,)``."""
    if pairs is not None:
        return (pairs.shape[0],)
    return (cu_seqlens_q.shape[0] - 1, d_offsets.shape[-1])


def argmax_sizes(Q: Tensor, d_offsets: Tensor, pairs: Tensor | None, max_seqlen_q: int) -> tuple:
    """``(Nd, Tq)``, ``(K, Tq)`` or ``(P, max_seqlen_q)``."""
    return (d_offsets.shape[-1], Q.shape[0]) if pairs is None else (pairs.shape[0], max_seqlen_q)
