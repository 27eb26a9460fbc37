"""The two writes of many rows: `replace` everything that a table holds, or `merge` rows and remove others.

The rows to write lie in a shard beside the table: `beside` makes it, `append` adds rows, and `complete` ends
it. Then `replace` or `merge` prepares: it takes all memory, changes no row that anyone reads, and returns a
function that commits, which is called with the table's lock and allocates nothing.

Legend: M ids, C columns of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import TypeVar

import torch
from torch import Tensor

from torchrec_dyn.life import Clock, RowLife, last_step
from torchrec_dyn.storage import TABLES, Chosen, keep_in_use, note_changed, on_device
from torchrec_dyn.table.arrays import TableArrays
from torchrec_dyn.table.contents import named_states, stamp_of, stored_life, stored_rows
from torchrec_dyn.table.insertion import TableChange, fresh
from torchrec_dyn.table.prepared_tables import PreparedTables

Commit = Callable[[], None]
_Shard = TypeVar("_Shard", bound=TableArrays)
_CONTENTS = (
    *("id_map", "row_numbers", "weights", "states", "life", "nonfinite"),
    *("initializer", "initial_rows"),
)


def beside(
    table: _Shard, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> _Shard:
    """Returns an empty shard with the settings of a table, by default of its dtype and device."""
    empty = with_same_contents(table)
    empty.reset(dtype or table.dtype, device or table.device)
    empty.step = 0
    return empty


def with_same_contents(table: _Shard) -> _Shard:
    """Returns a shard beside the table that has the table's own stores, to replace some of them."""
    same = object.__new__(type(table))
    vars(same).update({**vars(table), "changes": None})
    return same


def append(rows: TableArrays, chunk: Mapping[str, Tensor]) -> None:
    """Appends distinct "ids" [M] with their tensors, [M, C] or [M]; missing ones are those of a new row."""
    ids, first = chunk["ids"].to(rows.device), rows.row_numbers.high_water_mark
    if not len(ids):
        return
    rows.reserve(len(ids))
    places = torch.arange(first, first + len(ids), device=rows.device)
    rows.row_numbers.high_water_mark = first + len(ids)
    rows.id_map.insert(ids.contiguous(), places)
    rows.weights.put(first, 0, on_device(chunk["weight"], rows.device))
    for state in named_states(rows):
        if state.name in chunk:
            values = on_device(chunk[state.name], rows.device)
            state.store.put(first, 0, values.reshape(len(ids), -1))
        else:
            state.store.fill(places, state.initial)
    if rows.life is not None:
        last_seen = chunk.get("last_seen", torch.full_like(places, rows.step))
        counts = chunk.get("count", torch.zeros_like(places))
        scores = (numbers.flatten().to(rows.device) for numbers in (last_seen, counts))
        rows.life.scores.write(places, *scores)


def write_state(
    rows: TableArrays,
    chunks: Iterable[Mapping[str, Tensor]],
    count: int,
    step: int,
    life: Mapping[str, Tensor],
) -> None:
    """Fills an empty table with `count` rows and parts of a life, as `RowLife.export` returns it."""
    rows.step = max(step, last_step(life))
    rows.reserve(count)
    for chunk in chunks:
        append(rows, chunk)
    if rows.life is not None:
        rows.life.load(life, torch.arange(count, device=rows.device), rows.step)


def copy_rows(table: TableArrays, rows: TableArrays, with_optimizer: bool = True) -> None:
    """Fills an empty table with the contents of another, of any dtype and device.

    A new optimizer counts steps from 0, but scores refer to steps.
    """
    life = stored_life(table)
    step = table.step if with_optimizer or "last_seen" in life else 0
    write_state(rows, stored_rows(table, with_optimizer), table.id_map.num_ids, step, life)


def complete(rows: TableArrays, step: int, clock: Tensor, is_unscored: bool = False) -> None:
    """Sets step and clock [2, K] int64, as saved, of a shard that has all its rows."""
    rows.step, life = step, rows.life
    if life is None:
        return
    if life.is_timed:
        life.clock = Clock.load(clock)
    rows.step = max(step, life.clock.present_step - 1)
    life.is_unscored = is_unscored
    rows.life = life.caught_up(rows.step, rows.row_numbers.high_water_mark)


def replace(table: TableArrays, rows: TableArrays) -> Commit:
    """Prepares to replace the contents of a table by those of a shard beside it, which is not used again."""
    log, stamp = table.change_log, stamp_of(table)
    contents = {name: vars(rows)[name] for name in _CONTENTS}
    step, is_same_device = rows.step, rows.device == table.device

    def logged() -> dict[str, object]:
        if log is None:
            return {}
        if rows.id_map is table.id_map:
            log.note_all()
            return {}
        high = rows.row_numbers.high_water_mark
        return log.replaced(*table.id_map.contents(), high, rows.device)

    changes = logged()

    def commit() -> None:
        changed = changes if stamp_of(table) == stamp else logged()  # by another thread
        id_map, former = table.id_map, [*table.stores]
        if rows.weights is not table.weights:
            table.note_cached()
        if table.life is not None:
            former.append(table.life.scores.store)
        if is_same_device:
            contents["nonfinite"] = table.nonfinite  # counted on until now
        if log is not None:
            vars(log).update(changed)
        TABLES.renew()
        vars(table).update(contents)
        table.step = step
        table.generation += 1  # the backward of an earlier forward must not write to these rows
        # As the blocks: another stream may have allocated the slots.
        keep_in_use(id_map.slots, id_map.outgoing)
        for store in former:
            store.keep_in_use()

    return commit


def merge(table: TableArrays, rows: TableArrays, removed: Tensor) -> Commit:
    """Prepares to remove ids, and to write the rows of a shard beside the table, all of which have an id.

    removed [N] int64, distinct; ids without a row are skipped. Rows may exceed the limit of the table. Step,
    clock and counters become those of the shard beside.
    """
    log, device = table.change_log, table.device
    ids, places = rows.id_map.contents()
    ids = ids[places.argsort()]  # in the order of the rows beside
    targets = table.id_map.lookup(ids)
    is_new = targets < 0
    known, new = ids[~is_new], ids[is_new]
    table.reserve(new.numel())
    removed, their_rows = table.id_map.find(removed.to(device))
    no_scores = torch.full_like(their_rows, -1), torch.zeros_like(their_rows)
    gone = Chosen(removed, their_rows, {0: removed.numel()})
    added = fresh({0: table}, new, {0: new.numel()})
    rows_change = TableChange({0: table}, PreparedTables([table]), gone, added, "erased")
    offsets = torch.tensor([0, known.numel()], device="cpu")
    note_changed([log], known, targets[~is_new], offsets)
    new_places = is_new.nonzero().flatten()
    high = table.row_numbers.highest_after(new.numel())
    life, scores = _life_after(table, rows, targets, high)
    stamp, step = stamp_of(table), rows.step

    def commit() -> None:
        if stamp_of(table) != stamp:  # changed by another thread
            raise RuntimeError(
                f"{table.where}: expected rows that do not change while others are merged, got rows that "
                "have changed. Merge between two steps, in the thread that trains."
            )
        table.life = life
        rows_change.commit()
        targets.index_copy_(0, new_places, rows_change.rows.new_rows)
        for store, new_rows in zip(table.stores, rows.stores, strict=True):
            blocks = zip(targets.split(1 << new_rows.shift), new_rows.blocks, strict=False)
            for some, block in blocks:
                store.write(some, block[: some.numel()])
        if life is not None and scores is not None:
            life.scores.write(their_rows, *no_scores)
            life.scores.write(targets, *scores)
        table.step = step
        table.generation += 1  # the backward of an earlier forward must not write to these rows

    return commit


def _life_after(
    table: TableArrays, rows: TableArrays, targets: Tensor, high: int
) -> tuple[RowLife | None, tuple[Tensor, Tensor] | None]:
    """Returns the life of a table after a merge, and last_seen and counts to write to the rows `targets`."""
    if table.life is None or rows.life is None:
        return None, None
    life = copy(table.life)
    life.forget_listed()
    life.waiting, life.is_unscored = rows.life.waiting, rows.life.is_unscored
    if life.is_timed:
        life.clock = rows.life.clock
    last_seen, counts = rows.life.scores.read(torch.arange(targets.numel(), device=table.device))
    return life.caught_up(rows.step, high), (last_seen, counts)
