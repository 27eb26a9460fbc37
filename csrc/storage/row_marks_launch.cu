#include "simt_cuda.h"
#include "storage/row_marks_kernels.h"

TORCHREC_DYN_LAUNCH(torchrec_dyn::CheckMarkedRows);
TORCHREC_DYN_LAUNCH(torchrec_dyn::MarkRows);
TORCHREC_DYN_LAUNCH(torchrec_dyn::FlagMarked);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ListMarked);
