"""What runs for `linear` and `output_projection` on the inductor and eager paths: products in fp64, a tile of the weight at a time.

A tile is widened to the numbers that its codes and scales stand for, which fp64 holds exactly, and BLAS adds its products with the inputs
to the sums before the next one takes its place: a whole weight in fp64 never exists. Under use(batch_invariant=True) the inputs come in
blocks of so many rows, and all products have one shape (`product_bodies`); with few tokens that takes longer. Inductor compiles the
decoder of a tile, in integer bits; without it a table of 256 numbers is faster. What makes inputs is one body each: a norm, a SwiGLU or a
rotation, and the quantiser behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.fast import bits, dispatch, groups, product_bodies
from dsv4.fast.compiled import run_eagerly
from dsv4.fast.row_bodies import rms_body, rope_body, rounded, widened
from dsv4.formats import E8M0, E8M0_NAN, fp32

Run = Callable[..., Any]

BLOCK = 128  # of the FP8 form of `project_groups`
GROUP = 32  # of MXFP8
TILE = 2**18  # numbers of the weight at a time: 2 MiB in fp64
ROWS = 1024  # of it, which BLAS multiplies fastest; with FEW tokens whole rows of it, which need no copy
FEW = 8
UNIT = 256  # columns of the weight come in multiples of it: one graph for all widths
INPUTS = 2**20  # numbers of the inputs at a time, one row at least
BLOCK_ROWS = 24  # of the inputs, in products of one shape


class Operand(NamedTuple):
    """One side of a product."""

    numbers: Tensor  # bf16 [rows, k]; or uint8 codes
    scales: Tensor | None = None  # uint8 or fp32 [ceil(rows/height), ceil(k/block)]
    height: int = 1
    block: int = BLOCK


def linear_fp8(run: Run, x: Tensor, x_scales: Tensor | None, weight: Tensor, weight_scales: Tensor, block: int) -> Tensor:
    """bf16 [tokens, n] of bf16 x, or of its codes and scales."""
    result = x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16)
    if result.numel():
        codes, scales = (x, x_scales) if x_scales is not None else quantized(run, x, block, "ue8m0", "official")
        product(run, Operand(codes, scales, 1, block), Operand(weight, weight_scales, block, block), result)
    return result


def linear_mxfp8(run: Run, codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """bf16 [tokens, n] of two pairs, each in either layout."""
    result = codes.new_empty((codes.shape[0], weight.shape[0]), dtype=torch.bfloat16)
    if result.numel():
        left = Operand(codes, _byte_rows(codes, scales), 1, GROUP)
        product(run, left, Operand(weight, _byte_rows(weight, weight_scales), 1, GROUP), result)
    return result


def project_groups(
    run: Run, o: Tensor, o_scales: Tensor | None, weight: Tensor, weight_scales: Tensor | None, scale: str, amax_floor: str
) -> Tensor:
    """bf16 [tokens, groups, rank]: bf16 times bf16, or codes of o, made here if there are none, times codes."""
    result = o.new_empty((*o.shape[:2], weight.shape[1]), dtype=torch.bfloat16)
    if not result.numel():
        return result
    if weight_scales is None and weight.numel() <= TILE and o.numel() <= INPUTS and not dispatch.batch_invariant():
        sums = torch.bmm(o.double().transpose(0, 1), weight.double().transpose(1, 2)).add_(0.0)
        return result.copy_(sums.float().transpose(0, 1))
    if weight_scales is not None and o_scales is None:
        o, o_scales = quantized(run, o, BLOCK, scale, amax_floor)
    for g in range(weight.shape[0]):
        left = Operand(o[:, g], None if o_scales is None else o_scales[:, g])
        right = Operand(weight[g], None if weight_scales is None else weight_scales[g], BLOCK)
        product(run, left, right, result[:, g])
    return result


def project_groups_pair(
    run: Run, o: Tensor, o_scales: Tensor | None, weight: Tensor, weight_scales: Tensor | None, scale_layout: str, rows: int, scale: str,
    amax_floor: str, pair_floor: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes uint8 [rows, groups * rank] and scales of `rows` rows in their layout, zero from the last token on."""
    z = project_groups(run, o, o_scales, weight, weight_scales, scale, amax_floor)
    parts = groups.quantize_fp8(run, z.flatten(1), GROUP, "ue8m0", "rows", pair_floor, "reciprocal")
    codes, scales = (pad(part, (0, 0, 0, rows - part.shape[0])) for part in parts)
    return codes, laid_out(scales, scale_layout)


def norm_quantize(run: Run, x: Tensor, weight: Tensor, eps: float, group: int, scale_layout: str, amax_floor: str) -> tuple[Tensor, Tensor]:
    """Codes uint8 and scales in their layout, of rows that are there."""
    floor, zeroes = _floor(x, amax_floor)
    codes, scales = run(norm_quantize_body, x, weight[None], floor, eps=fp32(eps), group=group, zeroes=zeroes)
    return codes, laid_out(scales, scale_layout)


def swiglu_quantize(
    run: Run, gate: Tensor, up: Tensor, limit: float | None, group: int, scale_layout: str, amax_floor: str
) -> tuple[Tensor, Tensor]:
    """As `norm_quantize`."""
    floor, zeroes = _floor(gate, amax_floor)
    bound = torch.full((), inf if limit is None else fp32(limit), dtype=torch.float64, device=gate.device)
    codes, scales = run(swiglu_quantize_body, gate, up, bound, floor, group=group, zeroes=zeroes)
    return codes, laid_out(scales, scale_layout)


def rotate_quantize(
    run: Run, o: Tensor, table: Tensor, positions: Tensor, heads_in: int, group: int, scale_layout: str, amax_floor: str
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [tokens, heads_in, width] and scales of so many groups of heads, group-major in any layout but rows."""
    floor, zeroes = _floor(o, amax_floor)
    codes, scales = (
        part.view(o.shape[0], heads_in, -1) for part in run(rotate_quantize_body, o, table, positions, floor, group=group, zeroes=zeroes)
    )
    return codes, scales if scale_layout == "rows" else laid_out(scales.transpose(0, 1), scale_layout).transpose(0, 1)


def numbers_body(codes: Tensor, factors: Tensor) -> Tensor:
    """fp64 [rows, columns] of uint8 codes and fp64 [rows, groups], columns of whole groups."""
    torch._check(factors.shape[0] == codes.shape[0])
    numbers = bits.decode_e4m3(codes.to(torch.int32)).double().view(codes.shape[0], factors.shape[1], -1)
    return (numbers * factors[:, :, None]).flatten(1)


def norm_quantize_body(x: Tensor, weight: Tensor, floor: Tensor, *, eps: float, group: int, zeroes: bool) -> tuple[Tensor, Tensor]:
    """Codes [tokens, n] and scale bytes [tokens, n/group] of bf16 rows and a weight [1, n]."""
    return _codes(rms_body(x, weight[0], eps=eps), floor, group, zeroes)


def swiglu_quantize_body(gate: Tensor, up: Tensor, limit: Tensor, floor: Tensor, *, group: int, zeroes: bool) -> tuple[Tensor, Tensor]:
    """The same of two bf16 matrices [tokens, n] and a limit, fp64 []."""
    torch._check(up.shape[0] == gate.shape[0])
    g = torch.minimum(widened(gate), limit)
    u = torch.maximum(torch.minimum(widened(up), limit), -limit)
    return _codes(rounded(g / (1 + torch.exp(-g)) * u), floor, group, zeroes)


def rotate_quantize_body(o: Tensor, table: Tensor, positions: Tensor, floor: Tensor, *, group: int, zeroes: bool) -> tuple[Tensor, Tensor]:
    """The same of bf16 [tokens, heads, dim]: codes [tokens, heads * dim]."""
    return _codes(rope_body(o, table, positions, inverse=True).flatten(1), floor, group, zeroes)


def product(run: Run, x: Operand, weight: Operand, result: Tensor) -> None:
    """Writes x times the weight transposed into bf16 [tokens, n], which may be strided."""
    (tokens, n), k, fixed = result.shape, x.numbers.shape[1], dispatch.batch_invariant()
    tall = max(INPUTS // k, 1)
    few = tokens < FEW and not fixed
    wide = min(-(-k // UNIT), TILE // UNIT) if few else max(TILE // min(n, ROWS) // UNIT, 1)  # in units
    height = TILE // (wide * UNIT)
    for first in range(0, tokens, tall):
        rows = _numbers(run, x, slice(first, first + tall), slice(0, k))
        turned = product_bodies.turned(rows, BLOCK_ROWS) if fixed else None
        for start in range(0, n, height):
            part = result[first : first + tall, start : start + height]
            sums = rows.new_zeros(part.shape if turned is None else (len(turned), part.shape[1], BLOCK_ROWS))
            for column in range(0, k, wide * UNIT):
                columns = slice(column, column + wide * UNIT)
                tile = _numbers(run, weight, slice(start, start + height), columns)
                if turned is None:
                    sums.addmm_(rows[:, columns], tile.t())
                else:
                    product_bodies.add_products(sums, tile, turned[:, columns])
            part.copy_((sums if turned is None else product_bodies.turned_back(sums, len(part))).float())


def quantized(run: Run, x: Tensor, group: int, scale: str, amax_floor: str) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., n] and scales [..., ceil(n/group)] of bf16 rows, whose last group may be partial."""
    n = x.shape[-1]
    whole = pad(x, (0, -n % group)) if n % group else x
    codes, scales = groups.quantize_fp8(run, whole, group, scale, "rows", amax_floor, "reciprocal")
    return codes[..., :n], scales


def laid_out(scales: Tensor, scale_layout: str) -> Tensor:
    """Scale bytes [..., rows, groups] in a layout; as fp32 numbers where it is mn_major."""
    ops = torch.ops.dsv4
    if scale_layout == "mn_major":
        scales = bits.decode_e8m0(scales.to(torch.int32))
    move = {"packed": ops.pack_ue8m0, "128x4": ops.swizzle_128x4, "mn_major": ops.align_mn_major}.get(scale_layout)
    return scales if move is None else move(scales, "eager")


def _codes(x: Tensor, floor: Tensor, group: int, zeroes: bool) -> tuple[Tensor, Tensor]:
    """Codes [tokens, n] and scale bytes [tokens, n/group] of bf16 rows."""
    grouped = x.float().unflatten(1, (x.shape[1] // group, group))  # inductor loses rows of a view that joins the free size with another
    stored, _, quotients = groups.scaled(grouped, floor, "fp8", "", False, zeroes)
    return bits.encode_e4m3(quotients).to(torch.uint8).flatten(1), stored[:, :, 0].to(torch.uint8)


def _floor(x: Tensor, amax_floor: str) -> tuple[Tensor, bool]:
    """The least byte of a scale, and whether byte 0 makes the codes zeros."""
    least = torch.full((), groups.floor_of("fp8", amax_floor), dtype=torch.int32, device=x.device)
    return least, groups.rule("fp8", amax_floor, "")["zeroes"]


def _byte_rows(codes: Tensor, words: Tensor) -> Tensor:
    """Words of a pair's scales as bytes [rows, groups]."""
    rows, count = codes.shape[0], -(-codes.shape[1] // GROUP)
    ops = torch.ops.dsv4
    result: Tensor = ops.unpack_ue8m0(words, count, "eager") if words.dim() == 2 else ops.unswizzle_128x4(words, rows, count, "eager")
    return result


def _numbers(run: Run, side: Operand, rows: slice, columns: slice) -> Tensor:
    """fp64 of rows and columns of an operand, those that there are. Columns begin with a group."""
    numbers, block = side.numbers[rows, columns], side.block
    if side.scales is None:
        return numbers.double()
    count, k = numbers.shape
    groups = slice(columns.start // block, -(-columns.stop // block))
    factors = _factors(side.scales[rows.start // side.height : -(-rows.stop // side.height), groups])
    if side.height > 1:
        factors = factors.repeat_interleave(side.height, 0)[rows.start % side.height :][:count]
    unit = block if run is run_eagerly else UNIT
    if k % unit:
        numbers, factors = pad(numbers, (0, -k % unit)), pad(factors, (0, -(-k // unit) * unit // block - factors.shape[1]))
    if run is run_eagerly:
        decoded = _tables(numbers.device)[0].index_select(0, numbers.reshape(-1).int())
        whole = decoded.view(count, -1, block).mul_(factors[:, :, None])
    else:
        whole = run(numbers_body, numbers.reshape(-1, unit), factors.reshape(-1, unit // block))
    return whole.view(count, -1)[:, :k]


def _factors(scales: Tensor) -> Tensor:
    """fp64 of E8M0 bytes, or of fp32 numbers."""
    if scales.dtype == torch.float32:
        return scales.double()
    return _tables(scales.device)[1].index_select(0, scales.reshape(-1).int()).view(scales.shape)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """What E4M3 and E8M0 codes stand for, in fp64."""
    powers = [2.0 ** (code - E8M0.bias) for code in range(E8M0_NAN)]
    with torch.inference_mode(False):  # they outlive the call
        codes = torch.arange(256, dtype=torch.int32, device=device)
        return bits.decode_e4m3(codes).double(), torch.tensor([*powers, nan], dtype=torch.float64, device=device)
