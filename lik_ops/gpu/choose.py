"""Which kernel a forward call takes: launches, `lik_ops.info`, `lik_ops.tune` and the tests ask here.

Nothing of tensors is read but their metadata. An `arch` that is given stands for that of their device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..csrc_triton.arguments import Config
from ..segments import Cut
from . import configs, forward_configs, gluon_configs
from .arguments import (
    allow_tf32,
    architecture,
    describable,
    describable_queries,
    features_span,
    sizes,
    wide_of,
    wide_rows,
)
from .configs import Architecture, Launch
from .gluon import kernels
from .gluon_configs import RowMaxima, Specialized

_LEAST_SPLIT = 1024  # query rows and document tokens; with 512 rows, splitting first takes longer
_SPLIT_BYTES = 15 * 2**20  # of terms, of queries and of documents; with their scales below 32 MiB


class Plain(NamedTuple):
    """`maxsim_forward`, which serves every call."""

    launch: Launch
    arch: Architecture
    reads_tiles: bool  # documents by way of a descriptor, where they begin at a multiple of 16 bytes
    splits_first: bool = False  # fp32 tokens, into a workspace

    @property
    def kernel(self) -> str:
        return "maxsim_forward"

    def tile(self) -> str:
        """What a program scores at a time, for people."""
        return self.launch.tile() + (", tokens split first" if self.splits_first else "")


Choice = Plain | Specialized | RowMaxima


def dense(
    Q: Tensor,
    D: Tensor,
    d_mask: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
    arch: Architecture | None = None,
) -> Choice:
    """The kernel of a call of dense tensors that have all their axes."""
    arch = arch or architecture(Q.device)
    found: Choice | None = None
    argmax = argmax_dtype is not None
    if D.dim() == 3 and Q.numel() and D.numel() and _finds_features(Q, D):
        if d_mask is None:
            found = specialized(Q, D, normalize, argmax, arch)
        elif D.is_contiguous() and not normalize:
            found = row_maxima(D, Q.shape[0] * Q.shape[1], D.shape[0], Q.shape[1], argmax, True, arch)
        if found is None and not normalize:
            found = split(Q, D, arch)
    return found or plain(Q, D, normalize, argmax, arch)


def _finds_features(Q: Tensor, D: Tensor) -> bool:
    """Whether 32 bits find the features of a token, as the Gluon kernels do."""
    return wide_rows(features_span(Q, D)) < 2


def plain(Q: Tensor, D: Tensor, normalize: bool, argmax: bool, arch: Architecture) -> Plain:
    """How the plain kernel computes a call."""
    candidates = D.dim() == 4
    Nq, K, Lq, Ld = sizes(Q, D)
    launch = forward_configs.forward(
        arch,
        Q.dtype,
        Nq,
        Lq,
        Q.shape[-1],
        candidates=candidates,
        normalize=normalize,
        wide=wide_of(Q, D),
        tf32=allow_tf32(),
        documents=K * (Nq if candidates else 1),
        argmax=argmax,
    )
    reads_tiles = arch.has_descriptors and describable(D)
    if argmax or not reads_tiles:
        launch = launch.visiting()
    if Ld < launch.config.BN:
        launch = replace(launch, config=launch.config._replace(PACKED=True))
    return Plain(launch, arch, reads_tiles)


def specialized(Q: Tensor, D: Tensor, normalize: bool, argmax: bool, arch: Architecture) -> Specialized | None:
    """The choice for documents without mask, None where another kernel serves better or alone."""
    call = arch, Q.dtype, *sizes(Q, D), Q.shape[-1]
    found = gluon_configs.specialized(*call, normalize=normalize, argmax=argmax, processors=arch.processors)
    if found is None or D.shape[-2] < found.config.BN or not describable(D) or kernels() is None:
        return None
    if normalize and (Q.stride(-1) != 1 or any(n % 16 for n in Q.stride()[:-1])):
        return None  # rows that `maxsim_forward` loads feature by feature, and adds up in another order
    return found if not found.is_wide or describable_queries(Q) else None


def int8(Q: Tensor, data: Tensor, scale: Tensor, arch: Architecture) -> Specialized | None:
    """The choice for int8 documents ``[Nd, Ld, d]`` without mask, normalising or winners; None where
    `maxsim_forward_ragged` serves.

    `scale` is ``[Nd, Ld]``, or has sizes of 1 where it is one for all. A descriptor reads those of tokens: all of them.
    """
    if Q.dim() != 3 or data.dim() != 3 or not (Q.numel() and data.numel() and describable(data)):
        return None
    if not _finds_features(Q, data):
        return None
    each_token = scale.shape[1] > 1
    if each_token and (scale.shape[0] != data.shape[0] or not scale.is_contiguous()):
        return None
    call = arch, *sizes(Q, data), Q.shape[-1]
    found = gluon_configs.int8(*call, each_token=each_token, processors=arch.processors)
    return None if found is None or kernels() is None else found


def row_maxima(
    D: Tensor, rows: int, K: int, Lq: int, argmax: bool, dense: bool, arch: Architecture
) -> RowMaxima | None:
    """The choice for contiguous tokens of K documents with masks or of any length, None as before.

    Args:
        rows: query tokens, `Lq` in the mean of each.
        dense: each query has `Lq`.
    """
    d = D.shape[-1]
    if d * D.element_size() % 16 or not 0 < D.numel() // d < 2**31:
        return None
    count = arch.processors
    found = gluon_configs.row_maxima(arch, D.dtype, rows, K, Lq, d, argmax=argmax, processors=count, dense=dense)
    return None if found is None or kernels() is None else found


def split_room(config: Config) -> int:
    """Rows of which a workspace holds both terms, at most."""
    return _SPLIT_BYTES // (4 * config.BD) // 16 * 16


def split(Q: Tensor, D: Tensor, arch: Architecture) -> Plain | None:
    """The choice for fp32 tokens that are better split first, None for others.

    Where documents meet few queries, reading them is what takes time.
    """
    if arch.unit not in forward_configs.SPLITTING or Q.dtype != torch.float32 or wide_of(Q, D):
        return None
    Nq, K, Lq, Ld = sizes(Q, D)
    d, tf32 = Q.shape[-1], allow_tf32()
    launch = forward_configs.forward(arch, Q.dtype, Nq, Lq, d, candidates=False, normalize=False, wide=0, tf32=tf32)
    launch = forward_configs.forward_split(launch, Lq)
    room = split_room(launch.config)
    fits = Nq * Lq <= room and launch.config.BN <= Ld <= room
    if not (launch.config.SPLIT and fits and min(Nq * Lq, K * Ld) >= _LEAST_SPLIT):
        return None
    return Plain(launch, arch, True, splits_first=True)


def reads_packed_tiles(c: Cut, arch: Architecture) -> bool:
    """Whether packed documents are read by way of a descriptor, where they begin at a multiple of 16 bytes."""
    d = c.D.shape[-1]
    return arch.has_descriptors and d * c.D.element_size() % 16 == 0 and c.D.stride()[-2:] == (d, 1)


def packed_row_maxima(c: Cut, argmax: bool, arch: Architecture) -> RowMaxima | None:
    """The choice for a cross product of packed tokens without `normalize`, mask of documents or lengths of queries
    that `reads_packed_tiles`."""
    if 0 in (c.queries, c.columns, c.Tq) or c.D.data_ptr() % 16:
        return None
    mean = configs.cdiv(c.Tq, c.queries)
    return row_maxima(c.D, c.Tq, c.columns, mean, argmax, c.cu_seqlens_q is None, arch)


def packed(
    c: Cut, Lq: int, wide: int, few: bool, normalize: bool, argmax: bool, arch: Architecture, stored: Any = ""
) -> tuple[Launch, int]:
    """The tile for queries of the mean length `Lq`, and the levels of a sum: see `maxsim_forward_ragged`.

    Longer queries take several steps, so that the host need not know the longest. Of the sizes in `c` this reads the
    number of queries only: `PackedPlan` keeps the result by that, `Lq`, `wide` and `few`.
    """
    return forward_configs.forward_ragged(
        arch,
        c.Q.dtype,
        max(c.queries, 1),
        Lq,
        c.Q.shape[-1],
        candidates=c.candidates or c.pairs is not None,
        normalize=normalize,
        wide=wide,
        tf32=allow_tf32(),
        argmax=argmax,
        longest=Lq if c.cu_seqlens_q is None or c.queries == 1 else None,
        few=few,
        stored=stored,
    )
