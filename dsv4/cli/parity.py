"""`dsv4 parity [options of pytest]`: the parity suite; with --mutants or --replay what `python -m dsv4.parity` does with them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dsv4.cli.output import CommandError, quiet_output, write_json


def run(arguments: Sequence[str]) -> int:
    """Run the suite, or score it; the exit status is pytest's, or 1 where a mutant survives."""
    parser = argparse.ArgumentParser(
        prog="dsv4 parity",
        usage="dsv4 parity [-h] [--json FILE] [--mutants | --replay CHECK SPEC | options of pytest]",
        description=__doc__,
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON there (-: to the standard output)")
    parser.add_argument("--mutants", action="store_true", help="how many wrong implementations the suite notices")
    parser.add_argument("--replay", nargs=2, metavar=("CHECK", "SPEC"), help="run one case, as a failure message names it")
    options, rest = parser.parse_known_args(arguments)
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        raise CommandError(f"dsv4 parity needs {' and '.join(missing)}: pip install 'dsv4[parity]'")
    if options.mutants and options.json:
        return _scores(options.json, rest)
    if options.mutants or options.replay:
        from dsv4.parity.__main__ import main

        return main([*(["--mutants"] if options.mutants else ["--replay", *options.replay]), *rest])
    return _suite(options.json, rest)


def _suite(target: str | None, rest: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pytest", *_plugin(), "--pyargs", "dsv4.parity", *rest]
    if target is None:
        return subprocess.run(command, check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        status = subprocess.run([*command, f"--dsv4-report={report}"], check=False, stdout=2).returncode
        if report.exists():
            write_json(target, json.loads(report.read_text(encoding="utf-8")))
    return status


def _plugin() -> list[str]:
    """What loads the plugin where no installed entry point does: in a checkout that is only on the path."""
    named = any(entry.value == "dsv4.parity.plugin" for entry in metadata.entry_points(group="pytest11"))
    return [] if named and "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ else ["-p", "dsv4.parity.plugin"]


def _scores(target: str, rest: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="dsv4 parity --mutants", add_help=False)
    parser.add_argument("--dsv4-component", action="append", default=[])
    parser.add_argument("--dsv4-device", default="cpu")
    options = parser.parse_args(rest)
    from dsv4.parity import contracts, mutants

    for component in options.dsv4_component:
        if component not in contracts.components():
            raise CommandError(f"no contract for component {component!r}; there are {', '.join(contracts.components())}")
    with quiet_output(target):
        scores = mutants.score(components=options.dsv4_component or None, device=options.dsv4_device)
    write_json(target, [_as_data(score) for score in scores])
    return 0 if all(score.killed_by for score in scores) else 1


def _as_data(score: Any) -> dict[str, Any]:
    data = asdict(score)
    del data["mutant"]["call"]
    return data
