"""Argument checks that both implementations share: they look at dtypes, shapes, strides and host values, never at what a tensor holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.types import ArgumentError

Choice = TypeVar("Choice", bound=StrEnum)

DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}


def tensor(name: str, value: object, dtypes: str | Sequence[str], shape: Sequence[str | int] | None = None) -> Tensor:
    """Check that `value` is a tensor of one of `dtypes` (names of DTYPES) and of `shape`.

    A shape entry that is a number must match; one that is a word names the dimension in the message; a first entry "..." allows any
    leading dimensions.
    """
    allowed = (dtypes,) if isinstance(dtypes, str) else dtypes
    if not isinstance(value, Tensor):
        raise ArgumentError(name, type(value).__name__, f"must be a tensor of {_either(allowed)}")
    if value.layout is not torch.strided:
        raise ArgumentError(name, f"a tensor of layout {value.layout}", "must be a dense tensor", "Use to_dense()")
    have = value.dtype
    for dtype in allowed:
        if DTYPES[dtype] is have:
            break
    else:
        raise ArgumentError(name, str(value.dtype).removeprefix("torch."), f"must be {_either(allowed)}")
    if shape is not None:
        _check_shape(name, value, shape)
    return value


def _check_shape(name: str, value: Tensor, shape: Sequence[str | int]) -> None:
    have = value.shape
    leading = len(shape) > 0 and shape[0] == "..."
    fits = len(have) >= len(shape) - 1 if leading else len(have) == len(shape)
    if fits:  # a plain loop: every call of every function comes through here
        for i in range(1, len(shape)) if leading else range(len(shape)):
            want = shape[i]
            if not isinstance(want, str) and have[i - len(shape)] != want:
                fits = False
                break
    if not fits:
        raise ArgumentError(name, f"shape {list(have)}", f"must have shape [{', '.join(str(d) for d in shape)}]")


def e8m0_bits(name: str, codes: object, shape: Sequence[str | int] | None = None) -> Tensor:
    """The bytes of E8M0 codes that came as e8m0 or as uint8; numbers are refused, for their bits would be taken for codes."""
    if isinstance(codes, Tensor) and codes.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        got = str(codes.dtype).removeprefix("torch.")
        raise ArgumentError(name, got, "must be e8m0 or uint8", "encode_e8m0 turns numbers into codes")
    return tensor(name, codes, ("e8m0", "uint8"), shape).view(torch.uint8)


def live_rows(value: int | Tensor, rows: int, name: str, other: Tensor) -> Tensor | None:
    """Check a count of live rows: a host number from 0 to `rows` (None), or a tensor of one element on the device of `other`, as 0-d."""
    if not isinstance(value, Tensor):
        at_least("live_rows", value, 0)
        at_most("live_rows", value, rows)
        return None
    tensor("live_rows", value, ("int32", "int64"))
    same_device("live_rows", value, name, other)
    if value.dim() > 1 or value.numel() != 1:
        raise ArgumentError("live_rows", f"shape {list(value.shape)}", "must have shape [] or [1]")
    return value.reshape(())


def same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two tensors are on one device."""
    if value.device != other.device:
        raise ArgumentError(name, f"a tensor on {value.device}", f"must be on the device of {other_name}, {other.device}")


def beside(name: str, value: Tensor, dtypes: str | Sequence[str], shape: Sequence[str | int], other_name: str, other: Tensor) -> None:
    """Check a tensor's dtype and shape, and that it is on the device of another."""
    tensor(name, value, dtypes, shape)
    same_device(name, value, other_name, other)


def choice(name: str, value: str, choices: type[Choice]) -> Choice:
    """The member of a string enum that `value` names."""
    try:
        return value if isinstance(value, choices) else choices(value)
    except ValueError:
        raise ArgumentError(name, repr(value), f"must be one of {', '.join(choices)}") from None


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Check that a host value is one of a few."""
    if value not in allowed:
        raise ArgumentError(name, repr(value), f"must be one of {', '.join(map(str, allowed))}")


def at_least(name: str, value: float, least: float) -> None:
    """Check a lower bound of a host number, which must be whole, and fit 64 bits, if the bound is an int."""
    _number(name, value, whole=isinstance(least, int))
    if not value >= least:
        raise ArgumentError(name, repr(value), f"must be at least {least}")


def at_most(name: str, value: float, most: float) -> None:
    """Check an upper bound of a host number."""
    if not value <= most:
        raise ArgumentError(name, repr(value), f"must be at most {most}")


def power_of_two(name: str, value: int, least: int, most: int) -> None:
    """Check that a host integer is a power of two within bounds."""
    _number(name, value, whole=True)
    if value < least or value > most or value & (value - 1):
        raise ArgumentError(name, repr(value), f"must be a power of two from {least} to {most}")


def _number(name: str, value: object, *, whole: bool) -> None:
    kinds = (int, torch.SymInt) if whole else (int, float, torch.SymInt, torch.SymFloat)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ArgumentError(name, f"{value!r}, a {type(value).__name__}", f"must be a {'whole ' if whole else ''}number")
    if whole and not -(2**63) <= value < 2**63:
        raise ArgumentError(name, "a number of more than 64 bits", "must fit a signed 64-bit integer")


def multiple(name: str, value: int, of: int, remedy: str = "") -> None:
    """Check that a size is a multiple of another."""
    if value % of:
        raise ArgumentError(name, str(value), f"must be a multiple of {of}", remedy)


def writable(name: str, value: Tensor) -> None:
    """Refuse a buffer that cannot be updated in place."""
    if any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)):
        raise ArgumentError(name, f"strides {value.stride()}", "must have a place of its own for each element", "Use contiguous()")
    if not torch.compiler.is_compiling() and value.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(name, "an inference tensor", "cannot be updated outside inference mode", "Use clone()")


def no_grad(**tensors: Tensor | None) -> None:
    """Refuse tensors that would need a derivative, backward or forward: the fast path has none."""
    for name, value in tensors.items():
        if value is None:
            continue
        if torch.is_grad_enabled() and value.requires_grad:
            raise ArgumentError(
                name, "a tensor that requires grad", "the fast path has no backward", "Use dsv4.reference, or call under torch.no_grad()"
            )
        if not torch.compiler.is_compiling() and forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
            raise ArgumentError(name, "a tensor with a tangent", "the fast path has no forward derivative", "Use dsv4.reference")


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
