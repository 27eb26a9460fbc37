"""The sums of a delta are kept from one version to the next: those of a pass over all rows, for less."""

import copy
from unittest import mock

import pytest
import torch
from delta_cases import Model, assert_same, batch, events, happen, per_table, train
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given, settings
from hypothesis import strategies as st
from table_cases import ids_of
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn import knobs, ops
from torchrec_dyn.checkpoint import apply_delta, export_delta, mark
from torchrec_dyn.lookup import Batch
from torchrec_dyn.state_dict import saved_sums, saving
from torchrec_dyn.whole_model import tables_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def touched_of(model):
    """Returns the touched rows of each shard of the tables that record their changes."""
    shards = [shard for table in tables_of(model, "test") for shard in table.shards]
    return [shard.changes.touched for shard in shards if shard.changes is not None]


def check_sums(model) -> int:
    """Compares the sums with those of a pass over all rows; returns how many shards had kept theirs."""
    tables, logs = tables_of(model, "test"), touched_of(model)
    num_kept = sum(log.rest is not None for log in logs)
    sums = saved_sums(tables, "test")
    rests = [log.rest for log in logs]
    for log in logs:
        log.rest = None
    assert sums == saved_sums(tables, "test")
    for log, rest in zip(logs, rests, strict=True):
        log.rest = rest
    return num_kept


more_events = st.one_of(
    events,
    events,
    st.tuples(st.just("open"), per_table),
    st.just(("learn",)),
    st.just(("second",)),
    st.just(("version",)),
    st.just(("freeze",)),
    st.just(("check",)),
)


@pytest.mark.parametrize("optimizer", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, "ADAMW"])
@settings(max_examples=max(1, settings.default.max_examples // 6))
@given(before=per_table, after=st.lists(more_events, max_size=30))
def test_kept_sums_are_those_of_all_rows(tmp_path_factory, optimizer, before, after):
    """Two markers at once, gradients that come late, frozen tables, and versions without sums."""
    folder = tmp_path_factory.mktemp("deltas")
    model = Model(optimizer)
    train(model, before)
    sides = [[mark(model), copy.deepcopy(model)]]  # markers, each with a copy of its moment
    opened, versions, number = [], [], 0
    for event in [*after, ("export",), ("second",), ("export",)]:
        if event[0] == "open":
            model.train()
            opened.append(model(event[1]))
        elif event[0] == "learn":
            if opened:
                opened.pop(0).backward()
        elif event[0] == "second":
            sides[1:] = [[mark(model), copy.deepcopy(model)]]
        elif event[0] == "version":
            versions[:] = [table.version() for table in model.tables().values()]
        elif event[0] == "freeze":
            weight = model.pooled.embedding_bags["plain"].weight
            weight.requires_grad_(not weight.requires_grad)
        elif event[0] == "check":
            check_sums(model)
        elif event[0] == "export":
            side = sides[number % len(sides)]
            side[0] = export_delta(model, folder / str(number), side[0])
            apply_delta(side[1], folder / str(number))
            assert_same(model, side[1])
            number += 1
        else:
            happen(model, event)
            if event[0] == "reload":
                opened.clear()
    assert check_sums(model) == len(touched_of(model))


def plain(rows: int, **fused):
    """Returns a collection of one table with the ids [0, rows)."""
    config = EmbeddingBagConfig(10**6, 4, "t", feature_names=["f"])
    fused |= {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    made = dyn.DynamicEmbeddingBagCollection([config], fused_params=fused)
    learn(made, torch.arange(rows))
    return made


def learn(model, ids) -> None:
    model(features(ids)).values().sum().backward()


def features(ids):
    return KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))


def test_an_export_reads_the_changed_rows_and_scans_no_map(tmp_path):
    """10 changed of 30,000 rows: also a second marker, and a marker of the same moment, read no more."""
    model = plain(30_000)
    marker, read = mark(model), []
    learn(model, torch.arange(10))
    whole, count_cells = saving.content_sum, ops.count_cells

    def counted(table, name, ids, *rest):
        read.append(ids.numel())
        return whole(table, name, ids, *rest)

    def small(slots, *rest):
        assert sum(map(len, slots)) <= 256, "a map of all rows is scanned"
        return count_cells(slots, *rest)

    with (
        mock.patch.object(saving, "content_sum", counted),
        mock.patch.object(ops, "count_cells", small),
        mock.patch.object(ops, "ids_of_rows", side_effect=AssertionError("rows are listed")),
    ):
        second = mark(model)
        marker = export_delta(model, tmp_path / "0", marker)
        learn(model, torch.arange(5))
        export_delta(model, tmp_path / "1", second)
        assert 0 < max(read) <= 10
    assert check_sums(model) == 1


def test_a_delta_replaces_the_changed_rows_without_a_list_of_all(tmp_path):
    model = plain(30_000)
    twin, marker = copy.deepcopy(model), mark(model)
    learn(model, torch.arange(10))
    export_delta(model, tmp_path / "0", marker)
    listed, ids_of_rows = [], ops.ids_of_rows

    def noted(slots, moved, first, last):
        listed.append(last - first)
        return ids_of_rows(slots, moved, first, last)

    with mock.patch.object(ops, "ids_of_rows", noted):
        apply_delta(twin, tmp_path / "0")
    assert listed == [30_000], "once the copy for its sums; the delta's rows are summed as read"


def test_a_copy_that_records_its_changes_may_apply_a_delta(tmp_path):
    """Rows that it removes, rewrites and adds; the copy goes on with deltas of its own."""
    model = Model(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    train(model, batch(1, 1, 2, 2))
    copies = [copy.deepcopy(model) for _ in range(2)]
    marker, own = mark(model), mark(copies[0])
    train(model, batch(2, 3, 3))
    for table in model.tables().values():
        table.erase(ids_of(1))
    export_delta(model, tmp_path / "0", marker)
    apply_delta(copies[0], tmp_path / "0")
    assert check_sums(copies[0]) == 4
    export_delta(copies[0], tmp_path / "1", own)
    apply_delta(copies[1], tmp_path / "1")
    assert_same(model, copies[1])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_late_gradient_is_of_no_row(is_late):
    """The id was erased before the version, or after it; its row is written after both."""
    model = plain(20)
    marker = mark(model)
    output = model(features(ids_of(3, 4))).values().sum()
    if is_late:
        marker = mark(model)
    model.table("t").erase(ids_of(3))
    if not is_late:
        marker = mark(model)
    output.backward()
    assert check_sums(model) == 1
    learn(model, ids_of(3, 21))
    assert check_sums(model) == 1 and marker is not None


def test_a_row_of_an_erased_id_that_a_later_forward_notes_is_not_in_the_sums():
    """A prefetched step holds the row; its forward notes it by the id, after the version."""
    model, ids = plain(20), ids_of(3, 4)
    first = mark(model)
    (group,) = model.unsharded_lookup.table_groups()
    batch = Batch(ids, offsets=torch.tensor([0, 1, 2]))
    ahead = group.prefetch_step(batch)
    model.table("t").erase(ids_of(3))
    second = mark(model)
    output = group(batch, ahead)
    assert check_sums(model) == 1
    output.sum().backward()
    assert check_sums(model) == 1 and first is not second


def test_a_version_without_sums_leaves_no_wrong_sums():
    """A row touched before it and after it is not among the sums that are kept."""
    model = plain(20)
    marker = mark(model)
    learn(model, ids_of(1, 2))
    version = model.local_tables()["t"].version()
    learn(model, ids_of(2, 3))
    check_sums(model)
    learn(model, ids_of(2, 4))
    assert check_sums(model) == 1 and marker is not version


def test_deferred_updates_are_touched_when_they_are_written():
    """A marker between backward and step; an id of the step was erased meanwhile."""
    model = plain(20, defer_updates=True)
    model.fused_optimizer.step()
    first = mark(model)
    learn(model, ids_of(1, 2, 3, 21))
    second = mark(model)
    learn(model, ids_of(3, 4))
    model.table("t").erase(ids_of(2))
    assert check_sums(model) == 1
    model.fused_optimizer.step()
    assert check_sums(model) == 1 and first is not second


def test_the_ids_of_a_long_time_take_no_more_than_twice_the_rows():
    """An old marker and one after each step: each step changes all 5,000 rows; 100 ids come and go."""
    model = plain(5000)
    old, markers = mark(model), []
    log = touched_of(model)[0]
    bits = log.bytes
    for step in range(30):
        learn(model, torch.arange(5000))
        learn(model, torch.arange(10_000 + 100 * step, 10_100 + 100 * step))
        model.table("t").erase(torch.arange(10_000 + 100 * step, 10_100 + 100 * step))
        markers = [mark(model), *markers[:1]]
        assert log.bytes <= bits + 8 * 3 * 5200
    assert model.local_tables()["t"].stats()["bytes"] > log.bytes - bits
    assert check_sums(model) == 1
    del old, markers
    marker = mark(model)
    learn(model, ids_of(1))
    assert log is not touched_of(model)[0] or log.bytes <= bits + 8
    assert marker is not None


def test_no_memory_for_a_sum_leaves_the_record_whole(tmp_path):
    model = plain(20)
    twin, marker = copy.deepcopy(model), mark(model)
    with (
        mock.patch.object(saving, "content_sum", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        model(features(ids_of(1, 2)))
    learn(model, ids_of(2, 3))
    assert check_sums(model) == 0
    export_delta(model, tmp_path / "0", marker)
    apply_delta(twin, tmp_path / "0")
    now, before = model.state_dict(), twin.state_dict()
    assert all(tensor.equal(before[name]) for name, tensor in now.items())


def test_few_ids_are_compacted(monkeypatch):
    """Ids listed before and after a version in use are kept once, at the later version."""
    monkeypatch.setattr(knobs, "LEAST_COMPACTED_IDS", 0)
    model = plain(4)
    first = mark(model)
    learn(model, ids_of(0, 1, 2))
    second = mark(model)
    learn(model, ids_of(1, 2, 3))
    model.table("t").erase(ids_of(0))
    learn(model, torch.arange(100, 103))
    model.table("t").erase(torch.arange(100, 103))
    table = model.local_tables()["t"]
    third = table.version()
    for marker, ids in ((first, [1, 2, 3]), (second, [1, 2, 3])):
        (version,) = marker._tables["t"].versions
        assert version.log.changed_rows(version, table.id_map)[0].tolist() == ids
    assert third.log.touched._count <= 2 * 3, "of 10 listed"
