"""Every notebook runs from a fresh kernel to its end, and the figures that the pages show are the ones it draws."""

from pathlib import Path

import pytest
from nbclient.exceptions import CellExecutionError

from docs.make_images import NOTEBOOKS, execute, images

ROOT = Path(__file__).resolve().parent.parent


def test_there_are_notebooks():
    assert ROOT / "notebooks" / "01_number_formats.py" in NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws_the_committed_figures(notebook):
    node = execute(notebook)
    for cell in node.cells:
        errors = [output for output in cell.get("outputs", []) if output.output_type == "error" or output.get("name") == "stderr"]
        assert not errors, errors
    drawn = images(node)
    assert drawn
    for name, png in drawn.items():
        committed = (ROOT / "docs" / "images" / f"{name}.png").read_bytes()
        assert size(png) == size(committed), f"{name}.png is not what the notebook draws: run python docs/make_images.py"


def test_a_cell_that_fails_fails_the_run(tmp_path):
    notebook = tmp_path / "wrong.py"
    notebook.write_text("# %%\n1 / 0\n")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(notebook)


def size(png: bytes) -> bytes:
    """Width and height, as a PNG's header has them; pixels depend on the installed fonts."""
    assert png.startswith(b"\x89PNG")
    return png[16:24]
