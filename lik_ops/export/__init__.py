"""Export of programs that run without lik_ops: AOTInductor packages and ONNX.

A program from `torch.export` contains ``torch.ops.lik.maxsim`` as one node and needs lik_ops to load. The exports of
this module do not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._ops import ops as lik
from ..backends import explain_no_triton
from ..portable.forward import blocked
from .onnx import onnx_translations

__all__ = ["onnx_translations", "open_operators", "package"]


def _compute_blocked(Q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Compute `lik::maxsim_fwd` with a loop over blocks."""
    scores, argmax = blocked.forward_blocked(Q, *args[:-1])
    return scores, Q.new_empty(0, dtype=torch.int32) if argmax is None else argmax


def _compute_packaged(Q: Tensor, D: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Compute `lik::maxsim_fwd` with the Triton kernel if the compiler can include it, else with a loop over blocks."""
    *options, argmax_dtype, _ = args
    if Q.device.type == "cuda" and argmax_dtype is None and explain_no_triton(Q.device, Q.dtype) is None:
        from ..ops import packaged  # registers the operator

        return packaged.maxsim_packaged(Q, D, *options), Q.new_empty(0, dtype=torch.int32)
    return _compute_blocked(Q, D, *args)


def _replace_operators(program: torch.export.ExportedProgram, forward: Callable) -> torch.export.ExportedProgram:
    """Replace `lik::maxsim_fwd` by `forward`, and `lik::maxsim_topk` by `forward` and a sort."""

    def best(Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, top_k, chunk):
        if cu_seqlens_d is not None:
            return NotImplemented  # the operator stays
        return blocked.select_topk(forward(Q, D, q_mask, d_mask, q_weight, normalize, None, "auto")[0], top_k)

    table = torch.export.default_decompositions()
    table[lik.maxsim_fwd.default] = forward
    table[lik.maxsim_topk.default] = best
    with torch.no_grad():  # with gradients the operator would return the argmax
        return program.run_decompositions(table)


# Prefixes of operators that were not replaced, and what the program should use instead. The first match is reported.
_EXPECTED = (
    (f"{lik.name}.maxsim_bwd", "scoring only"),
    (f"{lik.name}.maxsim_ragged", "dense tensors and masks"),
    (f"{lik.name}.maxsim_topk.", "padded documents and d_mask in place of cu_seqlens_d"),
    (f"{lik.name}.", f"functions of lik_ops or torch.ops.{lik.name}.maxsim"),
)


def _check_all_replaced(name: str, program: torch.export.ExportedProgram, but: tuple[str, ...] = ()) -> None:
    """Raise NotImplementedError if any graph of the program still contains an operator of lik_ops."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    targets = {str(node.target) for graph in graphs for node in graph.nodes}.difference(but)
    for prefix, expected in _EXPECTED:
        op_names = sorted(target for target in targets if target.startswith(prefix))
        if op_names:
            raise NotImplementedError(f"{name}: expected {expected}, found {', '.join(op_names)}")


def open_operators(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replace the MaxSim operators of an exported program by a loop over blocks of bounded size.

    The result contains only ATen operators and `torch.ops.higher_order.while_loop`. Dynamic sizes stay dynamic. It
    runs, compiles and serializes without lik_ops. `lik_ops.retrieve` becomes the scores of all documents ``[Nq, Nd]``
    and a stable sort of them, for any `chunk`. This needs 16 bytes for each score.

    Args:
        program: result of `torch.export.export` for a module that scores. A program that computes gradients is
            rejected.

    Returns:
        A program without operators of lik_ops.

    Raises:
        NotImplementedError: the program computes gradients of MaxSim, or MaxSim of packed tokens or pair lists, so an
            operator of lik_ops would remain.

    Example:
        >>> Q, D = torch.randn(4, 32, 128), torch.randn(50, 300, 128)
        >>> program = torch.export.export(lik_ops.MaxSimScorer(), (Q, D))
        >>> lik_ops.export.open_operators(program).module()(Q, D).shape
        torch.Size([4, 50])
    """
    open_program = _replace_operators(program, _compute_blocked)
    _check_all_replaced("open_operators: program", open_program)
    return open_program


def package(
    module: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    inductor_configs: dict[str, Any] | None = None,
) -> str:
    """Compile a module that scores with MaxSim into a file that any process with torch can load and run.

    MaxSim is compiled into the package. Loading needs no lik_ops, and a C++ program needs no Python. Load the package
    with `torch._inductor.aoti_load_package` or ``torch::inductor::AOTIModelPackageLoader``. The scores equal the scores
    of the operator up to the rounding of sums. The memory in addition to inputs and outputs is a few MiB for any sizes.
    `lik_ops.retrieve` is an exception and stores all scores, 16 bytes each.

    On a GPU the package contains a Triton kernel, except for fp64 and argmax. The tile sizes are fixed at export, so
    the kernel may be slower than the operator's choice. Otherwise the package contains a loop over blocks in generated
    code.

    Args:
        module: calls `lik_ops` functions or ``torch.ops.lik`` in its forward. It is exported for inference.
        example_inputs: positional inputs, on the device of the package. Inputs at run time must have the same strides.
            Packages of torch check strides only if ``AOTI_RUNTIME_CHECK_INPUTS=1`` is set during the export.
        path: the file to write, which ends in ``.pt2``.
        dynamic_shapes: the sizes that may differ from `example_inputs`, see `torch.export.export`.
        inductor_configs: options of the compiler.

    Returns:
        The path of the package.

    Raises:
        ValueError: `path` does not end in ``.pt2``.
        NotImplementedError: the module computes gradients of MaxSim, or MaxSim of packed tokens or pair lists.

    Example:
        >>> Q, D = torch.randn(4, 32, 128), torch.randn(50, 300, 128)
        >>> # The package accepts any number and length of documents.
        >>> Nd, Ld = torch.export.Dim("Nd"), torch.export.Dim("Ld")
        >>> sizes = {"Q": None, "D": {0: Nd, 1: Ld}}
        >>> lik_ops.export.package(lik_ops.MaxSimScorer(), (Q, D), "scorer.pt2", dynamic_shapes=sizes)
        'scorer.pt2'
    """
    path = os.fspath(path)
    if not path.endswith(".pt2"):
        raise ValueError(f"package: path: expected a name that ends in .pt2, got {path!r}")
    with torch.no_grad():
        program = torch.export.export(module, example_inputs, dynamic_shapes=dynamic_shapes)
    open_program = _replace_operators(program, _compute_packaged)
    packaged_op = f"{lik.name}.maxsim_packaged.default"  # the compiler does
    _check_all_replaced("package: module", open_program, but=(packaged_op,))
    return torch._inductor.aoti_compile_and_package(open_program, package_path=path, inductor_configs=inductor_configs)
