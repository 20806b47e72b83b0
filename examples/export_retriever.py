"""Export a retriever, compile it into a file, and score with it in a process that has only torch.

The retriever is one module: a stand-in for a late-interaction encoder, MaxSim, and the best documents of each query.
The process that loads the package cannot import lik_ops, because MaxSim is compiled into the package. Every size is
dynamic. With --cpp, the process does not use Python either. It is the program in run_retriever, built with CMake and
the installed torch.

    python examples/export_retriever.py [retriever.pt2] [--cpp]
"""

from __future__ import annotations

import argparse
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
torch.save(tuple(retriever(*each) for each in torch.load(inputs)), outputs)
"""


class Encoder(nn.Module):
    """Stand-in for a transformer with a projection: token ids to one embedding per token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.project = nn.Linear(WIDTH, FEATURES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of the token ids."""
        x = self.tokens(ids)
        return self.project(x + self.mix(x))


class Retriever(nn.Module):
    """Retriever from query tokens and document embeddings to the best documents and their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(
        self, query_ids: Tensor, query_mask: Tensor, documents: Tensor, document_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the best scores and documents of each query."""
        scores = lik_ops.maxsim(self.encoder(query_ids), documents, query_mask, document_mask, normalize=True)
        best_scores, best = scores.topk(TOP_K, dim=1)
        return best_scores, best


def inputs(Nq: int = 3, Lq: int = 8, Nd: int = 50, Ld: int = 40) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random queries and an index of documents of different lengths."""
    lengths = torch.randint(1, Ld + 1, (Nd, 1))
    return (
        torch.randint(0, VOCABULARY, (Nq, Lq)),
        torch.rand(Nq, Lq) < 0.9,
        torch.randn(Nd, Ld, FEATURES),
        torch.arange(Ld) < lengths,
    )


def dynamic_shapes() -> dict[str, dict[int, Dim]]:
    """Return dynamic shapes for every number of queries, documents, and tokens."""
    queries, documents = {0: Dim("Nq"), 1: Dim("Lq")}, {0: Dim("Nd", min=TOP_K), 1: Dim("Ld")}
    return {"query_ids": queries, "query_mask": queries, "documents": documents, "document_mask": documents}


def build_runner(directory: Path) -> Path:
    """Build the C++ program with a compiler, CMake, and the torch of this process."""
    source, build = Path(__file__).with_name("run_retriever"), directory / "build"
    torch_prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    configure = ["cmake", "-S", str(source), "-B", str(build), torch_prefix, "-DCMAKE_BUILD_TYPE=Release"]
    for command in (configure, ["cmake", "--build", str(build), "--config", "Release"]):
        subprocess.run(command, check=True)
    return build / "run_retriever"


def score_elsewhere(
    program: list[str], package: str, examples: list[tuple[Tensor, ...]], directory: Path
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return the outputs of the package in another program, which reads and writes tensors in files."""
    torch.save(tuple(examples), directory / "inputs.pt")
    files = [str(Path(package).resolve()), str(directory / "inputs.pt"), str(directory / "outputs.pt")]
    subprocess.run([*program, *files], check=True, cwd=directory)
    return torch.load(directory / "outputs.pt")


def main(arguments: list[str] | None = None) -> int:
    """Export, compile, and run the retriever, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", help="where the package goes; left out, it is not kept")
    parser.add_argument("--cpp", action="store_true", help="load it in a C++ program (needs CMake and a compiler)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    retriever = Retriever().eval()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        program = [str(build_runner(directory))] if options.cpp else [sys.executable, "-c", LOADER]
        path = options.package or str(directory / "retriever.pt2")
        print(f"exporting and compiling {path}: about a minute", flush=True)
        package = lik_ops.export.package(retriever, inputs(), path, dynamic_shapes=dynamic_shapes())
        where = "a C++ program" if options.cpp else "a process that cannot import lik_ops"
        print(f"{Path(package).stat().st_size / 1e6:.1f} MB; scoring in {where}", flush=True)
        examples = [inputs(), inputs(1, 32, 500, 180), inputs(7, 5, 9, 300)]
        worst, same = 0.0, True
        with torch.no_grad():
            found = score_elsewhere(program, package, examples, directory)
            for each, (scores, best) in zip(examples, found, strict=True):
                expected_scores, expected_best = retriever(*each)
                sizes = f"{scores.shape[0]} queries, {each[2].shape[0]} documents"
                print(f"{sizes}: best of the first query {best[0].tolist()}, here {expected_best[0].tolist()}")
                worst = max(worst, float((scores - expected_scores).abs().max()))
                same = same and torch.equal(best, expected_best)
    print(f"largest difference of a score: {worst:.1e}; {'the same' if same else 'other'} documents")
    return 0 if worst < 1e-4 and same else 1


if __name__ == "__main__":
    sys.exit(main())
