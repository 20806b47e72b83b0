"""Test that searches return the winners of `maxsim_with_argmax` for the documents that they return."""

import pytest
import torch

import lik_ops
from lik_ops.retrieval import sources

from .test_retrieve import DEVICES
from .test_subset import FORMATS, KINDS, LENGTHS, ND, NQ, D, _on, take, tokens

pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")
LQ = 4


def compute_argmax(kind, x, Q, path, **options):
    """Return the winners ``[Nq, Nd, Lq]`` of all documents."""
    format = kind.rpartition(" ")[0]
    if kind == "dense":
        return lik_ops.maxsim_with_argmax(Q, x, **options)[1]
    if format not in FORMATS:
        listed = [x[i, : LENGTHS[i]] for i in range(ND)]
        return lik_ops.maxsim_with_argmax(Q, listed, **options)[1]
    made, given = take(f"{format} dense", x, torch.arange(ND), path)
    return lik_ops.maxsim_with_argmax(Q, made, **given, **options)[1]


def gather_argmax(argmax, indices):
    """Return the winners of some documents, and -1 for none."""
    at = indices.clamp(min=0).unsqueeze(-1).expand(-1, -1, argmax.shape[-1])
    return argmax.gather(1, at.cpu()).masked_fill((indices < 0).cpu().unsqueeze(-1), -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_argmax_matches_maxsim_for_returned_documents(kind, device, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "choose_part_bytes", lambda device: 900)
    x, Q, at = tokens(), torch.randn(NQ, LQ, D), _on(device)
    given, options = take(kind, x, torch.arange(ND), tmp_path / "a")
    weight = {"q_weight": torch.rand(NQ, LQ), "q_mask": torch.rand(NQ, LQ) > 0.2}
    argmax = compute_argmax(kind, x, Q, tmp_path / "b", **weight)
    for k in (0, 6, ND + 3):
        for more in ({}, {"subset": torch.arange(ND) % 3 == 0}):
            expected = lik_ops.retrieve(at(Q), at(given), k, **at(options), **at(weight), **at(more))
            found = lik_ops.retrieve(at(Q), at(given), k, **at(options), **at(weight), **at(more), return_argmax=True)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
            assert found[2].dtype == torch.int64 and torch.equal(found[2].cpu(), gather_argmax(argmax, found[1]))
    found = lik_ops.retrieve(at(Q[1]), at(given), 6, **at(options), return_argmax=True)
    argmax = compute_argmax(kind, x, Q, tmp_path / "c")
    assert found[2].shape == (6, LQ) and torch.equal(found[2].cpu(), gather_argmax(argmax[1:2], found[1][None])[0])


@pytest.mark.parametrize("options", [{"largest": False}, {"normalize": True}, {"chunk": 3}])
def test_argmax_matches_maxsim_with_options(options):
    x, Q = tokens() * 3, torch.randn(NQ, LQ, D)
    found = lik_ops.retrieve(Q, x, 6, return_argmax=True, **options)
    kept = {name: value for name, value in options.items() if name == "normalize"}
    assert torch.equal(found[2], gather_argmax(lik_ops.maxsim_with_argmax(Q, x, **kept)[1], found[1]))


@pytest.mark.parametrize("layout", ["dense", "packed", "corpus"])
def test_argmax_matches_maxsim_with_stages(layout, tmp_path):
    x, Q = tokens(), torch.randn(NQ, LQ, D)
    kind = {"dense": "mask"}.get(layout, layout)
    given, options = take(kind, x, torch.arange(ND), tmp_path / "a")
    coarse, _ = take(f"int8 {'packed' if layout == 'corpus' else layout}", x, torch.arange(ND), tmp_path)
    expected = lik_ops.retrieve(Q, given, 6, coarse=coarse, **options)
    found = lik_ops.retrieve(Q, given, 6, coarse=coarse, return_argmax=True, **options)
    assert all(torch.equal(getattr(found, name), value) for name, value in expected._asdict().items())
    assert torch.equal(found.argmax, gather_argmax(compute_argmax(kind, x, Q, tmp_path), found.indices))
    if layout != "corpus":
        codes, options = take(f"codes {layout}", x, torch.arange(ND), tmp_path)
        _, indices, argmax = lik_ops.retrieve(Q, codes, 30, n_probe=1, return_argmax=True, **options)
        assert torch.equal(argmax, gather_argmax(compute_argmax("codes packed", x, Q, tmp_path), indices))


@pytest.mark.parametrize("format", ["", "int8 ", "codes "])
def test_rerank_argmax_matches_maxsim(format, tmp_path):
    x, Q = tokens(), torch.randn(NQ, LQ, D)
    corpus, _ = take(f"{format}corpus", x, torch.arange(ND), tmp_path / "a")
    argmax = compute_argmax(f"{format}corpus", x, Q, tmp_path / "b")
    candidates = torch.randint(-1, ND, (NQ, 12))
    for k in (5, None):
        found = corpus.rerank(Q, candidates, k, return_argmax=True)
        assert all(torch.equal(a, b) for a, b in zip(found[:2], corpus.rerank(Q, candidates, k), strict=True))
        assert torch.equal(found[2], gather_argmax(argmax, found[1]))
    one = corpus.rerank(Q[0], candidates[0], return_argmax=True)
    assert torch.equal(one[2], found[2][0])


def test_autocast_casts_both_passes():
    x, Q = tokens(), torch.randn(NQ, LQ, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = lik_ops.retrieve(Q, x, 6, return_argmax=True)
    argmax = lik_ops.maxsim_with_argmax(Q.bfloat16(), x.bfloat16())[1]
    assert torch.equal(found[2], gather_argmax(argmax, found[1]))


def test_retrieve_with_argmax_compiles():
    x, Q = tokens(), torch.randn(NQ, LQ, D)
    search = torch.compile(lambda Q, x: lik_ops.retrieve(Q, x, 5, return_argmax=True), fullgraph=True, backend="eager")
    expected = lik_ops.retrieve(Q, x, 5, return_argmax=True)
    assert all(torch.equal(a, b) for a, b in zip(search(Q, x), expected, strict=True))


def test_non_bool_return_argmax_raises(tmp_path):
    with pytest.raises(TypeError, match=r"^retrieve: return_argmax: expected a bool, got int"):
        lik_ops.retrieve(torch.randn(NQ, LQ, D), tokens(), 5, return_argmax=1)
    corpus, _ = take("corpus", tokens(), torch.arange(ND), tmp_path)
    with pytest.raises(TypeError, match=r"^Corpus.rerank: return_argmax: expected a bool, got int"):
        corpus.rerank(torch.randn(NQ, LQ, D), [1], return_argmax=1)
