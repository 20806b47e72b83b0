"""Test fp32 tokens that are split into fp16 terms: the launch that replaces scores, and bits of the sm_90 kernel."""

import itertools

import pytest
import torch

import lik_ops
from lik_ops import reference

from ....support.common import CUDA, INTERPRETER, INTERPRETING, override_setting

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.csrc_triton.common import fp32
from lik_ops.csrc_triton.common.fp32 import RESCORE_BITS
from lik_ops.csrc_triton.forward.generic import rescore
from lik_ops.gpu import generic_choices
from lik_ops.gpu.runtime import launcher
from lik_ops.gpu.runtime.arguments import architecture, make_document_args, make_query_args, make_size_args, use_device
from lik_ops.gpu.tuning import architectures

PLACES = [INTERPRETER] if INTERPRETING else [pytest.param(CUDA, marks=pytest.mark.gpu)]
BLOCK = 64


def make_odd(tokens):
    """Make a feature of each token too small to share the scale of the others."""
    tokens[..., -1] = 1e-30
    return tokens


def run_rescore(Q, D, scores, q_weight, slot, parts):
    """Return scores `[Nq * parts, K]` after `maxsim_rescore`."""
    launch = generic_choices.choose_generic(Q, D, False, False, architecture(Q.device)).launch
    C = launch.config._replace(
        BM=max(launch.config.BM, slot), ROWS_PER_QUERY=slot, LONG_QUERIES=False, FP32_TERMS=2, BN=16
    )
    args = (
        make_query_args(Q, None, q_weight),
        make_document_args(D, None),
        scores,
        None,
        make_size_args(Q, D),
        Q.shape[-1],
    )
    grid = (architectures.cdiv(scores.numel(), BLOCK),)
    with use_device(Q.device):
        launcher.launch(rescore.maxsim_rescore, grid, (*args, parts, BLOCK, C), {"num_warps": 4})
    return scores


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(("Lq", "slot", "parts"), [(5, 8, 1), (16, 16, 1), (40, 16, 3)])
def test_rescore_replaces_only_marked_scores(Lq, slot, parts, place):
    torch.manual_seed(Lq)
    Nq, K, d = 3, 30, 16
    Q, D = torch.randn(Nq, Lq, d), torch.randn(K, 21, d)
    make_odd(Q[1, 2:4]), make_odd(D[4, 7]), make_odd(D[9])
    D[11, 3, 2], D[12, 20, 0] = float("nan"), float("inf")
    q_weight = torch.rand(Nq, Lq)
    found = torch.randn(Nq * parts, K)
    marked = torch.rand(Nq * parts, K) < 0.3
    marked[:, [4, 9, 11, 12]] = True
    expected = torch.stack(
        [reference.maxsim(Q, D, q_mask=x, q_weight=q_weight) for x in list_parts(Nq, Lq, slot, parts)], 1
    )
    expected = torch.where(marked, expected.view(Nq * parts, K).float(), found)
    bits = torch.where(marked, RESCORE_BITS.value, found.view(torch.int32))
    with place.use():
        arguments = [x.to(place.device) for x in (Q, D, bits.view(torch.float32), q_weight)]
        scores = run_rescore(*arguments, slot, parts).cpu()
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(scores[~marked], found[~marked])


def list_parts(Nq, Lq, slot, parts):
    """Return masks of the tokens of each part of the queries."""
    part = (torch.arange(Lq) // slot).expand(Nq, -1)
    return [part == n for n in range(parts)]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("terms", [1, 2])
def test_split_tokens_are_the_tokens(terms, masked, normalize, place):
    """Terms times scales are the tokens, normalized if requested. Scales tell masked tokens and fallback tokens."""
    torch.manual_seed(terms)
    K, Ld, d, tile = 5, 21, 20, 16
    D, keep = torch.randn(K, Ld, d) * 2.0 ** torch.randint(-20, 20, (K, Ld, 1)), torch.rand(K, Ld) < 0.6
    D[1, 2] = 0
    D[2, 3, 4], D[3, 20, 0] = float("nan"), float("inf")
    fallback = ~D.isfinite().all(-1)
    with place.use():
        documents, mask = D.to(place.device), keep.to(place.device) if masked else None
        choice = generic_choices.choose_generic(documents, documents, normalize, False, architecture(documents.device))
        C = choice.launch.config._replace(BM=32, BD=32, FP32_TERMS=terms)
        out = torch.full((terms, K * Ld, C.BD), float("nan"), dtype=torch.float16, device=place.device)
        scales = torch.full((K, 2, tile), float("nan"), device=place.device)
        args = make_document_args(documents, mask), out, scales, K * Ld, Ld, K * Ld, d, tile, C
        with use_device(documents.device):
            launcher.launch(fp32.split_tokens, (architectures.cdiv(K * Ld, C.BM),), args, {"num_warps": 4})
    # The last tile ends with the document.
    scale = torch.cat((scales[:, 0].cpu(), scales[:, 1, 2 * tile - Ld :].cpu()), 1)
    assert torch.equal(scale == 0, ~keep if masked else torch.zeros_like(keep))
    assert torch.equal((scale < 0)[scale != 0], fallback[scale != 0])
    high, low = out[0, :, :d].cpu().double(), (out[1, :, :d].cpu().double() if terms == 2 else 0.0)
    found = (high + low / fp32.FP16_LOW_SCALE.value).view(K, Ld, d) * scale[..., None]
    expected = torch.nn.functional.normalize(D.double(), dim=-1) if normalize else D.double()
    exact = (scale > 0) & (expected != 0).any(-1)
    size = expected[exact].abs().amax(-1, keepdim=True)
    assert float(((found - expected)[exact].abs() / size).max()) < (2.0**-11 if terms == 1 else 2.0**-22)
    assert not found[1, 2].any() and (scale[1, 2] == 1 or not keep[1, 2])


SHAPES = [
    (16, 150, 32, 300, 128),
    (5, 140, 100, 64, 96),
    (3, 70, 1024, 131, 128),
    (257, 9, 20, 77, 64),
    (64, 64, 33, 1024, 128),
    (9, 131, 129, 65, 16),
]


ODD = ("none", "a token", "a row", "many", "not finite")


def draw(Nq, Nd, Lq, Ld, d, odd):
    """Return random tokens with ties, some of them odd."""
    torch.manual_seed(Nq)
    Q, D = torch.randn(Nq, Lq, d), torch.randn(Nd, Ld, d)
    if odd == "a token":
        make_odd(D[Nd // 2, Ld // 2])
    elif odd == "a row":
        make_odd(Q[Nq // 2, Lq // 2])
    elif odd == "many":
        make_odd(D[::3, ::5]), make_odd(Q[::2, ::7])
    elif odd == "not finite":
        D[1, 3, 5], D[2, -1, 0], Q[1, 1, 1] = float("inf"), float("nan"), -float("inf")
    D[4, 40:60] = D[4, 3]
    return Q, D


@pytest.mark.gpu
@pytest.mark.parametrize(("Nq", "Nd", "Lq", "Ld", "d"), SHAPES)
def test_bits_match_generic_kernel(Nq, Nd, Lq, Ld, d, force_kernel):
    """One test runs all options, because compilation takes most of its time."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of the sm_90 kernels")
    q_mask, q_weight, d_mask = torch.rand(Nq, Lq) < 0.8, torch.rand(Nq, Lq), torch.rand(Nd, Ld) < 0.7
    q_mask[0], d_mask[3] = False, False
    weighted, masked = {"q_mask": q_mask.cuda(), "q_weight": q_weight.cuda()}, {"d_mask": d_mask.cuda()}
    optionals = ({}, weighted, masked, weighted | masked, {"normalize": True}, {"normalize": True} | weighted | masked)
    for options, odd in itertools.product(optionals, ODD):
        Q, D = (x.cuda() for x in draw(Nq, Nd, Lq, Ld, d, odd))
        found = {}
        for kernel in ("generic", "sm90"):
            force_kernel(kernel)
            scores, argmax = lik_ops.maxsim_with_argmax(Q, D, **options)
            found[kernel] = scores.view(torch.int32), argmax
            assert torch.equal(lik_ops.maxsim(Q, D, **options).view(torch.int32), found[kernel][0]), (odd, kernel)
        for generic, sm90 in zip(*found.values(), strict=True):
            assert torch.equal(generic, sm90), (odd, options.keys())
        host = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        # The two kernels share the search for the argmax, which is unspecified for a normalized query token with inf.
        if odd == "not finite" and "normalize" not in options:
            expected = reference.maxsim_with_argmax(Q[1:2].cpu(), D[2:3].cpu(), **cut(host, 1, 2))[1]
            assert torch.equal(argmax[1, 2].cpu().long(), expected[0, 0])


def cut(options, i, k):
    """Return the options of query i and document k."""
    tensors = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    parts = {name: x[k : k + 1] if name == "d_mask" else x[i : i + 1] for name, x in tensors.items()}
    return options | parts


ROWS = [(16, 1000, 32, 300), (1, 200, 1024, 1024), (64, 64, 1024, 1024), (256, 256, 32, 300), (5, 300, 100, 77)]


@pytest.mark.gpu
@pytest.mark.parametrize("terms", ["tf32", "ieee"])
@pytest.mark.parametrize(("Nq", "Nd", "Lq", "Ld"), ROWS)
def test_accuracy_of_tokens_of_unit_norm(Nq, Nd, Lq, Ld, terms):
    """TF32 is as accurate as the einsum of torch with TF32, and fp32 to 4e-7 of the largest score."""

    def einsum(Q, D):
        return torch.einsum("qsd,ktd->qkst", Q, D).amax(-1).sum(-1)

    torch.manual_seed(Nd)
    tokens = (torch.randn(n, L, 128, device="cuda") for n, L in ((Nq, Lq), (Nd, Ld)))
    Q, D = (torch.nn.functional.normalize(x, dim=-1) for x in tokens)
    some = Q[:4], D[:64]
    exact = einsum(*(x.double() for x in some))
    with override_setting(torch.backends.cuda.matmul, "fp32_precision", terms):
        found, theirs = lik_ops.maxsim(Q, D)[:4, :64], einsum(*some)
    ours, theirs = ((x.double() - exact).abs() / exact.max() for x in (found, theirs))
    if terms == "tf32":
        assert 1e-6 < ours.max() <= 1.2 * theirs.max() and ours.mean() <= 1.2 * theirs.mean()
    else:
        assert ours.max() < 4e-7
