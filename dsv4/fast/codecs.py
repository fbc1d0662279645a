"""Numbers of 8 and 4 bits by integer arithmetic: the twin of `dsv4.reference.codecs`.

Every function is one elementwise body of `dsv4.fast.bits`, compiled by inductor for whatever device the tensor is on. No body holds a
float8 type; codes become float8 by a view of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4 import checks
from dsv4.fast import bits, dispatch, ops
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Implementation, any_arguments, any_device
from dsv4.types import NibbleOrder, ScaleRounding, Ties, ZeroSign

__all__ = [
    "decode_e2m1",
    "decode_e4m3",
    "decode_e5m2",
    "decode_e8m0",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "pack_fp4",
    "unpack_fp4",
]


def decode_e4m3(codes: Tensor, *, impl: str | None = None) -> Tensor:
    """The numbers of E4M3 codes.

    Args:
        codes: any shape, e4m3 or uint8 (its bits).
        impl: a backend by name, else the device's default.

    Returns:
        fp32 of the same shape; 0x7F and 0xFF are NaN, 0x80 is -0.

    Raises:
        ArgumentError: another dtype.
    """
    checks.tensor("codes", codes, ("e4m3", "uint8"))
    return _op("decode_e4m3", codes.view(torch.uint8), impl)


def decode_e5m2(codes: Tensor, *, impl: str | None = None) -> Tensor:
    """The numbers of E5M2 codes.

    Args:
        codes: any shape, e5m2 or uint8 (its bits).
        impl: a backend by name, else the device's default.

    Returns:
        fp32 of the same shape; 0x7C and 0xFC are infinities, the codes above them NaN.

    Raises:
        ArgumentError: another dtype.
    """
    checks.tensor("codes", codes, ("e5m2", "uint8"))
    return _op("decode_e5m2", codes.view(torch.uint8), impl)


def decode_e8m0(codes: Tensor, *, impl: str | None = None) -> Tensor:
    """The powers of two of E8M0 codes.

    Args:
        codes: any shape, e8m0 or uint8 (its bits).
        impl: a backend by name, else the device's default.

    Returns:
        fp32 of the same shape; 0 is 2^-127 (a subnormal, not zero), 255 is NaN.

    Raises:
        ArgumentError: another dtype; a float becomes a code through `encode_e8m0`.
    """
    return _op("decode_e8m0", checks.e8m0_bits("codes", codes), impl)


def decode_e2m1(codes: Tensor, *, impl: str | None = None) -> Tensor:
    """The numbers of E2M1 codes.

    Args:
        codes: any shape, uint8, one code a byte; the upper four bits are ignored.
        impl: a backend by name, else the device's default.

    Returns:
        fp32 of the same shape.

    Raises:
        ArgumentError: another dtype; bytes with two codes go through `unpack_fp4` first.
    """
    checks.tensor("codes", codes, "uint8")
    return _op("decode_e2m1", codes, impl)


def encode_e4m3(x: Tensor, *, impl: str | None = None) -> Tensor:
    """The nearest E4M3 codes, ties to even.

    Args:
        x: any shape, bf16 or fp32.
        impl: a backend by name, else the device's default.

    Returns:
        e4m3 of the same shape. Magnitudes above 448 and infinities saturate; NaN of either sign is 0x7F; -0 is 0x80.

    Raises:
        ArgumentError: another dtype, or a tensor that requires grad.
    """
    checks.tensor("x", x, ("bf16", "fp32"))
    checks.no_grad(x=x)
    return _op("encode_e4m3", x, impl).view(torch.float8_e4m3fn)


def encode_e8m0(x: Tensor, *, rounding: ScaleRounding | str = ScaleRounding.CEIL, impl: str | None = None) -> Tensor:
    """E8M0 codes of numbers that need not be powers of two.

    Args:
        x: any shape, bf16 or fp32.
        rounding: ceil: the least b with 2^(b - 127) >= x. floor: the largest b with 2^(b - 127) <= x. nearest: torch's cast, where a
            mantissa of 1.5 and more goes up, and so does all above 2^-127 that is below 2^-126.
        impl: a backend by name, else the device's default.

    Returns:
        e8m0 of the same shape. Zero and negative numbers are 0, as is whatever lies below 2^-127; finite numbers saturate at 254; NaN and
        both infinities are 255.

    Raises:
        ArgumentError: another dtype, an unknown rounding, or a tensor that requires grad.
    """
    checks.tensor("x", x, ("bf16", "fp32"))
    rounding = checks.choice("rounding", rounding, ScaleRounding)
    checks.no_grad(x=x)
    return _op("encode_e8m0", x, str(rounding), impl).view(torch.float8_e8m0fnu)


def encode_e2m1(x: Tensor, *, ties: Ties | str = Ties.EVEN, zero_sign: ZeroSign | str = ZeroSign.KEPT, impl: str | None = None) -> Tensor:
    """The nearest E2M1 codes.

    Args:
        x: any shape, bf16 or fp32.
        ties: even: midpoints .25 .75 1.25 1.75 2.5 3.5 5 go to 0 1 1 2 2 4 4. toward_zero: to 0 .5 1 1.5 2 3 4.
        zero_sign: kept: a negative number that rounds to zero, and -0, is code 8. cleared: it is code 0.
        impl: a backend by name, else the device's default.

    Returns:
        uint8 of the same shape, one code a byte. Magnitudes above 6 and infinities saturate; NaN is 0.

    Raises:
        ArgumentError: another dtype, an unknown option, or a tensor that requires grad.
    """
    checks.tensor("x", x, ("bf16", "fp32"))
    ties, zero_sign = checks.choice("ties", ties, Ties), checks.choice("zero_sign", zero_sign, ZeroSign)
    checks.no_grad(x=x)
    return _op("encode_e2m1", x, str(ties), str(zero_sign), impl)


def pack_fp4(codes: Tensor, *, order: NibbleOrder | str = NibbleOrder.LOW_FIRST, impl: str | None = None) -> Tensor:
    """Two E2M1 codes to a byte.

    Args:
        codes: [..., n], uint8, one code a byte, n even; the upper four bits are ignored.
        order: which element of a pair lies in the low four bits: low_first the even one, high_first the odd one.
        impl: a backend by name, else the device's default.

    Returns:
        uint8 [..., n/2].

    Raises:
        ArgumentError: an odd n.
    """
    checks.tensor("codes", codes, "uint8", ("...", "n"))
    order = checks.choice("order", order, NibbleOrder)
    checks.multiple("codes", codes.shape[-1], 2, "n, the last size, is the number of codes: append a zero code")
    return _op("pack_fp4", codes, str(order), impl)


def unpack_fp4(packed: Tensor, *, order: NibbleOrder | str = NibbleOrder.LOW_FIRST, impl: str | None = None) -> Tensor:
    """The inverse of `pack_fp4`.

    Args:
        packed: [..., n], uint8, or int8 (its bits) as checkpoints store it.
        order: which element of a pair lies in the low four bits.
        impl: a backend by name, else the device's default.

    Returns:
        uint8 [..., 2n], one code a byte.

    Raises:
        ArgumentError: another dtype, no dimension or an unknown order.
    """
    checks.tensor("packed", packed, ("uint8", "int8"), ("...", "n"))
    order = checks.choice("order", order, NibbleOrder)
    return _op("unpack_fp4", packed.view(torch.uint8), str(order), impl)


def _op(name: str, *arguments: Any) -> Tensor:
    result: Tensor = getattr(torch.ops.dsv4, name)(*arguments)
    return result


# Bodies take [n], pack_fp4's takes [pairs, 2].


def _decode_e4m3_body(codes: Tensor) -> Tensor:
    return bits.decode_e4m3(codes.to(torch.int32))


def _decode_e5m2_body(codes: Tensor) -> Tensor:
    return bits.decode_e5m2(codes.to(torch.int32))


def _decode_e8m0_body(codes: Tensor) -> Tensor:
    return bits.decode_e8m0(codes.to(torch.int32))


def _decode_e2m1_body(codes: Tensor) -> Tensor:
    return bits.decode_e2m1(codes.to(torch.int32))


def _encode_e4m3_body(x: Tensor) -> Tensor:
    return bits.encode_e4m3(x).to(torch.uint8)


def _encode_e8m0_body(x: Tensor, *, rounding: str) -> Tensor:
    return bits.encode_e8m0(x, rounding).to(torch.uint8)


def _encode_e2m1_body(x: Tensor, *, ties: str, zero_sign: str) -> Tensor:
    return bits.encode_e2m1(x, ties, zero_sign).to(torch.uint8)


def pack_fp4_body(codes: Tensor, *, order: str) -> Tensor:
    """[pairs, 2] to [pairs]."""
    return bits.pack_pairs(codes, order).view(-1)


def unpack_fp4_body(packed: Tensor, *, order: str) -> Tensor:
    """[n] to [2n]."""
    return bits.unpack_pairs(packed, order)


def _register(name: str, body: Callable[..., Tensor], dtype: torch.dtype, options: str = "", *, inner: int = 1, growth: float = 1) -> None:
    """Define dsv4::NAME with str `options`. A body takes `inner` neighbours together; results are `growth` times as long as their input."""
    names = options.split()

    def shape(x: Tensor) -> tuple[int, ...]:
        if growth == 1:
            return tuple(x.shape)
        return (*x.shape[:-1], x.shape[-1] * 2 if growth > 1 else x.shape[-1] // 2)

    def fake(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x.new_empty(shape(x), dtype=dtype)

    def call(run: Callable[..., Tensor], x: Tensor, *values: str) -> Tensor:
        if x.numel() == 0:
            return fake(x)
        flat = x.reshape(-1) if inner == 1 else x.reshape(-1, inner)
        if flat.storage_offset() % inner or flat.data_ptr() % inner:  # neighbours are read as one word
            flat = flat.clone()
        return run(body, flat, **dict(zip(names, values, strict=True))).view(shape(x))

    ops.define(name, f"(Tensor x{''.join(f', str {option}' for option in names)}) -> Tensor", fake)
    dispatch.register(
        f"codecs.{name}",
        Implementation("inductor", any_device, any_arguments, partial(call, run_compiled)),
        Implementation("eager", any_device, any_arguments, partial(call, run_eagerly)),
    )


_register("decode_e4m3", _decode_e4m3_body, torch.float32)
_register("decode_e5m2", _decode_e5m2_body, torch.float32)
_register("decode_e8m0", _decode_e8m0_body, torch.float32)
_register("decode_e2m1", _decode_e2m1_body, torch.float32)
_register("encode_e4m3", _encode_e4m3_body, torch.uint8)
_register("encode_e8m0", _encode_e8m0_body, torch.uint8, "rounding")
_register("encode_e2m1", _encode_e2m1_body, torch.uint8, "ties zero_sign")
_register("pack_fp4", pack_fp4_body, torch.uint8, "order", inner=2, growth=0.5)
_register("unpack_fp4", unpack_fp4_body, torch.uint8, "order", growth=2)
