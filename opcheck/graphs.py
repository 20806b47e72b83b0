"""Snapshots of what torch's tracers record of calls, as text, so that every change is a decision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lik_ops.opcheck.samples.table import list_registered


class ScoringModule(torch.nn.Module):
    """A module that only computes MaxSim."""

    def forward(self, Q: Tensor, D: Tensor) -> Tensor:
        """Return the scores."""
        return torch.ops.lik.maxsim(Q, D)


def _list_operators(graph: torch.fx.Graph) -> str:
    """Return the lik operators of a graph, separated by commas."""
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return ", ".join(t.replace(".default", "") for t in targets if t.startswith("lik."))


def _make_inputs(device: str, grad: bool = False) -> tuple[Tensor, Tensor]:
    """Return a small Q and D."""
    Q, D = torch.ones(3, 4, 8, device=device), torch.ones(5, 6, 8, device=device)
    return Q.requires_grad_(grad), D.requires_grad_(grad)


def format_schemas(device: str) -> str:
    """Return the schemas of all registered operators, one on a line."""
    return "\n".join(str(getattr(torch.ops.lik, name).default._schema) for name in sorted(list_registered()))


def format_exported(device: str) -> str:
    """Return the operators of exported programs before and after decomposition, non-strict and strict."""
    lines = []
    for strict in (False, True):
        program = torch.export.export(ScoringModule().to(device), _make_inputs(device), strict=strict)
        lines += [_list_operators(program.graph), _list_operators(program.run_decompositions().graph)]
    return "\n".join(lines)


def format_compiled_step(device: str) -> str:
    """Return the operators of a compiled training step.

    The lines are the graph from Dynamo, the forward graph and the backward graph.
    """
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    lines: list[str] = []

    def compiler(module: torch.fx.GraphModule, inputs: list) -> Callable:
        lines.append(_list_operators(module.graph))
        return make_boxed_func(module.forward)

    def backend(module: torch.fx.GraphModule, inputs: list) -> Callable:
        lines.append(_list_operators(module.graph))
        partition = min_cut_rematerialization_partition
        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(module, inputs)

    def step(Q: Tensor, D: Tensor) -> Tensor:
        return torch.ops.lik.maxsim(Q, D, normalize=True).logsumexp(1).sum()

    torch.compiler.reset()
    torch.compile(step, backend=backend, fullgraph=True)(*_make_inputs(device, grad=True)).backward()
    torch.compiler.reset()
    return "\n".join(lines)


_SCHEMAS = {  # one of these operators is registered only with Triton
    "chamfer_bwd": "lik::chamfer_bwd(Tensor? of_P, Tensor? of_R, Tensor P, Tensor R, Tensor nearest, Tensor nearest_R, str metric, bool[2] needs) -> (Tensor, Tensor)",
    "chamfer_fwd": "lik::chamfer_fwd(Tensor P, Tensor R, Tensor? p_lengths, Tensor? r_lengths, str metric) -> (Tensor, Tensor, Tensor, Tensor)",
    "maxsim": 'lik::maxsim(Tensor Q, Tensor D, Tensor? q_mask=None, Tensor? d_mask=None, *, Tensor? q_weight=None, bool normalize=False, str backward="auto", bool recompute=False) -> Tensor',
    "maxsim_bwd_lowmem": "lik::maxsim_bwd_lowmem(Tensor grad_scores, Tensor Q, Tensor D, Tensor argmax, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, bool[3] needs) -> (Tensor, Tensor, Tensor)",
    "maxsim_bwd_unified": "lik::maxsim_bwd_unified(Tensor grad_scores, Tensor Q, Tensor D, Tensor argmax, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, bool[3] needs) -> (Tensor, Tensor, Tensor)",
    "maxsim_cross_entropy_bwd": "lik::maxsim_cross_entropy_bwd(Tensor grad_losses, Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, Tensor labels, Tensor lse, float temperature, int ignore_index, bool normalize, bool[3] needs) -> (Tensor, Tensor, Tensor)",
    "maxsim_cross_entropy_fwd": "lik::maxsim_cross_entropy_fwd(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, Tensor labels, float temperature, int ignore_index, bool normalize) -> (Tensor, Tensor)",
    "maxsim_bwd_int8": "lik::maxsim_bwd_int8(Tensor grad_scores, Tensor Q, Tensor data, Tensor scale, Tensor argmax, Tensor? q_mask, Tensor? q_weight, bool normalize, bool unified, bool[3] needs) -> (Tensor, Tensor, Tensor)",
    "maxsim_fwd_int8": "lik::maxsim_fwd_int8(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, ScalarType argmax_dtype, str backward) -> (Tensor, Tensor, Tensor, Tensor)",
    "maxsim_from_hidden_bwd": "lik::maxsim_from_hidden_bwd(Tensor grad_scores, Tensor Q, Tensor H, Tensor W, Tensor? b, Tensor argmax, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, bool[5] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "maxsim_from_hidden_fwd": "lik::maxsim_from_hidden_fwd(Tensor Q, Tensor H, Tensor W, Tensor? b, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, ScalarType? argmax_dtype) -> (Tensor, Tensor)",
    "maxsim_fwd": "lik::maxsim_fwd(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, ScalarType? argmax_dtype, str backward) -> (Tensor, Tensor)",
    "maxsim_packaged": "lik::maxsim_packaged(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize) -> Tensor",
    "maxsim_quantized_fwd": "lik::maxsim_quantized_fwd(Tensor Q, Tensor data, Tensor scale, Tensor? minimum, str format, Tensor? codes, Tensor? centroids, Tensor? weights, Tensor? cu_seqlens_q, Tensor? d_offsets, Tensor? d_lengths, Tensor? pairs, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, ScalarType? argmax_dtype, SymInt max_seqlen_q) -> (Tensor, Tensor)",
    "maxsim_quantized_bwd": "lik::maxsim_quantized_bwd(Tensor grad_scores, Tensor Q, Tensor data, Tensor scale, Tensor? minimum, str format, Tensor? codes, Tensor? centroids, Tensor? weights, Tensor? cu_seqlens_q, Tensor? d_offsets, Tensor? d_lengths, Tensor? pairs, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, Tensor argmax, bool normalize, bool[2] needs) -> (Tensor, Tensor)",
    "maxsim_ragged_bwd": "lik::maxsim_ragged_bwd(Tensor grad_scores, Tensor Q, Tensor D, Tensor? cu_seqlens_q, Tensor? d_offsets, Tensor? d_lengths, Tensor? pairs, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, Tensor argmax, bool normalize, bool unified, bool[3] needs) -> (Tensor, Tensor, Tensor)",
    "maxsim_ragged_fwd": "lik::maxsim_ragged_fwd(Tensor Q, Tensor D, Tensor? cu_seqlens_q, Tensor? d_offsets, Tensor? d_lengths, Tensor? pairs, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, bool normalize, ScalarType? argmax_dtype, SymInt max_seqlen_q, str backward) -> (Tensor, Tensor)",
    "maxsim_soft_bwd": "lik::maxsim_soft_bwd(Tensor grad_scores, Tensor Q, Tensor D, Tensor lse, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, Tensor? tau, float temperature, bool normalize, bool[4] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    "maxsim_soft_fwd": "lik::maxsim_soft_fwd(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, Tensor? tau, float temperature, bool normalize, bool keep) -> (Tensor, Tensor)",
    "maxsim_token_topk_fwd": "lik::maxsim_token_topk_fwd(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, int top_k, bool normalize, bool keep) -> (Tensor, Tensor)",
    "maxsim_topk": "lik::maxsim_topk(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? cu_seqlens_d, Tensor? q_weight, bool normalize, SymInt top_k, int? chunk) -> (Tensor, Tensor)",
    "maxsim_topk_codes": "lik::maxsim_topk_codes(Tensor Q, Tensor codes, Tensor centroids, Tensor? q_mask, Tensor? d_mask, Tensor? cu_seqlens_d, Tensor? q_weight, bool normalize, SymInt top_k, SymInt? n_probe) -> (Tensor, Tensor)",
    "maxsim_xtr_fwd": "lik::maxsim_xtr_fwd(Tensor Q, Tensor D, Tensor? q_mask, Tensor? d_mask, Tensor? q_weight, SymInt top_k, str normalizer) -> (Tensor, Tensor, Tensor)",
}

SNAPSHOTS: dict[str, tuple[Callable[[str], str], str]] = {
    "schemas": (
        format_schemas,
        "\n".join(schema for name, schema in sorted(_SCHEMAS.items()) if name in list_registered()),
    ),
    "exported": (format_exported, "lik.maxsim\nlik.maxsim_fwd\nlik.maxsim\nlik.maxsim_fwd"),
    "compiled step": (format_compiled_step, "lik.maxsim\nlik.maxsim_fwd\nlik.maxsim_bwd_lowmem"),
}


def check_snapshot(name: str, device: str) -> int:
    """Raise AssertionError with both texts unless they are equal, and return the number of lines."""
    make, expected = SNAPSHOTS[name]
    found = make(device)
    if found != expected:
        raise AssertionError(f"{name}: expected\n{expected}\nfound\n{found}")
    return len(expected.splitlines())
