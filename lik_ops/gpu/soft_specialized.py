"""Soft MaxSim by Gluon kernels: sm_90, no document mask.

The forward of many query rows, which has the bits of the plain kernel, and both kernels of a backward in bf16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..csrc_triton.arguments import Output, Sizes, Specialization
from ..csrc_triton.row_sums import maxsim_sum_parts
from . import gluon, launcher, soft_configs
from .arguments import architecture, describable, documents_of, on_device, queries_of, sizes, wide_of
from .configs import cdiv
from .gluon_configs import Specialized
from .soft_call import SoftCall, Temperature

_PART_SUMS = 2**21  # in a workspace
_SUM_BLOCK = 256
_OWNED = 128  # rows of a program of a backward, of two groups of warps


def _is_read(Q: Tensor, D: Tensor, normalize: bool) -> bool:
    """Whether the kernels read such documents."""
    readable = describable(D) and D.data_ptr() % 16 == 0 and wide_of(Q, D) < 2
    return readable and D.dim() == 3 and not normalize and gluon.kernels() is not None


def _choice(Q: Tensor, D: Tensor, normalize: bool) -> Specialized | None:
    if not _is_read(Q, D, normalize):
        return None
    return soft_configs.specialized(architecture(Q.device), Q.dtype, *sizes(Q, D), Q.shape[-1])


def scored(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    q_weight: Tensor | None,
    temperature: Temperature,
    normalize: bool,
    out: Output,
) -> bool:
    """Whether the kernel serves this call, of documents without a mask: then it has filled `out`."""
    choice = _choice(Q, D, normalize)
    if choice is None:
        return False
    all_sizes, (scores, lse) = sizes(Q, D), out
    sums_each = all_sizes.Nq * choice.parts if choice.parts > 1 else 1
    step = min(max(_PART_SUMS // sums_each, 1) if choice.parts > 1 else all_sizes.K, all_sizes.K)

    def launches() -> None:
        for k in range(0, all_sizes.K, step):
            part = slice(k, k + step)
            some = Output(scores[:, part], None if lse is None else lse[part])
            given = Q, D[part], q_mask, q_weight, temperature
            _launch(choice, given, some, all_sizes._replace(K=min(step, all_sizes.K - k)))

    return _compiles(launches, Q, "maxsim_forward_soft")


def _compiles(launches: Callable[[], None], Q: Tensor, instead: str) -> bool:
    """Whether Triton could compile what was launched; else another kernel computes `instead`."""
    try:
        with on_device(Q.device):
            launches()
    except launcher.DoesNotCompile as error:
        launcher.fall_back(error, instead)
        return False
    return True


def _launch(choice: Specialized, given: tuple, out: Output, sizes: Sizes) -> None:
    """Of all documents if their scores are stored at once, else of some: the sums of queries in parts are added."""
    Q, D, q_mask, q_weight, temperature = given
    (Nq, K, _, Ld), d, C = sizes, Q.shape[-1], choice.config
    assert isinstance(C, Specialization)
    direct = choice.parts == 1
    sums = out.scores if direct else Q.new_empty((Nq * choice.parts, K), dtype=torch.float32)
    tokens = gluon.tiles((C.BN, C.BD), D.dtype).of(D, [K * Ld, d], [d, 1])
    queries = queries_of(Q, q_mask, q_weight)
    args = (queries, tokens, Output(sums, out.argmax), temperature, sizes, d, choice.parts, C)
    kernel = gluon.found().soft.maxsim_forward_soft_specialized
    launcher.launch(kernel, (min(choice.programs, choice.row_tiles * K),), args, {"num_warps": 4})
    if not direct:
        added = (sums, out.scores, out.scores.stride(0), K, choice.parts, choice.tree, _SUM_BLOCK)
        launcher.launch(maxsim_sum_parts, (cdiv(K, _SUM_BLOCK), Nq), added, {"num_warps": 4})


def into_rows(c: SoftCall, sums: Tensor, parts: int, each: int) -> bool:
    """Whether the kernel serves this backward: then it has made the sums of query rows, in parts of documents."""
    Nq, K, Lq, Ld = sizes(c.Q, c.D)
    d = c.Q.shape[-1]
    C = soft_configs.specialized_backward(architecture(c.Q.device), c.Q.dtype, d, Ld)
    if C is None or c.d_mask is not None or not _is_read(c.Q, c.D, c.normalize):
        return False

    def launches() -> None:
        tiles = gluon.tiles((1, C.BN, C.BD), c.D.dtype).of(c.D, [K, Ld, d], [Ld * d, d, 1])
        args = queries_of(c.Q, c.q_mask, None), tiles, c.upstream(), c.temperature, sums, each, d, C
        kernel = gluon.found().soft_backward.maxsim_soft_rows
        launcher.launch(kernel, (cdiv(Nq * Lq, _OWNED), parts), args, {"num_warps": 4})

    return _compiles(launches, c.Q, "maxsim_soft_queries")


def into_tokens(c: SoftCall, grad: Tensor) -> bool:
    """Whether the kernel serves this backward: then it has written the gradient of documents."""
    Nq, K, Lq, Ld = sizes(c.Q, c.D)
    d = c.Q.shape[-1]
    C = soft_configs.specialized_backward(architecture(c.Q.device), c.Q.dtype, d, None)
    readable = c.q_mask is None and c.d_mask is None and describable(c.Q) and c.Q.data_ptr() % 16 == 0
    if C is None or not (readable and _is_read(c.Q, c.D, c.normalize)):
        return False

    def launches() -> None:
        tiles = gluon.tiles((C.BN, C.BD), c.Q.dtype).of(c.Q, [Nq * Lq, d], [d, 1])
        groups = queries_of(c.Q, None, c.q_weight), documents_of(c.D, None), tiles, c.upstream()
        kernel = gluon.found().soft_backward.maxsim_soft_tokens
        grid = (cdiv(K * cdiv(Ld, _OWNED // 2), 2),)
        launcher.launch(kernel, grid, (*groups, c.temperature, grad, d, C), {"num_warps": 4})

    return _compiles(launches, c.Q, "maxsim_soft_documents")
