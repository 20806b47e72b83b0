"""How a file reaches the disk: whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def publish(directory: Path, name: str, save: Callable[[Path], object]) -> None:
    """Let `save` write a file in `directory`, and move it up once it is on the disk."""
    temporary, path = directory / name, directory.parent / name
    with naming(path):
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask has it; safetensors makes files for the owner alone
        save(temporary)
        temporary.chmod(mode)
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of the disk that have no path this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # where directories cannot be opened
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
