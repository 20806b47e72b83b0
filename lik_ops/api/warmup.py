"""`warmup`: compile before the first request what later calls will need."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Sequence
from typing import Any

import torch

from ..arguments import DTYPES, Backward, check_count, check_flag, check_options, kind_of, score_dtype
from ..ops import topk
from .score import maxsim, maxsim_with_argmax

__all__ = ["warmup"]


def warmup(
    device: torch.device | str,
    dtype: torch.dtype,
    d: int,
    Lq: int,
    *,
    Nq: int | Sequence[int] = 1,
    Ld: int | Sequence[int] = (32, 300),
    Nd: int | Sequence[int] = (2, 200),
    candidates: bool = False,
    q_mask: bool = False,
    d_mask: bool = False,
    q_weight: bool = False,
    normalize: bool = False,
    argmax: bool = False,
    training: bool = False,
    backward: Backward = "auto",
    top_k: int | Sequence[int] = (),
) -> None:
    """Compile the kernels that calls like these will run, so that no request waits for the compiler.

    Makes small calls on zeros and waits for them. Compiled kernels serve every number of documents, and queries and
    documents of every length up to where another tile is better; they stay for this process, and on disk in Triton's
    cache. Without kernels to compile, as on a CPU, it does nothing but the calls.

    Args:
        device: where the calls will be; for several GPUs, call it for each.
        dtype: of Q and D.
        d: features of a token.
        Lq: tokens of a query.
        Nq: numbers of queries at a time; few and many may take different kernels, and the backward loads winners
            otherwise where 16 does not divide ``Nq * Lq``.
        Ld: lengths of documents; those shorter than a tile (64 tokens) may take another kernel.
        Nd: numbers of documents, or of candidates of each query; few and many may take different kernels.
        candidates: each query has its own documents, D is ``[Nq, K, Ld, d]``.
        q_mask, d_mask, q_weight: whether calls pass these.
        normalize: as calls will say.
        argmax: also `maxsim_with_argmax`.
        training: also the forward that keeps winners, and the backward of Q and D.
        backward: as calls will say.
        top_k: of `retrieve`: also what finds so many best among up to 4 million documents.

    Raises:
        TypeError, ValueError: as `maxsim`; also where a size is not positive.

    Example:
        >>> lik_ops.warmup("cpu", torch.bfloat16, d=128, Lq=32, Nq=(1, 16), d_mask=True)
    """
    sizes = {"Nq": Nq, "Nd": Nd, "Lq": Lq, "Ld": Ld, "d": d, "top_k": top_k}
    each = {name: _sizes(name, n) for name, n in sizes.items()}
    flags = {"candidates": candidates, "q_mask": q_mask, "d_mask": d_mask, "q_weight": q_weight}
    for name, flag in {**flags, "argmax": argmax, "training": training}.items():
        check_flag("warmup", name, flag)
    check_options("warmup", normalize, backward)
    device = _device(device)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        found = dtype if isinstance(dtype, torch.dtype) else kind_of(dtype)
        raise TypeError(f"warmup: dtype: expected float16, bfloat16, float32 or float64, got {found}")
    options: dict = {"normalize": normalize}
    for queries, documents, length in itertools.product(each["Nq"], each["Nd"], each["Ld"]):
        shape = (queries, documents, length) if candidates else (documents, length)
        Q = torch.zeros((queries, Lq, d), dtype=dtype, device=device, requires_grad=training)
        D = torch.zeros((*shape, d), dtype=dtype, device=device, requires_grad=training)
        masks = [
            torch.ones(t.shape[:-1], dtype=torch.bool, device=device) if wanted else None
            for t, wanted in ((Q, q_mask), (D, d_mask))
        ]
        weight = torch.ones(Q.shape[:-1], dtype=score_dtype(dtype), device=device) if q_weight else None
        with torch.no_grad():
            maxsim(Q, D, *masks, q_weight=weight, **options)
            if argmax:
                maxsim_with_argmax(Q, D, *masks, q_weight=weight, **options)
        if training:
            with torch.enable_grad():
                scores = maxsim(Q, D, *masks, q_weight=weight, backward=backward, **options)
                torch.autograd.grad(scores, (Q, D), torch.ones_like(scores))
    for best in each["top_k"]:
        topk.warm(device, score_dtype(dtype), best)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sizes(name: str, given: Any) -> tuple[int, ...]:
    """One size or several, `top_k` also none."""
    several = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    if not several and name != "top_k":
        raise ValueError(f"warmup: {name}: expected at least one size, got none")
    for n in several:
        check_count("warmup", name, n, 1)
    return several


def _device(given: Any) -> torch.device:
    if isinstance(given, (str, int, torch.device)) and not isinstance(given, bool):
        try:
            return torch.device(given)
        except (RuntimeError, ValueError):
            raise ValueError(f"warmup: device: expected a device of this torch, got {reprlib.repr(given)}") from None
    raise TypeError(f"warmup: device: expected a torch.device or its name, got {kind_of(given)}")
