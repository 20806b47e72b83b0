"""Dense int8 and FP8 documents on sm_90: `maxsim_forward_specialized` beside query rows of int8 terms or of fp16."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.arguments import metadata
from ...core.segments import Cut
from ...csrc_triton.common.arguments import Numbers
from ...formats.table import FORMATS, Stored
from .. import choose
from ..runtime import gluon, launcher
from ..runtime.arguments import architecture, on_device
from ..tuning import sm90_configs
from ..tuning.forward_configs import TERMS
from .sm90_dense import SpecializedPlan

_MOST_PLANS = 4096
_UNKNOWN: Any = object()
_plans: dict[tuple, NumbersPlan | None] = {}


class Inputs(NamedTuple):
    """The tensors of a call, with all their axes; `scale` expanded to ``[Nd, Ld]``."""

    Q: Tensor
    D: Tensor
    q_mask: Tensor | None
    q_weight: Tensor | None
    scale: Tensor


class NumbersPlan(SpecializedPlan):
    """As `SpecializedPlan`. Beside int8 row tiles hold 128 query tokens, and parts of a longer query 64.

    Of one term they hold twice as many.
    """

    instead = "maxsim_forward_ragged"

    def __init__(self, choice: sm90_configs.Specialized, Q: Tensor, data: Tensor) -> None:
        super().__init__(choice, Q, data, None)
        self.each_token = choice.config.GIVEN and not choice.config.STORED  # type: ignore[union-attr]

    def forward(self, x: Inputs) -> Tensor | None:  # type: ignore[override]
        """The scores, or None where another kernel has to serve."""
        if x.D.data_ptr() % 16 or (self.each_token and x.scale.data_ptr() % 16):
            return None
        scores = self.new_scores(self.scores_shape, self.score_strides[2])

        def fill() -> tuple[Tensor, ...]:
            with on_device(self.device):
                self._score(x, scores, None)  # type: ignore[arg-type]
            return ()

        try:
            self.calls.run((), (*x, scores), self.device, fill)
        except launcher.DoesNotCompile as error:
            launcher.fall_back(error, self.instead)
            return None
        return scores

    def _part(self, x: Any, part: slice) -> Any:
        return x._replace(D=x.D[part], scale=x.scale[part])

    def _norms(self, x: Any, sizes: Any) -> tuple[Any, Tensor | None]:
        if not self.each_token:
            return None, None
        return gluon.tiles((self.choice.config.BN,), torch.float32).of(x.scale, [x.scale.numel()], [1]), None

    def _numbers(self, x: Any) -> Numbers:
        return Numbers(x.D, x.scale, *x.scale.stride())


def forward(c: Cut, stored: Stored) -> Tensor | None:
    """The scores of the cross product of dense queries, and dense documents without mask; None where
    `maxsim_forward_ragged` serves. `stored` has the axes of documents."""
    data, scale = stored.data, stored.scale
    data = data if data.dtype == torch.int8 else data.view(torch.int8)
    key = (*metadata(c.Q, data, c.q_mask, None, c.q_weight), scale.shape, scale.stride(), stored.format)
    plan = _plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        arch, terms = architecture(c.Q.device), TERMS.get(stored.format)
        if terms:
            choice = choose.int8(c.Q, data, scale, terms, arch)
        else:
            choice = choose.fp8(c.Q, data, FORMATS[stored.format].kernel, arch)
        plan = _plans[key] = None if choice is None else NumbersPlan(choice, c.Q, data)
    if plan is None:
        return None
    each = scale if scale.shape == data.shape[:2] else scale.expand(data.shape[:2])
    return plan.forward(Inputs(c.Q, data, c.q_mask, c.q_weight, each))


def forget() -> None:
    """Drop what was worked out from the table of configurations."""
    _plans.clear()
