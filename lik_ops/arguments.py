"""The arguments that every MaxSim entry point shares: what they may be, and the errors when they are not.

Two layouts, told apart by the rank of D: the cross product ``Q [Nq, Lq, d]``, ``D [Nd, Ld, d]`` and the candidates
``Q [Nq, Lq, d]``, ``D [Nq, K, Ld, d]``. Sizes may be symbolic (torch.compile, torch.export): they are only compared.
"""

import reprlib
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

Backward: TypeAlias = Literal["auto", "lowmem", "unified"]
"""How gradients are summed: see `lik_ops.maxsim`."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKWARDS: tuple[str, ...] = get_args(Backward)
MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_INT16_MAX, _INT64_MAX = 32767, 2**63 - 1


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for every input dtype, fp64 for fp64: scores, weights and their gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def same_size(a, b, message) -> None:
    """Raise ValueError unless two sizes are equal; sizes unknown while tracing become a run-time check."""
    if isinstance(a, int) and isinstance(b, int):
        if a != b:
            raise ValueError(message())
    else:
        torch._check_value(a == b, message)


def shape_of(t: Tensor) -> str:
    return str(list(t.shape))


def kind_of(x: Any) -> str:
    """What a value is, in a message that expected another type."""
    return f"a tensor {shape_of(x)}" if isinstance(x, Tensor) else type(x).__name__


def check_tensor(op: str, name: str, x: Any, or_none: bool = False) -> None:
    """Raise TypeError, naming the argument, unless it is a tensor, or None where there need not be one."""
    if not isinstance(x, Tensor) and not (or_none and x is None):
        raise TypeError(f"{op}: {name}: expected a Tensor{' or None' * or_none}, got {type(x).__name__}")


def check_flag(op: str, name: str, x: Any) -> None:
    """Raise TypeError, naming the argument, unless it is True or False."""
    if not isinstance(x, bool):
        raise TypeError(f"{op}: {name}: expected a bool, got {kind_of(x)}")


def check_choice(op: str, name: str, x: Any, choices: Sequence[str]) -> None:
    """Raise TypeError or ValueError, naming the argument, unless it is one of a few strings."""
    expected = f"{op}: {name}: expected one of {', '.join(choices)}, got"
    if not isinstance(x, str):
        raise TypeError(f"{expected} {kind_of(x)}")
    if x not in choices:
        raise ValueError(f"{expected} {reprlib.repr(x)}")


def check_count(op: str, name: str, x: Any, least: int = 0) -> None:
    """Raise TypeError or ValueError, naming the argument, unless it is an integer of at least `least` that fits int64.

    Sizes unknown while tracing pass.
    """
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name}: expected an int, got {kind_of(x)}")
    if isinstance(x, int) and not least <= x <= _INT64_MAX:
        expected = f"{least} or more" if x < least else f"at most {_INT64_MAX}"
        raise ValueError(f"{op}: {name}: expected {expected}, got {reprlib.repr(x)}")


def check_options(op: str, normalize: Any, backward: Any = "auto", recompute: Any = False) -> None:
    """Raise TypeError or ValueError, naming the argument, unless these are what the scoring functions take."""
    check_flag(op, "normalize", normalize)
    check_choice(op, "backward", backward, BACKWARDS)
    check_flag(op, "recompute", recompute)


def check_types(op: str, Q: Any, D: Any, q_mask: Any, d_mask: Any, q_weight: Any) -> None:
    """`check_tensor` of each."""
    check_tensor(op, "Q", Q)
    check_tensor(op, "D", D)
    for name, x in (("q_mask", q_mask), ("d_mask", d_mask), ("q_weight", q_weight)):
        check_tensor(op, name, x, or_none=True)


def check_strided(op: str, name: str, t: Tensor) -> None:
    """Raise TypeError, naming the argument, for sparse and nested tensors."""
    if t.layout != torch.strided or t.is_nested:
        found = "a nested tensor" if t.is_nested else f"layout {t.layout}"
        raise TypeError(f"{op}: {name}: expected a dense (strided) tensor, got {found}")


def _check_embeddings(op: str, Q: Tensor, D: Tensor) -> None:
    for name, t, ranks in (("Q", Q, (2, 3)), ("D", D, (2, 3, 4))):
        check_tensor(op, name, t)
        check_strided(op, name, t)
        if t.dim() not in ranks:
            expected = "[Lq, d] or [Nq, Lq, d]" if name == "Q" else "[Ld, d], [Nd, Ld, d] or [Nq, K, Ld, d]"
            raise ValueError(f"{op}: {name}: expected {expected}, got {shape_of(t)}")
        if t.dtype not in DTYPES:
            raise TypeError(f"{op}: {name}: expected float16, bfloat16, float32 or float64, got {t.dtype}")
    if D.dtype != Q.dtype:
        raise TypeError(f"{op}: D: expected the dtype of Q, {Q.dtype}, got {D.dtype}")
    if D.device != Q.device:
        raise ValueError(f"{op}: D: expected the device of Q, {Q.device}, got {D.device}")
    same_size(
        D.shape[-1],
        Q.shape[-1],
        lambda: f"{op}: D: expected d = {Q.shape[-1]} as in Q {shape_of(Q)}, got {shape_of(D)}",
    )
    if isinstance(Q.shape[-1], int) and Q.shape[-1] < 1:
        raise ValueError(f"{op}: Q: expected d >= 1, got {shape_of(Q)}")
    if D.dim() == 4:
        if Q.dim() == 2:
            raise ValueError(f"{op}: Q: expected [Nq, Lq, d] beside D [Nq, K, Ld, d], got {shape_of(Q)}")
        same_size(
            D.shape[0], Q.shape[0], lambda: f"{op}: D: expected Nq = {Q.shape[0]} candidate lists, got {shape_of(D)}"
        )


def check_per_token(op: str, name: str, x: Tensor | None, of_name: str, of: Tensor) -> None:
    """A mask or weight has the shape of its tensor without d, exactly (no broadcasting), and its device."""
    check_tensor(op, name, x, or_none=True)
    if x is None:
        return
    check_strided(op, name, x)
    expected = of.shape[:-1]

    def message() -> str:
        return f"{op}: {name}: expected shape {list(expected)} to match {of_name} {shape_of(of)}, got {shape_of(x)}"

    if x.dim() != len(expected):
        raise ValueError(message())
    for a, b in zip(x.shape, expected, strict=True):
        same_size(a, b, message)
    if x.device != of.device:
        raise ValueError(f"{op}: {name}: expected the device of {of_name}, {of.device}, got {x.device}")


def check(
    op: str,
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    backward: str = "auto",
) -> None:
    """Raise ValueError or TypeError, naming the argument, unless all fit together; `op` begins the message."""
    _check_embeddings(op, Q, D)
    check_per_token(op, "q_mask", q_mask, "Q", Q)
    check_per_token(op, "d_mask", d_mask, "D", D)
    check_per_token(op, "q_weight", q_weight, "Q", Q)
    for name, mask in (("q_mask", q_mask), ("d_mask", d_mask)):
        if mask is not None and mask.dtype not in MASK_DTYPES:
            raise TypeError(f"{op}: {name}: expected bool (True = keep) or an integer dtype, got {mask.dtype}")
    if q_weight is not None and q_weight.dtype != score_dtype(Q.dtype):
        raise TypeError(f"{op}: q_weight: expected {score_dtype(Q.dtype)} for {Q.dtype} inputs, got {q_weight.dtype}")
    check_choice(op, "backward", backward, BACKWARDS)


def check_lifted(op: str, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> None:
    """What the inner ops ask beyond `check`: 3-D Q, 3-D or 4-D D, bool masks."""
    if Q.dim() != 3 or D.dim() not in (3, 4):
        raise ValueError(
            f"{op}: Q, D: expected [Nq, Lq, d] and [Nd, Ld, d] or [Nq, K, Ld, d], got {shape_of(Q)}, {shape_of(D)}"
        )
    for name, mask in (("q_mask", q_mask), ("d_mask", d_mask)):
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(f"{op}: {name}: expected bool (lik::maxsim converts integers), got {mask.dtype}")


def metadata(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, q_weight: Tensor | None) -> tuple:
    """All that decides how arguments are checked and computed, but their values: a key for what was found out once.

    Of real tensors only: symbolic sizes would be guarded on.
    """
    key = (Q.shape, Q.stride(), Q.dtype, Q.get_device(), D.shape, D.stride(), D.dtype, D.get_device())
    if q_mask is None and d_mask is None and q_weight is None:
        return key
    per_token = (q_mask, d_mask, q_weight)
    return key, *[None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in per_token]


def as_bool(mask: Tensor | None) -> Tensor | None:
    """Integer masks read as ``!= 0``."""
    return mask if mask is None or mask.dtype == torch.bool else mask != 0


def lift(x: Tensor | None, is_flat: bool) -> Tensor | None:
    """Give a per-query or per-document tensor the leading axis that its 2-D `Q` or `D` lacks."""
    return x.unsqueeze(0) if is_flat and x is not None else x


def lifted(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, q_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The arguments with all their axes: those of a 2-D `Q` or `D` given one."""
    q_flat, d_flat = Q.dim() == 2, D.dim() == 2
    if q_flat:
        Q, q_mask, q_weight = Q.unsqueeze(0), lift(q_mask, True), lift(q_weight, True)
    return Q, lift(D, d_flat), q_mask, lift(d_mask, d_flat), q_weight  # type: ignore[return-value]


def argmax_dtype_for(Ld) -> torch.dtype:
    """int16 where every token index of a document is known to fit, else int32; a symbolic Ld stays unguarded."""
    if isinstance(Ld, int):
        return torch.int16 if Ld <= _INT16_MAX else torch.int32
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return torch.int16 if statically_known_true(Ld <= _INT16_MAX) else torch.int32
