"""The reference hyper-connections against DeepSeek's published code (golden/hyper_connections, golden/functions), tile_kernels,
transformers, literals and public bug reports.

Collapsed, expanded and normalised rows of the published code are reproduced bit for bit, but for three numbers of all these files, whose
exact values lie within its fp32 roundings of the middle of two bf16. Its mixes are sums in fp32: they and what `split_mix` makes of them
are held to the bounds of `dsv4.parity.stream_bounds`, measured from the unrounded reference, and to the largest differences that
golden/README.md measured.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4.parity import stream_bounds, stream_inputs
from dsv4.reference import hyper_connections as hc
from dsv4.reference.norms import rms_norm
from dsv4.reference.numerics import numerics
from dsv4.reference.quantization import quantize_fp8
from dsv4.types import ArgumentError
from oracles import tile_kernels_module

GOLDEN = Path(__file__).parent / "golden"
U = 2.0**-24
MEASURED = {"v4": 2.44e-6, "v41": 2.62e-6}  # README: mixes of the published code against fp64
SINKHORN = 2e-7  # README: by the order of fp32 operations


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def exact(function, *args, **options):
    with numerics("unrounded"):
        return function(*args, **options)


def same_bits(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]  # of as many bytes: any strides will do
    assert torch.equal(got.view(integer), expected.view(integer))


def within(got, expected, bound):
    assert got.shape == expected.shape
    assert ((got.double() - expected).abs() <= bound).all()


def rounded_otherwise(got, theirs, unrounded, noise):
    """Where two bf16 results differ; there the exact number lies within the noise of fp32 of the middle between them."""
    other = got != theirs
    middle = (got[other].double() + theirs[other].double()) / 2
    assert ((unrounded[other] - middle).abs() <= noise[other]).all()
    return other.nonzero().tolist()


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "hyper_connections.safetensors")


LAYERS = [("v4", f"layers.{n}") for n in (0, 2, 4)] + [("v4", "mtp.0")] + [("v41", f"layers.{n}") for n in (0, 1, 6, 10)]
SUBLAYERS = {"attn": ("x_in", "x_mid"), "ffn": ("x_mid", "x_out")}
EPS = {"v4": 1e-6, "v41": 1e-20}


class Sublayer:
    """What the golden file says of one."""

    def __init__(self, golden, model, layer, kind):
        def of(name):
            return golden.get(f"{model}.{layer}.{name}")

        self.x, self.after, self.out = of(SUBLAYERS[kind][0]), of(SUBLAYERS[kind][1]), of(f"{kind}.out")
        self.mixes, self.collapsed, self.normed = of(f"hc_{kind}.mixes"), of(f"hc_{kind}.collapsed"), of(f"{kind}_norm")
        self.mix = [of(f"hc_{kind}.{part}") for part in ("pre", "post", "comb")]
        # these tiny models keep their scales in bf16
        self.model = of(f"hc_{kind}_fn"), of(f"hc_{kind}_scale").float(), of(f"hc_{kind}_base"), of(f"{kind}_norm.weight")
        before = of("pre_in") if kind == "attn" else of("hc_attn.pre")
        self.read_with = self.mix[0] if model == "v4" else before
        self.carried = None if model == "v4" else before
        self.eps = EPS[model]

    def mix_bounds(self, mixes, off):
        _, scale, base, _ = self.model
        return stream_bounds.mix_errors(mixes, off, scale, base, 20, 1e-6)


@pytest.mark.parametrize("kind", SUBLAYERS)
@pytest.mark.parametrize(("model", "layer"), LAYERS)
def test_published_code_stage_by_stage(golden, model, layer, kind):
    case = Sublayer(golden, model, layer, kind)
    fn, scale, base, weight = case.model
    mixes = hc.mix_statistics(case.x, fn, eps=case.eps)
    unrounded = exact(hc.mix_statistics, case.x, fn, eps=case.eps)
    off = stream_bounds.statistics_error(case.x, fn, case.eps, unrounded)
    within(case.mixes, unrounded, off)
    within(case.mixes, mixes, MEASURED[model])

    bounds = case.mix_bounds(case.mixes, 0.0)
    parts = zip(hc.split_mix(case.mixes, scale, base), exact(hc.split_mix, case.mixes, scale, base), case.mix, bounds, strict=True)
    for ours, unrounded_part, theirs, bound in parts:
        within(theirs, unrounded_part, bound)
        within(ours, theirs.double(), SINKHORN)

    same_bits(hc.collapse(case.x, case.read_with), case.collapsed)
    same_bits(hc.expand(case.out, case.x, case.mix[1], case.mix[2]), case.after)
    unrounded = exact(rms_norm, case.collapsed, weight, eps=case.eps)
    other = rounded_otherwise(rms_norm(case.collapsed, weight, eps=case.eps), case.normed, unrounded, 3 * U * unrounded.abs())
    assert other == ([[4, 42]] if (model, layer, kind) == ("v41", "layers.6", "attn") else [])


@pytest.mark.parametrize(("model", "layer"), LAYERS)
def test_boundary_follows_the_published_layers(golden, model, layer):
    """From the attention's output to the FFN's input, in both wirings, with the old mix as recorded."""
    before, after = (Sublayer(golden, model, layer, kind) for kind in SUBLAYERS)
    fn, scale, base, weight = after.model
    arguments = (before.out, before.x, before.mix[1], before.mix[2], fn, scale, base, weight)
    options = {"norm_eps": after.eps, "rms_eps": after.eps, "carried_pre": after.carried}
    found = hc.boundary(*arguments, **options)
    same_bits(found.streams, before.after)
    same_bits(found.normed, after.normed)
    assert found.scales is None
    unrounded = exact(hc.mix_statistics, found.streams, fn, eps=after.eps)
    off = stream_bounds.statistics_error(found.streams, fn, after.eps, unrounded)
    for ours, theirs, bound in zip(found[1:4], after.mix, after.mix_bounds(unrounded, off), strict=True):
        within(theirs, ours.double(), bound)
        assert (ours - theirs).abs().max() <= MEASURED[model]  # a sigmoid moves less than its logit, and so do rows and columns
    for layout in ("packed", "128x4"):
        coded = hc.boundary(*arguments, **options, output="mxfp8", scale_layout=layout)
        codes, scales = quantize_fp8(found.normed, 32, scale_layout=layout)
        same_bits(coded.normed, codes)
        same_bits(coded.scales, scales)
        for name in ("streams", "pre", "post", "comb"):
            same_bits(getattr(coded, name), getattr(found, name))


@pytest.mark.parametrize("model", EPS)
def test_published_code_step_by_step(golden, model):
    """Fourteen decode steps of the first layer, from the streams that enter it to those that leave it (V4.1: to the FFN's input)."""

    def of(name):
        return golden.get(f"{model}.layers.0.decode.{name}")

    eps, first = EPS[model], Sublayer(golden, model, "layers.0", "attn")
    mix = hc.split_mix(hc.mix_statistics(of("x_in"), first.model[0], eps=eps), *first.model[1:3])
    carried = None if model == "v4" else hc.identity_pre(len(mix.pre), 4)
    collapsed = hc.collapse(of("x_in"), mix.pre if carried is None else carried)
    same_bits(rms_norm(collapsed, first.model[3], eps=eps), of("attn_norm"))
    for ours, name in zip(mix, ("pre", "post", "comb"), strict=True):
        within(ours, of(f"hc_attn.{name}").double(), MEASURED[model])
    model_weights = Sublayer(golden, model, "layers.0", "ffn").model
    old = of("hc_attn.post"), of("hc_attn.comb")
    given = None if carried is None else of("hc_attn.pre")
    found = hc.boundary(of("attn.out"), of("x_in"), *old, *model_weights, norm_eps=eps, rms_eps=eps, carried_pre=given)
    same_bits(found.normed, of("ffn_norm"))
    for ours, name in zip(found[1:4], ("pre", "post", "comb"), strict=True):
        within(ours, of(f"hc_ffn.{name}").double(), MEASURED[model])
    if model == "v4":
        arguments = of("ffn.out"), found.streams, of("hc_ffn.post"), of("hc_ffn.comb")
        noise = 5 * U * exact(hc.expand, *(part.abs() for part in arguments))  # a product and four additions of each term
        other = rounded_otherwise(hc.expand(*arguments), of("x_out"), exact(hc.expand, *arguments), noise)
        assert other == [[7, 1, 38], [13, 3, 13]]  # both cancel to a thousandth of their terms


def test_published_ends(golden):
    for prefix, layer in (("", "layers.4"), ("mtp.0.", "mtp.0")):  # V4: a head of its own

        def of(name, prefix=prefix):
            return golden[f"v4.{prefix}{name}"]

        streams, scale = golden[f"v4.{layer}.x_out"], of("hc_head_scale").float()
        collapsed = hc.head_collapse(streams, of("hc_head_fn"), scale, of("hc_head_base"), norm_eps=1e-6)
        same_bits(collapsed, of("head.collapsed"))
        same_bits(rms_norm(collapsed, of("norm.weight"), eps=1e-6), of("head.normed"))
    collapsed = hc.collapse(golden["v41.layers.10.x_out"], golden["v41.layers.10.hc_ffn.pre"])  # V4.1: the last sublayer's pre
    same_bits(collapsed, golden["v41.final.collapsed"])
    same_bits(rms_norm(collapsed, golden["v41.norm.weight"], eps=1e-20), golden["v41.final.normed"])


def test_v41_starts_with_the_first_stream(golden):
    start = golden["v41.layers.0.pre_in"]
    same_bits(hc.identity_pre(len(start), 4), start)
    assert hc.identity_pre(0, 3).shape == (0, 3)


def test_published_split():
    case = {name.removeprefix("sinkhorn."): value.float() for name, value in load_file(GOLDEN / "functions.safetensors").items()}
    arguments = case["mixes"], case["scale"], case["base"]
    bounds = stream_bounds.mix_errors(*arguments[:1], 0.0, *arguments[1:], 20, 1e-6)
    for name, unrounded, ours, bound in zip(
        ("pre", "post", "comb"), exact(hc.split_mix, *arguments), hc.split_mix(*arguments), bounds, strict=True
    ):
        within(case[name], unrounded, bound)
        within(ours, case[name].double(), SINKHORN)


def comb_of(logits, **options):
    """comb of literal logits: they are the base of mixes of zero."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    count = len(logits)
    base = torch.cat([torch.zeros(2 * count), logits.flatten()])
    return hc.split_mix(torch.zeros(1, len(base)), torch.ones(3), base, **options).comb[0]


def test_sinkhorn_of_the_specification():
    """A 12: seven digits."""
    logits = [[2, 0, -1, 0.5], [0, 1, 0.3, -2], [-0.7, 0.2, 1.5, 0.1], [0.4, -1.2, 0.6, 0.9]]
    printed = {
        1: [
            [0.5840402, 0.1150530, 0.0292612, 0.2139304],
            [0.1580634, 0.6254097, 0.2147045, 0.0351177],
            [0.0559128, 0.2001765, 0.5077803, 0.2042740],
            [0.2019828, 0.0593595, 0.2482533, 0.5466765],
        ],
        20: [
            [0.6106708, 0.1252938, 0.0316591, 0.2323753],
            [0.1479869, 0.6098509, 0.2080050, 0.0341563],
            [0.0557988, 0.2080624, 0.5243605, 0.2117773],
            [0.1855426, 0.0567919, 0.2359744, 0.5216901],
        ],
    }
    for iterations, values in printed.items():
        within(comb_of(logits, iterations=iterations), torch.tensor(values, dtype=torch.float64), 0.5e-7 + SINKHORN)


def test_split_equals_tile_kernels():
    mhc, streams = tile_kernels_module("mhc"), 4
    mixes, scale, base = random(2, 30, 24), torch.tensor([0.7, 1.3, 0.4]), random(24, seed=1)
    pre, post, logits = mhc.mhc_pre_split_mixes_ref(mixes, scale, base, streams, 2.0, 1e-6)
    comb = mhc.sinkhorn_normalize_ref(logits, 20, 1e-6)
    unrounded = exact(hc.split_mix, mixes.flatten(0, 1), scale, base)
    bounds = stream_bounds.mix_errors(mixes.flatten(0, 1), 0.0, scale, base, 20, 1e-6)
    for theirs, ours, bound in zip((pre[..., 0], post[..., 0], comb), unrounded, bounds, strict=True):
        within(theirs.flatten(0, 1), ours, bound)
    wide = mhc.sinkhorn_normalize_ref((mixes.double() * scale[2].double() + base.double())[..., 8:].unflatten(-1, (4, 4)), 20, 1e-6)
    assert (wide.flatten(0, 1) - unrounded.comb).abs().max() <= 2.0**-40  # the fp32 number next to 1e-6, and 40 fp64 steps


def test_statistics_collapse_and_head_equal_tile_kernels():
    mhc = tile_kernels_module("mhc")
    streams, fn = random(1, 20, 4, 32).bfloat16(), random(24, 128, seed=1, scale=0.1)
    theirs = mhc.mhc_pre_norm_fn_ref(streams, fn, None, 1e-6)[0]
    unrounded = exact(hc.mix_statistics, streams[0], fn, eps=1e-6)
    off = stream_bounds.statistics_error(streams[0], fn, 1e-6, unrounded)
    within(theirs, unrounded, off)

    weights = [torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(2)) / 8 for shape in ((1, 20, 4), (1, 20, 4, 4))]
    small = torch.randint(-100, 101, (1, 20, 4, 32), generator=torch.Generator().manual_seed(3)).bfloat16()
    same_bits(hc.collapse(small[0], weights[0][0]), mhc.mhc_pre_apply_mix_ref(small, weights[0][..., None])[0])
    same_bits(
        hc.expand(small[0, :, 1], small[0], weights[0][0], weights[1][0]),
        mhc.mhc_post_ref(small[:, :, 1], small, weights[0][..., None], weights[1])[0],
    )
    repeated = mhc.expand_to_mhc_ref(small[:, :, 0], 4)
    assert torch.equal(hc.collapse(repeated[0], hc.identity_pre(20, 4)), small[0, :, 0])

    scale, base = torch.tensor([0.8]), random(4, seed=4)
    pre, bound = stream_bounds.pre_error(unrounded[:, :4], off[:, :4], scale, base, 1e-6)
    within(mhc.mhc_head_compute_mix_ref(theirs[:, :4], scale, base, 1e-6), pre, bound)
    head = hc.head_collapse(streams[0], fn[:4], scale, base, norm_eps=1e-6)
    same_bits(
        head, hc.collapse(streams[0], (mixes_of(streams[0], fn[:4]) * scale.double() + base.double()).sigmoid().add(fp32_eps()).float())
    )


def mixes_of(streams, fn):
    return hc.mix_statistics(streams, fn, eps=1e-6).double()


def fp32_eps():
    return torch.tensor(1e-6).item()


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is an oracle that only some environments have")
def test_unquantised_equals_transformers():
    """In fp32, where its other roundings (post and comb to the streams' dtype, A 10 row 2) do nothing; it normalises before it projects."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

    config = DeepseekV4Config(hidden_size=32, hc_mult=4, rms_norm_eps=1e-6)
    module, head = DeepseekV4HyperConnection(config), DeepseekV4HyperHead(config)
    streams, y = random(2, 15, 4, 32), random(30, 32, seed=1)
    fn, scale, base = random(24, 128, seed=2, scale=0.1), torch.tensor([0.7, 1.3, 0.4]), random(24, seed=3)
    with torch.no_grad():
        for parameter, value in ((module.fn, fn), (module.scale, scale), (module.base, base)):
            parameter.copy_(value)
        for parameter, value in ((head.hc_fn, fn[:4]), (head.hc_scale, scale[:1]), (head.hc_base, base[:4])):
            parameter.copy_(value)
        post, comb, collapsed = (result.flatten(0, 1) for result in module(streams))
        last = head(streams).flatten(0, 1)
        expanded = post[..., None] * y[:, None] + torch.matmul(comb.transpose(-1, -2), streams.flatten(0, 1))
    x = streams.flatten(0, 1).double()
    with numerics("unquantised"):
        mixes = hc.mix_statistics(x, fn, eps=1e-6)
        mix = hc.split_mix(mixes, scale, base)
        ours = hc.collapse(x, mix.pre), hc.head_collapse(x, fn[:4], scale[:1], base[:4], norm_eps=1e-6)
        after = hc.expand(y.double(), x, post, comb)
    off = stream_bounds.statistics_error(x, fn, 1e-6, mixes)
    bounds = stream_bounds.mix_errors(mixes, off, scale, base, 20, 1e-6)
    within(post, mix.post, bounds.post)
    within(comb, mix.comb, bounds.comb)
    moved = bounds.pre[:, :, None] + 5 * U * mix.pre[:, :, None]  # of the weight; then a product and four additions
    within(collapsed, ours[0], (moved * x.abs()).sum(1))
    within(last, ours[1], ((2 * moved) * x.abs()).sum(1))
    size = torch.einsum("tji,tjd->tid", comb.double(), x.abs()) + post.double()[:, :, None] * y.double().abs()[:, None]
    within(expanded, after, 6 * U * size)


def test_tf32_drops_thirteen_bits():
    """x = (2, 0, 0, 0): mean square 1, so that a mix is twice the first weight. TF32 keeps ten bits after the leading one."""
    streams = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]], dtype=torch.bfloat16)
    fn = torch.zeros(3, 4)
    fn[:, 0] = torch.tensor([1 + 2.0**-11 + 2.0**-23, -(1 + 2.0**-10 + 2.0**-11 + 2.0**-22), 2.0**-130])
    want = {
        "exact": fn[:, 0],
        "tf32": torch.tensor([1.0, -(1 + 2.0**-10), 2.0**-130]),
        "tf32_compensated": torch.tensor([1 + 2.0**-11, -(1 + 2.0**-10 + 2.0**-11), 2.0**-130]),
    }
    for precision, weight in want.items():
        same_bits(hc.mix_statistics(streams, fn, eps=0.0, precision=precision)[0], 2 * weight)
    assert torch.equal(fn[:, 0], want["exact"])


def test_mean_square_is_over_all_streams():
    streams = torch.tensor([[[6.0, 0.0], [0.0, 2.0]]], dtype=torch.bfloat16)  # mean square 10
    assert hc.mix_statistics(streams, torch.eye(4), eps=6.0).tolist() == [[1.5, 0.0, 0.0, 0.5]]
    assert hc.mix_statistics(torch.zeros(1, 2, 2).bfloat16(), torch.eye(4), eps=1e-6).tolist() == [[0.0] * 4]
    assert hc.mix_statistics(torch.zeros(1, 2, 2).bfloat16(), torch.eye(4), eps=0.0).isnan().all()


def test_mixes_lie_as_the_specification_says():
    """C = 2: pre, post, then comb in rows of old streams; each with its scale."""
    mixes = torch.tensor([[0.0, 64.0, -1000.0, 0.0, 0.0, 1000.0, 1000.0, 0.0]])
    mix = hc.split_mix(mixes, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1000.0] + [0.0] * 6), eps=0.0)
    assert mix.pre.tolist() == [[0.5, 1.0]]
    assert mix.post.tolist() == [[0.0, 1.0]]
    assert mix.comb.tolist() == [[[0.0, 1.0], [1.0, 0.0]]]
    assert hc.split_mix(mixes, torch.ones(3), torch.zeros(8), post_multiplier=3.0).post[0, 1] == 1.5
    swapped = hc.split_mix(mixes, torch.tensor([0.0, 1.0, 0.0]), torch.zeros(8))
    assert swapped.pre.tolist() == [[torch.tensor(0.5 + 1e-6).item()] * 2]
    assert swapped.post.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_any_number_of_streams(streams):
    """Against einsum in fp64, which knows neither steps nor an order; weights are such that no sum is inexact."""
    x, y = random(5, streams, 12).bfloat16(), random(5, 12, seed=1).bfloat16()
    post, comb = (
        torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(2)) / 8 for shape in ((5, streams), (5, streams, streams))
    )
    want = torch.einsum("tji,tjd->tid", comb.double(), x.double()) + torch.einsum("ti,td->tid", post.double(), y.double())
    same_bits(hc.expand(y, x, post, comb), want.float().bfloat16())
    same_bits(hc.collapse(x, post), torch.einsum("tk,tkd->td", post.double(), x.double()).float().bfloat16())
    mixes = random(5, streams * (2 + streams), seed=3)
    mix = hc.split_mix(mixes, torch.ones(3), torch.zeros(mixes.shape[1]))
    same_bits(mix.pre, (mixes[:, :streams].double().sigmoid() + fp32_eps()).float())
    same_bits(mix.post, (2 * mixes[:, streams : 2 * streams].double().sigmoid()).float())
    # columns were divided last, by their sum and eps; a fp32 rounding of each entry is left
    assert (mix.comb.double().sum(1) - 1).abs().max() <= 1e-6 + 1.1e-6 + streams * U
    fn = random(streams * (2 + streams), streams * 12, seed=4)
    want = x.double().flatten(1) @ fn.double().T / (x.double().flatten(1).square().mean(1, keepdim=True) + 1e-6).sqrt()
    within(hc.mix_statistics(x, fn, eps=1e-6), want, 3 * U * want.abs())  # the factor, the product, and fp64
    head = hc.head_collapse(x, fn[:streams], torch.ones(1), torch.zeros(streams), norm_eps=1e-6)
    assert head.shape == (5, 12)


def test_sums_have_a_stated_order():
    """2^70 - 2^70 + 1, in this order and in no other; and comb before the output."""
    streams = torch.tensor([[[2.0**70], [-(2.0**70)], [1.0]]]).bfloat16()
    assert hc.collapse(streams, torch.ones(1, 3)).item() == 1.0
    assert hc.collapse(streams.flip(1), torch.ones(1, 3)).item() == 0.0
    out = hc.expand(torch.ones(1, 1).bfloat16(), streams[:, :2], torch.ones(1, 2), torch.ones(1, 2, 2))
    assert out.flatten().tolist() == [1.0, 1.0]
    backwards = hc.expand(torch.full((1, 1), 2.0**70).bfloat16(), streams[:, 1:], torch.ones(1, 2), torch.ones(1, 2, 2))
    assert backwards.flatten().tolist() == [0.0, 0.0]


def test_boundary_is_its_steps_and_reads_rounded_streams():
    x, y = random(9, 4, 32).bfloat16(), random(9, 32, seed=1).bfloat16()
    post, comb = stream_inputs.weights(["normal"], 9, 4, 2), stream_inputs.combs(["normal"], 9, 4, 3)
    fn, (scale, base) = stream_inputs.projection(4, 32, 24, 4), stream_inputs.scale_and_base(4, 5)
    weight, carried = random(32, seed=6).bfloat16(), stream_inputs.weights(["normal"], 9, 4, 7)
    for given in (None, carried):
        found = hc.boundary(
            y, x, post, comb, fn, scale, base, weight, norm_eps=1e-6, rms_eps=1e-5, iterations=3, eps=1e-4, carried_pre=given,
            precision="tf32",
        )  # fmt: skip
        streams = hc.expand(y, x, post, comb)
        mix = hc.split_mix(hc.mix_statistics(streams, fn, eps=1e-6, precision="tf32"), scale, base, iterations=3, eps=1e-4)
        normed = rms_norm(hc.collapse(streams, mix.pre if given is None else given), weight, eps=1e-5)
        for got, expected in zip(found[:5], (streams, *mix, normed), strict=True):
            same_bits(got, expected)


# Public bug reports.


def test_hc_01_comb_is_indexed_old_new():
    comb = torch.tensor([[[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0.0]]])
    streams = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]).bfloat16()
    out = hc.expand(torch.ones(1, 1).bfloat16(), streams, torch.zeros(1, 4), comb)
    assert out.flatten().tolist() == [4.0, 1.0, 2.0, 3.0]


def test_hc_03_extreme_logits_stay_finite():
    apart = comb_of(-100 * (1 - torch.eye(4)))
    assert [f"{value:.6f}" for value in apart.diagonal().tolist()] == ["0.999996"] * 4
    assert [f"{value:.1e}" for value in apart[~torch.eye(4, dtype=torch.bool)].tolist()] == ["1.0e-06"] * 12
    together = comb_of(torch.tensor([0.0, -100, -100, -100]).expand(4, 4))
    assert (together.double() - 0.25).abs().max() <= 1e-6
    for comb in (apart, together):
        assert (comb.double().sum(0) - 1).abs().max() <= 2e-6
        assert (comb.double().sum(1) - 1).abs().max() <= 2e-6


ROWS = (1, 31, 32, 33, 64, 1024, 2048, 2049, 4096, 16384)


@pytest.mark.parametrize(("hidden", "most"), [(32, 16384), (4096, 64), (5120, 64)])
def test_hc_05_and_dt_01_rows_do_not_depend_on_the_batch(hidden, most):
    """The last row, distinct, alone and after any number of others; batches split, permuted and padded."""
    x, y = random(most, 4, hidden).bfloat16(), random(most, hidden, seed=1).bfloat16()
    x[-1] *= 3
    post, comb = stream_inputs.weights(["normal"], most, 4, 2), stream_inputs.combs(["normal"], most, 4, 3)
    fn, (scale, base) = stream_inputs.projection(4, hidden, 24, 4), stream_inputs.scale_and_base(4, 5)
    weight = random(hidden, seed=6).bfloat16()

    def run(rows):
        found = hc.boundary(*(t[rows] for t in (y, x, post, comb)), fn, scale, base, weight, norm_eps=1e-6, rms_eps=1e-6, output="mxfp8")
        head = hc.head_collapse(x[rows], fn[:4], scale[:1], base[:4], norm_eps=1e-6)
        return [*found, head]

    alone = run([most - 1])
    for count in [count for count in ROWS if count <= most]:
        for got, expected in zip(run(slice(most - count, most)), alone, strict=True):
            same_bits(got[-1:], expected)
    five = run(list(range(5)))
    for form in ([[0], [1, 2, 3, 4]], [[0, 1], [2, 3, 4]], [[4, 2, 0, 1, 3]], [[0, 1, 2, 3, 4, 9, 9, 9]]):
        parts = [run(rows) for rows in form]
        order = torch.tensor([row for rows in form for row in rows][:5])
        for index, expected in enumerate(five):
            same_bits(torch.cat([part[index] for part in parts])[:5], expected[order])


def test_hc_07_mixing_keeps_the_sum_over_streams_through_43_layers():
    """Sum over new streams = sum over old ones, each times its row's sum; these are 1 where Sinkhorn has converged, as for |logit| <= 1."""
    streams, nothing = random(6, 4, 16, scale=0.07).bfloat16(), torch.zeros(6, 16).bfloat16()
    wide = streams.double()
    start, spread = wide.sum(1), streams.float().std()
    for layer in range(43):
        logits = torch.rand(6, 24, generator=torch.Generator().manual_seed(layer)) * 2 - 1
        mix = hc.split_mix(logits, torch.ones(3), torch.zeros(24))
        rows = mix.comb.double().sum(2)
        assert (rows - 1).abs().max() <= 2e-6  # as HC-03 has it
        mixed = hc.expand(nothing, streams, mix.post, mix.comb)
        kept = (streams.double() * rows[:, :, None]).sum(1)
        # each new stream is rounded to bf16, and before to fp32
        assert ((mixed.double().sum(1) - kept).abs() <= (2.0**-8 + 2.0**-23) * mixed.double().abs().sum(1)).all()
        with numerics("unrounded"):
            wide = hc.expand(nothing.double(), wide, mix.post, mix.comb)
        streams = mixed
    assert ((wide.sum(1) - start).abs() <= 43 * 2e-6 * 4 * 0.07 * 5).all()  # a stream's numbers stay below five deviations
    assert streams.float().std() <= spread


@pytest.mark.parametrize("streams", [1, 2, 4, 8])
@pytest.mark.parametrize("hidden", [64, 320, 4096, 5120, 5376, 7168])
def test_hc_08_no_shape_is_special(hidden, streams):
    """Every hidden size and number of streams: one stream alone is written back by its own mix."""
    x, mixes = random(2, streams, hidden).bfloat16(), streams * (2 + streams)
    fn = random(mixes, streams * hidden, seed=1, scale=hidden**-0.5)
    found = hc.boundary(
        torch.zeros(2, hidden).bfloat16(), x, torch.zeros(2, streams), torch.eye(streams).repeat(2, 1, 1), fn, torch.ones(3),
        torch.zeros(mixes), torch.ones(hidden).bfloat16(), norm_eps=1e-6, rms_eps=1e-6, carried_pre=hc.identity_pre(2, streams),
    )  # fmt: skip
    same_bits(found.streams, x)
    same_bits(found.normed, rms_norm(x[:, 0].contiguous(), torch.ones(hidden).bfloat16(), eps=1e-6))
    assert [part.shape[1:] for part in found[1:4]] == [(streams,), (streams,), (streams, streams)]


def test_no_tokens():
    fn, scale, base = random(24, 64), torch.ones(3), torch.zeros(24)
    x, y, post, comb = torch.zeros(0, 4, 16).bfloat16(), torch.zeros(0, 16).bfloat16(), torch.zeros(0, 4), torch.zeros(0, 4, 4)
    assert hc.mix_statistics(x, fn, eps=1e-6).shape == (0, 24)
    assert [part.shape for part in hc.split_mix(torch.zeros(0, 24), scale, base)] == [(0, 4), (0, 4), (0, 4, 4)]
    assert hc.collapse(x, post).shape == (0, 16)
    assert hc.expand(y, x, post, comb).shape == (0, 4, 16)
    assert hc.head_collapse(x, fn[:4], scale[:1], base[:4], norm_eps=1e-6).shape == (0, 16)
    weight = torch.ones(16).bfloat16()
    found = hc.boundary(y, x, post, comb, fn, scale, base, weight, norm_eps=1e-6, rms_eps=1e-6)
    assert found.normed.shape == (0, 16)


def test_derivatives():
    """Of the smooth functions, in the mode that rounds nothing."""
    wide = partial(random, scale=0.7)
    tensors = {
        "x": wide(2, 2, 3, seed=1), "y": wide(2, 3, seed=2), "fn": wide(8, 6, seed=3), "scale": wide(3, seed=4), "base": wide(8, seed=5),
        "post": wide(2, 2, seed=6), "comb": wide(2, 2, 2, seed=7), "mixes": wide(2, 8, seed=9),
    }  # fmt: skip
    weight = wide(3, seed=8).bfloat16()
    t = {name: value.double().requires_grad_() for name, value in tensors.items()}
    checks = [
        (lambda x, fn: hc.mix_statistics(x, fn, eps=1e-6), ("x", "fn")),
        (lambda m, s, b: tuple(hc.split_mix(m, s, b, iterations=4)), ("mixes", "scale", "base")),
        (hc.collapse, ("x", "post")),
        (hc.expand, ("y", "x", "post", "comb")),
        (lambda x, fn, s, b: hc.head_collapse(x, fn[:2], s[:1], b[:2], norm_eps=1e-6), ("x", "fn", "scale", "base")),
        (
            lambda *args: tuple(hc.boundary(*args, weight, norm_eps=1e-6, rms_eps=1e-6, iterations=2)[:5]),
            ("y", "x", "post", "comb", "fn", "scale", "base"),
        ),
    ]
    with numerics("unrounded"):
        for function, names in checks:
            assert torch.autograd.gradcheck(function, [t[name] for name in names])


def valid():
    """Arguments of `boundary` that hold."""
    return {
        "y": torch.zeros(2, 32).bfloat16(), "streams": torch.zeros(2, 4, 32).bfloat16(), "post": torch.zeros(2, 4),
        "comb": torch.zeros(2, 4, 4), "fn": torch.zeros(24, 128), "scale": torch.zeros(3), "base": torch.zeros(24),
        "weight": torch.zeros(32).bfloat16(), "norm_eps": 1e-6, "rms_eps": 1e-6,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "value", "limit"),
    [
        ("y", torch.zeros(2, 32), "must be bf16"),
        ("y", torch.zeros(3, 32).bfloat16(), "must have shape [2, 32]"),
        ("streams", torch.zeros(2, 0, 32).bfloat16(), "at least one stream"),
        ("streams", torch.zeros(2, 4, 0).bfloat16(), "at least one stream"),
        ("streams", torch.zeros(2, 4, 32).bfloat16().to("meta"), "must be on the device of streams, meta"),
        ("post", torch.zeros(2, 4).double(), "must be fp32"),
        ("comb", torch.zeros(2, 4, 3), "must have shape [2, 4, 4]"),
        ("fn", torch.zeros(4, 128), "must have shape [24, 128]"),
        ("scale", torch.zeros(1), "must have shape [3]"),
        ("scale", torch.zeros(3).bfloat16(), "must be fp32"),
        ("base", torch.zeros(23), "must have shape [24]"),
        ("weight", torch.zeros(16).bfloat16(), "must have shape [32]"),
        ("carried_pre", torch.zeros(2, 3), "must have shape [2, 4]"),
        ("norm_eps", -1e-6, "must be at least 0.0"),
        ("rms_eps", 1e39, "must be at most"),
        ("eps", float("nan"), "must be at least 0.0"),
        ("iterations", 0, "must be at least 1"),
        ("iterations", 2.0, "must be a whole number"),
        ("precision", "fp32", "must be one of exact, tf32, tf32_compensated"),
        ("output", "fp8", "must be one of bf16, mxfp8"),
        ("scale_layout", "rows", "must be one of packed, 128x4"),
    ],
)
def test_boundary_refuses(argument, value, limit):
    with pytest.raises(ArgumentError) as refused:
        hc.boundary(**{**valid(), argument: value})
    assert limit in str(refused.value)
    if argument != "streams" or "stream" not in limit:
        assert refused.value.argument == argument


def test_the_steps_refuse():
    given = valid()
    streams, fn = given["streams"], given["fn"]
    refused = [
        ("mixes", lambda: hc.split_mix(torch.zeros(2, 25), torch.zeros(3), torch.zeros(25))),
        ("mixes", lambda: hc.split_mix(torch.zeros(2, 0), torch.zeros(3), torch.zeros(0))),
        ("base", lambda: hc.split_mix(torch.zeros(2, 24), torch.zeros(3), torch.zeros(8))),
        ("post_multiplier", lambda: hc.split_mix(torch.zeros(2, 24), torch.zeros(3), torch.zeros(24), post_multiplier=-1.0)),
        ("fn", lambda: hc.mix_statistics(streams, fn[:, :64], eps=1e-6)),
        ("eps", lambda: hc.mix_statistics(streams, fn, eps=-1.0)),
        ("pre", lambda: hc.collapse(streams, torch.zeros(2, 3))),
        ("fn", lambda: hc.head_collapse(streams, fn, torch.zeros(1), torch.zeros(4), norm_eps=1e-6)),
        ("scale", lambda: hc.head_collapse(streams, fn[:4], torch.zeros(3), torch.zeros(4), norm_eps=1e-6)),
        ("streams", lambda: hc.boundary(**{**given, **narrow()}, output="mxfp8")),
        ("tokens", lambda: hc.identity_pre(-1, 4)),
        ("streams", lambda: hc.identity_pre(1, 0)),
    ]
    for argument, call in refused:
        with pytest.raises(ArgumentError) as error:
            call()
        assert error.value.argument == argument


def narrow():
    """A hidden size that is no multiple of 32."""
    return {
        "y": torch.zeros(2, 16).bfloat16(), "streams": torch.zeros(2, 4, 16).bfloat16(), "fn": torch.zeros(24, 64),
        "weight": torch.zeros(16).bfloat16(),
    }  # fmt: skip
