"""Compiled graphs kept on disk must not outlive the code they were made from.

torch's caches know a graph by its operators' names, not by what was traced below them: the body of the composite
operator, fakes, gradient formulas and batching rules. After an upgrade an old backward would be served, silently. So
importing lik_ops adds a digest of that code to `torch.compiler.config.cache_key_tag`, the public setting for this.
Whoever assigns to that setting later, instead of adding to it, takes the protection away.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch.compiler.config

from ..._version import __version__

_ROOT = Path(__file__).parents[2]
_TRACED = ("ops/**/*.py", "families/**/*.py", "core/arguments.py", "core/segments.py")


def hash_sources() -> str:
    """Of the version and of every source that tracers may have looked into; of the version where none can be read."""
    found = hashlib.sha256(__version__.encode())
    for pattern in _TRACED:
        for path in sorted(_ROOT.glob(pattern)):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def tag_cache_key() -> None:
    """Add the digest to the key of torch's compile caches, beside what is there."""
    own = f"lik_ops={hash_sources()}"
    before = torch.compiler.config.cache_key_tag
    if own not in before:
        torch.compiler.config.cache_key_tag = f"{before};{own}" if before else own
