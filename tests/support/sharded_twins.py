"""Trains a sharded collection on the CPU and its twin on a mock device, in one process group."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from mock_device import CUDA, MockDevice
from sharded_cases import Case
from sharded_training import Holder, batches, collection_of, outputs_by_name, sharder_of
from table_cases import same_state
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan


@cache
def group_for_cuda() -> dist.ProcessGroup:
    """Returns a group that, as one of nccl, has no backend for tensors on the CPU. Collective."""
    name = "only_cuda"
    if name not in dist.Backend.backend_list:
        make = dist.ProcessGroupGloo
        dist.Backend.register_backend(name, lambda *args: make(*args), devices=["cuda"])
    group = dist.new_group(backend=name)
    assert isinstance(group, dist.ProcessGroup)
    return group


class ShardedTwins:
    """One case, sharded on the CPU and on a mock device that is entered. The constructor is collective.

    Attributes:
        models: both models, the one on the CPU first.
    """

    def __init__(
        self,
        device: MockDevice,
        case: Case,
        wrap: Callable[[Any], Any] | None = None,
        sharder: Callable[[], Any] | None = None,
    ) -> None:
        self.device, self.case = device, case
        whole = collection_of(case, fused_params=case.fused_params)
        whole = whole if wrap is None else wrap(whole)
        plan = {"collection": {table.name: table.plan for table in case.tables}}
        self.models: list[Any] = [
            DistributedModelParallel(
                Holder(copy.deepcopy(whole)),
                env=ShardingEnv.from_process_group(group),
                device=place,
                plan=ShardingPlan(plan),
                sharders=[sharder_of(case) if sharder is None else sharder()],
                init_data_parallel=False,  # DDP's reducer wants a real device
            )
            for group, place in ((dist.group.WORLD, torch.device("cpu")), (group_for_cuda(), CUDA))
        ]

    @property
    def collections(self) -> list[Any]:
        modules = [model.module.collection for model in self.models]
        return [getattr(module, "_embedding_bag_collection", module) for module in modules]

    def forward(self, batch: KeyedJaggedTensor) -> list[dict[str, Any]]:
        """Returns the outputs of both models by name; compares them."""
        on_cpu, on_device = (
            outputs_by_name(self.case, model(batch.to(place)))
            for model, place in zip(self.models, (torch.device("cpu"), CUDA), strict=True)
        )
        assert list(on_cpu) == list(on_device)
        for name, output in on_cpu.items():
            assert on_device[name].device == CUDA
            assert torch.equal(on_device[name].memory, output), name
        return [on_cpu, on_device]

    def train(self, step: int) -> None:
        for outputs in self.forward(batches(self.case, step)[0][dist.get_rank()]):
            values = list(outputs.values())
            torch.autograd.backward(values, [_grad_of(value) for value in values])

    def compare(self) -> int:
        """Compares all tables of this rank with their twins; returns their rows."""
        rows = 0
        for table in self.case.tables:
            on_cpu, on_device = (one._shards.table(table.name).shards for one in self.collections)
            assert len(on_cpu) == len(on_device)
            for shard, twin in zip(on_cpu, on_device, strict=True):
                assert twin.device == twin.id_map.slots.device == CUDA, table.name
                state = {name: value.cpu() for name, value in twin.export_state().items()}
                assert same_state(shard.export_state(), state), table.name
                rows += shard.num_rows
        return rows

    def check_notes(self) -> None:
        """Asserts that no op of ours had tensors of two devices, and that each has a kernel."""
        mixed = [note for note in self.device.mixed if not note.place.startswith("torchrec/")]
        assert mixed == [], mixed
        assert self.device.without_kernel == [], self.device.without_kernel


def _grad_of(output: torch.Tensor) -> torch.Tensor:
    ramp = torch.linspace(-1, 1, output.shape[1], device=output.device)
    return ramp * 0.3 + output.detach() * 0.5
