"""How hard a run looks: the number of cases of each drawn check, and whether they are the same every time."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Profile:
    """One of `PROFILES`. `salt` is mixed into the seed of each check: 0 gives the same cases in every run."""

    name: str
    examples: int
    every_backend: bool
    salt: int = field(default=0)

    @property
    def hypothesis(self) -> str:
        """Its name among Hypothesis' own profiles."""
        return f"dsv4-{self.name}"


PROFILES = {
    "smoke": Profile("smoke", 8, every_backend=False),
    "ci": Profile("ci", 40, every_backend=True),
    "dev": Profile("dev", 100, every_backend=True, salt=secrets.randbits(32)),
    "soak": Profile("soak", 2000, every_backend=True, salt=secrets.randbits(32)),
}


def register() -> None:
    """Make the profiles known to Hypothesis. None is loaded: the engine asks for its own by name, so other tests of the session keep
    theirs.
    """
    from hypothesis import HealthCheck, settings

    for profile in PROFILES.values():
        settings.register_profile(
            profile.hypothesis,
            max_examples=profile.examples,
            deadline=None,
            database=None,
            derandomize=profile.salt == 0,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )
