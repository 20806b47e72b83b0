"""Test exported programs of packed tokens and pair lists, with zero, one, or a few elements along every axis."""

import itertools

import pytest
import torch
from torch.export import Dim
from torch.fx.experimental import _config

import lik_ops

DY = Dim.DYNAMIC
COUNTS = (0, 1, 2, 3)


def varlen(Q, D, cu_seqlens_q, cu_seqlens_d):
    return lik_ops.maxsim_varlen(Q, D, cu_seqlens_q, cu_seqlens_d)


def varlen_winners(Q, D, cu_seqlens_q, cu_seqlens_d):
    return lik_ops.maxsim_varlen_with_argmax(Q, D, cu_seqlens_q, cu_seqlens_d)


def varlen_of_dense_queries(queries, D, cu_seqlens_d):
    return lik_ops.maxsim_varlen(queries, D, None, cu_seqlens_d)


def candidates(Q, D, offsets, lengths, cu_seqlens_q):
    return lik_ops.maxsim_candidates_varlen(Q, D, offsets, lengths, cu_seqlens_q=cu_seqlens_q)


def candidate_winners(Q, D, offsets, lengths, cu_seqlens_q):
    return lik_ops.maxsim_candidates_varlen_with_argmax(Q, D, offsets, lengths, cu_seqlens_q=cu_seqlens_q)


def pair_list(Q, D, pairs, cu_seqlens_q, cu_seqlens_d):
    return lik_ops.maxsim_pair_list(Q, D, pairs, cu_seqlens_q=cu_seqlens_q, cu_seqlens_d=cu_seqlens_d)


def pair_winners(Q, D, pairs, cu_seqlens_q, cu_seqlens_d):
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_d": cu_seqlens_d, "max_seqlen_q": 5}
    return lik_ops.maxsim_pair_list_with_argmax(Q, D, pairs, **bounds)


def retrieve(queries, D, cu_seqlens_d):
    return lik_ops.retrieve(queries, D, 2, cu_seqlens_d=cu_seqlens_d)


def retrieve_one(queries, D, cu_seqlens_d):
    return lik_ops.retrieve(queries, D, 1, cu_seqlens_d=cu_seqlens_d)


FUNCTIONS = (
    varlen,
    varlen_winners,
    varlen_of_dense_queries,
    candidates,
    candidate_winners,
    pair_list,
    pair_winners,
    retrieve,
    retrieve_one,
)


def packed(lengths):
    return torch.randn(sum(lengths), 8), torch.tensor([0, *itertools.accumulate(lengths)])


def arguments(function, queries, documents, chosen):
    """Return the arguments by parameter name, and the axes with a dynamic size."""
    torch.manual_seed(0)
    Q, cu_seqlens_q = packed([3, 1, 2, 4][:queries])
    D, cu_seqlens_d = packed([5, 2, 1, 3, 1][:documents])
    members = torch.randint(max(documents, 1), (queries, chosen if documents else 0))
    own = {"offsets": cu_seqlens_d[:-1][members], "lengths": cu_seqlens_d.diff()[members]}
    pairs = torch.stack([torch.randint(max(n, 1), (chosen,)) for n in (queries, documents)], 1)
    tensors = {"Q": Q, "D": D, "queries": torch.randn(queries, 3, 8), "pairs": pairs, **own}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_d": cu_seqlens_d}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    sizes = tuple(dict.fromkeys(range(2 if name in own else 1), DY) for name in names)
    return tuple(tensors[name] for name in names), sizes


def exported(function):
    class Model(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    args, sizes = arguments(function, 4, 5, 3)
    return torch.export.export(Model(), args, dynamic_shapes=(sizes,)).module()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_programs_accept_any_counts_if_size_oblivious(function):
    with _config.patch(backed_size_oblivious=True):
        program = exported(function)
    for queries, documents, chosen in itertools.product(COUNTS, COUNTS, (0, 1, 2)):
        if "pair" in function.__name__ and chosen and not (queries and documents):
            continue  # no such pairs exist
        args, _ = arguments(function, queries, documents, chosen)
        torch.testing.assert_close(program(*args), function(*args), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("queries", "documents"), [(1, 3), (3, 1)])
def test_default_export_rejects_one_query_or_document(queries, documents):
    """This test fails once torch accepts one element. Then `docs/pytorch.md` need not mention the setting."""
    args, _ = arguments(varlen, queries, documents, 0)
    program = exported(varlen)
    with pytest.raises((AssertionError, RuntimeError)):
        program(*args)


def test_default_export_accepts_two_queries_and_documents():
    program, (args, _) = exported(varlen), arguments(varlen, 2, 2, 0)
    assert torch.equal(program(*args), varlen(*args))
