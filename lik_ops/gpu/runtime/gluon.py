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
    """Modules of the forward kernels."""

    dense: ModuleType
    large_d: ModuleType
    packed: ModuleType
    pipeline: ModuleType


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
    modules: list[Any] = [load_module(f"forward.sm90.{name}") for name in GluonModules._fields]
    return None if None in modules else GluonModules(*modules)


def require_kernels() -> GluonModules:
    """Return the Gluon kernels after a choice has established that they exist."""
    modules = load_kernels()
    assert modules is not None
    return modules


@functools.cache
def make_descriptor_factory(block: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Any]:
    """Return a function that makes TMA descriptors, which copy one block into shared memory.

    Its arguments are a tensor of `dtype`, and the shape and strides to read it with.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # A layout depends only on the width of the elements. Triton has other names for FP8 than torch.
    layout = require_kernels().pipeline.make_tile_layout(list(block), f"int{8 * dtype.itemsize}")
    return functools.partial(TensorDescriptor, block_shape=list(block), layout=layout)


def make_vector_descriptor(x: Tensor, block: int) -> Any:
    """Return a TMA descriptor of a contiguous tensor as a vector, for blocks of `block` elements."""
    return make_descriptor_factory((block,), x.dtype)(x, [x.numel()], [1])
