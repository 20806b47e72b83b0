"""Sample inputs of ``lik::maxsim_quantized_fwd``, and what it should compute: that of the tokens as they count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import lik_ops
from lik_ops.formats import FORMATS
from lik_ops.opcheck import ragged

SCALES = {"int8": "token", "uint8": "token", "fp8_e4m3": "tensor", "fp8_e5m2": "token", "binary": "tensor"}


def _stored(D: Tensor, format: str) -> tuple:
    """Data, scales and minima of packed tokens, and the format."""
    made = lik_ops.quantize(D, format, SCALES[format])  # type: ignore[arg-type]
    return made.data.view(FORMATS[format].bytes), *made.per_token(), format


def _counting(data: Tensor, scale: Tensor, minimum: Tensor | None, format: str, d: int) -> Tensor:
    """The tokens as they count, by the formula."""
    if format == "binary":
        data = torch.stack([(data >> bit) & 1 for bit in range(8)], -1).flatten(-2)[:, :d] * 2.0 - 1
    elif format.startswith("fp8"):
        data = data.view(torch.float8_e4m3fn if format == "fp8_e4m3" else torch.float8_e5m2)
    found = data.double() * scale.double()[:, None]
    return found if minimum is None else found + minimum.double()[:, None]


def samples(dtype: torch.dtype, device: str) -> Iterator[tuple[str, tuple]]:
    formats = list(SCALES)
    for n, (label, args) in enumerate(ragged.forward_samples(dtype, device)):
        Q, D, *rest, normalize, argmax_dtype, longest, _ = args
        detached = [t.detach() if isinstance(t, Tensor) else t for t in rest]
        format = formats[n % len(formats)]
        stored = _stored(D.detach(), format)
        yield f"{format}-{label}", (Q.detach(), *stored, *detached, normalize, argmax_dtype, longest)


def reference(Q, data, scale, minimum, format, *rest: Any) -> tuple:
    D = _counting(data, scale, minimum, format, Q.shape[-1]).to(Q.dtype)
    arguments: Any = (Q, D, *rest, "auto")
    return ragged.forward_reference(*arguments)


def sized(sizes: tuple[int, int, int, int], candidates: bool, device: str) -> tuple:
    Q, D, *rest, normalize, argmax_dtype, longest, _ = ragged.sized_forward(sizes, candidates, device)
    return Q, *_stored(D, "int8"), *rest, normalize, argmax_dtype, longest
