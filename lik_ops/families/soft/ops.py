"""Soft MaxSim: ``lik::maxsim_soft_fwd``, ``lik::maxsim_soft_bwd``.

The maximum of `lik::maxsim` becomes ``tau * logsumexp_t(<q, d_t> / tau)``. The forward keeps that number of each query
token and document, in fp32; the backward recomputes the probabilities from it. Scores are linear in these numbers, so
there is no correction of the probabilities as in the backward of attention.
"""

import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._ops import add_op_namespace_prefix
from ..._ops import ops as lik
from ...core.arguments import check_strided, describe_type, format_shape, score_dtype, short_repr
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
    """The tensors of a call: `DenseArgs`, and the temperature where it is a tensor of no axes."""

    Q: Tensor
    D: Tensor
    q_mask: Tensor | None
    d_mask: Tensor | None
    q_weight: Tensor | None
    tau: Tensor | None

    @property
    def dense(self) -> DenseArgs:
        return DenseArgs(*self[:5])

    def check(self, op: str) -> None:
        """Raise ValueError or TypeError, naming the argument, unless all fit together."""
        self.dense.check(op)
        if self.tau is not None:
            check_temperature(op, self.tau, self.Q)


def check_temperature(op: str, temperature: Any, Q: Tensor) -> None:
    """Raise ValueError or TypeError unless it is a number above 0, or a tensor of no axes beside `Q`."""
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
    if temperature.device != Q.device:
        raise ValueError(f"{op}: temperature: expected the device of Q, {Q.device}, got {temperature.device}")


@custom_op(add_op_namespace_prefix("maxsim_soft_fwd"), _FWD_SCHEMA)
def maxsim_soft_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Scores ``[Nq, Nd]`` (``[Nq, K]``) and, if `keep`, the soft maximum of each query token in each document.

    The soft maxima ``tau * logsumexp_t(<q, d_t> / tau)`` are fp32 (fp64 for fp64) ``[Nd, Nq, Lq]``, or ``[Nq, K, Lq]``
    for candidates; -inf for masked query tokens and documents that keep no token. The temperature is `tau`, a tensor of
    no axes, or, where that is None, the number `load_temperature`.
    """
    tensors, (temperature, normalize, keep) = SoftArgs(*args[:6]), args[6:]
    backend = lookup_backend(_FWD, tensors, (), tensors.Q, tensors.check, _FWD)
    if tensors.tau is None:
        check_temperature(_FWD, temperature, tensors.Q)
    functional.reject_forward_ad(tensors.Q, tensors.D, tensors.q_weight, tensors.tau)
    return backend.forward_soft(
        *tensors.dense, _resolve_temperature(tensors.tau, temperature, tensors.Q.dtype), normalize, keep
    )


def _resolve_temperature(tau: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor | float:
    """The temperature: a number is no smaller than what a similarity can be divided by."""
    return max(temperature, torch.finfo(score_dtype(dtype)).tiny) if tau is None else tau


@maxsim_soft_fwd.register_fake
def _(*args):
    tensors, keep = SoftArgs(*args[:6]), args[8]
    tensors.check(_FWD)
    new, dtype = tensors.Q.new_empty, score_dtype(tensors.Q.dtype)
    kept = new(tensors.dense.argmax_shape() if keep else (0,), dtype=dtype)
    return new(tensors.dense.scores_shape(), dtype=dtype), kept


def _unpack_backward_args(args: tuple) -> SoftArgs:
    """The tensors of a backward; raises unless it takes them."""
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
    """Gradients of Q, D, q_weight and tau, each summed by its owner: no atomics, bitwise reproducible.

    `lse` is what `maxsim_soft_fwd` keeps. `needs` says which of the four are wanted; the others have size [0].
    """
    grad_scores, Q, D, lse, q_mask, d_mask, q_weight, tau, temperature, normalize, needs = args
    backend = lookup_backend(_BWD, args[:8], tuple(needs), Q, _unpack_backward_args, args)
    functional.reject_forward_ad(grad_scores, Q, D, q_weight, tau)
    value = _resolve_temperature(tau, temperature, Q.dtype)
    return backend.backward_soft(grad_scores, Q, D, lse, q_mask, d_mask, q_weight, value, normalize, list(needs))


@maxsim_soft_bwd.register_fake
def _(*args):
    tensors, needs = _unpack_backward_args(args), args[10]
    of_tau = tensors.Q.new_empty(() if needs[3] else (0,), dtype=score_dtype(tensors.Q.dtype))
    return *fake_gradient(tensors.dense, needs[:3]), of_tau


def _call_backward(grad_scores, tensors, lse, options, needs):
    Q, D, *rest = tensors
    temperature, normalize, _ = options
    return lik.maxsim_soft_bwd(grad_scores, Q, D, lse, *rest, temperature, normalize, needs)


register_autograd(maxsim_soft_fwd, SoftArgs, _call_backward, wanted=(0, 1, 4, 5))
maxsim_soft_bwd.register_autograd(make_raising_double_backward("maxsim_soft"))
maxsim_soft_fwd.register_vmap(partial(batching.loop_over_samples, maxsim_soft_fwd, 6))
maxsim_soft_bwd.register_vmap(partial(batching.loop_over_samples, maxsim_soft_bwd, 8))


def score_soft(given: tuple, temperature: Any, normalize: bool) -> Tensor:
    """Soft scores of Q, D, q_mask, d_mask and q_weight as `lik_ops.maxsim_soft` has them.

    Raises:
        NotImplementedError: `torch.func` would differentiate it.
    """
    functional.reject_transforms("maxsim_soft", functional.is_differentiating)
    tau = temperature if isinstance(temperature, Tensor) else None
    functional.reject_forward_ad(tau)
    number = 1.0 if tau is not None else float(temperature)

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        *tensors, normalized, argmax_dtype, _ = args
        keep = argmax_dtype is not None or functional.is_recording_gradients(tau)
        return lik.maxsim_soft_fwd(*tensors, tau, number, normalized, keep)

    found = operators.call_dispatched("maxsim_soft", forward, given, normalize, "auto")[0]
    Q, D, q_mask, d_mask, _ = given
    hints.inspect_tokens("maxsim_soft", Q, D, q_mask, d_mask, normalize)
    return found
