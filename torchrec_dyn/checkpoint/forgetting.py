"""Where ids are, in a model and in the entries of a checkpoint directory, and what tells that they are gone.

Legend: M ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from torchrec_dyn.checkpoint_format import Entry, SavedTable, open_checkpoint
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.storage import turn_of
from torchrec_dyn.whole_model import collections_of, erase_rows, table_names

_CALL = "Checkpoints.forget"
_MODEL = "the model"
Ids = Mapping[str, Tensor]  # by table [M] int64


@dataclass(frozen=True)
class Forgotten:
    """The result of `Checkpoints.forget`.

    Attributes:
        entry: the full save after it, the only entry that is left.
        places: by table and id where the id was, as a row, a counter or a removed id: "the model" and names
            of entries. It is in none of them now.
        unread: names of entries that could not be searched, and why; they are removed, too.
        removed: the folders that were removed.
    """

    entry: Entry
    places: Mapping[str, Mapping[int, Sequence[str]]]
    unread: Sequence[str]
    removed: Sequence[Path]

    def __str__(self) -> str:
        lines = [
            f"{table} {one}: was in {', '.join(places) or 'nothing'}; is gone"
            for table, of_table in self.places.items()
            for one, places in of_table.items()
        ]
        return "\n".join([*lines, *(f"not searched, removed: {one}" for one in self.unread)])


def checked_ids(tables: Sequence[Table], ids: Ids) -> dict[str, Tensor]:
    """Returns the ids that any rank names, [M] int64 without repeats, by table. Collective.

    `ids` are those of this rank, by name of a table.
    """
    names = [table.name for table in tables]

    def check() -> dict[str, list[int]]:
        for name, one in ids.items():
            if name not in names:
                raise ValueError(f"{_CALL}: expected tables among {listed(names)}, got {name!r}.")
            if not isinstance(one, Tensor) or one.dtype != torch.int64 or one.dim() != 1:
                got = (
                    f"{list(one.shape)} {one.dtype}"
                    if isinstance(one, Tensor)
                    else type(one).__name__
                )
                raise ValueError(f"{_CALL}(table={name!r}): expected ids [M] int64, got {got}.")
        return {name: one.tolist() for name, one in ids.items()}

    of_ranks = gather_results(tables[0].group, _CALL, check)

    def join() -> dict[str, Tensor]:
        found = [(name, [one[name] for one in of_ranks if name in one]) for name in names]
        return {
            name: torch.tensor(sorted(set().union(*some)), dtype=torch.int64, device="cpu")
            for name, some in found
            if some
        }

    return run_together(tables[0].group, _CALL, join)


def ids_in_model(tables: Sequence[Table], ids: Ids) -> dict[str, set[int]]:
    """Returns those of the ids that have a row or a counter in the model, by table. Collective."""

    def here() -> dict[str, set[int]]:
        return {one.name: _ids_here(one, ids[one.name]) for one in tables if one.name in ids}

    of_ranks = gather_results(tables[0].group, _CALL, here)
    return {name: set().union(*(one[name] for one in of_ranks)) for name in ids}


def _ids_here(table: Table, ids: Tensor) -> set[int]:
    """Returns those of the ids [M] that this rank's shards have."""
    found: set[int] = set()
    for shard in table.shards[:1]:  # all column shards have the same ids
        with turn_of(table):
            maps = [shard.id_map]
            if shard.life is not None and shard.life.waiting is not None:
                maps.append(shard.life.waiting.id_map)
            for one in maps:
                found.update(ids[(one.lookup(ids.to(shard.device)) >= 0).cpu()].tolist())
    return found


def erase(model: nn.Module, tables: Sequence[Table], ids: Ids) -> None:
    """Removes ids from a model, with rows, optimizer state, scores and counters. Collective.

    `ids` are by table, the same on all ranks.
    """
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    for _, collection in collections_of(model, _CALL):
        for name in table_names(collection):
            if name in ids:
                erase_rows(collection, name, ids[name] if tables[0].rank == 0 else nothing)


def ids_in_entry(entry: Entry, ids: Ids) -> dict[str, set[int]]:
    """Returns those of the ids that an entry has, by table; reads it in chunks. Not collective."""
    saved = open_checkpoint(entry.tables).tables.values()
    return {one.name: _ids_in_table(one, ids[one.name]) for one in saved if one.name in ids}


def _ids_in_table(table: SavedTable, ids: Tensor) -> set[int]:
    """Returns those of the ids [M] that a saved table has, as rows, waiting or removed."""
    found: set[int] = set()
    small = [table.read(name) for name in ("waiting", "removed") if table.rows_of(name)]
    listed = [numbers.reshape(len(numbers), -1)[:, 0] for numbers in small]
    for there in (*listed, *(chunk["ids"] for chunk in table.chunks(["ids"]))):
        found.update(there[torch.isin(there, ids)].tolist())
    return found


def search(entries: Iterable[Entry], ids: Ids) -> tuple[dict[str, dict[str, set[int]]], list[str]]:
    """Returns by entry those of the ids that it has, and a line for each that cannot be read."""
    found, unread = {}, []
    for entry in entries:
        try:
            found[entry.path.name] = ids_in_entry(entry, ids)
        except (ValueError, OSError) as error:
            unread.append(f"{entry.path.name}: {' '.join(str(error).split())}")
    return found, unread


def places_of(
    ids: Ids, in_model: Mapping[str, set[int]], in_entries: Mapping[str, Mapping[str, set[int]]]
) -> dict[str, dict[int, list[str]]]:
    """Returns by table and id where the id was.

    `in_model` are those in the model, by table, `in_entries` those in each entry, by its name and by table.
    """
    where = {_MODEL: in_model, **in_entries}
    return {
        table: {
            one: [place for place, found in where.items() if one in found.get(table, ())]
            for one in of_table.tolist()
        }
        for table, of_table in ids.items()
    }
