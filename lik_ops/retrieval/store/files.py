"""The files of a corpus beside its manifest: the shards and the lock; and how all of them reach the disk.

A file is written in a directory of the writer's own, flushed to the disk, and then moved up, where it replaces the old
one at once. The manifest comes last: before it, a new shard does not count. The names that a writer is about to use
stand in the file of the lock, so that whoever comes after one that was killed knows what to remove, and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.disk import add_path_to_errors, open_lock_file, publish_file, save_tensors
from ...core.extras import import_extra
from .codecs import CodecFile, serialize_codec
from .manifest import MANIFEST, Manifest, ShardEntry

LOCK_FILE = "append.lock"
WRITING_PREFIX = "writing-"
LENGTHS, IDS = "lengths", "ids"  # tensors of every shard, beside those of its layout; ids are JSON in UTF-8
_ENTRY = re.compile(rb"(shard-\d{6,}|codec)-[0-9a-f]{16}\.safetensors\n")
_TOKEN = slice(-len("0123456789abcdef.safetensors"), -len(".safetensors"))
_BLOCK_BYTES = 1 << 20

_held_locks: set[int] = set()  # descriptors of locks


def _close_inherited_locks() -> None:
    """In a forked child, which would keep them from the next writer for as long as it lives."""
    for descriptor in _held_locks:
        os.close(descriptor)
    _held_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_locks)


def import_safetensors(op: str = "Corpus") -> Any:
    """Import safetensors, and numpy, which ids and some versions of safetensors need."""
    return import_extra(op, "retrieval", "numpy", "safetensors.torch", "safetensors")


def has_total(lengths: Tensor, tokens: int) -> bool:
    """Whether none of int64 `lengths` is below 0 and their sum is `tokens`. Larger ones are no: their sum may wrap."""
    return not bool(((lengths < 0) | (lengths > tokens)).any()) and int(lengths.sum()) == tokens


def compute_sha256(path: Path) -> str:
    """The checksum of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()


class Writer:
    """Who holds the lock of the corpus at `path`; `make_descriptor` is None on systems without locks."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path, self.descriptor = path, descriptor

    def remove_leftovers(self) -> None:
        """Remove what a writer that was killed left behind, if the file of the lock names it."""
        if self.descriptor is not None and _ENTRY.fullmatch(entry := self._entry()):
            self._remove(entry.decode().strip())

    def has_entry(self) -> bool:
        return self.descriptor is not None and self._entry() != b""

    def check_lock_file(self) -> None:
        """Raise ValueError if the file of the lock has another name and a content that no writer left.

        Such a hard link may lead to a file of the user, which a note would overwrite.
        """
        if self.descriptor is None or os.fstat(self.descriptor).st_nlink < 2:
            return
        if (entry := self._entry()) and not _ENTRY.fullmatch(entry):
            raise ValueError(
                f"{self.path / LOCK_FILE}: expected a file of lik_ops, found a hard link to another: remove it"
            )

    def _entry(self) -> bytes:
        assert self.descriptor is not None
        return os.pread(self.descriptor, 1 << 10, 0)

    @contextmanager
    def writing(self, number: int | None) -> Iterator[tuple[Path, str]]:
        """A directory to write in, and the name for shard `number`, or, None, for the codec of a new corpus; neither is
        left behind, but a file that counts."""
        self.remove_leftovers()
        token = secrets.token_hex(8)
        # A name of its own: a reader may still have a shard open that was removed and is written anew.
        name = f"{'codec' if number is None else f'shard-{number:06d}'}-{token}.safetensors"
        directory = self.path / f"{WRITING_PREFIX}{token}"
        try:
            with add_path_to_errors(self.path / LOCK_FILE):
                self._note(f"{name}\n".encode())
            directory.mkdir()
            yield directory, name
        except BaseException:
            if self.descriptor is None or self.descriptor in _held_locks:  # not in a child that was forked meanwhile
                self._remove(name)
            raise
        self._tidy(name)

    def _note(self, entry: bytes) -> None:
        if self.descriptor is not None:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, entry, 0)

    def _remove(self, name: str) -> None:
        """Remove what the writer of `name` made, but a shard only if there is a manifest, without it."""
        with suppress(OSError, ValueError):
            if not (name.startswith("codec") and not (self.path / MANIFEST).exists()):
                manifest = Manifest.read(self.path)
                codec = None if manifest.codec is None else manifest.codec.file
                if name == codec or any(shard.file == name for shard in manifest.shards):
                    return self._tidy(name)
            (self.path / name).unlink(missing_ok=True)
        self._tidy(name)

    def _tidy(self, name: str) -> None:
        shutil.rmtree(self.path / f"{WRITING_PREFIX}{name[_TOKEN]}", ignore_errors=True)
        with suppress(OSError):
            self._note(b"")


@contextmanager
def lock_corpus(path: Path) -> Iterator[Writer]:
    """Be the only writer, until the block or the process ends; without ``fcntl`` (Windows), nothing is locked.

    Raises:
        RuntimeError: there is another writer.
        ValueError: the file of the lock is a link, or the same file as one outside the corpus.
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        yield Writer(path, None)
        return
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: expected a corpus, found no directory")
    descriptor = open_lock_file(path / LOCK_FILE)
    _held_locks.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"{path}: another writer is appending to this corpus; only one can at a time") from None
        writer = Writer(path, descriptor)
        writer.check_lock_file()
        yield writer
    finally:
        if descriptor in _held_locks:  # not in a child that was forked meanwhile
            _held_locks.remove(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked by other means may have it open too
            os.close(descriptor)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest in the parent of `directory`."""
    publish_file(directory, MANIFEST, lambda at: at.write_bytes(manifest.text))


def write_codec(directory: Path, name: str, codec: CodecFile) -> CodecFile:
    """Write a codec into the parent of `directory`; where it is then."""
    publish_file(directory, name, lambda at: at.write_bytes(serialize_codec(codec.codec)))
    return CodecFile(codec.sha256, codec.bytes, name, directory.parent)


def write_shard(directory: Path, name: str, tensors: dict[str, Tensor]) -> ShardEntry:
    """Write a shard into the parent of `directory`, and describe what can be read back."""
    written = []

    def save(temporary: Path) -> None:
        save_tensors(tensors, temporary)
        written.append((temporary.stat().st_size, compute_sha256(temporary)))

    publish_file(directory, name, save)
    return ShardEntry(name, *written[0], len(tensors[LENGTHS]), int(tensors[LENGTHS].sum()))


def check_empty(path: Path, writer: Writer | None = None) -> None:
    """Nothing is in the directory, or, for who holds the lock, its file alone, which nobody has written to."""
    op = "Corpus.create: path"
    if (path / MANIFEST).exists():
        raise FileExistsError(f"{op}: expected no corpus there, found {path / MANIFEST}")
    ours = {LOCK_FILE} if writer is not None and not writer.has_entry() else set()
    if names := sorted(set(os.listdir(path)) - ours):
        raise FileExistsError(f"{op}: expected an empty directory, found {path / names[0]}")
