"""Direct calls of TableShard: read, write, erase, save, copy; evaluation changes nothing; memory."""

import copy
import io
import pickle

import pytest
import torch
from oracle import EXTREME_IDS, canonical_order
from table_cases import bags_of, ids_of, make_group, make_table, random_bags, same_state

from torchrec_dyn import AdmitAfter, LeastRecentlyUsed
from torchrec_dyn.initializers import Constant, Normal
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_kind = pytest.mark.parametrize("kind", list(OptimizerKind), ids=lambda kind: kind.name)


def trained_table(kind=OptimizerKind.ADAM, order=1, **options):
    """Returns a table trained on up to 200 ids."""
    table = make_table(kind, initializer=Normal(0.0, 1.0), **options)
    group = make_group(table)
    ids, offsets = random_bags(2, bags=40, longest=9, pool=200)
    known = torch.unique(ids)
    first = known if order == 1 else known.flip(0)
    group.prefetch(first, torch.tensor([0, len(first)]))
    draw = torch.Generator().manual_seed(1)
    for _ in range(2):
        output = group(ids, offsets, training=True)
        output.backward(torch.randn(output.shape, generator=draw))
    return table


@pytest.mark.parametrize("dtype", DTYPES)
def test_assign_then_lookup(dtype):
    table = make_table(dtype=dtype)
    ids, rows = ids_of(*EXTREME_IDS), torch.randn(len(EXTREME_IDS), 4)
    table.assign(ids, rows)
    got, found = table.lookup(torch.cat([ids, ids_of(99, EXTREME_IDS[0])]))
    assert got.dtype == dtype
    assert found.tolist() == [True] * len(ids) + [False, True]
    assert torch.equal(got[: len(ids)], rows.to(dtype))
    assert not got[-2].any() and torch.equal(got[-1], got[0])
    assert table.ids().tolist() == canonical_order(EXTREME_IDS)


class WithoutMemory(torch.Tensor):
    """Rows of which no copy in another dtype or on another device can be made."""

    def to(self, *_, **__):
        raise RuntimeError("can't allocate memory")


def test_assign_without_memory_for_a_copy_of_the_rows_changes_nothing():
    table = make_table(dtype=torch.float16)
    table.assign(ids_of(1), torch.ones(1, 4))
    before = table.export_state()
    with pytest.raises(RuntimeError, match="allocate"):
        table.assign(ids_of(1, 2), torch.zeros(2, 4).as_subclass(WithoutMemory))
    assert same_state(table.export_state(), before)


def test_assign_takes_the_last_of_repeats_and_keeps_state():
    table = trained_table()
    known = int(table.ids()[0])
    before = table.export_state()
    table.assign(ids_of(known, 777777, known), torch.arange(12.0).reshape(3, 4))
    assert table.lookup(ids_of(known, 777777))[0].tolist() == [[8, 9, 10, 11], [4, 5, 6, 7]]
    after = table.export_state()
    place = after["ids"].tolist().index(known)
    assert torch.equal(after["momentum1"][place], before["momentum1"][0])
    fresh = after["ids"].tolist().index(777777)
    assert not after["momentum1"][fresh].any() and not after["momentum2"][fresh].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_given_nothing_done(dtype):
    """Calls with zero ids, before and after the first block exists."""
    table = make_table(dtype=dtype)
    for _ in range(2):
        table.assign(ids_of(), torch.empty(0, 4))
        assert table.erase(ids_of()) == 0
        assert table.lookup(ids_of())[0].shape == (0, 4)
        assert table.find_or_insert(ids_of()).numel() == 0
        assert table.lookup(ids_of(7))[1].tolist() == [table.num_rows == 1]
        table.assign(ids_of(7), torch.ones(1, 4))
    assert table.num_rows == 1


def test_strided_arguments_serve():
    table = make_table()
    table.assign(torch.arange(10)[::2], torch.arange(40.0).reshape(4, 10).T[:5])
    assert table.lookup(torch.arange(10)[::2])[0][1].tolist() == [1.0, 11.0, 21.0, 31.0]
    assert table.erase(torch.arange(10)[::2][1:3]) == 2


def test_erase_counts_what_was_there():
    table = trained_table()
    some = table.ids()[:3].tolist()
    rows = table.num_rows
    assert table.erase(ids_of(*some, some[0], 424242)) == 3
    assert table.num_rows == rows - 3 and table.stats()["erased"] == 3
    assert not table.lookup(ids_of(*some))[1].any()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_is_canonical_and_load_restores_it(kind, dtype):
    table = trained_table(kind, dtype=dtype)
    state = table.export_state()
    assert set(state) == {"ids", "weight", "step", *table.optimizer.state_names}
    assert state["ids"].tolist() == canonical_order(state["ids"].tolist())
    assert state["step"].item() == 2
    loaded = make_table(kind, dtype=dtype)
    shuffled = torch.randperm(len(state["ids"]))
    loaded.load_state({k: v if k == "step" else v[shuffled] for k, v in state.items()})
    assert same_state(loaded.export_state(), state)


def test_saved_form_does_not_tell_the_history():
    one, two = trained_table(), trained_table(order=-1)
    assert same_state(one.export_state(), two.export_state())
    extra = torch.arange(5000, 5800)
    for _ in range(2):
        two.find_or_insert(extra)
        two.erase(extra)
    assert same_state(one.export_state(), two.export_state())


def test_an_export_is_a_copy():
    table = trained_table()
    state = table.export_state()
    kept = {name: value.clone() for name, value in state.items()}
    table.assign(table.ids(), torch.zeros(table.num_rows, 4))
    assert same_state(state, kept)


def test_load_replaces_and_ignores_the_limit():
    """A load drops no row; the limit applies again at the next new id."""
    state = trained_table().export_state()
    small = make_table(OptimizerKind.ADAM, num_embeddings=10, row_limit=10)
    small.assign(ids_of(424242), torch.ones(1, 4))
    small.load_state(state)
    assert same_state(small.export_state(), state)
    assert not small.lookup(ids_of(424242))[1].item()
    group = make_group(small)
    group(state["ids"][:3], torch.tensor([0, 3]), training=True).sum().backward()
    with pytest.raises(RuntimeError, match="expected at most 10 rows"):
        group(ids_of(424242), torch.tensor([0, 1]), training=True)


def test_load_without_optimizer_state_starts_it_fresh():
    state = trained_table().export_state()
    table = trained_table()
    table.load_state({"ids": state["ids"], "weight": state["weight"]})
    after = table.export_state()
    assert torch.equal(after["weight"], state["weight"])
    assert not after["momentum1"].any() and not after["momentum2"].any() and after["step"] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_whole_and_apart(duplicate, is_empty, dtype):
    table = make_table(dtype=dtype) if is_empty else trained_table(dtype=dtype)
    state, stats = table.export_state(), table.stats()
    twin = duplicate(table)
    assert same_state(twin.export_state(), state)
    for count in ("ids_seen", "hits", "inserted", "erased", "late_grads", "step", "rows"):
        assert twin.stats()[count] == stats[count]
    twin.assign(ids_of(1, 424242), torch.ones(2, 4))
    twin.erase(twin.ids()[:1])
    make_group(twin)(ids_of(5), torch.tensor([0, 1]), training=True).sum().backward()
    assert same_state(table.export_state(), state) and table.stats() == stats


def test_a_pickle_carries_the_rows_in_use():
    """A pickle of a table or of a used group has no whole blocks, which are mostly not written."""
    table = make_table(embedding_dim=64, num_embeddings=50_000_000)
    group = make_group(table)
    group(torch.arange(100), torch.tensor([0, 100]), training=True).sum().backward()
    for thing in (table, group):
        file = io.BytesIO()
        pickle.dump(thing, file)
        assert file.tell() < 64 * 1024
    again = pickle.loads(pickle.dumps(group))
    one, other = (g(*bags_of([1, 99]), training=False) for g in (group, again))
    assert torch.equal(one, other)


@pytest.mark.parametrize("is_empty", [True, False])
def test_convert_rounds_rows_and_keeps_the_rest(is_empty):
    table = make_table(OptimizerKind.ADAM) if is_empty else trained_table()
    state = table.export_state()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        table.convert(dtype)
        assert table.dtype == dtype
        state["weight"] = state["weight"].to(dtype)
        assert same_state(table.export_state(), state)
    make_group(table)(ids_of(5), torch.tensor([0, 1]), training=True).sum().backward()


@pytest.mark.parametrize("change", ["load", "convert", "device"])
def test_a_change_that_fails_leaves_the_table(change, monkeypatch):
    table = trained_table()
    state, stats = table.export_state(), table.stats()
    output = make_group(table)(ids_of(5), torch.tensor([0, 1]), training=False)

    def no_memory(store, *_):
        raise MemoryError

    if change == "device":
        with pytest.raises(ValueError, match="expected rows on cpu or cuda, got meta"):
            table.convert(device="meta")
    else:
        monkeypatch.setattr("torchrec_dyn.storage.row_store.RowStore.reserve", no_memory)
        with pytest.raises(MemoryError):
            table.load_state(state) if change == "load" else table.convert(torch.float16)
        monkeypatch.undo()
    assert same_state(table.export_state(), state) and table.stats() == stats
    again = make_group(table)(ids_of(5), torch.tensor([0, 1]), training=False)
    assert torch.equal(again, output)


@pytest.mark.parametrize("unseen", ["zeros", "initial"])
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_evaluation_changes_nothing(pooling, unseen):
    table = trained_table(unseen=unseen)
    state, stats, slots = table.export_state(), table.stats(), table.id_map.slots.clone()
    group = make_group(table, pooling=pooling)
    ids, offsets = random_bags(77, bags=30, longest=9, pool=400)
    weights = torch.ones(ids.numel(), requires_grad=True)
    first = group(ids, offsets, weights, training=False)
    first.sum().backward()
    with torch.no_grad():
        assert torch.equal(group(ids, offsets, weights, training=False), first)
    table.lookup(ids)
    assert same_state(table.export_state(), state) and table.stats() == stats
    assert torch.equal(table.id_map.slots, slots)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unseen_ids_of_a_column_shard_read_as_the_rows_that_it_would_insert(dtype, is_frozen):
    """In evaluation, and in training of a frozen table; the gradient of the weights is of these rows."""
    options = {"embedding_dim": 9, "first_column": 3, "columns": 5, "dtype": dtype}
    shards = [
        make_table(initializer=Normal(0.0, 1.0), unseen="initial", **options) for _ in range(2)
    ]
    for shard in shards:
        shard.find_or_insert(ids_of(1))
    shards[0].find_or_insert(ids_of(5, 6))
    shards[1].is_frozen = is_frozen
    results = []
    for shard, training in zip(shards, (False, is_frozen), strict=True):
        ids, offsets = bags_of([1, 5, 6], [5], [], [1])
        weights = torch.linspace(0.5, 2.0, len(ids)).requires_grad_()
        output = make_group(shard, pooling="mean")(ids, offsets, weights, training=training)
        ids.fill_(1)  # the caller's
        output.square().sum().backward()
        results.append((output.detach(), weights.grad))
    assert all(map(torch.equal, *results)) and results[0][1].all()
    assert shards[1].ids().tolist() == [1]


def test_unseen_reads_as_zeros_or_as_the_initial_row():
    """Two tables of one call, each with its own option; trained rows beside unseen ids."""
    zeros = make_table(name="z", initializer=Constant(3.0))
    initial = make_table(name="i", initializer=Normal(0.0, 1.0), unseen="initial")
    group = make_group(zeros, initial)
    group(*bags_of([1, 2], [1, 2]), training=True).sum().backward()
    group(*bags_of([1], [1]), training=True).sum().backward()
    got = group(*bags_of([1], [5], [1], [5]), training=False)
    assert torch.equal(got[0, :4], zeros.lookup(ids_of(1))[0][0])
    assert torch.equal(got[0, 4:], initial.lookup(ids_of(1))[0][0])
    assert not got[1, :4].any()
    assert not initial.lookup(ids_of(5))[1].item()
    initial.find_or_insert(ids_of(5))
    assert torch.equal(got[1, 4:], initial.lookup(ids_of(5))[0][0])


def test_stats_tell_what_happened():
    table = make_table(row_limit=500)
    group = make_group(table)
    group(*bags_of([1, 2, 2], [3]), training=True)
    group(*bags_of([1, 9]), training=True)
    table.erase(ids_of(9))
    stats = table.stats()
    expected = {
        "rows": 3, "limit": 500, "slots": 64, "load": 3 / 64, "step": 2, "ids_seen": 6, "hits": 1,
        "inserted": 4, "erased": 1, "late_grads": 0, "withheld": 0, "bytes": 64 * 16 + 4 * 16,
    }  # fmt: skip
    assert {name: stats[name] for name in expected} == expected
    assert 1.0 <= stats["probe_length_mean"] <= stats["probe_length_max"] <= 3


def test_ids_of_a_table_of_one_row():
    table = make_table(optimizer=RowOptimizer(), num_embeddings=1, embedding_dim=1)
    make_group(table)(ids_of(-5, -5), torch.tensor([0, 2]), training=True).sum().backward()
    assert table.num_rows == 1 and table.ids().tolist() == [-5]


def test_tables_of_one_group_count_their_own_ids():
    one, other = make_table(name="one"), make_table(name="other")
    group = make_group(one, other)
    for batch in (bags_of([1, 2], [3]), bags_of([1], [3, 4, 5])):
        group(*batch, training=True).sum().backward()
    counted = [
        [table.stats()[name] for name in ("ids_seen", "hits", "unseen", "inserted", "forwards")]
        for table in (one, other)
    ]
    assert counted == [[3, 1, 2, 2, 2], [4, 1, 3, 3, 2]]


def test_a_table_that_changes_its_group_counts_on():
    """Numbers that went back would make the contents look as they did at an earlier time."""
    one, other = make_table(name="one"), make_table(name="other")
    group = make_group(one, other)
    for _ in range(3):
        group(*bags_of([1], [1, 2]), training=True).sum().backward()
    edits = other.edits
    make_group(other)(*bags_of([1]), training=True).sum().backward()
    stats = other.stats()
    assert (stats["forwards"], stats["step"], stats["ids_seen"], stats["hits"]) == (4, 4, 7, 5)
    assert other.edits == edits + 1


def living_table():
    """Returns a table with policies, two ids with a row, and two ids that wait for admission."""
    table = make_table(admission=AdmitAfter(2), eviction=LeastRecentlyUsed())
    group = make_group(table)
    for batch in ([1, 1, 8], [2, 2, 9, 1]):
        group(*bags_of(batch), training=True).sum().backward()
    assert (table.num_rows, table.num_waiting) == (2, 2)
    return table, group


def test_a_conversion_keeps_scores_and_counters():
    table, _ = living_table()
    state = table.export_state()
    table.convert(torch.float16)
    assert same_state(table.export_state(), state | {"weight": state["weight"].half()})


def test_an_erased_id_waits_from_its_first_occurrence_again():
    table, group = living_table()
    assert table.erase(ids_of(1, 8, 77)) == 1 and table.num_waiting == 1
    group(*bags_of([8, 9, 1]), training=True)
    assert table.lookup(ids_of(8, 9, 1, 2))[1].tolist() == [False, True, False, True]
