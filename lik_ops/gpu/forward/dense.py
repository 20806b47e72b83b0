"""The forward of dense layouts: the plan of each call, kept by the metadata of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.arguments import metadata
from .. import choose
from ..runtime.arguments import allow_tf32
from ..tuning import sm90_configs
from .fp32_split import SplitPlan
from .generic import PlainPlan
from .plans import DensePlan
from .sm90_dense import SpecializedPlan, WidePlan
from .sm90_packed import MaskedPlan
from .splits import SectionsPlan

_MOST_PLANS = 4096
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
    tf32 = allow_tf32(Q.dtype)
    key = (*metadata(Q, D, q_mask, d_mask, q_weight), normalize, argmax_dtype, tf32)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = new_plan(Q, D, d_mask, normalize, argmax_dtype)
    return plan


def new_plan(
    Q: Tensor, D: Tensor, d_mask: Tensor | None, normalize: bool, argmax_dtype: torch.dtype | None
) -> DensePlan:
    """A plan of the kernel that `choose.dense` names."""
    choice = choose.dense(Q, D, d_mask, normalize, argmax_dtype)
    if isinstance(choice, choose.Plain):
        if choice.splits_first:
            return SplitPlan(choice, Q, D, argmax_dtype)
        return PlainPlan(choice, Q, D, argmax_dtype)
    if isinstance(choice, choose.Sectioned):
        return SectionsPlan(choice, Q, D, argmax_dtype)
    if isinstance(choice, sm90_configs.RowMaxima):
        return MaskedPlan(choice, Q, D, argmax_dtype)
    return (WidePlan if choice.is_wide else SpecializedPlan)(choice, Q, D, argmax_dtype)


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


def forget() -> None:
    """Drop what was worked out from the table of configurations."""
    _plans.clear()
