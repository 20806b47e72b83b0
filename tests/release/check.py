"""Check a release: ``make release-check``.

1. Build the sdist, and the wheel from the sdist, of the last commit into ``dist/``.
2. Run ``twine check``.
3. Compare the version with CHANGELOG.md, CITATION.cff and the tag.
4. Compare the public API with the last tag.
5. Install the wheel for each Python, and the sdist for the first one, in fresh environments without the test
   requirements. Run the Python blocks of README.md there.

A Python that is neither installed nor downloadable is reported and skipped, or is an error with ``--every-python``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from tests.release.pages import read_blocks
from tests.release.public_api import export_commit, find_changes, find_last_tag

ROOT = Path(__file__).resolve().parents[2]
BIN = "Scripts" if os.name == "nt" else "bin"

# Runs in the fresh environment, around the blocks of README.md.
BEFORE = """
import importlib.metadata, pathlib, platform, sys
import lik_ops
assert pathlib.Path(lik_ops.__file__).is_relative_to(sys.prefix), lik_ops.__file__
assert lik_ops.__version__ == importlib.metadata.version("lik-ops")
assert platform.python_version().startswith(f"{VERSION}."), platform.python_version()
"""
AFTER = """
assert torch.isfinite(scores).all()  # of the last block
generator = torch.Generator().manual_seed(0)
Q, D = torch.randn(2, 3, 8, generator=generator), torch.randn(4, 5, 8, generator=generator)
expected = torch.einsum("isd,jtd->ijst", Q, D).amax(-1).sum(-1)
torch.testing.assert_close(lik_ops.maxsim(Q, D), expected)
print(f"Python {platform.python_version()}, torch {torch.__version__}, lik_ops {lik_ops.__version__}")
"""


class Result(NamedTuple):
    """The outcome of a step: passed, failed, or None if the step could not run."""

    step: str
    passed: bool | None
    text: str


def run(*command: object, cwd: Path = ROOT) -> str:
    """Return the output of a command, and raise with its last lines if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    found = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError("\n".join((found.stdout + found.stderr).splitlines()[-15:]))
    return found.stdout


def uv(*arguments: object) -> str:
    return run(sys.executable, "-m", "uv", *arguments)  # --quiet would suppress results too


def build(dist: Path) -> list[Path]:
    """Build an export of HEAD, because setuptools copies stale files of ``build/`` into a wheel."""
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "source"
        export_commit(ROOT, "HEAD", source)
        run(sys.executable, "-m", "build", "--outdir", dist, source)
    return sorted(dist.iterdir())


def check_build(dist: Path) -> Result:
    sizes = ", ".join(f"{path.name} ({path.stat().st_size / 1024:.0f} KiB)" for path in build(dist))
    changed = run("git", "status", "--porcelain", "--untracked-files=no").split("\n")[0]
    return Result("build", True, sizes + (", without the changes that are not committed" if changed else ""))


def check_metadata(dist: Path) -> Result:
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()))
    return Result("twine check", True, "metadata and README are valid")


def check_version(version: str, tag: str | None) -> Result:
    """Compare the version of the wheel with the files that repeat it, and with the tag of the release."""
    problems = []
    if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text():
        problems.append("CHANGELOG.md has no section for it")
    if re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M) != [version]:
        problems.append("CITATION.cff has another version")
    if tag is not None and tag != f"v{version}":
        problems.append(f"the tag is {tag}")
    return Result("version", not problems, "; ".join([version, *problems]))


def check_public_api(version: str) -> Result:
    """Fail for a change of a stable name, unless the major version is new."""
    tag = find_last_tag(ROOT)
    if tag is None:
        return Result("public API", None, "there is no earlier tag to compare with")
    changes = find_changes(ROOT, tag)
    lines = [f"{'' if c.is_stable else 'experimental: '}{c.name}: {c.text}" for c in changes]
    is_major = Version(version).major > Version(tag.removeprefix("v")).major
    passed = is_major or not any(change.is_stable for change in changes)
    return Result("public API", passed, "\n".join([f"{len(changes)} changes since {tag}", *lines]))


def find_python(version: str) -> str:
    """Return an interpreter outside of virtual environments, which uv downloads if it is not installed."""
    find = "python", "find", "--system", version
    try:
        return uv(*find).strip()
    except RuntimeError:
        uv("python", "install", version)
        return uv(*find).strip()


def check_install(archive: Path, version: str, interpreter: str) -> str:
    """Install an archive for a version of Python, run the blocks of README.md, and return the versions that ran."""
    blocks = [b for b in read_blocks(ROOT / "README.md") if (b.mark, b.language) == ("", "python")]
    assert blocks, "README.md has no Python blocks"
    with tempfile.TemporaryDirectory() as directory:
        environment, script = Path(directory) / "venv", Path(directory) / "snippets.py"
        uv("venv", "--python", interpreter, environment)
        python = environment / BIN / "python"
        uv("pip", "install", "--python", python, archive)
        script.write_text("\n".join([f"VERSION = {version!r}", BEFORE, *(block.source for block in blocks), AFTER]))
        versions = run(python, "-I", script, cwd=Path(directory)).splitlines()[-1]
        run(python, "-I", "-m", "lik_ops.info", cwd=Path(directory))
    return versions


def check_python(version: str, archive: Path, needs_python: bool) -> Result:
    step = f"{'wheel' if archive.suffix == '.whl' else 'sdist'} on Python {version}"
    try:
        interpreter = find_python(version)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return Result(step, False if needs_python else None, f"no interpreter: {reason}")
    try:
        return Result(step, True, check_install(archive, version, interpreter))
    except RuntimeError as error:
        return Result(step, False, str(error))


def attempt(step: str, check, *arguments) -> Result:
    """Return the result of a check. A command that fails is a failed check."""
    try:
        return check(*arguments)
    except RuntimeError as error:
        return Result(step, False, str(error))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=["3.11", "3.12", "3.13", "3.14"], metavar="VERSION")
    parser.add_argument("--every-python", action="store_true", help="fail if a Python cannot be had")
    parser.add_argument("--tag", help="tag of this release, for example v1.0.0")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder for the sdist and the wheel; emptied")
    return parser.parse_args()


def report(result: Result) -> Result:
    state = {True: "passed", False: "FAILED", None: "not run"}[result.passed]
    print(f"{state:8} {result.step}: {result.text}", flush=True)
    return result


def main() -> int:
    options = parse_arguments()
    results = [report(attempt("build", check_build, options.dist))]
    if not results[0].passed:
        return 1
    (sdist,), (wheel,) = options.dist.glob("*.tar.gz"), options.dist.glob("*.whl")
    version = wheel.name.split("-")[1]
    results.append(report(attempt("twine check", check_metadata, options.dist)))
    results.append(report(check_version(version, options.tag)))
    results.append(report(attempt("public API", check_public_api, version)))
    for python in options.pythons:
        results.append(report(check_python(python, wheel, options.every_python)))
    results.append(report(check_python(options.pythons[0], sdist, options.every_python)))
    return int(any(result.passed is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
