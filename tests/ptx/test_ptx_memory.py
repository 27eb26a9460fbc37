"""The emulator of PTX (tests/csrc/ptx): memory of all kinds, atomic functions, and wrong addresses."""

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator import SCHEDULES, Program, compute, kernel, refuse_range

DATA = np.arange(64, dtype=np.uint8) * 3 + 100


def test_loads_extend_by_their_sign():
    registers = ["b64 %x"]
    for kind, dtype in (
        *(("u8", "u1"), ("s8", "i1"), ("u16", "u2"), ("s16", "i2")),
        *(("u32", "u4"), ("s32", "i4"), ("u64", "u8"), ("b8", "u1")),
    ):
        body = f"ld.global.{kind} %x, [%data+8];\nst.global.u64 [%out], %x;"
        out = np.zeros(1, np.uint64)
        Program(kernel(body, ("data", "out"), registers)).run("kernel", 1, 1, [DATA, out])
        assert out[0] == np.uint64(int(DATA[8:].view(dtype)[0]) & 0xFFFFFFFFFFFFFFFF)


def test_stores_write_their_bytes_only():
    for bits in (8, 16, 32, 64):
        body = f"mov.b64 %x, 0x1122334455667788;\nst.global.u{bits} [%out+8], %x;"
        out = np.full(24, 0xEE, np.uint8)
        Program(kernel(body, ("out",), ["b64 %x"])).run("kernel", 1, 1, [out])
        expected = bytes.fromhex("8877665544332211")[: bits // 8]
        assert out.tobytes() == b"\xee" * 8 + expected + b"\xee" * (16 - bits // 8)


def test_vectors():
    body = """ld.global.v4.u8 {%a, %b, _, %c}, [%data+4];
ld.global.nc.L1::no_allocate.v2.u64 {%x, %y}, [%data+16];
st.global.v2.u64 [%out], {%y, %x};
st.global.v4.b16 [%out+16], {%c, %b, %a, 7};"""
    out = np.zeros(24, np.uint8)
    program = Program(kernel(body, ("data", "out"), ["b16 %a, %b, %c", "b64 %x, %y"]))
    given = np.zeros(80, np.uint8)
    start = -given.ctypes.data % 16
    given = given[start : start + 64]
    given[:] = DATA
    aligned = np.zeros(48, np.uint8)
    start = -aligned.ctypes.data % 16
    out = aligned[start : start + 24]
    program.run("kernel", 1, 1, [given, out])
    assert out[:16].tobytes() == DATA[24:32].tobytes() + DATA[16:24].tobytes()
    assert out[16:].view(np.uint16).tolist() == [DATA[7], DATA[5], DATA[4], 7]


def test_a_load_may_overwrite_its_address():
    body = (
        "ld.global.v2.u64 {%data, %x}, [%data];\nadd.s64 %x, %x, %data;\nst.global.u64 [%out], %x;"
    )
    pair = np.zeros(4, np.uint64)
    pair = pair[(pair.ctypes.data % 16) // 8 :][:2]
    pair[:] = 5, 6
    out = np.zeros(1, np.uint64)
    Program(kernel(body, ("data", "out"), ["b64 %x"])).run("kernel", 1, 1, [pair, out])
    assert out[0] == 11


def test_words_are_split_and_joined():
    result = compute(
        ".reg .b32 %x, %y;\nmov.b64 {%x, %y}, %a;\nmov.b64 %d, {%y, %x};",
        [0x1122334455667788],
        types="u64",
    )
    assert result[0] == 0x5566778811223344
    code = ".reg .b16 %x<4>;\nmov.b64 {%x0, %x1, %x2, %x3}, %a;\nmov.b64 %d, {%x3, %x2, %x1, %x0};"
    assert compute(code, [0x1122334455667788], types="u64")[0] == 0x7788556633441122
    code = ".reg .b16 %x, %y;\nmov.b32 {%x, %y}, %a;\nmov.b32 %d, {%y, %x};"
    assert compute(code, [0x12345678], types="u32")[0] == 0x56781234


PARAMETERS = """.visible .entry kernel(
  .param .u8 p0,
  .param .align 8 .b8 p1[12],
  .param .f32 p2,
  .param .u64 .ptr .global .align 1 p3
)
.maxntid 64, 2, 1
{
.reg .b64 %out, %x, %at;
.reg .b32 %y, %z;
ld.param.u64 %out, [p3];
ld.param.u8 %y, [p0];
st.global.u32 [%out], %y;
ld.param.u32 %y, [p1+8];
st.global.u32 [%out+4], %y;
ld.param.u32 %y, [p2];
st.global.u32 [%out+8], %y;
mov.b64 %x, p1;
ld.param.u32 %y, [%x+4];
st.global.u32 [%out+12], %y;
cvta.param.u64 %at, %x;
ld.u32 %y, [%at];
st.global.u32 [%out+16], %y;
ld.param.u32 %y, [p3+8];
ret;
}
"""


def test_parameters():
    """Each stands at its alignment; reads beyond the last one are refused."""
    out, words = np.zeros(5, np.uint32), np.array([7, 8, 9], np.uint32)
    program = Program(PARAMETERS.replace("ld.param.u32 %y, [p3+8];\n", ""))
    arguments = [np.uint8(200), words.view("V12")[0], np.float32(1.5), out]
    program.run("kernel", 1, 1, arguments)
    assert out.tolist() == [200, 9, int(np.float32(1.5).view(np.uint32)), 8, 7]
    assert program.facts("kernel") == [1, 1, 1, 128, 0, 0, 32]
    launched = Program(PARAMETERS).launch("kernel", 1, 1, arguments)
    assert launched.error == 700
    assert "expected 4 bytes within the 32 of the parameters, got offset 0x20" in launched.report


SHARED = """.shared .align 4 .b8 odd[5];
.shared .align 8 .b64 words[32];
.reg .b32 %x, %y, %at, %lane;
.reg .b64 %wide, %to;
mov.u32 %lane, %laneid;
mov.u32 %at, words;
mad.lo.s32 %at, %lane, 8, %at;
cvt.u64.u32 %wide, %lane;
st.shared.u64 [%at], %wide;
st.shared.u8 [odd+4], 77;
bar.warp.sync -1;
xor.b32 %x, %lane, 1;
mov.u32 %at, words;
mad.lo.s32 %at, %x, 8, %at;
ld.shared.u32 %y, [%at];
cvt.u64.u32 %wide, %at;
cvta.shared.u64 %wide, %wide;
ld.u32 %at, [%wide];
add.u32 %y, %y, %at;
cvta.to.shared.u64 %wide, %wide;
ld.shared.u32 %at, [%wide];
add.u32 %y, %y, %at;
ld.shared.u8 %x, [odd+4];
add.u32 %y, %y, %x;
mad.wide.s32 %to, %i, 4, %out;
st.global.u32 [%to], %y;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shared_memory(schedule):
    out = np.zeros(96, np.uint32)
    program = Program(kernel(SHARED))
    program.run("kernel", 3, 32, [out], SCHEDULE=schedule)
    assert out.tolist() == [3 * (lane ^ 1) + 77 for lane in range(32)] * 3
    assert program.facts("kernel")[4] == 8 + 256


def test_shared_memory_that_a_launch_adds():
    text = ".extern .shared .align 16 .b8 added[];\n" + kernel(
        """.shared .align 4 .b8 own[4];
.reg .b32 %x, %at;
st.shared.u32 [own], 5;
mov.u32 %at, added;
st.shared.u32 [added+60], %at;
ld.shared.u32 %x, [%at+60];
st.global.u32 [%out], %x;
ld.shared.u32 %x, [own];
st.global.u32 [%out+4], %x;"""
    )
    out = np.zeros(2, np.uint32)
    program = Program(text)
    program.run("kernel", 1, 1, [out], shared_bytes=64)
    assert out.tolist() == [16, 5]
    launched = program.launch("kernel", 1, 1, [out], shared_bytes=48)
    assert launched.error == 700
    assert "expected 4 bytes within the 64 of shared memory, got offset 0x4c" in launched.report


LOCAL = """.local .align 8 .b8 own[16];
.reg .b32 %x, %y;
.reg .b64 %at, %to;
mov.b64 %at, own;
cvta.local.u64 %at, %at;
st.local.u32 [own+4], %i;
st.u32 [%at+8], %i;
bar.sync 0;
ld.u32 %x, [%at+4];
ld.local.u32 %y, [own+8];
mad.lo.s32 %x, %x, 1000, %y;
mad.wide.s32 %to, %i, 4, %out;
st.global.u32 [%to], %x;
"""


def test_local_memory():
    out = np.zeros(64, np.uint32)
    Program(kernel(LOCAL)).run("kernel", 1, 64, [out])
    assert out.tolist() == [1001 * lane for lane in range(64)]


def test_variables():
    text = """.global .align 8 .u32 table[3] = {4, 0x10, 6};
.const .align 4 .b8 bytes[4] = {1, 2, 3, 255};
.visible .global .u64 counter;
""" + kernel(
        """.reg .b32 %x, %y;
.reg .b64 %at;
mov.u64 %at, table+4;
ld.global.u32 %x, [%at];
ld.const.s8 %y, [bytes+3];
add.s32 %x, %x, %y;
st.global.u32 [%out], %x;
atom.global.add.u64 %at, [counter], 1;"""
    )
    program, out = Program(text), np.zeros(1, np.uint32)
    for _ in range(3):
        program.run("kernel", 2, 32, [out])
    assert out[0] == 15
    assert program.variable("counter", np.uint64).tolist() == [192]
    assert program.variable("table", np.uint32).tolist() == [4, 16, 6]


ATOMICS = {
    "add": lambda old, b, _: old + b,
    "min": lambda old, b, _: min(old, b),
    "max": lambda old, b, _: max(old, b),
    "and": lambda old, b, _: old & b,
    "or": lambda old, b, _: old | b,
    "xor": lambda old, b, _: old ^ b,
    "exch": lambda old, b, _: b,
    "cas": lambda old, b, c: c if old == b else old,
    "inc": lambda old, b, _: 0 if old >= b else old + 1,
    "dec": lambda old, b, _: b if old == 0 or old > b else old - 1,
}
TYPED = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
}


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomic_functions(name, space):
    for kind in TYPED.get(name, ("u32",) if name in ("inc", "dec") else ("b32", "b64")):
        check_atomic(name, kind, space)


def check_atomic(name, kind, space):
    bits = int(kind[1:])
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
    prefix = {"global": ".global", "shared": ".shared", "generic": ""}[space]
    address = "word" if space == "shared" else "%memory"
    third = ", %c" if name == "cas" else ""
    body = f""".shared .align 8 .b64 word;
ld.global.b{bits} %b, [%data];
ld.global.b{bits} %c, [%data+8];
ld.global.b{bits} %a, [%memory];
st.shared.b{bits} [word], %a;
atom{prefix}.{name}.{kind} %a, [{address}], %b{third};
st.global.b{bits} [%out], %a;
"""
    if space == "shared":
        body += f"ld.shared.b{bits} %a, [word];\nst.global.b{bits} [%memory], %a;\n"
    program = Program(kernel(body, ("data", "memory", "out"), [f"b{bits} %a, %b, %c"]))
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    for old, b, c in ((5, 3, 9), (3, 3, 9), (0, 7, 1), (most, 1, 0), (least, most, 2), (10, 20, 0)):
        data = np.zeros(2, np.uint64)
        data.view(dtype)[[0, 8 // dtype.itemsize]] = b, c
        memory, out = np.array([old], dtype), np.zeros(1, dtype)
        program.run("kernel", 1, 1, [data, memory, out])
        expected = ATOMICS[name](
            int(np.array(old, dtype)), int(np.array(b, dtype)), int(np.array(c, dtype))
        )
        assert out[0] == old
        mask = (1 << bits) - 1
        assert int(memory[0]) & mask == expected & mask, (name, kind, old, b, c)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_atomic_sum_counts(schedule):
    body = """.reg .f32 %f;
atom.global.add.u32 %x, [%out], 1;
red.global.add.u64 [%out+8], 3;
atom.global.add.f32 %f, [%out+16], 0f3F800000;
mad.wide.u32 %at, %x, 4, %seen;
st.global.u32 [%at], 1;"""
    out, seen = np.zeros(3, np.uint64), np.zeros(320, np.uint32)
    program = Program(kernel(body, ("out", "seen"), ["b32 %x", "b64 %at"]))
    program.run("kernel", 5, 64, [out, seen], SCHEDULE=schedule)
    assert out.view(np.uint32).tolist()[0] == 320
    assert out[1] == 960
    assert out[2:].view(np.float32)[0] == 320
    assert (seen == 1).all(), "each thread read another number"


def test_the_last_writer_is_another_one_by_seed():
    body = "st.global.u32 [%out], %i;"
    program, out, last = Program(kernel(body)), np.zeros(1, np.uint32), set()
    for seed in range(20):
        program.run("kernel", 1, 32, [out], SCHEDULE="random", SEED=seed)
        last.add(int(out[0]))
    assert {0, 31} <= last


def access(kind, offset, space=".global", vector=""):
    code = f"ld{space}{vector}.{kind} {'{%x, %y}' if vector else '%x'}, [%data+{offset}];"
    return Program(kernel(code, ("data",), ["b64 %x, %y"]))


@pytest.mark.parametrize(
    ("kind", "offset", "vector", "multiple"),
    [
        ("u16", 1, "", 2),
        ("u32", 2, "", 4),
        ("u64", 4, "", 8),
        ("u64", 8, ".v2", 16),
        ("u32", 4, ".v2", 8),
    ],
)
def test_misaligned_accesses_are_refused(kind, offset, vector, multiple):
    data = np.zeros(64, np.uint8)
    data = data[-data.ctypes.data % 16 :]
    launched = access(kind, offset, vector=vector).launch("kernel", 1, 1, [data])
    assert launched.error == 716
    assert f"expected an address that is a multiple of {multiple}, got 0x" in launched.report
    assert "block 0, warp 0, lane 0, PTX line" in launched.report
    launched = access(kind, offset, "", vector).launch("kernel", 1, 1, [data])
    assert launched.error == 716, "generic"


@pytest.mark.parametrize("address", [0, 8, 65528, 1 << 47, -8, (1 << 63) + 4096])
def test_what_is_no_address_is_refused(address):
    launched = access("u64", 0).launch("kernel", 1, 1, [address])
    assert launched.error == 700
    assert "expected an address of the device, got 0x" in launched.report


def test_memory_that_is_not_there_is_an_error_of_the_kernel():
    """Read and written, several times: the process goes on, and so do correct launches."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    hole = libc.mmap(None, ctypes.c_size_t(4096), 0, anonymous, -1, ctypes.c_size_t(0))
    body = "setp.eq.u32 %p, %i, 37;\n@%p {0};\nst.global.u32 [%out], 1;"
    for code in (
        "ld.global.u32 %x, [%data+8]",
        "st.global.u32 [%data+8], 1",
        "atom.global.add.u32 %x, [%data+8], 1",
    ):
        registers = ["b32 %x", "pred %p"]
        program = Program(kernel(body.replace("{0}", code), ("data", "out"), registers))
        out = np.zeros(1, np.uint32)
        for _ in range(3):
            launched = program.launch("kernel", 2, 64, [hole, out])
            assert launched.error == 700
            assert f"got {hole + 8:#x}, where no memory is" in launched.report
            assert "warp 1, lane 5" in launched.report
            assert code in launched.report
        program.run("kernel", 1, 32, [hole, out])


def test_memory_of_the_host_is_refused():
    """The stack of the thread that launches, as a kernel would see an argument passed by reference."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    stack = next(line for line in maps if "[stack]" in line)
    address = int(stack.split()[0].split("-")[1], 16) - 65536
    launched = access("u64", 0).launch("kernel", 1, 1, [address])
    assert launched.error == 700
    assert "on the stack of the host" in launched.report


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "ld.shared.u32 %x, [word+4];",
            "expected 4 bytes within the 4 of shared memory, got offset 0x4",
        ),
        ("st.shared.u32 [word+-4], 1;", "got offset 0xfffffffc"),
        (
            "ld.local.u32 %x, [own+16];",
            "expected 4 bytes within the 16 of local memory, got offset 0x10",
        ),
        (
            "cvta.shared.u64 %at, 4;\nld.u32 %x, [%at];",
            "inside the block's shared or the lane's local memory",
        ),
        (
            "cvta.local.u64 %at, 16;\nld.u32 %x, [%at];",
            "inside the block's shared or the lane's local memory",
        ),
        ("cvta.shared.u64 %at, 0;\nld.global.u32 %x, [%at];", "inside the block's shared"),
    ],
)
def test_overruns_of_shared_and_local_memory(code, told):
    head = ".shared .align 4 .b8 word[4];\n.local .align 4 .b8 own[16];\nst.shared.u32 [word], 1;\n"
    program = Program(kernel(head + code, ("out",), ["b32 %x", "b64 %at"]))
    launched = program.launch("kernel", 2, 64, [np.zeros(1)])
    assert launched.error == 700
    assert told in launched.report


def test_ranges_can_be_refused():
    """As the stand-in for the driver refuses memory that is not mapped."""
    data = np.zeros(64, np.uint8)
    refuse_range(data.ctypes.data + 16, data.ctypes.data + 32)
    try:
        access("u64", 8).run("kernel", 1, 1, [data])
        launched = access("u64", 24).launch("kernel", 1, 1, [data])
    finally:
        refuse_range(0, 0)
    assert launched.error == 700
    assert "read: a refused range" in launched.report
    access("u64", 24).run("kernel", 1, 1, [data])


def test_nothing_written_is_not_zero():
    """Registers, shared and local memory begin with patterns."""
    body = """.shared .align 4 .b8 word[4];
.local .align 4 .b8 own[4];
.reg .b32 %never;
st.global.u32 [%out], %never;
ld.shared.u32 %x, [word];
st.global.u32 [%out+4], %x;
ld.local.u32 %x, [own];
st.global.u32 [%out+8], %x;"""
    program, out = Program(kernel(body, ("out",), ["b32 %x"])), np.zeros(3, np.uint32)
    for _ in range(2):
        program.run("kernel", 1, 1, [out])
        assert out.tolist() == [0xCDCDCDCD, 0xA5A5A5A5, 0xB7B7B7B7]
