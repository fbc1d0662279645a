"""The command line: what it prints, as tables and as JSON, and its exit statuses."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4
from dsv4 import cli
from dsv4.cli import bench, output, parity
from dsv4.fast import dispatch
from dsv4.fast.adapters import deepgemm
from dsv4.fast.warmup import LIBRARIES
from dsv4.parity import mutants

ROOT = Path(dsv4.__file__).resolve().parents[1]
COMPONENTS = (
    "attention, codecs, compressor, eplb, hyper_connections, indexer, kv_cache, linear, norms, output_projection, quantization, rotary, "
    "routing, scales"
)
BACKEND_COLUMNS = [
    "component", "function", "backend", "version", "capability", "status", "reason", "deterministic", "batch-invariant", "graph-safe",
    "contract", "verified",
]  # fmt: skip
PROOFS = [
    ("sgl-deep-gemm", "get_mn_major_tma_aligned_packed_ue8m0_tensor"),
    ("sgl-deep-gemm", "get_mn_major_tma_aligned_tensor"),
    ("sgl-deep-gemm", "tf32_hc_prenorm_gemm"),
    ("sgl-deep-gemm", "fp8_fp4_mqa_logits"),
    ("sgl-deep-gemm", "fp8_fp4_mqa_logits fp4"),
    ("sgl-deep-gemm", "fp8_fp4_paged_mqa_logits"),
    ("sgl-deep-gemm", "fp8_gemm_nt"),
    ("sgl-deep-gemm", "fp8_gemm_nt 1d1d"),
    ("sgl-deep-gemm", "fp8_gemm_nt block32"),
    ("sgl-deep-gemm", "fp8_gemm_nt mxfp8"),
    ("sgl-deep-gemm", "fp8_einsum"),
    ("sgl-deep-gemm", "einsum"),
    ("flashinfer", "block_scale_interleave"),
    ("flashinfer", "mxfp8_quantize"),
    ("flashinfer", "fused_moe.hash_topk"),
    ("flashinfer", "rmsnorm"),
    ("flashinfer", "mhc.mhc_post"),
    ("flashinfer", "mhc.mhc_pre_big_fuse"),
    ("flashinfer", "top_k_ragged_transform"),
    ("flashinfer", "mla.BatchMLAPagedAttentionWrapper"),
    ("flashinfer", "mm_mxfp8"),
    ("sgl-flash-mla", "flash_mla_sparse_fwd"),
    ("sgl-flash-mla", "flash_mla_with_kvcache"),
]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No card and no library, whatever this machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("DSV4_IMPL", raising=False)

    def version(distribution: str) -> str:
        if distribution in ("sgl-deep-gemm", "flashinfer-python", "sgl-flash-mla"):
            raise metadata.PackageNotFoundError(distribution)
        return found(distribution)

    found = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    for library in LIBRARIES:
        monkeypatch.setattr(library, "_found", False)


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = cli.main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def cells(line: str) -> list[str]:
    return [cell for cell in line.replace("  ", "\t").split("\t") if cell.strip()]


def test_no_torch_until_a_command_needs_it() -> None:
    code = "import sys, dsv4.cli\ntry: dsv4.cli.main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert printed.splitlines()[-1] == "False"
    assert all(command in printed for command in ("doctor", "backends", "bench", "parity", "layout"))


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, printed, _ = run("doctor", capsys=capsys)
    assert status == 0
    for words in (
        f"torch {' ' * 20}",
        "triton",
        "CUDA driver",
        "C++ compiler",
        "nvcc",
        "not usable: flashinfer is not installed. Install it with",
    ):
        assert words in printed
    assert f"DeepGEMM for torch {torch.__version__}" in printed
    assert deepgemm.install_command(torch.__version__) in printed
    assert run("doctor", "--json", str(tmp_path / "doctor.json"), capsys=capsys)[:2] == (0, "")
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["facts"]["torch"] == torch.__version__
    assert [(proof["library"], proof["function"]) for proof in found["proofs"]] == PROOFS
    assert {proof["state"] for proof in found["proofs"]} == {"not usable"}
    assert found["deepgemm wheel"]["install"].startswith("pip install")


def test_doctor_on_a_wheel_of_the_wrong_torch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {"sgl-deep-gemm": "0.1.0", "triton": "3.6.0"}.get(name, "0.0"))
    status, printed, _ = run("doctor", "--json", "-", capsys=capsys)
    assert status == 1
    (library,) = (library for library in json.loads(printed)["libraries"] if library["library"] == "sgl-deep-gemm")
    assert "sgl-deep-gemm 0.1.0 is not known to fit any torch; this torch" in library["reason"]


def test_backends(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, _ = run("backends", "--component", "scales", "--component", "quantization", "--device", "cpu", capsys=capsys)
    assert status == 0
    head = next(line for line in printed.splitlines() if "component" in line)
    assert cells(head) == cells("  ".join(BACKEND_COLUMNS)) or head.split() == BACKEND_COLUMNS
    rows = json.loads(run("backends", "--device", "cpu", "--json", "-", capsys=capsys)[1])
    assert all(list(row) == BACKEND_COLUMNS for row in rows)
    assert len(rows) == sum(len(table) for table in dispatch.TABLES.values())
    (row,) = (row for row in rows if (row["component"], row["function"], row["backend"]) == ("scales", "pack_ue8m0", "deepgemm"))
    assert (row["status"], row["capability"], row["contract"]) == ("no", "cpu", "E0")
    assert {row["verified"] for row in rows if row["backend"] == "eager"} == {True}
    assert {row["verified"] for row in rows if row["component"] == "scales" and row["backend"] == "deepgemm"} == {False}
    assert row["reason"].startswith("wants a CUDA device of capability 9.0")
    assert {row["status"] for row in rows if row["backend"] == "eager"} == {"usable"}


def test_plain_text_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"] + ["rich.box", "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    output.print_table([{"a": True, "b": 3.14159, "c": "x"}, {"a": False, "b": 1234.5678}], ("a", "b", "c"))
    assert capsys.readouterr().out == "a    b       c\nyes  3.14    x\nno   1234.6\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("backends", "--component", "scale"), f"no component 'scale'; there are {COMPONENTS}"),
        (("bench", "scale"), f"component 'scale': there is none of that name; there are {COMPONENTS}"),
        (("bench", "scales", "--function", "pack"), "--function 'pack': there is none of that name; there are align_mn_major, "),
        (("bench", "scales", "--backend", "cutlass"), "--backend 'cutlass': there is none of that name; there are deepgemm, eager, "),
        (("bench", "scales", "--tokens", "0"), "--tokens 0: must be at least 1"),
        (("bench", "scales", "--shape", "64x"), "--shape 64x: must be ROWSxCOLUMNS, both at least 1, such as 4096x384"),
        (("backends", "--json", "/dev/null/x"), "--json /dev/null/x: Not a directory"),
        (
            ("parity", "--mutants", "--json", "-", "--dsv4-component", "scale"),
            "no contract for component 'scale'; there are attention, codecs, ",
        ),
    ],
)
def test_errors_name_what_there_is(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, error = run(*arguments, capsys=capsys)
    assert (status, printed) == (2, "")
    assert error.startswith("dsv4: error: ")
    assert words in error


@pytest.mark.parametrize("arguments", [(), ("benchmark",), ("bench",), ("doctor", "--tokens", "3")])
def test_wrong_command_lines(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("bench", "codecs", "--device", "cpu", "--tokens", "2", "--function", "pack_fp4", "--backend", "eager")
    status, printed, _ = run(*asked, "--json", "-", capsys=capsys)
    lines = json.loads(printed)["timings"]
    assert status == 0
    assert [line["what"] for line in lines] == ["limit: a copy", "eager", "reference"] * 3
    assert [line["case"] for line in lines[::3]] == [
        "V4-Flash, 2 tokens x 4096",
        "V4-Pro, 2 tokens x 7168",
        "V4.1-Flash, 2 tokens x 5120",
    ]
    for limit, line, _ in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        moved = 1.5 * 2 * int(line["case"].rpartition(" ")[2])  # a byte read and half a byte written for each number
        assert line["device_us"] is None
        assert line["gb_s"] * line["host_us"] * 1000 == pytest.approx(moved)
        assert line["of_limit"] == pytest.approx(limit["host_us"] / line["host_us"])
    status, printed, error = run(*asked, capsys=capsys)
    named = [line for line in error.splitlines() if line.startswith("codecs.")]
    assert named == [f"codecs.pack_fp4: {line['case']}" for line in lines[::3]]
    head = next(line for line in printed.splitlines() if "device_us" in line)
    assert head.split() == ["function", "case", "what", "device_us", "host_us", "gb_s", "of_limit", "note"]


def test_bench_times_every_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """A contract has a row for each layout of scales; the one that can show a case's result is held against it."""
    asked = ("bench", "quantization", "--device", "cpu", "--tokens", "5", "--function", "quantize_fp8", "--backend", "eager")
    status, printed, _ = run(*asked, "--json", "-", capsys=capsys)
    timed = [line for line in json.loads(printed)["timings"] if line["what"] == "eager"]
    assert status == 0
    assert len(timed) == 16
    assert all(line["host_us"] > 0 and not line["note"] for line in timed)


def test_bench_does_not_time_what_fails_parity(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def wrong(codes: torch.Tensor, order: str) -> torch.Tensor:
        calls.append(order)
        return torch.zeros(*codes.shape[:-1], codes.shape[-1] // 2, dtype=torch.uint8)

    rows = dispatch.TABLES["codecs.pack_fp4"]
    monkeypatch.setitem(dispatch.TABLES, "codecs.pack_fp4", tuple(replace(r, call=wrong) if r.backend == "eager" else r for r in rows))
    asked = ("bench", "codecs", "--tokens", "2", "--function", "pack_fp4", "--backend", "eager", "--device", "cpu")
    status, printed, _ = run(*asked, "--json", "-", capsys=capsys)
    lines = [line for line in json.loads(printed)["timings"] if line["what"] == "eager"]
    assert status == 1
    assert len(calls) == len(lines) == 3
    assert all(line["host_us"] is None and "not timed: fails parity: result: bytes differ" in line["note"] for line in lines)


def test_bench_keeps_what_was_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    suite, path = bench.find_suite(), tmp_path / "timings.json"
    measured = suite.lines

    def stopped(*arguments: object) -> Iterator[object]:
        for line in measured(*arguments):
            if "V4.1" in line.case:
                raise KeyboardInterrupt
            yield line

    monkeypatch.setattr(suite, "lines", stopped)
    asked = ("bench", "codecs", "--device", "cpu", "--tokens", "2", "--function", "pack_fp4", "--backend", "eager", "--json", str(path))
    with pytest.raises(KeyboardInterrupt):
        run(*asked, capsys=capsys)
    cases = [line["case"] for line in json.loads(path.read_text())["timings"]]
    assert cases == ["V4-Flash, 2 tokens x 4096"] * 3 + ["V4-Pro, 2 tokens x 7168"] * 3


def test_bench_wants_a_checkout(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench.dsv4, "__file__", str(tmp_path / "site-packages" / "dsv4" / "__init__.py"))
    status, _, error = run("bench", "scales", capsys=capsys)
    assert status == 2
    assert "dsv4 bench wants a checkout: benchmarks are no part of the wheel" in error


def test_nothing_but_json_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    with output.quiet_output("-"):
        ctypes.CDLL(None).printf(b"a compiler speaks\n")
        os.write(1, b"so does a library\n")
    output.write_json("-", {"one": 1})
    printed = capfd.readouterr()
    assert json.loads(printed.out) == {"one": 1}
    assert "a compiler speaks" in printed.err
    assert "so does a library" in printed.err


class Ran:
    """Stands for subprocess.run: writes down the command, and the report that it was asked for."""

    def __init__(self, status: int) -> None:
        self.status, self.command = status, [""]

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        self.command = command
        for option in command:
            if option.startswith("--dsv4-report="):
                Path(option.partition("=")[2]).write_text('{"outcomes": []}')
        return subprocess.CompletedProcess(command, self.status)


@pytest.mark.parametrize("status", [0, 1, 5])
def test_parity_is_pytest(status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Ran(status)
    monkeypatch.setattr(parity.subprocess, "run", ran)
    assert run("parity", "-k", "pack", "--dsv4-profile", "ci", capsys=capsys)[0] == status
    assert ran.command[:3] == [sys.executable, "-m", "pytest"]
    assert ran.command[-6:] == ["--pyargs", "dsv4.parity", "-k", "pack", "--dsv4-profile", "ci"]
    assert run("parity", "--json", "-", "-q", capsys=capsys)[:2] == (status, '{\n "outcomes": []\n}\n')


def test_parity_runs() -> None:
    command = [sys.executable, "-m", "dsv4.cli", "parity", "--json", "-", "--dsv4-component", "codecs", "-k", "unpack_fp4 and empty", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert {outcome["result"] for outcome in json.loads(done.stdout)["outcomes"]} == {"passed"}


@pytest.mark.parametrize(("killed_by", "status"), [("pairs", 0), ("", 1)])
def test_mutants_as_json(killed_by: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = mutants.Mutant("pack-zeros", "codecs", "pack_fp4", lambda: None, "returns zeros", "generic")

    def score(components: list[str] | None, device: str) -> list[mutants.Score]:
        assert (components, device) == (["codecs"], "cpu")
        return [mutants.Score(mutant, killed_by, {"allclose": True})]

    monkeypatch.setattr(mutants, "score", score)
    got = run("parity", "--mutants", "--json", "-", "--dsv4-component", "codecs", capsys=capsys)
    assert got[0] == status
    (found,) = json.loads(got[1])
    assert found == {
        "mutant": {"id": "pack-zeros", "component": "codecs", "function": "pack_fp4", "fault": "returns zeros", "source": "generic"},
        "killed_by": killed_by,
        "loosely": {"allclose": True},
    }  # fmt: skip
