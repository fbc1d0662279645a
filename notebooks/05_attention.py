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
# # What a token looks at
#
# A token does not attend to everything before it. It sees the last 128 tokens, the *window*, and of all older *entries*, each of which
# stands for $r$ tokens, those that a small model beside the layer has picked for it: the *indexer*. One softmax goes over both, and a
# *sink* takes a share of it and gives nothing back:
#
# $$ S_{tj} = \sum_h w_{th}\, \mathrm{relu}(q_{th} \cdot k_j), \quad j < \lfloor (p_t + 1)/r \rfloor \qquad\qquad
# o_t = \frac{\sum_i e^{s_i} v_i}{\sum_i e^{s_i} + e^{\sigma}}, \quad i \in \text{window} \cup \text{top-}k(S_t) $$
#
# This notebook follows one query: which entries it may see, which it picks and why, what the sink takes, in which of four conventions a
# kernel reports the sum, and how a list is cut into parts and put together again.
#
# Each part goes the same way: equation, picture, reference, fast, parity. It runs on a CPU in under a minute.

# %%
from functools import partial
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Patch, Rectangle

from dsv4 import fast
from dsv4.reference import attention, compressor, indexer, rotary
from dsv4.reference.numerics import numerics

BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#666666"
plt.rcParams.update({"figure.dpi": 110, "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
source = torch.Generator().manual_seed(7)


def normal(*shape):
    return torch.randn(shape, generator=source)


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32)


# %% [markdown]
# ## 1. A tiny model
#
# 64 tokens talk about three things by turns, which the strip above shows: 48 numbers of a token say what it is about, 16 are turned by its
# position. The window is 12 tokens, a query picks 3 entries. Left, V4: an entry stands for four tokens (and knows the four before them, as
# the notebook on the cache shows). Right, V4.1: for two, as in its first half; in the second half each token is an entry.
#
# Each row is a query. Entries exist from the black line on, to the left of it: entry $j$ is there for the query at $p$ where
# $j < \lfloor (p+1)/r \rfloor$, so with $r = 4$ the token at $p = 3$ is the first that sees one, and is itself the last token in it. A
# token may be in the window and in an entry at once, and then counts both ways. Most picks go back to where the query's own topic was
# talked about; while there are no more than three entries, all are picked.
#
# The picture is measured. One row at a time is made NaN, of the tokens or of the entries: who reads it becomes NaN.

# %% tags=["image:attention_picks"]
TOKENS, WINDOW, DIM, TURNED, HEADS, PICKS = 64, 12, 64, 16, 4, 3
TOPICS = {0: ("A", SKY), 1: ("B", YELLOW), 2: ("C", PINK)}
about = torch.tensor([0] * 9 + [1] * 11 + [2] * 8 + [0] * 10 + [2] * 6 + [1] * 9 + [0] * 11)
directions = 2.25 * torch.eye(4)[:3].repeat_interleave(TURNED, 1) * normal(DIM).sign()  # of topics, [3, 64]
hidden = directions[about] + normal(TOKENS, DIM)
# Heads 0 and 3 look for the query's own topic, head 1 away from it and for C, head 2 for A and away from C; head 3 counts against.
WEIGHTS, LOOKS_AT = torch.tensor([1.0, 0.6, 0.5, -0.4]), torch.tensor([1.0, -0.5, 0.4, 0.5])
LOOKS_FOR = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.7], [0.4, 0.0, -0.6], [0.0, 0.0, 0.0]])
table = rotary.rope_table(rotary.rope_frequencies(1e4, TURNED), TOKENS)
positions = torch.arange(TOKENS)


def entries_of(rows, ratio):
    """Entries that a compressor makes of rows: each the mean of its tokens, with overlap where the ratio is 4."""
    overlap = ratio == 4
    wide = torch.cat([rows, rows], 1) if overlap else rows
    state = compressor.compressor_state(1, rows.shape[1], ratio=ratio, overlap=overlap)
    ends = numbers(0, len(rows))
    made = compressor.compress(wide, torch.zeros_like(wide), state, torch.tensor([0]), ends, ratio=ratio, overlap=overlap)
    return made.pooled[made.requests >= 0]


def tiny(ratio):
    """Index queries and keys, what each token sees, and its picks."""
    keys = indexer.index_keys(entries_of(hidden, ratio), table, torch.arange(TOKENS // ratio) * ratio, hadamard=ratio == 4)
    heads = LOOKS_FOR @ directions + LOOKS_AT[:, None] * hidden[:, None] + 2 * normal(TOKENS, HEADS, DIM)
    weights = WEIGHTS.expand(TOKENS, HEADS)
    queries = indexer.index_queries(heads.bfloat16(), weights.bfloat16(), table, positions, hadamard=ratio == 4)
    ends = indexer.visible_entries(positions, ratio=ratio)
    return queries, keys, ends, indexer.select_entries(queries, keys, ends, PICKS)


def who_reads(ratio, picks):
    """bool [tokens, tokens] and [tokens, entries]: whose output is NaN when a row is."""
    q, rows = normal(TOKENS, 1, DIM).bfloat16(), normal(TOKENS, DIM).bfloat16()
    entries, window = normal(TOKENS // ratio, DIM).bfloat16(), attention.window_indices(positions, window=WINDOW)
    found = []
    for kv, extra in ((rows, entries), (entries, rows)):
        readers = []
        for row in range(len(kv)):
            spoilt = kv.clone()
            spoilt[row] = torch.nan
            one, other = (spoilt, extra) if kv is rows else (extra, spoilt)
            output = attention.sparse_attention(q, one, window, extra_kv=other, extra_indices=picks).output
            readers.append(output.isnan().any(2).any(1))
        found.append(torch.stack(readers, 1))
    return found


SHADES = {"visible, not picked": "#e3e3e3", "in the window": SKY, "in a picked entry": ORANGE, "in both": "#7b2d00"}
figure, grid = plt.subplots(2, 2, figsize=(14, 7), layout="constrained", height_ratios=(1, 24), sharex=True)
for (strip, axes), ratio in zip(grid.T, (4, 2), strict=True):
    _, _, ends, picks = tiny(ratio)
    window, chosen = who_reads(ratio, picks)
    visible = torch.arange(TOKENS // ratio) < ends[:, None]
    assert not (chosen & ~visible).any()
    assert torch.equal(chosen.sum(1), ends.clamp(max=PICKS))
    same = about[::ratio] == about[:, None]
    assert (chosen & same)[30:].sum() > 0.75 * chosen[30:].sum()
    covered, seen = chosen.repeat_interleave(ratio, 1), visible.repeat_interleave(ratio, 1)
    assert not (covered & (positions > positions[:, None])).any()  # no entry is of the future
    shade = torch.where(seen, 1, 0)
    shade = torch.where(window, 2, shade)
    shade = torch.where(covered, 3 + window.int(), shade)
    colours = plt.matplotlib.colors.ListedColormap(["white", *SHADES.values()])
    axes.imshow(shade, cmap=colours, vmin=0, vmax=4, aspect="auto", interpolation="nearest")
    axes.step(ratio * torch.cat([ends, ends[-1:]]) - 0.5, torch.arange(TOKENS + 1) - 0.5, where="pre", color="black", linewidth=1.2)
    for edge in range(ratio, TOKENS, ratio):
        axes.axvline(edge - 0.5, color="white", linewidth=0.5)
    axes.set(xlabel="token", ylabel="query at position", xlim=(-0.5, TOKENS - 0.5), ylim=(TOKENS - 0.5, -0.5))
    axes.spines[:].set_visible(False)
    for token, topic in enumerate(about.tolist()):
        strip.add_patch(Rectangle((token - 0.5, 0), 1, 1, facecolor=TOPICS[topic][1], linewidth=0))
    changes = [0, *(torch.nonzero(about.diff()).flatten() + 1).tolist(), TOKENS]
    for first, past in pairwise(changes):
        strip.text((first + past - 1) / 2, 0.45, TOPICS[int(about[first])][0], ha="center", va="center", fontsize=10)
    strip.set(yticks=[], ylim=(0, 1))
    strip.set_title({4: "V4, entries of 4 tokens", 2: "V4.1, entries of 2 tokens"}[ratio])
    strip.spines[:].set_visible(False)
    strip.tick_params(length=0, labelbottom=False)
handles = [Patch(color=colour, label=name) for name, colour in SHADES.items()]
handles.append(plt.Line2D([], [], color="black", linewidth=1.2, label="entries that exist"))
_ = figure.legend(handles=handles, loc="outside lower center", ncols=5)
# %% [markdown]
# ## 2. Why these
#
# One query, at position 52 and about topic B, and the entries of V4.1's compressor. Above: what each index head adds to the score of each
# entry, $w_h\, \mathrm{relu}(q_h \cdot k_j)$. A head that looks away adds nothing, for ReLU comes first; one with a negative weight only
# takes away. In the middle: the sum, with the picks in orange, and a line at the score of the last of them. Entries to the right do not
# exist yet, whatever their score would be; they are $-\infty$.
#
# Below: what is picked if a step is missing or in the wrong place. Without ReLU heads that look away count against an entry; with ReLU
# after the weight the negative head is lost. Either way two of the six picks are others. A mean over heads for their sum is wrong and
# changes no pick at all: a test that looks at picks alone does not see it.

# %%
from dsv4.parity.mutants import indexer as index_mistakes

QUERY, RATIO, SHOWN = 52, 2, 6
queries, keys, ends, _ = tiny(RATIO)
one = indexer.IndexQueries(*(part[QUERY : QUERY + 1] for part in queries))
alone = [indexer.index_logits(one._replace(weights=one.weights * (torch.arange(HEADS) == h)), keys, ends=numbers(99))[0]
         for h in range(HEADS)]  # fmt: skip
parts = torch.stack(alone)  # [heads, entries]
scores = indexer.index_logits(one, keys, ends=ends[QUERY : QUERY + 1])[0]
seen = int(ends[QUERY])
assert seen == (QUERY + 1) // RATIO
assert float((parts.double().sum(0)[:seen] - scores[:seen]).abs().max()) <= 4 * 2.0**-23 * float(parts.abs().sum(0).max())
assert (scores[seen:] == -torch.inf).all()
WRONG = {"no ReLU": "no ReLU", "ReLU after the weight": "ReLU after the weight", "mean over heads": "the mean over heads"}
calls = {mutant.fault: mutant.call for mutant in index_mistakes.MUTANTS}
picked = {"as it should be": indexer.select_topk(scores[None], SHOWN)[0]}
for name, fault in WRONG.items():
    picked[name] = indexer.select_topk(calls[fault](one, keys, ends=ends[QUERY : QUERY + 1]), SHOWN)[0]
assert torch.equal(picked["mean over heads"], picked["as it should be"])
for name in ("no ReLU", "ReLU after the weight"):
    assert len(set(picked[name].tolist()) - set(picked["as it should be"].tolist())) == 2
figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(13, 6.6), layout="constrained", height_ratios=(1.2, 2, 1.1), sharex=True)
limit = float(parts.abs().max())
shades = top.imshow(parts, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto")
top.set_yticks(range(HEADS), [f"head {h}, w {float(w):+.2f}".replace("-", "−") for h, w in enumerate(WEIGHTS)], fontsize=10)
top.set_title("What heads add")
top.spines[:].set_visible(False)
figure.colorbar(shades, ax=top, label="score", pad=0.01)
best = set(picked["as it should be"].tolist())
would = parts.sum(0)
for entry in range(TOKENS // RATIO):
    there = entry < seen
    colour = ORANGE if entry in best else BLUE if there else "white"
    middle.bar(entry, float(scores[entry] if there else would[entry]), color=colour, edgecolor=GREY if not there else colour,
               hatch=None if there else "////", linewidth=0.8)  # fmt: skip
    topic = TOPICS[int(about[RATIO * entry])]
    middle.text(entry, -0.16 * float(would.max()), topic[0], ha="center", va="center", fontsize=10, color="black",
                bbox={"facecolor": topic[1], "edgecolor": "none", "pad": 2})  # fmt: skip
middle.axhline(float(scores[picked["as it should be"].long()].min()), color=ORANGE, linewidth=1, linestyle=":")
middle.axvline(seen - 0.5, color="black", linewidth=1.2)
middle.text(seen - 0.3, 1.1 * float(would.max()), "do not exist yet", va="center")
middle.set(ylabel="score", title="Their sum", ylim=(0, 1.2 * float(would.max())))
for line, entries in enumerate(picked.values()):
    for entry in entries.tolist():
        bottom.plot(entry, line, "s", markersize=9, color=ORANGE if entry in best else BLUE, fillstyle="full" if entry in best else "none")
bottom.set_yticks(range(len(picked)), picked, fontsize=10)
bottom.set(xlabel="entry", ylim=(len(picked) - 0.5, -0.5), xlim=(-0.6, TOKENS // RATIO - 0.4), title="Six picks")
bottom.spines["left"].set_visible(False)
bottom.tick_params(axis="y", length=0)
# %% [markdown]
# ## 3. Codes, and ties
#
# V4's sizes: 64 heads of 128 numbers, 512 picks, of 8192 entries. Queries and keys are FP4 codes in groups of 32. Four of the 128 dims are
# twelve times as large as the others, as some dims of trained models are. Left: scores of the codes against scores of the numbers. A large
# dim takes the scale of its group for itself, of the other 31 little is left, and 1 pick in 6 is another. The Hadamard transform (middle)
# spreads every dim over all 128 before the codes are made; applied to query and key alike it changes no product. V4 has it, V4.1 has not.
#
# Right: the official code rounds scores to bf16, and there are far fewer of these than entries. Each mark is an entry near the 512th place,
# each level a bf16 number. Full marks are picked. The last level that is picked from has more entries than there are places left: the
# smaller entries get them. Colour says whether the score in fp32 would have been enough. Two implementations with the same scores that
# order ties differently have different picks, both of which no one could call wrong, were it not stated.

# %% tags=["image:index_codes"]
H, D, ENTRIES, K = 64, 128, 8192, 512
sizes = torch.ones(D)
sizes[[5, 40, 77, 120]] = 12.0
no_turn = rotary.rope_table(rotary.rope_frequencies(1.6e5), 1)
head_queries, key_rows, head_weights = sizes * normal(1, H, D), sizes * normal(ENTRIES, D), normal(1, H).abs()
head_queries, key_rows, head_weights = head_queries.bfloat16(), key_rows.bfloat16(), head_weights.bfloat16()
ALL = numbers(ENTRIES)


def scored(precision="fp32", **options):
    """Scores of all entries, of rows at position 0, which do not turn."""
    weight_dtype = precision if options.get("format", "fp4") == "fp4" else "fp32"
    queries = indexer.index_queries(head_queries, head_weights, no_turn, numbers(0), weight_dtype=weight_dtype, **options)
    keys = indexer.index_keys(key_rows, no_turn, torch.zeros(ENTRIES, dtype=torch.int64), **options)
    return indexer.index_logits(queries, keys, ends=ALL, precision=precision)


with numerics("unquantised"):
    ideal = scored().float()
wanted = indexer.select_topk(ideal, K)[0].long()
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 5), layout="constrained", width_ratios=(1, 1, 1.25))
lost = {}
for axes, hadamard in ((left, False), (middle, True)):
    coded = scored(hadamard=hadamard)
    found = indexer.select_topk(coded, K)[0].long()
    both, only = torch.zeros(ENTRIES, dtype=torch.bool), torch.zeros(ENTRIES, dtype=torch.bool)
    both[wanted], only[found] = True, True
    lost[hadamard] = int((both & ~only).sum())
    kinds = (
        (~both & ~only, "#bbbbbb", "not picked"),
        (both & only, ORANGE, "picked"),
        (both & ~only, BLUE, "lost"),
        (only & ~both, GREEN, "in its place"),
    )
    for which, colour, name in kinds:
        axes.plot(ideal[0, which], coded[0, which], ".", markersize=3, color=colour, rasterized=True)
        axes.plot([], [], "o", color=colour, label=name)
    axes.axvline(float(ideal[0, wanted].min()), color="black", linewidth=0.8, linestyle=":")
    axes.axhline(float(coded[0, found].min()), color="black", linewidth=0.8, linestyle=":")
    title = "Hadamard" if hadamard else "No transform"
    axes.set(xlabel="score of the numbers", ylabel="score of the FP4 codes", title=f"{title}: {lost[hadamard]} of {K} picks lost")
left.legend(loc="upper left", fontsize=9)
assert K / 7 < lost[False] < K / 5
assert lost[True] < lost[False] / 3
exact, rounded = coded, scored("bf16", hadamard=True)
picks, fp32_picks = (indexer.select_topk(logits, K, order="score")[0].long() for logits in (rounded, exact))
last = rounded[0, picks[-1]]
levels = rounded[0].float().unique()
place = int(torch.searchsorted(levels, last.float()))
tied = torch.nonzero(rounded[0] == last).flatten()
taken = torch.isin(tied, picks)
assert 0 < taken.sum() < len(tied)
assert taken.int().diff().max() <= 0  # the smaller entries
for level in range(place - 3, place + 4):
    for entry in torch.nonzero(rounded[0].float() == levels[level]).flatten():
        colour = ORANGE if (fp32_picks == entry).any() else BLUE
        fill = "full" if (picks == entry).any() else "none"
        right.plot(entry, float(levels[level]), "o", color=colour, fillstyle=fill, markersize=6)
right.axhspan(*(float(last) + step * float(levels[place + 1] - last) for step in (-0.4, 0.4)), color=YELLOW, alpha=0.25, linewidth=0)
for colour, fill, name in ((ORANGE, "full", "picked in both"), (BLUE, "full", "in bf16 alone"), (ORANGE, "none", "in fp32 alone"),
                           (BLUE, "none", "in neither")):  # fmt: skip
    right.plot([], [], "o", color=colour, fillstyle=fill, label=name)
right.set_yticks([float(levels[level]) for level in range(place - 3, place + 4)])
right.set(xlabel="entry", ylabel="score, rounded to bf16", title=f"{int(taken.sum())} of {len(tied)} equal scores are picked")
step = float(last - levels[place - 1])
right.set_ylim(float(levels[place - 3]) - 0.4 * step, float(levels[place + 3]) + 1.6 * step)
_ = right.legend(loc="upper center", ncols=2, fontsize=9)
# %% [markdown]
# What a score may be besides a number. NaN is never picked, nor is −∞; +∞ is. −0 and 0 are equal, so the smaller entry comes first. Where
# there are fewer entries than picks, −1 stands behind the last. The fast path gives the same picks.

# %%
from dsv4.fast import indexer as fast_indexer

nan, inf = torch.nan, torch.inf
odd = torch.tensor([[0.0, nan, -0.0, inf, -inf, 1.0, 1.0, -2.0]])
for wanted_picks in (2, 4, 6, 8):
    expected = indexer.select_topk(odd, wanted_picks, order="score")
    assert torch.equal(fast_indexer.select_topk(odd, wanted_picks, order="score", impl="eager"), expected)
    print(f"{wanted_picks} of {odd[0].tolist()}: {expected[0].tolist()}")
# %% [markdown]
# ## 4. Candidate blocks
#
# From layer 20 on each token is an entry in V4.1: a million of them at its longest. So one layer scores them all and keeps the 2048 best
# *blocks* of 8, a block being as good as its best entry; the block of the newest entry is kept whatever its score is. The layers after it
# choose among these 16 384 entries only.
#
# Left, small: 96 entries of which 90 exist, 5 blocks. Above, the layer that keeps: each block's best entry is marked, kept blocks are
# yellow, the newest is forced in. Below, a later layer: picks inside are orange; what it would have picked outside is lost.
#
# Right: how many of the later layer's 512 picks are inside, of 65 536 entries, for layers that agree to some degree (the correlation of
# their scores). Blocks chosen by another layer are worth as much as that layer agrees. The models keep a quarter of the blocks here.

# %% tags=["image:candidate_blocks"]
BLOCK, KEPT, SMALL, EXIST = 8, 5, 96, 90
first_layer = normal(1, SMALL) + 0.8
first_layer[0, 80:] -= 2.0  # so that the newest block would not be kept
later_layer = 0.7 * first_layer + 0.7 * normal(1, SMALL)
exist = numbers(EXIST)
blocks = indexer.candidate_blocks(first_layer, exist, block=BLOCK, count=KEPT)
unforced = indexer.candidate_blocks(first_layer, numbers(80), block=BLOCK, count=KEPT)
kept = {int(block) for block in blocks[0]}
assert (EXIST - 1) // BLOCK in kept
assert len(kept & {int(block) for block in unforced[0]}) == KEPT - 1
figure, axes_of = plt.subplot_mosaic(
    [["first", "recall"], ["later", "recall"]], figsize=(15, 5.4), layout="constrained", width_ratios=(1.7, 1)
)
free = set(indexer.select_topk(later_layer, 12, ends=exist)[0].tolist())
restricted = indexer.restrict_to_blocks(later_layer, blocks, block=BLOCK)
inside = set(indexer.select_topk(restricted, 12, ends=exist)[0].tolist())
for name, logits in (("first", first_layer), ("later", later_layer)):
    axes = axes_of[name]
    for block in range(SMALL // BLOCK):
        if block in kept:
            axes.axvspan(BLOCK * block - 0.5, BLOCK * (block + 1) - 0.5, color=YELLOW, alpha=0.25, linewidth=0)
        axes.axvline(BLOCK * block - 0.5, color="#bbbbbb", linewidth=0.6)
        members = range(BLOCK * block, min(BLOCK * (block + 1), EXIST))
        if name == "first":
            best_entry = max(members, key=lambda entry: float(first_layer[0, entry]))
            axes.plot(best_entry, float(first_layer[0, best_entry]), "v", color="black", markersize=7)
    for entry in range(EXIST):
        colour = GREY if name == "first" else ORANGE if entry in inside else BLUE if entry in free else "#bbbbbb"
        axes.vlines(entry, -3.2, float(logits[0, entry]), color=colour, linewidth=2.5)
    axes.set(xlim=(-0.6, SMALL - 0.4), ylim=(-3.2, 5.6), ylabel="score", yticks=[])
    axes.set_xticks(range(0, SMALL + 1, BLOCK))
axes_of["first"].set_title("The layer that keeps blocks")
axes_of["first"].text(EXIST + 1.5, 3.6, "newest:\nforced in", fontsize=9, ha="center")
axes_of["later"].set_title("A layer after it, 12 picks")
axes_of["later"].set_xlabel("entry")
handles = [Patch(color=ORANGE, label="picked"), Patch(color=BLUE, label="lost: outside of the blocks")]
axes_of["later"].legend(handles=handles, loc="upper right", ncols=2, fontsize=9)
assert free - inside == {entry for entry in free if entry // BLOCK not in kept}
MANY = 65536
recall, everything = axes_of["recall"], numbers(MANY)
one_layer, noise = normal(1, MANY), normal(1, MANY)
counts = [128, 256, 512, 1024, 2048, 4096, 8192]
for agree, colour, marker in ((1.0, BLUE, "o"), (0.9, GREEN, "s"), (0.6, PINK, "^"), (0.0, GREY, "D")):
    other = agree * one_layer + (1 - agree**2) ** 0.5 * noise
    best = indexer.select_topk(other, K)[0].long()
    shares = []
    for count in counts:
        kept_blocks = indexer.candidate_blocks(one_layer, everything, block=BLOCK, count=count)
        shares.append(100 * float((indexer.restrict_to_blocks(other, kept_blocks, block=BLOCK)[0, best] > -inf).double().mean()))
    assert agree < 1 or all(share == 100 for share, count in zip(shares, counts, strict=True) if count >= K)
    recall.plot(counts, shares, marker=marker, color=colour, label=f"correlation {agree:g}")
recall.plot(counts, [100 * BLOCK * count / MANY for count in counts], ":", color=GREY, label="blocks at random")
recall.axvline(2048, color="black", linewidth=1)
recall.text(2048 * 0.93, 68, "the models", rotation=90, ha="right", va="center")
recall.set(xscale="log", xlabel="blocks kept, of 8192", ylabel="picks inside (%)", title="What later layers still find", ylim=(0, 104))
recall.set_xticks(counts, counts, fontsize=9)
recall.minorticks_off()
_ = recall.legend(loc="lower right", fontsize=9, bbox_to_anchor=(1, 0.12))
# %% [markdown]
# ## 5. The sink
#
# $$ \text{share of the sink} = \frac{e^\sigma}{\sum_i e^{s_i} + e^\sigma} = \frac{1}{1 + e^{\mathrm{lse} - \sigma}} $$
#
# A head that finds nothing of use lets its sink take the weight; its output becomes short, and its direction stays. Left: the share, for
# 1, 8, 128 and 640 picks (a window and 512 entries) with scores around 0. More picks need a larger sink. Right: the length of the output
# against the sink, for the same query: marks are the reference, the line is the formula. A sink of −∞ is none; of +∞ takes everything.
# Dashed: two mistakes that agree with it where the sink is 0, which is what a test with sinks of zeros looks at.

# %% tags=["image:attention_sink"]
from dsv4.parity.mutants import attention as attention_mistakes

SINKS = torch.arange(-12.0, 17.0)
ends_of_it = torch.tensor([-inf, inf])
wrong = {mutant.fault: mutant.call for mutant in attention_mistakes.MUTANTS if mutant.function == "sparse_attention"}
rows = normal(640, 512).bfloat16()
query = normal(1, 1, 512).bfloat16()
figure, (left, right) = plt.subplots(1, 2, figsize=(14, 4.6), layout="constrained")
MINUS, PLUS = -15.0, 19.5  # where infinite sinks are drawn
fine = torch.linspace(-12, 16, 300)


def heads_with(sinks, call=attention.sparse_attention, picks=640):
    """One query as so many heads, each with its own sink: norms of the outputs, fp64, and lse."""
    found = call(query.expand(1, len(sinks), 512), rows, torch.arange(picks, dtype=torch.int32)[None], sinks)
    return found.output[0].double().norm(dim=1), float(found.lse[0, 0])


for picks, colour, line in ((1, GREY, ":"), (8, GREEN, "--"), (128, BLUE, "-."), (640, ORANGE, "-")):
    norms_found, lse = heads_with(torch.cat([SINKS, ends_of_it]), picks=picks)
    measured = 1 - norms_found / norms_found[-2]
    formula = torch.sigmoid(SINKS.double() - lse)
    assert float((measured[:-2] - formula).abs().max()) < 3 * 2.0**-9  # bf16 outputs
    assert measured[-2:].tolist() == [0, 1]
    label = f"{picks} pick{'s' * (picks > 1)}, lse {lse:.1f}".replace("-", "−")
    left.plot(fine, 100 * torch.sigmoid(fine - lse), line, color=colour, linewidth=2, label=label)
    left.plot(lse, 50, "o", color=colour)
left.text(8.2, 44, "half where the sink is lse", fontsize=9)
left.set(xlabel="sink", ylabel="share of the sink (%)", title="What the sink takes")
left.legend(loc="upper left", fontsize=9)
norms_found, lse = heads_with(torch.cat([SINKS, ends_of_it]))
right.plot(fine, float(norms_found[-2]) * torch.sigmoid(lse - fine), color=ORANGE, linewidth=2, label="the formula")
right.plot(SINKS, norms_found[:-2], "o", color=BLUE, markersize=5, label="reference")
right.plot([MINUS, PLUS], norms_found[-2:], "D", color=BLUE, markersize=6)
for fault, colour, line in (("the sink with its sign turned", PINK, (0, (7, 2))), ("the sink scaled like a score", GREEN, (0, (2, 3)))):
    other, _ = heads_with(SINKS, wrong[fault])
    assert torch.equal(other[SINKS == 0], norms_found[:-2][SINKS == 0])
    right.plot(SINKS, other, linestyle=line, color=colour, linewidth=2, label=fault)
right.set(xlabel="sink", ylabel="|o|", title="What is left, 640 picks", ylim=(-0.04, 1.4 * float(norms_found[-2])))
right.set_xticks([MINUS, -10, -5, 0, 5, 10, 15, PLUS], ["−∞", "−10", "−5", "0", "5", "10", "15", "+∞"])
_ = right.legend(loc="upper right", fontsize=9, ncols=2)
# %% [markdown]
# ## 6. Four ways to report the sum
#
# A kernel gives the logarithm of its sum, lse, so that parts can be merged and the sink applied afterwards. Kernels do not agree on which:
#
# | | logarithm | sink | no picks |
# |---|---|---|---|
# | here | natural | without | −∞ |
# | FlashMLA | natural | without | +∞ |
# | FlashInfer, MLA on Hopper | base 2 | without | no list is empty |
# | FlashInfer, its kernel for SM120 | base 2 | with | −∞, or the sink |
#
# Left: one query whose list grows from nothing to 64 picks, its lse in all of them, sink 3. Each of them is a number like the others, and
# base 2 meets natural where lse is 0; without picks they are as different as numbers can be.
#
# Right: why it matters. The factor $1/(1 + e^{\sigma - \mathrm{lse}})$ applies the sink to an output, and here it is taken from the
# wrong lse. FlashMLA's +∞ is good for just this: a head without picks and without a sink has $\sigma = \mathrm{lse} = -\infty$, and
# the factor of our lse is NaN where that of theirs is 1.

# %% tags=["image:lse_conventions"]
LONGEST, SINK = 64, torch.tensor([3.0])
lengths = torch.arange(LONGEST + 1, dtype=torch.int32)
one_list = torch.arange(LONGEST, dtype=torch.int32).expand(LONGEST + 1, LONGEST)
common = normal(512)
alike = (common + 0.8 * normal(LONGEST, 512)).bfloat16()  # scores around -1.4
one_query = (-0.06 * common + 0.4 * normal(512)).bfloat16().expand(LONGEST + 1, 1, 512)
growing = attention.sparse_attention(one_query, alike, one_list, SINK, lengths=lengths)
lse = growing.lse
with_sink = attention.lse_with_sink(lse, SINK)
FORMS = {
    "natural (here)": (lse, BLUE, "-", "o"),
    "FlashMLA: the same, but +∞": (attention.lse_flashmla(lse), SKY, (0, (2, 3)), "^"),
    "base 2": (attention.lse_base2(lse), GREEN, "-", "s"),
    "with the sink": (with_sink, ORANGE, "-", "D"),
    "base 2 with the sink": (attention.lse_base2(with_sink), PINK, "-", "v"),
}
TOP, BOTTOM, NOTHING = 9.0, -5.0, 0.45  # where infinities are drawn, and no picks
figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5), layout="constrained", width_ratios=(1.25, 1))
for name, (values, colour, line, marker) in FORMS.items():
    left.plot(lengths[1:], values[1:, 0], linestyle=line, color=colour, linewidth=2.2, label=name)
    shift = {"natural (here)": 0.93, "base 2": 1.08}.get(name, 1)
    left.plot(NOTHING * shift, float(values[0, 0].clamp(BOTTOM, TOP)), marker, color=colour, markersize=9)
assert [float(values[0, 0]) for values, *_ in FORMS.values()][:4] == [-inf, inf, -inf, 3.0]
negative = lse[1:, 0] < 0
assert torch.equal(attention.lse_base2(lse)[1:, 0] < lse[1:, 0], negative)
assert 0 < int(negative.sum()) < 12
left.axhline(0, color=GREY, linewidth=0.8, linestyle=":")
left.set_yticks([BOTTOM, -2, 0, 2, 4, 6, 8, TOP], ["−∞", "−2", "0", "2", "4", "6", "8", "+∞"])
left.set(xlabel="picks", ylabel="lse", title="One list that grows, five numbers for it", ylim=(BOTTOM - 0.6, TOP + 0.6))
left.legend(loc="lower right", fontsize=9)
share = torch.sigmoid(lse.double() - SINK)[:, 0]
for values, colour, line, _ in FORMS.values():
    factor = torch.sigmoid(values.double() - SINK)[:, 0]
    right.plot(lengths[1:], factor[1:], linestyle=line, color=colour, linewidth=2.2)
alone = attention.sparse_attention(one_query, alike, one_list, lengths=lengths)
length = growing.output.double().norm(dim=2)[1:, 0] / alone.output.double().norm(dim=2)[1:, 0]
assert float((length - share[1:]).abs().max()) < 3 * 2.0**-9
right.plot(lengths[1::4], length[::4], "o", color="black", markersize=4, label="|o with the sink| / |o without|")
right.set(xlabel="picks", ylabel="factor for the sink", title="The factor, from each of them", ylim=(0, 1))
right.legend(loc="lower right", fontsize=9)
for axes, start in ((left, [NOTHING]), (right, [])):
    axes.set_xscale("log")
    axes.set_xticks([*start, 1, 2, 4, 8, 16, 32, 64], ["0"] * len(start) + ["1", "2", "4", "8", "16", "32", "64"])
    axes.minorticks_off()
none = torch.tensor([-inf])
assert torch.sigmoid(lse[0] - none).isnan().all()
assert torch.equal(torch.sigmoid(attention.lse_flashmla(lse)[0] - none), torch.ones(1))
# %% [markdown]
# ## 7. Cut and put together
#
# With few queries and many picks a GPU cuts a list into parts, each with its own $o_i$ and $\mathrm{lse}_i$, without the sink. Their sum:
#
# $$ o = \sum_i e^{\mathrm{lse}_i - L}\, o_i, \qquad L = \log\Big(\sum_i e^{\mathrm{lse}_i} + e^{\sigma}\Big) $$
#
# Left: the weights $e^{\mathrm{lse}_i - L}$ of eight parts of 640 picks, for ten heads from flat to sharp, with the sink's share in grey.
# The last part is half empty, and only flat heads weigh their parts alike. Right: what is off after merging, by the number of parts. Parts
# in fp32 give the bits of the whole list, but for an output here and there, however many they are. Parts rounded to bf16 cost what a bf16
# rounding costs, and more of them cost no more. A sink that each part has already counted is no mistake where there is one part.

# %%
TOKENS_HERE, HEADS_HERE, LIST = 4, 10, 640
sharpness = torch.linspace(0.1, 3.0, HEADS_HERE)[:, None]
queries_here = (sharpness * normal(TOKENS_HERE, HEADS_HERE, 512)).bfloat16()
lists = torch.stack([torch.randperm(640, generator=source) for _ in range(TOKENS_HERE)]).int()
lists[:, 600:] = -1  # absent
sinks = 6 + 0.4 * normal(HEADS_HERE)
whole = attention.sparse_attention(queries_here, rows, lists, sinks)


def in_parts(count):
    """Outputs fp32 and lse of so many parts of the list, without the sink."""
    with numerics("unrounded"):
        found = [attention.sparse_attention(queries_here, rows, part.contiguous()) for part in lists.chunk(count, 1)]
    return torch.stack([one.output.float() for one in found]), torch.stack([one.lse.float() for one in found])


merging = {mutant.fault: mutant.call for mutant in attention_mistakes.MUTANTS if mutant.function == "merge_splits"}
MERGERS = {
    "as it should be": (attention.merge_splits, BLUE, "o"),
    "parts rounded to bf16": (merging["parts rounded to bf16"], SKY, "s"),
    "natural lse taken for base 2": (merging["natural lse taken for base 2"], GREEN, "^"),
    "the sink once for each part": (merging["the sink once for each part"], ORANGE, "v"),
    "parts weigh alike": (merging["parts weigh alike"], PINK, "D"),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5), layout="constrained", width_ratios=(1, 1.1))
_, lses = in_parts(8)
total = attention.lse_with_sink(whole.lse, sinks)
weights = (lses.double() - total.double()).exp()[:, 0]  # [parts, heads], of token 0
base = torch.zeros(HEADS_HERE, dtype=torch.float64)
for part in range(8):
    colour = plt.get_cmap("cividis")(part / 7)
    left.bar(range(HEADS_HERE), 100 * weights[part], bottom=100 * base, color=colour, width=0.8, edgecolor="white", linewidth=0.6)
    base += weights[part]
of_sink = (sinks.double() - total[0].double()).exp()
assert float((base + of_sink - 1).abs().max()) < 1e-6
left.bar(range(HEADS_HERE), 100 * of_sink, bottom=100 * base, color="#d0d0d0", width=0.8, hatch="////", edgecolor="white", linewidth=0)
left.set(xlabel="head, from flat to sharp", ylabel="weight (%)", title="Weights of eight parts and of the sink", xticks=[])
handles = [Patch(color=plt.get_cmap("cividis")(part / 7), label=f"part {part + 1}") for part in (7, 0)]
handles.insert(0, Patch(facecolor="#d0d0d0", hatch="////", edgecolor="white", label="sink"))
left.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, -0.17), ncols=3, fontsize=9)
splits = [1, 2, 4, 8, 16, 32]
NO_ERROR = 1e-5  # where 0 is drawn
for name, (merge, colour, marker) in MERGERS.items():
    errors = []
    for count in splits:
        merged = merge(*in_parts(count), sinks).output.double()
        errors.append(float((merged - whole.output.double()).norm() / whole.output.double().norm()))
    right.plot(splits, [max(error, NO_ERROR) for error in errors], marker=marker, color=colour, linewidth=2, label=name)
    assert name != "as it should be" or max(errors) < 2.0**-13
    assert name != "parts rounded to bf16" or all(2.0**-11 < error < 2.0**-7 for error in errors)
right.set(xscale="log", yscale="log", xlabel="parts", ylabel="|merged − whole| / |whole|", title="What is off after merging")
right.set_xticks(splits, splits)
right.set_yticks([NO_ERROR, 1e-4, 1e-3, 1e-2, 1e-1, 1], ["0", "10⁻⁴", "10⁻³", "0.01", "0.1", "1"])
right.minorticks_off()
right.set_ylim(NO_ERROR / 1.6, 20)
_ = right.legend(loc="upper left", fontsize=9, ncols=2)
# %% [markdown]
# ## 8. Fast
#
# `dsv4.fast` has the same functions, from Triton, FlashMLA or FlashInfer on a GPU. `fast.backends()` says what runs on a device: on a CPU
# a running softmax over blocks of picks, in fp64, as it is (eager) or compiled (inductor).
#
# Left: how many bf16 steps outputs are from the reference's. Fast backends are compared with the arithmetic that the official kernel has:
# blocks of 64 picks, fp32 sums, a running maximum, and probabilities rounded to bf16 for the product with the values. It depends on the
# order of the list, for so does the maximum relative to which a probability is rounded. Outputs near 0 are sums that cancel; there steps
# are small, and many.
#
# Right: errors as shares of the bound that parity allows, which is derived from an arithmetic like that and not from what anyone measured.
# It adds up what every rounding can do; here the roundings of 600 probabilities cancel, and a result that is rounded once is not much
# better. Of each mistake some outputs are beyond it; of one that drops 1 pick in 600, a few in a hundred.

# %% tags=["image:attention_backends"]
from dsv4.fast import attention as fast_attention
from dsv4.parity import attention_bounds
from dsv4.parity.compare import ulps
from dsv4.parity.contracts import Call
from dsv4.parity.exact import unrounded

usable = [row.backend for row in fast.backends("cpu") if row.function == "attention.sparse_attention" and row.usable]
print(fast.explain("attention.sparse_attention", "cpu"))


def official(q, kv, indices, sink):
    """The arithmetic of the official kernel: fp32, a running maximum over blocks of 64 picks, probabilities in bf16 for the values."""
    peak = torch.full(q.shape[:2], -1e30)
    total, mixed = torch.zeros(q.shape[:2]), torch.zeros(q.shape)
    for block in indices.split(64, 1):
        there = block >= 0
        values = torch.where(there[..., None], kv[block.long()].float(), 0.0)
        score = (q.float() @ values.mT * q.shape[2] ** -0.5).masked_fill(~there[:, None], -inf)
        highest = torch.maximum(peak, score.amax(2))
        rescale, weight = (peak - highest).exp(), (score - highest[..., None]).exp()
        total = total * rescale + weight.sum(2)
        mixed = mixed * rescale[..., None] + weight.bfloat16().float() @ values
        peak = highest
    total = total + (sink - peak).exp()
    return (mixed / total[..., None]).bfloat16()


call = (queries_here, rows, lists, sinks)
results = {name: fast_attention.sparse_attention(*call, impl=name).output for name in usable}
results["official arithmetic"] = official(*call)
results["the same, list reversed"] = official(queries_here, rows, lists.flip(1).contiguous(), sinks)
assert not torch.equal(results["official arithmetic"], results["the same, list reversed"])
exact = unrounded(attention.sparse_attention)(*call).output
bound = attention_bounds.outputs(Call(call), exact)
figure, (left, right) = plt.subplots(1, 2, figsize=(14, 4.8), layout="constrained")
colours, lines = (BLUE, GREEN, ORANGE, PINK, YELLOW, SKY), ("-", (0, (3, 3)), "-", (0, (2, 2)), "-", "-")
LOOKS = dict(zip(results, zip(colours, lines, strict=True), strict=False))


def above(shares, look, name):
    """How many outputs are off by more than each share of the bound."""
    ordered = shares.sort(descending=True).values.clamp(min=1e-4)
    right.plot(ordered, 100 * (torch.arange(len(ordered)) + 1) / len(ordered), color=look[0], linestyle=look[1], linewidth=2, label=name)


steps = range(6)  # the last stands for all above
for number, (name, output) in enumerate(results.items()):
    distance = ulps(whole.output, output).flatten()
    counts = [int((distance == step).sum()) for step in steps[:-1]] + [int((distance >= steps[-1]).sum())]
    places = np.arange(len(counts)) + 0.8 * (number + 0.5) / len(results) - 0.4
    left.bar(places, [100 * count / len(distance) for count in counts], width=0.75 / len(results), color=LOOKS[name][0], label=name)
    share = ((output.double() - exact).abs() / bound).flatten()
    assert float(share.max()) <= 1
    assert name not in usable or distance.max() == 0
    above(share, LOOKS[name], name)
left.set(yscale="log", xlabel="distance from the reference (bf16 steps)", ylabel="outputs (%)", title="The same output from everybody?")
left.set_xticks(range(len(steps)), [*map(str, steps[:-1]), f"{steps[-1]} or more"])
left.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
left.minorticks_off()
left.legend(loc="upper right", fontsize=9)
for fault, colour in (("probabilities in E4M3", GREY), ("one sink for all heads", "black"), ("the last pick dropped", SKY)):
    mistaken = wrong[fault](*call, lengths=numbers(*[600] * TOKENS_HERE)).output
    share = ((mistaken.double() - exact).abs() / bound).flatten()
    assert float(share.max()) > 1
    above(share, (colour, "-."), fault)
right.axvline(1, color="black", linewidth=1)
right.text(0.85, 0.012, "the bound", rotation=90, ha="right", va="bottom")
right.set(xscale="log", yscale="log", xlabel="|error| / bound", ylabel="outputs with more than this (%)", title="What parity allows")
right.set_xlim(1e-3, 100)
right.set_xticks([0.001, 0.01, 0.1, 1, 10, 100], ["0.001", "0.01", "0.1", "1", "10", "100"])
right.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
right.minorticks_off()
_ = right.legend(loc="lower left", fontsize=9)
# %% [markdown]
# ## 9. Parity
#
# The contract of `sparse_attention` brings softmaxes that are exact (2 to the power k equal scores; one score that is ahead of all others),
# where every implementation owes the same bits, and arbitrary ones with a bound. Rows that nobody picks are NaN. That of `select_topk`
# brings ties of all kinds. Each is run with the fast path and with a mistake out of bug reports: a list that ends at its first −1, and
# ties that go to the larger entry.

# %%
from dsv4.parity import contracts, engine, report
from dsv4.parity.candidates import Candidate
from dsv4.parity.mutants import index_selection as selection_mistakes

HOLE, LARGER = "the list ends at its first -1", "ties to the larger entry"
calls = wrong | {mutant.fault: mutant.call for mutant in selection_mistakes.MUTANTS if mutant.function == "select_topk"}
runs = {
    "attention.sparse_attention": (partial(fast_attention.sparse_attention, impl="eager"), HOLE, ("ahead", "drawn")),
    "indexer.select_topk": (partial(fast_indexer.select_topk, impl="eager"), LARGER, ("index",)),
}
outcomes = []
for function, (ours, fault, names) in runs.items():
    contract = contracts.find(function)
    domains = [domain for domain in contract.domains if domain.name in names]
    for candidate in (Candidate("fast", ours, "fast"), Candidate(fault, calls[fault], fault)):
        outcomes += [engine.check(contract, domain, candidate, torch.device("cpu")) for domain in domains]
print(report.plain(report.table(report.as_data(outcome) for outcome in outcomes)))
failed = {outcome.candidate: outcome for outcome in outcomes if outcome.result == "failed" and outcome.check != "ahead"}
assert failed.keys() == {HOLE, LARGER}

# %% [markdown]
# A failure is shrunk to a small case, and says how to see it again:

# %%
print(failed[LARGER].message)

# %% [markdown]
# The case that shows the other mistake, drawn: each column is a token, with its four picks, and one of the second list. Grey picks do not
# count, by their number or by the token's length. Above, how far off the output is. A token is wrong where a grey pick comes before
# one that counts, and nowhere else.

# %%
contract = contracts.find("attention.sparse_attention")
case = contract.domain("drawn").build(failed[HOLE].spec, torch.device("cpu"))
right_output, wrong_output = attention.sparse_attention(*case.args, **case.kwargs).output, wrong[HOLE](*case.args, **case.kwargs).output
off = (wrong_output.double() - right_output.double()).flatten(1).norm(dim=1) / right_output.double().flatten(1).norm(dim=1).clamp(min=1)
given = [(case[2], len(case[1]), case["lengths"]), (case["extra_indices"], len(case["extra_kv"]), case["extra_lengths"])]
figure, (top, axes) = plt.subplots(2, 1, figsize=(14, 4.6), layout="constrained", height_ratios=(1, 1.7), sharex=True)
early, line = torch.zeros(len(off), dtype=torch.bool), 0
for number, (indices, limit, lengths) in enumerate(given):
    counts = (indices >= 0) & (indices < limit) & (torch.arange(indices.shape[1]) < lengths[:, None])
    early |= ((~counts).cumsum(1) * counts > 0).any(1)
    for column in range(indices.shape[1]):
        for token in range(len(indices)):
            after = bool(counts[token, column] and not counts[token, : column + 1].all())
            colour = ORANGE if after else BLUE if counts[token, column] else "#e3e3e3"
            axes.add_patch(Rectangle((token - 0.46, line), 0.92, 0.9, facecolor=colour, linewidth=0))
            value = int(indices[token, column])
            text = str(value) if abs(value) < 100 else "≫" if value > 0 else "≪"
            axes.text(token, line + 0.47, text.replace("-", "−"), ha="center", va="center", fontsize=8.5,
                      color="black" if colour == "#e3e3e3" else "white")  # fmt: skip
        axes.text(-0.8, line + 0.45, f"pick {column + 1}" if number == 0 else "2nd list", ha="right", va="center", fontsize=10)
        line += 1
    line += 0.25
assert torch.equal(off > 0, early)
top.bar(range(len(off)), off, color=[ORANGE if one else BLUE for one in early.tolist()])
top.set(ylabel="|error| / |o|", title=f"The least case: {len(off)} tokens")
axes.set(xlim=(-3, len(off) - 0.4), ylim=(line, -0.15), xlabel="token", yticks=[])
axes.spines[:].set_visible(False)
axes.tick_params(length=0)
labels = {BLUE: "counts", ORANGE: "counts, behind one that does not", "#e3e3e3": "does not count"}
handles = [Patch(color=colour, label=label) for colour, label in labels.items()]
_ = figure.legend(handles=handles, loc="outside lower center", ncols=3)
# %% [markdown]
# ## 10. What a tolerance cannot see
#
# Eight mistakes. The usual test draws normal queries and rows, 40 distinct picks, sinks of 0, and asks whether outputs are right to 3 %.
# Left: seven are, six of them to the last bit, since nothing in such a test is absent, doubled or empty, and nobody looks at lse. Right:
# how many tokens are wrong in two cases of the contract, one of arbitrary softmaxes and one of exact ones, whose scores are equal. A
# maximum that begins at 0 shows in the second, where equal scores lie far below it. E4M3 shows in the first: it holds equal probabilities
# exactly.

# %%
from dsv4.parity import attention_inputs

FAULTS = (
    "scores without the rotated dims",
    "probabilities in E4M3",
    "one sink for all heads",
    "repeated picks counted once",
    "absent picks read, and weighed 0",
    "lanes past the length used",
    "the running maximum begins at 0",
    "lse of an empty row plus infinity",
)
FORM = {"dim": 512, "extra": "rows", "with_sink": True, "lengths": True}
SIZES = {"tokens": 33, "heads": 8, "picks": 40, "extra_picks": 9, "power": 0, "sink": "drawn", "classes": ["normal"], "seed": 5}


def wrong_tokens(fault, kind, sharp):
    """How many tokens (%) of a case of the contract have an output or lse that it does not allow."""
    case = attention_inputs.sparse_call({"form": FORM, "kind": kind, "sharp": sharp, **SIZES}, torch.device("cpu"))
    exact = unrounded(attention.sparse_attention)(*case.args, **case.kwargs)
    mistaken = wrong[fault](*case.args, **case.kwargs)
    bad = torch.zeros(SIZES["tokens"], dtype=torch.bool)
    for actual, want, limit in zip(mistaken, exact, (attention_bounds.outputs, attention_bounds.lses), strict=True):
        allowed = torch.zeros_like(want) if kind == "mean" and actual is mistaken.output else limit(case, want)
        near = ((actual.double() - want).abs() <= allowed) | (actual.double() == want)
        bad |= ~near.flatten(1).all(1)
    return 100 * float(bad.double().mean())


distinct = torch.stack([torch.randperm(640, generator=source)[:40] for _ in range(64)]).int()
usual = (normal(64, 8, 512).bfloat16(), rows, distinct, torch.zeros(8))
good = attention.sparse_attention(*usual).output.double()
errors = [float((wrong[fault](*usual).output.double() - good).norm() / good.norm()) for fault in FAULTS]
assert [error > 0 for error in errors] == [True] * 2 + [False] * 6
assert errors[0] > 0.1 > 0.03 > errors[1]
figure, (left, right) = plt.subplots(1, 2, figsize=(13.5, 4.6), layout="constrained", sharey=True)
SAME = 1e-4  # where 0 is drawn
left.axvspan(SAME / 3, 0.03, color=GREEN, alpha=0.12, linewidth=0)
left.text(0.026, -0.75, "within 3 %", ha="right", va="center", fontsize=9, color=GREEN)
for place, (fault, error) in enumerate(zip(FAULTS, errors, strict=True)):
    left.hlines(place, SAME / 3, max(error, SAME), color=BLUE, linewidth=1.5, alpha=0.6)
    left.plot(max(error, SAME), place, "o", color=BLUE, markersize=9)
    shares = wrong_tokens(fault, "drawn", 1.0), wrong_tokens(fault, "mean", 1000.0)
    assert max(shares) > 10, fault
    for share, colour, marker, shift, name in zip(shares, (ORANGE, BLUE), "sD", (-0.15, 0.15), ("arbitrary", "exact"), strict=True):
        right.hlines(place + shift, 0, share, color=colour, linewidth=1.5, alpha=0.6)
        right.plot(share, place + shift, marker, color=colour, markersize=8, label=f"{name} softmaxes" if place == 0 else None)
left.set_yticks(range(len(FAULTS)), [fault.replace("-1", "−1") for fault in FAULTS])
left.set(
    xscale="log", xlim=(SAME / 3, 1), ylim=(len(FAULTS) - 0.5, -1.2), xlabel="|wrong − right| / |right|", title="What the usual test sees"
)
left.set_xticks([SAME, 1e-3, 0.01, 0.1, 1], ["0", "0.1 %", "1 %", "10 %", "100 %"])
left.minorticks_off()
right.set(xlabel="wrong tokens (%)", title="What it does not see", xlim=(-2, 104))
_ = right.legend(loc="upper right", fontsize=9, ncols=2, bbox_to_anchor=(1, 1.02))
