"""Rotation of query rows for documents in a rotated format, in fp64 (`lik_ops.formats.rotation`).

```text
out[r] = Q[r] @ matrix                              # one launch in place of two conversions and a product
```
"""

import triton
import triton.language as tl

from ..common.primitives import load_rows, locate_rows


@triton.jit(do_not_specialize=["rows"])
def maxsim_rotate_queries(Q, matrix, out, rows, Lq, d, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Store rotated query rows.

    Args:
        Q: `QueryArgs` of the query tokens `[Nq, Lq, d]`. Masks and weights are not read.
        matrix: The rotation, fp64 `[d, d]`.
        out: Output `[Nq, Lq, d]` in the dtype of Q.
        rows: Number of rows, ``Nq * Lq``.
        Lq: Tokens of a query.
        d: Number of features.
        BM: Rows of a program.
        BN: Output features of a program.
        BK: Input features of a step.
    """
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    rows_ok, columns_ok = r < rows, c < d
    pointers = locate_rows(Q, r // Lq, r % Lq)
    acc = tl.zeros((BM, BN), tl.float64)
    for k0 in range(0, d, BK):
        k = k0 + tl.arange(0, BK)
        q = load_rows(pointers, rows_ok, k, d, Q.stride_d, 2)
        m = tl.load(matrix + k[:, None] * d + c[None, :], mask=(k < d)[:, None] & columns_ok[None, :], other=0.0)
        acc += tl.sum(q.to(tl.float64)[:, None, :] * tl.trans(m)[None, :, :], axis=2)
    target = out + r.to(tl.int64)[:, None] * d + c[None, :]
    if out.dtype.element_ty != tl.float64:
        # PyTorch converts fp64 to half precision by way of fp32. A direct conversion would round some features
        # differently.
        acc = acc.to(tl.float32)
    tl.store(target, acc.to(out.dtype.element_ty), mask=rows_ok[:, None] & columns_ok[None, :])
