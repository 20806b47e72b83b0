"""Sample inputs that operators share, and the record that describes an operator to the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SHAPES = {  # Nq, Nd or K, Lq, Ld, d
    "small": (2, 3, 4, 5, 8),
    "odd": (3, 2, 7, 33, 17),
    "ones": (1, 1, 1, 1, 1),
    "no_documents": (2, 0, 3, 4, 8),
    "no_queries": (0, 2, 3, 4, 8),
    "no_tokens": (2, 2, 3, 0, 8),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "permuted": lambda t: t.transpose(0, -2).contiguous().transpose(0, -2),
    "sliced": lambda t: torch.cat([t, t], dim=-1)[..., : t.shape[-1]],
}


@dataclass(frozen=True)
class Sample:
    """The arguments of one call."""

    name: str
    args: tuple
    kwargs: dict

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class OperatorCase:
    """An operator as the checks see it.

    Attributes:
        samples: yields its sample inputs in a dtype on a device.
        reference: computes the expected outputs from a sample's arguments, with floating-point tensors in fp64. It is
            differentiable, and returns None for an output that is not compared.
        sized: returns arguments for sizes ``(Nq, Nd or K, Lq, Ld)`` and a layout, over which compilations are counted.
    """

    samples: Callable[[torch.dtype, str], Iterator[Sample]]
    reference: Callable[..., tuple]
    sized: Callable[[tuple[int, int, int, int], bool, str], tuple]


def make_tensors(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str, candidates: bool, options: bool):
    """Return Q, D, q_mask, d_mask and q_weight of ``shape = (Nq, Nd or K, Lq, Ld, d)``; the last three need options."""
    Nq, K, Lq, Ld, d = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    place = LAYOUTS[layout]
    Q = place(normal(Nq, Lq, d).to(device, dtype)).detach()
    D = place(normal(*((Nq, K, Ld, d) if candidates else (K, Ld, d))).to(device, dtype)).detach()
    if not options:
        return Q, D, None, None, None
    q_mask = torch.rand(Q.shape[:-1], generator=generator).to(device) > 0.3
    d_mask = torch.rand(D.shape[:-1], generator=generator).to(device) > 0.3
    d_mask[..., :1] = True
    weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Q, D, q_mask, d_mask, normal(Nq, Lq).to(device, weight_dtype)


def draw_tensors(shape: str, layout: str, dtype: torch.dtype, device: str, candidates: bool, options: bool, grad: bool):
    """Return the tensors of a named shape, which require a gradient on request."""
    Q, D, q_mask, d_mask, q_weight = make_tensors(SHAPES[shape], layout, dtype, device, candidates, options)
    if q_weight is not None:
        q_weight.requires_grad_(grad)
    return Q.requires_grad_(grad), D.requires_grad_(grad), q_mask, d_mask, q_weight


def list_variants() -> Iterator[tuple[str, str, bool, bool]]:
    """Yield (shape, layout, candidates, options): every shape contiguous, and every other layout on two shapes."""
    for shape in SHAPES:
        for candidates in (False, True):
            for options in (False, True):
                yield shape, "contiguous", candidates, options
    for layout in ("permuted", "sliced"):
        for shape in ("small", "odd"):
            yield shape, layout, layout == "sliced", True


def format_name(*parts: object) -> str:
    """Join the parts of a sample's name that are not empty."""
    return "-".join(str(p).replace("torch.", "") for p in parts if p not in ("", False, None))


def make_packed(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return packed documents ``[Td, d]`` and ``cu_seqlens [Nd + 1]``; every second document is shorter than Ld."""
    _, Nd, _, Ld, d = shape
    lengths = torch.tensor([Ld - (i % 2) * (Ld // 2) for i in range(Nd)], dtype=torch.int32)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(int(lengths.sum()), d, generator=generator, dtype=torch.float64).to(device, dtype)
    return LAYOUTS[layout](tokens), cu_seqlens.to(device)
