"""Selection of the backward: ``"lowmem"`` or ``"unified"``. ``"auto"`` selects ``"lowmem"``."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from ..._ops import ops as lik


def choose_backward(backward: str, backend: ModuleType | None = None) -> Callable[..., tuple]:
    """Return the operator, or the function of `backend` with the same arguments, that computes dense gradients.

    To request recomputation, pass an argmax of size [0] to the operator, or None to the function.
    """
    unified = backward == "unified"
    if backend is not None:
        return backend.backward_unified if unified else backend.backward_lowmem
    return lik.maxsim_bwd_unified if unified else lik.maxsim_bwd_lowmem


def plan_backward(backward: str, backend: ModuleType) -> Callable[..., tuple]:
    """Return the function of `backend` that computes dense gradients for calls with one dispatch key.

    A backend may return a plan that keeps state between these calls.
    """
    plan = getattr(backend, "GradientPlan", None)
    return choose_backward(backward, backend) if plan is None else plan(backward == "unified")
