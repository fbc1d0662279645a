"""Reference quantisers against golden vectors, a numpy oracle written from the specification, tile_kernels and reported bugs.

Bugs that are not the quantisers' or not only theirs: `NOT_OURS`.
"""

import math
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4.reference import codecs, numerics, quantization, scales
from dsv4.types import ArgumentError
from oracles import tile_kernels_module

NOT_OURS = {
    "QT-03": "a codec: test_codecs",
    "QT-05": "a codec: test_codecs",
    "QT-14": "which name a checkpoint gives its scales is the loader's; here, a missing scale",
    "QT-17": "refusing a linear scale in a product is the linear layer's; here, the axis and dequantising",
    "LN-01": "the product is the linear layer's; here, the scale",
    "LN-05": "the product is the linear layer's; here, the activation's codes and scales",
    "LN-06": "a layout: test_scales",
    "KV-05": "a codec: test_codecs",
}

GOLDEN = load_file(Path(__file__).parent / "golden" / "functions.safetensors")
EVERY_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
NEGATIVE_ZERO = -0.0

FP8_FLOORS = {"official": 1e-4, "sglang": 1e-10, "sglang_packer": 1e-8, "flashmla": 1e-4, "none": 0, "flashinfer": 0}
FP4_FLOORS = {"official_fp4": 6 * 2.0**-126, "official": 1e-4, "flashmla": 1e-4, "none": 0}


def bits(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = (side.reshape(-1).contiguous().view(torch.uint8) for side in (left, right))
    return torch.equal(left, right)


def spread_of(kind: int) -> torch.Tensor:
    """[64, 512] fp32: groups of every magnitude that fp32 has, with specials in some."""
    generator = torch.Generator().manual_seed(kind)
    x = torch.randn(64, 512, generator=generator) * 2.0 ** torch.randint(-140, 120, (64, 1), generator=generator)
    x[1::16, 3] = math.nan
    x[2::16, 5] = -math.inf
    x[3::16, ::2] = NEGATIVE_ZERO
    x[4::16] = 0
    return x


def oracle_byte(amax: np.ndarray, limit: float) -> np.ndarray:
    """The least b >= 0 with limit 2^(b - 127) >= amax, from the parts of both numbers: m 2^e with m in [1/2, 1)."""
    m, e = np.frexp(np.where(np.isfinite(amax), amax, 1).astype(np.float64))
    limit_m, limit_e = math.frexp(limit)
    byte = np.where(amax == 0, 0, e - limit_e + (m > limit_m) + 127).clip(0)
    return np.where(np.isfinite(amax), byte, 255).astype(np.uint8)


def oracle_groups(x: torch.Tensor, group: int) -> tuple[np.ndarray, np.ndarray]:
    grouped = x.float().numpy().reshape(*x.shape[:-1], -1, group)
    return grouped, np.abs(grouped).max(-1)


@np.errstate(all="ignore")
def oracle_e4m3(quotients: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(quotients), 0x7F, quotients.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@np.errstate(all="ignore")
def oracle_e2m1(quotients: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(quotients), 0, np.nan_to_num(quotients).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


@np.errstate(invalid="ignore")
def oracle_fp8(x: torch.Tensor, group: int, floor: str) -> tuple[np.ndarray, np.ndarray]:
    grouped, amax = oracle_groups(x, group)
    value = np.float64(np.float32(FP8_FLOORS[floor]))
    byte = oracle_byte(np.maximum(amax, value * (448 if floor == "flashmla" else 1)), 448)
    inverse = np.where(byte == 255, np.nan, 2.0 ** (127 - byte.astype(np.float64)))
    if floor == "flashinfer":
        inverse = np.where(byte == 0, 0, inverse)
    return oracle_e4m3(grouped.astype(np.float64) * inverse[..., None]).reshape(x.shape), byte


@np.errstate(invalid="ignore")
def oracle_mxfp4(x: torch.Tensor, group: int, floor: str) -> tuple[np.ndarray, np.ndarray]:
    grouped, amax = oracle_groups(x, group)
    value = np.float64(np.float32(FP4_FLOORS[floor]))
    byte = oracle_byte(np.maximum(amax, value * (6 if floor == "flashmla" else 1)), 6)
    inverse = np.where(byte == 255, np.nan, 2.0 ** (127 - byte.astype(np.float64)))
    return oracle_e2m1(grouped.astype(np.float64) * inverse[..., None]).reshape(x.shape), byte


def as_group_of_two(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.zeros_like(x)], -1)


@pytest.mark.parametrize("floor", FP8_FLOORS)
@pytest.mark.parametrize(
    ("x", "group"), [(EVERY_BF16[:, None], 1), (spread_of(1), 32), (spread_of(2), 128)], ids=["every bf16", "32", "128"]
)
def test_fp8_equals_the_oracle(x, group, floor):
    got = quantization.quantize_fp8(x, group, amax_floor=floor)
    codes, byte = oracle_fp8(x, group, floor)
    assert np.array_equal(bits(got.codes).numpy(), codes)
    assert np.array_equal(bits(got.scales).numpy(), byte)


@pytest.mark.parametrize("floor", FP4_FLOORS)
@pytest.mark.parametrize(("x", "group"), [(as_group_of_two(EVERY_BF16), 2), (spread_of(3), 32)], ids=["every bf16", "32"])
def test_mxfp4_equals_the_oracle(x, group, floor):
    got = quantization.quantize_mxfp4(x, group, amax_floor=floor)
    codes, byte = oracle_mxfp4(x, group, floor)
    assert np.array_equal(codecs.unpack_fp4(got.codes).numpy(), codes)
    assert np.array_equal(bits(got.scales).numpy(), byte)


@pytest.mark.parametrize("floor", ["official", "sglang", "sglang_packer", "flashmla"])
@pytest.mark.parametrize("division", ["reciprocal", "divide"])
@pytest.mark.parametrize(("x", "group"), [(EVERY_BF16[:, None], 1), (spread_of(4), 128)], ids=["every bf16", "128"])
def test_fp32_scales_equal_ieee_arithmetic(x, group, division, floor):
    got = quantization.quantize_fp8(x, group, scale="fp32", amax_floor=floor, division=division)
    grouped, amax = oracle_groups(x, group)
    value = np.float32(FP8_FLOORS[floor])
    with np.errstate(all="ignore"):
        bounded = amax if floor == "flashmla" else np.maximum(amax, value)
        scale = bounded * np.float32(1 / 448) if division == "reciprocal" else bounded / np.float32(448)
        scale = np.where(np.isfinite(amax), np.maximum(scale, value) if floor == "flashmla" else scale, np.float32(np.nan))
        codes = oracle_e4m3(grouped / scale[..., None]).reshape(x.shape)
    assert scale.dtype == np.float32
    assert np.array_equal(got.scales.numpy().view(np.int32), scale.view(np.int32))
    assert (got.scales[got.scales.isnan()].view(torch.int32) == 0x7FC00000).all()
    assert np.array_equal(bits(got.codes).numpy(), codes)


@pytest.mark.parametrize("division", ["reciprocal", "divide"])
@pytest.mark.parametrize(("x", "group"), [(as_group_of_two(EVERY_BF16), 2), (spread_of(5), 16)], ids=["every bf16", "16"])
def test_fp4_with_e4m3_scales_equals_the_oracle(x, group, division):
    got = quantization.quantize_fp4_e4m3(x, group, division=division)
    grouped, amax = oracle_groups(x, group)
    with np.errstate(all="ignore"):
        bounded = np.maximum(amax, np.float32(6 * 2.0**-9))
        quotient = bounded * np.float32(1 / 6) if division == "reciprocal" else bounded / np.float32(6)
        scale = oracle_e4m3(np.where(np.isfinite(amax), quotient, np.float32(np.nan)))
        codes = oracle_e2m1(grouped / scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[..., None]).reshape(x.shape)
    assert np.array_equal(bits(got.scales).numpy(), scale)
    assert np.array_equal(codecs.unpack_fp4(got.codes).numpy(), codes)


def test_where_the_two_divisions_differ():
    """FP32 scales by an ulp at 672; E4M3 scales only for an fp32 amax beside six times a midpoint, here 1.1875, and never for bf16."""
    x = torch.tensor([[672.0, 0.0]])
    assert [quantization.quantize_fp8(x, 2, scale="fp32", division=d).scales.item() for d in ("reciprocal", "divide")] == [
        1.5 + 2.0**-23,
        1.5,
    ]
    x = torch.tensor([[7.125 - 2.0**-21, 0.0]])
    assert [quantization.quantize_fp4_e4m3(x, 2, division=d).scales.float().item() for d in ("reciprocal", "divide")] == [1.25, 1.125]
    multiplied, divided = (quantization.quantize_fp4_e4m3(as_group_of_two(EVERY_BF16), 2, division=d) for d in ("reciprocal", "divide"))
    assert equal_bits(multiplied.scales, divided.scales)


@pytest.mark.parametrize(
    ("shape", "block"), [((160, 256), (32, 32)), ((200, 300), (128, 128)), ((5, 7), (2, 4)), ((64, 64), (1, 32)), ((0, 9), (8, 8))]
)
@pytest.mark.parametrize("scale", ["ue8m0", "fp32"])
def test_blocks_equal_a_loop_over_blocks(shape, block, scale):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * torch.arange(1, shape[1] + 1)
    got = quantization.quantize_fp8_blocks(weight, block, scale=scale)
    assert got.scales.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    back = quantization.dequantize(got.codes, got.scales, block, dtype=torch.float32)
    for i, j in np.ndindex(*got.scales.shape):
        rows, columns = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
        amax = weight[rows, columns].abs().amax()
        if scale == "ue8m0":
            assert bits(got.scales)[i, j] == oracle_byte(amax.numpy(), 448)
        else:
            assert got.scales[i, j] == amax * np.float32(1 / 448)
        factor = got.scales[i, j].float()
        assert equal_bits(bits(got.codes)[rows, columns], torch.from_numpy(oracle_e4m3((weight[rows, columns] / factor).numpy())))
        assert equal_bits(back[rows, columns], got.codes[rows, columns].float() * factor)


def test_amax_bytes_of_the_specification():
    """Spec A 12."""
    amax = [1e-4, 1e-3, 0.0546875, 0.05469, 0.5, 1, 1.75, 3.5, 3.5000002, 7, 448, 449]
    x = torch.tensor(amax)[:, None]
    assert bits(quantization.quantize_fp8(x, 1).scales).flatten().tolist() == [105, 109, 114, 115, 118, 119, 119, 120, 121, 121, 127, 128]
    on_scale = quantization.quantize_fp8(x, 1, amax_floor="flashmla").scales
    assert bits(on_scale).flatten().tolist() == [114, 114, 114, 115, 118, 119, 119, 120, 121, 121, 127, 128]


@pytest.mark.parametrize(
    ("floor", "fp8", "fp4"),
    [
        ("official", 105, 112),
        ("sglang", 85, None),
        ("sglang_packer", 92, None),
        ("flashmla", 114, 114),
        ("none", 0, 0),
        ("flashinfer", 0, None),
        ("official_fp4", None, 1),
    ],
)
def test_scale_of_a_zero_group(floor, fp8, fp4):
    zero = torch.zeros(2, 32)
    if fp8 is not None:
        assert bits(quantization.quantize_fp8(zero, 32, amax_floor=floor).scales).unique().tolist() == [fp8]
    if fp4 is not None:
        assert bits(quantization.quantize_mxfp4(zero, amax_floor=floor).scales).unique().tolist() == [fp4]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_golden_fp8(group):
    got = quantization.quantize_fp8(GOLDEN["quant.x"], group)
    name = f"quant.fp8_g{group}"
    assert equal_bits(got.codes, GOLDEN[f"{name}.codes"])
    assert equal_bits(got.scales, GOLDEN[f"{name}.scale"])
    assert equal_bits(quantization.dequantize(got.codes, got.scales, group), GOLDEN[f"{name}.fake"])
    assert equal_bits(quantization.fake_quantize(GOLDEN["quant.x"], group), GOLDEN[f"{name}.fake"])


@pytest.mark.parametrize(
    ("quantize", "format", "group", "name"),
    [
        (quantization.quantize_mxfp4, "mxfp4", 32, "quant.fp4_g32_e8m0"),
        (quantization.quantize_fp4_e4m3, "fp4_e4m3", 16, "quant.fp4_g16_e4m3"),
    ],
)
def test_golden_fp4(quantize, format, group, name):
    got = quantize(GOLDEN["quant.x"])
    assert equal_bits(codecs.unpack_fp4(got.codes), GOLDEN[f"{name}.codes"])
    assert equal_bits(got.scales, GOLDEN[f"{name}.scale"])
    assert equal_bits(quantization.dequantize(got.codes, got.scales, group), GOLDEN[f"{name}.fake"])
    assert equal_bits(quantization.fake_quantize(GOLDEN["quant.x"], group, format=format), GOLDEN[f"{name}.fake"])


def golden_product(name: str, group: int, weight_group: int | tuple[int, int]) -> torch.Tensor:
    x, w, w_scale = (GOLDEN[f"{name}.{part}"] for part in ("x", "w", "w_scale"))
    activation = quantization.dequantize(*quantization.quantize_fp8(x, group), group, dtype=torch.float32)
    weight = quantization.dequantize(w, w_scale, weight_group, dtype=torch.float32)
    return activation.double() @ weight.double().T


@pytest.mark.parametrize(
    ("name", "group", "weight_group"),
    [
        ("fp8_linear_b32", 32, (32, 32)),
        ("fp8_linear_b128", 128, (128, 128)),
        ("fp4_linear_a32", 32, 32),
        ("fp4_linear_a128", 128, 32),
    ],
)
def test_golden_linear(name, group, weight_group):
    """The recorded sums are fp32 and block by block, these are fp64: on these inputs both round to the same bf16 everywhere."""
    assert equal_bits(golden_product(name, group, weight_group).bfloat16(), GOLDEN[f"{name}.y"])


def test_golden_hadamard_feeds_the_index_quantiser():
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(7):
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), sylvester)
    rotated = (GOLDEN["hadamard.x"].double() @ sylvester * 128**-0.5).bfloat16()
    assert equal_bits(rotated, GOLDEN["hadamard.y"])
    codes, byte = oracle_mxfp4(GOLDEN["hadamard.y"], 32, "official_fp4")
    got = quantization.quantize_mxfp4(rotated)
    assert np.array_equal(codecs.unpack_fp4(got.codes).numpy(), codes)
    assert np.array_equal(bits(got.scales).numpy(), byte)


@pytest.mark.parametrize("x", [GOLDEN["quant.x"][:, :128].contiguous(), torch.randn(40, 256, generator=torch.Generator().manual_seed(1))])
@pytest.mark.parametrize("block", [(1, 32), (1, 128), (32, 32)])
def test_tile_kernels_casts_to_the_same_bits(x, block):
    try:
        tile_kernels = tile_kernels_module("cast")
    except PackageNotFoundError:
        pytest.skip("tile-kernels is not installed: make setup")
    for format in ("e4m3", "e2m1") if block[0] == 1 else ("e4m3",):
        codes, factors = tile_kernels.cast(x, format, block, round_sf=True)
        if block[0] > 1:
            got = quantization.quantize_fp8_blocks(x, block)
        else:
            got = quantization.quantize_fp8(x, block[1]) if format == "e4m3" else quantization.quantize_mxfp4(x, block[1])
        assert equal_bits(codes, got.codes)
        assert equal_bits(factors, codecs.decode_e8m0(got.scales))
        back = tile_kernels.cast_back((codes, factors), "bf16", block)
        assert equal_bits(back, quantization.dequantize(got.codes, got.scales, block if block[0] > 1 else block[1]))
    _, packed = tile_kernels.cast(x, "e4m3", (1, 32), round_sf=True, use_tma_aligned_col_major_sf=True, use_packed_ue8m0=True)
    ours = quantization.quantize_fp8(x, 32, scale_layout="packed").scales
    assert torch.equal(packed, ours)
    assert packed.shape[1] == 1 or packed.stride() == ours.stride()
    _, unrounded = tile_kernels.cast(x, "e4m3", (1, 128))
    assert equal_bits(unrounded, quantization.quantize_fp8(x, 128, scale="fp32", division="divide").scales)


@pytest.mark.parametrize("special", [math.nan, -math.nan, math.inf, -math.inf])
def test_one_special_makes_its_group_and_no_other(special):
    x = torch.ones(2, 64)
    x[0, 40] = special
    fp8, fp8_fp32 = quantization.quantize_fp8(x, 32), quantization.quantize_fp8(x, 32, scale="fp32")
    mxfp4, fp4 = quantization.quantize_mxfp4(x), quantization.quantize_fp4_e4m3(x, 32)
    assert bits(fp8.scales).tolist() == [[119, 255], [119, 119]]
    assert bits(mxfp4.scales).tolist() == [[125, 255], [125, 125]]
    assert bits(fp4.scales).tolist() == [[0x23, 0x7F], [0x23, 0x23]]
    assert fp8_fp32.scales.isnan().tolist() == [[False, True], [False, False]]
    for codes in (fp8.codes, fp8_fp32.codes):
        assert (bits(codes)[0, 32:] == 0x7F).all()
        assert (bits(codes)[0, :32] == 0x78 + (codes is fp8_fp32.codes) * 6).all()
    for codes in (mxfp4.codes, fp4.codes):
        assert not codes[0, 16:].any()
        assert codes[0, :16].all()
    for quantized in (fp8, mxfp4, fp4):
        assert quantization.dequantize(*quantized, 32).isnan().sum() == 32


def test_byte_zero_keeps_tiny_values_or_zeroes_them():
    x = torch.tensor([[2.0**-127, -(2.0**-130), 2.0**-149, NEGATIVE_ZERO]])
    kept, zeroed = (quantization.quantize_fp8(x, 4, amax_floor=floor) for floor in ("none", "flashinfer"))
    assert bits(kept.scales).item() == bits(zeroed.scales).item() == 0
    assert bits(kept.codes).tolist() == [[0x38, 0xA0, 0x00, 0x80]]
    assert bits(zeroed.codes).tolist() == [[0x00, 0x80, 0x00, 0x80]]
    assert quantization.dequantize(*kept, 4, dtype=torch.float32).tolist() == [[2.0**-127, -(2.0**-130), 0.0, 0.0]]


def test_e4m3_scales_saturate_at_448():
    got = quantization.quantize_fp4_e4m3(torch.tensor([[2688.0, -1344.0], [1e30, 1344.0]]), 2)
    assert bits(got.scales).tolist() == [[0x7E], [0x7E]]
    assert quantization.dequantize(*got, 2).tolist() == [[2688.0, -1344.0], [2688.0, 1344.0]]


def test_ties_and_zero_signs_of_both_fp4_quantisers():
    x = torch.tensor([6.0, 0.25, 0.75, 2.5, 3.5, 5.0, -0.25, NEGATIVE_ZERO])
    for quantize in (quantization.quantize_mxfp4, quantization.quantize_fp4_e4m3):
        for ties, zero_sign, codes in (
            ("even", "kept", [7, 0, 2, 4, 6, 6, 8, 8]),
            ("even", "cleared", [7, 0, 2, 4, 6, 6, 0, 0]),
            ("toward_zero", "kept", [7, 0, 1, 4, 5, 6, 8, 8]),
        ):
            assert codecs.unpack_fp4(quantize(x, 8, ties=ties, zero_sign=zero_sign).codes).tolist() == codes


@pytest.mark.parametrize("rows", [1, 3, 128, 200])
def test_layouts_hold_the_row_scales_and_dequantise_alike(rows):
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows)) * 2.0 ** torch.arange(rows)[:, None].remainder(9)
    for scale, layout, lay_out in (
        ("ue8m0", "packed", scales.pack_ue8m0),
        ("ue8m0", "128x4", scales.swizzle_128x4),
        ("fp32", "mn_major", scales.align_mn_major),
    ):
        plain = quantization.quantize_fp8(x, 32, scale=scale)
        got = quantization.quantize_fp8(x, 32, scale=scale, scale_layout=layout)
        assert equal_bits(got.codes, plain.codes)
        assert torch.equal(got.scales, lay_out(plain.scales))
        assert got.scales.stride() == lay_out(plain.scales).stride()
        for dtype in (torch.bfloat16, torch.float32):
            back = quantization.dequantize(*got, 32, scale_layout=layout, dtype=dtype)
            assert equal_bits(back, quantization.dequantize(*plain, 32, dtype=dtype))


def test_numerics_switch():
    x = torch.tensor([[1.0, 0.3]])
    third = torch.tensor(3.0)
    assert numerics.current_numerics() == "stated"
    assert numerics.fp32_step(lambda a: 1 / a, third).dtype == torch.float32
    for mode, fake in (("stated", [[1.0, 0.3125]]), ("unrounded", [[1.0, 0.3125]]), ("unquantised", x.tolist())):
        with numerics.numerics(mode):
            assert numerics.current_numerics() == mode
            assert quantization.fake_quantize(x, 2).tolist() == fake
            assert numerics.fp32_step(lambda a: 1 / a, third).dtype == (torch.float32 if mode == "stated" else torch.float64)
            assert numerics.quantiser_step(lambda a: 1 / a, third).dtype == torch.float32
    with numerics.numerics("unrounded"):
        assert quantization.fake_quantize(x.double(), 2).dtype == torch.float64
    assert numerics.current_numerics() == "stated"
    with pytest.raises(ArgumentError, match="unquantised"), numerics.numerics("exact"):
        pass


X = torch.ones(4, 64)
FP8, FP4 = quantization.quantize_fp8(X, 32), quantization.quantize_mxfp4(X)


@pytest.mark.parametrize(
    ("call", "argument", "words"),
    [
        (lambda: quantization.quantize_fp8(X.double(), 32), "x", "bf16 or fp32"),
        (lambda: quantization.quantize_fp8(X[0, 0], 1), "x", "shape"),
        (lambda: quantization.quantize_fp8(X, 48), "group", "power of two from 1 to 512"),
        (lambda: quantization.quantize_fp8(X, 1024), "group", "512"),
        (lambda: quantization.quantize_fp8(X, 128), "x", "multiple of 128"),
        (lambda: quantization.quantize_fp8(X, 32, scale="pow2"), "scale", "ue8m0, fp32"),
        (lambda: quantization.quantize_fp8(X, 32, amax_floor="official_fp4"), "amax_floor", "flashinfer"),
        (lambda: quantization.quantize_fp8(X, 32, scale="fp32", amax_floor="none"), "amax_floor", "zero group"),
        (lambda: quantization.quantize_fp8(X, 32, scale="fp32", amax_floor="flashinfer"), "amax_floor", "flashmla"),
        (lambda: quantization.quantize_fp8(X, 32, division="multiply"), "division", "reciprocal"),
        (lambda: quantization.quantize_fp8(X, 32, scale_layout="columns"), "scale_layout", "128x4"),
        (lambda: quantization.quantize_fp8(X, 32, scale_layout="mn_major"), "scale_layout", "rows, packed or 128x4"),
        (lambda: quantization.quantize_fp8(X, 32, scale="fp32", scale_layout="packed"), "scale_layout", "mn_major"),
        (lambda: quantization.quantize_fp8(X[None], 32, scale_layout="packed"), "x", "rows, n"),
        (lambda: quantization.quantize_fp8_blocks(X[0]), "weight", "shape"),
        (lambda: quantization.quantize_fp8_blocks(X, 128), "block", "pair"),
        (lambda: quantization.quantize_fp8_blocks(X, (128, 100)), "block", "power of two"),
        (lambda: quantization.quantize_mxfp4(X, 1), "group", "from 2 to 512"),
        (lambda: quantization.quantize_mxfp4(X, amax_floor="sglang"), "amax_floor", "official_fp4"),
        (lambda: quantization.quantize_mxfp4(X, ties="away"), "ties", "even"),
        (lambda: quantization.quantize_fp4_e4m3(X, zero_sign="plus"), "zero_sign", "kept"),
        (lambda: quantization.quantize_fp4_e4m3(X, division="ceil"), "division", "divide"),
        (lambda: quantization.dequantize(X, FP8.scales, 32), "codes", "e4m3, uint8 or int8"),
        (lambda: quantization.dequantize(FP8.codes, FP8.scales, 64), "scales", r"\[4, 1\]"),
        (lambda: quantization.dequantize(FP8.codes, FP8.scales.view(torch.float8_e4m3fn), 32), "scales", "float8_e4m3fn"),
        (lambda: quantization.dequantize(FP4.codes, FP4.scales.float(), 32), "scales", "float32"),
        (lambda: quantization.dequantize(FP8.codes, FP8.scales, 32, dtype=torch.float16), "dtype", "bfloat16"),
        (lambda: quantization.dequantize(FP8.codes, FP8.scales, 32, scale_layout="packed"), "scales", "int32"),
        (lambda: quantization.dequantize(FP8.codes, FP8.scales, (2, 32), scale_layout="packed"), "scale_layout", "blocks"),
        (lambda: quantization.dequantize(FP4.codes, FP4.scales, 32, scale_layout="128x4"), "scale_layout", "FP4"),
        (lambda: quantization.dequantize(FP8.codes[None], FP8.scales, (2, 32)), "codes", "two"),
        (lambda: quantization.fake_quantize(X, 32, format="int8"), "format", "fp4_e4m3"),
        (lambda: quantization.fake_quantize(X, 16, format="fp4_e4m3", amax_floor="official"), "amax_floor", "None"),
    ],
)
def test_wrong_arguments_are_named(call, argument, words):
    with pytest.raises(ArgumentError, match=words) as error:
        call()
    assert error.value.argument == argument


def test_qt_01_tiny_groups_have_no_nan():
    x = torch.full((3, 32), 1e-36)
    x[0, 7] = 2.8094e-36
    x[1] = 1e-38
    x[2] = 0
    x[2, 9] = 9.1835e-40
    got = quantization.quantize_fp8(x, 32, amax_floor="none")
    assert bits(got.scales).flatten().tolist() == [1, 0, 0]
    back = quantization.dequantize(*got, 32, dtype=torch.float32)
    assert ((back - x).abs() <= x.abs() / 16).all()
    for floor in ("official", "flashinfer"):
        back = quantization.dequantize(*quantization.quantize_fp8(x, 32, amax_floor=floor), 32, dtype=torch.float32)
        assert (back[1:] == 0).all()
        assert not back.isnan().any()


def test_qt_07_the_scale_is_rounded_up():
    x = torch.tensor([[957.0], [448.0], [450.0], [896.0]])
    got = quantization.quantize_fp8(x, 1)
    assert bits(got.scales).flatten().tolist() == [129, 127, 128, 128]
    assert quantization.dequantize(*got, 1).flatten().tolist() == [960.0, 448.0, 448.0, 896.0]


@pytest.mark.parametrize("scale", ["ue8m0", "fp32"])
def test_qt_08_zero_blocks(scale):
    x = torch.zeros(3, 128)
    x[1] = NEGATIVE_ZERO
    x[2] = torch.arange(128)
    got = quantization.quantize_fp8(x, 128, scale=scale)
    assert bits(got.codes)[0].unique().tolist() == [0x00]
    assert bits(got.codes)[1].unique().tolist() == [0x80]
    factors = got.scales.float()
    assert factors.isfinite().all()
    assert (factors > 0).all()
    back = quantization.dequantize(*got, 128)
    assert (back[:2] == 0).all()
    assert ((back.double() @ torch.ones(128, 1, dtype=torch.float64))[:2] == 0).all()


def test_qt_09_scale_bytes_are_bits_in_either_dtype():
    byte = torch.tensor([[0, 120, 125, 127, 130, 140, 254]], dtype=torch.uint8)
    codes = torch.full((1, 14), 0x22, dtype=torch.uint8)
    assert bits(byte.view(torch.float8_e8m0fnu)).tolist() == byte.tolist()
    for lay_out in (scales.pack_ue8m0, scales.swizzle_128x4):
        assert torch.equal(lay_out(byte), lay_out(byte.view(torch.float8_e8m0fnu)))
    back = [quantization.dequantize(codes, form, 4, dtype=torch.float32) for form in (byte, byte.view(torch.float8_e8m0fnu))]
    assert torch.equal(*back)
    assert back[0][0, ::4].tolist() == [math.ldexp(1.0, code - 127) for code in byte[0].tolist()]


@pytest.mark.parametrize(("shape", "layouts"), [((0, 128), True), ((0, 5120), True), ((4, 0), True), ((0, 3, 128), False)])
def test_qt_11_empty_batches(shape, layouts):
    x = torch.empty(shape)
    for layout in ("rows", "packed", "128x4") if layouts else ("rows",):
        got = quantization.quantize_fp8(x, 128, scale_layout=layout)
        assert got.codes.shape == shape
        assert quantization.dequantize(*got, 128, scale_layout=layout).shape == shape
    assert quantization.quantize_fp8(x, 128).scales.shape == (*shape[:-1], shape[-1] // 128)
    for format in ("fp8", "mxfp4", "fp4_e4m3"):
        assert quantization.fake_quantize(x, 32, format=format).shape == shape


def test_qt_12_the_bias_is_127_and_saving_changes_nothing(tmp_path):
    x = torch.zeros(2, 32)
    x[0, 3], x[1, 4] = 6.0, 12.0
    got = quantization.quantize_mxfp4(x)
    assert bits(got.scales).flatten().tolist() == [127, 128]
    tensors = {"weight": got.codes, "scale": got.scales}
    for _ in range(2):
        save_file(tensors, tmp_path / "weights.safetensors")
        tensors = load_file(tmp_path / "weights.safetensors")
    back = quantization.dequantize(tensors["weight"], tensors["scale"], 32)
    assert back.amax(-1).tolist() == [6.0, 12.0]
    again = quantization.quantize_mxfp4(back)
    assert equal_bits(again.codes, got.codes)
    assert equal_bits(again.scales, got.scales)


def test_qt_13_uint8_scales_are_exponents_and_fp32_scales_are_numbers():
    codes = codecs.encode_e4m3(torch.ones(2, 32))
    byte = torch.full((2, 1), 112, dtype=torch.uint8)
    for scale, value in ((byte, 3.0517578125e-05), (byte.view(torch.float8_e8m0fnu), 3.0517578125e-05), (byte.float(), 112.0)):
        assert quantization.dequantize(codes, scale, 32).unique().tolist() == [value]


def test_qt_14_codes_without_scales_are_refused():
    for codes in (FP8.codes, FP4.codes):
        with pytest.raises(ArgumentError, match="scales") as error:
            quantization.dequantize(codes, None, 32)
        assert error.value.argument == "scales"


def test_qt_15_the_maximum_may_be_anywhere_and_strides_are_honoured():
    x = torch.eye(128) * 100
    back = quantization.dequantize(*quantization.quantize_fp8(x, 128), 128)
    assert back.diagonal().unique().tolist() == [96.0]
    assert (back - torch.diag(back.diagonal()) == 0).all()
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(15))
    for view in (x[:, ::2], x[::2], x.T, x.flip(0)[:, 64:192], x[:1].expand(7, 256)):
        for quantize in (lambda v: quantization.quantize_fp8(v, 32), quantization.quantize_mxfp4, quantization.quantize_fp4_e4m3):
            got, plain = quantize(view), quantize(view.contiguous())
            assert equal_bits(got.codes, plain.codes)
            assert equal_bits(got.scales, plain.scales)
            assert got.codes.is_contiguous()


def test_qt_17_groups_lie_along_the_reduction_axis():
    a = torch.randn(128, 128, generator=torch.Generator().manual_seed(17))
    b = (2.0 ** (torch.arange(128) // 32))[:, None].expand(128, 128)
    along_k = quantization.quantize_fp8(b.T, 32)
    got = quantization.fake_quantize(a, 32).double() @ quantization.dequantize(*along_k, 32).double().T
    exact = a.double() @ b.double()
    assert torch.nn.functional.cosine_similarity(got.flatten(), exact.flatten(), dim=0) >= 0.999
    assert (got - exact).norm() <= 0.04 * exact.norm()
    assert bits(along_k.scales).unique(dim=0).tolist() == [[119, 120, 121, 122]]
    with pytest.raises(ArgumentError, match="int32"):
        quantization.dequantize(*along_k, 32, scale_layout="128x4")


def test_ln_01_a_scale_is_rounded_up_or_kept_never_truncated():
    x = torch.full((4, 2, 256), 672.0)
    kept = quantization.quantize_fp8(x, 128, scale="fp32", division="divide")
    assert kept.scales.unique().tolist() == [1.5]
    assert quantization.dequantize(*kept, 128).unique().tolist() == [672.0]
    truncated = codecs.encode_e8m0(kept.scales, rounding="floor")
    assert quantization.dequantize(kept.codes, truncated, 128).unique().tolist() == [448.0]
    up = quantization.quantize_fp8(x, 128)
    assert bits(up.scales).unique().tolist() == [128]
    assert quantization.dequantize(*up, 128).unique().tolist() == [640.0]
    with pytest.raises(ArgumentError, match="encode_e8m0"):
        scales.pack_ue8m0(kept.scales[:, 0])


@pytest.mark.parametrize("layout", ["rows", "mn_major"])
def test_ln_03_scales_of_any_stride(layout):
    codes = codecs.encode_e4m3(torch.ones(192, 256))
    a_scale = (2.0 ** (torch.arange(192) % 3))[:, None].expand(192, 2)
    for view in (a_scale.contiguous(), a_scale.T.contiguous().T, a_scale):
        back = quantization.dequantize(codes, view, 128, scale_layout=layout)
        assert back[:6, 0].tolist() == [1, 2, 4, 1, 2, 4]
        assert (back == back[:, :1]).all()
        assert torch.equal(scales.align_mn_major(view), a_scale)


@pytest.mark.parametrize("layout", ["rows", "packed", "128x4"])
def test_ln_05_a_row_does_not_depend_on_the_batch(layout):
    row = torch.randn(1, 512, generator=torch.Generator().manual_seed(5))
    one = quantization.quantize_fp8(row, 32)
    assert (bits(one.scales) != 0).all()
    for rows in (*range(1, 40), 63, 64, 65, 127, 128, 129, 255, 256, 257, 300):
        got = quantization.quantize_fp8(row.expand(rows, 512), 32, scale_layout=layout)
        match layout:
            case "rows":
                byte = got.scales
            case "packed":
                byte = scales.unpack_ue8m0(got.scales, 16)
            case "128x4":
                byte = scales.unswizzle_128x4(got.scales, rows, 16)
        assert (bits(byte) == bits(one.scales)).all()
        assert (bits(got.codes) == bits(one.codes)).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "x", [EVERY_BF16[:, None].expand(-1, 2), spread_of(6), spread_of(7).T[:256, :64]], ids=["every bf16", "groups", "strided"]
)
def test_cuda_gives_the_bits_of_the_cpu(x):
    group = 2 if x.shape[1] == 2 else 32
    for quantize in (
        lambda v: quantization.quantize_fp8(v, group),
        lambda v: quantization.quantize_fp8(v, group, scale_layout="packed"),
        lambda v: quantization.quantize_fp8(v, group, scale_layout="128x4", amax_floor="flashinfer"),
        lambda v: quantization.quantize_fp8(v, group, scale="fp32", scale_layout="mn_major", amax_floor="flashmla"),
        lambda v: quantization.quantize_fp8_blocks(v, (64, group)),
        lambda v: quantization.quantize_mxfp4(v, group, ties="toward_zero", zero_sign="cleared"),
        lambda v: quantization.quantize_fp4_e4m3(v, group),
    ):
        for device, host in zip(quantize(x.cuda()), quantize(x), strict=True):
            assert equal_bits(device.cpu(), host)
    for format in ("fp8", "mxfp4", "fp4_e4m3"):
        device, host = quantization.fake_quantize(x.cuda(), group, format=format).cpu(), quantization.fake_quantize(x, group, format=format)
        assert torch.equal(device.isnan(), host.isnan())
        assert equal_bits(device.nan_to_num(0.0), host.nan_to_num(0.0))
