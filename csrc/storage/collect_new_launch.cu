#include "simt_cuda.h"
#include "storage/collect_new_kernels.h"

TORCHREC_DYN_LAUNCH(torchrec_dyn::ClaimWords);
TORCHREC_DYN_LAUNCH(torchrec_dyn::CountFirsts);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ReadOffsets);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ListNew);
