"""The namespace of the operators. No other file spells it.

The builder of the Hugging Face kernels hub generates a module with the same name and the same two names in it. Several
versions can therefore exist in one process. All other modules use these names.
"""

import torch

ops = torch.ops.lik


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the qualified name of an operator."""
    return f"lik::{op_name}"
