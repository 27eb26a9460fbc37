#include "simt_cuda.h"
#include "storage/id_map_kernels.h"

TORCHREC_DYN_LAUNCH(torchrec_dyn::MixIds);
TORCHREC_DYN_LAUNCH(torchrec_dyn::UnmixIds);
TORCHREC_DYN_LAUNCH(torchrec_dyn::FindRows);
TORCHREC_DYN_LAUNCH(torchrec_dyn::CheckRows);
TORCHREC_DYN_LAUNCH(torchrec_dyn::InsertIds);
TORCHREC_DYN_LAUNCH(torchrec_dyn::MoveSlots);
TORCHREC_DYN_LAUNCH(torchrec_dyn::FindLeaving);
TORCHREC_DYN_LAUNCH(torchrec_dyn::MarkLeaving);
TORCHREC_DYN_LAUNCH(torchrec_dyn::FirstOfRun);
TORCHREC_DYN_LAUNCH(torchrec_dyn::CloseGaps);
TORCHREC_DYN_LAUNCH(torchrec_dyn::SumProbeLengths);
TORCHREC_DYN_LAUNCH(torchrec_dyn::CheckNewIndex);
TORCHREC_DYN_LAUNCH(torchrec_dyn::FillNew);
