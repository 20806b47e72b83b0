"""The operators of the ``lik::`` library. Importing this package registers them, once per process."""

from . import compile_cache, maxsim, ragged, topk  # noqa: F401

compile_cache.tag()
