"""The update of rows on each device: the CPU's bits and errors."""

import pytest
import torch
from fuzz_ops import copies
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_device import MockDevice
from op_samples import SAMPLES, update
from table_cases import bits, ids_of
from update_cases import WRITTEN, drawn_update

from torchrec_dyn import ops

CPU = torch.ops.torchrec_dyn


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("rows", [ids_of(0, 1, 2), ids_of(0, 0, 0)])
def test_signs_of_zeros(rows):
    """A sum begins with its first gradient, not with 0: -0 stays -0."""
    given = update(0) | {"rows": rows, "ids": rows, "offsets": None, "grad": torch.full((9,), -0.0)}
    given |= {"weights": [torch.full((4, 3), -0.0)], "layout": torch.tensor([[0, 1, 2, 3]])}
    given |= {"segments": torch.tensor([[0, 0, 3, 0, 3]]), "streams": ids_of(1, 0, 1).view(1, 3)}
    ops.update_rows_(**given | {"grad_scales": [1.0], "bag_weights": None})
    for row in range(4):  # -0 - -0 is 0
        assert (torch.signbit(given["weights"][0][row]) == (row not in rows)).all()


def outcome(library, sample):
    try:
        library.update_rows_(**sample)
    except RuntimeError as error:
        return str(error).split("\n")[0]
    return [bits(one).tolist() for name in WRITTEN for one in sample[name]]


ADAM = update(3)
FAULTS = [
    {"offsets": ids_of(0, 2, 1, 4, 5)},
    {"offsets": ids_of(0, 2, 2, 4, 6)},
    {"offsets": ids_of(-1, 2, 2, 4, 5)},
    {"rows": ids_of(0, -2, 0, 9, 0)},
    {"rows": ids_of(0, 0, 0, 9, 2**62)},
    {"senders": torch.tensor([0, -7, 3, 1, 2], dtype=torch.int32)},
    {"senders": torch.tensor([0, 1, 3, 2**31 - 1, 2], dtype=torch.int32)},
    {"streams": ids_of(1, 0, 1, 2, 0, 0).view(2, 3)},
    {"streams": ids_of(1, 0, -4, 2, 0, 0).view(2, 3), "rows": ids_of(0, 5, -1, -1, -1)},
    {"streams": ids_of(1, 0, 1, 2, 0, 0).view(2, 3), "rows": ids_of(0, 5, -1, -1, -1)},
    {"streams": ids_of(1, 0, 0, 2, 0, 0).view(2, 3), "rows": ids_of(0, 5, -1, 9, -1),
     "senders": torch.tensor([0, -7, 3, 1, 2], dtype=torch.int32)},
]  # fmt: skip


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("change", FAULTS)
def test_faults_are_named_as_on_the_cpu_and_change_nothing(change):
    """Of two faults the error names the one that the CPU finds first."""
    given = copies(ADAM | change)
    before = copies(given)
    assert outcome(ops, given) == outcome(CPU, copies(before))
    if isinstance(outcome(CPU, copies(before)), str):
        for name in WRITTEN:
            for now, then in zip(given[name], before[name], strict=True):
                assert torch.equal(bits(now), bits(then)), name


@pytest.mark.usefixtures("device")
def test_marks_with_fewer_rows_than_the_table():
    sample = SAMPLES["update_rows_"][0]()
    rows = {"weights": [torch.ones(1024, 3)] * 1 + sample["weights"][2:]}
    layout = torch.tensor([[0, 1, 10, 3], [1, 1, 2, 2]])
    marks = {
        "marks": [torch.zeros(64).byte()],
        "mark_layout": torch.tensor([[0, 1, 6, 1], [1, 0, 6, 1]]),
    }
    given = sample | rows | marks | {"layout": layout, "rows": ids_of(0, 512, -1, 0, 1)}
    with pytest.raises(RuntimeError, match=r"rows in \[-1, 512\), got one outside"):
        ops.update_rows_(**given)


wild = st.sampled_from([-(2**63), -2, -1, 0, 1, 2, 4, 5, 7, 8, 2**32, 2**62, 2**63 - 1])


@pytest.mark.usefixtures("device")
@settings(max_examples=40)
@given(offsets=st.lists(wild, min_size=5, max_size=5), rows=st.lists(wild, min_size=5, max_size=5))
def test_wild_offsets_and_rows_have_the_cpus_outcome(offsets, rows):
    sample = update(2) | {"rows": ids_of(*rows), "offsets": ids_of(*offsets)}
    assert outcome(ops, copies(sample)) == outcome(CPU, copies(sample))


@pytest.mark.usefixtures("device")
def test_no_ids_and_no_bags():
    nothing = {"ids": ids_of(), "rows": ids_of(), "grad": torch.empty(0), "bag_weights": None}
    nothing["segments"] = torch.empty(0, 5, dtype=torch.int64)
    given = update(2) | nothing
    before = copies(given)
    ops.update_rows_(**given | {"offsets": ids_of(0)})
    ops.update_rows_(**given | {"offsets": None})
    assert all(map(torch.equal, given["weights"], before["weights"]))
    with pytest.raises(RuntimeError, match=r"inside the ids \[0, 0\], got 1 to 1"):
        ops.update_rows_(**given | {"offsets": ids_of(1)})


def test_where_the_host_waits_for_an_update():
    """Never: the next lookup raises its errors (test_device_errors.py)."""
    described = ("layout", "segments", "streams", "mark_layout")
    with MockDevice() as device:
        given = drawn_update(1, 4, torch.float16, [4, 6], ids=300)
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and name not in described:
                given[name] = device.of(value)
            elif name in WRITTEN:
                given[name] = [device.of(block) for block in value]
        ops.update_rows_(**given)
        assert device.reads == device.mixed == device.without_kernel == []
