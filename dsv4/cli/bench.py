"""`dsv4 bench COMPONENT`: every implementation that runs here, beside raw library calls, the reference and the limit of the memory.

Benchmarks are no part of the wheel: they are the package `benchmarks` of a checkout, which has the shapes and the stop-watch. Each case is
named on standard error as it goes, and a file of JSON is written anew with each line: what is stopped keeps what it has measured.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import dsv4
from dsv4.cli.output import CommandError, print_table, quiet_output, write_json

COLUMNS = ("function", "case", "what", "device_us", "host_us", "gb_s", "of_limit", "note")
ON_CUDA, ON_CPU = (64, 4096), (16, 256)


def run(options: argparse.Namespace) -> int:
    """Print the timings; the exit status is 1 where an implementation failed parity, and so was not timed."""
    suite = find_suite()
    _check("component", [options.component], suite.COMPONENTS)
    for tokens in options.tokens or ():
        if tokens < 1:
            raise CommandError(f"--tokens {tokens}: must be at least 1")
    shapes = [_shape(text) for text in options.shape]
    with quiet_output(options.json):
        where, lines = _measure(suite, options, shapes)
    if options.json:
        write_json(options.json, {**where, "timings": lines})
    else:
        print(", ".join(f"{name} {value}" for name, value in where.items() if value))
        print_table(lines, COLUMNS)
    return int(any("fails parity" in line["note"] for line in lines))


def find_suite() -> Any:
    """The module benchmarks.suite of the checkout that dsv4 was imported from, or of the working directory.

    Raises:
        CommandError: there is none.
    """
    for root in (Path(dsv4.__file__).resolve().parents[1], Path.cwd()):
        if (root / "benchmarks" / "suite.py").is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return _imported()
    raise CommandError("dsv4 bench wants a checkout: benchmarks are no part of the wheel. Run it in the root of dsv4's repository")


def _imported() -> Any:
    try:
        return import_module("benchmarks.suite")
    except ModuleNotFoundError as error:
        if error.name in ("hypothesis", "pytest"):
            raise CommandError(f"dsv4 bench compares with contracts, which need {error.name}: pip install 'dsv4[parity]'") from error
        raise


def _measure(suite: Any, options: argparse.Namespace, shapes: list[tuple[int, int]]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    import torch

    from dsv4.fast import dispatch

    device = dispatch.default_device(options.device)
    cuda = device.type == "cuda"
    tables = [function for function in dispatch.TABLES if function.startswith(f"{options.component}.")]
    _check("--function", options.function, sorted(function.partition(".")[2] for function in tables))
    _check("--backend", options.backend, sorted({row.backend for function in tables for row in dispatch.TABLES[function]}))
    tokens = options.tokens or (() if shapes else ON_CUDA if cuda else ON_CPU)
    torch.manual_seed(0)
    where = {"component": options.component, **_where(str(device))}
    lines: list[dict[str, Any]] = []
    with torch.cuda.device(device) if cuda else nullcontext():
        cases = suite.cases(options.component, tokens, shapes, device)
        for line in suite.lines(cases, device, options.function, options.backend):
            if not lines or (line.function, line.case) != (lines[-1]["function"], lines[-1]["case"]):
                print(f"{line.function}: {line.case}", file=sys.stderr, flush=True)
            lines.append(asdict(line))
            if options.json not in (None, "-"):
                write_json(options.json, {**where, "timings": lines})
    return where, lines


def _where(device: str) -> dict[str, str]:
    """What the timings may depend on; a library that is not installed has no version."""
    import torch

    from dsv4.fast.warmup import LIBRARIES
    from dsv4.parity.receipts import environment

    threads = "" if device.startswith("cuda") else str(torch.get_num_threads())
    libraries = {library.name: library.version().removeprefix(f"{library.name} ") for library in LIBRARIES}
    return {**environment(device), "threads": threads, "triton": _triton(), **libraries}


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def _shape(text: str) -> tuple[int, int]:
    rows, times, columns = text.partition("x")
    if not times or not rows.isdecimal() or not columns.isdecimal() or not int(rows) or not int(columns):
        raise CommandError(f"--shape {text}: must be ROWSxCOLUMNS, both at least 1, such as 4096x384")
    return int(rows), int(columns)


def _check(what: str, given: list[str], known: Any) -> None:
    for name in given:
        if name not in known:
            raise CommandError(f"{what} {name!r}: there is none of that name; there are {', '.join(known)}")
