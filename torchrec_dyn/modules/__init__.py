"""The unsharded collections. The room is named after `torchrec.modules`.

Imports `state_dict`, `ranks`, `checkpoint_format`, `lookup`, `table`, `storage` and the ground.
Start with `unsharded_collections`: a collection holds tables (`unsharded_table`), and `unsharded_lookup`
runs their forwards.

The collections are ordinary modules: `.to`, deepcopy, pickling and `state_dict` work as usual.
"""

from torchrec_dyn.modules.description import (
    Description,
    GroupDescription,
    ShardDescription,
    TablePlan,
    describe_tables,
)
from torchrec_dyn.modules.feature_ids import (
    FeatureIds,
    FeatureReader,
    as_int64,
    check_keyed,
    check_keys_once,
    check_not_traced,
    read_features,
)
from torchrec_dyn.modules.fused_optimizer import (
    DynamicOptimizer,
    TablesOptimizer,
    saved_states,
)
from torchrec_dyn.modules.optimizer_choice import (
    check_fused_params,
    chosen_fused_params,
    chosen_optimizer,
    matching_optimizer,
    merged_fused_params,
    placement_options,
    placement_warning,
    with_fbgemm_dtype,
)
from torchrec_dyn.modules.table_configs import (
    check_id,
    check_size,
    check_unprocessed,
    check_unweighted,
    checked_configs,
    dynamic_config_by_table,
    initializer_of,
    number_by_table,
    pooled_outputs,
    pooling_of,
    row_dtype,
    with_row_dtype,
)
from torchrec_dyn.modules.unsharded_collections import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    UnshardedCollection,
    bags_of_samples,
    checked_inverse,
    outputs_by_sample,
)
from torchrec_dyn.modules.unsharded_table import UnshardedTable
from torchrec_dyn.modules.wrapper_checks import (
    check_is_no_dmp,
    check_not_for_inference,
    check_not_gathered,
    check_runs_once,
    model_being_sharded,
    refuses_quantization,
)
from torchrec_dyn.ranks import TableHandle
