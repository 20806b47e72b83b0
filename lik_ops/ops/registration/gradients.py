"""Which function sums the gradients: ``"lowmem"`` or ``"unified"``, as a call names it. ``"auto"`` is ``"lowmem"``."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from ..._ops import ops as lik


def is_unified(backward: str) -> bool:
    return backward == "unified"


def choose_backward(backward: str, backend: ModuleType | None = None) -> Callable[..., tuple]:
    """The gradients of dense arguments: an operator, or a function of `backend` with the same arguments.

    Winners that are to be found again are an argmax of size [0] for the operator, None for the function.
    """
    name = "unified" if is_unified(backward) else "lowmem"
    if backend is not None:
        return getattr(backend, f"backward_{name}")
    return lik.maxsim_bwd_unified if name == "unified" else lik.maxsim_bwd_lowmem


def plan_backward(backward: str, backend: ModuleType) -> Callable[..., tuple]:
    """`choose_backward` by `backend` for calls of one description, with what it keeps of them, if anything."""
    plan = getattr(backend, "GradientPlan", None)
    return choose_backward(backward, backend) if plan is None else plan(is_unified(backward))
