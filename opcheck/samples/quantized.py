"""Sample inputs and references of the quantized operators, which score the dequantized tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import lik_ops
from lik_ops.formats.rotation import make_rotation
from lik_ops.formats.table import EncodedTokens, Query, list_queries
from lik_ops.opcheck.samples import ragged
from lik_ops.opcheck.samples.gradients import compute_gradients

SCALES = {"int8": "token", "uint8": "token", "fp8_e4m3": "tensor", "fp8_e5m2": "token", "binary": "tensor"}
SCALES |= {"rq4": "token", "rq2": "tensor", "rq1": "token"}
NBITS = {"residual1": 1, "residual2": 2, "residual4": 4, "residual8": 8}


def _encode(D: Tensor, format: str, query: Query = "half") -> EncodedTokens:
    """Return tokens as the operator accepts them."""
    if format in NBITS:
        stored = lik_ops.quantize(D, _make_codec(D, NBITS[format])).to_flat_encoded()
    else:
        stored = lik_ops.quantize(D, format, SCALES[format], query=query).to_flat_encoded()  # type: ignore[arg-type]
    if format in NBITS or format == "binary":
        # Powers of two, so that tokens are exact in bf16, and similarities of rounded queries and signs in fp32. Else
        # rounding could lead to another argmax than the formula's.
        stored = stored._replace(scale=stored.scale.clamp_min(2.0**-20).log2().round().exp2())
    return stored._replace(data=stored.data.view(*D.shape[:-1], stored.data.shape[1]))


def _round_queries(Q: Tensor, query: Query) -> Tensor:
    """Return queries that a GPU does not have to round."""
    if query == "int8":
        return (Q / Q.abs().amax(-1, keepdim=True) * 127).round()
    return Q.to(torch.float8_e4m3fn).to(Q.dtype) if query == "fp8" else Q


def _make_codec(D: Tensor, nbits: int) -> lik_ops.ResidualCodec:
    """Return a codec with a few random centroids, whatever the tokens are. Centroids plus weights are exact in bf16."""
    generator = torch.Generator().manual_seed(nbits)
    centroids = torch.randint(-12, 13, (7, D.shape[-1]), generator=generator).to(D.device) / 4
    weights = (torch.arange(2.0**nbits, device=D.device) - 2 ** (nbits - 1)) / 4
    return lik_ops.ResidualCodec(centroids, weights, (weights[1:] + weights[:-1]) / 2)


def _decode(stored: EncodedTokens, d: int) -> Tensor:
    """Dequantize tokens by the formula."""
    data, scale, minimum, format, codes, centroids, weights = stored
    if codes is not None and centroids is not None and weights is not None:
        nbits = NBITS[format]
        slots = [(data >> (8 - nbits - bit)) & (2**nbits - 1) for bit in range(0, 8, nbits)]
        of_buckets = weights[torch.stack(slots, -1).flatten(-2)[:, :d].long()]
        data = centroids[codes.long()].double() + of_buckets
    elif format.startswith("binary"):
        data = torch.stack([(data >> bit) & 1 for bit in range(8)], -1).flatten(-2)[:, :d] * 2.0 - 1
    elif format.startswith("fp8"):
        data = data.view(torch.float8_e5m2 if format == "fp8_e5m2" else torch.float8_e4m3fn)
    elif format.startswith("rq"):
        nbits = int(format[2:])
        codes = torch.stack([(data >> bit) % 2**nbits for bit in range(0, 8, nbits)], -1).flatten(-2)[:, :d]
        data = (2 * codes.double() - (2**nbits - 1)) @ make_rotation(d, data.device).T
    found = data.double() * scale.double()[:, None]
    return found if minimum is None else found + minimum.double()[:, None]


def _add_formats(given: Iterable[tuple[str, tuple]]) -> Iterator[tuple[str, tuple]]:
    """Convert samples of the ragged forward, to a different format and precision of queries each."""
    formats = [(format, query) for format in (*SCALES, *NBITS) for query in list_queries(format)]
    for n, (label, args) in enumerate(given):
        Q, D, *rest, normalize, argmax_dtype, longest, _ = args
        # Each dtype begins with another format, because several of every fifth sample have no tokens.
        format, query = formats[(n + 3 * Q.dtype.itemsize.bit_length()) % len(formats)]
        Q = _round_queries(Q.detach(), query).requires_grad_(Q.requires_grad)
        stored = _encode(D.detach(), format, query)
        # Similarities of rounded queries and signs are often equal, and norms would round them differently.
        normalize = normalize and (format != "binary" or query == "half")
        yield f"{stored.format}-{label}", (Q, *stored, *rest, normalize, argmax_dtype, longest)


def samples(dtype: torch.dtype, device: str) -> Iterator[tuple[str, tuple]]:
    """Yield the samples of the forward."""
    yield from _add_formats(ragged.forward_samples(dtype, device))


def backward_samples(dtype: torch.dtype, device: str) -> Iterator[tuple[str, tuple]]:
    """Yield the samples of the backward."""
    with_argmax = (sample for sample in ragged.forward_samples(dtype, device) if sample[1][10] is not None)
    for label, args in _add_formats(with_argmax):
        given = [t.detach() if isinstance(t, Tensor) else t for t in args]
        yield label, _make_backward_args(given, [True, given[14] is not None])


def _make_backward_args(args: Sequence, needs: list[bool]) -> tuple:
    """Return arguments of the backward from detached arguments of the forward."""
    scores, argmax = torch.ops.lik.maxsim_quantized_fwd(*args)
    upstream = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)).to(scores)
    # A copy: the sizes of the base of a view would be guarded too.
    return upstream, *args[:15], argmax.clone(), args[15], needs


def reference(Q, *args: Any) -> tuple:
    """Return the expected scores and argmax."""
    data, d = args[0], Q.shape[-1]
    if args[3] == "binary_binary":  # signs, whose gradient is the gradient of Q
        Q = torch.where(Q > 0, 1.0, -1.0).to(Q) + (Q - Q.detach())
    flat = EncodedTokens(data.flatten(0, -2), *args[1:7])
    D = _decode(flat, d).to(Q.dtype).view(*data.shape[:-1], d)
    arguments: Any = (Q, D, *args[7:], "auto")
    return ragged.forward_reference(*arguments)


def backward_reference(grad_scores, Q, *args: Any) -> tuple:
    """Return the expected gradients."""
    *tensors, argmax, normalize, needs = args

    def scores(Q, weight):
        return reference(Q, *tensors[:-1], weight, normalize, None, argmax.shape[1])[0]

    return compute_gradients(scores, grad_scores, (Q, tensors[-1]), needs)


def sized_backward(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    """Return arguments of the backward for given sizes."""
    return _make_backward_args(sized(sizes, candidates, device), [True, True])


def sized(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    """Return arguments for given sizes."""
    Q, D, *rest, normalize, argmax_dtype, longest, _ = ragged.sized_forward(sizes, candidates, device)
    return Q, *_encode(D, "int8"), *rest, normalize, argmax_dtype, longest
