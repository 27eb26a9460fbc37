"""Tools beside training: print, compare, verify, export and import tables (docs/guide/inspect/export.md).

Imports `whole_model`, `ranks`, `checkpoint_format`, `table`, `life`, `storage` and the ground. Start with
`table_export`. `inspection`, `comparison` and `doctor` are commands of
`python -m torchrec_dyn`.
"""

from torchrec_dyn.tools.comparison import print_difference
from torchrec_dyn.tools.doctor import print_report
from torchrec_dyn.tools.inspection import (
    inspect_checkpoint,
    plot_fault,
    verify_checkpoint,
    verify_rows_file,
)
from torchrec_dyn.tools.safetensors_rows import export_rows, export_saved_rows, import_rows
from torchrec_dyn.tools.table_export import BATCH_BYTES, export_table, read_batches
