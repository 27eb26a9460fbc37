"""Batches on a mock GPU are read, and refused, as on the CPU."""

import pytest
import torch
from device_twins import DeviceTwins, take_step_of
from mock_device import CUDA, MockDevice
from table_cases import make_table

from torchrec_dyn import DynamicTableConfig
from torchrec_dyn.lookup import Batch, TableGroup
from torchrec_dyn.lookup.gradient_reduction import Senders, reduction_of

OFFSETS = torch.tensor([0, 2, 2, 3, 7, 7, 9])


@pytest.fixture
def device():
    with MockDevice() as device:
        yield device


WRONG = {
    "a negative length": {"lengths": [2, -1, 2]},
    "too few": {"lengths": [1, 0, 1]},
    "too many": {"lengths": [2, 2, 1]},
    "descending": {"offsets": [0, 3, 2, 3]},
    "from 1": {"offsets": [1, 1, 2, 3]},
    "to 2": {"offsets": [0, 1, 2, 2]},
    "two ways": {"lengths": [1, 1, 1], "offsets": [0, 1, 3, 3]},
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_bags_are_refused_as_on_the_cpu(device, wrong, dtype):
    errors = []
    for place in ("cpu", CUDA):
        table = make_table(device=place)
        given = {name: torch.tensor(bags, dtype=dtype).to(place) for name, bags in wrong.items()}
        for training in (True, False):
            batch = Batch(torch.arange(3).to(place), **given, training=training)
            with pytest.raises(ValueError, match="lookup of tables t: expected ") as error:
                TableGroup([table], [1], "sum")(batch)
            errors.append(str(error.value))
        assert table.num_rows == 0 and table.step == 0
    assert len(set(errors)) == 1


def test_lengths_and_offsets_describe_the_same_bags(device):
    outputs = []
    for place in ("cpu", CUDA):
        table, ids = make_table(device=place), torch.arange(9).to(place)
        bags = {"lengths": OFFSETS.diff().to(place), "offsets": OFFSETS.to(place)}
        for given in ({"lengths": bags["lengths"]}, {"offsets": bags["offsets"]}, bags):
            for dtype in (torch.int32, torch.int64):
                sent = {name: numbers.to(dtype) for name, numbers in given.items()}
                batch = Batch(ids, **sent)
                output = TableGroup([table], [2], "sum")(batch).detach()
                outputs.append(getattr(output, "memory", output))
                assert batch.begins.tolist() == [0, 3, 9]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_senders_of_a_batch_need_no_read(device):
    bounds = torch.tensor([0, 2, 7, 9])
    configs = [DynamicTableConfig(gradient=mode) for mode in ("sum", "mean_over_senders", "sum")]
    senders = Senders([[1, 1], [1, 1], [2, 0]], 2)
    here = reduction_of(configs, OFFSETS, bounds, senders)
    there = reduction_of(configs, OFFSETS.to(CUDA), bounds, senders)
    assert device.reads == device.mixed == []
    assert there.scales == here.scales
    assert torch.equal(there.senders.memory, here.senders)


@pytest.mark.parametrize("counted", [False, True])
def test_a_frozen_table_beside_others_costs_no_read(device, counted):
    """Known ids, of which each stands for one or for several occurrences."""
    twins = DeviceTwins(device, ("lru", "all"), ("none", "count"))
    ids, bounds = torch.arange(9), torch.tensor([0, 4, 9])
    twins.step(ids[:4].tolist(), ids[4:].tolist())
    times, before = ids % 3 + 1 if counted else None, twins.twins[0].stats()["ids_seen"]
    twins.twins[1].is_frozen = True
    device.forget()
    gpu = twins.twins[0].device
    take_step_of(twins.twins, ids.to(gpu), bounds, times.to(gpu) if counted else None)
    if device.is_mock:
        assert len(device.reads) == 1 + counted and device.mixed == [], device.reads
    seen = int(times[:4].sum()) if counted else 4
    assert twins.twins[0].stats()["ids_seen"] == before + seen
