"""The emulator of PTX (tests/csrc/ptx): integers and bits, against Python's whole numbers."""

import numpy as np
import pytest
from ptx_emulator import compute, dtype_of

WIDTHS = {"u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64}
every_type = pytest.mark.parametrize("kind", WIDTHS)


def wrapped(number, kind):
    """The number of that type with the same low bits."""
    bits = int(kind[1:])
    number &= (1 << bits) - 1
    return number - (1 << bits) if kind[0] == "s" and number >> (bits - 1) else number


def numbers(kind, n=40, seed=0):
    """The ends of the range, small numbers and random ones, each beside each: two lists of n * n."""
    bits = WIDTHS[kind]
    draw = np.random.default_rng(seed)
    some = [0, 1, -1, 2, 7, 1 << (bits - 1), (1 << (bits - 1)) - 1, 255, 1 << (bits // 2)]
    some += [int.from_bytes(draw.bytes(8), "little") >> int(draw.integers(60)) for _ in range(n)]
    some = [wrapped(one, kind) for one in some]
    return [a for a in some for _ in some], some * len(some)


def check(code, formula, kind, out=None, operands=None):
    """formula: of Python's whole numbers; its low bits count."""
    operands = operands or numbers(kind)
    out = out or kind
    result = compute(code, *operands, types=kind, out=out)
    expected = [wrapped(formula(*each), out) for each in zip(*operands, strict=True)]
    np.testing.assert_array_equal(result, np.array(expected, dtype_of(out)))


@every_type
def test_sums_and_products_wrap(kind):
    check(f"add.{kind} %d, %a, %b;", lambda a, b: a + b, kind)
    check(f"sub.{kind} %d, %a, %b;", lambda a, b: a - b, kind)
    check(f"mul.lo.{kind} %d, %a, %b;", lambda a, b: a * b, kind)
    check(f"mul.hi.{kind} %d, %a, %b;", lambda a, b: a * b >> WIDTHS[kind], kind)


@every_type
def test_products_are_added(kind):
    bits = WIDTHS[kind]
    check(f"mad.lo.{kind} %d, %a, %b, %a;", lambda a, b: a * b + a, kind)
    check(f"mad.hi.{kind} %d, %a, %b, %b;", lambda a, b: (a * b >> bits) + b, kind)
    if bits < 64:
        wide = f"{kind[0]}{2 * bits}"
        check(f"mul.wide.{kind} %d, %a, %b;", lambda a, b: a * b, kind, wide)
        code = f".reg .{wide} %w;\nmul.wide.{kind} %w, %a, %a;\nmad.wide.{kind} %d, %a, %b, %w;"
        check(code, lambda a, b: a * b + a * a, kind, wide)


@every_type
def test_quotients_are_cut_towards_zero(kind):
    def quotient(a, b):
        return abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)

    pairs = [(a, b) for a, b in zip(*numbers(kind), strict=True) if b != 0]
    operands = [list(each) for each in zip(*pairs, strict=True)]
    check(f"div.{kind} %d, %a, %b;", quotient, kind, operands=operands)
    check(f"rem.{kind} %d, %a, %b;", lambda a, b: a - quotient(a, b) * b, kind, operands=operands)


def test_division_by_zero_ends_nothing():
    assert compute("div.u32 %d, %a, %b;", [7], [0], types="u32").tolist() == [0xFFFFFFFF]
    assert compute("rem.s64 %d, %a, %b;", [-7], [0], types="s64").tolist() == [-7]


@every_type
def test_order_and_sign(kind):
    check(f"min.{kind} %d, %a, %b;", min, kind)
    check(f"max.{kind} %d, %a, %b;", max, kind)
    if kind[0] == "s":
        check(f"neg.{kind} %d, %a;", lambda a, _: -a, kind)
        check(f"abs.{kind} %d, %a;", lambda a, _: abs(a), kind)


@pytest.mark.parametrize("bits", [32, 64])
def test_sums_of_several_words(bits):
    """add.cc and addc give the sum of two words, sub.cc and subc the difference."""
    kind = f"u{bits}"
    for first, second, formula in (
        ("add.cc", "addc", lambda a, b: (a << bits | b) + (b << bits | a)),
        ("sub.cc", "subc", lambda a, b: (a << bits | b) - (b << bits | a)),
    ):
        code = f".reg .b{bits} %low;\n{first}.{kind} %low, %b, %a;\n{second}.{kind} %d, %a, %b;"
        check(code, lambda a, b, formula=formula: formula(a, b) >> bits, kind)
    # The carry of the first word runs through a second one whose bits are all set, or all clear.
    code = f".reg .b{bits} %x, %y;\nnot.b{bits} %y, %b;\n"
    sums = f"add.cc.{kind} %x, %a, %a;\naddc.cc.{kind} %x, %b, %y;\naddc.{kind} %d, 0, 0;"
    check(code + sums, lambda a, _: a >> (bits - 1), kind)
    differences = f"sub.cc.{kind} %x, 0, %a;\nsubc.cc.{kind} %x, %b, %b;\nsubc.{kind} %d, 0, 0;"
    check(code + differences, lambda a, _: -(a != 0), kind)


@every_type
def test_shifts_beyond_the_width(kind):
    bits, (some, _) = WIDTHS[kind], numbers(kind)
    amounts = [0, 1, 5, bits - 1, bits, bits + 1, 255, 2**31, 2**32 - 1]
    operands = [[a for a in some for _ in amounts], amounts * len(some)]
    for code, formula in (
        (f"shl.b{bits} %d, %a, %b;", lambda a, n: a << min(n, bits)),
        (f"shr.{kind} %d, %a, %b;", lambda a, n: a >> min(n, bits)),
    ):
        result = compute(code, *operands, types=[kind, "u32"])
        expected = [wrapped(formula(*each), kind) for each in zip(*operands, strict=True)]
        np.testing.assert_array_equal(result, np.array(expected, dtype_of(kind)))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic(bits):
    kind = f"u{bits}"
    check(f"and.b{bits} %d, %a, %b;", lambda a, b: a & b, kind)
    check(f"or.b{bits} %d, %a, %b;", lambda a, b: a | b, kind)
    check(f"xor.b{bits} %d, %a, %b;", lambda a, b: a ^ b, kind)
    check(f"not.b{bits} %d, %a;", lambda a, _: ~a, kind)
    check(f"cnot.b{bits} %d, %a;", lambda a, _: a == 0, kind)


@pytest.mark.parametrize("bits", [32, 64])
def test_counts_of_bits(bits):
    kind = f"u{bits}"
    check(f"popc.b{bits} %d, %a;", lambda a, _: a.bit_count(), kind, "u32")
    check(f"clz.b{bits} %d, %a;", lambda a, _: bits - a.bit_length(), kind, "u32")
    check(f"brev.b{bits} %d, %a;", lambda a, _: int(f"{a:0{bits}b}"[::-1], 2), kind)
    for sign in "us":

        def highest(a):
            return (~a if a < 0 else a).bit_length() - 1  # -1: none

        check(f"bfind.{sign}{bits} %d, %a;", lambda a, _: highest(a), f"{sign}{bits}", "u32")
        code = f"bfind.shiftamt.{sign}{bits} %d, %a;"
        check(
            code,
            lambda a, _: -1 if highest(a) < 0 else bits - 1 - highest(a),
            f"{sign}{bits}",
            "u32",
        )


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_fields(kind):
    """bfe and bfi at every place and length, beyond the word too."""
    bits = WIDTHS[kind]
    some = [wrapped(0x8123456789ABCDEF * 3**k, kind) for k in range(4)]
    places = [0, 1, 7, bits // 2, bits - 1, bits, bits + 3, 255]
    cases = [(a, p, n) for a in some for p in places for n in places]
    a, place, length = ([*each] for each in zip(*cases, strict=True))

    def extracted(a, place, length):
        pattern = a & ((1 << bits) - 1)
        sign = kind[0] == "s" and length > 0 and pattern >> min(place + length - 1, bits - 1) & 1
        high = ~((1 << length) - 1) if sign else 0
        extended = pattern | (-1 << bits if sign else 0)
        return extended >> place & ((1 << length) - 1) | high

    result = compute(f"bfe.{kind} %d, %a, %b, %c;", a, place, length, types=[kind, "u32", "u32"])
    expected = [wrapped(extracted(*each), kind) for each in cases]
    np.testing.assert_array_equal(result, np.array(expected, dtype_of(kind)))

    def inserted(a, place, length):
        field = ((1 << length) - 1) << place
        return ~a & ~field | a << place & field  # into the opposite of a

    code = f".reg .b{bits} %base;\nnot.b{bits} %base, %a;\nbfi.b{bits} %d, %a, %base, %b, %c;"
    result = compute(code, a, place, length, types=[kind, "u32", "u32"])
    expected = [wrapped(inserted(*each), kind) for each in cases]
    np.testing.assert_array_equal(result, np.array(expected, dtype_of(kind)))


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_masks(mode):
    """bmsk at every place and length; beyond the word, .wrap takes the low five bits."""
    places = [0, 1, 7, 31, 32, 33, 64, 255, 2**32 - 1]
    cases = [(place, length) for place in places for length in places]

    def mask(place, length):
        if mode == "wrap":
            place, length = place & 31, length & 31
        return ((1 << min(length, 32)) - 1) << place if place < 32 else 0

    result = compute(f"bmsk.{mode}.b32 %d, %a, %b;", *zip(*cases, strict=True), types="u32")
    expected = [wrapped(mask(*each), "u32") for each in cases]
    np.testing.assert_array_equal(result, np.array(expected, np.uint32))


def test_bytes_are_permuted():
    def permuted(a, b, selectors):
        eight, result = (b << 32 | a).to_bytes(8, "little"), []
        for i in range(4):
            selector = selectors >> 4 * i & 15
            byte = eight[selector & 7]
            result.append(byte if selector < 8 else 255 * (byte >> 7))
        return int.from_bytes(bytes(result), "little")

    cases = [(0x80FF7F01, 0x12B456C8, s) for s in (0x3210, 0x7654, 0xFEDC, 0x0819, 0x9B3A)]
    result = compute("prmt.b32 %d, %a, %b, %c;", *zip(*cases, strict=True), types="u32")
    assert result.tolist() == [permuted(*each) for each in cases]


def test_funnel_shifts():
    """The 64 bits of b:a are shifted; the high word, or the low one, is the result."""
    low, high = 0x89ABCDEF, 0x01234567
    for amount in (0, 1, 12, 31, 32, 33, 100):
        both = high << 32 | low
        for mode, n in (("wrap", amount & 31), ("clamp", min(amount, 32))):
            for side, expected in (("l", both << n >> 32), ("r", both >> n)):
                code = f"shf.{side}.{mode}.b32 %d, %a, %b, %c;"
                result = compute(code, [low], [high], [amount], types="u32")
                assert result[0] == expected & 0xFFFFFFFF, (side, mode, amount)


def test_logic_by_a_table():
    a, b, c = numbers("u32")[0][:3000:700], [0x0F0F1234] * 3, [0x33335555] * 3
    for table, formula in (
        (0x80, lambda a, b, c: a & b & c),
        (0x96, lambda a, b, c: a ^ b ^ c),
        (0xCA, lambda a, b, c: a & b | ~a & c),
    ):
        result = compute(f"lop3.b32 %d, %a, %b, %c, {table};", a[:3], b, c, types="u32")
        expected = [formula(*each) & 0xFFFFFFFF for each in zip(a[:3], b, c, strict=True)]
        assert result.tolist() == expected


@every_type
def test_comparisons(kind):
    names = {"eq": "__eq__", "ne": "__ne__", "lt": "__lt__", "le": "__le__", "gt": "__gt__"}
    for name, method in {**names, "ge": "__ge__"}.items():
        code = f"setp.{name}.{kind} %p, %a, %b;\nselp.b32 %d, 1, 0, %p;"
        check(code, lambda a, b, method=method: getattr(a, method)(b), kind, "u32")
    if kind[0] == "u":
        for name, method in (
            ("lo", "__lt__"),
            ("ls", "__le__"),
            ("hi", "__gt__"),
            ("hs", "__ge__"),
        ):
            code = f"setp.{name}.{kind} %p, %a, %b;\nselp.b32 %d, 1, 0, %p;"
            check(code, lambda a, b, method=method: getattr(a, method)(b), kind, "u32")


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_comparisons_with_a_third_operand(name):
    """p is (a < b) op c, q is !(a < b) op c."""
    combine = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}[name]
    code = f""".reg .pred %c, %r;
.reg .b32 %u, %v, %w;
setp.eq.s32 %c, %a, 7;
setp.lt.{name}.s32 %p|%q, %a, %b, !%c;
selp.b32 %u, 1, 0, %p;
selp.b32 %v, 2, 0, %q;
{name}.pred %r, %p, %c;
not.pred %r, %r;
mov.pred %p, %r;
selp.b32 %w, 4, 0, %p;
or.b32 %d, %u, %v;
or.b32 %d, %d, %w;"""

    def formula(a, b):
        p, q = combine(int(a < b), int(a != 7)), combine(int(a >= b), int(a != 7))
        return p | q << 1 | (1 - combine(p, int(a == 7))) << 2

    check(code, formula, "s32")


def test_guards_leave_other_lanes_alone():
    code = """mov.u32 %d, 5;
setp.gt.s32 %p, %a, 10;
@%p add.s32 %d, %a, %b;
@!%p sub.s32 %d, %a, 1;"""
    check(code, lambda a, b: a + b if a > 10 else a - 1, "s32")
