"""Parts of Gluon whose names differ between versions of Triton."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# The older names are those of Triton 3.6 and 3.7; 3.8 has `async_load` too, 3.9 only the newer ones.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_descriptor = gl.shared_memory_descriptor
reinterpret = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret
