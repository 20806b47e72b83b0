"""Retrieval: the best documents of a corpus, and corpora on disk."""

from ._retrieve import retrieve
from ._streamed import maxsim_streamed
from .corpus import Corpus

__all__ = ["Corpus", "maxsim_streamed", "retrieve"]
