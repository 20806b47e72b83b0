"""MaxSim, the scoring of late-interaction retrieval, as PyTorch operators under ``torch.ops.lik``."""

from . import export, reference
from ._backend_choice import use_backend
from ._maxsim import maxsim, maxsim_pairs, maxsim_with_argmax
from ._ragged import (
    lengths_to_mask,
    maxsim_candidates_varlen,
    maxsim_padded,
    maxsim_pair_list,
    maxsim_varlen,
    pack,
    unpack,
)
from ._version import __version__
from ._warmup import warmup
from .scorer import MaxSimScorer

__all__ = [
    "MaxSimScorer",
    "__version__",
    "export",
    "lengths_to_mask",
    "maxsim",
    "maxsim_candidates_varlen",
    "maxsim_padded",
    "maxsim_pair_list",
    "maxsim_pairs",
    "maxsim_varlen",
    "maxsim_with_argmax",
    "pack",
    "reference",
    "unpack",
    "use_backend",
    "warmup",
]
