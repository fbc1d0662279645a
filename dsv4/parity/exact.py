"""What E3 rows are measured against: the reference itself, with its roundings off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsv4.reference.numerics import numerics


def unrounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the reference in the mode `unrounded`: fp64 where it would round, the same codes."""

    def exact(*args: Any, **kwargs: Any) -> Any:
        with numerics("unrounded"):
            return function(*args, **kwargs)

    return exact
