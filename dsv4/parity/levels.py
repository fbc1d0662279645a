"""How much two implementations must agree: the ladder that every row of a contract stands on."""

from __future__ import annotations

from enum import StrEnum


class Level(StrEnum):
    """A rung, from the strictest. `claim` says it in words."""

    E0 = "E0"
    E1 = "E1"
    E2 = "E2"
    E3 = "E3"
    E4 = "E4"

    @property
    def claim(self) -> str:
        """What a row of this level promises."""
        return _CLAIMS[self]

    @property
    def bitwise(self) -> bool:
        """Whether the outputs must have equal bytes on the row's domain."""
        return self in (Level.E0, Level.E1, Level.E2)


_CLAIMS = {
    Level.E0: "identical bytes for every input in the domain, specials included",
    Level.E1: "identical bits on exact-lattice inputs, for any tile, split, order and batch",
    Level.E2: "identical bits on arbitrary finite inputs, given a declared order of operations",
    Level.E3: "elementwise |fast - exact| <= B(inputs), B derived beforehand; a signed-bias and an rms test beside it",
    Level.E4: "a discrete choice is one that the bound permits; what follows is checked given the choice",
}
