"""Conversion and checks of arguments that may have one of several types."""

from __future__ import annotations

import operator
import sys
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..api.padding import pad_queries
from ..core.arguments import add_batch_axis, check_has_values, check_strided, short_repr
from ..core.arrays import share_array, share_arrays
from ..ops.topk import SearchArgs

Results = TypeVar("Results", bound=tuple)

_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_INTEGERS = (*_UNSIGNED, torch.int8, torch.int16, torch.int32, torch.int64)


def convert_search(
    op: str, Q: Any, D: Any, q_mask: Any, d_mask: Any, cu_seqlens_d: Any, q_weight: Any
) -> tuple[Any, ...]:
    """Return the arguments of a search with arrays as tensors, and lists and nested tensors of queries as padded ones.

    One array of documents stays an array, because it may be memory-mapped.
    """
    arrays = {"Q": Q, "q_mask": q_mask, "d_mask": d_mask, "cu_seqlens_d": cu_seqlens_d, "q_weight": q_weight}
    Q, q_mask, d_mask, cu_seqlens_d, q_weight = share_arrays(op, **arrays)
    if isinstance(D, (list, tuple)):
        (D,) = share_arrays(op, D=D)
    Q, q_mask, q_weight = pad_queries(op, Q, q_mask, q_weight)
    return Q, D, q_mask, d_mask, cu_seqlens_d, q_weight


def add_query_axis(s: SearchArgs) -> SearchArgs:
    """Return a search whose Q, `q_mask` and `q_weight` have an axis of queries. A single query gets one."""
    if s.Q.dim() == 3:
        return s
    q_mask, q_weight = add_batch_axis(s.q_mask, True), add_batch_axis(s.q_weight, True)
    return s._replace(Q=s.Q.unsqueeze(0), q_mask=q_mask, q_weight=q_weight)


def drop_query_axis(Q: Tensor, results: Results) -> Results:
    """Return a tuple of results without the axis of queries if Q is a single query."""
    if Q.dim() == 3:
        return results
    tensors = [x.squeeze(0) for x in results]
    return results._make(tensors) if hasattr(results, "_make") else tuple(tensors)  # type: ignore[return-value]


def as_index(op: str, name: str, x: Any) -> int:
    """Return `x` as an int if Python accepts it as an index and it is not a bool. Raise TypeError otherwise."""
    try:
        if not isinstance(x, bool) and getattr(x, "dtype", None) != torch.bool:
            return operator.index(x)
    except TypeError:
        pass
    raise TypeError(f"{op}: {name}: expected an int, got {type(x).__name__}")


def check_unmasked(op: str, name: str, x: Any) -> None:
    """Raise TypeError if `x` is a masked array, because its mask would be ignored."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ma.MaskedArray):
        raise TypeError(f"{op}: {name}: expected an array without a mask, got a MaskedArray")


def as_integers(op: str, name: str, x: Any) -> Tensor:
    """Return a tensor, an array or nested lists of integers as a detached int64 tensor on the CPU.

    Raise TypeError if `x` does not hold integers that fit int64.
    """
    x = _as_tensor(op, name, x, "integers")
    check_strided(op, name, x)
    check_has_values(op, name, x)
    empty = torch.float32, torch.get_default_dtype()  # the dtypes of an empty list
    if x.dtype not in _INTEGERS and (x.numel() or x.dtype not in empty):
        raise TypeError(f"{op}: {name}: expected integers, got {x.dtype}")
    integers = x.detach().to("cpu", torch.int64)
    if x.dtype == torch.uint64 and bool((integers < 0).any()):
        raise TypeError(f"{op}: {name}: expected integers of int64, got {int(integers[integers < 0][0]) + 2**64}")
    return integers


def check_document_indices(op: str, name: str, indices: Tensor, documents: int) -> None:
    """Raise ValueError if an index on the CPU is neither a document nor -1."""
    is_invalid = (indices < -1) | (indices >= documents)
    if bool(is_invalid.any()):
        at = tuple(is_invalid.nonzero()[0].tolist())
        expected = f"indices of {documents} documents, or -1"
        raise ValueError(f"{op}: {name}: expected {expected}, got {int(indices[at])} at {list(at)}")


def as_mask_or_integers(op: str, name: str, x: Any) -> Tensor:
    """Return bools as a bool tensor, or integers as an int64 tensor, on the device of `x`.

    Raise TypeError if `x` holds neither.
    """
    x = _as_tensor(op, name, x, "bools or integers")
    if x.dtype == torch.bool:
        check_strided(op, name, x)
        check_has_values(op, name, x)
        return x.detach()
    if x.dtype.is_floating_point and x.numel():
        raise TypeError(f"{op}: {name}: expected bools or integers, got {x.dtype}")
    if x.device.type == "cpu":
        return as_integers(op, name, x)
    check_strided(op, name, x)
    if x.dtype not in _INTEGERS:
        raise TypeError(f"{op}: {name}: expected bools or integers, got {x.dtype}")
    return x.detach().long()


def _as_tensor(op: str, name: str, x: Any, expected: str) -> Tensor:
    """Return a tensor, an array or nested lists as a tensor. Raise TypeError, naming `expected`, for other objects."""
    check_unmasked(op, name, x)
    if isinstance(x, Tensor):
        return x
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, (list, tuple)) and x and all(isinstance(y, numpy.ndarray) for y in x):
        x = numpy.array(x)  # torch warns about lists of arrays
    try:
        return torch.as_tensor(list(x) if isinstance(x, range) else share_array(x), device="cpu")
    except (TypeError, ValueError, RuntimeError):  # also raised for integers beyond 64 bits
        raise TypeError(f"{op}: {name}: expected {expected}, got {short_repr(x)}") from None
