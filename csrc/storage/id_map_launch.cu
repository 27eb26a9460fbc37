#include "simt_cuda.h"
#include "storage/id_map_kernels.h"

TORCHREC_DYN_LAUNCH(torchrec_dyn::MixIds);
TORCHREC_DYN_LAUNCH(torchrec_dyn::UnmixIds);
