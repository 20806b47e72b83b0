"""The forward of soft MaxSim: that of `forward`, with a log-sum-exp in the place of the maximum."""

import triton
import triton.language as tl

from ..common.arguments import Operands
from ..forward.generic.dense import score_tile_pair
from .maximum import load_temperature


@triton.jit
def maxsim_forward_soft(Q, D, tiles, out, tau, sizes, d, C: tl.constexpr):
    """Scores [Nq, K] of (row tile, document) pairs, and the rows' soft maxima: `out`, an `OutputArgs`.

    As `maxsim_forward`, with C.SOFT; `tau` is a number or where one lies.
    """
    score_tile_pair(Operands(Q, D, tiles, None, None, d, load_temperature(tau)), out, sizes, C)
