"""Soft MaxSim by Triton kernels.

The forward is the generic forward with a soft maximum. Long documents are scored in splits, which a second launch
merges. In the backward, each gradient is summed by the program that owns it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...core.arguments import make_metadata_key
from ...core.segments import DenseArgs
from ...csrc_triton.backward.arguments import RowSumArgs, SoftUpstreamArgs
from ...csrc_triton.backward.unified import maxsim_finish
from ...csrc_triton.common.arguments import OutputArgs, SizeArgs, SoftSplitArgs
from ...csrc_triton.soft.backward import maxsim_soft_documents, maxsim_soft_queries
from ...csrc_triton.soft.forward import maxsim_forward_soft
from ...csrc_triton.soft.splits import maxsim_soft_splits
from ...gpu.runtime import launcher
from ...gpu.runtime.arguments import (
    architecture,
    check_grid,
    choose_offset_width,
    has_even_stride,
    is_tf32_allowed,
    make_descriptor,
    make_document_args,
    make_query_args,
    make_size_args,
    supports_descriptor,
    use_device,
)
from ...gpu.runtime.capture import Calls
from ...gpu.tuning.architectures import KernelKey, LaunchConfig, cdiv
from ...gpu.tuning.backward_configs import configure_gather
from ...portable.blocks import split_to_fit
from . import configs as soft_configs
from . import gpu_sm90 as soft_sm90

# Limits of the workspace for fp32 sums. A single query or document may exceed them. The minimum keeps two programs busy
# on each SM of an H200. With less, SMs would idle.
_MIN_SUM_BYTES, _MAX_SUM_BYTES = 8 * 2**20, 24 * 2**20
_MAX_SPLIT_BYTES = 28 * 2**20  # soft maxima of splits; one document, or the candidates of one query, may have more
_MAX_PARTS = 4  # parts of the documents, whose sums for the queries are computed in parallel
_MIN_PART_TOKENS = 2048  # document tokens of a part
_INT32_MAX = 2**31 - 1
Temperature = Tensor | float
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
_captured_calls = Calls()


def forward_soft(x: DenseArgs, temperature: Temperature, normalize: bool, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the results of `lik::maxsim_soft_fwd`."""
    tau, number = (temperature, None) if isinstance(temperature, Tensor) else (None, temperature)
    key = (*make_metadata_key(*x), number, normalize, keep, is_tf32_allowed(x.Q.dtype))
    return _captured_calls.run(key, (*x, tau), x.Q.device, _run_forward, x, temperature, normalize, keep)


def _run_forward(x: DenseArgs, temperature: Temperature, normalize: bool, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the results of `forward_soft`, without capture."""
    Q, D = x.Q, x.D
    (Nq, K, Lq, _), candidates = make_size_args(Q, D), D.dim() == 4
    scores = torch.empty((Nq, K), dtype=torch.float32, device=Q.device)
    shape = ((Nq, K, Lq) if candidates else (K, Nq, Lq)) if keep else (0,)
    lse = torch.empty(shape, dtype=torch.float32, device=Q.device)
    if Nq * K == 0 or Lq == 0:
        return scores.zero_(), lse
    out = OutputArgs(scores, lse if keep else None)
    split_tokens = soft_configs.choose_split_tokens(D.shape[-2])
    with use_device(Q.device):
        if split_tokens is None:
            _launch_forward(x, out, temperature, normalize)
        else:
            _score_in_splits(x, out, temperature, normalize, split_tokens)
    return scores, lse


def _launch_forward(x: DenseArgs, out: OutputArgs | SoftSplitArgs, temperature: Temperature, normalize: bool) -> None:
    """Launch the forward for whole documents, or for their splits."""
    Q, D, sizes, arch = x.Q, x.D, make_size_args(x.Q, x.D), architecture(x.Q.device)
    kind = KernelKey(arch, Q.dtype, Q.shape[-1], D.dim() == 4, normalize, choose_offset_width(Q, D))
    launch = soft_configs.configure_soft_forward(kind, sizes.Nq, sizes.Lq, tf32=is_tf32_allowed(Q.dtype))
    if isinstance(out, SoftSplitArgs):
        launch, sizes = launch.change(SPLIT_DOCUMENTS=True), sizes._replace(K=sizes.K * out.count)
    has_descriptor = arch.has_descriptors and supports_descriptor(D)
    tiles = make_descriptor(D, launch.config) if has_descriptor else None
    tokens = make_query_args(Q, x.q_mask, x.q_weight), make_document_args(D, x.d_mask), tiles
    args = *tokens, out, temperature, sizes, Q.shape[-1], launch.config
    launcher.launch(maxsim_forward_soft, check_grid(launch.programs(sizes.Nq, sizes.K)), args, launch.options(arch))


def _score_in_splits(
    x: DenseArgs, out: OutputArgs, temperature: Temperature, normalize: bool, split_tokens: int
) -> None:
    """Fill `out` from soft maxima of splits of `split_tokens` tokens.

    The workspace limits the number of documents at a time. Candidates are scored for some queries at a time.
    """
    sizes, candidates = make_size_args(x.Q, x.D), x.D.dim() == 4
    count = cdiv(sizes.Ld, split_tokens)
    groups, bytes_each = (sizes.Nq, sizes.K) if candidates else (sizes.K, sizes.Nq)
    for group in split_to_fit(groups, 4 * bytes_each * sizes.Lq * count, _MAX_SPLIT_BYTES):
        lse = None if out.argmax is None else out.argmax[group]
        d_mask = None if x.d_mask is None else x.d_mask[group]
        if candidates:
            q_mask, q_weight = (None if t is None else t[group] for t in (x.q_mask, x.q_weight))
            part, scores = DenseArgs(x.Q[group], x.D[group], q_mask, d_mask, q_weight), out.scores[group]
        else:
            part, scores = x._replace(D=x.D[group], d_mask=d_mask), out.scores[:, group]
        _merge_splits(part, OutputArgs(scores, lse), temperature, normalize, split_tokens, count)


def _merge_splits(
    x: DenseArgs, out: OutputArgs, temperature: Temperature, normalize: bool, split_tokens: int, count: int
) -> None:
    """Compute the soft maxima of all splits, and merge them."""
    sizes: SizeArgs = make_size_args(x.Q, x.D)
    documents, candidates = math.prod(x.D.shape[:-2]), x.D.dim() == 4
    rows = documents * count * sizes.Lq * (1 if candidates else sizes.Nq)
    maxima = torch.empty(rows, dtype=torch.float32, device=x.Q.device)
    kept_counts = None if x.d_mask is None else torch.empty(documents * count, dtype=torch.int32, device=x.Q.device)
    splits = SoftSplitArgs(maxima, kept_counts, split_tokens, count)
    _launch_forward(x, splits, temperature, normalize)
    queries = make_query_args(x.Q, x.q_mask, x.q_weight)
    args = queries, splits, *out, temperature, sizes, out.scores.stride(0)
    choices = (*soft_configs.configure_soft_merge(sizes.Lq), candidates)
    launcher.launch(maxsim_soft_splits, check_grid(sizes.Nq * sizes.K), (*args, *choices), {"num_warps": 4})


class SoftCall(NamedTuple):
    """A backward call, or its part for some queries."""

    grad_scores: Tensor
    Q: Tensor
    D: Tensor
    lse: Tensor
    q_mask: Tensor | None
    d_mask: Tensor | None
    q_weight: Tensor | None
    temperature: Temperature
    normalize: bool

    @property
    def candidates(self) -> bool:
        """Return whether each query has its own documents."""
        return self.D.dim() == 4

    def part(self, queries: slice) -> SoftCall:
        """Return the call for a slice of queries and of their candidates."""
        lse, D, d_mask = self.lse[:, queries], self.D, self.d_mask
        if self.candidates:
            lse, D, d_mask = self.lse[queries], D[queries], None if d_mask is None else d_mask[queries]
        q_mask, q_weight = (None if x is None else x[queries] for x in (self.q_mask, self.q_weight))
        return SoftCall(self.grad_scores[queries], self.Q[queries], D, lse, q_mask, d_mask, q_weight, *self[7:])

    def select_documents(self, documents: slice) -> SoftCall:
        """Return the call for a slice of documents of the cross product."""
        d_mask = None if self.d_mask is None else self.d_mask[documents]
        return self._replace(
            grad_scores=self.grad_scores[:, documents], D=self.D[documents], lse=self.lse[documents], d_mask=d_mask
        )

    def launch(self) -> LaunchConfig:
        """Return the launch configuration."""
        Q, wide = self.Q, choose_offset_width(self.Q, self.D)
        flat = self.candidates or has_even_stride(Q)
        kind = KernelKey(architecture(Q.device), Q.dtype, Q.shape[-1], self.candidates, self.normalize, wide)
        return soft_configs.configure_soft_backward(kind, tf32=is_tf32_allowed(Q.dtype), flat=flat)

    def tiles(self, of_queries: bool) -> TensorDescriptor | None:
        """Return a TMA descriptor of the other side of a product, or None if TMA cannot read it.

        TMA reads whole rows, and no row may be masked. Document tokens have an axis for documents, so that TMA fills
        zeros after the end of a document.
        """
        x, config = (self.Q if of_queries else self.D), self.launch().config
        mask = self.q_mask if of_queries else self.d_mask
        is_readable = supports_descriptor(x) and x.data_ptr() % 16 == 0 and config.SINGLE_STEP and mask is None
        if not (architecture(x.device).has_descriptors and is_readable) or (of_queries and self.candidates):
            return None
        *_, L, d = x.shape
        if of_queries:
            return TensorDescriptor(x, [x.numel() // d, d], [d, 1], [config.BN, config.BD])
        return TensorDescriptor(x, [x.numel() // (L * d), L, d], [L * d, d, 1], [1, config.BN, config.BD])

    def upstream(self) -> SoftUpstreamArgs:
        """Return the upstream gradient and the sizes as a kernel argument."""
        strides = (*self.lse.stride()[:2],) if self.candidates else (0, self.lse.stride(0))
        g = self.grad_scores
        return SoftUpstreamArgs._make((g, *g.stride(), self.lse, *strides, *make_size_args(self.Q, self.D)))

    def groups(self, of_queries: bool) -> tuple:
        """Return the leading arguments of both kernels.

        `of_queries` says whether queries are the other side of the product.
        """
        queries, documents = (
            make_query_args(self.Q, self.q_mask, self.q_weight),
            make_document_args(self.D, self.d_mask),
        )
        return queries, documents, self.tiles(of_queries), self.upstream(), self.temperature

    def run(self, kernel: Callable, grid: tuple[int, ...], *args: object) -> None:
        """Launch a kernel of the backward."""
        launch = self.launch()
        options = launch.options(architecture(self.Q.device))
        grid = (*check_grid(grid[0]), grid[1], cdiv(self.Q.shape[-1], launch.config.BD))
        groups = self.groups(kernel is maxsim_soft_documents)
        launcher.launch(kernel, grid, (*groups, *args, self.Q.shape[-1], launch.config), options)

    @property
    def has_document_sums(self) -> bool:
        """Return whether gradients of documents are sums first.

        Another kernel then applies the Jacobian of the norms.
        """
        return self.normalize and not self.launch().config.SINGLE_STEP

    def count_owner_programs(self, rows_each: int, groups: int) -> int:
        """Return the number of programs that own the rows of groups."""
        return groups * cdiv(rows_each, self.launch().config.BM)


def _count_parts(K: int, Ld: int) -> int:
    """Return the number of parts in which documents are summed.

    It does not depend on the queries, so the number of queries does not affect the bits.
    """
    return max(1, min(_MAX_PARTS, K, K * Ld // _MIN_PART_TOKENS))


def _sum_parts(parts: Tensor) -> Tensor:
    """Return the sum of parts, in their order."""
    return functools.reduce(Tensor.add_, parts[1:].unbind(), parts[0])


def _write_gradient(
    rows: Tensor, weight: Tensor | None, sums: Tensor, grad: Tensor, normalize: bool, parts: int = 1
) -> None:
    """Write the gradient of `rows` ``[N, K, L, d]`` from parts of their sums."""
    N, K, L, d = rows.shape
    row_sums = RowSumArgs(sums, K, L) if parts == 1 else RowSumArgs(sums, K, L, None, parts, rows.numel())
    wide = choose_offset_width(rows, rows)
    launch = configure_gather(KernelKey(architecture(rows.device), rows.dtype, d, False, normalize, wide))
    queries = make_query_args(rows[:, 0], None, weight)
    args = make_document_args(rows, None), queries, row_sums, grad, None, d, launch.config
    grid = check_grid(N * K * cdiv(L, launch.config.BM))
    launcher.launch(maxsim_finish, grid, args, launch.options(architecture(rows.device)))


class SumWorkspace(NamedTuple):
    """Memory for fp32 sums."""

    size: int  # maximum bytes of the sums
    taken: Tensor | None  # a gradient that is not written yet and holds the sums, or None for new memory

    def sums(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return memory for sums of a shape."""
        count = math.prod(shape)
        if self.taken is None:
            return like.new_empty(shape, dtype=torch.float32)
        return self.taken.view(-1).view(torch.uint8)[: 4 * count].view(torch.float32).view(shape)


def allocate_sum_workspace(
    count: int, bytes_each: int, gradient_bytes: int, unwritten: Tensor | None = None
) -> SumWorkspace:
    """Return memory for the sums of `count` queries or documents, or of as many at a time as it holds.

    Its size is one twentieth of `gradient_bytes`, within limits. If the gradient `unwritten` is at least as large, it
    serves as the workspace, because it is written later.

    Args:
        count: number of queries or documents.
        bytes_each: bytes of the sums of one query or document.
        gradient_bytes: bytes of the gradients and soft maxima.
        unwritten: a gradient that is written later, or None.
    """
    max_bytes = max(_MIN_SUM_BYTES, min(gradient_bytes // 20, _MAX_SUM_BYTES))
    if unwritten is not None and unwritten.nbytes >= max(min(count * bytes_each, max_bytes), bytes_each):
        return SumWorkspace(unwritten.nbytes, unwritten)
    return SumWorkspace(max_bytes, None)


def _write_query_gradients(c: SoftCall, needs: list[bool], grads: list[Tensor], room: SumWorkspace) -> None:
    """Write the gradients of Q and q_weight for the queries of `c`, and add the gradient of the temperature."""
    Nq, K, Lq, Ld = make_size_args(c.Q, c.D)
    parts, documents_per_part = _count_parts(K, Ld), cdiv(K, _count_parts(K, Ld))
    new_empty = functools.partial(c.Q.new_empty, dtype=torch.float32)
    sums = room.sums((parts, *c.Q.shape), c.Q) if needs[0] else None
    weights, spreads = (new_empty((parts, Nq, Lq)) if need else None for need in needs[2:])
    has_sums = sums is not None and soft_sm90.try_sum_rows(c, sums, parts, documents_per_part)
    grid = c.count_owner_programs(Lq, Nq) if c.candidates else c.count_owner_programs(Nq * Lq, 1), parts
    if not has_sums or weights is not None:
        c.run(maxsim_soft_queries, grid, None if has_sums else sums, weights, None, documents_per_part)
    if spreads is not None:  # a separate launch, because a joint one spills
        c.run(maxsim_soft_queries, grid, None, None, spreads, documents_per_part)
    if sums is not None:
        _write_gradient(c.Q.unsqueeze(1), c.q_weight, sums, grads[0], c.normalize, parts)
    if weights is not None:
        grads[2].copy_(_sum_parts(weights))
    if spreads is not None:
        entropy = _sum_parts(spreads)
        if c.q_weight is not None:
            w = c.q_weight if c.q_mask is None else torch.where(c.q_mask, c.q_weight, 0)
            entropy *= w
        grads[3].add_(entropy.sum() / c.temperature)


def _write_document_gradients(c: SoftCall, grad: Tensor) -> None:
    """Write the gradient of the documents of `c`."""
    Nq, K, _, Ld = make_size_args(c.Q, c.D)
    if soft_sm90.try_sum_tokens(c, grad):
        return
    count = Nq * K if c.candidates else K
    sums = c.Q.new_empty(grad.shape, dtype=torch.float32) if c.has_document_sums else grad
    c.run(maxsim_soft_documents, (c.count_owner_programs(Ld, count), 1), sums)
    if c.has_document_sums:
        rows, sums = (x if c.candidates else x.unsqueeze(0) for x in (c.D, sums))
        _write_gradient(rows, None, sums, grad, True)


def backward_soft(
    grad_scores: Tensor, x: DenseArgs, lse: Tensor, temperature: Temperature, normalize: bool, needs: list[bool]
) -> Gradients:
    """Return the gradients of Q, D, q_weight, and the temperature, as `lik::maxsim_soft_bwd` defines them."""
    Q, D = x.Q, x.D
    if Q.shape[0] * Q.shape[1] > _INT32_MAX:
        raise ValueError(f"maxsim_soft_bwd: Q: expected at most {_INT32_MAX} tokens, got {list(Q.shape)}")
    grads = [
        torch.empty(t.shape if need else (0,), dtype=dtype, device=Q.device)
        for t, dtype, need in zip((Q, D, Q[..., 0]), (Q.dtype, Q.dtype, torch.float32), needs, strict=False)
    ]
    grads.append(torch.zeros(() if needs[3] else (0,), dtype=torch.float32, device=Q.device))
    if Q.numel() == 0 or D.numel() == 0:
        for grad in grads:
            grad.zero_()
        return tuple(grads)  # type: ignore[return-value]
    call = SoftCall(grad_scores, Q, D, lse.contiguous(), *x[2:], temperature, normalize)
    args = grad_scores, x, lse, temperature, normalize, needs
    with use_device(Q.device):
        launcher.run_first(functools.partial(backward_soft, *args), _run_in_parts, call, needs, grads)
    return tuple(grads)  # type: ignore[return-value]


def _run_in_parts(call: SoftCall, needs: list[bool], grads: list[Tensor]) -> None:
    """Write the gradients for as many queries, then documents, at a time as the workspace holds sums for."""
    Nq, K, Lq, Ld = make_size_args(call.Q, call.D)
    d, candidates = call.Q.shape[-1], call.candidates
    output_bytes = sum(x.nbytes for x in (*grads, call.lse))
    if needs[0] or needs[2] or needs[3]:
        bytes_each = 4 * d * Lq * _count_parts(K, Ld) if needs[0] else 0
        room = allocate_sum_workspace(Nq, bytes_each, output_bytes, grads[1] if needs[1] else None)
        for group in split_to_fit(Nq, bytes_each, room.size):
            part_grads = [g[group] if n < 3 and needs[n] else g for n, g in enumerate(grads)]
            _write_query_gradients(call.part(group), needs, part_grads, room)
    if needs[1]:
        documents = call.D.shape[0]
        bytes_each = 4 * d * Ld * (K if candidates else 1) if call.has_document_sums else 0
        room = allocate_sum_workspace(documents, bytes_each, output_bytes)
        for group in split_to_fit(documents, bytes_each, room.size):
            _write_document_gradients(call.part(group) if candidates else call.select_documents(group), grads[1][group])
