"""Where the host waits for a GPU in scores, marks and admission, seen on a mock GPU."""

import pytest
import torch
from device_ops import DESCRIPTIONS
from mock_device import MockDevice
from op_samples import SAMPLES

from torchrec_dyn import ops

OPS = (
    "touch_scores_",
    "write_scores_",
    "read_scores",
    "lowest_scores",
    "oldest_first",
    "admit_by_chance",
    "mark_rows_",
    "changed_rows",
)
LISTS = ("lowest_scores", "changed_rows")


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
