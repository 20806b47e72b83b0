"""Conversions and scoring that the adapters share, with the score that each host gives documents without tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import maxsim, maxsim_pairs, maxsim_xtr
from ..api.packing import copy_from_host
from ..core.arguments import score_dtype
from ..core.arrays import share_array

Tokens: TypeAlias = Tensor | list[Tensor]  # dense, or a list of [L_i, d]
Fill: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps scores, and a mask of documents without kept tokens, to the scores of the host."""


def zero_empty(scores: Tensor, empty: Tensor) -> Tensor:
    """Return `scores` with 0 at documents without kept tokens."""
    return scores.masked_fill(empty, 0.0)


def as_tensor(x: Any) -> Tensor:
    """Return a tensor, array or nested list as a tensor. The memory of a writable array is shared."""
    return torch.as_tensor(share_array(x))


def as_mask(name: str, mask: Any) -> Any:
    """Return a mask as a tensor, or None."""
    if mask is None:
        return None
    try:
        return as_tensor(mask)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: expected a tensor, an array or a list, got {type(mask).__name__}") from None


def fit_mask(name: str, mask: Any, shape: Sequence[int]) -> Tensor:
    """Return the mask of the tokens `name` as a tensor of `shape`. One row is repeated for all items.

    Raises:
        ValueError: the mask has another shape. The message names ``<name>_mask``.
        TypeError: the mask has no numbers.
    """
    tensor = as_mask(f"{name}_mask", mask)
    one_row = (1, *shape[1:]) if len(shape) > 1 else shape
    if tuple(tensor.shape) not in (tuple(shape), tuple(one_row)):
        raise ValueError(f"{name}_mask: expected {list(shape)} to match the padded {name}, got {list(tensor.shape)}")
    return tensor.expand(shape)


def as_tokens(x: Any, name: str) -> Tokens:
    """Return embeddings in tensors: `x` as one tensor, or its items if `x` is a list. Integers become fp32.

    `x` is a tensor, an array or a list of ``[L_i, d]``, each a tensor, an array or lists of numbers.

    Raises:
        ValueError: the items of a list are not ``[L_i, d]`` of one d. The message begins with `name`.
        TypeError: `x` or an item has no numbers.
    """
    if not isinstance(x, (list, tuple)):
        return _as_embeddings(f"{name}: expected a tensor, an array or a list of", x)
    items = _convert_items(name, x)
    d = next((t.shape[1] for t in items if t.dim() == 2), 0)
    items = [t.reshape(0, d) if t.dim() == 1 and not t.numel() else t for t in items]
    for i, t in enumerate(items):
        if t.dim() != 2 or t.shape[1] != d:
            raise ValueError(f"{name}[{i}]: expected [L, {d or 'd'}], got {list(t.shape)}")
    return items


def _convert_items(name: str, x: Any) -> list[Tensor]:
    """Return the items of a list as floating-point tensors."""
    return [_as_embeddings(f"{name}[{i}]: expected [L, d]", item) for i, item in enumerate(x)]


def _as_embeddings(where: str, x: Any) -> Tensor:
    """Return `x` as a floating-point tensor of any shape. Errors begin with `where`, which says what is expected."""
    try:
        embeddings = as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        lengths = {len(row) for row in x if isinstance(row, (list, tuple))} if isinstance(x, (list, tuple)) else set()
        if len(lengths) > 1:
            raise ValueError(f"{where}, got rows of {min(lengths)} to {max(lengths)} numbers") from None
        raise TypeError(f"{where} numbers, got {type(x).__name__}") from None
    if embeddings.is_complex():
        raise TypeError(f"{where} real numbers, got {embeddings.dtype}")
    return embeddings if embeddings.is_floating_point() else embeddings.float()


def as_vectors(where: str, x: Any, d: int | None = None, rows: str = "L") -> Tensor:
    """Return the multi-vector `x` as a floating-point tensor ``[L, d]``.

    Args:
        where: the beginning of an error message: the function, the argument and the item.
        x: a tensor, an array or lists of numbers. If it is empty, of any shape, it has no vectors.
        d: the number of features. None accepts any number.
        rows: the name of the number of vectors in error messages.
    """
    expected = f"{where}: expected [{rows}, {'d' if d is None else d}]"
    vectors = _as_embeddings(expected, x)
    if d is not None and not vectors.numel():
        return vectors.reshape(0, d)
    if vectors.dim() != 2 or d not in (None, vectors.shape[1]):
        raise ValueError(f"{expected}, got {list(vectors.shape)}")
    return vectors


def as_dense(x: Any, name: str) -> Tensor:
    """Return embeddings in one tensor. The items of a list must have one shape. Arguments are as in `as_tokens`."""
    if not isinstance(x, (list, tuple)):
        return _as_embeddings(f"{name}: expected a tensor, an array or a list of", x)
    items = _convert_items(name, x)
    for i, t in enumerate(items):
        if t.shape != items[0].shape:
            raise ValueError(f"{name}[{i}]: expected {list(items[0].shape)}, as {name}[0], got {list(t.shape)}")
    if not items:
        raise ValueError(f"{name}: expected at least one, got none")
    return torch.stack(items)


def merge_groups(documents: Any, mask: Any) -> tuple[Tensor, Any]:
    """Return the documents of groups ``[G, N, Ld, d]`` and their mask as one group. Group g begins at row ``g * N``."""
    D = as_dense(documents, "documents")
    if D.dim() != 4:
        raise ValueError(f"documents: expected [G, N, Ld, d], got {list(D.shape)}")
    mask = None if mask is None else fit_mask("documents", mask, D.shape[:-1]).flatten(0, 1)
    return D.flatten(0, 1), mask


def move_tokens(tokens: Tokens, device: torch.device) -> Tokens:
    """Return tokens on `device`."""
    return tokens.to(device) if isinstance(tokens, Tensor) else [t.to(device) for t in tokens]


def is_supported(Q: Any, D: Any) -> bool:
    """Return whether lik_ops can score these inputs. If not, the host's own code raises its error."""
    tensors = [t for x in (Q, D) for t in ([x] if isinstance(x, Tensor) else x[:1]) if isinstance(t, Tensor)]
    if len({t.device for t in tensors}) > 1 or not all(t.is_floating_point() for t in tensors):
        return False
    return len({t.dtype for t in tensors}) <= 1 or torch.is_autocast_enabled(tensors[0].device.type)


def score_cross(Q: Any, D: Any, q_mask: Any, d_mask: Any, fill: Fill = zero_empty) -> Tensor:
    """Return the scores of every query and document ``[Nq, Nd]``, or of candidates ``[Nq, K]``.

    Args:
        Q: queries, in a form that `as_tokens` accepts.
        D: documents in such a form, or candidates ``[Nq, K, Ld, d]``. Lists are packed, or padded if they have a mask.
        q_mask: bool (True = keep), or numbers that multiply the maximum of each query token.
        d_mask: the mask of the documents, read as ``!= 0``.
        fill: gives documents without kept tokens the score of the host.
    """
    Q, D, mask, weight, keep = _prepare_sides(Q, D, q_mask, d_mask)
    return _fill_empty(maxsim(Q, D, mask, keep, q_weight=weight), D, keep, fill)


def score_pairs(Q: Any, D: Any, q_mask: Any, d_mask: Any, fill: Fill = zero_empty) -> Tensor:
    """Return the scores ``[B]`` of query i and document i, with the arguments of `score_cross`."""
    Q, D, mask, weight, keep = _prepare_sides(Q, D, q_mask, d_mask)
    return _fill_empty(maxsim_pairs(Q, D, mask, keep, q_weight=weight), D, keep, fill)


def score_xtr(Q: Any, D: Any, q_mask: Any, d_mask: Any, top_k: int, normalizer: str, fill: Fill = zero_empty) -> Tensor:
    """Return the XTR scores ``[Nq, Nd]`` of every query and document.

    Arguments are as in `score_cross` and `maxsim_xtr`. Query tokens with a nonzero numeric mask are included in the
    normalizer.
    """
    Q, D = as_dense(Q, "queries"), as_dense(D, "documents")
    Q, D, mask, weight, keep = _prepare_sides(Q, D, q_mask, d_mask)
    if weight is not None:
        mask = weight != 0
    return _fill_empty(maxsim_xtr(Q, D, top_k, mask, keep, q_weight=weight, normalizer=normalizer), D, keep, fill)


def score_own_groups(score: Callable[[Tensor, Tensor], Tensor], queries: Any, documents: Any) -> Tensor:
    """Return the scores ``[Nq, N]`` of each query's own documents ``[Nq, N, Ld, d]``.

    `score` returns the scores ``[Nq, Nq * N]`` of every query and document. Queries may be one query ``[Lq, d]``.
    """
    Q, D = as_dense(queries, "queries"), as_dense(documents, "documents")
    count = len(Q) if Q.dim() == 3 else 1
    if D.dim() == 4 and len(D) != count:
        raise ValueError(f"documents: expected {count} groups, one for each query, got {len(D)}")
    return score(Q, D).reshape(count, count, D.shape[1]).diagonal(dim1=0, dim2=1).transpose(0, 1)


def _match_features(tokens: Tokens, others: Tokens) -> Tokens:
    """Return `tokens`. If they are a list without features, its empty items get the d of `others`."""
    if isinstance(tokens, Tensor) or not tokens or tokens[0].shape[1]:
        return tokens
    d = others.shape[-1] if isinstance(others, Tensor) else others[0].shape[1] if others else 0
    return [t.reshape(0, d) if len(t) == 0 else t for t in tokens]


def _prepare_sides(
    Q: Any, D: Any, q_mask: Any, d_mask: Any
) -> tuple[Any, Any, Tensor | None, Tensor | None, Tensor | None]:
    """Return ``(Q, D, q_mask, q_weight, d_mask)`` as arguments of `maxsim`."""
    Q, D = as_tokens(Q, "queries"), as_tokens(D, "documents")
    Q, D = _match_features(Q, D), _match_features(D, Q)
    if q_mask is not None and isinstance(Q, list):
        Q = torch.nn.utils.rnn.pad_sequence(Q, batch_first=True)
    if d_mask is not None and isinstance(D, list):
        D = torch.nn.utils.rnn.pad_sequence(D, batch_first=True)
    mask = weight = keep = None
    if q_mask is not None:
        fitted = fit_mask("queries", q_mask, Q.shape[:-1])
        if fitted.dtype == torch.bool:
            mask = fitted
        else:
            weight = fitted.to(score_dtype(Q.dtype))
    if d_mask is not None:
        keep = fit_mask("documents", d_mask, D.shape[:-1]).bool()
    return Q, D, mask, weight, keep


def _fill_empty(scores: Tensor, D: Tokens, keep: Tensor | None, fill: Fill) -> Tensor:
    """Return `scores` with the host's score for documents without kept tokens.

    With a mask, `fill` is always called, because the mask may be empty.
    """
    if keep is not None:
        return fill(scores, ~keep.any(-1))
    if isinstance(D, Tensor):
        return fill(scores, scores.new_ones(scores.shape, dtype=torch.bool)) if D.shape[-2] == 0 else scores
    empty = [t.shape[0] == 0 for t in D]
    return fill(scores, copy_from_host(empty, scores.device)) if any(empty) else scores
