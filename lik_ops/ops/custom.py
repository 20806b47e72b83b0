"""Custom operators whose first call does not import Dynamo.

`torch.library.custom_op` hides an operator's body from Dynamo, which it imports for that at the first call: seconds, in
a process that may compile nothing. Here the import is left to whoever compiles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.library import CustomOpDef

_HIDDEN = "__dynamo_disable"  # the attribute in which torch keeps a body that it has hidden


def custom_op(name: str, schema: str, tags: Sequence[torch.Tag] = ()) -> Callable[[Callable], CustomOpDef]:
    """`torch.library.custom_op` of an operator that writes to no argument."""

    def defined(body: Callable) -> CustomOpDef:
        op = torch.library.custom_op(name, mutates_args=(), schema=schema, tags=tags)(body)
        for hidden in getattr(op, "_backend_fns", {}).values() if _is_skipped() else ():
            bare = getattr(hidden, "__wrapped__", None)
            if bare is not None:
                setattr(bare, _HIDDEN, partial(_run, hidden, bare))
        return op

    return defined


def _run(hidden: Callable, bare: Callable, *args: Any) -> Any:
    """A body for as long as there is no Dynamo to hide it from; then torch hides it."""
    if "torch._dynamo" not in sys.modules:
        return bare(*args)
    bare.__dict__.pop(_HIDDEN, None)
    return hidden(*args)


def _is_skipped() -> bool:
    """Let Dynamo skip `_run` itself: whether this torch can."""
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
        eval_frame.set_code_exec_strategy(_run.__code__, skip)
    except (AttributeError, ImportError, TypeError):
        return False
    return True
