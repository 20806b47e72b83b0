"""Validation of arguments. Every error message begins with `op`, followed by the name of the argument.

The rank of D selects the dense layout: ``D [Nd, Ld, d]`` is a cross product with ``Q [Nq, Lq, d]``, and
``D [Nq, K, Ld, d]`` holds candidates of each query. Sizes may be symbolic (torch.compile, torch.export), so they are
only compared.
"""

import math
import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .messages import describe_non_tensor, describe_type, format_shape, format_sizes, get_first_sentence, short_repr

Backward: TypeAlias = Literal["auto", "lowmem", "unified"]
"""Order of the gradient sums: see `lik_ops.maxsim`."""
Save: TypeAlias = Literal["int8"]
"""Format in which autograd saves documents: see `lik_ops.maxsim`."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKWARDS: tuple[str, ...] = get_args(Backward)
MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
INDEX_DTYPES = (torch.int32, torch.int64)
LOOKS_LIKE_LENGTHS = "looks like lengths (offsets are 0 followed by the cumulative sum of the lengths)"
_INT16_MAX, _INT64_MAX = 32767, 2**63 - 1


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, weights and their gradients: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_same_size(a, b, message) -> None:
    """Raise ValueError unless two sizes are equal. While tracing, unknown sizes become a run-time check."""
    if isinstance(a, int) and isinstance(b, int):
        if a != b:
            raise ValueError(message())
    else:
        torch._check_value(a == b, message)


def clamp_to_at_most_one(size: Any) -> Any:
    """Return ``min(size, 1)``, which is 0 in an exported program whose size is 0.

    A tracer assumes that a symbolic size is at least 1. It would replace the plain minimum by 1, but keeps this
    expression.
    """
    half = (size + 1) // 2
    # In Dynamo every size is an int, and `min` of a symbolic one becomes `sym_min`.
    return min(half, 1) if isinstance(size, int) else torch.sym_min(half, 1)


def clamp_to_at_least_one(size: Any) -> Any:
    """Return ``max(size, 1)``, which is 1 in an exported program whose size is 0. See `clamp_to_at_most_one`."""
    return size + 1 - clamp_to_at_most_one(size)


def require(condition, message) -> None:
    """Raise ``ValueError(message())`` if `condition` is false. A symbolic condition becomes a run-time check.

    `torch._check_value` imports sympy, even for plain booleans. Calls of lik_ops must not import anything.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._check_value(condition)  # torch 2.11 traces no message
    elif not isinstance(condition, bool):
        torch._check_value(condition, message)
    elif not condition:
        raise ValueError(message())


def check_tensor(op: str, name: str, x: Any, or_none: bool = False) -> None:
    """Raise TypeError, naming the argument, unless it is a tensor. With `or_none`, it may also be None."""
    if not isinstance(x, Tensor) and not (or_none and x is None):
        raise TypeError(f"{op}: {name}: expected a Tensor{' or None' * or_none}, got {describe_non_tensor(x)}")


def check_flag(op: str, name: str, x: Any) -> None:
    """Raise TypeError, naming the argument, unless it is True or False."""
    if not isinstance(x, bool):
        raise TypeError(f"{op}: {name}: expected a bool, got {describe_type(x)}")


def check_choice(op: str, name: str, x: Any, choices: Sequence[str]) -> None:
    """Raise TypeError or ValueError, naming the argument, unless it is one of the strings `choices`."""
    if isinstance(x, str) and x in choices:
        return
    expected = f"{op}: {name}: expected one of {', '.join(choices)}, got"
    if not isinstance(x, str):
        raise TypeError(f"{expected} {describe_type(x)}")
    raise ValueError(f"{expected} {reprlib.repr(x)}")


def check_count(op: str, name: str, x: Any, min_count: int = 0) -> None:
    """Raise TypeError or ValueError unless `x` is an integer from `min_count` to the int64 maximum.

    The error names the argument. Sizes that are unknown while tracing pass.
    """
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name}: expected an int, got {describe_type(x)}")
    if isinstance(x, int) and not min_count <= x <= _INT64_MAX:
        expected = f"{min_count} or more" if x < min_count else f"at most {_INT64_MAX}"
        raise ValueError(f"{op}: {name}: expected {expected}, got {short_repr(x)}")


def as_device(op: str, device: Any) -> torch.device:
    """Return `device`, a device or its name, as a `torch.device`.

    Raises:
        TypeError: `device` is neither a device nor a name.
        ValueError: `device` names no device of this torch.
    """
    if isinstance(device, (str, int, torch.device)) and not isinstance(device, bool):
        try:
            return torch.device(device)
        except (RuntimeError, ValueError):
            raise ValueError(f"{op}: device: expected a device of this torch, got {short_repr(device)}") from None
    raise TypeError(f"{op}: device: expected a torch.device or its name, got {describe_type(device)}")


def check_is_present(op: str, device: torch.device) -> None:
    """Raise ValueError, naming the argument, for a device that this machine does not have."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        expected = f"expected a device of this machine, got {device}"
        raise ValueError(f"{op}: device: {expected}: {get_first_sentence(error)}") from error


def check_options(op: str, normalize: Any, backward: Any = "auto", recompute: Any = False) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the scoring functions accept these options."""
    check_flag(op, "normalize", normalize)
    check_choice(op, "backward", backward, BACKWARDS)
    check_flag(op, "recompute", recompute)


def check_save(op: str, save: Any, recompute: bool) -> None:
    """Raise TypeError or ValueError unless documents can be saved in the format `save`."""
    check_choice(op, "save", save, get_args(Save))
    if recompute:
        raise ValueError(f"{op}: recompute: expected False with save={save!r}, which saves the argmax, got True")


def check_types(op: str, Q: Any, D: Any, q_mask: Any, d_mask: Any, q_weight: Any) -> None:
    """Raise TypeError, naming the argument, unless all are tensors. Masks and weights may be None."""
    check_tensor(op, "Q", Q)
    check_tensor(op, "D", D)
    for name, x in (("q_mask", q_mask), ("d_mask", d_mask), ("q_weight", q_weight)):
        check_tensor(op, name, x, or_none=True)


def check_strided(op: str, name: str, t: Tensor) -> None:
    """Raise TypeError, naming the argument, for sparse and nested tensors."""
    if t.layout != torch.strided or t.is_nested:
        actual = "a nested tensor" if t.is_nested else f"layout {t.layout}"
        raise TypeError(f"{op}: {name}: expected a dense (strided) tensor, got {actual}")


def check_no_dtensor(op: str, **tensors: Any) -> None:
    """Raise TypeError, naming the argument, if one of these is a DTensor."""
    if torch.compiler.is_dynamo_compiling() or (module := sys.modules.get("torch.distributed.tensor")) is None:
        return
    for name, x in tensors.items():
        if isinstance(x, module.DTensor):
            raise TypeError(f"{op}: {name}: expected a plain tensor, got a DTensor: pass its to_local()")


def check_has_values(op: str, name: str, t: Tensor) -> None:
    """Raise ValueError, naming the argument, for tensors on the meta device."""
    if t.is_meta:
        raise ValueError(f"{op}: {name}: expected values, got a tensor on the meta device, which has none")


def check_fits_memory(op: str, name: str, shape: Sequence) -> None:
    """Raise ValueError, naming the argument, if int64 cannot count the bytes of a tensor of 8-byte elements."""
    if torch.compiler.is_compiling():
        return  # it would guard on sizes
    if all(isinstance(n, int) for n in shape) and 8 * math.prod(max(n, 1) for n in shape) > _INT64_MAX:
        raise ValueError(f"{op}: {name}: expected sizes that fit memory, got {list(shape)}")


def check_dtype(op: str, name: str, dtype: Any) -> None:
    """Raise TypeError, naming the argument, unless it is a dtype that tokens may have."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        actual = dtype if isinstance(dtype, torch.dtype) else describe_type(dtype) + _suggest_dtype(dtype)
        raise TypeError(f"{op}: {name}: expected float16, bfloat16, float32 or float64, got {actual}")


def _suggest_dtype(x: Any) -> str:
    """Return a hint with the torch dtype that a string or a numpy dtype names, or an empty string."""
    name = x if isinstance(x, str) else getattr(x, "name", getattr(x, "__name__", ""))
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    return f" {short_repr(name)}: pass {dtype}" if isinstance(dtype, torch.dtype) and dtype in DTYPES else ""


def check_floats(op: str, name: str, x: Any) -> None:
    """Raise TypeError, naming the argument, unless it is a dense tensor with a dtype that tokens may have."""
    check_tensor(op, name, x)
    check_strided(op, name, x)
    check_dtype(op, name, x.dtype)


def check_device(op: str, name: str, x: Tensor, device: torch.device, device_owner: str = "Q") -> None:
    """Raise ValueError, naming the argument, unless it is on `device`, the device of the argument `device_owner`."""
    if x.device != device:
        raise ValueError(f"{op}: {name}: expected the device of {device_owner}, {device}, got {x.device}")


def check_dtype_and_device(op: str, name: str, x: Tensor, owner_name: str, owner: Tensor) -> None:
    """Raise TypeError or ValueError, naming the argument, unless it has the dtype and device of `owner`."""
    if x.dtype != owner.dtype:
        raise TypeError(f"{op}: {name}: expected the dtype of {owner_name}, {owner.dtype}, got {x.dtype}")
    check_device(op, name, x, owner.device, owner_name)


def _has_rank(t: Tensor, shape: str) -> bool:
    """Return whether `t` has the rank of a shape such as ``"[Nq, Lq, d]"`` or ``"[..., L, d]"``."""
    rank = shape.count(",") + 1
    return t.dim() == rank or ("..." in shape and t.dim() >= rank - 1)


def check_tokens(
    op: str, Q: Tensor, D: Tensor, q_shapes: Sequence[str], d_shapes: Sequence[str], hints: Sequence[str] = ("", "")
) -> None:
    """Raise ValueError or TypeError unless Q and D are tokens of the given ranks with the same dtype, device and d.

    Messages spell the ranks as `q_shapes` and `d_shapes`, such as ``("[Lq, d]", "[Nq, Lq, d]")`` or
    ``("[..., L, d]",)``, and append `hints`.
    """
    for name, t, shapes, hint in (("Q", Q, q_shapes, hints[0]), ("D", D, d_shapes, hints[1])):
        check_tensor(op, name, t)
        check_strided(op, name, t)
        for shape in shapes:
            if _has_rank(t, shape):
                break
        else:
            expected = " or ".join([", ".join(shapes[:-1]), shapes[-1]] if len(shapes) > 1 else shapes)
            raise ValueError(f"{op}: {name}: expected {expected}{hint}, got {format_shape(t)}")
        check_dtype(op, name, t.dtype)
    check_dtype_and_device(op, "D", D, "Q", Q)
    d = Q.shape[-1]
    check_same_size(
        D.shape[-1], d, lambda: f"{op}: D: expected d = {d} as in Q {format_shape(Q)}, got {format_shape(D)}"
    )
    if isinstance(d, int) and d < 1:
        raise ValueError(f"{op}: Q: expected d >= 1, got {format_shape(Q)}")


def _check_sizes(x: Tensor, expected: Sequence, message: Callable[[], str]) -> None:
    """Raise ValueError unless `x` has the sizes `expected`. None matches any size."""
    if x.dim() != len(expected):
        raise ValueError(message())
    for actual, size in zip(x.shape, expected, strict=True):
        if size is not None:
            check_same_size(actual, size, message)


def check_indices(
    op: str, name: str, x: Any, expected: Sequence, spelled: str, device: torch.device, device_owner: str = "Q"
) -> None:
    """Raise ValueError or TypeError unless `x` is an int32 or int64 tensor of the expected sizes and device.

    An expected size of None matches any size. Messages spell the shape as `spelled`.
    """
    check_tensor(op, name, x)
    if x.dtype not in INDEX_DTYPES:
        raise TypeError(f"{op}: {name}: expected int32 or int64, got {x.dtype}")
    check_strided(op, name, x)
    _check_sizes(
        x, expected, lambda: f"{op}: {name}: expected {format_sizes(spelled, expected)}, got {format_shape(x)}"
    )
    check_device(op, name, x, device, device_owner)


def check_cu_seqlens(
    op: str, name: str, cu_seqlens: Any, device: torch.device, spelled: str = "[N + 1]", device_owner: str = "Q"
) -> None:
    """Raise ValueError or TypeError unless `cu_seqlens` can be the offsets of N packed sequences."""
    check_indices(op, name, cu_seqlens, (None,), spelled, device, device_owner)
    if isinstance(cu_seqlens.shape[0], int) and cu_seqlens.shape[0] < 1:
        raise ValueError(f"{op}: {name}: expected {spelled}, got {format_shape(cu_seqlens)}")


def _check_token_shape(op: str, name: str, x: Any, tokens_name: str, tokens: Tensor) -> bool:
    """Return whether `x` is not None. Raise unless it then has the shape of `tokens` without d, and its device."""
    check_tensor(op, name, x, or_none=True)
    if x is None:
        return False
    check_strided(op, name, x)
    expected = tokens.shape[:-1]

    def message() -> str:
        shape = f"shape {list(expected)} to match {tokens_name} {format_shape(tokens)}"
        return f"{op}: {name}: expected {shape}, got {format_shape(x)}"

    _check_sizes(x, expected, message)
    check_device(op, name, x, tokens.device, tokens_name)
    return True


def check_mask(
    op: str, name: str, mask: Any, tokens_name: str, tokens: Tensor, dtypes: Sequence[torch.dtype] = MASK_DTYPES
) -> None:
    """Raise ValueError or TypeError unless `mask` is None or a mask of `tokens` with one of `dtypes`."""
    if _check_token_shape(op, name, mask, tokens_name, tokens) and mask.dtype not in dtypes:
        expected = "bool (True = keep) or an integer dtype" if dtypes is MASK_DTYPES else " or ".join(map(str, dtypes))
        is_convertible = torch.bool in dtypes and mask.dtype.is_floating_point  # not ids
        hint = f": for a mask of ones and zeros pass {name} != 0" * is_convertible
        raise TypeError(f"{op}: {name}: expected {expected}, got {mask.dtype}{hint}")


def check_weight(op: str, q_weight: Any, Q: Tensor) -> None:
    """Raise ValueError or TypeError unless `q_weight` is None or has a weight for each token of Q."""
    if _check_token_shape(op, "q_weight", q_weight, "Q", Q) and q_weight.dtype != score_dtype(Q.dtype):
        raise TypeError(f"{op}: q_weight: expected {score_dtype(Q.dtype)} for {Q.dtype} inputs, got {q_weight.dtype}")


def check_per_token(
    op: str, Q: Tensor, D: Tensor, q_mask: Any, d_mask: Any, q_weight: Any, mask_dtypes: Sequence = MASK_DTYPES
) -> None:
    """Raise ValueError or TypeError, naming the argument, unless the masks and weights fit Q and D."""
    if q_mask is None and d_mask is None and q_weight is None:
        return
    check_mask(op, "q_mask", q_mask, "Q", Q, mask_dtypes)
    check_mask(op, "d_mask", d_mask, "D", D, mask_dtypes)
    check_weight(op, q_weight, Q)


def check_dense(
    op: str,
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    backward: str = "auto",
) -> None:
    """Raise ValueError or TypeError, naming the argument, unless dense arguments fit together."""
    check_tokens(op, Q, D, ("[Lq, d]", "[Nq, Lq, d]"), ("[Ld, d]", "[Nd, Ld, d]", "[Nq, K, Ld, d]"))
    if D.dim() == 4:
        if Q.dim() == 2:
            raise ValueError(f"{op}: Q: expected [Nq, Lq, d] for D [Nq, K, Ld, d], got {format_shape(Q)}")
        Nq = Q.shape[0]
        check_same_size(D.shape[0], Nq, lambda: f"{op}: D: expected Nq = {Nq} candidate lists, got {format_shape(D)}")
    check_per_token(op, Q, D, q_mask, d_mask, q_weight)
    check_choice(op, "backward", backward, BACKWARDS)


def check_dense_batched(op: str, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> None:
    """Raise ValueError or TypeError unless Q is 3-D, D is 3-D or 4-D, and masks are bool, as operators require."""
    if Q.dim() != 3 or D.dim() not in (3, 4):
        raise ValueError(
            f"{op}: Q, D: expected [Nq, Lq, d] and [Nd, Ld, d] or [Nq, K, Ld, d], got {format_shape(Q)},"
            f" {format_shape(D)}"
        )
    for name, mask in (("q_mask", q_mask), ("d_mask", d_mask)):
        if mask is not None and mask.dtype != torch.bool:
            op_name = add_op_namespace_prefix("maxsim")
            raise TypeError(f"{op}: {name}: expected bool ({op_name} converts integers), got {mask.dtype}")


def make_metadata_key(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, q_weight: Tensor | None
) -> tuple:
    """Return a key of everything except values that determines how arguments are checked and computed.

    It accepts real tensors only, because symbolic sizes would add guards.
    """
    key = (Q.shape, Q.stride(), Q.dtype, Q.get_device(), D.shape, D.stride(), D.dtype, D.get_device())
    if q_mask is None and d_mask is None and q_weight is None:
        return key
    per_token = (q_mask, d_mask, q_weight)
    return key, *[None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in per_token]


def as_bool(mask: Tensor | None) -> Tensor | None:
    """Return a mask as bool. Integers are read as ``!= 0``."""
    return mask if mask is None or mask.dtype == torch.bool else mask != 0


def add_batch_axis(x: Tensor | None, is_flat: bool) -> Tensor | None:
    """Return `x` with a leading axis if `is_flat`, else `x`."""
    return x.unsqueeze(0) if is_flat and x is not None else x


def add_batch_axes(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, q_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the arguments with all their axes. A 2-D `Q` or `D` and its masks and weights get a leading axis."""
    q_flat, d_flat = Q.dim() == 2, D.dim() == 2
    if q_flat:
        Q, q_mask, q_weight = Q.unsqueeze(0), add_batch_axis(q_mask, True), add_batch_axis(q_weight, True)
    return Q, add_batch_axis(D, d_flat), q_mask, add_batch_axis(d_mask, d_flat), q_weight  # type: ignore[return-value]


def choose_argmax_dtype(Ld) -> torch.dtype:
    """Return int16 if every token index of a document is known to fit, else int32. A symbolic Ld gets no guard."""
    if isinstance(Ld, int):
        return torch.int16 if Ld <= _INT16_MAX else torch.int32
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return torch.int16 if statically_known_true(Ld <= _INT16_MAX) else torch.int32
