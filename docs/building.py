"""Build the site: a mkdocs hook for files outside docs/, and a griffe extension that reads docstrings.

`on_files` adds README.md, CONTRIBUTING.md, CHANGELOG.md and the notebook as pages, and the dashboard of
`benchmarks/report/dashboard.py`. `Sections` defines the docstring sections of lik_ops for the parser, and adds the
schema of each operator below its text.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from griffe import Docstring, Extension
except ImportError:  # tests import this file without the site's packages
    Extension = object

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
NOTEBOOK = "late_interaction"
# Paths of the functions whose docstrings describe the operators, below lik_ops.
OPERATORS = {
    "families.chamfer.ops.chamfer_bwd": "chamfer_bwd",
    "families.chamfer.ops.chamfer_fwd": "chamfer_fwd",
    "families.head.ops.maxsim_from_hidden_fwd": "maxsim_from_hidden_fwd",
    "families.head.ops.maxsim_from_hidden_bwd": "maxsim_from_hidden_bwd",
    "ops.maxsim._composite": "maxsim",
    "ops.maxsim.maxsim_fwd": "maxsim_fwd",
    "ops.maxsim.maxsim_bwd_lowmem": "maxsim_bwd_lowmem",
    "ops.maxsim.maxsim_bwd_unified": "maxsim_bwd_unified",
    "ops.ragged.maxsim_ragged_fwd": "maxsim_ragged_fwd",
    "ops.ragged.maxsim_ragged_bwd": "maxsim_ragged_bwd",
    "ops.quantized.maxsim_quantized_fwd": "maxsim_quantized_fwd",
    "ops.quantized.maxsim_quantized_bwd": "maxsim_quantized_bwd",
    "ops.saved.maxsim_fwd_int8": "maxsim_fwd_int8",
    "ops.saved.maxsim_bwd_int8": "maxsim_bwd_int8",
    "families.soft.ops.maxsim_soft_fwd": "maxsim_soft_fwd",
    "families.soft.ops.maxsim_soft_bwd": "maxsim_soft_bwd",
    "families.loss.ops.maxsim_cross_entropy_fwd": "maxsim_cross_entropy_fwd",
    "families.loss.ops.maxsim_cross_entropy_bwd": "maxsim_cross_entropy_bwd",
    "ops.topk.maxsim_topk": "maxsim_topk",
    "ops.topk_codes.maxsim_topk_codes": "maxsim_topk_codes",
    "families.token_topk.ops.maxsim_token_topk_fwd": "maxsim_token_topk_fwd",
    "families.xtr.ops.maxsim_xtr_fwd": "maxsim_xtr_fwd",
    "ops.packaged.maxsim_packaged": "maxsim_packaged",
}


def from_docs(text: str) -> str:
    """Return a page of the repository root with its links adapted to docs/."""
    return text.replace("](docs/", "](").replace("](README.md", "](index.md")


def output_text(output: dict[str, Any]) -> str:
    """Return the text of a notebook output, which is empty for a picture."""
    if output["output_type"] == "stream":
        return "".join(output["text"])
    data = output["data"]
    return "" if "image/png" in data else "".join(data["text/plain"])


def render_cell(cell: dict[str, Any], pictures: dict[str, bytes]) -> str:
    """Return a notebook cell and its outputs as Markdown, and add its pictures to `pictures`."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        if text := output_text(output):
            parts.append(f'```text {{ title="Output" }}\n{text.rstrip()}\n```')
        else:
            path = f"images/{NOTEBOOK}-{cell['id']}.png"
            pictures[path] = base64.b64decode(output["data"]["image/png"])
            parts.append(f"![The picture that the code above draws]({path})")
    return "\n\n".join(parts)


def render_notebook(notebook: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures keyed by their path below docs/."""
    pictures: dict[str, bytes] = {}
    return "\n\n".join(render_cell(cell, pictures) for cell in notebook["cells"]), pictures


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    pages: dict[str, str | bytes] = {page: from_docs((ROOT / name).read_text()) for page, name in OUTSIDE.items()}
    notebook = json.loads((ROOT / "examples" / f"{NOTEBOOK}.ipynb").read_text())
    pages[f"{NOTEBOOK}.md"], pictures = render_notebook(notebook)
    dashboard = runpy.run_path(str(ROOT / "benchmarks" / "report" / "dashboard.py"))
    pages["dashboard.html"] = dashboard["render"](dashboard["collect"](), in_site=True)
    for page, content in {**pages, **pictures}.items():
        files.append(File.generated(config, page, content=content))
    return files


LONG_CODE = re.compile(r"(?<!<pre>)(?<!</span>)(<code>)([^<>\s]{40,})(?=</code>)")
# Shapes such as [Nq, Lq, d], which docs/site.css keeps on one line.
SHORT_CODE = re.compile(r"(?<!<pre>)(?<!</span>)<code>(?=[^<>]{1,24}</code>)")
# Paths and qualified names, which a phone may break.
PATH_CODE = re.compile(r"(?<!<pre>)(?<!</span>)(<code>)([\w./]{16,})(?=</code>)")
# Benchmark shapes in tables, such as 16 x 1000, 32, 300, 128. They break after the number of documents only.
SHAPE = re.compile(r"(?<=<td>)(\d+ x \d+,) (\d+, [^<]*)(?=</td>)")
# The end of a parameter's default, where the theme's template breaks the line.
DEFAULT_END = re.compile(r"(?<=</code>)\s+(?=\)\s)")
# Names in headings of the API and in tables of contents.
LONG_NAME = re.compile(r"(<span class=\"(?:doc doc-object-name [^\"]*|md-ellipsis)\">\s*)([^<>\s]{16,})(?=<|\s)")


def add_breaks(match: re.Match[str]) -> str:
    """Let a name break after a dot, an underscore, a slash or a colon, but not before the ending of a file."""
    return match[1] + re.sub(r"(\.(?!py\b)|[_/]|::)(?=\w)", r"\1<wbr>", match[2])


def add_narrow_breaks(match: re.Match[str]) -> str:
    """Let a path or a qualified name break after a slash or a dot, on the narrow screens that docs/site.css selects."""
    return match[1] + re.sub(r"(\.(?!py\b)|/)(?=\w)", r'\1<wbr class="narrow">', match[2])


def on_post_page(output: str, **_: Any) -> str:
    """Let long names break between words to fit a narrow column, and keep short code and shapes on one line."""
    output = LONG_NAME.sub(add_breaks, LONG_CODE.sub(add_breaks, output))
    output = PATH_CODE.sub(add_narrow_breaks, output)
    output = SHAPE.sub(r'<span class="short">\1</span> <span class="short">\2</span>', DEFAULT_END.sub("", output))
    return SHORT_CODE.sub('<code class="short">', output)


def split_arguments(arguments: str) -> list[str]:
    """Split the arguments of a schema at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def wrap_schema(schema: str) -> str:
    """Return a schema with one argument per line, so that no screen cuts it off."""
    head, _, result = schema.rpartition(" -> ")
    name, _, arguments = head.removesuffix(")").partition("(")
    lines = [f"    {argument}," for argument in split_arguments(arguments)]
    return "\n".join([f"{name}(", *lines, f") -> {result}"])


def read_schemas(source: str) -> dict[str, str]:
    """Return the schema of each operator, from the source of ``opcheck/graphs.py``, which has the snapshots."""
    tree = ast.parse(source)
    (found,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_SCHEMAS"
    )
    return ast.literal_eval(found)


def schemas() -> dict[str, str]:
    """Return the schema of each operator of this checkout."""
    return read_schemas((ROOT / "opcheck" / "graphs.py").read_text())


class Sections(Extension):
    """Treats ``Example`` as examples and ``Returns`` as untyped, and shows the schema of an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.schemas = {"lik_ops." + path: schemas()[name] for path, name in OPERATORS.items()}

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.path in self.schemas:
            obj.docstring = obj.docstring or Docstring("", parent=obj)
            obj.docstring.value = f"{obj.docstring.value}\n\n```text\n{wrap_schema(self.schemas[obj.path])}\n```"
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n").replace("::\n\n", ":\n\n")
            obj.docstring.value = text.replace("\nReturns:\n    ", "\nReturns:\n    : ")
