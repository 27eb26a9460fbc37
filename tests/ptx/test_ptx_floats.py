"""The emulator of PTX (tests/csrc/ptx): floats and conversions, against torch, numpy and fractions."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from ptx_emulator import HEAD, Program, compute, dtype_of, kernel

NAN32 = 0x7FFFFFFF  # the only NaN that arithmetic of f32 makes
SOME = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, 1e30, -1e30]
SOME += [math.inf, -math.inf, math.nan, 16777217.0, 0.1, -7.3, 2.5, 1e-30, 123456.789]


def pairs(kind):
    some = np.array(SOME, dtype_of(kind))
    return np.repeat(some, len(some)), np.tile(some, len(some))


def bits(numbers):
    return numbers.view("uint32" if numbers.dtype.itemsize == 4 else "uint64")


def assert_same(result, expected):
    """Equal bits; a NaN of f32 is the canonical one."""
    expected = np.where(np.isnan(expected), np.array(math.nan, expected.dtype), expected)
    is_nan = np.isnan(expected)
    assert (np.isnan(result) == is_nan).all()
    assert (bits(result)[~is_nan] == bits(expected)[~is_nan]).all()
    if result.dtype == np.float32:
        assert (bits(result)[is_nan] == NAN32).all()


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_arithmetic_rounds_to_nearest(name, kind):
    a, b = pairs(kind)
    formula = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]
    with np.errstate(all="ignore"):
        expected = formula(a, b)
    assert_same(compute(f"{name}.rn.{kind} %d, %a, %b;", a, b, types=kind), expected)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_roots_and_reciprocals(kind):
    a, _ = pairs(kind)
    with np.errstate(all="ignore"):
        assert_same(compute(f"sqrt.rn.{kind} %d, %a;", a, types=kind), np.sqrt(a))
        assert_same(compute(f"rcp.rn.{kind} %d, %a;", a, types=kind), 1 / a)


def test_fma_rounds_once():
    draw = np.random.default_rng(3)
    a, b = (draw.standard_normal(500).astype(np.float32) for _ in range(2))
    c = -(a * b)  # what is left is the rounding of the product
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    expected = np.array([float(one) for one in exact]).astype(np.float32)  # both fit: 48 bits
    result = compute("fma.rn.f32 %d, %a, %b, %c;", a, b, c, types="f32")
    np.testing.assert_array_equal(result, expected)
    assert (result != 0).any()
    separate = compute("mul.rn.f32 %d, %a, %b;\nadd.rn.f32 %d, %d, %c;", a, b, c, types="f32")
    assert (separate == 0).all(), "no product and sum become one"


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_least_and_greatest(kind):
    """Of a number and NaN the number; -0 is less than +0; .NaN hands NaN on."""
    a, b = pairs(kind)
    for name, formula, handing_on in (("min", np.fmin, np.minimum), ("max", np.fmax, np.maximum)):
        expected = formula(a, b)
        zeros = (a == 0) & (b == 0)
        signs = np.signbit(a) | np.signbit(b) if name == "min" else np.signbit(a) & np.signbit(b)
        expected[zeros] = np.where(signs, -0.0, 0.0)[zeros]
        assert_same(compute(f"{name}.{kind} %d, %a, %b;", a, b, types=kind), expected)
        result = compute(f"{name}.NaN.{kind} %d, %a, %b;", a, b, types=kind)
        assert (np.isnan(result) == np.isnan(handing_on(a, b))).all()


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_signs(kind):
    a, b = pairs(kind)
    top = np.array(1 << (8 * a.dtype.itemsize - 1), bits(a).dtype)
    for code, expected in (
        (f"neg.{kind} %d, %a;", bits(a) ^ top),
        (f"abs.{kind} %d, %a;", bits(a) & ~top),
        (f"copysign.{kind} %d, %a, %b;", bits(b) & ~top | bits(a) & top),
    ):
        np.testing.assert_array_equal(bits(compute(code, a, b, types=kind)), expected)


def test_comparisons_of_nan():
    a, b = pairs("f32")
    with np.errstate(all="ignore"):
        unordered = np.isnan(a) | np.isnan(b)
        plain = {
            "eq": a == b,
            "ne": (a != b) & ~unordered,
            "lt": a < b,
            "le": a <= b,
            "gt": a > b,
            "ge": a >= b,
        }
    expected = {**plain, **{f"{name}u": each | unordered for name, each in plain.items()}}
    expected |= {"num": ~unordered, "nan": unordered}
    for name, each in expected.items():
        code = f"setp.{name}.f32 %p|%q, %a, %b;\nselp.b32 %d, 1, 0, %p;\n@%q or.b32 %d, %d, 2;"
        result = compute(code, a, b, types="f32", out="u32")
        np.testing.assert_array_equal(result, np.where(each, 1, 2), name)


WHOLE = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"]
ROUNDED = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("source", ["f32", "f64"])
def test_floats_become_whole_numbers(source, kind, name):
    """Clamped to the range. NaN: 0 up to 32 bits, else the highest bit alone."""
    some = [*SOME, 0.5, 1.5, -0.5, -1.5, 254.5, 255.5, 127.5, -128.5, 65535.5, 2.0**31, -(2.0**31)]
    some += [2.0**32, 2.0**63, -(2.0**63), 2.0**64, 4294967040.0]
    a = np.array(some, dtype_of(source))
    limits = np.iinfo(dtype_of(kind))

    def whole(number):
        if math.isnan(number):
            wide = source == "f64" or kind[1:] == "64"
            return (limits.min if kind[0] == "s" else limits.max // 2 + 1) if wide else 0
        if math.isinf(number):
            return limits.max if number > 0 else limits.min
        return min(max(ROUNDED[name](number), limits.min), limits.max)

    expected = np.array([whole(float(one)) for one in a], dtype_of(kind))
    result = compute(f"cvt.{name}.{kind}.{source} %d, %a;", a, types=source, out=kind)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("source", WHOLE)
def test_whole_numbers_become_floats(source):
    limits = np.iinfo(dtype_of(source))
    some = [0, 1, 100, limits.max, limits.min, limits.max - 1, limits.max // 2 + 1, limits.max // 3]
    some += [one for one in (2**24 + 1, 2**24 + 3, 2**53 + 1, 2**62 + 2**37) if one <= limits.max]
    a = np.array(some, dtype_of(source))
    for kind in ("f32", "f64"):
        result = compute(f"cvt.rn.{kind}.{source} %d, %a;", a, types=source, out=kind)
        np.testing.assert_array_equal(result, a.astype(dtype_of(kind)))


@pytest.mark.parametrize("source", WHOLE)
@pytest.mark.parametrize("kind", WHOLE)
def test_whole_numbers_are_cut_or_clamped(source, kind):
    limits, to = np.iinfo(dtype_of(source)), np.iinfo(dtype_of(kind))
    some = [0, 1, 200, -1, -200, limits.max, limits.min, 40000, 2**40 + 5]
    some = [one for one in some if limits.min <= one <= limits.max]
    cut = compute(f"cvt.{kind}.{source} %d, %a;", some, types=source, out=kind)
    np.testing.assert_array_equal(cut, np.array(some, dtype_of(source)).astype(dtype_of(kind)))
    clamped = compute(f"cvt.sat.{kind}.{source} %d, %a;", some, types=source, out=kind)
    assert clamped.tolist() == [min(max(one, to.min), to.max) for one in some]


def test_narrow_results_are_extended():
    """cvt and ld write whole registers, by the sign of their type."""
    result = compute("cvt.s8.s32 %d, %a;", [200, 100], types="s32")
    assert result.tolist() == [-56, 100]
    result = compute("cvt.u8.s32 %d, %a;", [-1, 300], types="s32")
    assert result.tolist() == [255, 44]


def test_floats_of_other_widths():
    a, _ = pairs("f64")
    a = np.concatenate([a, [1 + 2**-24, 1 + 3 * 2**-24, 1e39, 1e-46]])
    with np.errstate(all="ignore"):
        assert_same(
            compute("cvt.rn.f32.f64 %d, %a;", a, types="f64", out="f32"), a.astype(np.float32)
        )
        narrow = a.astype(np.float32)
    assert_same(
        compute("cvt.f64.f32 %d, %a;", narrow, types="f32", out="f64"), narrow.astype(np.float64)
    )
    for name, formula in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        assert_same(compute(f"cvt.{name}.f32.f32 %d, %a;", narrow, types="f32"), formula(narrow))
    saturated = np.where(np.isnan(narrow), 0, np.clip(narrow, 0, 1)).astype(np.float32)
    result = compute("cvt.sat.f32.f32 %d, %a;", narrow, types="f32")
    np.testing.assert_array_equal(result, saturated)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_floats_of_16_bits(kind, dtype):
    """Every pattern becomes an f32; f32 is rounded to nearest even, against torch."""
    patterns = np.arange(65536, dtype=np.uint16)
    expected = torch.from_numpy(patterns.view(np.int16)).view(dtype).float().numpy()
    out = compute(f"cvt.f32.{kind} %d, %a;", patterns, types="u16", out="f32")
    assert_same(out, expected)
    draw = np.random.default_rng(4)
    a = np.concatenate(
        [draw.integers(2**32, size=4000, dtype=np.uint32).view(np.float32), expected]
    )
    middle = bits(expected[np.isfinite(expected)]).astype(np.int64) + (
        0x1000 if kind == "f16" else 0x8000
    )
    a = np.concatenate([a, middle.astype(np.uint32).view(np.float32)])
    rounded = torch.from_numpy(a).to(dtype).view(torch.int16).numpy().view(np.uint16)
    result = compute(f"cvt.rn.{kind}.f32 %d, %a;", a, types="f32", out="u16")
    np.testing.assert_array_equal(result, np.where(np.isnan(a), 0x7FFF, rounded))
    both = compute(f"cvt.rn.{kind}x2.f32 %d, %a, %b;", a, a[::-1], types="f32", out="u32")
    np.testing.assert_array_equal(both, result.astype(np.uint32) << 16 | result[::-1])


def test_numbers_in_the_text():
    text = kernel(
        """st.f32 [%out], 0fC0490FDB;
st.f64 [%out+8], 0d400921FB54442D18;
st.u32 [%out+16], -0x10;
st.u64 [%out+24], 4294967295U;
st.u32 [%out+32], 017;
st.u32 [%out+36], WARP_SZ;"""
    )
    out = np.zeros(40, np.uint8)
    Program(HEAD + text).run("kernel", 1, 1, [out])
    expected = struct.pack("<fxxxxdIxxxxQII", -math.pi, math.pi, 2**32 - 16, 2**32 - 1, 15, 32)
    assert out.tobytes() == expected
