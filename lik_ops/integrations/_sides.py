"""Queries and documents of a call of sentence-transformers, and its score of documents without tokens."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..api.packing import copy_from_host
from . import _scoring
from ._scoring import Tokens

EMPTY_SCORE = -1e9
MAX_CHUNK_ELEMENTS = 100_000_000  # document elements that are packed or moved at a time
SIMILARITY = "sentence_transformers.util.similarity"


class EmbeddingSide:
    """Queries or documents of a call, and their mask. In a padded tensor without a mask, nonzero rows are kept."""

    def __init__(self, name: str, x: Any, mask: Any) -> None:
        self.name = name
        first = x[0] if isinstance(x, (list, tuple)) and len(x) else x
        self.device = first.device if isinstance(first, Tensor) else None  # arrays have no device
        self.tokens: Tokens = _scoring.as_tokens(x, name)
        if isinstance(mask, (list, tuple)):
            mask = torch.nn.utils.rnn.pad_sequence([_scoring.as_tensor(m) for m in mask], batch_first=True)
        self.mask = _scoring.as_mask(f"{name}_mask", mask)
        if isinstance(self.tokens, Tensor) and self.tokens.dim() == 2:
            self.tokens = self.tokens.unsqueeze(0)
            if self.mask is not None and self.mask.dim() == 1:
                self.mask = self.mask.unsqueeze(0)
        if self.mask is not None:
            width = max(self._widths(), default=0)
            self.mask = _scoring.fit_mask(name, self.mask, (len(self), width))
        elif isinstance(self.tokens, Tensor):
            self.mask = self.tokens.any(-1)

    def __len__(self) -> int:
        return len(self.tokens)

    def _widths(self) -> list[int]:
        """Return the number of tokens of each item, with padding."""
        if isinstance(self.tokens, Tensor):
            return [self.tokens.shape[1]] * len(self)
        return [t.shape[0] for t in self.tokens]

    def ranges(self, elements: int | None, at: torch.device) -> list[tuple[int, int]]:
        """Split the items into ranges ``(begin, end)`` of at most `elements` numbers, with at least one item each.

        None is `MAX_CHUNK_ELEMENTS`. There is one range if nothing is packed or moved, because all tokens are in one
        tensor on the device `at`.
        """
        if isinstance(self.tokens, Tensor) and self.tokens.device == at:
            return [(0, len(self))]
        budget = MAX_CHUNK_ELEMENTS if elements is None else elements
        d = self.tokens[0].shape[-1]
        ranges, begin, size = [], 0, 0
        for i, width in enumerate(self._widths()):
            if i > begin and size + width * d > budget:
                ranges.append((begin, i))
                begin, size = i, 0
            size += width * d
        return [*ranges, (begin, len(self))]

    def part(self, begin: int, end: int, at: torch.device) -> tuple[Tokens, Tensor | None]:
        """Return items ``[begin, end)`` and their mask on the device `at`."""
        tokens, mask = _scoring.move_tokens(self.tokens[begin:end], at), self.mask
        if mask is not None and isinstance(tokens, list):  # the mask is padded to the longest of all items
            mask = mask[:, : max(t.shape[0] for t in tokens)]
        return tokens, None if mask is None else mask[begin:end].to(at)

    def counts(self, device: torch.device) -> Tensor:
        """Return the number of kept tokens of each item, at least 1."""
        if self.mask is not None:
            return self.mask.bool().sum(-1).clamp(min=1).to(device)
        return copy_from_host([max(width, 1) for width in self._widths()], device)


def fill_empty(scores: Tensor, empty: Tensor) -> Tensor:
    """Return `scores` with the host's score at documents without tokens.

    The host's own function also warns about them. It is called if reading `empty` needs no sync: for ordinary tensors
    on the CPU.
    """
    host_function = getattr(sys.modules.get(SIMILARITY), "_fill_empty_document_scores", None)
    return (
        scores.masked_fill(empty, EMPTY_SCORE)
        if host_function is None or type(empty) is not Tensor
        else host_function(scores, empty)
    )


# The scores of `score_cross` and `score_pairs`, with the host's score for documents without tokens.
score_host_cross = partial(_scoring.score_cross, fill=fill_empty)
score_host_pairs = partial(_scoring.score_pairs, fill=fill_empty)
