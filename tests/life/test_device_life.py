"""Tables with policies on a pretended device: the contents of tables of the CPU, and few waits of the host."""

import pytest
import torch
from device_twins import DeviceTwins
from hypothesis import given, settings
from hypothesis import strategies as st
from life_cases import ADMISSIONS, EVICTIONS, EVERY_LIFE
from oracle import EXTREME_IDS
from pretended_device import PretendedDevice
from table_cases import CROWDED_IDS, ids_of

LIMIT = 8
POOL = [*EXTREME_IDS[:4], *range(3, 14), *CROWDED_IDS[:4]]
batches = st.lists(st.sampled_from(POOL), max_size=8)
steps = st.tuples(st.just("step"), st.lists(batches, min_size=2, max_size=2))
calls = st.one_of(
    steps,
    steps,
    steps,
    st.tuples(st.just("erase"), batches),
    st.tuples(st.just("assign"), batches),
    st.tuples(st.just("time"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["reload", "move", "deepcopy", "pickle", "mark"]), st.none()),
)


def run(twins, program):
    time = 0
    for call, given_ in program:
        if call == "step":
            twins.step(*given_)
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


@settings(max_examples=25)
@given(
    lives=st.lists(st.sampled_from(EVERY_LIFE[1:]), min_size=2, max_size=2),
    program=st.lists(calls, max_size=20),
)
def test_the_same_calls_give_the_same_tables(lives, program):
    with PretendedDevice() as device:
        run(DeviceTwins(device, *lives, limit=LIMIT), program)


# Waits of a step that evicts or counts, beside a search for candidates: numbers of absent ids; of new ids; of
# admitted ids; and of the candidates that are still the lowest, or have expired.
COUNTS_ABSENT, LISTS_NEW, COPIED = "_to_copy", "collect_new", "_to_copy"
WAITS = {
    ("lru", "all"): [COUNTS_ABSENT, LISTS_NEW, COPIED],
    ("lfu", "all"): [COUNTS_ABSENT, LISTS_NEW, COPIED],
    ("none", "count"): [COUNTS_ABSENT, LISTS_NEW, COPIED],
    ("lru", "count"): [COUNTS_ABSENT, LISTS_NEW, COPIED, COPIED],
    ("none", "chance"): [COUNTS_ABSENT, LISTS_NEW, COPIED],
    ("steps", "all"): [COPIED, COUNTS_ABSENT, LISTS_NEW],
    ("steps, lru", "all"): [COPIED, COUNTS_ABSENT, LISTS_NEW, COPIED],
}


@pytest.mark.parametrize("tables", [1, 5])
@pytest.mark.parametrize("life", WAITS)
def test_waits_of_a_step_do_not_depend_on_the_number_of_tables(life, tables):
    """A new id a step, in full tables where rows are evicted: the most waits of a step without a search."""
    with PretendedDevice() as device:
        twins, most = DeviceTwins(device, *[life] * tables, limit=640), []
        most_known = []
        for step in range(12):
            fresh = list(range(step * 100, step * 100 + 100)) * 2
            twins.step(*[fresh] * tables)
            searched = any(note.op == "lowest_scores" for note in device.without_kernel)
            waits = twins.waits()
            print(step, searched, waits, twins.twins[0].num_rows)
            if not searched:
                most = max(most, waits, key=len)
            twins.step(*[fresh[-20:]] * tables)
            waits = twins.waits()
            print("known", waits)
        assert most == WAITS[life]
