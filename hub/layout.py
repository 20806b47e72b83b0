"""The folder that the builder of the Hugging Face kernels hub takes: ``make hub`` writes build/hub.

``torch-ext/lik_ops`` is the package without what the hub has no use for. Its modules import each other relatively, so
it loads under any name, and the namespace of its operators is what `_ops` says, a module that the builder adds.
``build/torch-<backend>`` is what the builder makes of it (``kernel-builder build`` needs Nix), as far as
`kernels.get_local_kernel` can tell.
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
# Adapters of other libraries, command lines, and what the builder writes.
LEFT_OUT = ("integrations/", "opcheck/", "info.py", "tune.py", "warmup.py", "_ops.py")

OPS = """import torch

ops = torch.ops.{namespace}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{namespace}::{{op_name}}"
"""


def sources() -> dict[str, Path]:
    """The modules of the kernel, by their paths in it."""
    found = {}
    for folder, inside in ((ROOT / "lik_ops", ""), (ROOT / "csrc_triton", "csrc_triton/")):
        for path in sorted(folder.rglob("*.py")):
            name = inside + path.relative_to(folder).as_posix()
            if not name.startswith(LEFT_OUT):
                found[name] = path
    return found


def identifier() -> str:
    """Seven digits that differ where any source does."""
    found = hashlib.sha256()
    for name, path in sources().items():
        found.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()[:7]


def version() -> int:
    """The hub counts major versions, 0 for what is not stable."""
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
    """Write the folder, in place of one that this wrote before.

    Args:
        target: the folder; one with other contents is left alone, and raises.
        repo_id: the repository on the hub that ``kernel-builder upload`` fills.
        unique: ends the names of the namespaces; by default it hangs on the sources.
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
    parser.add_argument("--repo-id", help="where kernel-builder upload puts it, owner/name")
    parser.add_argument("--id", dest="unique", help="ends the namespaces (default: a digest of the sources)")
    args = parser.parse_args(argv)
    write(args.out, args.repo_id, args.unique)
    print(args.out)


if __name__ == "__main__":
    main()
