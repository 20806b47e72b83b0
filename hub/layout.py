"""Write the folder for the builder of the Hugging Face kernels hub: ``make hub`` writes build/hub.

``torch-ext/lik_ops`` is the package without the parts that the hub cannot use. Its modules use relative imports, so it
loads under any name. The builder adds a module `_ops` that sets the namespace of the operators.
``build/torch-<backend>`` matches the builder's output as far as `kernels.get_local_kernel` checks it.
(``kernel-builder build`` itself needs Nix.)
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NAME, MODULE, LICENSE = "lik-ops", "lik_ops", "Apache-2.0"
BACKENDS = ("cpu", "cuda", "rocm")
# Adapters of other libraries, command lines, and files that the builder writes.
LEFT_OUT = ("integrations/", "opcheck/", "info.py", "warmup.py", "_ops.py")

OPS = """import torch

ops = torch.ops.{namespace}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{namespace}::{{op_name}}"
"""


def sources() -> dict[str, Path]:
    """Return the modules of the kernel, keyed by their path in the kernel."""
    found = {}
    for folder, inside in ((ROOT / "lik_ops", ""), (ROOT / "csrc_triton", "csrc_triton/")):
        for path in sorted(folder.rglob("*.py")):
            name = inside + path.relative_to(folder).as_posix()
            if not name.startswith(LEFT_OUT):
                found[name] = path
    return found


def identifier() -> str:
    """Return seven digits that change with any source file."""
    found = hashlib.sha256()
    for name, path in sources().items():
        found.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()[:7]


def version() -> int:
    """Return the major version, which the hub counts. 0 means not stable."""
    found = re.search(r'"(\d+)\.', (ROOT / "lik_ops" / "_version.py").read_text())
    assert found is not None
    return int(found[1])


def build_toml(repo_id: str | None) -> str:
    general = {"name": NAME, "version": version(), "edition": 5, "license": LICENSE, "backends": list(BACKENDS)}
    lines = ["[general]", *(f"{key} = {json.dumps(value)}" for key, value in general.items())]
    if repo_id is not None:
        lines += ["", "[general.hub]", f"repo-id = {json.dumps(repo_id)}"]
    return "\n".join([*lines, "", "[torch-noarch]", ""])


def _digest(folder: Path) -> dict:
    files = {
        path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return {"algorithm": "sha256", "files": files}


def _write_variant(target: Path, backend: str, unique: str) -> None:
    folder = target / "build" / f"torch-{backend}"
    namespace = f"_{MODULE}_{backend}_{unique}"
    shutil.copytree(target / "torch-ext" / MODULE, folder)
    (folder / "_ops.py").write_text(OPS.format(namespace=namespace))
    metadata = {
        "name": NAME,
        "id": namespace,
        "version": version(),
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": _digest(folder),
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def write(target: Path, repo_id: str | None = None, unique: str | None = None) -> None:
    """Write the folder, replacing an earlier one that this function wrote.

    Args:
        target: the folder. Raises if it has other contents.
        repo_id: the repository on the hub that ``kernel-builder upload`` fills.
        unique: the suffix of the namespaces. By default, a digest of the sources.
    """
    if target.exists() and any(target.iterdir()) and not (target / "build.toml").is_file():
        raise SystemExit(f"{target}: expected a folder that is new, empty or of a kernel")
    shutil.rmtree(target, ignore_errors=True)
    for name, path in sources().items():
        at = target / "torch-ext" / MODULE / name
        at.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, at)
    (target / "build.toml").write_text(build_toml(repo_id))
    for name in ("CARD.md", "flake.nix"):
        shutil.copyfile(HERE / name, target / name)
    for backend in BACKENDS:
        _write_variant(target, backend, unique or identifier())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hub", help="the folder (default build/hub)")
    parser.add_argument("--repo-id", help="destination of kernel-builder upload, owner/name")
    parser.add_argument("--id", dest="unique", help="suffix of the namespaces (default: a digest of the sources)")
    args = parser.parse_args(argv)
    write(args.out, args.repo_id, args.unique)
    print(args.out)


if __name__ == "__main__":
    main()
