"""The emulator of PTX (tests/csrc/ptx): blocks, grids and barriers."""

import numpy as np
import pytest
from ptx_emulator import SCHEDULES, Program, kernel

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


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


@every_schedule
@pytest.mark.parametrize(
    "barrier", ["bar.sync 0;", "barrier.sync 0;", "barrier.cta.sync.aligned 1;", "bar.sync 0, 160;"]
)
def test_barriers_of_a_block(schedule, barrier):
    program, block = Program(kernel(REVERSE.replace("{0}", barrier))), 150
    for seed in range(3):
        out = np.zeros((4, block), np.uint32)
        program.run("kernel", 4, block, [out], SCHEDULE=schedule, SEED=seed)
        assert (out == np.arange(4 * block).reshape(4, block)[:, ::-1]).all()


def test_without_the_barrier_threads_read_too_early():
    program = Program(kernel(REVERSE.replace("{0}", "")))
    out = np.zeros(150, np.uint32)
    program.run("kernel", 1, 150, [out])
    assert 0xA5A5A5A5 in out


def test_threads_that_have_ended_are_not_waited_for():
    body = "setp.lt.u32 %p, %i, 40;\n@%p ret;\nbar.sync 0;\nst.global.u32 [%out], 1;"
    out = np.zeros(1, np.uint32)
    Program(kernel(body, registers=["pred %p"])).run("kernel", 1, 96, [out])
    assert out[0] == 1


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


def test_blocks_wait_for_blocks_before_them():
    """Each block adds to what the block before it left, as a scan in one pass does."""
    body = """.reg .b64 %at, %seen;
cvt.u64.u32 %at, %i;
shl.b64 %at, %at, 3;
add.s64 %at, %at, %out;
AGAIN:
nanosleep.u32 20;
ld.volatile.global.u64 %seen, [%at];
setp.eq.s64 %p, %seen, 0;
@%p bra AGAIN;
add.s64 %seen, %seen, 3;
st.volatile.global.u64 [%at+8], %seen;"""
    for schedule in SCHEDULES:
        out = np.array([1] + [0] * 40)
        program = Program(kernel(body, registers=["pred %p"]))
        program.run("kernel", 40, 1, [out], SCHEDULE=schedule)
        assert out.tolist() == [1 + 3 * k for k in range(41)]


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
    assert program.facts("empty")[:4] == [0, 0, 0, 128]
    program.run("empty", 7, 128)
    assert program.facts("empty")[:4] == [1, 896, 7, 128]


def test_a_wrong_schedule_is_told():
    launched = Program(".entry empty()\n{\nret;\n}\n").launch("empty", SCHEDULE="sorted")
    assert launched.error == 0
    assert "expected converged, random, split or mixed, got sorted" in launched.report
