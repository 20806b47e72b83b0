"""Gluon kernels for sm_90 and the tensor descriptors of their document tiles."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import triton_versions

_log = logging.getLogger("lik_ops")


class GluonModules(NamedTuple):
    """Modules of the forward kernels, the tile layout function, and the descriptor class."""

    dense: ModuleType
    large_d: ModuleType
    packed: ModuleType
    layout: Callable[[list[int], str], Any]
    descriptor: Any


@functools.cache
def load_module(name: str) -> ModuleType | None:
    """Return a module of `csrc_triton` with Gluon kernels.

    Return None if the installed Triton has another Gluon or is newer than tested. Each module is imported on its own.
    A module that fails does not disable the kernels of other modules.
    """
    if not triton_versions.is_tested_version():
        return None
    try:
        return importlib.import_module(f"...csrc_triton.{name}", __package__)
    except (ImportError, AttributeError) as error:
        _log.debug("no Gluon kernels of %s: triton %s: %r", name, triton.__version__, error)
        return None


@functools.cache
def load_kernels() -> GluonModules | None:
    """Return the forward kernels, or None if one of their modules cannot be imported, see `load_module`."""
    names = "dense", "large_d", "packed", "pipeline"
    dense, large_d, packed, pipeline = (load_module(f"forward.sm90.{name}") for name in names)
    if dense is None or large_d is None or packed is None or pipeline is None:
        return None
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return GluonModules(dense, large_d, packed, pipeline.make_tile_layout, TensorDescriptor)


def require_kernels() -> GluonModules:
    """Return the Gluon kernels after a choice has established that they exist."""
    modules = load_kernels()
    assert modules is not None
    return modules


class TileDescriptor(NamedTuple):
    """Factory of TMA descriptors that copy one block of tokens into shared memory."""

    block: list[int]
    layout: Any
    descriptor: Any

    def make(self, x: Tensor, shape: list[int], strides: list[int]) -> Any:
        """Return the descriptor of `x` with the given shape and strides."""
        return self.descriptor(x, shape, strides, self.block, self.layout)


@functools.cache
def make_tile_descriptor(block: tuple[int, ...], dtype: torch.dtype) -> TileDescriptor:
    """Return the descriptor factory for blocks of a shape and dtype."""
    modules = require_kernels()
    # A layout depends only on the width of the elements. Triton has other names for FP8 than torch.
    layout = modules.layout(list(block), f"int{8 * dtype.itemsize}")
    return TileDescriptor(list(block), layout, modules.descriptor)
