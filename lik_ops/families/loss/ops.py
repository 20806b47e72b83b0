"""The in-batch contrastive loss: ``lik::maxsim_cross_entropy_fwd``, ``lik::maxsim_cross_entropy_bwd``.

The loss is the cross-entropy of ``score[i] / temperature`` at the label of each query. It uses the functions of a
backend that compute ``lik::maxsim``. Scores and argmax exist only for some queries and documents at a time. The forward
saves the log-sum-exp of each query. The backward recomputes the probabilities from it and passes them to the backward
of MaxSim as the gradient of the scores. A small eager call saves scores and argmax, because recomputing them would cost
a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ..._ops import add_op_namespace_prefix
from ..._ops import ops as lik
from ...core.arguments import (
    check_choice,
    check_dense,
    check_flag,
    check_indices,
    check_types,
    choose_argmax_dtype,
    format_shape,
    require,
    score_dtype,
)
from ...core.segments import DenseArgs
from ...ops.fast_path.eager_calls import EagerCall
from ...ops.fast_path.watchers import get_fp32_precision, is_backward_direct
from ...ops.registration.custom import custom_op
from ...ops.registration.family import (
    check_gradient_exists,
    check_upstream,
    fake_gradient,
    lookup_once,
    make_raising_double_backward,
    register_autograd,
)
from ...ops.stack import batching, functional, sharding
from ...portable.blocks import split_argmax_to_fit, split_to_fit
from .portable import LossOptions, SavedLoss, count_labels

_FWD_SCHEMA = (
    "(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, Tensor labels, float temperature,"
    " int ignore_index, bool normalize) -> (Tensor, Tensor)"
)
_BWD_SCHEMA = (
    "(Tensor grad_losses, Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, Tensor labels,"
    " Tensor lse, float temperature, int ignore_index, bool normalize, bool[3] needs) -> (Tensor, Tensor, Tensor)"
)
_FWD, _BWD = map(add_op_namespace_prefix, ("maxsim_cross_entropy_fwd", "maxsim_cross_entropy_bwd"))
_REDUCTIONS = ("mean", "sum", "none")
# Scores of the queries that a forward processes at a time. The scores of a single query may exceed it.
_MAX_SCORE_BYTES = 8 * 2**20
# Argmax and scores of a part of a backward. A single query or document may exceed it.
_MAX_PART_BYTES = 24 * 2**20


class LossArgs(NamedTuple):
    """Tensors of a call: `DenseArgs`, and the label of each query."""

    Q: Tensor
    D: Tensor
    q_mask: Tensor | None
    d_mask: Tensor | None
    q_weight: Tensor | None
    labels: Tensor  # [Nq], int32 or int64

    @property
    def dense(self) -> DenseArgs:
        """Tensors without the labels."""
        return DenseArgs(*self[:5])

    def check(self, op: str) -> None:
        """Raise ValueError or TypeError, naming the argument, unless all fit together."""
        self.dense.check(op)
        check_labels(op, self.labels, self.Q)

    def part(self, queries: slice, documents: slice) -> LossArgs:
        """Return the arguments of some queries and, in the cross product, of some documents."""
        if (queries.stop - queries.start, documents.stop - documents.start) == self.dense.scores_shape():
            return self  # the part is the whole call, so no views are needed
        document_slice = queries if self.D.dim() == 4 else documents
        parts = queries, document_slice, queries, document_slice, queries, queries
        return LossArgs(*(None if t is None else t[i] for t, i in zip(self, parts, strict=True)))  # type: ignore


def check_labels(op: str, labels: Any, Q: Tensor) -> None:
    """Raise ValueError or TypeError unless `labels` has an integer for each query."""
    check_indices(op, "labels", labels, (Q.shape[0],), "[Nq], one for each query", Q.device)


def check_loss_args(op: str, loss_args: tuple, normalize: Any, reduction: Any) -> None:
    """Raise ValueError or TypeError, naming the argument, unless `lik_ops.maxsim_cross_entropy` accepts these.

    `loss_args` are the fields of a `LossArgs` before validation, in which the labels may be None.
    """
    *tensors, labels = loss_args
    Q, D = tensors[:2]
    check_flag(op, "normalize", normalize)
    check_choice(op, "reduction", reduction, _REDUCTIONS)
    check_types(op, *tensors)
    check_dense(op, *tensors)
    if Q.dim() != 3 or D.dim() == 2:
        expected = "[Nq, Lq, d] and [Nd, Ld, d] or [Nq, K, Ld, d]"
        raise ValueError(f"{op}: Q, D: expected {expected}, got {format_shape(Q)} and {format_shape(D)}")
    if labels is not None:
        check_labels(op, labels, Q)
    elif D.dim() == 3:
        message = f"{op}: labels: expected [Nq] where there are fewer documents than queries, got None"
        require(D.shape[0] >= Q.shape[0], lambda: message)


def make_default_labels(Q: Tensor, D: Tensor) -> Tensor:
    """Return document i as the label of query i, or the first document for candidates."""
    Nq = Q.shape[0]
    labels = torch.zeros(Nq, dtype=torch.int64, device=Q.device) if D.dim() == 4 else torch.arange(Nq, device=Q.device)
    return sharding.replicate_like(labels, Q)


def divide_weights(temperature: Tensor, Q: Tensor, q_mask: Tensor | None, q_weight: Tensor | None) -> Tensor:
    """Return query weights that divide the scores, which are linear in the weights, by the temperature.

    The weights of masked tokens never matter. A temperature that is not above 0 gives NaN, as in `maxsim_soft`, and NaN
    as the gradient of the temperature.
    """
    temperature = temperature * torch.where(temperature > 0, torch.ones_like(temperature), torch.nan)
    if q_weight is None:
        return Q.new_ones(Q.shape[:-1], dtype=temperature.dtype) / temperature
    return (q_weight if q_mask is None else torch.where(q_mask, q_weight, 0)) / temperature


def reduce_losses(losses: Tensor, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Return the losses, their sum, or their mean over the queries that are not ignored."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / count_labels(labels, ignore_index)


class LossRunner:
    """Runs losses and gradients for calls with the same dispatch key on one backend, and keeps captured launches."""

    def __init__(self, backend: ModuleType) -> None:
        self.backend = backend
        self.calls = backend.Calls() if hasattr(backend, "Calls") else None

    def _run_captured(
        self, key: tuple, x: LossArgs, more: tuple[Tensor | None, ...], function: Callable[..., tuple], *arguments: Any
    ) -> tuple:
        """Run `function`, or replay its captured launches if the backend supports capture."""
        if self.calls is None:
            return function(*arguments)
        return self.calls.run((get_fp32_precision(), *key), (*x, *more), x.Q.device, function, *arguments)

    def losses(
        self, x: LossArgs, options: LossOptions, keeps: bool = False, counts: bool = False
    ) -> tuple[Tensor, ...]:
        """Return the outputs of `maxsim_cross_entropy_fwd`, followed by optional tensors for the backward.

        With `keeps`, these are the scores and the argmax, and the call must be `is_within_workspace`. With `counts`,
        the last one is the number of labels that are not ignored.
        """
        return self._run_captured(
            (*options, keeps, counts), x, (), _compute_losses, self.backend, x, options, keeps, counts
        )

    def gradients(
        self, grad: Tensor, x: LossArgs, saved_loss: SavedLoss, options: LossOptions, needs: Sequence[bool]
    ) -> tuple:
        """Return the gradients of `maxsim_cross_entropy_bwd`. `grad` has one gradient per loss, or is 0-d."""
        key = "gradients", *options, *grad.stride(), saved_loss.scores is None, *needs
        arguments = self.backend, grad, x, saved_loss, options, list(needs)
        return self._run_captured(key, x, (grad, *saved_loss), _compute_gradients, *arguments)


def _select_runner(check: Callable[..., Any], x: LossArgs, *arguments: Any) -> LossRunner:
    """Check the arguments and return the runner for their device and dtype."""
    check(*arguments)
    return LossRunner(backends.select_backend(x.Q.device, x.Q.dtype))


class LossCall(EagerCall):
    """Decisions about eager calls with one dispatch key.

    The arguments are Q, D, q_mask, d_mask, labels, q_weight, temperature and ignore_index.
    """

    tensors = 6

    def __init__(self, x: LossArgs, backend: ModuleType, normalize: bool, reduction: str, wants: bool) -> None:
        super().__init__(x, backend, normalize, "auto", None, differentiable=wants)
        self.reduction, self.computed = reduction, LossRunner(backend)
        self.keeps = wants and is_within_workspace(x)

    def _arguments(self, inputs: tuple) -> tuple[LossArgs, LossOptions]:
        Q, D, q_mask, d_mask, labels, q_weight, temperature, ignore_index = inputs
        x = LossArgs(Q, D, q_mask, d_mask, q_weight, labels)
        return x, LossOptions(temperature, ignore_index, self.normalize)

    def forward(self, inputs: tuple) -> tuple[Tensor | None, ...]:
        """Return the loss and the fields of `SavedLoss`."""
        x, options = self._arguments(inputs)
        counts = self.reduction == "mean"
        losses, lse, *extras = self.computed.losses(x, options, self.keeps, counts)
        count = extras.pop() if counts else None
        loss = losses if self.reduction == "none" else losses.sum()
        return loss if count is None else loss / count, *SavedLoss(lse, count, *extras)

    def gradients(self, grad: Tensor, inputs: tuple, needs: list[bool], *saved_results: Any) -> tuple[Tensor, ...]:
        """Return the gradients of Q, D and q_weight."""
        (x, options), saved_loss = self._arguments(inputs), SavedLoss(*saved_results)
        if is_backward_direct(grad, x.Q, x.D):
            return self.computed.gradients(grad, x, saved_loss, options, needs)
        grad = (grad if saved_loss.divisor is None else grad / saved_loss.divisor).expand(x.labels.shape)
        return lik.maxsim_cross_entropy_bwd(grad, *x, saved_loss.lse, *options, needs)


@custom_op(add_op_namespace_prefix("maxsim_cross_entropy_fwd"), _FWD_SCHEMA)
def maxsim_cross_entropy_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of each query and its log-sum-exp.

    The arguments, in the order of the schema:

    - ``Q``, ``D``, ``q_mask``, ``d_mask``, ``q_weight``, ``normalize``: the arguments of ``lik::maxsim_fwd``.
    - ``labels``: int32 or int64 ``[Nq]``, the document of each query, or the candidate.
    - ``temperature``: the number that divides the scores.
    - ``ignore_index``: the label of queries without a loss.

    Returns:
        ``(losses, lse)``, fp32 (fp64 for fp64) ``[Nq]`` and ``[Nq, 2]``. The log-sum-exp is two numbers, the largest
        ``score / temperature`` and the logarithm of the sum of exponentials relative to it. A single number would round
        small losses to 0. The loss of a query with the label `ignore_index` is 0. A label that is not a document gives
        NaN.
    """
    x = LossArgs(*args[:6])
    runner = lookup_once(_FWD, x, (), _select_runner, x.check, x, _FWD)
    functional.reject_forward_ad(x.Q, x.D, x.q_weight)
    return runner.losses(x, LossOptions(*args[6:]))  # type: ignore[return-value]


def _compute_losses(
    backend: ModuleType, x: LossArgs, options: LossOptions, keeps: bool, counts: bool
) -> tuple[Tensor, ...]:
    """Compute the losses of some queries at a time, and of all at once if `keeps` is set."""
    Nq, columns = x.dense.scores_shape()
    losses, lse = _fake_outputs(x)
    dtype = choose_argmax_dtype(x.D.shape[-2]) if keeps else None
    results: tuple[Tensor, ...] = ()
    for i in (slice(0, Nq),) if keeps else split_to_fit(Nq, losses.element_size() * columns, _MAX_SCORE_BYTES):
        part = x.part(i, slice(0, columns))
        results = backend.forward(*part.dense, options.normalize, dtype)
        backend.label_losses(results[0], part.labels, options, losses[i], lse[i])
    count = (backend.count_labels(x.labels, options.ignore_index),) if counts else ()
    return losses, lse, *(results if keeps else ()), *count


def _fake_outputs(x: LossArgs) -> tuple[Tensor, Tensor]:
    """Return empty losses and log-sum-exp."""
    Nq, dtype = x.Q.shape[0], score_dtype(x.Q.dtype)
    return x.Q.new_empty((Nq,), dtype=dtype), x.Q.new_empty((Nq, 2), dtype=dtype)


@maxsim_cross_entropy_fwd.register_fake
def _(*args):
    x = LossArgs(*args[:6])
    x.check(_FWD)
    return _fake_outputs(x)


def _unpack_backward_args(args: tuple) -> LossArgs:
    """Return the validated tensors of a backward."""
    grad_losses, *tensors, lse = args[:8]
    x, needs = LossArgs(*tensors), args[11]
    x.check(_BWD)
    Nq = x.Q.shape[0]
    check_upstream(_BWD, "grad_losses", grad_losses, (Nq,), x.Q)
    check_upstream(_BWD, "lse", lse, (Nq, 2), x.Q)
    check_gradient_exists(_BWD, "q_weight", x.q_weight, needs[2])
    return x


@custom_op(add_op_namespace_prefix("maxsim_cross_entropy_bwd"), _BWD_SCHEMA)
def maxsim_cross_entropy_bwd(*args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of Q, D and q_weight without atomics, bitwise reproducible.

    Scores and argmax are recomputed in parts that fit a constant workspace. The arguments, in the order of the schema:

    - ``grad_losses``: the gradient of the losses, with their shape and dtype.
    - ``Q``, ``D``, ``q_mask``, ``d_mask``, ``q_weight``, ``labels``, ``temperature``, ``ignore_index``, ``normalize``:
      the arguments of `maxsim_cross_entropy_fwd`.
    - ``lse``: the log-sum-exp that `maxsim_cross_entropy_fwd` returned.
    - ``needs``: whether the gradients of Q, D and q_weight are needed.

    Returns:
        The three gradients, each with the dtype of its input, or with size [0] if not needed.
    """
    grad_losses, *tensors, lse = args[:8]
    x, needs = LossArgs(*tensors), args[11]
    runner = lookup_once(_BWD, args[:8], tuple(needs), _select_runner, _unpack_backward_args, x, args)
    functional.reject_forward_ad(grad_losses, x.Q, x.D, x.q_weight)
    return runner.gradients(grad_losses, x, SavedLoss(lse), LossOptions(*args[8:11]), needs)


def _compute_gradients(
    backend: ModuleType, upstream: Tensor, x: LossArgs, saved_loss: SavedLoss, options: LossOptions, needs: list[bool]
) -> tuple[Tensor, ...]:
    """Compute the gradients part by part."""
    upstream = upstream.expand(x.labels.shape)

    def of_part(i: slice, j: slice, part_needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        part, scores, argmax = x.part(i, j), saved_loss.scores, saved_loss.argmax
        if scores is None:
            scores, argmax = backend.forward(*part.dense, options.normalize, choose_argmax_dtype(x.D.shape[-2]))
        query_loss = SavedLoss(saved_loss.lse[i].contiguous(), saved_loss.divisor)
        gradient = backend.label_gradients(scores, part.labels, options, upstream[i], query_loss, j.start)
        Q, D, *masks = part.dense
        return backend.backward_lowmem(gradient, Q, D, argmax, *masks, options.normalize, part_needs)

    (Nq, columns), candidates = x.dense.scores_shape(), x.D.dim() == 4
    parts = list(split_argmax_to_fit(Nq, columns, _count_pair_bytes(x), _MAX_PART_BYTES, candidates, needs))
    if len(parts) == 1:
        return of_part(*parts[0])
    grads = fake_gradient(x.dense, needs)
    for i, j, part_needs in parts:
        part_slices = i, i if candidates else j, i
        for grad, part_slice, block_grad, is_needed in zip(
            grads, part_slices, of_part(i, j, part_needs), part_needs, strict=True
        ):
            if is_needed:
                grad[part_slice] = block_grad
    return grads


def _count_pair_bytes(x: LossArgs) -> int:
    """Return the bytes of the argmax and the scores of one (query, document) pair."""
    return x.Q.shape[1] * choose_argmax_dtype(x.D.shape[-2]).itemsize + 2 * score_dtype(x.Q.dtype).itemsize


def is_within_workspace(x: LossArgs) -> bool:
    """Return whether the argmax and the scores of the whole call fit the workspace."""
    Nq, columns = x.dense.scores_shape()
    return 0 < Nq * columns * _count_pair_bytes(x) <= _MAX_PART_BYTES


@maxsim_cross_entropy_bwd.register_fake
def _(*args):
    return fake_gradient(_unpack_backward_args(args).dense, args[11])


def _call_backward(grad_losses, tensors, lse, options, needs):
    return lik.maxsim_cross_entropy_bwd(grad_losses, *tensors, lse, *options, needs)


register_autograd(maxsim_cross_entropy_fwd, LossArgs, _call_backward, differentiable=(0, 1, 4))
maxsim_cross_entropy_bwd.register_autograd(make_raising_double_backward("maxsim_cross_entropy"))
batching.register_loop(maxsim_cross_entropy_fwd, maxsim_cross_entropy_bwd)
