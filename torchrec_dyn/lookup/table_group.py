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
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.lookup.bag_layout import (
    BagLayout,
    Bags,
    Pooling,
    contiguous_input,
    lookup_of,
    wrong_bags,
)
from torchrec_dyn.lookup.batch import Batch, Found, PrefetchedStep, TakenStep
from torchrec_dyn.lookup.deferred_updates import DeferredUpdates, Update
from torchrec_dyn.lookup.feature_uses import Uses, masked
from torchrec_dyn.lookup.gradient_reduction import reduction_of
from torchrec_dyn.lookup.largest import largest_of_batch
from torchrec_dyn.lookup.lookup_function import (
    ANCHOR,
    Forward,
    apply_lookup,
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
    IdMap,
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
from torchrec_dyn.table import NewIds, TableShard, count_late_grads, insert_unseen

# What `ops.find_and_pool` pools: nothing, a batch without absent ids, or any batch.
_NONE, _KNOWN, _ALL = range(3)
# Whether it lists the distinct absent ids: if there are any, or before a GPU's host knows.
_IF_ABSENT, _EXPECTED = 1, 2


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
        pooling: of this rank's rows of a bag.
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
        self.pooling = pooling
        self.is_mean = pooling == "mean"
        self.learning_rate: float = self.tables[0].optimizer.learning_rate
        self.output_dtype = output_dtype
        self._bag_layout = BagLayout(
            [table.columns for table in self.tables], features_per_table, pooling
        )
        self.has_life = any(table.life is not None for table in self.tables)
        self.deferred = DeferredUpdates() if self.tables[0].optimizer.defer_updates else None
        self.in_files = [t for t, table in enumerate(tables) if table.weights.files is not None]
        self._uses = uses  # of the features; None if each does all
        self._insert_all = _inserting(self.tables, features_per_table, uses)
        self._lists: TableLists | None = None
        self._forwards = OpenForwards()
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
            batch: the ids; its `numbers` are noted in it.
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
        in_step = self.deferred is not None and batch.training
        look_up = self._look_up_in_step if in_step else self._look_up
        # As `locked` and `changes`; wrappers that pass any arguments take several times as long as the lock.
        lock = self.tables[0].lock
        if lock.is_changing or lock.torn:
            lock.check_at_rest()
        with lock:
            try:
                lock.is_changing = True
                if batch.ids.is_cpu:
                    out = look_up(batch, ahead)
                else:
                    with lock.streams.turn(batch.ids.device):
                        batch.keep_in_use()
                        if ahead is not None:
                            ahead.keep_in_use()
                        out = look_up(batch, ahead)
            finally:
                lock.is_changing = False
        return out if self.pooling != "max" else largest_of_batch(out, batch)

    def _look_up_in_step(self, batch: Batch, ahead: PrefetchedStep | None) -> Tensor:
        """`_look_up` of a training batch whose update is deferred."""
        assert self.deferred is not None
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
            return self._look_up(batch, ahead)
        except BaseException:
            for number, table in self.deferred.late(late).items():
                table.leave_open_step(steps[number])
            raise

    def _look_up(self, batch: Batch, ahead: PrefetchedStep | None) -> Tensor:
        lists = self._current()
        if not batch.training:
            ahead = None
        bags = self._bag_layout.bags_of(batch)
        if ahead is not None:
            out, step = None, self._found_ahead(batch, bags, ahead, lists)
        elif batch.training and lists.trained is not None:
            out, step = self._take_step(batch, bags, lists, lists.trained)
        else:
            out, step = self._read(batch, bags, lists)
        offsets = batch.offsets
        if bags is None:
            bags = self._bag_layout.sequences(batch.table_offsets, batch.ids.numel())
            offsets = None
        if out is None or step.missing or step.new_index is not None:
            out = self._pooled(out, batch, bags, offsets, lists, step)
        return self._with_backward(out, batch, bags, offsets, lists, step, ahead)

    def _read(
        self, batch: Batch, bags: Bags | None, lists: TableLists
    ) -> tuple[Tensor | None, TakenStep]:
        """Finds the rows of a batch without a step: in evaluation, or if all tables are frozen."""
        found = self._find(batch, bags, lists, _KNOWN if lists.shows_initial else _ALL)
        missing = lists.shows_initial and bool(found.absent.any())
        return found.out, TakenStep(found.rows, missing)

    def _pooled(
        self,
        out: Tensor | None,
        batch: Batch,
        bags: Bags,
        offsets: Tensor | None,
        lists: TableLists,
        step: TakenStep,
    ) -> Tensor:
        """Returns the output: what was pooled with the lookup, with the bags of the new ids pooled again."""
        initial_ids = batch.ids if step.missing and lists.shows_initial else None
        weights = None if batch.weights is None else as_float(batch.weights)
        if self.in_files:
            trains = batch.training and lists.trained is not None
            ask_for_batch(self.tables, self.in_files, step.rows, batch.table_offsets, trains)
        rows = lists.prepared.places(step.rows, batch.table_offsets)
        if out is None:
            blocks = lists.prepared.rows()
            out = ops.gather_pool(
                rows, offsets, weights, blocks.blocks, blocks.layout, bags.segments,
                self.is_mean, bags.elements, self.output_dtype,
            ).view(bags.shape)  # fmt: skip
            if initial_ids is None:
                return out
        ops.pool_prepared_(
            out, step.new_index, rows, initial_ids, offsets, weights, bags.segments,
            lists.prepared.get(), self.is_mean,
        )  # fmt: skip
        return out

    def _with_backward(
        self,
        out: Tensor,
        batch: Batch,
        bags: Bags,
        offsets: Tensor | None,
        lists: TableLists,
        step: TakenStep,
        ahead: PrefetchedStep | None,
    ) -> Tensor:
        """Returns the output, with a backward if tables are trained, or if the weights want a gradient."""
        weights, trained = batch.weights, lists.trained if batch.training else None
        wants_grad = weights is not None and weights.requires_grad
        if not (torch.is_grad_enabled() and (trained is not None or wants_grad)):
            return out
        forward = Forward(
            self, bags, offsets, batch.numbers, batch.first_bags.numel(), step.rows, step.learning,
            trained, step.streams, lists, step.noted, lists.unsent,
            ahead.open_forward if ahead else OpenForward(self._forwards),
        )  # fmt: skip
        if wants_grad and step.missing:
            forward.ids = batch.ids.clone()
        anchor = None
        if trained is not None:
            anchor = ANCHOR
            self._await_update(forward, batch, lists)
        output: Tensor = apply_lookup(anchor, weights, forward, [out])
        return output

    def _await_update(self, forward: Forward, batch: Batch, lists: TableLists) -> None:
        """Notes what the update of the rows of a batch needs. On the CPU their record needs the ids."""
        if lists.rounds:
            forward.ids = batch.ids.clone()
        if batch.senders is not None:
            assert batch.offsets is not None
            configs = [table.config for table in self.tables]
            forward.reduction = reduction_of(
                configs, batch.offsets, batch.table_offsets, batch.senders
            )
        if self.deferred is not None:
            forward.step = self.deferred.step
            self.deferred.waiting += 1
        if lists.has_changes and batch.ids.is_cpu:
            logs = self._logs()
            recorded = unrecorded(logs, forward.noted)
            note_changed(recorded, batch.ids, forward.rows, batch.table_offsets)
            forward.noted = tokens_of(logs)

    def _find(
        self, batch: Batch, bags: Bags | None, lists: TableLists, pools: int, collects: int = 0
    ) -> Found:
        """Finds the rows of a batch, and pools them; notes in the batch what is known of it then.

        `collects` is that of `ops.find_and_pool`.
        """
        if self.in_files or lists.prepared.has_caches:  # pages or rows are asked for first
            pools = _NONE
        weights = None if batch.weights is None else as_float(batch.weights)
        segments, output_rows, columns = (None, 0, 0) if bags is None else bags.arguments
        out, rows, offsets, numbers, new_ids, new_counts, new_index = ops.find_and_pool(
            batch.ids, batch.lengths, batch.offsets, weights, batch.first_bags,
            self._bag_layout.first_features, segments, lists.prepared.get(), self.is_mean, pools, collects,
            output_rows, columns, self.output_dtype,
        )  # fmt: skip
        if not numbers.numel():
            raise wrong_bags(self.tables, batch)
        batch.offsets, batch.numbers = offsets, numbers
        if batch.training and lists.prepared.has_caches:
            lists.prepared.cache_rows(rows, batch.table_offsets)
        if self._uses is not None and batch.training:
            batch.uses = self._uses.of_ids(batch.begins.diff(), batch.ids)
        new = None
        if new_ids.numel():
            new = NewIds(new_ids, new_counts, new_index, batch.new_ends)
        return Found(out if pools else None, rows, batch.absent, new)

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
        found = self._find(batch, self._bag_layout.bags_of(batch), lists, _NONE, _IF_ABSENT)
        if found.new is not None and not tables.keys().isdisjoint(found.new.sizes):
            insert_unseen(tables, lists.prepared, found.rows, found.new)

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
        taken = self._step_ahead(batch, self._bag_layout.bags_of(batch), lists)
        bags = batch.numbers, batch.offsets
        return PrefetchedStep(taken, bags, lists.generations, OpenForward(self._forwards))

    def _step_ahead(self, batch: Batch, bags: Bags | None, lists: TableLists) -> TakenStep:
        """Takes the step of a batch whose forward comes later; tables may be frozen or not by then."""
        if lists.trained is not None:
            return self._take_step(batch, bags, lists, lists.trained, _NONE)[1]
        found = self._find(batch, bags, lists, _NONE)
        learning, missing = torch.full_like(found.rows, -1), bool(found.absent.any())
        return TakenStep(found.rows, missing, learning=learning, streams=lists.streams)

    def _found_ahead(
        self, batch: Batch, bags: Bags | None, ahead: PrefetchedStep, lists: TableLists
    ) -> TakenStep:
        """Returns the step that was taken ahead, for the tables that are trained now."""
        ahead.check_size(batch.ids)
        if not ahead.is_of(lists):  # again for the tables that were loaded or converted since
            as_then = ahead.tables_as_then(lists)
            again = self._step_ahead(batch, bags, list_tables(self.tables, as_then))
            ahead = ahead.joined(again, as_then, batch.table_offsets)
        batch.numbers, batch.offsets = ahead.bags
        return ahead.now(lists, batch.table_offsets)

    @locked
    def ask_ahead(self, ids: Mapping[int, Tensor], training: bool) -> None:
        """Asks for the rows of a later batch: ids [N] int64 by number of a table of `in_files`."""
        ask_ahead(self.tables, ids, training)

    def replace_tables(self, tables: Sequence[TableShard]) -> None:
        """Uses other tables with the settings of the present ones."""
        self.tables, self._lists = list(tables), None

    def _take_step(
        self,
        batch: Batch,
        bags: Bags | None,
        lists: TableLists,
        trained: TrainedTables,
        pools: int = _KNOWN,
    ) -> tuple[Tensor | None, TakenStep]:
        """Runs the training step of the trained tables, and finds the rows of all ids."""
        for t in self.in_files:
            self.tables[t].weights.check_process(lookup_of(self.tables))
        if self.deferred is not None:
            trained.shared.earlier = self.deferred.sizes
        collects = _EXPECTED if trained.expects_new else _IF_ABSENT
        find = partial(self._find, batch, bags, lists, pools, collects)
        found, step = take_step(trained, batch, find, self._uses)
        if self.deferred is not None:
            self.deferred.begin(batch.table_offsets, trained.tables)
            trained.shared.earlier = self.deferred.sizes
        scored = trained.living.numbers and lists.has_changes
        streams, learning = lists.streams, step.rows
        if lists.stepping is not None:
            streams = torch.add(streams, lists.stepping, alpha=trained.shared.counted.steps)
        if lists.is_frozen is not None:
            learning = lists.rows_to_update(learning, batch.table_offsets)
        if batch.uses is not None:
            learning = masked(learning, batch.uses.trains)
        noted = tokens_of(self._logs()) if scored else None
        step = TakenStep(step.rows, step.missing, step.new_index, learning, streams, noted)
        return found.out, step

    def _logs(self) -> list[ChangeLog | None]:
        return [table.change_log for table in self.tables]

    def __getstate__(self) -> dict[str, Any]:
        # Blocks are much larger than the rows in use. A copy does not hold them: it lists its own tables. And
        # it has no graphs.
        return {**self.__dict__, "_lists": None, "_forwards": None, "deferred": None}

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

    def _lists_since(self, forward: Forward) -> TableLists:
        """Returns the tables; RuntimeError if those of a forward have other rows now."""
        lists = self._current()
        if lists.generations != forward.lists.generations:
            raise RuntimeError(
                "lookup: expected the tables of the forward at its backward, got tables that were "
                "loaded or converted in between, moved, or given another optimizer. Run backward first."
            )
        return lists

    def backward(
        self, forward: Forward, grad: Tensor, weights: Tensor | None, wants_grad: bool
    ) -> Tensor | None:
        """Updates the rows of a forward, with the lock held, or keeps the update if updates are deferred.

        grad is of the output of the forward. Returns the gradient of the weights [N] if it is wanted.
        """
        if forward.is_done:
            raise RuntimeError(
                "lookup: expected one backward through a forward, got a second. The rows are "
                "updated already; run the forward again."
            )
        lists, deferred = forward.lists, self.deferred
        if lists.token is not TABLES.now:  # some table has changed other than by training
            lists = self._lists_since(forward)
        grad = grad.float().contiguous()
        optimizer, weights_grad = self.tables[0].optimizer, None
        # Deferred gradients may have a loss scale. Those of rows are clamped when it is taken off; those of
        # weights are not clamped. They outlive this call: micro-batches may share a buffer.
        if deferred is not None:
            grad = grad.clone()
        elif optimizer.gradient_clipping:
            grad = grad.clamp(-optimizer.max_gradient, optimizer.max_gradient)
        if weights is not None:
            if wants_grad:
                weights_grad = self._weights_grad(forward, grad, lists).to(weights.dtype)
            weights = as_float(weights)
        # Noted before the update: an interrupted backward is not repeated, since it may have updated rows.
        forward.is_done = True
        if forward.trained is not None:
            lock = self.tables[0].lock
            try:
                lock.is_changing = True
                if deferred is not None:
                    deferred.add(Update(forward, grad, weights))
                    return weights_grad
                self._write(lists, forward, grad, weights)
            except Exception as error:
                if self._writes_all():
                    raise
                raise_after_backward(error)
            finally:
                lock.is_changing = False
        forward.open_forward.close()
        return weights_grad

    def _writes_all(self) -> bool:
        """Returns True if no update of a backward is refused, as one that is not finite."""
        if self.deferred is not None:
            return True
        if self.tables[0].optimizer.own is not None:
            return False
        return all(table.config.on_nonfinite == "write" for table in self.tables)

    def _weights_grad(self, forward: Forward, grad: Tensor, lists: TableLists) -> Tensor:
        """Returns the gradient of the weights of a forward, [N] float32.

        Computed from the present rows: in a pipeline another batch may have updated them.
        """
        initial_ids = forward.ids if lists.shows_initial else None
        rows = self._places(lists, forward, forward.shown)
        return ops.weights_grad_prepared(
            grad, rows, initial_ids, forward.offsets, forward.bags.segments,
            lists.prepared.get(), self.is_mean,
        )  # fmt: skip

    def _places(self, lists: TableLists, forward: Forward, rows: Tensor) -> Tensor:
        """Returns where rows [N] of a forward are now; the same tensor if no table is in host memory."""
        if not lists.prepared.has_caches:
            return rows
        return lists.prepared.places(rows, self._bag_layout.offsets_of_tables(forward.begins))

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
        lists = self._current()
        if any(one.forward.lists.generations != lists.generations for one in deferred.updates):
            raise self._changed_before_step()
        self._write(lists, *deferred.joined(self._bag_layout, self.max_gradient))
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
        table_offsets = self._bag_layout.offsets_of_tables(update.forward.begins)
        columns = [table.columns for table in self.tables]
        return row_sums(update, table_offsets, columns, self.is_mean)

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

    def _write(
        self, lists: TableLists, forward: Forward, grad: Tensor, weights: Tensor | None
    ) -> None:
        """Sums the gradients of each distinct row of an update and applies the optimizer."""
        trained, bags = forward.trained, forward.bags
        assert trained is not None
        withheld = [*map(attrgetter("withheld_parts"), lists.row_numbers)]
        if any(withheld):
            tables = dict(compress(enumerate(self.tables), withheld))
            table_offsets = self._bag_layout.offsets_of_tables(forward.begins)
            count_late_grads(tables, forward.rows, table_offsets)
        if lists.trained is not None and lists.trained.shared is trained.shared:
            trained.shared.edits += 1
        else:  # tables were frozen in between, or are in another group
            for table in trained.tables.values():
                table.own = table.own._replace(edits=table.own.edits + 1)
        if self.tables[0].optimizer.own is not None:
            self._write_by_rule(Update(forward, grad, weights), lists)
            return
        rows = self._places(lists, forward, forward.rows)
        marks: tuple[Sequence[Tensor], Tensor | None] = (), None
        if lists.has_changes and rows is not forward.rows:  # rows are marked by their numbers
            note_changed(*self._changed(forward))
        elif lists.has_changes:
            marks = note_update(*self._changed(forward))
        # Where nothing is rounded the ids are not read.
        ids = forward.rows if forward.ids is None else forward.ids
        ops.update_prepared_(
            grad, ids, rows, forward.offsets, weights, bags.segments,
            forward.streams, self.is_mean, [self.learning_rate, *lists.hyper],
            forward.reduction.scales, forward.reduction.senders, *marks, lists.prepared.get(),
        )  # fmt: skip

    def _write_by_rule(self, update: Update, lists: TableLists) -> None:
        """`_write` by a rule in Python."""
        rule = self.tables[0].optimizer.own
        assert rule is not None
        written = update_by_rule(
            rule, self.tables, self._row_sums(update), update.forward.streams, self.learning_rate
        )
        if lists.has_changes:
            note_changed(*self._changed(update.forward))
        with commit(*self.tables):
            for write in written:
                write()

    def _changed(
        self, forward: Forward
    ) -> tuple[list[ChangeLog | None], list[IdMap], Tensor, Tensor]:
        """Returns the logs that have not recorded the rows of a forward, and what they record."""
        logs = unrecorded(self._logs(), forward.noted)
        id_maps = [table.id_map for table in self.tables] if any(logs) else []
        return logs, id_maps, forward.rows, self._bag_layout.offsets_of_tables(forward.begins)
