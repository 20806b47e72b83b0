"""Define a ColBERT that trains on two CPU cores in a minute or two and needs no download.

A token is a word, and its embedding is a row of a hashed table. One convolution mixes in neighboring words. A linear
layer computes a weight for each query token, and the gradient of MaxSim reaches this layer through ``q_weight``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from hashed_encoder import QUERY_TOKENS, split_words
from token_batch import TokenBatch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import lik_ops

PADDING = 0
TRAINING_DOCUMENT_TOKENS = 96
CONTEXT = 3  # words in the window of the convolution


class TinyColBERT(nn.Module):
    """Model from words to token embeddings, shared by queries and documents, with a weight for each query token.

    Args:
        rows: Rows of the table of words. Two words with the same hash share a row.
        dim: Features d of a token embedding.
    """

    def __init__(self, rows: int = 16384, dim: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, dim, padding_idx=PADDING)
        self.norm = nn.LayerNorm(dim)
        self.neighbors = nn.Conv1d(dim, dim, CONTEXT, padding=CONTEXT // 2)
        self.mixed = nn.Linear(dim, dim)
        self.importance = nn.Linear(dim, 1)
        self.log_scale = nn.Parameter(torch.zeros(()))
        nn.init.normal_(self.words.weight, std=1 / math.sqrt(dim))
        # Use only the words at first. Random embeddings match equal words, which a random mixture would disturb.
        nn.init.zeros_(self.mixed.weight)
        nn.init.zeros_(self.mixed.bias)

    def ids(self, texts: Sequence[str], length: int) -> Tensor:
        """Return table rows of the first `length` words of each text, int64 ``[N, L]``, 0 = padding."""
        rows = self.words.num_embeddings - 1
        hashed = [[1 + zlib.crc32(word.encode()) % rows for word in split_words(text)[:length]] for text in texts]
        ids = pad_sequence([torch.tensor(row, dtype=torch.long) for row in hashed], batch_first=True)
        return ids.to(self.words.weight.device)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return embeddings ``[N, L, d]`` of any norm, the mask ``[N, L]`` of real tokens, and weights ``[N, L]``."""
        mask = ids != PADDING
        words = self.words(ids)
        normed = self.norm(words)
        seen = torch.where(mask[..., None], normed, 0)  # padding does not change an embedding
        mixed = F.gelu(self.neighbors(seen.transpose(1, 2)).transpose(1, 2))
        weight = F.softplus(self.importance(normed).squeeze(-1))
        return words + self.mixed(mixed), mask, weight

    def scores(self, queries: Sequence[str], documents: Sequence[str]) -> Tensor:
        """Return scaled MaxSim of every query against every document, ``[Nq, Nd]``."""
        Q, q_mask, weight = self(self.ids(queries, QUERY_TOKENS))
        D, d_mask, _ = self(self.ids(documents, TRAINING_DOCUMENT_TOKENS))
        return lik_ops.maxsim(Q, D, q_mask, d_mask, q_weight=weight, normalize=True) * self.log_scale.exp()


class TinyColBERTEncoder:
    """Adapter from `TinyColBERT` to `TokenEncoder`. It normalizes embeddings once, for an index."""

    def __init__(self, model: TinyColBERT, document_tokens: int = TRAINING_DOCUMENT_TOKENS) -> None:
        self.model = model
        self.document_tokens = document_tokens

    def fit(self, documents: list[str]) -> None:
        """Do nothing, because training is complete."""

    def encode_queries(self, texts: list[str]) -> TokenBatch:
        """Return the token embeddings and weights of the queries."""
        return self._encode(texts, QUERY_TOKENS, weighted=True)

    def encode_documents(self, texts: list[str]) -> TokenBatch:
        """Return the token embeddings of the documents."""
        return self._encode(texts, self.document_tokens, weighted=False)

    @torch.no_grad()
    def _encode(self, texts: list[str], length: int, *, weighted: bool) -> TokenBatch:
        embeddings, mask, weight = self.model(self.model.ids(texts, length))
        tokens = [split_words(text)[:length] for text in texts]
        return TokenBatch(tokens, F.normalize(embeddings, dim=-1), mask, weight if weighted else None)
