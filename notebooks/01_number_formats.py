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
# # Number formats and their scales
#
# DeepSeek-V4 stores weights, activations and its KV cache in 8 and 4 bits, with a scale for every few numbers. This notebook shows what
# these numbers are, where their scales lie in memory, what they lose, and how two implementations of all that are held together bit for
# bit.
#
# Each part goes the same way: equation, picture, reference, fast, parity. It runs on a CPU in under a minute.

# %%
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Rectangle

from dsv4 import fast, formats
from dsv4.fast import quantization as fast_quantization
from dsv4.reference import codecs, quantization, scales

BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#666666"
plt.rcParams.update({"figure.dpi": 110, "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
BYTES = torch.arange(256, dtype=torch.uint8)

# %% [markdown]
# ## 1. Bits
#
# A signed format has a sign $s$, an exponent field $e$ and $M$ mantissa bits $m$:
#
# $$ x = (-1)^s \begin{cases} \frac{m}{2^M}\, 2^{1-\text{bias}} & e = 0 \\
# \left(1 + \frac{m}{2^M}\right) 2^{e-\text{bias}} & e > 0 \end{cases}
# \qquad\qquad \text{E8M0: } x = 2^{b-127} $$
#
# Below is the code nearest to 5 in each format. E2M1 has nothing between 4 and 6: 5 is a tie, and it goes to the even mantissa.


# %% tags=["image:bits"]
def draw_bits(axes, top, name, code, fields, value, note):
    """One row of cells; `fields` is a list of (width, colour, letter) from the most significant bit."""
    width = sum(size for size, _, _ in fields)
    axes.text(-0.3, top + 0.4, f"{name}  0x{code:0{(width + 3) // 4}X}", ha="right", va="center", fontsize=12)
    bit = width
    for size, colour, letter in fields:
        axes.text(width - bit + size / 2, top + 0.95, letter, ha="center", fontsize=9, color=colour)
        for _ in range(size):
            bit -= 1
            left = width - 1 - bit
            axes.add_patch(Rectangle((left + 0.03, top), 0.94, 0.8, color=colour, alpha=0.9))
            axes.text(left + 0.5, top + 0.4, code >> bit & 1, ha="center", va="center", color="white", fontsize=14, weight="bold")
    axes.text(8.4, top + 0.4, f"= {value:g}   {note}", va="center", fontsize=12)


five = torch.tensor([5.0])
e4m3, e2m1 = codecs.encode_e4m3(five).view(torch.uint8), codecs.encode_e2m1(five)
e5m2, e8m0 = five.to(torch.float8_e5m2).view(torch.uint8), codecs.encode_e8m0(five, rounding="nearest").view(torch.uint8)
sign, exponent, mantissa = (1, GREY, "s"), BLUE, ORANGE
figure, axes = plt.subplots(figsize=(11, 3.6))
draw_bits(axes, 4.2, "E4M3", int(e4m3), [sign, (4, BLUE, "e"), (3, ORANGE, "m")], codecs.decode_e4m3(e4m3).item(), "(1 + 2/8) · 2^(9 − 7)")
draw_bits(
    axes, 2.8, "E5M2", int(e5m2), [sign, (5, BLUE, "e"), (2, ORANGE, "m")], codecs.decode_e5m2(e5m2).item(), "(1 + 1/4) · 2^(17 − 15)"
)
draw_bits(axes, 1.4, "E2M1", int(e2m1), [sign, (2, BLUE, "e"), (1, ORANGE, "m")], codecs.decode_e2m1(e2m1).item(), "(1 + 0/2) · 2^(3 − 1)")
draw_bits(axes, 0.0, "E8M0", int(e8m0), [(8, BLUE, "e")], codecs.decode_e8m0(e8m0).item(), "2^(129 − 127)")
axes.set(xlim=(-2.6, 14), ylim=(-0.2, 5.6))
_ = axes.axis("off")
# %% [markdown]
# ## 2. Where the numbers are
#
# Left: every magnitude of each format; the axis doubles at each tick. Floating point spaces numbers evenly on this axis, but for the least
# few (the *subnormals*, $e = 0$). Right: half the gap between neighbours, as a share of the number: the worst rounding error. It is a saw
# between $2^{-M-2}$ and $2^{-M-1}$ until the subnormals, where nothing holds it any more. A group's scale has one task: to put the group's
# numbers to the right of that slope.

# %% tags=["image:number_lines"]
figure, (left, right) = plt.subplots(1, 2, figsize=(13, 3.8), layout="constrained", width_ratios=(1.25, 1))
tables = {
    "E5M2": (codecs.decode_e5m2(BYTES[:128]), GREEN),
    "E4M3": (codecs.decode_e4m3(BYTES[:128]), BLUE),
    "E2M1": (codecs.decode_e2m1(BYTES[:8]), ORANGE),
}
for height, (name, (table, colour)) in enumerate(tables.items()):
    magnitudes = table[table.isfinite() & (table > 0)].double()
    left.plot(magnitudes.log2(), torch.full_like(magnitudes, height), "|", color=colour, markersize=26)
    left.text(magnitudes[-1].log2() + 0.4, height, f"max {magnitudes[-1]:g}", va="center", color=colour)
    x = torch.logspace(-16.5, 15.9, 4000, base=2, dtype=torch.float64)
    x = x[(x >= magnitudes[0] / 2) & (x <= magnitudes[-1])]
    above = torch.searchsorted(magnitudes, x).clamp(1, len(magnitudes) - 1)
    right.plot(x.log2(), (magnitudes[above] - magnitudes[above - 1]) / 2 / x, color=colour, label=name)
left.set_yticks(range(3), tables)
left.set(xlabel="log2 of the magnitude", ylim=(-0.6, 2.6), xlim=(-17.5, 22), title="Every magnitude above zero")
right.set(
    xlabel="log2 of the magnitude", ylabel="half a gap / magnitude", yscale="log", ylim=(0.02, 1.2), title="Worst relative rounding error"
)
right.set_yticks([1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], ["1/32", "1/16", "1/8", "1/4", "1/2", "1"])
right.minorticks_off()
_ = right.legend()
# %% [markdown]
# ## 3. Ties
#
# Scales that are powers of two make exact midpoints common, so the tie rule shows in model outputs. Hardware rounds a tie to the even
# mantissa bit; kernels that compare with a strict `>` round it toward zero. Both exist in shipped code, so both are options, never a silent
# choice.

# %% tags=["image:ties"]
x = torch.arange(0, 7.0001, 1 / 64)
midpoints = torch.tensor(formats.E2M1_MIDPOINTS)
figure, axes = plt.subplots(figsize=(8, 4.2))
axes.plot(x, codecs.decode_e2m1(codecs.encode_e2m1(x)), color=GREY, drawstyle="steps-mid", linewidth=1.2, zorder=1)
axes.plot(x, x, ":", color=GREY, linewidth=1)
landed = {ties: codecs.decode_e2m1(codecs.encode_e2m1(midpoints, ties=ties)) for ties in ("even", "toward_zero")}
for (ties, values), marker, colour in zip(landed.items(), "ox", (BLUE, ORANGE), strict=True):
    axes.plot(
        midpoints, values, marker, color=colour, markersize=9, markeredgewidth=2, fillstyle="none", label=f"ties {ties.replace('_', ' ')}"
    )
differ = int((landed["even"] != landed["toward_zero"]).sum())
axes.set(xlabel="x", ylabel="E2M1 value", title=f"FP4 rounding: the two rules differ at {differ} of {len(midpoints)} midpoints")
axes.set_yticks(formats.E2M1_MAGNITUDES)
_ = axes.legend()
# %% [markdown]
# ## 4. Scales
#
# With $a$ the largest magnitude of a group and $L$ = 448 (E4M3) or 6 (E2M1), the scale is the least power of two that leaves nothing above
# $L$:
#
# $$ b = \min \{\, b \ge 0 : L\, 2^{b-127} \ge \max(a, \text{floor}) \,\}, \qquad \text{code} = \mathrm{round}(x / 2^{b-127}) $$
#
# A floor keeps the scale of an empty group away from zero. Each code base has its own, and bytes differ wherever a group lies below it.

# %% tags=["image:floors"]
exponents = torch.arange(-150, 14, 0.02, dtype=torch.float64)
amax = exponents.exp2().float()[:, None]
styles = {
    "official": (BLUE, "-"),
    "sglang": (ORANGE, "-"),
    "sglang_packer": (GREEN, "-"),
    "flashmla": (PINK, "-"),
    "none": (GREY, "-"),
    "flashinfer": ("black", ":"),
}
figure, (wide, close) = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained", width_ratios=(1, 1.2))
for floor, (colour, line) in styles.items():
    byte = quantization.quantize_fp8(amax, 1, amax_floor=floor).scales.view(torch.uint8).flatten()
    for axes in (wide, close):
        axes.plot(exponents, byte, line, color=colour, linewidth=2, label=f"{floor}: at least {byte.min()}", drawstyle="steps-post")
wide.set(xlabel="log2 of the group's largest magnitude", ylabel="scale byte", title="All of fp32")
close.set(xlabel="log2 of the group's largest magnitude", xlim=(-40, 2), ylim=(80, 123), title="Where floors matter")
_ = close.legend(loc="lower right")
# %% [markdown]
# Rounding the scale *up* is a choice. The OCP rule for MX formats takes the exponent of $a$ as it is, so the largest numbers of some groups
# do not fit and saturate. Below: the error of a group's largest number under both rules.

# %% tags=["image:ceil_and_floor"]
largest = torch.logspace(8, 10, 2000, base=2)  # two binades, 256 to 1024
up = quantization.fake_quantize(largest[:, None], 1).flatten()
floor_scale = codecs.decode_e8m0(codecs.encode_e8m0(largest / 256, rounding="floor"))
down = codecs.decode_e4m3(codecs.encode_e4m3(largest / floor_scale)) * floor_scale
figure, axes = plt.subplots(figsize=(9, 3.8))
axes.plot(largest, 100 * (down - largest) / largest, color=ORANGE, label="exponent of the largest number (OCP MX)")
axes.plot(largest, 100 * (up - largest) / largest, color=BLUE, label="rounded up (DeepSeek)")
axes.set(xlabel="largest magnitude of the group", ylabel="relative error (%)", title="FP8: what happens to the largest number of a group")
axes.set_ylim(bottom=-19)
axes.set_xscale("log", base=2)
axes.set_xticks([256, 448, 512, 896, 1024], ["256", "448", "512", "896", "1024"])
_ = axes.legend()
# %% [markdown]
# ## 5. Where scales lie
#
# The same scales lie in memory in three ways. Four neighbouring groups of a row share a 32-bit word. *Rows* is plain row-major; *packed*
# puts the words of a column side by side (DeepGEMM); *128x4* interleaves the words of rows $r$, $r+32$, $r+64$, $r+96$ (FlashInfer,
# cuBLAS). The scale of row $r$ and group $g$:
#
# $$ \text{packed: } 4\,(\lfloor g/4 \rfloor A + r) + g \bmod 4, \quad A = \text{rows, rounded up to 4} $$
# $$ \text{128x4: } 512\,(\lfloor r/128 \rfloor W + \lfloor g/4 \rfloor) + 16\,(r \bmod 32)
# + 4 \lfloor (r \bmod 128)/32 \rfloor + g \bmod 4, \quad W = \lceil \text{groups}/4 \rceil $$
#
# The pictures come from the functions, not from these formulas: number all scales, send the numbers through, see where they come out.

# %% tags=["image:scale_layouts"]
ROWS, GROUPS = 256, 8


def memory(layout, scale_bytes):
    """The bytes of a layout in the order of memory."""
    if layout == "rows":
        return scale_bytes.flatten()
    tensor = scales.pack_ue8m0(scale_bytes).T if layout == "packed" else scales.swizzle_128x4(scale_bytes)
    return tensor.contiguous().view(torch.uint8).flatten()


number = torch.arange(ROWS * GROUPS).reshape(ROWS, GROUPS)
low, high = (number % 256).to(torch.uint8), (number // 256).to(torch.uint8)
figure, grid = plt.subplots(2, 3, figsize=(13, 8), layout="constrained", height_ratios=(2.2, 1))
for column, layout in enumerate(("rows", "packed", "128x4")):
    owner = memory(layout, low).long() + 256 * memory(layout, high).long()  # which scale lies at each address
    address = torch.empty(ROWS * GROUPS, dtype=torch.long)
    address[owner] = torch.arange(len(owner))
    picture = grid[0, column].imshow(address.reshape(ROWS, GROUPS), aspect="auto", cmap="viridis", interpolation="nearest")
    grid[0, column].set(title=layout, xlabel="group", ylabel="row" if column == 0 else "")
    grid[0, column].set_yticks([0, 32, 64, 96, 128, 160, 192, 224])
    first = grid[1, column]
    for place in range(32):
        row, group = divmod(int(owner[place]), GROUPS)
        x, y = place % 8, place // 8
        first.add_patch(Rectangle((x, -y), 0.96, 0.9, color=plt.cm.viridis(row / 128 * 0.8), alpha=0.55))
        first.text(x + 0.48, 0.45 - y, f"{row},{group}", ha="center", va="center", fontsize=9)
    first.set(xlim=(0, 8), ylim=(-3.1, 1.0))
    first.set_title("bytes 0 to 31 hold row,group", fontsize=11)
    first.axis("off")
_ = figure.colorbar(picture, ax=grid[0, :], label="address (bytes)")
# %% [markdown]
# ## 6. What is lost
#
# 16 384 numbers from Student's $t$ with five degrees of freedom: bell-shaped with a few large ones, as trained weights are. Each group's
# scale follows its largest number; the error of the others depends on how far below it they lie. FP8 keeps its relative error over ten
# binades and more; FP4 has four.

# %% tags=["image:errors"]
source = np.random.default_rng(0)
x = torch.from_numpy(source.standard_t(5, (128, 128))).float() * 0.02
runs = {
    "FP8, 128 in a group, UE8M0": (quantization.quantize_fp8(x, 128), 128, BLUE),
    "FP8, 128 in a group, fp32": (quantization.quantize_fp8(x, 128, scale="fp32"), 128, SKY),
    "MXFP4, 32 in a group, UE8M0": (quantization.quantize_mxfp4(x), 32, ORANGE),
    "FP4, 16 in a group, E4M3": (quantization.quantize_fp4_e4m3(x), 16, PINK),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.4), layout="constrained")
edges = torch.logspace(-10, 0, 41, base=2)
for name, (quantized, group, colour) in runs.items():
    error = quantization.dequantize(*quantized, group, dtype=torch.float32) - x
    snr = 20 * float((x.norm() / error.norm()).log10())
    amax = x.abs().unflatten(-1, (-1, group)).amax(-1, keepdim=True).expand(-1, -1, group).flatten(1)
    depth, share = (x.abs() / amax).flatten(), (error.abs() / x.abs()).flatten()
    typical = [share[(depth >= low) & (depth < high)].square().mean().sqrt() for low, high in pairwise(edges)]
    left.plot((edges[1:] * edges[:-1]).sqrt(), typical, color=colour, label=f"{name}: {snr:.1f} dB")
    ordered = (error.abs() / amax).flatten().sort().values
    right.plot(ordered, torch.linspace(0, 100, len(ordered)), color=colour)
left.set(xlabel="magnitude / largest of its group", ylabel="rms error / magnitude", title="Small numbers pay for large ones")
left.set_xscale("log", base=2)
left.set_yscale("log")
left.legend(fontsize=9)
right.set(xlabel="|error| / largest of the group", ylabel="numbers with at most this error (%)", xscale="log", xlim=(1e-5, 0.3))
_ = right.set_title("Errors, smallest first")
# %% [markdown]
# ## 7. Fast
#
# `dsv4.fast` has the same functions. It works on bits with integers, the reference works with real numbers in fp64: they share no line of
# arithmetic. `explain` says what would run here and why.

# %%
from dsv4.parity.compare import compare_bytes

print(fast.explain("quantization.quantize_fp8", "cpu"))
for layout in ("rows", "packed", "128x4"):
    ours, theirs = (side.quantize_fp8(x, 32, scale_layout=layout) for side in (quantization, fast_quantization))
    equal = [compare_bytes(one, other, strides=True).ok for one, other in zip(ours, theirs, strict=True)]
    print(f"{layout:7} same bytes and strides of codes and scales: {equal}")

# %% [markdown]
# ## 8. Parity
#
# Equal on one tensor proves little. `dsv4.parity` has a contract for each function: what must agree, on which inputs, how far, and why.
# Here it runs in this process; `pytest --pyargs dsv4.parity` runs all of it. Three encoders are held to the contract of `encode_e4m3`: the
# fast one, torch's own cast, and one that rounds to bf16 on the way.

# %%
from dsv4.parity import contracts, engine, report
from dsv4.parity.candidates import Candidate

contract = contracts.find("codecs.encode_e4m3")
candidates = [
    Candidate("fast", fast.codecs.encode_e4m3, "fast"),
    Candidate("torch's cast", lambda x: x.to(torch.float8_e4m3fn), "torch's cast"),
    Candidate("bf16 first", lambda x: codecs.encode_e4m3(x.bfloat16()), "bf16 first"),
]
domains = [domain for domain in contract.domains if domain.exhaustive <= 2**16]
outcomes = [engine.check(contract, domain, one, torch.device("cpu")) for one in candidates for domain in domains]
print(report.plain(report.table(report.as_data(outcome) for outcome in outcomes)))

# %% [markdown]
# Torch's cast differs in a special value. Rounding twice is right on every bf16 number, of course, and wrong on the others. Parity does not
# only say so: it shrinks what it drew, or halves what it ran through, to the least input that shows it.

# %%
for one in candidates[1:]:
    print(next(outcome.message for outcome in outcomes if outcome.candidate == one.name and outcome.message), end="\n\n")

# %% [markdown]
# ## 9. What a tolerance cannot see
#
# Four quantisers with one mistake each. The usual test draws normal numbers and asks for a cosine above 0.99: all four pass. Counting how
# many representable numbers lie between the right code and theirs (*units in the last place*) shows three of the mistakes, and the shape
# says which one it is. The fourth never shows on random numbers, because it moves a code only next to a tie. A suite has to put numbers on
# ties, and an ulp beside them.

# %% tags=["image:what_a_tolerance_cannot_see"]
from dsv4.parity import strategies
from dsv4.parity.compare import ulps

GROUP = 128
MAGNITUDES = codecs.decode_e4m3(torch.arange(127, dtype=torch.uint8))


def cut_off(x, scale):
    """The next code toward zero."""
    quotient = x / scale
    magnitude = torch.searchsorted(MAGNITUDES, quotient.abs(), right=True) - 1
    return (magnitude + 128 * quotient.signbit()).to(torch.uint8).view(torch.float8_e4m3fn)


def without_the_last_two(x, scale):
    """A maximum over 126 of 128 numbers."""
    amax = x.abs().unflatten(-1, (-1, GROUP))[..., :-2].amax(-1)
    return codecs.encode_e4m3(x / (amax / 448).repeat_interleave(GROUP, -1))


def beside_ties(x):
    """Every number of a group moved to the tie between two codes that is nearest, or an ulp to either side of it; the largest stays."""
    codes, scale = quantization.quantize_fp8(x, GROUP, scale="fp32")
    above = (codes.view(torch.uint8) % 128).long().clamp(1, 126)
    ties = (MAGNITUDES[above] + MAGNITUDES[above - 1]) / 2 * scale.repeat_interleave(GROUP, -1)
    beside = (ties.view(torch.int32) + torch.arange(-1, 2, dtype=torch.int32).repeat(x.numel())[: x.numel()].reshape(x.shape)).view(
        torch.float32
    )
    is_largest = x.abs() == x.abs().unflatten(-1, (-1, GROUP)).amax(-1).repeat_interleave(GROUP, -1)
    return torch.where(is_largest, x, beside.copysign(x))


mistakes = {
    "cuts off instead of rounding": cut_off,
    "leaves two numbers out of the maximum": without_the_last_two,
    "rounds to bf16 first": lambda x, scale: codecs.encode_e4m3((x / scale).bfloat16()),
    "multiplies by 1/scale": lambda x, scale: codecs.encode_e4m3(x * (1 / scale)),
}
normal = torch.randn(128, 1024, generator=strategies.generator(0))
inputs = {"normal numbers": (normal, BLUE), "ties and their neighbours": (beside_ties(normal), ORANGE)}
figure, grid = plt.subplots(1, 4, figsize=(15, 4), layout="constrained", sharey=True)
for axes, (mistake, encode) in zip(grid, mistakes.items(), strict=True):
    cosines = []
    for (name, (x, colour)), shift in zip(inputs.items(), (-0.2, 0.2), strict=True):
        right_codes, scale = quantization.quantize_fp8(x, GROUP, scale="fp32")
        spread = scale.repeat_interleave(GROUP, -1)
        codes = encode(x, spread)
        distance = ulps(right_codes, codes)
        counts = [int((distance == steps).sum()) for steps in range(4)] + [int((distance > 3).sum())]
        axes.bar([place + shift for place in range(5)], counts, 0.4, color=colour, label=name)
        cosines.append(torch.cosine_similarity(*(codecs.decode_e4m3(side).double().flatten() for side in (right_codes, codes)), 0))
    axes.set_xticks(range(5), ["0", "1", "2", "3", "> 3"])
    axes.set(xlabel="distance of the code (ULP)", yscale="log", ylim=(0.7, 3e5))
    axes.set_title(f"{mistake}\ncosine on normal numbers {cosines[0]:.6f}", fontsize=11)
grid[0].set_ylabel("numbers, of 131 072")
_ = grid[1].legend(loc="upper right")
