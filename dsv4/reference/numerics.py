"""How the reference rounds.

A numbered step of the specification that yields an fp32 tensor is evaluated in fp64 and rounded to fp32 once:

    y = fl32( f(x1, x2, ...) ),   f over fp64, x1, x2, ... widened exactly

so its bits do not depend on batch, chunk, order or device, but where a sum nearly cancels, to a few 2^-53 of its terms: there BLAS's order
in fp64 can show. One switch, `numerics`, turns roundings and quantisers off:

    mode            fp32_step, bf16_step       quantiser_step     fake_quantize
    stated          round to fp32 (to bf16)    rounds to fp32     quantises
    unrounded       stay fp64                  rounds to fp32     quantises
    unquantised     stay fp64                  rounds to fp32     returns its input

A quantiser's own steps round in every mode: they decide which code is meant, and a code is no rounding error. Subnormal numbers count:
under torch.set_flush_denormal(True) torch takes them for zero, and the reference with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from dsv4 import checks
from dsv4.types import Numerics

__all__ = ["bf16_dtypes", "bf16_step", "current_numerics", "float_dtypes", "fp32_step", "numerics", "quantiser_step"]

_mode: ContextVar[Numerics] = ContextVar("dsv4_numerics", default=Numerics.STATED)


def current_numerics() -> Numerics:
    """The mode in force: `Numerics.STATED` outside of any `numerics` block."""
    return _mode.get()


@contextmanager
def numerics(mode: Numerics | str) -> Iterator[None]:
    """Run a block of reference code in another mode.

    Args:
        mode: a `Numerics` or its string: stated, unrounded or unquantised.

    Raises:
        ArgumentError: another word.
    """
    token = _mode.set(checks.choice("mode", mode, Numerics))
    try:
        yield
    finally:
        _mode.reset(token)


def quantiser_step(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function` over the tensors widened to fp64, rounded to fp32 once, in every mode."""
    return function(*(tensor.to(torch.float64) for tensor in tensors)).to(torch.float32)


def fp32_step(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function` over the tensors widened to fp64; rounded to fp32 once where the mode is `stated`, left in fp64 otherwise."""
    exact = function(*(tensor.to(torch.float64) for tensor in tensors))
    return exact.to(torch.float32) if current_numerics() is Numerics.STATED else exact


def bf16_step(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`fp32_step`, and its fp32 result rounded to bf16 where the mode is `stated`: a step whose result the specification stores in bf16."""
    exact = fp32_step(function, *tensors)
    return exact.to(torch.bfloat16) if current_numerics() is Numerics.STATED else exact


def float_dtypes() -> tuple[str, ...]:
    """What the fp32 result of an earlier step may be: fp64 too, where it was not rounded."""
    return ("fp32",) if current_numerics() is Numerics.STATED else ("fp32", "fp64")


def bf16_dtypes() -> tuple[str, ...]:
    """What the bf16 result of an earlier step may be: fp64 too, where it was not rounded."""
    return ("bf16",) if current_numerics() is Numerics.STATED else ("bf16", "fp64")
