"""MaxSim, the scoring of late-interaction retrieval, as PyTorch operators under ``torch.ops.lik``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import export, reference
from ._version import __version__
from .api.chamfer import chamfer_distance
from .api.cross_entropy import maxsim_cross_entropy
from .api.head import maxsim_from_hidden
from .api.packing import lengths_to_mask, pack, pack_padded, unpack
from .api.ragged import maxsim_candidates_varlen, maxsim_padded, maxsim_pair_list, maxsim_varlen
from .api.ragged_argmax import (
    maxsim_candidates_varlen_with_argmax,
    maxsim_padded_with_argmax,
    maxsim_pair_list_with_argmax,
    maxsim_varlen_with_argmax,
)
from .api.score import maxsim, maxsim_pairs, maxsim_with_argmax
from .api.similarity_map import similarity_map
from .api.soft import maxsim_soft
from .api.token_topk import maxsim_token_topk
from .api.warmup import warmup
from .api.xtr import maxsim_xtr
from .arguments import Backward as Backward
from .index import Index
from .quantized import Quantized
from .quantizing import quantize
from .residual import ResidualCodec
from .retrieval import Corpus, maxsim_streamed, read_index, retrieve, write_index
from .scorer import MaxSimScorer
from .settings import checks, norm_warning, use_backend

if TYPE_CHECKING:
    from . import distributed as distributed

__all__ = [
    "Corpus",
    "Index",
    "MaxSimScorer",
    "Quantized",
    "ResidualCodec",
    "__version__",
    "chamfer_distance",
    "checks",
    "export",
    "lengths_to_mask",
    "maxsim",
    "maxsim_candidates_varlen",
    "maxsim_candidates_varlen_with_argmax",
    "maxsim_cross_entropy",
    "maxsim_from_hidden",
    "maxsim_padded",
    "maxsim_padded_with_argmax",
    "maxsim_pair_list",
    "maxsim_pair_list_with_argmax",
    "maxsim_pairs",
    "maxsim_soft",
    "maxsim_streamed",
    "maxsim_token_topk",
    "maxsim_varlen",
    "maxsim_varlen_with_argmax",
    "maxsim_with_argmax",
    "maxsim_xtr",
    "norm_warning",
    "pack",
    "pack_padded",
    "quantize",
    "read_index",
    "reference",
    "retrieve",
    "similarity_map",
    "unpack",
    "use_backend",
    "warmup",
    "write_index",
]


def __getattr__(name: str) -> Any:
    """`lik_ops.distributed` is imported when it is first asked for."""
    if name == "distributed":
        return import_module(".distributed", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "distributed"})
