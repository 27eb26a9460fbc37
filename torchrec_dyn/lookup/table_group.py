"""The main path: ids -> rows -> pooled output, and gradients -> rows. Start reading here.

A TableGroup holds the tables that one op call serves: the lookup of rows, the pooling and the update are one
op call each, over all tables of the group.

Forward:
1. Check the input (bag_layout.py).
2. Find the row of each id and pool them by bag: one op, for which a GPU's host waits once.
3. In training count a step, and give rows to unseen ids in all tables or in none (training_step.py); then
   pool the bags of these ids. Frozen tables are read as in evaluation.
   An id still without a row reads as its initial row, if the table's `unseen` is "initial".

A pipeline that prefetches has taken the step before (`PrefetchedStep`).

Backward:
1. Check that it is the forward's first backward, and that no table was loaded, converted, moved or given
   another optimizer since.
2. Compute the gradient of the bag weights, if it is needed.
3. Sum the gradients of each distinct row and apply the optimizer in place. If updates are deferred, the
   optimizer's `step()` does this (deferred_updates.py).

Between forward and backward, the forward is open (storage/row_numbers.py), and the rows of removed
ids are not reused.

Legend: T tables, F features (in table order), B bags of a feature, N ids, D columns of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.lookup.bag_layout import (
    BagLayout,
    Bags,
    BatchShape,
    Pooling,
    contiguous_input,
    lookup_of,
    wrong_bags,
)
from torchrec_dyn.lookup.batch import Batch, Found, PrefetchedStep, TakenStep
from torchrec_dyn.lookup.deferred_updates import DeferredUpdates, Update
from torchrec_dyn.lookup.feature_uses import Uses, masked
from torchrec_dyn.lookup.gradient_reduction import reduction_of
from torchrec_dyn.lookup.lookup_function import (
    Forward,
    LookupFunction,
    as_float,
    raise_after_backward,
)
from torchrec_dyn.lookup.row_sums import RowSums, norm_of, row_sums
from torchrec_dyn.lookup.rows_ahead import ask_ahead, ask_for_batch
from torchrec_dyn.lookup.rule_update import update_by_rule
from torchrec_dyn.lookup.table_lists import TableLists, TrainedTables, list_tables
from torchrec_dyn.lookup.training_step import take_step
from torchrec_dyn.storage import (
    TABLES,
    ChangeLog,
    OpenForward,
    OpenForwards,
    TableLock,
    changes,
    commit,
    locked,
    note_changed,
    note_update,
    tokens_of,
    unrecorded,
)
from torchrec_dyn.table import TableShard, count_late_grads, insert_unseen

# What `ops.find_and_pool` pools: nothing, a batch without absent ids, or any batch.
_NONE, _KNOWN, _ALL = range(3)
_UNKNOWN = torch.empty(0, dtype=torch.int64, device="cpu")


def _inserting(
    tables: Sequence[TableShard], features_per_table: Sequence[int], uses: Uses | None
) -> set[int]:
    """Returns the tables that give rows to all unseen ids; in others the steps decide, in their order."""
    if uses is None or uses.inserts is None:
        return {t for t, table in enumerate(tables) if table.life is None}
    inserts = [bool(flags.all()) for flags in uses.inserts.split(list(features_per_table))]
    return {t for t, table in enumerate(tables) if table.life is None and inserts[t]}


class TableGroup:
    """Tables that share pooling, row dtype and optimizer, looked up together.

    Attributes:
        is_mean: True if each bag is divided by its length.
        learning_rate: every backward reads it, the fused optimizer writes it.
        has_life: True if any table has a life.
        in_files: numbers of the tables whose rows are in mapped files.
        deferred: the updates that wait for `write_updates`; None if each backward writes its own.
    """

    def __init__(
        self,
        tables: Sequence[TableShard],
        features_per_table: Sequence[int],
        pooling: Pooling,
        output_dtype: torch.dtype = torch.float32,
        uses: Uses | None = None,
    ) -> None:
        self.tables: Sequence[TableShard] = list(tables)
        if len({(table.dtype, table.optimizer) for table in self.tables}) != 1:
            raise ValueError(
                "TableGroup: expected tables of one row dtype and one optimizer, got "
                f"{[(table.name, table.dtype, table.optimizer) for table in self.tables]}."
            )
        self.is_mean = pooling == "mean"
        self.learning_rate: float = self.tables[0].optimizer.learning_rate
        self.output_dtype = output_dtype
        self._bag_layout = BagLayout(
            [table.columns for table in self.tables], features_per_table, pooling
        )
        self.has_life = any(table.life is not None for table in self.tables)
        self.deferred = DeferredUpdates() if self.tables[0].optimizer.defer_updates else None
        self.in_files = [t for t, table in enumerate(tables) if table.config.storage is not None]
        self._uses = uses  # of the features; None if each does all
        self._insert_all = _inserting(self.tables, features_per_table, uses)
        self._lists: TableLists | None = None
        self._forwards = OpenForwards()
        self._anchor: Tensor | None = None
        for table in self.tables:
            table.lock = self.lock

    @property
    def lock(self) -> TableLock:
        """The lock of the tables: a forward holds it, and a backward while it updates rows."""
        return self.tables[0].lock

    @property
    def max_gradient(self) -> float | None:
        """The limit of the gradient of the outputs; None if it has none."""
        optimizer = self.tables[0].optimizer
        return optimizer.max_gradient if optimizer.gradient_clipping else None

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        return self.tables[0].weights.device

    def __call__(self, batch: Batch, ahead: PrefetchedStep | None = None) -> Tensor:
        """Returns the pooled rows of the ids of a batch.

        Args:
            batch: the ids; `begins` are noted in it.
            ahead: the step of this batch, if it was taken ahead. Evaluation does not use it. Tables that were
                loaded or converted since take their step again.

        Returns:
            Pooled: [B, sum of D over features]. Pooled with batch_sizes: one dimension; for each rank in
            order, the [bags, D] of each feature in order. Not pooled: [N, D].

        Raises:
            ValueError: ids, lengths, offsets or weights of a wrong dtype or size; no table has changed.
            RuntimeError: a table is full, or memory is out; no table has changed.
        """
        contiguous_input(self.tables, batch)
        # As `locked` and `changes`; wrappers that pass any arguments take several times as long as the lock.
        lock = self.tables[0].lock
        if lock.is_changing or lock.torn:
            lock.check_at_rest()
        with lock:
            try:
                lock.is_changing = True
                if batch.ids.is_cpu:
                    return self._look_up(batch, ahead)
                with lock.streams.turn(batch.ids.device):
                    batch.keep_in_use()
                    if ahead is not None:
                        ahead.keep_in_use()
                    return self._look_up(batch, ahead)
            finally:
                lock.is_changing = False

    def _look_up(self, batch: Batch, ahead: PrefetchedStep | None) -> Tensor:
        if self.deferred is None or not batch.training:
            return self._look_up_rows(batch, ahead)
        if self.deferred.ends:
            self.deferred = DeferredUpdates()
            self._end_step()
        # The forward counts a step for all trained tables or, within a step, for none. Tables that were
        # frozen in the step so far count it here.
        trained = self._current().trained
        late = self.deferred.late(trained.tables) if trained else {}
        steps = {number: table.step for number, table in late.items()}
        try:
            for number, table in late.items():
                table.step = steps[number] + 1
            return self._look_up_rows(batch, ahead)
        except BaseException:
            for number, table in self.deferred.late(late).items():
                table.leave_open_step(steps[number])
            raise

    def _look_up_rows(self, batch: Batch, ahead: PrefetchedStep | None) -> Tensor:
        lists = self._current()
        trained = lists.trained if batch.training else None
        if self.deferred is not None and trained is not None:
            trained.shared.earlier = self.deferred.sizes
        for t in self.in_files if trained else ():
            self.tables[t].weights.check_process(lookup_of(self.tables))
        if not batch.training:
            ahead = None
        shape = self._bag_layout.shape_of(batch.bags, batch.batch_sizes)
        found, step = self._rows_of(batch, shape, lists, trained, ahead)
        bags = self._bag_layout.bags(shape, found.offsets, batch.table_offsets, batch.ids.numel())
        if self.in_files:
            ask_for_batch(
                self.tables, self.in_files, step.rows, batch.table_offsets, trained is not None
            )
        initial_ids = batch.ids if step.missing and lists.shows_initial else None
        is_pooled = trained is None or not found.num_absent
        out = self._pooled(batch, bags, lists, found, step, initial_ids, is_pooled)
        reduction = reduction_of(lists.configs, found.offsets, batch.table_offsets, batch.senders)
        forward = Forward(
            self, step.learning, step.rows, bags, self._shown(batch, initial_ids), trained, step.streams,
            lists.generations, step.noted, reduction,
        )  # fmt: skip
        if trained is not None:
            forward.begins = None if self.deferred is None else batch.begins
            forward.ids = None if self.tables[0].dtype == torch.float32 else batch.ids.clone()
        return self._output(forward, batch, out, ahead).view(bags.shape)

    def _rows_of(
        self,
        batch: Batch,
        shape: BatchShape,
        lists: TableLists,
        trained: TrainedTables | None,
        ahead: PrefetchedStep | None,
    ) -> tuple[Found, TakenStep]:
        """Returns the rows of a batch, by a step if tables are trained and it was not taken ahead."""
        if ahead is not None:
            return self._found_ahead(batch, shape, ahead, lists)
        if trained is not None:
            return self._take_step(batch, shape, lists, trained)
        found = self._find(batch, shape, lists, _KNOWN if lists.shows_initial else _ALL)
        return found, TakenStep(found.rows, found.num_absent > 0)

    def _pooled(
        self,
        batch: Batch,
        bags: Bags,
        lists: TableLists,
        found: Found,
        step: TakenStep,
        initial_ids: Tensor | None,
        is_pooled: bool,
    ) -> Tensor:
        """Returns the output: what was pooled with the lookup, with the bags of the new ids pooled again."""
        out, weights = found.out, as_float(batch.weights)
        if out is _UNKNOWN or self.in_files:
            blocks, is_pooled = lists.prepared.rows(), True
            out = ops.gather_pool(
                step.rows, bags.offsets, weights, blocks.blocks, blocks.layout, bags.segments,
                self.is_mean, bags.elements, self.output_dtype,
            )  # fmt: skip
        if initial_ids is not None or not is_pooled:
            ops.pool_prepared_(
                out, step.new_index, step.rows, initial_ids, bags.offsets, weights, bags.segments,
                lists.prepared.get(), self.is_mean,
            )  # fmt: skip
        return out

    @staticmethod
    def _shown(batch: Batch, initial_ids: Tensor | None) -> Tensor | None:
        """Returns the ids that read as initial rows, for the gradient of the weights."""
        weights = batch.weights
        if initial_ids is None or weights is None or not weights.requires_grad:
            return None
        return initial_ids.clone()

    def _output(
        self, forward: Forward, batch: Batch, out: Tensor, ahead: PrefetchedStep | None
    ) -> Tensor:
        """Returns the output, whose backward updates the rows of the forward."""
        weights = batch.weights
        trains = forward.trained is not None
        has_backward = trains or (weights is not None and weights.requires_grad)
        if not (has_backward and torch.is_grad_enabled()):
            return out
        forward.open_forward = ahead.open_forward if ahead else OpenForward(self._forwards)
        self._await_backward(forward, batch.ids)
        output: Tensor = LookupFunction.apply(
            self._anchored() if trains else None, weights, forward, [out]
        )
        return output

    def _await_backward(self, forward: Forward, ids: Tensor) -> None:
        """Notes that a backward will update the rows of ids [N]. On the CPU their record needs the ids."""
        if forward.trained is None:
            return
        if self.deferred is not None:
            forward.step = self.deferred.step
            self.deferred.waiting += 1
        if ids.is_cpu and self._current().has_changes:
            logs, table_offsets = self._logs(), forward.bags.table_offsets
            note_changed(unrecorded(logs, forward.noted), ids, forward.rows, table_offsets)
            forward.noted = tokens_of(logs)

    def _find(self, batch: Batch, shape: BatchShape, lists: TableLists, pools: int) -> Found:
        """Finds the rows of a batch, and pools them; notes in the batch what is known of it then."""
        if self.in_files:  # their pages are asked for first
            pools = _NONE
        out, rows, offsets, numbers = ops.find_and_pool(
            batch.ids, batch.lengths, batch.offsets, as_float(batch.weights), shape.first_bags,
            self._bag_layout.first_features, shape.segments, lists.prepared.get(), self.is_mean, pools,
            shape.elements, self.output_dtype,
        )  # fmt: skip
        if numbers[-1]:
            raise wrong_bags(self.tables, batch)
        features = shape.first_bags.numel()
        batch.begins = numbers[:features]
        batch.table_offsets = self._bag_layout.offsets_of_tables(batch.begins)
        if self._uses is not None and batch.training:
            batch.uses = self._uses.of_ids(batch.begins.diff(), batch.ids)
        absent = numbers[features:-1]
        return Found(out, rows, offsets, absent, int(absent.sum()))

    @locked
    @changes
    def prefetch(self, batch: Batch) -> None:
        """Gives rows to unseen ids ahead of the training forward of the same batch.

        Does nothing for tables with a life, or with a feature that does not insert: their steps decide which
        ids get rows, in the order of the batches. What holds for a table depends on that table alone: other
        ranks may have others beside it.
        """
        lists = self._current()
        trained = {} if lists.trained is None else lists.trained.tables
        tables = {t: table for t, table in trained.items() if t in self._insert_all}
        if not tables:
            return
        contiguous_input(self.tables, batch)
        batch.keep_in_use()
        shape = self._bag_layout.shape_of(batch.bags, batch.batch_sizes)
        found = self._find(batch, shape, lists, _NONE)
        missing = found.absent.tolist()
        if any(missing[t] for t in tables):
            insert_unseen(tables, lists.prepared, batch.ids, found.rows, batch.table_offsets)

    @locked
    @changes
    def prefetch_step(self, batch: Batch) -> PrefetchedStep | None:
        """Takes the training step of a batch now, for its forward, and returns it.

        Returns None, and takes no step, if updates are deferred: then the forward belongs to the step that is
        present when it runs. Tables that are frozen now are frozen for the batch. Raises the errors of the
        forward; no table has changed then.
        """
        if self.deferred is not None:
            return None
        lists = self._current()
        batch.keep_in_use()
        shape = self._bag_layout.shape_of(batch.bags, batch.batch_sizes)
        found, taken = self._step_ahead(batch, shape, lists)
        bags = batch.begins, batch.table_offsets, found.offsets
        return PrefetchedStep(taken, bags, lists.generations, OpenForward(self._forwards))

    def _step_ahead(
        self, batch: Batch, shape: BatchShape, lists: TableLists
    ) -> tuple[Found, TakenStep]:
        """Takes the step of a batch whose forward comes later; tables may be frozen or not by then."""
        if lists.trained is not None:
            return self._take_step(batch, shape, lists, lists.trained, _NONE)
        found = self._find(batch, shape, lists, _NONE)
        learning = torch.full_like(found.rows, -1)
        return found, TakenStep(
            found.rows, found.num_absent > 0, learning=learning, streams=lists.streams
        )

    def _found_ahead(
        self, batch: Batch, shape: BatchShape, ahead: PrefetchedStep, lists: TableLists
    ) -> tuple[Found, TakenStep]:
        """Returns the step that was taken ahead, for the tables that are trained now."""
        ahead.check_size(batch.ids)
        if not ahead.is_of(lists):  # again for the tables that were loaded or converted since
            as_then = ahead.tables_as_then(lists)
            _, again = self._step_ahead(batch, shape, list_tables(self.tables, as_then))
            ahead = ahead.joined(again, as_then, batch.table_offsets)
        batch.begins, batch.table_offsets, offsets = ahead.bags
        step = ahead.now(lists, batch.table_offsets)
        return Found(_UNKNOWN, step.rows, offsets, _UNKNOWN, 0), step

    @locked
    def ask_ahead(self, ids: Mapping[int, Tensor], training: bool) -> None:
        """Asks for the rows of a later batch: ids [N] int64 by number of a table of `in_files`."""
        ask_ahead(self.tables, ids, training)

    def replace_tables(self, tables: Sequence[TableShard]) -> None:
        """Uses other tables with the settings of the present ones."""
        self.tables, self._lists = list(tables), None

    def _anchored(self) -> Tensor:
        if self._anchor is None:
            self._anchor = torch.zeros((), requires_grad=True, device="cpu")
        return self._anchor

    def _take_step(
        self,
        batch: Batch,
        shape: BatchShape,
        lists: TableLists,
        trained: TrainedTables,
        pools: int = _KNOWN,
    ) -> tuple[Found, TakenStep]:
        """Runs the training step of the trained tables, and finds the rows of all ids."""
        find = partial(self._find, batch, shape, lists, pools)
        found, step = take_step(trained, batch, find, self._uses)
        if self.deferred is not None:
            self.deferred.begin(batch.table_offsets, trained.tables)
            trained.shared.earlier = self.deferred.sizes
        scored = trained.with_life and lists.has_changes
        streams = torch.add(lists.streams, lists.stepping, alpha=trained.shared.counted.steps)
        learning = lists.rows_to_update(step.rows, batch.table_offsets)
        if batch.uses is not None:
            learning = masked(learning, batch.uses.trains)
        return found, step._replace(
            learning=learning,
            streams=streams,
            noted=tokens_of(self._logs()) if scored else None,
        )

    def _logs(self) -> list[ChangeLog | None]:
        return [table.change_log for table in self.tables]

    def __getstate__(self) -> dict[str, Any]:
        # Blocks are much larger than the rows in use. A copy does not hold them: it lists its own tables. And
        # it has no graphs.
        return {
            **self.__dict__, "_lists": None, "_anchor": None, "_forwards": None, "deferred": None
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forwards = OpenForwards()
        self.deferred = DeferredUpdates() if self.tables[0].optimizer.defer_updates else None

    def _current(self) -> TableLists:
        """Returns the tables, listed again if one of them has changed other than by training."""
        if self._lists is None or self._lists.token is not TABLES.now:
            for table in self.tables:
                table.forwards.include(self._forwards)
            self._lists = list_tables(self.tables)
        return self._lists

    def _check_backward(self, forward: Forward) -> None:
        if forward.is_done:
            raise RuntimeError(
                "lookup: expected one backward through a forward, got a second. The rows are "
                "updated already; run the forward again."
            )
        if forward.generations != self._current().generations:
            raise RuntimeError(
                "lookup: expected the tables of the forward at its backward, got tables that were "
                "loaded or converted in between, moved, or given another optimizer. Run backward first."
            )

    def _weights_grad(self, forward: Forward, grad: Tensor) -> Tensor:
        """Returns the gradient of the weights of a forward, [N] float32; `grad` is of its output."""
        bags, prepared = forward.bags, self._current().prepared.get()
        return ops.weights_grad_prepared(
            grad, forward.shown, forward.initial_ids, bags.offsets, bags.segments, prepared,
            self.is_mean,
        )  # fmt: skip

    def _take_gradient(self, forward: Forward, grad: Tensor, weights: Tensor | None) -> None:
        """Writes the update of a forward, or keeps it if updates are deferred; `grad` is of its output."""
        # Recorded before the update: an interrupted backward is not repeated, since it may have updated rows.
        forward.is_done = True
        update = Update(forward, grad, weights)
        if self.deferred is not None:
            self.deferred.add(update)
            return
        try:
            self._write(update)
        except Exception as error:
            if not self._current().refuses_nonfinite and self.tables[0].optimizer.own is None:
                raise
            raise_after_backward(error)
        forward.close()

    @locked
    @changes
    def write_updates(self) -> None:
        """Writes the deferred updates and ends the step; does nothing if updates are not deferred.

        Raises:
            RuntimeError: the tables were loaded, converted, moved or given another optimizer since a
                backward; the updates are dropped. Or an update that is not finite was refused with an error;
                no row has changed.
        """
        if self.deferred is None:
            return
        deferred, self.deferred = self.deferred, DeferredUpdates()
        self._end_step()
        if not deferred.updates:
            return
        generations = self._current().generations
        if any(update.forward.generations != generations for update in deferred.updates):
            raise self._changed_before_step()
        self._write(deferred.joined(self._bag_layout, self.max_gradient))
        deferred.close()

    @locked
    @changes
    def drop_updates(self) -> None:
        """Forgets the deferred updates, and ends the step.

        If a forward of the step had no backward yet, the step goes on if a backward comes before the next
        forward: so `zero_grad()` may stand between forward and backward. Does nothing if updates are not
        deferred.
        """
        if self.deferred is None:
            return
        deferred, self.deferred = self.deferred, self.deferred.dropped()
        if not self.deferred.ends:
            self._end_step()
        deferred.close()

    def check_written(self) -> None:
        """Raises the error of `write_updates` if updates wait, and drops them: the tables have changed."""
        deferred = self.deferred
        self.drop_updates()
        self._end_step()
        if deferred is not None and deferred.updates:
            raise self._changed_before_step()

    def _changed_before_step(self) -> RuntimeError:
        return RuntimeError(
            f"{lookup_of(self.tables)}: expected the tables of the backward at the optimizer's step(), got "
            "tables that were loaded or converted in between, moved, or given another optimizer. The "
            "gradients are dropped. Call step() or zero_grad() first."
        )

    @locked
    @changes
    def norm_of_updates(self, power: float) -> Tensor:
        """Returns the norm of the deferred row gradients, [] float64; `power` above 0, or infinity."""
        if self.deferred is None or not self.deferred.updates:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return norm_of(
            self._row_sums(self.deferred.joined(self._bag_layout, self.max_gradient)), power
        )

    def _row_sums(self, update: Update) -> list[RowSums]:
        return row_sums(update, [table.columns for table in self.tables], self.is_mean)

    @locked
    @changes
    def scale_updates(self, factor: float) -> None:
        """Multiplies the deferred row gradients by a factor."""
        if self.deferred is not None:
            self.deferred.scale *= factor

    @locked
    @changes
    def unscale_updates(self, factor: float) -> bool:
        """Divides the deferred gradients by a loss scale, 1 / `factor`; returns True if they are finite."""
        if self.deferred is None:
            return True
        self.deferred.multiply(factor)
        return self.deferred.are_finite()

    def _end_step(self) -> None:
        for shared in {table.own.shared for table in self.tables}:
            shared.earlier = None

    def _write(self, update: Update) -> None:
        """Sums the gradients of each distinct row of an update and applies the optimizer."""
        lists, (forward, grad, weights) = self._current(), update
        trained, bags = forward.trained, forward.bags
        assert trained is not None
        withheld = [t for t, numbers in enumerate(lists.row_numbers) if numbers.withheld_parts]
        if withheld:
            tables = {t: self.tables[t] for t in withheld}
            count_late_grads(tables, forward.rows, bags.table_offsets)
        if lists.trained is not None and lists.trained.shared is trained.shared:
            lists.trained.shared.edits += 1
        else:  # tables were frozen in between, or are in another group
            for table in trained.tables.values():
                table.own = table.own._replace(edits=table.own.edits + 1)
        optimizer, batch = self.tables[0].optimizer, (forward.rows, bags.table_offsets)
        logs = unrecorded(self._logs(), forward.noted) if lists.has_changes else []
        id_maps = [table.id_map for table in self.tables] if any(logs) else []
        if optimizer.own is not None:
            sums = self._row_sums(update)
            written = update_by_rule(
                optimizer.own, self.tables, sums, forward.streams, self.learning_rate
            )
            note_changed(logs, id_maps, *batch)
            with commit(*self.tables):
                for write in written:
                    write()
            return
        listed_marks = note_update(logs, id_maps, *batch)
        ops.update_prepared_(
            grad, forward.ids_or_rows, forward.rows, bags.offsets, weights, bags.segments,
            forward.streams, self.is_mean, optimizer.hyper(self.learning_rate),
            forward.reduction.scales, forward.reduction.senders, *listed_marks, lists.prepared.get(),
        )  # fmt: skip
