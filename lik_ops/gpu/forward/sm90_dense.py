"""Plans of forward calls for the Gluon kernels: sm_90, many query rows. `GluonPlan` is their base.

`maxsim_forward_sm90` supports up to 128 features without a document mask, and `maxsim_forward_sm90_large_d` more.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ...core.arguments import add_batch_axes
from ...core.segments import DenseArgs
from ...csrc_triton.common import fp32, token_norms
from ...csrc_triton.common.arguments import EncodedDocumentArgs, KernelConfig, OutputArgs, SizeArgs, Sm90Config
from ...csrc_triton.forward.generic import rescore, row_sums
from .. import generic_choices
from ..runtime import gluon, launcher
from ..runtime.arguments import architecture, check_grid, make_document_args, make_query_args
from ..tuning import architectures, sm90_configs
from .generic import make_generic_plan
from .plans import DensePlan

_log = logging.getLogger("lik_ops")
_MAX_WORKSPACE_BYTES = 32 * 2**20
_MAX_TERM_BYTES = 128 * 2**20  # fp16 terms of fp32 documents
_SUM_BLOCK_DOCUMENTS = 256
_SPLIT_BLOCK_ROWS = 32  # rows of a program of `split_tokens`
_SECOND_LAUNCH_BLOCK = 1024  # results of a program that replaces some of them
_STEP_FEATURES = 128  # `maxsim_forward` sums the squares of so many features at a time if d is larger


class GluonPlan(DensePlan):
    """A call of a Gluon kernel that falls back to the generic kernel for unsupported tensors or compile errors."""

    instead = "maxsim_forward"
    normalize = False

    def scores(self, *call: Any) -> Tensor:
        """Return the scores, computed by the generic kernel if the Gluon kernel fails."""
        return self._run_with_fallback(*call)

    def _run_fast(self, *call: Any) -> Tensor | None:
        return super().scores(*call) if self._supports_tensors(call[1], call[2]) else None

    def _run_generic(self, shape: tuple[int, ...], *tensors: Any) -> Tensor:
        *inputs, argmax = tensors
        x = add_batch_axes(*inputs)
        return make_generic_plan(*x[:2], self.normalize, self.argmax_dtype).scores(shape, *x, argmax)

    def _supports_tensors(self, Q: Tensor, D: Tensor) -> bool:
        """Return whether the tensors have the alignment that TMA needs."""
        return D.data_ptr() % 16 == 0


class Sm90Plan(GluonPlan):
    """A call of `maxsim_forward_sm90`.

    Row tiles hold 256 query tokens, of as many queries as fit. A longer query is scored in parts of 128 tokens. Few
    query rows are one tile, and each of two warp groups scores its own documents against the tile.

    The scores of the parts are stored in a workspace, and a second launch adds them, for a chunk of documents at a
    time. The inverse norms that the kernel reads are also stored in a workspace.
    """

    def __init__(self, choice: sm90_configs.Sm90Choice, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(Q, D, argmax_dtype)
        self.choice, self.normalize, kernels = choice, choice.config.NORMALIZE, gluon.require_kernels()
        self.kernel = getattr(kernels.large_d if choice.has_large_d else kernels.dense, choice.kernel)
        C = choice.config
        features = C.BD if isinstance(C, Sm90Config) else kernels.large_d.STEP_FEATURES.value
        self.describe_tokens = gluon.make_descriptor_factory((C.BN, features), D.dtype)
        if choice.has_large_d:
            block = sm90_configs.LARGE_D_TILE_ROWS // 2 // C.ROWS_PER_QUERY, C.ROWS_PER_QUERY, features
            self.describe_queries = gluon.make_descriptor_factory(block, Q.dtype)
        self.norm_features = _STEP_FEATURES if choice.has_large_d else features
        self.norms_of_document = architectures.cdiv(self.sizes.Ld, C.BN) * C.BN if choice.reads_norms else 0
        sums_of_document = self.sizes.Nq * choice.parts if choice.parts > 1 or choice.reads_norms else 0
        query_norms = sm90_configs.MAX_QUERY_NORMS if choice.has_large_d and choice.reads_norms else 0
        room = _MAX_WORKSPACE_BYTES // 4 - query_norms
        max_documents = room // max(1, sums_of_document + self.norms_of_document)
        self.chunk = min(max(max_documents, 1), self.sizes.K)  # documents
        self.second: tuple[KernelConfig, dict[str, Any]] | None = None  # of a launch of `rescore.py`
        _log.debug("%s for %s: %s", choice.kernel, self.sizes, choice)

    def _score(self, x: DenseArgs, scores: Tensor, argmax: Tensor | None) -> None:
        if self.chunk == self.sizes.K:
            return self._launch(x, scores, argmax, self.sizes)
        for k in range(0, self.sizes.K, self.chunk):
            part = slice(k, k + self.chunk)
            part_argmax, part_args = None if argmax is None else argmax[part], self._part(x, part)
            self._launch(part_args, scores[:, part], part_argmax, self.sizes._replace(K=len(part_args.D)))

    def _part(self, x: Any, part: slice) -> Any:
        """Return the arguments of a slice of the documents."""
        return x._replace(D=x.D[part], d_mask=None if x.d_mask is None else x.d_mask[part])

    def _launch(self, x: DenseArgs, scores: Tensor, argmax: Tensor | None, sizes: SizeArgs) -> None:
        """Launch the kernel, and the sums of parts if necessary."""
        parts, Nq, K = self.choice.parts, sizes.Nq, sizes.K
        is_direct = parts == 1 and K == self.sizes.K
        sums = scores if is_direct else torch.empty((Nq * parts, K), dtype=torch.float32, device=self.device)
        queries = make_query_args(x.Q, x.q_mask, x.q_weight)
        tensors = self._tensors(x, *self._documents(x, sizes), sums, argmax)
        args = (queries, *tensors, sizes, self.d, parts, self.choice.config)
        grid = (min(self.choice.programs, self.choice.row_tiles * K),)
        launcher.launch(self.kernel, grid, args, self.choice.launch_options)
        self._finish(x, queries, sums, argmax, sizes)
        if not is_direct:
            args = (sums, scores, scores.stride(0), K, parts, self.choice.tree, _SUM_BLOCK_DOCUMENTS)
            grid = check_grid(Nq * architectures.cdiv(K, _SUM_BLOCK_DOCUMENTS))
            launcher.launch(row_sums.maxsim_sum_parts, grid, args, {"num_warps": 4})

    def _finish(self, x: DenseArgs, queries: Any, sums: Tensor, argmax: Tensor | None, sizes: SizeArgs) -> None:
        """Launch what has to follow the kernel before its scores are read."""

    def _resolve_argmax(self, x: DenseArgs, queries: Any, argmax: Tensor, sizes: SizeArgs) -> None:
        """Launch the search for each argmax that the kernel left UNRESOLVED."""
        assert self.second is not None
        (config, options), block = self.second, _SECOND_LAUNCH_BLOCK
        args = (queries, make_document_args(x.D, x.d_mask), argmax, sizes, self.d, block, config)
        grid = check_grid(architectures.cdiv(sizes.K * sizes.Nq * sizes.Lq, block))
        launcher.launch(rescore.maxsim_resolve_argmax, grid, args, options)

    def _supports_tensors(self, Q: Tensor, D: Tensor) -> bool:
        # The generic kernel loads unaligned rows feature by feature, and sums their squares in another order.
        return super()._supports_tensors(Q, D) and not (self.normalize and Q.data_ptr() % 16)

    def _documents(self, x: DenseArgs, sizes: SizeArgs) -> tuple[Any, Any]:
        """Return the descriptor of the document tokens, and their norms or scales."""
        return self._tokens(x.D, sizes), self._norms(x, sizes)

    def _tokens(self, D: Tensor, sizes: SizeArgs) -> Any:
        """Return a descriptor of all document tokens as rows."""
        return self.describe_tokens(D, [sizes.K * sizes.Ld, self.d], [self.d, 1])

    def _norms(self, x: DenseArgs, sizes: SizeArgs) -> tuple[Any, Tensor | None]:
        """Return inverse norms of document tokens and, for the large-d kernel with `normalize`, of query tokens.

        A separate launch computes them. Both are None if the kernel does not read norms.
        """
        if not self.choice.reads_norms:
            return None, None
        has_large_d, BN = self.choice.has_large_d, self.choice.config.BN
        documents = torch.empty(sizes.K * self.norms_of_document, dtype=torch.float32, device=self.device)
        needs_query_norms = has_large_d and self.normalize
        queries = (
            torch.empty((sizes.Nq, sizes.Lq), dtype=torch.float32, device=self.device) if needs_query_norms else None
        )
        tiles = len(documents) // BN + (sizes.Nq * architectures.cdiv(sizes.Lq, BN) if needs_query_norms else 0)
        operands = make_query_args(x.Q, None, None), make_document_args(x.D, x.d_mask)
        args = (*operands, queries, documents, sizes, self.d, BN, self.norm_features, self.normalize, sizes.Ld < BN)
        launcher.launch(token_norms.maxsim_tile_norms, (tiles,), args, {"num_warps": 4})
        return gluon.make_vector_descriptor(documents, BN), queries

    def _tensors(self, x: DenseArgs, tokens: Any, norms: tuple, sums: Tensor, argmax: Tensor | None) -> tuple:
        """Return the kernel arguments between the queries and the sizes."""
        return tokens, norms[0], self._make_encoded_args(x), OutputArgs(sums, argmax)

    def _make_encoded_args(self, x: Any) -> EncodedDocumentArgs | None:
        """Return the documents as tensors if the kernel reads some tokens without the descriptor, else None."""
        splits = isinstance(self.choice.config, Sm90Config) and self.choice.config.FP32_TERMS > 0
        return EncodedDocumentArgs(x.D, None, 0, 0) if splits else None


class Sm90Fp32Plan(Sm90Plan):
    """A call of `maxsim_forward_sm90` for fp32 tokens and many query rows.

    A second launch replaces the scores of rows and tokens that fp16 terms cannot represent.
    """

    def __init__(self, choice: sm90_configs.Sm90Choice, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(choice, Q, D, argmax_dtype)
        argmax, rows = argmax_dtype is not None, choice.config.ROWS_PER_QUERY
        self.second = _configure_second_launch(Q, D, self.normalize, argmax, rows)
        C = choice.config
        assert isinstance(C, Sm90Config)
        if C.PRECOMPUTED_TERMS:
            self.describe_tokens = gluon.make_descriptor_factory((C.BN, C.BD), torch.float16)
            max_documents = _MAX_TERM_BYTES // (C.FP32_TERMS * 2 * C.BD * self.sizes.Ld)
            self.chunk = min(self.chunk, max(1, max_documents))

    def _documents(self, x: DenseArgs, sizes: SizeArgs) -> tuple[Any, Any]:
        """Return the descriptors of the documents, split into terms by another launch with many query rows."""
        C = self.choice.config
        if not (isinstance(C, Sm90Config) and C.PRECOMPUTED_TERMS):
            return super()._documents(x, sizes)
        rows = sizes.K * sizes.Ld
        terms = torch.empty((C.FP32_TERMS * rows, C.BD), dtype=torch.float16, device=self.device)
        padded_tokens = sizes.K * architectures.cdiv(sizes.Ld, C.BN) * C.BN
        scales = torch.empty(padded_tokens, dtype=torch.float32, device=self.device)
        assert self.second is not None
        config = self.second[0]._replace(BM=_SPLIT_BLOCK_ROWS, BD=C.BD)
        documents = make_document_args(x.D, x.d_mask)
        args = (documents, terms, scales, rows, sizes.Ld, rows, self.d, C.BN, config)
        launcher.launch(fp32.split_tokens, (architectures.cdiv(rows, _SPLIT_BLOCK_ROWS),), args, {"num_warps": 4})
        tiles = self.describe_tokens(terms, list(terms.shape), [C.BD, 1])
        return tiles, (gluon.make_vector_descriptor(scales, C.BN), None)

    def _finish(self, x: DenseArgs, queries: Any, sums: Tensor, argmax: Tensor | None, sizes: SizeArgs) -> None:
        assert self.second is not None
        (config, options), block = self.second, _SECOND_LAUNCH_BLOCK
        documents = make_document_args(x.D, x.d_mask)
        args = (queries, documents, sums, argmax, sizes, self.d, self.choice.parts, block, config)
        grid = check_grid(architectures.cdiv(sums.numel(), block))
        launcher.launch(rescore.maxsim_rescore, grid, args, options)
        if argmax is not None:
            self._resolve_argmax(x, queries, argmax, sizes)


class Sm90LargeDPlan(Sm90Plan):
    """A call of `maxsim_forward_sm90_large_d`.

    Row tiles hold 128 query tokens, of as many queries as fit. A longer query is scored in parts of 64 tokens. A second
    launch finds the argmax of maxima that are NaN or -inf.
    """

    def __init__(self, choice: sm90_configs.Sm90Choice, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(choice, Q, D, argmax_dtype)
        if argmax_dtype is not None:
            self.second = _configure_second_launch(Q, D, self.normalize, True, None)

    def _supports_tensors(self, Q: Tensor, D: Tensor) -> bool:
        return (Q.data_ptr() | D.data_ptr()) % 16 == 0

    def _tensors(self, x: DenseArgs, tokens: Any, norms: tuple, sums: Tensor, argmax: Tensor | None) -> tuple:
        rows = self.describe_queries(x.Q, list(x.Q.shape), list(x.Q.stride()))
        return rows, tokens, *norms, OutputArgs(sums, argmax)

    def _finish(self, x: DenseArgs, queries: Any, sums: Tensor, argmax: Tensor | None, sizes: SizeArgs) -> None:
        if argmax is not None:
            self._resolve_argmax(x, queries, argmax, sizes)


def _configure_second_launch(
    Q: Tensor, D: Tensor, normalize: bool, argmax: bool, rows: int | None
) -> tuple[KernelConfig, dict[str, Any]]:
    """Return configuration and launch options of a kernel of `rescore.py`.

    `rows` are the rows of a query that the first launch adds, or None if only the argmax matters.
    """
    choice = generic_choices.choose_generic(Q, D, normalize, argmax, architecture(Q.device))
    C = choice.launch.config
    rows = rows or C.ROWS_PER_QUERY
    config = C._replace(BM=max(C.BM, rows), ROWS_PER_QUERY=rows, LONG_QUERIES=False, PERSISTENT=False)
    return config, choice.launch.options(choice.arch)
