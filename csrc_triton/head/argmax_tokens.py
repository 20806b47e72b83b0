"""Hidden states of the tokens that are an argmax, for a backward with few query rows and long documents.

Row r of a document has the token ``argmax[r]``. Rows that share a token share the slot of the first of them:

```text
maxsim_gather_argmax_tokens:
    slot[r] = first row with the token of row r, or -1 without an argmax
    out[r] = H[argmax[r]] if slot[r] == r else 0
maxsim_scatter_argmax_tokens, over zeros:
    grad_H[argmax[r]] = gradient[r] if slot[r] == r
```

One row of each token is written, so no program adds to another one's output.
"""

import triton
import triton.language as tl

from ..common.primitives import locate_program_rows


@triton.jit
def _find_first_row(argmax, token, last, rows, BLOCK: tl.constexpr):
    """Return the first of the document's rows up to `last` that has each token."""
    first = tl.full(token.shape, 0, tl.int32) + rows
    for s0 in tl.range(0, last + 1, BLOCK, num_stages=1):
        s = s0 + tl.arange(0, BLOCK)
        other = tl.load(argmax + s, mask=s < rows, other=-1).to(tl.int32)
        first = tl.minimum(first, tl.min(tl.where(other[None, :] == token[:, None], s[None, :], rows), axis=1))
    return first


@triton.jit(do_not_specialize=["rows"])
def maxsim_gather_argmax_tokens(H, argmax, slots, out, rows, width, BLOCK: tl.constexpr, FEATURES: tl.constexpr):
    """Store the slot of each row, and the hidden states of the rows that are a slot.

    Args:
        H: `DocumentArgs` of hidden states. The mask is not read.
        argmax: `[documents, rows]`, -1 without an argmax.
        slots: Output `[documents, rows]`.
        out: Output `[documents, rows, width]`.
        rows: Query rows of a document.
        width: Hidden features.
        BLOCK: Rows of a program.
        FEATURES: Features of a step.
    """
    document, r, ok = locate_program_rows(rows, BLOCK)
    document = document.to(tl.int64)
    argmax += document * rows
    token = tl.load(argmax + r, mask=ok, other=-1).to(tl.int32)
    first = _find_first_row(argmax, token, tl.max(r, axis=0), rows, BLOCK)
    tl.store(slots + (document * rows + r), tl.where(token >= 0, first, -1).to(slots.dtype.element_ty), mask=ok)
    is_slot = (token >= 0) & (first == r)
    source = H.ptr + document * H.stride_doc + token.to(tl.int64) * H.stride_l
    target = out + (document * rows + r) * width
    for c0 in tl.range(0, width, FEATURES):
        c = c0 + tl.arange(0, FEATURES)
        mask = (c < width)[None, :]
        x = tl.load(source[:, None] + (c.to(tl.int64) * H.stride_d)[None, :], mask=is_slot[:, None] & mask, other=0.0)
        tl.store(target[:, None] + c[None, :], x, mask=ok[:, None] & mask)


@triton.jit(do_not_specialize=["rows"])
def maxsim_scatter_argmax_tokens(
    gradient, argmax, slots, grad_H, rows, Ld, width, BLOCK: tl.constexpr, FEATURES: tl.constexpr
):
    """Store the gradients of the rows that are a slot to `grad_H` `[documents, Ld, width]`, which holds zeros.

    The other arguments are those of `maxsim_gather_argmax_tokens`. `gradient` is `[documents, rows, width]`.
    """
    document, r, ok = locate_program_rows(rows, BLOCK)
    document = document.to(tl.int64)
    token = tl.load(argmax + (document * rows + r), mask=ok, other=-1).to(tl.int32)
    slot = tl.load(slots + (document * rows + r), mask=ok, other=-1).to(tl.int32)
    is_slot = (token >= 0) & (slot == r)
    source = gradient + (document * rows + r) * width
    target = grad_H + (document * Ld + token) * width
    for c0 in tl.range(0, width, FEATURES):
        c = c0 + tl.arange(0, FEATURES)
        mask = is_slot[:, None] & (c < width)[None, :]
        tl.store(target[:, None] + c[None, :], tl.load(source[:, None] + c[None, :], mask=mask, other=0.0), mask=mask)
