"""`Quantized`: documents in a format of `formats.table`, accepted by scoring functions in place of D."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import (
    DTYPES,
    INDEX_DTYPES,
    check_choice,
    check_count,
    check_dtype,
    check_strided,
    check_tensor,
    describe_non_tensor,
    describe_type,
    format_shape,
)
from ..core.disk import get_path, replace_file, save_tensors
from ..core.extras import import_extra
from .residual import ResidualCodec
from .rotation import rotate
from .table import ALL_FORMATS, EncodedTokens, FormatName, Query, Residual, list_queries, split_rows

_CODEC = "codec."  # prefix of the names of the codec's tensors in a file


@dataclass(frozen=True, eq=False, repr=False)
class Quantized:
    """Quantized documents, accepted by scoring functions and `retrieve` in place of D.

    `quantize` and `Quantized.of_codes` return one. Indexing selects documents along the first axis. ``torch.save``,
    pickle and ``copy`` work. `save` and `load` use safetensors.

    Args:
        data: ``[Ld, d]``, ``[Nd, Ld, d]``, ``[Nq, K, Ld, d]`` or packed ``[Td, d]``, in the dtype of the format.
            ``"binary"`` has ``[..., ceil(d / 8)]`` with feature k in bit ``k % 8`` of byte ``k // 8``, set if the
            feature is > 0. ``"rq4"``, ``"rq2"`` and ``"rq1"`` have ``[..., ceil(d n / 8)]`` for n bits with the first
            feature of a rotated token in the lowest bits. Residual codes have ``[..., ceil(d nbits / 8)]`` with the
            first features in the highest bits.
        scale: fp32, or bf16 for ``"rq4"``, ``"rq2"`` and ``"rq1"``, the shape of `data` without its last axis. An axis
            on which the scale is shared has size 1.
        format: ``"int8"``, ``"uint8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"binary"``, or the rotated formats
            ``"rq4"``, ``"rq2"`` and ``"rq1"``. Residual codes are
            ``"residual1"``, ``"residual2"``, ``"residual4"`` or ``"residual8"``.
        d: features of a token.
        dtype: dtype of the tokens before quantization.
        minimum: for ``"uint8"``, the offset added to each feature, in a shape like `scale`. None for other formats.
        error: largest L2 error of a token, for each document, rounded up: fp32 ``[Nd]``, ``[Nq, K]`` or ``[]``. None if
            unknown. Two-stage `retrieve` needs it.
        norm: largest L2 norm of a token before quantization, for each document, rounded up, in the shape of `error`.
            None if unknown.
        codes: for residual codes, the centroid of each token, int32 or int64, the shape of `data` without its last
            axis. A document with a code outside the codec scores NaN. None for other formats.
        codec: for residual codes, the codec that decodes them, on the device of `data`. None for other formats.
        query: ``"half"`` rounds query rows to 1/64516 of their largest feature on a GPU, in products with ``"int8"``,
            ``"binary"`` and ``"rq1"`` documents of at most 256 features. ``"int8"`` rounds them to 1/254, which needs
            about half the time if there are many queries. Only ``"int8"`` and ``"binary"`` documents allow ``"int8"``.
            Only ``"binary"`` documents allow ``"binary"``. It replaces each query feature by its sign, on every device.
            Only ``"fp8_e4m3"`` documents allow ``"fp8"``. It lets a GPU round the features of fp16 and bf16 queries to
            FP8.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a shape or device is wrong.

    Example:
        >>> # Codes that another library wrote.
        >>> data = torch.randint(0, 256, (5, 300, 128), dtype=torch.uint8)
        >>> scale, minimum = torch.rand(5, 300) / 100, -torch.rand(5, 300)
        >>> # A feature is code * scale + minimum.
        >>> D = lik_ops.Quantized(data, scale, "uint8", 128, torch.float16, minimum=minimum)
        >>> lik_ops.maxsim(torch.randn(2, 32, 128), D).shape
        torch.Size([2, 5])
    """

    data: Tensor
    scale: Tensor
    format: FormatName | Residual
    d: int
    dtype: torch.dtype
    minimum: Tensor | None = None
    error: Tensor | None = None
    norm: Tensor | None = None
    codes: Tensor | None = None
    codec: ResidualCodec | None = None
    query: Query = "half"

    def __post_init__(self) -> None:
        op = "Quantized"
        check_choice(op, "format", self.format, tuple(ALL_FORMATS))
        check_choice(op, "query", self.query, list_queries(self.format))
        spec = ALL_FORMATS[self.format]
        check_tensor(op, "data", self.data)
        check_strided(op, "data", self.data)
        if self.data.dtype != spec.dtype:
            raise TypeError(f"{op}: data: expected {spec.dtype} for {self.format}, got {self.data.dtype}")
        check_count(op, "d", self.d, 1)
        check_dtype(op, "dtype", self.dtype)
        width = -(-self.d // spec.features_per_element)
        if self.data.dim() not in (2, 3, 4) or self.data.shape[-1] != width:
            raise ValueError(f"{op}: data: expected [..., L, {width}], got {format_shape(self.data)}")
        tokens = self.data.shape[:-1]
        if self.minimum is not None and not spec.affine:
            raise TypeError(f"{op}: minimum: expected None for {self.format}, got {describe_type(self.minimum)}")
        for name, is_required in (("scale", True), ("minimum", spec.affine)):
            sizes = f"{list(tokens)}, or 1 for any size,"
            self._check(name, getattr(self, name), is_required, lambda x: _has_sizes(x, tokens), sizes)
        is_packed, documents = len(tokens) == 1, tokens[:-1]

        def fits_documents(x: Tensor) -> bool:
            return x.dim() <= 2 if is_packed else x.shape == documents

        for name in ("error", "norm"):
            sizes = "[] or [Nd]" if is_packed else f"{list(documents)}"
            self._check(name, getattr(self, name), False, fits_documents, sizes)
        self._check_codes(tokens, spec.nbits)

    def _check_codes(self, tokens: torch.Size, nbits: int) -> None:
        """Raise TypeError or ValueError unless `codes` and `codec` fit the format."""
        op, codes, codec = "Quantized", self.codes, self.codec
        for name, x, kind in (("codes", codes, Tensor), ("codec", codec, ResidualCodec)):
            if not isinstance(x, kind if nbits else type(None)):
                actual = describe_type(x) if kind is ResidualCodec or not nbits else describe_non_tensor(x)
                raise TypeError(
                    f"{op}: {name}: expected {kind.__name__ if nbits else None} for {self.format}, got {actual}"
                )
        if codes is None or codec is None:
            return
        check_strided(op, "codes", codes)
        if codes.dtype not in INDEX_DTYPES:
            raise TypeError(f"{op}: codes: expected int32 or int64, got {codes.dtype}")
        if codes.shape != tokens or codes.device != self.device:
            expected = f"{list(tokens)} on {self.device}"
            raise ValueError(f"{op}: codes: expected {expected}, got {format_shape(codes)} on {codes.device}")
        if (codec.nbits, codec.d, codec.centroids.device) != (nbits, self.d, self.device):
            expected = f"nbits={nbits}, d={self.d} on {self.device}"
            raise ValueError(f"{op}: codec: expected {expected}, got {codec} on {codec.centroids.device}")
        tensors = codec.tensors()
        if any(x.requires_grad for x in tensors.values()):  # documents have no gradient
            detached_tensors: dict[str, Any] = {name: x.detach() for name, x in tensors.items()}
            object.__setattr__(self, "codec", replace(codec, **detached_tensors))

    def _check(self, name: str, x: Any, required: bool, fits: Callable[[Tensor], bool], expected: str) -> None:
        """Raise TypeError or ValueError unless an attribute of numbers has a dtype, a shape and a device that fit."""
        check_tensor("Quantized", name, x, or_none=not required)
        if x is None:
            return
        check_strided("Quantized", name, x)
        dtype = ALL_FORMATS[self.format].scale if name == "scale" else torch.float32
        if x.dtype != dtype:
            raise TypeError(f"Quantized: {name}: expected {dtype}, got {x.dtype}")
        if not fits(x) or x.device != self.data.device:
            expected = f"{expected} on the device of data, {self.data.device}"
            raise ValueError(f"Quantized: {name}: expected {expected}, got {format_shape(x)} on {x.device}")

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the tokens before quantization."""
        return torch.Size((*self.data.shape[:-1], self.d))

    @property
    def device(self) -> torch.device:
        """Return the device of all tensors."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Return the size of all tensors in bytes, including the tensors of the codec."""
        return sum(x.nbytes for x in (*self.tensors().values(), *(self.codec.tensors().values() if self.codec else ())))

    def dim(self) -> int:
        """Return the number of axes."""
        return self.data.dim()

    def __len__(self) -> int:
        return self.data.shape[0]

    def __repr__(self) -> str:
        query = "" if self.query == "half" else f", query={self.query!r}"
        return f"Quantized({list(self.shape)}, format={self.format!r}{query}, device={str(self.device)!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with FP8 as bytes, because torch cannot load FP8 from a pickle."""
        return {**self.__dict__, "data": self.data.view(ALL_FORMATS[self.format].bytes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, data=state["data"].view(ALL_FORMATS[state["format"]].dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the documents by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in values.items() if isinstance(x, Tensor)}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Quantized:
        """Copy the documents to another device.

        Args:
            device: the target device.
            non_blocking: see ``torch.Tensor.to``.

        Returns:
            A `Quantized` on `device`.
        """
        tensors: dict[str, Any] = {name: x.to(device, non_blocking=non_blocking) for name, x in self.tensors().items()}
        return replace(self, **tensors, codec=self.codec and self.codec.to(device, non_blocking))

    def __getitem__(self, documents: Any) -> Quantized:
        """Select documents, or tokens of packed ``[Td, d]``.

        `error` and `norm` are unknown for selected tokens.

        Args:
            documents: a slice, a list or a tensor of indices. A mask ``[Nd, Ld]`` selects tokens and packs them.

        Returns:
            A `Quantized` with the selected documents or tokens.

        Raises:
            TypeError: the index has another type.
        """
        if isinstance(documents, (tuple, int)) or documents is None or documents is Ellipsis:
            raise TypeError(f"Quantized: index: expected a slice, a list or a tensor, got {type(documents).__name__}")
        if isinstance(documents, Tensor):
            check_strided("Quantized", "index", documents)
        changes: dict[str, Any] = {"data": self.data[documents]}
        changes["codes"] = None if self.codes is None else self.codes[documents]
        axes = changes["data"].dim() - self.dim() + 1  # axes that replace the first axis
        index_axes = documents.dim() if isinstance(documents, Tensor) and documents.dtype == torch.bool else 1
        for name in ("scale", "minimum"):
            x = getattr(self, name)
            if x is not None and index_axes > 1:
                x = x.expand(*self.data.shape[:index_axes], *x.shape[index_axes:])[documents]
            elif x is not None:  # a value shared by all documents stays shared
                x = x[documents] if x.shape[0] == len(self) else x[0][(None,) * axes]
            changes[name] = x
        for name in ("error", "norm"):
            x, is_token_mask = getattr(self, name), index_axes == self.dim() - 1
            changes[name] = None if x is None or is_token_mask else x[documents]
        return replace(self, **changes)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Dequantize the tokens and round them once.

        Args:
            dtype: dtype of the result; None for the dtype of the tokens before quantization.

        Returns:
            Tokens in the shape `shape`.

        Raises:
            TypeError: `dtype` is not float16, bfloat16, float32 or float64.
        """
        dtype = self.dtype if dtype is None else dtype
        check_dtype("Quantized.dequantize", "dtype", dtype)
        tokens = self.to_flat_encoded()
        out = torch.empty((len(tokens.data), self.d), dtype=dtype, device=self.device)
        is_rotated = ALL_FORMATS[self.format].rotated
        for part in split_rows(len(out), self.d):
            x = tokens.decode(part, self.d)
            out[part] = rotate(x.double(), inverse=True) if is_rotated else x
        return out.view(self.shape)

    def to_encoded(self) -> EncodedTokens:
        """Return the tokens as `EncodedTokens` with all their axes and with FP8 as bytes."""
        data, codec = self.data, self.codec
        residual_args = () if codec is None else (self.codes, codec.centroids, codec.table)
        format = self.format if self.query == "half" else f"{self.format}_{self.query}"
        data = data.view(ALL_FORMATS[self.format].bytes) if data.is_floating_point() else data
        return EncodedTokens(data, self.scale, self.minimum, format, *residual_args)

    def to_flat_encoded(self) -> EncodedTokens:
        """Return the tokens of all documents as `EncodedTokens` with one token axis, for operators."""
        return self.to_encoded().flatten()

    def per_token(self) -> tuple[Tensor, Tensor | None]:
        """Return the scales and minima of all tokens, ``[Td]``, or ``[1]`` if all tokens share one."""
        return self.to_flat_encoded()[1:3]

    @classmethod
    def of_codes(
        cls, codes: Tensor, residuals: Tensor, codec: ResidualCodec, dtype: torch.dtype | None = None
    ) -> Quantized:
        """Wrap existing residual codes as documents and compute the inverse norms of their tokens.

        Args:
            codes: ``[Ld]``, ``[Nd, Ld]``, ``[Nq, K, Ld]`` or packed ``[Td]``, int32 or int64. A document with a code
                outside the codec scores NaN.
            residuals: uint8 ``[..., ceil(d nbits / 8)]``, in the bit order of the codec.
            codec: decodes the codes.
            dtype: dtype of the tokens before quantization; None for the dtype of the centroids.

        Returns:
            A `Quantized` of format ``"residual1"``, ``"residual2"``, ``"residual4"`` or ``"residual8"``.

        Raises:
            TypeError: a dtype or type is wrong.
            ValueError: a shape or device is wrong.

        Example:
            >>> codec = lik_ops.ResidualCodec(torch.eye(8), torch.tensor([-0.1, 0.1]))
            >>> codes, residuals = torch.tensor([[0, 7]]), torch.tensor([[[255], [0]]]).byte()
            >>> D = lik_ops.Quantized.of_codes(codes, residuals, codec)
            >>> lik_ops.maxsim(torch.randn(2, 32, 8), D).shape
            torch.Size([2, 1])
        """
        if not isinstance(codec, ResidualCodec):
            raise TypeError(f"Quantized.of_codes: codec: expected a ResidualCodec, got {describe_type(codec)}")
        codec.check_codes("Quantized.of_codes", codes, residuals)
        if dtype is not None:
            check_dtype("Quantized.of_codes", "dtype", dtype)
        scale = codec.scales(codes, residuals)
        dtype = codec.centroids.dtype if dtype is None else dtype
        return cls(codec.to_table_bit_order(residuals), scale, codec.format, codec.d, dtype, codes=codes, codec=codec)

    def save(self, path: str | os.PathLike) -> None:
        """Write one safetensors file, and replace an existing file only once the new one is complete.

        Needs ``lik-ops[retrieval]``. A symbolic link at `path` is replaced, and its target is unchanged.

        Args:
            path: the file to write.

        Raises:
            FileExistsError: `path` is a directory or a device.
            ModuleNotFoundError: safetensors or numpy is not installed.
            OSError: an error of the disk, with `path`.
        """
        import_extra("Quantized.save", "retrieval", "numpy", "safetensors.torch")
        tensors, codec = self.tensors(), self.codec
        metadata = {"format": self.format, "d": str(self.d), "dtype": str(self.dtype).removeprefix("torch.")}
        metadata |= {"query": self.query} if self.query != "half" else {}
        if codec is not None:
            tensors |= {_CODEC + name: x for name, x in codec.tensors().items()}
            metadata |= {"bit_order": codec.bit_order, "normalize": str(codec.normalize)}
        # The documents may be memory-mapped from the file that is replaced.
        replace_file(path, lambda temporary_path: save_tensors(tensors, temporary_path, {"lik_ops": "1", **metadata}))

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str = "cpu") -> Quantized:
        """Read a file that `save` wrote.

        On a CPU the tensors are memory-mapped from the file. The file must keep its size while they are in use. `save`
        replaces the file and does not change a mapped one.

        Args:
            path: the file to read.
            device: device of the tensors.

        Returns:
            The `Quantized` that was saved.

        Raises:
            ModuleNotFoundError: safetensors is not installed.
            ValueError: the file is damaged, or `save` did not write it.
        """
        safetensors = import_extra("Quantized.load", "retrieval", "safetensors")
        path, device = os.fspath(path), str(torch.device(device))
        try:
            safe_open = safetensors.safe_open
            with (
                open(path, "rb") as raw_file,
                safe_open(get_path(raw_file, path), framework="pt", device=device) as file,
            ):
                metadata = file.metadata() or {}
                dtype = getattr(torch, metadata.get("dtype", ""), None)
                if metadata.get("lik_ops") != "1" or metadata.get("format") not in ALL_FORMATS or dtype not in DTYPES:
                    raise ValueError("its metadata is not from Quantized.save")
                tensors: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            names = [name for name in ("centroids", "weights", "cutoffs") if _CODEC + name in tensors]
            if codec_tensors := {name: tensors.pop(_CODEC + name) for name in names}:
                options: Any = {"bit_order": metadata["bit_order"], "normalize": metadata["normalize"] == "True"}
                tensors["codec"] = ResidualCodec(**codec_tensors, **options)
            d, query = int(metadata["d"]), metadata.get("query", "half")
            return cls(**tensors, format=metadata["format"], d=d, dtype=dtype, query=query)
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            expected = "expected a file that Quantized.save wrote"
            raise ValueError(f"Quantized: path: {expected}, got {path}: {error}") from error


def _has_sizes(x: Tensor, sizes: torch.Size) -> bool:
    """Return whether the shape of a tensor equals `sizes`, where any axis may also have size 1."""
    return x.dim() == len(sizes) and all(n in (1, size) for n, size in zip(x.shape, sizes, strict=True))


def make_placeholder(D: Quantized) -> Tensor:
    """Return a tensor with the metadata of the tokens before quantization that occupies the memory of one element."""
    return torch.empty((), dtype=D.dtype, device=D.device).expand(D.shape)
