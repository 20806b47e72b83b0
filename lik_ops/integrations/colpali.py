"""MaxSim for colpali-engine: its scoring functions, and `enable` for its ``lik`` backend.

colpali-engine has no masks. Padding consists of zero rows, which are part of the maximum, here too. Scores are fp32
(fp64 for fp64 inputs), as from its kernel backend. They may be edited in place, as its losses do.

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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import maxsim_soft
from ..core.arguments import check_count, format_shape
from . import _pooling, _routing, _scoring
from ._routing import Routing as Routing

__all__ = ["Routing", "disable", "enable", "maxsim_inbatch", "maxsim_kd", "score_multi_vector"]

_LIK = "colpali_engine.utils._lik_backend"
_MAXSIM = "colpali_engine.utils.maxsim"
_LOSSES = "colpali_engine.loss.late_interaction_losses"
_POOLING = "colpali_engine.compression.token_pooling.hierarchical_token_pooling"


def maxsim_inbatch(query: Tensor, doc: Tensor) -> Tensor:
    """Return the scores ``[Bq, Bd]`` of queries ``[Bq, Lq, d]`` and documents ``[Bd, Ld, d]``.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size or device is wrong.

    Example:
        >>> from lik_ops.integrations import colpali
        >>> Q, D = torch.eye(32, 128).expand(2, 32, 128), torch.eye(1030, 128).expand(4, 1030, 128)
        >>> colpali.maxsim_inbatch(Q, D).shape
        torch.Size([2, 4])
    """
    return _scoring.score_cross(query, doc, None, None)


def maxsim_kd(query: Tensor, doc: Tensor) -> Tensor:
    """Return the scores ``[B, N]`` of queries ``[B, Lq, d]`` and their own documents ``[B, N, Ld, d]``.

    Raises:
        TypeError: a dtype or type is wrong.
        ValueError: a rank, size or device is wrong.

    Example:
        >>> from lik_ops.integrations import colpali
        >>> Q, D = torch.eye(32, 128).expand(2, 32, 128), torch.eye(1030, 128).expand(2, 4, 1030, 128)
        >>> colpali.maxsim_kd(Q, D).shape
        torch.Size([2, 4])
    """
    return _scoring.score_cross(query, doc, None, None)


def score_multi_vector(qs: Any, ps: Any, batch_size: int = 128, device: str | torch.device | None = None) -> Tensor:
    """Return the scores ``[Nq, Np]`` of queries and pages, in fp32 on the CPU.

    The function replaces ``BaseVisualRetrieverProcessor.score_multi_vector``. Lists are not padded, so a score does not
    depend on other items of the list. In colpali-engine, padding is part of the maximum. The difference is visible if
    every similarity of a token is negative.

    Args:
        qs: queries, a list of ``[L_i, d]`` or a padded tensor.
        ps: pages, a list of ``[L_i, d]`` or a padded tensor.
        batch_size: the number of pages on the device at a time.
        device: the device to score on. None is a GPU if there is one.

    Returns:
        The scores ``[Nq, Np]``.

    Raises:
        ValueError: `qs` or `ps` is empty, a shape is wrong, or `batch_size` is below 1.
        TypeError: a dtype or type is wrong.

    Example:
        >>> from lik_ops.integrations import colpali
        >>> pages = [torch.eye(n, 128) for n in (1030, 700)]
        >>> colpali.score_multi_vector([torch.eye(20, 128)], pages).shape
        torch.Size([1, 2])
    """
    check_count("score_multi_vector", "batch_size", batch_size, 1)
    queries, pages = _scoring.as_tokens(qs, "qs"), _scoring.as_tokens(ps, "ps")
    for name, tokens in (("qs", queries), ("ps", pages)):
        if isinstance(tokens, Tensor) and tokens.dim() != 3:
            expected = "[N, L, d] or a list of [L, d]"
            raise ValueError(f"score_multi_vector: {name}: expected {expected}, got {format_shape(tokens)}")
        if len(tokens) == 0:
            raise ValueError(f"score_multi_vector: {name}: expected at least one, got none")
    target_device = torch.device(device or _choose_device())
    queries = _scoring.move_tokens(queries, target_device)
    parts = [
        _scoring.score_cross(
            queries, _scoring.move_tokens(pages[begin : begin + batch_size], target_device), None, None
        )
        for begin in range(0, len(pages), batch_size)
    ]
    return torch.cat(parts, dim=1).to("cpu", torch.float32)


def _choose_device() -> str:
    """Return the type of the available accelerator, else ``"cpu"``."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _scores_lik(query: Tensor, doc: Tensor) -> Tensor:
    """Return the scores of the ``lik`` backend.

    Unsupported inputs raise the error on which colpali-engine falls back to its own code.
    """
    if not _scoring.is_supported(query, doc):
        message = "lik_ops scores floating-point tensors of one dtype on one device"
        raise importlib.import_module(_LIK).LIKUnsupportedError(message)
    return _scoring.score_cross(query, doc, None, None)


# The einsum equations of the losses, with letters renamed in order of appearance.
_IN_BATCH, _PAIRS, _CANDIDATES = "abc,dec->adbe", "abc,adc->abd", "abc,adec->adbe"


def _rename_axes(equation: str) -> str:
    """Return an einsum equation with its letters renamed in order of appearance."""
    letters: dict[str, str] = {}
    return "".join(letters.setdefault(x, chr(ord("a") + len(letters))) if x.isalpha() else x for x in equation)


class _LazySimilarities:
    """The operands of the similarities of a loss, which are not computed if only the maximum follows.

    Any other use computes the similarities, as colpali-engine would.
    """

    def __init__(self, equation: str, query: Tensor, doc: Tensor) -> None:
        self.equation, self.query, self.doc = equation, query, doc

    def compute(self) -> Tensor:
        """Return the similarities."""
        return torch.einsum(self.equation, self.query, self.doc)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compute(), name)

    def __truediv__(self, divisor: Any) -> Tensor:
        return self.compute() / divisor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args = [x.compute() if isinstance(x, cls) else x for x in args]
        return function(*plain_args, **(kwargs or {}))


def _accepts_einsum(equation: Any, *operands: Any) -> bool:
    """Return whether an ``einsum`` in the host's losses computes similarities that lik_ops does not need."""
    if len(operands) != 2 or not isinstance(equation, str) or not _scoring.is_supported(*operands):
        return False
    query, doc = operands
    layout = _rename_axes(equation)
    if layout not in (_IN_BATCH, _PAIRS, _CANDIDATES) or (layout != _IN_BATCH and query.shape[0] != doc.shape[0]):
        return False
    resolve = getattr(sys.modules.get(_MAXSIM), "_resolve_backend", None)
    return resolve is None or resolve() != "torch"


def _accepts_aggregate(loss: Any, scores_raw: Any, use_smooth_max: bool, dim_max: int, dim_sum: int) -> bool:
    """Return whether the host's `_aggregate` reduces document tokens by maximum and query tokens by sum."""
    if not isinstance(scores_raw, _LazySimilarities):
        return False
    pairs = _rename_axes(scores_raw.equation) == _PAIRS
    is_smooth = not use_smooth_max or (isinstance(loss.tau, (int, float)) and loss.tau > 0)
    return is_smooth and (dim_max, dim_sum) == ((2, 1) if pairs else (3, 2))


def _aggregate(loss: Any, scores_raw: _LazySimilarities, use_smooth_max: bool, dim_max: int, dim_sum: int) -> Tensor:
    """Return the scores that the host would compute from the similarities."""
    query, doc = scores_raw.query, scores_raw.doc
    pairs = _rename_axes(scores_raw.equation) == _PAIRS
    doc = doc.unsqueeze(1) if pairs else doc
    scores = maxsim_soft(query, doc, loss.tau) if use_smooth_max else _scoring.score_cross(query, doc, None, None)
    return scores.squeeze(1) if pairs else scores


def _accepts_pooling(
    pooler: Any,
    embeddings: Any,
    return_dict: bool = False,
    padding: bool = False,
    padding_side: str = "left",
    num_workers: Any = None,
    **named: Any,
) -> bool:
    """Return whether the host's pooler pools each document by Ward's method and is not asked for clusters."""
    host_class, factor = importlib.import_module(_POOLING).HierarchicalTokenPooler, named.get("pool_factor")
    if type(pooler) is not host_class or vars(pooler) or named.keys() != {"pool_factor"} or not isinstance(factor, int):
        return False
    return not return_dict and _pooling.is_factor(factor) and (num_workers is None or num_workers > 0)


def _pool_embeddings(theirs: Callable[..., Any], pooler: Any, embeddings: Any, *args: Any, **named: Any) -> Any:
    """Pool the documents of ``pool_embeddings`` of the host, all at once."""
    options = {"metric": "rows", "num_protected": 0, "normalize": True}
    pooled_documents: list[Tensor] = []

    def pool(documents: list[Tensor], pool_factor: int, **_: Any) -> tuple[list[Tensor], None]:
        has_gradient = any(x.requires_grad for x in documents)  # the host raises
        outputs = None if has_gradient else _pooling.pool_each(documents, pool_factor, 2, **options)
        if outputs is None:
            raise _pooling.HostPoolsError
        pooled_documents.extend(outputs)
        return pooled_documents, None

    try:
        result = theirs(_pooling.replace_method(pooler, "_pool_embeddings_impl", pool), embeddings, *args, **named)
    except _pooling.HostPoolsError:
        return NotImplemented
    return result if pooled_documents else NotImplemented


def _list_targets() -> list[_routing.PatchTarget]:
    """Return the functions of colpali-engine to replace."""
    pooler = f"{_POOLING.rpartition('.')[0]}.base_token_pooling:BaseTokenPooler"
    return [
        _routing.PatchTarget(_LIK, "maxsim_inbatch_lik", _scores_lik),
        _routing.PatchTarget(_LIK, "maxsim_kd_lik", _scores_lik),
        _routing.PatchTarget(f"{_LOSSES}:ColbertModule", "_aggregate", _aggregate, accepts=_accepts_aggregate),
        _routing.PatchTarget(_LOSSES, "torch.einsum", _LazySimilarities, scores=False, accepts=_accepts_einsum),
        _routing.PatchTarget(pooler, "pool_embeddings", _pool_embeddings, accepts=_accepts_pooling, wraps=True),
    ]


def _list_bypassed() -> list[str]:
    """Return descriptions of calls that do not reach the replaced functions."""
    backend = os.environ.get("COLPALI_SCORES_BACKEND", "auto").lower()
    return ["scores while COLPALI_SCORES_BACKEND=torch"] if backend == "torch" else []


_HOST = _routing.HostLibrary("colpali-engine", "0.3.17", _list_targets, _list_bypassed, "torch<2.14")


def enable() -> Routing:
    """Make lik_ops the ``lik`` backend of colpali-engine, also on CPUs.

    late-interaction-kernels need not be installed. The call is idempotent. ``COLPALI_SCORES_BACKEND`` selects the
    backend as before. With ``LIK_OPS_INTEGRATIONS=0``, which is read at every call, colpali-engine uses its own
    functions. A warning names functions that are not covered.

    ``HierarchicalTokenPooler`` pools all documents of a call with ``lik_ops.pool_tokens(metric="rows")``. Clusters are
    in the order of their first tokens, which changes no score. With ``return_dict=True``, colpali-engine pools. It also
    pools tokens whose norm is above 1, and the logger ``lik_ops`` says so at the level ``DEBUG``.

    Returns:
        A context manager that ends the routing. Its `calls` counts the calls that lik_ops answered.

    Raises:
        ImportError: colpali-engine is not installed.
    """
    return _routing.enable(_HOST)


def disable() -> None:
    """End `enable`. Without a previous `enable`, do nothing."""
    _routing.disable(_HOST)
