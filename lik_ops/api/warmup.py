"""`warmup`: compile the kernels of later calls before the first request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..core.arguments import (
    Backward,
    as_device,
    check_count,
    check_dtype,
    check_fits_memory,
    check_flag,
    check_is_present,
    check_options,
    format_shape,
    score_dtype,
)
from ..ops import topk
from .ragged import maxsim_candidates_varlen, maxsim_padded, maxsim_pair_list, maxsim_varlen
from .score import maxsim, maxsim_with_argmax

__all__ = ["warmup"]


@torch.inference_mode(False)  # gradients are needed even if the caller is in inference mode
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
    ragged: bool = False,
) -> list[tuple[str, float]]:
    """Compile the kernels of the described calls, so that no request waits for the compiler.

    The function compiles all kernels in parallel threads. Then it makes small calls on zeros and waits for them. A
    compiled kernel serves every number of documents. It also serves all lengths of queries and documents up to the
    point where a different tile is better. Compiled kernels stay in this process, and on disk in Triton's cache.
    Without kernels to compile, for example on a CPU, the function only makes the calls.

    Args:
        device: the device of the calls. For several GPUs, call `warmup` once for each.
        dtype: the dtype of Q and D.
        d: the number of features of a token.
        Lq: the number of tokens of a query.
        Nq: one or several numbers of queries in a call. A small and a large number may use different kernels. The
            backward also loads the argmax differently if ``Nq * Lq`` is not a multiple of 16.
        Ld: one or several lengths of documents. Documents shorter than a tile (64 tokens) may use a different kernel.
            So may multiples of 128 tokens, and documents of several thousand tokens if Nd is small.
        Nd: one or several numbers of documents, or of candidates for each query. A small and a large number may use
            different kernels.
        candidates: each query has its own documents: D is ``[Nq, K, Ld, d]``.
        q_mask: whether the calls pass `q_mask`.
        d_mask: whether the calls pass `d_mask`.
        q_weight: whether the calls pass `q_weight`.
        normalize: the value that the calls pass.
        argmax: also warm up `maxsim_with_argmax`.
        training: also warm up the forward that keeps the argmax, and the backward of Q and D.
        backward: the value that the calls pass.
        top_k: one or several values of `top_k` in `retrieve`. Also warms up the selection of that many documents out of
            up to 4 million.
        ragged: also warm up `maxsim_varlen`, `maxsim_candidates_varlen`, `maxsim_pair_list` and `maxsim_padded`, for
            the same numbers and lengths of queries and documents.

    Returns:
        A list of ``(call, seconds)``: the compilation, if there was any, then a description of each call and its time.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: an option is wrong, or a size is not positive.

    Example:
        >>> sizes = {"d": 128, "Lq": 32, "Nq": (1, 16), "Ld": 300, "Nd": 2}
        >>> calls = lik_ops.warmup("cpu", torch.bfloat16, **sizes, d_mask=True)
        >>> # Each call has a description and its time in seconds.
        >>> [call for call, seconds in calls]
        ['maxsim, Q [1, 32, 128], D [2, 300, 128]', 'maxsim, Q [16, 32, 128], D [2, 300, 128]']
    """
    for name, n in (("d", d), ("Lq", Lq)):
        check_count("warmup", name, n, 1)
    sizes = {name: _as_sizes(name, n) for name, n in {"Nq": Nq, "Nd": Nd, "Ld": Ld, "top_k": top_k}.items()}
    flags = {"candidates": candidates, "q_mask": q_mask, "d_mask": d_mask, "q_weight": q_weight}
    for name, flag in {**flags, "argmax": argmax, "training": training, "ragged": ragged}.items():
        check_flag("warmup", name, flag)
    check_options("warmup", normalize, backward)
    device = as_device("warmup", device)
    check_dtype("warmup", "dtype", dtype)
    check_is_present("warmup", device)
    max_Nq, max_Nd, max_Ld = (max(sizes[name]) for name in ("Nq", "Nd", "Ld"))
    check_fits_memory("warmup", "Nq, Lq, d", (max_Nq, Lq, d))
    check_fits_memory("warmup", "top_k", (4, max(sizes["top_k"], default=1)))
    check_fits_memory("warmup", "Nq, Nd, Ld, d", (max_Nq if candidates else 1, max_Nd, max_Ld, d))
    options: dict = {"normalize": normalize, "backward": backward}
    compiler, calls = _KernelCompiler(device, dtype), _CallTimer(device)
    for make in (compiler.make, calls.make):
        for queries, documents, length in itertools.product(sizes["Nq"], sizes["Nd"], sizes["Ld"]):
            shape = (queries, documents, length) if candidates else (documents, length)
            Q = torch.zeros((queries, Lq, d), dtype=dtype, device=device, requires_grad=training)
            D = torch.zeros((*shape, d), dtype=dtype, device=device, requires_grad=training)
            masks = [
                torch.ones(t.shape[:-1], dtype=torch.bool, device=device) if has_mask else None
                for t, has_mask in ((Q, q_mask), (D, d_mask))
            ]
            weight = torch.ones(Q.shape[:-1], dtype=score_dtype(dtype), device=device) if q_weight else None
            keywords = {**options, "q_weight": weight}
            make("maxsim", partial(maxsim, Q, D, *masks, **keywords), Q, D)
            if argmax:
                make("maxsim_with_argmax", partial(maxsim_with_argmax, Q, D, *masks, **keywords), Q, D)
            if ragged:
                _make_ragged_calls(make, Q, D if candidates else D.expand(queries, *D.shape), weight, options)
        compiler.compile(calls)
    for k in sizes["top_k"]:
        calls.run(f"top {k}", partial(topk.warm_up, device, score_dtype(dtype), k))
    return calls.timings


class _KernelCompiler:
    """Collects the kernels of calls without launching them, and compiles all of them in parallel."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        backend = backends.select_backend(device, dtype)
        self.backend = backend if hasattr(backend, "collect_launches") else None
        self.device, self.missing = device, dict[tuple, tuple]()

    def make(self, name: str, call: Callable[[], Any], Q: Tensor, D: Tensor) -> None:
        """Add the kernels of a call, without gradients and, if Q requires them, with gradients."""
        if self.backend is not None:
            with self.backend.use_device(self.device), self.backend.collect_launches() as launches:
                with torch.no_grad():
                    call()
                if Q.requires_grad and not name.endswith("argmax"):
                    # A backward in another thread would launch kernels, and read an argmax that was never written.
                    with torch.autograd.set_multithreading_enabled(False):
                        torch.autograd.grad(call().sum(), (Q, D))
                self.missing |= self.backend.find_missing_kernels(launches)

    def compile(self, calls: _CallTimer) -> None:
        """Compile the kernels that were added, and record the time in `calls`."""
        if self.backend is not None and self.missing:
            with self.backend.use_device(self.device):
                description = f"compilation of {len(self.missing)} kernels"
                calls.run(description, partial(self.backend.compile_in_parallel, self.missing))
            self.missing.clear()


class _CallTimer:
    """Makes calls, without gradients and, if Q requires them, with gradients, and records the time of each."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.timings = device, list[tuple[str, float]]()

    def make(self, name: str, call: Callable[[], Any], Q: Tensor, D: Tensor) -> None:
        """Time a call without gradients and, if Q requires them, a training step of the call."""
        description = f"{name}, Q {format_shape(Q)}, D {format_shape(D)}"
        with torch.no_grad():
            self.run(description, call)
        if Q.requires_grad and not name.endswith("argmax"):
            self.run(f"{description}, training", lambda: torch.autograd.grad(call().sum(), (Q, D)))

    def run(self, description: str, call: Callable[[], Any]) -> None:
        """Make one call, wait for it, and record its time in seconds."""
        begin = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.timings.append((description, time.perf_counter() - begin))


def _make_ragged_calls(make: Callable, Q: Tensor, D: Tensor, weight: Tensor | None, options: dict) -> None:
    """Pass calls of the packed and padded functions to `make`.

    Queries are ``[Nq, Lq, d]`` and candidates ``[Nq, K, Ld, d]``.
    """
    (Nq, Lq, _), (K, Ld) = Q.shape, D.shape[1:3]
    store = D[0].flatten(0, 1) if Nq else D.flatten(0, 2)
    packed = Q.flatten(0, 1)
    cu_seqlens_q, cu_seqlens_d = (torch.arange(n + 1, device=Q.device) * L for n, L in ((Nq, Lq), (K, Ld)))
    keywords = {**options, "q_weight": None if weight is None else weight.flatten()}
    make("maxsim_varlen", partial(maxsim_varlen, packed, store, cu_seqlens_q, cu_seqlens_d, **keywords), packed, store)
    offsets = cu_seqlens_d[:-1].expand(Nq, K).contiguous()
    candidates_call = partial(maxsim_candidates_varlen, packed, store, offsets, torch.full_like(offsets, Ld))
    make("maxsim_candidates_varlen", partial(candidates_call, cu_seqlens_q=cu_seqlens_q, **keywords), packed, store)
    pairs = torch.cartesian_prod(torch.arange(Nq, device=Q.device), torch.arange(K, device=Q.device))
    bounds: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_d": cu_seqlens_d, "max_seqlen_q": Lq}
    make("maxsim_pair_list", partial(maxsim_pair_list, packed, store, pairs, **bounds, **keywords), packed, store)
    lengths = torch.full((Nq,), Lq, device=Q.device), torch.full((Nq, K), Ld, device=Q.device)
    make("maxsim_padded", partial(maxsim_padded, Q, D, *lengths, q_weight=weight, **options), Q, D)


def _as_sizes(name: str, value: Any) -> tuple[int, ...]:
    """Return one or several sizes as a tuple, which may be empty only for `top_k`."""
    sizes = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not sizes and name != "top_k":
        raise ValueError(f"warmup: {name}: expected at least one size, got none")
    for n in sizes:
        check_count("warmup", name, n, 1)
    return sizes
