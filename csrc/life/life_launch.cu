#include "life/lowest_scores_kernels.h"
#include "life/scores_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {

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
