"""The Triton backend: turns tensors into kernel arguments, picks configurations and launches.

Runs on CUDA and ROCm GPUs, and on CPU tensors under Triton's interpreter (``TRITON_INTERPRET=1``), which the tests use.
"""

from __future__ import annotations

import contextlib
import functools

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..csrc_triton import forward as forward_kernels
from ..csrc_triton.arguments import Config, Documents, Queries, Sizes
from . import configs
from .configs import ARCHITECTURES, INTERPRETER, Architecture

_INT32_MAX = 2**31 - 1


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
    )
    queries_per_tile = launch.config.BM // launch.config.SLOT
    row_tiles = sizes.Nq if candidates else triton.cdiv(sizes.Nq, queries_per_tile)
    with _on_device(Q.device):
        forward_kernels.maxsim_forward[_check_grid(row_tiles * sizes.K)](
            _queries(Q, q_mask, q_weight),
            _documents(D, d_mask),
            _descriptor(D, launch.config) if arch.has_descriptors else None,
            scores,
            None if argmax_dtype is None else argmax,
            *sizes,
            d,
            launch.config,
            **launch.options(arch),
        )
    return scores, argmax
