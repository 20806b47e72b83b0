"""`Index`: packed documents with their bounds, accepted by scoring functions in place of a list of documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.arguments import check_cu_seqlens, describe_type
from .quantized import Quantized


@dataclass(frozen=True, eq=False, repr=False)
class Index:
    """Packed documents of different lengths in a format, accepted by `maxsim` and `retrieve` as D.

    `read_index` returns one.

    Args:
        documents: packed ``[Td, d]``, residual codes or another format.
        cu_seqlens: ``[Nd + 1]``, int32 or int64, on the device of `documents`. Document k has the tokens from
            ``cu_seqlens[k]`` to ``cu_seqlens[k + 1]``.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a shape or device is wrong.

    Example:
        >>> D, cu_seqlens = lik_ops.pack([torch.randn(n, 128) for n in (300, 12, 80)])
        >>> index = lik_ops.Index(lik_ops.quantize(D, "int8", cu_seqlens_d=cu_seqlens), cu_seqlens)
        >>> len(index), lik_ops.maxsim(torch.randn(2, 32, 128), index).shape
        (3, torch.Size([2, 3]))
    """

    documents: Quantized
    cu_seqlens: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.documents, Quantized):
            raise TypeError(f"Index: documents: expected a Quantized, got {describe_type(self.documents)}")
        if self.documents.dim() != 2:
            raise ValueError(f"Index: documents: expected packed [Td, d], got {list(self.documents.shape)}")
        check_cu_seqlens("Index", "cu_seqlens", self.cu_seqlens, self.documents.device, "[Nd + 1]", "documents")

    def __len__(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def __repr__(self) -> str:
        return f"Index({len(self)} documents, {self.documents!r})"

    @property
    def device(self) -> torch.device:
        """Return the device of all tensors."""
        return self.documents.device

    @property
    def nbytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return self.documents.nbytes + self.cu_seqlens.nbytes

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Index:
        """Copy the index to another device.

        Args:
            device: the target device.
            non_blocking: see ``torch.Tensor.to``.

        Returns:
            An `Index` on `device`.
        """
        return Index(self.documents.to(device, non_blocking), self.cu_seqlens.to(device, non_blocking=non_blocking))

    def decode(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Dequantize all tokens.

        Args:
            dtype: dtype of the result; None for the dtype of the tokens before quantization.

        Returns:
            Packed tokens ``[Td, d]``, and `cu_seqlens`.
        """
        return self.documents.dequantize(dtype), self.cu_seqlens
