#include "life/scores_kernels.h"
#include "simt_cuda.h"

TORCHREC_DYN_LAUNCH(torchrec_dyn::CheckTouchedRows);
TORCHREC_DYN_LAUNCH(torchrec_dyn::TouchScores);
TORCHREC_DYN_LAUNCH(torchrec_dyn::CheckWrittenScores);
TORCHREC_DYN_LAUNCH(torchrec_dyn::FreeScores);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ClaimScores);
TORCHREC_DYN_LAUNCH(torchrec_dyn::WriteScores);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ReadScores);
TORCHREC_DYN_LAUNCH(torchrec_dyn::MixToOrder);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ReadOrderKeys);
TORCHREC_DYN_LAUNCH(torchrec_dyn::WriteOrder);
