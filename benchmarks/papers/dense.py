"""Dense forwards and training steps: lik_ops, the peers, and the baselines of the papers."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

import lik_ops

from ..operators import training
from ..support import common, contenders, gpu
from . import plan
from .problem import (
    GRADIENT_TOLERANCE,
    TOLERANCE,
    Call,
    PaperContender,
    Problem,
    environment_of,
    inside,
    missing,
    products_in,
)

Scorer = Callable[[Tensor, Tensor], Tensor]
CHUNKS = (256, 512, 1024, 2048, 4096)  # documents
CHECKPOINTED_QUERIES = 16
MINI_BATCH = 32
FLASH_PATHS = {plan.FLASH_CSR: "invgrid", plan.FLASH_ATOMIC: "atomic", plan.FLASH_UNIFIED: "atomic_unified"}
COMPILED_MODES = {
    plan.COMPILED_REDUCE: "reduce-overhead",
    plan.COMPILED_MAX: "max-autotune",
    plan.COMPILED_NO_GRAPHS: "max-autotune-no-cudagraphs",
    plan.COMPILED_MINI: "default",
}
WITH_TF32 = (plan.EAGER_TF32, plan.EAGER_TF32_CAST, plan.AUTOGRAD, plan.CHECKPOINTED, plan.COMPILED_MAX)


def eager_fp32(Q: Tensor, D: Tensor) -> Tensor:
    """Compute MaxSim of fp32 copies of the tokens."""
    return common.eager(Q.float(), D.float())


def eager_training(Q: Tensor, D: Tensor) -> Tensor:
    """Compute MaxSim with gradients for one maximum only. `amax` would split gradients between ties."""
    scores = common.eager(Q, D, winners=True)
    return scores[0]


def eager_in_dtype(Q: Tensor, D: Tensor) -> Tensor:
    """Compute MaxSim with maxima and sums in the dtype of the inputs."""
    return torch.einsum("isd,jtd->ijst", Q, D).max(-1).values.sum(-1)


def eager_chunked(chunk: int, Q: Tensor, D: Tensor) -> Tensor:
    """Compute MaxSim with the similarities of `chunk` documents in memory."""
    return torch.cat([common.eager(Q, part) for part in D.split(chunk)], -1)  # type: ignore[misc]


def eager_checkpointed(Q: Tensor, D: Tensor) -> Tensor:
    """Compute MaxSim in fp32. The backward recomputes the similarities of a few queries at a time."""

    def score(q: Tensor, d: Tensor) -> Tensor:
        return eager_training(q.float(), d.float())

    parts = Q.split(CHECKPOINTED_QUERIES)
    return torch.cat([checkpoint(score, q, D, use_reentrant=False) for q in parts])


def mini_batch_step(score: Scorer, x: common.Inputs, upstream: Tensor) -> tuple[Tensor, ...]:
    """Return both gradients, computed for `MINI_BATCH` queries and documents at a time."""
    Q, D = x.Q.detach().requires_grad_(), x.D.detach().requires_grad_()
    for q, of_q in zip(Q.split(MINI_BATCH), upstream.split(MINI_BATCH), strict=True):
        for d, of_pair in zip(D.split(MINI_BATCH), of_q.split(MINI_BATCH, 1), strict=True):
            score(q, d).backward(of_pair)
    assert Q.grad is not None and D.grad is not None
    return Q.grad, D.grad


def compiled(function: Callable, name: str) -> Callable:
    """Compile a function in the mode of a contender, after the graphs of earlier rows are freed."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        importlib.import_module("torch._inductor.cudagraph_trees").reset_cudagraph_trees()
    return torch.compile(function, mode=COMPILED_MODES[name], fullgraph=True, dynamic=False)


class Dense(Problem):
    """All pairs, or candidates of each query."""

    def __init__(self, spec: plan.Spec, device: str) -> None:
        super().__init__(spec, device)
        self.x = common.Inputs(spec.case, device)
        self.is_training = spec.case.what == "step" or not {"step", "backward"}.isdisjoint(spec.parts)

    def _ours(self, name: str) -> Scorer:
        options = self.x.options
        if name == plan.OURS_NORMALIZED:
            options["normalize"] = False
            return lambda Q, D: lik_ops.maxsim(normalize(Q, dim=-1), normalize(D, dim=-1), **options)
        backward = {plan.LOWMEM: "lowmem", plan.UNIFIED: "unified"}.get(name, "auto")
        return lambda Q, D: lik_ops.maxsim(Q, D, **options, backward=backward)

    def _late(self, name: str) -> Scorer | str:
        if why := missing("late_interaction_kernels"):
            return why
        from late_interaction_kernels import maxsim

        if self.x.D.numel() >= 2**31:
            return "reads outside its tensors beyond 2^31 elements"
        if name == plan.LATE_NORMALIZED:
            return lambda Q, D: maxsim(normalize(Q, dim=-1), normalize(D, dim=-1))
        backward = {plan.LATE_LOWMEM: "lowmem", plan.LATE_UNIFIED: "unified"}.get(name)
        return lambda Q, D: maxsim(Q, D, normalize=self.spec.case.normalize, backward=backward)

    def _flash(self) -> Scorer | str:
        """Return the function for inference, or the one that saves the argmax.

        The limit of `contenders` on compiling is not applied, because long queries are in the peer's own tables.
        """
        case, trains = self.spec.case, self.is_training
        return contenders.flash_scorer(case if not trains else replace(case, what="step"), self.x)

    def _eager(self, name: str) -> Scorer:
        if name == plan.EAGER:
            if self.spec.case.normalize or self.x.D.dim() == 4:
                return lambda Q, D: common.eager(Q, D, normalize=self.spec.case.normalize)  # type: ignore[return-value]
            return eager_training if self.is_training else common.eager  # type: ignore[return-value]
        known: dict[str, Scorer] = {
            plan.EAGER_FP32: eager_fp32,
            plan.EAGER_TF32: eager_fp32,
            plan.EAGER_TF32_CAST: eager_fp32,
            plan.AUTOGRAD: lambda Q, D: eager_training(Q.float(), D.float()),
            plan.CHECKPOINTED: eager_checkpointed,
            plan.MINI_BATCHES: eager_training,
        }
        return known[name]

    def _scorer(self, name: str) -> Scorer | str:
        if name.startswith(plan.OURS):
            return self._ours(name)
        if name.startswith(plan.LATE):
            return self._late(name)
        if name.startswith(plan.FLASH):
            return self._flash()
        if name == plan.CHUNKED:
            return partial(eager_chunked, self._best_chunk())
        if name == plan.COMPILED_MINI:
            return compiled(eager_training, name)
        if name in COMPILED_MODES:
            form = {plan.COMPILED_REDUCE: eager_fp32}.get(name, common.eager)
            return compiled(form, name)
        return self._eager(name)

    def _best_chunk(self) -> int:
        """Return the chunk of the fastest of two calls each."""
        seconds = {}
        for chunk in (n for n in CHUNKS if n < max(2 * CHUNKS[0], self.spec.case.Nd)):
            try:
                for _ in range(2):
                    start = time.perf_counter()
                    with torch.no_grad():
                        eager_chunked(chunk, self.x.Q, self.x.D)
                    gpu.synchronize()
                    seconds[chunk] = time.perf_counter() - start
            except torch.OutOfMemoryError:
                seconds.pop(chunk, None)
        return min(seconds, key=seconds.__getitem__) if seconds else CHUNKS[0]

    def make(self, name: str) -> PaperContender | str:
        score = self._scorer(name)
        if isinstance(score, str):
            return score
        x = self._inputs_of(name)
        parts, values = {}, {}
        for part in self.spec.parts:
            parts[part] = partial(self._part, part, name, score, x)
        if isinstance(score, partial):
            values["chunk"] = score.args[0]
        tolerance = GRADIENT_TOLERANCE if self.is_training else TOLERANCE
        return PaperContender(parts, lambda: self._errors(name, score, x), tolerance, (x.Q, x.D), values)

    def _inputs_of(self, name: str) -> common.Inputs:
        """Return the inputs, as fp32 copies for contenders whose casts are not timed."""
        if name not in (plan.EAGER_TF32, plan.COMPILED_MAX):
            return self.x
        x = common.Inputs.__new__(common.Inputs)
        vars(x).update(vars(self.x), Q=self.x.Q.float(), D=self.x.D.float())
        return x

    def _part(self, part: str, name: str, score: Scorer, x: common.Inputs) -> Call:
        if part == "forward":
            call: Call = inside(torch.no_grad, lambda: score(x.Q, x.D))
        elif part == "step" and name in (plan.MINI_BATCHES, plan.COMPILED_MINI):
            call = partial(mini_batch_step, score, x, x.grad_scores)
        elif part == "step":
            call = lambda: training.step(score, x, x.grad_scores)  # noqa: E731
        elif part == "training forward":
            call = lambda: training.forward(score, x)  # noqa: E731
        else:
            call = training.backward(score, x, {"backward": "QD", "grad_Q": "Q", "grad_D": "D"}[part])
        if self.device == "cuda" and name in COMPILED_MODES and self.spec.parts == ("forward",):
            for tensor in (x.Q, x.D):
                torch._dynamo.mark_static_address(tensor)
        return inside(self._context(name), call)

    def _context(self, name: str) -> Callable[[], object]:
        if name in FLASH_PATHS:
            return partial(environment_of, FLASH_BWD_PATH=FLASH_PATHS[name])
        if name in WITH_TF32:
            return partial(products_in, True)
        return nullcontext

    def _errors(self, name: str, score: Scorer, x: common.Inputs) -> dict[str, float]:
        with self._context(name)():  # type: ignore[attr-defined]
            if not self.is_training:
                with torch.no_grad():
                    return {"error": common.error_of(self.x, score(x.Q, x.D))}
            if name in (plan.MINI_BATCHES, plan.COMPILED_MINI):
                return training.errors_of_step(x, lambda upstream: mini_batch_step(score, x, upstream))
            return training.errors_of(x, score)
