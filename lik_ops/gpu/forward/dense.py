"""The forward of dense layouts: the plan of each call, kept by the metadata of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.arguments import make_metadata_key
from .. import choose
from ..runtime.arguments import is_tf32_allowed
from ..tuning import sm90_configs
from .fp32_split import Fp32SplitPlan
from .generic import GenericPlan
from .plans import DensePlan
from .sm90_dense import Sm90LargeDPlan, Sm90Plan
from .sm90_packed import MaskedPlan
from .splits import DocumentSplitPlan

_MAX_PLANS = 4096
_plans: dict[tuple, DensePlan] = {}


def forward_plan(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
) -> DensePlan:
    """The plan for validated arguments that have all their axes."""
    tf32 = is_tf32_allowed(Q.dtype)
    key = (*make_metadata_key(Q, D, q_mask, d_mask, q_weight), normalize, argmax_dtype, tf32)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = make_plan(Q, D, d_mask, normalize, argmax_dtype)
    return plan


def make_plan(
    Q: Tensor, D: Tensor, d_mask: Tensor | None, normalize: bool, argmax_dtype: torch.dtype | None
) -> DensePlan:
    """A plan of the kernel that `choose.choose_dense` names."""
    choice = choose.choose_dense(Q, D, d_mask, normalize, argmax_dtype)
    if isinstance(choice, choose.GenericChoice):
        if choice.has_fp32_split:
            return Fp32SplitPlan(choice, Q, D, argmax_dtype)
        return GenericPlan(choice, Q, D, argmax_dtype)
    if isinstance(choice, choose.SplitChoice):
        return DocumentSplitPlan(choice, Q, D, argmax_dtype)
    if isinstance(choice, sm90_configs.RowMaximaChoice):
        return MaskedPlan(choice, Q, D, argmax_dtype)
    return (Sm90LargeDPlan if choice.has_large_d else Sm90Plan)(choice, Q, D, argmax_dtype)


def forward(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Scores [Nq, Nd] or [Nq, K] in fp32, and the winners (an empty tensor if `argmax_dtype` is None)."""
    plan = forward_plan(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype)
    return plan.forward(plan.scores_shape, (Q, D, q_mask, d_mask, q_weight), True)[0]


def clear_plans() -> None:
    """Drop what was worked out from the table of configurations."""
    _plans.clear()
