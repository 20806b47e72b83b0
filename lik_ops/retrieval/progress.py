"""A progress bar of documents on stderr, if tqdm is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def make_progress_callback(total: int, progress: bool | None) -> Iterator[Callable[[int], object]]:
    """Yield a function that advances the progress bar by a number of documents.

    `total` is the number of all documents. If `progress` is None, the bar is shown only on a terminal.
    """
    is_shown = sys.stderr.isatty() if progress is None else progress
    if is_shown:
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            is_shown = False
    if not is_shown:
        yield lambda count: None
        return
    with tqdm(total=total, desc="retrieving", unit="doc", unit_scale=True) as bar:
        yield bar.update
