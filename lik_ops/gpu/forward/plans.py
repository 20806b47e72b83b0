"""Base classes of forward plans.

A plan is derived once from metadata and scores every call that has the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.arguments import add_batch_axes
from ...core.segments import DenseArgs
from ...core.settings import require_unforced
from ..runtime import launcher
from ..runtime.arguments import drop_single_query, make_size_args, use_device
from ..runtime.capture import Calls
from ..runtime.memory import allocate_tensor, compute_contiguous_strides

_MISALIGNED = "a tensor does not start at a multiple of 16 bytes"


class Plan:
    """A forward call of given metadata."""

    instead: str  # name of the kernel of `_run_generic`

    def __init__(self, Q: Tensor, argmax_dtype: torch.dtype | None) -> None:
        self.device, self.index = Q.device, Q.device.index
        self.d, self.argmax_dtype = Q.shape[-1], argmax_dtype

    def allocate_scores(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """Return contiguous, uninitialized scores for a kernel to fill."""
        return allocate_tensor(shape, strides, torch.float32, self.device)

    def _run_with_fallback(self, *call: Any) -> Any:
        """Return the result of `_run_fast`.

        If it is None, or if Triton cannot compile the kernel, return the result of `_run_generic`.

        Raises:
            ValueError: ``LIK_OPS_KERNEL`` forces the preferred kernel.
        """
        reason = _MISALIGNED
        try:
            result = self._run_fast(*call)
            if result is not None:
                return result
        except launcher.KernelCompileError as error:
            launcher.warn_fallback(error, self.instead)
            reason = str(error)
        require_unforced(reason)
        return self._run_generic(*call)

    def _run_fast(self, *call: Any) -> Any:
        """Return the result of the preferred kernel, or None if it does not support the call."""
        raise NotImplementedError

    def _run_generic(self, *call: Any) -> Any:
        """Return the result of the kernel that supports every call."""
        raise NotImplementedError


class DensePlan(Plan):
    """A call of dense tensors.

    The plan is made from tensors with all their axes. Calls may also pass the 2-D tensors that these were made from.
    Kernels get the candidates of a single query as documents, see `drop_single_query`.
    """

    def __init__(self, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(Q, argmax_dtype)
        self.sizes = make_size_args(Q, D)
        x = DenseArgs(Q, D, None, None, None)
        self.scores_shape, self.argmax_shape = x.scores_shape(), x.argmax_shape()
        self.score_strides: tuple[tuple[int, ...], ...] = (), (1,), compute_contiguous_strides(self.scores_shape)
        self.argmax_strides = compute_contiguous_strides(self.argmax_shape)
        self.calls = Calls()

    def allocate_argmax(self) -> Tensor:
        """Return uninitialized argmax memory for `scores` to fill, of size [0] without an argmax."""
        if self.argmax_dtype is None:
            return allocate_tensor((0,), (1,), torch.int32, self.device)
        return allocate_tensor(self.argmax_shape, self.argmax_strides, self.argmax_dtype, self.device)

    def forward(
        self, shape: tuple[int, ...], tensors: Sequence[Tensor | None], returned: bool = False
    ) -> tuple[tuple, Callable[[Sequence[Tensor | None]], tuple | None] | None]:
        """Return ``(outputs, replay)``: the scores and, if requested, the argmax, and a function that repeats the call.

        `replay(tensors)` recomputes the outputs for other tensors with the same metadata, or returns None: see
        `capture.Replay`. It is None until the call was captured.

        Args:
            shape: shape of the scores, which differs from [Nq, K] only in axes of size 1.
            tensors: Q, D, q_mask, d_mask, and q_weight.
            returned: whether an argmax of size [0] is returned if none is requested.
        """
        key = shape, returned
        outputs = self.calls.run(key, tensors, self.device, self._run_uncaptured, shape, tensors, returned)
        return outputs, self.calls.replay(key)

    def _run_uncaptured(
        self, shape: tuple[int, ...], tensors: Sequence[Tensor | None], returned: bool = False
    ) -> tuple:
        """Return the outputs of `forward`, without capture."""
        argmax = None if self.argmax_dtype is None else self.allocate_argmax()
        scores = self.scores(shape, *tensors, argmax)
        if argmax is None:
            return (scores, self.allocate_argmax()) if returned else (scores,)
        return scores, argmax

    def fill(self, *tensors: Tensor | None) -> Tensor:
        """Return the scores ``[Nq, K]`` and, unless it is None, fill the argmax.

        Args:
            *tensors: Q, D, q_mask, d_mask, q_weight, and the argmax.
        """
        return self.calls.run(("fill",), tensors, self.device, self._fill_uncaptured, *tensors)[0]

    def _fill_uncaptured(self, *tensors: Tensor | None) -> tuple[Tensor]:
        """Return the scores of `fill`, without capture."""
        return (self.scores(self.scores_shape, *tensors),)

    def scores(self, shape: tuple[int, ...], *tensors: Any) -> Tensor:
        """Return the scores as `shape`.

        Args:
            shape: shape of the scores.
            *tensors: Q, D, q_mask, d_mask, q_weight, and the argmax to fill, or None.
        """
        *inputs, argmax = tensors
        scores = self.allocate_scores(shape, self.score_strides[len(shape)])
        with use_device(self.device):
            x = DenseArgs._make(add_batch_axes(*inputs))
            D, d_mask = drop_single_query(x.D, x.d_mask)
            if D is not x.D:
                x = x._replace(D=D, d_mask=d_mask)
                argmax = None if argmax is None else argmax.transpose(0, 1)
            # Kernels write to a view. If the result itself were a view, autograd would forbid in-place changes.
            self._score(x, scores.view(self.scores_shape), argmax)
        return scores

    def _score(self, x: DenseArgs, scores: Tensor, argmax: Tensor | None) -> None:
        """Fill scores ``[Nq, K]`` and, unless it is None, `argmax`."""
        raise NotImplementedError
