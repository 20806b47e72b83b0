"""fp32 rows as one or two fp16 terms and a scale each, for gradients.

```text
2^e = a power of two that brings the largest finite feature of the row just below 2^15
hi[r] = fp16(x[r] 2^e)                              # 11 bits, as in TF32. Features below 2^-28 of the largest lose bits
lo[r] = fp16((x[r] 2^e - hi[r]) 2^11)               # 11 bits more, if there are two terms
scales[r] = 2^-e * norms[r]
```

With one term, if PyTorch allows TF32, the row sums of the gradients read half the bytes, and multiply by the scale. NaN
and infinity keep their places, so they reach the same gradients.

With two terms, the sums of document gradients are as accurate as in fp32. If a row holds NaN, infinity, or a feature
below 2^-28 of the largest, its term hi is NaN, and its scale is `norms[r]`. The sum then reads the row itself.
"""

import triton
import triton.language as tl

from ..common.fp32 import split_to_fp16
from ..common.primitives import load_rows, locate_numbered_tokens
from .documents.sums import compute_scales, finite_abs

_MIN_EXACT_FEATURE = tl.constexpr(2.0**-14)  # the smallest normal number of fp16


@triton.jit
def _get_nonzero_abs(x):
    """Return the magnitude of each feature, infinity for 0, and 0 for NaN and infinity."""
    size = finite_abs(x)
    return tl.where(x == 0.0, float("inf"), size)


@triton.jit(do_not_specialize=["rows", "L"])
def maxsim_round_rows(X, norms, out, scales, rows, L, d, C: tl.constexpr):
    """Round BM rows to C.FP32_TERMS fp16 terms.

    Args:
        X: `DocumentArgs` of rows `[K, L, d]`, fp32.
        norms: fp32 `[rows]`, or None.
        out: fp16 `[rows, terms, d]`.
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
    smallest = tl.min(_get_nonzero_abs(x), axis=1)
    for c0 in range(C.BD, d, C.BD):
        x = load_rows(pointers, ok, c0 + tl.arange(0, C.BD), d, X.stride_d, C.WIDE_OFFSETS)
        largest = tl.maximum(largest, tl.max(finite_abs(x), axis=1))
        smallest = tl.minimum(smallest, tl.min(_get_nonzero_abs(x), axis=1))
    scale, unscale = compute_scales(largest)
    is_exact = smallest * scale >= _MIN_EXACT_FEATURE
    for c0 in range(0, d, C.BD):
        columns = c0 + tl.arange(0, C.BD)
        if not C.SINGLE_STEP:
            x = load_rows(pointers, ok, columns, d, X.stride_d, C.WIDE_OFFSETS)
        targets = out + r.to(tl.int64)[:, None] * (C.FP32_TERMS * d) + columns[None, :]
        mask = ok[:, None] & (columns < d)[None, :]
        hi, lo = split_to_fp16(x * scale[:, None])
        if C.FP32_TERMS == 2:
            tl.store(targets + d, lo, mask=mask)
            hi = tl.where(is_exact[:, None], hi, tl.full((1, 1), float("nan"), tl.float16))
        tl.store(targets, hi, mask=mask)
    if C.FP32_TERMS == 2:
        unscale = tl.where(is_exact, unscale, 1.0)
    if norms is not None:
        unscale *= tl.load(norms + r, mask=ok, other=0.0)
    tl.store(scales + r, unscale, mask=ok)
