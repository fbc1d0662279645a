"""The output projection: every candidate against the reference."""

from collections.abc import Callable

from dsv4.parity.collect import ParityCase

COMPONENT = "output_projection"


def test_parity(parity_case: ParityCase, run_parity: Callable[[ParityCase], None]) -> None:
    run_parity(parity_case)
