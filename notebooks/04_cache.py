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
# # What the cache keeps
#
# A token leaves one row of 512 numbers in the cache, key and value at once. It is normalised, rotated by its position, quantised and put
# into a page. Older tokens are kept as *entries* of 2, 4 or 128 tokens each, which a compressor pools. This notebook follows the bytes:
# where they lie, what they lose, what a compressor reads and when, and what it must remember between two calls.
#
# Each part goes the same way: equation, picture, reference, fast, parity. It runs on a CPU in under a minute.

# %%
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Patch, Rectangle

from dsv4 import fast, kv_layouts
from dsv4.configs import V41_FLASH
from dsv4.formats import KV_LAYOUTS
from dsv4.parity.debug import detect_layout_mismatch
from dsv4.reference import compressor, kv_cache, rotary
from dsv4.reference.norms import rms_norm
from dsv4.types import ArgumentError

BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#666666"
PARTS = {"codes": BLUE, "bf16 rope": GREEN, "scales": ORANGE, "padding": "#aaaaaa"}
plt.rcParams.update({"figure.dpi": 110, "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
source = torch.Generator().manual_seed(12)
DIMS, ROTATED = 512, 64


def normal(*shape):
    return torch.randn(shape, generator=source)


# %% [markdown]
# ## 1. Six layouts
#
# A page has $P$ slots. A token's record is data (codes, and in V4 the last 64 numbers in bf16) and scales, $D$ and $S$ bytes:
#
# $$ \text{planar: } \text{data}(i) = i D, \quad \text{scales}(i) = P D + i S \qquad\qquad
# \text{inline: } \text{data}(i) = i (D + S), \quad \text{scales}(i) = \text{data}(i) + D $$
#
# Below is a page of eight slots in each layout, to scale, and in full colour what belongs to slot 3. The places are measured: a record of
# bytes 0x00 and one of 0xFF are stored, and where the page changes the token lies. In a planar page the record is torn in two, so the last
# axis of a view [pages, P, D + S] shows no token.

# %% tags=["image:cache_layouts"]
P, SLOT = 8, 3


def page_with(layout, byte, slot):
    record = torch.full((1, KV_LAYOUTS[layout].token_bytes), byte, dtype=torch.uint8)
    empty = torch.full((1, KV_LAYOUTS[layout].page_bytes(P)), 0x55, dtype=torch.uint8)
    return kv_cache.store_kv(record, empty, torch.tensor([slot]), layout=layout, page_size=P)[0]


figure, grid = plt.subplots(len(KV_LAYOUTS), 1, figsize=(14, 7.4), layout="constrained", sharex=True)
for axes, (name, layout) in zip(grid, KV_LAYOUTS.items(), strict=True):
    for slot in range(P):
        explained = kv_layouts.explain_layout(name, page_size=P, token=slot)
        touched = torch.zeros(explained.page_bytes, dtype=torch.bool)
        for row in explained.rows:
            touched[row.start : row.stop] = True
            width = row.stop - row.start
            axes.barh(0, width, left=row.start, height=1, color=PARTS[row.part], alpha=1 if slot == SLOT else 0.22, linewidth=0)
        assert torch.equal(page_with(name, 0, slot) != page_with(name, 255, slot), touched)
        axes.plot([layout.data_offset(slot, P)] * 2, [-0.5, 0.5], color="white", linewidth=1.2)
        axes.plot([layout.scale_offset(slot, P)] * 2, [-0.5, 0.5], color="white", linewidth=min(1.2, layout.scale_bytes / 32))
    padding = explained.page_padding
    axes.barh(0, padding.stop - padding.start, left=padding.start, height=1, color=PARTS["padding"], alpha=0.5, linewidth=0)
    first = layout.data_offset(SLOT, P)
    coded = kv_layouts.code_bytes(layout)
    axes.text(first + coded / 2, 0, f"{coded} B", color="white", ha="center", va="center", fontsize=10)
    if coded < layout.data_bytes:
        axes.text(first + layout.data_bytes, 0.62, f"{layout.data_bytes - coded} B", color=GREEN, ha="right", va="bottom", fontsize=10)
    if layout.scale_bytes:
        at = layout.scale_offset(SLOT, P)
        axes.text(at + layout.scale_bytes / 2, 0.62, f"{layout.scale_bytes} B", color=ORANGE, ha="center", va="bottom", fontsize=10)
    words = [name, f"{layout.token_bytes} B a token"]
    if layout.scale_bytes:
        words.append(f"{layout.groups} groups of {layout.group}, {'inline' if layout.inline else 'planar'}")
    axes.set_yticks([0.05], ["\n".join(words)], fontsize=10)
    axes.set_ylim(-0.55, 0.95)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0, labelbottom=axes is grid[-1])
grid[-1].set_xlabel("byte of the page")
names = {"codes": "codes", "bf16 rope": "bf16, the rotated dims", "scales": "scales", "padding": "padding"}
handles = [Patch(color=colour, label=names[part]) for part, colour in PARTS.items()]
_ = figure.legend(handles=handles, loc="outside lower center", ncols=4)
# %% [markdown]
# ## 2. Planar read as inline
#
# Nothing in a page says how it is laid out. A reader of the wrong layout gets numbers, and they are not all nonsense. Below: eight rows
# stored planar (V4.1, FP8), and the same page read inline. Slot 0 begins at the same byte in both, so its codes are right; but its scales
# are codes of slot 1, powers of two that are far off. Further on everything is shifted by 16 bytes a slot.
#
# `detect_layout_mismatch` takes pages and what should be in them, tries the usual confusions, and names those that explain the bytes.

# %%
angle = torch.arange(DIMS) / 40.0
rows = torch.stack([(angle * (1 + 0.25 * slot)).sin() * (1 + 0.3 * (angle * 0.7).cos()) for slot in range(P)]).bfloat16()
slots = torch.arange(P)


def stored(kv, layout, **options):
    pages = torch.zeros(1, KV_LAYOUTS[layout].page_bytes(P), dtype=torch.uint8)
    return kv_cache.store_kv(kv, pages, slots, layout=layout, page_size=P, **options)


planar = stored(rows, "v41")
inline_size = KV_LAYOUTS["v41_inline"].page_bytes(P)
as_inline = kv_cache.load_kv(planar[:, :inline_size], slots, layout="v41_inline", page_size=P)
assert torch.equal(planar[0, DIMS : DIMS + 16], kv_cache.quantize_kv(rows[1:2], layout="v41")[0, :16])  # slot 0's scales, as it is read
figure, grid = plt.subplots(1, 2, figsize=(14, 3.6), layout="constrained", sharey=True)
for axes, values, title in zip(grid, (rows, as_inline), ("What was stored (v41)", "Read as v41_inline"), strict=True):
    shade = values.float().abs().clamp(2.0**-20, 2.0**20).log2()
    picture = axes.imshow(shade, cmap="viridis", aspect="auto", vmin=-20, vmax=20, interpolation="nearest")
    axes.set(xlabel="dim", title=title)
    axes.spines[:].set_visible(False)
grid[0].set(ylabel="slot")
figure.colorbar(picture, ax=grid, label="log2 |number|", ticks=(-20, -10, 0, 10, 20))
writers = {
    "planar bytes in an inline page": (planar, "v41_inline", rows),
    "inline bytes in a planar page": (stored(rows, "v41_inline"), "v41", rows),
    "the floor of another code base": (stored(rows / 512, "v41", amax_floor="flashmla"), "v41", rows / 512),
    "a page of FP8 for one of FP4": (planar, "v41_fp4", rows),
    "the right bytes": (planar, "v41", rows),
}
for name, (pages, layout, kv) in writers.items():
    wide = torch.zeros(1, max(pages.shape[1], KV_LAYOUTS[layout].page_bytes(P)), dtype=torch.uint8)
    wide[:, : pages.shape[1]] = pages
    found = detect_layout_mismatch(wide, slots, kv, layout=layout, page_size=P)
    best = f"{found[0].name}: explains {100 * found[0].share:.0f} % of the wrong rows" if found else "nothing to find"
    print(f"{name:32} {best}")
# %% [markdown]
# ## 3. What a row loses
#
# Rows as they come from the norm: numbers around 1, but for four dims whose norm weight is 16. Left: the error of each dim, as a share of
# the dim's own size. V4 keeps the last 64, the rotated ones, in bf16; nothing is lost there. V4.1 quantises them, too. In FP8 a large
# neighbour does no harm, since codes reach far below the largest of their group. FP4 reaches from 0.5 to 6: the 15 dims that share a
# scale with a large one are off by more than a third of their size.
#
# Right: the same rows, smaller or larger. Scales follow until the floor of $10^{-4}$ is reached, or their own range ends: the E4M3 scale
# of FP4 lies between $2^{-9}$ and 448. *Uniform* FP8 has no scales. It is as good as the others where numbers lie between $2^{-6}$ and 448,
# and nowhere else.

# %%
LARGE_DIMS = [100, 240, 333, 480]
norm_weight = torch.ones(DIMS).bfloat16()
norm_weight[LARGE_DIMS] = 16.0
keys = rms_norm(normal(2048, DIMS).bfloat16(), norm_weight, eps=1e-6)
LOSSES = {
    "v4": ("V4: 448 FP8, 64 bf16", BLUE, "-"),
    "v41": ("V4.1: FP8", GREEN, (0, (4, 4))),
    "uniform_fp8": ("uniform FP8", PINK, (0, (1, 2))),
    "v41_fp4": ("V4.1: FP4", ORANGE, "-"),
}


def read_back(kv, layout):
    records = kv_cache.quantize_kv(kv, layout=layout)
    pages = torch.zeros(len(kv), KV_LAYOUTS[layout].page_bytes(1), dtype=torch.uint8)
    rows = torch.arange(len(kv))
    return kv_cache.load_kv(kv_cache.store_kv(records, pages, rows, layout=layout, page_size=1), rows, layout=layout, page_size=1)


figure, (left, right) = plt.subplots(1, 2, figsize=(13.5, 4.6), layout="constrained")
along = {}
for layout, (name, colour, line) in LOSSES.items():
    error = read_back(keys, layout).double() - keys.double()
    along[layout] = error.square().mean(0).sqrt() / keys.double().square().mean(0).sqrt()
    left.plot(along[layout], linestyle=line, color=colour, linewidth=1.6, label=name)
    powers = torch.arange(-40, 41, 1)
    ratios = []
    for power in powers.tolist():
        scaled = torch.ldexp(keys[:64].float(), torch.tensor(power)).bfloat16()
        error = read_back(scaled, layout).double() - scaled.double()
        ratios.append(float(error.norm() / scaled.double().norm()))
    right.plot(powers, ratios, linestyle=line, color=colour, linewidth=1.8)
beside = torch.zeros(DIMS, dtype=torch.bool).view(-1, 16)
beside[torch.tensor(LARGE_DIMS) // 16] = True
beside = beside.flatten().index_fill(0, torch.tensor(LARGE_DIMS), False)
assert float(along["v4"][DIMS - ROTATED :].max()) == 0
assert float(along["v41"].max()) < 0.03
assert float(along["v41_fp4"][beside].min()) > 1 / 3
assert float(along["v41_fp4"][~beside].max()) < 0.12
left.axvline(DIMS - ROTATED, color=GREY, linewidth=1, linestyle=":")
left.text(DIMS - ROTATED + 6, 0.004, "rotated", color=GREY)
left.set(xlabel="dim", ylabel="rms error / size of the dim", yscale="log", ylim=(1e-3, 4), title="Where the error lies")
left.set_yticks([0.001, 0.01, 0.1, 1], ["0.1 %", "1 %", "10 %", "100 %"])
left.legend(loc="upper left", fontsize=9, ncols=2)
right.set(
    xlabel="log2 of the factor", ylabel="rms error / size of the row", yscale="log", ylim=(1e-2, 2), title="The same rows, times a factor"
)
right.set_yticks([0.01, 0.03, 0.1, 0.3, 1], ["1 %", "3 %", "10 %", "30 %", "100 %"])
right.minorticks_off()
# %% [markdown]
# ## 4. Angles
#
# The last 64 numbers of a row are 32 pairs. Pair $i$ of the token at position $p$ turns by $p f_i$ with $f_i = b^{-i/32}$. A key that is
# stored turned and a query that is turned meet at the difference of their positions.
#
# Layers without a compressor have $b = 10\,000$. The others look far back: $b = 160\,000$, and YaRN makes the slow pairs slower still,
# by 16. Pairs up to 15 keep their frequency, those from 25 on have a sixteenth, a ramp lies between. Left: tokens to a full turn.
#
# Middle: it matters which layer has which. YaRN on a layer without a compressor, where it does not belong, changes the pairs from 21 on,
# and at the largest distance that such a layer looks back, 127, none by more than 2.1 degrees. No benchmark shows that; a comparison of
# tables does. Right: tables are fp32, and so is the angle $p f_i$. Pair 0 turns by 1 and is exact; at a million tokens pair 1 is off by up
# to a thirtieth of a radian, alike in every implementation that rounds the same way.

# %% tags=["image:rope_frequencies"]
yarn = V41_FLASH.rope_scaling
plain, wide = rotary.rope_frequencies(1e4), rotary.rope_frequencies(1.6e5)
stretched, misplaced = rotary.rope_frequencies(1.6e5, yarn=yarn), rotary.rope_frequencies(1e4, yarn=yarn)
pairs = torch.arange(32)
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained", width_ratios=(1.25, 1, 1))
for frequencies, colour, line, name in (
    (plain, GREEN, "-", "base 10 000"),
    (wide, GREY, ":", "base 160 000"),
    (stretched, BLUE, "-", "base 160 000 with YaRN"),
):
    left.plot(pairs, 2 * np.pi / frequencies, line, color=colour, linewidth=2, label=name)
ramp = (1 - stretched / wide) / (1 - 1 / 16)
assert [int(torch.nonzero(ramp > 1e-6)[0]), int(torch.nonzero(ramp > 1 - 1e-6)[0])] == [16, 25]
left.axvspan(15, 25, color=SKY, alpha=0.2, linewidth=0)
left.text(15.5, 1.1e7, "ramp", color=BLUE)
for length, name in ((128, "window"), (65536, "65 536, trained"), (1048576, "1 048 576")):
    left.axhline(length, color="black", linewidth=0.8, linestyle=":")
    left.text(0, length * 1.15, name, fontsize=9)
left.set(xlabel="pair", ylabel="tokens to a full turn", yscale="log", title="How fast pairs turn")
left.legend(loc="lower right", fontsize=9)
table, wrong_table = rotary.rope_table(plain, 128), rotary.rope_table(misplaced, 128)
turned = torch.rad2deg(torch.atan2(wrong_table[127, 32:], wrong_table[127, :32]) - torch.atan2(table[127, 32:], table[127, :32]))
turned = (turned + 180) % 360 - 180
changed = torch.nonzero(misplaced != plain).flatten()
assert changed.tolist() == list(range(21, 32))
assert 2.0 < float(turned.abs().max()) < 2.11
middle.bar(pairs, turned, color=ORANGE)
middle.set(xlabel="pair", ylabel="degrees", title="YaRN where it does not belong:\nangles at distance 127")
places = 2 ** torch.arange(4, 21)
for pair, colour in ((1, ORANGE), (8, PINK), (16, BLUE)):
    one = rotary.rope_table(stretched[pair : pair + 1], 2**20).double()
    exact = torch.arange(2**20, dtype=torch.float64) * stretched[pair].double()
    error = torch.atan2(one[:, 1], one[:, 0]) - exact
    error = (error - (error / (2 * np.pi)).round() * 2 * np.pi).abs()
    largest = [float(error[: int(place)].max()) for place in places]
    assert pair > 1 or 0.028 < largest[-1] < 2.0**-5
    right.plot(places, largest, "o-", color=colour, markersize=4, label=f"pair {pair}")
right.set(xlabel="positions", ylabel="largest error of the angle (radians)", xscale="log", yscale="log", title="What fp32 angles cost")
_ = right.legend(loc="upper left")
# %% [markdown]
# ## 5. What a compressor reads
#
# A compressor of ratio $r$ makes an entry of $r$ tokens, channel by channel: a softmax over the tokens' scores weighs their values,
#
# $$ e_w = \sum_q \mathrm{softmax}_q(s_q + a_{q \bmod r})\, v_q, \qquad q = r w, \dots, r w + r - 1 $$
#
# with a bias $a$ for the place in the window (V4 alone). V4's ratio 4 overlaps: a token has twice the channels, and entry $w$ takes the
# first half of those of tokens $4w-4 \dots 4w-1$, the second half of $4w \dots 4w+3$. Ratio 128 is V4's other compressor. V4.1 has ratio 2,
# and ratio 1, which is no more than the value.
#
# The pictures are measured: one token's values are changed, in one half of its channels, and cells are filled where an entry changes. The
# line is where an entry comes into being: tokens go in one by one, and it is drawn behind the token with whose call the entry comes out.
# It reads nothing to the right of it. A query may look at an entry as soon as it exists, $j < \lfloor (p+1)/r \rfloor$.

# %% tags=["image:compressor_windows"]
DIM = 8
KINDS = {"V4, ratio 4 with overlap": (4, True, True, 24), "V4, ratio 128": (128, False, True, 512),
         "V4.1, ratio 2": (2, False, False, 24), "V4.1, ratio 1": (1, False, False, 24)}  # fmt: skip


def one_request(values, scores, state, start, **options):
    ends = torch.tensor([0, len(values)], dtype=torch.int32)
    return compressor.compress(values, scores, state, torch.tensor([start]), ends, **options)


def made(result):
    """The entries that came out: their numbers, and what is in them."""
    return {int(entry): row for entry, row, of in zip(result.entries, result.pooled, result.requests, strict=True) if of >= 0}


figure, grid = plt.subplots(2, 2, figsize=(14, 6.4), layout="constrained", height_ratios=(1, 1.9))
order = {0: grid[0, 0], 1: grid[0, 1], 2: grid[1, 0], 3: grid[1, 1]}
for axes, (name, (ratio, overlap, biased, tokens)) in zip(order.values(), KINDS.items(), strict=True):
    width = 2 * DIM if overlap else DIM
    values, scores = normal(tokens, width), normal(tokens, width)
    options = {"ratio": ratio, "overlap": overlap, "ape": normal(ratio, width) if biased else None}
    fresh = compressor.compressor_state(1, DIM, ratio=ratio, overlap=overlap)
    entries = made(one_request(values, scores, fresh, 0, **options))
    picture = torch.zeros(len(entries), tokens, 3)
    reads = torch.zeros(2, len(entries), tokens, dtype=torch.bool)
    for token in range(tokens):
        for half in range(1 + overlap):
            changed = values.clone()
            changed[token, half * DIM : (half + 1) * DIM] += 100.0
            other = made(one_request(changed, scores, fresh, 0, **options))
            reads[half if overlap else 1, :, token] = torch.tensor([bool((other[w] != entries[w]).any()) for w in entries])
    shade = reads[1] + 2 * reads[0]
    axes.imshow(
        shade, aspect="auto", cmap=plt.matplotlib.colors.ListedColormap(["#f2f2f2", BLUE, ORANGE]), vmin=0, vmax=2, interpolation="nearest"
    )
    state = fresh
    for token in range(tokens):
        step = one_request(values[token : token + 1], scores[token : token + 1], state, token, **options)
        state = step.state
        for entry in made(step):
            axes.plot([token + 0.5] * 2, [entry - 0.5, entry + 0.5], color="black", linewidth=2.5)
            assert entry == (token + 1) // ratio - 1
            assert not reads[:, entry, token + 1 :].any()
    for entry in entries:
        own = set(range(ratio * entry, ratio * entry + ratio))
        assert set(torch.nonzero(reads[1, entry]).flatten().tolist()) == own
        before = set(range(max(0, ratio * entry - ratio), ratio * entry)) if overlap else set()
        assert set(torch.nonzero(reads[0, entry]).flatten().tolist()) == before
    axes.set_title(name, fontsize=11)
    axes.set(xlabel="token", ylabel="entry", xlim=(-0.5, tokens * 1.01 - 0.5))
    axes.set_yticks(range(0, len(entries), 1 if len(entries) < 8 else 4))
    axes.spines[:].set_visible(False)
    if ratio == 128:
        axes.set_xticks(range(0, 512, 128))
handles = [Patch(color=BLUE, label="its own channels"), Patch(color=ORANGE, label="the channels for the next entry"),
           plt.Line2D([], [], color="black", linewidth=2.5, label="the entry exists")]  # fmt: skip
_ = figure.legend(handles=handles, loc="outside lower center", ncols=3)
# %% [markdown]
# ## 6. Weights inside a window
#
# What are the weights? Values that are 1 in one token and 0 elsewhere bring them out. Left: entry 1 of the overlapping compressor, 24
# channels. Each channel has its own softmax over eight tokens, four of them through other channels. Right: entry 0. There is nothing before
# it, and its missing half has weight 0, not a score of 0: a compressor that pads with zeros would take more than
# half of some channels away.

# %%
CHANNELS = 24
scores, ape = 1.5 * normal(8, 2 * CHANNELS), normal(4, 2 * CHANNELS)
fresh = compressor.compressor_state(1, CHANNELS, ratio=4, overlap=True)
weights = torch.zeros(2, 8, CHANNELS)
for token in range(8):
    values = torch.zeros(8, 2 * CHANNELS)
    values[token] = 1.0
    for entry, row in made(one_request(values, scores, fresh, 0, ratio=4, overlap=True, ape=ape)).items():
        weights[entry, token] = row.float()
assert float((weights.double().sum(1) - 1).abs().max()) < 8 * 2.0**-9  # bf16 weights
by_hand = (scores[:4, CHANNELS:] + ape[:, CHANNELS:]).softmax(0)
assert torch.equal(weights[0, :4].bfloat16(), by_hand.double().float().bfloat16())
padded = (torch.cat([torch.zeros(4, CHANNELS), scores[:4, CHANNELS:] + ape[:, CHANNELS:]]).softmax(0))[:4].sum(0)
assert float(padded.max()) > 0.5
figure, (left, right) = plt.subplots(1, 2, figsize=(14, 3.8), layout="constrained", width_ratios=(1.9, 1))
shown = torch.cat([weights[1, :4], weights[1, 4:]])
picture = left.imshow(shown, cmap="Blues", vmin=0, vmax=1, aspect="auto")
left.axhline(3.5, color=ORANGE, linewidth=2)
left.set_yticks(range(8), [f"token {token}" for token in range(8)], fontsize=9)
left.set(xlabel="channel", title="Weights of entry 1 (above the line: by the channels for the next entry)")
left.spines[:].set_visible(False)
figure.colorbar(picture, ax=left, label="weight")
right.bar(range(CHANNELS), 100 * padded, color=ORANGE)
_ = right.set(xlabel="channel", ylabel="share of the padding (%)", title="Entry 0, if what is missing had a score of 0")
# %% [markdown]
# ## 7. What must be remembered
#
# Tokens come in chunks that end anywhere. What a later entry needs of earlier tokens waits in a ring: the token at position $p$ lies in
# row $p \bmod \text{ring}$, and $r$ rows are enough, $2r$ with overlap. Below tokens carry their position as value, so that the ring can
# be read off after each call. Orange is what the call wrote; the entries that it completed stand above. However the tokens are cut, the
# entries have the same bits.
#
# **Rolling back.** A speculative decoder sends tokens that may be dropped. With a ring by position nothing has to be undone: the next call
# begins at a smaller position and writes over them. Of the last three calls the first has four tokens of which one stays, the second three
# of which one stays. Entry 3 comes out of all three, and the last one counts.
#
# But dropped tokens have overwritten older ones, so the ring needs a row more for each token that may be dropped (`drafts`). Right: 16
# requests that are 0 to 15 tokens long verify some drafts, keep one token and go on for eight. Up to `drafts` dropped tokens all entries
# are those of a run without drafts. One more does no harm, because the last token of an entry need not come from the ring; above that,
# entries are pooled with tokens that do not exist. `roll_back` refuses what is beyond `drafts`. One code base kept rows for four drafts,
# however many there were, and fell from 97.1 to 94.0 in a benchmark.

# %% tags=["image:compressor_ring"]
for ratio, overlap, _, _ in KINDS.values():  # any cut gives the same bits
    width = 2 * DIM if overlap else DIM
    values, scores = normal(300, width), normal(300, width)
    empty = compressor.compressor_state(1, DIM, ratio=ratio, overlap=overlap)
    whole = made(one_request(values, scores, empty, 0, ratio=ratio, overlap=overlap))
    state, position, pieces = empty, 0, {}
    while position < 300:
        size = int(torch.randint(1, 40, (), generator=source))
        part = slice(position, position + size)
        result = one_request(values[part], scores[part], state, position, ratio=ratio, overlap=overlap)
        state, position = result.state, position + size
        pieces |= made(result)
    assert pieces.keys() == whole.keys()
    assert all(torch.equal(pieces[entry], whole[entry]) for entry in whole)

chunks = [3, 1, 1, 5, 2]
SPAN, DRAFTS = 8, 3
state = compressor.compressor_state(1, 1, ratio=4, overlap=True, drafts=DRAFTS) - 1  # -1: not written yet
position, history = 0, []


def call(state, start, count):
    places = torch.arange(start, start + count, dtype=torch.float32)[:, None].expand(-1, 2).contiguous()
    return one_request(places, torch.zeros_like(places), state, start, ratio=4, overlap=True)


for count, kept in [*((size, size) for size in chunks), (4, 1), (3, 1), (4, 4)]:
    result = call(state, position, count)
    history.append((position, count, kept, sorted(made(result)), result.state[0, :, 0].clone()))
    position = int(
        compressor.roll_back(
            torch.tensor([position]), torch.tensor([kept]), drafted=count - kept, state=result.state, ratio=4, overlap=True
        )
    )
    state = result.state
WIDTH, LONGEST = 2 * DIM, 40
truth = normal(2, 16, LONGEST, WIDTH)  # values and scores of every request's tokens
lengths = torch.arange(16)


def ragged(parts, counts, state, starts):
    """compress of the first `counts` tokens of each of `parts`, [2, requests, most, width]."""
    ends = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32)
    values, scores = (torch.cat([row[:count] for row, count in zip(part, counts.tolist(), strict=True)]) for part in parts)
    result = compressor.compress(values, scores, state, starts, ends, ratio=4, overlap=True)
    keys = zip(result.requests.tolist(), result.entries.tolist(), strict=True)
    return result.state, {key: row for key, row in zip(keys, result.pooled, strict=True) if key[0] >= 0}


def share_wrong(drafts, dropped):
    """Requests (%) that get a wrong entry after `dropped` tokens were dropped, from a ring that allows for `drafts`."""
    fresh = compressor.compressor_state(16, DIM, ratio=4, overlap=True, drafts=drafts)
    _, right_entries = ragged(truth, lengths + 9, fresh, torch.zeros(16, dtype=torch.int64))
    state, _ = ragged(truth, lengths, fresh, torch.zeros(16, dtype=torch.int64))
    verify = normal(2, 16, dropped + 1, WIDTH)
    verify[:, :, 0] = truth[:, lengths, lengths]
    state, last = ragged(verify, torch.full((16,), dropped + 1), state, lengths)
    last = {key: row for key, row in last.items() if key[1] < (int(lengths[key[0]]) + 1) // 4}
    for step in range(1, 9):
        state, new = ragged(truth[:, lengths, lengths + step, None], torch.ones(16, dtype=torch.int64), state, lengths + step)
        last |= new
    wrong = {key[0] for key, row in last.items() if not torch.equal(row, right_entries[key])}
    return 100 * len(wrong) / 16


figure, (axes, right) = plt.subplots(1, 2, figsize=(16, 5), layout="constrained", width_ratios=(2.3, 1))
for column, (start, count, kept, entries, ring) in enumerate(history):
    for row, held in enumerate(ring.int().tolist()):
        fresh_cell, dropped = start <= held < start + count, held >= start + kept
        colour = "#f2f2f2" if held < 0 else ORANGE if fresh_cell else SKY
        axes.add_patch(
            Rectangle((column + 0.04, row), 0.92, 0.88, facecolor=colour, alpha=0.9, hatch="////" if dropped else None, edgecolor="white")
        )
        axes.text(column + 0.5, row + 0.44, "" if held < 0 else held, ha="center", va="center", fontsize=11)
    tokens = f"token {start}" if count == 1 else f"tokens {start} to {start + count - 1}"
    axes.text(column + 0.5, -0.35, tokens, ha="center", fontsize=10)
    axes.text(column + 0.5, -1.1, f"entry {entries[0]}" if entries else "no entry", ha="center", fontsize=10, color=BLUE)
    if kept < count:
        axes.text(column + 0.5, len(ring) + 0.55, f"{kept} of {count} stay", ha="center", fontsize=10, color=ORANGE)
axes.set(
    xlim=(-0.05, len(history) + 0.05),
    ylim=(len(ring) + 0.8, -1.6),
    ylabel="row of the ring",
    title="The ring after each call, ratio 4 with overlap, 3 drafts",
)
axes.set_yticks(np.arange(len(ring)) + 0.44, range(len(ring)))
axes.set_xticks([])
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
handles = [Patch(color=ORANGE, label="written by this call"), Patch(color=SKY, label="from calls before"),
           Patch(facecolor=ORANGE, hatch="////", edgecolor="white", label="dropped after it")]  # fmt: skip
_ = axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3)
dropped = range(13)
for drafts, colour, marker in ((0, GREY, "o"), (3, BLUE, "s"), (8, GREEN, "^")):
    shares = [share_wrong(drafts, count) for count in dropped]
    assert all((share > 0) == (count > drafts + 1) for share, count in zip(shares, dropped, strict=True))
    right.plot(dropped, shares, marker=marker, color=colour, label=f"{SPAN} + {drafts} rows")
try:
    compressor.roll_back(torch.tensor([12]), torch.tensor([1]), drafted=4, state=state, ratio=4, overlap=True)
except ArgumentError as error:
    print(error)
right.set(xlabel="tokens dropped", ylabel="requests with a wrong entry (%)", title="A ring that is too short", ylim=(-4, 119))
_ = right.legend(loc="upper left", ncols=3, fontsize=9, columnspacing=1)
# %% [markdown]
# ## 8. Fast
#
# `dsv4.fast` has the same functions. There `store_kv` and `compress` change the caller's pages and state in place, and on a GPU the way
# from a compressor's window to the record in its page is one launch. Bytes are bytes: the contract asks for all of them, in every layout.
# On a CPU bodies are compiled by default; here they run as they are, `impl="eager"`.

# %%
from dsv4.fast import compressor as fast_compressor
from dsv4.fast import kv_cache as fast_kv
from dsv4.parity.compare import compare_bytes

print(fast.explain("kv_cache.store_kv", "cpu"))
places = torch.randperm(4 * P, generator=source)[:20]
places[[3, 11]] = -1  # absent
places[5] = places[17]  # twice: the last one stays
for layout in KV_LAYOUTS:
    pages = torch.randint(0, 256, (4, KV_LAYOUTS[layout].page_bytes(P)), generator=source).to(torch.uint8)
    expected = kv_cache.store_kv(keys[:20], pages, places, layout=layout, page_size=P)
    actual = fast_kv.store_kv(keys[:20], pages, places, layout=layout, page_size=P, impl="eager")
    in_place = actual.data_ptr() == pages.data_ptr()
    print(f"{layout:15} same pages: {compare_bytes(expected, actual).ok}, in place: {in_place}")
for name, (ratio, overlap, biased, tokens) in KINDS.items():
    width = 2 * DIM if overlap else DIM
    options = {"ratio": ratio, "overlap": overlap, "ape": normal(ratio, width) if biased else None}
    state = compressor.compressor_state(2, DIM, ratio=ratio, overlap=overlap)
    batch = (normal(2 * tokens, width), normal(2 * tokens, width))
    where = (torch.tensor([0, 0]), torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32))
    expected = compressor.compress(*batch, state, *where, **options)
    actual = fast_compressor.compress(*batch, state, *where, **options, impl="eager")
    print(f"{name:25}", {field: compare_bytes(getattr(expected, field), getattr(actual, field)).ok for field in expected._fields})

# %% [markdown]
# ## 9. Parity
#
# The contract of `quantize_kv` brings every bf16 number, alone and beside a large one, and rows of all kinds; that of `compress` brings
# requests in the middle of their windows, with NaN in every row of their rings that nobody may read. Each is run with the fast path and two
# mistakes out of bug reports.

# %%
from dsv4.parity import contracts, engine, report
from dsv4.parity.candidates import Candidate
from dsv4.parity.mutants import compressor as compressor_mistakes
from dsv4.parity.mutants import kv_cache as kv_mistakes

wrong = {
    mutant.fault: mutant.call
    for mutant in (*kv_mistakes.MUTANTS, *compressor_mistakes.MUTANTS)
    if mutant.function in ("quantize_kv", "compress")
}
TIES, DOWN = "FP4 midpoints toward zero", "scales rounded down"
NO_SCORE, FOUR = "the first window's missing overlap has a score of 0", "no more than 4 tokens written"
runs = {
    ("kv_cache.quantize_kv", ("v41", "v41_fp4")): (partial(fast_kv.quantize_kv, impl="eager"), DOWN, TIES),
    ("compressor.compress", ("drawn_overlap", "drawn_pair")): (
        partial(fast_compressor.compress, impl="eager"),
        NO_SCORE,
        FOUR,
    ),
}
outcomes = []
for (function, names), (ours, *faults) in runs.items():
    contract = contracts.find(function)
    candidates = [Candidate("fast", ours, "fast"), *(Candidate(fault, wrong[fault], fault) for fault in faults)]
    domains = [domain for domain in contract.domains if domain.name in names]
    assert len(domains) == len(names)
    outcomes += [engine.check(contract, domain, one, torch.device("cpu")) for one in candidates for domain in domains]
for outcome in outcomes:
    outcome.rows = [row for row in outcome.rows if row.output in ("result", "pooled", "state")]  # not the plan's
print(report.plain(report.table(report.as_data(outcome) for outcome in outcomes)))
assert {outcome.candidate for outcome in outcomes if outcome.result == "failed"} == {DOWN, TIES, NO_SCORE, FOUR}

# %% [markdown]
# The least case that shows the missing rows of the ring:

# %%
messages = [outcome.message for outcome in outcomes if outcome.candidate == FOUR and outcome.message]
print(min(messages, key=len))

# %% [markdown]
# ## 10. What a tolerance cannot see
#
# Six quantisers with one mistake each. The usual test stores normal numbers, reads them back, and asks whether they are what was stored, up
# to the error of the format. Left: five pass, since what they add to that error is nothing. Right: how many records have other bytes. On
# normal numbers two have none at all; they need rows of their own, a group below the floor, a NaN. Bytes have to be compared as bytes, on
# inputs that were made for it.

# %%
from dsv4.parity import kv_inputs, strategies

mistakes = {
    DOWN: "v41",
    TIES: "v41_fp4",
    "FP4 quotients by a product with 1/scale": "v41_fp4",
    "minus zero loses its sign": "v41_fp4",
    "the floor on the scale, whatever is asked for": "v41",
    "NaN and infinities taken for numbers": "v41",
}
plain = normal(1024, DIMS).bfloat16()
figure, (left, right) = plt.subplots(1, 2, figsize=(13.5, 4.2), layout="constrained", sharey=True)
NO_RECORD = 0.03  # where 0 is drawn
for place, (fault, layout) in enumerate(mistakes.items()):
    hard = kv_inputs.kv_rows({"classes": tuple(strategies.VALUE_CLASSES), "seed": 1}, KV_LAYOUTS[layout], 1024)
    good, bad = kv_cache.quantize_kv(plain, layout=layout), wrong[fault](plain, layout=layout)
    pages = torch.zeros(1024, KV_LAYOUTS[layout].page_bytes(1), dtype=torch.uint8)
    loss = []
    for records in (good, bad):
        kept = kv_cache.store_kv(records, pages, torch.arange(1024), layout=layout, page_size=1)
        back = kv_cache.load_kv(kept, torch.arange(1024), layout=layout, page_size=1)
        loss.append(100 * float((back.double() - plain.double()).norm() / plain.double().norm()))
    left.plot(loss[0], place, "o", color=GREY, markersize=11, fillstyle="none", label="right" if place == 0 else None)
    left.plot(loss[1], place, "o", color=BLUE, markersize=5, label="wrong" if place == 0 else None)
    shares = [
        float((bad != good).any(1).double().mean()),
        float((wrong[fault](hard, layout=layout) != kv_cache.quantize_kv(hard, layout=layout)).any(1).double().mean()),
    ]
    assert (abs(loss[1] - loss[0]) > 1e-6) == (fault == DOWN)
    assert (shares[0] == 0) == (place >= 4)
    assert shares[1] > 0
    for share, colour, marker, shift, name in zip(
        shares, (BLUE, ORANGE), "os", (-0.13, 0.13), ("normal numbers", "rows of the contract"), strict=True
    ):
        value = max(NO_RECORD, 100 * share)
        right.hlines(place + shift, NO_RECORD / 2, value, color=colour, linewidth=1.5, alpha=0.6)
        right.plot(value, place + shift, marker, color=colour, markersize=9, label=name if place == 0 else None)
left.set_yticks(range(len(mistakes)), mistakes)
left.set(xlabel="|read back − stored| / |stored| (%)", title="What a round trip sees", xlim=(0, 18), ylim=(len(mistakes) - 0.5, -1.2))
left.legend(loc="upper right", fontsize=9, ncols=2)
right.set(xscale="log", xlim=(NO_RECORD / 2, 200), xlabel="records with other bytes (%)", title="What it does not see")
right.set_xticks([NO_RECORD, 0.1, 1, 10, 100], ["0", "0.1", "1", "10", "100"])
right.minorticks_off()
_ = right.legend(loc="upper right", fontsize=9, ncols=2)
