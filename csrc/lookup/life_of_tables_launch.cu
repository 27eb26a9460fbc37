#include "life/lowest_scores_kernels.h"
#include "lookup/admission_kernels.h"
#include "lookup/listed_rows_kernels.h"
#include "lookup/row_changes_kernels.h"
#include "lookup/table_scores_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {

TORCHREC_DYN_LAUNCH(DecideAdmission);
TORCHREC_DYN_LAUNCH(ReadAdmittedOffsets);
TORCHREC_DYN_LAUNCH(ListAdmitted);
TORCHREC_DYN_LAUNCH(KeyDecayed);
TORCHREC_DYN_LAUNCH(ReadOrder);
TORCHREC_DYN_LAUNCH(CopyListed);
TORCHREC_DYN_LAUNCH(WriteInOrder);
TORCHREC_DYN_LAUNCH(FlagUnchanged);
TORCHREC_DYN_LAUNCH(ReadChosenOffsets);
TORCHREC_DYN_LAUNCH(FindFirstChosen);
TORCHREC_DYN_LAUNCH(ListUnchanged);
TORCHREC_DYN_LAUNCH(NumberNewRows);
TORCHREC_DYN_LAUNCH(WriteFirstScores);
TORCHREC_DYN_LAUNCH(CheckRemovedRows);
TORCHREC_DYN_LAUNCH(ForgetScores);
TORCHREC_DYN_LAUNCH(ReadTableScores);
TORCHREC_DYN_LAUNCH(CheckWrittenRows);
TORCHREC_DYN_LAUNCH(WriteTableScores);

TORCHREC_DYN_LAUNCH(CountKeys);
TORCHREC_DYN_LAUNCH(AddCopies);
TORCHREC_DYN_LAUNCH(ChooseDigit);
TORCHREC_DYN_LAUNCH(MarkLowest);
TORCHREC_DYN_LAUNCH(CountMarked);
TORCHREC_DYN_LAUNCH(ChooseTies);
TORCHREC_DYN_LAUNCH(ListLowest);
TORCHREC_DYN_LAUNCH(FlagTies);
TORCHREC_DYN_LAUNCH(WriteLowest);
TORCHREC_DYN_LAUNCH(CheckTouchedRows);
TORCHREC_DYN_LAUNCH(TouchScores);

}  // namespace torchrec_dyn
