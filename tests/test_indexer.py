"""The reference indexer: published vectors, transformers, torch.topk, fp64 from the formulas alone, reported bugs."""

import functools
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv4 import configs
from dsv4.formats import INDEX_LAYOUTS
from dsv4.parity import index_bounds, index_code_bounds
from dsv4.parity.contracts import Call
from dsv4.reference import compressor, indexer
from dsv4.reference.numerics import numerics
from dsv4.reference.quantization import dequantize, fake_quantize
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import ArgumentError, IndexKeys, IndexQueries

GOLDEN = Path(__file__).parent / "golden"
U = 2.0**-24
INF, NAN = float("inf"), float("nan")
STILL = torch.tensor([[1.0, 0.0]])  # a table that turns nothing
FORMATS = ("fp8", "fp4")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.contiguous().view(integer), expected.contiguous().view(integer))


def fp8_keys(numbers, scales=None):
    """Keys whose codes are these numbers."""
    ones = torch.ones(len(numbers)) if scales is None else scales
    return IndexKeys(torch.as_tensor(numbers, dtype=torch.float32).to(torch.float8_e4m3fn), torch.as_tensor(ones, dtype=torch.float32))


def fp8_queries(numbers, weights=None):
    """Queries whose codes are these numbers, [tokens, heads, dim]."""
    codes = torch.as_tensor(numbers, dtype=torch.float32).to(torch.float8_e4m3fn)
    ones = torch.ones(codes.shape[:2]) if weights is None else weights
    return IndexQueries(codes, None, torch.as_tensor(ones, dtype=torch.float32))


def made(format, tokens=5, entries=70, heads=8, dim=128, seed=0):
    """Queries and keys of normal numbers, through the whole chain."""
    table = rope_table(rope_frequencies(10000.0, min(dim, 64)), 128)
    q, w, x = random(tokens, heads, dim, seed=seed), random(tokens, heads, seed=seed + 1), random(entries, dim, seed=seed + 2)
    queries = indexer.index_queries(q.bfloat16(), w.bfloat16(), table, torch.arange(tokens), format=format, hadamard=True)
    return queries, indexer.index_keys(x.bfloat16(), table, torch.arange(entries), format=format, hadamard=True)


def decoded(codes, scales):
    """fp64 numbers of codes by torch's own dtypes and a list of the 16 FP4 codes."""
    if codes.dtype == torch.float8_e4m3fn:
        numbers = codes.double()
        return numbers if scales is None else numbers * scales.double()[..., None]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    numbers = table[torch.stack([codes % 16, codes // 16], -1).flatten(-2).long()]
    shift = torch.stack([scales >> (8 * g) & 255 for g in range(numbers.shape[-1] // 32)], -1) - 127
    return numbers * torch.exp2(shift.double()).repeat_interleave(32, -1)


def scores_by_hand(queries, keys):
    """fp64 scores of all entries, and the sum of magnitudes."""
    q, k, w = decoded(queries.codes, queries.scales), decoded(keys.codes, keys.scales), queries.weights.double()[..., None]
    return (torch.einsum("thd,nd->thn", q, k).relu() * w).sum(1), (torch.einsum("thd,nd->thn", q.abs(), k.abs()) * w.abs()).sum(1)


# Published vectors


@functools.cache
def golden():
    return {**load_file(GOLDEN / "compressor.safetensors"), **load_file(GOLDEN / "indexer.safetensors")}


@dataclass(frozen=True)
class Published:
    """An index source of the golden models; `source`: the layer whose keys it reads."""

    model: str
    layer: int
    source: int
    ratio: int
    group: int
    ties: tuple[int, ...]  # prompt tokens whose last pick ties with the first one left out: their set is not determined
    restricted: bool = False


PUBLISHED = [
    Published("v4", 1, 1, 4, 128, (92, 131)),
    Published("v41", 2, 2, 2, 32, (46, 77, 108)),
    Published("v41", 6, 6, 1, 32, (76, 115, 116)),
    Published("v41", 10, 6, 1, 32, (22, 43, 77), restricted=True),
]
each_published = pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case.model}-{case.layer}")


class Run:
    """Queries and keys of a published layer, prompt and decode steps together, from the tensors that its stages consumed."""

    def __init__(self, case):
        self.golden, self.case = golden(), case
        name = f"{case.model}.layers.{{}}.attn.indexer"
        mine, source = name.format(case.layer), name.format(case.source)
        self.table = rope_table(rope_frequencies(160000.0, yarn=configs.V4_FLASH.rope_scaling), 256)
        qr, x = self.both("attn.qr"), self.both("attn_norm")
        self.prompt, total = len(self.one("prefill", "attn.qr")), len(qr)
        block = (case.group, case.group)
        wq_b = dequantize(self.golden[f"{mine}.wq_b.weight"], self.golden[f"{mine}.wq_b.scale"], block, dtype=torch.float32)
        q = project(fake_quantize(qr, min(case.group, qr.shape[1])), wq_b).view(total, -1, 128)
        weights = project(x, self.golden[f"{mine}.weights_proj.weight"])
        v4, positions = case.model == "v4", torch.arange(total)
        self.queries = indexer.index_queries(q, weights, self.table, positions, hadamard=v4, weight_dtype="bf16")
        self.ends = indexer.visible_entries(positions, ratio=case.ratio)
        if v4:
            rows, norm = self.both("attn.index_compressor_normed", case.source), {}
        else:
            rows = project(self.both("attn.latent", case.source), self.golden[f"{source}.wk.weight"])
            norm = {"weight": self.golden[f"{source}.k_norm.weight"], "eps": 1e-20}
        self.keys = indexer.index_keys(rows, self.table, torch.arange(len(rows)) * case.ratio, hadamard=v4, **norm)

    def one(self, phase, what, layer=None):
        return self.golden.get(f"{self.case.model}.{phase}.layers.{self.case.layer if layer is None else layer}.{what}")

    def both(self, what, layer=None):
        return torch.cat([part for part in (self.one(phase, what, layer) for phase in ("prefill", "decode")) if part is not None])

    def scores(self):
        scores = indexer.index_logits(self.queries, self.keys, ends=self.ends, precision="bf16")
        if not self.case.restricted:
            return scores
        masks = [self.one(phase, "attn.candidates", self.case.source) for phase in ("prefill", "decode")]
        kept = torch.zeros(scores.shape, dtype=torch.bool)
        for first, mask in zip((0, self.prompt), masks, strict=True):
            kept[first : first + len(mask), : mask.shape[1]] = mask
        return scores.where(kept, -INF)


run_of = functools.cache(Run)


def project(x, weight):
    """A linear layer with an fp32 sum and one rounding."""
    return (x.double() @ weight.double().T).float().bfloat16()


def numbers(codes, scales):
    """FP4 codes as bf16, which they are exactly."""
    return decoded(codes, scales).bfloat16()


@each_published
def test_published_queries_and_weights(case):
    run = run_of(case)
    same_bits(run.queries.weights, run.both("attn.index_weights"))
    got = numbers(run.queries.codes, run.queries.scales)
    same_bits(got[run.golden[f"{case.model}.rows"]], run.one("prefill", "attn.index_q.rows"))
    steps = run.one("decode", "attn.index_q.steps")
    if steps is not None:
        same_bits(got[run.prompt + steps], run.one("decode", "attn.index_q"))


@each_published
def test_published_keys(case):
    run = run_of(case)
    same_bits(numbers(run.keys.codes, run.keys.scales), run.both("attn.index_k", case.source))


@each_published
def test_published_scores(case):
    """Bit for bit. A step of the published V4.1 program that completes no entry scores against the keys that were published last: at
    ratio 2, every second step has the keys of layer 6 instead of its own (`test_published_steps_without_an_entry`)."""
    run = run_of(case)
    scores, prompt = run.scores(), run.one("prefill", "attn.index_score")
    same_bits(scores[: run.prompt, : prompt.shape[1]], prompt)
    steps = run.one("decode", "attn.index_score")
    rows = torch.arange(0, len(steps), 2 if (case.model, case.ratio) == ("v41", 2) else 1)
    assert (run.prompt + rows[:1]) % case.ratio == (case.ratio - 1 if case.ratio == 2 else (run.prompt % case.ratio))
    same_bits(scores[run.prompt + rows, : steps.shape[1]], steps[rows])


def test_published_steps_without_an_entry():
    two, six = (run_of(case) for case in PUBLISHED[1:3])
    steps = two.one("decode", "attn.index_score")
    rows = torch.arange(1, len(steps), 2)
    at = two.prompt + rows
    scores = indexer.index_logits(indexer._of_tokens(two.queries, at), six.keys, ends=two.ends[at], precision="bf16")
    same_bits(scores[:, : steps.shape[1]], steps[rows])


@each_published
def test_published_picks(case):
    """Given the published scores. Prompt tokens with a tie at the cut are listed; ties of decode steps are found."""
    run = run_of(case)
    for phase, first in (("prefill", 0), ("decode", run.prompt)):
        scores, theirs = run.one(phase, "attn.index_score"), run.one(phase, "attn.topk")
        k = theirs.shape[1]
        ends = run.ends[first : first + len(scores)]
        ours = indexer.select_topk(scores, k, ends=ends, order="index")
        ranked = torch.cat([scores.float(), torch.full((len(scores), k + 1), -INF)], 1).sort(1, descending=True).values
        tied = (ranked[:, k - 1] == ranked[:, k]) & (ranked[:, k] > -INF)
        if phase == "prefill":
            assert tied.nonzero().flatten().tolist() == list(case.ties)
        assert torch.equal(ours[~tied], trailing(theirs[~tied].sort(1).values))
        assert torch.equal(ranked[tied, :k], picked(scores, indexer.select_topk(scores, k, ends=ends, order="score"))[tied])


def trailing(numbers):
    return numbers.gather(1, (numbers < 0).sort(dim=1, stable=True).indices)


def picked(scores, picks):
    """The scores of picks, -inf for missing ones."""
    return torch.where(picks >= 0, scores.float().gather(1, picks.clamp(min=0).long()), -INF)


def test_published_candidates():
    run = run_of(PUBLISHED[2])
    for phase, first, ties in (("prefill", 0, (52, 88)), ("decode", run.prompt, ())):
        scores, mask = run.one(phase, "attn.index_score"), run.one(phase, "attn.candidates")
        ends = run.ends[first : first + len(scores)]
        blocks = indexer.candidate_blocks(scores, ends, block=8, count=4)
        kept = indexer.restrict_to_blocks(torch.zeros(mask.shape), blocks, block=8) == 0
        kept &= torch.arange(mask.shape[1]) < (ends[:, None] if phase == "decode" else mask.shape[1])  # a step has no entries after its own
        differing = (kept != mask).any(1).nonzero().flatten().tolist()
        assert set(differing) <= set(ties)  # where the last block kept and the first one left out have one score


MASKS = ("prefill.mask_b4_k4", "prefill.mask_b8_k3", "ratio2.mask_b4_k2", *(f"decode{n}.mask_b8_k2" for n in (1, 8, 9, 37)))


@pytest.mark.parametrize("name", MASKS)
def test_published_candidate_masks(name):
    functions = load_file(GOLDEN / "functions.safetensors")
    case, _, sizes = name.partition(".")
    mask = functions[f"cand.{name}"]
    batch, rows, n = mask.shape
    block, count = (int(part[1:]) for part in sizes.removeprefix("mask_").split("_"))
    lengths = {"prefill": functions["cand.prefill.lens"], "ratio2": (torch.arange(45) + 1) // 2}.get(case, torch.full((rows,), n))
    logits, ends = functions[f"cand.{case}.logits"].flatten(0, 1), lengths.repeat(batch)
    blocks = indexer.candidate_blocks(logits, ends, block=block, count=count)
    kept = indexer.restrict_to_blocks(torch.zeros(logits.shape), blocks, block=block) == 0
    differing = (kept != mask.flatten(0, 1)).any(1)
    assert differing.sum() <= 1
    for row in differing.nonzero().flatten().tolist():  # the last block kept and the first one left out have one score
        of_block = [logits[row, first : min(first + block, int(ends[row]))].max() for first in range(0, int(ends[row]), block)]
        ours, theirs = ({j // block for j in part[row].nonzero().flatten().tolist()} for part in (kept, mask.flatten(0, 1)))
        (mine,), (other,) = ours - theirs, theirs - ours
        assert of_block[mine] == of_block[other]
        assert mine < other


# transformers


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is an oracle that only some environments have")
def test_transformers_scores_and_picks():
    """Their fp32 indexer against ours without quantisers: scores within the errors of an fp32 program, sets where those leave no doubt."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    sizes = {"hidden_size": 32, "head_dim": 48, "qk_rope_head_dim": 16, "index_head_dim": 32, "index_n_heads": 4, "index_topk": 5}
    module = theirs.DeepseekV4Indexer(DeepseekV4Config(**sizes, q_lora_rank=16, num_hidden_layers=2))
    source, total = torch.Generator().manual_seed(5), 93
    x, residual = torch.randn(1, total, 32, generator=source), torch.randn(1, total, 16, generator=source)
    seen = {}
    module.kv_norm.register_forward_pre_hook(lambda _, given: seen.update(pooled=given[0]))
    module.scorer.register_forward_hook(lambda _, given, result: seen.update(scores=result))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=source)
        where = torch.arange(total)[None]
        picks = module(x, residual, where, None, 0)[0]
        cos, sin = module.rotary_emb(x, position_ids=where, layer_type="compress")
        q, w = module.q_b_proj(residual).double().view(total, 4, 32), module.scorer.weights_proj(x)[0].double()
    table, ends = torch.cat([cos[0], sin[0]], 1).float(), indexer.visible_entries(where[0], ratio=4)
    pooled, norm = seen["pooled"][0].double(), {"weight": module.kv_norm.weight.detach(), "eps": 1e-6}
    assert len(pooled) == total // 4
    with numerics("unquantised"):
        queries = indexer.index_queries(q, w, table, where[0])
        keys = indexer.index_keys(pooled, table, torch.arange(len(pooled)) * 4, **norm)
        every = torch.full((total,), len(pooled), dtype=torch.int32)
        ours = indexer.index_logits(queries, keys, ends=every)
        chosen = indexer.select_entries(queries, keys, ends, 5, order="index")
    # a rotation mixes pairs, a norm of 32 numbers has some 40 roundings: so many of each number's pair, then of the dot products
    spread = [part.abs().unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, -1) for part in (queries.codes, keys.codes)]
    dots = torch.einsum("thd,nd->thn", *spread) * queries.weights.abs()[..., None]
    noise = (2 * 48 + 32 + 8) * U * dots.sum(1)
    assert ((ours - seen["scores"][0]).abs() <= noise).all()
    assert noise.max() < 1e-3 * ours.abs().max()
    hidden = ours.where(torch.arange(len(pooled)) < ends[:, None], -INF)
    ranked = hidden.sort(1, descending=True).values
    clear = ~(ranked[:, 4] - ranked[:, 5] <= 2 * noise.amax(1))  # inf - inf is NaN: everything is chosen
    assert clear.sum() > 0.9 * total
    assert torch.equal(chosen[clear].long(), trailing(picks[clear].sort(1).values))


# Formulas


@pytest.mark.parametrize("heads", [32, 64, 1])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("format", FORMATS)
def test_ix_21_scores_of_every_size_are_those_by_hand(format, dim, heads):
    queries, keys = made(format, heads=heads, dim=dim)
    exact, size = scores_by_hand(queries, keys)
    ends = torch.full((5,), 70)
    dense = indexer.index_logits(queries, keys, ends=ends)
    assert ((dense - exact).abs() <= U * exact.abs() + 2.0**-45 * size).all()
    assert (exact != 0).any()
    pages = torch.zeros(18, 4 * INDEX_LAYOUTS[format].token_bytes(dim), dtype=torch.uint8)
    pages = indexer.store_index_keys(keys, pages, torch.arange(70), format=format, page_size=4)
    options = {"format": format, "page_size": 4, "width": 70}
    same_bits(
        indexer.paged_index_logits(queries, pages, torch.arange(18, dtype=torch.int32)[None], ints(0, 0, 0, 0, 0), ends, **options), dense
    )


def test_bf16_precision_is_the_official_chain():
    """Against torch's own bf16 operations, on integers whose sums are exact in fp32."""
    source = torch.Generator().manual_seed(3)
    q, k = (torch.randint(-8, 9, shape, generator=source) for shape in ((9, 8, 128), (200, 128)))
    w = torch.randint(-5, 6, (9, 8), generator=source) / 16
    got = indexer.index_logits(fp8_queries(q, w)._replace(weights=w.bfloat16()), fp8_keys(k), ends=torch.full((9,), 200), precision="bf16")
    dots = torch.einsum("thd,nd->thn", q.bfloat16(), k.bfloat16())
    assert (dots.float() != torch.einsum("thd,nd->thn", q.double(), k.double())).any()
    same_bits(got, (dots.relu() * w.bfloat16()[..., None]).sum(1))


def test_a_query_is_its_codes_times_its_scales():
    """Quantising moves a number by half a step of its code at most; weights carry what the codes do not."""
    q, w = random(6, 4, 64).bfloat16(), random(6, 4, seed=1).bfloat16()
    constant = 1 / 16
    fp4 = indexer.index_queries(q, w, STILL, torch.zeros(6, dtype=torch.int64))
    same_bits(fp4.weights, w.float() * constant)
    same_bits(indexer.index_queries(q, w, STILL, torch.zeros(6, dtype=torch.int64), weight_dtype="bf16").weights, (w * constant))
    top = q.double().abs().unflatten(-1, (2, 32)).amax(-1, keepdim=True).expand(6, 4, 2, 32).flatten(-2)
    assert ((decoded(fp4.codes, fp4.scales) - q.double()).abs() <= top / 3).all()  # a step of 2 between 4 and 6, a scale below amax / 3
    assert (fp4.scales >> 16 == 0).all()
    fp8 = indexer.index_queries(q, w, STILL, torch.zeros(6, dtype=torch.int64), format="fp8")
    assert fp8.scales is None
    scale = torch.maximum(q.float().abs().amax(-1), torch.tensor(1e-4)) / 448
    same_bits(fp8.weights, w.float() * constant * scale)
    assert ((fp8.codes.double() * scale[..., None] - q.double()).abs() <= q.double().abs() / 16 + scale[..., None] * 2.0**-10).all()


def test_zero_rows_have_the_scale_of_their_floor():
    zeros, at = torch.zeros(2, 64, dtype=torch.bfloat16), torch.tensor([0, -1])
    for name, byte in (("official_fp4", 1), ("official", 112), ("flashmla", 114), ("none", 0)):
        assert indexer.index_keys(zeros, STILL, at, amax_floor=name).scales.tolist() == [byte * 257] * 2
    assert (indexer.index_keys(zeros, STILL, at, format="fp8").scales == torch.tensor(1e-4) / 448).all()


@pytest.mark.parametrize("format", FORMATS)
def test_absent_positions_give_rows_of_zeros(format):
    queries = indexer.index_queries(random(3, 2, 64).bfloat16(), random(3, 2).bfloat16(), STILL, torch.tensor([0, -1, 1]), format=format)
    zero = (decoded(queries.codes, queries.scales) == 0).flatten(1).all(1)
    assert zero.tolist() == [False, True, True]


@pytest.mark.parametrize("format", FORMATS)
def test_unrounded_scores_differ_by_roundings_alone(format):
    queries, keys = made(format)
    exact, size = scores_by_hand(queries, keys)
    with numerics("unrounded"):
        got = indexer.index_logits(queries, keys, ends=torch.full((5,), 70))
    assert got.dtype == torch.float64
    assert ((got - exact).abs() <= 2.0**-45 * size).all()


def test_scores_have_derivatives_by_the_weights():
    queries, keys = made("fp4")
    weights = queries.weights.double().requires_grad_()
    with numerics("unrounded"):
        indexer.index_logits(queries._replace(weights=weights), keys, ends=torch.full((5,), 70)).sum().backward()
    q, k = decoded(queries.codes, queries.scales), decoded(keys.codes, keys.scales)
    expected = torch.einsum("thd,nd->thn", q, k).relu().sum(2)
    assert ((weights.grad - expected).abs() <= 2.0**-40 * expected).all()


def test_not_a_number_follows_ieee():
    keys = fp8_keys([[1.0, 0.0], [NAN, 0.0], [-1.0, 0.0], [0.0, 1.0]], [1.0, 1.0, 1.0, INF])
    got = indexer.index_logits(fp8_queries([[[1.0, 0.0]]]), keys, ends=ints(4))
    assert got[0].isnan().tolist() == [False, True, False, True]
    assert got[0, [0, 2]].tolist() == [1.0, 0.0]
    assert not got.signbit()[0, 2]
    same_bits(indexer.index_logits(fp8_queries([[[NAN, NAN]]]), keys, ends=ints(0)), torch.full((1, 4), -INF))


def test_a_sum_of_zero_is_plus_zero():
    got = indexer.index_logits(fp8_queries([[[1.0, 0.0]] * 2], [[-1.0, -2.0]]), fp8_keys([[-1.0, 0.0], [0.0, 0.0]]), ends=ints(2))
    same_bits(got, torch.zeros(1, 2))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_of_scores_does_not_depend_on_its_batch(format):
    queries, keys = made(format, tokens=17, entries=130)
    ends = torch.arange(17) * 8
    whole = indexer.index_logits(queries, keys, ends=ends)
    for rows in (slice(0, 1), slice(3, 9), torch.tensor([16, 0, 5])):
        same_bits(indexer.index_logits(indexer._of_tokens(queries, rows), keys, ends=ends[rows]), whole[rows])
    few = IndexKeys(keys.codes[5:70], keys.scales[5:70])
    same_bits(
        indexer.index_logits(queries, few, ends=(ends - 5).clamp(0, 65)), whole[:, 5:70].where(torch.arange(5, 70) < ends[:, None], -INF)
    )


# Selection


def by_hand(row, k, begin, end, order):
    """Python's sort."""
    there = [j for j in range(max(begin, 0), min(end, len(row))) if row[j] == row[j] and row[j] > -INF]
    best = sorted(there, key=lambda j: (-row[j], j))[:k]
    best = best if order == "score" else sorted(best)
    begin = min(max(begin, 0), len(row))
    return [j - begin for j in best] + [-1] * (k - len(best))


NUMBERS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.0, NAN, INF, -INF]), st.floats(width=16))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    row=st.lists(NUMBERS, max_size=12),
    k=st.integers(1, 15),
    begin=st.integers(-2, 14),
    end=st.integers(-2, 14),
    order=st.sampled_from(["score", "index"]),
)
def test_selection_is_python_s_sort(row, k, begin, end, order):
    logits = torch.tensor([row], dtype=torch.float32).view(1, len(row))
    got = indexer.select_topk(logits, k, starts=ints(begin), ends=ints(end), order=order)
    assert got[0].tolist() == by_hand(logits[0].tolist(), k, begin, end, order)
    any_order = indexer.select_topk(logits, k, starts=ints(begin), ends=ints(end))
    assert sorted(any_order[0].tolist()) == sorted(got[0].tolist())
    assert torch.equal(any_order, trailing(any_order))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(row=st.lists(NUMBERS, max_size=20), end=st.integers(-2, 22), block=st.integers(1, 4), count=st.integers(1, 6))
def test_candidates_are_python_s_sort(row, end, block, count):
    logits = torch.tensor([row], dtype=torch.float32).view(1, len(row))
    got = indexer.candidate_blocks(logits, ints(end), block=block, count=count)
    seen, total = logits[0].tolist()[: max(end, 0)], -(-len(row) // block)
    best = {b: max([x for x in seen[b * block : (b + 1) * block] if x == x] + [-INF]) for b in range(total)}
    newest = [(len(seen) - 1) // block] if seen else []
    ranked = sorted((b for b in best if best[b] > -INF and b not in newest), key=lambda b: (-best[b], b))
    kept = sorted((newest + ranked)[:count])
    assert got[0].tolist() == kept + [-1] * (min(count, total) - len(kept))
    restricted = indexer.restrict_to_blocks(logits, got, block=block)
    expected = [x if j // block in kept else -INF for j, x in enumerate(logits[0].tolist())]
    same_bits(restricted, torch.tensor([expected], dtype=torch.float32).view(1, len(row)))


@pytest.mark.parametrize("k", [1, 16, 512])
@pytest.mark.parametrize("length", ["k - 1", "k", "k + 1", "2 k", "20 k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection_has_torch_s_scores(k, length, dtype):
    n = {"k - 1": k - 1, "k": k, "k + 1": k + 1, "2 k": 2 * k, "20 k": 20 * k}[length]
    logits = random(3, n, seed=k).to(dtype)
    got = indexer.select_topk(logits, k, order="score")
    known = min(k, n)
    assert (got[:, known:] == -1).all()
    same_bits(logits.gather(1, got[:, :known].long()), logits.topk(known).values)
    ascending = indexer.select_topk(logits, k, order="index")
    assert torch.equal(ascending[:, :known], got[:, :known].sort(1).values)


@pytest.mark.parametrize("format", FORMATS)
def test_chunks_and_budgets_change_nothing(format, monkeypatch):
    queries, keys = made(format, tokens=11, entries=90)
    ends, asked = torch.arange(11) * 9, []
    blocks = indexer.select_candidates(queries, keys, ends, block=4, count=5)
    whole = indexer.select_entries(queries, keys, ends, 7, candidates=blocks, block=4)
    logits = indexer.index_logits(queries, keys, ends=ends)
    assert torch.equal(blocks, indexer.candidate_blocks(logits, ends, block=4, count=5))
    kept = indexer.restrict_to_blocks(logits, blocks, block=4)
    assert torch.equal(whole, indexer.select_topk(kept, 7, ends=ends, order="index"))
    assert (whole.sort(1).values != indexer.select_entries(queries, keys, ends, 7).sort(1).values).any()
    scored = indexer.index_logits
    monkeypatch.setattr(indexer, "index_logits", lambda q, k, **options: asked.append(len(q.codes)) or scored(q, k, **options))
    for chunk, budget, most in ((1024, 2**28, 11), (4, 2**28, 4), (1024, 3 * 360 + 359, 3), (1, 1, 1)):
        asked.clear()
        options = {"block": 4, "chunk": chunk, "budget_bytes": budget}
        assert torch.equal(indexer.select_entries(queries, keys, ends, 7, candidates=blocks, **options), whole)
        assert torch.equal(indexer.select_candidates(queries, keys, ends, count=5, **options), blocks)
        assert (max(asked), sum(asked)) == (most, 22)


def test_nothing_in_nothing_out():
    queries, keys = made("fp4", tokens=3, entries=4)
    none = IndexKeys(keys.codes[:0], keys.scales[:0])
    nobody = indexer._of_tokens(queries, slice(0, 0))
    ends = ints(0, 4, 9)
    assert indexer.index_logits(queries, none, ends=ends).shape == (3, 0)
    assert indexer.select_entries(queries, none, ends, 2).tolist() == [[-1, -1]] * 3
    assert indexer.select_candidates(queries, none, ends).shape == (3, 0)
    assert indexer.index_logits(nobody, keys, ends=ends[:0]).shape == (0, 4)
    assert indexer.select_entries(nobody, keys, ends[:0], 2).shape == (0, 2)
    assert indexer.select_candidates(nobody, keys, ends[:0], block=2).shape == (0, 2)


# Reported bugs


@pytest.mark.parametrize("best", ["winners", "infinite"])
def test_ix_01_many_ties_fill_every_slot(best):
    logits = torch.zeros(1, 8320)
    winners = torch.randperm(8320, generator=torch.Generator().manual_seed(1))[: 100 if best == "winners" else 300]
    logits[0, winners] = 1.0 if best == "winners" else INF
    for order in ("any", "score", "index"):
        picks = indexer.select_topk(logits, 2048, ends=ints(8320), order=order)[0].tolist()
        assert len(set(picks)) == 2048
        assert set(winners.tolist()) <= set(picks) <= set(range(8320))
        rest = sorted(set(range(8320)) - set(winners.tolist()))[: 2048 - len(winners)]
        assert set(picks) == set(winners.tolist()) | set(rest)


@pytest.mark.parametrize("length", [4096, 16384, 16448, 65536, 1048576])
def test_ix_03_nearly_equal_scores_of_any_length(length):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(length))
    logits = torch.linspace(1, 1 + 2.0**-8, length)[order][None]
    for k in (512, 2048):
        picks = indexer.select_topk(logits, k, order="score")
        same_bits(logits.gather(1, picks.long()), logits.topk(k).values)
        assert len(set(picks[0].tolist())) == k


def test_ix_05_scores_below_fp16_and_lanes_behind_the_end():
    source = torch.Generator().manual_seed(5)
    wide = -1e5 * (1 + torch.rand(149, 1280, generator=source))
    zeros = torch.rand(149, 1001, generator=source).argsort(1)[:, :10]
    wide[:, :1001].scatter_(1, zeros, 0.0)
    wide[:, 1001:] = 7.0
    picks = indexer.select_topk(wide, 64, ends=torch.full((149,), 1001), order="score")
    logits = wide[:, :1001]
    assert (picks < 1001).all()
    same_bits(logits.gather(1, picks.long()), logits.topk(64).values)
    assert torch.equal(picks[:, :10].sort(1).values.long(), zeros.sort(1).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ix_06_nan_is_never_selected(dtype):
    logits = random(3, 4096, seed=6).to(dtype)
    logits[0, 17] = NAN
    finite = torch.randperm(4096, generator=torch.Generator().manual_seed(6))[:100]
    kept = logits[1, finite].clone()
    logits[1:] = NAN
    logits[1, finite] = kept
    picks = indexer.select_topk(logits, 512, order="index")
    assert ((picks >= -1) & (picks < 4096)).all()
    rest = logits[0].clone()
    rest[17] = -INF
    same_bits(rest[picks[0].long()].sort(descending=True).values, rest.topk(512).values)
    assert picks[1].tolist() == sorted(finite.tolist()) + [-1] * 412
    assert picks[2].tolist() == [-1] * 512


@pytest.mark.parametrize("format", FORMATS)
def test_ix_09_contexts_without_an_entry(format):
    queries, keys = made(format, tokens=32, entries=8, heads=2, dim=32)
    pages = torch.zeros(2, 4 * INDEX_LAYOUTS[format].token_bytes(32), dtype=torch.uint8)
    pages = indexer.store_index_keys(keys, pages, torch.arange(8), format=format, page_size=4)
    lengths = torch.arange(32) % 3 + 1
    table, requests = torch.tensor([[0, 1]], dtype=torch.int32).expand(32, 2), torch.arange(32, dtype=torch.int32)
    for one in (False, True):
        ends = indexer.visible_entries(lengths - 1, ratio=4)
        assert not ends.any()
        ends[5] = int(one)
        logits = indexer.paged_index_logits(queries, pages, table, requests, ends, format=format, page_size=4, width=8)
        assert (logits > -INF).sum() == int(one)
        picks = indexer.select_topk(logits, 4, ends=ends, block_table=table, requests=requests, page_size=4)
        assert picks[5].tolist() == [0 if one else -1, -1, -1, -1]
        assert (picks[torch.arange(32) != 5] == -1).all()
        assert torch.equal(indexer.select_entries(queries, keys, ends, 4) >= 0, picks >= 0)


@pytest.mark.parametrize("format", FORMATS)
def test_ix_10_pages_a_mebibyte_apart(format):
    queries, keys = made(format, tokens=2, entries=8, dim=64)
    stride, width = 2**20, 8 * INDEX_LAYOUTS[format].token_bytes(64)
    pages = torch.empty(2051 * stride, dtype=torch.uint8).as_strided((2051, width), (stride, 1))
    here = (0, 2047, 2048, 2050)
    record = indexer.store_index_keys(keys, torch.zeros(1, width, dtype=torch.uint8), torch.arange(8), format=format, page_size=8)
    for page in here:
        pages[page] = record[0]
    table, ends = torch.tensor([[page] for page in here], dtype=torch.int32), ints(8, 5)
    expected = indexer.index_logits(queries, keys, ends=ends)
    for request in range(4):
        requests = ints(request, request)
        options = {"format": format, "page_size": 8, "width": 8}
        same_bits(indexer.paged_index_logits(queries, pages, table, requests, ends, **options), expected)
        loaded = indexer.load_index_keys(pages, torch.arange(8) + 8 * here[request], format=format, page_size=8, dim=64)
        same_bits(loaded.codes, keys.codes)


def test_ix_12_entries_of_pages_in_any_order():
    tokens = torch.arange(192)
    k = torch.zeros(192, 32)
    k[tokens, tokens % 32] = 1.0 + tokens % 13
    keys = fp8_keys(k, 1 + tokens / 64)
    pages = torch.full((8, 64 * 36), 255, dtype=torch.uint8)  # pages of nobody hold NaN
    table = torch.tensor([[7, 2, 5, -1]], dtype=torch.int32)
    slots = table[0, tokens // 64].long() * 64 + tokens % 64
    pages = indexer.store_index_keys(keys, pages, slots, format="fp8", page_size=64)
    queries = fp8_queries(torch.ones(2, 3, 32), [[1.0, 2.0, -0.5]] * 2)
    ends = ints(192, 130)
    got = indexer.paged_index_logits(queries, pages, table, ints(0, 0), ends, format="fp8", page_size=64, width=200)
    same_bits(got[:, :192], indexer.index_logits(queries, keys, ends=ends))
    assert (got[:, 192:] == -INF).all()
    for t in (0, 1, 63, 64, 127, 130):
        assert got[0, t] == 2.5 * (1 + t % 13) * (1 + t / 64)


def test_ix_13_values_of_a_page_then_its_scales():
    keys = fp8_keys(torch.arange(1.0, 33.0).view(4, 8).clamp(max=16) * (torch.arange(1.0, 33.0).view(4, 8) <= 16), [1.0, 2.0, 4.0, 8.0])
    pages = indexer.store_index_keys(keys, torch.zeros(1, 48, dtype=torch.uint8), torch.arange(4), format="fp8", page_size=4)
    assert pages[0, :16].view(torch.float8_e4m3fn).float().tolist() == list(range(1, 17))
    assert pages[0, 32:].view(torch.float32).tolist() == [1.0, 2.0, 4.0, 8.0]
    for slot in range(4):
        loaded = indexer.load_index_keys(pages, torch.tensor([slot]), format="fp8", page_size=4, dim=8)
        assert loaded.scales.tolist() == [2.0**slot]
        same_bits(loaded.codes, keys.codes[slot : slot + 1])
    second = indexer.load_index_keys(pages, torch.tensor([1]), format="fp8", page_size=4, dim=8)
    assert second.codes.float().tolist() == [list(range(9, 17))]


def test_ix_13_scores_below_zero_do_not_count():
    got = indexer.index_logits(fp8_queries([[[1.0, 0.0], [0.0, 1.0]]]), fp8_keys([[3.0, -5.0], [-3.0, -5.0]]), ends=ints(2))
    assert got.tolist() == [[3.0, 0.0]]


def test_ix_15_both_sides_are_transformed_or_neither():
    k = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0.6, 0.6, 0.6, 0]]).bfloat16()
    q, weights = torch.tensor([[[1.0, 0, 0, 0]]]).bfloat16(), torch.tensor([[2.0]]).bfloat16()  # (d H)^-1/2 is 1/2

    def scores(query, key):
        queries = indexer.index_queries(q, weights, STILL, torch.zeros(1, dtype=torch.int64), format="fp8", hadamard=query)
        keys = indexer.index_keys(k, STILL, torch.zeros(3, dtype=torch.int64), format="fp8", hadamard=key)
        return indexer.index_logits(queries, keys, ends=ints(3))[0]

    for both in (False, True):
        got = scores(both, both)
        assert ((got - torch.tensor([1.0, 0.0, 0.6])).abs() < 2.0**-4).all()
        assert got.argsort(descending=True).tolist() == [0, 2, 1]
    assert scores(True, False).argsort(descending=True).tolist()[0] == 2


def test_ix_17_an_entry_is_visible_once_its_last_token_is_there():
    ends = indexer.visible_entries(torch.arange(12), ratio=4)
    assert ends.tolist() == [0] * 3 + [1] * 4 + [2] * 4 + [3]
    keys = fp8_keys([[1.0, 0.0], [2.0, 0.0], [8.0, 0.0]])  # the last one always scores highest
    queries = fp8_queries(torch.ones(12, 1, 2))
    picks = indexer.select_entries(queries, keys, ends, 1)
    assert picks[:, 0].tolist() == [-1] * 3 + [0] * 4 + [1] * 4 + [2]
    changed = indexer.select_entries(queries, fp8_keys([[1.0, 0.0], [2.0, 0.0], [-8.0, 3.0]]), ends, 1)
    assert torch.equal(changed[:11], picks[:11])


def test_ix_19_picks_count_from_each_row_s_start():
    logits = torch.tensor([[3.0] * 9, [-1.0] * 9, [0.0] * 9])
    expected = [[0, 1], [0, 1], [-1, -1]]
    for order in ("index", "score", "any"):
        got = indexer.select_topk(logits, 2, starts=ints(0, 5, 9), ends=ints(4, 9, 9), order=order)
        assert got.tolist() == expected
        turned = indexer.select_topk(logits.flip(0), 2, starts=ints(9, 5, 0), ends=ints(9, 9, 4), order=order)
        assert turned.tolist() == expected[::-1]


@pytest.mark.parametrize(("ratio", "lengths"), [(0, [1, 3, 4, 7, 8, 9]), (1, [1, 3, 4, 7, 8, 9]), (2, [0, 1, 2, 3, 4, 4]),
                                                (4, [0, 0, 1, 1, 2, 2]), (128, [0] * 6)])  # fmt: skip
def test_ix_23_ratios_without_compression(ratio, lengths):
    kv_len = torch.tensor([1, 3, 4, 7, 8, 9])
    for dtype in (torch.int32, torch.int64):
        assert indexer.visible_entries((kv_len - 1).to(dtype), ratio=ratio).tolist() == lengths
    ends = indexer.visible_entries(torch.tensor([-1, -5, 2**63 - 1, -(2**63)]), ratio=ratio)
    assert ends.tolist() == [0, 0, 2**31 - 1, 0]


@pytest.mark.parametrize("ratio", [1, 3, 2**31, 2**40, 2**62, 2**63 - 1])
def test_ix_23_positions_at_the_ends_of_their_type(ratio):
    positions = [-(2**63), -2, -1, 0, 2**31 - 1, 2**62 - 1, 2**62, 2**62 + 1, 2**63 - 2, 2**63 - 1]
    expected = [min(max((position + 1) // ratio, 0), 2**31 - 1) for position in positions]
    assert indexer.visible_entries(torch.tensor(positions), ratio=ratio).tolist() == expected


@pytest.mark.parametrize("count", [1, 2])
def test_few_keys_of_few_numbers(count):
    """Scales right behind two codes."""
    queries, keys = made("fp8", tokens=1, entries=count, heads=2, dim=2)
    pages = indexer.store_index_keys(keys, torch.zeros(2, 13, dtype=torch.uint8), torch.arange(count) + 2, format="fp8", page_size=2)
    loaded = indexer.load_index_keys(pages, torch.arange(count) + 2, format="fp8", page_size=2, dim=2)
    assert torch.equal(loaded.codes.view(torch.uint8), keys.codes.view(torch.uint8))
    assert torch.equal(loaded.scales, keys.scales)
    paged = indexer.paged_index_logits(queries, pages, ints(1)[None], ints(0), ints(count), format="fp8", page_size=2, width=count)
    assert torch.equal(paged, indexer.index_logits(queries, keys, ends=ints(count)))


@pytest.mark.parametrize("block", [6, 2**40, 2**63 - 1])
def test_blocks_longer_than_a_row(block):
    logits = torch.tensor([[1.0, NAN, -INF, 2.0, 0.0]]).expand(3, 5)
    assert indexer.candidate_blocks(logits, ints(5, 0, 2), block=block, count=3).tolist() == [[0], [-1], [0]]
    kept = indexer.restrict_to_blocks(logits, ints(0, 1, -1)[:, None], block=block)
    assert torch.equal(kept[0].view(torch.int32), logits[0].view(torch.int32))
    assert (kept[1:] == -INF).all()
    assert indexer.candidate_blocks(logits[:, :0], ints(5, 0, 2), block=block).shape == (3, 0)


def test_ix_25_rows_beyond_element_2_31():
    n = 300
    near = random(3, n, seed=25).bfloat16()
    logits = torch.empty(2**31 + n, dtype=torch.bfloat16).as_strided((3, n), (2**30, 1))
    logits.copy_(near)
    assert torch.equal(indexer.select_topk(logits, 16, order="score"), indexer.select_topk(near, 16, order="score"))
    blocks = indexer.candidate_blocks(logits, ints(n, n, n), count=9)
    assert torch.equal(blocks, indexer.candidate_blocks(near, ints(n, n, n), count=9))
    same_bits(indexer.restrict_to_blocks(logits, blocks), indexer.restrict_to_blocks(near, blocks))


@pytest.mark.parametrize("tokens", [8191, 8192, 8193])
def test_ix_25_no_row_is_left_out_of_a_plan(tokens):
    keys = fp8_keys(torch.eye(4))
    q = torch.zeros(tokens, 1, 4)
    q[torch.arange(tokens), 0, torch.arange(tokens) % 4] = 1.0
    picks = indexer.select_entries(fp8_queries(q), keys, torch.full((tokens,), 4), 1)
    assert picks[:, 0].tolist() == [t % 4 for t in range(tokens)]


@pytest.mark.parametrize("length", [779424, 779425, 1048576])
def test_ix_26_contexts_of_a_million_tokens(length):
    logits = random(4, length, seed=26).bfloat16()
    ends = ints(length, length - 1, 600, 100)
    picks = indexer.select_topk(logits, 512, ends=ends, order="score")
    for row, end in enumerate(ends.tolist()):
        known = min(end, 512)
        same_bits(logits[row, picks[row, :known].long()], logits[row, :end].topk(known).values)
        assert (picks[row, known:] == -1).all()


def test_ix_27_prompts_shorter_than_an_entry_then_decode():
    """V4's chain from tokens to picks: decode from any prompt gives what a prompt of all the tokens gives."""
    ratio, total, dim = 4, 9, 32
    values, scores = random(total, 2 * dim, seed=1), random(total, 2 * dim, seed=2)
    table = rope_table(rope_frequencies(10000.0, 16), 64)
    q, w = random(total, 2, dim, seed=3).bfloat16(), random(total, 2, seed=4).bfloat16()
    weight, ape = torch.ones(dim).bfloat16(), random(ratio, 2 * dim, seed=5)

    def run(prompt):
        state = compressor.compressor_state(1, dim, ratio=ratio, overlap=True)
        pages, picks, logits = torch.zeros(2, 4 * INDEX_LAYOUTS["fp4"].token_bytes(dim), dtype=torch.uint8), [], []
        for first, last in [(0, prompt), *((p, p + 1) for p in range(prompt, total))]:
            done = compressor.compress(
                values[first:last],
                scores[first:last],
                state,
                torch.tensor([first]),
                ints(0, last - first),
                ratio=ratio,
                overlap=True,
                ape=ape,
            )
            state = done.state
            at = torch.where(done.entries >= 0, done.entries * ratio, -1)
            keys = indexer.index_keys(done.pooled, table, at, weight=weight, eps=1e-6, hadamard=True)
            pages = indexer.store_index_keys(keys, pages, done.entries, format="fp4", page_size=4)
            tokens = torch.arange(first, last)
            queries = indexer.index_queries(q[tokens], w[tokens], table, tokens, hadamard=True)
            ends, requests = indexer.visible_entries(tokens, ratio=ratio), torch.zeros(len(tokens), dtype=torch.int32)
            found = indexer.paged_index_logits(queries, pages, ints(0)[None], requests, ends, format="fp4", page_size=4, width=4)
            logits.append(found)
            picks.append(indexer.select_topk(found, 2, ends=ends, order="index"))
        return torch.cat(logits), torch.cat(picks)

    expected = run(total)
    assert expected[1][:3].tolist() == [[-1, -1]] * 3
    assert (expected[0] > -INF).sum(1).tolist() == [0] * 3 + [1] * 4 + [2] * 2
    for prompt in (1, 2, 3, 4):
        logits, picks = run(prompt)
        same_bits(logits, expected[0])
        assert torch.equal(picks, expected[1])


def test_kv_01_index_keys_of_layers_do_not_alias():
    pool = torch.zeros(3, 2, 4 * 12, dtype=torch.uint8)
    layers = [pool[layer] for layer in range(3)]
    assert [view.data_ptr() - pool.data_ptr() for view in layers] == [0, 96, 192]
    slots = torch.arange(8)
    for layer, view in enumerate(layers):
        keys = fp8_keys(torch.full((8, 8), layer + 1.0), torch.full((8,), layer + 1.0))
        view.copy_(indexer.store_index_keys(keys, view, slots, format="fp8", page_size=4))
    for layer, view in enumerate(layers):
        loaded = indexer.load_index_keys(view, slots, format="fp8", page_size=4, dim=8)
        assert (loaded.scales == layer + 1).all()
        assert (loaded.codes.float() == layer + 1).all()


# What the contract permits


def test_permitted_picks_are_the_best_within_their_bound():
    queries, keys = made("fp8", tokens=1, entries=40)
    options = {"precision": "fp32", "order": "index", "block": 8}
    call = Call((queries, keys, ints(30), 4), options)
    right = indexer.select_entries(*call.args, order="index")
    worst = int(indexer.index_logits(queries, keys, ends=ints(30))[0, :30].argmin())
    assert index_bounds.entries(call, right, right).all()
    wrong = [right.flip(1), right.clone(), right.clone(), right.clone(), right.clone()]
    wrong[1][0, 3] = -1
    wrong[2][0, 1] = right[0, 0]
    wrong[3][0] = torch.tensor(sorted([*right[0, 1:].tolist(), worst]))
    wrong[4][0] = torch.tensor(sorted([*right[0, :3].tolist(), 35]))
    assert [bool(index_bounds.entries(call, right, picks).all()) for picks in wrong] == [False] * 5
    blocks = indexer.select_candidates(queries, keys, ints(30), count=2)
    call = Call((queries, keys, ints(30)), {"precision": "fp32", "block": 8, "count": 2})
    assert 3 in blocks
    for picks, permitted in ((blocks, True), (torch.where(blocks == 3, 4, blocks), False), (blocks.flip(1), False)):
        assert bool(index_bounds.blocks(call, blocks, picks).all()) is permitted


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1e-30, 1.0, 1e20]), k=st.integers(1, 12))
def test_equal_scores_permit_any_of_them(seed, size, k):
    """All entries tie: any k of them will do. With one entry above the others it must be there."""
    source = torch.Generator().manual_seed(seed)
    numbers = torch.full((12, 2), 2.0)
    best = int(torch.randint(0, 12, (), generator=source))
    queries, options = fp8_queries([[[1.0, 1.0]]], [[size]]), {"precision": "fp32", "order": "index", "block": 8}
    picks = torch.randperm(12, generator=source)[:k].sort().values[None].int()
    call = Call((queries, fp8_keys(numbers), ints(12), k), options)
    assert index_bounds.entries(call, picks, picks).all()
    numbers[best] = 2.25
    call = Call((queries, fp8_keys(numbers), ints(12), k), options)
    assert bool(index_bounds.entries(call, picks, picks).all()) is (best in picks)


@pytest.mark.parametrize("format", FORMATS)
def test_permitted_codes_are_those_of_roundings(format):
    """Rows that round nothing permit one code; a wrong code, scale or weight anywhere is noticed."""
    q, w, at = random(6, 2, 64).bfloat16(), random(6, 2, seed=1).bfloat16(), torch.arange(6)
    table = rope_table(rope_frequencies(10000.0, 32), 8)
    call = Call((q, w, table, at), {"format": format, "hadamard": True})
    right = indexer.index_queries(*call.args, **call.kwargs)
    codes = right.codes.view(torch.uint8)
    checks = (index_code_bounds.query_codes, index_code_bounds.query_scales, index_code_bounds.query_weights)
    for check, part in zip(checks, right, strict=True):
        assert part is None or check(call, part, part).all()
    flipped = (codes ^ (0x11 if format == "fp4" else 0x80)).view(right.codes.dtype)
    assert not index_code_bounds.query_codes(call, right.codes, flipped).any()
    beside = torch.nextafter(right.weights, torch.tensor(INF))
    assert index_code_bounds.query_weights(call, right.weights, beside).double().mean() < 0.25
    if format == "fp4":
        assert not index_code_bounds.query_scales(call, right.scales, right.scales + 257).any()
        assert not index_code_bounds.query_scales(call, right.scales, right.scales | 1 << 24).any()


# Arguments


def refusals():
    q, w, at = torch.zeros(2, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    queries, keys = made("fp4", tokens=2, entries=3, heads=4, dim=64)
    eight, eights = made("fp8", tokens=2, entries=3, heads=4, dim=64)
    pages, table, mine, ends = torch.zeros(2, 4 * 36, dtype=torch.uint8), ints(0)[None], ints(0, 0), ints(3, 3)
    logits, four = torch.zeros(2, 9), {"format": "fp4", "page_size": 4}
    paged = (queries, pages, table, mine, ends)
    return [
        ("positions", lambda: indexer.visible_entries(torch.zeros(2), ratio=4)),
        ("ratio", lambda: indexer.visible_entries(at, ratio=-1)),
        ("q", lambda: indexer.index_queries(q.float(), w, STILL, at)),
        ("q", lambda: indexer.index_queries(q[..., :16], w, STILL, at)),
        ("q", lambda: indexer.index_queries(q.repeat(1, 1, 4), w, STILL, at)),
        ("q", lambda: indexer.index_queries(q[:, :0], w[:, :0], STILL, at)),
        ("weights", lambda: indexer.index_queries(q, w[:, :3], STILL, at)),
        ("weights", lambda: indexer.index_queries(q, w.float(), STILL, at)),
        ("table", lambda: indexer.index_queries(q, w, STILL[:0], at)),
        ("positions", lambda: indexer.index_queries(q, w, STILL, at[:1])),
        ("format", lambda: indexer.index_queries(q, w, STILL, at, format="fp6")),
        ("amax_floor", lambda: indexer.index_queries(q, w, STILL, at, amax_floor="sglang")),
        ("amax_floor", lambda: indexer.index_queries(q, w, STILL, at, format="fp8", amax_floor="none")),
        ("ties", lambda: indexer.index_queries(q, w, STILL, at, ties="up")),
        ("weight_dtype", lambda: indexer.index_queries(q, w, STILL, at, weight_dtype="fp16")),
        ("weight_dtype", lambda: indexer.index_queries(q, w, STILL, at, format="fp8", weight_dtype="bf16")),
        ("eps", lambda: indexer.index_keys(x, STILL, at, weight=torch.ones(64))),
        ("weight", lambda: indexer.index_keys(x, STILL, at, eps=1e-6)),
        ("weight", lambda: indexer.index_keys(x, STILL, at, weight=torch.ones(63), eps=1e-6)),
        ("eps", lambda: indexer.index_keys(x, STILL, at, weight=torch.ones(64), eps=-1.0)),
        ("pages", lambda: indexer.store_index_keys(keys, pages[:, 1:], torch.arange(3), **four)),
        ("pages", lambda: indexer.store_index_keys(keys, pages[:1].expand(2, -1), torch.arange(3), **four)),
        ("pages", lambda: indexer.store_index_keys(keys, pages.T.contiguous().T, torch.arange(3), **four)),
        ("keys.codes", lambda: indexer.store_index_keys(keys, pages, torch.arange(3), format="fp8", page_size=1)),
        ("keys.scales", lambda: indexer.store_index_keys(keys._replace(scales=keys.scales[:2]), pages, torch.arange(3), **four)),
        ("slots", lambda: indexer.store_index_keys(keys, pages, torch.arange(2), **four)),
        ("page_size", lambda: indexer.load_index_keys(pages, at, format="fp4", page_size=0, dim=64)),
        ("dim", lambda: indexer.load_index_keys(pages, at, dim=48, **four)),
        ("keys", lambda: indexer.store_index_keys(tuple(keys), pages, torch.arange(3), **four)),
        ("queries", lambda: indexer.index_logits(tuple(queries), keys, ends=ends)),
        ("keys", lambda: indexer.select_entries(queries, keys.codes, ends, 2)),
        ("ends", lambda: indexer.index_logits(queries, keys, ends=ends[:1])),
        ("ends", lambda: indexer.select_entries(queries, keys, None, 2)),
        ("ends", lambda: indexer.paged_index_logits(*paged[:4], None, width=4, **four)),
        ("ends", lambda: indexer.candidate_blocks(logits, None)),
        ("starts", lambda: indexer.index_logits(queries, keys, starts=ends.float(), ends=ends)),
        ("precision", lambda: indexer.index_logits(queries, keys, ends=ends, precision="fp16")),
        ("keys.codes", lambda: indexer.index_logits(queries, eights, ends=ends)),
        ("keys.codes", lambda: indexer.index_logits(queries, made("fp4", entries=3, dim=32)[1], ends=ends)),
        ("queries.scales", lambda: indexer.index_logits(eight._replace(scales=queries.scales), eights, ends=ends)),
        ("queries.scales", lambda: indexer.index_logits(queries._replace(scales=None), keys, ends=ends)),
        ("queries.codes", lambda: indexer.index_logits(queries._replace(codes=q.double()), keys, ends=ends)),
        ("format", lambda: indexer.paged_index_logits(*paged, format="fp8", page_size=4, width=4)),
        ("width", lambda: indexer.paged_index_logits(*paged, width=-1, **four)),
        ("requests", lambda: indexer.paged_index_logits(*paged[:3], mine[:1], ends, width=4, **four)),
        ("block_table", lambda: indexer.paged_index_logits(*paged[:2], table[0], mine, ends, width=4, **four)),
        ("logits", lambda: indexer.select_topk(logits.double(), 2)),
        ("k", lambda: indexer.select_topk(logits, 0)),
        ("order", lambda: indexer.select_topk(logits, 2, order="best")),
        ("requests", lambda: indexer.select_topk(logits, 2, block_table=table, page_size=4)),
        ("block_table", lambda: indexer.select_topk(logits, 2, page_size=4)),
        ("page_size", lambda: indexer.select_topk(logits, 2, block_table=table, requests=mine, page_size=0)),
        ("page_size", lambda: indexer.select_topk(logits, 2, block_table=table, requests=mine, page_size=2**31)),
        ("block", lambda: indexer.candidate_blocks(logits, ends, block=0)),
        ("count", lambda: indexer.candidate_blocks(logits, ends, count=0)),
        ("blocks", lambda: indexer.restrict_to_blocks(logits, ends)),
        ("chunk", lambda: indexer.select_entries(queries, keys, ends, 2, chunk=0)),
        ("budget_bytes", lambda: indexer.select_candidates(queries, keys, ends, budget_bytes=0)),
        ("candidates", lambda: indexer.select_entries(queries, keys, ends, 2, candidates=table)),
    ]


@pytest.mark.parametrize("number", range(len(refusals())))
def test_wrong_arguments_are_named(number):
    argument, call = refusals()[number]
    with pytest.raises(ArgumentError, match=rf"^{argument}: got "):
        call()


def test_paged_scores_of_unrounded_queries():
    """Their weights are fp64: what `index_logits` takes, pages take too."""
    generator = torch.Generator().manual_seed(5)
    q, weights = torch.randn(3, 2, 64, generator=generator).bfloat16(), torch.randn(3, 2, generator=generator).bfloat16()
    table = rope_table(rope_frequencies(1e4, 64), 8)
    keys = indexer.index_keys(torch.randn(8, 64, generator=generator).bfloat16(), table, torch.arange(8))
    pages = indexer.store_index_keys(keys, torch.zeros(2, 4 * 36, dtype=torch.uint8), torch.arange(8), format="fp4", page_size=4)
    with numerics("unrounded"):
        queries = indexer.index_queries(q, weights, table, torch.arange(3))
        assert queries.weights.dtype == torch.float64
        whole = indexer.index_logits(queries, keys, ends=torch.tensor([8, 5, 0]))
        paged = indexer.paged_index_logits(
            queries, pages, torch.tensor([[0, 1]], dtype=torch.int32), torch.zeros(3, dtype=torch.int32), torch.tensor([8, 5, 0]),
            format="fp4", page_size=4, width=8,
        )  # fmt: skip
    assert torch.equal(whole, paged)
