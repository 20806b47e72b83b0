"""The codec of a corpus of residual codes, stored in its own file, which the manifest names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...core.extras import import_extra
from ...formats.residual import ResidualCodec

_TENSORS = "centroids", "weights", "cutoffs"


@dataclass(frozen=True)
class CodecFile:
    """The manifest entry of a codec, and the directory of its file, or None if it is not written yet."""

    sha256: str
    bytes: int
    file: str | None = None
    path: Path | None = None

    @classmethod
    def from_codec(cls, codec: ResidualCodec) -> CodecFile:
        """Return the entry of a codec that is not written yet."""
        codec = codec.to("cpu")
        text = serialize_codec(codec)
        entry = cls(hashlib.sha256(text).hexdigest(), len(text))
        entry.__dict__["codec"] = codec
        return entry

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CodecFile) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("sha256", "bytes", "file", "path")}

    @cached_property
    def codec(self) -> ResidualCodec:
        """The codec, read to the CPU.

        Raises:
            ValueError: the file is missing, or differs from the manifest. The message has its path.
        """
        assert self.path is not None and self.file is not None
        path = self.path / self.file
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise ValueError(f"{path}: the codec is missing") from None
        if (len(text), hashlib.sha256(text).hexdigest()) != (self.bytes, self.sha256):
            raise ValueError(f"{path}: the codec is truncated or corrupt: expected {self.bytes} bytes, got {len(text)}")
        with torch.inference_mode(False):  # an inference tensor would stay one, and no gradient could use it
            return _deserialize_codec(text)

    @cached_property
    def _device_copies(self) -> dict[torch.device, ResidualCodec]:
        return {}

    def copy_to(self, device: torch.device) -> ResidualCodec:
        """Return the codec on a device. The copy is cached."""
        if device.type == "cpu":
            return self.codec
        codec = self._device_copies.get(device)
        if codec is None:
            with torch.inference_mode(False):
                codec = self._device_copies[device] = self.codec.to(device)
        return codec

    def check(self, format: str, d: int) -> None:
        """Raise ValueError, naming the file, unless the codec has this format and size."""
        if (self.codec.format, self.codec.d) != (format, d):
            assert self.path is not None and self.file is not None
            actual = f"{self.codec.format} of d={self.codec.d}"
            raise ValueError(f"{self.path / self.file}: expected a codec for {format} of d={d}, got {actual}")


def serialize_codec(codec: ResidualCodec) -> bytes:
    """Return the content of the codec file."""
    save = import_extra("Corpus", "retrieval", "numpy", "safetensors.torch").save
    tensors = {name: x.clone(memory_format=torch.contiguous_format) for name, x in codec.tensors().items()}
    # Options are stored as tensors, because the order of metadata in the file is not guaranteed.
    options = {"bit_order": codec.bit_order.encode(), "normalize": str(codec.normalize).encode()}
    return save(tensors | {name: torch.frombuffer(bytearray(x), dtype=torch.uint8) for name, x in options.items()})


def _deserialize_codec(text: bytes) -> ResidualCodec:
    """Return the codec that is stored in a file."""
    contents: dict[str, Any] = import_extra("Corpus", "retrieval", "numpy", "safetensors.torch").load(text)
    bit_order, normalize = (bytes(contents[name].tolist()).decode() for name in ("bit_order", "normalize"))
    tensors = {name: contents[name] for name in _TENSORS if name in contents}
    return ResidualCodec(**tensors, bit_order=bit_order, normalize=normalize == "True")  # type: ignore[arg-type]


def is_same_codec(a: ResidualCodec, b: ResidualCodec) -> bool:
    """Return whether codes decode to the same tokens with either codec, on any device."""
    if a is b:
        return True
    tensors = [(getattr(a, name).cpu(), getattr(b, name).cpu()) for name in ("centroids", "table")]
    return a.normalize == b.normalize and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in tensors)
