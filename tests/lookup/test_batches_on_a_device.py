"""Descriptions of a batch whose offsets are on a mock GPU: by one read of the host at most."""

import pytest
import torch
from device_twins import DeviceTwins, take_step_of
from mock_device import CUDA, MockDevice

from torchrec_dyn import DynamicTableConfig
from torchrec_dyn.lookup.bag_layout import BagLayout
from torchrec_dyn.lookup.gradient_reduction import Senders, reduction_of

OFFSETS = torch.tensor([0, 2, 2, 3, 7, 7, 9])
COUNTS = [2, 5, 2]


@pytest.fixture
def device():
    with MockDevice() as device:
        yield device


@pytest.mark.parametrize("sizes", [None, [[1, 0], [2, 1], [0, 2]]])
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_bags_are_described_as_on_the_cpu(device, pooling, sizes):
    layout = BagLayout([4, 4], [1, 2], pooling)
    here = layout.describe(OFFSETS, 9, sizes)
    for counts, reads in ((None, 1), (COUNTS, 0)):
        device.forget()
        there = layout.describe(OFFSETS.to(CUDA), 9, sizes, counts)
        assert device.mixed == [] and (len(device.reads) == reads or not device.is_mock)
        for name in ("table_offsets", "segments"):
            assert torch.equal(getattr(there, name), getattr(here, name)), name
        assert (there.elements, there.shape) == (here.elements, here.shape)


@pytest.mark.parametrize("wrong", [[0, 3, 2, 3], [0, 1, 2, 2], [1, 1, 2, 3]])
def test_wrong_offsets_are_refused_as_on_the_cpu(device, wrong):
    layout, offsets = BagLayout([4], [1], "sum"), torch.tensor(wrong)
    with pytest.raises(ValueError, match=r"expected (ascending offsets|offsets from 0)") as of_cpu:
        layout.describe(offsets, 3, None)
    with pytest.raises(ValueError) as of_device:
        layout.describe(offsets.to(CUDA), 3, None)
    assert str(of_device.value) == str(of_cpu.value)


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
    take_step_of(twins.twins, ids.to(CUDA), bounds, times.to(CUDA) if counted else None)
    if device.is_mock:
        assert len(device.reads) == 1 and device.mixed == [], device.reads
    seen = int(times[:4].sum()) if counted else 4
    assert twins.twins[0].stats()["ids_seen"] == before + seen
