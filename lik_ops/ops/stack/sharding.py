"""`DTensor` rules: queries sharded, documents sharded (both on meshes of two axes), everything replicated.

A score needs one query and one document whole, so sharding either axis needs no communication forward; the gradient of
the side that is not sharded comes out as partial sums. Tokens and features are gathered first where they are sharded.
Packed tokens are cut by lengths that no placement follows: of ragged layouts the lists may be sharded (documents of a
cross product, candidates of each query, pairs), tokens are whole on every process.
Registered when a `DTensor` may come along, because importing torch.distributed.tensor takes a second.
"""

from __future__ import annotations

import sys

import torch

_registered = False


def register_if_needed() -> None:
    """Register the rules once, if anything imported torch.distributed.tensor."""
    global _registered
    if not _registered and "torch.distributed.tensor" in sys.modules:
        _registered = True
        _register()
        _register_ragged()


# Compiled code registers while it is traced. `torch.compiler.assume_constant_result` does just this, but would import
# all of torch._dynamo here; a test compares the two.
register_if_needed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _register() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    whole = Replicate()

    def of(x, placement):
        return None if x is None else placement

    @register_sharding(torch.ops.lik.maxsim_fwd.default)
    def _(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype, backward):
        candidates = len(D.shape) == 4

        def rule(scores, argmax, queries, documents):
            winners = whole if argmax_dtype is None else argmax
            inputs = [queries, documents, of(q_mask, queries), of(d_mask, documents), of(q_weight, queries)]
            return [scores, winners], [*inputs, None, None, None]

        rows = Shard(0)
        if candidates:
            sharded = [rule(rows, rows, rows, rows), rule(Shard(1), Shard(1), whole, Shard(1))]
        else:
            sharded = [rule(rows, Shard(1), rows, whole), rule(Shard(1), rows, whole, rows)]
        return [rule(whole, whole, whole, whole), *sharded]

    @register_sharding([torch.ops.lik.maxsim_bwd_lowmem.default, torch.ops.lik.maxsim_bwd_unified.default])
    def _(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs):
        candidates, kept = len(D.shape) == 4, len(argmax.shape) == 3

        def rule(scores, winners, queries, documents, grad_queries, grad_documents):
            grads = (grad_queries, grad_documents, grad_queries)
            outputs = [g if need else whole for g, need in zip(grads, needs, strict=True)]
            inputs = [scores, queries, documents, winners if kept else whole]
            masks = [of(q_mask, queries), of(d_mask, documents), of(q_weight, queries)]
            return outputs, [*inputs, *masks, None, None]

        rows, partial = Shard(0), Partial()
        if candidates:
            sharded = [
                rule(rows, rows, rows, rows, rows, rows),
                rule(Shard(1), Shard(1), whole, Shard(1), partial, Shard(1)),
            ]
        else:
            sharded = [
                rule(rows, Shard(1), rows, whole, rows, partial),
                rule(Shard(1), rows, whole, rows, partial, rows),
            ]
        return [rule(whole, whole, whole, whole, whole, whole), *sharded]

    @register_sharding(torch.ops.lik.maxsim_topk.default)
    def _(Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, top_k, chunk):
        def rule(queries):
            inputs = [queries, whole, of(q_mask, queries), of(d_mask, whole), of(cu_seqlens_d, whole)]
            return [queries, queries], [*inputs, of(q_weight, queries), None, None, None]

        return [rule(whole), rule(Shard(0))]


def _register_ragged() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    whole = Replicate()

    def ragged(d_offsets, pairs, lists):
        """Placements of scores, winners, offsets and pairs; by `lists`, documents, candidates or pairs are sharded."""
        of_lists = Shard(0) if lists else whole
        columns = whole if pairs is not None or not lists else Shard(len(d_offsets.shape) - 1)
        scores = of_lists if pairs is not None or not lists else Shard(1)
        return scores, of_lists, columns, None if pairs is None else of_lists

    @register_sharding(torch.ops.lik.maxsim_ragged_fwd.default)
    def _(Q, D, cu_seqlens_q, d_offsets, d_lengths, pairs, q_mask, d_mask, q_weight, normalize, argmax_dtype, *rest):
        def rule(lists):
            scores, winners, columns, of_pairs = ragged(d_offsets, pairs, lists)
            masks = [None if x is None else whole for x in (q_mask, d_mask, q_weight)]
            inputs = [whole, whole, whole, columns, columns, of_pairs, *masks]
            return [scores, whole if argmax_dtype is None else winners], [*inputs, None, None, None, None]

        return [rule(False), rule(True)]

    @register_sharding(torch.ops.lik.maxsim_ragged_bwd.default)
    def _(
        grad_scores,
        Q,
        D,
        cu_seqlens_q,
        d_offsets,
        d_lengths,
        pairs,
        q_mask,
        d_mask,
        q_weight,
        argmax,
        normalize,
        unified,
        needs,
    ):
        def rule(lists):
            scores, winners, columns, of_pairs = ragged(d_offsets, pairs, lists)
            masks = [None if x is None else whole for x in (q_mask, d_mask, q_weight)]
            inputs = [scores, whole, whole, whole, columns, columns, of_pairs, *masks, winners]
            grads = [Partial() if lists and need else whole for need in needs]
            return grads, [*inputs, None, None, None]

        return [rule(False), rule(True)]
