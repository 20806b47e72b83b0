"""Export a retriever, compile it into a file, and score with it in a process that has torch and nothing else.

A stand-in for a late-interaction encoder, MaxSim, and the best documents of each query, as one module. The process that
loads the package cannot import lik_ops: MaxSim is compiled into it, with every size left open.

    python examples/export_retriever.py [retriever.pt2]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

import lik_ops

VOCABULARY, WIDTH, FEATURES, TOP_K = 1000, 64, 32, 5

LOADER = """
import sys
sys.modules["lik_ops"] = None  # importing it fails
import torch
package, inputs, outputs = sys.argv[1:]
retriever = torch._inductor.aoti_load_package(package)
torch.save([retriever(*each) for each in torch.load(inputs)], outputs)
"""


class Encoder(nn.Module):
    """Token ids to one embedding a token: what a transformer with a projection does."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.project = nn.Linear(WIDTH, FEATURES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.project(x + self.mix(x))


class Retriever(nn.Module):
    """Query tokens and document embeddings to the best documents and their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(
        self, query_ids: Tensor, query_mask: Tensor, documents: Tensor, document_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        scores = lik_ops.maxsim(self.encoder(query_ids), documents, query_mask, document_mask, normalize=True)
        best_scores, best = scores.topk(TOP_K, dim=1)
        return best_scores, best


def inputs(Nq: int = 3, Lq: int = 8, Nd: int = 50, Ld: int = 40) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random queries and an index of documents of different lengths."""
    lengths = torch.randint(1, Ld + 1, (Nd, 1))
    return (
        torch.randint(0, VOCABULARY, (Nq, Lq)),
        torch.rand(Nq, Lq) < 0.9,
        torch.randn(Nd, Ld, FEATURES),
        torch.arange(Ld) < lengths,
    )


def dynamic_shapes() -> dict[str, dict[int, Dim]]:
    """Every number of queries, documents and tokens."""
    queries, documents = {0: Dim("Nq"), 1: Dim("Lq")}, {0: Dim("Nd", min=TOP_K), 1: Dim("Ld")}
    return {"query_ids": queries, "query_mask": queries, "documents": documents, "document_mask": documents}


def score_elsewhere(package: str, examples: list[tuple[Tensor, ...]], directory: Path) -> list[tuple[Tensor, Tensor]]:
    """What the package returns in a process without lik_ops."""
    torch.save(examples, directory / "inputs.pt")
    command = [sys.executable, "-c", LOADER, package, str(directory / "inputs.pt"), str(directory / "outputs.pt")]
    subprocess.run(command, check=True, cwd=directory)
    return torch.load(directory / "outputs.pt")


def main(arguments: list[str]) -> int:
    torch.manual_seed(0)
    retriever = Retriever().eval()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = arguments[0] if arguments else str(directory / "retriever.pt2")
        print(f"exporting and compiling {path}: about a minute")
        package = lik_ops.export.package(retriever, inputs(), path, dynamic_shapes=dynamic_shapes())
        print(f"{Path(package).stat().st_size / 1e6:.1f} MB; scoring in a process that cannot import lik_ops")
        examples = [inputs(), inputs(1, 32, 500, 180), inputs(7, 5, 9, 300)]
        worst = 0.0
        with torch.no_grad():
            for each, (scores, best) in zip(examples, score_elsewhere(package, examples, directory), strict=True):
                expected_scores, expected_best = retriever(*each)
                sizes = f"{scores.shape[0]} queries, {each[2].shape[0]} documents"
                print(f"{sizes}: best of the first query {best[0].tolist()}, here {expected_best[0].tolist()}")
                worst = max(worst, float((scores - expected_scores).abs().max()))
    print(f"largest difference of a score: {worst:.1e}")
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
