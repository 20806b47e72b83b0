"""Shards of a corpus as readers see them: opened on the first read, and mapped into memory while in use.

Opening a corpus opens no shard, because a process has a limited number of memory maps (65,530 on Linux by default) and
a corpus may have more shards. Sizes are also compared on the first read: a size costs 1.8 us, and a name in a list of
the directory 0.4 us.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ...core.disk import get_path
from .files import IDS, LENGTHS, compute_sha256, has_total
from .layout import TensorSpec
from .manifest import Manifest, ShardEntry

MAX_MAPPED_SHARDS = 16_384  # shards of all corpora of a process that stay mapped, a quarter of what Linux allows
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}  # dtype names in safetensors files
_HEADER_BYTES = 8  # the size of the field that holds the header size

# The mapped shards, oldest first. References are weak, so that the maps of a corpus end with it. There is no lock,
# because a forked child could inherit it while it is held.
_mapped_shards: weakref.WeakKeyDictionary[ShardFile, None] = weakref.WeakKeyDictionary()


class MappedShard(NamedTuple):
    """The tensors of a shard in mapped memory. Pages are read when they are used. Writes stay in memory."""

    tensors: dict[str, Tensor]  # the tensors of the layout
    device: int  # with `inode`, identifies the mapped file even if its name belongs to another file
    inode: int


class _TensorRegion(NamedTuple):
    """The place of a tensor in a file, in bytes."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class ShardFile:
    """A shard in the directory `path`, as `manifest` describes it.

    Every method raises ValueError, with the path, if the file is missing, truncated or corrupt.
    """

    def __init__(self, path: Path, shard: ShardEntry, manifest: Manifest) -> None:
        self.at = f"{path}{os.sep}{shard.file}"  # os.path.join costs more than the rest of opening a shard
        self.shard, self.layout, self.has_ids = shard, manifest.layout, manifest.has_ids
        self.mapped: MappedShard | None = None

    def verify(self) -> None:
        """Read the file and check everything."""
        with self._add_path_to_errors():
            self._check_size(os.stat(self.at))
            if compute_sha256(Path(self.at)) != self.shard.sha256:
                raise ValueError("its checksum differs from the manifest")
        _ = self.lengths

    def check_exists(self) -> None:
        """Raise ValueError unless there is a file of this name."""
        with self._add_path_to_errors():
            os.stat(self.at)

    @cached_property
    def lengths(self) -> Tensor:
        """int64 ``[n]``, the number of tokens of each document, in memory."""
        with torch.inference_mode(False), self._open_checked() as (file, _, regions):
            lengths = _read_tensor(file, regions[LENGTHS])
            if not has_total(lengths, self.shard.tokens):
                raise ValueError(f"expected {LENGTHS} that add up to {self.shard.tokens} tokens")
        return lengths

    @cached_property
    def ids(self) -> list:
        """The ids of the documents."""
        with self._open_checked() as (file, _, regions):
            text = _read_tensor(file, regions[IDS]).numpy().tobytes()
        count = self.shard.documents
        try:
            ids = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.at}: the shard is corrupt: ids: {error}") from error
        if not isinstance(ids, list) or len(ids) != count or not is_id_list(ids):
            raise ValueError(f"{self.at}: the shard is corrupt: ids: expected a list of {count} strings or integers")
        return ids

    def tensors(self) -> dict[str, Tensor]:
        """Return the mapped tensors of the layout.

        The size of the file is compared with the manifest each time.

        Without the comparison, a read past the end of a truncated file would end the process (SIGBUS). A file that is
        truncated between the comparison and the read still does.
        """
        mapped_shard = self.mapped  # read once, because another thread may drop it
        if mapped_shard is None or not self._is_unchanged(mapped_shard):
            self.mapped = mapped_shard = self.map()
            _drop_oldest(self)
        return mapped_shard.tensors

    def map(self) -> MappedShard:
        """Map the tensors again, in memory that only the caller has."""
        # An inference tensor would stay one after the caller leaves `torch.inference_mode`.
        with torch.inference_mode(False), self._open_checked() as (file, status, regions):
            try:
                storage: Any = torch.UntypedStorage.from_file(get_path(file, self.at), False, self.shard.bytes)
            except RuntimeError as error:
                raise OSError(f"{self.at}: {error}") from error
            tensors = {name: _map_tensor(storage, regions[name]) for name in self.layout.tensors}
        return MappedShard(tensors, status.st_dev, status.st_ino)

    def _is_unchanged(self, mapped: MappedShard) -> bool:
        """Return whether the mapped file is still complete. False if its name belongs to another file."""
        try:
            status = os.stat(self.at)
        except FileNotFoundError:
            return True  # the file was removed, and its memory is still mapped
        if (status.st_dev, status.st_ino) != (mapped.device, mapped.inode):
            return False
        with self._add_path_to_errors():
            self._check_size(status)
        return True

    def _check_size(self, about: os.stat_result) -> None:
        """Raise ValueError unless the file has the size that the manifest lists."""
        if about.st_size != self.shard.bytes:
            raise ValueError(f"expected {self.shard.bytes} bytes, got {about.st_size}")

    @contextmanager
    def _open_checked(self) -> Iterator[tuple[BinaryIO, os.stat_result, dict[str, _TensorRegion]]]:
        """Yield the file, its status and the places of its tensors, all checked."""
        with self._add_path_to_errors(), open(self.at, "rb") as file:
            status = os.fstat(file.fileno())
            self._check_size(status)
            yield file, status, self._regions(file)

    @contextmanager
    def _add_path_to_errors(self) -> Iterator[None]:
        """Add the path of the shard to errors of the block."""
        try:
            yield
        except FileNotFoundError:
            raise ValueError(f"{self.at}: the shard is missing{self._explain_missing()}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.at}: the shard is truncated or corrupt: {error}") from error

    def _explain_missing(self) -> str:
        """Return why the file may be missing, for error messages."""
        try:
            current = Manifest.read(Path(self.at).parent)
        except (OSError, ValueError):
            return ""
        if any(shard.file == self.shard.file for shard in current.shards):
            return ""
        return ": the corpus was compacted after it was opened here, so open it again"

    def _regions(self, file: BinaryIO) -> dict[str, _TensorRegion]:
        """Return the places of the tensors, by the header of a safetensors file."""
        size = int.from_bytes(file.read(_HEADER_BYTES), "little")
        first = _HEADER_BYTES + size
        if first > self.shard.bytes:
            raise ValueError(f"expected a header within {self.shard.bytes} bytes, got {size} bytes of it")
        header = json.loads(file.read(size))
        if not isinstance(header, dict):
            raise ValueError("expected a header that is an object")
        expected = {**self.layout.tensors, LENGTHS: TensorSpec(False, (), torch.int64)}
        regions = {}
        for name, spec in expected.items():
            shape = (self.shard.tokens if spec.of_tokens else self.shard.documents, *spec.sizes)
            regions[name] = self._region(header, name, shape, spec.dtype, first)
        if (IDS in header) != self.has_ids:
            raise ValueError(f"expected {IDS} [bytes] of torch.uint8" if self.has_ids else f"expected no {IDS}")
        if self.has_ids:
            sizes = header[IDS].get("shape") if isinstance(header[IDS], dict) else None
            size = sizes[0] if isinstance(sizes, list) and len(sizes) == 1 and type(sizes[0]) is int else 0
            regions[IDS] = self._region(header, IDS, (size,), torch.uint8, first)
        return regions

    def _region(
        self, header: dict[str, Any], name: str, shape: tuple[int, ...], dtype: torch.dtype, first: int
    ) -> _TensorRegion:
        """Return the place of a tensor, if the header says what is expected. The data begin at byte `first`."""
        entry, nbytes = header.get(name), dtype.itemsize
        for n in shape:
            nbytes *= n
        if not isinstance(entry, dict) or (entry.get("dtype"), entry.get("shape")) != (_NAMES[dtype], list(shape)):
            raise ValueError(f"expected {name} {list(shape)} of {dtype}")
        bounds = entry.get("data_offsets")
        if not isinstance(bounds, list) or len(bounds) != 2 or not all(type(x) is int for x in bounds):
            raise ValueError(f"expected two offsets of {name}")
        begin, end = (first + x for x in bounds)
        if not first <= begin <= end <= self.shard.bytes or end - begin != nbytes:
            raise ValueError(f"expected {nbytes} bytes of {name} within the file")
        return _TensorRegion(begin, end, shape, dtype)


def _drop_oldest(added: ShardFile) -> None:
    """Record that a shard is mapped, and drop the oldest maps if there are too many.

    Tensors keep the map that they use.
    """
    _mapped_shards[added] = None
    while len(_mapped_shards) > MAX_MAPPED_SHARDS:
        try:
            oldest = next(iter(_mapped_shards))
            del _mapped_shards[oldest]
        except (KeyError, RuntimeError, StopIteration):  # another thread changes the dictionary
            return
        oldest.mapped = None


def _read_tensor(file: BinaryIO, region: _TensorRegion) -> Tensor:
    """Return a tensor in memory."""
    file.seek(region.begin)
    content = bytearray(file.read(region.end - region.begin))
    if len(content) != region.end - region.begin:
        raise ValueError(f"expected {region.end - region.begin} bytes, got {len(content)}")
    if not content:
        return torch.empty(region.shape, dtype=region.dtype, device="cpu")
    return torch.frombuffer(content, dtype=region.dtype).view(region.shape)


def _map_tensor(storage: torch.UntypedStorage, region: _TensorRegion) -> Tensor:
    """Return a tensor in the memory of a file. It has a storage of its own, so its pickle has nothing else."""
    empty = torch.empty(0, dtype=region.dtype, device="cpu")
    if region.begin == region.end:
        return empty.view(region.shape)
    return empty.set_(storage[region.begin : region.end]).view(region.shape)


def is_id_list(x: list) -> bool:
    """Return whether the items are all strings or all integers."""
    return all(type(item) is str for item in x) or all(type(item) is int for item in x)
