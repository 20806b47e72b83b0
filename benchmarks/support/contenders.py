"""The contenders on a GPU and how to call each one.

A string instead of a function gives the reason for a missing contender.

Peers are called through their public functions if these support the case. Peers keep their own conditions:
late-interaction-kernels and flash-maxsim compute in half precision for all inputs. flash-maxsim accepts lengths but no
masks, and expects normalized tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

import lik_ops

from .common import (
    Case,
    Inputs,
    eager,
)

os.environ.setdefault("LIK_SUPPRESS_NORM_WARN", "1")  # late-interaction-kernels checks norms once per process

Contender = Callable[[], object] | str
Scorer = Callable[[Tensor, Tensor], Tensor]

EAGER_LIMIT = 16 * 2**30  # bytes of similarities that eager einsum may hold
NOT_INSTALLED = "not installed"
PEERS = ("late-interaction-kernels", "flash-maxsim")
PEER_MODULES = ("late_interaction_kernels", "flash_maxsim")
LONG = 512  # query tokens
CHUNK = 128
HALF = "half precision for fp32 inputs, as in the shorter fp32 cases; half a minute of compiling"


def _late_interaction(case: Case, x: Inputs) -> Scorer | str:
    try:
        from late_interaction_kernels import maxsim
    except ImportError:
        return NOT_INSTALLED
    if x.q_weight is not None:
        return "no weights"
    if x.D.numel() >= 2**31:
        return "reads outside its tensors beyond 2^31 elements"
    if case.dtype == "float32" and case.Lq > LONG:
        return HALF
    return lambda Q, D: maxsim(Q, D, q_mask=x.q_mask, d_mask=x.d_mask, normalize=x.normalize)


def _flash(case: Case, x: Inputs) -> Scorer | str:
    if case.dtype == "float32" and case.Lq > LONG:
        return HALF
    if case.what != "scores" and case.Lq > LONG:
        return "more than 30 s of compiling (100 for a step): winners of a query this long unroll"
    return flash_scorer(case, x)


def flash_scorer(case: Case, x: Inputs) -> Scorer | str:
    """Return the scorer of flash-maxsim, also for long queries that it compiles for minutes."""
    try:
        import flash_maxsim
    except ImportError:
        return NOT_INSTALLED
    if x.q_weight is not None:
        return "no weights"
    if case.mask == "holes":
        return "no masks with holes"
    lengths = None if x.doc_lengths is None else x.doc_lengths.flatten()

    def score(Q: Tensor, D: Tensor) -> Tensor:
        if x.normalize:
            Q, D = torch.nn.functional.normalize(Q, dim=-1), torch.nn.functional.normalize(D, dim=-1)
        if case.what != "scores":
            return flash_maxsim.flash_maxsim_batched_train(Q, D, not case.candidates, doc_lengths=lengths)
        if case.Nq == 1 and not case.candidates:
            return flash_maxsim.flash_maxsim(Q[0], D, doc_lengths=lengths)[None]
        return flash_maxsim.flash_maxsim_batched(Q, D, doc_lengths=lengths, shared_docs=not case.candidates)

    return score


def get_scorer(name: str, case: Case, x: Inputs) -> Scorer | str:
    """Return the differentiable scorer of an implementation with its default options."""
    if name == "lik_ops":
        return lambda Q, D: lik_ops.maxsim(Q, D, **x.options)
    return {"late-interaction-kernels": _late_interaction, "flash-maxsim": _flash}[name](case, x)


def forget_tuning() -> None:
    """Make the peers tune their kernels again, in less time than by default.

    Peers tune once per query length, on the first shape they see, or reuse the result of another process. Here they
    tune on the case itself if it has a goal, else on the shape that the case varies.
    """
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] in PEER_MODULES]
    for kernel in (value for module in modules for value in vars(module).values()):
        if isinstance(kernel, triton.runtime.Autotuner):
            kernel.cache.clear()
            kernel.cache_results = False
            kernel._do_bench = partial(triton.testing.do_bench, warmup=5, rep=20)
            vars(kernel).pop("do_bench", None)


def _bound(scorer: Scorer | str, Q: Tensor, D: Tensor) -> Contender:
    return scorer if isinstance(scorer, str) else lambda: scorer(Q, D)


def forward(case: Case, x: Inputs) -> dict[str, Contender]:
    """Return functions that give scores [Nq, Nd], or a tuple that starts with them. Call them with gradients off.

    Winners are computed if the case asks for them. Peers compute winners only if an input requires a gradient.
    """
    Q, D, options = x.Q, x.D, x.options
    found: dict[str, Contender] = {"lik_ops": lambda: lik_ops.maxsim(Q, D, **options)}
    winners = case.what == "winners"
    leaf = Q.detach().requires_grad_() if winners else Q
    if winners:
        masks = (x.q_mask, x.d_mask, x.q_weight, x.normalize)
        found["lik_ops"] = lambda: torch.ops.lik.maxsim_fwd(Q, D, *masks, torch.int16, "auto")
    found["late-interaction-kernels"] = _bound(_late_interaction(case, x), leaf, D)
    found["flash-maxsim"] = _bound(_flash(case, x), leaf, D)
    found["eager"] = "too many similarities"
    if case.similarities < EAGER_LIMIT:
        found["eager"] = lambda: eager(Q, D, **options, winners=winners)
    if case.goal_ms and case.Lq < CHUNK:  # longer queries are split into chunks with the same tuning
        forget_tuning()
    return found


def compiled_eager(case: Case, x: Inputs) -> Contender:
    """Return the einsum form under torch.compile in its fastest mode.

    Matrix products are tuned for the shape and run in one CUDA graph, which reads its inputs in place.
    """
    if case.similarities >= EAGER_LIMIT:
        return "too many similarities"
    torch._dynamo.reset()
    compiled = torch.compile(eager, mode="max-autotune", fullgraph=True, dynamic=False)
    for tensor in (x.Q, x.D, x.q_mask, x.d_mask, x.q_weight):
        if tensor is not None:
            torch._dynamo.mark_static_address(tensor)
    return lambda: compiled(x.Q, x.D, **x.options, winners=case.what == "winners")


def training(case: Case, x: Inputs) -> dict[str, Scorer | str]:
    """Return differentiable scorers of Q and D."""
    found: dict[str, Scorer | str] = {
        "lik_ops lowmem": lambda Q, D: lik_ops.maxsim(Q, D, **x.options, backward="lowmem"),
        "lik_ops unified": lambda Q, D: lik_ops.maxsim(Q, D, **x.options, backward="unified"),
        "late-interaction-kernels": _late_interaction(case, x),
        "flash-maxsim": _flash(case, x),
        "eager": "too many similarities",
    }
    if 2 * case.similarities < EAGER_LIMIT:
        found["eager"] = lambda Q, D: eager(Q, D, **x.options, winners=True)[0]
    forget_tuning()
    return found
