"""`read_index`: documents of residual codes from the files of fast-plaid, next-plaid, ColBERTv2 and WARP.

All four libraries store `centroids`, and cutoffs and weights of buckets. fast-plaid and next-plaid write ``.npy``
files. ColBERT writes ``.pt`` files.

- The first three store the length of each document by chunk (``doclens.N.json``). They also store codes and residuals,
  by chunk (``N.codes``, ``N.residuals``). Since version 1.7, fast-plaid stores the codes of all chunks in one file
  whose last rows are padding.
- WARP stores tokens by centroid. ``sizes.compacted`` has the number of tokens of each centroid, ``codes.compacted`` the
  document of each token, and ``residuals.repacked.compacted`` its buckets.

The reader validates all files against each other. A value that does not fit is an error that names its file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...core.arguments import DTYPES, as_device
from ...core.extras import import_extra
from ...core.segments import compute_offsets
from ...formats.index import Index
from ...formats.quantized import Quantized
from ...formats.residual import BitOrder, ResidualCodec

if TYPE_CHECKING:
    import os

_OP = "read_index"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_CODES = (torch.int32, torch.int64)
_NBITS = (1, 2, 4, 8)
_REPACKED = "residuals.repacked.compacted.pt"  # only WARP writes this file


def read_index(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Index:
    """Read the documents of an index that fast-plaid, next-plaid, ColBERTv2 or WARP wrote.

    The files show which library wrote the index. Tokens decode to the same values as in that library, up to rounding.
    WARP does not normalize tokens, and orders the tokens of a document by centroid. Files are read as data only:
    pickled objects other than tensors are rejected. ``.npy`` files need numpy.

    Args:
        path: the directory.
        device: the device of the documents.

    Returns:
        An `Index`, for ``lik_ops.maxsim(Q, index)``, ``lik_ops.retrieve(Q, index, top_k)`` and ``index.decode()``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or its sizes do not fit the other files. The message names it.

    Example:
        >>> import tempfile
        >>> tokens = torch.nn.functional.normalize(torch.randn(1000, 64), dim=-1)
        >>> codes = lik_ops.quantize(tokens, lik_ops.ResidualCodec.train(tokens, nbits=2))
        >>> with tempfile.TemporaryDirectory() as path:
        ...     lik_ops.write_index(path, lik_ops.Index(codes, torch.arange(0, 1001, 10)))
        ...     index = lik_ops.read_index(path)
        >>> lik_ops.maxsim(torch.randn(2, 32, 64), index).shape
        torch.Size([2, 100])
    """
    files, device = _IndexFiles(Path(path)), as_device(_OP, device)
    with torch.device("cpu"):  # overrides the default device
        contents = _read_by_centroid(files) if (files.root / _REPACKED).exists() else _read_by_document(files)
        bounds = compute_offsets(contents.lengths)
    documents = Quantized.of_codes(contents.codes.to(device), contents.residuals.to(device), contents.codec.to(device))
    return Index(documents, bounds.to(device))


class _IndexDocuments(NamedTuple):
    """Packed documents of an index on the CPU."""

    codec: ResidualCodec
    codes: Tensor
    residuals: Tensor
    lengths: Tensor


def _read_by_document(files: _IndexFiles) -> _IndexDocuments:
    """Read an index that stores tokens by document."""
    nbits, lengths = files.about()
    codec, total, kind = files.codec(nbits), [int(x.sum()) for x in lengths], files.suffix
    bound = len(codec.centroids), "centroids"
    if (files.root / f"merged_codes{kind}").exists():
        longest = max((int(x.max()) for x in lengths if len(x)), default=0)
        names = f"merged_codes{kind}", f"merged_residuals{kind}"
        parts = [files.tokens(names, codec.width, sum(total), bound, longest)]
    else:
        chunk_names = [(f"{n}.codes{kind}", f"{n}.residuals{kind}") for n in range(len(total))]
        parts = [files.tokens(x, codec.width, n, bound) for x, n in zip(chunk_names, total, strict=True)]
    empty = torch.empty(0, dtype=torch.int32), torch.empty((0, codec.width), dtype=torch.uint8)
    codes, residuals = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*(parts or [empty]), strict=True))
    return _IndexDocuments(codec, codes, residuals, _join_chunks(lengths))


def _read_by_centroid(files: _IndexFiles) -> _IndexDocuments:
    """Read an index of WARP, which stores tokens by centroid, with or without the index that it was built from."""
    known_lengths = None
    if files.metadata.exists():
        nbits, chunks = files.about()
        known_lengths = _join_chunks(chunks)
    else:
        nbits = files.nbits()
    codec = files.codec(nbits, "big", normalize=False)
    sizes = files.sizes(len(codec.centroids))
    total = int(sizes.sum())
    # Without known lengths, a document number must be below the number of tokens. Otherwise most documents would be
    # empty.
    bound = total if known_lengths is None else len(known_lengths), "documents"
    numbers, residuals = files.tokens(("codes.compacted.pt", _REPACKED), codec.width, total, bound)
    lengths = torch.bincount(numbers, minlength=0 if known_lengths is None else len(known_lengths))
    if known_lengths is not None and not torch.equal(lengths, known_lengths):
        raise _make_error(files.root / "codes.compacted.pt", "tokens of each document as doclens say", "others")
    order = numbers.argsort(stable=True)
    codes = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(sizes)
    return _IndexDocuments(codec, codes[order], residuals[order], lengths)


def _join_chunks(chunks: list[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *chunks])


class _IndexFiles:
    """The files of an index, and their kind."""

    def __init__(self, root: Path) -> None:
        self.root, self.metadata = root, root / "metadata.json"
        self.suffix = ".npy" if (root / "centroids.npy").exists() else ".pt"
        if not (root / f"centroids{self.suffix}").exists():
            raise FileNotFoundError(f"{_OP}: path: expected a directory with centroids.npy or centroids.pt, got {root}")

    def about(self) -> tuple[int, list[Tensor]]:
        """Return the bits of a bucket, and the lengths of documents by chunk."""
        metadata = _read_json(self.metadata)
        if not isinstance(metadata, dict):
            raise _make_error(self.metadata, "an object", type(metadata).__name__)
        settings = metadata.get("config", metadata)  # ColBERT stores its settings in a sub-object
        nbits = _read_count(self.metadata, settings if isinstance(settings, dict) else {}, "nbits")
        if nbits not in _NBITS:
            raise _make_error(self.metadata, "nbits of 1, 2, 4 or 8", nbits)
        lengths = [self.lengths(n) for n in range(_read_count(self.metadata, metadata, "num_chunks"))]
        total = sum(int(x.sum()) for x in lengths)
        for name, count in (("num_embeddings", total), ("num_documents", sum(map(len, lengths)))):
            if name in metadata and metadata[name] != count:
                raise _make_error(self.metadata, f"{name} {count}, as doclens say", metadata[name])
        return nbits, lengths

    def nbits(self) -> int:
        """Return the bits of a bucket, from the number of weights."""
        file, weights = self._tensor(f"bucket_weights{self.suffix}", _FLOATS)
        nbits = weights.numel().bit_length() - 1
        if nbits not in _NBITS or weights.shape != (2**nbits,):
            raise _make_error(file, "2, 4, 16 or 256 weights", list(weights.shape))
        return nbits

    def lengths(self, chunk: int) -> Tensor:
        """Return the lengths of the documents of a chunk."""
        file = self.root / f"doclens.{chunk}.json"
        lengths = _read_json(file)
        if not isinstance(lengths, list) or not all(type(n) is int and 0 <= n < 2**31 for n in lengths):
            raise _make_error(file, "a list of lengths", "something else")
        return torch.tensor(lengths, dtype=torch.int64)

    def sizes(self, count: int) -> Tensor:
        """Return the number of tokens of each of `count` centroids. Their sum fits 64 bits."""
        file, sizes = self._tensor("sizes.compacted.pt", _CODES)
        if sizes.shape != (count,):
            raise _make_error(file, f"[{count}], as centroids say", list(sizes.shape))
        if count and not 0 <= int(sizes.min()) <= int(sizes.max()) < 2**31:
            raise _make_error(file, "sizes from 0 on", f"{int(sizes.min())} to {int(sizes.max())}")
        return sizes.long()

    def codec(self, nbits: int, bit_order: BitOrder = "plaid", normalize: bool = True) -> ResidualCodec:
        """Return the codec of the index."""
        file, centroids = self._tensor(f"centroids{self.suffix}", _FLOATS)
        if centroids.dim() != 2 or centroids.shape[1] < 1:
            raise _make_error(file, "[C, d]", list(centroids.shape))
        pair: list[Tensor] = []
        if self.suffix == ".pt":
            file = self.root / "buckets.pt"
            content = _read_torch(file)
            pair = list(content) if isinstance(content, (tuple, list)) else []
        else:
            pair = [self._tensor(f"bucket_{name}.npy", _FLOATS)[1] for name in ("cutoffs", "weights")]
            file = self.root / "bucket_weights.npy"
        expected = [(2**nbits - 1,), (2**nbits,)]
        if [tuple(x.shape) if _has_rows(x, DTYPES) else None for x in pair] != expected:
            raise _make_error(file, f"{2**nbits - 1} cutoffs and {2**nbits} weights for {nbits} bits", "others")
        cutoffs, weights = (x.detach().float() for x in pair)
        return ResidualCodec(centroids, weights, cutoffs, bit_order, normalize)

    def tokens(
        self, names: tuple[str, str], width: int, count: int, below: tuple[int, str], padding: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the codes and residuals of `count` tokens.

        `below` is an upper bound of the codes and its name. Up to `padding` rows may follow the tokens.
        """
        arrays = []
        for name, dtypes, row in zip(names, (_CODES, (torch.uint8,)), ((), (width,)), strict=True):
            file, x = self._tensor(name, dtypes)
            if tuple(x.shape[1:]) != row or not count <= len(x) <= count + padding:
                expected = f"[{count}{f' to {count + padding}' if padding else ''}{''.join(f', {n}' for n in row)}]"
                raise _make_error(file, f"{expected}, as the other files say", list(x.shape))
            arrays.append((file, x))
        (file, codes), (residuals_file, residuals) = arrays
        if len(codes) != len(residuals):
            raise _make_error(residuals_file, f"{len(codes)} rows as {file.name}", len(residuals))
        codes, residuals = codes[:count], residuals[:count]
        if count and not 0 <= int(codes.min()) <= int(codes.max()) < below[0]:
            raise _make_error(file, f"codes of {below[0]} {below[1]}", f"{int(codes.min())} to {int(codes.max())}")
        return codes.to(torch.int32), residuals

    def _tensor(self, name: str, dtypes: tuple[torch.dtype, ...]) -> tuple[Path, Tensor]:
        """Return a file and its tensor."""
        file = self.root / name
        x = _read_torch(file) if file.suffix == ".pt" else _read_numpy(file)
        if not _has_rows(x, dtypes):
            kind = f"{x.dtype}, {x.layout} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise _make_error(file, " or ".join(map(str, dtypes)), kind)
        return file, x.detach()


def _has_rows(x: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Return whether `x` is a dense tensor in CPU memory with at least one axis and one of these dtypes."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
        return False
    return x.dtype in dtypes and x.device.type == "cpu" and x.dim() > 0


def _read_numpy(file: Path) -> Tensor:
    """Return the array in a ``.npy`` file. Memory is bounded by the size of the file."""
    np = import_extra(_OP, "retrieval", "numpy")
    if not file.exists():
        raise FileNotFoundError(f"{_OP}: {file}: no such file")
    try:
        x = np.load(file, mmap_mode="r", allow_pickle=False)
        if not isinstance(x, np.ndarray) or x.ndim == 0:
            raise ValueError("not an array with rows")
        return torch.from_numpy(np.array(x, dtype=x.dtype.newbyteorder("="), order="C"))
    except Exception as error:  # numpy may raise any error on a damaged file
        raise ValueError(f"{_OP}: {file}: not a whole .npy file: {error}") from error


def _read_torch(file: Path) -> Any:
    """Return the tensors that `torch.save` wrote. Other objects are rejected."""
    if not file.exists():
        raise FileNotFoundError(f"{_OP}: {file}: no such file")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch may raise any error on a damaged file
        raise ValueError(f"{_OP}: {file}: not a whole file of tensors: {error}") from error


def _read_json(file: Path) -> Any:
    """Return the content of a JSON file."""
    if not file.exists():
        raise FileNotFoundError(f"{_OP}: {file}: no such file")
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_OP}: {file}: not JSON: {error}") from error


def _read_count(file: Path, content: dict[str, Any], name: str) -> int:
    """Return the field `name` of a JSON object, which must be a count below 2^31."""
    value = content.get(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise _make_error(file, f"{name}, a count", value)
    return value


def _make_error(file: Path, expected: str, actual: Any) -> ValueError:
    """Return a ValueError that names the file, the expected content and the actual content."""
    return ValueError(f"{_OP}: {file}: expected {expected}, got {actual}")
