# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How a token finds its experts
#
# A layer of DeepSeek-V4.1-Flash has 384 experts, and a token goes to six of them. This notebook follows it there: scores, keys and weights;
# the two biases; the slots of shared experts; and, where hot experts have replicas, the rank that does the work.
#
# For a token $x$, the gate's weight $W$ and $k$ chosen experts
#
# $$ z = x W^T \qquad s = \sqrt{\log(1 + e^z)} \qquad c = s + b \qquad \text{ids} = \text{the } k \text{ largest } c \qquad
# w_j = f \, \frac{s_{\text{ids}_j}}{\epsilon + \sum_i s_{\text{ids}_i}} $$
#
# Each part goes the same way: equation, picture, reference, fast, parity. It runs on a CPU in under a minute.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle
from torch.nn.functional import softplus

from dsv4 import fast
from dsv4.configs import V4_FLASH, V4_PRO, V41_FLASH
from dsv4.fast import eplb as fast_eplb
from dsv4.fast import routing as fast_routing
from dsv4.reference import eplb, routing

BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#666666"
plt.rcParams.update({"figure.dpi": 110, "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
source = torch.Generator().manual_seed(377)
K = V41_FLASH.num_experts_per_tok


def normal(*shape):
    return torch.randn(shape, generator=source)


# %% [markdown]
# ## 1. Scores
#
# $\log(1 + e^z)$ is *softplus*. Its root grows like $\sqrt z$ and never ends, where a sigmoid hardly tells 8 from 12.
#
# Right: how far three ways to compute it are from the exact score. As it is written it fails on both sides: $1 + e^z$ is 1 below
# $z = -16.6$, so every such expert scores 0 and they all tie; and $e^z$ overflows above 88.7. `log1p` and the straight line above $z = 20$
# repair that, but for the far left, where $e^z$ is too small for fp32 though its root is not. The reference takes the root in fp64, too,
# and rounds once.

# %% tags=["image:scores"]
figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained", width_ratios=(1, 1.5))
z = torch.linspace(-12, 12, 481)
left.plot(z, routing.gate_scores(z[:, None]), color=BLUE, linewidth=2, label="sqrt(softplus(z))")
left.plot(z, z.sigmoid(), color=ORANGE, linewidth=2, label="sigmoid(z)")
left.set(xlabel="logit z", ylabel="score s", title="The score of a logit")
left.legend()
z = torch.linspace(-120, 120, 48001)
exact = z.double().exp().log1p().sqrt()
ways = {
    "log(1 + exp(z)), fp32": ((1 + z.exp()).log().sqrt(), ORANGE),
    "log1p(exp(z)), fp32": (softplus(z).sqrt(), SKY),
    "fp64, rounded once": (routing.gate_scores(z[:, None])[:, 0], BLUE),
}
for name, (score, colour) in ways.items():
    error = ((score.double() - exact) / exact).abs().clamp(1e-9, 30)[:-1].unflatten(0, (-1, 100)).amax(1)  # inf is drawn at 30
    right.plot(z[50:-1:100], error, color=colour, linewidth=1.8, label=name)
right.axhline(2.0**-24, color=GREY, linestyle=":", linewidth=1)
right.text(118, 2.0**-24 * 1.4, "half an ulp", ha="right", color=GREY, fontsize=9)
right.text(-60, 1.4, "score 0", ha="center", color=ORANGE)
right.text(-104, 1.4, "score 0", ha="right", color=SKY)
right.text(85, 18, "score inf", ha="right", color=ORANGE)
right.set(xlabel="logit z", ylabel="largest relative error", yscale="log", ylim=(1e-8, 90), title="What fp32 makes of it")
_ = right.legend(loc="center", bbox_to_anchor=(0.66, 0.45))
# %% [markdown]
# ## 2. Keys choose, scores weigh
#
# The correction bias $b$ is learned beside the model: it rises for experts that get too little and falls for those that get too much. It
# moves the choice and nothing else: weights come from the scores without it. Left: the bars are the scores of one token, the dots its keys;
# full dots are chosen. Right: what the chosen experts weigh, and what they would weigh by their keys.

# %% tags=["image:keys_and_scores"]
logits, bias = 1.2 * normal(1, 40), 0.35 * normal(40)
scores = routing.gate_scores(logits)
ids, unbiased = routing.route_topk(scores, K, bias=bias), routing.route_topk(scores, K)
keys = scores[0] + bias
chosen = ids[0].tolist()
figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.4), layout="constrained", width_ratios=(2.2, 1))
bars = left.bar(range(40), scores[0], color=SKY, width=0.8)
left.vlines(range(40), scores[0], keys, color=GREY, linewidth=1.2)
(empty,) = left.plot(range(40), keys, "o", color=ORANGE, markersize=7, fillstyle="none")
(full,) = left.plot(chosen, keys[chosen], "o", color=ORANGE, markersize=7)
for slot, expert in enumerate(chosen):
    left.text(expert, keys[expert] + 0.06, slot, ha="center", fontsize=10, weight="bold")
passed_over = [expert for expert in unbiased[0].tolist() if expert not in chosen]
(cross,) = left.plot(passed_over, [0.09] * len(passed_over), "x", color="black", markersize=8, markeredgewidth=2)
left.axhline(keys[chosen[-1]], color=ORANGE, linestyle=":", linewidth=1)
left.set(xlabel="expert", ylabel="score, key", ylim=(min(0, float(keys.min()) - 0.1), float(keys.max()) * 1.45))
left.set_title("The choice (numbers are slots)")
names = ["score", "its key = score + bias", "one of the six largest keys", "among the six largest scores, left out"]
left.legend([bars, empty, full, cross], names, ncols=2, fontsize=9, loc="upper left")
ways = {"scores": (routing.route_weights(scores, ids), BLUE), "keys (wrong)": (routing.route_weights(keys[None], ids), YELLOW)}
for shift, (name, (weights, colour)) in zip((-0.2, 0.2), ways.items(), strict=True):
    right.bar(np.arange(K) + shift, weights[0], 0.4, color=colour, label=f"from {name}")
right.set_xticks(range(K), [f"{slot}\n#{expert}" for slot, expert in enumerate(chosen)])
right.set(xlabel="slot, expert", ylabel="weight (f = 1)", title="The weights", ylim=(0, 0.29))
_ = right.legend(ncols=2, fontsize=9, loc="upper left")
# %% [markdown]
# Slots come in descending key, so their weights are in no order. Equal keys go to the lowest id, and NaN is never chosen.
#
# ## 3. Two biases, and a table
#
# V4.1 has a second bias for rows that belong to an image. Left: 24 rows of logits, routed once as text and once as image.
#
# The first three layers of V4 look the experts up by token id, and have no bias. A placeholder of an image has an id, too, but it says
# nothing: all patches would go to the same six experts. In a checkpoint with vision these rows go by the largest keys with the image bias.

# %% tags=["image:two_biases_and_a_table"]
EXPERTS, ROWS = 48, 24
logits, text_bias, image_bias = normal(ROWS, EXPERTS), 0.3 * normal(EXPERTS), 0.3 * normal(EXPERTS)
scores = routing.gate_scores(logits)
every_row = torch.ones(ROWS, dtype=torch.bool)


def picked(ids):
    """bool [rows, experts]."""
    return torch.zeros(len(ids), EXPERTS, dtype=torch.bool).scatter_(1, ids.long(), True)


as_text = picked(routing.route_topk(scores, K, bias=text_bias))
as_image = picked(routing.route_topk(scores, K, bias=text_bias, image_mask=every_row, image_bias=image_bias))
words = ["a", "cat", "on", "a", "mat", ":"] + ["<image>"] * 9 + ["is", "a", "cat", "on", "a", "mat", "?", "<eos>", "<eos>"]
vocabulary = sorted(set(words))
token_ids = torch.tensor([vocabulary.index(word) for word in words])
table = torch.stack([torch.randperm(EXPERTS, generator=source)[:K] for _ in vocabulary])
is_image = token_ids == vocabulary.index("<image>")
hashed = picked(routing.route_hash(scores, token_ids, table, image_mask=is_image, image_bias=image_bias))
unread = picked(table[vocabulary.index("<image>")][None])[0]
COLOURS = ListedColormap(["#f2f2f2", BLUE, ORANGE, "#333333"])
figure, grid = plt.subplots(1, 2, figsize=(14, 5.6), layout="constrained")
pictures = [as_text + 2 * as_image.int(), hashed * torch.where(is_image, 2, 1)[:, None]]
for axes, picture in zip(grid, pictures, strict=True):
    axes.pcolormesh(picture, cmap=COLOURS, vmin=0, vmax=3, edgecolor="white", linewidth=0.8)
    axes.invert_yaxis()
    axes.set(xlabel="expert")
    axes.set_xticks(np.arange(0, EXPERTS, 8) + 0.5, range(0, EXPERTS, 8))
    axes.spines[:].set_visible(False)
shared_picks = (as_text & as_image).sum(1).double().mean()
grid[0].set_yticks(np.arange(0, ROWS, 4) + 0.5, range(0, ROWS, 4))
grid[0].set(ylabel="row", title=f"The same logits: {shared_picks:.1f} of {K} experts in common")
keys_of = {"as text": BLUE, "as image": ORANGE, "both": "#333333"}
grid[0].legend(handles=[Patch(color=c, label=n) for n, c in keys_of.items()], loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
grid[1].set_yticks(np.arange(ROWS) + 0.5, words, fontsize=9)
rows, columns = torch.nonzero(is_image[:, None] & unread, as_tuple=True)
crosses = grid[1].plot(columns + 0.5, rows + 0.5, "x", color=GREY, markersize=5, label="table's row of the placeholder, not read")
grid[1].set_title("A layer with a table: equal tokens, equal experts")
handles = [Patch(color=BLUE, label="by table"), Patch(color=ORANGE, label="by key, image bias"), *crosses]
_ = grid[1].legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
# %% [markdown]
# ## 4. Weights
#
# Two details of $w_j = f s_j / (\epsilon + \sum s)$.
#
# **Epsilon.** V4.1 adds $10^{-20}$. It is not only there for a sum of 0: where all scores of a token are tiny it takes its weights away. V4
# divides by the bare sum, which official code lets become 0/0; here such a row gets weights of 0.
#
# **The place of $f$.** It may multiply the weights in the router, the weights at dispatch, or the experts' sum. The first two are one
# product, sooner or later. The third is the same in exact arithmetic, and in bf16 where $f$ is a power of two. None is wrong; but who
# compares bits has to say which one is meant: `scale_placement`.

# %% tags=["image:weights"]
level = torch.linspace(-225, 0, 901)
scores = routing.gate_scores(level[:, None].expand(-1, K).contiguous())
every = torch.arange(K, dtype=torch.int32).expand(len(level), K)
figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained")
for epsilon, colour, line in ((1e-20, BLUE, "-"), (0.0, ORANGE, "--")):
    total = routing.route_weights(scores, every, scale=1.5, epsilon=epsilon).sum(1)
    left.plot(level, total, line, color=colour, linewidth=2, label=f"epsilon {epsilon:g}")
left.set(xlabel="logit of all six", ylabel="sum of the weights", title="f = 1.5, and scores that vanish", ylim=(-0.1, 1.75))
left.legend(loc="center right")

TOKENS, INTERMEDIATE, HIDDEN = 48, 64, 96
scores = routing.gate_scores(normal(TOKENS, K))
every = torch.arange(K, dtype=torch.int32).expand(TOKENS, K)
inner, down = normal(TOKENS, K, INTERMEDIATE).bfloat16().float(), normal(K, INTERMEDIATE, HIDDEN).bfloat16().double() / 8
shared_output = normal(TOKENS, HIDDEN).bfloat16().double()


def experts_sum(weights):
    """What the experts give back: the weight goes into the bf16 input of the second matrix, the sum is bf16."""
    weighted = (weights[..., None] * inner).bfloat16().double()
    return torch.einsum("tki,kih->th", weighted, down).bfloat16().double()


def share_that_differs(factor):
    router = shared_output + experts_sum(routing.route_weights(scores, every, scale=factor))
    output = shared_output + factor * experts_sum(routing.route_weights(scores, every))
    return 100 * (router.bfloat16() != output.bfloat16()).double().mean()


factors = np.arange(0.5, 4.5 + 1 / 32, 1 / 16)
right.plot(factors, [share_that_differs(factor) for factor in factors], ".", color=BLUE)
for name, factor, colour in (("V4-Flash, V4.1", V41_FLASH.routed_scaling_factor, ORANGE), ("V4-Pro", V4_PRO.routed_scaling_factor, GREEN)):
    right.plot(factor, share_that_differs(factor), "o", color=colour, markersize=9, label=f"{name}: f = {factor}")
right.set_xscale("log", base=2)
right.set_xticks([0.5, 1, 1.5, 2, 2.5, 4], ["0.5", "1", "1.5", "2", "2.5", "4"])
right.set(xlabel="routed scaling factor f", ylabel="bf16 outputs with other bits (%)", ylim=(-2, 64))
right.set_title("f in the router, or on the output")
_ = right.legend(loc="upper center", ncols=2, fontsize=9)
# %% [markdown]
# ## 5. Slots of the shared expert
#
# The shared expert may run as one more slot of the routed experts' kernel. Then it needs an id, and there are two ways to number. With $P$
# routed experts on $R$ ranks, $L = P/R$ on each, and $S$ shared ones:
#
# $$ \text{global: } P + j \qquad\qquad \text{home rank } r\text{: } r(L+S) + L + j, \quad p \mapsto p + \lfloor p/L \rfloor S $$
#
# In the second, every rank has its own copy behind its routed experts, and a token uses that of the rank it lives on. Its weight is 1, or
# $1/f$ where a later $f$ makes it 1 again. The picture comes from the functions: send all ids through, see where they come out.

# %% tags=["image:shared_slots"]
P, RANKS, SHARED, HOME = 12, 3, 1, 1
RANK_COLOURS = [SKY, GREEN, PINK]
one_row, ones = torch.arange(P, dtype=torch.int32)[None], torch.ones(1, P)
above = routing.append_shared_slots(one_row, ones, SHARED, experts=P).ids[0].tolist()
below = [routing.remap_home_rank_slots(one_row, ones, SHARED, experts=P, ranks=RANKS, rank=rank).ids[0].tolist() for rank in range(RANKS)]


def cell(axes, x, y, text, colour, **more):
    axes.add_patch(Rectangle((x + 0.04, y), 0.92, 0.8, facecolor=colour, **more))
    axes.text(x + 0.5, y + 0.4, text, ha="center", va="center", fontsize=11)


figure, axes = plt.subplots(figsize=(12, 3.6))
for expert, (top, bottom) in enumerate(zip(above[:P], below[HOME][:P], strict=True)):
    colour = RANK_COLOURS[expert // (P // RANKS)]
    cell(axes, top, 2, top, colour)
    cell(axes, bottom, 0, bottom, colour)
    axes.plot([top + 0.5, bottom + 0.5], [1.98, 0.82], color=colour, linewidth=1.5)
cell(axes, above[P], 2, above[P], YELLOW, hatch="//", edgecolor="white")
for rank in range(RANKS):
    cell(axes, below[rank][P], 0, below[rank][P], YELLOW, hatch="//", edgecolor="white")
    home = {"color": ORANGE, "linewidth": 2.5} if rank == HOME else {"color": YELLOW, "linewidth": 1.2, "linestyle": ":"}
    axes.plot([above[P] + 0.5, below[rank][P] + 0.5], [1.98, 0.82], zorder=0 if rank != HOME else 3, **home)
    axes.text(rank * (P // RANKS + SHARED) + 2.5, -0.35, f"rank {rank}", ha="center")
axes.text(-0.2, 2.4, "global", ha="right", va="center")
axes.text(-0.2, 0.4, "home rank", ha="right", va="center")
axes.set(xlim=(-2, 15.2), ylim=(-0.6, 3.1))
axes.set_title(f"Ids of {P} routed experts and the shared one (hatched); this token lives on rank {HOME}")
_ = axes.axis("off")
# %% [markdown]
# **The phantom.** A batch is padded, and padding must go nowhere: id −1. Masking it first and numbering afterwards undoes that, twice.
# $\lfloor -1/L \rfloor = -1$, so −1 becomes −2, which no test for −1 catches and which, as an index, reads a table's last entry but one.
# And the shared column has a valid id in every row: the home rank computes its shared expert for rows that are not there. So `route` masks
# last.

# %% tags=["image:phantom_shared_expert"]
P, RANKS, SHARED, HOME, ROWS, LIVE = 8, 2, 1, 1, 6, 3
local = P // RANKS
logits = normal(ROWS, P)
masked = routing.route(logits, 3, scale=1.5, live_rows=LIVE)
naive_ids = masked.ids + torch.div(masked.ids, local, rounding_mode="floor") * SHARED
naive_ids = torch.cat([naive_ids, torch.full((ROWS, 1), HOME * (local + SHARED) + local)], 1)
right_ids = routing.route(
    logits, 3, scale=1.5, live_rows=LIVE, shared=SHARED, shared_slots="home_rank", ranks=RANKS, rank=HOME
).ids  # fmt: skip
figure, grid = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained", width_ratios=(3, 4, 4))
panels = {
    "1. Routed ids, padding masked": (masked.ids, local),
    "2a. Numbered, not masked again: wrong": (naive_ids, local + SHARED),
    "2b. Masked last, as route does": (right_ids, local + SHARED),
}
names = [f"row {row}" if row < LIVE else "padding" for row in range(ROWS)]
for axes, (title, (ids, width)) in zip(grid, panels.items(), strict=True):
    for row, column in np.ndindex(*ids.shape):
        value = int(ids[row, column])
        wrong = row >= LIVE and value != -1
        colour = "#e6e6e6" if value == -1 else "white" if value < 0 else YELLOW if value % width == local else RANK_COLOURS[value // width]
        edge = {"edgecolor": ORANGE, "linewidth": 3} if wrong else {}
        cell(axes, column, row, value, colour, **edge)
    axes.axhline(LIVE - 0.1, color="black", linewidth=1)
    axes.set(xlim=(-0.1, ids.shape[1] + 0.1), ylim=(ROWS, -0.2))
    axes.set_title(title, fontsize=12)
    axes.set_xticks(np.arange(ids.shape[1]) + 0.5, [f"slot {slot}" for slot in range(3)] + ["shared"] * (ids.shape[1] - 3))
    axes.set_yticks(np.arange(ROWS) + 0.4, names if axes is grid[0] else [""] * ROWS)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
handles = [Patch(color=SKY, label="rank 0"), Patch(color=GREEN, label="rank 1"), Patch(color=YELLOW, label="shared"),
           Patch(facecolor="white", edgecolor=ORANGE, linewidth=3, label="padding that goes somewhere")]  # fmt: skip
_ = figure.legend(handles=handles, loc="outside lower center", ncols=4)
# %% [markdown]
# ## 6. Load
#
# Some experts are asked for more often than others, and a step takes as long as its busiest rank. *Balancedness* is the mean load of a rank
# over the largest. EPLB spends a few more slots than experts: hot experts get replicas, and the replicas are packed onto ranks so that no
# rank stands out. Rows then share the replicas of an expert, here by `(rank + 23333 row) mod replicas`.
#
# The trace is made: 16 384 tokens whose logits lean toward some experts. A placement is computed from it and then meets another trace of
# the same kind, because a server places by yesterday's load.

# %%
EXPERTS, RANKS, TOKENS = V4_FLASH.n_routed_experts, 32, 16384
popularity = -0.45 * torch.arange(1, EXPERTS + 1).log()[torch.randperm(EXPERTS, generator=source)]


def trace():
    return normal(TOKENS, EXPERTS) + popularity


def loads(logits, placement=None, **dispatch):
    physical = EXPERTS if placement is None else len(placement.physical_to_logical)
    return routing.route(
        logits, K, scale=1.5, counts=torch.zeros(physical, dtype=torch.int32), placement=placement, **dispatch
    ).counts  # fmt: skip


def by_rank(slots, ranks=RANKS):
    return slots.unflatten(0, (ranks, -1)).sum(1)


def balancedness(rank_loads):
    return float(rank_loads.double().mean() / rank_loads.max())


yesterday, today = trace(), trace()
measured = loads(yesterday)
PHYSICAL = EXPERTS + RANKS  # one more slot on each rank
placed = eplb.rebalance(measured[None], physical=PHYSICAL, ranks=RANKS)
placement = eplb.make_placement(placed.physical_to_logical[0], EXPERTS)
before, after = by_rank(loads(today)), by_rank(loads(today, placement, algorithm="row_modulo"))

# %% tags=["image:expert_load"]
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained", width_ratios=(1.5, 1, 1))
for rank_loads, colour, shift, name in ((before, ORANGE, -0.21, "one slot an expert"), (after, BLUE, 0.21, f"{RANKS} slots more")):
    left.bar(np.arange(RANKS) + shift, rank_loads, 0.42, color=colour, label=f"{name}: mean / max {balancedness(rank_loads):.2f}")
left.axhline(before.double().mean(), color="black", linewidth=1, linestyle=":")
left.text(RANKS - 0.3, before.double().mean(), " mean", va="center")
left.set(xlabel="rank", ylabel="routed rows", title="Today's load by rank, placed by yesterday's", ylim=(0, float(before.max()) * 1.22))
left.legend(loc="upper left", fontsize=10)
order = measured.argsort(descending=True, stable=True)
share = measured[order] / placed.counts[0, order]
middle.plot(range(EXPERTS), measured[order], color=ORANGE, drawstyle="steps-mid", label="an expert")
middle.plot(range(EXPERTS), share, color=BLUE, drawstyle="steps-mid", label="one of its replicas")
for place in range(24):
    count = int(placed.counts[0, order[place]])
    if place == 0 or count != int(placed.counts[0, order[place - 1]]):
        middle.text(place + 0.8, float(measured[order[place]]), f"×{count}", fontsize=9, va="bottom")
middle.set(xlabel="experts, hottest first", ylabel="rows", xlim=(-1, 48), ylim=(0, float(measured.max()) * 1.12))
middle.set_title("Hot experts have replicas (× their number)")
middle.legend()
chosen = routing.route(yesterday, K, scale=1.5).ids
demand = loads(today)
lengths = [2**power for power in range(4, 15)]
for extra, colour, marker in ((32, BLUE, "o"), (128, GREEN, "s")):
    reached = []
    for length in lengths:
        seen = routing.count_experts(chosen[:length], torch.zeros(EXPERTS, dtype=torch.int32))
        spread = fast_eplb.rebalance(seen[None], physical=EXPERTS + extra, ranks=RANKS)
        reached.append(balancedness(by_rank((demand / spread.counts[0])[spread.physical_to_logical[0].long()])))
    right.plot(lengths, reached, marker=marker, color=colour, label=f"{extra} slots more")
right.axhline(balancedness(before), color=ORANGE, label="one slot an expert")
right.set_xscale("log", base=2)
right.set(xlabel="tokens of yesterday's trace", ylabel="mean / max today", title="How much trace a placement needs", ylim=(0, 1.05))
_ = right.legend(loc="lower right")
# %% [markdown]
# EPLB as it was published may put two replicas of an expert on one rank. That rank then holds the same weights twice, and the second copy
# balances nothing. `rebalance` counts them; with `distinct_per_rank` it does not do it. Below a small layer with one hot expert; the
# numbers in the cells are experts.

# %% tags=["image:replicas_on_ranks"]
hot = torch.tensor([900, 260, 120, 90, 80, 70, 60, 55, 50, 45, 40, 35, 30, 25, 20, 15])
figure, grid = plt.subplots(1, 2, figsize=(13, 4), layout="constrained")
for axes, distinct in zip(grid, (False, True), strict=True):
    small = eplb.rebalance(hot[None], physical=24, ranks=6, distinct_per_rank=distinct)
    slots = small.physical_to_logical[0].reshape(6, -1)
    replica_load = hot / small.counts[0]
    for rank, slot in np.ndindex(*slots.shape):
        expert = int(slots[rank, slot])
        twice = expert in slots[rank, :slot]
        colour = {0: SKY, 1: YELLOW}.get(expert, "#e6e6e6")
        cell(axes, rank, slot, f"{expert}", colour, **({"edgecolor": ORANGE, "linewidth": 3} if twice else {}))
    rank_loads = replica_load[slots.long()].sum(1)
    axes.set_xticks(np.arange(6) + 0.5, [f"rank {rank}\nload {load:.0f}" for rank, load in enumerate(rank_loads)])
    axes.set(xlim=(-0.05, 6.05), ylim=(4, -0.2))
    axes.set_yticks(np.arange(4) + 0.4, [f"slot {slot}" for slot in range(4)])
    name = "distinct_per_rank" if distinct else "as published"
    axes.set_title(f"{name}: duplicates: {int(small.duplicates.sum())}, mean / max {balancedness(rank_loads):.3f}", fontsize=12)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
handles = [Patch(color=SKY, label=f"expert 0, load {hot[0]}"), Patch(color=YELLOW, label=f"expert 1, load {hot[1]}"),
           Patch(facecolor="white", edgecolor=ORANGE, linewidth=3, label="already on this rank")]  # fmt: skip
_ = figure.legend(handles=handles, loc="outside lower center", ncols=3)
# %% [markdown]
# ## 7. Fast
#
# `dsv4.fast.routing.route` does the whole step, on a GPU in one launch. On a CPU its bodies are compiled by default; here they run as they
# are, `impl="eager"`, but for one. Three models with everything above in use: the same bits of ids, weights and counters?

# %%
from dsv4.parity.compare import compare_bytes

print(fast.explain("routing.route", "cpu"))
ROWS, IMAGE = 200, V41_FLASH.vision.image_token_id
token_ids = torch.randint(0, 1000, (ROWS,), generator=source)
slots = torch.cat([torch.arange(384), torch.randperm(384, generator=source)[:32]])
hashing = {"token_ids": token_ids, "table": torch.randint(0, 256, (1000, K), generator=source)}
balanced = {
    "bias": 0.1 * normal(384), "placement": eplb.make_placement(slots, 384), "algorithm": "row_modulo", "rank": 3,
    "counts": torch.zeros(416, dtype=torch.int32),
}  # fmt: skip
images = {
    "bias": 0.1 * normal(384), "image_bias": 0.1 * normal(384), "token_ids": torch.where(token_ids < 300, IMAGE, token_ids),
    "image_token_id": IMAGE, "shared": 1, "shared_slots": "home_rank", "ranks": 8, "rank": 5, "live_rows": 190,
}  # fmt: skip
models = {"V4-Flash, table": (V4_FLASH, hashing), "V4-Pro, EPLB": (V4_PRO, balanced), "V4.1-Flash, images": (V41_FLASH, images)}
for name, (config, options) in models.items():
    logits = normal(ROWS, config.n_routed_experts)
    expected = routing.route(logits, K, scale=config.routed_scaling_factor, **options)
    actual = fast_routing.route(logits, K, scale=config.routed_scaling_factor, impl="eager", **options)  # counts in place
    pairs = zip(expected._fields, expected, actual, strict=True)
    print(f"{name:19}", {field: compare_bytes(one, other).ok for field, one, other in pairs if one is not None})
print("compiled gate_scores", compare_bytes(routing.gate_scores(logits), fast_routing.gate_scores(logits)).ok)

# %% [markdown]
# ## 8. Parity
#
# The contract of `route_topk` brings its own inputs: equal scores, ties, NaN, zeros of both signs. Three candidates are held to it: the
# fast path; a router that gives ties to the highest id; and `torch.topk`, which promises no order of ties and takes NaN first. What a
# candidate does not offer it refuses.

# %%
from functools import partial

from dsv4.parity import contracts, engine, report
from dsv4.parity.candidates import Candidate
from dsv4.types import Unsupported


def highest_of_ties(scores, k, *, bias=None, image_mask=None, image_bias=None):
    flipped = {"bias": bias if bias is None else bias.flip(0), "image_bias": image_bias if image_bias is None else image_bias.flip(0)}
    ids = routing.route_topk(scores.flip(1), k, image_mask=image_mask, **flipped)
    return torch.where(ids < 0, -1, scores.shape[1] - 1 - ids).to(torch.int32)


def torchs_topk(scores, k, *, bias=None, image_mask=None, image_bias=None):
    if image_bias is not None:
        raise Unsupported("image_bias", "a tensor", "is not offered")
    return (scores if bias is None else scores + bias).topk(k, dim=1).indices.to(torch.int32)


contract = contracts.find("routing.route_topk")
candidates = [
    Candidate("fast", partial(fast_routing.route_topk, impl="eager"), "fast"),
    Candidate("highest of ties", highest_of_ties, "highest of ties"),
    Candidate("torch.topk", torchs_topk, "torch.topk"),
]
outcomes = [engine.check(contract, domain, one, torch.device("cpu")) for one in candidates for domain in contract.domains]
print(report.plain(report.table(report.as_data(outcome) for outcome in outcomes)))

# %% [markdown]
# Each failure comes with the least case that shows it, and with its numbers where they are few. One of the second candidate:

# %%
messages = [outcome.message for outcome in outcomes if outcome.candidate == "highest of ties" and outcome.message]
print(min(messages, key=lambda message: ("inputs" not in message, len(message))))

# %% [markdown]
# ## 9. What a tolerance cannot see
#
# Five routers with one mistake each. The usual test draws normal logits and compares weights within 0.01: all five pass. The six largest of
# 384 scores are much alike, so weights hardly say whose they are. Left: the largest error of a weight. Right: how many tokens go to other
# experts than they should.
#
# Ties to the highest id change no weight at all, and on normal logits no id either. They show where keys are equal: logits that come from
# bf16, biases that move in steps. A suite has to bring such inputs, and to compare ids as what they are, integers.

# %% tags=["image:what_weights_cannot_show"]
EXPERTS, TOKENS = V41_FLASH.n_routed_experts, 4096


def router(scores_of=routing.gate_scores, choose=routing.route_topk, keys_weigh=False):
    def call(z, bias):
        scores = scores_of(z)
        ids = choose(scores, K, bias=bias)
        return ids.sort(1).values, routing.route_weights(scores + bias if keys_weigh else scores, ids, scale=1.5)

    return call


mistakes = {
    "ties go to the highest id": router(choose=highest_of_ties),
    "logits are rounded to bf16": router(scores_of=lambda z: routing.gate_scores(z.bfloat16().float())),
    "keys are rounded to bf16": router(choose=lambda scores, k, bias: routing.route_topk((scores + bias).bfloat16().float(), k)),
    "softplus in fp32": router(scores_of=lambda z: softplus(z).sqrt()),
    "weights from keys": router(keys_weigh=True),
}
z, bias = normal(TOKENS, EXPERTS), 0.01 * normal(EXPERTS)
inputs = {
    "normal logits": (z, bias, BLUE, "o"),
    "bf16 logits, biases in steps of 1/64": (z.bfloat16().float(), (bias * 64).round() / 64, ORANGE, "s"),
}
NO_ERROR, NO_TOKEN = 1e-9, 3e-3  # where 0 is drawn
figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained", sharey=True)
for (name, (z, bias, colour, marker)), shift in zip(inputs.items(), (-0.13, 0.13), strict=True):
    right_ids, right_weights = router()(z, bias)
    results = [mistake(z, bias) for mistake in mistakes.values()]
    errors = [max(NO_ERROR, float((weights - right_weights).abs().max())) for _, weights in results]
    elsewhere = [max(NO_TOKEN, 100 * float((ids != right_ids).any(1).double().mean())) for ids, _ in results]
    places = np.arange(len(mistakes)) + shift
    for axes, values in ((left, errors), (right, elsewhere)):
        axes.hlines(places, 1e-12, values, color=colour, linewidth=1.5, alpha=0.6)
        axes.plot(values, places, marker, color=colour, markersize=9, label=name)
left.axvline(1e-2, color="black", linestyle=":", linewidth=1.2)
left.text(8.5e-3, -0.42, "0.01", ha="right")
left.set_yticks(range(len(mistakes)), mistakes)
left.set(xscale="log", xlim=(NO_ERROR / 2, 4e-2), xlabel="largest error of a weight", title="What a comparison of weights sees")
left.set_xticks([NO_ERROR, 1e-8, 1e-6, 1e-4, 1e-2], ["0", "1e-8", "1e-6", "1e-4", "1e-2"])
right.set(xscale="log", xlim=(NO_TOKEN / 2, 30), xlabel="tokens sent to other experts (%)", title="What it does not see")
right.set_xticks([NO_TOKEN, 0.01, 0.1, 1, 10], ["0", "0.01", "0.1", "1", "10"])
for axes in (left, right):
    axes.minorticks_off()
left.set_ylim(len(mistakes) - 0.5, -0.6)
_ = right.legend(loc="lower right", fontsize=9)
