"""Applies a delta to a copy of the model from which it was exported.

The delta is read and verified completely before anything changes on any rank: it is whole, it begins at the
contents of the copy, and it leads to the contents that it names. Content sums are additive: the sums of the
result are the sums before, minus the sums of the removed and rewritten rows, plus the sums of the delta. Each
rank reads its own rows and columns, under any plan of the exported model.

Legend: N removed ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchrec_dyn.checkpoint.delta_export import map_of
from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    ROW_TENSORS,
    MergedTable,
    PlaceLike,
    SavedTable,
    add_sums,
    check_config,
    check_new_names,
    check_saved_names,
    checked_rename,
    open_checkpoint,
    optimizer_config,
    warn_of_options,
    with_options_of,
)
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table, gather_results, mixed_ranges, run_together
from torchrec_dyn.state_dict import StagedTable, sums_here
from torchrec_dyn.storage import IdMap, commit, turn_of
from torchrec_dyn.table import Commit, TableShard, merge
from torchrec_dyn.whole_model import tables_of

_CALL = "apply_delta"
_IN_ORDER = (
    "Apply every delta once and in order, to a copy whose model and optimizer were loaded from the "
    "checkpoint that was saved when the marker was made."
)
Sums = Mapping[str, int]


def apply_delta(
    model: nn.Module,
    path: PlaceLike,
    *,
    rename: Mapping[str, str] | None = None,
) -> None:
    """Updates a copy of a model to the contents of the model when a delta was exported.

    The copy may have another plan, other ranks or no sharding, and, as when loading a checkpoint, another
    dtype of rows and other policies. Tables are matched by name. Rows, optimizer state, scores, counters,
    clock and steps change. Forwards from before the call cannot run their backward. The call reads all rows
    of the copy once. Collective if the tables are sharded.

    Args:
        model: DistributedModelParallel, any module with dynamic tables, or one collection.
        path: directory or URL that `export_delta` wrote; every rank must be able to read it.
        rename: new names of tables by their names in the delta, for a copy whose tables have other names.

    Raises:
        ValueError: on every rank, if the delta is torn or damaged, or does not begin at the present contents
            of the copy (an earlier delta is missing, or this delta was applied already). Nothing has changed
            then.
        RuntimeError: on every rank, if a rank fails in another way, e.g. for lack of memory. Nothing has
            changed then.
    """
    tables = tables_of(model, _CALL)
    group = tables[0].group
    changes: list[StagedTable] = []
    removed: list[Tensor] = []

    def read() -> list[tuple[Sums, Sums, Sums]]:
        saved = _tables_of(tables, path, checked_rename(rename, f"{_CALL}.rename"))
        for table in tables:
            _check_fits(table, saved[table.name])
        for table in tables:
            changes.append(StagedTable(table, MergedTable([saved[table.name]])))
            changes[-1].is_unscored = has_scores(saved[table.name]) is False
            removed.append(_own_removed(saved[table.name], table))
        return [
            (change.sums, _sums_replaced(change, ids), sums_here(_under_saved_name(change)))
            for change, ids in zip(changes, removed, strict=True)
        ]

    by_table = list(zip(*gather_results(group, _CALL, read), strict=True))
    commits: list[tuple[Table, list[Commit]]] = []

    def prepare() -> None:
        for change, parts in zip(changes, by_table, strict=True):
            read_sums, replaced, held = zip(*parts, strict=True)
            change.check_sums(*read_sums)
            _check_begins(change, add_sums(*held))
            _check_end(change, add_sums(*held), add_sums(*replaced))
        for change, ids in zip(changes, removed, strict=True):
            with turn_of(change.table):
                shards = zip(change.table.shards, change.finished(), strict=True)
                commits.append((change.table, [merge(shard, rows, ids) for shard, rows in shards]))

    run_together(group, _CALL, prepare)
    for table, changes_here in commits:
        with turn_of(table), commit(table):
            for change in changes_here:
                change()


def _where(table: Table) -> str:
    return f"{_CALL}(table={table.name!r})"


def _compared(change: StagedTable) -> list[str]:
    """Returns the names of the tensors whose sums must be equal in copy and delta."""
    table, optimizer, saved = change.table, change.table.optimizer, change.source.last
    cuts = (saved.optimizer or {}).get("cuts") or table.cuts
    names = ["ids", "weight", *optimizer.state_names, "step"]
    names += [*BY_ROW, "clock"] if table.options.has_life else []
    names += ["waiting"] if table.options.counts_waiting else []
    left_out = set(BY_ROW if change.is_unscored else ())
    if saved.dtype == table.dtype:
        names.append("config")
    else:  # converted
        left_out.add("weight")
    if cuts != table.cuts:
        left_out.update(name for name in optimizer.state_names if optimizer.is_rowwise(name))
    if cuts == table.cuts or not any(optimizer.state_is_rowwise):
        names.append("optimizer_config")
    return [name for name in names if name not in left_out]


def _check_begins(change: StagedTable, sums: Sums) -> None:
    """Raises ValueError unless the delta begins at the content sums of the copy."""
    saved = change.source.last
    base, result = (saved.sums_at(when) for when in ("base", "result"))
    if not saved.num_rows and not sums.get("last_seen"):
        change.is_unscored = False  # all scores are 0, as those of the copy
    for name in _compared(change):
        own, begin = sums[name], base[name]
        if name == "clock" and 0 in (own, begin):
            continue  # one of them was never set, or has no policy by time
        if own != begin:
            is_end = own == result[name]
            raise ValueError(
                f"{_where(change.table)}: expected a delta that begins at content sum {own:016x} of {name} "
                f"as the copy has, got a delta that begins at {begin:016x}"
                f"{' and ends at the sum of the copy: it was applied already' if is_end else ''}. "
                f"{_IN_ORDER}"
            )


def _check_end(change: StagedTable, held: Sums, replaced: Sums) -> None:
    """Raises ValueError unless the delta leads to the content sums that it names."""
    added, result = change.source.last.sums, change.source.last.sums_at("result")
    for name in _compared(change):
        kept = held[name] - replaced.get(name, 0) if name in ROW_TENSORS else 0
        total = (kept + added[name]) % (1 << 64)
        if total != result[name]:
            raise ValueError(
                f"{_where(change.table)}: expected a delta that leads to the content sum "
                f"{result[name]:016x} of {name} that it names, got a delta that leads to "
                f"{total:016x}. {DAMAGED}"
            )


def _sums_replaced(change: StagedTable, removed: Tensor) -> Sums:
    """Returns the content sums of this rank's rows that the delta removes or rewrites."""
    with turn_of(change.table):
        maps = tuple(
            _rows_replaced(shard, rows.id_map, removed)
            for shard, rows in zip(change.table.shards, change.shards, strict=True)
        )
        return sums_here(replace(_under_saved_name(change), maps=maps))


def _under_saved_name(change: StagedTable) -> Table:
    """Returns the table of a change with the name and options of the delta, on which content sums depend."""
    name, saved = change.source.name, change.source.last.config
    config = with_options_of({**change.table.config, "table": name}, saved)
    return replace(change.table, name=name, config=config)


def _rows_replaced(shard: TableShard, staged: IdMap, removed: Tensor) -> IdMap:
    """Returns a map of the ids of a shard whose rows a delta removes or rewrites."""
    ids = torch.cat([removed.to(shard.device), staged.contents()[0]])
    rows = shard.id_map.lookup(ids)
    return map_of(ids[rows >= 0], rows[rows >= 0])


def _tables_of(
    tables: Sequence[Table], path: PlaceLike, rename: Mapping[str, str]
) -> dict[str, SavedTable]:
    """Returns the tables of a delta by their names in the copy, which has the same tables."""
    delta = open_checkpoint(path)
    names = sorted(table.name for table in tables)
    if not delta.is_delta:
        raise ValueError(
            f"apply_delta: expected a delta of export_delta, got {path}, a full checkpoint. Load it "
            "with torch.distributed.checkpoint.load."
        )
    in_delta = [table.name for table in delta.tables.values()]
    check_saved_names(rename, in_delta, f"{_CALL}.rename")
    check_new_names(rename, names, f"{_CALL}.rename")
    saved = {rename.get(table.name, table.name): table for table in delta.tables.values()}
    if sorted(rename.get(name, name) for name in in_delta) != names:
        raise ValueError(
            f"apply_delta: expected a delta of the tables {listed(names)}, got a delta of "
            f"{listed(sorted(in_delta))} in {path}. "
            "Apply it to a model with the tables that were saved."
        )
    return saved


def _check_fits(table: Table, saved: SavedTable) -> None:
    """Raises ValueError unless a delta has the config and the optimizer of a table; warns of its options."""
    where = _where(table)
    check_config(where, saved.config, {**table.config, "table": saved.name})
    saved_rule = (saved.optimizer or {}).get("optimizer")
    rule = optimizer_config(table.optimizer, table.cuts)["optimizer"]
    if saved_rule != rule:
        raise ValueError(
            f"{where}: expected a delta with optimizer state of {rule} as the copy has, got "
            f"the state of {saved_rule}. Give both models the same optimizer."
        )
    if saved.config.get("initializer") != table.config["initializer"]:
        raise ValueError(
            f"{where}: expected a delta with initializer {table.config['initializer']!r} as the "
            f"copy has, got {saved.config.get('initializer')!r}. {_IN_ORDER}"
        )
    if not table.rank:
        warn_of_options(where, saved.config, table.config)


def has_scores(saved: SavedTable) -> bool | None:
    """Returns True if the whole saved table has scores; None if it has no rows. All ranks decide alike.

    False of a delta without rows may also mean that all scores are 0: these have the sum 0.
    """
    if saved.num_rows:
        return "last_seen" in saved.names
    whens = ("base", "result") if saved.is_delta else ()
    ends = [saved.sums_at(when) for when in whens]
    return any(sums["last_seen"] for sums in ends) if any(sums["ids"] for sums in ends) else None


def _own_removed(saved: SavedTable, table: Table) -> Tensor:
    """Returns the removed ids that this rank owns, [N] int64."""
    parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
    if table.part is not None and "removed" in saved.names:
        for mixed in mixed_ranges(table.part, table.layout.row_ranks):
            ends = (saved.place_of("removed", end) for end in (mixed.start, mixed.stop))
            parts.append(saved.ids("removed", *ends))
    return torch.cat(parts)
