"""Lists of picks as a library takes them: int32, one number for all that do not count."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE = 1024


@triton.jit(do_not_specialize=["stride", "width", "there", "target_stride", "columns", "absent"])
def put_kernel(
    numbers, stride, lengths, target, target_stride, width, there, columns, absent, HAS_LENGTHS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Columns of a token's list."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    live = column < width
    if HAS_LENGTHS:
        live = live & (column < tl.load(lengths + token))
    number = tl.load(numbers + token * stride + column, mask=live, other=-1).to(tl.int64)
    kept = tl.where((number >= 0) & (number < there), number, absent)
    tl.store(target + token * target_stride + column, kept.to(tl.int32), mask=column < columns)


def put(numbers: Tensor, lengths: Tensor | None, there: int, target: Tensor, absent: int) -> None:
    """Numbers [tokens, width] within 0 to there - 1, in columns before the lengths, into int32 target [tokens, width or more]."""
    numbers = numbers if numbers.stride(1) == 1 else numbers.contiguous()
    with torch.cuda.device_of(numbers):
        put_kernel[(len(target), triton.cdiv(target.shape[1], WIDE))](
            numbers, numbers.stride(0), numbers if lengths is None else lengths.contiguous(), target, target.stride(0), numbers.shape[1],
            there, target.shape[1], absent, HAS_LENGTHS=lengths is not None, WIDE=WIDE,
        )  # fmt: skip
