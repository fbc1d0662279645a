"""Triton's interpreter, where kernels run on the CPU: the tests of a file in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # this is such a process


def passes(file: str | Path, *, least: int, select: str = "") -> None:
    """None of the file's tests fails there, and so many pass: what is skipped says nothing."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-k", select, str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "DSV4_IMPL": ""}
    ran = subprocess.run(command, cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None, ran.stdout[-400:]
    assert int(passed.group(1)) >= least, ran.stdout[-400:]
