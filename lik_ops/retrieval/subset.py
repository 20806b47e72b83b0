"""Searches of some documents: the subset of a search as ascending indices, and its scores by these indices.

Documents in memory are scored in place, by the offset and length of each chosen document. Documents outside the subset
are not read. A subset on a GPU keeps its full width, because the number of its documents is known only there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import inputs
from ..core.arguments import as_bool
from ..formats.quantized import Quantized
from ..ops import topk
from ..ops.topk import ScoresAndIndices, SearchArgs
from . import arguments


class Subset(NamedTuple):
    """The documents that a search may return."""

    chosen: Tensor  # int64 [K], or [Nq, K] for each query: ascending, and -1 for none at the end
    width: int  # the largest number of results of a query


def resolve_subset(op: str, subset: Any, Q: Tensor | None, documents: int, device: torch.device) -> Subset:
    """Return the subset of a search on `device`: a mask ``[Nd]`` or ``[Nq, Nd]``, or indices ``[K]`` or ``[Nq, K]``.

    Q is 3-D, or 2-D for one query. None accepts any number of queries. Raise TypeError or ValueError unless the subset
    has valid values. An index out of range raises only on the CPU.
    """
    x = arguments.as_mask_or_integers(op, "subset", subset)
    last, queries = "Nd" if x.dtype == torch.bool else "K", "Nq" if Q is None else Q.shape[0] if Q.dim() == 3 else None
    shapes = [f"[{last}]"] if queries is None else [f"[{last}]", f"[{queries}, {last}]"]
    fits = x.dim() == 1 or (x.dim() == 2 and queries in ("Nq", x.shape[0]))
    if not fits or (x.dtype == torch.bool and x.shape[-1] != documents):
        expected = " or ".join(shapes).replace("Nd", str(documents))
        raise ValueError(f"{op}: subset: expected {expected}, got {list(x.shape)}")
    if x.device.type != "cpu" and x.device != device:
        if device.type != "cpu":
            raise ValueError(f"{op}: subset: expected the device of Q, {device}, or cpu, got {x.device}")
        x = x.cpu()
    width = documents if x.dtype == torch.bool else x.shape[-1]
    indices = _list_mask(x) if x.dtype == torch.bool else _sort_indices(op, x, documents)
    return Subset(indices.to(device, non_blocking=True), width)


def _list_mask(mask: Tensor) -> Tensor:
    """Return the indices of the documents that a mask keeps."""
    if mask.dim() == 1 and mask.device.type == "cpu" and not torch.compiler.is_dynamo_compiling():
        return mask.nonzero().flatten()
    # A stable sort of bytes takes one pass over the mask, and a sort of indices takes eight.
    is_kept, indices = mask.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
    return _trim(indices.masked_fill(is_kept == 0, -1))


def _sort_indices(op: str, x: Tensor, documents: int) -> Tensor:
    """Return indices in ascending order, each once.

    On a GPU, an index out of range stays, or becomes the number of documents if it is negative.
    """
    if x.device.type == "cpu" and not torch.compiler.is_dynamo_compiling():
        arguments.check_document_indices(op, "subset", x, documents)
        if x.numel() and bool((x[..., 0] >= 0).all() & (x[..., 1:] > x[..., :-1]).all()):
            return x.long()
    sentinel = torch.iinfo(torch.int64).max
    x = torch.where(x < -1, documents, x)
    indices = torch.where(x < 0, sentinel, x).sort(dim=-1).values
    is_repeated = torch.zeros_like(indices, dtype=torch.bool)
    is_repeated[..., 1:] = indices[..., 1:] == indices[..., :-1]
    indices = indices.masked_fill(is_repeated, sentinel).sort(dim=-1).values
    return _trim(indices.masked_fill(indices == sentinel, -1))


def _trim(chosen: Tensor) -> Tensor:
    """Drop trailing columns without documents, if the host can see them."""
    if chosen.device.type != "cpu" or torch.compiler.is_dynamo_compiling() or not chosen.numel():
        return chosen
    return chosen[..., : int((chosen >= 0).sum(-1).max())]


def search_chosen(op: str, s: SearchArgs, chosen: Tensor, lowest: bool = False) -> ScoresAndIndices:
    """Return the best ``[Nq, min(top_k, K)]`` of the documents `chosen`, as in `Subset`, or the lowest.

    Q is 3-D, and D is a tensor or a `Quantized` on its device. Missing documents have index -1 and score ``-inf``.
    """
    g, count, parts = make_scoring_args(op, s), chosen.shape[-1], []
    step = s.chunk or topk.count_fitting_documents(s.Q, s.top_k, count)
    for begin in range(0, max(count, 1), step):
        part = chosen[..., begin : begin + step]
        scores = inputs.score_documents(g, *locate_documents(s, part))[0]
        scores = negate_scores(scores, part) if lowest else scores.masked_fill(part < 0, -torch.inf)
        parts.append(topk.select_candidates(scores, part.expand(scores.shape), s.top_k))
    values, indices = topk.merge_parts(parts, s.top_k, missing=True)
    return negate_scores(values, indices) if lowest else values, indices


def negate_scores(scores: Tensor, indices: Tensor) -> Tensor:
    """Return scores in the reverse order of documents, except that missing documents, with index -1, stay last."""
    return (-scores).masked_fill(indices < 0, -torch.inf)


def score_chosen(op: str, s: SearchArgs, chosen: Tensor) -> Tensor:
    """Return the scores ``[Nq, K]`` of documents ``[K]`` or ``[Nq, K]``. The scores of index -1 are undefined."""
    return inputs.score_documents(make_scoring_args(op, s), *locate_documents(s, chosen))[0]


def make_scoring_args(op: str, s: SearchArgs) -> inputs.ScoringArgs:
    """Return the arguments of the ragged operator, with packed documents."""
    d_mask = None if s.d_mask is None else as_bool(s.d_mask).flatten()  # type: ignore[union-attr]
    packed = None if isinstance(s.D, Quantized) else s.D if s.D.dim() == 2 else s.D.flatten(0, 1)
    D = s.Q.new_empty((0, s.Q.shape[-1])) if packed is None else packed
    options: Any = {"q_mask": as_bool(s.q_mask), "d_mask": d_mask, "q_weight": s.q_weight, "normalize": s.normalize}
    g = inputs.ScoringArgs(op, s.Q, D, **options)
    return inputs.replace_documents(g, pack_tokens(s.D)) if packed is None else g


def pack_tokens(D: Quantized) -> Quantized:
    """Return quantized documents as packed tokens."""
    if D.dim() == 2:
        return D
    codes, (scale, minimum) = None if D.codes is None else D.codes.flatten(), D.per_token()
    data = D.data.flatten(0, -2)
    return Quantized(data, scale, D.format, D.d, D.dtype, minimum, codes=codes, codec=D.codec, query=D.query)


def locate_documents(s: SearchArgs, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first token and the length of each chosen document, as `topk.locate_documents` does."""
    return topk.locate_documents(chosen, s.documents, s.D.shape[1], s.cu_seqlens_d)


def filter_candidates(op: str, subset: Any, Q: Tensor, documents: int, candidates: Tensor) -> Tensor:
    """Return candidates ``[K]`` or ``[Nq, K]`` on the CPU, with -1 in place of documents outside the subset."""
    indices, _ = resolve_subset(op, subset, Q, documents, torch.device("cpu"))
    if indices.dim() == 2:
        candidates = candidates.expand(len(indices), -1).contiguous()
    rows = torch.where(indices < 0, torch.iinfo(torch.int64).max, indices)
    if not rows.shape[-1]:
        return torch.full_like(candidates, -1)
    at = torch.searchsorted(rows, candidates).clamp(max=rows.shape[-1] - 1)
    matches = rows[at] if rows.dim() == 1 else rows.gather(1, at)
    return torch.where(matches == candidates, candidates, -1)


def pad_results(results: ScoresAndIndices, width: int) -> ScoresAndIndices:
    """Return results ``[..., width]``, with -1 and ``-inf`` for missing documents.

    Results of several parts may be wider, but then only missing documents are dropped.
    """
    scores, indices = results
    missing = width - scores.shape[-1]
    if missing < 0:
        return scores[..., :width].contiguous(), indices[..., :width].contiguous()
    if not missing:
        return results
    pad = torch.nn.functional.pad
    return pad(scores, (0, missing), value=-torch.inf), pad(indices, (0, missing), value=-1)


def name_results(results: ScoresAndIndices, names: Tensor) -> ScoresAndIndices:
    """Return results whose indices are replaced by ``names[index]``. Index -1 stays."""
    scores, indices = results
    if not names.numel():
        return results
    names = names.to(indices.device, non_blocking=True)
    return scores, torch.where(indices >= 0, names[indices.clamp(min=0)], -1)


def list_union(chosen: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the documents ``[n]`` of a subset on the CPU that any query may find, and their positions for each query.

    The positions are as in `Subset`, or None if all queries have the same documents.
    """
    if chosen.dim() == 1:
        return chosen[chosen >= 0], None
    documents = chosen[chosen >= 0].unique()
    positions = torch.searchsorted(documents, chosen.contiguous())
    return documents, torch.where(chosen >= 0, positions, -1)


def limit_to_part(positions: Tensor, begin: int, end: int) -> Tensor:
    """Return the positions of each query in ``[begin, end)``, minus `begin`, as in `Subset`."""
    rows = torch.where(positions < 0, torch.iinfo(torch.int64).max, positions)
    first, last = (torch.searchsorted(rows, rows.new_full((len(rows), 1), x)) for x in (begin, end))
    width = int((last - first).max()) if len(rows) else 0
    if not width:
        return positions[:, :0]
    at = first + torch.arange(width, device=positions.device)
    return torch.where(at < last, positions.gather(1, at.clamp(max=positions.shape[1] - 1)) - begin, -1)
