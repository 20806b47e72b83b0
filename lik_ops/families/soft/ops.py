"""Soft MaxSim: ``lik::maxsim_soft_fwd``, ``lik::maxsim_soft_bwd``.

The maximum of ``lik::maxsim`` is replaced by ``tau * logsumexp_t(<q, d_t> / tau)``. The forward saves this value for
each query token and document in fp32, and the backward recomputes the probabilities from it. The score is linear in
these values, so there is no delta term as in the backward of attention.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._ops import add_op_namespace_prefix
from ..._ops import ops as lik
from ...core.arguments import check_device, check_strided, describe_type, format_shape, score_dtype, short_repr
from ...core.segments import DenseArgs
from ...ops import maxsim as operators
from ...ops.checks import hints
from ...ops.registration.custom import custom_op
from ...ops.registration.family import (
    check_gradient_exists,
    check_upstream,
    fake_gradient,
    lookup_backend,
    make_raising_double_backward,
    register_autograd,
)
from ...ops.stack import batching, functional

_FWD_SCHEMA = (
    "(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, Tensor? tau, float temperature,"
    " bool normalize, bool keep) -> (Tensor, Tensor)"
)
_BWD_SCHEMA = (
    "(Tensor grad_scores, Tensor Q, Tensor D, Tensor lse, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight,"
    " Tensor? tau, float temperature, bool normalize, bool[4] needs) -> (Tensor, Tensor, Tensor, Tensor)"
)
_FWD, _BWD = map(add_op_namespace_prefix, ("maxsim_soft_fwd", "maxsim_soft_bwd"))


class SoftArgs(NamedTuple):
    """Tensors of a call: `DenseArgs`, and the temperature if it is a 0-d tensor."""

    Q: Tensor
    D: Tensor
    q_mask: Tensor | None
    d_mask: Tensor | None
    q_weight: Tensor | None
    tau: Tensor | None

    @property
    def dense(self) -> DenseArgs:
        """Tensors without the temperature."""
        return DenseArgs(*self[:5])

    def check(self, op: str) -> None:
        """Raise ValueError or TypeError, naming the argument, unless all fit together."""
        self.dense.check(op)
        if self.tau is not None:
            check_temperature(op, self.tau, self.Q)


def check_temperature(op: str, temperature: Any, Q: Tensor) -> None:
    """Raise ValueError or TypeError unless the temperature is a number above 0, or a 0-d tensor that fits `Q`."""
    if type(temperature) is float and 0 < temperature <= sys.float_info.max:
        return
    if not isinstance(temperature, Tensor):
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float, torch.SymFloat)):
            raise TypeError(f"{op}: temperature: expected a float or a 0-dim Tensor, got {describe_type(temperature)}")
        if isinstance(temperature, (int, float)) and not 0 < temperature <= sys.float_info.max:
            raise ValueError(f"{op}: temperature: expected a finite number above 0, got {short_repr(temperature)}")
        return
    check_strided(op, "temperature", temperature)
    if temperature.dim() != 0:
        raise ValueError(f"{op}: temperature: expected a float or a 0-dim Tensor, got {format_shape(temperature)}")
    expected = score_dtype(Q.dtype)
    if temperature.dtype != expected:
        raise TypeError(f"{op}: temperature: expected {expected} for {Q.dtype} inputs, got {temperature.dtype}")
    check_device(op, "temperature", temperature, Q.device)


@custom_op(add_op_namespace_prefix("maxsim_soft_fwd"), _FWD_SCHEMA)
def maxsim_soft_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the scores with a smooth maximum and, if `keep`, the soft maximum of each query token in each document.

    The arguments, in the order of the schema:

    - ``Q``, ``D``, ``q_mask``, ``d_mask``, ``q_weight``, ``normalize``: the arguments of ``lik::maxsim_fwd``.
    - ``tau``: the temperature as a 0-d tensor with the dtype of the scores, or None to use ``temperature``.
    - ``temperature``: the temperature as a number above 0.
    - ``keep``: whether to return the soft maxima, which the backward needs.

    Returns:
        ``(scores, lse)``. The scores are fp32 (fp64 for fp64) ``[Nq, Nd]``, or ``[Nq, K]`` for candidates. The soft
        maxima ``tau * logsumexp_t(<q, d_t> / tau)`` have the same dtype and the shape ``[Nd, Nq, Lq]``, or
        ``[Nq, K, Lq]`` for candidates. They are -inf for masked query tokens and for documents that keep no token.
        Without `keep` their size is [0].
    """
    tensors, (temperature, normalize, keep) = SoftArgs(*args[:6]), args[6:]
    backend = lookup_backend(_FWD, tensors, (), tensors.Q, tensors.check, _FWD)
    if tensors.tau is None:
        check_temperature(_FWD, temperature, tensors.Q)
    functional.reject_forward_ad(tensors.Q, tensors.D, tensors.q_weight, tensors.tau)
    value = _resolve_temperature(tensors.tau, temperature, tensors.Q.dtype)
    return backend.forward_soft(tensors.dense, value, normalize, keep)


def _resolve_temperature(tau: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor | float:
    """Return the tensor `tau`, or the number, clamped to the positive normal numbers of the dtype of the scores."""
    if tau is not None:
        return tau
    limits = torch.finfo(score_dtype(dtype))
    return min(max(temperature, limits.tiny), limits.max)


@maxsim_soft_fwd.register_fake
def _(*args):
    tensors, keep = SoftArgs(*args[:6]), args[8]
    tensors.check(_FWD)
    new_empty, dtype = tensors.Q.new_empty, score_dtype(tensors.Q.dtype)
    lse = new_empty(tensors.dense.argmax_shape() if keep else (0,), dtype=dtype)
    return new_empty(tensors.dense.scores_shape(), dtype=dtype), lse


def _unpack_backward_args(args: tuple) -> SoftArgs:
    """Return the validated tensors of a backward."""
    grad_scores, Q, D, lse, *options = args[:8]
    needs = args[10]
    tensors = SoftArgs(Q, D, *options)
    tensors.check(_BWD)
    check_upstream(_BWD, "grad_scores", grad_scores, tensors.dense.scores_shape(), Q)
    check_upstream(_BWD, "lse", lse, tensors.dense.argmax_shape(), Q)
    check_gradient_exists(_BWD, "q_weight", tensors.q_weight, needs[2])
    check_gradient_exists(_BWD, "tau", tensors.tau, needs[3])
    return tensors


@custom_op(add_op_namespace_prefix("maxsim_soft_bwd"), _BWD_SCHEMA)
def maxsim_soft_bwd(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of Q, D, q_weight and tau without atomics, bitwise reproducible.

    The arguments, in the order of the schema:

    - ``grad_scores``: the gradient of the scores, with their shape and dtype.
    - ``Q``, ``D``, ``q_mask``, ``d_mask``, ``q_weight``, ``tau``, ``temperature``, ``normalize``: the arguments of
      `maxsim_soft_fwd`.
    - ``lse``: the soft maxima that `maxsim_soft_fwd` returned.
    - ``needs``: whether the gradients of Q, D, q_weight and tau are needed.

    Returns:
        The four gradients, each with the dtype of its input, or with size [0] if not needed.
    """
    grad_scores, Q, D, lse, q_mask, d_mask, q_weight, tau, temperature, normalize, needs = args
    backend = lookup_backend(_BWD, args[:8], tuple(needs), Q, _unpack_backward_args, args)
    functional.reject_forward_ad(grad_scores, Q, D, q_weight, tau)
    value = _resolve_temperature(tau, temperature, Q.dtype)
    x = DenseArgs(Q, D, q_mask, d_mask, q_weight)
    return backend.backward_soft(grad_scores, x, lse, value, normalize, list(needs))


@maxsim_soft_bwd.register_fake
def _(*args):
    tensors, needs = _unpack_backward_args(args), args[10]
    grad_tau = tensors.Q.new_empty(() if needs[3] else (0,), dtype=score_dtype(tensors.Q.dtype))
    return *fake_gradient(tensors.dense, needs[:3]), grad_tau


def _call_backward(grad_scores, tensors, lse, options, needs):
    Q, D, *optional_tensors = tensors
    temperature, normalize, _ = options
    return lik.maxsim_soft_bwd(grad_scores, Q, D, lse, *optional_tensors, temperature, normalize, needs)


register_autograd(maxsim_soft_fwd, SoftArgs, _call_backward, differentiable=(0, 1, 4, 5))
maxsim_soft_bwd.register_autograd(make_raising_double_backward("maxsim_soft"))
batching.register_loop(maxsim_soft_fwd, maxsim_soft_bwd)


def score_soft(inputs: tuple, temperature: Any, normalize: bool) -> Tensor:
    """Return the soft scores of `lik_ops.maxsim_soft` for Q, D, q_mask, d_mask and q_weight.

    Raises:
        NotImplementedError: a `torch.func` transform would differentiate the call.
    """
    functional.reject_transforms("maxsim_soft", functional.is_differentiating)
    tau = temperature if isinstance(temperature, Tensor) else None
    if tau is not None:
        functional.reject_forward_ad(tau)
    number = 1.0 if tau is not None else float(temperature)

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        *tensors, normalized, argmax_dtype, _ = args
        keep = argmax_dtype is not None or functional.is_recording_gradients(tau)
        return lik.maxsim_soft_fwd(*tensors, tau, number, normalized, keep)

    scores = operators.call_dispatched("maxsim_soft", forward, inputs, normalize, "auto")[0]
    Q, D, q_mask, d_mask, _ = inputs
    hints.inspect_tokens("maxsim_soft", Q, D, q_mask, d_mask, normalize)
    return scores
