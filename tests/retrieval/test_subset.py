"""Test that a search of a subset has the bits of a search of a corpus with only these documents."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lik_ops
from lik_ops import Corpus
from lik_ops.formats import table as formats
from lik_ops.retrieval import _retrieve, sources, subset, two_stage

from ..support.residual import random_codec
from .test_retrieve import DEVICES

pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")
NQ, ND, LD, D = 3, 40, 5, 16
FORMATS = [*formats.FORMATS, "codes"]
SLOW = ("rq4", "rq1")  # read as rq2 and binary are
KINDS = ["dense", "mask", "strided", "packed", "packed int32", "list", "nested", "array", "packed array", "corpus"]
KINDS += [f"{format} {layout}" for format in FORMATS for layout in ("dense", "packed", "corpus")]
kinds = pytest.mark.parametrize("kind", [pytest.param(x, marks=[pytest.mark.slow] * x.startswith(SLOW)) for x in KINDS])
LENGTHS = [(7 * i) % (LD + 1) for i in range(ND)]


def tokens():
    made = torch.nn.functional.normalize(torch.randn(ND, LD, D), dim=-1)
    made[9] = made[4]  # ties
    made[:, 0] = made[3, 0]
    return made


def take(kind, x, chosen, path):
    """Return D and the options of `retrieve` for some documents."""
    lengths = torch.tensor(LENGTHS)[chosen]
    listed = [x[i, : LENGTHS[i]] for i in chosen.tolist()]
    packed, cu_seqlens = torch.cat([x[0, :0], *listed]), torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
    inside = torch.arange(LD) < lengths[:, None]
    made = {
        "dense": lambda: (x[chosen], {}),
        "mask": lambda: (x[chosen], {"d_mask": inside}),
        "strided": lambda: (x[chosen].transpose(1, 2).contiguous().transpose(1, 2), {"d_mask": inside.byte()}),
        "packed": lambda: (packed, {"cu_seqlens_d": cu_seqlens}),
        "packed int32": lambda: (packed, {"cu_seqlens_d": cu_seqlens.int()}),
        "list": lambda: (listed, {}),
        "nested": lambda: (torch.nested.nested_tensor(listed, layout=torch.jagged) if listed else listed, {}),
        "array": lambda: (x[chosen].numpy(), {"d_mask": inside}),
        "packed array": lambda: (packed.numpy(), {"cu_seqlens_d": cu_seqlens}),
    }
    if kind in made:
        return made[kind]()
    format, _, layout = kind.rpartition(" ")
    torch.manual_seed(5)
    format = random_codec(D, 2) if format == "codes" else format or None
    if layout == "corpus":
        corpus = Corpus.create(path, D, torch.float32, format)
        for begin in range(0, len(listed), 7):
            corpus.append(listed[begin : begin + 7])
        return corpus, {}
    if layout == "dense":
        return lik_ops.quantize(x[chosen], format), {"d_mask": inside}
    return lik_ops.quantize(packed, format, cu_seqlens_d=cu_seqlens), {"cu_seqlens_d": cu_seqlens}


def remap_to_subset(found, chosen, width):
    """Return results of a search of some documents as results of a search of the subset."""
    scores, indices = found
    missing = width - scores.shape[-1]
    pad = torch.nn.functional.pad
    return pad(scores, (0, missing), value=-torch.inf), pad(chosen.to(indices.device)[indices], (0, missing), value=-1)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), (a, b)


CHOSEN = {
    "some": lambda: (torch.arange(ND) % 3 == 1).nonzero().flatten(),
    "run": lambda: torch.arange(8, 21),
    "one": lambda: torch.tensor([17]),
    "all": lambda: torch.arange(ND),
    "none": lambda: torch.arange(0),
}


def as_mask(chosen, count=ND):
    return torch.zeros(count, dtype=torch.bool).index_fill(0, chosen, True)


def as_indices(chosen):
    """Return indices in another order, some of them several times, and -1."""
    return torch.cat([chosen.flip(0), torch.tensor([-1]), chosen[:2]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", CHOSEN)
@kinds
def test_shared_subset_matches_search_of_its_documents(kind, which, device, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "choose_part_bytes", lambda device: 900)
    chosen, x, Q = CHOSEN[which](), tokens(), torch.randn(NQ, 4, D)
    at, (D_all, options) = _on(device), take(kind, x, torch.arange(ND), tmp_path / "a")
    D_some, fewer = take(kind, x, chosen, tmp_path / "b")
    for k in (1, 7, ND + 3):
        expected = lik_ops.retrieve(at(Q), at(D_some), k, **at(fewer))
        for chunk in (None, 4):
            found = lik_ops.retrieve(at(Q), at(D_all), k, subset=at(as_mask(chosen)), chunk=chunk, **at(options))
            assert_same(found, remap_to_subset(expected, chosen, min(k, ND)))
        given = as_indices(chosen)
        found = lik_ops.retrieve(at(Q), at(D_all), k, subset=given, **at(options))
        assert_same(found, remap_to_subset(expected, chosen, min(k, len(given))))
    one = lik_ops.retrieve(at(Q[1]), at(D_all), 7, subset=given.tolist(), normalize=False, **at(options))
    expected = lik_ops.retrieve(at(Q), at(D_some), 7, **at(fewer))
    assert_same(one, [y[1] for y in remap_to_subset(expected, chosen, min(7, len(given)))])


def _on(device):
    """Return a function that copies tensors to a device, also in options."""

    def at(x):
        if isinstance(x, dict):
            return {name: at(y) for name, y in x.items()}
        return x.to(device) if isinstance(x, (torch.Tensor, lik_ops.Quantized)) else x

    return at


@pytest.mark.parametrize("device", DEVICES)
@kinds
def test_per_query_subsets_match_searches_of_their_documents(kind, device, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "choose_part_bytes", lambda device: 900)
    x, Q, at = tokens(), torch.randn(4, 4, D), _on(device)
    own = [CHOSEN[which]() for which in ("some", "run", "none", "one")]
    mask = torch.stack([as_mask(chosen) for chosen in own])
    indices = torch.full((4, 21), -1)
    for row, chosen in zip(indices, own, strict=True):
        row[: len(chosen)] = chosen.flip(0)
    D_all, options = take(kind, x, torch.arange(ND), tmp_path / "a")
    weight = {"q_weight": torch.rand(4, 4), "q_mask": torch.rand(4, 4) > 0.2}
    for k in (1, 7, ND + 3):
        expected = []
        for i, chosen in enumerate(own):
            D_some, fewer = take(kind, x, chosen, tmp_path / f"{k} {i}")
            per_query = {name: y[i : i + 1] for name, y in weight.items()}
            alone = lik_ops.retrieve(at(Q[i : i + 1]), at(D_some), k, **at(fewer), **at(per_query))
            expected.append(remap_to_subset(alone, chosen, ND))
        expected = [torch.cat(y) for y in zip(*expected, strict=True)]
        for which, width in ((mask, ND), (indices, 21)):
            for chunk in (None, 4):
                options_now = {"chunk": chunk, "subset": at(which), **options, **weight}
                found = lik_ops.retrieve(at(Q), at(D_all), k, **at(options_now))
                assert_same(found, [y[:, : min(k, width)] for y in expected])


@pytest.mark.parametrize("kind", ["dense", "mask", "packed", "array", "corpus"])
def test_lowest_scores_of_subset_match_search_of_its_documents(kind, tmp_path):
    x, Q = tokens(), torch.randn(2, 4, D)
    own = [CHOSEN["some"](), CHOSEN["run"]()]  # most parts have documents of one query only
    D_all, options = take(kind, x, torch.arange(ND), tmp_path / "a")
    mask = torch.stack([as_mask(chosen) for chosen in own])
    for k, chunk in itertools.product((2, 20), (None, 1, 4)):
        expected = []
        for i, chosen in enumerate(own):
            D_some, fewer = take(kind, x, chosen, tmp_path / f"{k} {chunk} {i}")
            expected.append(remap_to_subset(lik_ops.retrieve(Q, D_some, k, largest=False, **fewer), chosen, k))
        found = lik_ops.retrieve(Q, D_all, k, largest=False, subset=as_mask(own[0]), chunk=chunk, **options)
        assert_same(found, expected[0])
        found = lik_ops.retrieve(Q, D_all, k, largest=False, subset=mask, chunk=chunk, **options)
        assert_same(found, [torch.stack([a[0], b[1]]) for a, b in zip(*expected, strict=True)])


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("kind", ["dense", "packed", "array", "corpus"])
def test_results_are_not_wider_than_the_subset_of_a_query(kind, largest, tmp_path):
    """Each part of the documents may contribute as many results as a query has documents."""
    D_all, options = take(kind, tokens(), torch.arange(ND), tmp_path)
    for chunk in (None, 1, 4):
        subset = [[1], [ND - 2]]
        scores, indices = lik_ops.retrieve(
            torch.randn(2, 4, D), D_all, 10, largest=largest, subset=subset, chunk=chunk, **options
        )
        assert indices.tolist() == subset and scores.shape == (2, 1)


@pytest.mark.parametrize("layout", ["dense", "packed", "corpus"])
@pytest.mark.parametrize("n_candidates", [None, 6])
@pytest.mark.parametrize("format", ["int8", "uint8", "binary", "codes"])
def test_coarse_search_of_subset_matches_search_of_its_documents(format, n_candidates, layout, tmp_path):
    x, Q = tokens(), torch.randn(2, 4, D)
    own = [CHOSEN["some"](), CHOSEN["run"]()]

    def search(chosen, path, **options):
        D_given, given = take({"dense": "mask"}.get(layout, layout), x, chosen, path / "D")
        coarse, _ = take(f"{format} {'packed' if layout == 'corpus' else layout}", x, chosen, path)
        return lik_ops.retrieve(Q, D_given, 8, coarse=coarse, n_candidates=n_candidates, **given, **options)

    expected = []
    for i, chosen in enumerate(own):
        found = search(chosen, tmp_path / f"{i}")
        expected.append((*remap_to_subset(found[:2], chosen, 8), *found[2:]))
    assert_same(search(torch.arange(ND), tmp_path / "a", subset=own[0]), expected[0])
    mask = torch.stack([as_mask(chosen) for chosen in own])
    found = search(torch.arange(ND), tmp_path / "b", subset=mask)
    assert_same(found, [torch.stack([a[0], b[1]]) for a, b in zip(*expected, strict=True)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("stages", [{"n_probe": 2}, {"n_candidates": 9}, {"n_probe": 3, "n_candidates": 9}])
def test_staged_search_of_subset_matches_search_of_its_documents(stages, layout, device, tmp_path):
    x, Q, at = tokens(), torch.randn(2, 4, D), _on(device)
    own = [CHOSEN["some"](), CHOSEN["run"](), CHOSEN["none"]()]
    D_all, options = take(f"codes {layout}", x, torch.arange(ND), tmp_path)
    expected = []
    for chosen in own:
        D_some, fewer = take(f"codes {layout}", x, chosen, tmp_path)
        found = lik_ops.retrieve(at(Q), at(D_some), 8, **stages, **at(fewer))
        scores, indices = found
        lookup = torch.cat([chosen, torch.tensor([-1])]).to(indices.device)
        expected.append(remap_to_subset((scores, indices), lookup, 8))
    for which, result in ((own[0], expected[0]), (as_mask(own[1]), expected[1]), (as_mask(own[2]), expected[2])):
        assert_same(lik_ops.retrieve(at(Q), at(D_all), 8, subset=at(which), **stages, **at(options)), result)
    mask = torch.stack([as_mask(chosen) for chosen in own[:2]])
    found = lik_ops.retrieve(at(Q), at(D_all), 8, subset=at(mask), **stages, **at(options))
    assert_same(found, [torch.stack([a[0], b[1]]) for a, b in zip(*expected[:2], strict=True)])


@pytest.mark.parametrize("format", [None, "int8"])
def test_rerank_returns_documents_of_the_subset(format, tmp_path):
    x, Q = tokens(), torch.randn(NQ, 4, D)
    corpus, _ = take("corpus" if format is None else f"{format} corpus", x, torch.arange(ND), tmp_path)
    candidates, allowed = torch.randint(-1, ND, (NQ, 12)), torch.rand(NQ, ND) > 0.5
    for mask in (allowed, allowed[0]):
        kept = torch.where((candidates >= 0) & mask.expand(NQ, ND).gather(1, candidates.clamp(min=0)), candidates, -1)
        expected = corpus.rerank(Q, kept, 9)
        assert_same(corpus.rerank(Q, candidates, 9, subset=mask), expected)
        listed = mask.nonzero().flatten() if mask.dim() == 1 else torch.where(mask, torch.arange(ND), -1)
        assert_same(corpus.rerank(Q, candidates, 9, subset=listed), expected)
    shared = corpus.rerank(Q, candidates[0], subset=allowed)
    kept = torch.where((candidates[0] >= 0) & allowed[:, candidates[0].clamp(min=0)], candidates[0], -1)
    assert_same(shared, corpus.rerank(Q, kept))
    assert (corpus.rerank(Q, candidates, subset=[])[1] == -1).all()


def test_documents_outside_the_subset_are_not_read(tmp_path):
    x, Q = tokens(), torch.randn(NQ, 4, D)
    chosen = CHOSEN["some"]()
    poisoned = x.clone()
    poisoned[~as_mask(chosen)] = torch.nan
    for kind in ("dense", "packed", "corpus"):
        D_some, fewer = take(kind, x, chosen, tmp_path / kind)
        D_all, options = take(kind, poisoned, torch.arange(ND), tmp_path / f"{kind} all")
        expected = remap_to_subset(lik_ops.retrieve(Q, D_some, 9, **fewer), chosen, 9)
        assert_same(
            lik_ops.retrieve(Q, D_all, 9, subset=chosen[:9].tolist() + chosen[9:].tolist(), **options), expected
        )
    read = []
    corpus, _ = take("corpus", x, torch.arange(ND), tmp_path / "read")
    for i in range(len(corpus._snapshot.manifest.shards)):
        file = corpus._snapshot.shard_file(i)
        file.tensors = lambda i=i, inner=file.tensors: read.append(i) or inner()
    assert len(corpus.lengths) == ND
    lik_ops.retrieve(Q, corpus, 5, subset=[8, 9, 22])
    assert set(read) == {1, 3}


@pytest.mark.parametrize("where", ["array", "list", "tensor", "bool list", "uint8"])
def test_subset_types_match_bool_mask(where):
    x, Q = tokens(), torch.randn(NQ, 4, D)
    chosen = CHOSEN["some"]()
    given = {
        "array": chosen.numpy().astype(np.int16),
        "list": chosen.tolist(),
        "tensor": chosen.int(),
        "bool list": as_mask(chosen).tolist(),
        "uint8": chosen.to(torch.uint8),
    }[where]
    assert_same(lik_ops.retrieve(Q, x, 5, subset=given), lik_ops.retrieve(Q, x, 5, subset=as_mask(chosen)))


WRONG = {
    "mask": (torch.ones(ND - 1, dtype=torch.bool), ValueError, r"subset: expected \[40\] or \[3, 40\], got \[39\]"),
    "masks": (torch.ones(2, ND, dtype=torch.bool), ValueError, r"subset: expected \[40\] or \[3, 40\], got \[2, 40\]"),
    "queries": (torch.zeros(2, 5).long(), ValueError, r"subset: expected \[K\] or \[3, K\], got \[2, 5\]"),
    "rank": (torch.zeros(3, 5, 1).long(), ValueError, r"subset: expected \[K\] or \[3, K\], got \[3, 5, 1\]"),
    "scalar": (3, ValueError, r"subset: expected \[K\] or \[3, K\], got \[\]"),
    "beyond": ([3, ND], ValueError, r"subset: expected indices of 40 documents, or -1, got 40 at \[1\]"),
    "negative": ([3, -2], ValueError, r"subset: expected indices of 40 documents, or -1, got -2 at \[1\]"),
    "float": (torch.ones(ND), TypeError, "subset: expected bools or integers, got torch.float32"),
    "text": ("abc", TypeError, "subset: expected bools or integers, got 'abc'"),
    "masked": (np.ma.masked_array([1, 2], [0, 1]), TypeError, "subset: expected an array without a mask"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("kind", ["dense", "array", "corpus", "int8 packed"])
def test_wrong_subset_raises(kind, case, tmp_path):
    given, error, message = WRONG[case]
    D_all, options = take(kind, tokens(), torch.arange(ND), tmp_path)
    with pytest.raises(error, match=rf"^retrieve: {message}"):
        lik_ops.retrieve(torch.randn(NQ, 4, D), D_all, 5, subset=given, **options)
    if kind == "corpus":
        with pytest.raises(error, match=rf"^Corpus.rerank: {message}"):
            D_all.rerank(torch.randn(NQ, 4, D), [1, 2], subset=given)


@given(
    rows=st.lists(st.lists(st.integers(-1, 9), max_size=12), min_size=1, max_size=4),
    begin=st.integers(0, 10),
    count=st.integers(0, 10),
)
def test_resolved_subset_is_sorted_and_limited_to_parts(rows, begin, count):
    width = max(map(len, rows))
    given = torch.tensor([row + [-1] * (width - len(row)) for row in rows]).view(len(rows), width)
    chosen = subset.resolve_subset("op", given, torch.empty(len(rows), 1, 1), 10, torch.device("cpu")).chosen
    expected = [sorted(set(row) - {-1}) for row in rows]
    assert [[x for x in row if x >= 0] for row in chosen.tolist()] == expected
    names, own = subset.list_union(chosen)
    part = subset.limit_to_part(own, begin, begin + count)
    inside = set(names.tolist()[begin : begin + count])
    found = [[int(names[x + begin]) for x in row if x >= 0] for row in part.tolist()]
    assert found == [[x for x in row if x in inside] for row in expected]


@pytest.mark.parametrize("kind", ["dense", "packed", "int8 packed", "codes dense"])
def test_untrimmed_subset_matches_and_too_large_indices_score_nan(kind, tmp_path, monkeypatch):
    """On a GPU the host sees neither the number of documents nor invalid indices."""
    x, Q = tokens(), torch.randn(NQ, 4, D)
    D_all, options = take(kind, x, torch.arange(ND), tmp_path)
    stages = {"n_probe": 2} if kind.startswith("codes") else {}
    mask = torch.stack([as_mask(CHOSEN[which]()) for which in ("some", "run", "none")])
    indices = torch.where(mask, torch.arange(ND), -1).flip(1)
    given = mask, mask[0], indices, indices[0]
    expected = [lik_ops.retrieve(Q, D_all, 9, subset=x, **options, **stages) for x in given]
    monkeypatch.setattr(subset, "_trim", lambda chosen: chosen)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    resolved = [subset.resolve_subset("op", x, Q, ND, Q.device) for x in given]
    bad = subset.resolve_subset("op", torch.tensor([3, ND + 4, -7, 3]), Q, ND, Q.device)
    monkeypatch.undo()
    assert bad.chosen.tolist() == [3, ND, ND + 4, -1]
    for each, wanted in zip(resolved, expected, strict=True):
        assert each.chosen.shape[-1] == ND
        monkeypatch.setattr(_retrieve, "resolve_subset", lambda *_, each=each: each)
        monkeypatch.setattr(two_stage, "resolve_subset", lambda *_, each=each: each)
        for chunk in (None, 4)[: 1 if stages else 2]:
            found = lik_ops.retrieve(Q, D_all, 9, subset=[0], chunk=chunk, **options, **stages)
            assert_same(found, wanted)
    monkeypatch.setattr(_retrieve, "resolve_subset", lambda *_: bad)
    monkeypatch.setattr(two_stage, "resolve_subset", lambda *_: bad)
    if not stages:
        scores, found = lik_ops.retrieve(Q, D_all, 9, subset=[0], **options)
        assert (found == torch.tensor([ND, ND + 4, 3, -1])).all()
        assert scores[:, :2].isnan().all() and scores[:, 2].isfinite().all() and (scores[:, 3] == -torch.inf).all()


def test_search_with_subset_compiles():
    x, Q = tokens(), torch.randn(NQ, 4, D)
    mask = as_mask(CHOSEN["some"]())
    search = torch.compile(
        lambda Q, D, subset: lik_ops.retrieve(Q, D, 5, subset=subset), fullgraph=True, backend="eager"
    )
    expected = lik_ops.retrieve(Q, x, 5, subset=mask)
    assert_same(search(Q, x, mask), expected)
    assert_same(search(Q, x, torch.stack([mask] * NQ)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["dense", "mask", "packed", "int8", "codes"])
def test_gpu_subset_search_is_exact_and_does_not_sync(layout, dtype):
    """At sizes of real kernels, with the bits of a search of the subset alone."""
    count, length, d = 3000, 60, 128
    x = torch.nn.functional.normalize(torch.randn(count, length, d), dim=-1).to("cuda", dtype)
    Q, mask = torch.randn(4, 32, d).to("cuda", dtype), torch.rand(4, count, device="cuda") < 0.1
    cu_seqlens = torch.arange(count + 1, device="cuda") * length
    made = {
        "dense": lambda: (x, {}),
        "mask": lambda: (x, {"d_mask": torch.rand(count, length, device="cuda") < 0.8}),
        "packed": lambda: (x.flatten(0, 1), {"cu_seqlens_d": cu_seqlens}),
        "int8": lambda: (lik_ops.quantize(x), {}),
        "codes": lambda: (lik_ops.quantize(x, random_codec(d, 2).to("cuda")), {}),
    }
    D_all, options = made[layout]()
    stages = [{}, {"n_probe": 2}] if layout == "codes" else [{}]
    listed = torch.where(mask, torch.arange(count, device="cuda"), -1)
    for which, stage in [(y, z) for y in (mask, mask[0], listed, listed[0]) for z in stages]:
        known = {"subset": which, **options, **stage}
        expected = lik_ops.retrieve(Q, D_all, 10, **known, return_argmax=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = lik_ops.retrieve(Q, D_all, 10, **known, return_argmax=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_same(found, expected)
        for i in range(4):
            chosen = mask[i if which.dim() == 2 else 0].nonzero().flatten()
            fewer = {"d_mask": options["d_mask"][chosen]} if layout == "mask" else {}
            some = x[chosen] if layout == "packed" else D_all[chosen]
            alone = lik_ops.retrieve(Q[i : i + 1], some, 10, **fewer, **stage)
            lookup = torch.cat([chosen, chosen.new_full((1,), -1)])
            assert_same([y[i : i + 1] for y in found[:2]], (alone[0], lookup[alone[1]]))
