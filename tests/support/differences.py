"""Describe how two tensors differ, for assertions in worker processes, of which a test only shows the output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SHOWN = 5  # numbers at most


def describe_difference(found: Tensor, expected: Tensor) -> str | None:
    """Return None if the tensors are equal, else a description of the different shape, dtype, or numbers."""
    for name in ("shape", "dtype"):
        a, e = getattr(found, name), getattr(expected, name)
        if a != e:
            return f"{name} {a}, expected {e}"
    differs = found != expected
    count = int(differs.sum())
    if count == 0:
        return None
    where = differs.nonzero()[:_SHOWN].tolist()
    each = [f"{at}: {found[tuple(at)].item()!r}, expected {expected[tuple(at)].item()!r}" for at in where]
    largest = (found.double() - expected.double())[differs].abs().max().item()
    return f"{count} of {found.numel()} numbers, by up to {largest:.3g}: " + "; ".join(each)


def assert_sharded_equal(name: str, found: Tensor, expected: Tensor, placements: Sequence | None = None) -> None:
    """Raise an AssertionError with the differences unless the DTensor has these placements and these numbers."""
    actual, full = found.placements, found.full_tensor()
    problems = []
    if placements is not None and tuple(actual) != tuple(placements):
        problems.append(f"placements {actual}, expected {tuple(placements)}")
    difference = describe_difference(full, expected)
    if difference is not None:
        problems.append(difference)
    assert not problems, f"{name}, rank {torch.distributed.get_rank()}: " + "; ".join(problems)
