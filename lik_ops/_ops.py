"""The namespace of the operators: the one place that spells it.

The builder of the Hugging Face kernels hub writes a module of this name, with these two names in it, so that several
versions can live in one process. Everything else asks here.
"""

import torch

ops = torch.ops.lik


def add_op_namespace_prefix(op_name: str) -> str:
    """The qualified name of an operator."""
    return f"lik::{op_name}"
