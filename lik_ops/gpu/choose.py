"""Which kernel a forward call takes: launches, `lik_ops.info`, `lik_ops.tune` and the tests ask here.

Nothing of tensors is read but their metadata. An `arch` that is given stands for that of their device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.segments import PackedArgs
from ..csrc_triton.common.arguments import KernelConfig
from ..csrc_triton.forward.generic.splits import MIN_SPLIT_TILES
from .runtime.arguments import (
    architecture,
    choose_offset_width,
    choose_row_offset_width,
    get_feature_reach,
    has_even_stride,
    is_tf32_allowed,
    make_size_args,
    supports_descriptor,
    supports_query_descriptor,
)
from .runtime.gluon import load_kernels
from .tuning import architectures, forward_configs, sm90_configs
from .tuning.architectures import Architecture, KernelKey, LaunchConfig
from .tuning.sm90_configs import RowMaximaChoice, Sm90Choice

_MIN_FP32_SPLIT_ROWS = 1024  # query rows and document tokens; with 512 rows, splitting first takes longer
_MIN_LONG_DOCUMENT_TOKENS = 2048  # tokens of documents, in the mean, that are split where they are few
# (row tile, document) pairs per SM up to which splitting is faster: of busy programs; of others, which only wait for
# documents, if these have at least or less than `_MIN_LARGE_DOCUMENT_BYTES` in the mean; and if a Gluon kernel could
# serve. Measured on H100 and H200, 2026-11-26: `benchmarks/results/sweep_pairs.json`.
_MAX_BUSY_PAIRS_PER_SM, _MAX_LARGE_PAIRS_PER_SM, _MAX_SMALL_PAIRS_PER_SM, _MAX_GLUON_PAIRS_PER_SM = 1.0, 0.6, 0.4, 0.25
_MIN_LARGE_DOCUMENT_BYTES = 2**20
_MIN_SPLIT_TOKENS = 128  # tokens
_MAX_SPLIT_TOKENS = 2048  # beyond it there are more sections than run at a time
_MAX_DOCUMENT_SPLITS = 256  # of a document: one program puts them together
_MAX_CTAS_PER_SM = 3  # programs of a multiprocessor, at most
_MAX_SPLIT_WORKSPACE_BYTES = 28 * 2**20  # of what they leave, below 32 MiB with a flag for each
_MAX_FP32_SPLIT_BYTES = 15 * 2**20  # of terms, of queries and of documents; with their scales below 32 MiB


class GenericChoice(NamedTuple):
    """`maxsim_forward`, which serves every call."""

    launch: LaunchConfig
    arch: Architecture
    uses_descriptor: bool  # documents by way of a descriptor, where they begin at a multiple of 16 bytes
    has_fp32_split: bool = False  # fp32 tokens, into a workspace

    @property
    def kernel(self) -> str:
        return "maxsim_forward"

    def tile(self) -> str:
        """What a program scores at a time, for people."""
        return self.launch.tile() + (", tokens split first" if self.has_fp32_split else "")


class SplitChoice(NamedTuple):
    """`maxsim_forward_ragged` on sections of documents, and `maxsim_row_sums` of what they leave."""

    launch: LaunchConfig
    arch: Architecture
    uses_descriptor: bool  # as of `GenericChoice`
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
    def make_sum_options(self) -> dict[str, Any]:
        """Options of the launch of `maxsim_row_sums`."""
        options: dict[str, Any] = LaunchConfig(self.launch.config, 4, 3, 255).options(self.arch)
        return {**options, "launch_pdl": True} if self.launch.config.PDL else options


Choice = GenericChoice | Sm90Choice | RowMaximaChoice | SplitChoice


def choose_dense(
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
    streamed: Sm90Choice | RowMaximaChoice | None = None
    argmax = argmax_dtype is not None
    if D.dim() == 3 and Q.numel() and D.numel() and _has_int32_features(Q, D):
        if d_mask is None:
            streamed = choose_sm90(Q, D, normalize, argmax, arch)
        elif D.is_contiguous() and not normalize:
            streamed = choose_row_maxima(D, Q.shape[0] * Q.shape[1], D.shape[0], Q.shape[1], argmax, True, arch)
        evenly_spaced = all(x is None or has_even_stride(x) for x in (Q, D, d_mask))
        if evenly_spaced and (streamed is None or has_idle_sms(streamed, Q.shape[1], D.shape[1], arch)):
            found = choose_document_splits(make_cut(Q, D, None, d_mask), normalize, argmax, arch)
        found = found or streamed
        if found is None and not normalize:
            found = choose_fp32_split(Q, D, arch)
    return found or choose_generic(Q, D, normalize, argmax, arch)


def has_idle_sms(choice: Sm90Choice | RowMaximaChoice, Lq: int, Ld: int, arch: Architecture) -> bool:
    """Whether a Gluon kernel has so few programs that splitting documents of `Ld` tokens in the mean is faster.

    Splitting uses the generic kernel, which is slower for long queries. These need documents twice as long.
    """
    least = _MIN_LONG_DOCUMENT_TOKENS if Lq <= sm90_configs.MAX_WHOLE_QUERY_TOKENS else 2 * _MIN_LONG_DOCUMENT_TOKENS
    return Ld >= least and choice.programs < arch.processors * _MAX_GLUON_PAIRS_PER_SM


def _has_int32_features(Q: Tensor, D: Tensor) -> bool:
    """Whether 32 bits find the features of a token, as the Gluon kernels do."""
    return choose_row_offset_width(get_feature_reach(Q, D)) < 2


def choose_generic(Q: Tensor, D: Tensor, normalize: bool, argmax: bool, arch: Architecture) -> GenericChoice:
    """How the plain kernel computes a call."""
    candidates = D.dim() == 4
    Nq, K, Lq, Ld = make_size_args(Q, D)
    documents = K * (Nq if candidates else 1)
    kind = KernelKey(arch, Q.dtype, Q.shape[-1], candidates, normalize, choose_offset_width(Q, D))
    launch = forward_configs.configure_forward(
        kind, Nq, Lq, tf32=is_tf32_allowed(Q.dtype), documents=documents, argmax=argmax
    )
    reads_tiles = arch.has_descriptors and supports_descriptor(D)
    if argmax:
        launch = forward_configs.adjust_for_argmax(launch, reads_tiles)
    elif not reads_tiles:
        launch = launch.make_non_persistent()
    else:
        launch = forward_configs.adjust_for_h100(launch, arch, documents)
    if Ld < launch.config.BN:
        launch = replace(launch, config=launch.config._replace(SHORT_DOCUMENTS=True))
    return GenericChoice(launch, arch, reads_tiles)


def choose_sm90(Q: Tensor, D: Tensor, normalize: bool, argmax: bool, arch: Architecture) -> Sm90Choice | None:
    """The choice for documents without mask, None where another kernel serves better or alone."""
    call = arch, Q.dtype, *make_size_args(Q, D), Q.shape[-1]
    if Q.dtype == torch.float32:
        splits = not argmax and choose_generic(Q, D, normalize, argmax, arch).launch.config.SPLIT_FP32
        found = sm90_configs.configure_small_m_split(arch, *call[2:]) if splits else None
    else:
        found = sm90_configs.configure_sm90(*call, normalize=normalize, argmax=argmax)
    if found is None or not supports_descriptor(D) or load_kernels() is None:
        return None
    if normalize and (Q.stride(-1) != 1 or any(n % 16 for n in Q.stride()[:-1])):
        return None  # rows that `maxsim_forward` loads feature by feature, and adds up in another order
    return found if not found.has_large_d or supports_query_descriptor(Q) else None


def choose_int8(Q: Tensor, data: Tensor, scale: Tensor, terms: int, arch: Architecture) -> Sm90Choice | None:
    """The choice for int8 documents ``[Nd, Ld, d]`` without mask, normalising or winners, beside query rows of so many
    int8 terms; None where `maxsim_forward_ragged` serves.

    `scale` is ``[Nd, Ld]``, or has sizes of 1 where it is one for all. A descriptor reads those of tokens: all of them.
    """
    if not _supports_encoded_descriptor(Q, data):
        return None
    each_token = scale.shape[1] > 1
    if each_token and (scale.shape[0] != data.shape[0] or not scale.is_contiguous()):
        return None
    call = arch, Q.dtype, *make_size_args(Q, data), Q.shape[-1]
    found = sm90_configs.configure_int8(*call, each_token=each_token, terms=terms)
    return None if found is None or load_kernels() is None else found


def _supports_encoded_descriptor(Q: Tensor, data: Tensor) -> bool:
    """Whether the kernels of dense documents can read these numbers of 8 bits."""
    dense = Q.dim() == 3 and data.dim() == 3 and Q.numel() and data.numel()
    return bool(dense) and supports_descriptor(data) and _has_int32_features(Q, data)


def choose_fp8(Q: Tensor, data: Tensor, kept: str, arch: Architecture) -> Sm90Choice | None:
    """The same for FP8 documents that are kept as "e4m3" or "e5m2", whatever lies apart in their scales."""
    if not _supports_encoded_descriptor(Q, data):
        return None
    found = sm90_configs.configure_fp8(arch, Q.dtype, *make_size_args(Q, data), Q.shape[-1], kept=kept)
    return None if found is None or load_kernels() is None else found


def choose_row_maxima(
    D: Tensor, rows: int, K: int, Lq: int, argmax: bool, dense: bool, arch: Architecture
) -> RowMaximaChoice | None:
    """The choice for contiguous tokens of K documents with masks or of any length, None as before.

    Args:
        rows: query tokens, `Lq` in the mean of each.
        dense: each query has `Lq`.
    """
    d = D.shape[-1]
    if d * D.element_size() % 16 or not 0 < D.numel() // d < 2**31:
        return None
    found = sm90_configs.configure_row_maxima(arch, D.dtype, rows, K, Lq, d, argmax=argmax, dense=dense)
    return None if found is None or load_kernels() is None else found


def make_cut(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> PackedArgs:
    """Dense tokens, that are even, as packed ones."""
    Nq, K, Lq, Ld = make_size_args(Q, D)
    return PackedArgs(Q, D, *(None,) * 5, q_mask, d_mask, None, Nq, K, False, Nq * Lq, K * Ld, Lq)


def has_long_documents(c: PackedArgs) -> bool:
    """Whether documents are so long in the mean that `choose_document_splits` may serve."""
    return c.Td >= _MIN_LONG_DOCUMENT_TOKENS * c.columns


def choose_document_splits(c: PackedArgs, normalize: bool, argmax: bool, arch: Architecture) -> SplitChoice | None:
    """The choice for documents that are few and long, None for others: as all give the same bits, their number and
    mean length decide."""
    if not has_long_documents(c) or c.candidates or c.pairs is not None or 0 in (c.queries, c.columns, c.Tq):
        return None
    Lq, d = max(forward_configs.MIN_ROWS_PER_QUERY, architectures.cdiv(c.Tq, c.queries)), c.Q.shape[-1]
    span, row = get_feature_reach(c.Q, c.D), abs(c.D.stride(-2))
    wide = 2 if choose_row_offset_width(span) == 2 else int((c.Td + 64) * row + span >= 2**31)
    launch, levels = choose_packed(c, Lq, wide, True, normalize, argmax, arch)
    config = launch.config
    row_tiles, K = architectures.cdiv(c.queries, config.BM // config.ROWS_PER_QUERY), c.columns
    # Other programs read at 60 GB/s when they are alone on an SM: 80 of them are as fast as the memory.
    busy = normalize or c.d_mask is not None or config.BM > 64
    is_large = c.Td * d * c.D.element_size() >= K * _MIN_LARGE_DOCUMENT_BYTES
    share = _MAX_BUSY_PAIRS_PER_SM if busy else _MAX_LARGE_PAIRS_PER_SM if is_large else _MAX_SMALL_PAIRS_PER_SM
    if row_tiles * K > arch.processors * share:
        return None
    most = min(
        _choose_split_count(launch, c, row_tiles, arch), _MAX_SPLIT_WORKSPACE_BYTES // ((8 if argmax else 4) * c.Tq)
    )
    if most < 2 * K:
        return None
    each, alike = None, c.offsets is None and c.lengths is None
    if alike:
        tiles = architectures.cdiv(architectures.cdiv(c.Td, most - K), config.BN)
        each = max(tiles, MIN_SPLIT_TILES) * config.BN
        most = K * architectures.cdiv(c.D.shape[-2], each)
    read_on = not (alike and c.D.shape[-2] >= config.BN)
    launch = replace(
        launch, config=config._replace(SPLIT_DOCUMENTS=True, SHORT_DOCUMENTS=read_on, PDL=arch.name == "sm_90")
    )
    slot, of_slot = forward_configs.configure_row_sums(arch, c.Q.dtype, Lq, d, normalize, wide)
    sums = slot, 1 if c.queries == 1 else max(128 // slot, 1), 1, of_slot
    reads_tiles = supports_packed_descriptor(c, arch) and c.Td < 2**31
    return SplitChoice(launch, arch, reads_tiles, levels, most, each, most * row_tiles, sums)


def _choose_split_count(launch: LaunchConfig, c: PackedArgs, row_tiles: int, arch: Architecture) -> int:
    """How many sections the multiprocessors score at once, or a multiple of it where these would be long; not so many
    that they would be short."""
    C = launch.config
    shared = (launch.num_stages * C.BN + C.BM) * C.BD * c.Q.element_size()
    resident = max(min(_MAX_CTAS_PER_SM, arch.shared_memory_bytes // shared), 1) * arch.processors // row_tiles
    waves = min(architectures.cdiv(architectures.cdiv(c.Td, resident), _MAX_SPLIT_TOKENS), c.columns)
    return min(waves * resident, c.columns + min(c.Td // _MIN_SPLIT_TOKENS, _MAX_DOCUMENT_SPLITS * c.columns))


def get_split_workspace_rows(config: KernelConfig) -> int:
    """Rows of which a workspace holds both terms, at most."""
    return _MAX_FP32_SPLIT_BYTES // (4 * config.BD) // 16 * 16


def choose_fp32_split(Q: Tensor, D: Tensor, arch: Architecture) -> GenericChoice | None:
    """The choice for fp32 tokens that are better split first, None for others.

    Where documents meet few queries, reading them is what takes time.
    """
    if arch.unit not in forward_configs.FP32_SPLIT_UNITS or Q.dtype != torch.float32 or choose_offset_width(Q, D):
        return None
    Nq, K, Lq, Ld = make_size_args(Q, D)
    kind = KernelKey(arch, Q.dtype, Q.shape[-1], False, False, 0)
    launch = forward_configs.configure_forward(kind, Nq, Lq, tf32=is_tf32_allowed(Q.dtype))
    launch = forward_configs.adjust_for_fp32_split(launch, Lq)
    room = get_split_workspace_rows(launch.config)
    fits = Nq * Lq <= room and launch.config.BN <= Ld <= room
    if not (launch.config.SPLIT_FP32 and fits and min(Nq * Lq, K * Ld) >= _MIN_FP32_SPLIT_ROWS):
        return None
    return GenericChoice(launch, arch, True, has_fp32_split=True)


def supports_packed_descriptor(c: PackedArgs, arch: Architecture) -> bool:
    """Whether packed documents are read by way of a descriptor, where they begin at a multiple of 16 bytes."""
    d = c.D.shape[-1]
    return arch.has_descriptors and d * c.D.element_size() % 16 == 0 and c.D.stride()[-2:] == (d, 1)


def choose_packed_row_maxima(c: PackedArgs, argmax: bool, arch: Architecture) -> RowMaximaChoice | None:
    """The choice for a cross product of packed tokens without `normalize`, mask of documents or lengths of queries
    that `supports_packed_descriptor`. Of its sizes queries, documents and Tq decide, if D has 1 to 2^31 - 1 rows."""
    if 0 in (c.queries, c.columns, c.Tq):
        return None
    mean = architectures.cdiv(c.Tq, c.queries)
    return choose_row_maxima(c.D, c.Tq, c.columns, mean, argmax, c.cu_seqlens_q is None, arch)


def choose_packed(
    c: PackedArgs, Lq: int, wide: int, few: bool, normalize: bool, argmax: bool, arch: Architecture, stored: Any = ""
) -> tuple[LaunchConfig, int]:
    """The tile for queries of the mean length `Lq`, and the levels of a sum: see `maxsim_forward_ragged`.

    Longer queries take several steps, so that the host need not know the longest. Of the sizes in `c` this reads the
    number of queries only: `PackedPlan` keeps the result by that, `Lq`, `wide` and `few`.
    """
    return forward_configs.configure_packed_forward(
        KernelKey(arch, c.Q.dtype, c.Q.shape[-1], c.candidates or c.pairs is not None, normalize, wide),
        max(c.queries, 1),
        Lq,
        tf32=is_tf32_allowed(c.Q.dtype),
        argmax=argmax,
        longest=Lq if c.cu_seqlens_q is None or c.queries == 1 else None,
        few=few,
        bare=all(x is None for x in (c.q_mask, c.d_mask, c.q_weight, c.q_lengths)),
        stored=stored,
    )
