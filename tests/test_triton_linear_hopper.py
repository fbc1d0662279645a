"""The product for SM90 without a GPU: its scales in the interpreter, in a process of its own; its roles compiled, with what ptxas says.
On an SM90 the product runs."""

import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from interpreted import INTERPRETED, passes

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dsv4.fast.kernels import linear_hopper  # noqa: E402

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
HOPPER = torch.cuda.is_available() and not INTERPRETED and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a device of capability 9.0")
SHARED = 232448  # bytes a program can have
KINDS = ["bytes", "numbers", "packed", "swizzled"]


@compiled
def test_in_the_interpreter():
    passes(__file__, least=35)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def power_bytes(rows, groups, *, seed=0, least=0, past=256):
    return torch.randint(least, past, (rows, groups), generator=generator(seed), dtype=torch.uint8)


def powers(bytes_):
    """fp32 of UE8M0 bytes."""
    exact = torch.exp2(bytes_.double() - 127).float()
    return torch.where(bytes_ == 255, torch.nan, exact)


def as_kind(bytes_, kind, *, poison=0xA5):
    """Bytes [rows, groups] as scales of a kind; pads hold rubbish."""
    rows, groups = bytes_.shape
    if kind == "bytes":
        return bytes_
    if kind == "numbers":
        return powers(bytes_)
    words = -(-groups // 4)
    tiles = -(-rows // 128)
    whole = torch.full((tiles * 128, words * 4), poison, dtype=torch.uint8)
    whole[:rows, :groups] = bytes_
    whole = whole.view(torch.int32)  # [tiles * 128, words]
    if kind == "packed":
        return torch.empty((words, -(-rows // 4) * 4), dtype=torch.int32).t().copy_(whole[: -(-rows // 4) * 4])[:rows]
    return whole.view(tiles, 4, 32, words).permute(0, 3, 2, 1).contiguous()


def repeated(blocks, n):
    """Scales of rows, from those of blocks of 32."""
    return blocks.repeat_interleave(32, 0)[:n]


def lines_of(sizes, w_scales, *, rows_differ):
    """Entries of the weight's lines, from fp32 scales of blocks [blocks, groups], with NaN where nothing is said."""
    tiles, per = -(-sizes.n // 128), 128 // sizes.block
    lines = torch.zeros((tiles, sizes.steps, 32))
    for block in range(w_scales.shape[0]):
        for group in range(sizes.groups):
            lines[block // per, group // per, group % per * per + block % per] = w_scales[block, group]
    lines[:, :, 16] = rows_differ
    return lines.view(-1, 32)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "k"), [(1, 32), (5, 96), (130, 544)])
def test_lines_of_tokens_are_their_scales(kind, tokens, k):
    bytes_ = power_bytes(tokens, k // 32)
    bytes_[0, 0], bytes_[-1, -1] = 0, 255
    sizes = linear_hopper.Sizes(tokens, 32, k // 32, -(-k // 128), 32)
    lines, _, _ = linear_hopper.lay_scales(as_kind(bytes_, kind), power_bytes(1, k // 32), sizes)
    assert lines.stride(0) % 4 == 0
    assert torch.equal(lines.view(torch.int32), powers(bytes_).t().contiguous().view(torch.int32))


@interpreted
def test_numbers_that_lie_as_lines_are_not_copied():
    numbers = torch.empty((3, 8)).uniform_(generator=generator(0)).t()[:6]
    lines, _, _ = linear_hopper.lay_scales(numbers, power_bytes(1, 3), linear_hopper.Sizes(6, 32, 3, 1, 32))
    assert lines.data_ptr() == numbers.data_ptr()
    assert torch.equal(lines, numbers.t())


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (100, 96), (300, 672)])
def test_lines_of_a_weight_in_blocks_of_32(kind, n, k):
    blocks = power_bytes(-(-n // 32), k // 32, seed=1, past=255)
    given = as_kind(repeated(blocks, n) if kind in ("packed", "swizzled") else blocks, kind)
    sizes = linear_hopper.Sizes(4, n, k // 32, -(-k // 128), 32)
    _, lines, _ = linear_hopper.lay_scales(power_bytes(4, k // 32), given, sizes)
    assert torch.equal(lines, lines_of(sizes, powers(blocks), rows_differ=0.0))


@interpreted
@pytest.mark.parametrize("kind", ["bytes", "numbers"])
def test_lines_of_a_weight_in_blocks_of_128(kind):
    blocks = power_bytes(3, 5, seed=2, past=255)
    sizes = linear_hopper.Sizes(4, 300, 5, 5, 128)
    _, lines, _ = linear_hopper.lay_scales(power_bytes(4, 5), as_kind(blocks, kind), sizes)
    assert torch.equal(lines, lines_of(sizes, powers(blocks), rows_differ=0.0))


@interpreted
@pytest.mark.parametrize("kind", ["packed", "swizzled"])
def test_columns_of_a_block_that_differ_are_told_and_laid(kind):
    n, k = 200, 672  # six steps, of which the last has one group
    rows = repeated(power_bytes(-(-n // 32), k // 32, seed=3, past=255), n)
    rows[7, 2] ^= 1  # tile 0, step 0
    rows[199, 20] ^= 1  # tile 1, step 5
    sizes = linear_hopper.Sizes(4, n, k // 32, 6, 32)
    _, lines, columns = linear_hopper.lay_scales(power_bytes(4, k // 32), as_kind(rows, kind, poison=255), sizes)
    told = lines.view(2, 6, 32)[:, :, 16]
    assert told.nonzero().tolist() == [[0, 0], [1, 5]]
    laid = columns.view(2, 6, 4, 128)
    assert torch.equal(laid[0, 0], powers(rows[:128, :4]).t())
    assert torch.equal(laid[1, 5, 0, : n - 128], powers(rows[128:, 20]))
    assert not laid[1, 5, 1:].any()


@interpreted
@pytest.mark.parametrize("kind", ["bytes", "packed", "swizzled"])
def test_scales_whose_products_may_not_be_exact_are_noted(kind):
    """The weight's within 2^+-22, the tokens' from 2^-104 to 2^100; NaN is none. Also of a column that differs from its block."""
    sizes = linear_hopper.Sizes(130, 130, 8, 2, 32)
    for x_byte, w_byte, noted in (
        (127, 127, 0),
        (23, 105, 0),
        (227, 149, 0),
        (255, 255, 0),
        (22, 127, 1),
        (228, 127, 1),
        (127, 104, 1),
        (127, 150, 1),
        (0, 127, 1),
    ):
        for uneven in (False, True):
            x, rows = torch.full((130, 8), 127, dtype=torch.uint8), torch.full((130, 8), 127, dtype=torch.uint8)
            x[129, 7] = x_byte
            rows[129 if uneven else slice(128, 130), 7] = w_byte
            blocks = rows[::32].contiguous()
            odd = torch.zeros(1, dtype=torch.int32)
            linear_hopper.lay_scales(as_kind(x, kind), as_kind(rows if kind != "bytes" else blocks, kind, poison=255), sizes, odd)
            assert odd.item() == (noted if kind != "bytes" or not uneven or x_byte != 127 else 0)


def test_kinds_of_scales():
    assert linear_hopper.kind_of(torch.zeros((1, 1, 32, 4), dtype=torch.int32)) == "swizzled"
    assert linear_hopper.kind_of(torch.zeros((4, 2))) == "numbers"


def test_choice_of_a_tile_counts_rounds():
    assert linear_hopper.choose(1, 128, 132) in ("128x128", "128x128-serial")
    for tokens, n in ((256, 5120), (4096, 5120), (4096, 1280), (5000, 32768)):
        times = {}
        for name, config in linear_hopper.CONFIGS.items():
            tiles = -(-tokens // config.height) * -(-n // 128)
            times[name] = -(-tiles // 132) * config.cost
        assert times[linear_hopper.choose(tokens, n, 132)] == min(times.values())


def test_what_is_not_taken_is_named():
    codes, scales = torch.zeros((4, 64), dtype=torch.uint8), torch.zeros((4, 2), dtype=torch.uint8)
    assert "capability 9.0" in linear_hopper.supported(codes, scales, codes, scales)


@compiled
@pytest.mark.parametrize(
    ("name", "block", "kind"),
    [("256x128", 32, "bytes"), ("192x128", 32, "bytes"), ("128x128", 32, "bytes"), ("256x128", 32, "packed"), ("256x128", 128, "numbers")],
)
def test_roles_compile(name, block, kind):
    """Products of two or three warpgroups that are not put one after another, no more memory than there is, no register in local memory."""
    roles = pytest.importorskip("dsv4.fast.kernels.linear_hopper_roles")
    config = linear_hopper.CONFIGS[name]
    form = roles.Form(block, kind == "packed", *config[:5])
    kernel = built(roles, form)
    assert kernel.metadata.shared <= SHARED
    assert kernel.asm["ptx"].count("wgmma.mma_async.sync.aligned.m64n128k32") >= 4 * config.warpgroups * config.rows
    said = ptxas(kernel.asm["ptx"])
    assert "serialized" not in said
    assert "0 bytes spill stores, 0 bytes spill loads" in said


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_scales_compile(kind):
    function = linear_hopper.lines_kernel
    pointer = {"bytes": "*u8", "numbers": "*fp32"}.get(kind, "*i32")
    pointers = {"x": pointer, "w": pointer, "x_lines": "*fp32", "w_lines": "*fp32", "w_columns": "*fp32", "odd": "*i32"}
    given = {"GROUP": 32, "X_KIND": kind, "W_KIND": kind, "ROWS": linear_hopper.ROWS, "GROUPS": linear_hopper.GROUPS}
    given["STEPS"] = linear_hopper.STEPS
    signature = {each.name: "constexpr" if each.is_constexpr else pointers.get(each.name, "i32") for each in function.params}
    constants = {(place,): given[each.name] for place, each in enumerate(function.params) if each.is_constexpr}
    kernel = triton.compile(ASTSource(function, signature, constants), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert kernel.metadata.shared <= SHARED


def built(roles, form):
    from triton.experimental.gluon._runtime import GluonASTSource

    def descriptor(dtype, block, layout):
        return f"tensordesc<{dtype}{block},{layout.value!r}>"

    signature = {
        "x": descriptor("fp8e4nv", [form.height, 128], roles.CODES),
        "w": descriptor("fp8e4nv", [128, 128], roles.CODES),
        "x_scales": descriptor("fp32", [form.groups, form.height], roles.NUMBERS),
        "w_scales": descriptor("fp32", [1, 32], roles.NUMBERS),
        "result": descriptor("bf16", [64, 128], roles.RESULTS),
        "columns": "*fp32",
        **dict.fromkeys(("tiles", "column_tiles", "steps"), "i32"),
        "FORM": "constexpr",
    }
    names = [parameter.name for parameter in roles.product_kernel.params]
    assert sorted(names) == sorted(signature)
    constants = {(names.index("FORM"),): form}
    attributes = {(names.index("columns"),): [["tt.divisibility", 16]]}
    source = GluonASTSource(roles.product_kernel, {name: signature[name] for name in names}, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": roles.WARPS})


def ptxas(ptx):
    """What ptxas says of registers."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [program, "-v", "--gpu-name=sm_90a", f"{folder}/kernel.ptx", "-o", f"{folder}/kernel.cubin"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return ran.stdout + ran.stderr


def lattice(rows, k, *, seed):
    """Codes of whole numbers -3..3."""
    return torch.randint(-3, 4, (rows, k), generator=generator(seed)).float().to(torch.float8_e4m3fn).view(torch.uint8)


def product(x, x_bytes, w, w_bytes, block):
    """bf16 of the exact product; bytes [tokens, groups] and [n, groups]."""
    k = x.shape[1]
    a, b = (codes.view(torch.float8_e4m3fn).double() for codes in (x, w))
    sa, sb = (powers(bytes_).double().repeat_interleave(block, 1)[:, :k] for bytes_ in (x_bytes, w_bytes))
    return ((a * sa) @ (b * sb).t()).float().bfloat16()


def place(tensor):
    """On the device, strides kept."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda").copy_(tensor)


@on_hopper
@pytest.mark.parametrize("config", linear_hopper.CONFIGS)
@pytest.mark.parametrize("w_kind", ["bytes", "numbers", "packed", "swizzled", "uneven"])
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 1, 32), (129, 515, 96), (300, 256, 1536)])
def test_products_are_exact_on_lattices(config, w_kind, tokens, n, k):
    x, w = lattice(tokens, k, seed=1), lattice(n, k, seed=2)
    x_bytes = power_bytes(tokens, k // 32, seed=3, least=125, past=130)
    blocks = power_bytes(-(-n // 32), k // 32, seed=4, least=125, past=130)
    rows = power_bytes(n, k // 32, seed=5, least=125, past=130) if w_kind == "uneven" else repeated(blocks, n)
    given = blocks if w_kind in ("bytes", "numbers") else rows
    x_kind = "packed" if w_kind == "uneven" else w_kind
    scales = place(as_kind(x_bytes, x_kind)), place(as_kind(given, "swizzled" if w_kind == "uneven" else w_kind))
    got = linear_hopper.run(x.cuda(), scales[0], w.cuda(), scales[1], config=config)
    assert got.stride(1) == 1
    assert torch.equal(got.cpu(), product(x, x_bytes, w, rows, 32))


@on_hopper
@pytest.mark.parametrize("config", linear_hopper.CONFIGS)
def test_blocks_of_128_and_any_scale(config):
    x, w = lattice(300, 1536, seed=1), lattice(384, 1536, seed=2)
    x_bytes, blocks = power_bytes(300, 12, seed=3, least=125, past=130), power_bytes(3, 12, seed=4, least=125, past=130)
    got = linear_hopper.run(x.cuda(), powers(x_bytes).cuda(), w.cuda(), powers(blocks).cuda(), 128, config)
    assert torch.equal(got.cpu(), product(x, x_bytes, w, blocks.repeat_interleave(128, 0), 128))
    third = linear_hopper.run(x.cuda(), (powers(x_bytes) / 3).cuda(), w.cuda(), powers(blocks).cuda(), 128, config)
    assert ((third.float() * 3 - got.float()).abs() <= got.float().abs() * 2.0**-7 + 2.0**-6).all()


@on_hopper
def test_bits_depend_on_neither_the_tile_nor_the_batch():
    codes = torch.randint(0, 256, (700, 1280), generator=generator(1), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    x, w = codes[:300].cuda(), codes[300:].cuda()
    x_bytes, blocks = power_bytes(300, 40, seed=3, least=120, past=130).cuda(), power_bytes(13, 40, seed=4, least=120, past=130).cuda()
    whole = linear_hopper.run(x, x_bytes, w, blocks, config="256x128")
    for config in linear_hopper.CONFIGS:
        assert torch.equal(linear_hopper.run(x, x_bytes, w, blocks, config=config), whole)
        assert torch.equal(linear_hopper.run(x[37:50], x_bytes[37:50], w, blocks, config=config), whole[37:50])


@on_hopper
def test_nan_of_codes_and_scales_goes_through():
    x, w = lattice(200, 256, seed=1), lattice(160, 256, seed=2)
    x_bytes, blocks = power_bytes(200, 8, seed=3, least=125, past=130), power_bytes(5, 8, seed=4, least=125, past=130)
    x[3, 70], x_bytes[5, 2], blocks[4, 7] = 0x7F, 255, 255
    got = linear_hopper.run(x.cuda(), x_bytes.cuda(), w.cuda(), blocks.cuda()).cpu()
    wanted = product(x, x_bytes, w, repeated(blocks, 160), 32)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(0.0), wanted.nan_to_num(0.0))
