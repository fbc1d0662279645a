"""Products with quantised weights and their inputs: every candidate against the reference."""

from collections.abc import Callable

from dsv4.parity.collect import ParityCase

COMPONENT = "linear"


def test_parity(parity_case: ParityCase, run_parity: Callable[[ParityCase], None]) -> None:
    run_parity(parity_case)
