"""Fixtures for tests of GPU kernels."""

import pytest

from lik_ops.core import settings
from lik_ops.ops.fast_path import eager


@pytest.fixture
def force_kernel(monkeypatch):
    """Force the kernels of a family, as ``LIK_OPS_KERNEL`` does."""

    def reread():
        settings.get_forced_kernel.cache_clear()
        eager.clear_call_caches()

    def force(family):
        monkeypatch.setenv("LIK_OPS_KERNEL", family)
        reread()

    yield force
    monkeypatch.undo()
    reread()
