"""The gradients of soft MaxSim by Gluon kernels: sm_90, bf16, no document mask."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...gpu.runtime import gluon, launcher
from ...gpu.runtime.arguments import architecture, describable, documents_of, on_device, queries_of, sizes, wide_of
from ...gpu.tuning.architectures import cdiv
from . import configs as soft_configs
from .gpu_launches import SoftCall

_OWNED = 128  # rows of a program of a backward, of two groups of warps


def _is_read(Q: Tensor, D: Tensor, normalize: bool) -> bool:
    """Whether the kernels read such documents."""
    readable = describable(D) and D.data_ptr() % 16 == 0 and wide_of(Q, D) < 2
    return readable and D.dim() == 3 and not normalize and gluon.kernels() is not None


def _compiles(launches: Callable[[], None], Q: Tensor, instead: str) -> bool:
    """Whether Triton could compile what was launched; else another kernel computes `instead`."""
    try:
        with on_device(Q.device):
            launches()
    except launcher.DoesNotCompile as error:
        launcher.fall_back(error, instead)
        return False
    return True


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
