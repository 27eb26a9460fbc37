"""The id map and the table against a dict, with difficult ids."""

import pytest
import torch
from device_ops import use_kernels
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from oracle import canonical_order
from table_cases import hard_ids, ids_of, make_table

from torchrec_dyn import ops
from torchrec_dyn.storage.id_map import IdMap, arrays_of

id_lists = st.lists(hard_ids, max_size=30)


class MapBesideDict(RuleBasedStateMachine):
    """IdMap through its ops: the steps of TableGroup, one at a time."""

    def __init__(self):
        super().__init__()
        self.map, self.dict, self.next_row = IdMap(), {}, 0
        self.map.key = 0  # with it, hard ids share slots

    @rule(ids=id_lists)
    def insert(self, ids):
        asked = ids_of(*ids)
        bounds = torch.tensor([0, len(ids)])
        rows, absent = ops.lookup(asked, bounds, *self.map.arrays())
        assert rows.tolist() == [self.dict.get(i, -1) for i in ids]
        assert absent.item() == sum(i not in self.dict for i in ids)
        new_ids, counts, offsets, index = ops.collect_new(asked, rows, bounds)
        expected = list(dict.fromkeys(i for i in ids if i not in self.dict))
        assert new_ids.tolist() == expected
        assert counts.tolist() == [ids.count(i) for i in expected]
        assert offsets.tolist() == [0, len(expected)]
        assert index.tolist() == [expected.index(i) if i in expected else -1 for i in ids]
        self.map.reserve(len(expected))
        new_rows = torch.arange(self.next_row, self.next_row + len(expected))
        ops.insert(new_ids, new_rows, offsets, *self.map.arrays())
        rows[index >= 0] = new_rows[index[index >= 0]]
        self.map.num_ids += len(expected)
        self.next_row += len(expected)
        self.dict |= dict(zip(expected, new_rows.tolist(), strict=True))
        assert rows.tolist() == [self.dict[i] for i in ids]

    @rule(ids=id_lists)
    def erase(self, ids):
        held = [(i, self.dict.pop(i)) for i in ids if i in self.dict]
        found = self.map.find(ids_of(*(i for i, _ in held)))
        assert list(zip(*(one.tolist() for one in found), strict=True)) == held
        removed = ops.erase(ids_of(*(i for i, _ in held)), *self.map.arrays())
        assert removed.tolist() == [row for _, row in held]
        self.map.num_ids -= len(held)

    @rule(extra=st.integers(0, 200))
    def reserve(self, extra):
        self.map.reserve(extra)

    @rule(ids=id_lists)
    def look(self, ids):
        assert self.map.lookup(ids_of(*ids)).tolist() == [self.dict.get(i, -1) for i in ids]

    @invariant()
    def holds_what_the_dict_holds(self):
        self.map.check_invariants()
        ids, rows = self.map.contents()
        assert ids.tolist() == canonical_order(list(self.dict))
        assert dict(zip(ids.tolist(), rows.tolist(), strict=True)) == self.dict


class TableBesideDict(RuleBasedStateMachine):
    """TableShard through its public methods; the number written into a row identifies it."""

    def __init__(self):
        super().__init__()
        self.table, self.dict, self.written = make_table(embedding_dim=3), {}, 0

    @rule(ids=id_lists)
    def assign(self, ids):
        values = torch.arange(self.written, self.written + len(ids)).float()
        self.written += len(ids)
        self.table.assign(ids_of(*ids), values[:, None].expand(-1, 3))
        self.dict |= dict(zip(ids, values.tolist(), strict=True))

    @rule(ids=id_lists)
    def erase(self, ids):
        assert self.table.erase(ids_of(*ids)) == len(set(ids) & set(self.dict))
        self.dict = {i: value for i, value in self.dict.items() if i not in ids}

    @rule(ids=id_lists)
    def lookup(self, ids):
        rows, found = self.table.lookup(ids_of(*ids))
        assert found.tolist() == [i in self.dict for i in ids]
        assert rows.tolist() == [[self.dict.get(i, 0.0)] * 3 for i in ids]

    @rule()
    def save_and_load(self):
        state = self.table.export_state()
        self.table = make_table(embedding_dim=3)
        self.table.load_state(state)

    @invariant()
    def agrees(self):
        self.table.id_map.check_invariants()
        assert self.table.num_rows == len(self.dict) == self.table.stats()["rows"]
        assert self.table.ids().tolist() == canonical_order(list(self.dict))


class GrowingMapBesideDict(MapBesideDict):
    """As MapBesideDict, but every map counts as large: a few slots move at a time while ids change."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("torchrec_dyn.knobs.LARGE_MAP_SLOTS", 1)

    def teardown(self):
        self.patch.undo()


class DeviceMapBesideDict(MapBesideDict):
    """As MapBesideDict, with the kernels for GPUs on threads of the CPU; every growth moves all slots."""

    device = "simt"

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        use_kernels(self.patch, self.device)
        self.patch.setattr(IdMap, "_grows_in_steps", lambda self, capacity: False)

    def teardown(self):
        self.patch.undo()

    @invariant()
    def is_one_array(self):
        assert self.map.outgoing is None


class GpuMapBesideDict(DeviceMapBesideDict):
    """As DeviceMapBesideDict, on a GPU."""

    device = "cuda"


TestMapBesideDict = MapBesideDict.TestCase
TestMapBesideDict.settings = settings(stateful_step_count=20)
TestDeviceMapBesideDict = pytest.mark.simt(DeviceMapBesideDict.TestCase)
TestDeviceMapBesideDict.settings = settings(stateful_step_count=20)
TestGpuMapBesideDict = pytest.mark.needs_cuda(GpuMapBesideDict.TestCase)
TestGpuMapBesideDict.settings = settings(stateful_step_count=20)
TestTableBesideDict = TableBesideDict.TestCase
TestGrowingMapBesideDict = GrowingMapBesideDict.TestCase
TestGrowingMapBesideDict.settings = settings(
    stateful_step_count=60, max_examples=settings.default.max_examples // 2
)
TestTableBesideDict.settings = settings(stateful_step_count=20)


@pytest.mark.usefixtures("device")
def test_ids_of_several_tables_do_not_mix():
    """One op call, three tables: one id has a separate row, or no row, in each table."""
    maps = [IdMap() for _ in range(3)]
    for id_map in maps:
        id_map.reserve(10)
    slots, moved = arrays_of(maps)
    ops.insert(ids_of(5, 6, 5), ids_of(10, 11, 20), torch.tensor([0, 2, 2, 3]), slots, moved)
    rows, absent = ops.lookup(ids_of(5, 6, 5, 6, 5, 6), torch.tensor([0, 2, 4, 6]), slots, moved)
    assert rows.tolist() == [10, 11, -1, -1, 20, -1]
    assert absent.tolist() == [0, 2, 1]


@pytest.mark.usefixtures("device")
def test_many_ids_are_found_at_any_thread_count(threads):
    """The parts of a parallel lookup begin inside tables and span empty tables."""
    ids = torch.arange(30_000) * 977
    maps = [IdMap() for _ in range(4)]
    bounds = torch.tensor([0, 9_000, 9_000, 9_001, 30_000])
    for id_map, begin, end in zip(maps, bounds[:-1], bounds[1:], strict=True):
        id_map.reserve(int(end - begin))
    slots, moved = arrays_of(maps)
    ops.insert(ids, torch.arange(30_000), bounds, slots, moved)
    for count in (1, 2, 4):
        threads(count)
        rows, absent = ops.lookup(ids, bounds, slots, moved)
        assert torch.equal(rows, torch.arange(30_000))
        assert absent.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("count", [0, 3, 4, 5, 12])
def test_ids_are_inserted_in_batches(count, monkeypatch):
    monkeypatch.setattr("torchrec_dyn.knobs.IDS_INSERTED_TOGETHER", 4)
    id_map, ids, rows = IdMap(), torch.arange(count) * 10, torch.arange(count) + 7
    id_map.reserve(count)
    id_map.insert(ids, rows)
    assert id_map.num_ids == count
    assert torch.equal(id_map.lookup(ids), rows)
    id_map.check_invariants()
