"""Compute token embeddings without a trained model: a word is the sum of random vectors of its character n-grams.

Equal words get equal vectors. Words with a common stem are slightly similar. All other words are orthogonal except for
chance (cosine within about 0.3). The vectors depend only on the words, so every run gets the same vectors.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from functools import cache

import numpy as np
import torch
from token_batch import TokenBatch

DIM = 128
QUERY_TOKENS = 32
DOCUMENT_TOKENS = 180
NGRAM_SIZES = (3, 4, 5)
WHOLE_WORD_WEIGHT = 2.0
WORD = re.compile(r"[a-z]+|\d+")


def split_words(text: str) -> list[str]:
    """Return lower-case runs of letters and runs of digits."""
    return WORD.findall(text.lower())


@cache
def gram_vector(gram: str) -> np.ndarray:
    """Return a Gaussian vector, fp32 ``[DIM]``, that depends only on the characters of `gram`."""
    return np.random.default_rng(zlib.crc32(gram.encode())).standard_normal(DIM).astype(np.float32)


@cache
def word_vector(word: str) -> np.ndarray:
    """Return the unit vector of a word, fp32 ``[DIM]``."""
    marked = f"<{word}>"
    grams = [marked[i : i + size] for size in NGRAM_SIZES for i in range(len(marked) - size + 1)]
    grams.append(marked)
    spelling = np.sum([gram_vector(gram) for gram in grams], axis=0) / math.sqrt(len(grams))
    vector = WHOLE_WORD_WEIGHT * gram_vector(f"W{marked}") + spelling
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def inverse_document_frequency(documents: list[list[str]]) -> dict[str, float]:
    """Return ``ln(1 + (N - df + 0.5) / (df + 0.5))`` of every word in `documents`."""
    document_frequency = Counter(word for words in documents for word in set(words))
    total = len(documents)
    return {word: math.log1p((total - df + 0.5) / (df + 0.5)) for word, df in document_frequency.items()}


class HashedEncoder:
    """Encoder that represents words by their spelling and weights query words by their rarity.

    Example:
        >>> encoder = HashedEncoder()
        >>> encoder.fit(["split a string", "join a path"])
        >>> queries = encoder.encode_queries(["how to split strings"])
        >>> queries.embeddings.shape, queries.weight.shape
        (torch.Size([1, 4, 128]), torch.Size([1, 4]))
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.idf: dict[str, float] = {}
        self.unseen_idf = 0.0

    def fit(self, documents: list[str]) -> None:
        """Count how many of `documents` hold each word."""
        self.idf = inverse_document_frequency([split_words(text)[:DOCUMENT_TOKENS] for text in documents])
        self.unseen_idf = math.log1p(len(documents))

    def encode_queries(self, texts: list[str]) -> TokenBatch:
        """Return the token embeddings and weights of the queries."""
        batch = self._encode([split_words(text)[:QUERY_TOKENS] for text in texts])
        weight = torch.zeros(batch.mask.shape)
        for row, words in enumerate(batch.tokens):
            weight[row, : len(words)] = torch.tensor([self.idf.get(word, self.unseen_idf) for word in words])
        return TokenBatch(batch.tokens, batch.embeddings, batch.mask, weight.to(self.device))

    def encode_documents(self, texts: list[str]) -> TokenBatch:
        """Return the token embeddings of the documents."""
        return self._encode([split_words(text)[:DOCUMENT_TOKENS] for text in texts])

    def _encode(self, tokens: list[list[str]]) -> TokenBatch:
        """Look every word up once, then gather. Padding points at row 0 and is masked."""
        rows = {word: row for row, word in enumerate(dict.fromkeys(word for words in tokens for word in words))}
        table = torch.from_numpy(np.array([word_vector(word) for word in rows], dtype=np.float32).reshape(-1, DIM))
        longest = max(map(len, tokens), default=0)
        ids = torch.zeros(len(tokens), longest, dtype=torch.long)
        mask = torch.zeros(len(tokens), longest, dtype=torch.bool)
        for i, words in enumerate(tokens):
            ids[i, : len(words)] = torch.tensor([rows[word] for word in words], dtype=torch.long)
            mask[i, : len(words)] = True
        return TokenBatch(tokens, table.to(self.device)[ids.to(self.device)], mask.to(self.device))
