"""The manifest of a corpus: the committed shards, with the size, checksum and deleted documents of each."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import reprlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ...core.arguments import DTYPES
from ...formats.residual import ResidualCodec
from ...formats.table import FORMATS, RESIDUAL_FORMATS
from .codecs import CodecFile
from .layout import Scale, StorageLayout

FORMAT, VERSION, QUANTIZED_VERSION = "lik_ops.corpus", 1, 2  # QUANTIZED_VERSION: quantized corpora
CODED_VERSION, CHANGED_VERSION = 3, 4  # corpora of residual codes, and corpora with deleted documents
VERSIONS = VERSION, QUANTIZED_VERSION, CODED_VERSION, CHANGED_VERSION
MANIFEST = "manifest.json"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_CODEC = "sha256", "bytes", "file"
_FILE = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_FILES = re.compile(r"(?:[\w.-]+\.safetensors/)*+", re.ASCII)
_CHECKSUM = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\n')  # how writers end a manifest
_CHECKSUM_BYTES = len(f', "sha256": "{"0" * 64}"}}\n')
_LARGEST = (1 << 63) - 1  # the largest size of a tensor
_BITS = torch.arange(8, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True)
class Tombstones:
    """The deleted documents of a shard: their number, their tokens, and a bit for each document of the shard."""

    documents: int
    tokens: int
    rows: str  # bytes of 8 documents, the first in the lowest bit, compressed by zlib, in base64

    @classmethod
    def from_mask(cls, deleted: Tensor, lengths: Tensor) -> Tombstones:
        """Return the tombstones of a mask ``[n]`` of documents with these numbers of tokens."""
        bits = torch.nn.functional.pad(deleted.to(torch.uint8), (0, -len(deleted) % 8)).view(-1, 8)
        packed = (bits << _BITS).sum(1, dtype=torch.uint8).numpy().tobytes()
        rows = base64.b64encode(zlib.compress(packed)).decode()
        return cls(int(deleted.sum()), int(lengths[deleted].sum()), rows)

    def mask(self, documents: int) -> Tensor:
        """Return the mask ``[documents]`` of the deleted documents.

        Raise ValueError if the text is not the mask of that number of documents.
        """
        size, unpack = -(-documents // 8), zlib.decompressobj()
        try:
            packed = unpack.decompress(base64.b64decode(self.rows, validate=True), size + 1)
        except (ValueError, binascii.Error, zlib.error) as error:
            raise ValueError(f"expected a compressed mask: {error}") from None
        if len(packed) != size or not unpack.eof:
            raise ValueError(f"expected a compressed mask of {documents} documents")
        rows = torch.frombuffer(bytearray(packed + b"\0"), dtype=torch.uint8)[:-1].unsqueeze(1)
        mask = ((rows >> _BITS) & 1).flatten().bool()
        if bool(mask[documents:].any()) or int(mask.sum()) != self.documents:
            raise ValueError(f"expected a mask of {self.documents} deleted documents")
        return mask[:documents]


class ShardEntry(NamedTuple):
    """The manifest entry of a shard. Its numbers include deleted documents."""

    file: str
    bytes: int
    sha256: str
    documents: int
    tokens: int
    deleted: Tombstones | None = None

    @property
    def documents_left(self) -> int:
        """The number of documents that are not deleted."""
        return self.documents - (0 if self.deleted is None else self.deleted.documents)

    @property
    def tokens_left(self) -> int:
        """The number of tokens of documents that are not deleted."""
        return self.tokens - (0 if self.deleted is None else self.deleted.tokens)

    @property
    def content(self) -> dict[str, Any]:
        """The entry as JSON."""
        entry = dict(zip(_ENTRY, self, strict=False))
        return entry if self.deleted is None else entry | {"deleted": vars(self.deleted)}

    def without_tombstones(self) -> ShardEntry:
        """Return the entry of the file as it was written."""
        return self if self.deleted is None else self._replace(deleted=None)


_ENTRY = tuple(name for name in ShardEntry._fields if name != "deleted")
_ENTRY_NAMES = frozenset(_ENTRY)
_GETTERS = tuple(map(itemgetter, _ENTRY))
_make_entry: Callable[[tuple], ShardEntry] = partial(tuple.__new__, ShardEntry)  # without a call of Python code


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    d: int
    dtype: torch.dtype
    has_ids: bool = False
    shards: tuple[ShardEntry, ...] = ()
    format: Any = None  # `format`, `scale` and `codec` as in `StorageLayout`
    scale: Any = None
    codec: CodecFile | None = None

    @classmethod
    def new(cls, op: str, d: int, dtype: torch.dtype, format: Any, scale: Scale) -> Manifest:
        """Return the manifest of an empty corpus for the arguments of `Corpus.create`. Its codec is not written yet.

        Raises:
            ValueError: the codec has another d.
        """
        if not isinstance(format, ResidualCodec):
            return cls(d, dtype, format=format, scale=None if format is None else scale)
        if format.d != d:
            raise ValueError(f"{op}: format: expected a codec of d={d}, got {format}")
        return cls(d, dtype, format=format.format, scale=scale, codec=CodecFile.from_codec(format))

    @cached_property
    def layout(self) -> StorageLayout:
        """The storage layout of the corpus."""
        return StorageLayout(self.d, self.dtype, self.format, self.scale, self.codec)

    @cached_property
    def text(self) -> bytes:
        """The content of the manifest file."""
        version, quantized = VERSION, {}
        if self.format is not None:
            metadata: dict[str, Any] = {"format": self.format, "scale": self.scale}
            version, quantized = QUANTIZED_VERSION, {"quantized": metadata}
        if self.codec is not None:
            version = CODED_VERSION
            metadata["codec"] = {name: getattr(self.codec, name) for name in _CODEC}
        if any(shard.deleted is not None for shard in self.shards):
            version = CHANGED_VERSION
        content = {
            "format": FORMAT,
            "version": version,
            **quantized,
            "d": self.d,
            "dtype": str(self.dtype).removeprefix("torch."),
            "documents": sum(shard.documents for shard in self.shards),
            "has_ids": self.has_ids,
            "shards": [shard.content for shard in self.shards],
        }
        body = _format_canonical(content)
        return f'{body[:-1]}, "sha256": "{_hash_body(body)}"}}\n'.encode()

    @classmethod
    def read(cls, path: Path, cached: Manifest | None = None) -> Manifest:
        """Read the manifest in the directory `path`. Return `cached` if the file still has its content.

        Raises:
            FileNotFoundError: there is no manifest.
            ValueError: the manifest is truncated or corrupt. The message has its path and the wrong field.
        """
        file = path / MANIFEST
        try:
            text = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"{path}: expected a corpus, found no {MANIFEST}") from None
        if cached is not None and text == cached.text:
            return cached
        try:
            return _parse_manifest(json.loads(text), path, _has_checksum(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: the manifest is truncated or corrupt: {error}") from error


def _format_canonical(content: dict[str, Any]) -> str:
    """Return the JSON text that the checksum is computed from."""
    return json.dumps(content, sort_keys=True)


def _hash_body(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _has_checksum(text: bytes) -> bool:
    """Return whether the text is as a writer wrote it, with its checksum."""
    end = len(text) - _CHECKSUM_BYTES
    match = _CHECKSUM.fullmatch(text, max(end, 0))
    return match is not None and hashlib.sha256(text[:end] + b"}").hexdigest().encode() == match[1]


def _parse_manifest(content: Any, path: Path, has_checksum: bool) -> Manifest:
    """Return the manifest of parsed JSON, after checking every field.

    Unless the text has its checksum, the checksum of its canonical form is compared.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"format: expected {FORMAT}")
    if (version := _parse_field(content, "version", int)) not in VERSIONS:
        expected = f"{', '.join(map(str, VERSIONS[:-1]))} or {VERSIONS[-1]}"
        raise ValueError(f"version: expected {expected}, got {reprlib.repr(version)}: a newer lik_ops wrote it")
    checksum = content.pop("sha256", None)
    if not has_checksum and checksum != _hash_body(_format_canonical(content)):
        raise ValueError("sha256: the checksum does not match the content")
    name = _parse_choice(content, "dtype", _DTYPES)
    is_unquantized = version == VERSION or (version == CHANGED_VERSION and "quantized" not in content)
    format, scale, codec = (None, None, None) if is_unquantized else _parse_format(content, version, path)
    shards = _parse_shards(_parse_field(content, "shards", list), version == CHANGED_VERSION)
    if len({*map(attrgetter("file"), shards)}) != len(shards):
        raise ValueError("shards: expected files of different names")
    documents, tokens = (sum(map(attrgetter(key), shards)) for key in ("documents", "tokens"))
    if _parse_count(content, "documents") != documents:
        raise ValueError(f"documents: expected the sum over all shards, {documents}, got {content['documents']}")
    if tokens > _LARGEST:
        raise ValueError("shards: expected fewer than 2^63 tokens")
    d, has_ids = _parse_count(content, "d", min_count=1), _parse_field(content, "has_ids", bool)
    return Manifest(d, _DTYPES[name], has_ids, shards, format, scale, codec)


def _parse_format(content: Mapping[str, Any], version: int, path: Path) -> tuple[str, str, CodecFile | None]:
    """Return the format, the kind of scale, and the codec of residual codes."""
    entry, at = _parse_field(content, "quantized", dict), "quantized"
    has_codec = version == CODED_VERSION or (version == CHANGED_VERSION and "codec" in entry)
    format = _parse_choice(entry, "format", RESIDUAL_FORMATS if has_codec else FORMATS, at)
    scale = _parse_choice(entry, "scale", ("token",) if has_codec else get_args(Scale), at)
    if not has_codec:
        return format, scale, None
    codec, at = _parse_field(entry, "codec", dict, at), f"{at}.codec"
    file = _parse_file(codec, at)
    return (
        format,
        scale,
        CodecFile(_parse_field(codec, "sha256", str, at), _parse_count(codec, "bytes", at), file, path),
    )


def _parse_shards(content: list, may_change: bool) -> tuple[ShardEntry, ...]:
    """Return the entries of all shards.

    Columns of fields are checked without a call of Python code for each shard, because such calls cost most of the time
    of opening a corpus. If a column is wrong, `_parse_shard` raises the error of the first wrong entry.
    """
    try:
        columns = files, sizes, checksums, documents, tokens = [list(map(get, content)) for get in _GETTERS]
        counts = sizes + documents + tokens
        is_valid = {*map(type, counts)} == {int} and min(counts) >= 0 and max(counts) <= _LARGEST
        names = "/".join([*files, ""])
        is_valid = is_valid and names.count("/") == len(files) and _FILES.fullmatch(names) is not None
        is_valid = is_valid and {*map(type, checksums)} == {str}
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        return tuple(_parse_shard(x, f"shards[{i}]", may_change) for i, x in enumerate(content))
    shards = list(map(_make_entry, zip(*columns, repeat(None), strict=False)))
    if {*map(len, content)} != {len(_ENTRY)}:  # some have tombstones
        for i in [i for i, x in enumerate(content) if len(x) != len(_ENTRY)]:
            shards[i] = _parse_shard(content[i], f"shards[{i}]", may_change)
    return tuple(shards)


def _parse_shard(content: Any, at: str, may_change: bool) -> ShardEntry:
    deleted = content.get("deleted") if may_change and isinstance(content, dict) else None
    expected = _ENTRY_NAMES if deleted is None else _ENTRY_NAMES | {"deleted"}
    if not isinstance(content, dict) or content.keys() != expected:
        raise ValueError(f"{at}: expected an object of {', '.join(_ENTRY)}")
    file = _parse_file(content, at)
    size, documents = _parse_count(content, "bytes", at), _parse_count(content, "documents", at)
    tokens = _parse_count(content, "tokens", at)
    entry = ShardEntry(file, size, _parse_field(content, "sha256", str, at), documents, tokens)
    return entry if deleted is None else entry._replace(deleted=_parse_tombstones(deleted, entry, f"{at}.deleted"))


def _parse_tombstones(content: Any, shard: ShardEntry, at: str) -> Tombstones:
    if not isinstance(content, dict) or set(content) != set(Tombstones.__annotations__):
        raise ValueError(f"{at}: expected an object of {', '.join(Tombstones.__annotations__)}")
    documents, tokens = (_parse_count(content, name, at) for name in ("documents", "tokens"))
    for name, count, limit in (("documents", documents, shard.documents), ("tokens", tokens, shard.tokens)):
        if count > limit:
            raise ValueError(f"{at}.{name}: expected {limit} or less, as in the shard, got {count}")
    tombstones = Tombstones(documents, tokens, _parse_field(content, "rows", str, at))
    try:
        tombstones.mask(shard.documents)
    except ValueError as error:
        raise ValueError(f"{at}.rows: {error}") from None
    return tombstones


def _parse_file(content: Mapping[str, Any], at: str) -> str:
    file = _parse_field(content, "file", str, at)
    if not _FILE.fullmatch(file):
        raise ValueError(f"{at}.file: expected a .safetensors file in the corpus's directory, got {reprlib.repr(file)}")
    return file


def _parse_choice(content: Mapping[str, Any], name: str, choices: Iterable[str], at: str = "") -> str:
    value = _parse_field(content, name, str, at)
    if value not in choices:
        expected = f"expected one of {', '.join(choices)}"
        raise ValueError(f"{at}{at and '.'}{name}: {expected}, got {reprlib.repr(value)}")
    return value


def _parse_field(content: Mapping[str, Any], name: str, kind: type, at: str = "") -> Any:
    value = content.get(name)
    if type(value) is not kind:
        actual = "nothing" if name not in content else type(value).__name__
        raise ValueError(f"{at}{at and '.'}{name}: expected {kind.__name__}, got {actual}")
    return value


def _parse_count(content: Mapping[str, Any], name: str, at: str = "", min_count: int = 0) -> int:
    value = _parse_field(content, name, int, at)
    if not min_count <= value <= _LARGEST:
        raise ValueError(f"{at}{at and '.'}{name}: expected {min_count} or more, below 2^63, got {reprlib.repr(value)}")
    return value
