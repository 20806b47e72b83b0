"""What plans of forward calls share: each is worked out once from metadata alone, and scores every call that has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.arguments import add_batch_axes
from ...core.segments import DenseArgs
from ..runtime import launcher
from ..runtime.arguments import make_size_args, use_device
from ..runtime.capture import Calls
from ..runtime.memory import allocate_tensor, compute_contiguous_strides


class Plan:
    """A forward call of given metadata."""

    instead: str  # the kernel of `_plain`

    def __init__(self, Q: Tensor, argmax_dtype: torch.dtype | None) -> None:
        self.device, self.index = Q.device, Q.device.index
        self.d, self.argmax_dtype = Q.shape[-1], argmax_dtype

    def allocate_scores(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """Contiguous scores to be filled by a kernel."""
        return allocate_tensor(shape, strides, torch.float32, self.device)

    def _run_with_fallback(self, *call: Any) -> Any:
        """What `_faster` returns of a call; what `_plain` does where that is None or Triton cannot compile it."""
        try:
            found = self._run_fast(*call)
            if found is not None:
                return found
        except launcher.KernelCompileError as error:
            launcher.warn_fallback(error, self.instead)
        return self._run_generic(*call)

    def _run_fast(self, *call: Any) -> Any:
        raise NotImplementedError

    def _run_generic(self, *call: Any) -> Any:
        raise NotImplementedError


class DensePlan(Plan):
    """A call of dense tensors: made from tensors with all their axes, called also with 2-D ones that these were made
    of."""

    def __init__(self, Q: Tensor, D: Tensor, argmax_dtype: torch.dtype | None) -> None:
        super().__init__(Q, argmax_dtype)
        self.sizes = make_size_args(Q, D)
        x = DenseArgs(Q, D, None, None, None)
        self.scores_shape, self.argmax_shape = x.scores_shape(), x.argmax_shape()
        self.score_strides: tuple[tuple[int, ...], ...] = (), (1,), compute_contiguous_strides(self.scores_shape)
        self.argmax_strides = compute_contiguous_strides(self.argmax_shape)
        self.calls = Calls()

    def allocate_argmax(self) -> Tensor:
        """Winners to be filled by `scores`, of size [0] if none are asked for."""
        if self.argmax_dtype is None:
            return allocate_tensor((0,), (1,), torch.int32, self.device)
        return allocate_tensor(self.argmax_shape, self.argmax_strides, self.argmax_dtype, self.device)

    def forward(
        self, shape: tuple[int, ...], given: Sequence[Tensor | None], returned: bool = False
    ) -> tuple[tuple, Callable[[Sequence[Tensor | None]], tuple | None] | None]:
        """The scores as `shape`, which differs from [Nq, K] in axes of size 1 only; and winners, if they are asked for.
        Then, once known, what finds the same again of other tensors, or returns None: see `Replay`.

        Args:
            given: Q, D, q_mask, d_mask and q_weight.
            returned: whether something, of size [0], is returned in place of winners that are not asked for.
        """
        key = shape, returned
        found = self.calls.run(key, given, self.device, self._run_uncaptured, shape, given, returned)
        return found, self.calls.replay(key)

    def _run_uncaptured(self, shape: tuple[int, ...], given: Sequence[Tensor | None], returned: bool = False) -> tuple:
        argmax = None if self.argmax_dtype is None else self.allocate_argmax()
        scores = self.scores(shape, *given, argmax)
        if argmax is None:
            return (scores, self.allocate_argmax()) if returned else (scores,)
        return scores, argmax

    def scores(self, shape: tuple[int, ...], *tensors: Any) -> Tensor:
        """The same of Q, D, q_mask, d_mask and q_weight; winners go to what follows these, unless it is None."""
        *given, argmax = tensors
        scores = self.allocate_scores(shape, self.score_strides[len(shape)])
        with use_device(self.device):
            # A view goes to the kernels: autograd would keep callers from writing to one.
            self._score(DenseArgs._make(add_batch_axes(*given)), scores.view(self.scores_shape), argmax)
        return scores

    def _score(self, x: DenseArgs, scores: Tensor, argmax: Tensor | None) -> None:
        """Fill scores ``[Nq, K]`` and, unless it is None, `argmax`."""
        raise NotImplementedError
