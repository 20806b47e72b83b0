"""Test that the files of a release agree, and that `make release-check` finds a changed API."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import lik_ops

pytest.importorskip("griffe", reason="compares the API: pip install '.[release]'")

from ..release import public_api

ROOT = Path(__file__).resolve().parents[2]


def git(directory, *arguments):
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Return a repository with a tag v0.9.0 and one commit after it."""
    directory = tmp_path_factory.mktemp("repository")
    for name in ("lik_ops", "csrc_triton", "opcheck"):
        shutil.copytree(ROOT / name, directory / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    git(directory, "init", "-q")
    git(directory, "add", ".")
    git(directory, "commit", "-q", "-m", "first")
    git(directory, "tag", "v0.9.0")
    git(directory, "commit", "-q", "-m", "second", "--allow-empty")
    return directory


def replace(path, before, after):
    text = path.read_text()
    assert text.count(before) == 1, f"{path} has {before!r} {text.count(before)} times"
    path.write_text(text.replace(before, after))


def test_the_last_tag_is_before_the_commit(repository):
    assert public_api.find_last_tag(repository) == "v0.9.0"
    git(repository, "tag", "v0.9.1")  # HEAD, the release to check
    assert public_api.find_last_tag(repository) == "v0.9.0"
    git(repository, "tag", "-d", "v0.9.1", "v0.9.0")
    assert public_api.find_last_tag(repository) is None
    git(repository, "tag", "v0.9.0", "HEAD^")


def test_every_public_name_is_compared():
    found = public_api.list_public(public_api.load_checkout(ROOT))
    names = {name for name in lik_ops.__all__ if name not in ("__version__", "export", "reference")}
    assert {f"lik_ops.{name}" for name in names} <= set(found)
    assert found["lik_ops.warmup"].is_function and found["lik_ops.maxsim"].is_function
    assert {"lik_ops.distributed.retrieve", "lik_ops.reference.maxsim", "lik_ops.export.package"} <= set(found)
    assert {"lik_ops.integrations.pylate.enable", "lik_ops.integrations.haystack.MaxSimRanker"} <= set(found)


COMPATIBLE = {
    "a private function": ("lik_ops/api/score.py", "import torch\n", "import torch\n\n\ndef _new(x): ...\n"),
    "an optional argument": (
        "lik_ops/api/similarity_map.py",
        "normalize: bool = False\n",
        "normalize: bool = False, new: bool = False\n",
    ),
    "an optional argument of an operator": (
        "opcheck/graphs.py",
        'str backward="auto", bool recompute=False) -> Tensor\',\n    "maxsim_bwd_lowmem"',
        'str backward="auto", bool recompute=False, bool new=False) -> Tensor\',\n    "maxsim_bwd_lowmem"',
    ),
    "a version": ("lik_ops/_version.py", lik_ops.__version__, "9.9.9"),
}
BREAKING = {
    "a removed name": ("lik_ops/__init__.py", '    "maxsim_pairs",\n', "", ("lik_ops.maxsim_pairs", True)),
    "a renamed argument": (
        "lik_ops/api/similarity_map.py",
        "    Q: Tokens, D: Tokens, q_mask",
        "    queries: Tokens, D: Tokens, q_mask",
        ("lik_ops.similarity_map", True),
    ),
    "a removed method": (
        "lik_ops/retrieval/store/corpus.py",
        "    def compact(",
        "    def _compact(",
        ("lik_ops.Corpus.compact", True),
    ),
    "an experimental name": (
        "lik_ops/distributed/__init__.py",
        '__all__ = ["maxsim_cross_entropy", ',
        "__all__ = [",
        ("lik_ops.distributed.maxsim_cross_entropy", False),
    ),
    "an operator": (
        "opcheck/graphs.py",
        "lik::maxsim_fwd(Tensor Q, ",
        "lik::maxsim_fwd(Tensor P, Tensor Q, ",
        ("lik::maxsim_fwd", True),
    ),
}


def test_only_breaking_changes_are_reported(repository):
    tag = public_api.find_last_tag(repository)
    for path, before, after, *_ in COMPATIBLE.values():
        replace(repository / path, before, after)
    assert public_api.find_changes(repository, tag) == []
    for path, before, after, _ in BREAKING.values():
        replace(repository / path, before, after)
    found = {(change.name, change.is_stable) for change in public_api.find_changes(repository, tag)}
    assert found == {expected for *_, expected in BREAKING.values()}


def test_experimental_and_stable_names_match_the_page():
    text = (ROOT / "docs" / "versions.md").read_text()
    paragraphs = {m[1]: m[2] for m in re.finditer(r"^\*\*(\w+)\.\*\* (.*?)\n\n", text, re.M | re.S)}
    assert tuple(re.findall(r"`(lik_ops\.\w+)`", paragraphs["Experimental"])) == public_api.EXPERIMENTAL
    assert tuple(re.findall(r"`lik::(\w+)`", paragraphs["Stable"])) == public_api.STABLE_OPERATORS
