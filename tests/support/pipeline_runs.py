"""Functions for workers: run one model through one pipeline."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import sharded_training
import torch
from cuda_stream_shims import cuda_stream_shims
from pipeline_model import Clicks, Run, batches, sharded_model
from sharded_training import with_dense_sgd
from table_cases import bits, without_probes
from torchrec.distributed.train_pipeline import experimental_pipelines, train_pipelines
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from torchrec_dyn import knobs
from torchrec_dyn.table.shard import TableShard

# Name of a pipeline -> TorchRec's class, its options, True if it needs the shims.
PIPELINES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "base": ("TrainPipelineBase", {}, False),
    "sparse_dist": ("TrainPipelineSparseDist", {}, False),
    "sparse_dist_late_enqueue": (
        "TrainPipelineSparseDist",
        {"enqueue_batch_after_forward": True, "free_features_storage_early": True},
        False,
    ),
    "lite": ("TrainPipelineSparseDistLite", {}, False),
    "eval": ("EvalPipelineSparseDist", {}, False),
    "fused": ("TrainPipelineFusedSparseDist", {}, True),
    "fused_late_lookup": (
        "TrainPipelineFusedSparseDist",
        {"embedding_lookup_after_data_dist": True},
        True,
    ),
    "semi_sync": (
        "TrainPipelineSemiSync",
        {"start_batch": 0, "dmp_collection_sync_interval_batches": None},
        True,
    ),
    "prefetch": ("PrefetchTrainPipelineSparseDist", {}, True),
    "eval_fused": ("EvalPipelineFusedSparseDist", {}, True),
    "eval_fused_ahead": (
        "EvalPipelineFusedSparseDist",
        {"enable_embedding_lookup_prefetch": True},
        True,
    ),
}

# TorchRec's experimental pipelines that take a table of ours for any other, as `PIPELINES`.
EXPERIMENTAL: dict[str, tuple[str, dict[str, Any], bool]] = {
    "hybrid": ("TrainEvalHybridPipelineBase", {}, False),
    "copy_thread": ("TrainPipelineSparseDistT", {}, False),
    "stash": ("TrainPipelineSparseDistEmbStash", {"site_fqn": "head"}, True),
    "prefetch_ems": ("TrainPipelinePrefetchEMS", {"site_fqn": "head"}, True),
}

# TorchRec 1.7 has no such option.
HAS_LOOKUP_PREFETCH = (
    "enable_embedding_lookup_prefetch"
    in inspect.signature(train_pipelines.EvalPipelineFusedSparseDist).parameters
)

State = dict[str, dict[str, torch.Tensor]]


def tables_of(model: Any) -> dict[str, TableShard]:
    """Returns the dynamic column shards on this rank by name and first column."""
    return {
        f"{table.name}/{table.first_column}": table
        for name in ("pooled", "sequences")
        for table in sharded_training.tables_of(_inner(getattr(model.module, name)))
    }


def _inner(collection: Any) -> Any:
    return getattr(collection, "_embedding_bag_collection", collection)


def states_of(model: Any) -> State:
    return {
        name: {part: value.cpu() for part, value in table.export_state().items()}
        for name, table in tables_of(model).items()
    }


def stats_of(model: Any) -> dict[str, dict[str, int | float]]:
    return {key: without_probes(table.stats()) for key, table in tables_of(model).items()}


def check_same_states(got: State, expected: State, tolerance: float = 0) -> None:
    """Asserts that tables have the same contents; numbers with a point may differ by a relative tolerance."""
    assert got.keys() == expected.keys()
    for name, state in expected.items():
        for part, value in state.items():
            here = got[name][part]
            if tolerance and value.is_floating_point():
                torch.testing.assert_close(here, value, rtol=tolerance, atol=tolerance / 100)
            else:
                assert torch.equal(bits(here), bits(value)), f"{name} {part}"


def optimizer_of(run: Run, model: Any) -> Any:
    """Returns the optimizers of the rows and of the dense part; with `warming` the learning rate grows."""
    optimizer = with_dense_sgd(model, 0.1)
    warming = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.3)]
    return WarmupOptimizer(optimizer, warming, lr=0.3) if run.warming else optimizer


@contextmanager
def no_fallback() -> Iterator[None]:
    """Fails if TorchRec logs that it did not pipeline a module."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchrec")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert not [text for text in said if "pipelined" in text], said


def make_pipeline(run: Run, name: str, model: Any, **options: Any) -> Any:
    kind, usual, _ = (PIPELINES | EXPERIMENTAL)[name]
    home = train_pipelines if name in PIPELINES else experimental_pipelines
    return getattr(home, kind)(model, optimizer_of(run, model), model.device, **usual, **options)


def drain(pipeline: Any, source: list[Clicks]) -> list[Any]:
    outputs, left = [], iter(source)
    while True:
        try:
            outputs.append(pipeline.progress(left))
        except StopIteration:
            return outputs


def check_pipelined(run: Run, pipeline: Any) -> None:
    """Asserts that the pipeline pipelines every collection, the dynamic collections among them."""
    names = {module.forward.name: type(module).__name__ for module in pipeline._pipelined_modules}
    expected = {"pooled": "EmbeddingBagCollection", "sequences": "EmbeddingCollection"}
    if run.dynamic:
        expected = {name: f"Dynamic{kind}" for name, kind in expected.items()}
    if run.processed:
        expected["pooled"] = "DynamicFeatureProcessedEmbeddingBagCollection"
    if run.beside:
        expected["beside"] = "EmbeddingBagCollection"
    assert names == {name: f"Sharded{kind}" for name, kind in expected.items()}
    assert all(module.is_pipelined for module in pipeline._pipelined_modules)


def shims_for(name: str) -> Any:
    return cuda_stream_shims() if PIPELINES[name][2] else nullcontext()


def results_of(run: Run, model: Any, outputs: list[Any]) -> dict[str, Any]:
    """Returns losses per step and, of dynamic tables on this rank, the contents and the counts."""
    result: dict[str, Any] = {"losses": [float(loss) for loss, _ in outputs]}
    if run.dynamic:
        result |= {"states": states_of(model), "stats": stats_of(model)}
    return result


def train(run: Run, name: str) -> dict[str, Any]:
    """Trains a model through a pipeline; returns `results_of` it."""
    with shims_for(name), no_fallback():
        model = sharded_model(run)
        pipeline = make_pipeline(run, name, model)
        outputs = drain(pipeline, batches(run))
        if name != "base":
            check_pipelined(run, pipeline)
    return results_of(run, model, outputs)


def train_in_a_loop(run: Run, ahead: bool, **options: Any) -> dict[str, Any]:
    """Trains in a plain loop; returns as `train`."""
    model = sharded_model(run, **options)
    optimizer = optimizer_of(run, model)
    source, outputs = batches(run), []
    lookups = {name: getattr(model.module, name) for name in run.collections()}
    forwards = {name: lookup.forward for name, lookup in lookups.items()}

    def look_up(batch: Clicks) -> dict[str, Any]:
        return {name: forward(batch.features) for name, forward in forwards.items()}

    rows = look_up(source[0])
    for step, batch in enumerate(source):
        for name, lookup in lookups.items():
            lookup.forward = lambda features, looked_up=rows[name]: looked_up
        optimizer.zero_grad()
        loss, _ = model(batch)
        following = source[step + 1 : step + 2]
        if ahead and following:
            rows = look_up(*following)
        loss.backward()
        optimizer.step()
        if not ahead and following:
            rows = look_up(*following)
        outputs.append((loss.detach(), None))
    return results_of(run, model, outputs)


def train_with_steps_ahead(run: Run) -> dict[str, Any]:
    """Trains through a prefetching pipeline that takes prefetched steps, as on CUDA; returns as `train`."""
    with prefetched_steps():
        return train(run, "prefetch")


def prefetched_steps() -> Any:
    """Returns a context in which prefetching takes steps on the CPU, too."""
    return mock.patch.object(knobs, "PREFETCHED_STEPS_ON", {"cpu", "cuda"})


def evaluate(run: Run, name: str) -> int:
    """Runs `check_evaluation` of a pipeline."""
    with shims_for(name), no_fallback():
        return check_evaluation(run, name, sharded_model(run), batches(run))


def check_evaluation(run: Run, name: str, model: Any, source: list[Clicks]) -> int:
    """Trains two batches, and evaluates all through a pipeline, which must change nothing."""
    drain(make_pipeline(run, "base", model), source[:2])
    model.eval()
    before, counts = states_of(model), stats_of(model)
    with torch.no_grad():
        expected = [model(batch.to(model.device))[1] for batch in source]
    pipeline = make_pipeline(run, name, model)
    got = drain(pipeline, source)  # as in a user's loop without no_grad
    check_pipelined(run, pipeline)
    assert len(got) == run.steps
    for outputs, wanted in zip(got, expected, strict=True):
        assert all(map(_are_same, outputs, wanted))
    check_same_states(states_of(model), before)
    assert stats_of(model) == counts
    known = torch.cat([torch.zeros(0).long(), *(state["ids"] for state in before.values())])
    asked = torch.cat([batch.features.values() for batch in source])
    return int((~torch.isin(asked, known)).sum())


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns True for the same bits; of a GPU, whose `index_add` has no order, for close numbers."""
    if type(one) is torch.Tensor and one.is_cuda:
        return torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    return torch.equal(one, other)


def pause_with_steps_ahead(run: Run) -> dict[str, Any]:
    """Runs `train_with_pause` in a prefetching pipeline that takes prefetched steps, as on CUDA."""
    with prefetched_steps():
        return train_with_pause(run, "prefetch")


def train_with_pause(run: Run, name: str) -> dict[str, Any]:
    """Trains a step, evaluates with the pipeline detached, and continues to train, on two iterators."""
    with shims_for(name):
        model = sharded_model(run)
        pipeline = make_pipeline(run, name, model)
        source = batches(run)
        left = iter(source[:-1])
        outputs = [pipeline.progress(left)]
        bare = pipeline.detach()
        bare.eval()
        with torch.no_grad():
            for batch in batches(run, first_step=run.steps):
                bare(batch)
        bare.train()
        # With sparse_dist TorchRec would send the batches in flight again, into contexts that are already
        # filled. TorchRec's own sequence collections fail then too.
        pipeline.attach(bare, sparse_dist=False)
        outputs += drain(pipeline, left) + drain(pipeline, source[-1:])
    return results_of(run, model, outputs)
