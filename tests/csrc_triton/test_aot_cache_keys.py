"""Test that a kernel has the same key in Triton's cache in each process, whichever kernels were compiled before it."""

import json
import subprocess
import sys
from collections import Counter

import pytest

SCRIPT = """
import importlib, json, pkgutil, sys
from triton.runtime.jit import JITFunction
from lik_ops import csrc_triton
from lik_ops.gpu.triton_versions import fix_cache_key

found = pkgutil.walk_packages(csrc_triton.__path__, csrc_triton.__name__ + ".")
modules = [importlib.import_module(x.name) for x in found]
kernels = {f"{x.__module__}.{x.__name__}": x for m in modules for x in vars(m).values() if isinstance(x, JITFunction)}
keys, constants = {}, {}
for name in sorted(kernels, reverse=sys.argv[1] == "reversed"):
    fix_cache_key(kernels[name])
    keys[name] = kernels[name].cache_key
    constants[name] = sorted({(x, str(value)) for (x, _), (value, _) in kernels[name].used_global_vals.items()})
print(json.dumps([keys, constants]))
"""


def run(order):
    done = subprocess.run([sys.executable, "-c", SCRIPT, order], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def sorted_run():
    return run("sorted")


def test_keys_do_not_depend_on_the_order_of_calls(sorted_run):
    (first, _), (last, _) = sorted_run, run("reversed")
    assert len(first) > 100 and first == last


def test_a_constant_of_a_kernel_has_one_value(sorted_run):
    # Triton sorts constants of the same name by the addresses of their modules' variables, so their order in the key
    # is random if their values differ.
    _, constants = sorted_run
    assert sum(map(len, constants.values())) > 100
    names = {kernel: Counter(name for name, _ in pairs) for kernel, pairs in constants.items()}
    assert not {(kernel, x) for kernel, counts in names.items() for x, count in counts.items() if count > 1}
