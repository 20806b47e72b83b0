"""Compute token embeddings with a late-interaction model in a local folder, through sentence-transformers or PyLate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from token_batch import TokenBatch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class ModelEncoder:
    """Encoder with a trained model.

    Its document masks have holes, because models exclude punctuation from the scoring.

    Args:
        path: A folder saved by sentence-transformers (6 or newer) or PyLate.
        device: The device of the model and the embeddings.

    Raises:
        FileNotFoundError: `path` is not a folder.
        ImportError: Neither library is installed.
    """

    def __init__(self, path: str, device: str = "cpu") -> None:
        if not Path(path).is_dir():
            raise FileNotFoundError(f"expected the folder of a saved model, found no folder at {path!r}")
        self.model, self.is_pylate = _load(path, device)

    def fit(self, documents: list[str]) -> None:
        """Do nothing, because the model is already trained."""

    def encode_queries(self, texts: list[str]) -> TokenBatch:
        """Return the token embeddings of the queries."""
        return self._encode(texts, is_query=True)

    def encode_documents(self, texts: list[str]) -> TokenBatch:
        """Return the token embeddings of the documents."""
        return self._encode(texts, is_query=False)

    def _encode(self, texts: list[str], *, is_query: bool) -> TokenBatch:
        embeddings, masks, ids = self._outputs(texts, is_query=is_query)
        return TokenBatch(
            tokens=[self.model.tokenizer.convert_ids_to_tokens(row.tolist()) for row in ids],
            embeddings=pad_sequence(embeddings, batch_first=True).float(),
            mask=pad_sequence([mask.bool() for mask in masks], batch_first=True),
        )

    def _outputs(self, texts: list[str], *, is_query: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return embeddings, scoring mask, and token ids of each text, before the libraries remove masked tokens."""
        if self.is_pylate:
            output = self.model.encode(texts, is_query=is_query, convert_to_tensor=True, output_value=None)
            return output["token_embeddings"], output["masks"], output["input_ids"]
        encode = self.model.encode_query if is_query else self.model.encode_document
        rows = encode(texts, output_value=None)
        return (
            [row["token_embeddings"] for row in rows],
            [row["attention_mask"] for row in rows],
            [row["input_ids"] for row in rows],
        )


def _load(path: str, device: str) -> tuple[Any, bool]:
    """Return the model, and whether PyLate loaded it."""
    try:
        from sentence_transformers import MultiVectorEncoder
    except ImportError:
        pass
    else:
        return MultiVectorEncoder(path, device=device, local_files_only=True), False
    try:
        from pylate.models import ColBERT
    except ImportError as error:
        raise ImportError("loading a model needs sentence-transformers >= 6 or pylate >= 1.6") from error
    return ColBERT(path, device=device, local_files_only=True), True
