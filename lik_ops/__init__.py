"""MaxSim, the scoring of late-interaction retrieval, as PyTorch operators under ``torch.ops.lik``."""

from . import export, reference
from ._backend_choice import use_backend
from ._maxsim import maxsim, maxsim_pairs, maxsim_with_argmax
from ._version import __version__
from ._warmup import warmup
from .retrieval import Corpus, retrieve
from .scorer import MaxSimScorer

__all__ = [
    "Corpus",
    "MaxSimScorer",
    "__version__",
    "export",
    "maxsim",
    "maxsim_pairs",
    "maxsim_with_argmax",
    "reference",
    "retrieve",
    "use_backend",
    "warmup",
]
