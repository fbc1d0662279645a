"""Relations between functions, of both implementations: what a producer writes is what the converters make of it, a way there and back is
the identity, quantising twice is quantising once, no code saturates."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dsv4.fast
import dsv4.reference.quantization
import dsv4.reference.scales
from dsv4.formats import E2M1, E4M3
from dsv4.parity import strategies
from dsv4.parity.compare import compare_bytes
from dsv4.parity.components.scales import in_columns, tall, whole_columns

PAIRS = {
    "reference": (dsv4.reference.quantization, dsv4.reference.scales),
    "fast": (dsv4.fast.quantization, dsv4.fast.scales),
}
quick = settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
seeds, widths = strategies.seeds(), st.integers(1, 9)
both = pytest.mark.parametrize(("quantization", "scales"), PAIRS.values(), ids=PAIRS)


def same(expected: Tensor, actual: Tensor) -> None:
    comparison = compare_bytes(expected, actual)
    assert comparison.ok, comparison.reason


def numbers(rows: int, groups: int, group: int, seed: int, target: Any = E4M3, classes: Any = tuple(strategies.VALUE_CLASSES)) -> Tensor:
    return strategies.values(classes, (rows, groups * group), group, seed, torch.bfloat16, target)


@both
@pytest.mark.parametrize(("layout", "relaid"), [("packed", "pack_ue8m0"), ("128x4", "swizzle_128x4"), ("mn_major", "align_mn_major")])
@quick
@given(rows=tall(300), groups=widths, seed=seeds)
def test_producers_write_what_converters_make(
    quantization: ModuleType, scales: ModuleType, layout: str, relaid: str, rows: int, groups: int, seed: int
) -> None:
    x, scale = numbers(rows, groups, 32, seed), "fp32" if layout == "mn_major" else "ue8m0"
    plain = quantization.quantize_fp8(x, 32, scale=scale)
    placed = quantization.quantize_fp8(x, 32, scale=scale, scale_layout=layout)
    convert: Callable[[Tensor], Tensor] = getattr(scales, relaid)
    same(plain.codes, placed.codes)
    same(convert(plain.scales), placed.scales)
    if layout != "128x4":
        same(whole_columns(convert(plain.scales)), whole_columns(placed.scales))


@both
@quick
@given(rows=tall(300), words=widths, live=st.integers(0, 300), seed=seeds)
def test_zeroing_rows_commutes_with_the_layout(
    quantization: ModuleType, scales: ModuleType, rows: int, words: int, live: int, seed: int
) -> None:
    packed, live = in_columns(strategies.random_bits((rows, words), seed, torch.int32)), min(live, rows)
    zeroed = scales.zero_pad_rows(packed, live, scale_layout="packed")
    tiles = scales.packed_to_128x4(packed)
    same(scales.packed_to_128x4(zeroed), scales.zero_pad_rows(tiles, live, scale_layout="128x4"))
    same(scales.restride_rows(packed[:live], rows), zeroed)


@both
@quick
@given(rows=tall(300), groups=widths, seed=seeds)
def test_there_and_back(quantization: ModuleType, scales: ModuleType, rows: int, groups: int, seed: int) -> None:
    codes = strategies.random_bits((rows, groups), seed, torch.float8_e8m0fnu)
    packed, tiles = scales.pack_ue8m0(codes), scales.swizzle_128x4(codes)
    same(codes, scales.unpack_ue8m0(packed, groups))
    same(codes, scales.unswizzle_128x4(tiles, rows, groups))
    same(codes, scales.unswizzle_128x4(tiles.view(torch.uint8).flatten(), rows, groups))
    same(tiles, scales.packed_to_128x4(packed))
    same(packed, scales.packed_from_128x4(tiles, rows))
    same(packed, scales.restride_rows(packed, rows + 5)[:rows])


@both
@quick
@given(pages=st.integers(1, 3), words=widths, seed=seeds)
def test_seven_page_transpositions_are_none(quantization: ModuleType, scales: ModuleType, pages: int, words: int, seed: int) -> None:
    """A page's row number has seven bits, and a transposition rotates them by two."""
    packed = turned = in_columns(strategies.random_bits((pages * 128, words), seed, torch.int32))
    for _ in range(7):
        turned = scales.utccp_rows(turned)
    same(packed, turned)


@both
@pytest.mark.parametrize(("format", "quantise"), [("fp8", "quantize_fp8"), ("mxfp4", "quantize_mxfp4"), ("fp4_e4m3", "quantize_fp4_e4m3")])
@quick
@given(rows=tall(200), groups=widths, seed=seeds)
def test_fake_quantisation(
    quantization: ModuleType, scales: ModuleType, format: str, quantise: str, rows: int, groups: int, seed: int
) -> None:
    """It is codes and back; and once more changes nothing where scales are powers of two."""
    x = numbers(rows, groups, 32, seed, E4M3 if format == "fp8" else E2M1)
    once = quantization.fake_quantize(x, 32, format=format)
    same(once.nan_to_num(nan=1.0), quantization.dequantize(*getattr(quantization, quantise)(x, 32), 32).nan_to_num(nan=1.0))
    finite = once.isfinite().unflatten(-1, (-1, 32)).all(-1, keepdim=True).expand(-1, -1, 32).flatten(-2)
    if format != "fp4_e4m3":
        same(once[finite], quantization.fake_quantize(once, 32, format=format)[finite])


@both
@quick
@given(rows=tall(200), groups=widths, seed=seeds)
def test_no_code_saturates(quantization: ModuleType, scales: ModuleType, rows: int, groups: int, seed: int) -> None:
    """No finite group has a NaN code, nor a number above 448 of its scale."""
    x = numbers(rows, groups, 32, seed, classes=strategies.FINITE_CLASSES)
    codes, exponents = quantization.quantize_fp8(x, 32, amax_floor="none")
    assert not bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any())
    powers = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents.view(torch.uint8).int() - 127)
    assert bool((x.double().abs() <= E4M3.max * powers.repeat_interleave(32, -1)).all())
