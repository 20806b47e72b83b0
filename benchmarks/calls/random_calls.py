"""Random calls of all scoring functions: their inputs, the work they need at least, and compositions that do the same.

A composition gives the scores of a call with other functions of lik_ops and PyTorch. A call that is slower than its
composition has the wrong kernel, configuration or plan.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import lik_ops

from ..support.common import Case, Inputs

MOST_OPERATIONS, MOST_ELEMENTS = 4e11, 1e8  # elements of documents, hidden states and argmax
LENGTHS_PER_KIND = 2  # query lengths of a kind, because they select tiles
SPLIT_SCALE = 256.0  # fp32 tokens of norm 1 times this have both fp16 terms in the normal range
DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "tf32": "float32"}
# The rate whose products a call needs, and how many of them. Exact fp32 is three products of fp16 terms, and TF32 is
# one. Half-precision queries are two int8 terms.
PRODUCTS = {"bfloat16": ("bfloat16", 1), "float16": ("float16", 1), "float32": ("float16", 3), "tf32": ("float16", 1)}
FORMATS = {
    "int8": ("int8", "half"),
    "int8 x int8": ("int8", "int8"),
    "uint8": ("uint8", "half"),
    "fp8": ("fp8_e4m3", "half"),
    "binary": ("binary", "half"),
    "rq4": ("rq4", "half"),
}
FORMAT_PRODUCTS = {"int8": ("int8", 2), "int8 x int8": ("int8", 1), "binary": ("int8", 2)}
OPTIONS = ("plain", "weighted", "prefix", "holes", "argmax", "normalize", "step", "candidates", "packed", "soft")
OPTIONS += ("hidden", "hidden, not normalized", *FORMATS)
DRAWN_DTYPES = ("bfloat16", "float32", "bfloat16", "tf32", "bfloat16", "float16")  # of a kind, in this order
HALF_DTYPES = ("bfloat16", "float16")
HALF_ONLY = ("int8", "int8 x int8", "fp8", "binary")  # options that are drawn in half precision
# Compositions with other bits than the call promises. They are recorded and not demanded.
NOT_DEMANDED = ("projected queries",)


@dataclass(frozen=True)
class Call:
    """A random call. `dtype` is a key of `DTYPES`, and `width` the features of hidden states, if there are any."""

    number: int
    option: str
    dtype: str
    Nq: int
    Nd: int
    Lq: int
    Ld: int
    d: int
    width: int = 0

    def __str__(self) -> str:
        width = f" from {self.width}" if self.width else ""
        sizes = f"{self.Nq} x {self.Nd}, {self.Lq}/{self.Ld}, d {self.d}{width}"
        return f"{self.number}: {self.option}, {self.dtype}, {sizes}"

    def case(self) -> Case:
        """Return the benchmark case with the tensors of this call."""
        return Case(
            str(self),
            self.Nq,
            self.Nd,
            self.Lq,
            self.Ld,
            self.d,
            DTYPES[self.dtype],
            mask=self.option if self.option in ("prefix", "holes") else "prefix" if self.option == "packed" else "",
            normalize=self.option == "normalize",
            weighted=self.option == "weighted",
            candidates=self.option == "candidates",
        )

    def fits(self) -> bool:
        """Return whether the call needs moderate time and memory, and has a kept token in each document."""
        case = self.case()
        if case.mask and self.Ld == 1:
            return False
        elements = case.documents * self.Ld * max(self.d, self.width) + self.Nq * self.Nd * self.Lq
        return case.operations * max(1, self.width // self.d) <= MOST_OPERATIONS and elements <= MOST_ELEMENTS


class Sizes(NamedTuple):
    """The values that sizes are drawn from. A value that is listed twice is drawn twice as often."""

    Nq: tuple[int, ...]
    Nd: tuple[int, ...]
    Lq: tuple[int, ...]
    Ld: tuple[int, ...]
    d: tuple[int, ...]
    width: tuple[int, ...]


GPU_SIZES = Sizes(
    Nq=(1, 1, 2, 4, 8, 16, 32, 64, 128, 256),
    Nd=(1, 8, 32, 64, 100, 200, 256, 500, 1000, 2000, 10_000),
    Lq=(1, 8, 16, 20, 32, 32, 48, 64, 128, 256, 1024),
    Ld=(1, 20, 64, 100, 128, 180, 256, 300, 300, 512, 777, 1024, 2048, 8192),
    d=(48, 64, 96, 128, 128, 128, 128, 160, 192, 256, 320, 512, 768, 1024),
    width=(384, 768, 1024),
)
CPU_SIZES = Sizes((1, 2), (1, 3), (2, 5), (4, 9), (16, 20), (24, 32))


def draw_calls(seed: int, count: int, kinds: int, sizes: Sizes) -> Iterator[Call]:
    """Yield `count` random calls of `kinds` combinations of option, dtype and d, and of few query lengths each.

    Kernels are compiled for each combination, so the number of combinations decides the time of compiling. Options and
    dtypes alternate, and sizes are drawn until a call fits.
    """
    draw = random.Random(seed)
    found: list[tuple[str, str, int, int, tuple[int, ...]]] = []
    for n in range(kinds):
        option = OPTIONS[n % len(OPTIONS)]
        names = HALF_DTYPES if option in HALF_ONLY else DRAWN_DTYPES
        width = draw.choice(sizes.width) if option.startswith("hidden") else 0
        lengths = tuple(draw.choice(sizes.Lq) for _ in range(LENGTHS_PER_KIND))
        found.append((option, names[(n + n // len(OPTIONS)) % len(names)], draw.choice(sizes.d), width, lengths))
    for number in range(count):
        option, dtype, d, width, lengths = found[number % kinds]
        call = None
        while call is None or not call.fits():
            Nq, Nd, Lq, Ld = (draw.choice(x) for x in (sizes.Nq, sizes.Nd, lengths, sizes.Ld))
            call = Call(number, option, dtype, Nq, Nd, Lq, Ld, d, width)
        yield call


class Prepared(NamedTuple):
    """A call that is ready to run, and the least work it needs."""

    function: Callable[[], Tensor]  # gives scores
    compositions: Mapping[str, Callable[[], Tensor]]
    bytes: int
    operations: int
    rate: str
    products: int

    def floor_ms(self, rates: Mapping[str, float]) -> float:
        """Return the time of reading and writing, of multiplying, or of a launch, whichever is longest.

        `rates` has GB/s as ``gbs``, the time of an empty kernel as ``empty_ms``, and TFLOP/s of each dtype.
        """
        moved, multiplied = self.bytes / rates["gbs"] / 1e6, self.operations * self.products / rates[self.rate] / 1e9
        return max(moved, multiplied, rates["empty_ms"])


def prepare(call: Call, device: str) -> Prepared:
    """Allocate the inputs of a call."""
    x = Inputs(call.case(), device)
    plain = partial(lik_ops.maxsim, x.Q, x.D, **x.options)
    case = call.case()
    made = Prepared(plain, {}, case.bytes, case.operations, *PRODUCTS[call.dtype])
    if call.option in FORMATS:
        return _prepare_format(call, x, made)
    if call.option.startswith("hidden"):
        return _prepare_hidden(call, x, made, device)
    return _PREPARE[call.option](x, made, call)


def _prepare_plain(x: Inputs, made: Prepared, call: Call) -> Prepared:
    by: dict[str, Callable[[], Tensor]] = {"argmax": lambda: lik_ops.maxsim_with_argmax(x.Q, x.D)[0]}
    if call.dtype == "float32":
        by["three half products"] = lambda: _score_split(x.Q, x.D)
    if call.dtype == "tf32":
        by["one half product"] = lambda: lik_ops.maxsim(x.Q.half(), x.D.half())
    return made._replace(compositions=by)


def _score_split(Q: Tensor, D: Tensor) -> Tensor:
    """Return the scores of fp32 tokens from two fp16 terms of each, concatenated along the features."""

    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        scaled = x * SPLIT_SCALE
        high = scaled.half()
        return high, (scaled - high).half()

    (q, q_low), (d, d_low) = split(Q), split(D)
    return lik_ops.maxsim(torch.cat([q, q, q_low], -1), torch.cat([d, d_low, d], -1)) / SPLIT_SCALE**2


def _prepare_prefix(x: Inputs, made: Prepared, call: Call) -> Prepared:
    assert x.doc_lengths is not None and x.d_mask is not None
    mask, bounds = x.d_mask, F.pad(x.doc_lengths.cumsum(0, dtype=torch.int32), (1, 0))
    by_packing = partial(lambda: lik_ops.maxsim_varlen(x.Q, x.D[mask], None, bounds))
    return _keep_documents(made._replace(compositions={"packing": by_packing}), call, mask)


def _keep_documents(made: Prepared, call: Call, mask: Tensor) -> Prepared:
    """Count only the tokens that `mask` keeps."""
    kept, element = int(mask.sum()), getattr(torch, DTYPES[call.dtype]).itemsize
    lost = (mask.numel() - kept) * call.d * element
    return made._replace(bytes=made.bytes - lost, operations=made.operations * kept // max(mask.numel(), 1))


def _prepare_packed(x: Inputs, made: Prepared, call: Call) -> Prepared:
    assert x.doc_lengths is not None and x.d_mask is not None
    mask, bounds = x.d_mask, F.pad(x.doc_lengths.cumsum(0, dtype=torch.int32), (1, 0))
    store = x.D[mask]

    def pad() -> Tensor:
        padded = store.new_zeros((*mask.shape, store.shape[-1]))
        padded[mask] = store
        return lik_ops.maxsim(x.Q, padded, None, mask)

    by = {"padding": pad}
    return _keep_documents(
        made._replace(function=lambda: lik_ops.maxsim_varlen(x.Q, store, None, bounds), compositions=by), call, mask
    )


def _prepare_normalize(x: Inputs, made: Prepared, call: Call) -> Prepared:
    def by_hand() -> Tensor:
        return lik_ops.maxsim(*(F.normalize(t.float(), dim=-1).to(t.dtype) for t in (x.Q, x.D)))

    return made._replace(compositions={"by hand": by_hand})


def _prepare_argmax(x: Inputs, made: Prepared, call: Call) -> Prepared:
    argmax_bytes = replace(call.case(), what="winners").bytes
    return made._replace(function=lambda: lik_ops.maxsim_with_argmax(x.Q, x.D)[0], bytes=argmax_bytes)


def _prepare_step(x: Inputs, made: Prepared, call: Call) -> Prepared:
    """Prepare scores and the gradients of Q and D. The backward reads both tokens again and writes both gradients."""
    Q, D = x.Q.requires_grad_(), x.D.requires_grad_()

    def step(backward: str) -> Tensor:
        with torch.enable_grad():
            scores = lik_ops.maxsim(Q, D, backward=backward)  # type: ignore[arg-type]
        torch.autograd.grad(scores, (Q, D), x.grad_scores.to(scores))
        return scores.detach()

    winners = replace(call.case(), what="winners").bytes + call.case().winners
    tokens = (Q.numel() + D.numel()) * Q.element_size()
    by = {how: partial(step, how) for how in ("lowmem", "unified")}
    return made._replace(function=partial(step, "auto"), compositions=by, bytes=winners + 2 * tokens)


def _prepare_candidates(x: Inputs, made: Prepared, call: Call) -> Prepared:
    def one_by_one() -> Tensor:
        return torch.cat([lik_ops.maxsim(q[None], d) for q, d in zip(x.Q, x.D, strict=True)])

    return made._replace(compositions={"one by one": one_by_one} if call.Nq <= 4 else {})


def _prepare_soft(x: Inputs, made: Prepared, call: Call) -> Prepared:
    return made._replace(function=lambda: lik_ops.maxsim_soft(x.Q, x.D, 0.1))


def _prepare_others(x: Inputs, made: Prepared, call: Call) -> Prepared:
    return made


_PREPARE: dict[str, Callable[[Inputs, Prepared, Call], Prepared]] = {
    "plain": _prepare_plain,
    "weighted": _prepare_others,
    "prefix": _prepare_prefix,
    "holes": _prepare_others,
    "argmax": _prepare_argmax,
    "normalize": _prepare_normalize,
    "step": _prepare_step,
    "candidates": _prepare_candidates,
    "packed": _prepare_packed,
    "soft": _prepare_soft,
}


def _prepare_format(call: Call, x: Inputs, made: Prepared) -> Prepared:
    """Prepare documents in a format, compared with dequantized ones, and bits with the same documents in int8."""
    name, query = FORMATS[call.option]
    D = lik_ops.quantize(x.D, name, query=query)  # type: ignore[arg-type]
    by: dict[str, Callable[[], Tensor]] = {"dequantize": lambda: lik_ops.maxsim(x.Q, D.dequantize())}
    if call.option == "binary":
        as_int8 = lik_ops.quantize(D.dequantize(), "int8")
        by["int8 documents"] = lambda: lik_ops.maxsim(x.Q, as_int8)
    size = made.bytes - x.D.numel() * x.D.element_size() + D.nbytes
    rate = FORMAT_PRODUCTS.get(call.option, PRODUCTS[call.dtype])
    return Prepared(lambda: lik_ops.maxsim(x.Q, D), by, size, made.operations, *rate)


def _prepare_hidden(call: Call, x: Inputs, made: Prepared, device: str) -> Prepared:
    """Prepare hidden states and a head, compared with a linear layer, a normalization and `maxsim`."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=x.Q.dtype)

    unit, element = call.option == "hidden", x.Q.element_size()
    H, W, b = draw(call.Nd, call.Ld, call.width), draw(call.d, call.width) / call.width**0.5, draw(call.d) / 4

    def by_hand() -> Tensor:
        tokens = F.linear(H, W, b)
        return lik_ops.maxsim(x.Q, F.normalize(tokens, dim=-1) if unit else tokens)

    by: dict[str, Callable[[], Tensor]] = {"by hand": by_hand}
    if not unit:
        by["projected queries"] = lambda: lik_ops.maxsim(x.Q @ W, H) + lik_ops.maxsim(x.Q, b[None, None])
    size = made.bytes + (H.numel() - x.D.numel() + W.numel()) * element
    work = made.operations + 2 * H.numel() * call.d
    scores = partial(lik_ops.maxsim_from_hidden, x.Q, H, W, b, normalize=unit)
    return made._replace(function=scores, compositions=by, bytes=size, operations=work)
