"""TableLists: what a step needs of all tables of a group, listed again when a table has changed.

A step of a thousand tables must not ask each of them. All that a step without unseen ids reads or changes is
here, in the form that the ops take. A forward takes the lists once, at its start: a table may be frozen by
another thread meanwhile. Only maps and blocks are listed again within a step, after they have grown.

Legend: T tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.lookup.table_blocks import BlockLists
from torchrec_dyn.storage import TABLES, MapList, RowNumbers
from torchrec_dyn.table import DynamicTable, on_shared_counters

_NO_LIMIT = torch.iinfo(torch.int64).max


class TrainedTables:
    """The tables of a group that a training step changes: those that are not frozen.

    Attributes:
        shared: the numbers that a step changes.
        first_steps: [T] int64, the step of each table before the forwards of the shared counters.
        most_steps: the largest of `first_steps` among tables with a life.
        with_life: numbers of the tables with a life.
        ageing: numbers of the tables whose rows expire.
        row_limits: [T] int64, the limit of each table that evicts when it is full, for other tables 2^63 - 1.
        least_limit: the least of `row_limits`.
        has_changes: True if a table records its changes.
        watched: numbers of tables whose policies may act in a step although all ids have rows, beside those
            of `ageing`: at first all tables with a life, later the tables that the last step changed.
    """

    def __init__(self, tables: Sequence[DynamicTable], maps: MapList, blocks: BlockLists) -> None:
        lives = [table.life for table in tables]
        self.tables = list(tables)
        of_tables = on_shared_counters([table.own for table in tables])
        for table, own in zip(tables, of_tables, strict=True):
            table.own = own
        self.shared = of_tables[0].shared
        self.maps, self.blocks = maps, blocks
        steps = [table.own.step for table in tables]
        self.first_steps = torch.tensor(steps, device="cpu")
        self.with_life = [t for t, life in enumerate(lives) if life is not None]
        self.most_steps = max((steps[t] for t in self.with_life), default=0)
        self.ageing = [t for t, life in enumerate(lives) if life is not None and life.ages]
        limits = [
            table.row_limit if life is not None and life.replaces else _NO_LIMIT
            for table, life in zip(tables, lives, strict=True)
        ]
        self.row_limits, self.least_limit = torch.tensor(limits, device="cpu"), min(limits)
        self.has_changes = any(table.changes is not None for table in tables)
        self.watched = set(self.with_life)


@dataclass(frozen=True)
class TableLists:
    """All tables of a group.

    Attributes:
        token: the token of tables before the listing.
        generations, configs, row_numbers: [T], of each table.
        streams: [T, 3] int64 for `ops.update_rows_`, before the forwards of the shared counters.
        stepping: [T, 3] int64, what each forward of the shared counters adds to `streams`.
        is_trained: [T] bool, False for a frozen table.
        trained: the tables that are not frozen; None if all are frozen.
        frozen_maps: the id maps of the frozen tables; None if no table is frozen.
        shows_initial: True if unseen ids of a table read as initial rows.
        has_changes: True if a table records its changes.
    """

    token: object
    generations: list[int]
    configs: list[DynamicTableConfig]
    row_numbers: list[RowNumbers]
    maps: MapList
    blocks: BlockLists
    streams: Tensor
    stepping: Tensor
    is_trained: Tensor
    trained: TrainedTables | None
    frozen_maps: MapList | None
    shows_initial: bool
    has_changes: bool


def list_tables(tables: Sequence[DynamicTable]) -> TableLists:
    """Lists the tables of a group, under their lock."""
    token = TABLES.now
    # Read once: another thread may freeze a table.
    is_trained = [not table.is_frozen for table in tables]
    both = list(zip(tables, is_trained, strict=True))
    learning = [table for table, trains in both if trains]
    frozen = [table.id_map for table, trains in both if not trains]
    maps, blocks = MapList([table.id_map for table in tables]), BlockLists(tables)
    trained = None
    if learning and frozen:
        own_maps = MapList([table.id_map for table in learning])
        trained = TrainedTables(learning, own_maps, BlockLists(learning))
    elif learning:
        trained = TrainedTables(learning, maps, blocks)
    streams = [
        [table.rounding_key, table.first_column, table.own.step if trains else table.step]
        for table, trains in both
    ]
    return TableLists(
        token=token,
        generations=[table.generation for table in tables],
        configs=[table.config for table in tables],
        row_numbers=[table.row_numbers for table in tables],
        maps=maps,
        blocks=blocks,
        streams=torch.tensor(streams, device="cpu"),
        stepping=torch.tensor([[0, 0, int(trains)] for trains in is_trained], device="cpu"),
        is_trained=torch.tensor(is_trained, device="cpu"),
        trained=trained,
        frozen_maps=MapList(frozen) if frozen else None,
        shows_initial=any(table.config.unseen == "initial" for table in tables),
        has_changes=any(table.changes is not None for table in tables),
    )
