"""Test the kernels that read quantized documents against fp64 sums of dequantized tokens and the portable backend."""

import dataclasses
import itertools

import pytest
import torch

import lik_ops
from lik_ops import Quantized
from lik_ops.core.plan_cache import plans
from lik_ops.formats.table import (
    ALL_FORMATS,
    BINARY_INT8_QUERIES,
    BINARY_QUERIES,
    FORMATS,
    FP8_QUERIES,
    INT8_QUERIES,
    EncodedTokens,
    select_rows,
)
from lik_ops.ops.fast_path import eager
from lik_ops.ops.topk import SearchArgs
from lik_ops.portable import backend as portable
from lik_ops.retrieval import two_stage

from ...support.common import CUDA, INTERPRETER, INTERPRETING, thin_out

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.gpu import backend
from lik_ops.gpu.tuning import forward_configs
from lik_ops.gpu.tuning.architectures import KernelKey

from ...support.quantized import ONE_TERM, QUERIES, TERMS, Problem, assert_near_portable, assert_right, dtypes, problem
from ...support.residual import quantize

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("place", PLACES, ids=str)
every_format = pytest.mark.parametrize("format", FORMATS)
every_format_and_codes = pytest.mark.parametrize("format", ALL_FORMATS)

MODES = ("cross", "candidates", "pairs")
SCALES = ("token", "document", "tensor")
FEATURES = (20, 96, 128, 160, 300)


CASES = [
    (format, mode, FEATURES[n % 5], SCALES[n // 2 % 3], n % 2 == 0, n % 3 > 0, n % 4 == 1)
    for n, (format, mode) in enumerate(itertools.product(ALL_FORMATS, MODES))
]
CASES += [("int8", "cross", d, "token", False, True, d == 128) for d in FEATURES]


@pytest.mark.parametrize(("format", "mode", "d", "scale", "options", "winners", "normalize"), thin_out(CASES, 2))
def test_scores_and_argmax_match_formula(place, format, mode, d, scale, options, winners, normalize):
    for n, dtype in enumerate(dtypes(place)):
        p = problem(mode, dtype, d, format, SCALES[(SCALES.index(scale) + n) % 3], options).to(place.device)
        scores, argmax = p.forward(normalize=normalize, argmax_dtype=torch.int32 if winners else None)
        assert_right(p, scores, argmax if winners else None, normalize)
        assert_near_portable(p, scores, normalize)


ONE_TERM_CASES = [
    ("cross", 128, "token", False, False, False),
    ("cross", 96, "document", True, True, False),
    ("cross", 20, "tensor", True, False, True),
    ("candidates", 256, "token", True, True, False),
    ("pairs", 128, "document", False, True, True),
    ("cross", 300, "token", False, False, False),  # too many features: queries are not rounded
]


@pytest.mark.parametrize(
    ("mode", "d", "scale", "options", "winners", "normalize", "format"),
    thin_out(((*case, format) for case in ONE_TERM_CASES for format in ("int8", "binary")), 3),
)
def test_one_term_queries_are_within_half_a_step(place, mode, d, scale, options, winners, normalize, format):
    for dtype in dtypes(place):
        p = problem(mode, dtype, d, format, scale, options).to(place.device)
        rounded = dataclasses.replace(p, stored=p.stored._replace(format=f"{format}_int8"))
        scores, argmax = rounded.forward(normalize=normalize, argmax_dtype=torch.int32 if winners else None)
        assert_right(rounded, scores, argmax if winners else None, normalize)
        if d <= 256:  # less accurate than two terms
            exact, two_terms = p.to("cpu").forward(portable, normalize)[0], p.forward(normalize=normalize)[0]
            off = [(x.cpu() - exact).nan_to_num(0, 0, 0).double().norm() for x in (scores, two_terms)]
            assert off[0] > 20 * off[1]


@pytest.mark.parametrize(
    ("mode", "d", "scale", "options"), [("cross", 128, "token", False), ("pairs", 20, "tensor", True)]
)
def test_binary_documents_with_two_term_queries(place, mode, d, scale, options):
    for dtype in dtypes(place):
        p = problem(mode, dtype, d, "binary", scale, options).to(place.device)
        scores, argmax = p.forward()
        assert_right(p, scores, argmax, False)
        assert_near_portable(p, scores, False)


@pytest.mark.parametrize(
    ("mode", "d", "scale"),
    [("cross", 128, "token"), ("candidates", 96, "tensor"), ("pairs", 20, "token"), ("cross", 300, "token")],
)
def test_binary_queries_score_like_sign_queries(place, mode, d, scale, monkeypatch):
    """Their products are exact if whole rows are multiplied, too."""
    monkeypatch.setitem(FORMATS, "binary", FORMATS["binary"]._replace(kernel="bits1"))
    for dtype in dtypes(place):
        p = problem(mode, dtype, d, "binary", scale, options=True)
        p.r.Q[0, :3] = 0
        Q = torch.where(p.r.Q.isnan(), p.r.Q, torch.where(p.r.Q > 0, 1, -1).to(dtype))
        signs = dataclasses.replace(p, r=p.r._replace(Q=Q)).to(place.device)
        p.stored = p.stored._replace(format=BINARY_QUERIES)
        for found, expected in zip(p.to(place.device).forward(), signs.forward(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(
            p.forward(portable)[0], signs.to("cpu").forward(portable)[0], rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize(
    ("mode", "d", "scale", "options", "normalize"),
    [
        ("cross", 128, "token", False, False),
        ("candidates", 96, "tensor", True, False),
        ("pairs", 100, "token", True, True),
        ("cross", 300, "token", False, False),
    ],
)
def test_fp8_queries_are_within_rounding_error(place, mode, d, scale, options, normalize):
    for dtype in dtypes(place):
        p = problem(mode, dtype, d, "fp8_e4m3", scale, options)
        p.r.Q[0] *= 1e-3
        p.r.Q[1, :5] *= 2.0**-14  # below the normal numbers of FP8
        p = p.to(place.device)
        rounded = dataclasses.replace(p, stored=p.stored._replace(format=FP8_QUERIES))
        scores, argmax = rounded.forward(normalize=normalize)
        assert_right(rounded, scores, argmax, normalize)
        if dtype == torch.float32 or d > 128:  # not rounded
            torch.testing.assert_close(scores, p.forward(normalize=normalize)[0], rtol=0, atol=0, equal_nan=True)
        else:
            with pytest.raises(AssertionError):
                assert_right(p, scores, None, normalize)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 6e4, 6e-8])
def test_special_values_in_fp8_queries_do_not_affect_others(place, value):
    p = problem("cross", torch.float16, 96, "fp8_e4m3", queries=(1, 1), documents=(5, 9))
    plain = dataclasses.replace(p, stored=p.stored._replace(format=FP8_QUERIES)).to(place.device).forward()[0]
    p.r.Q[0] = 0
    p.r.Q[0, 3] = value
    p = p.to(place.device)
    rounded = dataclasses.replace(p, stored=p.stored._replace(format=FP8_QUERIES))
    scores, argmax = rounded.forward()
    assert torch.equal(scores[1], plain[1])
    if abs(value) < float("inf"):  # powers of two and their neighbors are exact in FP8
        assert_right(rounded, scores, argmax, False)
    else:
        assert scores[0].isnan().all()


def test_accuracy_check_detects_wrong_scale(place):
    p = problem("cross", torch.float16, 96, "int8", queries=(3,), documents=(5,)).to(place.device)
    scores, argmax = p.forward()
    assert_right(p, scores, argmax, False)
    with pytest.raises(AssertionError):
        assert_right(p, scores * (1 + 1e-3), argmax, False)
    one_term = p.r.Q / 127 / p.r.Q.abs().amax(1, keepdim=True)
    coarse = dataclasses.replace(
        p, r=p.r._replace(Q=p.r.Q + 0.5 * one_term.sign() * p.r.Q.abs().amax(1)[:, None] / 127)
    )
    with pytest.raises(AssertionError):
        assert_right(p, coarse.forward()[0], argmax, False)


def test_int8_terms_are_used_up_to_256_features(place):
    arch, shared = backend.architecture(torch.device(place.device)), {"tf32": False, "argmax": False}
    for d, terms in ((1, 2), (20, 2), (256, 2), (257, 0)):
        one = min(terms, 1)
        by_encoding = {
            "int8": terms,
            INT8_QUERIES: one,
            "bits1_half": terms,
            "bits1_int8": one,
            "number": 0,
            "bits1": 0,
        }
        for stored, expected in by_encoding.items():
            for candidates, dtype in itertools.product((False, True), (torch.float16, torch.float32)):
                kind = KernelKey(arch, dtype, d, candidates, False, 0)
                launch, _ = forward_configs.configure_packed_forward(kind, 3, 32, stored=stored, **shared)
                found = launch.config.INT8_TERMS, launch.config.SINGLE_STEP
                assert found == (expected, bool(expected) or d <= launch.config.BD)
                least = 32 if expected else 16  # features of one instruction
                assert least <= launch.config.BD


def test_sums_of_the_largest_integers_fit(place):
    p = problem("cross", torch.float32, 256, "int8", "tensor", queries=(2,), documents=(3,)).to(place.device)
    p.r.Q.fill_(0.3)[1] *= -1
    for number in (-128, 127):
        p.stored.data.fill_(number)
        scores, _ = p.forward(argmax_dtype=None)
        assert_right(p, scores, None, False)


ODD = (0.0, float("nan"), float("inf"), -float("inf"), 1e35, 1e-35, -3e30, 9e-31, 5e36)


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "binary", BINARY_INT8_QUERIES])
def test_queries_that_terms_cannot_represent(place, format):
    """Each row is a separate query, next to ordinary rows whose bits must not change."""
    d, rows = 20, 3 + len(ODD)
    p = problem("cross", torch.float32, d, format.removesuffix("_int8"), queries=(1,) * rows, documents=(5, 0, 9))
    p.stored = p.stored._replace(format=format)
    plain = p.to(place.device).forward()[0]
    for n, value in enumerate(ODD):
        row = p.r.Q[n]
        if value == 0:
            row.zero_()
        elif 0 < abs(value) < 1e-20 or value == 5e36:
            row.mul_(value)
        else:
            row[n] = value
    by_terms = format in ("int8", BINARY_INT8_QUERIES)
    if not by_terms:  # codes times such features overflow before they are scaled
        p.r.Q[[4, 8]] /= 1e5
    scores, argmax = p.to(place.device).forward()
    assert torch.equal(scores[len(ODD) :], plain[len(ODD) :])
    expected, winners = p.forward(portable)
    # An infinity times zeros is NaN in either.
    assert torch.equal(scores.cpu().isnan(), expected.isnan())
    # One term holds the row of 9e-31 and the ordinary rows, less accurately than the portable scores.
    near = [n for n in range(rows) if format != BINARY_INT8_QUERIES or ODD[n : n + 1] not in ((), (9e-31,))]
    torch.testing.assert_close(scores.cpu()[near], expected[near], rtol=1e-4, atol=1e-37, equal_nan=True)
    for j, n in ((0, 5), (2, 9)) if by_terms else ():
        held = torch.isin(torch.arange(rows), torch.tensor(near))
        finite = expected[:, j].isfinite() & held & (torch.arange(rows) < len(ODD)) & (expected[:, j].abs() > 1e-37)
        assert torch.equal(argmax.cpu()[j, finite], winners[j, finite]) and (argmax[j] < n).all()
        assert torch.equal(argmax.cpu()[j, 1:4], winners[j, 1:4])
    assert (argmax[1] == -1).all()


def test_half_precision_queries_with_nan_inf_and_large_values(place):
    for dtype in dtypes(place)[-2:]:
        p = problem("cross", dtype, 96, "int8", options=True, queries=(1, 1, 1, 1), documents=(5, 9))
        for n, value in enumerate((float("nan"), float("inf"), -float("inf"), 6e4)):
            p.r.q_mask[n], p.r.Q[n] = True, torch.randn(96).to(dtype)
            p.r.Q[n, 7] = value
        scores, _ = p.to(place.device).forward()
        torch.testing.assert_close(scores.cpu(), p.forward(portable)[0], rtol=1e-4, atol=1e-3, equal_nan=True)


@every_format_and_codes
def test_bits_do_not_depend_on_batch(place, format):
    dtype = torch.float16
    for d, normalize in ((96, False), (300, True)) if format == "uint8" or not INTERPRETING else ((96, True),):
        p = problem("cross", dtype, d, format, options=True).to(place.device)
        whole, argmax = p.forward(normalize=normalize)
        cu, last = p.r.cu_seqlens_q, len(QUERIES) - 1
        one = p.r._replace(cu_seqlens_q=cu[-2:])
        chosen = torch.tensor([2, 0], device=cu.device)
        few = one._replace(d_offsets=p.r.d_offsets[chosen], d_lengths=p.r.d_lengths[chosen])
        assert torch.equal(dataclasses.replace(p, r=one).forward(normalize=normalize)[0][0], whole[last])
        scores, winners = dataclasses.replace(p, r=few).forward(normalize=normalize)
        assert torch.equal(scores[0], whole[last, chosen])
        assert torch.equal(winners[:, cu[-2] :], argmax[chosen][:, cu[-2] :])
        pairs = torch.tensor([[last, 2], [0, 0]], device=cu.device)
        listed, _ = dataclasses.replace(p, r=p.r._replace(pairs=pairs)).forward(normalize=normalize, argmax_dtype=None)
        assert torch.equal(listed, whole[pairs[:, 0], pairs[:, 1]])


@every_format_and_codes
@pytest.mark.skipif(INTERPRETING, reason="the interpreter has no tiles for short documents")
def test_tile_for_mean_document_length_gives_same_bits(place, format):
    """A call with one document has a tile for its tokens. A call with all documents has a tile for their mean."""
    documents = 1, 20, 40, 300
    for d, normalize, options in ((96, True, True), (128, False, False), (192, False, True), (320, False, False)):
        p = problem("cross", torch.float16, d, format, options=options, queries=(70, 3, 40), documents=documents)
        p = p.to(place.device)
        whole, argmax = p.forward(normalize=normalize)
        assert_right(p.to("cpu"), whole.cpu(), argmax.cpu(), normalize)
        for j, length in enumerate(documents):
            begin = int(p.r.d_offsets[j]) - 2
            tokens = slice(begin, begin + length + 4)
            per_token = {x: select_rows(getattr(p.stored, x), tokens) for x in ("data", "scale", "minimum", "codes")}
            d_mask = None if p.r.d_mask is None else p.r.d_mask[tokens]
            r = p.r._replace(D=p.r.D[tokens], d_offsets=p.r.d_offsets[:1], d_lengths=p.r.d_lengths[j : j + 1])
            one = Problem(r._replace(d_mask=d_mask), p.stored._replace(**per_token), [])
            scores, winners = one.forward(normalize=normalize)
            assert torch.equal(scores[:, 0], whole[:, j]) and torch.equal(winners[0], argmax[j])
            plain, _ = one.forward(normalize=normalize, argmax_dtype=None)
            assert torch.equal(plain, scores)


SHORT = {
    "scales of documents": ("int8", "document", {}),
    "normalized": ("uint8", "token", {"normalize": True}),
    "masks": ("int8", "document", {"normalize": True, "d_mask": True}),
    "one scale": ("fp8_e4m3", "tensor", {"q_mask": True}),
    "weights": ("binary", "token", {"q_weight": True}),
    "codes": ("residual2", "token", {}),
    "codes with masks": ("residual4", "token", {"normalize": True, "d_mask": True}),
}


@pytest.mark.parametrize("name", SHORT)
def test_fast_path_scores_match_operator(place, name, monkeypatch):
    """Dense documents are passed without expanding their scales to one per token. Packed documents also work."""
    format, scale, options = SHORT[name]
    Q, D = torch.randn(2, 3, 16, device=place.device), torch.randn(3, 5, 16, device=place.device)
    made = {
        "q_mask": torch.rand(2, 3, device=place.device) > 0.3,
        "d_mask": torch.rand(3, 5, device=place.device) > 0.2,
        "q_weight": torch.rand(2, 3, device=place.device),
    }
    given = {key: made.get(key, value) for key, value in options.items()}
    packed, cu = lik_ops.pack(list(D))
    documents, ragged = quantize(D, format, scale), quantize(packed, format, cu_seqlens_d=cu)
    seen, real = [], eager.try_maxsim_quantized
    eager.clear_call_caches()  # another test may have made a call with an equal key
    monkeypatch.setattr(eager, "try_maxsim_quantized", lambda *x, **y: seen.append(real(*x, **y)) or seen[-1])
    with lik_ops.use_backend("triton"):
        short = [lik_ops.maxsim(Q, documents, **given), lik_ops.maxsim_varlen(Q, ragged, None, cu)]
        again = [lik_ops.maxsim(Q, documents, **given), lik_ops.maxsim_varlen(Q, ragged, None, cu)]
        assert len(seen) == 2 and None not in seen
        for name in ("try_maxsim_quantized", "repeat_maxsim_quantized"):
            monkeypatch.setattr(eager, name, lambda *x, **y: None)
        long = [lik_ops.maxsim(Q, documents, **given), lik_ops.maxsim_varlen(Q, ragged, None, cu)]
    for a, b, c in zip(short, again, long, strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)


@every_format
@pytest.mark.skipif(INTERPRETING, reason="more than 2^31 numbers")
def test_documents_beyond_int32_elements(place, format):
    kept, d, Ld = FORMATS[format], 128, 16
    width = d // kept.features_per_element
    count = (2**31 // width + 2**20) // Ld
    last = torch.randn(2, Ld, d)
    made = quantize(last, format)
    data = torch.zeros(count, Ld, width, dtype=kept.bytes, device=place.device)
    data[-2:] = made.data.view(kept.bytes)
    scale, minimum = (None if x is None else torch.ones(count, Ld, dtype=x.dtype) for x in (made.scale, made.minimum))
    for x, own in ((scale, made.scale), (minimum, made.minimum)):
        if x is not None:
            x[-2:] = own
    scale, minimum = (None if x is None else x.to(place.device) for x in (scale, minimum))
    D = Quantized(data.view(kept.dtype), scale, format, d, torch.float16, minimum)
    Q = torch.randn(2, 5, d, dtype=torch.float16, device=place.device)
    for normalize in (False, True):
        scores, argmax = lik_ops.maxsim_with_argmax(Q, D, normalize=normalize)
        few = lik_ops.maxsim_with_argmax(Q, made.to(place.device), normalize=normalize)
        assert torch.equal(scores[:, -2:], few[0])
        assert torch.equal(argmax[:, -2:], few[1])


@pytest.mark.skipif(INTERPRETING, reason="more than 2^31 features")
def test_queries_beyond_int32_elements(place):
    """The kernel reads two terms of each feature. The second terms follow the first terms of all rows."""
    Q = torch.zeros(2**19 + 64, 32, 128, dtype=torch.float16, device=place.device)
    Q[-2:] = torch.randn(2, 32, 128)
    D = quantize(torch.randn(3, 64, 128, device=place.device), "int8")
    scores, argmax = lik_ops.maxsim_with_argmax(Q, D)
    expected = lik_ops.maxsim_with_argmax(Q[-2:], D)
    assert torch.equal(scores[-2:], expected[0]) and torch.equal(argmax[-2:], expected[1])


@every_format
def test_argmax_is_the_first_of_equal_tokens(place, format):
    """Tokens repeat, and codes are small integers whose similarities are exact, up to the int8 terms of queries."""
    for dtype in dtypes(place)[:1] if INTERPRETING else dtypes(place):
        p = problem("cross", dtype, 20, format, "tensor", queries=(3, 5), documents=(5, 20, 7))
        data = torch.randint(0, 3, p.stored.data.shape)
        if format.startswith("fp8"):
            stored = data.to(FORMATS[format].dtype).view(torch.uint8)
        else:
            stored = data.to(p.stored.data.dtype)
        minimum = None if p.stored.minimum is None else torch.tensor([-1.0])
        p.stored = EncodedTokens(stored, torch.tensor([0.5]), minimum, format)
        p.r = p.r._replace(Q=torch.randint(-2, 3, p.r.Q.shape).to(dtype))
        tokens = p.tokens()
        p = p.to(place.device)
        scores, argmax = p.forward()
        for i, j, at in p.meetings:
            rows, part = p.part(i, j)
            S = p.r.Q[rows].cpu().double() @ tokens[part].T
            assert torch.equal(p.winners(argmax, i, at).cpu().long(), S.argmax(1)), (i, j)
            exact = S.amax(1).sum().item()
            # Features of rotated queries are no multiples of the largest one. They are at most the norm, 2 * 20^.5.
            rotated = TERMS * 2 * 20**0.5 * (20 * 0.5) * len(S)
            largest = 2 ** (8 // FORMATS[format].features_per_element) - 1
            allowed = {"int8": 1e-6 * abs(exact)} | {f"rq{n}": rotated * largest for n in (1, 2, 4)}
            assert abs(scores[at].item() - exact) <= allowed.get(format, 0)


@pytest.mark.parametrize("format", ["int8", "uint8", "fp8_e5m2"])
def test_unaligned_and_strided_data(place, format):
    """No descriptor can read the data: its rows are odd, or it begins between multiples of 16 bytes."""
    for d in (33, 96):
        p = problem("cross", torch.float16, d, format, queries=(3,), documents=(5, 0, 9)).to(place.device)
        expected = p.forward()
        data = p.stored.data
        memory = torch.full((data.numel() + 1,), 127, dtype=data.dtype, device=data.device)
        moved = memory[1:].view(data.shape).copy_(data)
        assert moved.data_ptr() % 16
        wide = data.repeat_interleave(2, 1)[:, ::2]
        for other in (moved, wide):
            found = dataclasses.replace(p, stored=p.stored._replace(data=other)).forward()
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b)


def test_alternating_calls_with_different_scale_layouts(place):
    """Scales are per token or shared, begin anywhere, or have gaps, for formats whose data look alike."""
    p = {f: problem("cross", torch.float16, 96, f, queries=(3,), documents=(5, 9)) for f in ALL_FORMATS}
    calls = []
    for (format, x), kind in itertools.product(p.items(), ("each", "one", "moved", "apart", "both moved")):
        s = x.stored
        per_token = [s.scale, s.minimum]
        if kind == "one":
            per_token = [None if y is None else y.nanmean().view(1) for y in per_token]
        moved = [None if y is None else torch.cat([y.new_full((1,), 7), y]) for y in per_token]
        apart = [None if y is None else torch.stack([y, y + 7], 1) for y in per_token]
        stored = s._replace(scale=per_token[0], minimum=per_token[1])
        y = dataclasses.replace(x, stored=stored).to(place.device)
        if kind.endswith("moved"):
            y.stored = y.stored._replace(scale=moved[0].to(place.device)[1:])
        if kind == "both moved" and s.minimum is not None:
            y.stored = y.stored._replace(minimum=moved[1].to(place.device)[1:])
        if kind == "apart":
            a, b = (None if t is None else t.to(place.device)[:, 0] for t in apart)
            y.stored = y.stored._replace(scale=a, minimum=b)
        calls.append((format, kind, y, dataclasses.replace(x, stored=stored).forward(portable)[0]))
    for _ in range(1 if INTERPRETING else 3):  # from the second on without Triton's launcher
        for format, kind, y, expected in calls:
            found, _ = y.forward(argmax_dtype=None)
            within = 1e-3
            if ALL_FORMATS[format].rotated:  # the rotated queries are rounded to fp16
                of_row, of_token = (x.double().nan_to_num(0).norm(dim=1).max() for x in (y.r.Q.cpu(), y.tokens().cpu()))
                within += len(y.r.Q) * 2.0**-11 * float(of_row * of_token)
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=within, msg=f"{format} {kind}")


def test_plan_keys_distinguish_formats_and_dtypes(place):
    """The key of a plan holds everything that determines the compiled kernel."""
    plans.clear()

    def keys():
        return [key for key in plans if key[0] == "PackedPlan"]

    for format in ALL_FORMATS:
        problem("cross", torch.float16, 96, format, queries=(3,), documents=(5,)).to(place.device).forward()
    assert len(keys()) == len(ALL_FORMATS)
    assert len({(key[2][0], key[-2], key[-1]) for key in keys()}) == len(ALL_FORMATS)
    p = problem("cross", torch.float16, 96, "residual2", queries=(3,), documents=(5,))
    for codes, centroids in itertools.product((torch.int32, torch.int64), (torch.float16, torch.float32)):
        coded = p.stored._replace(codes=p.stored.codes.to(codes), centroids=p.stored.centroids.to(centroids))
        dataclasses.replace(p, stored=coded).to(place.device).forward()
    assert len(keys()) == len(ALL_FORMATS) + 3  # one of these existed


@every_format_and_codes
def test_nothing_to_score(place, format):
    p = problem("cross", torch.float16, 20, format, queries=(3,), documents=(5,)).to(place.device)
    r, s = p.r, p.stored
    for other in (
        r._replace(d_offsets=r.d_offsets[:0], d_lengths=r.d_lengths[:0]),
        r._replace(cu_seqlens_q=r.cu_seqlens_q[:1]),
    ):
        assert dataclasses.replace(p, r=other).forward(normalize=True)[0].numel() == 0
    no_rows = r._replace(Q=r.Q[:0], cu_seqlens_q=r.cu_seqlens_q * 0)
    assert (dataclasses.replace(p, r=no_rows).forward()[0] == 0).all()
    each = {name: getattr(s, name) for name in ("data", "scale", "minimum", "codes")}
    none = s._replace(**{name: x if x is None else x[:0] for name, x in each.items()})
    no_tokens = r._replace(D=r.D[:0], d_offsets=r.d_offsets * 0, d_lengths=r.d_lengths * 0)
    for normalize in (False, True):
        assert (Problem(no_tokens, none, []).forward(normalize=normalize)[0] == -torch.inf).all()


def test_out_of_range_documents_score_nan(place):
    for format in FORMATS:
        p = problem("cross", torch.float16, 20, format, queries=(3,), documents=(5, 7, 9)).to(place.device)
        scores, argmax = p.forward()
        offsets, lengths = p.r.d_offsets.clone(), p.r.d_lengths.clone()
        lengths[0], offsets[1] = 10**6, -1
        bad = p.r._replace(d_offsets=offsets, d_lengths=lengths)
        found, winners = dataclasses.replace(p, r=bad).forward(normalize=False)
        assert found[0, :2].isnan().all() and found[0, 2] == scores[0, 2]
        assert (winners[:2] == -1).all() and torch.equal(winners[2], argmax[2])


@pytest.mark.parametrize(
    ("format", "query", "step"), [("int8", "half", TERMS), ("int8", "int8", ONE_TERM), ("binary", "int8", ONE_TERM)]
)
def test_two_stage_interval_covers_term_rounding_error(place, format, query, step):
    """All features of the query but one are nearly half a step, and both formats represent the documents exactly."""
    Q, D = torch.full((1, 1, 128), 0.49 * 2 * step), torch.ones(2, 3, 128)
    Q[0, 0, 5] = 1
    made = lik_ops.quantize(D.to(place.device), format, query=query)
    assert not made.error.any()
    s = SearchArgs(Q.to(place.device), D.to(place.device), None, None, None, None, False, 1, None)
    with place.use():
        rough = two_stage._compute_intervals(s, made, two_stage._score_coarse(s, made, 0, 2))
    full = Q.double().sum()
    assert ((rough.lower <= full) & (full <= rough.upper)).all()
    assert ((rough.scores.double() - full).abs() > 120 * step).all()  # else this shows nothing


@every_format
def test_public_maxsim_matches_cpu_scores(place, format):
    Q, D = torch.randn(2, 3, 20), torch.randn(3, 5, 20)
    made = quantize(D, format)
    expected = lik_ops.maxsim(Q, made)
    with place.use():
        found = lik_ops.maxsim(Q.to(place.device), made.to(place.device))
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=2e-3)
    one = Quantized(
        made.data,
        made.scale[:1, :1],
        format,
        20,
        torch.float32,
        minimum=None if made.minimum is None else made.minimum[:1, :1],
    )
    with place.use():
        found = lik_ops.maxsim(Q.to(place.device), one.to(place.device))
    torch.testing.assert_close(found.cpu(), lik_ops.maxsim(Q, one), rtol=0, atol=2e-3)
