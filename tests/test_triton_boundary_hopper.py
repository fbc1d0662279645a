"""A boundary in two launches for SM90, without a GPU: what is taken, who is chosen, and both kernels compiled, with what ptxas says.
On an SM90 it runs, beside the three launches that run elsewhere."""

import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from interpreted import INTERPRETED

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dsv4.fast import dispatch, hyper_connections_ops, use  # noqa: E402
from dsv4.fast import hyper_connections as fast  # noqa: E402
from dsv4.fast.kernels import hyper_connections as kernels  # noqa: E402
from test_fast_hyper_connections import V4, V41  # noqa: E402

hopper = pytest.importorskip("dsv4.fast.kernels.boundary_hopper", reason="needs Gluon", exc_type=ImportError)

compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
HOPPER = torch.cuda.is_available() and not INTERPRETED and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a device of capability 9.0")
SHARED = 232448  # bytes a program can have
CARD = torch.device("cuda", 0)


# What is taken, and who is chosen


@pytest.mark.parametrize(
    ("streams", "hidden", "tokens", "reason"),
    [(4, hidden, 256, "") for hidden in (1024, 4096, 5120, 7168, 8192)]
    + [(4, hidden, 256, "multiple of 1024") for hidden in (64, 1280, 4608, 9216)]
    + [(count, 4096, 256, "4 streams") for count in (1, 2, 8)]
    + [(4, 1024, 1 << 20, ""), (4, 1024, (1 << 20) + 1, "tokens")],
)
def test_supported(streams, hidden, tokens, reason):
    found = hopper.supported(streams, hidden, tokens)
    assert (found is None) == (not reason)
    assert reason in (found or "")


@pytest.mark.parametrize(
    ("shape", "device", "capability", "fits"),
    [
        ((kernels.MANY, 4, 4096), CARD, (9, 0), True),
        ((4096, 4, 1024), CARD, (9, 0), True),
        ((kernels.MANY - 1, 4, 4096), CARD, (9, 0), False),
        ((4096, 4, 1280), CARD, (9, 0), False),
        ((4096, 2, 4096), CARD, (9, 0), False),
        ((4096, 4, 4096), CARD, (8, 0), False),
        ((4096, 4, 4096), CARD, (10, 0), False),
        ((4096, 4, 4096), torch.device("cpu"), (9, 0), False),
    ],
)
def test_many_tokens_on_sm90(shape, device, capability, fits, monkeypatch):
    monkeypatch.setattr(kernels, "_capability", lambda device: capability)
    given = SimpleNamespace(shape=shape, device=device)
    assert kernels._fits_hopper(given) == fits
    monkeypatch.setattr(kernels, "_hopper", lambda: None)  # no Gluon
    assert not kernels._fits_hopper(given)


def meta(tokens, hidden):
    shapes = [(tokens, hidden), (tokens, 4, hidden), (tokens, 4), (tokens, 4, 4), (24, 4 * hidden), (3,), (24,), (hidden,)]
    return [torch.empty(shape, dtype=torch.bfloat16 if k in (0, 1, 7) else torch.float32, device="meta") for k, shape in enumerate(shapes)]


def test_the_choice_minds_what_is_demanded(monkeypatch):
    """`Adaptive`: the row stays where batch invariance is demanded, and makes three launches."""
    taken = []
    two = SimpleNamespace(boundary=lambda *_: taken.append("two") or (None,) * 4)
    monkeypatch.setattr(kernels, "_fits_hopper", lambda streams: streams.shape[0] >= kernels.MANY)
    monkeypatch.setattr(kernels, "_hopper", lambda: two)
    for name, answer in (("expand", meta(1, 8)[1]), ("_mix", (None,) * 3), ("products", None), ("_finish", None)):
        monkeypatch.setattr(kernels, name, lambda *_, name=name, answer=answer, **__: taken.append(name) or answer)
    three = ["expand", "_mix", "products", "_finish"]
    (row,) = (row for row in dispatch.TABLES["hyper_connections.boundary"] if row.backend == "triton")

    def call(tokens):
        taken.clear()
        hyper_connections_ops._triton_boundary(*meta(tokens, 1024), None, 1e-6, 1e-6, 20, 1e-6, "exact", "bf16", "packed")
        return taken

    assert not row.batch_invariant
    assert call(kernels.MANY) == ["two"]
    assert call(kernels.MANY - 1) == three
    with use(batch_invariant=True):
        assert row.batch_invariant
        assert call(kernels.MANY) == three


# Compiled


def signature(kernel, types, constants, default):
    """Types by name, places of constants, and pointers as aligned."""
    names = [parameter.name for parameter in kernel.params]
    found = {name: "constexpr" if name in constants else types.get(name, default) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    return found, places, {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if found[name].startswith("*")}


def ptxas(ptx):
    """What ptxas says of registers."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [program, "-v", "--gpu-name=sm_90a", f"{folder}/kernel.ptx", "-o", f"{folder}/kernel.cubin"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return ran.stdout + ran.stderr


@compiled
@pytest.mark.parametrize(("hidden", "carried", "precision"), [(4096, False, "exact"), (5120, True, "exact"), (7168, True, "tf32")])
def test_the_first_launch_compiles(hidden, carried, precision):
    """Products on their way, no more memory than there is, no register in local memory."""
    from triton.experimental.gluon._runtime import GluonASTSource

    parts = 2 if precision == "tf32" else 3
    rows, width, tile = hopper.ROWS.value, hopper.WIDTH.value, hopper.TILE.value
    described = dict.fromkeys(("y", "streams", "new", "collapsed"), f"tensordesc<bf16[{rows}, {width}],{tile!r}>")
    numbers = dict.fromkeys(("tokens", "tiles", "distance"), "i32")
    constants = {"D": hidden, "PARTS": parts, "PRECISION": precision, "CARRIED": carried}
    source = GluonASTSource(hopper.expand_kernel, *signature(hopper.expand_kernel, {**described, **numbers}, constants, "*fp32"))
    options = {"num_warps": hopper.EXPANDERS.value, "enable_fp_fusion": False}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert kernel.metadata.shared <= SHARED
    depth = 16
    products = hopper.STEPS.value * hopper.STREAMS.value * parts * width // depth
    assert kernel.asm["ptx"].count("wgmma.mma_async.sync.aligned.m64n32k16") == products
    said = ptxas(kernel.asm["ptx"])
    assert "serialized" not in said
    assert "0 bytes spill stores, 0 bytes spill loads" in said


@compiled
@pytest.mark.parametrize(
    ("hidden", "carried", "layout"),
    [(4096, False, ""), (7168, False, "packed"), (8192, False, ""), (4096, True, ""), (5120, True, "128x4")],
)
def test_the_second_launch_compiles(hidden, carried, layout):
    kernel, splits = hopper.finish_rows, hidden // hopper.SHARE
    types = {"rows": "*i32", "weight": "*i32", "result": "*i16" if layout else "*i32", "scales": "*u8" if layout else "*i32"}
    types |= {**dict.fromkeys(("tokens", "mixing", "pitch", "least"), "i32"), **dict.fromkeys(("norm_eps", "rms_eps", "eps"), "fp32")}
    constants = {"CHUNKS": hidden // hopper.UNIT, "SPLITS": splits, "SPLITS_TILE": triton.next_power_of_2(splits), "CARRIED": carried}
    constants |= {"LAYOUT": layout, "ITERATIONS": 20, "ROWS": hopper.MIX_ROWS[carried]}
    source = ASTSource(kernel, *signature(kernel, types, constants, "*fp32"))
    options = {"num_warps": hopper.ROW_WARPS[carried], "enable_fp_fusion": True}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.metadata.shared <= SHARED
    assert "0 bytes spill stores, 0 bytes spill loads" in ptxas(found.asm["ptx"])


# On a device


FORMS = [(4096, False, "exact", ""), (5120, True, "exact", "128x4"), (7168, False, "tf32", "packed"), (1024, True, "tf32_compensated", "")]


def inputs(tokens, hidden):
    """Arguments of a boundary, and a pre to carry."""
    source = torch.Generator("cuda").manual_seed(tokens + hidden)

    def random(*shape):
        return torch.randn(*shape, generator=source, device="cuda")

    scale = torch.tensor([0.6, 1.1, 1.7], device="cuda")
    y, x, fn = random(tokens, hidden).bfloat16(), random(tokens, 4, hidden).bfloat16(), random(24, 4 * hidden) * (4 * hidden) ** -0.5
    post, comb, weight = 2 * random(tokens, 4).sigmoid(), random(tokens, 4, 4).softmax(2), random(hidden).bfloat16()
    return (y, x, post, comb, fn, scale, random(24), weight), random(tokens, 4).sigmoid()


def options_of(form, pre):
    _, carried, precision, layout = form
    more = {"output": "mxfp8", "scale_layout": layout} if layout else {}
    return {**(V41 if carried else V4), "carried_pre": pre if carried else None, "precision": precision, "impl": "triton", **more}


def bits(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same(got, expected):
    assert torch.equal(bits(got), bits(expected))


@pytest.fixture
def launched(monkeypatch):
    """How often two launches were made."""
    calls, boundary = [], hopper.boundary
    monkeypatch.setattr(hopper, "boundary", lambda *arguments: calls.append(1) or boundary(*arguments))
    return calls


@on_hopper
@pytest.mark.parametrize("tokens", [257, 700, 4096])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bits_are_those_of_three_launches(form, tokens, launched):
    """Of the streams, and given equal weights of what follows the collapse, scales and their pads included."""
    given, pre = inputs(tokens, form[0])
    got = fast.boundary(*given, **options_of(form, pre))
    assert launched
    launched.clear()
    with use(batch_invariant=True):
        expected = fast.boundary(*given, **{**options_of(form, pre), "carried_pre": pre if form[1] else got.pre})
    assert not launched
    same(got.streams, expected.streams)
    same(got.normed, expected.normed)
    if form[3] == "packed":
        assert got.scales.stride() == expected.scales.stride()
        words = (got.scales.shape[1] * got.scales.stride(1),)
        assert torch.equal(got.scales.as_strided(words, (1,)), expected.scales.as_strided(words, (1,)))
    elif form[3]:
        assert torch.equal(got.scales, expected.scales)
    for name in ("pre", "post", "comb"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-4, atol=1e-4)


@on_hopper
@pytest.mark.parametrize("tokens", [257, 700, 4096])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bits_depend_on_no_other_token_and_no_run(form, tokens, launched):
    given, pre = inputs(tokens, form[0])
    whole = fast.boundary(*given, **options_of(form, pre))
    for start, end in ((0, tokens), (0, tokens), (1, tokens), (tokens - 256, tokens), (0, 256)):
        part = fast.boundary(*(value[start:end] for value in given[:4]), *given[4:], **options_of(form, pre[start:end]))
        for name in ("streams", "pre", "post", "comb", "normed"):
            same(getattr(part, name), getattr(whole, name)[start:end])
    assert len(launched) == 6


@on_hopper
def test_infinite_numbers_and_nan_are_those_of_three_launches(launched):
    """In the streams and their collapse, and in the mixes: an infinite number times a part of fn that is 0 is NaN."""
    given, pre = inputs(300, 1024)
    given[1][1::5, 1, ::50], given[1][2::5, 2, 7::90] = torch.inf, torch.nan
    given[1][3::5], given[0][3::5] = 0.0, 0.0
    options = options_of((1024, True, "exact", ""), pre)
    got = fast.boundary(*given, **options)
    assert launched
    with use(batch_invariant=True):
        expected = fast.boundary(*given, **options)
    for name in ("streams", "normed", "pre", "post", "comb"):
        assert torch.equal(getattr(got, name).isnan(), getattr(expected, name).isnan())
    for name in ("streams", "normed"):
        same(getattr(got, name).nan_to_num(nan=0.0), getattr(expected, name).nan_to_num(nan=0.0))
