"""Retrieval and in-batch scoring over the processes of `torch.distributed`: gloo between CPUs, NCCL between GPUs.

Import the module explicitly: ``lik_ops.distributed.retrieve(...)``, or ``from lik_ops import distributed``. Every
process of the group makes the same calls in the same order. Before large tensors are sent, the processes exchange a
summary of their arguments, some hundred bytes each. A wrong argument on one process, or a call of another function of
this module, then raises an error on all processes. If a process dies or does not make the call, the others raise an
error after the timeout of the group at the latest.
"""

from .inbatch import maxsim_cross_entropy, maxsim_inbatch
from .search import retrieve

__all__ = ["maxsim_cross_entropy", "maxsim_inbatch", "retrieve"]
