"""Types of the public functions: mypy reads this file in ``make lint``, and pytest runs it."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from typing import assert_type, get_args

import pytest
import torch
from torch import Tensor

import lik_ops
from lik_ops.opcheck.samples.table import list_registered

Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
QUERIES = list(Q)
STORE = D.flatten(0, 1)
AT, LENGTHS = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)


def test_argmax_type_follows_the_query_type() -> None:
    dense: list[tuple[Tensor, Tensor]] = [
        assert_type(lik_ops.maxsim_with_argmax(Q, D), tuple[Tensor, Tensor]),
        assert_type(lik_ops.maxsim_with_argmax(Q, list(D)), tuple[Tensor, Tensor]),
        assert_type(lik_ops.maxsim_varlen_with_argmax(Q, D), tuple[Tensor, Tensor]),
        assert_type(lik_ops.maxsim_candidates_varlen_with_argmax(Q, STORE, AT, LENGTHS), tuple[Tensor, Tensor]),
        assert_type(lik_ops.maxsim_pair_list_with_argmax(QUERIES, D, AT[:, :2]), tuple[Tensor, Tensor]),
    ]
    lists: list[tuple[Tensor, list[Tensor]]] = [
        assert_type(lik_ops.maxsim_with_argmax(QUERIES, D), tuple[Tensor, list[Tensor]]),
        assert_type(lik_ops.maxsim_varlen_with_argmax(QUERIES, D), tuple[Tensor, list[Tensor]]),
        assert_type(
            lik_ops.maxsim_candidates_varlen_with_argmax(QUERIES, STORE, AT, LENGTHS), tuple[Tensor, list[Tensor]]
        ),
    ]
    assert all(isinstance(winners, Tensor) for _, winners in dense)
    assert all(isinstance(winners, list) for _, winners in lists)


def test_backward_is_one_of_three_names() -> None:
    choice: lik_ops.Backward = "lowmem"
    assert_type(lik_ops.maxsim(Q, D, backward=choice), Tensor)
    with pytest.raises(ValueError, match="backward: expected one of auto, lowmem, unified"):
        lik_ops.maxsim(Q, D, backward="fast")  # type: ignore[arg-type]
    for name in lik_ops.__all__:
        value = getattr(lik_ops, name)
        if callable(value) and name != "Corpus" and "backward" in inspect.signature(value).parameters:
            found = inspect.signature(value, eval_str=True).parameters["backward"].annotation
            assert get_args(found) == get_args(lik_ops.Backward) == ("auto", "lowmem", "unified"), name


@pytest.mark.parametrize("name", sorted(list_registered()))
def test_operators_have_docstrings(name) -> None:
    packet = getattr(torch.ops.lik, name)
    for op in (packet, packet.default):
        shown = pydoc.plain(pydoc.render_doc(op))
        assert f"lik::{name}(Tensor" in shown
        assert len(shown.splitlines()) > 5


def test_distributed_is_listed_and_not_imported() -> None:
    code = "import sys, lik_ops; assert {'distributed', 'maxsim'} <= set(dir(lik_ops)); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "lik_ops.distributed" not in done.stdout.split()
