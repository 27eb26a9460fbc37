"""The sharding types: how ids are sent to their rows, and how outputs are sent back.

Imports `modules`, `lookup`, `table`, `storage` and the ground. Start with `shardings`, which has a class for
each sharding type of TorchRec, composed of `dists` and `lookups`. A new sharding type also needs a
line in `SHARDING_TRAITS` of `ranks`; all other code reads that table.

All-to-alls, awaitables and contexts are TorchRec's, but those of a world of one rank.
"""

from torchrec_dyn.sharding.batches import (
    BatchCheck,
    Expansion,
    Restoration,
    SendOnce,
    pad_batch,
    with_an_example,
    without_examples,
)
from torchrec_dyn.sharding.dists import (
    ArrivedIds,
    StayingOutput,
    divide,
    mean_divisor,
    outputs_by_column,
    remove_stale_forwards,
)
from torchrec_dyn.sharding.lookups import (
    MAX_WIDTH_KEY,
    OPTIONS_KEY,
    PrefetchedSteps,
    TableOptions,
    kernels_of,
    prefetch,
)
from torchrec_dyn.sharding.rows_to_bags import RowsContext
from torchrec_dyn.sharding.sent_batch import check_modes, sent_batch
from torchrec_dyn.sharding.shardings import (
    POOLED_SHARDINGS,
    SEQUENCE_SHARDINGS,
    SendsRows,
    pooled_sharding_of,
    sends_rows,
)
