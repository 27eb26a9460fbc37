"""Conversion of TorchRec's static tables to dynamic tables (docs/guide/port/port.md).

Imports `whole_model`, `modules`, `ranks`, `checkpoint_format`, `table` and the ground.
Start with `stock_collections` (models without their rows, or with row i as the row of id i), then read
`static_checkpoint`.
"""

from torchrec_dyn.migration.static_checkpoint import load_static
from torchrec_dyn.migration.stock_collections import from_static, make_dynamic
