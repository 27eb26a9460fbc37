"""`replace` and `merge`: nothing changes before the commit, and the commit changes all."""

from __future__ import annotations

import pytest
import torch
from life_cases import living_table
from table_cases import ids_of, make_table, same_state

from torchrec_dyn.optimizers import OptimizerKind
from torchrec_dyn.policies import LeastFrequentlyUsed
from torchrec_dyn.table import TableShard, beside, merge, replace


def table_of(*ids: int) -> TableShard:
    table = make_table(OptimizerKind.EXACT_ADAGRAD)
    table.find_or_insert(ids_of(*ids))
    return table


def rows_beside(table: TableShard, *ids: int) -> TableShard:
    """Returns a shard beside a table with rows of their ids, and a state of a tenth."""
    rows = beside(table)
    rows.load_state(
        {
            "ids": ids_of(*ids),
            "weight": ids_of(*ids)[:, None].repeat(1, 4).float(),
            "momentum1": ids_of(*ids)[:, None].repeat(1, 4) / 10,
            "step": torch.tensor(7),
        }
    )
    return rows


def contents(table: TableShard) -> dict[int, tuple[float, float]]:
    state = table.export_state()
    numbers = zip(state["weight"][:, 0].tolist(), state["momentum1"][:, 0].tolist(), strict=True)
    return dict(zip(state["ids"].tolist(), numbers, strict=True))


def test_replace_changes_all_at_its_commit():
    table = table_of(1, 2, 3)
    version, before = table.version(), table.export_state()
    generation = table.generation
    commit = replace(table, rows_beside(table, 3, 40, 50))
    assert same_state(table.export_state(), before) and table.generation == generation
    commit()
    assert contents(table).keys() == {3, 40, 50} and table.step == 7
    assert contents(table)[40] == (40, 4) and table.generation > generation
    log = version.log
    assert log.changed_rows(version, table.id_map)[0].sort().values.tolist() == [3, 40, 50]
    assert log.removed_ids(version, table.id_map).sort().values.tolist() == [1, 2]


def test_merge_changes_all_at_its_commit():
    table = table_of(1, 2, 3, 4)
    version, before = table.version(), table.export_state()
    commit = merge(table, rows_beside(table, 3, 40, 50), ids_of(1, 999))
    assert same_state(table.export_state(), before)
    commit()
    after = contents(table)
    assert after.keys() == {2, 3, 4, 40, 50} and table.step == 7
    written = torch.tensor([after[3], after[40], after[50]])
    assert torch.allclose(written, torch.tensor([[3, 0.3], [40, 4], [50, 5]]))
    assert after[2][0] == before["weight"][before["ids"] == 2][0, 0]
    assert table.num_rows == 5 and table.stats()["erased"] == 1 and table.stats()["inserted"] == 6
    table.id_map.check_invariants()
    log = version.log
    assert log.changed_rows(version, table.id_map)[0].sort().values.tolist() == [3, 40, 50]
    assert log.removed_ids(version, table.id_map).tolist() == [1]


def test_a_table_that_changed_since_is_not_merged_into():
    table = table_of(1, 2)
    commit = merge(table, rows_beside(table, 3), ids_of())
    table.erase(ids_of(2))
    with pytest.raises(RuntimeError, match="expected rows that do not change"):
        commit()
    assert table.ids().tolist() == [1]


def test_merge_takes_scores_and_those_without_count_as_just_seen():
    table = living_table(LeastFrequentlyUsed())
    table.find_or_insert(ids_of(1, 2))
    for scores in ({}, {"last_seen": ids_of(5), "count": ids_of(9)}):
        rows = beside(table)
        rows.load_state(
            {"ids": ids_of(7), "weight": torch.ones(1, 4), "step": torch.tensor(6), **scores}
        )
        merge(table, rows, ids_of())()
        assert table.last_seen(ids_of(7)).tolist() == [5 if scores else 6]
        assert table.count(ids_of(7)).tolist() == [9 if scores else 0]
        assert table.last_seen(ids_of(1, 2)).tolist() == [6, 6]
