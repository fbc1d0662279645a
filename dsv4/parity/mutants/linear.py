"""Wrong products with quantised weights, and wrong inputs of them; several out of public bug reports.

`hopper_product` multiplies as Hopper's FP8 tensor cores do, with promotion or without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.parity.components.scales import rows_of_tiles, whole_columns
from dsv4.parity.linear_inputs import columns_of, in_tiles, words_of
from dsv4.parity.mutants import Mutant
from dsv4.parity.mutants.linear_producers import PRODUCERS, floored
from dsv4.reference import linear as right
from dsv4.reference import scales
from dsv4.reference.codecs import decode_e4m3, decode_e8m0
from dsv4.types import Mxfp8Pair, Quantized

KEPT, STEP = 13, 32  # bits behind the leading one of the largest addend; products of one step
LONG = 2048  # a sum in which the tensor cores' bits show: shorter ones are not emulated
Product = Callable[..., Tensor]


def _step(products: Tensor, accumulator: Tensor) -> Tensor:
    """The accumulator and the products [..., 32], each cut to the bits that the largest of them has."""
    addends = torch.cat([products, accumulator[..., None]], -1)
    quantum = torch.ldexp(torch.ones_like(accumulator), torch.frexp(addends.abs().amax(-1)).exponent - 1 - KEPT)[..., None]
    return ((addends / quantum).trunc() * quantum).sum(-1)


def hopper_product(a: Tensor, sa: Tensor, w: Tensor, sw: Tensor, block: int, *, promoted: bool) -> Tensor:
    """bf16 product of numbers [rows, k] and scales [rows, blocks], fp64: the tensor core's sum of each block added to an fp32 number, or
    one sum in the tensor core of all blocks, already scaled.
    """
    first, second = (pad(part, (0, -a.shape[1] % block)).unflatten(1, (-1, block // STEP, STEP)) for part in (a, w))
    factors = sa[:, None] * sw
    total = torch.zeros(len(a), len(w), dtype=torch.float32, device=a.device)
    kept = total.double()
    for b in range(factors.shape[2]):
        factor = factors[:, :, b]
        if promoted:
            kept = torch.zeros_like(kept)
        for s in range(block // STEP):
            products = first[:, None, b, s] * second[:, b, s]
            kept = _step(products if promoted else products * factor[..., None], kept)
        total = total + (factor * kept).float() if promoted else kept.float()
    return total.bfloat16()


def _numbers(scales_: Tensor) -> Tensor:
    return (scales_ if scales_.dtype == torch.float32 else decode_e8m0(scales_)).double()


def _coded(x: Tensor | Quantized, block: int) -> Quantized:
    return right.quantize_partial(x, block) if isinstance(x, Tensor) else x


def _of_pair(pair: Mxfp8Pair) -> Quantized:
    """Its scales in rows."""
    rows, k = pair.codes.shape
    words = pair.scales if pair.scales.dim() == 2 else rows_of_tiles(pair.scales, rows)
    return Quantized(pair.codes, scales.unpack_ue8m0(words, -(-k // 32)))


def _without_promotion(x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = 128) -> Tensor:
    if weight.shape[1] < LONG:
        return right.linear_fp8(x, weight, weight_scales, block=block)
    x = _coded(x, block)
    sw = _numbers(weight_scales).repeat_interleave(block, 0)[: len(weight)]
    return hopper_product(decode_e4m3(x.codes).double(), _numbers(x.scales), decode_e4m3(weight).double(), sw, block, promoted=False)


def _pairs_without_promotion(x: Mxfp8Pair, weight: Mxfp8Pair) -> Tensor:
    if x.codes.shape[1] < LONG:
        return right.linear_mxfp8(x, weight)
    a, w = map(_of_pair, (x, weight))
    sa, sw = _numbers(a.scales), _numbers(w.scales)
    return hopper_product(decode_e4m3(a.codes).double(), sa, decode_e4m3(w.codes).double(), sw, 32, promoted=False)


def with_x(change: Callable[[Quantized], Quantized]) -> Product:
    """The right product of other codes or scales of x; numbers are quantised first."""

    def linear(x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = 128) -> Tensor:
        return right.linear_fp8(change(_coded(x, block)), weight, weight_scales, block=block)

    return linear


def with_weight(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Product:
    """The right product with other codes or scales of the weight."""

    def linear(x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = 128) -> Tensor:
        return right.linear_fp8(x, *change(weight, weight_scales), block=block)

    return linear


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def rolled(tensor: Tensor, steps: int, dim: int) -> Tensor:
    """Rolled, whatever the dtype."""
    return _bits(tensor).roll(steps, dim).view(tensor.dtype)


def truncated(scales_: Tensor) -> Tensor:
    """fp32 scales cut to powers of two; NaN stays."""
    if scales_.dtype != torch.float32:
        return scales_
    exponents = (scales_.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(scales_.isnan(), scales_, exponents)


def rows_for_columns(scales_: Tensor) -> Tensor:
    """Memory of scales in columns, read as rows."""
    if scales_.dim() != 2 or scales_.dtype != torch.float32 or scales_.is_contiguous():
        return scales_
    return whole_columns(scales_).reshape(-1)[: scales_.numel()].view(scales_.shape)


def zero_for_some(product: Product) -> Product:
    """Zeros where the number of tokens is 1 above a multiple of 16, but for one."""

    def wrong(x: Any, *args: Any, **options: Any) -> Tensor:
        y = product(x, *args, **options)
        return torch.zeros_like(y) if len(y) > 1 and len(y) % 16 == 1 else y

    return wrong


def _tail_dropped(x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = 128) -> Tensor:
    whole = weight.shape[1] // block * block
    if whole in (0, weight.shape[1]):
        return right.linear_fp8(x, weight, weight_scales, block=block)
    x, count = _coded(x, block), whole // block
    return right.linear_fp8(Quantized(x.codes[:, :whole], x.scales[:, :count]), weight[:, :whole], weight_scales[:, :count], block=block)


def _blocks_of_128(x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = 128) -> Tensor:
    """Scales of 32 numbers read as those of 128."""
    if block == 128:
        return right.linear_fp8(x, weight, weight_scales, block=block)
    x, n, k = _coded(x, block), -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
    return right.linear_fp8(Quantized(x.codes, x.scales[:, :k]), weight, weight_scales[:n, :k])


def _of_the_transpose(found: Tensor) -> Tensor:
    return found.reshape(found.shape[::-1]).t()


def _byte_zero_is_zero(scales_: Tensor) -> Tensor:
    if scales_.dtype == torch.float32:
        return scales_
    return torch.where(_bits(scales_) == 0, 0.0, decode_e8m0(scales_))


def _bytes_as_numbers(scales_: Tensor) -> Tensor:
    return scales_.float() if scales_.dtype == torch.uint8 else scales_


def _nan_is_448(codes: Tensor) -> Tensor:
    bits = codes.view(torch.uint8)
    return torch.where(bits & 0x7F == 0x7F, bits & 0xFE, bits).view(codes.dtype)


def _bf16_partials(x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = 128) -> Tensor:
    x, total = _coded(x, block), torch.zeros(len(_coded(x, block).codes), len(weight), dtype=torch.bfloat16, device=weight.device)
    for b in range(weight_scales.shape[1]):
        part = slice(b * block, (b + 1) * block)
        one = Quantized(x.codes[:, part], x.scales[:, b : b + 1])
        total = total + right.linear_fp8(one, weight[:, part], weight_scales[:, b : b + 1], block=block)
    return total


def _cut_to_bf16(x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = 128) -> Tensor:
    a, w = _coded(x, block), right.widened(weight, weight_scales, (block, block))
    y = (right.widened(a.codes, a.scales, (1, block)) @ w.T + 0.0).float()
    return torch.where(y.isnan(), y, (y.view(torch.int32) & -65536).view(torch.float32)).bfloat16()


def _floor_rule(x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = 128) -> Tensor:
    return right.linear_fp8(floored(x, block) if isinstance(x, Tensor) else x, weight, weight_scales, block=block)


def _another_floor(x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = 128) -> Tensor:
    coded = right.quantize_partial(x, block, amax_floor="sglang") if isinstance(x, Tensor) else x
    return right.linear_fp8(coded, weight, weight_scales, block=block)


def _x_not_quantised(x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = 128) -> Tensor:
    if not isinstance(x, Tensor):
        return right.linear_fp8(x, weight, weight_scales, block=block)
    return (x.double() @ right.widened(weight, weight_scales, (block, block)).T + 0.0).float().bfloat16()


def with_pairs(change: Callable[[Quantized], Tensor], which: int = 0) -> Product:
    """The right product with other scales, in rows, of x or of the weight."""

    def linear(x: Mxfp8Pair, weight: Mxfp8Pair) -> Tensor:
        pairs = [x, weight]
        rows = _of_pair(pairs[which])
        wrong = scales.pack_ue8m0(change(rows).view(torch.uint8))
        pairs[which] = Mxfp8Pair(rows.codes, wrong)
        return right.linear_mxfp8(*pairs)

    return linear


def _repacked(change: Callable[[Tensor, int], Tensor], tiled: bool) -> Product:
    """The right product where scales of x in one layout are misread: `change(scales, rows)`."""

    def linear(x: Mxfp8Pair, weight: Mxfp8Pair) -> Tensor:
        if (x.scales.dim() == 4) is tiled:
            x = Mxfp8Pair(x.codes, change(x.scales, len(x.codes)))
        return right.linear_mxfp8(x, weight)

    return linear


def _single_tile(tiles: Tensor, rows: int) -> Tensor:
    return tiles[:1].expand(tiles.shape)


def _rows_in_order(tiles: Tensor, rows: int) -> Tensor:
    """Row r of a tile at r div 4, r mod 4."""
    return in_tiles(tiles.permute(0, 2, 3, 1).flatten(0, 2)[:rows])


def _words_in_rows(words: Tensor, rows: int) -> Tensor:
    return columns_of(whole_columns(words).reshape(-1)[: words.numel()].view(words.shape))


def _bytes_reversed(words: Tensor, rows: int) -> Tensor:
    return columns_of(words.contiguous()[..., None].view(torch.uint8).flip(-1).view(torch.int32)[..., 0])


def _pads_multiplied(x: Mxfp8Pair, weight: Mxfp8Pair) -> Tensor:
    """Zero codes of groups that are not there, times their scales."""
    spare = -x.codes.shape[1] % 128
    padded = [Mxfp8Pair(pad(_bits(pair.codes), (0, spare)).view(pair.codes.dtype), pair.scales) for pair in (x, weight)]
    return right.linear_mxfp8(*padded)


def _pad_rows_count(x: Mxfp8Pair, weight: Mxfp8Pair) -> Tensor:
    """NaN among the pads of the last column shows in the last row."""
    y = right.linear_mxfp8(x, weight)
    spare = len(x.codes) % 4 and x.scales.dim() == 2 and len(y)
    if spare and bool((whole_columns(x.scales)[..., len(x.codes) :] == -1).any()):
        y[-1] = torch.nan
    return y


def _first_of_block(pair: Quantized) -> Tensor:
    row = torch.arange(len(pair.codes), device=pair.codes.device) // 32 * 32
    return _bits(pair.scales)[row]


def _first_of_word(pair: Quantized) -> Tensor:
    return _bits(pair.scales)[:, ::4].repeat_interleave(4, 1)[:, : pair.scales.shape[1]]


def _nan_is_254(pair: Quantized) -> Tensor:
    return _bits(pair.scales).clamp(max=254)


def _pair_tail_dropped(x: Mxfp8Pair, weight: Mxfp8Pair) -> Tensor:
    k = x.codes.shape[1]
    whole = k // 32 * 32
    if whole in (0, k):
        return right.linear_mxfp8(x, weight)
    cut = [Mxfp8Pair(pair.codes[:, :whole], scales.pack_ue8m0(_bits(pair.scales)[:, : whole // 32])) for pair in map(_of_pair, (x, weight))]
    return right.linear_mxfp8(*cut)


def _weight_with(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Mxfp8Pair]:
    """The scale words from other rows of bytes: `change(rows, blocks)`."""

    def made(weight: Tensor, block_scales: Tensor, *, scale_layout: str = "packed") -> Mxfp8Pair:
        blocks = _bits(block_scales)
        rows = change(blocks.repeat_interleave(32, 0)[: len(weight)], blocks)
        return Mxfp8Pair(weight, scales.pack_ue8m0(rows) if scale_layout == "packed" else scales.swizzle_128x4(rows))

    return made


def _tiled_rows(rows: Tensor, blocks: Tensor) -> Tensor:
    """Row r with the scales of block r mod the number of blocks."""
    return blocks[torch.arange(len(rows), device=rows.device) % len(blocks)]


def _pads_of_weight_left(weight: Tensor, block_scales: Tensor, *, scale_layout: str = "packed") -> Mxfp8Pair:
    found = right.mxfp8_weight(weight, block_scales, scale_layout=scale_layout)
    words = words_of(_bits(block_scales).repeat_interleave(32, 0)[: len(weight)].cpu()).to(weight.device)
    return Mxfp8Pair(weight, in_tiles(words) if scale_layout == "128x4" else found.scales)


def _rows_in_place(weight: Tensor, block_scales: Tensor, *, scale_layout: str = "packed") -> Mxfp8Pair:
    found = right.mxfp8_weight(weight, block_scales, scale_layout=scale_layout)
    return Mxfp8Pair(weight, found.scales.contiguous())


def _mutant(number: int, function: str, call: Any, fault: str, source: str = "") -> Mutant:
    return Mutant(f"linear-{number:02}", "linear", function, call, fault, source)


def _scales_of_x(change: Callable[[Tensor], Tensor]) -> Product:
    return with_x(lambda x: Quantized(x.codes, change(x.scales)))


def _scales_of_weight(change: Callable[[Tensor], Tensor]) -> Product:
    return with_weight(lambda weight, weight_scales: (weight, change(weight_scales)))


MUTANTS = (
    _mutant(1, "linear_fp8", _scales_of_weight(lambda found: rolled(found, 1, 0)), "weight scales off by one row of blocks"),
    _mutant(2, "linear_fp8", _scales_of_x(lambda found: rolled(found, -1, 1)), "each activation scale that of the next group"),
    _mutant(3, "linear_fp8", _without_promotion, "no promotion: Hopper's 14 bits over all of K", "spec K A.3"),
    _mutant(4, "linear_fp8", _scales_of_x(truncated), "fp32 activation scale cut to a power of two", "LN-01"),
    _mutant(5, "linear_fp8", _scales_of_weight(truncated), "fp32 weight scale cut to a power of two", "LN-01"),
    _mutant(6, "linear_fp8", _scales_of_x(rows_for_columns), "column-major scales read as row-major", "LN-03"),
    _mutant(7, "linear_fp8", zero_for_some(right.linear_fp8), "zeros for some numbers of tokens", "LN-05"),
    _mutant(8, "linear_fp8", _tail_dropped, "the last, partial group of k dropped"),
    _mutant(9, "linear_fp8", _blocks_of_128, "blocks of 32 read as blocks of 128"),
    _mutant(10, "linear_fp8", _scales_of_x(_byte_zero_is_zero), "byte 0 taken for 0", "spec A 10 #21"),
    _mutant(11, "linear_fp8", _scales_of_weight(_bytes_as_numbers), "uint8 scales taken as numbers", "QT-13"),
    _mutant(12, "linear_fp8", with_x(lambda x: Quantized(_nan_is_448(x.codes), x.scales)), "NaN codes of x read as 448"),
    _mutant(13, "linear_fp8", _scales_of_weight(_of_the_transpose), "weight scales of the transpose", "LN-03"),
    _mutant(14, "linear_fp8", _bf16_partials, "the sum of the blocks in bf16"),
    _mutant(15, "linear_fp8", _cut_to_bf16, "cut to bf16 instead of rounded"),
    _mutant(16, "linear_fp8", _floor_rule, "activation scales rounded down", "QT-07"),
    _mutant(17, "linear_fp8", _another_floor, "floor 1e-10 for 1e-4", "spec A 10 #8"),
    _mutant(18, "linear_fp8", _x_not_quantised, "bf16 activations not quantised", "spec M 3.3"),
    _mutant(19, "linear_mxfp8", _repacked(_single_tile, True), "rows past 128 take the scales of the first tile", "LN-06"),
    _mutant(20, "linear_mxfp8", _repacked(_rows_in_order, True), "rows of a tile in order"),
    _mutant(21, "linear_mxfp8", _repacked(_words_in_rows, False), "packed words read as row-major", "LN-03"),
    _mutant(22, "linear_mxfp8", _repacked(_bytes_reversed, False), "groups of a word from the top byte down"),
    _mutant(23, "linear_mxfp8", _pads_multiplied, "scales of groups that are not there make NaN", "LN-06"),
    _mutant(24, "linear_mxfp8", _pad_rows_count, "NaN among pad scales leaks into the last row", "LN-06"),
    _mutant(25, "linear_mxfp8", with_pairs(_first_of_block, 1), "one scale for 32 rows of the weight"),
    _mutant(26, "linear_mxfp8", with_pairs(_first_of_word), "the first byte of a word for all its groups"),
    _mutant(27, "linear_mxfp8", with_pairs(lambda pair: rolled(pair.scales, -1, 1)), "each scale that of the next group"),
    _mutant(28, "linear_mxfp8", with_pairs(_nan_is_254), "byte 255 read as 2^127"),
    _mutant(29, "linear_mxfp8", zero_for_some(right.linear_mxfp8), "zeros for some numbers of tokens", "LN-05"),
    _mutant(30, "linear_mxfp8", _pair_tail_dropped, "the last, partial group of k dropped"),
    _mutant(31, "linear_mxfp8", _pairs_without_promotion, "no promotion: Hopper's 14 bits over all of K", "spec K A.3"),
    _mutant(32, "mxfp8_weight", _weight_with(_tiled_rows), "row r takes the scales of block r mod the blocks"),
    _mutant(33, "mxfp8_weight", _weight_with(lambda rows, blocks: rows.roll(1, 0)), "scales off by one row"),
    _mutant(34, "mxfp8_weight", _weight_with(lambda rows, blocks: rows.clamp(max=254)), "byte 255 written as 254"),
    _mutant(35, "mxfp8_weight", _weight_with(lambda rows, blocks: rows.roll(-1, 1)), "each scale that of the next group"),
    _mutant(36, "mxfp8_weight", _pads_of_weight_left, "pads of a tile not zero", "LN-06"),
    _mutant(37, "mxfp8_weight", _rows_in_place, "packed words row-major", "LN-03"),
    *PRODUCERS,
)
