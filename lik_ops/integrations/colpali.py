"""MaxSim for colpali-engine: its scoring functions, and `enable` for its ``lik`` backend.

colpali-engine has no masks: padding is zero rows, which take part in the maximum, here too. Scores are fp32 (fp64 for
fp64), as from its kernel backend; they may be edited in place, as its losses do.

Example::

    from lik_ops.integrations import colpali as lik

    scores = lik.score_multi_vector(query_embeddings, page_embeddings)
    with lik.enable():
        trainer.train()
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
from torch import Tensor

from .. import maxsim_soft
from . import _routing, _scoring
from ._routing import Routing as Routing

__all__ = ["Routing", "disable", "enable", "maxsim_inbatch", "maxsim_kd", "score_multi_vector"]

_LIK = "colpali_engine.utils._lik_backend"
_MAXSIM = "colpali_engine.utils.maxsim"
_LOSSES = "colpali_engine.loss.late_interaction_losses"


def maxsim_inbatch(query: Tensor, doc: Tensor) -> Tensor:
    """Scores ``[Bq, Bd]`` of ``[Bq, Lq, d]`` and ``[Bd, Ld, d]``.

    Raises:
        TypeError, ValueError: as `lik_ops.maxsim`.

    Example:
        >>> from lik_ops.integrations import colpali
        >>> Q, D = torch.eye(32, 128).expand(2, 32, 128), torch.eye(1030, 128).expand(4, 1030, 128)
        >>> colpali.maxsim_inbatch(Q, D).shape
        torch.Size([2, 4])
    """
    return _scoring.score_cross(query, doc, None, None)


def maxsim_kd(query: Tensor, doc: Tensor) -> Tensor:
    """Scores ``[B, N]`` of ``[B, Lq, d]`` and each query's own documents ``[B, N, Ld, d]``.

    Raises:
        TypeError, ValueError: as `lik_ops.maxsim`.

    Example:
        >>> from lik_ops.integrations import colpali
        >>> Q, D = torch.eye(32, 128).expand(2, 32, 128), torch.eye(1030, 128).expand(2, 4, 1030, 128)
        >>> colpali.maxsim_kd(Q, D).shape
        torch.Size([2, 4])
    """
    return _scoring.score_cross(query, doc, None, None)


def score_multi_vector(qs: Any, ps: Any, batch_size: int = 128, device: str | torch.device | None = None) -> Tensor:
    """Scores ``[Nq, Np]`` of queries and pages, fp32 on the CPU: ``BaseVisualRetrieverProcessor.score_multi_vector``.

    Lists are not padded, so a score does not depend on what else is in the list; colpali-engine's padding takes part in
    the maximum, which shows where every similarity of a token is negative.

    Args:
        qs, ps: lists of ``[L_i, d]``, or padded tensors.
        batch_size: pages that are on the device at a time.
        device: where to score; None for a GPU, if there is one.

    Raises:
        ValueError: `qs` or `ps` is empty, or a shape is wrong.
        TypeError: a dtype is wrong.

    Example:
        >>> from lik_ops.integrations import colpali
        >>> pages = [torch.eye(n, 128) for n in (1030, 700)]
        >>> colpali.score_multi_vector([torch.eye(20, 128)], pages).shape
        torch.Size([1, 2])
    """
    for name, given in (("qs", qs), ("ps", ps)):
        if given is not None and len(given) == 0:
            raise ValueError(f"score_multi_vector: {name}: expected at least one, got none")
    at = torch.device(device or _choose_device())
    queries, pages = _scoring.move_tokens(_scoring.as_tokens(qs, "qs"), at), _scoring.as_tokens(ps, "ps")
    parts = [
        _scoring.score_cross(queries, _scoring.move_tokens(pages[begin : begin + batch_size], at), None, None)
        for begin in range(0, len(pages), batch_size)
    ]
    return torch.cat(parts, dim=1).to("cpu", torch.float32)


def _choose_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _scores_lik(query: Tensor, doc: Tensor) -> Tensor:
    if not _scoring.is_supported(query, doc):
        message = "lik_ops has scores of floats of one dtype on one device"
        raise importlib.import_module(_LIK).LIKUnsupportedError(message)
    return _scoring.score_cross(query, doc, None, None)


# Products of tokens in the losses, by their equations with letters renamed in order of appearance.
_IN_BATCH, _PAIRS, _CANDIDATES = "abc,dec->adbe", "abc,adc->abd", "abc,adec->adbe"


def _rename_axes(equation: str) -> str:
    letters: dict[str, str] = {}
    return "".join(letters.setdefault(x, chr(ord("a") + len(letters))) if x.isalpha() else x for x in equation)


class _LazySimilarities:
    """Similarities of the tokens of a loss, as what they are computed from: the maximum after them needs no more.

    Any other use computes them, as the host would have.
    """

    def __init__(self, equation: str, query: Tensor, doc: Tensor) -> None:
        self.equation, self.query, self.doc = equation, query, doc

    def computed(self) -> Tensor:
        return torch.einsum(self.equation, self.query, self.doc)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.computed(), name)

    def __truediv__(self, divisor: Any) -> Tensor:
        return self.computed() / divisor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [x.computed() if isinstance(x, cls) else x for x in args]
        return function(*plain, **(kwargs or {}))


def _accepts_einsum(equation: Any, *operands: Any) -> bool:
    """Return whether an ``einsum`` of the host's losses makes similarities that lik_ops can do without."""
    if len(operands) != 2 or not isinstance(equation, str) or not _scoring.is_supported(*operands):
        return False
    query, doc = operands
    layout = _rename_axes(equation)
    if layout not in (_IN_BATCH, _PAIRS, _CANDIDATES) or (layout != _IN_BATCH and query.shape[0] != doc.shape[0]):
        return False
    resolve = getattr(sys.modules.get(_MAXSIM), "_resolve_backend", None)
    return resolve is None or resolve() != "torch"


def _accepts_aggregate(loss: Any, scores_raw: Any, use_smooth_max: bool, dim_max: int, dim_sum: int) -> bool:
    """Return whether the host's `_aggregate` takes the maximum over document tokens and the sum over query tokens."""
    if not isinstance(scores_raw, _LazySimilarities):
        return False
    pairs = _rename_axes(scores_raw.equation) == _PAIRS
    is_smooth = not use_smooth_max or (isinstance(loss.tau, (int, float)) and loss.tau > 0)
    return is_smooth and (dim_max, dim_sum) == ((2, 1) if pairs else (3, 2))


def _aggregate(loss: Any, scores_raw: _LazySimilarities, use_smooth_max: bool, dim_max: int, dim_sum: int) -> Tensor:
    """Return the scores that the host would make of the similarities."""
    query, doc = scores_raw.query, scores_raw.doc
    pairs = _rename_axes(scores_raw.equation) == _PAIRS
    doc = doc.unsqueeze(1) if pairs else doc
    scores = maxsim_soft(query, doc, loss.tau) if use_smooth_max else _scoring.score_cross(query, doc, None, None)
    return scores.squeeze(1) if pairs else scores


def _list_targets() -> list[_routing.PatchTarget]:
    return [
        _routing.PatchTarget(_LIK, "maxsim_inbatch_lik", _scores_lik),
        _routing.PatchTarget(_LIK, "maxsim_kd_lik", _scores_lik),
        _routing.PatchTarget(f"{_LOSSES}:ColbertModule", "_aggregate", _aggregate, accepts=_accepts_aggregate),
        _routing.PatchTarget(_LOSSES, "torch.einsum", _LazySimilarities, scores=False, accepts=_accepts_einsum),
    ]


def _list_bypassed() -> list[str]:
    backend = os.environ.get("COLPALI_SCORES_BACKEND", "auto").lower()
    return ["scores while COLPALI_SCORES_BACKEND=torch"] if backend == "torch" else []


_HOST = _routing.HostLibrary("colpali-engine", "0.3.17", _list_targets, _list_bypassed, "torch<2.14")


def enable() -> Routing:
    """Let lik_ops be colpali-engine's ``lik`` backend, on CPUs too; late-interaction-kernels need not be installed.

    Idempotent. ``COLPALI_SCORES_BACKEND`` chooses as before; ``LIK_OPS_INTEGRATIONS=0``, read at every call, gives
    colpali-engine its own functions back. A warning names what is not reached.

    Returns:
        A context manager that ends it; its `calls` counts the calls that lik_ops scored.

    Raises:
        ImportError: colpali-engine is not installed.
    """
    return _routing.enable(_HOST)


def disable() -> None:
    """End `enable`; without one, nothing."""
    _routing.disable(_HOST)
