"""Training loops of torch and TorchRec beside TorchRec's usual pipelines train as a plain loop does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cuda_stream_shims import cuda_stream_shims
from pipeline_model import ClickModel, Run, batches, sharded_model
from pipeline_runs import State, check_same_states, drain, make_pipeline, optimizer_of, states_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchrec.distributed.train_pipeline import StagedTrainPipeline
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil
from torchrec.fx import symbolic_trace

KINDS = ("table_wise", "row_wise", "column_wise")
RUN = Run(KINDS, KINDS, steps=4)
CPU = torch.device("cpu")
Trained = tuple[list[float], State]


def loop(model: Any, optimizer: Any, forward: Any, every: int = 1) -> list[float]:
    """Trains, with an optimizer step after `every` batches; returns the losses."""
    losses = []
    for step, batch in enumerate(batches(RUN)):
        if step % every == 0:
            optimizer.zero_grad()
        loss, _ = forward(batch)
        loss.backward()
        if (step + 1) % every == 0:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def plainly(every: int = 1) -> Trained:
    model = sharded_model(RUN)
    return loop(model, optimizer_of(RUN, model), model, every), states_of(model)


def accumulated(pipeline: str) -> Trained:
    model = sharded_model(RUN)
    inner = make_pipeline(RUN, pipeline, model)
    config = GradientAccumulationConfig(num_steps=2)
    wrapped = GradientAccumulationWrapper(inner, inner._optimizer, model, config)
    outputs = drain(wrapped, batches(RUN))
    return [float(loss) for loss, _ in outputs], states_of(model)


def fully_sharded() -> Trained:
    """Trains with the dense part under fully_shard instead of DistributedDataParallel."""
    model = sharded_model(RUN, init_data_parallel=False)
    head = fully_shard(model.module.head, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    return loop(model, optimizer, model), states_of(model)


def deferred() -> Trained:
    """Trains in a pipeline that was made before the dense part was given to DistributedDataParallel."""
    model = sharded_model(RUN, init_data_parallel=False, init_parameters=False)
    pipeline = make_pipeline(RUN, "sparse_dist", model)
    model.init_data_parallel()
    outputs = drain(pipeline, batches(RUN))
    return [float(loss) for loss, _ in outputs], states_of(model)


class Stream(torch.cpu.Stream):
    """TorchRec reads the device of a stream."""

    device = CPU


def staged() -> Trained:
    model, stream = sharded_model(RUN), Stream()
    optimizer, losses, source = optimizer_of(RUN, model), [], iter(batches(RUN))
    with cuda_stream_shims():
        sent = SparseDataDistUtil(model, stream)
        copy = PipelineStage("copy", lambda batch: batch.to(CPU), stream)
        send = PipelineStage(
            "send", sent.start_sparse_data_dist, stream, fill_callback=sent.wait_sdd_fill_callback
        )
        pipeline: Any = StagedTrainPipeline([copy, send], compute_stream=stream)
        while (batch := pipeline.progress(source)) is not None:
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert len(sent._pipelined_modules) == 2
    return losses, states_of(model)


@pytest.mark.parametrize("train", [staged, deferred])
def test_trains_as_a_plain_loop_bit_for_bit(train: Any) -> None:
    for got, expected in zip(
        workers.run(train, world_size=2), workers.run(plainly, world_size=2), strict=True
    ):
        assert got[0] == expected[0] and len(got[0]) == RUN.steps
        check_same_states(got[1], expected[1])


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    "train, arguments, every",
    [(accumulated, ("base",), 2), (accumulated, ("sparse_dist",), 2), (fully_sharded, (), 1)],
)
def test_trains_as_a_plain_loop(train: Any, arguments: tuple[str, ...], every: int) -> None:
    # Gradients of the dense part are summed in another order.
    got = workers.run(train, *arguments, world_size=2)
    expected = workers.run(plainly, every, world_size=2)
    other = workers.run(plainly, 3 - every, world_size=2)
    for one, another, different in zip(got, expected, other, strict=True):
        assert one[0] == pytest.approx(another[0], rel=1e-6)
        assert one[0] != pytest.approx(different[0], rel=1e-6)
        for table, state in another[1].items():
            assert one[1][table]["ids"].equal(state["ids"])
            torch.testing.assert_close(one[1][table]["weight"], state["weight"])


LEAVES = ["Head", "DynamicEmbeddingBagCollection", "DynamicEmbeddingCollection"]


def check_traced(sharded: bool) -> None:
    def model_of() -> Any:
        return sharded_model(RUN).module if sharded else ClickModel(RUN, dynamic=True)

    model, twin = model_of(), model_of()
    graph = symbolic_trace(model, leaf_modules=[*LEAVES, *(f"Sharded{name}" for name in LEAVES)])
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == [
        "pooled", "sequences", "head",
    ]  # fmt: skip
    by_graph, by_twin = (
        loop(of, torch.optim.SGD(of.head.parameters(), lr=0.1), of) for of in (graph, twin)
    )
    assert by_graph == by_twin
    for name in ("pooled", "sequences"):
        for table in RUN.tables(name):
            one, other = (getattr(of, name).table(table) for of in (model, twin))
            ids = other.ids()
            assert one.ids().equal(ids) and one.lookup(ids)[0].equal(other.lookup(ids)[0])


@pytest.mark.parametrize("sharded", [False, True])
def test_fx_takes_collections_as_leaves(sharded: bool) -> None:
    workers.run(check_traced, sharded, world_size=1)
