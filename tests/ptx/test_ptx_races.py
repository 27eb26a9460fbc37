"""The emulator of PTX (tests/csrc/ptx): races that are reported, and order that is not."""

import numpy as np
import pytest
from ptx_emulator import SCHEDULES, Program, kernel


def races(body, grid=1, block=32, arguments=None, name="kernel", seeds=range(8)):
    """Returns the reports of races over some schedules. A pair of instructions is reported once a process."""
    races.number += 1
    name = f"{name}_{races.number}"  # another kernel
    program = Program(kernel(body, ("out",), ["pred %p, %q", "b32 %x, %y", "b64 %at"], name))
    reports = ""
    for schedule in SCHEDULES:
        for seed in seeds:
            out = np.zeros(256, np.uint64) if arguments is None else arguments
            launched = program.launch(
                name, grid, block, [out], SCHEDULE=schedule, SEED=seed, RACES=1
            )
            assert launched.error == 0, launched
            reports += launched.report
    return reports


races.number = 0

HAND_OVER = """.shared .align 4 .b8 words[128];
mov.u32 %x, %laneid;
shl.b32 %x, %x, 2;
st.shared.u32 [%x], %i;
{0}
xor.b32 %x, %x, 4;
ld.shared.u32 %y, [%x];"""


def test_lanes_hand_over_after_bar_warp_sync_only():
    report = races(HAND_OVER.replace("{0}", ""))
    assert report.count("got a race") == 1, "each pair of instructions once"
    assert "read after a write" in report or "write after a read" in report
    assert "(ld.shared.u32 %y, [%x])" in report and "(st.shared.u32 [%x], %i)" in report
    assert races(HAND_OVER.replace("{0}", "bar.warp.sync -1;")) == ""
    assert races(HAND_OVER.replace("{0}", "bar.sync 0;")) == ""
    # A function of the warp makes its lanes wait, and orders no memory.
    assert "got a race" in races(HAND_OVER.replace("{0}", "shfl.sync.idx.b32 %y, %i, 0, 31, -1;"))
    # Halves of a warp that wait for themselves.
    masks = "and.b32 %y, %i, 1;\nsetp.eq.u32 %p, %y, 0;\nselp.b32 %y, 0x55555555, 0xAAAAAAAA, %p;\n"
    assert "got a race" in races(HAND_OVER.replace("{0}", masks + "bar.warp.sync %y;"))


def test_warps_hand_over_after_a_barrier_only():
    swapped = HAND_OVER.replace("%laneid", "%tid.x").replace("words[128]", "words[256]")
    swapped = swapped.replace("xor.b32 %x, %x, 4", "xor.b32 %x, %x, 128")
    assert races(swapped.replace("{0}", "bar.sync 0;"), block=64) == ""
    assert "got a race" in races(swapped.replace("{0}", "bar.warp.sync -1;"), block=64)


def test_writers_of_one_word():
    assert "write after a write" in races("st.global.u32 [%out], %i;", grid=2, block=1)
    assert "write after a write" in races("st.global.u32 [%out], %i;"), "lanes of one instruction"
    assert races("st.volatile.global.u32 [%out], %i;", grid=3) == ""
    assert races("st.relaxed.gpu.global.u32 [%out], %i;", grid=3) == ""
    assert races("atom.global.add.u32 %x, [%out], 1;", grid=3) == ""
    assert races("mad.wide.u32 %at, %i, 4, %out;\nst.global.u32 [%at], %i;", grid=3) == ""
    assert races("ld.global.u32 %x, [%out];", grid=3) == "", "readers"


def test_weak_beside_strong_accesses():
    both = "setp.eq.u32 %p, %i, 0;\n@%p {0};\n@!%p {1};"
    for write, read in (
        ("st.global.u32 [%out], 1", "ld.volatile.global.u32 %x, [%out]"),
        ("atom.global.add.u32 %x, [%out], 1", "ld.global.u32 %x, [%out]"),
    ):
        assert "got a race" in races(
            both.replace("{0}", write).replace("{1}", read), grid=2, block=1
        )
    write, read = "atom.global.add.u32 %x, [%out], 1", "ld.volatile.global.u32 %x, [%out]"
    assert races(both.replace("{0}", write).replace("{1}", read), grid=2, block=2) == ""


def test_bytes_beside_each_other_are_no_race():
    assert (
        races("cvt.u64.u32 %at, %i;\nadd.s64 %at, %out, %at;\nst.global.u8 [%at], %i;", grid=2)
        == ""
    )
    overlapping = "mul.wide.u32 %at, %i, 2;\nadd.s64 %at, %out, %at;\nst.global.u16 [%at], %i;\n"
    overlapping += "and.b64 %at, %at, -4;\nld.global.u32 %x, [%at];"
    assert "got a race" in races(overlapping)


FLAG = """setp.ne.u32 %p, %i, 0;
@%p bra READER;
st.global.u64 [%out+64], 7;
{release}
bra DONE;
READER:
{acquire}
setp.eq.u32 %q, %x, 0;
@%q bra DONE;
ld.global.u64 %at, [%out+64];
DONE:"""
PATTERNS = {
    "fences": (
        "fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%out], 1;",
        "ld.relaxed.gpu.global.u32 %x, [%out];\nfence.acq_rel.gpu;",
    ),
    "threadfence": (
        "membar.gl;\nst.volatile.global.u32 [%out], 1;",
        "ld.volatile.global.u32 %x, [%out];\nmembar.gl;",
    ),
    "release": (
        "st.release.gpu.global.u32 [%out], 1;",
        "ld.acquire.gpu.global.u32 %x, [%out];",
    ),
}


def flag(release, acquire, **kwargs):
    return races(FLAG.replace("{release}", release).replace("{acquire}", acquire), **kwargs)


@pytest.mark.parametrize("name", ["fences", "threadfence"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_dropped_fence_is_a_race(name, side):
    pattern = [*PATTERNS[name]]
    pattern[side] = "\n".join(
        line for line in pattern[side].splitlines() if not line.startswith(("fence", "membar"))
    )
    assert "got a race" in flag(*pattern, grid=3, block=1, seeds=range(20))


def test_a_relaxed_flag_orders_nothing():
    release, acquire = (
        each.replace("release", "relaxed").replace("acquire", "relaxed")
        for each in PATTERNS["release"]
    )
    assert "got a race" in flag(release, acquire, grid=3, block=1, seeds=range(20))


def test_a_fence_for_the_block_does_not_reach_other_blocks():
    release, acquire = (each.replace("membar.gl", "membar.cta") for each in PATTERNS["threadfence"])
    assert "got a race" in flag(release, acquire, grid=3, block=1, seeds=range(20))
    assert flag(release, acquire, grid=1, block=64, seeds=range(20)) == ""
