"""The emulator of PTX (tests/csrc/ptx): lanes of a warp that part, meet and wait for each other."""

import numpy as np
import pytest
from ptx_emulator import SCHEDULES, Program, kernel


def warp_program(code):
    """Each lane has %a of in_a and leaves %d in out; %lane is its number, %p and %q are predicates."""
    body = f""".reg .pred %p, %q;
.reg .b32 %a, %d, %lane, %x, %y, %m;
.reg .b64 %at_;
mov.u32 %lane, %laneid;
mul.wide.u32 %at_, %i, 4;
add.s64 %in_a, %in_a, %at_;
add.s64 %out, %out, %at_;
ld.global.u32 %a, [%in_a];
mov.u32 %d, 0;
{code}
st.global.u32 [%out], %d;"""
    return Program(kernel(body, ("out", "in_a")))


def refusal(code, error, **environment):
    """Returns what is reported of the first launch; each one must end with the error."""
    program, lanes, reports = warp_program(code), np.arange(32, dtype=np.uint32), []
    for schedule in SCHEDULES:
        for seed in range(3):
            environment |= {"SCHEDULE": schedule, "SEED": seed}
            launched = program.launch("kernel", 1, 32, [lanes.copy(), lanes], **environment)
            assert launched.error == error, launched
            reports.append(launched.report)
    return reports[0]


def test_lanes_part_at_one_instruction_when_split():
    """The other schedules keep them together here."""
    program, seen = warp_program("activemask.b32 %d;"), {name: set() for name in SCHEDULES}
    for schedule in SCHEDULES:
        for seed in range(30):
            out = np.zeros(32, np.uint32)
            program.run("kernel", 1, 32, [out, out.copy()], SCHEDULE=schedule, SEED=seed)
            seen[schedule].add(tuple(out.tolist()))
    assert len(seen["split"]) > 3
    assert seen["converged"] == seen["random"] == {(0xFFFFFFFF,) * 32}


def test_a_lane_outside_of_its_own_mask_is_refused():
    report = refusal("redux.sync.add.u32 %d, %a, 0xFFFFFFFD;", 715)
    assert "a member mask with the lane that executes it, got 0xfffffffd" in report
    assert "kernel, block 0, warp 0, lane 1, PTX line" in report
    assert "(redux.sync.add.u32 %d, %a, 0xFFFFFFFD)" in report


def test_a_shuffle_from_a_lane_that_takes_no_part_is_refused():
    code = "setp.lt.u32 %p, %lane, 16;\n@%p shfl.sync.bfly.b32 %d, %a, 16, 31, 0xFFFF;"
    assert "which does not take part" in refusal(code, 715)
    code = "setp.eq.u32 %p, %lane, 31;\n@%p ret;\nshfl.sync.down.b32 %d, %a, 1, 31, -1;"
    assert "got lane 31, which does not take part" in refusal(code, 715)


@pytest.mark.parametrize(
    "code",
    [
        # Some lanes never come.
        "setp.lt.u32 %p, %lane, 16;\n@%p shfl.sync.bfly.b32 %d, %a, 1, 31, -1;\nbar.sync 0;",
        # All lanes come, to two instructions.
        """setp.lt.u32 %p, %lane, 16;
@%p bra ELSE;
redux.sync.add.u32 %d, 1, -1;
bra DONE;
ELSE:
redux.sync.add.u32 %d, 2, -1;
DONE:""",
        # Two masks.
        "setp.lt.u32 %p, %lane, 16;\nselp.b32 %m, -1, 0xFFFF0000, %p;\nbar.warp.sync %m;\nbar.sync 0;",
    ],
)
def test_lanes_that_wait_for_ever_are_a_deadlock(code):
    report = refusal(code, 702)
    assert "got a deadlock" in report
    assert "member mask 0xffffffff" in report
    assert "lanes 0x" in report


def test_an_endless_loop_ends():
    report = refusal("AGAIN:\nadd.u32 %x, %x, 1;\nbra AGAIN;", 702, STEPS=10000)
    assert "an endless loop" in report
