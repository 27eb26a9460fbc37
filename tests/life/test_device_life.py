"""Tables with policies on a mock device: contents as on the CPU, and few waits of the host."""

from unittest import mock

import pytest
import torch
from device_twins import DeviceTwins
from hypothesis import given, settings
from hypothesis import strategies as st
from life_cases import EVERY_LIFE
from mock_device import MockDevice
from oracle import EXTREME_IDS
from table_cases import CROWDED_IDS, ids_of

from torchrec_dyn import knobs

LIMIT = 8
POOL = [*EXTREME_IDS[:4], *range(3, 14), *CROWDED_IDS[:4]]
batches = st.lists(st.sampled_from(POOL), max_size=8)
steps = st.tuples(
    st.sampled_from(["step", "step of two each"]), st.lists(batches, min_size=2, max_size=2)
)
calls = st.one_of(
    steps,
    steps,
    steps,
    st.tuples(st.just("erase"), batches),
    st.tuples(st.just("assign"), batches),
    st.tuples(st.just("time"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["reload", "move", "deepcopy", "pickle", "mark"]), st.none()),
)


def check_twins(twins, program):
    time = 0
    for call, given_ in program:
        if call.startswith("step"):
            twins.step(*given_, times=call != "step")
        elif call == "erase":
            [(one, two), *_] = twins.each(lambda table: table.erase(ids_of(*given_)))
            assert one == two
        elif call == "assign":
            ids = ids_of(*dict.fromkeys(given_))
            rows = torch.arange(4.0 * len(ids)).view(-1, 4)
            room = min(table.row_limit - table.num_rows for table in twins.tables)
            if len(ids) <= room or all(table.life.replaces for table in twins.tables):
                twins.each(lambda table: table.assign(ids, rows))
        elif call == "time":
            time += given_
            twins.each(lambda table: table.set_time(time))
        elif call == "reload":
            twins.reload()
        elif call == "move":
            twins.move_away_and_back()
        elif call == "mark":
            twins.mark()
        else:
            twins.copy(call)
        twins.device.reads.clear()
    twins.compare()


@settings(max_examples=10)
@given(
    lives=st.lists(st.sampled_from(EVERY_LIFE[1:]), min_size=2, max_size=2),
    program=st.lists(calls, max_size=20),
)
def test_the_same_calls_give_the_same_tables(lives, program):
    few = mock.patch.object(knobs, "LEAST_UNSIFTED_IDS", 2)  # the log is sifted at some calls
    with few, MockDevice() as device:
        check_twins(DeviceTwins(device, *lives, limit=LIMIT), program)


# What the host waits for in a step that evicts or counts: the numbers of absent and of new ids; how many are
# admitted; which listed rows have not been seen since, and so expire or are evicted; low counts.
ABSENT, ADMITTED, LISTED = "find_and_pool", "admit", "choose_listed"
WAITS = {
    ("none", "all"): [ABSENT],
    ("lru", "all"): [ABSENT, LISTED],
    ("lfu", "all"): [ABSENT, "lowest_rows"],
    ("none", "count"): [ABSENT, ADMITTED],
    ("lru", "count"): [ABSENT, ADMITTED, LISTED],
    ("steps", "all"): [LISTED, ABSENT, "_to_copy", ADMITTED],
}


@pytest.mark.everyday(2)
@pytest.mark.parametrize("life", WAITS, ids=", ".join)
def test_waits_of_a_step_do_not_depend_on_the_number_of_tables(life, tables=3):
    """Steps of known ids, and steps of ten new ids a table, which are full, but for rare waits."""
    with MockDevice() as device:
        limit = 2000 if life[0] == "none" else 640
        twins, new, known = DeviceTwins(device, *[life] * tables, limit=limit), [], []
        twins.step(*[range(630)] * tables)
        twins.step(*[range(630)] * tables)
        twins.waits()
        for first in range(1000, 1090, 10):
            times = 1 + first // 10 % 2  # AdmitAfter(2) refuses half of them
            batch = [*range(first, first + 10)] * times
            twins.step(*[batch] * tables, times=life[0] == "steps")
            new.append(twins.waits())
            twins.step(*[range(500, 520)] * tables)
            known.append(twins.waits())
            twins.step(*[range(500, 520)] * tables, times=True)
            known.append(twins.waits())
        often = [waits for waits in new if waits is not None]
        if device.is_mock:
            assert max(often, key=len) == WAITS[life] and len(often) > 2
            most = max(len(waits) for waits in known if waits is not None)
            assert most == {("none", "all"): 1, ("steps", "all"): 3}.get(life, 2)
        twins.compare()
