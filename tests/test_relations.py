"""Relations between functions, of both implementations: what a producer writes is what the converters make of it, a way there and back is
the identity, quantising twice is quantising once, no code saturates, a row does not depend on the rows around it."""

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
import dsv4.reference.routing
import dsv4.reference.scales
from dsv4.fast import use
from dsv4.formats import E2M1, E4M3, SCALE_LAYOUTS
from dsv4.parity import strategies
from dsv4.parity.compare import compare_bytes
from dsv4.parity.components.scales import in_columns, tall, whole_columns
from dsv4.types import ScaleLayout

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
@pytest.mark.parametrize("groups", [1, 4, 7])
@pytest.mark.parametrize("rows", [1, 5, 130, 256])
def test_layouts_are_what_the_table_says(quantization: ModuleType, scales: ModuleType, rows: int, groups: int) -> None:
    assert set(SCALE_LAYOUTS) == set(ScaleLayout)
    exponents = torch.randint(-10, 100, (rows, groups), generator=torch.Generator().manual_seed(rows + groups))
    x = torch.ldexp(torch.ones(rows, groups), exponents).repeat_interleave(32, -1)
    r, g = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
    names = {"rows": rows, "groups": groups, "r": r, "g": g, "align": lambda size, multiple: -(-size // multiple) * multiple}
    for name, layout in SCALE_LAYOUTS.items():
        for dtype in layout.dtypes:
            scale = "fp32" if dtype == "float32" else "ue8m0"
            plain = quantization.quantize_fp8(x, 32, scale=scale).scales
            placed = quantization.quantize_fp8(x, 32, scale=scale, scale_layout=name).scales
            assert placed.dtype is getattr(torch, dtype)
            assert tuple(placed.shape) == eval(layout.shape, names)
            assert placed.stride() == eval(layout.strides, names)
            found = (placed if scale == "fp32" or name == "rows" else placed.long())[eval(layout.place, names)]
            if placed.dtype is torch.int32:
                found = (found >> 8 * (g % 4) & 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)
            same(plain, found)


@both
@pytest.mark.parametrize("rows", [1, 129, 1000, 4100, 16384])
def test_producers_and_converters_agree_and_pads_reach_nothing(quantization: ModuleType, scales: ModuleType, rows: int) -> None:
    """M 10 row 11, K 512 in groups of 32: NaN in every pad row of a converted layout changes no scale and no number."""
    generator = torch.Generator().manual_seed(rows)
    spread = torch.randint(-20, 20, (rows, 16, 1), generator=generator)
    x = torch.ldexp(torch.randn(rows, 16, 32, generator=generator), spread).flatten(1).bfloat16()
    plain = quantization.quantize_fp8(x, 32)
    numbers_of_rows = quantization.dequantize(*plain, 32)
    packed, tiles = scales.pack_ue8m0(plain.scales), scales.swizzle_128x4(plain.scales)
    row_of = torch.arange(128 * len(tiles)).view(-1, 1, 4, 32).mT  # of [tiles, words, 32, 4]
    nan_packed, nan_tiles = in_columns(packed), torch.where(row_of < rows, tiles, -1)
    for layout, converted, poisoned in (("packed", packed, nan_packed), ("128x4", tiles, nan_tiles)):
        placed = quantization.quantize_fp8(x, 32, scale_layout=layout)
        same(plain.codes, placed.codes)
        same(converted, placed.scales)
        same(numbers_of_rows, quantization.dequantize(placed.codes, poisoned, 32, scale_layout=layout))
    same(whole_columns(packed), whole_columns(scales.packed_from_128x4(nan_tiles, rows)))
    same(tiles, scales.packed_to_128x4(nan_packed))
    same(plain.scales, scales.unpack_ue8m0(nan_packed, 16))
    same(plain.scales, scales.unswizzle_128x4(nan_tiles, rows, 16))


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
        back, turned = turned, scales.utccp_rows(turned)
        same(whole_columns(back), whole_columns(scales.utccp_rows(turned, inverse=True)))
    same(packed, turned)


@both
@quick
@given(experts=st.integers(1, 3), pages=st.integers(1, 3), words=widths, seed=seeds)
def test_hopper_there_and_back(quantization: ModuleType, scales: ModuleType, experts: int, pages: int, words: int, seed: int) -> None:
    codes = strategies.random_bits((experts, 64 * pages, 4 * words), seed, torch.float8_e8m0fnu)
    same(codes, scales.deinterleave_hopper_fp4(scales.interleave_hopper_fp4(codes)))


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


GENERATOR = torch.Generator().manual_seed(54955)
FIVE = torch.randn(5, 256, generator=GENERATOR).bfloat16()
GARBAGE = torch.stack([torch.full((256,), torch.nan), torch.full((256,), torch.inf), torch.full((256,), -3e38)]).bfloat16()
GATE, BIAS = torch.randn(64, 256, generator=GENERATOR).bfloat16(), torch.randn(64, generator=GENERATOR) / 8
TABLE = torch.randint(0, 64, (8, 6), generator=GENERATOR)
BATCHES: dict[str, list[list[int]]] = {
    "1 + 4": [[0], [1, 2, 3, 4]],
    "2 + 3": [[0, 1], [2, 3, 4]],
    "permuted": [[3, 1, 4, 0, 2]],
    "padded to 8": [[0, 1, 2, 3, 4, 5, 6, 7]],  # 5 to 7 are garbage
}


def of_rows(side: Any, rows: list[int], device: str) -> list[Tensor]:
    """Everything that the router and the quantisers make of some of the rows; the first dimension is theirs."""
    x = torch.cat([FIVE, GARBAGE])[rows].to(device)
    quantization, routing = side.quantization, side.routing
    logits = routing.gate_logits(x, GATE.to(device))
    by_token = {"token_ids": torch.tensor(rows, device=device), "table": TABLE.to(device)}
    made: list[Tensor] = [logits]
    for layer in ({"bias": BIAS.to(device)}, by_token):
        made += routing.route(logits, 6, scale=1.5, **layer)[:2]
    fp8, fp8_fp32 = quantization.quantize_fp8(x, 32), quantization.quantize_fp8(x, 128, scale="fp32")
    mxfp4, fp4_e4m3 = quantization.quantize_mxfp4(x, 32), quantization.quantize_fp4_e4m3(x, 16)
    made += [*fp8, *fp8_fp32, *mxfp4, *fp4_e4m3, quantization.dequantize(*fp8, 32), quantization.dequantize(*mxfp4, 32)]
    return [*made, *(quantization.fake_quantize(x, 32, format=format) for format in ("fp8", "mxfp4", "fp4_e4m3"))]


@pytest.mark.parametrize(
    ("side", "impl", "device"),
    [
        pytest.param(dsv4.reference, None, "cpu", id="reference"),
        pytest.param(dsv4.fast, "eager", "cpu", id="eager"),
        pytest.param(dsv4.fast, "inductor", "cpu", id="inductor"),
        pytest.param(dsv4.fast, None, "cuda", id="cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
    ],
)
def test_dt_01_rows_do_not_depend_on_their_batch(side: ModuleType, impl: str | None, device: str) -> None:
    with use(impl, batch_invariant=True):
        together = of_rows(side, [0, 1, 2, 3, 4], device)
        for batches in BATCHES.values():
            for rows in batches:
                live = [row for row in rows if row < 5]
                for whole, part in zip(together, of_rows(side, rows, device), strict=True):
                    same(whole[live], part[: len(live)])
