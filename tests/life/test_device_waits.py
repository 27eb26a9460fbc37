"""Where the host waits for a GPU in scores, marks and admission, seen on a mock GPU."""

import pytest
import torch
from device_ops import DESCRIPTIONS
from mock_device import CUDA, MockDevice
from op_samples import SAMPLES
from table_cases import ids_of

import torchrec_dyn as dyn
from torchrec_dyn import ops
from torchrec_dyn.life.admission import AdmissionRule, AdmissionRules
from torchrec_dyn.storage.row_marks import RowMarks

pytestmark = pytest.mark.mock_only
OPS = (
    "write_scores_",
    "read_scores",
    "lowest_rows",
    "choose_listed",
    "mark_rows_",
)
LISTS = ("lowest_rows", "choose_listed")


def sent(device, value):
    if isinstance(value, list):
        return [sent(device, one) for one in value]
    return device.of(value.clone()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("op", OPS)
def test_where_the_host_waits(op):
    """The length of a list is read. Errors wait for the next read (test_device_errors.py)."""
    sample = SAMPLES[op][0]()
    with MockDevice() as device:
        given = {k: v if k in DESCRIPTIONS else sent(device, v) for k, v in sample.items()}
        getattr(ops, op)(**given)
        assert [note.op for note in device.reads] == [one for one in LISTS if one == op]
        assert device.mixed == [] and device.without_kernel == []


@pytest.mark.parametrize("probability", [0.5, 1e-9])
def test_admission_waits_once(probability):
    with MockDevice() as device:
        rules = AdmissionRules([AdmissionRule(dyn.AdmitWithProbability(probability), 3, False)])
        new = (device.of(ids_of(5, 6)), device.of(ids_of(1, 5000)), ids_of(0, 2))
        rules.admit(new, None, torch.empty(0, dtype=torch.int64), lambda _: 7)
        assert [note.op for note in device.reads] == ["admit"] and device.mixed == []


def test_the_rows_marked_since_a_number_are_flagged_without_a_wait():
    with MockDevice() as device:
        marks = RowMarks(2000, CUDA)
        marks.reserve(1500)
        marks.write(device.of(ids_of(3, 1400)), 5)
        marks.at_least(5)
        assert device.reads == [] and device.mixed == []
