"""Finds ids in a model and in the entries of a checkpoint directory, for `Checkpoints.forget`.

Legend: M ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import Entry, Place, SavedTable, open_checkpoint
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table, gather_results
from torchrec_dyn.storage import turn_of
from torchrec_dyn.table import check_ids

_CALL = "Checkpoints.forget"
_MODEL = "the model"
Ids = Mapping[str, Tensor]  # by table [M] int64


@dataclass(frozen=True)
class Forgotten:
    """The result of `Checkpoints.forget`.

    Attributes:
        entry: the full save after the removal, the only entry that is left.
        places: by table and id, the places where the id was, as a row, a counter or a removed id: "the model"
            and names of entries. The id is now in none of them.
        unread: names of entries that could not be searched, and why; these entries are removed too.
        removed: the folders that were removed.
    """

    entry: Entry
    places: Mapping[str, Mapping[int, Sequence[str]]]
    unread: Sequence[str]
    removed: Sequence[Place]

    def __str__(self) -> str:
        lines = [
            f"{table} {number}: was in {', '.join(places) or 'nothing'}; is gone"
            for table, by_id in self.places.items()
            for number, places in by_id.items()
        ]
        return "\n".join([*lines, *(f"not searched, removed: {line}" for line in self.unread)])


def checked_ids(tables: Sequence[Table], ids: Ids) -> dict[str, list[int]]:
    """Returns the ids that this rank names, by table; raises ValueError if they are none."""
    names = [table.name for table in tables]
    for name, wanted in ids.items():
        if name not in names:
            raise ValueError(f"{_CALL}: expected tables among {listed(names)}, got {name!r}.")
        check_ids(f"{_CALL}(table={name!r})", wanted)
    return {name: wanted.tolist() for name, wanted in ids.items()}


def union_of(by_rank: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
    """Returns the ids that any rank names, ascending and without repeats, in the order of their tables."""
    union: dict[str, set[int]] = {}
    for name, numbers in (item for wanted in by_rank for item in wanted.items()):
        union.setdefault(name, set()).update(numbers)
    return {
        name: torch.tensor(sorted(union[name]), dtype=torch.int64, device="cpu")
        for name in sorted(union)
    }


def ids_in_model(tables: Sequence[Table], ids: Ids) -> dict[str, set[int]]:
    """Returns those of the ids that have a row or a counter in the model. Collective."""

    def here() -> dict[str, set[int]]:
        return {
            table.name: _ids_here(table, ids[table.name]) for table in tables if table.name in ids
        }

    by_rank = gather_results(tables[0].group, _CALL, here)
    return {name: set().union(*(held[name] for held in by_rank)) for name in ids}


def _ids_here(table: Table, ids: Tensor) -> set[int]:
    """Returns those of the ids [M] that this rank's shards have."""
    here: set[int] = set()
    for shard in table.shards[:1]:  # all column shards have the same ids
        with turn_of(table):
            maps = [shard.id_map]
            if shard.waiting is not None:
                maps.append(shard.waiting.id_map)
            for id_map in maps:
                here.update(ids[(id_map.lookup(ids.to(shard.device)) >= 0).cpu()].tolist())
    return here


def erase(tables: Sequence[Table], ids: Ids) -> None:
    """Removes ids, the same on all ranks, with rows, optimizer state, scores and counters. Collective."""
    for table in tables:
        if table.name in ids:
            table.erase(ids[table.name][: None if table.rank == 0 else 0])


def ids_in_entry(entry: Entry, ids: Ids) -> dict[str, set[int]]:
    """Returns those of the ids that an entry has; reads it in chunks. Not collective."""
    tables = open_checkpoint(entry.tables).tables.values()
    return {
        table.name: _ids_in_table(table, ids[table.name]) for table in tables if table.name in ids
    }


def _ids_in_table(table: SavedTable, ids: Tensor) -> set[int]:
    """Returns those of the ids [M] that a saved table has, as rows, waiting or removed."""
    small = [table.read(name) for name in ("waiting", "removed") if table.rows_of(name)]
    lists = [numbers.reshape(len(numbers), -1)[:, 0] for numbers in small]
    saved: set[int] = set()
    for numbers in (*lists, *(chunk["ids"] for chunk in table.chunks(["ids"]))):
        saved.update(numbers[torch.isin(numbers, ids)].tolist())
    return saved


def search(entries: Iterable[Entry], ids: Ids) -> tuple[dict[str, dict[str, set[int]]], list[str]]:
    """Returns by entry those of the ids that it has, and a line for each that cannot be read."""
    by_entry, unread = {}, []
    for entry in entries:
        try:
            by_entry[entry.path.name] = ids_in_entry(entry, ids)
        except (ValueError, OSError) as error:
            unread.append(f"{entry.path.name}: {' '.join(str(error).split())}")
    return by_entry, unread


def places_of(
    ids: Ids, in_model: Mapping[str, set[int]], in_entries: Mapping[str, Mapping[str, set[int]]]
) -> dict[str, dict[int, list[str]]]:
    """Returns by table and id where the id was: in the model, and in entries by name."""
    by_place = {_MODEL: in_model, **in_entries}
    return {
        table: {
            number: [place for place, there in by_place.items() if number in there.get(table, ())]
            for number in wanted.tolist()
        }
        for table, wanted in ids.items()
    }
