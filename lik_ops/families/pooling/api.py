"""`lik_ops.pool_tokens`: replace similar tokens of each document by their mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize as l2_normalize

from ...api.packing import copy_from_host, is_sequences, lengths_to_mask, pack_sequences
from ...backends import select_backend
from ...core.arguments import (
    check_choice,
    check_count,
    check_cu_seqlens,
    check_flag,
    check_floats,
    check_has_values,
    check_indices,
    check_mask,
    check_no_dtensor,
    score_dtype,
)
from ...core.messages import describe_type, format_shape
from ...core.segments import compute_offsets
from ...ops.checks import values
from ...portable.pace import limit_threads
from . import clusters

_OP = "pool_tokens"
METHODS = ("hierarchical", "kmeans", "sequential")
METRICS = ("cosine", "rows")
# The distances of a batch of documents, and its tokens in fp64. Three buffers of this size are allocated.
MAX_DISTANCES_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}


def pool_tokens(
    D: Tensor | Sequence[Tensor],
    factor: float,
    *,
    d_mask: Tensor | None = None,
    doc_lengths: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    method: str = "hierarchical",
    metric: str = "cosine",
    num_protected: int = 1,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Replace similar tokens of each document by their mean, so that fewer tokens are stored and scored.

    A document of n tokens keeps its first `num_protected` tokens. The other ``m = n - num_protected`` tokens are
    divided into ``max(int(m // factor), 1)`` clusters, and each cluster becomes the mean of its tokens. The result is
    differentiable in D: the gradient of a mean is divided equally among its tokens.

    ``method="hierarchical"`` equals the hierarchical pooling of sentence-transformers and PyLate: Ward's method on
    the distances ``1 - <a, b>``, as ``scipy.cluster.hierarchy.linkage`` computes it, cut by ``fcluster`` with
    ``"maxclust"``. Distances are computed in fp64. If two merges have exactly the same cost, scipy may choose another
    one. The order of the tokens differs: here clusters are in the order of their first tokens.

    The function reads the lengths on the host, so it waits for a GPU. It cannot be compiled or exported, because the
    number of tokens of the result depends on the lengths.

    Source: Clavie, Chaffin and Adams, "Reducing the Footprint of Multi-Vector Retrieval with Minimal Performance Impact
    via Token Pooling", 2024.

    Args:
        D: document tokens of norm 1: packed ``[Td, d]`` with `cu_seqlens_d`, ``[Nd, Ld, d]``, a list of ``[L_i, d]``,
            or a nested tensor; fp16, bf16, fp32 or fp64.
        factor: the number of tokens per cluster, at least 1. A factor of 1 keeps all tokens.
        d_mask: document tokens to keep ``[Nd, Ld]``, bool or integers read as ``!= 0``. Other tokens are dropped.
        doc_lengths: the number of tokens of each document ``[Nd]``, int32 or int64, in place of `d_mask`.
        cu_seqlens_d: ``[Nd + 1]``, int32 or int64: the bounds of packed documents.
        method: ``"hierarchical"``; ``"kmeans"``, 10 rounds of Lloyd's algorithm from tokens at equal distances; or
            ``"sequential"``, runs of consecutive tokens.
        metric: the distances of the hierarchical method. ``"cosine"`` is ``1 - <a, b>``. ``"rows"`` is the Euclidean
            distance between the rows of the matrix of cosine distances, which colpali-engine uses.
        num_protected: the number of tokens at the start of each document that are kept, such as ``[CLS]``.
        normalize: whether to L2-normalize all tokens of the result.

    Returns:
        ``(tokens, cu_seqlens)``: packed tokens with the dtype and device of D, and their bounds ``[Nd + 1]``, int64.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or value is wrong, or a token is not finite.

    Example:
        >>> D = torch.nn.functional.normalize(torch.randn(4, 300, 128), dim=-1)
        >>> tokens, cu_seqlens = lik_ops.pool_tokens(D, 2)
        >>> tokens.shape, cu_seqlens.tolist()
        (torch.Size([600, 128]), [0, 150, 300, 450, 600])
    """
    check_choice(_OP, "method", method, METHODS)
    check_choice(_OP, "metric", metric, METRICS)
    _check_factor(factor)
    check_count(_OP, "num_protected", num_protected)
    check_flag(_OP, "normalize", normalize)
    tokens, lengths = _pack_documents(D, d_mask, doc_lengths, cu_seqlens_d)
    if tokens.numel() and not torch.stack(tokens.detach().aminmax()).isfinite().all():
        raise ValueError(f"{_OP}: D: expected finite tokens, got NaN or infinity")
    with torch.no_grad():
        find_clusters = _choose_clustering(tokens.device, method, metric)
        labels, cu_seqlens = _label_tokens(tokens.detach(), lengths, factor, num_protected, find_clusters)
        order = labels.argsort(stable=True)
        sizes = labels.bincount(minlength=int(cu_seqlens[-1]))
    pooled = tokens.to(score_dtype(tokens.dtype))[order]
    if len(pooled):
        pooled = torch.segment_reduce(pooled, "mean", lengths=sizes, axis=0)
    return (l2_normalize(pooled, dim=-1) if normalize else pooled).to(tokens.dtype), cu_seqlens


def _check_factor(factor: Any) -> None:
    """Raise TypeError or ValueError unless the factor is a finite number of at least 1."""
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(f"{_OP}: factor: expected a number, got {describe_type(factor)}")
    if not 1 <= factor < math.inf:
        raise ValueError(f"{_OP}: factor: expected a finite number of at least 1, got {factor}")


def _pack_documents(D: Any, d_mask: Any, doc_lengths: Any, cu_seqlens: Any) -> tuple[Tensor, list[int]]:
    """Return the kept tokens of all documents ``[T, d]``, and the number of tokens of each document."""
    layout_args = {"d_mask": d_mask, "doc_lengths": doc_lengths, "cu_seqlens_d": cu_seqlens}
    if is_sequences(D):
        for name, x in layout_args.items():
            if x is not None:
                raise ValueError(f"{_OP}: {name}: expected None with a list or nested tensor D, got {type(x).__name__}")
        packed = pack_sequences(_OP, "D", D)
        _check_documents(packed.tokens, "a list of [L, d]", 2)
        return packed.tokens, packed.cu_seqlens.diff().tolist() if packed.lengths is None else packed.lengths
    if cu_seqlens is not None:
        for name in ("d_mask", "doc_lengths"):
            if layout_args[name] is not None:
                raise ValueError(
                    f"{_OP}: {name}: expected None with cu_seqlens_d, got {type(layout_args[name]).__name__}"
                )
        _check_documents(D, "[Td, d] with cu_seqlens_d", 2)
        check_cu_seqlens(_OP, "cu_seqlens_d", cu_seqlens, D.device, "[Nd + 1]", "D")
        ends = cu_seqlens.cpu()
        values.check_cu_seqlens(_OP, "cu_seqlens_d", ends, "D", D, must_cover=True)
        return D, ends.diff().tolist()
    _check_documents(D, "[Nd, Ld, d], or [Td, d] with cu_seqlens_d", 3)
    Nd, Ld, d = D.shape
    if doc_lengths is None and d_mask is None:
        return D.reshape(-1, d), [Ld] * Nd
    if doc_lengths is not None:
        if d_mask is not None:
            raise ValueError(f"{_OP}: d_mask: expected None with doc_lengths, got {type(d_mask).__name__}")
        check_indices(_OP, "doc_lengths", doc_lengths, (Nd,), "[Nd]", D.device, "D")
        values.check_lengths(_OP, "doc_lengths", doc_lengths, Ld)
        mask = lengths_to_mask(doc_lengths, Ld)
    else:
        check_mask(_OP, "d_mask", d_mask, "D", D)
        mask = d_mask != 0
    return D[mask], mask.sum(1).tolist()


def _check_documents(D: Any, spelled: str, rank: int) -> None:
    """Raise TypeError or ValueError unless D is a tensor of tokens with this rank."""
    check_no_dtensor(_OP, D=D)
    check_floats(_OP, "D", D)
    check_has_values(_OP, "D", D)
    if D.dim() != rank:
        raise ValueError(f"{_OP}: D: expected {spelled}, got {format_shape(D)}")
    if not D.shape[-1]:
        raise ValueError(f"{_OP}: D: expected d >= 1, got {format_shape(D)}")


def _choose_clustering(device: torch.device, method: str, metric: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function of padded tokens, lengths and counts that returns the cluster of each token. See `clusters`.

    The padding of tokens must be zero. Distances are fp64, whatever the dtype of the tokens is. The kernels of the
    hierarchical method compute in fp64.
    """
    if method == "sequential":
        return clusters.find_sequential_clusters
    if method == "kmeans":
        return clusters.find_kmeans_clusters
    ward = select_backend(device, torch.float32).WardClustering(device)
    measure = clusters.measure_cosine if metric == "cosine" else clusters.measure_rows

    def find_hierarchical_clusters(tokens: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
        measure(tokens, out=ward.reserve(*tokens.shape[:2]))
        return ward.find_clusters(lengths, counts)

    return find_hierarchical_clusters


@limit_threads
def _label_tokens(
    tokens: Tensor, lengths: list[int], factor: float, num_protected: int, find_clusters: Callable
) -> tuple[Tensor, Tensor]:
    """Return the row of the result to which each token contributes ``[T]``, and the bounds of the result."""
    device = tokens.device
    unprotected_lengths = [max(n - num_protected, 0) for n in lengths]
    counts = [min(m, max(int(m // factor), 1)) for m in unprotected_lengths]
    n_tokens, n_unprotected, n_clusters = (
        copy_from_host(x, device).long() for x in (lengths, unprotected_lengths, counts)
    )
    starts = n_tokens.cumsum(0) - n_tokens
    document = torch.arange(len(lengths), device=device).repeat_interleave(n_tokens, output_size=len(tokens))
    labels = torch.arange(len(tokens), device=device) - starts[document]  # if nothing is pooled
    n_outputs = n_tokens - n_unprotected + n_clusters
    max_bytes = MAX_DISTANCES_BYTES.get(device.type, MAX_DISTANCES_BYTES["cpu"])
    for batch in _batch_documents(unprotected_lengths, counts, tokens.shape[1], max_bytes):
        at = copy_from_host(batch, device)
        positions = torch.arange(max(unprotected_lengths[i] for i in batch), device=device)
        is_token = positions < n_unprotected[at, None]
        rows = torch.where(is_token, (starts + n_tokens - n_unprotected)[at, None] + positions, 0)
        padded = tokens.index_select(0, rows.flatten()).view(*rows.shape, tokens.shape[1]).double()
        if unprotected_lengths[batch[-1]] < len(positions):  # documents are in descending order of their lengths
            padded.masked_fill_(~is_token[..., None], 0)
        token_clusters = find_clusters(padded, n_unprotected[at], n_clusters[at])
        labels[rows[is_token]] = (token_clusters + (n_tokens - n_unprotected)[at, None])[is_token]
        n_outputs[at] = (n_tokens - n_unprotected)[at] + token_clusters.masked_fill(~is_token, -1).amax(1) + 1
    cu_seqlens = compute_offsets(n_outputs)
    return labels + cu_seqlens[document], cu_seqlens


def _batch_documents(lengths: list[int], counts: list[int], d: int, max_bytes: int) -> Iterator[list[int]]:
    """Yield documents that need clusters, in batches of similar lengths.

    The distances of a batch fit in `max_bytes`, and so do its tokens in fp64.
    """
    pooled = sorted((i for i, n in enumerate(lengths) if counts[i] < n), key=lambda i: -lengths[i])
    batch: list[int] = []
    for i in pooled:
        longest = lengths[batch[0]] if batch else 0
        document_bytes = 8 * longest * max(longest, d)
        if batch and (5 * lengths[i] < 4 * longest or document_bytes * (len(batch) + 1) > max_bytes):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
