"""The tool of tests/support/mock_device.py notes what a GPU would make slow or refuse."""

import pytest
import torch
from mock_device import CUDA, OTHER_GPU, MockDevice
from mock_streams import Streams

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


def test_tensors_of_two_gpus_in_one_op_are_noted(device):
    here, there = torch.tensor([1, 2], device=CUDA), torch.tensor([3, 4], device="cuda:1")
    assert {(there * 2).device, there[1:].device, there.new_tensor(3).device} == {OTHER_GPU}
    assert torch.ones(2, device=OTHER_GPU).expand(3, 2).sum(0).device == OTHER_GPU
    assert device.mixed == []
    slots = torch.zeros(4, 2, dtype=I64, device=OTHER_GPU)
    here + there
    torch.cat([there, here])
    ops.lookup(here, torch.tensor([0, 2]), [slots], torch.tensor([-1]))
    assert ops_of(device.mixed) == ["add.Tensor", "cat", "lookup"]


def test_copies_between_gpus_are_noted_and_not_waited_for(device):
    here, there = torch.tensor([1, 2], device=CUDA), torch.tensor([3, 4], device=OTHER_GPU)
    moved = there.to(CUDA, torch.int32)
    assert (moved.device, moved.dtype, there.cuda(1)) == (CUDA, torch.int32, there)
    assert here.cuda(1).device == OTHER_GPU
    here.copy_(there)
    assert ops_of(device.between) == ["_to_copy", "_to_copy", "copy_"]
    assert device.mixed == device.reads == []
    assert here.tolist() == moved.tolist() == [3, 4]


def test_cuda_is_the_current_gpu(device):
    def places():
        made = torch.ones(1, device="cuda"), torch.ones(1).cuda(), torch.ones(1).to("cuda")
        return {*(one.device for one in made), torch.cuda.current_stream().device}

    assert places() == {CUDA}
    with torch.cuda.device(1):
        assert places() == {OTHER_GPU} and torch.cuda.current_device() == 1
    assert places() == {CUDA}
    torch.cuda.set_device(OTHER_GPU)
    assert places() == {OTHER_GPU}
    torch.cuda.set_device(0)
    assert places() == {CUDA}


def test_an_event_belongs_to_a_gpu(device):
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(OTHER_GPU))
    with pytest.raises(RuntimeError, match="expected a stream of cuda:1 for its event, got cuda:0"):
        event.record()
    torch.ones(2, device=OTHER_GPU).record_stream(torch.cuda.current_stream(CUDA))
    assert ops_of(device.mixed) == ["record_stream"]


def test_each_gpu_has_its_own_streams():
    with MockDevice(Streams()) as device:
        here, there = torch.cuda.Stream(), torch.cuda.Stream(OTHER_GPU)
        with torch.cuda.stream(there):
            assert torch.ones(2, device="cuda").device == OTHER_GPU
            assert torch.cuda.current_stream(CUDA) not in (here, there)
            made = torch.ones(2, device=OTHER_GPU) + 1
        with torch.cuda.stream(here):  # of the other GPU
            moved = made.to(CUDA)
        assert ops_of(device.streams.unordered) == ["aten::_to_copy"]  # not the stream of `there`
        device.streams.unordered.clear()
        torch.cuda.current_stream(OTHER_GPU).wait_stream(there)
        with torch.cuda.stream(here):
            moved = made.to(CUDA)
            moved + 1  # the stream of the target has waited for the copy
        assert device.streams.unordered == []
        moved + 1
        assert ops_of(device.streams.unordered) == ["aten::add.Tensor"]


def test_kernels_of_one_gpu_report_no_errors_of_the_other(device):
    wrong = torch.tensor([-1, 2], device=OTHER_GPU)
    slots = torch.zeros(8, 2, dtype=I64, device=OTHER_GPU)
    ops.insert(wrong, wrong, torch.tensor([0, 2]), [slots], torch.tensor([-1]))
    ops.raise_errors(torch.empty(0, device=CUDA))
    with pytest.raises(RuntimeError, match="got -1"):
        ops.raise_errors(torch.empty(0, device=OTHER_GPU))
