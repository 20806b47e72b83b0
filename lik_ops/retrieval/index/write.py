"""`write_index`: documents of residual codes as files that fast-plaid 1.7 reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from ...core.arguments import describe_type, format_shape
from ...core.disk import add_path_to_errors
from ...core.extras import import_extra
from ...formats.index import Index
from ...formats.residual import ResidualCodec, reverse_bits
from ...formats.table import lookup_bucket_weights, unpack_slots

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

_OP = "write_index"
_MAX_SAMPLED_TOKENS = 50_000  # approximate number of tokens that averages are computed from
_HEADER_BYTES = 192  # bytes of the headers of merged files, for any number of rows


def write_index(path: str | os.PathLike[str], index: Index) -> None:
    """Write documents of residual codes as a directory of fast-plaid 1.7.

    The function needs numpy. It writes centroids in fp16, buckets in fp32, and everything in one chunk.
    ``metadata.json`` is written last, so a directory without it is incomplete. The scales are not written, so tokens
    that only their scale marks as zeros or NaN are lost.

    Args:
        path: a directory that is empty or does not exist yet.
        index: documents of residual codes on any device. The codec must normalize and have cutoffs.

    Raises:
        OSError: an error of the disk, with the path of the file.
        TypeError: `index` is not an `Index`, or has another format.
        ValueError: the codec has no cutoffs or does not normalize, the bounds do not cover the tokens, or the directory
            is not empty.

    Example:
        >>> import tempfile
        >>> tokens = torch.nn.functional.normalize(torch.randn(100, 64), dim=-1)
        >>> codes = lik_ops.quantize(tokens, lik_ops.ResidualCodec.train(tokens))
        >>> with tempfile.TemporaryDirectory() as path:
        ...     lik_ops.write_index(path, lik_ops.Index(codes, torch.tensor([0, 60, 100])))
    """
    codec, lengths, codes = _check_index(index)
    import_extra(_OP, "retrieval", "numpy")
    root = Path(path)
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise ValueError(f"{_OP}: path: expected an empty directory, got {root}")
    bits = _convert_to_plaid(codec, index.documents.data.cpu())
    total, padding = len(codes), int(lengths.max() - lengths[-1]) if len(lengths) else 0
    _save(root / "centroids.npy", codec.centroids.half())
    assert codec.cutoffs is not None
    _save(root / "bucket_cutoffs.npy", codec.cutoffs)
    _save(root / "bucket_weights.npy", codec.weights)
    sizes, quantile = _measure_residuals(codec, index.documents.data)
    _save(root / "avg_residual.npy", sizes)
    _save(root / "cluster_threshold.npy", quantile)
    for name, kind, x in (("codes", "<i8", codes.long()), ("residuals", "|u1", bits)):
        _save_merged(root / f"merged_{name}.npy", kind, x, padding)
        manifest = {f"0.{name}.npy": {"rows": total, "merged": True, "mtime": None}}
        _write(root / f"merged_{name}.manifest.json", manifest)
    documents, counts = _invert_codes(codes, lengths, len(codec.centroids))
    _save(root / "ivf.npy", documents)
    _save(root / "ivf_lengths.npy", counts)
    _write(root / "doclens.0.json", lengths.tolist())
    chunk = {"embedding_offset": 0, "num_documents": len(lengths), "num_embeddings": total}
    _write(root / "0.metadata.json", chunk)
    _write(root / "plan.json", {"nbits": codec.nbits, "num_chunks": 1})
    metadata: dict[str, Any] = {
        "avg_doclen": total / max(len(lengths), 1),
        "compress_only": False,
        "nbits": codec.nbits,
    }
    metadata |= {"num_chunks": 1, "num_documents": len(lengths), "num_embeddings": total}
    _write(root / "metadata.json", metadata | {"num_partitions": len(codec.centroids), "frozen": True, "mutable": True})


def _check_index(index: Any) -> tuple[ResidualCodec, Tensor, Tensor]:
    """Return the codec, lengths and codes on the CPU, after checking the index."""
    if not isinstance(index, Index):
        raise TypeError(f"{_OP}: index: expected an Index, got {describe_type(index)}")
    documents = index.documents
    if documents.codec is None or documents.codes is None:
        raise TypeError(f"{_OP}: index: expected documents of residual codes, got {documents.format}")
    codec, lengths = documents.codec.to("cpu"), index.cu_seqlens.cpu().long().diff()
    if codec.cutoffs is None or not codec.normalize:
        raise ValueError(f"{_OP}: index: expected a codec with cutoffs that normalizes, got {codec}")
    if bool((lengths < 0).any()) or int(index.cu_seqlens[0]) != 0 or int(lengths.sum()) != len(documents):
        raise ValueError(
            f"{_OP}: index: expected ascending cu_seqlens from 0 to {len(documents)}, got"
            f" {format_shape(index.cu_seqlens)} from {int(index.cu_seqlens[0])} to {int(index.cu_seqlens[-1])}"
        )
    codes = documents.codes.cpu()
    if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < len(codec.centroids):
        raise ValueError(f"{_OP}: index: expected codes of {len(codec.centroids)} centroids, got codes out of range")
    return codec, lengths, codes


def _convert_to_plaid(codec: ResidualCodec, data: Tensor) -> Tensor:
    """Return residuals in the bit order of fast-plaid. Only the bit order ``"big"`` needs a conversion."""
    if codec.bit_order != "big":
        return data
    reverse = reverse_bits(unpack_slots(torch.arange(256, device="cpu"), codec.nbits), codec.nbits)
    table = (reverse << torch.arange(8 - codec.nbits, -1, -codec.nbits, device="cpu")).sum(-1).to(torch.uint8)
    return table[data.int()]


def _measure_residuals(codec: ResidualCodec, data: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean absolute residual of each feature and the 0.75 quantile of the norms, for some tokens."""
    sample = data[:: max(1, len(data) // _MAX_SAMPLED_TOKENS)].cpu()
    if not len(sample):
        return sample.new_zeros(codec.d, dtype=torch.float32), sample.new_zeros(1, dtype=torch.float32)
    x = lookup_bucket_weights(sample, codec.table, codec.nbits)[:, : codec.d]
    return x.abs().mean(0), torch.linalg.vector_norm(x, dim=1).quantile(0.75).view(1)


def _invert_codes(codes: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ascending documents of each centroid, concatenated by centroid, and the number for each centroid."""
    documents = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    pairs = (codes.long() * max(len(lengths), 1) + documents).unique()
    owners = pairs // max(len(lengths), 1)
    return pairs % max(len(lengths), 1), torch.bincount(owners, minlength=count).int()


def _save(file: Path, x: Tensor) -> None:
    """Write a tensor as a ``.npy`` file."""
    npy = import_extra(_OP, "retrieval", "numpy.lib.format")

    def write(out: BinaryIO) -> None:
        array = _as_contiguous(x)
        npy.write_array_header_1_0(out, npy.header_data_from_array_1_0(array))
        out.write(array.data)

    _create(file, write)


def _save_merged(file: Path, kind: str, x: Tensor, padding: int) -> None:
    """Write an array with a header of fixed size, followed by `padding` rows of zeros."""
    rows = len(x) + padding
    shape = f"({rows},)" if x.dim() == 1 else f"({rows}, {x.shape[1]})"
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(_HEADER_BYTES - 11) + "\n"

    def write(out: BinaryIO) -> None:
        out.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin1"))
        out.write(_as_contiguous(x).data)
        out.write(bytes(padding * x[:1].nbytes if len(x) else 0))

    _create(file, write)


def _write(file: Path, content: Any) -> None:
    """Write a JSON file."""
    _create(file, lambda out: out.write(json.dumps(content).encode()))


def _as_contiguous(x: Tensor) -> Any:
    """Return a contiguous array of the values in `x`. The negative bit is resolved, because an array cannot have it."""
    return x.detach().resolve_neg().contiguous().numpy()


def _create(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a new file. An existing file or link of that name is an error. Errors of the disk name the file."""
    with add_path_to_errors(file), open(file, "xb") as out:
        write(out)
