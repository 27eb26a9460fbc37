"""Functions for workers: train a model through a pipeline on a mock device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from mock_device import CUDA, MockDevice
from mock_streams import Streams
from pipeline_model import Clicks, Run, batches, sharded_model
from pipeline_runs import (
    check_pipelined,
    check_same_states,
    drain,
    make_pipeline,
    no_fallback,
    states_of,
    tables_of,
    train_in_a_loop,
)
from sharded_twins import group_for_cuda
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv


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


def _contents(run: Run, model: Any) -> dict[str, Any]:
    states = states_of(run, model)
    return {
        "states": {
            name: {part: value.cpu() for part, value in state.items()}
            for name, state in states.items()
        },
        "stats": {key: table.stats() for key, table in tables_of(run, model).items()},
    }


@contextmanager
def device_with_streams() -> Iterator[MockDevice]:
    """Enters a device with streams, for models with dense parameters."""
    # Parameters that move become new ones: a tensor of the CPU does not get the memory of the device.
    overwrites = mock.patch.object(
        torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True
    )
    # Storages of the device cannot be resized.
    clears = mock.patch.object(KeyedJaggedTensor, "clear_storage", _overwrite)
    with MockDevice(Streams()) as device, overwrites, clears, no_fallback():
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
    """Trains through a pipeline on the device.

    Returns:
        As `train_on_cpu`; notes of the device about lines of ours; and the number of streams that record
        tensors as used.
    """
    with device_with_streams() as device:
        model = model_on_device(run)
        pipeline = make_pipeline(run, name, model)
        outputs = drain(pipeline, [DeviceClicks.of(one, device) for one in batches(run)])
        if name != "base":
            check_pipelined(run, pipeline)
        assert {loss.device for loss, _ in outputs} == {CUDA}
        return {
            "losses": [float(loss) for loss, _ in outputs],
            **_contents(run, model),
            "mixed": _of_ours(device.mixed),
            "unordered": _of_ours(device.streams.unordered),
            "without_kernel": device.without_kernel,
            "users": len({stream for _, stream in device.recorded}),
        }


def evaluate_on_device(run: Run, name: str) -> int:
    """Trains on the device, and evaluates other batches through a pipeline, which must change nothing.

    Returns:
        The number of evaluated ids that training had not inserted.
    """
    with device_with_streams() as device:
        model = model_on_device(run)
        source = [DeviceClicks.of(one, device) for one in batches(run)]
        drain(make_pipeline(run, "base", model), source[:2])
        model.eval()
        before = _contents(run, model)
        with torch.no_grad():
            expected = [model(batch.to(CUDA))[1] for batch in source]
        pipeline = make_pipeline(run, name, model)
        got = drain(pipeline, source)
        check_pipelined(run, pipeline)
        assert len(got) == run.steps
        for (loss, logits), (expected_loss, expected_logits) in zip(got, expected, strict=True):
            assert torch.equal(loss, expected_loss) and torch.equal(logits, expected_logits)
        after = _contents(run, model)
        assert after["stats"] == before["stats"]
        check_same_states(after["states"], before["states"])
        assert _of_ours(device.mixed) == _of_ours(device.streams.unordered) == []
    known = torch.cat([state["ids"] for state in after["states"].values()])
    asked = torch.cat([batch.features.values() for batch in batches(run)])
    return int((~torch.isin(asked, known)).sum())


def _of_ours(notes: list[Any]) -> list[Any]:
    return sorted({note for note in notes if note.place.startswith("torchrec_dyn/")})
