"""Run the hosts' own suites with lik_ops: ``make test-hosts``.

Each host has an environment and a folder with the tests of its sdist below ``--directory``. Both are created once. The
sdist of sentence-transformers has no tests of scoring. ``--sentence-transformers-tests`` names a checkout of its
repository. Without this option only the suites of the other hosts run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYLATE = ["colbert_scores", "scores_lik", "scores_flash", "xtr_scores", "xtr_scoring", "contrastive"]
PYLATE += ["cached_contrastive", "kd", "prefixes", "encode_output_value"]
OURS = [
    "tests/examples/test_evaluate_hosts.py",
    "tests/integrations/test_integrations_hosts.py",
    "tests/integrations/test_integrations_pooling.py",
    "tests/project/test_documentation.py::test_blocks_for_an_installed_host_run",
]
PYTEST = [
    "expecttest",
    "hypothesis",
    "ir-measures",
    "pytest",
    "pytest-env",
    "pytest-subtests",
    "pytest-cov",
    "pytest-rerunfailures",
    "pytest-xdist",
    "rich",
]


class Host(NamedTuple):
    """A host, its environment, and its tests."""

    environment: str
    distribution: str
    version: str
    requirements: list[str]  # of the suite, in addition to torch
    tests: list[str]
    callables: list[str]  # tests of the functions that the adapter's callables replace
    modules: tuple[str, ...] = ()  # installed without their dependencies
    standins: bool = False


HOSTS = {
    "pylate": Host(
        "pylate",
        "pylate",
        "1.6.0",
        ["sentence-transformers==5.3.0", "transformers==5.3.0", "datasets", "accelerate", "pandas", "ujson", "ninja"],
        [f"tests/test_{name}.py" for name in PYLATE],
        [f"tests/test_{name}.py" for name in ("colbert_scores", "xtr_scores", "contrastive", "cached_contrastive")],
        ("pylate==1.6.0",),  # fast-plaid and fastkmeans are for its indexes
        standins=True,
    ),
    "sentence_transformers": Host(
        "newest",
        "sentence-transformers",
        "6.2.0",
        ["sentence-transformers==6.2.0", "datasets", "accelerate", "peft", "fastcluster", "matplotlib", "seaborn"],
        ["tests/util/test_similarity.py", "tests/multi_vector_encoder"],
        ["tests/util/test_similarity.py", "tests/multi_vector_encoder/losses"],
        standins=True,
    ),
    "colpali": Host(
        "newest",
        "colpali-engine",
        "0.3.18",
        ["transformers", "pillow", "requests", "peft", "scipy", "matplotlib", "seaborn", "fastcluster"],
        ["tests/loss", "tests/utils", "tests/compression", "tests/interpretability"],
        ["tests/loss", "tests/utils"],
        ("colpali-engine==0.3.18",),  # torchvision is for its models
    ),
}


def run(*command: object, **options) -> None:
    """Run a command and raise if it fails."""
    subprocess.run([str(part) for part in command], check=True, **options)


def environment(host: Host, root: Path, torch: str) -> Path:
    """Return the interpreter of an environment with the host, and create the environment if needed."""
    directory = root / f"venv-{host.environment}"
    stamp, python = directory / f".{host.distribution}-{host.version}", directory / "bin" / "python"
    if not stamp.exists():
        if not python.exists():
            run(sys.executable, "-m", "venv", directory)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, torch, "numpy", *PYTEST, "einops")
        run(*pip, torch, *host.requirements)
        if host.modules:
            run(*pip, "--no-deps", *host.modules)
        stamp.touch()
    return python


def folder(name: str, host: Host, root: Path, python: Path, checkout: Path | None) -> Path:
    """Return a folder with the host's tests but without the host, so that the installed package is tested."""
    directory = root / name
    if (directory / ".ready").exists():
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if checkout is None:
        sdist = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", directory]
        run(*sdist, f"{host.distribution}=={host.version}")
        (archive,) = directory.glob("*.tar.gz")
        with tarfile.open(archive) as members:
            members.extractall(directory, filter="data")
        archive.unlink()
        (checkout,) = (path for path in directory.iterdir() if path.is_dir())
    for part in ("tests", "conftest.py", "pyproject.toml"):
        if part == "tests":
            shutil.copytree(checkout / part, directory / part)
        elif (checkout / part).exists():
            shutil.copy(checkout / part, directory / part)
    if checkout.parent == directory:
        shutil.rmtree(checkout)
    if host.standins:
        run(python, HERE / "standins.py", name, directory)
    (directory / ".ready").touch()
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hosts", nargs="*", default=list(HOSTS), help=", ".join(HOSTS))
    parser.add_argument("--directory", type=Path, default=ROOT / ".hosts")
    parser.add_argument("--routed", nargs="+", default=["enabled", "callables"], help="no, enabled, callables")
    parser.add_argument("--sentence-transformers-tests", type=Path, metavar="CHECKOUT")
    parser.add_argument("--python", type=Path, help="that has the hosts, in place of environments")
    parser.add_argument("--torch", default="torch>=2.11,<2.14", help="colpali-engine 0.3.18 wants less than 2.14")
    options = parser.parse_args()
    failed = []
    for name in options.hosts:
        host, checkout = HOSTS[name], None
        if name == "sentence_transformers" and not (options.directory / name / ".ready").exists():
            checkout = options.sentence_transformers_tests
            if checkout is None:
                print(f"{name}: not run, its tests are in its repository only: --sentence-transformers-tests CHECKOUT")
                continue
        python = options.python or environment(host, options.directory, options.torch)
        directory = folder(name, host, options.directory, python, checkout)
        runs = [("no", OURS, ROOT)]
        runs += [(how, host.callables if how == "callables" else host.tests, directory) for how in options.routed]
        for routed, tests, cwd in runs:
            print(f"== {name} {host.version}, {'our own tests' if cwd == ROOT else routed}", flush=True)
            pytest = [python, "-m", "pytest", "-q", "-rxX", "-p", "no:cacheprovider", "-p", "routed", *tests]
            environ = {"HF_HUB_OFFLINE": "1", "LIK_OPS_HOST": name, "LIK_OPS_ROUTED": routed}
            environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{HERE}"
            found = subprocess.run([*pytest, "--disable-warnings"], cwd=cwd, env=os.environ | environ)
            failed += [f"{name}, {routed}"] if found.returncode else []
    print(f"failed: {'; '.join(failed)}" if failed else "all passed but what is explained")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
