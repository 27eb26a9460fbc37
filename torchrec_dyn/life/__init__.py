"""Who gets a row and who loses it: admission, eviction, expiry.

Imports `storage` and the root; torch alone. Start with `row_life`: it holds the scores of a table and
reads its policies. The order of a step stands in `lookup/training_step.py`.

Column shards of a table decide alike without a word between them, so nothing here looks at ranks, row
numbers or Python's graphs.
"""

from torchrec_dyn.life.admission_counters import WaitingIds
from torchrec_dyn.life.clock import Clock, time_fault
from torchrec_dyn.life.row_life import Decision, RowLife, has_life
from torchrec_dyn.life.saved_life import BY_ROW, LIFE, NOT_BY_ROW, check_life, last_step
from torchrec_dyn.life.scores import MOST_COUNT, NO_STEP, SCORE_BYTES, Scores
