"""Forward kernel with plain arguments, for compilers that package a kernel and know only tensors and numbers.

It builds the argument groups of `maxsim_forward` and runs its `score_document` with a fixed configuration:

```text
program = (query i, document k)
for s0 in range(0, Lq, BM): total += tree_sum(q_weight * compute_row_maxima(query tokens s0 to s0 + BM - 1))
scores[i, k] = total
```

The configuration reads through pointers with 64-bit offsets and is correct for every shape.
"""

import triton
import triton.language as tl

from ..common.primitives import import_args_class
from ..forward.generic.kernel import score_document


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
    """Compute scores `[Nq, K]`, one (query, document) pair for each program, BM query tokens at a time."""
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
    score_document(Operands(Q, D, None, None, None, d, None), None, Output(scores, None), sizes, 0, False, C)
