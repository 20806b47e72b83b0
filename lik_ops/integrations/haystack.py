"""`MaxSimRanker` for Haystack, a component that sorts documents by MaxSim of their multi-vectors.

Requires Haystack.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..core.extras import make_missing_error
from . import _scoring
from .reranking import rerank_hits

try:
    from haystack import Document, component
except ModuleNotFoundError as error:
    raise make_missing_error("lik_ops.integrations.haystack", "haystack", "haystack") from error

__all__ = ["MaxSimRanker"]


@component
class MaxSimRanker:
    """A component that ranks documents by MaxSim of their multi-vectors.

    The multi-vector ``[L_i][d]`` of a document is its `multivector_embedding`, or the entry of that name of its `meta`.

    Haystack loads a saved pipeline with this component only if the module is listed as trusted:
    ``Pipeline.from_dict(saved, allowed_modules=["lik_ops.integrations.haystack"])``, and the same for ``loads``.

    Args:
        top_k: the number of documents to return.
        normalize: L2-normalize every vector first.
        device: the device to score on. None is the CPU.
    """

    def __init__(self, top_k: int = 10, normalize: bool = False, device: str | None = None) -> None:
        if top_k < 1:
            raise ValueError(f"MaxSimRanker: top_k: expected 1 or more, got {top_k}")
        self.top_k, self.normalize, self.device = top_k, normalize, device

    @component.output_types(documents=list[Document])
    def run(
        self, documents: list[Document], query_multivector_embedding: list[list[float]], top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Return up to `top_k` documents with their `score`, from the highest score to the lowest.

        Args:
            documents: the documents to rank.
            query_multivector_embedding: the multi-vector of the query ``[Lq][d]``.
            top_k: the number of documents to return. None is the number of the component.

        Returns:
            A dictionary with the entry ``documents``.

        Raises:
            ValueError: a document has no multi-vector, or a multi-vector has a wrong shape.
            TypeError: a multi-vector does not consist of numbers.
        """
        query = _scoring.as_vectors("MaxSimRanker: query_multivector_embedding", query_multivector_embedding, rows="Lq")
        multi_vectors = [_get_multi_vector(document, query.shape[1]) for document in documents]
        limit = self.top_k if top_k is None else top_k
        hits = rerank_hits(
            query, range(len(documents)), multi_vectors, limit, normalize=self.normalize, device=self.device
        )
        pairs = zip(hits.ids, hits.scores, strict=True)
        return {"documents": [dataclasses.replace(documents[i], score=score) for i, score in pairs]}


def _get_multi_vector(document: Any, d: int) -> Any:
    """Return the multi-vector of a document as a tensor ``[L, d]``."""
    multi_vector = getattr(document, "multivector_embedding", None)
    multi_vector = document.meta.get("multivector_embedding") if multi_vector is None else multi_vector
    if multi_vector is None:
        raise ValueError(f"MaxSimRanker: documents: expected each with a multivector_embedding, {document.id} has none")
    return _scoring.as_vectors(f"MaxSimRanker: documents: multivector_embedding of {document.id}", multi_vector, d)
