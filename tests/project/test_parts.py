"""Test that `pytest --part` puts every test in one part."""

import pytest

from ..conftest import part_of


@pytest.mark.parametrize("count", [1, 2, 5])
def test_parts_hold_every_file_once(count):
    names = [f"tests/test_{name}.py" for name in "dbacbda"]
    parts = [part_of(names, f"{n + 1}/{count}") for n in range(count)]
    assert sorted(name for part in parts for name in part) == sorted(set(names))


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "a/b"])
def test_invalid_part_raises(part):
    with pytest.raises(ValueError):
        part_of(["a"], part)
