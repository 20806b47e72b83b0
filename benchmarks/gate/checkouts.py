"""Checkouts to compare with: a folder, or a commit that git checks out into a temporary folder."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git(*arguments: str, root: Path = ROOT) -> str:
    """Return the output of a git command, or end the program with git's message."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def checked_out(base: str | Path, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folder `base`, or a temporary worktree of the commit `base`."""
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    commit = git("rev-parse", "--verify", f"{base}^{{commit}}", root=root)
    with tempfile.TemporaryDirectory(prefix="lik_ops_gate_") as folder:
        worktree = Path(folder) / commit[:12]
        git("worktree", "add", "--detach", str(worktree), commit, root=root)
        try:
            yield worktree
        finally:
            git("worktree", "remove", "--force", str(worktree), root=root)


def last_commit_of(path: Path, root: Path = ROOT) -> str:
    """Return the last commit that changed a file."""
    if git("rev-parse", "--is-shallow-repository", root=root) == "true":
        raise SystemExit("this clone is shallow, so the commit of the record is unknown: git fetch --unshallow")
    commit = git("log", "-1", "--format=%H", "--", str(path), root=root)
    if not commit:
        raise SystemExit(f"{path.name} is not in the history of this checkout")
    return commit
