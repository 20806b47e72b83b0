"""docs/architecture.md shows the ways that calls take."""

import sys

import pytest

from . import paths


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not name the class of a function that runs")
def test_the_page_shows_what_calls_run():
    """After a change that is meant: ``python -m tests.paths``."""
    assert paths.page() == paths.PAGE.read_text()
