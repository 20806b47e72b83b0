"""The kernels of sm_90 that are written in Gluon, and document tokens as these read them."""

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
    """The modules of the Gluon kernels, and what lays out and describes tokens for them."""

    specialized: ModuleType
    wide: ModuleType
    rows: ModuleType
    soft_backward: ModuleType
    layout: Callable[[list[int], str], Any]
    descriptor: Any


@functools.cache
def load_kernels() -> GluonModules | None:
    """The Gluon kernels, or None with a triton that has not the Gluon they are written in, or a newer one."""
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
    """The same where a choice says that there are some."""
    modules = load_kernels()
    assert modules is not None
    return modules


class TileDescriptor(NamedTuple):
    """How the tensor memory access unit reads a block of tokens into shared memory."""

    block: list[int]
    layout: Any
    descriptor: Any

    def of(self, x: Tensor, shape: list[int], strides: list[int]) -> Any:
        return self.descriptor(x, shape, strides, self.block, self.layout)


@functools.cache
def make_tile_descriptor(block: tuple[int, ...], dtype: torch.dtype) -> TileDescriptor:
    modules = require_kernels()
    layout = modules.layout(list(block), str(dtype).removeprefix("torch."))
    return TileDescriptor(list(block), layout, modules.descriptor)
