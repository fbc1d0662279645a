"""The reference attention: formulas by hand, literals, published functions, properties of lists and parts, reported bugs, refusals; and
what its contract is made of: bounds that the published algorithm keeps, lattices that are exact, mutants that are wrong in one place.
"""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv4.formats import KV_LAYOUT_PAIRS, KV_LAYOUTS
from dsv4.parity import attention_bounds, attention_inputs, contracts, engine
from dsv4.parity.candidates import Candidate
from dsv4.parity.contracts import Call
from dsv4.parity.exact import unrounded
from dsv4.parity.mutants import attention_softmax as made
from dsv4.parity.profiles import PROFILES
from dsv4.reference import attention
from dsv4.reference.kv_cache import load_kv, store_kv
from dsv4.reference.numerics import numerics
from dsv4.types import ArgumentError, AttentionResult, PagedRows

GOLDEN = Path(__file__).parent / "golden"
INF, NAN = float("inf"), float("nan")
CPU = torch.device("cpu")
PAIRS = [*((name, name) for name in KV_LAYOUTS), *KV_LAYOUT_PAIRS]
each_pair = pytest.mark.parametrize(("main", "extra"), PAIRS)


def draw(*shape, seed=0, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def ints(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def same(got, expected):
    """Both outputs, bit for bit."""
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
        assert torch.equal(one.view(integer), other.view(integer))


def by_hand(q, rows, sink, scale):
    """Output and lse of one token and head over a list of rows, one number at a time."""
    scores = [scale * math.fsum(a * b for a, b in zip(q, row, strict=True)) for row in rows]
    if not scores:
        return [0.0] * len(q), -INF
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = math.fsum(weights) + math.exp(sink - top)
    o = [math.fsum(w * row[d] for w, row in zip(weights, rows, strict=True)) / total for d in range(len(q))]
    return o, top + math.log(math.fsum(weights))


def fl32(value):
    return float(torch.tensor(value, dtype=torch.float64).float())


def paged(kv, layout, size=4, *, gap=0, seed=0, spare=2):
    """Rows at random slots of pages whose other bytes are 0xFF, and those slots."""
    count = -(-len(kv) // size) + spare
    slots = torch.randperm(count * size, generator=torch.Generator().manual_seed(seed))[: len(kv)]
    width = KV_LAYOUTS[layout].page_bytes(size)
    pages = torch.full((count, width + gap), 255, dtype=torch.uint8)[:, :width]
    pages.copy_(store_kv(kv, pages, slots, layout=layout, page_size=size))
    return PagedRows(pages, layout, size), slots


@pytest.mark.parametrize("scale", [None, 0.25, 0.0])
@pytest.mark.parametrize("two", [False, True])
def test_the_formula_by_hand(two, scale):
    q, kv, other = draw(3, 2, 8), draw(6, 8, seed=1), draw(4, 8, seed=2)
    indices, extra = ints([0, 5, -1, 5], [2, 9, 1, 0], [-1, -3, 6, 6]), ints([3, 3], [-1, 0], [7, 4])
    lengths, sink = ints(4, 3, 4), torch.tensor([0.5, -1.0])
    options = {"extra_kv": other, "extra_indices": extra} if two else {}
    got = attention.sparse_attention(q, kv, indices, sink, lengths=lengths, scale=scale, **options)
    factor = fl32(8**-0.5 if scale is None else scale)
    for t, (mine, others) in enumerate([([0, 5, 5], [3, 3]), ([2, 1], [0]), ([], [])]):
        rows = kv[mine].tolist() + (other[others].tolist() if two else [])
        for h in range(2):
            o, lse = by_hand(q[t, h].tolist(), rows, float(sink[h]), factor)
            assert got.output[t, h].tolist() == torch.tensor(o, dtype=torch.float64).float().bfloat16().tolist()
            assert float(got.lse[t, h]) == fl32(lse)


def test_literals():
    """Three rows with scores 0, ln 2 and ln 5 and a sink of ln 8: weights 1, 2, 5 of 16."""
    kv = torch.tensor([[0.0, 16.0, 0.0], [1.0, 0.0, 32.0], [2.0, -16.0, 0.0]]).bfloat16()
    q = torch.tensor([[[1.0, 0.0, 0.0]]]).bfloat16()
    got = attention.sparse_attention(q, kv, ints([0, 1, 2]), torch.tensor([math.log(9.0)]), scale=math.log(2))
    # weights 1, 2, 4, the sink 9: 16 in all
    assert got.output[0, 0].tolist() == [10 / 16, (16 - 64) / 16, 64 / 16]
    assert got.lse[0, 0].item() == fl32(math.log(7))
    without = attention.sparse_attention(q, kv, ints([0, 1, 2]), scale=math.log(2))
    assert without.output[0, 0, 2].item() == torch.tensor(64 / 7).bfloat16().item()
    same([without.lse], [got.lse])


def test_published_function():
    """V4's kernel on lists of 130 with holes, by DeepSeek's published code; in fp64 with one rounding, bit for bit."""
    golden = load_file(GOLDEN / "functions.safetensors")
    q, kv, idx, sink = (golden[f"sparse.{name}"] for name in ("q", "kv", "idx", "sink"))
    for b in range(len(q)):
        call = Call((q[b], kv[b], idx[b].int(), sink.float()))
        got = attention.sparse_attention(*call.args)
        same([got.output], [golden["sparse.o_float64"][b]])
        exact = unrounded(attention.sparse_attention)(*call.args).output
        assert ((golden["sparse.o"][b].double() - exact).abs() <= attention_bounds.outputs(call, exact)).all()
    assert not golden["sparse.o"][0, 0].any()
    assert (attention.sparse_attention(q[0], kv[0], idx[0].int(), sink.float()).lse[0] == -INF).all()


def test_published_windows():
    """The same sets; the published lists of steps are rings, in which a position stands at its remainder."""
    golden = load_file(GOLDEN / "functions.safetensors")
    for theirs in (part for name, part in golden.items() if name.startswith("window.prefill")):
        theirs = theirs.reshape(-1, theirs.shape[-1])
        ours = attention.window_indices(torch.arange(len(theirs)), window=theirs.shape[1])
        for mine, row in zip(ours.tolist(), theirs.tolist(), strict=True):
            assert {p for p in mine if p >= 0} == {p for p in row if p >= 0}
    for theirs in (part for name, part in golden.items() if name.startswith("window.decode")):
        theirs = theirs.reshape(-1, theirs.shape[-1])
        size = theirs.shape[1]
        ours = attention.window_indices(torch.arange(1, len(theirs) + 1), window=size)
        for mine, row in zip(ours.tolist(), theirs.tolist(), strict=True):
            assert {p % size for p in mine if p >= 0} == {p for p in row if p >= 0}


def test_window_literals():
    assert attention.window_indices(torch.tensor([0, 2, 5, -1, 2**31 - 1, 2**31, -(2**63)]), window=3).tolist() == [
        [0, -1, -1], [0, 1, 2], [3, 4, 5], [-1] * 3, [2**31 - 3, 2**31 - 2, 2**31 - 1], [-1] * 3, [-1] * 3,
    ]  # fmt: skip
    for dtype in (torch.int32, torch.int64):
        got = attention.window_indices(torch.tensor([126, 127, 128], dtype=dtype))
        assert got.dtype == torch.int32
        assert got[0].tolist() == [*range(127), -1]
        assert got[1].tolist() == [*range(128)]
        assert got[2].tolist() == [*range(1, 129)]
    assert attention.window_indices(torch.zeros(0, dtype=torch.int64), window=5).shape == (0, 5)


@pytest.mark.parametrize("p", [1899, 1900, 2000, 3947])
def test_sa_10_images_see_the_window_alone(p):
    """V4.1: a query inside the span 1900 .. 3947 of an image sees 128 positions up to its own."""
    seen = attention.window_indices(torch.tensor([p]))
    assert seen[0].tolist() == list(range(p - 127, p + 1))
    kv = draw(3948, 16)
    kv[p + 1 :] = NAN
    assert attention.sparse_attention(draw(1, 2, 16, seed=1), kv, seen).output.isfinite().all()


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_order_splits_and_heads_on_a_lattice(data):
    """A permutation of a list, a cut of it into parts that are merged, and a permutation of heads change no bit of an exact softmax."""
    kind = data.draw(st.sampled_from(["mean", "ahead"]))
    form = {"dim": 64, "extra": "rows", "with_sink": True, "lengths": False}
    sinks = {"mean": ["equal", "large", "none"], "ahead": ["drawn", "large", "none"]}[kind]
    spec = {
        "form": form, "kind": kind, "tokens": data.draw(st.integers(1, 4)), "heads": 3, "picks": data.draw(st.sampled_from([4, 33])),
        "extra_picks": 9, "power": 0, "sink": data.draw(st.sampled_from(sinks)), "sharp": 6.0, "classes": ["normal"],
        "seed": data.draw(st.integers(0, 2**32)),
    }  # fmt: skip
    call = attention_inputs.sparse_call(spec, CPU)
    q, kv, indices, sink = call.args
    extra = dict(call.kwargs)
    whole = attention.sparse_attention(q, kv, indices, sink, **extra)
    source = torch.Generator().manual_seed(spec["seed"])
    order = torch.randperm(indices.shape[1], generator=source)
    same(attention.sparse_attention(q, kv, indices[:, order], sink, **extra)[:1], whole[:1])
    heads = torch.randperm(3, generator=source)
    same(attention.sparse_attention(q[:, heads], kv, indices, sink[heads], **extra), [part[:, heads] for part in whole])
    cut = int(torch.randint(0, indices.shape[1] + 1, (), generator=source))
    with numerics("unrounded"):
        parts = [attention.sparse_attention(q, kv, part) for part in (indices[:, :cut], indices[:, cut:])]
        parts.append(attention.sparse_attention(q, extra["extra_kv"], extra["extra_indices"]))
    outputs, lses = (torch.stack(many).float() for many in zip(*parts, strict=True))
    merged = attention.merge_splits(outputs, lses, sink)
    same(merged[:1], whole[:1])
    assert (merged.lse - whole.lse).nan_to_num(0.0).abs().max() <= 2.0**-20 * whole.lse.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1)


def test_one_list_or_two():
    """Rows of both lists in one tensor give the same."""
    q, kv, sink = draw(4, 3, 32), draw(20, 32, seed=1), torch.tensor([0.0, 1.0, -INF])
    first, second = (torch.randint(0, 10, (4, n), generator=torch.Generator().manual_seed(n)).int() for n in (6, 3))
    two = attention.sparse_attention(q, kv[:10], first, sink, extra_kv=kv[10:], extra_indices=second)
    one = attention.sparse_attention(q, kv, torch.cat([first, second + 10], 1), sink)
    same(two, one)


@pytest.mark.parametrize("sink", [-INF, -1e30, 0.0, 80.0, 1e30, INF])
def test_sinks(sink):
    q, kv = draw(2, 1, 16), draw(5, 16, seed=1)
    indices = ints([0, 1, 2], [3, 4, -1])
    got, without = (attention.sparse_attention(q, kv, indices, s) for s in (torch.tensor([sink]), None))
    same([got.lse], [without.lse])
    if sink < -1e9:
        same(got, without)
    if sink > 1e9:
        assert not got.output.any()
    if sink == 0.0:
        with numerics("unrounded"):
            exact = attention.sparse_attention(q, kv, indices)
            scaled = exact.output / (1 + (-exact.lse).exp()[..., None])
            assert (attention.sparse_attention(q, kv, indices, torch.tensor([sink])).output - scaled).abs().max() < 1e-14


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 66, 80, 130])
def test_sa_01_and_sa_06_lanes_past_the_length(tokens):
    """Four fillings of the lanes behind the length give the same bits, and those of the shorter lists, in both lists."""
    source = torch.Generator().manual_seed(tokens)
    kv, width = draw(40, 64, seed=1), 96
    kv[7] = 1e4
    picks = torch.randint(8, 40, (2, tokens, width), generator=source).int()
    lengths = torch.randint(1, width + 1, (2, tokens), generator=source).int()
    q, sink, results = draw(tokens, 2, 64), torch.tensor([0.5, -INF]), []
    past = torch.arange(width) >= lengths[..., None]
    for filling in (-1, 0, 7, 2**30):
        filled = torch.where(past, filling, picks)
        results.append(
            attention.sparse_attention(
                q, kv, filled[0], sink, lengths=lengths[0], extra_kv=kv, extra_indices=filled[1], extra_lengths=lengths[1]
            )
        )
    for result in results[1:]:
        same(result, results[0])
    absent = torch.where(past, -1, picks)
    same(attention.sparse_attention(q, kv, absent[0], sink, extra_kv=kv, extra_indices=absent[1]), results[0])
    alone = [kv[picks[0, 0, : lengths[0, 0]].long()], kv[picks[1, 0, : lengths[1, 0]].long()]]
    o, lse = by_hand(q[0, 0].tolist(), torch.cat(alone).tolist(), 0.5, fl32(64**-0.5))
    assert results[0].output[0, 0].tolist() == torch.tensor(o, dtype=torch.float64).float().bfloat16().tolist()
    assert results[0].lse[0, 0].item() == fl32(lse)


def test_sa_03_each_rank_has_the_sinks_of_its_heads():
    sink, q, kv = torch.arange(128.0), torch.zeros(1, 16, 8).bfloat16(), torch.ones(1, 8).bfloat16()
    got = attention.sparse_attention(q, kv, ints([0]), sink[48:64]).output[0, :, 0]
    assert got.tolist() == [torch.tensor(1 / (1 + math.exp(h))).bfloat16().item() for h in range(48, 64)]
    assert got[0].item() < 2e-21
    assert attention.sparse_attention(q, kv, ints([0]), sink[:16]).output[0, 0, 0].item() == 0.5


@each_pair
def test_sa_05_pages_with_anything_between_them(main, extra):
    """The same rows through packed views, contiguous copies, and as bf16 rows."""
    q, sink = draw(3, 2, 512), torch.tensor([0.0, -INF])
    kv, other = draw(9, 512, seed=1), draw(7, 512, seed=2)
    (first, slots), (second, more) = paged(kv, main, gap=4096 + 32), paged(other, extra, 3, gap=584, seed=5)
    picks, others = slots[torch.tensor([[0, 8, 3, 3], [1, 2, 4, 5], [7, 6, 0, 1]])], more[torch.tensor([[0, 6], [1, 1], [2, 5]])]
    picks[1, 2] = -1
    lengths = torch.tensor([4, 4, 2], dtype=torch.int32)
    run = partial(attention.paged_attention, q, extra_slots=others, sink=sink, lengths=lengths, slots=picks)
    got = run(main=first, extra=second)
    assert first.pages.stride(0) > first.pages.shape[1]
    same(run(main=first._replace(pages=first.pages.contiguous()), extra=second._replace(pages=second.pages.contiguous())), got)
    same(attention.paged_attention(q, first, picks.int(), sink, lengths=lengths, extra=second, extra_slots=others.int()), got)
    rows = [
        load_kv(of.pages, torch.arange(of.pages.shape[0] * of.page_size), layout=of.layout, page_size=of.page_size)
        for of in (first, second)
    ]
    plain = attention.sparse_attention(q, rows[0], picks.int(), sink, lengths=lengths, extra_kv=rows[1], extra_indices=others.int())
    same(plain, got)
    assert got.output.isfinite().all()
    for function in (attention.decode_attention, attention.prefill_attention):
        same(function(q, first, picks, sink, lengths=lengths, extra=second, extra_slots=others), got)
    plan = attention.plan_attention(
        "decode", tokens=8, heads=2, picks=4, layout=main, page_size=4, extra_picks=2, extra_layout=extra, extra_page_size=3
    )
    same(plan.run(q, first, picks, sink, lengths=lengths, extra=second, extra_slots=others), got)
    assert (plan.workspace_bytes, plan.backend, plan.splits) == (0, "reference", 1)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("picks", [64, 128, 133, 192, 256, 512, 513, 1024, 1152])
def test_sa_07_any_width_and_any_number_of_heads(picks, heads):
    """Padding a list to the next width with -1 changes nothing."""
    q, kv = draw(2, heads, 16), draw(50, 16, seed=1)
    indices = torch.randint(0, 50, (2, picks), generator=torch.Generator().manual_seed(picks)).int()
    got = attention.sparse_attention(q, kv, indices)
    padded = torch.nn.functional.pad(indices, (0, 37), value=-1)
    same(attention.sparse_attention(q, kv, padded), got)


@pytest.mark.parametrize("layout", ["v4", "v41_fp4_inline"])
def test_sa_08_pages_beyond_2_gib(layout):
    width = KV_LAYOUTS[layout].page_bytes(64)
    number = 2**31 // width
    q, kv = draw(1, 2, 512), draw(3, 512, seed=1)
    memory = torch.empty(2**31 + 2 * width, dtype=torch.uint8)
    pages = memory.as_strided((number + 2, width), (width, 1))
    near = pages[:1].fill_(255)
    slots = torch.tensor([[5, 63, 0]])
    near.copy_(store_kv(kv, near, slots[0], layout=layout, page_size=64))
    expected = attention.paged_attention(q, PagedRows(near, layout, 64), slots)
    assert expected.output.isfinite().all()
    for page in (number - 1, number, number + 1):
        pages[page] = near[0]
        for dtype in (torch.int32, torch.int64):
            same(attention.paged_attention(q, PagedRows(pages, layout, 64), (slots + 64 * page).to(dtype)), expected)


def test_sa_09_and_dt_01_a_token_does_not_depend_on_its_batch():
    kv, sink = draw(200, 64, seed=1), draw(4, seed=2).float()
    q, indices = draw(33, 4, 64), torch.randint(-1, 200, (33, 150), generator=torch.Generator().manual_seed(3)).int()
    alone = attention.sparse_attention(q[:1], kv, indices[:1], sink)
    for batch in (2, 8, 32, 33):
        same([part[:1] for part in attention.sparse_attention(q[:batch], kv, indices[:batch], sink)], alone)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(4))
    whole = attention.sparse_attention(q, kv, indices, sink)
    same(attention.sparse_attention(q[order], kv, indices[order], sink), [part[order] for part in whole])


@pytest.mark.parametrize("sink", [None, -INF, 0.0, 1e30, INF])
def test_sa_13_tokens_without_picks(sink):
    kv = torch.full((4, 16), NAN).bfloat16()
    kv[1] = 1.0
    sinks = None if sink is None else torch.full((2,), sink)
    got = attention.sparse_attention(draw(4, 2, 16), kv, ints([-1, 4], [1, -1], [1, 1], [-7, 9]), sinks, lengths=ints(2, 2, 0, -3))
    for token in (0, 2, 3):
        assert got.output[token].view(torch.int16).eq(0).all()  # not even minus zero
        assert (got.lse[token] == -INF).all()
    assert got.output[1].isfinite().all()
    alone = attention.sparse_attention(draw(4, 2, 16)[1:2], kv, ints([1]), sinks)
    same([part[1:2] for part in got], alone)
    none = attention.sparse_attention(draw(4, 2, 16), kv[:0], torch.zeros(4, 0, dtype=torch.int32), sinks)
    assert not none.output.any()
    assert (none.lse == -INF).all()


@pytest.mark.parametrize("value", [8.2e17, 1e19])
def test_sa_15_scores_beyond_fp32(value):
    """The reference does not overflow, and no other token notices: not even of a kernel that does (`overflow` in the contract)."""
    q, kv = draw(3, 2, 512), draw(4, 512, seed=1)
    q[1], kv[3] = value, value
    got = attention.sparse_attention(q, kv, ints([0, 1], [3, 2], [2, 1]))
    assert torch.equal(got.output[1], kv[3].expand(2, -1))
    expected = float(torch.tensor(value).bfloat16()) ** 2 * 512 * fl32(512**-0.5)
    assert got.lse[1].tolist() == [fl32(expected)] * 2  # infinite where fp32 does not hold it
    assert got.lse[::2].isfinite().all()
    same([part[::2] for part in got], attention.sparse_attention(q[::2], kv[:3], ints([0, 1], [2, 1])))


def test_specials_stay_with_their_token():
    q, kv = draw(4, 2, 16), draw(4, 16, seed=1)
    q[1, 0], kv[3, 0] = NAN, INF
    got = attention.sparse_attention(q, kv, ints([0, 1], [0, 1], [0, 3], [1, 2]))
    assert got.output[1, 0].isnan().all()
    assert got.lse[1, 0].isnan()
    assert got.output[1, 1].isfinite().all()
    assert got.output[2].isnan().any()
    clean = attention.sparse_attention(q[[0, 3]], kv[:3], ints([0, 1], [1, 2]))
    same([part[[0, 3]] for part in got], clean)


def test_zeros_are_positive():
    kv = torch.tensor([[-0.0, 1.0], [-0.0, -1.0]]).bfloat16()
    got = attention.sparse_attention(torch.zeros(1, 1, 2).bfloat16(), kv, ints([0, 1]))
    assert got.output.view(torch.int16).tolist() == [[[0, 0]]]


@pytest.mark.parametrize("block", [5, 1, 4])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_draft_blocks(blocks, block):
    """Every query sees its list and all rows of its own block: as one list by hand."""
    tokens = blocks * block
    q, own, kv, sink = draw(tokens, 2, 512), draw(tokens, 512, seed=1), draw(11, 512, seed=2), torch.tensor([0.0, 1.5])
    rows, slots = paged(kv, "v41")
    lists = slots[torch.randint(0, 11, (tokens, 6), generator=torch.Generator().manual_seed(3))]
    lengths = torch.randint(0, 7, (tokens,), generator=torch.Generator().manual_seed(4)).int()
    got = attention.draft_attention(q, own, rows, lists, sink, block=block, lengths=lengths)
    assert got.output.shape == (tokens, 2, 512)
    cached = load_kv(rows.pages, torch.arange(len(rows.pages) * 4), layout="v41", page_size=4)
    both = torch.cat([cached, own])
    whole = torch.where(torch.arange(6) < lengths[:, None], lists, -1)
    mine = len(cached) + torch.arange(tokens)[:, None] // block * block + torch.arange(block)
    same(attention.sparse_attention(q, both, torch.cat([whole, mine], 1).int(), sink), got)
    assert got.output.isfinite().all()


def test_published_draft_lists():
    """The published lists of positions 1 to 11: the ring as far as it is filled, then the block."""
    golden = load_file(GOLDEN / "functions.safetensors")
    for size in (4, 8):
        for row, theirs in enumerate(golden[f"dspark.idx.w{size}"].tolist()):
            p = row + 1
            filled = min(size, p + 1)
            assert {pick for pick in theirs if pick >= 0} == {*range(filled), *range(size, size + 5)}
            assert {q % size for q in attention.window_indices(torch.tensor([p]), window=size)[0].tolist() if q >= 0} == set(range(filled))


def test_lse_forms():
    lse, sink = torch.tensor([[0.0, -INF, 2.5], [-1.0, 88.0, -INF]]), torch.tensor([0.5, 1.0, -INF])
    assert attention.lse_flashmla(lse).tolist() == [[0.0, INF, 2.5], [-1.0, 88.0, INF]]
    base2 = attention.lse_base2(lse)
    assert base2.tolist() == [[0.0, -INF, fl32(2.5 * math.log2(math.e))], [fl32(-math.log2(math.e)), fl32(88 * math.log2(math.e)), -INF]]
    with_sink = attention.lse_with_sink(lse, sink)
    assert with_sink[0, 0].item() == fl32(math.log(1 + math.exp(0.5)))
    assert with_sink[:, 1:].tolist() == [[1.0, 2.5], [88.0, -INF]]


def test_merging_by_hand():
    """Weights 1, 2 and 4 by lse, a sink of 9, a part that is empty and full of NaN."""
    outputs = torch.tensor([[1.0, 16.0], [3.0, 0.0], [NAN, NAN], [4.0, -16.0]])[:, None, None]
    lses = torch.tensor([0.0, math.log(2), -INF, math.log(4)])[:, None, None]
    got = attention.merge_splits(outputs, lses, torch.tensor([math.log(9)]))
    assert got.output[0, 0].tolist() == [23 / 16, -48 / 16]
    assert got.lse.item() == fl32(math.log(7))
    same([attention.merge_splits(outputs, lses).lse], [got.lse])
    empty = attention.merge_splits(outputs[2:3], lses[2:3], torch.tensor([1.0]))
    assert empty.output.tolist() == [[[0.0, 0.0]]]
    assert empty.lse.item() == -INF
    single = attention.merge_splits(outputs[:1].bfloat16(), lses[:1])
    same(single, AttentionResult(outputs[0].bfloat16(), lses[0]))


def test_plans():
    rows, slots = paged(draw(6, 512), "v4")
    q = draw(2, 4, 512)
    plan = attention.plan_attention("prefill", tokens=2, heads=4, picks=3, layout="v4", page_size=4, device="cpu", max_rows=5)
    expected = attention.prefill_attention(q, rows, slots[None, :3].expand(2, 3))
    same(plan.run(q, rows, slots[None, :3].expand(2, 3)), expected)
    out = AttentionResult(torch.empty_like(expected.output), torch.empty_like(expected.lse))
    written = plan.run(q, rows, slots[None, :3].expand(2, 3), out=out)
    same(out, expected)
    assert written.output is out.output
    for argument, call in {
        "q": lambda: plan.run(draw(3, 4, 512), rows, slots[None, :3].expand(3, 3)),
        "slots": lambda: plan.run(q, rows, slots[None, :4].expand(2, 4)),
        "main": lambda: plan.run(q, PagedRows(rows.pages, "v4", 2), slots[None, :3].expand(2, 3)),
        "extra": lambda: plan.run(q, rows, slots[None, :3].expand(2, 3), extra=rows, extra_slots=slots[None, :3].expand(2, 3)),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{argument}: got .*the plan is for"):
            call()
    support = attention.attention_support()
    assert {row.mode for row in support} == {"decode", "prefill"}
    assert all(row.usable and set(KV_LAYOUTS) <= set(row.layouts) for row in support)


@pytest.mark.parametrize(("argument", "change"), [
    ("out", tuple), ("out.output", lambda out: out._replace(output=out.output[:1])),
    ("out.output", lambda out: out._replace(output=out.output.float())), ("out.lse", lambda out: out._replace(lse=None)),
    ("out.lse", lambda out: out._replace(lse=out.lse.expand(2, 2, 4))), ("out.lse", lambda out: out._replace(lse=out.lse[:1].expand(2, 4))),
    ("out.lse", lambda out: out._replace(lse=out.lse.T.contiguous().T)), ("out.lse", lambda out: out._replace(lse=out.lse.double())),
    ("out.lse", lambda out: out._replace(lse=out.lse.requires_grad_())),
])  # fmt: skip
def test_buffers_that_do_not_fit_are_left_as_they_were(argument, change):
    rows, slots = paged(draw(6, 512), "v4")
    plan = attention.plan_attention("decode", tokens=2, heads=4, picks=6, layout="v4", page_size=4)
    good = AttentionResult(torch.full((2, 4, 512), 7.0, dtype=torch.bfloat16), torch.full((2, 4), 7.0))
    with pytest.raises(ArgumentError, match=rf"^{argument}: got "):
        plan.run(draw(2, 4, 512), rows, slots[None].expand(2, 6), out=change(good))
    assert all((buffer == 7.0).all() for buffer in good)


def test_buffers_have_memory_of_their_own():
    rows, slots = paged(draw(6, 512), "v4")
    plan = attention.plan_attention("decode", tokens=2, heads=4, picks=6, layout="v4", page_size=4)
    memory = draw(3, 4, 512)
    q, lse = memory[:2], torch.zeros(2, 4)
    within = memory.view(torch.float32).view(-1)
    for argument, out in {
        "out.output: got memory of q": AttentionResult(memory[1:], lse),
        "out.lse: got memory of q": AttentionResult(torch.zeros_like(q), within[:8].view(2, 4)),
        "out.lse: got memory of out.output": AttentionResult(memory[1:], within[-8:].view(2, 4)),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{argument}"):
            plan.run(q.clone() if "output" in argument[-10:] else q, rows, slots[None].expand(2, 6), out=out)
    beside = AttentionResult(memory[1:], within[:8].view(2, 4))  # of one storage, and apart
    expected = plan.run(q, rows, slots[None].expand(2, 6))
    same(plan.run(q.clone(), rows, slots[None].expand(2, 6), out=beside), expected)


def test_gradients():
    q, kv = (part.double().requires_grad_() for part in (draw(2, 2, 4), draw(5, 4, seed=1)))
    indices, sink = ints([0, 3, -1], [-1, -1, 7]), torch.tensor([0.3, -INF])

    def output(q, kv):
        with numerics("unquantised"):
            return attention.sparse_attention(q, kv, indices, sink)

    assert torch.autograd.gradcheck(lambda q, kv: output(q, kv).output, (q, kv))
    assert torch.autograd.gradcheck(lambda q, kv: output(q, kv).lse[:1], (q, kv))


Q, KV, LIST = draw(2, 3, 512), draw(4, 512), ints([0, 1], [2, -1])
ROWS = PagedRows(torch.zeros(2, 4 * 584, dtype=torch.uint8), "v4", 4)
V41 = PagedRows(torch.zeros(2, 4 * 528, dtype=torch.uint8), "v41", 4)


def _sparse(**changes):
    given = {"q": Q, "kv": KV, "indices": LIST, **changes}
    return lambda: attention.sparse_attention(**given)


def _paged(**changes):
    given = {"q": Q, "main": ROWS, "slots": LIST.long(), **changes}
    return lambda: attention.paged_attention(**given)


def _draft(**changes):
    given = {"q": Q, "block_kv": KV[:2], "main": ROWS, "slots": LIST, "block": 2, **changes}
    return lambda: attention.draft_attention(**given)


def _merge(**changes):
    given = {"outputs": torch.zeros(2, 3, 4, 8), "lses": torch.zeros(2, 3, 4), **changes}
    return lambda: attention.merge_splits(**given)


def _plan(**changes):
    given = {"mode": "decode", "tokens": 1, "heads": 1, "picks": 1, "layout": "v4", "page_size": 4, **changes}
    return lambda: attention.plan_attention(**given)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("q", _sparse(q=Q.float())),
        ("q", _sparse(q=Q[0])),
        ("q", _sparse(q=Q[:, :0])),
        ("kv", _sparse(kv=KV[:, :8])),
        ("kv", _sparse(kv=KV.float())),
        ("indices", _sparse(indices=LIST.long())),
        ("indices", _sparse(indices=LIST[:1])),
        ("sink", _sparse(sink=torch.zeros(2))),
        ("sink", _sparse(sink=torch.zeros(3).bfloat16())),
        ("lengths", _sparse(lengths=torch.zeros(3, dtype=torch.int32))),
        ("lengths", _sparse(lengths=torch.zeros(2, dtype=torch.int64))),
        ("extra_indices", _sparse(extra_kv=KV)),
        ("extra_indices", _sparse(extra_indices=LIST)),
        ("extra_lengths", _sparse(extra_lengths=torch.zeros(2, dtype=torch.int32))),
        ("extra_kv", _sparse(extra_kv=KV[:, :4], extra_indices=LIST)),
        ("scale", _sparse(scale=-1.0)),
        ("scale", _sparse(scale=NAN)),
        ("scale", _sparse(scale=INF)),
        ("main", _paged(main=ROWS.pages)),
        ("main.layout", _paged(main=ROWS._replace(layout="v5"))),
        ("main.page_size", _paged(main=ROWS._replace(page_size=0))),
        ("main.pages", _paged(main=ROWS._replace(page_size=5))),
        ("main.pages", _paged(main=ROWS._replace(pages=ROWS.pages[:, ::2]))),
        ("q", _paged(q=Q[..., :64])),
        ("slots", _paged(slots=LIST.float())),
        ("extra", _paged(extra=V41, extra_slots=LIST)),
        ("extra", _paged(main=PagedRows(torch.zeros(1, 4 * 288, dtype=torch.uint8), "v41_fp4", 4), extra=V41, extra_slots=LIST)),
        ("extra_slots", _paged(extra=ROWS)),
        ("extra_slots", _paged(extra_slots=LIST)),
        ("block", _draft(block=0)),
        ("q", _draft(block=5)),
        ("block_kv", _draft(block_kv=KV)),
        ("outputs", _merge(outputs=torch.zeros(0, 3, 4, 8), lses=torch.zeros(0, 3, 4))),
        ("lses", _merge(lses=torch.zeros(2, 3, 5))),
        ("lses", _merge(lses=torch.zeros(2, 3, 4).double())),
        ("sink", _merge(sink=torch.zeros(3))),
        ("lse", lambda: attention.lse_base2(torch.zeros(3))),
        ("sink", lambda: attention.lse_with_sink(torch.zeros(2, 3), torch.zeros(2))),
        ("positions", lambda: attention.window_indices(torch.zeros(3))),
        ("window", lambda: attention.window_indices(torch.zeros(3, dtype=torch.int64), window=0)),
        ("mode", _plan(mode="both")),
        ("heads", _plan(heads=0)),
        ("layout", _plan(layout="v5")),
        ("dim", _plan(dim=64)),
        ("extra_picks", _plan(extra_picks=3)),
        ("extra", _plan(extra_layout="v41", extra_page_size=4)),
        ("extra_page_size", _plan(extra_layout="v4")),
    ],
)
def test_refusals(argument, call):
    with pytest.raises(ArgumentError, match=f"^{argument}: got "):
        call()


def published_algorithm(q, rows, there, sink, scale):
    """As the published kernel: blocks of 64 in list order, a running maximum from -1e30, all in fp32, probabilities in bf16 for the
    product with the values alone."""
    q, rows = q.float(), rows.float()
    o, total = torch.zeros(q.shape), torch.zeros(*q.shape[:2], 1)
    top = torch.full_like(total, -1e30)
    for first in range(0, rows.shape[1], 64):
        k, some = rows[:, first : first + 64], there[:, None, first : first + 64]
        scores = (q @ k.mT * scale).masked_fill(~some, -INF)
        new = torch.maximum(top, scores.amax(2, keepdim=True))
        p, factor = (scores - new).exp(), (top - new).exp()
        total, o, top = total * factor + p.sum(2, keepdim=True), o * factor + p.bfloat16().float() @ k, new
    whole = (total + (sink[:, None] - top).exp()).masked_fill(total == 0, 1.0)
    return (o / whole).bfloat16(), (top + total.log())[..., 0]


def base_2(q, rows, there, sink, scale):
    """One maximum, exponentials to base 2 of scores that are scaled by log2 e as well."""
    scores = (q.float() @ rows.float().mT * torch.tensor(scale * math.log2(math.e))).masked_fill(~there[:, None], -INF)
    top = scores.amax(2, keepdim=True)
    empty = top == -INF
    top = top.masked_fill(empty, 0.0)
    p = torch.exp2(scores - top)
    total = p.sum(2, keepdim=True)
    whole = (total + torch.exp2(sink[:, None] * math.log2(math.e) - top)).masked_fill(empty, 1.0)
    return (p.bfloat16().float() @ rows.float() / whole).bfloat16(), ((top + total.log2()) * math.log(2))[..., 0]


def sink_afterwards(outputs, lses, sink):
    """Parts merged to bf16 without the sink, which then takes its weight from the rounded numbers."""
    result = attention.merge_splits(outputs, lses)
    if sink is None:
        return result
    factor = torch.sigmoid(result.lse - sink).nan_to_num(0.0)
    return result._replace(output=(result.output.float() * factor[..., None]).bfloat16())


PARTS = ("parts", "sink afterwards")  # cut of pages
ALLOWED = {
    "published": made.attention(published_algorithm),
    "base 2": made.attention(base_2),
    "parts": made.split(attention.merge_splits),
    "sink afterwards": made.split(sink_afterwards),
    "what mutants are made of": made.attention(made.by_weights(lambda weights, total, of_sink: (weights, total + of_sink, of_sink))),
}


@pytest.mark.parametrize(
    ("function", "name"),
    [(f, name) for f in ("sparse_attention", "decode_attention") for name in ALLOWED if f != "sparse_attention" or name not in PARTS],
)
def test_the_contract_allows(function, name):
    """What may differ: order, parts, base, probabilities in bf16, where the sink comes in."""
    contract = contracts.find(f"attention.{function}")
    candidate = Candidate(name, ALLOWED[name], may_refuse=False)
    for domain in contract.domains:
        if domain.name in ("mean", "ahead", "drawn", "overflow"):
            outcome = engine.check(contract, domain, candidate, CPU, PROFILES["smoke"], shrink=False)
            assert outcome.result == "passed", outcome.message


def test_the_bound_of_merging_allows_fp32():
    contract = contracts.find("attention.merge_splits")

    def merge(outputs, lses, sink):
        top = lses.amax(0)
        top = top.masked_fill(top == -INF, 0.0)
        weights = torch.exp2((lses - top) * math.log2(math.e))
        total = weights.sum(0)
        whole = total if sink is None else total + torch.exp2((sink - top) * math.log2(math.e))
        o = (weights[..., None] * outputs.float().masked_fill((weights == 0)[..., None], 0.0)).sum(0)
        return (o / whole.masked_fill(total == 0, 1.0)[..., None]).bfloat16(), top + total.log()

    for domain in contract.domains:
        outcome = engine.check(contract, domain, Candidate("fp32", merge, may_refuse=False), CPU, PROFILES["smoke"], shrink=False)
        assert outcome.result == "passed", outcome.message


@pytest.mark.parametrize("function", [contract.function for contract in contracts.for_component("attention")])
def test_the_reference_keeps_the_invariants(function):
    """But where sums cancel: the formula has no order of additions, and BLAS's goes by the batch (`dsv4.reference.numerics`)."""
    contract = contracts.find(f"attention.{function}")
    for item in contract.invariants:
        if item.name in ("fullgraph", "opcheck", "graph_replay", "strides") or item.domain == "cancelling":
            continue
        outcome = engine.check(contract, item, Candidate("reference", contract.refer(), may_refuse=False), CPU, PROFILES["smoke"])
        assert outcome.result == "passed", outcome.message


@pytest.mark.parametrize("kind", ["mean", "ahead"])
@pytest.mark.parametrize("sink", ["equal", "large", "drawn", "none"])
def test_lattices_are_what_they_say(kind, sink):
    """Outputs that bf16 holds exactly, and not all alike."""
    form = {"layout": "v41", "extra": "v41_fp4", "with_sink": True, "lengths": True}
    spec = {
        "form": form, "kind": kind, "tokens": 40, "heads": 4, "picks": 40, "extra_picks": 20, "power": 3, "sink": sink, "sharp": 6.0,
        "classes": ["normal"], "page_sizes": [16, 3], "gap": 16, "integers": "int64", "seed": 11,
    }  # fmt: skip
    call = attention_inputs.paged_call(spec, CPU)
    exact = unrounded(attention.paged_attention)(*call.args, **call.kwargs).output
    stored = exact.float().bfloat16().double()
    assert ((exact - stored).abs() <= 2.0**-20 * exact.abs()).all()
    scores = attention_bounds.case(call).scores
    counts = (scores > -INF).sum(2)[:, 0]
    assert (counts == 0).any()
    assert (counts > 8).any()
    if kind == "mean":
        live = counts[counts > 0]
        assert (live & (live - 1) == 0).all()
        assert (scores.amax(2) == scores.where(scores > -INF, INF).amin(2))[counts > 0].all()
    else:
        ranked = scores.sort(2, descending=True).values
        assert (ranked[..., 0] - ranked[..., 1] > 104)[counts > 1].all()
    assert exact.unique().numel() > (1 if sink != "large" else 0)
    for name in ("main.pages", "extra.pages"):
        assert (call[name] == 255).double().mean() > 0.2
