"""What there is to choose from, in words: the state of every implementation on a device, and why a function gets the one it gets."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from dsv4.fast import dispatch
from dsv4.types import ArgumentError


class BackendStatus(NamedTuple):
    """One row of `backends()`."""

    function: str
    backend: str
    version: str
    device: str
    usable: bool
    reason: str
    deterministic: bool
    batch_invariant: bool
    graph_safe: bool
    verified: bool
    tried: bool = True  # False: a library's function that has proved nothing here yet, and counts as usable until it has
    unclaimed: tuple[tuple[str, str], ...] = ()  # domains of its contract that it is not held to, and why


def backends(device: torch.device | str | None = None, *, prove: bool = False) -> list[BackendStatus]:
    """Every implementation of every function, and whether it can run on a device.

    The device defaults to the current CUDA device if there is one, else the CPU.

    `prove` tries third-party functions on their small known case, which may compile for minutes; otherwise answers of earlier proofs count,
    and an untried function counts as usable.
    """
    where = dispatch.default_device(device)
    return [_status(function, row, where, prove) for function, rows in sorted(dispatch.TABLES.items()) for row in rows]


def _status(function: str, row: dispatch.Implementation, device: torch.device, prove: bool) -> BackendStatus:
    reason = dispatch.unusable(row, device, prove=prove)
    version = row.library.version() if row.library else _own_version(row.backend)
    where = str(dispatch.describe(device))
    verified = where in row.verified
    tried = reason is not None or row.library is None or row.library.recalled(row.symbol, device) is not None
    words = [reason] if reason else []
    if not tried:
        words.append(f"not tried yet: {row.symbol} proves itself in `dsv4 doctor`, in warmup, or at its first call")
    if reason is None and not verified:
        words.append(f"not verified on {where}: the parity suite has not passed there")
    words += [f"not held to {domain}: {why}" for domain, why in row.unclaimed]
    flags = row.deterministic, row.batch_invariant, row.graph_safe
    return BackendStatus(function, row.backend, version, where, reason is None, "; ".join(words), *flags, verified, tried, row.unclaimed)


@cache
def _own_version(backend: str) -> str:
    if backend == "triton":
        try:
            import triton
        except ImportError:
            return ""
        return f"triton {triton.__version__}"
    return f"torch {torch.__version__}"


def explain(function: str, device: torch.device | str | None = None) -> str:
    """In words: what a function ("quantization.quantize_fp8") would run on a device, and why not the other implementations.

    Nothing is tried or compiled: a third-party function that has not proved itself yet is said to be untried.
    """
    if function not in dispatch.TABLES:
        raise ArgumentError("function", repr(function), f"must be one of {', '.join(sorted(dispatch.TABLES))}")
    where = dispatch.default_device(device)
    wanted = dispatch.wanted_backend(function)
    lines = [f"{function} on {dispatch.describe(where)}" + (f", {wanted} demanded" if wanted else "")]
    chosen = False
    for row in dispatch.TABLES[function]:
        status = _status(function, row, where, False)
        first = status.usable and status.tried and not chosen and wanted in (None, row.backend)
        chosen = chosen or first
        answer = "chosen" if first else "no" if not status.usable else "usable" if status.tried else "untried"
        lines.append(f"  {row.backend:<10} {answer}{': ' + status.reason if status.reason else ''}")
    return "\n".join(lines)
