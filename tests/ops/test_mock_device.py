"""The tool of tests/support/mock_device.py notes what a GPU would make slow or refuse."""

import pytest
import torch
from mock_device import CUDA, MockDevice

from torchrec_dyn import ops

pytestmark = pytest.mark.mock_only
I64 = torch.int64


@pytest.fixture
def device():
    with MockDevice() as device:
        yield device


def ops_of(notes):
    return [note.op for note in notes]


READS = {
    "item": lambda t: t[0].item(),
    "int": lambda t: int(t[0]),
    "bool": lambda t: bool(t[0] > 0),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "to, by name": lambda t: t.to(device="cpu", dtype=torch.float32),
    "copy_": lambda t: torch.empty(2, dtype=I64).copy_(t),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "written mask": lambda t: t.__setitem__(t > 0, t.new_tensor(3)),
    "masked_select": lambda t: t.masked_select(t > 0),
    "unique": lambda t: torch.unique(t),
    "equal": lambda t: torch.equal(t, t.clone()),
    "repeat_interleave": lambda t: t.repeat_interleave(t),
}


@pytest.mark.parametrize("read", READS)
def test_every_read_by_the_host_is_noted(device, read):
    numbers = torch.tensor([1, 2], device=CUDA)
    READS[read](numbers)
    assert len(device.reads) == 1, device.reads
    assert device.reads[0].place.startswith("tests/ops/test_mock_device.py:")
    assert device.mixed == []


def test_tensors_of_two_devices_in_one_op_are_noted(device):
    there = torch.tensor([1, 2], device=CUDA)
    there + torch.tensor(1)  # torch sends a number along
    assert device.mixed == []
    there + torch.tensor([1, 2])
    torch.cat([torch.tensor([1, 2]), there])
    assert ops_of(device.mixed) == ["add.Tensor", "cat"]
    device.forget()
    slots, offsets, moved = torch.empty(0, 2, dtype=I64), torch.tensor([0, 2]), torch.tensor([-1])
    rows, absent = ops.lookup(there, offsets, [device.of(slots)], moved)
    assert rows.device == absent.device == CUDA
    assert device.mixed == device.reads == []  # descriptions are on the CPU
    ops.lookup(there, offsets, [slots], moved)
    ops.lookup(there, offsets, [device.of(slots)], moved.cuda())
    ops.lookup(there, offsets.cuda(), [device.of(slots)], moved)
    assert ops_of(device.mixed) == ["lookup", "lookup", "lookup"]


def test_ops_without_a_kernel_are_noted(device, monkeypatch):
    assert ops.mix64(torch.tensor([1], device=CUDA)).device == CUDA
    assert device.without_kernel == []
    monkeypatch.setattr("mock_device.kernels_of", lambda _: set())
    ops.mix64(torch.tensor([1], device=CUDA))
    assert ops_of(device.without_kernel) == ["mix64"]
