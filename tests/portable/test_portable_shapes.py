"""Test the portable forward on extreme shapes. Bits match other shapes, and the work does not increase."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lik_ops import reference
from lik_ops.portable import backend as portable
from lik_ops.portable.blocks import SHARED_ROWS, choose_slice_shape
from lik_ops.portable.forward.narrow import (
    FewDocumentsForward,
    FewQueriesForward,
    choose_rows,
    choose_sharing,
    has_slice_bits,
)
from lik_ops.portable.forward.slices import SliceForward
from lik_ops.portable.forward.wide import CHUNK_FEATURES, WideForward
from lik_ops.portable.layout import make_batched_args

from ..support.ragged import same_bits

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
# Queries, documents (or candidates), their lengths, features: one part and several, groups, panels, long queries.
FEW_DOCUMENTS = (
    (1, 1, 1, 1, 1),
    (70, 1, 33, 1, 16),
    (300, 1, 1, 1, 40),
    (300, 2, 3, 2, 7),
    (150, 5, 7, 3, 16),
    (40, 1, 16, 24, 9),
    (3, 8, 130, 8, 33),
    (200, 20, 32, 2, 128),
    (9, 1, 5, 60, 768),
)


# Similar shapes for few query tokens. Short and long documents are read several, one, or a piece at a time.
FEW_QUERIES = (
    (1, 1, 1, 16, 1),
    (1, 3, 1, 300, 16),
    (1, 5000, 2, 3, 40),
    (2, 7, 4, 33, 7),
    (1, 3, 5, 70000, 12),
    (70, 40, 1, 2, 33),
    (8, 700, 1, 13, 128),
    (1, 30, 3, 64, 768),
)


class Work(TorchDispatchMode):
    """Mode that counts tensor operations, multiplications in products, and copied bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.multiplications = self.copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        packet = func.overloadpacket
        if packet is torch.ops.aten.bmm:
            self.multiplications += args[0].numel() * args[1].shape[2]
        if packet is torch.ops.aten.copy_:
            self.copied += args[0].nbytes
        return func(*args, **(kwargs or {}))


def measure_work(Q: Tensor, D: Tensor) -> Work:
    portable.forward(Q, D, None, None, None, False, None)  # fills the caches of this shape
    with Work() as work:
        portable.forward(Q, D, None, None, None, False, None)
    return work


def test_long_queries_with_one_token_documents():
    for Lq in (9999, 26112, 40000):
        Q, D = torch.randn(2, Lq, 20), torch.randn(2, 1, 1, 20)
        torch.testing.assert_close(portable.forward(Q, D, *(None,) * 3, False, None)[0], reference.maxsim(Q, D))


@pytest.mark.parametrize("d", [16, 128])
def test_many_queries_with_one_token_share_products(d):
    """Separate products for each query would be 64 x 64 with 10000 calls."""
    Q, D = torch.randn(10000, 33, d), torch.randn(1, 1, d)
    work = measure_work(Q, D)
    assert work.multiplications <= 1.02 * 24 * Q.numel()
    assert work.operations < 60 * (1 + Q.nbytes / 2**20)
    assert work.copied < 0.1 * Q.nbytes + 8 * 10000 * 33


@pytest.mark.parametrize("d", [16, 128])
def test_pairs_of_one_token_share_products(d):
    """Separate products for each pair would be 64 x 32."""
    Q, D = torch.randn(20000, 1, d), torch.randn(20000, 1, 1, d)
    work = measure_work(Q, D)
    assert work.multiplications <= 1.02 * 32 * Q.numel()
    assert work.operations < 60 * (1 + Q.nbytes / 2**20)
    assert work.copied < 0.1 * Q.nbytes + 8 * 20000


def test_wide_tokens_are_multiplied_once_and_in_place():
    d = 1 << 20
    Q, D = torch.randn(1, 4, d), torch.randn(2, 4, d)
    work = measure_work(Q, D)
    assert work.multiplications <= 1.01 * 4 * 8 * d
    assert work.copied < 0.01 * D.nbytes


def problem(shape, candidates, dtype, extras):
    Nq, Nd, Lq, Ld, d = shape
    Q = torch.randn(Nq, Lq, d, dtype=torch.float64).to(dtype)
    D = torch.randn(*((Nq,) if candidates else ()), Nd, Ld, d, dtype=torch.float64).to(dtype)
    if not extras:
        return Q, D, None, None, None
    weight = torch.randn(Nq, Lq, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return Q, D, torch.rand(Nq, Lq) < 0.8, torch.rand(D.shape[:-1]) < 0.8, weight


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize(
    "kind, shape",
    [
        *((FewDocumentsForward, shape) for shape in FEW_DOCUMENTS),
        *((FewQueriesForward, shape) for shape in FEW_QUERIES),
        pytest.param(FewDocumentsForward, (2, 1, 40000, 1, 20), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_few_tokens_have_the_bits_of_slices(kind, shape, candidates, dtype):
    Nq, Nd, Lq = shape[:3]
    taken = 0
    for extras, winners in itertools.product((False, True), repeat=2):
        Q, D, *rest = problem(shape, candidates, dtype, extras)
        results = []
        for each in (kind, SliceForward):
            scores = torch.full((Nq, Nd), math.nan, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
            argmax = torch.full((Nq, Nd, Lq) if candidates else (Nd, Nq, Lq), -7, dtype=torch.int32)
            layout = make_batched_args(Q, D, *rest, scores, argmax if winners else None)
            if not kind.supports(layout):
                break
            each(layout, extras).run()
            results.append((scores, argmax))
        if not results:
            continue
        taken += 1
        for actual, expected in zip(*results, strict=True):
            same_bits(actual, expected)
    # The machine decides how many rows are enough for `FewQueriesForward`. Candidates of many tokens do not qualify.
    assert taken == 4 or candidates or kind is FewQueriesForward
    if not taken:
        pytest.skip("slices score this shape")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 16, 33, 96, 128, 768, pytest.param(4000, marks=pytest.mark.slow)])
def test_small_products_have_the_bits_of_slices(d, dtype):
    """One product decided that small products may be used. Products of other counts and scales must agree."""
    small = {
        (choose_rows(t, c, d, dtype), c)
        for t in (1, 2, 5, 9, 16, 23)
        for c in {choose_slice_shape(32, 64, d, dtype).columns}
    }
    for tokens, Lq in itertools.product((1, 2, 5, 9), (1, 2, 7, 15)):
        group, columns = choose_sharing(tokens, Lq, d, dtype)
        small.add((choose_rows(group * tokens, columns, d, dtype), columns))
    for rows, columns in small:
        assert has_slice_bits(rows, columns, d, dtype)
        for n, scale in ((2, 1e-10), (3, 1e10), (50, 1.0)):
            D, Q = torch.randn(n, max(rows, SHARED_ROWS), d, dtype=dtype) * scale, torch.randn(n, 96, d, dtype=dtype)
            expected = torch.bmm(D, Q.mT)[:, :rows, :columns]
            actual = torch.bmm(D[:, :rows].contiguous(), Q[:, :columns].contiguous().mT)
            same_bits(actual, expected)


@pytest.mark.parametrize(
    "d, dtype", [(300001, torch.float32), (33 * CHUNK_FEATURES, torch.float32), (140001, torch.float64)], ids=str
)
def test_bits_of_wide_tokens_do_not_depend_on_their_place(d, dtype):
    Q, D = torch.randn(2, 5, d, dtype=dtype), torch.randn(3, 4, d, dtype=dtype)
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[:, 1:] = False

    def forward(Q, D, q_mask=keep, normalize=False):
        assert WideForward.supports(make_batched_args(Q, D, q_mask, None, None, torch.empty(0, 0, dtype=dtype), None))
        return portable.forward(Q, D, q_mask, None, None, normalize, torch.int32)

    for normalize in (False, True):
        scores, argmax = forward(Q, D, normalize=normalize)
        same_bits(forward(Q[:1, :1], D, keep[:1, :1], normalize)[0], scores[:1])
        same_bits(forward(Q.flip(1), D, keep.flip(1), normalize)[0], scores)
        same_bits(forward(Q, D.flip(0), normalize=normalize)[0], scores.flip(1))
        same_bits(forward(Q, D.flip(1), normalize=normalize)[0], scores)
        same_bits(forward(Q, D[None, :2].repeat(2, 1, 1, 1), normalize=normalize)[0], scores[:, :2])
        expected, winner = reference.maxsim_with_argmax(Q.double(), D.double(), keep, normalize=normalize)
        torch.testing.assert_close(scores.double(), expected, atol=1e-2 if dtype == torch.float32 else 1e-9, rtol=1e-5)
        same_bits(argmax.transpose(0, 1).long(), winner)


def test_wide_tokens_with_bf16_masks_and_long_documents():
    Q, D = (torch.randn(*shape, 140000 * 2).bfloat16() for shape in ((2, 3), (2, 70)))
    q_mask, d_mask = torch.rand(2, 3) < 0.7, torch.rand(2, 70) < 0.7
    Q[~q_mask], D[~d_mask] = math.nan, math.inf
    scores, argmax = portable.forward(Q, D, q_mask, d_mask, torch.ones(2, 3), True, torch.int32)
    Q[~q_mask], D[~d_mask] = 0, 0
    expected, winner = reference.maxsim_with_argmax(Q.double(), D.double(), q_mask, d_mask, normalize=True)
    torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=1e-5)
    same_bits(argmax.transpose(0, 1).long(), winner)
