"""fp32 rows as one fp16 term and a scale each, for gradients if PyTorch allows TF32.

```text
2^e = a power of two that brings the largest finite feature of the row just below 2^15
out[r] = fp16(x[r] 2^e)                             # 11 bits, as in TF32. Features below 2^-28 of the largest lose bits
scales[r] = 2^-e * norms[r]
```

The row sums of the gradients then read half the bytes, and multiply by the scale. NaN and infinity keep their places,
so they reach the same gradients.
"""

import triton
import triton.language as tl

from ..common.primitives import load_rows, locate_numbered_tokens
from .documents.sums import compute_scales, finite_abs


@triton.jit(do_not_specialize=["rows", "L"])
def maxsim_round_rows(X, norms, out, scales, rows, L, d, C: tl.constexpr):
    """Round BM rows to fp16.

    Args:
        X: `DocumentArgs` of rows `[K, L, d]`, fp32.
        norms: fp32 `[rows]`, or None.
        out: fp16 `[rows, d]`.
        scales: fp32 `[rows]`.
        rows: Number of rows, ``K * L``.
        L: Rows of each document.
        d: Number of features.
        C: `KernelConfig` with BM rows of a program and BD features of a step.
    """
    r = tl.program_id(0) * C.BM + tl.arange(0, C.BM)
    ok = r < rows
    pointers = locate_numbered_tokens(X, r, L)
    x = load_rows(pointers, ok, tl.arange(0, C.BD), d, X.stride_d, C.WIDE_OFFSETS)
    largest = tl.max(finite_abs(x), axis=1)
    for c0 in range(C.BD, d, C.BD):
        x = load_rows(pointers, ok, c0 + tl.arange(0, C.BD), d, X.stride_d, C.WIDE_OFFSETS)
        largest = tl.maximum(largest, tl.max(finite_abs(x), axis=1))
    scale, unscale = compute_scales(largest)
    for c0 in range(0, d, C.BD):
        columns = c0 + tl.arange(0, C.BD)
        if not C.SINGLE_STEP:
            x = load_rows(pointers, ok, columns, d, X.stride_d, C.WIDE_OFFSETS)
        targets = out + r.to(tl.int64)[:, None] * d + columns[None, :]
        tl.store(targets, (x * scale[:, None]).to(tl.float16), mask=ok[:, None] & (columns < d)[None, :])
    if norms is not None:
        unscale *= tl.load(norms + r, mask=ok, other=0.0)
    tl.store(scales + r, unscale, mask=ok)
