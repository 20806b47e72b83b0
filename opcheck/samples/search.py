"""Sample inputs and references of the operators that find the best documents or tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

import lik_ops
from lik_ops.opcheck.samples.dense import maxsim_reference
from lik_ops.opcheck.samples.inputs import (
    SHAPES,
    Sample,
    draw_tensors,
    format_name,
    list_variants,
    make_packed,
    make_tensors,
)


def maxsim_topk(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    """Yield the samples of ``lik::maxsim_topk``."""
    for shape, layout, of_packed, options in list_variants():
        Q, D, q_mask, d_mask, w = make_tensors(SHAPES[shape], layout, dtype, device, False, options)
        cu_seqlens = None
        if of_packed:
            D, cu_seqlens = make_packed(SHAPES[shape], layout, dtype, device)
            d_mask = None
        for top_k, chunk in ((2, None), (5, 2)):
            name = format_name(shape, layout, of_packed and "packed", options and "options", top_k, dtype)
            yield Sample(name, (Q, D, q_mask, d_mask, cu_seqlens, w, options, top_k, chunk), {})


def topk_reference(Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, top_k, chunk) -> tuple:
    """Return the expected scores and documents."""
    if cu_seqlens_d is not None:
        ends = cu_seqlens_d.tolist()
        documents = [D[a:b].unsqueeze(0) for a, b in itertools.pairwise(ends)]
        each = [maxsim_reference(Q, x, q_mask, q_weight=q_weight, normalize=normalize)[0] for x in documents]
        scores = torch.cat([Q.new_empty(Q.shape[0], 0), *each], 1)
    else:
        (scores,) = maxsim_reference(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize)
    found = scores.sort(dim=1, descending=True, stable=True)
    return found.values[:, :top_k], found.indices[:, :top_k]


def sized_topk(sizes: tuple[int, int, int, int], of_packed: bool, device: str) -> tuple:
    """Return arguments of ``lik::maxsim_topk`` for given sizes."""
    Q, D, q_mask, d_mask, w = make_tensors((*sizes, 8), "contiguous", torch.float32, device, False, True)
    if not of_packed:
        return Q, D, q_mask, d_mask, None, w, True, 2, None
    D, cu_seqlens = make_packed((*sizes, 8), "contiguous", torch.float32, device)
    return Q, D, q_mask, None, cu_seqlens, w, True, 2, None


def _encode(Q: Tensor, D: Tensor, *others: Tensor | None) -> tuple:
    """Convert tensors of ``lik::maxsim_topk`` to ``lik::maxsim_topk_codes``, with a code for each document token."""
    generator = torch.Generator().manual_seed(4)
    centroids = torch.randn(9, Q.shape[-1], generator=generator).to(D.device)
    codes = torch.randint(9, D.shape[:-1], generator=generator, dtype=torch.int32).to(D.device)
    return Q, codes, centroids, *others


def maxsim_topk_codes(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    """Yield the samples of ``lik::maxsim_topk_codes``."""
    for s in maxsim_topk(dtype, device):
        *given, normalize, top_k, _ = s.args
        yield Sample(s.name, (*_encode(*given), normalize, top_k, None if top_k == 2 else 2), {})


def codes_reference(Q, codes, centroids, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, top_k, n_probe) -> tuple:
    """Return the expected scores and documents."""
    documents = [(codes, d_mask)]
    if cu_seqlens_d is not None:
        documents = [(codes[None, a:b], None) for a, b in itertools.pairwise(cu_seqlens_d.tolist())]
    options = {"q_weight": q_weight, "normalize": normalize, "n_probe": n_probe}
    each = [lik_ops.reference.plaid_approx_score(Q, x, centroids, q_mask, mask, **options) for x, mask in documents]
    found = torch.cat([Q.new_empty(Q.shape[0], 0), *each], 1).sort(dim=1, descending=True, stable=True)
    return found.values[:, :top_k], found.indices[:, :top_k]


def sized_codes(sizes: tuple[int, int, int, int], of_packed: bool, device: str) -> tuple:
    """Return arguments of ``lik::maxsim_topk_codes`` for given sizes."""
    *given, normalize, top_k, _ = sized_topk(sizes, of_packed, device)
    return *_encode(*given), normalize, top_k, 3


def maxsim_xtr(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    """Yield the samples of ``lik::maxsim_xtr_fwd``."""
    for shape, layout, candidates, options in list_variants():
        for n, top_k in enumerate((1, 5, 1000) if not candidates else ()):
            inputs = draw_tensors(shape, layout, dtype, device, False, options, n != 2)
            normalizer = ("retrieved", "positive")[(n + options) % 2]
            name = format_name(shape, layout, options and "options", top_k, normalizer, dtype)
            yield Sample(name, (*inputs, top_k, normalizer), {})


def xtr_reference(Q, D, q_mask, d_mask, q_weight, top_k, normalizer) -> tuple:
    """Return the expected scores."""
    given, options = (Q, D, top_k, q_mask, d_mask), {"q_weight": q_weight, "normalizer": normalizer}
    return lik_ops.reference.maxsim_xtr(*given, **options), None, None


def sized_xtr(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    """Return arguments of ``lik::maxsim_xtr_fwd`` for given sizes."""
    return *make_tensors((*sizes, 8), "contiguous", torch.float32, device, False, True), 3, "retrieved"


def maxsim_token_topk(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    """Yield the samples of ``lik::maxsim_token_topk_fwd``."""
    for shape, layout, candidates, options in list_variants():
        for n, top_k in enumerate((1, 3, 12)):
            inputs = draw_tensors(shape, layout, dtype, device, candidates, options, n != 2)
            name = format_name(shape, layout, candidates and "candidates", options and "options", top_k, dtype)
            yield Sample(name, (*inputs, top_k, n == 1, n != 2), {})


def token_topk_reference(Q, D, q_mask, d_mask, q_weight, top_k, normalize, keep) -> tuple:
    """Return the expected scores."""
    options = {"q_weight": q_weight, "normalize": normalize}
    return lik_ops.reference.maxsim_token_topk(Q, D, top_k, q_mask, d_mask, **options), None


def sized_token_topk(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    """Return arguments of ``lik::maxsim_token_topk_fwd`` for given sizes."""
    return *make_tensors((*sizes, 8), "contiguous", torch.float32, device, candidates, True), 3, False, True
