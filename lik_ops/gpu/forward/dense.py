"""Forward of dense layouts: the plan of each call, cached by the metadata of its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.arguments import make_metadata_key
from ...core.plan_cache import plans
from .. import choose
from ..generic_choices import GenericChoice, SplitChoice
from ..runtime.arguments import is_tf32_allowed
from ..tuning import sm90_configs
from .generic import GenericPlan
from .plans import DensePlan
from .sm90_dense import Sm90Fp32Plan, Sm90LargeDPlan, Sm90Plan
from .sm90_packed import MaskedPlan
from .splits import DocumentSplitPlan


def forward_plan(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
) -> DensePlan:
    """Return the cached plan for arguments of `lik::maxsim_fwd`, which are validated."""
    tf32 = is_tf32_allowed(Q.dtype)
    key = ("DensePlan", *make_metadata_key(Q, D, q_mask, d_mask, q_weight), normalize, argmax_dtype, tf32)
    return plans.get(key) or plans.store(key, make_plan(Q, D, d_mask, normalize, argmax_dtype))


def make_plan(
    Q: Tensor, D: Tensor, d_mask: Tensor | None, normalize: bool, argmax_dtype: torch.dtype | None
) -> DensePlan:
    """Return a plan of the kernel that `choose.choose_dense` selects."""
    choice = choose.choose_dense(Q, D, d_mask, normalize, argmax_dtype)
    if isinstance(choice, GenericChoice):
        return GenericPlan(choice, Q, D, argmax_dtype)
    if isinstance(choice, SplitChoice):
        return DocumentSplitPlan(choice, Q, D, argmax_dtype)
    if isinstance(choice, sm90_configs.RowMaximaChoice):
        return MaskedPlan(choice, Q, D, argmax_dtype)
    if Q.dtype == torch.float32 and not choice.is_small_m:
        return Sm90Fp32Plan(choice, Q, D, argmax_dtype)
    return (Sm90LargeDPlan if choice.has_large_d else Sm90Plan)(choice, Q, D, argmax_dtype)


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the scores and the argmax of `lik::maxsim_fwd` for the arguments of `forward_plan`."""
    plan = forward_plan(*arguments)
    return plan.forward(plan.scores_shape, arguments[:5], True)[0]
