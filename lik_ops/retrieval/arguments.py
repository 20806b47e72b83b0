"""Arguments of the public functions that may come as one of several types, and what they have to be."""

from __future__ import annotations

import operator
import reprlib
import sys
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_strided

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def index(op: str, name: str, x: Any) -> int:
    """What counts as an integer in Python, a bool excepted."""
    try:
        if not isinstance(x, bool) and getattr(x, "dtype", None) != torch.bool:
            return operator.index(x)
    except TypeError:
        pass
    raise TypeError(f"{op}: {name}: expected an int, got {type(x).__name__}")


def check_unmasked(op: str, name: str, x: Any) -> None:
    """No array with a mask of its own, which nobody would look at."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ma.MaskedArray):
        raise TypeError(f"{op}: {name}: expected an array without a mask, got a MaskedArray")


def integers(op: str, name: str, x: Any) -> Tensor:
    """An int64 tensor on the CPU, of a tensor, an array or (nested) lists of integers."""
    check_unmasked(op, name, x)
    if not isinstance(x, Tensor):
        try:
            x = torch.as_tensor(list(x) if isinstance(x, range) else x, device="cpu")
        except (TypeError, ValueError, RuntimeError):  # also of integers beyond 64 bits
            raise TypeError(f"{op}: {name}: expected integers, got {reprlib.repr(x)}") from None
    check_strided(op, name, x)
    if x.is_meta:
        raise ValueError(f"{op}: {name}: expected values, got a meta tensor")
    empty = torch.float32, torch.get_default_dtype()  # what no numbers are of
    if x.dtype not in _INTEGERS and (x.numel() or x.dtype not in empty):
        raise TypeError(f"{op}: {name}: expected integers, got {x.dtype}")
    return x.detach().to("cpu", torch.int64)
