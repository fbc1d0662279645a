"""Fast scale layouts against the index formulas of spec A 8 and M 9.6: bytes of the whole storage, strides, operators, graphs, errors.

Under TRITON_INTERPRET=1 the same tests run the Triton kernels, on the CPU: see test_triton_scales.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from dsv4.fast import compiled, dispatch, ops, scales, use
from dsv4.fast.dispatch import any_device
from dsv4.types import ArgumentError, Unsupported
from interpreted import INTERPRETED

WAYS = ("triton",) if INTERPRETED else ("inductor", "eager")
ROWS = (1, 3, 127, 128, 129, 200, 256, 1000)  # LN-06, and M 10 rows 10 and 11
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.fixture(autouse=True)
def interpreted_kernels_run_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        for function, rows in dispatch.TABLES.items():
            monkeypatch.setitem(
                dispatch.TABLES, function, tuple(replace(row, device=any_device) if row.backend == "triton" else row for row in rows)
            )


def some_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def packed_memory(byte: np.ndarray, rows: int | None = None) -> np.ndarray:
    """A 8.1: byte (r, g) at 4 (g div 4 A + r) + g mod 4, A the rows rounded up to 4."""
    aligned, words = -(-(rows or byte.shape[0]) // 4) * 4, -(-byte.shape[1] // 4)
    r, g = np.mgrid[: byte.shape[0], : byte.shape[1]]
    memory = np.zeros(4 * aligned * words, np.uint8)
    memory[4 * (g // 4 * aligned + r) + g % 4] = byte
    return memory


def tile_memory(byte: np.ndarray) -> np.ndarray:
    """A 8.3."""
    tiles, words = -(-byte.shape[0] // 128), -(-byte.shape[1] // 4)
    r, g = np.mgrid[: byte.shape[0], : byte.shape[1]]
    memory = np.zeros(tiles * words * 512, np.uint8)
    memory[r // 128 * words * 512 + g // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + g % 4] = byte
    return memory


def memory_of(tensor: Tensor) -> np.ndarray:
    """Every byte of the storage, pads too."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0).cpu().view(torch.uint8).numpy()


def packed(byte: Tensor, pad: int = 0) -> Tensor:
    """Packed scales by the formula, the pad words filled with a byte."""
    rows, groups = byte.shape
    aligned, words = -(-rows // 4) * 4, -(-groups // 4)
    memory = torch.from_numpy(packed_memory(byte.numpy())).view(torch.int32).view(words, aligned).clone()
    memory[:, rows:] = torch.tensor([pad] * 4, dtype=torch.uint8).view(torch.int32)
    return memory.T[:rows]


def tiled(byte: Tensor) -> Tensor:
    tiles, words = -(-byte.shape[0] // 128), -(-byte.shape[1] // 4)
    return torch.from_numpy(tile_memory(byte.numpy())).view(torch.int32).view(tiles, words, 32, 4)


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("groups", [1, 4, 6, 16])
@pytest.mark.parametrize("rows", ROWS)
def test_buffers_equal_the_formulas(rows: int, groups: int, impl: str) -> None:
    byte, words, aligned = some_bytes(rows, groups), -(-groups // 4), -(-rows // 4) * 4
    with use(impl):
        for source in (byte, byte.view(torch.float8_e8m0fnu)):
            got = scales.pack_ue8m0(source)
            assert (got.dtype, got.shape, got.stride()) == (torch.int32, (rows, words), (1, aligned))
            assert np.array_equal(memory_of(got), packed_memory(byte.numpy()))
            tiles = scales.swizzle_128x4(source)
            assert (tiles.dtype, tiles.shape) == (torch.int32, (-(-rows // 128), words, 32, 4))
            assert np.array_equal(memory_of(tiles), tile_memory(byte.numpy()))
        for given in (packed(byte, 0xFF), packed(byte).contiguous()):
            assert torch.equal(scales.unpack_ue8m0(given, groups).view(torch.uint8), byte)
            assert np.array_equal(memory_of(scales.packed_to_128x4(given)), tile_memory(byte.numpy()))
        for swizzled in (tiled(byte), tiled(byte).view(torch.uint8).flatten()):
            back = scales.unswizzle_128x4(swizzled, rows, groups)
            assert back.dtype == torch.float8_e8m0fnu
            assert torch.equal(back.view(torch.uint8), byte)
        again = scales.packed_from_128x4(tiled(byte), rows)
        assert again.stride() == (1, aligned)
        assert np.array_equal(memory_of(again), packed_memory(byte.numpy()))


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("rows", ROWS)
def test_mn_major_moves_bits(rows: int, impl: str) -> None:
    bits = some_bytes(rows, 3 * 4).view(torch.int32)  # NaN with payloads too
    got = scales.align_mn_major(bits.view(torch.float32), impl=impl)
    aligned = -(-rows // 4) * 4
    assert (got.dtype, got.stride()) == (torch.float32, (1, aligned))
    want = np.zeros((3, aligned), np.int32)
    want[:, :rows] = bits.numpy().T
    assert np.array_equal(memory_of(got), want.view(np.uint8).ravel())


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("rows", ROWS)
def test_zeroed_pad_rows_are_the_same_in_both_layouts(rows: int, impl: str) -> None:
    """LN-06: K 512, everything past the live rows 0xFF, pad words too."""
    for live in sorted({0, 1, rows // 2, rows - 1, rows}):
        byte = some_bytes(rows, 16)
        byte[live:] = 0xFF
        kept = byte.clone()
        kept[live:] = 0
        dirty, tiles = packed(byte, 0xFF), tiled(byte)
        tail = tiled(torch.cat((byte, torch.full((-rows % 128, 16), 0xFF, dtype=torch.uint8))))
        for count in (live, torch.tensor(live), torch.tensor([live], dtype=torch.int32)):
            with use(impl):
                clean = scales.zero_pad_rows(dirty, count, scale_layout="packed")
                assert np.array_equal(memory_of(clean), packed_memory(kept.numpy()))
                for given in (tiles, tail):
                    assert np.array_equal(memory_of(scales.zero_pad_rows(given, count, scale_layout="128x4")), tile_memory(kept.numpy()))
                assert torch.equal(scales.packed_to_128x4(clean), scales.zero_pad_rows(tiles, count, scale_layout="128x4"))
                place, other = packed(byte, 0xFF), packed(byte, 0xFF)
                assert scales.zero_pad_rows(place, count, scale_layout="packed", out=place) is place
                assert scales.zero_pad_rows(place, count, scale_layout="packed", out=other) is other
                in_tiles = tail.clone()
                scales.zero_pad_rows(in_tiles, count, scale_layout="128x4", out=in_tiles)
                for result, want in ((place, packed_memory), (other, packed_memory), (in_tiles, tile_memory)):
                    assert np.array_equal(memory_of(result), want(kept.numpy()))


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize(("count", "kept"), [(-3, 0), (2**40, 9), (torch.iinfo(torch.int64).min, 0)])
def test_live_rows_of_the_device_are_clamped(count: int, kept: int, impl: str) -> None:
    byte = some_bytes(9, 4)
    byte_kept = torch.where(torch.arange(9)[:, None] < kept, byte, 0)
    for result in (
        scales.zero_pad_rows(packed(byte), torch.tensor(count), scale_layout="packed", impl=impl),
        scales.zero_pad_rows(place := packed(byte), torch.tensor(count), scale_layout="packed", out=place, impl=impl),
    ):
        assert np.array_equal(memory_of(result), packed_memory(byte_kept.numpy()))


@pytest.mark.parametrize("impl", WAYS)
def test_in_place_writes_nothing_beyond_its_columns(impl: str) -> None:
    """A storage that ends with the last live word, and columns inside a wider buffer, keep their neighbours."""
    short = torch.full((8 + 5,), -1, dtype=torch.int32).as_strided((5, 2), (1, 8))
    scales.zero_pad_rows(short, 2, scale_layout="packed", out=short, impl=impl)
    assert memory_of(short).view(np.int32).tolist() == [-1, -1, 0, 0, 0, 0, 0, 0, -1, -1, 0, 0, 0]
    wide = torch.full((4, 8), -1, dtype=torch.int32)
    middle = wide.T[:5, 1:3]
    scales.zero_pad_rows(middle, 1, scale_layout="packed", out=middle, impl=impl)
    assert wide.tolist() == [[-1] * 8, [-1] + [0] * 7, [-1] + [0] * 7, [-1] * 8]


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize(("n", "rows"), [(1, 1), (1, 4), (5, 7), (5, 200), (127, 128), (0, 6)])
def test_restride(n: int, rows: int, impl: str) -> None:
    byte = some_bytes(n, 16)
    given = packed(byte, 0xFF) if n else torch.empty(0, 4, dtype=torch.int32)
    got = scales.restride_rows(given, rows, impl=impl)
    assert got.stride() == (1, -(-rows // 4) * 4)
    assert np.array_equal(memory_of(got), packed_memory(byte.numpy(), rows))


@pytest.mark.parametrize("impl", WAYS)
def test_utccp_and_hopper_rows(impl: str) -> None:
    byte = some_bytes(384, 8)
    got = scales.utccp_rows(packed(byte), impl=impl)
    want = torch.empty_like(byte)
    for row in range(384):
        want[row // 128 * 128 + 4 * (row % 32) + row % 128 // 32] = byte[row]
    assert got.stride() == (1, 384)
    assert np.array_equal(memory_of(got), packed_memory(want.numpy()))
    for source in (got, got.contiguous()):
        back = scales.utccp_rows(source, inverse=True, impl=impl)
        assert back.stride() == (1, 384)
        assert np.array_equal(memory_of(back), packed_memory(byte.numpy()))
    experts = some_bytes(3, 192, 8)
    got = scales.interleave_hopper_fp4(experts.view(torch.float8_e8m0fnu), impl=impl)
    view = experts.numpy().reshape(3, 192 // 64, 4, 16, 2, 4).transpose(0, 1, 4, 3, 2, 5).reshape(3, 3, 2, 16, 16)  # M 9.6
    assert got.dtype == torch.uint8
    assert np.array_equal(got.numpy(), view)
    back = scales.deinterleave_hopper_fp4(torch.from_numpy(view.copy()), impl=impl)
    assert back.dtype == torch.float8_e8m0fnu
    assert back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), experts)


LAID_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "rows apart": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "odd offset": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "odd address": lambda x: torch.frombuffer(
        bytearray(b"\0" * x.element_size() + x.contiguous().numpy().tobytes()), dtype=x.dtype, offset=x.element_size()
    ).view(x.shape),
    "batch innermost": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("how", LAID_OUT)
def test_strides_and_batches(how: str, impl: str) -> None:
    """LN-03: a view gives what its contiguous copy gives, for leading dimensions too, each batch as by itself."""
    lay, byte = LAID_OUT[how], some_bytes(2, 3, 130, 8)
    with use(impl):
        got, tiles = scales.pack_ue8m0(lay(byte)), scales.swizzle_128x4(lay(byte))
        mn = scales.align_mn_major(lay(byte.view(torch.float32)))
        assert (got.shape, got.stride()) == ((2, 3, 130, 2), (3 * 264, 264, 1, 132))
        assert mn.stride() == (3 * 264, 264, 1, 132)
        back = scales.unpack_ue8m0(lay(got), 8), scales.unswizzle_128x4(lay(tiles), 130, 8)
        for result in back:
            assert result.is_contiguous()
            assert torch.equal(result.view(torch.uint8), byte)
        for i, j in np.ndindex(2, 3):
            assert torch.equal(got[i, j], packed(byte[i, j]))
            assert torch.equal(tiles[i, j], tiled(byte[i, j]))
            assert torch.equal(mn[i, j].view(torch.int32), byte[i, j].view(torch.int32))
        plain = packed(byte[0, 0])
        assert torch.equal(scales.packed_to_128x4(lay(plain)), tiles[0, 0])
        assert torch.equal(scales.packed_from_128x4(lay(tiles[0, 0]), 130), plain)
        assert torch.equal(scales.restride_rows(lay(plain), 200)[:130], plain)
        for inverse in (False, True):
            assert torch.equal(scales.utccp_rows(lay(plain[:128]), inverse=inverse), scales.utccp_rows(plain[:128], inverse=inverse))
        assert torch.equal(scales.zero_pad_rows(lay(plain), 7, scale_layout="packed")[:7], plain[:7])
        experts = some_bytes(2, 64, 8)
        interleaved = scales.interleave_hopper_fp4(lay(experts))
        assert torch.equal(interleaved, scales.interleave_hopper_fp4(experts))
        assert torch.equal(scales.deinterleave_hopper_fp4(lay(interleaved)).view(torch.uint8), experts)


@pytest.mark.parametrize("impl", WAYS)
def test_empty(impl: str) -> None:
    for rows, groups, packed_shape, tile_shape in ((0, 8, (0, 2), (0, 2, 32, 4)), (8, 0, (8, 0), (1, 0, 32, 4))):
        byte = torch.empty(rows, groups, dtype=torch.uint8)
        with use(impl):
            words, tiles = scales.pack_ue8m0(byte), scales.swizzle_128x4(byte)
            assert (words.shape, tiles.shape) == (packed_shape, tile_shape)
            assert scales.unpack_ue8m0(words, groups).shape == (rows, groups)
            assert scales.unswizzle_128x4(tiles, rows, groups).shape == (rows, groups)
            assert scales.zero_pad_rows(words, 0, scale_layout="packed", out=words) is words
            assert scales.packed_from_128x4(tiles, rows).shape == packed_shape
    assert scales.pack_ue8m0(torch.empty(0, 5, 8, dtype=torch.uint8), impl=impl).shape == (0, 5, 2)


SAMPLES: dict[str, tuple[object, ...]] = {
    "pack_ue8m0": (some_bytes(2, 5, 6),),
    "unpack_ue8m0": (packed(some_bytes(5, 6)), 6),
    "align_mn_major": (torch.randn(3, 5, 2),),
    "swizzle_128x4": (some_bytes(130, 6),),
    "unswizzle_128x4": (tiled(some_bytes(130, 6)), 130, 6),
    "packed_to_128x4": (packed(some_bytes(130, 6)),),
    "packed_from_128x4": (tiled(some_bytes(130, 6)), 130),
    "zero_pad_rows": (packed(some_bytes(8, 6)), 8, torch.tensor(3), "packed"),
    "zero_pad_rows_": (packed(some_bytes(8, 6)), 5, None, "packed"),
    "restride_rows": (packed(some_bytes(5, 6)), 9),
    "utccp_rows": (packed(some_bytes(256, 6)), True),
    "interleave_hopper_fp4": (some_bytes(2, 64, 8),),
    "deinterleave_hopper_fp4": (some_bytes(2, 1, 2, 16, 16),),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_operators_keep_their_promises(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, (*SAMPLES[name], "eager"))


@pytest.mark.parametrize("name", SAMPLES)
def test_fakes_have_the_exact_strides(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        arguments = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in SAMPLES[name]]
        fake = getattr(torch.ops.dsv4, name)(*arguments)
    real = getattr(torch.ops.dsv4, name)(
        *(value.clone() if name.endswith("_") else value for value in SAMPLES[name][:1]), *SAMPLES[name][1:]
    )
    if real is not None:
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_every_operator_of_the_component_is_checked() -> None:
    public = {getattr(torch.ops.dsv4, name).default._schema.name for name in (*scales.__all__, "zero_pad_rows_")}
    assert public == {f"dsv4::{name}" for name in SAMPLES}
    assert set(SAMPLES) <= set(ops.names())


def test_all_layouts_and_sizes_share_one_graph() -> None:
    compiled._graph.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    for rows in (1, 2, 5, 128, 130):
        for groups in (1, 2, 4, 8, 20):
            with use("inductor"):
                byte = some_bytes(rows, groups)
                scales.unpack_ue8m0(scales.pack_ue8m0(byte), groups)
                tiles = scales.swizzle_128x4(byte)
                scales.packed_from_128x4(tiles, rows)
                scales.unswizzle_128x4(tiles, rows, groups)
                with torch.inference_mode():
                    scales.pack_ue8m0(some_bytes(rows, groups))
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


def test_public_functions_compile_into_a_caller() -> None:
    def chain(byte: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        words = scales.pack_ue8m0(byte)
        scales.zero_pad_rows(words, live, scale_layout="packed", out=words)
        return scales.packed_to_128x4(words), scales.unpack_ue8m0(scales.restride_rows(words, 256), byte.shape[1])

    whole = torch.compile(chain, fullgraph=True, backend="aot_eager")
    for rows, groups in ((130, 8), (7, 8), (200, 12)):
        byte = some_bytes(rows, groups)
        for got, want in zip(whole(byte, torch.tensor(3)), chain(byte, torch.tensor(3)), strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


word = partial(torch.zeros, dtype=torch.int32)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "numbers as scales": (lambda: scales.pack_ue8m0(torch.ones(2, 4)), "scales: got float32; must be e8m0 or uint8. encode_e8m0"),
    "one dimension": (lambda: scales.swizzle_128x4(some_bytes(4)), r"scales: got shape \[4\]; must have shape \[..., rows, groups\]"),
    "groups of other words": (lambda: scales.unpack_ue8m0(word(3, 2), 9), "groups: got 9; 2 words hold 5 to 8 groups"),
    "rows of other tiles": (lambda: scales.unswizzle_128x4(word(1, 2, 32, 4), 129, 8), r"must have shape \[..., 2, 2, 32, 4\]"),
    "a short buffer": (lambda: scales.unswizzle_128x4(some_bytes(1023), 129, 4), r"swizzled: got shape \[1023\]; must have shape \[1024\]"),
    "tiles of other rows": (lambda: scales.packed_from_128x4(word(1, 2, 32, 4), 129), r"must have shape \[2, words, 32, 4\]"),
    "too many live rows": (lambda: scales.zero_pad_rows(word(3, 2), 4, scale_layout="packed"), "live_rows: got 4; must be at most 3"),
    "negative live rows": (lambda: scales.zero_pad_rows(word(3, 2), -1, scale_layout="packed"), "live_rows: got -1; must be at least 0"),
    "two counts": (lambda: scales.zero_pad_rows(word(3, 2), word(2), scale_layout="packed"), r"live_rows: got shape \[2\]"),
    "another layout": (
        lambda: scales.zero_pad_rows(word(3, 2), 1, scale_layout="rows"),
        "scale_layout: got 'rows'; must be one of packed, 128x4",
    ),
    "out of other strides": (
        lambda: scales.zero_pad_rows(word(3, 2), 1, scale_layout="packed", out=word(3, 2)),
        r"out: got strides \(2, 1\); must have the strides of the layout, \(1, 4\)",
    ),
    "out of another shape": (
        lambda: scales.zero_pad_rows(word(3, 2), 1, scale_layout="packed", out=word(4, 2)),
        r"out: got shape \[4, 2\]; must have shape \[3, 2\]",
    ),
    "fewer rows": (lambda: scales.restride_rows(word(3, 2), 2), "rows: got 2; must be at least 3"),
    "part of a page": (lambda: scales.utccp_rows(word(130, 2)), "packed: got 130; must be a multiple of 128. It counts rows"),
    "part of 64 rows": (lambda: scales.interleave_hopper_fp4(some_bytes(1, 60, 4)), "scales: got 60; must be a multiple of 64"),
    "rows, not tiles": (lambda: scales.deinterleave_hopper_fp4(some_bytes(1, 64, 4)), r"must have shape \[experts, n/64, k/128, 16, 16\]"),
    "a gradient": (lambda: scales.align_mn_major(torch.ones(2, 4, requires_grad=True)), "scales: got a tensor that requires grad"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("impl", ["triton", "deepgemm", "flashinfer", "inductor", "eager"])
@pytest.mark.parametrize("rows", [*ROWS, 4100, 16384])
def test_every_backend_on_cuda(rows: int, impl: str, device: str) -> None:
    """M 10 rows 10 and 11. DeepGEMM has no pads to give; what is not installed says so."""
    from dsv4.fast import backends

    byte = some_bytes(rows, 160)
    there = {status.function for status in backends(device, prove=True) if status.backend == impl and status.usable}
    if not there & {"scales.pack_ue8m0", "scales.swizzle_128x4"}:
        pytest.skip(f"{impl} is not usable here")
    if "scales.pack_ue8m0" in there and impl == "deepgemm" and rows % 4:
        with pytest.raises(Unsupported, match="leaves pad words undefined"):
            scales.pack_ue8m0(byte.to(device), impl=impl)
    elif "scales.pack_ue8m0" in there:
        got = scales.pack_ue8m0(byte.to(device), impl=impl)
        assert got.stride() == (1, -(-rows // 4) * 4)
        assert np.array_equal(memory_of(got)[: len(packed_memory(byte.numpy()))], packed_memory(byte.numpy()))
    if "scales.swizzle_128x4" in there:
        assert np.array_equal(memory_of(scales.swizzle_128x4(byte.to(device), impl=impl)), tile_memory(byte.numpy()))


@pytest.mark.parametrize(("device", "impl"), [("cpu", "eager"), pytest.param("cuda", "triton", marks=CUDA.marks)])
def test_a_row_does_not_depend_on_how_many_there_are(device: str, impl: str) -> None:
    """LN-05: rows 1 to 300 of one vector, none of whose bytes is zero."""
    vector = (some_bytes(1, 64) | 1).to(device)
    with use(impl):
        for rows in range(1, 301):
            byte = vector.expand(rows, 64)
            tiles, words = scales.swizzle_128x4(byte), scales.pack_ue8m0(byte)
            for back in (scales.unswizzle_128x4(tiles, rows, 64), scales.unpack_ue8m0(words, 64)):
                assert torch.equal(back.view(torch.uint8), byte)
