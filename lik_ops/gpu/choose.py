"""Which kernel a forward call takes: launches, `lik_ops.info`, `lik_ops.tune` and the tests ask here.

Nothing of tensors is read but their metadata. An `arch` that is given stands for that of their device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.segments import Cut
from ..csrc_triton.common.arguments import Config
from ..csrc_triton.forward.generic.splits import LEAST
from .runtime.arguments import (
    allow_tf32,
    architecture,
    describable,
    describable_queries,
    features_span,
    is_even,
    sizes,
    wide_of,
    wide_rows,
)
from .runtime.gluon import kernels
from .tuning import architectures, forward_configs, sm90_configs
from .tuning.architectures import Architecture, Kind, Launch
from .tuning.sm90_configs import RowMaxima, Specialized

_LEAST_SPLIT = 1024  # query rows and document tokens; with 512 rows, splitting first takes longer
_LONG = 2048  # tokens of documents, in the mean, that are split where they are few
# (row tile, document) pairs per SM up to which splitting is faster: of busy programs; of others, which only wait for
# documents, if these have at least or less than `_LARGE_BYTES` in the mean; and if a Gluon kernel could serve. Measured
# on H100 and H200, 2026-11-26: `benchmarks/results/sweep_pairs.json`.
_MOST_BUSY, _MOST_LARGE, _MOST_SMALL, _MOST_GLUON = 1.0, 0.6, 0.4, 0.25
_LARGE_BYTES = 2**20
_LEAST_SECTION = 128  # tokens
_MOST_SECTION = 2048  # beyond it there are more sections than run at a time
_MOST_SECTIONS = 256  # of a document: one program puts them together
_RESIDENT = 3  # programs of a multiprocessor, at most
_SECTION_BYTES = 28 * 2**20  # of what they leave, below 32 MiB with a flag for each
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


class Sectioned(NamedTuple):
    """`maxsim_forward_ragged` on sections of documents, and `maxsim_row_sums` of what they leave."""

    launch: Launch
    arch: Architecture
    reads_tiles: bool  # as of `Plain`
    levels: int  # of the trees of sums
    most: int  # sections
    each: int | None  # tokens of a section, where all documents are known to have as many
    programs: int
    sums: tuple[int, int, int, int]  # rows of a query, queries and documents at a time, levels

    @property
    def kernel(self) -> str:
        return "maxsim_forward_ragged"

    def tile(self) -> str:
        """What a program scores at a time, for people."""
        return f"{self.launch.tile()}, documents in up to {self.most} sections"

    @property
    def sums_options(self) -> dict[str, Any]:
        """Options of the launch of `maxsim_row_sums`."""
        options: dict[str, Any] = Launch(self.launch.config, 4, 3, 255).options(self.arch)
        return {**options, "launch_pdl": True} if self.launch.config.EARLY else options


Choice = Plain | Specialized | RowMaxima | Sectioned


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
    streamed: Specialized | RowMaxima | None = None
    argmax = argmax_dtype is not None
    if D.dim() == 3 and Q.numel() and D.numel() and _finds_features(Q, D):
        if d_mask is None:
            streamed = specialized(Q, D, normalize, argmax, arch)
        elif D.is_contiguous() and not normalize:
            streamed = row_maxima(D, Q.shape[0] * Q.shape[1], D.shape[0], Q.shape[1], argmax, True, arch)
        evenly_spaced = all(x is None or is_even(x) for x in (Q, D, d_mask))
        if evenly_spaced and (streamed is None or leaves_room(streamed, Q.shape[1], D.shape[1], arch)):
            found = sectioned(cut_of(Q, D, None, d_mask), normalize, argmax, arch)
        found = found or streamed
        if found is None and not normalize:
            found = split(Q, D, arch)
    return found or plain(Q, D, normalize, argmax, arch)


def leaves_room(choice: Specialized | RowMaxima, Lq: int, Ld: int, arch: Architecture) -> bool:
    """Whether a Gluon kernel has so few programs that splitting documents of `Ld` tokens in the mean is faster.

    Splitting uses the generic kernel, which is slower for long queries. These need documents twice as long.
    """
    least = _LONG if Lq <= sm90_configs.MOST_WHOLE else 2 * _LONG
    return Ld >= least and choice.programs < arch.processors * _MOST_GLUON


def _finds_features(Q: Tensor, D: Tensor) -> bool:
    """Whether 32 bits find the features of a token, as the Gluon kernels do."""
    return wide_rows(features_span(Q, D)) < 2


def plain(Q: Tensor, D: Tensor, normalize: bool, argmax: bool, arch: Architecture) -> Plain:
    """How the plain kernel computes a call."""
    candidates = D.dim() == 4
    Nq, K, Lq, Ld = sizes(Q, D)
    documents = K * (Nq if candidates else 1)
    kind = Kind(arch, Q.dtype, Q.shape[-1], candidates, normalize, wide_of(Q, D))
    launch = forward_configs.forward(kind, Nq, Lq, tf32=allow_tf32(Q.dtype), documents=documents, argmax=argmax)
    reads_tiles = arch.has_descriptors and describable(D)
    if argmax:
        launch = forward_configs.with_winners(launch, reads_tiles)
    elif not reads_tiles:
        launch = launch.visiting()
    else:
        launch = forward_configs.paced(launch, arch, documents)
    if Ld < launch.config.BN:
        launch = replace(launch, config=launch.config._replace(PACKED=True))
    return Plain(launch, arch, reads_tiles)


def specialized(Q: Tensor, D: Tensor, normalize: bool, argmax: bool, arch: Architecture) -> Specialized | None:
    """The choice for documents without mask, None where another kernel serves better or alone."""
    call = arch, Q.dtype, *sizes(Q, D), Q.shape[-1]
    if Q.dtype == torch.float32:
        splits = not argmax and plain(Q, D, normalize, argmax, arch).launch.config.SPLIT
        found = sm90_configs.few_split(arch, *call[2:]) if splits else None
    else:
        found = sm90_configs.specialized(*call, normalize=normalize, argmax=argmax)
    if found is None or not describable(D) or kernels() is None:
        return None
    if normalize and (Q.stride(-1) != 1 or any(n % 16 for n in Q.stride()[:-1])):
        return None  # rows that `maxsim_forward` loads feature by feature, and adds up in another order
    return found if not found.is_wide or describable_queries(Q) else None


def int8(Q: Tensor, data: Tensor, scale: Tensor, terms: int, arch: Architecture) -> Specialized | None:
    """The choice for int8 documents ``[Nd, Ld, d]`` without mask, normalising or winners, beside query rows of so many
    int8 terms; None where `maxsim_forward_ragged` serves.

    `scale` is ``[Nd, Ld]``, or has sizes of 1 where it is one for all. A descriptor reads those of tokens: all of them.
    """
    if not _describes_numbers(Q, data):
        return None
    each_token = scale.shape[1] > 1
    if each_token and (scale.shape[0] != data.shape[0] or not scale.is_contiguous()):
        return None
    call = arch, Q.dtype, *sizes(Q, data), Q.shape[-1]
    found = sm90_configs.int8(*call, each_token=each_token, terms=terms)
    return None if found is None or kernels() is None else found


def _describes_numbers(Q: Tensor, data: Tensor) -> bool:
    """Whether the kernels of dense documents can read these numbers of 8 bits."""
    dense = Q.dim() == 3 and data.dim() == 3 and Q.numel() and data.numel()
    return bool(dense) and describable(data) and _finds_features(Q, data)


def fp8(Q: Tensor, data: Tensor, kept: str, arch: Architecture) -> Specialized | None:
    """The same for FP8 documents that are kept as "e4m3" or "e5m2", whatever lies apart in their scales."""
    if not _describes_numbers(Q, data):
        return None
    found = sm90_configs.fp8(arch, Q.dtype, *sizes(Q, data), Q.shape[-1], kept=kept)
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
    found = sm90_configs.row_maxima(arch, D.dtype, rows, K, Lq, d, argmax=argmax, dense=dense)
    return None if found is None or kernels() is None else found


def cut_of(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> Cut:
    """Dense tokens, that are even, as packed ones."""
    Nq, K, Lq, Ld = sizes(Q, D)
    return Cut(Q, D, *(None,) * 5, q_mask, d_mask, None, Nq, K, False, Nq * Lq, K * Ld, Lq)


def is_long(c: Cut) -> bool:
    """Whether documents are so long in the mean that `sectioned` may serve."""
    return c.Td >= _LONG * c.columns


def sectioned(c: Cut, normalize: bool, argmax: bool, arch: Architecture) -> Sectioned | None:
    """The choice for documents that are few and long, None for others: as all give the same bits, their number and
    mean length decide."""
    if not is_long(c) or c.candidates or c.pairs is not None or 0 in (c.queries, c.columns, c.Tq):
        return None
    Lq, d = max(forward_configs.LEAST_SLOT, architectures.cdiv(c.Tq, c.queries)), c.Q.shape[-1]
    span, row = features_span(c.Q, c.D), abs(c.D.stride(-2))
    wide = 2 if wide_rows(span) == 2 else int((c.Td + 64) * row + span >= 2**31)
    launch, levels = packed(c, Lq, wide, True, normalize, argmax, arch)
    config = launch.config
    row_tiles, K = architectures.cdiv(c.queries, config.BM // config.SLOT), c.columns
    # Other programs read at 60 GB/s when they are alone on an SM: 80 of them are as fast as the memory.
    busy = normalize or c.d_mask is not None or config.BM > 64
    is_large = c.Td * d * c.D.element_size() >= K * _LARGE_BYTES
    share = _MOST_BUSY if busy else _MOST_LARGE if is_large else _MOST_SMALL
    if row_tiles * K > arch.processors * share:
        return None
    most = min(_sections_at_a_time(launch, c, row_tiles, arch), _SECTION_BYTES // ((8 if argmax else 4) * c.Tq))
    if most < 2 * K:
        return None
    each, alike = None, c.offsets is None and c.lengths is None
    if alike:
        tiles = architectures.cdiv(architectures.cdiv(c.Td, most - K), config.BN)
        each = max(tiles, LEAST) * config.BN
        most = K * architectures.cdiv(c.D.shape[-2], each)
    read_on = not (alike and c.D.shape[-2] >= config.BN)
    launch = replace(launch, config=config._replace(SECTIONS=True, PACKED=read_on, EARLY=arch.name == "sm_90"))
    slot, of_slot = forward_configs.row_sums(arch, c.Q.dtype, Lq, d, normalize, wide)
    sums = slot, 1 if c.queries == 1 else max(128 // slot, 1), 1, of_slot
    reads_tiles = reads_packed_tiles(c, arch) and c.Td < 2**31
    return Sectioned(launch, arch, reads_tiles, levels, most, each, most * row_tiles, sums)


def _sections_at_a_time(launch: Launch, c: Cut, row_tiles: int, arch: Architecture) -> int:
    """How many sections the multiprocessors score at once, or a multiple of it where these would be long; not so many
    that they would be short."""
    C = launch.config
    shared = (launch.num_stages * C.BN + C.BM) * C.BD * c.Q.element_size()
    resident = max(min(_RESIDENT, arch.shared_memory // shared), 1) * arch.processors // row_tiles
    waves = min(architectures.cdiv(architectures.cdiv(c.Td, resident), _MOST_SECTION), c.columns)
    return min(waves * resident, c.columns + min(c.Td // _LEAST_SECTION, _MOST_SECTIONS * c.columns))


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
    kind = Kind(arch, Q.dtype, Q.shape[-1], False, False, 0)
    launch = forward_configs.forward(kind, Nq, Lq, tf32=allow_tf32(Q.dtype))
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
    that `reads_packed_tiles`. Of its sizes queries, documents and Tq decide, if D has 1 to 2^31 - 1 rows."""
    if 0 in (c.queries, c.columns, c.Tq):
        return None
    mean = architectures.cdiv(c.Tq, c.queries)
    return row_maxima(c.D, c.Tq, c.columns, mean, argmax, c.cu_seqlens_q is None, arch)


def packed(
    c: Cut, Lq: int, wide: int, few: bool, normalize: bool, argmax: bool, arch: Architecture, stored: Any = ""
) -> tuple[Launch, int]:
    """The tile for queries of the mean length `Lq`, and the levels of a sum: see `maxsim_forward_ragged`.

    Longer queries take several steps, so that the host need not know the longest. Of the sizes in `c` this reads the
    number of queries only: `PackedPlan` keeps the result by that, `Lq`, `wide` and `few`.
    """
    return forward_configs.forward_ragged(
        Kind(arch, c.Q.dtype, c.Q.shape[-1], c.candidates or c.pairs is not None, normalize, wide),
        max(c.queries, 1),
        Lq,
        tf32=allow_tf32(c.Q.dtype),
        argmax=argmax,
        longest=Lq if c.cu_seqlens_q is None or c.queries == 1 else None,
        few=few,
        bare=all(x is None for x in (c.q_mask, c.d_mask, c.q_weight, c.q_lengths)),
        stored=stored,
    )
