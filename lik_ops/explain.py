"""Explanation of a call for ``python -m lik_ops.info --explain``: rules of the choice, and all launches.

The host code of the call runs on meta tensors for an architecture, and launches are recorded instead of run. The
explanation therefore needs no GPU and names exactly what the call launches. The forward of a training step keeps its
argmax.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .core.arguments import choose_argmax_dtype
from .core.segments import DenseArgs, PackedArgs
from .formats.table import EncodedTokens

LAYOUTS = ("cross", "candidates", "packed", "listed", "pairs")
METHODS = ("lowmem", "unified")
_PAIRS = 512  # default length of a pair list


class CallDescription(NamedTuple):
    """A call of random tokens, without their values. All queries and all documents have the same length."""

    layout: str
    dtype: torch.dtype
    Nq: int
    Nd: int  # candidates of each query for "candidates" and "listed"
    Lq: int
    Ld: int
    d: int
    q_mask: bool = False
    d_mask: bool = False
    normalize: bool = False
    argmax: bool = False
    backward: str = ""  # "lowmem" or "unified" with gradients of Q and D
    quantized: str = ""  # format of the documents
    soft: bool = False  # soft MaxSim
    pairs: int = _PAIRS


class Launch(NamedTuple):
    """A launch of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the name of the kernel."""
        return self.kernel.__name__

    def describe(self) -> str:
        """Return the kernel, its file, grid, options, and configuration as text."""
        function = getattr(self.kernel, "fn", self.kernel)
        path = Path(inspect.getfile(function)).resolve()
        root = Path(__file__).resolve().parent.parent
        config = next((str(x) for x in reversed(self.args) if type(x).__name__.endswith("Config")), "")
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        location = path.relative_to(root) if path.is_relative_to(root) else path
        return f"{self.name} ({location}), grid {self.grid}, {options}" + f"\n    {config}" * bool(config)


class Explanation(NamedTuple):
    """The outcome of each rule in order, and the launches of forward and backward."""

    rules: list[tuple[str, Any]]  # kernel, and its choice or the reason why not
    forward: list[Launch]
    backward: list[Launch]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        for number, (kernel, choice) in enumerate(self.rules, 1):
            tile = f", {choice.tile()}" if hasattr(choice, "tile") else ""
            yield f"rule {number}: {kernel}: " + (f"no, {choice}" if isinstance(choice, str) else f"yes{tile}")
        for direction, launches in (("forward", self.forward), ("backward", self.backward)):
            for launch in launches:
                yield f"{direction}: {launch.describe()}"


def explain_call(call: CallDescription, arch: Any) -> Explanation:
    """Return the rules and launches of a call on an architecture, a `lik_ops.gpu.tuning.architectures.Architecture`.

    Raises:
        ValueError: no kernel serves the call.
    """
    from .gpu import backend
    from .gpu.runtime import arguments, launcher

    arguments.architecture.cache_clear()
    arguments.meta_architecture = arch
    backend.forget()
    try:
        with launcher.collect_launches() as forward:
            rules, run_backward = _run(call, arch)
        with launcher.collect_launches() as backward:
            if run_backward is not None:
                run_backward()
        return Explanation(rules, *([Launch(*x) for x in launches] for launches in (forward, backward)))
    finally:
        backend.forget()


def _run(call: CallDescription, arch: Any) -> tuple[list, Callable | None]:
    """Run the forward. Return the outcome of the rules, and a function that runs the backward, or None."""
    Q = _allocate(call.Nq, call.Lq, call.d, dtype=call.dtype)
    owners = (call.Nq, call.Nd) if call.layout == "candidates" else (call.Nd,)
    D = _allocate(*owners, call.Ld, call.d, dtype=call.dtype)
    masks = tuple(
        _allocate(*x.shape[:-1], dtype=torch.bool) if is_masked else None
        for x, is_masked in ((Q, call.q_mask), (D, call.d_mask))
    )
    x = DenseArgs._make((Q, D, *masks, None))
    if call.quantized:
        return _run_quantized(call, x, arch)
    if call.layout in ("packed", "listed", "pairs"):
        return _run_packed(call, x, arch)
    return _run_soft(call, x) if call.soft else _run_dense(call, x, arch)


def _allocate(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _apply(rules: Any, args: Any) -> list[tuple[str, Any]]:
    """Return the outcome of each rule up to the first one that serves the call."""
    outcomes: list[tuple[str, Any]] = []
    for rule in rules:
        outcomes.append((rule.kernel, rule.apply(args)))
        if not isinstance(outcomes[-1][1], str):
            break
    return outcomes


def _run_dense(call: CallDescription, x: DenseArgs, arch: Any) -> tuple[list, Callable | None]:
    """Run a call of dense tensors."""
    from .gpu import backend, choose

    dtype = choose_argmax_dtype(call.Ld) if call.argmax or call.backward else None
    args = choose.make_dense_args(x.Q, x.D, x.d_mask, call.normalize, dtype is not None, arch)
    rules = _apply(choose.DENSE_RULES, args)
    scores, argmax = backend.forward(*x, call.normalize, dtype)
    run = backend.backward_unified if call.backward == "unified" else backend.backward_lowmem
    backward = partial(run, scores, x.Q, x.D, argmax, *x[2:], call.normalize, [True, True, False])
    return rules, backward if call.backward else None


def _run_soft(call: CallDescription, x: DenseArgs) -> tuple[list, Callable | None]:
    """Run a call of soft MaxSim, whose forward has one kernel."""
    from .gpu import backend

    scores, lse = backend.forward_soft(x, 0.1, call.normalize, bool(call.backward))
    needs_grad = [True, True, False, False]
    backward = partial(backend.backward_soft, scores, x, lse, 0.1, call.normalize, needs_grad)
    return [], backward if call.backward else None


def _run_packed(call: CallDescription, x: DenseArgs, arch: Any) -> tuple[list, Callable | None]:
    """Run a call of packed tokens."""
    from .gpu import backend, choose

    Q, D = x.Q.flatten(0, 1), x.D.flatten(0, 1)
    masks = [None if t is None else t.flatten(0, 1) for t in x[2:4]]
    cu_q, offsets, lengths, pairs = _allocate(call.Nq + 1, dtype=torch.int32), None, None, None
    is_listed = call.layout == "listed"
    if call.layout == "packed":
        offsets = _allocate(call.Nd + 1, dtype=torch.int32)
    else:
        shape = (call.Nq, call.Nd) if is_listed else (call.Nd,)
        offsets, lengths = (_allocate(*shape, dtype=torch.int32) for _ in range(2))
        pairs = None if is_listed else _allocate(call.pairs, 2, dtype=torch.int64)
    max_seqlen_q = call.Lq if call.layout == "pairs" else Q.shape[0]
    c = PackedArgs.from_tensors((Q, D, cu_q, offsets, lengths, pairs, *masks, None), max_seqlen_q)
    dtype = choose_argmax_dtype(c.Td) if call.argmax or call.backward else None
    rules = _apply(choose.PACKED_RULES, choose.PackedChoiceArgs(c, call.normalize, dtype is not None, "", arch))
    scores, argmax = backend.ragged_plan(c, call.normalize, dtype).forward(c)
    if not call.backward:
        return rules, None
    assert argmax is not None
    args = scores, c, argmax, call.normalize, [True, True, False], call.backward == "unified"
    return rules, partial(backend.backward_cut, *args)


def _run_quantized(call: CallDescription, x: DenseArgs, arch: Any) -> tuple[list, Callable | None]:
    """Run a call of dense queries and quantized documents."""
    from .formats.quantize import quantize
    from .gpu import backend, choose

    sample = quantize(torch.zeros(1, 1, call.d), call.quantized).to_encoded()  # type: ignore[arg-type]
    data = _allocate(call.Nd, call.Ld, sample.data.shape[-1], dtype=sample.data.dtype)
    scale = _allocate(call.Nd, call.Ld, dtype=torch.float32)
    tokens = EncodedTokens(data, scale, None if sample.minimum is None else scale.clone(), sample.format)
    c = PackedArgs.from_tensors((x.Q, data, *(None,) * 4, x.q_mask, x.d_mask, None), call.Lq)
    dtype = choose_argmax_dtype(c.Td) if call.argmax else None
    args = choose.QuantizedChoiceArgs(c, tokens, call.normalize, call.argmax, arch)
    rules = _apply(choose.QUANTIZED_RULES, args)
    backend.forward_quantized_cut(c, tokens, call.normalize, dtype)
    return rules, None
