"""TorchRec's ModelDeltaTracker records ids of sharded collections; modes with optimizer state are refused."""

import re

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import Case, Table, shard_by_hand
from sharded_training import collection_of, outputs_by_name, shard
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode

STATES = [TrackingMode.MOMENTUM_LAST, TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD]
TEXT = (
    "tables ['t']: expected a ModelDeltaTracker of ids (TrackingMode.ID_ONLY, or EMBEDDING for a sequence "
    "collection), got a mode with optimizer state. Export changed rows and their optimizer state with "
    "torchrec_dyn.checkpoint.export_delta."
)


def case_of(kind: str, pooled: bool) -> Case:
    pieces = [([0, 1] if kind == "row_wise" else [0], 0, 4)]
    return Case([Table("t", ["f"], shard_by_hand(kind, pieces), dim=4)], pooled=pooled)


def step(case: Case, model: torch.nn.Module, ids: list[int]) -> None:
    features = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))
    outputs_by_name(case, model(features))["f"].sum().backward()


def check_refuse_states(pooled: bool) -> None:
    case = case_of("row_wise", pooled)
    model = shard(case, collection_of(case))
    for mode in STATES:
        with pytest.raises(ValueError, match=f"^{re.escape(TEXT)}$"):
            ModelDeltaTrackerTrec(model, mode=mode)
    tracker = ModelDeltaTrackerTrec(model)
    for ids in ([1, 2, 2], [2, 3]):
        tracker.step()
        step(case, model, [id + 100 * dist.get_rank() for id in ids])
    (tracked,) = tracker.get_unique_ids().values()
    here = model.module.collection.table("t").ids()
    assert torch.equal(tracked.sort().values, here.sort().values)


@pytest.mark.parametrize("pooled", [True, False])
def test_modes_with_optimizer_state_are_refused(pooled: bool) -> None:
    workers.run(check_refuse_states, pooled, world_size=2)


def check_track_rows() -> None:
    """Ids are on rank 0 only: TorchRec's mode divides by the number of ids that arrived."""
    case = case_of("table_wise", pooled=False)
    model = shard(case, collection_of(case))
    tracker = ModelDeltaTrackerTrec(model, mode=TrackingMode.EMBEDDING)
    rank = dist.get_rank()
    tracker.step()
    step(case, model, [5, 7 + rank])
    first = model.module.collection.table("t").lookup(torch.tensor([5, 7, 8]))[0]
    assert not tracker.get_unique() if rank else len(tracker.get_unique()) == 1
    tracker.step()
    step(case, model, [5])
    rows = tracker.get_unique()
    if rank == 0:
        (found,) = rows.values()
        assert found.ids.tolist() == [5]
        assert torch.equal(found.states, first[:1])  # the row as the second step has found it
    else:
        assert not rows


def test_rows_are_tracked_though_a_rank_has_no_ids() -> None:
    workers.run(check_track_rows, world_size=2)
