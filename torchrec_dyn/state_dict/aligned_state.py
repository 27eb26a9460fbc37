"""AlignedState: matches loaded optimizer state to the present rows of the shards, and commits it.

Legend: M rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import CHUNK_BYTES, add_sums, mean_over_cuts
from torchrec_dyn.life import RowLife
from torchrec_dyn.ranks import gather_results, run_together
from torchrec_dyn.state_dict.loading import OptimizerEntry
from torchrec_dyn.state_dict.places import Runs, Share, runs_of, share_of
from torchrec_dyn.storage import CanonicalRows, RowStore, TableLock, changes, locked, run_to_end
from torchrec_dyn.table import TableShard, named_states


class _LoadedState(NamedTuple):
    """Loaded optimizer state of one shard.

    Attributes:
        states: the stores, in the order of the shard's rows.
        step: the loaded step.
        life: the life of the rows at the loaded step; None without a policy.
    """

    states: tuple[RowStore, ...]
    step: int
    life: RowLife | None


class AlignedState:
    """Loaded optimizer state, matched to the present rows of the shards.

    `runs` is the position of the shards' rows in the whole table.

    Raises:
        ValueError: if the optimizer state has another number of rows.
    """

    def __init__(self, entry: OptimizerEntry, runs: Runs) -> None:
        table = entry.table
        if table.optimizer.state_names and entry.total != runs.total:
            raise ValueError(
                f"{table.where}: expected optimizer state of {runs.total} rows, got that of "
                f"{entry.total}. Load the state dict of the module before the state dict of its optimizer."
            )
        self._entry = entry
        self._runs = runs
        self._known = entry.known_sums()  # None: the rows of the shards may have another order

    @cached_property
    def _canonical(self) -> list[CanonicalRows]:
        table = self._entry.table
        return [table.canonical(shard) for shard in table.shards]

    def check(self) -> dict[str, int]:
        """Checks the config, and returns the content sums of the state with the present rows of the shards.

        Raises:
            ValueError: if the config is damaged, or of another optimizer.
        """
        self._entry.check_config()
        if self._known is not None:
            return self._known
        stretches = [self._stretches(rows) for rows in self._canonical]
        return self._entry.sums_of([((ids, staged) for ids, _, staged in one) for one in stretches])

    def compare(self, words: Sequence[list[list[int]]], summed: Mapping[str, int]) -> None:
        """Raises ValueError if the state is damaged, or was saved with other rows than the present rows."""
        entry, table = self._entry, self._entry.table
        expected = f"{table.where}: expected the rows that the optimizer state was saved with, got other rows"
        try:
            entry.compare(words, summed)
        except ValueError as error:
            if entry.is_verified:
                raise ValueError(
                    f"{expected}. Load the state dict of the module right before the state dict of its "
                    "optimizer."
                ) from None
            if table.group is not None:
                raise
            raise ValueError(  # the sums are of ids and state: other ids read as damage
                f"{expected}, or damaged state. Load the state dict of the module before that of its "
                "optimizer; if that was done, use the checkpoint before."
            ) from error

    def _stretches(self, rows: CanonicalRows) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields the ids of a shard, their rows in the shard, and their rows in the staged stores."""
        if not self._entry.table.optimizer.state_names:
            return
        most = max(1, CHUNK_BYTES // (4 * self._entry.table.cuts[-1]))
        for run in self._runs.mine:
            for begin in range(0, run.rows, most):
                end = min(run.rows, begin + most)
                ids, own = rows.read(run.here + begin, run.here + end)
                places = self._entry.places.within(run.place + begin, run.place + end)
                staged = [
                    torch.arange(row, row + high - low, device=own.device)
                    for low, high, row in places
                ]
                yield ids, own, torch.cat(staged)

    @property
    def lock(self) -> TableLock:
        """The lock of the shards."""
        return self._entry.lock

    @property
    def device(self) -> torch.device:
        """The device of the shards."""
        return self._entry.device

    @locked
    @changes
    def commit(self) -> None:
        """Replaces the optimizer state of the shards by the verified load.

        Raises:
            RuntimeError: the shards have changed since the state was verified.
        """
        entry, table = self._entry, self._entry.table
        if self._known is not None and entry.known_sums() is None:  # changed by another thread
            raise RuntimeError(
                f"{table.where}: expected rows that do not change while their optimizer state is loaded, "
                "got rows that have changed. Load between two steps, in the thread that trains."
            )
        cuts, loaded = entry.saved_config.get("cuts", table.cuts), []
        for number, (shard, stores) in enumerate(
            zip(table.shards, entry.staged or (), strict=True)
        ):
            is_same = self._known is not None or all(
                torch.equal(own, staged)
                for _, own, staged in self._stretches(self._canonical[number])
            )
            states = []
            for one in named_states(shard):
                store = stores[one.name]
                if one.is_rowwise and entry.has_all_cuts:
                    columns = (shard.first_column, shard.first_column + shard.columns)
                    mean = partial(mean_over_cuts, cuts=cuts, columns=columns)
                    rows = shard.row_numbers.high_water_mark if is_same else store.capacity
                    store = store.converted(1, torch.float32, mean, rows)
                if is_same:
                    store.reserve(shard.row_numbers.high_water_mark)
                states.append(store)
            if not is_same:
                states = self._in_order_of(number, shard, states)
            step = int(entry.small["step"]) if "step" in entry.small else shard.step
            step, life = max(shard.step if shard.life else 0, step), shard.life
            if life is not None:
                life = life.caught_up(step, shard.row_numbers.high_water_mark)
            loaded.append(_LoadedState(tuple(states), step, life))
        # After an interrupt (Ctrl-C) all column shards have the same scores and step, which decide evictions.
        run_to_end(*(partial(_swap, *one) for one in zip(table.shards, loaded, strict=True)))
        entry.staged = entry.session = None
        entry.renew()  # loaded again, these tensors are the table's own; those of the module are out of date

    def _in_order_of(
        self, number: int, shard: TableShard, stores: list[RowStore]
    ) -> list[RowStore]:
        """Returns copies of loaded stores in the order of a shard's rows."""
        ordered = [one.empty() for one in shard.states]
        for one in ordered:
            one.reserve(shard.row_numbers.high_water_mark)
        for _, own, staged in self._stretches(self._canonical[number]):
            for one, store in zip(ordered, stores, strict=True):
                one.write(own, store.read(staged))
        return ordered


def _swap(shard: TableShard, loaded: _LoadedState, again: bool) -> None:
    """Swaps loaded state into a shard. A second call directly after changes nothing."""
    shard.replace_states(loaded.states)
    shard.step, shard.life = loaded.step, loaded.life


def commit_state(entry: OptimizerEntry, call: str) -> None:
    """Verifies loaded optimizer state by the present rows of the shards, and commits it. Collective.

    Raises:
        ValueError: on every rank, if the state is damaged or of other rows; nothing has changed then.
    """
    table = entry.table

    def share() -> Share | None:
        return share_of(table.canonical(table.shards[0]), table) if table.shards else None

    runs = runs_of(gather_results(table.group, call, share), table.part)
    aligned = run_together(table.group, call, lambda: AlignedState(entry, runs))
    checked = gather_results(table.group, call, lambda: (aligned.check(), entry.words))
    sums, words = zip(*checked, strict=True)
    run_together(table.group, call, lambda: aligned.compare(words, add_sums(*sums)))
    run_together(table.group, call, aligned.commit)
