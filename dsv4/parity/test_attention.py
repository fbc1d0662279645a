"""Attention: every candidate against the reference."""

from collections.abc import Callable

from dsv4.parity.collect import ParityCase

COMPONENT = "attention"


def test_parity(parity_case: ParityCase, run_parity: Callable[[ParityCase], None]) -> None:
    run_parity(parity_case)
