"""Encode and score with the libraries that run late-interaction models.

Each class has `encode_queries`, `encode_documents`, and `score_by_host`, which scores with the library's own code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

QUERY_BLOCK, DOCUMENT_BLOCK = 32, 64  # of PyLate, which stores all similarities of a call


class EvaluationHost(Protocol):
    """A library with a model."""

    library: str

    def encode_queries(self, texts: Sequence[str]) -> list[Tensor]:
        """Return fp32 ``[L_i, d]`` for each query."""
        ...

    def encode_documents(self, items: Sequence[Any]) -> list[Tensor]:
        """Return fp32 ``[L_i, d]`` for each text or image."""
        ...

    def score_by_host(self, queries: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
        """Return scores ``[Nq, Nd]`` of the library."""
        ...


def pad(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the tokens ``[N, L, d]`` and their bool mask."""
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    tokens = pad_sequence(list(rows), batch_first=True)
    return tokens, torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]


class SentenceTransformersHost:
    """A `MultiVectorEncoder` of sentence-transformers 6."""

    library = "sentence-transformers"

    def __init__(self, model: str, device: str, batch_size: int) -> None:
        from sentence_transformers import MultiVectorEncoder

        self.model, self.batch_size = MultiVectorEncoder(model, device=device), batch_size

    def encode_queries(self, texts: Sequence[str]) -> list[Tensor]:
        return [x.float() for x in self.model.encode_query(list(texts), batch_size=self.batch_size)]

    def encode_documents(self, items: Sequence[Any]) -> list[Tensor]:
        return [x.float() for x in self.model.encode_document(list(items), batch_size=self.batch_size)]

    def score_by_host(self, queries: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
        return self.model.similarity(list(queries), list(documents))


class PyLateHost:
    """A `ColBERT` model of PyLate."""

    library = "pylate"

    def __init__(self, model: str, device: str, batch_size: int) -> None:
        from pylate.models import ColBERT

        self.model, self.batch_size = ColBERT(model, device=device), batch_size

    def encode_queries(self, texts: Sequence[str]) -> list[Tensor]:
        return self._encode(texts, is_query=True)

    def encode_documents(self, items: Sequence[Any]) -> list[Tensor]:
        return self._encode(items, is_query=False)

    def _encode(self, texts: Sequence[str], *, is_query: bool) -> list[Tensor]:
        found = self.model.encode(
            list(texts), is_query=is_query, batch_size=self.batch_size, convert_to_numpy=False, show_progress_bar=False
        )
        return [x.float() for x in found]

    def score_by_host(self, queries: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
        from pylate.scores import colbert_scores

        blocks = [pad(documents[i : i + DOCUMENT_BLOCK]) for i in range(0, len(documents), DOCUMENT_BLOCK)]
        rows = []
        for i in range(0, len(queries), QUERY_BLOCK):
            Q, q_mask = pad(queries[i : i + QUERY_BLOCK])
            rows.append(torch.cat([colbert_scores(Q, D, q_mask, d_mask) for D, d_mask in blocks], dim=1))
        return torch.cat(rows)


class ColpaliHost:
    """A model and a processor of colpali-engine."""

    library = "colpali-engine"

    def __init__(self, model: str, device: str, batch_size: int, architecture: str = "ColQwen2") -> None:
        models = importlib.import_module("colpali_engine.models")
        names = f"{architecture}Processor", f"{architecture}_Processor"
        processor = next((getattr(models, name) for name in names if hasattr(models, name)), None)
        if processor is None or not hasattr(models, architecture):
            raise ValueError(f"architecture: expected a class of colpali_engine.models, found {architecture!r}")
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.model = getattr(models, architecture).from_pretrained(model, dtype=dtype, device_map=device).eval()
        self.processor, self.device, self.batch_size = processor.from_pretrained(model), device, batch_size

    def encode_queries(self, texts: Sequence[str]) -> list[Tensor]:
        return self._encode(texts, lambda batch: self.processor.process_queries(texts=batch))

    def encode_documents(self, items: Sequence[Any]) -> list[Tensor]:
        """Return the embeddings of pages, or of texts."""
        is_text = bool(items) and isinstance(items[0], str)
        process = self.processor.process_texts if is_text else self.processor.process_images
        return self._encode(items, process)

    def _encode(self, items: Sequence[Any], process: Callable[[list], Any]) -> list[Tensor]:
        """Return the rows that are not zero. The library's models set the rows of padding to zero."""
        rows: list[Tensor] = []
        for start in range(0, len(items), self.batch_size):
            batch = process(list(items[start : start + self.batch_size])).to(self.device)
            rows += [x[x.any(-1)].float() for x in self.model(**batch)]
        return rows

    def score_by_host(self, queries: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
        return self.processor.score_multi_vector(list(queries), list(documents), device=self.device)


class HashedHost:
    """The untrained encoder of the demo, scored by the formula of `lik_ops.reference`. It needs no model."""

    library = "hashed"

    def __init__(self, model: str | None, device: str, batch_size: int) -> None:
        from hashed_encoder import HashedEncoder

        self.encoder, self.batch_size = HashedEncoder(device), batch_size

    def encode_queries(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the embeddings, multiplied by the weights of the query words."""
        batch = self.encoder.encode_queries(list(texts))
        assert batch.weight is not None
        return [x[mask] for x, mask in zip(batch.embeddings * batch.weight[..., None], batch.mask, strict=True)]

    def encode_documents(self, items: Sequence[Any]) -> list[Tensor]:
        """Return the embeddings, after counting the words of all documents."""
        self.encoder.fit(list(items))
        rows: list[Tensor] = []
        for start in range(0, len(items), self.batch_size):
            batch = self.encoder.encode_documents(list(items[start : start + self.batch_size]))
            rows += [x[mask] for x, mask in zip(batch.embeddings, batch.mask, strict=True)]
        return rows

    def score_by_host(self, queries: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
        from lik_ops import reference

        Q, q_mask = pad(queries)
        blocks = [pad(documents[i : i + DOCUMENT_BLOCK]) for i in range(0, len(documents), DOCUMENT_BLOCK)]
        return torch.cat([reference.maxsim(Q, D, q_mask, d_mask) for D, d_mask in blocks], dim=1)


HOSTS: dict[str, Callable[..., EvaluationHost]] = {
    host.library: host for host in (SentenceTransformersHost, PyLateHost, ColpaliHost, HashedHost)
}
