"""Gradients of soft MaxSim by Gluon kernels: sm_90, bf16, no document mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ...core.settings import get_forced_kernel, require_unforced
from ...gpu import supports
from ...gpu.runtime import gluon, launcher
from ...gpu.runtime.arguments import (
    architecture,
    make_document_args,
    make_query_args,
    make_size_args,
    use_device,
)
from ...gpu.tuning.architectures import cdiv
from . import configs as soft_configs

if TYPE_CHECKING:
    from .gpu import SoftCall

_OWNED_ROWS = 128  # rows of a backward program, which has two warp groups


def _is_chosen(reason: str | None) -> bool:
    """Return whether a kernel is chosen that cannot serve a call for `reason`, unless it is None.

    Raises:
        ValueError: ``LIK_OPS_KERNEL`` forces the kernel, and there is a reason.
    """
    if reason is not None:
        require_unforced(reason)
    return reason is None and get_forced_kernel() != "generic"


def _try_launches(launches: Callable[[], None], Q: Tensor, instead: str) -> bool:
    """Run `launches` and return whether Triton can compile them.

    If not, warn that the kernel `instead` runs.

    Raises:
        ValueError: ``LIK_OPS_KERNEL`` forces a kernel that does not compile.
    """
    try:
        with use_device(Q.device):
            launches()
    except launcher.KernelCompileError as error:
        launcher.warn_fallback(error, instead)
        require_unforced(str(error))
        return False
    return True


def try_sum_rows(c: SoftCall, sums: Tensor, parts: int, documents_per_part: int) -> bool:
    """Compute the sums of query rows in parts of documents, and return whether the kernel supports the call."""
    Nq, K, Lq, Ld = make_size_args(c.Q, c.D)
    d = c.Q.shape[-1]
    if not _is_chosen(supports.supports_soft_gradients(c.Q, c.D, c.d_mask, c.normalize, architecture(c.Q.device))):
        return False
    C = soft_configs.configure_soft_sm90_backward(d, Ld)

    def launches() -> None:
        """Launch the kernel of query rows."""
        tiles = gluon.make_descriptor_factory((1, C.BN, C.BD), c.D.dtype)(c.D, [K, Ld, d], [Ld * d, d, 1])
        args = make_query_args(c.Q, c.q_mask, None), tiles, c.upstream(), c.temperature, sums, documents_per_part, d, C
        kernel = gluon.load_module(supports.SOFT_MODULE).maxsim_soft_rows  # type: ignore[union-attr]
        launcher.launch(kernel, (cdiv(Nq * Lq, _OWNED_ROWS), parts), args, {"num_warps": 4})

    return _try_launches(launches, c.Q, "maxsim_soft_queries")


def try_sum_tokens(c: SoftCall, grad: Tensor) -> bool:
    """Write the gradient of documents, and return whether the kernel supports the call."""
    Nq, K, Lq, Ld = make_size_args(c.Q, c.D)
    d = c.Q.shape[-1]
    reason = supports.supports_soft_gradients(c.Q, c.D, c.d_mask, c.normalize, architecture(c.Q.device))
    if not _is_chosen(reason or supports.supports_soft_tokens(c.Q, c.q_mask)):
        return False
    C = soft_configs.configure_soft_sm90_backward(d, None)

    def launches() -> None:
        """Launch the kernel of document tokens."""
        tiles = gluon.make_descriptor_factory((C.BN, C.BD), c.Q.dtype)(c.Q, [Nq * Lq, d], [d, 1])
        groups = make_query_args(c.Q, None, c.q_weight), make_document_args(c.D, None), tiles, c.upstream()
        kernel = gluon.load_module(supports.SOFT_MODULE).maxsim_soft_tokens  # type: ignore[union-attr]
        grid = (cdiv(K * cdiv(Ld, _OWNED_ROWS // 2), 2),)
        launcher.launch(kernel, grid, (*groups, c.temperature, grad, d, C), {"num_warps": 4})

    return _try_launches(launches, c.Q, "maxsim_soft_documents")
