"""The operators of the ``lik::`` library. Importing this package registers them, once per process."""

from . import chamfer, cross_entropy, head, maxsim, quantized, ragged, saved, soft, token_topk, topk, topk_codes, xtr  # noqa: F401
from .stack import compile_cache, flops

flops.register()
compile_cache.tag()
