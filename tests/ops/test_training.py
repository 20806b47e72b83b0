"""Test the usual training code around the operators: scaling, accumulation, checkpoints, and compilers."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import lik_ops
from lik_ops import reference

from ..support.common import CUDA, PLACES, PORTABLE
from ..support.encoder import Encoder, batch, in_batch_loss
from ..support.stack import kept_for_backward

ROOT = Path(__file__).parents[2]


def _gradients(loss: torch.Tensor, encoder: torch.nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(encoder.parameters())))


def _distance(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the relative norm of the difference, over all gradients together."""
    a, e = (torch.cat([g.flatten().double() for g in grads]) for grads in (actual, expected))
    return float((a - e).norm() / e.norm())


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
def test_gradients_of_a_scaled_fp16_loss_do_not_vanish(place, backward):
    """Without GradScaler, gradients of this small loss would underflow in fp16. The scale reaches the operator."""
    encoder, x = Encoder().to(place.device), batch(5, 7, 6, 20, place.device)
    shrink = 1e-7

    def loss():
        with place.use(), torch.autocast(place.device, torch.float16):
            return shrink * in_batch_loss(encoder, *x, backward=backward)

    with place.use():
        expected = _gradients(shrink * in_batch_loss(encoder, *x), encoder)
    assert _distance(_gradients(loss(), encoder), expected) > 0.1
    scaler = torch.amp.GradScaler(place.device, init_scale=2.0**20)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1.0)
    before = [p.detach().clone() for p in encoder.parameters()]
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    assert _distance([p.grad for p in encoder.parameters()], expected) < 5e-3
    scaler.step(optimizer)
    assert any(not torch.equal(p, b) for p, b in zip(encoder.parameters(), before, strict=True)), "the step was skipped"


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
@pytest.mark.parametrize("layout", ["cross", "candidates"])
def test_accumulated_gradients_match_the_whole_batch(place, backward, layout):
    """Sums over queries in parts, against all documents (as in GradCache) or with their own candidates."""
    encoder = Encoder().to(place.device)
    queries, documents, d_mask = batch(6, 6, 5, 20, place.device)
    if layout == "candidates":
        documents, d_mask = documents.repeat(6, 1, 1, 1), d_mask.repeat(6, 1, 1)

    def loss(part):
        own = part if layout == "candidates" else slice(None)
        labels = torch.arange(6, device=place.device)[part]
        scores = lik_ops.maxsim(
            encoder(queries[part]), encoder(documents[own]), None, d_mask[own], normalize=True, backward=backward
        )
        return F.cross_entropy(scores, labels, reduction="sum")

    with place.use():
        whole = _gradients(loss(slice(0, 6)), encoder)
        for part in (slice(0, 3), slice(3, 6)):
            loss(part).backward()
    assert _distance([p.grad for p in encoder.parameters()], whole) < 1e-6


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_checkpointed_steps_have_the_same_bits(place, use_reentrant, recompute):
    encoder = Encoder().to(place.device)
    queries, documents, d_mask = batch(5, 7, 6, 20, place.device)
    queries.requires_grad_()  # a reentrant checkpoint without such an input has no gradients
    step = partial(in_batch_loss, encoder, backward="lowmem", recompute=recompute)
    leaves = [*encoder.parameters(), queries]
    with place.use():
        step(queries, documents, d_mask).backward()
        plain = [t.grad.clone() for t in leaves]
        for t in leaves:
            t.grad = None
        checkpoint(step, queries, documents, d_mask, use_reentrant=use_reentrant).backward()
    assert all(torch.equal(t.grad, expected) for t, expected in zip(leaves, plain, strict=True))


def _train(encoder, maxsim, steps, device):
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = in_batch_loss(encoder, *batch(12, 12, 5, 24, device, seed=step), maxsim=maxsim)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_two_hundred_steps_follow_the_eager_einsum(place, record_property):
    encoder = Encoder().to(place.device)
    with place.use():
        ours = _train(copy.deepcopy(encoder), lik_ops.maxsim, 200, place.device)
    theirs = _train(encoder, reference.maxsim, 200, place.device)
    difference = float((ours - theirs).abs().max())
    record_property("largest difference of a loss", difference)
    print(f"loss {float(ours[0]):.4f} to {float(ours[-1]):.4f}, largest difference {difference:.1e}")
    assert ours[-20:].mean() < 0.7 * ours[:20].mean()
    assert difference < 1e-4


def _kl(student, teacher):
    return F.kl_div(student.log_softmax(1), teacher.log_softmax(1), log_target=True, reduction="batchmean")


def _margin_mse(student, teacher):
    return F.mse_loss(*(scores[:, :1] - scores[:, 1:] for scores in (student, teacher)))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("loss", [_kl, _margin_mse])
def test_distillation_loss_and_gradients_match_the_reference(place, loss):
    torch.manual_seed(0)
    leaves = [torch.randn(*shape, 16, device=place.device, requires_grad=True) for shape in ((3, 5), (3, 4, 9))]
    d_mask, teacher = torch.rand(3, 4, 9, device=place.device) < 0.7, torch.randn(3, 4, device=place.device)
    d_mask[..., 0] = True
    with place.use():
        found = loss(lik_ops.maxsim(*leaves, None, d_mask, normalize=True), teacher)
        grads = torch.autograd.grad(found, leaves)
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    expected = loss(reference.maxsim(*leaves, None, d_mask, normalize=True), teacher.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert _distance(list(grads), list(torch.autograd.grad(expected, leaves))) < 1e-5


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("loss", [_kl, _margin_mse])
def test_distillation_saves_only_scores_and_argmax(loss, recompute):
    """docs/training.md gives 11.3 MiB for this shape, and nothing of the size of the similarities."""
    Q, D = (torch.randn(*shape, 128, requires_grad=True) for shape in ((32, 32), (32, 16, 180)))
    _, kept = kept_for_backward(lambda: loss(lik_ops.maxsim(Q, D, recompute=recompute), torch.randn(32, 16)))
    memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    others = sum(size for at, size in memory.items() if at not in (Q.data_ptr(), D.data_ptr()))
    assert others <= (4 if recompute else 36) * 1024, others


# Batch sizes and lengths that all differ in the second entry, so that each gets its own symbol.
SHAPES = [(4, 9, 5, 17), (6, 11, 7, 23), *[(2 + i % 5, 9 + 3 * i, 2 + 7 * i % 11, 5 + 11 * i % 37) for i in range(10)]]


@pytest.mark.parametrize(
    ("place", "compiler"),
    [
        (PORTABLE, "aot_eager"),
        pytest.param(PORTABLE, "inductor", marks=pytest.mark.slow),
        pytest.param(CUDA, "inductor", marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_compiled_steps_compile_at_most_twice_for_all_sizes(place, compiler):
    torch._dynamo.reset()
    encoder = Encoder().to(place.device)
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(partial(in_batch_loss, encoder), backend=counter, fullgraph=True)
    compiles = []
    with place.use():
        for shape in SHAPES:
            x = batch(*shape, place.device)
            assert min(shape) >= 2 and shape[0] <= shape[1]
            actual = _gradients(compiled(*x), encoder)
            assert _distance(actual, _gradients(in_batch_loss(encoder, *x), encoder)) < 1e-5
            compiles.append(counter.frame_count)
    assert compiles[0] == 1 and compiles[1] == 2, "the first shape is compiled as it is, the second for all"
    assert compiles[1:] == [2] * (len(SHAPES) - 1)
    assert sum("maxsim" in str(node.target) for node in counter.graphs[-1].graph.nodes) == 1


def test_two_processes_match_the_gradients_of_one():
    """Test DDP and FSDP2 around the encoder, with documents gathered from both: `tests/workers/distributed.py`."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.workers.distributed", "ddp", "fsdp2"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    for kind, rank in itertools.product(("ddp", "fsdp2"), (0, 1)):
        assert f"{kind} {rank} agrees" in run.stdout
