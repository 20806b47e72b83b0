"""MaxSim, the scoring of late-interaction retrieval, as PyTorch operators under ``torch.ops.lik``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import export, reference
from ._version import __version__
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
from .api.warmup import warmup
from .core.arguments import Backward as Backward
from .core.settings import checks, norm_warning, use_backend
from .families.chamfer.api import chamfer_distance
from .families.head.api import maxsim_from_hidden
from .families.loss.api import maxsim_cross_entropy
from .families.pooling.api import pool_tokens
from .families.soft.api import maxsim_soft
from .families.token_topk.api import maxsim_token_topk
from .families.xtr.api import maxsim_xtr
from .formats.index import Index
from .formats.quantize import quantize
from .formats.quantized import Quantized
from .formats.residual import ResidualCodec
from .retrieval import Corpus, maxsim_streamed, plaid_approx_score, read_index, retrieve, write_index
from .scorer import MaxSimScorer

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
    "plaid_approx_score",
    "pool_tokens",
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
    """Import `lik_ops.distributed` on first access."""
    if name == "distributed":
        return import_module(".distributed", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "distributed"})
