"""Sample inputs and references of ``lik::maxsim``, its forward and its backwards."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import lik_ops
from lik_ops.opcheck.samples.gradients import compute_gradients
from lik_ops.opcheck.samples.inputs import Sample, draw_tensors, format_name, list_variants, make_tensors


def maxsim(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    """Yield the samples of ``lik::maxsim``."""
    for shape, layout, candidates, options in list_variants():
        for grad in (False, True):
            Q, D, q_mask, d_mask, w = draw_tensors(shape, layout, dtype, device, candidates, options, grad)
            name = format_name(
                shape, layout, candidates and "candidates", options and "options", grad and "grad", dtype
            )
            yield Sample(name, (Q, D, q_mask, d_mask), {"q_weight": w, "normalize": options})
    Q, D, *_ = draw_tensors("small", "contiguous", dtype, device, False, False, True)
    for backward, recompute in (("lowmem", True), ("unified", False)):
        yield Sample(
            format_name(backward, recompute and "recompute", dtype),
            (Q, D),
            {"backward": backward, "recompute": recompute},
        )
    for name, q, d in (("flat_q", Q[0], D), ("flat_d", Q, D[0]), ("flat", Q[0], D[0])):
        yield Sample(format_name(name, dtype), (q.detach().requires_grad_(), d.detach().requires_grad_()), {})


def maxsim_fwd(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    """Yield the samples of ``lik::maxsim_fwd``."""
    for shape, layout, candidates, options in list_variants():
        for grad, argmax_dtype in ((False, None), (True, torch.int16), (True, torch.int32), (True, None)):
            inputs = draw_tensors(shape, layout, dtype, device, candidates, options, grad)
            name = format_name(
                shape, layout, candidates and "candidates", options and "options", grad and "grad", argmax_dtype, dtype
            )
            yield Sample(name, (*inputs, options, argmax_dtype, "auto"), {})


def maxsim_bwd(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    """Yield the samples of ``lik::maxsim_bwd_lowmem`` and ``lik::maxsim_bwd_unified``."""
    for shape, layout, candidates, options in list_variants():
        Q, D, q_mask, d_mask, w = draw_tensors(shape, layout, dtype, device, candidates, options, False)
        for argmax_dtype, needs in ((torch.int16, (True, True, options)), (torch.int32, (False, True, False))):
            scores, argmax = torch.ops.lik.maxsim_fwd(Q, D, q_mask, d_mask, w, options, argmax_dtype, "auto")
            generator = torch.Generator().manual_seed(1)
            upstream = torch.randn(scores.shape, generator=generator).to(scores)
            name = format_name(shape, layout, candidates and "candidates", options and "options", argmax_dtype, dtype)
            yield Sample(name, (upstream, Q, D, argmax, q_mask, d_mask, w, options, list(needs)), {})


def maxsim_reference(Q, D, q_mask=None, d_mask=None, *, q_weight=None, normalize=False, **_) -> tuple:
    """Return the expected scores."""
    return (lik_ops.reference.maxsim(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize),)


def fwd_reference(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype, backward) -> tuple:
    """Return the expected scores and argmax."""
    scores, argmax = lik_ops.reference.maxsim_with_argmax(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize)
    if argmax_dtype is None:
        return scores, None
    return scores, argmax if D.dim() == 4 else argmax.transpose(0, 1)


def bwd_reference(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs) -> tuple:
    """Return the expected gradients."""

    def scores(Q, D, weight):
        return maxsim_reference(Q, D, q_mask, d_mask, q_weight=weight, normalize=normalize)[0]

    return compute_gradients(scores, grad_scores, (Q, D, q_weight), needs)


def sized_maxsim(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    """Return arguments of ``lik::maxsim`` for given sizes."""
    return make_tensors((*sizes, 8), "contiguous", torch.float32, device, candidates, True)[:4]


def sized_fwd(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    """Return arguments of the forward for given sizes."""
    return *make_tensors((*sizes, 8), "contiguous", torch.float32, device, candidates, True), True, torch.int32, "auto"


def sized_bwd(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    """Return arguments of a backward for given sizes."""
    inputs = make_tensors((*sizes, 8), "contiguous", torch.float32, device, candidates, True)
    scores, argmax = torch.ops.lik.maxsim_fwd(*inputs, True, torch.int32, "auto")
    return torch.ones_like(scores), *inputs[:2], argmax, *inputs[2:], True, [True, True, True]


def maxsim_packaged(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    """Yield the samples of ``lik::maxsim_packaged``."""
    for sample in maxsim_fwd(dtype, device):
        if "grad" not in sample.name:
            yield Sample(sample.name, sample.args[:6], {})


def packaged_reference(Q, D, q_mask, d_mask, q_weight, normalize) -> tuple:
    """Return the expected scores."""
    return maxsim_reference(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize)


def sized_packaged(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    """Return arguments of ``lik::maxsim_packaged`` for given sizes."""
    return sized_fwd(sizes, candidates, device)[:6]
