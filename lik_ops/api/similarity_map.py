"""The similarities of a few queries and documents, for plots."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..core.arguments import check_flag, check_per_token, check_tokens, format_shape, score_dtype
from ..ops.stack import autocast
from .inputs import Tokens
from .padding import make_dense

_OP = "similarity_map"


def similarity_map(
    Q: Tokens, D: Tokens, q_mask: Tensor | None = None, d_mask: Tensor | None = None, *, normalize: bool = False
) -> Tensor:
    """Compute the similarity of every token of a query to every token of a document, for plots.

    This is the only function that stores all similarities. Leading axes broadcast as in `torch.matmul`. A query
    ``[Lq, d]`` with documents ``[N, Ld, d]`` gives the maps of N documents. Queries ``[B, Lq, d]`` with documents
    ``[B, Ld, d]`` give the maps of B pairs.

    Args:
        Q: query tokens ``[Lq, d]`` or ``[..., Lq, d]``; fp16, bf16, fp32 or fp64. Lists and nested tensors, also of
            documents, are padded and masked.
        D: document tokens ``[Ld, d]`` or ``[..., Ld, d]`` of the dtype and device of Q.
        q_mask: query tokens to keep, with the shape of Q without d. The dtype is bool (True = keep), or an integer
            dtype read as ``!= 0``.
        d_mask: document tokens to keep, with the shape of D without d, in the same dtypes.
        normalize: L2-normalize every token first, so that similarities are cosines.

    Returns:
        Similarities ``[..., Lq, Ld]`` in fp32 (fp64 for fp64 inputs), differentiable. The maximum of a row is the
        contribution of its query token to the score. Rows and columns of masked tokens are ``-inf``, which matplotlib
        leaves blank.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size or device is wrong.

    Example:
        >>> Q, D = torch.randn(5, 128), torch.randn(40, 128)
        >>> S = lik_ops.similarity_map(Q, D, normalize=True)
        >>> S.shape, torch.allclose(S.amax(1).sum(), lik_ops.maxsim(Q, D, normalize=True))
        (torch.Size([5, 40]), True)
    """
    queries, documents, q_mask, d_mask, _ = make_dense(_OP, Q, D, q_mask, d_mask)
    _check_map_args(queries, documents, q_mask, d_mask)
    check_flag(_OP, "normalize", normalize)
    q_drop, d_drop = (None if mask is None else mask == 0 for mask in (q_mask, d_mask))
    with autocast.suspend_autocast(queries.device.type):
        documents = _prepare_tokens(documents, d_drop, normalize)
        S = _prepare_tokens(queries, q_drop, normalize) @ documents.transpose(-1, -2)
    if q_drop is not None:
        S = S.masked_fill(q_drop.unsqueeze(-1), float("-inf"))
    return S if d_drop is None else S.masked_fill(d_drop.unsqueeze(-2), float("-inf"))


def _prepare_tokens(x: Tensor, drop: Tensor | None, normalize: bool) -> Tensor:
    """Return tokens in the dtype of the scores, with dropped tokens zeroed, normalized if asked."""
    x = x.to(score_dtype(x.dtype))
    if drop is not None:
        x = x.masked_fill(drop.unsqueeze(-1), 0)  # NaN in a masked token would reach the gradients
    return F.normalize(x, dim=-1) if normalize else x


def _check_map_args(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> None:
    check_tokens(_OP, Q, D, ("[..., L, d]",), ("[..., L, d]",))
    for a, b in zip(reversed(Q.shape[:-2]), reversed(D.shape[:-2]), strict=False):
        if a != b and 1 not in (a, b):
            raise ValueError(f"{_OP}: D: expected leading axes that go with Q {format_shape(Q)}, got {format_shape(D)}")
    check_per_token(_OP, Q, D, q_mask, d_mask, None)
