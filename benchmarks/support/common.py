"""Shared code of the benchmark scripts: cases, inputs, interleaved CPU timing, and JSON records."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lik_ops import reference

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Case:
    """One benchmark case. Results of different commits are compared by its name, so keep names stable."""

    name: str
    Nq: int
    Nd: int
    Lq: int
    Ld: int
    d: int = 128
    dtype: str = "bfloat16"
    what: str = "scores"  # "scores", "winners" (with argmax) or "step" (forward with winners, then backward)
    mask: str = ""  # "prefix": documents of Ld / 2 to Ld tokens; "holes": a quarter of all Q and D tokens masked
    normalize: bool = False
    weighted: bool = False  # with q_weight
    candidates: bool = False  # each query has Nd documents of its own
    goal_ms: float | None = None

    @property
    def documents(self) -> int:
        return self.Nd * (self.Nq if self.candidates else 1)

    @property
    def operations(self) -> int:
        """Operations of one product of all tokens, including masked ones and without the backward."""
        return 2 * self.Nq * self.Nd * self.Lq * self.Ld * self.d

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def similarities(self) -> int:
        """Bytes of all similarities in the input dtype. The operators never store them."""
        return self.operations // (2 * self.d) * self.itemsize

    @property
    def winners(self) -> int:
        """Bytes of the winners."""
        return self.Nq * self.Nd * self.Lq * (2 if self.Ld < 2**15 else 4)

    @property
    def bytes(self) -> int:
        """Bytes of a forward that reads all tokens, mask and weights once and writes its results.

        Masked tokens are included.
        """
        tokens = self.Nq * self.Lq + self.documents * self.Ld
        masked = {"": 0, "prefix": self.documents * self.Ld, "holes": tokens}[self.mask]
        weights = 4 * self.Nq * self.Lq if self.weighted else 0
        winners = 0 if self.what == "scores" else self.winners
        return self.itemsize * self.d * tokens + masked + weights + 4 * self.Nq * self.Nd + winners


def shape_of(case: dict) -> str:
    """Return a readable shape of a record's case."""
    return f"{case['Nq']} x {case['Nd']}, Lq {case['Lq']}, Ld {case['Ld']}, d {case['d']}, {case['dtype']}"


class Inputs:
    """Random tensors of a case. Tokens have unit norm, or any norm if the case normalizes them."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        generator = torch.Generator(device).manual_seed(0)
        documents = (case.Nq, case.Nd) if case.candidates else (case.Nd,)

        def draw(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, case.dtype))
            return x if case.normalize else x.div_(x.norm(dim=-1, keepdim=True))

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=device)

        self.Q = draw(case.Nq, case.Lq, case.d)
        self.D = draw(*documents, case.Ld, case.d)
        self.q_mask = self.d_mask = self.q_weight = self.doc_lengths = None
        if case.mask == "prefix":
            self.doc_lengths = (case.Ld // 2 + uniform(*documents) * (case.Ld // 2 + 1)).int().clamp(max=case.Ld)
            self.d_mask = torch.arange(case.Ld, device=device) < self.doc_lengths[..., None]
        elif case.mask == "holes":
            self.q_mask, self.d_mask = uniform(case.Nq, case.Lq) > 0.25, uniform(*documents, case.Ld) > 0.25
        if case.weighted:
            self.q_weight = uniform(case.Nq, case.Lq)
        self.normalize = case.normalize
        self.grad_scores = uniform(case.Nq, case.Nd) - 0.5

    @property
    def options(self) -> dict:
        """Keyword arguments of `lik_ops.maxsim` and of its reference."""
        per_token = {"q_mask": self.q_mask, "d_mask": self.d_mask, "q_weight": self.q_weight}
        return {**per_token, "normalize": self.normalize}

    def last(self, queries: int, documents: int) -> tuple[Tensor, Tensor, dict]:
        """Return views of the last `queries`, their last `documents`, and the matching options."""
        q = slice(-queries, None)
        k = (q, slice(-documents, None)) if self.D.dim() == 4 else (slice(-documents, None),)
        options = {
            "q_mask": None if self.q_mask is None else self.q_mask[q],
            "d_mask": None if self.d_mask is None else self.d_mask[k],
            "q_weight": None if self.q_weight is None else self.q_weight[q],
            "normalize": self.normalize,
        }
        return self.Q[q], self.D[k], options


def eager(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    normalize: bool = False,
    winners: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute MaxSim in plain PyTorch, with all similarities in memory in the input dtype."""
    if normalize:
        Q, D = torch.nn.functional.normalize(Q, dim=-1), torch.nn.functional.normalize(D, dim=-1)
    S = torch.einsum("isd,ijtd->ijst" if D.dim() == 4 else "isd,jtd->ijst", Q, D)
    if d_mask is not None:
        S = S.masked_fill(~(d_mask[:, :, None] if D.dim() == 4 else d_mask[None, :, None]), float("-inf"))
    maxima, argmax = S.max(-1) if winners else (S.amax(-1), None)
    maxima = maxima.float()
    if q_weight is not None:
        maxima = maxima * q_weight[:, None]
    if q_mask is not None:
        maxima = maxima.masked_fill(~q_mask[:, None], 0)
    return maxima.sum(-1) if argmax is None else (maxima.sum(-1), argmax)


def error_of(x: Inputs, scores: Tensor) -> float:
    """Return the relative error against fp64, for the last queries and documents.

    These fail first if a tensor exceeds 2^31 elements.
    """
    Q, D, options = x.last(4, 64)
    return relative_error(scores[-4:, -64:], reference.maxsim(Q.double(), D.double(), **options))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`. NaN in either gives NaN."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def _cpu_name() -> str:
    """Return the processor's model and family numbers.

    In virtual machines, the name alone says little.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_commit() -> str | None:
    """Return the checked-out commit, with "+" if tracked or new files differ.

    The variable LIK_OPS_COMMIT has priority. Set it if git is not available.
    """
    if named := os.environ.get("LIK_OPS_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def environment(*packages: str) -> dict:
    """Return machine, versions and commit. `packages` are further distributions to record."""
    names = ("lik-ops", "torch", "triton", *packages)
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": read_commit(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in names},
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def write(name: str, records: list[dict], *packages: str, path: Path | None = None, **settings: object) -> Path:
    """Write environment, settings and records to ``results/<name>.json`` or `path`, and return the path."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": name, "environment": environment(*packages), "settings": settings, "records": records}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def interleaved(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Return the ``best`` and ``median`` milliseconds of each function over `rounds` rounds.

    Each round calls every function once, so that other load on the machine affects all of them. Use it for host code
    and CPU kernels: it does not synchronize.
    """
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: {"best": min(t), "median": statistics.median(t)} for name, t in times.items()}
