"""`MaxSimScorer`: MaxSim as a module, for code that composes modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .api.score import maxsim
from .core.arguments import (
    MASK_DTYPES,
    Backward,
    Save,
    check_count,
    check_mask,
    check_options,
    check_save,
    check_strided,
    check_tensor,
)
from .retrieval import retrieve

_IDS = tuple(dtype for dtype in MASK_DTYPES if dtype != torch.bool)


class MaxSimScorer(nn.Module):
    """A stateless module around `lik_ops.maxsim`. It has no parameters and no buffers, and it can be pickled.

    Args:
        normalize: whether to L2-normalize every token.
        backward: ``"auto"``, ``"lowmem"`` or ``"unified"``.
        recompute: whether the backward computes the argmax again instead of saving it.
        save: ``"int8"`` to save documents for the backward as int8, or None.
        pad_id: the token id of padding, for `forward_with_ids`.

    Raises:
        TypeError, ValueError: an option has a wrong type or value.

    Example:
        >>> scorer = lik_ops.MaxSimScorer(normalize=True)
        >>> scorer(torch.randn(2, 32, 128), torch.randn(5, 300, 128)).shape
        torch.Size([2, 5])
    """

    save: Save | None = None  # the default for modules that were pickled before this option existed

    def __init__(
        self,
        *,
        normalize: bool = False,
        backward: Backward = "auto",
        recompute: bool = False,
        save: Save | None = None,
        pad_id: int | None = None,
    ) -> None:
        super().__init__()
        check_options("MaxSimScorer", normalize, backward, recompute)
        if save is not None:
            check_save("MaxSimScorer", save, recompute)
        if pad_id is not None:
            check_count("MaxSimScorer", "pad_id", pad_id)
        self.normalize = normalize
        self.backward = backward
        self.recompute = recompute
        self.save = save
        self.pad_id = pad_id

    def forward(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None = None,
        d_mask: Tensor | None = None,
        q_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the scores of `lik_ops.maxsim` for these arguments."""
        return maxsim(
            Q,
            D,
            q_mask,
            d_mask,
            q_weight=q_weight,
            normalize=self.normalize,
            backward=self.backward,
            recompute=self.recompute,
            save=self.save,
        )

    def forward_with_ids(self, Q: Tensor, D: Tensor, q_ids: Tensor, d_ids: Tensor) -> Tensor:
        """Return the scores of the tokens whose ids are not `pad_id`.

        Args:
            Q: query tokens, as in `lik_ops.maxsim`.
            D: document tokens, as in `lik_ops.maxsim`.
            q_ids: integer token ids, the shape of Q without d.
            d_ids: integer token ids, the shape of D without d.

        Raises:
            TypeError, ValueError: as `lik_ops.maxsim`. A module without a `pad_id` raises ValueError.

        Example:
            >>> scorer = lik_ops.MaxSimScorer(normalize=True, pad_id=0)
            >>> q_ids, d_ids = torch.tensor([[7, 8, 0]]), torch.tensor([[5, 0], [4, 9]])
            >>> scorer.forward_with_ids(torch.randn(1, 3, 16), torch.randn(2, 2, 16), q_ids, d_ids).shape
            torch.Size([1, 2])
        """
        if self.pad_id is None:
            raise ValueError("MaxSimScorer: pad_id: expected the id of padding for forward_with_ids, got None")
        for name, ids, tokens_name, tokens in (("q_ids", q_ids, "Q", Q), ("d_ids", d_ids, "D", D)):
            check_tensor("forward_with_ids", tokens_name, tokens)
            check_strided("forward_with_ids", tokens_name, tokens)
            check_tensor("forward_with_ids", name, ids)
            check_mask("forward_with_ids", name, ids, tokens_name, tokens, _IDS)
        # torch would compare short integers modulo their range.
        return self.forward(Q, D, q_ids.long() != self.pad_id, d_ids.long() != self.pad_id)

    @torch.no_grad()
    def score(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None = None,
        d_mask: Tensor | None = None,
        q_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the scores of `forward` without gradients, for inference.

        Example:
            >>> scorer, Q = lik_ops.MaxSimScorer(normalize=True), torch.randn(2, 32, 128, requires_grad=True)
            >>> scorer.score(Q, torch.randn(5, 300, 128)).requires_grad
            False
        """
        return self.forward(Q, D, q_mask, d_mask, q_weight)

    def retrieve(
        self, Q: Tensor, D: Any, top_k: int, q_mask: Tensor | None = None, d_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the results of `lik_ops.retrieve` with the `normalize` of this module. `options` are passed on.

        Example:
            >>> Q, D = torch.randn(32, 128), torch.randn(50, 300, 128)
            >>> scores, indices = lik_ops.MaxSimScorer(normalize=True).retrieve(Q, D, 3)
            >>> indices.shape
            torch.Size([3])
        """
        return retrieve(Q, D, top_k, q_mask=q_mask, d_mask=d_mask, normalize=self.normalize, **options)

    def extra_repr(self) -> str:
        """Return the options for the repr of the module."""
        options = [f", {name}={x!r}" for name, x in (("save", self.save), ("pad_id", self.pad_id)) if x is not None]
        return f"normalize={self.normalize}, backward={self.backward!r}, recompute={self.recompute}{''.join(options)}"
