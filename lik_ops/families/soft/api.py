"""Soft MaxSim: a smooth maximum over document tokens."""

from typing import Any

from torch import Tensor

from ...api.packing import is_sequences
from ...core.arguments import check_flag, check_types
from ...formats.index import Index
from ...formats.quantized import Quantized
from . import ops as soft_ops

__all__ = ["maxsim_soft"]


def maxsim_soft(
    Q: Tensor,
    D: Tensor,
    temperature: float | Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
) -> Tensor:
    """Scores with a smooth maximum: ``score[i, j] = sum_s w[i, s] * tau * logsumexp_t(<Q[i, s], D[j, t]> / tau)``.

    The smooth maximum is that of colpali-engine's ``use_smooth_max``, which has ``tau = 0.1``; it is at most
    ``tau * log(Ld)`` above the maximum. Every kept document token takes part in the gradient, with its probability
    ``softmax_t(<q, d_t> / tau)``, where that of `maxsim` has the winner alone. The similarities ``[Nq, Nd, Lq, Ld]``
    are never materialised; the forward keeps one number for each query token and document.

    Args:
        Q, D, q_mask, d_mask, q_weight, normalize: as in `maxsim`, of tensors: documents of many lengths have a mask.
        temperature: tau, a number above 0, or a tensor of no axes, of the dtype of the scores, which is
            differentiable. A tensor that is not above 0 gives NaN. Towards 0 scores tend to those of `maxsim`.

    Returns:
        Scores as of `maxsim`: fp32 (fp64 for fp64), ``[Nq, Nd]`` or ``[Nq, K]``; a 2-D Q or D drops its axis. A
        document that keeps no token scores ``-inf``; a query that keeps no token scores 0.

    Raises:
        TypeError, ValueError: as `maxsim`; also for a temperature that is none.
        NotImplementedError: `torch.func` would differentiate it.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(5, 300, 128)
        >>> lik_ops.maxsim_soft(Q, D, 0.1, normalize=True).shape
        torch.Size([2, 5])
    """
    for name, x in (("Q", Q), ("D", D)):
        if is_sequences(x) or isinstance(x, (Quantized, Index)):
            raise TypeError(f"maxsim_soft: {name}: expected a dense Tensor, got {type(x).__name__}")
    check_types("maxsim_soft", Q, D, q_mask, d_mask, q_weight)
    check_flag("maxsim_soft", "normalize", normalize)
    soft_ops.check_temperature("maxsim_soft", temperature, Q)
    given: Any = Q, D, q_mask, d_mask, q_weight
    return soft_ops.score_soft(given, temperature, normalize)
