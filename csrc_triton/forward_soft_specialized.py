"""The forward of soft MaxSim on sm_90 for many query rows: that of `forward_specialized`, with sums of exponentials in
the place of winners.

Exponentials of a tile take the special function unit as long as its products take the matrix unit. The two groups of
warps go by turns, so that one's exponentials run beside the other's products. Scores have the bits of
`maxsim_forward_soft`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .forward_specialized import CONSUMER_REGISTERS, PRODUCER_REGISTERS, Beside, consume, produce, share_of_pairs
from .ring import shared_ring
from .soft import checked_temperature, rate_of


@gluon.jit(do_not_specialize=["parts"])
def maxsim_forward_soft_specialized(Q, D, out, tau, sizes, d, parts, C: gl.constexpr):
    """As `maxsim_forward_specialized`, with C.SOFT; `tau` is a number or where one lies.

    `out`, an `Output`, has the rows' soft maxima in the place of winners.
    """
    if tau.dtype.is_ptr():
        tau = gl.load(tau)
    tau = checked_temperature(tau)
    begin, end = share_of_pairs(sizes, parts, C)
    ring, q_smem = shared_ring(D, C)
    x = Beside(Q, None, parts, d, tau, rate_of(tau, 1.0))
    gl.warp_specialize(
        [
            (consume, (x, D, None, ring, q_smem, out, begin, end, sizes, 0, C)),
            (consume, (x, D, None, ring, q_smem, out, begin, end, sizes, 1, C)),
            (produce, (D, None, ring, begin, end, sizes.K, sizes.Ld, C)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
