#include "life/lowest_scores_kernels.h"
#include "lookup/admission_kernels.h"
#include "lookup/fill_new.h"
#include "lookup/listed_rows_kernels.h"
#include "lookup/row_changes_kernels.h"
#include "lookup/table_scores_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {

TORCHREC_DYN_LAUNCH(DecideAdmission, ReadAdmittedOffsets, ListAdmitted, KeyDecayed, ReadOrder, CopyListed, WriteInOrder,
                    FlagUnchanged, ReadChosenOffsets, FindFirstChosen, ListUnchanged, NumberNewRows, FillNew,
                    WriteFirstScores, CheckRemovedRows, ForgetScores, ReadTableScores, CheckWrittenRows,
                    WriteTableScores);
TORCHREC_DYN_LAUNCH(CountKeys, AddCopies, ChooseDigit, MarkLowest, CountMarked, ChooseTies, ListLowest, FlagTies,
                    WriteLowest, CheckTouchedRows, TouchScores);

}  // namespace torchrec_dyn
