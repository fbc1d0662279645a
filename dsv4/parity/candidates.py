"""What is held to a contract: implementations of dsv4.fast, or anybody's callables."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from dsv4.parity.contracts import Contract, Domain, Invariant

# Invariants that only an implementation of dsv4.fast is held to, and of those the ones that `backends()` must claim.
OURS_ALONE = frozenset({"fullgraph", "opcheck", "graph_replay", "guards"})
CLAIMED_BY_FLAG = {"run_to_run": "deterministic", "batch": "batch_invariant", "graph_replay": "graph_safe"}


@dataclass(frozen=True)
class Candidate:
    """One implementation of one function. `option` is what selects it on the command line; `unclaimed` maps invariants and domains it is
    not held to, to the reason.
    """

    name: str
    call: Callable[..., Any]
    backend: str = ""
    version: str = ""
    option: str = ""
    unclaimed: tuple[tuple[str, str], ...] = ()
    may_refuse: bool = True


@dataclass(frozen=True)
class Absent:
    """A candidate that was asked for and cannot be run here."""

    name: str
    reason: str


def foreign(contract: Contract, impls: Iterable[str]) -> list[Candidate]:
    """Candidates from "component.function=module:callable" or "component=module" entries that speak of this contract.

    Raises:
        LookupError: an entry is malformed, or its module or callable cannot be imported.
    """
    found = []
    for entry in impls:
        target, equals, where = entry.partition("=")
        if not equals or not target or not where:
            raise LookupError(f"--dsv4-impl {entry!r}: must read COMPONENT.FUNCTION=module:callable, or COMPONENT=module")
        call = None
        if target == contract.name:
            call = _imported(entry, where)
        elif target == contract.component:
            call = getattr(_module(entry, where), contract.function, None)
        if call is not None:
            unclaimed = tuple((name, "only claimed for dsv4.fast") for name in sorted(OURS_ALONE))
            found.append(Candidate(where, call, "foreign", _version(where), f"--dsv4-impl {entry}", unclaimed))
    return found


def speaks_of(impls: Iterable[str], name: str) -> bool:
    """Whether some "--dsv4-impl" entry names this function or its component."""
    return any(entry.partition("=")[0] in (name, name.partition(".")[0]) for entry in impls)


def ours(contract: Contract, device: torch.device, backend: str | None = None, *, every: bool = False) -> Sequence[Candidate | Absent]:
    """Candidates from dsv4.fast: what it picks here, every usable backend, or the one asked for."""
    import dsv4.fast

    function = getattr(getattr(dsv4.fast, contract.component), contract.function)
    with dsv4.fast.use(batch_invariant=True):  # a row may claim it where that is demanded, and is held to it under the demand
        claims = {(status.function, status.backend): status.batch_invariant for status in dsv4.fast.backends(device)}
    statuses = [
        status._replace(batch_invariant=claims[status.function, status.backend])
        for status in dsv4.fast.backends(device)
        if status.function == contract.name
    ]
    if not statuses:
        host = Candidate("default", function, "host", f"torch {torch.__version__}", may_refuse=False)
        return [host if backend in (None, "host") else Absent(backend, f"{contract.name} is host work and has no backends")]
    usable = [status for status in statuses if status.usable]
    if backend is not None:
        asked = [status for status in statuses if status.backend == backend]
        if not asked:
            return [Absent(backend, f"{contract.name} has no {backend} implementation")]
        if not asked[0].usable:
            return [Absent(backend, asked[0].reason)]
        usable, every = asked, True
    if not usable:
        return [Absent("default", f"{contract.name} has no implementation that can run on {device}")]
    if not every:
        return [Candidate("default", function, usable[0].backend, usable[0].version, "", _unclaimed(usable[0]), may_refuse=False)]
    return [
        Candidate(
            status.backend,
            functools.partial(function, impl=status.backend),
            status.backend,
            status.version,
            f"--dsv4-backend {status.backend}",
            _unclaimed(status),
        )
        for status in usable
    ]


def not_held(candidate: Candidate, check: Domain | Invariant, device: torch.device, *, soak: bool) -> str:
    """Why this candidate is not held to this check here; empty if it is."""
    if isinstance(check, Domain) and check.name not in dict(candidate.unclaimed):
        return "more than 2^16 values: only under --dsv4-profile soak" if check.exhaustive > 2**16 and not soak else ""
    if check.name == "graph_replay" and device.type != "cuda":
        return "CUDA graphs want a CUDA device"
    return dict(candidate.unclaimed).get(check.name, "")


def _unclaimed(status: Any) -> tuple[tuple[str, str], ...]:
    flags = ((name, f"{status.backend} does not claim to be {flag}") for name, flag in CLAIMED_BY_FLAG.items() if not getattr(status, flag))
    return *flags, *status.unclaimed


def _imported(entry: str, where: str) -> Callable[..., Any]:
    module, colon, attribute = where.partition(":")
    found: Any = _module(entry, module)
    for name in attribute.split(".") if colon else ():
        found = getattr(found, name, None)
    if not callable(found):
        raise LookupError(f"--dsv4-impl {entry!r}: {where!r} is not a callable; write module:callable")
    return found  # type: ignore[no-any-return]


def _module(entry: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LookupError(f"--dsv4-impl {entry!r}: cannot import {name!r}: {error}") from error


def _version(where: str) -> str:
    package = where.partition(":")[0].partition(".")[0]
    names = metadata.packages_distributions().get(package, [])
    return f"{names[0]} {metadata.version(names[0])}" if names else package
