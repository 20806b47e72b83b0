"""`DTensor` rules: queries sharded, documents sharded, both on meshes of two axes, or everything replicated.

A score needs one complete query and one complete document. Sharding queries or documents therefore needs no
communication in the forward. The gradient of the side that is not sharded is returned as partial sums. Sharded tokens
or features are gathered first.

No placement follows the lengths of packed tokens. In ragged layouts the lists may be sharded (documents of a cross
product, candidates of each query, pairs), and every process has all tokens. The rules are registered when a `DTensor`
is possible, because importing torch.distributed.tensor costs a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor

from ..._ops import ops as lik
from ...core.segments import PackedArgs, RaggedArgs

_registered = False
# The class and a placement, once the rules are registered.
_DTensor: Any = None
_replicate: Any = None


def register_if_needed() -> None:
    """Register the rules once, if torch.distributed.tensor has been imported."""
    global _registered
    if not _registered and "torch.distributed.tensor" in sys.modules:
        _registered = True
        _register()


# Dynamo calls this function while tracing. `torch.compiler.assume_constant_result` sets the same attribute, but it
# would import all of torch._dynamo here. A test compares the two.
register_if_needed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def replicate_like(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` as a replicated DTensor if `like` is a DTensor, else `x`.

    torch does not mix plain tensors with DTensors, so tensors that a function of lik_ops creates follow its arguments.
    `x` must be the same on all processes.
    """
    if _DTensor is None or not isinstance(like, _DTensor):
        return x
    mesh = like.device_mesh
    return _DTensor.from_local(x, mesh, [_replicate] * mesh.ndim, run_check=False)


def make_packed_args(tensors: tuple, max_seqlen_q: Any) -> PackedArgs:
    """Return `PackedArgs.from_tensors` these tensors, which may be DTensors."""
    if _DTensor is not None and isinstance(tensors[0], _DTensor):
        tensors = _pack_tensors(tensors)
    return PackedArgs.from_tensors(tensors, max_seqlen_q)


def _pack_tensors(tensors: tuple) -> RaggedArgs:
    """Return the packed form of a call with DTensors. Only this form has placements other than replicated."""
    # torch cannot flatten an unevenly sharded axis, and the rules replicate packed tokens.
    Q, D, cu_seqlens_q, offsets, lengths, pairs, *per_token = tensors
    Q, D, *per_token = (_gather_shards(x) for x in (Q, D, *per_token))
    r = RaggedArgs.from_tensors((Q, D, cu_seqlens_q, offsets, lengths, pairs, *per_token))
    if cu_seqlens_q is None:
        r = r._replace(cu_seqlens_q=replicate_like(r.cu_seqlens_q, r.Q))
    if offsets is None:
        r = r._replace(d_offsets=replicate_like(r.d_offsets, r.Q), d_lengths=replicate_like(r.d_lengths, r.Q))
    return r


def _gather_shards(x: Any) -> Any:
    """Return `x` replicated if it is a DTensor, else `x`."""
    return x.redistribute(placements=[_replicate] * x.device_mesh.ndim) if isinstance(x, _DTensor) else x


def _list_placements(tensors: Sequence, placements: Sequence) -> list:
    """Return the placements of arguments, with None for arguments that are None or follow the last placement."""
    return [None if x is None else placement for x, placement in zip_longest(tensors, placements)]


def _register() -> None:
    """Register the rules of all operators."""
    global _DTensor, _replicate
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    _DTensor, _replicate = DTensor, Replicate()
    placements = _Placements(Replicate(), Shard(0), Shard(1), Shard(2), Partial())
    for ops, rule in _RULES.items():
        for op in ops.split():
            overload = getattr(lik, op).default
            register_sharding(overload)(partial(_list_strategies, rule, placements))
            _compare_flags(overload, DTensor)


def _compare_flags(op: Any, DTensor: Any) -> None:
    """Make DTensor also compare the flags of `op` when it looks up the output shapes of an earlier call.

    `register_sharding` compares only tensors and the arguments after the first integer, and it has no option for flags.
    The flags of lik_ops determine which outputs exist, such as `needs` of a backward or the argmax of a forward.
    """
    schema_infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    flags = [n for n, x in enumerate(op._schema.arguments) if "bool" in str(x.type)]
    schema_infos[op] = replace(
        schema_infos[op], static_argnum=min(schema_infos[op].static_argnum, *flags, len(op._schema.arguments))
    )


def _list_strategies(rule: Callable, at: _Placements, *args: Any) -> list:
    """Return the placements of outputs and arguments that `rule` supports."""
    return [(list(results), _list_placements(args, arguments)) for results, arguments in rule(at, args)]


class _Placements(NamedTuple):
    """Placements: replicated, sharded along the first, second or third axis, or a partial sum."""

    replicated: Any
    first: Any
    second: Any
    third: Any
    partial: Any

    def dense(self, D: Any) -> tuple:
        """Return placements of scores, argmax, queries, documents, and the gradients of queries and documents."""
        replicated, first, second, _, partial = self
        if len(D.shape) == 4:
            sharded = (first,) * 6, (second, second, replicated, second, partial, second)
        else:
            sharded = (
                (first, second, first, replicated, first, partial),
                (second, first, replicated, first, partial, first),
            )
        return (replicated,) * 6, *sharded

    def heads(self, H: Any) -> list:
        """Return the placements of `dense`, and of the gradients of W and b, which are replicated or partial sums."""
        return [
            (*placements, self.replicated if n == 0 else self.partial) for n, placements in enumerate(self.dense(H))
        ]

    def losses(self, D: Any) -> tuple:
        """Return placements of losses and queries, of documents, and of their gradient. A loss needs all documents."""
        replicated, first = self[:2]
        return (replicated,) * 3, (first, first, first) if len(D.shape) == 4 else (first, replicated, self.partial)

    def ragged(self, r: RaggedArgs) -> tuple:
        """Return placements of scores, argmax, the tensors of the call, and the gradients. Only lists are sharded."""
        replicated, first, second, _, partial = self
        replicated_args: Any = RaggedArgs(*_list_placements(r, (replicated,) * len(r)))
        if r.cu_seqlens_q is None or r.d_lengths is None:  # an axis of tokens or a bound of two documents
            return ((replicated, replicated, replicated_args, replicated),)
        if r.pairs is not None:
            scores, lists = first, replicated_args._replace(pairs=first)
        else:
            columns = first if len(r.d_offsets.shape) == 1 else second
            scores, lists = second, replicated_args._replace(d_offsets=columns, d_lengths=columns)
        return (replicated, replicated, replicated_args, replicated), (scores, first, lists, partial)

    def argmax(self, x: Any, placement: Any) -> Any:
        """Return the placement of an argmax, which is replicated if it is empty because a backward recomputes it."""
        return placement if len(x.shape) == 3 else self.replicated

    def encoded(self) -> tuple:
        """Return the placements of `EncodedTokens`, in which the format, the fourth field, is not a tensor."""
        return *(self.replicated,) * 3, None, *(self.replicated,) * 3

    def place_needed(self, placements: Sequence, needs: Any) -> list:
        """Return the placements of outputs. An output that is not needed is empty and replicated."""
        return [x if need else self.replicated for x, need in zip(placements, needs, strict=True)]


def _shard_token_topk(at: _Placements, a: tuple) -> list:
    # The first axis of the argmax is the rank, so other axes move by one.
    next_axis = {at.replicated: at.replicated, at.first: at.second, at.second: at.third}
    placements = at.dense(a[1])
    return [(at.place_needed((s, next_axis[w]), (True, a[7])), (q, d, q, d, q)) for s, w, q, d, _, _ in placements]


# For each operator: the placements of its results and of its arguments `a`, once for each supported sharding.
_RULES: dict[str, Callable[[_Placements, tuple], list]] = {
    "maxsim_fwd": lambda at, a: [
        (at.place_needed((s, w), (True, a[6] is not None)), (q, d, q, d, q)) for s, w, q, d, _, _ in at.dense(a[1])
    ],
    "maxsim_bwd_lowmem maxsim_bwd_unified": lambda at, a: [
        (at.place_needed((of_q, of_d, of_q), a[8]), (s, q, d, at.argmax(a[3], w), q, d, q))
        for s, w, q, d, of_q, of_d in at.dense(a[2])
    ],
    "maxsim_fwd_int8": lambda at, a: [((s, w, d, d), (q, d, q, d, q)) for s, w, q, d, _, _ in at.dense(a[1])],
    "maxsim_bwd_int8": lambda at, a: [
        (at.place_needed((of_q, of_d, of_q), a[9]), (s, q, d, d, w, q, q)) for s, w, q, d, of_q, of_d in at.dense(a[2])
    ],
    "maxsim_xtr_fwd": lambda at, a: [
        ((q, w, q), (q, at.replicated, q, at.replicated, q))
        for q, w in ((at.replicated, at.replicated), (at.first, at.second))
    ],
    "maxsim_token_topk_fwd": _shard_token_topk,
    "maxsim_cross_entropy_fwd": lambda at, a: [((q, q), (q, d, q, d, q, q)) for q, d, _ in at.losses(a[1])],
    "maxsim_cross_entropy_bwd": lambda at, a: [
        (at.place_needed((q, of_d, q), a[11]), (q, q, d, q, d, q, q, q)) for q, d, of_d in at.losses(a[2])
    ],
    "maxsim_soft_fwd": lambda at, a: [
        (at.place_needed((s, w), (True, a[8])), (q, d, q, d, q, at.replicated)) for s, w, q, d, _, _ in at.dense(a[1])
    ],
    "maxsim_soft_bwd": lambda at, a: [
        (at.place_needed((of_q, of_d, of_q, of_tau), a[10]), (s, q, d, w, q, d, q, at.replicated))
        for s, w, q, d, of_q, of_d, of_tau in at.heads(a[2])
    ],
    "maxsim_from_hidden_fwd": lambda at, a: [
        (at.place_needed((s, w), (True, a[8] is not None)), (q, h, at.replicated, at.replicated, q, h, q))
        for s, w, q, h, *_ in at.heads(a[1])
    ],
    "maxsim_from_hidden_bwd": lambda at, a: [
        (
            at.place_needed((of_q, of_h, of_head, of_head, of_q), a[10]),
            (s, q, h, at.replicated, at.replicated, at.argmax(a[5], w), q, h, q),
        )
        for s, w, q, h, of_q, of_h, of_head in at.heads(a[2])
    ],
    "chamfer_fwd": lambda at, a: [((placement,) * 4, (placement,) * 4) for placement in at[:2]],
    "chamfer_bwd": lambda at, a: [
        (at.place_needed((placement, placement), a[7]), (placement,) * 6) for placement in at[:2]
    ],
    "maxsim_topk": lambda at, a: [((q, q), (q, at.replicated, q, at.replicated, at.replicated, q)) for q in at[:2]],
    "maxsim_topk_codes": lambda at, a: [
        ((q, q), (q, at.replicated, at.replicated, q, at.replicated, at.replicated, q)) for q in at[:2]
    ],
    "maxsim_ragged_fwd": lambda at, a: [
        (at.place_needed((s, w), (True, a[10] is not None)), tensors)
        for s, w, tensors, _ in at.ragged(RaggedArgs(*a[:9]))
    ],
    "maxsim_ragged_bwd": lambda at, a: [
        (at.place_needed((grad,) * 3, a[13]), (s, *x, w)) for s, w, x, grad in at.ragged(RaggedArgs(*a[1:10]))
    ],
    "maxsim_quantized_fwd": lambda at, a: [
        (at.place_needed((s, w), (True, a[16] is not None)), (x.Q, *at.encoded(), *x[2:]))
        for s, w, x, _ in at.ragged(RaggedArgs(*a[:2], *a[8:15]))
    ],
    "maxsim_quantized_bwd": lambda at, a: [
        (at.place_needed((grad,) * 2, a[18]), (s, x.Q, *at.encoded(), *x[2:], w))
        for s, w, x, grad in at.ragged(RaggedArgs(*a[1:3], *a[9:16]))
    ],
}
