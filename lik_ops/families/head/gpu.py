"""MaxSim of hidden states by Triton kernels.

For few query rows, one kernel computes tokens and scores them without storing them. For more rows, tokens of some
documents at a time are stored, and scored by the forward of stored tokens.
"""

from __future__ import annotations

import logging
from typing import TypeAlias

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...csrc_triton.common.arguments import HeadConfig, LinearArgs
from ...csrc_triton.head.argmax_tokens import maxsim_gather_argmax_tokens, maxsim_scatter_argmax_tokens
from ...csrc_triton.head.kernels import (
    maxsim_forward_head,
    maxsim_head_slopes,
    maxsim_head_tokens,
    maxsim_scale_tokens,
    maxsim_split_weights,
)
from ...gpu.backward.dense import backward_lowmem
from ...gpu.forward.dense import forward_plan
from ...gpu.runtime import launcher
from ...gpu.runtime.arguments import (
    architecture,
    check_grid,
    choose_offset_width,
    is_tf32_allowed,
    make_document_args,
    make_query_args,
    make_size_args,
    supports_descriptor,
    use_device,
)
from ...gpu.runtime.capture import Calls
from ...gpu.tuning.architectures import Architecture, cdiv
from ...portable.blocks import MiB, split_to_fit
from . import configs as head_configs
from .portable import (
    HeadArgs,
    HeadFunctions,
    HiddenArgs,
    compute_gradients,
    join_slices,
    project_gradients,
    project_tokens,
    score_slices,
)

_log = logging.getLogger("lik_ops")
_INT32_MAX = 2**31 - 1
_SUM_BYTES = 32 * MiB  # fp32 features of some documents
Tiles: TypeAlias = TensorDescriptor | None
captured_calls = Calls()


def _describe(*tensors: Tensor | None) -> list[tuple | None]:
    """Return the metadata of tensors for the key of a captured call."""
    return [None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors]


def _choose_offset_width(H: Tensor, W: Tensor) -> int:
    """Return `HeadConfig.WIDE_OFFSETS`."""
    return max(choose_offset_width(W, H), 1)


def _make_linear_args(W: Tensor, b: Tensor | None) -> LinearArgs:
    """Return a linear layer, with weights or their terms `[terms, d, width]`, as a kernel argument."""
    return LinearArgs._make((W, *W.stride()[1:], None if b is None else b.contiguous()))


def _make_descriptors(
    H: Tensor, max_documents: int, W: Tensor, arch: Architecture, config: HeadConfig
) -> tuple[Tiles, Tiles]:
    """Return TMA descriptors of hidden states and weights, each None if TMA cannot read the tensor.

    `max_documents` is the maximum number of documents of a program. W has the shape `[terms, d, width]`.
    """

    def described(x: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Tiles:
        """Return the descriptor of a tensor, or None."""
        if not (arch.has_descriptors and supports_descriptor(x)) or x.data_ptr() % 16:
            return None
        return TensorDescriptor(x, shape, strides, block)

    n, L, width = H.shape
    rows = described(
        H, [n - max_documents + 1, max_documents * L, width], [L * width, width, 1], [1, config.BN, config.BK]
    )
    return rows, described(W, list(W.shape), [W.shape[1] * width, width, 1], [1, config.BD, config.BK])


def _compute_tokens(H: Tensor, head: HeadArgs) -> tuple[Tensor, Tensor | None]:
    """Return the results of `project_tokens`, computed by `maxsim_head_tokens`."""
    n, L, _ = H.shape
    if n * L > _INT32_MAX - head_configs.MAX_TILE_ROWS:
        return project_tokens(H, head)
    tensors = H, head.W, head.b
    key = "tokens", *_describe(*tensors), head.normalize, is_tf32_allowed(H.dtype)
    out, *norms_or_none = captured_calls.run(key, tensors, H.device, _compute_features, H, head)
    return out, *(norms_or_none or (None,))


def _allocate_tokens(H: Tensor, head: HeadArgs) -> tuple[Tensor, Tensor | None]:
    """Allocate the results of `project_tokens`."""
    (n, L, _), d = H.shape, head.W.shape[0]
    return H.new_empty((n, L, d)), H.new_empty((n, L, 1), dtype=torch.float32) if head.normalize else None


def _compute_features(H: Tensor, head: HeadArgs) -> tuple[Tensor, ...]:
    """Return the tokens, and their norms if they are normalized."""
    (n, L, width), (d, _), tf32 = H.shape, head.W.shape, is_tf32_allowed(H.dtype)
    arch, wide = architecture(H.device), _choose_offset_width(H, head.W)
    launch = head_configs.configure_tokens(arch, H.dtype, d, width, head.normalize, wide, tf32)
    launch = head_configs.adjust_for_few_tokens(launch, arch, n * L, d)
    out, norms = _allocate_tokens(H, head)
    with use_device(H.device):
        W = _split_weights(head.W, launch.config.TF32_TERMS)
        if norms is None or d <= launch.config.BD:
            _launch_tokens(H, W, head.b, (out, norms, None), launch)
        else:
            _compute_in_parts(H, W, head.b, out, norms, launch.change(NORMALIZE=False))
    return (out,) if norms is None else (out, norms)


def _compute_in_parts(
    H: Tensor, W: Tensor, b: Tensor | None, out: Tensor, norms: Tensor, launch: head_configs.HeadLaunchConfig
) -> None:
    """Write the tokens `out` and their norms if no program has all features.

    A first launch stores the features in fp32, for some documents at a time. The next divides them by their norms.
    """
    (n, L, d), in_place = out.shape, out.dtype == torch.float32
    BN, BD, options = head_configs.configure_scaling(d)
    parts = cdiv(d, launch.config.BD)
    for docs in split_to_fit(n, 0 if in_place else 4 * L * d, _SUM_BYTES):
        tokens, rows = out[docs], (docs.stop - docs.start) * L
        sums = tokens if in_place else torch.empty_like(tokens, dtype=torch.float32)
        squares = torch.empty((parts, rows), dtype=torch.float32, device=H.device)
        _launch_tokens(H[docs], W, b, (sums, None, squares), launch)
        args = sums, tokens, norms[docs], squares, rows, d, parts, BN, BD
        launcher.launch(maxsim_scale_tokens, check_grid(cdiv(rows, BN)), args, options)


def _split_weights(W: Tensor, terms: int) -> Tensor:
    """Return the TF32 terms of weights, `[terms, d, width]`, or the weights themselves as a term if `terms` is 0."""
    if terms == 0:
        return W[None]
    out, block = W.new_empty((terms, *W.shape)), head_configs.SPLIT_BLOCK
    args = _make_linear_args(W[None], None), out, W.shape[1], W.numel(), block, terms
    launcher.launch(maxsim_split_weights, check_grid(cdiv(W.numel(), block)), args, {"num_warps": 4})
    return out


def _launch_tokens(
    H: Tensor,
    W: Tensor,
    b: Tensor | None,
    outputs: tuple[Tensor, Tensor | None, Tensor | None],
    launch: head_configs.HeadLaunchConfig,
) -> None:
    """Launch `maxsim_head_tokens`.

    Args:
        H: hidden states.
        W: weights or their terms, `[terms, d, width]`.
        b: bias, or None.
        outputs: the arguments `out`, `norms` and `squares` of the kernel.
        launch: its launch.
    """
    (n, L, width), d, arch = H.shape, W.shape[1], architecture(H.device)
    tiles = _make_descriptors(H, n, W, arch, launch.config)
    groups = make_document_args(H, None), _make_linear_args(W, b), *tiles, *outputs
    args = *groups, width, d, n * L, L, launch.config
    grid = check_grid(cdiv(n * L, launch.config.BN) * cdiv(d, launch.config.BD))
    launcher.launch(maxsim_head_tokens, grid, args, launch.options(arch))


def _compute_slopes(
    G: Tensor, D: Tensor, norms: Tensor, keep: Tensor | None, summed: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the results of `project_gradients`, rounded and stored in place of G."""
    n, L, d = G.shape
    rows = n * L
    if rows > _INT32_MAX - head_configs.MAX_TILE_ROWS:
        return project_gradients(G, D, norms, keep, summed)
    tensors = G, D, norms, keep
    key = "slopes", *_describe(*tensors), summed
    sums = captured_calls.run(key, tensors, G.device, _launch_slopes, *tensors, summed)
    return G.view(rows, d), sums[0].sum(0) if summed else None


def _launch_slopes(G: Tensor, D: Tensor, norms: Tensor, keep: Tensor | None, summed: bool) -> tuple[Tensor, ...]:
    """Store the gradients of the sums in place of G. Return the sums over the tokens of each program if `summed`."""
    n, L, d = G.shape
    BN, BD, programs, options = head_configs.configure_slopes(architecture(G.device), d, n * L)
    sums = G.new_empty((programs, d), dtype=torch.float32) if summed else None
    with use_device(G.device):
        args = make_document_args(G, keep), D, norms, sums, d, n * L, L, BN, BD
        launcher.launch(maxsim_head_slopes, check_grid(programs), args, options)
    return () if sums is None else (sums,)


def _gather_argmax_tokens(H: Tensor, argmax: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of `portable.gather_argmax_tokens`."""
    argmax = argmax.contiguous()
    key = "gather", *_describe(H, argmax)
    return captured_calls.run(key, (H, argmax), H.device, _launch_gather, H, argmax)


def _launch_gather(H: Tensor, argmax: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the hidden states of the tokens that are an argmax. See `portable.gather_argmax_tokens`."""
    Nd, rows, width = H.shape[0], argmax.shape[1] * argmax.shape[2], H.shape[-1]
    copies, slots = H.new_empty((Nd, rows, width)), torch.empty_like(argmax)
    with use_device(H.device):
        args = make_document_args(H, None), argmax, slots, copies, rows, width, *head_configs.ARGMAX_TOKENS_BLOCK
        grid = check_grid(Nd * cdiv(rows, head_configs.ARGMAX_TOKENS_BLOCK[0]))
        launcher.launch(maxsim_gather_argmax_tokens, grid, args, {"num_warps": 4})
    return copies, slots


def _scatter_argmax_tokens(gradient: Tensor, argmax: Tensor, slots: Tensor, total: Tensor) -> None:
    """Write the result of `portable.scatter_argmax_tokens`."""
    tensors = gradient, argmax.contiguous(), slots, total
    captured_calls.run(("scatter", *_describe(*tensors)), tensors, gradient.device, _launch_scatter, *tensors)


def _launch_scatter(gradient: Tensor, argmax: Tensor, slots: Tensor, total: Tensor) -> tuple[()]:
    """Copy gradients to the tokens that are an argmax. See `portable.scatter_argmax_tokens`."""
    (Nd, rows, width), Ld = gradient.shape, total.shape[1]
    with use_device(gradient.device):
        args = gradient, argmax, slots, total, rows, Ld, width, *head_configs.ARGMAX_TOKENS_BLOCK
        grid = check_grid(Nd * cdiv(rows, head_configs.ARGMAX_TOKENS_BLOCK[0]))
        launcher.launch(maxsim_scatter_argmax_tokens, grid, args, {"num_warps": 4})
    return ()


def _score_tokens(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, q_weight: Tensor | None, argmax: Tensor | None
) -> Tensor:
    """Return the result of `portable.score_tokens`."""
    plan = forward_plan(Q, D, q_mask, d_mask, q_weight, False, None if argmax is None else argmax.dtype)
    return plan.fill(Q, D, q_mask, d_mask, q_weight, argmax)


_HEAD_PARTS = HeadFunctions(
    _compute_tokens,
    _score_tokens,
    backward_lowmem,
    _compute_slopes,
    _gather_argmax_tokens,
    _scatter_argmax_tokens,
    32 * MiB,
    True,
    1,
)


def _compute_scores(x: HiddenArgs, normalize: bool) -> tuple[Tensor]:
    """Return the scores of a call for which `is_fused` holds, without storing tokens."""
    (Nq, Lq, d), (Nd, _, width) = x.Q.shape, x.H.shape
    arch, wide = architecture(x.Q.device), max(_choose_offset_width(x.H, x.W), choose_offset_width(x.Q, x.Q))
    launch = head_configs.configure_scores(arch, x.Q.dtype, Nq, Lq, d, width, normalize, wide)
    _log.debug("maxsim_forward_head on %s for %s: %s", arch.name, make_size_args(x.Q, x.H), launch.tile())
    scores = torch.empty((Nq, Nd), dtype=torch.float32, device=x.Q.device)
    with use_device(x.Q.device):
        programs = min(Nd, launch.walkers)
        tiles = _make_descriptors(x.H, cdiv(Nd, programs), x.W[None], arch, launch.config)
        linear = _make_linear_args(x.W[None], x.b)
        groups = make_query_args(x.Q, x.q_mask, x.q_weight), make_document_args(x.H, x.d_mask), linear
        args = *groups, *tiles, scores, make_size_args(x.Q, x.H), width, d, launch.config
        launcher.launch(maxsim_forward_head, check_grid(programs), args, launch.options(arch))
    return (scores,)


def forward_head(x: HiddenArgs, normalize: bool, argmax_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return the scores and argmax of `lik::maxsim_from_hidden_fwd`."""
    (Nq, Lq, d), (Nd, Ld, _) = x.Q.shape, x.H.shape
    is_fused = head_configs.is_fused(architecture(x.Q.device), x.Q.dtype, Nq, Nd, Lq, Ld, d)
    if Nq and Lq and is_fused and argmax_dtype is None:
        key = "scores", *_describe(*x), normalize
        scores = captured_calls.run(key, x, x.Q.device, _compute_scores, x, normalize)[0]
        return scores, torch.empty(0, dtype=torch.int32, device=x.Q.device)
    _log.debug("tokens of %s, then maxsim_forward, for %s", list(x.H.shape), make_size_args(x.Q, x.H))
    slices_key = "slices", *_describe(*x), normalize, argmax_dtype, is_tf32_allowed(x.Q.dtype)
    arguments = _HEAD_PARTS, x, normalize, argmax_dtype
    return join_slices(*captured_calls.run(slices_key, x, x.Q.device, score_slices, *arguments))


def backward_head(
    grad_scores: Tensor, x: HiddenArgs, argmax: Tensor | None, normalize: bool, needs: list[bool]
) -> tuple[Tensor, ...]:
    """Return the gradients of `lik::maxsim_from_hidden_bwd`.

    An `argmax` of None is recomputed.
    """
    return compute_gradients(_HEAD_PARTS, grad_scores, x, argmax, normalize, needs)
