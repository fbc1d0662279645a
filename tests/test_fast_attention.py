"""Fast attention: the reference bit for bit on the CPU, the calls of every library and kernel, plans, dispatch, operators, refusals."""

import inspect

import pytest
import torch
from torch._dynamo.utils import counters

from dsv4.fast import attention as fast
from dsv4.fast import attention_bodies, attention_engines, attention_ops, compiled, use
from dsv4.formats import KV_LAYOUT_PAIRS, KV_LAYOUTS
from dsv4.reference import attention as reference
from dsv4.reference.kv_cache import store_kv
from dsv4.types import ArgumentError, AttentionResult, BackendUnavailable, PagedRows, Unsupported
from tests.attention_libraries import cache, generator, normal, our_kernels, picks_of, programs, queries, same

CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
WAYS = ("inductor", "eager")
FUNCTIONS = ("sparse_attention", "paged_attention", "decode_attention", "prefill_attention")
PICKS = (64, 128, 133, 192, 256, 512, 513, 1024, 1152)  # SA-07
HEADS = (8, 16, 32, 64, 128)
PAIRS = (*((name, name) for name in KV_LAYOUTS), *KV_LAYOUT_PAIRS)
every_way = pytest.mark.parametrize("impl", WAYS)


# The reference, bit for bit, on the CPU


SHAPES = [(1, 1, 64, 1, 1), (3, 8, 64, 133, 50), (17, 3, 96, 700, 40), (2, 16, 512, 64, 9)]


@pytest.mark.parametrize(("impl", "shape"), [*(("eager", shape) for shape in SHAPES), ("inductor", (9, 4, 64, 70, 50))])
def test_rows(impl, shape):
    tokens, heads, dim, picks, rows = shape
    q, kv, sink = queries(tokens, heads, dim), normal(rows, dim).bfloat16(), normal(heads)
    indices, extra = picks_of(rows, tokens, picks), picks_of(rows, tokens, picks + 20, seed=7)
    lengths = torch.randint(-2, picks + 3, (tokens,), dtype=torch.int32, generator=generator(3))
    indices[-1] = -1
    for more in (
        {},
        {"sink": sink, "scale": 0.3},
        {"lengths": lengths},
        {"sink": sink, "lengths": lengths, "extra_kv": kv.flip(0), "extra_indices": extra, "extra_lengths": lengths + 20},
        {"sink": torch.tensor([torch.inf, -torch.inf, 0.0, 300.0])[torch.arange(heads) % 4]},
        {"extra_kv": kv[:0], "extra_indices": extra},
    ):
        same(fast.sparse_attention(q, kv, indices, **more, impl=impl), reference.sparse_attention(q, kv, indices, **more))


@every_way
def test_nothing_to_attend_to(impl):
    """SA-13: empty rows are zeros and -inf whatever the sink; neighbours do not change."""
    q, kv = queries(4, 4, 64), normal(5, 64).bfloat16()
    sink = torch.tensor([torch.nan, torch.inf, 0.0, -torch.inf])
    for rows, indices in ((kv[:0], picks_of(5, 4, 3)), (kv, picks_of(5, 4, 0)), (kv, torch.full((4, 3), -1, dtype=torch.int32))):
        got = fast.sparse_attention(q, rows, indices, sink, impl=impl)
        assert not got.output.any()
        assert (got.lse == -torch.inf).all()
    indices = picks_of(5, 4, 70).clamp(0, 4)
    whole = fast.sparse_attention(q, kv, indices, impl=impl)
    mixed = fast.sparse_attention(q, kv, torch.where(torch.tensor([0, 1, 0, 1])[:, None] == 1, indices, -1), impl=impl)
    same(AttentionResult(*(part[1::2].contiguous() for part in mixed)), [part[1::2].contiguous() for part in whole])
    same(fast.sparse_attention(q[:0], kv, indices[:0], impl=impl), reference.sparse_attention(q[:0], kv, indices[:0]))


@every_way
def test_specials_stay_with_their_token(impl):
    """Rows of NaN and infinities reach who picks them alone; those that are not there, or lie past a length, reach nobody."""
    q, kv = queries(3, 4, 64), normal(70, 64).bfloat16()
    poisoned = kv.clone()
    poisoned[0], poisoned[69], poisoned[33] = torch.nan, torch.inf, torch.nan
    indices = picks_of(1, 3, 65, seed=2) * 0 + torch.arange(1, 66, dtype=torch.int32)
    indices[indices == 33] = -1
    indices[0, 60:] = torch.tensor([0, 69, 33, 0, 0])
    lengths = torch.tensor([60, 65, 65], dtype=torch.int32)
    got = fast.sparse_attention(q, poisoned, indices, lengths=lengths, impl=impl)
    same(got, fast.sparse_attention(q, kv, indices, lengths=lengths, impl=impl))
    wrong = fast.sparse_attention(q, poisoned, indices, impl=impl)
    assert wrong.output[0].isnan().all()
    same(AttentionResult(wrong.output[1:], wrong.lse[1:]), (got.output[1:], got.lse[1:]))


@every_way
def test_infinite_scores_are_as_the_formula_has_them(impl):
    """+inf is the largest score m, and inf - m is NaN; -inf has no weight, and 0 times infinity is NaN."""
    q, kv = torch.ones(6, 1, 64).bfloat16(), torch.ones(3, 64).bfloat16()
    kv[1], kv[2] = torch.inf, -torch.inf
    indices = torch.tensor([[0, 1], [1, -1], [1, 2], [0, 2], [2, -1], [0, 0]], dtype=torch.int32)
    got, expected = fast.sparse_attention(q, kv, indices, impl=impl), reference.sparse_attention(q, kv, indices)
    assert expected.lse[:3].isnan().all()
    assert (expected.lse[3], expected.lse[4]) == (8.0, -torch.inf)
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    parts, lses = normal(2, 3, 1, 64).bfloat16(), torch.tensor([[0.0, torch.inf, -torch.inf], [torch.inf, torch.inf, 0.0]])[..., None]
    merged = fast.merge_splits(parts, lses, impl=impl), reference.merge_splits(parts, lses)
    assert merged[1].lse.isnan().squeeze(1).tolist() == [True, True, False]
    for one, other in zip(*merged, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@every_way
@pytest.mark.parametrize(("main", "extra"), PAIRS)
def test_pages(impl, main, extra):
    """SA-05: pages that lie apart. Slots of both dtypes, out of range on both sides; lengths; whole calls of every function."""
    rows, others = cache(main, 8, gap=24), cache(extra, 4, 6)
    q, sink = queries(5, 4), normal(4)
    slots, more = picks_of(32, 5, 70, dtype=torch.int64), picks_of(24, 5, 90, seed=2)
    lengths = torch.tensor([0, 70, 3, 71, -1], dtype=torch.int32)
    for options in ({}, {"lengths": lengths, "extra": others, "extra_slots": more, "extra_lengths": lengths + 5}):
        expected = reference.paged_attention(q, rows, slots, sink, **options)
        for function in (fast.paged_attention, fast.decode_attention, fast.prefill_attention):
            same(function(q, rows, slots, sink, **options, impl=impl), expected)


@every_way
def test_bytes_of_nan_in_slots_that_nobody_picks(impl):
    rows = cache("v4", 8)
    clean = fast.paged_attention(queries(2, 4), rows, slots := torch.arange(1, 31).repeat(2, 1), impl=impl)
    rows.pages[0, :576] = 0xFF
    rows.pages[0, 8 * 576 : 8 * 576 + 8] = 0xFF
    rows.pages[3, 7 * 576 : 8 * 576] = 0xFF
    slots[1, 5:9] = -1
    got = fast.paged_attention(queries(2, 4), rows, slots, impl=impl)
    assert torch.equal(got.output[0], clean.output[0])
    assert got.output.isfinite().all()


@every_way
def test_pages_beyond_int32(impl):
    """SA-08: bytes past 2^31. Memory that nobody touches takes none."""
    pages = torch.empty(63552, 33792, dtype=torch.uint8)
    rows = normal(3, 512).bfloat16()
    slots = torch.tensor([[0, 64 * 63550 + 63, 64 * 63551]])
    for row, slot in zip(rows, slots[0].tolist(), strict=True):
        page, place = divmod(slot, 64)
        pages[page : page + 1] = store_kv(row[None], pages[page : page + 1], torch.tensor([place]), layout="v41", page_size=64)
    small = PagedRows(torch.stack([pages[0], pages[63550], pages[63551]]), "v41", 64)
    expected = reference.paged_attention(queries(1, 4), small, torch.tensor([[0, 127, 128]]))
    same(fast.paged_attention(queries(1, 4), PagedRows(pages, "v41", 64), slots, impl=impl), expected)


@every_way
@pytest.mark.parametrize("block", [1, 5])
def test_drafts(impl, block):
    rows, q, own = cache("v41", 8), queries(3 * block, 4), normal(3 * block, 512, seed=9).bfloat16()
    slots, sink = picks_of(32, 3 * block, 80), normal(4)
    lengths = torch.arange(3 * block, dtype=torch.int32) * 3
    for count in (3 * block, block, 0):
        given = q[:count], own[:count], rows, slots[:count], sink
        more = {"block": block, "lengths": lengths[:count]}
        same(fast.draft_attention(*given, **more, impl=impl), reference.draft_attention(*given, **more))
    same(
        fast.draft_attention(q, own, rows, slots[:, :0], block=block, impl=impl),
        reference.draft_attention(q, own, rows, slots[:, :0], block=block),
    )


@every_way
def test_merges(impl):
    outputs, lses = normal(4, 5, 4, 64), normal(4, 5, 4, seed=2)
    lses[1], outputs[1], lses[:, 2] = -torch.inf, torch.nan, -torch.inf
    for sink in (None, normal(4, seed=4), torch.tensor([torch.inf, -torch.inf, 0.0, 80.0])):
        for parts in (outputs, outputs.bfloat16(), outputs[:, :0], -outputs.abs() * 0):
            same(
                fast.merge_splits(parts, lses[:, : parts.shape[1]], sink, impl=impl),
                reference.merge_splits(parts, lses[:, : parts.shape[1]], sink),
            )


@every_way
def test_parts_of_a_list_are_the_list(impl):
    """On equal scores of small whole numbers, where a part's mean is exact."""
    q, kv, sink = torch.zeros(3, 4, 64, dtype=torch.bfloat16), normal(200, 64).mul(2).round().bfloat16(), torch.zeros(4)
    indices = picks_of(200, 3, 256).clamp(0, 199)
    indices[1, 64:128] = -1
    parts = [fast.sparse_attention(q, kv, indices[:, first : first + 64], impl=impl) for first in range(0, 256, 64)]
    merged = fast.merge_splits(*(torch.stack(part) for part in zip(*parts, strict=True)), sink, impl=impl)
    same(merged, reference.sparse_attention(q, kv, indices, sink))


@every_way
def test_windows(impl):
    """SA-10: position 1900 sees 1773 to 1900, whatever stands there."""
    positions = torch.tensor([0, 1, 127, 128, 1900, -1, 2**31 - 1, 2**31, -(2**40)])
    for window in (1, 128):
        got = fast.window_indices(positions, window=window, impl=impl)
        assert torch.equal(got, reference.window_indices(positions, window=window))
    least = -(2**63)
    positions = torch.tensor([0, 2**63 - 1, least, least + 1, least + 126, least + 127])  # places before the least wrap
    assert (fast.window_indices(positions, impl=impl)[1:] == -1).all()
    assert fast.window_indices(torch.tensor([1900], dtype=torch.int32), impl=impl)[0].tolist() == list(range(1773, 1901))
    assert fast.window_indices(positions[:0], impl=impl).shape == (0, 128)


def test_conversions_of_lse():
    lse, sink = torch.tensor([[0.0, -torch.inf, 3.7], [torch.inf, -50.0, torch.nan]]), torch.tensor([1.0, -torch.inf, torch.inf])
    assert torch.equal(fast.lse_flashmla(lse).nan_to_num(7.0), reference.lse_flashmla(lse).nan_to_num(7.0))
    assert torch.allclose(fast.lse_base2(lse), reference.lse_base2(lse), rtol=0, atol=0, equal_nan=True)
    for one in (sink, -sink, normal(3)):
        assert torch.allclose(fast.lse_with_sink(lse, one), reference.lse_with_sink(lse, one), rtol=0, atol=0, equal_nan=True)


def test_scratch_is_bounded_whatever_the_number_of_tokens(monkeypatch):
    """What blocks and decoded rows take beside inputs and results, at 4 and at 400 tokens; of smaller chunks, less."""
    blocks, decoded = [], []

    def watched(body, *tensors, **options):
        results = compiled.run_eagerly(body, *tensors, **options)
        if body is attention_bodies.weigh_body:
            queries_and_sums = 3 * results[2].numel() * 512 * 8  # of all tokens and heads, with the product with the values
            blocks.append(sum(tensor.nbytes for tensor in (*tensors[:4], *results)) + queries_and_sums + tensors[1].numel() * 512 * 10)
        elif body not in (attention_bodies.gather_body, attention_bodies.finish_body):
            decoded.append(8 * results.nbytes)
        return results

    def attend(tokens, *lists):
        blocks.clear()
        attention_bodies.attend(watched, queries(tokens, 2), list(lists), None, 0.1)
        return max(blocks)

    rows, kv = cache("v41", 64, 32), normal(300, 512).bfloat16()
    for tokens in (4, 400):
        paged = attention_bodies.PagedPicks(*rows, picks_of(2048, tokens, 320), None)
        assert attend(tokens, paged) <= attention_bodies.CHUNK_BYTES
        assert attend(tokens, attention_bodies.Picks(kv, picks_of(300, tokens, 320), None)) <= attention_bodies.CHUNK_BYTES
    packed = attention_bodies.ROWS * 1024
    assert max(decoded) + max(blocks) + packed <= attention_bodies.SCRATCH_BYTES
    whole = attend(400, paged)
    monkeypatch.setattr(attention_bodies, "CHUNK_BYTES", attention_bodies.CHUNK_BYTES // 4)
    assert attend(400, paged) < whole / 2


# Operators and graphs


def samples():
    q, kv, indices, sink = queries(2, 2, 64), normal(9, 64).bfloat16(), picks_of(9, 2, 4), normal(2)
    lengths = torch.tensor([2, 4], dtype=torch.int32)
    pages, slots, wide = cache("v4", 2), picks_of(8, 2, 3), queries(2, 2)
    over = (wide, *pages, slots, sink, lengths, None, "", 0, None, None, 0.1)
    return {
        "sparse_attention": (q, kv, indices, sink, lengths, kv, indices, None, 0.1),
        "paged_attention": over,
        "decode_attention": over,
        "prefill_attention": (wide, *pages, slots, None, None, *cache("v4", 2), slots, lengths, 0.1),
        "draft_attention": (wide, normal(2, 512).bfloat16(), *pages, slots, sink, 2, None, 0.1),
        "merge_splits": (normal(2, 3, 2, 8), normal(2, 3, 2), sink),
        "window_indices": (torch.tensor([3, 200]), 8),
    }


@pytest.mark.parametrize("name", samples())
def test_operators_keep_their_promises(name):
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, (*samples()[name], "eager"))


def test_a_layer_is_one_graph():
    rows = cache("v4", 64, 2)

    def step(q, positions, pages, own, sink):
        main = PagedRows(pages, "v4", 64)
        window = fast.window_indices(positions, window=8, impl="eager")
        first = fast.decode_attention(q, main, window, impl="eager")
        second = fast.sparse_attention(q, own, window % 4, impl="eager")
        parts = (torch.stack(part) for part in zip(first, second, strict=True))
        merged = fast.merge_splits(*parts, sink, impl="eager")
        return merged.output, fast.lse_with_sink(merged.lse, sink), fast.draft_attention(q, own, main, window, block=2, impl="eager").output

    given = queries(4, 2), torch.tensor([0, 5, 20, 90]), rows.pages, normal(4, 512).bfloat16(), normal(2)
    for got, expected in zip(torch.compile(step, fullgraph=True, backend="aot_eager")(*given), step(*given), strict=True):
        assert torch.equal(got, expected)


def test_graphs_per_function():
    """Two for a block, before and after its product, and one for the end, for any number of tokens and rows; a list of another width has a
    block of its own.
    """
    before = counters["stats"]["unique_graphs"]
    for tokens, rows in ((1, 5), (2, 300), (33, 17)):
        q, kv = queries(2 * tokens, 3, 96)[::2], normal(2 * rows, 96).bfloat16()[::2]
        for picks in (40, 60):
            with torch.inference_mode(tokens == 2):
                fast.sparse_attention(q, kv, picks_of(rows, tokens, picks), normal(3), impl="inductor")
    assert counters["stats"]["unique_graphs"] - before <= 3


# Kernels of our own, spied on


kernels = pytest.fixture(our_kernels)


@pytest.mark.parametrize("picks", PICKS)
@pytest.mark.parametrize("heads", HEADS)
def test_sa_07_our_kernels_take_every_number_of_heads_and_picks(kernels, heads, picks):
    q, kv = queries(1, heads, 64), normal(30, 64).bfloat16()
    indices = picks_of(30, 1, picks)
    same(fast.sparse_attention(q, kv, indices, impl="triton"), reference.sparse_attention(q, kv, indices))
    assert kernels.calls == [("rows", (1, heads, 64), (1, picks), 1)]


def test_launches_over_pages(kernels, monkeypatch):
    rows, others = cache("v41", 8), cache("v41_fp4", 4)
    q, sink, slots, more = queries(4, 8), normal(8), picks_of(32, 4, 128), picks_of(16, 4, 512, seed=3)
    lengths = torch.tensor([1, 128, 0, 7], dtype=torch.int32)
    options = {"lengths": lengths, "extra": others, "extra_slots": more.long(), "extra_lengths": lengths}
    expected = reference.paged_attention(q, rows, slots, sink, **options)
    programs(monkeypatch, 132)
    for function, splits in ((fast.paged_attention, 1), (fast.prefill_attention, 1), (fast.decode_attention, 16)):
        same(function(q, rows, slots, sink, **options, impl="triton"), expected)
        assert kernels.calls[-1] == ("paged", (4, 8, 512), (4, 128), splits)
    with use(batch_invariant=True):
        same(fast.decode_attention(q, rows, slots, sink, **options), expected)
    assert kernels.calls[-1][-1] == 1
    same(
        fast.decode_attention(q, rows, slots[:, :0], extra=others, extra_slots=more, impl="triton"),
        reference.paged_attention(q, others, more),
    )
    same(fast.decode_attention(q[:0], rows, slots[:0], impl="triton"), reference.paged_attention(q[:0], rows, slots[:0]))


@pytest.mark.parametrize(
    ("tokens", "heads", "picks", "splits"),
    [
        (1, 64, (128, 512), 16), (20, 64, (128, 512), 4),
        (1, 64, (128,), 2), (1, 8, (2048, 2048), 32), (16, 64, (128, 512), 8), (16, 128, (128, 512), 4),
        (66, 64, (128, 512), 2), (67, 64, (128, 512), 1), (128, 64, (128, 512), 1), (100_000, 128, (128, 512), 1), (1, 64, (0,), 1),
    ],
)  # fmt: skip
def test_the_rule_of_splits(tokens, heads, picks, splits):
    sizes = attention_engines.Sizes(tokens, heads, 512, picks, ("v4",) * len(picks), CPU, 0.1, True)
    assert attention_engines.splits_of(sizes, 132) == splits
    assert attention_engines.splits_of(sizes._replace(split=False), 132) == 1


def test_every_number_of_splits_has_a_number_of_tokens(monkeypatch):
    programs(monkeypatch, 132)
    sizes = attention_engines.Sizes(0, 64, 512, (128, 512), ("v4", "v4"), CPU, 0.1)
    found = attention_engines.tokens_of_splits(sizes)
    splits = [attention_engines.splits_of(sizes._replace(tokens=tokens, split=True), 132) for tokens in found]
    every = {attention_engines.splits_of(sizes._replace(tokens=tokens, split=True), 132) for tokens in range(1, 500)}
    assert splits == [16, 8, 4, 2, 1]
    assert every == set(splits)


def test_drafts_and_merges_of_our_kernels(kernels, monkeypatch):
    rows, q, own, sink = cache("v41", 8), queries(15, 4), normal(15, 512, seed=9).bfloat16(), normal(4)
    slots = picks_of(32, 15, 40)
    lengths = torch.arange(15, dtype=torch.int32) * 3
    expected = reference.draft_attention(q, own, rows, slots, sink, lengths=lengths)
    same(fast.draft_attention(q, own, rows, slots, sink, lengths=lengths, impl="triton"), expected)
    monkeypatch.setattr(attention_ops, "DRAFT_ROWS", 400)
    same(fast.draft_attention(q, own, rows, slots, sink, lengths=lengths, impl="triton"), expected)
    assert [call[1][0] for call in kernels.calls] == [15, 10, 5]
    same(fast.draft_attention(q[:0], own[:0], rows, slots[:0], impl="triton"), reference.draft_attention(q[:0], own[:0], rows, slots[:0]))
    assert len(kernels.calls) == 3
    outputs, lses = normal(3, 5, 4, 64), normal(3, 5, 4)
    same(fast.merge_splits(outputs.bfloat16(), lses, sink, impl="triton"), reference.merge_splits(outputs.bfloat16(), lses, sink))
    with pytest.raises(Unsupported, match="takes a power of two of numbers a head; got 48"):
        fast.merge_splits(outputs[..., :48], lses, impl="triton")


@pytest.mark.parametrize(("heads", "dim"), [(129, 64), (4, 32), (4, 96), (4, 1024)])
def test_what_our_kernels_refuse(kernels, heads, dim):
    q, kv, indices = queries(1, heads, dim), normal(3, dim).bfloat16(), picks_of(3, 1, 2)
    with pytest.raises(
        Unsupported, match=f"takes at most 128 heads of a power of two of numbers from 64 to 512; got {heads} heads of {dim}"
    ):
        fast.sparse_attention(q, kv, indices, impl="triton")
    same(fast.sparse_attention(q, kv, indices, impl="eager"), reference.sparse_attention(q, kv, indices))
    assert not kernels.calls


# Arguments


@pytest.mark.parametrize(("argument", "change"), [
    ("q", {"q": torch.zeros(2, 3, 512)}), ("sink", {"sink": torch.zeros(4)}), ("slots", {"slots": torch.zeros(3, 4, dtype=torch.int32)}),
    ("lengths", {"lengths": torch.zeros(2)}), ("extra_slots", {"extra_slots": torch.zeros(2, 4, dtype=torch.int32)}),
    ("scale", {"scale": -1.0}), ("q", {"q": queries(2, 3).requires_grad_()}),
])  # fmt: skip
def test_wrong_arguments(argument, change):
    good = {"q": queries(2, 3), "main": cache("v4", 2), "slots": picks_of(8, 2, 4)}
    with pytest.raises(ArgumentError) as caught:
        fast.decode_attention(**good | change)
    assert caught.value.argument == argument


@pytest.mark.parametrize(("argument", "change"), [
    ("out", tuple), ("out.lse", lambda out: out._replace(lse=out.lse[:1])),
    ("out.lse", lambda out: out._replace(lse=out.lse.requires_grad_())), ("out.output", lambda out: out._replace(output=out.output.mT)),
])  # fmt: skip
def test_buffers_that_do_not_fit_are_left_as_they_were(argument, change):
    plan = fast.plan_attention("decode", tokens=2, heads=3, picks=4, layout="v4", page_size=cache("v4", 2).page_size, device="cpu")
    good = AttentionResult(torch.full((2, 3, 512), 7.0, dtype=torch.bfloat16), torch.full((2, 3), 7.0))
    with pytest.raises(ArgumentError, match=rf"^{argument}: got "):
        plan.run(queries(2, 3), cache("v4", 2), picks_of(8, 2, 4), out=change(good))
    assert all((buffer == 7.0).all() for buffer in good)


def test_buffers_have_memory_of_their_own():
    main = cache("v4", 2)
    plan = fast.plan_attention("decode", tokens=2, heads=3, picks=4, layout="v4", page_size=main.page_size, device="cpu")
    memory = queries(3, 3)
    within = memory.view(torch.float32).view(-1)[:6].view(2, 3)
    for argument, q, out in (
        ("out.output: got memory of q", memory[:2], AttentionResult(memory[1:], torch.zeros(2, 3))),
        ("out.lse: got memory of q", memory[:2], AttentionResult(queries(2, 3), within)),
        ("out.lse: got memory of out.output", queries(2, 3), AttentionResult(memory[:2], within)),
    ):
        before = memory.clone()
        with pytest.raises(ArgumentError, match=f"^{argument}"):
            plan.run(q, main, picks_of(8, 2, 4), out=out)
        assert torch.equal(memory, before)
    beside = AttentionResult(memory[1:], within)  # of one storage, and apart
    same(plan.run(queries(2, 3), main, picks_of(8, 2, 4), out=beside), plan.run(queries(2, 3), main, picks_of(8, 2, 4)))


def test_a_plan_is_for_its_device():
    main = cache("v4", 2)
    plan = fast.plan_attention("decode", tokens=2, heads=3, picks=4, layout="v4", page_size=main.page_size, device="cpu")
    away = main._replace(pages=main.pages.to("meta"))
    with pytest.raises(ArgumentError, match=r"^q: got a tensor on meta; the plan is for cpu"):
        plan.run(queries(2, 3).to("meta"), away, picks_of(8, 2, 4).to("meta"))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="triton runs here")
def test_a_backend_that_cannot_run_is_named():
    with pytest.raises(BackendUnavailable, match="wants a CUDA device"):
        fast.decode_attention(queries(1, 3), cache("v4", 2), picks_of(8, 1, 4), impl="triton")


@pytest.mark.parametrize("name", [name for name in fast.__all__ if inspect.isfunction(getattr(fast, name))])
def test_signatures_equal_the_reference(name):
    ours, theirs = (inspect.signature(getattr(side, name)).parameters for side in (fast, reference))
    assert [parameter for key, parameter in ours.items() if key != "impl"] == list(theirs.values())
    assert set(fast.__all__) == set(reference.__all__)
