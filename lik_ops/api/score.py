"""Public scoring functions for dense tensors: all pairs, candidates and aligned pairs, with or without the argmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .._ops import ops as lik
from ..core.arguments import Backward, Save, check_dense, check_options, check_save, check_types
from ..core.arrays import share_token_arrays
from ..formats.index import Index
from ..formats.quantized import Quantized
from ..ops import maxsim as operators
from ..ops import saved
from ..ops.fast_path import eager
from ..ops.stack import autocast
from . import inputs
from .inputs import ArgmaxOutput, Tokens, prepare_args
from .packing import is_sequences

if TYPE_CHECKING:
    import numpy as np

__all__ = ["maxsim", "maxsim_pairs", "maxsim_with_argmax"]

_is_compiling = torch.compiler.is_dynamo_compiling


def maxsim(
    Q: Tokens,
    D: Tokens,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
    recompute: bool = False,
    save: Save | None = None,
) -> Tensor:
    """Compute late-interaction scores ``score[i, j] = sum_s q_weight[i, s] * max_t <Q[i, s], D[j, t]>``.

    The formula is equation 3 of ColBERT (Khattab and Zaharia, 2020). The similarities ``[Nq, Nd, Lq, Ld]`` are never
    stored, neither in the forward nor in the backward. The function is equivalent to ``torch.ops.lik.maxsim``.

    Args:
        Q: query token embeddings ``[Nq, Lq, d]``, or ``[Lq, d]`` for one query. The dtype is fp16, bf16, fp32 or fp64.
            Queries of different lengths are a list of ``[L_i, d]`` or a jagged nested tensor. Tensors may also be
            numpy arrays, here and in the other arguments.
        D: document token embeddings of the dtype and device of Q. ``[Nd, Ld, d]`` scores every query against every
            document. ``[Nq, K, Ld, d]`` scores each query against its own K candidates. ``[Ld, d]`` is one document.
            Documents of different lengths are a list of ``[L_i, d]`` or a jagged nested tensor. With lists and nested
            tensors, every query is scored against every document. The values of a jagged tensor are used without a
            copy.
        q_mask: query tokens to keep, with the shape of Q without d. The dtype is bool (True = keep), or an integer
            dtype read as ``!= 0``. Masked query tokens are excluded from the sum.
        d_mask: document tokens to keep, with the shape of D without d. Masked document tokens are excluded from the
            maximum. Any pattern is allowed, including holes. The values of masked tokens never matter, even NaN. Lists
            and nested tensors have no mask: leave tokens out instead.
        q_weight: the weight of each query token, with the shape of Q without d; fp32 (fp64 for fp64 inputs).
            Differentiable. For a list of queries, pass a list of ``[L_i]`` or packed weights ``[Tq]``. For a jagged
            tensor, pass a jagged tensor that shares its offsets or packed weights ``[Tq]``.
        normalize: L2-normalize every token first, like ``torch.nn.functional.normalize``. No normalized copy is stored.
        backward: ``"lowmem"`` is reproducible and uses no atomics. ``"unified"`` is one pass with atomic adds on a GPU.
            ``"auto"`` is the same as ``"lowmem"``.
        recompute: do not keep the argmax for the backward, which computes it again. This saves memory and costs time.
        save: None or ``"int8"``. With ``"int8"``, autograd keeps the documents as int8 with one scale per token. This
            needs half the memory of fp16 and bf16 if nothing else keeps D alive. Scores do not change. The gradients of
            Q and `q_weight` are computed from the int8 tokens at the argmax. The gradient of D is exact, except for the
            norms of `normalize`. Only for dense tensors and without `recompute`.

    Returns:
        Scores ``[Nq, Nd]`` or ``[Nq, K]`` in fp32 (fp64 for fp64 inputs). A 2-D Q or D drops its axis. A document
        without kept tokens scores ``-inf``. A query without kept tokens scores 0.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(5, 300, 128)
        >>> lik_ops.maxsim(Q, D, normalize=True).shape
        torch.Size([2, 5])
        >>> lik_ops.maxsim(Q, [torch.randn(n, 128) for n in (300, 7, 40)], normalize=True).shape
        torch.Size([2, 3])
    """
    if save is not None:
        return _score_saved((Q, D, q_mask, d_mask, q_weight), normalize, backward, recompute, save)
    compiling = _is_compiling()
    if not compiling:
        # Skips the dispatcher, which costs microseconds. The operator below tries the same path for direct callers.
        if isinstance(D, Quantized):
            per_token, settings = (q_mask, d_mask, q_weight), (normalize, backward, recompute)
            scores = eager.repeat_maxsim_quantized(Q, D, None, None, per_token, settings)
        else:
            scores = eager.try_maxsim(Q, D, q_mask, d_mask, q_weight, normalize, backward, recompute)
        if scores is not None:
            return scores
    # Compiled code guards on everything that is read below. The common case is therefore checked first, and reads few
    # names.
    if not (isinstance(Q, Tensor) and isinstance(D, Tensor) and q_mask is None and d_mask is None and q_weight is None):
        Q, D, q_mask, d_mask, q_weight = share_token_arrays("maxsim", (Q, D, q_mask, d_mask, q_weight))
    if not (isinstance(Q, Tensor) and isinstance(D, Tensor)) or Q.is_nested or D.is_nested:
        if is_sequences(Q) or is_sequences(D) or isinstance(D, (Quantized, Index)):
            return _score_sequences("maxsim", (Q, D, q_mask, d_mask, q_weight), normalize, backward, recompute)[0]
        if has_torch_function((Q, D)):  # a torch.fx Proxy: symbolic tracing records the call
            options: dict[str, Any] = {"normalize": normalize, "backward": backward, "recompute": recompute}
            options["q_weight"] = q_weight
            return handle_torch_function(maxsim, (Q, D), Q, D, q_mask, d_mask, **options)
        check_types("maxsim", Q, D, q_mask, d_mask, q_weight)  # the dispatcher's errors would not name the argument
    if not (q_mask is None and d_mask is None and q_weight is None):
        check_types("maxsim", Q, D, q_mask, d_mask, q_weight)
    if not (normalize is False and recompute is False and isinstance(backward, str) and backward == "auto"):
        check_options("maxsim", normalize, backward, recompute)
    return lik.maxsim(
        Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize, backward=backward, recompute=recompute
    )


def _check_save_option(op: str, Q: Any, D: Any, recompute: bool, save: Any) -> None:
    """Raise unless `save` is valid for these inputs and `recompute`."""
    check_save(op, save, recompute)
    for name, x in (("Q", Q), ("D", D)):
        if is_sequences(x) or isinstance(x, (Quantized, Index)):
            raise TypeError(f"{op}: {name}: expected a dense Tensor with save={save!r}, got {type(x).__name__}")


def _score_saved(tensors: tuple[Any, ...], normalize: bool, backward: str, recompute: bool, save: Any) -> Tensor:
    """Return the scores of dense tensors, with the documents saved for the backward as int8."""
    _check_save_option("maxsim", tensors[0], tensors[1], recompute, save)
    tensors = share_token_arrays("maxsim", tensors)
    check_types("maxsim", *tensors)
    check_options("maxsim", normalize, backward, recompute)
    return operators.call_dispatched("maxsim", saved.forward_saving_int8, tensors, normalize, backward)[0]


def maxsim_pairs(
    Q: Tokens,
    D: Tokens,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
    recompute: bool = False,
    save: Save | None = None,
) -> Tensor:
    """Compute the MaxSim score of query i and document i only.

    Args:
        Q: query tokens ``[B, Lq, d]``, a list of ``[L_i, d]`` or a jagged nested tensor.
        D: document tokens ``[B, Ld, d]``, a list of ``[L_i, d]`` or a jagged nested tensor.
        q_mask: query tokens to keep ``[B, Lq]``, as in `maxsim`.
        d_mask: document tokens to keep ``[B, Ld]``, as in `maxsim`.
        q_weight: the weight of each query token, as in `maxsim`.
        normalize: L2-normalize every token first.
        backward: ``"lowmem"``, ``"unified"`` or ``"auto"``, as in `maxsim`.
        recompute: do not keep the argmax for the backward, as in `maxsim`.
        save: None or ``"int8"``, as in `maxsim`.

    Returns:
        Scores ``[B]`` in fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong, Q or D is not 3-D, or the batch sizes differ.

    Example:
        >>> Q, D = torch.randn(4, 32, 128), torch.randn(4, 300, 128)
        >>> lik_ops.maxsim_pairs(Q, D, normalize=True).shape
        torch.Size([4])
    """
    if save is not None:
        _check_save_option("maxsim_pairs", Q, D, recompute, save)
    Q, D, q_mask, d_mask, q_weight = share_token_arrays("maxsim_pairs", (Q, D, q_mask, d_mask, q_weight))
    if is_sequences(Q) or is_sequences(D) or isinstance(D, (Quantized, Index)):
        options: dict[str, Any] = {"normalize": normalize, "backward": backward, "recompute": recompute}
        g = prepare_args("maxsim_pairs", Q, D, q_mask=q_mask, d_mask=d_mask, q_weight=q_weight, **options)
        return inputs.score_aligned_pairs(g)
    check_options("maxsim_pairs", normalize, backward, recompute)
    Q, D, q_weight = autocast.cast_to_autocast(Q, D, q_weight)
    check_dense("maxsim_pairs", Q, D, q_mask, d_mask, q_weight, backward)
    if Q.dim() != 3 or D.dim() != 3:
        raise ValueError(
            f"maxsim_pairs: Q, D: expected [B, Lq, d] and [B, Ld, d], got {list(Q.shape)} and {list(D.shape)}"
        )
    if Q.shape[0] != D.shape[0]:
        raise ValueError(f"maxsim_pairs: D: expected B = {Q.shape[0]} documents, got {list(D.shape)}")
    d_mask = None if d_mask is None else d_mask.unsqueeze(1)
    keywords: dict[str, Any] = {"normalize": normalize, "backward": backward, "recompute": recompute, "save": save}
    return maxsim(Q, D.unsqueeze(1), q_mask, d_mask, q_weight=q_weight, **keywords).squeeze(1)


@overload
def maxsim_with_argmax(
    Q: Tensor | np.ndarray,
    D: Tokens,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
    recompute: bool = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def maxsim_with_argmax(
    Q: Sequence[Tensor] | Sequence[np.ndarray],
    D: Tokens,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
    recompute: bool = False,
) -> tuple[Tensor, list[Tensor]]: ...


def maxsim_with_argmax(
    Q: Tokens,
    D: Tokens,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tokens | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
    recompute: bool = False,
) -> tuple[Tensor, ArgmaxOutput]:
    """Compute the scores of `maxsim` and the best document token of each query token.

    The argmax says which document token each query token matched, for example for a similarity map.

    Args:
        Q: query tokens, as in `maxsim`.
        D: document tokens, as in `maxsim`.
        q_mask: query tokens to keep, as in `maxsim`.
        d_mask: document tokens to keep, as in `maxsim`.
        q_weight: the weight of each query token, as in `maxsim`.
        normalize: L2-normalize every token first.
        backward: ``"lowmem"``, ``"unified"`` or ``"auto"``, as in `maxsim`.
        recompute: accepted for symmetry. The argmax is kept in any case.

    Returns:
        ``(scores, argmax)``. The scores are the differentiable scores of `maxsim`. The argmax is int64 ``[Nq, Nd, Lq]``
        (``[Nq, K, Lq]`` for candidates), the index of the best token within its document. Ties go to the lowest index.
        The index is -1 for a masked query token and for a document without kept tokens. A 2-D Q or D drops its axis.
        For a list of queries the argmax is a list of ``[Nd, L_i]``. For a jagged tensor it is a jagged ``[Nq, Nd, L]``.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> Q, D = torch.randn(32, 128), torch.randn(5, 300, 128)
        >>> scores, argmax = lik_ops.maxsim_with_argmax(Q, D, normalize=True)
        >>> scores.shape, argmax.shape
        (torch.Size([5]), torch.Size([5, 32]))
    """
    op, dense_args = "maxsim_with_argmax", (Q, D, q_mask, d_mask, q_weight)
    results = eager.try_maxsim_with_argmax(dense_args, (normalize, backward, recompute))
    if results is not None:
        return results
    tensors: Any = share_token_arrays(op, dense_args)
    Q, D = tensors[:2]
    if is_sequences(Q) or is_sequences(D) or isinstance(D, (Quantized, Index)):
        return _score_sequences(op, tensors, normalize, backward, recompute, with_argmax=True)
    check_options(op, normalize, backward, recompute)
    scores, argmax = operators.call_dispatched(op, lik.maxsim_fwd, tensors, normalize, backward, with_argmax=True)
    return scores, argmax


def _score_sequences(
    op: str, tensors: tuple[Any, ...], normalize: bool, backward: str, recompute: bool, with_argmax: bool = False
) -> tuple[Tensor, Any]:
    """Return the scores and argmax of lists, nested tensors and quantized documents."""
    Q, D, q_mask, d_mask, q_weight = tensors
    options: dict[str, Any] = {"normalize": normalize, "backward": backward, "recompute": recompute}
    options |= {"q_mask": q_mask, "d_mask": d_mask, "q_weight": q_weight, "with_argmax": with_argmax}
    return inputs.score_varlen(prepare_args(op, Q, D, **options, lifts="QD"))
