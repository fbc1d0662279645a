"""The suite under test: wrong implementations, each of which the ordinary run must notice.

Every function gets three mutants for nothing (zeros, the previous output, its input); `mutants/STEM.py` adds the ones that are
particular to a component, as `MUTANTS`, many of them out of public bug reports. Each is scored at the suite's smoke profile, and by
three looser comparisons on the same inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dsv4.parity import contracts, engine, report
from dsv4.parity.candidates import Candidate, not_held
from dsv4.parity.compare import as_integers
from dsv4.parity.contracts import Contract, Domain, Invariant
from dsv4.parity.mutants.loose import COMPARERS
from dsv4.parity.profiles import PROFILES


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation: what is wrong with it, and where such a thing was seen."""

    id: str
    component: str
    function: str
    call: Callable[..., Any]
    fault: str
    source: str = ""


@dataclass
class Score:
    """Which check killed a mutant first (empty: it survived), and whether each looser comparison would have."""

    mutant: Mutant
    killed_by: str = ""
    loosely: dict[str, bool] = field(default_factory=dict)


def for_contract(contract: Contract) -> list[Mutant]:
    """The mutants of one function, generic ones first."""
    name = f"dsv4.parity.mutants.{contract.component}"
    own: Sequence[Mutant] = importlib.import_module(name).MUTANTS if find_spec(name) else ()
    return [*_generic(contract), *(mutant for mutant in own if mutant.function == contract.function)]


def score(components: Iterable[str] | None = None, device: str = "cpu", *, loosely: bool = True) -> list[Score]:
    """Run the suite against every mutant of these components (default: all)."""
    return [
        score_one(contract, mutant, torch.device(device), loosely=loosely)
        for component in components or contracts.components()
        for contract in contracts.for_component(component)
        for mutant in for_contract(contract)
    ]


def score_one(contract: Contract, mutant: Mutant, device: torch.device, *, loosely: bool = True) -> Score:
    """Run a function's ordinary checks with a mutant for a candidate until the first one fails.

    What the reference does not pass itself says nothing of a mutant of it: an `out` argument, and independence of the batch where sums
    cancel, which rows of dsv4.fast are asked for.
    """
    found = Score(mutant)
    unclaimed = ("fullgraph", "slow"), ("opcheck", "no operator"), ("graph_replay", "slow"), ("guards", "no argument out")
    candidate = Candidate(mutant.id, mutant.call, may_refuse=False, unclaimed=unclaimed)
    checks = [item for item in contract.checks if not (not_held(candidate, item, device, soak=False) or _asked_of_fast(item))]
    for item in checks:
        if _killed(contract, item, candidate, device):
            found.killed_by = item.label
            break
    for name, comparer in COMPARERS.items() if loosely else ():
        found.loosely[name] = any(_killed(contract, item, candidate, device, comparer) for item in checks if isinstance(item, Domain))
    return found


def _asked_of_fast(item: Any) -> bool:
    return isinstance(item, Invariant) and item.domain.startswith("cancelling")


def _killed(contract: Contract, item: Any, candidate: Candidate, device: torch.device, comparer: engine.Comparer | None = None) -> bool:
    return engine.check(contract, item, candidate, device, PROFILES["smoke"], shrink=False, comparer=comparer).result == "failed"


def table(scores: Sequence[Score]) -> str:
    """Every mutant with what noticed it, and the totals."""
    lines = []
    for score in scores:
        name = f"{score.mutant.component}.{score.mutant.function}"
        seen = [("killed" if killed else "missed") for killed in score.loosely.values()]
        lines.append((score.mutant.id, name, score.mutant.fault, score.mutant.source, score.killed_by or "SURVIVED", *seen))
    counts = [
        str(sum(bool(score.killed_by) for score in scores)),
        *(str(sum(score.loosely[name] for score in scores)) for name in _loose_names(scores)),
    ]
    lines.append((f"{len(scores)} mutants", "", "", "killed", *counts))
    return report.pretty(lines, ("mutant", "function", "fault", "source", "dsv4.parity", *_loose_names(scores)), width=150)


def _loose_names(scores: Sequence[Score]) -> list[str]:
    return list(scores[0].loosely) if scores else []


def _generic(contract: Contract) -> list[Mutant]:
    reference = contract.refer()
    last: list[Any] = []

    def zeros(*args: Any, **kwargs: Any) -> Any:
        return _rebuilt(reference(*args, **kwargs), lambda tensor: torch.zeros_like(as_integers(tensor)).to(tensor.dtype))

    def previous(*args: Any, **kwargs: Any) -> Any:
        last.append(reference(*args, **kwargs))
        return last.pop(0) if len(last) > 1 else last[0]

    def its_input(*args: Any, **kwargs: Any) -> Any:
        given = _first_tensor((*args, *kwargs.values()))
        return _rebuilt(reference(*args, **kwargs), lambda tensor: tensor if given is None else _recast(given, tensor))

    faults = {
        "zeros": (zeros, "returns zeros"),
        "previous": (previous, "returns the previous output"),
        "input": (its_input, "returns its input"),
    }
    return [
        Mutant(f"{contract.function}-{name}", contract.component, contract.function, call, fault, "generic")
        for name, (call, fault) in faults.items()
    ]


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    """The first of these that is a tensor, or the first tensor of the first tuple that holds one."""
    for value in values:
        found = _first_tensor(value) if isinstance(value, tuple) else value
        if isinstance(found, Tensor):
            return found
    return None


def _rebuilt(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(result, Tensor):
        return change(result)
    parts = [None if part is None else change(part) for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)


def _recast(given: Tensor, like: Tensor) -> Tensor:
    """The bits of an input in the dtype of an output, where shape and width allow it; else the input as it is."""
    return given.view(like.dtype) if given.shape == like.shape and given.element_size() == like.element_size() else given
