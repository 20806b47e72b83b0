"""Settings and fixtures for all tests."""

import math
import os
import sys
import zlib
from collections import defaultdict

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Set before torch is imported, here and in processes that tests start. Threads beyond the cores wait for each
    # other.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

import pytest
import torch
from hypothesis import HealthCheck, settings

# The compile caches on disk do not track the code below an operator, so they could serve an old backward.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
# Tests score random tokens, which have no unit norm.
os.environ.setdefault("LIK_OPS_NORM_WARNING", "0")
# Without caches each process would compile trials of every vector width, which costs seven seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

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
    """Clear captured calls, because a test may patch the backend or watch launches."""
    if (replay := sys.modules.get("lik_ops.gpu.runtime.capture")) is not None:
        replay.Calls.forget()


@pytest.fixture(autouse=True)
def _seed_and_poison():
    """Fix the seeds, and fill the results of torch.empty with NaN so that unwritten output elements are detected."""
    torch.manual_seed(0)
    before = torch.utils.deterministic.fill_uninitialized_memory
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = before


if os.environ.get("TRITON_INTERPRET") == "1":
    from .support import interpreting

    interpreting.patch()


def pytest_addoption(parser):
    parser.addoption("--part", help="1/2: the tests of every other file, 2/2: those of the rest")
    parser.addoption("--sample", type=int, help="3: a third of the cases of each test function, at least 4")


def part_of(names, part):
    """Return one of several parts of `names`: ``part_of(names, "2/3")`` is every third name from the second on."""
    number, count = map(int, part.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"--part: expected 1/{count} to {count}/{count}, got {part}")
    return sorted(set(names))[number - 1 :: count]


def sample_of(names, divisor):
    """Return 1 / `divisor` of the cases of each function, at least 4. `names` are ids such as ``"test_a[case]"``.

    A case is chosen by the hash of its id, so that a case more changes few others.
    """
    functions = defaultdict(list)
    for name in sorted(names, key=lambda name: zlib.crc32(name.encode())):
        functions[name.partition("[")[0]].append(name)
    return [name for cases in functions.values() for name in cases[: max(4, math.ceil(len(cases) / divisor))]]


def deselect(config, items, is_chosen):
    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = [item for item in items if is_chosen(item)]


@pytest.hookimpl(trylast=True)  # after the selection by markers
def pytest_collection_modifyitems(config, items):
    if part := config.getoption("--part"):
        chosen = set(part_of((str(item.path) for item in items), part))
        deselect(config, items, lambda item: str(item.path) in chosen)
    if divisor := config.getoption("--sample"):
        kept = set(sample_of((item.nodeid for item in items), divisor))
        deselect(config, items, lambda item: item.nodeid in kept)
    items.sort(key=lambda item: "test_interpreter" not in item.nodeid)  # minutes each, so they start first
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = {"gpu": (1, "no CUDA or ROCm GPU on this machine"), "two_gpus": (2, "needs two GPUs")}
    for item in items:
        for name, (count, reason) in needed.items():
            if found < count and item.get_closest_marker(name):  # folder names are keywords too
                item.add_marker(pytest.mark.skip(reason=reason))
                break
