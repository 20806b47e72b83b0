"""Conversion of numpy arrays to tensors. numpy is not imported: a caller that has an array has imported it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def is_array(x: Any) -> bool:
    """Return whether `x` is a numpy array. Masked arrays are not, because their mask would be ignored."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray) and not isinstance(x, numpy.ma.MaskedArray)


def share_array(x: Any) -> Any:
    """Return an array as a tensor that shares its memory, and other values unchanged.

    Arrays that are read-only, have negative strides or another byte order are copied.

    Raises:
        TypeError: torch has no dtype for the elements.
    """
    if not is_array(x):
        return x
    if not (x.flags.writeable and x.dtype.isnative and all(s >= 0 for s in x.strides)):
        x = x.astype(x.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(x)
    except TypeError:
        raise TypeError(f"expected an array of numbers, got {x.dtype}") from None


def share_token_arrays(op: str, arguments: tuple, documents: str = "D") -> tuple[Any, ...]:
    """Return Q, D, q_mask, d_mask and q_weight as `share_arrays` does. Messages name the documents `documents`."""
    if all([x is None or isinstance(x, Tensor) for x in arguments]):
        return arguments
    names = "Q", documents, "q_mask", "d_mask", "q_weight"
    return share_arrays(op, **dict(zip(names, arguments, strict=True)))


def share_arrays(op: str, **arguments: Any) -> tuple[Any, ...]:
    """Return arguments with each array, alone or in a list, as a tensor that shares its memory.

    Raises:
        TypeError: torch has no dtype for the elements of an array.
    """
    tensors = []
    for name, x in arguments.items():
        if x is not None and not isinstance(x, Tensor):
            try:
                is_list = isinstance(x, (list, tuple)) and any(map(is_array, x))
                x = [share_array(y) for y in x] if is_list else share_array(x)
            except TypeError as error:
                raise TypeError(f"{op}: {name}: {error}") from None
        tensors.append(x)
    return tuple(tensors)
