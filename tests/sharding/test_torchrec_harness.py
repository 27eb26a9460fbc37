"""TorchRec's own sharding test, pointed at our sharders and planned by the stock planner."""

import dataclasses

import pytest
import workers
from harness_model import Trial, run_harness, see_a_difference

TRIALS = {
    "table_wise": (Trial("table_wise"), 2),
    "row_wise": (Trial("row_wise"), 2),
    "column_wise": (Trial("column_wise"), 2),
    "table_row_wise": (Trial("table_row_wise", local_size=2), 4),
    "table_column_wise": (Trial("table_column_wise", local_size=2), 4),
    "grid_shard": (Trial("grid_shard", local_size=2), 4),
    "row_wise_alone": (Trial("row_wise"), 1),
    "row_wise_mean": (Trial("row_wise", mean=True), 2),
    "table_row_wise_mean": (Trial("table_row_wise", mean=True, local_size=2), 4),
    "grid_shard_mean": (Trial("grid_shard", mean=True, local_size=2), 4),
    "table_wise_unweighted": (Trial("table_wise", weighted=False), 2),
    "table_wise_batch_per_rank": (Trial("table_wise", options={"variable_batch_size": True}), 2),
    "column_wise_batch_per_rank": (Trial("column_wise", options={"variable_batch_size": True}), 2),
    "row_wise_batch_per_rank": (Trial("row_wise", options={"variable_batch_size": True}), 2),
    "grid_shard_batch_per_rank": (
        Trial("grid_shard", local_size=2, options={"variable_batch_size": True}),
        4,
    ),
    "table_wise_empty_batch": (Trial("table_wise", options={"allow_zero_batch_size": True}), 2),
    "row_wise_offsets": (Trial("row_wise", options={"use_offsets": True}), 2),
    "table_wise_half_comms": (Trial("table_wise", qcomm="FP16"), 2),
    "row_wise_half_comms": (Trial("row_wise", qcomm="FP16"), 2),
    "column_wise_half_comms": (Trial("column_wise", qcomm="BF16"), 2),
    "grid_shard_half_comms": (Trial("grid_shard", qcomm="FP16", local_size=2), 4),
}


@pytest.mark.parametrize("name", TRIALS)
def test_torchrec_finds_no_difference(name: str) -> None:
    trial, world = TRIALS[name]
    workers.run(run_harness, trial, world_size=world, local_size=trial.local_size or world)


@pytest.mark.parametrize("name", ["table_wise", "row_wise_mean", "grid_shard"])
def test_harness_sees_a_wrong_learning_rate(name: str) -> None:
    trial, world = TRIALS[name]
    wrong = dataclasses.replace(trial, learning_rate=5.0)
    workers.run(see_a_difference, wrong, world_size=world, local_size=trial.local_size or world)
