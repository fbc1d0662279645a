"""The Triton kernels of residual streams: the reference's bits where they are promised, its bounds elsewhere.

On a GPU the kernels run there. Elsewhere Triton's interpreter runs them, which must be asked for before triton is imported: one test runs
this file again in a process of its own. The interpreter multiplies bf16 wrongly, so there the three parts of fn are multiplied in fp32:
splitting fn, its precisions and the splits of K are tested, the tensor cores' own sums are not.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from dsv4.fast import dispatch
from dsv4.fast import hyper_connections as fast
from dsv4.fast.norms import rms_norm
from dsv4.fast.quantization import quantize_fp8
from dsv4.parity import stream_bounds, stream_inputs
from dsv4.reference import hyper_connections as reference
from dsv4.reference.numerics import numerics
from interpreted import INTERPRETED, passes
from test_fast_hyper_connections import V4, V41, same

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
kernel = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in its own process, or on a GPU")
SHAPES = [(3, 4, 96), (5, 4, 64), (2, 1, 40), (1, 2, 160), (2, 8, 32), (1, 4, 1160)]


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_kernels_in_the_interpreter():
    passes(__file__, least=52)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Let the triton rows run on the CPU, for the interpreter."""
    for function in (*(f"hyper_connections.{name}" for name in fast.__all__ if name != "identity_pre"), "norms.rms_norm"):
        rows = tuple(replace(row, device=dispatch.any_device) for row in dispatch.TABLES[function])
        monkeypatch.setitem(dispatch.TABLES, function, rows)


def random(*shape, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def inputs(tokens, streams=4, hidden=64):
    mixes = streams * (2 + streams)
    x = random(tokens, streams, hidden).bfloat16()
    fn, base = random(mixes, streams * hidden, seed=1, scale=(streams * hidden) ** -0.5), random(mixes, seed=2)
    scale = torch.tensor([0.6, 1.1, 1.7], device=DEVICE)
    post, comb = random(tokens, streams, seed=3).abs(), random(tokens, streams, streams, seed=4).softmax(2)
    weight = 1 + random(hidden, seed=6, scale=0.1).bfloat16()
    weight[:32] *= 2.0**-20
    return random(tokens, hidden, seed=5).bfloat16(), x, post, comb, fn, scale, base, weight


def exact(function, *args, **options):
    with numerics("unrounded"):
        return function(*args, **options)


def within(got, expected, bound):
    assert got.shape == expected.shape
    assert ((got.double() - expected).abs() <= bound).all()


@kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_expand_and_collapse_have_the_reference_bits(shape):
    """Specials too: infinities, NaN, both zeros, subnormal numbers."""
    for classes in (["normal"], ["cancelling", "tiny", "huge", "zeros"], ["special"]):
        x = stream_inputs.streams(classes, *shape, 7).to(DEVICE)
        y = stream_inputs.streams(classes, shape[0], 1, shape[2], 8)[:, 0].to(DEVICE)
        post = stream_inputs.weights(classes, shape[0], shape[1], 9).to(DEVICE)
        comb = stream_inputs.combs(classes, shape[0], shape[1], 10).to(DEVICE)
        pairs = ((fast.expand(y, x, post, comb, impl="triton"), reference.expand(y, x, post, comb)),
                 (fast.collapse(x, post, impl="triton"), reference.collapse(x, post)))  # fmt: skip
        for got, expected in pairs:
            assert torch.equal(got.isnan(), expected.isnan())
            same(got.nan_to_num(0.0, torch.inf, -torch.inf), expected.nan_to_num(0.0, torch.inf, -torch.inf))


@kernel
@pytest.mark.parametrize("precision", ["exact", "tf32", "tf32_compensated"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_statistics_of_a_lattice_are_exact(precision, tokens):
    """Every sum is exact in fp32; and one element alone, which shows each bit of fn that the precision keeps."""
    x = stream_inputs.lattice(tokens, 4, 256, 3, 2).bfloat16().to(DEVICE)
    fn = stream_inputs.integers((24, 1024), 4, 8).to(DEVICE)
    same(fast.mix_statistics(x, fn, eps=1e-20, precision=precision, impl="triton"),
         reference.mix_statistics(x, fn, eps=1e-20, precision=precision))  # fmt: skip
    x, fn = stream_inputs.lattice(tokens, 4, 256, 5, -1, single=True).bfloat16().to(DEVICE), random(24, 1024, seed=6)
    same(fast.mix_statistics(x, fn, eps=1e-20, precision=precision, impl="triton"),
         reference.mix_statistics(x, fn, eps=1e-20, precision=precision))  # fmt: skip


@kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["exact", "tf32", "tf32_compensated"])
def test_statistics_are_within_their_bound(shape, precision):
    _, x, _, _, fn, *_ = inputs(*shape)
    wanted = exact(reference.mix_statistics, x, fn, eps=1e-6, precision=precision)
    within(fast.mix_statistics(x, fn, eps=1e-6, precision=precision, impl="triton"), wanted,
           stream_bounds.statistics_error(x, fn, 1e-6, wanted))  # fmt: skip


@kernel
def test_an_infinite_weight_stays_infinite():
    _, x, _, _, fn, *_ = inputs(3)
    fn[5, 7], fn[6, 9] = torch.inf, torch.nan
    x = x.abs() + 1
    got, expected = fast.mix_statistics(x, fn, eps=1e-6, impl="triton"), reference.mix_statistics(x, fn, eps=1e-6)
    assert got[:, 5].tolist() == [torch.inf] * 3
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert torch.equal(got.isnan(), expected.isnan())


@kernel
@pytest.mark.parametrize(("tokens", "streams", "iterations"), [(1, 4, 20), (65, 4, 20), (3, 1, 3), (3, 2, 1), (3, 8, 2)])
def test_mixes(tokens, streams, iterations):
    """pre and post are rounded once from fp64; comb is held to its bound, and exact for equal logits without eps."""
    *_, scale, base, _ = inputs(1, streams)
    mixes = random(tokens, streams * (2 + streams), seed=8, scale=3.0)
    options = {"iterations": iterations, "post_multiplier": 1.5}
    got = fast.split_mix(mixes, scale, base, **options, impl="triton")
    expected = reference.split_mix(mixes, scale, base, **options)
    same(tuple(got[:2]), tuple(expected[:2]))
    bound = stream_bounds.mix_errors(mixes, 0.0, scale, base, iterations, 1e-6).comb
    within(got.comb, exact(reference.split_mix, mixes, scale, base, **options).comb, bound)
    equal = torch.zeros_like(mixes), scale, torch.zeros_like(base)
    same(tuple(fast.split_mix(*equal, iterations=iterations, eps=0.0, impl="triton")),
         tuple(reference.split_mix(*equal, iterations=iterations, eps=0.0)))  # fmt: skip


@kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("carried", [False, True])
def test_boundary_equals_its_own_steps(shape, carried):
    """And its codes and scales, pads included, are those of `quantize_fp8`."""
    y, x, post, comb, fn, scale, base, weight = given = inputs(*shape)
    options = {**(V41 if carried else V4), "carried_pre": post.flip(0) if carried else None, "impl": "triton"}
    got = fast.boundary(*given, **options)
    new = fast.expand(y, x, post, comb, impl="triton")
    mixes = fast.mix_statistics(new, fn, eps=options["norm_eps"], impl="triton")
    mix = fast.split_mix(mixes, scale, base, impl="triton")
    collapsed = fast.collapse(new, options["carried_pre"] if carried else mix.pre, impl="triton")
    same(tuple(got), (new, *mix, rms_norm(collapsed, weight, eps=options["rms_eps"], impl="triton"), None))
    same(got.streams, reference.expand(y, x, post, comb))
    for layout in ("packed", "128x4") if shape[2] % 32 == 0 else ():
        codes = fast.boundary(*given, **options, output="mxfp8", scale_layout=layout)
        same(tuple(codes[:4]), tuple(got[:4]))
        quantised = quantize_fp8(got.normed, 32, scale_layout=layout, impl="eager")
        same(codes.normed, quantised.codes)
        assert (codes.scales.stride(), codes.scales.tolist()) == (quantised.scales.stride(), quantised.scales.tolist())
        if layout == "packed":  # the words behind the last row of a column
            pads = [
                scales.as_strided((scales.shape[1], scales.stride(1)), (scales.stride(1), 1)) for scales in (codes.scales, quantised.scales)
            ]
            assert torch.equal(*pads)


@kernel
@pytest.mark.parametrize("shape", [(3, 4, 64), (2, 2, 160)])
def test_head(shape):
    _, x, _, _, fn, scale, base, _ = inputs(*shape)
    count = shape[1]
    head = fn[:count], scale[:1], base[:count]
    mixes = fast.mix_statistics(x, head[0], eps=1e-6, impl="triton")
    pre = ((mixes.double() * head[1] + head[2]).sigmoid() + torch.tensor(1e-6).double()).float()
    same(fast.head_collapse(x, *head, norm_eps=1e-6, impl="triton"), fast.collapse(x, pre, impl="triton"))


def coarse(given):
    """In the interpreter NumPy multiplies, and adds some rows of a tile in another order than others: there sums are made exact."""
    return tuple((8 * value).round() / 8 for value in given) if INTERPRETED else given


@kernel
def test_rows_do_not_depend_on_their_batch():
    """Tokens on both sides of the tiles; the last row is unlike the others."""
    _, x, _, _, fn, scale, base, _ = coarse(inputs(67))
    for call in (
        lambda x: fast.mix_statistics(x, fn, eps=1e-6, impl="triton"),
        lambda x: fast.split_mix(x[:, 0, :24].float(), scale, base, impl="triton").comb,
    ):
        whole = call(x)
        for tokens in (1, 31, 33, 64):
            same(call(x[-tokens:]), whole[-tokens:])
    given = coarse(inputs(34))
    given[1][-1] *= 64
    boundary = partial(fast.boundary, **V4, output="mxfp8", impl="triton")
    whole = boundary(*given)
    for tokens in (1, 5, 33):
        part = boundary(*(value[-tokens:] for value in given[:4]), *given[4:])
        for name in ("streams", "pre", "post", "comb", "normed"):
            same(getattr(part, name), getattr(whole, name)[-tokens:])
        assert part.scales.tolist() == whole.scales[-tokens:].tolist()


@kernel
def test_no_tokens_and_gaps():
    empty = fast.boundary(
        *(value[:0] for value in inputs(1)[:4]), *inputs(1)[4:], **V4, output="mxfp8", scale_layout="128x4", impl="triton"
    )
    assert (empty.streams.shape, empty.comb.shape, empty.scales.shape) == ((0, 4, 64), (0, 4, 4), (0, 1, 32, 4))
    given = inputs(3)
    wide = [torch.stack([value, torch.full_like(value, torch.nan)], -1)[..., 0] for value in given]
    shifted = torch.cat([given[1].flatten()[:1], given[1].flatten()])[1:].view(given[1].shape)  # begins within a word
    for other in (wide, [*given[:1], shifted, *given[2:]]):
        same(tuple(fast.boundary(*other, **V4, impl="triton")), tuple(fast.boundary(*given, **V4, impl="triton")))
