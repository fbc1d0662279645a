"""Fast hyper-connections: literals, the reference bit for bit, batches, graphs, operators, libraries that are made up, errors."""

import inspect
from functools import partial
from itertools import product

import pytest
import torch
from torch._dynamo.utils import counters

from dsv4.fast import compiled, dispatch, hyper_connection_bodies, hyper_connections_ops, use
from dsv4.fast import hyper_connections as fast
from dsv4.fast.adapters import deepgemm, flashinfer
from dsv4.fast.norms import rms_norm
from dsv4.fast.quantization import quantize_fp8
from dsv4.reference import hyper_connections as reference
from dsv4.types import ArgumentError, BackendUnavailable
from test_adapters import Installed, forget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU = torch.device("cpu")
WAYS = ("inductor", "eager")
LENGTHS = (1, 31, 32, 33, 64, 1024)  # HC-05
V4, V41 = {"norm_eps": 1e-6, "rms_eps": 1e-6}, {"norm_eps": 1e-20, "rms_eps": 1e-20}
NUMBER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def random(*shape, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def tensor(*values):
    return torch.tensor(values, device=DEVICE)


def same(got, expected):
    """Equal bits, and strides but for those of swizzled scales, whose sizes may be 1."""
    got, expected = (value if isinstance(value, tuple) else (value,) for value in (got, expected))
    for left, right in zip(got, expected, strict=True):
        if left is None or right is None:
            assert left is right
            continue
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.dim() == 4 or left.stride() == right.stride()
        assert torch.equal(left.view(NUMBER[left.element_size()]), right.view(NUMBER[right.element_size()]))


def inputs(tokens, streams=4, hidden=64):
    """Arguments of a boundary; a group of its weight is so small that the scales of codes meet their floor."""
    mixes = streams * (2 + streams)
    x = random(tokens, streams, hidden).bfloat16()
    fn, base = random(mixes, streams * hidden, seed=1, scale=(streams * hidden) ** -0.5), random(mixes, seed=2)
    scale = tensor(0.6, 1.1, 1.7)
    post, comb = random(tokens, streams, seed=3).abs(), random(tokens, streams, streams, seed=4).softmax(2)
    weight = 1 + random(hidden, seed=6, scale=0.1).bfloat16()
    weight[:32] *= 2.0**-20
    return random(tokens, hidden, seed=5).bfloat16(), x, post, comb, fn, scale, base, weight


def steps(tokens, streams=4, hidden=64):
    """Each function with its arguments bound, but for `impl`."""
    y, x, post, comb, fn, scale, base, _ = given = inputs(tokens, streams, hidden)
    mixes = reference.mix_statistics(x, fn, eps=1e-6)
    return {
        **{
            f"statistics {precision}": partial(_call, "mix_statistics", x, fn, eps=1e-6, precision=precision)
            for precision in ("exact", "tf32", "tf32_compensated")
        },
        "split": partial(_call, "split_mix", mixes, scale, base),
        "split, other numbers": partial(_call, "split_mix", mixes, scale, base, iterations=3, eps=0.01, post_multiplier=0.3),
        "collapse": partial(_call, "collapse", x, post),
        "expand": partial(_call, "expand", y, x, post, comb),
        "head": partial(_call, "head_collapse", x, fn[:streams], scale[:1], base[:streams], norm_eps=1e-6),
        "boundary": partial(_call, "boundary", *given, **V4),
        "carried": partial(_call, "boundary", *given, **V41, carried_pre=post, precision="tf32", iterations=2, eps=0.0),
        "packed": partial(_call, "boundary", *given, **V4, output="mxfp8"),
        "128x4": partial(_call, "boundary", *given, **V41, carried_pre=post, output="mxfp8", scale_layout="128x4"),
    }


def _call(name, *args, side=fast, **options):
    return getattr(side, name)(*args, **options)


@pytest.mark.parametrize("impl", WAYS)
def test_comb_is_old_before_new(impl):
    """HC-01."""
    comb = tensor([0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0])[None]
    streams = torch.arange(1.0, 5.0, device=DEVICE).view(1, 4, 1).expand(1, 4, 8).bfloat16()
    y, post = torch.full((1, 8), 10.0, device=DEVICE).bfloat16(), tensor([0.0, 0.0, 1.0, 0.5])
    assert fast.expand(y, streams, post, comb, impl=impl)[0, :, 3].tolist() == [4.0, 1.0, 12.0, 8.0]


def within(got, published):
    """Published numbers have seven digits, of fp32 arithmetic."""
    assert ((got - tensor(*published)).abs() <= 2e-7).all()


def test_published_sinkhorn():
    """Spec A 12."""
    logits = tensor([2.0, 0, -1, 0.5], [0, 1, 0.3, -2], [-0.7, 0.2, 1.5, 0.1], [0.4, -1.2, 0.6, 0.9])
    mixes = torch.cat([torch.zeros(8, device=DEVICE), logits.flatten()])[None]
    ones, zeros = torch.ones(3, device=DEVICE), torch.zeros(24, device=DEVICE)
    pre, post, comb = fast.split_mix(mixes, ones, zeros)
    within(comb[0, 0], [0.6106708, 0.1252938, 0.0316591, 0.2323753])
    within(comb[0, 3], [0.1855426, 0.0567919, 0.2359744, 0.5216901])
    assert pre[0].tolist() == [torch.tensor(0.5 + 1e-6).item()] * 4
    assert post[0].tolist() == [1.0] * 4
    first = fast.split_mix(mixes, ones, zeros, iterations=1).comb
    within(first[0, 1], [0.1580634, 0.6254097, 0.2147045, 0.0351177])


def test_extreme_logits():
    """HC-03."""
    rows = torch.zeros(2, 24, device=DEVICE)
    rows[0, 8:] = -100 * (1 - torch.eye(4, device=DEVICE)).flatten()
    rows[1, 8:] = -100 * (torch.arange(16, device=DEVICE) % 4 != 0)
    comb = fast.split_mix(rows, torch.ones(3, device=DEVICE), torch.zeros(24, device=DEVICE)).comb
    assert [round(x, 6) for x in comb[0].diagonal().tolist()] == [0.999996] * 4
    assert ((comb[1] - 0.25).abs() <= 1e-6).all()


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("name", steps(1))
def test_equals_the_reference(name, impl):
    """All forms at a small width: one token, a block, more, none."""
    for tokens in (1, 0, 8, 33):
        call = steps(tokens)[name]
        row = impl if any(row.backend == impl for row in dispatch.TABLES[f"hyper_connections.{call.args[0]}"]) else "eager"
        same(call(impl=row), call(side=reference))


@pytest.mark.parametrize(("streams", "hidden"), [(1, 64), (2, 320), (8, 64), (3, 10), (4, 7)])
def test_other_shapes(streams, hidden):
    for name, call in steps(5, streams, hidden).items():
        if hidden % 32 == 0 or name not in ("packed", "128x4"):
            same(call(impl="eager"), call(side=reference))


@pytest.fixture
def invariant():
    with use(batch_invariant=True):
        yield


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("hidden", [4096, 5120])
def test_rows_do_not_depend_on_their_batch(hidden, impl):
    """HC-05: the widths of V4-Flash and V4.1-Flash, the last row unlike the others; the model's reference at 33 tokens."""
    given = inputs(1024, hidden=hidden)
    y, x, post, comb = given[:4]
    x[-1], y[-1], post[-1], comb[-1] = x[-1] * 64, -y[-1], 0.25, torch.eye(4, device=DEVICE)
    boundary = partial(fast.boundary, **V4, impl=impl)
    whole = boundary(*given)
    for tokens in LENGTHS[:-1]:
        part = [value[-tokens:] for value in given[:4]]
        for got, expected in zip(boundary(*part, *given[4:])[:-1], whole[:-1], strict=True):
            same(got, expected[-tokens:])
    part = [value[-33:] for value in given[:4]]
    same(boundary(*part, *given[4:]), reference.boundary(*part, *given[4:], **V4))


@pytest.mark.usefixtures("invariant")
def test_the_place_in_a_product_does_not_matter():
    """Each row at every place of a block."""
    x, eps = torch.empty(2 * hyper_connection_bodies.ROWS, 4, 1024, dtype=torch.bfloat16, device=DEVICE), 0.0
    for mixes in (24, 4):
        fn = random(mixes, 4096, seed=1, scale=12.0).exp()
        fn[:, 2048:] = -fn[:, :2048].flip(1)  # what is left of a row's sums is what rounding leaves, and depends on their order
        x[:] = random(len(x), 1, 1, seed=2)
        whole = fast.mix_statistics(x, fn, eps=eps, impl="eager")
        assert whole.any()
        for shift, count in product(range(1, 9), (1, 3, 13)):
            same(fast.mix_statistics(x.roll(shift, 0)[:count], fn, eps=eps, impl="eager"), whole.roll(shift, 0)[:count])


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("carried", [False, True])
def test_boundary_equals_its_own_steps(carried, impl):
    y, x, post, comb, fn, scale, base, weight = inputs(33)
    given = post.flip(0) if carried else None
    got = fast.boundary(y, x, post, comb, fn, scale, base, weight, **V4, carried_pre=given, impl=impl)
    new = fast.expand(y, x, post, comb, impl=impl)
    mix = fast.split_mix(fast.mix_statistics(new, fn, eps=1e-6), scale, base)
    normed = rms_norm(fast.collapse(new, given if carried else mix.pre, impl=impl), weight, eps=1e-6, impl=impl)
    same(tuple(got), (new, *mix, normed, None))
    for layout in ("packed", "128x4"):
        codes = fast.boundary(
            y, x, post, comb, fn, scale, base, weight, **V4, carried_pre=given, output="mxfp8", scale_layout=layout, impl=impl
        )
        same(tuple(codes[:4]), tuple(got[:4]))
        same(tuple(codes[4:]), tuple(quantize_fp8(normed, 32, scale_layout=layout, impl=impl)))


def test_a_known_kind_does_not_reach_the_operator(monkeypatch):
    """Single collapses run at once what the first call chose, with the same bits; other numbers of tokens, eps or words do not."""
    fast._collapse.forget()  # what other tests called
    fast._head.forget()
    streams, pre = torch.randn(6, 4, 64, device=DEVICE).bfloat16(), torch.rand(6, 4, device=DEVICE)
    head = torch.randn(4, 256, device=DEVICE), torch.rand(1, device=DEVICE), torch.rand(4, device=DEVICE)
    calls = {
        "_collapse_operator": lambda streams, pre, **more: fast.collapse(streams, pre, **more),
        "_head_operator": lambda streams, _, norm_eps=1e-6, **more: fast.head_collapse(streams, *head, norm_eps=norm_eps, **more),
    }
    expected = [call(streams, pre) for call in calls.values()]

    def reached(*_):
        raise LookupError

    for (name, call), first in zip(calls.items(), expected, strict=True):
        monkeypatch.setattr(fast, name, reached)
        assert torch.equal(call(streams, pre), first)
        assert not torch.equal(call(-streams, pre), first)
        with pytest.raises(LookupError):
            call(streams[:5], pre[:5])
        with pytest.raises(LookupError):
            call(streams, pre, impl="eager")
    with pytest.raises(LookupError):
        calls["_head_operator"](streams, pre, norm_eps=1e-5)


def test_inputs_with_gaps():
    given = inputs(9)
    wide = [torch.stack([value, torch.full_like(value, torch.nan)], -1)[..., 0] for value in given]
    assert not wide[1].is_contiguous()
    for impl in WAYS:
        same(fast.boundary(*wide, **V4, impl=impl), fast.boundary(*given, **V4, impl=impl))


def test_v41_starts_with_the_first_stream():
    x = inputs(3)[1]
    same(fast.collapse(x, fast.identity_pre(3, 4, device=DEVICE)), x[:, 0].contiguous())


def test_streams_add_up_through_43_layers():
    """HC-07: the sum over streams follows the row sums of comb."""
    x, comb = random(3, 4, 64).bfloat16(), random(3, 4, 4, seed=1).softmax(2)
    y, post = torch.zeros(3, 64, device=DEVICE).bfloat16(), random(3, 4, seed=2)
    for _ in range(43):
        new = fast.expand(y, x, post, comb)
        expected = (x.double() * comb.double().sum(2)[:, :, None]).sum(1)
        assert ((new.double().sum(1) - expected).abs() <= 2.0**-8 * new.double().abs().sum(1) + 2.0**-30).all()
        x = new


# Operators and graphs


def test_graphs_per_function():
    compiled._graph.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    for tokens in (0, 1, 127, 128, 129, 257):
        y, x, post, comb = inputs(tokens, hidden=512)[:4]
        for given in (x, random(2 * tokens, 4, 512).bfloat16()[::2]):
            fast.collapse(given, post, impl="inductor")
            fast.expand(y, given, post, comb, impl="inductor")
            with torch.inference_mode():
                fast.collapse(given.clone(), post, impl="inductor")
                fast.expand(y.clone(), given, post, comb, impl="inductor")
    assert 2 <= counters["stats"]["unique_graphs"] <= 4
    counters.clear()
    for tokens in (0, 1, 127, 128, 129, 257):
        fast.boundary(*inputs(tokens, hidden=512), **V4, impl="inductor")
        with torch.inference_mode():
            fast.boundary(*inputs(tokens, hidden=512), **V4, impl="inductor")
    assert 1 <= counters["stats"]["unique_graphs"] <= 2  # collapse and norm; expand has its own


def samples():
    y, x, post, comb, fn, scale, base, _ = given = inputs(5)
    return {
        "mix_statistics": (x, fn, 1e-6, "tf32"),
        "split_mix": (random(5, 24), scale, base, 2, 1e-6, 2.0),
        "collapse": (x, post),
        "expand": (y, x, post, comb),
        "head_collapse": (x, fn[:4], scale[:1], base[:4], 1e-6, 1e-6),
        "boundary": (*given, post, 1e-6, 1e-6, 2, 1e-6, "exact", "mxfp8", "128x4"),
    }


@pytest.mark.parametrize("name", samples())
def test_operators_keep_their_promises(name):
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, (*samples()[name], "eager"))


def test_boundaries_are_one_graph():
    """Two of them, the mix of the first handed to the second, as V4.1 does."""

    def layer(y, x, post, comb, *weights):
        first = fast.boundary(y, x, post, comb, *weights, **V41, carried_pre=post, impl="eager")
        return fast.boundary(
            first.normed, first.streams, first.post, first.comb, *weights, **V41, carried_pre=first.pre, output="mxfp8", impl="eager"
        )

    traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
    same(tuple(traced(*inputs(6))), tuple(layer(*inputs(6))))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs")
@pytest.mark.parametrize("tokens", [1, 7, 64, 129])
def test_replays_follow_their_inputs(tokens):
    """HC-09: two graphs by turns, a hundred replays with other inputs."""
    both = [inputs(tokens, hidden=4096), inputs(tokens + 3, hidden=4096)]
    graphs = []
    for given in both:
        fast.boundary(*given, **V4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = fast.boundary(*given, **V4)
        graphs.append((graph, given, got))
    for seed in range(50):
        for graph, given, got in graphs:
            given[1].copy_(random(*given[1].shape, seed=seed))
            graph.replay()
            same(tuple(got), tuple(fast.boundary(*given, **V4)))


# What runs where


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("hidden", [64, 320, 4096, 5120, 5376, 7168, 60, 8200])
def test_one_function_decides_on_shapes(streams, hidden):
    """HC-08: the flag of a row is what `supported` says; what Triton does not take, inductor does."""
    reason = hyper_connections_ops.supported(streams, hidden)
    assert (reason is None) == (streams != 3 and hidden % 8 == 0 and hidden <= 8192)
    given = {"streams": torch.empty(1, streams, hidden, device="meta")}
    for function in ("mix_statistics", "collapse", "expand", "head_collapse", "boundary"):
        (row,) = (row for row in dispatch.TABLES[f"hyper_connections.{function}"] if row.backend == "triton")
        assert row.arguments(given) == reason
    if hidden == 60:
        same(fast.collapse(random(2, streams, hidden).bfloat16(), random(2, streams)), reference.collapse(
            random(2, streams, hidden).bfloat16(), random(2, streams)))  # fmt: skip


def test_every_way_keeps_what_may_be_demanded():
    rows = [row for function, rows in dispatch.TABLES.items() if function.startswith("hyper_connections.") for row in rows]
    assert len(rows) == 16
    assert all(row.deterministic and row.graph_safe for row in rows)
    with use(batch_invariant=True, deterministic=True):
        assert all(row.batch_invariant for row in rows)
        fast.boundary(*inputs(2), **V4)


@pytest.fixture
def installed(monkeypatch):
    """Libraries made up in sys.modules."""
    monkeypatch.setattr(deepgemm, "unfit", lambda version, torch_version: None)
    yield Installed(monkeypatch)
    forget()


def prenorm_by_loops(x, weight, parts, squares, splits):
    """DeepGEMM's product in plain torch: a TF32 weight, each split apart."""
    cut = (weight.view(torch.int32) & ~0x1FFF).view(torch.float32)
    for split, (left, right) in enumerate(zip(x.double().chunk(splits, 1), cut.double().chunk(splits, 1), strict=True)):
        parts[split], squares[split] = left @ right.T, left.square().sum(1)


def post_by_loops(y, streams, post, comb):
    mixed = sum(comb[:, j, :, None] * streams[:, j, None].float() for j in range(4))
    return (post[:, :, None] * y[:, None].float() + mixed).bfloat16()


def pre_by_loops(parts, squares, streams, scale, base, k, *, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat,
                 num_splits):  # fmt: skip
    assert num_splits == len(parts)
    mixes = parts.sum(0) * (squares.sum(0) / k + rms_eps).rsqrt()[:, None]
    mix = reference.split_mix(
        mixes, scale, base, iterations=sinkhorn_repeat, eps=mhc_pre_eps, post_multiplier=mhc_post_mult_value
    )  # fmt: skip
    assert mhc_sinkhorn_eps == mhc_pre_eps
    return mix.post[..., None], mix.comb, reference.collapse(streams, mix.pre)


def put(installed, **functions):
    installed.put("sgl-deep-gemm", "deep_gemm", "0.1.5.post1", tf32_hc_prenorm_gemm=functions.get("prenorm", prenorm_by_loops))
    mhc = type("mhc", (), {"mhc_post": functions.get("post", post_by_loops), "mhc_pre_big_fuse": functions.get("pre", pre_by_loops)})
    installed.put("flashinfer-python", "flashinfer", "0.7.4", mhc=mhc)


SYMBOLS = ((deepgemm.LIBRARY, deepgemm.PRENORM), (flashinfer.LIBRARY, flashinfer.MHC_POST), (flashinfer.LIBRARY, flashinfer.MHC_PRE))


@pytest.mark.parametrize(("library", "symbol"), SYMBOLS)
def test_right_answers_prove_a_library(library, symbol, installed):
    put(installed)
    assert library.disproved(symbol, CPU) is None


def whole_weight(x, weight, parts, squares, splits):
    for split, (left, right) in enumerate(zip(x.float().chunk(splits, 1), weight.chunk(splits, 1), strict=True)):
        parts[split], squares[split] = left @ right.T, left.square().sum(1)


def unsplit(x, weight, parts, squares, splits):
    prenorm_by_loops(x, weight, parts[:1], squares[:1], 1)
    parts[1:], squares[1:] = 0.0, 0.0


def without_multiplier(*given, **options):
    return pre_by_loops(*given, **{**options, "mhc_post_mult_value": 1.0})


def without_factor(parts, squares, streams, scale, base, k, **options):
    return pre_by_loops(parts, torch.full_like(squares, k / len(parts)), streams, scale, base, k, **options)


def transposed(*given, **options):
    post, comb, y = pre_by_loops(*given, **options)
    return post, comb.mT, y


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("prenorm", lambda *_: None),
        ("prenorm", whole_weight),
        ("prenorm", unsplit),
        ("prenorm", lambda x, weight, *rest: prenorm_by_loops(x.roll(1, 0), weight, *rest)),
        ("post", lambda y, streams, post, comb: post_by_loops(y, streams, post, comb.mT)),
        ("post", lambda y, streams, post, comb: post_by_loops(0 * y, streams, post, comb)),
        ("post", lambda y, streams, post, comb: torch.empty_like(streams)),
        ("pre", without_multiplier),
        ("pre", without_factor),
        ("pre", transposed),
        ("pre", lambda *_, **__: 1 // 0),
    ],
)
def test_wrong_answers_disprove_it(name, function, installed):
    put(installed, **{name: function})
    library, symbol = dict(zip(("prenorm", "post", "pre"), SYMBOLS, strict=True))[name]
    reason = library.disproved(symbol, CPU)
    assert reason is not None
    assert "failed its known-answer test" in reason


# Errors


def test_gradients_are_refused():
    y, x, post, comb, fn, scale, base, weight = inputs(2)
    for name, call in {
        "fn": lambda g: fast.mix_statistics(x, g(fn), eps=0.0),
        "base": lambda g: fast.split_mix(random(2, 24), scale, g(base)),
        "pre": lambda g: fast.collapse(x, g(post)),
        "comb": lambda g: fast.expand(y, x, post, g(comb)),
        "scale": lambda g: fast.head_collapse(x, fn[:4], g(scale[:1]), base[:4], norm_eps=0.0),
        "weight": lambda g: fast.boundary(y, x, post, comb, fn, scale, base, g(weight), **V4),
        "carried_pre": lambda g: fast.boundary(y, x, post, comb, fn, scale, base, weight, **V4, carried_pre=g(post)),
    }.items():
        with pytest.raises(ArgumentError, match="no backward") as caught:
            call(lambda value: value.clone().requires_grad_())
        assert caught.value.argument == name


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("output", {"output": "fp4"}),
        ("scale_layout", {"scale_layout": "rows", "output": "mxfp8"}),
        ("precision", {"precision": "fp16"}),
        ("iterations", {"iterations": 0}),
        ("eps", {"eps": -1.0}),
        ("rms_eps", {"rms_eps": torch.nan}),
    ],
)
def test_wrong_options_are_named(argument, options):
    with pytest.raises(ArgumentError) as caught:
        fast.boundary(*inputs(2), **{**V4, **options})
    assert caught.value.argument == argument


def test_mxfp8_wants_whole_groups():
    with pytest.raises(ArgumentError, match="must be a multiple of 32"):
        fast.boundary(*inputs(2, hidden=40), **V4, output="mxfp8")


@pytest.mark.skipif(DEVICE == "cuda", reason="triton runs here")
def test_a_backend_that_cannot_run_is_named():
    with pytest.raises(BackendUnavailable, match="wants a CUDA device"):
        fast.boundary(*inputs(2), **V4, impl="triton")


@pytest.mark.parametrize("name", [name for name in fast.__all__ if name != "identity_pre"])
def test_signatures_equal_the_reference(name):
    ours, theirs = (inspect.signature(getattr(side, name)).parameters for side in (fast, reference))
    assert [p for key, p in ours.items() if key != "impl"] == list(theirs.values())
