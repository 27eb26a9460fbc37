"""The saved form of a table, and a reader of it that needs no model.

Imports `storage` and the ground; needs torch only. Start with `saved_tensor` (the layout of a table in a
checkpoint), then `checkpoint_reader` (a directory) and `saved_table` (one table of the directory).
docs/dev/checkpoint_format.md describes the format.

The saved form depends only on the contents of a table, not on plan, world size or history.
"""

from torchrec_dyn.checkpoint_format.checkpoint_reader import (
    SavedCheckpoint,
    file_inside,
    open_checkpoint,
    open_files,
    open_table,
)
from torchrec_dyn.checkpoint_format.chunked_tensor import ChunkedTensor
from torchrec_dyn.checkpoint_format.content_sums import (
    CHECKSUM_WORDS,
    DAMAGED,
    MODEL_CHECKSUM,
    MODEL_NAMES,
    MODEL_TENSORS,
    OPTIMIZER_CHECKSUM,
    OPTIMIZER_TENSORS,
    ROW_TENSORS,
    SUMMED,
    add_sums,
    as_words,
    compare_sums,
    content_sum,
    from_words,
    is_canonical,
    rows_summed,
    sum_of_small,
)
from torchrec_dyn.checkpoint_format.entries import (
    LOCK,
    Entry,
    SavedChain,
    commit_entry,
    commit_of,
    digest_of,
    digest_of_file,
    new_digest,
    outdated,
    read_chain,
    remove_entries,
)
from torchrec_dyn.checkpoint_format.file_writer import (
    FileWriter,
    naming,
    replace_file,
    sync_to_disk,
    write_beside,
)
from torchrec_dyn.checkpoint_format.place_reader import PlaceFiles, PlaceReader
from torchrec_dyn.checkpoint_format.places import (
    Place,
    PlaceLike,
    create_file,
    lasting_place_of,
    open_writer,
    place_of,
    remove_all,
    write_file,
)
from torchrec_dyn.checkpoint_format.renaming import (
    check_new_names,
    check_saved_names,
    checked_rename,
    marked,
    rename_tables,
    renamed_keys,
    without_mark,
)
from torchrec_dyn.checkpoint_format.row_source import SCORES, RowSource, rows_at
from torchrec_dyn.checkpoint_format.saved_config import (
    INITIALIZERS,
    check_config,
    check_config_is_whole,
    check_optimizer,
    from_bytes,
    mean_over_cuts,
    named_initializer,
    optimizer_config,
    own_policies_of,
    saved_initializer,
    table_config,
    to_bytes,
    warn_of_options,
    with_options_of,
)
from torchrec_dyn.checkpoint_format.saved_table import MergedTable, SavedTable
from torchrec_dyn.checkpoint_format.saved_tensor import Part, SavedTensor, numbers_of, whole_tensor
from torchrec_dyn.checkpoint_format.store_path import WRITTEN, StorePath
