#include "simt_cuda.h"
#include "storage/canonical_ids_kernels.h"

TORCHREC_DYN_LAUNCH(torchrec_dyn::FlagUsed);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ListUsed);
TORCHREC_DYN_LAUNCH(torchrec_dyn::WriteIdsOfRows);
TORCHREC_DYN_LAUNCH(torchrec_dyn::CountCells);
TORCHREC_DYN_LAUNCH(torchrec_dyn::CountInside);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ListInside);
TORCHREC_DYN_LAUNCH(torchrec_dyn::UnmixSorted);
