"""Reference codecs against torch's dtypes, ml_dtypes, the tables of spec A 12 and reported bugs."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from dsv4.reference import codecs
from dsv4.types import ArgumentError

BYTES = torch.arange(256, dtype=torch.uint8)
EVERY_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
NEGATIVE_ZERO = -0.0


def bits(values: torch.Tensor) -> list[int]:
    return values.view(torch.uint8).tolist()


def same_numbers(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bits, where all NaN are one."""
    left, right = (torch.where(side.isnan(), math.nan, side.float()).view(torch.int32) for side in (left, right))
    return torch.equal(left, right)


def around(points: list[float]) -> torch.Tensor:
    """Each point of fp32 with its two neighbours, both signs."""
    middle = np.array(points, np.float32)
    each = np.concatenate([middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))])
    return torch.from_numpy(np.concatenate([each, -each]))


@pytest.mark.parametrize(
    ("decode", "dtype", "outside"),
    [
        (codecs.decode_e4m3, torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
        (codecs.decode_e5m2, torch.float8_e5m2, ml_dtypes.float8_e5m2),
        (codecs.decode_e8m0, torch.float8_e8m0fnu, ml_dtypes.float8_e8m0fnu),
    ],
)
def test_every_byte_decodes_as_torch_and_ml_dtypes_say(decode, dtype, outside):
    assert same_numbers(decode(BYTES), BYTES.view(dtype).float())
    assert same_numbers(decode(BYTES), torch.from_numpy(BYTES.numpy().view(outside).astype(np.float32)))
    assert same_numbers(decode(BYTES.view(dtype)[::3]), decode(BYTES)[::3])
    assert decode(BYTES).dtype == torch.float32


def test_every_nibble_decodes_and_the_upper_four_bits_do_not_count():
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, NEGATIVE_ZERO, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert same_numbers(codecs.decode_e2m1(BYTES), torch.tensor(values * 16))
    outside = BYTES[:16].numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert same_numbers(codecs.decode_e2m1(BYTES[:16]), torch.from_numpy(outside))


def test_encoding_gives_back_every_code():
    assert bits(codecs.encode_e4m3(codecs.decode_e4m3(BYTES))) == [*range(255), 0x7F]
    assert codecs.encode_e2m1(codecs.decode_e2m1(BYTES[:16])).tolist() == list(range(16))
    for rounding in ("ceil", "floor", "nearest"):
        assert bits(codecs.encode_e8m0(codecs.decode_e8m0(BYTES), rounding=rounding)) == list(range(256))


def midpoints(numbers: torch.Tensor) -> list[float]:
    numbers = numbers.double()
    return ((numbers[1:] + numbers[:-1]) / 2).tolist()


@pytest.mark.parametrize(
    "x", [EVERY_BF16, EVERY_BF16.float(), around(midpoints(codecs.decode_e4m3(BYTES[:127])))], ids=["bf16", "fp32", "ties"]
)
def test_e4m3_encodes_as_torch_and_ml_dtypes_do_after_a_clamp(x):
    number = ~x.isnan()
    code, clamped = codecs.encode_e4m3(x).view(torch.uint8), x.float()[number].clamp(-448, 448)
    assert torch.equal(code[number], clamped.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(code[number], torch.from_numpy(clamped.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)))
    assert (code[~number] == 0x7F).all()


@pytest.mark.parametrize(
    "x", [EVERY_BF16, EVERY_BF16.float(), around(midpoints(codecs.decode_e2m1(BYTES[:8])))], ids=["bf16", "fp32", "ties"]
)
def test_e2m1_encodes_as_ml_dtypes_does(x):
    number = ~x.isnan()
    outside = torch.from_numpy(x.float()[number].numpy().clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8))
    assert torch.equal(codecs.encode_e2m1(x)[number], outside)
    assert torch.equal(codecs.encode_e2m1(x, zero_sign="cleared")[number], torch.where(outside == 8, 0, outside))
    assert not codecs.encode_e2m1(x)[~number].any()


def exponent_code(value: float, rounding: str) -> int:
    """E8M0 by `math.frexp`: value = m 2^e with m in [1/2, 1)."""
    if not math.isfinite(value):
        return 255
    if value <= 0:
        return 0
    m, e = math.frexp(value)
    return min(254, max(0, e + 126 + (rounding == "ceil" and m != 0.5)))


@pytest.mark.parametrize("x", [EVERY_BF16, around([2.0**k for k in range(-149, 128)])], ids=["bf16", "around powers"])
def test_e8m0_rounds_every_number_up_or_down_as_asked(x):
    for rounding in ("ceil", "floor"):
        assert bits(codecs.encode_e8m0(x, rounding=rounding)) == [exponent_code(value, rounding) for value in x.tolist()]


@pytest.mark.parametrize(
    "x", [EVERY_BF16, around([1.5 * 2.0**k for k in range(-148, 127)]), around([2.0**-127, 2.0**-126])], ids=["bf16", "ties", "least"]
)
def test_e8m0_nearest_is_the_cast_of_torch_and_ml_dtypes(x):
    x = x.float()
    x = x[(x > 0) & (x < 1.5 * 2.0**127)]
    code = codecs.encode_e8m0(x, rounding="nearest").view(torch.uint8)
    assert torch.equal(code, x.to(torch.float8_e8m0fnu).view(torch.uint8))
    assert torch.equal(code, torch.from_numpy(x.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)))


@pytest.mark.parametrize(
    ("rounding", "codes"),
    [
        ("ceil", [0, 0, 0, 0, 0, 1, 1, 127, 128, 128, 129, 254, 254, 255, 255, 255]),
        ("floor", [0, 0, 0, 0, 0, 0, 1, 127, 127, 127, 128, 254, 254, 255, 255, 255]),
        ("nearest", [0, 0, 0, 0, 0, 1, 1, 127, 127, 128, 129, 254, 254, 255, 255, 255]),
    ],
)
def test_e8m0_table(rounding, codes):
    least = 2.0**-127
    x = [0.0, NEGATIVE_ZERO, -1.0, 2.0**-149, least, least + 2.0**-149, 2 * least, 1.0, 1.25, 1.5, 3.0, 2.0**127, 1.75 * 2.0**127]
    assert bits(codecs.encode_e8m0(torch.tensor([*x, math.inf, -math.inf, math.nan]), rounding=rounding)) == codes


def test_e4m3_casts_of_the_specification():
    """Spec A 12, spec M 9.7."""
    x = torch.tensor(
        [448, 464, 464.01, 500, 1e9, math.inf, math.nan, -math.nan, -500, -math.inf, NEGATIVE_ZERO, 2.0**-10, 2.0**-9, 1.5 * 2.0**-9]
    )
    assert bits(codecs.encode_e4m3(x)) == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7F, 0x7F, 0xFE, 0xFE, 0x80, 0x00, 0x01, 0x02]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize(("order", "packed"), [("low_first", [0x21, 0x8F]), ("high_first", [0x12, 0xF8])])
def test_packing_two_codes_to_a_byte(order, packed, dtype):
    codes = torch.tensor([1, 2, 15, 8], dtype=torch.uint8)
    assert codecs.pack_fp4(codes, order=order).tolist() == packed
    assert codecs.pack_fp4(codes + 0xF0, order=order).tolist() == packed
    assert codecs.unpack_fp4(torch.tensor(packed, dtype=torch.uint8).view(dtype), order=order).tolist() == codes.tolist()


def test_shapes_strides_and_empty_tensors():
    wide = EVERY_BF16.reshape(256, 256)
    for encode in (codecs.encode_e4m3, codecs.encode_e8m0, codecs.encode_e2m1):
        assert torch.equal(encode(wide.T[::3, 1::2]).view(torch.uint8), encode(wide).view(torch.uint8).T[::3, 1::2])
        assert encode(torch.zeros(3, 0)).shape == (3, 0)
        assert encode(torch.tensor(1.0)).shape == ()
    assert codecs.unpack_fp4(codecs.pack_fp4(torch.zeros(0, 6, dtype=torch.uint8))).shape == (0, 6)
    assert codecs.decode_e4m3(torch.zeros(0, 2, dtype=torch.uint8)).shape == (0, 2)


FP32 = torch.zeros(3)
UINT8 = torch.zeros(3, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "argument", "words"),
    [
        (lambda: codecs.decode_e4m3(FP32), "codes", "float32"),
        (lambda: codecs.decode_e5m2(BYTES.view(torch.float8_e4m3fn)), "codes", "float8_e4m3fn"),
        (lambda: codecs.decode_e8m0(FP32), "codes", "encode_e8m0"),
        (lambda: codecs.decode_e2m1(UINT8.view(torch.int8)), "codes", "int8"),
        (lambda: codecs.encode_e4m3(FP32.double()), "x", "float64"),
        (lambda: codecs.encode_e4m3([1.0]), "x", "list"),
        (lambda: codecs.encode_e8m0(FP32, rounding="up"), "rounding", "ceil, floor, nearest"),
        (lambda: codecs.encode_e2m1(FP32, ties="away"), "ties", "toward_zero"),
        (lambda: codecs.encode_e2m1(FP32, zero_sign="lost"), "zero_sign", "cleared"),
        (lambda: codecs.pack_fp4(UINT8), "codes", "multiple of 2"),
        (lambda: codecs.pack_fp4(UINT8[0]), "codes", "shape"),
        (lambda: codecs.unpack_fp4(UINT8, order="big"), "order", "low_first"),
        (lambda: codecs.unpack_fp4(FP32), "packed", "uint8 or int8"),
    ],
)
def test_wrong_arguments_are_named(call, argument, words):
    with pytest.raises(ArgumentError, match=words) as error:
        call()
    assert error.value.argument == argument


def test_qt_03_e8m0_code_134_is_128_and_only_255_is_nan():
    numbers = codecs.decode_e8m0(BYTES)
    assert numbers[[0, 1, 127, 134, 254]].tolist() == [5.877471754111438e-39, 1.1754943508222875e-38, 1.0, 128.0, 1.7014118346046923e38]
    assert numbers.isnan().nonzero().flatten().tolist() == [255]
    assert numbers.tolist()[:255] == [math.ldexp(1.0, code - 127) for code in range(255)]


@pytest.mark.parametrize(
    ("ties", "values"),
    [("even", [0, 1, 1, 2, 2, 4, 4, 6, NEGATIVE_ZERO, -2]), ("toward_zero", [0, 0.5, 1, 1.5, 2, 3, 4, 6, NEGATIVE_ZERO, -2])],
)
def test_qt_05_e2m1_midpoints(ties, values):
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5, -0.25, -2.5])
    assert same_numbers(codecs.decode_e2m1(codecs.encode_e2m1(x, ties=ties)), torch.tensor(values))
    past = torch.nextafter(x, x * math.inf)[:7]
    assert codecs.decode_e2m1(codecs.encode_e2m1(past, ties=ties)).tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]


def test_qt_07_the_floor_rule_by_name():
    """Shared exponent of 957 is 2 under the floor rule, so 478.5 saturates and comes back as 896; ceil gives 960."""
    for rounding, back in (("floor", 896.0), ("ceil", 960.0)):
        scale = codecs.decode_e8m0(codecs.encode_e8m0(torch.tensor([957 / 448]), rounding=rounding))
        assert (codecs.decode_e4m3(codecs.encode_e4m3(957 / scale)) * scale).tolist() == [back]


def test_kv_05_fp32_is_not_rounded_through_bf16():
    x = torch.tensor([1.0625, 1.0625 + 2.0**-12, 17.0, 17.0 + 2.0**-8])
    assert codecs.decode_e4m3(codecs.encode_e4m3(x)).tolist() == [1.0, 1.125, 16.0, 18.0]
    assert codecs.decode_e4m3(codecs.encode_e4m3(x.bfloat16())).tolist() == [1.0, 1.0, 16.0, 16.0]
    numbers = codecs.decode_e4m3(BYTES)
    assert numbers.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert numbers[0x80].signbit()
