"""The in-batch contrastive loss: ``lik::maxsim_cross_entropy_fwd``, ``lik::maxsim_cross_entropy_bwd``.

The cross-entropy of ``score[i] / temperature`` at each query's label, made of what a backend has for `lik::maxsim`.
Neither scores nor winners outlive a part of the call: the forward keeps the log-sum-exp of each query, from which the
backward makes the probabilities of a part again, and hands them on as the gradient of its scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .._ops import ops as lik
from ..arguments import argmax_dtype_for, check_indices, score_dtype
from ..portable.blocks import fold_sum, slices_of
from ..segments import Dense
from .custom import custom_op
from .documented import document_bodies
from .family import backend_once, check_shape, fake_gradient, no_double_backward, register_autograd
from .stack import batching, functional

_FWD_SCHEMA = (
    "(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, Tensor labels, float temperature,"
    " int ignore_index, bool normalize) -> (Tensor, Tensor)"
)
_BWD_SCHEMA = (
    "(Tensor grad_losses, Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, Tensor labels,"
    " Tensor lse, float temperature, int ignore_index, bool normalize, bool[3] needs) -> (Tensor, Tensor, Tensor)"
)
_FWD, _BWD = map(add_op_namespace_prefix, ("maxsim_cross_entropy_fwd", "maxsim_cross_entropy_bwd"))
_SCORE_BYTES = 8 * 2**20  # of the scores of some queries; one query's may be more
_PART_BYTES = 24 * 2**20  # of winners and scores in a backward; one query's or document's may be more


class Labelled(NamedTuple):
    """The tensors of a call: `Dense`, and the label of each query."""

    Q: Tensor
    D: Tensor
    q_mask: Tensor | None
    d_mask: Tensor | None
    q_weight: Tensor | None
    labels: Tensor  # [Nq], int32 or int64

    @property
    def dense(self) -> Dense:
        return Dense(*self[:5])

    def check(self, op: str) -> None:
        """Raise ValueError or TypeError, naming the argument, unless all fit together."""
        self.dense.check(op)
        check_labels(op, self.labels, self.Q)

    def part(self, queries: slice, documents: slice) -> Labelled:
        """Of some queries and, in the cross product, of some documents."""
        if (queries.stop - queries.start, documents.stop - documents.start) == self.dense.scores_shape():
            return self  # nothing to cut, which takes a view of each
        of_documents = queries if self.D.dim() == 4 else documents
        parts = queries, of_documents, queries, of_documents, queries, queries
        return Labelled(*(None if t is None else t[own] for t, own in zip(self, parts, strict=True)))  # type: ignore


def check_labels(op: str, labels: Any, Q: Tensor) -> None:
    """Raise ValueError or TypeError unless there is an integer for each query."""
    check_indices(op, "labels", labels, (Q.shape[0],), "[Nq], one for each query", Q.device)


@custom_op(add_op_namespace_prefix("maxsim_cross_entropy_fwd"), _FWD_SCHEMA)
def maxsim_cross_entropy_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """The loss of each query ``[Nq]``, and its log-sum-exp ``[Nq, 2]``, both fp32 (fp64 for fp64).

    The latter in two numbers, the largest ``score / temperature`` and the logarithm of the sum beside it: one number
    would round small losses away. A query whose label is `ignore_index` has loss 0, one whose label is no document NaN.
    """
    x, (temperature, ignore_index, normalize) = Labelled(*args[:6]), args[6:]
    backend = backend_once(_FWD, x, (), x.Q, partial(x.check, _FWD))
    functional.reject_forward_ad(x.Q, x.D, x.q_weight)
    return _losses(backend, x, temperature, ignore_index, normalize)


def _losses(
    backend: ModuleType, x: Labelled, temperature: float, ignore_index: int, normalize: bool
) -> tuple[Tensor, Tensor]:
    Nq, columns = x.dense.scores_shape()
    losses, lse = _outputs(x)
    index = x.labels.clamp(0, max(columns - 1, 0))
    wrong = index != x.labels if columns else torch.ones_like(index, dtype=torch.bool)
    queries = max(1, _SCORE_BYTES // (losses.element_size() * max(columns, 1)))
    for i in slices_of(0, Nq if columns else 0, queries):
        scores, _ = backend.forward(*x.part(i, slice(0, columns)).dense, normalize, None)
        best, log_sum = lse[i].unbind(1)
        torch.amax(scores.div_(temperature), 1, out=best)
        at_label = scores.sub_(best[:, None]).gather(1, index[i, None].long()).squeeze(1)
        # torch.sum would add in an order that depends on how many queries there are.
        torch.log(fold_sum(scores.exp_()), out=log_sum)
        torch.sub(log_sum, at_label, out=losses[i])
    ignored = x.labels == ignore_index
    for found, per_query in ((losses, (wrong, ignored)), (lse, (wrong[:, None], ignored[:, None]))):
        found.masked_fill_(per_query[0], torch.nan).masked_fill_(per_query[1], 0)
    return losses, lse


def _outputs(x: Labelled) -> tuple[Tensor, Tensor]:
    Nq, dtype = x.Q.shape[0], score_dtype(x.Q.dtype)
    return x.Q.new_empty((Nq,), dtype=dtype), x.Q.new_empty((Nq, 2), dtype=dtype)


@maxsim_cross_entropy_fwd.register_fake
def _(*args):
    x = Labelled(*args[:6])
    x.check(_FWD)
    return _outputs(x)


def _taken(args: tuple) -> Labelled:
    """The tensors of a backward; raises unless it takes them."""
    grad_losses, *tensors, lse = args[:8]
    x, needs = Labelled(*tensors), args[11]
    x.check(_BWD)
    Nq, dtype = x.Q.shape[0], score_dtype(x.Q.dtype)
    for name, t, shape in (("grad_losses", grad_losses, (Nq,)), ("lse", lse, (Nq, 2))):
        check_shape(_BWD, name, t, shape, x.Q.device)
        if t.dtype != dtype:
            raise TypeError(f"{_BWD}: {name}: expected {dtype}, got {t.dtype}")
    if needs[2] and x.q_weight is None:
        raise ValueError(f"{_BWD}: needs: a gradient of q_weight was asked for, and q_weight is None")
    return x


@custom_op(add_op_namespace_prefix("maxsim_cross_entropy_bwd"), _BWD_SCHEMA)
def maxsim_cross_entropy_bwd(*args: Any) -> tuple[Tensor, ...]:
    """Gradients of Q, D and q_weight, each summed by its owner: no atomics, bitwise reproducible.

    `lse` is what `maxsim_cross_entropy_fwd` keeps. `needs` says which of the three are wanted; the others have size
    [0]. Scores and winners are found again, in parts that need no more memory than a constant.
    """
    grad_losses, *tensors, lse, temperature, ignore_index, normalize, needs = args
    x = Labelled(*tensors)
    backend = backend_once(_BWD, args[:8], tuple(needs), x.Q, partial(_taken, args))
    functional.reject_forward_ad(grad_losses, x.Q, x.D, x.q_weight)
    upstream, ignored = grad_losses / temperature, x.labels == ignore_index

    def of_part(i: slice, j: slice, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        part = x.part(i, j)
        scores, argmax = backend.forward(*part.dense, normalize, argmax_dtype_for(x.D.shape[-2]))
        best, log_sum = lse[i, None].unbind(2)
        is_label = part.labels[:, None] == torch.arange(j.start, j.stop, device=x.Q.device)
        scores.div_(temperature).sub_(best).sub_(log_sum).exp_().add_(is_label, alpha=-1)
        scores.mul_(upstream[i, None]).masked_fill_(ignored[i, None], 0)
        Q, D, *masks = part.dense
        return backend.backward_lowmem(scores, Q, D, argmax, *masks, normalize, wanted)

    parts = list(_parts(x, list(needs)))
    if len(parts) == 1:
        return of_part(*parts[0])
    grads = fake_gradient(x.dense, needs)
    for i, j, wanted in parts:
        places = i, i if x.D.dim() == 4 else j, i
        for grad, place, found, want in zip(grads, places, of_part(i, j, wanted), wanted, strict=True):
            if want:
                grad[place] = found
    return grads


def _parts(x: Labelled, needs: list[bool]) -> Iterator[tuple[slice, slice, list[bool]]]:
    """The call in parts of queries and documents, with the gradients that each completes.

    Candidates belong to their query. In the cross product a query needs all documents and a document all queries:
    where the call has to be cut, its scores are found twice, and no gradient is a sum of parts.
    """
    (Nq, columns), candidates = x.dense.scores_shape(), x.D.dim() == 4
    pair_bytes = x.Q.shape[1] * argmax_dtype_for(x.D.shape[-2]).itemsize + 2 * score_dtype(x.Q.dtype).itemsize
    if Nq * columns * pair_bytes <= _PART_BYTES:
        yield slice(0, Nq), slice(0, columns), needs
        return
    of_queries = needs if candidates else [needs[0], False, needs[2]]
    if any(of_queries):
        for i in slices_of(0, Nq, max(1, _PART_BYTES // (columns * pair_bytes))):
            yield i, slice(0, columns), of_queries
    if needs[1] and not candidates:
        for j in slices_of(0, columns, max(1, _PART_BYTES // (Nq * pair_bytes))):
            yield slice(0, Nq), j, [False, True, False]


@maxsim_cross_entropy_bwd.register_fake
def _(*args):
    return fake_gradient(_taken(args).dense, args[11])


def _gradients(grad_losses, tensors, lse, options, needs):
    return lik.maxsim_cross_entropy_bwd(grad_losses, *tensors, lse, *options, needs)


register_autograd(maxsim_cross_entropy_fwd, Labelled, _gradients, wanted=(0, 1, 4))
maxsim_cross_entropy_bwd.register_autograd(no_double_backward("maxsim_cross_entropy"))
maxsim_cross_entropy_fwd.register_vmap(partial(batching.one_by_one, maxsim_cross_entropy_fwd, 6))
maxsim_cross_entropy_bwd.register_vmap(partial(batching.one_by_one, maxsim_cross_entropy_bwd, 8))
document_bodies(maxsim_cross_entropy_fwd, maxsim_cross_entropy_bwd)
