"""Threads that read the shards of a rank while all ranks train; state dicts beside training on one rank."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import shard_by_hand
from thread_cases import COLUMNS, FRESH, HOT, Training, beside, collection
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn

STEPS = 40
HALF = COLUMNS // 2
# A piece of each plan: its ranks, first column and width.
PIECES = {
    "row_wise": [([0, 1], 0, COLUMNS)],
    # Two shards on one rank: their columns must be read at one moment.
    "column_wise": [([0], 0, HALF), ([0], HALF, HALF)],
}


def sharded(plan: str, limit: int, **options: object) -> DistributedModelParallel:
    return DistributedModelParallel(
        nn.ModuleDict({"ebc": collection(limit, **options)}),
        plan=ShardingPlan({"ebc": {"t": shard_by_hand(plan, PIECES[plan], limit)}}),
        sharders=[dyn.DynamicEmbeddingBagCollectionSharder()],
    )


def read_beside_training(plan: str) -> int:
    """Returns the number of rows on this rank."""
    model = sharded(plan, 100_000)
    ebc = model.module["ebc"]
    handle, training = ebc.table("t"), Training(lambda features: ebc(features).values())
    training.step()

    def lookup() -> None:
        ids = handle.ids()
        rows, found = handle.lookup(ids)
        assert bool(found.all()), f"{int((~found).sum())} of {len(ids)} ids are absent"
        assert torch.equal(rows, rows[:, :1].expand_as(rows)), "columns of two moments"
        cold = rows[ids != HOT]
        assert bool(((cold == 0) | (cold == -1)).all()), "a row from no step"

    def stats() -> None:
        got, logged = handle.stats(), {}
        dyn.log_stats(model, logged, 0)
        if got["rows"]:
            assert got["rows"] == got["inserted"] <= 1 + got["step"] * FRESH
            assert logged["ebc/t/rows"] == logged["ebc/t/inserted"] >= got["rows"]

    with beside(lambda: (lookup(), stats())):
        while training.done < STEPS:  # the same number on every rank
            training.step()
    return handle.num_rows


@pytest.mark.parametrize("plan", ["row_wise", "column_wise"])
def test_a_rank_reads_its_shards_while_all_ranks_train(plan: str) -> None:
    rows = workers.run(read_beside_training, plan, world_size=2)
    assert sum(rows) == 1 + STEPS * FRESH and (min(rows) > 0) == (plan == "row_wise")


def save_beside_training() -> int:
    """Returns the number of state dicts that were copied before the next step."""
    options = {"limit": 20 * FRESH, "eviction": dyn.LeastRecentlyUsed()}
    model = sharded("column_wise", **options)
    ebc, copied = model.module["ebc"], []
    training = Training(lambda features: ebc(features).values())
    training.step()

    def save() -> None:
        state = model.state_dict()
        try:
            state = copy.deepcopy(state)
        except RuntimeError as error:
            assert "expected the table as it was when its state dict was made" in str(error)
            return
        # A load verifies the content sums, which were made by `state_dict`.
        other = sharded("column_wise", **options)
        other.load_state_dict(state)
        handle = other.module["ebc"].table("t")
        ids = handle.ids()
        assert handle.count(ids).max() == handle.last_seen(ids).max() == handle.stats()["step"]
        rows, _ = handle.lookup(ids)
        assert torch.equal(rows, rows[:, :1].expand_as(rows)), "columns of two moments"
        copied.append(1)

    with beside(save) as all_well:
        end = time.monotonic() + 50
        while (training.done < STEPS or not copied) and time.monotonic() < end and all_well():
            training.step()
            time.sleep(0.01 if training.done % 20 == 0 else 0)
    assert dist.get_world_size() == 1
    return len(copied)


def test_a_state_dict_beside_training_is_of_one_moment_or_an_error() -> None:
    (copied,) = workers.run(save_beside_training, world_size=1)
    assert copied
