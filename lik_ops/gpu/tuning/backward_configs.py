"""Tile configurations of the backward kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ...csrc_triton.backward.documents.packed import MAX_BLOCK_ROWS
from ...csrc_triton.common.arguments import KernelConfig
from .architectures import INTERPRETER, SM90_UNITS, Architecture, KernelKey, LaunchConfig, cdiv, next_power_of_2
from .tables import HALF_DTYPES, Override, StepConfig, TableRow, apply_overrides, at_most, select_for

# A training step asks for the same few configurations each time, and each costs microseconds.
_cached = functools.lru_cache(maxsize=1024)

# Registers of a thread with which three CTAs of four warps share an SM.
THREE_CTA_REGISTERS = 168


# Rows of a step, if a row has at most 128 features. Filling the registers with rows keeps many loads in flight.
_GATHER_TABLE = (
    TableRow(dtypes=HALF_DTYPES, wide=1, value=128),
    TableRow(normalize=False, wide=1, value=64),
    TableRow(wide=1, value=32),
    TableRow(normalize=False, value=32),
    TableRow(value=8),
)


@_cached
def configure_gather(kind: KernelKey, *, ragged: bool = False, encoding: Any = "") -> LaunchConfig:
    """Return the launch of kernels that read whole rows.

    A step has BM tokens of a query and the argmax tokens of BN documents.

    Args:
        kind: properties of the call.
        ragged: whether tokens are packed.
        encoding: `KernelConfig.ENCODING` of documents that are dequantized, which costs registers.
    """
    # With 128 features, decoded codes spill on sm_80 (Triton 3.6).
    step_features = 128 if encoding == "" else 64
    BD = max(next_power_of_2(kind.d), 16) if kind.d <= 256 else step_features
    rows = select_for(_GATHER_TABLE, kind)
    is_short = kind.has_vector_loads and kind.d <= 128
    if ragged and (encoding != "" or not (is_short and kind.half and not kind.normalize)):
        rows //= 2  # the addresses of the argmax tokens cost registers too
    config = kind.config(8, max(rows * min(128, BD) // BD // 8, 1), BD, PRECISION="ieee", ENCODING=encoding)
    is_blackwell = kind.arch.name in ("sm_100", "sm_120")
    spills = (
        encoding != ""
        or not is_short
        or (ragged and kind.candidates and (not kind.half or (kind.normalize and is_blackwell)))
    )
    return LaunchConfig(config, num_warps=4, num_stages=2, max_registers=255 if spills else 128)


class _QueriesCall(NamedTuple):
    """The properties of a query gradient that its overrides read, see `configure_query_gradients`."""

    kind: KernelKey
    ragged: bool
    scaled: bool
    rounded: bool

    @property
    def has_exact_rows(self) -> bool:
        """Return whether rows are fp32, dense and not normalized."""
        return not (self.kind.half or self.kind.normalize or self.ragged)

    @property
    def has_half_norms(self) -> bool:
        """Return whether rows are dense, in half precision, and normalized, and the GPU is NVIDIA's and not sm_90."""
        kind = self.kind
        return kind.half and kind.normalize and not self.ragged and kind.arch.unit == "mma"


_QUERIES_OVERRIDES = (
    Override(
        when=lambda call, x: (
            call.kind.half
            and not (call.kind.normalize or call.ragged or call.scaled)
            and call.kind.arch.unit == "wgmma"
            and call.kind.has_vector_loads
            and x.config.ENCODING == ""
            and call.kind.d > 128
        ),
        change={"max_registers": 128},
        reason="four CTAs share an SM: .190 ms in place of .306 (256 x 256, d 320), although up to 256 features spill",
        measured_on="H200: sweep_backward_wide.json",
    ),
    Override(
        when=lambda call, x: (
            call.has_exact_rows
            and call.kind.arch.unit == "wgmma"
            and call.kind.has_vector_loads
            and x.config.SINGLE_STEP
            and x.config.BD == 128
        ),
        change={"BN": lambda call, x: 2 * x.config.BN, "max_registers": THREE_CTA_REGISTERS},
        reason="half the steps with more rows in flight on an SM: .123 ms in place of .277 (256 x 256, H200)",
    ),
    Override(
        when=lambda call, x: (call.rounded and call.kind.normalize) or call.has_half_norms,
        change={"BN": lambda call, x: max(x.config.BN // 2, 1)},
        reason="norms need registers. On sm_90, few spills of half-precision rows cost less than half the rows",
    ),
    Override(
        when=lambda call, x: (
            ((call.scaled or call.rounded) and (call.kind.normalize or call.kind.arch.name == "sm_120"))
            or call.has_half_norms
            or (call.has_exact_rows and call.kind.arch.unit == "mma")
        ),
        change={"max_registers": 255},
        reason="scales, norms, and fp32 rows need registers",
    ),
    Override(
        when=lambda call, x: (
            (call.scaled or call.rounded)
            and x.max_registers == 128
            and call.kind.arch.name.startswith(("sm_8", "sm_100"))
        ),
        change={"max_registers": THREE_CTA_REGISTERS},
        reason="with 128 registers, ptxas spills up to 8 values",
    ),
)


@_cached
def configure_query_gradients(
    kind: KernelKey, *, ragged: bool = False, scaled: bool = False, rounded: bool = False, encoding: Any = ""
) -> LaunchConfig:
    """Return the launch of `maxsim_grad_queries`.

    Args:
        kind: properties of the call.
        ragged: see `configure_gather`.
        scaled: whether rows are int8 with a scale.
        rounded: whether rows are fp16 with a scale and their gradient is fp32.
        encoding: see `configure_gather`.
    """
    launch = configure_gather(kind, ragged=ragged, encoding=encoding)
    return apply_overrides(_QUERIES_OVERRIDES, _QueriesCall(kind, ragged, scaled, rounded), launch)


@_cached
def configure_rounding(kind: KernelKey, terms: int) -> LaunchConfig:
    """Return the launch of `maxsim_round_rows` for rows of one or two fp16 terms."""
    BD = min(max(next_power_of_2(kind.d), 16), 256)
    return LaunchConfig(kind.config(max(4096 // BD, 16), 1, BD, FP32_TERMS=terms), num_warps=4, num_stages=1)


@_cached
def configure_scatter(kind: KernelKey, *, ragged: bool = False) -> LaunchConfig:
    """Return the launch of `maxsim_scatter`.

    Its products are as large as the rows of a step, so a step has fewer documents.
    """
    launch = configure_gather(kind, ragged=ragged)
    spills = ragged or kind.arch.name.startswith(("sm_8", "sm_12"))
    fraction = 8 if kind.arch.name == "sm_80" and kind.normalize else 4  # ptxas of Triton 3.9 spills for int8 documents
    documents = max(launch.config.BN // fraction, 1)
    return launch.change(BN=documents, max_registers=255 if spills else launch.max_registers)


# Query rows of a document whose argmax values are listed. More need too much memory. Fewer are listed if they have many
# bytes in the products of all tiles, which contain all rows without lists. The number of documents does not matter, so
# that a gradient has the same bits in a call for some of them. Measured on an H200: `sweep_backward_wide.json`.
MIN_BUCKETED_ROWS, MAX_BUCKETED_ROWS = 1024, 2**20
MIN_LISTED_BYTES = 2**20
# For longer documents, lists of many small tiles are slower than the sums.
MIN_LONG_DOCUMENT_TOKENS = 4096

# WGMMA multiplies at least 64 features of half-precision dtypes, also on sm_100. Rows of wide = 2 are loaded feature by
# feature. Their steps have fewer features, because each feature needs an address in registers.
# fmt: off
_DOCUMENTS_TABLE = (
    TableRow(units=SM90_UNITS, dtypes=HALF_DTYPES, wide=1, value=StepConfig(BM=64, BN=16, BD=128, warps=4, stages=3)),
    TableRow(units=SM90_UNITS, dtypes=HALF_DTYPES, value=StepConfig(BM=64, BN=16, BD=64, warps=8, stages=1)),
    TableRow(units=SM90_UNITS, wide=1, value=StepConfig(BM=32, BN=16, BD=128, warps=4, stages=2)),
    TableRow(units=SM90_UNITS, value=StepConfig(BM=32, BN=16, BD=32, warps=4, stages=1)),
    TableRow(units=("sm_100",), dtypes=HALF_DTYPES, wide=1, value=StepConfig(BM=32, BN=16, BD=128, warps=4, stages=3)),
    TableRow(units=("sm_100",), dtypes=HALF_DTYPES, value=StepConfig(BM=32, BN=16, BD=64, warps=8, stages=1)),
    TableRow(units=("mma",), dtypes=HALF_DTYPES, wide=1, value=StepConfig(BM=32, BN=16, BD=128, warps=4, stages=3)),
    TableRow(units=("mfma",), dtypes=HALF_DTYPES, wide=1, value=StepConfig(BM=32, BN=16, BD=128, warps=4, stages=1)),
    TableRow(units=("mma", "mfma"), dtypes=HALF_DTYPES, value=StepConfig(BM=32, BN=16, BD=32, warps=4, stages=1)),
    TableRow(units=("mma", "mfma"), wide=1, value=StepConfig(BM=16, BN=64, BD=128, warps=8, stages=1)),
    TableRow(units=("mma", "mfma"), value=StepConfig(BM=16, BN=64, BD=32, warps=8, stages=1)),
)
# fmt: on


class _DocumentsCall(NamedTuple):
    """The properties of a document gradient that its overrides read, see `configure_packed_documents`."""

    kind: KernelKey
    flat: bool
    pieces: bool
    long: bool = False
    shared: bool = False
    listed: bool = False
    single: bool = False  # a pair has one query
    split: bool = False  # fp32 rows are read as fp16 terms

    @property
    def has_large_tiles(self) -> bool:
        """Return whether documents are long and registers hold the largest tiles."""
        kind = self.kind
        is_usual = not (kind.half or kind.candidates or kind.normalize)
        return self.long and is_usual and kind.arch.has_sm90_path

    @property
    def has_vector_rows(self) -> bool:
        """Return whether a packed kernel without lists loads half-precision rows by vectors."""
        return self.kind.half and self.kind.has_vector_loads and not self.listed and self.kind.arch != INTERPRETER

    @property
    def is_plain(self) -> bool:
        """Return whether rows are bf16 and not normalized, which needs the fewest registers."""
        return self.kind.dtype == torch.bfloat16 and not self.kind.normalize

    @property
    def fits_three_ctas(self) -> bool:
        """Return whether rows that take one feature step need few enough registers for three CTAs on an SM."""
        is_few = not (self.kind.normalize or self.has_large_tiles) and self.kind.arch.unit == "wgmma"
        return is_few and self.flat and not self.pieces


_DOCUMENTS_OVERRIDES = (
    Override(
        when=lambda call, x: call.kind.arch == INTERPRETER,
        change={"BM": 16, "BN": 16},
        reason="the interpreter is fastest with small tiles",
    ),
    Override(
        when=lambda call, x: call.has_large_tiles,
        change={"BM": 16, "BN": lambda call, x: 32 if call.kind.arch == INTERPRETER else 64, "num_warps": 8},
        reason="lists of many small tiles of a long document are slower than the sums",
    ),
    Override(
        when=lambda call, x: call.has_large_tiles and x.config.BD == 16 and call.kind.arch != INTERPRETER,
        change={"BM": 32, "BN": 128},
        reason="registers hold larger tiles of few features",
    ),
    Override(
        when=lambda call, x: call.fits_three_ctas and x.config.SINGLE_STEP and x.num_warps == 4,
        change={"max_registers": THREE_CTA_REGISTERS},
        reason="three CTAs of four warps share an SM",
    ),
    Override(
        when=lambda call, x: x.max_registers == THREE_CTA_REGISTERS and call.kind.half,
        change={"BM": 128, "num_stages": 2},
        reason="three CTAs per SM hide latency, so long steps with fewer barriers for each row beat stages",
    ),
    Override(
        when=lambda call, x: (
            call.is_plain and call.fits_three_ctas and call.kind.has_vector_loads and not x.config.SINGLE_STEP
        ),
        change={"max_registers": THREE_CTA_REGISTERS},
        reason="the same with several steps of features, which spill in fp16: .399 ms in place of .433 (d 320)",
        measured_on="H200: sweep_backward_wide.json",
    ),
    Override(
        when=lambda call, x: call.split and call.kind.arch != INTERPRETER,
        change={"BM": 64, "num_stages": 2},
        reason="the terms of 64 rows and their products leave room for three CTAs",
    ),
)


@_cached
def configure_documents(
    kind: KernelKey, *, flat: bool, pieces: bool, long: bool = False, split: bool = False
) -> LaunchConfig:
    """Return the launch of the one-hot product of BN document tokens and BM query rows a step.

    Args:
        kind: properties of the call.
        flat: whether all query rows are evenly spaced and 32 bits address each element.
        pieces: whether the list of rows is split over several programs.
        long: whether documents have at least `MIN_LONG_DOCUMENT_TOKENS` tokens. fp32 then uses the largest tiles that
            fit registers.
        split: whether fp32 rows are read as two fp16 terms.
    """
    step = select_for(_DOCUMENTS_TABLE, kind)
    launch = step.launch(kind, 255, LANES=kind.arch.lanes, EVEN_ROW_STRIDE=flat)
    return apply_overrides(_DOCUMENTS_OVERRIDES, _DocumentsCall(kind, flat, pieces, long, split=split), launch)


@_cached
def configure_long_documents(kind: KernelKey, *, flat: bool) -> LaunchConfig:
    """Return the launch of `maxsim_grad_long_documents`.

    Products are as in `maxsim_grad_documents` without lists and with ``long=False``, so sums have the same bits. The
    slots of a tile need registers in addition: with the limit for three CTAs per SM, Triton 3.9 spills.
    """
    launch = configure_documents(kind, flat=flat, pieces=True).change(max_registers=255)  # not the steps of three CTAs
    if kind.normalize and kind.half and not kind.has_vector_loads:
        # Triton 3.9 spills with the addresses of 64 rows. The norms that the products contain have other bits anyway.
        launch = launch.change(BM=min(launch.config.BM, 32))
    return launch


_LONG_TILE_TOKENS = (512, 256, 128)


def choose_long_tile_tokens(arch: Architecture, documents: int, Ld: int, min_programs: int) -> int:
    """Return the document tokens that a program of `maxsim_grad_long_documents` owns.

    Large tiles leave fewer partly filled products. The largest tile with at least `min_programs` programs is used.
    """
    if arch == INTERPRETER:
        return 32
    for tokens in _LONG_TILE_TOKENS:
        if documents * cdiv(Ld, tokens) >= min_programs:
            return tokens
    return _LONG_TILE_TOKENS[-1]


def configure_pair_sort(arch: Architecture) -> LaunchConfig:
    """Return the launch of the kernels that find and sort pairs, which have no configuration."""
    config = configure_documents(KernelKey(arch, torch.float32, 128, False, False, 0), flat=True, pieces=True).config
    return LaunchConfig(config, num_warps=4, num_stages=1, max_registers=arch.registers)


def choose_shared_tile_rows(arch: Architecture) -> int:
    """Return the rows of D that a program of `maxsim_grad_shared_tiles` owns."""
    return 32 if arch == INTERPRETER else 256


_PACKED_DOCUMENTS_OVERRIDES = (
    Override(when=lambda call, x: not call.listed, change={"num_stages": 1}),
    Override(
        when=lambda call, x: call.has_vector_rows,
        change={"BN": lambda call, x: 16 if call.shared and not call.is_plain else 32},
        reason="with shared tiles ptxas spills unless rows are plain",
    ),
    Override(
        when=lambda call, x: (
            call.has_vector_rows and not (call.single or call.kind.arch.is_amd or call.kind.arch.name == "sm_120")
        ),
        change={"num_stages": 2},
        reason="a program of the cross product prefetches argmax values. On sm_120 ptxas spills",
    ),
    Override(
        when=lambda call, x: (
            call.has_vector_rows and not call.single and call.kind.arch.unit == "wgmma" and x.config.SINGLE_STEP
        ),
        change={"BM": 128},
        reason="each thread computes the address of one row, and no thread repeats an address",
    ),
    Override(
        when=lambda call, x: call.shared and not call.listed and call.kind.arch.name.startswith("sm_8"),
        change={"BN": at_most("BN", 32)},
        reason="ptxas spills with the tiles of fp32",
    ),
    Override(
        when=lambda call, x: call.shared and call.kind.half and call.kind.arch.is_amd and x.config.BD <= 32,
        change={"BN": 32},
        reason="Triton 3.9 multiplies 16 rows by 32 features without MFMA",
    ),
)


@_cached
def configure_packed_documents(
    kind: KernelKey, *, flat: bool, rows: int | None, shared: bool, listed: bool = False
) -> LaunchConfig:
    """Return the launch of the one-hot product of BN rows of D and BM query rows a step.

    Args:
        kind: properties of the call.
        flat: whether all query rows are evenly spaced and 32 bits address each element.
        rows: mean number of rows of a query if each pair has one query. Such pairs are short, and several share a step.
            None for the cross product: a document is scored against all rows, and a program prefetches argmax values.
        shared: whether the BN rows are the argmax tokens of a larger tile.
        listed: whether the rows of a tile are read from bucketed lists.
    """
    pieces = not listed
    call = _DocumentsCall(kind, flat, pieces, shared=shared, listed=listed, single=rows is not None)
    launch = configure_documents(kind, flat=flat, pieces=pieces)
    launch = apply_overrides(_PACKED_DOCUMENTS_OVERRIDES, call, launch)
    BM = launch.config.BM
    rows_per_query = BM if rows is None or listed else min(max(next_power_of_2(rows), 16), BM)
    return launch.change(ROWS_PER_QUERY=rows_per_query)


MAX_SPARSE_ROWS = 128  # maximum query rows of a document that one program holds


def get_max_sparse_rows(kind: KernelKey) -> int:
    """Return the maximum number of query rows of a document that one program holds without spills."""
    return MAX_SPARSE_ROWS if kind.half and kind.d <= 128 and kind.has_vector_loads else MAX_SPARSE_ROWS // 2


@_cached
def configure_sparse_documents(kind: KernelKey, rows: int) -> LaunchConfig:
    """Return the launch that sums the few query rows of a document.

    A step has BN of the tokens that are an argmax.
    """
    BM, d, half = max(next_power_of_2(rows), 16), kind.d, kind.half
    holds_features = BM <= 32 or (half and not kind.arch.is_amd)
    BD = max(next_power_of_2(d), 16) if d <= (128 if holds_features else 64) else 32
    config = kind.config(BM, min(BM, 32 if half and BM <= 64 else 16), BD)
    # Without a limit ptxas uses 128 registers and spills.
    return LaunchConfig(config, num_warps=4 if rows <= 32 and half else 8, num_stages=1, max_registers=255)


MAX_DISJOINT_ROWS = 128  # maximum rows of a pair that one warp sums


@_cached
def configure_disjoint_documents(kind: KernelKey, rows: int, *, flat: bool) -> LaunchConfig:
    """Return the launch that sums the few query rows of a packed document, row by row in one warp.

    A query has at most BM rows.
    """
    BM = min(max(next_power_of_2(rows), 16 if kind.arch == INTERPRETER else 32), MAX_DISJOINT_ROWS)
    BD = min(max(next_power_of_2(kind.d), 16), 256)
    config = kind.config(BM, 4, BD, EVEN_ROW_STRIDE=flat)
    # The programs mostly wait for memory. 32 programs, the maximum, share an SM unless ptxas spills then.
    is_small = BM <= 32 and BD <= 128 and kind.has_vector_loads
    return LaunchConfig(config, num_warps=1, num_stages=1, max_registers=64 if is_small else 128)


def configure_buckets(arch: Architecture, documents: LaunchConfig, rows: int) -> LaunchConfig:
    """Return the launch that lists the argmax values for `documents`, in blocks of BM query rows."""
    return LaunchConfig(_make_bucket_config(arch, documents, rows, 1024), num_warps=4, num_stages=1)


def _make_bucket_config(arch: Architecture, documents: LaunchConfig, rows: int, max_rows: int) -> KernelConfig:
    """Return the configuration of a list kernel with at most `max_rows` rows in a block.

    The kernels read no tokens. Options of the tokens are off, so that one compiled kernel serves all of them.
    """
    BM = min(max(next_power_of_2(rows), 16), 64 if arch == INTERPRETER else max_rows)
    lanes = min(BM, 16 if arch == INTERPRETER else 128)
    return documents.config._replace(BM=BM, ROWS_PER_QUERY=lanes, NORMALIZE=False, EVEN_ROW_STRIDE=False)


def configure_packed_buckets(arch: Architecture, documents: LaunchConfig, rows: int) -> tuple[LaunchConfig, int]:
    """Return the launch that lists the argmax values of packed documents, and the query rows of a block.

    One program lists one block, so one launch lists all blocks. Blocks are large, because a tile starts a new loop for
    each block.
    """
    # ptxas spills with 16 rows for each thread, and on sm_120 with 8 rows in 128 registers.
    max_rows = MAX_BLOCK_ROWS.value // 2 if arch.name == "sm_120" else MAX_BLOCK_ROWS.value
    max_rows = _make_bucket_config(arch, documents, rows, max_rows).BM
    block_rows = cdiv(rows, cdiv(rows, max_rows))
    config = _make_bucket_config(arch, documents, block_rows, max_rows)
    warps = max(4, config.BM // 256)
    return LaunchConfig(config, num_warps=warps, num_stages=1, max_registers=128 if warps == 16 else 255), block_rows
