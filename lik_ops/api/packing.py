"""Conversion between sequences of tokens and packed tokens, and checks of packed arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.arguments import (
    INDEX_DTYPES,
    check_count,
    check_cu_seqlens,
    check_fits_memory,
    check_has_values,
    check_indices,
    check_no_dtensor,
    check_same_size,
    check_strided,
    check_tensor,
    check_tokens,
    describe_non_tensor,
    describe_type,
    format_shape,
    score_dtype,
)
from ..core.segments import compute_offsets
from ..ops.checks import hints, values
from ..ops.stack import autocast, sharding

__all__ = [
    "PackedSequences",
    "check_sides",
    "is_sequences",
    "lengths_to_mask",
    "pack",
    "pack_padded",
    "pack_sequences",
    "pack_side",
    "pack_weights",
    "unpack",
]


def pack(sequences: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate sequences of tokens into packed tokens and ``cu_seqlens``.

    Args:
        sequences: at least one tensor ``[L_i, d]``, all of the same d, dtype and device. L_i may be 0. The elements may
            also be ``[L_i, ...]``, one entry for each token, for example weights. A nested tensor is also accepted. The
            values of a jagged tensor are used without a copy.

    Returns:
        ``(packed, cu_seqlens)`` on the same device. The packed tokens are ``[sum L_i, d]`` and differentiable. The
        bounds are ``[N + 1]``: the first row of each sequence, and the end of the last one. They are int64, or the
        offsets of a jagged tensor.

    Raises:
        TypeError: an element is not a tensor, or the dtypes differ.
        ValueError: there is no element, or the ranks, d or devices differ.

    Example:
        >>> packed, cu_seqlens = lik_ops.pack([torch.randn(3, 8), torch.randn(5, 8)])
        >>> packed.shape, cu_seqlens
        (torch.Size([8, 8]), tensor([0, 3, 8]))
    """
    tokens, cu_seqlens, _, _ = pack_sequences("pack", "sequences", sequences)
    return tokens, cu_seqlens


def unpack(packed: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """Return the sequences of packed tokens as views.

    The function reads `cu_seqlens` on the host, so it waits for a GPU.

    Args:
        packed: ``[T, ...]``: tokens, or one entry for each token.
        cu_seqlens: ``[N + 1]``, int32 or int64.

    Returns:
        A list of N tensors ``[L_i, ...]``.

    Raises:
        TypeError: `packed` or `cu_seqlens` is not a tensor, or the dtype of `cu_seqlens` is wrong.
        ValueError: `cu_seqlens` is not ascending, or its values are not in the range from 0 to T.

    Example:
        >>> [x.shape[0] for x in lik_ops.unpack(*lik_ops.pack([torch.randn(3, 8), torch.randn(5, 8)]))]
        [3, 5]
    """
    check_no_dtensor("unpack", packed=packed, cu_seqlens=cu_seqlens)
    check_tensor("unpack", "packed", packed)
    check_strided("unpack", "packed", packed)
    if packed.dim() == 0:
        raise ValueError("unpack: packed: expected [T, ...], got []")
    check_tensor("unpack", "cu_seqlens", cu_seqlens)
    check_cu_seqlens("unpack", "cu_seqlens", cu_seqlens, cu_seqlens.device)
    check_has_values("unpack", "cu_seqlens", cu_seqlens)
    ends = cu_seqlens.cpu()
    values.check_cu_seqlens("unpack", "cu_seqlens", ends, "packed", packed, must_cover=values.needs_value_checks(ends))
    hints.warn_of_lengths("unpack", "cu_seqlens", ends, "packed", packed)
    return [packed[a:b] for a, b in itertools.pairwise(ends.tolist())]


def lengths_to_mask(lengths: Tensor, L: int) -> Tensor:
    """Return the mask that keeps the first tokens of sequences that are padded at the end.

    Args:
        lengths: ``[...]``, int32 or int64. Values below 0 are treated as 0, and values above `L` as `L`.
        L: the number of tokens of a padded sequence.

    Returns:
        A bool mask ``[..., L]``, True for tokens to keep.

    Raises:
        TypeError: `lengths` is not a tensor of integers, or `L` is not an int.
        ValueError: `L` is negative.

    Example:
        >>> lik_ops.lengths_to_mask(torch.tensor([1, 3]), 3)
        tensor([[ True, False, False],
                [ True,  True,  True]])
    """
    check_tensor("lengths_to_mask", "lengths", lengths)
    check_strided("lengths_to_mask", "lengths", lengths)
    if lengths.dtype not in INDEX_DTYPES:
        raise TypeError(f"lengths_to_mask: lengths: expected int32 or int64, got {lengths.dtype}")
    check_count("lengths_to_mask", "L", L)
    check_fits_memory("lengths_to_mask", "L", (*lengths.shape, L))
    sharding.register_if_needed()
    return sharding.replicate_like(torch.arange(L, device=lengths.device), lengths) < lengths.unsqueeze(-1)


class PackedPairs(NamedTuple):
    """Packed queries and candidates with their pairs: arguments of `lik_ops.maxsim_pair_list`."""

    Q: Tensor  # [Tq, d]
    D: Tensor  # [Td, d]
    pairs: Tensor  # [B * C, 2]
    cu_seqlens_q: Tensor  # [B + 1]
    cu_seqlens_d: Tensor  # [B * C + 1]


def pack_padded(Q: Tensor, D: Tensor, query_lengths: Tensor, doc_lengths: Tensor) -> PackedPairs:
    """Pack padded queries and candidates, and list their pairs for `maxsim_pair_list`.

    Use this function if packed tokens are needed. `maxsim_padded` scores padded tokens in place. The function reads the
    lengths on the host, so it waits for a GPU.

    Args:
        Q: query tokens ``[B, Lq, d]``.
        D: candidates ``[B, C, Ld, d]``.
        query_lengths: ``[B]``, int32 or int64: the number of tokens of each query.
        doc_lengths: ``[B, C]``, int32 or int64: the number of tokens of each candidate.

    Returns:
        ``(Q, D, pairs, cu_seqlens_q, cu_seqlens_d)``. Q and D are packed and differentiable. Row ``b * C + c`` of
        `pairs` ``[B * C, 2]`` is query b with its candidate c. The bounds are int64.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size or device is wrong, or a length is negative or larger than the padded length.

    Example:
        >>> Q, D = torch.randn(2, 3, 8), torch.randn(2, 4, 5, 8)
        >>> found = lik_ops.pack_padded(Q, D, torch.tensor([3, 1]), torch.full((2, 4), 2))
        >>> found.Q.shape, found.D.shape, found.pairs.shape
        (torch.Size([4, 8]), torch.Size([16, 8]), torch.Size([8, 2]))
    """
    op = "pack_padded"
    check_tokens(op, Q, D, ("[B, Lq, d]",), ("[B, C, Ld, d]",))
    if D.shape[0] != Q.shape[0]:
        raise ValueError(f"{op}: D: expected B = {Q.shape[0]} lists of candidates, got {format_shape(D)}")
    B, C = D.shape[:2]
    check_indices(op, "query_lengths", query_lengths, (B,), "[B]", Q.device)
    check_indices(op, "doc_lengths", doc_lengths, (B, C), "[B, C]", Q.device)
    for name, lengths, padded in (("query_lengths", query_lengths, Q), ("doc_lengths", doc_lengths, D)):
        values.check_lengths(op, name, lengths, padded.shape[-2])
    q_keep, d_keep = lengths_to_mask(query_lengths, Q.shape[1]), lengths_to_mask(doc_lengths, D.shape[2])
    queries = torch.arange(B, device=Q.device).repeat_interleave(C)
    pairs = torch.stack([queries, torch.arange(B * C, device=Q.device)], dim=1)
    return PackedPairs(Q[q_keep], D[d_keep], pairs, compute_offsets(query_lengths), compute_offsets(doc_lengths))


class PackedSequences(NamedTuple):
    """Packed sequences with everything that is known without a device sync."""

    tokens: Tensor  # [T, ...]
    cu_seqlens: Tensor  # [N + 1]
    lengths: list[int] | None  # for a list; None for a jagged tensor
    rows: Any  # for a jagged tensor: its symbolic length, which identifies its offsets


def is_sequences(x: Any) -> bool:
    """Return whether `x` is a list, a tuple or a nested tensor, which `pack_sequences` packs."""
    return isinstance(x, (list, tuple)) or (isinstance(x, Tensor) and x.is_nested)


def pack_sequences(op: str, name: str, x: Any, nothing: Tensor | None = None) -> PackedSequences:
    """Return a list of tensors ``[L_i, ...]`` or a nested tensor packed.

    `nothing` are the packed tokens of an empty list, which is an error if `nothing` is None. Raise TypeError or
    ValueError, naming the element, if an element is not a tensor or differs from the first in d, dtype or device.
    """
    if isinstance(x, Tensor) and x.is_nested:
        jagged: Any = x
        if x.layout == torch.jagged and jagged.lengths() is None:
            if x.values().shape[1:] != x.shape[2:]:  # not tested by type, because every size is an int in Dynamo
                raise ValueError(f"{op}: {name}: expected a nested tensor [N, L, ...] ragged in L, got {list(x.shape)}")
            return PackedSequences(x.values(), jagged.offsets(), None, x.shape[1])
        x = x.unbind()  # a jagged tensor with gaps, or the strided layout
    # 0-d tensors and arrays are instances of Iterable, but raise when iterated.
    if not isinstance(x, Iterable) or getattr(x, "ndim", None) == 0:
        raise TypeError(f"{op}: {name}: expected a list of tensors or a nested tensor, got {describe_type(x)}")
    if isinstance(x, Tensor):
        check_strided(op, name, x)
    sequences = [*x]
    if not sequences:
        if nothing is None:
            raise ValueError(f"{op}: {name}: expected at least one tensor, got none")
        bounds = torch.zeros(1, dtype=torch.int64, device=nothing.device)
        return PackedSequences(nothing, sharding.replicate_like(bounds, nothing), [], None)
    first = sequences[0]
    for i, t in enumerate(sequences):
        prefix = f"{op}: {name}[{i}]"
        if not isinstance(t, Tensor):
            raise TypeError(f"{prefix}: expected a Tensor, got {describe_non_tensor(t)}")
        check_strided(op, f"{name}[{i}]", t)
        if t.dim() == 0 or t.shape[1:] != first.shape[1:]:
            expected = ", ".join(map(str, ("L", *first.shape[1:]) if first.dim() else ("L", "d")))
            raise ValueError(f"{prefix}: expected [{expected}], got {list(t.shape)}")
        if t.dtype != first.dtype:
            raise TypeError(f"{prefix}: expected the dtype of the first, {first.dtype}, got {t.dtype}")
        if t.device != first.device:
            raise ValueError(f"{prefix}: expected the device of the first, {first.device}, got {t.device}")
    lengths = [t.shape[0] for t in sequences]
    # In an autocast region of one half type, `torch.cat` cannot join tensors of the other half type.
    with autocast.suspend_autocast(first.device.type):
        tokens = torch.cat(sequences)
    bounds = copy_from_host([0, *itertools.accumulate(lengths)], first.device)
    return PackedSequences(tokens, sharding.replicate_like(bounds, tokens), lengths, None)


def copy_from_host(values: list, device: torch.device) -> Tensor:
    """Return host values as a tensor on `device`, without waiting for the device."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(values, device=device)
    return torch.tensor(values, device="cpu", pin_memory=True).to(device, non_blocking=True)


def _make_empty_tokens(other_side: Any) -> Tensor | None:
    """Return the packed tokens of an empty list, like the other side, or None if the other side has no tokens."""
    if is_sequences(other_side):
        is_jagged = isinstance(other_side, Tensor) and other_side.layout == torch.jagged
        other_side = other_side.values() if is_jagged else next(iter(other_side), None)
    is_tokens = isinstance(other_side, Tensor) and other_side.layout == torch.strided and other_side.dim() > 0
    return other_side.new_empty((0, other_side.shape[-1])) if is_tokens else None


def pack_side(op: str, name: str, x: Any, mask: Any, cu_seqlens: Any, other_side: Any) -> PackedSequences:
    """Return one side of a call packed ``[T, d]``. Raise if a mask or bounds are given with a list or nested tensor.

    `name` is "Q", or the name of the documents. `other_side` gives an empty list its d, dtype and device.
    """
    is_empty = isinstance(x, (list, tuple)) and not x
    sequences = pack_sequences(op, name, x, _make_empty_tokens(other_side) if is_empty else None)
    if sequences.tokens.dim() != 2:
        shape = ", ".join(map(str, ("L", *sequences.tokens.shape[1:])))
        raise ValueError(f"{op}: {name}: expected a list of [L, d], got one of [{shape}]")
    side = "q" if name == "Q" else "d"
    expected = f"expected None with a list or nested tensor {name}"
    if cu_seqlens is not None:
        raise ValueError(f"{op}: cu_seqlens_{side}: {expected}, got {type(cu_seqlens).__name__}")
    if mask is not None:
        raise ValueError(f"{op}: {side}_mask: {expected} (leave out masked tokens), got {type(mask).__name__}")
    _check_width(op, name, sequences, other_side)
    return sequences


def _check_width(op: str, name: str, sequences: PackedSequences, other_side: Any) -> None:
    """Raise ValueError unless the sequences have the d of the other side. The message shows them unpacked."""
    if not isinstance(other_side, Tensor) or other_side.is_nested or other_side.dim() == 0:
        return  # the other side is checked when it is packed, or has no tokens

    def message() -> str:
        other_name, d = "Q" if name == "D" else "D", sequences.tokens.shape[1]
        element = f"[{sequences.lengths[0]}, {d}]" if sequences.lengths else f"a nested tensor [N, L, {d}]"
        index = "[0]" if sequences.lengths else ""
        return f"{op}: {name}{index}: expected d = {other_side.shape[-1]} as in {other_name}, got {element}"

    check_same_size(sequences.tokens.shape[1], other_side.shape[-1], message)


def check_sides(
    op: str,
    Q: Tensor,
    D: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_d: Tensor | None,
    d_shape: str | None,
    lifts: str,
    packs: str,
) -> None:
    """Raise unless Q and D are embeddings, packed or dense, that fit together. See `inputs.prepare_args`."""
    q_shapes, q_hint = _describe_shapes("q", cu_seqlens_q, lifts, packs)
    d_shapes, d_hint = ((d_shape,), "") if d_shape else _describe_shapes("d", cu_seqlens_d, lifts, packs)
    check_tokens(op, Q, D, q_shapes, d_shapes, (q_hint, d_hint))


def _describe_shapes(side: str, cu_seqlens: Tensor | None, lifts: str, packs: str) -> tuple[tuple[str, ...], str]:
    """Return the shapes that a side may have, and a hint for the error message."""
    if cu_seqlens is not None:
        return (f"[T{side}, d]",), f" with cu_seqlens_{side}"
    dense = f"[N{side}, L{side}, d]"
    hint = f", or [T{side}, d] with cu_seqlens_{side}" if side.upper() in packs else ""
    return (f"[L{side}, d]", dense) if side.upper() in lifts else (dense,), hint


def pack_weights(op: str, q_weight: Any, queries: PackedSequences) -> Tensor | None:
    """Return the weights of packed queries, from sequences of the same lengths or from packed ``[Tq]``."""
    if not is_sequences(q_weight):
        if isinstance(q_weight, Tensor):
            _check_packed_weight(op, q_weight, queries)
        return q_weight
    empty_weights = queries.tokens.new_empty(0, dtype=score_dtype(queries.tokens.dtype))
    weights = pack_sequences(op, "q_weight", q_weight, empty_weights)
    if weights.lengths is not None and queries.lengths is not None:
        is_same = weights.lengths == queries.lengths
    else:  # lengths are known only on the device: two jagged tensors must share their offsets
        is_same = weights.lengths is None and queries.lengths is None and bool(weights.rows == queries.rows)
    if not is_same:
        expected = "the offsets" if queries.lengths is None else f"the lengths {_format_lengths(queries.lengths)}"
        actual = "others" if weights.lengths is None else f"a list of {_format_lengths(weights.lengths)}"
        raise ValueError(f"{op}: q_weight: expected {expected} of Q, got {actual}")
    return weights.tokens


def _check_packed_weight(op: str, q_weight: Tensor, queries: PackedSequences) -> None:
    """Raise ValueError unless one 1-D tensor holds the weights of all packed queries."""
    tokens = queries.tokens.shape[0]

    def message() -> str:
        return f"{op}: q_weight: expected a list like Q, or packed [Tq] = [{tokens}], got {format_shape(q_weight)}"

    if q_weight.dim() != 1:
        raise ValueError(message())
    check_same_size(q_weight.shape[0], tokens, message)


def _format_lengths(lengths: list[int]) -> str:
    """Return at most eight lengths as text."""
    return str(lengths) if len(lengths) <= 8 else f"[{', '.join(map(str, lengths[:8]))}, ...]"
