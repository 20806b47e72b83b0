"""Protection against compiled graphs on disk that are older than the code they were compiled from.

The caches of torch identify a graph by the names of its operators. They ignore the code that was traced below them: the
body of the composite operator, fakes, gradient formulas and batching rules. After an upgrade they would silently return
an old backward. Importing lik_ops therefore adds a digest of that code to `torch.compiler.config.cache_key_tag`, the
public setting for this purpose. Code that later assigns to this setting, instead of appending, removes the protection.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch.compiler.config

from ..._version import __version__

_ROOT = Path(__file__).parents[2]
_TRACED = ("ops/**/*.py", "families/**/*.py", "core/arguments.py", "core/segments.py")


def hash_sources() -> str:
    """Return a digest of the version and of all sources that tracers may read, or of the version if there are none."""
    digest = hashlib.sha256(__version__.encode())
    for pattern in _TRACED:
        for path in sorted(_ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def tag_cache_key() -> None:
    """Append the digest to the key of torch's compile caches."""
    tag = f"lik_ops={hash_sources()}"
    old_tag = torch.compiler.config.cache_key_tag
    if tag not in old_tag:
        torch.compiler.config.cache_key_tag = f"{old_tag};{tag}" if old_tag else tag
