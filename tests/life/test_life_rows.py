"""Contents of rows when ids change: fresh rows, refused ids, orphan rows, and errors that change nothing."""

import gc
import re

import pytest
import torch
from life_cases import LFU, LRU, InitialRows, Stream, assert_seen, living_table, seen
from table_cases import bags_of, ids_of, make_group

import torchrec_dyn as dyn
from torchrec_dyn.initializers import Constant
from torchrec_dyn.optimizers import OptimizerKind

ONE = {"initializer": Constant(1.0), "kind": OptimizerKind.EXACT_SGD}  # gradient 1: -0.1
every_kind = pytest.mark.parametrize("kind", list(OptimizerKind), ids=lambda kind: kind.name)

LEAVINGS = {
    "full": (LRU, lambda stream: stream.steps([2], [3])),
    "expired": (dyn.ExpireAfter(steps=1), lambda stream: stream.steps([], [])),
    "erased": (LRU, lambda stream: stream.table.erase(ids_of(1))),
}


@every_kind
@pytest.mark.parametrize("cause", LEAVINGS)
def test_an_id_that_comes_back_starts_anew(cause, kind):
    """Row, optimizer state, count and last step are new."""
    eviction, leave = LEAVINGS[cause]
    stream = Stream(eviction, limit=2, kind=kind)
    stream.steps([1], [1, 1])
    leave(stream)
    assert 1 not in stream.ids() and stream.counts(1) == [0] and stream.last_seen(1) == [-1]
    stream.group(ids_of(1), torch.tensor([0, 1]), training=True)  # no backward
    state = stream.table.export_state()
    place = state["ids"].tolist().index(1)
    assert torch.equal(state["weight"][place], InitialRows(stream.table)(1))
    for name in stream.table.optimizer.state_names:
        assert not state[name][place].any(), name
    assert stream.counts(1) == [1] and stream.last_seen(1) == [stream.table.step]


@pytest.mark.parametrize(
    ("eviction", "remedy"),
    [
        (None, "eviction=LeastRecentlyUsed()"),
        (dyn.ExpireAfter(steps=5), "eviction=(ExpireAfter(...), LeastRecentlyUsed())"),
    ],
)
def test_the_error_of_a_full_table_names_an_eviction_that_makes_room(eviction, remedy):
    table = living_table(eviction, limit=2)
    table.assign(ids_of(1, 2), torch.ones(2, 4))
    told = re.escape(f"Raise num_embeddings, or evict rows: DynamicTableConfig({remedy}).")
    with pytest.raises(RuntimeError, match=f"at most 2 rows here .*{told}"):
        table.assign(ids_of(3), torch.ones(1, 4))
    with pytest.raises(RuntimeError, match=told):
        make_group(table)(ids_of(3), torch.tensor([0, 1]), training=True)


# Refused ids.


@pytest.mark.parametrize("unseen", ["zeros", "initial"])
@pytest.mark.parametrize(
    "admission", [dyn.AdmitAfter(9), dyn.AdmitWithProbability(1e-12)], ids=["count", "chance"]
)
def test_refused_ids_read_as_unseen_says_and_learn_nothing(admission, unseen):
    """In sums, means and sequences; known ids of the same bags are still trained."""
    reads = 0.0 if unseen == "zeros" else 1.0
    for pooling in ("sum", "mean", "none"):
        table = living_table(None, admission, unseen=unseen, **ONE)
        table.assign(ids_of(1), torch.full((1, 4), 5.0))
        group = make_group(table, pooling=pooling)
        ids, offsets = bags_of([1, 2, 2, 3], [2], [], [1])
        output = group(ids, offsets if pooling != "none" else ids_of(0, 6), training=True)
        sums, sizes = [5 + 3 * reads, reads, 0.0, 5.0], [4, 1, 1, 1]
        expected = {
            "sum": sums,
            "mean": [one / size for one, size in zip(sums, sizes, strict=True)],
            "none": [5.0, reads, reads, reads, reads, 5.0],
        }
        assert output[:, 0].tolist() == expected[pooling]
        output.sum().backward()
        learnt = 0.1 * (1.25 if pooling == "mean" else 2.0)
        assert table.ids().tolist() == [1] and table.stats()["refused"] == 4
        assert table.lookup(ids_of(1))[0][0].tolist() == pytest.approx([5.0 - learnt] * 4)
        evaluated = group(ids_of(2, 9), ids_of(0, 2) if pooling == "none" else ids_of(0, 1, 2),
                          training=False)  # fmt: skip
        assert evaluated[:, 0].tolist() == [reads, reads]


@pytest.mark.parametrize(("unseen", "grads"), [("zeros", [20.0, 0, 0]), ("initial", [20.0, 4, 4])])
def test_weights_of_refused_ids_get_the_gradient_of_what_was_read(unseen, grads):
    table = living_table(None, dyn.AdmitAfter(9), unseen=unseen, **ONE)
    table.assign(ids_of(1), torch.full((1, 4), 5.0))
    weights = torch.tensor([2.0, 3.0, -1.0], requires_grad=True)
    ids, offsets = bags_of([1, 2], [3])
    output = make_group(table)(ids, offsets, weights, training=True)
    reads = grads[1] / 4
    assert output[:, 0].tolist() == [10 + 3 * reads, -reads]
    output.sum().backward()
    assert weights.grad.tolist() == grads
    assert table.ids().tolist() == [1]
    assert table.lookup(ids_of(1))[0][0].tolist() == pytest.approx([4.8] * 4)


def test_what_a_refused_id_was_shown_does_not_linger():
    """An id that is admitted later starts with its initial row and without optimizer state."""
    stream = Stream(admission=dyn.AdmitAfter(2), unseen="initial", kind=OptimizerKind.ADAM)
    shown = stream.group(ids_of(1), torch.tensor([0, 1]), training=True)
    shown.sum().backward()
    started = stream.group(ids_of(1), torch.tensor([0, 1]), training=True)
    assert torch.equal(shown, started)
    assert not stream.table.export_state()["momentum1"].any()
    assert stream.stat("late_grads") == 0


# Evaluation.


@pytest.mark.parametrize("eviction", [LRU, LFU, (dyn.ExpireAfter(steps=1), LRU)])
def test_evaluation_changes_nothing(eviction):
    """Even if rows are past their age and the table is full."""
    stream = Stream(eviction, dyn.AdmitAfter(2, counters=2), limit=2)
    stream.steps([1, 1], [2, 2, 3, 4])
    before, slots = seen([stream.table]), stream.table.id_map.slots.clone()
    for _ in range(3):
        weights = torch.ones(6, requires_grad=True)
        batch = bags_of([1, 1, 5, 5], [], [3, 4])
        stream.group(*batch, weights, training=False).sum().backward()
    assert_seen([stream.table], before)
    assert torch.equal(stream.table.id_map.slots, slots)


# Errors.


def test_a_batch_beyond_the_limit_changes_no_table_of_the_call():
    """Neither the tables before it, which would expire, count or evict ids, nor the table itself."""
    pair = (dyn.ExpireAfter(steps=1), LRU)
    tables = [
        living_table(dyn.ExpireAfter(steps=1), dyn.AdmitAfter(2, counters=1), name="due"),
        living_table(LFU, limit=3, name="lfu"),
        living_table(pair, dyn.AdmitAfter(2), limit=3, name="tight"),
        living_table(None, limit=50, name="plain"),
    ]
    group = make_group(*tables)
    group(*bags_of([1, 1, 2], [1, 2, 3], [1, 1, 2, 2, 8], [1]), training=True).sum().backward()
    group(*bags_of([], [], [2], []), training=True).sum().backward()
    before = seen(tables)
    big = [2, 4, 4, 5, 5, 6, 6, 7]
    with pytest.raises(RuntimeError, match=r"'tight'.*at most 3 rows.*num_embeddings=3.*\b4\b"):
        group(*bags_of([1, 3, 4], [8, 9], big, [1, 2]), training=True)
    assert_seen(tables, before)
    group(*bags_of([1, 3, 4], [8, 9], big[:5], [1, 2]), training=True).sum().backward()
    assert [table.num_rows for table in tables] == [0, 3, 3, 2]
    assert set(tables[2].ids().tolist()) == {2, 4, 5}
    assert tables[0].stats()["evicted_expired"] == 1 == tables[2].stats()["evicted_expired"]
    assert tables[1].stats()["evicted_full"] == 2


def test_tables_of_one_call_live_each_by_its_own():
    tables = [
        living_table(LRU, limit=2, name="recent"),
        living_table(LFU, dyn.AdmitAfter(2), limit=2, name="frequent"),
        living_table(None, name="plain"),
        living_table(dyn.ExpireAfter(time=3), name="timed"),
    ]
    group = make_group(*tables)
    tables[3].set_time(7)
    for batch in ([1, 1], [2, 2, 2], [3, 3]):
        group(*bags_of(*[batch] * 4), training=True).sum().backward()
    assert [set(table.ids().tolist()) for table in tables] == [{2, 3}, {2, 3}, {1, 2, 3}, {1, 2, 3}]
    tables[3].set_time(11)
    group(*bags_of([1], [1], [1], [1]), training=True).sum().backward()
    assert [set(table.ids().tolist()) for table in tables] == [{3, 1}, {2, 3}, {1, 2, 3}, {1}]
    assert tables[0].last_seen(ids_of(1, 2, 3)).tolist() == [4, -1, 3]
    assert tables[1].count(ids_of(1, 2, 3)).tolist() == [1, 3, 2]
    for ask in (tables[2].last_seen, tables[2].count):
        with pytest.raises(ValueError, match=r"'plain'.*expected"):
            ask(ids_of(1))
    assert "last_seen" not in tables[2].export_state()


# Orphans.


def test_late_gradients_go_to_the_orphan():
    """A row is evicted while its forward is open; its id and the row's next id start fresh."""
    stream = Stream(LRU, limit=2, **ONE)
    late = stream.group(*bags_of([1], [2]), training=True)
    assert stream.step(3) & {1, 2} and stream.stat("withheld") == 1
    gone = ({1, 2} - stream.ids()).pop()
    assert stream.step(4) == {3, 4} and stream.stat("withheld") == 2
    stream.group(*bags_of([gone]), training=True)
    (late * 100).sum().backward()
    assert stream.stat("late_grads") == 2 and stream.stat("withheld") == 0
    assert stream.weights(gone, 4) == [1.0, pytest.approx(0.9)]
    rows = stream.table.row_numbers.high_water_mark
    stream.steps([5], [6])
    assert stream.table.row_numbers.high_water_mark == rows, "freed rows serve again"
    assert stream.weights(5, 6) == pytest.approx([0.9, 0.9])


def test_forwards_whose_backward_never_comes():
    """While they are held they withhold rows, and the table works on; once dropped, the rows are reused."""
    stream, held = Stream(LRU, limit=2, **ONE), []
    for number in range(10):
        held.append(stream.group(*bags_of([number]), training=True))
        assert stream.stat("rows") == min(number + 1, 2)
    assert stream.stat("withheld") == 8 and stream.ids() == {8, 9}
    held.clear()
    gc.collect()
    assert stream.stat("withheld") == 0 and stream.stat("late_grads") == 0
    high = stream.table.row_numbers.high_water_mark
    stream.steps([20], [21], [22])
    assert stream.table.row_numbers.high_water_mark == high == 10
    assert stream.weights(21, 22) == pytest.approx([0.9, 0.9])


def test_who_leaves_does_not_depend_on_who_holds_a_forward():
    """Python's garbage collection decides which row numbers are free, never which ids stay."""
    streams = [Stream((dyn.ExpireAfter(steps=5), LFU), dyn.AdmitAfter(2), limit=8) for _ in "ab"]
    draw, held = torch.Generator().manual_seed(3), []
    for step in range(60):
        ids = torch.randint(step // 4, step // 4 + 12, (6,), generator=draw)
        for stream in streams:
            held.append(stream.group(ids, torch.tensor([0, 6]), training=True))
        one, other = (stream.table.export_state() for stream in streams)
        for name in ("ids", "last_seen", "count", "waiting"):
            assert torch.equal(one[name], other[name])
        if step % 7 == 0:
            held[:] = held[1::2]  # forwards of the second table
    assert streams[0].stat("withheld") != streams[1].stat("withheld")
