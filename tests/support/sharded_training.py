"""Trains a sharded collection beside the unsharded collection on the same global batches.

`check_trains_as_unsharded(case)` runs in the workers: it asserts that the outputs of every rank, and at the
end its rows, equal those of the unsharded collection, trained on the global batch with gradients divided by
the number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from sharded_cases import EXTREME_IDS, Case
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_dyn as dyn
from torchrec_dyn.table.shard import TableShard


def configs_of(case: Case) -> list[Any]:
    """Returns TorchRec's configs of the tables."""
    configs = []
    for table in case.tables:
        options: dict[str, Any] = {
            "name": table.name,
            "embedding_dim": table.dim,
            "num_embeddings": table.rows,
            "feature_names": list(table.features),
            "data_type": DataType[table.data_type],
        }
        if case.pooled:
            pooling = PoolingType.SUM if table.pooling == "MAX" else PoolingType[table.pooling]
            configs.append(EmbeddingBagConfig(pooling=pooling, **options))
        else:
            configs.append(EmbeddingConfig(**options))
    return configs


def collection_of(case: Case, is_static: bool = False, **options: Any) -> Any:
    """Returns the dynamic collection of a case, or TorchRec's static one, unsharded."""
    weighted = {"is_weighted": case.weighted} if case.pooled else {}
    if is_static:
        kind: Any = EmbeddingBagCollection if case.pooled else EmbeddingCollection
        return kind(configs_of(case), **weighted, **options)
    chosen = {table.name: table.config for table in case.tables if table.config is not None}
    for table in case.tables:
        if table.pooling == "MAX":
            config = chosen.get(table.name, dyn.DynamicTableConfig())
            chosen[table.name] = replace(config, pooling="max")
    if chosen:
        options["dynamic"] = chosen
    kind = dyn.DynamicEmbeddingBagCollection if case.pooled else dyn.DynamicEmbeddingCollection
    return kind(configs_of(case), **weighted, **options)


class Holder(nn.Module):
    """A model of one collection."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.collection(features)


def sharder_of(case: Case) -> Any:
    registry = None
    if case.qcomm is not None:
        from torchrec.distributed.fbgemm_qcomm_codec import (
            CommType,
            QCommsConfig,
            get_qcomm_codecs_registry,
        )

        kind = CommType[case.qcomm]
        registry = get_qcomm_codecs_registry(
            QCommsConfig(forward_precision=kind, backward_precision=kind)
        )
    options: dict[str, Any] = {
        "fused_params": dict(case.fused_params),
        "qcomm_codecs_registry": registry,
    }
    if case.pooled:
        return dyn.DynamicEmbeddingBagCollectionSharder(**options)
    return dyn.DynamicEmbeddingCollectionSharder(use_index_dedup=case.dedup, **options)


def shard(case: Case, collection: nn.Module, **options: Any) -> Any:
    plan = ShardingPlan({"collection": {table.name: table.plan for table in case.tables}})
    sharders = [sharder_of(case)]
    return DistributedModelParallel(Holder(collection), plan=plan, sharders=sharders, **options)


def new(case: Case, is_sharded: bool) -> Any:
    """Returns a model of the collection of a case."""
    if is_sharded:
        return shard(case, collection_of(case))
    return Holder(collection_of(case, fused_params=case.fused_params))


def optimizer_of(model: Any) -> Any:
    """Returns the optimizer of the rows; its names have the same prefix as the names of the model."""
    if hasattr(model, "fused_optimizer"):
        return model.fused_optimizer
    return CombinedOptimizer([("collection", model.collection.fused_optimizer)])


def tables_of(collection: Any) -> list[TableShard]:
    """Returns the tables of a collection by name; of a sharded one, the shards of this rank."""
    if not hasattr(collection, "_shards"):
        return list(collection.local_tables().values())
    shards = collection._shards.tables()
    return [one for table in sorted(shards, key=lambda of: of.name) for one in table.shards]


def dense_sgd(model: nn.Module, rate: float) -> KeyedOptimizerWrapper:
    """Returns SGD for all parameters outside dynamic tables."""
    parameters = in_backward_optimizer_filter(model.named_parameters())
    dense = {name: one for name, one in parameters if not one.is_meta}
    return KeyedOptimizerWrapper(dense, lambda some: torch.optim.SGD(some, lr=rate))


def with_dense_sgd(model: Any, rate: float) -> CombinedOptimizer:
    """Returns the optimizer of the rows together with `dense_sgd`."""
    return CombinedOptimizer([model.fused_optimizer, dense_sgd(model, rate)])


def ids_of(generator: torch.Generator, count: int, known: int, step: int) -> torch.Tensor:
    """Returns ids that repeat, ids that are new in this step, and extreme ids."""
    pool = torch.tensor([*EXTREME_IDS, *range(100, 100 + known)])
    fresh = torch.arange(10_000 * (step + 1), 10_000 * (step + 1) + known)
    pool = torch.cat([pool, fresh])
    return pool[torch.randint(pool.numel(), (count,), generator=generator)]


def batches(case: Case, step: int) -> tuple[list[KeyedJaggedTensor], KeyedJaggedTensor]:
    """Returns the batch of each rank, and all of them as one global batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    world = dist.get_world_size()
    features = case.features()
    sizes = list(case.batch_sizes or [5] * world)
    parts: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]] = []
    for size in sizes:
        of_rank = []
        for number, _ in enumerate(features):
            bags = max(1, size - number) if case.variable else size
            lengths = torch.randint(case.longest_bag + 1, (bags,), generator=generator)
            ids = ids_of(generator, int(lengths.sum()), case.known_ids, step)
            weights = torch.rand(ids.numel(), generator=generator)
            inverse = torch.arange(size) % bags
            of_rank.append((lengths, ids, weights, inverse))
        parts.append(of_rank)
    per_rank = [_kjt(case, features, of_rank) for of_rank in parts]
    together = []
    for number, _ in enumerate(features):
        of_feature = [of_rank[number] for of_rank in parts]
        firsts = [sum(len(p[0]) for p in of_feature[:rank]) for rank in range(world)]
        inverse = [p[3] + first for p, first in zip(of_feature, firsts, strict=True)]
        joined = [torch.cat([p[i] for p in of_feature]) for i in range(3)]
        together.append((joined[0], joined[1], joined[2], torch.cat(inverse)))
    return per_rank, _kjt(case, features, together)


def _kjt(case: Case, features: list[str], parts: list[tuple[torch.Tensor, ...]]) -> Any:
    options: dict[str, Any] = {}
    if case.variable:
        options["stride_per_key_per_rank"] = [[len(part[0])] for part in parts]
        options["inverse_indices"] = (features, torch.stack([part[3] for part in parts]))
    elif parts:
        options["stride"] = len(parts[0][0])
    return KeyedJaggedTensor(
        keys=features,
        lengths=torch.cat([part[0] for part in parts]),
        values=torch.cat([part[1] for part in parts]),
        weights=torch.cat([part[2] for part in parts]) if case.weighted else None,
        **options,
    )


def parts_of_rank(case: Case, whole: Any, sizes: list[int], rank: int) -> dict[str, torch.Tensor]:
    """Returns a rank's part of the outputs of a global batch, by output name."""
    first = sum(sizes[:rank])
    if case.pooled:
        return {name: value[first : first + sizes[rank]] for name, value in whole.to_dict().items()}
    parts = {}
    for name, jagged in whole.items():
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), jagged.lengths().cumsum(0)])
        parts[name] = jagged.values()[offsets[first] : offsets[first + sizes[rank]]]
    return parts


def expanded(outputs: Any, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """Returns sequences per example, as a sharded collection returns them, from sequences per bag."""
    keys, inverse = features.inverse_indices()
    result = {}
    for name, jagged in outputs.items():
        bags = inverse[keys.index(name if name in keys else name.rpartition("@")[0])]
        ends = jagged.lengths().cumsum(0)
        picked = [
            torch.arange(int(ends[bag] - jagged.lengths()[bag]), int(ends[bag])) for bag in bags
        ]
        result[name] = JaggedTensor(
            values=jagged.values()[torch.cat([bags[:0], *picked])], lengths=jagged.lengths()[bags]
        )
    return result


def outputs_by_name(case: Case, outputs: Any) -> dict[str, torch.Tensor]:
    if case.pooled:
        return dict(outputs.to_dict())
    return {name: jagged.values() for name, jagged in outputs.items()}


def check_same(case: Case, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Asserts equality: bit-equality if the case is exact, else up to its tolerance."""
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    if case.exact:
        assert torch.equal(got, expected), f"{what}: differ by {(got - expected).abs().max()}"
    else:
        torch.testing.assert_close(
            got, expected, rtol=case.tolerance, atol=case.tolerance, msg=lambda m: f"{what}: {m}"
        )


def check_trains_as_unsharded(
    case: Case,
    batches_of: Callable[[Case, int], Any] = batches,
    moves: Mapping[int, Mapping[str, ParameterSharding]] | None = None,
) -> int:
    """Trains both collections and asserts that they stay equal; returns the rows on this rank.

    `batches_of` returns the batches of a step, as `batches` does; `moves` are new plans of tables before a
    step.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    unsharded = collection_of(case, fused_params=case.fused_params)
    sharded = shard(case, copy.deepcopy(unsharded))
    sizes = list(case.batch_sizes or [5] * world)
    for step in range(case.steps):
        if moves is not None and step in moves:
            collection = sharded.module.collection
            sharded.sharders[0].reshard(collection, moves[step], sharded._env, sharded.device)
        per_rank, together = batches_of(case, step)
        mine, whole = sharded(per_rank[rank]), unsharded(together)
        if together.variable_stride_per_key() and not case.pooled:
            whole = expanded(whole, together)
        got, expected = outputs_by_name(case, mine), parts_of_rank(case, whole, sizes, rank)
        assert set(got) == set(expected)
        for name, value in expected.items():
            check_same(case, got[name], value, f"step {step}, output {name}")
            if not case.pooled:
                of_ranks = whole[name].lengths().split(sizes)
                assert torch.equal(mine[name].lengths(), of_ranks[rank]), f"lengths of {name}"
        if not case.backward:
            continue
        per_rank[rank].values().fill_(10**12)  # the caller may overwrite a batch after its forward
        # The gradient depends on the output, so that an error of one step grows in the next.
        torch.autograd.backward(list(got.values()), [_grad(v.detach(), n) for n, v in got.items()])
        outputs = outputs_by_name(case, whole)
        grads = [_grad(v.detach(), n).div_(world) for n, v in outputs.items()]
        torch.autograd.backward(list(outputs.values()), grads)
    check_rows(case, sharded.module.collection, unsharded)
    return sum(sharded.module.collection.table(t.name).num_rows for t in case.tables)


def _grad(output: torch.Tensor, name: str) -> torch.Tensor:
    number = sum(map(ord, name)) % 7 + 1
    ramp = torch.linspace(-1, 1, output.shape[1]).expand_as(output)
    return ramp * number * 0.1 + output * 0.5


def check_rows(case: Case, sharded: Any, unsharded: Any) -> None:
    """Asserts that the shards of all ranks together hold the unsharded rows, each column once."""
    for table in case.tables:
        mine, whole = sharded.table(table.name), unsharded.table(table.name)
        ids = mine.ids()
        expected, found = whole.lookup(ids)
        assert bool(found.all()), f"{table.name}: ids that the unsharded table never saw"
        columns = torch.zeros(0, dtype=torch.long)
        if mine.columns:
            columns = torch.cat([torch.arange(first, first + n) for first, n in mine.columns])
            check_same(case, mine.lookup(ids)[0], expected[:, columns], f"rows of {table.name}")
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, (ids, columns))
        cells = sum(len(i) * len(c) for i, c in held)
        assert cells == whole.num_rows * table.dim, f"{table.name}: {cells} numbers in all shards"
