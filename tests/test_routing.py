"""The reference router against DeepSeek's published code (golden/router, golden/functions), tile_kernels, transformers, decimals, literals.

Bounds against fp32 code are counted, in units of U = 2^-24, the largest relative error of one fp32 rounding.
"""

from decimal import Decimal, localcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4.fast import routing as fast_routing
from dsv4.reference import eplb, routing
from dsv4.reference.numerics import numerics
from dsv4.types import ArgumentError
from oracles import tile_kernels_module

GOLDEN = Path(__file__).parent / "golden"
U = 2.0**-24
INF, NAN = float("inf"), float("nan")


def fp32(*values):
    return torch.tensor(values, dtype=torch.float32)


def random(*shape, seed=0, scale=4.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def same_bits(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    integer = {4: torch.int32, 8: torch.int64}[got.element_size()]
    assert torch.equal(got.view(integer), expected.view(integer))


def routed(logits, k, **options):
    """`route` without shared slots, as nested lists."""
    result = routing.route(logits, k, **{"scale": 1.0, **options})
    return result.ids.tolist(), result.weights.tolist()


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "router.safetensors")


LAYERS = [("v4", f"layers.{n}") for n in range(5)] + [("v4", "mtp.0")] + [("v41", f"layers.{n}") for n in range(11)]


@pytest.mark.parametrize(("model", "layer"), LAYERS)
def test_published_code_stage_by_stage(golden, model, layer):
    def of(name):
        return golden.get(f"{model}.{layer}.{name}")

    token_ids, rows = golden[f"{model}.input_ids"][0], golden[f"{model}.rows"]
    mask = None if model == "v4" else golden["v41.token_types"][0] >= 0
    logits, ids, weights = of("ffn.gate_logits"), of("ffn.gate_ids"), of("ffn.gate_weights")
    bias, table = of("ffn.gate.bias"), of("ffn.gate.tid2eid")
    x, z = (of("ffn_norm"), logits) if of("ffn_norm") is not None else (of("ffn_norm.rows"), logits[rows])
    gate = of("ffn.gate.weight")
    # n products and n - 1 additions, in any order, and the rounding of ours
    noise = (gate.shape[1] + 1) * U * (x[0].double().abs() @ gate.double().abs().T)
    assert ((routing.gate_logits(x[0], gate) - z).abs() <= noise).all()

    scores = routing.gate_scores(logits)
    if of("ffn.gate_key") is not None:
        row_bias = bias if mask is None else torch.where(mask[:, None], of("ffn.gate.bias_vl"), bias)
        # theirs: exp and log1p within an ulp each (2 U), halved by the root, the root; ours: one rounding; then an addition each
        assert ((scores + row_bias - of("ffn.gate_key")).abs() <= 4 * U * scores + 2 * U * of("ffn.gate_key").abs()).all()
        picked = routing.route_topk(scores, 3, bias=bias, image_mask=mask, image_bias=of("ffn.gate.bias_vl"))
    else:
        picked = routing.route_hash(scores, token_ids, table)
    assert torch.equal(picked.long(), ids)
    # numerator and sum carry the scores' error; theirs has 2 additions, quotient and product; ours the sum, quotient and product
    got = routing.route_weights(scores, ids, scale=1.5, epsilon=0.0 if model == "v4" else 1e-20)
    assert ((got - weights).abs() <= (2 * 4 + 4 + 3) * U * weights).all()
    chain = routing.route(
        logits, 3, scale=1.5, epsilon=0.0 if model == "v4" else 1e-20, bias=bias, image_bias=of("ffn.gate.bias_vl"),
        image_mask=mask, token_ids=token_ids, table=table,
    )  # fmt: skip
    assert torch.equal(chain.ids.long(), ids)
    same_bits(chain.weights, got)


def test_published_router_with_edge_rows():
    case = {name.removeprefix("router."): value for name, value in load_file(GOLDEN / "functions.safetensors").items()}
    logits = routing.gate_logits(case["x"], case["w"])
    result = routing.route(logits, 4, scale=1.5, bias=case["bias"], image_bias=case["bias_vl"], image_mask=case["image_mask"])
    assert torch.equal(result.ids.long(), case["ids"])
    # a logit's own error, relative to the score it leads to, is bounded by noise / (2 softplus) on top of the rounding errors
    noise = (case["w"].shape[1] + 1) * U * (case["x"].double().abs() @ case["w"].double().abs().T)
    bound = 4 * U * case["scores"] + noise / (2 * case["scores"].clamp(min=2.0**-74))
    assert ((routing.gate_scores(logits) - case["scores"]).abs() <= bound).all()
    assert result.weights[29].tolist() == [0.375] * 4  # equal scores
    assert result.weights[30].tolist() == [0.0] * 4  # every score underflows: ids follow the bias
    assert result.ids[30].tolist() == [3, 8, 13, 10]


def test_official_order_of_operations_in_torch():
    logits, bias = random(64, 24), random(1, 24, seed=1, scale=0.1)[0]
    scores = torch.nn.functional.softplus(logits.double()).sqrt().float()
    same_bits(routing.gate_scores(logits), scores)
    ids = (scores + bias).topk(6).indices
    assert torch.equal(routing.route_topk(scores, 6, bias=bias).long(), ids)  # no ties in this draw
    chosen = scores.gather(1, ids)
    total = (chosen.double().sum(1, keepdim=True) + 1e-20).float()
    same_bits(routing.route_weights(scores, ids, scale=2.5), chosen / total * 2.5)


def exact_score(z: float) -> float:
    """sqrt(softplus(z)) with 150 digits, then to fp64 and to fp32: the second rounding hides nothing in these draws."""
    with localcontext() as context:
        context.prec = 150
        exact = Decimal(z) if z > 20 else (1 + Decimal(z).exp()).ln()
        return torch.tensor(float(exact.sqrt()), dtype=torch.float64).float().item()


def test_scores_equal_decimal_arithmetic():
    tail = [-206.0, -150.0, -104.0, -103.9, -87.5, -64.0, -30.0, -17.0, -16.64, -1e-30, 0.0, 1e-30, 19.999998, 20.0, 20.000002, 88.8, 1e30]
    logits = torch.cat([fp32(*tail), random(500, seed=2), random(100, seed=3, scale=40.0)])
    same_bits(routing.gate_scores(logits[None])[0], fp32(*(exact_score(z) for z in logits.tolist())))


def test_scores_of_specials():
    scores = routing.gate_scores(fp32(-INF, INF, NAN, -1e4, 3e38)[None])[0]
    assert scores[:2].tolist() == [0.0, INF]
    assert scores[2].isnan()
    assert scores[3] == 0
    assert scores[4].item() == fp32(3e38).double().sqrt().float().item()


def test_ids_equal_tile_kernels_stable_topk_on_ties():
    scores = torch.randint(0, 4, (200, 64), generator=torch.Generator().manual_seed(4)).float()
    assert torch.equal(routing.route_topk(scores, 8).long(), tile_kernels_module("topk").stable_topk(scores, 8))


@pytest.mark.parametrize("shared", [0, 2])
def test_chain_equals_tile_kernels_gate(shared):
    tokens, experts, k, rank, live = 40, 12, 4, 3, 33
    logits, bias = random(tokens, experts, seed=5), random(1, experts, seed=6, scale=0.2)[0]
    logits[:5] = 0.5  # ties
    placement = eplb.make_placement(torch.tensor([*range(experts), 0, 5, 5, 7]), experts)
    width = placement.replicas.shape[1]
    single = torch.ones(shared, dtype=torch.int32)
    own = 16 + torch.arange(shared, dtype=torch.int32)[:, None]  # tile_kernels keeps shared experts in the same tables
    tables = torch.cat([placement.replicas, torch.cat([own, own.new_full((shared, width - 1), -1)], 1)])
    # their ranks are as wide as the table says; one of them here, so that ids stay global
    ids, weights = tile_kernels_module("topk").top2_sum_gate(
        logits, bias, k, 1, 1, shared > 0, shared, 1.5, rank, 1, 0, 1, "sqrtsoftplus",
        mask=torch.arange(tokens) < live, to_physical_map=tables, logical_count=torch.cat([placement.counts, single]),
    )  # fmt: skip
    result = routing.route(
        logits, k, scale=1.5, bias=bias, placement=placement, algorithm="row_modulo", rank=rank, live_rows=live,
        shared=shared, shared_slots="global" if shared else "none",
    )  # fmt: skip
    assert torch.equal(result.ids.long(), ids)
    # theirs: score 4 U twice, k - 1 additions, quotient, product; ours: sum, quotient, product
    assert ((result.weights - weights).abs() <= (2 * 4 + k - 1 + 2 + 3) * U * weights).all()


def test_weights_equal_tile_kernels_normalisation():
    scores = random(50, 6, seed=7).abs()
    _, expected = tile_kernels_module("moe").normalize_weight(scores)
    got = routing.route_weights(scores, torch.arange(6).expand(50, 6))
    assert ((got - expected).abs() <= (6 + 1 + 2) * U * expected).all()  # theirs: 6 additions and the quotient; ours: two roundings


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is an oracle that only some environments have")
def test_chain_equals_transformers_router():
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

    config = DeepseekV4Config(hidden_size=32, n_routed_experts=16, num_local_experts=16, num_experts_per_tok=4, routed_scaling_factor=1.5)
    router = DeepseekV4TopKRouter(config)
    x = random(30, 32, seed=8, scale=1.0)
    with torch.no_grad():
        router.weight.copy_(random(16, 32, seed=9, scale=0.5))
        router.e_score_correction_bias.copy_(random(1, 16, seed=10, scale=0.1)[0])
        _, weights, ids = router(x)
    logits = routing.gate_logits(x, router.weight.detach())
    result = routing.route(logits, 4, scale=1.5, bias=router.e_score_correction_bias.float())
    order, theirs = result.ids.sort(1), ids.sort(1)  # their slots are not sorted
    assert torch.equal(order.values.long(), theirs.values.long())
    # their logits' error moves a score by at most noise / 2 (the slope of sqrt(softplus) is below 1/2); 15 roundings as in the golden test
    noise = 33 * U * (x.double().abs() @ router.weight.detach().double().abs().T).amax(1, keepdim=True)
    total = routing.gate_scores(logits).gather(1, result.ids.long()).sum(1, keepdim=True)
    got, expected = result.weights.gather(1, order.indices), weights.gather(1, theirs.indices)
    assert ((got - expected).abs() <= 16 * U * expected + 1.5 * 5 * noise / total).all()


def test_rt_01_scores_neither_underflow_nor_overflow():
    ramp = routing.gate_scores(fp32(-16, -16.64, -17, -30, 20, 88, 89, 200)[None])[0].tolist()
    assert [f"{ramp[place]:.5e}" for place in (1, 2, 3, 6, 7)] == [
        "2.43596e-04",
        "2.03468e-04",
        "3.05902e-07",
        "9.43398e+00",
        "1.41421e+01",
    ]
    for logit in (-17.0, 89.0):
        assert routed(torch.full((1, 8), logit), 6, scale=1.5, bias=torch.zeros(8)) == ([[0, 1, 2, 3, 4, 5]], [[0.25] * 6])
    assert routed(fp32(-16, -16.64, -17, -30, 20, 88, 89, 200)[None], 6)[0] == [[7, 6, 5, 4, 0, 1]]


def test_rt_03_scores_are_not_sigmoids():
    assert routed(fp32(4.0, 3.0)[None], 1, bias=fp32(0.0, 0.1))[0] == [[0]]  # sigmoid scores would pick 1


def test_rt_04_token_ids_are_bounded():
    table = torch.arange(16 * 6).reshape(16, 6) % 8
    ids, weights = routed(torch.zeros(5, 8), 6, token_ids=torch.tensor([3, 15, 16, -1, 2**31 - 1]), table=table)
    assert ids == [[2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7], [-1] * 6, [-1] * 6, [-1] * 6]
    assert weights[2:] == [[0.0] * 6] * 3
    assert sum(weights[0]) == pytest.approx(1)


def test_rt_04_table_entries_are_bounded():
    table = torch.tensor([[0, 8], [-5, 3655558880 - 2**32]], dtype=torch.int32)
    assert routed(torch.zeros(2, 8), 2, token_ids=torch.tensor([0, 1]), table=table) == ([[0, -1], [-1, -1]], [[1.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize("hashed", [False, True])
def test_rt_05_image_rows_take_their_own_bias(hashed):
    text = {"table": torch.full((10, 1), 3), "token_ids": torch.full((4,), 9)} if hashed else {"bias": fp32(0, 0, 0, 10)}
    image = {"image_bias": fp32(10, 0, 0, 0), "image_mask": torch.tensor([False, True, False, True])}
    ids, weights = routed(torch.zeros(4, 4), 1, scale=1.5, **text, **image)
    assert ids == [[3], [0], [3], [0]]
    assert weights == [[1.5]] * 4
    assert f"{routing.gate_scores(torch.zeros(1, 1)).item():.6f}" == "0.832555"
    swapped = routed(torch.zeros(4, 4), 1, **text, **{**image, "image_mask": ~image["image_mask"]})
    assert swapped[0] == [[0], [3], [0], [3]]
    unmasked = routed(torch.zeros(4, 4), 1, **text, **{**image, "image_mask": torch.zeros(4, dtype=torch.bool)})
    assert unmasked == routed(torch.zeros(4, 4), 1, **text) == routed(torch.zeros(4, 4), 1, **text, image_bias=image["image_bias"])


def test_rt_05_image_rows_of_a_hash_layer_take_the_image_bias():
    options = {"table": torch.tensor([[3]]), "token_ids": torch.tensor([0, -1, 0]), "image_mask": torch.tensor([False, True, True])}
    assert routed(torch.zeros(3, 4), 1, image_bias=fp32(0, 0, 10, 0), **options)[0] == [[3], [2], [2]]


def test_rt_05_image_rows_by_token_id():
    image = {"image_bias": fp32(10, 0, 0, 0), "image_token_id": 7}
    assert routed(torch.zeros(4, 4), 1, bias=fp32(0, 0, 0, 10), token_ids=torch.tensor([7, 1, 7, 2]), **image)[0] == [[0], [3], [0], [3]]
    assert routed(torch.zeros(4, 4), 1, bias=fp32(0, 0, 0, 10), **image)[0] == [[3]] * 4


@pytest.mark.parametrize("experts", [256, 384])
@pytest.mark.parametrize(
    ("route_topk", "sizes"),
    [
        (routing.route_topk, (8, 3, 1, 2, 5, 6, 7)),
        (partial(fast_routing.route_topk, impl="eager"), (8, 3, 1, 2, 5, 6, 7)),
        (partial(fast_routing.route_topk, impl="inductor"), (8, 3)),  # each size is a graph
    ],
    ids=["reference", "eager", "inductor"],
)
def test_rt_07_nothing_is_left_of_an_earlier_call(route_topk, sizes, experts):
    scores = torch.arange(experts, 0, -1).float().expand(5, experts)
    for k in sizes:
        assert route_topk(scores, k).tolist() == [list(range(k))] * 5
    with pytest.raises(ArgumentError, match="number of experts, 4"):
        route_topk(scores[:, :4], 5)


def test_rt_08_bias_changes_the_choice():
    assert routed(torch.zeros(1, 2), 1, bias=fp32(0, 1e-3))[0] == [[1]]
    assert routed(torch.zeros(1, 2), 1)[0] == [[0]]
    assert routed(fp32(4, 3, 2, 1)[None], 4, bias=fp32(0, 10, 20, 30))[0] == [[3, 2, 1, 0]]


def test_ep_06_both_kinds_of_layer_have_the_shared_slot():
    logits, x = random(5, 8, seed=11), random(5, seed=12).double()
    outputs = torch.cat([random(8, seed=13), fp32(17.0)]).double()  # scalar experts: expert e gives outputs[e] * x
    for layer in ({"bias": torch.zeros(8)}, {"table": torch.arange(60).reshape(20, 3) % 8, "token_ids": torch.arange(5)}):
        fused = routing.route(logits, 3, scale=1.5, shared=1, shared_slots="global", **layer)
        apart = routing.route(logits, 3, scale=1.5, **layer)
        assert fused.ids[:, 3].tolist() == [8] * 5
        total = (fused.weights.double() * outputs[fused.ids.long()]).sum(1) * x
        expected = (apart.weights.double() * outputs[apart.ids.long()]).sum(1) * x + 17.0 * x
        assert torch.equal(total.float(), expected.float())


def test_ep_08_an_expert_twice_counts_twice():
    ids, scores = torch.tensor([[3, 3, 1, 0]]), fp32(0.2, 0.3, 9.0, 0.25)[None]
    assert routing.route_weights(scores, ids)[0].tolist() == fp32(0.25, 0.25, 0.3, 0.2).tolist()
    assert routing.count_experts(ids, torch.zeros(4, dtype=torch.int32)).tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([1.0, 2.0, 2.0, 2.0], [1, 2, 3]),
        ([-0.0, 0.0, -0.0, 0.0], [0, 1, 2]),
        ([NAN, 1.0, NAN, 2.0], [3, 1, -1]),
        ([NAN, NAN, NAN, NAN], [-1, -1, -1]),
        ([-INF, NAN, -INF, INF], [3, 0, 2]),
        ([INF, -INF, INF, NAN], [0, 2, 1]),
        ([-NAN, -1.0, -2.0, -3.0], [1, 2, 3]),
    ],
)
def test_ties_and_specials(keys, expected):
    assert routing.route_topk(fp32(*keys)[None], 3).tolist() == [expected]
    assert routing.route_topk(torch.zeros(1, 4), 3, bias=fp32(*keys)).tolist() == [expected]


def test_keys_are_rounded_before_they_are_compared():
    # 1 + 2^-25 and 1 are one fp32 key: the lowest id wins, though the exact sum of expert 1 is larger
    assert routing.route_topk(fp32(1.0, 1.0)[None], 1, bias=fp32(0.0, 2.0**-25)).tolist() == [[0]]


def test_bf16_bias_is_widened():
    bias = fp32(0.1, 0.3, 0.2).bfloat16()
    assert routing.route_topk(torch.zeros(1, 3), 3, bias=bias).tolist() == [[1, 2, 0]]


def test_nan_scores_have_no_slot_and_no_part_in_the_sum():
    assert routed(fp32(NAN, 0.0, NAN, 0.0)[None], 3) == ([[1, 3, -1]], [[0.5, 0.5, 0.0]])


def test_sum_is_added_from_left_to_right_in_fp64_and_rounded_once():
    # 1 + 2^-24 + 2^-24: fp32 addition would stay at 1 twice
    weights = routing.route_weights(fp32(1.0, 2.0**-24, 2.0**-24)[None], torch.tensor([[0, 1, 2]]))
    assert weights[0, 0].item() == (fp32(1.0) / fp32(1.0 + 2.0**-23)).item()


@pytest.mark.parametrize("epsilon", [0.0, 1e-20])
def test_underflowed_rows_weigh_nothing(epsilon):
    logits = torch.full((1, 4), -1000.0)
    assert routed(logits, 2, epsilon=epsilon, bias=fp32(0, 1, 2, 3)) == ([[3, 2]], [[0.0, 0.0]])
    assert routed(logits, 2, epsilon=epsilon, table=torch.tensor([[1, 0]]), token_ids=torch.tensor([0])) == ([[1, 0]], [[0.0, 0.0]])


def test_epsilon_and_scale_are_fp32_numbers():
    weights = routing.route_weights(fp32(1e-20, 1e-20)[None], torch.tensor([[0]]), scale=0.1)
    assert weights.item() == fp32(0.05).item()
    assert routing.route_weights(fp32(3.0)[None], torch.tensor([[0]]), scale=2.1).item() == fp32(2.1).item()


def test_absent_ids_take_no_part():
    assert routing.route_weights(fp32(1.0, 3.0)[None], torch.tensor([[0, -1, 1, 2, -7]])).tolist() == [[0.25, 0.0, 0.75, 0.0, 0.0]]


def test_infinite_scores_follow_ieee():
    weights = routing.route_weights(fp32(INF, 1.0)[None], torch.tensor([[0, 1, -1]]))[0]
    assert weights[0].isnan()
    assert weights[1:].tolist() == [0.0, 0.0]


def test_home_rank_example_of_the_specification():
    ids, weights = torch.tensor([[0, 5, 7, -1]]), fp32(0.1, 0.2, 0.3, 0.4)[None]
    result = routing.remap_home_rank_slots(ids, weights, 1, experts=8, ranks=2, rank=1)
    assert result.ids.tolist() == [[0, 6, 8, -1, 9]]
    assert result.weights.tolist() == [[*fp32(0.1, 0.2, 0.3).tolist(), 0.0, 1.0]]


@pytest.mark.parametrize(
    ("placement", "copies", "weight"),
    [("router", 1, 1.0), ("output", 1, 1 / 2.5), ("dispatch", 1, 1 / 2.5), ("router", 4, 0.25), ("output", 4, 0.1), ("output", 3, 1 / 7.5)],
)
def test_weight_of_global_shared_slots(placement, copies, weight):
    result = routing.append_shared_slots(
        torch.tensor([[1, -1, 6]]), fp32(1, NAN, 3)[None], 2, experts=6, scale=2.5, scale_placement=placement, copies=copies
    )
    assert result.ids.tolist() == [[1, -1, -1, 6, 7]]  # id 6 would be the shared expert's
    assert result.weights.tolist() == [fp32(1, 0, 0, weight, weight).tolist()]


def test_phantom_shared_expert_of_padding_rows():
    logits = torch.zeros(3, 4)
    live = routing.route(logits, 2, scale=1.0, shared=1, shared_slots="home_rank", ranks=2, rank=1, live_rows=1)
    assert live.ids.tolist() == [[0, 1, 5], [-1, -1, -1], [-1, -1, -1]]
    assert live.weights.tolist() == [[0.5, 0.5, 1.0], [0.0] * 3, [0.0] * 3]


@pytest.mark.parametrize(
    ("live_rows", "expected"),
    [(0, 0), (2, 2), (3, 3), (torch.tensor(2, dtype=torch.int32), 2), (torch.tensor([1]), 1), (torch.tensor(99), 3), (torch.tensor(-5), 0)],
)
def test_padding(live_rows, expected):
    result = routing.mask_padding(torch.arange(6).reshape(3, 2), torch.ones(3, 2), live_rows)
    assert (result.ids[:expected] == torch.arange(6).reshape(3, 2)[:expected]).all()
    assert (result.ids[expected:] == -1).all()
    assert result.weights.sum(1).tolist() == [2.0] * expected + [0.0] * (3 - expected)


@pytest.mark.parametrize(
    ("expert", "weight", "word"),
    [
        (3, 1.0, 0x00033F80),
        (383, 1 + 2.0**-8, 0x017F3F80),  # a tie, to the even bf16
        (383, 1 + 3 * 2.0**-8, 0x017F3F82),
        (0, -0.5, 0x0000BF00),
        (-1, 0.7, 0xFFFF0000),
        (32767, 1.0, 0x7FFF3F80),
        (32768, 1.0, 0xFFFF0000),
        (1, NAN, 0x00017FC0),
        (1, -NAN, 0x00017FC0),
        (1, 3.4e38, 0x00017F80),  # rounds to infinity
    ],
)
def test_packed_words(expert, weight, word):
    packed = routing.pack_topk(torch.full((3, 11), expert), torch.full((3, 11), weight))
    assert packed.dtype == torch.int32
    assert {value % 2**32 for value in packed.flatten().tolist()} == {word}


def test_counters_are_added_to_and_never_zeroed():
    before = torch.tensor([5, 0, 7], dtype=torch.int32)
    after = routing.count_experts(torch.tensor([[0, 2], [2, 3], [-1, 2]]), before)
    assert after.tolist() == [6, 0, 10]
    assert after.dtype == torch.int32
    assert before.tolist() == [5, 0, 7]


# Experts 3 and 2 (text) or 0 and 1 (image) are ahead by their bias, all scores are equal.
LOGICAL = {"text": [3, 2], "image": [0, 1]}
PHYSICAL = {"text": [3, 5], "image": [4, 1]}  # by the static map 0 -> 4, 1 -> 1, 2 -> 5, 3 -> 3 on 6 slots
HOME = {3: 4, 5: 6, 4: 5, 1: 1}  # rank 1 of 2, three slots and one shared each: p + p div 3; the shared slot is 7
HOME_LOGICAL = {3: 4, 2: 3, 0: 0, 1: 1}  # two slots and one shared each: id + id div 2; the shared slot is 5


@pytest.mark.parametrize("scale_placement", ["router", "output", "dispatch"])
@pytest.mark.parametrize("shared_slots", ["none", "global", "home_rank"])
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("live", [None, 2, torch.tensor(3, dtype=torch.int32)])
def test_every_combination(live, replicated, shared_slots, scale_placement):
    kinds = ["text", "image", "text", "image"]
    options = {}
    if replicated:
        placement = eplb.make_placement(torch.tensor([0, 1, 2, 3, 0, 2]), 4, rank_map=torch.tensor([4, 1, 5, 3]))
        options = {"placement": placement, "algorithm": "static"}
    counts = torch.full((6 if replicated else 4,), 100, dtype=torch.int32)
    result = routing.route(
        torch.full((4, 4), 1.25), 2, scale=1.5, bias=fp32(0, 0, 5, 6), image_bias=fp32(6, 5, 0, 0), token_ids=torch.tensor([1, 9, 2, 9]),
        image_token_id=9, ranks=2, rank=1, shared=int(shared_slots != "none"), shared_slots=shared_slots, scale_placement=scale_placement,
        live_rows=live, counts=counts, **options,
    )  # fmt: skip
    ids, weights, load = [], [], [100] * len(counts)
    for row, kind in enumerate(kinds):
        routed_ids = (PHYSICAL if replicated else LOGICAL)[kind]
        slots = {"none": [], "global": [len(counts)], "home_rank": [7 if replicated else 5]}[shared_slots]
        if live is not None and row >= int(live):
            ids.append([-1] * (2 + len(slots)))
            weights.append([0.0] * (2 + len(slots)))
            continue
        for expert in routed_ids:
            load[expert] += 1
        if shared_slots == "home_rank":
            routed_ids = [(HOME if replicated else HOME_LOGICAL)[expert] for expert in routed_ids]
        ids.append(routed_ids + slots)
        scaled = scale_placement == "router"
        weights.append([0.75 if scaled else 0.5] * 2 + [1.0 if scaled else fp32(2 / 3).item()] * len(slots))
    assert result.ids.tolist() == ids
    assert result.weights.tolist() == weights
    assert result.counts.tolist() == load
    assert counts.tolist() == [100] * len(counts)


def test_scaling_placements_agree():
    logits, outputs = random(20, 16, seed=14), random(17, seed=15).double()
    sums = {}
    for where in ("router", "output", "dispatch"):
        result = routing.route(logits, 4, scale=2.5, shared=1, shared_slots="global", scale_placement=where)
        sums[where] = (result.weights.double() * outputs[result.ids.long()]).sum(1) * (1.0 if where == "router" else 2.5)
    # one rounding each: the product in the router, the shared weight 1/2.5 outside of it
    size = 2.5 * outputs.abs().sum()
    assert ((sums["router"] - sums["output"]).abs() <= 2 * U * size).all()
    assert torch.equal(sums["output"], sums["dispatch"])


def test_rows_do_not_depend_on_their_batch():
    logits, bias = random(37, 48, seed=16), random(1, 48, seed=17, scale=0.1)[0]
    together = routing.route(logits, 6, scale=1.5, bias=bias)
    for row in (0, 17, 36):
        alone = routing.route(logits[row : row + 1], 6, scale=1.5, bias=bias)
        same_bits(alone.ids[0], together.ids[row])
        same_bits(alone.weights[0], together.weights[row])
    order = torch.randperm(37, generator=torch.Generator().manual_seed(18))
    same_bits(routing.route(logits[order], 6, scale=1.5, bias=bias).weights, together.weights[order])


@pytest.mark.parametrize("shared_slots", ["none", "global", "home_rank"])
def test_no_tokens(shared_slots):
    result = routing.route(
        torch.zeros(0, 8), 3, scale=1.5, shared=int(shared_slots != "none"), shared_slots=shared_slots, ranks=2, live_rows=0,
        counts=torch.ones(8, dtype=torch.int32), token_ids=torch.zeros(0, dtype=torch.int64), table=torch.zeros(5, 3, dtype=torch.int64),
    )  # fmt: skip
    assert result.ids.shape == result.weights.shape == (0, 3 + (shared_slots != "none"))
    assert (result.ids.dtype, result.weights.dtype) == (torch.int32, torch.float32)
    assert result.counts.tolist() == [1] * 8


def test_roundings_can_be_turned_off_and_gradients_flow():
    logits = random(4, 8, seed=19).requires_grad_()
    stated = routing.route(logits, 3, scale=1.5)
    with numerics("unrounded"):
        exact = routing.route(logits, 3, scale=1.5, shared=1, shared_slots="global")
    assert exact.weights.dtype == torch.float64
    # score twice, sum, quotient and product: five roundings
    assert ((stated.weights - exact.weights[:, :3]).abs() <= 5 * U * exact.weights[:, :3]).all()
    stated.weights[:, 0].sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad != 0).any()


Z, IDS, W = torch.zeros(2, 4), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)
BOOL, B = torch.zeros(2, dtype=torch.bool), torch.zeros(4)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda: routing.gate_logits(torch.zeros(2, 4, dtype=torch.float64), Z)),
        ("weight", lambda: routing.gate_logits(Z, torch.zeros(3, 5))),
        ("logits", lambda: routing.gate_scores(Z.double())),
        ("logits", lambda: routing.gate_scores(torch.zeros(4))),
        ("scores", lambda: routing.route_topk(torch.zeros(2, 0), 1)),
        ("k", lambda: routing.route_topk(Z, 0)),
        ("k", lambda: routing.route_topk(torch.zeros(2, 64), 33)),
        ("bias", lambda: routing.route_topk(Z, 2, bias=torch.zeros(5))),
        ("image_bias", lambda: routing.route_topk(Z, 2, image_mask=BOOL)),
        ("image_mask", lambda: routing.route_topk(Z, 2, image_mask=BOOL[:1], image_bias=B)),
        ("ids", lambda: routing.route_weights(Z, W)),
        ("ids", lambda: routing.route_weights(Z, IDS[:1])),
        ("ids", lambda: routing.route_weights(Z, IDS[:, :0])),
        ("ids", lambda: fast_routing.route_weights(Z, IDS[:, :0])),
        ("scale", lambda: routing.route_weights(Z, IDS, scale=0.0)),
        ("scale", lambda: routing.route_weights(Z, IDS, scale=NAN)),
        ("epsilon", lambda: routing.route_weights(Z, IDS, epsilon=-1e-20)),
        ("table", lambda: routing.route_hash(Z, IDS[:, 0], W)),
        ("token_ids", lambda: routing.route_hash(Z, IDS[:1, 0], IDS)),
        ("weights", lambda: routing.mask_padding(IDS, Z, 1)),
        ("live_rows", lambda: routing.mask_padding(IDS, W, 3)),
        ("live_rows", lambda: routing.mask_padding(IDS, W, torch.tensor([1, 1]))),
        ("shared", lambda: routing.append_shared_slots(IDS, W, -1, experts=4)),
        ("scale_placement", lambda: routing.append_shared_slots(IDS, W, 1, experts=4, scale_placement="somewhere")),
        ("experts", lambda: routing.remap_home_rank_slots(IDS, W, 1, experts=5, ranks=2, rank=0)),
        ("rank", lambda: routing.remap_home_rank_slots(IDS, W, 1, experts=4, ranks=2, rank=2)),
        ("counts", lambda: routing.count_experts(IDS, IDS[0].long())),
        ("token_ids", lambda: routing.route(Z, 2, scale=1.0, table=IDS)),
        ("table", lambda: routing.route(Z, 3, scale=1.0, table=IDS, token_ids=IDS[:, 0])),
        ("bias", lambda: routing.route(Z, 2, scale=1.0, table=IDS, token_ids=IDS[:, 0], bias=B)),
        ("image_token_id", lambda: routing.route(Z, 2, scale=1.0, image_bias=B, image_mask=BOOL, image_token_id=7)),
        ("image_bias", lambda: routing.route(Z, 2, scale=1.0, token_ids=IDS[:, 0], image_token_id=7)),
        ("placement", lambda: routing.route(Z, 2, scale=1.0, algorithm="static")),
        ("placement", lambda: routing.route(Z, 2, scale=1.0, placement=eplb.make_placement(torch.arange(3), 3))),
        ("shared", lambda: routing.route(Z, 2, scale=1.0, shared=1)),
        ("shared", lambda: routing.route(Z, 2, scale=1.0, shared_slots="global")),
        ("shared_copies", lambda: routing.route(Z, 2, scale=1.0, shared_copies=2)),
        ("experts", lambda: routing.route(Z, 2, scale=1.0, shared=1, shared_slots="home_rank", ranks=3)),
        ("counts", lambda: routing.route(Z, 2, scale=1.0, counts=torch.zeros(5, dtype=torch.int32))),
        ("live_rows", lambda: routing.route(Z, 2, scale=1.0, live_rows=3)),
    ],
)
def test_wrong_arguments_are_named(argument, call):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.argument == argument
