"""Test row maxima on sm_90 bit for bit against the generic kernels, for masked documents and any lengths."""

import dataclasses

import pytest
import torch

import lik_ops
from lik_ops.core.segments import PackedArgs, RaggedArgs

from ....support.common import INTERPRETING, Problem, assert_scores, assert_winners, build
from ....support.ragged import same_bits

if INTERPRETING:
    pytest.skip("the interpreter has no Gluon", allow_module_level=True)

from lik_ops.gpu import choose
from lik_ops.gpu.tuning import architectures, forward_configs, sm90_configs

SM_90 = dataclasses.replace(architectures.ARCHITECTURES["sm_90"], processors=132)
HALF = (torch.float16, torch.bfloat16)


def choice(dtype=torch.bfloat16, rows=4096, K=256, Lq=32, d=128, arch=SM_90, dense=False):
    D = torch.empty(100, d, dtype=dtype, device="meta")
    found = choose.choose_row_maxima(D, rows, K, Lq, False, dense, arch)
    return None if isinstance(found, str) else found


def test_kernel_choice():
    assert choice() is not None
    assert choice(dtype=torch.float32) is None
    assert choice(arch=architectures.ARCHITECTURES["sm_80"]) is None
    assert choice(rows=128) is None and choice(rows=129) is not None
    assert choice(rows=256, K=65) is None
    assert choice(rows=256, K=1, Lq=256) is not None  # the generic kernel scores long queries part by part
    assert choice(d=129) is None


@pytest.mark.parametrize(
    ("Lq", "sums"), [(1, False), (2, True), (20, False), (29, True), (32, True), (128, True), (256, False)]
)
def test_kernel_sums_rows_of_dense_queries_that_fill_slots(Lq, sums):
    found = choice(rows=256 * Lq, Lq=Lq, K=4096, dense=True)
    assert sums == found.config.SUM_ROWS
    assert not sums or found.config.ROWS_PER_QUERY >= Lq > found.config.ROWS_PER_QUERY // 2
    assert not choice(rows=256 * Lq, Lq=Lq, K=4096).config.SUM_ROWS


@pytest.mark.parametrize("Lq", [1, 2, 16, 19, 32, 100, 256, 1000])
def test_sum_trees_match_generic_kernel_rows(Lq):
    slot, queries, documents, levels = choice(Lq=Lq).sums
    kind = architectures.KernelKey(SM_90, torch.bfloat16, 128, False, False, 0)
    assert slot * 2**levels == forward_configs.select_tiles(kind, Lq)[-1].rows
    assert queries * documents * slot == 1024 and (slot >= min(Lq, 256) or levels == 0)


@pytest.mark.parametrize("mask", [None, torch.ones(40, dtype=torch.bool), torch.ones(1, dtype=torch.bool).expand(40)])
def test_query_mask_stride_is_passed_to_the_kernel(mask, monkeypatch):
    from lik_ops.gpu.forward import packed as cuda_ragged
    from lik_ops.gpu.forward import sm90_packed as cuda_rows

    found = []
    monkeypatch.setattr(cuda_rows.launcher, "launch", lambda kernel, grid, args, options: found.append((grid, args)))
    tokens, bounds = torch.randn(40, 16), torch.tensor([0, 12, 40])
    r = RaggedArgs(tokens, tokens, bounds, bounds[:-1], bounds.diff(), None, mask, None, None)
    cuda_rows._mask_gaps(PackedArgs.from_tensors(r, 0), cuda_ragged.make_packed_query_args(r))
    [(grid, (_, given, covered, rows, stride, _))] = found
    assert grid == (2,) and rows == covered.numel() == 40 and given is mask
    assert stride == (1 if mask is None else mask.stride(0))


@pytest.mark.parametrize(
    ("Lq", "Nd", "Ld", "copies"),
    [(32, 256, 300, True), (48, 700, 300, True), (32, 40, 2000, True), (31, 256, 300, False), (32, 100, 8192, False)],
)
def test_choice_between_token_copies_and_mask_patches(Lq, Nd, Ld, copies):
    from lik_ops.gpu.forward import sm90_packed as cuda_rows

    found = choice(rows=256 * Lq, K=Nd, Lq=Lq, dense=True)
    Q, D = (torch.empty(n, L, 128, dtype=torch.bfloat16) for n, L in ((256, Lq), (Nd, Ld)))
    plan = cuda_rows.MaskedPlan(found, Q, D, None)
    assert plan.score_part == (plan._score_by_copies if copies else plan._score_by_patches) and plan.chunk >= 1
    space = plan.chunk * Ld * 256 if copies else plan.chunk * plan.tiles * 8
    assert space <= (20 if copies else 8) * 2**20


def test_tokens_are_not_copied_if_maxima_fill_the_workspace():
    from lik_ops.gpu.forward import sm90_packed as cuda_rows

    for Nq, copies in ((90_000, True), (100_000, False)):  # 6.9 and 7.6 MiB of maxima
        found = choice(rows=20 * Nq, K=70, Lq=20, dense=True)
        Q, D = (torch.empty(n, L, 8, dtype=torch.bfloat16) for n, L in ((Nq, 20), (70, 30)))
        plan = cuda_rows.MaskedPlan(found, Q, D, None)
        assert not found.config.SUM_ROWS and plan.score_part == (
            plan._score_by_copies if copies else plan._score_by_patches
        )


def masked_cases():
    """Yield row and token tiles that end anywhere, empty documents, and masks with holes and without."""
    for n, (Nq, Nd, Lq, Ld, d) in enumerate(
        [
            (40, 70, 32, 180, 128),
            (9, 131, 31, 64, 96),
            (33, 67, 8, 65, 64),
            (70, 66, 3, 127, 8),
            (200, 70, 1, 7, 48),
            (3, 140, 100, 129, 128),
            (2, 150, 128, 300, 120),
            (1, 140, 129, 1, 128),
            (2, 70, 300, 200, 128),
            (1, 70, 1030, 96, 128),
            (5, 70, 32, 2200, 64),
        ]
    ):
        for values, d_mask in (("integer", "holes"), ("negative", "prefix"), ("normal", "empty_some")):
            q_mask, weight = ("none", "holes", "empty_some")[n % 3], n % 2 == 1
            yield Problem(
                Nq=Nq,
                Nd=Nd,
                Lq=Lq,
                Ld=Ld,
                d=d,
                dtype=HALF[n % 2],
                q_mask=q_mask,
                d_mask=d_mask,
                weight=weight,
                values=values,
                poison=values != "normal",  # otherwise masked tokens would often win
                seed=n,
            )


def plain(x, argmax_dtype):
    """Return scores and argmax of `maxsim_forward`."""
    from lik_ops.gpu.forward.generic import make_generic_plan

    plan = make_generic_plan(x.Q, x.D, False, argmax_dtype)
    argmax = None if argmax_dtype is None else plan.allocate_argmax()
    return plan.scores(plan.scores_shape, x.Q, x.D, x.q_mask, x.d_mask, x.q_weight, argmax), argmax


@pytest.fixture(params=["patches", "copies"])
def way(request, monkeypatch):
    """Select how masks are applied, for any sizes."""
    from lik_ops.gpu.forward import sm90_packed as cuda_rows

    monkeypatch.setattr(cuda_rows, "_MIN_COPY_ROWS", 0 if request.param == "copies" else 2**31)
    monkeypatch.setattr(cuda_rows, "_MIN_COPY_PAIRS", 0)
    return request.param


def by_rows(x, argmax_dtype, way):
    """Return scores and argmax by row maxima, and fail if that plan is not selected."""
    from lik_ops.gpu.forward.dense import make_plan
    from lik_ops.gpu.forward.sm90_packed import MaskedPlan

    plan = make_plan(x.Q, x.D, x.d_mask, False, argmax_dtype)
    assert isinstance(plan, MaskedPlan) and plan.score_part.__name__ == f"_score_by_{way}"
    argmax = None if argmax_dtype is None else plan.allocate_argmax().fill_(-7)
    return plan.scores(plan.scores_shape, x.Q, x.D, x.q_mask, x.d_mask, x.q_weight, argmax), argmax


@pytest.mark.gpu
@pytest.mark.parametrize("p", list(masked_cases()), ids=str)
def test_masked_scores_match_oracle_and_generic_kernel_bits(p, way):
    x = build(p, "cuda")
    x.Q = build(dataclasses.replace(p, strides="transposed"), "cuda").Q
    scores, argmax = by_rows(x, torch.int16, way)
    expected, winners = plain(x, torch.int16)
    assert torch.equal(scores, expected) and torch.equal(argmax, winners)
    assert torch.equal(by_rows(x, None, way)[0], scores)
    assert_scores(p, x, scores)
    assert_winners(p, x, argmax.transpose(0, 1).long())


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_masked_scores_with_nan_and_inf_match_generic_kernel(value, way):
    p = Problem(Nq=12, Nd=80, Lq=16, Ld=130, d=64, dtype=torch.bfloat16, d_mask="holes", values="integer")
    x = build(p, "cuda")
    x.D[::3, 70] = value
    x.D[1::3, 0] = value
    x.D[2::5] = value
    x.Q[3, 5] = value
    (scores, argmax), (expected, winners) = by_rows(x, torch.int32, way), plain(x, torch.int32)
    same_bits(scores, expected)
    same_bits(by_rows(x, None, way)[0], expected)
    assert torch.equal(argmax, winners)


def packed(Nq, Nd, Lq, Ld, d, seed, dtype=torch.bfloat16, values="normal"):
    """Return packed queries of up to Lq and documents of up to Ld tokens, some empty, with a gap before the first."""
    g = torch.Generator().manual_seed(seed)

    def side(count, most):
        lengths = torch.randint(0, most + 1, (count,), generator=g)
        lengths[torch.rand(count, generator=g) < 0.1] = 0
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]) + 3, int(lengths.sum()) + 5

    (cu_q, Tq), (cu_d, Td) = side(Nq, Lq), side(Nd, Ld)
    draw = (lambda n: torch.randint(-2, 3, (n, d), generator=g)) if values == "integer" else None
    Q, D = ((draw(n) if draw else torch.randn(n, d, generator=g)).to("cuda", dtype) for n in (Tq, Td))
    q_mask, weight = (torch.rand(Tq, generator=g) > 0.2).cuda(), torch.randn(Tq, generator=g).cuda()
    cu_q, cu_d = cu_q.cuda(), cu_d.cuda()
    return RaggedArgs(Q, D, cu_q, cu_d[:-1], cu_d.diff(), None, q_mask, None, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("values", ["normal", "integer"])
@pytest.mark.parametrize(
    "sizes",
    [(40, 90, 32, 150, 128), (300, 70, 7, 64, 64), (9, 200, 80, 20, 96), (4, 70, 700, 300, 128), (700, 1500, 5, 9, 16)],
    ids=str,
)
def test_packed_scores_match_generic_kernel_bits(sizes, values, monkeypatch):
    from lik_ops.gpu.forward import packed as cuda_ragged

    r = packed(*sizes, seed=sum(sizes), values=values)
    r.d_lengths[3], r.d_offsets[5] = -1, r.D.shape[0] + 1
    c = PackedArgs.from_tensors(r, 0)
    assert isinstance(cuda_ragged.PackedPlan(c, False, None, "")._choose_fast(c), sm90_configs.RowMaximaChoice)
    scores, argmax = cuda_ragged.forward_ragged(r, False, torch.int32, 0)
    assert torch.equal(cuda_ragged.forward_ragged(r, False, None, 0)[0].nan_to_num(7), scores.nan_to_num(7))
    monkeypatch.setattr(cuda_ragged.PackedPlan, "_choose_fast", lambda *_: None)
    expected, winners = cuda_ragged.forward_ragged(r, False, torch.int32, 0)
    same_bits(scores, expected)
    assert scores[:, 3].isnan().all() and scores[:, 5].isnan().all()
    if values == "integer":
        assert torch.equal(argmax, winners)
    i, j = sizes[0] - 1, sizes[1] - 1
    rows, tokens = r.cu_seqlens_q[i : i + 2].tolist(), r.d_offsets[j].item()
    alone = slice(*rows), slice(tokens, tokens + r.d_lengths[j].item())
    options = {"q_mask": r.q_mask[alone[0]], "q_weight": r.q_weight[alone[0]]}
    same_bits(scores[i, j], lik_ops.maxsim(r.Q[alone[0]], r.D[alone[1]], **options).reshape(()))


@pytest.mark.gpu
@pytest.mark.parametrize("values", ["normal", "integer"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("Nq", "Lq", "Nd", "Ld", "d"),
    [(16, 32, 300, 150, 128), (90, 2, 200, 70, 64), (5, 128, 70, 300, 96), (33, 15, 140, 64, 128)],
)
def test_dense_queries_with_packed_documents_match_generic_kernel(Nq, Lq, Nd, Ld, d, per_token, values, monkeypatch):
    from lik_ops.gpu.forward import packed as cuda_ragged

    r = packed(1, Nd, 1, Ld, d, seed=Lq, values=values)
    bounds = torch.cat([r.d_offsets, r.d_offsets[-1:] + r.d_lengths[-1:]])
    bounds[7], bounds[11] = bounds[6] - 2, r.D.shape[0] + 9  # two invalid documents, each next to a changed one
    g = torch.Generator().manual_seed(Nq)
    Q = torch.randint(-2, 3, (Nq, Lq, d), generator=g) if values == "integer" else torch.randn(Nq, Lq, d, generator=g)
    Q = Q.to("cuda", torch.bfloat16)
    q_mask, weight = (torch.rand(Nq, Lq, generator=g) > 0.3).cuda(), torch.randn(Nq, Lq, generator=g).cuda()
    q_mask[1] = False
    per = (q_mask, None, weight) if per_token else (None,) * 3
    sizes = Nq, Nd, False, Nq * Lq, r.D.shape[0], Lq
    c = PackedArgs(Q, r.D, None, bounds, None, None, None, *per, *sizes)
    assert cuda_ragged.PackedPlan(c, False, None, "")._choose_fast(c).config.SUM_ROWS
    scores, argmax = cuda_ragged.PackedPlan(c, False, torch.int32, "").forward(c)
    same_bits(cuda_ragged.PackedPlan(c, False, None, "").forward(c)[0], scores)
    monkeypatch.setattr(cuda_ragged.PackedPlan, "_choose_fast", lambda *_: None)
    expected, winners = cuda_ragged.PackedPlan(c, False, torch.int32, "").forward(c)
    same_bits(scores, expected)
    assert scores[0].isnan().any() and scores[0].isneginf().any()
    if values == "integer":
        assert torch.equal(argmax, winners)


@pytest.mark.gpu
@pytest.mark.parametrize("full", [0, 1, 700, 8191, 12_000, 24_580])
@pytest.mark.parametrize("masked", [False, True])
def test_many_empty_documents_at_the_end_match_generic_kernel(full, masked):
    """Empty documents have no tiles, as in the search of a subset. Some are outside D, and one query has no tokens."""
    from lik_ops.gpu.forward import packed as cuda_ragged

    draw = torch.Generator("cuda").manual_seed(full)
    Q, D = (torch.randn(*n, 64, generator=draw, device="cuda").bfloat16() for n in ((17, 30), (5000,)))
    K = 3 * 8192 + 5
    offsets = torch.randint(0, 4900, (K,), generator=draw, device="cuda")
    lengths = torch.randint(0, 100, (K,), generator=draw, device="cuda")
    lengths[full:] = 0
    offsets[full + 2 :: 1000] = 5001
    q_mask = torch.rand(17, 30, generator=draw, device="cuda") < 0.7 if masked else None
    if masked:
        q_mask[3] = False
    c = PackedArgs(Q, D, None, offsets, lengths, None, None, q_mask, None, None, 17, K, False, 510, 5000, 30)
    plan = cuda_ragged.PackedPlan(c, False, None, "")
    assert plan._choose_fast(c).config.SUM_ROWS
    scores, _ = plan.forward(c)
    expected, _ = plan._run_generic(c)
    same_bits(scores, expected)
    assert bool(scores[:, full + 2 :: 1000].isnan().all())


@pytest.mark.gpu
def test_document_chunks_do_not_change_results(way, monkeypatch):
    from lik_ops.gpu.forward import packed as cuda_ragged
    from lik_ops.gpu.forward import sm90_packed as cuda_rows

    r = packed(40, 90, 32, 150, 128, seed=1)
    x = build(Problem(Nq=40, Nd=90, Lq=16, Ld=70, d=64, dtype=torch.bfloat16, d_mask="holes"), "cuda")

    def found():
        scores = by_rows(x, None, way)[0]
        return (*cuda_ragged.forward_ragged(r, False, torch.int16, 0), *by_rows(x, torch.int16, way), scores)

    whole = found()
    monkeypatch.setattr(cuda_rows, "_MAX_MAXIMA_BYTES", 33 * 4 * r.Q.shape[0])
    monkeypatch.setattr(cuda_rows, "_MAX_COPY_MAXIMA_BYTES", 13 * 4 * 40 * 16)
    monkeypatch.setattr(cuda_rows, "_MAX_TOKEN_BYTES", 40 * 70 * 64 * 2)
    monkeypatch.setattr(cuda_rows, "_MAX_MASK_BYTES", 40 * 8 * 2)
    for part, expected in zip(found(), whole, strict=True):
        assert torch.equal(part, expected)
