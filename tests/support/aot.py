"""Compile kernels ahead of time without the target GPU, and read the compiler's resource report."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from triton.compiler import ASTSource

from lik_ops.csrc_triton.backward import pairs as pair_kernels
from lik_ops.csrc_triton.backward import queries as backward_queries
from lik_ops.csrc_triton.backward import rounding
from lik_ops.csrc_triton.backward import unified as backward_unified
from lik_ops.csrc_triton.backward.arguments import (
    PackedBucketArgs,
    PartialSumArgs,
    RowSumArgs,
    SharedTileArgs,
    SoftUpstreamArgs,
    TileBucketArgs,
    TilePairArgs,
    UpstreamArgs,
    ZeroFillArgs,
)
from lik_ops.csrc_triton.backward.documents import (
    buckets,
    packed_sparse,
)
from lik_ops.csrc_triton.backward.documents import (
    dense as dense_documents,
)
from lik_ops.csrc_triton.backward.documents import (
    packed as packed_documents,
)
from lik_ops.csrc_triton.backward.documents import (
    sparse as sparse_documents,
)
from lik_ops.csrc_triton.common import fp32, token_norms
from lik_ops.csrc_triton.common.arguments import (
    CodecDequantArgs,
    DequantArgs,
    DocumentArgs,
    OutputArgs,
    PackedSizeArgs,
    QueryArgs,
    SegmentArgs,
    SizeArgs,
    SoftSplitArgs,
    SplitArgs,
    TermArgs,
)
from lik_ops.csrc_triton.formats import encoded as stored
from lik_ops.csrc_triton.forward.generic import kernel as generic_forward
from lik_ops.csrc_triton.soft import backward as soft_backward
from lik_ops.csrc_triton.soft import forward as soft_forward
from lik_ops.families.soft import configs as soft_configs
from lik_ops.formats.table import INT8_QUERIES
from lik_ops.gpu.forward import packed as packed_forward
from lik_ops.gpu.forward import quantized
from lik_ops.gpu.tuning import backward_configs, forward_configs
from lik_ops.gpu.tuning.architectures import Architecture, KernelKey, LaunchConfig, next_power_of_2
from lik_ops.gpu.tuning.tables import UNLIMITED

from .machine_code import compile_as_launched, cuda_resources, target

_POINTER = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
# `KernelConfig.ENCODING` by the pointer type of quantized documents.
_STORED = {"*i8": "int8", "*u8": "number", "*fp8e4nv": "fp8", "*fp8e5": "fp8"}
_WORDS = {"words1": "*i8", "words2": "*i16", "words4": "*i32"}  # residual codes
_WORDS |= {f"bit{name}": kind for name, kind in _WORDS.items()}
_WORDS |= {f"bitwords1_{query}": "*i8" for query in ("half", "int8", "binary")}
_WORDS |= {f"{name}_rotated": kind for name, kind in _WORDS.items() if name in ("bitwords1", "bitwords2", "bitwords4")}
_READ = _WORDS | {INT8_QUERIES: "*i8", "fp8_fp8": "*fp8e4nv"}


@dataclass(frozen=True)
class Case:
    """One kernel with the arguments that determine how it compiles."""

    kernel: str
    dtype: torch.dtype = torch.bfloat16
    d: int = 128
    Nq: int = 256
    Lq: int = 32
    candidates: bool = False
    normalize: bool = False
    options: bool = False  # masks, weights
    argmax: bool = False
    wide: int = 0
    documents: int = 10**6
    lists: bool = True
    pieces: bool = False
    tf32: bool = False  # allowed by the user
    split: bool = False  # backward: fp32 query rows as two fp16 terms
    ragged: bool = False  # the kernel of ragged layouts, or the backward for one
    pairs: bool = False  # ragged layout with a list of pairs
    bounds: bool = False  # document bounds in place of offsets and lengths
    padded: bool = False  # evenly spaced queries and documents, with lengths
    empty: bool = False  # ragged forward: many documents may be empty
    short: bool = False  # forward: documents shorter than a tile
    long: bool = False  # backward: documents of many tokens
    chunks: bool = False  # of argmax lists
    sections: bool = False  # forward of few long documents, dense or with bounds
    int32: bool = False  # backward: int32 argmax instead of int16
    parts: bool = False  # finish: sums come in parts
    # Ragged forward: `KernelConfig.ENCODING` of quantized documents, or the type of their codes. Backward: only the
    # type.
    stored: str = ""
    fp32_centroids: bool = False  # of residual codes
    tile_tokens: int = 0  # ragged forward of short encoded documents

    def __str__(self) -> str:
        named = (
            "candidates",
            "normalize",
            "options",
            "argmax",
            "pieces",
            "tf32",
            "split",
            "ragged",
            "pairs",
            "int32",
            "parts",
        )
        named += ("bounds", "padded", "chunks", "empty", "short", "long", "sections", "fp32_centroids")
        flags = [f for f in named if getattr(self, f)]
        flags += [f"wide{self.wide}"] if self.wide else []
        flags += [f"tile{self.tile_tokens}"] if self.tile_tokens else []
        flags += [self.stored.removeprefix("*")] if self.stored else []
        flags += [] if self.lists else ["unlisted"]
        sizes = f"d{self.d}-Nq{self.Nq}-Lq{self.Lq}-Nd{self.documents}"
        return "-".join([self.kernel, str(self.dtype).split(".")[1], sizes, *flags])


@dataclass(frozen=True)
class Compiled:
    """Resources of a compiled kernel: tensor core instruction, shared memory bytes, registers and spills per thread.

    `orders` holds the orders of the terms of mma.sync products.
    """

    text: str
    shared: int
    registers: int
    spills: int
    orders: frozenset[str]


def _rounds(case: Case, kernel: str) -> bool:
    """Return whether the case is `kernel`, or its sums over parts, and reads rows that are rounded to fp16."""
    found = "maxsim_grad_queries" if case.kernel == "maxsim_grad_query_parts" else case.kernel
    return case.tf32 and found == kernel


def _queries(case: Case) -> tuple[QueryArgs, dict]:
    pointer = "*fp16" if _rounds(case, "maxsim_grad_documents") else _POINTER[case.dtype]
    mask = ("*i1", "i32", "constexpr") if case.options else ("constexpr",) * 3
    weight = ("*fp32", "i32", "constexpr") if case.options else ("constexpr",) * 3
    constants = {3: 1, 6: 1 if case.options else 0, 9: 1 if case.options else 0}
    if not case.options:
        constants |= {4: None, 5: 0, 7: None, 8: 0}
    return QueryArgs(pointer, "i32", "i32", "constexpr", *mask, *weight), constants


def knows(case: Case, arch: Architecture) -> bool:
    """Return whether this GPU reads the documents in this form: FP8 as FP8 or as bytes, codes as words."""
    if case.stored in _WORDS:
        return not arch.is_amd and not (case.stored == "bitwords1" and arch.unit == "mma")
    as_fp8 = case.stored.startswith("*fp8") or case.stored == "fp8_fp8"
    as_bytes = case.stored in ("e4m3", "e5m2", "e4m3_fp8")
    return not (as_bytes if arch.name in quantized.FP8_ARCHITECTURES else as_fp8)


def _document_pointer(case: Case) -> str:
    if case.stored:
        return case.stored if case.stored in _STORED else _READ.get(case.stored, "*u8")
    return "*fp16" if _rounds(case, "maxsim_grad_queries") else _POINTER[case.dtype]


def _documents(case: Case) -> tuple[DocumentArgs, dict]:
    pointer, owner = _document_pointer(case), "i32" if case.candidates else "constexpr"
    constants = {4: 1} if case.candidates else {1: 0, 4: 1}
    if case.options:
        if not case.candidates:
            constants[6] = 0
        constants[8] = 1
        mask = ("*i1", owner, "i32", "constexpr")
    else:
        constants |= {5: None, 6: 0, 7: 0, 8: 0}
        mask = ("constexpr",) * 4
    return DocumentArgs(pointer, owner, "i32", "i32", "constexpr", *mask), constants


def _reads_tiles(case: Case, arch: Architecture) -> bool:
    size = 1 if case.stored else case.dtype.itemsize
    return arch.has_descriptors and not case.stored.startswith(("bit", "codes", "words")) and case.d * size % 16 == 0


def _kind(case: Case, arch: Architecture) -> KernelKey:
    rounds = _rounds(case, "maxsim_grad_documents") or _rounds(case, "maxsim_grad_queries")
    dtype = torch.float16 if rounds else case.dtype
    return KernelKey(arch, dtype, case.d, case.candidates, case.normalize, case.wide)


def _launch(case: Case, arch: Architecture) -> LaunchConfig:
    kind = _kind(case, arch)
    if case.kernel == "maxsim_forward":
        if case.ragged:
            choices = {
                "tf32": case.tf32,
                "argmax": case.argmax,
                "stored": _stored(case),
                "has_few_documents": case.sections,
                "may_be_empty": case.empty,
                "tile_tokens": case.tile_tokens or UNLIMITED,
            }
            choices["has_no_options"] = not (case.options or case.padded)
            launch = forward_configs.configure_packed_forward(kind, case.Nq, case.Lq, **choices)[0]
            if case.sections:
                config = launch.config._replace(
                    SPLIT_DOCUMENTS=True, SHORT_DOCUMENTS=case.bounds, PDL=arch.name == "sm_90"
                )
                launch = replace(launch, config=config)
            return launch
        choices = {"tf32": case.tf32, "documents": case.documents, "argmax": case.argmax}
        launch = forward_configs.configure_forward(kind, case.Nq, case.Lq, **choices)
        if case.short:
            launch = replace(launch, config=launch.config._replace(SHORT_DOCUMENTS=True))
        if case.argmax:
            return forward_configs.adjust_for_argmax(launch, _reads_tiles(case, arch))
        if case.tf32:
            launch = forward_configs.adjust_for_tf32(launch, kind, case.Nq, 100 if case.short else 300, case.documents)
        if not _reads_tiles(case, arch):
            return launch.make_non_persistent()
        return forward_configs.adjust_stages(launch, arch, case.documents)
    if case.kernel == "split_tokens":
        launch = forward_configs.configure_forward(kind, 64, case.Lq, tf32=case.tf32)
        return LaunchConfig(launch.config._replace(BM=32), num_warps=4, num_stages=3)
    if case.kernel == "maxsim_forward_soft":
        launch = soft_configs.configure_soft_forward(kind, case.Nq, case.Lq, tf32=case.tf32)
        return launch.change(SPLIT_DOCUMENTS=case.sections)
    if case.kernel in SOFT:
        return soft_configs.configure_soft_backward(kind, tf32=case.tf32, flat=case.wide == 0)
    flat = case.wide == 0 and not case.ragged
    documents = backward_configs.configure_documents(
        kind, flat=flat, pieces=case.pieces, long=case.long, split=case.split
    )
    if case.kernel in ("maxsim_grad_documents", "maxsim_join_pieces"):
        return documents
    if case.kernel == "maxsim_grad_long_documents":
        return backward_configs.configure_long_documents(kind, flat=flat)
    if case.kernel == "maxsim_grad_disjoint_documents":
        return backward_configs.configure_disjoint_documents(kind, case.Lq, flat=True)
    if case.kernel in PACKED:
        flat, rows = case.wide == 0, case.Lq if case.candidates or case.pairs else None
        shared_tiles = case.kernel == "maxsim_grad_shared_tiles"
        choices = {"flat": flat, "rows": rows, "shared": shared_tiles, "listed": _uses_lists(case)}
        if case.chunks:  # tiles outside the lists use the same configuration
            choices["listed"] = True
        packed = backward_configs.configure_packed_documents(kind, **choices)
        if case.chunks and not case.lists:
            packed = replace(packed, max_registers=255)
        if case.kernel == "maxsim_list_packed_argmax":
            return backward_configs.configure_packed_buckets(arch, packed, case.Nq * case.Lq)[0]
        return packed
    if case.kernel in ITEMS:
        return backward_configs.configure_pair_sort(arch)
    if case.kernel == UNIT_COUNTS:
        return LaunchConfig(
            quantized.make_token_config(case.d, case.wide, _stored(case), normalize=True), num_warps=4, num_stages=3
        )
    if case.kernel == KEEP:
        return LaunchConfig(quantized.make_token_config(case.d, case.wide, normalize=False), num_warps=4, num_stages=3)
    if case.kernel == QUERY_TERMS:
        return LaunchConfig(packed_forward.make_terms_config(next_power_of_2(max(case.d, 16)), case.wide), 4, 3)
    if case.kernel == "maxsim_round_rows":
        return backward_configs.configure_rounding(kind, 2 if case.split else 1)
    if case.kernel == "maxsim_scatter":
        return backward_configs.configure_scatter(kind, ragged=case.ragged)
    if case.kernel == "maxsim_grad_sparse_documents":
        return backward_configs.configure_sparse_documents(
            kind, min(case.Lq, backward_configs.get_max_sparse_rows(kind))
        )
    if case.kernel in LISTS:
        return backward_configs.configure_buckets(arch, documents, case.Nq * case.Lq)
    if case.kernel == "maxsim_scan_counts":
        return replace(backward_configs.configure_buckets(arch, documents, 2**20), num_stages=3)  # default of Triton
    if case.kernel not in ("maxsim_grad_queries", "maxsim_grad_query_parts"):
        return backward_configs.configure_gather(kind, ragged=case.ragged)
    choices: dict = {"scaled": bool(case.stored), "rounded": _rounds(case, "maxsim_grad_queries")}
    if case.ragged:
        choices = {"encoding": _stored(case)}
    return backward_configs.configure_query_gradients(kind, ragged=case.ragged, **choices)


def _uses_lists(case: Case) -> bool:
    return case.lists and case.kernel != "maxsim_grad_shared_tiles" and not (case.candidates or case.pairs)


def _stored(case: Case) -> str:
    return _STORED.get(case.stored, case.stored)


def _levels(case: Case, arch: Architecture) -> int:
    choices = {"tf32": case.tf32, "argmax": case.argmax, "stored": _stored(case)}
    return forward_configs.configure_packed_forward(_kind(case, arch), case.Nq, case.Lq, **choices)[1]


LISTS = ("maxsim_count_argmax", "maxsim_list_argmax")
PACKED = ("maxsim_grad_packed_documents", "maxsim_grad_shared_tiles", "maxsim_join_packed_pieces")
PACKED += ("maxsim_list_packed_argmax", "maxsim_grad_disjoint_documents")
UNIT_COUNTS, QUERY_TERMS, KEEP = "maxsim_unit_counts", "maxsim_query_terms", "maxsim_keep_int8"
# Temperatures are tensors with `options`, else numbers. `maxsim_soft_queries` computes spreads for their gradients.
SOFT = ("maxsim_soft_queries", "maxsim_soft_spreads", "maxsim_soft_documents")
ITEMS = ("maxsim_ragged_items", "maxsim_sort_items", "maxsim_find_starts")  # they have no configuration


def _forward_arguments(case: Case, launch: LaunchConfig, arch: Architecture) -> dict[str, object]:
    tiles = "constexpr"
    if _reads_tiles(case, arch):
        element = _document_pointer(case).removeprefix("*")
        tiles = f"tensordesc<{element}[{launch.config.BN}, {launch.config.BD}]>"
    found = {"Q": None, "D": None, "tiles": tiles}
    out: tuple = OutputArgs("*fp32", "*i16" if case.argmax else "constexpr")
    if case.sections:
        each = "constexpr" if case.bounds else "i32"
        of_winners = ("*i32" if case.argmax else "constexpr"), ("*i32" if case.options else "constexpr")
        out = SplitArgs("*fp32", *of_winners, "*fp32" if case.normalize else "constexpr", out[1], "i32", each)
    if case.ragged:
        sizes: tuple = PackedSizeArgs(*["i32"] * 5)
        terms = TermArgs("*i8", "*fp32", "i32")
        found |= {
            "terms": terms if launch.config.INT8_TERMS else "constexpr",
            "counts": _counts(case) if case.stored else "constexpr",
        }
        return found | {"segments": _segments(case)[0], "out": out, "sizes": sizes, "d": "i32", "LEVELS": "constexpr"}
    return found | {"out": out, "sizes": SizeArgs(*["i32"] * 4), "d": "i32"}


def _counts(case: Case) -> DequantArgs | CodecDequantArgs:
    minimum = ("*fp32", "i32") if case.stored == "*u8" else ("constexpr",) * 2
    counts = DequantArgs("*fp32", "i32", *minimum)
    coded = case.stored.startswith(("codes", "words"))
    centroids = "*fp32" if case.fp32_centroids else "*fp16"
    return CodecDequantArgs(*counts, "*i32", centroids, "i32", "*fp32") if coded else counts


def _segments(case: Case) -> tuple[SegmentArgs, dict]:
    kinds = {name: "constexpr" for name in SegmentArgs._fields}
    kinds |= {"pairs": "*i64"} if case.pairs else {}
    if case.sections and not case.bounds:
        kinds |= {"q_each": "i32", "d_each": "i32"}
    elif case.padded:
        kinds |= {"lengths": "*i64", "q_lengths": "*i64", "q_each": "i32", "d_each": "i32"}
    else:
        kinds |= {"cu_seqlens_q": "*i64", "offsets": "*i64"}
        kinds |= {} if case.bounds else {"lengths": "*i64"}
    segments = SegmentArgs(**kinds)
    return segments, {n: None for n, kind in enumerate(segments) if kind == "constexpr"}


def _upstream(case: Case) -> tuple[UpstreamArgs, dict]:
    kinds = {name: "constexpr" for name in UpstreamArgs._fields}
    kinds |= dict.fromkeys(("stride_q", "stride_k", "Nq", "K", "Lq", "Ld"), "i32")
    kinds |= {"grad_scores": "*fp32", "argmax": "*i32" if case.int32 else "*i16"}
    has_norms = case.kernel in (*PACKED, "maxsim_grad_long_documents")
    if case.normalize and (has_norms or (case.kernel == "maxsim_grad_documents" and case.lists)):
        kinds["norms"] = "*fp32"
    if _rounds(case, "maxsim_grad_documents"):
        kinds["norms"] = "*fp32"
    if case.split:
        kinds |= {"norms": "*fp32", "terms": "*fp16"}
    if (case.stored and not case.ragged) or _rounds(case, "maxsim_grad_queries"):
        kinds["scale"] = "*fp32"
    if case.ragged:
        kinds |= {"items": "*i64", "count": "i32"}
        # Only the cross product passes the query of a row to the document gradient.
        if not (case.kernel in PACKED and (case.pairs or case.candidates)):
            kinds["query"] = "*i32"
        if case.pairs and case.kernel not in PACKED:
            kinds["starts"] = "*i32"
    up = UpstreamArgs(**kinds)
    return up, {n: None for n, kind in enumerate(up) if kind == "constexpr"}


def _arguments(case: Case, launch: LaunchConfig, arch: Architecture) -> tuple[object, dict[str, object]]:
    """Return the kernel and its arguments before the sizes, with None for the groups of Q, D, and X."""
    gradient = _POINTER[case.dtype]
    up, _ = _upstream(case)
    weight = "*fp32" if case.options else "constexpr"
    lists = "*i32" if case.lists or case.kernel == "maxsim_join_pieces" else "constexpr"
    tile_lists = TileBucketArgs(lists, lists, "i32", "i32", "i32")
    pieces = "*fp32" if case.pieces or case.kernel == "maxsim_join_pieces" else "constexpr"
    if case.kernel == "maxsim_forward" and case.ragged:
        return generic_forward.maxsim_forward_packed, _forward_arguments(case, launch, arch)
    if case.kernel == "maxsim_forward":
        return generic_forward.maxsim_forward, _forward_arguments(case, launch, arch)
    if case.kernel == "maxsim_forward_soft":
        tau = "*fp32" if case.options else "fp32"
        found = _forward_arguments(case, launch, arch) | {"tau": tau, "terms": "constexpr"}
        out: tuple = OutputArgs("*fp32", "*fp32" if case.argmax else "constexpr")
        if case.sections:
            out = SoftSplitArgs("*fp32", "*i32" if case.options else "constexpr", "i32", "i32")
        names = "Q", "D", "tiles", "out", "tau", "sizes", "d"
        return soft_forward.maxsim_forward_soft, {name: {**found, "out": out}[name] for name in names}
    if case.kernel in SOFT:
        sizes = "i32", "i32", "*fp32", *["i32"] * 6
        tau, of_queries = "*fp32" if case.options else "fp32", case.kernel != "maxsim_soft_documents"
        tiles, config = "constexpr", launch.config
        alone = (
            arch.has_descriptors and config.SINGLE_STEP and not case.options and case.d * case.dtype.itemsize % 16 == 0
        )
        if alone and (of_queries or not case.candidates):
            block = [1] * of_queries + [config.BN, config.BD]
            tiles = f"tensordesc<{gradient.removeprefix('*')}{block}>"
        found = {"Q": None, "D": None, "tiles": tiles, "up": SoftUpstreamArgs("*fp32", *sizes), "tau": tau}
        if of_queries:
            found |= dict.fromkeys(("sums", "weights", "spreads"), "constexpr")
            wanted = {"sums": "*fp32", "weights": weight}
            found |= {"spreads": "*fp32"} if case.kernel == "maxsim_soft_spreads" else wanted
            found |= {"documents_per_part": "i32", "d": "i32"}
            return soft_backward.maxsim_soft_queries, found
        grad = "*fp32" if case.normalize and not config.SINGLE_STEP else gradient
        return soft_backward.maxsim_soft_documents, found | {"grad": grad, "d": "i32"}
    if case.kernel == "maxsim_grad_queries":
        counts = _counts(case) if case.stored and case.ragged else "constexpr"
        found = {"Q": None, "D": None, "up": up, "counts": counts}
        found |= {"grad_Q": gradient, "grad_weight": weight, "d": "i32"}
        return backward_queries.maxsim_grad_queries, found
    if case.kernel == "maxsim_grad_query_parts":
        found = {"Q": None, "D": None, "up": up, "sums": "*fp32"}
        found |= dict.fromkeys(("share", "count", "first_query", "d"), "i32")
        return backward_queries.maxsim_grad_query_parts, found
    if case.kernel == "maxsim_grad_documents":
        found = {"Q": None, "D": None, "up": up, "lists": tile_lists, "rows": "i32"}
        found |= {"pieces": PartialSumArgs(pieces, "i32"), "grad_D": gradient, "d": "i32"}
        return dense_documents.maxsim_grad_documents, found
    if case.kernel == "maxsim_grad_long_documents":
        found = {"Q": None, "D": None, "up": up, "grad_D": gradient, "rows": "i32", "d": "i32", "TILE": "constexpr"}
        return dense_documents.maxsim_grad_long_documents, found
    if case.kernel == "maxsim_grad_packed_documents":
        bounds = TilePairArgs("*i32", *(("i32" if case.chunks else "constexpr",) * 3))
        found = {"Q": None, "D": None, "up": up, "bounds": bounds}
        found |= {"lists": PackedBucketArgs("*i32", "*i32", "i32", "i32") if _uses_lists(case) else "constexpr"}
        found |= {"partial": pieces, "grad_D": gradient, "d": "i32"}
        return packed_documents.maxsim_grad_packed_documents, found
    if case.kernel == "maxsim_grad_shared_tiles":
        shared = SharedTileArgs("*i32", "*i32", "constexpr")
        found = {"Q": None, "D": None, "up": up, "shared": shared, "grad_D": gradient, "d": "i32"}
        return packed_sparse.maxsim_grad_shared_tiles, found | {"TILE": "constexpr"}
    if case.kernel == "maxsim_grad_disjoint_documents":
        shared = SharedTileArgs("*i32", "*i32", "*i64")
        found = {"Q": None, "D": None, "up": up, "shared": shared, "grad_D": gradient, "d": "i32", "rounds": "i32"}
        return packed_sparse.maxsim_grad_disjoint_documents, found | {"TILE": "constexpr"}
    if case.kernel == "maxsim_list_packed_argmax":
        found = {"up": up, "lists": PackedBucketArgs("*i32", "*i32", "i32", "i32")}
        return packed_documents.maxsim_list_packed_argmax, found
    if case.kernel == "maxsim_join_packed_pieces":
        found = {"D": None, "partial": "*fp32", "grad_D": gradient} | dict.fromkeys(("pieces", "Td", "d"), "i32")
        return packed_documents.maxsim_join_packed_pieces, found
    if case.kernel == "maxsim_ragged_items":
        segments, _ = _segments(case)
        names = "Nq", "K", "Tq", "Td", "count", "max_seqlen_q", "stride_q", "stride_k"
        found = {"segments": segments, "items": "*i64", "query": "*i32"} | dict.fromkeys(names, "i32")
        return pair_kernels.maxsim_ragged_items, found | {"CANDIDATES": "constexpr"}
    if case.kernel == "maxsim_sort_items":
        found = {"items": "*i64", "out": "*i64", "reach": "constexpr" if case.pairs else "*i64"}
        found |= {
            "zeros": ZeroFillArgs(gradient, "i64", "*i32", "i32") if case.candidates else "constexpr",
            "count": "i32",
        }
        return pair_kernels.maxsim_sort_items, found | {"KEY": "constexpr"}
    if case.kernel == "maxsim_find_starts":
        found = {"keys": "*i64", "reach": "constexpr" if case.pairs else "*i64", "starts": "*i32"}
        names = "count", "start_count", "step", "limit", "rounds"
        return pair_kernels.maxsim_find_starts, found | dict.fromkeys(names, "i32")
    if case.kernel == "maxsim_grad_sparse_documents":
        found = {"Q": None, "D": None, "up": up, "grad_D": gradient, "rows": "i32", "tokens": "i32", "d": "i32"}
        return sparse_documents.maxsim_grad_sparse_documents, found
    if case.kernel == "maxsim_join_pieces":
        found = {"D": None, "up": up, "lists": tile_lists, "rows": "i32", "pieces": PartialSumArgs(pieces, "i32")}
        return dense_documents.maxsim_join_pieces, found | {"grad_D": gradient, "d": "i32"}
    if case.kernel == "maxsim_count_argmax":
        return buckets.maxsim_count_argmax, {"up": up, "lists": tile_lists, "rows": "i32"}
    if case.kernel == "maxsim_list_argmax":
        found = {"up": up, "lists": tile_lists, "rows": "i32", "ONE_BLOCK": "constexpr"}
        return buckets.maxsim_list_argmax, found
    if case.kernel == "maxsim_scan_counts":
        return buckets.maxsim_scan_counts, {"starts": "*i32", "count": "i32"}
    if case.kernel == "maxsim_row_norms":
        return token_norms.maxsim_row_norms, {"Q": None, "norms": "*fp32"} | {n: "i32" for n in ("Lq", "d")}
    if case.kernel == "maxsim_round_rows":
        found = {"X": None, "norms": "*fp32" if case.normalize else "constexpr", "out": "*fp16", "scales": "*fp32"}
        return rounding.maxsim_round_rows, found | dict.fromkeys(("rows", "L", "d"), "i32")
    if case.kernel == "split_tokens":
        found = {"X": None, "out": "*fp16", "scales": "*fp32"} | dict.fromkeys(("rows", "L", "room", "d"), "i32")
        found["SCALE_TILE"] = "constexpr"
        return fp32.split_tokens, found
    if case.kernel == UNIT_COUNTS:
        counts = _counts(case)
        found = {"D": None, "counts": counts, "scale": "*fp32", "minimum": counts.minimum, "Td": "i32", "d": "i32"}
        return stored.maxsim_unit_counts, found
    if case.kernel == KEEP:
        found = {"D": None, "data": "*i8", "scale": "*fp32"} | dict.fromkeys(("documents", "K", "Ld", "d"), "i32")
        return stored.maxsim_keep_int8, found
    if case.kernel == QUERY_TERMS:
        return stored.maxsim_query_terms, {"Q": None, "out": "*i8", "scales": "*fp32", "rows": "i32", "d": "i32"}
    if case.kernel == "maxsim_scatter":
        found = {"Q": None, "D": None, "up": up, "sum_Q": "*fp32", "sum_D": "*fp32", "d": "i32"}
        return backward_unified.maxsim_scatter, found | {"K_per_program": "i32"}
    parts = ("i32", "i32") if case.parts else ("constexpr", "constexpr")
    sums = RowSumArgs("*fp32", "i32", "i32", "*fp32" if case.stored else "constexpr", *parts)
    found = {"X": None, "Q": None, "sums": sums, "grad": gradient, "grad_weight": weight}
    return backward_unified.maxsim_finish, found | {"d": "i32"}


def _count_tile_tokens(case: Case, arch: Architecture) -> int:
    if case.kernel == "maxsim_grad_long_documents":
        return backward_configs.choose_long_tile_tokens(arch, case.documents, 1, 264)
    return backward_configs.choose_shared_tile_rows(arch)


def source(case: Case, arch: Architecture) -> tuple[ASTSource, LaunchConfig]:
    """Return the kernel source with its signature, specialized as a launch with 16-byte aligned tensors."""
    launch = _launch(case, arch)
    queries, query_constants = _queries(case)
    documents, document_constants = _documents(case)
    kernel, arguments = _arguments(case, launch, arch)
    groups = {"Q": queries, "D": documents, "X": documents}
    arguments = {name: groups[name] if kind is None else kind for name, kind in arguments.items()}
    if case.kernel not in ITEMS:
        arguments["C"] = "constexpr"

    names = list(arguments)
    constants: dict[tuple[int, ...], object] = {}
    given = {
        "C": launch.config,
        "CANDIDATES": case.candidates,
        "KEY": 0,
        "SCALE_TILE": 64,
        "TILE": _count_tile_tokens(case, arch),
    }
    constants |= {(names.index(name),): value for name, value in given.items() if name in names}
    if "LEVELS" in arguments:
        constants[(names.index("LEVELS"),)] = _levels(case, arch)
    if "ONE_BLOCK" in arguments:
        constants[(names.index("ONE_BLOCK"),)] = case.Nq * case.Lq <= launch.config.BM
    aligned: list[tuple[int, ...]] = [(names.index("d"),)] if "d" in arguments and case.d % 16 == 0 else []
    for at, name in enumerate(names):
        group = arguments[name]
        if isinstance(group, tuple) and name not in groups:
            aligned += [(at, n) for n, kind in enumerate(group) if kind.startswith("*")]
            constants |= {(at, n): None for n, kind in enumerate(group) if kind == "constexpr"}
    if "rows" in arguments and case.kernel in LISTS and case.Nq * case.Lq % 16 == 0:
        aligned.append((names.index("rows"),))
    for name, group in (("Q", query_constants), ("D", document_constants), ("X", document_constants)):
        if name in arguments:
            constants |= {(names.index(name), k): v for k, v in group.items()}
            aligned += [(names.index(name), k) for k in range(4) if k not in group and (k == 0 or case.d % 16 == 0)]
    constants |= {
        (names.index(n),): None
        for n, v in arguments.items()
        if v == "constexpr" and n not in (*given, "ONE_BLOCK", "LEVELS")
    }
    aligned += [(i,) for i, v in enumerate(arguments.values()) if isinstance(v, str) and v.startswith("*")]
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    return ASTSource(fn=kernel, signature=arguments, constexprs=constants, attrs=attributes), launch


def fingerprint(case: Case, arch: Architecture) -> str:
    """Return the compiler input as text, which is equal for two cases that compile to the same kernel."""
    src, launch = source(case, arch)
    return repr((case.kernel, arch.name, launch.options(arch), src.signature, src.constants, sorted(src.attrs)))


def compile_for(case: Case, arch: Architecture) -> Compiled:
    """Compile a case for an architecture and return its resources."""
    src, launch = source(case, arch)
    compiled = compile_as_launched(src, target(arch), launch.options(arch))
    if arch.is_amd:
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text).group(1))  # type: ignore[union-attr]
        spills = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text).group(1))  # type: ignore[union-attr]
    else:
        text = compiled.asm["ptx"]
        registers, spills = cuda_resources(compiled.asm["cubin"])
    orders = frozenset(re.findall(r"kWidth = \d+", compiled.asm["ttgir"]))
    return Compiled(text, compiled.metadata.shared, registers, spills, orders)
