"""The life of rows: admission gives rows to ids, eviction and expiry take them.

Imports `storage` and the ground; torch alone. Start with `row_life`: it keeps the scores of a table and
applies its policies. The order of a step is in `lookup/training_step.py`.

The column shards of a table decide the same without communication. So no decision depends on ranks, row
numbers or Python's graphs.
"""

from torchrec_dyn.life.admission import (
    ADMITTED,
    BEGUN,
    DROPPED,
    EVERY_ID,
    LEFT_OUT,
    OCCURRED,
    AdmissionCounters,
    AdmissionRule,
    AdmissionRules,
    Admitted,
    Asked,
    CounterTables,
    most_counters,
    nobody,
)
from torchrec_dyn.life.clock import Clock, time_fault
from torchrec_dyn.life.expiry import AgeLimit
from torchrec_dyn.life.lowest_rows import expired_rows, list_rows, lowest_rows
from torchrec_dyn.life.row_life import STEPS_WITHOUT_TIME, RowLife, SearchedRows
from torchrec_dyn.life.saved_life import BY_ROW, LIFE, NOT_BY_ROW, check_life, last_step
from torchrec_dyn.life.scores import NO_STEP, SCORE_BYTES, ScoredMaps, Scores
