"""Valid arguments of every op, small: functions that return new arguments."""

import collections

import torch
from device_ops import is_on_cpu, simt_library
from update_rules import NUMBERS, hyper_of, state_blocks, state_widths

from torchrec_dyn import ops

__all__ = ["I64", "SAMPLES", "blocks", "empty", "filled_slots", "update", "whole"]
I64 = torch.int64
# Ops of tables in host memory, whose rows a GPU has in frames: without a kernel for the CPU.
ON_DEVICES_ONLY = {"cache_rows_", "row_places"}


def whole(*numbers):
    return torch.tensor(numbers, dtype=I64)


def small(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def empty(capacity):
    return torch.zeros(capacity, 2, dtype=I64)


def filled_slots():
    slots = [empty(8), empty(16)]  # 5 -> 0, 6 -> 1, 7 -> 2 and 5 -> 0
    ops.insert(whole(5, 6, 7, 5), whole(0, 1, 2, 0), whole(0, 3, 4), slots, whole(-1, -1))
    return slots


def two_maps():
    return {"slots": filled_slots(), "moved": whole(-1, -1)}


def a_map_that_grows():
    outgoing, other = filled_slots()
    return {"slots": [empty(16), other, outgoing], "moved": whole(0, -1)}


def blocks(columns, dtype=torch.float32, count=3):
    """Returns blocks of 4 rows."""
    return [torch.arange(4.0 * columns).reshape(4, columns).to(dtype) + b for b in range(count)]


def pooled(dtype=torch.float32, weighted=False):
    """Returns the common arguments of the three pooling ops: two tables of 3 and 2 columns, two bags each."""
    return {
        "rows": whole(0, 5, -1, 3, 3),
        "offsets": whole(0, 2, 2, 4, 5),
        "bag_weights": torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) if weighted else None,
        "weights": [*blocks(3, dtype, 2), *blocks(2, dtype, 1)],
        "layout": torch.tensor([[0, 2, 2, 3], [2, 1, 2, 2]]),
        "segments": torch.tensor([[0, 0, 2, 0, 5], [1, 2, 2, 3, 5]]),
        "mean": weighted,
    }


def sequence():
    given = pooled()
    given["offsets"] = None
    given["segments"] = torch.tensor([[0, 0, 5, 0, 3]])
    return given


def update(optimizer, senders=None, marks=(), mark_layout=None, **options):
    given = pooled(**options)
    return {
        "grad": torch.arange(10.0),
        "ids": whole(7, 8, 9, 7, 7),
        **{k: given[k] for k in ("rows", "offsets", "bag_weights", "weights")},
        "states": state_blocks(optimizer, given["weights"], torch.ones),
        "layout": given["layout"],
        "segments": given["segments"],
        "streams": whole(1, 0, 1, 2, 0, 1).reshape(2, 3),
        "mean": given["mean"],
        "optimizer": optimizer,
        "hyper": hyper_of(optimizer),
        "grad_scales": [1.0, 2.0],
        "senders": senders,
        "marks": list(marks),
        "mark_layout": mark_layout,
        "on_nonfinite": [],
        "nonfinite": [],
    }


def update_with_marks():
    """Returns an update of a table with marks and one without."""
    marks = [torch.zeros(64, dtype=torch.uint8)]
    return update(0, marks=marks, mark_layout=torch.tensor([[0, 1, 6, 1], [1, 0, 6, 1]]))


def update_with_refusals(optimizer, *on_nonfinite):
    """Returns an update in which each of two tables may refuse numbers that are not finite."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in on_nonfinite]
    return update(optimizer) | {"on_nonfinite": list(on_nonfinite), "nonfinite": counts}


def rows_of_a_table(dtype=torch.float32):
    return {"blocks": blocks(3, dtype), "shift": 2, "columns": 3}


def pool_sample(given, elements=10, dtype=torch.float32):
    return {**given, "elements": elements, "dtype": dtype}


OF_TABLES = ("slots", "moved", "weights", "states", "layout")
OF_TABLES += ("optimizer", "on_nonfinite", "nonfinite", "initial", "parameters", "initial_states")
OF_TABLES += ("scores", "score_layout")
HANDLES = collections.deque(maxlen=1024)  # of the last calls, whose arguments are copies


def tables_in(given):
    """Returns the arguments of prepare_tables, by default without ids and states."""
    count = len(given["layout"])
    own = {"slots": [empty(0)] * count, "moved": torch.full((count,), -1), "states": []}
    own |= {"optimizer": 0, "on_nonfinite": [], "nonfinite": []}
    states = len(state_widths({**own, **given}["optimizer"], 1))
    own |= {"initial": whole(1, 5, 0, 1).repeat(count, 1), "initial_states": [0.5] * states}
    own["parameters"] = torch.tensor([[-1.0, 1.0, 0.0, 1.0, 0.0, 1.0]] * count).double()
    own |= {"scores": [], "score_layout": None}
    return {**own, **{name: given[name] for name in OF_TABLES if name in given}}


def prepared(given, **more):
    """Returns the arguments of an op of prepared tables, from those of the op that takes lists."""
    HANDLES.append(ops.prepare_tables(**tables_in(given)))
    own = {name: value for name, value in given.items() if name not in OF_TABLES}
    return {**own, **more, "tables": HANDLES[-1].clone()}


def prepared_on_a_device(given, **own):
    """Returns the arguments of an op of ON_DEVICES_ONLY; where ops are the CPU's, for the simt build's."""
    prepare = simt_library().prepare_tables.default if is_on_cpu() else ops.prepare_tables
    HANDLES.append(prepare(**tables_in(given)))
    return {**own, "tables": HANDLES[-1].clone()}


def cached_batch():
    """Returns a batch of two tables with caches, of three and of two frames, behind four and two rows."""
    first = [small(0, 1, 0, 2), whole(1, 3, -1), small(5, 6, 0), small(0, 0, 0), whole(0, 2, 0, 0)]
    second = [small(0, 0), whole(7, 7), small(7, 7), small(7, 7), whole(0, 0, 0, 0)]  # never used
    return {
        "rows": whole(0, 3, -1, 2, 1, 1), "table_offsets": whole(0, 4, 6),
        "caches": [*first, *second], "cache_layout": whole(0, 7, 4, 1, 2**32 - 1, 2).view(2, 3),
    }  # fmt: skip


def cache_sample(optimizer=0, dtype=torch.float32, **changed):
    given = update(optimizer, dtype=dtype)
    return prepared_on_a_device(given, **{**cached_batch(), "loads": True, **changed})


def pool_prepared_sample(new_index, output=torch.float32, initial_ids=None, **options):
    own = {"out": torch.ones(10, dtype=output), "new_index": new_index, "initial_ids": initial_ids}
    return prepared(pooled(**options), **own)


def find_sample(**changed):
    """Returns two features of two bags each; two of five ids are absent."""
    own = {
        "ids": whole(7, 8, 5, 5, 9), "lengths": whole(2, 1, 0, 2), "offsets": None, "bag_weights": None,
        "first_bags": whole(0, 2, 4), "first_features": whole(0, 1, 2), "mean": False, "pools": 2,
        "collects": 2, "segments": pooled()["segments"], "output_rows": 2, "columns": 5,
        "dtype": torch.float32,
    }  # fmt: skip
    return prepared({**tables_in(update(0) | two_maps()), **own, **changed})


def grad_sample(given, elements=10):
    return {"grad": torch.ones(elements), **{k: v for k, v in given.items() if k != "bag_weights"}}


def score_blocks():
    """Returns three blocks of 4 scores; row r was last seen at step r and has count 12 - r."""
    return list((torch.arange(12) * (2**32 - 1) + 12).reshape(3, 4, 1))


SCORE_LAYOUT = torch.tensor([[0, 2, 2, 1], [2, 0, 2, 1], [2, 1, 2, 1]])  # the second has no scores
TWO_SCORED = SCORE_LAYOUT[::2].contiguous()


def scored(scores, layout, **own):
    """Returns the arguments of an op: its own, and tables without rows that have such scores, and maps."""
    tables = {"weights": [], "layout": whole(0, 0, 0, 1).repeat(len(layout), 1)}
    return prepared({**tables, "scores": scores, "score_layout": layout, **own})


def touch_sample(times=None):
    return scored(
        score_blocks(), SCORE_LAYOUT, rows=whole(0, 7, -1, 7, 3, 0),
        table_offsets=whole(0, 4, 5, 6), steps=whole(5, 6, 7), times=times,
    )  # fmt: skip


def score_sample(**own):
    return scored(
        score_blocks(), SCORE_LAYOUT, rows=whole(0, 7, -1, 7, 3, 0),
        table_offsets=whole(0, 4, 5, 6), **own,
    )  # fmt: skip


def roomy_maps():
    """Returns two maps with the ids of `filled_slots`, and room for calls that add ids again and again."""
    slots = [empty(64), empty(64)]
    ops.insert(whole(5, 6, 7, 5), whole(0, 1, 2, 0), whole(0, 3, 4), slots, whole(-1, -1))
    return {"slots": slots, "moved": whole(-1, -1)}


def scored_maps():
    """Returns the ids and scores of two tables, of 8 and 4 rows; the second has id 5 alone."""
    return {**roomy_maps(), "scores": score_blocks(), "score_layout": TWO_SCORED}


def add_sample(tables, **changed):
    """Returns new ids of two tables: two, of which the first reuses a row, and one."""
    own = {
        "new_rows": whole(0, 0, 0), "new_ids": whole(50, 51, 52), "new_offsets": [0, 2, 3],
        "first_rows": [6, 0], "reused": whole(1), "reused_offsets": [0, 1, 1],
        "steps": [9, 2**32 - 2], "counts": None, "rows": whole(-1, 4, -1, -1, -1),
        "new_index": whole(2, -1, 0, 1, 2), "places": None, "initial_places": None,
    }  # fmt: skip
    return prepared({**tables, **roomy_maps(), **own, **changed})


def step_sample():
    """Returns a step of two tables, of which one has counters that change."""
    added = add_sample(
        tables_in(update(2)) | scored_maps(), reused=whole(1, 0), reused_offsets=[0, 1, 2]
    )
    counters = scored(score_blocks(), TWO_SCORED, **roomy_maps())
    own = {
        "removed_ids": whole(6, 5), "removed_rows": whole(1, 0), "removed_offsets": [0, 1, 2],
        "seen_rows": whole(0, 2, -1, 2), "table_offsets": whole(0, 4, 4), "steps": whole(9, 9),
        "times": None, "new_steps": added.pop("steps"), "dropped_ids": whole(5, 5),
        "dropped_rows": whole(0, 0), "dropped_offsets": [0, 1, 2], "waiting_rows": whole(1, 2),
        "waiting_offsets": whole(0, 2, 2), "waiting_steps": whole(9, 9), "waiting_times": whole(1, 3),
        "begun_rows": whole(0, 0, 0), "begun_ids": whole(70, 71, 72), "begun_offsets": [0, 2, 3],
        "begun_first_rows": [6, 0], "begun_reused": whole(0, 0), "begun_reused_offsets": [0, 1, 2],
        "begun_steps": [9, 9], "begun_counts": whole(1, 2, 3), "begun_fills": None,
        "begun_index": None, "begun_places": None, "begun_initial_places": None,
        "counters": counters["tables"],
    }  # fmt: skip
    return {**added, **own}


def admit_sample(**changed):
    """Returns new ids of two tables, the first with counters: 5, 6 and 7 are waiting there."""
    squares = torch.ones(2, 33, dtype=torch.float64)
    squares[1, :2] = torch.tensor([0.5, 0.25])
    own = {
        "new_ids": whole(5, 8, 7, 30, 31), "occurrences": whole(1, 9, 1, 1, 2),
        "new_offsets": whole(0, 3, 5), "asks": None, "counted": None,
        "rules": whole(1, 9, 0, 1, 2, -5, 2, 0).view(2, 4), "squares": squares, "sums": True,
    }  # fmt: skip
    given = scored(score_blocks(), TWO_SCORED, **roomy_maps(), **own)
    given["counters"] = given.pop("tables")
    return {**given, **changed}


def lowest_sample(in_order=False, half_lives=None, **changed):
    """Returns two questions of two tables: the two lowest of three rows by count, and all by last_seen."""
    questions = whole(0, 3, 1, 9, 2, 1, 4, 0, 9, 7).view(2, 5)
    own = {"like": whole(), "questions": questions, "half_lives": half_lives, "in_order": in_order}
    return scored(score_blocks(), TWO_SCORED, **roomy_maps(), **own, **changed)


def choose_sample():
    """Returns lists of two tables: of the first, rows 0 and 2 are as listed."""
    listed = [whole(5, 6, 7, 0, 1, 2, 0, 9, 2).view(3, 3), whole(5, 9, 0, 3, 8, 3).view(3, 2)]
    spans = whole(0, 0, 3, 2, 1, 1, 2, 1).view(2, 4)
    return scored(score_blocks(), TWO_SCORED, **roomy_maps(), listed=listed, spans=spans)


def mark_blocks():
    """Returns three blocks of 4 marks; row r is marked with version r."""
    return list(torch.arange(12, dtype=torch.int32).reshape(3, 4, 1))


INITIAL = {"first_column": 1, "parameters": [-1.0, 1.0, 0.0, 1.0, 0.0, 1.0], "key": -3}
# By op: functions that return new arguments, the simplest first.
SAMPLES = {
    "mix64": [lambda: {"ids": whole(0, -1, 5)}, lambda: {"ids": whole()}],
    "raise_errors": [lambda: {"like": torch.empty(0)}, lambda: {"like": whole()}],
    "lookup": [
        lambda: {"ids": whole(5, 9, 5), "table_offsets": whole(0, 2, 3), **two_maps()},
        lambda: {"ids": whole(), "table_offsets": whole(0), "slots": [], "moved": whole()},
        lambda: {"ids": whole(5, 9, 5), "table_offsets": whole(0, 2, 3), **a_map_that_grows()},
    ],
    "collect_new": [
        lambda: {"ids": whole(5, 9, 9), "rows": whole(0, -1, -1), "table_offsets": whole(0, 3)}
    ],
    "insert": [
        lambda maps=maps: {
            "new_ids": whole(50, 51), "new_rows": whole(3, 1), "new_offsets": whole(0, 1, 2),
            **maps(),
        }
        for maps in (two_maps, a_map_that_grows)
    ],
    "erase": [
        lambda: {"ids": whole(5, 99), "slots": filled_slots()[::-1], "moved": whole(0)},
    ],
    "new_slots": [lambda: {"slots": filled_slots()[0], "capacity": 12}],
    "grown_slots": [
        lambda: {"slots": [filled_slots()[0], empty(0)], "capacities": [12, 4], "keys": [0, 7]}
    ],
    "move_slots": [
        lambda: {"outgoing": filled_slots()[0], "slots": empty(12), "moved": 0, "until": 3},
    ],
    "probe_lengths": [lambda: {"slots": filled_slots()[0], "every": 1}],
    "used_slots": [lambda: {"slots": filled_slots()[0]}],
    "ids_of_rows": [
        lambda: {"slots": filled_slots()[::-1], "moved": whole(0), "first": 0, "last": 4},
    ],
    "count_cells": [
        lambda: {"slots": filled_slots()[::-1], "moved": whole(0), "bits": 3},
        lambda: {"slots": [empty(0)], "moved": whole(-1), "bits": 0},
    ],
    "ids_between": [
        lambda last=last: {
            "slots": filled_slots()[::-1], "moved": whole(0), "first": 0, "last": last,
        }
        for last in (-1, 2**63 - 1)
    ],
    "content_sum": [
        lambda dtype=dtype: {
            "ids": whole(5, -6, 7), "values": torch.arange(6).reshape(3, 2).to(dtype),
            "first_column": 3, "key": -3,
        }
        for dtype in (torch.float32, torch.bfloat16, I64)
    ],
    "touch_scores_": [
        touch_sample,
        lambda: scored(
            [], SCORE_LAYOUT[:0], rows=whole(), table_offsets=whole(0), steps=whole(), times=None
        ),
        lambda: touch_sample(whole(1, 2, 3, 2**32 - 1, 5, 6)),
    ],
    "read_scores": [score_sample],
    "write_scores_": [
        lambda: score_sample(
            last_seen=whole(-1, 2**32 - 2, 0, 2**32 - 2, 9, 0),
            counts=whole(0, 2**32 - 1, 0, 2**32 - 1, 5, 6),
        )
    ],
    "add_rows_": [
        lambda: add_sample(tables_in(update(2)) | scored_maps()),
        lambda: add_sample(
            tables_in(update(2)), counts=whole(-1, 7, 2**40), places=whole(0, 2, 5),
        ),
        lambda: add_sample(
            {"weights": [], "layout": whole(0, 0, 0, 1).repeat(2, 1)} | scored_maps(),
            counts=whole(1, 2**32 - 1, 3), rows=None, new_index=None,
        ),
    ],
    "remove_rows_": [
        lambda tables=tables: prepared(
            tables() | scored_maps(),
            ids=whole(5, 7, 5), rows=whole(0, 2, 0), offsets=[0, 2, 3],
        )
        for tables in (
            lambda: tables_in(update(2)),
            lambda: {"weights": [], "layout": whole(0, 0, 0, 1).repeat(2, 1)},
        )
    ],
    "commit_step_": [step_sample],
    "admit": [
        admit_sample,
        lambda: admit_sample(
            asks=torch.tensor([True, False, True, False, True]), counted=whole(1, 0, 4, -1, 2),
        ),
        lambda: admit_sample(
            asks=torch.tensor([True, True, False, False, True]),
            rules=whole(3, 0, 0, 1, 2, -5, 2, 0).view(2, 4),
        ),
        lambda: admit_sample(
            rules=whole(0, 0, 0, 0, 1, 2, 0, 0).view(2, 4), counters=torch.empty(0, dtype=I64),
        ),
    ],
    "lowest_rows": [
        lowest_sample,
        lambda: lowest_sample(True),
        lambda: lowest_sample(half_lives=torch.arange(80).view(2, 40) - 40),
    ],
    "choose_listed": [choose_sample],
    "mark_rows_": [
        lambda: {
            "rows": whole(0, 7, -1, 7, 3, 0), "table_offsets": whole(0, 4, 5, 6),
            "marks": mark_blocks(), "layout": SCORE_LAYOUT, "versions": whole(5, 6, 2**31 - 1),
        },
        lambda: {
            "rows": whole(), "table_offsets": whole(0), "marks": [],
            "layout": SCORE_LAYOUT[:0], "versions": whole(),
        },
    ],
    "mark_new_": [
        lambda: {
            "rows": whole(3, 511, -1, 3, 70, 9, 9, 0), "table_offsets": whole(0, 5, 7, 8),
            "marks": [torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)],
            "layout": torch.tensor([[0, 1, 6, 1], [1, 1, 6, 1], [2, 0, 6, 1]]),
        },
        lambda: {
            "rows": whole(), "table_offsets": whole(0), "marks": [], "layout": SCORE_LAYOUT[:0],
        },
    ],
    "grow_block": [
        lambda: {"block": blocks(3)[0], "rows": 5, "limit": 9, "on_host": False},
        lambda: {"block": torch.empty(0, 2, dtype=I64), "rows": 1, "limit": 1, "on_host": True},
    ],
    "init_rows_": [
        lambda kind=kind: {
            "ids": whole(1, 2), "rows": whole(0, 11), **rows_of_a_table(), "kind": kind,
            **INITIAL,
        }
        for kind in (1, 0, 2)
    ],
    "ask_for_rows": [lambda: {"rows": whole(0, -1, 11), **rows_of_a_table()}],
    "gather_rows": [
        lambda dtype=dtype: {"rows": whole(0, -1, 11), **rows_of_a_table(dtype), "dtype": dtype}
        for dtype in (torch.float32, torch.float16)
    ],
    "scatter_rows_": [
        lambda: {"rows": whole(0, 11), "values": torch.ones(2, 3), **rows_of_a_table()}
    ],
    "sort_by_owner": [
        lambda weights=weights, dtype=dtype: {
            "ids": whole(5, -6, 7, 5), "lengths": torch.tensor([3, 0, 1], dtype=dtype),
            "weights": weights, "ranks": 3, "positions": weights is None,
        }
        for weights, dtype in (
            (torch.arange(4.0), I64), (None, torch.int32), (torch.arange(4).half(), I64),
        )
    ],
    "cache_rows_": [
        cache_sample,
        lambda: cache_sample(3, torch.bfloat16, loads=False),
        lambda: cache_sample(caches=[], cache_layout=torch.empty(0, 3, dtype=I64)),
    ],
    "row_places": [cached_batch],
    "gather_pool": [
        lambda: pool_sample(pooled()),
        lambda: pool_sample(pooled(torch.bfloat16, weighted=True), dtype=torch.float16),
        lambda: pool_sample(sequence(), elements=15),
    ],
    "prepare_tables": [
        lambda: tables_in(update(2) | two_maps()),
        lambda: tables_in(update_with_refusals(2, 1, 2) | two_maps()),
    ],
    "find_and_pool": [
        find_sample,
        lambda: find_sample(
            lengths=None, offsets=whole(0, 2, 3, 3, 5), segments=None, pools=0, collects=1,
        ),
    ],
    "pool_prepared_": [
        lambda: pool_prepared_sample(whole(0, -1, -1, -1, 3)),
        lambda: pool_prepared_sample(None, torch.float16, dtype=torch.bfloat16, weighted=True),
        lambda: pool_prepared_sample(None, initial_ids=whole(7, 8, 9, 7, 7)),
    ],
    "weights_grad_prepared": [
        lambda: prepared(grad_sample(pooled()), initial_ids=None),
        lambda: prepared(grad_sample(pooled()), initial_ids=whole(7, 8, 9, 7, 7)),
    ],
    "update_prepared_": [
        *(lambda number=number: prepared(update(number)) for number in NUMBERS),
        lambda: prepared(update_with_marks()),
    ],
    "update_rows_": [
        *(lambda number=number: update(number) for number in NUMBERS),
        lambda: update(2, dtype=torch.float16, weighted=True),
        lambda: update(0, senders=torch.tensor([0, 1, 1, -1, -1], dtype=torch.int32)),
        update_with_marks,
        lambda: update_with_refusals(2, 1, 2),
    ],
}  # fmt: skip
