"""Search encoded texts exactly, in each document format, after token pooling, and in two stages.

`SEARCHES` has one function for each way. All of them call `lik_ops.retrieve`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import lik_ops

CANDIDATES = 50  # documents that the first stage passes to the second stage
FULL = "full"


@dataclass(frozen=True)
class EncodedTexts:
    """Token embeddings of queries and documents.

    Attributes:
        Q: ``[Nq, Lq, d]``, padded.
        q_mask: bool ``[Nq, Lq]``, True for a token that is scored.
        D: ``[T, d]``, packed.
        cu_seqlens: ``[Nd + 1]``, the bounds of each document in D.
    """

    Q: Tensor
    q_mask: Tensor
    D: Tensor
    cu_seqlens: Tensor
    codecs: dict[int, lik_ops.ResidualCodec] = field(default_factory=dict)

    @classmethod
    def pack(cls, queries: Sequence[Tensor], documents: Sequence[Tensor]) -> EncodedTexts:
        """Return the texts of two lists of ``[L_i, d]`` tensors."""
        lengths = torch.tensor([len(query) for query in queries], device=queries[0].device)
        Q = pad_sequence(list(queries), batch_first=True)
        D, cu_seqlens = lik_ops.pack(list(documents))
        return cls(Q, torch.arange(Q.shape[1], device=Q.device) < lengths[:, None], D, cu_seqlens)

    def to(self, *args: Any) -> EncodedTexts:
        """Return the texts with embeddings of another dtype or on another device."""
        Q, D = self.Q.to(*args), self.D.to(*args)
        return EncodedTexts(Q, self.q_mask.to(Q.device), D, self.cu_seqlens.to(Q.device))

    def train_codec(self, nbits: int) -> lik_ops.ResidualCodec:
        """Return a residual codec of these documents, which is trained once."""
        if nbits not in self.codecs:
            self.codecs[nbits] = lik_ops.ResidualCodec.train(self.D, nbits)
        return self.codecs[nbits]


class Found(NamedTuple):
    """The best documents of each query, the scores and indices ``[Nq, k]``, and the size of the stored documents."""

    scores: Tensor
    indices: Tensor
    nbytes: int


Search = Callable[[EncodedTexts, int], Found]


def search_plain(texts: EncodedTexts, top_k: int) -> Found:
    """Search the documents in the dtype of their embeddings."""
    found = lik_ops.retrieve(
        texts.Q, texts.D, top_k, q_mask=texts.q_mask, cu_seqlens_d=texts.cu_seqlens, progress=False
    )
    return Found(*found, texts.D.nbytes)


def cast(dtype: torch.dtype) -> Search:
    """Return a search of queries and documents in another dtype."""
    return lambda texts, top_k: search_plain(texts.to(dtype), top_k)


def pool(factor: int, search_pooled: Search = search_plain) -> Search:
    """Return a search of documents with `factor` tokens in each pooled token."""

    def search(texts: EncodedTexts, top_k: int) -> Found:
        D, cu_seqlens = lik_ops.pool_tokens(texts.D, factor, cu_seqlens_d=texts.cu_seqlens, normalize=True)
        return search_pooled(replace(texts, D=D, cu_seqlens=cu_seqlens, codecs={}), top_k)

    return search


def quantize(texts: EncodedTexts, format: str, **how: Any) -> lik_ops.Quantized:
    """Return the documents in a format of `lik_ops.quantize`, or ``"residual4"`` and other residual codes."""
    is_residual = format.startswith("residual")
    codec: Any = texts.train_codec(int(format.removeprefix("residual"))) if is_residual else format
    return lik_ops.quantize(texts.D, codec, cu_seqlens_d=texts.cu_seqlens, **how)


def count_bytes(documents: lik_ops.Quantized) -> int:
    """Return the bytes of codes and scales, without the codec, whose size does not grow with the documents."""
    return sum(x.nbytes for x in documents.tensors().values())


def encode(format: str, *, n_probe: int | None = None, n_candidates: int | None = None, **how: Any) -> Search:
    """Return a search of documents in a format, in two stages if `n_probe` or `n_candidates` is given."""

    def search(texts: EncodedTexts, top_k: int) -> Found:
        documents = quantize(texts, format, **how)
        found = lik_ops.retrieve(
            texts.Q,
            documents,
            top_k,
            q_mask=texts.q_mask,
            cu_seqlens_d=texts.cu_seqlens,
            n_probe=n_probe,
            n_candidates=n_candidates,
        )
        return Found(*found, count_bytes(documents))

    return search


def rescore(format: str, n_candidates: int | None = None) -> Search:
    """Return a search whose first stage reads `format` and whose second stage reads full precision."""

    def search(texts: EncodedTexts, top_k: int) -> Found:
        coarse = quantize(texts, format)
        found = lik_ops.retrieve(
            texts.Q,
            texts.D,
            top_k,
            q_mask=texts.q_mask,
            cu_seqlens_d=texts.cu_seqlens,
            coarse=coarse,
            n_candidates=n_candidates,
        )
        return Found(found.scores, found.indices, count_bytes(coarse) + texts.D.nbytes)

    return search


FORMATS: dict[str, Search] = {
    FULL: search_plain,
    "fp16": cast(torch.float16),
    "bf16": cast(torch.bfloat16),
    "int8": encode("int8"),
    "int8, document scale": encode("int8", scale="document"),
    "int8, int8 queries": encode("int8", query="int8"),
    "uint8": encode("uint8"),
    "fp8_e4m3": encode("fp8_e4m3"),
    "fp8_e5m2": encode("fp8_e5m2"),
    "binary": encode("binary"),
    **{format: encode(format) for format in ("rq4", "rq2", "rq1")},
    **{f"residual{nbits}": encode(f"residual{nbits}") for nbits in (8, 4, 2, 1)},
}
FACTORS = (2, 3, 4, 8)
POOLING: dict[str, Search] = {
    **{f"pool {factor}": pool(factor) for factor in FACTORS},
    **{f"pool {factor}, rq2": pool(factor, encode("rq2")) for factor in FACTORS},
}
STAGES: dict[str, Search] = {
    "int8, then full": rescore("int8"),
    f"binary, {CANDIDATES} in full": rescore("binary", CANDIDATES),
    f"residual4, {CANDIDATES} by all codes": encode("residual4", n_candidates=CANDIDATES),
    **{
        f"residual4, {n} probed, {CANDIDATES} by all codes": encode("residual4", n_probe=n, n_candidates=CANDIDATES)
        for n in (1, 4)
    },
}
SEARCHES: dict[str, Search] = FORMATS | POOLING | STAGES
