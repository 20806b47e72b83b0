"""Replacement of a host library's functions by lik_ops: `enable` and `disable` of the adapters."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import types
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

from ..core.extras import make_missing_error

ENVIRONMENT_VARIABLE = "LIK_OPS_INTEGRATIONS"
_VALUES = {"": True, "1": True, "0": False}


def _accepts_all(*args: Any, **kwargs: Any) -> bool:
    return True


class PatchTarget(NamedTuple):
    """A function of a host library and its replacement."""

    owner: str  # a module, or "module:Class"
    name: str  # "torch.einsum" replaces einsum only for the owner, through its own name `torch`
    function: Callable[..., Any]
    scores: bool = True  # whether its calls are counted
    accepts: Callable[..., bool] = _accepts_all  # whether to call `function`, else the host's own function
    wraps: bool = False  # whether the host's function is the first argument of `function`


class HostLibrary(NamedTuple):
    """A host library, its first supported version and its functions to replace."""

    distribution: str
    at_least: str  # the first version that has the targets
    targets: Callable[[], Sequence[PatchTarget]]  # imports the host
    list_bypassed: Callable[[], Sequence[str]] = tuple  # descriptions of calls that currently do not reach the targets
    bound: str = ""  # the torch requirement of the lik_ops extra that installs the host


class Routing:
    """The replaced functions of a host library, which score with lik_ops until `disable`.

    The result of `enable`.

    Used as a context manager, it ends the routing that it began. If the host was already routed, it ends nothing.

    Attributes:
        calls: the number of calls that lik_ops scored, by function. Calls that raise or that the host answers itself
            are not counted. Compiled code is not counted.
        not_reached: functions that this version of the host does not have.
    """

    def __init__(self, host: HostLibrary) -> None:
        self.host = host
        self.calls: Counter[str] = Counter()
        self.not_reached: tuple[str, ...] = ()
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # (owner, name, the host's function, our function)
        self._began = self._ended = False

    def __enter__(self) -> Routing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._began:
            disable(self.host)

    def _make_replacement(self, theirs: Any, target: PatchTarget) -> Any:
        """Return the replacement of `theirs`: a function, or a copy of a module with one function replaced."""
        _, _, function = target.name.partition(".")
        if not function:
            return self._make_router(theirs, target)
        module = types.ModuleType(theirs.__name__)
        vars(module).update(vars(theirs))
        setattr(module, function, self._make_router(getattr(theirs, function), target))
        return module

    def _make_router(self, theirs: Callable[..., Any], target: PatchTarget) -> Callable[..., Any]:
        """Return a function that calls the target's if routing is on and the target accepts the call, else `theirs`.

        A target's function that returns ``NotImplemented`` also leaves the call to `theirs`.
        """
        function = functools.partial(target.function, theirs) if target.wraps else target.function

        def is_routed() -> bool:
            return not self._ended and is_enabled()

        # Evaluated once, during tracing, like `torch.compiler.assume_constant_result`. This adds no guard.
        is_routed._dynamo_marked_constant = True  # type: ignore[attr-defined]

        @functools.wraps(theirs)
        def routed(*args: Any, **kwargs: Any) -> Any:
            if not is_routed() or not target.accepts(*args, **kwargs):
                return theirs(*args, **kwargs)
            result = function(*args, **kwargs)
            if result is NotImplemented:
                return theirs(*args, **kwargs)
            # Counted after the call, which may raise an error that the host catches to answer the call itself.
            if target.scores and not torch.compiler.is_compiling():
                self.calls[target.name] += 1
            return result

        return routed

    def _replace_functions(self) -> None:
        """Replace the functions of the host."""
        for target in self.host.targets():
            owner, name = _find_owner(target.owner), target.name.partition(".")[0]
            original = getattr(owner, name, None)
            if original is None:
                self.not_reached += (f"{target.owner}.{target.name}",)
                continue
            replacement = self._make_replacement(original, target)
            self._replaced.append((owner, name, original, replacement))
            setattr(owner, name, replacement)

    def _restore_functions(self) -> tuple[str, ...]:
        """Restore the functions of the host.

        Functions that other code replaced since then stay, and their names are returned.
        """
        self._ended = True
        names = []
        for owner, name, original, replacement in self._replaced:
            if getattr(owner, name, None) is replacement:
                setattr(owner, name, original)
            else:
                names.append(f"{owner.__name__}.{name}")
        return tuple(names)


def _find_owner(path: str) -> Any:
    """Return the module or the class "module:Class", or None if this version of the host does not have it."""
    module, _, name = path.partition(":")
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and what it imports does not
        return None
    return getattr(owner, name, None) if name else owner


_active: dict[str, Routing] = {}


def is_enabled() -> bool:
    """Return whether replaced functions call lik_ops. ``LIK_OPS_INTEGRATIONS=0`` turns them off."""
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if value not in _VALUES:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}: expected 0 or 1, got {value!r}")
    return _VALUES[value]


def enable(host: HostLibrary) -> Routing:
    """Replace the functions of `host`, and warn about functions that are not covered.

    Return a new `Routing`. If `host` is already routed, it shares the counts of the active routing and does not end it.

    Raises:
        ImportError: the host library is not installed.
    """
    if (active := _active.get(host.distribution)) is not None:
        handle = Routing(host)
        handle.calls, handle.not_reached = active.calls, active.not_reached
        return handle
    try:
        version = importlib.metadata.version(host.distribution)
    except importlib.metadata.PackageNotFoundError as error:
        name = host.distribution
        packages = " ".join(f"'{x}'" for x in (f"{name}>={host.at_least}", host.bound) if x)
        raise make_missing_error("enable", name, name.removesuffix("-engine"), packages) from error
    routing = Routing(host)
    routing._began = True
    gaps: list[str] = []
    if TorchVersion(version) < TorchVersion(host.at_least):
        gaps.append(f"any function, of {version}: the first version that can be routed is {host.at_least}")
    else:
        routing._replace_functions()
        gaps += [*routing.not_reached, *host.list_bypassed()]
    if not is_enabled():
        gaps.append(f"any call, while {ENVIRONMENT_VARIABLE}=0")
    _active[host.distribution] = routing
    if gaps:
        warnings.warn(f"lik_ops does not reach in {host.distribution}: {'; '.join(gaps)}", stacklevel=3)
    return routing


def disable(host: HostLibrary) -> None:
    """Restore the functions of `host`. Do nothing if they are not replaced."""
    routing = _active.pop(host.distribution, None)
    if routing is not None and (names := routing._restore_functions()):
        warnings.warn(
            f"lik_ops does not restore functions that other code has replaced: {', '.join(names)}", stacklevel=3
        )
