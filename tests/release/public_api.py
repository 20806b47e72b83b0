"""Compare the public API of a checkout with an older commit of the repository.

Functions and classes are read from the sources, without importing them. Names that moved between modules are compared
under their public name. Operators are compared by the snapshots of their schemas in ``opcheck/graphs.py``.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import griffe
import torch

from docs.building import read_schemas

# The same lists are in docs/versions.md.
EXPERIMENTAL = ("lik_ops.distributed", "lik_ops.integrations", "lik_ops.export", "lik_ops.pool_tokens")
STABLE_OPERATORS = ("maxsim", "maxsim_fwd", "maxsim_bwd_lowmem", "maxsim_bwd_unified")


class Change(NamedTuple):
    """A change that may break a caller."""

    name: str
    text: str
    is_stable: bool


def find_last_tag(repository: Path) -> str | None:
    """Return the last release tag before HEAD, or None without one. A tag of HEAD itself is the release to check."""
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]
    for commit in ("HEAD^", "HEAD^2"):
        found = subprocess.run([*command, commit], cwd=repository, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.strip()
    return None


def load_checkout(directory: Path) -> griffe.Module:
    """Return the package of a directory. The working directory, which griffe prefers, does not matter."""
    options = {"resolve_aliases": True, "resolve_external": False, "try_relative_path": False}
    return griffe.load("lik_ops", search_paths=[directory], **options)


def _resolve(module: griffe.Module, name: str) -> griffe.Object:
    """Return the object that a module exports as `name`. A submodule of the same name does not hide a function."""
    path = module.imports.get(name)
    found = module.modules_collection[path] if path else module[name]
    return found.final_target if found.is_alias else found


def list_public(package: griffe.Module) -> dict[str, griffe.Object]:
    """Return the public functions, classes and values of lik_ops, keyed by the name that callers use."""
    modules = [package, package["distributed"]]
    modules += [module for name, module in package["integrations"].modules.items() if not name.startswith("_")]
    found: dict[str, griffe.Object] = {}
    while modules:
        module = modules.pop()
        exported = module.exports or [n for n, x in module.members.items() if not x.is_alias and n[0] != "_"]
        for name in map(str, exported):
            target = _resolve(module, name)
            if target.is_module:
                modules.append(target)
            elif name != "__version__":
                found[f"{module.path}.{name}"] = target
    return found


def _wrap(target: griffe.Object) -> griffe.Module:
    """Return a module with one member, because griffe compares the members of modules and classes."""
    module = griffe.Module("public")
    module.members["member"] = griffe.Alias("member", target, parent=module)
    return module


def _is_stable(name: str) -> bool:
    return not any(f"{name}.".startswith(f"{prefix}.") for prefix in EXPERIMENTAL)


def _compare_names(old: griffe.Module, new: griffe.Module) -> Iterator[Change]:
    before, after = list_public(old), list_public(new)
    for name, target in before.items():
        if name not in after:
            yield Change(name, "removed", _is_stable(name))
            continue
        for breakage in griffe.find_breaking_changes(_wrap(target), _wrap(after[name])):
            inside = breakage.obj.path.removeprefix(target.path)
            detail = breakage.details or getattr(breakage.old_value or breakage.new_value, "name", "")
            yield Change(f"{name}{inside}", f"{breakage.kind.value} {detail}".strip(), _is_stable(name))


def _compare_operators(old: dict[str, str], new: dict[str, str]) -> Iterator[Change]:
    for name, schema in old.items():
        is_stable = name in STABLE_OPERATORS
        if name not in new:
            yield Change(f"lik::{name}", "removed", is_stable)
        elif not torch._C.parse_schema(new[name]).is_backward_compatible_with(torch._C.parse_schema(schema)):
            yield Change(f"lik::{name}", f"{schema} is now {new[name]}", is_stable)


def compare_checkouts(old: Path, new: Path) -> list[Change]:
    """Return the changes from one checkout to another that may break callers."""
    packages = [load_checkout(directory) for directory in (old, new)]
    schemas = [read_schemas((directory / "opcheck" / "graphs.py").read_text()) for directory in (old, new)]
    return [*_compare_names(*packages), *_compare_operators(*schemas)]


def export_commit(repository: Path, commit: str, directory: Path) -> None:
    """Write the files of a commit to `directory`."""
    directory.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=repository, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(directory, filter="tar")


def find_changes(repository: Path, tag: str) -> list[Change]:
    """Return the changes since `tag` that may break callers, in the working tree of `repository`."""
    with tempfile.TemporaryDirectory() as directory:
        old = Path(directory) / "old"
        export_commit(repository, tag, old)
        return compare_checkouts(old, repository)
