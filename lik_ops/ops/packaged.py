"""``lik::maxsim_packaged``: the scores from one Triton kernel that Inductor can compile into a package.

The compiler traces into a `triton_op` and finds the kernel in its body. All choices are made while tracing, so they
depend only on values that are known then. Import this module only when it is needed, because it requires Triton.
"""

from typing import Optional

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .._ops import add_op_namespace_prefix
from .._ops import ops as lik
from ..core.arguments import check_dense, check_dense_batched, score_dtype
from ..csrc_triton.export.packaged import maxsim_packaged as _kernel
from ..gpu.runtime.arguments import is_tf32_allowed
from .registration.custom import set_docstring
from .registration.family import make_raising_backward

_NAME = add_op_namespace_prefix("maxsim_packaged")
_DOC = "Return the scores ``[Nq, Nd]`` or ``[Nq, K]`` of 3-D and 4-D tensors. There is no argmax and no gradient."
_MAX_QUERY_ROWS, _TILE_TOKENS = 64, 64


def _round_to_power_of_2(size: int | torch.SymInt, limit: int) -> int:
    """Return the power of two from 16 to `limit` that covers `size`, or `limit` if `size` is unknown while tracing."""
    return min(limit, max(16, 1 << (size - 1).bit_length())) if isinstance(size, int) else limit


def _choose_precision(dtype: torch.dtype) -> str:
    if torch.version.hip:
        return "ieee"
    return "tf32" if is_tf32_allowed(dtype) else "tf32x3"


def make_kernel_args(Q, D, q_mask, d_mask, q_weight, normalize: bool, scores: Tensor) -> tuple[tuple, dict]:
    """Return the arguments and the constexprs of the kernel launch."""
    candidates, owner = D.dim() == 4, () if D.dim() == 4 else (0,)
    query_strides = [(0, 0) if x is None else x.stride() for x in (q_mask, q_weight)]
    queries = (Q, *Q.stride(), q_mask, *query_strides[0], q_weight, *query_strides[1])
    documents = (D, *owner, *D.stride(), d_mask, *((0, 0, 0) if d_mask is None else (*owner, *d_mask.stride())))
    Lq, d = Q.shape[1:]
    constants = {
        "CANDIDATES": candidates,
        "NORMALIZE": normalize,
        "PRECISION": _choose_precision(Q.dtype),
        "BM": _round_to_power_of_2(Lq, _MAX_QUERY_ROWS),
        "BN": _TILE_TOKENS,
        "BD": _round_to_power_of_2(d, 64 if Q.dtype == torch.float32 else 128),
    }
    return (*queries, *documents, scores, Q.shape[0], D.shape[-3], Lq, D.shape[-2], d), constants


@triton_op(add_op_namespace_prefix("maxsim_packaged"), mutates_args=())
def maxsim_packaged(
    Q: Tensor,
    D: Tensor,
    q_mask: Optional[Tensor],  # noqa: UP045  (torch reads the schema from these annotations)
    d_mask: Optional[Tensor],  # noqa: UP045
    q_weight: Optional[Tensor],  # noqa: UP045
    normalize: bool,
) -> Tensor:
    """Return the scores ``[Nq, Nd]`` or ``[Nq, K]`` of 3-D and 4-D tensors. There is no argmax and no gradient.

    Packages of `lik_ops.export.package` for GPUs contain this operator. CPU tensors and fp64 run ``lik::maxsim_fwd``.

    Args:
        Q: query tokens ``[Nq, Lq, d]``.
        D: document tokens ``[Nd, Ld, d]``, or candidates ``[Nq, K, Ld, d]``, with the dtype and device of Q.
        q_mask: bool ``[Nq, Lq]`` (True = keep), or None.
        d_mask: bool, the shape of D without d, or None.
        q_weight: fp32 (fp64 for fp64) ``[Nq, Lq]``, or None.
        normalize: whether to L2-normalize every token.

    Returns:
        The scores in fp32 (fp64 for fp64).
    """
    if Q.device.type != "cuda" or Q.dtype == torch.float64:
        return lik.maxsim_fwd(Q, D, q_mask, d_mask, q_weight, normalize, None, "auto")[0]
    scores = Q.new_empty((Q.shape[0], D.shape[-3]), dtype=torch.float32)
    args, constants = make_kernel_args(Q, D, q_mask, d_mask, q_weight, normalize, scores)
    wrap_triton(_kernel)[(scores.shape[0] * scores.shape[1],)](*args, **constants)
    return scores


@maxsim_packaged.register_fake
def _(Q, D, q_mask, d_mask, q_weight, normalize):
    check_dense(_NAME, Q, D, q_mask, d_mask, q_weight)
    check_dense_batched(_NAME, Q, D, q_mask, d_mask)
    return Q.new_empty((Q.shape[0], D.shape[-3]), dtype=score_dtype(Q.dtype))


maxsim_packaged.register_autograd(make_raising_backward("maxsim_packaged", f"{add_op_namespace_prefix('maxsim')} does"))
set_docstring("maxsim_packaged", _DOC)
