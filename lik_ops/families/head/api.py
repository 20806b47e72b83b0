"""MaxSim of hidden states: the projection of a document head, its normalization and the maximum in one call."""

from __future__ import annotations

from torch import Tensor

from ..._ops import ops as lik
from ...api.inputs import Tokens
from ...api.padding import make_dense
from ...core.arguments import add_batch_axis, as_bool, check_flag, check_tensor, choose_argmax_dtype
from ...core.arrays import share_arrays
from ...ops.stack import autocast, functional, sharding
from .ops import check_hidden_args
from .portable import HiddenArgs

_OP = "maxsim_from_hidden"


def maxsim_from_hidden(
    Q: Tokens,
    H: Tokens,
    W: Tensor,
    b: Tensor | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalize: bool = True,
) -> Tensor:
    """Compute the `maxsim` scores of documents ``D = normalize(H W^T + b)`` that are given as hidden states.

    ``score[i, j] = sum_s q_weight[i, s] * max_t <Q[i, s], D[j, t]>``, where D are the tokens that the linear head of a
    late-interaction model computes, divided by ``max(||.||, 1e-12)``. Sums are fp32, and tokens are rounded to the
    dtype of H, like the inputs of `maxsim`. D is never stored as a whole. On a GPU, a call with few query tokens
    computes and scores tokens in one kernel. Other calls compute some documents at a time. The scores are
    differentiable in Q, H, W, b and `q_weight`.

    Source: the encoders of Khattab and Zaharia, "ColBERT", 2020, section 3.2, with equation 3.

    Args:
        Q: query tokens, ready to be scored, ``[Nq, Lq, d]`` or ``[Lq, d]``; fp16, bf16, fp32 or fp64. Lists and nested
            tensors, also of hidden states, are padded and masked.
        H: hidden states of document tokens ``[Nd, Ld, d_model]`` or ``[Ld, d_model]`` of the dtype and device of Q.
        W: the weights of the head ``[d, d_model]``, as in `torch.nn.Linear`, of the dtype and device of Q.
        b: the bias of the head ``[d]``, or None.
        q_mask: query tokens to keep, with the shape of Q without d. The dtype is bool (True = keep), or an integer
            dtype read as ``!= 0``. The values and gradients of masked tokens never matter.
        d_mask: document tokens to keep, with the shape of H without its last axis, in the same dtypes.
        q_weight: the weight of each query token, with the shape of Q without d; fp32 (fp64 for fp64 inputs).
        normalize: divide document tokens by their norms. Queries are never normalized.

    Returns:
        Scores ``[Nq, Nd]`` in fp32 (fp64 for fp64 inputs). A 2-D Q or H drops its axis. Documents and queries without
        kept tokens score as in `maxsim`.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size or device is wrong.
        NotImplementedError: ``torch.func`` would differentiate the call.

    Example:
        >>> Q, H = torch.randn(4, 32, 128), torch.randn(8, 180, 768)
        >>> head = torch.nn.Linear(768, 128)
        >>> lik_ops.maxsim_from_hidden(Q, H, head.weight, head.bias).shape
        torch.Size([4, 8])
    """
    check_flag(_OP, "normalize", normalize)
    Q, H, q_mask, d_mask, q_weight = make_dense(_OP, Q, H, q_mask, d_mask, q_weight, documents="H")
    W, b = share_arrays(_OP, W=W, b=b)
    check_tensor(_OP, "b", b, or_none=True)  # before autocast, which casts the other tensors
    check_tensor(_OP, "q_weight", q_weight, or_none=True)
    Q, H, q_weight = autocast.cast_to_autocast(Q, H, q_weight)
    W, bias, _ = autocast.cast_to_autocast(W, W if b is None else b, None)
    x = HiddenArgs(Q, H, W, None if b is None else bias, q_mask, d_mask, q_weight)
    check_hidden_args(_OP, x)
    functional.reject_forward_ad(*x[:4], q_weight)
    functional.reject_transforms(_OP)
    sharding.register_if_needed()
    needs_argmax = functional.is_recording_gradients(*x[:4], q_weight)
    q_flat, h_flat = Q.dim() == 2, H.dim() == 2
    q_keep, weight = add_batch_axis(as_bool(q_mask), q_flat), add_batch_axis(q_weight, q_flat)
    Q, H, d_keep = add_batch_axis(Q, q_flat), add_batch_axis(H, h_flat), add_batch_axis(as_bool(d_mask), h_flat)  # type: ignore[assignment]
    dtype = choose_argmax_dtype(x.H.shape[-2]) if needs_argmax else None
    scores = lik.maxsim_from_hidden_fwd(Q, H, *x[2:4], q_keep, d_keep, weight, normalize, dtype)[0]
    scores = scores.squeeze(1) if h_flat else scores
    return scores.squeeze(0) if q_flat else scores
