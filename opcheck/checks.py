"""The checks of operators: each accepts an operator's name, its table entry and a selection of samples.

A check raises if it fails. It returns the number of cases, so that a check without cases is visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lik_ops.opcheck.samples.inputs import OperatorCase, Sample
from lik_ops.opcheck.samples.table import OPERATORS, list_registered

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-5, torch.float64: 1e-12}
SIZES = ((3, 5, 4, 6), (2, 9, 31, 70), (7, 2, 8, 3), (4, 4, 4, 4), (2, 3, 100, 2), (5, 33, 2, 257))


def choose_dtypes(device: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes that are checked on a device."""
    return CPU_DTYPES if torch.device(device).type == "cpu" else GPU_DTYPES


class Selection(NamedTuple):
    """The samples to check on a device: every `every`-th of each dtype from `first` on.

    `dtypes` None selects all dtypes of the device.
    """

    device: str
    every: int = 1
    dtypes: tuple[torch.dtype, ...] | None = None
    first: int = 0


def _get_overload(name: str) -> torch._ops.OpOverload:
    """Return the default overload of an operator."""
    return getattr(torch.ops.lik, name).default


def _select_samples(op: OperatorCase, of: Selection) -> Iterator[Sample]:
    """Yield the selected samples of an operator."""
    for dtype in of.dtypes or choose_dtypes(of.device):
        yield from list(op.samples(dtype, of.device))[of.first :: of.every]


def _fail(name: str, sample: object, error: object) -> AssertionError:
    """Build the error of a sample."""
    return AssertionError(f"lik::{name}, sample {sample}: {error}")


def _as_outputs(result: object) -> tuple[Tensor, ...]:
    """Return the outputs of an operator as a tuple."""
    return (result,) if isinstance(result, Tensor) else tuple(result)  # type: ignore[arg-type]


def _of_tensors(function: Callable[[Tensor], Tensor], sample: Sample) -> tuple[tuple, dict]:
    """Apply a function to all tensors of a sample."""
    return tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, (sample.args, sample.kwargs))


def _is_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether infinities are equal and other values differ by at most `tolerance` times the largest element.

    The largest element is at least 1.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    finite = expected.isfinite()
    if not torch.equal(actual[~finite], expected[~finite]):
        return False
    largest = max(1.0, float(expected[finite].abs().max())) if bool(finite.any()) else 1.0
    return bool(((actual - expected)[finite].abs() <= tolerance * largest).all())


def check_opcheck(name: str, op: OperatorCase, of: Selection) -> int:
    """Run `torch.library.opcheck`: schema, aliasing, autograd registration, fake tensors, AOT with symbolic sizes."""
    count = 0
    for sample in _select_samples(op, of):
        try:
            torch.library.opcheck(_get_overload(name), sample.args, sample.kwargs)
        except Exception as error:
            raise _fail(name, sample, error) from error
        count += 1
    return count


def check_meta(name: str, op: OperatorCase, of: Selection) -> int:
    """Check that meta tensors give the sizes, strides and dtypes of the real outputs."""
    count = 0
    for sample in _select_samples(op, of):
        real = _as_outputs(_get_overload(name)(*sample.args, **sample.kwargs))
        args, kwargs = _of_tensors(lambda t: t.detach().to("meta").requires_grad_(t.requires_grad), sample)
        meta = _as_outputs(_get_overload(name)(*args, **kwargs))
        for r, m in zip(real, meta, strict=True):
            found, expected = (m.shape, m.stride(), m.dtype), (r.shape, r.stride(), r.dtype)
            if found != expected or not m.is_meta:
                raise _fail(name, sample, f"expected {expected} on meta tensors, got {found} on {m.device}")
        count += 1
    return count


def _convert_to_fp64(sample: Sample) -> tuple[tuple, dict]:
    """Convert floating-point tensors of a sample to fp64."""
    return _of_tensors(
        lambda t: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t, sample
    )


def check_values(name: str, op: OperatorCase, of: Selection) -> int:
    """Check outputs against the formula in fp64."""
    count = 0
    for sample in _select_samples(op, of):
        actual = _as_outputs(_get_overload(name)(*sample.args, **sample.kwargs))
        args, kwargs = _convert_to_fp64(sample)
        tolerance = max(TOLERANCE[t.dtype] for t in sample.args if isinstance(t, Tensor) and t.dtype in TOLERANCE)
        for i, (a, e) in enumerate(zip(actual, op.reference(*args, **kwargs), strict=True)):
            if e is not None and not (a.shape == e.shape and _is_close(a, e, tolerance)):
                raise _fail(name, sample, f"output {i} differs from the reference")
        count += 1
    return count


def _list_leaves(args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors that require a gradient."""
    return [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.requires_grad]


def check_gradients(name: str, op: OperatorCase, of: Selection) -> int:
    """Check gradients against gradients of the formula in fp64; an operator without gradients must raise."""
    count = 0
    for sample in _select_samples(op, of):
        leaves = _list_leaves(sample.args, sample.kwargs)
        if not leaves:
            continue
        scores = _as_outputs(_get_overload(name)(*sample.args, **sample.kwargs))[0]
        upstream = torch.randn(scores.shape, generator=torch.Generator().manual_seed(2)).to(scores)
        actual = torch.autograd.grad(scores, leaves, upstream)
        args, kwargs = _convert_to_fp64(sample)
        expected = torch.autograd.grad(
            op.reference(*args, **kwargs)[0], _list_leaves(args, kwargs), upstream.double(), materialize_grads=True
        )
        coarsest = max(TOLERANCE[t.dtype] for t in leaves)
        # Quantized documents are dequantized to fp32 for fp64 queries too.
        given = [t for t in sample.args if isinstance(t, Tensor) and t.dtype in TOLERANCE and not t.requires_grad]
        constant = max((TOLERANCE[t.dtype] for t in given), default=0.0)
        for i, (leaf, a, e) in enumerate(zip(leaves, actual, expected, strict=True)):
            # The gradient of a scalar tensor sums products of the other tensors, so it has their rounding errors.
            tolerance = max(TOLERANCE[leaf.dtype] if leaf.dim() else coarsest, constant)
            if a.dtype != leaf.dtype or not _is_close(a, e, tolerance):
                raise _fail(name, sample, f"gradient {i} differs from the reference")
        count += 1
    if not any(
        isinstance(t, Tensor) and t.requires_grad for s in _select_samples(op, of._replace(every=1)) for t in s.args
    ):
        count += _check_refuses_gradients(name, op, of)
    return count


def _check_refuses_gradients(name: str, op: OperatorCase, of: Selection) -> int:
    """Check that an operator without a derivative raises, instead of being treated as a constant."""
    sample = next(_select_samples(op, of))
    args, kwargs = _of_tensors(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), sample)
    outputs = _as_outputs(_get_overload(name)(*args, **kwargs))
    wanted = [t for t in outputs if t.numel()]
    try:
        sum(t.sum() for t in wanted).backward()  # type: ignore[union-attr]
    except NotImplementedError:
        return 1
    raise _fail(name, sample, "expected NotImplementedError from a derivative that does not exist")


def _list_layouts(t: Tensor) -> dict[str, Tensor]:
    """Return copies of a tensor with different strides and offsets, by name."""
    found = {"contiguous": t.clone(memory_format=torch.contiguous_format)}
    if t.dim() >= 2:
        found["permuted"] = t.transpose(0, -1).contiguous().transpose(0, -1)
        wide = torch.cat([t, t], dim=-1)
        found["sliced"] = wide[..., : t.shape[-1]]
        found["offset"] = wide[..., t.shape[-1] :]
    return found


def check_strides(name: str, op: OperatorCase, of: Selection) -> int:
    """Check that strides and offsets of inputs do not change results.

    Results must have equal bits on a CPU. On a GPU the order of sums may depend on strides, so results must be close.
    Inputs must not be written, and outputs must not share memory with inputs.
    """
    count, exact = 0, torch.device(of.device).type == "cpu"
    for sample in _select_samples(op, of):
        results = {}
        for layout in ("contiguous", "permuted", "sliced", "offset"):

            def place(t: Tensor, layout: str = layout) -> Tensor:
                """Return the tensor with the strides of `layout`."""
                layouts = _list_layouts(t.detach())
                return layouts.get(layout, layouts["contiguous"])

            args, kwargs = _of_tensors(place, sample)
            inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            before = [t.clone() for t in inputs]
            results[layout] = _as_outputs(_get_overload(name)(*args, **kwargs))
            if not all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)):
                raise _fail(name, sample, f"{layout}: an input was written")
            owned = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
            if any(t.numel() and t.untyped_storage().data_ptr() in owned for t in results[layout]):
                raise _fail(name, sample, f"{layout}: an output shares memory with an input")
        for layout, outputs in results.items():
            for a, e in zip(outputs, results["contiguous"], strict=True):
                same = torch.equal(a, e) if exact else _is_close(a, e, TOLERANCE.get(a.dtype, 0.0))
                if not same or a.stride() != e.stride():
                    raise _fail(name, sample, f"{layout} inputs give another result than contiguous ones")
        count += 1
    return count


def check_recompiles(name: str, op: OperatorCase, of: Selection) -> int:
    """Check that one dynamic compilation serves all sizes from 2 on.

    An axis of size 0 or 1 may add at most one compilation each.
    """
    count = 0
    # Operators without candidates have one layout only, and a selection of samples has only the cross product.
    shapes = [[getattr(x, "shape", None) for x in op.sized(SIZES[0], x, of.device)] for x in (False, True)]
    for candidates in (False,) if of.every > 1 or shapes[0] == shapes[1] else (False, True):
        torch.compiler.reset()
        with torch._dynamo.config.patch(recompile_limit=64):
            count += _count_compilations(name, op, of.device, candidates)
    torch.compiler.reset()
    return count


def _count_compilations(name: str, op: OperatorCase, device: str, candidates: bool) -> int:
    """Check the number of compilations of one layout, and return the number of sizes."""
    compilations, overload = 0, _get_overload(name)

    def backend(module: torch.fx.GraphModule, example_inputs: list) -> Callable:
        nonlocal compilations
        compilations += 1
        return module.forward

    compiled = torch.compile(lambda *args: overload(*args), backend=backend, fullgraph=True, dynamic=True)
    for sizes in SIZES:
        compiled(*op.sized(sizes, candidates, device))
        if compilations != 1:
            raise _fail(name, sizes, f"expected one compilation for all sizes, got {compilations} so far")
    odd_sizes = [(*SIZES[0][:axis], size, *SIZES[0][axis + 1 :]) for axis in range(4) for size in (1, 0)]
    for odd in odd_sizes:
        before = compilations
        for _ in range(2):
            compiled(*op.sized(odd, candidates, device))  # type: ignore[arg-type]
        if compilations > before + 1:
            raise _fail(name, odd, f"expected at most one compilation, got {compilations - before}")
    return len(SIZES) + len(odd_sizes)


CHECKS: dict[str, Callable[[str, OperatorCase, Selection], int]] = {
    "opcheck": check_opcheck,
    "meta": check_meta,
    "values": check_values,
    "gradients": check_gradients,
    "strides": check_strides,
    "recompiles": check_recompiles,
}
OF_ALL_DTYPES = ("recompiles",)  # checks that do not depend on samples and dtypes


def check_table() -> int:
    """Check that the table contains every registered operator and nothing else."""
    if list_registered() != set(OPERATORS):
        raise AssertionError(f"expected samples of {sorted(list_registered())}, found samples of {sorted(OPERATORS)}")
    return len(OPERATORS)
