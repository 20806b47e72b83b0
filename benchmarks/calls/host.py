"""Measure the host cost of a call on this GPU, its parts, and the host cost of two peer libraries.

    python -m benchmarks.calls.host [--rounds 300] [--out FILE] [--without-gpu]

Times are host microseconds of tiny calls (8 x 8, Lq 32, Ld 64, d 64, bf16), the best over blocks of calls. The GPU
runs behind the host, with a sync between blocks. Blocks are short enough for the launch queue. ``steps`` are parts of
a call, each alone. ``ragged`` and ``ragged step`` are calls with few tokens of many lengths, packed and padded, with
the peers.

``--without-gpu`` measures ``no grad``, ``training`` and ``compiled`` on a CPU, with launches that do nothing. Peers
and einsum are left out, because they would compute. Blocks are shorter, because other processes interrupt.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import lik_ops
from lik_ops.gpu.runtime import launcher

from ..support import common
from ..support.contenders import PEERS
from ..support.ragged_cases import (
    Case,
    Inputs,
)
from ..support.ragged_contenders import (
    contenders,
)
from . import without_gpu

BLOCK, BLOCK_WITHOUT_GPU = 50, 20
_kept: list[torch.library.Library] = []  # keep them alive, else their operators disappear
RAGGED = (
    Case("cross", 8, 8, 32, 64, d=64, mean_q=0.6),
    Case("cross, dense queries", 8, 8, 32, 64, d=64),
    Case("candidates", 8, 8, 32, 64, K=8, d=64),
    Case("pairs", 8, 8, 32, 64, P=16, d=64, mean_q=0.6),
)


def warm(function: Callable[[], object]) -> None:
    for _ in range(20):
        function()
    _wait()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def microseconds(functions: dict[str, Callable[[], object]], rounds: int, block: int = BLOCK) -> dict[str, float]:
    """Return the best time of each call in microseconds.

    Blocks of calls alternate, because the speed of a host changes from one second to the next.
    """
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(max(rounds // block, 3)):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(block):
                function()
            best[name] = min(best[name], (time.perf_counter() - start) / block * 1e6)
            _wait()
    return best


def einsum(Q: Tensor, D: Tensor) -> Tensor:
    return torch.einsum("isd,jtd->ijst", Q, D).amax(-1).float().sum(-1)


def scoring(Q: Tensor, D: Tensor) -> dict[str, Callable[[], object]]:
    q_mask, d_mask = (torch.ones(t.shape[:2], dtype=torch.bool, device=Q.device) for t in (Q, D))
    weight = torch.ones(Q.shape[:2], device=Q.device)
    varied = [torch.randn(8, Ld, 64, device=Q.device, dtype=Q.dtype) for Ld in range(64, 64 + 40)]
    turn = iter(range(10**9))
    wide_Q, wide_D = (torch.randn(*n, 128, device=Q.device, dtype=Q.dtype) for n in ((16, 32), (1000, 300)))
    holes = torch.rand(1000, 300, device=Q.device) < 0.7
    one, int8 = wide_Q[:1], lik_ops.quantize(wide_D)
    two_int8 = int8, lik_ops.quantize(wide_D[:600, :180])
    packed_Q, packed_D = Q.flatten(0, 1), D.flatten(0, 1)
    cu_q, cu_d = (torch.arange(9, device=Q.device) * n for n in (32, 64))
    stores = [(packed_D[: 8 * n], torch.arange(9, device=Q.device) * n) for n in range(24, 64)]

    def packed_in_turn() -> Tensor:
        tokens, bounds = stores[next(turn) % 40]
        return lik_ops.maxsim_varlen(packed_Q, tokens, cu_q, bounds)

    raw = packed_Q, packed_D, cu_q, cu_d[:-1].contiguous(), cu_d.diff(), *[None] * 4, False, None, 32, "auto"
    found: dict[str, Callable[[], object]] = {
        "lik_ops.maxsim_varlen": lambda: lik_ops.maxsim_varlen(packed_Q, packed_D, cu_q, cu_d),
        "lik_ops.maxsim_varlen, 40 stores in turn": packed_in_turn,
        "lik::maxsim_ragged_fwd": lambda: torch.ops.lik.maxsim_ragged_fwd(*raw),
        "lik_ops.maxsim": lambda: lik_ops.maxsim(Q, D),
        "torch.ops.lik.maxsim": lambda: torch.ops.lik.maxsim(Q, D),
        "lik_ops.maxsim, masks and weights": lambda: lik_ops.maxsim(Q, D, q_mask, d_mask, q_weight=weight),
        "lik_ops.maxsim, 40 lengths in turn": lambda: lik_ops.maxsim(Q, varied[next(turn) % 40]),
        "lik_ops.maxsim, views of 64 lengths": lambda: lik_ops.maxsim(Q, D[:, : 1 + next(turn) % 64]),
        "lik_ops.maxsim, Nq 1": lambda: lik_ops.maxsim(Q[0], D),
        "lik_ops.maxsim_with_argmax": lambda: lik_ops.maxsim_with_argmax(Q, D),
        "lik_ops.maxsim, 16 x 1000": lambda: lik_ops.maxsim(wide_Q, wide_D),
        "lik_ops.maxsim, 16 x 1000, masks": lambda: lik_ops.maxsim(wide_Q, wide_D, None, holes),
        "lik_ops.maxsim, 1 x 1000, int8": lambda: lik_ops.maxsim(one, int8),
        "lik_ops.maxsim, 1 x 1000, two int8 shapes": lambda: lik_ops.maxsim(one, two_int8[next(turn) % 2]),
        "lik_ops.maxsim_soft": lambda: lik_ops.maxsim_soft(Q, D, 0.1),
        "lik_ops.retrieve": lambda: lik_ops.retrieve(Q, D, 4),
        "lik::maxsim_fwd": lambda: torch.ops.lik.maxsim_fwd(Q, D, None, None, None, False, None, "auto"),
        "eager einsum": lambda: einsum(Q, D),
    }
    try:
        from late_interaction_kernels.forward import maxsim_forward

        found["late-interaction-kernels"] = lambda: maxsim_forward(Q, D)
    except ImportError:
        pass
    try:
        import flash_maxsim

        found["flash-maxsim"] = lambda: flash_maxsim.flash_maxsim_batched(Q, D, shared_docs=True)
    except ImportError:
        pass
    return found


def training(Q: Tensor, D: Tensor) -> dict[str, Callable[[], object]]:
    Q, D = Q.clone().requires_grad_(), D.clone().requires_grad_()
    upstream = torch.ones(8, 8, device=Q.device)

    def step(forward: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), (Q, D), upstream)

    kept = {b: lik_ops.maxsim(Q, D, backward=b) for b in ("lowmem", "unified")}
    found: dict[str, Callable[[], object]] = {"forward": lambda: lik_ops.maxsim(Q, D)}
    for name, scores in kept.items():
        found[f"backward {name}"] = lambda s=scores: torch.autograd.grad(s, (Q, D), upstream, retain_graph=True)
        found[f"step {name}"] = step(lambda b=name: lik_ops.maxsim(Q, D, backward=b))
    packed_Q, packed_D = (x.detach().flatten(0, 1).requires_grad_() for x in (Q, D))
    cu_q, cu_d = (torch.arange(9, device=Q.device) * n for n in (32, 64))
    found["packed step"] = lambda: torch.autograd.grad(
        lik_ops.maxsim_varlen(packed_Q, packed_D, cu_q, cu_d), (packed_Q, packed_D), upstream
    )
    raw = None, None, None, False, torch.int16, "auto"
    found["step, lik::maxsim_fwd"] = step(lambda: torch.ops.lik.maxsim_fwd(Q, D, *raw)[0])
    found["step, eager einsum"] = step(lambda: einsum(Q, D))
    try:
        from late_interaction_kernels import maxsim

        found["step, late-interaction-kernels"] = step(lambda: maxsim(Q, D))
    except ImportError:
        pass
    try:
        import flash_maxsim

        found["step, flash-maxsim"] = step(lambda: flash_maxsim.flash_maxsim_batched_train(Q, D))
    except ImportError:
        pass
    return found


def compiled(Q: Tensor, D: Tensor) -> dict[str, Callable[[], object]]:
    """Return compiled functions: forward, step, and a step of projection, normalization, scores and cross-entropy.

    "nothing" is the cost of PyTorch alone: operators with the same arguments that return ready results. Steps run
    autograd in its own thread as usual. "one thread" runs autograd in the calling thread, because waking a thread may
    be slow.
    """
    upstream, labels = torch.ones(8, 8, device=Q.device), torch.arange(8, device=Q.device)
    leaf_Q, leaf_D = Q.clone().requires_grad_(), D.clone().requires_grad_()
    weight = torch.randn(64, 64, device=Q.device, dtype=Q.dtype).requires_grad_()
    found: dict[str, Callable[[], object]] = {}
    for name, score in {"lik_ops.maxsim": lik_ops.maxsim, "einsum": einsum, "nothing": nothing(Q, D)}.items():

        def loss(weight: Tensor, score: Callable[[Tensor, Tensor], Tensor] = score) -> Tensor:
            tokens = (torch.nn.functional.normalize(x @ weight, dim=-1) for x in (Q, D))
            return torch.nn.functional.cross_entropy(score(*tokens), labels)

        forward, whole = torch.compile(score), torch.compile(loss)

        def alone(f: Callable = forward) -> Tensor:
            with torch.no_grad():
                return f(Q, D)

        found[f"{name}, forward"] = alone
        found[f"{name}, step"] = lambda f=forward: torch.autograd.grad(f(leaf_Q, leaf_D), (leaf_Q, leaf_D), upstream)
        found[f"{name}, step of an encoder"] = lambda f=whole: torch.autograd.grad(f(weight), weight)
        found[f"{name}, step of an encoder, eager"] = lambda f=loss: torch.autograd.grad(f(weight), weight)
    for name, step in list(found.items()):
        if "step" in name:
            found[f"{name}, one thread"] = in_one_thread(step)
    return found


def in_one_thread(step: Callable[[], object]) -> Callable[[], object]:
    def alone() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return step()

    return alone


def nothing(Q: Tensor, D: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a scorer whose operator computes and allocates only what autograd requires."""
    ready = Q.new_zeros(8, 8, dtype=torch.float32), Q.new_zeros(8, 8, 32, dtype=torch.int16)

    def like(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in tensors)

    gradients = like((Q, D))
    library = torch.library.Library("host_benchmark", "FRAGMENT")
    library.define("nothing(Tensor Q, Tensor D) -> (Tensor, Tensor)")
    library.define("nothing_backward(Tensor grad, Tensor Q, Tensor D, Tensor argmax) -> (Tensor, Tensor)")
    library.impl("nothing", lambda Q, D: ready, Q.device.type.upper())
    library.impl("nothing_backward", lambda *tensors: gradients, Q.device.type.upper())
    ops = torch.ops.host_benchmark
    torch.library.register_fake(
        "host_benchmark::nothing", lambda Q, D: tuple(Q.new_empty(x.shape, dtype=x.dtype) for x in ready)
    )
    torch.library.register_fake("host_benchmark::nothing_backward", lambda grad, *tensors: like(tensors[:2]))
    torch.library.register_autograd(
        "host_benchmark::nothing",
        lambda ctx, grad, _: ops.nothing_backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]),
    )
    _kept.append(library)
    return lambda Q, D: ops.nothing(Q, D)[0]


def ragged(what: str) -> dict[str, Callable[[], object]]:
    """Return all contenders on each case of `RAGGED`, for scores or for training steps.

    lik_ops is also measured with row counts that change at every call.
    """
    found: dict[str, Callable[[], object]] = {}
    for case in RAGGED:
        x = Inputs(replace(case, what=what), "cuda")
        for name, contender in contenders(x).items():
            if isinstance(contender, str):
                continue
            score, tokens = contender
            if what == "step":
                tokens = tuple(t.detach().clone().requires_grad_() for t in tokens)
            found[f"{case.name}, {name}"] = _call(score, tokens, x.grad_scores if what == "step" else None)
    if what == "scores":
        x, turn = Inputs(RAGGED[0], "cuda"), iter(range(10**9))
        stores = [(x.draw(8 * n), torch.arange(9, device="cuda") * n) for n in range(20, 60)]
        tensors = x.Q, x.D, x.cu_q, x.cu_d[:-1].contiguous(), x.cu_d.diff(), *[None] * 4

        def varied() -> Tensor:
            D, cu_d = stores[next(turn) % 40]
            return lik_ops.maxsim_varlen(x.Q, D, x.cu_q, cu_d)

        found["cross, lik_ops, 40 stores in turn"] = varied
        found["lik::maxsim_ragged_fwd"] = lambda: torch.ops.lik.maxsim_ragged_fwd(*tensors, False, None, 32, "auto")
    return found


def _call(score: Callable[..., Tensor], tokens: tuple[Tensor, ...], upstream: Tensor | None) -> Callable[[], object]:
    if upstream is None:
        return lambda: score(*tokens)
    return lambda: torch.autograd.grad(score(*tokens), tokens, upstream)


def steps(Q: Tensor, D: Tensor) -> dict[str, Callable[[], object]]:
    """Return parts of `lik_ops.maxsim`, each as a function."""
    from lik_ops.core.arguments import check_dense, make_metadata_key
    from lik_ops.core.settings import get_requested_backend
    from lik_ops.gpu import backend as cuda
    from lik_ops.gpu.backward import dense as cuda_backward
    from lik_ops.ops.fast_path import watchers

    lik_ops.maxsim(Q, D)
    plan = cuda.forward_plan(Q, D, None, None, None, False, None)
    scores, given = torch.empty(8, 8, device="cuda"), (Q, D, None, None, None)
    empty_strided = torch._C._dynamo.guards._empty_strided_cuda
    again = next(again for _ in range(4) if (again := plan.forward((8, 8), given)[1]))
    argmax = torch.ops.lik.maxsim_fwd(Q, D, None, None, None, False, torch.int16, "auto")[1]

    def backward(name: str) -> object:
        return getattr(cuda, f"backward_{name}")(scores, Q, D, argmax, None, None, None, False, [True, True, False])

    leaf = torch.zeros(8, 8, device="cuda", requires_grad=True)
    copied = leaf.view_as(leaf)
    return {
        "nobody watches": watchers.is_dispatch_idle,
        "ordinary tensors (2)": lambda: (watchers.is_ordinary_tensor(Q), watchers.is_ordinary_tensor(D)),
        "metadata": lambda: make_metadata_key(Q, D, None, None, None),
        "requested backend": get_requested_backend,
        "check": lambda: check_dense("maxsim", Q, D, None, None, None),
        "torch.empty": lambda: torch.empty((8, 8), dtype=torch.float32, device=Q.device),
        "new_empty": lambda: Q.new_empty((8, 8), dtype=torch.float32),
        "empty_strided_cuda": lambda: empty_strided((8, 8), (8, 1), torch.float32),
        "launch hooks": launcher.has_launch_hooks,
        "plan": lambda: cuda.forward_plan(Q, D, None, None, None, False, None),
        "plan's forward": lambda: plan.forward((8, 8), given),
        "replayed": lambda: again(given),
        "in full": lambda: plan.scores((8, 8), *given, None),
        "backend's backward lowmem": lambda: backward("lowmem"),
        "its outputs": lambda: cuda_backward.allocate_gradients(Q, D, [True, True, False], False),
        "backend's backward unified": lambda: backward("unified"),
        "torch.autograd.grad of a view": lambda: torch.autograd.grad(copied, leaf, scores, retain_graph=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000, help="calls per contender (default 1000)")
    parser.add_argument("--only", default="", help="comma-separated kinds: no grad, training, compiled, ragged, ...")
    parser.add_argument("--out", type=Path, help="output file (default benchmarks/results/host.json)")
    parser.add_argument("--without-gpu", action="store_true", help="on a CPU, with launches that do nothing")
    args = parser.parse_args()
    if args.without_gpu:
        without_gpu.install()
    device = "cpu" if args.without_gpu else "cuda"
    Q, D = (torch.randn(8, n, 64, device=device, dtype=torch.bfloat16) for n in (32, 64))
    records = []
    print(f"launched {launcher.describe_launch_path()}")
    kinds: tuple[tuple[str, Callable[[], dict[str, Callable[[], object]]], bool], ...] = (
        ("no grad", lambda: scoring(Q, D), False),
        ("training", lambda: training(Q, D), True),
        ("compiled", lambda: compiled(Q, D), True),
        ("ragged", lambda: ragged("scores"), False),
        ("ragged step", lambda: ragged("step"), True),
        ("steps", lambda: steps(Q, D), False),
    )
    titles = [title for title, _, _ in kinds]
    chosen = args.only.split(",") if args.only else titles[:3] if args.without_gpu else titles
    if not set(titles) & set(chosen):
        parser.error(f"--only: expected some of {', '.join(titles)}, got {args.only}")
    block = BLOCK_WITHOUT_GPU if args.without_gpu else BLOCK
    for title, make, grad in kinds:
        if title not in chosen:
            continue
        with torch.set_grad_enabled(grad or title == "steps"):
            functions = make()
        if args.without_gpu:
            others = ("einsum", "late-interaction", "flash-maxsim")
            functions = {name: f for name, f in functions.items() if not any(other in name for other in others)}
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, function in list(functions.items()):
                try:
                    warm(function)
                except Exception as failure:
                    print(f"{title:11} {name:49} failed: {type(failure).__name__}: {failure}"[:200])
                    del functions[name]
            for name, us in microseconds(functions, args.rounds, block).items():
                print(f"{title:11} {name:49} {us:8.2f} us", flush=True)
                records.append({"kind": title, "name": name, "us": us})
        path = common.write("host", records, *PEERS, path=args.out, shape=[8, 8, 32, 64, 64])
    print("wrote", path)


if __name__ == "__main__":
    main()
