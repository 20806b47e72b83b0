"""A bar of documents on stderr, where tqdm is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def make_progress_callback(total: int, progress: bool | None) -> Iterator[Callable[[int], object]]:
    """What to call with the number of documents that are done; `progress` None shows them only on a terminal."""
    shown = sys.stderr.isatty() if progress is None else progress
    if shown:
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            shown = False
    if not shown:
        yield lambda count: None
        return
    with tqdm(total=total, desc="retrieving", unit="doc", unit_scale=True) as bar:
        yield bar.update
