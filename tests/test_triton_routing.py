"""The router's Triton kernels against the reference, bit for bit, every feature of the launch.

On a GPU the kernels run there. Elsewhere Triton's interpreter runs them, which must be asked for before triton is imported: one test runs
this file again in a process of its own.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from dsv4.fast import dispatch
from dsv4.fast import routing as fast
from dsv4.reference import routing as reference
from dsv4.reference.eplb import make_placement
from interpreted import INTERPRETED, passes

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
kernel = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in its own process, or on a GPU")
INF, NAN = float("inf"), float("nan")
IMAGE = 129264


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_kernels_in_the_interpreter():
    passes(__file__, least=57)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Let the triton rows run on the CPU, for the interpreter."""
    for function in ("routing.route", "routing.route_topk"):
        rows = tuple(replace(row, device=dispatch.any_device) for row in dispatch.TABLES[function])
        monkeypatch.setitem(dispatch.TABLES, function, rows)


def random(*shape, seed=0, scale=2.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def ints(most, *shape, seed=0, dtype=torch.int32):
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(DEVICE)


def same(got, expected):
    for left, right in zip(got, expected, strict=True):
        if left is None or right is None:
            assert left is right
            continue
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        numbers = ~right.isnan()
        assert torch.equal(left.isnan(), ~numbers)
        assert torch.equal(left.view(torch.int32)[numbers], right.view(torch.int32)[numbers])


def check(logits, k=6, **options):
    """One launch against the chain of the reference; counters come in filled."""
    options = {"scale": 1.5, **options}
    counts = options.pop("counts", None)
    got = fast.route(logits, k, **options, counts=None if counts is None else counts.clone(), impl="triton")
    same(got, reference.route(logits, k, **options, counts=counts))
    return got


def placement(experts, redundant=8, ranks=4):
    logical = torch.cat([torch.arange(experts), ints(experts, redundant).cpu()]).int()
    logical = logical[torch.randperm(len(logical), generator=torch.Generator().manual_seed(1))].to(DEVICE)
    return make_placement(logical, experts, rank_map=make_placement(logical, experts).replicas[:, 0])


SLOTS = {
    "none": {},
    "global": {"shared": 1, "shared_slots": "global", "shared_copies": 2},
    "home": {"shared": 2, "shared_slots": "home_rank", "ranks": 4},
}


@kernel
@pytest.mark.parametrize("experts", [256, 384])
@pytest.mark.parametrize("slots", SLOTS)
def test_every_combination(experts, slots):
    """Image and text rows, with and without replicas, each layout of shared slots, each place of the factor, with and without padding."""
    logits, bias, image_bias = random(4, experts), random(experts, seed=1, scale=0.1), random(experts, seed=2, scale=0.5)
    tokens = torch.tensor([5, IMAGE, IMAGE, 9], device=DEVICE)
    for images, replicated, where, padded in product((False, True), (False, True), ("router", "output"), (False, True)):
        options = {"bias": bias, **SLOTS[slots], "scale_placement": where, "token_ids": tokens, "rank": 3 if slots == "home" else 0}
        if images:
            options |= {"image_bias": image_bias, "image_token_id": IMAGE}
        if replicated:
            options |= {"placement": placement(experts), "algorithm": "row_modulo"}
        if padded:
            options |= {"live_rows": torch.tensor([2], dtype=torch.int32, device=DEVICE)}
        check(logits, **options, counts=ints(9, experts + 8 * replicated))


@kernel
@pytest.mark.parametrize("algorithm", ["none", "static", "dynamic", "row_modulo", "row_index", "probability"])
def test_replicas(algorithm):
    experts, table = 24, placement(24, 24)
    table.replicas[3], table.counts[0] = 99, 0  # a slot that does not exist, an expert that nobody holds
    probabilities = random(*table.replicas.shape).abs()
    probabilities[5] = 0
    drawn = {"words": ints(2**31 - 1, 9, 4), "uniforms": random(9, 4).abs() % 1, "probabilities": probabilities}
    check(random(9, experts), 4, placement=table, algorithm=algorithm, rank=3, **drawn, counts=ints(5, 48))


@kernel
def test_dynamic_words_may_be_negative_and_wide():
    words = torch.tensor([[-1, -(2**31)], [2**40 + 7, 65536]], device=DEVICE)
    check(random(2, 24), 2, placement=placement(24, 24), algorithm="dynamic", words=words)


@kernel
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("images", [False, True])
def test_rows_by_table(dtype, images):
    table = ints(40, 16, 6, dtype=dtype) - 2  # some entries are -2, -1 or beyond the last of 36 experts
    tokens = torch.tensor([3, 15, 16, -1, 2**31 - 1, 4, 4, 0], dtype=dtype, device=DEVICE)
    logits = random(8, 36).index_fill(0, torch.tensor([7], device=DEVICE), NAN)
    vision = {"image_bias": random(36), "image_token_id": 4} if images else {}
    check(logits, table=table, token_ids=tokens, **vision, counts=ints(3, 36), live_rows=7)


@kernel
def test_image_rows_by_mask_bias_in_bf16():
    mask = torch.tensor([True, False, True, False], device=DEVICE)
    bias = random(36, scale=0.3).bfloat16()
    check(random(4, 36), bias=bias, image_bias=random(36, seed=3), image_mask=mask)
    check(random(4, 36), image_bias=random(36, seed=3), image_mask=mask)
    check(random(4, 36), bias=bias, image_bias=random(36, seed=3))


@kernel
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (3, 2), (8, 8), (40, 7), (256, 1), (384, 3), (384, 8), (64, 32), (1000, 6)])
def test_sizes(experts, k):
    check(random(3, experts), k, bias=random(experts, seed=1, scale=0.1))


DENSE = 1 + 1e-6 * torch.arange(384.0)
ROWS = {
    "equal": torch.zeros(384),
    "two values": (torch.arange(384) % 2).float(),
    "eight equal at the top": torch.where(torch.arange(384) % 48 == 5, 2.0, 1.0),
    "nine equal at the top": torch.where(torch.arange(384) % 42 == 5, 2.0, 1.0),
    "dense, ascending": DENSE,
    "dense, descending": DENSE.flip(0),
    "last bits": (torch.tensor([1.0]).view(torch.int32) + torch.arange(384, dtype=torch.int32) % 11).view(torch.float32),
    "far below": torch.linspace(-220, -80, 384),
    "far above": torch.linspace(18, 3e38, 384),
    "around the threshold": torch.linspace(19.9999, 20.0001, 384),
    "NaN but for three": torch.where(torch.arange(384) % 150 == 3, 1.0, NAN),
    "all NaN": torch.full((384,), NAN),
    "infinities": torch.where(torch.arange(384) % 100 == 3, INF, -INF),
    "zeros of both signs": torch.where(torch.arange(384) % 3 == 0, -0.0, 0.0),
}
BIASES = {
    "none": None,
    "zero": torch.zeros(384),
    "large": torch.linspace(-1e4, 1e4, 384),
    "equal keys": -torch.arange(384.0) * 0,
    "infinite": torch.where(torch.arange(384) % 7 == 0, -INF, torch.where(torch.arange(384) % 11 == 0, INF, 0.25)),
    "negative": torch.full((384,), -3.0),
}


@kernel
@pytest.mark.parametrize("bias", BIASES)
def test_ties_near_ties_and_specials(bias):
    check(torch.stack(list(ROWS.values())).to(DEVICE), bias=None if BIASES[bias] is None else BIASES[bias].to(DEVICE))
    check(torch.stack(list(ROWS.values())).to(DEVICE), scale=2.5, epsilon=0.0)


@kernel
@pytest.mark.parametrize("step", [1e-3, 1e-4, 1e-5, 1e-6, 1e-7])
def test_crowded_scores_need_exact_keys(step):
    check(1 + random(20, 384, scale=step), bias=random(384, seed=1, scale=step))


@kernel
@pytest.mark.parametrize(("k", "shared"), [(31, 1), (32, 1), (30, 5)])
def test_shared_slots_beyond_a_warp(k, shared):
    check(random(3, 64), k, shared=shared, shared_slots="home_rank", ranks=4, rank=2, live_rows=2, counts=ints(9, 64))


@kernel
def test_rows_may_be_strided_and_are_not_their_neighbours():
    wide = random(10, 500)
    check(wide[:, 50:434])
    check(wide[::2, 100:356])
    check(wide[:, ::3][:, :64])
    whole = check(wide)
    for row in (0, 3, 9):
        alone = check(wide[row : row + 1])
        same([alone.ids[0], alone.weights[0]], [whole.ids[row], whole.weights[row]])


@kernel
@pytest.mark.parametrize("live", [-5, 0, 1, 3, 100, 2**31, 2**40, 2**32 + 1, -(2**40)])
def test_live_rows_on_the_device_are_clamped(live):
    rows = torch.tensor(live, device=DEVICE)
    check(random(3, 36), live_rows=rows, shared=1, shared_slots="home_rank", ranks=4, rank=1, counts=ints(3, 36))


@kernel
@pytest.mark.parametrize("k", [1, 6, 32])
def test_selection_alone(k):
    scores = torch.stack([*(row.abs() for row in ROWS.values()), random(384).cpu()]).to(DEVICE)
    mask = torch.arange(len(scores), device=DEVICE) % 2 == 0
    for options in ({}, {"bias": random(384)}, {"bias": random(384), "image_mask": mask, "image_bias": random(384, seed=9)}):
        same([fast.route_topk(scores, k, **options, impl="triton")], [reference.route_topk(scores, k, **options)])


@kernel
@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(1, 256, 4096), (3, 130, 1500), (65, 8, 64)])
def test_logits_of_whole_numbers_are_exact(tokens, experts, hidden):
    """Every partial sum is below 2^24: any order gives the product. Interpreted in fp32, since the interpreter's bf16 dot is wrong."""
    from dsv4.fast.kernels.gate import gate_logits

    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    x, weight = (ints(7, rows, hidden, seed=rows).to(dtype) - 3 for rows in (tokens, experts))
    same([gate_logits(x, weight)], [reference.gate_logits(x, weight)])


@kernel
@pytest.mark.skipif(INTERPRETED, reason="the interpreter's bf16 dot is wrong")
def test_logits_do_not_depend_on_the_batch():
    x, weight = random(300, 4096).bfloat16(), random(384, 4096, seed=1, scale=0.02).bfloat16()
    whole = fast.gate_logits(x, weight, impl="triton")
    for rows in (slice(0, 1), slice(7, 24), slice(100, 229)):
        same([fast.gate_logits(x[rows], weight, impl="triton")], [whole[rows]])
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    same([fast.gate_logits(x[order], weight, impl="triton")], [whole[order]])
