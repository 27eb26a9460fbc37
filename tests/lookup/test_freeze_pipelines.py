"""Tables that freeze and go on between two batches of a pipeline, as in a plain loop."""

from functools import cache
from typing import Any

import pytest
import workers
from pipeline_model import Run, batches, sharded_model
from pipeline_runs import make_pipeline, no_fallback, shims_for, states_of, tables_of
from test_pipelines import check_same_states

import torchrec_dyn as dyn

LIVES = [
    {"eviction": dyn.LeastRecentlyUsed()},
    {"admission": dyn.AdmitAfter(2), "eviction": (dyn.ExpireAfter(steps=2), dyn.LeastFrequentlyUsed())},
]  # fmt: skip
RUN = Run(
    ("table_wise", "row_wise", "column_wise"), ("row_wise", "table_wise", "column_wise"),
    rows=110, lives=LIVES, drift=40, steps=8,
)  # fmt: skip
# Before which batch which tables are frozen or go on.
SCHEDULE: dict[int, list[tuple[str, str, bool]]] = {
    0: [("sequences", "sequences_0", True)],
    2: [("pooled", "pooled_0", True), ("pooled", "pooled_1", True)],
    4: [("sequences", "sequences_0", False), ("pooled", "pooled_2", True)],
    6: [("pooled", "pooled_0", False), ("pooled", "pooled_2", False)],
}
STEPS = {"pooled_0": 4, "pooled_1": 2, "pooled_2": 6, "sequences_0": 4, "sequences_1": 8}


def train(name: str) -> dict[str, Any]:
    """Trains through a pipeline, or with "base" in a plain loop."""
    with shims_for(name), no_fallback():
        model = sharded_model(RUN)
        pipeline = make_pipeline(RUN, name, model)
        left, losses = iter(batches(RUN)), []
        for step in range(RUN.steps):
            for collection, table, is_frozen in SCHEDULE.get(step, []):
                handle = getattr(model.module, collection).table(table)
                handle.freeze() if is_frozen else handle.unfreeze()
            losses.append(float(pipeline.progress(left)[0]))
    tables = tables_of(RUN, model)
    return {
        "losses": losses,
        "states": states_of(RUN, model),
        "stats": {key: table.stats() for key, table in tables.items()},
    }


@cache
def trained(name: str) -> Any:
    return workers.run(train, name, world_size=2)


@pytest.mark.parametrize("name", ["sparse_dist", "prefetch"])
def test_a_pipeline_freezes_as_the_plain_loop(name: str) -> None:
    for got, expected in zip(trained(name), trained("base"), strict=True):
        assert got["losses"] == expected["losses"]
        check_same_states(got["states"], expected["states"])
        for key, counts in got["stats"].items():
            assert counts["step"] == STEPS.get(key.split("/")[0], RUN.steps)
            assert counts["refused"] == expected["stats"][key]["refused"]
            assert counts["ids_seen"] == expected["stats"][key]["ids_seen"] > 0
