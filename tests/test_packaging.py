"""What is installed, what importing it costs, and how the set-up names what is missing. None of it needs the network."""

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import dsv4
from oracles import tile_kernels_module

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("dsv4-*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_package_and_its_suite_but_no_tests_of_the_repository(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {"dsv4/__init__.py", "dsv4/py.typed", "dsv4/parity/__init__.py", "dsv4/parity/plugin.py"} <= names
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "dsv4").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == shipped
    assert {name.partition("/")[0] for name in names} == {"dsv4", f"dsv4-{dsv4.__version__}.dist-info"}


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    info = f"dsv4-{dsv4.__version__}.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == ("dsv4", dsv4.__version__, "Apache-2.0")
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    requirements = metadata.get_all("Requires-Dist")
    assert [line.partition(">")[0] for line in requirements if "extra ==" not in line] == ["einops", "numpy", "torch"]
    assert set(metadata.get_all("Provides-Extra")) == {"cuda", "dev", "docs", "model", "notebooks", "parity"}
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "dsv4 = dsv4.cli:main" in entry_points
    assert "dsv4_parity = dsv4.parity.plugin" in entry_points


@pytest.mark.parametrize("module", ["dsv4", "dsv4.parity.plugin"])
def test_import_is_light(module: str) -> None:
    code = (
        f"import {module}, sys; print(*sorted(sys.modules.keys() & {{'torch', 'triton', 'deep_gemm', 'flashinfer', 'flash_mla', 'numpy'}}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == ""


def test_constraints_name_one_version_each() -> None:
    lines = [line for line in (ROOT / "constraints/cpu.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.6.0")
    assert not [name for name in pins if name.startswith(("nvidia", "cuda", "dsv4"))]


def test_outside_oracles_are_installed_as_pinned_and_load_alone() -> None:
    lines = [line for line in (ROOT / "constraints/oracles.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [f"{name}=={version(name)}" for name in (line.partition("==")[0] for line in lines)] == lines
    data, scales = tile_kernels_module("cast").cast(torch.tensor([[6.0, -3.0] * 16]), "e2m1", (1, 32), round_sf=True)
    assert data.tolist() == [[-41] * 16]  # 6 is code 7 in the low nibble, -3 is code 13 in the high one
    assert scales.tolist() == [[1.0]]
    assert not [name for name in sys.modules if name.partition(".")[0] in ("tile_kernels", "tilelang")]


class Machine:
    """A copy of what the set-up reads, and a PATH with only the programs that a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "dsv4"
        self.bin = folder / "bin"
        self.bin.mkdir()
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copytree(ROOT / "constraints", self.root / "constraints")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for name in ("cat", "cmp", "cut", "dirname", "grep", "rm", "tail", "uname"):
            self.program(name, shutil.which(name))
        self.bash = shutil.which("bash")

    def program(self, name: str, target: str | None) -> None:
        assert target is not None, name
        (self.bin / name).symlink_to(target)

    def script(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!{self.bash}\n{text}\n")
        (self.bin / name).chmod(0o755)

    def setup(self, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "CXX"))}
        command = [str(self.bash), str(self.root / "scripts/setup.sh")]
        env = kept | {"PATH": str(self.bin)} | environment
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def only_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    return line


def test_setup_without_a_compiler(machine: Machine) -> None:
    machine.program("python3", sys.executable)
    assert "dsv4: no C++ compiler found" in (line := only_line(machine.setup(CXX="g++")))
    assert "apt-get install g++" in line


def test_setup_without_a_python_that_fits(machine: Machine) -> None:
    machine.script("g++", "exit 0")
    machine.script("python3", "echo Python 3.9.2; exit 1")
    assert only_line(machine.setup(CXX="g++")).startswith("dsv4: no Python 3.11, 3.12 or 3.13 found")
    assert only_line(machine.setup(CXX="g++", PYTHON="python3")) == "dsv4: PYTHON=python3 is not Python 3.11, 3.12 or 3.13 (Python 3.9.2)"


def test_setup_without_headers(machine: Machine) -> None:
    machine.script("g++", "exit 0")
    machine.script("python3", "case $2 in *Python.h*) exit 1 ;; *print*) echo 3.12.4 ;; esac")
    assert "apt-get install python3.12-dev" in only_line(machine.setup(CXX="g++", PYTHON="python3"))


def test_setup_without_a_network(machine: Machine) -> None:
    machine.script("g++", "exit 0")
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1"}
    result = machine.setup(CXX="g++", PYTHON=getattr(sys, "_base_executable", sys.executable), **nowhere)
    assert "the package index cannot be reached" in only_line(result)
    assert not (machine.root / ".venv/setup.stamp").exists()


def test_setup_does_nothing_once_done(machine: Machine) -> None:
    machine.script("g++", "exit 0")
    stamp = machine.root / ".venv/setup.stamp"
    stamp.parent.mkdir()
    read = [machine.root / "pyproject.toml", *sorted((machine.root / "constraints").glob("*.txt")), machine.root / "scripts/setup.sh"]
    stamp.write_text(f"{machine.root} python-of-choice\n" + "".join(path.read_text() for path in read))
    done = machine.setup(CXX="g++", PYTHON="python-of-choice")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    with (machine.root / "constraints/cpu.txt").open("a") as constraints:
        constraints.write("another==1.0\n")
    assert "PYTHON=python-of-choice is not Python" in only_line(machine.setup(CXX="g++", PYTHON="python-of-choice"))
