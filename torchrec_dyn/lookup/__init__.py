"""The main path: ids to pooled rows, gradients to rows. START READING HERE.

Imports `table` and the rooms below; torch alone. Start with `table_group`: a forward and a backward of
the tables that one op call serves. `training_step` holds the order of a step, `batch_rows` how a batch
gets its rows.

A training step changes all tables of its group or none.
"""

from torchrec_dyn.lookup.gradient_reduction import Senders, asks_for_senders
from torchrec_dyn.lookup.table_group import TableGroup
