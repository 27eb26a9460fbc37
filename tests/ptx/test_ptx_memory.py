"""The emulator of PTX (tests/csrc/ptx): wrong addresses, and memory that nothing was written to."""

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator import Program, kernel, refuse_range


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
