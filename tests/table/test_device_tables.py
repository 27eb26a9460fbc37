"""TableShard on a mock device: everything but its policies (tests/life/test_device_life.py)."""

import pytest
import torch
from device_twins import COPIES, on_host
from life_cases import living_table
from mock_device import CUDA, MockDevice
from table_cases import ids_of, make_table, same_state

import torchrec_dyn as dyn
from torchrec_dyn import knobs, ops
from torchrec_dyn.optimizers import OptimizerKind


@pytest.fixture
def device():
    with MockDevice() as device:
        yield device


def filled(where, kind=OptimizerKind.ADAM, dtype=torch.float32):
    """Returns a table of 300 assigned rows, 20 of them erased, with numbers in its optimizer state."""
    table = make_table(kind, device=where, dtype=dtype, embedding_dim=5)
    table.assign(torch.arange(300), torch.arange(1500.0).view(300, 5) / 7)
    table.erase(torch.arange(100, 120))
    state = on_host(table.export_state())
    momenta = {name: state[name] + 3 for name in table.optimizer.state_names}
    table.load_state({**state, **momenta})
    return table


@pytest.mark.everyday(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [OptimizerKind.ADAM, OptimizerKind.EXACT_ROWWISE_ADAGRAD])
def test_contents_move_there_and_back_bit_for_bit(device, kind, dtype, monkeypatch):
    monkeypatch.setattr(knobs, "CROSSING_BYTES", 256)  # several chunks
    table = filled("cpu", kind, dtype)
    state = table.export_state()
    table.convert(device="cuda")
    assert table.device == CUDA and {store.device for store in table.stores} == {CUDA}
    assert same_state(on_host(table.export_state()), state)
    for copied in (table, *(copy(table) for copy in COPIES.values())):
        assert copied.device == CUDA
        copied.convert(device="cpu")
        assert copied.device.type == "cpu" and same_state(copied.export_state(), state)
    assert device.mixed == []


def test_a_pickle_that_was_moved_is_a_table_where_its_tensors_are(device):
    table = filled("cuda")
    state = table.__getstate__()
    moved = object.__new__(type(table))
    moved.__setstate__({**state, "state": on_host(state["state"])})
    assert moved.device.type == "cpu"
    assert same_state(moved.export_state(), on_host(table.export_state()))


def test_ids_and_rows_of_any_device_are_read_and_written(device):
    table, ids = filled("cuda"), ids_of(3, 400, 110)
    for asked in (ids, device.of(ids.clone())):
        rows, found = table.lookup(asked)
        assert rows.device == found.device == CUDA and found.memory.tolist() == [True, False, False]
        assert torch.equal(rows.memory[0], torch.arange(15.0, 20.0) / 7)
    table.assign(ids, torch.ones(3, 5))
    table.assign(device.of(ids_of(7)), device.of(torch.zeros(1, 5)))
    assert table.lookup(ids)[0].memory.eq(1).all() and not table.lookup(ids_of(7))[0].memory.any()
    assert table.erase(ids) == 3 and table.num_rows == 280 + 2 - 3
    assert device.mixed == [] and device.without_kernel == []


def test_tables_do_not_follow_torchs_default_device():
    """Nor do descriptions of calls, which are on the CPU for every device."""
    ids, rows = torch.arange(300), torch.ones(300, 4)
    with torch.device("meta"):
        table = living_table(dyn.ExpireAfter(time=3), dyn.AdmitAfter(2))
        table.assign(ids[:200], rows[:200])
        version = table.version()
        table.set_time(5)
        table.assign(ids[100:], rows[100:])
        table.erase(ids[:3])
        assert [len(ids) for ids in changes_since(version, table)] == [200, 3]
        assert table.last_seen(ids).max() == 5 and table.count(ids).max() == 0
        state = table.export_state()
        table.convert(torch.float16)
        table.load_state(state)
        state["weight"] = state["weight"].half()
        assert same_state(table.export_state(), state)


def changes_since(version, table):
    return version.log.changed_rows(version, table.id_map)[0], version.log.removed_ids(
        version, table.id_map
    )


REFUSED = {
    "meta": "expected rows on cpu or cuda, got meta. Keep the collection on the CPU",
    "cuda": "expected a device that torch can use, got cuda: .*Install a build of torch with CUDA",
}


@pytest.mark.parametrize("where", REFUSED)
def test_a_device_that_cannot_be_used_is_refused_before_anything_changes(where, monkeypatch):
    if where == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(ops, "has_cuda_kernels", lambda: True)
    table = make_table()
    for call in (lambda: make_table(device=where), lambda: table.convert(device=where)):
        with pytest.raises(ValueError, match=REFUSED[where]):
            call()
    assert table.device.type == "cpu"


def test_a_build_without_cuda_kernels_says_so(monkeypatch):
    monkeypatch.setattr(ops, "has_cuda_kernels", lambda: False)
    with pytest.raises(ValueError, match="built without CUDA kernels, got cuda"):
        make_table(device="cuda")
