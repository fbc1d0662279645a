"""No test reads or writes the user's cache of proofs, or another test's."""

from collections.abc import Iterator
from itertools import count

import pytest

NUMBERS = count()


@pytest.fixture(autouse=True, scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For fixtures of modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV4_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """For each test."""
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path_factory.getbasetemp() / f"cache-{next(NUMBERS)}"))
