"""Dense tensors from arrays, lists and nested tensors, for functions whose kernels have no packed layout."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..core.arrays import share_token_arrays
from .packing import PackedSequences, copy_from_host, is_sequences, lengths_to_mask, pack_side, pack_weights


def make_dense(
    op: str, Q: Any, D: Any, q_mask: Any, d_mask: Any, q_weight: Any = None, *, documents: str = "D"
) -> tuple[Any, Any, Any, Any, Any]:
    """Return the tokens of a call as dense tensors, with masks and weights.

    Arrays share their memory with the result. Lists and nested tensors are padded at the end, and get a mask if their
    lengths differ. Reading the lengths of a nested tensor waits for a GPU. Other values are returned unchanged, for the
    checks of the function.

    `documents` is the name of the argument `D`. The weights of a list of queries are a list of ``[L_i]`` or packed
    ``[Tq]``. Raise if the elements of a list do not fit together, or a list has a mask.
    """
    Q, D, q_mask, d_mask, q_weight = share_token_arrays(op, (Q, D, q_mask, d_mask, q_weight), documents)
    has_features = documents == "D"  # hidden states have another number of features than queries
    Q, q_mask, q_weight = pad_queries(op, Q, q_mask, q_weight, D if has_features else None)
    if is_sequences(D):
        packed = pack_side(op, documents, D, d_mask, None, Q if has_features else None)
        D, d_mask, _ = _pad(packed)
    return Q, D, q_mask, d_mask, q_weight


def pad_queries(op: str, Q: Any, q_mask: Any, q_weight: Any, D: Any = None) -> tuple[Any, Any, Any]:
    """Return a list or a nested tensor of queries as a dense tensor, with its mask and weights.

    Other values are returned unchanged. Arguments are as in `make_dense`, but arrays are already tensors.
    """
    if not is_sequences(Q):
        return Q, q_mask, q_weight
    queries = pack_side(op, "Q", Q, q_mask, None, D)
    weights = pack_weights(op, q_weight, queries)
    Q, q_mask, lengths = _pad(queries)
    return Q, q_mask, weights if weights is None else _pad_rows(weights, lengths)


def _pad(packed: PackedSequences) -> tuple[Tensor, Tensor | None, list[int]]:
    """Return padded tokens ``[N, L, d]``, their mask or None for equal lengths, and the lengths."""
    lengths = packed.cu_seqlens.diff().tolist() if packed.lengths is None else packed.lengths
    tokens = _pad_rows(packed.tokens, lengths)
    if len(set(lengths)) < 2:
        return tokens, None, lengths
    return tokens, lengths_to_mask(copy_from_host(lengths, tokens.device), tokens.shape[1]), lengths


def _pad_rows(rows: Tensor, lengths: list[int]) -> Tensor:
    """Return packed rows ``[T, ...]`` as ``[N, L, ...]``, padded with zeros. For equal lengths this is a view."""
    if len(set(lengths)) < 2:
        return rows.view(len(lengths), max(lengths, default=0), *rows.shape[1:])
    return pad_sequence(rows.split(lengths), batch_first=True)
