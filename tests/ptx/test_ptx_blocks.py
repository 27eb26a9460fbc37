"""The emulator of PTX (tests/csrc/ptx): blocks, grids and barriers."""

import numpy as np
import pytest
from ptx_emulator import SCHEDULES, Program, kernel

REVERSE = """.shared .align 4 .b8 words[1024];
.reg .b32 %x, %at;
.reg .b64 %to;
mov.u32 %x, %tid.x;
shl.b32 %at, %x, 2;
st.shared.u32 [%at], %i;
{0}
mov.u32 %at, %ntid.x;
sub.u32 %at, %at, %x;
shl.b32 %at, %at, 2;
ld.shared.u32 %x, [%at+-4];
mad.wide.u32 %to, %i, 4, %out;
st.global.u32 [%to], %x;
"""


def test_without_the_barrier_threads_read_too_early():
    program = Program(kernel(REVERSE.replace("{0}", "")))
    out = np.zeros(150, np.uint32)
    program.run("kernel", 1, 150, [out])
    assert 0xA5A5A5A5 in out


def refused(body, error, block=64, **environment):
    program = Program(kernel(body, registers=["pred %p", "b32 %x"]))
    for schedule in SCHEDULES:
        launched = program.launch(
            "kernel", 2, block, [np.zeros(1)], SCHEDULE=schedule, **environment
        )
        assert launched.error == error, launched
    return launched.report


def test_wrong_barriers_are_refused():
    two = "setp.lt.u32 %p, %i, 32;\n@%p bra ELSE;\n{0}\nbra DONE;\nELSE:\n{1}\nDONE:\n"
    barriers = two.replace("{0}", "bar.sync 0;").replace("{1}", "bar.sync 1;")
    assert "expected all threads of the block at barrier " in refused(barriers, 702)
    branches = (
        two.replace("%i, 32", "%i, 7").replace("{0}", "bar.sync 0;").replace("{1}", "bar.sync 0;")
    )
    assert "expected all lanes of the warp at one bar.sync" in refused(branches, 715)
    part = refused("bar.sync 0, 32;", 98)
    assert "expected a barrier of all 64 threads of the block, got one of 32" in part
    reduced = two.replace("{0}", "bar.sync 0;").replace("{1}", "bar.red.or.pred %p, 0, %p;")
    assert "expected all threads of the block at barrier " in refused(reduced, 702)


def test_a_barrier_that_threads_never_reach_is_a_deadlock():
    body = """setp.lt.u32 %p, %i, 40;
@%p bra DONE;
bar.sync 0;
DONE:
bar.warp.sync -1;
bar.sync 0;
bar.sync 0;"""
    report = refused(body, 702)
    assert "got a deadlock" in report
    assert "(bar.sync 0)" in report and "(bar.warp.sync -1)" in report


@pytest.mark.parametrize(
    ("grid", "block", "shared", "error", "told"),
    [
        (0, 32, 0, 9, "expected a grid of 1 to 2^31 - 1, 65535 and 65535 blocks, got 0, 1, 1"),
        ((1, 65536), 32, 0, 9, "got 1, 65536, 1"),
        ((1 << 31) + 1, 32, 0, 9, "expected a grid of"),
        (1, 0, 0, 9, "expected a block of 1 to 1024 threads, got 0, 1, 1"),
        (1, 1025, 0, 9, "got 1025, 1, 1"),
        (1, (32, 33), 0, 9, "got 32, 33, 1"),
        (1, 129, 0, 1, "expected at most 128 threads by its launch bounds, got 129"),
        (1, 32, 49153, 1, "expected at most 49152 bytes of shared memory, got 49153"),
    ],
)
def test_wrong_launches_are_refused(grid, block, shared, error, told):
    program = Program(".entry empty()\n.maxntid 128, 1, 1\n{\nret;\n}\n")
    launched = program.launch("empty", grid, block, shared_bytes=shared)
    assert launched.error == error
    assert told in launched.report
    program.run("empty", 7, 128)
