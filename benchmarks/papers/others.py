"""The other problems: fused heads, Chamfer distances, corpora in host memory, correctness, losses, and formulas."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lik_ops
from lik_ops import reference

from ..operators import chamfer, head
from ..retrieval import retrieve
from ..support import common, gpu
from . import plan
from .dense import Dense, eager_in_dtype
from .problem import GRADIENT_TOLERANCE, TOLERANCE, Call, PaperContender, Problem, inside, missing, run_with_peak

PART = 20_000  # pages that are drawn, and the pages of a block of the peer
HOST_MARGIN = 1.25  # of host memory, over the corpus
ROUNDS = 3  # of a search that takes seconds
TEMPERATURE, LEARNING_RATE = 32.0, 1e-3
HEAVY_FREEDOM = 3.0
CONTAINER_FILES = (  # limit and use
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Heads(Problem):
    """Steps from hidden states to scores."""

    def __init__(self, spec: plan.Spec, device: str) -> None:
        super().__init__(spec, device)
        case = spec.case
        sizes = {name: getattr(case, name) for name in ("Nq", "Nd", "Lq", "Ld", "d", "dtype", "what")}
        self.case = head.Head(case.name, **sizes, width=spec.number("width"))
        self.x = head.Inputs(self.case, device)

    def _scorer(self, name: str) -> head.Scorer | str:
        known = head.scorers(self.x)
        if name == plan.LATE_UNFUSED:
            if why := missing("late_interaction_kernels"):
                return why
            from late_interaction_kernels import maxsim

            return lambda Q, H, W, b: maxsim(Q, F.normalize(F.linear(H, W, b), dim=-1))
        return known[{plan.UNFUSED: "by hand"}.get(name, name)]

    def make(self, name: str) -> PaperContender | str:
        score = self._scorer(name)
        if isinstance(score, str):
            return score

        def check() -> dict[str, float]:
            keys = ("error", "error_Q", "error_H", "error_W", "error_b")
            return dict(zip(keys, head.errors_of(self.case, self.x, score), strict=True))

        return PaperContender(
            {"step": lambda: lambda: head.step(score, self.x)}, check, GRADIENT_TOLERANCE, self.x.tensors
        )


class PointClouds(Problem):
    """Chamfer distances of normal points."""

    def __init__(self, spec: plan.Spec, device: str) -> None:
        super().__init__(spec, device)
        case = spec.case
        generator = torch.Generator(device).manual_seed(0)
        self.P, self.R = (torch.randn(case.Ld, case.d, generator=generator, device=device) for _ in range(2))
        self.metric = str(spec.option("metric"))

    def _clouds(self, part: str) -> chamfer.Clouds:
        return chamfer.Clouds(self.spec.case.name, self.spec.case.Ld, self.spec.case.d, self.metric, part == "step")

    def make(self, name: str) -> PaperContender | str:
        known = {part: chamfer.distances(self._clouds(part)) for part in self.spec.parts}
        if name == plan.COMPILED_CDIST:
            torch._dynamo.reset()
            compiled = torch.compile(chamfer.eager(self.metric), dynamic=False)
            known = {part: {name: compiled} for part in self.spec.parts}
        if any(name not in of_part for of_part in known.values()):
            return missing("flash_maxsim") or "no gradients, or not this metric"
        parts = {part: partial(self._call, part, of_part[name]) for part, of_part in known.items()}
        distance = known[self.spec.parts[0]][name]
        return PaperContender(parts, lambda: self._check(distance), TOLERANCE, (self.P, self.R))

    def _call(self, part: str, distance: chamfer.Distance) -> Call:
        call = chamfer.called(self._clouds(part), distance, self.P, self.R)
        return call if part == "step" else inside(torch.no_grad, call)

    def _check(self, distance: chamfer.Distance) -> dict[str, float]:
        """Compare the distance with the mean over all points, computed in fp64 for some points at a time."""
        means = []
        for X, Y in ((self.P, self.R), (self.R, self.P)):
            nearest = []
            for x in X.split(max(1, 2**26 // (Y.numel()))):
                c = torch.cdist(x.double(), Y.double(), 1.0 if self.metric == "l1" else 2.0).amin(1)
                nearest.append(c if self.metric == "l1" else c.square())
            means.append(torch.cat(nearest).mean())
        with torch.no_grad():
            return {"error": common.relative_error(distance(self.P, self.R), means[0] + means[1])}


def host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process may still use, which a container may limit."""
    found = []
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        found.append(1024 * int(fields["MemAvailable"].split()[0]))
    for limit, used in CONTAINER_FILES:
        try:
            found.append(int((root / limit).read_text()) - int((root / used).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(found, default=0)


class HostCorpus(Problem):
    """One query against pages in pageable host memory. The pages repeat, which does not change the time."""

    def __init__(self, spec: plan.Spec, device: str) -> None:
        super().__init__(spec, device)
        case = spec.case
        needed, available = case.bytes, host_bytes()
        if needed * HOST_MARGIN > available:
            raise MemoryError(f"needs {needed / 1e9:.0f} GB of host memory, the machine has {available / 1e9:.0f} GB")
        part = common.Inputs(common.Case("part", 1, min(PART, case.Nd), case.Lq, case.Ld, case.d, case.dtype), device)
        self.Q, source = part.Q, part.D.cpu()
        self.D = torch.empty((case.Nd, case.Ld, case.d), dtype=source.dtype)
        for begin in range(0, case.Nd, len(source)):
            into = self.D[begin : begin + len(source)]
            into.copy_(source[: len(into)])

    def make(self, name: str) -> PaperContender | str:
        if name == plan.OURS:
            call: Callable[[], Any] = lambda: lik_ops.maxsim_streamed(self.Q, self.D)  # noqa: E731
        elif why := missing("flash_maxsim"):
            return why
        else:
            from flash_maxsim.flash_maxsim_exp import flash_maxsim_streamed

            call = lambda: flash_maxsim_streamed(self.Q[0], self.D, chunk_size=PART)[None]  # noqa: E731
        score = inside(torch.no_grad, call)

        (scores, peak), last = run_with_peak(score), slice(-4, None)
        assert isinstance(scores, Tensor)
        expected = reference.maxsim(self.Q.double(), self.D[last].to(self.Q.device).double())
        error = common.relative_error(scores[:, last].to(self.Q.device), expected)
        times = [retrieve.seconds_of(score) for _ in range(ROUNDS)]
        values = {"search wall": gpu.spread(times), "search peak": peak / 2**20}
        return PaperContender({}, lambda: {"error": error}, TOLERANCE, values=values)


class Correctness(Dense):
    """Largest absolute errors of scores, without times."""

    def __init__(self, spec: plan.Spec, device: str) -> None:
        super().__init__(spec, device)
        generator = torch.Generator("cpu").manual_seed(0)
        for name in ("Q", "D"):
            shape = getattr(self.x, name).shape
            x = torch.randn(shape, generator=generator)
            if spec.option("draw") == "heavy":
                squares = torch.randn((int(HEAVY_FREEDOM), *shape), generator=generator).square().sum(0)
                x = x * (HEAVY_FREEDOM / squares).sqrt()
            setattr(self.x, name, F.normalize(x, dim=-1).to(device, self.x.Q.dtype))

    def make(self, name: str) -> PaperContender | str:
        score = eager_in_dtype if name == plan.EAGER_IN_DTYPE else self._scorer(name)
        if isinstance(score, str):
            return score

        def check() -> dict[str, float]:
            expected = reference.maxsim(self.x.Q.double(), self.x.D.double())
            with torch.no_grad():
                difference = score(self.x.Q, self.x.D).double() - expected
            error = float(difference.norm() / expected.norm())
            return {"max_error": float(difference.abs().max()), "error": error}

        return PaperContender({}, check)


class LossParity(Dense):
    """A contrastive loss whose parameters are the tokens, trained for some steps with each scorer."""

    def _train(self, name: str) -> list[float]:
        score = eager_in_dtype if name == plan.EAGER_IN_DTYPE else self._scorer(name)
        if isinstance(score, str):
            raise ImportError(score)
        Q, D = (torch.nn.Parameter(x.float()) for x in (self.x.Q, self.x.D))
        optimizer = torch.optim.Adam((Q, D), lr=LEARNING_RATE)
        labels, losses = torch.arange(len(Q), device=Q.device), []
        for _ in range(self.spec.number("steps")):
            scores = score(*(F.normalize(x, dim=-1).to(self.x.Q.dtype) for x in (Q, D)))
            loss = F.cross_entropy(scores.float() / TEMPERATURE, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    def make(self, name: str) -> PaperContender | str:
        score = self._scorer(name) if name != plan.EAGER_IN_DTYPE else eager_in_dtype
        if isinstance(score, str):
            return score
        self._train_some(name)
        gpu.synchronize()
        start = time.perf_counter()
        losses, peak = run_with_peak(lambda: self._train(name))
        values = {"seconds": time.perf_counter() - start, "peak": peak / 1e9}
        if not hasattr(self, "eager_losses"):
            self.eager_losses = losses if name == plan.EAGER_IN_DTYPE else self._train(plan.EAGER_IN_DTYPE)
        drift = max(abs(a - b) for a, b in zip(losses, self.eager_losses, strict=True))
        if name != plan.EAGER_IN_DTYPE:
            values["drift"] = drift
        last = losses[-1]
        return PaperContender({}, lambda: {"error": 0.0 if math.isfinite(last) else math.inf}, values=values)

    def _train_some(self, name: str) -> None:
        """Run one step, which compiles."""
        spec, self.spec = self.spec, _with_steps(self.spec, 1)
        try:
            self._train(name)
        finally:
            self.spec = spec


def _with_steps(spec: plan.Spec, steps: int) -> plan.Spec:
    return plan.replace(spec, options=(("steps", steps),))


class Formulas(Problem):
    """Bytes by formula. Nothing is allocated."""

    def make(self, name: str) -> PaperContender | str:
        case = self.spec.case
        similarities = 4 * case.Nq * case.Nd * case.Lq * case.Ld
        scores = common.Case(**{**vars(case), "what": "scores"})
        if name == plan.EAGER:
            traffic = scores.bytes + 2 * similarities
            values = {"traffic": traffic / 1e9, "S": similarities / 1e9, "dS": similarities / 1e9}
        else:
            argmax = case.winners if name == plan.OURS else 4 * case.Nq * case.Nd * case.Lq
            values = {"traffic": scores.bytes / 1e9, "argmax": argmax / 1e6, "S": 0.0, "dS": 0.0}
        return PaperContender({}, dict, values=values)

    def contender(self, name: str) -> PaperContender | str:
        return self.make(name)
