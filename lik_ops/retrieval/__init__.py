"""Retrieval: the best documents of a corpus, corpora on disk, and indexes of other libraries."""

from ._retrieve import retrieve
from ._streamed import maxsim_streamed
from .corpus import Corpus
from .index_files import read_index
from .index_writing import write_index

__all__ = ["Corpus", "maxsim_streamed", "read_index", "retrieve", "write_index"]
