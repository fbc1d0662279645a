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
# # What a linear layer multiplies
#
# The dense weights of V4 and V4.1 are FP8: E4M3 codes $w$, and a power of two $S$ for each block of $B \times B$ of them. The inputs are
# quantised on the way, with a scale $s$ for each token and $B$ numbers, so codes are multiplied with codes:
#
# $$ y_{tn} = \sum_b s_{tb}\, S_{\lfloor n/B \rfloor b} \Big( \sum_{k \in b} a_{tk}\, w_{nk} \Big) \qquad\qquad
# B = 128 \ (\text{V4}), \quad 32 \ (\text{V4.1}) $$
#
# Every product of two codes is exact in fp32. This notebook is about the sums: what a tensor core that keeps 14 bits makes of them, why
# blocks are added outside of it, and who notices if they are not. Then about the scales: what is left of one without its mantissa, and
# where each lies in the two layouts that products of *pairs* take.
#
# Each part goes the same way: equation, picture, reference, fast, parity. It runs on a CPU in under a minute.

# %%
from functools import partial
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Patch, Rectangle

from dsv4 import fast
from dsv4.fast import linear as fast_linear
from dsv4.parity import linear_bounds
from dsv4.parity.components.scales import whole_columns
from dsv4.parity.mutants import linear as mistakes
from dsv4.reference import linear, norms, quantization, scales
from dsv4.types import Mxfp8Pair, Quantized

BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#666666"
plt.rcParams.update({"figure.dpi": 110, "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
source = torch.Generator().manual_seed(7)


def normal(*shape):
    return torch.randn(shape, generator=source)


def same(one, other):
    """Equal bits."""
    return torch.equal(*(part.contiguous().flatten().view(torch.uint8) for part in (one, other)))


# %% [markdown]
# ## 1. One product
#
# 32 tokens, 1024 inputs, 256 outputs. The reference widens codes and scales, adds up in fp64, and rounds once to fp32 and once to bf16; the
# fast path on a CPU does the same a tile of the weight at a time. What is lost beside that is lost in the codes, about as much on
# either side, and it hardly depends on the block: E4M3 is a floating point, whose precision is relative.

# %%
tokens, outputs, inputs = 32, 256, 1024
x, plain = normal(tokens, inputs).bfloat16(), 0.02 * normal(outputs, inputs)
for block in (128, 32):
    weight = quantization.quantize_fp8_blocks(plain, (block, block))
    y = linear.linear_fp8(x, *weight, block=block)
    assert same(fast_linear.linear_fp8(x, *weight, block=block, impl="eager"), y)
    assert same(linear.linear_fp8(quantization.quantize_fp8(x, block), *weight, block=block), y)  # codes, handed in
    numbers = quantization.dequantize(*weight, (block, block), dtype=torch.float32)
    off = [float((y.double() - x.double() @ one.double().T).norm() / y.double().norm()) for one in (plain, numbers)]
    assert 0.02 < off[1] < off[0] < 0.04
    print(f"blocks of {block:3}: |error| / |y| {off[0]:.3f}, and {off[1]:.3f} of it if the weight is what its codes say")

# %% [markdown]
# ## 2. Fourteen bits
#
# Hopper's FP8 tensor cores add 32 products and their accumulator in one step. By what is published they keep 14 bits of the largest of
# these 33 numbers, and cut the others off below, each towards zero: the larger the sum has become, the more of each product is cut. What
# is drawn here is a model of that, not a measurement of a chip. The bound that parity allows on a GPU is derived from the same model.
#
# Kernels therefore *promote*: every 128 products the accumulator is added to an fp32 number outside and starts at zero again. With FP8
# weights that costs little, for every 128 products there is a scale to multiply with anyway.
#
# Left, sums of positive numbers: after 8192 products a product of mean size is about the last of the 14 bits, and a seventh of the sum is
# gone. Right, numbers of both signs, relative to the results' root mean square. These sums stay small, little is cut, and the codes of the
# inputs cost ten times as much and more: a test with normal inputs sees no difference. Bands hold 98 % of 256 sums.

# %% tags=["image:promotion"]
KEPT, STEP, LONGEST, SUMS = 13, 32, 16384, 256  # bits behind the leading one; products of a step


def in_tensor_core(a, w, *, promoted):
    """fp64 [K/128, sums]: what has been added up after each 128 of the products a w [sums, K]."""
    inside, outside, found = torch.zeros(len(a), dtype=torch.float64), torch.zeros(len(a)), []
    for step, products in enumerate((a * w).unflatten(1, (-1, STEP)).unbind(1), 1):
        addends = torch.cat([products, inside[:, None]], 1)
        quantum = torch.ldexp(torch.ones(len(a)), torch.frexp(addends.abs().amax(1)).exponent - 1 - KEPT).double()[:, None]
        inside = ((addends / quantum).trunc() * quantum).sum(1)
        if step % 4 == 0:
            if promoted:
                outside, inside = outside + inside.float(), torch.zeros_like(inside)
            found.append(outside.double() + inside)
    return torch.stack(found)


def of_codes(numbers):
    """Numbers as codes of one scale stand for them, the largest of normal ones near 448."""
    return (numbers * 100).clamp(-448, 448).to(torch.float8_e4m3fn).double()


def errors(a, w):
    """Signed errors [K/128, sums] with promotion and without, sums and sums of magnitudes."""
    exact, size = ((a * w).cumsum(1)[:, 127::128].T, (a * w).abs().cumsum(1)[:, 127::128].T)
    return [in_tensor_core(a, w, promoted=promoted) - exact for promoted in (True, False)], exact, size


mixed, positive = ([of_codes(change(normal(SUMS, LONGEST))) for _ in "aw"] for change in (torch.clone, torch.abs))
some, ones = [part[:8, :2048] for part in positive], torch.ones(8, 16).double()
of_suite = mistakes.hopper_product(some[0], ones, some[1], ones, 128, promoted=False)  # one of its wrong implementations
assert same(of_suite.diagonal(), in_tensor_core(*some, promoted=False)[-1].float().bfloat16())
LENGTHS = [2**power for power in range(7, 15)]
AT = [length // 128 - 1 for length in LENGTHS]


def allowed(length):
    """The bound of a promoting kernel, for the first sum."""
    one = torch.ones(1, length // 128).double()
    return linear_bounds.product_error(*(linear_bounds.Magnitudes(part[:1, :length], one) for part in positive), 128, hopper=True)


figure, grid = plt.subplots(1, 2, figsize=(14, 5), layout="constrained", sharey=True)
shares = {}
for axes, operands, title in zip(grid, (positive, mixed), ("Sums of positive numbers", "Sums of both signs"), strict=True):
    found, exact, size = errors(*operands)
    level = size if operands is positive else exact.square().mean(1, keepdim=True).sqrt()
    for error, colour, name in zip(found, (BLUE, ORANGE), ("promoted every 128", "never promoted"), strict=True):
        shares[title, name] = share = (100 * error / level)[AT].abs()
        low, middle, high = (share.quantile(q, 1) for q in (0.01, 0.5, 0.99))
        axes.fill_between(LENGTHS, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(LENGTHS, middle, "o-", color=colour, label=name)
    axes.axhline(100 * 2.0**-8, color=GREY, linewidth=1, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="K, products in a sum", title=title, ylim=(1e-3, 100))
    axes.set_xticks(LENGTHS, LENGTHS)
    axes.minorticks_off()
bound = torch.tensor([100 * float(allowed(length)) / float((positive[0] * positive[1])[0, :length].sum()) for length in LENGTHS])
grid[0].plot(LENGTHS, bound, "--", color="black", linewidth=1.2, label="what parity allows")
assert (shares["Sums of positive numbers", "promoted every 128"].amax(1) < bound).all()
assert (shares["Sums of positive numbers", "never promoted"].amin(1) > bound)[3:].all()
numbers = normal(64, 4096).bfloat16()
cost = 100 * float((quantization.fake_quantize(numbers, 128) - numbers).double().norm() / numbers.double().norm())
grid[1].axhline(cost, color=GREEN, linewidth=1.2, linestyle="-.", label="the inputs' codes")
assert cost > 10 * float(shares["Sums of both signs", "never promoted"].median(1).values.max())
grid[0].text(LENGTHS[-1], 100 * 2.0**-8 * 1.12, "a rounding to bf16", ha="right", va="bottom", fontsize=10, color=GREY)
grid[0].set_yticks([0.001, 0.01, 0.1, 1, 10, 100], ["0.001", "0.01", "0.1", "1", "10", "100"])
grid[0].set_ylabel("|error| / |y| (%)")
for axes in grid:
    axes.legend(loc="upper left", fontsize=10)
# %% [markdown]
# ## 3. A bias
#
# What is cut is cut towards zero. Left, signed errors of 256 positive sums of 4096 products, before they are rounded: an fp32 sum is as
# often above as below, the tensor core is always below, and without promotion by 7 %. Right: inputs and weights need not be positive; means
# that are not zero are enough, for then the sum drifts.
#
# An error of one sign does not average out, over tokens or over layers. So parity has a domain of positive numbers, on which everybody is
# held to the bound of a kernel that promotes.

# %% tags=["image:product_bias"]
K, MEANS = 4096, [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3]
figure, (left, right) = plt.subplots(1, 2, figsize=(14, 4.8), layout="constrained")
a, w = (part[:, :K] for part in positive)
found, exact, size = errors(a, w)
in_fp32 = (a * w).float()
for width in (2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1):  # a tree of fp32 additions
    in_fp32 = in_fp32[:, :width] + in_fp32[:, width:]
signed = {"fp32": in_fp32[:, 0].double() - exact[-1], "promoted every 128": found[0][-1], "never promoted": found[1][-1]}
for number, (name, colour) in enumerate(zip(signed, (GREEN, BLUE, ORANGE), strict=True)):
    share = 100 * signed[name] / size[-1]
    spread = torch.linspace(-0.28, 0.28, SUMS)[torch.randperm(SUMS, generator=source)]
    left.plot(share, number + spread, ".", color=colour, markersize=4)
    left.text(0.55, number, name, ha="left", va="center")
    assert (float(share.abs().max()) < 1e-4) if name == "fp32" else (share < 0).all()
left.axvline(0, color="black", linewidth=1)
left.axvspan(-100 * 2.0**-8, 100 * 2.0**-8, color=GREY, alpha=0.2, linewidth=0)
left.text(-0.35, -0.68, "a rounding to bf16", color=GREY, fontsize=10, va="center")
left.set_xscale("symlog", linthresh=0.01, linscale=0.5)
left.set_xticks([-10, -1, -0.1, -0.01, 0, 0.01, 0.1, 1], ["−10", "−1", "−0.1", "", "0", "", "0.1", "1"])
left.minorticks_off()
left.set(xlabel="error / y (%)", title=f"Signed errors of {SUMS} positive sums of {K}", yticks=[], ylim=(-0.9, 2.5), xlim=(-14, 20))
left.spines["left"].set_visible(False)
biases = {"promoted every 128": [], "never promoted": []}
for mean in MEANS:
    found, exact, size = errors(*(of_codes((normal(SUMS, K) + mean) / (1 + mean)) for _ in "aw"))
    for name, error in zip(biases, found, strict=True):
        biases[name].append(float((100 * error[-1] * exact[-1].sign() / size[-1]).mean()))
for name, colour in zip(biases, (BLUE, ORANGE), strict=True):
    right.plot(MEANS, biases[name], "o-", color=colour, label=name)
assert biases["never promoted"][0] > -0.05
assert biases["never promoted"][-1] < -5
right.axhline(0, color="black", linewidth=1)
right.set(
    xlabel="mean of inputs and weights (standard deviations)", ylabel="mean error / sum of magnitudes (%)", title="Where the bias begins"
)
_ = right.legend(loc="lower left")
# %% [markdown]
# ## 4. A scale without its mantissa
#
# Scales need not be powers of two: a serving code on SM90 scales by amax/448 as it is. A kernel that takes the exponent of an fp32 scale
# and drops the rest multiplies by up to half of it. One such bug was in a released server: with activations of 672 everywhere
# amax/448 is 1.5, and every output was two thirds of what it should be.
#
# Left: the output over the right one, for rows of one number. Right: rows whose 32 groups have scales of their own. Each group loses
# another share, and all outputs are too small, by 28 % in the mean; yet their cosine with the right ones is 0.999. Here kernels keep the
# mantissa or refuse fp32 scales.

# %%
cut = {mutant.fault: mutant.call for mutant in mistakes.MUTANTS if mutant.function == "linear_fp8"}
truncating = cut["fp32 activation scale cut to a power of two"]
figure, (left, right) = plt.subplots(1, 2, figsize=(14, 4.4), layout="constrained")
amaxes = torch.linspace(448, 1792, 97)
codes = torch.full((len(amaxes), 256), 448.0).to(torch.float8_e4m3fn)
ones = torch.ones(1, 256).to(torch.float8_e4m3fn), torch.ones(1, 2)
rows = Quantized(codes, (amaxes / 448)[:, None].expand(-1, 2).contiguous())
whole, wrong = (call(rows, *ones)[:, 0].double() for call in (linear.linear_fp8, truncating))
assert float((whole / (256 * amaxes.double()) - 1).abs().max()) <= 2.0**-8
assert float(truncating(Quantized(codes[:1], torch.full((1, 2), 1.5)), *ones)) == 448 * 256 == float(whole[0])
left.plot(amaxes, whole / (256 * amaxes), color=BLUE, linewidth=2, label="mantissa kept")
left.plot(amaxes, wrong / (256 * amaxes), color=ORANGE, linewidth=2, label="mantissa dropped")
left.plot(672, 2 / 3, "o", color="black")
left.text(664, 0.64, "672: two thirds", ha="right", va="center")
left.set(xlabel="amax of the row", ylabel="output / right output", title="One scale", ylim=(0.4, 1.1), xscale="log")
left.set_xticks([448, 672, 896, 1344, 1792], [448, 672, 896, 1344, 1792])
left.minorticks_off()
left.legend(loc="lower left")
spread = normal(64, 32).exp2().repeat_interleave(128, 1) * normal(64, 4096).abs()
x, weight = quantization.quantize_fp8(spread.bfloat16(), 128, scale="fp32"), quantization.quantize_fp8_blocks(normal(128, 4096).abs())
whole, wrong = (call(x, *weight).double() for call in (linear.linear_fp8, truncating))
right.hist((wrong / whole).flatten(), bins=40, color=ORANGE)
right.axvline(1, color=BLUE, linewidth=2)
cosine = float(torch.cosine_similarity(whole.flatten(), wrong.flatten(), dim=0))
assert cosine > 0.999
assert abs(float((wrong / whole).mean()) - 0.72) < 0.02
right.set(xlabel="output / right output", ylabel="outputs", title=f"Scales of 32 groups: a cosine of {cosine:.4f}", xlim=(0.4, 1.1))
right.set_yticks([])
right.spines["left"].set_visible(False)
# %% [markdown]
# ## 5. A pair, in two layouts
#
# V4.1 has groups of 32, so a product needs four scales for each 128 numbers, for every row on both sides: an `Mxfp8Pair`. Four scale
# bytes are a word. DeepGEMM reads words in columns, the first words of all rows, then the second ones (*packed*). FlashInfer and cuBLAS
# read tiles of 128 rows and one word (*128x4*): a line of 16 bytes holds the words of rows $r$, $r + 32$, $r + 64$ and $r + 96$.
#
# The same tensor, 150 rows of 256 numbers: 8 scales a row. Memory is drawn 16 bytes a line. Colour says which rows a byte belongs to, pale
# the first word of a row and full the second, hatched what belongs to none. Outlined: the first words of rows 5, 37, 69, 101 and 133.
# In 128x4 the first four of them are one line, in packed they are 128 bytes apart.

# %% tags=["image:pair_layouts"]
ROWS, GROUPS, WATCHED = 150, 8, (5, 37, 69, 101, 133)
BANDS = (SKY, YELLOW, PINK, GREEN, ORANGE)


def memory(grid, layout):
    """The bytes of a layout in the order of memory, 16 a line."""
    words = whole_columns(scales.pack_ue8m0(grid)) if layout == "packed" else scales.swizzle_128x4(grid)
    return words.contiguous().view(torch.uint8).view(-1, 16).long()


row, group = (torch.arange(1, count + 1).to(torch.uint8) for count in (ROWS, GROUPS))  # from 1 on: padding is 0
grids = row[:, None].expand(-1, GROUPS).contiguous(), group.expand(ROWS, -1).contiguous()
figure, grid = plt.subplots(1, 3, figsize=(14, 7.6), layout="constrained", width_ratios=(1, 2, 2), sharey=True)
panels = {"the scales": [part.long() for part in grids]}
panels |= {layout: [memory(part, layout) for part in grids] for layout in ("packed", "128x4")}
for axes, (name, (rows_of, groups_of)) in zip(grid, panels.items(), strict=True):
    picture = torch.ones(*rows_of.shape, 3)
    for band, colour in enumerate(BANDS):
        for word in range(GROUPS // 4):
            here = (rows_of > 0) & ((rows_of - 1) // 32 == band) & ((groups_of - 1) // 4 == word)
            full = torch.tensor(plt.matplotlib.colors.to_rgb(colour))
            picture[here] = full if word else 0.45 * full + 0.55
    count, width = rows_of.shape
    axes.imshow(picture, extent=(0, width, count, 0), aspect="auto", interpolation="nearest")
    for line, byte in torch.nonzero(rows_of == 0).tolist():
        if byte % 4 == 0:
            axes.add_patch(Rectangle((byte, line), 4, 1, fill=False, hatch="////", edgecolor="#c8c8c8", linewidth=0))
    for line, byte in torch.nonzero((groups_of - 1) == 0).tolist():
        if int(rows_of[line, byte]) - 1 in WATCHED:
            axes.add_patch(Rectangle((byte, line), 4, 1, fill=False, edgecolor="black", linewidth=1.6, zorder=3))
            beside = {"x": byte + 4.2, "y": line + 0.5, "va": "center_baseline"}
            place = beside if name == "packed" else {"x": byte + 2, "y": line - 0.3, "ha": "center", "va": "bottom"}
            axes.text(s=f"row {int(rows_of[line, byte]) - 1}", fontsize=8, **place)
    axes.set_title(f"{name}: {rows_of.numel()} bytes" if width == 16 else f"{ROWS} rows of {GROUPS} scales")
    axes.set(
        xlim=(-0.1, width + 0.1), ylim=(150.5, -0.5), xticks=range(0, width + 1, 4), xlabel="group" if width == GROUPS else "byte of a line"
    )
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
grid[0].set_ylabel("row; 16 bytes of memory")
grid[0].set_yticks(range(0, 151, 16))
where = {
    name: [torch.nonzero(((rows_of - 1) == row) & (groups_of == 1))[0].tolist() for row in WATCHED]
    for name, (rows_of, groups_of) in panels.items()
}
assert where["128x4"] == [[5, 0], [5, 4], [5, 8], [5, 12], [69, 0]]
assert where["packed"] == [[1 + 8 * band, 4] for band in range(5)]
handles = [Patch(color=colour, label=f"rows {32 * band} to {min(32 * band + 31, ROWS - 1)}") for band, colour in enumerate(BANDS)]
_ = figure.legend(
    handles=[*handles, Patch(facecolor="white", edgecolor="#c8c8c8", hatch="////", label="padding, 0")], loc="outside lower center", ncols=6
)
# %% [markdown]
# What a product makes of them is the same to the bit, in either layout on either side, and whatever the padding holds.

# %%
x, weight = normal(ROWS, 256).bfloat16(), quantization.quantize_fp8_blocks(normal(96, 256), (32, 32))
pairs = {layout: Mxfp8Pair(*quantization.quantize_fp8(x, 32, scale_layout=layout)) for layout in ("packed", "128x4")}
weights = {layout: linear.mxfp8_weight(*weight, scale_layout=layout) for layout in pairs}
y = linear.linear_fp8(x, *weight, block=32)
for a in pairs.values():
    for w in weights.values():
        assert same(linear.linear_mxfp8(a, w), y)
        assert same(fast_linear.linear_mxfp8(a, w, impl="eager"), y)
spoilt = pairs["128x4"].scales.clone()
spoilt.view(torch.uint8).view(-1)[memory(grids[0], "128x4").flatten() == 0] = 255  # NaN
assert same(fast_linear.linear_mxfp8(Mxfp8Pair(pairs["128x4"].codes, spoilt), weights["packed"], impl="eager"), y)
print(f"{len(y)} x {len(y[0])} outputs, equal in four mixes of layouts, with NaN for padding too")

# %% [markdown]
# Which layout a producer should write is asked once for a layer: 128x4 where FlashInfer multiplies, packed where somebody wants the same
# bits in every run or batch, which FlashInfer's product does not promise, and for everybody else. The answers for a FlashInfer layer:

# %%
for capability in ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1)):
    with patch("dsv4.host.cuda_capability", return_value=capability):
        answers = {
            mode: fast_linear.choose_mxfp8_route("flashinfer", mode, "cuda") for mode in ("default", "deterministic", "batch_invariant")
        }
    print(f"SM{capability[0]}{capability[1]:<3}", ", ".join(f"{mode}: {route.layout} {route.backend}" for mode, route in answers.items()))
print(f"CPU   {linear.choose_mxfp8_route('flashinfer', 'default', 'cpu').backend}")

# %% [markdown]
# ## 6. Codes instead of numbers
#
# The step before a product can write codes in the first place: a norm, a SwiGLU, or the rotation of the heads. One launch then reads a row
# and writes half as many bytes. It is the same as the two steps, bf16 rounding included, in every layout.

# %%
h, gain = normal(64, 512).bfloat16(), (1 + normal(512) / 4).bfloat16()
for group in (128, 32):
    for layout in ("rows", "packed", "128x4"):
        apart = quantization.quantize_fp8(norms.rms_norm(h, gain, eps=1e-6), group, scale_layout=layout)
        together = linear.norm_quantize(h, gain, eps=1e-6, group=group, scale_layout=layout)
        of_fast = fast_linear.norm_quantize(h, gain, eps=1e-6, group=group, scale_layout=layout, impl="eager")
        assert all(same(one, other) and same(one, third) for one, other, third in zip(apart, together, of_fast, strict=True))
powers = linear.norm_quantize(h, gain, eps=1e-6, group=128, scale_layout="mn_major").scales  # as SM90's products read them
assert (powers.stride(), powers.dtype) == ((1, 64), torch.float32)
print("norm_quantize is rms_norm, then quantize_fp8, to the bit")

# %% [markdown]
# ## 7. Parity
#
# The contract of `linear_fp8` brings lattices, on which every order of additions is exact and everybody owes the same bits; long sums of
# positive numbers; and NaN codes and extreme scales. Each is run with the fast path and with a mistake.

# %%
from dsv4.parity import contracts, engine, report
from dsv4.parity.candidates import Candidate

PROMOTE = "no promotion: Hopper's 14 bits over all of K"
print(fast.explain("linear.linear_fp8", "cpu"))
contract = contracts.find("linear.linear_fp8")
outcomes = []
for candidate in (Candidate("fast", partial(fast_linear.linear_fp8, impl="eager"), "fast"), Candidate(PROMOTE, cut[PROMOTE], PROMOTE)):
    outcomes += [engine.check(contract, contract.domain(name), candidate, torch.device("cpu")) for name in ("lattice", "positive")]
print(report.plain(report.table(report.as_data(outcome) for outcome in outcomes)))
assert [outcome.result for outcome in outcomes] == ["passed", "passed", "passed", "failed"]

# %% [markdown]
# A failure is shrunk to a small case: the shortest sum in which it shows.

# %%
print(outcomes[-1].message)

# %% [markdown]
# ## 8. What a tolerance cannot see
#
# Ten mistakes. The usual test draws normal inputs, quantises them in the function itself, and asks whether outputs are right to 3 %. Left:
# all ten are, six of them to the last bit, since it has no fp32 scales, no columns, no partial block, no NaN, and numbers of both signs.
# Right: how many outputs are wrong in cases of the contract: exact sums, the same with NaN codes and extreme scales, arbitrary
# codes and scales, and long positive sums.

# %% tags=["image:product_faults"]
FAULTS = (
    PROMOTE,
    "bf16 activations not quantised",
    "the sum of the blocks in bf16",
    "cut to bf16 instead of rounded",
    "fp32 activation scale cut to a power of two",
    "column-major scales read as row-major",
    "the last, partial group of k dropped",
    "byte 0 taken for 0",
    "NaN codes of x read as 448",
    "zeros for some numbers of tokens",
)
CPU = torch.device("cpu")
KINDS = {"lattice": (ORANGE, "o", "exact sums"), "special": (PINK, "s", "with NaN and extremes"), "finite": (BLUE, "D", "arbitrary"),
         "positive": (GREEN, "^", "long and positive")}  # fmt: skip
FORMS = [{"form": form, "stored": stored} for form, stored in (("bf16", "e8m0"), ("mn_major", "fp32"), ("e8m0", "uint8"))]


def specs(kind):
    """Cases of a domain."""
    sizes = [([4, 3, 2048], 128)] if kind == "positive" else [([17, 24, 300], 128), ([129, 5, 160], 32)]
    return [{"size": size, "block": block, "kind": kind, "density": 1.0, "seed": 5, **form} for size, block in sizes for form in FORMS]


CASES = {kind: [contract.domain(kind).build(spec, CPU) for spec in specs(kind)] for kind in KINDS}
RIGHT = {kind: [linear.linear_fp8(*case.args, **case.kwargs) for case in cases] for kind, cases in CASES.items()}
ALLOWED = {"finite": linear_bounds.linear(), "positive": linear_bounds.linear(hopper=True)}


def wrong_outputs(fault, kind):
    """How many outputs (%) are none that the contract allows, in the case that shows most."""
    most = 0.0
    for case, expected in zip(CASES[kind], RIGHT[kind], strict=True):
        got = cut[fault](*case.args, **case.kwargs)
        fine = (got == expected) | (got.isnan() & expected.isnan())
        if kind in ALLOWED:
            exact = contract.exact(*case.args, **case.kwargs)
            fine |= (got.double() - exact).abs() <= ALLOWED[kind](case, exact)
        most = max(most, 100 * float((~fine).double().mean()))
    return most


x, weight = normal(48, 4096).bfloat16(), quantization.quantize_fp8_blocks(normal(96, 4096))
good = linear.linear_fp8(x, *weight).double()
errors_seen = [float((cut[fault](x, *weight).double() - good).norm() / good.norm()) for fault in FAULTS]
figure, (left, right) = plt.subplots(1, 2, figsize=(13.5, 5.2), layout="constrained", sharey=True)
SAME = 1e-4  # where 0 is drawn
left.axvspan(SAME / 3, 0.03, color=GREEN, alpha=0.12, linewidth=0)
left.text(0.026, -0.75, "within 3 %", ha="right", va="center", fontsize=9, color=GREEN)
for place, (fault, error) in enumerate(zip(FAULTS, errors_seen, strict=True)):
    left.hlines(place, SAME / 3, max(error, SAME), color=BLUE, linewidth=1.5, alpha=0.6)
    left.plot(max(error, SAME), place, "o", color=BLUE, markersize=9)
    shares = [wrong_outputs(fault, kind) for kind in KINDS]
    assert max(shares) > 0, fault
    for number, (share, (colour, marker, name)) in enumerate(zip(shares, KINDS.values(), strict=True)):
        at = place + 0.2 * (number - 1.5)
        right.hlines(at, 0, share, color=colour, linewidth=1.5, alpha=0.6)
        right.plot(share, at, marker, color=colour, markersize=6, label=name if place == 0 else None)
assert max(errors_seen) < 0.03
assert errors_seen.count(0) == 6
left.set_yticks(range(len(FAULTS)), FAULTS)
left.set(
    xscale="log", xlim=(SAME / 3, 0.2), ylim=(len(FAULTS) - 0.5, -1.2), xlabel="|wrong − right| / |right|", title="What the usual test sees"
)
left.set_xticks([SAME, 1e-3, 0.01, 0.1], ["0", "0.1 %", "1 %", "10 %"])
left.minorticks_off()
right.set(xlabel="wrong outputs (%)", title="What it does not see", xlim=(-2, 104))
_ = figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=4, fontsize=10)
