"""What `mkdocs.yml` needs beyond the pages: a hook for files outside of docs/, and a reader of docstrings.

`on_files` adds README.md, CONTRIBUTING.md, CHANGELOG.md and the notebook as pages. `Sections` tells the parser what
the docstrings of lik_ops mean by their sections, and puts its schema before the text of an operator.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from griffe import Docstring, Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
NOTEBOOK = "late_interaction"
# Where the text of each operator is.
OPERATORS = {
    "chamfer.chamfer_bwd": "chamfer_bwd",
    "chamfer.chamfer_fwd": "chamfer_fwd",
    "head.maxsim_from_hidden_fwd": "maxsim_from_hidden_fwd",
    "head.maxsim_from_hidden_bwd": "maxsim_from_hidden_bwd",
    "maxsim._composite": "maxsim",
    "maxsim.maxsim_fwd": "maxsim_fwd",
    "maxsim.maxsim_bwd_lowmem": "maxsim_bwd_lowmem",
    "maxsim.maxsim_bwd_unified": "maxsim_bwd_unified",
    "ragged.maxsim_ragged_fwd": "maxsim_ragged_fwd",
    "ragged.maxsim_ragged_bwd": "maxsim_ragged_bwd",
    "quantized.maxsim_quantized_fwd": "maxsim_quantized_fwd",
    "saved.maxsim_fwd_int8": "maxsim_fwd_int8",
    "saved.maxsim_bwd_int8": "maxsim_bwd_int8",
    "soft.maxsim_soft_fwd": "maxsim_soft_fwd",
    "soft.maxsim_soft_bwd": "maxsim_soft_bwd",
    "cross_entropy.maxsim_cross_entropy_fwd": "maxsim_cross_entropy_fwd",
    "cross_entropy.maxsim_cross_entropy_bwd": "maxsim_cross_entropy_bwd",
    "topk.maxsim_topk": "maxsim_topk",
    "topk_codes.maxsim_topk_codes": "maxsim_topk_codes",
    "token_topk.maxsim_token_topk_fwd": "maxsim_token_topk_fwd",
    "xtr.maxsim_xtr_fwd": "maxsim_xtr_fwd",
    "packaged.maxsim_packaged": "maxsim_packaged",
}


def from_docs(text: str) -> str:
    """A page of the root, with its links as they are from docs/."""
    return text.replace("](docs/", "](").replace("](README.md", "](index.md")


def as_page(notebook: dict[str, Any]) -> str:
    """The cells of a notebook, one below the other."""
    cells = [("".join(cell["source"]), cell["cell_type"]) for cell in notebook["cells"]]
    return "\n\n".join(f"```python\n{source}\n```" if kind == "code" else source for source, kind in cells)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {page: from_docs((ROOT / name).read_text()) for page, name in OUTSIDE.items()}
    pages[f"{NOTEBOOK}.md"] = as_page(json.loads((ROOT / "examples" / f"{NOTEBOOK}.ipynb").read_text()))
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    return files


def schemas() -> dict[str, str]:
    """Of each operator, from the snapshots that the operator checks compare."""
    tree = ast.parse((ROOT / "opcheck" / "graphs.py").read_text())
    (found,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_SCHEMAS"
    )
    return ast.literal_eval(found)


class Sections(Extension):
    """``Example`` is a section of examples, ``Returns`` begins with no type, and an operator shows its schema."""

    def __init__(self) -> None:
        super().__init__()
        self.schemas = {"lik_ops.ops." + path: schemas()[name] for path, name in OPERATORS.items()}

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.path in self.schemas:
            obj.docstring = obj.docstring or Docstring("", parent=obj)
            obj.docstring.value = f"{obj.docstring.value}\n\n```text\n{self.schemas[obj.path]}\n```"
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n").replace("::\n\n", ":\n\n")
            obj.docstring.value = text.replace("\nReturns:\n    ", "\nReturns:\n    : ")
