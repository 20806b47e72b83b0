"""`torch.vmap` of the ragged operators: the tokens of all samples are concatenated for one call.

Shared tokens are copied if samples must not overlap, because each sample has its own gradients or argmax. If the copies
are too large, the samples are computed one by one (see `batching`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._ops import ops as lik
from ...core.segments import RaggedArgs
from ...core.settings import checks
from .batching import Outputs, _VmapBatch

_QUERY_SIDE, _DOCUMENT_SIDE = (0, 6, 8), (1, 7)  # positions of tokens, masks and weights in `RaggedArgs`
_ENDS, _OFFSETS, _LENGTHS, _PAIRS = 2, 3, 4, 5
_GAP = 2  # invalid queries between two samples, so that no query spans both


class _SharedSides(NamedTuple):
    """The sides that are repeated for each sample, or that differ between samples."""

    queries: bool
    columns: bool
    documents: bool  # columns refer to separate tokens for each sample
    pairs: bool
    both: bool  # both sides, as lists of candidates


class _RaggedVmapBatch:
    """A batch of `RaggedArgs`, of which the gradients in `needs` are needed."""

    def __init__(self, batch: _VmapBatch, needs: Sequence[bool] = (False, False, False)) -> None:
        self.batch, self.size = batch, batch.size
        pairs = batch.args[_PAIRS] is not None
        candidates = batch.sample_dim(_OFFSETS) == 2
        queries = batch.any_of(*_QUERY_SIDE, _ENDS) or needs[0] or needs[2] or (candidates and not pairs)
        documents = batch.any_of(*_DOCUMENT_SIDE) or needs[1]
        columns = documents or batch.any_of(_OFFSETS, _LENGTHS)
        has_both = not pairs and (candidates or queries == columns)
        self.layout = _SharedSides(queries or has_both, columns, documents, pairs, has_both)
        self.candidates = candidates

    def sample_shape(self, i: int) -> tuple:
        """Return the shape of field i in a sample."""
        return tuple(self.batch.args[i].shape[self.batch.is_batched[i] :])

    @property
    def has_large_copies(self) -> bool:
        """Return whether the repeated tokens exceed the limit for copies."""
        sides = ((0, self.layout.queries), (1, self.layout.documents))
        return any(is_repeated and self.batch.is_too_large_to_copy(i) for i, is_repeated in sides)

    @property
    def queries(self) -> Any:
        """Number of queries of a sample."""
        return self.sample_shape(_ENDS)[0] - 1

    @property
    def slots(self) -> Any:
        """Number of queries of a sample, including the gap."""
        return self.queries + _GAP

    def _samples(self, like: Tensor) -> Tensor:
        """Return the index of each sample, in a shape that broadcasts with `like`."""
        return torch.arange(self.size, device=like.device).view(-1, *((1,) * (like.dim() - 1)))

    def _tokens(self, i: int, is_folded: bool) -> Any:
        """Return field i. It is folded if `is_folded`, because each sample has its own."""
        return self.batch.fold(i) if is_folded else self.batch.args[i]

    def _make_cu_seqlens(self) -> Tensor:
        """Return the query offsets of the one call. Invalid offsets become -1."""
        if not self.layout.queries:
            return self.batch.args[_ENDS]
        ends, tokens = self.batch.expand(_ENDS).long(), self.sample_shape(0)[0]
        is_inside = (ends >= 0) & (ends <= tokens)
        ends = torch.where(is_inside, ends + self._samples(ends) * tokens, -1)
        return pad(pad(ends, (0, 1), value=-1).flatten(), (0, 1), value=-1)

    def _columns(self) -> tuple[Tensor, Tensor]:
        """Return the document offsets and lengths of the one call."""
        if not self.layout.columns and not self.layout.both:
            return self.batch.args[_OFFSETS], self.batch.args[_LENGTHS]
        offsets, lengths = (self.batch.expand(i).long() for i in (_OFFSETS, _LENGTHS))
        if self.layout.documents:
            tokens = self.sample_shape(1)[0]
            is_inside = (offsets >= 0) & (lengths >= 0) & (lengths <= tokens - offsets)
            offsets = torch.where(is_inside, offsets + self._samples(offsets) * tokens, -1)
        if not self.layout.both:
            return offsets.flatten(0, 1), lengths.flatten(0, 1)
        return self._repeat_lists(offsets), self._repeat_lists(lengths)

    def _repeat_lists(self, x: Tensor) -> Tensor:
        """Return the documents, or the candidates, of each query of each sample. Queries of a gap have none."""
        if self.candidates:
            return pad(x, (0, 0, 0, _GAP)).flatten(0, 1)
        return x.unsqueeze(1).expand(-1, self.slots, -1).flatten(0, 1)

    def _pairs(self) -> Tensor | None:
        """Return the pairs of the one call. Invalid pairs become -1."""
        if not self.layout.pairs:
            return None
        pairs = self.batch.expand(_PAIRS).long()
        columns = self.sample_shape(_OFFSETS)[0]
        limits = torch.tensor([self.queries, columns], device=pairs.device)
        strides = torch.tensor(
            [self.slots if self.layout.queries else 0, columns if self.layout.columns else 0], device=pairs.device
        )
        is_inside = ((pairs >= 0) & (pairs < limits)).all(-1, keepdim=True)
        return torch.where(is_inside, pairs + self._samples(pairs) * strides, -1).flatten(0, 1)

    def tensors(self) -> RaggedArgs:
        """Return the arguments of the one call."""
        Q, q_mask, q_weight = (self._tokens(i, self.layout.queries) for i in _QUERY_SIDE)
        D, d_mask = (self._tokens(i, self.layout.documents) for i in _DOCUMENT_SIDE)
        return RaggedArgs(Q, D, self._make_cu_seqlens(), *self._columns(), self._pairs(), q_mask, d_mask, q_weight)

    def split_scores(self, scores: Tensor) -> tuple[Tensor, int]:
        """Return the scores of each sample, and the axis of the samples."""
        if self.layout.pairs:
            return scores.unflatten(0, (self.size, self.sample_shape(_PAIRS)[0])), 0
        if self.layout.queries:
            return scores.unflatten(0, (self.size, self.slots))[:, : self.queries], 0
        return scores.unflatten(1, (self.size, self.sample_shape(_OFFSETS)[0])), 1

    def join_scores(self, scores: Tensor) -> Tensor:
        """Return scores whose first axis is the samples in the layout of the one call."""
        if self.layout.pairs:
            return scores.flatten(0, 1)
        if self.layout.queries:
            return pad(scores, (0, 0, 0, _GAP)).flatten(0, 1)
        return scores.movedim(0, 1).flatten(1, 2)

    @property
    def argmax_axis(self) -> int:
        """Axis of the argmax along which the samples are concatenated."""
        return 1 if self.layout.queries and not self.layout.pairs else 0


def _pack_samples(tensors: tuple, in_dims: tuple) -> tuple[list, list]:
    """Return the packed form of the tensors of a ragged operator, of all samples, and their batch axes."""
    stacked_tensors = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, in_dims, strict=True)]
    dims = [None if dim is None else 0 for dim in in_dims]
    if stacked_tensors[_LENGTHS] is None:
        dims[_LENGTHS] = dims[_OFFSETS]
    return list(RaggedArgs.from_tensors(stacked_tensors)), dims


def vmap_ragged_forward(info: Any, in_dims: tuple, *args: Any) -> Outputs:
    """Return the outputs of `lik::maxsim_ragged_fwd` for a batch."""
    tensors, dims = _pack_samples(args[:9], in_dims[:9])
    batch, constants, op = _VmapBatch(info.batch_size, tuple(dims), tuple(tensors)), args[9:], lik.maxsim_ragged_fwd
    packed = _RaggedVmapBatch(batch)
    if packed.has_large_copies:
        return batch.run_samples(op, *constants)
    with checks(False):  # the invalid offsets between samples are intended
        return _split_samples(packed, *op(*packed.tensors(), *constants))


def vmap_quantized_forward(info: Any, in_dims: tuple, *args: Any) -> Outputs:
    """Return the outputs of `lik::maxsim_quantized_fwd` for a batch. One call serves samples that share documents."""
    op, constants = lik.maxsim_quantized_fwd, args[15:]
    (Q, data, *tensors), (q_dim, data_dim, *dims) = _pack_samples(
        (*args[:2], *args[8:15]), (*in_dims[:2], *in_dims[8:15])
    )
    args, in_dims = (Q, data, *args[2:8], *tensors), (q_dim, data_dim, *in_dims[2:8], *dims)
    encoded_args, dims = args[1:8], [q_dim, None, *dims]
    if not any(dim is not None for dim in in_dims[1:8]):
        packed = _RaggedVmapBatch(_VmapBatch(info.batch_size, tuple(dims), (Q, data, *tensors)))
        if not (packed.layout.documents or packed.has_large_copies):
            x = packed.tensors()
            with checks(False):
                return _split_samples(packed, *op(x.Q, *encoded_args, *x[2:], *constants))
    return _VmapBatch(info.batch_size, in_dims, args).run_samples(op, *constants)


def _split_samples(packed: _RaggedVmapBatch, scores: Tensor, argmax: Tensor) -> Outputs:
    """Return the outputs of the one call with an axis for the samples."""
    batch = packed.batch
    scores, dim = packed.split_scores(scores)
    if argmax.dim() == 1:
        return (scores, argmax), (dim, None)
    axis = packed.argmax_axis
    sample_size = packed.sample_shape(0 if axis else _PAIRS if packed.layout.pairs else _OFFSETS)[0]
    return (scores, argmax.unflatten(axis, (batch.size, sample_size))), (dim, axis)


def vmap_ragged_backward(info: Any, in_dims: tuple, grad_scores: Any, *args: Any) -> Outputs:
    """Return the outputs of `lik::maxsim_ragged_bwd` for a batch."""
    *inputs, argmax, normalize, unified, needs = args
    tensors, dims = _pack_samples(tuple(inputs), in_dims[1:10])
    op, size = lik.maxsim_ragged_bwd, info.batch_size
    batch = _VmapBatch(size, (in_dims[0], *dims, in_dims[10]), (grad_scores, *tensors, argmax))
    packed = _RaggedVmapBatch(_VmapBatch(size, tuple(dims), tuple(tensors)), needs)
    if packed.has_large_copies:
        grads = batch.run_samples(op, normalize, unified, needs)[0]
    else:
        argmax = batch.fold(10, packed.argmax_axis)
        upstream = packed.join_scores(batch.expand(0))
        grads = op(upstream, *packed.tensors(), argmax, normalize, unified, needs)
    q_shape, d_shape = (
        x.shape if dim is None else x.movedim(dim, 0).shape[1:] for x, dim in zip(inputs[:2], in_dims[1:3], strict=True)
    )
    batched_grads = (
        g.reshape(size, *shape) if need else g.new_empty(0)
        for g, need, shape in zip(grads, needs, (q_shape, d_shape, q_shape[:-1]), strict=True)
    )
    return tuple(batched_grads), tuple(0 if need else None for need in needs)
