"""Which kernel multiplies codes: the portable one of `linear`, and on SM90 two of its own for groups of 32.

`linear_hopper_few` is for up to 64 tokens, with the bits of `linear`. `linear_hopper` is for many, and its sums have one part, so where the
number of tokens may change no bit it stands aside for products that have several. It cannot tell a product of scales that is not exact:
where its scales may have one, `linear` makes every tile anew, by programs that end at once where all is well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from dsv4.fast.kernels import linear, linear_hopper, linear_hopper_few
from dsv4.fast.kernels.linear_tiles import parts_of

MANY, TILES = 64, 36  # more tokens, and at least so many tiles of 128 by 128, are for `linear_hopper`


def run_fp8(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, block: int, *, invariant: bool) -> Tensor:
    """As `linear.run_fp8`. `invariant`: the number of tokens changes no bit."""
    if block == 32:
        return _run(x, x_scales, weight, weight_scales, invariant)
    return linear.run_fp8(x, x_scales, weight, weight_scales, block)


def run_mxfp8(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, *, invariant: bool) -> Tensor:
    """As `linear.run_mxfp8`. `invariant`: as for `run_fp8`."""
    return _run(codes, scales, weight, weight_scales, invariant)


def choose(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, *, invariant: bool) -> str:
    """few, many or portable, for groups of 32."""
    (tokens, k), n = x.shape, weight.shape[0]
    given = x, x_scales, weight, weight_scales
    if tokens <= MANY:
        return "few" if linear_hopper_few.supported(*given) is None else "portable"
    wide = triton.cdiv(tokens, 128) * triton.cdiv(n, 128) >= TILES and not (invariant and parts_of(n, k, 1) > 1)
    many = wide and x_scales.dtype != torch.float32 and linear_hopper.supported(*given) is None  # fp32 scales may not be looked at
    return "many" if many else "portable"


def prepare(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, *, invariant: bool) -> Callable[..., Tensor]:
    """What to run for operands of this kind, groups of 32: chosen once, where bytes of scales lie as these do."""
    chosen = RUNS[choose(x, x_scales, weight, weight_scales, invariant=invariant)]

    def run(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
        if int(x_scales.storage_offset()) % 4 or int(weight_scales.storage_offset()) % 4:
            return _run(x, x_scales, weight, weight_scales, invariant)
        return chosen(x, x_scales, weight, weight_scales)

    return run


def _run(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, invariant: bool) -> Tensor:
    return RUNS[choose(x, x_scales, weight, weight_scales, invariant=invariant)](x, x_scales, weight, weight_scales)


def _many(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    odd = torch.zeros(1, dtype=torch.int32, device=x.device)
    y = linear_hopper.run(x, x_scales, weight, weight_scales, odd=odd)
    return linear.run(linear.operands(x, x_scales, weight, weight_scales, 32), made=y[:, None], odd=odd)[:, 0].contiguous()


def _portable(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    return linear.run(linear.operands(x, x_scales, weight, weight_scales, 32))[:, 0]


RUNS: dict[str, Callable[..., Tensor]] = {"few": linear_hopper_few.run, "many": _many, "portable": _portable}
