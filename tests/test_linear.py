"""Quantised linear layers, both implementations: published vectors, exact arithmetic on decoded codes, reported bugs, pairs and their
layouts, producers of codes, tile_kernels, refusals.

`exact_product` knows nothing of the package: ml_dtypes decodes the codes, integers and fractions multiply and add. What it gives is
rounded as the specification says, so that results are compared bit for bit.
"""

import importlib
import math
from fractions import Fraction
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dsv4 import configs, host
from dsv4.fast import use
from dsv4.parity.bounds import gamma
from dsv4.reference import linear as reference
from dsv4.reference import norms, quantization, rotary, scales
from dsv4.reference.numerics import numerics
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import ArgumentError, Mxfp8Pair, Mxfp8Route, ProductMode, Quantized, ScaleLayout
from oracles import tile_kernels_module

GOLDEN = Path(__file__).parent / "golden"
FUNCTIONS, STAGES = load_file(GOLDEN / "functions.safetensors"), load_file(GOLDEN / "linear.safetensors")
MODELS = [("v4", 128, 1e-6), ("v41", 32, 1e-20)]
LAYOUTS = ["packed", "128x4"]
PRODUCER_LAYOUTS = ["rows", "packed", "128x4", "mn_major"]
LN_06_ROWS = [1, 127, 128, 129, 200, 256, 1000, 4100, 16384]
PAIR_ROWS = [1, 129, 1000, 4100, 16384]
NAN = math.nan


@pytest.fixture(params=["reference", "fast"])
def linear(request):
    with use("eager"):  # what inductor compiles, as it stands
        yield importlib.import_module(f"dsv4.{request.param}.linear")


def draw(*shape, seed=0, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def codes(*shape, seed=0):
    """Every finite E4M3 code."""
    byte = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return torch.where(byte & 0x7F == 0x7F, 0x45, byte).to(torch.uint8).view(torch.float8_e4m3fn)


def some_scales(kind, *shape, seed=0):
    """Powers of two as e8m0, bits or fp32; or any fp32 numbers, which no byte holds."""
    generator = torch.Generator().manual_seed(seed)
    byte = torch.randint(118, 130, shape, generator=generator, dtype=torch.uint8)
    if kind in ("e8m0", "uint8"):
        return byte.view(torch.float8_e8m0fnu) if kind == "e8m0" else byte
    powers = 2.0 ** (byte.float() - 127)
    return powers if kind == "powers" else powers * (1 + torch.rand(shape, generator=generator))


def same(got, expected):
    """Equal bits, NaN for NaN."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    if got.dtype == torch.bfloat16:
        assert torch.equal(got.isnan(), expected.isnan())
        got, expected = got.nan_to_num(7.0), expected.nan_to_num(7.0)
    assert torch.equal(got.view(integer), expected.view(integer))


def decoded(e4m3):
    return e4m3.contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def factors(value):
    """Scales as exact numbers."""
    if value.dtype == torch.float32:
        return value.contiguous().numpy().astype(np.float64)
    return value.contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)


def rounded(exact):
    """Fractions to fp32, to bf16; a sum of 0 is +0."""
    return torch.tensor(np.array(exact, dtype=np.float64), dtype=torch.float64).float().bfloat16()


def exact_product(a, sa, w, sw, block):
    """Codes a [tokens, k] with scales of groups, w [n, k] with scales of rows or of square blocks: sums of whole numbers of 2^-18."""
    (tokens, k), n = a.shape, w.shape[0]
    rows = 1 if sw.shape[0] == n and n > 1 else block
    a, w = ((decoded(part) * 512).astype(np.int64) for part in (a, w))
    sa, sw = factors(sa), factors(sw)
    sums = np.full((tokens, n), Fraction(0))
    for b in range(-(-k // block)):
        inner = a[:, b * block : (b + 1) * block] @ w[:, b * block : (b + 1) * block].T
        for t in range(tokens):
            for i in range(n):
                sums[t, i] += Fraction(sa[t, b]) * Fraction(sw[i // rows, b]) * Fraction(int(inner[t, i]), 2**18)
    return rounded(sums).reshape(tokens, n)


# published vectors


@pytest.mark.parametrize("block", [32, 128])
def test_published_function(linear, block):
    x, weight, scale, y = (FUNCTIONS[f"fp8_linear_b{block}.{name}"] for name in ("x", "w", "w_scale", "y"))
    same(linear.linear_fp8(x, weight, scale, block=block), y)
    same(linear.linear_fp8(reference.quantize_partial(x, block), weight, scale, block=block), y)


@pytest.mark.parametrize(("model", "block", "eps"), MODELS)
def test_published_projections(linear, model, block, eps):
    """wq_a and wkv with the norms after them, wq_b (heads 0 and 1; of V4.1 after its rotation), bit for bit."""
    stage = {name.removeprefix(f"{model}."): part for name, part in STAGES.items() if name.startswith(f"{model}.")}

    def product(name, x):
        return linear.linear_fp8(x, stage[f"{name}.weight"], stage[f"{name}.scale"], block=block)

    same(norms.rms_norm(product("wq_a", stage["attn_norm"]), stage["q_norm.weight"], eps=eps), stage["qr"])
    same(norms.rms_norm(product("wkv", stage["attn_norm"]), stage["kv_norm.weight"], eps=eps), stage["kv_normed"])
    q = product("wq_b", stage["qr"])
    if model == "v4":
        same(q, stage["wq_b_out"])
        return
    table = rope_table(rope_frequencies(160000.0, yarn=configs.V4_FLASH.rope_scaling), 256)
    same(rotary.apply_rope(q.unflatten(1, (2, 512)), table, stage["rows"]), stage["q"])
    fused = linear.norm_quantize(product("wq_a", stage["attn_norm"]), stage["q_norm.weight"], eps=eps, group=block)
    same(linear.linear_fp8(fused, stage["wq_b.weight"], stage["wq_b.scale"], block=block), q)


# products by exact arithmetic


@pytest.mark.parametrize("kind", ["e8m0", "uint8", "powers", "fp32"])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 1, 1), (7, 33, 31), (3, 129, 200), (2, 256, 256), (5, 70, 129)])
def test_product_by_exact_arithmetic(linear, tokens, n, k, block, kind):
    a, w, blocks = codes(tokens, k), codes(n, k, seed=1), -(-k // block)
    sa, sw = some_scales(kind, tokens, blocks, seed=2), some_scales(kind, -(-n // block), blocks, seed=3)
    same(linear.linear_fp8(Quantized(a, sa), w, sw, block=block), exact_product(a, sa, w, sw, block))


@pytest.mark.parametrize("layouts", [(x, w) for x in LAYOUTS for w in LAYOUTS])
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 2, 1), (3, 35, 96), (5, 130, 160), (129, 3, 256)])
def test_pairs_by_exact_arithmetic(linear, tokens, n, k, layouts):
    laid_out = {"packed": scales.pack_ue8m0, "128x4": scales.swizzle_128x4}
    a, w, groups = codes(tokens, k), codes(n, k, seed=1), -(-k // 32)
    sa, sw = some_scales("e8m0", tokens, groups, seed=2), some_scales("e8m0", n, groups, seed=3)
    pairs = [Mxfp8Pair(part, laid_out[layout](s)) for part, s, layout in zip((a, w), (sa, sw), layouts, strict=True)]
    assert [str(pair.layout) for pair in pairs] == list(layouts)
    same(linear.linear_mxfp8(*pairs), exact_product(a, sa, w, sw, 32))


@pytest.mark.parametrize(("tokens", "n"), [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("block", [32, 128])
def test_empty(linear, tokens, n, block):
    weight, weight_scales = codes(n, 200), some_scales("e8m0", -(-n // block), -(-200 // block))
    for x in (draw(tokens, 200), Quantized(codes(tokens, 200), some_scales("fp32", tokens, -(-200 // block)))):
        got = linear.linear_fp8(x, weight, weight_scales, block=block)
        assert (got.shape, got.dtype) == ((tokens, n), torch.bfloat16)
    pair = Mxfp8Pair(*linear.norm_quantize(draw(tokens, 128), draw(128), eps=1e-6, group=32, scale_layout="packed"))
    assert linear.linear_mxfp8(pair, linear.mxfp8_weight(codes(n, 128), some_scales("e8m0", -(-n // 32), 4))).shape == (tokens, n)
    empty = linear.swiglu_quantize(draw(tokens, 128), draw(tokens, 128), limit=10.0, group=32, scale_layout="128x4")
    assert empty.scales.shape == (-(-tokens // 128), 1, 32, 4)


@pytest.mark.parametrize(("tokens", "k"), [(1, 256), (3, 200), (2, 1), (5, 129)])
@pytest.mark.parametrize("block", [32, 128])
def test_numbers_are_quantised_by_the_official_rule(linear, tokens, k, block):
    """With a partial last group, and in the first row numbers so small that the floor decides their codes."""
    x = draw(tokens, k) * torch.logspace(-9, 3, 5)[:tokens, None].bfloat16()
    w, sw = codes(40, k, seed=1), some_scales("e8m0", -(-40 // block), -(-k // block), seed=2)
    padded = torch.cat([x, torch.zeros(tokens, -k % block).bfloat16()], 1)
    a, sa = quantization.quantize_fp8(padded, block)
    same(linear.linear_fp8(x, w, sw, block=block), exact_product(a[:, :k], sa, w, sw, block))


def test_rounding_is_to_fp32_and_then_to_bf16(linear):
    """1 + 2^-8 + 2^-31: fp32 drops the last term, and bf16 takes the tie to 1. One rounding alone would give 1 + 2^-7."""
    a, w = torch.zeros(1, 33), torch.zeros(2, 33)
    a[:, [0, 1, 32]] = torch.tensor([1.0, 2.0**-6, 2.0**-9])
    w[0, [0, 1, 32]] = torch.tensor([1.0, 2.0**-2, 2.0**-9])
    w[1] = -w[0]
    a, w, ones = a.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn), torch.ones(1, 2)
    x = Quantized(a, torch.tensor([[1.0, 2.0**-13]]))
    assert linear.linear_fp8(x, w, ones, block=32).tolist() == [[1.0, -1.0]]
    with numerics("unrounded"):
        assert reference.linear_fp8(x, w, ones, block=32)[0, 0] == 1 + 2.0**-8 + 2.0**-31


def test_a_sum_of_zero_is_plus_zero(linear):
    minus = torch.full((2, 32), -0.0).to(torch.float8_e4m3fn)
    ones = torch.ones(3, 32).to(torch.float8_e4m3fn)
    got = linear.linear_fp8(Quantized(minus, torch.ones(2, 1)), ones, torch.ones(1, 1), block=32)
    assert got.tolist() == [[0.0] * 3] * 2
    assert not got.signbit().any()
    alternating = torch.ones(1, 32).to(torch.float8_e4m3fn).view(torch.uint8).clone()
    alternating[:, ::2] |= 0x80
    assert (
        not linear.linear_fp8(Quantized(alternating.view(ones.dtype), torch.ones(1, 1)), ones, torch.ones(1, 1), block=32).signbit().any()
    )


@pytest.mark.parametrize("kind", ["e8m0", "fp32"])
def test_nan_reaches_every_sum_it_is_part_of(linear, kind):
    def poisoned(value, at):
        value = value.clone()
        if value.dtype == torch.float32:
            value[at] = NAN
        else:
            value.view(torch.uint8)[at] = 0xFF
        return value

    a, sa = codes(3, 96), some_scales(kind, 3, 3)
    w, sw = codes(70, 96, seed=1), some_scales(kind, 3, 3, seed=2)
    none = linear.linear_fp8(Quantized(a, sa), w, sw, block=32)
    assert none.isfinite().all()
    bad = a.view(torch.uint8).clone()
    bad[1, 5] = 0x7F
    zeros = torch.zeros(70, 96).to(a.dtype)
    for x in (Quantized(bad.view(a.dtype), sa), Quantized(a, poisoned(sa, (1, 2)))):
        for weight in (w, zeros):
            assert linear.linear_fp8(x, weight, sw, block=32).isnan().tolist() == [[row == 1] * 70 for row in range(3)]
    got = linear.linear_fp8(Quantized(a, sa), w, poisoned(sw, (1, 0)), block=32)
    assert got.isnan().tolist() == [[32 <= n < 64 for n in range(70)]] * 3
    same(got[:, :32], none[:, :32])
    x = draw(3, 96)
    x[2, 40] = math.inf
    assert linear.linear_fp8(x, w, sw, block=32).isnan().all(1).tolist() == [False, False, True]


@pytest.mark.parametrize("byte", [0, 1, 254])
def test_scale_bytes_at_the_ends(linear, byte):
    """Byte 0 is 2^-127; the other scale brings the product back."""
    a, w = codes(2, 64), codes(3, 64, seed=1)
    sa, sw = torch.full((2, 2), byte, dtype=torch.uint8), torch.full((1, 2), 254 - byte, dtype=torch.uint8)
    expected = exact_product(a, torch.full((2, 2), 127, dtype=torch.uint8), w, torch.full((1, 2), 127, dtype=torch.uint8), 32)
    same(linear.linear_fp8(Quantized(a, sa), w, sw, block=32), expected)
    pairs = (Mxfp8Pair(a, scales.pack_ue8m0(sa)), Mxfp8Pair(w, scales.swizzle_128x4(sw.repeat(3, 1))))
    same(linear.linear_mxfp8(*pairs), expected)


def test_strides_are_honoured(linear):
    x, w, sw = draw(5, 256), codes(40, 256, seed=1), some_scales("fp32", 1, 2, seed=2)
    expected = linear.linear_fp8(x, w, sw)
    wide = torch.zeros(40, 300, dtype=torch.uint8).view(w.dtype)
    wide[:, 7:263] = w
    same(linear.linear_fp8(x.T.contiguous().T, wide[:, 7:263], sw.T.contiguous().T), expected)
    a, sa = quantization.quantize_fp8(x, 128)
    numbers = 2.0 ** (sa.view(torch.uint8).float() - 127)
    for form in (sa.T.contiguous().T, numbers, scales.align_mn_major(numbers), numbers.repeat(1, 2)[:, :2]):
        same(linear.linear_fp8(Quantized(a.T.contiguous().T, form), w, sw), expected)


def test_transposed_pairs(linear):
    a, w = codes(5, 256), codes(40, 256, seed=1)
    sa, sw = some_scales("uint8", 5, 8, seed=2), some_scales("uint8", 40, 8, seed=3)
    packed, tiled = scales.pack_ue8m0(sa), scales.swizzle_128x4(sw)
    expected = linear.linear_mxfp8(Mxfp8Pair(a, packed), Mxfp8Pair(w, tiled))
    row_major, moved = packed.clone(memory_format=torch.contiguous_format), tiled.transpose(1, 3).contiguous().transpose(1, 3)
    assert row_major.stride() != packed.stride()
    same(linear.linear_mxfp8(Mxfp8Pair(a.T.contiguous().T, row_major), Mxfp8Pair(w, moved)), expected)


# numerics of the reference


def test_unquantised_multiplies_what_is_there():
    x, w, sw = (
        torch.randn(6, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        codes(50, 200),
        some_scales("fp32", 2, 7),
    )
    weight = torch.from_numpy(decoded(w) * factors(sw).repeat(32, 0)[:50].repeat(32, 1)[:, :200])
    with numerics("unquantised"):
        got = reference.linear_fp8(x, w, sw, block=32)
        assert torch.autograd.gradcheck(lambda x: reference.linear_fp8(x, w[:3], sw[:1], block=32), (x[:2].clone().requires_grad_(),))
    theirs = torch.nn.functional.linear(x.float(), weight.float()).double()
    assert ((theirs - got).abs() <= gamma(200 + 2) * (x.abs() @ weight.abs().T)).all()
    assert (got - x @ weight.T).abs().max() <= 2.0**-40 * (x.abs() @ weight.abs().T).max()


def test_unrounded_has_the_codes_and_no_roundings():
    x, w, sw = draw(6, 256), codes(50, 256), some_scales("e8m0", 1, 2)
    a, sa = quantization.quantize_fp8(x, 128)
    with numerics("unrounded"):
        got = reference.linear_fp8(x, w, sw)
        same(reference.linear_fp8(x.double(), w, sw).float(), got.float())
    assert got.dtype == torch.float64
    same(got.float().bfloat16(), exact_product(a, sa, w, sw, 128))


# reported bugs


def test_ln_01_scales_that_are_no_powers_of_two(linear):
    """amax/448 = 1.5 on either side: to keep only its exponent would give two thirds."""
    a, ones = torch.full((4, 256), 448.0).to(torch.float8_e4m3fn), torch.ones(8, 256).to(torch.float8_e4m3fn)
    got = linear.linear_fp8(Quantized(a, torch.full((4, 2), 1.5)), ones, torch.ones(1, 2))
    assert got.tolist() == [[672.0 * 256] * 8] * 4
    halves = linear.linear_fp8(Quantized(a, torch.full((4, 2), 1.5)), ones, torch.full((1, 2), 1.5))
    assert halves.tolist() == [[1008.0 * 256] * 8] * 4
    x = draw(4, 256, scale=30.0)
    quantized = quantization.quantize_fp8(x, 128, scale="fp32")
    assert (quantized.scales.view(torch.int32) & 0x7FFFFF).all()
    w, sw = codes(8, 256, seed=1), some_scales("fp32", 1, 2)
    same(linear.linear_fp8(quantized, w, sw), exact_product(*quantized, w, sw, 128))


@pytest.mark.parametrize("numbers", [False, True])
def test_ln_03_scales_in_rows_or_in_columns(linear, numbers):
    a, w = codes(192, 256), codes(128, 256, seed=1)
    byte = (127 + torch.arange(192) % 3).to(torch.uint8)[:, None].repeat(1, 2)
    sa = 2.0 ** (byte.float() - 127) if numbers else byte.view(torch.float8_e8m0fnu)
    columns = sa.T.contiguous().T
    assert columns.stride() == (1, 192)
    sw = some_scales("e8m0", 1, 2)
    expected = linear.linear_fp8(Quantized(a, sa), w, sw)
    same(linear.linear_fp8(Quantized(a, columns), w, sw), expected)
    plain = linear.linear_fp8(Quantized(a, torch.ones(192, 2)), w, sw)
    same(expected, plain * 2.0 ** (torch.arange(192) % 3)[:, None].bfloat16())


def test_ln_05_no_row_depends_on_how_many_there_are(linear):
    row, w, sw = draw(1, 2048), codes(512, 2048, seed=1), some_scales("e8m0", 4, 16)
    one = linear.linear_fp8(row, w, sw)
    assert one.count_nonzero() > 500
    for rows in (2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 300):
        same(linear.linear_fp8(row.expand(rows, -1), w, sw), one.expand(rows, -1))
        made = linear.norm_quantize(row.expand(rows, -1), draw(2048, seed=2), eps=1e-6, group=32, scale_layout="packed")
        assert (made.scales.contiguous().view(torch.uint8) > 0).all()


def pair_offsets(rows, groups):
    """Where the byte of (row, group) lies in FlashInfer's buffer: spec A 8.3."""
    r, g = np.indices((rows, groups))
    return r // 128 * (-(-groups // 4) * 512) + g // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + g % 4


@pytest.mark.parametrize("rows", LN_06_ROWS)
def test_ln_06_pads_are_zero_and_not_read(linear, rows):
    x, weight = draw(rows, 512, seed=rows), draw(512, seed=1)
    packed, tiled = (linear.norm_quantize(x, weight, eps=1e-6, group=32, scale_layout=layout) for layout in LAYOUTS)
    by_row = packed.scales.contiguous().view(torch.uint8).numpy()
    flat = tiled.scales.view(torch.uint8).flatten()
    offsets = torch.from_numpy(pair_offsets(rows, 16))
    assert np.array_equal(flat[offsets].numpy(), by_row)
    pads = torch.ones(len(flat), dtype=torch.bool)
    pads[offsets.flatten()] = False
    assert not flat[pads].any()
    assert int(pads.sum()) == (-rows % 128) * 16
    w = linear.mxfp8_weight(codes(48, 512, seed=2), some_scales("e8m0", 2, 16), scale_layout="128x4")
    expected = linear.linear_mxfp8(Mxfp8Pair(*packed), w)
    same(linear.linear_mxfp8(Mxfp8Pair(*tiled), w), expected)
    dirty = flat.clone()
    dirty[pads] = 0xFF
    memory = torch.full((4, -(-rows // 4) * 4), -1, dtype=torch.int32)
    memory[:, :rows] = packed.scales.T
    for scale in (dirty.view(torch.int32).view(tiled.scales.shape), memory.T[:rows]):
        same(linear.linear_mxfp8(Mxfp8Pair(packed.codes, scale), w), expected)
    rows_of_weight = w.scales.view(torch.uint8).flatten().clone()
    unread = torch.ones(len(rows_of_weight), dtype=torch.bool)
    unread[torch.from_numpy(pair_offsets(48, 16)).flatten()] = False
    rows_of_weight[unread] = 0xFF
    same(linear.linear_mxfp8(Mxfp8Pair(*packed), Mxfp8Pair(w.codes, rows_of_weight.view(torch.int32).view(w.scales.shape))), expected)


@pytest.mark.parametrize("rows", LN_06_ROWS)
def test_ln_06_zeroing_rows_in_either_layout(linear, rows):
    live = (rows + 1) // 2
    packed, tiled = (
        linear.swiglu_quantize(draw(rows, 512), draw(rows, 512, seed=1), group=32, scale_layout=layout).scales for layout in LAYOUTS
    )
    zeroed = scales.zero_pad_rows(tiled, live, scale_layout="128x4")
    same(scales.packed_to_128x4(scales.zero_pad_rows(packed, live, scale_layout="packed")), zeroed)
    same(scales.packed_from_128x4(zeroed, rows)[:live], packed[:live])


def test_qt_17_scales_of_another_layout_are_refused(linear):
    """B is quantised along k, which the products sum over; a grid of scales is no pair's."""
    k = torch.arange(128)
    x, numbers = draw(128, 128), (2.0 ** (k // 32))[None].expand(128, -1).bfloat16()
    weight = quantization.quantize_fp8(numbers, 32)
    pair = Mxfp8Pair(*quantization.quantize_fp8(x, 32, scale_layout="128x4"))
    with pytest.raises(ArgumentError, match=r"^weight\.scales: got float8_e8m0fnu; must be int32"):
        linear.linear_mxfp8(pair, Mxfp8Pair(*weight))
    got = linear.linear_mxfp8(pair, Mxfp8Pair(weight.codes, scales.swizzle_128x4(weight.scales)))
    same(got, exact_product(*quantization.quantize_fp8(x, 32), *weight, 32))
    exact = x.double() @ numbers.double().T
    assert (got.double() - exact).norm() <= 0.04 * exact.norm()
    assert torch.cosine_similarity(got.double().flatten(), exact.flatten(), dim=0) >= 0.999


# pairs


@pytest.mark.parametrize("rows", PAIR_ROWS)
@pytest.mark.parametrize("producer", ["norm_quantize", "swiglu_quantize"])
def test_producers_write_what_converters_make(linear, producer, rows):
    x = draw(rows, 160, seed=rows)
    arguments = (x, draw(160, seed=1)) if producer == "norm_quantize" else (x, draw(rows, 160, seed=2))
    options = {"eps": 1e-6} if producer == "norm_quantize" else {"limit": 2.0}
    made = {layout: getattr(linear, producer)(*arguments, **options, group=32, scale_layout=layout) for layout in PRODUCER_LAYOUTS}
    plain = made["rows"]
    for other in made.values():
        same(other.codes, plain.codes)
    same(made["packed"].scales, scales.pack_ue8m0(plain.scales))
    assert made["packed"].scales.stride() == (1, -(-rows // 4) * 4)
    same(made["128x4"].scales, scales.packed_to_128x4(made["packed"].scales))
    same(made["mn_major"].scales, 2.0 ** (plain.scales.view(torch.uint8).float() - 127))
    assert made["mn_major"].scales.stride() == (1, -(-rows // 4) * 4)
    # the live rows' scales are a prefix of the padded ones'
    live = (rows + 1) // 2
    first = [argument[:live] if len(argument) == rows and argument.dim() == 2 else argument for argument in arguments]
    alone = getattr(linear, producer)(*first, **options, group=32, scale_layout="packed").scales
    same(alone, made["packed"].scales[:live])
    padded = scales.restride_rows(alone, rows)
    same(padded, scales.zero_pad_rows(made["packed"].scales, live, scale_layout="packed"))
    same(scales.packed_to_128x4(padded), scales.zero_pad_rows(made["128x4"].scales, live, scale_layout="128x4"))


@pytest.mark.parametrize(("n", "k"), [(64, 256), (70, 200), (1, 1), (300, 96)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_of_a_checkpoint_as_a_pair(linear, n, k, layout):
    w, sw = codes(n, k), some_scales("e8m0", -(-n // 32), -(-k // 32))
    pair = linear.mxfp8_weight(w, sw, scale_layout=layout)
    assert pair.codes.data_ptr() == w.data_ptr()
    assert str(pair.layout) == layout
    rows = sw.view(torch.uint8).repeat_interleave(32, 0)[:n]
    same(pair.scales, scales.pack_ue8m0(rows) if layout == "packed" else scales.swizzle_128x4(rows))
    same(linear.mxfp8_weight(w, sw.view(torch.uint8), scale_layout=layout).scales, pair.scales)
    x = reference.quantize_partial(draw(5, k), 32)
    expected = linear.linear_fp8(x, w, sw, block=32)
    same(linear.linear_mxfp8(Mxfp8Pair(x.codes, scales.pack_ue8m0(x.scales)), pair), expected)


def test_offsets_of_the_specification(linear):
    """Spec A 12: 160 groups of 32, rows up to 200."""
    byte = torch.randint(0, 255, (7, 160), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    flat = linear.mxfp8_weight(codes(201, 5120), byte, scale_layout="128x4").scales.view(torch.uint8).flatten()
    golden = {(0, 0): 0, (1, 0): 16, (31, 3): 499, (32, 0): 4, (33, 5): 533, (127, 159): 20479, (128, 0): 20480, (200, 7): 21131}
    for (row, group), offset in golden.items():
        assert flat[offset] == byte[row // 32, group]


# producers


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("layout", PRODUCER_LAYOUTS)
@pytest.mark.parametrize("floor", ["official", "sglang", "flashinfer", "none", "flashmla"])
def test_norm_then_quantiser(linear, floor, layout, group):
    x, weight = draw(5, 256), draw(256, seed=1)
    x[1], x[2] = 0, x[2] * 1e-5
    weight[:group] = 1e-7
    got = linear.norm_quantize(x, weight, eps=1e-6, group=group, scale_layout=layout, amax_floor=floor)
    normed = norms.rms_norm(x, weight, eps=1e-6)
    plain = quantization.quantize_fp8(normed, group, amax_floor=floor)
    same(got.codes, plain.codes)
    if layout == "mn_major":
        same(got.scales, 2.0 ** (plain.scales.view(torch.uint8).float() - 127))
    else:
        same(got.scales, quantization.quantize_fp8(normed, group, scale_layout=layout, amax_floor=floor).scales)


@pytest.mark.parametrize("limit", [None, 10.0, 0.7])
def test_swiglu_by_numpy_and_tile_kernels(linear, limit):
    gate, up = draw(9, 256, scale=8.0), draw(9, 256, seed=1, scale=8.0)
    g, u = gate.double().numpy(), up.double().numpy()
    if limit is not None:
        bound = float(np.float32(limit))
        g, u = np.minimum(g, bound), np.clip(u, -bound, bound)
    h = g / (1 + np.exp(-g)) * u
    expected = quantization.quantize_fp8(torch.from_numpy(h).float().bfloat16(), 32)
    for got in (
        linear.swiglu_quantize(gate, up, limit=limit, group=32),
        linear.swiglu_quantize(*torch.cat([gate, up], 1).chunk(2, 1), limit=limit, group=32),
    ):
        same(got.codes, expected.codes)
        same(got.scales, expected.scales)
    try:
        theirs = tile_kernels_module("swiglu").swiglu_forward
    except PackageNotFoundError:
        return
    both = theirs(torch.cat([gate, up], 1), swiglu_clamp_value=limit).double().numpy()
    assert (np.abs(both - h) <= gamma(16) * np.abs(h)).all()  # an exponential, a sum, a quotient, a product; their limit in bf16 numbers


def test_swiglu_specials(linear):
    gate = torch.tensor([[64.0, -64.0, 0.0, 20.0] * 8]).bfloat16()
    up = torch.tensor([[2.0, 2.0, 3.0, -20.0] * 8]).bfloat16()
    got = linear.swiglu_quantize(gate, up, limit=10.0, group=32)
    ten = 10 / (1 + math.exp(-10))
    assert got.scales.view(torch.uint8).item() == 125  # 10 * 9.9995: 448 / 4 is above it, 448 / 8 is not
    numbers = torch.tensor([2 * ten, -128 * math.exp(-64), 0.0, -10 * ten]).bfloat16()
    same(got.codes[0, :4], (numbers * 4).to(torch.float8_e4m3fn))
    poisoned = gate.clone()
    poisoned[0, 3] = NAN
    for pair in ((poisoned, up), (gate, poisoned)):
        got = linear.swiglu_quantize(*pair, limit=10.0, group=32)
        assert got.scales.view(torch.uint8).item() == 0xFF
        assert (got.codes.view(torch.uint8) == 0x7F).all()


def test_scale_bytes_of_the_specification(linear):
    """Spec A 12, where the magnitude is a bf16 number: silu(64) is 64."""
    golden = {0.0: 105, 5e-5: 105, 1e-3: 109, 0.0546875: 114, 0.5: 118, 1.0: 119, 1.75: 119, 3.5: 120, 7.0: 121, 448.0: 127, 450.0: 128}
    amax = torch.tensor(list(golden)).bfloat16()
    up = torch.zeros(len(golden), 32).bfloat16()
    up[:, 3] = amax / 64
    got = linear.swiglu_quantize(torch.full_like(up, 64.0), up, group=32)
    assert got.scales.view(torch.uint8).flatten().tolist() == list(golden.values())
    sglang = linear.swiglu_quantize(torch.full_like(up, 64.0), up, group=32, amax_floor="sglang")
    assert sglang.scales.view(torch.uint8)[0].item() == 85
    none = linear.swiglu_quantize(torch.full_like(up, 64.0), up, group=32, amax_floor="flashinfer")
    assert none.scales.view(torch.uint8)[0].item() == 0


# routes


@pytest.mark.parametrize("side", ["reference", "fast"])
@pytest.mark.parametrize(
    ("capability", "packed", "flashinfer"),
    [
        (None, "inductor", False), ((7, 5), "inductor", False), ((8, 0), "triton", False), ((8, 9), "triton", False),
        ((9, 0), "triton", False), ((10, 0), "deepgemm", True), ((10, 3), "deepgemm", True), ((10, 7), "deepgemm", True),
        ((12, 0), "deepgemm", True), ((12, 1), "triton", True),
    ],
)  # fmt: skip
def test_route(side, capability, packed, flashinfer, monkeypatch):
    monkeypatch.setattr(host, "cuda_capability", lambda device: capability)
    choose = importlib.import_module(f"dsv4.{side}.linear").choose_mxfp8_route
    device = "cpu" if capability is None else "cuda:1"
    plain = Mxfp8Route(ScaleLayout.PACKED, packed)
    for mode in ProductMode:
        for consumer in ("deepgemm", "triton", "inductor", "eager"):
            assert choose(consumer, mode, device) == plain
        tiled = Mxfp8Route(ScaleLayout.SWIZZLED_128X4, "flashinfer")
        assert choose("flashinfer", str(mode), torch.device(device)) == (tiled if flashinfer and mode == "default" else plain)


def test_capability_of_no_cuda_device():
    assert host.cuda_capability(torch.device("cpu")) is None
    assert host.choose_mxfp8_route("flashinfer", "default", "meta") == Mxfp8Route(ScaleLayout.PACKED, "inductor")


# refusals


def fp8(x=None, weight=None, weight_scales=None, block=128):
    x = draw(3, 256) if x is None else x
    weight = codes(40, 256) if weight is None else weight
    return lambda m: m.linear_fp8(x, weight, torch.ones(1, 2) if weight_scales is None else weight_scales, block=block)


def mx(x=None, weight=None):
    good = Mxfp8Pair(codes(3, 256), torch.zeros(3, 2, dtype=torch.int32))
    return lambda m: m.linear_mxfp8(good if x is None else x, good if weight is None else weight)


def norm(x=None, weight=None, **options):
    return lambda m: m.norm_quantize(
        draw(3, 256) if x is None else x, draw(256) if weight is None else weight, **{"eps": 1e-6, "group": 32, **options}
    )


def swiglu(gate=None, up=None, **options):
    return lambda m: m.swiglu_quantize(
        draw(3, 256) if gate is None else gate, draw(3, 256) if up is None else up, **{"group": 32, **options}
    )


INTS = torch.zeros(3, 2, dtype=torch.int32)
META = torch.zeros(3, 256, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (fp8(block=64), "block: got 64; must be one of 32, 128"),
        (fp8(x=draw(3, 256).float()), "x: got float32; must be bf16"),
        (fp8(x=codes(3, 256)), "x: got float8_e4m3fn; codes come with their scales"),
        (fp8(x=(codes(3, 256), torch.ones(3, 2))), "x: got tuple; must be a tensor, or Quantized"),
        (fp8(x=Mxfp8Pair(codes(3, 256), INTS)), r"x: got Mxfp8Pair; .* linear_mxfp8 takes pairs"),
        (fp8(x=5), "x: got int; must be a tensor of bf16"),
        (fp8(x=draw(3, 2, 256)), r"x: got shape \[3, 2, 256\]; must have shape \[tokens, k\]"),
        (fp8(x=Quantized(draw(3, 256), torch.ones(3, 2))), r"x\.codes: got bfloat16; must be e4m3"),
        (fp8(x=Quantized(codes(3, 256), INTS)), r"x\.scales: got int32; must be e8m0, uint8 or fp32"),
        (fp8(x=Quantized(codes(3, 256), torch.ones(3, 8))), r"x\.scales: got shape \[3, 8\]; must have shape \[3, 2\]"),
        (fp8(x=Quantized(codes(3, 256), torch.ones(3, 2, device="meta"))), r"x\.scales: got a tensor on meta"),
        (fp8(weight=draw(40, 256)), "weight: got bfloat16; must be e4m3"),
        (fp8(weight=codes(40, 128)), r"weight: got shape \[40, 128\]; must have shape \[n, 256\]"),
        (fp8(weight=codes(256, 40).T), r"weight: got strides \(1, 40\); must have contiguous rows\. Use contiguous\(\) once"),
        (fp8(x=draw(3, 0), weight=codes(40, 0)), "weight: got shape .* must have at least one column"),
        (fp8(x=META), "weight: got a tensor on cpu; must be on the device of x, meta"),
        (fp8(weight_scales=torch.ones(1, 2).double()), "weight_scales: got float64"),
        (fp8(weight_scales=torch.ones(2, 2)), r"weight_scales: got shape \[2, 2\]; must have shape \[1, 2\]"),
        (fp8(weight_scales=torch.ones(1, 2), block=32), r"weight_scales: got shape \[1, 2\]; must have shape \[2, 8\]"),
        (fp8(weight_scales=torch.ones(1, 2, device="meta")), "weight_scales: got a tensor on meta"),
        (mx(x=Quantized(codes(3, 256), INTS)), r"x: got Quantized; must be an Mxfp8Pair: the type says that groups are of 32"),
        (mx(weight=codes(3, 256)), "weight: got Tensor; must be an Mxfp8Pair"),
        (mx(x=Mxfp8Pair(draw(3, 256), INTS)), r"x\.codes: got bfloat16"),
        (mx(x=Mxfp8Pair(codes(3, 0), INTS)), r"x\.codes: got shape \[3, 0\]; must have at least one column"),
        (mx(x=Mxfp8Pair(codes(3, 256), torch.ones(3, 8))), r"x\.scales: got float32; must be int32"),
        (mx(x=Mxfp8Pair(codes(3, 256), INTS[:2])), r"x\.scales: got shape \[2, 2\]; must have shape \[3, 2\]"),
        (mx(x=Mxfp8Pair(codes(3, 256), torch.zeros(1, 1, 32, 4).int())), r"x\.scales: got shape .* must have shape \[1, 2, 32, 4\]"),
        (mx(x=Mxfp8Pair(codes(3, 256), INTS.flatten())), r"x\.scales: got shape \[6\]"),
        (mx(x=Mxfp8Pair(codes(3, 256), INTS.to("meta"))), r"x\.scales: got a tensor on meta"),
        (mx(weight=Mxfp8Pair(codes(3, 128), INTS[:, :1])), r"weight\.codes: got shape \[3, 128\]; must have shape \[n, 256\]"),
        (mx(weight=Mxfp8Pair(codes(256, 3).T, INTS)), r"weight\.codes: got strides"),
        (mx(weight=Mxfp8Pair(codes(3, 256).to("meta"), INTS.to("meta"))), r"weight\.codes: got a tensor on meta"),
        (lambda m: m.mxfp8_weight(draw(64, 64), some_scales("e8m0", 2, 2)), "weight: got bfloat16"),
        (lambda m: m.mxfp8_weight(codes(64, 0), some_scales("e8m0", 2, 0)), "weight: got shape .* at least one column"),
        (lambda m: m.mxfp8_weight(codes(64, 65).T, some_scales("e8m0", 3, 2)), "weight: got strides"),
        (lambda m: m.mxfp8_weight(codes(64, 64), torch.ones(2, 2)), r"block_scales: got float32; .* encode_e8m0"),
        (lambda m: m.mxfp8_weight(codes(64, 64), some_scales("e8m0", 2, 3)), "block_scales: got shape"),
        (lambda m: m.mxfp8_weight(codes(64, 64), some_scales("e8m0", 2, 2).to("meta")), "block_scales: got a tensor on meta"),
        (lambda m: m.mxfp8_weight(codes(64, 64), some_scales("e8m0", 2, 2), scale_layout="rows"), "must be one of packed, 128x4"),
        (norm(x=draw(3, 256).float()), "x: got float32"),
        (norm(x=draw(2, 3, 256)), r"x: got shape \[2, 3, 256\]; must have shape \[tokens, n\]"),
        (norm(weight=draw(255)), "weight: got shape"),
        (norm(eps=-1.0), "eps: got -1.0"),
        (norm(group=64), "group: got 64; must be one of 32, 128"),
        (norm(x=draw(3, 160), weight=draw(160), group=128), "x: got 160; must be a multiple of 128"),
        (norm(scale_layout="column"), "scale_layout: got 'column'; must be one of rows, packed, 128x4, mn_major"),
        (norm(amax_floor="official_fp4"), "amax_floor: got 'official_fp4'"),
        (swiglu(gate=draw(3, 256).float()), "gate: got float32"),
        (swiglu(gate=draw(3, 0), up=draw(3, 0)), "gate: got shape .* at least one number"),
        (swiglu(up=draw(3, 128)), r"up: got shape \[3, 128\]; must have shape \[3, 256\]"),
        (swiglu(up=META), "up: got a tensor on meta"),
        (swiglu(limit=0.0), r"limit: got 0.0; must be above 0, as an fp32 number\. None is for no limit"),
        (swiglu(limit=-1.0), "limit: got -1.0"),
        (swiglu(limit=NAN), "limit: got nan"),
        (swiglu(limit=1e39), "limit: got 1e"),
        (swiglu(group=16), "group: got 16"),
        (swiglu(gate=draw(3, 160), up=draw(3, 160), group=128), "gate: got 160; must be a multiple of 128"),
        (swiglu(scale_layout="x"), "scale_layout: got 'x'"),
        (swiglu(amax_floor="x"), "amax_floor: got 'x'"),
        (lambda m: m.choose_mxfp8_route("flashmla", "default", "cpu"), "consumer: got 'flashmla'"),
        (lambda m: m.choose_mxfp8_route("triton", "fast", "cpu"), "mode: got 'fast'; must be one of default, deterministic, batch"),
        (lambda m: m.choose_mxfp8_route("triton", "default", "gpu"), "device: got 'gpu'"),
        (lambda m: m.choose_mxfp8_route("triton", "default", None), "device: got None"),
    ],
)  # fmt: skip
def test_errors(linear, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(linear)
