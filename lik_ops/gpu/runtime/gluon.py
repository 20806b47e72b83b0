"""Gluon kernels for sm_90 and the tensor descriptors of their document tiles."""

from __future__ import annotations

import functools
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
    """Modules of the Gluon kernels, the tile layout function, and the descriptor class."""

    specialized: ModuleType
    wide: ModuleType
    rows: ModuleType
    soft_backward: ModuleType
    layout: Callable[[list[int], str], Any]
    descriptor: Any


@functools.cache
def load_kernels() -> GluonModules | None:
    """Return the Gluon kernels, or None if the installed Triton has another Gluon or is newer than tested."""
    if not triton_versions.is_tested_version():
        return None
    try:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from ...csrc_triton.forward.sm90 import dense as sm90_dense
        from ...csrc_triton.forward.sm90 import large_d
        from ...csrc_triton.forward.sm90 import packed as sm90_packed
        from ...csrc_triton.forward.sm90.pipeline import make_tile_layout
        from ...csrc_triton.soft import backward_sm90 as soft_backward_sm90
    except (ImportError, AttributeError) as error:
        _log.debug("no Gluon kernels: triton %s: %r", triton.__version__, error)
        return None
    modules = sm90_dense, large_d, sm90_packed, soft_backward_sm90
    return GluonModules(*modules, make_tile_layout, TensorDescriptor)


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

    def of(self, x: Tensor, shape: list[int], strides: list[int]) -> Any:
        """Return the descriptor of `x` with the given shape and strides."""
        return self.descriptor(x, shape, strides, self.block, self.layout)


@functools.cache
def make_tile_descriptor(block: tuple[int, ...], dtype: torch.dtype) -> TileDescriptor:
    """Return the descriptor factory for blocks of a shape and dtype."""
    modules = require_kernels()
    layout = modules.layout(list(block), str(dtype).removeprefix("torch."))
    return TileDescriptor(list(block), layout, modules.descriptor)
