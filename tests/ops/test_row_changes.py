"""Rows that come and go in prepared tables: numbers, contents, scores and slots, against plain Python."""

import random
from itertools import accumulate, chain, pairwise

import pytest
import torch
from device_ops import CPU
from fuzz_ops import copies
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import draw_scored_table, of_scored
from op_cases_lookup import draw_added, draw_step
from op_samples import empty, prepared, roomy_maps, scored, update, whole
from score_blocks import FREE, MOST, blocks_of, read_rows, write
from table_cases import bits, ids_of
from update_rules import state_widths

from torchrec_dyn import ops

# Tables on a GPU are copies: a test does not see what becomes of them.
pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.parametrize("device", ["cpu", "simt"], indirect=True),
]


# Of commit_step_, those of counters first.
ARGUMENTS = [
    *("dropped_ids", "dropped_rows", "dropped_offsets", "waiting_rows", "waiting_offsets"),
    *("waiting_steps", "waiting_times", "begun_rows", "begun_ids", "begun_offsets"),
    *("begun_first_rows", "begun_reused", "begun_reused_offsets", "begun_steps", "begun_counts"),
    *(
        "begun_fills",
        "begun_index",
        "begun_places",
        "begun_initial_places",
        "removed_ids",
        "removed_rows",
        "removed_offsets",
    ),
    *("seen_rows", "table_offsets", "steps", "times", "new_rows", "new_ids", "new_offsets"),
    *(
        "first_rows",
        "reused",
        "reused_offsets",
        "new_steps",
        "counts",
        "rows",
        "new_index",
        "places",
        "initial_places",
    ),
]
NO_BATCH = {"rows": None, "new_index": None, "places": None, "initial_places": None}


def look(slots, moved, ids):
    """Returns the rows of ids in the map of one table, -1 for none."""
    return CPU.lookup(ids_of(*ids), ids_of(0, len(ids)), slots, moved)[0].tolist()


def filled(own, rows):
    """Returns the rows of the batch after new ids have got `rows`."""
    if own["rows"] is None:
        return None
    places = range(len(rows)) if own["places"] is None else own["places"].tolist()
    row_of = dict(zip(places, rows, strict=True))
    both = zip(own["rows"].tolist(), own["new_index"].tolist(), strict=True)
    return [row_of.get(place, row) for row, place in both]


def expected_rows(own):
    """Returns the rows of new ids: each table's reused rows first, then fresh ones."""
    rows = []
    for t, (begin, end) in enumerate(pairwise(own["new_offsets"])):
        a, b = own["reused_offsets"][t : t + 2]
        again, first = own["reused"].tolist()[a:b], int(own["first_rows"][t])
        rows += [*again, *range(first, first + end - begin - len(again))]
    return rows


def write_expected(tables, own, rows):
    """Writes the initial rows, states and scores of new ids in copies of the tables."""
    blocks = len(tables["weights"])
    places = rows if own["initial_places"] is None else own["initial_places"].tolist()
    for t, (begin, end) in enumerate(pairwise(own["new_offsets"])):
        first, count, shift, columns = tables["layout"][t].tolist()
        ids, mine = own["new_ids"][begin:end], ids_of(*places[begin:end])
        weights = tables["weights"][first : first + count]
        if len(ids):
            kind, key, first_column, _ = tables["initial"][t].tolist()
            numbers = tables["parameters"][t].tolist()
            CPU.init_rows_(ids, mine, weights, shift, columns, first_column, kind, numbers, key)
        for s, number in enumerate(tables["initial_states"]):
            for row in mine.tolist():
                state = tables["states"][s * blocks + first + (row >> shift)]
                state.view(-1, state_widths(tables["optimizer"], columns)[s])[
                    row & (1 << shift) - 1
                ] = number
        if "scores" in tables:
            a, many, shift, _ = tables["score_layout"][t].tolist()
            counts = (
                own["counts"][begin:end].tolist() if own["counts"] is not None else [0] * len(ids)
            )
            for row, count in zip(rows[begin:end], counts, strict=True) if many else ():
                score = int(own["steps"][t]) << 32 | min(max(count, 0), MOST)
                word = score - (1 << 64 if score >> 63 else 0)
                tables["scores"][a + (row >> shift)][row & (1 << shift) - 1] = word


@settings(max_examples=60)
@given(seed=st.integers(0, 2**40))
def test_new_ids_get_rows_contents_scores_and_slots(seed):
    tables, own = draw_added(random.Random(seed))
    expected, rows = copies(tables), expected_rows(own)
    of_batch = filled(own, rows)
    ops.add_rows_(**own, tables=prepared(tables)["tables"])
    assert own["new_rows"].tolist() == rows
    assert own["rows"] is None or own["rows"].tolist() == of_batch
    write_expected(expected, own, rows)
    for name in ("weights", "states", "scores"):
        for block, other in zip(tables.get(name, []), expected.get(name, []), strict=True):
            assert torch.equal(bits(block), bits(other)), name
    for t, (begin, end) in enumerate(pairwise(own["new_offsets"])):
        ids = own["new_ids"][begin:end].tolist()
        slots, moved = [tables["slots"][t]], tables["moved"][t : t + 1]
        assert look(slots, moved, ids) == rows[begin:end]
        assert int((slots[0][:, 1] > 0).sum()) == len(ids)


def test_a_reused_row_keeps_nothing():
    """Of its former id; the rows beside it keep all."""
    blocks, states = [torch.full((4, 2), 7.0)], [torch.full((4, 2), 8.0)]
    scores = list(torch.full((1, 4, 1), 5 << 32 | 9))
    tables = {
        "weights": blocks, "states": states, "layout": ids_of(0, 1, 2, 2).view(1, 4), "optimizer": 1,
        "slots": [empty(8)], "moved": ids_of(-1), "scores": scores,
        "score_layout": ids_of(0, 1, 2, 1).view(1, 4), "initial": ids_of(0, 5, 0, 1).view(1, 4),
        "parameters": torch.tensor([[0.25, 0.0, 0.0, 1.0, 0.0, 1.0]]).double(), "initial_states": [0.5],
    }  # fmt: skip
    assert state_widths(1, 2) == (2,)
    rows = ids_of(0, 0)
    ops.add_rows_(
        rows, ids_of(-3, 70), [0, 2], [3], ids_of(1), [0, 1], [6], None, None, None, None, None,
        prepared(tables)["tables"],
    )  # fmt: skip
    assert rows.tolist() == [1, 3]
    assert blocks[0].tolist() == [[7, 7], [0.25, 0.25], [7, 7], [0.25, 0.25]]
    assert states[0].tolist() == [[8, 8], [0.5, 0.5], [8, 8], [0.5, 0.5]]
    assert scores[0].flatten().tolist() == [5 << 32 | 9, 6 << 32, 5 << 32 | 9, 6 << 32]


def room_of(table):
    return min(int((array[:, 1] == 0).sum()) for array in table.slots)


@given(seed=st.integers(0, 2**40))
def test_counters_are_added_to_tables_without_rows(seed):
    """In maps that grow, too."""
    rng = random.Random(seed)
    tables = [draw_scored_table(rng) for _ in range(rng.randint(1, 3))]
    ids, rows, counts, again, offsets, reused, firsts = [], [], [], [], [0], [0], []
    for table in tables:
        free = [row for row in range(table.capacity) if row not in {*table.known.values()}]
        first = max(table.known.values(), default=-1) + 1
        some = rng.sample(free, min(len(free), 2, room_of(table))) if first else []
        some = [row for row in some if row < first]
        fresh = rng.randint(0, min(table.capacity - first, room_of(table) - len(some), 20))
        own = [
            number
            for number in range(2**40, 2**40 + len(some) + fresh)
            if number not in table.known
        ]
        rows += [*some, *range(first, first + fresh)]
        ids += own
        counts += [rng.choice((0, 1, MOST)) for _ in own]
        again += some
        firsts.append(first)
        offsets.append(len(ids))
        reused.append(len(again))
    steps, new_rows = [rng.choice((0, 9, FREE - 1)) for _ in tables], torch.zeros(len(ids)).long()
    ops.add_rows_(
        **of_scored(
            tables, new_rows=new_rows, new_ids=ids_of(*ids), new_offsets=offsets, first_rows=firsts,
            reused=ids_of(*again), reused_offsets=reused, steps=steps, counts=ids_of(*counts),
            **NO_BATCH,
        )
    )  # fmt: skip
    assert new_rows.tolist() == rows
    for t, table in enumerate(tables):
        begin, end = offsets[t : t + 2]
        known = {**table.known, **dict(zip(ids[begin:end], rows[begin:end], strict=True))}
        assert look(table.slots, table.moved, known) == [*known.values()]
        seen, found = read_rows(table.scores, table.shift, ids_of(*rows[begin:end]))
        assert {*seen.tolist()} <= {steps[t]} and found.tolist() == counts[begin:end]


@given(seed=st.integers(0, 2**40))
def test_removed_ids_leave_their_slots_and_scores(seed):
    rng = random.Random(seed)
    tables = [draw_scored_table(rng) for _ in range(rng.randint(1, 3))]
    gone = [rng.sample([*table.known], rng.randint(0, len(table.known))) for table in tables]
    before = [torch.cat([torch.empty(0, 1).long(), *table.scores]) for table in tables]
    rows = [
        [table.known[number] for number in own] for table, own in zip(tables, gone, strict=True)
    ]
    offsets = [0, *accumulate(map(len, gone))]
    given = of_scored(
        tables, ids=ids_of(*chain(*gone)), rows=ids_of(*chain(*rows)), offsets=offsets
    )
    ops.remove_rows_(**given)
    for table, own, free, words in zip(tables, gone, rows, before, strict=True):
        left = [-1 if number in {*own} else row for number, row in table.known.items()]
        assert look(table.slots, table.moved, table.known) == left
        words[free] = -(2**32)
        assert torch.equal(torch.cat([torch.empty(0, 1).long(), *table.scores]), words)


def test_removed_rows_keep_their_contents():
    """They are written when the row is given to another id; a table may have no scores."""
    tables = update(2) | roomy_maps()
    expected = copies(tables)
    scores, layout = blocks_of(8, 2), ids_of(0, 2, 2, 1, 2, 0, 2, 1).view(2, 4)
    write(scores, 2, {0: (3, 4), 1: (3, 4), 2: (3, 4)})
    own = {"ids": whole(7, 5, 5), "rows": whole(2, 0, 0), "offsets": [0, 2, 3]}
    handle = prepared(tables | {"scores": scores, "score_layout": layout})["tables"]
    ops.remove_rows_(**own, tables=handle)
    for name in ("weights", "states"):
        assert all(map(torch.equal, tables[name], expected[name]))
    assert read_rows(scores, 2, whole(0, 1, 2))[0].tolist() == [-1, 3, -1]
    first, second = ([slots] for slots in tables["slots"])
    assert look(first, whole(-1), [5, 6, 7]) == [-1, 1, -1] and look(second, whole(-1), [5]) == [-1]


def test_beside_tables_with_rows_a_table_without_blocks_has_no_room():
    """Its scores have room: the rows were written outside of all blocks."""
    tables = {
        "weights": [torch.zeros(4, 3)], "layout": ids_of(0, 1, 2, 3, 1, 0, 2, 3).view(2, 4),
        "slots": [empty(8), empty(8)], "moved": ids_of(-1, -1), "scores": blocks_of(8, 2),
        "score_layout": ids_of(0, 1, 2, 1, 1, 1, 2, 1).view(2, 4),
    }  # fmt: skip
    own = {
        "new_rows": whole(0), "new_ids": whole(9), "new_offsets": [0, 0, 1], "first_rows": [0, 0],
        "reused": whole(), "reused_offsets": [0, 0, 0], "steps": [1, 1], "counts": None, **NO_BATCH,
    }  # fmt: skip
    with pytest.raises(
        RuntimeError, match="room for the new rows of each table, got 1 rows from 0 on of 0"
    ):
        ops.add_rows_(**prepared(tables | own))


def test_a_full_map_is_named_by_the_op():
    own = {
        "new_rows": whole(*[0] * 6), "new_ids": whole(*range(6)), "new_offsets": [0, 6],
        "first_rows": [0], "reused": whole(), "reused_offsets": [0, 0], "steps": [1], "counts": None,
        **NO_BATCH,
    }  # fmt: skip
    scores, layout = blocks_of(8, 3), whole(0, 1, 3, 1).view(1, 4)
    with pytest.raises(RuntimeError, match="add_rows_: expected an empty slot for every new id"):
        ops.add_rows_(**scored(scores, layout, slots=[empty(4)], moved=whole(-1), **own))


def used(slots):
    return sorted(slots[slots[:, 1] > 0].tolist())


@settings(max_examples=60)
@given(seed=st.integers(0, 2**40))
def test_a_step_is_what_its_parts_are_one_after_the_other(seed):
    """For counters first; a row of a removed id may be that of a new one."""
    tables, waiting, own = draw_step(random.Random(seed))
    twin, others, same = draw_step(random.Random(seed))
    counters = of_scored(waiting)["tables"]
    ops.commit_step_(**own, tables=prepared(tables)["tables"], counters=counters)
    arguments = iter(same[name] for name in ARGUMENTS)
    for handle in (of_scored(others)["tables"], prepared(twin)["tables"]):
        removed, seen, added = ([next(arguments) for _ in range(n)] for n in (3, 4, 12))
        ops.touch_scores_(*seen, handle)
        ops.remove_rows_(*removed, handle)
        ops.add_rows_(*added, handle)
    for name in ("new_rows", "rows", "begun_rows"):
        assert own[name] is None or torch.equal(own[name], same[name]), name
    for name in ("weights", "states", "scores"):
        for block, other in zip(tables[name], twin[name], strict=True):
            assert torch.equal(bits(block), bits(other)), name
    assert [*map(used, tables["slots"])] == [*map(used, twin["slots"])]
    for one, two in zip(waiting, others, strict=True):
        assert all(map(torch.equal, one.scores, two.scores))
        assert [*map(used, one.slots)] == [*map(used, two.slots)]
