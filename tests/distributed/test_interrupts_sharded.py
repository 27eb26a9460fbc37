"""After an exception at any place of a step of a sharded model, the next step works and nothing is lost."""

import pytest
import torch
import workers
from interrupt_cases import LIVES, Training, check_steps
from sharded_cases import usual_plan
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan

import torchrec_dyn as dyn


class ShardedTraining(Training):
    """The same training under DistributedModelParallel on one rank."""

    def __init__(self, options, kind):
        super().__init__(options)
        self.kind = kind

    def empty(self):
        collection = super().empty()
        plans = {
            config.name: usual_plan(self.kind, 4, 1, 1, rows=config.num_embeddings)
            for config in collection.embedding_bag_configs()
        }
        return DistributedModelParallel(
            collection,
            env=ShardingEnv.from_process_group(torch.distributed.group.WORLD),
            sharders=[dyn.DynamicEmbeddingBagCollectionSharder()],
            plan=ShardingPlan({"": EmbeddingModuleShardingPlan(plans)}),
        )


def run_steps(life, kind, steps, every):
    return check_steps(ShardedTraining(LIVES[life], kind), steps, every)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("every", [499, pytest.param(3, marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    ("life", "kind", "steps"),
    [("plain", "table_wise", 0), ("all", "column_wise", 7), ("all", "row_wise", 3)],
)
def test_a_step(life, kind, steps, every):
    ((runs, seen),) = workers.run(run_steps, life, kind, steps, every, world_size=1, timeout=900)
    assert runs > 2 and 0 in seen


def freeze_shards_of_different_steps():
    model = ShardedTraining(LIVES["all"], "column_wise").after(1)
    table = model.module.table("t0")
    table.shards[1].step += 1  # of the same rank
    with pytest.raises(ValueError, match=r"same training step, got {0: \[1, 2\]} by rank"):
        table.freeze()
    assert not table.is_frozen and not any(shard.is_frozen for shard in table.shards)


def test_shards_of_different_steps_are_not_frozen():
    workers.run(freeze_shards_of_different_steps, world_size=1)
