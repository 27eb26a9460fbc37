#include "lookup/find_and_pool_kernels.h"
#include "lookup/new_rows_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {

TORCHREC_DYN_LAUNCH(ReadBagLengths<int32_t>);
TORCHREC_DYN_LAUNCH(ReadBagLengths<int64_t>);
TORCHREC_DYN_LAUNCH(CopyOffsets<int32_t>);
TORCHREC_DYN_LAUNCH(CopyOffsets<int64_t>);
TORCHREC_DYN_LAUNCH(CompareOffsets<int32_t>);
TORCHREC_DYN_LAUNCH(CompareOffsets<int64_t>);
TORCHREC_DYN_LAUNCH(ReadBegins);
TORCHREC_DYN_LAUNCH(NumberNewRows);

}  // namespace torchrec_dyn
