"""The eager shortcut: call the backend directly if no dispatcher, mode or transform needs to see the call.

Results, errors and saved tensors are identical to the operators'. Decisions about a call are stored by its dispatch
key, and later calls with the same key only look them up. `try_maxsim` accepts dense arguments, and `try_maxsim_ragged`
the tensors of a `PackedArgs`. Kernels read the caller's tensors, so no operation runs before the launch.
`try_maxsim_cross_entropy` creates default labels and reduces losses with torch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...core.arguments import BACKWARDS, DTYPES, INDEX_DTYPES, as_bool, check_dense, choose_argmax_dtype, score_dtype
from ...core.plan_cache import plans
from ...core.segments import PackedArgs, has_even_rows
from ...core.settings import is_checking_values
from ...families.loss.ops import LossArgs, LossCall, check_loss_args, make_default_labels
from ...formats.quantized import Quantized
from ...formats.table import EncodedTokens
from ..checks import hints
from ..registration.autograd import record
from .cuts import infer_sizes, is_contiguous_index
from .eager_calls import DenseCall, PackedCall
from .watchers import (
    is_below_autograd,
    is_dispatch_idle,
    is_ordinary_tensor,
    make_call_key,
    make_dense_key,
    make_rowless_key,
)

# Types of the arguments of `try_maxsim`. Other types use the operator.
_ARG_TYPES = (Tensor, Tensor, *[Tensor | None] * 3, bool, str, bool)
_is_grad_enabled, _is_compiling = torch.is_grad_enabled, torch.compiler.is_dynamo_compiling


def try_maxsim(
    Q: Any, D: Any, q_mask: Any, d_mask: Any, q_weight: Any, normalize: Any, backward: Any, recompute: Any
) -> Tensor | None:
    """Return the scores of `lik::maxsim` for dense arguments, or None if the call must use the dispatcher.

    Raises:
        TypeError, ValueError: as `lik::maxsim`.
    """
    if _is_compiling():
        return None
    args, options = (Q, D, q_mask, d_mask, q_weight), (normalize, backward, recompute)
    key = make_dense_key("maxsim", args, options)
    call = plans.get(key) or _find_call("maxsim", key, args, options)
    if call is None:
        return None
    if call.converts:
        args = _convert_masks(args)
    if call.differentiable:
        return None if is_below_autograd() else record(Q, D, q_weight, call, args)
    return call.forward(args)[0]


def try_maxsim_with_argmax(tensors: tuple, options: tuple) -> tuple[Tensor, Tensor] | None:
    """Return the scores and the int64 argmax ``[Nq, Nd, Lq]``, or None if the call must use the dispatcher.

    If gradients of the scores are needed, the result is None. A caller may write to the argmax, which a backward would
    read. The tensors and options are the arguments of `try_maxsim`.
    """
    if _is_compiling():
        return None
    key = make_dense_key("maxsim_with_argmax", tensors, options)
    call = plans.get(key) or _find_call("maxsim_with_argmax", key, tensors, options)
    if call is None:
        return None
    scores, argmax = call.forward(_convert_masks(tensors) if call.converts else tensors)
    return scores, call.restore_axes(argmax, tensors[1].dim() == 4)


def _convert_masks(tensors: tuple) -> tuple:
    """Return the tensors with bool masks."""
    Q, D, q_mask, d_mask, q_weight = tensors
    return Q, D, as_bool(q_mask), as_bool(d_mask), q_weight


def _find_call(name: str, key: tuple | None, tensors: tuple, options: tuple) -> DenseCall | None:
    """Return the decisions about a dense call without stored decisions, or None if the dispatcher must see the call."""
    if key is None:
        return None
    call = plans.get(key)
    if call is None:
        if not all(isinstance(x, kind) for x, kind in zip((*tensors, *options), _ARG_TYPES, strict=True)):
            return None  # left to the operator
        call = plans.store(key, _make_call(name, *tensors, *options) or False)
    return call or None


def _make_call(name: str, *arguments: Any) -> DenseCall | None:
    """Validate a dense call and return the decisions for its dispatch key, or None if it must use the operator."""
    tensors, (normalize, backward, recompute) = arguments[:5], arguments[5:]
    Q, D, q_mask, d_mask, q_weight = tensors
    check_dense(name, Q, D, q_mask, d_mask, q_weight, backward)
    hints.inspect_tokens(name, Q, D, q_mask, d_mask, normalize)
    differentiable = needs_gradients(Q, D, q_weight)
    argmax_dtype = choose_argmax_dtype(D.shape[-2]) if differentiable and not recompute else None
    if name == "maxsim_with_argmax":
        if differentiable:
            return None
        argmax_dtype = torch.int64
    backend = backends.select_backend(Q.device, Q.dtype)
    return DenseCall(tensors, backend, normalize, backward, argmax_dtype, differentiable)


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Return whether autograd records a gradient of any of these tensors."""
    return _is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def try_maxsim_cross_entropy(*arguments: Any) -> Tensor | None:
    """Return the loss of `lik_ops.maxsim_cross_entropy`, or None if the call must use the operator.

    The temperature must be a number, not a tensor.

    Args:
        *arguments: Q, D, labels, q_mask, d_mask, q_weight, temperature, normalize, ignore_index and reduction.

    Raises:
        TypeError, ValueError: as `lik_ops.maxsim_cross_entropy`.
    """
    if _is_compiling() or is_checking_values():
        return None
    Q, D, labels, q_mask, d_mask, q_weight, temperature, normalize, ignore_index, reduction = arguments
    if type(temperature) not in (int, float) or not 0 < temperature <= sys.float_info.max:
        return None
    if type(ignore_index) is not int or not -(2**63) <= ignore_index < 2**63:
        return None
    key_args = Q, D, q_mask, d_mask, q_weight, labels, normalize, reduction
    key = make_call_key("maxsim_cross_entropy", key_args[:6], key_args[6:])
    if key is None:
        return None
    call = plans.get(key) or plans.store(key, _make_loss_call(key_args))
    if call.differentiable and is_below_autograd():
        return None
    if labels is None:
        labels = make_default_labels(Q, D)
    tensors = Q, D, as_bool(q_mask), as_bool(d_mask), labels, q_weight
    call_args = *tensors, float(temperature), ignore_index
    return record(Q, D, q_weight, call, call_args) if call.differentiable else call.forward(call_args)[0]


def _make_loss_call(arguments: tuple) -> LossCall:
    """Validate a loss call and return the decisions for its dispatch key."""
    *tensors, normalize, reduction = arguments
    check_loss_args("maxsim_cross_entropy", tuple(tensors), normalize, reduction)
    x = LossArgs(*tensors)
    hints.inspect_tokens("maxsim_cross_entropy", *x[:4], normalize)
    backend = backends.select_backend(x.Q.device, x.Q.dtype)
    return LossCall(x, backend, normalize, reduction, needs_gradients(x.Q, x.D, x.q_weight))


def _make_packed_call(c: PackedArgs, options: tuple, argmax_dtype: Any) -> PackedCall | None:
    """Return the decisions for the dispatch key of a packed call, or None if the operator must handle or reject it.

    The sizes of `c` fit together. The result serves calls with other leading sizes, so it must not depend on them.
    """
    Q, D, device = c.Q, c.D, c.Q.device
    normalize, backward, recompute, with_argmax, is_bounded = options
    is_supported = (
        all(isinstance(x, bool) for x in (normalize, recompute, with_argmax))
        and backward in BACKWARDS
        and Q.dtype in DTYPES
        and D.dtype == Q.dtype
        and D.shape[-1] == Q.shape[-1] >= 1
        and all(x is None or x.device == device for x in c.tensors)
        and all(x is None or x.dtype in INDEX_DTYPES for x in c.indices)
        and all(map(is_contiguous_index, c.indices))
        and (c.pairs is None or (c.pairs.shape[1:] == (2,) and not c.candidates))
        and (c.q_lengths is None or c.cu_seqlens_q is None)
        and all(m is None or m.dtype == torch.bool for m in (c.q_mask, c.d_mask))
        and (c.q_weight is None or c.q_weight.dtype == score_dtype(Q.dtype))
        and all(has_even_rows(x, 1) for x in (Q, D))
        and all(x is None or has_even_rows(x, 0) for x in c.per_token)
    )
    if not is_supported:
        return None
    differentiable = needs_gradients(Q, D, c.q_weight)
    needs_argmax = with_argmax or (differentiable and not recompute)
    if needs_argmax and c.pairs is not None and c.cu_seqlens_q is not None and not is_bounded:
        return None  # the argmax of a pair has an unknown number of columns
    if differentiable and c.q_lengths is not None:
        return None
    backend = backends.select_backend(Q.device, Q.dtype)
    if not hasattr(backend, "ragged_plan"):
        return None
    return PackedCall(
        c, backend, normalize, backward, argmax_dtype if needs_argmax else None, differentiable, with_argmax
    )


def try_maxsim_ragged(
    Q: Any,
    D: Any,
    cu_seqlens_q: Any = None,
    offsets: Any = None,
    lengths: Any = None,
    pairs: Any = None,
    q_lengths: Any = None,
    q_mask: Any = None,
    d_mask: Any = None,
    q_weight: Any = None,
    *,
    normalize: Any = False,
    backward: Any = "auto",
    recompute: bool = False,
    max_seqlen_q: Any = None,
    with_argmax: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """Return the scores and, if requested, the argmax of ``lik::maxsim_ragged_fwd``, or None.

    The result is None if the call must use the operator. The tensors are the fields of `PackedArgs`. Padded tensors,
    with `q_lengths`, have no gradients here.
    """
    if _is_compiling() or is_checking_values():
        return None
    indices, per_token = (cu_seqlens_q, offsets, lengths, pairs, q_lengths), (q_mask, d_mask, q_weight)
    tensors, is_bounded = (Q, D, *indices, *per_token), max_seqlen_q is not None
    options = normalize, backward, recompute, with_argmax, is_bounded
    key = make_rowless_key("maxsim_ragged", tensors, options)
    sizes = None if key is None else infer_sizes(Q, D, indices, per_token, max_seqlen_q)
    if key is None or sizes is None:
        return None
    c = PackedArgs(*tensors, *sizes)
    argmax_dtype = choose_argmax_dtype(c.Td)
    key = argmax_dtype, key
    call = plans.get(key)
    if call is None:
        call = plans.store(key, _make_packed_call(c, options, argmax_dtype) or False)
    if not call or (call.differentiable and is_below_autograd()):
        return None
    if not call.differentiable:
        return call.plan.forward(c)
    results = record(Q, D, q_weight, call, c)
    return results if with_argmax else (results, None)


def try_maxsim_quantized(
    stored: EncodedTokens,
    Q: Tensor,
    indices: tuple,
    per_token: tuple,
    options: tuple,
    *,
    max_seqlen_q: int | None,
    with_argmax: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """Return the scores and, if requested, the argmax of ``lik::maxsim_quantized_fwd``, or None.

    The result is None if the call must use the operator. The arguments must be validated. Without an argmax, the
    queries of pairs may have any length.

    Args:
        stored: the encoded documents.
        Q: query tokens.
        indices: `PackedArgs.indices`.
        per_token: `PackedArgs.per_token`.
        options: the features of a token, `normalize`, `backward` and `recompute`.
        max_seqlen_q: an upper bound of the query lengths, or None.
        with_argmax: whether to return the argmax.
    """
    if _is_compiling() or is_checking_values() or not is_dispatch_idle():
        return None
    data, tensors = stored.data, [x for x in (Q, *indices, *per_token, *stored) if isinstance(x, Tensor)]
    sizes = infer_sizes(Q, data, indices, per_token, max_seqlen_q)
    is_bounded = max_seqlen_q is not None or indices[3] is None or indices[0] is None
    if sizes is None or not (is_bounded or not with_argmax) or needs_gradients(*tensors):
        return None
    is_ordinary = (
        all(is_ordinary_tensor(x) for x in tensors)
        and all(map(is_contiguous_index, indices))
        and all(has_even_rows(x, 1) for x in (Q, data))
        and all(x is None or has_even_rows(x, 0) for x in per_token)
    )
    backend = backends.select_backend(Q.device, Q.dtype)
    if not (is_ordinary and hasattr(backend, "forward_quantized_cut")):
        return None
    c = PackedArgs(Q, data, *indices, *per_token, *sizes)
    if not with_argmax and max_seqlen_q is None:
        _store_quantized(stored, c, options, backend)
    return backend.forward_quantized_cut(c, stored, options[1], choose_argmax_dtype(c.Td) if with_argmax else None)


def _store_quantized(stored: EncodedTokens, c: PackedArgs, options: tuple, backend: Any) -> None:
    """Store the backend of a call with quantized documents and, for dense documents, its plan and its sizes."""
    is_dense = all(x is None for x in c.indices)
    key = _make_quantized_key(stored, c, options, is_dense)
    if key is not None and plans.get(key) is None:
        plan = is_dense and backend.find_quantized_plan(c, stored, options[1], None)
        plans.store(key, (backend, plan, c.sizes if is_dense else None))


def _make_quantized_key(stored: EncodedTokens, tensors: tuple, options: tuple, is_dense: bool) -> tuple | None:
    """Return the key of a call with quantized documents, or None if the call must use the operator.

    Without indices, `is_dense`, tensors have the same shapes again.
    """
    # `data` does not determine the number of features of a token.
    name = "maxsim_quantized", stored.format, options[0]
    encoded_tensors = stored[1:3] if stored.codes is None else (*stored[1:3], *stored[4:])
    if is_dense:
        return make_call_key(name, (*tensors[:2], *tensors[7:10], *encoded_tensors), options[1:])
    return make_rowless_key(name, (*tensors[:10], *encoded_tensors), options[1:])


def repeat_maxsim_quantized(
    Q: Any, D: Quantized, cu_seqlens_q: Any, cu_seqlens_d: Any, per_token: tuple, options: tuple
) -> Tensor | None:
    """Return the scores if `try_maxsim_quantized` has handled a call with the same key before, else None.

    The arguments need no validation. `per_token` is `q_mask`, `d_mask` and `q_weight`, and the options are `normalize`,
    `backward` and `recompute`.
    """
    if _is_compiling() or is_checking_values():
        return None
    encoded_tokens, is_dense = D.to_encoded(), cu_seqlens_q is None and cu_seqlens_d is None
    args = Q, encoded_tokens.data, cu_seqlens_q, cu_seqlens_d, None, None, None, *per_token
    entry = plans.get(_make_quantized_key(encoded_tokens, args, (D.d, *options), is_dense))
    if entry is None:
        return None
    backend, plan, sizes = entry
    if plan:
        scores = plan.forward(Q, encoded_tokens, per_token[0], per_token[2])
        if scores is not None:
            return scores
    sizes = sizes or infer_sizes(Q, encoded_tokens.data, args[2:7], per_token, None)
    if sizes is None:
        return None
    return backend.forward_quantized_cut(PackedArgs(*args, *sizes), encoded_tokens, options[0], None, False)[0]


def clear_call_caches() -> None:
    """Drop all plans and captured calls, for example after a configuration table has changed."""
    backends.clear_plan_caches()
