"""The main path: ids to pooled rows, gradients to rows. START READING HERE.

Imports `table`, `life`, `storage` and the ground; torch alone. Start with `table_group`: the forward and
the backward of the tables that one op call serves. `training_step` gives rows to unseen ids, and lists the
order of a step with policies.

A training forward that fails changes no table of its group.
"""

from torchrec_dyn.lookup.batch import Batch, PrefetchedStep, no_scores, wrong_scores
from torchrec_dyn.lookup.feature_uses import uses_by_feature, uses_of
from torchrec_dyn.lookup.gradient_reduction import Senders, asks_for_senders, repeat_rows
from torchrec_dyn.lookup.largest import largest_of_bags, largest_rows, pooled_output
from torchrec_dyn.lookup.table_group import TableGroup
