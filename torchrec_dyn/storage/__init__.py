"""The arrays of one table: id to row, row to numbers, free rows, changed rows.

Imports the ground; torch alone. Start with `id_map`, then `row_store`.

Rows never move, and state is plain tensors. Nothing here depends on policies, optimizer rules or ranks.
"""

from torchrec_dyn.storage.block_memory import check_directory, lacks_memory, lasting
from torchrec_dyn.storage.canonical_rows import (
    CanonicalRows,
    first_place,
    signed,
    unsigned,
)
from torchrec_dyn.storage.change_log import (
    ChangeLog,
    Version,
    most_log_bytes,
    note_changed,
    note_update,
    tokens_of,
    unrecorded,
)
from torchrec_dyn.storage.host_reads import (
    host_numbers,
    keep_in_use,
    on_device,
    places_of,
    read,
    stream_on,
    to_host,
    wait_for_stream,
)
from torchrec_dyn.storage.id_map import (
    BLOCKS,
    CLOCKS,
    SLOT_BYTES,
    SLOTS,
    TABLES,
    IdMap,
    arrays_of,
    canonical_keys,
    canonical_order,
    most_slots,
    new_key,
    reserve_maps,
)
from torchrec_dyn.storage.interrupts import change, commit, torn_error
from torchrec_dyn.storage.row_cache import CachedTables, RowCache
from torchrec_dyn.storage.row_changes import Added, Chosen, RowChange, joined, offsets_of, parts_of
from torchrec_dyn.storage.row_numbers import OpenForward, OpenForwards, RowNumbers
from torchrec_dyn.storage.row_store import (
    InitialRows,
    RowStore,
    TableBlocks,
    block_shift,
    blocks_of,
    most_block_bytes,
    most_store_bytes,
)
from torchrec_dyn.storage.table_lock import TableLock, changes, locked, turn_of
from torchrec_dyn.storage.touched_rows import SumRows
