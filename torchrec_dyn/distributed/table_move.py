"""Copies one table from the shards of one plan into the empty shards of another, as a checkpoint would."""

from __future__ import annotations

from torchrec_dyn.distributed.chunk_exchange import exchange_chunks
from torchrec_dyn.ranks import OF_EVERY_SHARD, Table, gather_results
from torchrec_dyn.state_dict import (
    TableLoad,
    TableSource,
    saved_tensors,
    verify_and_commit,
)


def move_table(before: Table, after: Table, call: str) -> None:
    """Copies rows, optimizer state and counters of a table into the shards of another plan. Collective.

    `before` has the old shards of this rank, `after` the new shards, without rows. The content sums of the
    copy are compared with the sums of the old shards, which do not change.

    Raises:
        ValueError, RuntimeError: on every rank, if some rank fails.
    """
    group = before.group
    assert group is not None
    ((rows, state),) = saved_tensors([before], call, TableSource)
    load = TableLoad(after, has_state=True)
    exchange_chunks(before, {**rows, **state}, load, call)
    verify_and_commit(group, call, lambda: [load])
    _copy_counters(before, after, call)


def _copy_counters(before: Table, after: Table, call: str) -> None:
    """Copies the counters of the table to the new shards. Collective.

    Counters of `OF_EVERY_SHARD` are copied to every shard. Other counters are summed over the old shards that
    share the rows, and the sums are put on the first of the new ranks that share the rows.
    """

    def counters_here() -> tuple[dict[str, int], bool] | None:
        if not before.has_first_column:
            return None
        first = before.shards[0]
        return first.own.total_counters(), first.life is not None and first.life.is_unscored

    gathered = gather_results(before.group, call, counters_here)
    held = [counted for counted in gathered if counted is not None]
    for shard in after.shards:
        for name in shard.counters:
            counts = [counters[name] for counters, _ in held]
            if name in OF_EVERY_SHARD:
                shard.counters[name] = max(counts)
            elif after.part == 0:
                shard.counters[name] = sum(counts)
        if shard.life is not None:
            shard.life.is_unscored = any(is_unscored for _, is_unscored in held)
