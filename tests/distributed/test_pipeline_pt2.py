"""TorchRec's TrainPipelinePT2, which compiles the model, trains as a plain loop does."""

from __future__ import annotations

from typing import Any

import torch
import workers
from pipeline_model import Run, batches, sharded_model
from pipeline_runs import check_same_states, drain, make_pipeline, optimizer_of, states_of
from torchrec.distributed.train_pipeline.train_pipelines import (
    TorchCompileConfig,
    TrainPipelinePT2,
)

RUN = Run(("table_wise", "row_wise"), ("column_wise",), steps=5)
# Flags of the compiler that the pipeline sets for the whole process.
FLAGS = {
    "capture_scalar_outputs": False,
    "capture_dynamic_output_shape_ops": False,
    "force_unspec_int_unbacked_size_like_on_torchrec_kjt": False,
    "skip_torchrec": True,
}


def train(compiles: bool) -> tuple[list[float], Any, int]:
    """Returns losses, tables, and the number of graphs that were compiled: parts of the dense part."""
    model = sharded_model(RUN)
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    with torch._dynamo.config.patch(FLAGS):
        pipeline = make_pipeline(RUN, "base", model)
        if compiles:
            config = TorchCompileConfig(backend="eager", compile_on_iter=2)
            optimizer = optimizer_of(RUN, model)
            pipeline = TrainPipelinePT2(model, optimizer, torch.device("cpu"), config)
        outputs = drain(pipeline, batches(RUN))
    torch._dynamo.reset()
    losses = [float(loss) for loss, _ in outputs]
    return losses, states_of(model), counts["unique_graphs"] - before


def test_trains_as_a_plain_loop() -> None:
    got, expected = (workers.run(train, compiles, world_size=2) for compiles in (True, False))
    for (losses, states, graphs), (plain, of_plain, none) in zip(got, expected, strict=True):
        assert losses == plain and len(losses) == RUN.steps
        assert graphs > none == 0
        check_same_states(states, of_plain)
