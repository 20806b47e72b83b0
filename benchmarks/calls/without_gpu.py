"""Run the host code of sm_90 on CPU tensors, with launches that do nothing, to measure host time without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lik_ops import backends
from lik_ops.gpu import backend
from lik_ops.gpu.runtime import launcher
from lik_ops.gpu.runtime.memory import makers
from lik_ops.gpu.tuning import architectures

_empty_cpu: Any = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
_bound: dict[tuple, Bound] = {}  # by kernel, options, and description of the arguments


class Bound(launcher.CompiledKernel):
    """A stand-in for a compiled kernel."""

    def __init__(self) -> None:
        self._encoded, self._descriptor_metadata, self.direct = {}, [], _direct

    def launch(self, grid: tuple[int, ...], args: tuple, values: list) -> None:
        pass

    def encoded(self, n: int, descriptor: Any) -> tuple:
        return ("descriptor", *descriptor.shape, *descriptor.strides)


def _direct(x: int, y: int, z: int, stream: int, values: Any) -> None:
    pass


def _bind(kernel: Any, args: tuple, options: dict[str, Any]) -> tuple[Bound, list]:
    description, values = launcher.describe_args(kernel, args)
    return _bound.setdefault((kernel, tuple(options.items()), description), Bound()), values


def get_specializations() -> list[tuple[str, tuple, tuple]]:
    """Return what was launched, as kernel name, options, and description of the arguments.

    On a GPU, each item is compiled separately.
    """
    return [(kernel.__name__, *others) for kernel, *others in _bound]


# With one SM even tiny calls use the Gluon kernels, as in the recorded figures.
_SM_90 = replace(architectures.ARCHITECTURES["sm_90"], processors=1)


def _sm_90(device: torch.device) -> architectures.Architecture:
    return _SM_90


def install(architecture: Callable = _sm_90, bind: Callable = _bind) -> None:
    """Route CPU tensors of this process through the CUDA code, up to launches, which do nothing.

    Args:
        architecture: replaces `lik_ops.gpu.runtime.arguments.architecture`.
        bind: replaces `lik_ops.gpu.runtime.launcher.get_compiled_kernel`.
    """
    torch.set_num_threads(1)
    stand_ins = {
        "architecture": architecture,
        "current_device": lambda: None,
        "find_missing_kernels": lambda launches: {},  # kernels are bound one by one, and nothing is compiled
        "raw_stream": lambda index: 0,
        "makers": lambda device: (_empty_cpu, makers(device)[1]),
    }
    for module in [
        module for name, module in sys.modules.items() if name.startswith(("lik_ops.gpu.", "lik_ops.families."))
    ]:
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)
    launcher.get_compiled_kernel, launcher.ensure_cuda_context = bind, lambda: None  # type: ignore[assignment]
    backends.select_backend = lambda device, dtype: backend
