"""Fast output projection: the reference bit for bit from every way to run it; which row a card gets; what is held; graphs, operators."""

import inspect
from dataclasses import replace

import pytest
import torch

from dsv4.fast import compiled, dispatch, groups, linear_bodies, output_projection_ops, use
from dsv4.fast import output_projection as fast
from dsv4.fast.adapters import deepgemm_linear
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Device
from dsv4.reference import output_projection as reference
from dsv4.reference import scales
from dsv4.reference.linear import mxfp8_weight
from dsv4.reference.quantization import quantize_fp8
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import ArgumentError, BackendUnavailable, Quantized, Unsupported
from test_fast_linear import (
    DEVICE,
    SM80,
    SM90,
    SM100,
    SM120,
    SM121,
    TOKENS,
    WAYS,
    Held,
    codes,
    normal,
    numbers,
    powers,
    pretend,
    same,
    with_pads,
)  # fmt: skip

TABLE = rope_table(rope_frequencies(1e4, 64, device=DEVICE), 300)
LAYOUTS = ("packed", "128x4")
every_way = pytest.mark.parametrize("impl", WAYS)


def positions(count, dtype=torch.int64):
    """Some of them absent."""
    return torch.randint(-3, 303, (count,), generator=torch.Generator().manual_seed(5)).to(dtype).to(DEVICE)


def forms(tokens, groups, rank, width, *, strided=False):
    """Operands of both forms: bf16; FP8 of bf16 and of codes, scales of both kinds and any strides."""
    tiles = -(-rank // 128), -(-width // 128)
    o, a = normal(tokens, groups, width), codes(tokens, groups, width)
    if strided:
        o, a = normal(groups, tokens, 2 * width).transpose(0, 1)[..., :width], codes(groups, tokens, width).transpose(0, 1)
    b = codes(groups, rank, width, seed=1)
    of_rows = numbers(groups, tiles[1], tokens + 2).permute(2, 0, 1)[:tokens]
    return {
        "bf16": (o, normal(groups, rank, width, seed=1)),
        "bytes": (o, b, powers(groups, *tiles).view(torch.float8_e8m0fnu)),
        "numbers": (o, b, numbers(groups, *tiles)),
        "codes": (Quantized(a, powers(tokens, groups, tiles[1])), b, powers(groups, *tiles)),
        "codes, numbers": (Quantized(a, of_rows), b, numbers(groups, *tiles)),
    }


@every_way
@pytest.mark.parametrize(("groups", "rank", "width"), [(2, 128, 256), (3, 32, 200), (1, 70, 96)])
def test_project_groups(groups, rank, width, impl):
    for tokens in TOKENS:
        for given in forms(tokens, groups, rank, width, strided=tokens % 2 == 0).values():
            for scale in ("ue8m0", "fp32"):
                got = fast.project_groups(*given, scale=scale, amax_floor="official", impl=impl)
                same(got, reference.project_groups(*given, scale=scale, amax_floor="official"))


@every_way
@pytest.mark.parametrize("tokens", [3, 129])
def test_many_tiles(tokens, impl, monkeypatch):
    monkeypatch.setattr(linear_bodies, "TILE", 7 * 256)
    monkeypatch.setattr(linear_bodies, "INPUTS", 50 * 256)
    for given in forms(tokens, 2, 150, 600).values():
        same(fast.project_groups(*given, impl=impl), reference.project_groups(*given))


@pytest.mark.parametrize("run", [run_compiled, run_eagerly])
@pytest.mark.parametrize("form", ["bf16", "bytes"])
def test_no_weight_is_held_in_fp64(form, run):
    """Of 16 MiB that it would take, 2 at a time."""
    o, weight, *of_weight = forms(3, 2, 1024, 1024)[form]
    given = o, None, weight if form == "bf16" else weight.view(torch.uint8), of_weight[0].view(torch.uint8) if of_weight else None
    linear_bodies.project_groups(run, *given, "ue8m0", "sglang")  # compiles
    with Held(*(part for part in given if part is not None)) as held:
        linear_bodies.project_groups(run, *given, "ue8m0", "sglang")
    assert held.most == linear_bodies.TILE * 8 == 2**21


@every_way
@pytest.mark.parametrize("layout", ["rows", "packed", "mn_major"])
@pytest.mark.parametrize(("heads", "dim", "of_groups", "group"), [(8, 128, 2, 128), (6, 96, 3, 32), (4, 64, 1, 32)])
def test_rotate_quantize(heads, dim, of_groups, group, layout, impl):
    for tokens in TOKENS:
        o, at = normal(tokens, heads, dim, seed=tokens), positions(tokens, torch.int32 if tokens % 2 else torch.int64)
        for given in (o, o.transpose(0, 1).contiguous().transpose(0, 1)):
            options = {"groups": of_groups, "group": group, "scale_layout": layout, "amax_floor": ("sglang", "none")[tokens % 2]}
            got, expected = fast.rotate_quantize(given, TABLE, at, **options, impl=impl), reference.rotate_quantize(o, TABLE, at, **options)
            same(got, expected)
            if layout != "rows" and tokens:  # memory, with its pads: [groups][columns][align(tokens, 4)]
                columns = got.scales.shape[2]
                whole = (of_groups * columns * got.scales.stride(2),)
                assert got.scales.stride() == (1, columns * got.scales.stride(2), -(-tokens // 4) * 4)
                assert torch.equal(got.scales.as_strided(whole, (1,)), expected.scales.as_strided(whole, (1,)))


@every_way
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("groups", "rank", "width"), [(2, 128, 128), (3, 32, 200), (2, 80, 96)])
def test_project_groups_pair(groups, rank, width, layout, impl):
    """The product's codes; rows behind the tokens zero, whatever a floor makes of zeros; LN-06."""
    for tokens in (0, 1, 7, 64, 128, 129):
        for given in forms(tokens, groups, rank, width).values():
            for rows, floor in ((None, "flashinfer"), (tokens, "official"), (tokens + 5, "official"), (tokens + 130, "flashinfer")):
                options = {"scale_layout": layout, "rows": rows, "pair_floor": floor}
                got = fast.project_groups_pair(*given, **options, impl=impl)
                same(tuple(got), tuple(reference.project_groups_pair(*given, **options)))
                assert got.layout == layout
                assert not got.codes[tokens:].view(torch.uint8).any()


@every_way
def test_project_out(impl):
    """bf16 of two and three dimensions, codes of both, pairs."""
    hidden, groups, rank = 70, 2, 64
    weight, of_weight = codes(hidden, groups * rank), powers(3, 4)
    for tokens in (0, 1, 65):
        z = normal(tokens, groups, rank)
        expected = reference.project_out(z, weight, of_weight, block=32)
        for given in (z, z.flatten(1), quantize_fp8(z, 32), quantize_fp8(z.flatten(1), 32)):
            same(fast.project_out(given, weight, of_weight, block=32, impl=impl), expected)
        for layout in LAYOUTS:
            pair = fast.project_groups_pair(normal(tokens, 2, 64), normal(2, 64, 64), scale_layout=layout, impl=impl)
            other = mxfp8_weight(weight, of_weight, scale_layout=layout)
            same(fast.project_out(pair, other, impl=impl), reference.project_out(pair, other))


@every_way
def test_from_heads_to_hidden(impl):
    """The serving path of V4, with what each step hands the next."""
    o, at, weight, of_weight = normal(9, 4, 128), positions(9), codes(2, 64, 256), numbers(2, 1, 2)
    last, of_last = codes(96, 128), powers(1, 1)
    for layout in ("rows", "mn_major"):
        hidden = []
        for module, more in ((fast, {"impl": impl}), (reference, {})):
            a = module.rotate_quantize(o, TABLE, at, groups=2, scale_layout=layout, **more)
            hidden.append(module.project_out(module.project_groups(a, weight, of_weight, **more), last, of_last, **more))
        same(*hidden)


# Which row a call gets


ROUTES = [
    (SM90, (2, 64, 256), "bf16", {}, "deepgemm"),
    (SM90, (2, 64, 256), "bytes", {}, "deepgemm"),
    (SM90, (2, 64, 256), "bytes", {"scale": "fp32"}, "deepgemm"),
    (SM90, (2, 64, 256), "codes, numbers", {}, "deepgemm"),
    (SM90, (8, 60, 256), "bf16", {}, "triton"),
    (SM90, (2, 64, 200), "bytes", {}, "triton"),
    (SM100, (2, 64, 256), "bf16", {}, "deepgemm"),
    (SM100, (2, 64, 256), "bytes", {}, "deepgemm"),
    (SM100, (2, 64, 256), "bytes", {"scale": "fp32"}, "triton"),  # LN-01: it would drop mantissas
    (SM100, (2, 64, 256), "numbers", {}, "triton"),
    (SM120, (2, 64, 256), "codes", {}, "deepgemm"),
    (SM121, (2, 64, 256), "bytes", {}, "triton"),
    (SM80, (2, 64, 256), "bf16", {}, "triton"),
    (None, (2, 64, 256), "bytes", {}, "inductor"),
]


@pytest.mark.parametrize("demand", [{}, {"batch_invariant": True, "deterministic": True}])
@pytest.mark.parametrize(("capability", "size", "form", "options", "backend"), ROUTES)
def test_routes(monkeypatch, capability, size, form, options, backend, demand):
    called, given = pretend(monkeypatch, capability), forms(5, *size)[form]
    with use(**demand):
        fast.project_groups(*given, **options)
        fast.project_groups_pair(*given, **options)
        fast.rotate_quantize(normal(5, 4, 128), TABLE, positions(5), groups=2)
    ours = "inductor" if capability is None else "triton"
    assert called == [backend, ours if form == "bf16" else backend, ours]


def test_project_out_asks_for_its_product(monkeypatch):
    called, weight, of_weight = pretend(monkeypatch, SM90), codes(64, 128), powers(1, 1)
    fast.project_out(normal(5, 2, 64), weight, of_weight)
    fast.project_out(normal(5, 2, 64), weight, of_weight, impl="triton")
    with use({"linear": "eager"}):
        fast.project_out(normal(5, 128), weight, of_weight)
    assert called == ["deepgemm", "triton", "eager"]
    with pytest.raises(Unsupported, match="takes blocks of 128 on SM90; got 32"):
        fast.project_out(normal(5, 2, 64), weight, powers(2, 4), block=32, impl="deepgemm")


def test_flags():
    rows = [row for name, table in dispatch.TABLES.items() if name.startswith("output_projection.") for row in table]
    assert all(row.deterministic and row.graph_safe for row in rows)
    rotating = dispatch.TABLES["output_projection.rotate_quantize"]
    assert all(row.batch_invariant == (row in rotating or row.backend in ("triton", "deepgemm")) for row in rows)
    with use(batch_invariant=True):
        assert all(row.batch_invariant for row in rows)


# What rows of CUDA hand to kernels and libraries


@pytest.fixture
def kernels(monkeypatch):
    """Kernels by the reference and by bodies, on any device."""

    def quantize(x, a, of_a, group, layout, floor):
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % group))
        got = quantize_fp8(padded, group, amax_floor=floor)
        assert layout == "rows"
        a.copy_(got.codes.view(torch.uint8)[:, : x.shape[1]])
        of_a.copy_(got.scales.view(torch.uint8))

    def quantize_rows(z, a, memory, group, *, padded, pitch, floor, LAYOUT, ZEROES, **options):
        assert (options["KIND"], options["FAKE"], group) == ("fp8", False, 32)
        name = "flashinfer" if ZEROES else "official"
        assert groups.floor_of("fp8", name) == floor
        got = quantize_fp8(z, group, amax_floor=name)
        a[: len(z)] = got.codes.view(torch.uint8)
        a[len(z) :] = 0xEE  # not written by the kernel
        byte = torch.zeros(padded, dtype=torch.uint8)
        byte[: len(z), : z.shape[1] // 32] = got.scales.view(torch.uint8)
        words = (scales.pack_ue8m0 if LAYOUT == "packed" else scales.swizzle_128x4)(byte)
        flat = words.as_strided((words.numel(),), (1,)).view(torch.uint8)
        assert pitch == (padded[0] if LAYOUT == "packed" else 128 * padded[1])
        memory.as_strided((flat.numel(),), (1,)).copy_(flat)

    def rotate(o, table, at, groups, a, of_a, group, layout, floor):
        got = reference.rotate_quantize(o, table, at, groups=groups, group=group, scale_layout=layout, amax_floor=floor)
        a.copy_(got.codes.view(torch.uint8))
        of_a.copy_(got.scales.view(of_a.dtype))

    def run_pair(o, weight, a, of_a, rows, layout, floor):
        got = reference.project_groups_pair(o, weight, scale_layout=layout, rows=rows, pair_floor=floor)
        a.copy_(got.codes.view(torch.uint8))
        with_pads(of_a).copy_(with_pads(got.scales))

    of = {
        ("linear_inputs", "quantize"): quantize,
        ("quantize_groups", "run"): quantize_rows,
        ("linear_inputs", "rotate_quantize"): rotate,
        ("project_groups", "run"): lambda o, weight: reference.project_groups(o, weight).contiguous(),
        ("project_groups", "run_pair"): run_pair,
        ("linear", "run_groups_fp8"): lambda *given: linear_bodies.project_groups(run_eagerly, *given, "ue8m0", "sglang"),
    }
    monkeypatch.setattr(output_projection_ops, "kernel", lambda *name: of[name])
    own = output_projection_ops.quantization_ops
    monkeypatch.setattr(own, "_triton_fp8", lambda *given: groups.quantize_fp8(run_eagerly, *given))
    monkeypatch.setattr(dispatch, "_toolchain", lambda backend, kind: None)
    for function, rows in dispatch.TABLES.items():
        if function.startswith("output_projection."):
            monkeypatch.setitem(dispatch.TABLES, function, tuple(replace(row, device=dispatch.any_device) for row in rows))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("tokens", [0, 5, 129])
def test_rows_of_our_kernels(tokens):
    """Bodies stand for kernels: what a row hands them, and what it makes of their answers."""
    for given in forms(tokens, 2, 48, 200).values():
        for scale in ("ue8m0", "fp32"):
            same(fast.project_groups(*given, scale=scale, impl="triton"), reference.project_groups(*given, scale=scale))
        for layout in LAYOUTS:
            for rows in (None, tokens + 3):
                for floor in ("flashinfer", "official"):
                    options = {"scale_layout": layout, "rows": rows, "pair_floor": floor}
                    got = fast.project_groups_pair(*given, **options, impl="triton")
                    same(tuple(got), tuple(reference.project_groups_pair(*given, **options)))
    o, at = normal(tokens, 4, 128), positions(tokens)
    for layout in ("rows", "packed", "mn_major"):
        options = {"groups": 2, "scale_layout": layout}
        same(fast.rotate_quantize(o, TABLE, at, **options, impl="triton"), reference.rotate_quantize(o, TABLE, at, **options))


@pytest.mark.usefixtures("kernels")
def test_deepgemm_s_row(monkeypatch):
    """Both einsums, o quantised where it is not; no tokens, no call."""
    monkeypatch.setattr(deepgemm_linear, "describe", lambda device: Device("cuda", SM90))
    library = type(deepgemm_linear.LIBRARY)
    for name, answer in {"missing": None, "proved": True, "disproved": None}.items():
        monkeypatch.setattr(library, name, lambda *_, answer=answer, **__: answer)
    called = []

    def einsum_fp8(*given):
        called.append("fp8")
        return linear_bodies.project_groups(run_eagerly, *given, "ue8m0", "sglang")

    monkeypatch.setattr(deepgemm_linear, "einsum_fp8", einsum_fp8)

    def einsum_bf16(o, weight):
        called.append("bf16")
        return reference.project_groups(o, weight).contiguous()

    monkeypatch.setattr(deepgemm_linear, "einsum_bf16", einsum_bf16)
    monkeypatch.setattr(deepgemm_linear, "prepare_einsum", lambda *_: None)
    for tokens in (0, 5):
        for given in forms(tokens, 2, 64, 256).values():
            for scale in ("ue8m0", "fp32"):
                same(fast.project_groups(*given, scale=scale, impl="deepgemm"), reference.project_groups(*given, scale=scale))
    assert called == ["bf16"] * 2 + ["fp8"] * 8


# Graphs, operators, errors


def test_graphs_per_function():
    def calls(tokens):
        of = forms(tokens, 2, 32, 256)
        o = normal(tokens, 4, 64)
        return {
            "bytes": lambda: fast.project_groups(*of["bytes"], impl="inductor"),
            "fp32": lambda: fast.project_groups(*of["numbers"], scale="fp32", impl="inductor"),
            "codes": lambda: fast.project_groups(*of["codes"], impl="inductor"),
            "pair": lambda: fast.project_groups_pair(*of["bf16"], rows=tokens + 3, impl="inductor"),
            "rotate": lambda: fast.rotate_quantize(o, TABLE, positions(tokens), groups=2, group=32, scale_layout="packed", impl="inductor"),
        }

    for name in calls(1):
        compiled._graph.cache_clear()
        torch._dynamo.reset()
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for tokens in (0, 1, 2, 64, 127, 128, 129):
            calls(tokens)[name]()
            with torch.inference_mode():
                calls(tokens)[name]()
        assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2, name


def samples():
    operands = []
    for o, weight, *of_weight in forms(5, 2, 48, 200).values():
        of_weight = of_weight[0].view(torch.uint8) if of_weight and of_weight[0].element_size() == 1 else (of_weight or [None])[0]
        o, of_o = (o.codes.view(torch.uint8), o.scales) if isinstance(o, Quantized) else (o, None)
        operands.append((o, of_o, weight if weight.dtype == torch.bfloat16 else weight.view(torch.uint8), of_weight))
    o = normal(5, 4, 64)
    rotated = [
        ("rotate_quantize", (o, TABLE, positions(5).clamp(0, 299), 2, 32, layout, "sglang")) for layout in ("rows", "packed", "mn_major")
    ]
    return [
        *(("project_groups", (*given, "ue8m0", "sglang")) for given in operands),
        *(("project_groups_pair", (*given, layout, 9, "ue8m0", "sglang", "flashinfer")) for given in operands[:2] for layout in LAYOUTS),
        ("project_groups_pair", (*operands[0], "packed", 5, "ue8m0", "sglang", "official")),
        *rotated,
    ]


@pytest.mark.parametrize(("name", "arguments"), samples())
def test_operators(name, arguments):
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, (*arguments, "eager"))


def test_chain_is_one_graph():
    weight, of_weight, plain = codes(2, 64, 256), numbers(2, 1, 2), normal(2, 64, 256, seed=1)
    last, of_last, pair = codes(96, 128), powers(3, 4), mxfp8_weight(codes(96, 128), powers(3, 4))

    def step(o, at):
        a = fast.rotate_quantize(o, TABLE, at, groups=2, impl="eager")
        z = fast.project_groups(a, weight, of_weight, impl="eager")
        flat = o.flatten(1).unflatten(1, (2, 256))
        words = fast.project_groups_pair(flat, plain, impl="eager")
        return fast.project_out(z, last, of_last, block=32, impl="eager"), fast.project_out(words, pair, impl="eager")

    inside = torch.compile(step, fullgraph=True, backend="aot_eager")
    for tokens in (6, 129):
        o, at = normal(tokens, 4, 128), positions(tokens)
        same(inside(o, at), step(o, at))


@pytest.mark.parametrize("name", ["o", "weight", "weight_scales"])
def test_grad_is_refused(name):
    given = dict(zip(("o", "weight", "weight_scales"), forms(3, 2, 32, 128)["numbers"], strict=True))
    given[name] = given[name].clone().requires_grad_()
    for function in (fast.project_groups, fast.project_groups_pair):
        with pytest.raises(ArgumentError, match=f"{name}: got a tensor that requires grad"):
            function(**given)
    with pytest.raises(ArgumentError, match="o: got a tensor that requires grad"):
        fast.rotate_quantize(normal(2, 2, 64).requires_grad_(), TABLE, positions(2), groups=1, group=32)


@pytest.mark.skipif(DEVICE == "cuda", reason="triton runs here")
def test_a_backend_that_cannot_run_is_named():
    given = forms(3, 2, 32, 128)["bytes"]
    for impl, words in (("triton", "8.0 or newer"), ("deepgemm", "9.0, 10.0, 10.3, 10.7, 12.0")):
        with pytest.raises(BackendUnavailable, match=f"wants a CUDA device of capability {words}, this is cpu"):
            fast.project_groups(*given, impl=impl)


@pytest.mark.parametrize("name", fast.__all__)
def test_signatures_equal_the_reference(name):
    assert set(fast.__all__) == set(reference.__all__)
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (fast, reference))
    assert [p for key, p in ours.items() if key != "impl"] == list(theirs.values())
