"""What functions of third-party libraries have proved, kept on disk: one JSON file in the user's cache folder.

A proof may compile for a minute, so its answer is kept, good or bad, under all that it may depend on: the library and its version, torch,
the device's capability, the function, and dsv4, whose versions may ask other questions. Another version of any of them is another key, and
its function has not been tried. A file that cannot be read or written is as good as none: that is logged once.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import dsv4

log = logging.getLogger("dsv4.fast")

FORMAT = 1
_said: set[str] = set()


class Key(NamedTuple):
    """What an answer depends on."""

    library: str
    version: str
    torch: str
    device: str  # SM90
    function: str
    dsv4: str = dsv4.__version__


class Answer(NamedTuple):
    """What a proof came to: what is wrong with the function, None if nothing."""

    wrong: str | None


def path() -> Path:
    """The file: in the folder DSV4_CACHE, else in dsv4 under XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("DSV4_CACHE"):
        return Path(folder) / "proofs.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4" / "proofs.json"


def recall(key: Key) -> Answer | None:
    """The answer under a key; None if there is none."""
    return _read().get(key)


def keep(key: Key, answer: Answer) -> None:
    """Add an answer to what the file holds now, or put it in the place of the one under the same key."""
    answers = {**_read(), key: answer}
    proofs = [{**key._asdict(), "wrong": answer.wrong} for key, answer in sorted(answers.items(), key=lambda item: item[0])]
    try:
        _replace(path(), json.dumps({"format": FORMAT, "proofs": proofs}, indent=1) + "\n")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _say(f"proofs are not kept: {error}")


def _read() -> dict[Key, Answer]:
    try:
        text = path().read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        _say(f"kept proofs are not read: {error}")
        return {}
    try:
        return dict(_entry(entry) for entry in _listed(json.loads(text)))
    except (ValueError, TypeError, KeyError) as error:
        _say(f"{path()} is ignored, and written anew at the next proof: {type(error).__name__}: {error}")
        return {}


def _listed(document: Any) -> list[Any]:
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']!r}, not {FORMAT}")
    proofs: list[Any] = document["proofs"]
    return proofs


def _entry(entry: dict[str, Any]) -> tuple[Key, Answer]:
    key, wrong = Key(*(entry[name] for name in Key._fields)), entry["wrong"]
    if not all(isinstance(part, str) for part in key) or not isinstance(wrong, str | None):
        raise TypeError(f"not a proof: {entry}")
    return key, Answer(wrong)


def _replace(target: Path, text: str) -> None:
    """Write a file whole or not at all: other processes read and write it, too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.stem)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, target)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _say(words: str) -> None:
    if words not in _said:
        _said.add(words)
        log.warning("%s", words)
