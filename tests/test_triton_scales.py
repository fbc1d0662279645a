"""The Triton scale layouts without a GPU: test_fast_scales once more, in a process whose kernels run in Triton's interpreter."""

from pathlib import Path

from interpreted import passes

SELECTED = "triton and not 1000"  # grids of a few programs: the interpreter runs them one after the other


def test_kernels_in_the_interpreter() -> None:
    passes(Path(__file__).parent / "test_fast_scales.py", least=60, select=SELECTED)
