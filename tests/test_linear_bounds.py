"""The bounds of products hold for fp32 in a bad order and for Hopper's 14 bits with promotion, and not without it; on lattices all of them
are exact. What producers may write is what fp32 with fast primitives writes, and no more."""

import pytest
import torch

from dsv4.parity import contracts, engine, linear_bounds, linear_inputs
from dsv4.parity.candidates import Candidate
from dsv4.parity.compare import compare_bytes
from dsv4.parity.components.scales import rows_of_tiles
from dsv4.parity.exact import unrounded
from dsv4.parity.levels import Level
from dsv4.parity.linear_inputs import CodedCall
from dsv4.parity.mutants import linear as wrong
from dsv4.parity.profiles import PROFILES
from dsv4.reference import linear as reference
from dsv4.reference import scales
from dsv4.reference.codecs import decode_e4m3, decode_e8m0
from dsv4.reference.quantization import quantize_fp8
from dsv4.types import Mxfp8Pair, Quantized

CPU = torch.device("cpu")
SOURCE = torch.Generator().manual_seed(1)


def factors(found):
    return found if found.dtype == torch.float32 else decode_e8m0(found)


def operands(x, weight, weight_scales=None, *, block=128):
    """Numbers and scales of both sides, fp64, and the block."""
    if isinstance(x, Mxfp8Pair):
        parts = []
        for pair in (x, weight):
            words = pair.scales if pair.scales.dim() == 2 else rows_of_tiles(pair.scales, len(pair.codes))
            found = decode_e8m0(scales.unpack_ue8m0(words, -(-pair.codes.shape[1] // 32)))
            parts += [decode_e4m3(pair.codes).double(), found.double()]
        return *parts, 32
    coded = reference.quantize_partial(x, block) if isinstance(x, torch.Tensor) else x
    rows = factors(weight_scales).repeat_interleave(block, 0)[: len(weight)]
    return decode_e4m3(coded.codes).double(), factors(coded.scales).double(), decode_e4m3(weight).double(), rows.double(), block


def hopper(promoted):
    def product(*args, **options):
        return wrong.hopper_product(*operands(*args, **options), promoted=promoted)

    return product


def in_fp32(scaled_first, step=1):
    """Products added one after another, or `step` at a time, from the last to the first; scales applied to the numbers, or to the sum of
    each block."""

    def product(*args, **options):
        a, sa, w, sw, block = operands(*args, **options)
        a, sa, w, sw = a.float(), sa.float(), w.float(), sw.float()
        if scaled_first:
            a, w = (part * found.repeat_interleave(block, 1)[:, : part.shape[1]] for part, found in ((a, sa), (w, sw)))
        total = torch.zeros(len(a), len(w))
        for b in reversed(range(sa.shape[1])):
            first, second = (part[:, b * block : (b + 1) * block] for part in (a, w))
            one = torch.zeros_like(total)
            for k in reversed(range(0, first.shape[1], step)):
                one = one + (first[:, None, k : k + step] * second[:, k : k + step]).sum(2)
            total = total + (one if scaled_first else one * sa[:, None, b] * sw[:, b])
        return total.bfloat16()

    return product


def by_group(product):
    def project(o, weight, weight_scales=None, *, scale="ue8m0", amax_floor="sglang"):
        if weight_scales is None:
            return torch.stack([_bf16_in_fp32(o[:, g].float(), weight[g].float()) for g in range(len(weight))], 1)
        coded = reference.quantize_partial(o, 128, scale=scale, amax_floor=amax_floor) if isinstance(o, torch.Tensor) else o
        inputs = [Quantized(coded.codes[:, g], coded.scales[:, g]) for g in range(len(weight))]
        return torch.stack([product(*one) for one in zip(inputs, weight, weight_scales, strict=True)], 1)

    return project


def _bf16_in_fp32(a, w):
    total = torch.zeros(len(a), len(w))
    for k in range(a.shape[1]):
        total = total + a[:, None, k] * w[:, k]
    return total.bfloat16()


PRODUCTS = {"linear.linear_fp8": lambda product: product, "linear.linear_mxfp8": lambda product: product}
PRODUCTS["output_projection.project_groups"] = by_group
IN_FP32 = {"scaled_sums": in_fp32(False), "scaled_numbers": in_fp32(True), "eight_at_a_time": in_fp32(False, 8), "hopper": hopper(True)}


def outcome_of(name, label, call):
    contract = contracts.find(name)
    item = next(item for item in contract.checks if item.label == label)
    return engine.check(contract, item, Candidate("made", call), CPU, PROFILES["smoke"], shrink=False)


def exact_domains(name):
    contract = contracts.find(name)
    rows = [row for row in contract.outputs if row.level is not Level.E3]
    return [domain.name for domain in contract.domains if domain.name != "special" and any(row.covers(domain.name) for row in rows)]


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("how", IN_FP32)
def test_lattices_are_exact_in_any_order(name, how):
    for label in exact_domains(name):
        if not label.endswith("bf16"):
            outcome = outcome_of(name, label, PRODUCTS[name](IN_FP32[how]))
            assert outcome.result == "passed", outcome.message


@pytest.mark.parametrize("name", ["linear.linear_fp8", "linear.linear_mxfp8"])
@pytest.mark.parametrize("how", ["scaled_sums", "scaled_numbers", "eight_at_a_time"])
def test_special_scales_overflow_in_no_order(name, how):
    outcome = outcome_of(name, "special", IN_FP32[how])
    assert outcome.result == "passed", outcome.message


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("how", ["scaled_sums", "scaled_numbers", "eight_at_a_time"])
def test_fp32_keeps_the_first_bound(name, how):
    outcome = outcome_of(name, "finite", PRODUCTS[name](IN_FP32[how]))
    assert outcome.result == "passed", outcome.message


def test_the_bf16_form_keeps_its_bound():
    for label in ("finite_bf16", "lattice_bf16", "plain_bf16"):
        outcome = outcome_of("output_projection.project_groups", label, by_group(None))
        assert outcome.result == "passed", outcome.message


def share(call, product, bound):
    """The largest error of a product as a share of its bound, and its mean as a share of the exact product, roundings to bf16 apart."""
    function = reference.linear_mxfp8 if isinstance(call.args[0], Mxfp8Pair) else reference.linear_fp8
    exact = unrounded(function)(*call.args, **call.kwargs)
    error = product(*call.args, **call.kwargs).double() - exact
    return float((error.abs() / bound(call, exact)).max()), float((error / exact.abs()).mean())


def positive_calls(k):
    common = {"size": [5, 6, k], "kind": "positive", "density": 1.0}
    for seed in range(2):
        for form, stored in (("e8m0", "e8m0"), ("bf16", "fp32"), ("mn_major", "fp32")):
            yield linear_inputs.fp8_call({**common, "block": 128, "form": form, "stored": stored, "seed": seed}, CPU)
        yield linear_inputs.pair_call({**common, "layouts": ["packed", "128x4"], "seed": seed}, CPU)


@pytest.mark.parametrize("k", [2048, 8192])
def test_promotion_is_told_from_none(k):
    bound = linear_bounds.linear(hopper=True)
    for call in positive_calls(k):
        block = 32 if isinstance(call.args[0], Mxfp8Pair) else 128
        promoted, bias = share(call, hopper(True), bound)
        assert promoted < 1
        assert abs(bias) < 0.004
        alone, bias = share(call, hopper(False), bound)
        assert alone > 2, (block, alone)
        assert bias < (-0.02 if k == 2048 else -0.07)


def test_the_bound_of_equal_numbers():
    """What the opening of the module says."""
    numbers, ones = torch.full((1, 2048), 256.0, dtype=torch.float64), torch.ones(1, 16, dtype=torch.float64)
    one = linear_bounds.Magnitudes(numbers, ones)
    size = float(numbers.square().sum())
    assert 0.006 < float(linear_bounds.product_error(one, one, 128, hopper=True)) / size < 0.007
    assert float(linear_bounds.product_error(one, one, 128, hopper=False)) / size < 2.0**-11


def test_promoted_sums_keep_the_bound_on_any_numbers():
    """Signs, magnitudes and special codes as on random data, where products cancel."""
    bound, found = linear_bounds.linear(hopper=True), []
    common = {"kind": "finite", "density": 1.0}
    for seed, size in enumerate(([9, 7, 300], [17, 5, 2100], [3, 33, 129], [1, 1, 31])):
        for block in (128, 32):
            call = linear_inputs.fp8_call({**common, "size": size, "block": block, "form": "fp32", "stored": "fp32", "seed": seed}, CPU)
            found.append(share(call, hopper(True), bound)[0])
        call = linear_inputs.pair_call({**common, "size": size, "layouts": ["128x4", "packed"], "seed": seed}, CPU)
        found.append(share(call, hopper(True), bound)[0])
    assert max(found) < 1
    assert max(found) > 0.01


def test_a_step_may_not_lose_more(monkeypatch):
    """Ten bits behind the leading one, or a result that is a percent and a half too small, are outside."""
    bound = linear_bounds.linear(hopper=True)
    call = next(positive_calls(2048))
    assert share(call, reference.linear_fp8, bound)[0] < 0.5
    assert share(call, lambda *args, **options: reference.linear_fp8(*args, **options) * 0.985, bound)[0] > 1
    monkeypatch.setattr(wrong, "KEPT", 10)
    assert share(call, hopper(True), bound)[0] > 1


def off(exact, ulps):
    """Each number moved by up to so many ulps; 0 and powers of two stay, which hardware has right where its inputs are such."""
    mantissa, exponent = torch.frexp(exact.double())
    noise = 2 * torch.rand(exact.shape, generator=SOURCE, dtype=torch.float64) - 1
    moved = exact.double() + noise * ulps * torch.ldexp(torch.ones_like(mantissa), exponent - 24)
    return torch.where((mantissa.abs() == 0.5) | (exact == 0), exact, moved.float())


def laid_out(x, group, layout, amax_floor):
    codes, found = quantize_fp8(x, group, amax_floor=amax_floor)
    if layout == "rows":
        return Quantized(codes, found)
    if layout == "mn_major":
        return Quantized(codes, scales.align_mn_major(decode_e8m0(found)))
    return Quantized(codes, scales.pack_ue8m0(found) if layout == "packed" else scales.swizzle_128x4(found))


def norm_quantize(x, weight, *, eps, group, scale_layout="rows", amax_floor="official"):
    rows, total = x.float(), torch.zeros(len(x), 1)
    for column in rows.split(1, 1):
        total = total + column * column
    normed = rows * off((total / x.shape[1] + eps).rsqrt(), 1) * weight.float()
    return laid_out(normed.bfloat16(), group, scale_layout, amax_floor)


def swiglu_quantize(gate, up, *, limit=None, group, scale_layout="rows", amax_floor="official"):
    g, u = gate.float(), up.float()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    exponential = off((-g.double()).exp().float(), 2 + 1.173 * g.double().abs())
    silu = torch.where(1 + exponential == 1, g, off(g / (1 + exponential), 2))  # a quotient by 1 is right anywhere
    return laid_out((silu * u).bfloat16(), group, scale_layout, amax_floor)


def project_groups_pair(o, weight, *weight_scales, scale_layout="packed", rows=None, pair_floor="flashinfer", **options):
    z = by_group(in_fp32(False))(o, weight, *weight_scales, **options)
    codes, found = (part.view(torch.uint8) for part in quantize_fp8(z.flatten(1), 32, amax_floor=pair_floor))
    padded = [torch.nn.functional.pad(part, (0, 0, 0, (rows or len(z)) - len(z))) for part in (codes, found)]
    words = scales.pack_ue8m0(padded[1]) if scale_layout == "packed" else scales.swizzle_128x4(padded[1])
    return Mxfp8Pair(padded[0].view(torch.float8_e4m3fn), words)


PRODUCERS = {
    "linear.norm_quantize": norm_quantize,
    "linear.swiglu_quantize": swiglu_quantize,
    "output_projection.project_groups_pair": project_groups_pair,
}


@pytest.mark.parametrize("name", PRODUCERS)
def test_producers_in_fp32_with_fast_primitives(name):
    for domain in contracts.find(name).domains:
        outcome = outcome_of(name, domain.name, PRODUCERS[name])
        assert outcome.result == "passed", outcome.message


@pytest.mark.parametrize("name", PRODUCERS)
@pytest.mark.parametrize("field", ["codes", "scales"])
def test_a_neighbour_is_not_permitted(name, field):
    """The next code, or the next scale, in one place."""

    def nearly(*args, **options):
        made = PRODUCERS[name](*args, **options)
        bits = getattr(made, field).view(torch.uint8) if made.scales.dtype != torch.int32 or field == "codes" else made.scales
        bits[-1, -1] += 1
        return made

    label = "drawn" if name.startswith("linear") else "finite"
    assert outcome_of(name, label, nearly).result == "failed"


def test_pads_are_ones_and_rows_come_back():
    spec = {"size": [5, 6, 160], "kind": "lattice", "density": 1.0, "layouts": ["128x4", "packed"], "seed": 3}
    call = linear_inputs.pair_call(spec, CPU)
    x, weight = call.args
    assert (x.scales.shape, weight.scales.stride()) == ((1, 2, 32, 4), (1, 8))
    whole = scales.packed_from_128x4(x.scales, 128)
    assert bool((whole[5:] == -1).all())
    assert bool(((x.scales[0, 1] >> 8).reshape(-1) == -1).all())  # groups 5 to 7
    assert bool((weight.scales.as_strided((2, 2), (8, 1), weight.scales.storage_offset() + 6) == -1).all())
    again = call.replace("row_scales", call["row_scales"])
    assert compare_bytes(again.args[0].scales, x.scales).ok
    fewer = call.replace("row_scales", call["row_scales"][:2]).replace("rows", call["rows"].view(torch.uint8)[:2].view(x.codes.dtype))
    whole, part = reference.linear_mxfp8(*call.args), reference.linear_mxfp8(*fewer.args)
    assert torch.equal(whole[:2], part)


def test_columns_stay_columns():
    spec = {"size": [5, 6, 300], "block": 128, "form": "mn_major", "stored": "fp32", "kind": "lattice", "density": 1.0, "seed": 3}
    call = linear_inputs.fp8_call(spec, CPU)
    assert call["0.scales"].stride() == (1, 8)
    assert call.replace("row_scales", call["row_scales"][:3].contiguous())["0.scales"].stride() == (1, 4)
    assert set(call.tensors()) == {"0.codes", "0.scales", 1, 2}
    plain = CodedCall((torch.zeros(3, 4), torch.zeros(1)))
    assert (plain["row_scales"].shape, plain.replace("row_scales", torch.zeros(3, 0))) == ((3, 0), plain)
    assert plain.replace("rows", torch.ones(2, 4))[0].shape == (2, 4)


def test_the_invariants_see_coded_rows():
    """A row of NaN codes that leaks, and rows that depend on their neighbours, are found through `CodedCall`."""

    def leaking(x, weight):
        y = reference.linear_mxfp8(x, weight)
        return torch.where(y.isnan().any(), torch.zeros_like(y), y)

    def neighbours(x, weight):
        y = reference.linear_mxfp8(x, weight)
        return y + (len(y) > 2)

    assert outcome_of("linear.linear_mxfp8", "padding.plain", leaking).result == "failed"
    assert outcome_of("linear.linear_mxfp8", "batch.plain", neighbours).result == "failed"
