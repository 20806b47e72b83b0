"""Sample inputs of every operator: what `torch.library.opcheck` is run over, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import lik_ops  # noqa: F401  (registers torch.ops.lik)

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
    """Arguments of one call."""

    name: str
    args: tuple
    kwargs: dict

    def __str__(self) -> str:
        return self.name


def _inputs(shape: str, layout: str, dtype: torch.dtype, device: str, candidates: bool, options: bool, grad: bool):
    Nq, K, Lq, Ld, d = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    place = LAYOUTS[layout]
    Q = place(normal(Nq, Lq, d).to(device, dtype)).detach()
    D = place(normal(*((Nq, K, Ld, d) if candidates else (K, Ld, d))).to(device, dtype)).detach()
    q_mask = d_mask = q_weight = None
    if options:
        q_mask = torch.rand(Q.shape[:-1], generator=generator).to(device) > 0.3
        d_mask = torch.rand(D.shape[:-1], generator=generator).to(device) > 0.3
        d_mask[..., :1] = True
        weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        q_weight = normal(Nq, Lq).to(device, weight_dtype).requires_grad_(grad)
    return Q.requires_grad_(grad), D.requires_grad_(grad), q_mask, d_mask, q_weight


def _variants() -> Iterator[tuple[str, str, bool, bool]]:
    """(shape, layout, candidates, options): every shape dense, every layout on two shapes, options throughout."""
    for shape in SHAPES:
        for candidates in (False, True):
            for options in (False, True):
                yield shape, "contiguous", candidates, options
    for layout in ("permuted", "sliced"):
        for shape in ("small", "odd"):
            yield shape, layout, layout == "sliced", True


def _name(*parts: object) -> str:
    return "-".join(str(p).replace("torch.", "") for p in parts if p not in ("", False, None))


def maxsim(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    for shape, layout, candidates, options in _variants():
        for grad in (False, True):
            Q, D, q_mask, d_mask, w = _inputs(shape, layout, dtype, device, candidates, options, grad)
            name = _name(shape, layout, candidates and "candidates", options and "options", grad and "grad", dtype)
            yield Sample(name, (Q, D, q_mask, d_mask), {"q_weight": w, "normalize": options})
    Q, D, *_ = _inputs("small", "contiguous", dtype, device, False, False, True)
    for backward, recompute in (("lowmem", True), ("unified", False)):
        yield Sample(
            _name(backward, recompute and "recompute", dtype), (Q, D), {"backward": backward, "recompute": recompute}
        )
    for name, q, d in (("flat_q", Q[0], D), ("flat_d", Q, D[0]), ("flat", Q[0], D[0])):
        yield Sample(_name(name, dtype), (q.detach().requires_grad_(), d.detach().requires_grad_()), {})


def maxsim_fwd(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    for shape, layout, candidates, options in _variants():
        for grad, argmax_dtype in ((False, None), (True, torch.int16), (True, torch.int32), (True, None)):
            inputs = _inputs(shape, layout, dtype, device, candidates, options, grad)
            name = _name(
                shape, layout, candidates and "candidates", options and "options", grad and "grad", argmax_dtype, dtype
            )
            yield Sample(name, (*inputs, options, argmax_dtype, "auto"), {})


def maxsim_bwd(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    for shape, layout, candidates, options in _variants():
        Q, D, q_mask, d_mask, w = _inputs(shape, layout, dtype, device, candidates, options, False)
        for argmax_dtype, needs in ((torch.int16, (True, True, options)), (torch.int32, (False, True, False))):
            scores, argmax = torch.ops.lik.maxsim_fwd(Q, D, q_mask, d_mask, w, options, argmax_dtype, "auto")
            generator = torch.Generator().manual_seed(1)
            upstream = torch.randn(scores.shape, generator=generator).to(scores)
            name = _name(shape, layout, candidates and "candidates", options and "options", argmax_dtype, dtype)
            yield Sample(name, (upstream, Q, D, argmax, q_mask, d_mask, w, options, list(needs)), {})


OPERATORS: dict[str, Callable[[torch.dtype, str], Iterator[Sample]]] = {
    "maxsim": maxsim,
    "maxsim_fwd": maxsim_fwd,
    "maxsim_bwd_lowmem": maxsim_bwd,
    "maxsim_bwd_unified": maxsim_bwd,
}
