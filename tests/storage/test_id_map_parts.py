"""New ids of one table are collected, inserted and erased in parts, on all threads, as plain dicts say."""

from __future__ import annotations

import pytest
import torch

from torchrec_dyn import ops
from torchrec_dyn.storage.id_map import IdMap, arrays_of

# Enough ids for several parts of each table, of which a small map has small ones.
COUNTS = (3000, 0, 1, 9000)


def ids_of(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).unique()[:count]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("device")
def test_new_ids_are_listed_in_order_of_first_sight(threads: int) -> None:
    ids, rows, offsets = [], [], [0]
    expected: list[dict[int, int]] = []
    for table, count in enumerate(COUNTS):
        pool = ids_of(7, count)  # the same ids in all tables
        generator = torch.Generator().manual_seed(table)
        drawn = torch.randint(0, max(1, count), (count * 3,), generator=generator)
        ids.append(pool[drawn] if count else pool)
        rows.append(torch.where(drawn[: ids[-1].numel()] % 3 == 0, drawn[: ids[-1].numel()], -1))
        seen: dict[int, int] = {}
        for one, row in zip(ids[-1].tolist(), rows[-1].tolist(), strict=True):
            if row < 0:
                seen[one] = seen.get(one, 0) + 1
        expected.append(seen)
        offsets.append(offsets[-1] + ids[-1].numel())
    all_ids, all_rows = torch.cat(ids), torch.cat(rows)
    new, counts, new_offsets, index = ops.collect_new(all_ids, all_rows, torch.tensor(offsets))
    assert new.tolist() == [one for table in expected for one in table]
    assert counts.tolist() == [times for table in expected for times in table.values()]
    assert new_offsets.diff().tolist() == [len(table) for table in expected]
    absent = all_rows < 0
    assert torch.equal(index >= 0, absent)
    assert torch.equal(new[index[absent]], all_ids[absent])
    tables = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(offsets).diff())
    of_new = torch.arange(len(COUNTS)).repeat_interleave(new_offsets.diff())
    assert torch.equal(of_new[index[absent]], tables[absent])


def filled(seed: int) -> tuple[list[IdMap], list[torch.Tensor]]:
    """Returns maps, small and large, one of which grows, and the ids inserted at once into each."""
    maps, added = [], []
    for table, count in enumerate((1500, 12_000, 0, 3000)):
        id_map = IdMap()
        id_map.key = seed + table
        ids = ids_of(seed + table, count + 60_000)
        start = 58_000 if table == 3 else 100 * table
        for part in ids[:start].split(4096):
            id_map.reserve(part.numel())
            id_map.insert(part, 1_000_000 + id_map.num_ids + torch.arange(part.numel()))
        id_map.reserve(count)
        maps.append(id_map)
        added.append(ids[start : start + count])
    return maps, added


def insert_all(maps: list[IdMap], added: list[torch.Tensor]) -> None:
    offsets = torch.tensor([0, *(ids.numel() for ids in added)]).cumsum(0)
    rows = torch.cat([100 + torch.arange(ids.numel()) for ids in added])
    ops.insert(torch.cat(added), rows, offsets, *arrays_of(maps))


def slots_of(maps: list[IdMap]) -> list[torch.Tensor]:
    return [array.clone() for array in arrays_of(maps)[0]]


def test_ids_inserted_and_erased_in_parts_are_found(threads: int) -> None:
    maps, added = filled(1)
    assert maps[3].outgoing is not None, "one map grows"
    insert_all(maps, added)
    for id_map, ids in zip(maps, added, strict=True):
        assert torch.equal(id_map.lookup(ids), 100 + torch.arange(ids.numel()))
        id_map.num_ids += ids.numel()
        id_map.check_invariants()
        rest, gone = ids[::3].contiguous(), ids[torch.arange(ids.numel()) % 3 > 0]
        if not gone.numel():
            continue
        absent = ids_of(99, 700)
        asked = torch.cat([gone, absent, gone])  # repeats and absent ids
        expected = torch.cat([id_map.lookup(gone), torch.full((asked.numel() - gone.numel(),), -1)])
        assert torch.equal(ops.erase(asked, *id_map.arrays()), expected)
        id_map.num_ids -= gone.numel()
        id_map.check_invariants()
        assert torch.equal(id_map.lookup(rest), 100 + torch.arange(ids.numel())[::3])
        assert bool((id_map.lookup(gone) < 0).all())


def test_slots_do_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    seen = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            maps, added = filled(5)
            insert_all(maps, added)
            inserted = slots_of(maps)
            for id_map, ids in zip(maps, added, strict=True):
                ops.erase(ids[: ids.numel() // 2], *id_map.arrays())
            seen.append(inserted + slots_of(maps))
    finally:
        torch.set_num_threads(before)
    for others in seen[1:]:
        for one, other in zip(seen[0], others, strict=True):
            used = one[:, 1] != 0
            assert torch.equal(used, other[:, 1] != 0)
            assert torch.equal(one[used], other[used])
