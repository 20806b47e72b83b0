"""Choice of the kernel for a forward call, for launches, `lik_ops.info`, and the tests.

The functions read only the metadata of tensors. An `arch` argument replaces the architecture of the tensors' device.
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

# Minimum of both query rows and document tokens. With 512 rows, splitting first is slower.
_MIN_FP32_SPLIT_ROWS = 1024
# Minimum mean length of documents that are split if there are few of them.
_MIN_LONG_DOCUMENT_TOKENS = 2048
# Number of (row tile, document) pairs per SM up to which splitting documents is faster. BUSY is for programs with much
# arithmetic. LARGE and SMALL are for memory-bound programs, whose mean document has at least or less than
# `_MIN_LARGE_DOCUMENT_BYTES`. GLUON is for calls that a Gluon kernel could serve.
# Measured on H100 and H200, 2026-11-26: `benchmarks/results/sweep_pairs.json`.
_MAX_BUSY_PAIRS_PER_SM, _MAX_LARGE_PAIRS_PER_SM, _MAX_SMALL_PAIRS_PER_SM, _MAX_GLUON_PAIRS_PER_SM = 1.0, 0.6, 0.4, 0.25
_MIN_LARGE_DOCUMENT_BYTES = 2**20
_MIN_SPLIT_TOKENS = 128
# If splits would be longer, there are more splits than run at a time.
_MAX_SPLIT_TOKENS = 2048
# Per document, because one program merges all splits of a document.
_MAX_DOCUMENT_SPLITS = 256
_MAX_CTAS_PER_SM = 3
# Partial results of the splits. With one flag for each split the workspace stays below 32 MiB.
_MAX_SPLIT_WORKSPACE_BYTES = 28 * 2**20
# Terms of queries, and again terms of documents. With the scales the workspace stays below 32 MiB.
_MAX_FP32_SPLIT_BYTES = 15 * 2**20


class GenericChoice(NamedTuple):
    """The generic kernel `maxsim_forward`, which serves every call."""

    launch: LaunchConfig
    arch: Architecture
    uses_descriptor: bool  # TMA reads documents that start at a multiple of 16 bytes
    has_fp32_split: bool = False  # a separate launch splits fp32 tokens into a workspace

    @property
    def kernel(self) -> str:
        """Return the name of the kernel."""
        return "maxsim_forward"

    def tile(self) -> str:
        """Describe the tile of a program as text."""
        return self.launch.tile() + (", tokens split first" if self.has_fp32_split else "")


class SplitChoice(NamedTuple):
    """`maxsim_forward_ragged` on splits of documents, followed by `maxsim_row_sums` on the partial results."""

    launch: LaunchConfig
    arch: Architecture
    uses_descriptor: bool  # see `GenericChoice`
    levels: int  # levels of the sum trees
    most: int  # maximum number of splits
    each: int | None  # tokens of a split if all documents have the same known length
    programs: int
    sums: tuple[int, int, int, int]  # rows per query, queries and documents of a program, tree levels

    @property
    def kernel(self) -> str:
        """Return the name of the kernel."""
        return "maxsim_forward_ragged"

    def tile(self) -> str:
        """Describe the tile of a program as text."""
        return f"{self.launch.tile()}, documents in up to {self.most} splits"

    @property
    def make_sum_options(self) -> dict[str, Any]:
        """Return the launch options of `maxsim_row_sums`."""
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
    """Choose the kernel for a call of dense tensors that have all their axes.

    Args:
        Q: query tokens `[Nq, Lq, d]`.
        D: document tokens `[Nd, Ld, d]` or `[Nq, K, Ld, d]`.
        d_mask: document mask, or None.
        normalize: whether tokens are normalized.
        argmax_dtype: dtype of the argmax, or None without an argmax.
        arch: architecture to choose for, or None for the architecture of the device of Q.
    """
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
    """Return whether a Gluon kernel has so few programs that splitting documents is faster.

    Splitting uses the generic kernel, which is slower for long queries. Long queries need documents twice as long.

    Args:
        choice: the choice of the Gluon kernel.
        Lq: mean number of query tokens.
        Ld: mean number of document tokens.
        arch: architecture that runs the kernel.
    """
    least = _MIN_LONG_DOCUMENT_TOKENS if Lq <= sm90_configs.MAX_WHOLE_QUERY_TOKENS else 2 * _MIN_LONG_DOCUMENT_TOKENS
    return Ld >= least and choice.programs < arch.processors * _MAX_GLUON_PAIRS_PER_SM


def _has_int32_features(Q: Tensor, D: Tensor) -> bool:
    """Return whether 32-bit offsets reach all features of a token, as the Gluon kernels require."""
    return choose_row_offset_width(get_feature_reach(Q, D)) < 2


def choose_generic(Q: Tensor, D: Tensor, normalize: bool, argmax: bool, arch: Architecture) -> GenericChoice:
    """Choose the launch of the generic kernel for a call."""
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
    """Choose an sm_90 kernel for documents without a mask, or return None if another kernel has to serve."""
    call = arch, Q.dtype, *make_size_args(Q, D), Q.shape[-1]
    if Q.dtype == torch.float32:
        splits = not argmax and choose_generic(Q, D, normalize, argmax, arch).launch.config.SPLIT_FP32
        found = sm90_configs.configure_small_m_split(arch, *call[2:]) if splits else None
    else:
        found = sm90_configs.configure_sm90(*call, normalize=normalize, argmax=argmax)
    if found is None or not supports_descriptor(D) or load_kernels() is None:
        return None
    if normalize and (Q.stride(-1) != 1 or any(n % 16 for n in Q.stride()[:-1])):
        return None  # `maxsim_forward` loads such rows feature by feature and adds the squares in another order
    return found if not found.has_large_d or supports_query_descriptor(Q) else None


def choose_int8(Q: Tensor, data: Tensor, scale: Tensor, terms: int, arch: Architecture) -> Sm90Choice | None:
    """Choose an sm_90 kernel for dense int8 documents, or return None if `maxsim_forward_ragged` has to serve.

    The documents have no mask. The call neither normalizes nor returns an argmax. TMA reads scales of single tokens, so
    they have to exist for all tokens.

    Args:
        Q: query tokens `[Nq, Lq, d]`.
        data: int8 documents `[Nd, Ld, d]`.
        scale: scales `[Nd, Ld]`, with sizes of 1 for a scale that tokens share.
        terms: number of int8 terms of a query row.
        arch: architecture that runs the kernel.
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
    """Return whether the kernels for dense documents can read these 8-bit documents."""
    dense = Q.dim() == 3 and data.dim() == 3 and Q.numel() and data.numel()
    return bool(dense) and supports_descriptor(data) and _has_int32_features(Q, data)


def choose_fp8(Q: Tensor, data: Tensor, kept: str, arch: Architecture) -> Sm90Choice | None:
    """Choose an sm_90 kernel for dense FP8 documents, or return None if `maxsim_forward_ragged` has to serve.

    Scales may have any strides.

    Args:
        Q: query tokens `[Nq, Lq, d]`.
        data: FP8 documents `[Nd, Ld, d]`, as bytes.
        kept: the encoding, "e4m3" or "e5m2".
        arch: architecture that runs the kernel.
    """
    if not _supports_encoded_descriptor(Q, data):
        return None
    found = sm90_configs.configure_fp8(arch, Q.dtype, *make_size_args(Q, data), Q.shape[-1], kept=kept)
    return None if found is None or load_kernels() is None else found


def choose_row_maxima(
    D: Tensor, rows: int, K: int, Lq: int, argmax: bool, dense: bool, arch: Architecture
) -> RowMaximaChoice | None:
    """Choose the row maxima kernel for contiguous document tokens, or return None if another kernel has to serve.

    Documents may have masks or any length.

    Args:
        D: document tokens.
        rows: number of query tokens of all queries.
        K: number of documents.
        Lq: mean number of tokens of a query.
        argmax: whether the call returns an argmax.
        dense: whether each query has exactly `Lq` tokens.
        arch: architecture that runs the kernel.
    """
    d = D.shape[-1]
    if d * D.element_size() % 16 or not 0 < D.numel() // d < 2**31:
        return None
    found = sm90_configs.configure_row_maxima(arch, D.dtype, rows, K, Lq, d, argmax=argmax, dense=dense)
    return None if found is None or load_kernels() is None else found


def make_cut(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> PackedArgs:
    """Return dense, evenly spaced tokens as packed arguments."""
    Nq, K, Lq, Ld = make_size_args(Q, D)
    return PackedArgs(Q, D, *(None,) * 5, q_mask, d_mask, None, Nq, K, False, Nq * Lq, K * Ld, Lq)


def has_long_documents(c: PackedArgs) -> bool:
    """Return whether the mean document is long enough for `choose_document_splits`."""
    return c.Td >= _MIN_LONG_DOCUMENT_TOKENS * c.columns


def choose_document_splits(c: PackedArgs, normalize: bool, argmax: bool, arch: Architecture) -> SplitChoice | None:
    """Choose splits for a few long documents, or return None for other documents.

    All kernels give the same bits, so the choice may depend on the number of documents and on their mean length.
    """
    if not has_long_documents(c) or c.candidates or c.pairs is not None or 0 in (c.queries, c.columns, c.Tq):
        return None
    Lq, d = max(forward_configs.MIN_ROWS_PER_QUERY, architectures.cdiv(c.Tq, c.queries)), c.Q.shape[-1]
    span, row = get_feature_reach(c.Q, c.D), abs(c.D.stride(-2))
    wide = 2 if choose_row_offset_width(span) == 2 else int((c.Td + 64) * row + span >= 2**31)
    launch, levels = choose_packed(c, Lq, wide, True, normalize, argmax, arch)
    config = launch.config
    row_tiles, K = architectures.cdiv(c.queries, config.BM // config.ROWS_PER_QUERY), c.columns
    # A memory-bound program that is alone on an SM reads 60 GB/s, so 80 programs saturate the memory.
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
    """Return the number of splits: as many as run at a time, or a multiple if the splits would be too long.

    The number is limited so that splits do not become too short.
    """
    C = launch.config
    shared = (launch.num_stages * C.BN + C.BM) * C.BD * c.Q.element_size()
    resident = max(min(_MAX_CTAS_PER_SM, arch.shared_memory_bytes // shared), 1) * arch.processors // row_tiles
    waves = min(architectures.cdiv(architectures.cdiv(c.Td, resident), _MAX_SPLIT_TOKENS), c.columns)
    return min(waves * resident, c.columns + min(c.Td // _MIN_SPLIT_TOKENS, _MAX_DOCUMENT_SPLITS * c.columns))


def get_split_workspace_rows(config: KernelConfig) -> int:
    """Return the maximum number of rows whose fp16 terms fit the fp32-split workspace."""
    return _MAX_FP32_SPLIT_BYTES // (4 * config.BD) // 16 * 16


def choose_fp32_split(Q: Tensor, D: Tensor, arch: Architecture) -> GenericChoice | None:
    """Choose a separate launch that splits fp32 tokens first, or return None.

    If few queries are scored against the documents, reading the documents dominates the time.
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
    """Return whether TMA can read packed documents that start at a multiple of 16 bytes."""
    d = c.D.shape[-1]
    return arch.has_descriptors and d * c.D.element_size() % 16 == 0 and c.D.stride()[-2:] == (d, 1)


def choose_packed_row_maxima(c: PackedArgs, argmax: bool, arch: Architecture) -> RowMaximaChoice | None:
    """Choose the row maxima kernel for a cross product of packed tokens, or return None.

    The call has no `normalize`, no document mask, and no query lengths, and `supports_packed_descriptor` holds. If D
    has 1 to 2^31 - 1 rows, the choice depends only on the numbers of queries, documents, and query tokens.
    """
    if 0 in (c.queries, c.columns, c.Tq):
        return None
    mean = architectures.cdiv(c.Tq, c.queries)
    return choose_row_maxima(c.D, c.Tq, c.columns, mean, argmax, c.cu_seqlens_q is None, arch)


def choose_packed(
    c: PackedArgs, Lq: int, wide: int, few: bool, normalize: bool, argmax: bool, arch: Architecture, stored: Any = ""
) -> tuple[LaunchConfig, int]:
    """Return the launch of `maxsim_forward_ragged` for a mean query length, and the tree levels of its sums.

    Longer queries use several steps, so the host need not know the longest query. The only size read from `c` is the
    number of queries. `PackedPlan` caches the result by this number, `Lq`, `wide`, and `few`.

    Args:
        c: the packed call.
        Lq: mean number of tokens of a query.
        wide: `KernelConfig.WIDE_OFFSETS`.
        few: whether at most `MAX_RESIDENT_DOCUMENTS` documents are scored.
        normalize: whether tokens are normalized.
        argmax: whether the call returns an argmax.
        arch: architecture that runs the kernel.
        stored: `KernelConfig.ENCODING`.
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
