"""TorchRec's pipelines, on streams of a mock device, train and evaluate as plain loops on the CPU do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import workers
from life_cases import NOT_OF_THE_STREAM
from mock_device import CUDA, MockDevice
from mock_streams import Streams
from pipeline_model import Clicks, Run, batches, sharded_model
from pipeline_runs import (
    EXPERIMENTAL,
    HAS_LOOKUP_PREFETCH,
    PIPELINES,
    check_evaluation,
    check_pipelined,
    check_same_states,
    drain,
    make_pipeline,
    no_fallback,
    results_of,
    train_in_a_loop,
)
from sharded_twins import group_for_cuda
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv

import torchrec_dyn as dyn


@dataclass
class DeviceClicks(Clicks):
    """A batch that goes to the mock device, from any thread."""

    mock: Any = None

    @staticmethod
    def of(clicks: Clicks, device: MockDevice) -> DeviceClicks:
        """Returns a batch on the CPU as one that goes to the device."""
        return DeviceClicks(clicks.features, clicks.dense, clicks.labels, device)

    def to(self, device: torch.device, non_blocking: bool = False) -> Clicks:
        """Returns the batch on the device."""
        with self.mock.here():
            return DeviceClicks(
                self.features.to(device, non_blocking),
                self.dense.to(device),
                self.labels.to(device),
                self.mock,
            )

    def record_stream(self, stream: Any) -> None:
        """Records that a stream uses the batch."""
        self.features.record_stream(stream)
        self.dense.record_stream(stream)
        self.labels.record_stream(stream)


def train_on_cpu(run: Run, ahead: bool = False) -> dict[str, Any]:
    """Trains in a plain loop on the CPU, without DDP, as on the device; returns as `train_in_a_loop`."""
    return train_in_a_loop(run, ahead, init_data_parallel=False)


@contextmanager
def device_with_streams() -> Iterator[MockDevice]:
    """Enters a device with streams, for models with dense parameters."""
    # Parameters that move become new ones: a tensor of the CPU does not get the memory of the device.
    overwrites = mock.patch.object(
        torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True
    )
    # Storages of a mock device cannot be resized.
    clears = mock.patch.object(KeyedJaggedTensor, "clear_storage", _overwrite)
    with (
        MockDevice(Streams()) as device,
        overwrites,
        clears if device.is_mock else nullcontext(),
        no_fallback(),
    ):
        yield device


def _overwrite(features: KeyedJaggedTensor) -> int:
    """Makes the tensors of a batch useless, where TorchRec frees their memory."""
    for part in (features._values, features._lengths, features._offsets):
        if part is not None:
            part.fill_(-3)
    return 0


def model_on_device(run: Run) -> Any:
    """Returns the sharded model of a run. Collective."""
    group = ShardingEnv.from_process_group(group_for_cuda())
    # DDP's reducer wants a real device. Its wrapper would move the dense part.
    model = sharded_model(run, device=CUDA, env=group, init_data_parallel=False)
    model.module.head.to(CUDA)
    return model


def train_on_device(run: Run, name: str) -> dict[str, Any]:
    """Trains through a pipeline on the device."""
    with device_with_streams() as device:
        model = model_on_device(run)
        pipeline = make_pipeline(run, name, model)
        outputs = drain(pipeline, [DeviceClicks.of(one, device) for one in batches(run)])
        if name != "base":
            check_pipelined(run, pipeline)
        assert {loss.device for loss, _ in outputs} == {CUDA}
        return {
            **results_of(run, model, outputs),
            "mixed": _of_ours(device.mixed),
            "unordered": _of_ours(device.streams.unordered),
            "without_kernel": device.without_kernel,
            "users": len({stream for _, stream in device.recorded}),
        }


def evaluate_on_device(run: Run, name: str) -> int:
    """Runs `check_evaluation` of a pipeline on the device."""
    with device_with_streams() as device:
        source = [DeviceClicks.of(one, device) for one in batches(run)]
        unseen = check_evaluation(run, name, model_on_device(run), source)
        assert _of_ours(device.mixed) == _of_ours(device.streams.unordered) == []
    return unseen


def _of_ours(notes: list[Any]) -> list[Any]:
    return sorted({note for note in notes if note.place.startswith("torchrec_dyn/")})


needs_lookup_prefetch = pytest.mark.skipif(
    not HAS_LOOKUP_PREFETCH, reason="TorchRec's fused pipeline has no lookup prefetch"
)
LRU, LFU = dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed()
KINDS = ("table_wise", "row_wise", "column_wise")
PLAIN = Run(KINDS, KINDS, steps=4)  # a pipeline is at most three batches ahead
FULL = dataclasses.replace(
    PLAIN,
    steps=5,
    rows=90,
    drift=40,
    dedup=True,
    lives=[
        {"eviction": LFU},
        {"admission": dyn.AdmitAfter(2), "eviction": LRU, "unseen": "initial"},
        {"admission": dyn.AdmitWithProbability(0.7), "eviction": (dyn.ExpireAfter(steps=3), LFU)},
    ],
)
RUNS = {
    "plain": (PLAIN, 2),
    "in host memory": (
        dataclasses.replace(FULL, lives=[{**life, "storage": dyn.HostMemory(20)} for life in FULL.lives]), 2,
    ),
    "with policies": (FULL, 2),
    "one rank": (dataclasses.replace(FULL, without_ids=1), 1),  # nothing is sent
    "static tables": (dataclasses.replace(PLAIN, beside=True), 2),
    "processed": (
        dataclasses.replace(FULL, variable=True, processed=True, dedup=False, without_ids=2), 2,
    ),
}  # fmt: skip
TRAINING = [name for name in PIPELINES if "eval" not in name]
# The dense part of a GPU rounds otherwise than that of a CPU.
ROUNDING = 0 if MockDevice.is_mock else 1e-3
# The number of streams that use the tensors of others, where it is not two.
USERS = {"base": 1, "lite": 1, "prefetch": 4}


@cache
def on_cpu(run: str, ahead: bool) -> Any:
    made, world = RUNS[run]
    return workers.run(train_on_cpu, made, ahead, world_size=world)


EVERYDAY = {
    *(("semi_sync", "with policies"), ("prefetch", "one rank")),
    *(("prefetch", "in host memory"), ("semi_sync", "in host memory")),
}
BY_RUN = {
    "plain": TRAINING,
    "with policies": [*TRAINING, *EXPERIMENTAL],
    "in host memory": TRAINING,
    "one rank": ["sparse_dist", "fused", "semi_sync", "prefetch"],
    # Not SemiSync: the optimizer changes the position weights between their forward and their backward.
    "processed": ["sparse_dist", "fused", "prefetch"],
    "static tables": ["sparse_dist", "fused", "semi_sync", "prefetch"],
}


def marks_of(name: str, run: str) -> list[pytest.MarkDecorator]:
    """Returns the marks of a case of `test_trains_as_a_plain_loop_on_the_cpu`."""
    if run == "static tables":
        return [pytest.mark.real_only]  # FBGEMM's libraries for the CPU have no tables for GPUs
    return [] if (name, run) in EVERYDAY else [pytest.mark.deep]


CASES = [
    pytest.param(name, run, marks=marks_of(name, run))
    for run, names in BY_RUN.items()
    for name in names
]


@pytest.mark.parametrize(("pipeline", "run"), CASES)
def test_trains_as_a_plain_loop_on_the_cpu(pipeline: str, run: str) -> None:
    made, world = RUNS[run]
    results = workers.run(train_on_device, made, pipeline, world_size=world)
    late = 0
    for got, expected in zip(results, on_cpu(run, pipeline == "semi_sync"), strict=True):
        assert got["losses"] == pytest.approx(expected["losses"], rel=ROUNDING, abs=0)
        check_same_states(got["states"], expected["states"], ROUNDING)
        for table, counts in expected["stats"].items():
            for key in counts.keys() - NOT_OF_THE_STREAM:
                assert got["stats"][table][key] == counts[key], f"{table} {key}"
            late += got["stats"][table]["late_grads"]
        assert got["mixed"] == got["without_kernel"] == got["unordered"] == []
        assert got["users"] == USERS.get(pipeline, 2) or not MockDevice.is_mock
    # Step i + 1 removes rows before backward i.
    is_ahead = pipeline in ("prefetch", "prefetch_ems", "semi_sync")
    assert (late > 0) == (run not in ("plain", "static tables") and is_ahead)


EVALUATION = [
    ("eval", "with policies"),
    *(
        pytest.param(name, run, marks=[pytest.mark.deep, *marks])
        for name, run, marks in (
            ("eval", "plain", []),
            ("eval_fused", "with policies", []),
            ("eval_fused_ahead", "processed", [needs_lookup_prefetch]),
        )
    ),
]


@pytest.mark.parametrize(("pipeline", "run"), EVALUATION)
def test_evaluates_as_a_plain_loop_on_the_cpu(pipeline: str, run: str) -> None:
    made, world = RUNS[run]
    made = dataclasses.replace(made, steps=3)  # of which two train
    unseen = workers.run(evaluate_on_device, made, pipeline, world_size=world)
    assert min(unseen) > 0
