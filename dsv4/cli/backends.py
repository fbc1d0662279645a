"""`dsv4 backends`: every implementation of every function, whether it can run here, and what it is held to."""

from __future__ import annotations

import argparse
from typing import Any

from dsv4.cli.output import CommandError, print_table, quiet_output, write_json

COLUMNS = (
    "component",
    "function",
    "backend",
    "version",
    "capability",
    "status",
    "reason",
    "deterministic",
    "batch-invariant",
    "graph-safe",
    "contract",
    "verified",
)


def run(options: argparse.Namespace) -> int:
    """Print the table; the exit status is 0."""
    with quiet_output(options.json):
        rows = table(options.component, options.device, prove=options.prove)
    if options.json:
        write_json(options.json, rows)
    else:
        print_table(rows, COLUMNS)
    return 0


def table(components: list[str], device: str | None, *, prove: bool) -> list[dict[str, Any]]:
    """A row for each implementation, by `COLUMNS`."""
    from dsv4 import fast

    rows = []
    statuses = fast.backends(device, prove=prove)
    known = sorted({status.function.partition(".")[0] for status in statuses})
    for component in components:
        if component not in known:
            raise CommandError(f"no component {component!r}; there are {', '.join(known)}")
    levels = contract_levels()
    for status in statuses:
        component, _, function = status.function.partition(".")
        if components and component not in components:
            continue
        state = "no" if not status.usable else "usable" if status.tried else "not tried"
        values = (component, function, status.backend, status.version, status.device, state, status.reason)
        flags = (status.deterministic, status.batch_invariant, status.graph_safe)
        rows.append(dict(zip(COLUMNS, (*values, *flags, levels.get(status.function, ""), status.verified), strict=True)))
    return rows


def contract_levels() -> dict[str, str]:
    """The levels of each function's contract ("E0 E3"); none where dsv4[parity] is not installed."""
    try:
        from dsv4.parity import contracts

        found = [contract for component in contracts.components() for contract in contracts.for_component(component)]
    except ImportError:
        return {}
    return {contract.name: " ".join(sorted({str(output.level) for output in contract.outputs})) for contract in found}
