"""Runs the notebooks and writes their figures: `python docs/make_images.py`. A cell tagged image:NAME becomes docs/images/NAME.png."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


def execute(notebook: Path, timeout_s: int = 300) -> nbformat.NotebookNode:
    """Run a py:percent notebook in a fresh kernel of this Python; a cell that raises, or takes longer than `timeout_s`, raises here."""
    node = jupytext.read(notebook)
    NotebookClient(node, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    return node


def images(node: nbformat.NotebookNode) -> dict[str, bytes]:
    """The figures of tagged cells, as PNG."""
    found = {}
    for cell in node.cells:
        for tag in cell.metadata.get("tags", []):
            if tag.startswith("image:"):
                figures = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
                if len(figures) != 1:
                    raise ValueError(f"the cell tagged {tag} shows {len(figures)} figures, not one")
                found[tag.removeprefix("image:")] = base64.b64decode(figures[0])
    return found


def main() -> int:
    """Write every image."""
    for notebook in NOTEBOOKS:
        for name, png in images(execute(notebook)).items():
            (ROOT / "docs" / "images" / f"{name}.png").write_bytes(png)
            print(f"docs/images/{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
