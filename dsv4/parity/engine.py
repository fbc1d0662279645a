"""Running one check: draw or enumerate specs, run reference and candidate, compare, shrink what fails, and say what was found."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4.parity.candidates import Candidate
from dsv4.parity.compare import Comparison, compare_bound, compare_choice, metadata
from dsv4.parity.contracts import Contract, Domain, Invariant, Output, Spec
from dsv4.parity.invariants import CHECKS, EXAMPLES
from dsv4.parity.levels import Level
from dsv4.parity.profiles import PROFILES, Profile, register
from dsv4.parity.trial import Trial, Violation, compare_output_bytes, same_outputs
from dsv4.types import Unsupported

CHUNK = 2**16  # values of an exhaustive domain in one call
SHOWN = 16  # a failure message shows inputs of at most so many elements

Comparer = Callable[[Output, Tensor, Tensor], Comparison]


@dataclass
class Tally:
    """What was seen of one row of the contract, or of one invariant (level "")."""

    output: str
    level: str
    domain: str
    cases: int = 0
    max_ulp: int = 0
    share: float | None = None

    def add(self, comparison: Comparison, cases: int = 1) -> None:
        """Count a case, or a chunk of them."""
        self.cases += cases
        self.max_ulp = max(self.max_ulp, comparison.max_ulp)
        if comparison.share is not None:
            self.share = max(self.share or 0.0, comparison.share)


@dataclass
class Outcome:
    """What one check of one candidate came to: plain data, so that it travels between processes and into reports."""

    component: str
    function: str
    check: str
    candidate: str
    backend: str
    version: str
    device: str
    result: str = "passed"  # or "failed", or "refused" where the candidate took none of the cases
    rows: list[Tally] = field(default_factory=list)
    refused: int = 0
    message: str = ""
    spec: Spec | None = None
    seconds: float = 0.0


def check(
    contract: Contract,
    item: Domain | Invariant,
    candidate: Candidate,
    device: torch.device,
    profile: Profile = PROFILES["smoke"],
    *,
    shrink: bool = True,
    comparer: Comparer | None = None,
) -> Outcome:
    """Run one check. `comparer` replaces the contract's own comparison of each output (to see what a looser one would notice)."""
    runner = _Runner(contract, item, candidate, device, comparer)
    began = time.perf_counter()
    domain = item if isinstance(item, Domain) else contract.domain(item.domain)
    limit = EXAMPLES.get(item.name, profile.examples) if isinstance(item, Invariant) else profile.examples
    search = _search_range if domain.exhaustive else _search_drawn
    search(runner, domain, min(limit, profile.examples), profile, shrink)
    outcome = runner.outcome
    outcome.seconds = time.perf_counter() - began
    if runner.found:
        spec, violation = runner.found[-1]
        outcome.result, outcome.spec = "failed", spec
        outcome.message = message(contract, item, candidate, device, spec, violation, runner.flaky)
    elif outcome.refused and not any(row.cases for row in outcome.rows):
        outcome.result = "refused"
    return outcome


def replay(contract: Contract, item: Domain | Invariant, candidate: Candidate, device: torch.device, spec: Spec) -> Outcome:
    """Run one check on one spec, as a failure message printed it."""
    runner = _Runner(contract, item, candidate, device, None)
    with contextlib.suppress(Violation):
        runner(spec)
    if runner.found:
        runner.outcome.result, runner.outcome.spec = "failed", spec
        runner.outcome.message = message(contract, item, candidate, device, spec, runner.found[-1][1], False)
    return runner.outcome


class _Runner:
    """Calls the check on a spec, keeps count, and remembers every failure; the last one is the smallest."""

    def __init__(
        self, contract: Contract, item: Domain | Invariant, candidate: Candidate, device: torch.device, comparer: Comparer | None
    ) -> None:
        self.contract, self.item, self.candidate, self.device, self.comparer = contract, item, candidate, device, comparer
        self.found: list[tuple[Spec, Violation]] = []
        self.flaky = False
        where = f"{torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
        self.outcome = Outcome(
            contract.component, contract.function, item.label, candidate.name, candidate.backend, candidate.version, where
        )
        if isinstance(item, Domain):
            self.domain = item
            self.covering = [row for row in contract.outputs if row.covers(item.name)]
            self.outcome.rows = [Tally(row.name, row.level, item.name) for row in self.covering]
        else:
            self.domain = contract.domain(item.domain)
            self.outcome.rows = [Tally(item.name, "", item.domain)]

    @property
    def key(self) -> str:
        return f"{self.contract.name}.{self.item.label}"

    def __call__(self, spec: Spec) -> None:
        trial = Trial(self.contract, self.candidate, self.device, self.domain, spec)
        try:
            if isinstance(self.item, Domain):
                self._compare(trial)
            else:
                CHECKS[self.item.name](trial, **self.item.options)
                if not self.found:
                    self.outcome.rows[0].add(Comparison(True))
        except Unsupported:
            self.outcome.refused += 1
        except Violation as violation:
            self.found.append((spec, violation))
            raise

    def _compare(self, trial: Trial) -> None:
        expected = trial.expect(trial.call())
        actual = trial.run(trial.call())
        same_outputs(expected, actual)
        covered = {row.name for row in self.covering}
        for name in expected:  # of what no row speaks of here, that it is a tensor like the reference's
            if name not in covered and (mismatch := metadata(expected[name], actual[name])):
                raise Violation(name, Comparison(False, mismatch))
        call = trial.call()
        exact = self.contract.split(self.contract.exact(*call.args, **call.kwargs)) if self.contract.exact else expected
        for row, tally in zip(self.covering, self.outcome.rows, strict=True):
            if row.name not in expected:
                continue
            if self.comparer is not None:
                comparison = self.comparer(row, expected[row.name], actual[row.name])
            elif row.level is Level.E3 and row.bound is not None:
                bound = row.bound(call, exact[row.name])
                comparison = _bounded(row, exact[row.name], expected[row.name], actual[row.name], bound)
            elif row.level is Level.E4 and row.permits is not None:
                comparison = compare_choice(expected[row.name], actual[row.name], row.permits(call, expected[row.name], actual[row.name]))
            else:
                comparison = compare_output_bytes(row, expected[row.name], actual[row.name])
            if not self.found:  # shrinking looks at more cases, which nobody asked for
                tally.add(comparison, trial.spec["count"] if self.domain.exhaustive else 1)
            if not comparison.ok:
                raise Violation(row.name, comparison)


def _bounded(row: Output, exact: Tensor, expected: Tensor, actual: Tensor, bound: Tensor) -> Comparison:
    if expected.dtype != actual.dtype:
        return Comparison(False, f"dtype {actual.dtype}, expected {expected.dtype}", elements=actual.numel())
    return compare_bound(exact, actual, bound, independent=row.independent)


def _search_drawn(runner: _Runner, domain: Domain, examples: int, profile: Profile, shrink: bool) -> None:
    from hypothesis import Phase, given, seed, settings
    from hypothesis.errors import HypothesisException

    register()
    strategy = domain.strategy
    if strategy is None:
        raise ValueError(f"domain {domain.name!r} has no strategy")
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)

    @seed(zlib.crc32(runner.key.encode()) ^ profile.salt)
    @settings(settings.get_profile(profile.hypothesis), max_examples=examples, phases=phases)
    @given(strategy)
    def drawn(spec: Spec) -> None:
        runner(spec)

    try:
        drawn()
    except Violation:
        pass
    except (HypothesisException, BaseExceptionGroup):
        if not runner.found:
            raise
        runner.flaky = True


def _search_range(runner: _Runner, domain: Domain, examples: int, profile: Profile, shrink: bool) -> None:
    """All values of an exhaustive domain, in chunks (invariants: the first `examples` chunks); a failing chunk is halved while a half
    still fails.
    """
    chunks = range(0, domain.exhaustive, CHUNK)
    for first in chunks if isinstance(runner.item, Domain) else chunks[:examples]:
        span = (first, min(CHUNK, domain.exhaustive - first))
        if _fails(runner, span):
            while shrink and span[1] > 1:
                half = span[1] // 2
                smaller = next((part for part in ((span[0], half), (span[0] + half, span[1] - half)) if _fails(runner, part)), None)
                if smaller is None:
                    runner.flaky = not _fails(runner, span)
                    break
                span = smaller
            return


def _fails(runner: _Runner, span: tuple[int, int]) -> bool:
    try:
        runner({"first": span[0], "count": span[1]})
    except Violation:
        return True
    return False


def message(
    contract: Contract, item: Domain | Invariant, candidate: Candidate, device: torch.device, spec: Spec, violation: Violation, flaky: bool
) -> str:
    """All that one needs to understand a failure, and one line that reproduces it."""
    comparison = violation.comparison
    domain = item if isinstance(item, Domain) else contract.domain(item.domain)
    lines = [f"parity failure: {contract.name}, output {violation.output!r}, check {item.label!r}"]
    lines.append(f"  contract   {_row_in_words(contract, item, violation.output)}")
    lines.append(f"  candidate  {candidate.name}{f' ({candidate.version})' if candidate.version else ''} on {device}")
    lines.append(f"  found      {violation.what + ': ' if violation.what else ''}{comparison.reason}")
    lines.append(f"  case       {json.dumps(spec)}")
    given = domain.build(spec, device).tensors()
    if sum(tensor.numel() for tensor in given.values()) <= SHOWN:
        lines.append(f"  inputs     {'; '.join(f'{name}: {_values(tensor)}' for name, tensor in given.items())}")
    if comparison.coordinate is not None:
        where = ", ".join(map(str, comparison.coordinate))
        lines.append(f"  first      [{where}]: expected {comparison.expected}, got {comparison.actual}")
        spread = "; ".join(f"{bucket}: {count}" for bucket, count in comparison.histogram.items())
        lines.append(f"  ULP        {comparison.differing} of {comparison.elements} elements differ, by {spread}")
    if comparison.share is not None:
        lines.append(f"  bound      the largest error is {comparison.share:.4g} of its bound")
    if flaky:
        lines.append("  note       the case did not fail again: the candidate depends on what ran before it")
    option = f" {candidate.option}" if candidate.option else ""
    case = f"{contract.name}.{item.label} {shlex.quote(json.dumps(spec))}"
    lines.append(f"  replay     python -m dsv4.parity --replay {case}{option} --dsv4-device {device}")
    return "\n".join(lines)


def _values(tensor: Tensor) -> list[Any]:
    found: list[Any] = (tensor.double() if tensor.is_floating_point() else tensor).tolist()
    return found


def _row_in_words(contract: Contract, item: Domain | Invariant, output: str) -> str:
    if isinstance(item, Invariant):
        return f"{item.name}: {(CHECKS[item.name].__doc__ or '').split(chr(10))[0]}"
    row: Any = next((row for row in contract.outputs if row.name == output and row.covers(item.name)), None)
    return f"{row.level} on {item.name!r}: {row.level.claim}. {row.why}" if row else f"returns {', '.join(contract.fields)}"
