"""Gluon functions whose names differ between versions of Triton."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.6 and 3.7 have only the older names. Triton 3.8 also has `async_load`, and 3.9 has only the newer names.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_descriptor = gl.shared_memory_descriptor
reinterpret = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret
