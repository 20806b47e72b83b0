"""The public scoring functions: MaxSim over all pairs, candidates or aligned pairs, and with its winners."""

from collections.abc import Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .._ops import ops as lik
from ..core.arguments import Backward, Save, check_dense, check_options, check_save, check_types
from ..formats.index import Index
from ..formats.quantized import Quantized
from ..ops import maxsim as operators
from ..ops import saved
from ..ops.fast_path import eager
from ..ops.stack import autocast, functional
from . import inputs
from .inputs import ArgmaxOutput, Tokens, prepare_args
from .packing import is_sequences

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
    """Late-interaction scores: ``score[i, j] = sum_s q_weight[i, s] * max_t <Q[i, s], D[j, t]>``.

    The formula is equation 3 of ColBERT (Khattab and Zaharia, 2020). The similarities ``[Nq, Nd, Lq, Ld]`` are never
    materialised, in the forward or the backward. The same as ``torch.ops.lik.maxsim``.

    Args:
        Q: query token embeddings ``[Nq, Lq, d]``, or ``[Lq, d]`` for one query; fp16, bf16, fp32 or fp64.
        D: document token embeddings of the same dtype and device: ``[Nd, Ld, d]`` scores every query against every
            document; ``[Nq, K, Ld, d]`` scores each query against its own K candidates; ``[Ld, d]`` is one document.
            Queries, documents or both of many lengths: a list of ``[L_i, d]``, or a jagged nested tensor, whose values
            are taken as they are. Every query then meets every document.
        q_mask: query tokens to keep, the shape of Q without d; bool (True = keep) or integers read as ``!= 0``.
            Masked query tokens leave the sum.
        d_mask: document tokens to keep, the shape of D without d. Masked document tokens leave the maximum. Any
            pattern, holes included; what masked tokens hold, NaN included, never matters. Lists and nested tensors take
            no mask: leave tokens out.
        q_weight: weight of each query token, the shape of Q without d; fp32 (fp64 for fp64 inputs). Differentiable. Of
            a list of queries a list of ``[L_i]``, of a jagged tensor one that shares its offsets, or packed ``[Tq]``.
        normalize: L2-normalise every token first, as ``torch.nn.functional.normalize`` does, without a copy.
        backward: ``"lowmem"`` (reproducible, no atomics), ``"unified"`` (one pass, atomic adds on a GPU) or ``"auto"``.
        recompute: keep no winners for the backward, which then finds them again: less memory, more time.
        save: None, or ``"int8"``: keep documents for the backward as int8 with a scale for each token, which takes half
            the memory of fp16 and bf16 where nothing else keeps D. Scores are the same; the gradients of Q and
            `q_weight` are those of the int8 tokens that won, that of D is exact but for the norms of `normalize`.
            For tensors, without `recompute`.

    Returns:
        Scores in fp32 (fp64 for fp64): ``[Nq, Nd]`` or ``[Nq, K]``; a 2-D Q or D drops its axis. A document that
        keeps no token scores ``-inf``; a query that keeps no token scores 0.

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
        # Saves the microseconds of the dispatcher. The operator below tries the same, for who calls it directly.
        if isinstance(D, Quantized):
            scores = inputs.repeat_quantized(
                Q, D, None, None, (q_mask, d_mask, q_weight), (normalize, backward, recompute)
            )
        else:
            scores = eager.try_maxsim(Q, D, q_mask, d_mask, q_weight, normalize, backward, recompute)
        if scores is not None:
            return scores
    # Of everything that is looked at below, compiled code looks at every call whether it is still the same: so what
    # most calls have is looked at first, and with few names.
    if not (isinstance(Q, Tensor) and isinstance(D, Tensor)) or Q.is_nested or D.is_nested:
        if is_sequences(Q) or is_sequences(D) or isinstance(D, (Quantized, Index)):
            options: dict[str, Any] = {"normalize": normalize, "backward": backward, "recompute": recompute}
            g = prepare_args("maxsim", Q, D, q_mask=q_mask, d_mask=d_mask, q_weight=q_weight, **options, lifts="QD")
            return inputs.score_varlen(g)[0]
        if has_torch_function((Q, D)):  # a Proxy of torch.fx: symbolic tracing keeps the call
            options = {"q_weight": q_weight, "normalize": normalize, "backward": backward, "recompute": recompute}
            return handle_torch_function(maxsim, (Q, D), Q, D, q_mask, d_mask, **options)
        check_types("maxsim", Q, D, q_mask, d_mask, q_weight)  # else the dispatcher's errors, which name no argument
    if not (q_mask is None and d_mask is None and q_weight is None):
        check_types("maxsim", Q, D, q_mask, d_mask, q_weight)
    if not (normalize is False and recompute is False and isinstance(backward, str) and backward == "auto"):
        check_options("maxsim", normalize, backward, recompute)
    if not compiling and functional.is_transforming():
        tensors = Q, D, q_mask, d_mask, q_weight
        return operators.call_dispatched(
            "maxsim", functional.forward_in_transform, tensors, normalize, backward, recompute
        )[0]
    return lik.maxsim(
        Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize, backward=backward, recompute=recompute
    )


def _check_save_option(op: str, Q: Any, D: Any, recompute: bool, save: Any) -> None:
    check_save(op, save, recompute)
    for name, x in (("Q", Q), ("D", D)):
        if is_sequences(x) or isinstance(x, (Quantized, Index)):
            raise TypeError(f"{op}: {name}: expected a dense Tensor beside save={save!r}, got {type(x).__name__}")


def _score_saved(given: tuple[Any, ...], normalize: bool, backward: str, recompute: bool, save: Any) -> Tensor:
    """`try_maxsim` of tensors, of which autograd keeps the documents as int8."""
    _check_save_option("maxsim", given[0], given[1], recompute, save)
    check_types("maxsim", *given)
    check_options("maxsim", normalize, backward, recompute)
    return operators.call_dispatched("maxsim", saved.forward_saving_int8, given, normalize, backward)[0]


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
    """MaxSim of query i against document i only.

    Args:
        Q: ``[B, Lq, d]``, a list of ``[L_i, d]`` or a jagged nested tensor.
        D: ``[B, Ld, d]``, or the same.
        q_mask, d_mask, q_weight, normalize, backward, recompute, save: as in `try_maxsim`.

    Returns:
        Scores ``[B]``, fp32 (fp64 for fp64).

    Raises:
        TypeError, ValueError: as `try_maxsim`; also when Q or D is not 3-D or their batch sizes differ.

    Example:
        >>> Q, D = torch.randn(4, 32, 128), torch.randn(4, 300, 128)
        >>> lik_ops.maxsim_pairs(Q, D, normalize=True).shape
        torch.Size([4])
    """
    if save is not None:
        _check_save_option("maxsim_pairs", Q, D, recompute, save)
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
    dense: dict[str, Any] = {"normalize": normalize, "backward": backward, "recompute": recompute, "save": save}
    return maxsim(Q, D.unsqueeze(1), q_mask, d_mask, q_weight=q_weight, **dense).squeeze(1)


@overload
def maxsim_with_argmax(
    Q: Tensor,
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
    Q: Sequence[Tensor],
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
    """The scores of `try_maxsim` and, for each query token, the document token that won: what a similarity map shows.

    Args:
        Q, D, q_mask, d_mask, q_weight, normalize, backward: as in `try_maxsim`.
        recompute: accepted for symmetry; the winners are kept in any case.

    Returns:
        ``(scores, argmax)``: the scores of `try_maxsim`, differentiable, and int64 ``[Nq, Nd, Lq]`` (``[Nq, K, Lq]``
        for candidates), the index of the winning token within its document. Ties go to the lowest index; -1 for a
        masked query token and for a document that keeps no token. A 2-D Q or D drops its axis. Of a list of queries the
        winners are a list of ``[Nd, L_i]``, of a jagged tensor a jagged ``[Nq, Nd, L]``.

    Raises:
        TypeError, ValueError: as `try_maxsim`.

    Example:
        >>> Q, D = torch.randn(32, 128), torch.randn(5, 300, 128)
        >>> scores, argmax = lik_ops.maxsim_with_argmax(Q, D, normalize=True)
        >>> scores.shape, argmax.shape
        (torch.Size([5]), torch.Size([5, 32]))
    """
    if is_sequences(Q) or is_sequences(D) or isinstance(D, (Quantized, Index)):
        options: dict[str, Any] = {"normalize": normalize, "backward": backward, "recompute": recompute}
        options |= {"q_mask": q_mask, "d_mask": d_mask, "q_weight": q_weight, "with_argmax": True}
        return cast(
            tuple[Tensor, ArgmaxOutput],
            inputs.score_varlen(prepare_args("maxsim_with_argmax", Q, D, **options, lifts="QD")),
        )
    found = eager.try_maxsim_with_argmax((Q, D, q_mask, d_mask, q_weight), (normalize, backward, recompute))
    if found is not None:
        return found
    check_options("maxsim_with_argmax", normalize, backward, recompute)
    forward = lik.maxsim_fwd if torch.compiler.is_dynamo_compiling() else functional.forward_in_transform
    tensors = Q, D, q_mask, d_mask, q_weight
    scores, argmax = operators.call_dispatched(
        "maxsim_with_argmax", forward, tensors, normalize, backward, with_argmax=True
    )
    return scores, argmax
