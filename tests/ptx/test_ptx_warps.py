"""The emulator of PTX (tests/csrc/ptx): lanes of a warp that part, meet and wait for each other."""

import numpy as np
import pytest
from ptx_emulator import SCHEDULES, Program, kernel

ALL = 0xFFFFFFFF


def warp_program(code, registers=(), parameters=("out", "in_a")):
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
    return Program(kernel(body, parameters, registers))


def run_warp(code, a=None, block=32, seeds=range(5), schedules=SCHEDULES, registers=()):
    """Returns what each lane left, which must be the same under every schedule."""
    program = warp_program(code, registers)
    a = np.arange(block, dtype=np.uint32) if a is None else np.asarray(a, np.uint32)
    results = set()
    for schedule in schedules:
        for seed in seeds:
            out = np.zeros(block, np.uint32)
            program.run("kernel", 1, block, [out, a], SCHEDULE=schedule, SEED=seed)
            results.add(out.tobytes())
    assert len(results) == 1
    return np.frombuffer(results.pop(), np.uint32)


def refusal(code, error, a=None, block=32, seeds=range(3), **environment):
    """Returns what is reported of the first launch; each one must end with the error."""
    program = warp_program(code)
    a = np.arange(block, dtype=np.uint32) if a is None else np.asarray(a, np.uint32)
    reports = []
    for schedule in SCHEDULES:
        for seed in seeds:
            out = np.zeros(block, np.uint32)
            environment = {"SCHEDULE": schedule, "SEED": seed, **environment}
            launched = program.launch("kernel", 1, block, [out, a], **environment)
            assert launched.error == error, launched
            reports.append(launched.report)
    return reports[0]


LOOP = """mov.u32 %x, 0;
AGAIN:
setp.ge.u32 %p, %x, %a;
@%p bra DONE;
add.u32 %x, %x, 1;
and.b32 %y, %x, 1;
setp.eq.u32 %q, %y, 1;
@%q bra ODD;
add.u32 %d, %d, 100;
bra.uni AGAIN;
ODD:
add.u32 %d, %d, 1;
bra AGAIN;
DONE:
"""


def test_lanes_meet_again_where_branches_meet():
    """If converged: after a branch of some lanes, and after a loop that lanes leave one by one."""
    code = LOOP + "activemask.b32 %d;"
    assert run_warp(code, schedules=["converged"]).tolist() == [ALL] * 32
    code = "setp.lt.u32 %p, %lane, 5;\n@%p bra DONE;\nadd.u32 %d, %d, 1;\nDONE:\nactivemask.b32 %d;"
    assert run_warp(code, schedules=["converged"]).tolist() == [ALL] * 32
    # The way out of this loop falls through a branch, without a label.
    code = """AGAIN:
add.u32 %x, %x, 1;
setp.le.u32 %p, %x, %lane;
@%p bra AGAIN;
activemask.b32 %d;"""
    assert run_warp("mov.u32 %x, 0;\n" + code, schedules=["converged"]).tolist() == [ALL] * 32


def test_lanes_part_at_one_instruction_when_split():
    """The other schedules keep them together here."""
    program = warp_program("activemask.b32 %d;")
    seen = set()
    for seed in range(30):
        out = np.zeros(32, np.uint32)
        program.run("kernel", 1, 32, [out, out.copy()], SCHEDULE="split", SEED=seed)
        seen.add(out.tobytes())
        for lane, mask in enumerate(out.tolist()):
            assert mask >> lane & 1
    assert len(seen) > 3
    assert run_warp("activemask.b32 %d;", schedules=["converged", "random"]).tolist() == [ALL] * 32


def test_lanes_wait_for_the_lanes_of_their_mask():
    """The halves of a warp go through different loops, then each half votes, then all sum."""
    code = """setp.lt.u32 %p, %lane, 16;
selp.b32 %m, 0xFFFF, 0xFFFF0000, %p;
mov.u32 %x, 0;
AGAIN:
add.u32 %x, %x, 1;
setp.lt.u32 %q, %x, %lane;
@%q bra AGAIN;
and.b32 %y, %lane, 1;
setp.eq.u32 %q, %y, 1;
vote.sync.ballot.b32 %d, %q, %m;
redux.sync.add.u32 %x, %x, -1;
add.u32 %d, %d, %x;"""
    total = sum(max(lane, 1) for lane in range(32))
    assert run_warp(code).tolist() == [0xAAAA + total] * 16 + [0xAAAA0000 + total] * 16


def test_lanes_that_have_ended_are_not_waited_for():
    code = "setp.ge.u32 %p, %lane, 30;\n@%p ret;\nbar.warp.sync -1;\nredux.sync.add.u32 %d, 1, -1;"
    assert run_warp(code).tolist() == [30] * 30 + [0] * 2


def test_lanes_go_on_when_others_have_ended():
    """Lane 1 waits for lane 2, which ends; lane 0 waits in a loop for lane 1."""
    code = """.shared .align 4 .b8 flag[4];
setp.eq.u32 %p, %lane, 0;
@%p st.volatile.shared.u32 [flag], 0;
bar.warp.sync -1;
@%p bra AGAIN;
setp.gt.u32 %q, %lane, 1;
@%q bra OUT;
bar.warp.sync 6;
st.volatile.shared.u32 [flag], 1;
bra DONE;
OUT:
ret;
AGAIN:
ld.volatile.shared.u32 %x, [flag];
setp.eq.u32 %q, %x, 0;
@%q bra AGAIN;
DONE:
mov.u32 %d, 7;"""
    assert run_warp(code).tolist() == [7, 7] + [0] * 30


def test_bar_warp_sync_may_stand_in_two_branches():
    code = """setp.lt.u32 %p, %lane, 7;
@%p bra ELSE;
bar.warp.sync -1;
mov.u32 %d, 1;
bra DONE;
ELSE:
mov.u32 %d, 2;
bar.warp.sync -1;
DONE:"""
    assert run_warp(code).tolist() == [2] * 7 + [1] * 25


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


def test_a_seed_repeats_a_run():
    """The lanes that are active together, as a random schedule leaves them."""
    code = LOOP + "activemask.b32 %d;"
    program = warp_program(code)
    outs = {}
    for seed in [*range(6), *range(6)]:
        again = warp_program(code) if seed == 3 else program
        out = np.zeros(32, np.uint32)
        again.run(
            "kernel", 1, 32, [out, np.arange(32, dtype=np.uint32)], SCHEDULE="random", SEED=seed
        )
        outs.setdefault(seed, []).append(out.tolist())
    assert len({str(each) for pair in outs.values() for each in pair}) > 3
