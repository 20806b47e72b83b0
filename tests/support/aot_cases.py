"""Cases for ahead-of-time compilation: common calls, and every configuration that the tables can select.

The second set is generated from the tables, so that it grows with them. Each configuration appears without options and
with all options. Cases that compile to the same kernel are compiled once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pytest
import torch

from lik_ops.formats.table import INT8_QUERIES
from lik_ops.gpu.tuning import forward_configs
from lik_ops.gpu.tuning.architectures import ARCHITECTURES, Architecture, KernelKey
from lik_ops.gpu.tuning.forward_configs import TileConfig, TileRule

from .aot import KEEP, QUERY_TERMS, UNIT_COUNTS, Case, fingerprint

FORWARD, QUERIES, DOCUMENTS = "maxsim_forward", "maxsim_grad_queries", "maxsim_grad_documents"
PARTS = "maxsim_grad_query_parts"
LONG = "maxsim_grad_long_documents"
SPARSE, JOIN, NORMS = "maxsim_grad_sparse_documents", "maxsim_join_pieces", "maxsim_row_norms"
COUNT, SCAN, LIST = "maxsim_count_argmax", "maxsim_scan_counts", "maxsim_list_argmax"
SCATTER, FINISH, SPLIT, ROUND = "maxsim_scatter", "maxsim_finish", "split_tokens", "maxsim_round_rows"
PACKED, JOIN_PACKED = "maxsim_grad_packed_documents", "maxsim_join_packed_pieces"
SHARED, LIST_PACKED = "maxsim_grad_shared_tiles", "maxsim_list_packed_argmax"
DISJOINT = "maxsim_grad_disjoint_documents"
ITEMS, SORT, STARTS = "maxsim_ragged_items", "maxsim_sort_items", "maxsim_find_starts"
KERNELS = (FORWARD, QUERIES, DOCUMENTS, SPARSE, JOIN, COUNT, LIST, SCATTER, FINISH)

_EVERYTHING = {"options": True, "argmax": True}
_ALL_OPTIONS = {"candidates": True, "normalize": True, "options": True, "argmax": True}
_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32

# Common calls: bf16 ColBERT, with argmax for training, fp32 with all options, and several feature steps.
COMMON = [
    *(Case(kernel) for kernel in KERNELS),
    Case(FORWARD, argmax=True),
    Case(FORWARD, options=True),
    Case(FORWARD, Nq=2, options=True),
    Case(FORWARD, Nq=4, options=True),
    Case(FORWARD, Nq=1),
    Case(FORWARD, Nq=1, options=True, argmax=True),
    Case(FORWARD, Nq=1, options=True, argmax=True, documents=100),
    Case(FORWARD, Nq=2, options=True, argmax=True, documents=100),
    Case(FORWARD, Nq=4, argmax=True),
    *(
        Case(FORWARD, _FP32, 320, tf32=True, options=options, short=short)
        for options, short in ((0, 0), (1, 0), (1, 1))
    ),
    Case(FORWARD, Nq=1, short=True),
    Case(FORWARD, Nq=4, options=True, short=True),
    Case(FORWARD, short=True, normalize=True, **_EVERYTHING),
    Case(FORWARD, _FP32, short=True, **_EVERYTHING),
    Case(FORWARD, Nq=1, Lq=128),
    Case(FORWARD, Nq=1, Lq=128, candidates=True, options=True, argmax=True),
    Case(FORWARD, Lq=1024),
    Case(FORWARD, **_ALL_OPTIONS),
    *(Case(kernel, _FP32, 128, **{**_ALL_OPTIONS, "argmax": kernel == FORWARD}) for kernel in KERNELS),
    Case(FORWARD, _FP32),
    Case(FORWARD, d=768, normalize=True, options=True),
    Case(DOCUMENTS, d=768, normalize=True, options=True),
    Case(DOCUMENTS, _FP16),
    Case(DOCUMENTS, pieces=True),
    *(
        Case(DOCUMENTS, _FP32, d, int32=True, pieces=pieces, long=True)
        for d in (3, 100, 128)
        for pieces in (False, True)
    ),
    Case(JOIN, _FP32, 3, int32=True, long=True),
    *(Case(kernel, _FP32, options=options) for kernel in (QUERIES, DOCUMENTS) for options in (False, True)),
    *(Case(QUERIES, normalize=True, options=options) for options in (False, True)),
    *(
        Case(PARTS, dtype, d, normalize=normalize, options=normalize)
        for dtype, d in ((_BF16, 128), (_FP16, 320), (_FP32, 128))
        for normalize in (False, True)
    ),
    Case(PARTS, normalize=True, stored="*i8"),
    *(Case(PARTS, _FP32, d, tf32=True) for d in (128, 300)),
    *(
        Case(kernel, _FP32, tf32=True, normalize=normalize, options=True)
        for kernel in (QUERIES, DOCUMENTS, ROUND)
        for normalize in (False, True)
    ),
    *(
        Case(kernel, _FP32, 300, tf32=True, options=True, candidates=kernel == DOCUMENTS)
        for kernel in (QUERIES, DOCUMENTS, ROUND)
    ),
    *(Case(kernel, _FP32, d, split=True, options=d > 128) for kernel in (DOCUMENTS, ROUND) for d in (32, 128, 320)),
    Case(DOCUMENTS, _FP32, split=True, normalize=True, pieces=True, options=True),
    Case(DOCUMENTS, lists=False),
    *(Case(DOCUMENTS, dtype, lists=False, normalize=True, options=True) for dtype in (_FP16, _FP32)),
    Case(LONG),
    *(Case(LONG, dtype, documents=1) for dtype in (_BF16, _FP16, _FP32)),  # the smallest tile
    *(Case(LONG, dtype, candidates=True, normalize=True, options=True) for dtype in (_FP16, _FP32)),
    Case(LONG, _FP16, d=768, normalize=True, options=True),
    Case(SPARSE, candidates=True),
    Case(SPARSE, Lq=128, candidates=True),
    Case(LIST, Lq=1024),
]

# Ragged layouts: in-batch training, a candidate list, pairs, one query, and features loaded one by one.
RAGGED = [
    *(Case(kernel, ragged=True, options=True, argmax=kernel == FORWARD) for kernel in (FORWARD, QUERIES, SCATTER)),
    *(
        Case(kernel, ragged=True, pairs=True, candidates=kernel == FORWARD, **_EVERYTHING)
        for kernel in (FORWARD, QUERIES, SCATTER)
    ),
    Case(QUERIES, ragged=True, candidates=True),
    *(Case(QUERIES, dtype, d, ragged=True) for dtype, d in ((_BF16, 128), (_FP32, 16), (_FP32, 128), (_FP16, 300))),
    Case(QUERIES, ragged=True, candidates=True, normalize=True, options=True),
    Case(QUERIES, _FP32, ragged=True, candidates=True),
    Case(FORWARD, ragged=True),
    Case(FORWARD, ragged=True, bounds=True, **_EVERYTHING),
    Case(FORWARD, ragged=True, bounds=True, pairs=True, candidates=True),
    Case(FORWARD, Nq=4, ragged=True, padded=True, candidates=True),
    Case(FORWARD, Nq=1, ragged=True),
    Case(FORWARD, Nq=256, Lq=1024, ragged=True),
    *(Case(FORWARD, Nq=Nq, ragged=True, options=Nq > 1, empty=True) for Nq in (1, 4)),
    Case(FORWARD, Nq=1, ragged=True, normalize=True, empty=True),
    Case(FORWARD, Nq=4, ragged=True, candidates=True, options=True),
    Case(FORWARD, ragged=True, normalize=True, **_EVERYTHING),
    Case(FORWARD, _FP32, ragged=True, **_EVERYTHING),
    Case(FORWARD, _FP32, Nq=2, ragged=True, **_EVERYTHING),
    Case(FORWARD, d=768, ragged=True, options=True),
    Case(FORWARD, d=100, ragged=True, **_EVERYTHING),
    *(Case(kernel, ragged=True, pairs=pairs) for kernel in (ITEMS, SORT, STARTS) for pairs in (False, True)),
    *(Case(kernel, ragged=True, candidates=True) for kernel in (ITEMS, SORT)),
    Case(JOIN_PACKED, _FP16, 300, ragged=True, normalize=True),
    *(
        Case(kernel, dtype, ragged=True, candidates=kernel in (SHARED, DISJOINT), pairs=pairs, **fields)
        for kernel, pairs in ((PACKED, False), (PACKED, True), (SHARED, False), (DISJOINT, False))
        for dtype, fields in ((_BF16, {}), (_FP32, {"normalize": True, "options": True}))
    ),
    Case(PACKED, _FP16, ragged=True, pieces=True, options=True),
    Case(PACKED, ragged=True, lists=False),
    Case(PACKED, _FP16, ragged=True, lists=False, pieces=True, options=True),
    *(Case(PACKED, ragged=True, lists=lists, chunks=True) for lists in (False, True)),
    Case(LIST_PACKED, ragged=True),
    Case(LIST_PACKED, _FP32, Lq=1, ragged=True, int32=True),
]
# Few long documents.
SECTIONS = [
    *(
        Case(FORWARD, dtype, Nq=1, Lq=Lq, ragged=True, sections=True, bounds=bounds, **fields)
        for dtype, Lq in (
            (_BF16, 32),
            (_BF16, 64),
            (_BF16, 128),
            (_FP16, 256),
            (_BF16, 1024),
            (_FP32, 32),
            (_FP32, 128),
        )
        for bounds, fields in (
            (False, {}),
            (True, {}),
            (False, _EVERYTHING),
            (True, {**_EVERYTHING, "normalize": True}),
        )
    ),
    Case(FORWARD, Nq=4, ragged=True, sections=True, **_EVERYTHING),
    Case(FORWARD, d=768, Nq=1, ragged=True, sections=True, bounds=True),
    Case(FORWARD, d=100, Nq=1, ragged=True, sections=True, bounds=True, wide=1, **_EVERYTHING),
    *(
        Case(FORWARD, Nq=1, ragged=True, sections=True, stored=stored)
        for stored in ("*i8", "bitwords1_half", "bits1_half")
    ),
    *(
        Case(FORWARD, dtype, d, Nq=1, Lq=1024, ragged=True, sections=True, bounds=True, stored=stored, **fields)
        for dtype, d, stored, fields in (
            (_BF16, 320, "*u8", {}),
            *((_FP16, 320, fp8, {**_EVERYTHING, "normalize": True}) for fp8 in ("*fp8e4nv", "e4m3")),
            (_BF16, 128, "bitwords4_rotated", _EVERYTHING),
            *((_FP32, 128, fp8, _EVERYTHING) for fp8 in ("*fp8e4nv", "e4m3")),
        )
    ),
]
# Other feature counts, and rare calls.
MORE_RAGGED = [
    *(
        Case(kernel, dtype, d, ragged=True, candidates=kernel in (SHARED, DISJOINT), pairs=pairs, lists=lists, **fields)
        for kernel, pairs, lists in (
            *((PACKED, False, lists) for lists in (False, True)),
            *((PACKED, True, True), (SHARED, False, True), (DISJOINT, False, True)),
        )
        for dtype, d, fields in (
            (_FP16, 128, {"normalize": True, "options": True}),
            (_BF16, 768, {"normalize": True, "options": True}),
            (_BF16, 100, {"normalize": True, "options": True}),
            (_FP32, 300, {"wide": 2}),
        )
    ),
    Case(PACKED, ragged=True, options=True, int32=True),
    Case(PACKED, ragged=True, options=True, int32=True, lists=False),
    *(
        Case(PACKED, dtype, d, ragged=True, lists=lists, chunks=True, normalize=True, options=True)
        for lists in (False, True)
        for dtype, d in ((_FP16, 128), (_BF16, 100), (_FP32, 300))
    ),
    Case(PACKED, ragged=True, pieces=True, pairs=True, normalize=True),
    Case(SHARED, Lq=1024, ragged=True, candidates=True, normalize=True, options=True),
    *(Case(DISJOINT, dtype, Lq=Lq, ragged=True, candidates=True) for dtype in (_BF16, _FP32) for Lq in (64, 1024)),
    Case(DISJOINT, _FP16, Lq=1024, ragged=True, candidates=True, normalize=True, options=True),
]

# fp32 as fp16 terms, in programs that split rows.
TERMS = [
    Case(FORWARD, _FP32, Nq=1, **_EVERYTHING),
    Case(FORWARD, _FP32, Nq=64, candidates=True, wide=1, **_EVERYTHING),
    Case(FORWARD, _FP32, Nq=64, **_EVERYTHING),
    Case(FORWARD, _FP32, Lq=128, **_EVERYTHING),
    Case(FORWARD, _FP32, Lq=300, **_EVERYTHING),
    *(Case(FORWARD, _FP32, Nq=Nq, Lq=Lq, normalize=True, options=Lq > 32) for Nq, Lq in ((1, 32), (64, 32), (1, 1024))),
    *(Case(FORWARD, _FP32, Nq=Nq, normalize=True, ragged=True, **_EVERYTHING) for Nq in (1, 16)),
    Case(FORWARD, _FP32, Nq=1, normalize=True, ragged=True, candidates=True),
]
# Other feature counts.
MORE_TERMS = [
    *(Case(FORWARD, _FP32, 16, Nq, Lq, **_EVERYTHING) for Nq, Lq in ((1, 1), (64, 32), (64, 300))),
    *(Case(FORWARD, _FP32, 64, Nq, Lq, candidates=True, wide=1) for Nq, Lq in ((1, 1), (64, 128), (64, 300))),
    *(Case(FORWARD, _FP32, d, Nq=16, normalize=True, **_EVERYTHING) for d in (16, 64)),
    Case(FORWARD, _FP32, 64, Nq=64, Lq=300, normalize=True),
]

# Quantized documents: codes multiplied as terms or converted, FP8 as FP8 and as bytes, bits, residual codes.
_CODES, _WORDS = ("codes1", "codes2", "codes4", "codes8"), ("words1", "words2", "words4")
_KEPT = ("*i8", "*u8", "*fp8e4nv", "*fp8e5", "e4m3", "e5m2", "bits1", "bits2", "bits4", *_CODES)
STORED = [
    Case(FORWARD, ragged=True, stored="*i8"),
    Case(FORWARD, Nq=1, ragged=True, stored="*i8"),
    Case(FORWARD, d=8, Nq=1, ragged=True, stored="*i8"),
    *(Case(FORWARD, dtype, Nq=1, ragged=True, stored="*fp8e4nv") for dtype in (_BF16, _FP16)),
    *(Case(FORWARD, Nq=Nq, ragged=True, stored=INT8_QUERIES, **_EVERYTHING) for Nq in (1, 256)),
    Case(FORWARD, _FP32, Lq=1024, ragged=True, stored=INT8_QUERIES, **_ALL_OPTIONS),
    *(Case(FORWARD, Nq=Nq, ragged=True, stored=f"bits1_{query}") for query in ("half", "binary") for Nq in (1, 256)),
    *(Case(FORWARD, Nq=Nq, ragged=True, stored=f"bitwords1_{query}") for query in ("half", "int8") for Nq in (1, 256)),
    Case(FORWARD, _FP32, Nq=16, ragged=True, stored="bitwords1_half", **_EVERYTHING),
    Case(FORWARD, Nq=16, Lq=1024, ragged=True, stored="bitwords1_binary", **_EVERYTHING),
    *(Case(FORWARD, dtype, Nq=16, ragged=True, stored="bits1_int8", **_EVERYTHING) for dtype in (_FP16, _FP32)),
    *(Case(FORWARD, Nq=Nq, ragged=True, stored=stored) for stored in ("fp8_fp8", "e4m3_fp8") for Nq in (1, 256)),
    *(Case(FORWARD, _FP16, d, Nq=16, ragged=True, stored="fp8_fp8", **_EVERYTHING) for d in (64, 128)),
    Case(FORWARD, _FP16, Nq=16, ragged=True, stored="e4m3_fp8", **_EVERYTHING),
    Case(FORWARD, Nq=1, ragged=True, stored="*i8", **_EVERYTHING),
    *(
        Case(FORWARD, d=d, Nq=256, Lq=Lq, ragged=True, padded=True, stored=stored)
        for d, Lq, stored in ((320, 32, "*u8"), (320, 64, "*u8"))
    ),
    *(
        Case(FORWARD, d=320, Nq=16, ragged=True, stored=stored, **options)
        for stored in ("*i8", "*u8", "*fp8e4nv", "bitwords1_half")
        for options in ({}, {"padded": True, **_EVERYTHING})
    ),
    Case(FORWARD, Lq=1024, ragged=True, stored="*i8", **_ALL_OPTIONS),
    *(Case(FORWARD, ragged=True, stored=stored, **_EVERYTHING) for stored in _KEPT),
    *(Case(FORWARD, _FP32, ragged=True, stored=stored, **_EVERYTHING) for stored in _KEPT),
    *(
        Case(UNIT_COUNTS, stored=stored, d=d)
        for stored, d in zip(_KEPT, (128, 300, 96, 300, 128, 20, 300, 96, 300, 128, 300, 96, 20), strict=True)
    ),
    *(Case(FORWARD, Nq=Nq, ragged=True, stored=stored) for stored in _CODES for Nq in (1, 256)),
    *(Case(FORWARD, d=320, Nq=Nq, ragged=True, padded=True, stored=f"bit{w}") for w in _WORDS for Nq in (1, 16)),
    *(Case(FORWARD, _FP16, d, Nq=16, ragged=True, stored="bitwords4", **_EVERYTHING) for d in (264, 512)),
    *(Case(FORWARD, Nq=Nq, ragged=True, stored=f"bitwords{n}_rotated") for n in (2, 4) for Nq in (1, 16)),
    *(Case(FORWARD, _FP16, d, Nq=16, ragged=True, stored="bitwords4_rotated", **_EVERYTHING) for d in (96, 256)),
    Case(FORWARD, _FP32, Nq=256, ragged=True, stored="bitwords2_rotated", **_EVERYTHING),
    *(Case(FORWARD, dtype, 20, ragged=True, stored=f"bits{n}_rotated") for n, dtype in ((2, _FP32), (4, _BF16))),
    Case(FORWARD, _FP16, Nq=16, ragged=True, stored="codes4"),
    # With several feature steps, decoded features of each step wait in shared memory.
    *(
        Case(FORWARD, dtype, 160, 6, 22, candidates=pairs, ragged=True, pairs=pairs, argmax=True, **stored)
        for dtype, pairs, stored in (
            (_FP16, True, {"stored": "codes4", "fp32_centroids": True}),
            (_BF16, True, {"stored": "codes8", "fp32_centroids": True}),
            (_BF16, False, {"stored": "codes2", "fp32_centroids": True}),
            (_FP16, True, {"stored": "words4"}),
        )
    ),
    # Each tile of codes in words in a persistent kernel, and the tiles of other kernels.
    *(Case(FORWARD, Nq=Nq, ragged=True, padded=True, stored=w) for w in _WORDS for Nq in (1, 2, 4, 8, 16)),
    *(Case(FORWARD, _FP16, Nq=Nq, ragged=True, stored=w, **_ALL_OPTIONS) for w in _WORDS for Nq in (1, 16)),
    *(
        Case(FORWARD, _FP16, d, Nq, ragged=True, stored="words4", normalize=True, options=True)
        for d, Nq in ((64, 16), (96, 16), (128, 1), (128, 16))
    ),
    *(Case(FORWARD, Nq=16, ragged=True, stored=w, **_EVERYTHING) for w in _WORDS),
    Case(FORWARD, Nq=16, ragged=True, candidates=True, stored="words2"),
    Case(FORWARD, d=256, Nq=16, ragged=True, stored="words4"),
    *(Case(QUERY_TERMS, dtype, d) for dtype, d in ((_BF16, 128), (_FP32, 256), (_FP16, 20))),
    *(Case(KEEP, dtype, d) for dtype, d in ((_BF16, 128), (_FP32, 300), (_FP16, 20))),
    *(
        Case(QUERIES, dtype, d, ragged=True, stored=stored, normalize=d != 128, options=True, **fields)
        for stored in _KEPT
        for dtype, d, fields in ((_BF16, 128, {}), (_FP32, 300, {"candidates": True}), (_FP32, 20, {"pairs": True}))
    ),
    # int8 documents in a backward.
    *(Case(kernel, stored="*i8", options=True) for kernel in (QUERIES, SCATTER)),
    *(Case(kernel, stored="*i8", normalize=True) for kernel in (QUERIES, DOCUMENTS, LONG, SPARSE, SCATTER, FINISH)),
    Case(JOIN, stored="*i8", candidates=True, normalize=True),
]
MORE_STORED = [
    *(
        Case(FORWARD, dtype, d, Nq, ragged=True, stored=stored, **fields)
        for stored in _KEPT
        for dtype, d in itertools.product((_BF16, _FP32), (96, 128, 300))
        for Nq, fields in ((256, {}), (256, _EVERYTHING), *([(1, {}), (1, _EVERYTHING)] if d == 128 else []))
    ),
    *(
        Case(FORWARD, Nq=Nq, ragged=True, stored=stored, wide=1, **fields)
        for stored in (*_CODES, *_WORDS)
        for Nq, fields in ((1, {}), (256, {}), (256, _EVERYTHING))
    ),
    *(Case(FORWARD, _FP16, d, ragged=True, stored="*i8", wide=2, **_ALL_OPTIONS) for d in (16, 100, 256)),
    *(
        Case(kernel, dtype, d, stored="*i8", candidates=True, normalize=True, options=True)
        for kernel in (QUERIES, DOCUMENTS, LONG, SPARSE, SCATTER, FINISH)
        for dtype, d in ((_BF16, 300), (_FP32, 128), (_FP16, 20))
    ),
]

# Many short queries in a tile: `get_min_rows_per_query` allows them in half precision without an argmax, except on mma.
SHORT_QUERIES = [
    *(Case(FORWARD, Nq=Nq, Lq=Lq, ragged=True, padded=True, options=Lq > 1) for Nq, Lq in ((1, 1), (256, 1), (16, 8))),
    *(
        Case(FORWARD, d=320, Nq=256, Lq=1, ragged=True, padded=True, stored=stored)
        for stored in ("*u8", "*fp8e4nv", "e4m3", "*i8")
    ),
    Case(FORWARD, Nq=256, Lq=1, ragged=True, padded=True, stored="*i8"),
    Case(FORWARD, d=320, Nq=16, Lq=8, ragged=True, padded=True, stored="bitwords1_half", options=True),
]

# Tiles of short encoded documents, which only sm_90 has.
SHORT_DOCUMENTS = [
    Case(FORWARD, d=d, Nq=16, ragged=True, stored=stored, tile_tokens=tokens, **options)
    for stored, d, tiles in (
        ("*i8", 128, (16, 32, 64)),
        (INT8_QUERIES, 256, (16, 32, 64)),
        ("bitwords1_half", 192, (16, 32, 64)),
        ("bits1_int8", 128, (16, 64)),
        ("bitwords4_rotated", 128, (16,)),
        *((stored, d, (16, 32)) for stored in ("*u8", "*fp8e4nv", "bitwords1") for d in (128, 320)),
    )
    for tokens in tiles
    for options in ({}, *([{"padded": True, **_EVERYTHING}] if tokens == tiles[-1] else []))
]

_SHAPES = [(1, 1), (1, 32), (2, 32), (4, 32), (8, 32), (1, 64), (1, 128), (1, 200), (256, 32), (8, 300)]


def _find_case(
    arch: Architecture, rule: TileRule, tile: TileConfig, shapes: list[tuple[int, int]], **fields
) -> Case | None:
    """Return the first case of these fields that `rule` serves with `tile`, or None."""
    for (Nq, Lq), documents in itertools.product(shapes, (10**6, 100)):
        case = Case(FORWARD, Nq=Nq, Lq=Lq, documents=documents, **fields)
        kind = KernelKey(arch, case.dtype, case.d, case.candidates, case.normalize, case.wide)
        tiles = forward_configs.select_tiles(kind, Lq)
        chosen, _ = forward_configs.select_tile(tiles, Nq, Lq, case.candidates, documents)
        if tiles is rule.value and chosen is tile:
            return case
    return None


def _find_first_case(
    arch: Architecture, rule: TileRule, tile: TileConfig, variants: Iterable[dict], shapes=_SHAPES
) -> list[Case]:
    """Return a case of the first variant that reaches `tile`, because earlier rules may serve a variant."""
    for fields in variants:
        case = _find_case(arch, rule, tile, shapes, **fields)
        if case is not None:
            return [case]
    raise AssertionError(f"nothing reaches {tile} of {rule}")


def _forward_cases(arch: Architecture, rule: TileRule) -> Iterator[Case]:
    """Yield each tile without and with all options, and the last tile also with a longer query on another path."""
    bare, full = rule.dtypes[-1], rule.dtypes[0]
    most = min(rule.d, 1024)
    flags = list(itertools.product((0, 1, 2)[: rule.wide + 1], (False, True)[: rule.normalize + 1]))
    for tile in rule.value:
        variants = [{"dtype": bare, "d": most, "wide": wide, "normalize": normalize} for wide, normalize in flags]
        yield from _find_first_case(arch, rule, tile, variants)
        d = most if rule.wide < 2 else 100 if rule.d == 128 else 300  # features one by one
        options = {"dtype": full, "d": d, "normalize": rule.normalize, "wide": rule.wide, **_EVERYTHING}
        yield from _find_first_case(arch, rule, tile, [{**options, "candidates": True}, options])
    usual = {**options, "wide": 0}
    if full == _FP32 and rule.wide < 2:
        yield from _find_first_case(arch, rule, tile, [{**fields, "tf32": True} for fields in variants])
    if rule.Lq > tile.rows:
        plain = {**usual, "normalize": False}
        yield from _find_first_case(arch, rule, tile, [plain, usual, options], [(8, 1000)])


def _row_cases() -> Iterator[Case]:
    """Yield cases of kernels that read whole rows, with one feature step or several, as vectors or one by one."""
    for kernel in (QUERIES, SCATTER):
        for dtype in (_BF16, _FP32):
            yield Case(kernel, dtype, 256)
            yield Case(kernel, dtype, 300, normalize=True, options=True)
        yield Case(kernel, _FP16, 256, candidates=True, normalize=True, options=True, wide=2)
    yield Case(FINISH, _FP16, 300, normalize=True, options=True, wide=2)
    yield Case(NORMS, _FP32, 300, normalize=True, options=True, wide=2)


def _document_cases() -> Iterator[Case]:
    """Yield cases of the document gradient from lists, from pieces of lists, and from few rows."""
    everything = {"normalize": True, "options": True}
    for dtype in (_FP16, _FP32):
        yield Case(DOCUMENTS, dtype, 300, candidates=True, wide=2, **everything)
        yield Case(SPARSE, dtype, 300, Lq=64, wide=2, **everything)
    yield Case(DOCUMENTS, _FP16, 100, pieces=True, **everything)
    yield Case(JOIN, _FP32, 300, candidates=True, wide=2, **everything)
    yield Case(DOCUMENTS, _FP16, 20, lists=False, **everything)
    yield Case(DOCUMENTS, _FP32)
    for dtype in (_FP16, _BF16, _FP32):
        yield Case(LONG, dtype)
        yield Case(LONG, dtype, int32=True)
        yield Case(LONG, dtype, 20, **everything)
        yield Case(LONG, dtype, 300, candidates=True, wide=2, **everything)
        yield Case(LONG, dtype, wide=1, documents=1, **everything)
    yield Case(SPARSE, _FP16, 300, Lq=128, **everything)
    yield Case(SPARSE, _BF16, 768, Lq=128, normalize=True)
    yield Case(SPARSE, _FP32, Lq=64)
    yield Case(LIST, _FP32, Nq=1, Lq=200)
    yield Case(SCAN)


def _every_case(arch: Architecture) -> Iterator[Case]:
    for rule in forward_configs.FORWARD_RULES:
        if arch.unit in rule.units:
            yield from _forward_cases(arch, rule)
    yield from _row_cases()
    yield from _document_cases()
    if arch.has_sm90_path:
        yield Case(SPLIT, _FP32, 128)
        yield Case(SPLIT, _FP32, 100)
        yield Case(SPLIT, _FP32, 128, tf32=True)


def unique(cases: Iterable[tuple[Case, str]], seen: set[str]) -> list[tuple[Case, str]]:
    """Return the cases with their architectures, each kernel once. `seen` holds fingerprints of known kernels."""
    found = []
    for case, name in cases:
        mark = fingerprint(case, ARCHITECTURES[name])
        if mark not in seen:
            seen.add(mark)
            found.append((case, name))
    return found


# These use the tiles and instructions of sm_80 with less shared memory. The first cases need most of the memory.
_LIKE_SM_80 = ("sm_86", "sm_89", "sm_120")


def common_and_others() -> tuple[list[tuple[Case, str]], list[tuple[Case, str]]]:
    """Return the cases that `make test-kernels` compiles, and the cases of the slow tests.

    sm_90 compiles all common cases. Other architectures compile each kernel and a third of the other cases. Only sm_90
    splits rows.
    """
    seen: set[str] = set()
    every_pair = itertools.product(COMMON, ARCHITECTURES)
    pairs = [(case, name) for case, name in every_pair if name == "sm_90" or not case.split]
    quick = [
        (case, name)
        for n, case in enumerate(COMMON)
        for k, name in enumerate(ARCHITECTURES)
        if (name == "sm_90" or n < len(KERNELS) or (name not in _LIKE_SM_80 and n % 3 == k % 3))
        and (case, name) in pairs
    ]
    common = unique(quick, seen)
    every = ((case, name) for name, arch in ARCHITECTURES.items() for case in _every_case(arch))
    return common, unique(itertools.chain(pairs, every), seen)


def alternate(shapes: list[tuple], flags: int) -> list:
    """Return the shapes with all combinations of flags as parameters of tests. Every second one is a slow test.

    Each shape is in a fast test, and so is each flag with both values.
    """
    return [
        pytest.param(*shape, *values, marks=[pytest.mark.slow] * ((n + sum(values)) % 2))
        for n, shape in enumerate(shapes)
        for values in itertools.product((False, True), repeat=flags)
    ]
