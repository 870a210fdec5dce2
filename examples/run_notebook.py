"""Executes a Jupyter notebook, and prints what its cells say: `run_notebook.py [FILE]`."""

# pyright: basic, reportMissingImports=false
# What this is about need not be installed.

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient


def execute(path: Path) -> list[str]:
    """The text that each cell of code shows. Raises CellExecutionError where one fails."""
    notebook: Any = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    return ["".join(map(_text, cell.outputs)) for cell in cells]


def _text(output: Any) -> str:
    return output.text if output.output_type == "stream" else output.data["text/plain"]


if __name__ == "__main__":
    for shown in execute(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("notebook.ipynb")):
        print(shown)
