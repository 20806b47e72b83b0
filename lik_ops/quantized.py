"""`quantize`, and `Quantized`: documents in a format of `formats`, which scoring functions take in place of D."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from .arguments import (
    DTYPES,
    check_choice,
    check_count,
    check_cu_seqlens,
    check_mask,
    check_strided,
    check_tensor,
    kind_of,
    shape_of,
)
from .formats import FORMATS, FormatName, decoded, encoded, extremes, part_of, scales_of

if TYPE_CHECKING:
    import os

Scale: TypeAlias = Literal["token", "document", "tensor"]
_ROWS_BYTES = 32 << 20  # of tokens in fp32 that are quantised or decoded at a time


@dataclass(frozen=True, eq=False, repr=False)
class Quantized:
    """Documents as `quantize` makes them: what scoring functions and `retrieve` take in place of D.

    Indexing takes documents, along the first axis. ``torch.save``, pickle and ``copy`` take it as it is; `save` and
    `load` use safetensors.

    Args:
        data: ``[Ld, d]``, ``[Nd, Ld, d]``, ``[Nq, K, Ld, d]`` or packed ``[Td, d]``, of the dtype of the format;
            of ``"binary"`` ``[..., ceil(d / 8)]``, feature k in bit ``k % 8`` of byte ``k // 8``, set where it is > 0.
        scale: fp32, of the shape of `data` without its last axis, or with sizes of 1 where it is one for all.
        format: ``"int8"``, ``"uint8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"`` or ``"binary"``.
        d: features of a token.
        dtype: of the tokens as they were.
        minimum: of ``"uint8"`` what is added to each feature, like `scale`; else None.
        error: how far the furthest token of each document is off, in the L2 norm, rounded up: fp32 ``[Nd]``,
            ``[Nq, K]`` or ``[]``; None where it is not known. Two-stage `retrieve` needs it.
        norm: the largest L2 norm of a token of each document as it was, rounded up, likewise.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a shape or device is wrong.

    Example:
        >>> data = torch.randint(0, 256, (5, 300, 128), dtype=torch.uint8)  # as another library quantised them
        >>> scale, minimum = torch.rand(5, 300) / 100, -torch.rand(5, 300)
        >>> D = lik_ops.Quantized(data, scale, "uint8", 128, torch.float16, minimum=minimum)
        >>> lik_ops.maxsim(torch.randn(2, 32, 128), D).shape
        torch.Size([2, 5])
    """

    data: Tensor
    scale: Tensor
    format: FormatName
    d: int
    dtype: torch.dtype
    minimum: Tensor | None = None
    error: Tensor | None = None
    norm: Tensor | None = None

    def __post_init__(self) -> None:
        op = "Quantized"
        check_choice(op, "format", self.format, get_args(FormatName))
        kept = FORMATS[self.format]
        check_tensor(op, "data", self.data)
        check_strided(op, "data", self.data)
        if self.data.dtype != kept.dtype:
            raise TypeError(f"{op}: data: expected {kept.dtype} for {self.format}, got {self.data.dtype}")
        check_count(op, "d", self.d, 1)
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPES:
            found = self.dtype if isinstance(self.dtype, torch.dtype) else kind_of(self.dtype)
            raise TypeError(f"{op}: dtype: expected float16, bfloat16, float32 or float64, got {found}")
        if self.data.dim() not in (2, 3, 4) or self.data.shape[-1] != -(-self.d // kept.each):
            raise ValueError(f"{op}: data: expected [..., L, {-(-self.d // kept.each)}], got {shape_of(self.data)}")
        tokens = self.data.shape[:-1]
        if self.minimum is not None and self.format != "uint8":
            raise TypeError(f"{op}: minimum: expected None for {self.format}, got {kind_of(self.minimum)}")
        for name, required in (("scale", True), ("minimum", self.format == "uint8")):
            x = getattr(self, name)
            fits = _has_sizes(x, tokens)
            self._check(name, x, required, fits, f"{list(tokens)}, or 1 for any size,")
        of_packed, documents = len(tokens) == 1, tokens[:-1]
        for name in ("error", "norm"):
            x = getattr(self, name)
            fits = isinstance(x, Tensor) and (x.dim() <= 2 if of_packed else x.shape == documents)
            self._check(name, x, False, fits, "[] or [Nd]" if of_packed else f"{list(documents)}")

    def _check(self, name: str, x: Any, required: bool, fits: bool, expected: str) -> None:
        check_tensor("Quantized", name, x, or_none=not required)
        if x is None:
            return
        check_strided("Quantized", name, x)
        if x.dtype != torch.float32:
            raise TypeError(f"Quantized: {name}: expected torch.float32, got {x.dtype}")
        if not fits or x.device != self.data.device:
            raise ValueError(
                f"Quantized: {name}: expected {expected} on the device of data, {self.data.device}, got {shape_of(x)}"
                f" on {x.device}"
            )

    @property
    def shape(self) -> torch.Size:
        """Of the tokens as they were."""
        return torch.Size((*self.data.shape[:-1], self.d))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    def dim(self) -> int:
        return self.data.dim()

    def __len__(self) -> int:
        return self.data.shape[0]

    def __repr__(self) -> str:
        return f"Quantized({list(self.shape)}, format={self.format!r}, device={str(self.device)!r})"

    def __getstate__(self) -> dict[str, Any]:
        """With FP8 as bytes: torch does not read it again from a pickle."""
        return {**self.__dict__, "data": self.data.view(FORMATS[self.format].bytes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, data=state["data"].view(FORMATS[state["format"]].dtype))

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by their names."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in found.items() if isinstance(x, Tensor)}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Quantized:
        """The same on another device."""
        moved: dict[str, Any] = {name: x.to(device, non_blocking=non_blocking) for name, x in self.tensors().items()}
        return replace(self, **moved)

    def __getitem__(self, documents: Any) -> Quantized:
        """Some documents, or of ``[Td, d]`` some tokens, by a slice, a list or a tensor of indices.

        Of tokens `error` and `norm` are not known.
        """
        if isinstance(documents, (tuple, int)) or documents is None or documents is Ellipsis:
            raise TypeError(f"Quantized: index: expected a slice, a list or a tensor, got {type(documents).__name__}")
        found: dict[str, Any] = {"data": self.data[documents]}
        for name in ("scale", "minimum"):
            x = getattr(self, name)
            found[name] = x if x is None or x.shape[0] != len(self) else x[documents]
        for name in ("error", "norm"):
            x = getattr(self, name)
            found[name] = None if x is None or self.dim() == 2 else x[documents]
        return replace(self, **found)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tokens as they count, in `dtype` (None: that they had), rounded once."""
        rows = self.data.flatten(0, -2)
        out = torch.empty((len(rows), self.d), dtype=dtype or self.dtype, device=self.device)
        scale, minimum = self.per_token()
        for part in _parts(len(rows), self.d):
            out[part] = decoded(rows[part], part_of(scale, part), part_of(minimum, part), self.format, self.d)
        return out.view(self.shape)

    def per_token(self) -> tuple[Tensor, Tensor | None]:
        """Scales and minima of all tokens ``[Td]``, ``[1]`` where there is one for all."""
        tokens = self.data.shape[:-1]

        def flat(x: Tensor | None) -> Any:
            if x is None or x.numel() == 1:
                return x if x is None else x.reshape(1)
            return x.expand(tokens).reshape(-1)

        return flat(self.scale), flat(self.minimum)

    def save(self, path: str | os.PathLike) -> None:
        """Write one safetensors file. Needs ``lik-ops[retrieval]``."""
        from safetensors.torch import save_file

        tensors = {name: x.contiguous().cpu() for name, x in self.tensors().items()}
        about = {"format": self.format, "d": str(self.d), "dtype": str(self.dtype).removeprefix("torch.")}
        save_file(tensors, path, {"lik_ops": "1", **about})

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str = "cpu") -> Quantized:
        """What `save` wrote.

        Raises:
            ValueError: the file is of something else.
        """
        from safetensors import safe_open

        with safe_open(path, framework="pt", device=str(device)) as file:
            about = file.metadata() or {}
            dtype = getattr(torch, about.get("dtype", ""), None)
            if about.get("lik_ops") != "1" or about.get("format") not in FORMATS or dtype not in DTYPES:
                raise ValueError(f"Quantized: path: expected a file that Quantized.save wrote, got {path}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return cls(**tensors, format=about["format"], d=int(about["d"]), dtype=dtype)


def quantize(
    D: Tensor,
    format: FormatName = "int8",
    scale: Scale = "token",
    *,
    d_mask: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
) -> Quantized:
    """Document tokens in fewer bytes, with how far they are off.

    Args:
        D: ``[Ld, d]``, ``[Nd, Ld, d]``, ``[Nq, K, Ld, d]``, or packed ``[Td, d]`` with `cu_seqlens_d`; fp16, bf16, fp32
            or fp64.
        format: ``"int8"`` (symmetric, -127 to 127), ``"uint8"`` (affine: a minimum and a scale), ``"fp8_e4m3"``,
            ``"fp8_e5m2"``, or ``"binary"`` (signs, for a first stage).
        scale: one for each ``"token"``, each ``"document"``, or for the whole ``"tensor"``.
        d_mask: tokens to keep, the shape of D without d. What masked tokens hold never matters; they become zeros.
        cu_seqlens_d: int32 or int64 ``[Nd + 1]``, where each packed document begins and the last one ends.

    Returns:
        A `Quantized`. A token of zeros stays one, whatever the format. Of a token with NaN or an infinity all features
        become NaN; with one scale for a document or a tensor, so do its others.

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
    _check(op, D, format, scale, d_mask, cu_seqlens_d)
    rows, bounds = D.detach().flatten(0, -2), None if cu_seqlens_d is None else Bounds(cu_seqlens_d, D.shape[0])
    keep = None if d_mask is None else (d_mask != 0).flatten()
    shape, kept = D.shape[:-1], FORMATS[format]
    low, high = (torch.empty(len(rows), device=D.device) for _ in range(2))
    for part in _parts(len(rows), D.shape[-1]):
        low[part], high[part] = extremes(_widened(rows, keep, part), format)

    def joined(x: Tensor, largest: bool) -> Tensor:
        """Of each token that of what it shares a scale with, in the shape that scales have."""
        reduce = torch.amax if largest else torch.amin
        if scale == "token":
            return x.view(shape)
        if scale == "tensor":
            return reduce(x, 0).view((1,) * len(shape)) if x.numel() else x.new_zeros((1,) * len(shape))
        if bounds is not None:
            return bounds.reduced(x, "amax" if largest else "amin")[bounds.owner]
        return reduce(x.view(shape), -1, keepdim=True) if shape[-1] else x.new_zeros((*shape[:-1], 1))

    low, high = joined(low, False), joined(high, True)
    scales = scales_of(low, high, format)
    minimum = low if format == "uint8" else None
    data = torch.empty((len(rows), -(-D.shape[-1] // kept.each)), dtype=kept.dtype, device=D.device)
    made = Quantized(data.view(*shape, data.shape[1]), scales, format, D.shape[-1], D.dtype, minimum)
    error, norm = (torch.empty(len(rows), device=D.device) for _ in range(2))
    per_token, shift = made.per_token()
    for part in _parts(len(rows), D.shape[-1]):
        x, s, m = _widened(rows, keep, part), part_of(per_token, part), part_of(shift, part)
        data[part] = encoded(x, s, m, format)
        off = x.double() - decoded(data[part], s, m, format, D.shape[-1]).double()
        error[part], norm[part] = (_rounded_up(torch.linalg.vector_norm(y.double(), dim=-1)) for y in (off, x))
    if bounds is None:
        empty = shape[-1] == 0
        found = [x.new_zeros(shape[:-1]) if empty else x.view(shape).amax(-1) for x in (error, norm)]
    else:
        found = [bounds.reduced(x, "amax") for x in (error, norm)]
    return replace(made, error=found[0], norm=found[1])


def _widened(rows: Tensor, keep: Tensor | None, part: slice) -> Tensor:
    """Some tokens in fp32 (fp64 for fp64), masked ones as zeros."""
    x = rows[part].to(torch.promote_types(rows.dtype, torch.float32))
    return x if keep is None else torch.where(keep[part].unsqueeze(-1), x, 0)


def _rounded_up(x: Tensor) -> Tensor:
    """fp64 as fp32 that is no smaller."""
    return torch.nextafter(x.float(), x.new_tensor(torch.inf).float()).where(x > 0, x.float())


def _parts(rows: int, d: int) -> Iterator[slice]:
    step = max(1, _ROWS_BYTES // max(4 * d, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def _has_sizes(x: Any, sizes: torch.Size) -> bool:
    """Whether a tensor has these sizes, or 1 in place of any."""
    if not isinstance(x, Tensor) or x.dim() != len(sizes):
        return False
    return all(n in (1, size) for n, size in zip(x.shape, sizes, strict=True))


class Bounds:
    """The documents of packed tokens."""

    def __init__(self, cu_seqlens: Tensor, tokens: int) -> None:
        lengths = cu_seqlens.long().diff()
        self.count = len(lengths)
        # The document of each token.
        self.owner = torch.repeat_interleave(lengths, output_size=tokens)

    def reduced(self, x: Tensor, reduce: str) -> Tensor:
        """The largest or smallest value of each document's tokens, 0 for one without."""
        found = x.new_zeros(self.count)
        return found.scatter_reduce_(0, self.owner, x, reduce, include_self=False)


def _check(op: str, D: Any, format: Any, scale: Any, d_mask: Any, cu_seqlens_d: Any) -> None:
    check_tensor(op, "D", D)
    check_strided(op, "D", D)
    if D.dtype not in DTYPES:
        raise TypeError(f"{op}: D: expected float16, bfloat16, float32 or float64, got {D.dtype}")
    check_choice(op, "format", format, get_args(FormatName))
    check_choice(op, "scale", scale, get_args(Scale))
    shapes = "[Td, d]" if cu_seqlens_d is not None else "[Ld, d], [Nd, Ld, d] or [Nq, K, Ld, d]"
    if D.dim() not in ((2,) if cu_seqlens_d is not None else (2, 3, 4)) or D.shape[-1] < 1:
        raise ValueError(f"{op}: D: expected {shapes}, got {shape_of(D)}")
    check_mask(op, "d_mask", d_mask, "D", D)
    if cu_seqlens_d is not None:
        check_cu_seqlens(op, "cu_seqlens_d", cu_seqlens_d, D.device, "[Nd + 1]")
        ends = cu_seqlens_d[0] == 0, cu_seqlens_d[-1] == len(D)
        if not (all(ends) and bool((cu_seqlens_d.diff() >= 0).all())):
            raise ValueError(f"{op}: cu_seqlens_d: expected ascending bounds from 0 to {len(D)}")
