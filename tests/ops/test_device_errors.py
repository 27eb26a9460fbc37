"""Ops on a GPU do not wait for errors in the contents of their arguments: the next lookup raises them."""

import pytest
import torch
from device_ops import DESCRIPTIONS
from mock_device import CUDA, MockDevice
from op_samples import SAMPLES, update, whole

from torchrec_dyn import ops
from torchrec_dyn.storage import CanonicalRows
from torchrec_dyn.storage.id_map import IdMap
from torchrec_dyn.table.insertion import find_rows

CPU = torch.ops.torchrec_dyn
I64 = torch.int64
FAR = 2**63 - 1
# Ops that report errors, with arguments that have two: the error names the first.
WRONG = [
    ("insert", {"new_rows": whole(-5, FAR)}),
    ("insert", {"slots": [torch.empty(0, 2, dtype=I64)] * 2}),
    ("grown_slots", {"slots": [torch.ones(8, 2, dtype=I64)] * 2, "capacities": [8, 4]}),
    ("init_rows_", {"rows": whole(12, -1)}),
    ("gather_rows", {"rows": whole(-2)}),
    ("scatter_rows_", {"rows": whole(0, FAR)}),
    ("mark_rows_", {"rows": whole(0, 7, -1, 7, 3, FAR)}),
    ("gather_pool", {"rows": whole(0, 1, -1, 9, 8)}),
    ("gather_pool", {"offsets": whole(0, 2, 1, 0, 5)}),
    ("gather_pool", {"offsets": whole(0, 2, 1, 4, 6)}),
    ("update_rows_", {"offsets": whole(0, 2, 1, 0, 5), "rows": whole(9, 0, 0, 0, 0)}),
    ("update_rows_", {"offsets": whole(-1, 2, 1, 4, 6)}),
    ("update_rows_", {"rows": whole(0, -2, 0, 9, 0), "senders": whole(0, -7, 3, 1, 2).int()}),
    ("update_rows_", {"senders": whole(0, -7, 3, 2**20, 2).int()}),
    ("update_rows_", update(3) | {"streams": whole(1, 0, -4, 2, 0, 0).view(2, 3)}),
    ("sort_by_owner", {"lengths": whole(4, -1, 1)}),
    ("sort_by_owner", {"lengths": whole(1, 1, 1), "weights": None}),
    ("sort_by_owner", {"ids": whole(), "lengths": whole(0, 1), "weights": None}),
]


@pytest.fixture
def device():
    with MockDevice() as device:
        yield device


def copied(value):
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def sent(device, value):
    if isinstance(value, list):
        return [sent(device, one) for one in value]
    return device.of(value) if isinstance(value, torch.Tensor) else value


def call(device, op, change):
    """Calls an op on the device. Returns its arguments before the call, after it, and the result."""
    given = {**SAMPLES[op][0](), **change}
    after = {name: copied(value) for name, value in given.items()}
    there = {k: v if k in DESCRIPTIONS else sent(device, v) for k, v in after.items()}
    return given, after, getattr(ops, op)(**there)


def assert_unchanged(given, after):
    for value, now in zip(given.values(), after.values(), strict=True):
        if isinstance(value, list):
            assert_unchanged(dict(enumerate(value)), dict(enumerate(now)))
        else:
            assert torch.equal(value, now) if isinstance(value, torch.Tensor) else value == now


def text_of(op, error):
    """Returns the text without the stack, which torch puts behind it."""
    text = str(error.value).split("\n")[0]
    assert text.startswith(f"{op}: expected")
    return text


def text_of_cpu(op, change):
    with pytest.raises(RuntimeError) as error:
        getattr(CPU, op)(**{k: copied(v) for k, v in {**SAMPLES[op][0](), **change}.items()})
    return text_of(op, error)


class Lookup:
    """A map of the device with the ids 5 and 6."""

    def __init__(self, device):
        self.id_map, self._device = IdMap(device=CUDA), device
        self.id_map.reserve(2)
        self.id_map.insert(device.of(whole(5, 6)), device.of(whole(0, 1)))

    def __call__(self):
        """Returns the rows of ids: one has a row."""
        return find_rows(self.id_map, self._device.of(whole(5, 7, 8, 9))).memory


@pytest.mark.parametrize(("op", "change"), WRONG, ids=[op for op, _ in WRONG])
def test_the_next_lookup_raises_the_cpus_error(device, op, change):
    lookup = Lookup(device)
    given, after, _ = call(device, op, change)
    assert device.reads == [], "an error costs no wait"
    assert_unchanged(given, after)
    with pytest.raises(RuntimeError) as error:
        lookup()
    text = text_of(op, error)
    assert text.startswith(text_of_cpu(op, change) + " An earlier call on this GPU has found this")
    assert "TORCHREC_DYN_SYNC_ERRORS=1" in text
    device.forget()
    assert lookup().tolist() == [0, -1, -1, -1], "an error is raised once"
    if device.is_mock:
        reads = [note.op for note in device.reads]
        assert reads == ["_local_scalar_dense"], "the one wait of an edit"


def test_the_first_of_two_errors_is_raised(device):
    lookup = Lookup(device)
    call(device, *WRONG[0])
    call(device, *WRONG[3])
    with pytest.raises(RuntimeError, match=r"insert: expected rows in \[0, 2\^63 - 1\), got -5"):
        lookup()
    lookup()


def test_valid_calls_report_nothing(device):
    for op in sorted({op for op, _ in WRONG}):
        for make in SAMPLES[op]:
            call(device, op, make())
        ops.raise_errors(device.of(whole(0)))


def test_one_wrong_offset_and_no_bags(device):
    """No thread reads the offset but the one that reports."""
    given = {"rows": whole(), "offsets": whole(1), "segments": torch.empty(0, 5, dtype=I64)}
    call(device, "gather_pool", {**given, "elements": 0})
    with pytest.raises(RuntimeError, match=r"offsets inside the ids \[0, 0\], got 1 to 1"):
        ops.raise_errors(device.of(whole(0)))


def test_contents_are_not_read_after_an_error(device):
    """State dicts are made of them."""
    id_map = Lookup(device).id_map
    call(device, *WRONG[0])
    with pytest.raises(RuntimeError, match="got -5"):
        id_map.contents()
    assert sorted(id_map.contents()[0].memory.tolist()) == [5, 6]


def test_rows_are_not_listed_after_an_error(device):
    """Checkpoints and deltas read the list."""
    id_map = Lookup(device).id_map
    call(device, *WRONG[0])
    with pytest.raises(RuntimeError, match="got -5"):
        CanonicalRows(id_map, "t", lambda: None)
    ids, _ = CanonicalRows(id_map, "t", lambda: None).read(0, 2)
    assert sorted(ids.memory.tolist()) == [5, 6]


def test_counts_are_right_where_another_thread_has_raised_the_error(device, monkeypatch):
    lookup = Lookup(device)
    call(device, *WRONG[0])
    monkeypatch.setattr(ops, "raise_errors", lambda like: None)
    assert lookup().tolist() == [0, -1, -1, -1]
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="got -5"):
        lookup()


def test_the_cpu_has_no_errors_that_wait():
    ops.raise_errors(whole(0))
    _, absent = ops.lookup(**SAMPLES["lookup"][0]())
    assert absent.device.type == "cpu" and absent.min() >= 0
