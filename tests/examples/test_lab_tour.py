"""The notebook of the lab runs from its first cell to its last, and its results are the saved ones.

Cells are plain Python, so no Jupyter is needed. Where nbformat is installed, it checks the file.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples.support import EXAMPLES, REAL, copied, needs_real_data, run_python
from tests.support.paths import ROOT

TOUR = EXAMPLES / "lab-tour" / "tour.ipynb"
EXECUTE = str(ROOT / "scripts" / "execute_notebook.py")
NUMBER = re.compile(r"-?\d+\.\d+|-?\d+")
Notebook = dict[str, Any]


def code_cells(notebook: Notebook) -> list[Notebook]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def saved() -> Notebook:
    notebook: Notebook = json.loads(TOUR.read_text("utf-8"))
    return notebook


def printed(notebook: Notebook) -> str:
    """Return all that the cells printed."""
    return "".join(
        "".join(output["text"])
        for cell in code_cells(notebook)
        for output in cell["outputs"]
        if output["output_type"] == "stream"
    )


def pictures(notebook: Notebook) -> Iterator[bytes]:
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            if output["output_type"] == "display_data":
                yield base64.b64decode(output["data"]["image/png"])


def executed(folder: Path, *words: str) -> Notebook:
    """Run the notebook in a folder, and return it with its new results."""
    example = copied("lab-tour", folder)
    run_python(example, EXECUTE, "tour.ipynb", "--output", "new.ipynb", *words)
    notebook: Notebook = json.loads((example / "new.ipynb").read_text("utf-8"))
    return notebook


def test_every_cell_was_executed_in_order_and_five_drew_a_picture() -> None:
    cells = code_cells(saved())
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    drawn = list(pictures(saved()))
    assert len(drawn) == 5
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 2000 for picture in drawn)


def test_the_saved_results_name_no_path_of_a_machine() -> None:
    assert not re.search(r"/(?:home|tmp|work|Users)/", printed(saved()))


def test_the_notebook_has_the_form_that_jupyter_reads() -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbformat.validate(nbformat.read(TOUR, as_version=4))


@pytest.mark.slow
@pytest.mark.torch
def test_running_it_gives_the_saved_results(tmp_path: Path) -> None:
    """Numbers may differ a little between versions of the libraries."""
    new, old = executed(tmp_path), saved()
    assert NUMBER.sub("#", printed(new)).split() == NUMBER.sub("#", printed(old)).split()
    numbers = [[float(text) for text in NUMBER.findall(printed(each))] for each in (new, old)]
    assert numbers[0] == pytest.approx(numbers[1], abs=5.0)
    assert len(list(pictures(new))) == 5
    assert [cell["source"] for cell in new["cells"]] == [cell["source"] for cell in old["cells"]]


@pytest.mark.slow
@pytest.mark.torch
@needs_real_data
def test_it_runs_on_fashion_mnist(tmp_path: Path) -> None:
    assert printed(executed(tmp_path, "--data-dir", REAL)).startswith(
        "fashion-mnist: 70000 samples"
    )
