"""The part of a shared corpus that one process searches: a range of the whole corpus, or its own shard."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..api import inputs
from ..core.arguments import short_repr
from ..formats.index import Index
from ..formats.quantized import Quantized, make_placeholder
from ..ops import topk
from ..ops.stack import autocast
from . import _retrieve, sources
from .arguments import as_mask_or_integers
from .staged import check_stages
from .subset import name_results, pad_results, resolve_subset
from .two_stage import retrieve_quantized

Sample: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]  # D, d_mask and cu_seqlens, to be checked


@dataclass
class RangeResult:
    """The best documents ``[Nq, k]`` of a range. Index 0 is document `first` of the documents of this process."""

    best: topk.ScoresAndIndices
    first: int


class StreamedTarget:
    """Documents that are read in parts."""

    def __init__(
        self, op: str, corpus: Any, d_mask: Tensor | None, cu_seqlens_d: Tensor | None, Q: Any, subset: Any
    ) -> None:
        self.source = sources.open_source(op, corpus, d_mask, cu_seqlens_d)
        self.documents = self.width = len(self.source)
        self.names: Tensor | None = None
        self.positions: Tensor | None = None
        if subset is not None:
            selection = _retrieve.select_from_source(op, Q, self.source, subset)
            self.source, self.names, self.positions, self.width = selection
        self.size = len(self.source)
        self.device: torch.device | None = None  # the search runs on the device of the queries

    def split(self, parts: int) -> list[tuple[int, int]]:
        """Split all documents into `parts` contiguous ranges with about the same number of tokens."""
        return self.source.split(parts)

    def sample(self) -> Sample:
        """Return an empty range of documents, in their dtype before quantization, to check arguments with."""
        part, shape = self.source.read(0, 0), (0, *self.source.shape[1:])
        return torch.empty(shape, dtype=self.source.dtype, device="cpu"), part.d_mask, part.cu_seqlens

    def best(self, queries: tuple, top_k: int, begin: int, end: int, options: dict[str, Any]) -> RangeResult:
        """Return the best documents of the range ``[begin, end)``."""
        Q, q_mask, q_weight = queries
        results = _retrieve.retrieve_from_source(
            Q, self.source, top_k, begin, end, q_mask=q_mask, q_weight=q_weight, positions=self.positions, **options
        )
        if self.names is not None:
            results = pad_results(name_results(results, self.names), min(top_k, end - begin))
        return RangeResult(_add_query_axis(Q, *results), 0)


class ResidentTarget:
    """Documents in the memory of this process's GPU."""

    is_staged = False
    is_launched = True  # a search is launched without waiting on the host

    def __init__(
        self,
        op: str,
        D: Any,
        d_mask: Tensor | None,
        cu_seqlens_d: Tensor | None,
        Q: Any = None,
        subset: Any = None,
    ) -> None:
        if cu_seqlens_d is not None:
            topk.check_document_offsets(op, cu_seqlens_d, D.device)
        elif D.dim() == 0:
            raise ValueError(f"{op}: D: expected [Nd, Ld, d], or [Td, d] with cu_seqlens_d, got []")
        self.D, self.d_mask, self.cu_seqlens_d, self.device = D, d_mask, cu_seqlens_d, D.device
        self.documents = D.shape[0] if cu_seqlens_d is None else cu_seqlens_d.shape[0] - 1
        self.op, self.mask, self.chosen, self.size, self.width = op, None, None, self.documents, self.documents
        if subset is not None:
            indices, self.width = resolve_subset(op, subset, Q, self.documents, D.device)
            mask_or_indices = as_mask_or_integers(op, "subset", subset)
            if mask_or_indices.dtype == torch.bool and mask_or_indices.device.type != "cpu":
                # Each rank lists its part, because the host does not see how many documents there are.
                self.mask = mask_or_indices
            else:
                self.chosen, self.size = indices, indices.shape[-1]

    def split(self, parts: int) -> list[tuple[int, int]]:
        """Split all documents into `parts` ranges, by tokens if the host knows the offsets, else by count."""
        if self.chosen is None and self.cu_seqlens_d is not None and self.cu_seqlens_d.device.type == "cpu":
            # The bounds must not descend. Descending offsets are not an error here.
            bounds = list(accumulate(sources.split_by_tokens(self.cu_seqlens_d, parts), max))
        else:
            bounds = [self.size * i // parts for i in range(parts + 1)]
        return list(pairwise(bounds))

    def sample(self) -> Sample:
        """Return the documents, their mask and their bounds to check arguments with."""
        return self.D, self.d_mask, self.cu_seqlens_d

    def part(self, begin: int, end: int) -> tuple[Any, Tensor | None, Tensor | None]:
        """Return D, `d_mask` and `cu_seqlens_d` of the documents ``[begin, end)``."""
        if self.cu_seqlens_d is not None:
            return self.D, self.d_mask, self.cu_seqlens_d[begin : end + 1]
        return self.D[begin:end], None if self.d_mask is None else self.d_mask[begin:end], None

    def list_part(self, begin: int, end: int) -> Tensor | None:
        """Return the documents of a part of the subset as indices, or None without a subset."""
        if self.mask is not None:
            indices = resolve_subset(self.op, self.mask[..., begin:end], None, end - begin, self.device).chosen
            return torch.where(indices >= 0, indices + begin, -1)
        return None if self.chosen is None else self.chosen[..., begin:end]

    def best(self, queries: tuple, top_k: int, begin: int, end: int, options: dict[str, Any]) -> RangeResult:
        """Return the best documents of the range ``[begin, end)`` for checked arguments."""
        Q, q_mask, q_weight = queries
        indices = self.list_part(begin, end)
        D, d_mask, cu_seqlens_d = self.part(begin, end) if indices is None else (self.D, self.d_mask, self.cu_seqlens_d)
        tensors = Q, D, q_mask, d_mask, cu_seqlens_d, q_weight
        results = self._search(topk.SearchArgs(*tensors, options["normalize"], top_k, options["chunk"]), indices)
        return RangeResult(_add_query_axis(Q, *results), begin if indices is None else 0)

    def _search(self, s: topk.SearchArgs, listed: Tensor | None) -> topk.ScoresAndIndices:
        """Return the best of the documents of a search, or of the documents `listed` among them."""
        Q, D, q_weight = autocast.cast_to_autocast(s.Q, s.D, s.q_weight)
        return _retrieve.retrieve_checked(s._replace(Q=Q, D=D, q_weight=q_weight), listed)


class QuantizedTarget(ResidentTarget):
    """Quantized documents in the memory of this process or of its GPU."""

    def __init__(
        self,
        op: str,
        D: Quantized,
        d_mask: Tensor | None,
        cu_seqlens_d: Tensor | None,
        stages: dict[str, Any],
        Q: Any = None,
        subset: Any = None,
    ) -> None:
        super().__init__(op, D, d_mask, cu_seqlens_d, Q, subset)
        check_stages(op, D, **stages)
        self.stages = stages["n_probe"], stages["n_candidates"]
        self.is_staged = any(count is not None for count in self.stages)
        self.is_launched = D.device.type != "cpu"

    def sample(self) -> Sample:
        """Return a placeholder with the metadata of the original tokens, their mask and their bounds."""
        return make_placeholder(self.D), self.d_mask, self.cu_seqlens_d

    def _search(self, s: topk.SearchArgs, listed: Tensor | None) -> topk.ScoresAndIndices:
        return retrieve_quantized(s, *self.stages, must_cover=False, subset=listed)


def _add_query_axis(Q: Tensor, scores: Tensor, indices: Tensor) -> topk.ScoresAndIndices:
    """Return results with the axis that a single query does not have."""
    return (scores, indices) if Q.dim() == 3 else (scores.unsqueeze(0), indices.unsqueeze(0))


def is_resident(corpus: Any) -> bool:
    """Return whether the documents are on an accelerator, so that scoring is launched without waiting on the host."""
    return isinstance(corpus, Tensor) and corpus.device.type != "cpu"


def make_target(
    op: str,
    corpus: Any,
    d_mask: Tensor | None,
    cu_seqlens_d: Tensor | None,
    stages: dict[str, Any],
    Q: Any = None,
    subset: Any = None,
) -> StreamedTarget | ResidentTarget:
    """Return the object that searches `corpus`.

    `stages` are the options `chunk`, `n_probe` and `n_candidates`. Q gives an empty list of documents its d and dtype.
    Raise TypeError or ValueError if `corpus` cannot be read, or the arguments do not fit together.
    """
    if isinstance(corpus, Index):
        corpus, cu_seqlens_d = inputs.unpack_index(op, corpus, cu_seqlens_d)
    if isinstance(corpus, Quantized):
        return QuantizedTarget(op, corpus, d_mask, cu_seqlens_d, stages, Q, subset)
    for name in ("n_probe", "n_candidates"):
        if (count := stages[name]) is not None:
            expected = "None unless corpus is residual codes in memory"
            raise ValueError(f"{op}: {name}: expected {expected}, got {short_repr(count)}")
    corpus, cu_seqlens_d = sources.pack_documents(op, corpus, d_mask, cu_seqlens_d, Q)
    kind = ResidentTarget if is_resident(corpus) else StreamedTarget
    return kind(op, corpus, d_mask, cu_seqlens_d, Q, subset)
