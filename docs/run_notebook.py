"""Run the cells of a notebook and store their outputs in its file.

    python docs/run_notebook.py [examples/late_interaction.ipynb]

`tests/examples/test_notebook.py` compares the stored text with the text of a new run.
Needs matplotlib and a C++ compiler for `torch.compile`.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

DEFAULT = Path(__file__).resolve().parents[1] / "examples" / "late_interaction.ipynb"
DPI = 110


def as_lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def run_code(source: str, name: str, names: dict[str, Any]) -> Any:
    """Run the code of a cell in `names` and return the value of its last expression, else None."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), names)


def draw_figures() -> list[dict[str, Any]]:
    """Return every open figure as an output of a notebook, and close it."""
    outputs = []
    for number in plt.get_fignums():
        figure, file = plt.figure(number), io.BytesIO()
        figure.savefig(file, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)
        data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def run_cells(cells: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the code cells in order in one namespace.

    Returns:
        The cells with their outputs, and the namespace.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    results, count = [], 0
    for cell in cells:
        if cell["cell_type"] != "code":
            results.append(cell)
            continue
        count += 1
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            value = run_code("".join(cell["source"]), cell["id"], names)
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": as_lines(printed.getvalue())})
        outputs += draw_figures()
        if value is not None:
            data = {"text/plain": as_lines(repr(value))}
            result = {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
            outputs.append(result)
        results.append({**cell, "execution_count": count, "outputs": outputs})
    return results, names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, default=DEFAULT, help="the notebook (default: %(default)s)")
    path = parser.parse_args().path
    notebook = json.loads(path.read_text())
    notebook["cells"], _ = run_cells(notebook["cells"])
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    print("wrote", path)


if __name__ == "__main__":
    main()
