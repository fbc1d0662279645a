"""One case of one check: the inputs that a spec stands for, and what went wrong with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.parity.candidates import Candidate
from dsv4.parity.compare import Comparison, compare_bound, compare_bytes
from dsv4.parity.contracts import Call, Contract, Domain, Output, Spec
from dsv4.types import ArgumentError, Unsupported


class Violation(AssertionError):
    """The candidate broke its contract: in which output, and how."""

    def __init__(self, output: str, comparison: Comparison, what: str = "") -> None:
        self.output, self.comparison, self.what = output, comparison, what
        super().__init__(f"{output}: {what + ': ' if what else ''}{comparison.reason}")


@dataclass(frozen=True)
class Trial:
    """A candidate on one spec."""

    contract: Contract
    candidate: Candidate
    device: torch.device
    domain: Domain
    spec: Spec

    def call(self) -> Call:
        """Fresh arguments."""
        return self.domain.build(self.spec, self.device)

    def expect(self, call: Call) -> dict[str, Tensor]:
        """What the reference says."""
        return self.contract.split(self.contract.refer()(*call.args, **call.kwargs))

    def run(self, call: Call) -> dict[str, Tensor]:
        """What the candidate says.

        Raises:
            Unsupported: the candidate refuses these arguments and may.
            Violation: it raised, or did not return the tensors that the contract names.
        """
        try:
            return self.contract.split(self.candidate.call(*call.args, **call.kwargs))
        except Exception as error:
            if isinstance(error, Unsupported) and self.candidate.may_refuse:
                raise
            raise Violation("result", Comparison(False, f"raised {type(error).__name__}: {error}")) from error

    def attempt(self, call: Call) -> dict[str, Tensor] | None:
        """As `run`; None where the candidate refuses the arguments with an ArgumentError."""
        try:
            return self.run(call)
        except Unsupported:
            return None
        except Violation as violation:
            if isinstance(violation.__cause__, ArgumentError):
                return None
            raise

    def row(self, output: str) -> Output:
        """A row of the contract for this output: one that covers the trial's domain, else any."""
        rows = [row for row in self.contract.outputs if row.name == output]
        return next((row for row in rows if row.covers(self.domain.name)), rows[0])

    def agree(self, expected: dict[str, Tensor], actual: dict[str, Tensor], what: str) -> None:
        """As `same`, of a result that another kernel may have made: what has a bound need not be equal, but keeps it.

        Raises:
            Violation: it does not.
        """
        same_outputs(expected, actual)
        for name, tensor in actual.items():
            row, call = self.row(name), self.call()
            if row.bound is None or self.contract.exact is None or compare_output_bytes(row, expected[name], tensor).ok:
                self.same({name: expected[name]}, {name: tensor}, what)
                continue
            exact = self.contract.split(self.contract.exact(*call.args, **call.kwargs))[name]
            comparison = compare_bound(exact, tensor, row.bound(call, exact))
            if not comparison.ok:
                raise Violation(name, comparison, what)

    def same(self, expected: dict[str, Tensor], actual: dict[str, Tensor], what: str) -> None:
        """Demand equal bytes of every output, pad words included where the contract shows them.

        Raises:
            Violation: some byte differs.
        """
        same_outputs(expected, actual)
        for name, tensor in expected.items():
            comparison = compare_output_bytes(self.row(name), tensor, actual[name])
            if not comparison.ok:
                raise Violation(name, comparison, what)


def same_outputs(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
    """Demand a tensor where one is expected, and None where None is.

    Raises:
        Violation: an optional output is there that should not be, or the other way round.
    """
    for name in expected.keys() ^ actual.keys():
        raise Violation(
            name, Comparison(False, "None where a tensor is expected" if name in expected else "a tensor where None is expected")
        )


def compare_output_bytes(row: Output, expected: Tensor, actual: Tensor) -> Comparison:
    """Equal bytes as a row of the contract wants them: its strides, its NaNs, and its view of the whole storage."""
    comparison = compare_bytes(expected, actual, strides=row.strides, any_nan=row.any_nan)
    if not comparison.ok or row.view is None:
        return comparison
    try:
        seen = row.view(actual)
    except RuntimeError as error:
        return Comparison(False, f"its storage does not hold what the contract shows: {error}")
    whole = compare_bytes(row.view(expected), seen, any_nan=row.any_nan)
    return whole if whole.ok else Comparison(**{**whole.__dict__, "reason": f"{whole.reason} (in the storage around the elements)"})
