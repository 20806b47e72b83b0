"""MaxSim for PyLate: functions for its losses' ``score_metric=``, and `enable` for its ``lik`` backend.

Example::

    from lik_ops.integrations import pylate as lik

    losses.Contrastive(model=model, score_metric=lik.ColBERTScores())
    losses.CachedContrastive(model=model, score_metric=lik.ColBERTScores(), mini_batch_size=32)
    losses.Distillation(model=model, score_metric=lik.colbert_kd_scores)
    losses.Contrastive(model=model, score_metric=lik.XTRScores(k=256))

Masked document tokens are excluded from the maximum. PyLate's own torch code multiplies them by 0, so the maximum of a
document with masked tokens is never negative there. A document without kept tokens scores 0. Scores are fp32 (fp64 for
fp64 inputs), as from PyLate's kernel backends. Lists of ``[L_i, d]`` of any lengths are scored without padding.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import partial
from typing import Any

from torch import Tensor

from . import _routing, _scoring
from ._routing import Routing as Routing

__all__ = [
    "ColBERTScores",
    "Routing",
    "XTRKDScores",
    "XTRScores",
    "colbert_kd_scores",
    "colbert_scores",
    "colbert_scores_pairwise",
    "disable",
    "enable",
    "xtr_kd_scores",
    "xtr_scores",
]

_BACKENDS = (None, "auto", "lik")
_LIK = "pylate.scores._lik_backend"
_COLBERT = "pylate.scores.colbert"


def colbert_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    backend: str | None = None,
) -> Tensor:
    """Return the scores ``[Nq, Nd]`` of every query and document.

    Args:
        queries_embeddings: query tokens ``[Nq, Lq, d]``, an array or a list of ``[L_i, d]``.
        documents_embeddings: document tokens ``[Nd, Ld, d]``, an array or a list of ``[L_i, d]``.
        queries_mask: ``[Nq, Lq]``, bool, or numbers that multiply the maximum of each token.
        documents_mask: ``[Nd, Ld]``, read as ``!= 0``. Holes are allowed.
        backend: None, ``"auto"`` or ``"lik"``, which all select lik_ops.

    Returns:
        The scores ``[Nq, Nd]``.

    Raises:
        ValueError: a shape, device or `backend` is wrong.
        TypeError: a dtype is wrong.

    Example:
        >>> from lik_ops.integrations import pylate
        >>> Q, D = torch.eye(32, 128).expand(2, 32, 128), torch.eye(300, 128).expand(5, 300, 128)
        >>> pylate.colbert_scores(Q, D).shape
        torch.Size([2, 5])
    """
    _check_backend("colbert_scores", backend)
    return _scoring.score_cross(queries_embeddings, documents_embeddings, queries_mask, documents_mask)


def colbert_scores_pairwise(queries_embeddings: Any, documents_embeddings: Any, backend: str | None = None) -> Tensor:
    """Return the scores ``[B]`` of query i and document i, with the arguments of `colbert_scores`.

    Example:
        >>> from lik_ops.integrations import pylate
        >>> documents = [torch.eye(n, 128) for n in (300, 12)]
        >>> pylate.colbert_scores_pairwise(torch.eye(32, 128).expand(2, 32, 128), documents).shape
        torch.Size([2])
    """
    _check_backend("colbert_scores_pairwise", backend)
    return _scoring.score_pairs(queries_embeddings, documents_embeddings, None, None)


def colbert_kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    backend: str | None = None,
) -> Tensor:
    """Return the scores ``[Nq, K]`` of each query and its own documents ``[Nq, K, Ld, d]``, masked by ``[Nq, K, Ld]``.

    Example:
        >>> from lik_ops.integrations import pylate
        >>> Q, D = torch.eye(32, 128).expand(2, 32, 128), torch.eye(300, 128).expand(2, 8, 300, 128)
        >>> pylate.colbert_kd_scores(Q, D).shape
        torch.Size([2, 8])
    """
    _check_backend("colbert_kd_scores", backend)
    Q, D = _scoring.as_dense(queries_embeddings, "queries"), _scoring.as_dense(documents_embeddings, "documents")
    return _scoring.score_cross(Q, D, queries_mask, documents_mask)


class ColBERTScores:
    """Scores ``[Nq, G * N]`` of every query and the documents ``[G, N, Ld, d]``, in one kernel call.

    Document n of group g is column ``g * N + n``.

    Example:
        >>> from lik_ops.integrations import pylate
        >>> Q, D = torch.eye(32, 128).expand(2, 32, 128), torch.eye(300, 128).expand(2, 3, 300, 128)
        >>> pylate.ColBERTScores()(Q, D).shape
        torch.Size([2, 6])
    """

    def __call__(
        self,
        queries_embeddings: Any,
        documents_embeddings: Any,
        queries_mask: Any = None,
        documents_mask: Any = None,
        backend: str | None = None,
    ) -> Tensor:
        """Return the scores ``[Nq, G * N]``, with the arguments of `colbert_scores`."""
        D, d_mask = _scoring.merge_groups(documents_embeddings, documents_mask)
        return colbert_scores(queries_embeddings, D, queries_mask, d_mask, backend)

    def get_config_dict(self) -> dict[str, Any]:
        """Return the options as a dictionary, for PyLate."""
        return {}


class XTRScores:
    """XTR scores ``[Nq, G * N]`` of every query and the documents ``[G, N, Ld, d]``, without storing similarities.

    The scores are `lik_ops.maxsim_xtr` with ``normalizer="positive"``: each query token sees its `k` best tokens among
    all documents of the call. Columns are ordered as in `ColBERTScores`. A document without kept tokens scores 0.

    Args:
        k: the number of document tokens that each query token retrieves. A number above the number of tokens selects
            all.
        document_chunk_size: accepted for PyLate's signature. Memory is bounded without it.

    Example:
        >>> from lik_ops.integrations import pylate
        >>> pylate.XTRScores(k=64)(torch.randn(2, 32, 128), torch.randn(2, 3, 300, 128)).shape
        torch.Size([2, 6])
    """

    def __init__(self, k: int = 256, document_chunk_size: int | None = None) -> None:
        self.k, self.document_chunk_size = k, document_chunk_size

    def __call__(
        self,
        queries_embeddings: Any,
        documents_embeddings: Any,
        queries_mask: Any = None,
        documents_mask: Any = None,
    ) -> Tensor:
        """Return the scores ``[Nq, G * N]``."""
        return _xtr_scores(self, queries_embeddings, documents_embeddings, queries_mask, documents_mask)

    def get_config_dict(self) -> dict[str, Any]:
        """Return the options as a dictionary, for PyLate."""
        return {"k": self.k, "document_chunk_size": self.document_chunk_size}


class XTRKDScores(XTRScores):
    """XTR scores ``[Nq, N]`` of each query and its own documents ``[Nq, N, Ld, d]``.

    Query tokens retrieve from the documents of all queries, as in `XTRScores`.

    Example:
        >>> from lik_ops.integrations import pylate
        >>> pylate.XTRKDScores()(torch.randn(2, 32, 128), torch.randn(2, 8, 300, 128)).shape
        torch.Size([2, 8])
    """

    def __call__(
        self,
        queries_embeddings: Any,
        documents_embeddings: Any,
        queries_mask: Any = None,
        documents_mask: Any = None,
    ) -> Tensor:
        """Return the scores ``[Nq, N]``."""
        score = partial(super().__call__, queries_mask=queries_mask, documents_mask=documents_mask)
        return _scoring.score_own_groups(score, queries_embeddings, documents_embeddings)


xtr_scores = XTRScores()
xtr_kd_scores = XTRKDScores()


def _xtr_scores(scorer: Any, Q: Any, D: Any, queries_mask: Any = None, documents_mask: Any = None) -> Tensor:
    """Return the scores of a scorer of PyLate or lik_ops, both of which have `k`."""
    D, d_mask = _scoring.merge_groups(D, documents_mask)
    return _scoring.score_xtr(Q, D, queries_mask, d_mask, scorer.k, "positive")


def _accepts_xtr(scorer: Any, Q: Any, D: Any, *masks: Any, **named: Any) -> bool:
    """Return whether lik_ops can score these inputs."""
    return _scoring.is_supported(Q, D)


class _TokenList(list[Tensor]):
    """Tokens ``[L_i, d]`` of several lengths. Any use as a tensor raises PyLate's error, which expects a tensor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stack(), name)

    def stack(self) -> Tensor:
        """Let PyLate stack the items, which raises its error of different lengths."""
        tensor: Tensor = importlib.import_module("pylate.utils.tensor").convert_to_tensor(list(self))
        return tensor


def _is_token_list(x: Any) -> bool:
    """Return whether `x` is a list of 2-D items with several lengths."""
    if not isinstance(x, list) or not x or any(getattr(item, "ndim", 0) != 2 for item in x):
        return False
    return len({tuple(item.shape) for item in x}) > 1


def _as_token_list(x: Any) -> _TokenList:
    """Return the items as a `_TokenList` of tensors."""
    return _TokenList(_scoring.as_tensor(item) for item in x)


def _check_backend(op: str, backend: Any) -> None:
    """Raise ValueError unless `backend` selects lik_ops."""
    if backend not in _BACKENDS:
        raise ValueError(f"{op}: backend: expected None, 'auto' or 'lik', got {backend!r}")


def _check_supported(Q: Any, D: Any) -> None:
    """Raise the error on which PyLate falls back to its torch code, or the error of that code for ragged lists."""
    if not _scoring.is_supported(Q, D):
        _refuse_token_lists(Q, D)
        raise importlib.import_module(_LIK).LIKUnsupported(
            "lik_ops scores floating-point tensors of one dtype on one device"
        )


def _refuse_token_lists(*tensors: Any) -> None:
    """Raise PyLate's error if an argument is a `_TokenList`."""
    for x in tensors:
        if isinstance(x, _TokenList):
            x.stack()


def _accepts_lik(backend: str, *tensors: Any) -> bool:
    """Return whether PyLate should call the ``lik`` backend. Replaces a check that excludes CPUs and lists."""
    if backend in ("auto", "lik"):
        return True
    _refuse_token_lists(*tensors)
    return False


def _scores_lik(Q: Tensor, D: Tensor, queries_mask: Any = None, documents_mask: Any = None) -> Tensor:
    """Return the scores ``[Nq, Nd]`` of the ``lik`` backend."""
    _check_supported(Q, D)
    return _scoring.score_cross(Q, D, queries_mask, documents_mask)


def _scores_pairwise_lik(Q: Any, D: Any) -> Tensor:
    """Return the scores ``[B]`` of the ``lik`` backend."""
    _check_supported(Q, D)
    return _scoring.score_pairs(Q, D, None, None)


def _kd_scores_lik(Q: Any, D: Any, queries_mask: Any = None, documents_mask: Any = None) -> Tensor:
    """Return the scores ``[Nq, K]`` of the ``lik`` backend."""
    _refuse_token_lists(Q, D)
    return _scores_lik(Q, D, queries_mask, documents_mask)


def _list_targets() -> list[_routing.PatchTarget]:
    """Return the functions of PyLate to replace."""
    return [
        _routing.PatchTarget(_COLBERT, "_try_lik", _accepts_lik, scores=False),
        _routing.PatchTarget(_COLBERT, "convert_to_tensor", _as_token_list, scores=False, accepts=_is_token_list),
        _routing.PatchTarget(_LIK, "colbert_scores_lik", _scores_lik),
        _routing.PatchTarget(_LIK, "colbert_scores_pairwise_lik", _scores_pairwise_lik),
        _routing.PatchTarget(_LIK, "colbert_kd_scores_lik", _kd_scores_lik),
        _routing.PatchTarget("pylate.scores.xtr:XTRScores", "_score", _xtr_scores, accepts=_accepts_xtr),
    ]


def _list_bypassed() -> list[str]:
    """Return descriptions of calls that do not reach the replaced functions."""
    backend = os.environ.get("PYLATE_SCORES_BACKEND", "auto").lower()
    if backend in ("torch", "flash"):
        return [f"ColBERT scores while PYLATE_SCORES_BACKEND={backend}"]
    if backend == "auto" and importlib.util.find_spec("flash_maxsim") is not None:
        return ["ColBERT scores on GPUs that flash-maxsim scores first (PYLATE_SCORES_BACKEND=lik selects lik_ops)"]
    return []


_HOST = _routing.HostLibrary("pylate", "1.5.1", _list_targets, _list_bypassed, "torch==2.11.*")


def enable() -> Routing:
    """Make lik_ops the ``lik`` backend of PyLate, also on CPUs and for lists, and for its XTR losses.

    late-interaction-kernels need not be installed. The call is idempotent. Losses loop over columns of documents. With
    ``score_metric=ColBERTScores()`` they make one call. ``PYLATE_SCORES_BACKEND`` and ``backend=`` select the backend
    as before. With ``LIK_OPS_INTEGRATIONS=0``, which is read at every call, PyLate uses its own functions. A warning
    names functions that are not covered.

    Returns:
        A context manager that ends the routing. Its `calls` counts the calls that lik_ops scored.

    Raises:
        ImportError: PyLate is not installed.
    """
    return _routing.enable(_HOST)


def disable() -> None:
    """End `enable`. Without a previous `enable`, do nothing."""
    _routing.disable(_HOST)
