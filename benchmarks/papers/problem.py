"""Base of the kinds of problems: the calls of each contender, and the check of their results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..support import gpu
from ..support.contenders import NOT_INSTALLED
from .plan import FAST_PLAID, FLASH, LATE, Spec

Call = Callable[[], object]
TOLERANCE = 1e-2  # of scores in half precision
QUANTIZED_TOLERANCE = 5e-2
GRADIENT_TOLERANCE = 0.5  # rounded similarities move the argmax
NEEDS_GPU = "its kernels need a GPU"


@dataclass
class PaperContender:
    """One contender of a measurement."""

    parts: Mapping[str, Callable[[], Call]]  # makes the call of a part right before it is timed
    check: Callable[[], dict[str, float]]  # the errors against fp64
    tolerance: float = TOLERANCE
    held: tuple[Tensor, ...] = ()  # tensors that exist before the call, for peaks that include the inputs
    values: Mapping[str, Any] = field(default_factory=dict)  # figures that are known without a timed call

    @property
    def held_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.held)


class Problem:
    """A spec with its tensors on a device. Subclasses make the contenders."""

    def __init__(self, spec: Spec, device: str) -> None:
        self.spec, self.device = spec, device

    def contender(self, name: str) -> PaperContender | str:
        """Return a contender, or the reason that it is missing.

        Raises:
            KeyError: the name is unknown.
        """
        if self.device == "cpu" and name.startswith((LATE, FLASH)):
            return NEEDS_GPU
        return self.make(name)

    def make(self, name: str) -> PaperContender | str:
        raise NotImplementedError


def is_peer(name: str) -> bool:
    return name.startswith((LATE, FLASH, FAST_PLAID))


def missing(module: str) -> str:
    """Return a reason if a peer cannot be imported, else an empty string."""
    try:
        __import__(module)
    except ImportError:
        return NOT_INSTALLED
    return ""


@contextmanager
def products_in(tf32: bool) -> Iterator[None]:
    """Let fp32 products of torch use TF32, or not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def environment_of(**variables: str) -> Iterator[None]:
    """Set environment variables of this process."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_with_peak(call: Call) -> tuple[Any, int]:
    """Return the result of a call, and its peak device memory beyond existing memory, 0 without a GPU."""
    found: list[object] = []
    peak = gpu.peak_bytes(lambda: found.append(call()))
    return (found.pop() if found else call()), peak


def inside(manager: Callable[[], object], call: Call) -> Call:
    """Return the call inside a new context of `manager`."""

    def run() -> object:
        with manager():  # type: ignore[attr-defined]
            return call()

    return run
