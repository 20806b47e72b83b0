"""Dense int8, FP8 and code documents on sm_90.

`maxsim_forward_sm90` multiplies the documents by query rows of int8 terms or of fp16.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...core.arguments import make_metadata_key
from ...core.plan_cache import plans
from ...core.segments import PackedArgs
from ...csrc_triton.common.arguments import EncodedDocumentArgs, Sm90Config
from ...csrc_triton.formats.bits import get_code_bits, has_sign_queries, is_rotated
from ...formats.table import OPERAND_FORMATS, EncodedTokens
from .. import choose, supports
from ..runtime import gluon, launcher
from ..runtime.arguments import architecture, use_device
from ..tuning import sm90_configs
from .query_rotation import transform_queries
from .sm90_dense import Sm90Plan


class QuantizedArgs(NamedTuple):
    """The tensors of a call with all their axes, and `scale` expanded to ``[Nd, Ld]``."""

    Q: Tensor
    D: Tensor
    q_mask: Tensor | None
    q_weight: Tensor | None
    scale: Tensor


class QuantizedPlan(Sm90Plan):
    """A plan like `Sm90Plan` for encoded documents.

    For int8 documents with two terms, row tiles hold 128 query tokens, and a part of a longer query holds 64. With one
    term they hold twice as many.

    The plan is made from Q itself. `forward` rounds binary queries to signs, and rotates queries for rotated documents.
    The strides of the result depend on the strides of Q only.
    """

    instead = "maxsim_forward_packed"

    def __init__(self, choice: sm90_configs.Sm90Choice, Q: Tensor, data: Tensor, scale: Tensor) -> None:
        super().__init__(choice, Q, data, None)
        C = choice.config
        assert isinstance(C, Sm90Config)
        self.has_codes = get_code_bits(C.ENCODING) > 0
        self.transforms = has_sign_queries(C.ENCODING) or is_rotated(C.ENCODING)
        self.each_token = C.PRECOMPUTED_SCALES and supports.copies_token_scales(C)
        self.expanded = None if scale.shape == data.shape[:2] else data.shape[:2]  # the shape of shared scales
        self.read_as = data.dtype

    def forward(  # type: ignore[override]
        self, Q: Tensor, stored: EncodedTokens, q_mask: Tensor | None, q_weight: Tensor | None
    ) -> Tensor | None:
        """Return the scores of a call, or None if `maxsim_forward_packed` has to serve."""
        scale = stored.scale if self.expanded is None else stored.scale.expand(self.expanded)
        data = stored.data
        if self.has_codes and not _has_words(data):
            return None
        data = data if data.dtype == self.read_as else data.view(self.read_as)
        Q = transform_queries(stored, Q) if self.transforms else Q
        x = QuantizedArgs(Q, data, q_mask, q_weight, scale)
        try:
            outputs = self.calls.run((), x, self.device, self._compute, x)
        except launcher.KernelCompileError as error:
            launcher.warn_fallback(error, self.instead)
            return None
        return None if outputs is None else outputs[0]

    def _compute(self, x: QuantizedArgs) -> tuple[Tensor] | None:
        """Return the scores, or None if TMA cannot read the documents or their scales."""
        if x.D.data_ptr() % 16 or (self.each_token and x.scale.data_ptr() % 16):
            return None
        scores = self.allocate_scores(self.scores_shape, self.score_strides[2])
        with use_device(self.device):
            self._score(x, scores, None)  # type: ignore[arg-type]
        return (scores,)

    def _part(self, x: Any, part: slice) -> Any:
        return x._replace(D=x.D[part], scale=x.scale[part])

    def _tokens(self, D: Tensor, sizes: Any) -> Any:
        if not self.has_codes:
            return super()._tokens(D, sizes)
        return gluon.make_vector_descriptor(D, self.choice.config.BN * D.shape[-1])  # words

    def _norms(self, x: Any, sizes: Any) -> tuple[Any, Tensor | None]:
        if not self.each_token:
            return None, None
        return gluon.make_vector_descriptor(x.scale, self.choice.config.BN), None

    def _make_encoded_args(self, x: Any) -> EncodedDocumentArgs:
        return EncodedDocumentArgs(x.D, x.scale, *x.scale.stride())


def _has_words(data: Tensor) -> bool:
    """Return whether the bytes of codes are whole, aligned words."""
    is_aligned = data.is_contiguous() and data.shape[-1] % 4 == 0 and data.data_ptr() % 4 == 0
    return bool(is_aligned and data.storage_offset() % 4 == 0)


def _view_for_kernel(stored: EncodedTokens, Q: Tensor) -> Tensor | None:
    """Return encoded documents as the kernel reads them for queries, or None if words are not aligned.

    They are int8, words of codes, or FP8 next to FP8 queries.
    """
    data = stored.data
    if get_code_bits(OPERAND_FORMATS[stored.format].kernel):
        return data.view(torch.int32) if _has_words(data) else None
    if choose.rounds_to_fp8(stored.format, Q):
        return data.view(torch.float8_e4m3fn)
    return data if data.dtype == torch.int8 else data.view(torch.int8)


def find_plan(c: PackedArgs, stored: EncodedTokens) -> QuantizedPlan | Literal[False]:
    """Return the cached plan of a cross product of dense queries and dense documents without a mask.

    Return False if `maxsim_forward_packed` has to serve.

    Args:
        c: the call.
        stored: the documents with their axes.
    """
    data, scale = _view_for_kernel(stored, c.Q), stored.scale
    if data is None:
        return False
    metadata = make_metadata_key(c.Q, data, c.q_mask, None, c.q_weight)
    key = ("QuantizedPlan", *metadata, scale.shape, scale.stride(), stored.format)
    plan = plans.get(key)
    if plan is None:
        call = choose.QuantizedChoiceArgs(c, stored, False, False, architecture(c.Q.device))
        choice = choose.apply_rules(choose.QUANTIZED_RULES, call)
        is_sm90 = isinstance(choice, sm90_configs.Sm90Choice)
        plan = plans.store(key, is_sm90 and QuantizedPlan(choice, c.Q, data, scale))
    return plan
