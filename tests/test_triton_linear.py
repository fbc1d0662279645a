"""The products of `kernels/linear` and `kernels/project_groups` without a GPU: in the interpreter, in a process of its own, against the
reference; and compiled for SM80 to SM90. On a GPU the first run there, with more tokens and with what only its tensor cores show."""

import re
from dataclasses import replace

import pytest
import torch

from dsv4.formats import align
from dsv4.parity import linear_bounds, linear_inputs
from dsv4.parity.contracts import Call
from dsv4.parity.exact import unrounded
from dsv4.reference import linear as reference
from dsv4.reference import output_projection
from dsv4.types import Mxfp8Pair, Quantized
from interpreted import INTERPRETED, passes

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dsv4.fast.kernels import linear, linear_choice, linear_tiles, project_groups  # noqa: E402
from dsv4.fast.kernels.linear_tiles import FEW, MANY, MORE, NUMBERS, Plan, Tile  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
kernel = pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="runs in its own process, or on a GPU")
cuda = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a device of capability 9.0")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
MANY_TOKENS = (1, 2, 7, 8, 17, 63, 64, 65, 127, 128, 129, 4096)
SHARED = {80: 166912, 89: 101376, 90: 232448}  # bytes a program can have


@pytest.mark.skipif(DEVICE.type == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_kernels_in_the_interpreter():
    passes(__file__, least=64)


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nobody has written holds no zeros."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def bytes_of(scales):
    return scales if scales.dtype == torch.float32 else scales.view(torch.uint8)


def given(call):
    """Operands of a call of `linear_fp8` as kernels take them."""
    x, weight, scales = call.args
    return x.codes.view(torch.uint8), bytes_of(x.scales), weight.view(torch.uint8), bytes_of(scales).contiguous()


def fp8(call, chosen=None):
    """`run_fp8` of a call of `linear_fp8`."""
    return linear.run_fp8(*given(call), call["block"], chosen=chosen)


def mxfp8(call, chosen=None):
    x, weight = call.args
    return linear.run_mxfp8(x.codes.view(torch.uint8), x.scales, weight.codes.view(torch.uint8), weight.scales, chosen=chosen)


def same(expected, actual):
    """Equal bits, NaN for NaN."""
    assert expected.shape == actual.shape
    assert torch.equal(expected.isnan(), actual.isnan())
    numbers = (torch.where(each.isnan(), 0.0, each).view(torch.int16) for each in (expected, actual))
    assert torch.equal(*numbers)


def spec_of(kind, size, seed, *, block=32, form="e8m0", stored="e8m0", layouts=("packed", "packed")):
    return {
        "kind": kind,
        "size": list(size),
        "seed": seed,
        "block": block,
        "form": form,
        "stored": stored,
        "layouts": layouts,
        "density": 1.0,
    }


def all_plans(n, k, block):
    """Every tile, with as many parts as the sizes have, in programs of their own and not; in the interpreter a few."""
    parts = linear_tiles.parts_of(n, k, 1)
    few = (Tile(16, 64, swapped=True), Tile(64, 64), Tile(128, 64, 2))
    tiles = few if INTERPRETED else (replace(tile, stages=2) for tile in (*FEW.values(), *MANY[block], *MORE[block]))
    return [Plan(tile, parts, alone) for tile in tiles for alone in ((True, False) if parts > 1 else (False,))]


FORMS = [("e8m0", "e8m0"), ("fp32", "fp32"), ("mn_major", "uint8"), ("uint8", "fp32")]
SIZES = [(1, 1, 1), (3, 65, 31), (16, 33, 128), (17, 33, 160), (33, 70, 129), (65, 40, 260), (130, 66, 96)]


@kernel
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_exact_sums(size, block):
    forms = list(enumerate(FORMS))
    for seed, (form, stored) in forms if DEVICE.type == "cuda" else forms[SIZES.index(size) % 2 :: 2]:
        for kind in ("lattice", "special"):
            call = linear_inputs.fp8_call(spec_of(kind, size, seed, block=block, form=form, stored=stored), DEVICE)
            same(reference.linear_fp8(*call.args, **call.kwargs), fp8(call))


@kernel
@pytest.mark.parametrize("block", [32, 128])
def test_a_small_byte_times_a_mantissa(block):
    """Products of scales that are subnormal, of bytes of x and fp32 scales of the weight, alone and beside a NaN in another row."""
    x = torch.full((2, 128), 448.0).to(torch.float8_e4m3fn).to(DEVICE)
    small = torch.zeros(2, 128 // block, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((1, 128 // block), 1.37 * 2.0**-22, device=DEVICE)
    spoilt = x.clone()
    spoilt.view(torch.uint8)[1, 0] = 0x7F
    for codes in (x, spoilt):
        call = Call((Quantized(codes, small), x[:1], scales), {"block": block})
        same(reference.linear_fp8(*call.args, **call.kwargs), fp8(call))


@kernel
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("layouts", [("packed", "128x4"), ("128x4", "packed")], ids=str)
def test_exact_sums_of_pairs(size, layouts):
    """Scales of each row, so that rows of a tile do not share them. Pads are ones, which is NaN to whoever reads them."""
    for seed, kind in enumerate(("lattice", "special")):
        call = linear_inputs.pair_call(spec_of(kind, size, seed, layouts=layouts), DEVICE)
        same(reference.linear_mxfp8(*call.args), mxfp8(call))


@kernel
@pytest.mark.parametrize("tokens", [5, 70])
@pytest.mark.parametrize("block", [32, 128])
def test_rows_that_share_scales(tokens, block, monkeypatch):
    """What checkpoints hold is summed once; a tile in which two rows differ is summed again."""
    call = linear_inputs.fp8_call(spec_of("lattice", (tokens, 70, 160), 3, block=block), DEVICE)
    careful = []
    if INTERPRETED:
        again = linear.careful_sums
        monkeypatch.setattr(linear, "careful_sums", lambda *given: careful.append(1) or again(*given))
    same(reference.linear_fp8(*call.args, **call.kwargs), fp8(call))
    assert not careful
    if block == 32:
        x, weight, scales = call.args
        pair = Mxfp8Pair(x.codes, words(x.scales.view(torch.uint8)))
        for layout in ("packed", "128x4"):
            given = Call((pair, reference.mxfp8_weight(weight, scales, scale_layout=layout)))
            same(reference.linear_mxfp8(*given.args), mxfp8(given))
        assert not careful
        rows = scales.view(torch.uint8).repeat_interleave(32, 0)[:70].clone()
        rows[33, 2] += 1
        given = Call((pair, Mxfp8Pair(weight, words(rows))))
        same(reference.linear_mxfp8(*given.args), mxfp8(given))
        assert not INTERPRETED or bool(careful) == (tokens > 16)


def words(scales):
    """uint8 [rows, groups] as packed words."""
    return linear_inputs.columns_of(linear_inputs.words_of(scales.cpu()).to(scales.device))


@kernel
@pytest.mark.parametrize("tokens", [3, 40])
def test_zero_bytes_and_low_scales(tokens):
    """Groups of byte 0, 2^-127, with and without codes, as in rows that hold nothing; weights below 2^-22; both at once."""
    k, n = 256, 40
    codes = torch.randint(-3, 4, (tokens + n, k), generator=generator(1)).float().to(torch.float8_e4m3fn)
    scales = torch.randint(120, 134, (tokens + n, k // 32), generator=generator(2), dtype=torch.uint8)
    scales[0] = 0
    scales[1, :4] = 0
    codes[1, :128] = 0
    for low in (105, 104, 0):
        scales[tokens + 5 : tokens + 7, 3:5] = low
        x, weight = (Mxfp8Pair(codes[part].to(DEVICE), words(scales[part].to(DEVICE))) for part in (slice(tokens), slice(tokens, None)))
        same(reference.linear_mxfp8(x, weight), mxfp8(Call((x, weight))))


@kernel
def test_products_of_scales_that_overflow_and_vanish():
    """All pairs of E8M0 scales times a few codes, where the result is a normal bf16 number, or zero."""
    bytes_ = torch.arange(0, 256, 5, dtype=torch.uint8)[:, None]
    bytes_ = torch.cat((bytes_, torch.tensor([[1], [254]], dtype=torch.uint8))).to(DEVICE)
    codes = torch.zeros(len(bytes_), 32)
    for value in (2.0**-9, 448.0, 0.0):
        codes[:, 7] = value
        numbers = codes.to(torch.float8_e4m3fn).to(DEVICE)
        pair = Mxfp8Pair(numbers, words(bytes_))
        same(reference.linear_mxfp8(pair, pair), mxfp8(Call((pair, pair))))
        for plan in (Plan(Tile(16, 64, swapped=True), 1, False), Plan(Tile(64, 64), 1, False)):
            same(reference.linear_mxfp8(pair, pair), mxfp8(Call((pair, pair)), plan))
        call = Call((Quantized(numbers, bytes_.view(torch.float8_e8m0fnu)), numbers[:32], bytes_[30:31].view(torch.float8_e8m0fnu)))
        call.kwargs["block"] = 32
        same(reference.linear_fp8(*call.args, block=32), fp8(call))


@kernel
def test_groups():
    for seed, (tokens, groups, rank, width) in enumerate([(3, 2, 65, 130), (20, 1, 40, 256), (70, 3, 64, 128)]):
        for form in ("e8m0", "fp32", "columns"):
            a = linear_inputs.factors("lattice", (tokens, groups, width), (tokens, groups, -(-width // 128)), seed, 1.0)
            w = linear_inputs.factors("lattice", (groups, rank, width), (groups, -(-rank // 128), -(-width // 128)), seed + 9, 1.0)
            stored = "fp32" if form == "columns" else form
            codes, weight = (linear_inputs.as_codes(part.numbers, seed).to(DEVICE) for part in (a, w))
            scales, factors = (linear_inputs.as_scales(part, stored, seed).to(DEVICE) for part in (a, w))
            scales = linear_inputs.columns_of(scales) if form == "columns" else scales
            expected = output_projection.project_groups(Quantized(codes, scales), weight, factors)
            given = codes.view(torch.uint8), bytes_of(scales), weight.view(torch.uint8), bytes_of(factors)
            same(expected, linear.run_groups_fp8(*given))


@kernel
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("tokens", [5, 65])
def test_tiles_and_parts_change_no_bit(tokens, block):
    """Sums of groups are exact, but scales have any mantissas and signs, so that every order of groups has bits of its own."""
    n, k = 40, 1100
    codes = torch.randint(-3, 4, (tokens + n, k), generator=generator(1)).float().to(torch.float8_e4m3fn).to(DEVICE)
    factors = torch.randn(tokens + n, -(-k // block), generator=generator(2)).to(DEVICE)
    call = Call((Quantized(codes[:tokens], factors[:tokens]), codes[tokens:], factors[tokens : tokens - (-n // block)]), {"block": block})
    assert linear_tiles.parts_of(n, k, 1) > 1
    found = fp8(call)
    near = unrounded(reference.linear_fp8)(*call.args, **call.kwargs)
    assert ((found - near).abs() <= linear_bounds.linear(hopper=HOPPER)(call, near)).all()
    for plan in all_plans(n, k, block):
        same(found, fp8(call, plan))
    few = Call((Quantized(codes[:2], factors[:2]), *call.args[1:]), call.kwargs)
    same(found[:2], fp8(few))


@kernel
@pytest.mark.parametrize("tokens", [5, 40])
def test_a_careful_tile_has_the_bits_of_a_fast_one(tokens):
    """A NaN in one row makes the whole tile careful."""
    n, k = 40, 300
    codes = torch.randint(-3, 4, (tokens + n, k), generator=generator(1)).float().to(torch.float8_e4m3fn).to(DEVICE)
    for factors in (
        torch.randn(tokens + n, -(-k // 32), generator=generator(2)).to(DEVICE),
        torch.randint(100, 150, (tokens + n, -(-k // 32)), generator=generator(2), dtype=torch.uint8).to(DEVICE).view(torch.float8_e8m0fnu),
    ):
        rest = codes[tokens:], factors[tokens : tokens + 2]
        call = Call((Quantized(codes[:tokens], factors[:tokens]), *rest), {"block": 32})
        found, broken = fp8(call), codes[:tokens].clone()
        broken.view(torch.uint8)[2, 7] = 0x7F
        other = fp8(Call((Quantized(broken, factors[:tokens]), *rest), {"block": 32}))
        assert other[2].isnan().all()
        same(found[[0, 1, *range(3, tokens)]], other[[0, 1, *range(3, tokens)]])


@kernel
def test_scales_in_any_strides():
    """Bytes of rows that lie apart, at odd addresses, and in columns; numbers likewise."""
    tokens, n, k = 5, 33, 256
    codes = torch.randint(-3, 4, (tokens + n, k), generator=generator(1)).float().to(torch.float8_e4m3fn).to(DEVICE)
    scales = torch.randint(124, 131, (tokens, 8), generator=generator(2), dtype=torch.uint8).to(DEVICE)
    weight_scales = torch.randint(124, 131, (2, 8), generator=generator(3), dtype=torch.uint8).to(DEVICE)
    expected = reference.linear_fp8(Quantized(codes[:tokens], scales), codes[tokens:], weight_scales, block=32)
    given = codes[tokens:].view(torch.uint8), weight_scales, 32
    for wide, offset in ((12, 4), (12, 1), (11, 0)):
        apart = torch.full((tokens, wide), 255, dtype=torch.uint8, device=DEVICE)[:, offset : offset + 8]
        apart.copy_(scales)
        same(expected, linear.run_fp8(codes[:tokens].view(torch.uint8), apart, *given))
    same(expected, linear.run_fp8(codes[:tokens].view(torch.uint8), scales.t().contiguous().t(), *given))
    numbers = torch.exp2(scales.float() - 127)
    same(expected, linear.run_fp8(codes[:tokens].view(torch.uint8), numbers.t().contiguous().t(), *given))
    wider = torch.full((tokens, k + 3), 0x7F, dtype=torch.uint8, device=DEVICE)
    wider[:, 1 : k + 1] = codes[:tokens].view(torch.uint8)
    same(expected, linear.run_fp8(wider[:, 1 : k + 1], scales, *given))


def bf16(*shape, seed):
    return torch.randint(-3, 4, shape, generator=generator(seed)).bfloat16().to(DEVICE)


BATCHES = [(1, 1, 1, 1), (3, 2, 96, 130), (20, 1, 64, 300), (5, 1, 64, 1024), (70, 2, 80, 96), (66, 3, 32, 64)]


@kernel
@pytest.mark.parametrize("size", BATCHES, ids=str)
def test_bf16_groups(size):
    tokens, groups, rank, width = size
    o, weight = bf16(tokens, groups, width, seed=1), bf16(groups, rank, width, seed=2)
    expected = output_projection.project_groups(o, weight)
    same(expected, project_groups.run(o, weight))
    parts = linear_tiles.parts_of(rank, width, groups)
    for tile in (Tile(16, 64, swapped=True, span=64), Tile(64, 64)):
        for alone in (True, False) if parts > 1 else (False,):
            same(expected, project_groups.run(o, weight, chosen=Plan(tile, parts, alone)))
    apart = torch.full((tokens, groups, width + 8), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    apart[..., :width] = o
    same(expected, project_groups.run(apart[..., :width], weight))


@kernel
@pytest.mark.parametrize("layout", ["packed", "128x4"])
@pytest.mark.parametrize(
    ("size", "rows"),
    [
        ((3, 2, 96, 130), 3),
        ((3, 2, 48, 100), 7),
        ((20, 1, 64, 300), 140),
        ((5, 1, 64, 1024), 5),
        ((70, 1, 32, 64), 90),
        ((17, 1, 160, 32), 17),
    ],
    ids=str,
)
def test_pairs_of_bf16_groups(size, rows, layout):
    """Every byte of the pair, pads too, from memory that holds ones."""
    tokens, groups, rank, width = size
    o, weight = bf16(tokens, groups, width, seed=1), bf16(groups, rank, width, seed=2)
    o[0, :, : width // 2] = 0
    weight[:, :32] = 0
    o[tokens // 2, 0, 1] = torch.nan if tokens > 4 else torch.inf
    parts = linear_tiles.parts_of(rank, width, groups)
    plans = [None, Plan(Tile(16, 64, swapped=True), parts, False), Plan(Tile(64, 64), parts, parts > 1)]
    for floor in ("flashinfer", "official"):
        expected = output_projection.project_groups_pair(o, weight, scale_layout=layout, rows=rows, pair_floor=floor)
        for plan in plans:
            count = align(rows, 4) * expected.scales.shape[1] if layout == "packed" else expected.scales.numel()
            memory = torch.full((count,), -1, dtype=torch.int32, device=DEVICE)
            codes = torch.full((rows, groups * rank), 255, dtype=torch.uint8, device=DEVICE)
            scales = memory.as_strided(expected.scales.shape, expected.scales.stride())
            project_groups.run_pair(o, weight, codes, scales, rows, layout, floor, chosen=plan)
            assert torch.equal(codes, expected.codes.view(torch.uint8))
            whole = torch.zeros_like(memory)
            whole.as_strided(expected.scales.shape, expected.scales.stride()).copy_(expected.scales)
            assert torch.equal(memory, whole)


@compiled
def test_parts_do_not_know_the_tokens():
    for n, k in ((1792, 5120), (5120, 8192), (32768, 1280), (64, 128), (4096, 15360)):
        plans = [linear_tiles.plan(tokens, n, k, 1, block, torch.device("cpu")) for tokens in MANY_TOKENS for block in (32, 128)]
        assert {plan.parts for plan in plans} == {linear_tiles.parts_of(n, k, 1)}
        assert all(plan.tile.stages >= 2 for plan in plans)
    for tokens in MANY_TOKENS:
        for block in (32, 128, NUMBERS):
            assert linear_tiles.candidates(tokens, block)


@kernel
def test_a_product_is_made_again_where_its_scales_say_so():
    call = linear_inputs.fp8_call(spec_of("lattice", (65, 40, 260), 3), DEVICE)
    operands = linear.operands(*given(call), 32)
    for odd, expected in (
        (0, torch.full((65, 40), 7.0, dtype=torch.bfloat16, device=DEVICE)),
        (1, reference.linear_fp8(*call.args, **call.kwargs)),
    ):
        made = torch.full((65, 1, 48), 7.0, dtype=torch.bfloat16, device=DEVICE)
        linear.run(operands, made=made[..., :40], odd=torch.tensor([odd], dtype=torch.int32, device=DEVICE))
        same(expected, made[:, 0, :40])
        assert (made[..., 40:] == 7).all()


@on_hopper
@pytest.mark.parametrize("tokens", [129, 1000, 4096])
def test_many_tokens_are_right_whatever_their_scales(tokens):
    """Near ones; extreme ones, whose products leave fp32; bytes 255. In words and in bytes; the kernel for many tokens is taken."""
    n, k = 5120, 320
    for kind in ("lattice", "special"):
        call = linear_inputs.fp8_call(spec_of(kind, (tokens, n, k), 5), DEVICE)
        assert linear_choice.choose(*given(call), invariant=False) == "many"
        same(reference.linear_fp8(*call.args, **call.kwargs), linear_choice.run_fp8(*given(call), 32, invariant=False))
        pair = linear_inputs.pair_call(spec_of(kind, (tokens, n, k), 6, layouts=("128x4", "packed")), DEVICE)
        x, weight = pair.args
        of_pair = x.codes.view(torch.uint8), x.scales, weight.codes.view(torch.uint8), weight.scales
        same(reference.linear_mxfp8(*pair.args), linear_choice.run_mxfp8(*of_pair, invariant=False))


@on_hopper
@pytest.mark.parametrize(("n", "k"), [(1792, 5120), (8192, 1280)])
def test_rows_do_not_depend_on_how_many_there_are_where_that_is_demanded(n, k):
    """Few tokens, many, and those between; what has one part takes the kernel for many, what has several does not."""
    call = linear_inputs.fp8_call(spec_of("finite", (4096, n, k), 1), DEVICE)
    x, *rest = call.args
    assert (linear_choice.choose(*given(call), invariant=True) == "many") == (linear_tiles.parts_of(n, k, 1) == 1)
    found = linear_choice.run_fp8(*given(call), 32, invariant=True)
    for tokens in MANY_TOKENS:
        some = Call((Quantized(x.codes[:tokens], x.scales[:tokens]), *rest), {"block": 32})
        same(found[:tokens], linear_choice.run_fp8(*given(some), 32, invariant=True))


class Launches:
    """Stands for a kernel and keeps what it is called with."""

    def __init__(self):
        self.given = None

    def __getitem__(self, grid):
        return self.keep

    def keep(self, *arguments, **options):
        self.given = self.given or (arguments, options)


TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.uint8: "*u8"}


def built(monkeypatch, module, name, call, capability):
    """A kernel for a capability as a call launches it, all pointers aligned: its binary is there, or ptxas has failed."""
    function, launches = getattr(module, name), Launches()
    monkeypatch.setattr(module, name, launches)
    monkeypatch.setattr(linear, "add_parts", Launches())
    for each in (linear_tiles, linear, project_groups):
        monkeypatch.setattr(each, "device_of", lambda _: (132, divmod(capability, 10)))
    call()
    monkeypatch.undo()
    arguments, options = launches.given
    given = dict(zip(function.arg_names, arguments, strict=False)) | options
    given |= {"NATIVE": capability >= 89, "COMPILED": True}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(function.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(place,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(ASTSource(function, signature, constants, attributes), target=target, options={"num_warps": given["num_warps"]})


def made(form, tokens, n=192, k=1024):
    """A call of each kernel on small tensors of zeros; of codes in parts."""
    k = k // 2 if form in ("bf16", "pair") else k
    codes, rows = torch.zeros(tokens, k, dtype=torch.uint8), torch.zeros(n, k, dtype=torch.uint8)
    if form == "bf16":
        return lambda: project_groups.run(codes.bfloat16()[:, None], rows.bfloat16()[None])
    if form == "pair":
        scales = torch.zeros(align(tokens, 128) // 128, -(-n // 128), 32, 4, dtype=torch.int32)
        written = torch.zeros(tokens, n, dtype=torch.uint8)
        return lambda: project_groups.run_pair(codes.bfloat16()[:, None], rows.bfloat16()[None], written, scales, tokens, "128x4", "none")
    if form == "words":
        return lambda: linear.run_mxfp8(codes, words(codes[:, : k // 32]), rows, words(rows[:, : k // 32]))
    if form == "again":
        scales, weight_scales = (linear.scales_of(part[None, :, : k // 32].contiguous(), 32) for part in (codes, rows[: -(-n // 32)]))
        operands = linear.Operands(codes[:, None], scales, rows[None], weight_scales, 32, 32)
        whole = torch.zeros(tokens, 1, n, dtype=torch.bfloat16)
        return lambda: linear.run(operands, made=whole, odd=torch.zeros(1, dtype=torch.int32))
    scales, weight_scales = (part[:, : k // form].contiguous() for part in (codes, rows[: -(-n // form)]))
    return lambda: linear.run_fp8(codes, scales, rows, weight_scales, form)


@compiled
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("tokens", [3, 300])
def test_kernels_compile_and_leave_e4m3_alone_where_there_is_none(monkeypatch, capability, tokens):
    for form in (32, 128, "words", "again", "bf16", "pair"):
        module, name = (project_groups, "groups_kernel") if form in ("bf16", "pair") else (linear, "product_kernel")
        binary = built(monkeypatch, module, name, made(form, tokens), capability)
        text = binary.asm["ptx"]
        assert ".ftz" not in text  # subnormal numbers count
        assert binary.metadata.shared <= SHARED[capability]
        assert "cp.async.cg.shared.global" in text
        if module is linear:
            assert ("e4m3" in text) == (capability >= 89)
        if capability == 90:
            wanted = "f32.bf16.bf16" if module is project_groups else "f32.e4m3.e4m3"
            assert re.search(rf"wgmma.mma_async.sync.aligned.m64n\d+k\d+.{wanted}", text)
            assert "mma.sync.aligned.m16" not in text


@cuda
@pytest.mark.parametrize("tokens", MANY_TOKENS)
def test_many_tokens(tokens):
    for block, n, k in ((32, 1792, 5120), (32, 1030, 1296), (128, 640, 4096)):
        call = linear_inputs.fp8_call(spec_of("lattice", (tokens, n, k), tokens, block=block), DEVICE)
        expected = reference.linear_fp8(*call.args, **call.kwargs)
        same(expected, fp8(call))
        if block == 32:
            x, weight, scales = call.args
            pair = Mxfp8Pair(x.codes, words(x.scales.view(torch.uint8)))
            for layout in ("packed", "128x4"):
                same(expected, mxfp8(Call((pair, reference.mxfp8_weight(weight, scales, scale_layout=layout)))))
    o, weight = bf16(tokens, 2, 1024, seed=1), bf16(2, 320, 1024, seed=2)
    same(output_projection.project_groups(o, weight), project_groups.run(o, weight))


@cuda
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(("n", "k"), [(1792, 5120), (5120, 2048), (8192, 1280)])
def test_rows_do_not_depend_on_how_many_there_are(n, k, block):
    """Random codes, whose sums are exact in no order: the tensor cores themselves must not care for the tile."""
    call = linear_inputs.fp8_call(spec_of("finite", (4096, n, k), 1, block=block), DEVICE)
    x, *rest = call.args
    found = fp8(call)
    for tokens in MANY_TOKENS:
        some = Quantized(x.codes[:tokens], x.scales[:tokens])
        same(found[:tokens], fp8(Call((some, *rest), {"block": block})))


@cuda
@pytest.mark.parametrize("block", [32, 128])
def test_every_tile_has_the_same_bits(block):
    n, k = 1792, 5120
    call = linear_inputs.fp8_call(spec_of("finite", (129, n, k), 1, block=block), DEVICE)
    found = fp8(call)
    for plan in all_plans(n, k, block):
        same(found, fp8(call, plan))


@cuda
def test_rows_of_bf16_groups_do_not_depend_on_how_many_there_are():
    o = torch.randn(1300, 2, 4096, generator=generator(3)).bfloat16().to(DEVICE)
    weight = torch.randn(2, 1024, 4096, generator=generator(4)).bfloat16().to(DEVICE)
    for groups in (1, 2):
        whole = project_groups.run(o[:, :groups], weight[:groups])
        for tokens in (1, 16, 17, 33, 64, 65, 129, 700):
            same(whole[:tokens], project_groups.run(o[:tokens, :groups], weight[:groups]))


@triton.jit
def unpromoted_kernel(x, w, y, n, k, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """A mutant: one accumulator through all of k."""
    token, row, column = tl.arange(0, TOKENS), tl.arange(0, ROWS), tl.arange(0, 128)
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, k, 128):
        a = tl.load(x + token[:, None] * k + (start + column)[None, :])
        b = tl.load(w + row[:, None] * k + (start + column)[None, :])
        sums = tl.dot(a, b.T, sums)
    tl.store(y + token[:, None] * n + row[None, :], sums.to(tl.bfloat16))


@on_hopper
@pytest.mark.parametrize("k", [2048, 8192])
@pytest.mark.parametrize("block", [32, 128])
def test_sums_without_promotion_break_the_bound(k, block):
    numbers = (torch.rand(128, k, generator=generator(k)) * 256 + 128).to(torch.float8_e4m3fn).to(DEVICE)
    ones = torch.full((64, k // block), 127, dtype=torch.uint8, device=DEVICE).view(torch.float8_e8m0fnu)
    call = Call((Quantized(numbers[:64], ones), numbers[64:], ones[: 64 // block or 1]), {"block": block})
    exact = unrounded(reference.linear_fp8)(*call.args, **call.kwargs)
    bound = linear_bounds.linear(hopper=True)(call, exact)
    mutant = torch.empty(64, 64, dtype=torch.bfloat16, device=DEVICE)
    unpromoted_kernel[(1,)](numbers[:64], numbers[64:], mutant, 64, k, TOKENS=64, ROWS=64)
    assert ((fp8(call) - exact).abs() <= bound).all()
    assert ((mutant - exact).abs() > bound).all()
    assert (mutant < exact).all()


@cuda
@pytest.mark.parametrize("rows", [1, 129, 1000, 4100, 16384])
def test_producers_write_what_conversion_makes_and_no_pad_is_read(rows):
    """Codes and scales of each producer in both layouts of a pair, against rows of scales laid out afterwards; then with pads of ones."""
    from dsv4.fast import linear as fast
    from dsv4.fast import output_projection as output
    from dsv4.fast import scales as layouts

    source = generator(rows)
    x = torch.randn(rows, 512, generator=source).bfloat16().to(DEVICE)
    gain, weight = torch.randn(512, generator=source).to(DEVICE), torch.randn(2, 256, 256, generator=source).bfloat16().to(DEVICE)
    n = torch.randint(0, 0x7F, (64, 512), generator=source, dtype=torch.uint8).view(torch.float8_e4m3fn).to(DEVICE)
    pair = fast.mxfp8_weight(n, torch.full((2, 16), 127, dtype=torch.uint8, device=DEVICE))
    makers = {
        "norm": lambda layout: fast.norm_quantize(x, gain, eps=1e-6, group=32, scale_layout=layout, impl="triton"),
        "swiglu": lambda layout: fast.swiglu_quantize(x, x.flip(0), limit=2.0, group=32, scale_layout=layout, impl="triton"),
        "groups": lambda layout: output.project_groups_pair(x.view(rows, 2, 256), weight, scale_layout=layout, impl="triton"),
    }
    for name, make in makers.items():
        packed, tiled = make("packed"), make("128x4")
        assert torch.equal(packed[0].view(torch.uint8), tiled[0].view(torch.uint8))
        assert torch.equal(tiled[1], layouts.packed_to_128x4(packed[1]))
        if name != "groups":
            codes, plain = make("rows")
            assert torch.equal(codes.view(torch.uint8), packed[0].view(torch.uint8))
            assert torch.equal(layouts.pack_ue8m0(plain), packed[1])
        whole = fast.linear_mxfp8(Mxfp8Pair(*packed), pair, impl="triton")
        pads = torch.full_like(tiled[1], -1)
        live = layouts.packed_to_128x4(torch.full_like(packed[1], -1)) != 0  # words of rows that are there
        poisoned = torch.where(live, tiled[1], pads)
        assert torch.equal(fast.linear_mxfp8(Mxfp8Pair(tiled[0], poisoned), pair, impl="triton").view(torch.int16), whole.view(torch.int16))
