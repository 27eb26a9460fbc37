"""One table, or one column shard of it, on one rank.

Imports `life`, `storage` and the ground; torch alone. Start with `shard`: TableShard has the calls on the
arrays of a table and the life of its rows (`arrays`). `insertion` gives rows to unseen ids and frees rows.
`contents` is the saved form of a table, `row_writes` the writes of many rows.

A call that fails changes nothing; inputs are checked first (`checks`).
"""

from torchrec_dyn.table.arrays import Room, reserve_tables
from torchrec_dyn.table.checks import ROW_DTYPES, check_ids, check_rows, check_state, present_gpu
from torchrec_dyn.table.contents import (
    named_states,
    read_tensor,
    stamp_of,
)
from torchrec_dyn.table.counters import (
    EXPECTING,
    Counted,
    Numbers,
    SharedCounters,
    on_shared_counters,
)
from torchrec_dyn.table.insertion import (
    NewIds,
    TableChange,
    count_late_grads,
    fresh,
    insert_unseen,
    prepare_unseen,
)
from torchrec_dyn.table.prepared_tables import PreparedTables
from torchrec_dyn.table.row_writes import (
    Commit,
    append,
    beside,
    complete,
    copy_rows,
    merge,
    replace,
    with_same_contents,
)
from torchrec_dyn.table.sampling import check_draw, draw_places, ids_at
from torchrec_dyn.table.shard import TableShard, set_clocks
