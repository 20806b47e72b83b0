"""Test MaxSim of hidden states under torch.compile, torch.export, vmap, torch.func, autocast, and FLOP counting."""

import math

import pytest
import torch

import lik_ops
from lik_ops import reference

from ...support.stack import (
    assert_autocast,
    assert_compiled_steps,
    assert_derives_no_further,
    assert_exported,
    assert_vmap_is_a_loop,
    at_devices,
    flops,
    losses,
)

Nq, Nd, Lq, Ld, d, width = 2, 4, 5, 6, 8, 12


def inputs(device, options=True):
    tensors = torch.randn(Nq, Lq, d), torch.randn(Nd, Ld, width), torch.randn(d, width), torch.randn(d)
    masks = torch.rand(Nq, Lq) > 0.3, torch.rand(Nd, Ld) > 0.3
    masks[1][..., 0] = True
    more = (*masks, torch.rand(Nq, Lq)) if options else (None,) * 3
    return [None if t is None else t.to(device) for t in (*tensors, *more)]


def compute_scores(Q, H, W, b, q_mask, d_mask, w):
    return lik_ops.maxsim_from_hidden(Q, H, W, b, q_mask, d_mask, q_weight=w)


@at_devices
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_steps_equal_eager(device, dynamic):
    assert_compiled_steps(compute_scores, inputs(device), dynamic=dynamic)


@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_dynamic_sizes(strict):
    def retrieved(Q, H, W, b, d_mask):
        return lik_ops.maxsim_from_hidden(Q, H, W, b, d_mask=d_mask)

    Q, H, W, b, _, d_mask, _ = inputs("cpu")
    others = *(torch.randn(shape) for shape in ((3, 7, 9), (6, 8, 13), (9, 13), (9,))), torch.rand(6, 8) > 0.2
    assert_exported(retrieved, (Q, H, W, b, d_mask), others, "maxsim_from_hidden_fwd", strict=strict)


@at_devices
def test_vmap_matches_a_loop(device):
    batch = [torch.stack(x) for x in zip(*(inputs(device) for _ in range(3)), strict=True)]
    assert_vmap_is_a_loop(compute_scores, batch, (0,) * 7)
    one = [x[0] for x in batch]
    assert_vmap_is_a_loop(
        compute_scores, (batch[0], *one[1:4], batch[4], one[5], batch[6]), (0, None, None, None, 0, None, 0)
    )


def test_unsupported_differentiation_raises():
    Q, H, W, *_ = inputs("cpu")
    assert_derives_no_further(lambda H: lik_ops.maxsim_from_hidden(Q, H, W), H, "maxsim_from_hidden")


@at_devices
def test_autocast_casts_tokens_to_its_dtype(device):
    Q, H, W, b, *_ = inputs(device)
    assert_autocast(lambda Q, H: lik_ops.maxsim_from_hidden(Q, H, W.to(Q), b.to(Q)), Q, H)
    with torch.autocast(device, torch.bfloat16):
        found = lik_ops.maxsim_from_hidden(Q, H, W, b)
    assert torch.equal(found, lik_ops.maxsim_from_hidden(*(t.bfloat16() for t in (Q, H, W, b))))


@at_devices
def test_flops_count_the_matrix_products(device):
    projection, products, winners = 2 * Nd * Ld * width * d, 2 * Nq * Nd * Lq * Ld * d, 2 * Nq * Nd * Lq * d
    found = flops(lik_ops.maxsim_from_hidden, *inputs(device)[:4])
    assert found == (projection + products, 3 * projection + 2 * winners)


def test_argmax_is_requested_only_for_backward():
    Q, H, W, *_ = inputs("cpu")
    calls = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "lik":
                calls.append(args[8])
            return func(*args, **(kwargs or {}))

    with Seen():
        lik_ops.maxsim_from_hidden(Q, H, W)
        lik_ops.maxsim_from_hidden(Q, H, W.clone().requires_grad_())
        with torch.no_grad():
            lik_ops.maxsim_from_hidden(Q, H, W.clone().requires_grad_())
    assert calls == [None, torch.int16, None]


@at_devices
def test_training_losses_match_reference(device):
    """Run 200 steps of a contrastive loss over queries, hidden states, and a head, and compare with the formula."""

    def train(score):
        torch.manual_seed(0)
        shapes = (6, 4, 16), (6, 9, 24), (16, 24), (16,)
        leaves = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
        labels = torch.arange(6, device=device)
        return losses(lambda: torch.nn.functional.cross_entropy(score(*leaves), labels), leaves, 0.05, 200)

    found, expected = train(lik_ops.maxsim_from_hidden), train(reference.maxsim_from_hidden)
    assert found[-1] < found[0] - 0.5
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, expected, strict=True))
