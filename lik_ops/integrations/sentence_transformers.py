"""MaxSim for sentence-transformers' multi-vector models: callables with its signatures, and `enable` for all scoring.

Losses take ``similarity_fct=colbert_scores`` (``colbert_kd_scores`` for distillation, ``colbert_scores_pairwise`` for
margins), evaluators ``score_functions={"maxsim": maxsim}`` or ``similarity_fct=maxsim``; `enable` reaches
``model.similarity``, losses and evaluators without an argument::

    from lik_ops.integrations import sentence_transformers as lik

    loss = losses.MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=lik.colbert_scores)
    with lik.enable():
        scores = model.similarity(queries, documents)

As sentence-transformers has it: masked document tokens leave the maximum, a document that keeps no token scores -1e9,
a query mask of numbers multiplies each token's maximum, rows of zeros in a padded tensor without a mask are padding,
and scores are fp32 on the device of the documents. Lists of ``[L_i, d]`` are scored without padding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api.packing import from_host
from . import _routing, _scoring
from ._routing import Routing as Routing
from ._scoring import Tokens

__all__ = [
    "Routing",
    "colbert_kd_scores",
    "colbert_scores",
    "colbert_scores_pairwise",
    "disable",
    "enable",
    "maxsim",
    "maxsim_pairwise",
    "mean_colbert_kd_scores",
    "mean_colbert_scores",
    "mean_colbert_scores_pairwise",
    "mean_maxsim",
    "mean_maxsim_pairwise",
]

_EMPTY = -1e9
_CHUNK_ELEMENTS = 100_000_000  # of documents that are packed or moved at a time
_SIMILARITY = "sentence_transformers.util.similarity"
_MODEL = "sentence_transformers.multi_vector_encoder.model:MultiVectorEncoder"


def maxsim(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: str | torch.device | None = None,
) -> Tensor:
    """Scores ``[Na, Nb]`` of every query and document.

    Args:
        a, b: padded ``[N, L, d]``, a list of ``[L_i, d]``, or ``[L, d]`` for one; tensors or arrays.
        a_mask: ``[Na, La]`` (a list of ``[L_i]``, ``[La]`` for one query): bool, or numbers that weigh the tokens.
        b_mask: the same of `b`, read as ``!= 0``.
        chunk_elements: how many numbers of documents to pack or move to `device` at a time. Padded documents that are
            there already are scored at once; no similarities are kept.
        length_normalize: divide by the number of the query's tokens.
        device: where to score; None for the device of the documents, on which scores are returned in any case.

    Raises:
        ValueError: a shape, mask or device is wrong.
        TypeError: a dtype or type is wrong.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> documents = [torch.randn(n, 128) for n in (300, 12, 40)]
        >>> sentence_transformers.maxsim(torch.randn(2, 32, 128), documents).shape
        torch.Size([2, 3])
    """
    queries, documents = _Side("a", a, a_mask), _Side("b", b, b_mask)
    home = documents.device or queries.device or torch.device("cpu")
    if not len(queries) or not len(documents):
        return torch.zeros(len(queries), len(documents), device=home)
    at = home if device is None else torch.device(device)
    there = queries.part(0, len(queries), at)
    parts = [
        _cross(there[0], D, there[1], keep)
        for D, keep in (documents.part(*ends, at) for ends in documents.ranges(chunk_elements, at))
    ]
    scores = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(home)
    return scores / queries.counts(home).unsqueeze(1) if length_normalize else scores


def maxsim_pairwise(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: str | torch.device | None = None,
) -> Tensor:
    """Scores ``[B]`` of query i and document i; arguments as of `maxsim`.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> documents = [torch.randn(n, 128) for n in (300, 12)]
        >>> sentence_transformers.maxsim_pairwise(torch.randn(2, 32, 128), documents).shape
        torch.Size([2])
    """
    queries, documents = _Side("a", a, a_mask), _Side("b", b, b_mask)
    if len(queries) != len(documents):
        raise ValueError(
            f"maxsim_pairwise: b: expected {len(queries)} documents, as many as queries, got {len(documents)}"
        )
    home = documents.device or queries.device or torch.device("cpu")
    if not len(queries):
        return torch.zeros(0, device=home)
    at = home if device is None else torch.device(device)
    parts = []
    for ends in documents.ranges(chunk_elements, at):
        (Q, q_mask), (D, d_mask) = queries.part(*ends, at), documents.part(*ends, at)
        parts.append(_pairs(Q, D, q_mask, d_mask))
    scores = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(home)
    return scores / queries.counts(home) if length_normalize else scores


def colbert_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Scores ``[Nq, G * N]`` of every query and the documents ``[G, N, L, d]``; those of group g begin at ``g * N``.

    One call of the kernel for all groups.

    Args:
        queries_embeddings: ``[Nq, Lq, d]``.
        documents_embeddings: ``[G, N, Ld, d]``.
        queries_mask, documents_mask: ``[Nq, Lq]`` and ``[G, N, Ld]``, as of `maxsim`.
        chunk_elements, length_normalize: as of `maxsim`.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> sentence_transformers.colbert_scores(torch.randn(2, 32, 128), torch.randn(2, 3, 300, 128)).shape
        torch.Size([2, 6])
    """
    D, d_mask = _scoring.as_one_group(documents_embeddings, documents_mask)
    return maxsim(queries_embeddings, D, queries_mask, d_mask, chunk_elements, length_normalize)


def colbert_scores_pairwise(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """`maxsim_pairwise`, as losses call it.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(2, 300, 128)
        >>> sentence_transformers.colbert_scores_pairwise(Q, D).shape
        torch.Size([2])
    """
    tensors = queries_embeddings, documents_embeddings, queries_mask, documents_mask
    return maxsim_pairwise(*tensors, chunk_elements, length_normalize)


def colbert_kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Scores ``[Nq, K]`` of each query and its own documents ``[Nq, K, Ld, d]``.

    Args:
        queries_embeddings, queries_mask, length_normalize: as of `colbert_scores`.
        documents_embeddings: ``[Nq, K, Ld, d]``.
        documents_mask: ``[Nq, K, Ld]``.
        chunk_elements: accepted for the host's signature; nothing is packed or moved.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(2, 8, 300, 128)
        >>> sentence_transformers.colbert_kd_scores(Q, D).shape
        torch.Size([2, 8])
    """
    D = _scoring.as_dense(documents_embeddings)
    queries = _Side("queries", _scoring.as_dense(queries_embeddings), queries_mask)
    keep = D.any(-1) if documents_mask is None else documents_mask
    scores = _cross(queries.tokens, D, queries.mask, keep)
    return scores / queries.counts(scores.device).unsqueeze(1) if length_normalize else scores


def _mean(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    def mean(*args: Any, length_normalize: bool = True, **kwargs: Any) -> Tensor:
        return function(*args, length_normalize=length_normalize, **kwargs)

    mean.__name__ = mean.__qualname__ = name
    mean.__doc__ = f"`{function.__name__}`, divided by the number of each query's tokens."
    return mean


mean_maxsim = _mean(maxsim, "mean_maxsim")
mean_maxsim_pairwise = _mean(maxsim_pairwise, "mean_maxsim_pairwise")
mean_colbert_scores = _mean(colbert_scores, "mean_colbert_scores")
mean_colbert_scores_pairwise = _mean(colbert_scores_pairwise, "mean_colbert_scores_pairwise")
mean_colbert_kd_scores = _mean(colbert_kd_scores, "mean_colbert_kd_scores")


class _Side:
    """Queries or documents of a call, and their mask: of a padded tensor without one, its rows that are not zero."""

    def __init__(self, name: str, x: Any, mask: Any) -> None:
        self.name = name
        first = x[0] if isinstance(x, (list, tuple)) and len(x) else x
        self.device = first.device if isinstance(first, Tensor) else None  # arrays have none
        self.tokens: Tokens = _scoring.as_tokens(x)
        if isinstance(mask, (list, tuple)):
            mask = torch.nn.utils.rnn.pad_sequence([_scoring.as_tensor(m) for m in mask], batch_first=True)
        self.mask = _scoring.as_mask(f"{name}_mask", mask)
        if isinstance(self.tokens, Tensor) and self.tokens.dim() == 2:
            self.tokens = self.tokens.unsqueeze(0)
            if self.mask is not None and self.mask.dim() == 1:
                self.mask = self.mask.unsqueeze(0)
        if self.mask is not None:
            self._fit()
        elif isinstance(self.tokens, Tensor):
            self.mask = self.tokens.any(-1)

    def _fit(self) -> None:
        assert self.mask is not None
        width = max(self._widths(), default=0)
        if self.mask.dim() != 2 or self.mask.shape[1] != width or self.mask.shape[0] not in (1, len(self)):
            raise ValueError(
                f"{self.name}_mask: expected [{len(self)}, {width}], as {self.name} padded, got {list(self.mask.shape)}"
            )
        self.mask = self.mask.expand(len(self), -1)

    def __len__(self) -> int:
        return len(self.tokens)

    def _widths(self) -> list[int]:
        if isinstance(self.tokens, Tensor):
            return [self.tokens.shape[1]] * len(self)
        return [t.shape[0] for t in self.tokens]

    def ranges(self, elements: int | None, at: torch.device) -> list[tuple[int, int]]:
        """Parts of at most `elements` numbers, of at least one item; one part where nothing is packed or moved."""
        if isinstance(self.tokens, Tensor) and self.tokens.device == at:
            return [(0, len(self))]
        budget = _CHUNK_ELEMENTS if elements is None else elements
        d = self.tokens[0].shape[-1]
        found, begin, held = [], 0, 0
        for i, width in enumerate(self._widths()):
            if i > begin and held + width * d > budget:
                found.append((begin, i))
                begin, held = i, 0
            held += width * d
        return [*found, (begin, len(self))]

    def part(self, begin: int, end: int, at: torch.device) -> tuple[Tokens, Tensor | None]:
        """Items and their mask on the device `at`."""
        tokens, mask = _scoring.moved(self.tokens[begin:end], at), self.mask
        if mask is not None and isinstance(tokens, list):  # it is padded to the longest of all
            mask = mask[:, : max(t.shape[0] for t in tokens)]
        return tokens, None if mask is None else mask[begin:end].to(at)

    def counts(self, device: torch.device) -> Tensor:
        """Tokens of each item, at least 1."""
        if self.mask is not None:
            return self.mask.bool().sum(-1).clamp(min=1).to(device)
        return from_host([max(width, 1) for width in self._widths()], device)


def _fill(scores: Tensor, empty: Tensor) -> Tensor:
    """The host's score of documents without tokens. Its own function warns of them where reading waits for nothing: of
    tensors on the CPU, if they are ordinary ones."""
    theirs = getattr(sys.modules.get(_SIMILARITY), "_fill_empty_document_scores", None)
    return scores.masked_fill(empty, _EMPTY) if theirs is None or type(empty) is not Tensor else theirs(scores, empty)


def _cross(a: Any, b: Any, a_mask: Tensor | None, b_mask: Tensor | None) -> Tensor:
    return _scoring.cross(a, b, a_mask, b_mask, _fill).float()


def _pairs(a: Any, b: Any, a_mask: Tensor | None, b_mask: Tensor | None) -> Tensor:
    return _scoring.pairs(a, b, a_mask, b_mask, _fill).float()


def _similarity(model: Any, embeddings1: Any, embeddings2: Any, **kwargs: Any) -> Tensor:
    return _by_name(model, maxsim, mean_maxsim)(embeddings1, embeddings2, **kwargs)


def _similarity_pairwise(model: Any, embeddings1: Any, embeddings2: Any, **kwargs: Any) -> Tensor:
    return _by_name(model, maxsim_pairwise, mean_maxsim_pairwise)(embeddings1, embeddings2, **kwargs)


def _by_name(model: Any, plain: Callable[..., Tensor], mean: Callable[..., Tensor]) -> Callable[..., Tensor]:
    name = getattr(model.similarity_fn_name, "value", model.similarity_fn_name)
    if name not in ("maxsim", "meanmaxsim"):
        raise ValueError(f"similarity_fn_name: expected maxsim or meanmaxsim, got {name!r}")
    return plain if name == "maxsim" else mean


def _targets() -> list[_routing.Target]:
    return [
        _routing.Target(_SIMILARITY, "_maxsim_score_documents", _cross),
        _routing.Target(_SIMILARITY, "_maxsim_score_pairs", _pairs),
        _routing.Target(_MODEL, "similarity", _similarity),  # lists are not padded
        _routing.Target(_MODEL, "similarity_pairwise", _similarity_pairwise),
    ]


_HOST = _routing.Host("sentence-transformers", "6.1", _targets)


def enable() -> Routing:
    """Score with lik_ops wherever sentence-transformers scores by MaxSim: ``model.similarity``, losses, evaluators.

    Idempotent. ``LIK_OPS_INTEGRATIONS=0``, read at every call, gives sentence-transformers its own functions back. A
    warning names what is not reached. Losses still go over columns of documents one by one; their argument
    ``similarity_fct=colbert_scores`` makes that one call. XTR scores are sentence-transformers' own.

    Returns:
        A context manager that ends it; its `calls` counts the calls that lik_ops scored.

    Raises:
        ImportError: sentence-transformers is not installed.
    """
    return _routing.enable(_HOST)


def disable() -> None:
    """End `enable`; without one, nothing."""
    _routing.disable(_HOST)
