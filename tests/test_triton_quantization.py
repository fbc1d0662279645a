"""Triton's quantisers without a GPU: in the interpreter, in a process of its own, against the reference; and compiled for SM80 and SM90.

The instructions on pairs of bf16 are put into the interpreter by what PTX says of them, so that the kernels made of them run in it too.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dsv4.reference.quantization as reference
from dsv4.fast import quantization  # noqa: F401
from dsv4.fast.dispatch import TABLES
from dsv4.reference.codecs import decode_e4m3, encode_e2m1
from interpreted import INTERPRETED, passes

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dsv4.fast.kernels import dequantize, quantize_blocks, quantize_groups  # noqa: E402

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


@compiled
def test_in_the_interpreter() -> None:
    passes(__file__, least=25)


@pytest.fixture(autouse=True)
def poisoned() -> Any:
    """Memory that nobody has written holds no zeros."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def kernel(name: str, *arguments: Any) -> Any:
    return next(row for row in TABLES[f"quantization.{name}"] if row.backend == "triton").call(*arguments)


def mixed(rows: int, n: int, dtype: torch.dtype) -> Tensor:
    """Rows of many magnitudes: zero, minus zero, subnormal, with a NaN, with an infinity, huge, ordinary."""
    generator = torch.Generator().manual_seed(rows * n)
    x = torch.randn(rows, n, generator=generator) * torch.exp2(torch.randint(-20, 12, (rows, 1), generator=generator).float())
    for row, change in enumerate((0.0, -0.0, 2.0**-130, torch.nan, torch.inf, 2.0**100)):
        x[row : row + 1, : n // 2] *= change
    return x.to(dtype)


def memory(tensor: Tensor) -> Tensor:
    """Every byte of the storage, pads too."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0).view(torch.uint8)


def same(expected: Any, actual: Any) -> None:
    for want, have in [(expected, actual)] if isinstance(expected, Tensor) else zip(expected, actual, strict=True):
        assert want.shape == have.shape
        assert want.numel() == 0 or want.stride() == have.stride()
        if want.dtype in (torch.bfloat16, torch.float32):
            assert want.dtype == have.dtype
            want, have = (torch.where(value.isnan(), torch.nan, value).contiguous() for value in (want.float(), have.float()))
        assert torch.equal(memory(want), memory(have))


def to_bf16(exact: np.ndarray) -> np.ndarray:
    """fp64 as bits of bf16, rounded once, to nearest with ties to even; NaN is 0x7FFF."""
    magnitude = np.abs(exact)
    finite = np.isfinite(exact) & (magnitude > 0)
    exponent = np.maximum(np.frexp(np.where(finite, magnitude, 1.0))[1] - 8, -133)
    nearest = np.ldexp(np.rint(np.ldexp(np.where(finite, magnitude, 0.0), -exponent)), exponent)
    with np.errstate(over="ignore"):
        bits = np.where(finite, nearest, magnitude).astype(np.float32).view(np.int32) >> 16
    bits = np.where(np.isnan(exact), 0x7FFF, bits) | np.where(np.signbit(exact) & ~np.isnan(exact), 0x8000, 0)
    return bits.astype(np.int64)


def of_bf16(bits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (bits.astype(np.int64) << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def on_halves(function: Any, *words: np.ndarray) -> np.ndarray:
    """An instruction on pairs, by what it does to fp64 numbers that are bf16: fp64 holds each sum and product of these tests."""
    halves = [to_bf16(function(*(of_bf16(word >> shift & 0xFFFF) for word in words))) for shift in (0, 16)]
    joined: np.ndarray = (halves[0] | halves[1] << 16).astype(np.uint32).view(np.int32)
    return joined


def permuted(a: np.ndarray, b: np.ndarray, select: np.ndarray) -> np.ndarray:
    """prmt.b32."""
    both = a.astype(np.int64) & 0xFFFFFFFF | (b.astype(np.int64) & 0xFFFFFFFF) << 32
    result = np.zeros_like(both)
    for place in range(4):
        nibble = select.astype(np.int64) >> 4 * place & 15
        byte = both >> 8 * (nibble & 7) & 0xFF
        result |= np.where(nibble & 8, (byte >> 7) * 0xFF, byte) << 8 * place
    permuted_bytes: np.ndarray = result.astype(np.uint32).view(np.int32)
    return permuted_bytes


def by_magnitude(choose: Any) -> Any:
    return lambda a, b: choose(np.abs(a), np.abs(b)) * np.where(np.signbit(a) ^ np.signbit(b), -1.0, 1.0)


def added(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        exact: np.ndarray = a * b + c
    return exact


INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "fma.rn.bf16x2": partial(on_halves, added),
    "abs.bf16x2": partial(on_halves, np.abs),
    "min.bf16x2": partial(on_halves, np.fmin),
    "max.bf16x2": partial(on_halves, np.fmax),
    "min.xorsign.abs.bf16x2": partial(on_halves, by_magnitude(np.fmin)),
    "max.NaN.xorsign.abs.bf16x2": partial(on_halves, by_magnitude(np.maximum)),
    "cvt.rn.bf16x2.f32": lambda x: (to_bf16(x.astype(np.float64)) * 0x10001).astype(np.uint32).view(np.int32),
    "rcp.approx.ftz.f32": lambda x: (1 / x.astype(np.float64) * (1 + 2.0**-22)).astype(np.float32),  # as far off as it may be
    "prmt.b32": permuted,
    "mov.b32": lambda low, high: low.view(np.uint16).astype(np.int32) | high.view(np.uint16).astype(np.int32) << 16,
}


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of pairs run wherever they would on a device that has their instructions."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def execute(_: Any, text: str, constraints: str, arguments: list[Any], types: list[Any], *rest: Any) -> Any:
        result = INSTRUCTIONS[text.partition(" ")[0]](*(argument.data for argument in arguments))
        return SimpleNamespace(get_result=lambda _: TensorHandle(result, types[0].scalar if hasattr(types[0], "scalar") else types[0]))

    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", execute)
    for module in (quantize_groups, dequantize):
        monkeypatch.setattr(module, "takes_pairs", lambda *_: True)


@interpreted
@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(("rows", "n", "group"), [(7, 96, 32), (5, 96, 32), (5, 384, 16), (33, 48, 16), (1, 512, 512), (3, 512, 512)])
def test_pairs(rows: int, n: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_groups, "WORD_TILES", dict.fromkeys(quantize_groups.WORD_TILES, (1024, 4)))
    monkeypatch.setattr(dequantize, "WORD_TILE", (1024, 4))
    x = mixed(rows, 2 * n, torch.bfloat16)[:, n:] if rows == 5 else mixed(rows, n, torch.bfloat16)
    for ties, sign in product(("even", "toward_zero"), ("kept", "cleared")):
        options = {"ties": ties, "zero_sign": sign}
        for floor in ("official_fp4", "none", "flashmla") if ties == "even" else ("official_fp4",):
            expected = reference.quantize_mxfp4(x, group, amax_floor=floor, **options)
            same(expected, kernel("quantize_mxfp4", x, group, floor, ties, sign))
            numbers = reference.fake_quantize(x, group, format="mxfp4", amax_floor=floor, **options)
            same(numbers, kernel("fake_quantize", x, group, "mxfp4", floor, ties, sign, "divide"))
        same(reference.quantize_fp4_e4m3(x, group, **options), kernel("quantize_fp4_e4m3", x, group, "divide", ties, sign))
        numbers = reference.fake_quantize(x, group, format="fp4_e4m3", **options)
        same(numbers, kernel("fake_quantize", x, group, "fp4_e4m3", "", ties, sign, "divide"))
    for scale, quantize in (("ue8m0", reference.quantize_mxfp4), ("e4m3", reference.quantize_fp4_e4m3)):
        codes, scales = quantize(x, group)
        numbers = reference.dequantize(codes, scales, group)
        same(numbers, kernel("dequantize", codes, scales.view(torch.uint8), 1, group, "e2m1", scale, "rows", "bfloat16"))


@interpreted
@pytest.mark.usefixtures("pairs")
def test_pairs_of_every_code_and_every_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_groups, "WORD_TILES", dict.fromkeys(quantize_groups.WORD_TILES, (65536, 4)))
    monkeypatch.setattr(dequantize, "WORD_TILE", (65536, 4))
    byte = torch.arange(256).to(torch.uint8)
    for scale, dtype in (("ue8m0", torch.float8_e8m0fnu), ("e4m3", torch.float8_e4m3fn)):
        codes = byte.repeat(256, 1)
        expected = reference.dequantize(codes, byte[:, None].view(dtype), 512)
        same(expected, kernel("dequantize", codes, byte[:, None], 1, 512, "e2m1", scale, "rows", "bfloat16"))
    every = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
    groups = torch.cat((every.view(-1, 8), torch.full((8192, 8), 6.0, dtype=torch.bfloat16)), 1)
    for ties in ("even", "toward_zero"):
        same(reference.quantize_mxfp4(groups, 16, ties=ties), kernel("quantize_mxfp4", groups, 16, "official_fp4", ties, "kept"))
        same(reference.quantize_fp4_e4m3(groups, 16, ties=ties), kernel("quantize_fp4_e4m3", groups, 16, "divide", ties, "kept"))


@interpreted
@pytest.mark.parametrize(
    ("dtype", "rows", "n", "group"),
    [
        (torch.bfloat16, 1, 128, 128),
        (torch.bfloat16, 5, 384, 32),
        (torch.float32, 5, 384, 32),
        (torch.float32, 9, 96, 16),
        (torch.bfloat16, 129, 12, 2),
        (torch.bfloat16, 6, 1536, 512),
        (torch.float32, 7, 5, 1),
    ],
)
def test_groups(dtype: torch.dtype, rows: int, n: int, group: int) -> None:
    x = mixed(rows, 2 * n, dtype)[:, n:] if rows == 5 else mixed(rows, n, dtype)
    for floor, layout in (("official", "rows"), ("official", "packed"), ("official", "128x4"), ("none", "rows")):
        expected = reference.quantize_fp8(x, group, amax_floor=floor, scale_layout=layout)
        same(expected, kernel("quantize_fp8", x, group, "ue8m0", layout, floor, ""))
    if rows > 100:
        return  # the second tile of 128x4
    same(reference.quantize_fp8(x, group, amax_floor="flashinfer"), kernel("quantize_fp8", x, group, "ue8m0", "rows", "flashinfer", ""))
    for (floor, division), layout in product((("official", "reciprocal"), ("flashmla", "divide")), ("rows", "mn_major")):
        options = {"scale": "fp32", "amax_floor": floor, "division": division, "scale_layout": layout}
        same(reference.quantize_fp8(x, group, **options), kernel("quantize_fp8", x, group, "fp32", layout, floor, division))
    same(reference.fake_quantize(x, group), kernel("fake_quantize", x, group, "fp8", "official", "even", "kept", ""))
    for ties, sign in (("even", "kept"), ("toward_zero", "cleared")) if group > 1 else ():
        options = {"ties": ties, "zero_sign": sign}
        same(reference.quantize_mxfp4(x, group, **options), kernel("quantize_mxfp4", x, group, "official_fp4", ties, sign))
        for division in ("divide", "reciprocal"):
            expected = reference.quantize_fp4_e4m3(x, group, division=division, **options)
            same(expected, kernel("quantize_fp4_e4m3", x, group, division, ties, sign))
        for form, floor in (("mxfp4", "official_fp4"), ("fp4_e4m3", "")):
            same(
                reference.fake_quantize(x, group, format=form, **options),
                kernel("fake_quantize", x, group, form, floor, ties, sign, "divide"),
            )


@interpreted
def test_every_bf16_beside_a_fixed_maximum() -> None:
    every = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
    for limit in (448.0, 6.0):
        pairs = torch.stack((every, torch.full_like(every, limit)), -1).view(256, 512)
        same(reference.quantize_fp8(pairs, 2), kernel("quantize_fp8", pairs, 2, "ue8m0", "rows", "official", ""))
        same(reference.quantize_mxfp4(pairs, 2), kernel("quantize_mxfp4", pairs, 2, "official_fp4", "even", "kept"))
        same(reference.quantize_fp4_e4m3(pairs, 2), kernel("quantize_fp4_e4m3", pairs, 2, "divide", "even", "kept"))
    single = every.view(128, 512)
    same(reference.quantize_fp8(single, 1, amax_floor="none"), kernel("quantize_fp8", single, 1, "ue8m0", "rows", "none", ""))


@interpreted
@pytest.mark.parametrize(
    ("shape", "block"), [((130, 200), (128, 128)), ((5, 70), (1, 64)), ((70, 300), (128, 256)), ((70, 5), (64, 1)), ((0, 7), (4, 2))]
)
def test_blocks(shape: tuple[int, int], block: tuple[int, int]) -> None:
    weight = mixed(*shape, torch.bfloat16)
    for scale, floor, division in (("ue8m0", "official", ""), ("ue8m0", "none", ""), ("fp32", "flashmla", "divide")):
        expected = reference.quantize_fp8_blocks(weight, block, scale=scale, amax_floor=floor, division=division or "divide")
        actual = kernel("quantize_fp8_blocks", weight, *block, scale, floor, division)
        same(expected, actual)
        back = kernel("dequantize", actual[0], actual[1], *block, "e4m3", scale, "rows", "bfloat16")
        same(reference.dequantize(*expected, block), back)


@interpreted
@pytest.mark.parametrize(("rows", "n", "group"), [(1, 1024, 128), (5, 384, 32), (129, 12, 2), (7, 5, 1)])
def test_dequantize(rows: int, n: int, group: int) -> None:
    x = mixed(rows, n, torch.bfloat16)
    layouts = (("ue8m0", "rows"), ("ue8m0", "packed"), ("ue8m0", "128x4"), ("fp32", "rows"), ("fp32", "mn_major"))
    for (scale, layout), dtype in product(layouts, ("bfloat16", "float32") if rows < 100 else ("bfloat16",)):
        codes, scales = reference.quantize_fp8(x, group, scale=scale, scale_layout=layout)
        stored = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
        for given in (stored, stored.contiguous()) if rows < 100 else (stored,):
            expected = reference.dequantize(codes, scales, group, scale_layout=layout, dtype=getattr(torch, dtype))
            same(expected, kernel("dequantize", codes.view(torch.uint8), given, 1, group, "e4m3", scale, layout, dtype))
    for scale, quantize in (("ue8m0", reference.quantize_mxfp4), ("e4m3", reference.quantize_fp4_e4m3)) if group > 1 else ():
        codes, scales = quantize(x, group)
        same(
            reference.dequantize(codes, scales, group),
            kernel("dequantize", codes, scales.view(torch.uint8), 1, group, "e2m1", scale, "rows", "bfloat16"),
        )


@interpreted
def test_every_code_times_every_scale() -> None:
    byte = torch.arange(256).to(torch.uint8)
    codes = byte.repeat(256, 1)
    expected = reference.dequantize(codes.view(torch.float8_e4m3fn), byte[:, None], 256)
    same(expected, kernel("dequantize", codes, byte[:, None], 1, 256, "e4m3", "ue8m0", "rows", "bfloat16"))


def ptx(function: Any, capability: int, pointers: dict[str, str], constants: dict[str, Any], numbers: dict[str, str]) -> str:
    types = pointers | numbers
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    aligned: Any = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(function, signature, places, aligned)
    return str(triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False}).asm["ptx"])


@compiled
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_leave_e4m3_alone_where_there_is_none(capability: int) -> None:
    native = capability >= 89
    scaling = {"KIND": "fp8", "DIVIDE": False, "ON_SCALE": False, "ZEROES": False, "NATIVE": native}
    tile = {"ROWS": 16, "GROUPS": 4, "GROUP": 128}
    groups = scaling | tile | {"TIES": "even", "ZERO_SIGN": "kept", "LAYOUT": "packed", "FAKE": False}
    blocks = scaling | {"BLOCK_N": 128, "BLOCK_K": 128, "BLOCKS": 1, "CHUNK_N": 128}
    decode = tile | {"GROUP_ROWS": 1, "NUMBERS": "e4m3", "SCALE": "ue8m0", "LAYOUT": "rows", "NATIVE": native}
    tensors = {"x": "*bf16", "result": "*u8", "scales": "*u8"}
    for text in (
        ptx(quantize_groups.quantize_tile, capability, tensors, groups, {"floor": "fp32"}),
        ptx(quantize_blocks.quantize_block, capability, {"weight": "*bf16", "codes": "*u8", "scales": "*u8"}, blocks, {"floor": "fp32"}),
        ptx(dequantize.dequantize_tile, capability, {"codes": "*u8", "scales": "*u8", "result": "*bf16"}, decode, {}),
    ):
        assert ("e4m3x2" in text) == native
        assert ".ftz" not in text  # subnormal numbers count


@compiled
@pytest.mark.parametrize(("kind", "fake"), list(product(("mxfp4", "fp4_e4m3"), (False, True))))
def test_pairs_stay_in_their_threads(kind: str, fake: bool) -> None:
    numbers, _ = quantize_groups.WORD_TILES[fake]
    options = {"HEIGHT": 1, "WIDTH": numbers, "GROUP": 32, "FLAT": True, "KIND": kind, "FAKE": fake, "NATIVE": True}
    tensors = {"x": "*bf16", "result": "*bf16" if fake else "*u8", "scales": "*u8"}
    text = ptx(quantize_groups.quantize_words, 90, tensors, options | {"TIES": "even", "ZERO_SIGN": "kept"}, {"floor": "fp32"})
    assert "fma.rn.bf16x2" in text
    assert "st.shared" not in text
    assert "ld.global.v4" in text
    decode = {"NUMBERS": 4096, "GROUP": 32, "SCALE": "ue8m0" if kind == "mxfp4" else "e4m3", "NATIVE": True}
    text = ptx(dequantize.dequantize_words, 90, {"codes": "*u8", "scales": "*u8", "result": "*bf16"}, decode, {})
    assert "st.shared" not in text


@compiled
@pytest.mark.parametrize("ties", ["even", "toward_zero"])
def test_pairs_round_quotients_of_bf16(ties: str) -> None:
    """What `codec_pairs` claims: every finite bf16 over every E4M3 scale, by two pairs of a reciprocal and by three lines."""
    x = np.arange(0x7F80, dtype=np.int64)
    less = 1 if ties == "even" else 255 / 256
    for byte in range(1, 0x7F):
        scale = decode_e4m3(torch.tensor([byte], dtype=torch.uint8)).item()
        expected = encode_e2m1((torch.from_numpy(x << 16).int().view(torch.float32)) / scale, ties=ties)
        for error in (-(2.0**-22), 2.0**-22):
            inverse = np.float32((1 + error) / scale)
            first = of_bf16(to_bf16(np.array(inverse, dtype=np.float64)))
            rest = of_bf16(to_bf16(np.array(inverse, dtype=np.float64) - first))
            quotient = of_bf16(to_bf16(of_bf16(x) * first + of_bf16(to_bf16(of_bf16(x) * rest))))
            lines = ((less / 2, 32.0), (less / 4, 32.5), (less / 8, 33.0))
            codes = np.minimum.reduce([to_bf16(quotient * slope + base) for slope, base in lines])
            assert np.array_equal(np.minimum(codes, 0x4207) & 7, expected.numpy())


@compiled
def test_fp16_rounds_e2m1_quotients_of_bf16() -> None:
    """What `codec_bits.pairs_e2m1` claims: every finite bf16 over every E4M3 scale, times 2^-14, through fp16 and an integer addition."""
    x = torch.arange(65536).to(torch.int16).view(torch.bfloat16).float()
    x = x[x.isfinite()]
    for byte in range(1, 0x7F):
        scale = decode_e4m3(torch.tensor([byte], dtype=torch.uint8))
        half = (x * (2.0**-14 / scale)).clamp(-6 * 2.0**-14, 6 * 2.0**-14).half().view(torch.int16).int() & 0xFFFF
        rounded = (half & 0x7FFF) + 0xFF + (half >> 9 & 1)
        assert torch.equal((rounded >> 9 & 7 | half >> 12 & 8).to(torch.uint8), encode_e2m1(x / scale))
