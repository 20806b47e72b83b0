"""Custom operators with a short host path and a first call that does not import Dynamo.

`torch.library.custom_op` hides the body of an operator from Dynamo. For this the first call imports Dynamo, which costs
seconds in a process that may never compile. Here the import waits until other code imports Dynamo. A call through the
Python layers of `custom_op` also needs 8 us to reach the body. Kernels registered directly for the devices of the
backends reach it in 2 to 3 us.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import _C
from torch.library import CustomOpDef

from ..._ops import ops as lik
from ..stack import functional
from ..stack.checkpointing import copy_cached
from .autograd import OperatorCall, record, record_level

_HIDDEN_ATTRIBUTE = "__dynamo_disable"  # torch caches the hidden version of a function in this attribute
_LIBRARY = torch.library.Library(lik.name, "FRAGMENT")
_DEVICES = ("CPU", "CUDA")


def custom_op(
    name: str, schema: str, tags: Sequence[torch.Tag] = (), record_body: Callable | None = None
) -> Callable[[Callable], CustomOpDef]:
    """Define an operator with `torch.library.custom_op` that neither writes to an argument nor returns one.

    Args:
        name: the qualified name.
        schema: the schema without the name.
        tags: the tags of the operator.
        record_body: runs the body and records a gradient that may bypass the dispatcher. By default the gradient is the
            registered one.
    """

    def define(body: Callable) -> CustomOpDef:
        bare_name = name.partition("::")[2]
        op = torch.library.custom_op(name, mutates_args=(), schema=schema, tags=tags)(body)
        if _skip_in_dynamo(_run_hidden):
            for wrapper in getattr(op, "_backend_fns", {}).values():
                function = getattr(wrapper, "__wrapped__", None)
                if function is not None:
                    setattr(function, _HIDDEN_ATTRIBUTE, partial(_run_hidden, wrapper, function))
            _register_directly(op, body, bare_name, record_body)
        set_docstring(bare_name, body.__doc__ or "")
        return op

    return define


def set_docstring(name: str, text: str) -> None:
    """Set the docstring of an operator and of its overload to its schema and `text`. torch provides none."""
    packet: Any = getattr(lik, name)
    packet.__doc__ = packet.default.__doc__ = f"{packet.default._schema}\n\n{inspect.cleandoc(text)}"


def _run_hidden(hidden: Callable, body: Callable, *args: Any) -> Any:
    """Run `body` directly until Dynamo is imported, and then the version that torch hides from Dynamo."""
    if "torch._dynamo" not in sys.modules:
        return body(*args)
    body.__dict__.pop(_HIDDEN_ATTRIBUTE, None)
    return hidden(*args)


def _skip_in_dynamo(function: Callable, below: bool = False) -> bool:
    """Let Dynamo skip the frames of `function`, or with `below` also all frames that it calls.

    Returns False if this version of torch cannot.
    """
    try:
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction
        skip = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if below else action.DEFAULT)
        eval_frame.set_code_exec_strategy(function.__code__, skip)
    except (AttributeError, ImportError, TypeError):
        return False
    return True


def _register_directly(op: CustomOpDef, body: Callable, name: str, record_body: Callable | None) -> None:
    """Register `body` as the kernel of `_DEVICES`, and a kernel for autograd that skips autograd if it records nothing.

    The autograd kernel reads from the dispatch keys whether a mode, transform or subclass must handle the call below
    it.
    """
    try:
        overload, below_autograd, guard = op._opoverload, _C._after_autograd_keyset, _C._AutoDispatchBelowAutograd
        any_requires_grad, is_grad_enabled = _C._any_requires_grad, _C.is_grad_enabled
    except AttributeError:
        return
    assert below_autograd is not None

    def direct(*args: Any) -> Any:
        return body(*args)

    if not _skip_in_dynamo(direct, below=True):
        return
    call = OperatorCall(body, op)
    record_body = record_body or (lambda *args: record(*args, call, args))
    for device in _DEVICES:
        autograd = f"Autograd{device}"
        unusual = -1  # the bits of all dispatch keys but those of an ordinary call
        for key in (device, autograd, "BackendSelect", "ADInplaceOrView"):
            unusual &= ~_C.DispatchKeySet(getattr(_C.DispatchKey, key)).raw_repr()

        def recorded(keyset: Any, *args: Any, unusual: int = unusual) -> Any:
            records = is_grad_enabled() and any_requires_grad(*args)
            if not keyset.raw_repr() & unusual:
                return record_body(*args) if records else body(*args)

            def run(*args: Any) -> Any:
                with guard():
                    return overload.redispatch(keyset & below_autograd, *args)

            if functional.is_transforming():
                return record_level(args, run, op, records)
            return record(*args, OperatorCall(run, op), args) if records else copy_cached(run(*args))

        if not _skip_in_dynamo(recorded, below=True):
            return
        _LIBRARY.impl(name, direct, device)
        _LIBRARY.impl(name, recorded, autograd, with_keyset=True)
