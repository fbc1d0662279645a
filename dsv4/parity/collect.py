"""From options to cases: which contracts, candidates and checks a run holds together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from dsv4.parity import candidates, contracts, engine
from dsv4.parity.candidates import Absent, Candidate
from dsv4.parity.contracts import Contract, Domain, Invariant
from dsv4.parity.profiles import PROFILES, Profile


@dataclass(frozen=True)
class ParityCase:
    """One check of one candidate, which a test runs."""

    contract: Contract
    item: Domain | Invariant
    candidate: Candidate | Absent
    device: torch.device
    profile: Profile

    @property
    def label(self) -> str:
        """function.check-candidate: the test's id."""
        return f"{self.contract.function}.{self.item.label}-{self.candidate.name}"

    @property
    def key(self) -> str:
        """component.function.check."""
        return f"{self.contract.name}.{self.item.label}"

    def run(self) -> engine.Outcome:
        """Run the check."""
        if isinstance(self.candidate, Absent):
            outcome = engine.Outcome(
                self.contract.component, self.contract.function, self.item.label, self.candidate.name, "", "", self.device.type
            )
            outcome.result, outcome.message = "refused", self.candidate.reason
            return outcome
        return engine.check(self.contract, self.item, self.candidate, self.device, self.profile)

    def crashed(self, error: Exception) -> engine.Outcome:
        """The outcome of a check that was not finished, as every one after a CUDA error in its process: reports must not lose it."""
        outcome = engine.Outcome(
            self.contract.component,
            self.contract.function,
            self.item.label,
            self.candidate.name,
            getattr(self.candidate, "backend", ""),
            getattr(self.candidate, "version", ""),
            self.device.type,
        )
        outcome.result, outcome.message = "failed", f"{self.key}: the check was not finished, {type(error).__name__}: {error}"
        outcome.rows = [engine.Tally("not finished", "", self.item.label)]
        return outcome


@dataclass(frozen=True)
class Selection:
    """What the command line asked for."""

    impls: Sequence[str] = ()
    backend: str | None = None
    device: str | None = None
    profile: str = "smoke"

    def where(self) -> torch.device:
        """The device: the one asked for, else the current CUDA device if there is one, else the CPU."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def candidates(self, contract: Contract) -> Sequence[Candidate | Absent]:
        """Candidates for one function. With `impls` these alone."""
        if self.impls:
            return candidates.foreign(contract, self.impls)
        return candidates.ours(contract, self.where(), self.backend, every=PROFILES[self.profile].every_backend)

    def cases(self, component: str) -> tuple[list[ParityCase], list[str]]:
        """The cases of a component, and in words what is left out."""
        cases, left_out = [], []
        for contract in contracts.for_component(component):
            left_out += [f"{contract.name}: {text}" for text in contract.not_claimed]
            for candidate in self.candidates(contract):
                if isinstance(candidate, Absent):
                    left_out.append(f"{contract.name} ({candidate.name}): {candidate.reason}")
                    cases.append(ParityCase(contract, contract.domains[0], candidate, self.where(), PROFILES[self.profile]))
                    continue
                for item in contract.checks:
                    reason = candidates.not_held(candidate, item, self.where(), soak=self.profile == "soak")
                    if reason:
                        left_out.append(f"{contract.name}.{item.label} ({candidate.name}): {reason}")
                    else:
                        cases.append(ParityCase(contract, item, candidate, self.where(), PROFILES[self.profile]))
        return cases, left_out


def find(key: str) -> tuple[Contract, Domain | Invariant]:
    """The contract and check of "component.function.check".

    Raises:
        LookupError: there is none.
    """
    component, function, label = (*key.split(".", 2), "", "")[:3]
    contract = contracts.find(f"{component}.{function}")
    for item in contract.checks:
        if item.label == label:
            return contract, item
    raise LookupError(f"{contract.name} has no check {label!r}; it has {', '.join(item.label for item in contract.checks)}")


def unmatched(impls: Iterable[str]) -> list[str]:
    """Entries of --dsv4-impl that name no function with a contract."""
    names = [contract.name for component in contracts.components() for contract in contracts.for_component(component)]
    return [entry for entry in impls if not any(candidates.speaks_of([entry], name) for name in names)]
