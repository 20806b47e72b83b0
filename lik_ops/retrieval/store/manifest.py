"""The manifest of a corpus: the list of committed shards, with the expected size and checksum of each."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch

from ...core.arguments import DTYPES
from ...formats.residual import ResidualCodec
from ...formats.table import FORMATS, RESIDUAL_FORMATS
from .codecs import CodecFile
from .layout import Scale, StorageLayout

FORMAT, VERSION, QUANTIZED_VERSION = "lik_ops.corpus", 1, 2  # QUANTIZED_VERSION: quantized corpora
CODED_VERSION = 3  # corpora of residual codes
MANIFEST = "manifest.json"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_CODEC = "sha256", "bytes", "file"
_LARGEST = (1 << 63) - 1  # the largest size of a tensor


@dataclass(frozen=True)
class ShardEntry:
    """The manifest entry of a shard."""

    file: str
    bytes: int
    sha256: str
    documents: int
    tokens: int


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
        """Return the manifest of an empty corpus.

        Its codec, if any, is not written yet.

        Args:
            op: the name of the function, for error messages.
            d: the number of features of a token.
            dtype: the dtype of the tokens.
            format: the format of `Corpus.create`.
            scale: ``"token"`` or ``"document"``.

        Returns:
            The manifest.

        Raises:
            ValueError: the codec has another d.
        """
        if not isinstance(format, ResidualCodec):
            return cls(d, dtype, format=format, scale=None if format is None else scale)
        if format.d != d:
            raise ValueError(f"{op}: format: expected a codec of d={d}, got {format}")
        return cls(d, dtype, format=format.format, scale=scale, codec=CodecFile.of(format))

    @cached_property
    def layout(self) -> StorageLayout:
        """The storage layout of the corpus."""
        return StorageLayout(self.d, self.dtype, self.format, self.scale, self.codec)

    @cached_property
    def text(self) -> bytes:
        """The content of the manifest file."""
        version, quantized = VERSION, {}
        if self.format is not None:
            about: dict[str, Any] = {"format": self.format, "scale": self.scale}
            version, quantized = QUANTIZED_VERSION, {"quantized": about}
        if self.codec is not None:
            version = CODED_VERSION
            about["codec"] = {name: getattr(self.codec, name) for name in _CODEC}
        content = {
            "format": FORMAT,
            "version": version,
            **quantized,
            "d": self.d,
            "dtype": str(self.dtype).removeprefix("torch."),
            "documents": sum(shard.documents for shard in self.shards),
            "has_ids": self.has_ids,
            "shards": [vars(shard) for shard in self.shards],
        }
        body = _format_canonical(content)
        return f'{body[:-1]}, "sha256": "{_hash_body(body)}"}}\n'.encode()

    @classmethod
    def read(cls, path: Path, known: Manifest | None = None) -> Manifest:
        """Read the manifest in the directory `path`.

        Args:
            path: the directory of the corpus.
            known: a manifest that is returned if the file still has its content.

        Returns:
            The manifest.

        Raises:
            FileNotFoundError: there is no manifest.
            ValueError: the manifest is truncated or corrupt. The message has its path and the wrong field.
        """
        at = path / MANIFEST
        try:
            text = at.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"{path}: expected a corpus, found no {MANIFEST}") from None
        if known is not None and text == known.text:
            return known
        try:
            return _parse_manifest(json.loads(text), path)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{at}: the manifest is truncated or corrupt: {error}") from error


def _format_canonical(content: dict[str, Any]) -> str:
    """Return the JSON text that the checksum is computed from."""
    return json.dumps(content, sort_keys=True)


def _hash_body(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _parse_manifest(content: Any, path: Path) -> Manifest:
    """Return the manifest of parsed JSON, after checking every field."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"format: expected {FORMAT}")
    if (version := _parse_field(content, "version", int)) not in (VERSION, QUANTIZED_VERSION, CODED_VERSION):
        expected = f"{VERSION}, {QUANTIZED_VERSION} or {CODED_VERSION}"
        raise ValueError(f"version: expected {expected}, got {reprlib.repr(version)}: a newer lik_ops wrote it")
    if content.pop("sha256", None) != _hash_body(_format_canonical(content)):
        raise ValueError("sha256: the checksum does not match the content")
    name = _parse_choice(content, "dtype", _DTYPES)
    format, scale, codec = (None, None, None) if version == VERSION else _parse_format(content, version, path)
    shards = tuple(_parse_shard(x, f"shards[{i}]") for i, x in enumerate(_parse_field(content, "shards", list)))
    if len({shard.file for shard in shards}) != len(shards):
        raise ValueError("shards: expected files of different names")
    documents, tokens = (sum(getattr(shard, each) for shard in shards) for each in ("documents", "tokens"))
    if _parse_count(content, "documents") != documents:
        raise ValueError(f"documents: expected the sum over all shards, {documents}, got {content['documents']}")
    if tokens > _LARGEST:
        raise ValueError("shards: expected fewer than 2^63 tokens")
    d, has_ids = _parse_count(content, "d", least=1), _parse_field(content, "has_ids", bool)
    return Manifest(d, _DTYPES[name], has_ids, shards, format, scale, codec)


def _parse_format(content: Mapping[str, Any], version: int, path: Path) -> tuple[str, str, CodecFile | None]:
    """Return the format, the kind of scale, and the codec of residual codes."""
    found, at = _parse_field(content, "quantized", dict), "quantized"
    format = _parse_choice(found, "format", RESIDUAL_FORMATS if version == CODED_VERSION else FORMATS, at)
    scale = _parse_choice(found, "scale", get_args(Scale) if version == QUANTIZED_VERSION else ("token",), at)
    if version == QUANTIZED_VERSION:
        return format, scale, None
    codec, at = _parse_field(found, "codec", dict, at), f"{at}.codec"
    file = _parse_file(codec, at)
    return (
        format,
        scale,
        CodecFile(_parse_field(codec, "sha256", str, at), _parse_count(codec, "bytes", at), file, path),
    )


def _parse_shard(content: Any, at: str) -> ShardEntry:
    if not isinstance(content, dict) or set(content) != set(ShardEntry.__annotations__):
        raise ValueError(f"{at}: expected an object of {', '.join(ShardEntry.__annotations__)}")
    file = _parse_file(content, at)
    size, documents, tokens = (_parse_count(content, name, at) for name in ("bytes", "documents", "tokens"))
    return ShardEntry(file, size, _parse_field(content, "sha256", str, at), documents, tokens)


def _parse_file(content: Mapping[str, Any], at: str) -> str:
    file = _parse_field(content, "file", str, at)
    if not re.fullmatch(r"[\w.-]+\.safetensors", file, re.ASCII):
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
        found = "nothing" if name not in content else type(value).__name__
        raise ValueError(f"{at}{at and '.'}{name}: expected {kind.__name__}, got {found}")
    return value


def _parse_count(content: Mapping[str, Any], name: str, at: str = "", least: int = 0) -> int:
    value = _parse_field(content, name, int, at)
    if not least <= value <= _LARGEST:
        raise ValueError(f"{at}{at and '.'}{name}: expected {least} or more, below 2^63, got {reprlib.repr(value)}")
    return value
