"""Gradients of soft MaxSim by Gluon kernels: sm_90, bf16, no document mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ...gpu.runtime import gluon, launcher
from ...gpu.runtime.arguments import (
    architecture,
    choose_offset_width,
    make_document_args,
    make_query_args,
    make_size_args,
    supports_descriptor,
    use_device,
)
from ...gpu.tuning.architectures import cdiv
from . import configs as soft_configs

if TYPE_CHECKING:
    from .gpu import SoftCall

_MODULE = "soft.backward_sm90"
_OWNED_ROWS = 128  # rows of a backward program, which has two warp groups


def _supports_documents(Q: Tensor, D: Tensor, normalize: bool) -> bool:
    """Return whether the kernels can read these documents."""
    readable = supports_descriptor(D) and D.data_ptr() % 16 == 0 and choose_offset_width(Q, D) < 2
    if not readable or D.dim() != 3 or normalize:
        return False
    return gluon.load_kernels() is not None and gluon.load_module(_MODULE) is not None


def _try_launches(launches: Callable[[], None], Q: Tensor, instead: str) -> bool:
    """Run `launches` and return whether Triton can compile them.

    If not, warn that the kernel `instead` runs.
    """
    try:
        with use_device(Q.device):
            launches()
    except launcher.KernelCompileError as error:
        launcher.warn_fallback(error, instead)
        return False
    return True


def try_sum_rows(c: SoftCall, sums: Tensor, parts: int, each: int) -> bool:
    """Compute the sums of query rows in parts of documents, and return whether the kernel supports the call."""
    Nq, K, Lq, Ld = make_size_args(c.Q, c.D)
    d = c.Q.shape[-1]
    C = soft_configs.configure_soft_sm90_backward(architecture(c.Q.device), c.Q.dtype, d, Ld)
    if C is None or c.d_mask is not None or not _supports_documents(c.Q, c.D, c.normalize):
        return False

    def launches() -> None:
        """Launch the kernel of query rows."""
        tiles = gluon.make_tile_descriptor((1, C.BN, C.BD), c.D.dtype).of(c.D, [K, Ld, d], [Ld * d, d, 1])
        args = make_query_args(c.Q, c.q_mask, None), tiles, c.upstream(), c.temperature, sums, each, d, C
        kernel = gluon.load_module(_MODULE).maxsim_soft_rows  # type: ignore[union-attr]
        launcher.launch(kernel, (cdiv(Nq * Lq, _OWNED_ROWS), parts), args, {"num_warps": 4})

    return _try_launches(launches, c.Q, "maxsim_soft_queries")


def try_sum_tokens(c: SoftCall, grad: Tensor) -> bool:
    """Write the gradient of documents, and return whether the kernel supports the call."""
    Nq, K, Lq, Ld = make_size_args(c.Q, c.D)
    d = c.Q.shape[-1]
    C = soft_configs.configure_soft_sm90_backward(architecture(c.Q.device), c.Q.dtype, d, None)
    readable = c.q_mask is None and c.d_mask is None and supports_descriptor(c.Q) and c.Q.data_ptr() % 16 == 0
    if C is None or not (readable and _supports_documents(c.Q, c.D, c.normalize)):
        return False

    def launches() -> None:
        """Launch the kernel of document tokens."""
        tiles = gluon.make_tile_descriptor((C.BN, C.BD), c.Q.dtype).of(c.Q, [Nq * Lq, d], [d, 1])
        groups = make_query_args(c.Q, None, c.q_weight), make_document_args(c.D, None), tiles, c.upstream()
        kernel = gluon.load_module(_MODULE).maxsim_soft_tokens  # type: ignore[union-attr]
        grid = (cdiv(K * cdiv(Ld, _OWNED_ROWS // 2), 2),)
        launcher.launch(kernel, grid, (*groups, c.temperature, grad, d, C), {"num_warps": 4})

    return _try_launches(launches, c.Q, "maxsim_soft_documents")
