"""Token pooling of a host library by `lik_ops.pool_tokens`, for all documents of a call at once.

The host's own method runs with its pooling of documents replaced, so its checks, masks and padding remain.
colpali-engine pools a list of documents, and its method runs once. sentence-transformers pools one document after the
other, so its method runs twice: one run records the documents, and the next one returns the pooled tokens.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import torch
from torch import Tensor

from .. import pool_tokens
from ..core.arguments import DTYPES

_log = logging.getLogger("lik_ops")
_MAX_NORM = 1.01  # of tokens of norm 1 in bf16; the hosts clamp the distances of longer tokens


class HostPoolsError(Exception):
    """Ends a method of the host, whose documents only the host can pool."""


def is_factor(factor: Any) -> bool:
    """Return whether `lik_ops.pool_tokens` accepts a factor and pools with it."""
    return isinstance(factor, (int, float)) and not isinstance(factor, bool) and 1 < factor < math.inf


def replace_method(pooler: Any, name: str, function: Any) -> Any:
    """Return a copy of a host's pooler that has another method of this name."""
    clone = copy.copy(pooler)
    setattr(clone, name, function)
    return clone


def pool_each(documents: list[Tensor], factor: float, min_tokens: int = 0, **options: Any) -> list[Tensor] | None:
    """Pool documents ``[L_i, d]`` with the options of `lik_ops.pool_tokens`, in memory of their own.

    Return None if the host may have another result or error, and explain the reason at the level ``DEBUG``. The host
    does not pool documents of fewer than `min_tokens` tokens.
    """
    reason = _find_reason(documents, min_tokens)
    if reason is not None:
        _log.debug("pool_tokens: the host pools the documents: %s", reason)
        return None
    tokens, cu_seqlens = pool_tokens(documents, factor, **options)
    return [x.clone() for x in tokens.split(cu_seqlens.diff().tolist())]


def _find_reason(documents: list[Tensor], min_tokens: int) -> str | None:
    """Return why `lik_ops.pool_tokens` may differ from the host, or None."""
    if not documents or min(map(len, documents)) < min_tokens:
        return f"expected documents of at least {min_tokens} tokens"
    first = documents[0]
    if first.dim() != 2 or first.dtype not in DTYPES:
        return f"expected [L, d] of fp16, bf16, fp32 or fp64, got {list(first.shape)} of {first.dtype}"
    if len({(x.dtype, x.device, x.shape[1:]) for x in documents}) > 1:
        return "expected one dtype, device and d"
    norms = torch.cat([x.detach() for x in documents]).float().norm(dim=-1)
    return None if bool((norms <= _MAX_NORM).all()) else "expected tokens of norm 1"
