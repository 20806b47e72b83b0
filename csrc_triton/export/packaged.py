"""The forward with plain arguments: what a compiler that only knows tensors and numbers can put into a package."""

import triton
import triton.language as tl

from ..common.primitives import import_args_class
from ..forward.generic.dense import score_tile_pair


@triton.jit
def maxsim_packaged(
    q, q_stride_n, q_stride_l, q_stride_d,
    q_mask, q_mask_stride_n, q_mask_stride_l,
    weight, weight_stride_n, weight_stride_l,
    docs, d_stride_owner, d_stride_doc, d_stride_l, d_stride_d,
    d_mask, d_mask_stride_owner, d_mask_stride_doc, d_mask_stride_l,
    scores, Nq, K, Lq, Ld, d,
    CANDIDATES: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Scores [Nq, K], one (query, document) pair a program, BM query tokens at a time: right for every shape."""
    Config: tl.constexpr = import_args_class("KernelConfig")
    Queries: tl.constexpr = import_args_class("QueryArgs")
    Documents: tl.constexpr = import_args_class("DocumentArgs")
    Sizes: tl.constexpr = import_args_class("SizeArgs")
    Operands: tl.constexpr = import_args_class("Operands")
    Output: tl.constexpr = import_args_class("OutputArgs")
    C: tl.constexpr = Config(
        BM, BN, BD, BM, 1, CANDIDATES, False, NORMALIZE, 2, PRECISION, False, False, False, True, False
    )
    Q = Queries(
        q, q_stride_n, q_stride_l, q_stride_d, q_mask, q_mask_stride_n, q_mask_stride_l,
        weight, weight_stride_n, weight_stride_l,
    )  # fmt: skip
    D = Documents(
        docs, d_stride_owner, d_stride_doc, d_stride_l, d_stride_d,
        d_mask, d_mask_stride_owner, d_mask_stride_doc, d_mask_stride_l,
    )  # fmt: skip
    # A size of 1 is a constant here, and constants have no methods.
    sizes = Sizes(
        tl.full((), Nq, tl.int32), tl.full((), K, tl.int32), tl.full((), Lq, tl.int32), tl.full((), Ld, tl.int32)
    )
    score_tile_pair(Operands(Q, D, None, None, None, d, None), Output(scores, None), sizes, C)
