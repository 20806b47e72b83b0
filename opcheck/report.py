"""Runs the checks and formats their results."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import NamedTuple

import torch

import lik_ops
from lik_ops.opcheck import checks, graphs
from lik_ops.opcheck.samples.table import OPERATORS


class CheckResult(NamedTuple):
    """The result of one check of one operator."""

    operator: str
    check: str
    cases: int
    seconds: float
    error: str | None

    @property
    def outcome(self) -> str:
        """Return the text of the last column of the table."""
        if self.error is not None:
            return "FAIL"
        return "ok" if self.cases else "nothing to check"


def _time_check(operator: str, check: str, run: Callable[[], int]) -> CheckResult:
    """Run a check and return its result with the time."""
    start, cases, error = time.perf_counter(), 0, None
    try:
        cases = run()
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    return CheckResult(operator, check, cases, time.perf_counter() - start, error)


class _CheckTask(NamedTuple):
    """The unit of work of a process: some checks of one operator, or one snapshot, on some samples."""

    operator: str
    checks: tuple[str, ...]
    of: checks.Selection

    def results(self) -> list[CheckResult]:
        """Run the checks."""
        if self.operator == "all":
            return [
                _time_check("all", f"graph: {n}", partial(graphs.check_snapshot, n, self.of.device))
                for n in self.checks
            ]
        op = OPERATORS[self.operator]
        return [
            _time_check(self.operator, c, partial(checks.CHECKS[c], self.operator, op, self.of)) for c in self.checks
        ]


def _list_tasks(device: str, operators: Iterable[str], every: int, apart: bool) -> Iterator[_CheckTask]:
    """Yield all tasks; `apart` makes one task for each dtype, with all its checks.

    The checks of a dtype share kernels, and other dtypes have other kernels.
    """
    whole = checks.Selection(device, every)
    for name in operators:
        if not apart:
            yield from (_CheckTask(name, (check,), whole) for check in checks.CHECKS)
            continue
        by_dtype = tuple(check for check in checks.CHECKS if check not in checks.OF_ALL_DTYPES)
        yield from (
            _CheckTask(name, by_dtype, whole._replace(dtypes=(dtype,))) for dtype in checks.choose_dtypes(device)
        )
        yield _CheckTask(name, checks.OF_ALL_DTYPES, whole)
    yield from (_CheckTask("all", (name,), whole) for name in graphs.SNAPSHOTS)


def _join_results(parts: list[CheckResult]) -> CheckResult:
    """Merge the results of the parts of one check."""
    errors = [part.error for part in parts if part.error is not None]
    cases, seconds = sum(part.cases for part in parts), sum(part.seconds for part in parts)
    return parts[0]._replace(cases=cases, seconds=seconds, error="\n".join(errors) or None)


def run_checks(
    device: str = "cpu", operators: Iterable[str] | None = None, every: int = 1, jobs: int = 1
) -> Iterator[CheckResult]:
    """Run every check and yield results as they complete.

    On a GPU most of the work is compiling kernels, so several processes are faster.

    Args:
        device: device of the samples.
        operators: names of operators; None for all.
        every: check only every so many samples.
        jobs: number of processes. With 1 the checks run in this process.
    """
    yield _time_check("all", "table", checks.check_table)
    tasks = list(_list_tasks(device, OPERATORS if operators is None else operators, every, apart=jobs > 1))
    if jobs == 1:
        for task in tasks:
            yield from task.results()
        return
    missing = Counter((task.operator, check) for task in tasks for check in task.checks)
    found: dict[tuple[str, str], list[CheckResult]] = defaultdict(list)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(task.results): task for task in tasks}
        for future in as_completed(futures):
            task = futures[future]
            for check, result in zip(task.checks, future.result(), strict=True):
                parts = found[task.operator, check]
                parts.append(result)
                if len(parts) == missing[task.operator, check]:
                    yield _join_results(parts)


HEADER = ("operator", "check", "cases", "seconds", "result")
_WIDTHS = (20, 22, 6, 8, 0)


def format_line(*cells: object) -> str:
    """Format one row of the table."""
    texts = [f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells]
    padded = (t.rjust(w) if i in (2, 3) else t.ljust(w) for i, (t, w) in enumerate(zip(texts, _WIDTHS, strict=True)))
    return "  ".join(padded).rstrip()


def format_title(device: str) -> str:
    """Return versions and device as the title of the table."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
    return f"lik_ops {lik_ops.__version__}, torch {torch.__version__}, {name}"
