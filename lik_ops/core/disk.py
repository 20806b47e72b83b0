"""Atomic file writes: a file reaches the disk completely or not at all, and never through a symbolic link."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .extras import import_extra

if TYPE_CHECKING:
    from torch import Tensor


def publish_file(directory: Path, name: str, save: Callable[[Path], object]) -> None:
    """Let `save` write a file in `directory`, and move it one level up once it is on the disk.

    A link with this name one level up is replaced. The target of the link does not change.
    """
    temporary, path = directory / name, directory.parent / name
    with add_path_to_errors(path):
        temporary.touch()
        mode = temporary.stat().st_mode  # the umask's permissions; safetensors creates files that only the owner reads
        save(temporary)
        temporary.chmod(mode)
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)


def replace_file(path: str | os.PathLike[str], save: Callable[[Path], object]) -> None:
    """Let `save` write a file next to `path`, and rename it to `path` once it is on the disk.

    Raises:
        FileExistsError: `path` leads to something other than a regular file, such as a device.
        OSError: an error of the disk, with `path`.
    """
    target = Path(path).absolute()
    check_replaceable(target)
    with add_path_to_errors(target), tempfile.TemporaryDirectory(prefix=".writing-", dir=target.parent) as directory:
        publish_file(Path(directory), target.name, save)


def check_replaceable(path: Path) -> None:
    """Raise FileExistsError if `path` leads to a directory or a device, which a rename would destroy or fail on."""
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path}: expected a regular file or a path that does not exist yet")


def open_lock_file(path: Path) -> int:
    """Open a file that only lik_ops writes to and return its descriptor. Create the file if it is missing.

    Raises:
        ValueError: `path` is a symbolic link or no regular file. Writing there would damage another file.
    """
    # Without O_NONBLOCK, opening a pipe may wait for its other end.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError:
        if path.is_symlink():
            raise ValueError(f"{path}: expected a regular file, found a symbolic link: remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: expected a regular file: remove what is there")
    return descriptor


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. Tensors may be on any device, with any strides.

    Raises:
        OSError: an error of the disk, which safetensors reports as an error of its own.
    """
    safetensors = import_extra("save_tensors", "retrieval", "numpy", "safetensors.torch", "safetensors")
    # safetensors copies memory. A view with the negative bit holds the numbers without their sign.
    tensors = {name: x.detach().resolve_neg().contiguous().cpu() for name, x in tensors.items()}
    try:
        safetensors.torch.save_file(tensors, path, metadata)
    except safetensors.SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        raise (OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(str(error))) from error


def get_path(file: BinaryIO, path: str | os.PathLike[str]) -> str:
    """Return a path of an open file for libraries that open it themselves and accept nothing but UTF-8.

    On Linux they open the same file, even if `path` has been replaced in the meantime.
    """
    descriptor = f"/proc/self/fd/{file.fileno()}"
    return descriptor if os.path.exists(descriptor) else os.fspath(path)


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add `path` to errors of the disk that have no path."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def fsync_path(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open directories
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
