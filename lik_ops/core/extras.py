"""Optional dependencies: import them when they are used, and name the extra of lik_ops that installs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Packages that pip installs for each extra without a checkout of lik_ops. No index is known to have lik_ops itself.
PACKAGES = {"haystack": "haystack-ai", "onnx": "onnxscript", "retrieval": "safetensors numpy"}


def make_missing_error(purpose: str, package: str, extra: str, packages: str | None = None) -> ModuleNotFoundError:
    """Return the error for a missing dependency of the public function `purpose`, which an extra of lik_ops installs.

    `packages` are arguments of pip that install it, if `PACKAGES` has none.
    """
    hint = f"pip install {packages or PACKAGES[extra]}, or in a checkout of lik_ops pip install '.[{extra}]'"
    return ModuleNotFoundError(f"{purpose}: {package} is not installed: {hint}", name=package)


def import_extra(purpose: str, extra: str, *modules: str) -> Any:
    """Import modules of an optional dependency for the public function `purpose`, and return the last one.

    Raises:
        ModuleNotFoundError: one of them is not installed. The message names `extra`, which installs them.
    """
    last_module = None
    for module in modules:
        try:
            last_module = import_module(module)
        except ModuleNotFoundError as error:
            raise make_missing_error(purpose, (error.name or module).split(".")[0], extra) from error
    return last_module
