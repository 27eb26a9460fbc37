#include "bag_lengths_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {

TORCHREC_DYN_LAUNCH(ReadLengths);
TORCHREC_DYN_LAUNCH(CopyOffsets);
TORCHREC_DYN_LAUNCH(ReadBegins);

}  // namespace torchrec_dyn
