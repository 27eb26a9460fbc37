"""Moves tables of a running model to another plan, for DistributedModelParallel.reshard.

1. A second collection is created with the new plan.
2. Tables that move are copied into it; the shards of all other tables are put into it without a copy.
3. After steps 1 and 2 succeeded on all ranks, the first collection gets the attributes of the second. Before
   this step the first collection has not changed.

The first collection stays the same module with the same optimizer, so models and pipelines that hold them
continue.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from torchrec_dyn.checkpoint_format import SCORES, RowSource
from torchrec_dyn.distributed.local_shards import LocalShards
from torchrec_dyn.ranks import (
    OF_EVERY_SHARD,
    IdExchange,
    Piece,
    Table,
    gather_results,
    run_together,
)
from torchrec_dyn.state_dict import LiveRows, append_waiting, for_each_chunk
from torchrec_dyn.table import append, complete

# Attributes that the first collection keeps: hooks, training mode, objects that users hold, and attributes
# that trackers and pipelines have set.
_PLACES = {"_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}
_KEPT = (vars(nn.Module()).keys() - _PLACES) | {
    *("_shards", "_optim", "_output_names", "_check_batch"),
    *("post_lookup_tracker_fn", "post_odist_tracker_fn"),
    *("is_pipelined", "_free_features_storage_early"),
}


def reshard(
    sharder: Any,
    collection: Any,
    changed: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None,
    wrapped: Callable[[], None] | None = None,
    follow: Callable[[], None] | None = None,
) -> None:
    """Moves tables of a collection to the ranks of another plan: all of these tables, or none. Collective.

    The sharder has the arguments with which the collection was sharded. `changed` is the new plan of the
    tables that move; it may contain others. A device of None leaves the rows where they are. `wrapped` checks
    the plan for the feature processors around the collection; None: there are none. `follow`
    changes them with the collection.
    """
    shards: LocalShards = collection._shards
    call, group = f"{shards.where}.reshard", collection._env.process_group
    assert isinstance(group, dist.ProcessGroup)
    plans = gather_results(group, call, lambda: _described(collection, changed, wrapped))
    for rank, other in enumerate(plans):
        if other != plans[0]:
            raise ValueError(
                f"{call}: expected the same plan on every rank, got {plans[0]} on rank 0 and {other} on "
                f"rank {rank}. Plan with collective_plan, or pass the same plan on every rank."
            )
    if not changed:
        return
    plan = {**collection.module_sharding_plan, **changed}
    made = run_together(group, call, lambda: _shard_again(sharder, collection, plan, env, device))
    new: LocalShards = made._shards
    # What the collection keeps of its plan does not say in which memory the rows are.
    moved = [name for name in new.layouts if name in changed and not new.has_place_of(shards, name)]
    new.copy_settings(shards)
    for name in new.layouts.keys() - set(moved):
        new.reuse(shards, name)
    for name in moved:
        move_table(shards.table(name), new.table(name), call)
    _replace_attributes(collection, made, follow)


def _described(
    collection: Any, changed: Mapping[str, ParameterSharding], wrapped: Callable[[], None] | None
) -> list[Any]:
    """Returns a checked plan in plain values, so that ranks can compare their plans."""
    if wrapped is not None:
        wrapped()
    elif not collection._check_batch.needs_weights:
        raise ValueError(
            "expected a collection without feature processors, got one inside a feature-processed module, "
            "which depends on the plan. Reshard the feature-processed module."
        )
    described = []
    for table, sharding in sorted(changed.items()):
        shards = getattr(sharding.sharding_spec, "shards", None) or ()
        pieces = [(list(shard.shard_offsets), list(shard.shard_sizes)) for shard in shards]
        cache = sharding.cache_params and sharding.cache_params.load_factor
        place = (sharding.compute_kernel, cache)
        described.append((table, sharding.sharding_type, list(sharding.ranks or ()), pieces, place))
    return described


def _is_same(device: torch.device, present: torch.device) -> bool:
    """Returns True if a device may mean the present one: "cuda" may have been another GPU's name then."""
    return device.type == present.type and device.index in (None, present.index)


def _shard_again(
    sharder: Any,
    collection: Any,
    plan: dict[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None,
) -> Any:
    """Returns a collection without rows under another plan, with no forward of the present one open."""
    present = collection._shards.device
    if device is not None and not _is_same(device, present):
        raise ValueError(
            f"expected the device of the collection, {present}, got {device}. Tables move between "
            "ranks, not between devices: save the model, and load it where it is sharded on the other device."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first sharding has shown the same warnings
        made = sharder.shard(
            collection._shards.unsharded, plan, env, present, collection._module_fqn
        )
    before, after = collection._shards.optimizers, made._shards.optimizers
    changed = [f"{name}: {after[name]}" for name in plan if after[name] != before[name]]
    if changed:
        raise ValueError(
            f"expected the optimizers that the collection was sharded with, got {', '.join(changed)}. Use "
            "the same fused_params. To change a learning rate, set it in the optimizer's param_groups."
        )
    _check_at_rest(collection._shards)
    return made.train(collection.training)


def _check_at_rest(shards: LocalShards) -> None:
    """Raises ValueError if a batch was sent and not looked up, or a forward of any table is open."""
    # Tables that stay count as well: they get another group, and `step()` writes no update of this one.
    groups = shards.table_groups()

    def open_forwards() -> int:
        return max((len(shard.forwards) for group in groups for shard in group.tables), default=0)

    for _ in range(2):
        if len(shards.batches) or open_forwards():
            # Garbage may be the only holder of open forwards: a cycle of the user's, and only after it
            # TorchRec's own of a forward, which goes through autograd's graph.
            gc.collect()
    if len(shards.batches):
        raise ValueError(
            f"expected no batch on its way, got {len(shards.batches)} whose ids were sent under the present "
            "plan and not looked up yet. Run the train pipeline to the end of its iterator first."
        )
    deferred = [group.deferred for group in groups]
    waiting = max((len(one.updates) for one in deferred if one is not None), default=0)
    if waiting:
        raise ValueError(
            f"expected no updates that wait for the optimizer's step(), got those of {waiting} backward "
            "passes. Call step(), or zero_grad() to drop them."
        )
    if number := open_forwards():
        raise ValueError(
            f"expected no forward that waits for its backward, got {number}. Run backward, or delete the "
            "outputs of the forward."
        )


def _replace_attributes(collection: Any, made: Any, follow: Callable[[], None] | None) -> None:
    attributes = {name: value for name, value in vars(made).items() if name not in _KEPT}

    def replace() -> None:
        collection._optim.drive(made._shards.table_groups())
        vars(collection).update(attributes)
        if follow is not None:
            follow()

    collection._shards.replace_with(made._shards, replace)


def move_table(before: Table, after: Table, call: str) -> None:
    """Copies rows, state and counters of a table to the empty shards of another plan. Collective."""
    source, group, pieces = LiveRows(before, call), after.group, after.layout.pieces
    _copy_counters(before, after, source.clock, call)
    assert group is not None

    def arriving(names: Sequence[str], waiting: bool) -> Iterator[dict[str, list[Tensor]]]:
        """Yields the rows of this rank's shards by tensor, [K, C] for each shard."""
        for chunk in source.chunks(names, waiting=waiting):
            sent = IdExchange(
                call, partial(chunk.pop, "ids"), after.layout, group, torch.device("cpu")
            )
            rows = {
                name: sent.send([_in_piece(source, name, values, piece) for piece in pieces])
                for name, values in chunk.items()
            }
            yield {"ids": [sent.arrived] * len(after.shards), **rows}

    def append_rows(chunk: dict[str, list[Tensor]]) -> None:
        for number, shard in enumerate(after.shards):
            append(shard, {name: by_shard[number] for name, by_shard in chunk.items()})

    def add_waiting(chunk: dict[str, list[Tensor]]) -> None:
        numbers = {name: by_shard[0].flatten() for name, by_shard in chunk.items() if by_shard}
        append_waiting(after.shards, numbers)

    for_each_chunk(source, arriving(source.names, False), append_rows)
    if after.options.counts_waiting:
        for_each_chunk(source, arriving(SCORES, True), add_waiting)


def _in_piece(source: RowSource, name: str, values: Tensor, piece: Piece) -> Tensor:
    """Returns what a piece has of values of all columns, [M, C]."""
    own = source.in_columns(name, values, piece.span)
    return own if own.dim() == 2 else own.unsqueeze(1)


def _copy_counters(before: Table, after: Table, clock: Tensor, call: str) -> None:
    """Copies step, clock, counters and initializer of a table to the new shards. Collective."""

    def counters_here() -> tuple[int, dict[str, int], bool] | None:
        if not before.has_first_column:
            return None
        first = before.shards[0]
        is_unscored = first.life is not None and first.life.is_unscored
        return first.step, first.own.total_counters(), is_unscored

    gathered = gather_results(before.group, call, counters_here)
    steps, held, unscored = zip(*filter(None, gathered), strict=True)
    for shard in after.shards:
        shard.start_as(after.initializers.get(after.name, shard.initializer))
        complete(shard, max(steps), clock)
        for name in shard.counters:
            # Others are summed over the old shards that share the rows, on the first of the new ones.
            counts = [counters[name] for counters in held]
            if name in OF_EVERY_SHARD:
                shard.counters[name] = max(counts)
            elif after.part == 0:
                shard.counters[name] = sum(counts)
        if shard.life is not None:
            shard.life.is_unscored = any(unscored)
