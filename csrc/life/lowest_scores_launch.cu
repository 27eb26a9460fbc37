#include "life/lowest_scores_kernels.h"
#include "simt_cuda.h"

TORCHREC_DYN_LAUNCH(torchrec_dyn::CountKeys);
TORCHREC_DYN_LAUNCH(torchrec_dyn::AddCopies);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ChooseDigit);
TORCHREC_DYN_LAUNCH(torchrec_dyn::MarkLowest);
TORCHREC_DYN_LAUNCH(torchrec_dyn::CountMixed);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ChooseMixed);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ListLowest);
TORCHREC_DYN_LAUNCH(torchrec_dyn::FlagTies);
TORCHREC_DYN_LAUNCH(torchrec_dyn::WriteLowest);
