"""Test small functions that peers have too: scorer methods, lowest scores, corpus scores, packing, and warmup."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lik_ops
from lik_ops import reference

ROOT = Path(__file__).parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
close = torch.testing.assert_close
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


def assert_equal(found, expected):
    close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_scores_without_gradients(device):
    scorer = lik_ops.MaxSimScorer(normalize=True)
    Q = torch.randn(2, 3, 8, device=device, requires_grad=True)
    D = torch.randn(4, 5, 8, device=device, requires_grad=True)
    assert_equal(scorer.score(Q, D), scorer(Q, D).detach())
    assert not scorer.score(Q, D).requires_grad and scorer(Q, D).requires_grad


def test_scorer_retrieve_uses_its_normalize_option(device):
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(9, 5, 8, device=device)
    d_mask = torch.rand(9, 5, device=device) > 0.3
    for normalize in (True, False):
        scorer = lik_ops.MaxSimScorer(normalize=normalize)
        found = scorer.retrieve(Q, D, 3, None, d_mask, chunk=2)
        assert_equal(found, lik_ops.retrieve(Q, D, 3, d_mask=d_mask, normalize=normalize))


def test_padding_by_token_ids(device):
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(4, 5, 8, device=device)
    q_ids = torch.tensor([[5, 6, 7], [5, 9, 9]], device=device)
    d_ids = torch.tensor([[1, 9, 2, 9, 9]] * 3 + [[9] * 5], device=device)
    scorer = lik_ops.MaxSimScorer(pad_id=9)
    close(scorer.forward_with_ids(Q, D, q_ids, d_ids), reference.maxsim(Q, D, q_ids != 9, d_ids != 9))
    assert "pad_id=9" in repr(scorer) and "pad_id" not in repr(lik_ops.MaxSimScorer())
    with pytest.raises(ValueError, match="pad_id: expected"):
        lik_ops.MaxSimScorer().forward_with_ids(Q, D, q_ids, d_ids)


@pytest.mark.parametrize(
    ("dtype", "pad_id"), [(torch.uint8, 256), (torch.int8, 256), (torch.int16, 2**16), (torch.int32, 2**32)]
)
def test_pad_id_beyond_the_ids_dtype_masks_nothing(device, dtype, pad_id):
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(4, 5, 8, device=device)
    q_ids, d_ids = (torch.zeros(x.shape[:2], dtype=dtype, device=device) for x in (Q, D))
    assert torch.equal(lik_ops.MaxSimScorer(pad_id=pad_id).forward_with_ids(Q, D, q_ids, d_ids), lik_ops.maxsim(Q, D))


def sources(D: torch.Tensor):
    """Yield the same documents dense, packed, as a list, and on the host."""
    flat, cu = D.flatten(0, 1), torch.arange(len(D) + 1) * D.shape[1]
    yield D, {}
    yield flat, {"cu_seqlens_d": cu}
    yield list(D), {}
    yield D.cpu(), {}
    yield D.cpu().numpy(), {}
    yield flat.cpu().numpy(), {"cu_seqlens_d": cu}


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_streamed_scores_match_maxsim_for_every_source(device, chunk):
    pytest.importorskip("numpy", reason="arrays are numpy's")
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(11, 5, 8, device=device)
    q_mask, weight = torch.tensor([[1, 0, 1], [1, 1, 0]], device=device), torch.rand(2, 3, device=device)
    for documents, options in sources(D):
        assert_equal(lik_ops.maxsim_streamed(Q, documents, chunk=chunk, **options), lik_ops.maxsim(Q, D))
        known = {"q_mask": q_mask, "q_weight": weight, "normalize": True}
        found = lik_ops.maxsim_streamed(Q, documents, chunk=chunk, **options, **known)
        close(found, reference.maxsim(Q, D, q_mask.bool(), q_weight=weight, normalize=True))
        assert_equal(lik_ops.maxsim_streamed(Q[0], documents, chunk=chunk, **options), lik_ops.maxsim(Q[0], D))
        assert lik_ops.maxsim_streamed(Q.requires_grad_(), documents, **options).requires_grad is False
        Q = Q.detach()
    masked = lik_ops.maxsim_streamed(Q, D.cpu(), d_mask=torch.rand(11, 5) > 2, chunk=chunk)
    assert (masked == -INF).all()
    assert lik_ops.maxsim_streamed(Q, D[:0]).shape == (2, 0)


def test_streamed_scores_of_a_corpus_match_maxsim(tmp_path):
    pytest.importorskip("safetensors", reason="a Corpus keeps its tokens in safetensors")
    documents = [torch.randn(n, 8) for n in (3, 0, 7)]
    corpus = lik_ops.Corpus.create(tmp_path / "corpus", d=8, dtype=torch.float32)
    corpus.append(documents)
    assert_equal(lik_ops.maxsim_streamed(torch.ones(2, 3, 8), corpus), lik_ops.maxsim(torch.ones(2, 3, 8), documents))


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_retrieve_returns_the_lowest_scores_in_order(device, chunk):
    """NaN comes first, then empty documents, then ascending scores with ties by index, for every source."""
    pytest.importorskip("numpy", reason="arrays are numpy's")
    Q, D = torch.ones(2, 3, 8, device=device), torch.randn(11, 5, 8, device=device)
    D[3], D[7] = D[6], NAN
    lowest = torch.cat(
        [D.new_tensor([7]).long(), *(lik_ops.maxsim(Q, D)[0].nan_to_num(INF).sort(stable=True)[1][:-1],)]
    )
    for documents, options in sources(D):
        scores, indices = lik_ops.retrieve(Q, documents, 11, chunk=chunk, largest=False, **options)
        assert indices.tolist() == [lowest.tolist()] * 2
        assert_equal(scores, lik_ops.maxsim(Q, D).gather(1, indices))
        some = lik_ops.retrieve(Q[0], documents, 4, chunk=chunk, largest=False, sorted=False, **options)
        assert_equal(some, (scores[0, :4], indices[0, :4]))
    d_mask = torch.ones(11, 5, dtype=torch.bool, device=device)
    d_mask[9] = False
    assert lik_ops.retrieve(Q, D, 2, d_mask=d_mask, largest=False)[1].tolist() == [[7, 9]] * 2
    assert lik_ops.retrieve(Q, D[:0], 2, largest=False)[1].shape == (2, 0)


def test_pack_padded_scores_match_maxsim_padded(device):
    B, C, Lq, Ld = 3, 4, 5, 6
    Q = torch.randn(B, Lq, 8, device=device, requires_grad=True)
    D = torch.randn(B, C, Ld, 8, device=device, requires_grad=True)
    n_q, n_d = torch.randint(0, Lq + 1, (B,), device=device), torch.randint(0, Ld + 1, (B, C), device=device)
    packed = lik_ops.pack_padded(Q, D, n_q, n_d)
    assert packed.Q.shape[0] == n_q.sum() and packed.D.shape[0] == n_d.sum()
    bounds = {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_d": packed.cu_seqlens_d, "max_seqlen_q": Lq}
    scores = lik_ops.maxsim_pair_list(packed.Q, packed.D, packed.pairs, **bounds)
    expected = lik_ops.maxsim_padded(Q, D, n_q, n_d)
    close(scores.view(B, C), expected)
    upstream = torch.randn(B, C, device=device)
    found, wanted = (
        torch.autograd.grad((s.view(B, C) * upstream).nan_to_num(neginf=0).sum(), (Q, D)) for s in (scores, expected)
    )
    close(found, wanted)
    with pytest.raises(ValueError, match=r"doc_lengths: expected 0 to 6 tokens, got 7 at \[0, 0\]"):
        lik_ops.pack_padded(Q, D, n_q, n_d + 7 - n_d[0, 0])


def test_errors_name_invalid_token_ids():
    scorer, Q, D = lik_ops.MaxSimScorer(pad_id=0), torch.randn(1, 3, 4), torch.randn(2, 2, 4)
    ids = torch.ones(1, 3, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64)
    scorer.forward_with_ids(Q, D, *ids)
    with pytest.raises(ValueError, match="q_ids: expected shape"):
        scorer.forward_with_ids(Q, D, torch.ones(1, 4, dtype=torch.int64), ids[1])
    for wrong in (ids[1].float(), ids[1].bool(), ids[1].to_sparse(), None):
        with pytest.raises(TypeError, match="d_ids: expected"):
            scorer.forward_with_ids(Q, D, ids[0], wrong)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_quantization_ignores_the_default_dtype(kind):
    tokens = torch.randn(300, 8)
    before = torch.get_default_dtype()

    def made():
        codec = lik_ops.ResidualCodec.train(tokens, nbits=2, n_centroids=8)
        return [lik_ops.quantize(tokens, format) for format in ("int8", "uint8", "fp8_e4m3", "binary", codec)]

    expected = made()
    torch.set_default_dtype(kind)
    try:
        found = made()
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.dequantize(torch.float32), b.dequantize(torch.float32))


def test_dequantize_rejects_invalid_dtypes():
    small = lik_ops.quantize(torch.randn(2, 3, 4))
    for wrong in (torch.int8, [], 3):
        with pytest.raises(TypeError, match="dequantize: dtype: expected float16"):
            small.dequantize(wrong)


@pytest.mark.parametrize("own, region", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_half_lists_match_pairs_under_the_other_half_autocast(own, region):
    tokens = [torch.randn(n, 8).to(own) for n in (3, 2)]
    with torch.autocast("cpu", dtype=region):
        found = lik_ops.maxsim(tokens, tokens)
        expected = torch.stack([torch.stack([lik_ops.maxsim(q, d) for d in tokens]) for q in tokens])
    assert torch.equal(found, expected)


def test_nested_tensor_for_normalize_is_rejected():
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    with pytest.raises(TypeError, match="normalize: expected a bool, got a nested tensor"):
        lik_ops.maxsim(torch.randn(2, 3, 4), torch.randn(2, 3, 4), normalize=nested)


def test_warmup_returns_its_calls_and_times():
    calls = lik_ops.warmup("cpu", torch.float32, 8, 3, Nq=2, Ld=4, Nd=5, training=True, argmax=True, ragged=True)
    names = [said.split(",")[0] for said, _ in calls]
    packed = ("maxsim_varlen", "maxsim_candidates_varlen", "maxsim_pair_list", "maxsim_padded")
    assert names == ["maxsim"] * 2 + ["maxsim_with_argmax"] + [name for name in packed for _ in range(2)]
    assert all(seconds > 0 for _, seconds in calls)
    weighed = lik_ops.warmup("cpu", torch.float32, 8, 3, candidates=True, q_weight=True, ragged=True, Ld=4, Nd=(1, 2))
    assert len(weighed) == 10


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_warmup_calls_do_not_depend_on_grad_mode(around):
    def calls():
        return [said for said, _ in lik_ops.warmup("cpu", torch.float32, 8, 3, Ld=4, Nd=5, training=True, ragged=True)]

    expected = calls()
    with around():
        assert calls() == expected


@pytest.mark.parametrize("name", ["d", "Lq"])
def test_warmup_d_and_lq_must_be_positive_ints(name):
    with pytest.raises(TypeError, match=f"warmup: {name}: expected an int, got tuple"):
        lik_ops.warmup("cpu", torch.float32, **{"d": 8, "Lq": 3, name: (8, 16)})
    with pytest.raises(ValueError, match=f"warmup: {name}: expected 1 or more, got 0"):
        lik_ops.warmup("cpu", torch.float32, **{"d": 8, "Lq": 3, name: 0})


def test_warmup_from_the_command_line():
    sizes = ["--d", "8", "--Lq", "2", "3", "--Nd", "2", "--Ld", "5", "--top-k", "3"]
    command = [sys.executable, "-m", "lik_ops.warmup", "--device", "cpu", "--dtype", "float32", "--ragged", *sizes]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert said.count("maxsim_varlen") == 2 and "Q [1, 3, 8]" in said and "top 3" in said


def test_warmup_module_does_not_hide_the_function():
    code = "import torch, lik_ops, lik_ops.warmup; lik_ops.warmup('cpu', torch.float32, 8, 3)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
