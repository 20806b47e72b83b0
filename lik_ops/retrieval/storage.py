"""The files of a corpus: the manifest, the shards, the lock; and how they reach the disk.

A file is written in a temporary directory, flushed to the disk, and then given its own name, which replaces the old
file at once. The manifest comes last: before it, a new shard does not count.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT, VERSION = "lik_ops.corpus", 1
MANIFEST, LOCK = "manifest.json", "append.lock"
SHARD_PREFIX, SHARD_SUFFIX, WRITING = "shard-", ".safetensors", "writing-"
TOKENS, LENGTHS, IDS = "tokens", "lengths", "ids"  # tensors of a shard; ids are JSON in UTF-8
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Shard:
    """What the manifest says of a shard."""

    file: str
    bytes: int
    sha256: str
    documents: int
    tokens: int


@dataclass
class Manifest:
    """What a corpus consists of."""

    d: int
    dtype: torch.dtype
    has_ids: bool = False
    shards: list[Shard] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Replace the manifest in the directory `path`."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "d": self.d,
            "dtype": str(self.dtype).removeprefix("torch."),
            "documents": sum(shard.documents for shard in self.shards),
            "has_ids": self.has_ids,
            "shards": [asdict(shard) for shard in self.shards],
        }
        text = json.dumps({**content, "sha256": _digest(content)}, indent=1)

        def save(temporary: Path) -> None:
            temporary.write_text(text + "\n", encoding="utf-8")

        _replace(path / MANIFEST, save)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest in the directory `path`; see `Corpus.open` for what is raised."""
        at = path / MANIFEST
        try:
            text = at.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"{path}: expected a corpus, found no {MANIFEST}") from None
        try:
            content = json.loads(text)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise ValueError(f"expected the format {FORMAT}")
            if content.get("version") != VERSION:
                raise ValueError(
                    f"expected version {VERSION}, found {content.get('version')}: a newer lik_ops wrote it"
                )
            if content.pop("sha256", None) != _digest(content):
                raise ValueError("its checksum is not that of its content")
            dtype = getattr(torch, content["dtype"])
            return cls(content["d"], dtype, content["has_ids"], [Shard(**shard) for shard in content["shards"]])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{at}: the manifest is truncated or corrupt: {error}") from error

    def check_shards(self, path: Path, verify: bool) -> None:
        """Raise ValueError, with the path, for a shard of another size; with `verify`, of other content."""
        for shard in self.shards:
            at = path / shard.file
            try:
                size = at.stat().st_size
            except FileNotFoundError:
                raise ValueError(f"{at}: the shard is missing") from None
            if size != shard.bytes:
                raise ValueError(f"{at}: the shard is truncated or corrupt: expected {shard.bytes} bytes, got {size}")
            if verify and sha256_of(at) != shard.sha256:
                raise ValueError(f"{at}: the shard is corrupt: its checksum is not that of the manifest")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """The checksum of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("lik_ops.Corpus needs safetensors: pip install lik-ops[retrieval]") from error
    return safetensors


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> tuple[int, str]:
    """Write a safetensors file; its size and checksum, of what can be read back."""
    safetensors, written = _safetensors(), []

    def save(temporary: Path) -> None:
        safetensors.torch.save_file(tensors, temporary)
        written.append((temporary.stat().st_size, sha256_of(temporary)))

    _replace(path, save)
    return written[0]


def open_shard(path: Path, shard: Shard, manifest: Manifest) -> Any:
    """A shard whose tensors are mapped into memory when they are asked for.

    Raises:
        ValueError: it is not what the manifest says; the message has its path.
    """
    safetensors, at = _safetensors(), path / shard.file
    try:
        file = safetensors.safe_open(at, framework="pt")
        found = {name: (list(x.get_shape()), x) for name in file.keys() for x in [file.get_slice(name)]}  # noqa: SIM118
        expected = {TOKENS: [shard.tokens, manifest.d], LENGTHS: [shard.documents]}
        for name, shape in expected.items():
            if name not in found or found[name][0] != shape:
                raise ValueError(f"expected a tensor {name} {shape}")
        if manifest.has_ids != (IDS in found):
            raise ValueError("expected ids" if manifest.has_ids else "expected no ids")
        lengths = file.get_tensor(LENGTHS)
        if lengths.dtype != torch.int64 or bool((lengths < 0).any()) or int(lengths.sum()) != shard.tokens:
            raise ValueError(f"expected lengths that add up to {shard.tokens} tokens")
        if found[TOKENS][1][:0].dtype != manifest.dtype:
            raise ValueError(f"expected tokens of {manifest.dtype}")
    except (ValueError, KeyError, OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{at}: the shard is truncated or corrupt: {error}") from error
    return file


def _replace(path: Path, save: Any) -> None:
    """Let `save` write a file elsewhere, and put it in the place of `path` once it is on the disk."""
    # In a directory of its own: libraries that write make temporary files beside theirs.
    with tempfile.TemporaryDirectory(prefix=WRITING, dir=path.parent) as directory:
        temporary = Path(directory, path.name)
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask has it; safetensors makes files for the owner alone
        save(temporary)
        temporary.chmod(mode)
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # where directories cannot be opened
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(path: Path, manifest: Manifest) -> None:
    """Remove what a writer that was killed left behind; for who holds the lock."""
    kept = {shard.file for shard in manifest.shards}
    for found in path.iterdir():
        if found.name.startswith(WRITING):
            shutil.rmtree(found)
        elif found.name.startswith(SHARD_PREFIX) and found.name.endswith(SHARD_SUFFIX) and found.name not in kept:
            found.unlink()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only writer, until the block or the process ends; without ``fcntl`` (Windows), nothing is locked.

    Raises:
        RuntimeError: there is another writer.
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: expected a corpus, found no directory")
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"{path}: another writer is appending to this corpus; only one can at a time") from None
        yield
    finally:
        os.close(descriptor)
