"""The forward of soft MaxSim: that of `forward`, with a log-sum-exp in the place of the maximum."""

import triton
import triton.language as tl

from ..common.arguments import Operands
from ..forward.generic.dense import visit
from .maximum import temperature


@triton.jit
def maxsim_forward_soft(Q, D, tiles, out, tau, sizes, d, C: tl.constexpr):
    """Scores [Nq, K] of (row tile, document) pairs, and the rows' soft maxima: `out`, an `Output`.

    As `maxsim_forward`, with C.SOFT; `tau` is a number or where one lies.
    """
    visit(Operands(Q, D, tiles, None, None, d, temperature(tau)), out, sizes, C)
