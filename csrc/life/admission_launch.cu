#include "life/admission_kernels.h"
#include "simt_cuda.h"

TORCHREC_DYN_LAUNCH(torchrec_dyn::CheckOccurrences);
TORCHREC_DYN_LAUNCH(torchrec_dyn::AdmitByChance);
