"""`quantize`: encode tokens in a format of `formats.table` or with a residual codec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..core.arguments import (
    LOOKS_LIKE_LENGTHS,
    check_choice,
    check_cu_seqlens,
    check_floats,
    check_mask,
    check_no_dtensor,
    format_shape,
)
from .quantized import Quantized
from .residual import ResidualCodec
from .rotation import rotate
from .table import (
    ALL_FORMATS,
    FORMATS,
    FormatName,
    Query,
    compute_extremes,
    compute_scales,
    encode_tokens,
    list_queries,
    select_rows,
    split_rows,
)

Scale: TypeAlias = Literal["token", "document", "tensor"]


def quantize(
    D: Tensor,
    format: FormatName | ResidualCodec = "int8",
    scale: Scale = "token",
    *,
    d_mask: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    query: Query = "half",
) -> Quantized:
    """Quantize document tokens and measure the quantization error of each document.

    Args:
        D: ``[Ld, d]``, ``[Nd, Ld, d]``, ``[Nq, K, Ld, d]``, or packed ``[Td, d]`` with `cu_seqlens_d`; fp16, bf16, fp32
            or fp64.
        format: ``"int8"`` (symmetric, -127 to 127), ``"uint8"`` (affine, with a minimum and a scale), ``"fp8_e4m3"``,
            ``"fp8_e5m2"``, or ``"binary"`` (signs, for a first stage). ``"rq4"``, ``"rq2"`` and ``"rq1"`` store 4, 2
            and 1 bits of each feature of rotated tokens. A `ResidualCodec` on the device of D is also accepted.
        scale: one scale for each ``"token"``, for each ``"document"``, or for the whole ``"tensor"``. Residual codes
            always have one scale for each token.
        d_mask: tokens to keep, the shape of D without d. Masked tokens are encoded as zeros, whatever values they hold.
        cu_seqlens_d: int32 or int64 ``[Nd + 1]``. Packed document k has the tokens from ``cu_seqlens_d[k]`` to
            ``cu_seqlens_d[k + 1]``.
        query: precision of query rows in products with ``"int8"``, ``"binary"`` or ``"fp8_e4m3"`` documents, see
            `Quantized`.

    Returns:
        A `Quantized`. A token of zeros dequantizes to zeros, with a shared scale only in ``"int8"`` and FP8. All
        features of a token with NaN or infinity become NaN. If a document or tensor shares one scale, so do the other
        tokens that share this scale.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size, device or option is wrong.

    Example:
        >>> D = lik_ops.quantize(torch.randn(1000, 300, 128), "int8")
        >>> D.nbytes < 1000 * 300 * 133
        True
        >>> lik_ops.maxsim(torch.randn(2, 32, 128), D).shape
        torch.Size([2, 1000])
    """
    op = "quantize"
    check_no_dtensor(op, D=D)
    _check_quantize_args(op, D, format, scale, d_mask, cu_seqlens_d)
    check_choice(op, "query", query, list_queries(format))
    rows, bounds = D.detach().flatten(0, -2), None if cu_seqlens_d is None else DocumentBounds(cu_seqlens_d, D.shape[0])
    keep = None if d_mask is None else (d_mask != 0).flatten()
    if isinstance(format, ResidualCodec):
        return _add_errors(_encode_residual(rows, keep, D.shape, format, D.dtype), rows, keep, bounds)
    shape, spec = D.shape[:-1], FORMATS[format]
    low, high = (torch.empty(len(rows), dtype=torch.float32, device=D.device) for _ in range(2))
    for part in split_rows(len(rows), D.shape[-1]):
        low[part], high[part] = compute_extremes(_load_rows(rows, keep, part, spec.rotated), format)

    def reduce_shared(x: Tensor, reduce: str) -> Tensor:
        """Reduce `x` over the tokens that share a scale, and return it in the shape of the scales."""
        if scale == "token":
            return x.view(shape)
        if scale == "tensor":
            return (getattr(x, reduce)(0) if x.numel() else x.new_zeros(())).view((1,) * len(shape))
        out = _reduce_documents(x, shape, bounds, reduce)
        return out.unsqueeze(-1) if bounds is None else out[bounds.owner]

    low, high = reduce_shared(low, "amin"), reduce_shared(high, "amax")
    scales = compute_scales(low, high, format)
    minimum = low if spec.affine else None
    data = torch.empty((len(rows), -(-D.shape[-1] // spec.features_per_element)), dtype=spec.dtype, device=D.device)
    documents = Quantized(data.view(*shape, data.shape[1]), scales, format, D.shape[-1], D.dtype, minimum, query=query)
    _, per_token, shift, *_ = documents.to_flat_encoded()
    for part in split_rows(len(rows), D.shape[-1]):
        x = _load_rows(rows, keep, part, spec.rotated)
        data[part] = encode_tokens(x, select_rows(per_token, part), select_rows(shift, part), format)
    return _add_errors(documents, rows, keep, bounds)


def _encode_residual(
    rows: Tensor, keep: Tensor | None, shape: torch.Size, codec: ResidualCodec, dtype: torch.dtype
) -> Quantized:
    """Encode tokens with a codec.

    A scale of 0 keeps a token of zeros at zeros. A NaN scale marks a token that is not finite.
    """
    codes = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
    residuals = torch.empty((len(rows), codec.width), dtype=torch.uint8, device=rows.device)
    scale = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    for part in split_rows(len(rows), codec.d):
        x = _load_rows(rows, keep, part)
        codes[part], residuals[part] = codec.encode(x)
        scale[part] = codec.scales(codes[part], residuals[part]).masked_fill((x == 0).all(-1), 0)
        scale[part] = scale[part].masked_fill(~x.isfinite().all(-1), torch.nan)
    data = codec.to_table_bit_order(residuals).view(*shape[:-1], codec.width)
    scale, codes = scale.view(shape[:-1]), codes.view(shape[:-1])
    return Quantized(data, scale, codec.format, codec.d, dtype, codes=codes, codec=codec)


def _add_errors(documents: Quantized, rows: Tensor, keep: Tensor | None, bounds: DocumentBounds | None) -> Quantized:
    """Return `documents` with the largest error and the largest norm of a token, for each document."""
    tokens, shape = documents.to_flat_encoded(), documents.shape[:-1]
    error, norm = (torch.empty(len(rows), dtype=torch.float32, device=rows.device) for _ in range(2))
    for part in split_rows(len(rows), documents.d):
        x = _load_rows(rows, keep, part).double()
        x = rotate(x) if ALL_FORMATS[documents.format].rotated else x
        delta = x - tokens.decode(part, documents.d).double()
        error[part], norm[part] = (_round_up(torch.linalg.vector_norm(y, dim=-1)) for y in (delta, x))
    error, norm = (_reduce_documents(x, shape, bounds, "amax") for x in (error, norm))
    return replace(documents, error=error, norm=norm)


def _reduce_documents(x: Tensor, shape: torch.Size, bounds: DocumentBounds | None, reduce: str) -> Tensor:
    """Return the ``"amax"`` or ``"amin"`` of the tokens ``x`` of each document, 0 for a document without tokens."""
    if bounds is not None:
        return bounds.reduce_tokens(x, reduce)
    out: Tensor = getattr(x.view(shape), reduce)(-1) if shape[-1] else x.new_zeros(shape[:-1])
    return out


def _load_rows(rows: Tensor, keep: Tensor | None, part: slice, rotated: bool = False) -> Tensor:
    """Return some tokens in fp32 (fp64 for fp64), rotated if `rotated`, with masked tokens set to zeros."""
    x = rows[part].to(torch.promote_types(rows.dtype, torch.float32))
    x = x if keep is None else torch.where(keep[part].unsqueeze(-1), x, 0)
    return rotate(x) if rotated else x


def _round_up(x: Tensor) -> Tensor:
    """Round fp64 to the next fp32 that is not smaller."""
    return torch.nextafter(x.float(), x.new_tensor(torch.inf).float()).where(x > 0, x.float())


class DocumentBounds:
    """The documents that packed tokens belong to."""

    def __init__(self, cu_seqlens: Tensor, tokens: int) -> None:
        ends, token_indices = cu_seqlens[1:].long(), torch.arange(tokens, device=cu_seqlens.device)
        self.count = len(ends)
        # The document of each token. Tokens outside all documents get an arbitrary one.
        self.owner = torch.searchsorted(ends, token_indices, right=True).clamp_(max=self.count - 1)

    def reduce_tokens(self, x: Tensor, reduce: str) -> Tensor:
        """Return the ``"amax"`` or ``"amin"`` of ``x [Td]`` over each document, 0 for a document without tokens."""
        out = x.new_zeros(self.count)
        return out.scatter_reduce_(0, self.owner, x, reduce, include_self=False)


def _check_quantize_args(op: str, D: Any, format: Any, scale: Any, d_mask: Any, cu_seqlens_d: Any) -> None:
    check_floats(op, "D", D)
    if isinstance(format, ResidualCodec):
        check_choice(op, "scale", scale, ("token",))
        if D.dim() < 2 or (D.shape[-1], D.device) != (format.d, format.centroids.device):
            expected = f"[..., {format.d}] on {format.centroids.device}"
            raise ValueError(f"{op}: D: expected {expected} like the codec, got {format_shape(D)} on {D.device}")
    else:
        check_choice(op, "format", format, tuple(FORMATS))
        check_choice(op, "scale", scale, get_args(Scale))
    shapes = "[Td, d]" if cu_seqlens_d is not None else "[Ld, d], [Nd, Ld, d] or [Nq, K, Ld, d]"
    if D.dim() not in ((2,) if cu_seqlens_d is not None else (2, 3, 4)) or D.shape[-1] < 1:
        raise ValueError(f"{op}: D: expected {shapes}, got {format_shape(D)}")
    check_mask(op, "d_mask", d_mask, "D", D)
    if cu_seqlens_d is not None:
        check_cu_seqlens(op, "cu_seqlens_d", cu_seqlens_d, D.device, "[Nd + 1]", "D")
        ends = cu_seqlens_d[0] == 0, cu_seqlens_d[-1] == len(D)
        if not (all(ends) and bool((cu_seqlens_d.diff() >= 0).all())):
            first, last = int(cu_seqlens_d[0]), int(cu_seqlens_d[-1])
            actual = f"{first} to {last}: {LOOKS_LIKE_LENGTHS}" if not all(ends) else "descending bounds"
            raise ValueError(f"{op}: cu_seqlens_d: expected ascending bounds from 0 to {len(D)}, got {actual}")
