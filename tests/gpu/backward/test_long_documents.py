"""Test the gradient of long documents with few query rows: the bits of sums of all tokens, and fp64 sums."""

import math
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import normalize as unit

from ...support.common import CUDA, INTERPRETER, INTERPRETING

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.csrc_triton.backward.documents.dense import maxsim_grad_documents, maxsim_grad_long_documents
from lik_ops.csrc_triton.backward.documents.sparse import maxsim_grad_sparse_documents
from lik_ops.gpu.backward import documents
from lik_ops.gpu.backward.dense import BackwardArgs, _run_lowmem
from lik_ops.gpu.runtime import launcher
from lik_ops.gpu.tuning import backward_configs
from lik_ops.gpu.tuning.architectures import ARCHITECTURES
from lik_ops.gpu.tuning.architectures import INTERPRETER as INTERPRETER_ARCH

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
on_places = pytest.mark.parametrize("place", PLACES, ids=str)
_TOLERANCE = {torch.float16: 3e-4, torch.bfloat16: 2e-3, torch.float32: 1e-6}
NEVER = 10**9


class Problem(NamedTuple):
    """A backward call, and the kernel that its tokens select."""

    args: BackwardArgs
    candidates: bool


def make_problem(place, dtype, candidates, sizes, winners, *, d=24, normalize=False, weight=False, int8=False):
    """Return a call with a drawn argmax.

    Args:
        place: Device and backend.
        dtype: Dtype of the queries.
        candidates: Whether each query has its own documents.
        sizes: `(Nq, K, Lq, Ld)`.
        winners: Which tokens are an argmax: "uniform", "few" (five tokens, which are the first, the last, and tokens at
            tile edges), "one" (a token of the last tile is the argmax of all rows), or "holes" (uniform, every third
            row and the whole first document have none).
        d: Number of features.
        normalize: Whether tokens are normalized.
        weight: Whether query rows have weights.
        int8: Whether documents are int8 with a scale for each token.
    """
    Nq, K, Lq, Ld = sizes
    g = torch.Generator().manual_seed(0)
    Q = torch.randn(Nq, Lq, d, generator=g).to(dtype)
    shape = (Nq, K, Ld) if candidates else (K, Ld)
    D, scale = torch.randn(*shape, d, generator=g).to(dtype), None
    if int8:
        D = torch.randint(-127, 128, D.shape, generator=g, dtype=torch.int8)
        scale = (torch.rand(shape, generator=g) + 0.1).to(place.device)
    argmax = torch.randint(0, Ld, (Nq, K, Lq) if candidates else (K, Nq, Lq), generator=g)
    if winners == "few":
        argmax = torch.tensor([0, 15, 16, 31 % Ld, Ld - 1])[argmax % 5]
    elif winners == "one":
        argmax[:] = Ld - 2
    elif winners == "holes":
        argmax.view(-1, Lq)[:, ::3] = -1
        argmax[0, 0 if candidates else slice(None)] = -1
    grad_scores = torch.randn(Nq, K, generator=g)
    grad_scores[-1, -1] = 0
    q_weight = torch.randn(Nq, Lq, generator=g).to(place.device) if weight else None
    tensors = (x.to(place.device) for x in (grad_scores, Q, D, argmax.to(torch.int16)))
    needs = [False, True, False]
    return Problem(BackwardArgs(*tensors, None, None, q_weight, normalize, needs, scale), candidates)


def expected_gradient(p):
    """Return the document gradient in fp64 from the formula."""
    a = p.args
    Q, D = a.Q.double().cpu(), a.D.double().cpu()
    if a.scale is not None:
        D = D * a.scale.double().cpu()[..., None]
    rows = unit(Q, dim=-1) if a.normalize else Q
    if a.q_weight is not None:
        rows = rows * a.q_weight.double().cpu()[..., None]
    c = a.grad_scores.double().cpu()
    argmax = a.argmax.long().cpu() if p.candidates else a.argmax.long().cpu().transpose(0, 1)
    values = torch.where((argmax >= 0)[..., None], c[:, :, None, None] * rows[:, None], 0)
    G = torch.zeros(c.shape + D.shape[-2:], dtype=torch.float64)
    G.scatter_add_(2, argmax.clamp(min=0)[..., None].expand_as(values), values)
    G = G if p.candidates else G.sum(0)
    if not a.normalize:
        return G
    D.requires_grad_()
    return torch.autograd.grad(unit(D, dim=-1), D, G)[0]


def document_gradient(p, monkeypatch, ratio, tile=None):
    """Return the document gradient and the kernel that summed it, for a `_MIN_TOKENS_PER_ROW` and a tile."""
    launched = []

    def watched(kernel, grid, args, options, launch=launcher.launch):
        launched.append(kernel)
        return launch(kernel, grid, args, options)

    with monkeypatch.context() as patch:
        patch.setattr(documents, "_MIN_TOKENS_PER_ROW", ratio)
        patch.setattr(launcher, "launch", watched)
        if tile is not None:
            patch.setattr(backward_configs, "choose_long_tile_tokens", lambda *_: tile)
        gradient = _run_lowmem(p.args)[1]
    return gradient, launched[-1]


def compare(p, monkeypatch, *tiles):
    """Check the sums of hit tokens against fp64, and against the sums of all tokens."""
    monkeypatch.setattr(backward_configs, "MIN_LONG_DOCUMENT_TOKENS", NEVER)  # larger tiles have other bits
    monkeypatch.setattr(backward_configs, "MIN_LISTED_BYTES", NEVER)  # so have lists of fp32 rows
    every, kernel = document_gradient(p, monkeypatch, NEVER)
    assert kernel is maxsim_grad_documents
    expected = expected_gradient(p)
    for tile in tiles or (None,):
        found, kernel = document_gradient(p, monkeypatch, 4, tile)
        assert kernel is maxsim_grad_long_documents
        error = (found.double().cpu() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < _TOLERANCE[found.dtype], (found.dtype, tile, float(error))
        # The norms of queries come from a launch of their own, which may sum features in another order.
        if not p.args.normalize:
            assert torch.equal(found, every), (found.dtype, tile)


# Nq, K, Lq, Ld. Rows are more than a sparse program holds, and documents have at least four times as many tokens. Ld is
# no multiple of a tile except once.
SIZES = (
    {False: [(3, 2, 23, 283)], True: [(2, 2, 67, 288)]}
    if INTERPRETING
    else {
        False: [(5, 3, 26, 523), (8, 16, 32, 2048), (3, 2, 340, 4099), (16, 32, 32, 8192)],
        True: [(3, 2, 130, 523), (2, 100, 200, 1500), (1, 2, 1023, 4092)],
    }
)
SHAPES = [(candidates, sizes) for candidates, each in SIZES.items() for sizes in each]
TILES = (32, 128) if INTERPRETING else (128, 256, 512)


@pytest.fixture(autouse=True)
def _small_sparse_programs(monkeypatch):
    """Let the interpreter use fewer rows."""
    if INTERPRETING:
        monkeypatch.setattr(backward_configs, "MAX_SPARSE_ROWS", 64)


@on_places
@pytest.mark.parametrize("candidates, sizes", SHAPES, ids=str)
@pytest.mark.parametrize("winners", ["uniform", "few", "one", "holes"])
def test_bits_are_the_bits_of_sums_of_all_tokens(place, candidates, sizes, winners, monkeypatch):
    for dtype in (dtype for dtype in place.dtypes if dtype != torch.float64):
        p = make_problem(place, dtype, candidates, sizes, winners, weight=winners == "few" or not candidates)
        compare(p, monkeypatch, *TILES)


@on_places
@pytest.mark.parametrize("candidates, sizes", [(c, each[0]) for c, each in SIZES.items()], ids=str)
@pytest.mark.parametrize("d", [17, 140] if INTERPRETING else [17, 128, 300, 768])
@pytest.mark.parametrize("int8", [False, True])
def test_normalized_documents(place, candidates, sizes, d, int8, monkeypatch):
    """Documents may be int8 with scales, and features may need several steps."""
    for dtype in (dtype for dtype in place.some_dtypes(int8 ^ candidates) if dtype != torch.float64):
        winners = "few" if int8 else "holes"
        compare(
            make_problem(place, dtype, candidates, sizes, winners, d=d, normalize=True, weight=True, int8=int8),
            monkeypatch,
        )


@on_places
@pytest.mark.parametrize("layout", ["sliced", "transposed", "wide"])
def test_strides_and_wide_offsets(place, layout, monkeypatch):
    """Queries are every second feature, or their tokens are outermost, or all offsets have 64 bits."""
    for dtype in (dtype for dtype in place.dtypes if dtype != torch.float64):
        p = make_problem(place, dtype, False, SIZES[False][0], "uniform", d=32, normalize=layout == "wide")
        Q, D = p.args.Q, p.args.D
        if layout == "sliced":
            Q, D = (torch.stack((x, x), -1).flatten(-2)[..., ::2] for x in (Q, D))
        elif layout == "transposed":
            Q = Q.transpose(0, 1).contiguous().transpose(0, 1)
        else:
            monkeypatch.setattr("lik_ops.gpu.backward.dense.choose_offset_width", lambda *_: 2)
        compare(Problem(p.args._replace(Q=Q, D=D), p.candidates), monkeypatch)


@on_places
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_rows_reach_only_their_argmax(place, value, monkeypatch):
    for dtype in (dtype for dtype in place.dtypes if dtype != torch.float64):
        p = make_problem(place, dtype, False, SIZES[False][0], "uniform", d=16)
        p.args.Q[1, 2, 4] = value
        p.args.grad_scores[2, 1] = math.nan
        gradient, kernel = document_gradient(p, monkeypatch, 4)
        assert kernel is maxsim_grad_long_documents
        spoilt = torch.zeros(gradient.shape[:2], dtype=torch.bool)
        argmax = p.args.argmax.long().cpu()
        spoilt[torch.arange(len(argmax)), argmax[:, 1, 2]] = True
        spoilt[1, argmax[1, 2]] = True
        assert torch.equal((~torch.isfinite(gradient)).any(-1).cpu(), spoilt)
        p.args.Q[1, 2] = 0
        p.args.grad_scores[2, 1] = 0
        expected = expected_gradient(p)
        error = (gradient.double().cpu() - expected)[~spoilt].norm() / expected.norm()
        assert error < _TOLERANCE[dtype]


@on_places
@pytest.mark.parametrize("scale", [1e-6, 65536.0])
def test_upstream_gradients_beyond_the_range_of_fp16(place, scale, monkeypatch):
    for dtype in set(place.dtypes) & {torch.float16, torch.bfloat16}:
        p = make_problem(place, dtype, False, SIZES[False][0], "uniform", d=16)
        shrink = 2.0**-12 if scale > 1 and dtype == torch.float16 else 2.0**12  # keeps the result in fp16's range
        args = p.args._replace(Q=p.args.Q * shrink, grad_scores=p.args.grad_scores * scale)
        compare(Problem(args, p.candidates), monkeypatch)


@on_places
def test_results_are_reproducible(place, monkeypatch):
    dtype = place.dtypes[-1] if INTERPRETING else torch.bfloat16
    p = make_problem(place, dtype, False, SIZES[False][-1], "uniform", d=16 if INTERPRETING else 128, normalize=True)
    first, _ = document_gradient(p, monkeypatch, 4)
    for _ in range(1 if INTERPRETING else 20):
        assert torch.equal(document_gradient(p, monkeypatch, 4)[0], first)


@on_places
def test_calls_select_the_kernel_by_rows_and_tokens(place, monkeypatch):
    monkeypatch.setattr(backward_configs, "MAX_SPARSE_ROWS", 128)
    dtype = torch.float16  # the dtype for which a sparse program holds as many rows
    for rows, Ld, expected in (
        (128, 600, maxsim_grad_sparse_documents),
        (129, 515, maxsim_grad_documents),
        (129, 516, maxsim_grad_long_documents),
    ):
        p = make_problem(place, dtype, False, (1, 1, rows, Ld), "one", d=16)
        assert document_gradient(p, monkeypatch, documents._MIN_TOKENS_PER_ROW)[1] is expected, (rows, Ld)


def test_the_largest_tile_with_enough_programs_is_chosen():
    choose = backward_configs.choose_long_tile_tokens
    arch = ARCHITECTURES["sm_90"]
    assert [choose(arch, count, 2048, 264) for count in (16, 32, 33, 65, 66, 500)] == [128, 128, 256, 256, 512, 512]
    assert choose(arch, 32, 8192, 264) == 512 and choose(arch, 1, 100, 264) == 128
    assert choose(INTERPRETER_ARCH, 1, 100, 264) == 32
