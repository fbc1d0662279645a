"""Reference scale layouts against index formulas in numpy, written from spec A 8 and M 9.6, and against reported bugs."""

import numpy as np
import pytest
import torch

from dsv4.reference import scales
from dsv4.types import ArgumentError

ROWS = (1, 127, 128, 129, 200, 256, 1000)


def some_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def packed_memory(byte: np.ndarray) -> np.ndarray:
    """[rows, groups] to the bytes of DeepGEMM's buffer: byte (r, g) at 4 (g div 4 A + r) + g mod 4."""
    rows, groups = byte.shape
    aligned = -(-rows // 4) * 4
    memory = np.zeros(4 * aligned * -(-groups // 4), np.uint8)
    r, g = np.mgrid[:rows, :groups]
    memory[4 * (g // 4 * aligned + r) + g % 4] = byte
    return memory


def tile_offset(r: np.ndarray, g: np.ndarray, groups: int) -> np.ndarray:
    """Spec A 8.3."""
    return r // 128 * (-(-groups // 4) * 512) + g // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + g % 4


def tile_memory(byte: np.ndarray) -> np.ndarray:
    """[rows, groups] to FlashInfer's buffer."""
    rows, groups = byte.shape
    memory = np.zeros(-(-rows // 128) * -(-groups // 4) * 512, np.uint8)
    r, g = np.mgrid[:rows, :groups]
    memory[tile_offset(r, g, groups)] = byte
    return memory


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """Every byte of the storage that the tensor lies in, pads too."""
    return np.array(tensor.untyped_storage().tolist(), np.uint8)


def with_pads(tensor: torch.Tensor, pad: int) -> torch.Tensor:
    """A column-major tensor whose words of rows past the last hold `pad` in every byte."""
    rows, columns = tensor.shape
    memory = torch.full((columns, -(-rows // 4) * 4, 4), pad, dtype=torch.uint8).view(torch.int32)[..., 0]
    memory[:, :rows] = tensor.T
    return memory.T[:rows]


@pytest.mark.parametrize("groups", [1, 4, 6, 16])
@pytest.mark.parametrize("rows", ROWS)
def test_packed_and_tiled_buffers_equal_the_formulas(rows, groups):
    byte = some_bytes(rows, groups)
    words, aligned, tiles = -(-groups // 4), -(-rows // 4) * 4, -(-rows // 128)
    packed, tiled = scales.pack_ue8m0(byte), scales.swizzle_128x4(byte)
    assert packed.shape == (rows, words)
    assert packed.stride() == (1, aligned)
    assert np.array_equal(memory_of(packed), packed_memory(byte.numpy()))
    assert tiled.shape == (tiles, words, 32, 4)
    assert tiled.is_contiguous()
    assert np.array_equal(tiled.view(torch.uint8).flatten().numpy(), tile_memory(byte.numpy()))
    for back in (
        scales.unpack_ue8m0(packed, groups),
        scales.unswizzle_128x4(tiled, rows, groups),
        scales.unswizzle_128x4(tiled.view(torch.uint8).flatten(), rows, groups),
    ):
        assert back.dtype == torch.float8_e8m0fnu
        assert back.is_contiguous()
        assert torch.equal(back.view(torch.uint8), byte)
    assert torch.equal(scales.packed_to_128x4(packed), tiled)
    again = scales.packed_from_128x4(tiled, rows)
    assert torch.equal(again, packed)
    assert again.stride() == (1, aligned)
    assert np.array_equal(memory_of(again), memory_of(packed))


def test_words_and_offsets_of_the_specification():
    byte = torch.tensor([[0x01, 0x02, 0x03, 0xF4, 0x05]], dtype=torch.uint8)
    assert scales.pack_ue8m0(byte).tolist() == [[0xF4030201 - 2**32, 0x05]]
    grid = torch.arange(208 * 160).reshape(208, 160)
    buffers = [scales.swizzle_128x4((grid >> 8 * part & 0xFF).to(torch.uint8)).view(torch.uint8).flatten().long() for part in (0, 1)]
    offsets = {int(low + 256 * high): place for place, (low, high) in enumerate(zip(*buffers, strict=True)) if low + 256 * high}
    for (r, g), offset in {(1, 0): 16, (31, 3): 499, (32, 0): 4, (33, 5): 533, (127, 159): 20479, (128, 0): 20480, (200, 7): 21131}.items():
        assert offsets[r * 160 + g] == offset


@pytest.mark.parametrize("rows", ROWS)
def test_mn_major_strides_values_and_pads(rows):
    values = torch.randn(rows, 5)
    got = scales.align_mn_major(values)
    aligned = -(-rows // 4) * 4
    memory = np.zeros((5, aligned), np.float32)
    memory[:, :rows] = values.T.numpy()
    assert got.stride() == (1, aligned)
    assert torch.equal(got, values)
    assert np.array_equal(memory_of(got), memory.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_batches_are_laid_out_one_by_one(rows):
    byte, values = some_bytes(2, 3, rows, 6), torch.randn(2, 3, rows, 6)
    packed, tiled, aligned = scales.pack_ue8m0(byte), scales.swizzle_128x4(byte), scales.align_mn_major(values)
    column = -(-rows // 4) * 4
    assert packed.stride() == (3 * 2 * column, 2 * column, 1, column)
    assert aligned.stride() == (3 * 6 * column, 6 * column, 1, column)
    assert torch.equal(aligned, values)
    for i, j in np.ndindex(2, 3):
        assert torch.equal(packed[i, j], scales.pack_ue8m0(byte[i, j]))
        assert torch.equal(tiled[i, j], scales.swizzle_128x4(byte[i, j]))
    assert torch.equal(scales.unpack_ue8m0(packed, 6).view(torch.uint8), byte)
    assert torch.equal(scales.unswizzle_128x4(tiled, rows, 6).view(torch.uint8), byte)


@pytest.mark.parametrize("rows", [0, 3, 129])
@pytest.mark.parametrize("groups", [0, 5])
def test_empty_sides_and_any_strides(rows, groups):
    byte = some_bytes(2 * groups, 3 * rows).T[::3, 1::2]
    packed, tiled = scales.pack_ue8m0(byte), scales.swizzle_128x4(byte)
    assert torch.equal(packed, scales.pack_ue8m0(byte.contiguous().view(torch.float8_e8m0fnu)))
    assert torch.equal(tiled, scales.swizzle_128x4(byte.contiguous()))
    for words in (packed, packed.contiguous(), packed.repeat(2, 2)[:rows, : packed.shape[1]]):
        assert torch.equal(scales.unpack_ue8m0(words, groups).view(torch.uint8), byte)
        assert torch.equal(scales.packed_to_128x4(words), tiled)
        assert torch.equal(scales.restride_rows(words, rows), packed)
        assert torch.equal(scales.zero_pad_rows(words, rows, scale_layout="packed"), packed)
    assert torch.equal(scales.unswizzle_128x4(tiled, rows, groups).view(torch.uint8), byte)
    assert torch.equal(scales.packed_from_128x4(tiled, rows), packed)


@pytest.mark.parametrize("rows", ROWS)
def test_ln_06_pads_never_reach_the_other_layout(rows):
    """Both layouts from one source, with pads of 0xFF where the layout has pads."""
    byte = some_bytes(rows, 16)
    packed, tiled = scales.pack_ue8m0(byte), scales.swizzle_128x4(byte)
    poisoned = with_pads(packed, 0xFF)
    assert torch.equal(scales.packed_to_128x4(poisoned), tiled)
    assert torch.equal(scales.unpack_ue8m0(poisoned, 16).view(torch.uint8), byte)
    r, g = np.mgrid[: -(-rows // 128) * 128, :16]
    buffer = tiled.view(torch.uint8).flatten().clone()
    buffer[tile_offset(r, g, 16)[rows:].ravel()] = 0xFF
    poisoned = buffer.view(torch.int32).reshape(tiled.shape)
    assert torch.equal(scales.packed_from_128x4(poisoned, rows), packed)
    assert torch.equal(scales.unswizzle_128x4(poisoned, rows, 16).view(torch.uint8), byte)
    assert np.array_equal(memory_of(scales.packed_from_128x4(poisoned, rows)), memory_of(packed))
    assert torch.equal(scales.zero_pad_rows(poisoned, rows, scale_layout="128x4"), tiled)


@pytest.mark.parametrize("rows", ROWS)
def test_ln_06_zeroing_then_relayout_equals_zeroing_the_tiles(rows):
    live = (rows + 1) // 2
    packed = scales.pack_ue8m0(torch.full((rows, 16), 0xFF, dtype=torch.uint8))
    byte = some_bytes(live, 16)
    packed[:live] = scales.pack_ue8m0(byte)
    two = scales.zero_pad_rows(with_pads(packed, 0xFF), live, scale_layout="packed")
    four = scales.zero_pad_rows(scales.packed_to_128x4(packed), live, scale_layout="128x4")
    assert two.stride() == (1, -(-rows // 4) * 4)
    assert torch.equal(scales.packed_to_128x4(two), four)
    live_only = torch.cat([byte, torch.zeros(rows - live, 16, dtype=torch.uint8)])
    assert np.array_equal(memory_of(two), packed_memory(live_only.numpy()))
    assert torch.equal(four, scales.swizzle_128x4(live_only))
    # The live rows' scales are a prefix of the padded ones': with the stride of the live rows alone, and tile by tile.
    assert torch.equal(scales.restride_rows(scales.pack_ue8m0(byte), rows), two)
    tiles = -(-live // 128)
    assert torch.equal(four[:tiles], scales.swizzle_128x4(byte))
    assert not four[tiles:].any()


@pytest.mark.parametrize("layout", ["packed", "128x4"])
def test_live_rows_on_the_device_are_clamped(layout):
    source = scales.pack_ue8m0(some_bytes(256, 8)) if layout == "packed" else scales.swizzle_128x4(some_bytes(256, 8))
    before = source.clone()
    for value, kept in ((-5, 0), (0, 0), (130, 130), (256, 256), (2**30, 256)):
        want = scales.zero_pad_rows(source, kept, scale_layout=layout)
        for live in (torch.tensor(value), torch.tensor([value], dtype=torch.int32)):
            assert torch.equal(scales.zero_pad_rows(source, live, scale_layout=layout), want)
    assert torch.equal(source, before)


@pytest.mark.parametrize(("n", "rows"), [(1, 1), (1, 8), (5, 6), (127, 200), (0, 3)])
def test_restride_rows(n, rows):
    byte = some_bytes(n, 6)
    got = scales.restride_rows(with_pads(scales.pack_ue8m0(byte), 0xFF), rows)
    padded = torch.cat([byte, torch.zeros(rows - n, 6, dtype=torch.uint8)])
    assert got.stride() == (1, -(-rows // 4) * 4)
    assert np.array_equal(memory_of(got), packed_memory(padded.numpy()))


@pytest.mark.parametrize("rows", [128, 384])
def test_utccp_rows_are_the_inner_rows_of_the_tiles(rows):
    packed = scales.pack_ue8m0(some_bytes(rows, 12))
    m = np.arange(rows)
    to = m // 128 * 128 + 4 * (m % 32) + m % 128 // 32
    got, back = scales.utccp_rows(packed), scales.utccp_rows(packed, inverse=True)
    assert got.stride() == back.stride() == (1, rows)
    assert np.array_equal(got.numpy()[to], packed.numpy())
    assert np.array_equal(back.numpy(), packed.numpy()[to])
    assert torch.equal(scales.utccp_rows(got, inverse=True), packed)
    assert torch.equal(scales.packed_to_128x4(packed), got.reshape(rows // 128, 128, 3).permute(0, 2, 1).reshape(-1, 3, 32, 4))


@pytest.mark.parametrize(("experts", "n", "groups"), [(1, 64, 4), (3, 128, 8), (2, 192, 20), (0, 64, 4)])
def test_hopper_interleave_equals_the_index_formula(experts, n, groups):
    byte = some_bytes(experts, n, groups)
    e, tile, c, lane, column = np.indices((experts, n // 64, groups // 4, 16, 16))
    want = byte.numpy()[e, 64 * tile + 16 * (column // 4) + lane, 4 * c + column % 4]
    for form in (byte, byte.view(torch.float8_e8m0fnu)):
        got = scales.interleave_hopper_fp4(form)
        assert got.dtype == torch.uint8
        assert got.is_contiguous()
        assert np.array_equal(got.numpy(), want)
    assert torch.equal(scales.deinterleave_hopper_fp4(got).view(torch.uint8), byte)


@pytest.mark.parametrize(("experts", "pages", "words"), [(1, 1, 1), (3, 2, 2), (2, 3, 5), (0, 1, 1)])
def test_hopper_deinterleave_equals_the_index_formula(experts, pages, words):
    tiles = some_bytes(experts, pages, words, 16, 16)
    e, r, g = np.indices((experts, 64 * pages, 4 * words))
    want = tiles.numpy()[e, r // 64, g // 4, r % 16, 4 * (r % 64 // 16) + g % 4]
    for form in (tiles, tiles.transpose(-1, -2).contiguous().transpose(-1, -2)):
        got = scales.deinterleave_hopper_fp4(form)
        assert got.dtype == torch.float8_e8m0fnu
        assert got.is_contiguous()
        assert np.array_equal(got.view(torch.uint8).numpy(), want)
    assert torch.equal(scales.interleave_hopper_fp4(got), tiles)


FP32 = torch.ones(8, 4)
PACKED = scales.pack_ue8m0(some_bytes(130, 8))
TILED = scales.swizzle_128x4(some_bytes(130, 8))


@pytest.mark.parametrize(
    ("call", "argument", "words"),
    [
        (lambda: scales.pack_ue8m0(FP32), "scales", "encode_e8m0"),
        (lambda: scales.pack_ue8m0(some_bytes(4)), "scales", "rows, groups"),
        (lambda: scales.swizzle_128x4(FP32.bfloat16()), "scales", "encode_e8m0"),
        (lambda: scales.swizzle_128x4(PACKED), "scales", "int32"),
        (lambda: scales.unpack_ue8m0(PACKED.float(), 8), "packed", "int32"),
        (lambda: scales.unpack_ue8m0(PACKED, 9), "groups", "5 to 8"),
        (lambda: scales.unpack_ue8m0(PACKED, 4), "groups", "5 to 8"),
        (lambda: scales.unpack_ue8m0(PACKED, -1), "groups", "at least 0"),
        (lambda: scales.align_mn_major(FP32.double()), "scales", "fp32"),
        (lambda: scales.unswizzle_128x4(TILED, 128, 8), "swizzled", "1, 2, 32, 4"),
        (lambda: scales.unswizzle_128x4(TILED, 130, 9), "swizzled", "2, 3, 32, 4"),
        (lambda: scales.unswizzle_128x4(TILED.view(torch.uint8).flatten()[1:], 130, 8), "swizzled", "2048"),
        (lambda: scales.packed_to_128x4(TILED), "packed", "rows, words"),
        (lambda: scales.packed_from_128x4(TILED, 300), "swizzled", "3, words, 32, 4"),
        (lambda: scales.zero_pad_rows(PACKED, 131, scale_layout="packed"), "live_rows", "at most 130"),
        (lambda: scales.zero_pad_rows(TILED, 257, scale_layout="128x4"), "live_rows", "at most 256"),
        (lambda: scales.zero_pad_rows(PACKED, -1, scale_layout="packed"), "live_rows", "at least 0"),
        (lambda: scales.zero_pad_rows(PACKED, torch.tensor([1, 2]), scale_layout="packed"), "live_rows", r"\[\] or \[1\]"),
        (lambda: scales.zero_pad_rows(PACKED, torch.tensor(1.0), scale_layout="packed"), "live_rows", "int32 or int64"),
        (lambda: scales.zero_pad_rows(PACKED, 1, scale_layout="rows"), "scale_layout", "packed, 128x4"),
        (lambda: scales.zero_pad_rows(PACKED, 1, scale_layout="128x4"), "scales", "tiles, words"),
        (lambda: scales.restride_rows(PACKED, 129), "rows", "at least 130"),
        (lambda: scales.utccp_rows(PACKED), "packed", "multiple of 128"),
        (lambda: scales.interleave_hopper_fp4(some_bytes(2, 96, 4)), "scales", "multiple of 64"),
        (lambda: scales.interleave_hopper_fp4(some_bytes(2, 64, 6)), "scales", "multiple of 4"),
        (lambda: scales.interleave_hopper_fp4(FP32), "scales", "encode_e8m0"),
        (lambda: scales.deinterleave_hopper_fp4(torch.zeros(1, 1, 1, 16, 16)), "interleaved", "uint8"),
        (lambda: scales.deinterleave_hopper_fp4(some_bytes(1, 64, 4)), "interleaved", "n/64, k/128, 16, 16"),
        (lambda: scales.deinterleave_hopper_fp4(some_bytes(1, 1, 1, 16, 4)), "interleaved", "n/64, k/128, 16, 16"),
    ],
)
def test_wrong_arguments_are_named(call, argument, words):
    with pytest.raises(ArgumentError, match=words) as error:
        call()
    assert error.value.argument == argument


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 129, 384])
def test_cuda_gives_the_bytes_of_the_cpu(rows):
    byte = some_bytes(rows, 12)
    packed, tiled = scales.pack_ue8m0(byte.cuda()), scales.swizzle_128x4(byte.cuda())
    assert np.array_equal(memory_of(packed.cpu().T.contiguous()), memory_of(scales.pack_ue8m0(byte).T.contiguous()))
    assert packed.stride() == scales.pack_ue8m0(byte).stride()
    assert torch.equal(tiled.cpu(), scales.swizzle_128x4(byte))
    assert torch.equal(scales.unpack_ue8m0(packed, 12).cpu().view(torch.uint8), byte)
    assert torch.equal(scales.unswizzle_128x4(tiled, rows, 12).cpu().view(torch.uint8), byte)
    assert torch.equal(scales.packed_from_128x4(tiled, rows), packed)
    live = torch.tensor([rows // 2], device="cuda")
    zeroed = scales.zero_pad_rows(tiled, live, scale_layout="128x4")
    assert torch.equal(zeroed, scales.packed_to_128x4(scales.zero_pad_rows(packed, live, scale_layout="packed")))
    assert torch.equal(zeroed.cpu(), scales.zero_pad_rows(tiled.cpu(), rows // 2, scale_layout="128x4"))
