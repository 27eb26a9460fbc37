"""A table that a device has filled holds what the CPU's would: the same ids, rows and content sums."""

import itertools

import pytest
import torch
from raw_maps import WHOLE
from table_cases import bits, ids_of

from torchrec_dyn import ops

CPU = torch.ops.torchrec_dyn
I64 = torch.int64
SHIFT, COLUMNS = 6, 10


def filled(library):
    """Returns the slots and blocks of a map that has grown, and lost ids, by the ops of `library`."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(-(2**63), 2**63 - 1, (900,), generator=draw)
    slots = library.new_slots(torch.empty(0, 2, dtype=I64), 800)
    blocks = [torch.empty(1 << SHIFT, COLUMNS) for _ in range(15)]
    library.insert(ids[:500], torch.arange(500), ids_of(0, 500), [slots], WHOLE)
    [grown] = library.grown_slots([slots], [1500], [0])
    left = library.erase(ids[100:300], [grown], WHOLE)
    library.insert(
        ids[500:], torch.cat([left, torch.arange(500, 700)]), ids_of(0, 400), [grown], WHOLE
    )
    kept = torch.cat([ids[:100], ids[300:]])
    rows, absent = library.lookup(kept, ids_of(0, 700), [grown], WHOLE)
    assert absent.item() == 0
    library.init_rows_(kept, rows, blocks, SHIFT, COLUMNS, 2, 1, [-1.0, 1.0, 0.0, 0.0, 0.0, 0.0], 7)
    written = torch.randn(200, COLUMNS, generator=draw)
    library.scatter_rows_(rows[400:600], written, blocks, SHIFT, COLUMNS)
    return grown, blocks


def contents(library, slots, blocks):
    """Returns cells, ids, rows and content sums, as a save reads them."""
    ids, rows = library.ids_between([slots], WHOLE, 0, -1)
    values = library.gather_rows(rows, blocks, SHIFT, COLUMNS, torch.float32)
    sums = [library.content_sum(ids, one, 2, 5) for one in (values, rows.view(-1, 1))]
    return [library.count_cells([slots], WHOLE, 8), ids, rows, bits(values), *sums]


@pytest.mark.usefixtures("device")
def test_contents_filled_and_read_by_any_two_devices_are_equal():
    expected = contents(CPU, *filled(CPU))
    for filler, reader in itertools.product((CPU, ops), repeat=2):
        found = contents(reader, *filled(filler))
        assert all(map(torch.equal, found, expected))
