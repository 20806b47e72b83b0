"""Test scores that hosts modify in place, such as `s /= temperature`: gradients match a modified copy."""

import contextlib

import pytest
import torch

import lik_ops

from ...support.common import CUDA, PORTABLE
from .test_eager import Seen

PLACES = [PORTABLE, pytest.param(CUDA, marks=pytest.mark.gpu)]
LEAVES = ("Q", "D", "C", "E", "PQ", "PD", "w")


@pytest.fixture(params=PLACES, ids=str)
def x(request):
    """Yield tensors of every layout on a device, and use the backend of that place."""
    device = request.param.device
    shapes = {
        "Q": (2, 3, 8),
        "D": (4, 5, 8),
        "C": (2, 2, 5, 8),
        "E": (2, 5, 8),
        "PQ": (5, 8),
        "PD": (10, 8),
        "w": (2, 3),
    }
    found = {name: torch.randn(shape, device=device, requires_grad=True) for name, shape in shapes.items()}
    cu_q, cu_d = (torch.tensor(ends, device=device) for ends in ([0, 3, 5], [0, 5, 6, 10]))
    found |= {"cu_q": cu_q, "cu_d": cu_d, "cut": {"cu_seqlens_q": cu_q, "cu_seqlens_d": cu_d}}
    found |= {"offsets": cu_d[:-1].expand(2, 3).contiguous(), "lengths": cu_d.diff().expand(2, 3).contiguous()}
    found["pairs"] = torch.tensor([[0, 1], [1, 2], [1, 0]], device=device)
    found |= {"n_q": torch.tensor([3, 1], device=device), "n_d": torch.tensor([[5, 2], [3, 4]], device=device)}
    found["kept"] = torch.tensor([[True, False, True]] * 2, device=device)
    with request.param.use():
        yield type("Inputs", (), found)


def compiled(x, options):
    return torch.compile(lambda Q, D: lik_ops.maxsim(Q, D, **options), backend="aot_eager")(x.Q, x.D)


def compiled_with_edit(x, options):
    return torch.compile(lambda Q, D: lik_ops.maxsim(Q, D, **options).div_(2), backend="aot_eager")(x.Q, x.D)


CALLS = {
    "maxsim": lambda x, o: lik_ops.maxsim(x.Q, x.D, **o),
    "maxsim, masks and weights": lambda x, o: lik_ops.maxsim(x.Q, x.D, x.kept, q_weight=x.w, normalize=True, **o),
    "torch.ops.lik.maxsim": lambda x, o: torch.ops.lik.maxsim(x.Q, x.D, **o),
    "one query": lambda x, o: lik_ops.maxsim(x.Q[0], x.D, **o),
    "one document": lambda x, o: lik_ops.maxsim(x.Q, x.D[0], **o),
    "one of each": lambda x, o: lik_ops.maxsim(x.Q[0], x.D[0], **o),
    "candidates": lambda x, o: lik_ops.maxsim(x.Q, x.C, **o),
    "a list": lambda x, o: lik_ops.maxsim(x.Q, [x.D[0], x.D[1, :2]], **o),
    "one query beside a list": lambda x, o: lik_ops.maxsim(x.Q[0], [x.D[0], x.D[1, :2]], **o),
    "one document beside a list": lambda x, o: lik_ops.maxsim([x.Q[0], x.Q[1, :2]], x.D[0], **o),
    "with_argmax": lambda x, o: lik_ops.maxsim_with_argmax(x.Q, x.D, **o)[0],
    "with_argmax, one of each": lambda x, o: lik_ops.maxsim_with_argmax(x.Q[0], x.D[0], **o)[0],
    "with_argmax, candidates": lambda x, o: lik_ops.maxsim_with_argmax(x.Q, x.C, **o)[0],
    "with_argmax, a list": lambda x, o: lik_ops.maxsim_with_argmax(x.Q, [x.D[0], x.D[1, :2]], **o)[0],
    "pairs": lambda x, o: lik_ops.maxsim_pairs(x.Q, x.E, **o),
    "pairs, a list": lambda x, o: lik_ops.maxsim_pairs(x.Q, [x.D[0], x.D[1, :2]], **o),
    "varlen": lambda x, o: lik_ops.maxsim_varlen(x.PQ, x.PD, **x.cut, **o),
    "varlen, dense": lambda x, o: lik_ops.maxsim_varlen(x.Q, x.D, **o),
    "varlen_with_argmax": lambda x, o: lik_ops.maxsim_varlen_with_argmax(x.PQ, x.PD, **x.cut, **o)[0],
    "candidates_varlen": lambda x, o: lik_ops.maxsim_candidates_varlen(x.Q, x.PD, x.offsets, x.lengths, **o),
    "candidates_varlen_with_argmax": lambda x, o: lik_ops.maxsim_candidates_varlen_with_argmax(
        x.Q, x.PD, x.offsets, x.lengths, **o
    )[0],
    "pair_list": lambda x, o: lik_ops.maxsim_pair_list(x.PQ, x.PD, x.pairs, **x.cut, max_seqlen_q=3, **o),
    "pair_list_with_argmax": lambda x, o: lik_ops.maxsim_pair_list_with_argmax(x.Q, x.D, x.pairs, **o)[0],
    "padded": lambda x, o: lik_ops.maxsim_padded(x.Q, x.C, x.n_q, x.n_d, **o),
    "padded_with_argmax": lambda x, o: lik_ops.maxsim_padded_with_argmax(x.Q, x.C, x.n_q, x.n_d, **o)[0],
    "MaxSimScorer": lambda x, o: lik_ops.MaxSimScorer(**o)(x.Q, x.D),
    "compiled": compiled,
    "compiled, changed inside too": compiled_with_edit,
}
RECOMPUTES = (
    *list(CALLS)[:16],
    "MaxSimScorer",
    "compiled",
    "compiled, changed inside too",
)  # those that accept recompute
EDITS = {
    "divided": lambda s: s.div_(0.05),
    "masked": lambda s: s.masked_fill_(s > 0, -2.0),
    "multiplied by itself": lambda s: s.mul_(s.detach().clone()),
    "one set": lambda s: s.view(-1)[0].zero_(),
}


def edit_copy(scores, edit):
    copy = scores.clone()
    edit(copy)
    return copy


def gradients(x, scores):
    leaves = [getattr(x, name) for name in LEAVES]
    upstream = torch.arange(1.0, scores.numel() + 1, device=scores.device).view(scores.shape)
    grads = torch.autograd.grad(scores, leaves, upstream, allow_unused=True)
    return [g for g in grads if g is not None]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("long_way", [False, True], ids=["short", "long"])
def test_scores_can_be_changed_in_place(x, name, edit, long_way):
    if name.startswith("compiled") and long_way:
        pytest.skip("compiled calls have one way")
    options = [{"backward": backward} for backward in ("auto", "lowmem", "unified")]
    options += [{"recompute": True}] if name in RECOMPUTES else []
    for option in options:
        with Seen() if long_way else contextlib.nullcontext():
            scores, expected = CALLS[name](x, option), CALLS[name](x, option)
        expected = edit_copy(expected, EDITS[edit])
        EDITS[edit](scores)
        assert torch.equal(scores, expected)
        found = gradients(x, scores)
        assert len(found) > 0
        for a, b in zip(found, gradients(x, expected), strict=True):
            if option.get("backward") == "lowmem":
                assert torch.equal(a, b)
            else:  # atomics change the order of sums, so the error is the rounding of their largest term
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * float(b.abs().max()))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_scores_without_gradients_can_be_changed_in_place(x, name, mode):
    with mode():
        scores = CALLS[name](x, {})
        for edit in EDITS.values():
            expected = edit_copy(scores, edit)
            edit(scores)
            assert torch.equal(scores, expected)
