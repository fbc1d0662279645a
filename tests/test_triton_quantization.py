"""Triton's quantisers without a GPU: in the interpreter, in a process of its own, against the reference; and compiled for SM80 and SM90."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4.reference.quantization as reference
from dsv4.fast import quantization  # noqa: F401
from dsv4.fast.dispatch import TABLES
from dsv4.reference.codecs import decode_e4m3, encode_e2m1

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dsv4.fast.kernels import dequantize, quantize_blocks, quantize_groups  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


@compiled
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "DSV4_IMPL": ""}
    ran = subprocess.run(command, cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= 18, ran.stdout[-400:]


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
    source = ASTSource(function, signature, places)
    return str(triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False}).asm["ptx"])


@compiled
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_leave_e4m3_alone_where_there_is_none(capability: int) -> None:
    native = capability >= 89
    scaling = {"KIND": "fp8", "DIVIDE": False, "ON_SCALE": False, "ZEROES": False, "NATIVE": native}
    tile = {"ROWS": 16, "GROUPS": 4, "GROUP": 128}
    groups = scaling | tile | {"TIES": "even", "ZERO_SIGN": "kept", "LAYOUT": "packed", "FAKE": False}
    four = groups | {"KIND": "mxfp4"}
    blocks = scaling | {"BLOCK_N": 128, "BLOCK_K": 128, "BLOCKS": 1, "CHUNK_N": 128}
    decode = tile | {"GROUP_ROWS": 1, "NUMBERS": "e4m3", "SCALE": "ue8m0", "LAYOUT": "rows", "NATIVE": native}
    tensors = {"x": "*bf16", "result": "*u8", "scales": "*u8"}
    assert ("f16x2" in ptx(quantize_groups.quantize_tile, capability, tensors, four, {"floor": "fp32"})) == native
    for text in (
        ptx(quantize_groups.quantize_tile, capability, tensors, groups, {"floor": "fp32"}),
        ptx(quantize_blocks.quantize_block, capability, {"weight": "*bf16", "codes": "*u8", "scales": "*u8"}, blocks, {"floor": "fp32"}),
        ptx(dequantize.dequantize_tile, capability, {"codes": "*u8", "scales": "*u8", "result": "*bf16"}, decode, {}),
    ):
        assert ("e4m3x2" in text) == native
        assert ".ftz" not in text  # subnormal numbers count


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
