"""Test the demo: its corpus, encoder, figures, and command line."""

from __future__ import annotations

import math
import re
import runpy
import sys
import types
import zlib
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch

DEMO = "the demo's packages: pip install '.[demo]'"
np = pytest.importorskip("numpy", reason=DEMO)
for package in ("bm25s", "rich", "safetensors", "tqdm"):
    pytest.importorskip(package, reason=DEMO)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import docstring_corpus  # noqa: E402
import hashed_encoder  # noqa: E402
import search_docstrings  # noqa: E402
from evaluation import known_item  # noqa: E402
from evaluation.model_encoder import ModelEncoder  # noqa: E402
from hashed_encoder import HashedEncoder, split_words, word_vector  # noqa: E402
from token_batch import TokenBatch  # noqa: E402

QUESTION = "find close matches to a misspelled word in a list"
ANSWER = "difflib.get_close_matches"


@pytest.fixture(scope="module")
def stdlib() -> list[docstring_corpus.Docstring]:
    return docstring_corpus.collect_docstrings()


def sample_pool(docstrings: list[docstring_corpus.Docstring]) -> list[docstring_corpus.Docstring]:
    return search_docstrings.shuffled(docstrings, seed=0)[: search_docstrings.EVALUATION_POOL]


# corpus


def test_standard_library_is_large_enough(stdlib):
    assert 1000 <= len(stdlib) <= 3000
    assert len({docstring.summary for docstring in stdlib}) == len(stdlib)
    for docstring in stdlib:
        assert 5 <= len(docstring.summary.split()) <= 30
        assert 30 <= len(docstring.body.split()) <= 180


def test_names_are_qualified(stdlib):
    names = {docstring.name for docstring in stdlib}
    assert {ANSWER, "subprocess.run", "asyncio.locks.Condition.notify"} <= names


def test_sources_are_read_selectively(tmp_path, monkeypatch):
    body = "words of the body " * 10
    source = f'''
def outer():
    """Five words with `some` *markup*: here.

    >>> *{body}*
    """
    if True:
        class Inner:
            """Another summary of five words.

            Another {body}
            """
def same_summary():
    """Five words with some markup here.

    Something else, {body}
    """
def same_body():
    """A summary that nobody wrote before.

    {body}
    """
def short_body():
    """A summary of enough words here.

    Too short.
    """
def no_body():
    """A docstring without a second paragraph."""
'''
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "__init__.py").write_text(source)
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "test_sub.py").write_text(source.replace("Another", "Tested"))
    monkeypatch.setattr(docstring_corpus, "_roots", lambda packages: [(tmp_path, "pkg")])

    found = docstring_corpus.collect_docstrings()

    assert [docstring.name for docstring in found] == ["pkg.sub.outer", "pkg.sub.outer.Inner"]
    assert found[0].summary == "Five words with some markup here."
    assert found[0].body == " ".join(body.split())


def test_error_names_the_unknown_package():
    with pytest.raises(ValueError, match="no_such_package_here"):
        docstring_corpus.collect_docstrings(["no_such_package_here"])


# encoder


def formula(word: str) -> np.ndarray:
    def gaussian(text: str) -> np.ndarray:
        return np.random.default_rng(zlib.crc32(text.encode())).standard_normal(128)

    marked = f"<{word}>"
    grams = [marked] + [marked[i : i + n] for n in (3, 4, 5) for i in range(len(marked) - n + 1)]
    vector = 2 * gaussian("W" + marked) + sum(gaussian(gram) for gram in grams) / math.sqrt(len(grams))
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("word", ["a", "of", "the", "coroutine", "3", "aaaaaaa"])
def test_word_vector_follows_its_formula(word):
    assert word_vector(word).dtype == np.float32
    np.testing.assert_allclose(word_vector(word), formula(word), rtol=0, atol=1e-6)


def test_encoding_is_deterministic_and_normalized(stdlib):
    texts = [docstring.text for docstring in stdlib[:50]]
    first = HashedEncoder().encode_documents(texts)
    hashed_encoder.word_vector.cache_clear()
    hashed_encoder.gram_vector.cache_clear()
    second = HashedEncoder().encode_documents(texts[::-1])

    assert first.embeddings.dtype == torch.float32
    assert first.embeddings.shape == (50, first.mask.shape[1], 128)
    norms = first.embeddings.norm(dim=-1)[first.mask]
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-5)
    assert torch.equal(first.embeddings[first.mask], second.embeddings.flip(0)[second.mask.flip(0)])


def test_mask_keeps_the_words_and_lengths_are_capped():
    encoder = HashedEncoder()
    texts = ["one two", "", "word " * 500]
    documents, queries = encoder.encode_documents(texts), encoder.encode_queries(texts)
    assert documents.mask.sum(dim=1).tolist() == [2, 0, 180]
    assert queries.mask.sum(dim=1).tolist() == [2, 0, 32]
    assert documents.tokens[0] == ["one", "two"]
    assert documents.mask[0, :2].all()


def test_weights_are_inverse_document_frequencies():
    encoder = HashedEncoder()
    encoder.fit(["red green red", "green", "green blue"])
    weight = encoder.encode_queries(["red green unseen", "blue"]).weight
    expected = [[math.log(1 + 2.5 / 1.5), math.log(1 + 0.5 / 3.5), math.log(4)], [math.log(1 + 2.5 / 1.5), 0, 0]]
    torch.testing.assert_close(weight, torch.tensor(expected))


# figures


def test_ties_count_against_the_target():
    scores = torch.tensor([[3.0, 3.0, 1.0], [5.0, 4.0, 4.0], [0.0, 0.0, 1.0]])
    assert known_item.known_item_ranks(scores).tolist() == [2, 3, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_ranks_reject_non_finite_scores(bad):
    scores = torch.zeros(2, 3)
    scores[1, 2] = bad
    with pytest.raises(ValueError, match="finite"):
        known_item.known_item_ranks(scores)


def test_constant_scores_have_zero_mrr_and_hit():
    result = known_item.evaluate("constant", lambda: torch.ones(20, 50))
    assert (result.mrr, result.hit) == (0.0, 0.0)


def test_standard_library_known_items(stdlib):
    """The standard library alone is a hard pool, also for BM25, because many of its docstrings are near copies."""
    pool = sample_pool(stdlib)
    maxsim, bm25 = known_item.evaluate_known_items(HashedEncoder(), pool, 300)
    assert len(pool) == 1000
    assert bm25.mrr >= 0.45
    assert maxsim.mrr >= 0.40
    assert maxsim.mrr >= 0.75 * bm25.mrr


def test_idf_weights_improve_mrr(stdlib):
    pool = sample_pool(stdlib)[:400]
    bodies = [docstring.body for docstring in pool]
    encoder = HashedEncoder()
    encoder.fit(bodies)
    queries = encoder.encode_queries([docstring.summary for docstring in pool[:100]])
    unweighted = TokenBatch(queries.tokens, queries.embeddings, queries.mask)
    weighted_mrr, plain_mrr = (
        known_item.evaluate("MaxSim", partial(known_item.score_documents, encoder, batch, bodies)).mrr
        for batch in (queries, unweighted)
    )
    assert weighted_mrr >= plain_mrr + 0.05


MISSING = sorted(set(docstring_corpus.PACKAGES) - set(docstring_corpus.installed()))


@pytest.mark.skipif(bool(MISSING), reason=f"the figure is that of a corpus with {', '.join(MISSING)}, not installed")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="the figure is that of the docstrings of torch 2.13 and later")
@pytest.mark.slow
@pytest.mark.parametrize(("step", "least"), [(4, 0.61), (1, 0.64)])
def test_known_items_of_all_packages(step, least, monkeypatch):
    """Every fourth file of each package is a separate pool with its own figure, because parsing is most of the time."""
    files = docstring_corpus._source_files
    monkeypatch.setattr(docstring_corpus, "_source_files", lambda *root: islice(files(*root), 0, None, step))
    pool = sample_pool(docstring_corpus.collect_docstrings(docstring_corpus.PACKAGES))
    maxsim, bm25 = known_item.evaluate_known_items(HashedEncoder(), pool, 300)
    assert len(pool) == 1000
    assert {docstring.name.split(".")[0] for docstring in pool}.issuperset(docstring_corpus.PACKAGES)
    assert maxsim.mrr >= least
    assert bm25.mrr >= 0.64


# search


def test_search_finds_and_explains(stdlib):
    pool = [docstring for docstring in stdlib if docstring.name.split(".")[0] in ("difflib", "shutil", "textwrap")]
    hits = search_docstrings.search(HashedEncoder(), QUESTION, pool, top=3)
    assert len(hits) == 3
    assert hits[0].docstring.name == ANSWER
    assert hits[0].score > hits[1].score > hits[2].score
    matched = {(match.query_token, match.word) for match in hits[0].matches}
    assert {("close", "close"), ("matches", "matches")} <= matched
    for hit in hits:
        words = split_words(hit.docstring.text)
        assert all(match.word in words for match in hit.matches)
        assert sum(match.contribution for match in hit.matches) <= hit.score


def test_corpus_stores_every_token(stdlib, tmp_path, monkeypatch):
    monkeypatch.setattr(search_docstrings, "SHARD_SIZE", 3)
    monkeypatch.setattr(search_docstrings, "BATCH_SIZE", 2)
    encoder = HashedEncoder()
    corpus = search_docstrings.write_corpus(encoder, stdlib[:7], tmp_path)
    assert corpus.ids == [docstring.name for docstring in stdlib[:7]]
    packed, cu_seqlens = corpus.documents()
    for i, docstring in enumerate(stdlib[:7]):
        (expected,) = encoder.encode_documents([docstring.text]).embeddings
        assert torch.equal(packed[cu_seqlens[i] : cu_seqlens[i + 1]], expected.half())


def test_search_rejects_an_empty_question(stdlib):
    with pytest.raises(search_docstrings.EmptyQuestionError, match="question"):
        search_docstrings.search(HashedEncoder(), "???", stdlib[:10], top=3)


def test_snippet_shows_the_matches():
    match = search_docstrings.Match("needle", "needle", similarity=1.0, contribution=5.0)
    text = "hay " * 100 + "Needle hay " + "hay " * 100
    stretch = search_docstrings.snippet(text, [match])
    assert "Needle" in stretch
    assert len(stretch.split()) == search_docstrings.SNIPPET_WORDS
    assert "*Needle*" in search_docstrings.highlight(stretch, [match], styled=False).plain
    assert search_docstrings.highlight(stretch, [match], styled=True).plain == stretch


def test_command_line(stdlib, monkeypatch, capsys):
    """Run the file as a program in this process, with the docstrings that were collected already."""

    def collect(packages, progress):
        assert list(packages) == []
        return stdlib

    monkeypatch.setattr(docstring_corpus, "collect_docstrings", collect)
    command = [str(EXAMPLES / "search_docstrings.py"), *QUESTION.split()]
    monkeypatch.setattr(sys, "argv", [*command, "--stdlib-only", "--top", "3", "--queries", "20"])
    runpy.run_path(command[0], run_name="__main__")
    stdout = capsys.readouterr().out
    hits = re.findall(r"^ *\d+\. +[\d.]+ +(\S+)$", stdout, re.MULTILINE)
    assert len(hits) == 3
    assert hits[0] == ANSWER
    matched = re.findall(r"^ +matched: (.+)$", stdout, re.MULTILINE)
    assert len(matched) == 3
    assert "close -> close 1.00" in matched[0]
    assert "*close*" in stdout
    assert "20 queries over 1000 documents" in stdout
    assert "MaxSim" in stdout
    assert "BM25" in stdout
    assert "MaxSim, hashed encoder" in stdout
    assert "not trained" in stdout


@pytest.mark.parametrize("option", ["--top", "--pool", "--queries"])
def test_counts_must_be_positive(option, capsys):
    with pytest.raises(SystemExit):
        search_docstrings.main([option, "0"])
    assert f"{option}: expected a positive number" in capsys.readouterr().err


# models


def test_missing_model_folder_is_rejected(tmp_path):
    with pytest.raises(SystemExit, match="no folder at"):
        search_docstrings.main(["--model", str(tmp_path / "absent")])


def test_error_names_the_missing_model_library(tmp_path, monkeypatch):
    for name in ("sentence_transformers", "pylate", "pylate.models"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match="sentence-transformers"):
        search_docstrings.main(["--model", str(tmp_path)])


class TinyModel:
    """Stand-in for the models of both libraries. Token t is the unit vector t, and the token "," is not scored."""

    def __init__(self, path: str, *, device: str, local_files_only: bool) -> None:
        assert local_files_only
        self.tokenizer = types.SimpleNamespace(convert_ids_to_tokens=lambda ids: [chr(i + 97) for i in ids])

    def encode_query(self, texts, *, output_value):
        assert output_value is None
        return [self.row(text) for text in texts]

    encode_document = encode_query

    def encode(self, texts, *, is_query, convert_to_tensor, output_value):
        rows = self.encode_query(texts, output_value=output_value)
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        columns["masks"] = columns.pop("attention_mask")
        return columns

    def row(self, text):
        ids = torch.tensor([3 if letter == "," else ord(letter) - 97 for letter in text])
        return {"token_embeddings": torch.eye(4)[ids], "attention_mask": (ids != 3).int(), "input_ids": ids}


@pytest.mark.parametrize("library", ["sentence_transformers", "pylate"])
def test_model_encoder_keeps_mask_holes(library, tmp_path, monkeypatch):
    modules = {"sentence_transformers": None, "pylate": None, "pylate.models": None}
    if library == "pylate":
        modules |= {"pylate": types.ModuleType("pylate"), "pylate.models": types.SimpleNamespace(ColBERT=TinyModel)}
    else:
        modules[library] = types.SimpleNamespace(MultiVectorEncoder=TinyModel)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    encoder = ModelEncoder(str(tmp_path))
    documents = encoder.encode_documents(["a,b", "c"])
    assert documents.mask.tolist() == [[True, False, True], [True, False, False]]
    assert documents.tokens == [["a", "d", "b"], ["c"]]

    queries = encoder.encode_queries(["ab", "c"])
    assert queries.weight is None
    scores = known_item.score_documents(encoder, queries, ["a,b", "c", "b"])
    assert scores.tolist() == [[2.0, 0.0, 1.0], [0.0, 1.0, 0.0]]


# similarity map


@pytest.fixture
def similarity_map():
    pytest.importorskip("matplotlib", reason=DEMO)
    import similarity_map

    return similarity_map


def test_similarity_map_draws_the_best_docstring(similarity_map, stdlib, tmp_path, monkeypatch, capsys):
    few = [docstring for docstring in stdlib if docstring.name == ANSWER] + stdlib[:20]
    monkeypatch.setattr(similarity_map, "collect_docstrings", lambda: few)
    similarity_map.main([*QUESTION.split(), "--out", str(tmp_path / "map.png")])
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{ANSWER}: ")
    assert re.fullmatch(r" *matches -> matches \(1\.00\)", lines[3])
    similarity_map.main(["stop", "a", "thread", "--name", stdlib[0].name, "--out", str(tmp_path / "other.svg")])
    assert stdlib[0].name in capsys.readouterr().out and (tmp_path / "other.svg").exists()
    for arguments in (["..."], ["a", "--name", "no.such.docstring"]):
        with pytest.raises(SystemExit, match=r"question: expected at least one word|--name: expected a docstring"):
            similarity_map.main(arguments)


def test_pictures_show_every_word_and_mark_the_argmax(similarity_map):
    words = [f"w{i}" for i in range(100)]
    S = torch.rand(3, 100)
    figure = similarity_map.draw(S, S.argmax(1), ["a", "b", "c"], words, "title")
    *panels, _ = figure.axes
    assert [label.get_text() for axes in panels for label in axes.get_xticklabels()] == words
    columns = [round(axes.get_xlim()[1] + 0.5) for axes in panels]
    starts = [sum(columns[:i]) for i in range(len(panels))]
    marked = {
        (int(y), int(x) + start)
        for axes, start in zip(panels, starts, strict=True)
        for x, y in axes.collections[0].get_offsets()
    }
    assert marked == set(enumerate(S.argmax(1).tolist()))
