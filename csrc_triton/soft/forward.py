"""Forward of soft MaxSim: the generic forward kernel with a log-sum-exp instead of the maximum.

```text
score[i, k] = sum_s q_weight[i, s] * tau * log(sum_t exp(<Q[i, s], D[k, t]> / tau))
```

The loop is `compute_row_maxima` of `forward.generic.row_maxima` with C.SOFT. The online sum is in `maximum`.
"""

import triton
import triton.language as tl

from ..common.arguments import Operands
from ..forward.generic.kernel import score_document
from .maximum import load_temperature


@triton.jit
def maxsim_forward_soft(Q, D, tiles, out, tau, sizes, d, C: tl.constexpr):
    """Compute soft scores and soft maxima of dense or candidate documents.

    Args:
        Q: `QueryArgs`.
        D: `DocumentArgs`.
        tiles: Tensor descriptor of all document tokens, or None. See `maxsim_forward`.
        out: `OutputArgs` with scores `[Nq, K]`. Its `argmax` receives the soft maxima of the rows, or is None. With
            C.SPLIT_DOCUMENTS `SoftSplitArgs`.
        tau: Temperature, a number or a pointer to one.
        sizes: `SizeArgs`. With C.SPLIT_DOCUMENTS, K counts splits.
        d: Number of features.
        C: Compile-time choices, a `KernelConfig` with SOFT.
    """
    score_document(Operands(Q, D, tiles, None, None, d, load_temperature(tau)), None, out, sizes, 0, False, C)
