"""What the commands print: a table, or JSON to a file or the standard output."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class CommandError(Exception):
    """What the user asked for cannot be done: a message, and exit status 2."""


@contextmanager
def quiet_output(target: str | None) -> Iterator[None]:
    """Where JSON goes to the standard output nothing else may: libraries and compilers print there too, so send that to standard error."""
    if target != "-":
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # what C code has printed and not written yet
        os.dup2(kept, 1)
        os.close(kept)


def write_json(target: str, data: Any) -> None:
    """To a file, or to the standard output for "-".

    Raises:
        CommandError: the file cannot be written.
    """
    text = json.dumps(data, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json {target}: {error.strerror}") from error


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Rows as a table: through rich where it is installed, else in plain aligned text. Folded at the width of a terminal alone."""
    from dsv4.parity.report import plain, pretty

    lines = [tuple(in_words(row.get(column)) for column in columns) for row in rows]
    folded = shutil.get_terminal_size().columns if sys.stdout.isatty() else len(plain(lines, columns).partition("\n")[0]) + 10_000
    print(pretty(lines, columns, width=folded).rstrip())


def in_words(value: Any) -> str:
    """A cell: yes and no, numbers with three digits or one decimal, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
