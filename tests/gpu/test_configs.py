"""Test that the tile table covers every call, and that the bits of a score do not depend on the batch."""

import itertools
from dataclasses import replace

import pytest
import torch

import lik_ops
from lik_ops.csrc_triton.common.arguments import SizeArgs
from lik_ops.gpu import generic_choices
from lik_ops.gpu.tuning import forward_configs, sm90_configs
from lik_ops.gpu.tuning.architectures import ARCHITECTURES, INTERPRETER, KernelKey, LaunchConfig
from lik_ops.gpu.tuning.forward_configs import FORWARD_RULES

from ..support.common import Problem, build

ARCHS = [*ARCHITECTURES.values(), INTERPRETER]


def _forward(arch, dtype, Nq, Lq, d, normalize, candidates=False, wide=0) -> LaunchConfig:
    return forward_configs.configure_forward(KernelKey(arch, dtype, d, candidates, normalize, wide), Nq, Lq, tf32=False)


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_per_query_do_not_depend_on_the_number_of_queries(arch, dtype):
    lengths, features = (1, 5, 32, 100, 257, 3000), (8, 128, 700)
    for Lq, d, normalize, wide in itertools.product(lengths, features, (False, True), (0, 1, 2)):
        slot = _forward(arch, dtype, 1, Lq, d, normalize, wide=wide).config.ROWS_PER_QUERY
        most = forward_configs.select_tiles(KernelKey(arch, dtype, d, False, normalize, wide), Lq)[-1].rows
        for Nq, candidates in itertools.product((1, 2, 5, 1000), (False, True)):
            config = _forward(arch, dtype, Nq, Lq, d, normalize, candidates, wide).config
            assert slot == config.ROWS_PER_QUERY and config.BM % slot == 0
            assert (config.LONG_QUERIES or Lq <= slot) and (slot == config.BM or not config.LONG_QUERIES)
            assert config.BM in (slot, most) or slot <= config.BM < 2 * max(slot * (1 if candidates else Nq), 64)


def test_tf32_tiles_keep_the_rows_of_a_query():
    """Sums of a query therefore keep their bits. Short documents, long queries, and few programs keep their tiles."""
    arch = ARCHITECTURES["sm_90"]
    large = set()
    sizes = (1, 4, 16), (1, 20, 32, 64, 65, 300), (1, 64, 65, 300), (8, 1000), (160, 320, 1000), (False, True)
    for Nq, Lq, Ld, documents, d, candidates in itertools.product(*sizes):
        kind = KernelKey(arch, torch.float32, d, candidates, False, 0)
        launch = forward_configs.configure_forward(kind, Nq, Lq, tf32=True, documents=documents)
        found = forward_configs.adjust_for_tf32(launch, kind, Nq, Ld, documents)
        C = found.config
        assert C.ROWS_PER_QUERY == launch.config.ROWS_PER_QUERY and (C.BM == C.ROWS_PER_QUERY or not C.LONG_QUERIES)
        if found != launch:
            assert (C.BM, C.BN) == (128, 128) and not candidates and d % 16 == 0
            large.add((Nq, Lq, Ld, documents))
    assert {case[2:] for case in large} == {(65, 1000), (300, 1000)}
    assert {case[:2] for case in large} == {(Nq, Lq) for Nq in (4, 16) for Lq in (20, 32, 64)}


def test_tiles_of_a_rule_ascend():
    for rule in FORWARD_RULES:
        sizes = [(tile.rows, tile.documents) for tile in rule.value]
        assert sizes == sorted(set(sizes)), rule
        assert rule.value[-1].documents > 2**32


@pytest.mark.parametrize(("documents", "stages"), [(300, 4), (1_000, 2), (100_000, 3)])
def test_h100_uses_other_num_stages_for_one_query(documents, stages):
    arch = ARCHITECTURES["sm_90"]
    h100 = replace(arch, gpu="NVIDIA H100 80GB HBM3")
    kind = KernelKey(arch, torch.bfloat16, 128, False, False, 0)
    launch = forward_configs.configure_forward(kind, 1, 32, tf32=False, documents=documents)
    assert forward_configs.adjust_stages(launch, h100, documents) == replace(launch, num_stages=stages)
    assert forward_configs.adjust_stages(launch, replace(arch, gpu="NVIDIA H200"), documents) == launch
    queries = _forward(arch, torch.bfloat16, 4, 32, 128, False)
    assert forward_configs.adjust_stages(queries, h100, documents) == queries


def test_warp_groups_take_turns_unless_products_are_short_or_awaited():
    arch, sizes = ARCHITECTURES["sm_90"], SizeArgs(16, 1000, 32, 300)
    half = [sm90_configs.configure_sm90(arch, sizes, 128, normalize=n, argmax=a) for n in (0, 1) for a in (0, 1)]
    one_term, two_terms = (sm90_configs.configure_fp32_split(arch, sizes, 128, terms=n) for n in (1, 2))
    int8 = sm90_configs.configure_int8(arch, torch.bfloat16, sizes, 128, each_token=True, terms=2)
    fp8, fp8_queries = (sm90_configs.configure_fp8(arch, sizes, 128, encoding=kept) for kept in ("e4m3", "fp8_fp8"))
    assert all(choice.config.PING_PONG for choice in (*half, one_term, fp8))
    assert not any(choice.config.PING_PONG for choice in (two_terms, int8, fp8_queries))


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize(("d", "documents"), [(48, 1_000), (64, 10_000), (64, 300)])
def test_few_features_use_at_least_two_stages_for_one_query(d, documents, gpu):
    arch = replace(ARCHITECTURES["sm_90"], gpu=gpu)
    kind = KernelKey(arch, torch.bfloat16, d, False, False, 0)
    launch = forward_configs.configure_forward(kind, 1, 32, tf32=False, documents=documents)
    assert forward_configs.adjust_stages(launch, arch, documents).num_stages == max(
        launch.num_stages, 3 if "H100" in gpu and documents > 3_000 else 2
    )


@pytest.mark.parametrize(("Nq", "few"), [(1, False), (1, True), (4, True), (16, False), (256, False)])
def test_rq4_words_have_one_stage_as_rq2_words_in_effect(Nq, few):
    kind = KernelKey(ARCHITECTURES["sm_90"], torch.bfloat16, 128, False, False, 0)
    options = {"tf32": False, "argmax": False, "has_few_documents": few}
    rq4, rq2 = (
        forward_configs.configure_packed_forward(kind, Nq, 32, stored=stored, **options)[0]
        for stored in ("bitwords4", "bitwords2")
    )
    assert rq4.num_stages == 1 and rq4.config._replace(ENCODING="") == rq2.config._replace(ENCODING="")


@pytest.mark.parametrize(
    ("stored", "d", "tiles"),
    [
        ("int8", 128, {1: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64, 65: 128}),
        ("bits1_half", 192, {1: 16, 20: 32, 64: 64, 65: 128}),
        ("number", 128, {1: 16, 20: 32, 33: 64, 300: 64}),
        ("fp8", 320, {1: 16, 20: 32, 33: 64, 300: 64}),
        ("bitwords4_rotated", 128, {16: 16, 17: 128}),
    ],
)
def test_short_encoded_documents_fill_their_tiles(stored, d, tiles):
    kind = KernelKey(ARCHITECTURES["sm_90"], torch.bfloat16, d, False, False, 0)
    for Ld, BN in tiles.items():
        tokens = generic_choices.choose_tile_tokens(1000 * Ld, 1000)
        options = {"tf32": False, "argmax": False, "has_no_options": True, "stored": stored, "tile_tokens": tokens}
        launch, _ = forward_configs.configure_packed_forward(kind, 16, 32, **options)
        assert launch.config.BN == BN, Ld
        few_rows, _ = forward_configs.configure_packed_forward(kind, 1, 32, **options)
        assert few_rows.config.TOKENS_FIRST and few_rows.config.BN == 64


def _change_layout(D, how):
    """Return the documents in another memory layout: one a descriptor can read, or one it cannot."""
    if how == "transposed":
        return D.mT.contiguous().mT
    if how == "apart":
        return torch.cat([D, D[..., :1]], -1)[..., :-1]
    if how == "unaligned":
        room = D.new_empty(D.numel() + 1)
        return room[1:].copy_(D.flatten()).view(D.shape)
    return D


LYING = ["contiguous", "transposed", "apart", "unaligned"]


@pytest.mark.parametrize("how", LYING)
@pytest.mark.parametrize("Ld", [3, 100])
def test_descriptor_use_depends_on_layout_not_length(Ld, how):
    Q, D = torch.randn(40, 32, 128).half(), _change_layout(torch.randn(400, Ld, 128).half(), how)
    choice = generic_choices.choose_generic(Q, D, True, False, ARCHITECTURES["sm_90"])
    assert choice.uses_descriptor == (how in ("contiguous", "unaligned"))
    assert (Ld < choice.launch.config.BN) == choice.launch.config.SHORT_DOCUMENTS


@pytest.mark.gpu
@pytest.mark.parametrize("how", LYING)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("d", [128, 100, 8])
def test_normalized_bits_do_not_depend_on_batch_or_layout(how, d, dtype):
    Q = torch.randn(20, 32, d, device="cuda", dtype=dtype)
    for Ld in (1, 30, 100):
        contiguous = torch.randn(400, Ld, d, device="cuda", dtype=dtype)
        D = _change_layout(contiguous, how)
        whole = lik_ops.maxsim(Q, D, normalize=True)
        assert torch.equal(whole, lik_ops.maxsim(Q, contiguous, normalize=True))
        assert torch.equal(whole, lik_ops.maxsim(_change_layout(Q, how), D, normalize=True))
        torch.testing.assert_close(whole, lik_ops.reference.maxsim(Q, D, normalize=True), rtol=1e-3, atol=1e-3)
        for n, documents in ((1, 400), (1, 7), (2, 400), (4, 400), (8, 7)):
            part = D[:documents] if how != "unaligned" else _change_layout(D[:documents], how)
            assert torch.equal(lik_ops.maxsim(Q[:n], part, normalize=True), whole[:n, :documents]), (Ld, n, documents)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("Lq", [1, 20, 32, 64, 128, 300])
def test_every_tile_gives_the_same_bits(dtype, normalize, Lq):
    """Few query rows and few documents use other tiles than many."""
    for Ld, d, masked in ((1, 128, False), (63, 128, True), (64, 40, False), (300, 128, True)):
        mask = "holes" if masked else "none"
        p = Problem(Nq=20, Nd=400, Lq=Lq, Ld=Ld, d=d, dtype=dtype, q_mask=mask, d_mask=mask, weight=masked)
        x = build(Problem(**{**p.__dict__, "normalize": normalize, "values": "normal"}), "cuda")

        def run(n, documents, x=x):
            q_mask, weight = (None if t is None else t[:n] for t in (x.q_mask, x.q_weight))
            d_mask = None if x.d_mask is None else x.d_mask[:documents]
            arguments = (x.Q[:n], x.D[:documents], q_mask, d_mask)
            return [
                lik_ops.maxsim(*arguments, q_weight=weight, normalize=normalize),
                *lik_ops.maxsim_with_argmax(*arguments, q_weight=weight, normalize=normalize),
            ]

        expected = run(20, 400)
        assert torch.equal(expected[0], expected[1])
        for n, documents in ((1, 400), (1, 7), (2, 400), (2, 7), (4, 400), (8, 7)):
            for actual, whole in zip(run(n, documents), expected, strict=True):
                assert torch.equal(actual, whole[:n, :documents]), (n, documents, Ld, d)
