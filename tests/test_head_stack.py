"""MaxSim of hidden states under torch.compile, torch.export, vmap, torch.func, autocast and FLOP counting."""

import math

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

import lik_ops
from lik_ops import reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
at_devices = pytest.mark.parametrize("device", DEVICES)
Nq, Nd, Lq, Ld, d, width = 2, 4, 5, 6, 8, 12


def inputs(device, options=True):
    tensors = torch.randn(Nq, Lq, d), torch.randn(Nd, Ld, width), torch.randn(d, width), torch.randn(d)
    masks = torch.rand(Nq, Lq) > 0.3, torch.rand(Nd, Ld) > 0.3
    masks[1][..., 0] = True
    more = (*masks, torch.rand(Nq, Lq)) if options else (None,) * 3
    return [None if t is None else t.to(device) for t in (*tensors, *more)]


def scored(Q, H, W, b, q_mask, d_mask, w):
    return lik_ops.maxsim_from_hidden(Q, H, W, b, q_mask, d_mask, q_weight=w)


def gradients(function, args):
    leaves = [t.detach().requires_grad_() for t in (*args[:4], args[6])]
    function(*leaves[:4], *args[4:6], leaves[4]).square().sum().backward()
    return [t.grad for t in leaves]


@at_devices
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_steps_have_the_bits_of_eager_ones(device, dynamic):
    torch.compiler.reset()
    args = inputs(device)
    compiled = torch.compile(scored, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for found, e in zip(gradients(compiled, args), gradients(scored, args), strict=True):
        assert torch.equal(found, e)


class Retriever(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(width, d)

    def forward(self, Q, H, d_mask):
        return lik_ops.maxsim_from_hidden(Q, H, self.head.weight, self.head.bias, d_mask=d_mask)


@pytest.mark.parametrize("strict", [False, True])
def test_it_exports_with_every_size_dynamic(strict):
    from torch.export import Dim

    Q, H, _, _, _, d_mask, _ = inputs("cpu")
    names = dict(enumerate([Dim.DYNAMIC] * 2))
    module = Retriever()
    program = torch.export.export(
        module, (Q, H, d_mask), dynamic_shapes={"Q": names, "H": names, "d_mask": names}, strict=strict
    )
    targets = [str(node.target) for node in program.graph.nodes if "lik" in str(node.target)]
    assert targets == ["lik.maxsim_from_hidden_fwd.default"]
    Q, H, d_mask = torch.randn(3, 7, d), torch.randn(6, 9, width), torch.rand(6, 9) > 0.2
    assert torch.equal(program.module()(Q, H, d_mask), module(Q, H, d_mask))


@at_devices
def test_vmap_is_a_loop(device):
    batch = [torch.stack(x) for x in zip(*(inputs(device) for _ in range(3)), strict=True)]
    expected = torch.stack([scored(*x) for x in zip(*batch, strict=True)])
    assert torch.equal(vmap(scored)(*batch), expected)
    shared = vmap(scored, in_dims=(0, None, None, None, 0, None, 0))
    one = [x[0] for x in batch]
    found = shared(batch[0], *one[1:4], batch[4], one[5], batch[6])
    assert torch.equal(found[1], scored(batch[0][1], *one[1:4], batch[4][1], one[5], batch[6][1]))


def test_what_it_cannot_derive_raises():
    Q, H, W, *_ = inputs("cpu")
    with pytest.raises(NotImplementedError, match=r"torch\.func cannot differentiate maxsim_from_hidden"):
        grad(lambda W: lik_ops.maxsim_from_hidden(Q, H, W).sum())(W)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(lambda H: lik_ops.maxsim_from_hidden(Q, H, W), (H,), (H,))
    leaf = H.detach().requires_grad_()
    (first,) = torch.autograd.grad(lik_ops.maxsim_from_hidden(Q, leaf, W).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        first.sum().backward()


@at_devices
def test_autocast_multiplies_in_its_dtype(device):
    Q, H, W, b, *_ = inputs(device)
    with torch.autocast(device, torch.bfloat16):
        found = lik_ops.maxsim_from_hidden(Q, H, W, b)
    assert found.dtype == torch.float32
    assert torch.equal(found, lik_ops.maxsim_from_hidden(*(t.bfloat16() for t in (Q, H, W, b))))


@at_devices
def test_flops_are_those_of_its_products(device):
    Q, H, W, b, *_ = (None if t is None else t.requires_grad_() for t in inputs(device, options=False))
    with FlopCounterMode(display=False) as counter:
        scores = lik_ops.maxsim_from_hidden(Q, H, W, b)
        forward = counter.get_total_flops()
        scores.sum().backward()
    projection, products, winners = 2 * Nd * Ld * width * d, 2 * Nq * Nd * Lq * Ld * d, 2 * Nq * Nd * Lq * d
    assert forward == projection + products
    assert counter.get_total_flops() == forward + 3 * projection + 2 * winners


def test_nothing_is_kept_without_a_gradient():
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
def test_training_goes_as_with_the_formula(device):
    """200 steps of a contrastive loss over queries, hidden states and a head, beside the same with the formula."""

    def train(score):
        torch.manual_seed(0)
        shapes = (6, 4, 16), (6, 9, 24), (16, 24), (16,)
        leaves = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
        optimizer, losses = torch.optim.SGD(leaves, lr=0.05), []
        for _ in range(200):
            loss = torch.nn.functional.cross_entropy(score(*leaves), torch.arange(6, device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses

    found, expected = train(lik_ops.maxsim_from_hidden), train(reference.maxsim_from_hidden)
    assert found[-1] < found[0] - 0.5
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, expected, strict=True))
