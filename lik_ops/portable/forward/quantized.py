"""The portable forward of quantized documents, which are packed and decoded when they are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.arguments import score_dtype
from ...core.segments import DenseArgs, RaggedArgs
from ...formats.table import EncodedTokens, compute_extremes, compute_scales, encode_tokens
from ..blocks import MiB, cut_pieces, is_host_readable
from .dense import forward
from .packed import forward_ragged

_MAX_DECODED_BYTES = 4 * MiB  # fp32 tokens that are quantized or decoded at a time


def forward_quantized(
    tensors: Sequence, stored: EncodedTokens, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Return the results of `forward_ragged` for the quantized documents `stored`."""
    r = RaggedArgs.from_tensors(tensors)
    r = r._replace(Q=stored.transform_queries(r.Q.to(score_dtype(r.Q.dtype))))
    dense = _try_dense(r, stored)
    if dense is None:
        return forward_ragged(r, normalize, argmax_dtype, max_seqlen_q, stored)
    scores, argmax = forward(*dense, normalize, argmax_dtype)
    return scores, argmax if argmax_dtype is None else argmax.flatten(1)


def _try_dense(r: RaggedArgs, stored: EncodedTokens) -> DenseArgs | None:
    """Return dense arguments for a small cross product of equal lengths without gaps, else None.

    In such a call, `forward_ragged` needs more time to find this out than to multiply.
    """
    (Tq, d), Td, queries, columns = r.Q.shape, r.D.shape[0], r.queries, r.columns
    if r.pairs is not None or r.candidates or not is_host_readable(r.Q) or not 0 < Td * d * 4 <= _MAX_DECODED_BYTES:
        return None
    if not queries or not columns or Tq % queries or Td % columns or not Tq:
        return None
    Lq, Ld = Tq // queries, Td // columns
    if not torch.equal(r.cu_seqlens_q.long(), torch.arange(0, Tq + 1, Lq)):
        return None
    if not (torch.equal(r.d_offsets.long(), torch.arange(0, Td, Ld)) and bool((r.d_lengths == Ld).all())):
        return None
    D = stored.decode(slice(None), d).to(r.Q.dtype)
    tensors, lengths = (r.Q, D, r.q_mask, r.d_mask, r.q_weight), (Lq, Ld, Lq, Ld, Lq)
    return DenseArgs._make(
        None if x is None else x.unflatten(0, (-1, L)) for x, L in zip(tensors, lengths, strict=True)
    )


def keep_int8(D: Tensor) -> tuple[Tensor, Tensor]:
    """Return document tokens as int8 in the shape of D, and fp32 scales in the shape of D without d."""
    *owner, K, Ld, d = D.shape
    tokens = D if owner else D.unsqueeze(0)
    data = torch.empty(tokens.shape, dtype=torch.int8, device=D.device)
    scale = torch.empty(tokens.shape[:-1], dtype=torch.float32, device=D.device)
    for piece in cut_pieces((tokens.shape[0], K, Ld), max(1, _MAX_DECODED_BYTES // (4 * d))):
        part = tuple(piece)
        x = tokens[part].to(score_dtype(D.dtype)).flatten(0, -2)
        s = compute_scales(*compute_extremes(x, "int8"), "int8")
        data[part], scale[part] = (
            y.view(*data[part].shape[:3], *y.shape[1:]) for y in (encode_tokens(x, s, None, "int8"), s)
        )
    return data.view(D.shape), scale.view(D.shape[:-1])
