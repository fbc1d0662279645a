"""Eager calls of a kind that is known: what dispatch chose for the first of them runs at once, without checks, operator and dispatch.

On the host of a fast GPU these take longer than the launch. A kind is all that checks, argument rules and rows look at: options, what is
demanded, and of each tensor type, dtype, device, sizes, strides, whether it requires grad, and which dispatch keys it and the thread have.
torch compares what it says of tensors in one call, made for Dynamo's guards. Tensors that do not begin at multiples of 16 bytes are of no
known kind. Whatever traces, intercepts or differentiates a call (torch.compile, a mode, also that of torch.set_default_device, a function
transform) gets the operator. A profiler does not see the operator's name in a call of a known kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_torch_function_mode_enabled, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from dsv4.fast import dispatch
from dsv4.fast.adapters.library import Library
from dsv4.fast.dispatch import TABLES, demanded
from dsv4.formats import TMA_BYTES
from dsv4.types import ArgumentError, BackendUnavailable, Unsupported

Call = Callable[..., Any]

MOST = 4096  # kinds of a function
PAST = TMA_BYTES - 1
PLAIN = (Tensor, torch.nn.Parameter)


class Memory:
    """What calls of one function came to, by kind."""

    def __init__(self, function: str, operator: Call) -> None:
        """Know nothing yet. `operator` takes options, then tensors, and stands for rows that prepare nothing."""
        self._function = function
        self._operator = operator
        self._known: dict[Hashable, tuple[tuple[Call, Call], ...]] = {}
        self._count = 0
        self._rows: object = None  # the table that was chosen from
        self._changes = 0  # of libraries
        self._lock = Lock()

    def recall(self, options: Hashable, tensors: tuple[Any, ...]) -> Any:
        """The result of a call, None where its kind is not known. Tensors may be anything; the first two tell most kinds apart."""
        if _is_watched() or self._rows is not TABLES[self._function] or self._changes != Library.changes:
            return None
        known = None
        try:
            for fits, call in self._known.get(_place(options, tensors), ()):
                places = 0
                for tensor in tensors:
                    if tensor.is_nested:  # whose strides the guards cannot ask for
                        return None
                    places |= tensor.data_ptr()
                if places & PAST:
                    return None
                if fits(*tensors):
                    known = call
                    break
        except (AttributeError, RuntimeError, TypeError, ValueError):  # no tensors, none with memory, options that are no key
            return None
        return known and known(*tensors)

    def keep(self, options: tuple[Any, ...], tensors: tuple[Tensor, ...], arguments: tuple[Any, ...], chosen: tuple[Any, ...]) -> None:
        """Remember a call that went well: its options and tensors as `recall` got them, the operator's arguments without impl, and options
        as they are for the operator, impl last.
        """
        if _is_watched() or not _are_plain(tensors):
            return
        fits, rows, changes = _guard(tensors), TABLES[self._function], Library.changes
        if not fits(*tensors):  # a tensor that is given twice
            return
        try:
            place = _place(options, tensors)
            call = dispatch.prepare(self._function, tensors[0].device, arguments, chosen[-1]) or partial(self._operator, *chosen)
            with self._lock:
                if self._rows is not rows or self._changes != changes or self._count >= MOST:
                    self.forget()
                    self._rows, self._changes = rows, changes
                there = self._known.get(place, ())
                if not any(fits(*tensors) for fits, _ in there):
                    self._known[place] = (*there, (fits, call))
                    self._count += 1
        except (ArgumentError, BackendUnavailable, Unsupported, AttributeError, TypeError):
            return  # nothing to choose for tensors without memory; options that are no key; an environment that is not the process's own

    def forget(self) -> None:
        """Know nothing."""
        self._known, self._count = {}, 0


def _is_watched() -> bool:
    """Whether something traces, intercepts or differentiates calls of this thread."""
    watched = is_compiling() or _len_torch_dispatch_stack() or _is_torch_function_mode_enabled() or forward_ad._current_level >= 0
    return bool(watched)


def _place(options: Hashable, tensors: tuple[Any, ...]) -> Hashable:
    """What tells most kinds apart, and all that no tensor has: options, demands, and whether gradients are on, which a check asks for."""
    return options, len(tensors), demanded(), is_grad_enabled(), tensors[0].numel(), tensors[1].numel()


def _are_plain(tensors: tuple[Tensor, ...]) -> bool:
    """Whether tensors are what they look like, no subclass, nothing that is negated or wrapped, with no transform around the call; and
    begin at multiples of 16 bytes.
    """
    if _guards() is None or any(type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
        return False
    if torch._C._dispatch_tls_local_include_set().raw_repr() not in _keys_of_threads():
        return False
    if any(torch._C._dispatch_keys(tensor).raw_repr() not in _keys_of_tensors(tensor.device) for tensor in tensors):
        return False
    return not any(tensor.data_ptr() & PAST for tensor in tensors)


@cache
def _keys_of_threads() -> tuple[int, ...]:
    """Dispatch keys that a thread includes outside inference mode and in it."""
    inside = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    return inside.add(torch._C.DispatchKey.ADInplaceOrView).raw_repr(), inside.raw_repr()


@cache
def _keys_of_tensors(device: torch.device) -> tuple[int, ...]:
    """Dispatch keys of a plain tensor made outside inference mode and in it."""
    found = []
    for inside in (False, True):
        with torch.inference_mode(inside):
            found.append(torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr())
    return tuple(found)


@cache
def _guards() -> Any:
    """What compares all tensors in one call; None in a torch that lacks it, where every call goes the long way."""
    return getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def _guard(tensors: tuple[Tensor, ...]) -> Call:
    sizes, strides = ([list(each) for each in (getattr(tensor, name)() for tensor in tensors)] for name in ("size", "stride"))
    fits: Call = _guards()(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return fits
