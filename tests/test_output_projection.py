"""The output path, both implementations: published vectors, exact arithmetic, transformers, reported bugs, pairs, layouts, refusals."""

import importlib
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dsv4 import configs
from dsv4.fast import use
from dsv4.parity.bounds import gamma
from dsv4.reference import linear as products
from dsv4.reference import output_projection as reference
from dsv4.reference import quantization, rotary, scales
from dsv4.reference.numerics import numerics
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import ArgumentError, Mxfp8Pair, Quantized
from test_linear import LAYOUTS, LN_06_ROWS, PAIR_ROWS, codes, decoded, draw, exact_product, factors, pair_offsets, same, some_scales

STAGES = load_file(Path(__file__).parent / "golden" / "linear.safetensors")
TABLE = rope_table(rope_frequencies(10000.0), 256)


@pytest.fixture(params=["reference", "fast"])
def path(request):
    with use("eager"):  # what inductor compiles, as it stands
        yield importlib.import_module(f"dsv4.{request.param}.output_projection")


def weights(groups, rank, width, kind="e8m0", seed=0):
    """An FP8 weight of groups, and its scales."""
    return codes(groups, rank, width, seed=seed), some_scales(kind, groups, -(-rank // 128), -(-width // 128), seed=seed + 1)


def by_group(a, sa, w, sw):
    """The exact product of each group."""
    return torch.stack([exact_product(a[:, g], sa[:, g], w[g], sw[g], 128) for g in range(len(w))], 1)


# published vectors


@pytest.mark.parametrize(("model", "block"), [("v4", 128), ("v41", 32)])
def test_published_output_path(path, model, block):
    """From the attention's output to the layer's, bit for bit: wo_a dequantised to bf16 as the published conversion does it."""
    stage = {name.removeprefix(f"{model}."): part for name, part in STAGES.items() if name.startswith(f"{model}.")}
    yarn = rope_frequencies(160000.0, yarn=configs.V4_FLASH.rope_scaling)
    table = TABLE if model == "v4" else rope_table(yarn, 256)
    o = rotary.apply_rope(stage["o_rot"], table, stage["rows"], inverse=True).flatten(1).unflatten(1, (2, -1))
    weight = quantization.dequantize(stage["wo_a.weight"], stage["wo_a.scale"], (block, block)).unflatten(0, (2, -1))
    z = path.project_groups(o, weight)
    same(z.flatten(1), stage["wo_a_out"])
    wo_b = stage["wo_b.weight"], stage["wo_b.scale"]
    same(path.project_out(z, *wo_b, block=block), stage["out"])
    same(path.project_out(stage["wo_a_out"], *wo_b, block=block), stage["out"])
    if model == "v41":  # its groups of 32 are those of a pair
        for layout in LAYOUTS:
            pair = path.project_groups_pair(o, weight, scale_layout=layout, pair_floor="official")
            same(path.project_out(pair, products.mxfp8_weight(*wo_b)), stage["out"])


# wo_a


@pytest.mark.parametrize(("tokens", "groups", "rank", "width"), [(1, 1, 1, 1), (3, 2, 5, 37), (4, 3, 8, 512), (17, 2, 33, 130)])
def test_bf16_product_by_exact_sums(path, tokens, groups, rank, width):
    o, w = draw(tokens, groups, width), draw(groups, rank, width, seed=1)
    a, b = o.double().numpy(), w.double().numpy()
    sums = [[[math.fsum(a[t, g] * b[g, r]) for r in range(rank)] for g in range(groups)] for t in range(tokens)]
    same(path.project_groups(o, w), torch.tensor(sums, dtype=torch.float64).float().bfloat16())


@pytest.mark.parametrize("kind", ["e8m0", "uint8", "fp32"])
@pytest.mark.parametrize(("tokens", "groups", "rank", "width"), [(1, 1, 1, 1), (3, 2, 140, 200), (5, 3, 16, 256), (2, 8, 4, 129)])
def test_fp8_product_by_exact_arithmetic(path, tokens, groups, rank, width, kind):
    w, sw = weights(groups, rank, width, kind)
    a, sa = codes(tokens, groups, width, seed=5), some_scales(kind, tokens, groups, -(-width // 128), seed=6)
    expected = by_group(a, sa, w, sw)
    same(path.project_groups(Quantized(a, sa), w, sw), expected)
    by_column = sa.permute(1, 2, 0).contiguous().permute(2, 0, 1)  # [groups][blocks][tokens] in memory
    moved = a.transpose(0, 1).contiguous().transpose(0, 1)
    same(path.project_groups(Quantized(moved, by_column), w, sw.transpose(1, 2).contiguous().transpose(1, 2)), expected)


@pytest.mark.parametrize("width", [256, 200, 129])
@pytest.mark.parametrize("scale", ["ue8m0", "fp32"])
@pytest.mark.parametrize("floor", ["sglang", "official"])
def test_fp8_form_quantises_along_the_width(path, width, scale, floor):
    o = draw(4, 2, width)
    o[0], o[1] = 0, o[1] * 1e-7
    padded = torch.cat([o, torch.zeros(4, 2, -width % 128).bfloat16()], 2)
    a, sa = quantization.quantize_fp8(padded, 128, scale=scale, amax_floor=floor)
    w, sw = weights(2, 9, width)
    same(path.project_groups(o, w, sw, scale=scale, amax_floor=floor), by_group(a[..., :width], sa, w, sw))


def test_group_for_group_it_is_a_linear_layer(path):
    o, (w, sw) = draw(5, 3, 384), weights(3, 130, 384)
    a, sa = quantization.quantize_fp8(o, 128)
    got = path.project_groups(Quantized(a, sa), w, sw)
    for g in range(3):
        same(got[:, g], products.linear_fp8(Quantized(a[:, g], sa[:, g]), w[g], sw[g]))


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_no_token_depends_on_the_others(path, form):
    o = draw(130, 2, 512)
    weight = (draw(2, 24, 512, seed=1),) if form == "bf16" else weights(2, 24, 512)
    whole = path.project_groups(o, *weight)
    for rows in ([5], [129, 0], list(range(64)), list(range(129, -1, -1))):
        same(path.project_groups(o[rows], *weight), whole[rows])


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_empty(path, form):
    weight = (draw(2, 64, 256),) if form == "bf16" else weights(2, 64, 256)
    z = path.project_groups(draw(0, 2, 256), *weight)
    assert (z.shape, z.dtype) == ((0, 2, 64), torch.bfloat16)
    pair = path.project_groups_pair(draw(0, 2, 256), *weight, rows=3)
    assert pair.codes.shape == (3, 128)
    assert not pair.codes.view(torch.uint8).any()
    assert not pair.scales.any()
    assert path.project_out(z, codes(7, 128), some_scales("e8m0", 1, 1)).shape == (0, 7)
    made = path.rotate_quantize(draw(0, 4, 64), TABLE, torch.zeros(0, dtype=torch.int64), groups=2, scale_layout="packed")
    assert made.codes.shape == (0, 2, 128)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is an oracle that only some environments have")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transformers(dtype):
    """o_a_proj and o_b_proj, in fp32 and in fp64; the numbers of wo_b's codes are their weight. gamma of u, or of 2^-53."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention

    sizes = {"hidden_size": 48, "head_dim": 64, "num_attention_heads": 4, "o_groups": 2, "o_lora_rank": 96, "q_lora_rank": 16}
    config = DeepseekV4Config(**sizes, qk_rope_head_dim=16, num_hidden_layers=1, layer_types=["sliding_attention"])
    theirs = DeepseekV4Attention(config, 0).to(dtype)
    wo_a, (wo_b, sw) = draw(2, 96, 128, scale=0.1), (codes(48, 192), some_scales("e8m0", 1, 2))
    numbers = torch.from_numpy(decoded(wo_b) * factors(sw).repeat(128, 1)[:, :192])
    o = torch.randn(7, 2, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.no_grad():
        theirs.o_a_proj.weight.copy_(wo_a.flatten(0, 1))
        theirs.o_b_proj.weight.copy_(numbers)
        z = theirs.o_a_proj(o[None])[0]
        out = theirs.o_b_proj(z.flatten(1))
    with numerics("unquantised"):
        ours = reference.project_groups(o.double(), wo_a)
        after = reference.project_out(z.double(), wo_b, sw)
    part = 1.0 if dtype == torch.float32 else 2.0**-29
    size = torch.einsum("tge,gre->tgr", o.double().abs(), wo_a.double().abs())
    assert ((z - ours).abs() <= 2 * part * gamma(128) * size).all()  # both sides round in fp64
    assert ((out - after).abs() <= 2 * part * gamma(192) * (z.double().flatten(1).abs() @ numbers.abs().T)).all()


def test_gradients():
    o = torch.randn(2, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    w, fp8, sw = draw(2, 3, 8), *weights(2, 3, 8)
    wo_b, sb = codes(4, 6), some_scales("e8m0", 1, 1)
    with numerics("unquantised"):
        assert torch.autograd.gradcheck(lambda o: reference.project_groups(o, w), (o,))
        assert torch.autograd.gradcheck(lambda o: reference.project_out(reference.project_groups(o, fp8, sw), wo_b, sb), (o,))
    weight = w.clone().requires_grad_()
    reference.project_groups(o.detach().bfloat16(), weight).sum().backward()
    assert weight.grad.count_nonzero() == weight.numel()


# rotated, grouped, quantised


def memory_of(part, groups, count, tokens):
    """The storage behind [tokens, groups, count] as [groups][count][align(tokens, 4)]."""
    aligned = -(-tokens // 4) * 4
    assert part.stride() == (1, count * aligned, aligned)
    return part.as_strided((groups, count, aligned), (count * aligned, aligned, 1))


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("tokens", "heads", "groups", "dim"), [(1, 2, 1, 64), (5, 4, 2, 320), (4, 8, 2, 64), (7, 6, 3, 192)])
def test_rotate_quantize(path, tokens, heads, groups, dim, group, index):
    o, positions = draw(tokens, heads, dim), torch.arange(tokens, dtype=index) * 31
    positions[-1] = 255
    rotated = rotary.apply_rope(o, TABLE, positions, inverse=True).view(tokens, groups, heads // groups * dim)
    plain = quantization.quantize_fp8(rotated, group, amax_floor="sglang")
    width = plain.scales.shape[2]
    got = path.rotate_quantize(o, TABLE, positions, groups=groups, group=group)
    same(got.codes, plain.codes)
    same(got.scales, plain.scales)
    packed = path.rotate_quantize(o, TABLE, positions, groups=groups, group=group, scale_layout="packed")
    same(packed.codes, plain.codes)
    words = -(-width // 4)
    assert packed.scales.shape == (tokens, groups, words)
    memory = memory_of(packed.scales, groups, words, tokens)
    assert not memory[..., tokens:].any()
    byte = memory.view(torch.uint8).unflatten(2, (-1, 4))[:, :, :tokens].permute(2, 0, 1, 3).flatten(2)
    same(byte[..., :width], plain.scales.view(torch.uint8))
    assert not byte[..., width:].any()
    columns = path.rotate_quantize(o, TABLE, positions, groups=groups, group=group, scale_layout="mn_major")
    same(columns.codes, plain.codes)
    memory = memory_of(columns.scales, groups, width, tokens)
    assert not memory[..., tokens:].any()
    same(columns.scales, 2.0 ** (plain.scales.view(torch.uint8).float() - 127))
    if group == 128:
        weight = weights(groups, 12, heads // groups * dim)
        expected = path.project_groups(rotated, *weight)
        same(path.project_groups(got, *weight), expected)
        same(path.project_groups(columns, *weight), expected)


@pytest.mark.parametrize(("floor", "byte"), [("sglang", 85), ("official", 105), ("flashinfer", 0)])
def test_absent_positions_give_zeros(path, floor, byte):
    o, positions = draw(4, 2, 128), torch.tensor([-1, 3, 256, -(2**63)])
    got = path.rotate_quantize(o, TABLE, positions, groups=1, amax_floor=floor)
    assert not got.codes.view(torch.uint8)[[0, 2, 3]].any()
    assert (got.scales.view(torch.uint8)[[0, 2, 3]] == byte).all()
    same(got.codes[1:2], path.rotate_quantize(o[1:2], TABLE, positions[1:2], groups=1, amax_floor=floor).codes)


# pairs


@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize(("tokens", "rows"), [(1, None), (5, 5), (5, 6), (5, 12), (127, 129), (130, 300)])
def test_pair_of_more_rows(path, tokens, rows, form):
    o = draw(tokens, 2, 256)
    weight = (draw(2, 80, 256, seed=1),) if form == "bf16" else weights(2, 80, 256)
    z = path.project_groups(o, *weight).flatten(1)
    count = tokens if rows is None else rows
    plain = quantization.quantize_fp8(z, 32, amax_floor="flashinfer")
    packed, tiled = (path.project_groups_pair(o, *weight, rows=rows, scale_layout=layout) for layout in LAYOUTS)
    for pair in (packed, tiled):
        assert isinstance(pair, Mxfp8Pair)
        assert pair.codes.shape == (count, 160)
        same(pair.codes[:tokens], plain.codes)
        assert not pair.codes.view(torch.uint8)[tokens:].any()
    same(packed.scales, scales.restride_rows(scales.pack_ue8m0(plain.scales), count))
    assert packed.scales.stride() == (1, -(-count // 4) * 4)
    same(tiled.scales, scales.packed_to_128x4(packed.scales))


def test_pair_has_the_bytes_of_flashinfer(path):
    """Spec A 7.3: no floor; a group of nothing, or of so little that byte 0 is enough, has byte 0 and codes of zero."""
    w = torch.zeros(1, 96, 32, dtype=torch.bfloat16)
    w[0, torch.arange(32), torch.arange(32)] = 1
    w[0, 32 + torch.arange(32), torch.arange(32)] = 2.0**-126
    o = draw(3, 1, 32)
    pair = path.project_groups_pair(o, w)
    byte = scales.unpack_ue8m0(pair.scales, 3).view(torch.uint8)
    assert (byte[:, 0] > 100).all()
    assert not byte[:, 1:].any()
    assert not (pair.codes.view(torch.uint8)[:, 32:] & 0x7F).any()
    kept = path.project_groups_pair(o, w, pair_floor="none")
    assert (kept.codes.view(torch.uint8)[:, 32:64] & 0x7F).any()
    official = path.project_groups_pair(o, w, pair_floor="official")
    assert (scales.unpack_ue8m0(official.scales, 3).view(torch.uint8)[:, 1:] == 105).all()


@pytest.mark.parametrize("rows", PAIR_ROWS)
def test_pairs_of_either_layout_are_equal(path, rows):
    """Producer-written scales are the converted ones; live rows' scales are a prefix of the padded ones'; zeroing keeps layouts equal."""
    o, weight = draw(rows, 1, 64, seed=rows), draw(1, 160, 64, seed=1)
    live = (rows + 1) // 2
    packed, tiled = (path.project_groups_pair(o, weight, scale_layout=layout) for layout in LAYOUTS)
    same(packed.codes, tiled.codes)
    same(scales.packed_to_128x4(packed.scales), tiled.scales)
    padded = path.project_groups_pair(o[:live], weight, rows=rows)
    alone = path.project_groups_pair(o[:live], weight)
    same(padded.scales[:live], alone.scales)
    same(padded.codes[:live], packed.codes[:live])
    same(padded.scales, scales.zero_pad_rows(packed.scales, live, scale_layout="packed"))
    tiles = path.project_groups_pair(o[:live], weight, rows=rows, scale_layout="128x4").scales
    same(tiles, scales.zero_pad_rows(tiled.scales, live, scale_layout="128x4"))
    same(tiles, scales.packed_to_128x4(padded.scales))


@pytest.mark.parametrize("rows", [1, 129, 1000])
def test_wo_b_takes_pairs_of_any_layout(path, rows):
    o, weight = draw(rows, 2, 64, seed=rows), draw(2, 80, 64, seed=1)
    wo_b, sb = codes(40, 160, seed=2), some_scales("e8m0", 2, 5)
    expected = path.project_out(path.project_groups(o, weight), wo_b, sb, block=32)  # no group so small that a floor would tell
    for layout in LAYOUTS:
        pair = path.project_groups_pair(o, weight, scale_layout=layout)
        for of_weight in LAYOUTS:
            same(path.project_out(pair, products.mxfp8_weight(wo_b, sb, scale_layout=of_weight)), expected)
        padded = path.project_groups_pair(o, weight, scale_layout=layout, rows=rows + 3)
        got = path.project_out(padded, products.mxfp8_weight(wo_b, sb))
        same(got[:rows], expected)
        assert not got[rows:].any()


@pytest.mark.parametrize("block", [32, 128])
def test_wo_b_takes_z_as_it_comes(path, block):
    z, w = draw(5, 2, 128), codes(70, 256, seed=1)
    sw = some_scales("e8m0", -(-70 // block), 256 // block)
    expected = products.linear_fp8(z.flatten(1), w, sw, block=block)
    same(path.project_out(z, w, sw, block=block), expected)
    same(path.project_out(z.flatten(1), w, sw, block=block), expected)
    same(path.project_out(z.transpose(0, 1).contiguous().transpose(0, 1), w, sw, block=block), expected)
    quantized = quantization.quantize_fp8(z, block)
    same(path.project_out(quantized, w, sw, block=block), expected)
    same(path.project_out(Quantized(quantized.codes.flatten(1), quantized.scales.flatten(1)), w, sw, block=block), expected)
    columns = scales.align_mn_major(2.0 ** (quantized.scales.flatten(1).view(torch.uint8).float() - 127))
    same(path.project_out(Quantized(quantized.codes.flatten(1), columns), w, sw, block=block), expected)


# reported bugs


def test_ln_01_absorbed_products_with_scales_that_are_no_powers_of_two(path):
    """Every activation 672: amax/448 is 1.5, of which an exponent byte would keep 1, and with it two thirds of the result.

    The power of two above is 2; 336, halfway between two codes, goes to 320.
    """
    o = torch.full((4, 2, 256), 672.0).bfloat16()
    ones, sw = torch.ones(2, 16, 256).to(torch.float8_e4m3fn), torch.ones(2, 1, 2)
    expected = torch.full((4, 2, 16), 672.0 * 256).bfloat16()
    assert expected[0, 0, 0].item() == 672.0 * 256
    same(path.project_groups(o, ones, sw, scale="fp32"), expected)
    same(path.project_groups(o, ones, sw), torch.full_like(expected, 640.0 * 256))
    quantized = quantization.quantize_fp8(o, 128, scale="fp32", division="divide")
    assert (quantized.scales == 1.5).all()
    same(path.project_groups(quantized, ones, sw), expected)
    same(path.project_groups(quantized, ones, torch.full((2, 1, 2), 1.5)), expected * 1.5)
    some = quantization.quantize_fp8(draw(4, 2, 256, scale=30.0), 128, scale="fp32")
    w, sw = weights(2, 16, 256, "fp32")
    same(path.project_groups(some, w, sw), by_group(*some, w, sw))


@pytest.mark.parametrize("rows", LN_06_ROWS)
def test_ln_06_pairs_of_512_columns(path, rows):
    o, weight = draw(rows, 2, 64, seed=rows), draw(2, 256, 64, seed=1)
    packed, tiled = (path.project_groups_pair(o, weight, scale_layout=layout) for layout in LAYOUTS)
    flat, offsets = tiled.scales.view(torch.uint8).flatten(), torch.from_numpy(pair_offsets(rows, 16))
    assert np.array_equal(flat[offsets].numpy(), packed.scales.contiguous().view(torch.uint8).numpy())
    pads = torch.ones(len(flat), dtype=torch.bool)
    pads[offsets.flatten()] = False
    assert not flat[pads].any()
    wo_b = products.mxfp8_weight(codes(40, 512, seed=2), some_scales("e8m0", 2, 16))
    expected = path.project_out(packed, wo_b)
    flat[pads] = 0xFF
    memory = torch.full((4, -(-rows // 4) * 4), -1, dtype=torch.int32)
    memory[:, :rows] = packed.scales.T
    for scale in (tiled.scales, memory.T[:rows]):
        same(path.project_out(Mxfp8Pair(packed.codes, scale), wo_b), expected)


# refusals


def groups(o=None, weight=None, weight_scales=None, name="project_groups", **options):
    """Of an FP8 weight unless another is given."""
    if weight is None:
        weight, own = weights(2, 64, 256)
        weight_scales = own if weight_scales is None else weight_scales
    return lambda m: getattr(m, name)(draw(3, 2, 256) if o is None else o, weight, weight_scales, **options)


def pair(**options):
    return groups(name="project_groups_pair", **options)


def rotate(o=None, table=None, positions=None, **options):
    given = (draw(3, 4, 128) if o is None else o, TABLE if table is None else table, torch.arange(3) if positions is None else positions)
    return lambda m: m.rotate_quantize(*given, **{"groups": 2, **options})


def out(z=None, weight=None, weight_scales=None, **options):
    given = (draw(3, 2, 64) if z is None else z, codes(7, 128) if weight is None else weight)
    return lambda m: m.project_out(*given, weight_scales, **options)


ONES, MANY = torch.ones(1, 1), torch.ones(3, 2, 2)
PAIR = Mxfp8Pair(codes(3, 128), torch.zeros(3, 1, dtype=torch.int32))
WEIGHT = Mxfp8Pair(codes(7, 128), torch.zeros(7, 1, dtype=torch.int32))
FP8_O = Quantized(codes(3, 2, 256), MANY)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (groups(o=draw(3, 2, 256).float()), "o: got float32; must be bf16"),
        (groups(o=draw(3, 512)), r"o: got shape \[3, 512\]; must have shape \[tokens, groups, width\]"),
        (groups(o=codes(3, 2, 256)), "o: got float8_e4m3fn; codes come with their scales"),
        (groups(o=PAIR), r"o: got Mxfp8Pair; .* project_out takes pairs"),
        (groups(o=(codes(3, 2, 256), MANY)), "o: got tuple; .* A plain tuple does not say"),
        (groups(o=Quantized(codes(3, 2, 256), torch.ones(3, 2, 8))), r"o\.scales: got shape \[3, 2, 8\]; must have shape \[3, 2, 2\]"),
        (groups(o=Quantized(codes(3, 2, 256), MANY.int())), r"o\.scales: got int32"),
        (groups(o=Quantized(codes(3, 2, 256), MANY.to("meta"))), r"o\.scales: got a tensor on meta"),
        (groups(o=Quantized(draw(3, 2, 256), MANY)), r"o\.codes: got bfloat16"),
        (groups(o=FP8_O, weight=draw(2, 64, 256)), r"o: got Quantized; must be bf16 beside a bf16 weight\. Give an e4m3 weight"),
        (groups(weight=codes(2, 64, 256)), "weight_scales: got None; must be given: an FP8 weight is never cast without"),
        (groups(weight=draw(2, 64, 256), weight_scales=torch.ones(2, 1, 2)), "weight: got bfloat16; must be e4m3"),
        (groups(weight=draw(3, 64, 256)), r"weight: got shape \[3, 64, 256\]; must have shape \[2, rank, 256\]"),
        (groups(weight=draw(2, 0, 256)), "weight: got shape .* at least one group, one row and one column"),
        (groups(weight=draw(2, 256, 64).transpose(1, 2)), "weight: got strides .* contiguous rows"),
        (groups(weight=draw(2, 64, 256).to("meta")), "weight: got a tensor on meta"),
        (groups(weight_scales=torch.ones(2, 1, 3)), r"weight_scales: got shape \[2, 1, 3\]; must have shape \[2, 1, 2\]"),
        (groups(weight_scales=torch.ones(2, 1, 2, device="meta")), "weight_scales: got a tensor on meta"),
        (groups(scale="e8m0"), "scale: got 'e8m0'; must be one of ue8m0, fp32"),
        (groups(amax_floor="x"), "amax_floor: got 'x'"),
        (groups(scale="fp32", amax_floor="none"), "amax_floor: got 'none'; with fp32 scales"),
        (pair(weight=draw(2, 40, 256)), "weight: got 80; must be a multiple of 32"),
        (pair(scale_layout="rows"), "scale_layout: got .*rows.*; must be one of packed, 128x4"),
        (pair(scale_layout="x"), "scale_layout: got 'x'"),
        (pair(rows=2), "rows: got 2; must be at least 3"),
        (pair(rows=4.0), "rows: got 4.0, a float; must be a whole number"),
        (pair(pair_floor="x"), "pair_floor: got 'x'"),
        (pair(amax_floor="x"), "amax_floor: got 'x'"),
        (rotate(o=draw(3, 4, 128).float()), "o: got float32; must be bf16"),
        (rotate(o=draw(3, 512)), r"o: got shape \[3, 512\]; must have shape \[tokens, heads, dim\]"),
        (rotate(o=draw(3, 4, 127)), "o: got shape .* at least one head, of an even number of dims"),
        (rotate(o=draw(3, 0, 128)), "o: got shape .* at least one head"),
        (rotate(o=draw(3, 4, 32), group=32), r"table: got shape \[256, 64\]; .* the 32 of a head"),
        (rotate(table=TABLE.bfloat16()), "table: got bfloat16"),
        (rotate(table=TABLE[:0]), "table: got shape .* a position or more"),
        (rotate(table=TABLE.to("meta")), "table: got a tensor on meta"),
        (rotate(positions=torch.arange(4)), "positions: got shape"),
        (rotate(positions=torch.arange(3.0)), "positions: got float32"),
        (rotate(positions=torch.arange(3).to("meta")), "positions: got a tensor on meta"),
        (rotate(groups=3), "groups: got 3; must divide the 4 heads of o"),
        (rotate(groups=0), "groups: got 0; must be at least 1"),
        (rotate(group=64), "group: got 64; must be one of 32, 128"),
        (rotate(o=draw(3, 4, 96)), "o: got 192; must be a multiple of 128"),
        (rotate(scale_layout="128x4"), "scale_layout: got .*128x4.*; must be one of rows, packed, mn_major"),
        (rotate(amax_floor="x"), "amax_floor: got 'x'"),
        (out(), "weight_scales: got None; must be given"),
        (out(weight_scales=ONES, block=16), "block: got 16"),
        (out(z=PAIR, weight_scales=ONES), r"weight: got Tensor; must be an Mxfp8Pair beside a pair\. mxfp8_weight makes one"),
        (out(weight=WEIGHT), r"z: got Tensor; must be an Mxfp8Pair beside a pair\. project_groups_pair makes one"),
        (out(z=PAIR, weight=WEIGHT, weight_scales=ONES), "weight_scales: got Tensor; must be None beside a pair"),
        (out(z=Mxfp8Pair(codes(3, 64), PAIR.scales), weight=WEIGHT), r"weight\.codes: got shape \[7, 128\]; must have shape \[n, 64\]"),
        (out(z=draw(3, 2, 64).float(), weight_scales=ONES), "z: got float32"),
        (out(z=draw(3, 2, 2, 32), weight_scales=ONES), r"z: got shape \[3, 2, 2, 32\]; must have shape \[tokens, k\]"),
        (out(z=draw(3, 2, 32), weight_scales=ONES), r"weight: got shape \[7, 128\]; must have shape \[n, 64\]"),
        (out(z=Quantized(codes(3, 2, 64), torch.ones(3, 2, 1)), weight_scales=ONES), r"z\.codes: got 64; must be a multiple of 128"),
        (
            out(z=Quantized(codes(3, 2, 64), torch.ones(3, 2, 1)), weight_scales=torch.ones(1, 4), block=32),
            r"z\.scales: got shape \[3, 2, 1\]",
        ),
        (out(z=Quantized(codes(3, 128), torch.ones(3, 2)), weight_scales=ONES), r"z\.scales: got shape \[3, 2\]; must have shape \[3, 1\]"),
    ],
)
def test_errors(path, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(path)
