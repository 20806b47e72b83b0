"""Retrieval: the best documents of a corpus, corpora on disk, and indexes of other libraries."""

from ._retrieve import retrieve
from ._streamed import maxsim_streamed
from .index.read import read_index
from .index.write import write_index
from .staged import plaid_approx_score
from .store.corpus import Corpus

__all__ = ["Corpus", "maxsim_streamed", "plaid_approx_score", "read_index", "retrieve", "write_index"]
