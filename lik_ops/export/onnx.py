"""Translation of MaxSim to standard ONNX operators for `torch.onnx.export`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._ops import ops as lik
from ..core.extras import import_extra


def onnx_translations() -> dict[Any, Callable]:
    """Return the table with which `torch.onnx.export` writes MaxSim in standard ONNX operators.

    Needs onnxscript (in a checkout: ``pip install ".[onnx]"``). Every size of 1 or more may be dynamic. The model
    computes a matrix product, a maximum and a sum. Unlike the operator it stores all similarities of a call, so score
    in batches. Argmax (`maxsim_with_argmax`) and gradients are not translated.

    Returns:
        The argument ``custom_translation_table``.

    Raises:
        ModuleNotFoundError: onnxscript is not installed.

    Example:
        >>> model = lik_ops.MaxSimScorer().eval()
        >>> inputs = torch.randn(4, 32, 128), torch.randn(50, 300, 128)
        >>> # The table replaces the operator by standard ONNX operators.
        >>> table = lik_ops.export.onnx_translations()
        >>> options = {"dynamo": True, "verbose": False, "custom_translation_table": table}
        >>> program = torch.onnx.export(model, inputs, **options)
        >>> program.save("model.onnx")
    """
    op = import_extra("onnx_translations", "onnx", "onnxscript").opset18

    def maxsim(Q, D, q_mask=None, d_mask=None, q_weight=None, normalize=False, backward="auto", recompute=False):
        return _translate_maxsim(op, Q, D, q_mask, d_mask, q_weight, normalize)

    return {lik.maxsim.default: maxsim}


def _translate_maxsim(op: Any, Q: Any, D: Any, q_mask: Any, d_mask: Any, q_weight: Any, normalize: bool) -> Any:
    """Build the ONNX graph of `lik::maxsim`."""
    q_flat, d_flat, candidates = len(Q.shape) == 2, len(D.shape) == 2, len(D.shape) == 4
    score_type = 11 if Q.dtype.name == "DOUBLE" else 1  # onnx.TensorProto.DOUBLE, FLOAT

    def axis(n: int) -> Any:
        return op.Constant(value_ints=[n])

    def unsqueeze(x: Any, flat: bool) -> Any:
        return op.Unsqueeze(x, axis(0)) if flat and x is not None else x

    def boolean(mask: Any) -> Any:
        return None if mask is None else op.Cast(mask, to=9)

    def number(value: float) -> Any:
        return op.Cast(op.Constant(value_float=value), to=score_type)

    def rows(x: Any) -> Any:
        x = op.Cast(x, to=score_type)
        if not normalize:
            return x
        norm = op.ReduceL2(x, axis(-1), keepdims=1)
        return op.Div(x, op.Max(norm, number(1e-12)))

    q_mask, d_mask = unsqueeze(boolean(q_mask), q_flat), unsqueeze(boolean(d_mask), d_flat)
    Q, D, q_weight = rows(unsqueeze(Q, q_flat)), rows(unsqueeze(D, d_flat)), unsqueeze(q_weight, q_flat)
    Q = op.Unsqueeze(Q, axis(1))  # [Nq, 1, Lq, d]
    D = D if candidates else op.Unsqueeze(D, axis(0))  # [Nq | 1, K, Ld, d]
    S = op.MatMul(Q, op.Transpose(D, perm=[0, 1, 3, 2]))
    infinite = number(float("-inf"))
    if d_mask is not None:
        d_mask = d_mask if candidates else op.Unsqueeze(d_mask, axis(0))
        S = op.Where(op.Unsqueeze(d_mask, axis(2)), S, infinite)
    terms = op.ReduceMax(S, axis(-1), keepdims=0)  # [Nq, K, Lq]
    # onnxruntime's ReduceMax drops a NaN or keeps it, depending on its position.
    has_nan = op.Cast(op.ReduceSum(op.Cast(op.IsNaN(S), to=1), axis(-1), keepdims=0), to=9)
    terms = op.Where(has_nan, number(float("nan")), terms)
    if q_weight is not None:
        terms = op.Mul(terms, op.Unsqueeze(q_weight, axis(1)))
    if q_mask is not None:
        terms = op.Where(op.Unsqueeze(q_mask, axis(1)), terms, number(0.0))
    scores = op.ReduceSum(terms, axis(-1), keepdims=0)
    if d_mask is not None:
        scores = _fill_empty_documents(op, axis, scores, q_mask, d_mask, infinite, number(0.0))
    if d_flat:
        scores = op.Squeeze(scores, axis(1))
    return op.Squeeze(scores, axis(0)) if q_flat else scores


def _fill_empty_documents(op: Any, axis: Any, scores: Any, q_mask: Any, d_mask: Any, infinite: Any, zero: Any) -> Any:
    """Set scores of documents without a kept token to -inf, or to 0 if the query keeps no token either."""

    def any_of(mask: Any) -> Any:
        return op.Cast(op.ReduceMax(op.Cast(mask, to=6), axis(-1), keepdims=0), to=9)

    empty = infinite
    if q_mask is not None:
        empty = op.Where(op.Unsqueeze(any_of(q_mask), axis(1)), infinite, zero)
    return op.Where(any_of(d_mask), scores, empty)
