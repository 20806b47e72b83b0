"""The shards and the lock file of a corpus, and the protocol that writes files to the disk.

A writer creates a file in its own directory, flushes it to the disk, and moves it up, which replaces an old file
atomically. The manifest is written last, and a new shard is not part of the corpus before that. The lock file contains
the name that a writer is about to use, and the names of the shards that its manifest will drop. If a writer is killed,
the next writer removes these files, except files that the manifest lists.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
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
LENGTH_BYTES = 8  # of a document, in the tensor `LENGTHS`
LENGTHS, IDS = "lengths", "ids"  # tensors of every shard, in addition to its layout; ids are JSON in UTF-8
_ENTRY = re.compile(rb"((shard-\d{6,}|codec)-[0-9a-f]{16}\.safetensors\n)+")
_TOKEN = slice(-len("0123456789abcdef.safetensors"), -len(".safetensors"))

_held_locks: set[int] = set()  # descriptors of lock files


def _close_inherited_locks() -> None:
    """Close inherited locks in a forked child, which would block the next writer for the life of the child."""
    for descriptor in _held_locks:
        os.close(descriptor)
    _held_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_locks)


def import_safetensors(op: str = "Corpus") -> Any:
    """Import safetensors, and numpy, which ids and some versions of safetensors need."""
    return import_extra(op, "retrieval", "numpy", "safetensors.torch", "safetensors")


def has_total(lengths: Tensor, tokens: int) -> bool:
    """Return whether int64 `lengths` are not negative and sum to `tokens`.

    A length above `tokens` returns False without summing, because the sum may wrap.
    """
    return not bool(((lengths < 0) | (lengths > tokens)).any()) and int(lengths.sum()) == tokens


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 checksum of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Writer:
    """The holder of the lock of the corpus at `path`. `descriptor` is None on systems without locks."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path, self.descriptor = path, descriptor

    def remove_leftovers(self) -> None:
        """Remove the files that a killed writer left behind, if the lock file names any."""
        if _ENTRY.fullmatch(entry := self.read_entry()):
            self._remove_files(*entry.decode().split())

    def read_entry(self) -> bytes:
        """Return the content of the lock file."""
        return b"" if self.descriptor is None else os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)

    def check_lock_file(self) -> None:
        """Raise ValueError if the lock file has another hard link and content that no writer wrote.

        Such a link may lead to a file of the user, which `_write_entry` would overwrite.
        """
        if self.descriptor is None or os.fstat(self.descriptor).st_nlink < 2:
            return
        if (entry := self.read_entry()) and not _ENTRY.fullmatch(entry):
            lock = self.path / LOCK_FILE
            raise ValueError(f"{lock}: expected a file of lik_ops, found a hard link to another: remove it")

    @contextmanager
    def reserve_file(self, number: int | None, replaced: Sequence[str] = ()) -> Iterator[tuple[Path, str]]:
        """Yield a directory to write in and a file name. Remove both afterwards, except for a committed file.

        Args:
            number: the number of the shard, or None for the codec of a new corpus.
            replaced: the names of the shards that the new manifest does not list. They are removed after the commit.
        """
        self.remove_leftovers()
        token = secrets.token_hex(8)
        # The name is unique, because a reader may still have a removed shard of this number open.
        name = f"{'codec' if number is None else f'shard-{number:06d}'}-{token}.safetensors"
        directory = self.path / f"{WRITING_PREFIX}{token}"
        try:
            with add_path_to_errors(self.path / LOCK_FILE):
                self._write_entry("".join(f"{x}\n" for x in (name, *replaced)).encode())
            directory.mkdir()
            yield directory, name
        except BaseException:
            if self.descriptor is None or self.descriptor in _held_locks:  # not in a child that was forked meanwhile
                self._remove_files(name, *replaced)
            raise
        if replaced:
            self._remove_files(name, *replaced)
        else:
            self._remove_directory(name)

    def _write_entry(self, entry: bytes) -> None:
        """Write an entry to the lock file."""
        if self.descriptor is not None:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, entry, 0)

    def _remove_files(self, name: str, *replaced: str) -> None:
        """Remove the files of the writer of `name`, and the shards that it replaced.

        A shard is removed only if there is a manifest that does not list it.
        """
        with suppress(OSError, ValueError):
            manifest_files: set[str | None] = set()
            if not (name.startswith("codec") and not (self.path / MANIFEST).exists()):
                manifest = Manifest.read(self.path)
                manifest_files = {shard.file for shard in manifest.shards}
                manifest_files.add(None if manifest.codec is None else manifest.codec.file)
            for x in {name, *replaced} - manifest_files:
                with suppress(OSError):  # a reader on Windows may have it open
                    (self.path / x).unlink(missing_ok=True)
        self._remove_directory(name)

    def _remove_directory(self, name: str) -> None:
        """Remove the directory of the writer of `name`, and the entry of the lock file."""
        shutil.rmtree(self.path / f"{WRITING_PREFIX}{name[_TOKEN]}", ignore_errors=True)
        with suppress(OSError):
            self._write_entry(b"")


@contextmanager
def lock_corpus(path: Path) -> Iterator[Writer]:
    """Hold the lock of a corpus until the block or the process ends, and yield its holder.

    Without ``fcntl`` (Windows), nothing is locked.

    Raises:
        FileNotFoundError: there is no directory.
        RuntimeError: another writer holds the lock.
        ValueError: the lock file is a link, or the same file as one outside the corpus.
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
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked by other means may also have it open
            os.close(descriptor)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest in the parent of `directory`."""
    publish_file(directory, MANIFEST, lambda at: at.write_bytes(manifest.text))


def write_codec(directory: Path, name: str, codec: CodecFile) -> CodecFile:
    """Write a codec into the parent of `directory`, and return its entry with the path."""
    publish_file(directory, name, lambda at: at.write_bytes(serialize_codec(codec.codec)))
    return CodecFile(codec.sha256, codec.bytes, name, directory.parent)


def write_shard(directory: Path, name: str, tensors: dict[str, Tensor]) -> ShardEntry:
    """Write a shard into the parent of `directory`, and return its manifest entry."""
    entries = []

    def save(temporary: Path) -> None:
        save_tensors(tensors, temporary)
        entries.append((temporary.stat().st_size, compute_sha256(temporary)))

    publish_file(directory, name, save)
    return ShardEntry(name, *entries[0], len(tensors[LENGTHS]), int(tensors[LENGTHS].sum()))


def check_empty(path: Path, writer: Writer | None = None) -> None:
    """Raise FileExistsError unless the directory is empty. The holder of the lock may have an empty lock file in it."""
    op = "Corpus.create: path"
    if (path / MANIFEST).exists():
        raise FileExistsError(f"{op}: expected no corpus there, found {path / MANIFEST}")
    expected_names = {LOCK_FILE} if writer is not None and not writer.read_entry() else set()
    if names := sorted(set(os.listdir(path)) - expected_names):
        raise FileExistsError(f"{op}: expected an empty directory, found {path / names[0]}")
