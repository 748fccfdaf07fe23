"""Run the code of a notebook in one process, and write what it prints and draws into the notebook.

Jupyter is not needed, so cells must be plain Python: no magics, and no value of a last line.
Figures of matplotlib become pictures. Used for `examples/lab-tour/tour.ipynb`, and by its test.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # Draws without a screen.

import matplotlib.pyplot as plt

DPI = 80  # of the pictures, which are committed

Notebook = dict[str, Any]


def main() -> None:
    """Execute the notebook that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--output", type=Path, help="write here instead")
    parser.add_argument("--data-dir", type=Path, help="value of FAIRFLEET_DATA for the notebook")
    arguments = parser.parse_args()
    if arguments.data_dir:
        os.environ["FAIRFLEET_DATA"] = str(arguments.data_dir)
    notebook = json.loads(arguments.notebook.read_text("utf-8"))
    execute(notebook)
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    (arguments.output or arguments.notebook).write_text(text, "utf-8")


def execute(notebook: Notebook) -> None:
    """Run all code cells in order, and replace their outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        printed = io.StringIO()
        code = compile("".join(cell["source"]), f"cell {number}", "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        cell["execution_count"] = number
        cell["outputs"] = [*_text(printed.getvalue()), *_pictures()]


def _text(printed: str) -> Iterator[Notebook]:
    if printed:
        lines = printed.splitlines(keepends=True)
        yield {"name": "stdout", "output_type": "stream", "text": lines}


def _pictures() -> Iterator[Notebook]:
    """Yield the figures that are open, and close them."""
    for number in plt.get_fignums():
        file = io.BytesIO()
        plt.figure(number).savefig(file, format="png", dpi=DPI, metadata={"Software": None})
        data = {"image/png": base64.b64encode(file.getvalue()).decode()}
        yield {"data": data, "metadata": {}, "output_type": "display_data"}
    plt.close("all")


if __name__ == "__main__":
    main()
