"""Parts of a configuration table: rows with the limits of a call, and overrides that follow the rows.

A function that configures a kernel selects the first row that covers a call, makes a `LaunchConfig` of it, and applies
the overrides in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from .architectures import Architecture, KernelKey, LaunchConfig, next_power_of_2

UNLIMITED = 2**62
HALF_DTYPES, FP32_DTYPES = (torch.float16, torch.bfloat16), (torch.float32,)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TableRow(Generic[T]):
    """Upper limits of a call, and the value for the calls within these limits."""

    value: T
    units: tuple[str, ...] = ()  # tensor core types and names of architectures. (): all
    dtypes: tuple[torch.dtype, ...] = HALF_DTYPES + FP32_DTYPES
    d: int = UNLIMITED
    Lq: int = UNLIMITED
    normalize: bool = True
    wide: int = 2  # `KernelConfig.WIDE_OFFSETS`, or 2 for rows that are loaded feature by feature

    def covers(self, arch: Architecture, dtype: torch.dtype, Lq: int, d: int, normalize: bool, wide: int) -> bool:
        """Return whether a call is within the limits."""
        runs = not self.units or arch.name in self.units or arch.unit in self.units
        fits = d <= self.d and Lq <= self.Lq and wide <= self.wide
        return runs and fits and dtype in self.dtypes and normalize <= self.normalize


def select_row(
    rows: Iterable[TableRow[T]], arch: Architecture, dtype: torch.dtype, Lq: int, d: int, normalize: bool, wide: int
) -> T:
    """Return the value of the first row that covers a call."""
    for row in rows:
        if row.covers(arch, dtype, Lq, d, normalize, wide):
            return row.value
    raise AssertionError(f"lik_ops: no row for {arch.unit}, {dtype}")


def select_for(rows: Iterable[TableRow[T]], kind: KernelKey, Lq: int = 1) -> T:
    """Return the value of the first row that covers calls of `kind`.

    Rows of tokens that are loaded feature by feature are selected as with ``wide=2``.
    """
    wide = kind.wide if kind.has_vector_loads else 2
    return select_row(rows, kind.arch, kind.dtype, Lq, kind.d, kind.normalize, wide)


class StepConfig(NamedTuple):
    """BM rows, BN rows of the other side, and at most BD features of a step, with the launch of the kernel."""

    BM: int
    BN: int
    BD: int
    warps: int
    stages: int

    def launch(self, kind: KernelKey, max_registers: int | None, **fields: Any) -> LaunchConfig:
        """Return the launch with other fields of `KernelConfig`."""
        BD = min(max(next_power_of_2(kind.d), 16), self.BD)
        config = kind.config(self.BM, self.BN, BD, **fields)
        return LaunchConfig(config, num_warps=self.warps, num_stages=self.stages, max_registers=max_registers)


@dataclass(frozen=True, kw_only=True)
class Override:
    """A change of the configurations that `when` selects, given the call and its configuration so far.

    `change` maps fields of `LaunchConfig` and `KernelConfig` to new values. A function computes its value from the call
    and the configuration. `reason` and `measured_on`, a GPU or a compiler, are "" if they were not recorded.
    """

    when: Callable[[Any, LaunchConfig], Any]
    change: Mapping[str, Any]
    reason: str = ""
    measured_on: str = ""


def apply_overrides(overrides: Iterable[Override], call: Any, launch: LaunchConfig) -> LaunchConfig:
    """Return the configuration of a call after all overrides that apply to it."""
    for override in overrides:
        if override.when(call, launch):
            fields = {k: x(call, launch) if callable(x) else x for k, x in override.change.items()}
            launch = launch.change(**fields)
    return launch


def at_most(name: str, limit: int) -> Callable[[Any, LaunchConfig], int]:
    """Return a function for `Override.change` that limits a field of `KernelConfig`."""
    return lambda call, launch: min(getattr(launch.config, name), limit)
