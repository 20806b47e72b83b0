"""Conversion of tensors to kernel arguments: architecture, groups, sizes, offset widths, descriptors, and grids."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...core.segments import PackedArgs
from ...csrc_triton.common.arguments import DocumentArgs, KernelConfig, QueryArgs, SegmentArgs, SizeArgs
from ..tuning.architectures import ARCHITECTURES, INTERPRETER, Architecture

_INT32_MAX = 2**31 - 1
_NO_STRIDES = (None, None, None)
# None if torch was built without CUDA and ROCm.
current_device: Callable = getattr(torch._C, "_cuda_getDevice", None)  # type: ignore[assignment]
meta_architecture: Architecture | None = None  # of meta tensors, for `lik_ops.explain`


def unavailable(device: torch.device) -> str | None:
    """Return None if the kernels can run on `device`, else the reason."""
    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"the Triton kernels run on CUDA and ROCm devices, not on {device.type}"
    return None


@functools.cache
def architecture(device: torch.device) -> Architecture:
    """Return the architecture of `device`.

    A GPU that is not in `ARCHITECTURES` gets its own shared memory size.
    """
    if device.type == "meta" and meta_architecture is not None:
        return meta_architecture
    if device.type == "cpu":
        return INTERPRETER
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack some fields
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
        arch = ARCHITECTURES.get(name, Architecture(name, 64 * 1024, threads_per_warp=properties.warp_size))
    else:
        name = f"sm_{properties.major}{properties.minor}"
        shared_memory = properties.shared_memory_per_block_optin
        arch = ARCHITECTURES.get(name, Architecture(name, shared_memory))
    return replace(arch, processors=properties.multi_processor_count, gpu=properties.name)


def use_device(device: torch.device):
    """Return a context that makes the tensors' device current, because Triton launches on the current device."""
    if device.index is not None and device.index != current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def get_strides(per_token: Tensor | None) -> tuple[int | None, ...]:
    """Return the strides of a mask or weight with two axes, or Nones without one."""
    return (None, None) if per_token is None else per_token.stride()


def make_query_args(Q: Tensor, mask: Tensor | None, weight: Tensor | None) -> QueryArgs:
    """Return dense query tokens with mask and weight as a kernel argument."""
    if mask is None and weight is None:
        return QueryArgs._make((Q, *Q.stride(), *_NO_STRIDES, *_NO_STRIDES))
    return QueryArgs._make((Q, *Q.stride(), mask, *get_strides(mask), weight, *get_strides(weight)))


def get_owner_strides(x: Tensor | None, candidates: bool) -> tuple[int | None, ...]:
    """Return strides beginning with the owner stride, which is 0 in the cross product."""
    if x is None:
        return _NO_STRIDES
    return x.stride() if candidates else (0, *x.stride())


def make_document_args(D: Tensor, mask: Tensor | None) -> DocumentArgs:
    """Return dense document tokens with their mask as a kernel argument."""
    candidates = D.dim() == 4
    return DocumentArgs._make((D, *get_owner_strides(D, candidates), mask, *get_owner_strides(mask, candidates)))


def make_packed_query_args(c: PackedArgs) -> QueryArgs:
    """Return packed query tokens with mask and weight as a kernel argument."""
    mask, weight = ((None, None, None) if x is None else (x, 0, x.stride(-1)) for x in (c.q_mask, c.q_weight))
    return QueryArgs._make((c.Q, 0, *c.Q.stride()[-2:], *mask, *weight))


def make_packed_document_args(c: PackedArgs, masked: bool = False) -> DocumentArgs:
    """Return packed document tokens as a kernel argument, with their mask only if `masked`.

    The backward needs no mask, because a masked token is never an argmax.
    """
    mask = (None,) * 4 if c.d_mask is None or not masked else (c.d_mask, 0, 0, c.d_mask.stride(-1))
    return DocumentArgs._make((c.D, 0, 0, *c.D.stride()[-2:], *mask))


def make_segment_args(c: PackedArgs) -> SegmentArgs:
    """Return the segment arrays of a packed call as a kernel argument."""
    return SegmentArgs._make((*c.indices, c.q_each, c.d_each))


def has_even_stride(x: Tensor) -> bool:
    """Return whether all rows are evenly spaced, so that a dense tensor can be read as packed rows."""
    return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def drop_single_query(D: Tensor, d_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the candidates of a single query as documents ``[K, Ld, d]``, which more kernels support.

    Scores and argmax have the same elements in memory. Other documents are returned as they are.
    """
    if D.dim() == 4 and D.shape[0] == 1:
        return D.squeeze(0), None if d_mask is None else d_mask.squeeze(0)
    return D, d_mask


def make_size_args(Q: Tensor, D: Tensor) -> SizeArgs:
    """Return the sizes of a dense call."""
    return SizeArgs(Q.shape[0], D.shape[-3], Q.shape[1], D.shape[-2])


def choose_offset_width(Q: Tensor, D: Tensor, rows: int | None = None) -> int:
    """Return `KernelConfig.WIDE_OFFSETS` of a call with documents of `rows` tokens, by default those of D.

    The value says whether offsets of a document's tokens, or even of a token's features, may exceed 32 bits.
    """
    features = get_feature_reach(Q, D)
    if choose_row_offset_width(features) == 2:
        return 2
    rows = D.shape[-2] if rows is None else rows
    return int((rows + 64) * abs(D.stride(-2)) + features > _INT32_MAX)


def choose_row_offset_width(features: int) -> int:
    """Return `KernelConfig.WIDE_OFFSETS` of a kernel that locates rows with 64 bits.

    Args:
        features: the result of `get_feature_reach`.
    """
    return 2 if features > _INT32_MAX else 1


def get_feature_reach(Q: Tensor, D: Tensor) -> int:
    """Return the distance in elements that the features of a token span."""
    return D.shape[-1] * max(abs(Q.stride(-1)), abs(D.stride(-1)))


def make_descriptor(D: Tensor, config: KernelConfig) -> TensorDescriptor | None:
    """Return a TMA descriptor of all document tokens as rows, or None if TMA cannot read them."""
    if not supports_descriptor(D) or D.data_ptr() % 16:
        return None
    d = D.shape[-1]
    return TensorDescriptor(D, [D.numel() // d, d], [d, 1], [config.BN, config.BD])


def supports_descriptor(D: Tensor) -> bool:
    """Return whether TMA can read the document tokens if they start at a multiple of 16 bytes."""
    rows, d = D.numel() // D.shape[-1], D.shape[-1]
    return 0 < rows <= _INT32_MAX and d * D.element_size() % 16 == 0 and D.is_contiguous()


def supports_query_descriptor(Q: Tensor) -> bool:
    """Return whether TMA can read blocks of several queries if the tokens start at a multiple of 16 bytes."""
    strides = [stride * Q.element_size() for stride in Q.stride()[:2]]
    # TMA strides are nonzero and less than 2^40 bytes.
    return Q.stride(2) == 1 and max(Q.shape) <= _INT32_MAX and all(0 < s < 2**40 and s % 16 == 0 for s in strides)


def check_grid(programs: int) -> tuple[int]:
    """Return a one-dimensional grid, or raise ValueError if it has too many programs."""
    if programs > _INT32_MAX:
        raise ValueError(f"lik_ops: {programs} programs in one launch; a CUDA grid holds {_INT32_MAX}: score in parts")
    return (programs,)


def is_tf32_allowed(dtype: torch.dtype) -> bool:
    """Return whether inputs are fp32 and any PyTorch setting allows TF32 for their matrix products.

    The older ``torch.backends.cuda.matmul.allow_tf32`` follows this setting, and raises once a newer setting was used.
    """
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
