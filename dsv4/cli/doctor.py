"""`dsv4 doctor`: what this machine has, which functions of the libraries proved themselves on it, and what to install."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

from dsv4.cli.output import print_table, quiet_output, write_json

FACTS = ("what", "found")
PROOFS = ("library", "version", "function", "device", "state", "reason", "seconds")


def run(options: argparse.Namespace) -> int:
    """Print what is here; the exit status is 1 where a library is installed and not usable at all. Single functions that fail are passed
    over by dispatch, and are no error.
    """
    with quiet_output(options.json):
        findings = examine(again=options.again, try_them=not options.no_proofs)
    if options.json:
        write_json(options.json, findings)
    else:
        _print(findings)
    return int(any(library["found"] and library["reason"] for library in findings["libraries"]))


def examine(*, again: bool, try_them: bool) -> dict[str, Any]:
    """Everything, as plain data."""
    import torch

    from dsv4.fast.adapters import deepgemm, proofs
    from dsv4.fast.warmup import LIBRARIES

    cuda = torch.cuda.is_available()
    indices = range(torch.cuda.device_count()) if cuda else ()
    cards = [torch.device("cuda", index) for index in indices] or [torch.device("cpu")]
    return {
        "facts": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "CUDA of torch": torch.version.cuda or "none: this torch is built without",
            "CUDA driver": _driver(),
            "C++ compiler": _compiler(),
            "nvcc": _nvcc(),
            "cached proofs": str(proofs.path()),
        },
        "devices": [_device(index) for index in indices],
        "libraries": [
            {"library": library.name, "found": library.version() or None, "reason": library.missing(), "install": library.install}
            for library in LIBRARIES
        ],
        "deepgemm wheel": {"torch": torch.__version__, "install": deepgemm.install_command(torch.__version__)},
        "proofs": [proof for device in _one_of_each(cards) for proof in _prove(device, again, try_them)],
    }


def _one_of_each(devices: list[Any]) -> list[Any]:
    """The first device of each capability: a proof holds for all of one."""
    from dsv4.fast import dispatch

    return list({str(dispatch.describe(device)): device for device in reversed(devices)}.values())[::-1]


def _prove(device: Any, again: bool, try_them: bool) -> list[dict[str, Any]]:
    from dsv4.fast.warmup import prove

    return [{**proof._asdict(), "seconds": round(proof.seconds, 1)} for proof in prove(device, again=again, try_them=try_them)]


def _print(findings: dict[str, Any]) -> None:
    facts = [{"what": what, "found": found} for what, found in findings["facts"].items()]
    for card in findings["devices"]:
        words = f"{card['name']}, capability {card['capability']}, {card['memory']} GiB, {card['processors']} multiprocessors"
        facts.append({"what": f"cuda:{card['index']}", "found": words})
    if not findings["devices"]:
        facts.append({"what": "devices", "found": "cpu alone"})
    for library in findings["libraries"]:
        state = "importable" if library["reason"] is None else f"not usable: {library['reason']}. Install it with: {library['install']}"
        facts.append({"what": library["library"], "found": state if library["found"] is None else f"{library['found']}: {state}"})
    wheel = findings["deepgemm wheel"]
    facts.append({"what": f"DeepGEMM for torch {wheel['torch']}", "found": wheel["install"]})
    print_table(facts, FACTS)
    print()
    print_table([{**proof, "version": _number(proof)} for proof in findings["proofs"]], PROOFS)


def _number(proof: dict[str, Any]) -> str:
    return str(proof["version"]).removeprefix(f"{proof['library']} ")


def _device(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": round(properties.total_memory / 2**30),
        "processors": properties.multi_processor_count,
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]} does not run: {error}"
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else f"{command[0]} says nothing, exit status {done.returncode}"


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none found (no nvidia-smi)"
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _compiler() -> str:
    from torch._inductor import cpp_builder, exc

    try:
        found = cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError):
        return "none found: inductor cannot compile for the CPU; install g++"
    return f"{found}: {_first_line(found, '--version')}"


def _nvcc() -> str:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [os.path.join(home, "bin", "nvcc") for home in [*homes, "/usr/local/cuda"]]
    found = next((place for place in places if os.access(place, os.X_OK)), None) or shutil.which("nvcc")
    if found is None:
        return "none found: DeepGEMM and FlashInfer compile with it; set CUDA_HOME"
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False)
    release = next((line for line in done.stdout.splitlines() if "release" in line), "")
    return f"{found}: {release.partition('release')[2].strip() or 'says no release'}"
