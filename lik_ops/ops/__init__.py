"""Operators of the ``lik::`` library. Importing this package registers them, once per process."""

from ..families.chamfer import ops as chamfer_ops  # noqa: F401
from ..families.head import ops as head_ops  # noqa: F401
from ..families.loss import ops as loss_ops  # noqa: F401
from ..families.soft import ops as soft_ops  # noqa: F401
from ..families.token_topk import ops as token_topk_ops  # noqa: F401
from ..families.xtr import ops as xtr_ops  # noqa: F401
from . import maxsim, quantized, ragged, saved, topk, topk_codes  # noqa: F401
from .stack import compile_cache, flops

flops.register_formulas()
compile_cache.tag_cache_key()
