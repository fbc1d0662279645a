"""Error bounds of fp32 evaluation, derived before anything runs.

u = 2^-24 is the relative error of one rounding to nearest. A primitive that is off by at most n ulp has a relative error of at most 2 n u:
an ulp of a number in [2^e, 2^(e+1)) is 2^(e-23), which is at most 2^-23 of it. `PRIMITIVE_ULP` holds the worst ulp of each primitive by
backend. "cpu" is ATen's vectorised math, that is SLEEF or MKL in its high-accuracy mode: below 1 ulp, and so is the square root (MKL's is
not IEEE: 0.558 ulp seen); divide is IEEE; rsqrt is 1 / sqrt, hence 2u + u. "cuda" is CUDA's documented maxima without fast math.
Fast math stands apart (`fast_math_exp`): its error grows with the argument.
"""

from __future__ import annotations

U: float = 2.0**-24
LEAST: float = 2.0**-149  # one rounding in the denormal range is off by at most half of this

PRIMITIVE_ULP: dict[str, dict[str, float]] = {
    "cpu": {"exp": 1.0, "log": 1.0, "tanh": 1.0, "rsqrt": 1.5, "sqrt": 1.0, "divide": 0.5},
    "cuda": {"exp": 1.0, "log": 1.0, "tanh": 2.0, "rsqrt": 2.0, "sqrt": 0.5, "divide": 0.5},
}


def primitive(name: str, device: str) -> float:
    """Relative error of one primitive on a kind of device, from `PRIMITIVE_ULP`."""
    return 2 * PRIMITIVE_ULP[device][name] * U


def fast_math_exp(largest: float) -> float:
    """Relative error of CUDA's __expf (ex2.approx of x * log2 e, as Triton's exp is) for |x| <= largest: 2 + floor(1.173 |x|) ulp."""
    return 2 * (2 + int(1.173 * largest)) * U


def gamma(roundings: int) -> float:
    """Relative error of a product of `roundings` factors (1 + d), |d| <= u: k u / (1 - k u) (Higham, lemma 3.1)."""
    return roundings * U / (1 - roundings * U)


def sum_height(terms: int, *, lanes: int = 1) -> int:
    """Roundings that any term meets when `lanes` partial sums run down the data one after another and a tree joins them: ceil(n / lanes)
    - 1 + ceil(log2 lanes).
    """
    return max(-(-terms // lanes) - 1, 0) + (lanes - 1).bit_length()
