"""`read_index`: documents of residual codes from the files of fast-plaid, next-plaid, ColBERTv2 and WARP.

All keep `centroids`, and cutoffs and weights of buckets. The first three keep the length of each document by chunk
(``doclens.N.json``), and codes and residuals, by chunk (``N.codes``, ``N.residuals``) or, as fast-plaid since 1.7, of
all chunks in one file whose last rows are padding. fast-plaid and next-plaid write ``.npy`` files, ColBERT ``.pt``.
WARP keeps tokens centroid by centroid: ``sizes.compacted`` says how many each has, ``codes.compacted`` the document of
each token, ``residuals.repacked.compacted`` its buckets. Nothing that a file says is believed: whatever does not fit
the rest is an error that names it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...core.arguments import DTYPES, as_device
from ...core.extras import import_extra
from ...formats.index import Index
from ...formats.quantized import Quantized
from ...formats.residual import BitOrder, ResidualCodec

if TYPE_CHECKING:
    import os

_OP = "read_index"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_CODES = (torch.int32, torch.int64)
_NBITS = (1, 2, 4, 8)
_REPACKED = "residuals.repacked.compacted.pt"  # WARP's alone


def read_index(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Index:
    """Documents of an index that fast-plaid, next-plaid, ColBERTv2 or WARP wrote; the files say which.

    Their tokens count as the library that wrote them decodes them, to rounding. WARP does not normalise them, and has
    those of a document in the order of their centroids. Files are read as data alone: pickled objects other than
    tensors are refused. ``.npy`` files need numpy.

    Args:
        path: the directory.
        device: where the documents shall be.

    Returns:
        An `Index`: ``lik_ops.maxsim(Q, index)``, ``lik_ops.retrieve(Q, index, top_k)``, ``index.decode()``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or its sizes do not fit the others; the message names it.

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
    with torch.device("cpu"):  # whatever the default device is
        found = _read_by_centroid(files) if (files.root / _REPACKED).exists() else _read_by_document(files)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), found.lengths]).cumsum(0)
    documents = Quantized.of_codes(found.codes.to(device), found.residuals.to(device), found.codec.to(device))
    return Index(documents, bounds.to(device))


class _IndexDocuments(NamedTuple):
    """Packed documents on the CPU."""

    codec: ResidualCodec
    codes: Tensor
    residuals: Tensor
    lengths: Tensor


def _read_by_document(files: _IndexFiles) -> _IndexDocuments:
    """An index whose tokens come document by document."""
    nbits, lengths = files.about()
    codec, total, kind = files.codec(nbits), [int(x.sum()) for x in lengths], files.suffix
    below = len(codec.centroids), "centroids"
    if (files.root / f"merged_codes{kind}").exists():
        longest = max((int(x.max()) for x in lengths if len(x)), default=0)
        names = f"merged_codes{kind}", f"merged_residuals{kind}"
        parts = [files.tokens(names, codec.width, sum(total), below, longest)]
    else:
        names_of = [(f"{n}.codes{kind}", f"{n}.residuals{kind}") for n in range(len(total))]
        parts = [files.tokens(x, codec.width, n, below) for x, n in zip(names_of, total, strict=True)]
    none = torch.empty(0, dtype=torch.int32), torch.empty((0, codec.width), dtype=torch.uint8)
    codes, residuals = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*(parts or [none]), strict=True))
    return _IndexDocuments(codec, codes, residuals, _join_chunks(lengths))


def _read_by_centroid(files: _IndexFiles) -> _IndexDocuments:
    """An index of WARP, whose tokens come centroid by centroid; beside the one that it was made of, or alone."""
    known = None
    if files.metadata.exists():
        nbits, chunks = files.about()
        known = _join_chunks(chunks)
    else:
        nbits = files.nbits()
    codec = files.codec(nbits, "big", normalize=False)
    sizes = files.sizes(len(codec.centroids))
    total = int(sizes.sum())
    # Without lengths, no number of a document is believed that would have most of them empty.
    below = total if known is None else len(known), "documents"
    numbers, residuals = files.tokens(("codes.compacted.pt", _REPACKED), codec.width, total, below)
    lengths = torch.bincount(numbers, minlength=0 if known is None else len(known))
    if known is not None and not torch.equal(lengths, known):
        raise _make_error(files.root / "codes.compacted.pt", "tokens of each document as doclens say", "others")
    order = numbers.argsort(stable=True)
    codes = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(sizes)
    return _IndexDocuments(codec, codes[order], residuals[order], lengths)


def _join_chunks(chunks: list[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *chunks])


class _IndexFiles:
    """The files of an index, and of which kind they are."""

    def __init__(self, root: Path) -> None:
        self.root, self.metadata = root, root / "metadata.json"
        self.suffix = ".npy" if (root / "centroids.npy").exists() else ".pt"
        if not (root / f"centroids{self.suffix}").exists():
            raise FileNotFoundError(f"{_OP}: path: expected a directory with centroids.npy or centroids.pt, got {root}")

    def about(self) -> tuple[int, list[Tensor]]:
        """Bits of a bucket, and the lengths of documents, by chunk."""
        about = _read_json(self.metadata)
        if not isinstance(about, dict):
            raise _make_error(self.metadata, "an object", type(about).__name__)
        of = about.get("config", about)  # ColBERT's has its settings apart
        nbits = _read_count(self.metadata, of if isinstance(of, dict) else {}, "nbits")
        if nbits not in _NBITS:
            raise _make_error(self.metadata, "nbits of 1, 2, 4 or 8", nbits)
        lengths = [self.lengths(n) for n in range(_read_count(self.metadata, about, "num_chunks"))]
        total = sum(int(x.sum()) for x in lengths)
        for name, found in (("num_embeddings", total), ("num_documents", sum(map(len, lengths)))):
            if name in about and about[name] != found:
                raise _make_error(self.metadata, f"{name} {found}, as doclens say", about[name])
        return nbits, lengths

    def nbits(self) -> int:
        """Bits of a bucket, as weights say."""
        file, weights = self._tensor(f"bucket_weights{self.suffix}", _FLOATS)
        nbits = weights.numel().bit_length() - 1
        if nbits not in _NBITS or weights.shape != (2**nbits,):
            raise _make_error(file, "2, 4, 16 or 256 weights", list(weights.shape))
        return nbits

    def lengths(self, chunk: int) -> Tensor:
        """Of the documents of a chunk."""
        file = self.root / f"doclens.{chunk}.json"
        found = _read_json(file)
        if not isinstance(found, list) or not all(type(n) is int and 0 <= n < 2**31 for n in found):
            raise _make_error(file, "a list of lengths", "something else")
        return torch.tensor(found, dtype=torch.int64)

    def sizes(self, count: int) -> Tensor:
        """Tokens of each of so many centroids, whose sum fits 64 bits."""
        file, sizes = self._tensor("sizes.compacted.pt", _CODES)
        if sizes.shape != (count,):
            raise _make_error(file, f"[{count}], as centroids say", list(sizes.shape))
        if count and not 0 <= int(sizes.min()) <= int(sizes.max()) < 2**31:
            raise _make_error(file, "sizes from 0 on", f"{int(sizes.min())} to {int(sizes.max())}")
        return sizes.long()

    def codec(self, nbits: int, bit_order: BitOrder = "plaid", normalize: bool = True) -> ResidualCodec:
        file, centroids = self._tensor(f"centroids{self.suffix}", _FLOATS)
        if centroids.dim() != 2 or centroids.shape[1] < 1:
            raise _make_error(file, "[C, d]", list(centroids.shape))
        pair: list[Tensor] = []
        if self.suffix == ".pt":
            file = self.root / "buckets.pt"
            found = _read_torch(file)
            pair = list(found) if isinstance(found, (tuple, list)) else []
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
        """Codes `below` a number of what they are of, and residuals, of so many tokens.

        After these up to `padding` rows may follow.
        """
        found = []
        for name, dtypes, row in zip(names, (_CODES, (torch.uint8,)), ((), (width,)), strict=True):
            file, x = self._tensor(name, dtypes, count)
            if tuple(x.shape[1:]) != row or not count <= self.rows <= count + padding:
                expected = f"[{count}{f' to {count + padding}' if padding else ''}{''.join(f', {n}' for n in row)}]"
                raise _make_error(file, f"{expected}, as the other files say", [self.rows, *x.shape[1:]])
            found.append((file, x, self.rows))
        (file, codes, rows), (other, residuals, others) = found
        if rows != others:
            raise _make_error(other, f"{rows} rows as {file.name}", others)
        if count and not 0 <= int(codes.min()) <= int(codes.max()) < below[0]:
            raise _make_error(file, f"codes of {below[0]} {below[1]}", f"{int(codes.min())} to {int(codes.max())}")
        return codes.to(torch.int32), residuals

    def _tensor(self, name: str, dtypes: tuple[torch.dtype, ...], most: int | None = None) -> tuple[Path, Tensor]:
        """A tensor, of which the first `most` rows are read; `rows` says how many there are."""
        file = self.root / name
        x, rows = (_read_torch(file), None) if file.suffix == ".pt" else _read_numpy(file, most)
        if not _has_rows(x, dtypes):
            kind = f"{x.dtype}, {x.layout} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise _make_error(file, " or ".join(map(str, dtypes)), kind)
        self.rows = len(x) if rows is None else rows
        return file, x.detach()[:most]


def _has_rows(x: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether it is a tensor of rows in memory, of one of these dtypes."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
        return False
    return x.dtype in dtypes and x.device.type == "cpu" and x.dim() > 0


def _read_numpy(file: Path, most: int | None) -> tuple[Tensor, int]:
    """The first rows of an array, and how many it has. No more memory is taken than the file is long."""
    np = import_extra(_OP, "retrieval", "numpy")
    if not file.exists():
        raise FileNotFoundError(f"{_OP}: {file}: no such file")
    try:
        x = np.load(file, mmap_mode="r", allow_pickle=False)
        if not isinstance(x, np.ndarray) or x.ndim == 0:
            raise ValueError("not an array with rows")
        return torch.from_numpy(np.array(x[:most], dtype=x.dtype.newbyteorder("="), order="C")), len(x)
    except Exception as error:  # numpy parses what it finds, and whatever that raises says the same
        raise ValueError(f"{_OP}: {file}: not a whole .npy file: {error}") from error


def _read_torch(file: Path) -> Any:
    """What `torch.save` wrote, if it is of tensors."""
    if not file.exists():
        raise FileNotFoundError(f"{_OP}: {file}: no such file")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch runs what it finds, and whatever that raises says the same
        raise ValueError(f"{_OP}: {file}: not a whole file of tensors: {error}") from error


def _read_json(file: Path) -> Any:
    if not file.exists():
        raise FileNotFoundError(f"{_OP}: {file}: no such file")
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_OP}: {file}: not JSON: {error}") from error


def _read_count(file: Path, content: dict[str, Any], name: str) -> int:
    value = content.get(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise _make_error(file, f"{name}, a count", value)
    return value


def _make_error(file: Path, expected: str, found: Any) -> ValueError:
    return ValueError(f"{_OP}: {file}: expected {expected}, got {found}")
