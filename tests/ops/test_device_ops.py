"""Arguments that tests send to a GPU lie there as they do on the CPU; here both devices are the CPU."""

import pytest
import torch
from device_ops import CPU, CudaOp
from op_samples import I64, SAMPLES, whole


def send(check, *args):
    """Calls `check` with the arguments by name, as `CudaOp` sends them to the op `insert`."""

    def op(**sent):
        check(**sent)

    op._schema = CPU.insert.default._schema
    CudaOp(op, "cpu")(*args)


def test_tensors_that_share_memory_share_it_there():
    together = torch.arange(40)
    slots, ids, strided = together[:16].view(8, 2), together[14:20], together[2:22:10]

    def check(new_ids, new_rows, new_offsets, slots, moved):
        first, second = slots
        assert first.data_ptr() != together.data_ptr() and first.flatten().tolist() == [*range(16)]
        assert new_ids.data_ptr() - first.data_ptr() == 14 * 8
        assert new_ids.tolist() == [*range(14, 20)]
        assert second.data_ptr() - first.data_ptr() == 2 * 8
        assert second.stride() == (10,) and second.tolist() == [2, 12]
        new_ids[0] = -7
        assert first[7, 0] == -7
        assert new_rows.data_ptr() - first.data_ptr() != 30 * 8  # they overlap with nothing
        assert new_offsets.tolist() == [0, 6] and moved.tolist() == [-1]

    send(check, ids, together[30:], whole(0, 6), [slots, strided], whole(-1))
    assert together.tolist() == [*range(14), -7, *range(15, 40)]


def test_elements_that_begin_between_others_do_so_there():
    ids = torch.frombuffer(bytearray(25), dtype=I64, count=3, offset=1).copy_(whole(5, 6, 7))

    def check(new_ids, new_rows, **others):
        assert new_ids.data_ptr() % 64 == ids.data_ptr() % 64 != 0
        assert new_ids.tolist() == [5, 6, 7] and len(new_rows) == 0

    send(check, ids, whole(), whole(0), [], whole())


def test_what_a_call_writes_and_returns_comes_back():
    slots, ids = torch.zeros(8, 2, dtype=I64), whole(5, 6)
    given = (whole(0, 2), [slots], whole(-1))
    CudaOp(CPU.insert.default, "cpu")(ids, whole(3, 4), *given)
    rows, _ = CudaOp(CPU.lookup.default, "cpu")(ids, *given)
    assert rows.tolist() == [3, 4] and CPU.lookup(ids, *given)[0].tolist() == [3, 4]


def test_shared_memory_is_refused_there():
    both = SAMPLES["insert"][0]()
    both["new_ids"] = both["slots"][0].view(-1)[: len(both["new_ids"])]
    with pytest.raises(RuntimeError, match="share no memory"):
        CudaOp(CPU.insert.default, "cpu")(**both)
