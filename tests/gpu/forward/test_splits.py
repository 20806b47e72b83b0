"""Test splits of few long documents bit for bit against kernels without splits, for any split positions."""

import dataclasses
import itertools
from dataclasses import replace

import pytest
import torch

import lik_ops
from lik_ops import info
from lik_ops.core.plan_cache import plans
from lik_ops.core.segments import PackedArgs
from lik_ops.formats.table import FORMATS, FP8_QUERIES, EncodedTokens
from lik_ops.ops.fast_path import eager

from ...support.common import CUDA, INTERPRETER, INTERPRETING, thin_out
from ...support.quantized import dtypes, problem
from ...support.ragged import same_bits

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.gpu import backend as gpu
from lik_ops.gpu import choose, generic_choices
from lik_ops.gpu.forward import packed as packed_forward
from lik_ops.gpu.forward.plans import DensePlan
from lik_ops.gpu.tuning import architectures

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
in_place = pytest.mark.parametrize("place", PLACES, ids=str)
NAN, INF = float("nan"), float("inf")
SCALES = ("token", "document", "tensor")
# Tokens of a document. A split has at least 32 tokens in the interpreter and 128 elsewhere.
LONG, LEAST = (150, 32) if INTERPRETING else (1500, 128)


@pytest.fixture
def cuts(monkeypatch):
    """Yield a list: element 0 says whether to split, and each call appends its choice."""
    found = []
    by_choice = generic_choices.choose_document_splits

    def sectioned(c, normalize, argmax, arch, *stored):
        choice = by_choice(c, normalize, argmax, replace(arch, processors=64), *stored) if found[0] else "not wanted"
        found.append(choice)
        return found[-1]

    monkeypatch.setattr(generic_choices, "choose_document_splits", sectioned)
    for name in ("LONG_DOCUMENT", "WIDE_DOCUMENT", "STEPPED_HALF", "STEPPED_FP32", "ENCODED_DOCUMENT", "SPLIT"):
        monkeypatch.setattr(generic_choices, f"_MIN_{name}_TOKENS", LEAST // 2)
    yield found
    eager.clear_call_caches()
    gpu.forget()


def run_with_and_without_splits(cuts, place, call):
    """Return the results of a call with splits and without."""
    results = []
    for wanted in (True, False):
        cuts[:] = [wanted]
        eager.clear_call_caches()
        gpu.forget()
        with place.use():
            results.append(call())
        assert len(cuts) > 1 and all(isinstance(choice, str) != wanted for choice in cuts[1:])
    return results


def assert_same(cuts, place, call):
    """Assert equal results with splits and without, and return them."""
    found, expected = run_with_and_without_splits(cuts, place, call)
    for x, y in zip(found, expected, strict=True):
        same_bits(x, y) if x.dtype.is_floating_point else torch.testing.assert_close(x, y, rtol=0, atol=0)
    return found


def draw(place, dtype, *shape, values="normal"):
    x = torch.randn(shape) if values == "normal" else torch.randint(-2, 3, shape)
    return x.to(place.device, dtype)


@in_place
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("Nq", "Nd", "Lq", "Ld", "d"),
    [(1, 1, 32, LONG, 16), (3, 2, 5, LONG - 7, 20), (1, 3, 70, LONG + 3, 16), (2, 1, 20, LONG, 144)],
)
def test_dense_documents(place, cuts, Nq, Nd, Lq, Ld, d, normalize, everything):
    for dtype in place.some_dtypes(Nq + Lq + normalize + everything):
        if dtype == torch.float64:
            continue
        values = "integer" if everything and not normalize else "normal"
        Q, D = draw(place, dtype, Nq, Lq, d, values=values), draw(place, dtype, Nd, Ld, d, values=values)
        masks, weight = (None, None), None
        if everything:
            masks = tuple((torch.rand(x.shape[:2]) > 0.3).to(place.device) for x in (Q, D))
            Q[~masks[0]], D[~masks[1]], weight = NAN, INF, torch.randn(Nq, Lq).to(place.device)
        options = {"q_weight": weight, "normalize": normalize}
        assert_same(
            cuts, place, lambda Q=Q, D=D, masks=masks, options=options: [lik_ops.maxsim(Q, D, *masks, **options)]
        )
        if everything:
            assert_same(
                cuts,
                place,
                lambda Q=Q, D=D, masks=masks, options=options: lik_ops.maxsim_with_argmax(Q, D, *masks, **options),
            )


def bounds(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0)


@in_place
@pytest.mark.parametrize(("normalize", "everything"), thin_out(itertools.product((False, True), repeat=2), 2))
def test_packed_documents(place, cuts, normalize, everything):
    """Documents have any length, some are empty, and some are not inside the tensor."""
    documents, queries = (LONG, 0, 3, 2 * LONG + 1, 64), (3, 0, 33)
    for dtype in place.some_dtypes(normalize + 2 * everything):
        if dtype == torch.float64:
            continue
        cu_q, cu_d = bounds(queries, place.device), bounds(documents, place.device)
        Q, D = draw(place, dtype, sum(queries), 16), draw(place, dtype, sum(documents), 16)
        q_mask = d_mask = weight = None
        if everything:
            q_mask, d_mask = ((torch.rand(len(x)) > 0.3).to(place.device) for x in (Q, D))
            Q[~q_mask], D[~d_mask], weight = NAN, INF, torch.randn(len(Q)).to(place.device)
            cu_d = torch.cat([cu_d, cu_d.new_tensor([cu_d[-1] + 1, 5, LONG, 2 * LONG])])  # outside, then before, again
        sizes = len(queries), len(cu_d) - 1, False, len(Q), len(D), max(queries)
        c = PackedArgs(Q, D, cu_q, cu_d, None, None, None, q_mask, d_mask, weight, *sizes)

        def forward(c=c, argmax_dtype=torch.int32):
            return packed_forward.PackedPlan(c, normalize, argmax_dtype, "").forward(c)

        scores, argmax = assert_same(cuts, place, forward)
        again, _ = run_with_and_without_splits(cuts, place, lambda: forward(argmax_dtype=None)[:1])
        same_bits(again[0], scores)
        assert scores[0, 1] == -INF and scores[1, 0] == 0 and (argmax[1] == -1).all()
        assert not everything or (scores[0, 5:7].isnan().all() and not scores[0, 7:].isnan().any())


ENCODED = [*FORMATS, FP8_QUERIES]
ENCODED_CASES = [(format, n % 2 == 0, (40, 144, 300)[n % 3]) for n, format in enumerate(ENCODED)]


@in_place
@pytest.mark.parametrize(("format", "everything", "d"), thin_out(ENCODED_CASES, 2))
def test_encoded_documents(place, cuts, format, everything, d):
    """Test packed documents of every format. Some query rows cannot be int8 terms."""
    name, lengths = format.removesuffix("_fp8"), (LONG, 0, 3, LONG + 33)
    for n, dtype in enumerate(dtypes(place)):
        p = problem("cross", dtype, d, name, SCALES[n % 3], everything, (3, 0, 18), lengths).to(place.device)
        p = dataclasses.replace(p, stored=p.stored._replace(format=format))
        p.r.Q[1, 0], p.r.Q[2, 3] = INF, NAN
        scores, argmax = assert_same(cuts, place, lambda p=p: p.forward(normalize=everything))
        again, _ = run_with_and_without_splits(
            cuts, place, lambda p=p: p.forward(normalize=everything, argmax_dtype=None)[:1]
        )
        same_bits(again[0], scores)
        assert (argmax[1] == -1).all()


@in_place
@pytest.mark.parametrize("query", ["half", "int8", "binary"])
def test_dense_binary_documents(place, cuts, query):
    """Test documents that are words of codes, also where a split begins in the middle of a tile."""
    Q, D = draw(place, torch.float16, 3, 20, 64), draw(place, torch.float16, 2, LONG - 7, 64)
    stored = lik_ops.quantize(D, "binary", query=query)
    assert_same(cuts, place, lambda: [lik_ops.maxsim(Q, stored)])
    assert_same(cuts, place, lambda: lik_ops.maxsim_with_argmax(Q, stored))


@in_place
def test_residual_codes_are_not_split(place, cuts):
    cuts.append(True)
    p = problem("cross", torch.float16, 32, "residual2", documents=(2 * LONG, 5)).to(place.device)
    p.forward()
    assert cuts == [True]


@in_place
def test_padded_documents(place, cuts):
    Q, D = draw(place, torch.float16, 2, 7, 16), draw(place, torch.float16, 2, 3, LONG, 16)[0]
    lengths = torch.tensor([LONG, 0, LONG // 3], device=place.device)
    sizes = 2, 3, False, 14, 3 * LONG, 7
    c = PackedArgs(Q, D, None, None, lengths, None, torch.tensor([7, 4], device=place.device), None, None, None, *sizes)
    scores, argmax = assert_same(cuts, place, lambda: packed_forward.PackedPlan(c, False, torch.int32, "").forward(c))
    assert (scores[:, 1] == -INF).all() and (argmax.view(3, 2, 7)[:, 1, 4:] == -1).all()


@in_place
def test_argmax_is_the_first_of_equal_tokens_across_splits(place, cuts):
    Q, D = draw(place, torch.float16, 1, 8, 16), torch.zeros(1, LONG, 16, dtype=torch.float16, device=place.device)
    Q[0] = 1
    D[0, torch.tensor([5, LEAST - 1, LEAST, LEAST + 1, LONG - 1])] = 1
    for first in (5, LEAST - 1, LEAST, LEAST + 1, LONG - 1):
        _, argmax = assert_same(cuts, place, lambda: lik_ops.maxsim_with_argmax(Q, D))
        assert (argmax == first).all()
        D[0, first] = 0


@in_place
def test_nan_in_any_split_is_the_score_and_the_argmax(place, cuts):
    Q, D = draw(place, torch.float16, 1, 8, 16), draw(place, torch.float16, 1, LONG, 16)
    for t in (LONG - 1, LEAST + 7, 3):
        D[0, t, 2] = NAN
        scores, argmax = assert_same(cuts, place, lambda: lik_ops.maxsim_with_argmax(Q, D))
        assert scores.isnan().all() and (argmax == t).all()
        assert lik_ops.maxsim(Q, D).isnan().all()


@in_place
def test_fully_masked_splits(place, cuts):
    """Some splits of one document and all splits of another are masked, and some kept similarities are -inf."""
    Q, D = draw(place, torch.float16, 1, 8, 16), draw(place, torch.float16, 3, LONG, 16)
    mask = torch.zeros(3, LONG, dtype=torch.bool, device=place.device)
    mask[0, LONG - 2] = mask[2, 9] = mask[2, LONG - 1] = True
    D[~mask] = NAN
    Q[0], D[2, 9], D[2, LONG - 1] = 1, -INF, -INF
    weight = torch.zeros(1, 8, device=place.device)
    for q_weight in (None, weight):
        scores, argmax = assert_same(
            cuts, place, lambda q_weight=q_weight: lik_ops.maxsim_with_argmax(Q, D, None, mask, q_weight=q_weight)
        )
        assert argmax[0, :, 0].tolist() == [LONG - 2, -1, 9]
        assert scores[0, 1] == -INF
        assert scores[0, 2].isnan() if q_weight is not None else scores[0, 2] == -INF


@in_place
def test_gradients(place, cuts):
    Q, D = draw(place, torch.float16, 2, 8, 16), draw(place, torch.float16, 2, LONG, 16)
    Q.requires_grad_(), D.requires_grad_()
    assert_same(cuts, place, lambda: torch.autograd.grad(lik_ops.maxsim(Q, D).sum(), (Q, D)))


@in_place
def test_candidates_of_one_query(place, cuts):
    """Test that the candidates of a single query are split like documents of all queries, with their own mask."""
    Q, D = draw(place, torch.float16, 1, 8, 16), draw(place, torch.float16, 1, 3, LONG, 16)
    mask = (torch.rand(1, 3, LONG) > 0.3).to(place.device)
    D[~mask] = NAN
    scores, argmax = assert_same(cuts, place, lambda: lik_ops.maxsim_with_argmax(Q, D, None, mask))
    assert scores.shape == (1, 3) and argmax.shape == (1, 3, 8)
    with place.use():
        expected = lik_ops.maxsim_with_argmax(Q, D[0], None, mask[0])
    same_bits(scores, expected[0])
    assert torch.equal(argmax, expected[1])


@in_place
def test_unaligned_and_strided_tokens(place, cuts):
    whole = draw(place, torch.float16, 2 * LONG * 16 + 3)
    Q = draw(place, torch.float16, 2, 8, 32)[..., ::2]
    for D in (whole[3:].view(2, LONG, 16), whole[:-3].view(LONG, 2, 16)[:, 0][None], whole[:-3].view(2, LONG, 16)[:1]):
        assert_same(cuts, place, lambda D=D: [lik_ops.maxsim(Q, D)])


SM_90 = replace(architectures.ARCHITECTURES["sm_90"], processors=132)


def choose_for_sizes(Nq, Nd, Lq, Ld, d=128, dtype=torch.bfloat16, argmax=False, normalize=False, arch=SM_90):
    Q, D = (torch.empty(n, length, d, dtype=dtype, device="meta") for n, length in ((Nq, Lq), (Nd, Ld)))
    return choose.choose_dense(Q, D, None, normalize, torch.int32 if argmax else None, arch)


def test_split_choice_by_sizes():
    def cut(*call, **options):
        return isinstance(choose_for_sizes(*call, **options), generic_choices.SplitChoice)

    assert all(cut(1, n, 32, length) for n in (1, 4, 16, 64) for length in (8192, 65536))
    assert all(cut(1, n, 128, length) for n in (1, 16) for length in (2048, 16384))
    assert cut(1, 1, 32, 65536, dtype=torch.float32) and cut(1, 1, 32, 65536, normalize=True, argmax=True)
    assert not cut(1, 1000, 32, 300) and not cut(1, 10, 32, 300) and not cut(1, 1000, 32, 65536)
    assert not cut(2, 200, 128, 65536)
    several = torch.empty(4, 2, 65536, 128, device="meta")
    assert not isinstance(
        choose.choose_dense(several[:, 0], several, None, False, None, SM_90), generic_choices.SplitChoice
    )


@pytest.mark.parametrize(
    "arch", [*architectures.ARCHITECTURES.values(), architectures.INTERPRETER], ids=lambda a: a.name
)
def test_the_workspace_is_bounded(arch):
    arch = replace(arch, processors=132)
    splits = 0
    for Nq, Nd, Lq, Ld in ((1, 1, 1, 2**24), (1, 64, 32, 65536), (4, 60, 1000, 8192), (1, 2, 60000, 65536)):
        for argmax in (False, True):
            found = choose_for_sizes(Nq, Nd, Lq, Ld, d=96, argmax=argmax, normalize=True, arch=arch)
            if isinstance(found, generic_choices.SplitChoice):
                splits += 1
                rows = Nq * Lq
                assert found.max_splits * (rows * (8 if argmax else 4) + 4) + 4 * rows <= 32 * 2**20
                assert 2 * Nd <= found.max_splits
    assert splits


def test_split_choice_of_encoded_documents():
    def cut(format, Nq, Nd, Lq, Ld, d=128):
        """Return whether the rules split documents of these sizes. The shortest would not be split in bf16."""
        Q, D = (torch.empty(n, length, d, dtype=torch.bfloat16, device="meta") for n, length in ((Nq, Lq), (Nd, Ld)))
        data, scale = D.to(torch.int8), torch.empty(Nd, Ld, device="meta")
        c = PackedArgs.from_tensors((Q, data, *(None,) * 7), Lq)
        tokens = EncodedTokens(data, scale, None, format)
        choice = choose.apply_rules(choose.QUANTIZED_RULES, choose.QuantizedChoiceArgs(c, tokens, False, False, SM_90))
        return isinstance(choice, generic_choices.SplitChoice)

    assert all(cut(format, 1, 8, 32, 512) for format in ("int8", "fp8_e4m3"))
    assert cut("int8", 1, 8, 32, 256, d=320) and cut("int8", 4, 1, 1024, 8192)
    assert not cut("int8", 1, 8, 32, 511) and not cut("int8", 1, 8, 32, 255, d=320)
    assert not cut("int8", 1, 1000, 32, 8192)
    assert not cut("residual2", 1, 1, 32, 8192)


def test_info_describes_splits():
    said = info.describe_kernel(SM_90, torch.bfloat16, 1, 1, 32, 65536, 128)
    assert said.startswith("maxsim_forward_packed on sm_90") and "splits" in said


def test_pdl_is_disabled_on_architectures_without_it():
    assert choose_for_sizes(1, 1, 32, 65536).launch.config.PDL
    for name in ("sm_80", "gfx942"):
        arch = replace(architectures.ARCHITECTURES[name], processors=100)
        assert not choose_for_sizes(1, 1, 32, 65536, arch=arch).launch.config.PDL


@pytest.mark.gpu
@pytest.mark.parametrize("Nd", [1, 5])
@pytest.mark.parametrize("Lq", [32, 128])
def test_documents_of_64k_tokens_and_their_gradients(Nd, Lq, cuts):
    g = torch.Generator("cuda").manual_seed(Nd)
    Q, D = (torch.randn(n, length, 128, device="cuda", generator=g).bfloat16() for n, length in ((2, Lq), (Nd, 65536)))
    Q.requires_grad_(), D.requires_grad_()
    assert_same(cuts, CUDA, lambda: torch.autograd.grad(lik_ops.maxsim(Q, D, backward="lowmem").sum(), (Q, D)))
    packed, cu = D.detach().flatten(0, 1), bounds([65536] * Nd, "cuda")
    with torch.no_grad():
        for _ in range(3):  # the third is replayed
            scores = lik_ops.maxsim(Q, D)
            cut = [lik_ops.maxsim_varlen(q, packed, bounds([Lq], "cuda"), cu) for q in Q.detach()]
            same_bits(torch.cat(cut), scores)
    assert any(isinstance(x, DensePlan) for x in plans.values())
