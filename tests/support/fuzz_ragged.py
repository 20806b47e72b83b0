"""Invalid calls of the ragged functions from a seed, each of which must raise an error or return NaN.

    python -m tests.support.fuzz_ragged --calls 10000
    compute-sanitizer python -m tests.support.fuzz_ragged --device cuda --calls 300

A valid call is drawn first, then changed. Some arguments change in kind: dtype, rank, size, device, or type. Such a
change must raise an error that names the argument, unless the call is still valid. Some integers change to any value.
The scores that depend on these integers must be NaN, and all others must equal the reference. Under `lik_ops.checks` an
error must be raised. Tokens are small integers, so scores and gradients are exact on every device.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lik_ops
from lik_ops import reference

d = 4
EXTREMES = (-1, -2, -(2**31), 2**31 - 1, 2**31, -(2**63), 2**63 - 1, 2**62)
INDICES = ("cu_seqlens_q", "cu_seqlens_d", "doc_offsets", "doc_lengths", "pairs", "query_lengths")
ERRORS = (TypeError, ValueError)


class Call(NamedTuple):
    """A function's name, its arguments, and the changes to them."""

    name: str
    arguments: dict[str, Any]
    changes: list[str]

    def __str__(self) -> str:
        shown = {
            k: v.tolist() if k in INDICES and isinstance(v, Tensor) and not v.is_meta else _kind(v)
            for k, v in self.arguments.items()
        }
        return f"{self.name}({shown}), changed: {self.changes}"


def _kind(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)} {x.device}" if isinstance(x, Tensor) and not x.is_nested else repr(x)[:80]


# Valid calls.


def _tokens(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel() * d
    return torch.tensor([float(rng.randint(-2, 2)) for _ in range(count)]).view(*shape, d)


def _weight(rng: random.Random, shape: tuple[int, ...]) -> Tensor | None:
    if rng.random() < 0.5:
        return None
    return torch.tensor([float(rng.randint(-1, 2)) for _ in range(torch.Size(shape).numel())]).view(shape)


def _lengths(rng: random.Random, most: int) -> list[int]:
    return [rng.choice((0, 1, 1, 2, 3, rng.randint(0, 40))) for _ in range(rng.randint(0, most))]


def _side(rng: random.Random, most: int) -> tuple[Any, Tensor | None, int]:
    """Return packed, dense, or listed tokens, their cu_seqlens, and the number of sequences."""
    form = rng.choice(("packed", "packed", "dense", "list", "jagged"))
    if form == "dense":
        shape = rng.randint(0, most), rng.randint(0, 6)
        return _tokens(rng, shape), None, shape[0]
    lengths = _lengths(rng, most)
    if form in ("list", "jagged") and lengths:
        parts = [_tokens(rng, (n,)) for n in lengths]
        x = torch.nested.as_nested_tensor(parts, layout=torch.jagged) if form == "jagged" else parts
        return x, None, len(lengths)
    before = rng.choice((0, 0, 2))  # rows outside every sequence
    cu = torch.tensor([before, *lengths]).cumsum(0)
    return _tokens(rng, (int(cu[-1]) + rng.choice((0, 0, 3)),)), cu, len(lengths)


def _per_token(Q: Any) -> tuple[int, ...]:
    if isinstance(Q, list):
        return (sum(x.shape[0] for x in Q),)
    return tuple(Q.values().shape[:1] if Q.is_nested else Q.shape[:-1])


def draw_valid_call(rng: random.Random) -> Call:
    """Return a valid random call."""
    name = rng.choice(("varlen", "candidates_varlen", "pair_list", "padded"))
    options: dict[str, Any] = {"normalize": False, "backward": rng.choice(("auto", "unified"))}
    dtype = rng.choice((torch.int32, torch.int64))
    if name == "padded":
        B, Lq, C, Ld = (rng.randint(0, n) for n in (3, 5, 3, 6))
        lengths = (
            torch.tensor([rng.randint(0, n) for _ in range(torch.Size(s).numel())])
            for s, n in (((B,), Lq), ((B, C), Ld))
        )
        q_lengths, d_lengths = (x.to(dtype) for x in lengths)
        options |= {"Q": _tokens(rng, (B, Lq)), "D": _tokens(rng, (B, C, Ld)), "q_weight": _weight(rng, (B, Lq))}
        options |= {"query_lengths": q_lengths, "doc_lengths": d_lengths.view(B, C)}
    else:
        Q, cu_q, Nq = _side(rng, 4)
        options |= {"Q": Q, "cu_seqlens_q": cu_q, "q_weight": _weight(rng, _per_token(Q))}
    if name == "candidates_varlen":
        Td, K = rng.randint(0, 40), rng.randint(0, 4)
        at = torch.tensor([rng.randint(0, Td) for _ in range(Nq * K)], dtype=dtype).view(Nq, K)
        length = torch.tensor([rng.randint(0, Td - int(x)) for x in at.flatten()], dtype=dtype).view(Nq, K)
        options |= {"D": _tokens(rng, (Td,)), "doc_offsets": at, "doc_lengths": length}
    elif name != "padded":
        D, cu_d, Nd = _side(rng, 6)
        options |= {"D": D, "cu_seqlens_d": cu_d}
    if name == "pair_list":
        count = rng.randint(0, 6) if Nq and Nd else 0
        pairs = [(rng.randrange(Nq), rng.randrange(Nd)) for _ in range(count)]
        options |= {"pairs": torch.tensor(pairs, dtype=dtype).view(-1, 2), "max_seqlen_q": rng.choice((40, 41, 100))}
        for side in ("q", "d"):
            x = options[side.upper()]
            if isinstance(x, Tensor) and not x.is_nested and rng.random() < 0.3:
                options[f"{side}_mask"] = torch.tensor(
                    [rng.random() < 0.7 for _ in range(torch.Size(x.shape[:-1]).numel())], dtype=torch.bool
                ).view(x.shape[:-1])
    return Call(f"maxsim_{name}{rng.choice(('', '', '_with_argmax'))}", options, [])


# Changes.

KINDS: dict[str, Callable[[Tensor], Any]] = {
    "complex": lambda t: t.to(torch.complex64),
    "float16": lambda t: t.to(torch.float16),
    "int8": lambda t: t.to(torch.int8),
    "an axis more": lambda t: t.unsqueeze(-1),
    "an axis before": lambda t: t.unsqueeze(0),
    "an axis less": lambda t: t.flatten(0, 1) if t.dim() > 1 else t.sum(),
    "longer": lambda t: torch.cat([t, t[..., :1]], -1),
    "shorter": lambda t: t[:-1],
    "empty": lambda t: t[..., :0],
    "elsewhere": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "python": lambda t: t.tolist(),
    "a list": list,
    "none": lambda t: None,
    "a number": lambda t: 3,
    "text": lambda t: "text",
}


def change_kind(rng: random.Random, call: Call) -> None:
    """Change the kind of one tensor argument of the call, if possible."""
    names = [k for k, v in call.arguments.items() if isinstance(v, Tensor) and not v.is_nested]
    if not names:
        return
    name, kind = rng.choice(names), rng.choice(list(KINDS))
    try:
        call.arguments[name] = KINDS[kind](call.arguments[name])
    except (IndexError, TypeError, RuntimeError, NotImplementedError):
        return  # this tensor has no such change
    call.changes.append(f"{name}: {kind}")


def _holds_integers(x: Any) -> bool:
    plain = isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta
    return plain and x.dtype in (torch.int32, torch.int64) and x.numel() > 0


def change_values(rng: random.Random, call: Call) -> None:
    """Change some integers of one argument of the call to arbitrary values."""
    names = [k for k in INDICES if _holds_integers(call.arguments.get(k))]
    if not names:
        return
    name = rng.choice(names)
    x = call.arguments[name].clone()
    flat, bounds = x.view(-1), torch.iinfo(x.dtype)
    for _ in range(rng.randint(1, 3)):
        value = rng.choice((*EXTREMES, rng.randint(-3, 60), rng.randint(bounds.min, bounds.max)))
        flat[rng.randrange(flat.numel())] = min(max(value, bounds.min), bounds.max)
    if rng.random() < 0.1:
        flat.copy_(flat.flip(0))
    call.arguments[name] = x
    call.changes.append(f"{name}: values")


def bad_call(rng: random.Random) -> tuple[Call, bool]:
    """Return a call, and whether only its values were changed."""
    call = draw_valid_call(rng)
    only_values = rng.random() < 0.6
    if only_values:
        for _ in range(rng.randint(1, 2)):
            change_values(rng, call)
        if "max_seqlen_q" in call.arguments and rng.random() < 0.2:
            call.arguments["max_seqlen_q"] = rng.choice((0, 1, 2))
    else:
        change_kind(rng, call)
        if rng.random() < 0.3:
            change_values(rng, call)
    return call, only_values


# Expected outcomes.


def _is_single(x: Any, cu_seqlens: Tensor | None) -> bool:
    """Return whether the tokens are one query or document ``[L, d]``, whose axis scores drop."""
    return isinstance(x, Tensor) and not x.is_nested and cu_seqlens is None and x.dim() == 2


def _segments(x: Any, cu_seqlens: Tensor | None) -> list[Any]:
    """Return the row indices of each sequence in its packed tensor, or None if they exceed the tensor."""
    if _is_single(x, cu_seqlens):
        return [range(x.shape[0])]
    if isinstance(x, Tensor) and not x.is_nested and cu_seqlens is None:
        return [range(i * x.shape[1], (i + 1) * x.shape[1]) for i in range(x.shape[0])]
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, *(len(t) for t in (x.unbind() if isinstance(x, Tensor) else x))]).cumsum(0)
        total = int(cu_seqlens[-1])
    else:
        total = x.shape[0]
    return [range(a, b) if 0 <= a <= b <= total else None for a, b in itertools.pairwise(cu_seqlens.tolist())]


def _packed(x: Any) -> Tensor:
    if isinstance(x, list):
        return torch.cat(x) if x else torch.empty(0, d)
    return x.values() if x.is_nested else x.reshape(-1, d)


def _cells(call: Call) -> tuple[list[tuple[Any, Any]], tuple[int, ...]]:
    """Return the query and document rows of each score, None if it is NaN, and the shape of the scores."""
    a = call.arguments
    if "query_lengths" in a:
        (B, Lq), (C, Ld) = a["Q"].shape[:2], a["D"].shape[1:3]
        queries = [
            range(i * Lq, i * Lq + n) if 0 <= n <= Lq else None for i, n in enumerate(a["query_lengths"].tolist())
        ]
        lengths = a["doc_lengths"].flatten().tolist()
        documents = [range(i * Ld, i * Ld + n) if 0 <= n <= Ld else None for i, n in enumerate(lengths)]
        return [(queries[i // C], x) for i, x in enumerate(documents)], (B, C)
    queries = _segments(a["Q"], a.get("cu_seqlens_q"))
    query_axis = () if _is_single(a["Q"], a.get("cu_seqlens_q")) else (len(queries),)
    if "doc_offsets" in a:
        K, total = a["doc_offsets"].shape[1], a["D"].shape[0]
        both = zip(a["doc_offsets"].flatten().tolist(), a["doc_lengths"].flatten().tolist(), strict=True)
        documents = [range(at, at + n) if at >= 0 and n >= 0 and at + n <= total else None for at, n in both]
        return [(queries[i // K], x) for i, x in enumerate(documents)], (*query_axis, K)
    documents = _segments(a["D"], a.get("cu_seqlens_d"))
    if "pairs" not in a:
        document_axis = () if _is_single(a["D"], a.get("cu_seqlens_d")) else (len(documents),)
        return [(q, x) for q in queries for x in documents], (*query_axis, *document_axis)
    bound = a["max_seqlen_q"]
    queries = [q if q is not None and len(q) <= bound else None for q in queries]
    found = [
        (queries[i] if 0 <= i < len(queries) else None, documents[j] if 0 <= j < len(documents) else None)
        for i, j in a["pairs"].tolist()
    ]
    return found, (len(found),)


def _compute_expected_scores(call: Call, Q: Tensor, D: Tensor, w: Tensor | None) -> Tensor:
    """Return the reference scores of each cell alone, differentiable in packed tokens."""
    cells, shape = _cells(call)
    masks = [call.arguments.get(name) for name in ("q_mask", "d_mask")]
    q_mask, d_mask = (None if m is None else m.reshape(-1) for m in masks)
    scores = []
    for q, x in cells:
        if q is None or x is None:
            scores.append(Q.new_tensor(float("nan")))
            continue
        rows, columns = slice(q.start, q.stop), slice(x.start, x.stop)
        parts = [None if m is None else m[at] for m, at in ((q_mask, rows), (d_mask, columns), (w, rows))]
        scores.append(reference.maxsim(Q[rows], D[columns], *parts[:2], q_weight=parts[2]))
    return torch.stack(scores).view(shape) if scores else Q.new_zeros(shape)


def _has_overlapping_queries(call: Call) -> bool:
    """Return whether two queries share a row, whose gradient is undefined then."""
    if "query_lengths" in call.arguments:
        return False
    rows = Counter(row for q in _segments(call.arguments["Q"], call.arguments.get("cu_seqlens_q")) if q for row in q)
    return any(count > 1 for count in rows.values())


def _copy_to_device(x: Any, device: str) -> Any:
    """Return a copy on the device, except for meta tensors and other objects."""
    if isinstance(x, list) and x and all(isinstance(t, Tensor) for t in x):
        return [t.to(device, copy=True) for t in x]
    if isinstance(x, Tensor) and not x.is_meta:
        return x.to(device) if x.is_nested else x.to(device, copy=True)
    return x


def _leaves(arguments: dict[str, Any]) -> list[Tensor]:
    """Return the tokens and weights, with requires_grad set."""
    found = []
    for name in ("Q", "D", "q_weight"):
        x = arguments.get(name)
        for t in x if isinstance(x, list) else [x]:
            if isinstance(t, Tensor) and not t.is_nested and t.is_floating_point() and not t.is_meta:
                found.append(t.requires_grad_())
    return found


def _run(call: Call, device: str, with_gradients: bool) -> tuple[Tensor, Any, list[Tensor]]:
    arguments = {k: _copy_to_device(v, device) for k, v in call.arguments.items()}
    leaves = _leaves(arguments) if with_gradients else []
    result = getattr(lik_ops, call.name)(**arguments)
    scores, argmax = result if isinstance(result, tuple) else (result, None)
    gradients = list(torch.autograd.grad(scores, leaves, torch.ones_like(scores))) if scores.requires_grad else []
    if scores.is_cuda:
        torch.cuda.synchronize()  # attribute an illegal access to this call
    return scores.detach(), argmax, gradients


def check(call: Call, only_values: bool, device: str, with_gradients: bool) -> str:
    """Run a call, compare it with the reference, and return its outcome in one word.

    Raises:
        AssertionError: The outcome is not the expected one.
    """
    try:
        scores, argmax, gradients = _run(call, device, with_gradients)
    except ERRORS as error:
        assert not only_values, f"{call}: values alone are no error: {error}"
        assert str(error).startswith((f"{call.name}: ", "maxsim: ", "maxsim_with_argmax: ")), f"{call}: {error}"
        return "error"
    a = call.arguments
    sides = [_packed(a[name]).detach().double().requires_grad_() for name in ("Q", "D")]
    w = a.get("q_weight")
    w = None if w is None else w.detach().double().reshape(-1).requires_grad_()
    expected = _compute_expected_scores(call, *sides, w)
    torch.testing.assert_close(
        scores.cpu().double(), expected.detach(), rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{call}: {m}"
    )
    for x in argmax if isinstance(argmax, list) else [argmax]:
        x = x.values() if isinstance(x, Tensor) and x.is_nested else x
        assert x is None or (x.ge(-1).all() and x.lt(max(1, sides[1].shape[0])).all()), f"{call}: {x}"
    if gradients:
        finite = torch.where(expected.isfinite(), expected, 0).sum()
        tensors = [*sides, *([] if w is None else [w])]
        wanted = torch.autograd.grad(finite, tensors, allow_unused=True) if finite.requires_grad else [None] * 3
        assert all(g.isfinite().all() for g in gradients), f"{call}: a gradient is not finite"
        plain = all(isinstance(a[name], Tensor) and not a[name].is_nested for name in ("Q", "D"))
        if plain and not _has_overlapping_queries(call):
            for found, g in zip(gradients, wanted, strict=False):
                g = torch.zeros_like(found.cpu()) if g is None else g.view(found.shape)
                torch.testing.assert_close(
                    found.cpu().double(), g.double(), rtol=0, atol=0, msg=lambda m: f"{call}: gradient: {m}"
                )
    _check_with_checks(call, device, bool(scores.isnan().any()))
    return "nan" if scores.isnan().any() else "right"


def _check_with_checks(call: Call, device: str, is_bad: bool) -> None:
    """Check that a call with NaN raises under checks. Other calls may also raise, for values that no score uses."""
    try:
        with lik_ops.checks():
            _run(call, device, False)
    except ValueError:
        return
    assert not is_bad, f"{call}: no error under lik_ops.checks"


def check_arbitrary_argmax(rng: random.Random, device: str) -> str:
    """Check the backward with an arbitrary argmax: no read is out of bounds, and gradients stay finite."""
    Tq, Td, Nq, Nd = (rng.randint(1, n) for n in (9, 20, 3, 4))
    cu, at, length = ([rng.choice((*EXTREMES[:4], rng.randint(0, 12))) for _ in range(n)] for n in (Nq + 1, Nd, Nd))
    pairs = None
    if rng.random() < 0.5:
        flat = [rng.choice((-1, 0, 1, 2, 2**31 - 1)) for _ in range(6)]
        pairs = torch.tensor(flat, device=device).view(3, 2)
    dtype = rng.choice((torch.int16, torch.int32, torch.int64))
    shape = (Nd, Tq) if pairs is None else (3, Tq)
    bounds = torch.iinfo(dtype)
    winners = [rng.choice((-1, bounds.min, bounds.max, rng.randint(0, 30))) for _ in range(torch.Size(shape).numel())]
    argmax = torch.tensor(winners, dtype=dtype, device=device).view(shape)
    Q, D = (_tokens(rng, (n,)).to(device) for n in (Tq, Td))
    indices = (torch.tensor(x, device=device) for x in (cu, at, length))
    g = torch.ones((Nq, Nd) if pairs is None else (3,), device=device)
    needs = [rng.random() < 0.8, rng.random() < 0.8, False]
    found = torch.ops.lik.maxsim_ragged_bwd(
        g, Q, D, *indices, pairs, None, None, None, argmax, rng.random() < 0.3, rng.random() < 0.3, needs
    )
    assert all(x.isfinite().all() for x in found), "gradients of foreign winners are not finite"
    return "winners"


def run(calls: int, device: str = "cpu", seed: int = 0) -> Counter[str]:
    """Run `calls` invalid calls and return how many ended with each outcome."""
    outcomes: Counter[str] = Counter()
    for i in range(calls):
        rng = random.Random(f"{seed}, {i}")
        if rng.random() < 0.1:
            outcomes[check_arbitrary_argmax(rng, device)] += 1
        else:
            outcomes[check(*bad_call(rng), device, rng.random() < 0.6)] += 1
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description="Bad calls of the ragged functions.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN, like tests/conftest.py
    torch.use_deterministic_algorithms(True, warn_only=True)
    outcomes = run(options.calls, options.device, options.seed)
    print(f"{options.calls} calls on {options.device}: {', '.join(f'{n} {what}' for what, n in outcomes.items())}")


if __name__ == "__main__":
    main()
