"""The Triton scale layouts without a GPU: test_fast_scales once more, in a process whose kernels run in Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SELECTED = "triton and not 1000"  # grids of a few programs: the interpreter runs them one after the other


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SELECTED, str(HERE / "test_fast_scales.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "DSV4_IMPL": ""}
    ran = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= 55, ran.stdout[-400:]
