"""The table of all operators, with sample inputs on any device and expected outputs, which all checks read.

A new operator is added to `OPERATORS` and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module

import torch

from lik_ops.opcheck.samples import chamfer, cross_entropy, dense, head, quantized, ragged, saved, search, soft
from lik_ops.opcheck.samples.inputs import OperatorCase, Sample

try:
    import_module("lik_ops.ops.packaged")  # registers the operator of packages; needs Triton
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "triton":
        raise


def _name_samples(samples: Callable[[torch.dtype, str], Iterator[tuple[str, tuple]]], *rest: Callable) -> OperatorCase:
    """Build an operator case whose samples have positional arguments only."""
    return OperatorCase(lambda dtype, device: (Sample(name, args, {}) for name, args in samples(dtype, device)), *rest)


def _derive_operator(
    of: OperatorCase, arguments: Callable[[tuple, int], tuple], reference: Callable[..., tuple], n: int = 0
) -> OperatorCase:
    """Build an operator case whose arguments are converted from the arguments of another operator.

    `arguments` also receives the index of the sample, and `n` for given sizes.
    """

    def samples(dtype: torch.dtype, device: str) -> Iterator[Sample]:
        return (Sample(s.name, arguments(s.args, i), {}) for i, s in enumerate(of.samples(dtype, device)))

    def sized(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
        return arguments(of.sized(sizes, candidates, device), n)

    return OperatorCase(samples, reference, sized)


def _restrict_operator(operator: OperatorCase, wanted: Callable[[tuple], bool], cross: bool = False) -> OperatorCase:
    """Build an operator case with some samples of another one; `cross` restricts sizes to the cross product."""
    return OperatorCase(
        lambda dtype, device: (s for s in operator.samples(dtype, device) if wanted(s.args)),
        operator.reference,
        lambda sizes, candidates, device: operator.sized(sizes, candidates and not cross, device),
    )


_FWD = OperatorCase(dense.maxsim_fwd, dense.fwd_reference, dense.sized_fwd)
_BWD = OperatorCase(dense.maxsim_bwd, dense.bwd_reference, dense.sized_bwd)
_WITH_ARGMAX = _restrict_operator(_FWD, lambda args: args[6] is not None)
_WITHOUT_ARGMAX = _restrict_operator(_FWD, lambda args: args[6] is None)
_CROSS_FWD = _restrict_operator(_FWD, lambda args: args[1].dim() == 3, cross=True)
_CROSS_BWD = _restrict_operator(_BWD, lambda args: args[2].dim() == 3, cross=True)
OPERATORS: dict[str, OperatorCase] = {
    "chamfer_fwd": _name_samples(chamfer.samples, chamfer.reference, chamfer.sized),
    "chamfer_bwd": _name_samples(chamfer.backward_samples, chamfer.backward_reference, chamfer.sized_backward),
    "maxsim": OperatorCase(dense.maxsim, dense.maxsim_reference, dense.sized_maxsim),
    "maxsim_fwd": _FWD,
    "maxsim_bwd_lowmem": _BWD,
    "maxsim_bwd_unified": _BWD,
    "maxsim_ragged_fwd": _name_samples(ragged.forward_samples, ragged.forward_reference, ragged.sized_forward),
    "maxsim_ragged_bwd": _name_samples(ragged.backward_samples, ragged.backward_reference, ragged.sized_backward),
    "maxsim_quantized_fwd": _name_samples(quantized.samples, quantized.reference, quantized.sized),
    "maxsim_quantized_bwd": _name_samples(
        quantized.backward_samples, quantized.backward_reference, quantized.sized_backward
    ),
    "maxsim_fwd_int8": OperatorCase(_WITH_ARGMAX.samples, saved.forward_reference, dense.sized_fwd),
    "maxsim_bwd_int8": _derive_operator(_BWD, saved.backward_arguments, saved.backward_reference),
    "maxsim_soft_fwd": _derive_operator(_FWD, soft.forward_arguments, soft.forward_reference, 1),
    "maxsim_soft_bwd": _derive_operator(_BWD, soft.backward_arguments, soft.backward_reference, 1),
    "maxsim_cross_entropy_fwd": _derive_operator(
        _WITHOUT_ARGMAX, cross_entropy.forward_arguments, cross_entropy.forward_reference
    ),
    "maxsim_cross_entropy_bwd": _derive_operator(
        _BWD, cross_entropy.backward_arguments, cross_entropy.backward_reference
    ),
    "maxsim_from_hidden_fwd": _derive_operator(_CROSS_FWD, head.forward_arguments, head.forward_reference, 1),
    "maxsim_from_hidden_bwd": _derive_operator(_CROSS_BWD, head.backward_arguments, head.backward_reference, 1),
    "maxsim_topk": OperatorCase(search.maxsim_topk, search.topk_reference, search.sized_topk),
    "maxsim_topk_codes": OperatorCase(search.maxsim_topk_codes, search.codes_reference, search.sized_codes),
    "maxsim_token_topk_fwd": OperatorCase(
        search.maxsim_token_topk, search.token_topk_reference, search.sized_token_topk
    ),
    "maxsim_xtr_fwd": OperatorCase(search.maxsim_xtr, search.xtr_reference, search.sized_xtr),
}


if "lik_ops.ops.packaged" in sys.modules:
    OPERATORS["maxsim_packaged"] = OperatorCase(dense.maxsim_packaged, dense.packaged_reference, dense.sized_packaged)


def list_registered() -> set[str]:
    """Return the names of all operators under ``torch.ops.lik``."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1].split(".")[0] for name in names if name.startswith("lik::")}
