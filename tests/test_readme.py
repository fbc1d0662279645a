"""What README.md shows works: its Python runs, its kernel under test fails as it says, its make targets and files exist."""

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
INDENTED = re.findall(r"^    (\S.*)$", TEXT, re.MULTILINE)
PLUGIN = [] if entry_points(group="pytest11", name="dsv4_parity") else ["-p", "dsv4.parity.plugin"]


def test_its_python_runs(tmp_path):
    assert len(PYTHON) == 2
    for number, block in enumerate(PYTHON):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block)
        done = subprocess.run([sys.executable, str(script)], env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_its_kernel_under_test_fails_as_it_says(tmp_path):
    (block,) = [block for block in PYTHON if block.startswith("# my_kernels.py\n")]
    (tmp_path / "my_kernels.py").write_text(block)
    (line,) = [line for line in INDENTED if line.startswith("pytest ") and "my_kernels:" in line]
    command = [sys.executable, "-m", *shlex.split(line), *PLUGIN, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    shown = TEXT.partition("    parity failure:")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(shown) == 4
    for expected in shown:
        assert expected.strip() in done.stdout


def test_its_make_targets_and_files_exist():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = [line.split()[1] for line in INDENTED if line.startswith("make ")]
    assert named == ["parity", "test"]
    assert set(named) <= set(targets)
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in {extra for line in INDENTED for group in re.findall(r"\.\[(.*?)\]", line) for extra in group.split(",")}:
        assert f"\n{extra} = [" in extras


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}
