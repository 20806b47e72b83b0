"""Retrieval: the best documents of a corpus, and corpora on disk."""

from ._retrieve import retrieve
from .corpus import Corpus

__all__ = ["Corpus", "retrieve"]
