"""MaxSim of queries and documents of many lengths: packed, as lists of pairs, or padded with lengths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ._layout import MASK_DTYPES, argmax_dtype_for, as_bool, same_size, score_dtype, shape_of
from ._maxsim import maxsim
from .backends.ragged import Ragged
from .ops import autocast, eager, functional
from .ops import maxsim as operators
from .ops import ragged_arguments as arguments

__all__ = [
    "lengths_to_mask",
    "maxsim_candidates_varlen",
    "maxsim_padded",
    "maxsim_pair_list",
    "maxsim_varlen",
    "pack",
    "unpack",
]


def maxsim_varlen(
    Q: Tensor,
    D: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_d: Tensor | None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    backward: str = "auto",
) -> Tensor:
    """MaxSim of every packed query against every packed document, without padding.

    Query i is the rows ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` of Q. The bits of a score are those of `maxsim`
    of the same tokens on a CPU.

    Args:
        Q: packed query tokens ``[Tq, d]``; or ``[Nq, Lq, d]`` with `cu_seqlens_q` None.
        D: packed document tokens ``[Td, d]`` of the dtype and device of Q; or ``[Nd, Ld, d]`` with `cu_seqlens_d` None.
        cu_seqlens_q: ``[Nq + 1]``, int32 or int64: where queries begin, and where the last ends.
        cu_seqlens_d: ``[Nd + 1]``, the same of the documents.
        q_weight: weight of each query token, the shape of Q without d; fp32 (fp64 for fp64). Differentiable.
        normalize: L2-normalise every token first.
        backward: ``"lowmem"``, ``"unified"`` or ``"auto"``, as in `maxsim`.

    Returns:
        Scores ``[Nq, Nd]``, fp32 (fp64 for fp64). An empty document scores ``-inf``, an empty query 0. Where a segment
        is negative or reaches outside its tensor, NaN, and no gradient.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> Q, cu_seqlens_q = lik_ops.pack([torch.randn(5, 128), torch.randn(32, 128)])
        >>> D, cu_seqlens_d = lik_ops.pack([torch.randn(n, 128) for n in (300, 12, 80)])
        >>> lik_ops.maxsim_varlen(Q, D, cu_seqlens_q, cu_seqlens_d).shape
        torch.Size([2, 3])
    """
    op = "maxsim_varlen"
    Q, D, q_weight = autocast.to_region(Q, D, q_weight)
    q_shape, d_shape = _spelled("q", cu_seqlens_q), _spelled("d", cu_seqlens_d)
    arguments.check_tokens(op, Q, D, q_shape, d_shape)
    _check_options(op, Q, q_weight, backward)
    Q, cu_seqlens_q, q_weight, longest = _packed_queries(op, Q, cu_seqlens_q, q_weight)
    D, offsets, lengths = _packed_documents(op, D, cu_seqlens_d)
    return _scores(
        Ragged(Q, D, cu_seqlens_q, offsets, lengths, None, None, None, q_weight), normalize, longest, backward
    )


def maxsim_candidates_varlen(
    Q: Tensor,
    D: Tensor,
    doc_offsets: Tensor,
    doc_lengths: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    backward: str = "auto",
) -> Tensor:
    """MaxSim of each query against its own candidates, which are read where they lie in a packed store.

    Args:
        Q: query tokens ``[Nq, Lq, d]``, or packed ``[Tq, d]`` with `cu_seqlens_q`.
        D: the store, packed document tokens ``[Td, d]`` of the dtype and device of Q.
        doc_offsets: ``[Nq, K]``, int32 or int64: the row of D that each candidate begins at. Candidates may repeat and
            overlap; their gradients add up.
        doc_lengths: ``[Nq, K]``, int32 or int64: how many rows each has.
        cu_seqlens_q, q_weight, normalize, backward: as in `maxsim_varlen`.

    Returns:
        Scores ``[Nq, K]``, fp32 (fp64 for fp64). A candidate of length 0 scores ``-inf``, an empty query 0. An offset,
        length or segment that is negative or reaches outside its tensor gives NaN, and no gradient.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> store, cu_seqlens = lik_ops.pack([torch.randn(n, 128) for n in (300, 12, 80)])
        >>> chosen = torch.tensor([[2, 0], [1, 1]])
        >>> offsets, lengths = cu_seqlens[:-1][chosen], cu_seqlens.diff()[chosen]
        >>> lik_ops.maxsim_candidates_varlen(torch.randn(2, 32, 128), store, offsets, lengths).shape
        torch.Size([2, 2])
    """
    op = "maxsim_candidates_varlen"
    Q, D, q_weight = autocast.to_region(Q, D, q_weight)
    arguments.check_tokens(op, Q, D, _spelled("q", cu_seqlens_q), "[Td, d]")
    _check_options(op, Q, q_weight, backward)
    Q, cu_seqlens_q, q_weight, longest = _packed_queries(op, Q, cu_seqlens_q, q_weight)
    expected = (cu_seqlens_q.shape[0] - 1, None)
    arguments.check_indices(op, "doc_offsets", doc_offsets, expected, "[Nq, K]", Q.device)
    spelled = "the shape of doc_offsets"
    arguments.check_indices(op, "doc_lengths", doc_lengths, doc_offsets.shape, spelled, Q.device)
    tensors = Ragged(Q, D, cu_seqlens_q, doc_offsets, doc_lengths, None, None, None, q_weight)
    return _scores(tensors, normalize, longest, backward)


def maxsim_pair_list(
    Q: Tensor,
    D: Tensor,
    pairs: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    max_seqlen_q: int | None = None,
    backward: str = "auto",
) -> Tensor:
    """MaxSim of the pairs of a list only: what mining, distillation and sparse batches need.

    Args:
        Q: query tokens ``[Nq, Lq, d]``, or packed ``[Tq, d]`` with `cu_seqlens_q`.
        D: document tokens ``[Nd, Ld, d]``, or packed ``[Td, d]`` with `cu_seqlens_d`; of the dtype and device of Q.
        pairs: ``[P, 2]``, int32 or int64: indices of a query and a document. Both may repeat; gradients add up.
        q_mask, d_mask: tokens to keep, the shape of Q and D without d, as in `maxsim`.
        cu_seqlens_q, cu_seqlens_d, q_weight, normalize, backward: as in `maxsim_varlen`.
        max_seqlen_q: a bound on the tokens of a packed query. Needed on a GPU and in compiled code where gradients are
            wanted, because nobody may look at `cu_seqlens_q` there; worked out otherwise.

    Returns:
        Scores ``[P]``, fp32 (fp64 for fp64). NaN, and no gradient, where an index is not that of a query or document,
        a segment is negative or reaches outside its tensor, or a query is longer than `max_seqlen_q`.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong, or `max_seqlen_q` is needed.

    Example:
        >>> Q, D = torch.randn(4, 32, 128), torch.randn(100, 300, 128)
        >>> lik_ops.maxsim_pair_list(Q, D, torch.tensor([[0, 17], [0, 3], [2, 99]])).shape
        torch.Size([3])
    """
    op = "maxsim_pair_list"
    Q, D, q_weight = autocast.to_region(Q, D, q_weight)
    arguments.check_tokens(op, Q, D, _spelled("q", cu_seqlens_q), _spelled("d", cu_seqlens_d))
    _check_options(op, Q, q_weight, backward)
    arguments.check_values(op, "q_mask", q_mask, "Q", Q, MASK_DTYPES)
    arguments.check_values(op, "d_mask", d_mask, "D", D, MASK_DTYPES)
    arguments.check_indices(op, "pairs", pairs, (None, 2), "[P, 2]", Q.device)
    if isinstance(max_seqlen_q, int) and max_seqlen_q < 0:
        raise ValueError(f"{op}: max_seqlen_q: expected 0 or more, got {max_seqlen_q}")
    if cu_seqlens_q is not None:
        arguments.check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, Q.device)
        if max_seqlen_q is None:
            max_seqlen_q = _longest(op, Q, cu_seqlens_q, _wants_gradients(Q, D, q_weight))
    q_mask, d_mask = as_bool(q_mask), as_bool(d_mask)
    q_mask = q_mask.flatten() if q_mask is not None else None
    d_mask = d_mask.flatten() if d_mask is not None else None
    Q, cu_seqlens_q, q_weight, bound = _packed_queries(op, Q, cu_seqlens_q, q_weight)
    D, offsets, lengths = _packed_documents(op, D, cu_seqlens_d)
    tensors = Ragged(Q, D, cu_seqlens_q, offsets, lengths, pairs, q_mask, d_mask, q_weight)
    return _scores(tensors, normalize, bound if max_seqlen_q is None else max_seqlen_q, backward)


def maxsim_padded(
    Q: Tensor,
    D: Tensor,
    query_lengths: Tensor,
    doc_lengths: Tensor,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    backward: str = "auto",
) -> Tensor:
    """MaxSim of each query against its own candidates, padded, of which only the first tokens count.

    What a reranker has whose encoder returns padded batches and lengths. Nothing is copied; what padding holds, NaN
    included, never matters.

    Args:
        Q: query tokens ``[B, Lq, d]``.
        D: candidates ``[B, C, Ld, d]`` of the dtype and device of Q.
        query_lengths: ``[B]``, int32 or int64: how many tokens of each query count.
        doc_lengths: ``[B, C]``, int32 or int64: how many tokens of each candidate count.
        q_weight: weight of each query token ``[B, Lq]``; fp32 (fp64 for fp64). Differentiable.
        normalize, backward: as in `maxsim`.

    Returns:
        Scores ``[B, C]``, fp32 (fp64 for fp64). A candidate of length 0 scores ``-inf``, a query of length 0 scores 0.
        A length that is negative or larger than the padded one gives NaN, and no gradient.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(2, 10, 300, 128)
        >>> query_lengths, doc_lengths = torch.tensor([5, 32]), torch.randint(1, 300, (2, 10))
        >>> lik_ops.maxsim_padded(Q, D, query_lengths, doc_lengths).shape
        torch.Size([2, 10])
    """
    op = "maxsim_padded"
    Q, D, q_weight = autocast.to_region(Q, D, q_weight)
    arguments.check_tokens(op, Q, D, "[B, Lq, d]", "[B, C, Ld, d]")
    same_size(D.shape[0], Q.shape[0], lambda: f"{op}: D: expected B = {Q.shape[0]} lists, got {shape_of(D)}")
    _check_options(op, Q, q_weight, backward)
    arguments.check_indices(op, "query_lengths", query_lengths, Q.shape[:1], "[B]", Q.device)
    arguments.check_indices(op, "doc_lengths", doc_lengths, (Q.shape[0], D.shape[1]), "[B, C]", Q.device)
    valid = _fits(query_lengths, Q.shape[1])[:, None] & _fits(doc_lengths, D.shape[2])
    if _reads_lengths(Q, D, q_weight):
        scores = _padded_scores(Q, D, query_lengths, torch.where(valid, doc_lengths, -1), q_weight, normalize)
        return scores.masked_fill_(~valid, float("nan"))
    # What is not valid keeps no document token, so that nothing flows back from it.
    d_mask = lengths_to_mask(torch.where(valid, doc_lengths, 0), D.shape[2])
    q_mask = lengths_to_mask(query_lengths, Q.shape[1])
    scores = maxsim(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize, backward=backward)
    return torch.where(valid, scores, float("nan"))


def pack(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Put sequences of tokens behind one another, as the functions for packed tokens take them.

    Args:
        sequences: at least one tensor ``[L_i, d]``, all of one d, dtype and device; L_i may be 0.

    Returns:
        ``(packed, cu_seqlens)``: ``[sum L_i, d]``, differentiable, and int64 ``[N + 1]``, where each begins and where
        the last ends, on the same device.

    Raises:
        TypeError: an element is not a tensor, or the dtypes differ.
        ValueError: there is no element, or ranks, d or devices differ.

    Example:
        >>> packed, cu_seqlens = lik_ops.pack([torch.randn(3, 8), torch.randn(5, 8)])
        >>> packed.shape, cu_seqlens
        (torch.Size([8, 8]), tensor([0, 3, 8]))
    """
    sequences = list(sequences)
    if not sequences:
        raise ValueError("pack: sequences: expected at least one tensor, got none")
    first = sequences[0]
    for i, x in enumerate(sequences):
        if not isinstance(x, Tensor):
            raise TypeError(f"pack: sequences[{i}]: expected a Tensor, got {type(x).__name__}")
        if x.dim() != 2 or x.shape[1] != first.shape[1]:
            d = first.shape[1] if first.dim() == 2 else "d"
            raise ValueError(f"pack: sequences[{i}]: expected [L, {d}], got {list(x.shape)}")
        if x.dtype != first.dtype:
            raise TypeError(f"pack: sequences[{i}]: expected the dtype of the first, {first.dtype}, got {x.dtype}")
        if x.device != first.device:
            raise ValueError(f"pack: sequences[{i}]: expected the device of the first, {first.device}, got {x.device}")
    cu_seqlens = torch.tensor([0, *(x.shape[0] for x in sequences)]).cumsum(0)
    return torch.cat(sequences), cu_seqlens.to(first.device)


def unpack(packed: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """The sequences that `pack` put together, as views. Reads `cu_seqlens` on the host, so on a GPU it waits.

    Args:
        packed: ``[T, ...]``: tokens, or what there is one of for each token.
        cu_seqlens: ``[N + 1]``, int32 or int64.

    Returns:
        N tensors ``[L_i, ...]``.

    Raises:
        TypeError: `packed` is no tensor or `cu_seqlens` is of another dtype.
        ValueError: `cu_seqlens` is not ascending from 0 or more to at most T.

    Example:
        >>> [x.shape[0] for x in lik_ops.unpack(*lik_ops.pack([torch.randn(3, 8), torch.randn(5, 8)]))]
        [3, 5]
    """
    if not isinstance(packed, Tensor):
        raise TypeError(f"unpack: packed: expected a Tensor, got {type(packed).__name__}")
    if packed.dim() == 0:
        raise ValueError("unpack: packed: expected [T, ...], got []")
    arguments.check_cu_seqlens("unpack", "cu_seqlens", cu_seqlens, cu_seqlens.device)
    ends = cu_seqlens.tolist()
    if ends[0] < 0 or ends[-1] > packed.shape[0] or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(f"unpack: cu_seqlens: expected ascending rows of {list(packed.shape)}, got {ends}")
    return [packed[a:b] for a, b in itertools.pairwise(ends)]


def lengths_to_mask(lengths: Tensor, L: int) -> Tensor:
    """The mask that keeps the first tokens: what `maxsim` takes for sequences padded at their end.

    Args:
        lengths: ``[...]``, int32 or int64; below 0 counts as 0, above `L` as `L`.
        L: tokens of a padded sequence.

    Returns:
        bool ``[..., L]``, True for tokens to keep.

    Raises:
        TypeError: `lengths` is not a tensor of integers.

    Example:
        >>> lik_ops.lengths_to_mask(torch.tensor([1, 3]), 3)
        tensor([[ True, False, False],
                [ True,  True,  True]])
    """
    if not isinstance(lengths, Tensor) or lengths.dtype not in arguments.INDEX_DTYPES:
        found = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths_to_mask: lengths: expected an int32 or int64 Tensor, got {found}")
    return torch.arange(L, device=lengths.device) < lengths.unsqueeze(-1)


def _spelled(side: str, cu_seqlens: Tensor | None) -> str:
    """The shape that a side has to have, packed or dense."""
    return f"[N{side}, L{side}, d]" if cu_seqlens is None else f"[T{side}, d]"


def _check_options(op: str, Q: Tensor, q_weight: Tensor | None, backward: str) -> None:
    arguments.check_values(op, "q_weight", q_weight, "Q", Q, (score_dtype(Q.dtype),))
    arguments.check_backward(op, backward)


def _reads_lengths(Q: Tensor, D: Tensor, q_weight: Tensor | None) -> bool:
    """Whether padded tokens are best taken as ragged ones that lie apart: on a CPU, which reads no padding then.

    The bits are those of masks. With gradients masks are as fast, and their winners smaller.
    """
    if torch.compiler.is_compiling() or Q.device.type != "cpu" or _wants_gradients(Q, D, q_weight):
        return False
    tensors = [Q, D] if q_weight is None else [Q, D, q_weight]
    return all(eager.is_memory(t) and t.is_contiguous() for t in tensors) and not functional.is_transforming()


def _padded_scores(
    Q: Tensor, D: Tensor, query_lengths: Tensor, doc_lengths: Tensor, q_weight: Tensor | None, normalize: bool
) -> Tensor:
    """`maxsim_padded` over views of contiguous tokens."""
    (B, Lq, _), (C, Ld) = Q.shape, D.shape[1:3]
    offsets = _starts(B * C, Ld, D.device)[:-1].view(B, C)
    q_mask = lengths_to_mask(query_lengths, Lq).flatten()
    q_weight = None if q_weight is None else q_weight.flatten()
    cu_seqlens_q = _starts(B, Lq, Q.device)
    tensors = Ragged(Q.flatten(0, 1), D.flatten(0, 2), cu_seqlens_q, offsets, doc_lengths, None, q_mask, None, q_weight)
    return _scores(tensors, normalize, Lq, "auto")


def _starts(count, length, device: torch.device) -> Tensor:
    """Where dense sequences begin once they are packed, and where the last ends: ``[count + 1]``."""
    return torch.arange(count + 1, device=device) * length


def _packed_queries(
    op: str, Q: Tensor, cu_seqlens: Tensor | None, q_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Q, `cu_seqlens_q` and the weights packed, and a bound on the tokens of a query."""
    if cu_seqlens is not None:
        arguments.check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens, Q.device)
        return Q, cu_seqlens, q_weight, Q.shape[0]
    Nq, Lq = Q.shape[:2]
    q_weight = None if q_weight is None else q_weight.flatten()
    return Q.flatten(0, 1), _starts(Nq, Lq, Q.device), q_weight, Lq


def _packed_documents(op: str, D: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """D packed, where its documents begin and how long they are."""
    if cu_seqlens is None:
        Nd, Ld = D.shape[:2]
        D, cu_seqlens = D.flatten(0, 1), _starts(Nd, Ld, D.device)
    else:
        arguments.check_cu_seqlens(op, "cu_seqlens_d", cu_seqlens, D.device)
    return D, cu_seqlens[:-1], cu_seqlens[1:] - cu_seqlens[:-1]


def _fits(lengths: Tensor, most) -> Tensor:
    return (lengths >= 0) & (lengths <= most)


def _wants_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _longest(op: str, Q: Tensor, cu_seqlens_q: Tensor, wants_gradients: bool) -> int:
    """The tokens of the longest query, or a bound on them where nobody may look and it costs nothing."""
    may_look = not torch.compiler.is_compiling() and Q.device.type == "cpu" and eager.is_memory(cu_seqlens_q)
    if may_look:
        lengths = cu_seqlens_q.long().diff()
        return min(max(0, int(lengths.max())), Q.shape[0]) if lengths.numel() else 0
    if wants_gradients:
        raise ValueError(
            f"{op}: max_seqlen_q: expected a bound on the tokens of a query, which packed queries with gradients need"
            f" on {Q.device.type} and in compiled code, got None"
        )
    return Q.shape[0]


def _scores(r: Ragged, normalize: bool, max_seqlen_q: int, backward: str) -> Tensor:
    wants_gradients = _wants_gradients(r.Q, r.D, r.q_weight)
    if not torch.compiler.is_dynamo_compiling():
        if functional.is_transforming():
            raise NotImplementedError(
                "torch.func transforms and vmap do not know MaxSim of packed tokens and pair lists: take gradients"
                " with torch.autograd, or pad and call lik_ops.maxsim"
            )
        operators.reject_forward_ad(r.Q, r.D, r.q_weight)
    argmax_dtype = argmax_dtype_for(r.D.shape[0]) if wants_gradients else None
    return torch.ops.lik.maxsim_ragged_fwd(*r, normalize, argmax_dtype, max_seqlen_q, backward)[0]
