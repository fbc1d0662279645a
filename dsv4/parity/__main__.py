"""`python -m dsv4.parity`: reproduce one failure, or score the suite against wrong implementations."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status is 0 where the replayed case passes, or every mutant was killed."""
    parser = argparse.ArgumentParser(prog="python -m dsv4.parity", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--replay", nargs=2, metavar=("COMPONENT.FUNCTION.CHECK", "SPEC"), help="run one case, as a failure message names it")
    what.add_argument(
        "--mutants", action="store_true", help="how many wrong implementations the suite notices, and how many looser comparisons do"
    )
    parser.add_argument("--dsv4-impl", action="append", default=[], metavar="COMPONENT[.FUNCTION]=MODULE[:CALLABLE]")
    parser.add_argument("--dsv4-backend", metavar="NAME")
    parser.add_argument("--dsv4-device", metavar="DEVICE")
    parser.add_argument(
        "--dsv4-component", action="append", default=[], metavar="NAME", help="with --mutants: only this component (repeatable)"
    )
    options = parser.parse_args(arguments)
    sys.path.insert(0, os.getcwd())
    if options.mutants:
        from dsv4.parity import mutants

        scores = mutants.score(components=options.dsv4_component or None, device=options.dsv4_device or "cpu")
        print(mutants.table(scores))
        return 0 if all(score.killed_by for score in scores) else 1
    return _replay(options)


def _replay(options: argparse.Namespace) -> int:
    from dsv4.parity import collect, engine
    from dsv4.parity.candidates import Absent

    key, spec = options.replay
    try:
        contract, item = collect.find(key)
        selection = collect.Selection(options.dsv4_impl, options.dsv4_backend, options.dsv4_device)
        candidates = selection.candidates(contract)
        if not candidates:
            raise LookupError(f"--dsv4-impl {options.dsv4_impl} has no {contract.name}")
    except LookupError as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 2
    failed = False
    for candidate in candidates:
        if isinstance(candidate, Absent):
            print(f"{key}: {candidate.name}: {candidate.reason}")
            failed = True
            continue
        outcome = engine.replay(contract, item, candidate, selection.where(), json.loads(spec))
        print(outcome.message or f"{key}: {candidate.name}: {'passed' if not outcome.refused else 'refused'}")
        failed = failed or outcome.result == "failed"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
