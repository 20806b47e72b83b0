"""Soft MaxSim: a smooth maximum over document tokens."""

from typing import Any

from torch import Tensor

from ...api.inputs import Tokens
from ...api.padding import make_dense
from ...core.arguments import check_flag, check_types
from ...formats.index import Index
from ...formats.quantized import Quantized
from . import ops as soft_ops


def maxsim_soft(
    Q: Tokens,
    D: Tokens,
    temperature: float | Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalize: bool = False,
) -> Tensor:
    """Compute scores with a smooth maximum ``sum_s w[i, s] * tau * logsumexp_t(<Q[i, s], D[j, t]> / tau)``.

    The smooth maximum is the one of colpali-engine's ``use_smooth_max``, which has ``tau = 0.1``. It is at most
    ``tau * log(Ld)`` above the maximum. Every kept document token contributes to the gradient with its probability
    ``softmax_t(<q, d_t> / tau)``. In `maxsim` only the token at the argmax does. The similarities ``[Nq, Nd, Lq, Ld]``
    are never stored. The forward keeps one number for each query token and document.

    Args:
        Q: query tokens, as in `maxsim`. Lists and nested tensors are padded and masked.
        D: document tokens, as in `maxsim`. Lists and nested tensors are padded and masked.
        temperature: tau, a number above 0, or a differentiable scalar (0-d) tensor of the dtype of the scores. A tensor
            that is not above 0 gives NaN. Toward 0, scores approach the scores of `maxsim`.
        q_mask: query tokens to keep, as in `maxsim`.
        d_mask: document tokens to keep, as in `maxsim`.
        q_weight: the weight of each query token, as in `maxsim`.
        normalize: L2-normalize every token first.

    Returns:
        Scores ``[Nq, Nd]`` or ``[Nq, K]`` in fp32 (fp64 for fp64 inputs). A 2-D Q or D drops its axis. A document
        without kept tokens scores ``-inf``. A query without kept tokens scores 0.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong, or `temperature` is not above 0.
        NotImplementedError: ``torch.func`` would differentiate the call.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(5, 300, 128)
        >>> lik_ops.maxsim_soft(Q, D, 0.1, normalize=True).shape
        torch.Size([2, 5])
    """
    for name, x in (("Q", Q), ("D", D)):
        if isinstance(x, (Quantized, Index)):
            raise TypeError(f"maxsim_soft: {name}: expected a dense Tensor, got {type(x).__name__}")
    dense_args: Any = make_dense("maxsim_soft", Q, D, q_mask, d_mask, q_weight)
    check_types("maxsim_soft", *dense_args)
    check_flag("maxsim_soft", "normalize", normalize)
    soft_ops.check_temperature("maxsim_soft", temperature, dense_args[0])
    return soft_ops.score_soft(dense_args, temperature, normalize)
