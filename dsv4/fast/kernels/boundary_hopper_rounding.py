"""Sums that the reference evaluates in fp64, from fp32 and an error bound (PTX for SM90, for Triton and Gluon).

The reference rounds a sum to fp32 and from there to bf16. Both roundings are monotonic: if s - e and s + e, fp32 numbers with the exact sum
between them, have one bf16, it is that of the sum. Where they have not (about one element in a thousand), the thread evaluates the sum in
fp64, and only warps that have such a thread take the time. (SM90 converts between fp32 and fp64 at an eighth of the rate at which it adds
fp32.) Each thread notes its open words and settles them one after another, mostly one, by code that there is once for all of them: what
is executed should be short, and be fetched at one go.

Bounds. With u = 2^-24, s = c_1 x_1, then s = fma(c_k, x_k, s): each of the n operations is off by at most u times the magnitude of its
result, and so is s +- e. A result is at most the sum of |c_j| M over the terms so far, where M is the largest |x|. Term k is in n - k + 1
of the results and in the last one again, so that e = u M ((n + 1) |c_1| + n |c_2| + .. + 2 |c_n|) holds to first order; the factor
1 + 2^-16 of UNIT covers what is left: the roundings of M times the sum, of the sum itself, and those of the fp64 sum. Denormal results are
off by at most 2^-150 each, for which LEAST is added. Each |c_k| counts at least twice, so e < 2^103 means that no result exceeds 2^126;
anything else, infinite numbers too, is left to fp64. A NaN among the x does not count in M, and makes s NaN as it makes the sum; one among
the weights makes e so large that all sums of the token are left to fp64.

Products. With r = (x w) f, f the fp32 of a factor: x w is exact, f, r and r +- e are each off by u, and e = 5 u |r| + LEAST (1 + f). Two
zeros of different sign do not differ here: r has the sign of the product. Where f is near the least normal number, all is left to fp64.

Words are int32 of two bf16, the even one low.
"""

from __future__ import annotations

from collections.abc import Callable

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

UNIT = gl.constexpr(2.0**-24 * (1 + 2.0**-16))
LEAST = "0f00000200"  # 2^-140
LARGEST = "0f73000000"  # 2^103
RAISED = "0d77F0000000000000"  # 2^896
HALVES = "lh"
EXPANDED_AT_ONCE = gl.constexpr(4)  # words of a block that makes new streams: 1, 2 or 4
COLLAPSED_AT_ONCE = gl.constexpr(2)  # and of one that collapses alone
Body = Callable[[list[list[str]], list[list[str]]], list[str]]


def _unpacked(words: list[str], name: str) -> list[str]:
    """Registers l{name}k and h{name}k: the two halves of words as fp32."""
    return [
        line for k, word in enumerate(words) for line in (f"shl.b32 l{name}{k}, {word}, 16;", f"and.b32 h{name}{k}, {word}, 0xFFFF0000;")
    ]


def _bounds(count: int, name: str, reach: str, over: str) -> list[str]:
    """Registers le and he: e of sums over registers of this name; `over` where it says nothing."""
    lines = []
    for half in HALVES:
        lines.append(f"abs.f32 m, {half}{name}0;")
        for k in range(1, count):
            lines += [f"abs.f32 t, {half}{name}{k};", "max.f32 m, m, t;"]
        lines.append(f"fma.rn.f32 {half}e, {reach}, m, {LEAST};")
    return [*lines, f"setp.ge.f32 {over}, le, {LARGEST};", f"setp.ge.or.f32 {over}, he, {LARGEST}, {over};"]


def _quick(result: str, weights: list[str], name: str, over: str, bit: int) -> list[str]:
    """A word of two sums, and a bit of `open` where it may be wrong."""
    lines = []
    for half in HALVES:
        lines.append(f"mul.rn.f32 {half}s, {weights[0]}, {half}{name}0;")
        lines += [f"fma.rn.f32 {half}s, {weight}, {half}{name}{k}, {half}s;" for k, weight in enumerate(weights) if k]
        lines += [f"add.rn.f32 {half}u, {half}s, {half}e;", f"sub.rn.f32 {half}v, {half}s, {half}e;"]
    return [
        *lines,
        f"cvt.rn.bf16x2.f32 {result}, hu, lu;",
        "cvt.rn.bf16x2.f32 t, hv, lv;",
        f"setp.ne.or.b32 any, {result}, t, {over};",
        f"@any or.b32 open, open, {1 << bit};",
    ]


def _chosen(target: str, choice: list[str], bits: list[str]) -> list[str]:
    """One of 1, 2, 4, .. registers, by predicates from the lowest bit of its number."""
    lines, names = [], choice
    for level, bit in enumerate(bits[: (len(choice) - 1).bit_length()]):
        found = [target if len(names) == 2 else f"c{level}{k}" for k in range(len(names) // 2)]
        lines += [f"selp.b32 {name}, {names[2 * k + 1]}, {names[2 * k]}, {bit};" for k, name in enumerate(found)]
        names = found
    return lines or [f"mov.b32 {target}, {choice[0]};"]


def _exact(weights: list[str], numbers: int, *, finite: bool) -> list[str]:
    """fp64 sums over the registers lxk and hxk. `finite` numbers become fp64 by their bits, as 2^-896 of them, for which the weights make
    up: that takes two instructions that are quick, and the conversion one that is not."""
    lines = []
    for k in range(numbers):
        lines.append(f"cvt.f64.f32 d, {weights[k]};")
        if finite:
            lines.append(f"mul.rn.f64 d, d, {RAISED};")
        for half in HALVES:
            if finite:
                lines += [f"shr.s32 t, {half}x{k}, 3;", "and.b32 t, t, 0x8FFFFFFF;", "mov.b64 x, {z, t};"]
            else:
                lines.append(f"cvt.f64.f32 x, {half}x{k};")
            lines.append(f"fma.rn.f64 {half}d, d, x, {half}d;" if k else f"mul.rn.f64 {half}d, d, x;")
    return lines


def _settled(results: list[list[str]], words: list[list[str]], weights: list[list[str]], label: str) -> list[str]:
    """The open ones of results [word][sum], each thread's one after another. An infinite number or a NaN times 0 is NaN."""
    numbers, sums = len(weights[0]), len(weights)
    lines = ["setp.eq.b32 any, open, 0;", f"@any bra {label}DONE;", "mov.b32 z, 0;", f"{label}:", "bfind.u32 k, open;"]
    bits = (len(results) * sums - 1).bit_length()
    for bit in range(bits):
        lines += [f"and.b32 t, k, {1 << bit};", f"setp.ne.b32 p{bit}, t, 0;"]
    for k in range(numbers):
        lines += _chosen("t", [word[k] for word in words], [f"p{bit}" for bit in range((sums - 1).bit_length(), bits)])
        lines += [f"shl.b32 lx{k}, t, 16;", f"and.b32 hx{k}, t, 0xFFFF0000;"]
        lines += _chosen(f"w{k}", [row[k] for row in weights], ["p0", "p1"])
    lines.append("mul.rn.f32 m, lx0, 0f00000000;")
    lines += [f"fma.rn.f32 m, {half}x{k}, 0f00000000, m;" for k in range(numbers) for half in HALVES if k or half == "h"]
    given = [f"w{k}" for k in range(numbers)]
    lines += ["setp.nan.f32 any, m, m;", f"@any bra {label}ALL;", *_exact(given, numbers, finite=True), f"bra {label}SUM;"]
    lines += [f"{label}ALL:", *_exact(given, numbers, finite=False), f"{label}SUM:"]
    lines += ["cvt.rn.f32.f64 ls, ld;", "cvt.rn.f32.f64 hs, hd;", "cvt.rn.bf16x2.f32 m, hs, ls;"]
    for word, row in enumerate(results):
        for k, result in enumerate(row):
            lines += [f"setp.eq.b32 any, k, {word * sums + k};", f"@any mov.b32 {result}, m;"]
    lines += ["shl.b32 t, 1, k;", "xor.b32 open, open, t;", "setp.ne.b32 any, open, 0;", f"@any bra {label};", f"{label}DONE:"]
    return lines


def _block(registers: dict[str, str], lines: list[str]) -> str:
    declared = [f".reg .{kind} {names};" for kind, names in registers.items()]
    return "{\n" + "\n".join(f"    {line}" for line in [*declared, *lines]) + "\n}"


def _both(names: str) -> list[str]:
    return [half + name for half in HALVES for name in names.split()]


def _form(outputs: list[str], inputs: str, body: Body, words: int = 1) -> tuple[str, str]:
    """PTX and constraints of a block with these outputs, for so many words at a time; each output is written before the last input is
    read."""
    count = len(outputs)
    found = [[f"${k * words + word}" for k in range(count)] for word in range(words)]
    given = [[f"${(count + k) * words + word}" for k in range(len(inputs))] for word in range(words)]
    weights = ["w0", "w1", "w2", "w3", "w4", "c00", "c01"]
    registers = {
        "b32": ", ".join(["m", "t", "z", "k", "open", *_both("e s u v q x0 x1 x2 x3 x4 n0 n1 n2 n3"), *weights]),
        "f64": ", ".join(["d", "x", *_both("d")]),
        "pred": ", ".join(["o", "any", "p0", "p1", "p2", "p3"]),
    }
    form = [*(f"=&{kind}" for kind in outputs for _ in range(words)), *(kind for kind in inputs for _ in range(words))]
    return _block(registers, body(found, given)), ",".join(form)


def _sums(results: list[list[str]], words: list[list[str]], weights: list[list[str]], reach: str, label: str) -> list[str]:
    """Results [word][sum]: words of sums over the same numbers with different weights."""
    lines = ["mov.b32 open, 0;"]
    for k, (row, numbers) in enumerate(zip(results, words, strict=True)):
        lines += [*_unpacked(numbers, "x"), *_bounds(len(numbers), "x", reach, "o")]
        for j, (result, weight) in enumerate(zip(row, weights, strict=True)):
            lines += _quick(result, weight, "x", "o", k * len(row) + j)
    return lines + _settled(results, words, weights, label)


def _expand(outputs: list[list[str]], given: list[list[str]]) -> list[str]:
    """Old streams and y, weights, their reach; then pre and its reach, where a collapse is asked for. All words are of one token."""
    comb, post, reach = given[0][5:21], given[0][21:25], given[0][25]
    rows = [[*(comb[4 * old + new] for old in range(4)), post[new]] for new in range(4)]
    lines = _sums([word[:4] for word in outputs], [word[:5] for word in given], rows, reach, "NEW")
    for word in outputs:
        lines += _unpacked(word[:4], "n")
        for half in HALVES:
            lines.append(f"mul.rn.f32 {half}q, {half}n0, {half}n0;")
            lines += [f"fma.rn.f32 {half}q, {half}n{k}, {half}n{k}, {half}q;" for k in range(1, 4)]
        lines.append(f"add.rn.f32 {word[4]}, lq, hq;")
    if len(outputs[0]) > 5:
        lines += _sums([word[5:] for word in outputs], [word[:4] for word in outputs], [given[0][26:30]], given[0][30], "ONE")
    return lines


def _collapse(outputs: list[list[str]], given: list[list[str]]) -> list[str]:
    """Streams, pre, its reach."""
    return _sums(outputs, [word[:4] for word in given], [given[0][4:8]], given[0][8], "ONE")


def _scale(outputs: list[list[str]], given: list[list[str]]) -> list[str]:
    """Numbers and weights, words both; the factor in fp32 and in fp64, and what is added to an error."""
    (result,), (numbers, weights, factor, wide, least) = outputs[0], given[0]
    lines = [*_unpacked([numbers, weights], "x")]
    for half in HALVES:
        lines += [
            f"mul.rn.f32 {half}s, {half}x0, {half}x1;",
            f"mul.rn.f32 {half}s, {half}s, {factor};",
            f"abs.f32 t, {half}s;",
            f"fma.rn.f32 {half}e, t, 0f34A00000, {least};",  # 5 * 2^-24
            f"add.rn.f32 {half}u, {half}s, {half}e;",
            f"sub.rn.f32 {half}v, {half}s, {half}e;",
        ]
    lines += [
        f"cvt.rn.bf16x2.f32 {result}, hs, ls;",
        "cvt.rn.bf16x2.f32 t, hu, lu;",
        "cvt.rn.bf16x2.f32 m, hv, lv;",
        "setp.eq.bf16x2 p0|p1, t, m;",
        "and.pred any, p0, p1;",
        "@any bra SAME;",
    ]
    for half in HALVES:
        lines += [f"cvt.f64.f32 {half}d, {half}x0;", f"mul.rn.f64 {half}d, {half}d, {wide};", f"cvt.f64.f32 d, {half}x1;"]
        lines += [f"mul.rn.f64 {half}d, {half}d, d;", f"cvt.rn.f32.f64 {half}s, {half}d;"]
    return [*lines, f"cvt.rn.bf16x2.f32 {result}, hs, ls;", "SAME:"]


_NEW = _form([*"rrrr", "f"], "rrrrr" + 21 * "f", _expand, EXPANDED_AT_ONCE.value)
_BOTH = _form([*"rrrr", "f", "r"], "rrrrr" + 26 * "f", _expand, EXPANDED_AT_ONCE.value)
_ONE = _form(["r"], "rrrr" + 5 * "f", _collapse, COLLAPSED_AT_ONCE.value)
_SCALED = _form(["r"], "rrfdf", _scale)
NEW, NEW_FORM = gl.constexpr(_NEW[0]), gl.constexpr(_NEW[1])
BOTH, BOTH_FORM = gl.constexpr(_BOTH[0]), gl.constexpr(_BOTH[1])
ONE, ONE_FORM = gl.constexpr(_ONE[0]), gl.constexpr(_ONE[1])
SCALED, SCALED_FORM = gl.constexpr(_SCALED[0]), gl.constexpr(_SCALED[1])


@gluon.jit
def _reach(total):
    """In units of what M is multiplied with; of NaN, so much that nothing passes."""
    return gl.where(total == total, total * UNIT, 3e38)


@gluon.jit
def reach_of_expand(weights):
    """What M is multiplied with: the largest of the four new streams. `weights` are tensors, comb [old, new], then post."""
    largest = gl.zeros_like(weights[0])
    for new in gl.static_range(4):
        total = 2.0 * gl.abs(weights[16 + new])
        for old in gl.static_range(4):
            total += (6.0 - old) * gl.abs(weights[4 * old + new])
        largest = gl.maximum(largest, _reach(total))
    return largest


@gluon.jit
def reach_of_collapse(pre):
    """What M is multiplied with; `pre` are four tensors."""
    total = 2.0 * gl.abs(pre[3])
    for k in gl.static_range(3):
        total += (5.0 - k) * gl.abs(pre[k])
    return _reach(total)
