"""Test the kernel that reads residual codes and codes of odd numbers, as bytes and as words."""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest
import torch

from lik_ops.core.plan_cache import plans
from lik_ops.formats.table import BINARY_INT8_QUERIES, BINARY_QUERIES, RESIDUAL_FORMATS

from ...support.common import CUDA, INTERPRETER, INTERPRETING, thin_out

pytest.importorskip("triton", reason="these are kernels in Triton")
import triton

from lik_ops.csrc_triton.formats import bits
from lik_ops.gpu.forward import quantized as quantized_calls
from lik_ops.gpu.runtime import launcher

from ...support import ptx
from ...support.quantized import assert_right, dtypes, problem

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("place", PLACES, ids=str)


@pytest.mark.parametrize("format", RESIDUAL_FORMATS)
@pytest.mark.parametrize("codes", [torch.int32, torch.int64])
def test_out_of_range_codes_score_nan_for_their_document(place, format, codes):
    for dtype, centroids in zip(dtypes(place), itertools.cycle((torch.float16, torch.float32))):
        p = problem("cross", dtype, 20, format, queries=(3, 5), documents=(5, 20, 9, 7))
        stored = p.stored._replace(codes=p.stored.codes.to(codes), centroids=p.stored.centroids.to(centroids))
        p = dataclasses.replace(p, stored=stored)
        whole, winners = p.to(place.device).forward()
        assert_right(p, whole.cpu(), winners.cpu(), False)
        for j, code in ((0, -1), (2, len(stored.centroids)), (3, torch.iinfo(codes).max)):
            stored.codes[p.r.d_offsets[j] + 2] = code
        for normalize in (False, True):
            scores, found = p.to(place.device).forward(normalize=normalize)
            assert scores[:, [0, 2, 3]].isnan().all() and scores[:, 1].isfinite().all()
            if not normalize:
                assert torch.equal(scores[:, 1], whole[:, 1]) and torch.equal(found[1], winners[1])


def convert_centroids_to_fp16(p):
    """Return the problem with fp16 centroids, as stored in files."""
    return dataclasses.replace(p, stored=p.stored._replace(centroids=p.stored.centroids.half()))


@contextlib.contextmanager
def read_words(monkeypatch):
    """Read residuals as words, also in the interpreter."""
    with monkeypatch.context() as patch:
        if INTERPRETING:
            patch.setattr(quantized_calls, "_supports_prmt", lambda device: True)
            patch.setattr(triton.language, "inline_asm_elementwise", ptx.inline_asm_elementwise)
        yield


WORDS = [
    ("cross", 128, False, False, False),
    ("cross", 96, True, False, False),
    ("cross", 64, True, False, True),
    ("cross", 16, False, False, False),
    ("cross", 20, False, False, False),
    ("cross", 160, True, False, False),
    ("cross", 128, True, True, True),
    ("candidates", 128, True, True, False),
    ("pairs", 96, True, False, False),
]


@pytest.mark.parametrize(
    ("format", "mode", "d", "options", "winners", "normalize"),
    thin_out(((format, *case) for format in RESIDUAL_FORMATS for case in WORDS), 4),
)
def test_word_and_byte_reads_of_residual_codes_have_equal_bits(
    place, format, mode, d, options, winners, normalize, monkeypatch
):
    """Residuals have the same bits read as words, if supported, and read as bytes."""
    for dtype in dtypes(place)[:2]:
        if dtype == torch.float32:
            continue
        p = convert_centroids_to_fp16(problem(mode, dtype, d, format, options=options)).to(place.device)
        asked = {"normalize": normalize, "argmax_dtype": torch.int32 if winners else None}
        with read_words(monkeypatch):
            scores, argmax = p.forward(**asked)
        assert_right(p, scores, argmax if winners else None, normalize)
        with monkeypatch.context() as patch:
            patch.setattr(quantized_calls, "_WORD_DTYPES", {})
            again = p.forward(**asked)
        assert torch.equal(scores.nan_to_num(7), again[0].nan_to_num(7)) and torch.equal(argmax, again[1])


@pytest.mark.parametrize(
    ("format", "mode", "d", "options", "winners", "normalize"),
    thin_out(
        (
            (format, *case)
            for format in ("binary", BINARY_INT8_QUERIES, BINARY_QUERIES, "rq4", "rq2", "rq1")
            for case in (*WORDS, ("cross", 264, True, False, False))
        ),
        3,
    ),
)
def test_word_and_byte_reads_of_binary_and_rq_have_equal_bits(
    place, format, mode, d, options, winners, normalize, monkeypatch
):
    """Codes of odd numbers have the same bits read as words, if supported, and read as bytes."""
    for dtype in dtypes(place):
        if dtype == torch.float32 and not format.startswith("binary"):
            continue
        p = problem(mode, dtype, d, format.split("_")[0], options=options).to(place.device)
        p.stored = p.stored._replace(format=format)
        asked = {"normalize": normalize, "argmax_dtype": torch.int32 if winners else None}
        with read_words(monkeypatch):
            scores, argmax = p.forward(**asked)
        if format != BINARY_QUERIES:  # scores of signs are tested with the other formats
            assert_right(p, scores, argmax if winners else None, normalize)
        with monkeypatch.context() as patch:
            patch.setattr(quantized_calls, "_WORD_DTYPES", {})
            again = p.forward(**asked)
        assert torch.equal(scores.nan_to_num(7), again[0].nan_to_num(7)) and torch.equal(argmax, again[1])


@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_code_of_a_word_is_decoded(place, nbits, dtype):
    """The instructions decode each code at each place of a word, whatever the other codes are."""
    codes = torch.randint(2**nbits, (2000, 8))
    places, single = torch.eye(8, dtype=torch.int64), torch.arange(2**nbits)
    codes[: 8 * 2**nbits] = places.repeat(2**nbits, 1) * single.repeat_interleave(8)[:, None]
    words = (codes << (nbits * torch.arange(8))).sum(1).numpy().astype(np.uint32)
    registers = {"$4": words}
    ptx.run(bits._make_decode_ptx(nbits, getattr(triton.language, str(dtype).removeprefix("torch."))), registers)
    pairs = np.stack([registers[f"${n}"] for n in range(4)], 1)
    found = torch.from_numpy(pairs.view(np.int16)).view(dtype).view(2000, 8)
    assert torch.equal(found, (2 * codes - (2**nbits - 1)).to(dtype))


@pytest.mark.parametrize("nbits", [1, 2, 4])
def test_every_code_of_a_word_is_decoded_to_int8(place, nbits):
    codes = np.random.default_rng(0).integers(2**nbits, size=(2000, 8))
    if nbits == 1:
        codes[:256] = np.arange(256)[:, None] >> np.arange(8) & 1
    codes[256 : 256 + 8 * 2**nbits] = (
        np.tile(np.eye(8, dtype=int), (2**nbits, 1)) * np.arange(2**nbits).repeat(8)[:, None]
    )
    registers = {"$2": (codes << (nbits * np.arange(8))).sum(1).astype(np.uint32)}
    ptx.run(bits._make_decode_int8_ptx(nbits), registers)
    found = np.stack([registers["$0"], registers["$1"]], 1).view(np.int8)
    assert np.array_equal(found, (2 * codes - (2**nbits - 1)) * bits.get_code_factor(f"bits{nbits}"))


@pytest.mark.parametrize("format", RESIDUAL_FORMATS)
def test_bits_with_fp16_centroids_do_not_depend_on_batch(place, format, monkeypatch):
    with read_words(monkeypatch):
        _check_bits_do_not_depend_on_batch(place, format)


def _check_bits_do_not_depend_on_batch(place, format):
    many = (3, 0, 16, 5, 7) if INTERPRETING else (*[32] * 19, 300, 0, 5, 64)
    p = convert_centroids_to_fp16(problem("cross", torch.float16, 128, format, queries=many)).to(place.device)
    p.stored.codes[3] = 7  # no such centroid: only this document is NaN
    whole, _ = p.forward(argmax_dtype=None)
    assert whole[:, 0].isnan().sum() == sum(n > 0 for n in many) and not whole[:, 2:].isnan().any()
    bounds = p.r.cu_seqlens_q
    for i, n in enumerate(many):
        rows = slice(int(bounds[i]), int(bounds[i + 1]))
        one = p.r._replace(Q=p.r.Q[rows], cu_seqlens_q=bounds[i : i + 2] - bounds[i])
        found = dataclasses.replace(p, r=one).forward(argmax_dtype=None)[0]
        assert torch.equal(found[0].nan_to_num(7), whole[i].nan_to_num(7)), (i, n)
    some = p.r._replace(d_offsets=p.r.d_offsets[2:3], d_lengths=p.r.d_lengths[2:3])
    assert torch.equal(dataclasses.replace(p, r=some).forward(argmax_dtype=None)[0], whole[:, 2:3])


@pytest.mark.parametrize("queries", [(3, 16, 5), (3, 18)], ids=["one slot each", "one takes two"])
@pytest.mark.parametrize("format", ["residual2", "residual4"])
def test_persistent_programs_keep_the_bits_of_each_document(place, format, queries, monkeypatch):
    """The launch has at most the resident programs, and every document has the bits that it has alone."""
    lengths = (5, 0, 9, 20, 1, 0, 33) if INTERPRETING else (180, 0, 33, 1, 300, 64) * 400
    p = convert_centroids_to_fp16(problem("cross", torch.float16, 128, format, queries=queries, documents=lengths)).to(
        place.device
    )
    grids, launch = [], launcher.launch

    def noted(kernel, grid, *rest):
        grids.append(grid[0])
        return launch(kernel, grid, *rest)

    with read_words(monkeypatch):
        plans.clear()
        monkeypatch.setattr(launcher, "launch", noted)
        scores, _ = p.forward(argmax_dtype=None)
        assert 0 < grids[-1] < len(lengths) * len(queries) // 2
        monkeypatch.setattr(launcher, "launch", launch)
        assert torch.equal(p.forward(argmax_dtype=None)[0], scores)  # launched directly
        for j in (0, 2, 6, len(lengths) - 1):
            one = p.r._replace(d_offsets=p.r.d_offsets[j : j + 1], d_lengths=p.r.d_lengths[j : j + 1])
            alone = dataclasses.replace(p, r=one).forward(argmax_dtype=None)[0]
            assert torch.equal(alone, scores[:, j : j + 1]), j
    empty = p.r.d_lengths == 0
    assert (scores[:, empty] == -torch.inf).all() and scores[:, ~empty].isfinite().all()
