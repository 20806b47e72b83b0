"""Test that `retrieve` with ``coarse=`` returns the bits of the full search for all documents and formats."""

import dataclasses
import itertools

import pytest
import torch

import lik_ops
from lik_ops import Corpus, quantize
from lik_ops.formats.table import FORMATS
from lik_ops.ops.topk import SearchArgs
from lik_ops.retrieval import two_stage

from ..formats.test_quantized import DEVICES, tokens
from ..support.common import override_setting

SCALES = ("token", "document", "tensor")


def same(found, expected):
    return torch.equal(found[1], expected[1]) and torch.equal(found[0].nan_to_num(7), expected[0].nan_to_num(7))


def draw(trial, device="cpu"):
    """Return documents, queries, and options. Some trials have near ties, NaN, empty documents, or large numbers."""
    torch.manual_seed(trial)
    Nd, Ld, Nq, Lq, d = (int(torch.randint(1, n, ())) for n in (120, 9, 4, 6, 24))
    D, Q = tokens(Nd, Ld, d), torch.randn(Nq, Lq, d)
    options = {}
    if trial % 2:
        options["d_mask"] = torch.rand(Nd, Ld) > 0.3
        options["q_mask"], options["q_weight"] = torch.rand(Nq, Lq) > 0.3, torch.randn(Nq, Lq)
    if trial % 3 == 0:
        D = D[:1] + 1e-5 * torch.randn(Nd, Ld, d)
    if trial % 5 == 0:
        D[Nd // 2] = D[0]
    if trial % 7 == 0:
        D[-1, 0, 0] = (torch.nan, torch.inf)[trial % 2]
    if trial % 11 == 0:
        D *= 10.0 ** torch.randint(-25, 18, (Nd, 1, 1))
    move = {name: x.to(device) for name, x in options.items()}
    return Q.to(device), D.to(device), int(torch.randint(0, Nd + 3, ())), move


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", range(10))
def test_random_coarse_searches_match_full_search(part, device):
    rescored = documents = 0
    for trial in range(100 * part, 100 * part + 100):
        Q, D, k, options = draw(trial, device)
        coarse = quantize(D, list(FORMATS)[trial % len(FORMATS)], SCALES[trial % 3], d_mask=options.get("d_mask"))
        expected = lik_ops.retrieve(Q, D, k, **options)
        found = lik_ops.retrieve(Q, D, k, coarse=coarse, **options)
        assert same(found, expected), trial
        assert (found.proven == expected[1].shape[1]).all() and (found.rescored >= found.proven).all()
        rescored, documents = rescored + int(found.rescored.sum()), documents + len(Q) * len(D)
    assert rescored < 0.95 * documents  # of documents this hard


REGIONS = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("region", [None, *REGIONS])
def test_full_scores_are_inside_their_intervals(region):
    for trial in range(200):
        Q, D, _, options = draw(trial)
        Q = Q.to(region or D.dtype)
        mask = options.pop("d_mask", None)
        coarse = quantize(D, list(FORMATS)[trial % len(FORMATS)], SCALES[trial % 3], d_mask=mask)
        s = SearchArgs(Q, D, options.get("q_mask"), mask, None, options.get("q_weight"), False, 1, None)
        rough = two_stage._compute_intervals(s, coarse, two_stage._score_coarse(s, coarse, 0, len(D)))
        full = lik_ops.maxsim(Q, D.to(Q.dtype), d_mask=mask, **options).double()
        inside = (rough.lower <= full) & (full <= rough.upper)
        assert (inside | full.isnan()).all(), trial
        assert (rough.upper[full.isnan()] == torch.inf).all(), trial


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, *REGIONS])
@pytest.mark.parametrize("region", REGIONS)
def test_random_coarse_searches_under_autocast_match_full_search(region, dtype, device):
    """Autocast rounds documents or overflows them to infinity, and the quantized copy has the original documents."""
    rescored = documents = 0
    for trial in range(100):
        Q, D, k, options = draw(trial, device)
        D = D.to(dtype)
        with torch.autocast(device, region):
            coarse = quantize(D, list(FORMATS)[trial % len(FORMATS)], SCALES[trial % 3], d_mask=options.get("d_mask"))
            expected = lik_ops.retrieve(Q, D, k, **options)
            found = lik_ops.retrieve(Q, D, k, coarse=coarse, **options)
            few = lik_ops.retrieve(Q, D, k, coarse=coarse, n_candidates=5, **options)
        assert same(found, expected), trial
        for mine, best, proven in zip(few.indices.tolist(), expected[1].tolist(), few.proven.tolist(), strict=True):
            assert len(set(mine) & set(best)) >= proven, trial
        rescored, documents = rescored + int(found.rescored.sum()), documents + len(Q) * len(D)
    assert rescored < 0.95 * documents


@pytest.mark.parametrize("region", REGIONS)
def test_coarse_search_is_exact_when_autocast_reorders_documents(region):
    """int8 represents the documents exactly, and their order changes in the autocast dtype."""
    numbers = torch.randint(-127, 128, (1, 1, 4)).index_fill(2, torch.tensor(0), 127)
    D, Q = (1 + torch.finfo(region).eps * torch.rand(300, 1, 1)) * numbers, torch.randn(20, 1, 4)
    coarse = quantize(D)
    assert not torch.equal(lik_ops.retrieve(Q, D, 9)[1], lik_ops.retrieve(Q.to(region), D.to(region), 9)[1])
    with torch.autocast("cpu", region):
        found = lik_ops.retrieve(Q, D, 9, coarse=coarse)
    assert same(found, lik_ops.retrieve(Q.to(region), D.to(region), 9))


@pytest.mark.parametrize("scale", SCALES)
def test_uint8_operand_norm_bound_includes_codes_and_minima(scale):
    """With "uint8", products with codes and with minima are each larger than products with tokens."""
    D, cu_seqlens = tokens(24, 12), torch.tensor([0, 6, 6, 24])
    packed, dense = quantize(D, "uint8", scale, cu_seqlens_d=cu_seqlens), quantize(D.view(4, 6, 12), "uint8", scale)
    s = SearchArgs(tokens(1, 2, 12), D, None, None, None, None, False, 1, None)
    for made, bounds in ((packed, cu_seqlens), (dense, torch.arange(0, 25, 6))):
        each, least = (x.expand(24) for x in made.per_token())
        found = two_stage._bound_operand_norms(s._replace(cu_seqlens_d=None if made is dense else bounds), made)
        largest = 12**0.5 * (255 * each + least.abs()).double()
        for n, (a, b) in enumerate(itertools.pairwise(bounds)):
            part = largest[a:b]
            if len(part):
                torch.testing.assert_close(found.expand(len(bounds) - 1)[n], part.max(), rtol=1e-6, atol=0)
    assert two_stage._bound_operand_norms(s, quantize(D)) is None


@pytest.mark.parametrize("backend", ["cuda", "mkldnn"])
def test_tf32_matmul_widens_the_intervals(backend):
    """The setting of torch for all backends may no longer be readable."""
    Q, D, _, _ = draw(1)
    s, coarse = SearchArgs(Q, D, None, None, None, None, False, 1, None), quantize(D)
    scores = two_stage._score_coarse(s, coarse, 0, len(D))
    exact = two_stage._compute_intervals(s, coarse, scores)
    with override_setting(getattr(torch.backends, backend).matmul, "fp32_precision", "tf32"):
        rough = two_stage._compute_intervals(s, coarse, scores)
    assert (rough.upper > exact.upper).all() and (rough.lower < exact.lower).all()


def test_too_small_error_bound_gives_wrong_results():
    """The draws are sensitive: with a hundredth of the error bound, some results would be wrong."""
    wrong = 0
    for trial in range(100):
        Q, D, k, options = draw(trial)
        coarse = quantize(D, "binary", d_mask=options.get("d_mask"))
        coarse = dataclasses.replace(coarse, error=coarse.error / 100)
        wrong += not same(lik_ops.retrieve(Q, D, k, coarse=coarse, **options), lik_ops.retrieve(Q, D, k, **options))
    assert wrong > 3


def test_int8_coarse_search_rescores_few_documents():
    topics = tokens(200, 1, 64)
    D = torch.nn.functional.normalize(topics + 0.05 * torch.randn(200, 20, 64), dim=-1)
    Q = torch.nn.functional.normalize(topics[:4] + 0.05 * torch.randn(4, 8, 64), dim=-1)
    found = lik_ops.retrieve(Q, D, 1, coarse=quantize(D))
    assert (found.rescored <= 5).all() and found.indices[:, 0].tolist() == [0, 1, 2, 3]


def test_coarse_search_of_packed_documents_and_corpus_is_exact(tmp_path):
    pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")
    lengths = [3, 0, 7, 1, 5, 2, 4, 6] * 5
    documents = [tokens(n, 16) for n in lengths]
    packed, cu_seqlens = torch.cat(documents), torch.tensor([0, *lengths]).cumsum(0)
    Q, w = torch.randn(3, 5, 16), torch.rand(3, 5)
    coarse = quantize(packed, cu_seqlens_d=cu_seqlens)
    corpus = Corpus.create(tmp_path / "corpus", 16, torch.float32)
    corpus.append(documents)
    expected = lik_ops.retrieve(Q, packed, 6, cu_seqlens_d=cu_seqlens, q_weight=w)
    assert same(lik_ops.retrieve(Q, packed, 6, cu_seqlens_d=cu_seqlens, q_weight=w, coarse=coarse), expected)
    found = lik_ops.retrieve(Q, corpus, 6, q_weight=w, coarse=coarse)
    assert same(found, expected) and found.rescored.sum() < 3 * len(lengths)
    one = lik_ops.retrieve(Q[1], corpus, 6, q_weight=w[1], coarse=coarse)
    assert one.scores.shape == (6,) and one.rescored.shape == () and torch.equal(one.indices, expected[1][1])
    with torch.autocast("cpu", torch.bfloat16):
        for D, options in ((packed, {"cu_seqlens_d": cu_seqlens}), (corpus, {})):
            expected = lik_ops.retrieve(Q, D, 6, q_weight=w, **options)
            found = lik_ops.retrieve(Q, D, 6, q_weight=w, coarse=coarse, **options)
            assert same(found, expected) and found.rescored.sum() < 3 * len(lengths)
    none = lik_ops.retrieve(Q[:0], corpus, 6, coarse=coarse)
    assert none.scores.shape == none.indices.shape == (0, 6)
    expected = lik_ops.retrieve(Q, corpus, 6)
    corpus.cu_seqlens.sub_(3).clamp_(min=0)
    assert same(lik_ops.retrieve(Q, corpus, 6, coarse=coarse), expected), "what a caller wrote to is its own"


@pytest.mark.parametrize("scale", ["token", "document"])
def test_coarse_search_with_wrong_offsets_matches_full_search(scale):
    """Documents with wrong bounds are NaN and come first. Two documents share a large token."""
    packed, Q = tokens(16, 8), torch.randn(3, 5, 8)
    packed[4] *= 100
    right = torch.tensor([0, 3, 3, 10, 12, 16])
    coarse = quantize(packed, "uint8", scale, cu_seqlens_d=right)
    for wrong in ([0, 3, 3, 10, 20, 16], [0, 9, 3, 10, 8, 16], [0, 20, 3, 10, 12, 16], [-3, 3, 3, 10, 12, 30]):
        cu_seqlens = torch.tensor(wrong)
        for k in (1, 3, 5):
            expected = lik_ops.retrieve(Q, packed, k, cu_seqlens_d=cu_seqlens)
            assert expected[0].isnan().any()
            assert same(lik_ops.retrieve(Q, packed, k, cu_seqlens_d=cu_seqlens, coarse=coarse), expected)
    empty = torch.zeros(6).long()
    coarse = quantize(packed[:0], "uint8", scale, cu_seqlens_d=empty)
    assert lik_ops.retrieve(Q, packed[:0], 2, cu_seqlens_d=empty, coarse=coarse).indices.shape == (3, 2)


@pytest.mark.gpu
def test_gpu_coarse_search_of_host_documents_is_exact():
    D, Q = tokens(500, 20, 64), torch.randn(3, 8, 64, device="cuda")
    mask = torch.rand(500, 20) > 0.2
    coarse = quantize(D, d_mask=mask).to("cuda")
    expected = lik_ops.retrieve(Q, D, 10, d_mask=mask)
    found = lik_ops.retrieve(Q, D, 10, d_mask=mask, coarse=coarse)
    assert same(found, expected) and found.scores.is_cuda
    with torch.autocast("cuda", torch.bfloat16):
        expected = lik_ops.retrieve(Q, D, 10, d_mask=mask)
        assert same(lik_ops.retrieve(Q, D, 10, d_mask=mask, coarse=coarse), expected)


def test_n_candidates_fixes_rescored_and_proven_is_a_lower_bound():
    for trial in range(100):
        Q, D, k, options = draw(trial)
        coarse = quantize(D, list(FORMATS)[trial % len(FORMATS)], d_mask=options.get("d_mask"))
        expected = lik_ops.retrieve(Q, D, k, **options)[1]
        found = lik_ops.retrieve(Q, D, k, coarse=coarse, n_candidates=5, **options)
        assert (found.rescored == min(max(5, expected.shape[1]), len(D))).all()
        for mine, best, proven in zip(found.indices.tolist(), expected.tolist(), found.proven.tolist(), strict=True):
            assert len(set(mine) & set(best)) >= proven, trial
        everything = lik_ops.retrieve(Q, D, k, coarse=coarse, n_candidates=len(D), **options)
        assert torch.equal(everything.indices, expected) and (everything.proven == expected.shape[1]).all()


def test_possible_nan_of_other_documents_prevents_proof():
    """Documents 1 and 3 score NaN. Only one of them is scored in full, so the other might come first."""
    Q, D = torch.randn(1, 3, 8), tokens(5, 4, 8)
    D[[1, 3], 0, 0] = torch.nan
    found = lik_ops.retrieve(Q, D, 1, coarse=quantize(D), n_candidates=1)
    assert found.scores.isnan().all() and found.indices.tolist() == [[1]] and found.proven.tolist() == [0]
    assert lik_ops.retrieve(Q, D, 1, coarse=quantize(D), n_candidates=2).proven.tolist() == [1]


@pytest.mark.parametrize("n_candidates", [1, 2, 3, 4])
@pytest.mark.parametrize("infinite", [0, 1, 2, 3])
def test_proven_counts_exact_results_among_minus_infinity_scores(infinite, n_candidates):
    """Document `infinite` scores -inf because of its features, and the others because they keep no token."""
    Q, D = torch.ones(1, 2, 16), torch.ones(4, 3, 16)
    D[infinite, :, 0] = -torch.inf
    d_mask = torch.zeros(4, 3, dtype=torch.bool)
    d_mask[infinite] = True
    coarse = lik_ops.quantize(D, d_mask=d_mask)
    for k in (1, 2, 3):
        found = lik_ops.retrieve(Q, D, k, d_mask=d_mask, coarse=coarse, n_candidates=n_candidates)
        best = lik_ops.retrieve(Q, D, k, d_mask=d_mask)[1]
        assert found.scores.eq(-torch.inf).all()
        assert int(found.proven) == len(set(found.indices[0].tolist()) & set(best[0].tolist()))


@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("format", FORMATS)
def test_retrieve_of_quantized_documents_matches_maxsim(format, chunk):
    Q, D = torch.randn(3, 5, 16), tokens(40, 6, 16)
    made = quantize(D, format)
    scores = lik_ops.maxsim(Q, made)
    found = lik_ops.retrieve(Q, made, 7, chunk=chunk)
    assert torch.equal(found[0], scores.gather(1, found[1])) and torch.equal(found[0], scores.topk(7).values)
    flat = lik_ops.retrieve(Q[0], made, 7, chunk=chunk)
    assert torch.equal(flat[0], found[0][0]) and torch.equal(flat[1], found[1][0])
    cu_seqlens = torch.arange(0, 241, 6)
    packed = lik_ops.retrieve(Q, quantize(D.flatten(0, 1), format), 7, cu_seqlens_d=cu_seqlens, chunk=chunk)
    assert torch.equal(packed[0], found[0]) and torch.equal(packed[1], found[1])


def test_no_documents_or_zero_top_k_returns_empty_results():
    Q = torch.randn(2, 3, 8)
    for D, k in ((torch.empty(0, 5, 8), 3), (tokens(4, 5, 8), 0)):
        found = lik_ops.retrieve(Q, D, k, coarse=quantize(D))
        assert found.scores.shape == found.indices.shape == (2, 0)
        assert lik_ops.retrieve(Q, quantize(D), k)[0].shape == (2, 0)


@pytest.mark.parametrize("n_candidates", [None, 3])
def test_no_queries(n_candidates):
    Q, D, cu_seqlens = torch.empty(0, 3, 8), tokens(4, 5, 8), torch.arange(0, 21, 5)
    packed = D.flatten(0, 1)
    for k in (0, 2, 9):
        dense = lik_ops.retrieve(Q, D, k, coarse=quantize(D), n_candidates=n_candidates)
        coarse = quantize(packed, cu_seqlens_d=cu_seqlens)
        found = lik_ops.retrieve(Q, packed, k, cu_seqlens_d=cu_seqlens, coarse=coarse, n_candidates=n_candidates)
        for x in (dense, found):
            assert x.scores.shape == x.indices.shape == (0, min(k, 4))
            assert x.rescored.shape == x.proven.shape == (0,)


def _bad(**options):
    D = tokens(4, 5, 8)
    return lik_ops.retrieve(torch.randn(2, 3, 8), D, 2, **{"coarse": quantize(D), **options})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: _bad(coarse=3), TypeError, "retrieve: coarse: expected a Quantized, got int"),
        (
            lambda: _bad(coarse=None, n_candidates=3),
            ValueError,
            "retrieve: n_candidates: expected None unless coarse is given or D is residual codes, got 3",
        ),
        (lambda: _bad(n_candidates=0), ValueError, "retrieve: n_candidates: expected 1 or more, got 0"),
        (lambda: _bad(normalize=True), ValueError, "retrieve: normalize: expected False with coarse"),
        (lambda: _bad(largest=False), ValueError, "retrieve: largest: expected True with quantized documents"),
        (lambda: _bad(coarse=quantize(tokens(3, 5, 8))), ValueError, "coarse: expected 4 documents of d = 8 as in D"),
        (lambda: _bad(coarse=quantize(tokens(4, 5, 9))), ValueError, "coarse: expected 4 documents of d = 8 as in D"),
        (
            lambda: _bad(coarse=quantize(tokens(4, 5, 8), "binary", query="binary")),
            ValueError,
            "coarse: expected query 'half' or 'int8', because signs bound no score, got 'binary'",
        ),
        (
            lambda: _bad(coarse=dataclasses.replace(quantize(tokens(4, 5, 8)), error=None)),
            ValueError,
            "coarse: expected the errors of 4 documents",
        ),
        (
            lambda: lik_ops.retrieve(torch.randn(3, 8), [tokens(5, 8)], 1, coarse=quantize(tokens(1, 5, 8))),
            TypeError,
            "retrieve: D: expected a Tensor or a Corpus with coarse, got list",
        ),
    ],
)
def test_bad_input_names_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
