"""Checks of the values of offsets, lengths and indices under `lik_ops.checks`. The first wrong value raises."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.arguments import LOOKS_LIKE_LENGTHS, format_shape
from ...core.segments import RaggedArgs
from ...core.settings import is_checking_values

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def needs_value_checks(*tensors: Tensor | None) -> bool:
    """Return whether value checks are on and these tensors have values to check.

    Tracers, fake tensors and meta tensors have no values. A tensor inside a transform has values for each sample.
    """
    if torch.compiler.is_compiling() or not is_checking_values():
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    present_tensors = [t for t in tensors if t is not None]
    return not any(t.is_meta or isinstance(t, FakeTensor) or _is_wrapped(t) for t in present_tensors)


def _find_first(bad: Tensor) -> list[int] | None:
    """Return the index of the first True, or None. This synchronizes with the device."""
    return bad.nonzero()[0].tolist() if bool(bad.any()) else None


def _raise_wrong_value(op: str, name: str, expected: str, x: Tensor, at: list[int]) -> None:
    """Raise ValueError with the value and the index of the wrong entry."""
    index = ", ".join(map(str, at))
    raise ValueError(f"{op}: {name}: expected {expected}, got {x[tuple(at)].tolist()} at [{index}]")


def check_cu_seqlens(
    op: str, name: str, cu_seqlens: Tensor, packed_name: str, packed: Tensor, must_cover: bool = False
) -> None:
    """Raise ValueError unless these are ascending rows of a packed tensor. If `must_cover`, they must cover the tensor.

    Operators accept gaps at both ends. In a call of a public function, a gap usually means that lengths were passed.
    """
    first, last = cu_seqlens[[0, -1]].tolist() if must_cover else (0, packed.shape[0])
    if first > 0:
        _raise_lengths(op, name, first, last, packed_name, packed)
    bad = (cu_seqlens < 0) | (cu_seqlens > packed.shape[0])
    bad[1:] |= cu_seqlens[1:] < cu_seqlens[:-1]
    if (at := _find_first(bad)) is not None:
        _raise_wrong_value(op, name, f"ascending rows of {packed_name} {format_shape(packed)}", cu_seqlens, at)
    if last != packed.shape[0]:
        _raise_lengths(op, name, first, last, packed_name, packed)


def _raise_lengths(op: str, name: str, first: int, last: int, packed_name: str, packed: Tensor) -> None:
    """Raise ValueError for offsets that look like lengths."""
    raise ValueError(
        f"{op}: {name}: expected offsets from 0 to {packed.shape[0]}, the rows of {packed_name} {format_shape(packed)},"
        f" got {first} to {last}: {LOOKS_LIKE_LENGTHS}"
    )


def check_segments(
    op: str, names: tuple[str, str], offsets: Tensor, lengths: Tensor, packed_name: str, packed: Tensor
) -> None:
    """Raise ValueError unless offsets and lengths are inside a packed tensor."""
    rows, (offset_name, length_name) = packed.shape[0], names
    if (at := _find_first((offsets < 0) | (offsets > rows))) is not None:
        _raise_wrong_value(op, offset_name, f"rows of {packed_name} {format_shape(packed)}", offsets, at)
    # The sum of offsets and lengths may overflow.
    if (at := _find_first((lengths < 0) | (lengths > rows - offsets.long()))) is not None:
        limit = rows - int(offsets[tuple(at)])
        expected = f"0 to {limit} rows, as many as {packed_name} {format_shape(packed)} has from there"
        _raise_wrong_value(op, length_name, expected, lengths, at)


def check_lengths(op: str, name: str, lengths: Tensor, max_length: int) -> None:
    """Raise ValueError unless the lengths are between 0 and `max_length`."""
    if (at := _find_first((lengths < 0) | (lengths > max_length))) is not None:
        _raise_wrong_value(op, name, f"0 to {max_length} tokens", lengths, at)


def check_labels(op: str, labels: Tensor, documents: int, ignore_index: int) -> None:
    """Raise ValueError unless the labels are document indices or `ignore_index`."""
    if (at := _find_first(((labels < 0) | (labels >= documents)) & (labels.long() != ignore_index))) is not None:
        _raise_wrong_value(op, "labels", f"a document, 0 <= j < {documents}, or {ignore_index}", labels, at)


def check_pairs(op: str, pairs: Tensor, queries: int, documents: int) -> None:
    """Raise ValueError unless the pairs are indices of queries and documents."""
    limits = torch.tensor([queries, documents], device=pairs.device)
    if (at := _find_first((pairs < 0) | (pairs >= limits))) is not None:
        expected = f"a query, 0 <= i < {queries}" if at[1] == 0 else f"a document, 0 <= j < {documents}"
        _raise_wrong_value(op, "pairs", expected, pairs, at)


def check_max_seqlen(op: str, cu_seqlens_q: Tensor, pairs: Tensor, max_seqlen_q: int) -> None:
    """Raise ValueError if the query of a pair is longer than `max_seqlen_q`. The pairs and segments must be valid."""
    lengths = cu_seqlens_q.diff()[pairs[:, 0].long()] if pairs.shape[0] else cu_seqlens_q.new_empty(0)
    if (at := _find_first(lengths > max_seqlen_q)) is not None:
        actual = f"{lengths[at[0]].tolist()} tokens of the query at pairs[{at[0]}]"
        raise ValueError(
            f"{op}: max_seqlen_q: expected a bound on the tokens of every query, got {max_seqlen_q}, {actual}"
        )


def check_ragged(op: str, tensors: Sequence, max_seqlen_q: int) -> None:
    """Raise ValueError unless all values of the operator's arguments are valid."""
    if not needs_value_checks(*tensors[:6]):
        return
    r = RaggedArgs.from_tensors(tensors)
    check_cu_seqlens(op, "cu_seqlens_q", r.cu_seqlens_q, "Q", r.Q)
    check_segments(op, ("d_offsets", "d_lengths"), r.d_offsets, r.d_lengths, "D", r.D)
    if r.pairs is not None:
        check_pairs(op, r.pairs, r.queries, r.columns)
        check_max_seqlen(op, r.cu_seqlens_q, r.pairs, max_seqlen_q)
