"""Test that `lik_ops.checks` turns invalid values into errors that name them. Other tests cover NaN without checks."""

from __future__ import annotations

import itertools
import re
import warnings

import pytest
import torch

import lik_ops
from lik_ops.core.settings import is_checking_values

from ..support.ragged import DEVICES

BIG = 2**63 - 1
CU_Q, CU_D = [0, 3, 3, 7], [0, 2, 6, 6, 9]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def test_context_manager_wins_nests_and_restores(monkeypatch):
    assert not is_checking_values()
    with lik_ops.checks():
        assert is_checking_values()
        with lik_ops.checks(False):
            assert not is_checking_values()
        assert is_checking_values()
    with pytest.raises(KeyError), lik_ops.checks(True):
        raise KeyError
    assert not is_checking_values()
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("LIK_OPS_CHECKS", value)
        assert is_checking_values() is expected
    monkeypatch.setenv("LIK_OPS_CHECKS", "1")
    with lik_ops.checks(False):
        assert not is_checking_values()
    monkeypatch.setenv("LIK_OPS_CHECKS", "yes")
    with pytest.raises(ValueError, match="LIK_OPS_CHECKS: expected 0 or 1, got 'yes'"):
        is_checking_values()
    with pytest.raises(TypeError, match="checks: enabled: expected a bool, got int"):
        lik_ops.checks(1).__enter__()


def arguments(device, dtype, **changes):
    """Return the tensor arguments for the calls below, with `changes` applied."""
    lists = {"cu_q": CU_Q, "cu_d": CU_D, "at": [[0, 5], [8, 9], [0, 0]], "length": [[2, 4], [1, 0], [9, 3]]}
    lists |= {"pairs": [[0, 0], [2, 3]], "q_lengths": [0, 4], "d_lengths": [[5, 0], [1, 2]], **changes}
    given = {name: torch.tensor(x, device=device, dtype=dtype) for name, x in lists.items()}
    Q, D = torch.randn(7, 4, device=device), torch.randn(9, 4, device=device)
    return {**given, "Q": Q, "D": D}


def varlen(x):
    return lik_ops.maxsim_varlen(x["Q"], x["D"], x["cu_q"], x["cu_d"])


def candidates(x):
    return lik_ops.maxsim_candidates_varlen(x["Q"], x["D"], x["at"], x["length"], cu_seqlens_q=x["cu_q"])


def pair_list(x, **options):
    cu_seqlens = {"cu_seqlens_q": x["cu_q"], "cu_seqlens_d": x["cu_d"]}
    return lik_ops.maxsim_pair_list(x["Q"], x["D"], x["pairs"], **cu_seqlens, **options)


def padded(x):
    Q, D = torch.randn(2, 4, 8, device=x["Q"].device), torch.randn(2, 2, 5, 8, device=x["Q"].device)
    return lik_ops.maxsim_padded(Q, D, x["q_lengths"], x["d_lengths"])


def retrieve(x):
    return lik_ops.retrieve(torch.randn(2, 3, 4, device=x["Q"].device), x["D"], 2, cu_seqlens_d=x["cu_d"])[0]


WRONG = [
    (varlen, "cu_q", [0, 4, 3, 7], "maxsim_varlen: cu_seqlens_q: expected ascending rows of Q [7, 4], got 3 at [2]"),
    (varlen, "cu_q", [-1, 3, 3, 7], "maxsim_varlen: cu_seqlens_q: expected ascending rows of Q [7, 4], got -1 at [0]"),
    (
        varlen,
        "cu_d",
        [0, 2, 6, 6, 10],
        "maxsim_varlen: cu_seqlens_d: expected ascending rows of D [9, 4], got 10 at [4]",
    ),
    (candidates, "at", [[0, 5], [8, 10], [0, 0]], "doc_offsets: expected rows of D [9, 4], got 10 at [1, 1]"),
    (candidates, "at", [[0, -5], [8, 10], [0, 0]], "doc_offsets: expected rows of D [9, 4], got -5 at [0, 1]"),
    (candidates, "length", [[2, 4], [1, 0], [10, 3]], "doc_lengths: expected 0 to 9 rows, as many as D [9, 4] has"),
    (candidates, "length", [[2, 5], [1, 0], [9, 3]], "doc_lengths: expected 0 to 4 rows, as many as D [9, 4] has"),
    (candidates, "length", [[-2, 4], [1, 0], [9, 3]], "got -2 at [0, 0]"),
    (
        candidates,
        "cu_q",
        [0, 8, 7, 7],
        "maxsim_candidates_varlen: cu_seqlens_q: expected ascending rows of Q [7, 4], got 8",
    ),
    (pair_list, "pairs", [[0, 0], [3, 3]], "maxsim_pair_list: pairs: expected a query, 0 <= i < 3, got 3 at [1, 0]"),
    (
        pair_list,
        "pairs",
        [[0, -1], [2, 3]],
        "maxsim_pair_list: pairs: expected a document, 0 <= j < 4, got -1 at [0, 1]",
    ),
    (pair_list, "cu_d", [0, 2, 6, 9, 8], "maxsim_pair_list: cu_seqlens_d: expected ascending rows of D"),
    (padded, "q_lengths", [0, 5], "maxsim_padded: query_lengths: expected 0 to 4 tokens, got 5 at [1]"),
    (padded, "d_lengths", [[5, 0], [1, -2]], "maxsim_padded: doc_lengths: expected 0 to 5 tokens, got -2 at [1, 1]"),
    (retrieve, "cu_d", [0, 2, 6, 5, 9], "retrieve: cu_seqlens_d: expected ascending rows of D [9, 4], got 5 at [3]"),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("function, name, value, message", WRONG)
def test_invalid_entry_raises_under_checks_else_scores_nan(function, name, value, message, dtype, device):
    right, wrong = arguments(device, dtype), arguments(device, dtype, **{name: value})
    with lik_ops.checks():
        assert not function(right).isnan().any()
        with pytest.raises(ValueError, match=re.escape(message)):
            function(wrong)
        with lik_ops.checks(False):
            assert function is retrieve or function(wrong).isnan().any()
    assert function is retrieve or function(wrong).isnan().any()


LENGTHS_D, LENGTHS_Q = [20] * 6, [8] * 4
PAIRS = [[0, 0]]
# Calls with the arguments: dense queries, packed queries, documents, query lengths, document lengths.
GIVEN_LENGTHS = {
    "varlen": lambda Q, P, D, q, d: lik_ops.maxsim_varlen(Q, D, None, d),
    "varlen of queries": lambda Q, P, D, q, d: lik_ops.maxsim_varlen(P, D[None], q),
    "varlen of both": lambda Q, P, D, q, d: lik_ops.maxsim_varlen(P, D, q, d),
    "varlen_with_argmax": lambda Q, P, D, q, d: lik_ops.maxsim_varlen_with_argmax(Q, D, None, d),
    "candidates": lambda Q, P, D, q, d: lik_ops.maxsim_candidates_varlen(
        P, D, q[:-1, None] * 0, q[:-1, None] * 0 + 3, cu_seqlens_q=q
    ),
    "candidates_with_argmax": lambda Q, P, D, q, d: lik_ops.maxsim_candidates_varlen_with_argmax(
        P, D, q[:-1, None] * 0, q[:-1, None] * 0 + 3, cu_seqlens_q=q
    ),
    "pair_list": lambda Q, P, D, q, d: lik_ops.maxsim_pair_list(Q, D, q.new_tensor(PAIRS), cu_seqlens_d=d),
    "pair_list of queries": lambda Q, P, D, q, d: lik_ops.maxsim_pair_list(
        P, D[None], q.new_tensor(PAIRS), cu_seqlens_q=q
    ),
    "pair_list_with_argmax": lambda Q, P, D, q, d: lik_ops.maxsim_pair_list_with_argmax(
        Q, D, q.new_tensor(PAIRS), cu_seqlens_d=d
    ),
    "retrieve": lambda Q, P, D, q, d: lik_ops.retrieve(Q, D, 2, cu_seqlens_d=d)[0],
    "retrieve the lowest": lambda Q, P, D, q, d: lik_ops.retrieve(Q, D, 2, cu_seqlens_d=d, largest=False)[0],
    "retrieve in parts": lambda Q, P, D, q, d: lik_ops.retrieve(Q, D.cpu().numpy(), 2, chunk=2, cu_seqlens_d=d)[0],
    "streamed": lambda Q, P, D, q, d: lik_ops.maxsim_streamed(Q, D, cu_seqlens_d=d, chunk=2),
    "quantized": lambda Q, P, D, q, d: lik_ops.maxsim_varlen(Q, lik_ops.quantize(D), None, d),
    "retrieve quantized": lambda Q, P, D, q, d: lik_ops.retrieve(Q, lik_ops.quantize(D), 2, chunk=2, cu_seqlens_d=d)[0],
    "retrieve in two stages": lambda Q, P, D, q, d: lik_ops.retrieve(
        Q, D, 2, cu_seqlens_d=d, coarse=lik_ops.quantize(D, cu_seqlens_d=_offsets(LENGTHS_D, d))
    )[0],
    "index": lambda Q, P, D, q, d: lik_ops.maxsim(Q, lik_ops.Index(lik_ops.quantize(D), d)),
    "nested": lambda Q, P, D, q, d: lik_ops.maxsim(Q, torch.nested.nested_tensor_from_jagged(D, d)),
    "unpack": lambda Q, P, D, q, d: lik_ops.unpack(D, d)[0],
    "quantize": lambda Q, P, D, q, d: lik_ops.quantize(D, scale="document", cu_seqlens_d=d).dequantize(),
}


def _offsets(lengths, like):
    return torch.tensor([0, *itertools.accumulate(lengths)], device=like.device, dtype=like.dtype)


@pytest.mark.parametrize("name", GIVEN_LENGTHS)
@pytest.mark.parametrize("wrong", ["lengths", "start", "end"])
def test_checks_reject_offsets_that_do_not_cover_all_tokens(name, wrong, device):
    call = GIVEN_LENGTHS[name]
    Q, P, D = (torch.randn(*shape, 16, device=device) for shape in ((4, 8), (32,), (120,)))
    right = [_offsets(n, torch.tensor(0, device=device)) for n in (LENGTHS_Q, LENGTHS_D)]
    if wrong == "lengths":
        others = [torch.tensor(n, device=device) for n in (LENGTHS_Q, LENGTHS_D)]
    else:
        at = 0 if wrong == "start" else -1
        others = [x.clone() for x in right]
        for x in others:
            x[at] = x[at] + 1 if wrong == "start" else x[at] - 1
    with lik_ops.checks():
        found = call(Q, P, D, *right)
        assert not (found[0] if isinstance(found, tuple) else found).isnan().any()
        with pytest.raises(ValueError, match=r"looks like lengths \(offsets are 0"):
            call(Q, P, D, *others)


@pytest.mark.parametrize("name", sorted(GIVEN_LENGTHS.keys() - {"quantize", "retrieve in two stages"}))
def test_lengths_passed_as_offsets_warn_once_on_cpu(name, monkeypatch):
    from lik_ops.ops.checks import hints

    monkeypatch.setattr(hints, "_issued_warnings", set())
    Q, P, D = torch.randn(4, 8, 16), torch.randn(32, 16), torch.randn(120, 16)
    zero = torch.tensor(0)
    GIVEN_LENGTHS[name](Q, P, D, _offsets(LENGTHS_Q, zero), _offsets(LENGTHS_D, zero))
    gap = torch.tensor([5, 9, 40])  # gaps are allowed
    lik_ops.maxsim_varlen(Q, D, None, gap)
    assert not hints._issued_warnings
    lengths = torch.tensor(LENGTHS_Q), torch.tensor(LENGTHS_D)
    with pytest.warns(UserWarning, match="looks like lengths") as found:
        GIVEN_LENGTHS[name](Q, P, D, *lengths)
    assert [x.filename for x in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GIVEN_LENGTHS[name](Q, P, D, *lengths)


def test_checks_reject_huge_lengths_and_small_max_seqlen_q(device):
    x = arguments(device, torch.int64, length=[[2, 4], [1, BIG], [9, 3]])
    assert candidates(x)[1, 1].isnan()
    with lik_ops.checks():
        with pytest.raises(ValueError, match=re.escape(f"got {BIG} at [1, 1]")):
            candidates(x)
        with pytest.raises(
            ValueError, match=r"max_seqlen_q: expected a bound .*, got 3, 4 tokens of the query at pairs\[1\]"
        ):
            pair_list(x, max_seqlen_q=3)
        empty = arguments(device, torch.int64, pairs=[[0, 0]][:0], cu_q=[0], cu_d=[0])
        empty |= {"pairs": empty["pairs"].view(0, 2), "Q": empty["Q"][:0], "D": empty["D"][:0]}
        assert pair_list(empty, max_seqlen_q=0).shape == (0,)


def test_checks_apply_to_compiled_calls():
    x = arguments("cpu", torch.int64, cu_d=[0, 2, 6, 6, 10])
    compiled = torch.compile(varlen, backend="aot_eager", fullgraph=True)
    assert compiled(x).isnan().any()
    with lik_ops.checks(), pytest.raises(ValueError, match=r"lik::maxsim_ragged_fwd: d_lengths: expected 0 to 3 rows"):
        compiled(x)


def test_checks_under_vmap_inspect_shared_arguments():
    """Shared arguments are checked, and the offsets that separate vmap samples are not reported as errors."""
    Q, D = torch.randn(2, 5, 8), torch.randn(7, 8)
    cu_q, cu_d, pairs = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 7]), torch.tensor([[0, 1], [1, 0]])
    padded = lik_ops.quantize(torch.randn(3, 4, 8))
    calls = [
        (lambda q: lik_ops.maxsim_varlen(q, D, cu_q, cu_d), Q),
        (lambda q: lik_ops.maxsim_varlen(q, lik_ops.quantize(D), cu_q, cu_d), Q),
        (lambda q: lik_ops.maxsim_pair_list(q, D, pairs, cu_seqlens_q=cu_q, cu_seqlens_d=cu_d), Q),
        (lambda q: lik_ops.maxsim(q, padded), Q),
        (lambda cu: lik_ops.maxsim_varlen(Q[0], D, cu_q, cu), torch.tensor([[0, 3, 7], [0, 0, 5]])),
        (lambda labels: lik_ops.maxsim_cross_entropy(Q, Q, labels), torch.tensor([[0, 1], [1, 0]])),
        (lambda n: lik_ops.chamfer_distance(Q, Q, p_lengths=n), torch.tensor([[3, 1], [5, 0]])),
    ]
    for call, x in calls:
        expected = torch.vmap(call)(x)
        with lik_ops.checks():
            assert torch.equal(torch.vmap(call)(x), expected)
    with lik_ops.checks(), pytest.raises(ValueError, match="cu_seqlens_d: expected offsets from 0 to 7"):
        torch.vmap(lambda q: lik_ops.maxsim_varlen(q, D, cu_q, cu_d + 1))(Q)


def test_checks_skip_fake_and_meta_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = arguments("cpu", torch.int64, cu_d=[0, 2, 6, 6, 10])
    with lik_ops.checks(), FakeTensorMode() as mode:
        assert varlen({name: mode.from_tensor(t) for name, t in x.items()}).shape == (3, 4)
    with lik_ops.checks():
        assert varlen({name: t.to("meta") for name, t in x.items()}).shape == (3, 4)


def test_checks_inspect_nested_tensor_offsets():
    nested = torch.nested.nested_tensor_from_jagged(torch.randn(7, 4), torch.tensor([0, 3, 9]))
    with lik_ops.checks(), pytest.raises(ValueError, match="cu_seqlens_d: expected ascending rows of D"):
        lik_ops.maxsim([torch.randn(2, 4)], nested)
