"""Search the docstrings of the installed Python packages with late interaction.

    python examples/search_docstrings.py
    python examples/search_docstrings.py how do I wait for several coroutines --top 3 --no-eval

Writes the embeddings of all docstrings to a corpus on disk, retrieves from it, and prints the best docstrings with the
words that matched. Then prints how often the first paragraph of a docstring finds the rest of it, compared with BM25.
The default encoder is hashed and not trained, so BM25 ranks better. ``--model`` accepts a trained encoder. Needs
``pip install ".[demo]"`` and downloads nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from missing_packages import explain_missing

import lik_ops

with explain_missing('".[demo]"'):
    import numpy as np
    from docstring_corpus import Docstring, collect_docstrings, installed, shuffled
    from evaluation.known_item import BATCH_SIZE, EVALUATION_POOL, Evaluation, evaluate_known_items
    from evaluation.model_encoder import ModelEncoder
    from hashed_encoder import WORD, HashedEncoder
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from token_batch import TokenBatch, TokenEncoder
    from tqdm import tqdm

DEFAULT_QUESTION = "run a command in a subprocess and capture its output"
SHARD_SIZE = 20 * BATCH_SIZE  # documents
SNIPPET_WORDS = 40
MIN_SIMILARITY = 0.4  # a hashed match below it is chance, because the maximum is over many unrelated words
MIN_SHARE = 0.2  # of the largest contribution, to exclude words like "the"
PIECE_MARKERS = "#▁Ġ"  # prefixes of pieces in tokenizers
MATCHES_SHOWN = 8
HASHED_NOTE = (
    "The hashed encoder is not trained. The vector of a word is random and depends on its spelling alone, so it matches"
    " equal words only, which BM25 weighs better. Trained models match meanings: pass the folder of one with --model."
    " The seconds include encoding or indexing."
)
INDENT = " " * 4


class EmptyQuestionError(ValueError):
    """The question contains no word to search for."""


@dataclass(frozen=True)
class Match:
    """A query token and the document word with its maximum similarity."""

    query_token: str
    word: str
    similarity: float
    contribution: float


@dataclass(frozen=True)
class Hit:
    """A retrieved document with its informative matches, the largest contribution first."""

    docstring: Docstring
    score: float
    matches: list[Match]


def write_corpus(
    encoder: TokenEncoder, docstrings: Sequence[Docstring], path: Path, *, progress: bool = False
) -> lik_ops.Corpus:
    """Write the unmasked tokens of `docstrings` to a corpus on disk, in half precision."""
    corpus = None
    bar = tqdm(total=len(docstrings), desc="indexing", unit="doc", leave=False, disable=not progress)
    for start in range(0, len(docstrings), SHARD_SIZE):
        shard, tokens, lengths = docstrings[start : start + SHARD_SIZE], [], []
        for first in range(0, len(shard), BATCH_SIZE):
            batch = encoder.encode_documents([docstring.text for docstring in shard[first : first + BATCH_SIZE]])
            tokens.append(batch.embeddings[batch.mask].half())
            lengths += batch.mask.sum(dim=1).tolist()
            bar.update(len(batch.tokens))
        if corpus is None:
            corpus = lik_ops.Corpus.create(path, tokens[0].shape[1], torch.float16)
        corpus.append(torch.cat(tokens), ids=[docstring.name for docstring in shard], lengths=lengths)
    bar.close()
    if corpus is None:
        raise ValueError("docstrings: expected at least one, found none")
    return corpus


def search(
    encoder: TokenEncoder, question: str, pool: Sequence[Docstring], top: int, *, progress: bool = False
) -> list[Hit]:
    """Return the `top` docstrings of `pool` by MaxSim, each with the words that matched.

    Raises:
        EmptyQuestionError: `question` contains no word.
    """
    encoder.fit([docstring.text for docstring in pool])
    query = encoder.encode_queries([question])
    if not query.mask.any():
        raise EmptyQuestionError(f"question: expected at least one word, found {question!r}")
    with tempfile.TemporaryDirectory() as directory:
        corpus = write_corpus(encoder, pool, Path(directory), progress=progress)
        _, indices = lik_ops.retrieve(
            query.embeddings.half(), corpus, top, q_mask=query.mask, q_weight=query.weight, progress=progress
        )
        del corpus  # before its directory, because it keeps the shards open
    best = [pool[i] for i in indices[0].tolist()]
    return explain(query, encoder.encode_documents([docstring.text for docstring in best]), best)


def explain(query: TokenBatch, documents: TokenBatch, docstrings: Sequence[Docstring]) -> list[Hit]:
    """Return the scores of one query and its hits, split into the contribution of each query token."""
    scores, argmax = lik_ops.maxsim_with_argmax(
        query.embeddings, documents.embeddings, query.mask, documents.mask, q_weight=query.weight
    )
    hits = []
    for i, docstring in enumerate(docstrings):
        winners = argmax[0, i]
        similarity = (query.embeddings[0] * documents.embeddings[i, winners]).sum(-1)
        contribution = similarity if query.weight is None else similarity * query.weight[0]
        matches = [
            Match(
                query_token=token.strip(PIECE_MARKERS),
                word=documents.tokens[i][winners[s]].strip(PIECE_MARKERS),
                similarity=similarity[s].item(),
                contribution=contribution[s].item(),
            )
            for s, token in enumerate(query.tokens[0])
            if winners[s] >= 0
        ]
        hits.append(Hit(docstring, scores[0, i].item(), worth_showing(matches)))
    return hits


def worth_showing(matches: Sequence[Match]) -> list[Match]:
    """Return the matches that explain a score, the largest contribution first, without chance matches and [CLS]."""
    least = MIN_SHARE * max((match.contribution for match in matches), default=0.0)
    kept = [
        match
        for match in matches
        if match.similarity >= MIN_SIMILARITY
        and match.contribution >= least
        and match.query_token.isalnum()
        and match.word.isalnum()
    ]
    return sorted(kept, key=lambda match: -match.contribution)[:MATCHES_SHOWN]


def snippet(text: str, matches: Sequence[Match]) -> str:
    """Return the part of `text` with the largest total weight of matched words."""
    weights = {match.word: match.contribution for match in reversed(matches)}
    words = list(WORD.finditer(text.lower()))
    totals = np.cumsum([0.0] + [weights.get(word[0], 0.0) for word in words])
    length = min(SNIPPET_WORDS, len(words))
    if length == 0:
        return text
    first = int(np.argmax(totals[length:] - totals[: len(totals) - length]))
    return text[words[first].start() : words[first + length - 1].end()]


def highlight(text: str, matches: Sequence[Match], *, styled: bool) -> Text:
    """Mark the matched words in bold color on a terminal, and between asterisks elsewhere."""
    matched = {match.word for match in matches}
    marked, last = Text(), 0
    for word in WORD.finditer(text.lower()):
        if word[0] in matched:
            found = text[word.start() : word.end()]
            marked.append(text[last : word.start()])
            marked.append(found if styled else f"*{found}*", "bold yellow")
            last = word.end()
    return marked.append(text[last:])


def print_hits(console: Console, question: str, hits: Sequence[Hit]) -> None:
    """Print the hits of a question with their matched words marked."""

    def print_marked(text: str, matches: Sequence[Match]) -> None:
        wrapped = textwrap.fill(text, console.width, initial_indent=INDENT, subsequent_indent=INDENT)
        console.print(highlight(wrapped, matches, styled=console.is_terminal), soft_wrap=True)

    console.print(f"Question: {question}", style="bold", markup=False, soft_wrap=True)
    for rank, hit in enumerate(hits, start=1):
        pairs = dict.fromkeys(f"{match.query_token} -> {match.word} {match.similarity:.2f}" for match in hit.matches)
        console.print(f"\n{rank:2}. {hit.score:6.2f}  {hit.docstring.name}", style="bold cyan", soft_wrap=True)
        print_marked(hit.docstring.summary, hit.matches)
        print_marked(f"... {snippet(hit.docstring.body, hit.matches)} ...", hit.matches)
        console.print(f"{INDENT}matched: {', '.join(pairs)}", style="dim", markup=False, soft_wrap=True)


def print_evaluations(console: Console, evaluations: Sequence[Evaluation], num_queries: int, pool_size: int) -> None:
    """Print a table of the evaluations."""
    console.print(f"\nKnown items: {num_queries} queries over {pool_size} documents, ties counted against the method")
    table = Table("method")
    for column in ("MRR@10", "hit@10", "seconds"):
        table.add_column(column, justify="right")
    for result in evaluations:
        table.add_row(result.method, f"{result.mrr:.3f}", f"{result.hit:.3f}", f"{result.seconds:.1f}")
    console.print(table)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description="Search the docstrings of the installed Python packages with MaxSim.")
    parser.add_argument("question", nargs="*", default=DEFAULT_QUESTION.split(), help="words to search for")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="hits to print (default: 5)")
    parser.add_argument("--pool", type=int, metavar="N", help="documents to search (default: all found)")
    parser.add_argument("--queries", type=int, default=300, metavar="N", help="known-item queries (default: 300)")
    parser.add_argument("--stdlib-only", action="store_true", help="leave third-party packages out")
    parser.add_argument("--model", metavar="PATH", help="folder of a sentence-transformers or PyLate model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the documents (default: 0)")
    parser.add_argument("--no-eval", action="store_true", help="only answer the question")
    options = parser.parse_args(arguments)
    for name in ("top", "pool", "queries"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name}: expected a positive number, found {value}")
    return options


def make_encoder(options: argparse.Namespace) -> TokenEncoder:
    """Return the encoder that the options select."""
    return ModelEncoder(options.model, options.device) if options.model else HashedEncoder(options.device)


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the search and the evaluation."""
    options = parse_arguments(arguments)
    console = Console(highlight=False)
    start = time.perf_counter()
    try:
        encoder = make_encoder(options)
    except (FileNotFoundError, ImportError) as error:
        sys.exit(f"--model: {error}")
    packages = [] if options.stdlib_only else installed()
    found = collect_docstrings(packages, progress=console.is_terminal)
    pool = shuffled(found, options.seed)[: options.pool]
    sources = ", ".join(["the standard library", *packages])
    console.print(f"{len(pool)} of {len(found)} docstrings of {sources}\n", soft_wrap=True)

    try:
        hits = search(encoder, " ".join(options.question), pool, options.top, progress=console.is_terminal)
    except EmptyQuestionError as error:
        sys.exit(str(error))
    print_hits(console, " ".join(options.question), hits)
    if not options.no_eval:
        candidates = pool[:EVALUATION_POOL]
        num_queries = min(options.queries, len(candidates))
        method = f"MaxSim, {Path(options.model).name if options.model else 'hashed encoder'}"
        evaluations = evaluate_known_items(encoder, candidates, num_queries, method, progress=console.is_terminal)
        print_evaluations(console, evaluations, num_queries, len(candidates))
        if not options.model:
            console.print(HASHED_NOTE)
    console.print(f"\n{time.perf_counter() - start:.1f} s in all")


if __name__ == "__main__":
    main()
