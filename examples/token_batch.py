"""Define a batch of texts for late interaction: one embedding per token, padded, with a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """N texts padded to L tokens.

    Attributes:
        tokens: The tokens of each text, aligned with its embeddings.
        embeddings: ``[N, L, d]``. Values in padding never matter.
        mask: bool ``[N, L]``, True for a token that is scored.
        weight: fp32 ``[N, L]``, the weight of each query token. None weights all tokens equally.
    """

    tokens: list[list[str]]
    embeddings: Tensor
    mask: Tensor
    weight: Tensor | None = None


class TokenEncoder(Protocol):
    """Interface of the encoders that `search_docstrings` accepts."""

    def fit(self, documents: list[str]) -> None:
        """Learn global statistics of the documents before one is encoded."""

    def encode_queries(self, texts: list[str]) -> TokenBatch:
        """Return the token embeddings of the queries."""
        ...

    def encode_documents(self, texts: list[str]) -> TokenBatch:
        """Return the token embeddings of the documents."""
        ...
