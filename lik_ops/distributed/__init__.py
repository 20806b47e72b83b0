"""Retrieval and in-batch scoring over the processes of `torch.distributed`: gloo between CPUs, NCCL between GPUs.

Imported where it is used: ``lik_ops.distributed.retrieve(...)``, or ``from lik_ops import distributed``. Every process
of the group makes the same calls in the same order. Before anything large is sent, the processes tell each other what
they were called with, some hundred bytes each, so that a mistake of one, or a call of another function of this module,
is an error in all. When a process dies or does not come, the others raise an error, at the latest after the timeout of
the group.
"""

from .inbatch import maxsim_cross_entropy, maxsim_inbatch
from .search import retrieve

__all__ = ["maxsim_cross_entropy", "maxsim_inbatch", "retrieve"]
