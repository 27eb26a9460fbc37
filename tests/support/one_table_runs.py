"""What the workers run for modules of one table: training beside an unsharded copy, and pipelines."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import EXTREME_IDS, FUSED_PARAMS, Case, Table, usual_plan
from sharded_training import Holder, check_rows, check_same
from torch import Tensor, nn
from torchrec import JaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn

DIM = 8
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
SHARDERS = (dyn.DynamicEmbeddingBagCollectionSharder, dyn.DynamicEmbeddingCollectionSharder)


@dataclass
class OneTable:
    """A module, its plan, and how it is called.

    Attributes:
        mode: "rows" for DynamicEmbedding, else that of DynamicEmbeddingBag.
        plan: sharding type.
        exact: whether the plan may not change a bit.
        weighted: whether ids come with weights, which are learnt if the module can.
        calls: forwards before each backward.
        empty: whether no rank has any id.
        dedup: whether each rank sends an id once.
        options: of the module.
    """

    mode: str
    plan: str
    world: int = 2
    local: int = 2
    exact: bool = True
    weighted: bool = False
    calls: int = 1
    empty: bool = False
    dedup: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, fused_params: dict[str, Any]) -> Any:
        """The unsharded module."""
        options = {**self.options, "name": "words", "fused_params": fused_params}
        if self.mode == "rows":
            return dyn.DynamicEmbedding(DIM, 1000, **options)
        tile = 3 if self.mode == "tile" else None
        return dyn.DynamicEmbeddingBag(
            DIM, 1000, self.mode, tile_length=tile, is_weighted=self.weighted, **options
        )

    def table(self) -> Table:
        """The table and its plan."""
        return Table("words", ["words"], usual_plan(self.plan, DIM, self.world, self.local), DIM)

    def learns_weights(self) -> bool:
        """Whether gradients reach the weights under any plan."""
        return self.weighted and (self.mode == "tile" or "weight_gradients" in self.options)


def sharded(module: nn.Module, plan: dict[str, Any], dedup: bool = False) -> Any:
    """A model under DistributedModelParallel; plans by the path of the collection."""
    return DistributedModelParallel(
        module,
        device=torch.device("cpu"),
        plan=ShardingPlan(plan),
        sharders=[SHARDERS[0](), SHARDERS[1](use_index_dedup=dedup)],
    )


@dataclass
class Given:
    """One rank's input of one call: ids in some form, and the same bag by bag.

    Attributes:
        source: what the module is given.
        ids: all of them.
        lengths: of the bags.
        weights: one per id.
    """

    source: Any
    ids: Tensor
    lengths: Tensor
    weights: Tensor

    @classmethod
    def draw(cls, form: str, seed: int) -> Given:
        """Draws ids: some that come back, the extreme ones, and new ones."""
        generator = torch.Generator().manual_seed(seed)
        pool = [*EXTREME_IDS, *range(100, 130), *range(1000 * seed, 1000 * seed + 20)]
        shapes = {"dense": (6, 4), "deep": (2, 2, 3), "empty_bags": (2, 0), "no_bags": (0, 4)}
        shapes["strided"] = (6, 1)
        if form in shapes:
            *bags, length = shapes[form]
            lengths = torch.full(bags, length).flatten()
        else:
            lengths = torch.randint(6, (7,), generator=generator)
        places = torch.randint(len(pool), (int(lengths.sum()),), generator=generator)
        ids = torch.tensor(pool)[places]
        weights = torch.rand(len(ids), generator=generator) + 0.1
        return cls(cls._formed(form, shapes, ids, lengths), ids, lengths, weights)

    @staticmethod
    def _formed(form: str, shapes: dict[str, Any], ids: Tensor, lengths: Tensor) -> Any:
        if form == "jagged":
            return JaggedTensor(ids, lengths=lengths)
        if form == "nested":
            offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
            return torch.nested.nested_tensor_from_jagged(ids, offsets)
        if form == "strided":  # a column of a matrix
            return torch.stack([ids, ids + 1], dim=1)[:, :1]
        return ids.view(shapes[form])

    def formed(self, weights: Tensor) -> Tensor:
        """Weights in the form of the ids."""
        if isinstance(self.source, JaggedTensor):
            return weights
        if self.source.is_nested:
            return torch.nested.nested_tensor_from_jagged(weights, self.source.offsets())
        return weights.view(self.source.shape)

    def outputs(self, of: OneTable) -> int:
        """Rows of the module's output."""
        return len(self.ids if of.mode == "rows" else self.lengths)


def _form(of: OneTable, rank: int, number: int) -> str:
    forms = ["dense", "jagged", "no_bags", "nested", "deep", "strided"]
    forms = ["empty_bags", "no_bags"] if of.empty else forms
    return forms[(rank + number) % len(forms)]


def _flat(output: Any) -> Tensor:
    if isinstance(output, JaggedTensor) or output.is_nested:
        return output.values()
    return output.reshape(-1, output.shape[-1])


def train_beside(of: OneTable) -> int:
    """Trains a sharded module beside an unsharded one on all ranks' ids; returns the rows on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # With several calls a step the order of updates would count, but for a linear rule.
    whole = of.make(SGD if of.calls > 1 else FUSED_PARAMS)
    plan = {"collection.collection": {"words": of.table().plan}}
    module = sharded(Holder(copy.deepcopy(whole)), plan, of.dedup).module.collection
    case = Case([of.table()], pooled=of.mode != "rows", exact=of.exact and of.calls == 1)
    for step in range(4):
        loss, expected_loss = torch.zeros(()), torch.zeros(())
        learnt = []
        for number in range(step * of.calls, (step + 1) * of.calls):
            inputs = [Given.draw(_form(of, r, number), 10 * number + r + 1) for r in range(world)]
            mine = inputs[rank]
            together = JaggedTensor(
                torch.cat([one.ids for one in inputs]),
                lengths=torch.cat([one.lengths for one in inputs]),
            )
            if of.weighted:
                weights = mine.weights.clone().requires_grad_(of.learns_weights())
                theirs = [one.weights.clone().requires_grad_() for one in inputs]
                learnt.append((weights, theirs[rank]))
                got = _flat(module(mine.source, mine.formed(weights)))
                expected = whole(together, torch.cat(theirs))
            else:
                got, expected = _flat(module(mine.source)), _flat(whole(together))
            parts = expected.split([one.outputs(of) for one in inputs])
            check_same(case, got, parts[rank], f"call {number}")
            loss, expected_loss = loss + got.sin().sum(), expected_loss + expected.sin().sum()
        loss.backward()
        (expected_loss / world).backward()
        for weights, theirs in learnt if of.learns_weights() else []:
            torch.testing.assert_close(weights.grad, theirs.grad * world, rtol=1e-4, atol=1e-5)
    check_rows(case, module.collection, whole.collection)
    return module.table.num_rows
