"""Test what the portable backend assumes about matrix products of this machine, and the order of its sums.

If a test fails, scores on this machine depend on the batch or on padding: see `portable.blocks`.
"""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lik_ops.portable.blocks import (
    MAX_ROWS,
    MIN_ROWS,
    allocate_slices,
    choose_slice_shape,
    sum_pairwise,
    supports_in_place_reads,
)
from lik_ops.portable.forward import narrow

from ..support.ragged import NAN, same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("d", [1, 8, 48, 96, 128, 768])
@pytest.mark.parametrize("Lq", [1, 7, 17, 32, 33, 100, 1024])
def test_product_bits_do_not_depend_on_position_in_a_slice(Lq, d, dtype):
    """Shared slices rely on this: a row or column has the same bits at every position, so ties remain ties."""
    for Ld in (1, 9, 23, 33, 64, 300):
        shape, count = choose_slice_shape(Lq, Ld, d, dtype), 5
        documents, others = (allocate_slices(torch.empty(0), count, shape.rows, d, dtype) for _ in range(2))
        documents.copy_(torch.randn(count, shape.rows, d))
        panel = torch.randn(shape.columns, d, dtype=dtype)
        rows, columns = torch.randperm(shape.rows), torch.randperm(shape.columns)
        others.copy_(documents.flip(0)[:, rows])
        S = torch.bmm(documents, panel.mT.expand(count, -1, -1)).flip(0)[:, rows][:, :, columns]
        same_bits(torch.bmm(others, panel[columns].mT.expand(count, -1, -1)), S)
        same_bits(torch.bmm(others[:2], panel[columns].expand(2, -1, -1).contiguous().mT), S[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("d", [1, 2, 8, 17, 96, 128, 768, 5000, 12000, 20000, 50000])
def test_product_bits_do_not_depend_on_slice_shape(d, dtype):
    """Padded, packed, and masked tokens rely on this: a similarity does not depend on query and document lengths."""
    documents = torch.randn(MAX_ROWS if d < 5000 else 64, d, dtype=dtype)
    queries = torch.randn(128, d, dtype=dtype)
    lengths = itertools.product(
        (1, 31, 33, 64, 65, 100, 300), (1, 9, MIN_ROWS - 1, MIN_ROWS, 33, 65, 300, MAX_ROWS + 1)
    )
    shapes = {(shape.rows, shape.columns) for shape in (choose_slice_shape(Lq, Ld, d, dtype) for Lq, Ld in lengths)}
    known = torch.full((documents.shape[0], 128), NAN, dtype=dtype)
    for rows, columns in shapes:
        for _ in range(3):
            row, column = torch.randint(0, documents.shape[0], (2, rows)), torch.randint(0, 128, (columns,))
            slices = allocate_slices(torch.empty(0), 2, rows, d, dtype)
            slices.copy_(documents[row])
            S = torch.bmm(slices, queries[column].mT.expand(2, -1, -1))
            before = known[row[..., None], column]
            same_bits(torch.where(before.isnan(), S, before), S)
            known[row[..., None], column] = S


@pytest.mark.skipif(not supports_in_place_reads(), reason="documents are copied on this machine")
@pytest.mark.parametrize("d", [1, 7, 16, 24, 64, 100, 127, 128, 384, 768, 1000, 5000])
def test_in_place_products_have_the_bits_of_slices(d):
    """Many documents are multiplied token by token or whole, at any address, with contiguous columns or not."""
    for Ld, n, start in itertools.product((1, 2, 9, 33, 100), (MIN_ROWS, 31, 40, 63), (0, 1, 4)):
        if n * Ld * d > 1 << 20:
            continue
        documents = torch.randn(n * Ld * d + start)[start:].view(n, Ld, d)
        for Lq in (1, 33, 128):
            shape = choose_slice_shape(Lq, Ld, d, torch.float32)
            panel = torch.randn(shape.columns, d)
            # A slice of all tokens gives these bits. By the previous test, its number of rows does not matter.
            copied = allocate_slices(documents, 2, max(n * Ld, MIN_ROWS), d, torch.float32)
            copied[:, : n * Ld] = documents.flatten(0, 1)
            expected = torch.bmm(copied, panel.mT.expand(2, -1, -1))[0, : n * Ld].view(n, Ld, -1)
            columns = panel.t().contiguous().expand(Ld, -1, -1)
            same_bits(torch.bmm(documents.transpose(0, 1), columns).transpose(0, 1), expected)
            if Ld >= MIN_ROWS:
                same_bits(torch.bmm(documents, panel.mT.expand(n, -1, -1)), expected)
                same_bits(torch.bmm(documents[:2], panel.expand(2, -1, -1).contiguous().mT), expected[:2])


@pytest.mark.parametrize("name", ["MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"])
def test_in_place_reads_are_disabled_if_mkl_kernels_are_forced(name, monkeypatch):
    monkeypatch.setenv(name, "AVX2")
    assert not supports_in_place_reads.__wrapped__()


class Products(TorchDispatchMode):
    """Mode that records the dtypes of products."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.bmm:
            self.dtypes += [x.dtype for x in args]
        return func(*args, **(kwargs or {}))


def test_slice_measurement_ignores_autocast():
    shapes = [(rows, 32, 16, dtype, turned) for rows in (4, 12) for turned in (False, True) for dtype in narrow.STEPS]
    narrow.has_slice_bits.cache_clear()
    expected = [narrow.has_slice_bits(*shape) for shape in shapes]
    narrow.has_slice_bits.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert [narrow.has_slice_bits(*shape) for shape in shapes] == expected
        for shape in shapes:
            with Products() as products:
                narrow.has_slice_bits.__wrapped__(*shape)
            assert products.dtypes == [shape[3]] * 4


@pytest.mark.parametrize("length", [1, 2, 3, 7, 32, 100])
def test_sums_over_query_tokens_have_one_order(length):
    """The order is a binary tree over a power of two, which zeros at the end do not change."""
    x = torch.randn(5, 40, 3, length)
    expected = torch.nn.functional.pad(x, (0, (1 << (length - 1).bit_length()) - length))
    while expected.shape[-1] > 1:
        first, second = expected.chunk(2, dim=-1)
        expected = first + second
    same_bits(sum_pairwise(x.clone()), expected[..., 0])
    same_bits(sum_pairwise(x.mT.contiguous().mT), expected[..., 0])
    for zeros in (1, 5, 200):
        same_bits(sum_pairwise(torch.nn.functional.pad(x, (0, zeros))), expected[..., 0])
