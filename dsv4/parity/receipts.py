"""Receipts: what a run proved, on which code and device, and what it does not claim.

A receipt names the hash of each component's sources. `stale` recomputes them and says which components have changed since. Two runs of
the same thing give the same bytes but for the value of "times".
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from dsv4.parity.report import Data, ordered

VERSION = 1
MODULE = re.compile(r"[a-z_]+[a-z0-9_.]*")
ROOT = Path(__file__).resolve().parents[1]
KEYS = {"receipt", "profile", "environment", "components", "not_claimed", "times"}
ROW_KEYS = {"function", "output", "level", "domain", "cases", "max_ulp", "share", "candidate", "backend", "version", "result"}


def environment(device: str | None = None) -> Data:
    """What the result may depend on: dsv4, torch, Triton, Python, the device."""
    import torch

    import dsv4

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cuda = where.type == "cuda"
    capability = ".".join(map(str, torch.cuda.get_device_capability(where))) if cuda else ""
    return {
        "dsv4": dsv4.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(where) if cuda else f"cpu {platform.machine()}",
        "capability": capability,
        "cuda": str(torch.version.cuda) if cuda else "",
    }


def make(outcomes: Iterable[Data], *, profile: str, left_out: Iterable[str] = (), where: Data | None = None) -> Data:
    """A receipt from the outcomes of a run (as `report.as_data` gives them)."""
    components: dict[str, Data] = {}
    seconds: dict[str, float] = {}
    refusals = []
    for data in ordered(outcomes):
        name = data["component"]
        entry = components.setdefault(name, {"sources": source_hash(name), "rows": []})
        seconds[name] = round(seconds.get(name, 0.0) + data["seconds"], 1)
        if data["result"] == "refused":
            refusals.append(f"{name}.{data['function']}.{data['check']} ({data['candidate']}): {data['message'] or 'refused every case'}")
            continue
        for row in data["rows"]:
            entry["rows"].append(
                {"function": data["function"], **row, **{key: data[key] for key in ("candidate", "backend", "version", "result")}}
            )
    return {
        "receipt": VERSION,
        "profile": profile,
        "environment": where if where is not None else environment(),
        "components": components,
        "not_claimed": sorted({*left_out, *refusals}),
        "times": {"written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "seconds": seconds},
    }


def write(path: Path, receipt: Data) -> None:
    """Write a receipt as JSON with a stable order of keys; a run that is stopped meanwhile leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(receipt, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path) -> Data:
    """A receipt from its file.

    Raises:
        ValueError: it is none.
    """
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name}: not JSON: {error}") from error
    if not isinstance(receipt, dict) or set(receipt) != KEYS or receipt["receipt"] != VERSION:
        raise ValueError(f"{path.name}: a receipt of version {VERSION} has exactly the keys {', '.join(sorted(KEYS))}")
    for name, entry in receipt["components"].items():
        if set(entry) != {"sources", "rows"} or any(set(row) != ROW_KEYS for row in entry["rows"]):
            raise ValueError(f"{path.name}: component {name} must have sources, and rows with {', '.join(sorted(ROW_KEYS))}")
    return receipt


def stale(receipt: Data) -> list[str]:
    """Components whose sources have changed since the receipt was written (or are gone)."""
    return sorted(name for name, entry in receipt["components"].items() if source_hash(name) != entry["sources"])


def source_hash(component: str) -> str:
    """SHA-256 of everything in dsv4 that a component's two implementations and its contract import."""
    digest = hashlib.sha256()
    for path in sources(component):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def sources(component: str) -> Sequence[Path]:
    """The files behind a component: reference, fast and contract, and what they import from dsv4, in order."""
    waiting = [ROOT / side / f"{component}.py" for side in ("reference", "fast", "parity/components")]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path.is_file() and path not in found:
            found.add(path)
            waiting += _imports(path)
    return sorted(found)


def _imports(path: Path) -> list[Path]:
    """Modules by their statements and, of dsv4.fast, by the names that a call gets: kernels are imported when one is launched."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and path.is_relative_to(ROOT / "fast"):
            given = [argument.value for argument in node.args if isinstance(argument, ast.Constant) and isinstance(argument.value, str)]
            names += [name if name.startswith("dsv4.") else f"dsv4.fast.kernels.{name}" for name in given if MODULE.fullmatch(name)]
    # A package's __init__ lists every component, which says nothing of this one: it is left out.
    return [ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in names if name.startswith("dsv4.")]
