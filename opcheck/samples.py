"""Every operator with sample inputs, on any device, and what it should compute: the table that all checks read.

A new operator adds itself to `OPERATORS`, and nowhere else.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import lik_ops  # registers torch.ops.lik
from lik_ops.opcheck import chamfer, cross_entropy, head, quantized, ragged, saved, soft
from lik_ops.opcheck.gradients import gradients

try:
    import lik_ops.ops.packaged  # registers what only packages hold; needs Triton
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "triton":
        raise

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


@dataclass(frozen=True)
class Operator:
    """What the checks have to know of an operator.

    Attributes:
        samples: its sample inputs in a dtype on a device.
        reference: takes a sample's arguments, floating tensors in fp64, and returns the outputs that it should have,
            differentiable; None in place of an output that is not compared.
        sized: arguments for sizes ``(Nq, Nd or K, Lq, Ld)`` and the layout: what recompilation is counted over.
    """

    samples: Callable[[torch.dtype, str], Iterator[Sample]]
    reference: Callable[..., tuple]
    sized: Callable[[tuple[int, int, int, int], bool, str], tuple]


def tensors(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str, candidates: bool, options: bool):
    """Q, D, q_mask, d_mask and q_weight of ``shape = (Nq, Nd or K, Lq, Ld, d)``; the last three only with options."""
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


def _inputs(shape: str, layout: str, dtype: torch.dtype, device: str, candidates: bool, options: bool, grad: bool):
    Q, D, q_mask, d_mask, q_weight = tensors(SHAPES[shape], layout, dtype, device, candidates, options)
    if q_weight is not None:
        q_weight.requires_grad_(grad)
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


def packed(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Nd documents of up to Ld tokens, ``[Td, d]``, every other one shorter, and ``cu_seqlens [Nd + 1]``."""
    _, Nd, _, Ld, d = shape
    lengths = torch.tensor([Ld - (i % 2) * (Ld // 2) for i in range(Nd)], dtype=torch.int32)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(int(lengths.sum()), d, generator=generator, dtype=torch.float64).to(device, dtype)
    return LAYOUTS[layout](tokens), cu_seqlens.to(device)


def maxsim_topk(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    for shape, layout, of_packed, options in _variants():
        Q, D, q_mask, d_mask, w = tensors(SHAPES[shape], layout, dtype, device, False, options)
        cu_seqlens = None
        if of_packed:
            D, cu_seqlens = packed(SHAPES[shape], layout, dtype, device)
            d_mask = None
        for top_k, chunk in ((2, None), (5, 2)):
            name = _name(shape, layout, of_packed and "packed", options and "options", top_k, dtype)
            yield Sample(name, (Q, D, q_mask, d_mask, cu_seqlens, w, options, top_k, chunk), {})


def _maxsim_reference(Q, D, q_mask=None, d_mask=None, *, q_weight=None, normalize=False, **_) -> tuple:
    return (lik_ops.reference.maxsim(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize),)


def _fwd_reference(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype, backward) -> tuple:
    scores, argmax = lik_ops.reference.maxsim_with_argmax(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize)
    if argmax_dtype is None:
        return scores, None
    return scores, argmax if D.dim() == 4 else argmax.transpose(0, 1)


def _bwd_reference(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize, needs) -> tuple:
    def scores(Q, D, weight):
        return _maxsim_reference(Q, D, q_mask, d_mask, q_weight=weight, normalize=normalize)[0]

    return gradients(scores, grad_scores, (Q, D, q_weight), needs)


def _sized_maxsim(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    return tensors((*sizes, 8), "contiguous", torch.float32, device, candidates, True)[:4]


def _sized_fwd(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    return *tensors((*sizes, 8), "contiguous", torch.float32, device, candidates, True), True, torch.int32, "auto"


def _sized_bwd(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    inputs = tensors((*sizes, 8), "contiguous", torch.float32, device, candidates, True)
    scores, argmax = torch.ops.lik.maxsim_fwd(*inputs, True, torch.int32, "auto")
    return torch.ones_like(scores), *inputs[:2], argmax, *inputs[2:], True, [True, True, True]


def maxsim_packaged(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    for sample in maxsim_fwd(dtype, device):
        if "grad" not in sample.name:
            yield Sample(sample.name, sample.args[:6], {})


def _packaged_reference(Q, D, q_mask, d_mask, q_weight, normalize) -> tuple:
    return _maxsim_reference(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize)


def _sized_packaged(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    return _sized_fwd(sizes, candidates, device)[:6]


def _named(samples: Callable[[torch.dtype, str], Iterator[tuple[str, tuple]]]) -> Callable[..., Iterator[Sample]]:
    """Samples of positional arguments alone."""
    return lambda dtype, device: (Sample(name, args, {}) for name, args in samples(dtype, device))


def maxsim_fwd_int8(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    return (s for s in maxsim_fwd(dtype, device) if s.args[6] is not None)


def maxsim_bwd_int8(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    return (
        Sample(s.name, saved.backward_arguments(s.args, n % 2 > 0), {}) for n, s in enumerate(maxsim_bwd(dtype, device))
    )


def _sized_bwd_int8(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    return saved.backward_arguments(_sized_bwd(sizes, candidates, device), False)


def maxsim_soft_fwd(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    return (Sample(s.name, soft.forward_arguments(s.args, n), {}) for n, s in enumerate(maxsim_fwd(dtype, device)))


def maxsim_soft_bwd(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    return (Sample(s.name, soft.backward_arguments(s.args, n), {}) for n, s in enumerate(maxsim_bwd(dtype, device)))


def _sized_soft_fwd(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    return soft.forward_arguments(_sized_fwd(sizes, candidates, device), 1)


def _sized_soft_bwd(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    return soft.backward_arguments(_sized_bwd(sizes, candidates, device), 1)


def maxsim_cross_entropy_fwd(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    wanted = (s for s in maxsim_fwd(dtype, device) if s.args[6] is None)
    return (Sample(s.name, cross_entropy.forward_arguments(s.args, n), {}) for n, s in enumerate(wanted))


def maxsim_cross_entropy_bwd(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    backward = cross_entropy.backward_arguments
    return (Sample(s.name, backward(s.args, n), {}) for n, s in enumerate(maxsim_bwd(dtype, device)))


def _sized_cross_entropy_fwd(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    return cross_entropy.forward_arguments(_sized_fwd(sizes, candidates, device), 0)


def _sized_cross_entropy_bwd(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    return cross_entropy.backward_arguments(_sized_bwd(sizes, candidates, device), 0)


def maxsim_from_hidden_fwd(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    cross = (s for s in maxsim_fwd(dtype, device) if s.args[1].dim() == 3)
    return (Sample(s.name, head.forward_arguments(s.args, n), {}) for n, s in enumerate(cross))


def maxsim_from_hidden_bwd(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    cross = (s for s in maxsim_bwd(dtype, device) if s.args[2].dim() == 3)
    return (Sample(s.name, head.backward_arguments(s.args, n), {}) for n, s in enumerate(cross))


def _sized_head_fwd(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    return head.forward_arguments(_sized_fwd(sizes, False, device), 1)


def _sized_head_bwd(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    return head.backward_arguments(_sized_bwd(sizes, False, device), 1)


def _topk_reference(Q, D, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, top_k, chunk) -> tuple:
    if cu_seqlens_d is not None:
        ends = cu_seqlens_d.tolist()
        documents = [D[a:b].unsqueeze(0) for a, b in itertools.pairwise(ends)]
        each = [_maxsim_reference(Q, x, q_mask, q_weight=q_weight, normalize=normalize)[0] for x in documents]
        scores = torch.cat([Q.new_empty(Q.shape[0], 0), *each], 1)
    else:
        (scores,) = _maxsim_reference(Q, D, q_mask, d_mask, q_weight=q_weight, normalize=normalize)
    found = scores.sort(dim=1, descending=True, stable=True)
    return found.values[:, :top_k], found.indices[:, :top_k]


def _sized_topk(sizes: tuple[int, int, int, int], of_packed: bool, device: str) -> tuple:
    Q, D, q_mask, d_mask, w = tensors((*sizes, 8), "contiguous", torch.float32, device, False, True)
    if not of_packed:
        return Q, D, q_mask, d_mask, None, w, True, 2, None
    D, cu_seqlens = packed((*sizes, 8), "contiguous", torch.float32, device)
    return Q, D, q_mask, None, cu_seqlens, w, True, 2, None


def _coded(Q: Tensor, D: Tensor, *others: Tensor | None) -> tuple:
    """Tensors of ``lik::maxsim_topk_codes`` of those of ``lik::maxsim_topk``: a code for each document token."""
    generator = torch.Generator().manual_seed(4)
    centroids = torch.randn(9, Q.shape[-1], generator=generator).to(D.device)
    codes = torch.randint(9, D.shape[:-1], generator=generator, dtype=torch.int32).to(D.device)
    return Q, codes, centroids, *others


def maxsim_topk_codes(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    for s in maxsim_topk(dtype, device):
        *given, normalize, top_k, _ = s.args
        yield Sample(s.name, (*_coded(*given), normalize, top_k, None if top_k == 2 else 2), {})


def _codes_reference(Q, codes, centroids, q_mask, d_mask, cu_seqlens_d, q_weight, normalize, top_k, n_probe) -> tuple:
    if normalize:
        Q = torch.nn.functional.normalize(Q, dim=-1)
    products = Q @ centroids.t()
    keep = torch.ones(Q.shape[:-1], dtype=torch.bool, device=Q.device) if q_mask is None else q_mask
    weight = keep.to(Q.dtype) if q_weight is None else q_weight * keep
    probed = torch.ones_like(products, dtype=torch.bool)
    if n_probe is not None:
        probed = torch.zeros_like(probed).scatter(2, products.topk(n_probe, dim=2).indices, True) & keep[..., None]
    if cu_seqlens_d is not None:
        documents = [codes[a:b] for a, b in itertools.pairwise(cu_seqlens_d.tolist())]
    else:
        documents = list(codes) if d_mask is None else [x[mask] for x, mask in zip(codes, d_mask, strict=True)]
    columns = [Q.new_empty(Q.shape[0], 0)]
    for x in documents:
        x, reached = x.long(), probed[..., x.long()].flatten(1).any(1)
        score = (weight * products[..., x].amax(2)).sum(1) if len(x) else Q.new_zeros(Q.shape[0])
        columns.append(score.where(reached, -torch.inf)[:, None])
    found = torch.cat(columns, 1).sort(dim=1, descending=True, stable=True)
    return found.values[:, :top_k], found.indices[:, :top_k]


def _sized_codes(sizes: tuple[int, int, int, int], of_packed: bool, device: str) -> tuple:
    *given, normalize, top_k, _ = _sized_topk(sizes, of_packed, device)
    return *_coded(*given), normalize, top_k, 3


def maxsim_xtr(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    for shape, layout, candidates, options in _variants():
        for n, top_k in enumerate((1, 5, 1000) if not candidates else ()):
            inputs = _inputs(shape, layout, dtype, device, False, options, n != 2)
            normalizer = ("retrieved", "positive")[(n + options) % 2]
            name = _name(shape, layout, options and "options", top_k, normalizer, dtype)
            yield Sample(name, (*inputs, top_k, normalizer), {})


def _xtr_reference(Q, D, q_mask, d_mask, q_weight, top_k, normalizer) -> tuple:
    given, options = (Q, D, top_k, q_mask, d_mask), {"q_weight": q_weight, "normalizer": normalizer}
    return lik_ops.reference.maxsim_xtr(*given, **options), None, None


def _sized_xtr(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    return *tensors((*sizes, 8), "contiguous", torch.float32, device, False, True), 3, "retrieved"


def maxsim_token_topk(dtype: torch.dtype, device: str) -> Iterator[Sample]:
    for shape, layout, candidates, options in _variants():
        for n, top_k in enumerate((1, 3, 12)):
            inputs = _inputs(shape, layout, dtype, device, candidates, options, n != 2)
            name = _name(shape, layout, candidates and "candidates", options and "options", top_k, dtype)
            yield Sample(name, (*inputs, top_k, n == 1, n != 2), {})


def _token_topk_reference(Q, D, q_mask, d_mask, q_weight, top_k, normalize, keep) -> tuple:
    options = {"q_weight": q_weight, "normalize": normalize}
    return lik_ops.reference.maxsim_token_topk(Q, D, top_k, q_mask, d_mask, **options), None


def _sized_token_topk(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    return *tensors((*sizes, 8), "contiguous", torch.float32, device, candidates, True), 3, False, True


_BWD = Operator(maxsim_bwd, _bwd_reference, _sized_bwd)
OPERATORS: dict[str, Operator] = {
    "chamfer_fwd": Operator(_named(chamfer.samples), chamfer.reference, chamfer.sized),
    "chamfer_bwd": Operator(_named(chamfer.backward_samples), chamfer.backward_reference, chamfer.sized_backward),
    "maxsim": Operator(maxsim, _maxsim_reference, _sized_maxsim),
    "maxsim_fwd": Operator(maxsim_fwd, _fwd_reference, _sized_fwd),
    "maxsim_bwd_lowmem": _BWD,
    "maxsim_bwd_unified": _BWD,
    "maxsim_ragged_fwd": Operator(_named(ragged.forward_samples), ragged.forward_reference, ragged.sized_forward),
    "maxsim_ragged_bwd": Operator(_named(ragged.backward_samples), ragged.backward_reference, ragged.sized_backward),
    "maxsim_quantized_fwd": Operator(_named(quantized.samples), quantized.reference, quantized.sized),
    "maxsim_fwd_int8": Operator(maxsim_fwd_int8, saved.forward_reference, _sized_fwd),
    "maxsim_bwd_int8": Operator(maxsim_bwd_int8, saved.backward_reference, _sized_bwd_int8),
    "maxsim_soft_fwd": Operator(maxsim_soft_fwd, soft.forward_reference, _sized_soft_fwd),
    "maxsim_soft_bwd": Operator(maxsim_soft_bwd, soft.backward_reference, _sized_soft_bwd),
    "maxsim_cross_entropy_fwd": Operator(
        maxsim_cross_entropy_fwd, cross_entropy.forward_reference, _sized_cross_entropy_fwd
    ),
    "maxsim_cross_entropy_bwd": Operator(
        maxsim_cross_entropy_bwd, cross_entropy.backward_reference, _sized_cross_entropy_bwd
    ),
    "maxsim_from_hidden_fwd": Operator(maxsim_from_hidden_fwd, head.forward_reference, _sized_head_fwd),
    "maxsim_from_hidden_bwd": Operator(maxsim_from_hidden_bwd, head.backward_reference, _sized_head_bwd),
    "maxsim_topk": Operator(maxsim_topk, _topk_reference, _sized_topk),
    "maxsim_topk_codes": Operator(maxsim_topk_codes, _codes_reference, _sized_codes),
    "maxsim_token_topk_fwd": Operator(maxsim_token_topk, _token_topk_reference, _sized_token_topk),
    "maxsim_xtr_fwd": Operator(maxsim_xtr, _xtr_reference, _sized_xtr),
}


if "lik_ops.ops.packaged" in sys.modules:
    OPERATORS["maxsim_packaged"] = Operator(maxsim_packaged, _packaged_reference, _sized_packaged)


def registered() -> set[str]:
    """The names of all operators under ``torch.ops.lik``."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1].split(".")[0] for name in names if name.startswith("lik::")}
