"""What an adapter knows of a third-party library: whether it is there, and whether each function has proved itself on a device.

A library that imports and then computes garbage is worse than one that is absent. So a function counts as usable only after it has given
a known answer on a small input: `probes` maps a function's name to a callable that takes a device, runs the function there and returns
what is wrong, or None. A probe runs once for a device's capability and process; while a CUDA graph is being captured an unproven
function is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv4.fast.adapters import proofs
from dsv4.fast.adapters.proofs import Answer, Key

Probe = Callable[[torch.device], str | None]

POISONS = (0xAB, 0x54)  # complements: what survives from memory cannot equal the answer twice


def any_version(_: str) -> str | None:
    """A library that is tied to no version of torch."""
    return None


def any_device(_: Any) -> str | None:
    """A library that takes every device."""
    return None


def as_bytes(values: Sequence[float], dtype: torch.dtype) -> bytes:
    """Numbers as a dtype stores them."""
    return torch.tensor(values, dtype=torch.float64).to(dtype).view(torch.uint8).numpy().tobytes()


def known_answer(call: Callable[[], Sequence[Tensor]], expected: Sequence[bytes], device: torch.device) -> str | None:
    """What is wrong with the bytes of `call()`'s results (in their logical order); None if they are the expected ones.

    Called twice, each time after memory of the results' sizes has been filled with another byte and freed: a kernel that writes nothing
    returns that.
    """
    for poison in POISONS:
        fills = [torch.full((max(len(want), 1),), poison, dtype=torch.uint8, device=device) for want in expected for _ in range(16)]
        del fills
        results = call()
        if len(results) != len(expected):
            return f"{len(results)} results, not {len(expected)}"
        for number, (result, want) in enumerate(zip(results, expected, strict=True)):
            got = result.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
            if len(got) != len(want):
                return f"result {number} has {len(got)} bytes, not {len(want)}"
            if got != want:
                wrong = [at for at in range(len(want)) if got[at] != want[at]]
                at = wrong[0]
                return f"{len(wrong)} of {len(want)} bytes of result {number} differ, byte {at} is {got[at]:#04x}, not {want[at]:#04x}"
    return None


@dataclass
class Library:
    """One third-party library."""

    name: str  # as a user knows it
    module: str  # what is imported
    distributions: tuple[str, ...]  # what pip calls it
    install: str  # the exact command that brings a version that fits
    fits: Callable[[str], str | None] = any_version  # what is wrong with an installed version under this torch
    probes: dict[str, Probe] = field(default_factory=dict)  # by function; a form of a function is named behind a blank
    devices: Callable[[Any], str | None] = any_device  # what keeps it from a `dispatch.Device`
    _found: str | bool | None = field(default=False, repr=False)  # False: not looked for yet
    _proofs: dict[tuple[str, str], str | None] = field(default_factory=dict, repr=False)
    changes: ClassVar[int] = 0  # of what is known of any function of any library: what rests on an answer looks whether it still stands

    def version(self) -> str:
        """The installed version, "" if there is none."""
        for distribution in self.distributions:
            try:
                return f"{self.name} {metadata.version(distribution)}"
            except metadata.PackageNotFoundError:
                continue
        return ""

    def missing(self) -> str | None:
        """Why the library cannot be imported; None if it can. Tried once."""
        if self._found is False:
            self._found = self._try_import()
        assert not isinstance(self._found, bool)
        return self._found

    def _try_import(self) -> str | None:
        if not self.version():
            return f"{self.name} is not installed"
        if (unfit := self.fits(self.version().removeprefix(f"{self.name} "))) is not None:
            return f"{self.version()} {unfit}"
        try:
            import_module(self.module)
        except Exception as error:  # a wheel of the wrong torch raises whatever its loader raises
            return f"{self.version()} does not import under torch {torch.__version__}: {_in_a_line(error)}"
        return None

    def function(self, symbol: str) -> Any:
        """A function of the library by its dotted name; AttributeError names the part that is missing."""
        found: Any = import_module(self.module)
        for part in symbol.partition(" ")[0].split("."):
            found = getattr(found, part)
        return found

    def lacks(self, symbol: str) -> str | None:
        """Says so if the library, which can be imported, does not have a function."""
        try:
            self.function(symbol)
        except AttributeError as error:
            return f"{self.version()} has no {symbol}: {error}"
        return None

    def remedy(self) -> str:
        """What a user can do about it."""
        return f"Install it with: {self.install}"

    def disproved(self, function: str, device: torch.device, *, again: bool = False) -> str | None:
        """What is wrong with a function on a device; None once it has proved itself. `again` tries a function that has failed anew."""
        known = self.recalled(function, device)
        if known is None or (again and known.wrong is not None):
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return f"{function} has not proved itself yet and cannot during CUDA graph capture: call it, or warm up, before capturing"
            known = Answer(self._try(function, device))
            key = self._key(function, device)
            self._note(key, known)
            if device.type == "cuda" and function in self.probes:
                proofs.keep(key, known)
        return known.wrong

    def proved(self, function: str, where: str) -> bool:
        """Whether a function has proved itself in this process, on a kind of device such as "SM90": quick, for every call asks."""
        return self._proofs.get((function, where), "") is None

    def recalled(self, function: str, device: torch.device) -> Answer | None:
        """What a proof came to, in this process or an earlier one; None if there was none. Proves nothing itself."""
        key = self._key(function, device)
        if (key.function, key.device) not in self._proofs:
            kept = proofs.recall(key) if device.type == "cuda" else None
            if kept is None:
                return None
            self._note(key, kept)
        return Answer(self._proofs[key.function, key.device])

    def _note(self, key: Key, answer: Answer) -> None:
        self._proofs[key.function, key.device] = answer.wrong
        Library.changes += 1

    def _key(self, function: str, device: torch.device) -> Key:
        where = "SM{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else device.type
        return Key(self.name, self.version().removeprefix(f"{self.name} "), torch.__version__, where, function)

    def _try(self, function: str, device: torch.device) -> str | None:
        if function not in self.probes:
            return f"no probe for {function}"
        try:
            with torch.cuda.device(device) if device.type == "cuda" and torch.cuda.is_available() else nullcontext():
                wrong = self.probes[function](device)
        except Exception as error:
            wrong = f"raised {_in_a_line(error)}"
        return None if wrong is None else f"{self.version()}: {function} failed its known-answer test: {wrong}"


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
