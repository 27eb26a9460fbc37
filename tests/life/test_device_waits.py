"""Where the host waits for a GPU in scores, marks and admission, seen on a mock GPU."""

import pytest
import torch
from mock_device import CUDA, MockDevice
from table_cases import ids_of

import torchrec_dyn as dyn
from torchrec_dyn.life.admission import AdmissionRule, AdmissionRules
from torchrec_dyn.storage.row_marks import RowMarks

pytestmark = pytest.mark.mock_only


@pytest.mark.parametrize("probability", [0.5, 1e-9])
def test_admission_waits_once(probability):
    with MockDevice() as device:
        rules = AdmissionRules([AdmissionRule(dyn.AdmitWithProbability(probability), 3, False)])
        new = device.of(ids_of(5, 6)), device.of(ids_of(1, 5000)), [0, 2]
        rules.admit(*new, None, torch.empty(0, dtype=torch.int64), lambda _: 7)
        assert [note.op for note in device.reads] == ["admit"] and device.mixed == []


def test_the_rows_marked_since_a_number_are_flagged_without_a_wait():
    with MockDevice() as device:
        marks = RowMarks(2000, CUDA)
        marks.reserve(1500)
        marks.write(device.of(ids_of(3, 1400)), 5)
        marks.at_least(5)
        assert device.reads == [] and device.mixed == []
