"""Test that a kernel has the same key in Triton's cache in each process, whichever kernels were compiled before it."""

import json
import subprocess
import sys

SCRIPT = """
import importlib, json, pkgutil, sys
from triton.runtime.jit import JITFunction
from lik_ops import csrc_triton
from lik_ops.gpu.triton_versions import fix_cache_key

found = pkgutil.walk_packages(csrc_triton.__path__, csrc_triton.__name__ + ".")
modules = [importlib.import_module(x.name) for x in found]
kernels = {f"{x.__module__}.{x.__name__}": x for m in modules for x in vars(m).values() if isinstance(x, JITFunction)}
keys = {}
for name in sorted(kernels, reverse=sys.argv[1] == "reversed"):
    fix_cache_key(kernels[name])
    keys[name] = kernels[name].cache_key
print(json.dumps(keys))
"""


def run(order):
    done = subprocess.run([sys.executable, "-c", SCRIPT, order], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_keys_do_not_depend_on_the_order_of_calls():
    first, last = run("sorted"), run("reversed")
    assert len(first) > 100 and first == last
