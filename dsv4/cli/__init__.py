"""`dsv4`: what runs here, how fast, and whether it is right.

Imports no torch until a command needs it. Every command takes `--json FILE` (or `-`, the standard output) and prints a table without it.
Exit statuses: 0, 1 where something is wrong, 2 where the command line is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import dsv4
from dsv4.cli.output import CommandError
from dsv4.types import ArgumentError, BackendUnavailable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["parity"]:  # the rest is pytest's
            status: int = import_module("dsv4.cli.parity").run(given[1:])
        else:
            options = _parser().parse_args(given)
            status = import_module(f"dsv4.cli.{options.command}").run(options)
    except (ArgumentError, BackendUnavailable, CommandError) as error:
        print(f"dsv4: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dsv4", description="DeepSeek-V4 and V4.1, component by component.")
    parser.add_argument("--version", action="version", version=f"dsv4 {dsv4.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what is installed, and which functions of the libraries prove themselves here")
    doctor.add_argument("--again", action="store_true", help="try functions anew that have failed before")
    doctor.add_argument("--no-proofs", action="store_true", help="only say what earlier proofs came to: a proof may compile for minutes")

    backends = commands.add_parser("backends", help="every implementation of every function, and whether it can run")
    backends.add_argument("--component", action="append", default=[], metavar="NAME", help="only this component (repeatable)")
    backends.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
    backends.add_argument("--prove", action="store_true", help="try the libraries' functions that have not been tried")

    bench = commands.add_parser("bench", help="time a component: every implementation, the reference, and what the memory allows")
    bench.add_argument("component", metavar="COMPONENT")
    bench.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
    bench.add_argument("--tokens", type=int, nargs="+", metavar="N", help="numbers of tokens (default: 64 4096, on the CPU 16 256)")
    bench.add_argument(
        "--shape", nargs="+", default=[], metavar="ROWSxCOLUMNS", help="all of the component at these shapes, in the place of the presets'"
    )
    bench.add_argument("--function", action="append", default=[], metavar="NAME", help="only this function (repeatable)")
    bench.add_argument("--backend", action="append", default=[], metavar="NAME", help="only this backend (repeatable)")

    layout = commands.add_parser("layout", help="where the bytes of a token of the KV cache lie")
    explain = layout.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser("explain", help="one layout, one token")
    explain.add_argument("layout", metavar="LAYOUT", help="v4, v41, v41_fp4, v41_inline, v41_fp4_inline or uniform_fp8")
    explain.add_argument("--token", type=int, default=0, metavar="N", help="the slot, counted through all pages (default: 0)")
    explain.add_argument("--page-size", type=int, default=64, metavar="P", help="slots of a page (default: 64)")
    explain.add_argument("--picture", metavar="FILE", help="draw the page there as well, as a PNG")

    commands.add_parser("parity", help="hold implementations to their contracts: options of pytest; --mutants, --replay", add_help=False)
    for command in (doctor, backends, bench, explain):
        command.add_argument("--json", metavar="FILE", help="write JSON there (-: to the standard output) instead of a table")
    return parser
