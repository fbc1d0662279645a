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
# # Four streams in the place of one
#
# In most transformers a sublayer adds its output to the residual. DeepSeek-V4 has four residuals, the *streams* $X_0 \dots X_3$. A sublayer
# reads one vector, a weighted sum of them; its output goes to all four with weights; and the streams themselves are mixed. All weights
# come from the streams of the token at hand:
#
# $$ \rho = \frac{1}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}, \quad m = \rho\, F x, \quad
# p = \sigma(s_0 m_p + b_p) + \epsilon, \quad q = 2\,\sigma(s_1 m_q + b_q), \quad M = \mathrm{Sinkhorn}(s_2 m_M + b_M) $$
# $$ y = f\Big(\mathrm{norm}\Big(\sum_k p_k X_k\Big)\Big) \qquad\qquad X'_i = \sum_j M_{ji} X_j + q_i\, y $$
#
# for a sublayer $f$ (attention or experts), with $x$ the four streams one after another. In code $p$ is `pre`, $q$ is `post`, $M$ is
# `comb`.
#
# Each part goes the same way: equation, picture, reference, fast, parity. It runs on a CPU in under a minute.

# %%
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import FancyArrowPatch, Rectangle

from dsv4 import fast
from dsv4.configs import V4_FLASH
from dsv4.reference import hyper_connections as streams_reference
from dsv4.reference.norms import rms_norm
from dsv4.reference.numerics import numerics

BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#666666"
STREAM_COLOURS = [BLUE, GREEN, PINK, YELLOW]
plt.rcParams.update({"figure.dpi": 110, "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
source = torch.Generator().manual_seed(4)
C, EPS = 4, 1e-6


def normal(*shape):
    return torch.randn(shape, generator=source)


# %% [markdown]
# ## 1. Sinkhorn
#
# $M$ says how much of each old stream (row) goes into each new one (column). Its entries are positive; rows and columns shall add up to 1,
# so that no stream dies and none explodes. A softmax makes the rows right. Then columns and rows are divided by their sums, by turns:
#
# $$ M \leftarrow \frac{M_{ab}}{\sum_a M_{ab} + \epsilon} \qquad M \leftarrow \frac{M_{ab}}{\sum_b M_{ab} + \epsilon} \qquad \dots $$
#
# An *iteration* is one division by columns; there are twenty, with nineteen of rows between them. Left: the same 4×4 logits after 0, 1, 5
# and 20 iterations, with the error of each row's sum beside it, of each column's below. Right: the largest of these errors. Columns are
# right from the first iteration on, because theirs is always the last word: $\epsilon$ alone is missing, $10^{-6}$. Rows pay for it. Logits
# four times as large leave them wrong by nearly 1 % after twenty iterations.

# %% tags=["image:sinkhorn"]
LOGITS = torch.tensor([[2.0, 0.0, -1.0, 0.5], [0.0, 1.0, 0.3, -2.0], [-0.7, 0.2, 1.5, 0.1], [0.4, -1.2, 0.6, 0.9]])


def mix(logits, iterations=20, eps=EPS):
    """comb of logits [tokens, 4, 4]; 0 iterations are the softmax alone."""
    if iterations == 0:
        return logits.softmax(2) + eps
    mixes = torch.cat([torch.zeros(len(logits), 2 * C), logits.flatten(1)], 1)
    return streams_reference.split_mix(mixes, torch.ones(3), torch.zeros(len(mixes[0])), iterations=iterations, eps=eps).comb


def off(comb, dim):
    """How far the sums over a dimension are from 1: 2 for rows, 1 for columns."""
    return comb.double().sum(dim) - 1


def label(error):
    """Short: a digit and a power, or 0."""
    mantissa, power = f"{error:+.0e}".split("e")
    return f"{mantissa.replace('-', '−')}·10$^{{{int(power)}}}$".replace("-", "−")


figure = plt.figure(figsize=(14, 6), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=(1.12, 1))
for axes, iterations in zip(left.subplots(2, 2).flat, (0, 1, 5, 20), strict=True):
    comb = mix(LOGITS[None], iterations)
    axes.imshow(comb[0], cmap="Blues", vmin=0, vmax=0.8)
    for old, new in np.ndindex(C, C):
        value = float(comb[0, old, new])
        axes.text(new, old, f"{value:.3f}", ha="center", va="center", fontsize=10, color="white" if value > 0.45 else "black")
    for place in range(C):
        axes.text(3.6, place, label(float(off(comb, 2)[0, place])), va="center", fontsize=9, color=ORANGE)
        axes.text(place, 3.65, label(float(off(comb, 1)[0, place])), ha="center", va="top", fontsize=9, color=GREEN)
    axes.set_title(f"{iterations} iteration{'s' * (iterations != 1)}", fontsize=12, x=0.385)
    axes.set(xticks=[], yticks=range(C), xlim=(-0.5, 4.7), ylim=(4.1, -0.5))
    axes.set_yticklabels([f"old {place}" for place in range(C)], fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
axes = right.subplots()
count = range(41)
for factor, colour in ((1, BLUE), (2, PINK), (4, ORANGE)):
    combs = [mix(factor * LOGITS[None], iterations) for iterations in count]
    axes.plot(count, [float(off(comb, 2).abs().max()) for comb in combs], color=colour, linewidth=2, label=f"rows, logits × {factor}")
    columns = [float(off(comb, 1).abs().max()) for comb in combs]
    axes.plot(count, columns, color=colour, linewidth=1.3, linestyle=":")
    assert max(columns[1:]) < 3e-6
assert 0.009 < float(off(mix(4 * LOGITS[None]), 2).abs().max()) < 0.01
axes.plot([], [], ":", color=GREY, label="columns")
axes.axvline(20, color=GREY, linewidth=1)
axes.text(20.5, 1.4, "the models stop here", color=GREY, va="center")
axes.set(xlabel="iterations", ylabel="largest |sum − 1|", yscale="log", ylim=(5e-7, 3), xlim=(-0.5, 40))
axes.set_title("How far sums are from 1")
_ = axes.legend(loc="upper right", bbox_to_anchor=(1, 0.9))
# %% [markdown]
# How much is left in the rows depends on how far apart the logits are. Left: random logits after twenty iterations. Up to a standard
# deviation of 1 nearly all mixes have converged; at 4 half of them miss by 0.2 % or more. A test that wants rows of 1 has to draw small
# logits, and a test that draws large ones has to compute the row sums.
#
# Right: a mix that cannot converge in any useful time. No stream may go to one before it: logits of −30 below the diagonal, 0 elsewhere.
# The only doubly stochastic matrix of that shape is the identity, and it is approached like $1/k$. The $\epsilon$ is not negligible here:
# added to the softmax it fills the zeros, and then convergence takes off again.
#
# The other extreme: every old stream wants to go to stream 0. Columns have to add up to 1, so all of them get a quarter of everything. No
# trace is left of the logits.

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.3), layout="constrained", width_ratios=(1.2, 1.2, 1))
sizes = np.geomspace(0.25, 16, 13)
rows_off = torch.stack([off(mix(float(size) * normal(1000, C, C)), 2).abs().amax(1) for size in sizes])
for quantile, colour in ((0.99, ORANGE), (0.9, PINK), (0.5, BLUE)):
    left.plot(sizes, rows_off.quantile(quantile, 1), "o-", color=colour, label=f"{100 * quantile:.0f} % of the mixes are below")
assert float((rows_off[sizes <= 1] < 5e-6).double().mean()) > 0.99
assert float(rows_off[list(sizes).index(4.0)].median()) > 0.002
left.set(xlabel="standard deviation of the logits", ylabel="largest |row sum − 1|", yscale="log", xscale="log", ylim=(5e-7, 8))
left.set_xticks([0.25, 1, 4, 16], ["0.25", "1", "4", "16"])
left.minorticks_off()
left.set_title("Rows after 20 iterations")
left.legend(loc="upper left", fontsize=9)
triangle = -30 * torch.ones(1, C, C).tril(-1)
steps = [1, 2, 3, 5, 8, 12, 20, 32, 50, 80, 125, 200, 300, 500]
for eps, colour in ((EPS, BLUE), (0.0, ORANGE)):
    middle.plot(steps, [float(off(mix(triangle, k, eps), 2).abs().max()) for k in steps], "o-", color=colour, label=f"epsilon {eps:g}")
middle.plot(steps, [1.3 / k for k in steps], ":", color=GREY, label="1.3 / iterations")
middle.axvline(20, color=GREY, linewidth=1)
middle.set(xlabel="iterations", ylabel="largest |row sum − 1|", xscale="log", yscale="log", title="No stream to an earlier one")
middle.legend(loc="lower left")
everything_to_0 = torch.where(torch.arange(C) == 0, 0.0, -100.0).expand(1, C, C)
assert float((mix(everything_to_0) - 0.25).abs().max()) <= 1e-6
assert float((mix(triangle, 500, 0.0)[0] - torch.eye(C)).abs().max()) < 5e-3
pairs = {"logits": everything_to_0[0], "mix": mix(everything_to_0)[0]}
for shift, (name, matrix) in zip((0, 5.2), pairs.items(), strict=True):
    for old, new in np.ndindex(C, C):
        value = float(matrix[old, new])
        shade = plt.cm.Blues(0.25 if name == "mix" else 0.7 if value == 0 else 0.04)
        right.add_patch(Rectangle((shift + new, old), 0.96, 0.96, color=shade))
        right.text(
            shift + new + 0.48, old + 0.48, f"{value:.2f}" if name == "mix" else f"{value:.0f}", ha="center", va="center", fontsize=9
        )
    right.text(shift + 2, -0.25, name, ha="center", fontsize=12)
right.set(xlim=(-0.1, 9.4), ylim=(4.4, -1), aspect="equal")
right.axis("off")
_ = right.set_title("All to stream 0")
# %% [markdown]
# ## 2. Across a boundary
#
# Between two sublayers lies one function, `boundary`: the output $y$ goes into the streams, and the next sublayer's input comes out of
# them. Here is one token with 48 numbers a stream. The statistics take all streams at once, $C \cdot D$ numbers, into one root mean square
# and 24 dot products; the streams themselves are not normalised, the vector that the sublayer reads is.

# %%
D = 48


def parameters(hidden, streams=C):
    """fn, scale, base of a sublayer."""
    mixes = streams * (2 + streams)
    return normal(mixes, streams * hidden) * (streams * hidden) ** -0.5, torch.tensor([1.0, 1.0, 1.5]), 0.5 * normal(mixes)


bumps = torch.stack([torch.sin(torch.arange(D) / (2 + stream)) * (1 + 0.3 * stream) for stream in range(C)])[None]
old = (bumps + 0.15 * normal(1, C, D)).bfloat16()
y, weight = (1.2 * normal(1, D)).bfloat16(), torch.ones(D).bfloat16()
before, after = parameters(D), parameters(D)
entered = streams_reference.split_mix(streams_reference.mix_statistics(old, before[0], eps=1e-6), *before[1:])
crossing = partial(streams_reference.boundary, y, old, entered.post, entered.comb, *after, weight, norm_eps=1e-6, rms_eps=1e-6)
v4, v41 = crossing(), crossing(carried_pre=entered.pre)
assert torch.equal(v4.streams, v41.streams)  # only the collapse differs
assert torch.equal(v4.pre, v41.pre)
collapsed = torch.cat([streams_reference.collapse(v4.streams, pre) for pre in (v4.pre, entered.pre)])
assert torch.equal(rms_norm(collapsed[:1], weight, eps=1e-6), v4.normed)
figure, grid = plt.subplots(
    5, 2, figsize=(13, 7.4), layout="constrained", width_ratios=(1, 2.9), height_ratios=(4, 1.15, 4, 2.15, 2.15)
)  # fmt: skip
stream_names = [f"stream {stream}" for stream in range(C)]
shown = [
    (old[0], "X, the streams that entered the sublayer", stream_names),
    (y, "y, its output", ["y"]),
    (v4.streams[0], "X' = M$^T$ X + q y, rounded to bf16: what all that follows reads", stream_names),
    (collapsed, "Collapsed with the new p, and with the one handed on", ["V4", "V4.1"]),
    (torch.cat([v4.normed, v41.normed]), "RMSNorm: what the next sublayer reads", ["V4", "V4.1"]),
]
for axes, (rows, title, names) in zip(grid[:, 1], shown, strict=True):
    axes.imshow(rows.float(), cmap="RdBu_r", vmin=-3, vmax=3, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xticks([])
    axes.set_yticks(range(len(names)), names, fontsize=9)


def numbers(axes, matrix, names, columns, title):
    axes.imshow(matrix, cmap="Blues", vmin=0, vmax=2, aspect="auto")
    for row, column in np.ndindex(*matrix.shape):
        axes.text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center", fontsize=9)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_xticks(range(len(columns)), columns, fontsize=9)
    axes.xaxis.tick_top()
    axes.set_xlabel(title, fontsize=10)


old_names = [f"X{stream}" for stream in range(C)]
new_names = [f"X'{stream}" for stream in range(C)]
into = torch.cat([entered.comb[0].T, entered.post[0, :, None]], 1)
numbers(grid[2, 0], into, new_names, [*old_names, "y"], "M$^T$ and q: what goes into each new stream")
numbers(grid[3, 0], torch.cat([v4.pre, entered.pre]), ["V4", "V4.1"], new_names, "p: what the collapse weighs")
for axes in grid.flat:
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
for row in (0, 1, 4):
    grid[row, 0].axis("off")
# %% [markdown]
# **Who reads which p.** V4 collapses with the $p$ that it has just computed. V4.1 hands it on: a sublayer computes $p, q, M$ from the
# streams that it finds, uses its own $q$ and $M$, and reads with the $p$ of the sublayer before. The first one reads stream 0 alone,
# $p = (1, 0, 0, 0)$, without $\epsilon$. So in V4.1 the collapse does not wait for the statistics. After the last sublayer V4 computes four
# more mixes for its head (`head_collapse`); V4.1 uses the last $p$.
#
# The arrows of $p$ are measured. $s_0$, which only $p$ depends on, is changed in one sublayer (row); the matrix counts how many numbers of
# a sublayer's input (column) change. Lines are drawn where that holds with all $q$ set to 0, so that nothing spreads through the streams.

# %% tags=["image:boundary"]
SUBLAYERS = ["attention 0", "experts 0", "attention 1", "experts 1"]
HIDDEN, TOKENS = 32, 8
start = normal(TOKENS, 1, HIDDEN).expand(-1, C, -1).bfloat16()  # the embedding, four times
layers = [parameters(HIDDEN) for _ in SUBLAYERS]
matrices = [normal(HIDDEN, HIDDEN) / HIDDEN**0.5 for _ in SUBLAYERS]
even = torch.ones(HIDDEN).bfloat16()


def inputs(hand_on, changed=None, silent=False):
    """What each sublayer reads. `changed`: the one whose s_0 is another; `silent`: all post weights are 0."""
    sets = []
    for number, (fn, scale, base) in enumerate(layers):
        base = base.clone()
        base[C : 2 * C] -= 1000.0 * silent  # of sigmoids
        sets.append((fn, scale + (number == changed) * torch.tensor([0.5, 0.0, 0.0]), base))
    streams, given = start, streams_reference.identity_pre(TOKENS, C)
    mix_now = streams_reference.split_mix(streams_reference.mix_statistics(streams, sets[0][0], eps=1e-6), *sets[0][1:])
    read = [rms_norm(streams_reference.collapse(streams, given if hand_on else mix_now.pre), even, eps=1e-6)]
    for matrix, following in zip(matrices, sets[1:], strict=False):
        output = (read[-1].float() @ matrix).bfloat16()
        carried = mix_now.pre if hand_on else None
        step = streams_reference.boundary(
            output, streams, mix_now.post, mix_now.comb, *following, even, norm_eps=1e-6, rms_eps=1e-6, carried_pre=carried
        )
        streams, mix_now = step.streams, step
        read.append(step.normed)
    return torch.stack(read)


def reach(hand_on, silent):
    """Share of each sublayer's input that changes with each one's s_0: [changed, read]."""
    plain = inputs(hand_on, silent=silent)
    return torch.stack(
        [(inputs(hand_on, number, silent) != plain).double().mean((1, 2)) for number in range(len(SUBLAYERS))]
    )  # fmt: skip


def box(axes, x, y, width, height, text, colour, **more):
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", zorder=3))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=10, zorder=4, **more)


def arrow(axes, tail, head, colour, bend=0.0, **more):
    style = {"arrowstyle": "-|>", "mutation_scale": 13, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0, "zorder": 2, **more}
    axes.add_patch(FancyArrowPatch(tail, head, connectionstyle=f"arc3,rad={bend}", color=colour, **style))


figure, grid = plt.subplots(2, 2, figsize=(15, 7.6), layout="constrained", width_ratios=(3.7, 1))
for (axes, measured), (name, hand_on) in zip(grid, {"V4": False, "V4.1": True}.items(), strict=True):
    for stream, colour in enumerate(STREAM_COLOURS):
        axes.plot([-0.9, 16.1], [3.2 + 0.16 * stream] * 2, color=colour, linewidth=2, zorder=1)
    direct = reach(hand_on, silent=True) > 0
    assert torch.equal(direct, torch.diag(torch.ones(4 - hand_on), int(hand_on)) > 0)
    for number, sublayer in enumerate(SUBLAYERS):
        x = 4 * number
        arrow(axes, (x + 0.25, 3.68), (x + 0.25, 4.6), GREY)
        box(axes, x - 0.25, 4.6, 1.0, 0.75, "p, q, M", "#dddddd")
        arrow(axes, (x + 1.2, 3.2), (x + 1.2, 2.35), GREY)
        box(axes, x + 0.85, 1.75, 0.7, 0.6, "Σ", SKY)
        arrow(axes, (x + 1.2, 1.75), (x + 1.2, 1.05), GREY)
        box(axes, x + 0.5, 0.3, 1.9, 0.75, sublayer, YELLOW)
        arrow(axes, (x + 2.4, 0.68), (x + 3.0, 3.05), GREY, 0.35)
        box(axes, x + 2.65, 3.05, 0.7, 0.8, "X'", "#dddddd")
        arrow(axes, (x + 0.75, 5.1), (x + 3.0, 3.85), GREEN, -0.3)
        for reader in torch.nonzero(direct[number]).flatten().tolist():
            arrow(axes, (x + 0.6, 4.6), (4 * reader + 1.08, 2.35), ORANGE, 0.0 if reader == number else 0.2, linewidth=2.4)
    if hand_on:
        arrow(axes, (0.1, 2.05), (0.85, 2.05), ORANGE, linewidth=2.4)
        axes.text(0.0, 2.05, "(1, 0, 0, 0)", ha="right", va="center", color=ORANGE)
        arrow(axes, (12.6, 4.6), (16.1, 2.5), ORANGE, 0.2, linewidth=2.4)
        axes.text(16.2, 2.5, "head", va="center", color=ORANGE)
    axes.text(-1.0, 3.45, "streams", ha="right", va="center")
    axes.text(1.7, 5.35, "q, M", color=GREEN)
    axes.text(1.2, 4.15, "p", color=ORANGE, fontsize=13, weight="bold")
    axes.set(xlim=(-2.6, 17.2), ylim=(0.1, 5.7))
    axes.set_title(f"{name}: reads with the p of {'the sublayer before' if hand_on else 'its own streams'}", loc="left")
    axes.axis("off")
    shares = reach(hand_on, silent=False)
    measured.imshow(shares, cmap="Oranges", vmin=0, vmax=1.6)
    for row, column in np.ndindex(4, 4):
        measured.text(column, row, f"{100 * shares[row, column]:.0f} %", ha="center", va="center", fontsize=10)
    short = [name.replace("attention", "att").replace("experts", "exp") for name in SUBLAYERS]
    measured.set_xticks(range(4), short, fontsize=9)
    measured.set_yticks(range(4), short, fontsize=9)
    measured.set(xlabel="input of", ylabel="s$_0$ of")
    measured.set_title("Numbers that change", fontsize=11)
    measured.tick_params(length=0)
    measured.spines[:].set_visible(False)
# %% [markdown]
# ## 3. Which way M points
#
# $M$ is indexed [old, new]: stream $i$ gets column $i$. Ports have used rows. Left: with a permutation nothing is easier to see.
#
# Right: how far the streams are off when $M$ is transposed. A doubly stochastic matrix stays one, so no sum gives it away. With logits
# of 1/64 $M$ is so nearly 1/4 everywhere that a tolerance of 2 % passes it. And where all four streams are equal, as they are behind the
# embedding, 2 % passes it whatever the logits: what is left is the error of the row sums, and nothing where Sinkhorn has converged. A test
# needs streams that differ and an $M$ that is far from symmetric.

# %%
cycle = torch.eye(C).roll(1, 1)  # old 0 to new 1, 1 to 2, 2 to 3, 3 to 0
four = torch.arange(1.0, 5.0)[None, :, None].bfloat16()  # [1, 4, 1]
nothing = torch.zeros(1, C)
figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained", width_ratios=(1, 1.3))
ways = {"M: [4, 1, 2, 3]": (cycle, BLUE, 0.0), "transposed: [2, 3, 4, 1]": (cycle.T, ORANGE, 5.4)}
for name, (matrix, colour, shift) in ways.items():
    result = streams_reference.expand(torch.zeros(1, 1).bfloat16(), four, nothing, matrix[None].contiguous())[0, :, 0]
    assert name.endswith(str(result.int().tolist()))
    for stream in range(C):
        left.add_patch(Rectangle((shift + stream, 2), 0.8, 0.6, facecolor=plt.cm.Blues(0.15 + 0.12 * stream)))
        left.text(shift + stream + 0.4, 2.3, stream + 1, ha="center", va="center")
        left.add_patch(Rectangle((shift + stream, 0), 0.8, 0.6, facecolor=plt.cm.Blues(0.03 + 0.12 * int(result[stream]))))
        left.text(shift + stream + 0.4, 0.3, int(result[stream]), ha="center", va="center")
        arrow(left, (shift + int(result[stream]) - 0.6, 1.96), (shift + stream + 0.4, 0.64), colour)
    left.text(shift + 1.9, 2.95, name, ha="center", color=colour)
left.text(-0.3, 2.3, "old", ha="right", va="center")
left.text(-0.3, 0.3, "new", ha="right", va="center")
left.set(xlim=(-1.4, 9.4), ylim=(-0.3, 3.3))
left.axis("off")
different, equal = normal(500, C, 64).bfloat16(), normal(500, 1, 64).expand(-1, C, -1).bfloat16()
silence = torch.zeros(500, 64).bfloat16(), torch.zeros(500, C)
sizes = np.exp2(np.arange(-6, 3.5, 0.5))
curves = {"four different streams": (different, BLUE), "four equal streams": (equal, GREEN)}
for name, (x, colour) in curves.items():
    shares = []
    for size in sizes:
        comb = mix(float(size) * normal(500, C, C))
        good, bad = (streams_reference.expand(silence[0], x, silence[1], m).double() for m in (comb, comb.mT.contiguous()))
        shares.append(float((bad - good).norm() / good.norm()))
    right.plot(sizes, np.maximum(shares, 1e-5), "o-", color=colour, label=name)
    if x is equal:
        assert max(shares) < 0.02
        assert max(share for share, size in zip(shares, sizes, strict=True) if size <= 1) < 1e-5
    else:
        assert shares[0] < 0.02 < shares[2]
right.axhline(0.02, color="black", linestyle=":", linewidth=1.2)
right.text(8, 0.023, "2 %", ha="right")
right.set(xlabel="standard deviation of the logits of M", ylabel="|wrong − right| / |right|", xscale="log", yscale="log", ylim=(7e-6, 4))
right.set_xticks([1 / 64, 1 / 16, 1 / 4, 1, 4], ["1/64", "1/16", "1/4", "1", "4"])
right.set_yticks([1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1], ["0", "0.01 %", "0.1 %", "1 %", "10 %", "100 %"])
right.minorticks_off()
right.set_title("The error of a transposed M")
_ = right.legend(loc="center left", bbox_to_anchor=(0.02, 0.35))
# %% [markdown]
# ## 4. Sums over the streams
#
# Added over all new streams, the expansion gives
#
# $$ \sum_i X'_i = \sum_j r_j X_j + y \sum_i q_i, \qquad r_j = \sum_i M_{ji} $$
#
# Where rows add up to 1, mixing keeps the sum of the streams, in every layer. A kernel that breaks this may do no harm that shows in one
# layer, and ruin 43: one report has a spread that grew from 0.07 to 376. Left: 86 expansions, two a layer, with new logits and outputs each
# time, and how far the sum is from the first sum and all $y \sum_i q_i$ since. Rounding to bf16 costs half a percent in the end. A single
# iteration in the place of twenty costs one percent, which nobody would notice; and the transposed $M$ keeps the sum better than the right
# one where logits are large, because its rows are the right one's columns. Only without any division the streams explode, and pass the
# largest bf16 number before the last layer.
#
# Right: the same runs, each expansion held to the equation above, with the row sums of the right $M$. The unit is what the roundings of the
# new streams to bf16 may add up to. Now large logits are no exception, and each mistake shows in its first layer.

# %%
LAYERS = V4_FLASH.num_hidden_layers
ROWS, HIDDEN = 8, 64


def within(limit):
    return limit * (2 * torch.rand(ROWS, C, C, generator=source) - 1)


runs = {
    "logits within ±1": (1.0, mix, BLUE, "-"),
    "logits within ±8": (8.0, mix, GREEN, "-"),
    "±1, one iteration": (1.0, partial(mix, iterations=1), PINK, "-"),
    "±8, transposed": (8.0, lambda logits: mix(logits).mT.contiguous(), YELLOW, "-"),
    "±1, not divided": (1.0, torch.exp, ORANGE, "-"),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
first = normal(ROWS, C, HIDDEN).bfloat16()
for name, (limit, comb_of, colour, line) in runs.items():
    x, wanted, drifts, shares = first, first.double().sum(1), [], []
    for _ in range(2 * LAYERS):
        logits, output, post = within(limit), normal(ROWS, HIDDEN).bfloat16(), 2 * normal(ROWS, C).sigmoid()
        new = streams_reference.expand(output, x, post, comb_of(logits)).double()
        added = output.double() * post.double().sum(1, keepdim=True)
        if not new.isfinite().all():
            break
        error = (new.sum(1) - (mix(logits).double().sum(2)[:, :, None] * x.double()).sum(1) - added).abs()
        shares.append(float((error / (2.0**-8 * new.abs()).sum(1)).max()))  # 2^-8: half a unit in the last place, at most
        x, wanted = new.bfloat16(), wanted + added
        drifts.append(float((new.sum(1) - wanted).norm() / wanted.norm()))
    places = np.arange(1, len(drifts) + 1) / 2
    left.plot(places, drifts, line, color=colour, linewidth=2, label=name)
    right.plot(places, shares, line, color=colour, linewidth=1.6)
    assert max(shares) <= 1 if comb_of is mix else shares[0] > 1
    assert drifts[-1] < 0.02 or comb_of is torch.exp
    assert (len(drifts) < 2 * LAYERS) == (comb_of is torch.exp)  # beyond bf16's largest number
left.set(xlabel="layers", ylabel="|sum − expected| / |expected|", yscale="log", ylim=(1e-4, 1e4), title="What 43 layers show")
left.legend(loc="upper left", bbox_to_anchor=(0.12, 1), fontsize=9)
right.axhline(1, color="black", linestyle=":", linewidth=1.2)
right.text(43, 1.15, "allowed", ha="right", fontsize=9)
_ = right.set(xlabel="layers", ylabel="error / what rounding allows", yscale="log", title="What the equation shows in each")
# %% [markdown]
# ## 5. How exact the statistics are
#
# The 24 dot products have 16 384 terms (V4-Flash), and $F$ is fp32. Tensor cores multiply TF32: of the 23 bits of a significand they keep
# ten and cut off 13. *Compensated* is two such products, one with the upper bits of $F$ and one with the rest, cut off in turn. Left: the
# bits of one weight, and who takes them. The rest begins at its first bit that is set, so the second product takes at least eleven bits
# more.
#
# Middle: errors of mixes of random streams. TF32 is off by 4 parts in 10 000, compensated by 1 in 10 million, about three times
# what it costs to round to fp32. Right: the errors of TF32 are no noise around 0. Cutting off makes every weight smaller, so a mix is too
# small by a fixed share, on average.

# %% tags=["image:tf32_statistics"]
HIDDEN, TOKENS = V4_FLASH.hidden_size, 192
x, fn = normal(TOKENS, C, HIDDEN).bfloat16(), normal(24, C * HIDDEN) / (C * HIDDEN) ** 0.5
with numerics("unrounded"):
    truth = streams_reference.mix_statistics(x, fn, eps=1e-6)
mixes = {name: streams_reference.mix_statistics(x, fn, eps=1e-6, precision=name) for name in ("exact", "tf32_compensated", "tf32")}
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15.5, 4.3), layout="constrained", width_ratios=(1.25, 1, 1))
weight = torch.tensor([0.7390851332])
high = (weight.view(torch.int32) & ~0x1FFF).view(torch.float32)
rest = weight - high
low = (rest.view(torch.int32) & ~0x1FFF).view(torch.float32)
parts = {"F": (weight, GREY), "TF32": (high, ORANGE), "rest": (rest, GREY), "rest, cut off": (low, BLUE)}
for row, (name, (value, colour)) in enumerate(parts.items()):
    digits = int(value.double() * 2**26)  # of 2^-1 down to 2^-26
    for place in range(26):
        bit = digits >> (25 - place) & 1
        left.add_patch(Rectangle((place, -1.5 * row), 0.92, 1, facecolor=colour if bit else "#ececec"))
    left.text(-1, -1.5 * row + 0.5, name, ha="right", va="center", color=colour)
for place, text in ((0, "2$^{-1}$"), (10, "2$^{-11}$"), (23, "2$^{-24}$")):
    left.text(place + 0.5, 1.2, text, ha="center", fontsize=9)
assert torch.equal(high + low + (rest - low), weight)
left.plot([11, 11], [-5.2, 1.1], color="black", linewidth=0.8, linestyle=":")
left.set(xlim=(-8.5, 26.5), ylim=(-5.4, 2))
left.set_title("The bits of a weight (full: 1)")
left.axis("off")
size = truth.square().mean().sqrt()
bins = np.geomspace(1e-12, 1e-2, 101)
colours = {"exact": (GREEN, "exact, rounded to fp32"), "tf32_compensated": (BLUE, "TF32 compensated"), "tf32": (ORANGE, "TF32")}
errors = {name: (result.double() - truth) / size for name, result in mixes.items()}
for name, (colour, words) in colours.items():
    middle.hist(errors[name].abs().flatten(), bins, color=colour, alpha=0.6 if name != "exact" else 1.0, label=words,
                histtype="step" if name == "exact" else "stepfilled", linewidth=1.8)  # fmt: skip
middle.set(xlabel="|error| / size of a mix", ylabel="mixes", xscale="log", xlim=(1e-10, 2e-3), title="Errors of 4 608 mixes")
middle.set_ylim(0, 720)
middle.legend(loc="upper left", fontsize=9)
sizes, off_by = (truth / size).flatten(), 1e4 * errors["tf32"].flatten()
slope = float((sizes * off_by).sum() / sizes.square().sum())
right.plot(sizes, off_by, ".", color=ORANGE, markersize=3, alpha=0.5)
right.plot([-3.5, 3.5], [-3.5 * slope, 3.5 * slope], color="black", linewidth=1.5, label=f"−{-slope:.1f} · 10$^{{-4}}$ of the mix")
right.set(xlabel="mix / size of a mix", ylabel="error of TF32 (10$^{-4}$)", title="TF32 cuts off, so mixes are too small")
right.legend(loc="upper right")
spread = {name: float(error.square().mean().sqrt()) for name, error in errors.items()}
assert 3e-4 < -slope * 1e-4 < 4e-4 < spread["tf32"] < 5e-4
assert 2 < spread["tf32_compensated"] / spread["exact"] < 4

# %% [markdown]
# ## 6. Fast
#
# `dsv4.fast.hyper_connections` has the same functions; `boundary` is three launches on a GPU. `collapse` and `expand` add in a stated order
# and have the reference's bits everywhere. Statistics and Sinkhorn are sums and exponentials that everybody computes in their own order,
# so there the claim is a bound, derived from the number of operations. On a CPU bodies are compiled by default; here they run as they are,
# `impl="eager"`, but for one.

# %%
from dsv4.fast import hyper_connections as fast_streams
from dsv4.parity.compare import compare_bytes

print(fast.explain("hyper_connections.boundary", "cpu"))
HIDDEN, ROWS = 512, 40
old, y = normal(ROWS, C, HIDDEN).bfloat16(), normal(ROWS, HIDDEN).bfloat16()
weight = (1 + 0.1 * normal(HIDDEN)).bfloat16()
before, after = parameters(HIDDEN), parameters(HIDDEN)
entered = streams_reference.split_mix(streams_reference.mix_statistics(old, before[0], eps=1e-6), *before[1:])
arguments = (y, old, entered.post, entered.comb, *after, weight)
for name, carried in (("V4", None), ("V4.1", entered.pre)):
    options = {"norm_eps": 1e-6, "rms_eps": 1e-6, "carried_pre": carried}
    expected, actual = streams_reference.boundary(*arguments, **options), fast_streams.boundary(*arguments, **options, impl="eager")
    for field in ("streams", "pre", "post", "comb", "normed"):
        one, other = getattr(expected, field), getattr(actual, field)
        same = float((one == other).double().mean())
        print(f"{name:4} {field:8} equal {100 * same:6.2f} %, largest difference {float((one.double() - other.double()).abs().max()):.1e}")
compiled = fast_streams.expand(y, old, entered.post, entered.comb)
print("compiled expand", compare_bytes(streams_reference.expand(y, old, entered.post, entered.comb), compiled).ok)

# %% [markdown]
# ## 7. Parity
#
# The contract of `expand` brings its own inputs: streams that cancel, ties, permutations, mixes that differ from their transpose. Three
# candidates are held to it: the fast path, the transposed $M$ of a port, and one that rounds $q$ and $M$ to bf16 first, as another library
# does.

# %%
from dsv4.parity import contracts, engine, report
from dsv4.parity.candidates import Candidate
from dsv4.parity.mutants import hyper_connections as mistakes

contract = contracts.find("hyper_connections.expand")
wrong = {mutant.id: mutant for mutant in mistakes.MUTANTS}
candidates = [
    Candidate("fast", partial(fast_streams.expand, impl="eager"), "fast"),
    Candidate("transposed", wrong["expand-transposed"].call, "transposed"),
    Candidate("q and M in bf16", wrong["expand-bf16"].call, "q and M in bf16"),
]
outcomes = [engine.check(contract, domain, one, torch.device("cpu")) for one in candidates for domain in contract.domains]
print(report.plain(report.table(report.as_data(outcome) for outcome in outcomes)))
assert {outcome.candidate for outcome in outcomes if outcome.result == "failed"} == {"transposed", "q and M in bf16"}

# %% [markdown]
# The least case that shows the transposed one:

# %%
messages = [outcome.message for outcome in outcomes if outcome.candidate == "transposed" and outcome.message]
print(min(messages, key=lambda message: ("inputs" not in message, len(message))))
