"""Pytest plugin that runs a host's own suite with lik_ops and counts the calls that lik_ops scored.

``LIK_OPS_HOST`` names the adapter. ``LIK_OPS_ROUTED`` selects the routing: ``no`` for the unchanged suite, ``enabled``,
or ``callables``. The last one replaces the host's callables by the public callables of the adapter.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import types
import warnings
from collections import Counter

import pytest
from explained import EXPLAINED

HOST, ROUTED = os.environ["LIK_OPS_HOST"], os.environ["LIK_OPS_ROUTED"]
# Modules that define the host functions replaced by the adapters' callables.
PUBLIC = {
    "sentence_transformers": [
        "util.similarity",
        "multi_vector_encoder.scoring.colbert",
        "multi_vector_encoder.scoring.xtr",
    ],
    "pylate": ["scores.colbert", "scores.xtr"],
    "colpali": ["utils.maxsim"],
}
PACKAGE = {"colpali": "colpali_engine"}.get(HOST, HOST)
calls: Counter[str] = Counter()


def _colpali_without_models() -> None:
    """Replace the top level of colpali-engine, which imports every model and torchvision, by an empty package."""
    found = importlib.util.find_spec("colpali_engine")
    module = types.ModuleType("colpali_engine")
    module.__spec__, module.__path__ = found, list(found.submodule_search_locations)
    module.__version__ = importlib.metadata.version("colpali-engine")
    sys.modules["colpali_engine"] = module


def _count_calls(name: str, function):
    if inspect.isclass(function):  # counted in its call
        return type(name, (function,), {"__call__": _count_calls(name, function.__call__)})

    @functools.wraps(function)
    def counted(*args, **kwargs):
        result = function(*args, **kwargs)
        calls[name] += 1
        return result

    return counted


def _replace_host_callables(adapter) -> None:
    """Replace the host's callables by the adapter's callables of the same name."""
    theirs = {}
    for module in PUBLIC[HOST]:
        names = vars(importlib.import_module(f"{PACKAGE}.{module}"))
        theirs |= {id(x): n for n, x in names.items() if n in adapter.__all__ and n not in ("enable", "disable")}
    ours = {name: _count_calls(name, getattr(adapter, name)) for name in theirs.values()}
    for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == PACKAGE]:
        for name, x in list(vars(module).items()):
            if id(x) in theirs:
                setattr(module, name, ours[theirs[id(x)]])


def pytest_configure(config) -> None:
    global calls
    if HOST == "colpali" and importlib.util.find_spec("torchvision") is None:
        _colpali_without_models()
    importlib.import_module(PACKAGE)
    if ROUTED == "no":
        return
    adapter = importlib.import_module(f"lik_ops.integrations.{HOST}")
    if ROUTED == "callables":
        _replace_host_callables(adapter)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = adapter.enable().calls


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        for (host, routed, name), reason in EXPLAINED.items():
            if host == HOST and routed in (ROUTED, "any") and item.nodeid.endswith(name):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def pytest_terminal_summary(terminalreporter) -> None:
    each = ", ".join(f"{name} {count}" for name, count in sorted(calls.items()))
    terminalreporter.write_line(f"lik_ops scored {sum(calls.values())} calls{f': {each}' if each else ''}")


def pytest_sessionfinish(session, exitstatus) -> None:
    if ROUTED != "no" and not calls and exitstatus == 0:
        session.exitstatus = 1  # an unrouted run passes too
