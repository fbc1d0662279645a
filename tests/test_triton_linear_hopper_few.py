"""The product of few tokens for SM90 without a GPU: compiled, with what ptxas says. On an SM90 it runs beside `linear`."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402

from dsv4.fast.kernels import linear, linear_hopper_few  # noqa: E402

SHARED = 232448  # bytes a program can have
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a device of capability 9.0")
COUNTS = [1, 7, 16, 17, 33, 64]


def test_what_is_not_taken_is_named(monkeypatch):
    codes, scales = torch.zeros((4, 256), dtype=torch.uint8), torch.zeros((4, 8), dtype=torch.uint8)
    assert "capability 9.0" in linear_hopper_few.supported(codes, scales, codes, scales)

    class Device:
        type = "cuda"

    class Codes:
        """Codes as if on a device."""

        def __init__(self, tensor):
            self.shape, self.stride, self.data_ptr, self.device = tensor.shape, tensor.stride, tensor.data_ptr, Device()

    def why(x=codes, x_scales=scales, weight=codes, weight_scales=scales, block=32):
        return linear_hopper_few.supported(Codes(x), x_scales, Codes(weight), weight_scales, block)

    monkeypatch.setattr(linear_hopper_few, "device_of", lambda device: (132, (9, 0)))
    assert why() is None
    assert "1 to 64 tokens" in why(torch.zeros((65, 256), dtype=torch.uint8))
    assert "block must be" in why(block=64)
    assert "groups of 32" in why(x_scales=scales.view(torch.int32), block=128)
    assert "multiple of 128" in why(codes[:, :160])
    assert "16 bytes" in why(weight=torch.zeros((4, 264), dtype=torch.uint8)[:, :256])
    assert "four to a word" in why(x_scales=torch.zeros((8, 4), dtype=torch.uint8).t())
    assert "four to a word" in why(x_scales=scales[:, :2], weight_scales=scales[:, :2].float(), block=128)
    assert why(x_scales=torch.zeros((2, 4)).t(), weight_scales=torch.zeros((1, 2)), block=128) is None


def test_every_product_finds_a_tile():
    for tokens in range(1, 65):
        for n, parts in ((1, 8), (5120, 2), (32768, 1)):
            for words in (False, True):
                config = linear_hopper_few.CONFIGS[linear_hopper_few.choose(tokens, n, parts, words=words)]
                assert config.tokens >= min(tokens, 64 if words and parts * n > 264 * 64 else 32)


@pytest.mark.parametrize("scales", ["words", "words of rows", "numbers", "numbers of 128"])
@pytest.mark.parametrize("name", linear_hopper_few.CONFIGS)
def test_kernels_compile(name, scales):
    """Products that run together, no more memory than there is, no register in local memory."""
    config = linear_hopper_few.CONFIGS[name]
    if scales == "numbers" and config.tokens == 64:
        pytest.skip("not chosen: see `choose`")
    roles = pytest.importorskip("dsv4.fast.kernels.linear_hopper_few_roles")
    words = scales.startswith("words")
    group = 128 if scales == "numbers of 128" else 32
    form = roles.Form(group, 1 if scales == "words of rows" else group, words, words, False, False, *config, True)
    kernel = built(roles, form)
    assert kernel.metadata.shared <= SHARED
    ptx = kernel.asm["ptx"]
    assert ptx.count(f"wgmma.mma_async.sync.aligned.m64n{config.tokens}k32") == 8  # of the fast and the careful loop
    assert ptx.count("griddepcontrol.launch_dependents") == 1
    said = ptxas(ptx)
    assert "serialized" not in said
    assert "0 bytes spill stores, 0 bytes spill loads" in said


def built(roles, form):
    from triton.experimental.gluon._runtime import GluonASTSource

    scales = ["*i32" if words else "*fp32" for words in (form.x_words, form.w_words)]
    types = {"x": "*u8", "w": "*u8", "x_scales": scales[0], "w_scales": scales[1], "y": "*fp32", "FORM": "constexpr"}
    names = [parameter.name for parameter in roles.product_kernel.params]
    signature = {name: types.get(name, "i32") for name in names}
    constants = {(names.index("FORM"),): form}
    divisible = ["x", "w", "x_scales", "w_scales", "y", "x_row", "w_row", "n"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = GluonASTSource(roles.product_kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": form.warps})


def ptxas(ptx):
    """What ptxas says of registers."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [program, "-v", "--gpu-name=sm_90a", f"{folder}/kernel.ptx", "-o", f"{folder}/kernel.cubin"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"Used \d+ registers", ran.stderr + ran.stdout)
    return ran.stdout + ran.stderr


def random_codes(rows, k, seed):
    codes = torch.randint(0, 256, (rows, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return torch.where((codes & 0x7F) == 0x7F, 0, codes).cuda()


def bytes_of(rows, groups, seed, least=118, past=132):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, past, (rows, groups), generator=generator, dtype=torch.uint8).cuda()


def equal(left, right):
    """Whether bits are equal, or both are NaN."""
    return bool(((left.view(torch.int16) == right.view(torch.int16)) | (left.isnan() & right.isnan())).all())


@on_hopper
@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize(("n", "k"), [(515, 128), (1792, 5120), (32768, 1280)])
def test_bits_are_those_of_linear(tokens, n, k):
    given = random_codes(tokens, k, 1), bytes_of(tokens, k // 32, 2), random_codes(n, k, 3), bytes_of(-(-n // 32), k // 32, 4)
    assert linear_hopper_few.supported(*given) is None
    got = linear_hopper_few.run(*given, 32)
    assert equal(got, linear.run_fp8(*given, 32))
    assert equal(got[: tokens // 2 + 1], linear_hopper_few.run(given[0][: tokens // 2 + 1], given[1][: tokens // 2 + 1], *given[2:], 32))


@on_hopper
@pytest.mark.parametrize("config", linear_hopper_few.CONFIGS)
def test_every_tile_has_the_same_bits(config):
    given = random_codes(61, 2560, 1), bytes_of(61, 80, 2), random_codes(515, 2560, 3), bytes_of(17, 80, 4)
    assert equal(linear_hopper_few.run(*given, config=config), linear.run_fp8(*given, 32))


@on_hopper
@pytest.mark.parametrize("tokens", [5, 40])
@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize(("x_least", "w_least"), [(0, 0), (0, 200), (200, 0), (200, 200)])
def test_any_scales(tokens, numbers, x_least, w_least):
    """Scales that fast sums get wrong, and NaN."""
    scales = bytes_of(tokens, 40, 2, x_least, x_least + 56), bytes_of(17, 40, 4, w_least, w_least + 56)
    x, weight = random_codes(tokens, 1280, 1), random_codes(515, 1280, 3)
    x[1, 70], weight[3, 200] = 0x7F, 0xFF
    if numbers:
        scales = tuple(torch.exp2(each.double() - 127).float() / 3 for each in scales)
    got = linear_hopper_few.run(x, scales[0], weight, scales[1])
    assert equal(got, linear.run_fp8(x, scales[0], weight, scales[1], 32))
    assert got[1].isnan().all()
    assert got[:, 3].isnan().all()


@on_hopper
@pytest.mark.parametrize("tokens", [5, 40])
def test_blocks_of_128(tokens):
    x, weight = random_codes(tokens, 1280, 1), random_codes(515, 1280, 3)
    scales = torch.rand((10, tokens), device="cuda").t(), torch.rand((5, 10), device="cuda")
    assert equal(linear_hopper_few.run(x, scales[0], weight, scales[1], 128), linear.run_fp8(x, scales[0], weight, scales[1], 128))


@on_hopper
@pytest.mark.parametrize("tokens", [5, 40])
def test_pairs_with_a_scale_for_each_row(tokens):
    x, weight = random_codes(tokens, 1280, 1), random_codes(384, 1280, 3)
    rows = bytes_of(384, 40, 4).view(torch.int32)
    packed = torch.empty((10, 64), dtype=torch.int32, device="cuda").t()[:tokens]
    packed.copy_(bytes_of(tokens, 40, 2).view(torch.int32))
    tiled = rows.view(3, 4, 32, 10).permute(0, 3, 2, 1).contiguous()
    got = linear_hopper_few.run(x, packed, weight, tiled)
    assert equal(got, linear.run_mxfp8(x, packed, weight, tiled))
    columns = torch.empty((10, 384), dtype=torch.int32, device="cuda").t().copy_(rows)
    assert equal(got, linear_hopper_few.run(x, packed, weight, columns))
