"""The gradient of packed documents of which few rows win, against fp64."""

import pytest
import torch

from .support import INTERPRETING

pytest.importorskip("triton", reason="these are kernels in Triton")
from lik_ops.backends import cuda_ragged_backward
from lik_ops.csrc_triton.backward_ragged_few import maxsim_grad_few_packed_documents

from .test_ragged_kernels import (
    GRADIENT_TOLERANCE,
    PLACES,
    Problem,
    gradient_error,
    gradients,
    half_or_fp32,
    kernels_launched,
    problem,
    won,
)

pytestmark = pytest.mark.parametrize("place", PLACES, ids=str)
# In tiles (of 32 rows in the interpreter, else 256): below one, one, several, two that share one.
TILES = (2.5, 1.0, 1.25, 0.25, 0.0, 3.0)


def lookups(place, dtype, rows, met, **options):
    """Queries of `rows` tokens and pairs [(query, document), ..] of documents that lie one after another."""
    tile = 32 if INTERPRETING else 256
    p = problem(place, "pairs", dtype, queries=rows, documents=tuple(int(n * tile) for n in TILES), **options)
    return Problem(
        p.r._replace(pairs=torch.tensor(met, device=place.device)), [(i, j, n) for n, (i, j) in enumerate(met)]
    )


EACH = [(0, 0), (1, 1), (2, 2), (3, 3), (0, 4), (2, 5)]
SOME_OFTEN = [*EACH, (1, 0), (2, 0), (3, 0), (0, 0), (1, 3), (1, 3)]
CASES = {
    "short queries": ((14, 9, 16, 3), EACH, {}),
    "no options": ((14, 9, 16, 3), EACH, {"options": False}),
    "queries of many lengths": ((14, 50, 6, 3), EACH, {}),
    "some documents are met often": ((14, 9, 16, 3), SOME_OFTEN, {}),
    "many features": ((14, 9, 16, 3), SOME_OFTEN, {"d": 200}),
    "features that are no multiple of 16": ((14, 9, 16, 3), EACH, {"d": 20}),
}


# The interpreter takes seconds for each.
OFTEN = ("short queries", "some documents are met often")
WHICH = [(case, normalize) for case in CASES for normalize in (False, True) if case in OFTEN or not normalize]


@pytest.mark.parametrize("case, normalize", WHICH)
def test_gradients_are_those_of_the_formula(place, case, normalize, monkeypatch):
    monkeypatch.setattr(cuda_ragged_backward, "_FEW", 0)
    launched = kernels_launched(monkeypatch)
    rows, met, options = CASES[case]
    for dtype in half_or_fp32(place)[-1:] if INTERPRETING else half_or_fp32(place):
        p = lookups(place, dtype, rows, met, **options)
        p.r.D[: len(p.r.D) // 8] *= 4  # tokens that win most
        scores, argmax = won(p, normalize)
        upstream = torch.randn(scores.shape, device=scores.device)
        found = gradients(p, upstream, argmax, normalize)[1]
        assert gradient_error(p, found, upstream, normalize) < GRADIENT_TOLERANCE[dtype], dtype
        assert torch.equal(found, gradients(p, upstream, argmax, normalize)[1])
    assert maxsim_grad_few_packed_documents in launched
