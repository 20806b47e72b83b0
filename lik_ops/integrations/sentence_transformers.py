"""MaxSim for multi-vector models of sentence-transformers: functions with its signatures, and `enable` for all scoring.

Losses accept ``similarity_fct=colbert_scores`` (``colbert_kd_scores`` for distillation, ``colbert_scores_pairwise`` for
margins). Evaluators accept ``score_functions={"maxsim": maxsim}`` or ``similarity_fct=maxsim``. `enable` covers
``model.similarity``, losses and evaluators without an argument. An example of both follows::

    from lik_ops.integrations import sentence_transformers as lik

    loss = losses.MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=lik.colbert_scores)
    with lik.enable():  # lik_ops also scores without the argument.
        scores = model.similarity(queries, documents)

The conventions are the same as in sentence-transformers. Masked document tokens are excluded from the maximum, and a
document without kept tokens scores -1e9. A numeric query mask multiplies the maximum of each token. In a padded tensor
without a mask, zero rows are padding. Scores are on the device of the documents, in fp32 (fp64 for fp64 inputs). Lists
of ``[L_i, d]`` are scored without padding.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _pooling, _routing, _scoring
from ._routing import Routing as Routing
from ._sides import SIMILARITY, EmbeddingSide, fill_empty, score_host_cross, score_host_pairs

__all__ = [
    "Routing",
    "XTRKDScores",
    "XTRScores",
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
    "xtr_kd_scores",
    "xtr_scores",
    "xtr_scores_pairwise",
]

_SCORING = "sentence_transformers.multi_vector_encoder.scoring"
_MODEL = "sentence_transformers.multi_vector_encoder.model:MultiVectorEncoder"
_POOLING = "sentence_transformers.multi_vector_encoder.modules.token_pooling"


def maxsim(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: str | torch.device | None = None,
) -> Tensor:
    """Return the scores ``[Na, Nb]`` of every query and document.

    Args:
        a: queries, padded ``[N, L, d]``, a list of ``[L_i, d]``, or ``[L, d]`` for one; tensors or arrays.
        b: documents, in the same forms.
        a_mask: ``[Na, La]``, a list of ``[L_i]``, or ``[La]`` for one query. The mask is bool, or numbers that weight
            the tokens.
        b_mask: the mask of `b`, in the same forms, read as ``!= 0``.
        chunk_elements: the number of document elements that are packed or moved to `device` at a time. Padded documents
            on `device` are scored at once. No similarities are stored.
        length_normalize: divide by the number of query tokens.
        device: the device to score on. None is the device of the documents. Scores are always returned on the device of
            the documents.

    Returns:
        The scores ``[Na, Nb]``.

    Raises:
        ValueError: a shape, mask or device is wrong.
        TypeError: a dtype or type is wrong.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> documents = [torch.eye(n, 128) for n in (300, 12, 40)]
        >>> sentence_transformers.maxsim(torch.eye(32, 128).expand(2, 32, 128), documents).shape
        torch.Size([2, 3])
    """
    queries, documents = EmbeddingSide("a", a, a_mask), EmbeddingSide("b", b, b_mask)
    output_device = documents.device or queries.device or torch.device("cpu")
    if not len(queries) or not len(documents):
        return torch.zeros(len(queries), len(documents), device=output_device)
    scoring_device = output_device if device is None else torch.device(device)
    query_part = queries.part(0, len(queries), scoring_device)
    parts = [
        score_host_cross(query_part[0], D, query_part[1], keep)
        for D, keep in (
            documents.part(*ends, scoring_device) for ends in documents.ranges(chunk_elements, scoring_device)
        )
    ]
    scores = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(output_device)
    return scores / queries.counts(output_device).unsqueeze(1) if length_normalize else scores


def maxsim_pairwise(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: str | torch.device | None = None,
) -> Tensor:
    """Return the scores ``[B]`` of query i and document i, with the arguments of `maxsim`.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> documents = [torch.eye(n, 128) for n in (300, 12)]
        >>> sentence_transformers.maxsim_pairwise(torch.eye(32, 128).expand(2, 32, 128), documents).shape
        torch.Size([2])
    """
    queries, documents = EmbeddingSide("a", a, a_mask), EmbeddingSide("b", b, b_mask)
    if len(queries) != len(documents):
        raise ValueError(
            f"maxsim_pairwise: b: expected {len(queries)} documents, as many as queries, got {len(documents)}"
        )
    output_device = documents.device or queries.device or torch.device("cpu")
    if not len(queries):
        return torch.zeros(0, device=output_device)
    scoring_device = output_device if device is None else torch.device(device)
    parts = []
    for ends in documents.ranges(chunk_elements, scoring_device):
        (Q, q_mask), (D, d_mask) = queries.part(*ends, scoring_device), documents.part(*ends, scoring_device)
        parts.append(score_host_pairs(Q, D, q_mask, d_mask))
    scores = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(output_device)
    return scores / queries.counts(output_device) if length_normalize else scores


def colbert_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Return the scores ``[Nq, G * N]`` of every query and the documents ``[G, N, L, d]``, in one kernel call.

    Document n of group g is column ``g * N + n``.

    Args:
        queries_embeddings: query tokens ``[Nq, Lq, d]``.
        documents_embeddings: document tokens ``[G, N, Ld, d]``.
        queries_mask: the mask of the queries ``[Nq, Lq]``, as in `maxsim`.
        documents_mask: the mask of the documents ``[G, N, Ld]``, as in `maxsim`.
        chunk_elements: the number of document elements at a time, as in `maxsim`.
        length_normalize: divide by the number of query tokens.

    Returns:
        The scores ``[Nq, G * N]``.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> Q, D = torch.eye(32, 128).expand(2, 32, 128), torch.eye(300, 128).expand(2, 3, 300, 128)
        >>> sentence_transformers.colbert_scores(Q, D).shape
        torch.Size([2, 6])
    """
    D, d_mask = _scoring.merge_groups(documents_embeddings, documents_mask)
    queries = EmbeddingSide("queries", queries_embeddings, queries_mask)
    return maxsim(queries.tokens, D, queries.mask, d_mask, chunk_elements, length_normalize)


def colbert_scores_pairwise(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Return the scores of `maxsim_pairwise`, with the signature that losses call.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> Q, D = torch.eye(32, 128).expand(2, 32, 128), torch.eye(300, 128).expand(2, 300, 128)
        >>> sentence_transformers.colbert_scores_pairwise(Q, D).shape
        torch.Size([2])
    """
    queries = EmbeddingSide("queries", queries_embeddings, queries_mask)
    documents = EmbeddingSide("documents", documents_embeddings, documents_mask)
    masks = queries.mask, documents.mask
    return maxsim_pairwise(queries.tokens, documents.tokens, *masks, chunk_elements, length_normalize)


def colbert_kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Return the scores ``[Nq, K]`` of each query and its own documents ``[Nq, K, Ld, d]``.

    Args:
        queries_embeddings: query tokens ``[Nq, Lq, d]``.
        documents_embeddings: document tokens ``[Nq, K, Ld, d]``.
        queries_mask: the mask of the queries ``[Nq, Lq]``, as in `maxsim`.
        documents_mask: the mask of the documents ``[Nq, K, Ld]``, as in `maxsim`.
        chunk_elements: accepted for the signature of sentence-transformers. Nothing is packed or moved.
        length_normalize: divide by the number of query tokens.

    Returns:
        The scores ``[Nq, K]``.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> Q, D = torch.eye(32, 128).expand(2, 32, 128), torch.eye(300, 128).expand(2, 8, 300, 128)
        >>> sentence_transformers.colbert_kd_scores(Q, D).shape
        torch.Size([2, 8])
    """
    D = _scoring.as_dense(documents_embeddings, "documents")
    queries = EmbeddingSide("queries", _scoring.as_dense(queries_embeddings, "queries"), queries_mask)
    keep = D.any(-1) if documents_mask is None else documents_mask
    scores = score_host_cross(queries.tokens, D, queries.mask, keep)
    return scores / queries.counts(scores.device).unsqueeze(1) if length_normalize else scores


def _make_mean(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """Return `function` with ``length_normalize=True`` as the default, under another name."""

    def mean(*args: Any, length_normalize: bool = True, **kwargs: Any) -> Tensor:
        return function(*args, length_normalize=length_normalize, **kwargs)

    mean.__name__ = mean.__qualname__ = name
    mean.__doc__ = f"`{function.__name__}`, divided by the number of each query's tokens."
    return mean


mean_maxsim = _make_mean(maxsim, "mean_maxsim")
mean_maxsim_pairwise = _make_mean(maxsim_pairwise, "mean_maxsim_pairwise")
mean_colbert_scores = _make_mean(colbert_scores, "mean_colbert_scores")
mean_colbert_scores_pairwise = _make_mean(colbert_scores_pairwise, "mean_colbert_scores_pairwise")
mean_colbert_kd_scores = _make_mean(colbert_kd_scores, "mean_colbert_kd_scores")


def xtr_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
) -> Tensor:
    """Return the XTR scores ``[Nq, G * N]`` of every query and the documents ``[G, N, Ld, d]``.

    The scores are `lik_ops.maxsim_xtr` with ``normalizer="retrieved"``: each query token sees its `top_k` best tokens
    among all documents of the call. Columns are ordered as in `colbert_scores`. No similarities are stored.

    Args:
        queries_embeddings: query tokens, as in `colbert_scores`.
        documents_embeddings: document tokens, as in `colbert_scores`.
        queries_mask: the mask of the queries, as in `colbert_scores`.
        documents_mask: the mask of the documents, as in `colbert_scores`.
        top_k: the number of document tokens that each query token retrieves. A number above the number of tokens
            selects all.
        chunk_elements: accepted for the signature of sentence-transformers. Memory is bounded without it.

    Returns:
        The scores ``[Nq, G * N]``.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> sentence_transformers.xtr_scores(torch.randn(2, 32, 128), torch.randn(2, 3, 300, 128)).shape
        torch.Size([2, 6])
    """
    D, d_mask = _scoring.merge_groups(documents_embeddings, documents_mask)
    queries = EmbeddingSide("queries", _scoring.as_dense(queries_embeddings, "queries"), queries_mask)
    documents = EmbeddingSide("documents", D, d_mask)
    return _scoring.score_xtr(
        queries.tokens, documents.tokens, queries.mask, documents.mask, top_k, "retrieved", fill_empty
    )


def xtr_kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
) -> Tensor:
    """Return the XTR scores ``[Nq, N]`` of each query and its own documents ``[Nq, N, Ld, d]``.

    Arguments are as in `xtr_scores`. Query tokens retrieve from the documents of all queries.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> sentence_transformers.xtr_kd_scores(torch.randn(2, 32, 128), torch.randn(2, 8, 300, 128)).shape
        torch.Size([2, 8])
    """
    score = partial(xtr_scores, queries_mask=queries_mask, documents_mask=documents_mask, top_k=top_k)
    return _scoring.score_own_groups(score, queries_embeddings, documents_embeddings)


def xtr_scores_pairwise(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
) -> Tensor:
    """Return the XTR scores ``[B]`` of query i and document i of ``[B, Ld, d]``.

    Arguments are as in `xtr_scores`. Query tokens retrieve from the documents of the whole batch.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(2, 300, 128)
        >>> sentence_transformers.xtr_scores_pairwise(Q, D).shape
        torch.Size([2])
    """
    D, d_mask = _scoring.as_dense(documents_embeddings, "documents"), _scoring.as_mask("documents_mask", documents_mask)
    D = D.unsqueeze(1) if D.dim() == 3 else D
    d_mask = d_mask.unsqueeze(1) if d_mask is not None and d_mask.dim() == 2 else d_mask
    return xtr_kd_scores(queries_embeddings, D, queries_mask, d_mask, top_k, chunk_elements).squeeze(-1)


class XTRScores:
    """`xtr_scores` with fixed options, for the ``similarity_fct`` of a loss.

    Args:
        top_k: the number of document tokens that each query token retrieves.
        chunk_elements: accepted for the signature of sentence-transformers.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> sentence_transformers.XTRScores(64)(torch.randn(2, 32, 128), torch.randn(2, 3, 300, 128)).shape
        torch.Size([2, 6])
    """

    _function = staticmethod(xtr_scores)

    def __init__(self, top_k: int = 256, *, chunk_elements: int | None = None) -> None:
        self.top_k, self.chunk_elements = top_k, chunk_elements

    def __call__(
        self,
        queries_embeddings: Any,
        documents_embeddings: Any,
        queries_mask: Any = None,
        documents_mask: Any = None,
    ) -> Tensor:
        """Return the scores of this function with the fixed options."""
        tensors = queries_embeddings, documents_embeddings, queries_mask, documents_mask
        return self._function(*tensors, self.top_k, self.chunk_elements)

    def get_config_dict(self) -> dict[str, Any]:
        """Return the options as a dictionary, for sentence-transformers."""
        return {"top_k": self.top_k, "chunk_elements": self.chunk_elements}


class XTRKDScores(XTRScores):
    """`xtr_kd_scores` with fixed options, like `XTRScores`.

    Example:
        >>> from lik_ops.integrations import sentence_transformers
        >>> Q, D = torch.randn(2, 32, 128), torch.randn(2, 8, 300, 128)
        >>> sentence_transformers.XTRKDScores(64)(Q, D).shape
        torch.Size([2, 8])
    """

    _function = staticmethod(xtr_kd_scores)


def _accepts_xtr(*args: Any, top_k: Any = 256, **named: Any) -> bool:
    """Return whether `top_k` is valid. If not, the host's own function raises."""
    top_k = args[4] if len(args) > 4 else top_k
    return isinstance(top_k, int) and not isinstance(top_k, bool) and top_k > 0


def _score_model(score: Callable[..., Tensor], model: Any, embeddings1: Any, embeddings2: Any, **kwargs: Any) -> Tensor:
    """Return the scores of a method of `model`, divided by the number of tokens if its similarity says so."""
    name = getattr(model.similarity_fn_name, "value", model.similarity_fn_name)
    if name not in ("maxsim", "meanmaxsim"):
        raise ValueError(f"similarity_fn_name: expected maxsim or meanmaxsim, got {name!r}")
    return score(embeddings1, embeddings2, **{"length_normalize": name == "meanmaxsim"} | kwargs)


def _accepts_pooling(pooling: Any, *args: Any, **named: Any) -> bool:
    """Return whether the host's module pools each document by Ward's method."""
    host_method = importlib.import_module(_POOLING).HierarchicalTokenPooling.pool_one
    is_host_method = type(pooling).pool_one is host_method and "pool_one" not in vars(pooling)
    return is_host_method and _pooling.is_factor(pooling.pool_factor) and not torch.compiler.is_compiling()


def _pool_documents(theirs: Callable[..., Any], pooling: Any, module_input: Any, *args: Any, **named: Any) -> Any:
    """Pool the documents of ``pool`` or ``forward`` of a module of the host, all at once."""
    documents: list[Tensor] = []

    def record(document: Tensor, **_: Any) -> Tensor:
        documents.append(document)
        return document[:0]

    features = dict(module_input) if isinstance(module_input, Mapping) else module_input  # a run changes its features
    theirs(_pooling.replace_method(pooling, "pool_one", record), features, *args, **named)
    options = {"num_protected": pooling.num_protected_tokens, "normalize": bool(pooling.normalize_embeddings)}
    pooled_documents = _pooling.pool_each(documents, pooling.pool_factor, **options)
    if pooled_documents is None:
        return NotImplemented
    iterator = iter(pooled_documents)
    return theirs(_pooling.replace_method(pooling, "pool_one", lambda *_: next(iterator)), module_input, *args, **named)


def _list_targets() -> list[_routing.PatchTarget]:
    """Return the functions of sentence-transformers to replace."""
    pooling = f"{_POOLING}:BaseTokenPooling"
    return [
        _routing.PatchTarget(SIMILARITY, "_maxsim_score_documents", score_host_cross),
        _routing.PatchTarget(SIMILARITY, "_maxsim_score_pairs", score_host_pairs),
        _routing.PatchTarget(_MODEL, "similarity", partial(_score_model, maxsim)),  # lists are not padded
        _routing.PatchTarget(_MODEL, "similarity_pairwise", partial(_score_model, maxsim_pairwise)),
        _routing.PatchTarget(_SCORING, "xtr_scores", xtr_scores, accepts=_accepts_xtr),
        # The name that the host itself calls.
        _routing.PatchTarget(f"{_SCORING}.xtr", "xtr_scores", xtr_scores, accepts=_accepts_xtr),
        *(
            _routing.PatchTarget(pooling, name, _pool_documents, accepts=_accepts_pooling, wraps=True)
            for name in ("pool", "forward")
        ),
    ]


_HOST = _routing.HostLibrary("sentence-transformers", "6.1", _list_targets)


def enable() -> Routing:
    """Score with lik_ops wherever sentence-transformers scores by MaxSim: ``model.similarity``, losses, evaluators.

    The call is idempotent. With ``LIK_OPS_INTEGRATIONS=0``, which is read at every call, sentence-transformers uses its
    own functions. A warning names functions that are not covered. Losses still loop over columns of documents. With the
    argument ``similarity_fct=colbert_scores`` they make one call. XTR scores are also covered. Only a bare
    ``xtr_scores`` that was imported before `enable` remains the host's own function.

    ``HierarchicalTokenPooling`` pools all documents of a call with `lik_ops.pool_tokens`. Clusters are in the order of
    their first tokens, which changes no score. Tokens whose norm is above 1 are pooled by sentence-transformers, and
    the logger ``lik_ops`` says so at the level ``DEBUG``.

    Returns:
        A context manager that ends the routing. Its `calls` counts the calls that lik_ops answered.

    Raises:
        ImportError: sentence-transformers is not installed.
    """
    return _routing.enable(_HOST)


def disable() -> None:
    """End `enable`. Without a previous `enable`, do nothing."""
    _routing.disable(_HOST)
