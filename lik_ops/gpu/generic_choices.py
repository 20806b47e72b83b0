"""Choice of the generic kernels: `maxsim_forward`, `maxsim_forward_packed`, and their variants that split.

`lik_ops.gpu.choose` has the rules that call these functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.segments import PackedArgs
from ..csrc_triton.forward.generic.splits import MIN_SPLIT_TILES
from ..formats.table import INT8_QUERIES
from .runtime.arguments import (
    choose_offset_width,
    drop_single_query,
    is_tf32_allowed,
    make_size_args,
    supports_descriptor,
)
from .tuning import architectures, forward_configs, sm90_configs
from .tuning.architectures import Architecture, KernelKey, LaunchConfig
from .tuning.sm90_configs import RowMaximaChoice, Sm90Choice
from .tuning.tables import UNLIMITED

# Minimum mean length of documents that are split if there are few of them, of documents whose features take several
# steps, in half precision, in fp32 and encoded, of normalized documents with at least `_MIN_WIDE_FEATURES`, and of
# encoded documents, whose conversion takes longer than reading them: `benchmarks/results/sweep_encoded_splits.json`.
_MIN_LONG_DOCUMENT_TOKENS, _MIN_WIDE_DOCUMENT_TOKENS, _MIN_ENCODED_DOCUMENT_TOKENS = 2048, 1024, 512
_MIN_STEPPED_HALF_TOKENS, _MIN_STEPPED_FP32_TOKENS, _MIN_STEPPED_ENCODED_TOKENS = 512, 256, 256
_MAX_SINGLE_STEP_FEATURES, _MIN_WIDE_FEATURES = 128, 1024
# Number of (row tile, document) pairs per SM up to which splitting documents is faster. WIDE is for programs that
# normalize many features or multiply fp32 features in several steps, and BUSY for others with much arithmetic. LARGE
# and SMALL are for memory-bound programs, whose mean document has at least or less than `_MIN_LARGE_DOCUMENT_BYTES`.
# GLUON is for calls that a Gluon kernel could serve. Measured on H100 and H200: `benchmarks/results/sweep_pairs.json`
# and `sweep_wide_splits.json`, and norms: docs/lab-book.md, "masks with many features".
_MAX_WIDE_PAIRS_PER_SM, _MAX_BUSY_PAIRS_PER_SM, _MAX_LARGE_PAIRS_PER_SM, _MAX_SMALL_PAIRS_PER_SM = 2.5, 1.0, 0.6, 0.4
_MAX_GLUON_PAIRS_PER_SM = 0.25
_MIN_LARGE_DOCUMENT_BYTES = 2**20
_MIN_SPLIT_TOKENS = 128
# If splits would be longer, there are more splits than run at a time.
_MAX_SPLIT_TOKENS = 2048
# Per document, because one program merges all splits of a document.
_MAX_DOCUMENT_SPLITS = 256
_MAX_CTAS_PER_SM = 3
# Partial results of the splits. With one flag for each split the workspace stays below 32 MiB.
_MAX_SPLIT_WORKSPACE_BYTES = 28 * 2**20
# Values of `KernelConfig.ENCODING` whose documents descriptors can read.
_DESCRIPTOR_ENCODINGS = ("", "int8", INT8_QUERIES, "number", "fp8", "e4m3", "e5m2", "fp8_fp8", "e4m3_fp8")
SHORT_DOCUMENTS_REASON = "documents have too few tokens on average"


class GenericChoice(NamedTuple):
    """The generic kernel `maxsim_forward`, which serves every call."""

    launch: LaunchConfig
    arch: Architecture
    uses_descriptor: bool  # TMA reads documents that start at a multiple of 16 bytes

    @property
    def kernel(self) -> str:
        """Return the name of the kernel."""
        return "maxsim_forward"

    def tile(self) -> str:
        """Describe the tile of a program as text."""
        return self.launch.tile()


class SplitChoice(NamedTuple):
    """`maxsim_forward_packed` on splits of documents, followed by `maxsim_row_sums` on the partial results."""

    launch: LaunchConfig
    arch: Architecture
    uses_descriptor: bool  # see `GenericChoice`
    levels: int  # levels of the sum trees
    max_splits: int  # maximum number of splits
    split_tokens: int | None  # tokens of a split if all documents have the same known length
    programs: int
    sums: tuple[int, int, int, int]  # rows per query, queries and documents of a program, tree levels

    @property
    def kernel(self) -> str:
        """Return the name of the kernel."""
        return "maxsim_forward_packed"

    def tile(self) -> str:
        """Describe the tile of a program as text."""
        return f"{self.launch.tile()}, documents in up to {self.max_splits} splits"

    @property
    def make_sum_options(self) -> dict[str, Any]:
        """Return the launch options of `maxsim_row_sums`."""
        options: dict[str, Any] = LaunchConfig(self.launch.config, 4, 3, 255).options(self.arch)
        return {**options, "launch_pdl": True} if self.launch.config.PDL else options


def choose_generic(Q: Tensor, D: Tensor, normalize: bool, argmax: bool, arch: Architecture) -> GenericChoice:
    """Choose the launch of the generic kernel for a call."""
    D, _ = drop_single_query(D, None)
    candidates = D.dim() == 4
    Nq, K, Lq, Ld = make_size_args(Q, D)
    documents = K * (Nq if candidates else 1)
    kind = KernelKey(arch, Q.dtype, Q.shape[-1], candidates, normalize, choose_offset_width(Q, D))
    tf32 = is_tf32_allowed(Q.dtype)
    launch = forward_configs.configure_forward(kind, Nq, Lq, tf32=tf32, documents=documents, argmax=argmax)
    reads_tiles = arch.has_descriptors and supports_descriptor(D)
    if tf32 and not argmax:
        launch = forward_configs.adjust_for_tf32(launch, kind, Nq, Ld, documents)
    if argmax:
        launch = forward_configs.adjust_for_argmax(launch, reads_tiles)
    elif not reads_tiles:
        launch = launch.make_non_persistent()
    else:
        launch = forward_configs.adjust_stages(launch, arch, documents)
    if Ld < launch.config.BN:
        launch = launch.change(SHORT_DOCUMENTS=True)
    return GenericChoice(launch, arch, reads_tiles)


def make_cut(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> PackedArgs:
    """Return dense, evenly spaced tokens as packed arguments."""
    Nq, K, Lq, Ld = make_size_args(Q, D)
    return PackedArgs(Q, D, *(None,) * 5, q_mask, d_mask, None, Nq, K, False, Nq * Lq, K * Ld, Lq)


def _normalizes_many_features(c: PackedArgs, normalize: bool) -> bool:
    """Return whether a call normalizes at least `_MIN_WIDE_FEATURES` features."""
    return normalize and c.Q.shape[-1] >= _MIN_WIDE_FEATURES


def _takes_steps(c: PackedArgs, normalize: bool) -> bool:
    """Return whether a call without `normalize` multiplies the features of a tile in several steps."""
    return not normalize and c.Q.shape[-1] > _MAX_SINGLE_STEP_FEATURES


def has_long_documents(c: PackedArgs, normalize: bool, stored: Any = "") -> bool:
    """Return whether the mean document is long enough for `choose_document_splits`."""
    if _normalizes_many_features(c, normalize):
        tokens = _MIN_WIDE_DOCUMENT_TOKENS
    elif stored:
        tokens = _MIN_STEPPED_ENCODED_TOKENS if _takes_steps(c, normalize) else _MIN_ENCODED_DOCUMENT_TOKENS
    elif _takes_steps(c, normalize):
        tokens = _MIN_STEPPED_FP32_TOKENS if c.Q.dtype == torch.float32 else _MIN_STEPPED_HALF_TOKENS
    else:
        tokens = _MIN_LONG_DOCUMENT_TOKENS
    return c.Td >= tokens * c.columns


def choose_document_splits(
    c: PackedArgs, normalize: bool, argmax: bool, arch: Architecture, stored: Any = ""
) -> SplitChoice | str:
    """Choose splits for a few documents that `has_long_documents` finds long, or return the reason why not.

    All kernels give the same bits, so the choice may depend on the number of documents and on their mean length.
    """
    if 0 in (c.queries, c.columns, c.Tq):
        return "there are no queries or no documents"
    is_dense = c.cu_seqlens_q is None
    min_rows = forward_configs.get_min_rows_per_query(arch, c.Q.dtype, is_dense=is_dense, argmax=argmax)
    Lq, d = max(min_rows, architectures.cdiv(c.Tq, c.queries)), c.Q.shape[-1]
    wide = choose_offset_width(c.Q, c.D, c.Td)
    launch, levels = choose_packed(c, PackedTileKey(c.queries, Lq, wide, True), normalize, argmax, arch, stored)
    kind = KernelKey(arch, c.Q.dtype, d, False, normalize, wide)
    if is_tf32_allowed(c.Q.dtype) and not (argmax or stored):
        launch = forward_configs.adjust_split_for_tf32(launch, kind, c.queries, c.Td, MIN_SPLIT_TILES)
    config = launch.config
    row_tiles, K = architectures.cdiv(c.queries, config.BM // config.ROWS_PER_QUERY), c.columns
    # A memory-bound program that is alone on an SM reads 60 GB/s, so 80 programs saturate the memory.
    is_busy = bool(normalize or c.d_mask is not None or config.BM > 64 or stored)
    share = _choose_max_pairs_per_sm(c, normalize, is_busy)
    if row_tiles * K > arch.processors * share:
        return f"more than {share} (row tile, document) pairs per SM"
    max_splits = min(
        _choose_split_count(launch, c, row_tiles, arch), _MAX_SPLIT_WORKSPACE_BYTES // ((8 if argmax else 4) * c.Tq)
    )
    if max_splits < 2 * K:
        return "the workspace has no room for two splits of each document"
    split_tokens, is_even = None, c.offsets is None and c.lengths is None
    if is_even:
        tiles = architectures.cdiv(architectures.cdiv(c.Td, max_splits - K), config.BN)
        split_tokens = max(tiles, MIN_SPLIT_TILES) * config.BN
        max_splits = K * architectures.cdiv(c.D.shape[-2], split_tokens)
    is_short = not (is_even and c.D.shape[-2] >= config.BN)
    launch = launch.change(SPLIT_DOCUMENTS=True, SHORT_DOCUMENTS=is_short, PDL=arch.name == "sm_90")
    slot, slot_levels = forward_configs.configure_row_sums(kind, Lq, stored)
    sums = slot, 1 if c.queries == 1 else max(128 // slot, 1), 1, slot_levels
    reads_tiles = supports_packed_descriptor(c, arch, stored) and c.Td < 2**31
    return SplitChoice(launch, arch, reads_tiles, levels, max_splits, split_tokens, max_splits * row_tiles, sums)


def _choose_max_pairs_per_sm(c: PackedArgs, normalize: bool, is_busy: bool) -> float:
    """Return the number of (row tile, document) pairs per SM up to which splitting documents is faster."""
    if _normalizes_many_features(c, normalize) or (_takes_steps(c, normalize) and c.Q.dtype == torch.float32):
        return _MAX_WIDE_PAIRS_PER_SM
    if is_busy:
        return _MAX_BUSY_PAIRS_PER_SM
    is_large = c.Td * c.D.shape[-1] * c.D.element_size() >= c.columns * _MIN_LARGE_DOCUMENT_BYTES
    return _MAX_LARGE_PAIRS_PER_SM if is_large else _MAX_SMALL_PAIRS_PER_SM


def _choose_split_count(launch: LaunchConfig, c: PackedArgs, row_tiles: int, arch: Architecture) -> int:
    """Return the number of splits: as many as run at a time, or a multiple if the splits would be too long.

    The number is limited so that splits do not become too short.
    """
    C = launch.config
    shared_bytes = (launch.num_stages * C.BN + C.BM) * C.BD * c.Q.element_size()
    resident_splits = (
        max(min(_MAX_CTAS_PER_SM, arch.shared_memory_bytes // shared_bytes), 1) * arch.processors // row_tiles
    )
    # More documents than SMs are split for balance, which needs many splits.
    max_tokens = _MIN_SPLIT_TOKENS if c.columns > arch.processors else _MAX_SPLIT_TOKENS
    waves = min(architectures.cdiv(architectures.cdiv(c.Td, resident_splits), max_tokens), c.columns)
    return min(waves * resident_splits, c.columns + min(c.Td // _MIN_SPLIT_TOKENS, _MAX_DOCUMENT_SPLITS * c.columns))


def supports_packed_descriptor(c: PackedArgs, arch: Architecture, stored: Any = "") -> bool:
    """Return whether TMA can read packed documents that start at a multiple of 16 bytes."""
    d = c.D.shape[-1]
    if stored not in _DESCRIPTOR_ENCODINGS:
        return False
    return arch.has_descriptors and d * c.D.element_size() % 16 == 0 and c.D.stride()[-2:] == (d, 1)


class PackedTileKey(NamedTuple):
    """The sizes that the tile of `maxsim_forward_packed` depends on.

    Longer queries use several steps, and longer documents several tiles, so the host need not know the longest.
    """

    queries: int
    Lq: int  # mean number of tokens of a query
    wide: int  # `KernelConfig.WIDE_OFFSETS`
    has_few_documents: bool  # at most `MAX_RESIDENT_DOCUMENTS`
    may_be_empty: bool = False  # most of many documents
    tile_tokens: int = UNLIMITED  # see `choose_tile_tokens`


def choose_tile_tokens(Td: int, documents: int) -> int:
    """Return the number of tokens of the smallest tile that holds the mean of `documents` with Td tokens.

    Return `UNLIMITED` if no tile for short documents holds it.
    """
    return next((n for n in forward_configs.SHORT_DOCUMENT_TILES if Td <= n * documents), UNLIMITED)


def choose_packed(
    c: PackedArgs, key: PackedTileKey, normalize: bool, argmax: bool, arch: Architecture, stored: Any = ""
) -> tuple[LaunchConfig, int]:
    """Return the launch of `maxsim_forward_packed`, and the tree levels of its sums.

    Args:
        c: the packed call, of which no sizes are read.
        key: the sizes, by which `PackedPlan` caches the result.
        normalize: whether tokens are normalized.
        argmax: whether the call returns an argmax.
        arch: architecture that runs the kernel.
        stored: `KernelConfig.ENCODING`.
    """
    return forward_configs.configure_packed_forward(
        KernelKey(arch, c.Q.dtype, c.Q.shape[-1], c.candidates or c.pairs is not None, normalize, key.wide),
        max(key.queries, 1),
        key.Lq,
        tf32=is_tf32_allowed(c.Q.dtype),
        argmax=argmax,
        longest=key.Lq if c.cu_seqlens_q is None or key.queries == 1 else None,
        has_few_documents=key.has_few_documents,
        has_no_options=all(x is None for x in (c.q_mask, c.d_mask, c.q_weight, c.q_lengths)),
        stored=stored,
        may_be_empty=key.may_be_empty,
        tile_tokens=key.tile_tokens,
    )


def has_idle_sms(choice: Sm90Choice | RowMaximaChoice, Lq: int, Ld: int, arch: Architecture) -> bool:
    """Return whether a Gluon kernel has so few programs that splitting documents is faster.

    Splitting uses the generic kernel, which is slower for long queries. Long queries need documents twice as long. One
    row tile of the large-d kernel is slow, and documents may be half as long.

    Args:
        choice: the choice of the Gluon kernel.
        Lq: mean number of query tokens.
        Ld: mean number of document tokens.
        arch: architecture that runs the kernel.
    """
    min_tokens = (
        _MIN_LONG_DOCUMENT_TOKENS if Lq <= sm90_configs.MAX_WHOLE_QUERY_TOKENS else 2 * _MIN_LONG_DOCUMENT_TOKENS
    )
    if isinstance(choice, Sm90Choice) and choice.has_large_d and choice.row_tiles == 1:
        min_tokens = _MIN_WIDE_DOCUMENT_TOKENS
    return Ld >= min_tokens and choice.programs < arch.processors * _MAX_GLUON_PAIRS_PER_SM
