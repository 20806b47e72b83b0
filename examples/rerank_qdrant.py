"""Search Qdrant in two stages: one vector per document finds candidates, and MaxSim of stored multi-vectors ranks them.

The example uses the local mode of Qdrant, without a server. Install ``pip install ".[qdrant]"``, then run
``python examples/rerank_qdrant.py``. Qdrant can also score multi-vectors. The example prints its ranking of the same
candidates next to the MaxSim ranking, and both must be equal.
"""

from __future__ import annotations

import torch
from missing_packages import explain_missing

from lik_ops.integrations.reranking import rerank_hits

with explain_missing('".[qdrant]"'):
    from qdrant_client import QdrantClient, models

DOCUMENTS, CANDIDATES, BEST, D = 200, 30, 5, 64


def collection(client: QdrantClient, documents: list[torch.Tensor]) -> None:
    """Create a collection that searches the mean of each document's tokens and only stores the tokens."""
    tokens = models.VectorParams(
        size=D,
        distance=models.Distance.DOT,
        multivector_config=models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM),
        hnsw_config=models.HnswConfigDiff(m=0),
    )
    mean = models.VectorParams(size=D, distance=models.Distance.COSINE)
    client.create_collection("documents", vectors_config={"mean": mean, "tokens": tokens})
    points = [
        models.PointStruct(id=i, vector={"mean": x.mean(0).tolist(), "tokens": x.tolist()})
        for i, x in enumerate(documents)
    ]
    client.upsert("documents", points)


def main() -> None:
    """Search random documents and print both rankings."""
    generator = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize
    documents = [
        unit(torch.randn(int(n), D, generator=generator), dim=-1)
        for n in torch.randint(5, 60, (DOCUMENTS,), generator=generator)
    ]
    query = unit(documents[7][:5] + 0.1 * torch.randn(5, D, generator=generator), dim=-1)
    client = QdrantClient(":memory:")
    collection(client, documents)
    found = client.query_points(
        "documents", query=query.mean(0).tolist(), using="mean", limit=CANDIDATES, with_vectors=["tokens"]
    ).points
    hits = rerank_hits(query, [p.id for p in found], [p.vector["tokens"] for p in found], BEST)

    only = models.Filter(must=[models.HasIdCondition(has_id=[p.id for p in found])])
    theirs = client.query_points("documents", query=query.tolist(), using="tokens", query_filter=only, limit=BEST)
    for name, score, other in zip(hits.ids, hits.scores, theirs.points, strict=True):
        print(f"document {name:3} {score:.4f}   Qdrant: document {other.id:3} {other.score:.4f}")
    assert hits.ids == [p.id for p in theirs.points]


if __name__ == "__main__":
    main()
