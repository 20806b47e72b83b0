"""`DTensor` rules: queries sharded, documents sharded (both on meshes of two axes), everything replicated.

A score needs one query and one document whole, so sharding either axis needs no communication forward; the gradient of
the side that is not sharded comes out as partial sums. Tokens and features are gathered first where they are sharded.
Packed tokens are cut by lengths that no placement follows: of ragged layouts the lists may be sharded (documents of a
cross product, candidates of each query, pairs), tokens are whole on every process.
Registered when a `DTensor` may come along, because importing torch.distributed.tensor takes a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..._ops import ops as lik
from ...segments import Ragged

_registered = False


def register_if_needed() -> None:
    """Register the rules once, if anything imported torch.distributed.tensor."""
    global _registered
    if not _registered and "torch.distributed.tensor" in sys.modules:
        _registered = True
        _register()


# Compiled code registers while it is traced. `torch.compiler.assume_constant_result` does just this, but would import
# all of torch._dynamo here; a test compares the two.
register_if_needed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _placed(tensors: Sequence, placements: Sequence) -> list:
    """Placements of arguments, None for those that are None."""
    return [None if x is None else placement for x, placement in zip(tensors, placements, strict=True)]


def _register() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    at = _Placements(Replicate(), Shard(0), Shard(1), Partial())
    families = _register_maxsim, _register_xtr_and_losses, _register_soft, _register_head, _register_chamfer
    for register in (*families, _register_searches, _register_ragged):
        register(register_sharding, at)


class _Placements(NamedTuple):
    """Whole on every process, cut along the first or the second axis, or a part of a sum."""

    whole: Any
    first: Any
    second: Any
    partial: Any

    def dense(self, D: Any) -> tuple:
        """Of scores, winners, queries, documents, and of the gradients of the last two."""
        whole, first, second, partial = self
        if len(D.shape) == 4:
            sharded = (first,) * 6, (second, second, whole, second, partial, second)
        else:
            sharded = (first, second, first, whole, first, partial), (second, first, whole, first, partial, first)
        return (whole,) * 6, *sharded


def _register_maxsim(register_sharding: Any, at: _Placements) -> None:
    whole, dense = at.whole, at.dense

    @register_sharding(lik.maxsim_fwd.default)
    def _(*args):
        keeps = args[6] is not None
        return [
            ([scores, winners if keeps else whole], [*_placed(args[:5], (q, d, q, d, q)), None, None, None])
            for scores, winners, q, d, _, _ in dense(args[1])
        ]

    @register_sharding([lik.maxsim_bwd_lowmem.default, lik.maxsim_bwd_unified.default])
    def _(*args):
        D, argmax, needs = args[2], args[3], args[8]
        found = []
        for scores, winners, q, d, grad_q, grad_d in dense(D):
            grads = [g if need else whole for g, need in zip((grad_q, grad_d, grad_q), needs, strict=True)]
            winners = winners if len(argmax.shape) == 3 else whole
            found.append((grads, [*_placed(args[:7], (scores, q, d, winners, q, d, q)), None, None]))
        return found

    @register_sharding(lik.maxsim_fwd_int8.default)
    def _(*args):
        return [
            ([scores, winners, d, d], [*_placed(args[:5], (q, d, q, d, q)), None, None, None])
            for scores, winners, q, d, _, _ in dense(args[1])
        ]

    @register_sharding(lik.maxsim_bwd_int8.default)
    def _(*args):
        found = []
        for scores, winners, q, d, grad_q, grad_d in dense(args[2]):
            grads = [g if need else whole for g, need in zip((grad_q, grad_d, grad_q), args[9], strict=True)]
            found.append((grads, [*_placed(args[:7], (scores, q, d, d, winners, q, q)), None, None, None]))
        return found


def _register_xtr_and_losses(register_sharding: Any, at: _Placements) -> None:
    whole, first, second, partial = at

    @register_sharding(lik.maxsim_xtr_fwd.default)
    def _(*args):
        return [
            ([q, winners, q], [*_placed(args[:5], (q, whole, q, whole, q)), None, None])
            for q, winners in ((whole, whole), (first, second))
        ]

    @register_sharding(lik.maxsim_token_topk_fwd.default)
    def _(*args):
        after = {whole: whole, first: second, second: type(first)(2)}  # of winners, whose first axis is the rank
        return [
            ([scores, after[winners] if args[7] else whole], [*_placed(args[:5], (q, d, q, d, q)), None, None, None])
            for scores, winners, q, d, _, _ in at.dense(args[1])
        ]

    def losses(D):
        """Placements of losses and queries, of documents and of their gradient: a loss needs all its documents."""
        return (whole,) * 3, (first, first, first) if len(D.shape) == 4 else (first, whole, partial)

    @register_sharding(lik.maxsim_cross_entropy_fwd.default)
    def _(*args):
        return [([q, q], [*_placed(args[:6], (q, d, q, d, q, q)), None, None, None]) for q, d, _ in losses(args[1])]

    @register_sharding(lik.maxsim_cross_entropy_bwd.default)
    def _(*args):
        found = []
        for q, d, grad_d in losses(args[2]):
            grads = [g if need else whole for g, need in zip((q, grad_d, q), args[11], strict=True)]
            found.append((grads, [*_placed(args[:8], (q, q, d, q, d, q, q, q)), None, None, None, None]))
        return found


def _register_soft(register_sharding: Any, at: _Placements) -> None:
    whole, partial, dense = at.whole, at.partial, at.dense

    @register_sharding(lik.maxsim_soft_fwd.default)
    def _(*args):
        return [
            ([scores, kept if args[8] else whole], [*_placed(args[:6], (q, d, q, d, q, whole)), None, None, None])
            for scores, kept, q, d, _, _ in dense(args[1])
        ]

    @register_sharding(lik.maxsim_soft_bwd.default)
    def _(*args):
        found = []
        for scores, kept, q, d, grad_q, grad_d in dense(args[2]):
            of_tau = whole if scores is whole else partial
            each = zip((grad_q, grad_d, grad_q, of_tau), args[10], strict=True)
            grads = [g if need else whole for g, need in each]
            found.append((grads, [*_placed(args[:8], (scores, q, d, kept, q, d, q, whole)), None, None, None]))
        return found


def _register_head(register_sharding: Any, at: _Placements) -> None:
    whole, partial = at.whole, at.partial

    def heads(H):
        """Placements as of `dense`, and of the gradients of W and b, which all processes have whole."""
        return [(*each, whole if n == 0 else partial) for n, each in enumerate(at.dense(H))]

    @register_sharding(lik.maxsim_from_hidden_fwd.default)
    def _(*args):
        return [
            (
                [scores, winners if args[8] is not None else whole],
                [*_placed(args[:7], (q, h, whole, whole, q, h, q)), None, None],
            )
            for scores, winners, q, h, *_ in heads(args[1])
        ]

    @register_sharding(lik.maxsim_from_hidden_bwd.default)
    def _(*args):
        found = []
        for scores, winners, q, h, grad_q, grad_h, of_head in heads(args[2]):
            each = zip((grad_q, grad_h, of_head, of_head, grad_q), args[10], strict=True)
            winners = winners if len(args[5].shape) == 3 else whole
            placed = _placed(args[:9], (scores, q, h, whole, whole, winners, q, h, q))
            found.append(([g if need else whole for g, need in each], [*placed, None, None]))
        return found


def _register_chamfer(register_sharding: Any, at: _Placements) -> None:
    whole, first = at.whole, at.first

    @register_sharding(lik.chamfer_fwd.default)
    def _(*args):
        return [([of] * 4, [*_placed(args[:4], (of,) * 4), None]) for of in (whole, first)]

    @register_sharding(lik.chamfer_bwd.default)
    def _(*args):
        return [
            ([of if need else whole for need in args[7]], [*_placed(args[:6], (of,) * 6), None, None])
            for of in (whole, first)
        ]


def _register_searches(register_sharding: Any, at: _Placements) -> None:
    whole, first = at.whole, at.first

    @register_sharding(lik.maxsim_topk.default)
    def _(*args):
        return [
            ([q, q], [*_placed(args[:6], (q, whole, q, whole, whole, q)), None, None, None]) for q in (whole, first)
        ]

    @register_sharding(lik.maxsim_topk_codes.default)
    def _(*args):
        return [
            ([q, q], [*_placed(args[:7], (q, whole, whole, q, whole, whole, q)), None, None, None])
            for q in (whole, first)
        ]


def _register_ragged(register_sharding: Any, at: _Placements) -> None:
    whole, first, second, partial = at

    def ragged(r):
        """Placements of scores, winners, the call's tensors, and of their gradients: nothing sharded, or the lists."""
        everything: Any = Ragged(*_placed(r, (whole,) * len(r)))
        if r.pairs is not None:
            scores, lists = first, everything._replace(pairs=first)
        else:
            columns = first if len(r.d_offsets.shape) == 1 else second
            scores, lists = second, everything._replace(d_offsets=columns, d_lengths=columns)
        return (whole, whole, everything, whole), (scores, first, lists, partial)

    @register_sharding(lik.maxsim_ragged_fwd.default)
    def _(*args):
        keeps = args[10] is not None
        return [
            ([scores, winners if keeps else whole], [*tensors, None, None, None, None])
            for scores, winners, tensors, _ in ragged(Ragged(*args[:9]))
        ]

    @register_sharding(lik.maxsim_quantized_fwd.default)
    def _(*args):
        keeps, stored = args[16] is not None, [None if x is None else whole for x in args[1:8]]
        stored[3] = None  # the format is no tensor
        return [
            ([scores, winners if keeps else whole], [tensors.Q, *stored, *tensors[2:], None, None, None])
            for scores, winners, tensors, _ in ragged(Ragged(*args[:2], *args[8:15]))
        ]

    @register_sharding(lik.maxsim_ragged_bwd.default)
    def _(*args):
        return [
            ([grad if need else whole for need in args[13]], [scores, *tensors, winners, None, None, None])
            for scores, winners, tensors, grad in ragged(Ragged(*args[1:10]))
        ]
