"""Test that `pytest --part` puts every test in one part, and that `--sample` keeps every test function."""

import pytest

from ..conftest import part_of, sample_of


@pytest.mark.parametrize("count", [1, 2, 5])
def test_parts_hold_every_file_once(count):
    names = [f"tests/test_{name}.py" for name in "dbacbda"]
    parts = [part_of(names, f"{n + 1}/{count}") for n in range(count)]
    assert sorted(name for part in parts for name in part) == sorted(set(names))


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "a/b"])
def test_invalid_part_raises(part):
    with pytest.raises(ValueError):
        part_of(["a"], part)


def test_sample_keeps_some_cases_of_every_function():
    names = [f"test_a[{n}]" for n in range(18)] + [f"test_b[{n}]" for n in range(5)] + ["test_c"]
    kept = sample_of(names, 3)
    assert len(kept) == len(set(kept)) == 6 + 4 + 1 and set(kept) < set(names)
    assert {name.partition("[")[0] for name in kept} == {"test_a", "test_b", "test_c"}
    assert sorted(sample_of(reversed(names), 3)) == sorted(kept)
    assert sorted(sample_of(names, 1)) == sorted(names)
