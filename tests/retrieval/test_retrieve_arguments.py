"""Test arguments of `lik_ops.retrieve` and `Corpus`: lists of documents, and invalid values with their names."""

import re

import numpy as np
import pytest
import torch

import lik_ops
from lik_ops import Corpus
from lik_ops.retrieval import shards, sources

from .test_retrieve import DEVICES, assert_same, draw, packed, ranked

LENGTHS = [i % 7 for i in range(20)]


def ragged(device="cpu", dtype=torch.float32):
    """Return queries, documents of many lengths, and the best of them."""
    Q, D = draw(3, 20, 4, 6, 8, dtype, device)
    documents = [x[:n] for x, n in zip(D, LENGTHS, strict=True)]
    kept = (torch.arange(6) < torch.tensor(LENGTHS)[:, None]).to(device)
    return Q, documents, ranked(lik_ops.maxsim(Q, D, None, kept), 7)


# lists and nested tensors


def layouts(documents):
    yield documents
    yield tuple(documents)
    yield torch.nested.nested_tensor(documents, layout=torch.jagged)
    yield torch.nested.nested_tensor(documents, layout=torch.strided)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("chunk", [None, 3])
def test_lists_and_nested_tensors(device, elsewhere, chunk, monkeypatch):
    """Documents are on the device of Q, or are read part by part without padding (`progress` on a CPU)."""
    monkeypatch.setattr(sources, "choose_part_bytes", lambda device: 500)
    Q, documents, expected = ragged(device)
    where = [x.cpu() for x in documents] if elsewhere else documents
    for D in layouts(where):
        found = lik_ops.retrieve(Q, D, 7, chunk=chunk, progress=True if elsewhere else None)
        assert_same(found, expected)
        flat = lik_ops.retrieve(Q[0], D, 7, chunk=chunk)
        assert_same(flat, (expected[0][0], expected[1][0]))


@pytest.mark.parametrize("strict", [False, True])
def test_compiled_and_exported_searches_accept_lists(strict):
    Q, documents, expected = ragged()

    class Search(torch.nn.Module):
        def forward(self, Q, documents):
            return lik_ops.retrieve(Q, documents, 7)

    torch._dynamo.reset()
    assert_same(torch.compile(Search(), backend="aot_eager", fullgraph=True)(Q, documents), expected)
    program = torch.export.export(Search(), (Q, documents), strict=strict)
    assert_same(program.module()(Q, documents), expected)


def test_shard_target_accepts_a_list():
    """Test the target that `lik_ops.distributed.retrieve` searches."""
    Q, documents, expected = ragged()
    shard = shards.make_target("retrieve", documents, None, None, dict.fromkeys(("chunk", "n_probe", "n_candidates")))
    assert shard.size == 20 and [i for a, b in shard.split(3) for i in range(a, b)] == list(range(20))
    found = shard.best((Q, None, None), 7, 0, 20, {"chunk": None, "normalize": False, "progress": False})
    assert_same(found.best, expected)


BAD_LISTS = {
    "numbers": (dict(D=[[1.0]]), TypeError, r"D\[0\]: expected a Tensor, got list"),
    "arrays": (dict(D=[np.zeros((3, 8)), 1]), TypeError, r"D\[1\]: expected a Tensor, got int"),
    "ranks": (dict(D=[torch.zeros(8)]), ValueError, r"D: expected a list of \[L, d\]"),
    "dense": (dict(D=[torch.zeros(2, 3, 8)]), ValueError, r"D: expected a list of \[L, d\]"),
    "d": (dict(D=[torch.zeros(3, 8), torch.zeros(3, 7)]), ValueError, r"D\[1\]: expected \[L, 8\], got \[3, 7\]"),
    "other d": (dict(D=[torch.zeros(3, 7)]), ValueError, r"D\[0\]: expected d = 8 as in Q, got \[3, 7\]"),
    "dtypes": (dict(D=[torch.zeros(3, 8), torch.zeros(3, 8).half()]), TypeError, r"D\[1\]: expected the dtype"),
    "mask": (dict(d_mask=torch.ones(20, 6)), ValueError, "d_mask: expected None with a list or nested tensor D"),
    "offsets": (dict(cu_seqlens_d=torch.ones(3)), ValueError, "cu_seqlens_d: expected None with a list or nested"),
}


@pytest.mark.parametrize("progress", [None, True])
def test_empty_document_list_returns_empty_results(progress):
    scores, indices = lik_ops.retrieve(torch.randn(2, 3, 8), [], 3, progress=progress)
    assert scores.shape == indices.shape == (2, 0)


@pytest.mark.parametrize("case", BAD_LISTS)
def test_wrong_list_arguments_raise(case):
    arguments, error, message = BAD_LISTS[case]
    Q, documents, _ = ragged()
    for progress in (None, True):
        with pytest.raises(error, match=f"retrieve: {message}"):
            lik_ops.retrieve(**{"Q": Q, "D": documents, "top_k": 3, "progress": progress, **arguments})


# documents that are read part by part


@pytest.mark.parametrize("chunk", [None, 1])
def test_streaming_errors_report_the_full_argument_shape(chunk):
    Q, D = draw(2, 9, 3, 4, 8)
    tokens, cu_seqlens = packed(D, [4] * 9)
    for name, x in (("got [9, 4, 8]", {"D": D.numpy()}), ("got [36, 8]", {"D": tokens, "cu_seqlens_d": cu_seqlens})):
        with pytest.raises(ValueError, match=re.escape(f"retrieve: D: expected d = 7 as in Q [2, 3, 7], {name}")):
            lik_ops.retrieve(Q[..., :7], top_k=3, chunk=chunk, progress=True, **x)
    with pytest.raises(ValueError, match=r"d_mask: expected shape \[9, 4\] to match D \[9, 4, 8\], got \[9, 3\]"):
        lik_ops.retrieve(Q, D.numpy(), 3, chunk=chunk, d_mask=torch.ones(9, 3, dtype=torch.bool))


def test_dtype_mismatch_error_suggests_query_conversion():
    Q, D = draw(2, 9, 3, 4, 8)
    message = "D: expected the dtype of Q, torch.float32, got torch.float16: convert the queries, Q.to(torch.float16)"
    for documents in (D.half(), D.half().numpy(), list(D.half())):
        with pytest.raises(TypeError, match=re.escape(message)):
            lik_ops.retrieve(Q, documents, 3)
    assert lik_ops.retrieve(Q.to(torch.float16), D.half().numpy(), 3)[0].shape == (2, 3)


# invalid values


class Anything:
    """Object that no argument accepts, and that must not be printed."""

    def __repr__(self):
        raise AssertionError("printed")


THINGS = {
    "object": Anything(),
    "str": "no",
    "bytes": b"no",
    "float": 2.5,
    "nan": float("nan"),
    "complex": 1j,
    "bool": True,
    "dict": {},
    "set": {1},
    "generator": (i for i in range(3)),
    "iterator": iter([1]),
    "words": ["a", "b"],
    "nested list": [[1], [1, 2]],
    "array": np.zeros((3, 4)),
    "object array": np.array([None, "a"]),
    "structured": np.zeros(3, dtype=[("a", "f4")]),
    "masked array": np.ma.masked_array(np.zeros((9, 4, 8), np.float32), True),
    "other order of bytes": np.zeros((9, 4, 8), ">f4"),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(9, 4, 8, device="meta"),
    "scalar": torch.tensor(3.0),
    "bool tensor": torch.tensor(True),
    "complex tensor": torch.zeros(9, 4, 8, dtype=torch.complex64),
    "quantized": torch.zeros(9, 4, 8, dtype=torch.float8_e4m3fn),
    "large": np.zeros(100_000),
    "type": int,
    "function": len,
    "module": torch,
    "large int": 1 << 70,
}
ARGUMENTS = ("Q", "D", "top_k", "chunk", "q_mask", "d_mask", "cu_seqlens_d", "q_weight", "normalize", "progress")


def assert_errors_name_argument(op, name, things, call):
    """Assert that each of `things` raises a short TypeError or ValueError that names the argument."""
    assert things
    for kind in things:
        with pytest.raises((TypeError, ValueError), match=rf"^{op}: .*\b{name}\b") as raised:
            call(THINGS[kind])
            pytest.fail(f"{name}: {kind} was taken")
        assert len(str(raised.value)) < 200, f"{kind}: {raised.value}"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")
    corpus = Corpus.create(tmp_path_factory.mktemp("arguments") / "corpus", 8, torch.float32)
    corpus.append(list(torch.randn(9, 4, 8)), ids=range(9))
    return corpus


RIGHT = {
    "Q": {"meta", "other order of bytes"},  # meta returns shapes
    "top_k": {"large int"},  # all documents
    "chunk": {"large int"},
    "normalize": {"bool"},
    "progress": {"bool"},
    "path": {"str"},
    "verify": {"bool"},
    "documents": {"generator", "iterator"},
    "ids": {"generator", "iterator", "words"},
}


@pytest.mark.parametrize("where", ["tensor", "array", "packed", "packed array", "corpus", "coarse", "quantized"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_retrieve_errors_name_the_wrong_argument(name, where, corpus):
    Q, D = draw(2, 9, 3, 4, 8)
    given = {"Q": Q, "D": D.numpy() if "array" in where else D, "top_k": 3}
    if "packed" in where:
        given |= {"D": given["D"].reshape(36, 8), "cu_seqlens_d": torch.arange(10) * 4}
    elif where in ("corpus", "coarse"):
        given["D"] = corpus
    if where == "coarse":
        given["coarse"] = lik_ops.quantize(torch.stack(corpus[:]))
    elif where == "quantized":
        given |= {"Q": Q[0], "D": lik_ops.quantize(D)}
    things = THINGS.keys() - RIGHT.get(name, set())
    assert_errors_name_argument("retrieve", name, things, lambda thing: lik_ops.retrieve(**{**given, name: thing}))


CALLS = {
    "create": ("Corpus.create", {"path": "unused", "d": 8, "dtype": torch.half}),
    "create quantized": (
        "Corpus.create",
        {"path": "unused", "d": 8, "dtype": torch.half, "format": "int8", "scale": "token"},
    ),
    "quantize": ("Corpus.quantize", {"path": "unused", "format": "int8", "scale": "document"}),
    "open": ("Corpus.open", {"path": "unused", "verify": False}),
    "documents": ("Corpus.documents", {"begin": 0, "end": 1}),
    "append": ("Corpus.append", {"documents": [torch.zeros(3, 8)], "ids": [3]}),
    "append packed": ("Corpus.append", {"documents": torch.zeros(3, 8), "ids": [1, 2], "lengths": [1, 2]}),
}


@pytest.mark.parametrize("call", CALLS)
def test_corpus_errors_name_the_wrong_argument(call, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    op, given = CALLS[call]
    for name in given:
        things = THINGS.keys() - RIGHT.get(name, set())
        assert_errors_name_argument(
            op, name, things, lambda x, name=name: getattr(corpus, call.split()[0])(**{**given, name: x})
        )
    assert not list(tmp_path.iterdir()), "nothing is made"
    assert len(Corpus.open(corpus.path)) == 9, "nothing is committed"


BAD = {
    "sum": (dict(documents=torch.zeros(0, 8), lengths=[1 << 62] * 4), ValueError, "lengths: expected .* 0 tokens"),
    "unsigned": (
        dict(documents=torch.zeros(0, 8), lengths=np.array([1 << 63, 1 << 63], np.uint64)),
        TypeError,
        "lengths: expected integers of int64, got 9223372036854775808",
    ),
    "ids": (dict(documents=[torch.zeros(1, 8)] * 3, ids="abc"), TypeError, "ids: expected a list of str or int, got s"),
    "masked": (
        dict(documents=torch.zeros(2, 8), lengths=np.ma.masked_array([2], [True])),
        TypeError,
        "lengths: expected an array without a mask",
    ),
    "mixed": (dict(documents=[torch.zeros(1, 8)] * 2, ids=[1, "a"]), TypeError, "ids: .* all alike, got int, str"),
    "dtype": (dict(documents=[torch.zeros(1, 8).half()]), TypeError, r"convert it with .to\(torch.float32\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_append_raises_and_commits_nothing(case, tmp_path):
    arguments, error, message = BAD[case]
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    with pytest.raises(error, match=f"Corpus.append: .*{message}"):
        corpus.append(**arguments)
    assert len(Corpus.open(tmp_path)) == 0


def test_append_accepts_iterators_and_nested_tensors(tmp_path):
    corpus = Corpus.create(tmp_path, 8, torch.float32)
    documents = [torch.randn(n, 8) for n in (3, 0, 2)]
    corpus.append((x for x in documents), ids=(str(i) for i in range(3)))
    corpus.append(torch.nested.nested_tensor(documents, layout=torch.jagged), ids=("x", "y", "z"))
    assert corpus.ids == ["0", "1", "2", "x", "y", "z"]
    assert torch.equal(corpus.documents()[0], torch.cat(documents * 2))
