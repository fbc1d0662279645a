"""What a run found: a line for each function in the terminal, a line for each output and domain in JSON, Markdown or HTML.

Outcomes travel as the user properties of pytest's reports, so the table is the same whether the tests ran here or in pytest-xdist's
workers.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4.parity.engine import Outcome

Data = dict[str, Any]
COLUMNS = ("component", "function", "output", "level", "domain", "cases", "max ULP", "of bound", "backend", "result")


DIGEST = ("function", "backend", "outputs", "domains", "invariants", "cases", "max ULP", "of bound", "result")


def as_data(outcome: Outcome) -> Data:
    """An outcome as plain JSON-able data."""
    return asdict(outcome)


def ordered(outcomes: Iterable[Data]) -> list[Data]:
    """Outcomes in an order that does not depend on who ran them when."""
    return sorted(outcomes, key=lambda data: (data["component"], data["function"], data["check"], data["candidate"]))


def digest(outcomes: Iterable[Data]) -> list[tuple[str, ...]]:
    """One line for each function and implementation: `DIGEST`. Outputs stand with their levels; a failure names its checks."""
    kept: dict[tuple[str, str], list[Data]] = {}
    for data in ordered(outcomes):
        kept.setdefault((f"{data['component']}.{data['function']}", _implementation(data)), []).append(data)
    return [(*key, *_digested(found)) for key, found in kept.items()]


def _digested(found: Sequence[Data]) -> tuple[str, ...]:
    rows = [row for data in found for row in data["rows"]]
    levelled = [row for row in rows if row["level"]]
    levels: dict[str, list[str]] = {}
    for row in levelled:
        if row["level"] not in levels.setdefault(row["output"], []):
            levels[row["output"]].append(row["level"])
    failed = [data["check"] for data in found if data["result"] == "failed"]
    refused = sum(data["result"] == "refused" for data in found)
    shares = [row["share"] for row in rows if row["share"] is not None]
    return (
        ", ".join(f"{output} {'/'.join(sorted(of))}" for output, of in levels.items()),
        str(len({row["domain"] for row in levelled})),
        str(len({row["output"] for row in rows if not row["level"]})),
        str(sum(row["cases"] for row in rows)),
        _ulp(max((row["max_ulp"] for row in rows), default=0)),
        f"{max(shares):.3f}" if shares else "",
        f"failed: {', '.join(failed)}" if failed else f"passed, {refused} checks refused" if refused else "passed",
    )


def _implementation(data: Data) -> str:
    return str(data["backend"] if data["candidate"] in ("default", data["backend"]) else data["candidate"])


def _ulp(distance: int) -> str:
    return "above 2^23" if distance > 2**23 else str(distance)


def table(outcomes: Iterable[Data]) -> list[tuple[str, ...]]:
    """One line for each output and domain, and each invariant (no level): `COLUMNS`."""
    lines: list[tuple[str, ...]] = []
    for data in ordered(outcomes):
        backend = _implementation(data)
        result = data["result"] + (f" ({data['refused']} refused)" if data["refused"] and data["result"] == "passed" else "")
        for row in data["rows"]:
            share = "" if row["share"] is None else f"{row['share']:.3f}"
            lines.append(
                (
                    data["component"],
                    data["function"],
                    row["output"],
                    row["level"],
                    row["domain"],
                    str(row["cases"]),
                    _ulp(row["max_ulp"]),
                    share,
                    backend,
                    result,
                )
            )
    return lines


def summary(outcomes: Sequence[Data]) -> str:
    """The counts in one line."""
    counts = {result: sum(data["result"] == result for data in outcomes) for result in ("passed", "failed", "refused")}
    cases = sum(row["cases"] for data in outcomes for row in data["rows"])
    return f"{len(outcomes)} checks, {cases} cases: " + ", ".join(f"{count} {result}" for result, count in counts.items() if count)


def plain(lines: Sequence[Sequence[str]], columns: Sequence[str] = COLUMNS) -> str:
    """A table in plain text."""
    widths = [max(len(line[column]) for line in (columns, *lines)) for column in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in (columns, *lines))


def pretty(lines: Sequence[Sequence[str]], columns: Sequence[str] = COLUMNS, *, width: int = 120) -> str:
    """The same through rich where it is installed."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Column, Table
    except ImportError:
        return plain(lines, columns)
    foldable = ("outputs", "result")  # the others keep their words whole, names above all
    drawn = Table(*(Column(column, overflow="fold", no_wrap=column not in foldable) for column in columns), box=SIMPLE_HEAD)
    for line in lines:
        drawn.add_row(*line, style="red" if line[-1].startswith("failed") else None)
    console = Console(width=max(width, 110))
    with console.capture() as captured:
        console.print(drawn)
    return captured.get()


def write(path: Path, outcomes: Sequence[Data], environment: Data) -> None:
    """Write a report; the file's ending says in which form: .json, .md or .html."""
    data, lines, failures = ordered(outcomes), table(outcomes), [data for data in ordered(outcomes) if data["message"]]
    if path.suffix == ".json":
        text = json.dumps({"environment": environment, "outcomes": data}, indent=1) + "\n"
    elif path.suffix == ".md":
        text = _markdown(lines, failures, summary(data), environment)
    else:
        text = _html(lines, failures, summary(data), environment)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _markdown(lines: Sequence[Sequence[str]], failures: Sequence[Data], counts: str, environment: Data) -> str:
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (COLUMNS, ["---"] * len(COLUMNS), *lines)]
    facts = [f"* {key}: {value}" for key, value in environment.items()]
    return "\n".join(["# Parity report", "", counts, "", *facts, "", *rows, "", *(f"```\n{data['message']}\n```\n" for data in failures)])


_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:80em;padding:0 1em;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2em .6em;border-bottom:1px solid #8884}"
    ".failed{background:#d3302f33}.refused{opacity:.6}pre{overflow:auto;padding:1em;border:1px solid #8884}"
)


def _html(lines: Sequence[Sequence[str]], failures: Sequence[Data], counts: str, environment: Data) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in COLUMNS)
    body = "".join(
        f'<tr class="{line[-1].partition(" ")[0]}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>\n"
        for line in lines
    )
    facts = "".join(f"<li>{html.escape(str(key))}: {html.escape(str(value))}</li>" for key, value in environment.items())
    details = "".join(f"<pre>{html.escape(data['message'])}</pre>\n" for data in failures)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Parity report</title><style>{_STYLE}</style>\n'
        f"<h1>Parity report</h1><p>{html.escape(counts)}</p><ul>{facts}</ul>\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n{details}</html>\n"
    )
