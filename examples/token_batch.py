"""Define a batch of texts for late interaction: one embedding per token, padded, with a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """N texts padded to L tokens.

    Attributes:
        tokens: the tokens of each text, aligned with its embeddings.
        embeddings: ``[N, L, d]``; what padding holds never matters.
        mask: bool ``[N, L]``, True = a token that takes part in the scoring.
        weight: fp32 ``[N, L]``, the weight of each query token; None weighs all alike.
    """

    tokens: list[list[str]]
    embeddings: Tensor
    mask: Tensor
    weight: Tensor | None = None


class TokenEncoder(Protocol):
    """The interface that `search_docstrings` needs of an encoder."""

    def fit(self, documents: list[str]) -> None:
        """Learn what must be known of the documents as a whole before one is encoded."""

    def encode_queries(self, texts: list[str]) -> TokenBatch: ...

    def encode_documents(self, texts: list[str]) -> TokenBatch: ...
