"""Where the host waits for a GPU in scores, marks and admission, seen on a pretended one."""

import pytest
import torch
from device_ops import DESCRIPTIONS
from op_samples import SAMPLES
from pretended_device import PretendedDevice

from torchrec_dyn import ops

# The host sends pointers to blocks and the layouts of tables, and reads one word at the end of a call: whether
# all was right, or the length of the list of changed_rows.
WAITS = {
    "touch_scores_": 3,
    "write_scores_": 2,
    "read_scores": 2,
    "admit_by_chance": 1,
    "mark_rows_": 3,
    "changed_rows": 2,
}


def sent(device, value):
    if isinstance(value, list):
        return [sent(device, one) for one in value]
    return device.of(value.clone()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("op", WAITS)
def test_where_the_host_waits(op):
    """More waits than these are a slip: each costs about as long as a kernel."""
    sample = SAMPLES[op][0]()
    with PretendedDevice() as device:
        given = {k: v if k in DESCRIPTIONS else sent(device, v) for k, v in sample.items()}
        getattr(ops, op)(**given)
        assert [note.op for note in device.reads] == [op] * WAITS[op]
        assert device.mixed == [] and device.without_kernel == []
