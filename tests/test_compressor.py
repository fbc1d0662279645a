"""The reference compressor: any cut of a request gives the same bits; published vectors; transformers; formulas by hand; reported bugs."""

import math
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv4 import configs
from dsv4.fast import compressor as fast_compressor
from dsv4.formats import KV_LAYOUTS
from dsv4.reference import compressor
from dsv4.reference.kv_cache import load_kv, quantize_kv, store_kv
from dsv4.reference.norms import rms_norm
from dsv4.reference.numerics import numerics
from dsv4.reference.rotary import apply_rope
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import ArgumentError

GOLDEN = Path(__file__).parent / "golden"
U = 2.0**-24
INF, NAN = float("inf"), float("nan")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def longs(*values):
    return torch.tensor(values, dtype=torch.int64)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def same_bits(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    assert torch.equal(got.view(integer), expected.view(integer))


@dataclass(frozen=True)
class Kind:
    """A compressor."""

    ratio: int
    overlap: bool = False
    bias: bool = True
    dim: int = 6

    @property
    def width(self):
        return 2 * self.dim if self.overlap else self.dim

    @property
    def ape(self):
        return random(self.ratio, self.width, seed=99) if self.bias else None

    @property
    def options(self):
        return {"ratio": self.ratio, "overlap": self.overlap, "ape": self.ape}

    def state(self, requests, drafts=0):
        """Rings that hold NaN: whatever is read before it is written shows."""
        made = compressor.compressor_state(requests, self.dim, ratio=self.ratio, overlap=self.overlap, drafts=drafts)
        return torch.full_like(made, NAN)


KINDS = {
    "overlap": Kind(4, overlap=True),
    "128": Kind(128, dim=3),
    "8": Kind(8),
    "2": Kind(2, bias=False),
    "1": Kind(1, bias=False),
    "overlap of 2": Kind(2, overlap=True),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def by_hand(kind, values, scores):
    """Entries of one request from its first token on, one channel and one entry at a time, from the formulas alone."""
    ape = torch.zeros(kind.ratio, kind.width) if kind.ape is None else kind.ape
    biased = [(s.double() + ape[q % kind.ratio].double()).float().tolist() for q, s in enumerate(scores)]
    values, rows = values.tolist(), []
    for w in range(len(values) // kind.ratio):
        row = []
        for c in range(kind.dim):
            own = c + kind.dim if kind.overlap else c
            taken = [(q, own) for q in range(kind.ratio * w, kind.ratio * (w + 1))]
            if kind.overlap and w:
                taken += [(q, c) for q in range(kind.ratio * (w - 1), kind.ratio * w)]
            top = max(biased[q][k] for q, k in taken)
            weights = [math.exp(biased[q][k] - top) for q, k in taken]
            row.append(math.fsum(e * values[q][k] for e, (q, k) in zip(weights, taken, strict=True)) / math.fsum(weights))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, kind.dim).float().bfloat16()


class Requests:
    """Requests whose tokens are all known, run through `compress` call by call: what was emitted, and the rings."""

    def __init__(self, kind, totals, *, drafts=0, spare=0, seed=0, compress=compressor.compress):
        self.kind, self.compress, self.drafts = kind, compress, drafts
        self.values = [random(total, kind.width, seed=seed + 2 * b) for b, total in enumerate(totals)]
        self.scores = [3 * random(total, kind.width, seed=seed + 2 * b + 1) for b, total in enumerate(totals)]
        self.rows = torch.randperm(len(totals) + spare, generator=torch.Generator().manual_seed(seed))[: len(totals)].to(torch.int32)
        self.state = kind.state(len(totals) + spare, drafts)
        self.starts = [0] * len(totals)
        self.entries = [{} for _ in totals]

    def call(self, lengths, *, idle=(), wrong=None):
        """Each request's next tokens; `wrong[b]` of them are not the request's own."""
        pieces = []
        for b, length in enumerate(lengths):
            mine = slice(self.starts[b], self.starts[b] + length)
            piece = [part[b][mine].clone() for part in (self.values, self.scores)]
            missing = length - len(piece[0])
            piece = [torch.cat([part, torch.full((missing, self.kind.width), 5.0)]) for part in piece]
            if wrong and wrong[b]:
                piece = [torch.cat([part[: length - wrong[b]], -7 * part[length - wrong[b] :]]) for part in piece]
            pieces.append(piece)
        values, scores = (torch.cat([piece[n] for piece in pieces]) for n in (0, 1))
        rows = self.rows.clone()
        rows[list(idle)] = -1
        given = self.state.clone()
        result = self.compress(values, scores, given, torch.tensor(self.starts), offsets(lengths), state_rows=rows, **self.kind.options)
        same_bits(given, self.state if self.compress is compressor.compress else result.state)  # fast updates in place
        self.state = result.state
        done = result.requests >= 0
        assert len(done) == min(len(values), len(values) // self.kind.ratio + len(lengths))
        assert result.entries[~done].tolist() == [-1] * int((~done).sum())
        assert not result.pooled[~done].any()
        for b, entry, row in zip(result.requests[done].tolist(), result.entries[done].tolist(), result.pooled[done], strict=True):
            assert b not in idle
            self.entries[b][entry] = row
        self.starts = [start + (0 if b in idle else n) for b, (start, n) in enumerate(zip(self.starts, lengths, strict=True))]
        return result

    def verify(self, lengths, accepted):
        """A call of which each request keeps the first `accepted` tokens; the others were wrong."""
        before = torch.tensor(self.starts)
        self.call(lengths, wrong=[length - kept for length, kept in zip(lengths, accepted, strict=True)])
        self.starts = compressor.roll_back(
            before, torch.tensor(accepted), drafted=max(n - a for n, a in zip(lengths, accepted, strict=True)), state=self.state,
            ratio=self.kind.ratio, overlap=self.kind.overlap,
        ).tolist()  # fmt: skip

    def check(self):
        """Every entry that is complete is the one by hand."""
        for b, start in enumerate(self.starts):
            expected = by_hand(self.kind, self.values[b][:start], self.scores[b][:start])
            for w, row in enumerate(expected):
                same_bits(self.entries[b][w], row)

    def last_tokens(self):
        """What each ring holds of its request, newest first."""
        ring, found = self.state.shape[1], []
        for b, start in enumerate(self.starts):
            back = min(start, max(ring - self.drafts, 0))
            kept = torch.arange(start - back, start).flip(0)
            found.append(self.state[int(self.rows[b]), kept % max(ring, 1)])
        return found


@each_kind
def test_whole_chunked_and_token_by_token_agree_and_are_the_formulas(kind):
    total = 3 * kind.ratio + 2
    whole, single = Requests(kind, [total]), Requests(kind, [total])
    whole.call([total])
    for _ in range(total):
        single.call([1])
    whole.check()
    assert whole.entries[0].keys() == single.entries[0].keys() == set(range(total // kind.ratio))
    for w, row in whole.entries[0].items():
        same_bits(single.entries[0][w], row)
    same_bits(single.state, whole.state)
    for first in sorted({1, kind.ratio - 1, kind.ratio, kind.ratio + 1, 2 * kind.ratio + 1} - {0}):
        halves = Requests(kind, [total])
        halves.call([first])
        assert set(halves.entries[0]) == set(range(first // kind.ratio))
        halves.call([total - first])
        halves.check()
        same_bits(halves.state, whole.state)


@pytest.mark.parametrize("compress", [compressor.compress, partial(fast_compressor.compress, impl="eager")], ids=["reference", "eager"])
@each_kind
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_cut_of_ragged_requests_agrees(kind, compress, data):
    """Several requests, cut anywhere, some idle in a call or without tokens, drafts dropped, states in any order."""
    count, drafts = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2 * kind.ratio + 3).map(lambda n: min(n, 12)))
    most = 2 * kind.ratio + 3
    totals = [2 * most + 8] * count
    spare, seed = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1000))
    run = Requests(kind, totals, drafts=drafts, spare=spare, seed=seed, compress=compress)
    for _ in range(data.draw(st.integers(1, 4))):
        left = [total - start for total, start in zip(totals, run.starts, strict=True)]
        lengths = [data.draw(st.integers(0, min(most, rest))) for rest in left]
        idle = tuple(b for b in range(count) if data.draw(st.integers(0, 4)) == 0)
        if idle or not drafts or data.draw(st.booleans()):
            run.call(lengths, idle=idle)
        else:
            run.verify(lengths, [data.draw(st.integers(max(n - drafts, 0), n)) for n in lengths])
    run.check()
    for b, held in enumerate(run.last_tokens()):
        back = torch.arange(run.starts[b] - len(held), run.starts[b]).flip(0)
        same_bits(held, torch.cat([run.values[b], run.scores[b]], 1)[back])


@each_kind
def test_incomplete_windows_emit_nothing(kind):
    run = Requests(kind, [kind.ratio - 1, kind.ratio])
    result = run.call([kind.ratio - 1, kind.ratio])
    assert (result.requests[0].item(), result.entries[0].item()) == (1, 0)
    assert result.requests[1:].tolist() == result.entries[1:].tolist() == [-1] * (len(result.requests) - 1)
    run.check()


@pytest.mark.parametrize("drafts", [1, 3, 7, 30])
@pytest.mark.parametrize("name", ["overlap", "8", "2", "1"])
def test_more_drafts_than_a_window(name, drafts):
    kind = KINDS[name]
    run = Requests(kind, [80, 80], drafts=drafts)
    run.call([3, 10])
    for accepted in ([1, drafts + 1], [drafts + 1, 1], [1, 1], [min(2, drafts + 1)] * 2):
        run.verify([drafts + 1, drafts + 1], accepted)
    run.call([5, 5])
    run.check()


def test_one_draft_too_many_for_the_ring_is_refused():
    for kind in KINDS.values():
        state = kind.state(1, drafts=3)
        options = {"state": state, "ratio": kind.ratio, "overlap": kind.overlap}
        assert compressor.roll_back(longs(5), longs(2), drafted=3, **options).tolist() == [7]
        if kind.ratio == 1:  # nothing is remembered, so nothing is lost
            assert compressor.roll_back(longs(5), ints(2), drafted=99, **options).tolist() == [7]
            continue
        with pytest.raises(ArgumentError, match=rf"^drafted: got 4; a ring of {state.shape[1]} rows keeps 3 tokens .*drafts=4"):
            compressor.roll_back(longs(5), longs(2), drafted=4, **options)


def test_cp_01_wide_verify_then_decode():
    """Every prefix length, verify width and accept length is a request of one batch; the ring of 16 is SGLang's."""
    kind = KINDS["overlap"]
    cases = [(prefix, width, kept) for prefix in range(16) for width in (2, 4, 5, 8) for kept in range(1, width + 1)]
    run = Requests(kind, [40] * len(cases), drafts=8)
    assert run.state.shape[1] == 16
    run.call([prefix for prefix, _, _ in cases])
    before = run.state
    run.verify([width for _, width, _ in cases], [kept for _, _, kept in cases])
    for b, (prefix, width, _) in enumerate(cases):  # every row of the verified tokens was written
        written = [(prefix + n) % 16 for n in range(width)]
        changed = (run.state != before)[int(run.rows[b])].any(1)
        assert changed[written].all()
    for _ in range(8):
        run.call([1] * len(cases))
    run.check()
    with pytest.raises(ArgumentError, match=r"^drafted: got 12; a ring of 16 rows keeps 8 tokens beside the 8 that an entry needs"):
        compressor.roll_back(longs(0), longs(1), drafted=12, state=run.state, ratio=4, overlap=True)


@pytest.mark.parametrize("explicit", [False, True])
def test_cp_03_first_windows_packed_and_alone(explicit):
    kind = KINDS["overlap"]
    for lengths in ([3, 4, 5], *([n] for n in range(1, 10))):
        run = Requests(kind, lengths)
        tokens = [torch.cat(part) for part in (run.values, run.scores)]
        rows = {"state_rows": torch.arange(len(lengths), dtype=torch.int32)} if explicit else {}
        result = compressor.compress(
            *tokens, kind.state(len(lengths)), torch.zeros(len(lengths), dtype=torch.int64), offsets(lengths), **rows, **kind.options
        )
        assert not result.pooled.isnan().any()
        expected = [by_hand(kind, values, scores) for values, scores in zip(run.values, run.scores, strict=True)]
        done = result.requests >= 0
        same_bits(result.pooled[done], torch.cat(expected))
        assert result.requests[done].tolist() == [b for b, rows in enumerate(expected) for _ in rows]


@pytest.mark.parametrize(("name", "groups"), [("2", 15), ("1", 31)])
def test_cp_05_padding_does_not_count(name, groups):
    kind = KINDS[name]
    run = Requests(kind, [31])
    expected = run.call([31])
    padded = [torch.cat([part[0], torch.full((97, kind.width), NAN)]) for part in (run.values, run.scores)]
    result = compressor.compress(*padded, kind.state(1), longs(0), ints(0, 31), **kind.options)
    assert int((result.entries >= 0).sum()) == groups
    same_bits(result.pooled[:groups], expected.pooled[:groups])
    same_bits(result.state, expected.state)
    assert not result.pooled[groups:].any()


@pytest.mark.parametrize("requests", [1, 8, 72, 96])
def test_cp_07_plan_of_ragged_verify(requests):
    generator = torch.Generator().manual_seed(requests)
    lengths = torch.randint(1, 7, (requests,), generator=generator)
    starts = torch.randint(0, 1000, (requests,), generator=generator)
    cu_seqlens, tokens = offsets(lengths.tolist()), int(lengths.sum())
    for ratio in (128, 4, 2, 1):
        expected = [(b, entry) for b in range(requests) for entry in range(starts[b] // ratio, (starts[b] + lengths[b]) // ratio)]
        plan = partial(compressor.compression_plan, starts, cu_seqlens, ratio=ratio, tokens=tokens)
        rows = min(tokens, tokens // ratio + requests)
        for _ in range(30):
            result = plan()
            assert result.requests.tolist() == [b for b, _ in expected] + [-1] * (rows - len(expected))
            assert result.entries.tolist() == [entry for _, entry in expected] + [-1] * (rows - len(expected))
        halted = plan(state_rows=torch.where(torch.arange(requests) % 3 == 0, -1, 7).to(torch.int32))
        assert halted.entries[: len(expected)].tolist()[: sum(b % 3 != 0 for b, _ in expected)] == [e for b, e in expected if b % 3]


def test_cp_08_a_reused_prefix_needs_the_last_window_again():
    kind = KINDS["overlap"]
    cold = Requests(kind, [340])
    cold.call([340])
    warm = Requests(kind, [340])  # its ring is NaN, and a prefix of 300 tokens is in the cache: entries 0 to 74
    warm.starts = [300 - 4]  # entry 75 overlaps the tokens of entry 74
    warm.call([44])
    assert warm.entries[0][74].isnan().all()  # in the cache already; the tokens before it are not here
    for w in range(75, 85):
        same_bits(warm.entries[0][w], cold.entries[0][w])
    heavy = Requests(KINDS["128"], [400])
    heavy.starts = [256]
    heavy.call([144])
    same_bits(heavy.entries[0][2], by_hand(heavy.kind, heavy.values[0], heavy.scores[0])[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cp_09_and_dt_01_projections_do_not_depend_on_the_batch(dtype):
    x = random(64, 200).bfloat16()
    wkv, wgate = (random(24, 200, seed=seed).to(dtype) for seed in (1, 2))
    whole = compressor.project(x, wkv, wgate)
    for cuts in ([1] * 64, [6] * 10 + [4], [5, 59], [1, 4, 59], [2, 3, 59]):
        for number in (0, 1):
            same_bits(torch.cat([compressor.project(part, wkv, wgate)[number] for part in x.split(cuts)]), whole[number])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    same_bits(compressor.project(x[order], wkv, wgate).values, whole.values[order])
    garbage = torch.cat([x[:5], torch.full((3, 200), NAN).bfloat16()])
    same_bits(compressor.project(garbage, wkv, wgate).scores[:5], whole.scores[:5])
    exact = [sum(a * b for a, b in zip(row, column, strict=True)) for row in x[:2].tolist() for column in wkv[:3].tolist()]
    assert whole.values[:2, :3].flatten().tolist() == torch.tensor(exact, dtype=torch.float64).float().tolist()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1]])
def test_dt_01_requests_do_not_depend_on_each_other(order):
    kind = KINDS["overlap"]
    lengths, starts = [9, 0, 6], [3, 5, 4 * 10**11 + 2]
    state = random(3, 8, 2 * kind.width, seed=7)
    parts = [[random(n, kind.width, seed=b + seed) for b, n in enumerate(lengths)] for seed in (10, 20)]

    def run(picked):
        tokens = [torch.cat([part[b] for b in picked]) for part in parts]
        return compressor.compress(
            *tokens, state, torch.tensor([starts[b] for b in picked]), offsets([lengths[b] for b in picked]),
            state_rows=torch.tensor(picked, dtype=torch.int32), **kind.options,
        )  # fmt: skip

    together, some = run([0, 1, 2]), run(order)
    for number, b in enumerate(order):
        for whole, part in ((together.pooled, some.pooled), (together.entries, some.entries)):
            same_bits(part[some.requests == number], whole[together.requests == b])
        same_bits(some.state[b], together.state[b])
    assert together.entries[together.requests == 2].tolist() == [10**11, 10**11 + 1]


def test_rp_03_entry_j_is_rotated_to_the_first_position_of_its_window():
    table = rope_table(rope_frequencies(160000.0), 64)
    values = torch.zeros(13, 1024)
    values[:, [448, 512 + 448]] = 1.0  # the first rotated dim, in both series
    layout = KV_LAYOUTS["v4"]
    pages = torch.zeros(1, layout.page_bytes(8), dtype=torch.uint8)
    weight = torch.full((512,), 512**-0.5)
    result = compressor.compress_and_store(
        values, torch.zeros(13, 1024), compressor.compressor_state(1, 512, ratio=4, overlap=True), longs(0), ints(0, 13), weight, table,
        pages, longs(0, 1, 2, 3), ratio=4, overlap=True, eps=0.0, layout="v4", page_size=8,
    )  # fmt: skip
    assert result.latents[:3, 448].tolist() == [1.0, 1.0, 1.0]
    rows = load_kv(result.pages, longs(0, 1, 2, 3), layout="v4", page_size=8)
    for j in range(3):
        angle = 4.0 * j  # pair 0 turns by a radian a position
        assert rows[j, 448:450].tolist() == torch.tensor([math.cos(angle), math.sin(angle)]).bfloat16().tolist()
        assert not rows[j, :448].any()
        assert not rows[j, 450:].any()
    assert not rows[3].any()


def test_store_is_the_steps_and_touches_nothing_else():
    kind = Kind(2, bias=False, dim=512)
    values, scores = random(11, 512), random(11, 512, seed=1)
    state, starts, cu_seqlens = kind.state(3, drafts=1), longs(0, 2, 0), ints(0, 5, 7, 11)
    weight, table = random(512, seed=2).bfloat16(), rope_table(rope_frequencies(160000.0), 3)
    pages = torch.randint(0, 256, (3, 4 * 288 + 64), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    slots = longs(5, 0, -1, 12, 7, 9, 3, 1)  # rows 5, 6 and 7 are left over
    stored = partial(
        compressor.compress_and_store, values, scores, state, starts, cu_seqlens, weight, table, pages, slots, ratio=2,
        layout="v41_fp4", page_size=4, state_rows=ints(2, 0, 1),
    )  # fmt: skip
    result = stored(eps=1e-6)
    pooled = compressor.compress(values, scores, state, starts, cu_seqlens, ratio=2, state_rows=ints(2, 0, 1))
    assert result.requests.tolist() == [0, 0, 1, 2, 2, -1, -1, -1]
    assert result.entries.tolist() == [0, 1, 1, 0, 1, -1, -1, -1]
    same_bits(result.state, pooled.state)
    same_bits(result.latents[:5], rms_norm(pooled.pooled[:5], weight, eps=1e-6))
    assert not result.latents[5:].any()
    assert not stored(eps=0.0).latents[5:].any()  # where a norm of zeros is NaN
    rotated = apply_rope(result.latents[:5], table, longs(0, 2, 2, 0, 2))
    expected = store_kv(rotated, pages, longs(5, 0, -1, -1, 7), layout="v41_fp4", page_size=4)
    same_bits(result.pages, expected)
    changed = (result.pages != pages).view(3, -1).sum(1)
    assert (changed > 0).tolist() == [True, True, False]
    same_bits(quantize_kv(rotated[:1], layout="v41_fp4")[0, :256], result.pages[1, 256:512])


def test_values_that_cannot_be_are_absent():
    kind = Kind(2, bias=False)
    values, state = random(6, kind.width), kind.state(3)
    for starts, cu_seqlens, rows in (
        (longs(-1, -(2**63)), ints(0, 3, 6), ints(0, 1)),
        (longs(2**62, 2**63 - 1), ints(0, 3, 6), ints(0, 1)),
        (longs(0, 0), ints(0, 3, 6), ints(3, -(2**31))),
        (longs(0, 0), ints(4, 3, 2), ints(0, 1)),
        (longs(0, 0), ints(-3, 7, 2**31 - 1), ints(0, 1)),
        (longs(0, 0), ints(-3, 2, 1), ints(0, 1)),
    ):
        result = compressor.compress(values, values, state, starts, cu_seqlens, ratio=2, state_rows=rows)
        same_bits(result.state, state)
        assert result.requests.tolist() == result.entries.tolist() == [-1] * 5
        assert not result.pooled.any()
    both = compressor.compress(values, values, state, longs(0, 0), ints(0, 6, 2), ratio=2)  # the second one's end comes before its start
    assert both.requests.tolist() == [0, 0, 0, -1, -1]


def test_empty_batches():
    for kind in KINDS.values():
        none = compressor.compress(random(0, kind.width), random(0, kind.width), kind.state(0), longs(), ints(0), **kind.options)
        assert [list(part.shape)[:1] for part in none] == [[0]] * 4
        idle = compressor.compress(random(0, kind.width), random(0, kind.width), kind.state(2), longs(5, 6), ints(0, 0, 0), **kind.options)
        same_bits(idle.state, kind.state(2))
        assert idle.pooled.shape == (0, kind.dim)


def test_specials_follow_ieee():
    kind = Kind(2, bias=False, dim=4)
    values = torch.tensor([[1.0, INF, 1.0, 2.0], [3.0, 1.0, NAN, 4.0]])
    scores = torch.tensor([[0.0, 0.0, -INF, -INF], [-INF, 0.0, 0.0, -INF]])
    pooled = compressor.compress(values, scores, kind.state(1), longs(0), ints(0, 2), **kind.options).pooled[0]
    assert pooled[:2].tolist() == [1.0, INF]
    assert pooled[2:].isnan().all()
    single = compressor.compress(values, scores * NAN, Kind(1).state(1)[:, :, :8], longs(0), ints(0, 2), ratio=1)
    same_bits(single.pooled, values.bfloat16())  # one term weighs 1 whatever its score


def test_scores_and_biases_are_rounded_before_the_softmax():
    # 2^24 + 1 rounds to 2^24 in fp32: both tokens weigh the same
    scores, ape = torch.tensor([[2.0**24], [2.0**24]]), torch.tensor([[1.0], [0.0]])
    pooled = compressor.compress(torch.tensor([[0.0], [2.0]]), scores, Kind(2, dim=1).state(1), longs(0), ints(0, 2), ratio=2, ape=ape)
    assert pooled.pooled[0].tolist() == [1.0]


def test_gradients():
    kind = KINDS["overlap"]
    tensors = [random(10, kind.width, seed=s).double().requires_grad_() for s in (0, 1)]
    state = random(1, 8, 2 * kind.width, seed=2).double().requires_grad_()

    def pooled(values, scores, state):
        with numerics("unquantised"):
            return compressor.compress(values, scores, state, longs(0), ints(0, 10), **kind.options)[::3]

    assert torch.autograd.gradcheck(pooled, (*tensors, state))


def test_ring_sizes():
    made = partial(compressor.compressor_state, 3, 8)
    assert made(ratio=4, overlap=True).shape == (3, 8, 32)
    assert made(ratio=4, overlap=True, drafts=8).shape == (3, 16, 32)
    assert made(ratio=128, drafts=2).shape == (3, 130, 16)
    assert made(ratio=1, drafts=5).shape == (3, 0, 16)
    assert made(ratio=2).dtype == torch.float32
    assert not made(ratio=2).any()


K = KINDS["overlap"]
T = random(4, K.width)


def _compress(**changes):
    given = {
        "values": T, "scores": T, "state": K.state(1), "starts": longs(0), "cu_seqlens": ints(0, 4), "ratio": 4, "overlap": True, **changes
    }  # fmt: skip
    return lambda: compressor.compress(**given)


def _store(**changes):
    wide = random(2, 512)
    given = {
        "values": wide, "scores": wide, "state": compressor.compressor_state(1, 512, ratio=2), "starts": longs(0), "cu_seqlens": ints(0, 2),
        "weight": random(512), "table": rope_table(rope_frequencies(1e4), 4), "pages": torch.zeros(1, 4 * 528, dtype=torch.uint8),
        "slots": longs(0, 1), "ratio": 2, "eps": 1e-6, "layout": "v41", "page_size": 4, **changes,
    }  # fmt: skip
    return lambda: compressor.compress_and_store(**given)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("values", _compress(values=T.bfloat16())),
        ("values", _compress(values=T[:, :5], scores=T[:, :5])),
        ("values", _compress(values=T[:, :0], scores=T[:, :0])),
        ("scores", _compress(scores=T[:3])),
        ("state", _compress(state=K.state(1)[:, :7])),
        ("state", _compress(state=K.state(1)[:, :, :-1])),
        ("state", _compress(starts=longs(0, 0), cu_seqlens=ints(0, 2, 4))),
        ("state", _compress(state=torch.zeros(1, 1, 24), ratio=1, overlap=False)),
        ("starts", _compress(starts=ints(0))),
        ("cu_seqlens", _compress(cu_seqlens=ints(0))),
        ("cu_seqlens", _compress(cu_seqlens=longs(0, 4))),
        ("state_rows", _compress(state_rows=ints(0, 1))),
        ("state_rows", _compress(state_rows=longs(0))),
        ("ape", _compress(ape=torch.zeros(3, 12))),
        ("ape", _compress(ape=torch.zeros(4, 6))),
        ("ratio", _compress(ratio=0)),
        ("ratio", _compress(ratio=4.0)),
        ("tokens", lambda: compressor.compression_plan(longs(0), ints(0, 1), ratio=1, tokens=-1)),
        ("ratio", lambda: compressor.compression_plan(longs(0), ints(0, 1), ratio=0, tokens=1)),
        ("x", lambda: compressor.project(T, T, T)),
        ("wkv", lambda: compressor.project(T.bfloat16(), T[:, :3], T)),
        ("wgate", lambda: compressor.project(T.bfloat16(), T, T[:3])),
        ("requests", lambda: compressor.compressor_state(-1, 4, ratio=4)),
        ("dim", lambda: compressor.compressor_state(1, 0, ratio=4)),
        ("drafts", lambda: compressor.compressor_state(1, 4, ratio=4, drafts=-1)),
        ("ratio", lambda: compressor.compressor_state(1, 4, ratio=0)),
        ("drafted", lambda: compressor.roll_back(longs(0), longs(0), drafted=-1, state=K.state(1), ratio=4, overlap=True)),
        ("accepted", lambda: compressor.roll_back(longs(0), longs(0, 1), drafted=0, state=K.state(1), ratio=4, overlap=True)),
        ("starts", lambda: compressor.roll_back(ints(0), longs(0), drafted=0, state=K.state(1), ratio=4, overlap=True)),
        ("values", _store(layout="v4", overlap=True, state=compressor.compressor_state(1, 256, ratio=2, overlap=True))),
        ("layout", _store(layout="v5")),
        ("weight", _store(weight=random(511))),
        ("eps", _store(eps=-1.0)),
        ("table", _store(table=torch.zeros(4, 63))),
        ("pages", _store(pages=torch.zeros(1, 4 * 527, dtype=torch.uint8))),
        ("slots", _store(slots=longs(0))),
        ("page_size", _store(page_size=0)),
        ("amax_floor", _store(amax_floor="lowest")),
    ],
)
def test_refusals(argument, call):
    with pytest.raises(ArgumentError, match=f"^{argument}: got "):
        call()


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "compressor.safetensors")


@dataclass(frozen=True)
class Published:
    """A compressor of the golden models. `flips`: bf16 numbers of its latents that are not the published ones, and by how many steps."""

    model: str
    layer: int
    ratio: int
    latent: str
    state: str = ""
    kv: str = ""
    overlap: bool = False
    module: str = "compressor"
    layout: str = "v4"
    flips: tuple[int, int] = (0, 0)


PUBLISHED = [
    Published("v4", 1, 4, "compressor_normed", "kv score", "compressed_kv", overlap=True, flips=(1, 1)),
    Published("v4", 1, 4, "index_compressor_normed", "index_kv index_score", overlap=True, module="indexer.compressor"),
    Published("v4", 2, 128, "compressor_normed", "", "compressed_kv"),
    Published("v4", 3, 4, "index_compressor_normed", "index_kv index_score", overlap=True, module="indexer.compressor", flips=(2, 1)),
    Published("v4", 4, 8, "compressor_normed", "kv score", "compressed_kv", flips=(2, 1)),
    Published("v41", 2, 2, "latent", "kv score", "compressed_kv", layout="v41_fp4", flips=(2, 2)),
    Published("v41", 6, 1, "latent", "", "compressed_kv", layout="v41_fp4", flips=(3, 2)),
]


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case.model}-{case.layer}-{case.module}")
def test_published_code_prefill_then_decode(golden, case):
    """Latents differ where the fp32 sums of the published run fall on the other side of a bf16: as many as the golden set's own repeats
    in other orders found, by a step of the pooled number, which is at most two of the normed one."""
    name = f"{case.model}.layers.{case.layer}.attn.{case.module}"
    wkv, norm, ape = golden[f"{name}.wkv.weight"], golden[f"{name}.norm.weight"], golden.get(f"{name}.ape")
    wgate = golden.get(f"{name}.wgate.weight", wkv)

    def recorded(what):
        parts = [golden.get(f"{case.model}.{phase}.layers.{case.layer}.{what}") for phase in ("prefill", "decode")]
        return [part for part in parts if part is not None]

    x = torch.cat(recorded("attn_norm"))
    prompt, dim = len(recorded("attn_norm")[0]), len(norm)
    values, scores = compressor.project(x, wkv, wgate)
    state, rows = compressor.compressor_state(1, dim, ratio=case.ratio, overlap=case.overlap), []
    for first, last in [(0, prompt), *((p, p + 1) for p in range(prompt, len(x)))]:
        result = compressor.compress(
            values[first:last],
            scores[first:last],
            state,
            longs(first),
            ints(0, last - first),
            ratio=case.ratio,
            overlap=case.overlap,
            ape=ape,
        )
        state = result.state
        rows.append(result.pooled[result.requests >= 0])
        if first == 0 and case.state:
            _same_state(golden, case, state, x, wkv, wgate, ape)
    eps = 1e-6 if case.model == "v4" else 1e-20
    got, expected = rms_norm(torch.cat(rows), norm, eps=eps), torch.cat(recorded(f"attn.{case.latent}"))
    assert len(got) == len(x) // case.ratio
    steps = (got.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert int((steps > 0).sum()) <= case.flips[0]
    assert int(steps.max()) <= case.flips[1]
    if case.kv:
        _same_cache(case, expected, torch.cat(recorded(f"attn.{case.kv}")))


def _same_state(golden, case, state, x, wkv, wgate, ape):
    """The published rows hold what the ring holds, scores with their bias: n products and n - 1 additions in any order, our rounding, and
    that of the bias."""
    prompt = len(golden[f"{case.model}.prefill.layers.{case.layer}.attn_norm"])
    whole = prompt - prompt % case.ratio
    kept = torch.arange(whole - case.ratio if case.overlap else whole, prompt)
    places = torch.arange(len(kept))
    mine = state[0, kept % state.shape[1]].chunk(2, 1)
    bias = 0.0 if ape is None else ape[kept % case.ratio]
    for ours, weight, what in zip((mine[0], mine[1] + bias), (wkv, wgate), case.state.split(), strict=True):
        theirs = golden[f"{case.model}.prefill.layers.{case.layer}.state.{what}"][places]
        noise = (x.shape[1] + 1) * U * (x[kept].double().abs() @ weight.double().abs().T) + U * ours.abs()
        assert ((ours - theirs).abs() <= noise).all()


def _same_cache(case, latents, expected):
    """Rotation, quantisation and layout, from the published latents: bit for bit."""
    table = rope_table(rope_frequencies(160000.0, yarn=configs.V4_FLASH.rope_scaling), 256)
    pages = torch.zeros(5, KV_LAYOUTS[case.layout].page_bytes(32), dtype=torch.uint8)
    slots = torch.arange(len(latents))
    stored = store_kv(apply_rope(latents, table, slots * case.ratio), pages, slots, layout=case.layout, page_size=32)
    same_bits(load_kv(stored, slots, layout=case.layout, page_size=32), expected)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is an oracle that only some environments have")
@pytest.mark.parametrize(("name", "ratio"), [("HCA", 128), ("CSA", 4)])
def test_transformers_prefill_then_decode(name, ratio):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=32,
        head_dim=48,
        qk_rope_head_dim=16,
        index_head_dim=32,
        index_n_heads=2,
        index_topk=3,
        q_lora_rank=16,
        num_hidden_layers=2,
    )
    module, cache = getattr(theirs, f"DeepseekV4{name}Compressor")(config), getattr(theirs, f"DeepseekV4{name}Cache")(config)
    source = torch.Generator().manual_seed(ratio)
    prompt, total = 2 * ratio + 3, 3 * ratio + 9
    x = torch.randn(total, 32, generator=source)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=source)
        for first, last in [(0, prompt), *((p, p + 1) for p in range(prompt, total))]:
            where = torch.arange(first, last)[None]
            residual = torch.randn(1, last - first, 16, generator=source)
            module(x[None, first:last], residual, where, SimpleNamespace(layers=[cache]), 0)
        cos, sin = module.rotary_emb(x, position_ids=torch.arange(total)[None], layer_type="compress")
    table = torch.cat([cos[0], sin[0]], 1).float()
    parts = [("compressor", module)] + ([("indexer", module.indexer)] if name == "CSA" else [])
    for part, owner in parts:
        expected = cache.compressed_kv[part][0]
        assert len(expected) == total // ratio
        rows, error = _in_fp64(owner, x, prompt, ratio, name == "CSA", table)
        assert ((rows - expected).abs() <= error).all()
        assert error.max() < 0.02 * rows.abs().max()


def _in_fp64(owner, x, prompt, ratio, overlap, table):
    """Our rotated entries without roundings, and the bound of what fp32 code may have of them."""
    wkv, wgate, ape, norm = (t.detach() for t in (owner.kv_proj.weight, owner.gate_proj.weight, owner.position_bias, owner.kv_norm.weight))
    dim, x = len(norm), x.double()
    with numerics("unquantised"):
        values, scores = compressor.project(x, wkv, wgate)
        held, pooled = compressor.compressor_state(1, dim, ratio=ratio, overlap=overlap), {}
        sizes = compressor.compress(values.abs(), scores, held, longs(0), ints(0, len(x)), ratio=ratio, overlap=overlap, ape=ape).pooled
        for first, last in [(0, prompt), *((p, p + 1) for p in range(prompt, len(x)))]:
            result = compressor.compress(
                values[first:last], scores[first:last], held, longs(first), ints(0, last - first), ratio=ratio, overlap=overlap, ape=ape
            )
            held = result.state
            pooled |= {entry: row for entry, row in zip(result.entries.tolist(), result.pooled, strict=True) if entry >= 0}
        assert sorted(pooled) == list(range(len(x) // ratio))
        e = torch.stack([pooled[w] for w in range(len(pooled))])
        rows = apply_rope(rms_norm(e, norm, eps=1e-6), table, torch.arange(len(e)) * ratio)
    # a projection: 33 roundings a term; the exponent also those of the bias, of t - m and of exp; then sum, quotient, product, sum
    per_value, per_score = (33 * U * (x.abs() @ weight.double().abs().T).max() for weight in (wkv, wgate))
    span = 2 * ratio if overlap else ratio
    exponent = per_score + 3 * U * (scores.abs().max() + ape.abs().max()) + 2 * U
    off = per_value + torch.expm1(2 * (exponent + 2 * span * U)) * sizes[: len(e)]
    length = (e.square().mean(1, keepdim=True) + 1e-6).sqrt()
    shift = off.square().mean(1, keepdim=True).sqrt()
    weight = norm.double().abs()
    moved = weight * (off / (length - shift) + e.abs() * shift / (length * (length - shift)))
    normed = (weight * e / length).abs()
    error = moved + (dim + 8) * U * (normed + moved)
    turned = error[:, -16:].unflatten(1, (-1, 2)).sum(2).repeat_interleave(2, 1)
    largest = normed[:, -16:].unflatten(1, (-1, 2)).sum(2).repeat_interleave(2, 1)
    return rows, torch.cat([error[:, :-16], turned + 4 * U * (largest + turned)], 1)
