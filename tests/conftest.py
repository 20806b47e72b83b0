"""Test-wide settings."""

import os
import sys

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Before torch is imported, here and in processes that tests start: threads beyond the cores wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

import pytest
import torch
from hypothesis import HealthCheck, settings

# The compile caches on disk do not know the code below an operator: an old backward could be served.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

for name, examples in (("default", 60), ("quick", 15), ("thorough", 600)):
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile(os.environ.get("LIK_OPS_HYPOTHESIS", "default"))


@pytest.fixture(autouse=True)
def _nothing_to_replay():
    """What a test changes of the backend, or watches of its launches, no call of another test may have recorded."""
    if (replay := sys.modules.get("lik_ops.gpu.replay")) is not None:
        replay.Calls.forget()


@pytest.fixture(autouse=True)
def _seed_and_poison():
    """Fixed seeds; and torch.empty filled with NaN, so that an output element that nobody writes is seen."""
    torch.manual_seed(0)
    before = torch.utils.deterministic.fill_uninitialized_memory
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = before


def _ordered_products():
    """Let Triton's interpreter sum products in one order. BLAS has, on some processors, one for each shape, and which
    bits of a score the kernels may change by their tiles is what tests look at."""
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        x, y = (t.data.astype(d.data.dtype) for t in (a, b))
        total = np.zeros_like(d.data)
        for k in range(x.shape[-1]):
            total += x[..., k, None] * y[..., k, None, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _reduced_slices():
    """Let Triton's interpreter reduce slice by slice. It combines number by number, which takes most of the time of all
    tests; the order is the same."""
    import numpy as np
    from triton.runtime import interpreter

    by_numbers = interpreter.ReduceOps.generic_reduce

    def generic_reduce(self, inputs):
        if self.axis is None:
            return by_numbers(self, inputs)
        slices = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
        total, *others = (
            tuple(self.to_tensor(x[n], y.dtype) for x, y in zip(slices, inputs, strict=True))
            for n in range(len(slices[0]))
        )
        for other in others:
            total = self.combine_fn.fn(*total, *other)
            total = total if isinstance(total, tuple) else (total,)
        found = [x.handle.data.reshape(slices[0].shape[1:]) for x in total]
        if self.keep_dims:
            found = [np.expand_dims(x, self.axis) for x in found]
        return [self.to_tensor(x, y.dtype) for x, y in zip(found, inputs, strict=True)]

    interpreter.ReduceOps.generic_reduce = generic_reduce


def _patched_once():
    """Let Triton's interpreter patch the language once a launch. It does so again for each call of a function."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, run, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_lang(fn):
        languages = frozenset(id(x) for x in fn.__globals__.values() if x is tl or x is tl.core)
        if languages in patched:
            return None
        patched.add(languages)
        return patch(fn)

    def call(self, *args, **kwargs):
        patched.clear()
        try:
            return run(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call


if os.environ.get("TRITON_INTERPRET") == "1":
    _ordered_products()
    _patched_once()
    _reduced_slices()


def pytest_addoption(parser):
    parser.addoption("--part", help="1/2: the tests of every other file, 2/2: those of the rest")


def part_of(names, part):
    """Of names, those of one of several parts: ``part_of(names, "2/3")`` is every third from the second on."""
    number, count = map(int, part.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"--part: expected 1/{count} to {count}/{count}, got {part}")
    return sorted(set(names))[number - 1 :: count]


def pytest_collection_modifyitems(config, items):
    if part := config.getoption("--part"):
        chosen = set(part_of((str(item.path) for item in items), part))
        config.hook.pytest_deselected(items=[item for item in items if str(item.path) not in chosen])
        items[:] = [item for item in items if str(item.path) in chosen]
    items.sort(key=lambda item: "test_interpreter" not in item.nodeid)  # minutes each: none may be the last to begin
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA or ROCm GPU on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
