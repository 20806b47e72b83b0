"""The Triton backend: turns tensors into kernel arguments, picks configurations and launches.

Runs on CUDA and ROCm GPUs, and on CPU tensors under Triton's interpreter (``TRITON_INTERPRET=1``), which the tests use.
"""

from __future__ import annotations

import contextlib
import functools
import warnings

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..csrc_triton import backward_lowmem as lowmem_kernels
from ..csrc_triton import backward_unified as unified_kernels
from ..csrc_triton import forward as forward_kernels
from ..csrc_triton.arguments import Config, Documents, Queries, Sizes, Upstream
from . import configs
from .configs import ARCHITECTURES, INTERPRETER, Architecture

_INT32_MAX = 2**31 - 1
_SCATTER_PROGRAMS = 4096  # enough to fill any GPU several times


def _interpreting() -> bool:
    return bool(triton.knobs.runtime.interpret)


def unavailable(device: torch.device) -> str | None:
    """None if the kernels can run on `device`, else the reason why not."""
    if device.type == "cpu" and _interpreting():
        return None
    if device.type != "cuda":
        return f"the Triton kernels run on CUDA and ROCm devices, not on {device.type}"
    return None


@functools.cache
def architecture(device: torch.device) -> Architecture:
    """The entry of the configuration table for `device`; a GPU that has none gets its own shared memory size."""
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
        return ARCHITECTURES.get(name, Architecture(name, 64 * 1024, wavefront=properties.warp_size))
    name = f"sm_{properties.major}{properties.minor}"
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in torch's stubs
    return ARCHITECTURES.get(name, Architecture(name, shared_memory))


def _on_device(device: torch.device):
    """Make the tensors' device the current one for a launch: Triton launches on the current device."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def _queries(Q: Tensor, mask: Tensor | None, weight: Tensor | None) -> Queries:
    none = (None, 0, 0)
    return Queries(
        Q,
        *Q.stride(),
        *(none if mask is None else (mask, *mask.stride())),
        *(none if weight is None else (weight, *weight.stride())),
    )


def _documents(D: Tensor, mask: Tensor | None) -> Documents:
    owner = () if D.dim() == 4 else (0,)
    return Documents(D, *owner, *D.stride(), *((None, 0, 0, 0) if mask is None else (mask, *owner, *mask.stride())))


def _upstream(grad_scores: Tensor, argmax: Tensor) -> Upstream:
    stride_q, stride_k = grad_scores.stride()
    return Upstream(grad_scores, stride_q, stride_k, argmax.contiguous())


def _sizes(Q: Tensor, D: Tensor) -> Sizes:
    return Sizes(Q.shape[0], D.shape[-3], Q.shape[1], D.shape[-2])


def _wide(Q: Tensor, D: Tensor) -> int:
    """`Config.WIDE`: whether offsets of a document's tokens, or even of a token's features, may exceed 32 bits."""
    features = D.shape[-1] * max(abs(Q.stride(-1)), abs(D.stride(-1)))
    if features > _INT32_MAX:
        return 2
    return 1 if (D.shape[-2] + 64) * abs(D.stride(-2)) + features > _INT32_MAX else 0


def _descriptor(D: Tensor, config: Config) -> TensorDescriptor | None:
    """All document tokens as rows for the tensor memory access unit, or None where it cannot read them."""
    rows, d = D.numel() // D.shape[-1], D.shape[-1]
    aligned = D.data_ptr() % 16 == 0 and d * D.element_size() % 16 == 0
    if D.shape[-2] < config.BN or not aligned or rows > _INT32_MAX or not D.is_contiguous():
        return None
    return TensorDescriptor(D, [rows, d], [d, 1], [config.BN, config.BD])


def _check_grid(programs: int) -> tuple[int]:
    if programs > _INT32_MAX:
        raise ValueError(f"lik_ops: {programs} programs in one launch; a CUDA grid holds {_INT32_MAX}: score in parts")
    return (programs,)


def allow_tf32() -> bool:
    """Whether the user allowed TF32 for matrix products of fp32 inputs."""
    return torch.backends.cuda.matmul.allow_tf32


def forward(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Scores [Nq, Nd] or [Nq, K] in fp32, and the winners (an empty tensor if `argmax_dtype` is None)."""
    sizes, d, candidates = _sizes(Q, D), Q.shape[-1], D.dim() == 4
    scores = Q.new_empty((sizes.Nq, sizes.K), dtype=torch.float32)
    shape = (sizes.Nq, sizes.K, sizes.Lq) if candidates else (sizes.K, sizes.Nq, sizes.Lq)
    argmax = Q.new_empty(0, dtype=torch.int32) if argmax_dtype is None else Q.new_empty(shape, dtype=argmax_dtype)
    if scores.numel() == 0 or sizes.Lq == 0:
        return scores.zero_(), argmax
    arch = architecture(Q.device)
    launch = configs.forward(
        arch,
        Q.dtype,
        sizes.Nq,
        sizes.Lq,
        d,
        candidates=candidates,
        normalize=normalize,
        wide=_wide(Q, D),
        tf32=allow_tf32(),
        documents=sizes.K * (sizes.Nq if candidates else 1),
    )
    tiles = _descriptor(D, launch.config) if arch.has_descriptors else None
    if tiles is None or argmax_dtype is not None:
        launch = launch.visiting()
    with _on_device(Q.device):
        forward_kernels.maxsim_forward[_check_grid(launch.programs(sizes.Nq, sizes.K))](
            _queries(Q, q_mask, q_weight),
            _documents(D, d_mask),
            tiles,
            scores,
            None if argmax_dtype is None else argmax,
            *sizes,
            d,
            launch.config,
            **launch.options(arch),
        )
    return scores, argmax


def _outputs(Q: Tensor, D: Tensor, needs: list[bool]) -> list[Tensor]:
    """A gradient for each of Q, D, q_weight: zeros where nothing can flow, [0] where not needed."""
    empty = Q.numel() == 0 or D.numel() == 0
    new = torch.zeros if empty else torch.empty
    shapes, dtypes = (Q.shape, D.shape, Q.shape[:2]), (Q.dtype, D.dtype, torch.float32)
    return [
        new(shape if need else (0,), dtype=dtype, device=Q.device)
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
    ]


def backward_lowmem(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, D and q_weight, each element summed in a fixed order by the program that owns it."""
    sizes, d, candidates = _sizes(Q, D), Q.shape[-1], D.dim() == 4
    grad_Q, grad_D, grad_weight = outputs = _outputs(Q, D, needs)
    if Q.numel() == 0 or D.numel() == 0:
        return grad_Q, grad_D, grad_weight
    queries, documents = _queries(Q, q_mask, q_weight), _documents(D, d_mask)
    up = _upstream(grad_scores, argmax)
    wanted = [g if need else None for g, need in zip(outputs, needs, strict=True)]
    arch = architecture(Q.device)
    with _on_device(Q.device):
        if needs[0] or needs[2]:
            launch = configs.gather(d, candidates=candidates, normalize=normalize, wide=_wide(Q, D))
            grid = _check_grid(sizes.Nq * triton.cdiv(sizes.Lq, launch.config.BM))
            lowmem_kernels.maxsim_grad_queries[grid](
                queries, documents, up, wanted[0], wanted[2], *sizes, d, launch.config, **launch.options(arch)
            )
        if needs[1]:
            launch = configs.grad_documents(arch, d, candidates=candidates, normalize=normalize, wide=_wide(Q, D))
            count = sizes.Nq * sizes.K if candidates else sizes.K
            grid = _check_grid(count * triton.cdiv(sizes.Ld, launch.config.BN))
            lowmem_kernels.maxsim_grad_documents[grid](
                queries, documents, up, grad_D, *sizes, d, launch.config, **launch.options(arch)
            )
    return grad_Q, grad_D, grad_weight


def _finish(
    X: Tensor, queries: Queries, sums: Tensor, grad: Tensor | None, grad_weight: Tensor | None, normalize: bool
) -> None:
    """Write the gradient of the rows ``X [N, K, L, d]`` from their sums, and of their weights."""
    sizes = Sizes(X.shape[0], X.shape[1], X.shape[2], 0)
    d = X.shape[-1]
    arch = architecture(X.device)
    launch = configs.gather(d, candidates=False, normalize=normalize, wide=_wide(X, X))
    grid = _check_grid(sizes.Nq * sizes.K * triton.cdiv(sizes.Lq, launch.config.BM))
    unified_kernels.maxsim_finish[grid](
        _documents(X, None), queries, sums, grad, grad_weight, *sizes, d, launch.config, **launch.options(arch)
    )


def _require_nondeterminism_allowed() -> None:
    """Do as torch's own atomic operations under `torch.use_deterministic_algorithms`: raise, or warn if told to."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        "lik::maxsim_bwd_unified adds atomically and does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. Use backward='lowmem', or 'auto'."
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


def backward_unified(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, D and q_weight in one pass over the winners, through fp32 sums and atomic adds.

    Raises:
        RuntimeError: under `torch.use_deterministic_algorithms(True)`.
    """
    _require_nondeterminism_allowed()
    sizes, d, candidates = _sizes(Q, D), Q.shape[-1], D.dim() == 4
    grad_Q, grad_D, grad_weight = outputs = _outputs(Q, D, needs)
    if Q.numel() == 0 or D.numel() == 0:
        return grad_Q, grad_D, grad_weight
    queries, documents = _queries(Q, q_mask, q_weight), _documents(D, d_mask)
    up = _upstream(grad_scores, argmax)
    wanted = [g if need else None for g, need in zip(outputs, needs, strict=True)]
    arch = architecture(Q.device)
    sum_Q = torch.zeros(Q.shape, dtype=torch.float32, device=Q.device) if needs[0] or needs[2] else None
    sum_D = torch.zeros(D.shape, dtype=torch.float32, device=Q.device) if needs[1] else None
    launch = configs.gather(d, candidates=candidates, normalize=normalize, wide=_wide(Q, D))
    row_tiles = sizes.Nq * triton.cdiv(sizes.Lq, launch.config.BM)
    K_per_program = max(1, triton.cdiv(sizes.K * row_tiles, _SCATTER_PROGRAMS))
    with _on_device(Q.device):
        grid = (*_check_grid(row_tiles), triton.cdiv(sizes.K, K_per_program))
        unified_kernels.maxsim_scatter[grid](
            queries, documents, up, sum_Q, sum_D, *sizes, d, K_per_program, launch.config, **launch.options(arch)
        )
        if sum_Q is not None:
            _finish(Q.unsqueeze(1), queries, sum_Q, wanted[0], wanted[2], normalize)
        if sum_D is not None:
            _finish(D if candidates else D.unsqueeze(0), queries._replace(weight=None), sum_D, grad_D, None, normalize)
    return grad_Q, grad_D, grad_weight
