"""StagedState: optimizer state of a saved table without its rows. It belongs to the rows that the table has.

A place is the number of a row in the canonical order of the whole table. Legend: M ids, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import (
    ChunkedTensor,
    add_sums,
    content_sum,
    mean_over_cuts,
)
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict.saving import Run, Share, share_of
from torchrec_dyn.storage import CanonicalRows, commit, on_device, turn_of
from torchrec_dyn.table import Commit, TableShard, named_states, replace, with_same_contents


class StagedState:
    """The saved optimizer state of a table; `cuts` are those of its row-wise state, sums of `saved_name`."""

    def __init__(
        self,
        table: Table,
        tensors: Mapping[str, ChunkedTensor],
        cuts: Sequence[int],
        saved_name: str,
    ) -> None:
        self._saved_name = saved_name
        names = table.optimizer.state_names
        self.table, self._cuts = table, cuts
        self._states = {name: tensors[name] for name in names if name in tensors}
        self._saved_step = int(tensors["step"].whole()) if "step" in tensors else None
        self._present: list[CanonicalRows] = []
        self._runs: Sequence[Run] = ()

    def share(self) -> Share | None:
        """Notes the present rows, and returns this rank's share of them; None if it has none."""
        table = self.table
        self._present = [table.canonical(shard) for shard in table.shards]
        return share_of(self._present[0], table) if table.shards else None

    def sums_at(self, total: int, runs: Sequence[Run]) -> dict[str, int]:
        """Returns the content sums of the state of the present rows, which are at `runs` of `total` rows."""
        table, self._runs = self.table, runs
        saved = next((state.shape[0] for state in self._states.values()), 0)
        if table.optimizer.state_names and saved != total:
            raise ValueError(
                f"{table.where}: expected optimizer state of {total} rows, as the table has, got that "
                f"of {saved}. Load it with the state dict of the module, or right after that."
            )
        sums: dict[str, int] = {}
        for shard, rows in zip(table.shards, self._present, strict=True):
            for ids, _, values in self._chunks(shard, rows):
                summed = {"ids": (ids, 0)} if shard.first_column == 0 else {}
                for name, numbers in values.items():
                    columns = self._columns(shard, name)
                    if columns.start or shard.first_column == 0:  # once in the whole table
                        summed[name] = numbers, columns.start
                sums = add_sums(
                    sums,
                    {
                        name: content_sum(self._saved_name, name, ids, numbers, first)
                        for name, (numbers, first) in summed.items()
                    },
                )
        return sums

    def _columns(self, shard: TableShard, name: str) -> slice:
        """Returns the columns that a shard reads: of row-wise state of other cuts all."""
        first = shard.first_column
        if not self.table.optimizer.is_rowwise(name):
            return slice(first, first + shard.columns)
        if self._cuts != self.table.cuts:
            return slice(0, len(self._cuts) - 1)
        number = self._cuts.index(first)
        return slice(number, number + 1)

    def _chunks(
        self, shard: TableShard, rows: CanonicalRows
    ) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Yields ids of a shard, their rows there, and their saved state: [M], [M] and [M, C] by name."""
        most = max(1, knobs.CHUNK_BYTES // (4 * self.table.embedding_dim))
        columns = {name: self._columns(shard, name) for name in self._states}
        for run in self._runs if self.table.optimizer.state_names else ():
            for begin in range(0, run.rows, most):
                end = min(run.rows, begin + most)
                ids, own = rows.read(run.here + begin, run.here + end)
                first, last = run.place + begin, run.place + end
                yield (
                    ids,
                    own,
                    {
                        name: state.rows(first, last, columns[name])
                        for name, state in self._states.items()
                    },
                )

    def replacing(self, _: int) -> Commit:
        """Prepares to replace the optimizer state of the table, as `StagedTable.replacing` its rows."""
        table, present = self.table, self._present
        with turn_of(table):
            shards = map(self._with_state, table.shards, present)
            changes = [*map(replace, table.shards, shards)]
            calls = _calls(table)

        def take() -> None:
            with turn_of(table):
                for rows in present:
                    rows.check_unchanged()  # by another thread
                if _calls(table) != calls:
                    raise RuntimeError(
                        f"{table.where}: expected the rows in the GPU's memory to stay while optimizer state "
                        "is loaded, got a training forward of another thread. Load it between two steps."
                    )
                with commit(table):
                    for change in changes:
                        change()

        return take

    def _with_state(self, shard: TableShard, rows: CanonicalRows) -> TableShard:
        """Returns a shard beside a shard, with its rows and the saved state."""
        high, result = shard.row_numbers.high_water_mark, with_same_contents(shard)
        stores = {state.name: state.store.empty() for state in named_states(shard)}
        for state in named_states(shard):  # as of a new row if it was not saved
            stores[state.name].reserve_filled(high, state.initial)
        columns = shard.first_column, shard.first_column + shard.columns
        for _, own, values in self._chunks(shard, rows):
            for name, numbers in values.items():
                if self.table.optimizer.is_rowwise(name) and self._cuts != self.table.cuts:
                    numbers = mean_over_cuts(numbers, self._cuts, columns)
                stores[name].write(own, on_device(numbers, own.device))
        for state in named_states(shard):
            if state.store.cache is not None:
                stores[state.name].join(state.store.cache)
        step = shard.step if self._saved_step is None else self._saved_step
        result.states = tuple(stores.values())
        result.step = max(shard.step if shard.life else 0, step)
        if shard.life is not None:
            result.life = shard.life.caught_up(result.step, high)
        return result


def _calls(table: Table) -> list[int]:
    """Returns numbers that change when rows of a table get frames."""
    return [cache.calls for shard in table.shards if (cache := shard.weights.cache) is not None]
