"""MaxSim of hidden states in plain PyTorch: document tokens are computed slice by slice and then scored.

A backend provides the functions that project tokens, score them and sum gradients (`HeadFunctions`). Everything else is
shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.arguments import score_dtype
from ...portable.backward.dense import backward_lowmem
from ...portable.blocks import (
    NORM_EPS,
    STEPS,
    MiB,
    compute_row_norms,
    multiply_matrices,
    round_up,
    split_range,
    split_to_fit,
)
from ...portable.forward.dense import allocate_outputs, forward

MAX_TOKEN_BYTES = 8 * MiB  # tokens of a slice; one document may have more
# Memory of a slice of the backward. Half of it is for hidden states if they are copied. One document may need more.
MAX_GRADIENT_BYTES = 32 * MiB
_MAX_BLOCK_BYTES = 4 * MiB
_MAX_ROWS, _MIN_ROWS = 256, 32  # rows of a product
# Tokens of a document for each query row from which the backward copies the tokens that are an argmax. The copy and its
# gradient then take at most a quarter of the memory of the hidden states.
MIN_TOKENS_PER_ROW = 8


class HeadArgs(NamedTuple):
    """The linear layer that projects hidden states to tokens: ``H W^T + b``, divided by its norm if `normalize`."""

    W: Tensor  # [d, d_model]
    b: Tensor | None  # [d]
    normalize: bool


class HiddenArgs(NamedTuple):
    """The tensors of a call, with all their axes and with bool masks."""

    Q: Tensor  # [Nq, Lq, d]
    H: Tensor  # [Nd, Ld, d_model]
    W: Tensor  # [d, d_model]
    b: Tensor | None  # [d]
    q_mask: Tensor | None  # [Nq, Lq]
    d_mask: Tensor | None  # [Nd, Ld]
    q_weight: Tensor | None  # [Nq, Lq], fp32 (fp64 for fp64)

    def scores_shape(self) -> tuple[int, int]:
        """Return ``(Nq, Nd)``."""
        return self.Q.shape[0], self.H.shape[0]

    def argmax_shape(self) -> tuple[int, int, int]:
        """Return ``(Nd, Nq, Lq)``."""
        return self.H.shape[0], *self.Q.shape[:2]

    def documents(self, documents: slice) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states and the mask of some documents."""
        return self.H[documents], None if self.d_mask is None else self.d_mask[documents]

    def new_gradients(self, needs: Sequence[bool]) -> list[Tensor]:
        """Allocate gradients of Q, H, W, b and q_weight, uninitialized, each ``[0]`` if it is not in `needs`."""
        dtypes = (*(self.Q.dtype,) * 4, score_dtype(self.Q.dtype))
        return [
            self.Q.new_empty(x.shape if need and x is not None else (0,), dtype=dtype)
            for x, need, dtype in zip((*self[:4], self.q_weight), needs, dtypes, strict=True)
        ]


class HeadFunctions(NamedTuple):
    """The functions and limits of a backend."""

    tokens: Callable[[Tensor, HeadArgs], tuple[Tensor, Tensor | None]]  # see `project_tokens`
    score: Callable[..., Tensor]  # see `score_tokens`
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]  # the backward of MaxSim
    slopes: Callable[..., tuple[Tensor, Tensor | None]]  # see `project_gradients`
    gather: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # see `gather_argmax_tokens`
    scatter: Callable[[Tensor, Tensor, Tensor, Tensor], None]  # see `scatter_argmax_tokens`
    token_bytes: int  # tokens of a slice of the forward
    rounds: bool  # whether the gradient of tokens has the dtype of tokens, not of scores
    copies: int  # tensors of the size of that gradient that `slopes` needs, including the gradient


def project_tokens(H: Tensor, head: HeadArgs) -> tuple[Tensor, Tensor | None]:
    """Return tokens ``[n, Ld, d]`` of hidden states ``[n, Ld, d_model]``, rounded to the dtype of H, and their norms.

    The norms are ``[n, Ld, 1]`` and at least 1e-12, or None without `normalize`. Products have one shape for any batch,
    so the bits of a token do not depend on the batch.
    """
    (n, L, width), d = H.shape, head.W.shape[0]
    dtype = score_dtype(H.dtype)
    row_step, step, _ = STEPS[dtype]
    max_rows = _MAX_BLOCK_BYTES // (width * dtype.itemsize) // (16 * row_step) * 16 * row_step
    rows = max(_MIN_ROWS, min(_MAX_ROWS, max_rows))
    columns = H.new_zeros((width, round_up(d, step)), dtype=dtype)
    columns[:, :d] = head.W.t()
    bias = None if head.b is None else head.b.to(dtype)
    block, products = H.new_zeros((rows, width), dtype=dtype), H.new_empty((rows, columns.shape[1]), dtype=dtype)
    flat, tokens = H.reshape(-1, width), H.new_empty((n * L, d))
    norms = H.new_empty((n * L, 1), dtype=dtype) if head.normalize else None
    for row_slice in split_range(0, n * L, rows):
        count = row_slice.stop - row_slice.start
        block[:count] = flat[row_slice]
        block[count:] = 0
        torch.mm(block, columns, out=products)
        u = products[:count, :d] if bias is None else products[:count, :d] + bias
        if norms is not None:
            norms[row_slice] = compute_row_norms(u.contiguous())
            u = u / norms[row_slice]
        tokens[row_slice] = u
    return tokens.view(n, L, d), None if norms is None else norms.view(n, L, 1)


def project_gradients(
    G: Tensor, D: Tensor, norms: Tensor, keep: Tensor | None, summed: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient ``[n * Ld, d]`` of ``H W^T + b``, and its sum ``[d]`` over tokens, or None unless `summed`.

    Args:
        G: the gradient of normalized tokens ``[n, Ld, d]``, which may be overwritten.
        D: normalized tokens ``[n, Ld, d]``.
        norms: ``[n, Ld, 1]``.
        keep: mask ``[n, Ld]``, or None. Masked tokens may hold NaN, and their gradient is 0.
        summed: whether the sum is wanted.
    """
    dtype = score_dtype(D.dtype)
    g, unit = G.to(dtype), D.to(dtype)
    projection = (unit * g).sum(-1, keepdim=True).masked_fill_(norms <= NORM_EPS, 0)
    g = (g - unit * projection) / norms
    if keep is not None:
        g = torch.where(keep.unsqueeze(-1), g, 0)
    g = g.reshape(-1, g.shape[-1])
    return g, g.sum(0) if summed else None


def gather_argmax_tokens(H: Tensor, argmax: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the hidden states ``[Nd, Ld, d_model]`` of tokens that are an argmax ``[Nd, Nq, Lq]``, or -1 if none is.

    Returns:
        Hidden states ``[Nd, Nq * Lq, d_model]`` and the argmax among them, in the shape and dtype of `argmax`. Query
        rows with the same token use the copy of the first of them. The other rows are zeros.
    """
    tokens = argmax.flatten(1).long()
    (Nd, rows), slots = tokens.shape, torch.empty_like(tokens)
    for documents in split_to_fit(Nd, rows * rows, _MAX_BLOCK_BYTES):
        t = tokens[documents]
        slots[documents] = (t.unsqueeze(-1) == t.unsqueeze(-2)).byte().argmax(-1)  # the first row with the same token
    slots.masked_fill_(tokens < 0, -1)
    is_slot = slots == torch.arange(rows, device=H.device)
    copies = H[torch.arange(Nd, device=H.device).unsqueeze(-1), tokens.clamp(min=0)]
    return torch.where(is_slot.unsqueeze(-1), copies, 0), slots.to(argmax.dtype).view(argmax.shape)


def scatter_argmax_tokens(gradient: Tensor, argmax: Tensor, slots: Tensor, total: Tensor) -> None:
    """Write the gradient of hidden states from the gradient of their copies to `total` ``[Nd, Ld, d_model]``, zeros.

    `slots` is the second result of `gather_argmax_tokens` for `argmax`.
    """
    is_slot = slots.flatten(1) == torch.arange(gradient.shape[1], device=slots.device)
    document = is_slot.nonzero()[:, 0]
    total[document, argmax.flatten(1)[is_slot].long()] = gradient[is_slot]


def _sum_bias_gradient(grad_scores: Tensor, x: HiddenArgs) -> Tensor:
    """Compute the gradient of b without `normalize`, ``sum g w Q[i, s]``, in the dtype of scores.

    Every kept query token has one winner in every document with a kept token, and b is part of every token. So the
    sum needs neither winners nor the gradients of tokens, which a GPU rounds to the dtype of tokens. Sums are over
    contiguous tensors, because their order depends on strides.
    """
    g = grad_scores if x.d_mask is None else torch.where(x.d_mask.any(-1), grad_scores, 0)
    token_grads = g.contiguous().sum(-1, keepdim=True)
    token_grads = token_grads if x.q_weight is None else token_grads * x.q_weight
    terms = token_grads.unsqueeze(-1) * x.Q.to(token_grads.dtype)
    terms = terms if x.q_mask is None else torch.where(x.q_mask.unsqueeze(-1), terms, 0)
    return terms.contiguous().sum((0, 1))


def score_tokens(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, q_weight: Tensor | None, argmax: Tensor | None
) -> Tensor:
    """Return the scores ``[Nq, Nd]`` of document tokens and, unless it is None, fill `argmax` ``[Nd, Nq, Lq]``."""
    scores, found = forward(Q, D, q_mask, d_mask, q_weight, False, None if argmax is None else argmax.dtype)
    if argmax is not None:
        argmax.copy_(found)
    return scores


PORTABLE_FUNCTIONS = HeadFunctions(
    project_tokens,
    score_tokens,
    backward_lowmem,
    project_gradients,
    gather_argmax_tokens,
    scatter_argmax_tokens,
    MAX_TOKEN_BYTES,
    False,
    4,
)


def score_slices(
    parts: HeadFunctions, x: HiddenArgs, normalize: bool, argmax_dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """Compute scores and argmax for some documents at a time, with the functions `parts` of a backend.

    Returns:
        The argmax ``[Nd, Nq, Lq]``, or ``[0]`` if `argmax_dtype` is None, memory for the scores ``[Nq, Nd]``, and the
        scores ``[Nq, documents]`` of each slice. Without slices, the scores are complete. See `join_slices`.
    """
    dtype = torch.int32 if argmax_dtype is None else argmax_dtype
    scores, argmax, is_trivial = allocate_outputs(x.Q, x.H, x.q_mask, dtype, argmax_dtype is not None, -1)
    outputs = [argmax, scores]
    if is_trivial:
        return tuple(outputs)
    head, (Nd, Ld, _) = HeadArgs(x.W, x.b, normalize), x.H.shape
    for documents in split_to_fit(Nd, Ld * x.W.shape[0] * x.H.element_size(), parts.token_bytes):
        H, d_mask = x.documents(documents)
        D, _ = parts.tokens(H, head)
        part_argmax = None if argmax_dtype is None else argmax[documents]
        outputs.append(parts.score(x.Q, D, x.q_mask, d_mask, x.q_weight, part_argmax))
    return tuple(outputs)


def join_slices(argmax: Tensor, scores: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores ``[Nq, Nd]`` and the argmax of the results of `score_slices`."""
    if len(parts) > 1:
        torch.cat(parts, 1, out=scores)
    return parts[0] if len(parts) == 1 else scores, argmax


class HeadBackward:
    """One backward: gradients flow from the scores through the tokens to hidden states and head.

    ``G[j, t]`` is the gradient of a token, summed by its owner like the gradient of documents. With ``u = H W^T + b``
    and ``n = ||u||``, the gradient of u is ``g = (G - D <D, G>) / n``, or G without `normalize`. The gradient of H is
    ``g W``, of W ``g^T H``, and of b ``sum g``.
    """

    def __init__(
        self,
        parts: HeadFunctions,
        grad_scores: Tensor,
        x: HiddenArgs,
        argmax: Tensor | None,
        normalize: bool,
        needs: list[bool],
    ) -> None:
        self.parts, self.grad_scores, self.x, self.argmax, self.needs = parts, grad_scores, x, argmax, needs
        self.head, self.dtype = HeadArgs(x.W, x.b, normalize), score_dtype(x.Q.dtype)
        self.multiplied = x.H.dtype if parts.rounds else self.dtype

    def run(self) -> tuple[Tensor, ...]:
        """Compute the gradients of Q, H, W, b and q_weight, each ``[0]`` if it is not in `needs`."""
        x, needs = self.x, self.needs
        grads = x.new_gradients(needs)
        if 0 in (*x.Q.shape, *x.H.shape):
            return tuple(grad.zero_() for grad in grads)
        if needs[3] and not self.head.normalize:
            grads[3] = _sum_bias_gradient(self.grad_scores, x).to(x.W.dtype)
        needs_queries, needs_head = needs[0] or needs[4], any(needs[1:3]) or self._sums_slopes
        all_tokens = self.parts.tokens(x.H, self.head) if needs_queries else None
        slices = list(self._slices(all_tokens is not None)) if needs_head else []
        G: Tensor | None = None
        if all_tokens is not None:
            is_single_pass = self.parts.rounds and len(slices) == 1
            grad_Q, grad_D, grad_weight = self._argmax(
                slice(0, x.H.shape[0]), x.Q, all_tokens[0], [needs[0], is_single_pass, needs[4]]
            )
            G = grad_D if is_single_pass else None
            for n, gradient in ((0, grad_Q), (4, grad_weight)):
                grads[n] = gradient if needs[n] else grads[n]
        if needs_head:
            self._add_head_gradients(all_tokens, slices, G, grads)
        return tuple(grads)

    def _argmax(self, documents: slice, Q: Tensor, D: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of MaxSim with the tokens D as documents."""
        x, argmax = self.x, None if self.argmax is None else self.argmax[documents]
        d_mask = x.documents(documents)[1]
        g = self.grad_scores[:, documents]
        return self.parts.backward(g, Q, D, argmax, x.q_mask, d_mask, x.q_weight, False, needs)

    @property
    def _sums_slopes(self) -> bool:
        """Return whether the gradient of b is the sum of the gradients of u."""
        return self.needs[3] and self.head.normalize

    @property
    def _needs_copy(self) -> bool:
        """Return whether the gradient of W needs a copy of hidden states, because of their layout, dtype or mask."""
        H = self.x.H
        return self.x.d_mask is not None or H.dtype != self.multiplied or not H.is_contiguous()

    def _slices(self, has_tokens: bool) -> Iterator[slice]:
        """Split documents such that the gradients of their tokens, and tokens not computed yet, fit the budget."""
        (Nd, Ld, _), parts = self.x.H.shape, self.parts
        bytes_per_feature = parts.copies * self.multiplied.itemsize + (0 if has_tokens else self.x.H.dtype.itemsize)
        room = MAX_GRADIENT_BYTES // 2 if self._needs_copy else MAX_GRADIENT_BYTES
        return split_to_fit(Nd, Ld * self.head.W.shape[0] * bytes_per_feature, room)

    def _add_head_gradients(
        self,
        all_tokens: tuple[Tensor, Tensor | None] | None,
        slices: list[slice],
        G: Tensor | None,
        grads: list[Tensor],
    ) -> None:
        """Compute the gradients of H, W and b, given G, the gradient of tokens, or None to compute it."""
        x, needs = self.x, self.needs
        Q = x.Q if self.parts.rounds else x.Q.to(self.dtype)
        grad_W: Tensor | None = None
        grad_b: Tensor | None = None
        for documents in slices:
            H, keep = x.documents(documents)
            if all_tokens is None:
                D, norms = self.parts.tokens(H, self.head)
            else:
                D, norms = all_tokens[0][documents], None if all_tokens[1] is None else all_tokens[1][documents]
            if G is None:
                G = self._argmax(documents, Q, D.to(Q.dtype), [False, True, False])[1]
            g, sum_b = G.reshape(-1, G.shape[-1]), None  # without `normalize`, masked tokens have zeros already
            if norms is not None:
                g, sum_b = self.parts.slopes(G, D, norms, keep, self._sums_slopes)
            G = None
            if needs[1]:
                self._write(g, grads[1][documents].view(-1, H.shape[-1]))
            if needs[2]:
                grad_W = self._add_weights(grad_W, g, H, keep)
            if sum_b is not None:
                grad_b = sum_b if grad_b is None else grad_b + sum_b
        for n, total in ((2, grad_W), (3, grad_b)):
            if total is not None:
                grads[n] = total.to(x.W.dtype)

    def _add_weights(self, total: Tensor | None, g: Tensor, H: Tensor, keep: Tensor | None) -> Tensor:
        """Add the gradient of W to `total`; masked hidden states become zeros, because they may hold NaN."""
        n, Ld, width = H.shape
        bytes_per_document = Ld * width * self.multiplied.itemsize if self._needs_copy else 0
        for documents in split_to_fit(n, bytes_per_document, MAX_GRADIENT_BYTES // 2):
            h = H[documents] if keep is None else torch.where(keep[documents].unsqueeze(-1), H[documents], 0)
            g_part = g[documents.start * Ld : documents.stop * Ld].t()
            product = self._product(g_part, h.reshape(-1, width))
            total = product if total is None else total.add_(product)
        assert total is not None
        return total

    def _write(self, g: Tensor, grad: Tensor) -> None:
        """Write the gradient of hidden states, ``g W``."""
        if grad.dtype == self.dtype or grad.device.type == "cuda":
            torch.mm(g.to(grad.dtype), self.x.W.contiguous(), out=grad)
        else:
            grad.copy_(self._product(g, self.x.W))

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute ``a b``, accumulated in fp32 (fp64); half dtypes on a GPU use tensor cores."""
        if b.dtype == self.dtype or b.device.type != "cuda":
            # Contiguous, because the bits would depend on the strides of the caller.
            return multiply_matrices(a.to(self.dtype), b.to(self.dtype).contiguous())
        return torch.mm(a.to(b.dtype), b, out_dtype=self.dtype)


def compute_gradients(
    parts: HeadFunctions,
    grad_scores: Tensor,
    x: HiddenArgs,
    argmax: Tensor | None,
    normalize: bool,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """Compute the gradients of Q, H, W, b and q_weight, each ``[0]`` if it is not in `needs`.

    Only tokens that are an argmax have gradients. If query rows are few, these tokens are copied, and all products are
    of the copies. An `argmax` of None is recomputed.
    """
    (Nq, Lq, _), (Nd, Ld, _) = x.Q.shape, x.H.shape
    if argmax is None or not 0 < MIN_TOKENS_PER_ROW * Nq * Lq <= Ld or 0 in (Nd, x.W.shape[0]):
        return HeadBackward(parts, grad_scores, x, argmax, normalize, needs).run()
    # The largest write comes first, so that the GPU is busy while the host launches the rest.
    grad_H = x.H.new_zeros(x.H.shape) if needs[1] else None
    copies, slots = parts.gather(x.H, argmax)
    inner_needs = [*needs[:3], needs[3] and normalize, needs[4]]
    inner = HeadBackward(parts, grad_scores, x._replace(H=copies, d_mask=None), slots, normalize, inner_needs)
    grads = list(inner.run())
    if grad_H is not None:
        parts.scatter(grads[1], argmax, slots, grad_H)
        grads[1] = grad_H
    if needs[3] and not normalize:
        grads[3] = _sum_bias_gradient(grad_scores, x).to(x.W.dtype)
    return tuple(grads)


def forward_head(x: HiddenArgs, normalize: bool, argmax_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Compute the scores and argmax of `lik::maxsim_from_hidden_fwd` from validated arguments."""
    return join_slices(*score_slices(PORTABLE_FUNCTIONS, x, normalize, argmax_dtype))


def backward_head(
    grad_scores: Tensor, x: HiddenArgs, argmax: Tensor | None, normalize: bool, needs: list[bool]
) -> tuple[Tensor, ...]:
    """Compute the gradients of `lik::maxsim_from_hidden_bwd`; an `argmax` of None is computed again."""
    return compute_gradients(PORTABLE_FUNCTIONS, grad_scores, x, argmax, normalize, needs)
