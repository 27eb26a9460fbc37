"""Conversion of TorchRec's static tables to dynamic tables (docs/guide/from_static_tables.md).

Imports `whole_model`, `modules`, `ranks`, `checkpoint_format`, `table` and the ground.
Start with `stock_collections` (untrained models), then read `trained_collections` (row i becomes the row of
id i) and `static_checkpoint`.
"""

from torchrec_dyn.migration.static_checkpoint import load_static
from torchrec_dyn.migration.stock_collections import make_dynamic
from torchrec_dyn.migration.trained_collections import from_static
