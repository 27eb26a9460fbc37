"""Stats reach a writer or a dict under pinned names, whatever wraps the model, and when asked to.

test_stats_resumed.py has hooks that continue those of an earlier process.
"""

from __future__ import annotations

import copy
import errno
import os
import re
from functools import cache

import pytest
import torch.distributed as dist
import workers
from pipeline_model import Run, batches, sharded_model
from pipeline_runs import check_pipelined, drain, make_pipeline, shims_for
from stats_writer import Towers, Writer, features
from torch import nn

from torchrec_dyn import (
    add_stats_hook,
    log_stats,
    read_stats,
    stats_layout,
)

# Dashboards are built on these names.
STATS = [
    *("bytes", "counters_dropped", "counters_expired", "erased", "evicted_expired", "evicted_full"),
    *("forwards", "hits", "ids_seen", "inserted", "late_grads", "limit", "load", "nonfinite"),
    *(
        "probe_length_max",
        "probe_length_mean",
        "refused",
        "rows",
        "rows_loaded",
        "rows_written_back",
    ),
    *("slots", "step", "unseen", "waiting", "withheld"),
]


def names(*tables: str) -> list[str]:
    return [f"{table}/{stat}" for table in tables for stat in STATS]


def test_a_dict_gets_every_stat_of_every_table():
    model, seen = Towers(), {"mine": 1}
    model(features(1, 2, 2))
    log_stats(model, seen, step=0)
    assert sorted(seen) == sorted(["mine", *names("deep.ebc/user", "deep.ebc/item", "ec/word")])
    for path, table in (
        ("deep.ebc/user", model.deep["ebc"].table("user")),
        ("deep.ebc/item", model.deep["ebc"].table("item")),
        ("ec/word", model.ec.table("word")),
    ):
        assert {stat: seen[f"{path}/{stat}"] for stat in STATS} == table.stats()
    assert (seen["deep.ebc/user/rows"], seen["deep.ebc/item/rows"]) == (2, 1)
    model(features(3))
    assert seen["deep.ebc/user/rows"] == 2
    log_stats(model, seen, step=1)
    assert seen["deep.ebc/user/rows"] == 3


def test_a_writer_gets_name_value_and_step():
    model, writer, seen = Towers(), Writer(), {}
    model(features(1, 2))
    log_stats(model, writer, 41)
    log_stats(model, seen, 41)
    assert writer.scalars == [(name, value, 41) for name, value in seen.items()]


def test_a_collection_by_itself_and_one_that_is_shared():
    model, seen = Towers(), {}
    log_stats(model.ec, seen, 0)
    assert sorted(seen) == names("word")
    shared, writer = nn.ModuleList([model.ec, model.ec]), Writer()
    log_stats(shared, writer, 0)
    assert sorted(tag for tag, _, _ in writer.scalars) == names("0/word")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda model: log_stats(nn.Linear(2, 2), {}, 0),
            "log_stats: expected a model with a dynamic collection, got Linear without one. Make",
        ),
        (
            lambda model: add_stats_hook(nn.Linear(2, 2), {}),
            "add_stats_hook: expected a model with a dynamic collection, got Linear without one.",
        ),
        (
            lambda model: log_stats(model, [], 0),
            "log_stats.to: expected an object with add_scalar, as TensorBoard's SummaryWriter, or a "
            "dict, got list.",
        ),
        (lambda model: log_stats(model, None, 0), "a dict, got NoneType."),
        (lambda model: add_stats_hook(model, print), "add_stats_hook.to: expected an object with"),
        (
            lambda model: stats_layout(nn.Linear(2, 2)),
            "stats_layout: expected a model with a dynamic collection, got Linear without one.",
        ),
        (
            lambda model: log_stats(model, [], 0, totals=True),
            "log_stats.to: expected an object with add_scalar, as TensorBoard's SummaryWriter, or a "
            "dict, got list.",
        ),
        (
            lambda model: add_stats_hook(model, {}, every=0),
            "add_stats_hook.every: expected an integer above 0, got 0.",
        ),
        (lambda model: add_stats_hook(model, {}, every=True), "above 0, got True."),
        (lambda model: add_stats_hook(model, {}, every=2.0), "above 0, got 2.0."),
    ],
)
def test_mistakes(call, text):
    model = Towers()
    with pytest.raises(ValueError, match=re.escape(text)):
        call(model)
    assert not model._forward_hooks


def test_a_hook_counts_training_forwards_until_it_is_removed():
    model, writer = Towers(), Writer()
    handle = add_stats_hook(model, writer, every=3)
    for step in range(1, 8):
        model(features(step))
        model.eval()
        model(features(99))
        model.train()
    # After the forward: the rows of the very batch that it counts are there.
    assert writer.steps("deep.ebc/user/rows") == [(3, 3), (6, 6)]
    assert len(writer.scalars) == 2 * 3 * len(STATS)
    handle.remove()
    for step in range(8, 20):
        model(features(step))
    assert len(writer.scalars) == 2 * 3 * len(STATS)


def test_hooks_count_for_themselves_and_a_hundred_is_usual():
    model, often, seldom = Towers(), Writer(), {}
    for step in range(200):
        if step == 0:
            add_stats_hook(model, seldom)
        if step == 1:
            add_stats_hook(model, often, every=1)
        model(features(step % 5))
        assert bool(seldom) == (step >= 99)
    assert [step for step, _ in often.steps("ec/word/step")] == list(range(1, 200))
    assert seldom["ec/word/step"] == 200


def test_totals_of_an_unsharded_model_are_its_stats():
    model, totals, own = Towers(), {}, {}
    model(features(1, 2, 2))
    log_stats(model, totals, 0, totals=True)
    log_stats(model, own, 0)
    assert totals == own
    log_stats(model, None, 0, totals=True)  # as the ranks do that write nothing


def test_a_copy_of_a_model_shares_its_hook():
    """As with hooks of torch's; a writer cannot be copied."""
    model, writer = Towers(), Writer()
    with add_stats_hook(model, writer, every=1):
        copy.deepcopy(model)(features(1))
        model(features(1))
    model(features(1))
    assert writer.steps("ec/word/rows") == [(1, 1), (2, 1)]


def test_a_layout_has_each_stat_of_each_table_in_at_most_one_chart():
    model, seen = Towers(), {}
    log_stats(model, seen, 0)
    charted = []
    for title, charts in stats_layout(model).items():
        assert title in {"deep.ebc/user", "deep.ebc/item", "ec/word"}
        for kind, tags in charts.values():
            assert kind == "Multiline"
            for tag in tags:  # as TensorBoard reads a tag
                others = ["deepXebc/user/rows", "ec/word/rows_of_another_day"]
                found = [name for name in [*seen, *others] if re.match(tag, name)]
                assert len(found) == 1 and found[0].startswith(f"{title}/")
                charted += found
    assert len(charted) == len(set(charted))
    left_out = {"forwards", "load", "slots", "step", "withheld"}
    assert {*seen} - {*charted} == {name for name in seen if name.rpartition("/")[2] in left_out}


class FullDisk(Writer):
    """Writes to a disk that has no room from the second step on."""

    log_dir = "/runs/monday"

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """As `Writer.add_scalar`."""
        if global_step == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().add_scalar(tag, scalar_value, global_step)


def test_a_writer_without_room_is_an_error_with_its_folder():
    """Training goes on where the caller catches it: the rows of the step are there."""
    model, writer = Towers(), FullDisk()
    add_stats_hook(model, writer, every=1)
    model(features(1))
    with pytest.raises(OSError, match="No space left on device: '/runs/monday'"):
        model(features(2))
    assert model.ec.table("word").num_rows == 2
    model(features(3))
    assert writer.steps("ec/word/rows") == [(1, 1), (3, 3)]


# On two ranks, plainly and in pipelines.

RUN = Run(("table_wise", "row_wise", "column_wise"), ("row_wise",), beside=True, steps=6)
TABLES = [("pooled", f"pooled_{i}") for i in range(3)] + [("sequences", "sequences_0")]


def watch_training(pipeline_name: str, before_sharding: bool) -> list[tuple[str, float, int]]:
    """Trains under a hook on this rank, and gives what it wrote."""
    writer, totals = Writer(), Writer()
    is_first = dist.get_rank() == 0
    with shims_for(pipeline_name):
        model = sharded_model(RUN)
        hooked = model.module if before_sharding else model
        add_stats_hook(hooked, writer, every=2)
        add_stats_hook(hooked, totals if is_first else None, every=2, totals=True)
        pipeline = make_pipeline(RUN, pipeline_name, model)
        drain(pipeline, batches(RUN))
        if pipeline_name != "base":
            check_pipelined(RUN, pipeline)
    seen: dict[str, float] = {}
    log_stats(model, seen, RUN.steps)
    handles = {
        f"{collection}/{table}": getattr(model.module, collection).table(table)
        for collection, table in TABLES
    }
    stats = {
        f"{path}/{stat}": value
        for path, handle in handles.items()
        for stat, value in handle.stats().items()
    }
    assert seen == stats
    whole = {
        f"{collection}/{table}/{stat}": value
        for collection, table in TABLES
        for stat, value in read_stats(getattr(model.module, collection), table).items()
    }
    written = {tag: value for tag, value, step in totals.scalars if step == RUN.steps}
    assert written == (whole if is_first else {})
    assert {step for _, _, step in totals.scalars} == ({2, 4, 6} if is_first else set())
    # A table-wise table has rows on one rank only; the other ranks know of none.
    held = [path for path, handle in handles.items() if handle.columns]
    assert sorted({name.rpartition("/")[0] for name, _, _ in writer.scalars}) == sorted(handles)
    for path in held:
        rows = writer.steps(f"{path}/rows")
        assert [step for step, _ in rows] == [2, 4, 6]
        assert 0 < rows[0][1] < rows[1][1] < rows[2][1] == handles[path].num_rows
        assert writer.steps(f"{path}/step") == [(2, 2), (4, 4), (6, 6)]
    # Two models have maps with other keys.
    return [one for one in writer.scalars if "/probe_length" not in one[0]]


@cache
def watched(pipeline: str, before_sharding: bool = False) -> list[list[tuple[str, float, int]]]:
    return workers.run(watch_training, pipeline, before_sharding, world_size=2)


def test_each_rank_writes_of_its_shard() -> None:
    first, second = ({tag: value for tag, value, _ in scalars} for scalars in watched("base"))
    assert first["pooled/pooled_1/rows"] != second["pooled/pooled_1/rows"]  # row-wise
    assert first["pooled/pooled_2/rows"] == second["pooled/pooled_2/rows"]  # column-wise


def test_a_hook_from_before_sharding_goes_on() -> None:
    assert watched("sparse_dist", before_sharding=True) == watched("base")


@pytest.mark.everyday(2)
@pytest.mark.parametrize("pipeline", ["sparse_dist", "fused", "semi_sync", "prefetch"])
def test_pipelines_write_what_the_plain_loop_does(pipeline: str) -> None:
    for got, expected in zip(watched(pipeline), watched("base"), strict=True):
        different = {mine[0] for mine, plain in zip(got, expected, strict=True) if mine != plain}
        # Where ids get their rows in the prefetch, the forward finds all of them.
        allowed = {"hits", "unseen"} if pipeline == "prefetch" else set()
        assert {name.rpartition("/")[2] for name in different} <= allowed
