"""Parts of error messages: values, types and sizes in a few words. Computed only when an error is raised."""

import reprlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from .arrays import is_array


def format_shape(t: Tensor) -> str:
    """Return the shape of `t` as a list, such as ``[2, 32, 128]``."""
    return str(list(t.shape))


def describe_type(x: Any) -> str:
    """Return a description of the type of `x` for an error that expected another type."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return "a nested tensor" if x.is_nested else f"a tensor {format_shape(x)}"


def describe_non_tensor(x: Any) -> str:
    """Return the type of `x` for an error that expected a tensor, with a hint if torch can convert `x`."""
    if isinstance(x, fx.Proxy):
        return "Proxy: give the name of the function to torch.fx.wrap in your module"
    return describe_type(x) + ": convert it with torch.from_numpy" * is_array(x)


def short_repr(x: Any) -> str:
    """Return a repr of limited length. Python refuses to print integers of more than 4,300 digits."""
    try:
        return reprlib.repr(x)
    except ValueError:
        return f"an int of {x.bit_length()} bits" if isinstance(x, int) else f"{type(x).__name__} of large integers"


def get_first_sentence(error: Exception) -> str:
    """Return the first sentence of a message, which torch may follow with links and advice."""
    return str(error).split(". ")[0].split("\n")[0].rstrip(".")[:150]


def format_sizes(spelled: str, sizes: Sequence) -> str:
    """Return the shape `spelled`, followed by its known sizes (not None) unless they are already spelled."""
    if all(n is None or str(n) in spelled for n in sizes):
        return spelled
    return f"{spelled} = [{', '.join('*' if n is None else str(n) for n in sizes)}]"
