"""Ids and rows in the order of the rows: without gaps they are views of the blocks."""

import pytest
import torch

from torchrec_dyn import knobs, ops
from torchrec_dyn.storage import CanonicalRows, IdMap, RowStore


@pytest.mark.parametrize("free", [(), (0,), (5, 6, 40), (99,)])
@pytest.mark.parametrize("most", [1, 7, 16, 1000])
def test_every_id_is_read_once_in_the_order_of_its_row(free: tuple[int, ...], most: int) -> None:
    used = [row for row in torch.randperm(100).tolist() if row not in free]
    id_map = IdMap(100)
    id_map.reserve(100)
    id_map.insert(ops.mix64(torch.tensor(used)), torch.tensor(used))
    reader = CanonicalRows(id_map, "t", lambda: (1,))
    found = [(ids.clone(), rows.clone()) for ids, rows in reader.by_row(100, most)]
    assert all(len(ids) == len(rows) <= most for ids, rows in found)
    rows = torch.cat([rows for _, rows in found])
    assert rows.tolist() == sorted(used)
    assert torch.equal(torch.cat([ids for ids, _ in found]), ops.mix64(rows))


@pytest.mark.parametrize("count", [0, 1, 16, 17, 64, 65, 1000])
def test_a_large_map_is_scanned_at_most_four_times(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scans of a number of rows each would take a time that grows with the square of the rows."""
    monkeypatch.setattr(knobs, "ROWS_SCANNED", 16)
    id_map, scans, list_rows = IdMap(count), [], ops.ids_of_rows
    id_map.reserve(count)
    id_map.insert(torch.arange(count) * 3, torch.arange(count))
    monkeypatch.setattr(ops, "ids_of_rows", lambda *asked: scans.append(1) or list_rows(*asked))
    reader = CanonicalRows(id_map, "t", lambda: (1,))
    found = [ids.clone() for ids, _ in reader.by_row(count, 8)]
    assert torch.equal(
        torch.cat([torch.empty(0, dtype=torch.int64), *found]), torch.arange(count) * 3
    )
    assert len(scans) <= 4


@pytest.mark.parametrize("rows", [[], [3], [4, 5, 6, 7], [0, 1, 3], [14, 15, 16], [0, 31]])
def test_neighbours_in_one_block_are_read_without_a_copy(rows: list[int]) -> None:
    store = RowStore(3, 4, torch.float32, torch.device("cpu"))
    store.reserve(32)
    store.write(torch.arange(32), torch.arange(96.0).view(32, 3))
    numbers = torch.tensor(rows, dtype=torch.int64)
    found = store.read_ascending(numbers)
    assert torch.equal(found, torch.arange(96.0).view(32, 3)[numbers])
    is_view = any(
        found.data_ptr() == block[row % 16].data_ptr() for block in store.blocks for row in rows[:1]
    )
    assert is_view == (rows in ([3], [4, 5, 6, 7]))
