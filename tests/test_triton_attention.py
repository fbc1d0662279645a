"""The attention kernels without a GPU: in the interpreter, in a process of its own, against the reference; and compiled for SM80 to SM90.
On a GPU the first run there, and on SM90 the kernels of `attention_hopper` too."""

import pytest
import torch

from dsv4.fast.kv_bodies import paged
from dsv4.formats import KV_LAYOUT_PAIRS, KV_LAYOUTS
from dsv4.reference import attention as reference
from dsv4.reference.kv_cache import quantize_kv
from dsv4.types import PagedRows
from interpreted import INTERPRETED, passes

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dsv4.fast.kernels import attention  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
kernel = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in its own process, or on a GPU")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
PAGES, PAGE = 5, 4  # of a list
PAIRS = [(name, name) for name in KV_LAYOUTS] + list(KV_LAYOUT_PAIRS)
HALF_ULP = 2.0**-8  # of bf16, twice: of the output, and of the weights of the product
FP32 = 2.0**-20


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_kernels_in_the_interpreter():
    passes(__file__, least=34)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed)).bfloat16()


def ints(least, past, *shape, seed=0, dtype=torch.int32):
    return torch.randint(least, past, shape, generator=generator(seed), dtype=dtype)


def pages_of(layout, slots, *, page_size=PAGE, gap=0, offset=0, seed=0):
    """Pages with ordinary rows in the slots that `slots` names and NaN in every other byte, `gap` bytes apart, from a byte `offset` on."""
    total = PAGES * page_size
    records = quantize_kv(numbers(total, 512, seed=seed), layout=layout)
    named = torch.zeros(total, dtype=torch.bool)
    named[slots[(slots >= 0) & (slots < total)].long()] = True
    pages = paged(torch.where(named[:, None], records, 0x7F), KV_LAYOUTS[layout], page_size)
    width = pages.shape[1]
    memory = torch.full((offset + PAGES * (width + gap),), 0x7F, dtype=torch.uint8)
    memory.as_strided(pages.shape, (width + gap, 1), offset).copy_(pages)
    return memory.to(DEVICE).as_strided(pages.shape, (width + gap, 1), offset)


def run(launch, q, *lists, sink=None, scale=0.05, splits=1):
    """The results of a launch; parts begin as NaN."""
    output = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:2], torch.nan, device=q.device)
    parts, lses = (torch.full((splits, *q.shape[: 3 - last]), torch.nan, device=q.device) for last in (0, 1))
    extra = lists[1] if len(lists) > 1 else (None,) * len(lists[0])
    launch(q, *lists[0], *extra, sink, scale, output, lse, splits=splits, parts=parts, part_lses=lses)
    return output, lse


def close(got, expected):
    """Within the roundings of the weights and of the output; rows without picks are bytes."""
    output, lse = got
    assert torch.equal(lse == -torch.inf, expected.lse == -torch.inf)
    empty = expected.lse == -torch.inf
    assert torch.equal(output[empty], torch.zeros_like(output[empty]))
    there = ~empty
    assert ((lse - expected.lse)[there].abs() <= FP32 * (1 + expected.lse[there].abs())).all()
    largest = expected.output.float().abs().amax(-1, keepdim=True)
    assert ((output.float() - expected.output.float()).abs() <= 2 * HALF_ULP * (largest + 2.0**-6)).all()


def paged_list(pages, layout, slots, lengths=None, *, page_size=PAGE):
    return pages, KV_LAYOUTS[layout], page_size, slots, lengths


@kernel
@pytest.mark.parametrize(("layout", "extra"), PAIRS)
@pytest.mark.parametrize("splits", [1, 3])
def test_two_lists_of_pages(layout, extra, splits):
    """Absent picks anywhere, duplicates, lengths past either end, a row without picks, NaN in every slot that nobody named."""
    q, sink = numbers(4, 5, 512, seed=1).to(DEVICE), torch.linspace(-3, 4, 5, device=DEVICE)
    slots, others = ints(-3, PAGES * PAGE + 3, 4, 70, seed=2), ints(-9, PAGES * PAGE + 3, 4, 37, seed=3)
    slots[3], others[3] = -1, PAGES * PAGE
    lengths, more = torch.tensor([70, 3, -2, 90], dtype=torch.int32), torch.tensor([0, 37, 36, 5], dtype=torch.int32)
    main = pages_of(layout, slots, seed=4)
    second = pages_of(extra, others, page_size=2 * PAGE, gap=48, seed=5)
    slots, others, lengths, more = (each.to(DEVICE) for each in (slots, others, lengths, more))
    lists = (paged_list(main, layout, slots, lengths), paged_list(second, extra, others, more, page_size=2 * PAGE))
    options = {"lengths": lengths, "extra": PagedRows(second, extra, 2 * PAGE), "extra_slots": others, "extra_lengths": more, "scale": 0.05}
    for bias in (None, sink):
        expected = reference.paged_attention(q, PagedRows(main, layout, PAGE), slots, bias, **options)
        close(run(attention.attend_paged, q, *lists, sink=bias, splits=splits), expected)


@kernel
@pytest.mark.parametrize("wide", [0, 1])
def test_lists_of_two_integer_types(wide):
    """A slot that only fits 64 bits is absent, though the other list has 32."""
    q = numbers(2, 3, 512, seed=21).to(DEVICE)
    slots, others = ints(0, PAGES * PAGE, 2, 6, seed=22), ints(0, PAGES * PAGE, 2, 5, seed=23)
    main, second = pages_of("v4", slots, seed=24), pages_of("v4", others, seed=25)
    found = [slots.to(DEVICE), others.to(DEVICE)]
    found[wide] = found[wide].long()
    found[wide][:, 1] += 2**32
    options = {"extra": PagedRows(second, "v4", PAGE), "extra_slots": found[1], "scale": 0.05}
    expected = reference.paged_attention(q, PagedRows(main, "v4", PAGE), found[0], **options)
    close(run(attention.attend_paged, q, paged_list(main, "v4", found[0]), paged_list(second, "v4", found[1])), expected)


@kernel
@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_pages_anywhere(layout):
    """Any distance, any alignment, slots of 64 bits, queries that lie apart, heads from 1 to more than a program's."""
    slots = ints(-1, PAGES * PAGE, 2, 9, seed=6, dtype=torch.int64)
    for heads, gap, offset in ((1, 29, 13), (17, 2, 2), (70, 0, 4), (64, 16, 16)):
        pages = pages_of(layout, slots, gap=gap, offset=offset, seed=7)
        q = numbers(2, heads, 1024, seed=8).to(DEVICE)[:, :, 100:612]
        expected = reference.paged_attention(q, PagedRows(pages, layout, PAGE), slots.to(DEVICE), scale=0.05)
        close(run(attention.attend_paged, q, paged_list(pages, layout, slots.to(DEVICE))), expected)


@kernel
def test_lists_as_libraries_take_them():
    from dsv4.fast.attention_bodies import within
    from dsv4.fast.kernels.attention_lists import put

    for dtype, width in ((torch.int32, 5), (torch.int64, 1100)):
        picks, lengths = ints(-3, 60, 4, 2 * width, seed=width, dtype=dtype), ints(-2, width + 3, 4).to(DEVICE)
        picks[0, 0] = torch.iinfo(dtype).max
        picks = picks.to(DEVICE)[:, ::2]
        for given in (None, lengths):
            target = torch.full((4, 1280), 7, dtype=torch.int32, device=DEVICE)[:, : width + 3]
            put(picks, given, 50, target, -1)
            assert torch.equal(target[:, :width].long(), within(picks, given, 50).long())
            assert (target[:, width:] == -1).all()


@kernel
def test_strides_and_alignment_change_no_bit():
    """A sink and lengths with a stride, queries and rows that begin at odd addresses."""
    q, rows, picks = numbers(3, 5, 64, seed=1).to(DEVICE), numbers(40, 64, seed=2).to(DEVICE), ints(-1, 40, 3, 9, seed=3).to(DEVICE)
    sink, lengths = numbers(10, seed=4).float().to(DEVICE)[::2], ints(0, 9, 6, seed=5).to(DEVICE)[::2]
    plain = run(attention.attend_rows, q, (rows, picks, lengths.contiguous()), sink=sink.contiguous(), splits=2)
    odd = [torch.empty(one.numel() + 1, dtype=one.dtype, device=one.device)[1:].view(one.shape).copy_(one) for one in (q, rows)]
    for queries, keys in ((q, rows), odd):
        for one, other in zip(plain, run(attention.attend_rows, queries, (keys, picks, lengths), sink=sink, splits=2), strict=True):
            assert torch.equal(one, other)


@kernel
@pytest.mark.parametrize("dim", [64, 256, 512])
@pytest.mark.parametrize("splits", [1, 2])
def test_rows(dim, splits):
    q, sink = numbers(3, 6, dim, seed=1).to(DEVICE), torch.tensor([-torch.inf, torch.inf, 0.0, 1.0, 80.0, -80.0], device=DEVICE)
    picks, more = ints(-2, 22, 3, 66, seed=2), ints(-1, 9, 3, 5, seed=3)
    kv, rest = numbers(20, dim, seed=4), numbers(12, dim + 8, seed=5)[:, :dim]
    kv[~torch.isin(torch.arange(20), picks)] = torch.nan
    rest[~torch.isin(torch.arange(12), more)] = torch.nan
    kv, rest, picks, more = (each.to(DEVICE) for each in (kv, rest, picks, more))
    for lists in (((kv, picks, None),), ((kv, picks, None), (rest, more, torch.tensor([5, 0, 2], dtype=torch.int32, device=DEVICE)))):
        extra = dict(zip(("extra_kv", "extra_indices", "extra_lengths"), lists[1], strict=True)) if len(lists) > 1 else {}
        expected = reference.sparse_attention(q, kv, picks, sink, scale=0.05, **extra)
        close(run(attention.attend_rows, q, *lists, sink=sink, splits=splits), expected)


@kernel
def test_a_nan_stays_with_its_token():
    kv, q = numbers(8, 512).to(DEVICE), numbers(3, 2, 512, seed=1).to(DEVICE)
    kv[5, 3] = torch.nan
    picks = torch.tensor([[0, 1, 2], [1, 5, 2], [3, -1, 4]], dtype=torch.int32, device=DEVICE)
    output, lse = run(attention.attend_rows, q, (kv, picks, None))
    assert output[1].isnan().all() and lse[1].isnan().all()  # noqa: PT018
    assert output[[0, 2]].isfinite().all() and lse[[0, 2]].isfinite().all()  # noqa: PT018


@kernel
def test_merging_parts():
    outputs, lses = numbers(5, 2, 3, 64).float().to(DEVICE), numbers(5, 2, 3, seed=1).float().to(DEVICE) * 20
    lses[1] = -torch.inf
    outputs[1] = torch.nan
    lses[:, 1, 0] = -torch.inf
    sink = torch.tensor([0.0, torch.inf, -torch.inf], device=DEVICE)
    for parts in (outputs, outputs.bfloat16()):
        for bias in (None, sink):
            got = torch.full((2, 3, 64), torch.nan, dtype=torch.bfloat16, device=DEVICE), torch.full((2, 3), torch.nan, device=DEVICE)
            attention.merge(parts, lses, bias, *got)
            close(got, reference.merge_splits(parts, lses, bias))


class Launches:
    """Stands for a kernel and keeps what it is called with."""

    def __init__(self):
        self.given = None

    def __getitem__(self, grid):
        return self.keep

    def keep(self, *arguments, **options):
        self.given = options


def launched(monkeypatch, module, name, layout, splits):
    """What a launch over one list of rows or two lists of pages gives the kernel `name` of a module."""
    launches = Launches()
    monkeypatch.setattr(module, name, launches)
    monkeypatch.setattr(attention, "merge", lambda *_: None)
    q, slots, lengths = numbers(2, 64, 512), ints(0, 9, 2, 70), ints(0, 70, 2)
    if layout is None:
        run(attention.attend_rows, q, (numbers(9, 512), slots, lengths), splits=splits)
    else:
        lists = [(pages_of(one, slots).cpu(), KV_LAYOUTS[one], PAGE, slots, lengths) for one in layout]
        run(attention.attend_paged, q, *lists, sink=torch.zeros(64), splits=splits)
    return launches.given


TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8"}


def built(source, function, given, capability):
    """A kernel for a capability, all pointers aligned: its binary is there, or ptxas has failed."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(function.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(place,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    options = {"num_warps": given["num_warps"]}
    return triton.compile(source(function, signature, constants, attributes), target=GPUTarget("cuda", capability, 32), options=options)


SHARED = {80: 166912, 89: 101376, 90: 232448}  # bytes a program can have


@compiled
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("layout", [("v4", "v4"), ("v41", "v41_fp4"), None], ids=str)
def test_kernels_compile_and_leave_e4m3_alone_where_there_is_none(monkeypatch, layout, capability):
    function, native = attention.attend_kernel, capability >= 89
    monkeypatch.setattr(attention, "_has_little_memory", lambda _: capability == 89)
    monkeypatch.setattr(attention, "_fits_hopper", lambda *_: False)
    given = launched(monkeypatch, attention, "attend_kernel", layout, 1) | {"COMPILED": True, "NATIVE": native}
    kernel = built(ASTSource, function, given, capability)
    assert ("e4m3x2" in kernel.asm["ptx"]) == (native and layout is not None)
    assert kernel.metadata.shared <= SHARED[capability]


@compiled
@pytest.mark.parametrize(("layout", "splits"), [(("v4", "v4"), 1), (("v41", "v41_fp4"), 2), (None, 1)], ids=str)
def test_kernels_of_sm90_compile(monkeypatch, layout, splits):
    """Two warpgroups that share products with M of 64, no more memory than there is, hardly a register in local memory."""
    hopper = pytest.importorskip("dsv4.fast.kernels.attention_hopper")
    from triton.experimental.gluon._runtime import GluonASTSource

    monkeypatch.setattr(attention, "_fits_hopper", lambda *_: True)
    monkeypatch.setattr(attention, "_capability", lambda _: ((9, 0), 132))
    name = "rows_kernel" if layout is None else "paged_kernel"
    function = getattr(hopper, name)
    kernel = built(GluonASTSource, function, launched(monkeypatch, hopper, name, layout, splits), 90)
    assert "wgmma.mma_async.sync.aligned.m64n128k16" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED[90]
