"""Forward of packed layouts in the Triton backend: packed tokens, candidate lists, and pair lists."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...core.plan_cache import PlanCache, plans
from ...core.segments import PackedArgs
from ...core.settings import get_forced_kernel
from ...csrc_triton.common.arguments import (
    CodecDequantArgs,
    DequantArgs,
    DocumentArgs,
    KernelConfig,
    OutputArgs,
    PackedSizeArgs,
    QueryArgs,
    SegmentArgs,
    TermArgs,
)
from ...csrc_triton.formats.bits import get_code_bits, has_sign_queries
from ...csrc_triton.formats.encoded import maxsim_query_terms
from ...csrc_triton.forward.generic.kernel import maxsim_forward_packed
from ...formats.table import BINARY_QUERIES, OPERAND_FORMATS
from .. import choose, generic_choices
from ..generic_choices import PackedTileKey, SplitChoice, choose_tile_tokens
from ..runtime import launcher
from ..runtime.arguments import (
    architecture,
    check_grid,
    choose_row_offset_width,
    current_device,
    get_feature_reach,
    is_tf32_allowed,
    make_descriptor,
    make_packed_document_args,
    make_packed_query_args,
    use_device,
)
from ..runtime.capture import Calls
from ..runtime.memory import allocate_tensor, is_deterministic, makers, raw_stream
from ..tuning import architectures, forward_configs
from ..tuning.sm90_configs import RowMaximaChoice
from . import sm90_packed as rows
from . import splits
from .plans import Plan

AnyDequantArgs: TypeAlias = DequantArgs | CodecDequantArgs
_log = logging.getLogger("lik_ops")
_INT32_MAX = 2**31 - 1
_MAX_TILES = 4096
_MAX_DESCRIPTORS = 64  # cached for each plan
_TERM_ROWS = 16  # rows of a program of `maxsim_query_terms`
# Documents with lengths from which on many may be empty, as in the search of a subset that is a mask.
_MIN_EMPTY_DOCUMENTS = 2**19


class _CompiledTile:
    """A tile and the kernels that were compiled for it.

    Kernels are keyed by flags that mark tensors without 16-byte alignment, or by () if all tensors are aligned.
    """

    __slots__ = ("bound", "config", "constants", "launch", "options")

    def __init__(
        self, launch: architectures.LaunchConfig, levels: int, d: int, arch: architectures.Architecture
    ) -> None:
        self.launch, self.config, self.options = launch, launch.config, launch.options(arch)
        self.constants = d, levels, launch.config
        self.bound: dict[tuple[bool, ...], launcher.CompiledKernel] = {}


class PackedPlan(Plan):
    """A forward of tensors with given metadata and any number of rows, with everything derived from the metadata.

    `stored` is `KernelConfig.ENCODING`, or "" for documents of the query dtype. Calls with encoded documents have
    `DequantArgs`.

    Packed calls seldom have the same number of rows twice. Tiles are therefore cached by the values that they depend
    on, and the descriptor of D by its address and number of rows.
    """

    instead = "maxsim_forward_packed"

    def __init__(self, c: PackedArgs, normalize: bool, argmax_dtype: torch.dtype | None, stored: Any) -> None:
        super().__init__(c.Q, argmax_dtype)
        self.arch, self.normalize, self.stored = architecture(c.Q.device), normalize, stored
        self.pairs, self.single = c.pairs is not None, c.candidates or c.pairs is not None  # one query per program
        has_lengths = c.offsets is not None and c.lengths is not None
        self.may_be_empty = has_lengths and not (self.single or argmax_dtype is not None)
        self.present_positions = [n for n, x in enumerate(c.tensors) if x is not None]
        queries, documents = make_packed_query_args(c), make_packed_document_args(c, masked=True)
        self.query_strides = queries[1:4], queries[5:7], queries[8:]
        self.document_strides = documents[1:5], documents[6:]
        self.features, row = get_feature_reach(c.Q, c.D), abs(c.D.stride(-2))
        # Maximum rows of D with which only document offsets need 64 bits: see `choose_offset_width`.
        self.narrow = (_INT32_MAX - self.features) // row - 64 if row else 2**63
        self.uses_descriptor = generic_choices.supports_packed_descriptor(c, self.arch, stored)
        is_dense, argmax = c.cu_seqlens_q is None, argmax_dtype is not None
        self.min_rows = forward_configs.get_min_rows_per_query(self.arch, c.Q.dtype, is_dense=is_dense, argmax=argmax)
        self.forced = get_forced_kernel()
        args, is_generic = self._make_choice_args(c), self.forced == "generic"
        self.by_rows = not is_generic and choose.supports_packed_row_maxima(args) is None
        self.in_sections = not is_generic and choose.supports_packed_splits(args) is None
        self.chosen, self.tiles = PlanCache(_MAX_TILES), PlanCache(_MAX_TILES)
        self.descriptors: dict[tuple, tuple] = {}
        self.term_kernels: dict[tuple[int, bool], launcher.CompiledKernel] = {}  # by `BD` and misalignment of Q
        self.calls, self.makers = Calls(), makers(self.device)

    def forward(self, c: PackedArgs, counts: AnyDequantArgs | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the scores, and the argmax if `argmax_dtype` is not None.

        Args:
            c: the call.
            counts: dequantization arguments of encoded documents, else None.
        """
        return self._run_with_fallback(c, counts)

    def forward_ragged(self, c: PackedArgs) -> tuple[Tensor, Tensor]:
        """Return the scores and the argmax of an operator's call. Without `argmax_dtype` the argmax is empty."""
        scores, argmax = self.forward(c)
        return scores, allocate_tensor((0,), (1,), torch.int32, self.device) if argmax is None else argmax

    def _make_choice_args(self, c: PackedArgs) -> choose.PackedChoiceArgs:
        """Return the arguments of the rules in `choose.PACKED_RULES`."""
        return choose.PackedChoiceArgs(c, self.normalize, self.argmax_dtype is not None, self.stored, self.arch)

    def _choose_fast(self, c: PackedArgs) -> RowMaximaChoice | SplitChoice | None:
        """Return the row maxima or split choice of a call, or None, cached by the sizes that it depends on."""
        by_rows = self.by_rows and 0 < c.Td <= _INT32_MAX and not c.D.data_ptr() & 15
        is_long = self.in_sections and choose.has_long_documents(c, self.normalize, self.stored)
        if not (by_rows or is_long or self.forced == "sm90"):
            return None
        # Without long documents, `c.Td` is irrelevant.
        key = (by_rows, *c.sizes) if is_long else (by_rows, c.queries, c.columns, c.Tq)
        entry = self.chosen.get(key)
        if entry is None:
            choice = choose.apply_rules(choose.PACKED_RULES, self._make_choice_args(c))
            entry = self.chosen.store(key, choice or False)
        return entry or None

    def _run_fast(self, c: PackedArgs, counts: AnyDequantArgs | None = None) -> tuple[Tensor, Tensor | None] | None:
        """Return the result of the row maxima or split kernels, or None if neither is chosen.

        Calls with encoded documents are captured as a whole by their callers.
        """
        # The key of the plan and these sizes determine all shapes and strides, because rows are evenly spaced.
        key = *c[10:], c.q_each, c.d_each
        replay = self.calls.replay(key) if self.by_rows or self.in_sections else None
        result = None if replay is None else replay(c[:10])
        if result is not None:
            return result if len(result) == 2 else (result[0], None)
        choice, dtype = self._choose_fast(c), self.argmax_dtype
        if choice is None:
            return None

        def compute() -> tuple[Tensor, ...]:
            if isinstance(choice, SplitChoice):
                return self._run_splits(choice, c, counts)
            queries, _, segments = self._group_args(c, c.tensors)
            return rows.forward_row_maxima(choice, c, QueryArgs._make(queries), SegmentArgs._make(segments), dtype)

        if counts is None:
            scores, *argmax = self.calls.run(key, c.tensors, self.device, compute)
        else:
            scores, *argmax = compute()
        return scores, argmax[0] if argmax else None

    def _run_splits(self, choice: SplitChoice, c: PackedArgs, counts: AnyDequantArgs | None) -> tuple[Tensor, ...]:
        """Return the scores and, if requested, the argmax of documents that are cut into splits."""
        argmax = None if self.argmax_dtype is None else self._allocate_argmax(c)
        config = choice.launch.config
        terms = self._terms(c, config) if config.INT8_TERMS else None
        return splits.forward_splits(choice, c, make_packed_query_args(c), argmax, terms, counts)

    def _run_generic(self, c: PackedArgs, counts: AnyDequantArgs | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the result of `maxsim_forward_packed`."""
        argmax = None if self.argmax_dtype is None else self._allocate_argmax(c)
        return self._scores(c, argmax, counts), argmax

    def _allocate_argmax(self, c: PackedArgs) -> Tensor:
        """Return memory for the argmax, with -1 where no program writes.

        No program writes between queries, after their lengths, and for pairs that do not exist.
        """
        argmax = torch.empty(c.argmax_shape(), dtype=self.argmax_dtype, device=self.device)
        return argmax if c.has_no_gaps and not self.pairs else argmax.fill_(-1)

    def _make_tile(self, c: PackedArgs, key: tuple) -> _CompiledTile:
        """Return the tile for the fields of a `PackedTileKey` that are not cached yet."""
        launch, levels = generic_choices.choose_packed(
            c, PackedTileKey(*key), self.normalize, self.argmax_dtype is not None, self.arch, self.stored
        )
        _log.debug("maxsim_forward_packed for %s: %s", c.scores_shape(), launch)
        return self.tiles.store(key, _CompiledTile(launch, levels, self.d, self.arch))

    def _scores(self, c: PackedArgs, argmax: Tensor | None, counts: AnyDequantArgs | None) -> Tensor:
        """Return the scores and fill `argmax`, with a direct launch if the kernel is already compiled."""
        queries, columns, Tq, Td, max_seqlen_q = c.queries, c.columns, c.Tq, c.Td, c.max_seqlen_q
        if Tq > _INT32_MAX:
            raise ValueError(f"lik_ops: Q: {Tq} packed query tokens; at most 2^31 - 1 at a time")
        Lq = max(self.min_rows, architectures.cdiv(Tq, queries or 1))
        wide = 2 if self.features > _INT32_MAX else int(Td > self.narrow)
        documents = c.items
        has_few_documents = documents <= forward_configs.MAX_RESIDENT_DOCUMENTS
        may_be_empty = self.may_be_empty and columns >= _MIN_EMPTY_DOCUMENTS
        key: tuple = (queries, Lq, wide, has_few_documents, may_be_empty)
        if self.stored and not self.single:
            key = (*key, choose_tile_tokens(Td, columns))
        tile = self.tiles.get(key) or self._make_tile(c, key)
        shape: tuple[int, ...]
        strides: tuple[int, ...]
        if self.pairs:
            programs = documents
            shape, strides = (programs,), (1,)
        else:
            shape, strides = (queries, columns), (columns, 1)
            programs = documents if self.single else tile.launch.programs(queries, columns)
        pointers, pointer_bits = [0] * len(c.tensors), 0
        for n in self.present_positions:
            pointers[n] = pointer = c[n].data_ptr()  # type: ignore[union-attr]
            pointer_bits |= pointer
        count_ptrs, extras = None, []
        if counts is not None:
            count_ptrs = _get_pointers(counts)
            extras = [x.data_ptr() for x in counts if isinstance(x, Tensor)]
            for pointer in extras:
                pointer_bits |= pointer
        misaligned = tuple([pointer & 15 != 0 for pointer in (*pointers, *extras)]) if pointer_bits & 15 else ()
        terms = self._terms(c, tile.config) if tile.config.INT8_TERMS and programs else None
        bound = tile.bound.get(misaligned)
        if (
            bound is None
            or not 0 < programs <= _INT32_MAX
            or not _has_int32_sizes(c)
            or current_device() != self.index
            or launcher.has_launch_hooks()
        ):
            return self._launch_scores(c, argmax, counts, terms, tile, programs, misaligned)
        allocate_fast, allocate = self.makers
        scores = (allocate if is_deterministic() else allocate_fast)(shape, strides, torch.float32)
        descriptor: tuple = (None,)
        D = pointers[1]
        if self.uses_descriptor and not D & 15:
            descriptor = self.descriptors.get((bound, D, Td)) or self._descriptor(c, tile, bound, D)
        queries_of, documents_of, segments = self._group_args(c, pointers)
        argmax_pointer = None if argmax is None else argmax.data_ptr()
        out, sizes = (scores.data_ptr(), argmax_pointer), (queries, columns, Tq, Td, max_seqlen_q)
        term_ptrs = None if terms is None else _get_pointers(terms)
        args = (queries_of, documents_of, *descriptor, term_ptrs, count_ptrs, segments, out, sizes, *tile.constants)
        bound.direct(programs, 1, 1, raw_stream(self.index), args)  # type: ignore[misc]
        return scores

    def _launch_scores(
        self,
        c: PackedArgs,
        argmax: Tensor | None,
        counts: AnyDequantArgs | None,
        terms: TermArgs | None,
        tile: _CompiledTile,
        programs: int,
        misaligned: tuple[bool, ...],
    ) -> Tensor:
        """Return the scores with a launch that compiles the kernel if necessary."""
        scores = torch.empty(c.scores_shape(), dtype=torch.float32, device=self.device)
        if scores.numel() == 0:
            return scores
        queries, documents, segments = self._group_args(c, c.tensors)
        sizes = PackedSizeArgs(c.queries, c.columns, c.Tq, c.Td, c.max_seqlen_q)
        tiles = make_descriptor(c.D, tile.config) if self.uses_descriptor else None
        tokens = QueryArgs._make(queries), DocumentArgs._make(documents), tiles
        args = (*tokens, terms, counts, SegmentArgs._make(segments), OutputArgs(scores, argmax), sizes, *tile.constants)
        with use_device(self.device):
            bound = launcher.launch(maxsim_forward_packed, check_grid(programs), args, tile.options)
        if bound is not None and bound.direct is not None and _has_int32_sizes(c):
            tile.bound[misaligned] = bound
        return scores

    def _terms(self, c: PackedArgs, tile: KernelConfig) -> TermArgs:
        """Return the query rows as int8 terms, for the configuration of a tile."""
        config = make_terms_config(tile.BD, choose_row_offset_width(self.features), tile.ENCODING)
        out = torch.empty((2, c.Tq, config.BD), dtype=torch.int8, device=self.device)
        scales = torch.empty(c.Tq, dtype=torch.float32, device=self.device)
        queries, programs = (c.Q, *self.query_strides[0], *(None,) * 6), architectures.cdiv(c.Tq, _TERM_ROWS)
        key = config.BD, c.Q.data_ptr() & 15 != 0
        bound = self.term_kernels.get(key)
        if bound is not None and programs and current_device() == self.index and not launcher.has_launch_hooks():
            other_args = out.data_ptr(), scales.data_ptr(), c.Tq, self.d, config
            bound.direct(programs, 1, 1, raw_stream(self.index), (_get_pointers(queries), *other_args))  # type: ignore[misc]
        elif programs:
            args = (QueryArgs._make(queries), out, scales, c.Tq, self.d, config)
            with use_device(self.device):
                bound = launcher.launch(maxsim_query_terms, (programs,), args, {"num_warps": 4})
            if bound is not None and bound.direct is not None:
                self.term_kernels[key] = bound
        return TermArgs(out, scales, c.Tq)

    def _group_args(self, c: PackedArgs, tensors: Sequence) -> tuple[tuple, tuple, tuple]:
        """Return tensors or pointers as the fields of `QueryArgs`, `DocumentArgs`, and `SegmentArgs`.

        `tensors` has the order of `PackedArgs`.
        """
        Q, D, cu_seqlens_q, offsets, lengths, pairs, q_lengths, q_mask, d_mask, weight = tensors
        (rows, mask_strides, weight_strides), (d_rows, d_mask_strides) = self.query_strides, self.document_strides
        queries = (Q, *rows, q_mask, *mask_strides, weight, *weight_strides)
        segments = (cu_seqlens_q, offsets, lengths, pairs, q_lengths, c.q_each, c.d_each)
        return queries, (D, *d_rows, d_mask, *d_mask_strides), segments

    def _descriptor(self, c: PackedArgs, tile: _CompiledTile, bound: launcher.CompiledKernel, pointer: int) -> tuple:
        """Return the encoded descriptor of D.

        The encoding depends only on the kernel, the address of D, and the number of its rows.
        """
        if len(self.descriptors) >= _MAX_DESCRIPTORS:
            self.descriptors.clear()
        encoding = self.descriptors[bound, pointer, c.Td] = bound.encoded(0, make_descriptor(c.D, tile.config))
        return encoding


def make_terms_config(BD: int, wide: int, stored: Any = "") -> KernelConfig:
    """Return the configuration of `maxsim_query_terms` for documents encoded as `stored`.

    Fields that the kernel ignores are constant, so that it is compiled once for signs, for each number of bits, and for
    int8.
    """
    rows = KernelConfig(BM=_TERM_ROWS, BN=16, BD=BD, ROWS_PER_QUERY=_TERM_ROWS, WIDE_OFFSETS=wide)
    if has_sign_queries(stored):
        return rows._replace(ENCODING=OPERAND_FORMATS[BINARY_QUERIES].kernel)
    nbits = get_code_bits(stored)
    return rows._replace(ENCODING=OPERAND_FORMATS[f"rq{nbits}"].kernel) if nbits else rows


def _get_pointers(group: tuple) -> tuple:
    """Return a group with pointers for tensors."""
    return tuple([x.data_ptr() if isinstance(x, Tensor) else x for x in group])


def _has_int32_sizes(c: PackedArgs) -> bool:
    """Return whether D has rows for a descriptor and all sizes fit 32 bits.

    Other sizes need another compiled kernel.
    """
    return 0 < c.Td <= _INT32_MAX and (c.columns | c.max_seqlen_q) <= _INT32_MAX


def ragged_plan(
    c: PackedArgs,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
    stored: Any = "",
    counts: AnyDequantArgs | None = None,
) -> PackedPlan:
    """Return the cached plan for validated arguments with this metadata.

    Args:
        c: the call.
        normalize: whether tokens are normalized.
        argmax_dtype: dtype of the argmax, or None without an argmax.
        stored: `KernelConfig.ENCODING`.
        counts: dequantization arguments of encoded documents, else None.
    """
    tf32 = is_tf32_allowed(c.Q.dtype)
    tokens = [(x.dtype, x.stride()[-2:]) for x in (c.Q, c.D)]
    indices = [None if x is None else x.dtype for x in c.indices]
    per_token = [None if x is None else (x.dtype, x.stride(-1)) for x in c.per_token]
    dequant_dtypes = None if counts is None else tuple([x.dtype if isinstance(x, Tensor) else None for x in counts])
    options = c.candidates, normalize, argmax_dtype, tf32, stored, dequant_dtypes
    key = ("PackedPlan", *tokens, *indices, *per_token, c.Q.device, c.Q.shape[-1], *options)
    return plans.get(key) or plans.store(key, PackedPlan(c, normalize, argmax_dtype, stored))


def forward_ragged(
    tensors: Sequence, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Return fp32 scores and the argmax of a ragged operator.

    The argmax is empty if `argmax_dtype` is None.
    """
    c = PackedArgs.from_tensors(tensors, max_seqlen_q).for_kernel()
    return ragged_plan(c, normalize, argmax_dtype).forward_ragged(c)
